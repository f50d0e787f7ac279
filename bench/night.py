"""A day's exact page views and visitors, by hour and day: settled, by plain Spark and by DuckDB, from the same events."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

import psutil
import typer

from bench.measure import Figure, Tree
from bench.world import World
from tidemark import kafka
from tidemark.pipelines.traffic import PAGE_VIEWS

TABLES = ("hourly_traffic", "site_hourly_traffic", "daily_traffic", "site_daily_traffic")


def measure(world: World, events: int, others: int, days: int, rounds: int) -> list[Figure]:
    """Yesterday of `events` events alone, then it and the days before, of `others` events each, by one application."""
    first = world.yesterday(events) - timedelta(days=days - 1)
    for n in range(days - 1):
        world.tidemark("produce", PAGE_VIEWS.name, "--sample", "--day", str(first + timedelta(days=n)), "--count", str(others))
    raw = world.home / "raw"
    write_raw(world, raw)
    world.stream()
    world.wait_read()
    world.stop_stream()
    last = first + timedelta(days=days - 1)
    said: dict[str, list[float]] = {}
    for turn in range(rounds):
        ways = ["tidemark", "spark", "duckdb"]
        for way in ways if turn % 2 else reversed(ways):
            said.setdefault(f"{way} 1", []).append(night(world, way, last, last, raw))
    for way in ("tidemark", "spark", "duckdb"):
        said[f"{way} {days}"] = [night(world, way, first, last, raw)]
    middle = {name: statistics.median(cpu) for name, cpu in said.items()}
    size = f"{events:,} events of yesterday, {others:,} of each day before; JVM, checks and comparison counted in"
    found = [Figure(f"night: {name.replace(' ', ', ')} day(s)", cpu, "CPU-s", size) for name, cpu in middle.items()]
    found += [
        Figure("night: settled beside plain Spark", middle["tidemark 1"] / middle["spark 1"], "", "plain Spark", "<= 0.25"),
        Figure("night: settled beside DuckDB", middle["tidemark 1"] / middle["duckdb 1"], "", "DuckDB", "<= 2"),
        Figure(
            f"night: {days} days by one settling beside one plain Spark application",
            middle[f"tidemark {days}"] / middle[f"spark {days}"],
            "",
            "plain Spark",
            "<= 1.25",
        ),
        Figure(
            f"night: {days} days by one settling, share of {days} settlings",
            middle[f"tidemark {days}"] / (days * middle["tidemark 1"]),
            "",
            f"{days} times the median of one",
        ),
    ]
    return found


def write_raw(world: World, raw: Path) -> None:
    """Every record's bytes as JSON lines, a file for each day of arrival's order: what plain Spark and DuckDB are given."""
    raw.mkdir(parents=True, exist_ok=True)
    with (raw / "events.jsonl").open("wb") as out:
        for record in kafka.consume(world.settings, PAGE_VIEWS.name, "earliest"):
            if record.value is not None:
                out.write(record.value + b"\n")


def night(world: World, way: str, first: date, last: date, raw: Path) -> float:
    """CPU-seconds of one way, its start counted in."""
    if way == "tidemark":
        argv = [sys.executable, "-m", "tidemark", "settle", "--from", str(first), "--to", str(last), "--reason", "bench"]
        return cpu_of(argv + [word for name in TABLES for word in ("--only", name)], world.environment())
    options = {"way": way, "first": str(first), "last": str(last), "raw": str(raw)}
    argv = [sys.executable, "-m", "bench.night", *(f"--{name}={value}" for name, value in options.items())]
    return cpu_of(argv, world.environment(world.settings.model_copy(update={"home": world.home / "peer"})))


def cpu_of(argv: list[str], env: dict[str, str]) -> float:
    """CPU-seconds of a program and all that it starts, looked at until it ends."""
    process = subprocess.Popen(argv, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tree, spent = Tree(process.pid), 0.0
    while process.poll() is None:
        try:
            spent = max(spent, tree.cpu())
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    said = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with exit code {process.returncode}: {said[-2000:]}")
    return spent


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

    spark = session(Settings(), "night")
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
