"""The command `tidemark` through its public door: exit codes, one sentence on stderr, JSON on stdout."""

import datetime as dt
import errno
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaError
from deltalake import DeltaTable, Schema
from rich.console import Console
from typer.testing import CliRunner, Result

from tidemark import __main__ as cli
from tidemark import airflow, compare, kafka, lake, local, pipelines, session, settle, speed, watch
from tidemark.local import Lease
from tidemark.model import Catalog, Topic, expect
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

HEAVY = ("pyspark", "duckdb", "deltalake", "confluent_kafka", "pyarrow", "pandas", "numpy", "great_expectations", "matplotlib")
NOON = dt.datetime(2026, 11, 19, 12, tzinfo=dt.UTC)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def environment(tmp_path: Path, port: int) -> dict[str, str]:
    return {"TIDEMARK_HOME": str(tmp_path), "TIDEMARK_BROKERS": f"127.0.0.1:{port}"}


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(cli.app, list(words), env=environment, prog_name="tidemark")


def process(environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidemark", *words]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write(config: Settings, where: str, rows: list[dict], schema: pa.Schema, folder: str = "live/main-0-0-aa") -> DeltaTable:
    """Rows of 2026-11-19 as lake.py commits them: a file without the partition column, its times in the statistics."""
    root = config.lake_path / where
    if not root.exists():
        root.mkdir(parents=True)
        DeltaTable.create(root, Schema.from_arrow(schema.append(pa.field("day", pa.date32()))), partition_by=["day"])
    path = root / folder / "day=2026-11-19/part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    table = DeltaTable(root)
    table.create_write_transaction(
        [lake.add_action(lake.Table(config.lake_path, where), path, NOON.date())], "append", table.schema(), ["day"]
    )
    return table


KAFKA = pa.struct(
    [("partition", pa.int32()), ("offset", pa.int64()), ("timestamp", pa.timestamp("us", "UTC")), ("value", pa.binary())]
)
LOG = pa.schema([("page", pa.string()), ("kafka", KAFKA), ("reject", pa.string())])
SITE = pa.schema([("mark", pa.timestamp("us", "UTC")), ("pv", pa.int64()), ("uv", pa.int64()), ("settled", pa.bool_())])
PAGES = pa.schema([("page", pa.string()), *SITE])


def record(offset: int, value: bytes, reject: str | None) -> dict:
    return {"page": None, "kafka": {"partition": 3, "offset": offset, "timestamp": NOON, "value": value}, "reject": reject}


# ---- what nothing can be done with: one sentence, exit code 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sttle"], "No such command 'sttle'"),
        (["query"], "Missing argument 'SQL'"),
        (["query", "SELECT"], "this is not SQL that DuckDB reads"),
        (["query", "SELECT * FROM nowhere"], "there is no table nowhere; there are none yet"),
        (["query", "SELECT * FROM site_daily_traffic"], "site_daily_traffic holds nothing yet"),
        (["query", "SELECT * FROM read_csv('/etc/passwd')"], "read_csv() is refused"),
        (["query", "SELECT 1", "--rows", "many"], "Invalid value for '--rows'"),
        (["settle"], "say --day D, or --from D --to D"),
        (["settle", "--day", "yesterday"], "--day yesterday is not a day; write it like 20"),
        (["settle", "--day", "2026-02-30"], "--day 2026-02-30 is not a day"),
        (["settle", "--from", "0001-01-01", "--to", "2026-11-01"], "--from 0001-01-01 lies before the year 2000, and an event"),
        (["settle", "--from", "2026-11-19"], "--from 2026-11-19 lacks its --to; of one day say --day 2026-11-19"),
        (["settle", "--to", "2026-11-19"], "--to 2026-11-19 lacks its --from; of one day say --day 2026-11-19"),
        (["settle", "--from", "2026-11-19", "--to", "2026-11-01"], "--to 2026-11-01 lies before --from 2026-11-19"),
        (["settle", "--day", "2026-11-19", "--from", "2026-11-19", "--to", "2026-11-19"], "say --day D, or --from D --to D"),
        (["settle", "--day", "2999-01-01"], "2999-01-01 is not over in UTC; the last day that can be settled is 20"),
        (["publish", "nowhere"], "there is no run nowhere; list them with: tidemark runs"),
        (["publish", "../../etc"], "there is no run ../../etc"),
        (["compare", "nowhere"], "there is no run nowhere; list them with: tidemark runs"),
        (["rollback", "nowhere"], "there is no run nowhere"),
        (["drop", "../../etc"], "there is no run ../../etc"),
        (["settle", "--rejects", "--day", "2026-11-19"], "--rejects settles the days of the records that it mends"),
        (["settle", "--day", "2026-11-19", "--only", "nowhere"], "there is no rollup or view nowhere; there are page_panes"),
        (["settle", "--day", "2026-11-19", "--only", "visits, nowhere"], "there is no rollup or view nowhere; there are"),
        (["replay", "--source", "tape"], "--source is kafka or log, not tape"),
        (["replay", "--run", "../../etc"], "--run ../../etc is no name"),
        (["replay", "--run", "日"], "--run 日 is no name: letters of A to Z"),
        (["replay", "--run", ""], "--run is no name"),
        (["replay", "--run", "mend.json"], "--run mend.json is no name"),  # nor what a run's own files are called
        (["replay", "--run", "mend.verdicts"], "--run mend.verdicts is no name"),
        (["replay", "--from", "zero"], "--from zero is not a day"),
        (["replay", "--from", ""], "--from is not a day"),
        (["replay", "--from", "2026-11-19", "--to", "2026-11-01"], "--to 2026-11-01 lies before --from 2026-11-19"),
        (["produce", "page_views", "--sample", "--burst", "5"], "--burst goes with --rate"),
        (["produce", "nowhere", "--sample"], "there is no topic nowhere; there are activity, clicks"),
        (["produce", "page_views"], "say either --file F.jsonl or --sample"),
        (["produce", "page_views", "orders", "--file", "f.jsonl"], "a file goes to one topic; several go with --sample"),
        (["produce", "page_views", "--file", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["produce", "page_views", "--file", "x" * 300], "[Errno 36] File name too long"),
        (["produce", "page_views", "--sample", "--day", "19.11."], "--day 19.11. is not a day"),
        (["produce", "page_views", "--sample", "--day", ""], "--day is not a day"),
        (["produce", "page_views", "--sample", "--day", "2999-01-01"], "2999-01-01 is not over in UTC; its events"),
        (["consume", "page_views", "--from", "noon"], "--from noon is neither earliest, latest, an offset nor an instant"),
        (["consume", "page_views", "--from", "²"], "--from ² is neither earliest, latest, an offset nor an instant"),
        (["consume", "page_views"], "Missing option '--from'"),
        (["seek", "g", "../../etc", "--to", "earliest"], "../../etc is no name of a topic"),
        (["speed", "--stream", "processes", "--only", "page_views"], "--stream processes is no name"),
        (["speed", "--stream", "nowhere"], "there is no stream nowhere; there are main, alarms"),
        (["rejects", "nowhere"], "there is no topic nowhere"),
        (["rejects", "--day", "x"], "--day x is not a day"),
        (["rejects", "--day", ""], "--day is not a day"),
        (["report", "--day", "x"], "--day x is not a day"),
        (["report", "--day", ""], "--day is not a day"),
        (["report", "--day", "0001-01-01"], "--day 0001-01-01 lies before the year 2000"),
        (["report", "--day", "2999-01-01"], "2999-01-01 is not over in UTC; the last day that has a report is 20"),
        (["topics", "list", "--yaml"], "No such option"),
    ],
)
def test_wrong_word_is_one_sentence_and_exit_code_2(run, words, says):
    ended = run(*words)
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"tidemark: {says}") and ended.stderr.count("\n") == 1
    assert ended.stdout == ""


@pytest.mark.parametrize("words", ["topics", "dead-letters"])
def test_group_of_commands_alone_shows_its_help_and_that_one_is_missing(run, words):
    ended = run(words)
    assert (ended.exit_code, ended.stderr) == (
        2,
        f"tidemark: a command is missing (tidemark {words} --help shows what there is)\n",
    )
    assert f"Usage: tidemark {words}" in ended.stdout


def test_wrong_setting_is_one_sentence_and_exit_code_2(run, environment):
    environment["TIDEMARK_ZONE"] = "Mars/Olympus"
    ended = run("runs")
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith('tidemark: TIDEMARK_ZONE=Mars/Olympus: "Mars/Olympus" is not a time zone')


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"TIDEMARK_ZONE=\xff", "'utf-8' codec can't decode"),
        (b"# of us\n\nTIDEMARK_ZONE: Asia/Tokyo\nTIDEMARK_REPLICATION=3", "line 3 is not NAME=value with its quotes closed\n"),
        (b'TIDEMARK_REPLICATION=3\nTIDEMARK_ZONE="Asia/Tokyo', "line 2 is not NAME=value with its quotes closed\n"),
    ],
    ids=["not text", "a colon", "an open quote"],
)
def test_file_of_settings_that_cannot_be_read_is_one_sentence_and_exit_code_2(run, tmp_path, monkeypatch, lines, why):
    (tmp_path / ".env").write_bytes(lines)
    monkeypatch.setitem(Settings.model_config, "env_file", tmp_path / ".env")
    ended = run("runs")
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"tidemark: the settings in {tmp_path}/.env cannot be read: {why}")


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        ("https://oapi.dingtalk.org/robot/send?access_token=t", "its host oapi.dingtalk.org:443 is not one of"),
        ("http://oapi.dingtalk.com/robot/send?access_token=t", "it does not begin with https://"),
        ("https://oapi.dingtalk.com/robot/send", "it has no access_token="),
    ],
)
def test_wrong_web_hook_is_one_sentence_and_exit_code_2_before_anything_is_started(run, environment, monkeypatch, hook, why):
    """A notifier that nobody looks at would end by itself, and nobody be told of anything."""
    monkeypatch.setattr(local, "fetch_jars", lambda _: pytest.fail("it has gone on"))
    environment["TIDEMARK_DINGTALK_WEBHOOK"] = hook
    ended = run("up")
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"tidemark: TIDEMARK_DINGTALK_WEBHOOK: {why}")


