"""What the tests of every pipeline share: its law, and its checks.

The law: rows of any batches, in any order, some twice, merge to what one run over everything gives; every view, live, settled
and by its shorter way, equals what DuckDB says of the raw events.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pyarrow as pa
from hypothesis import assume
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import fold, kafka, quality
from tidemark.model import EVENT_TIME, Catalog, Rollup, Shortcut, Topic, View, duration

MICRO, MILLI, SECOND = timedelta(microseconds=1), timedelta(milliseconds=1), timedelta(seconds=1)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
RECORDS = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    }
)
DAYS = 2
FIRST_DAY = {"UTC": date(2026, 10, 24), "Europe/Berlin": date(2026, 10, 24), "Europe/Paris": date(2026, 3, 29)}
"""Of two business days in each zone. In Berlin the second has 25 hours. In Paris, whose clocks are Berlin's, the first has 23:
who gives each day 24 takes an hour of the next one for its own."""
CLOCKS_CHANGE = dict.fromkeys(FIRST_DAY, datetime(2026, 10, 25, 1, tzinfo=UTC)) | {
    "Europe/Paris": datetime(2026, 3, 29, 1, tzinfo=UTC)
}
ZONES = ("Europe/Berlin", "Europe/Paris")
"""In which each law is held: one for each change of the clocks."""
SMALL = (timedelta(0), timedelta(0), MICRO, MILLI, 2 * SECOND, 5 * SECOND)
GRAINS = {"hour": HOUR, "minute": MINUTE, "second": SECOND}
TOOK = "taken_at"
"""When Kafka took an event, in a topic whose events have no time of their own."""
ENDED = "ended_at"
"""Of a tombstone of a compacted topic: an event of its key and this instant, and nothing else."""


@dataclass(frozen=True)
class Law:
    """A pipeline by itself: `events` draws one event of each topic for a zone, without its id; `always` are there in every
    world; `answers` say each view in SQL over the raw events, each once, of table `period` (`start`, `stop`, `zone`)."""

    catalog: Catalog
    events: Mapping[str, Callable[[str], st.SearchStrategy[dict]]]
    answers: Mapping[str, str]
    always: Callable[[str], Mapping[str, Sequence[dict]]] = lambda zone: {}


@dataclass(frozen=True)
class World:
    """What was sent, and how it came: `sent` by topic is in Kafka's order, a producer's repeats included; it is cut
    into `batches`; the batches of `twice` are rolled and appended a second time; all may come `backwards`. What is settled
    is computed in `pieces`: at once, day by day, or apart at the instant `cut`."""

    zone: str
    sent: dict[str, list[dict]]
    batches: int
    twice: set[int]
    backwards: bool
    pieces: str
    cut: datetime
    mark: datetime
    marks: int


# -------------------------------------------------------------------------------------------------- the raw events, drawn


def midnights(zone: str) -> list[datetime]:
    days = [FIRST_DAY[zone] + timedelta(days=n) for n in range(DAYS + 1)]
    return [datetime.combine(d, datetime.min.time(), ZoneInfo(zone)).astimezone(UTC) for d in days]


@st.composite
def instants(draw, zone: str, *steps: timedelta) -> datetime:
    """Around the midnights and the hour that Berlin has twice and Paris leaves out: a little beside them, or one of `steps`
    before."""
    anchors = [*midnights(zone), CLOCKS_CHANGE[zone], CLOCKS_CHANGE[zone] - HOUR + 5 * SECOND]
    nudge = draw(st.sampled_from((-1, 1))) * draw(st.sampled_from(SMALL))
    return draw(st.sampled_from(anchors)) + nudge - draw(st.sampled_from((timedelta(0), timedelta(0), *steps)))


def said(at: datetime) -> str:
    """An instant as an event says it."""
    return at.isoformat().replace("+00:00", "Z")


@st.composite
def worlds(draw, law: Law, zone: str) -> World:
    sent = {}
    for topic in law.catalog.topics.values():
        made = draw(st.lists(law.events[topic.name](zone), min_size=30, max_size=80))
        assume(len({*map(str, made)}) > 10)  # the simplest world, which is tried first, is one event thirty times
        drawn = [*made, *law.always(zone).get(topic.name, ())]
        numbered = any(c.name == topic.id and c.type == "BIGINT" for c in topic.columns)
        ids = [{topic.id: n if numbered else f"e{n}"} if topic.id and ENDED not in e else {} for n, e in enumerate(drawn)]
        events = [own | event for own, event in zip(ids, drawn, strict=True)]
        repeats = draw(st.lists(st.sampled_from(events), min_size=3, max_size=8)) if topic.id else []
        sent[topic.name] = draw(st.permutations([*events, *repeats]))
    return World(
        zone,
        sent,
        batches=draw(st.integers(2, 4)),
        twice=draw(st.sets(st.integers(0, 3), max_size=2)),
        backwards=draw(st.booleans()),
        pieces=draw(st.sampled_from(("at once", "by day", "cut"))),
        cut=draw(instants(zone, HOUR, 10 * MINUTE)),
        mark=draw(instants(zone, HOUR, HOUR - 5 * SECOND)),
        marks=draw(st.integers(1, 60)),
    )


# ------------------------------------------------------------------------------------------------ what tidemark answers


def log_of(spark: SparkSession, topic: Topic, events: Sequence[dict]) -> DataFrame:
    """The log of a topic after its events came over three partitions, some long after their time."""
    read = midnights("UTC")[-1] + DAY
    rows = [
        {
            "key": kafka.key_of(topic, event),
            "value": None if ENDED in event else kafka.as_value(topic, event),
            "headers": [{"key": EVENT_TIME, "value": event[ENDED].encode()}] if ENDED in event else None,
            "partition": n % 3,
            "offset": n,
            "timestamp": datetime.fromisoformat(event[TOOK]) if TOOK in event else read + n * MILLI,
        }
        for n, event in enumerate(events)
    ]
    return fold.judged(topic, spark.createDataFrame(pa.Table.from_pylist(rows, RECORDS)))


class Lake:
    """Logs and rollups as one way of running has left them."""

    def __init__(self, logs: dict[str, DataFrame], rollups: dict[str, DataFrame], merged: bool = False) -> None:
        self.merged = merged
        self.tables = logs | {name: rows.persist() for name, rows in rollups.items()}

    @classmethod
    def at_once(cls, catalog: Catalog, logs: dict[str, DataFrame]) -> "Lake":
        """One run over everything, whose rollups have each key once."""
        return cls(logs, {r.name: rolled(r, logs) for r in catalog.rollups.values()}, merged=True)

    @classmethod
    def in_batches(cls, catalog: Catalog, logs: dict[str, DataFrame], world: World) -> "Lake":
        """Batches cut anywhere, each rolled by itself, some twice; their rows in any order."""
        batches = [
            {n: log.where(F.col("kafka.offset") % world.batches == batch) for n, log in logs.items()}
            for batch in range(world.batches)
        ]
        batches += [b for n, b in enumerate(batches) if n in world.twice]
        batches = batches[::-1] if world.backwards else batches
        return cls(logs, {r.name: fold.union([rolled(r, b) for b in batches]) for r in catalog.rollups.values()})

    def read(self, declared: Any, low: datetime | None, high: datetime) -> DataFrame:
        """A log or a rollup whole; a view that another reads is computed for the span."""
        if isinstance(declared, View):
            return self.answers(declared, declared, low, high)
        return self.tables[declared.name]

    def answers(self, view: View, way: View | Shortcut, start: datetime, end: datetime) -> DataFrame:
        spark = next(iter(self.tables.values())).sparkSession
        return fold.answers(spark, view, way, self.read, start, end, settled=True, merged=self.merged)

    def coarse_answers(self, view, start: datetime, end: datetime) -> DataFrame:
        """By the short way, with what lies before every mark and within its lookback merged, one row of each rest of the key, and
        the sets of what comes after apart."""
        spark, lookback = next(iter(self.tables.values())).sparkSession, duration(view.lookback)
        last = end - duration(view.shortcut.step)
        span, bounds = fold.period(spark, last - lookback, start), fold.period(spark, start - lookback, end)
        before = fold.period(spark, start - lookback, start)
        counted = view.shortcut.counted
        inputs = {}
        for parameter, rollup in view.shortcut.reads.items():
            rows = fold.in_parts(rollup, fold.within(self.tables[rollup.name], rollup.time, bounds), counted)
            base, newest = fold.within(rows, rollup.time, before), fold.within(rows, rollup.time, fold.period(spark, start, end))
            base = fold.coarser(rollup, base, span, fold.beyond(view, rollup), counted)
            inputs[parameter] = fold.union([base.select(*newest.columns), newest])
        return fold.answer(view, view.shortcut.function, inputs, fold.period(spark, start, end), settled=True)


def rolled(rollup: Rollup, logs: dict[str, DataFrame]) -> DataFrame:
    return fold.roll(rollup, {p: fold.accepted(t, logs[t.name]) for p, t in rollup.topics.items()})


def reads_rollups(view: View) -> bool:
    return any(isinstance(s, Rollup) or (isinstance(s, View) and reads_rollups(s)) for s in view.reads.values())


def pieces(view: View, world: World) -> list[tuple[datetime, datetime]]:
    """The periods that a view is settled in; a view of days, hours, minutes or seconds is never cut within one."""
    midnight = midnights(world.zone)
    if world.pieces == "by day" or (world.pieces == "cut" and view.time == "day"):
        return list(pairwise(midnight))
    cut = world.cut - (world.cut - datetime.min.replace(tzinfo=UTC)) % GRAINS.get(view.time, MICRO)
    inside = [cut] if world.pieces == "cut" and midnight[0] < cut < midnight[-1] else []
    return list(pairwise([midnight[0], *inside, midnight[-1]]))


def marks(view: View, world: World, whole: tuple[datetime, datetime]) -> tuple[datetime, datetime]:
    """A few steps of a view around the drawn instant, at least one, within the period."""
    step = duration(view.shortcut.step)
    start = min(max(whole[0], whole[0] + (world.mark - whole[0]) // step * step), whole[1] - step)
    return start, min(whole[1], start + world.marks * step)


def labelled(frames: Iterable[tuple[str, str, DataFrame]]) -> pa.Table:
    """Frames of any columns as one table, computed in one job; `_way` and `_name` say which is which."""
    marked = [f.select(F.lit(way).alias("_way"), F.lit(name).alias("_name"), "*") for way, name, f in frames]
    whole = marked[0]
    for frame in marked[1:]:
        whole = whole.unionByName(frame, allowMissingColumns=True)
    return whole.toArrow()


# --------------------------------------------------------------------------------------------------- what DuckDB answers


def oracle(
    catalog: Catalog, sent: Mapping[str, Sequence[dict]], zone: str, start: datetime, stop: datetime
) -> duckdb.DuckDBPyConnection:
    """The raw events, each once, in a table for each topic; and the `period`.

    That of a compacted topic has every change, with `n` (its place in Kafka), `changed` (its event time) and `ended`.
    """
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(
        "CREATE TABLE period AS SELECT ?::TIMESTAMPTZ AS start, ?::TIMESTAMPTZ AS stop, ? AS zone", [start, stop, zone]
    )
    for topic in catalog.topics.values():
        events = sent[topic.name]
        if topic.compacted:
            changed(connection, topic, events)
            continue
        once = list({e[topic.id]: e for e in events}.values()) if topic.id else events
        types = {c.name: c.type.replace("TIMESTAMP", "TIMESTAMPTZ") for c in topic.columns}
        types |= {TOOK: "TIMESTAMPTZ"} if topic.event_time == "kafka.timestamp" else {}
        connection.execute(f"CREATE TABLE {topic.name} ({', '.join(f'{n} {t}' for n, t in types.items())})")
        if once:
            connection.register("raw", pa.Table.from_pylist(list(once)))
            connection.execute(f"INSERT INTO {topic.name} SELECT {', '.join(types)} FROM raw")
    return connection


def changed(connection: duckdb.DuckDBPyConnection, topic: Topic, events: Sequence[dict]) -> None:
    """A compacted topic's table; of a repeat the first that came is the change, and a tombstone has no id."""
    told = [{"n": n, "changed": e.get(ENDED) or e[topic.event_time], "ended": ENDED in e, **e} for n, e in enumerate(events)]
    once = {e.get(topic.id, f"n{e['n']}"): e for e in reversed(told)}.values() if topic.id else told
    types = {c.name: c.type.replace("TIMESTAMP", "TIMESTAMPTZ") for c in topic.columns}
    types |= {"n": "BIGINT", "changed": "TIMESTAMPTZ", "ended": "BOOLEAN"}
    connection.execute(f"CREATE TABLE {topic.name} ({', '.join(f'{n} {t}' for n, t in types.items())})")
    if once:
        connection.register("raw", pa.Table.from_pylist([{n: e.get(n) for n in types} for e in once]))
        connection.execute(f"INSERT INTO {topic.name} SELECT {', '.join(types)} FROM raw")


