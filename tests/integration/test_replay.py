"""Everything again from offset zero beside a running stream: compared, published, taken back; and a mistake mended."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import compare, fold, kafka, lake, local, model, quality, query, repair, settle, speed
from tidemark.functions import distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, rollup, view
from tidemark.settings import Settings

NOW = datetime.now(UTC).replace(microsecond=0)
TODAY = NOW.date()
DAYS = [TODAY - timedelta(days=n) for n in (3, 2, 1)]


def declared(topic: str, mended: bool = True, source: str = "json") -> Catalog:
    """Sales by minute and by day. As it was shipped, the rollup takes ids that differ in case for one: fewer sales."""
    sales = Topic(
        topic,
        key="shop",
        partitions=2,
        schema="id STRING NOT NULL, shop STRING NOT NULL, price DECIMAL(10,2) NOT NULL, sold_at TIMESTAMP NOT NULL",
        id="id",
        event_time="sold_at",
    )
    key = ("shop", "minute")

    @rollup(reads={"sales": sales}, key=key, time="minute", merge={"ids": "distinct", "dearest": "max"})
    def shipped(sales: DataFrame) -> DataFrame:
        return sales.groupBy("shop", pane("sold_at", "1 minute").alias("minute")).agg(
            distinct(F.lower("id")).alias("ids"), F.max("price").alias("dearest")
        )

    @rollup(reads={"sales": sales}, key=key, time="minute", merge={"ids": "distinct", "dearest": "max"})
    def right(sales: DataFrame) -> DataFrame:
        return sales.groupBy("shop", pane("sold_at", "1 minute").alias("minute")).agg(
            distinct("id").alias("ids"), F.max("price").alias("dearest")
        )

    minutes = right if mended else shipped
    object.__setattr__(minutes, "name", "minutes")

    @view(reads={"minutes": minutes}, key=("shop", "hour"), time="hour", live=Live("2 seconds", "2 hours"))
    def hours(minutes: DataFrame) -> DataFrame:
        hour = F.date_trunc("hour", "minute").alias("hour")
        return minutes.groupBy("shop", hour).agg(F.sum(how_many("ids")).alias("sales"), F.max("dearest").alias("dearest"))

    @view(reads={"sales": sales}, key=("shop", "day"), time="day")
    def takings(sales: DataFrame) -> DataFrame:
        return sales.groupBy("shop", F.to_date("sold_at").alias("day")).agg(F.sum("price").cast("decimal(18,2)").alias("taken"))

    return model.catalog([type("shops", (), {"sales": sales, "minutes": minutes, "hours": hours, "takings": takings})])


REPLAY = """
import importlib, json, sys
from tidemark import settle
from tidemark.settings import Settings
module, arguments, _ = json.loads(sys.argv[1])
name = arguments.pop("run")
source = arguments.pop("source")
settings = Settings(_env_file=None)
catalog = importlib.import_module(module).declared(**arguments)
print(settle.replay(settings, catalog, "the replay test", print, name=name, source=source).state)
"""


def at(day: date, hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(day.year, day.month, day.day, hour, minute, second, tzinfo=UTC)


class Shops:
    """One home: a stream over three days of sales and today's, and what was sent to its topic."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self.settings, self.topic, self.sent = settings, topic, 0
        self.catalog = declared(topic)
        kafka.apply(settings, self.catalog.topics.values())

    def send(self, *sales: tuple[str, datetime]) -> None:
        events = [
            {"id": name, "shop": f"s{n % 2}", "price": round(1 + n % 100 / 100, 2), "sold_at": when.isoformat()}
            for n, (name, when) in enumerate(sales, self.sent)
        ]
        assert kafka.produce(self.settings, self.catalog[self.topic], events).complete  # type: ignore[arg-type]
        self.sent += len(events)

    def read(self) -> bool:
        return sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == self.sent

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return query.query(self.settings, self.catalog, sql, rows=100_000).rows

    def sales(self) -> dict[date, int]:
        return dict(self.rows("SELECT day, sum(sales)::BIGINT FROM hours GROUP BY day ORDER BY day"))

    def versions(self) -> dict[str, int]:
        return {d.name: lake.table(self.settings, d).delta().version() for d in self.catalog.derived}

    def compared(self, run: lake.Run) -> dict[tuple[str, date], tuple[int, int, int]]:
        """What differs of a replay of everything, of which every day of every table was compared."""
        found = compare.kept(self.settings, run) or []
        days = {d.name: run.days_of(d) for d in self.catalog.derived}
        assert [(d.table, d.day) for d in found] == [(name, day) for name in days for day in days[name]] != []
        return {(d.table, d.day): (d.changed, d.missing, d.extra) for d in found if not d.same}


@pytest.fixture(scope="module")
def shops(house: Callable[..., Settings]) -> Shops:
    return Shops(house(chunk_records=20), "sales_of_the_replay_test")


