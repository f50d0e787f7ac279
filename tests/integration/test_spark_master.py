"""A Spark standalone master and worker: the DAG `nightly` has their executor settle a day, with the answer of local cores."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dag_runs import Ended
from deltalake import DeltaTable

from tidemark import airflow, kafka, lake, local, query
from tidemark.model import Rollup, View, catalog
from tidemark.pipelines import CATALOG, traffic
from tidemark.settings import Settings

YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)
EVENTS = 2_000

# Without a file pyspark takes a program for its doctests, and ends it in the middle.
CLI = """
import json, sys
__file__ = "tidemark"
from tidemark.__main__ import app
app(json.loads(sys.argv[1])[1]["argv"], prog_name="tidemark")
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {what}"
        time.sleep(0.1)


@contextmanager
def daemon(folder: Path, main: str, *argv: str) -> Iterator[None]:
    """A daemon of Spark by the `spark-class` that pyspark brings, on loopback; it and its executors end with the block."""
    bin_ = Path(sys.executable).parent
    command = [bin_ / "spark-class", f"org.apache.spark.deploy.{main}", *argv]
    own = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m", "PATH": f"{bin_}:{os.environ['PATH']}"}
    own["SPARK_MASTER_OPTS"] = "-Dspark.master.rest.enabled=false"  # a door on a fixed port that nobody here uses
    with (folder / f"{main}.log").open("wb") as log:
        popen = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait(10)


class Master:
    """What a master says of itself, by its page's JSON."""

    def __init__(self, port: int, web: int) -> None:
        self.url, self.web = f"spark://127.0.0.1:{port}", web

    def says(self, what: str) -> list[dict[str, Any]]:
        with suppress(OSError):
            return json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.web}/json/", timeout=5))[what]
        return []


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A master and a worker with a core more than an application may take, and no more memory than it asks for."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    port, web, worker, worker_web = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    loopback, made = ("--host", "127.0.0.1"), Master(port, web)
    size = ("--cores", "3", "--memory", "900m", "--work-dir", str(tmp_path / "work"))
    with daemon(tmp_path, "master.Master", *loopback, "--port", str(port), "--webui-port", str(web)):
        until(lambda: "<title>" in page(web), "the master answers")
        ports = ("--port", str(worker), "--webui-port", str(worker_web))
        with daemon(tmp_path, "worker.Worker", *loopback, *ports, *size, made.url):
            until(lambda: [w["state"] for w in made.says("workers")] == ["ALIVE"], "the worker has registered")
            yield made


def page(port: int) -> str:
    with suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).read().decode()
    return ""


def staged(settings: Settings, run: lake.Run, declared: Rollup | View) -> pa.Table:
    """What a run staged of a table, in the order of its key."""
    rows = DeltaTable(lake.staging(lake.table(settings, declared), run.id)).to_pyarrow_table()
    return rows.select(sorted(rows.column_names)).sort_by([(column, "ascending") for column in declared.key])


@pytest.mark.long
def test_night_on_a_cluster_has_the_answer_of_local_cores_and_is_published(
    jars: Path, settings: Settings, master: Master, run: Any
) -> None:
    here = settings.model_copy(update={"driver_memory": "900m", "trigger": "200 milliseconds"})
    there = here.model_copy(update={"master": master.url})
    local.start_broker(here)
    kafka.apply(here, CATALOG.topics.values())
    events = kafka.sample(traffic.PAGE_VIEWS, seed=7, count=EVENTS, day=YESTERDAY, zone=here.tz)
    sent = kafka.produce(here, traffic.PAGE_VIEWS, events)
    stream = run(here, {"argv": ["speed"]}, program=CLI)
    stream.until(lambda: sum(r["records"] for r in lake.ledger_rows(here, "main")) == sent.delivered)
    stream.drains()

    by_command = run(here, {"argv": ["settle", "--day", str(YESTERDAY), "--reason", "local cores"]}, program=CLI)
    by_command.ends(0, 600)
    airflow.command(there, "db", "migrate")
    night = Ended(there, ("nightly", {"day": str(YESTERDAY)}, "wait"))  # the day is read already
    assert night.runs[0]["state"] == "success", night.log[-4000:]
    on_cores, on_cluster = lake.runs(here)
    assert [on_cores.state, on_cluster.state] == ["staged", "published"]
    until(lambda: master.says("completedapps"), "the master has seen its end")
    ran = [(app["name"], app["cores"], app["state"]) for app in master.says("completedapps")]
    assert ran == [(f"tidemark-{on_cluster.id}", 2, "FINISHED")]

    for declared in catalog([traffic]).derived:
        ours, theirs = staged(here, on_cores, declared), staged(here, on_cluster, declared)
        assert ours.num_rows > 0 and theirs.equals(ours), declared.name
    told = [{name: (one["rows"], one["gate"]) for name, one in of.tables.items()} for of in (on_cores, on_cluster)]
    assert told[0] == told[1] and {gate for _, gate in told[0].values()} == {"passed"}

    answer = query.query(here, CATALOG, f"SELECT settled, pv, uv FROM site_daily_traffic WHERE day = '{YESTERDAY}'").rows
    [expected] = staged(here, on_cores, CATALOG.views["site_daily_traffic"]).select(["pv", "uv"]).to_pylist()
    assert answer == [(True, expected["pv"], expected["uv"])]
