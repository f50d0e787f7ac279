"""What a run would change for readers: by table and day, the rows changed, missing and extra, with samples, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructType

from tidemark import fold, functions, lake, query
from tidemark.model import Catalog, Declared, Live, Rollup, Topic, View, duration, looking_at, midnight, needed, remembered

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemark.settings import Settings

SAMPLES = 3
"""Rows shown of each table, day and kind of difference."""
FEW = 50_000
"""So many rows of a table that differ are kept in memory while they are counted and shown; more are computed again."""
COUNTS = ("rows", "missing", "extra", "changed", "late", "unexplained")
DAY, HOUR, MOMENT = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
TO_THE_MICROSECOND = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
WHOLE = {"ignoreNullFields": "false", "timestampFormat": f"{TO_THE_MICROSECOND}XXX", "timestampNTZFormat": TO_THE_MICROSECOND}
"""JSON that says all of a value: its nulls, and its instants to the microsecond."""

Pins = Mapping[str, lake.Pin]
Span = tuple[datetime, datetime]
Looking = Callable[[datetime, datetime], dict[str, Span]]


@dataclass(frozen=True)
class Difference:
    """One day of one table. `missing` rows are the run's alone, `extra` ones the published table's alone.

    `samples` are `{"what": changed | missing | extra, "run": {…} or None, "published": {…} or None}`; a set is shown as
    how many values it holds. Of the rows that differ `late` ones may differ because of an event that came late (the law is
    `spans_of_late`), `unexplained` ones for no reason that is known; the two are all of them. None where nobody asks: of a
    rollup, of a view that is not live, of a replay.
    """

    table: str
    day: date
    rows: int
    changed: int
    missing: int
    extra: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    late: int | None = None
    unexplained: int | None = None

    @property
    def same(self) -> bool:
        return not (self.changed or self.missing or self.extra)


def compare(spark: SparkSession, settings: Settings, catalog: Catalog, run: lake.Run, names: Iterable[str]) -> list[Difference]:
    """Each named rollup and view of a run, day by day, staged beside published; days that are the same say so by 0.

    Promises that one row, one cent or one key is found; of a view also a row that is there twice. Of a rollup, what is
    published is merged and taken up to the run's pin; two sets are the same when they hold the same values. A published row's
    `settled` is not compared.
    """
    found, arrivals = [], Arrivals(spark, settings)
    for name in names:
        declared = catalog[name]
        assert isinstance(declared, Rollup | View)
        found += table(spark, settings, catalog, declared, run, arrivals)
    return found


class Arrivals:
    """When the events of some days came, for as long as one comparison takes: views of one topic ask the same.

    `lived` is, of each stream, until when it is known to have run; one that is not there runs.
    """

    def __init__(self, spark: SparkSession, settings: Settings, lived: Mapping[str, datetime] | None = None) -> None:
        self.spark, self.settings, self.lived = spark, settings, lived or {}
        self.known: dict[tuple[Any, ...], list[Span]] = {}

    def due(self, stream: str, live: Live) -> datetime:
        """Until when what a stream has read is sure to be in its live views: two refreshes before now, or before its end."""
        now = datetime.now(UTC)
        return min(now, self.lived.get(stream, now)) - 2 * duration(live.every)

    def come(self, stream: str, due: datetime) -> datetime | None:
        """The stream time that a stream had come to by an instant; None before its first batch."""
        with query.connect(self.settings, Catalog({}, {}, {}), ["ledger"]) as db:
            asked = "SELECT max(stream_time) FROM ledger WHERE stream = $stream AND finished_at <= $due"
            ((found,),) = db.execute(asked, {"stream": stream, "due": due}).fetchall()
        return found

    def once(self, asked: tuple[Any, ...], make: Callable[[], DataFrame]) -> list[Span]:
        """The spans that `make` gives, `first` and `last`, computed once."""
        if asked not in self.known:
            self.known[asked] = [(r["first"], r["last"]) for r in make().toArrow().to_pylist()]
        return self.known[asked]

    def files(self, topic: Topic, days: Collection[date], earlier: bool) -> list[lake.File]:
        """Those of a topic's log on some days; with `earlier` those of every day before too."""
        there = lake.table(self.settings, topic).files()
        return [f for f in there if f.day in days or (earlier and f.day and f.day <= max(days))]

    def of(self, topic: Topic, days: Collection[date], files: Sequence[lake.File], stream: str) -> DataFrame:
        """The accepted events of a topic in some of its files: `at` (event time) and `batch` (`stream`, `seq` and two times).

        Of them, what came before the first of `days` has no batch. Where another stream than `stream` reads the topic, a batch's
        stream time is the later of what the two had come to by then.
        """
        # An event is minutes ahead of its batch at most: no batch of these days began a day before the first of them.
        since = datetime.combine(min(days), datetime.min.time(), UTC) - DAY
        entered = lake.read(self.spark, lake.ledger(self.settings), low=since)
        if stream != lake.reader(self.settings, topic):
            come = F.max("stream_time").over(Window.orderBy("finished_at"))
            of_both = (F.col("stream") == stream) | (F.col("topic") == topic.name)
            entered = entered.where(of_both).withColumn("stream_time", come)
        at, places = F.col("at"), F.sequence(bucket(F.col("from_offset")), bucket(F.col("until_offset") - 1))
        batches = entered.where((F.col("topic") == topic.name) & (F.col("until_offset") > F.col("from_offset"))).select(
            "partition",
            F.explode(places).alias("bucket"),
            "from_offset",
            "until_offset",
            F.struct("stream", "seq", "stream_time", "finished_at").alias("batch"),
        )
        log = lake.read(self.spark, lake.table(self.settings, topic), files=files).where(F.col("reject").isNull())
        offset = F.col("offset")
        events = log.select("kafka.partition", "kafka.offset", fold.event_time(topic).alias("at"))
        # By ranges alone every event would be held against every batch; in order, after its batch, a million are to be sorted.
        within = (offset >= F.col("from_offset")) & (offset < F.col("until_offset"))
        timed = events.where(at.isNotNull()).withColumn("bucket", bucket(offset)).alias("e")
        same = (F.col("e.partition") == F.col("b.partition")) & (F.col("e.bucket") == F.col("b.bucket"))
        return timed.join(F.broadcast(batches.alias("b")), same & within, "left").select(at, "batch")

    def late(self, files: Sequence[lake.File], back: timedelta, due: datetime, recent: datetime | None) -> set[str]:
        """Files of one topic, by their paths, that may hold an event which came when stream time was past it by more than `back`,
        or after `due`, or which is younger than `recent`. Most hold none: a file says when its events were, and the ledger when
        its batches came. One of whose batches the ledger has none may be of another stream there."""
        import pyarrow as pa

        told = [f for f in files if f.live and isinstance(f.low, datetime) and isinstance(f.high, datetime)]
        found = {f.path for f in files} - {f.path for f in told}
        if recent:
            found |= {f.path for f in told if lake.comparable(f.high, recent) >= lake.millisecond(recent)}
        spans = [
            {"path": f.path, "stream": f.live["stream"], "lo": int(f.live["lo"]), "hi": int(f.live["hi"]), "low": f.low}
            for f in told
            if f.live and f.path not in found
        ]
        if not spans:
            return found
        asked = f"""
            SELECT path FROM files LEFT JOIN ledger ON ledger.stream = files.stream AND seq BETWEEN lo AND hi
            WHERE seq IS NULL OR stream_time > low + INTERVAL {int(back.total_seconds())} SECONDS OR finished_at > $due
            GROUP BY path"""
        with query.connect(self.settings, Catalog({}, {}, {}), ["ledger"]) as db:
            db.register("files", pa.Table.from_pylist(spans))
            return found | {path for (path,) in db.execute(asked, {"due": due}).fetchall()}


