"""local.py with real processes, a real broker and the real Ivy (against a repository in a folder)."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from filelock import FileLock
from pydantic import SecretStr
from structlog.testing import capture_logs

from tidemark import __main__ as cli
from tidemark import kafka, local
from tidemark.local import BrokerFailed, JarsWrong, Lease, LeaseHeld, PortBusy
from tidemark.model import Catalog, Topic, expect
from tidemark.session import JavaMissing
from tidemark.settings import Settings


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


# ---- Java


def java_that_says(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    program = folder / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    program.chmod(0o755)
    return program


def test_java_home_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = java_that_says(tmp_path / "home" / "bin", "21.0.1")
    java_that_says(tmp_path / "path", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    assert local.java() == wanted


@pytest.mark.parametrize("old", ["1.8.0_392", "11.0.2"])
def test_java_home_too_old_gives_way_to_path(old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_that_says(tmp_path / "home" / "bin", old)
    wanted = java_that_says(tmp_path / "path", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    assert local.java() == wanted


def test_no_java_new_enough_is_a_sentence_that_names_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = java_that_says(tmp_path / "home" / "bin", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(JavaMissing, match=f"version 17 or newer is needed; found {old} from JAVA_HOME is Java 11"):
        local.java()


# ---- jars


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in a folder that holds one jar, and an ivy.xml and jars.sha256 that ask for it."""
    jar = tmp_path / "ivy" / "local" / "org.example" / "tide" / "1.0" / "jars" / "tide.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"a jar")
    ivys = jar.parent.parent / "ivys"
    ivys.mkdir()
    (ivys / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="org.example" module="tide" revision="1.0"/></ivy-module>'
    )
    asked, pins = tmp_path / "ivy.xml", tmp_path / "jars.sha256"
    asked.write_text(
        '<ivy-module version="2.0"><info organisation="test" module="jars"/>'
        '<configurations><conf name="spark"/><conf name="broker"/></configurations>'
        '<dependencies><dependency org="org.example" name="tide" rev="1.0" conf="spark->default"/></dependencies></ivy-module>'
    )
    pins.write_text(f"{hashlib.sha256(b'a jar').hexdigest()}  spark/tide-1.0.jar\n")
    monkeypatch.setattr(local, "IVY", asked)
    monkeypatch.setattr(local, "HASHES", pins)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Divy.default.ivy.user.dir={tmp_path / 'ivy'}")
    return jar


def test_missing_jars_are_fetched_and_then_never_again(repository: Path, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path / "home")
    local.fetch_jars(settings)
    assert [jar.read_bytes() for jar in local.jars_of(settings, "spark")] == [b"a jar"]
    repository.unlink()
    local.fetch_jars(settings)
    assert sorted(p.name for p in settings.jars.iterdir()) == ["checked", "ivy.log", "lock", "spark"]


