"""How the cost of a day grows: with its events, its pages, its visitors, and the days that one run computes."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.measure import Cost, Figure, program
from bench.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BASE = {"events": 1_000_000, "pages": 50, "visitors": 20_000, "days": 1}
AXES = {
    "events": (100_000, 1_000_000, 10_000_000),
    "pages": (50, 500, 5_000),
    "visitors": (2_000, 20_000, 200_000, 2_000_000),
    "days": (1, 7, 30),
}
"""What is varied, the rest as in `BASE`; the events of several days are those of `BASE`, spread over them."""
STAGES = ("log", "rollups", "hours and days", "last hour")


def measure(world: World, shrink: int) -> list[Figure]:
    """Each point once, in a process of its own, as a night is; `shrink` divides events and visitors and drops the largest."""
    base = BASE | {name: BASE[name] // shrink for name in ("events", "visitors")}
    axes = {axis: [n // shrink if axis in ("events", "visitors") else n for n in points] for axis, points in AXES.items()}
    if shrink > 1:
        axes = {axis: points[:-1] for axis, points in axes.items()}
    said: dict[tuple[int, ...], dict[str, Any]] = {}
    for point in dict.fromkeys(tuple((base | {axis: n}).values()) for axis, ns in axes.items() for n in ns):
        home = world.home / "growth"
        env = world.environment(world.settings.model_copy(update={"home": home}))
        said[point] = program("bench.growth", env, **dict(zip(base, point, strict=True)), seed=world.seed)
        shutil.rmtree(home)
    found = []
    for axis, numbers in axes.items():
        for stage in STAGES:
            for n in numbers:
                run = said[tuple((base | {axis: n}).values())]
                against = f"{n:,} {axis}; {run['rows'][stage]:,} rows"
                found.append(Figure(f"growth with {axis}: {stage}", run["cpu"][stage], "CPU-s", against, at=n))
    return found


def grow(
    events: Annotated[int, typer.Option()],
    pages: Annotated[int, typer.Option()],
    visitors: Annotated[int, typer.Option()],
    days: Annotated[int, typer.Option()],
    seed: Annotated[int, typer.Option()],
) -> None:
    """Judge and append the events, roll them, and answer, each step written as a settling stages it; checks are left out."""
    from tidemark import fold, settle
    from tidemark.pipelines import traffic
    from tidemark.session import session
    from tidemark.settings import Settings

    settings = Settings()
    spark = session(settings, "growth", optimize=events >= settle.LONG["log"])
    start, at = datetime(2026, 1, 1, tzinfo=UTC), settings.home / "grown"
    end = start + timedelta(days=days)
    cpu: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    rows: dict[str, int] = dict.fromkeys(STAGES, 0)

    def write(stage: str, name: str, frame: DataFrame, *order: str) -> None:
        with Cost() as cost:
            apart = frame.coalesce(1) if days == 1 else frame.repartition(min(days, 8), "day")
            whole = apart.sortWithinPartitions("day", *order) if order else frame
            whole.write.partitionBy("day").option("compression", "zstd").parquet(str(at / name))
        cpu[stage] += cost.cpu
        rows[stage] += spark.read.parquet(str(at / name)).count()

    def read(declared: Any, *_: Any) -> DataFrame:
        return spark.read.parquet(str(at / declared.name))

    records(spark, events, pages, visitors, start, end, seed).write.parquet(str(at / "records"))
    judged = fold.judged(traffic.PAGE_VIEWS, spark.read.parquet(str(at / "records"))).drop("event_time")
    write("log", traffic.PAGE_VIEWS.name, judged)
    for rollup in (traffic.page_panes, traffic.page_quarters):
        accepted = fold.accepted(traffic.PAGE_VIEWS, read(traffic.PAGE_VIEWS))
        write("rollups", rollup.name, fold.roll(rollup, {"views": accepted}), *rollup.key)
    hours = (traffic.hourly_traffic, traffic.site_hourly_traffic, traffic.daily_traffic, traffic.site_daily_traffic)
    marks = (traffic.last_hour, traffic.site_last_hour)
    for view in (*hours, *marks):
        stage = "last hour" if view in marks else "hours and days"
        write(stage, view.name, fold.answers(spark, view, view, read, start, end, settled=True, merged=True), *view.key)
    sys.stdout.write(json.dumps({"cpu": cpu, "rows": rows}) + "\n")
    sys.stdout.flush()
    spark.stop()


def records(spark: SparkSession, events: int, pages: int, visitors: int, start: datetime, end: datetime, seed: int) -> DataFrame:
    """Page views as Kafka records, evenly over `[start, end)`, pages and visitors with the sample's long tails."""
    from pyspark.sql import functions as F

    def drawn(what: int) -> Any:
        """Even in [0, 1)."""
        return F.pmod(F.xxhash64("id", F.lit(seed), F.lit(what)), F.lit(2**40)) / float(2**40)

    step = (end - start) / events // timedelta(microseconds=1)
    at = F.timestamp_micros(F.col("id") * step + int(start.timestamp()) * 1_000_000)
    event = F.struct(
        F.concat(F.hex(F.xxhash64("id", F.lit(seed))), F.hex(F.col("id"))).alias("event_id"),
        F.concat(F.lit("v"), F.floor(visitors * F.pow(drawn(1), 2))).alias("visitor_id"),
        F.concat(F.lit("/item/"), F.floor(pages * F.pow(drawn(2), 3))).alias("page"),
        F.date_format(at, "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'").alias("viewed_at"),
    )
    return spark.range(events).select(
        F.lit(None).cast("binary").alias("key"),
        F.to_json(event).cast("binary").alias("value"),
        (F.col("id") % 6).cast("int").alias("partition"),
        F.floor(F.col("id") / 6).alias("offset"),
        at.alias("timestamp"),
        F.lit(None).cast("array<struct<key: string, value: binary>>").alias("headers"),
    )


if __name__ == "__main__":
    typer.run(grow)
