"""Local buyers of a day: settled, by plain Spark and by DuckDB, from the same orders, users and items, and the same answer."""

from __future__ import annotations

import json
import statistics
import sys
from datetime import date, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from bench.measure import Figure, plain_jvm
from bench.night import cpu_of, well_formed
from bench.world import World
from tidemark import kafka, lake
from tidemark.model import EVENT_TIME
from tidemark.pipelines.local_buyers import ITEMS, ORDERS, USERS, local_buyers

WAYS = ("tidemark", "spark", "duckdb")
CHANGES = {"users": ("user_name", "address"), "items": ("item_name", "origin")}
ANSWER = ("hour", "buyers", "local_orders", "orders", "unknown_users", "unknown_items")


def measure(world: World, orders: int, changes: int, rounds: int) -> list[Figure]:
    """Yesterday with so many orders, and so many changes of users and of items."""
    day = world.yesterday(1)
    for topic, count in ((USERS, changes), (ITEMS, changes), (ORDERS, orders)):
        world.tidemark("produce", topic.name, "--sample", "--day", str(day), "--count", str(count))
    raw = world.home / "raw"
    write_raw(world, raw)
    world.stream()
    world.wait_read()
    world.stop_stream()
    said: dict[str, list[float]] = {}
    for turn in range(rounds):
        for way in WAYS if turn % 2 else reversed(WAYS):
            said.setdefault(way, []).append(night(world, way, day, raw))
    middle = {way: statistics.median(cpu) for way, cpu in said.items()}
    size = f"{orders:,} orders, {changes:,} changes of users and of items; JVM, checks and comparison counted in"
    found = [Figure(f"buyers: {way}", cpu, "CPU-s", size) for way, cpu in middle.items()]
    found += [Figure(f"buyers: settled beside {way}", middle["tidemark"] / middle[way], "", way) for way in WAYS[1:]]
    world.tidemark("publish", lake.runs(world.settings)[-1].id)
    asked = world.tidemark("query", f"SELECT {', '.join(ANSWER)} FROM {local_buyers.name} WHERE settled ORDER BY hour", "--json")
    ours = [tuple(map(str, row[1:])) for row in json.loads(asked)["rows"]]
    for way in WAYS[1:]:
        different = sum(one != other for one, other in zip_longest(ours, answer_of(raw.parent / "out" / way)))
        found.append(Figure(f"buyers: hours that {way} answers otherwise", different, "hours", f"of {len(ours)}", "<= 0"))
    return found


def answer_of(folder: Path) -> list[tuple[str, ...]]:
    """By hour; each reader writes an instant in its own way, so the hour itself is left out."""
    import duckdb

    columns = ", ".join(ANSWER[1:])
    rows = duckdb.sql(f"SELECT {columns} FROM '{folder}/*.parquet' ORDER BY hour").fetchall()
    return [tuple(map(str, row)) for row in rows]


def write_raw(world: World, raw: Path) -> None:
    """Orders as they were sent, those that are none left out; of users and items a line for each change, a tombstone's
    without a place."""
    raw.mkdir(parents=True, exist_ok=True)
    with (raw / "orders.jsonl").open("wb") as out:
        for record in kafka.consume(world.settings, ORDERS.name, "earliest"):
            if well_formed(ORDERS, record.value):
                out.write((record.value or b"") + b"\n")
    for topic in (USERS, ITEMS):
        key, place = CHANGES[topic.name]
        with (raw / f"{topic.name}.jsonl").open("w") as lines:
            for record in kafka.consume(world.settings, topic.name, "earliest"):
                if record.value and not well_formed(topic, record.value):
                    continue
                row = json.loads(record.value) if record.value else {}
                ended = dict(record.headers).get(EVENT_TIME) or record.timestamp.isoformat().encode()
                since = row.get("changed_at") or ended.decode()
                line = {
                    key: (record.key or b"").decode(),
                    place: row.get(place),
                    "known": bool(row),
                    "since": since,
                    "n": record.offset,
                }
                lines.write(json.dumps(line) + "\n")


def night(world: World, way: str, day: date, raw: Path) -> float:
    """CPU-seconds of one way, its start counted in."""
    if way == "tidemark":
        argv = ["-m", "tidemark", "settle", "--day", str(day), "--only", local_buyers.name, "--reason", "bench"]
        return cpu_of([sys.executable, *argv], world.environment())
    argv = ["-m", "bench.buyers", f"--way={way}", f"--day={day}", f"--raw={raw}"]
    return cpu_of([sys.executable, *argv], world.environment(world.settings.model_copy(update={"home": world.home / "peer"})))


