"""A day's exact page views and visitors, by hour and day: settled, by plain Spark and by DuckDB, from the same events.

Peers read them as JSON text, a settling the log's typed Parquet: of the text the stream has read them before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import psutil

from bench.measure import Figure, Tree, apart
from bench.peers.night import questions
from bench.world import World
from tidemark import kafka, lake, query
from tidemark.model import Topic
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS

TABLES = ("hourly_traffic", "site_hourly_traffic", "daily_traffic", "site_daily_traffic")


def measure(world: World, events: int, others: int, days: int, rounds: int) -> list[Figure]:
    """Yesterday of `events` events alone, then it and the days before, of `others` events each, by one application; and one of
    those days alone, for what as many applications as days would cost. The answers of the last are held to each other."""
    raw, sizes, made = world.home / "raw", [events, others, days], world.home / "made.json"
    if not made.exists():
        made.write_text(json.dumps([sizes, str(make(world, events, others, days, raw))]))
    kept, at = json.loads(made.read_text())
    assert kept == sizes, f"{world.home} has a lake of {kept}, not of {sizes}"
    last = date.fromisoformat(at)
    first = last - timedelta(days=days - 1)
    said: dict[str, list[float]] = {}
    for turn in range(rounds):
        ways = ["tidemark", "spark", "duckdb"]
        for way in ways if turn % 2 else reversed(ways):
            said.setdefault(f"{way} 1", []).append(night(world, way, last, last, raw))
    for way in ("tidemark", "spark"):
        said[f"{way} small"] = [night(world, way, first, first, raw) for _ in range(rounds)]
    for way in ("tidemark", "spark", "duckdb"):
        said[f"{way} {days}"] = [night(world, way, first, last, raw)]
    cpu = {name: statistics.median(spent) for name, spent in said.items()}
    size = f"{events:,} events of yesterday, {others:,} of each day before; JVM, checks and comparison counted in"
    names = {
        name: f"{way}, {'a day of the others' if n == 'small' else f'{n} day(s)'}" for name in cpu for way, n in [name.split()]
    }
    found = [Figure(f"night: {names[name]}", spent, "CPU-s", size) for name, spent in cpu.items()]
    one, many = cpu["tidemark 1"], cpu[f"tidemark {days}"]
    apart = {way: cpu[f"{way} 1"] + (days - 1) * cpu[f"{way} small"] for way in ("tidemark", "spark")}
    month, each = f"night: {days} days by one settling", f"{days} applications, of a day each"
    each += f": one large, {days - 1} small" if events > others else ""
    found += [
        Figure("night: settled beside plain Spark", one / cpu["spark 1"], "", "plain Spark", "<= 0.25"),
        Figure("night: settled beside DuckDB", one / cpu["duckdb 1"], "", "DuckDB", "<= 2"),
        Figure(f"{month} beside one plain Spark application", many / cpu[f"spark {days}"], "", "plain Spark", "<= 1.25"),
        Figure(f"{month} beside plain Spark", many / cpu[f"spark {days}"], "", "plain Spark", "<= 0.25"),
        Figure(f"{month} beside DuckDB", many / cpu[f"duckdb {days}"], "", "DuckDB", "<= 2"),
        Figure(f"{month}, share of {days} of plain Spark", many / apart["spark"], "", each),
        Figure(f"{month}, share of {days} settlings", many / apart["tidemark"], "", each),
    ]
    world.tidemark("publish", lake.runs(world.settings)[-1].id)
    for way in ("spark", "duckdb"):
        found.append(Figure(f"night: rows that {way} answers otherwise", *different(world, raw.parent / "out" / way), "<= 0"))
    return found


def make(world: World, events: int, others: int, days: int, raw: Path) -> date:
    """Have those days in Kafka, as text and in the lake, settled and published. Returns the last: past midnight it is no more
    yesterday."""
    last = world.yesterday(events)
    first = last - timedelta(days=days - 1)
    for n in range(days - 1):
        world.tidemark("produce", PAGE_VIEWS.name, "--sample", "--day", str(first + timedelta(days=n)), "--count", str(others))
    world.stream()
    write_raw(world, raw)
    world.wait_read(max(900, (events + others * (days - 1)) / 10_000))
    world.stop_stream()
    # As where a stream has run all day: it merges small files each minute, and readers have already what is settled. One that
    # only caught up has merged nothing, and shown little.
    world.tidemark("compact")
    night(world, "tidemark", first, last, raw)
    world.tidemark("publish", lake.runs(world.settings)[-1].id)
    return last


def different(world: World, theirs: Path) -> tuple[int, str, str]:
    """Rows of the settled answers that a peer has not, and the other way: how many, of what, of how many."""
    import pyarrow.parquet as pq

    count = rows = 0
    with query.connect(world.settings, CATALOG) as db:
        for name, keys in questions().items():
            columns = ", ".join((*keys, "pv", "uv"))
            db.register("theirs", pq.read_table(theirs / name if (theirs / name).exists() else theirs / f"{name}.parquet"))
            count += apart(db, f"SELECT {columns} FROM {name}_traffic WHERE settled", f"SELECT {columns} FROM theirs")
            rows += db.sql("SELECT count(*) FROM theirs").fetchall()[0][0]
            db.unregister("theirs")
    return count, "rows", f"of {rows:,}"


def write_raw(world: World, raw: Path) -> None:
    """Events as they were sent, in the order of their arrival, those that are none left out: what the peers are given."""
    raw.mkdir(parents=True, exist_ok=True)
    with (raw / "events.jsonl").open("wb") as out:
        for record in kafka.consume(world.settings, PAGE_VIEWS.name, "earliest"):
            if well_formed(PAGE_VIEWS, record.value):
                out.write((record.value or b"") + b"\n")


def well_formed(topic: Topic, value: bytes | None) -> bool:
    """Whether a value is an object with every required field, none of which is an object itself: the sample's others are not."""
    try:
        row = json.loads(value or b"")
    except ValueError:
        return False
    required = {c.name for c in topic.columns if not c.nullable} - {topic.key if topic.compacted else ""}
    return isinstance(row, dict) and row.keys() >= required and not any(isinstance(v, dict) for v in row.values())


def night(world: World, way: str, first: date, last: date, raw: Path) -> float:
    """CPU-seconds of one way, its start counted in. A peer that ends with an error is asked once more, and that is said."""
    if way == "tidemark":
        argv = [sys.executable, "-m", "tidemark", "settle", "--from", str(first), "--to", str(last), "--reason", "bench"]
        return cpu_of(argv + [word for name in TABLES for word in ("--only", name)], world.environment())
    options = {"way": way, "first": str(first), "last": str(last), "raw": str(raw)}
    argv = [sys.executable, "-m", "bench.peers.night", *(f"--{name}={value}" for name, value in options.items())]
    env = world.environment(world.settings.model_copy(update={"home": world.home / "peer"}))
    try:
        return cpu_of(argv, env)
    except RuntimeError as ended:  # of a day of 86 million plain Spark has ended in one of three: hours are not lost for that
        sys.stderr.write(f"{way} is asked once more: {ended}\n")
        return cpu_of(argv, env)


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
        raise RuntimeError(f"{' '.join(argv)} ended with exit code {process.returncode}: {said[-20_000:]}")
    return spent
