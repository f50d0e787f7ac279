"""The DAG `nightly` by `dag.test()`, over a run that is staged already: what follows on gates that hold and on one that fails.

Waiting and Spark are left out; gates, publications and what is told are the real ones.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from tidemark import airflow, lake
from tidemark.lake import Pin, Run, Table
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

DAY = date(2026, 11, 19)
COLUMNS = pa.schema([("pv", pa.int64()), ("day", pa.date32())])
STAGED = ("page_quarters", "hourly_traffic", "site_hourly_traffic", "site_daily_traffic")
CHECK = "every hour of the day is present"
ENDED = """
import json, sys
from datetime import UTC, datetime
from airflow.dag_processing.dagbag import DagBag
bag = DagBag("/nowhere", collect_dags=False)
bag.process_file(sys.argv[1])
assert not bag.import_errors, bag.import_errors
conf = json.loads(sys.argv[2])
at, skipped = datetime(2026, 11, 20, tzinfo=UTC), "wait|days|settle"
dag = bag.dags["nightly"]
dag.deadline = None  # `dag.test()` of Airflow 3.3.2 looks up by its content what a scheduler looks up by its number
run = dag.test(run_after=at, logical_date=at, run_conf=conf, mark_success_pattern=skipped)
tis = run.get_task_instances()
tasks = {f"{ti.task_id}[{ti.rendered_map_index}]" if ti.map_index >= 0 else ti.task_id: ti.state for ti in tis}
print(json.dumps({"state": run.state, "tasks": tasks}))
"""


class Night:
    """A home with a lake, a run of `DAY` that is staged, and the DAG over it."""

    def __init__(self, settings: Settings, failed: str | None) -> None:
        self.settings = settings
        now = datetime.now(UTC).isoformat()
        pins = {"main": Pin("main", 3, {"page_views": {"0": 40}}, now)}
        self.run = Run("settle-1", "staged", [str(DAY)], "nightly", now, "0", pins)
        for name in STAGED:
            self.stage(lake.table(settings, CATALOG[name]))
            said: dict[str, Any] = {"gate": "passed", "reasons": [], "warnings": [], "checks": 3, "rows": 1}
            if name == failed:
                said |= {"gate": "failed", "reasons": [f'{name}: "{CHECK}" failed on 12 rows'], "failed": [CHECK]}
            self.run.tables[name] = said
        self.run.tables["site_hourly_traffic"]["compare"] = {"rows": 24, "unexplained": 2}
        lake.save(settings, self.run)
        said_by = settings.state / "runs" / "nightly-manual__2026-11-20T00:00:00+00:00"
        said_by.parent.mkdir(parents=True, exist_ok=True)
        said_by.write_text(self.run.id)

    def stage(self, table: Table) -> None:
        table.path.mkdir(parents=True)
        DeltaTable.create(table.path, Schema.from_arrow(COLUMNS), partition_by=["day"], configuration=lake.CONFIGURATION)
        write_deltalake(
            lake.staging(table, self.run.id), pa.Table.from_pylist([{"pv": 7, "day": DAY}], COLUMNS), partition_by=["day"]
        )

    def ends(self) -> dict[str, Any]:
        airflow.command(self.settings, "db", "migrate")
        done = subprocess.run(
            [sys.executable, "-c", ENDED, str(airflow.ROOT / "dags" / "nightly.py"), json.dumps({"day": str(DAY)})],
            env=airflow.clean() | airflow.environment(self.settings) | {"PYTHONPATH": str(airflow.ROOT / "plugins")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.said = done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def settled(self) -> set[str]:
        """The tables of which readers see the run's rows."""
        return {n for n in STAGED if DeltaTable(lake.table(self.settings, CATALOG[n]).path).to_pyarrow_table().num_rows}

    def told(self) -> list[dict[str, Any]]:
        file = self.settings.state / "alerts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def night(fresh_settings: Callable[[Path], Settings], tmp_path: Path) -> Callable[..., Night]:
    return lambda failed=None: Night(fresh_settings(tmp_path / "home"), failed)


def test_a_night_whose_gates_hold_publishes_every_table(night: Callable[..., Night]) -> None:
    green = night()
    ended = green.ends()
    assert ended["state"] == "success", green.said[-4000:]
    assert set(ended["tasks"].values()) == {"success"}
    assert green.settled() == set(STAGED)
    assert [(one["what"], one["title"]) for one in green.told()] == [
        ("unexplained_difference", "site_hourly_traffic (2 rows) differ from what was live")
    ]


def test_a_gate_that_fails_holds_back_its_own_table_and_the_night_is_red(night: Callable[..., Night]) -> None:
    red = night("site_hourly_traffic")
    ended = red.ends()
    assert ended["state"] == "failed"
    assert {t for t, state in ended["tasks"].items() if state == "failed"} == {"each.gate[site_hourly_traffic]"}
    [held] = [t for t, state in ended["tasks"].items() if state == "upstream_failed"]
    assert held.startswith("each.publish[")
    assert ended["tasks"]["night"] == "success"
    assert red.settled() == set(STAGED) - {"site_hourly_traffic"}
    said = {one["what"]: one["text"] for one in red.told()}
    assert set(said) == {"gate_failed", "unexplained_difference"}
    for part in (f'site_hourly_traffic: "{CHECK}" failed on 12 rows', "publish_over", red.run.id):
        assert part in said["gate_failed"]