def difference(
    law: Law, connection: duckdb.DuckDBPyConnection, found: pa.Table, way: str, name: str, period: tuple[datetime, datetime]
) -> list[tuple]:
    """Rows of the period that only one of the two has, `(whose, …)`; none where they agree."""
    view, answer = law.catalog.views[name], law.answers[name]
    columns = ", ".join(f'"{c[0]}"' for c in connection.execute(f"SELECT * FROM ({answer}) LIMIT 0").description)
    ours = f"SELECT {columns} FROM found WHERE _way = '{way}' AND _name = '{name}'"
    theirs = f"SELECT {columns} FROM ({answer})"
    if way in ("short", "coarse"):
        theirs += f" WHERE {view.time} >= '{period[0]}' AND {view.time} < '{period[1]}'"
    connection.register("found", found)
    return connection.execute(
        f"SELECT 'only tidemark', * FROM ({ours} EXCEPT ALL {theirs}) UNION ALL "
        f"SELECT 'only DuckDB', * FROM ({theirs} EXCEPT ALL {ours}) LIMIT 5"
    ).fetchall()


def broken(spark: SparkSession, law: Law, world: World) -> dict[Any, Any]:
    """Where the law does not hold in a world: by way and view the rows that only one side has, and rollups' rows that differ.

    Nothing where it holds.
    """
    spark.conf.set("spark.tidemark.zone", world.zone)
    whole = (midnights(world.zone)[0], midnights(world.zone)[-1])
    catalog = law.catalog
    logs = {t.name: log_of(spark, t, world.sent[t.name]).persist() for t in catalog.topics.values()}
    live, settled = Lake.in_batches(catalog, logs, world), Lake.at_once(catalog, logs)
    ways = {}
    for view in catalog.views.values():
        ways["settled", view.name] = (
            whole,
            [settled.answers(view, view, *p) for p in pieces(view, world)],
        )
        if reads_rollups(view):  # of a log there is but one
            ways["live", view.name] = whole, [live.answers(view, view, *whole)]
        if view.shortcut:
            newest = marks(view, world, whole)
            ways["short", view.name] = newest, [live.answers(view, view.shortcut, *newest)]
            if view.shortcut.coarse:
                ways["coarse", view.name] = newest, [live.coarse_answers(view, *newest)]
    found = labelled((*way, frame) for way, (_, frames) in ways.items() for frame in frames)
    rows = [
        (way, rollup.name, fold.merge(rollup, lake.tables[rollup.name]).select(F.to_json(F.struct("*")).alias("row")))
        for rollup in catalog.rollups.values()
        for way, lake in (("live", live), ("settled", settled))
    ]
    merged = labelled(rows).to_pylist() if rows else []
    spark.catalog.clearCache()
    spark.conf.set("spark.tidemark.zone", "UTC")

    connection = oracle(catalog, world.sent, world.zone, *whole)
    wrong: dict[Any, Any] = {
        way: only for way, (period, _) in ways.items() if (only := difference(law, connection, found, *way, period))
    }
    one, other = (sorted((r["_name"], r["row"]) for r in merged if r["_way"] == way) for way in ("live", "settled"))
    return wrong if one == other else wrong | {"rollups": (one, other)}


