"""The peer: plain Structured Streaming, the way its guide counts over a sliding window, with delta-spark as the sink."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench.measure import Tree, plain_jvm
from tidemark.pipelines.traffic import PAGE_VIEWS
from tidemark.session import session
from tidemark.settings import Settings


def plain(
    start: Annotated[str, typer.Option(help="Spark's startingOffsets.")],
    batch: Annotated[int, typer.Option(help="Events of a micro-batch.")],
    batches: Annotated[int, typer.Option(help="How many are measured, after a first one.")],
) -> None:
    """Read a backlog in micro-batches; says `{events, wall, cpu}` of each but the first, which compiles."""
    settings, tree = Settings(), Tree()
    spark = session(settings, "plain", plain_jvm(settings))
    table = str(Path(settings.lake_path) / "plain")
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.brokers)
        .option("subscribe", PAGE_VIEWS.name)
        .option("startingOffsets", start)
        .option("maxOffsetsPerTrigger", batch)
        .load()
    )
    views = records.select(F.from_json(F.col("value").cast("string"), PAGE_VIEWS.schema.replace(" NOT NULL", "")).alias("view"))
    hours = (
        views.select("view.*")
        .withWatermark("viewed_at", "10 minutes")
        .groupBy("page", F.window("viewed_at", "1 hour", "5 seconds"))
        .agg(F.count("*").alias("pv"), F.approx_count_distinct("visitor_id").alias("uv"))
    )
    marks: list[tuple[float, float]] = []
    enough = threading.Event()

    def append(rows: DataFrame, number: int) -> None:
        marks.append((time.monotonic(), tree.cpu()))
        if len(marks) > batches + 1:
            enough.set()
            return
        rows.write.format("delta").mode("append").option("txnAppId", "plain").option("txnVersion", number).save(table)

    checkpoint = str(settings.checkpoints / "plain")
    query = hours.writeStream.outputMode("update").foreachBatch(append).option("checkpointLocation", checkpoint).start()
    while not enough.wait(0.2) and query.isActive:
        pass
    if query.exception():
        raise query.exception()
    events = {p["batchId"]: p["numInputRows"] for p in query.recentProgress}
    said = [
        {"events": events[n], "wall": marks[n + 1][0] - marks[n][0], "cpu": marks[n + 1][1] - marks[n][1]}
        for n in range(1, batches + 1)
    ]
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    typer.run(plain)