def test_a_mistake_is_mended_by_a_replay_beside_the_running_stream(shops: Shops, run: Any, spark: SparkSession) -> None:
    # Each day has 30 sales; on the second, two ids differ in case alone. Today has three, two of which do.
    for day in DAYS:
        shops.send(*((f"{day}-{n}", at(day, 10 + n % 3, n % 60)) for n in range(28)))
    shops.send(("twin", at(DAYS[1], 10)), ("lone", at(DAYS[1], 10)), ("TWIN", at(DAYS[1], 10)), ("lone2", at(DAYS[1], 10)))
    shops.send(("t-1", NOW), ("t-2", NOW), ("T-1", NOW))
    shops.send(("x", NOW - timedelta(seconds=1)))

    # Shipped with the mistake: live and settled, it counts one sale too few.
    stream = run(shops.settings, {"topic": shops.topic, "mended": False})
    wrong = {DAYS[0]: 28, DAYS[1]: 31, DAYS[2]: 28}
    stream.until(lambda: shops.read() and shops.sales().get(TODAY) == 3)
    first = settle.settle(shops.settings, declared(shops.topic, mended=False), DAYS, "the night")
    settle.publish(shops.settings, shops.catalog, first.id)
    assert {d: n for d, n in shops.sales().items() if d in DAYS} == wrong

    # Mended. While the stream still runs as shipped, a replay is refused: later rows would be of the old code.
    with pytest.raises(settle.SettleError, match=r"stream main still runs minutes as it was .* restart it"):
        settle.replay(shops.settings, shops.catalog, "mended")
    stream.drains()
    stream = run(shops.settings, {"topic": shops.topic})
    shops.send(("y", NOW))
    stream.until(lambda: shops.read() and shops.sales().get(TODAY) == 4)

    # Replayed beside the stream, with a reader looking on: nothing moves, and exactly the touched rows are listed.
    before, seen, ended = shops.versions(), set(), threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            seen.add(tuple(sorted((d, n) for d, n in shops.sales().items() if d in DAYS)))

    reader = threading.Thread(target=look)
    reader.start()
    again = settle.replay(shops.settings, shops.catalog, "ids that differ in case are two")
    assert (again.state, again.source, again.open_days) == ("staged", "kafka", [str(TODAY)])
    assert len(again.chunks) == 3
    rolled = {name: version for name, version in shops.versions().items() if name != "hours"}
    assert rolled == {name: version for name, version in before.items() if name != "hours"}
    touched = {("minutes", DAYS[1]), ("hours", DAYS[1]), ("minutes", TODAY)}
    assert shops.compared(again) == dict.fromkeys(touched, (1, 0, 0))
    told = compare.as_markdown(again, compare.kept(shops.settings, again) or [])
    assert f"| hours | {DAYS[1]} | 6 | 1 | 0 | 0 |" in told and "takings (6 rows)" in told

    # Published: all days in one commit a table; the reader saw the old or the new; today's live rows follow.
    done = settle.publish(shops.settings, shops.catalog, again.id)
    assert {p.table: p.version for p in done if p.table != "hours"} == {n: v + 1 for n, v in rolled.items()}
    stream.until(lambda: shops.sales() == wrong | {DAYS[1]: 32, TODAY: 5})
    ended.set()
    reader.join()
    assert seen == {tuple(wrong.items()), tuple((wrong | {DAYS[1]: 32}).items())}
    shops.send(("Y", NOW))
    stream.until(lambda: shops.sales()[TODAY] == 6)

    # A run that was staged before is not published over it, and nothing of it is.
    assert settle.publish(shops.settings, shops.catalog, again.id)[0].version is None
    with pytest.raises(lake.LakeError, match=rf"{DAYS[0]} of views/\w+ was published again by run {again.id}"):
        settle.rollback(shops.settings, shops.catalog, first.id, "too late")

    # Taken back and published again: each is one commit, and each is exact.
    taken = settle.rollback(shops.settings, shops.catalog, again.id, "to see")
    assert {p.table for p in taken} == {"minutes", "hours", "takings"} and all(p.version for p in taken)
    assert {d: n for d, n in shops.sales().items() if d in DAYS} == wrong
    assert settle.rollback(shops.settings, shops.catalog, again.id, "twice") == []
    settle.publish(shops.settings, shops.catalog, again.id)
    assert {d: n for d, n in shops.sales().items() if d in DAYS} == wrong | {DAYS[1]: 32}
    stream.until(lambda: shops.sales()[TODAY] == 6)
    stream.drains()

    # Later live rows and later settlings are the new code's: nothing differs any more.
    last = settle.replay(shops.settings, shops.catalog, "once more", source="log")
    assert shops.compared(last) == {}
    # One that waited while the code was changed is not mixed with rows of the other.
    before = shops.versions()
    with pytest.raises(settle.SettleError, match=rf"{last.id} computed minutes as it was before.* Drop it and replay again"):
        settle.publish(shops.settings, declared(shops.topic, mended=False), last.id)
    assert shops.versions() == before
    shops.older = last  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "moment", ["chunk:11", *(pytest.param(m, marks=pytest.mark.long) for m in ("chunk:2", "chunk:7", "staged"))]
)
def test_killed_replay_leaves_readers_alone_and_goes_on_where_it_was(shops: Shops, run: Any, moment: str) -> None:
    before = shops.versions()
    name = f"killed-{moment.replace(':', '-')}"
    arguments = {"topic": shops.topic, "run": name, "source": "kafka"}
    run(shops.settings, arguments, program=REPLAY, failpoint=moment).dies()
    assert shops.versions() == before
    dead = lake.run_of(shops.settings, name)
    assert (dead.state, dead.undecided) == ("running", True)
    entries = shops.settings.lake_path.glob(f"*/*/runs/{name}/_delta_log/*.json")
    assert datetime.fromisoformat(dead.touched).timestamp() > max(entry.stat().st_mtime for entry in entries)
    tables = [shops.catalog[shops.topic], *shops.catalog.derived]
    staged = {d.name: lake.staged_upto(lake.table(shops.settings, d), name) for d in tables}
    # Five parts are read from Kafka, then each table is computed: three chunks and, of the rollup, today.
    assert sum(n + 1 for n in staged.values()) == (int(moment.split(":")[1]) if ":" in moment else 5 + 4 + 3 + 3)
    other = f"run {name} began with other code; drop it and begin again: tidemark drop {name}"
    with pytest.raises(settle.SettleError, match=other):
        settle.replay(shops.settings, declared(shops.topic, mended=False), "the replay test", name=name)
    found = settle.replay(shops.settings, shops.catalog, "the replay test", name=name)
    assert found.state == "staged" and shops.compared(found) == {}
    assert shops.versions() == before
    assert settle.replay(shops.settings, shops.catalog, "the replay test", name=name).touched == found.touched
    lake.drop(shops.settings, shops.catalog, found)
    assert not list(shops.settings.lake_path.glob(f"*/*/runs/{name}"))
    with pytest.raises(settle.SettleError, match=f"run {name} is dropped"):
        settle.publish(shops.settings, shops.catalog, name)