@pytest.mark.parametrize("words", [["runs"], ["status"], ["verify"], ["report"], ["speed"], ["down"]])
def test_home_that_is_a_file_is_one_sentence_and_exit_code_2(run, environment, tmp_path, words):
    (tmp_path / "file").touch()
    environment["TIDEMARK_HOME"] = str(tmp_path / "file")
    ended = run(*words)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert (
        ended.stderr == f"tidemark: TIDEMARK_HOME={tmp_path}/file: there is a file; give a folder, which need not be there yet\n"
    )


@pytest.mark.parametrize("name", ["HOME", "LAKE", "JARS_DIR"])
@pytest.mark.parametrize("words", [("status",), ("verify",), ("up",), ("settle", "--day", "2026-11-01")], ids=" ".join)
def test_a_link_to_what_is_not_there_is_named(run, environment, tmp_path, name, words):
    """Its disk is not mounted: `verify` said that every file is there."""
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    environment[f"TIDEMARK_{name}"] = str(tmp_path / "link")
    ended = run(*words)
    said = f"it is a link to {tmp_path}/disk, which is not there; mount its disk, or make it"
    assert (ended.exit_code, ended.stderr) == (2, f"tidemark: TIDEMARK_{name}={tmp_path}/link: {said}\n")


def test_home_that_cannot_be_made_is_one_sentence_and_exit_code_1(run, environment, tmp_path):
    (tmp_path / "file").touch()
    environment["TIDEMARK_HOME"] = str(tmp_path / "file" / "home")
    ended = run("speed")
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith(f"tidemark: Not a directory: {tmp_path}/file/home")


def test_home_that_no_folder_can_hold_is_one_sentence_and_exit_code_1(run, environment):
    environment["TIDEMARK_HOME"] = "/proc/home"
    ended = run("report")
    assert (ended.exit_code, ended.stderr) == (
        1,
        "tidemark: No such file or directory: /proc/home; the home is /proc/home (TIDEMARK_HOME)\n",
    )


@pytest.mark.parametrize(
    ("file", "there"),
    [("lake/.pinning.lock", "the lake is {}/lake (TIDEMARK_LAKE)"), ("state/main/lease", "the home is {}/home (TIDEMARK_HOME)")],
)
def test_folder_that_cannot_be_written_is_named_with_its_setting(monkeypatch, tmp_path, file, there):
    for name in ("home", "lake"):
        monkeypatch.setenv(f"TIDEMARK_{name.upper()}", str(tmp_path / name))
    error = OSError(errno.EROFS, "Read-only file system", str(tmp_path / file))
    assert cli.ending(error) == (1, f"Read-only file system: {tmp_path}/{file}; {there.format(tmp_path)}")


@pytest.mark.parametrize("words", [["topics", "list"], ["topics", "apply"], ["consume", "page_views", "--from", "earliest"]])
def test_broker_that_is_away_is_one_sentence_and_exit_code_1(run, port, words, monkeypatch):
    monkeypatch.setattr(cli, "PATIENCE", 0.1)
    ended = run(*words)
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith(f"tidemark: no Kafka broker answers at 127.0.0.1:{port}")


def test_events_for_a_broker_that_is_away_end_with_the_sentence_of_every_command(run, port, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "PATIENCE", 0.1)
    monkeypatch.setattr(cli, "terminated_as_interrupted", lambda: None)
    monkeypatch.setattr(kafka, "produce", lambda *_, **__: kafka.Delivery(1, 0, 1, ["Local: Message timed out"]))
    (tmp_path / "f.jsonl").write_text('{"event_id": "e1"}\n')
    ended = run("produce", "page_views", "--file", str(tmp_path / "f.jsonl"))
    assert (ended.exit_code, ended.stdout) == (1, "0 delivered, 1 failed\n")
    assert ended.stderr.splitlines()[-1].startswith(f"tidemark: no Kafka broker answers at 127.0.0.1:{port}")


def test_process_of_another_user_is_one_sentence_and_exit_code_1(run, config, monkeypatch):
    def refused(*_, **__):
        raise psutil.AccessDenied(4711)

    monkeypatch.setattr(local, "stop", refused)
    ended = run("down")
    assert (ended.exit_code, ended.stderr.splitlines()[-1]) == (1, "tidemark: process 4711 is another user's; ask them to end it")


@pytest.mark.parametrize(
    ("stream", "only", "options"),
    [
        ("second", ["visits"], ["--recover"]),
        ("main", ["visits"], ["--accept-loss"]),
        ("main", [], ["--recover"]),
        ("alarms", [], []),
    ],
)
def test_command_that_a_refusal_says_starts_the_stream_with_the_topics_that_it_had(run, asked, stream, only, options):
    mine = CATALOG.only(only) if only else CATALOG.stream(stream)
    calls = asked(speed, "run", None)
    said = lake.started(CATALOG, stream, {**dict.fromkeys(mine.topics), "removed_since": None}, *options)
    assert ("--only" in said) == bool(only)
    assert run(*said.removeprefix("tidemark ").split()).exit_code == 0
    [((_, _, name, recover, accept_loss, named), _)] = calls
    started = CATALOG.only(named) if named else CATALOG.stream(name)
    assert (name, started) == (stream, mine)
    assert (recover, accept_loss) == ("--recover" in options, "--accept-loss" in options)


def test_second_copy_of_a_stream_ends_with_75(run, config):
    with Lease(config.state / "main" / "lease"):
        ended = run("speed")
    assert (ended.exit_code, ended.stderr.count("\n")) == (75, 1)
    assert f"process {os.getpid()} holds" in ended.stderr


def test_interrupted_command_ends_with_130(environment):
    running = process(environment, "produce", "page_views", "--sample", "--rate", "1")
    assert running.stderr is not None
    try:
        assert "no broker answers; waiting for it" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        assert "Ctrl-C again gives it up" in next(line for line in running.stderr if line.strip())
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=30) == 130
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("words", [("replay",), ("settle", "--day", "2026-11-01"), ("settle", "--rejects")])
def test_run_that_is_interrupted_before_it_has_a_name_is_begun_again(run, monkeypatch, words):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "terminated_as_interrupted", lambda: None)
    for name in ("settle", "replay", "settle_rejects"):
        monkeypatch.setattr(settle, name, interrupted)
    ended = run(*words)
    assert (ended.exit_code, ended.stderr) == (130, "tidemark: interrupted; give the same command again\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always on a full disk: Linux has one")
def test_full_disk_is_one_sentence_that_says_what_is_free_where(run, config):
    heartbeat = config.state / "main" / f"heartbeat.{os.getpid()}.part"  # what a stream writes first
    heartbeat.parent.mkdir(parents=True)
    heartbeat.symlink_to("/dev/full")
    done = run("speed")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"tidemark: No space left on device; free now: {config.state} ")
    assert "Free some space, then start it again" in done.stderr
    assert not heartbeat.is_symlink() and Path("/dev/full").exists()


def test_full_disk_is_known_behind_what_spark_makes_of_it(config):
    def error(cause: str) -> Exception:
        try:
            raise RuntimeError("batch 7 failed") from OSError(
                f"java.io.IOException: {cause}\n\tat java.base/java.io.FileOutputStream"
            )
        except RuntimeError as failed:
            return failed

    assert (lake.disk_full(config, error("No space left on device")) or "").startswith("No space left on device; free now: ")
    assert lake.disk_full(config, error("Permission denied")) is None


def test_full_disk_says_where_no_inode_is_left(config, monkeypatch):
    config.state.mkdir(parents=True, exist_ok=True)
    counts = (4096, 4096, 99, 99, 99, 10, 0, 0, 0, 255)  # of blocks some are free, of ten inodes none
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(counts))
    told = lake.disk_full(config, OSError(28, "No space left on device")) or ""
    assert f"{config.state} 0.4 MiB but no inode (too many files)" in told


