"""What watches streams and days for Airflow: operators, triggers and alarms, over the files that a stream writes of itself."""

import asyncio
import json
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tidemark import lake, local, settle
from tidemark.lake import Run
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

PLUGINS = Path(__file__).parent.parent / "plugins"
NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def plugins(in_airflow: None) -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGINS))
        import day
        import stream
        import tell

        yield SimpleNamespace(day=day, stream=stream, tell=tell)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMARK_HOME", str(tmp_path / "home"))
    return Settings()


def heartbeat(
    settings: Settings, state: str, pid: int | None = None, ago: float = 0, error: str | None = None, stream: str = "main"
) -> None:
    folder = settings.state / stream
    folder.mkdir(parents=True, exist_ok=True)
    at = datetime.now(UTC) - timedelta(seconds=ago)
    said = {"pid": pid or os.getpid(), "state": state, "at": at.isoformat(), "error": error}
    (folder / "heartbeat.json").write_text(json.dumps(said))


def asked(settings: Settings, state: str, ago: float, again: bool = False) -> None:
    """Somebody said so many seconds ago what the stream shall do."""
    local.want(settings, "main", state, "new code", "admin", again=again)
    file = settings.state / "main" / "desired.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"at": (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()}))


def progress(settings: Settings, seq: int = 1, records: int = 300, rejects: int = 0, lag: int = 0, rate: float = 100.0) -> None:
    said = {
        "seq": seq, "records": records, "rejects": rejects, "records_per_second": rate, "seconds": 0.8, "lag": lag,
        "slowest": "page_panes", "timings": {"page_panes": 0.31}, "set_aside": {}, "finished_at": datetime.now(UTC).isoformat(),
    }  # fmt: skip
    (settings.state / "main" / "progress.json").write_text(json.dumps(said))


def told(settings: Settings) -> list[str]:
    file = settings.state / "alerts.jsonl"
    return [json.loads(line)["what"] for line in file.read_text().splitlines()] if file.exists() else []


def deferred(call: Callable[[], Any]) -> Any:
    from airflow.sdk.exceptions import TaskDeferred

    with pytest.raises(TaskDeferred) as raised:
        call()
    return raised.value