def peer(way: Annotated[str, typer.Option()], day: Annotated[str, typer.Option()], raw: Annotated[Path, typer.Option()]) -> None:
    """What a careful person would write for one night: user and item as they were when it was ordered."""
    out, end = raw.parent / "out" / way, date.fromisoformat(day) + timedelta(days=1)
    if way == "duckdb":
        by_duckdb(raw, out, day, end)
    else:
        by_spark(raw, out, day, end)


def by_duckdb(raw: Path, out: Path, day: str, end: date) -> None:
    import duckdb

    db = duckdb.connect()
    out.mkdir(parents=True, exist_ok=True)
    db.execute("SET TimeZone = 'UTC'")
    for topic, (key, place) in CHANGES.items():
        columns = f"{{{key}: 'VARCHAR', {place}: 'VARCHAR', known: 'BOOLEAN', since: 'TIMESTAMPTZ', n: 'BIGINT'}}"
        db.execute(
            f"""CREATE TABLE {topic} AS SELECT {key}, since, arg_max({place}, n) AS {place}, arg_max(known, n) AS known
            FROM (SELECT * REPLACE (coalesce({place}, '') AS {place})
                  FROM read_json('{raw}/{topic}.jsonl', format = 'newline_delimited', columns = {columns}))
            GROUP BY {key}, since"""
        )
    columns = "{order_id: 'VARCHAR', user_name: 'VARCHAR', item_name: 'VARCHAR', ordered_at: 'TIMESTAMPTZ'}"
    db.execute(
        f"""CREATE TABLE o AS SELECT any_value(user_name) AS user_name, any_value(item_name) AS item_name,
        any_value(ordered_at) AS ordered_at
        FROM read_json('{raw}/orders.jsonl', format = 'newline_delimited', columns = {columns})
        WHERE ordered_at >= TIMESTAMPTZ '{day} 00:00Z' AND ordered_at < TIMESTAMPTZ '{end} 00:00Z' GROUP BY order_id"""
    )
    db.execute(
        f"""COPY (SELECT date_trunc('hour', ordered_at) AS hour,
            count(DISTINCT o.user_name) FILTER (u.known AND i.known AND address = origin AND address <> '') AS buyers,
            count(*) FILTER (u.known AND i.known AND address = origin AND address <> '') AS local_orders,
            count(*) AS orders,
            count(*) FILTER (u.known IS NOT TRUE) AS unknown_users,
            count(*) FILTER (i.known IS NOT TRUE) AS unknown_items
        FROM o ASOF LEFT JOIN users u ON o.user_name = u.user_name AND o.ordered_at >= u.since
               ASOF LEFT JOIN items i ON o.item_name = i.item_name AND o.ordered_at >= i.since
        GROUP BY ALL ORDER BY hour) TO '{out}/local_buyers.parquet'"""
    )


def by_spark(raw: Path, out: Path, day: str, end: date) -> None:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    from tidemark.session import session
    from tidemark.settings import Settings

    settings = Settings()
    spark = session(settings, "buyers", plain_jvm(settings))
    orders = spark.read.schema("order_id STRING, user_name STRING, item_name STRING, ordered_at TIMESTAMP").json(
        str(raw / "orders.jsonl")
    )
    orders = orders.where((F.col("ordered_at") >= day) & (F.col("ordered_at") < str(end))).dropDuplicates(["order_id"])
    for topic, (key, place) in CHANGES.items():
        changed = spark.read.schema(f"{key} STRING, {place} STRING, known BOOLEAN, since TIMESTAMP, n BIGINT").json(
            str(raw / f"{topic}.jsonl")
        )
        valid = changed.withColumn("until", F.lead("since").over(Window.partitionBy(key).orderBy("since", "n"))).where("known")
        valid = valid.select(F.col(key).alias("_key"), place, "since", "until", F.lit(True).alias(f"known_{topic}"))
        meets = (F.col(key) == F.col("_key")) & (F.col("ordered_at") >= F.col("since"))
        meets &= F.col("until").isNull() | (F.col("ordered_at") < F.col("until"))
        orders = orders.join(F.broadcast(valid), on=meets, how="left").drop("_key", "since", "until")
    local = F.col("address") == F.col("origin")
    counted = orders.groupBy(F.date_trunc("hour", "ordered_at").alias("hour")).agg(
        F.count_distinct(F.when(local, F.col("user_name"))).alias("buyers"),
        F.count_if(local).alias("local_orders"),
        F.count("*").alias("orders"),
        F.count_if(F.col("known_users").isNull()).alias("unknown_users"),
        F.count_if(F.col("known_items").isNull()).alias("unknown_items"),
    )
    counted.coalesce(1).sortWithinPartitions("hour").write.mode("overwrite").parquet(str(out))
    spark.stop()


if __name__ == "__main__":
    typer.run(peer)