def test_full_disk_says_what_is_free_where_an_answer_goes_and_for_what_is_temporary(config, tmp_path):
    """`tidemark query … > /mnt/full/answer.csv`, and what Spark spills."""
    code = "import sys; from tidemark import lake, settings; "
    code += "sys.stderr.write(lake.disk_full(settings.Settings(), OSError(28, 'No space left on device')))"
    env = os.environ | {"TIDEMARK_HOME": str(config.home), "TMPDIR": str(tmp_path)}
    with (tmp_path / "answer.csv").open("w") as answer:
        done = subprocess.run([sys.executable, "-c", code], stdout=answer, stderr=subprocess.PIPE, text=True, env=env, check=True)
    assert re.search(rf"free now: .*{tmp_path} \d+\.\d MiB, standard output \d+\.\d MiB\. Free some space", done.stderr)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_commands_run_with_their_output_closed(config, closed):
    """As a service is started. A file that is opened then would get number 1, and what is printed."""
    env = os.environ | {"TIDEMARK_HOME": str(config.home)}
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m tidemark tables {closed}", shell=True, capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_error_that_nobody_foresaw_keeps_its_trace(run, monkeypatch):
    monkeypatch.setattr(cli, "settings", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        raise run("runs").exception


def test_wrong_option_names_the_help_of_its_command(run):
    assert run("produce", "page_views", "--sample", "--rate", "-1").stderr.endswith(
        "(tidemark produce --help shows what there is)\n"
    )


MISTAKES = {
    "a bracket": ("TOPIC = Topic(\n", 1, "SyntaxError: '(' was never closed"),
    "an argument": (
        'from tidemark.model import Topic\n\nTOPIC = Topic("made", partitions=1)\n',
        3,
        "TypeError: Topic.__init__()",
    ),
    "an import": ("import tidemark\nfrom tidemark.functions import nothing\n", 2, "ImportError: cannot import name 'nothing'"),
}


@pytest.mark.parametrize(("source", "line", "why"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_pipeline_is_one_sentence_with_its_place(tmp_path, environment, source, line, why):
    """In a copy of the code, whose list of pipelines has one more."""
    copy = tmp_path / "tidemark"
    shutil.copytree(Path(cli.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "pipelines" / "mine.py").write_text(source)
    listed = copy / "pipelines" / "__init__.py"
    listed.write_text(listed.read_text().replace("import alarms,", "import mine, alarms,"))
    path = os.environ | environment | {"PYTHONPATH": str(tmp_path)}

    def said_by(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "tidemark", *words]
        ended = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stderr

    told = f"tidemark: {copy / 'pipelines' / 'mine.py'}:{line}: {why}"
    code, said = said_by("produce", "page_views", "--sample")
    assert (code, said.count("\n"), said.startswith(told)) == (2, 1, True), said
    code, said = said_by("down")
    assert (code, said.startswith(told), "; what runs is ended all the same\n" in said) == (0, True, True), said
    code, said = said_by("status")
    assert (code, said.startswith(told), "; what runs is shown all the same\n" in said) == (0, True, True), said


@pytest.mark.parametrize(
    ("words", "asks"), [(("settle", "--day", "2026-01-02"), True), (("replay",), True), (("tables",), False), (("runs",), False)]
)
def test_misspelt_check_is_one_sentence_of_those_who_ask_it_and_nobody_else_s(run, monkeypatch, words, asks):
    topic = Topic("t", None, 1, "a STRING NOT NULL", "kafka.timestamp", checks=(expect("ExpectColumnToExit", column="a"),))
    monkeypatch.setattr("tidemark.pipelines.CATALOG", Catalog({"t": topic}, {}, {}))
    done = run(*words)
    assert done.exit_code == (2 if asks else 0)
    assert ("tidemark: topic t: Great Expectations has no ExpectColumnToExit; the nearest are ExpectCol" in done.stderr) == asks


# ---- help


@pytest.mark.parametrize("words", [[], ["--help"], ["query", "--help"], ["demo", "--help"], ["topics", "apply", "--help"]])
def test_help_imports_nothing_heavy(words):
    seen = f"import sys; from tidemark.__main__ import main; sys.argv = {['tidemark', *words]!r}"
    code = f"{seen}\ntry: main()\nfinally: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "Usage: tidemark" in ended.stdout
    assert ended.stderr == "[]\n"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_java_reads_names_as_python_does_where_the_locale_is_plain(locale):
    code = "import sys; from tidemark.__main__ import main; sys.argv = ['tidemark', '--version']\ntry: main()\nfinally: "
    code += "import subprocess; subprocess.run(['java', '-XshowSettings:properties', '-version'])"
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"LC_ALL": locale}, capture_output=True, text=True)
    assert "sun.jnu.encoding = UTF-8" in ended.stderr


def test_version_names_spark_and_delta_too(run):
    said = run("--version")
    assert said.exit_code == 0
    assert re.fullmatch(r"tidemark \S+, pyspark \S+, delta-spark \S+, deltalake \S+, duckdb \S+\n", said.stdout)


def test_every_command_of_the_house_is_there(run):
    said = run("--help").stdout
    wanted = "up down topics produce consume speed settle publish runs query watch status rejects tables compact sweep report"
    wanted += " jars demo notify dead-letters seek"
    assert [word for word in wanted.split() if f"│ {word} " not in said] == []


# ---- answers


def test_query_answers_in_json(run, config):
    write(config, "views/site_last_hour", [{"mark": NOON, "pv": 3, "uv": 2, "settled": False}], SITE)
    ended = run(
        "query", "SELECT *, 'nan'::DOUBLE AS n, 1.50::DECIMAL(4,2) AS d, '\\xFF'::BLOB AS b FROM site_last_hour", "--json"
    )
    assert ended.exit_code == 0
    found = json.loads(ended.stdout)
    assert found["columns"] == ["mark", "pv", "uv", "settled", "day", "n", "d", "b"]
    assert found["rows"] == [["2026-11-19T12:00:00+00:00", 3, 2, False, "2026-11-19", "nan", "1.50", "\\xff"]]
    assert found["truncated"] is False


def test_query_in_a_pipe_is_tabs_and_says_what_was_cut_on_stderr(run):
    ended = run("query", "SELECT range AS n, 'a' || chr(10) || 'b' AS t FROM range(5)", "--rows", "2")
    assert ended.stdout == "n\tt\n0\ta b\n1\ta b\n"
    assert ended.stderr.startswith("2 rows in") and "there are more, ask for them with --rows" in ended.stderr


def test_query_in_a_pipe_has_what_holds_values_as_json_and_bytes_whole(run: Callable[..., Result]) -> None:
    ended = run(
        "query", "SELECT {'n': 1, 'at': TIMESTAMPTZ '2026-11-19 12:00+00'} AS s, ['a', NULL] AS l, '\\x00\\xFF'::BLOB AS b"
    )
    assert ended.stdout == 's\tl\tb\n{"n": 1, "at": "2026-11-19 12:00:00"}\t["a", null]\t\0\\xff\n'


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (
            {"partition": 0, "value": bytes(17), "at": NOON},
            '{"partition": 0, "value": "<17 bytes>", "at": "2026-11-19 12:00:00"}',
        ),
        ([1.5, float("nan"), None, "ü"], '[1.5, "nan", null, "ü"]'),
        (bytes(1024), "<1,024 bytes>"),
        (b"\0\0\0\x05", "0x00000005"),
        (b'{"page": "/\xff"}', '{"page": "/\\xff"}'),  # a reject
    ],
)
def test_value_that_is_no_text_is_readable_on_a_terminal(value: Any, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=100, force_terminal=True, file=(file := io.StringIO()))
    monkeypatch.setattr(cli, "console", lambda: console)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    cli.table(["value"], [[value]])
    assert file.getvalue().splitlines()[1].rstrip() == shown


def test_query_over_its_time_ends_with_one_sentence(run):
    ended = run("query", "SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(10000000) b", "--seconds", "0.2")
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1)


def test_rejects_are_listed_with_reason_and_bytes(run, config):
    write(
        config,
        "log/page_views",
        [record(1, b"{}", None), record(2, b"\xff<html>", "not JSON"), record(3, b"[" * 500, "not JSON")],
        LOG,
    )
    assert run("rejects").stdout == "topic\treject\trecords\npage_views\tnot JSON\t2\n"
    lines = run("rejects", "page_views").stdout.splitlines()
    assert lines[1] == f"3\t3\t2026-11-19 12:00:00\tnot JSON\t{'[' * 120} … (500 bytes)"
    assert lines[2] == "3\t2\t2026-11-19 12:00:00\tnot JSON\t\\xff<html>"
    assert json.loads(run("rejects", "page_views", "--limit", "1", "--json").stdout)[0]["offset"] == 3
    assert run("rejects", "page_views", "--day", "2026-11-18").stdout.count("\n") == 1


