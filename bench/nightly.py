"""A night through Airflow: from its trigger to the last publication, beside the Spark application's own time."""

from __future__ import annotations

import statistics
import time
from datetime import datetime
from typing import Any

from bench.charge import SETTLING, InCharge
from bench.measure import Figure


def measure(world: InCharge, events: int, rounds: int) -> list[Figure]:
    """Yesterday of `events` page views, settled and published by the DAG `nightly`, `rounds` times; streams run beside."""
    day = world.yesterday(events)
    world.stream()
    world.wait_read()
    world.takes_charge()
    found = list[tuple[float, float]]()
    for _ in range(rounds):
        run = world.triggered("nightly", day=str(day))
        spark = world.begun(SETTLING)
        began = spark.create_time()
        spark.wait()
        alone = time.time() - began
        world.succeeds(run)
        found.append((published(world, run), alone))
    whole, own = statistics.median(w for w, _ in found), statistics.median(s for _, s in found)
    says = f"{events:,} page views of yesterday, median of {rounds}; every pipeline's tables"
    ratio = statistics.median(w / s for w, s in found)
    return [
        Figure("nightly: from trigger to the last publication", whole, "s", says),
        Figure("nightly: the Spark application alone", own, "s", says),
        Figure("nightly: times the Spark application's own time", ratio, "", "its process, from begin to end", "<= 1.3"),
    ]


def published(world: InCharge, run: dict[str, Any]) -> float:
    """Seconds from the trigger to the end of the last publication."""
    last = max(datetime.fromisoformat(t["end_date"]) for t in world.tasks(run) if t["task_id"] == "each.publish")
    return (last - datetime.fromisoformat(run["queued_at"])).total_seconds()
