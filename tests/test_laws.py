"""The law that everything stands on, as properties: however the events are cut, ordered and repeated, one answer.

For every pipeline of the catalog: rows of any batches, in any order, some twice, merge to what one run over everything
gives; every view over them, live, settled and by its shorter way, equals what DuckDB says of the raw events.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidemark import fold
from tidemark.model import Rollup, Topic, View, duration
from tidemark.pipelines import CATALOG

MICRO, MILLI, SECOND, HOUR = timedelta(microseconds=1), timedelta(milliseconds=1), timedelta(seconds=1), timedelta(hours=1)
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
# -------------------------------------------------------------------------------------------------- the raw events, drawn

# Two business days; in Berlin the second has 25 hours. Events crowd around the edges of panes, hours and days.
FIRST_DAY, DAYS = date(2026, 10, 24), 2
SMALL = (timedelta(0), timedelta(0), MICRO, MILLI, 2 * SECOND, 5 * SECOND)
LARGE = (timedelta(0), timedelta(0), HOUR, HOUR - 5 * SECOND, HOUR + 5 * SECOND)


def midnights(zone: str) -> list[datetime]:
    days = [FIRST_DAY + timedelta(days=n) for n in range(DAYS + 1)]
    return [datetime.combine(d, datetime.min.time(), ZoneInfo(zone)).astimezone(UTC) for d in days]


@st.composite
def instants(draw, zone: str) -> datetime:
    anchors = [*midnights(zone), datetime(2026, 10, 25, 1, tzinfo=UTC), datetime(2026, 10, 25, 0, 0, 5, tzinfo=UTC)]
    nudge = draw(st.sampled_from((-1, 1))) * draw(st.sampled_from(SMALL))
    return draw(st.sampled_from(anchors)) + nudge - draw(st.sampled_from(LARGE))


@st.composite
def page_views(draw, zone: str) -> dict:
    return {
        "visitor_id": draw(st.sampled_from(("ann", "bob", "eve", ""))),
        "page": draw(st.sampled_from(("/", "/cart"))),
        "viewed_at": draw(instants(zone)).isoformat().replace("+00:00", "Z"),
    }


EVENTS = {"page_views": page_views}
"""How each topic's events are drawn, without their id; an id is given to each."""


@dataclass(frozen=True)
class World:
    """What was sent, and how it came: `sent` by topic is in Kafka's order, a producer's repeats included; it is cut
    into `batches`; the batches of `twice` are rolled and appended a second time; all may come `backwards`. What is computed
    at once is computed `by_day` or over both days."""

    zone: str
    sent: dict[str, list[dict]]
    batches: int
    twice: set[int]
    backwards: bool
    by_day: bool
    mark: datetime
    marks: int


@st.composite
def worlds(draw) -> World:
    zone = draw(st.sampled_from(("UTC", "Europe/Berlin")))
    sent = {}
    for topic in CATALOG.topics.values():
        drawn = draw(st.lists(EVENTS[topic.name](zone), min_size=30, max_size=80))
        events = [{topic.id: f"e{n}", **event} if topic.id else event for n, event in enumerate(drawn)]
        repeats = draw(st.lists(st.sampled_from(events), min_size=3, max_size=8)) if topic.id else []
        sent[topic.name] = draw(st.permutations([*events, *repeats]))
    return World(
        zone,
        sent,
        batches=draw(st.integers(2, 4)),
        twice=draw(st.sets(st.integers(0, 3), max_size=2)),
        backwards=draw(st.booleans()),
        by_day=draw(st.booleans()),
        mark=draw(instants(zone)),
        marks=draw(st.integers(1, 60)),
    )


# ------------------------------------------------------------------------------------------------ what tidemark answers


def log_of(spark, topic: Topic, events: list[dict]) -> DataFrame:
    """The log of a topic after its events came over three partitions, some long after their time."""
    read = midnights("UTC")[-1] + timedelta(days=1)
    rows = [
        {"value": json.dumps(e).encode(), "partition": n % 3, "offset": n, "timestamp": read + n * MILLI}
        for n, e in enumerate(events)
    ]
    return fold.judged(topic, spark.createDataFrame(pa.Table.from_pylist(rows, RECORDS)))