def bucket(offset: Column) -> Column:
    """Which thousand of offsets, side by side, this one lies in."""
    return F.shiftright(offset, 10)


def table(
    spark: SparkSession, settings: Settings, catalog: Catalog, declared: Rollup | View, run: lake.Run, arrivals: Arrivals
) -> list[Difference]:
    days = run.days_of(declared)
    if not days:
        return []
    counts, before = fingerprints(spark, settings, declared, run, days)
    other = [d for d in days if counts.get(d) != before.get(d)]
    rows = {d: counts[d][0] if d in counts else 0 for d in days}
    live = declared.refresh if isinstance(declared, View) and run.kind == "settle" else None
    none = 0 if live else None
    found = {d: Difference(declared.name, d, rows[d], 0, 0, 0, late=none, unexplained=none) for d in days}
    if not other:
        return list(found.values())
    ours, theirs = (shown(declared, side) for side in sides(spark, settings, declared, run, days))
    for pins, group in origins(settings, declared, run, other) if live else [(None, other)]:
        late = spans_of_late(arrivals, catalog, declared, live, run, group, pins) if live else None
        found |= {one.day: one for one in apart(declared, ours, theirs, group, rows, late)}
    return [found[d] for d in days]


def sides(
    spark: SparkSession, settings: Settings, declared: Rollup | View, run: lake.Run, days: Sequence[date]
) -> tuple[DataFrame, DataFrame]:
    """What the run has staged and what readers have, of the given days."""
    outer = lake.table(settings, declared)
    ours = lake.read(spark, lake.staged_table(outer, run.id))
    if isinstance(declared, View):
        return ours, lake.read(spark, outer, days=days)
    files = [f for f in outer.files() if f.day in set(days) and not lake.beyond(run.pins, f, "lo")]
    published = lake.read(spark, outer, files=files)
    first, second = (fold.with_day(fold.merge(declared, rows), declared.time) for rows in (ours, published))
    return first, second


