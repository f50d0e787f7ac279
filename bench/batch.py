"""One micro-batch of no, few and many rows and of one, four and sixteen rollups: what it costs."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.measure import Cost, Figure, program
from bench.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidemark.model import Catalog


def measure(world: World, rows: tuple[int, ...], outputs: tuple[int, ...], batches: int) -> list[Figure]:
    """Each pair in a process of its own over the same topic; an idle trigger is the pair of no rows and one rollup."""
    world.backlog((batches + 3) * max(rows))
    found = []
    for count in outputs:
        for size in rows:
            own = {"home": world.home / f"batch-{count}-{size}", "lake": None, "batch_records": size, "trigger": "0 seconds"}
            env = world.environment(world.settings.model_copy(update=own))
            said = program("bench.batch", env, outputs=count, batches=batches)
            what, against = f"batch: {size:,} rows, {count} rollups", f"{batches} batches"
            found.append(Figure(f"{what}, wall", statistics.median(said["wall"]), "s", against))
            cpu = statistics.median(said["cpu"])
            found.append(Figure(f"batch with rows: {count} rollups", cpu, "CPU-s", against, at=size))
            found.append(Figure(f"batch with rollups: {size:,} rows", cpu, "CPU-s", against, at=count))
    own = {"home": world.home / "batch-idle", "lake": None, "batch_records": 10**7}
    said = program("bench.batch", world.environment(world.settings.model_copy(update=own)), outputs=1, batches=0)
    found.append(Figure("batch: no rows, 1 rollup, CPU of a trigger", said["cpu"][0], "CPU-s", "idle for ten triggers of 3 s"))
    return found


def copies(outputs: int) -> Catalog:
    """The shipped topic, and so many rollups of the shipped kind, each with panes of its own length."""
    from tidemark import model
    from tidemark.functions import distinct, pane
    from tidemark.model import rollup
    from tidemark.pipelines.traffic import PAGE_VIEWS

    lengths = [seconds for seconds in range(5, 3600) if 3600 % seconds == 0]

    def copy(number: int) -> Any:
        @rollup(
            reads={"views": PAGE_VIEWS}, key=("page", "pane"), time="pane", merge={"views": "distinct", "visitors": "distinct"}
        )
        def panes(views: DataFrame) -> DataFrame:
            return views.groupBy("page", pane("viewed_at", f"{lengths[number]} seconds").alias("pane")).agg(
                distinct("event_id").alias("views"), distinct("visitor_id").alias("visitors")
            )

        object.__setattr__(panes, "name", f"panes_{number}")
        return panes

    return model.catalog([type("copies", (), {"views": PAGE_VIEWS} | {f"r{n}": copy(n) for n in range(outputs)})])


def race(outputs: Annotated[int, typer.Option()], batches: Annotated[int, typer.Option()]) -> None:
    """A real streaming query over a backlog; with no batches asked for, what it costs once there is nothing to read."""
    from tidemark.settings import Settings
    from tidemark.speed import Stream

    settings = Settings()
    (settings.state / "main").mkdir(parents=True, exist_ok=True)
    stream = Stream(settings, copies(outputs), "main", settings.state / "main")
    stream.prepare()
    own, enough = stream.batch, threading.Event()
    said: dict[str, list[float]] = {"wall": [], "cpu": []}

    def one(records: DataFrame, number: int) -> None:
        with Cost() as cost:
            own(records, number)
        if number > 2:  # the first ones compile
            said["wall"].append(cost.wall)
            said["cpu"].append(cost.cpu)
        if number >= (batches + 2 if batches else 0):
            enough.set()

    stream.batch = one
    query = stream.start_query()
    while not enough.wait(0.1) and query.isActive:
        pass
    if query.exception():
        raise query.exception()
    if not batches:
        time.sleep(5)
        with Cost() as cost:
            time.sleep(30)
        said = {"wall": [], "cpu": [cost.cpu / 10]}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    query.stop()
    stream.spark.stop()


if __name__ == "__main__":
    typer.run(race)