class Lake:
    """Logs and rollups as one way of running has left them."""

    def __init__(self, logs: dict[str, DataFrame], rollups: dict[str, DataFrame]) -> None:
        self.tables = logs | {name: rows.persist() for name, rows in rollups.items()}

    @classmethod
    def at_once(cls, logs: dict[str, DataFrame]) -> "Lake":
        """One run over everything."""
        return cls(logs, {r.name: rolled(r, logs) for r in CATALOG.rollups.values()})

    @classmethod
    def in_batches(cls, logs: dict[str, DataFrame], world: World) -> "Lake":
        """Batches cut anywhere, each rolled by itself, some twice; their rows in any order."""
        batches = [
            {n: log.where(F.col("kafka.offset") % world.batches == batch) for n, log in logs.items()}
            for batch in range(world.batches)
        ]
        batches += [b for n, b in enumerate(batches) if n in world.twice]
        batches = batches[::-1] if world.backwards else batches
        return cls(logs, {r.name: fold.union([rolled(r, b) for b in batches]) for r in CATALOG.rollups.values()})

    def answers(self, view, way, start: datetime, end: datetime) -> DataFrame:
        spark = next(iter(self.tables.values())).sparkSession
        return fold.answers(spark, view, way, lambda declared, *_: self.tables[declared.name], start, end, settled=True)

    def coarse_answers(self, view, start: datetime, end: datetime) -> DataFrame:
        """By the short way, with what lies before every mark and within its hour merged into one row a page."""
        spark, lookback = next(iter(self.tables.values())).sparkSession, duration(view.lookback)
        last = end - duration(view.shortcut.step)
        span, bounds = fold.period(spark, last - lookback, start), fold.period(spark, start - lookback, end)
        rows = {p: fold.within(self.tables[r.name], r.time, bounds) for p, r in view.shortcut.reads.items()}
        inputs = {p: fold.coarser(r, rows[p], span).drop("day") for p, r in view.shortcut.reads.items()}
        return fold.answer(view, view.shortcut.function, inputs, fold.period(spark, start, end), settled=True)


def rolled(rollup, logs: dict[str, DataFrame]) -> DataFrame:
    return fold.roll(rollup, {p: fold.accepted(t, logs[t.name]) for p, t in rollup.reads.items()})


def reads_rollups(view: View) -> bool:
    return any(isinstance(s, Rollup) or (isinstance(s, View) and reads_rollups(s)) for s in view.reads.values())


def labelled(frames: Iterable[tuple[str, str, DataFrame]]) -> pa.Table:
    """Frames of any columns as one table, computed in one job; `way` and `name` say which is which."""
    marked = [f.select(F.lit(way).alias("way"), F.lit(name).alias("name"), "*") for way, name, f in frames]
    whole = marked[0]
    for frame in marked[1:]:
        whole = whole.unionByName(frame, allowMissingColumns=True)
    return whole.toArrow()


# --------------------------------------------------------------------------------------------------- what DuckDB answers

ANSWERS = {
    "last_hour": """
        SELECT page, mark, count(*) AS pv, count(DISTINCT visitor_id) AS uv
        FROM page_views JOIN marks ON viewed_at >= mark - INTERVAL 1 HOUR AND viewed_at < mark GROUP BY ALL""",
    "site_last_hour": """
        SELECT mark, count(*) AS pv, count(DISTINCT visitor_id) AS uv
        FROM page_views JOIN marks ON viewed_at >= mark - INTERVAL 1 HOUR AND viewed_at < mark GROUP BY ALL""",
    "hourly_traffic": """
        SELECT page, date_trunc('hour', viewed_at) AS hour, count(*) AS pv, count(DISTINCT visitor_id) AS uv
        FROM page_views, period WHERE viewed_at >= start AND viewed_at < stop GROUP BY ALL""",
    "site_hourly_traffic": """
        SELECT date_trunc('hour', viewed_at) AS hour, count(*) AS pv, count(DISTINCT visitor_id) AS uv
        FROM page_views, period WHERE viewed_at >= start AND viewed_at < stop GROUP BY ALL""",
    "daily_traffic": """
        SELECT page, CAST(viewed_at AT TIME ZONE zone AS DATE) AS day, count(*) AS pv, count(DISTINCT visitor_id) AS uv
        FROM page_views, period WHERE viewed_at >= start AND viewed_at < stop GROUP BY ALL""",
    "site_daily_traffic": """
        SELECT CAST(viewed_at AT TIME ZONE zone AS DATE) AS day, count(*) AS pv, count(DISTINCT visitor_id) AS uv
        FROM page_views, period WHERE viewed_at >= start AND viewed_at < stop GROUP BY ALL""",
}
"""Each view over the raw events, each once, of `[start, stop)`; `marks` has the five-second marks of it."""