def origins(
    settings: Settings, declared: Rollup | View, run: lake.Run, days: Sequence[date]
) -> list[tuple[Pins | None, list[date]]]:
    """Days by the run that has published what readers have of them, with its pins; None where what they have is live."""
    others = [r for r in lake.runs(settings) if r.id != run.id and r.tables.get(declared.name, {}).get("published")]
    newest = {d: r for r in sorted(others, key=lambda r: r.tables[declared.name]["published"]) for d in r.days_of(declared)}
    found: dict[str, tuple[Pins | None, list[date]]] = {}
    for d in days:
        origin = newest.get(d)
        found.setdefault(origin.id if origin else "", (origin.pins if origin else None, []))[1].append(d)
    return list(found.values())


def rows_looking(settings: Settings, catalog: Catalog, source: Declared) -> Looking:
    """What gives by table from when to when the times of the rows lie that may look at a topic's events or a view's rows from one
    time to another: the margins on the way add up, over whole business days where a table is read whose time is a DATE."""
    reached, tz = [catalog[name] for name in looking_at(catalog, source)], settings.tz
    dates = {d.name for d in reached if has_dates(settings, d)}

    def looking(low: datetime, high: datetime) -> dict[str, Span]:
        found = {source.name: (low, high)}
        for one in reached:
            assert isinstance(one, Rollup | View)
            read = [found[s.name] for s in one.reads.values() if s.name in found]
            first, last = min(span[0] for span in read), max(span[1] for span in read)
            if isinstance(one, View):
                first, last = first - duration(one.lookahead), last + duration(one.lookback)
            if one.name in dates:
                first = midnight(first.astimezone(tz).date(), tz)
                last = midnight(last.astimezone(tz).date() + DAY, tz) - MOMENT
            found[one.name] = first, last
        del found[source.name]
        return found

    return looking


def has_dates(settings: Settings, declared: Declared) -> bool:
    """Whether the time of a rollup or view is a business day and no instant; of a table that is not there yet, by its name."""
    assert isinstance(declared, Rollup | View)
    if declared.time == "day":
        return True
    with suppress(lake.LakeError):
        fields = lake.table(settings, declared).delta().schema().fields
        return any(f.name == declared.time and lake.kind(f) == "date" for f in fields)
    return False


def days_that_look(tz: ZoneInfo, low: datetime, span: Span) -> tuple[date, date]:
    """The first and the last business day of rows that look at events from `low` on, by the span of their times: where a zone is
    half an hour off, a day's last hour is of events of the next one too."""
    return min(span[0], fold.floor(low, HOUR)).astimezone(tz).date(), span[1].astimezone(tz).date()


def days_looked_at(tz: ZoneInfo, looking: Looking, name: str, days: Iterable[date]) -> set[date]:
    """The business days of events that rows of a table, of some days, may look at."""
    found = set[date]()

    def looks(day: date) -> tuple[date, date]:
        start = midnight(day, tz)
        return days_that_look(tz, start, looking(start, midnight(day + DAY, tz) - MOMENT)[name])

    for d in days:
        before, after = d, d + DAY
        while looks(before)[1] >= d:
            found.add(before)
            before -= DAY
        while looks(after)[0] <= d:
            found.add(after)
            after += DAY
    return found