def test_rejects_of_a_topic_that_is_called_by_a_word_of_sql_are_listed(run, config, monkeypatch):
    topic = Topic("order", key="id", partitions=1, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL", event_time="at")
    monkeypatch.setattr(cli, "catalog", lambda: Catalog({"order": topic}, {}, {}))
    write(config, "log/order", [record(1, b"{", "not JSON")], LOG)
    assert run("rejects").stdout == "topic\treject\trecords\norder\tnot JSON\t1\n"
    assert run("rejects", "order").stdout.splitlines()[1].endswith("not JSON\t{")


def test_rejects_are_told_also_where_the_log_of_a_topic_is_damaged(run: Callable[..., Result], config: Settings) -> None:
    for name in ("log/page_views", "log/searches"):
        write(config, name, [record(1, b"{", "not JSON")], LOG)
    damage(config, "log/searches")
    done = run("rejects")
    assert (done.exit_code, done.stdout) == (1, "topic\treject\trecords\npage_views\tnot JSON\t1\n")
    assert done.stderr.startswith("tidemark: searches cannot be read at ") and done.stderr.count("\n") == 1
    assert run("rejects", "searches").stdout == ""


def test_rejects_are_as_many_as_were_asked_for_and_a_cut_is_told(run, config, environment):
    environment["TIDEMARK_QUERY_ROWS"] = "1"
    rejected = [record(1, b"{}", "late"), record(2, b"<html>", "not JSON"), record(3, b"[", "not JSON")]
    write(config, "log/page_views", rejected, LOG)
    assert run("rejects", "page_views", "--limit", "2").stdout.count("\n") == 3
    ended = run("rejects", "--limit", "2")
    assert (ended.exit_code, ended.stderr) == (
        2,
        "tidemark: --limit goes with a TOPIC; without one every reject is counted\n",
    )
    ended = run("rejects")
    assert ended.stdout == "topic\treject\trecords\npage_views\tnot JSON\t2\n"
    assert ended.stderr == "1 rows; there are more, for them raise TIDEMARK_QUERY_ROWS\n"
    assert len(json.loads(run("rejects", "--json").stdout)) == 1


def test_runs_say_what_was_held_back(run, config):
    tables = {"daily_traffic": {"gate": "failed", "rows": 1, "reasons": ["uv > pv"]}, "page_panes": {"gate": "passed", "rows": 2}}
    lake.save(
        config, lake.Run("r1", "staged", ["2026-11-18", "2026-11-19"], "late file", "2026-11-20T01:00:00", "0.1.0", tables=tables)
    )
    assert (
        run("runs").stdout.splitlines()[1]
        == "r1\tstaged\t2026-11-18 to 2026-11-19\t2026-11-20T01:00:00\tlate file\tdaily_traffic: uv > pv"
    )
    assert json.loads(run("runs", "--json").stdout)[0]["tables"] == tables


PANES_FAILED = {"gate": "failed", "reasons": ["key is unique"], "failed": ["key is unique"]}
READS_PANES = {"gate": "blocked", "reasons": ["it reads page_panes"], "reads": ["page_panes"]}
FORCED, THEN = {"forced": {"checks": ["key is unique"], "reason": "known"}}, {"published": "2026-11-20T02:00:00+00:00"}


#   page_panes failed its gate, and daily_traffic reads it
@pytest.mark.parametrize(
    ("state", "panes", "daily", "held", "said"),
    [
        ("published", {}, {}, "page_panes: key is unique; daily_traffic: it reads page_panes", "page_panes daily_traffic"),
        ("published", FORCED | THEN, THEN, "", ""),
        ("rolled back", FORCED, {}, "", ""),
    ],
    ids=["held back", "published over", "and taken back"],
)
def test_what_was_published_over_its_gate_is_not_held_back(run, config, state, panes, daily, held, said):
    tables = {"page_panes": PANES_FAILED | panes, "daily_traffic": READS_PANES | daily}
    lake.save(config, lake.Run("r1", state, ["2026-11-19"], "late file", "2026-11-20T01:00:00+00:00", "0.1.0", tables=tables))
    assert run("runs").stdout.splitlines()[1].split("\t")[5:] == [held]
    newest = f"newest run\tr1, {state}, 2026-11-19{', held back: ' if said else ''}{said}\n"
    assert newest in run("status").stdout
    assert json.loads(run("status", "--json").stdout)["newest_run"]["held_back"] == said.split()


def test_tables_are_those_that_are_written(run, config):
    write(config, "views/site_last_hour", [{"mark": NOON, "pv": 3, "uv": 2, "settled": False}], SITE)
    (found,) = json.loads(run("tables", "--json").stdout)
    assert (found["name"], found["version"], found["files"], found["rows"], found["days"]) == ("site_last_hour", 1, 1, 1, 1)


def damage(config: Settings, table: str) -> None:
    """Its newest log entry, as a power cut leaves it."""
    max((config.lake_path / table / "_delta_log").glob("*.json")).write_text("{")


def test_tables_are_told_also_where_the_log_of_one_is_damaged(run: Callable[..., Result], config: Settings) -> None:
    for name in ("views/site_last_hour", "views/site_hourly_traffic"):
        write(config, name, [{"mark": NOON, "pv": 3, "uv": 2, "settled": False}], SITE)
    damage(config, "views/site_hourly_traffic")
    for done in (run("tables"), run("tables", "--json")):
        assert (done.exit_code, "site_last_hour" in done.stdout, "site_hourly_traffic" in done.stdout) == (1, True, False)
        assert done.stderr.startswith("tidemark: table views/site_hourly_traffic: its log entry") and done.stderr.count("\n") == 1


def test_status_of_nothing_is_an_answer(run, port):
    found = json.loads(run("status", "--json").stdout)
    assert (found["broker"], found["streams"], found["processes"], found["newest_run"]) == (
        "does not answer",
        {"main": {}, "alarms": {}},
        [],
        None,
    )


@pytest.mark.parametrize(
    ("command", "work", "then"),
    [
        ("up", "bring_up", "what was started runs on; tidemark up does the rest, tidemark down ends it"),
        ("down", "bring_down", "what has not ended runs on; tidemark down ends the rest"),
    ],
)
def test_ctrl_c_in_up_and_down_says_what_is_left(run, monkeypatch, command, work, then):
    def cut(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"tidemark.__main__.{work}", cut)
    found = run(command)
    assert (found.exit_code, found.stderr) == (130, f"tidemark: interrupted; {then}\n")


def test_status_tells_of_a_variable_that_would_be_a_setting_and_is_none(run, environment, monkeypatch):
    monkeypatch.setenv("TIDEMARK_BROKER", "10.0.0.1:9092")
    found = run("status")
    assert (found.exit_code, found.stderr) == (
        0,
        "tidemark: TIDEMARK_BROKER: there is no such setting; .env.example has them all\n",
    )


def test_status_names_the_newest_run_also_where_it_has_no_days(run, config):
    lake.save(config, lake.Run("rejects-1", "done", [], "", str(NOON), "0", {}, kind="rejects"))
    assert "newest run\trejects-1, done\n" in run("status").stdout


def test_status_is_told_also_where_a_run_s_record_is_damaged(run, config):
    (config.lake_path / "runs").mkdir(parents=True)
    (config.lake_path / "runs" / "r1.json").touch()
    done = run("status")
    assert (done.exit_code, "stream\tmain" in done.stdout) == (0, True)
    assert f"newest run\t{config.lake_path}/runs/r1.json is damaged, it holds no run" in done.stdout
    assert "r1.json is damaged" in json.loads(run("status", "--json").stdout)["runs_damaged"]
    lake.save(config, lake.Run("r2", "staged", ["2026-11-19"], "", str(NOON), "0", {}))
    assert f"newest run\tr2, staged, 2026-11-19, {config.lake_path}/runs/r1.json is damaged" in run("status").stdout


def test_runs_are_told_also_where_the_record_of_one_is_damaged(run: Callable[..., Result], config: Settings) -> None:
    for name in ("r1", "r2"):
        lake.save(config, lake.Run(name, "staged", ["2026-11-19"], "", str(NOON), "0", {}))
    (config.lake_path / "runs" / "r1.json").write_text('{"id": "r1", "sta')
    for done, found in ((run("runs"), "r2\tstaged"), (run("runs", "--json"), '"r2"')):
        assert (done.exit_code, found in done.stdout) == (1, True)
        assert done.stderr.startswith(f"tidemark: {config.lake_path}/runs/r1.json is damaged, it holds no run")


def test_status_says_of_a_notifier_that_has_ended_where_its_log_is(run, config):
    """Until another one beats, whoever started it."""
    log = local.start(config, "notify", [sys.executable, "-c", "raise SystemExit(2)"]).log
    local.STARTED[-1].wait()
    assert f"notifier\thas ended; its log is {log}\n" in run("status").stdout
    assert json.loads(run("status", "--json").stdout)["notifier_ended"] == str(log)
    beat = {"at": str(dt.datetime.now(dt.UTC)), "state": "running", "pid": os.getpid(), "robots": {}}
    (config.state / "notify").mkdir(parents=True)
    (config.state / "notify" / "heartbeat.json").write_text(json.dumps(beat))
    assert "notifier\trunning at " in run("status").stdout


@pytest.mark.parametrize(("ago", "state"), [(3, "running"), (3600, "silent")])
def test_status_says_of_a_notifier_that_has_not_beaten_for_long_that_it_is_silent(run, config, ago, state):
    """One that was killed leaves its last word."""
    beat = {"at": str(dt.datetime.now(dt.UTC) - dt.timedelta(seconds=ago)), "state": "running", "pid": 1, "robots": {}}
    (config.state / "notify").mkdir(parents=True)
    (config.state / "notify" / "heartbeat.json").write_text(json.dumps(beat))
    assert f"{state} at " in run("status").stdout


def test_sweep_deletes_old_folders_that_no_table_names(run, config):
    write(config, "log/page_views", [record(1, b"{}", None)], LOG)
    left = config.lake_path / "log/page_views/live/main-9-9-left"
    left.mkdir()
    os.utime(left, (0, 0))
    assert json.loads(run("sweep", "--json").stdout) == [str(left)]
    assert (config.lake_path / "log/page_views/live/main-0-0-aa").is_dir() and not left.exists()


@pytest.mark.parametrize("broken", ["log/page_views", "verdicts"])
def test_sweep_does_the_rest_and_says_so_where_the_log_of_a_table_is_damaged(
    run: Callable[..., Result], config: Settings, broken: str
) -> None:
    lefts = [config.lake_path / name / "live/main-9-9-left" for name in (broken, "log/searches")]
    for left in lefts:
        write(config, str(left.parent.parent.relative_to(config.lake_path)), [record(1, b"{}", None)], LOG)
        left.mkdir()
        os.utime(left, (0, 0))
    lake.save(config, lake.Run("old", "published", ["2026-11-19"], "", (NOON - dt.timedelta(days=500)).isoformat(), "0"))
    damage(config, broken)
    done = run("sweep")
    assert (done.exit_code, done.stderr.startswith(f"tidemark: table {broken}: its log entry")) == (1, True)
    assert ([left.exists() for left in lefts], lake.runs(config)) == ([True, False], [])


def test_sweep_takes_out_what_is_kept_no_longer(run, config):
    for name, days in (("old", 401), ("young", 399)):
        created = (dt.datetime.now(dt.UTC) - dt.timedelta(days=days)).isoformat()
        lake.save(config, lake.Run(name, "published", ["2026-11-19"], "test", created, "0.1.0"))
    assert run("sweep").exit_code == 0
    assert [r.id for r in lake.runs(config)] == ["young"]


def test_sweep_has_long_logs_begin_again(run, config):
    log = config.state / "logs" / "speed-main.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"high tide\n" * 2_000_000)
    assert run("sweep").exit_code == 0
    assert (log.stat().st_size, log.with_name("speed-main.log.1").stat().st_size) == (0, 20_000_000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always on a full disk: Linux has one")
def test_sweep_frees_its_folders_where_the_disk_has_no_room_for_a_log(run, config):
    write(config, "log/page_views", [record(1, b"{}", None)], LOG)
    left, log = config.lake_path / "log/page_views/live/main-9-9-left", config.state / "logs" / "speed-main.log"
    for folder in (left, log.parent):
        folder.mkdir(parents=True)
    os.utime(left, (0, 0))
    log.write_bytes(b"high tide\n" * 2_000_000)
    log.with_name("speed-main.log.1").symlink_to("/dev/full")
    ended = run("sweep")
    assert (ended.exit_code, left.exists(), ended.stdout) == (1, False, f"{left}\n")
    assert "No space left on device" in ended.stderr


def test_down_of_nothing_is_done(run):
    assert run("down").exit_code == 0


HEARS = """
import json, os, pathlib, signal, sys, time

def say(state):
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"state": state, "pid": os.getpid(), "at": sys.argv[3], "error": "no room"}))

def end(*_):
    say(sys.argv[2])
    if sys.argv[2] != "running":
        os._exit(0)

signal.signal(signal.SIGTERM, end)
say("running")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("heard", "patience", "says", "ended"),
    [
        ("stopped", 60, "stream main: drained", True),
        ("failed", 60, "stream main: failed while it drained: no room; what it was at is done again at the next start", False),
        ("running", 1, "stream main: killed, as it had not drained after 1 s; what it was at is done again", False),
    ],
)
def test_down_says_which_stream_drained_and_which_was_killed(config, capsys, heard, patience, says, ended):
    """A stream writes its last heartbeat when it has drained; one in the middle of a batch does not hear SIGTERM."""
    beat = config.state / "main" / "heartbeat.json"
    beat.parent.mkdir(parents=True)
    now = dt.datetime.now(dt.UTC).isoformat()
    local.start(config, "speed-main", [sys.executable, "-c", HEARS, str(beat), heard, now])
    deadline = time.monotonic() + 20
    while not local.beats(config, "main"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert cli.bring_down(config, cli.Steps(), patience=patience) is ended
    assert says in capsys.readouterr().err


def test_up_waits_for_a_stream_that_drains_and_starts_it_again(config, monkeypatch):
    """As where `tidemark down` was killed: that it runs already would be its last word."""
    beat = config.state / "main" / "heartbeat.json"
    beat.parent.mkdir(parents=True)
    child = subprocess.Popen(["sleep", "60"])
    beat.write_text(json.dumps({"state": "draining", "pid": child.pid, "at": dt.datetime.now(dt.UTC).isoformat()}))
    waited, started = [], []

    def end(seconds):
        waited.append(seconds)
        child.kill()
        child.wait()

    monkeypatch.setattr(cli.time, "sleep", end)
    monkeypatch.setattr(local, "start_stream", lambda _, stream: started.append((stream, len(waited))))
    cli.begin_stream(config, "main")
    assert started == [("main", 1)]


def test_heartbeat_of_a_process_that_is_gone_is_no_life(config):
    beat = config.state / "main" / "heartbeat.json"
    beat.parent.mkdir(parents=True)
    now, born = dt.datetime.now(dt.UTC), dt.datetime.fromtimestamp(psutil.Process().create_time(), dt.UTC)
    for at, pid, lives in ((now, os.getpid(), True), (born - dt.timedelta(hours=1), os.getpid(), False), (now, 2**22 + 1, False)):
        beat.write_text(json.dumps({"state": "running", "pid": pid, "at": at.isoformat()}))
        assert local.beats(config, "main") is lives


def test_heartbeat_that_a_power_cut_has_emptied_is_none(config):
    folder = config.state / "main"
    folder.mkdir(parents=True)
    (folder / "heartbeat.json").touch()
    assert (local.status(config), local.beats(config, "main")) == ({}, False)


def test_a_process_that_ended_and_was_not_collected_is_no_life(config):
    beat = config.state / "main" / "heartbeat.json"
    beat.parent.mkdir(parents=True)
    child = subprocess.Popen(["sleep", "60"])
    beat.write_text(json.dumps({"state": "running", "pid": child.pid, "at": dt.datetime.now(dt.UTC).isoformat()}))
    assert local.beats(config, "main")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not local.beats(config, "main")
    child.wait()


@pytest.mark.parametrize(
    ("state", "minutes", "lives"),
    [("running", 0.5, True), ("running", 2, False), ("starting", 2, True), ("starting", 20, False), ("held", 0, False)],
)
def test_service_lives_as_long_as_its_heart_beats(config, state, minutes, lives):
    service = config.model_copy(update={"stream_backend": "service"})
    beat = service.state / "main" / "heartbeat.json"
    beat.parent.mkdir(parents=True)
    at = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=minutes)
    for pid in (os.getpid(), 2**22 + 1):  # where the process is, this number may be another's or nobody's
        beat.write_text(json.dumps({"state": state, "pid": pid, "at": at.isoformat()}))
        assert local.beats(service, "main") is lives


# ---- words that reach the engine, and what comes back


@pytest.fixture
def asked(monkeypatch) -> Callable[..., list]:
    """Have an engine's function note how it is called, and answer; what else a command does is real."""
    monkeypatch.setattr(cli, "terminated_as_interrupted", lambda: None)

    def instead(engine: object, name: str, answer: object) -> list:
        calls: list = []
        monkeypatch.setattr(engine, name, lambda *words, **named: calls.append((words, named)) or answer)
        return calls

    return instead


def staged(name: str = "r1", gate: str = "passed") -> lake.Run:
    tables = {
        "daily_traffic": {"gate": gate, "rows": 3, "reasons": [], "compare": {"changed": 1}},
        "page_panes": {"gate": "passed"},
    }
    return lake.Run(name, "staged", ["2026-11-18", "2026-11-19"], "why", "2026-11-20T01:00:00", "0.1.0", tables=tables)


D18, D19 = dt.date(2026, 11, 18), dt.date(2026, 11, 19)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], {"source": "kafka", "only": [], "first": None, "last": None, "name": None}),
        (
            ["--source", "log", "--only", "daily_traffic, visits", "--from", "2026-11-18", "--to", "2026-11-19", "--run", "r1"],
            {"source": "log", "only": ["daily_traffic", "visits"], "first": D18, "last": D19, "name": "r1"},
        ),
    ],
)
def test_replay_is_asked_for_as_it_was_said_and_its_run_is_the_last_line(run, asked, words, wanted):
    calls = asked(settle, "replay", staged())
    ended = run("replay", *words, "--reason", "counted twice")
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "r1")
    assert ended.stdout.splitlines()[1].split("\t")[:5] == ["daily_traffic", "3", "", "", "1"]
    [((_, catalog, reason, _), named)] = calls
    assert (catalog, reason, named) == (CATALOG, "counted twice", wanted)