def unheld(spark: SparkSession, law: Law) -> dict[str, set[str]]:
    """What of a pipeline its law leaves out: topics without events, views without an answer, columns that no answer has."""
    lacks = {
        "topics": set(law.catalog.topics) ^ set(law.events),
        "views": set(law.catalog.views) ^ set(law.answers),
    }
    midnight = midnights("UTC")
    connection = oracle(law.catalog, {t: [] for t in law.catalog.topics}, "UTC", midnight[0], midnight[-1])
    schemas = {declared.name: schema for declared, schema in fold.schemas(spark, law.catalog)}
    for view in law.catalog.views.values():
        ours = {*view.key, *(c for c in schemas[view.name].names if c not in ("day", "settled"))}
        theirs = {c[0] for c in connection.execute(f"SELECT * FROM ({law.answers[view.name]}) LIMIT 0").description}
        lacks[view.name] = ours ^ theirs
    return {what: names for what, names in lacks.items() if names}


# --------------------------------------------------------------------------------------------------------------- checks


def record(topic: Topic, offset: int, day: date, *own: Any, reject: str | None = None) -> tuple:
    """A row of a topic's log: its columns in their order, then Kafka's."""
    noon = datetime.combine(day, datetime.min.time(), UTC) + 12 * HOUR
    values = (None,) * len(topic.columns) if reject else own
    return (*values, (0, offset, noon, None, bytearray(b"{}"), None), reject, day)