def spans_of_late(
    arrivals: Arrivals,
    catalog: Catalog,
    declared: Rollup | View,
    live: Live,
    run: lake.Run,
    days: Sequence[date],
    pins: Pins | None,
) -> DataFrame:
    """The spans of a view's time, `start` and `end` (exclusive), in which late events explain that rows of some days differ.

    The law: a row that differs is explained if in what it looks at, `[time - lookback, time + its own length + lookahead]`,
    lies an accepted event that one of the two sides need not have. Where it reads views, their margins are added to its own,
    and of views of days it looks at whole ones.
    What is live (`pins` is None) need not have an event that came when stream time, that of its own batch or of the stream that
    refreshes the view, was past it by more than `back`, nor one that came within the last two `every` that the stream ran, nor,
    where marks are computed again once they are `back` old, one that stream time is not past by twice that. Nor need it have a
    row whose time stream time had not come to: of a table on a quiet day, or one that looks back, after the last event.
    What a run has published need not have one beyond that run's `pins`, and this run need not have one beyond its own.
    An event's batch is the ledger's by topic, partition and offset. A DATE is as long as its business day, an instant an hour.
    A row that reads a table, or joins with a topic's changes, looks at every change before it.
    It does not say that the event is why: a fault in a row beside late events is taken for late.
    """
    import pyarrow as pa

    assert isinstance(declared, View)
    length = timedelta(0) if declared.time == "day" else HOUR - MOMENT
    for_ever, coarse = remembered(declared), bool(declared.shortcut and declared.shortcut.coarse)
    spans = list[dict[str, datetime]]()
    before = pins and tuple(sorted((name, pin.seq) for name, pin in pins.items()))
    topics = [catalog.topics[n] for n in sorted(needed(catalog, [declared.name])) if n in catalog.topics]
    stream = lake.reader(arrivals.settings, topics[0])
    for topic in topics:
        earlier, looking = topic.name in for_ever, rows_looking(arrivals.settings, catalog, topic)
        around = days_looked_at(arrivals.settings.tz, looking, declared.name, days)
        asked = topic.name, tuple(sorted(around)), earlier, stream, live.back, live.every, coarse, before
        late = partial(hours_of_late, arrivals, topic, around, earlier, stream, live, coarse, pins, run.pins)
        for hour in arrivals.once(asked, late):  # page and site, hour and day look at the same
            first, last = looking(*hour)[declared.name]
            spans.append({"start": first - length, "end": NEVER if earlier else last + MOMENT})
    if pins is None and (come := arrivals.come(stream, arrivals.due(stream, live))):
        tz = arrivals.settings.tz
        beyond = midnight(come.astimezone(tz).date() + DAY, tz) if has_dates(arrivals.settings, declared) else come + MOMENT
        spans.append({"start": beyond, "end": NEVER})
    at = pa.timestamp("us", "UTC")
    return arrivals.spark.createDataFrame(pa.Table.from_pylist(spans, pa.schema({"start": at, "end": at})))


def hours_of_late(
    arrivals: Arrivals,
    topic: Topic,
    days: Collection[date],
    earlier: bool,
    stream: str,
    live: Live,
    coarse: bool,
    pins: Pins | None,
    own: Pins,
) -> DataFrame:
    """Of each hour of a topic the `first` and the `last` event that one side need not have, as `spans_of_late` says."""
    at, batch = F.col("at"), F.col("batch")
    lacking = ~read_by(own, "batch.stream", "batch.seq")
    files = arrivals.files(topic, days, earlier)
    unsure = {f.path for f in files if not f.live or lake.beyond(own, f, "hi")}
    if pins is None:
        back, due = duration(live.back), arrivals.due(stream, live)
        lacking |= (batch["stream_time"] > at + F.lit(back)) | (batch["finished_at"] > F.lit(due))
        times = [r["stream_time"] for r in lake.newest_batch(arrivals.settings, stream) if r["stream_time"]]
        recent = max(times) - 2 * back if coarse and times else None
        if recent:
            lacking |= at > F.lit(recent)
        one_stream = stream == lake.reader(arrivals.settings, topic)
        unsure |= arrivals.late(files, back, due, recent) if one_stream else {f.path for f in files}
    elif lake.upto(pins, topic.name):
        lacking |= ~read_by(pins, "batch.stream", "batch.seq")
        unsure |= {f.path for f in files if lake.beyond(pins, f, "hi")}
    came = arrivals.of(topic, days, [f for f in files if f.path in unsure], stream).where(lacking)
    return came.groupBy(F.date_trunc("hour", at)).agg(F.min(at).alias("first"), F.max(at).alias("last"))