def test_run_whose_gate_failed_is_shown_and_ends_with_1(run, asked):
    asked(settle, "replay", staged(gate="failed"))
    ended = run("replay", "--json")
    assert (ended.exit_code, json.loads(ended.stdout)["id"]) == (1, "r1")


def test_days_from_to_are_settled_both_included(run, asked):
    calls = asked(settle, "settle", staged())
    ended = run("settle", "--from", "2026-11-18", "--to", "2026-11-19", "--only", "visits", "--reason", "bots")
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "r1")
    [((_, _, days, reason, _, only), _)] = calls
    assert (days, reason, only) == ([D18, D19], "bots", ["visits"])


@pytest.mark.parametrize(("answer", "last"), [(staged(), ["r1"]), (None, [])], ids=["mended", "nothing to mend"])
def test_rejects_are_judged_again_for_a_reason(run, asked, answer, last):
    calls = asked(settle, "settle_rejects", answer)
    ended = run("settle", "--rejects", "--reason", "page may be null")
    assert (ended.exit_code, ended.stdout.splitlines()[-1:]) == (0, last)
    [((_, _, reason, _), _)] = calls
    assert reason == "page may be null"


def test_rejects_of_which_none_is_mended_are_null_in_json(run, asked):
    asked(settle, "settle_rejects", None)
    ended = run("settle", "--rejects", "--json")
    assert (ended.exit_code, json.loads(ended.stdout)) == (0, None)


def test_comparison_is_that_of_the_run_and_made_again_where_it_is_asked_for(run, config, asked):
    lake.save(config, staged())
    kept = compare.Difference("daily_traffic", D19, 3, 1, 0, 0, [{"what": "changed", "run": {"pv": 2}, "published": {"pv": 1}}])
    compare.keep(config, staged(), [kept])
    now = compare.Difference("daily_traffic", D19, 3, 0, 0, 2)
    asked(session, "session", None)
    asked(lake, "staged", [])
    calls = asked(compare, "compare", [now])
    assert "| daily_traffic | 2026-11-19 | 3 | 1 | 0 | 0 |" in run("compare", "r1").stdout
    assert compare.differences_of(json.loads(run("compare", "r1", "--json").stdout)) == [kept]
    assert calls == []
    assert compare.differences_of(json.loads(run("compare", "r1", "--json", "--again").stdout)) == [now]
    [((_, _, _, known, names), _)] = calls
    assert (known.id, names) == ("r1", ["daily_traffic"])  # of page_panes it has staged nothing