def test_fetching_says_how_far_it_is(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, ended = iter([False]), local.ended
    monkeypatch.setattr(local, "ended", lambda process, within: next(looks, None) is None and ended(process, 60))
    with capture_logs() as said:
        local.fetch_jars(Settings(_env_file=None, home=tmp_path / "home"))
    assert {"event": "fetching jars", "log_level": "info", "fetched": 0, "of": 1} in said


def test_fetched_jar_with_another_hash_is_removed_and_named(repository: Path, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path / "home")
    repository.write_bytes(b"another jar")
    with pytest.raises(JarsWrong, match=r"spark/tide-1\.0\.jar: the file fetched is not the one pinned"):
        local.fetch_jars(settings)
    assert list(settings.jars.rglob("*.jar")) == []


def test_damaged_jar_is_fetched_again_when_no_stamp_vouches_for_it(repository: Path, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path / "home")
    (settings.jars / "spark").mkdir(parents=True)
    (settings.jars / "spark" / "tide-1.0.jar").write_bytes(b"half")
    local.fetch_jars(settings)
    assert (settings.jars / "spark" / "tide-1.0.jar").read_bytes() == b"a jar"


def test_jar_of_an_earlier_release_is_removed(repository: Path, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path / "home")
    (settings.jars / "spark").mkdir(parents=True)
    (settings.jars / "spark" / "tide-0.9.jar").write_bytes(b"an old jar")
    local.fetch_jars(settings)
    assert [p.name for p in (settings.jars / "spark").iterdir()] == ["tide-1.0.jar"]


def test_failing_ivy_is_a_sentence_that_names_its_log(repository: Path, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path / "home")
    local.IVY.write_text("<ivy-module")
    with pytest.raises(JarsWrong, match=f"Ivy could not fetch the jars; it says why in {settings.jars / 'ivy.log'}"):
        local.fetch_jars(settings)


def test_missing_jar_names_the_command(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(JarsWrong, match=r"lacks commons-pool2.*`tidemark jars` fetches them"):
        local.jars_of(Settings(_env_file=None, home=tmp_path / "empty"), "spark")


def test_jars_of_this_checkout_are_the_pinned_ones(jars: Path) -> None:
    found = {f"{p.parent.name}/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in jars.rglob("*.jar")}
    assert found == local.pinned()


# ---- processes

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_started_process_has_its_own_session_its_log_and_its_environment(settings: Settings) -> None:
    said = "import os, time; print('tide is', os.environ['TIDE'], flush=True); time.sleep(600)"
    process = local.start(settings, "speaker", [sys.executable, "-c", said], {"TIDE": "high"})
    until(lambda: process.log.read_text() == "tide is high\n")
    assert os.getsid(process.pid) == process.pid
    assert local.running(settings, "speaker") == process
    assert local.processes(settings) == [process]


def test_a_long_log_begins_again_under_the_process_that_writes_it(settings: Settings) -> None:
    lines = "import itertools, time\nfor n in itertools.count(): print('tide', n, flush=True); time.sleep(0.001)"
    process = local.start(settings, "speaker", [sys.executable, "-c", lines])
    until(lambda: process.log.stat().st_size > 2_000)
    assert local.turn_logs(settings) == []  # not long enough
    assert local.turn_logs(settings, most=2_000) == [process.log]
    until(lambda: process.log.read_text().count("\n") > 10)
    earlier, later = (p.read_text().splitlines() for p in (process.log.with_name("speaker.log.1"), process.log))
    assert earlier[0] == "tide 0" and int(later[1].removeprefix("tide ")) > len(earlier) > 100  # and no hole in front of it


def test_what_was_told_begins_again_as_a_long_log_does(settings: Settings) -> None:
    told = settings.state / "alerts.jsonl"
    told.parent.mkdir(parents=True)
    told.write_text("{}\n" * 100)
    assert local.turn_logs(settings) == []
    assert local.turn_logs(settings, most=200) == [told]
    assert (told.read_text(), told.with_name("alerts.jsonl.1").read_text()) == ("", "{}\n" * 100)


def test_start_of_a_running_name_returns_the_running_process(settings: Settings) -> None:
    first = local.start(settings, "sleeper", SLEEPER)
    assert local.start(settings, "sleeper", SLEEPER) == first


def test_stopped_process_is_gone_and_a_second_stop_says_so(settings: Settings) -> None:
    process = local.start(settings, "sleeper", SLEEPER)
    assert local.stop(settings, "sleeper") is True
    assert not psutil.pid_exists(process.pid)
    assert local.running(settings, "sleeper") is None
    assert local.stop(settings, "sleeper") is False


def test_process_that_ended_by_itself_does_not_run(settings: Settings) -> None:
    process = local.start(settings, "brief", [sys.executable, "-c", "pass"])
    until(lambda: not process.alive())
    assert local.running(settings, "brief") is None


def test_process_deaf_to_sigterm_is_killed_with_its_children(settings: Settings) -> None:
    process = local.start(settings, "stubborn", [sys.executable, "-c", STUBBORN])
    until(lambda: process.log.read_text().startswith("child ") and process.log.read_text().endswith("\n"))
    child = psutil.Process(int(process.log.read_text().split()[1]))
    assert local.stop(settings, "stubborn", patience=0.2) is True
    assert not process.alive()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_a_killed_leader_left_in_its_session_is_ended_by_a_stop(settings: Settings) -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    process = local.start(settings, "leader", [sys.executable, "-c", script])
    until(lambda: len(local.orphans(process)) == 2)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not process.alive())
    [left] = [one for one in local.orphans(process) if one.pid != process.pid]
    assert local.stop(settings, "leader") is False
    until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)


def test_recycled_pid_is_neither_running_nor_killed(settings: Settings) -> None:
    with subprocess.Popen(SLEEPER) as stranger:
        try:
            process = local.start(settings, "sleeper", SLEEPER)
            local.stop(settings, "sleeper")
            record = {**asdict(process), "pid": stranger.pid, "created": process.created - 100}
            (settings.state / "processes" / "sleeper.json").write_text(json.dumps(record, default=str))
            assert local.running(settings, "sleeper") is None
            assert local.stop(settings, "sleeper") is False
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_number_of_a_leader_that_leads_another_session_now_ends_nothing_of_it(settings: Settings) -> None:
    """As after a restart of a container, where numbers begin again: the shell that types `tidemark down` may have one of ours."""
    with subprocess.Popen(SLEEPER, start_new_session=True) as stranger:
        try:
            began = local.since_boot(psutil.Process(stranger.pid)) - 100
            record = {"name": "sleeper", "pid": stranger.pid, "created": began, "argv": SLEEPER, "log": "x.log"}
            kept = settings.state / "processes" / "sleeper.json"
            kept.parent.mkdir(parents=True)
            kept.write_text(json.dumps(record | {"boot": local.boot()}))
            assert local.stop(settings, "sleeper") is False
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_what_is_started_while_one_of_its_name_ends_keeps_its_record(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tidemark up` in another terminal, between the end of the old process and that of the stop."""
    local.start(settings, "sleeper", SLEEPER)
    waited, later = psutil.wait_procs, []

    def ended(*said: Any, **more: Any) -> Any:
        gone = waited(*said, **more)
        later.append(local.start(settings, "sleeper", SLEEPER))
        return gone

    monkeypatch.setattr(psutil, "wait_procs", ended)
    assert local.stop(settings, "sleeper")
    assert local.running(settings, "sleeper") == later[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always on a full disk: Linux has one")
def test_what_cannot_be_recorded_does_not_run_on_unknown(settings: Settings) -> None:
    folder = settings.state / "processes"
    folder.mkdir(parents=True)
    (folder / f"sleeper.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        local.start(settings, "sleeper", SLEEPER)
    assert local.STARTED[-1].wait(20) == -signal.SIGKILL


def test_what_a_version_before_has_started_is_ended_by_this_one(settings: Settings) -> None:
    """Its records have the time of the clock, and no name of the machine's run."""
    process = local.start(settings, "sleeper", SLEEPER)
    record = asdict(process) | {"created": psutil.Process(process.pid).create_time()}
    record.pop("boot")
    (settings.state / "processes" / "sleeper.json").write_text(json.dumps(record, default=str))
    assert local.stop_all(settings) == ["sleeper"]
    assert not process.alive()


@pytest.mark.parametrize("step", [-5, 5])
def test_a_step_of_the_clock_makes_no_stranger_of_a_process(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    process, before = local.start(settings, "sleeper", SLEEPER), psutil.boot_time()
    for place in ("psutil._pslinux.boot_time", "psutil.boot_time"):
        monkeypatch.setattr(place, lambda: before + step)
    assert local.running(settings, "sleeper") == process
    assert [one.pid for one in local.orphans(process)] == [process.pid]
    assert local.stop(settings, "sleeper")


def test_stop_all_ends_the_youngest_first(settings: Settings) -> None:
    for name in ("broker", "stream", "producer"):
        local.start(settings, name, SLEEPER)
    assert local.stop_all(settings) == ["producer", "stream", "broker"]
    assert local.processes(settings) == []


def test_what_a_demo_kept_is_forgotten_wherever_it_is_and_nothing_else(settings: Settings, tmp_path: Path) -> None:
    """The lake's folder may be one that holds more."""
    apart = settings.model_copy(update={"lake": tmp_path / "elsewhere"})
    kept = [apart.lake_path / "views" / "visits", apart.checkpoints / "main", apart.state / "main", apart.home / "kafka"]
    others = [apart.lake_path / "mine", apart.home / "jars"]
    for folder in (*kept, *others):
        folder.mkdir(parents=True)
    assert local.forget(apart) == [] and all(folder.exists() for folder in (*kept, *others))  # no demo has begun here
    (apart.state / "demo.json").write_text("{}")
    gone = local.forget(apart)
    assert {apart.lake_path / "views", apart.checkpoints, apart.state, apart.home / "kafka"} == {*gone}
    assert [folder.exists() for folder in (*kept, *others)] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("log/tickets", "{lake}/log/tickets has records"),  # of a pipeline that is not listed any more
        ("log/orders", "{lake}/log/orders has records"),
        ("views/payment_days", "{lake}/views/payment_days has records"),
        ("kafka/data/tickets-2", "topic tickets in {home}/kafka has records"),
        ("kafka/data/orders-0", "topic orders in {home}/kafka has records"),
        ("log/page_views", None),
        ("views/hourly_traffic", None),
        ("views/hourly_traffic_v0", None),  # of an earlier release's pipeline
        ("kafka/data/page_views-0", None),
        ("kafka/data/__consumer_offsets-0", None),
        ("kafka/data/notify_sent-0", None),
        ("kafka/data/tickets-0.5f-delete", None),
        ("empty", None),
    ],
)
def test_home_into_which_others_have_kept_events_beside_a_demo_is_not_forgotten(
    settings: Settings, what: str, says: str | None
) -> None:
    """The demo has sent to page_views alone; and a topic that nobody sent to has an empty segment, and an empty log."""
    if what.startswith("kafka"):
        (settings.home / what).mkdir(parents=True)
        (settings.home / what / "00000000000000000000.log").write_bytes(b"a batch")
    elif what != "empty":
        write_deltalake(settings.lake_path / what, pa.table({"id": [1]}))
    (settings.home / "kafka/data/mine-0").mkdir(parents=True)
    (settings.home / "kafka/data/mine-0" / "00000000000000000000.log").touch()
    DeltaTable.create(settings.lake_path / "log" / "mine", Schema.from_arrow(pa.schema([("id", pa.int64())])))
    settings.state.mkdir(parents=True)
    (settings.state / "demo.json").write_text('{"page_views": "2026-11-18"}')
    wanted = [says.format(lake=settings.lake_path, home=settings.home.absolute())] if says else []
    assert local.others(settings) == wanted
    assert (local.forget(settings) == []) == bool(says)
    assert settings.state.exists() == bool(says)


def test_what_was_wanted_and_a_power_cut_has_emptied_is_that_the_stream_runs(settings: Settings) -> None:
    local.want(settings, "main", "stopped", "why", "a test")
    assert local.wanted(settings, "main")["state"] == "stopped"
    (settings.state / "main" / "desired.json").write_text("")
    assert local.wanted(settings, "main")["state"] == "running"


# ---- leases

HOLDER = """
import sys, time
from pathlib import Path
from tidemark.local import Lease
with Lease(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_lease_held_elsewhere_names_its_holder_and_its_path(tmp_path: Path) -> None:
    path = tmp_path / "speed.lease"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "held\n"
            with pytest.raises(LeaseHeld, match=f"process {holder.pid} holds {path};"), Lease(path):
                pass
        finally:
            holder.kill()


def test_lease_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    path = tmp_path / "speed.lease"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        holder.kill()
    with Lease(path):
        assert path.read_text() == str(os.getpid())


def test_lease_is_refused_twice_in_one_process_and_free_after_its_block(tmp_path: Path) -> None:
    first, second = Lease(tmp_path / "new folder" / "speed.lease"), Lease(tmp_path / "new folder" / "speed.lease")
    with first, pytest.raises(LeaseHeld, match=f"process {os.getpid()} holds"), second:
        pass
    with second:
        pass


def test_lease_waits_for_one_who_only_looks_whether_it_is_held(tmp_path: Path) -> None:
    looks = FileLock(tmp_path / "run.lease", thread_local=False)
    looks.acquire()
    gone = threading.Timer(0.01, looks.release)
    gone.start()
    with Lease(tmp_path / "run.lease"):  # which waits a second
        gone.join()


def test_lease_does_not_pass_to_a_child_that_outlives_its_holder(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "speed.lease"
    with Lease(path):
        local.start(settings, "sleeper", SLEEPER)
    with Lease(path):
        assert local.running(settings, "sleeper")


# ---- the broker


def test_broker_keeps_its_topics_and_records_over_a_restart(jars: Path, settings: Settings, topic_name: str) -> None:
    topic = Topic(topic_name, key="k", partitions=2, schema="k STRING NOT NULL", event_time="k")
    first = local.start_broker(settings)
    kafka.apply(settings, [topic])
    kafka.produce(settings, topic, [{"k": "a"}, {"k": "b"}])
    ids = kafka.topic_ids(settings, [topic_name])
    assert local.stop_broker(settings) is True
    second = local.start_broker(settings)
    assert second.pid != first.pid
    assert local.start_broker(settings) == second
    assert sorted(r.value for r in kafka.consume(settings, topic_name, "earliest")) == [b'{"k":"a"}', b'{"k":"b"}']
    assert kafka.topic_ids(settings, [topic_name]) == ids


def test_broker_that_two_start_at_once_is_formatted_once(jars: Path, settings: Settings) -> None:
    with ThreadPoolExecutor() as terminals:
        first, second = terminals.map(local.start_broker, [settings, settings])
    assert first == second
    assert (settings.state / "logs" / "broker.log").read_text().count("Formatting") == 1


def test_broker_listens_on_loopback_only_and_logs_to_a_file(broker: Settings) -> None:
    process = local.running(broker, "broker")
    assert process
    listening = {
        c.laddr.ip.removeprefix("::ffff:") for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}
    assert "Kafka Server started" in (broker.state / "logs" / "kafka.log").read_text()
    assert "INFO" not in process.log.read_text()


@pytest.mark.parametrize(
    ("brokers", "seconds", "says"),
    [
        ("kafka.example.com:9092", kafka.ANSWER, r"listens on loopback only, and TIDEMARK_BROKERS says kafka\.example\.com:9092"),
        ("127.0.0.1:190930", 0.5, "listens on loopback only, and TIDEMARK_BROKERS says 127.0.0.1:190930"),
    ],
)
def test_broker_that_is_away_and_none_that_is_started_here_is_told_first(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, brokers: str, seconds: float, says: str
) -> None:
    """One elsewhere has as long to answer as any request."""
    waited: list[float] = []

    def away(_: Settings, patience: float) -> None:
        waited.append(patience)
        raise kafka.BrokerAway

    monkeypatch.setattr(local, "fetch_jars", lambda _: None)
    monkeypatch.setattr(kafka, "wait", away)
    with pytest.raises(BrokerFailed, match=f"^no Kafka broker answers at {brokers}, and none is started there: .* {says}"):
        cli.bring_up(settings.model_copy(update={"brokers": brokers}), cli.Steps())
    assert waited == [seconds]


@pytest.mark.parametrize(
    ("connections", "order"),
    [(False, ["notify", "stream main", "airflow"]), (True, ["stream main", "airflow", "notify"])],
    ids=["web hooks", "Airflow's connections"],
)
def test_notifier_that_asks_airflow_for_its_robots_is_started_after_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, connections: bool, order: list[str]
) -> None:
    """Airflow's database may come up with Airflow, and a notifier whose robots it cannot ask for ends."""
    begun: list[str] = []
    monkeypatch.setattr(local, "fetch_jars", lambda _: None)
    monkeypatch.setattr(kafka, "wait", lambda *_: None)
    monkeypatch.setattr(kafka, "apply", lambda *_: [])
    monkeypatch.setattr(local, "start", lambda _, name, *__: [begun.append(name), SimpleNamespace(log="a log")][1])
    monkeypatch.setattr(cli, "begin_stream", lambda _, stream: begun.append(f"stream {stream}"))
    monkeypatch.setattr(cli, "airflow_up", lambda *_: [begun.append("airflow"), iter(())][1])
    hook = SecretStr("https://oapi.dingtalk.com/robot/send?access_token=t")
    config = settings.model_copy(update={"notify_connections": True} if connections else {"dingtalk_webhook": hook})
    monkeypatch.setattr(cli, "settings", lambda: config)
    monkeypatch.setattr(cli, "catalog", lambda: SimpleNamespace(streams=["main"], topics={}, derived=()))
    cli.up(airflow=True)
    assert begun == order


@pytest.mark.parametrize(("runs", "so"), [(False, "started, its log is a log"), (True, "runs already")])
def test_stream_that_somebody_has_drained_is_told_where_it_is_wanted_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: bool, so: str
) -> None:
    monkeypatch.setattr(local, "fetch_jars", lambda _: None)
    monkeypatch.setattr(kafka, "wait", lambda *_: None)
    monkeypatch.setattr(kafka, "apply", lambda *_: [])
    monkeypatch.setattr(local, "beats", lambda *_: runs)
    monkeypatch.setattr(local, "start_stream", lambda *_: SimpleNamespace(log="a log"))
    monkeypatch.setattr(cli, "catalog", lambda: SimpleNamespace(streams=["main"], topics={}, derived=()))
    local.want(settings, "main", "stopped", "to look [here]", "admin")
    for more in ("; it was wanted stopped, by admin: to look [here]", ""):
        cli.bring_up(settings, cli.Steps())
        assert f"stream main: {so}{more} (" in capsys.readouterr().err
    assert local.wanted(settings, "main")["state"] == "running"


def test_check_that_is_misspelt_keeps_no_stream_from_starting(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(local, "fetch_jars", lambda _: None)
    monkeypatch.setattr(kafka, "wait", lambda *_: None)
    monkeypatch.setattr(kafka, "apply", lambda *_: [])
    monkeypatch.setattr(cli, "begin_stream", lambda _, stream: begun.append(stream))
    topic = Topic("t", None, 1, "a STRING NOT NULL", "kafka.timestamp", checks=(expect("ExpectColumnToExit", column="a"),))
    monkeypatch.setattr(cli, "catalog", lambda: Catalog({"t": topic}, {}, {}))
    cli.bring_up(settings, cli.Steps())
    assert begun == ["main"]
    told = "tidemark: topic t: Great Expectations has no ExpectColumnToExit; the nearest are "
    assert told in (said := capsys.readouterr().err) and "; each night holds it back until that is mended\n" in said


@pytest.mark.parametrize("name", ["TIDEMARK_TRIGGERS", "TIDEMARK_DRIVER_MEMORIES"])
def test_setting_of_a_stream_that_is_none_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One that `speed --only` has split off has a checkpoint, and is one."""
    monkeypatch.setattr(local, "fetch_jars", lambda _: None)
    monkeypatch.setattr(kafka, "wait", lambda *_: pytest.fail("it has gone on"))
    second = settings.checkpoints / "second" / "tidemark.json"
    second.parent.mkdir(parents=True)
    second.write_text("{}")
    monkeypatch.setenv(name, "alarms=2, second=2, alarmz=2".replace("2", "2g" if "MEM" in name else "2 seconds"))
    with pytest.raises(cli.Wrong, match=f"^{name} names stream alarmz, and there is none; there are: main, alarms, second$"):
        cli.bring_up(Settings(home=settings.home), cli.Steps())


@pytest.mark.parametrize("setting", ["TIDEMARK_BROKERS", "TIDEMARK_CONTROLLER_PORT"])
def test_busy_port_is_one_sentence_with_the_setting_that_moves_it(setting: str, settings: Settings) -> None:
    port = int(settings.brokers.split(":")[1]) if setting == "TIDEMARK_BROKERS" else settings.controller_port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(PortBusy, match=rf"^port {port} on 127.0.0.1 is taken .* choose another port with {setting}") as error:
            local.start_broker(settings)
    assert "\n" not in str(error.value)


def test_a_port_that_a_killed_process_lets_go_of_a_moment_later_is_not_busy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port, let_go = other.getsockname()[1], threading.Timer(0.3, other.close)
        let_go.start()
        local.refuse_busy("127.0.0.1", port, "TIDEMARK_BROKERS")
        let_go.join()


def test_broker_elsewhere_is_not_started_here(settings: Settings) -> None:
    far = settings.model_copy(update={"brokers": "kafka.example.com:9092"})
    with pytest.raises(BrokerFailed, match=r"listens on loopback only, and TIDEMARK_BROKERS says kafka\.example\.com:9092"):
        local.start_broker(far)


def test_broker_that_runs_at_another_address_than_is_said_now_is_told_at_once(settings: Settings) -> None:
    local.start(settings, "broker", SLEEPER)
    (settings.home / "kafka").mkdir()
    said = local.server_properties(settings, "127.0.0.1", 19092, settings.home / "kafka" / "data")
    (settings.home / "kafka" / "server.properties").write_text(said)
    with pytest.raises(BrokerFailed, match=rf"started at another address .* says now, {settings.brokers}; end it first"):
        local.start_broker(settings)


@pytest.mark.parametrize("name", ["ünï", "日本 $a"])
def test_broker_keeps_what_it_has_in_its_home_whatever_the_letters_of_that(jars: Path, settings: Settings, name: str) -> None:
    """Java reads a file of properties as ISO 8859-1: its data lay in another folder, and a second start was refused."""
    own = settings.model_copy(update={"home": settings.home / name, "jars_dir": jars})
    local.start_broker(own)
    try:
        assert (own.home / "kafka" / "data" / "meta.properties").is_file() and (own.state / "logs" / "kafka.log").is_file()
    finally:
        local.stop_broker(own)
    assert sorted(p.name for p in settings.home.iterdir() if p.name != "jars") == [name]


def test_broker_that_cannot_start_names_its_log(jars: Path, settings: Settings) -> None:
    data = settings.home / "kafka" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("version=1\ncluster.id=another\nnode.id=7\n")
    with pytest.raises(BrokerFailed, match=f"the broker ended; it says why in {settings.state / 'logs' / 'broker.log'}"):
        local.start_broker(settings)


# ---- giving way


@pytest.mark.parametrize(("niceness", "said"), [(10, ""), (5, "5")])
def test_who_steps_aside_goes_after_others_of_its_session_and_of_other_sessions(niceness: int, said: str) -> None:
    script = (
        "import os, pathlib; from tidemark import local; before = os.nice(0);"
        f"local.step_aside({said}); local.step_aside({said});"
        "group = pathlib.Path('/proc/self/autogroup');"
        f"print(os.nice(0) - before, group.read_text().split()[-1] if group.exists() else {niceness})"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYSPARK_GATEWAY_PORT"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, start_new_session=True)
    nicer, group = done.stdout.split()
    assert (int(nicer), int(group)) == (niceness - os.nice(0), niceness), done.stderr


def test_a_jvm_that_spark_submit_has_started_steps_aside_with_its_program(tmp_path: Path) -> None:
    """Its threads too: on Linux each has a niceness of its own."""
    child = "import os; os.environ['PYSPARK_GATEWAY_PORT'] = '1'; from tidemark import local; local.step_aside()"
    parent = (
        "import os, subprocess, sys, threading, time; stop = threading.Event(); threading.Thread(target=stop.wait).start();"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True);"
        "print(*(os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task'))); stop.set()"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert set(done.stdout.split()) == {"10"}, done.stderr
