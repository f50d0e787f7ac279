"""House policy over every DAG, and what Airflow may import when it parses: asked of a process that parses as Airflow does."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemark import airflow
from tidemark.settings import Settings

FILES = sorted((airflow.ROOT / "dags").glob("*.py"))
HEAVY = ("pyspark", "deltalake", "great_expectations", "pyarrow", "pandas", "duckdb", "matplotlib")
PARSE = """
import json, sys, time
import airflow.sdk, airflow.timetables.interval, airflow.timetables.trigger
from airflow.plugins_manager import get_fastapi_plugins
from airflow.dag_processing.dagbag import DagBag
import airflow.providers.apache.spark.operators.spark_submit, airflow.providers.standard.operators.hitl
get_fastapi_plugins()
files, heavy = json.loads(sys.argv[1]), json.loads(sys.argv[2])
bag, seconds = DagBag("/nowhere", collect_dags=False), {}
before = {name for name in heavy if name in sys.modules}
for file in files:
    began = time.process_time()
    bag.process_file(file)
    seconds[file] = time.process_time() - began
dags = {}
for dag in bag.dags.values():
    dags[dag.dag_id] = {
        "file": dag.fileloc, "doc": dag.doc_md or "", "tags": sorted(dag.tags), "catchup": dag.catchup,
        "runs": dag.max_active_runs, "params": {n: bool(p.description) for n, p in dag.params.items()} if dag.params else {},
        "tasks": {t.task_id: {"owner": t.owner, "pool": t.pool, "retries": t.retries} for t in dag.tasks},
    }
imported = {name for name in heavy if name in sys.modules}
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
        env=airflow.clean() | airflow.environment(settings) | {"PYTHONPATH": str(airflow.ROOT / "plugins")},
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


def test_tasks_that_start_spark_share_one_pool(parsed: dict[str, Any]) -> None:
    spark = {(d, t) for d, dag in parsed["dags"].items() for t, one in dag["tasks"].items() if one["pool"] == "spark"}
    assert spark == {("nightly", "settle"), ("reprocess", "replay"), ("maintenance", "compact")}
    assert airflow.POOLS["spark"][0] == 1


def test_triggers_are_importable_where_the_triggerer_looks(settings: Settings) -> None:
    script = """
from importlib import import_module
from stream import StreamTrigger
from day import DayTrigger
for trigger in (StreamTrigger("main", 1.5), DayTrigger("2026-11-19", 2.5)):
    path, kwargs = trigger.serialize()
    module, _, name = path.rpartition(".")
    again = getattr(import_module(module), name)(**kwargs)
    assert type(again) is type(trigger) and again.serialize() == (path, kwargs)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=airflow.clean() | airflow.environment(settings) | {"PYTHONPATH": str(airflow.ROOT / "plugins")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_person_whose_answer_airflow_lost_is_asked_again(parsed: dict[str, Any]) -> None:
    """An answer that comes while Airflow notes that it has asked fails the task: "finished with state success, but queued"."""
    assert parsed["dags"]["reprocess"]["tasks"]["approve"]["retries"] > 0


def test_a_stream_that_died_too_often_is_tried_again_while_the_other_one_is_watched(parsed: dict[str, Any]) -> None:
    assert parsed["dags"]["speed_layer"]["tasks"]["watch"]["retries"] > 0