def read_by(pins: Pins, stream: str, seq: str) -> Column:
    """Whether a batch, by the columns of its stream and its number, is one that these pins have read."""
    read = F.lit(False)
    for name, pin in pins.items():
        read = read | ((F.col(stream) == name) & (F.col(seq) <= pin.seq))
    return read


def shown(declared: Rollup | View, rows: DataFrame) -> DataFrame:
    """A table's rows as they are compared and shown: `day`, the key, the rest by name; no `settled`."""
    rest = sorted(c for c in rows.columns if c not in (*declared.key, "day", "settled"))
    return rows.select(*dict.fromkeys(("day", *declared.key, *rest)))


Prints = dict[date, tuple[int, ...]]
"""By day how many rows a table has, and two sums of their hashes: days that differ have different ones."""


def fingerprints(
    spark: SparkSession, settings: Settings, declared: Rollup | View, run: lake.Run, days: Sequence[date]
) -> tuple[Prints, Prints]:
    """Of what the run has staged and of what readers have.

    DuckDB reads both sides of a view, and where they are the same, as on most nights, that is all there is to do: 50,000 rows
    take 0.1 CPU-seconds and a few 0.05, where Spark takes 1 and 0.25. A rollup is merged first, by Spark, which also reads what
    DuckDB does not, such as deletion vectors.
    """
    if isinstance(declared, View):
        with suppress(query.QueryError):
            return by_duckdb(settings, declared, run, days)
    ours, theirs = (hashed(shown(declared, side)) for side in sides(spark, settings, declared, run, days))
    both: tuple[Prints, Prints] = ({}, {})
    for r in ours.withColumn("side", F.lit(0)).union(theirs.withColumn("side", F.lit(1))).toArrow().to_pylist():
        both[r["side"]][r["day"]] = (r["rows"], r["sum1"], r["sum2"])
    return both


def hashed(rows: DataFrame) -> DataFrame:
    nested = {f.name: isinstance(f.dataType, ArrayType | StructType) for f in rows.schema.fields}
    values = [value for name in rows.columns for value in hashable(F.col(name), nested[name])]
    # Two hashes of 64 bits, summed without overflow: an accident would need 2^64 tries.
    sums = [F.sum(F.xxhash64(F.lit(seed), *values).cast("decimal(20,0)")).alias(f"sum{seed}") for seed in (1, 2)]
    return rows.groupBy("day").agg(F.count("*").alias("rows"), *sums)


def hashable(column: Column, nested: bool = False) -> list[Column]:
    """A column as it is hashed: whether it is null, then its value, of an array or a struct as JSON.

    Spark's hashes pass over what is null, and of what is nested take the leaves alone: `(1, null)` and `(null, 1)` have one hash,
    and so have `[[1], [2]]` and `[[1, 2], []]`.
    """
    return [column.isNull(), F.to_json(column, WHOLE) if nested else column]


def by_duckdb(settings: Settings, declared: View, run: lake.Run, days: Sequence[date]) -> tuple[Prints, Prints]:
    """`fingerprints` of a view. Raises `QueryError` for a table that DuckDB does not read."""
    import duckdb
    from deltalake.schema import PrimitiveType

    outer = lake.table(settings, declared)
    fields = sorted((f for f in outer.delta().schema().fields if f.name != "settled"), key=lambda f: f.name)
    # To `hash` an empty array is a null, and of two arrays side by side it does not matter where one ends.
    columns = ", ".join(f'"{f.name}"' if isinstance(f.type, PrimitiveType) else f'to_json("{f.name}")' for f in fields)
    sums = ", ".join(f"sum(hash({seed}, {columns})::HUGEINT)::VARCHAR" for seed in (1, 2))
    wanted = ", ".join(f"DATE '{d}'" for d in days)
    both: tuple[Prints, Prints] = ({}, {})
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        for found, table in zip(both, (lake.staged_table(outer, run.id), outer), strict=True):
            rows, _ = query.snapshot(declared.name, table.path)
            asked = f"SELECT day, count(*), {sums} FROM ({rows}) WHERE day IN ({wanted}) GROUP BY day"
            try:
                answer = db.execute(asked).fetchall()
            except duckdb.Error as error:
                raise query.QueryError(f"{declared.name} cannot be read: {error}") from None
            found |= {day: (count, int(one), int(two)) for day, count, one, two in answer}
    return both