def test_comparison_of_a_run_whose_staged_files_are_swept_says_so_without_spark(run, config):
    lake.save(config, staged())
    ended = run("compare", "r1", "--again")
    gone = "what run r1 staged of table views/daily_traffic is gone; settle the days again"
    assert (ended.exit_code, ended.stderr) == (1, f"tidemark: {gone}\n")


def test_comparison_of_a_run_that_has_staged_nothing_is_one_sentence(run, config):
    dropped = staged()
    dropped.state = "dropped"
    lake.save(config, dropped)
    ended = run("compare", "r1")
    assert (ended.exit_code, ended.stderr) == (1, "tidemark: run r1 is dropped; there is nothing staged to compare\n")
    compare.keep(config, dropped, [compare.Difference("daily_traffic", D19, 3, 1, 0, 0, [])])  # before it was dropped
    assert run("compare", "r1").stdout.startswith("# What run r1 would have changed, which is dropped\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [("r1", ""), ("reprocess-0123456789ab", "; answer Drop in Airflow too where it waits under Required Action")],
)
def test_run_that_airflow_has_begun_is_dropped_with_a_word_on_who_waits_for_it(run, config, name, said):
    begun = staged()
    begun.id = name
    lake.save(config, begun)
    assert run("drop", name).stderr == f"run {name} is dropped{said}\n"
    assert lake.run_of(config, name).state == "dropped"


#   page_panes failed its gate, and was published over the check before
@pytest.mark.parametrize(("held", "code"), [((), 0), (("pv is at least 1",), 1)])
def test_publication_ends_with_1_where_a_table_is_held_back_and_not_for_a_gate_that_it_was_published_over(
    run, config, asked, held, code
):
    over = staged()
    over.tables["page_panes"] = {"gate": "failed", "forced": {"checks": ["key is unique"], "reason": "known"}}
    lake.save(config, over)
    asked(settle, "publish", [settle.Published("page_panes", 5, 1, 0.003), settle.Published("daily_traffic", None, 0, 0.0, held)])
    assert [run("publish", "r1", *words).exit_code for words in ([], ["--json"])] == [code, code]


def test_publish_says_what_was_published_before(run, config, asked):
    lake.save(config, staged())
    asked(settle, "publish", [settle.Published("page_panes", 5, 1, 0.003), settle.Published("visits", None, 0, 0.0)])
    assert run("publish", "r1").stderr.splitlines()[0].endswith(" s; 1 were before, and are left as they are")


def test_publication_is_taken_back_for_a_reason(run, config, asked):
    lake.save(config, staged())
    back = [settle.Published("daily_traffic", 8, 0, 0.004), settle.Published("page_panes", 5, 0, 0.003)]
    calls = asked(settle, "rollback", back)
    ended = run("rollback", "r1", "--reason", "too early")
    assert ended.exit_code == 0
    assert ended.stdout == "table\tversion\tms\ndaily_traffic\t8\t4\npage_panes\t5\t3\n"
    assert ended.stderr.startswith("2 tables are as they were before run r1 (")
    assert [named["version"] for named in json.loads(run("rollback", "r1", "--json").stdout)] == [8, 5]
    assert [(words[2], words[3]) for words, _ in calls] == [("r1", "too early"), ("r1", "by hand")]


@pytest.mark.parametrize(("taken", "code"), [(2, 0), (1, 1)])
def test_file_is_produced_line_by_line_as_it_stands(run, tmp_path, monkeypatch, taken, code):
    lines = [b'{"event_id": "e1"}', b"no JSON"]
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(lines))
    sent = []

    def produce(_, topic, events, **named):
        sent.append((topic.name, [e if isinstance(e, bytes) else e.value for e in events], named["rate"]))
        return kafka.Delivery(2, taken, 2 - taken, [] if taken == 2 else ["the broker said\nno"])

    monkeypatch.setattr(cli, "terminated_as_interrupted", lambda: None)
    monkeypatch.setattr(kafka, "produce", produce)
    ended = run("produce", "page_views", "--file", str(tmp_path / "f.jsonl"), "--rate", "10")
    assert (ended.exit_code, ended.stdout) == (code, f"{taken} delivered, {2 - taken} failed\n")
    assert sent == [("page_views", lines, 10)]
    assert ended.stderr.strip() == ("" if taken == 2 else "tidemark: page_views: the broker said no")


def test_file_of_which_kafka_takes_no_more_does_not_count_as_sent(run, tmp_path, monkeypatch):
    """
    e1 delivered ──▶ the user is refused ──▶ e2 and e3 are not taken
    """

    class Producer:
        def __init__(self, options):
            self.failed = options["error_cb"]

        def produce(self, *_, on_delivery, **__):
            on_delivery(None, None)

        def poll(self, _):
            self.failed(KafkaError(KafkaError._AUTHENTICATION, "SASL authentication failed"))

        def flush(self, _):
            return 0

    monkeypatch.setattr(cli, "terminated_as_interrupted", lambda: None)
    monkeypatch.setattr(kafka, "connected", lambda *_: None)
    monkeypatch.setattr(kafka, "descriptions", lambda _, __, names, **___: dict.fromkeys(names))
    monkeypatch.setattr(kafka, "Producer", Producer)
    (tmp_path / "f.jsonl").write_text('{"event_id": "e1"}\n{"event_id": "e2"}\n{"event_id": "e3"}\n')
    ended = run("produce", "page_views", "--file", str(tmp_path / "f.jsonl"))
    assert (ended.exit_code, ended.stdout) == (1, "1 delivered, 0 failed\n")
    assert "cannot be used: it does not accept the user" in ended.stderr


def test_nothing_behind_the_end_of_a_topic_says_where_that_is(run, monkeypatch):
    monkeypatch.setattr(cli, "with_broker", lambda: None)
    monkeypatch.setattr(kafka, "consume", lambda *_, **__: iter(()))
    monkeypatch.setattr(kafka, "offsets", lambda *_: {"notify": {0: 3, 1: 0}})
    ended = run("consume", "notify", "--from", "9999999")
    assert (ended.exit_code, ended.stdout) == (0, "")
    assert ended.stderr == "tidemark: topic notify holds nothing from 9999999 on; its partitions end: 0 at 3, 1 at 0\n"


def test_pipe_is_produced_as_a_file_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    given = kafka.from_file(CATALOG.topics["page_views"], tmp_path / "pipe")
    with ThreadPoolExecutor() as beside:
        beside.submit((tmp_path / "pipe").write_text, '{"event_id": "e1"}\n')
        assert list(given) == [b'{"event_id": "e1"}']


@pytest.mark.parametrize(
    ("refused", "code", "says"),
    [(False, 2, "tidemark: Kafka has no topic orders\n"), (True, 1, "tidemark: orders: Kafka cannot be used\n")],
    ids=["missing", "refused on the way"],
)
def test_of_several_topics_one_that_cannot_be_sent_to_ends_the_others(run, monkeypatch, refused, code, says):
    def produce(_, topic, events, **named):
        if topic.name == "orders":
            if refused:
                return kafka.Delivery(errors=["Kafka cannot be used"], refused=True)
            raise kafka.TopicMissing("Kafka has no topic orders")
        deadline = time.monotonic() + 20
        while not named["interrupts"]():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return kafka.Delivery(interrupted=True)

    monkeypatch.setattr(kafka, "produce", produce)
    ended = run("produce", "page_views", "orders", "--sample")
    assert (ended.exit_code, ended.stderr) == (code, says)


def test_run_goes_on_where_nobody_reads_its_progress_any_more(run, monkeypatch):
    def settled(settings, catalog, days, reason, say, only):
        say("at work")
        return staged()

    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(cli, "terminated_as_interrupted", lambda: None)
    monkeypatch.setattr(settle, "settle", settled)
    monkeypatch.setattr(cli, "console", lambda stderr=False: Console(file=Closed(), width=100))
    ended = run("settle", "--day", "2026-11-19")
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "r1")


