"""A world in which Airflow is in charge, asked by its REST API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from bench.world import World, free_ports, until
from tidemark import airflow, local

SETTLING, REPLAYING = "spark_apps/settle.py", "spark_apps/replay.py"
ENDED = ("success", "failed")


class InCharge(World):
    """Airflow's four processes over the world's broker, streams and lake; it starts with `takes_charge`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.settings = self.settings.model_copy(update={"airflow_port": free_ports(1)[0], "nightly_after": "1 second"})

    def takes_charge(self) -> None:
        """Returns once the night that Airflow begins by itself is over: a later one is an application of its own."""
        self.bring_up()
        until(lambda: self.http.get("dags/nightly").is_success and self.dag_runs("nightly"), 120)
        until(lambda: all(run["state"] in ENDED for run in self.dag_runs("nightly")), 1800, between=1)

    def bring_up(self) -> None:
        airflow.bring_up(self.settings)
        base, known = airflow.url(self.settings), airflow.passwords(self.settings)[0]
        said = httpx.post(f"{base}/auth/token", json={"username": "admin", "password": known["admin"]}, timeout=60)
        token = said.raise_for_status().json()["access_token"]
        self.http = httpx.Client(base_url=f"{base}/api/v2/", timeout=60, headers={"Authorization": f"Bearer {token}"})

    def stop_all(self) -> None:
        airflow.take_down(self.settings)
        super().stop_all()

    def asked(self, path: str, **params: Any) -> Any:
        return self.http.get(path, params=params).raise_for_status().json()

    def dag_runs(self, dag: str, **params: Any) -> list[dict[str, Any]]:
        return self.asked(f"dags/{dag}/dagRuns", **params)["dag_runs"]

    def tasks(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        return self.asked(f"{path(run)}/taskInstances", limit=200)["task_instances"]

    @retry(retry=retry_if_exception_type(httpx.HTTPStatusError), wait=wait_fixed(2), stop=stop_after_delay(60), reraise=True)
    def triggered(self, dag: str, **conf: Any) -> dict[str, Any]:
        """A run that begins now. Airflow may answer 500, with a database error, in the moment in which the last one ends."""
        said = self.http.post(f"dags/{dag}/dagRuns", json={"logical_date": None, "conf": conf})
        return said.raise_for_status().json()

    def succeeds(self, run: dict[str, Any], seconds: float = 1800) -> None:
        """Wait for a run's end. Raises `RuntimeError` with the tasks that failed."""
        until(lambda: self.asked(path(run))["state"] in ENDED, seconds, between=1)
        if self.asked(path(run))["state"] != "success":
            failed = [task["task_id"] for task in self.tasks(run) if task["state"] == "failed"]
            raise RuntimeError(f"{run['dag_run_id']} of {run['dag_id']} failed: {', '.join(failed)}")

    def watched(self) -> bool:
        """Whether the task that watches stream main has told of its newest batch."""
        progress = local.status(self.settings).get("progress")
        tasks = [(run, task) for run in self.dag_runs("speed_layer", order_by="-run_after", limit=1) for task in self.tasks(run)]
        for run, task in tasks:
            if progress and (task["task_id"], task["map_index"], task["state"]) == ("watch", 0, "deferred"):
                log = f"{path(run)}/taskInstances/watch/logs/{task['try_number']}"
                return f"batch {progress['seq']}" in str(self.asked(log, map_index=0, full_content="true"))
        return False

    def begun(self, named: str, seconds: float = 300) -> psutil.Process:
        """The Spark application of this home that runs, once one does: what was started first of it."""
        found: list[psutil.Process] = []
        until(lambda: found.extend(self.applications(named)) or found, seconds)
        return min(found, key=psutil.Process.create_time)

    def applications(self, named: str) -> Iterator[psutil.Process]:
        for one in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                named_so = any(named in word for word in one.info["cmdline"] or [])
                if named_so and one.environ().get("TIDEMARK_HOME") == str(self.settings.home):
                    yield one


def path(run: dict[str, Any]) -> str:
    return f"dags/{run['dag_id']}/dagRuns/{run['dag_run_id']}"
