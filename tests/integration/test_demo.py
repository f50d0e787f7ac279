"""`make demo` as a newcomer has it: Airflow settles yesterday beside the last hour, and Ctrl-C leaves nothing behind."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tidemark import airflow, lake
from tidemark.settings import Settings

charge = importlib.import_module("test_airflow")

pytestmark = pytest.mark.long


def test_demo_shows_the_last_hour_has_yesterday_published_by_airflow_and_ctrl_c_leaves_nothing(
    jars: Path, fresh_settings: Callable[[Path], Settings], tmp_path: Path
) -> None:
    own = fresh_settings(tmp_path / "home").model_dump() | {"driver_memory": "1g"}
    own["airflow_port"] = int(fresh_settings(tmp_path).brokers.rpartition(":")[2])
    house = charge.House(Settings(_env_file=None, **own), tmp_path)
    settings, log = house.settings, tmp_path / "demo.log"
    said = {n: v for n, v in airflow.environment(settings).items() if n.startswith("TIDEMARK_")}
    command = [sys.executable, "-m", "tidemark", "demo", "--count", "2000", "--rate", "20"]
    with log.open("w") as output:
        demo = subprocess.Popen(
            command,
            env=airflow.clean() | said,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        # Where it is and who may look is on the screen.
        house.until(lambda: demo.poll() is not None or f"Airflow: {airflow.url(settings)} (user admin" in log.read_text(), 400)
        assert demo.poll() is None, log.read_text()
        house.log_in()
        house.until(house.watching)
        run = house.until(lambda: house.http.get("/api/v2/dags/nightly/dagRuns").json().get("dag_runs"))[0]["dag_run_id"]
        assert house.ended("nightly", run) == "success"
        assert house.settled("site_daily_traffic", charge.YESTERDAY) == 1
        assert [(r.state, r.reason) for r in lake.runs(settings) if str(charge.YESTERDAY) in r.days] == [("published", "nightly")]

        page = house.http.get("/tidemark/")
        assert page.is_success and "<title>" in page.text
        mark, views, visitors = house.until(lambda: house.http.get("/tidemark/hour").raise_for_status().json()["marks"])[-1]
        assert datetime.now(UTC) - datetime.fromisoformat(mark).replace(tzinfo=UTC) < timedelta(minutes=1)
        assert views >= visitors > 0

        assert house.processes() != []
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        assert demo.wait(120) == 0, log.read_text()
        assert house.processes() == []
    finally:
        demo.kill()
        house.tidemark("down")