def test_step_says_a_folder_as_it_is_called(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(cli, "console", lambda stderr: Console(width=200, file=shown))
    with cli.Steps().step("jars in /srv/[prod]") as say:
        say("its log is /srv/[prod]/[/x]")
    assert shown.getvalue().startswith("jars in /srv/[prod]: its log is /srv/[prod]/[/x] (0.")


# ---- the demo

CLOSED = """
import signal, sys, time
from pathlib import Path
from tidemark import __main__ as cli

def up(config, steps, streams):
    with steps.step("up"):
        print("up", flush=True)
        for _ in range(600):  # a signal that comes just before a long sleep is not seen until it is over
            time.sleep(0.1)

def down(config, steps, patience):
    with steps.step("down"):
        Path(sys.argv[1]).touch()

cli.bring_up, cli.bring_down = up, down
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as a terminal gives it, and not as nohup
sys.argv[2:] = []
cli.app(["demo"])
"""


def test_demo_whose_terminal_is_closed_ends_what_it_started(environment, tmp_path):
    ours, its = pty.openpty()
    argv = [sys.executable, "-c", CLOSED, str(tmp_path / "ended")]
    demo = subprocess.Popen(argv, env=os.environ | environment, stdin=its, stdout=its, stderr=its)
    try:
        os.close(its)
        while b"up" not in os.read(ours, 1000):
            pass
        os.close(ours)
        demo.send_signal(signal.SIGHUP)
        assert demo.wait(30) == 130
        assert (tmp_path / "ended").exists()
    finally:
        demo.kill()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("log/page_views", "{lake}/log/page_views has records"),
        ("log/tickets", "{lake}/log/tickets has records"),  # of a pipeline that is not listed any more
        ("views/tickets_by_day", "{lake}/views/tickets_by_day has records"),
        ("page_views", "topic page_views at {brokers} has records"),
        ("quotes", "topic quotes at {brokers} has records"),  # to which the demo would not send
        ("nothing", ""),
    ],
)
def test_demo_sends_nothing_into_what_is_somebody_s(config, monkeypatch, what, says):
    def offsets(_, names, *rest):
        if names not in (["page_views"], ["quotes"]):
            raise kafka.TopicMissing("no topic")
        return {names[0]: {0: 0, 1: 7 if names == [what] else 0}}

    monkeypatch.setattr(kafka, "offsets", offsets)
    if "/" in what:
        write(config, what, [mark(0, 4, 3)], SITE)
    if what == "nothing":  # as a stream leaves it that has read none
        (config.lake_path / "log").mkdir(parents=True)
        DeltaTable.create(config.lake_path / "log" / "page_views", Schema.from_arrow(SITE))
    topics = [CATALOG.topics["orders"], CATALOG.topics["page_views"]]
    if says:
        found = re.escape(says.format(lake=config.lake_path, brokers=config.brokers))
        with pytest.raises(cli.Failed, match=rf"^{found}, of which no demo knows.*TIDEMARK_HOME="):
            cli.refuse_others_home(config, topics)
        assert not (config.state / "demo.json").exists()
    else:
        cli.refuse_others_home(config, topics)
        assert json.loads((config.state / "demo.json").read_text()) == {"orders": "", "page_views": ""}


def test_demo_without_the_views_that_it_shows_is_refused_before_it_starts_anything(run, config, monkeypatch):
    views = {name: view for name, view in CATALOG.views.items() if name != "site_last_hour"}
    monkeypatch.setattr(pipelines, "CATALOG", Catalog(CATALOG.topics, CATALOG.rollups, views))
    monkeypatch.setattr(cli, "bring_up", lambda *_: pytest.fail("started"))
    ended = run("demo")
    assert ended.exit_code == 2
    assert "tidemark: the demo shows site_last_hour, which no pipeline declares; name traffic in PIPELINES" in ended.stderr
    assert not config.state.exists()


def test_second_demo_of_a_home_is_refused_and_ends_nothing_of_the_first(run, config, monkeypatch):
    monkeypatch.setattr(cli, "bring_up", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(cli, "bring_down", lambda *_, **__: pytest.fail("the first was ended"))
    with Lease(config.state / "demo.lock"):
        ended = run("demo")
    assert (ended.exit_code, ended.stderr.count("\n")) == (75, 1)
    assert f"process {os.getpid()} holds {config.state}/demo.lock" in ended.stderr
    assert "A demo runs in this home; look at it with `tidemark watch`" in ended.stderr


def test_demo_goes_on_in_its_home_also_where_it_was_killed_while_it_sent(config, monkeypatch):
    monkeypatch.setattr(kafka, "offsets", lambda *_: {name: {0: 0} for name in CATALOG.topics})
    orders, views = CATALOG.topics["orders"], CATALOG.topics["page_views"]
    cli.refuse_others_home(config, [views])
    write(config, "log/page_views", [mark(0, 4, 3)], SITE)  # of which its record does not say that they were sent whole
    cli.refuse_others_home(config, [orders, views])  # a later release sends to more
    write(config, "log/orders", [mark(0, 4, 3)], SITE)
    cli.refuse_others_home(config, [orders, views])
    write(config, "log/tickets", [mark(0, 4, 3)], SITE)
    with pytest.raises(cli.Failed, match="log/tickets has records, of which no demo knows"):
        cli.refuse_others_home(config, [orders, views])
    assert local.forget(config) == []


def test_airflow_is_not_started_where_the_demo_ended_while_its_database_was_made(config, monkeypatch):
    charge, began = cli.Charge(config, D19, 1, 1), []
    monkeypatch.setattr(charge, "others", lambda: None)
    for module, name in ((session, "one_java"), (local, "refuse_busy"), (airflow, "wait")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(airflow, "prepare", lambda *_: charge.end())
    monkeypatch.setattr(local, "start", lambda _, name, *rest: began.append(name))
    charge.run()
    assert began == []


def test_demo_says_how_many_records_its_stream_has_yet_to_read(config, monkeypatch):
    steps, said, left = cli.Steps(), [], iter([1200, 7, 0])
    steps.console = Console(force_terminal=True, file=io.StringIO())
    monkeypatch.setattr(kafka, "offsets", lambda *_: {})
    monkeypatch.setattr(lake, "unread", lambda *_: next(left))
    with steps.step("the stream reads them"):
        cli.wait_read(config, [], threading.Event(), lambda n: (steps.now(f"{n:,} to go"), said.append(steps.status.status)))
    assert said == ["1,200 to go", "7 to go"]


def test_demo_says_why_yesterdays_run_failed_and_what_settles_it_again(config):
    run = lake.Run("settle-20261119-1", "failed", [str(D19)], "demo", "2026-11-20T01:00:00+00:00", "0", note="the disk is full")
    lake.save(config, run)
    assert cli.Charge(config, D19, 1, 1).notes() == [
        "2026-11-19: run settle-20261119-1 is failed: the disk is full; 2026-11-19 is settled again by: "
        "tidemark settle --day 2026-11-19"
    ]


def test_what_is_started_while_a_demo_ends_ends_when_it_is_told(config):
    asked = (
        "import signal; print(*[signal.getsignal(s) is signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])"
    )
    with cli.undisturbed():
        for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), again)
        process = local.start(config, "asked", [sys.executable, "-c", asked])
    local.STARTED[-1].wait(30)
    assert process.log.read_text() == "False False False\n"


@pytest.mark.parametrize("ended", range(5))
def test_demo_that_ends_starts_no_other_topic_or_stream_any_more(config, monkeypatch, ended):
    steps, done = ("load", "sample-others", "main", "alarms"), []
    settling = cli.Settling(config, D19, 1, 1)

    def step(name: str) -> None:
        done.append(name)
        if len(done) == ended:
            settling.ended.set()

    write(config, "views/site_last_hour", [mark(0, 4, 3)], SITE)
    monkeypatch.setattr(cli, "load", lambda *_: step("load"))
    monkeypatch.setattr(cli, "send_samples", lambda _, name, *rest, **named: step(name))
    monkeypatch.setattr(cli, "begin_stream", lambda _, stream: step(stream))
    monkeypatch.setattr(cli, "wait_read", lambda *_: None)
    if not ended:
        settling.ended.set()
    settling.run()
    assert tuple(done) == steps[:ended]


@pytest.mark.parametrize("ended", [True, False])
def test_demo_that_ends_settles_no_day_and_waits_for_a_settling_that_begins(config, monkeypatch, ended):
    settling, waits = cli.Settling(config, D19, 1, 1), []

    def runs(_):
        if ended:
            settling.ended.set()
        return []

    def start(*_):
        waits.append(not settling.started.is_set())
        return SimpleNamespace(alive=lambda: False, log="its.log")

    monkeypatch.setattr(settling, "others", lambda: None)
    monkeypatch.setattr(lake, "runs", runs)
    monkeypatch.setattr(local, "start", start)
    settling.run()
    assert (waits, settling.started.is_set()) == ([] if ended else [True], True)


def test_note_of_what_the_demo_has_sent_is_whole_or_as_it_was(config, monkeypatch):
    note = config.state / "demo.json"
    note.parent.mkdir(parents=True)
    note.write_text('{"page_views": "2026-11-18"}')
    note.with_suffix(f".{os.getpid()}.part").symlink_to("/dev/full")
    monkeypatch.setattr(subprocess, "run", lambda *_, **named: subprocess.CompletedProcess([], 0, "sent", ""))
    with pytest.raises(OSError, match="No space left"):
        cli.load(config, D19, [CATALOG.topics["page_views"]], 24)
    assert json.loads(note.read_text()) == {"page_views": "2026-11-18"}


# ---- the screen

NONE_RUNS = "waiting for the first rows; no stream runs, start them: tidemark up"


def mark(seconds: int, pv: int, uv: int, **more: object) -> dict:
    return {"mark": NOON + dt.timedelta(seconds=seconds), "pv": pv, "uv": uv, "settled": False, **more}


@pytest.mark.parametrize(
    ("state", "seconds", "says"),
    [
        ("running", 15, "waiting for the first rows  (stream main: running)"),
        ("starting", 15, "waiting for the first rows  (stream main: starting)"),
        ("running", 16, f"{NONE_RUNS}  (stream main: silent since 16 s)"),
        ("failed", 15, f"{NONE_RUNS}  (stream main: failed)"),
        (None, 15, f"{NONE_RUNS}  (stream main: not started)"),
    ],
)
def test_screen_that_waits_for_rows_says_how_the_stream_is_and_how_to_start_it(state, seconds, says):
    status = {"heartbeat": {"state": state, "at": NOON.isoformat()}} if state else {}
    sight, now = watch.Sight(streams={"main": status}), NOON + dt.timedelta(seconds=seconds)
    assert watch.line(sight, now) == says
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(watch.screen(sight, now))
    assert console.export_text().splitlines() == says.removesuffix(")").split("  (")


