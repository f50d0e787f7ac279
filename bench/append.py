"""One micro-batch: the platform's own, and the same job writing with delta-spark's append, on the same records; and the files
that are left of many, compacted."""

from __future__ import annotations

import json
import statistics
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.measure import Cost, Figure, program
from bench.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def measure(world: World, events: int, batches: int) -> list[Figure]:
    world.backlog((batches + 4) * events)
    home = world.settings.model_copy(
        update={"home": world.home / "append", "lake": None, "batch_records": events, "trigger": "0 seconds"}
    )
    said = program("bench.append", world.environment(home), batches=batches)
    files, compaction = said.pop("files"), said.pop("compaction") / (batches + 3)
    middle = {way: {what: statistics.median(c[what] for c in said[way]) for what in ("wall", "cpu")} for way in said}
    size = f"{events:,} events a batch, {batches} batches in turns"
    found = [
        Figure(f"append: {what} of a batch, {way}", middle[way][what], unit, size)
        for way in middle
        for what, unit in (("wall", "s"), ("cpu", "CPU-s"))
    ]
    for what, goal in (("cpu", "<= 0.5"), ("wall", None)):
        ratio = middle["tidemark"][what] / middle["delta-spark"][what]
        found.append(
            Figure(f"append: {what} of tidemark's batch, share of delta-spark's", ratio, "", "delta-spark's append", goal)
        )
    # W2: a compaction runs every few minutes beside the stream; here once, after these batches.
    whole = (middle["tidemark"]["cpu"] + compaction) / middle["delta-spark"]["cpu"]
    size = f"log and rollups after {batches + 3} batches, compacted once"
    return [
        *found,
        *(Figure(f"append: files, {way}", count, "", size) for way, count in files.items()),
        Figure("append: files of tidemark, share of delta-spark's", files["tidemark"] / files["delta-spark"], "", size, "<= 0.1"),
        Figure(
            "append: cpu with its share of the compaction, share of delta-spark's", whole, "", "delta-spark's append", "<= 0.5"
        ),
    ]


def race(batches: Annotated[int, typer.Option()]) -> None:
    """A real streaming query over a backlog whose every batch is done both ways, in turns which is first."""
    from deltalake import DeltaTable
    from pyspark.sql import functions as F

    from tidemark import fold, lake
    from tidemark.pipelines import CATALOG
    from tidemark.pipelines.traffic import PAGE_VIEWS, page_panes, page_quarters
    from tidemark.settings import Settings
    from tidemark.speed import Stream, merging

    settings = Settings()
    (settings.state / "main").mkdir(parents=True, exist_ok=True)
    stream = Stream(settings, CATALOG, "main", settings.state / "main")
    stream.prepare()
    own, enough = stream.batch, threading.Event()
    said: dict[str, Any] = {"tidemark": [], "delta-spark": []}

    def append(rows: DataFrame, name: str, number: int) -> None:
        once = rows.write.format("delta").mode("append").option("txnAppId", "peer").option("txnVersion", number)
        once.partitionBy("day").save(str(settings.home / "peer" / name))

    def peer(records: DataFrame, number: int) -> None:
        rows = fold.judged(PAGE_VIEWS, records).persist()
        views = fold.accepted(PAGE_VIEWS, rows)
        with ThreadPoolExecutor(2, initializer=stream.in_pool, initargs=("stream",)) as writers:
            logged = writers.submit(append, rows.drop("event_time"), PAGE_VIEWS.name, number)
            rolled = [writers.submit(append, fold.roll(r, {"views": views}), r.name, number) for r in (page_panes, page_quarters)]
            for one in (logged, *rolled):
                one.result()
        counts = rows.groupBy(F.col("kafka.partition").alias("partition")).agg(
            F.count("*").alias("records"),
            F.count("reject").alias("rejects"),
            F.max("event_time").alias("stream_time"),
            F.min("kafka.offset").alias("from_offset"),
            (F.max("kafka.offset") + 1).alias("until_offset"),
        )
        append(counts.coalesce(1).withColumn("day", F.current_date()), "ledger", number)
        rows.unpersist()

    def both(records: DataFrame, number: int) -> None:
        ways: list[tuple[str, Any]] = [("tidemark", own), ("delta-spark", peer)]
        for name, way in ways if number % 2 else reversed(ways):
            with Cost() as cost:
                way(records, number)
            if number > 2:  # the first ones compile
                said[name].append({"wall": cost.wall, "cpu": cost.cpu})
        if number == batches + 2:
            enough.set()

    stream.batch = both
    query = stream.start_query()
    while not enough.wait(0.1) and query.isActive:
        pass
    if query.exception():
        raise query.exception()
    query.stop()
    tables = [(one, lake.table(settings, one)) for one in (PAGE_VIEWS, page_panes, page_quarters)]
    upto = {name: pin.seq for name, pin in lake.pins(settings, CATALOG.streams).items()}
    with Cost() as cost:
        for declared, table in tables:
            lake.compact(stream.spark, settings, table, merging(declared), upto)
    said["compaction"] = cost.cpu
    theirs = (DeltaTable(settings.home / "peer" / declared.name).file_uris() for declared, _ in tables)
    said["files"] = {"tidemark": sum(len(table.files()) for _, table in tables), "delta-spark": sum(map(len, theirs))}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    stream.spark.stop()


if __name__ == "__main__":
    typer.run(race)