def apart(
    declared: Rollup | View,
    ours: DataFrame,
    theirs: DataFrame,
    days: Sequence[date],
    rows: dict[date, int],
    late: DataFrame | None = None,
) -> list[Difference]:
    """The days that differ, row by row; `late` are spans of time, of which the rows are counted apart from the others."""
    sets = [c for c, m in declared.merge.items() if m == "distinct"] if isinstance(declared, Rollup) else []
    key = list(dict.fromkeys(("day", *declared.key)))
    rest = [c for c in ours.columns if c not in key]
    wanted = F.col("day").isin(list(days))
    place = key if isinstance(declared, Rollup) else [*key, "_copy"]

    def side(rows: DataFrame, name: str) -> DataFrame:
        # Of a view, whose rows nothing merges, a key may stand there twice: its rows are matched one by one, in order.
        copy = F.row_number().over(Window.partitionBy(*key).orderBy(*(rest or key)))
        return rows.where(wanted).withColumn("_copy", copy).select(*place, F.struct(F.lit(1), *rest).alias(name))

    left, right = side(ours, "_ours"), side(theirs, "_theirs")
    # Null keys match each other here: a null in a key is a difference to show, not a row to lose.
    held = [left[k].eqNullSafe(right[k]) for k in place]
    both = left.join(right, on=held, how="full").select(
        *(F.coalesce(left[k], right[k]).alias(k) for k in key), "_ours", "_theirs"
    )
    unlike = F.lit(False)
    for column in rest:
        a, b = F.col(f"_ours.{column}"), F.col(f"_theirs.{column}")
        unlike = unlike | (~same_set(a, b) if column in sets else ~a.eqNullSafe(b))
    what = (
        F.when(F.col("_theirs").isNull(), "missing").when(F.col("_ours").isNull(), "extra").when(unlike, "changed").alias("_what")
    )
    differing = both.select("*", what).where(F.col("_what").isNotNull())
    few = sum(rows[d] for d in days) <= FEW
    differing = differing.persist() if few else differing
    found: dict[date, dict[str, int]] = {}
    for r in differing.groupBy("day", "_what").count().toArrow().to_pylist():
        found.setdefault(r["day"], {})[r["_what"]] = r["count"]
    if late is not None:
        within = fold.within(differing, declared.time, late).groupBy("day").count().toArrow().to_pylist()
        explained = {r["day"]: r["count"] for r in within}
        for d, counts in found.items():
            counts |= {"late": explained.get(d, 0), "unexplained": sum(counts.values()) - explained.get(d, 0)}

    def row_of(side: str) -> Column:
        columns = [F.col(k) for k in key if k != "day"]
        values = [(functions.how_many(F.col(f"{side}.{c}")) if c in sets else F.col(f"{side}.{c}")).alias(c) for c in rest]
        return F.when(F.col(side).isNotNull(), F.to_json(F.struct(*columns, *values), WHOLE))

    nth = F.row_number().over(Window.partitionBy("day", "_what").orderBy(*declared.key))
    picked = differing.select("*", nth.alias("_n")).where(F.col("_n") <= SAMPLES)
    samples: dict[date, list[dict[str, Any]]] = {}
    for r in picked.select("day", "_what", row_of("_ours").alias("run"), row_of("_theirs").alias("published")).collect():
        said = {"what": r["_what"], **{side: json.loads(r[side]) if r[side] else None for side in ("run", "published")}}
        samples.setdefault(r["day"], []).append(said)
    if few:
        differing.unpersist()
    return [
        Difference(declared.name, d, rows[d], **{"changed": 0, "missing": 0, "extra": 0, **counts}, samples=samples[d])
        for d, counts in sorted(found.items())
    ]


def same_set(a: Column, b: Column) -> Column:
    """Whether two sketches hold the same values: as many as their union has, both."""
    n, m = functions.how_many(a), functions.how_many(b)
    both = F.theta_union(a, b, functions.LG_NOMINAL)
    return (
        F.when(a.isNull() | b.isNull(), a.isNull() & b.isNull())
        .when(a == b, True)
        .otherwise((n == m) & (functions.how_many(both) == n))
    )


# ------------------------------------------------------------------------------------------------------------ in words


