"""One night by plain Spark or by DuckDB, whose process imports nothing of the platform."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

import typer

from bench.measure import plain_jvm


def peer(
    way: Annotated[str, typer.Option()],
    first: Annotated[str, typer.Option()],
    last: Annotated[str, typer.Option()],
    raw: Annotated[Path, typer.Option()],
) -> None:
    """What a careful person would write for one night: exact, repeats counted once, written as Parquet."""
    out = raw.parent / "out" / way
    end = date.fromisoformat(last) + timedelta(days=1)
    if way == "duckdb":
        import duckdb

        db = duckdb.connect()
        out.mkdir(parents=True, exist_ok=True)
        db.execute("SET TimeZone = 'UTC'")
        columns = "{event_id: 'VARCHAR', visitor_id: 'VARCHAR', page: 'VARCHAR', viewed_at: 'TIMESTAMPTZ'}"
        db.execute(
            f"""CREATE TABLE e AS SELECT event_id, any_value(visitor_id) AS visitor_id, any_value(page) AS page,
            any_value(viewed_at) AS viewed_at FROM read_json('{raw}/*.jsonl', format = 'newline_delimited', columns = {columns},
            ignore_errors = true) WHERE viewed_at >= TIMESTAMPTZ '{first} 00:00Z' AND viewed_at < TIMESTAMPTZ '{end} 00:00Z'
            AND event_id IS NOT NULL AND visitor_id IS NOT NULL AND page IS NOT NULL GROUP BY event_id"""
        )
        for name, keys in questions().items():
            by = {"page": "page", "hour": "date_trunc('hour', viewed_at) AS hour", "day": "viewed_at::DATE AS day"}
            columns = ", ".join(by[k] for k in keys)
            counts = "count(*) AS pv, count(DISTINCT visitor_id) AS uv"
            db.execute(f"COPY (SELECT {columns}, {counts} FROM e GROUP BY ALL) TO '{out}/{name}.parquet'")
        return
    from pyspark.sql import functions as F

    from tidemark.session import session
    from tidemark.settings import Settings

    settings = Settings()
    spark = session(settings, "night", plain_jvm(settings))
    schema = "event_id STRING, visitor_id STRING, page STRING, viewed_at TIMESTAMP"
    events = spark.read.schema(schema).json(str(raw)).dropna()
    kept = events.where((F.col("viewed_at") >= first) & (F.col("viewed_at") < str(end))).dropDuplicates(["event_id"]).cache()
    for name, keys in questions().items():
        hour, day = F.date_trunc("hour", "viewed_at").alias("hour"), F.to_date("viewed_at").alias("day")
        by = {"page": F.col("page"), "hour": hour, "day": day}
        both = (F.count("*").alias("pv"), F.countDistinct("visitor_id").alias("uv"))
        counted = kept.groupBy(*(by[k] for k in keys)).agg(*both)
        counted.write.mode("overwrite").parquet(str(out / name))
    spark.stop()


def questions() -> dict[str, tuple[str, ...]]:
    return {"hourly": ("page", "hour"), "site_hourly": ("hour",), "daily": ("page", "day"), "site_daily": ("day",)}


if __name__ == "__main__":
    typer.run(peer)