@pytest.mark.long
def test_replay_killed_ten_times_at_random_goes_on_and_leaves_readers_alone(shops: Shops, run: Any) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 10_000))
    random, before, kills, names = Random(seed), shops.versions(), 0, 0
    sys.stdout.write(f"seed {seed}\n")
    while kills < 10:
        name, names = f"random-{names}", names + 1
        arguments = {"topic": shops.topic, "run": name, "source": random.choice(["kafka", "log"])}
        while kills < 10:
            process = run(shops.settings, arguments, program=REPLAY)
            try:
                process.popen.wait(random.uniform(4, 30))
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
                assert shops.versions() == before
                continue
            assert process.popen.returncode == 0, process.said
            break
        found = settle.replay(shops.settings, shops.catalog, "the replay test", name=name)
        assert found.state == "staged" and shops.compared(found) == {} and shops.versions() == before
        lake.drop(shops.settings, shops.catalog, found)


@pytest.mark.long
def test_planted_row_too_few_row_too_many_and_other_set_of_the_same_size_is_found_in_a_rollup(
    shops: Shops, spark: SparkSession
) -> None:
    run, minutes = shops.older, lake.table(shops.settings, shops.catalog["minutes"])  # type: ignore[attr-defined]
    table, sound = f"delta.`{minutes.path}`", minutes.delta().version()
    assert [d for d in compare.compare(spark, shops.settings, shops.catalog, run, ["minutes"]) if not d.same] == []
    places = [(f"shop = 's0' AND day = '{day}' AND minute = TIMESTAMP '{day} 10:00:00Z'") for day in DAYS]
    [other] = spark.sql(f"SELECT hex(ids) AS ids FROM {table} WHERE {places[0]}").collect()
    spark.sql(f"DELETE FROM {table} WHERE {places[0]}")
    one = spark.read.format("delta").load(str(minutes.path)).where(places[1])
    one.withColumn("shop", F.lit("s9")).write.format("delta").mode("append").save(str(minutes.path))
    spark.sql(f"UPDATE {table} SET ids = X'{other.ids}' WHERE {places[2]}")
    found = compare.compare(spark, shops.settings, shops.catalog, run, ["minutes", "hours"])
    said = {(d.table, d.day): (d.changed, d.missing, d.extra) for d in found if not d.same}
    assert said == {("minutes", DAYS[0]): (0, 1, 0), ("minutes", DAYS[1]): (0, 0, 1), ("minutes", DAYS[2]): (1, 0, 0)}
    [same] = next(d.samples for d in found if d.table == "minutes" and d.day == DAYS[2])
    assert same["run"]["ids"] == same["published"]["ids"]  # as many values, and not the same
    spark.sql(f"RESTORE TABLE {table} TO VERSION AS OF {sound}")


def test_planted_difference_of_one_row_one_cent_and_one_key_is_found(shops: Shops, spark: SparkSession) -> None:
    run = shops.older  # type: ignore[attr-defined]
    takings = lake.table(shops.settings, shops.catalog["takings"])
    places = [("DELETE FROM {t} WHERE day = '{d}' AND shop = 's0'", (0, 1, 0))]
    places += [("UPDATE {t} SET taken = taken + 0.01 WHERE day = '{d}' AND shop = 's1'", (1, 0, 0))]
    places += [("UPDATE {t} SET shop = 's9' WHERE day = '{d}' AND shop = 's0'", (0, 1, 1))]
    for day, (statement, _) in zip(DAYS, places, strict=True):
        spark.sql(statement.format(t=f"delta.`{takings.path}`", d=day))
    found = compare.compare(spark, shops.settings, shops.catalog, run, ["minutes", "hours", "takings"])
    said = {(d.table, d.day): (d.changed, d.missing, d.extra) for d in found if not d.same}
    assert said == {("takings", day): counts for day, (_, counts) in zip(DAYS, places, strict=True)}
    [cent] = next(d.samples for d in found if d.table == "takings" and d.day == DAYS[1])
    assert Decimal(str(cent["published"]["taken"])) - Decimal(str(cent["run"]["taken"])) == Decimal("0.01")
    text = compare.as_markdown(run, found)
    assert f"| takings | {DAYS[1]} | 2 | 1 | 0 | 0 |" in text and "| changed | published | s1 |" in text
    told = compare.differences_of(json.loads(compare.as_json(run, found)))
    assert [replace(d, samples=[]) for d in told] == [replace(d, samples=[]) for d in found]
    assert [d.samples for d in told] == json.loads(json.dumps([d.samples for d in found], default=str))
    settle.publish(shops.settings, shops.catalog, run.id)  # and the run mends what someone did by hand
    assert [d for d in compare.compare(spark, shops.settings, shops.catalog, run, ["takings"]) if not d.same] == []


