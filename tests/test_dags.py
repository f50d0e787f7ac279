"""House policy over every DAG, and what Airflow may import when it parses: asked of a process that parses as Airflow does."""

import json
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dag_runs import THIS_CODE
from deltalake import write_deltalake

from tidemark import airflow, lake
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

FILES = sorted((airflow.ROOT / "dags").glob("*.py"))
HEAVY = ("pyspark", "deltalake", "great_expectations", "pyarrow", "pandas", "duckdb", "matplotlib")
PARSE = """
import json, sys, time
from datetime import UTC, datetime
import airflow.sdk, airflow.timetables.interval, airflow.timetables.trigger
from airflow.plugins_manager import get_fastapi_plugins
from airflow.dag_processing.dagbag import DagBag
import airflow.providers.apache.spark.operators.spark_submit, airflow.providers.standard.operators.hitl
from airflow.models.taskinstance import TaskInstance
from airflow.serialization.serialized_objects import DagSerialization
get_fastapi_plugins()
files, heavy = json.loads(sys.argv[1]), json.loads(sys.argv[2])
bag, seconds = DagBag("/nowhere", collect_dags=False), {}
before = {name for name in heavy if name in sys.modules}
for file in files:
    began = time.process_time()
    bag.process_file(file)
    seconds[file] = time.process_time() - began
imported = {name for name in heavy if name in sys.modules}
now, dags = datetime.now(UTC).isoformat(), {}
runs = {"tonight": f"scheduled__{now}", "by hand": f"manual__{now}", "backfill": f"backfill__{now}"}
runs["an older night, cleared"] = "scheduled__2026-01-05T00:00:00+00:00"


def weighs(task, run):
    return TaskInstance(task=task, run_id=run, map_index=-1, dag_version_id=None).priority_weight


for dag in bag.dags.values():
    kept = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))  # as the scheduler has it
    dags[dag.dag_id] = {
        "file": dag.fileloc, "doc": dag.doc_md or "", "tags": sorted(dag.tags), "catchup": dag.catchup,
        "runs": dag.max_active_runs, "params": {n: bool(p.description) for n, p in dag.params.items()} if dag.params else {},
        # What Airflow's form waits for: empty, and of a type that is not null too.
        "lacks": [
            n for n, p in dag.params.items()
            if "null" not in p.schema.get("type", "null") and (p.value == "" or not p.has_value)
        ],
        "timetable": type(dag.timetable).__name__,
        "deadlines": [[d.interval, d.callback.path] for d in dag.deadline or []],
        "tasks": {
            t.task_id: {
                "owner": t.owner, "pool": t.pool, "retries": t.retries, "told": [c.__name__ for c in t.on_failure_callback or []],
                "weighs": {name: weighs(kept.get_task(t.task_id), run) for name, run in runs.items()},
                "again": kept.get_task(t.task_id).has_retry_policy,
                "window": getattr(t, "partial_kwargs", {}).get("window"),
            }
            for t in dag.tasks
        },
    }
said = {"errors": bag.import_errors, "dags": dags, "seconds": seconds, "before": sorted(before), "heavy": sorted(imported)}
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def settings(fresh_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return fresh_settings(tmp_path_factory.mktemp("parsed"))


UNREACHABLE = """Traceback (most recent call last):
sqlalchemy.exc.OperationalError: (psycopg2.OperationalError) could not translate host name "postgres" to address
[SQL: SELECT 1]
(Background on this error at: https://sqlalche.me/e/21/e3q8)
"""


def test_command_that_fails_says_why(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, stdout="", stderr=UNREACHABLE)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(
        airflow.AirflowFailed, match=r'airflow db clean ended with exit code 1: .* host name "postgres" to address$'
    ):
        airflow.command(settings, "db", "clean")


@pytest.fixture(scope="module")
def parsed(settings: Settings) -> dict[str, Any]:
    airflow.command(settings, "db", "migrate")
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([str(f) for f in FILES]), json.dumps(HEAVY)],
        env=airflow.clean() | airflow.environment(settings) | THIS_CODE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_file_parses_and_holds_one_dag_of_its_name(parsed: dict[str, Any]) -> None:
    assert parsed["errors"] == {}
    assert {Path(d["file"]).stem: name for name, d in parsed["dags"].items()} == {f.stem: f.stem for f in FILES}


def test_nothing_heavy_is_imported_at_parse(parsed: dict[str, Any]) -> None:
    assert (parsed["before"], parsed["heavy"]) == ([], [])


def test_a_file_parses_within_a_second_of_cpu(parsed: dict[str, Any]) -> None:
    assert {file: s for file, s in parsed["seconds"].items() if s > 1} == {}


def test_every_dag_says_what_it_is_and_every_task_has_an_owner_and_a_pool(parsed: dict[str, Any]) -> None:
    for name, dag in parsed["dags"].items():
        assert dag["doc"].strip().startswith("### ") and len(dag["doc"]) > 100, name
        assert dag["tags"] and dag["catchup"] is False and dag["runs"] <= 4, name
        assert all(dag["params"].values()), (name, dag["params"])
        for task, one in dag["tasks"].items():
            assert one["owner"] == "tidemark" and one["pool"] in airflow.POOLS, (name, task, one)


def test_a_form_wants_filled_in_what_has_no_default_and_nothing_that_may_be_empty(parsed: dict[str, Any]) -> None:
    assert {name: sorted(dag["lacks"]) for name, dag in parsed["dags"].items() if dag["lacks"]} == {
        "control": ["reason"],
        "publish_over": ["checks", "reason", "run"],
        "reprocess": ["reason"],
        "rollback": ["reason", "run"],
    }


def test_tasks_that_start_spark_share_one_pool(parsed: dict[str, Any]) -> None:
    spark = {(d, t) for d, dag in parsed["dags"].items() for t, one in dag["tasks"].items() if one["pool"] == "spark"}
    assert spark == {("nightly", "settle"), ("reprocess", "replay"), ("maintenance", "compact")}
    assert airflow.POOLS["spark"][0] == 1


def test_a_backfill_and_a_replay_wait_until_tonight_has_gone_before_them(parsed: dict[str, Any]) -> None:
    """Of the tasks that wait for one pool the heaviest goes first, and of equals the one of the oldest day."""
    settle = parsed["dags"]["nightly"]["tasks"]["settle"]["weighs"]
    for name, one in parsed["dags"]["nightly"]["tasks"].items():
        weighs = one["weighs"]
        assert weighs["tonight"] == weighs["by hand"] > weighs["backfill"] == weighs["an older night, cleared"], name
    for dag, name in (("reprocess", "replay"), ("maintenance", "compact")):
        assert max(parsed["dags"][dag]["tasks"][name]["weighs"].values()) < settle["tonight"]


def test_nothing_that_waits_for_hours_holds_a_slot_that_others_need(parsed: dict[str, Any]) -> None:
    """A deferred task holds its slot: a night that waits for a stream, and a watcher, for as long as they do."""
    pools = {(d, t): one["pool"] for d, dag in parsed["dags"].items() for t, one in dag["tasks"].items()}
    assert [task for task, pool in pools.items() if pool == "wait"] == [("nightly", "wait")]
    assert {task for task, pool in pools.items() if pool == "stream"} == {("speed_layer", "streams"), ("speed_layer", "watch")}
    assert airflow.POOLS["stream"][0] > len(CATALOG.streams) + 20  # a person's own pipelines may name more of them


def test_whatever_fails_is_told_but_for_a_form_that_is_refused_at_once(parsed: dict[str, Any]) -> None:
    told = {(d, t): one["told"] for d, dag in parsed["dags"].items() for t, one in dag["tasks"].items()}
    assert {task for task, by in told.items() if not by} == {("control", "want"), ("reprocess", "plan")}
    assert told["nightly", "each.gate"] == ["gate_failed"] and told["reprocess", "replay"] == ["task_failed"]


def test_the_stream_is_watched_without_end_an_hour_a_run(parsed: dict[str, Any]) -> None:
    speed_layer = parsed["dags"]["speed_layer"]
    assert (speed_layer["timetable"], speed_layer["tasks"]["watch"]["window"]) == ("ContinuousTimetable", 3600.0)


def test_a_night_has_two_hours_more_than_it_may_wait_and_then_somebody_is_told(parsed: dict[str, Any]) -> None:
    assert parsed["dags"]["nightly"]["deadlines"] == [[8 * 3600 + 600, "tell.night_is_late"]]


ZONED = """
import json, sys
from datetime import UTC, datetime
import pendulum
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import TimeRestriction
bag, since = DagBag("/nowhere", collect_dags=False), datetime.fromisoformat(sys.argv[2]).astimezone(UTC)
for file in json.loads(sys.argv[1]):
    bag.process_file(file)
said = {}
for name in ("nightly", "nightly_report", "maintenance"):
    timetable = DagSerialization.from_dict(DagSerialization.to_dict(bag.dags[name])).timetable
    within = TimeRestriction(since, None, True)
    run = timetable.next_dagrun_info(last_automated_data_interval=None, restriction=within)
    said[name] = run.run_after.astimezone(UTC).isoformat()
    if name == "nightly":
        nightly, first = bag.dags[name], pendulum.instance(run.data_interval.start)
env = nightly.get_template_env()
said["day"] = env.from_string(nightly.get_task("wait").day).render(params={"day": None}, data_interval_start=first)
print(json.dumps(said))
"""


def test_days_and_hours_are_the_business_zone_s(settings: Settings) -> None:
    """The night of 29 March in Berlin, of 23 hours:

    UTC     23:00        01:30      04:00                          22:00
    Berlin  [00:00 ─ 02:00│03:00 ─ 03:30 upkeep ─ 06:00 report ─ 24:00)  the day, settled when it is over
    """
    done = subprocess.run(
        [sys.executable, "-c", ZONED, json.dumps([str(f) for f in FILES]), "2026-03-29T00:00:00+01:00"],
        env=airflow.clean() | airflow.environment(settings) | THIS_CODE | {"TIDEMARK_ZONE": "Europe/Berlin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "nightly": "2026-03-29T22:00:00+00:00",
        "nightly_report": "2026-03-29T04:00:00+00:00",
        "maintenance": "2026-03-29T01:30:00+00:00",
        "day": "2026-03-29",
    }


SKIPPED = """
import json, os, sys
from datetime import UTC, datetime
import airflow.timetables.interval, pendulum
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import TimeRestriction
said = []
for os.environ["TIDEMARK_ZONE"], at in json.loads(sys.argv[2]):
    now = pendulum.instance(datetime.fromisoformat(at).astimezone(UTC))
    airflow.timetables.interval.utcnow = lambda: now
    bag = DagBag("/nowhere", collect_dags=False)
    bag.process_file(sys.argv[1])
    nightly = bag.dags["nightly"]
    timetable = DagSerialization.from_dict(DagSerialization.to_dict(nightly)).timetable
    within = TimeRestriction(pendulum.datetime(2026, 1, 1), None, False)
    due = timetable.next_dagrun_info(last_automated_data_interval=None, restriction=within).data_interval
    day = nightly.get_template_env().from_string(nightly.get_task("wait").day)
    intervals = (timetable.infer_manual_data_interval(run_after=now), due)
    said.append([day.render(params={"day": None}, data_interval_start=one.start) for one in intervals])
print(json.dumps(said))
"""


def test_a_night_is_of_yesterday_where_the_clock_goes_forward_at_midnight_and_back_over_it(settings: Settings) -> None:
    """By hand, and as it is due to a scheduler that was away at midnight.

    Cairo  23 April [00:00 ─ 24:00)[01:00 ─ I ─ 24:00) 24 April, of 23 hours
    """
    days = {
        ("Africa/Cairo", "2026-04-24T01:00:07+03:00"): "2026-04-23",
        ("Africa/Cairo", "2026-04-24T23:59:07+03:00"): "2026-04-23",
        ("Africa/Cairo", "2026-04-25T00:00:07+03:00"): "2026-04-24",
        ("Asia/Beirut", "2026-03-29T12:00:00+03:00"): "2026-03-28",
        ("America/Santiago", "2026-09-06T12:00:00-03:00"): "2026-09-05",
        ("America/Havana", "2026-03-08T12:00:00-04:00"): "2026-03-07",
        ("America/Havana", "2026-11-01T00:30:00-04:00"): "2026-10-31",
        ("America/Havana", "2026-11-01T00:30:00-05:00"): "2026-10-31",
        ("Atlantic/Azores", "2026-03-29T12:00:00+00:00"): "2026-03-28",
        ("Atlantic/Azores", "2026-10-25T12:00:00-01:00"): "2026-10-24",
        ("Europe/Berlin", "2026-03-29T12:00:00+02:00"): "2026-03-28",
    }
    done = subprocess.run(
        [sys.executable, "-c", SKIPPED, str(airflow.ROOT / "dags" / "nightly.py"), json.dumps([*days])],
        env=airflow.clean() | airflow.environment(settings) | THIS_CODE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(zip(days, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert found == {one: [day, day] for one, day in days.items()}


def test_pools_count_what_is_deferred(settings: Settings) -> None:
    airflow.prepare(settings)
    with closing(sqlite3.connect(airflow.home(settings) / "airflow.db")) as database:
        pools = database.execute("SELECT pool, slots, include_deferred FROM slot_pool").fetchall()
    assert {name: (slots, deferred) for name, slots, deferred in pools if name in airflow.POOLS} == {
        name: (slots, 1) for name, (slots, _) in airflow.POOLS.items()
    }


def test_triggers_and_the_deadline_s_callback_are_importable_where_the_triggerer_looks(settings: Settings) -> None:
    script = """
from importlib import import_module
from inspect import iscoroutinefunction
from stream import StreamTrigger
from day import DayTrigger
for trigger in (StreamTrigger("main", 1.5), DayTrigger("2026-11-19", 2.5)):
    path, kwargs = trigger.serialize()
    module, _, name = path.rpartition(".")
    again = getattr(import_module(module), name)(**kwargs)
    assert type(again) is type(trigger) and again.serialize() == (path, kwargs)
assert iscoroutinefunction(import_module("tell").night_is_late)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=airflow.clean() | airflow.environment(settings) | THIS_CODE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_person_whose_answer_airflow_lost_is_asked_again(parsed: dict[str, Any]) -> None:
    """An answer that comes while Airflow notes that it has asked fails the task: "finished with state success, but queued"."""
    assert parsed["dags"]["reprocess"]["tasks"]["approve"]["retries"] > 0


def test_a_stream_that_died_too_often_is_tried_again_while_the_other_one_is_watched(parsed: dict[str, Any]) -> None:
    watch = parsed["dags"]["speed_layer"]["tasks"]["watch"]
    assert watch["retries"] > 0 and watch["again"]


TASK = """
import runpy, sys
import airflow.settings
held = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names | {"tzdata"}
runpy.run_path(sys.argv[2])
from tidemark import lake, settle
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings
assert lake.table(Settings(), CATALOG["page_views"]).files()
print(*sorted({name.partition(".")[0] for name in sys.modules} - held))
"""


def test_a_task_imports_the_platforms_own_files_alone(settings: Settings) -> None:
    """A library, up to a second of CPU, is its scheduler's already. A pipeline is not: it may have been edited since."""
    where = lake.table(settings, CATALOG["page_views"]).path
    write_deltalake(where, pa.table({"viewed_at": [datetime.now(UTC)], "day": [datetime.now(UTC).date()]}), partition_by=["day"])
    done = subprocess.run(
        [sys.executable, "-c", TASK, "scheduler", str(airflow.ROOT / "dags" / "nightly.py")],
        env=airflow.clean() | airflow.environment(settings),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].split() == ["day", "midnight", "tell", "tidemark"]


@pytest.fixture
def reprocess(in_airflow: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(airflow.ROOT / "plugins"))
    return runpy.run_path(str(airflow.ROOT / "dags" / "reprocess.py"))["reprocess"]()


@pytest.mark.parametrize(
    ("tables", "only"),
    [
        (None, ""),
        ("", ""),
        (" ", ""),
        ("visits", "visits"),
        (" visits ,hourly_traffic ", "visits,hourly_traffic"),
    ],
)
def test_form_of_a_replay_takes_names_and_all_where_empty(reprocess: Any, tables: str | None, only: str) -> None:
    assert reprocess.params.get_param("tables").resolve(tables) == tables
    argv = reprocess.get_task("replay").application_args
    told = reprocess.get_template_env().from_string(argv[argv.index("--only") + 1])
    assert told.render(params={"tables": tables}) == only


@pytest.mark.parametrize("tables", [",", " , ", "visits,"])
def test_form_of_a_replay_takes_no_commas_alone(reprocess: Any, tables: str) -> None:
    with pytest.raises(ValueError, match="does not match"):
        reprocess.params.get_param("tables").resolve(tables)
