"""The settled series of the last hour: by coverage changes, and by Spark's sliding window, on the same sample."""

from __future__ import annotations

import json
import statistics
import sys
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.measure import Cost, Figure, program
from bench.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def measure(world: World, events: int, rounds: int) -> list[Figure]:
    home = world.settings.model_copy(update={"home": world.home / "series"})
    said = program("bench.series", world.environment(home), events=events, rounds=rounds, seed=world.seed)
    ours, theirs = (statistics.median(said[way]["cpu"]) / events * 1e6 for way in ("changes", "window"))
    wall = {way: statistics.median(said[way]["wall"]) for way in ("changes", "window")}
    sample = f"{events:,} events, {said['rows']:,} rows"
    return [
        Figure("series: by coverage changes", ours, "CPU-s per million events", f"{sample}, {wall['changes']:.1f} s wall"),
        Figure(
            "series: by window('1 hour','5 seconds')",
            theirs,
            "CPU-s per million events",
            f"{sample}, {wall['window']:.1f} s wall",
        ),
        Figure("series: CPU per event, times less", theirs / ours, "", "Spark's window()", ">= 50"),
        Figure("series: rows whose PV is not the window's", said["different"], "rows", f"of {said['rows']:,}", "<= 0"),
        Figure("series: greatest error of the window's UV", said["uv_error"], "%", "exact UV by coverage changes"),
    ]


def compare(
    events: Annotated[int, typer.Option()], rounds: Annotated[int, typer.Option()], seed: Annotated[int, typer.Option()]
) -> None:
    """Both ways in turns on one session; the first turn compiles and is not counted."""
    from datetime import UTC, datetime, timedelta

    import pandas as pd
    from pyspark.sql import functions as F

    from tidemark.pipelines.traffic import last_hours, page_panes, sample_view
    from tidemark.session import session
    from tidemark.settings import Settings

    spark = session(Settings(), "series")
    random, start = Random(seed), datetime(2026, 1, 1, tzinfo=UTC)
    drawn = pd.DataFrame([sample_view(random, start + timedelta(milliseconds=n)) for n in range(events)])
    views = spark.createDataFrame(drawn).withColumn("viewed_at", F.to_timestamp("viewed_at")).cache()
    views.count()

    def changes() -> DataFrame:
        return last_hours(page_panes(views=views), views, "page")

    def window() -> DataFrame:
        hours = views.groupBy("page", F.window("viewed_at", "1 hour", "5 seconds"))
        counted = hours.agg(F.count("*").alias("pv"), F.approx_count_distinct("visitor_id").alias("uv"))
        return counted.select("page", F.col("window.end").alias("mark"), "pv", "uv")

    said: dict[str, Any] = {way.__name__: {"cpu": [], "wall": []} for way in (changes, window)}
    for turn in range(rounds + 1):
        for way in (changes, window) if turn % 2 else (window, changes):
            with Cost() as cost:
                way().write.format("noop").mode("overwrite").save()
            if turn:
                said[way.__name__]["cpu"].append(cost.cpu)
                said[way.__name__]["wall"].append(cost.wall)
    ours, theirs = changes().alias("a"), window().alias("b")
    error = F.max(F.abs(F.col("b.uv") - F.col("a.uv")) / F.col("a.uv")) * 100
    compared = (
        ours.join(theirs, on=["page", "mark"], how="full")
        .agg(
            F.count("*").alias("rows"),
            F.count_if(~F.col("a.pv").eqNullSafe(F.col("b.pv"))).alias("different"),
            F.round(error, 2).alias("uv_error"),
        )
        .collect()[0]
    )
    said |= compared.asDict()
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    spark.stop()


if __name__ == "__main__":
    typer.run(compare)