def test_only_one_table_and_what_reads_it_is_replayed(shops: Shops) -> None:
    run = settle.replay(shops.settings, shops.catalog, "hours alone", source="log", only=["hours"], first=DAYS[1], last=DAYS[1])
    assert {n: t["gate"] for n, t in run.tables.items()} == {shops.topic: "passed", "hours": "passed"}
    assert (run.days, run.open_days) == ([str(DAYS[1])], [])
    lake.drop(shops.settings, shops.catalog, run)


# A log and its ledger, made by hand. Batches are [from, until), each with so many offsets that hold no record.
#
#   offset      0         10        20          a log of whole days: 0 to 9 forty days ago, 10 to 14 ten, 15 to 19 five
#               [ batch 0 )[ batch 1 )
TILL_TEN, TILL_TWENTY, IN_THREE = (0, 0, 10, 0), (0, 10, 20, 0), [(0, 0, 10, 0), (0, 10, 15, 0), (0, 15, 20, 0)]
GAPS, KEPT = {"transactional": True}, {"keep": "30 days", "accept_late": "1 day"}
SCHEMA = "id STRING NOT NULL, sold_at TIMESTAMP NOT NULL"
LOG = pa.struct([("partition", pa.int32()), ("offset", pa.int64()), ("timestamp", pa.timestamp("us", "UTC"))])
RECORDS = {"kafka": LOG, "day": pa.date32(), "reject": pa.string()}


def settling(
    settings: Settings,
    spark: SparkSession,
    batches: list[tuple[int, int, int, int]],
    lacks: set[int],
    pin: dict[int, int],
    start: dict[int, int] | None = None,
    twice: Collection[int] = (),
    **more: Any,
) -> tuple[settle.Settling, Topic, list[str]]:
    """A replay of a topic of whose records the log lacks some and has some twice: what is at work, its topic, what it says."""
    topic = Topic("made", "id", 2, SCHEMA, "sold_at", **more)
    ledger, log, said = lake.ledger(settings), lake.table(settings, topic), list[str]()
    ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    log.create(fold.schema_of(spark.createDataFrame(pa.schema(RECORDS).empty_table())))
    common = {"stream": "main", "topic": "made", "generation": 1, "rejects": 0, "tombstones": 0, "day": TODAY}
    rows = [
        {**common, "partition": p, "seq": seq, "from_offset": a, "until_offset": b, "records": b - a - gaps, "gaps": gaps}
        for seq, (p, a, b, gaps) in enumerate(batches)
    ]
    whole = pa.Table.from_pylist(rows, pa.schema(ledger.delta().schema()))
    lake.append(ledger, lake.Batch("main", 0, len(rows)), lake.write_arrow(ledger, "live/main-0-9-a", whole))
    held = [(p, n) for p, a, b, _ in batches for n in range(a, b) if n not in lacks for _ in range(1 + (n in twice))]
    days = [TODAY - timedelta(days=40 if n < 10 else 10 if n < 15 else 5) for _, n in held]
    places = [{"partition": p, "offset": n, "timestamp": at(day, 12)} for (p, n), day in zip(held, days, strict=True)]
    records = pa.table([places, days, [None] * len(held)], pa.schema(RECORDS))
    lake.append(log, lake.Batch("main", 0, len(rows)), lake.write_arrow(log, "live/main-0-9-a", records))
    read = {topic.name: {str(p): until for p, until in pin.items()}}
    begun = {topic.name: {str(p): first for p, first in (start or {}).items()}}
    checkpoint = lake.Checkpoint.of(settings, "main")
    checkpoint.path.mkdir(parents=True)
    (checkpoint.path / "tidemark.json").write_text(json.dumps(asdict(lake.Generation(1, 0, begun, {topic.name: "id"}))))
    run = lake.Run("r", "running", [], "test", NOW.isoformat(), "0", {"main": lake.Pin("main", 9, read, NOW.isoformat())})
    work = settle.Settling(settings, model.catalog([type("p", (), {"made": topic})]), run, said.append)
    work.spark, work.outer = spark, {topic.name: log}
    return work, topic, said