def fired(trigger: Any) -> dict[str, Any]:
    """What the trigger's first event says."""

    async def first() -> Any:
        async for event in trigger.run():
            return event.payload
        raise AssertionError("the trigger ended without an event")

    return asyncio.run(asyncio.wait_for(first(), 30))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The streams that would have been started."""
    names: list[str] = []

    def start(_settings: Settings, name: str) -> Any:
        names.append(name)
        return SimpleNamespace(pid=1, log="its.log")

    monkeypatch.setattr(local, "start_stream", start)
    return names


# ------------------------------------------------------------------------------------------------------------- streams


def run(began: float = 0) -> Any:
    """What a task is told of its run, which began so many seconds ago."""
    return {"dag_run": SimpleNamespace(start_date=datetime.now(UTC) - timedelta(seconds=began))}


@pytest.fixture
def watcher(plugins: SimpleNamespace) -> Any:
    return plugins.stream.WatchStream(task_id="watch", stream="main", window=60.0, deaths=2)


def test_a_running_stream_is_adopted_and_no_other_started(watcher, config, started):
    heartbeat(config, "running")
    found = deferred(lambda: watcher.execute(run()))
    assert (started, found.method_name, found.trigger.stream) == ([], "resume", "main")
    assert found.trigger.until - datetime.now(UTC).timestamp() == pytest.approx(60, abs=5)


def test_a_watcher_that_begins_again_ends_with_its_run(watcher, config, started):
    """
    run          [0 ─────────────────── 60)
    other task   [0 ─────────────────── 60)
    this task              died, [50 ── 60)   and the next run watches both
    """
    found = deferred(lambda: watcher.execute(run(began=50)))
    assert found.trigger.until - datetime.now(UTC).timestamp() == pytest.approx(10, abs=5)


@pytest.mark.parametrize(
    ("tried", "began", "again"),
    [(1, 0, 60), (3, 0, 240), (7, 0, 600), (7, 3300, 300), (1, 3590, 10), (1, 3700, 0)],
)
def test_a_watcher_that_has_failed_begins_again_with_the_end_of_its_run_at_the_latest(plugins, tried, began, again):
    """
    run          [0 ──────────── 55 ──── 60)
    other task   [0 ──────────────────── 60)
    this task             died, 55 ····· 60)   and the next run watches both
    """
    decision = plugins.stream.WithinItsRun(3600.0).evaluate(RuntimeError(), tried, 10, run(began))
    assert decision.retry_delay.total_seconds() == pytest.approx(again, abs=1)


@pytest.mark.parametrize("what", ["failed", "ended", "stale"])
def test_a_stream_that_is_no_more_when_the_window_is_over_is_the_next_run_s_to_start(watcher, config, started, what):
    assert watcher.resume({}, {"what": what, "said": "a table is gone"}, until=0.0, died=0) == "a table is gone"
    assert started == []


def test_a_stream_that_does_not_run_is_started(watcher, config, started):
    deferred(lambda: watcher.execute(run()))
    assert started == ["main"]


def test_a_stream_wanted_stopped_stays_so(watcher, config, started):
    local.want(config, "main", "stopped", "to look at the disk", "admin")
    deferred(lambda: watcher.execute(run()))
    assert started == []


def test_a_service_is_only_watched(watcher, config, started, monkeypatch):
    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", "service")
    deferred(lambda: watcher.execute(run()))
    assert started == []


def test_the_window_s_end_ends_the_task_well(watcher, config):
    assert watcher.resume({}, {"what": "over", "said": "batch 7"}, until=0.0, died=0) == "batch 7"


def test_a_stream_that_died_is_started_until_it_died_too_often(watcher, config, started):
    log = config.state / "logs" / "speed-main.log"
    log.parent.mkdir(parents=True)
    log.write_text("the last words")
    event = {"what": "failed", "said": "a table is gone"}
    again = deferred(lambda: watcher.resume({}, event, until=9e9, died=0))
    assert (started, again.kwargs["died"], told(config)) == (["main"], 1, [])
    with pytest.raises(RuntimeError, match=r"stream main died 2 times in one window; the end of .*:\nthe last words"):
        watcher.resume({}, event, until=9e9, died=1)
    assert told(config) == ["stream_down"]


def test_a_stream_that_dies_again_and_again_is_told_of_once_and_started_all_the_same(plugins, config, started):
    watcher = plugins.stream.WatchStream(task_id="watch", stream="main", window=60.0)
    for died in range(11):
        deferred(lambda died=died: watcher.resume({}, {"what": "failed", "said": "a table is gone"}, until=9e9, died=died))
    assert (started, told(config)) == (["main"] * 11, ["stream_down"])


DEAF = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait(600)"


@pytest.mark.parametrize(("ago", "killed"), [(0.9, True), (-60, False)], ids=["still silent", "another one beats by now"])
def test_a_stream_that_is_stale_is_killed_and_started_and_that_is_no_death(watcher, config, started, monkeypatch, ago, killed):
    monkeypatch.setenv("TIDEMARK_STALE_AFTER", "0 seconds")
    silent = local.start(config, "speed-main", [sys.executable, "-c", DEAF])
    try:
        heartbeat(config, "running", silent.pid, ago)
        again = deferred(lambda: watcher.resume({}, {"what": "stale", "said": "silent"}, until=9e9, died=1))
        assert silent.alive() is not killed
        assert (started, again.kwargs["died"]) == (["main"] if killed else [], 1)
    finally:
        local.stop(config, "speed-main", patience=0)


def test_a_stream_that_hangs_again_and_again_is_told_of_once_and_started_all_the_same(
    plugins, watcher, config, started, monkeypatch
):
    monkeypatch.setattr(plugins.stream, "look", lambda _: ("stale", "has not beaten for 70 s"))
    heartbeat(config, "running", pid=2**30)
    so_far: dict[str, Any] = {"until": 9e9, "died": 0}
    for _ in range(11):
        so_far = deferred(lambda: watcher.resume({}, {"what": "stale", "said": "silent"}, **so_far)).kwargs  # noqa: B023
    assert (started, told(config), so_far["died"]) == (["main"] * 11, ["stream_down"], 0)


@pytest.mark.parametrize(
    ("state", "ago", "what", "said"),
    [
        ("failed", 10, "runs", "failed: a table is gone; it ends"),
        ("failed", 120, "stale", "failed: a table is gone; it has not ended for "),
        ("stopped", 10, "runs", "drained; it ends"),
        ("stopped", 120, "stale", "drained; it has not ended for "),
    ],
)
def test_a_stream_that_has_ended_and_whose_process_stays_does_not_start(
    plugins: SimpleNamespace, config: Settings, state: str, ago: float, what: str, said: str
) -> None:
    stays = local.start(config, "speed-main", [sys.executable, "-c", DEAF])
    try:
        heartbeat(config, state, stays.pid, ago, error="a table is gone")
        assert local.start_stream(config, "main").pid == stays.pid  # one process has one name
        found = plugins.stream.look("main")
        assert found[0] == what and found[1].startswith(f"pid {stays.pid} has {said}")
    finally:
        local.stop(config, "speed-main", patience=0)


def test_what_a_silent_stream_has_started_ends_with_it(plugins, watcher, config, started, monkeypatch):
    """A JVM that hangs does not see that nobody speaks with it any more, and would keep its memory."""
    monkeypatch.setattr(plugins.stream, "look", lambda _: ("stale", "has not beaten for 70 s"))
    both = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}]); {DEAF}"
    silent = local.start(config, "speed-main", [sys.executable, "-c", both])
    try:
        deadline = time.monotonic() + 60
        while len(family := local.orphans(silent)) < 2:
            assert time.monotonic() < deadline
        heartbeat(config, "running", silent.pid)
        deferred(lambda: watcher.resume({}, {"what": "stale", "said": "silent"}, until=9e9, died=0))
        assert [one.pid for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        local.stop(config, "speed-main", patience=0)


@pytest.mark.parametrize(
    ("state", "ago", "wanted", "backend", "what"),
    [
        ("running", 0, "running", "process", "runs"),
        ("running", 120, "running", "process", "stale"),
        ("starting", 120, "running", "process", "runs"),
        ("starting", 700, "running", "process", "silent"),
        ("failed", 0, "running", "process", "failed"),
        ("stopped", 0, "running", "process", "ended"),
        ("stopped", 0, "stopped", "process", "stopped"),
        ("stopped", 0, "running", "service", "runs"),
        ("starting", 120, "running", "service", "runs"),
        ("starting", 700, "running", "service", "silent"),
        ("running", 120, "running", "service", "silent"),
        ("failed", 120, "running", "service", "silent"),
        ("held", 0, "running", "service", "runs"),
        ("held", 120, "running", "service", "silent"),
        ("running", 120, "stopped", "service", "stopped"),
    ],
)
def test_how_a_stream_is(plugins, config, monkeypatch, state, ago, wanted, backend, what):
    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", backend)
    heartbeat(config, state, pid=1, ago=ago, error="a table is gone")  # older than what it has said
    local.want(config, "main", wanted, "why not", "admin")
    assert plugins.stream.look("main")[0] == what


@pytest.mark.parametrize(("ago", "what"), [(10, "runs"), (170, "runs"), (190, "stale")])
@pytest.mark.parametrize(("state", "again"), [("stopped", False), ("running", True)])
def test_a_stream_that_was_asked_to_end_may_be_silent_for_three_minutes(plugins, config, state, again, ago, what):
    """It finishes its batch, and says nothing while it does."""
    heartbeat(config, "running", pid=1, ago=120)
    asked(config, state, ago, again)
    found = plugins.stream.look("main")
    assert found[0] == what and (what == "stale" or found[1] == "pid 1 drains, as admin asked: new code")


@pytest.mark.parametrize("backend", ["process", "service"])
def test_a_stream_whose_task_was_cleared_finishes_its_batch_is_adopted_and_then_begins_again(
    plugins, watcher, config, started, monkeypatch, backend
):
    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", backend)
    busy = local.start(config, "speed-main", [sys.executable, "-c", DEAF])
    try:
        heartbeat(config, "running", busy.pid)
        asyncio.run(asyncio.wait_for(plugins.stream.StreamTrigger("main", 9e9).on_kill(), 30))
        wanted = local.wanted(config, "main")
        assert busy.alive() and (wanted["state"], wanted["again"], wanted["by"]) == ("running", True, "Airflow")
        deferred(lambda: watcher.execute(run()))
        assert started == []
    finally:
        local.stop(config, "speed-main", patience=0)
    heartbeat(config, "stopped", busy.pid)
    if backend == "process":
        what, said = plugins.stream.look("main")
        deferred(lambda: watcher.resume({}, {"what": what, "said": said}, until=9e9, died=0))
        assert (what, started) == ("ended", ["main"])


def test_a_stream_that_is_wanted_stopped_stays_so_when_its_task_is_cleared(plugins, config, monkeypatch):
    local.want(config, "main", "stopped", "to look at the disk", "admin")
    for backend in ("process", "service"):
        monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", backend)
        asyncio.run(plugins.stream.StreamTrigger("main", 9e9).on_kill())
        assert local.wanted(config, "main")["reason"] == "to look at the disk"


def test_a_wish_that_a_power_cut_has_emptied_is_as_if_nobody_had_said_one(plugins, watcher, config, started):
    asked(config, "running", 10, again=True)
    (config.state / "main" / "desired.json").write_text("")
    deferred(lambda: watcher.execute(run()))
    assert started == ["main"] and plugins.stream.look("main")[0] == "failed"


def test_a_line_of_progress_has_what_an_operator_asks_for(plugins, config):
    heartbeat(config, "running")
    progress(config, 41, lag=12)
    says = plugins.stream.look("main")[1]
    for part in (f"pid {os.getpid()}", "batch 41", "300 records in 0.80 s", "100.0 a second", "lag 12", "slowest page_panes"):
        assert part in says


@pytest.mark.parametrize(("state", "what"), [("failed", "failed"), ("stopped", "ended")])
def test_the_trigger_fires_when_the_stream_is_no_more(plugins, config, state, what):
    heartbeat(config, state, error="a table is gone")
    assert fired(plugins.stream.StreamTrigger("main", 9e9))["what"] == what


def test_the_trigger_fires_at_the_window_s_end(plugins, config):
    heartbeat(config, "running")
    progress(config, 41)
    found = fired(plugins.stream.StreamTrigger("main", 0.0))
    assert found["what"] == "over" and "batch 41" in found["said"]


@pytest.mark.parametrize(
    ("state", "ago", "wanted", "since", "left"),
    [
        ("stopped", 310, "running", 400, True),
        ("stopped", 290, "running", 400, False),  # its own task starts it
        ("stopped", 400, "running", 290, False),  # likewise: it was drained, and is wanted again
        ("stopped", 310, "stopped", 400, False),
        ("stopped", 900, "running", 950, False),  # before the run began, and so for it to start
        ("running", 310, "running", 400, False),
    ],
)
def test_a_stream_that_nobody_starts_again_was_left(plugins, config, state, ago, wanted, since, left):
    heartbeat(config, state, ago=ago)
    asked(config, wanted, since, again=True)
    began = datetime.now(UTC) - timedelta(minutes=10)
    assert plugins.stream.left("alarms", began, began) is left


@pytest.mark.parametrize(("began", "left"), [(310, True), (290, False)], ids=["begun again", "Airflow was away"])
def test_a_stream_was_left_by_what_its_own_watcher_has_not_done_since_this_one_began(plugins, config, began, left):
    """
    run      [20 minutes ago
    main                    drained, 10 minutes ago ····
    alarms                                        [five minutes ago
    """
    heartbeat(config, "stopped", ago=600)
    since, again = (datetime.now(UTC) - timedelta(seconds=s) for s in (1200, began))
    assert plugins.stream.left("alarms", since, again) is left


@pytest.mark.parametrize(("ago", "left"), [(910, True), (890, False)], ids=["marked meanwhile", "between two tries"])
def test_a_dead_stream_was_left_when_its_own_watcher_would_have_tried_again(plugins, config, ago, left):
    heartbeat(config, "failed", ago=ago)
    began = datetime.now(UTC) - timedelta(minutes=20)
    assert plugins.stream.left("alarms", began, began) is left


def test_a_stream_that_died_without_a_heartbeat_is_not_known_to_be_left(plugins, config):
    assert plugins.stream.look("main")[0] == "failed"
    began = datetime.now(UTC) - timedelta(minutes=20)
    assert not plugins.stream.left("alarms", began, began)


def test_a_watch_is_over_when_the_task_of_another_stream_was_marked(plugins, config, monkeypatch):
    """The run ends then, and the next one watches both. This stream's own watcher may have begun again meanwhile.

    run      [400 s ago
    alarms             drained, a second ago ····
    main                                         [now
    """
    monkeypatch.setattr(plugins.stream, "LEFT", timedelta(0))
    heartbeat(config, "running")
    heartbeat(config, "stopped", ago=1, stream="alarms")
    watcher = plugins.stream.WatchStream(task_id="watch", stream="main", window=3600.0)
    trigger = deferred(lambda: watcher.execute(run(began=400))).trigger
    assert fired(trigger)["what"] == "over"


# --------------------------------------------------------------------------------------------------------------- alarms


def test_a_late_stream_is_told_once_and_again_after_it_was_well(plugins, config):
    alarms = plugins.tell.Alarms("main")
    heartbeat(config, "running")
    for seq, lag in enumerate((10, 40_000, 50_000, 60_000, 10, 40_000, 50_000)):  # at 100 a second: five minutes are 30,000
        progress(config, seq, lag=lag)
        alarms.look()
    assert told(config) == ["stream_late", "stream_late"]


def test_a_stream_that_had_nothing_to_read_is_not_late_by_its_first_batch(plugins, config):
    """
    [an hour without a record][1500 records, 500 unread: 0.4 a second][those 500: 166 a second]
    """
    alarms = plugins.tell.Alarms("main")
    heartbeat(config, "running")
    progress(config, 1, records=1500, lag=500, rate=0.4)
    for _ in range(2):  # a batch that is seen twice is one
        alarms.look()
    progress(config, 2, records=500, rate=166.0)
    alarms.look()
    assert told(config) == []


#   planned 7 [6 minutes ago        now      and the process that is at it: began before, or a minute ago
def test_a_stream_that_does_not_come_to_the_end_of_its_batch_is_late(plugins, config):
    """It beats all the while, and what it said last is of the batch before."""
    checkpoint, began = lake.Checkpoint.of(config, "main").path, config.state / "main" / "code.json"
    heartbeat(config, "running")
    progress(config)
    planned, before, done = (checkpoint / name for name in ("offsets/7", "commits/6", "commits/7"))
    for file, minutes in ((planned, 6), (before, 6), (began, 1)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (time.time() - 60 * minutes,) * 2)
    alarms = plugins.tell.Alarms("main")
    alarms.look()
    assert told(config) == []
    os.utime(began, (0, 0))
    alarms.look()
    assert told(config) == ["stream_late"] and "been at its batch for 0:06:" in (config.state / "alerts.jsonl").read_text()
    done.touch()
    alarms.look()
    assert alarms.raised == set()


def test_what_was_told_is_not_told_again_by_who_watches_next(plugins, config):
    """The run ends, or the triggerer begins again; ten minutes of batches go on too."""
    heartbeat(config, "running")
    for n in range(3):
        alarms = plugins.tell.Alarms("main")
        for seq in (2 * n, 2 * n + 1):
            progress(config, seq, 300, 60, lag=40_000)
            alarms.look()
        alarms.down(True, "running, and has not beaten for 120 s")
    assert sorted(told(config)) == ["rejects_surge", "stream_down", "stream_late"]


def test_what_was_told_is_written_when_it_changes_and_at_a_watch_s_end_and_not_with_each_batch(plugins, config):
    alarms = plugins.tell.Alarms("main")
    heartbeat(config, "running")
    for seq in (1, 2):
        progress(config, seq)
        alarms.look()
    assert not alarms.kept.exists()
    fired(plugins.stream.StreamTrigger("main", 0.0))
    assert [seq for _, seq, *_ in plugins.tell.Alarms("main").recent] == [2]


def test_a_service_that_does_not_beat_is_told_of_and_still_only_watched(plugins, config, monkeypatch):
    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", "service")
    heartbeat(config, "running", ago=120)
    found = fired(plugins.stream.StreamTrigger("main", 0.0))
    assert (found["what"], told(config)) == ("over", ["stream_down"])
    assert (
        re.search(r"has not beaten for 1\d\d s", found["said"]) and found["said"] in (config.state / "alerts.jsonl").read_text()
    )


@pytest.mark.parametrize(("minutes", "what"), [(9, "runs"), (11, "silent")])
def test_a_service_that_has_never_beaten_is_told_of_once_a_start_is_over(plugins, config, monkeypatch, minutes, what):
    """Its container falls over a setting again and again, or there is none."""
    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", "service")
    found, said = plugins.stream.look("main", datetime.now(UTC) - timedelta(minutes=minutes))
    assert found == what
    silent = r"it has never beaten, and is watched for 6\d\d s; its container has to begin"
    assert re.fullmatch("starting" if what == "runs" else silent, said)


def test_a_service_that_has_never_beaten_is_told_of_once_though_one_watch_follows_another(plugins, config, monkeypatch):
    """
    watched   [11 minutes ago)            [told)[now)
    """

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(minutes=11)

    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", "service")
    with monkeypatch.context() as before:
        for module in (plugins.stream, plugins.tell):
            before.setattr(module, "datetime", Earlier)
        assert fired(plugins.stream.StreamTrigger("main", 0.0))["said"] == "starting" and told(config) == []
    for _ in range(2):
        assert "it has never beaten, and is watched for 66" in fired(plugins.stream.StreamTrigger("main", 0.0))["said"]
    assert told(config) == ["stream_down"]


@pytest.mark.parametrize(
    ("minutes", "many"),
    [
        ((4, 3, 2, 1, 0), 1),
        ((59, 45, 30, 15, 1), 1),
        ((62, 45, 30, 15, 1), 0),  # four within the window
        ((130, 120, 110, 100, 90), 0),  # and not since
        ((240, 200, 160, 120, 80, 40, 0), 0),
        ((48, 36, 24, 12, 1), 1),
        ((3, 2, 1, 0), 0),
    ],
)
def test_a_service_that_dies_again_and_again_is_told_of_once_with_its_last_words(plugins, config, monkeypatch, minutes, many):
    """Its container begins it again each time, so that it always beats."""
    monkeypatch.setenv("TIDEMARK_STREAM_BACKEND", "service")
    for ago in minutes:
        for state in ("starting", "failed"):
            heartbeat(config, state, ago=60 * ago, error="a table is gone")
            for _ in range(2):  # a death that is seen twice, by another watcher too, is one
                plugins.tell.Alarms("main").down(False, f"{state}: waiting for its container")
    assert told(config) == ["stream_down"] * many
    assert not many or ("died 5 times" in (said := (config.state / "alerts.jsonl").read_text()) and "a table is gone" in said)


def test_a_process_that_dies_is_counted_by_its_operator_alone(plugins, config):
    for ago in range(5, 0, -1):
        heartbeat(config, "failed", ago=ago)
        plugins.tell.Alarms("main").down(False, "a table is gone")
    assert told(config) == []


def test_a_silent_service_is_told_of_once_and_again_after_it_was_well(plugins, config):
    alarms = plugins.tell.Alarms("main")
    for silent in (False, True, True, False, True):
        alarms.down(silent, "running, and has not beaten for 120 s")
    assert told(config) == ["stream_down", "stream_down"]


def test_a_surge_of_rejects_is_told_once_by_the_batches_of_ten_minutes(plugins, config):
    alarms = plugins.tell.Alarms("main")
    heartbeat(config, "running")
    for seq, rejects in enumerate((0, 14, 14, 300, 300)):  # under the share of a twentieth, then far over it
        progress(config, seq, 300, rejects)
        alarms.look()
        alarms.look()  # a batch that is seen twice counts once
        assert told(config) == (["rejects_surge"] if rejects == 300 else [])


def test_the_last_batch_of_a_stream_that_stands_still_is_told_of_once_and_the_next_surge_again(plugins, config, monkeypatch):
    alarms = plugins.tell.Alarms("main")
    heartbeat(config, "running")
    progress(config, 1, 300, 300)
    alarms.look()
    with monkeypatch.context() as later:
        later.setattr(plugins.tell, "OVER", 0.0)  # ten minutes later, and again
        for watcher in (alarms, alarms, plugins.tell.Alarms("main")):
            watcher.look()
    assert told(config) == ["rejects_surge"]
    progress(config, 2, 300, 300)
    alarms.look()
    assert told(config) == ["rejects_surge"] * 2


def test_few_rejects_are_no_surge(plugins, config):
    alarms = plugins.tell.Alarms("main")
    heartbeat(config, "running")
    progress(config, 1, 50, 50)
    alarms.look()
    assert told(config) == []


def test_unexplained_differences_are_told_by_view(plugins, config):
    def settled(**unexplained: int | None) -> Run:
        tables = {name: {"compare": {"rows": 5, "unexplained": n}} for name, n in unexplained.items()}
        return Run("settle-1", "staged", [], "", "", "0", tables=tables | {"page_views": {}})

    plugins.tell.differences(settled(hourly_traffic=0, page_panes=None))
    assert told(config) == []
    plugins.tell.differences(settled(hourly_traffic=3, page_panes=None))
    [said] = (config.state / "alerts.jsonl").read_text().splitlines()
    assert json.loads(said)["title"] == "hourly_traffic (3 rows) differ from what was live"


@pytest.mark.parametrize(("callback", "what"), [("task_failed", "run_failed"), ("gate_failed", "gate_failed")])
def test_failures_are_told_with_their_sentence(plugins, config, callback, what):
    context = {"ti": SimpleNamespace(dag_id="nightly", task_id="settle", run_id="r1"), "exception": ValueError("pv < uv")}
    getattr(plugins.tell, callback)(context)
    [said] = (config.state / "alerts.jsonl").read_text().splitlines()
    assert json.loads(said)["what"] == what and "pv < uv" in said and "r1" in said


@pytest.mark.parametrize("again", [False, True], ids=["once", "as Airflow loads plugins, again"])
def test_a_day_that_a_form_should_not_have_named_is_told_to_nobody_but_who_filled_it_in(plugins, config, again):
    tell = runpy.run_path(str(PLUGINS / "tell.py")) if again else vars(plugins.tell)
    for day in ("", str(datetime.now(UTC).date()), "0026-11-19"):
        with pytest.raises(Exception, match=r"not over in UTC|neither a day|before the year 2000") as refused:
            plugins.day.WaitForDay(task_id="wait", day=day).execute({})
        ti = SimpleNamespace(dag_id="nightly", task_id="wait", run_id="r1")
        tell["task_failed"]({"ti": ti, "exception": refused.value})
    assert told(config) == []


VIEWS = list(CATALOG.views)
D19 = {"data_interval_start": "2026-11-19T00:00:00Z", "queued_at": "2026-11-20T00:00:01Z"}


@pytest.mark.parametrize(
    ("run", "published", "late"),
    [
        (D19, [], True),
        (D19, VIEWS[1:], True),
        (D19, VIEWS, False),
        (D19 | {"run_type": "backfill"}, [], False),
        (D19 | {"data_interval_start": "2026-11-18T23:00:00Z"}, VIEWS, True),  # of the day before, which is not published
        ({"conf": {"day": "2026-11-19"}, "queued_at": "2026-11-23T09:00:00Z"}, [], True),
        ({"conf": {"day": "2026-11-19"}, "queued_at": "2026-11-23T09:00:00Z"}, VIEWS, False),
        ({"conf": {"day": "2026-11-19"}, "queued_at": "2026-11-19T23:59:59Z"}, [], False),  # the form was refused
        ({"conf": {"day": None}, "queued_at": "2026-11-23T09:00:00Z"}, [], False),
    ],
)
def test_a_night_past_its_deadline_is_told_where_its_day_was_over_and_is_not_published(plugins, config, run, published, late):
    settled = Run("settle-1", "published", ["2026-11-19"], "by hand", NOW.isoformat(), "0")
    settled.tables = {name: {"published": NOW.isoformat()} for name in published}
    lake.save(config, settled)
    shown = {"dag_run_id": "night-1", "run_type": "scheduled", "conf": {}, "data_interval_start": None} | run
    asyncio.run(plugins.tell.night_is_late(context={"dag_run": shown}))
    assert told(config) == (["nightly_late"] if late else [])
    assert not late or "night-1" in (config.state / "alerts.jsonl").read_text()


# ----------------------------------------------------------------------------------------------------------------- days


def test_a_day_that_is_not_over_is_refused_at_once_and_not_tried_again(plugins, config):
    from airflow.sdk.exceptions import AirflowFailException

    today = datetime.now(UTC).date()
    with pytest.raises(AirflowFailException, match=f"{today} is not over in UTC; the last day that can be settled is"):
        plugins.day.WaitForDay(task_id="wait", day=str(today)).execute({})
    with pytest.raises(AirflowFailException, match="neither a day in its form nor a data interval"):
        plugins.day.WaitForDay(task_id="wait", day="").execute({})


def test_a_complete_day_is_not_waited_for_and_another_is_for_so_long(plugins, config, monkeypatch):
    # Not yesterday: for forty minutes after midnight its late records are waited for first.
    wait = plugins.day.WaitForDay(task_id="wait", day=str(NOW.date() - timedelta(days=2)))
    monkeypatch.setattr(plugins.day, "unread", lambda day: None)
    assert wait.execute({}) is None
    monkeypatch.setattr(plugins.day, "unread", lambda day: "300 records")
    found = deferred(lambda: wait.execute({}))
    assert found.trigger.until - datetime.now(UTC).timestamp() == pytest.approx(6 * 3600, abs=5)


def test_a_night_is_patient_from_when_its_late_records_are_waited_for_no_more(plugins, config, monkeypatch):
    """
    yesterday )[ today ... two days of TIDEMARK_NIGHTLY_AFTER ... ][ six hours of patience ]
    """
    monkeypatch.setenv("TIDEMARK_NIGHTLY_AFTER", "2 days")
    yesterday = settle.yesterday(Settings())
    over = settle.period(Settings(), yesterday)[1] + timedelta(days=2, minutes=30)
    found = deferred(lambda: plugins.day.WaitForDay(task_id="wait", day=str(yesterday)).execute({}))
    assert datetime.fromtimestamp(found.trigger.until, UTC) == over + timedelta(hours=6)
    newest = settle.newest_complete(Settings(), CATALOG)
    first, second = (settle.complete_at(Settings(), CATALOG, day) for day in (newest, newest + timedelta(days=1)))
    assert first <= datetime.now(UTC) < second


def test_what_a_day_lacks_fails_the_wait_with_it_and_no_second_one_begins(plugins, config, monkeypatch):
    from airflow.sdk.exceptions import AirflowFailException

    monkeypatch.setattr(plugins.day, "LOOK", 0.01)
    lacks = iter(("300 records", "200 records", None))
    monkeypatch.setattr(plugins.day, "unread", lambda day: next(lacks))
    assert fired(plugins.day.DayTrigger("2026-11-19", 9e9)) == {"lacks": None}
    monkeypatch.setattr(plugins.day, "unread", lambda day: "200 records")
    event = fired(plugins.day.DayTrigger("2026-11-19", 0.0))
    with pytest.raises(AirflowFailException, match="2026-11-19 is not complete: 200 records"):
        plugins.day.WaitForDay(task_id="wait", day="2026-11-19").resume({}, event)


def test_a_day_that_is_complete_by_the_triggerer_s_code_alone_is_waited_for_on(plugins, config, monkeypatch):
    """A view looks further ahead by now, and the triggerer was not begun again: once a minute the code of now is asked."""
    lacks = "late records of 2026-11-19 are waited for until 2026-11-20 06:10 UTC"
    wait = plugins.day.WaitForDay(task_id="wait", day="2026-11-19")
    monkeypatch.setattr(plugins.day, "unread", lambda day: lacks)
    first = deferred(lambda: wait.execute({}))
    again = deferred(lambda: wait.resume({}, {"lacks": None}, **first.kwargs or {}))
    assert (again.trigger.moment - datetime.now(UTC)).total_seconds() == pytest.approx(60, abs=5)
    assert again.kwargs == first.kwargs and deferred(lambda: wait.resume({}, again.trigger.moment, **again.kwargs))
    monkeypatch.setattr(plugins.day, "unread", lambda day: None)
    assert wait.resume({}, again.trigger.moment, **again.kwargs) is None


def test_a_day_of_a_lake_without_a_stream_is_lacking(plugins, config):
    assert plugins.day.unread(str(date(2026, 11, 19)))


def test_form_drains_a_stream_of_the_catalog_or_one_begun_by_hand_and_no_other(in_airflow: None, config: Settings) -> None:
    control = runpy.run_path(str(PLUGINS.parent / "dags" / "control.py"))["control"]
    want = control().get_task("want").python_callable
    begun = config.checkpoints / "second" / "tidemark.json"
    begun.parent.mkdir(parents=True)
    begun.touch()
    for stream in ("main", "second"):
        assert want({"stream": stream, "action": "drain", "reason": "the disk"}) == f"{stream} is wanted stopped"
        assert local.wanted(config, stream)["reason"] == "the disk"
    with pytest.raises(ValueError, match="there is no stream third; there are main, alarms, second"):
        want({"stream": "third", "action": "drain", "reason": "the disk"})