def keep(settings: Settings, run: lake.Run, differences: Sequence[Difference]) -> None:
    """Beside the run's record: `runs/<run>/compare.json` and `compare.md`."""
    folder = settings.lake_path / "runs" / run.id
    folder.mkdir(parents=True, exist_ok=True)
    lake.whole_or_nothing(folder / "compare.json", as_json(run, differences), kept=True)
    lake.whole_or_nothing(folder / "compare.md", as_markdown(run, differences), kept=True)


def kept(settings: Settings, run: lake.Run) -> list[Difference] | None:
    """What the run found when it was staged; None where it compared nothing. Raises `LakeError` where that is damaged."""
    path = settings.lake_path / "runs" / run.id / "compare.json"
    return differences_of(lake.told(path)) if path.exists() else None


def totals(differences: Iterable[Difference]) -> dict[str, dict[str, int]]:
    """`{table: {rows, missing, extra, changed}}` over all days; and `late` and `unexplained`, where they are counted."""
    found: dict[str, dict[str, int]] = {}
    for one in differences:
        sums = found.setdefault(one.table, {})
        for name in COUNTS:
            if (count := getattr(one, name)) is not None:
                sums[name] = sums.get(name, 0) + count
    return found


def as_json(run: lake.Run, differences: Iterable[Difference]) -> str:
    said = [{**vars(one), "day": str(one.day)} for one in differences]
    return json.dumps({"run": run.id, "days": len(run.days), "differences": said}, indent=1, default=str)


def differences_of(said: Mapping[str, Any]) -> list[Difference]:
    return [Difference(**{**one, "day": date.fromisoformat(one["day"])}) for one in said["differences"]]


def as_markdown(run: lake.Run, differences: Sequence[Difference]) -> str:
    """A table of days that differ, the sum of those that do not, and samples: what an approval shows."""
    other = [one for one in differences if not one.same]
    sums = totals(differences)
    same = [name for name in sums if not any(one.table == name for one in other)]
    lines = [
        f"# What run {run.id} {'would have changed, which is dropped' if run.state == 'dropped' else 'would change'}",
        "",
        f"{cell(run.reason)}. {stretch_in_words(run.days)}, pinned at {pins(run)}.",
        "",
    ]
    if other:
        asked = any(d.late is not None for d in other)
        counts = ["rows", "changed", "missing", "extra", *(["late", "unexplained"] if asked else [])]
        lines += [f"| table | day | {' | '.join(counts)} |", f"|---|---|{'---:|' * len(counts)}"]
        for d in other:
            numbers = ("" if (count := getattr(d, name)) is None else f"{count:,}" for name in counts)
            lines.append(f"| {d.table} | {d.day} | {' | '.join(numbers)} |")
        lines += ["", "*Missing* rows are the run's alone, *extra* ones the published table's alone.", ""]
        lines += ["*Late* ones are explained by events that came late, *unexplained* ones by nothing.", ""] if asked else []
    if same:
        counts = [f"{name} ({sums[name]['rows']:,} rows)" for name in same]
        lines += [f"The same on every day: {', '.join(counts)}.", ""]
    for one in other:
        lines += [f"## {one.table}, {one.day}", "", *sample_table(one.samples), ""]
    return "\n".join(lines)


def sample_table(samples: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(c for s in samples for side in ("run", "published") for c in s[side] or {}))
    lines = [f"| what | side | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for sample in samples:
        for side in ("published", "run"):
            if sample[side] is not None:
                lines.append(f"| {sample['what']} | {side} | {' | '.join(cell(sample[side].get(c)) for c in columns)} |")
    return lines


def cell(value: Any) -> str:
    """A value as a cell of a Markdown table: it can neither end the cell nor become markup."""
    text = "" if value is None else str(value)
    escaped = "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|~" else {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(c, c) for c in text)
    return " ".join(escaped.split())


def pins(run: lake.Run) -> str:
    return ", ".join(f"{p.stream} batch {p.seq}" for p in run.pins.values())


def stretch_in_words(days: Sequence[str]) -> str:
    """`2026-11-01 to 2026-11-19 (19 days)`."""
    if not days:
        return "no day"
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]} ({len(days)} days)"


def stretches(days: Iterable[date]) -> list[tuple[date, date]]:
    """Days as runs of days that follow each other: first and last of each."""
    found: list[tuple[date, date]] = []
    for day in sorted(set(days)):
        if found and found[-1][1] + timedelta(days=1) == day:
            found[-1] = (found[-1][0], day)
        else:
            found.append((day, day))
    return found