@pytest.mark.parametrize(
    ("more", "batches", "lacks", "pin", "sentence"),
    [
        ({}, [TILL_TEN, (0, 12, 20, 0)], set(), {0: 20}, "0: the ledger lacks offsets between 0 and 20"),
        ({}, [TILL_TEN], set(), {0: 20}, "0: the ledger lacks offsets between 0 and 20"),
        ({}, [TILL_TEN, TILL_TWENTY], set(), {0: 20, 1: 5}, "1: the ledger lacks offsets between 0 and 5"),
        ({}, [TILL_TEN, TILL_TWENTY], {12, 13}, {0: 20}, "0: .* has 20: offsets 12 to 13 are not there"),
        ({}, [TILL_TEN, TILL_TWENTY], {19}, {0: 20}, "0: .* has 20: offsets 19 to 19 are not there"),
        ({}, [TILL_TEN, (1, 0, 2, 0)], {*range(10)}, {0: 10, 1: 2}, "0: .* has 10: offsets 0 to 9 are not there"),
        # Of a topic with gaps the ledger explains some offsets, here two of the first batch, and not which.
        (GAPS, [(0, 0, 10, 2), TILL_TWENTY], {3, 4, 15}, {0: 20}, "0: .* has 18: offsets 15 to 15 are not there"),
        (GAPS, [(0, 0, 10, 2), TILL_TWENTY], {3, 4, 5}, {0: 20}, "0: .* has 18: of offsets 0 to 9 it has 7, the ledger 8"),
        # What is kept for 30 days and comes a day late at most is whole from nine days ago on.
        (KEPT, IN_THREE, {*range(10), 17}, {0: 20}, "0: .* has 5: offsets 17 to 17 are not there"),
    ],
)
def test_offset_that_is_missing_is_a_refusal_that_names_topic_partition_and_range(
    settings: Settings,
    spark: SparkSession,
    more: dict[str, Any],
    batches: list[tuple[int, int, int, int]],
    lacks: set[int],
    pin: dict[int, int],
    sentence: str,
) -> None:
    work, topic, _ = settling(settings, spark, batches, lacks, pin, **more)
    with pytest.raises(settle.SettleError, match=f"^topic made, partition {sentence}.*tidemark replay --source kafka"):
        work.complete(topic)


def test_ledger_that_lacks_a_partition_of_which_the_log_holds_records_has_not_let_it_expire(
    settings: Settings, spark: SparkSession
) -> None:
    work, topic, _ = settling(settings, spark, [*IN_THREE, (1, 10, 20, 0)], {*range(10)}, {0: 20, 1: 20}, **KEPT)
    lake.ledger(settings).delta().delete("partition = 1")
    with pytest.raises(settle.SettleError, match=r"^topic made, partition 1: the ledger lacks offsets between 0 and 20"):
        work.complete(topic)


@pytest.mark.parametrize(
    ("more", "first", "lacks", "twice", "hole"),
    [
        ({}, TILL_TEN, {12}, {13}, "offsets 12 to 12 are not there"),
        ({}, TILL_TEN, {3}, {13}, "offsets 3 to 3 are not there"),
        (GAPS, (0, 0, 10, 2), {3, 4, 5}, {6}, "of offsets 0 to 9 it has 7, the ledger 8"),
        ({}, TILL_TEN, set(), {13}, "of offsets 10 to 19 it has 11, the ledger 10"),
    ],
)
def test_record_that_the_log_has_twice_does_not_stand_for_one_that_is_lost(
    settings: Settings,
    spark: SparkSession,
    more: dict[str, Any],
    first: tuple[int, int, int, int],
    lacks: set[int],
    twice: set[int],
    hole: str,
) -> None:
    work, topic, _ = settling(settings, spark, [first, TILL_TWENTY], lacks, {0: 20}, twice=twice, **more)
    with pytest.raises(settle.SettleError, match=f"^topic made, partition 0: .*: {hole}"):
        work.complete(topic)
    days = [TODAY - timedelta(days=n) for n in (40, 10, 5)]
    [checked] = work.offsets([topic], days, [settle.period(settings, *days[::2])])["made"].collect()
    assert checked["accepted"] + checked["rejected"] != checked["offsets"] == 20 - 2 * bool(more)
    assert work.judged(topic, days).repeats == 1


@pytest.mark.parametrize(
    ("lacks", "twice", "wanted", "repeats"),
    [
        (set(), set(), (8, 8), 0),
        ({13}, set(), (7, 8), 0),
        ({17}, {13}, (6, 8), 0),  # that of another day is no repeat of this one, and stands for none of it
        (set(), {18}, (7, 8), 1),
    ],
)
def test_batch_that_reaches_into_another_day_is_counted_whole_and_its_records_once(
    settings: Settings, spark: SparkSession, lacks: set[int], twice: set[int], wanted: tuple[int, int], repeats: int
) -> None:
    work, topic, _ = settling(settings, spark, [(0, 0, 12, 0), (0, 12, 20, 0)], lacks, {0: 20}, twice=twice)
    day = TODAY - timedelta(days=5)  # of which 15 to 19 are
    [found] = work.offsets([topic], [day], [settle.period(settings, day)])["made"].collect()
    assert (found["accepted"] + found["rejected"], found["offsets"]) == wanted
    assert work.judged(topic, [day]).repeats == repeats


@pytest.mark.parametrize("upto", [18, 20], ids=["read up to there", "of which the ledger lacks the last"])
def test_records_beyond_the_batches_that_the_ledger_has_are_not_counted(
    settings: Settings, spark: SparkSession, upto: int
) -> None:
    work, topic, _ = settling(settings, spark, [(0, 0, 12, 0), (0, 12, 18, 0), (0, 18, 20, 0)], set(), {0: 20}, twice={19})
    work.run.pins["main"] = lake.Pin("main", 1, {topic.name: {"0": upto}}, NOW.isoformat())
    day = TODAY - timedelta(days=5)
    [found] = work.offsets([topic], [day], [settle.period(settings, day)])["made"].collect()
    assert (found["accepted"] + found["rejected"], found["offsets"]) == (6, 6)
    assert work.judged(topic, [day]).repeats == (upto == 20)