def verdicts(
    spark: SparkSession, catalog: Catalog, day: date, tables: Mapping[str, Sequence[tuple]], offsets: Mapping[str, int]
) -> dict[tuple[str, str], str]:
    """What each check says, by table and check, of one day's tables given as rows in the order of their columns.

    `offsets` are how many the ledger has of each topic.
    """
    start = datetime.combine(day, datetime.min.time(), UTC)
    schemas = {declared.name: schema for declared, schema in fold.schemas(spark, catalog)}
    frames = {name: spark.createDataFrame(list(rows), schemas[name]) for name, rows in tables.items()}
    beside = {"period": fold.period(spark, start, start + DAY).withColumn("zone", F.lit("UTC"))}
    for topic, count in offsets.items():
        rejects = F.count_if(F.col("reject").isNotNull())
        counted = frames[topic].agg((F.count("*") - rejects).alias("accepted"), rejects.alias("rejected"))
        beside[f"{topic}_offsets"] = counted.select(
            F.lit(0).alias("partition"), F.lit(count).alias("offsets"), "accepted", "rejected"
        )
    judged = {name: quality.Judged(catalog[name], frame, start, start + DAY) for name, frame in frames.items()}
    return {(v.table, v.check): v.outcome for v in quality.judge("run", judged, beside=beside)}


def declared_checks(catalog: Catalog) -> list[tuple[str, str]]:
    return [(d.name, c.name) for d in (*catalog.topics.values(), *catalog.derived) for c in d.checks]