def oracle(world: World) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    midnight = midnights(world.zone)
    connection.execute(
        "CREATE TABLE period AS SELECT ?::TIMESTAMPTZ AS start, ?::TIMESTAMPTZ AS stop, ? AS zone",
        [midnight[0], midnight[-1], world.zone],
    )
    connection.execute(
        "CREATE TABLE marks AS "
        "SELECT unnest(generate_series(start, stop - INTERVAL 5 SECOND, INTERVAL 5 SECOND)) AS mark FROM period"
    )
    for topic in CATALOG.topics.values():
        sent = world.sent[topic.name]
        once = list({e[topic.id]: e for e in sent}.values()) if topic.id else sent
        connection.register("raw", pa.Table.from_pylist(once))
        casts = [f"CAST({c.name} AS {c.type.replace('TIMESTAMP', 'TIMESTAMPTZ')}) AS {c.name}" for c in topic.columns]
        connection.execute(f"CREATE TABLE {topic.name} AS SELECT {', '.join(casts)} FROM raw")
    return connection


def difference(
    connection: duckdb.DuckDBPyConnection, found: pa.Table, way: str, name: str, period: tuple[datetime, datetime]
) -> list[tuple]:
    """Rows of the period that only one of the two has, `(whose, …)`; none where they agree."""
    view = CATALOG.views[name]
    ours = f"SELECT {columns(name)} FROM found WHERE way = '{way}' AND name = '{name}'"
    theirs = f"SELECT {columns(name)} FROM ({ANSWERS[name]})"
    if way in ("short", "coarse"):
        theirs += f" WHERE {view.time} >= '{period[0]}' AND {view.time} < '{period[1]}'"
    connection.register("found", found)
    return connection.execute(
        f"SELECT 'only tidemark', * FROM ({ours} EXCEPT ALL {theirs}) UNION ALL "
        f"SELECT 'only DuckDB', * FROM ({theirs} EXCEPT ALL {ours}) LIMIT 5"
    ).fetchall()


def columns(name: str) -> str:
    return ", ".join((*CATALOG.views[name].key, "pv", "uv"))


# --------------------------------------------------------------------------------------------------------------- laws


def test_every_topic_has_events_and_every_view_an_independent_answer():
    assert set(EVENTS) == set(CATALOG.topics)
    assert set(ANSWERS) == set(CATALOG.views)


@pytest.fixture(scope="module")
def seen(spark):
    """The session, interpreting: each example is a handful of rows, and compiling its plans takes most of the time."""
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    spark.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    return spark


@given(world=worlds())
@settings(max_examples=10, deadline=None, derandomize=True, database=None)
def test_any_cut_order_and_repetition_gives_by_every_way_the_answer_over_the_raw_events(seen, world):
    spark = seen
    spark.conf.set("spark.tidemark.zone", world.zone)
    midnight = midnights(world.zone)
    whole = (midnight[0], midnight[-1])
    logs = {t.name: log_of(spark, t, world.sent[t.name]).persist() for t in CATALOG.topics.values()}
    live, settled = Lake.in_batches(logs, world), Lake.at_once(logs)

    ways = {}
    for view in CATALOG.views.values():
        periods = list(pairwise(midnight)) if world.by_day else [whole]
        ways["settled", view.name] = whole, [settled.answers(view, view, *p) for p in periods]
        if reads_rollups(view):  # of a log there is but one
            ways["live", view.name] = whole, [live.answers(view, view, *whole)]
        if view.shortcut:
            newest = marks(view, world, whole)
            ways["short", view.name] = newest, [live.answers(view, view.shortcut, *newest)]
            if view.shortcut.coarse:
                ways["coarse", view.name] = newest, [live.coarse_answers(view, *newest)]
    found = labelled((*way, frame) for way, (_, frames) in ways.items() for frame in frames)
    rows = labelled(
        (way, rollup.name, fold.merge(rollup, lake.tables[rollup.name]).select(F.to_json(F.struct("*")).alias("row")))
        for rollup in CATALOG.rollups.values()
        for way, lake in (("live", live), ("settled", settled))
    ).to_pylist()
    spark.catalog.clearCache()

    connection = oracle(world)
    assert {way: only for way, (period, _) in ways.items() if (only := difference(connection, found, *way, period))} == {}
    by_way = {way: sorted((r["name"], r["row"]) for r in rows if r["way"] == way) for way in ("live", "settled")}
    assert by_way["live"] == by_way["settled"]


def marks(view: View, world: World, whole: tuple[datetime, datetime]) -> tuple[datetime, datetime]:
    """A few steps of a view around the drawn instant, at least one, within the period."""
    step = duration(view.shortcut.step)
    start = min(max(whole[0], whole[0] + (world.mark - whole[0]) // step * step), whole[1] - step)
    return start, min(whole[1], start + world.marks * step)