GONE = "topic made, partition {}: offsets 0 to {} are in no table; Kafka had deleted them before a stream first read the topic"
TOO_LATE = (
    "topic made, partition 0: the log lacks records of which the ledger has 10: offsets 17 to 17 are not there. They may have "
    "come too late for keep=30 days; with accept_late it would be known"
)


@pytest.mark.parametrize(
    ("more", "batches", "lacks", "pin", "said"),
    [
        ({}, [TILL_TEN, TILL_TWENTY], set(), {0: 20}, []),
        (GAPS, [(0, 0, 10, 2), TILL_TWENTY], {3, 4}, {0: 20}, []),
        ({}, [(0, 1_010, 1_020, 0)], set(), {0: 1_020}, [GONE.format(0, "1,009")]),
        ({"start": {1: 7}}, [TILL_TEN], set(), {0: 10, 1: 7}, [GONE.format(1, "6")]),  # and nothing has come since
        (KEPT, IN_THREE, {*range(10), 12}, {0: 20}, []),
        ({"keep": "30 days"}, IN_THREE, {*range(10), 17}, {0: 20}, [TOO_LATE]),
        (KEPT, IN_THREE, {*range(10)}, {0: 20, 1: 7}, []),  # all that partition 1 ever had has expired, of the ledger too
    ],
    ids=["whole", "explained", "begun late", "begun late and silent", "expired", "perhaps expired", "expired and silent"],
)
def test_offset_that_nobody_has_or_that_has_expired_is_said_and_no_refusal(
    settings: Settings,
    spark: SparkSession,
    more: dict[str, Any],
    batches: list[tuple[int, int, int, int]],
    lacks: set[int],
    pin: dict[int, int],
    said: list[str],
) -> None:
    work, topic, told = settling(settings, spark, batches, lacks, pin, **more)
    work.complete(topic)
    assert told == said
    assert work.run.note == "; ".join(said)


LACKS = (
    "topic made, partition 0: of the batches of these days the log lacks {} records. They may have come too late for "
    "keep=10 days; with accept_late it would be known"
)


#   offset      0    10   12   15   20          the days: 0 to 9 forty days ago, 10 to 14 ten, 15 to 19 five
#               [gone           )[   )
@pytest.mark.parametrize(
    ("late", "lacks", "twice", "counted", "said"),
    [
        ({"accept_late": "1 day"}, {*range(10)}, set(), (5, 5), []),
        ({"accept_late": "1 day"}, {*range(10), 17}, set(), (4, 5), []),
        ({"accept_late": "40 days"}, {*range(10), 17}, set(), None, []),
        ({}, {*range(10)}, set(), (8, 8), []),
        ({}, {*range(10), 17}, set(), (7, 7), [LACKS.format(1)]),
        ({}, {*range(10), 17}, {18}, (6, 7), [LACKS.format(1)]),
    ],
    ids=["whole", "lost", "all may be gone", "whole, of any age", "lost or expired", "twice"],
)
def test_batch_that_may_hold_what_has_expired_is_not_held_against_a_night(
    settings: Settings,
    spark: SparkSession,
    late: dict[str, str],
    lacks: set[int],
    twice: set[int],
    counted: tuple[int, int] | None,
    said: list[str],
) -> None:
    batches = [(0, 0, 12, 0), (0, 12, 15, 0), (0, 15, 20, 0)]
    work, topic, told = settling(settings, spark, batches, lacks, {0: 20}, twice=twice, keep="10 days", **late)
    days = [TODAY - timedelta(days=n) for n in (10, 5)]
    found = work.offsets([topic], days, [settle.period(settings, day) for day in days])["made"].collect()
    assert [(r["accepted"] + r["rejected"], r["offsets"]) for r in found] == ([counted] if counted else [])
    assert told == said
    assert work.judged(topic, days).repeats == len(twice)


#   offset      0    10   12   15   20          the days: 0 to 9 forty days ago, 10 to 14 ten, 15 to 19 five
#               [gone           )[   )
@pytest.mark.parametrize(
    ("since", "counted"), [(None, (4, 5)), (7, (4, 5)), (3, None)], ids=["as ever", "before that day", "after that day"]
)
def test_what_came_under_another_accept_late_may_have_been_of_any_age(
    settings: Settings, spark: SparkSession, since: int | None, counted: tuple[int, int] | None
) -> None:
    """Of a log with `keep` it may have expired; else what a person does, who is told to give the topic one, would be refused."""
    batches = [(0, 0, 12, 0), (0, 12, 15, 0), (0, 15, 20, 0)]
    late = {"keep": "10 days", "accept_late": "1 day"}
    work, topic, told = settling(settings, spark, batches, {*range(10), 17}, {0: 20}, **late)
    if since:
        at = (NOW - timedelta(days=since)).isoformat()
        work.outer["made"].tell({lake.LATE: "1 day", lake.LATE_SINCE: at}, lambda: True)
    days = [TODAY - timedelta(days=n) for n in (10, 5)]
    found = work.offsets([topic], days, [settle.period(settings, day) for day in days])["made"].collect()
    assert [(r["accepted"] + r["rejected"], r["offsets"]) for r in found] == ([counted] if counted else [])
    refused = pytest.raises(settle.SettleError, match="offsets 17 to 17 are not there")
    with refused if counted else nullcontext():
        work.complete(topic)
    assert told == []


