"""A night through Airflow: from its trigger to the last publication, beside the Spark application's own time."""

from __future__ import annotations

import statistics
import threading
import time
from datetime import date, datetime
from typing import Any

import httpx
import psutil
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from bench.measure import Figure
from bench.world import World, free_ports, until
from tidemark import airflow

APPLICATION = "spark_apps/settle.py"


def measure(world: World, events: int, rounds: int) -> list[Figure]:
    """Yesterday of `events` page views, settled and published by the DAG `nightly`, `rounds` times; streams run beside."""
    world.settings = world.settings.model_copy(update={"airflow_port": free_ports(1)[0], "nightly_after": "1 second"})
    day = world.yesterday(events)
    world.stream()
    world.wait_read()
    airflow.bring_up(world.settings)
    http, found = client(world), list[tuple[float, float]]()
    try:
        # The night that Airflow begins by itself warms nothing that the next one has: each is an application of its own.
        until(lambda: http.get("dags/nightly").is_success and runs(http), 120)
        until(lambda: not any(r["state"] in ("queued", "running") for r in runs(http)), 1800, between=1)
        for _ in range(rounds):
            with Application() as spark:
                run = triggered(http, day)
                until(lambda run=run: state(http, run) in ("success", "failed"), 1800, between=1)
            if state(http, run) != "success":
                raise RuntimeError(f"the night failed: {run['dag_run_id']}")
            found.append((published(http, run), spark.seconds))
    finally:
        airflow.take_down(world.settings)
    whole, own = statistics.median(w for w, _ in found), statistics.median(s for _, s in found)
    says = f"{events:,} page views of yesterday, median of {rounds}; every pipeline's tables"
    ratio = statistics.median(w / s for w, s in found)
    return [
        Figure("nightly: from trigger to the last publication", whole, "s", says),
        Figure("nightly: the Spark application alone", own, "s", says),
        Figure("nightly: times the Spark application's own time", ratio, "", "its process, from begin to end", "<= 1.3"),
    ]


def client(world: World) -> httpx.Client:
    known, _ = airflow.passwords(world.settings)
    base = airflow.url(world.settings)
    said = httpx.post(f"{base}/auth/token", json={"username": "admin", "password": known["admin"]}, timeout=60)
    said.raise_for_status()
    return httpx.Client(
        base_url=f"{base}/api/v2/", timeout=60, headers={"Authorization": f"Bearer {said.json()['access_token']}"}
    )


def runs(http: httpx.Client) -> list[dict[str, Any]]:
    return http.get("dags/nightly/dagRuns").json()["dag_runs"]


@retry(retry=retry_if_exception_type(httpx.HTTPStatusError), wait=wait_fixed(2), stop=stop_after_delay(60), reraise=True)
def triggered(http: httpx.Client, day: date) -> dict[str, Any]:
    """A night that begins now. Airflow may answer 500, with a database error, in the moment in which the last one ends."""
    said = http.post("dags/nightly/dagRuns", json={"logical_date": None, "conf": {"day": str(day)}})
    said.raise_for_status()
    return said.json()


def state(http: httpx.Client, run: dict[str, Any]) -> str:
    return http.get(f"dags/nightly/dagRuns/{run['dag_run_id']}").json()["state"]


def published(http: httpx.Client, run: dict[str, Any]) -> float:
    """Seconds from the trigger to the end of the last publication."""
    tasks = http.get(f"dags/nightly/dagRuns/{run['dag_run_id']}/taskInstances", params={"limit": 200}).json()["task_instances"]
    last = max(datetime.fromisoformat(t["end_date"]) for t in tasks if t["task_id"] == "each.publish")
    return (last - datetime.fromisoformat(run["queued_at"])).total_seconds()


class Application:
    """How long the nightly's Spark application lives, seen from outside while this is entered."""

    def __init__(self) -> None:
        self.seconds, self.ended = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.look)

    def __enter__(self) -> Application:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def look(self) -> None:
        while not self.ended.wait(0.5):
            for process in psutil.process_iter(["cmdline", "create_time"]):
                if any(APPLICATION in word for word in process.info["cmdline"] or []):
                    self.seconds = max(self.seconds, time.time() - process.info["create_time"])