def test_screen_waits_for_the_first_rows_where_nothing_was_ever_started(run):
    assert f"{NONE_RUNS}  (stream main: not started; stream alarms: not started)" in run("watch", "--seconds", "0.1").stdout


def test_screen_shows_the_newest_mark_and_its_pages(config):
    write(config, "views/site_last_hour", [mark(-3600, 1, 1), mark(0, 4, 3)], SITE)
    write(config, "views/last_hour", [mark(-5, 9, 9, page="/old"), mark(0, 1, 1, page="/a"), mark(0, 3, 2, page="/b")], PAGES)
    sight = watch.Look(config, CATALOG).now()
    assert sight.trail == ((NOON, 4, 3),)
    assert sight.pages == (("/b", 3, 2), ("/a", 1, 1))


def test_screen_says_when_the_rows_of_today_were_written(config):
    counted = pa.schema([("pv", pa.int64()), ("uv", pa.int64()), ("settled", pa.bool_())])
    began = dt.datetime.now(dt.UTC)
    write(config, "views/site_daily_traffic", [{"pv": 7, "uv": 6, "settled": False}], counted)
    sight = watch.Look(config, CATALOG).now()
    assert sight.days == ((NOON.date(), 7, 6, False),)
    assert sight.written and began - dt.timedelta(seconds=1) < sight.written <= dt.datetime.now(dt.UTC)


def test_screen_names_the_table_whose_log_is_damaged(run, config):
    write(config, "views/site_last_hour", [mark(0, 4, 3)], SITE)
    max((config.lake_path / "views/site_last_hour/_delta_log").glob("*.json")).write_text("{")
    ended = run("watch", "--seconds", "0.1")
    assert ended.exit_code == 1 and "tidemark: table views/site_last_hour: its log entry" in ended.stderr
    told = run("verify")  # whose --repair does not make a Delta log again
    assert (told.exit_code, "Damaged files, says what to do" in told.stderr, "--repair" in told.stderr) == (1, True, False)
    assert run("query", "SELECT * FROM site_last_hour").exit_code == 1


@pytest.mark.parametrize("length", [0, 100, None])
def test_screen_names_the_table_of_which_a_file_is_damaged_or_gone(run, config, length):
    write(config, "views/site_last_hour", [mark(0, 4, 3)], SITE)
    [file] = (config.lake_path / "views/site_last_hour").glob("live/**/*.parquet")
    if length is None:
        file.unlink()
    else:
        os.truncate(file, length)
    ended = run("watch", "--seconds", "0.1")
    assert ended.exit_code == 1
    assert ended.stderr.startswith("tidemark: table views/site_last_hour cannot be read (")
    assert ended.stderr.endswith("); see what is damaged: tidemark verify\n")


def test_screen_moves_with_a_new_commit_and_reads_only_files_that_reach_the_trail(config):
    look = watch.Look(config, CATALOG)
    assert look.now().mark is None
    write(config, "views/site_last_hour", [mark(-3600, 1, 1)], SITE)
    assert look.now().mark == NOON - dt.timedelta(hours=1)
    write(config, "views/site_last_hour", [mark(0, 4, 3)], SITE, "live/20261119T12-0000-bb")
    (config.lake_path / "views/site_last_hour/live/main-0-0-aa/day=2026-11-19/part-0.parquet").unlink()
    assert look.now().trail == ((NOON, 4, 3),)


@pytest.mark.parametrize("length", [watch.ERROR, watch.ERROR + 1])
def test_error_of_a_stream_is_whole_or_seen_to_be_cut(length: int) -> None:
    why = "begin afresh: move " + "x" * (length - 24) + " away"
    said = watch.stream_line("main", {"heartbeat": {"state": "failed", "at": NOON.isoformat(), "error": why}}, NOON)
    assert said.endswith(why if length == watch.ERROR else f"{why[:-2]}…")


def test_line_without_a_terminal_holds_mark_numbers_and_stream(config):
    status = {
        "heartbeat": {"state": "running", "pid": 1, "at": NOON.isoformat()},
        "progress": {"lag": 1200, "records_per_second": 99.6, "seconds": 0.84, "stream_time": NOON.isoformat(), "set_aside": {}},
    }
    sight = watch.Sight(((NOON, 1234, 567),), streams={"main": status})
    assert watch.line(sight, NOON) == (
        "12:00:00 UTC  last hour: 1,234 page views, 567 unique visitors  "
        "(stream main: running, lag 1,200, 100 rows/s, batch 0.8 s, stream time 2026-11-19 12:00:00)"
    )


@pytest.mark.parametrize(
    ("state", "ago", "said"),
    [
        ("stopped", 0, "stopped"),
        ("failed", 0, "failed"),
        ("starting", 0, "starting"),
        ("waiting", 0, "waiting"),
        ("running", 20, "silent since 20 s"),
    ],
)
def test_stream_that_does_not_run_has_no_lag_and_no_rate_of_now(state: str, ago: int, said: str) -> None:
    status = {
        "heartbeat": {"state": state, "pid": 1, "at": NOON.isoformat()},
        "progress": {
            "lag": 0,
            "records_per_second": 15.0,
            "seconds": 0.84,
            "stream_time": NOON.isoformat(),
            "finished_at": NOON.isoformat(),
        },
    }
    assert watch.stream_line("main", status, NOON + dt.timedelta(seconds=ago)) == (
        f"stream main: {said}, lag –, last batch 0.8 s at 2026-11-19 12:00:00, stream time 2026-11-19 12:00:00"
    )


@pytest.mark.parametrize(
    ("state", "patience", "since"), [("running", 15, "16 s"), ("waiting", 15, "16 s"), ("starting", 120, "2 min")]
)
def test_screen_says_that_a_stream_is_silent(state, patience, since):
    status = {"heartbeat": {"state": state, "pid": 1, "at": NOON.isoformat()}}
    assert watch.stream_line("main", status, NOON + dt.timedelta(seconds=patience)) == f"stream main: {state}"
    assert watch.stream_line("main", status, NOON + dt.timedelta(seconds=patience + 1)) == f"stream main: silent since {since}"


def test_what_a_stream_has_failed_of_commands_no_terminal() -> None:
    status = {"heartbeat": {"state": "failed", "at": NOON.isoformat(), "error": "Text '\x1b[2J' could not be parsed"}}
    assert watch.stream_line("main", status, NOON) == r"stream main: failed, Text '\x1b[2J' could not be parsed"


def test_screen_fits_a_small_terminal():
    trail = tuple((NOON + dt.timedelta(seconds=5 * n), 1000 + n, 500 + n % 7) for n in range(121))
    days = ((NOON.date() + dt.timedelta(days=1), 7, 6, False), (NOON.date(), 10, 5, True))
    streams = {"main": {"heartbeat": {"state": "stopped", "at": NOON.isoformat()}}}
    sight = watch.Sight(trail, (("/", 9, 8),), days, streams, written=NOON + dt.timedelta(minutes=6))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(watch.screen(sight, trail[-1][0] + dt.timedelta(seconds=4), ["settling"]))
    text = console.export_text()
    assert "last hour at 12:10:00 UTC, 4 s ago" in text
    assert "▁" in text and "█" in text and "1,120" in text
    assert "2026-11-20  7 page views  6 unique visitors  live, 4 min ago" in text
    assert "2026-11-19  10 page views  5 unique visitors  settled" in text and "settling" in text
    assert all(len(row) <= 100 for row in text.splitlines())


def test_screen_shows_a_page_as_it_was_sent_and_obeys_none():
    pages = (("/a[/]", 3, 3), ("/users/[id]", 2, 2), ("/\x1b]52;c;eA==\x07\x9b2J", 1, 1))
    console = Console(width=100, force_terminal=True, file=(file := io.StringIO()))
    console.print(watch.screen(watch.Sight(((NOON, 6, 6),), pages), NOON))
    assert all(page in file.getvalue() for page in ("/a[/]", "/users/[id]", r"/\x1b]52;c;eA==\x07\x9b2J"))


def test_no_page_and_no_error_hides_how_the_stream_is():
    pages = (("/" + "a" * 8000, 5, 1), ("/b\n" * 60, 4, 1))
    streams = {"main": {"heartbeat": {"state": "failed", "at": NOON.isoformat(), "error": "e" * 8000}}}
    console = Console(width=100, file=(file := io.StringIO()))
    console.print(watch.screen(watch.Sight(((NOON, 9, 2),), pages, streams=streams), NOON))
    assert len(file.getvalue().splitlines()) <= 30
    assert "stream main: failed" in file.getvalue() and r"/b\n/b\n" in file.getvalue()


def test_note_without_a_terminal_is_told_as_it_is(config):
    console = Console(width=100, file=(file := io.StringIO()))
    watch.watch(config, CATALOG, console, notes=lambda: ["failed: [/tmp/x]"], seconds=0.01)
    assert "failed: [/tmp/x]" in file.getvalue()


def test_table_on_a_terminal_shows_what_would_command_it(monkeypatch):
    console = Console(width=100, force_terminal=True, file=(file := io.StringIO()))
    monkeypatch.setattr(cli, "console", lambda: console)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    cli.table(["page"], [["/\x1b[2J\nnext"]])
    assert r"/\x1b[2J" in file.getvalue() and "\x1b[2J" not in file.getvalue()


@pytest.mark.parametrize(("values", "bars"), [([], ""), ([5, 5], "▁▁"), ([0, 7], "▁█"), (list(range(17)), "▁▂▃▅▆█")])
def test_sparkline_runs_from_the_lowest_to_the_highest(values, bars):
    assert watch.sparkline(values, 8) == bars