WITH_NULLS = "id STRING NOT NULL, a STRING, b STRING, sold_at TIMESTAMP NOT NULL"


@pytest.mark.parametrize(
    ("in_kafka", "in_log", "said"),
    [
        ({"a": "x"}, [{"b": "x"}], "has without values of columns that were added later"),
        ({"key": b"x", "value": None}, [{"value": b"x"}], "holds otherwise than Kafka"),
        ({"key": b"x"}, [{"key": b"y"}], "holds otherwise than Kafka"),
        ({}, [{"at": NOW - timedelta(seconds=1)}], "holds otherwise than Kafka"),
        ({"headers": None}, [{"headers": []}], "has without values of columns that were added later"),
        ({"headers": [("h", None)]}, [{"headers": [("h", None)]}], None),
        ({}, [{}, {}], "has more than once"),
        ({"a": "x"}, [{"a": "x"}, {"b": "x"}], "has more than once"),
        ({"reject": "late"}, [{}], "has accepted, and the code of now does not"),
        ({}, [{"reject": "late"}], "has as rejects, and the code of now accepts"),
        ({"reject": "late"}, [{"reject": "old"}], "rejects for another reason"),
    ],
)
def test_log_in_which_a_null_has_changed_places_or_a_record_stands_twice_is_not_what_kafka_holds(
    settings: Settings, spark: SparkSession, in_kafka: dict[str, Any], in_log: list[dict[str, Any]], said: str | None
) -> None:
    topic = Topic("made", None, 1, WITH_NULLS, "sold_at")

    def record(
        a: Any = None, b: Any = None, at: Any = NOW, key: Any = None, value: Any = b"{}", headers: Any = None, reject: Any = None
    ) -> Any:
        place = (0, 0, at, key, value, headers)
        return spark.createDataFrame([("1", a, b, NOW, place, reject, TODAY)], fold.log_schema(topic))

    log, batch = lake.table(settings, topic), lake.Batch("main", 0, 0)
    log.create(fold.schema_of(record()))
    lake.append(log, batch, lake.write_spark(log, batch.folder, fold.union([record(**one) for one in in_log])))
    pins = {"main": lake.Pin("main", 0, {"made": {"0": 1}}, NOW.isoformat())}
    run = lake.Run("r", "running", [], "test", NOW.isoformat(), "0", pins)
    work = settle.Settling(settings, model.catalog([type("p", (), {"made": topic})]), run, print)
    work.spark, work.outer, work.kept = spark, {"made": log}, {"made": record(**in_kafka)}
    if said is None:
        work.same_as_log(topic)
        return
    told = f"differ: 1 records that the log {said}, the first at partition 0, offset 0.* Drop the run .tidemark drop r., then "
    with pytest.raises(settle.SettleError, match=told):
        work.same_as_log(topic)


@pytest.mark.parametrize("days", [40, 0])
def test_what_keep_has_let_go_is_not_missed_where_kafka_still_holds_it(
    settings: Settings, spark: SparkSession, days: int
) -> None:
    """Kafka keeps by when a record came, the log by when its event was; what is kept must be in both all the same."""
    topic = Topic("made", None, 1, WITH_NULLS, "sold_at", keep="30 days")

    def record(offset: int, day: date) -> Any:
        return spark.createDataFrame(
            [("1", "x", "y", NOW, (0, offset, NOW, None, b"{}", None), None, day)], fold.log_schema(topic)
        )

    log, batch = lake.table(settings, topic), lake.Batch("main", 0, 0)
    log.create(fold.schema_of(record(0, TODAY)))
    lake.append(log, batch, lake.write_spark(log, batch.folder, record(0, TODAY)))
    pins = {"main": lake.Pin("main", 0, {"made": {"0": 2}}, NOW.isoformat())}
    run = lake.Run("r", "running", [], "test", NOW.isoformat(), "0", pins)
    work = settle.Settling(settings, model.catalog([type("p", (), {"made": topic})]), run, print)
    work.spark, work.outer = spark, {"made": log}
    work.kept = {"made": record(0, TODAY).unionByName(record(1, TODAY - timedelta(days=days)))}
    if days:
        work.same_as_log(topic)
        return
    with pytest.raises(settle.SettleError, match="differ: 1 records that the log lacks, the first at partition 0, offset 1"):
        work.same_as_log(topic)


@pytest.mark.parametrize("chunk_records", [10, 20, 40])
def test_replay_that_goes_on_with_another_size_of_chunks_reads_kafka_in_the_parts_that_it_began_with(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, chunk_records: int
) -> None:
    topic, done, read = Topic("made", None, 1, WITH_NULLS, "sold_at"), [-1], []
    pins = {"main": lake.Pin("main", 0, {"made": {"0": 80}}, NOW.isoformat())}
    lake.save(settings, lake.Run("r", "running", [], "test", NOW.isoformat(), "0", pins, kind="replay"))
    nothing: Any = SimpleNamespace(drop=lambda *_: SimpleNamespace(select=lambda *_: None))

    def stage(_table: Any, _run: str, _rows: Any, step: int) -> None:
        done[0] = step
        if (len(read), step) == (2, 1):
            raise MemoryError("the heap is full")

    monkeypatch.setattr(kafka, "between", lambda _s, _settings, _topic, places, _group: read.append(places[0]))
    monkeypatch.setattr(fold, "judged", lambda *_: nothing)
    monkeypatch.setattr(lake, "staged_upto", lambda *_: done[0])
    monkeypatch.setattr(lake, "stage", stage)
    for size in (20, chunk_records):
        here = settings.model_copy(update={"chunk_records": size})
        work = settle.Settling(here, model.catalog([type("p", (), {"made": topic})]), lake.run_of(settings, "r"), print)
        work.outer = {"made": SimpleNamespace(delta=lambda: SimpleNamespace(schema=lambda: SimpleNamespace(fields=[])))}
        work.spark, work.give_way, work.refuse_deleted = None, lambda _: None, lambda *_: None
        if size == 20 and len(read) == 0:
            with pytest.raises(MemoryError):
                work.read_again(topic)
        else:
            work.read_again(topic)
    assert read == [(0, 20), (20, 40), (40, 60), (60, 80)]


def test_verdicts_of_a_replay_that_is_judged_again_take_the_place_of_those_before(
    settings: Settings, spark: SparkSession
) -> None:
    work, _, _ = settling(settings, spark, [TILL_TEN], set(), {0: 10})
    lake.save(settings, work.run)
    for count in (1, 2):  # it was cut off while it was compared, and goes on
        said = ("", "critical", "passed", None, None, None, NOW, (TODAY, TODAY))
        work.keep([quality.Verdict("r", "made", f"check {n}", *said) for n in range(count)])
    assert repair.damage(settings, work.catalog) == []
    assert [file.rows for file in lake.verdicts(settings).files()] == [2]


def test_record_that_the_log_lacks_is_a_refusal_that_names_the_range(shops: Shops, spark: SparkSession) -> None:
    log = lake.table(shops.settings, shops.catalog[shops.topic])
    [(partition, offset)] = shops.rows(f"SELECT kafka.partition, kafka.offset FROM {shops.topic} WHERE id = 'twin'")
    spark.sql(f"DELETE FROM delta.`{log.path}` WHERE id = 'twin'")
    with pytest.raises(
        settle.SettleError, match=rf"topic {shops.topic}, partition {partition}: .* offsets {offset} to {offset} are not there"
    ):
        settle.replay(shops.settings, shops.catalog, "a hole", source="log")
    with pytest.raises(settle.SettleError, match=rf"1 records that the log lacks, the first at partition {partition}, offset"):
        settle.replay(shops.settings, shops.catalog, "a hole")
    assert {r.state for r in lake.runs(shops.settings) if r.reason == "a hole"} == {"failed"}


def delete(shops: Shops, upto: Mapping[int, int]) -> None:
    """What retention does, at once."""
    admin = AdminClient({"bootstrap.servers": shops.settings.brokers})
    for future in admin.delete_records([TopicPartition(shops.topic, p, o) for p, o in upto.items()]).values():
        future.result()


def test_retention_that_overtakes_a_replay_is_a_refusal_that_names_the_range(shops: Shops) -> None:
    ends = kafka.offsets(shops.settings, [shops.topic], "latest")[shops.topic]

    def overtake(said: str) -> None:
        if f"{shops.topic}: read 1 of 5 parts" in said:
            delete(shops, ends)

    parts = {p: (end // 5, end * 2 // 5 - 1) for p, end in ends.items()}
    ranges = "|".join(f"partition {p}: Kafka has deleted offsets {first} to {last}" for p, (first, last) in parts.items())
    with pytest.raises(settle.SettleError, match=rf"topic {shops.topic}, ({ranges}) before.*replay --source log") as refused:
        settle.replay(shops.settings, shops.catalog, "overtaken", overtake)
    dead = lake.runs(shops.settings)[-1]
    assert (dead.state, dead.note) == ("failed", str(refused.value))
    assert f"consumer group tidemark-{dead.id}-" in str(refused.value.__cause__)  # a group of its own


@pytest.mark.long
def test_replay_of_a_topic_whose_beginning_kafka_had_deleted_reads_the_log_and_says_why(
    house: Callable[..., Settings], run: Any
) -> None:
    late = Shops(house(), "sales_that_begin_late")
    late.send(*((f"n{n}", at(DAYS[2], 10, n)) for n in range(12)))
    ends = kafka.offsets(late.settings, [late.topic], "latest")[late.topic]
    fuller = max(ends, key=lambda p: ends[p])
    delete(late, {fuller: 2})
    stream = run(late.settings, {"topic": late.topic})
    stream.until(lambda: sum(r["records"] for r in lake.ledger_rows(late.settings, "main")) == sum(ends.values()) - 2)
    stream.drains()
    said: list[str] = []
    found = settle.replay(late.settings, late.catalog, "from what there is", said.append)
    begins = GONE.replace("made", late.topic).format(fuller, 1)
    why = f"{late.topic}: read from the log, because Kafka no longer holds offsets 0 to 1 of partition {fuller}"
    assert [line for line in said if "offsets" in line] == [why, begins]
    assert (found.state, found.note) == ("staged", begins)
    assert found.tables["takings"]["rows"] == 2


def test_replay_of_one_name_is_not_worked_on_twice_at_once(shops: Shops) -> None:
    run = next(r for r in lake.runs(shops.settings) if r.state == "failed")
    with (
        local.Lease(shops.settings.lake_path / "runs" / f".{run.id}.lease"),
        pytest.raises(local.LeaseHeld, match=re.escape(run.id)),
    ):
        settle.resume(shops.settings, shops.catalog, run)
