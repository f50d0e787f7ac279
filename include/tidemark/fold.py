"""Records → events → rows → answers: what the live side and settling share, so that they cannot drift."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo

import pyspark
from pyspark.sql import functions as F

from tidemark import functions
from tidemark.model import (
    EVENT_TIME,
    OLDEST,
    Catalog,
    Changes,
    Column,
    DeclarationError,
    Declared,
    Rollup,
    Shortcut,
    Source,
    Topic,
    View,
    duration,
    filled,
    fingerprint,
    is_table,
    midnight,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column as Expression
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

AHEAD = "5 minutes"
HOUR = timedelta(hours=1)
ISO = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)$"
MILLIS_OF_YEAR_10000 = 253_402_300_800_000
# What Spark calls year 0 or year 10000 no other reader of the lake can hold.
FIRST, LAST = "0001-01-01", "9999-12-31"
ZONED = " (ISO 8601 with a zone)"
HEADERS = "array<struct<key:string,value:binary>>"
COMMENTS = {
    "day": "the business day",
    "kafka": "where the record comes from: partition, offset, Kafka's own timestamp, key, value and headers as bytes",
    "reject": "why the record was not accepted; null when it was",
    "settled": "true once computed from the whole log and checked, false while live",
}


# ---------------------------------------------------------------------------------------------------- records → events


def judged(topic: Topic, records: DataFrame) -> DataFrame:
    """Kafka records (Spark's columns: key, value, partition, offset, timestamp, headers) as rows of the topic's log.

    Columns: the topic's own (null where rejected), `kafka`, `reject` (null where accepted), `event_time`, `day`.
    One row for each record, always: a record that cannot be read has its bytes and the reason. A tombstone of a compacted
    topic is accepted: it has Kafka's key as its key, and null everywhere else. JSON types are compared, nothing is bent.
    Time is judged beside Kafka's own timestamp, never the clock, so that a replay judges the same.
    """
    for step in steps(replace(topic, checks=()), functions.zone()):
        records = records.select(*step)
    return records


Step = tuple["Expression | str", ...]


@lru_cache(maxsize=1000)
def steps(topic: Topic, zone: str) -> tuple[Step, ...]:
    """What is selected, one step after the other, to judge a topic's records in a zone. Made once: of ten topics the making of
    these expressions was more than half of a small batch's time."""
    if topic.format == "text":
        return steps_of_lines(topic)
    size, text = F.coalesce(F.length("value"), F.lit(0)), F.col("value").cast("string")
    # The value is parsed as [value, hash of it]: the parser alone would accept `{"a":1} garbage`.
    wrapped = F.concat(F.lit("["), text, F.lit(","), F.xxhash64("value").cast("string"), F.lit("]"))
    readable = (size > 0) & (size <= topic.largest_event) & F.expr("is_valid_utf8(cast(value AS string))")
    parsed = (
        as_kafka(),
        size.alias("_size"),
        F.xxhash64("value").alias("_hash"),
        F.when(readable, F.try_parse_json(wrapped)).alias("_json"),
    )
    whole = F.expr("try_variant_get(_json, '$[1]', 'bigint') = _hash AND variant_get(_json, '$[2]') IS NULL")
    # Of JSON the first character tells. The type of a whole object names every field's: a tenth of what judging takes.
    is_object = F.expr(r"startswith(trim(LEADING ' \t\n\r' FROM cast(kafka.value AS string)), '{')")
    broken = (
        F.when(F.col("kafka.value").isNull(), F.lit(None) if topic.compacted else "no value")
        .when(F.col("_size") == 0, "empty value")
        .when(F.col("_size") > topic.largest_event, f"larger than {topic.largest_event} bytes")
        .when(~F.expr("is_valid_utf8(cast(kafka.value AS string))"), "not UTF-8")
        .when(F.col("_json").isNull() | ~F.coalesce(whole, F.lit(False)), "not JSON")
        .when(~is_object, "not a JSON object")
        .alias("_broken")
    )
    members = [F.expr(f"variant_get(_json, '$[0].{c.name}')").alias(f"_v_{c.name}") for c in topic.columns]
    kinds = [F.coalesce(F.expr(f"schema_of_variant(_v_{c.name})"), F.lit("MISSING")).alias(f"_t_{c.name}") for c in topic.columns]
    typed = [read_as(c).alias(c.name) for c in topic.columns]
    problems = [F.col("_broken"), *(problem(c) for c in topic.columns)]
    made: list[Step] = [parsed, ("*", broken), ("kafka", "_broken", *members), ("*", *kinds), ("*", *typed)]
    if topic.compacted:
        key, problems = keyed(topic, problems)
        given = [
            *(f"_{of}_{c.name}" for of in "vt" for c in topic.columns),
            *(c.name for c in topic.columns if c.name != topic.key),
        ]
        made.append(("kafka", "_broken", *given, key))
    return (*made, *timed(topic, problems))


def keyed(topic: Topic, problems: list[Expression]) -> tuple[Expression, list[Expression]]:
    """A compacted topic's records: a tombstone gets Kafka's key, any other must have it, for Kafka compacts by that one."""
    column = next(c for c in topic.columns if c.name == topic.key)
    text = F.col("kafka.key").cast("string")
    key = F.when(F.expr("is_valid_utf8(cast(kafka.key AS string))"), text.try_cast(column.type))
    other = ~text.eqNullSafe(F.col(column.name).cast("string"))
    said = F.filter("kafka.headers", lambda h: h["key"] == EVENT_TIME)
    return F.when(tombstone(), key).otherwise(F.col(column.name)).alias(column.name), [
        F.when(tombstone() & (key.isNull() | other), f"{column.name}: wanted {column.type} as Kafka's key of a tombstone"),
        F.when(tombstone() & (F.size(said) > 0) & told_time().isNull(), f"header {EVENT_TIME}: wanted TIMESTAMP{ZONED}"),
        *(F.when(~tombstone(), p) for p in problems),
        F.when(other, f"{column.name}: Kafka's key is another one"),
    ]


def tombstone() -> Expression:
    """Whether a record of a compacted topic has no value."""
    return F.col("kafka.value").isNull()


def ended() -> Expression:
    """Whether a row of a log is an accepted tombstone."""
    return F.col("reject").isNull() & tombstone()


def told_time() -> Expression:
    """The instant that a record's header `event_time` tells, null where there is none or it is not ISO 8601 with a zone."""
    told = F.get(F.filter("kafka.headers", lambda h: h["key"] == EVENT_TIME), F.lit(0))["value"]
    text = F.when(F.is_valid_utf8(told.cast("string")), told.cast("string"))
    return instant_of(F.when(text.rlike(ISO), text))


def steps_of_lines(topic: Topic) -> tuple[Step, ...]:
    """Records of a topic of plain text: each value is a line, an empty one too."""
    (column,) = topic.columns
    text, size = F.col("value").cast("string"), F.length("value")
    broken = (
        F.when(F.col("value").isNull(), "no value")
        .when(size > topic.largest_event, f"larger than {topic.largest_event} bytes")
        .when(~F.expr("is_valid_utf8(cast(value AS string))"), "not UTF-8")
    )
    return ((as_kafka(), broken.alias("_broken"), text.alias(column.name)), *timed(topic, [F.col("_broken")]))


def as_kafka() -> Expression:
    """Where a record comes from, as the log keeps it: Spark's columns as one struct. A timestamp beyond the calendar, which Kafka
    takes from a producer that gives it, is the calendar's end, and the record a reject."""
    first, last = ends()
    return F.struct(
        F.col("partition").cast("int").alias("partition"),
        F.col("offset").cast("bigint").alias("offset"),
        F.least(F.greatest(F.col("timestamp").cast("timestamp"), first), last).alias("timestamp"),
        "key",
        "value",
        F.col("headers").cast(HEADERS).alias("headers"),
    ).alias("kafka")


def timed(topic: Topic, problems: list[Expression]) -> tuple[Step, ...]:
    """Typed rows with what is wrong with them, judged by their time too, as rows of the log."""
    at, seen, (first, last) = F.col("_event_time"), F.col("kafka.timestamp"), ends()
    problems = [
        *problems,
        F.when((seen <= first) | (seen >= last), "Kafka's timestamp is beyond the calendar"),
        F.when(at.isNull(), f"no event time by {topic.event_time}"),
        F.when(at < F.lit(f"{OLDEST} 00:00:00Z").cast("timestamp"), "event time is before the year 2000"),
        F.when(at > seen + interval(AHEAD), f"event time is more than {AHEAD} after Kafka's timestamp"),
    ]
    if topic.accept_late:
        late = f"event time is more than {topic.accept_late} before Kafka's timestamp"
        problems.append(F.when(at < seen - interval(topic.accept_late), late))
    accepted = F.col("reject").isNull()
    told: Step = (
        *(F.when(accepted, F.col(c.name)).alias(c.name) for c in topic.columns),
        "kafka",
        "reject",
        F.when(accepted, at).alias("event_time"),
        functions.day(F.when(accepted, at).otherwise(seen)).alias("day"),
    )
    return ("*", event_time(topic).alias("_event_time")), ("*", F.coalesce(*problems).alias("reject")), told


def read_as(column: Column) -> Expression:
    """A column's value where JSON's type is the declared one, else null; never a cast that bends."""
    value, kind = f"_v_{column.name}", F.col(f"_t_{column.name}")
    get = lambda to: F.expr(f"try_variant_get({value}, '$', '{to}')")  # noqa: E731
    number, whole = kind.startswith("DECIMAL") | (kind == "BIGINT"), kind == "BIGINT"
    text, bare = kind == "STRING", column.type.split("(")[0]
    if bare == "STRING":
        return F.when(text, get("string"))
    if bare == "BOOLEAN":
        return F.when(kind == "BOOLEAN", get("boolean"))
    if bare in ("INT", "BIGINT"):
        return F.when(whole, get(bare.lower()))
    if bare == "DOUBLE":
        double = get("double")
        return F.when((number | (kind == "DOUBLE")) & (F.abs(double) < float("inf")), double)
    if bare == "DECIMAL":
        scale = int(column.type.rstrip(")").split(",")[1]) if "," in column.type else 0
        return F.when(number & get("string").rlike(rf"^-?\d+(\.\d{{0,{scale}}})?$"), get(column.type.lower()))
    if bare == "DATE":
        date = F.expr(f"try_cast(try_variant_get({value}, '$', 'string') AS date)")
        return F.when(text & get("string").rlike(r"^\d{4}-\d\d-\d\d$") & (date >= F.lit(FIRST).cast("date")), date)
    millis = get("bigint")  # of the least BIGINT there is no `abs`: it raises
    near = (millis > -MILLIS_OF_YEAR_10000) & (millis < MILLIS_OF_YEAR_10000)
    epoch = F.when(near, F.timestamp_millis(millis))
    instant = F.when(whole, epoch).when(text & get("string").rlike(ISO), instant_of(get("string")))
    first, last = (F.lit(f"{d}Z").cast("timestamp") for d in (f"{FIRST} 00:00:00", f"{LAST} 23:59:59.999999"))
    return F.when(instant.between(first, last), instant)


def ends() -> tuple[Expression, Expression]:
    """The least and the greatest timestamp of a record: a day within the calendar, so that each day has one before and after."""
    return F.lit("0001-01-02 00:00:00Z").cast("timestamp"), F.lit("9999-12-30 00:00:00Z").cast("timestamp")


def instant_of(text: Expression) -> Expression:
    """The instant that a text in ISO 8601 tells, with seconds or without."""
    return F.try_to_timestamp(F.regexp_replace(text, r"^(.{16})(Z|[+-])", "$1:00$2"))


def problem(column: Column) -> Expression:
    """Why a column's value is not what was declared, as a sentence; null where it is."""
    kind, value = F.col(f"_t_{column.name}"), F.col(column.name)
    name = F.regexp_extract(kind, r"^\w+", 0)
    hint = " (ISO 8601 with a zone, or epoch milliseconds)" if column.type == "TIMESTAMP" else ""
    wrong = F.when(
        value.isNull() & ~kind.isin("MISSING", "VOID"),
        F.concat(F.lit(f"{column.name}: wanted {column.type}{hint}, found "), name),
    )
    if column.nullable:
        return wrong
    return F.when(kind == "MISSING", f"{column.name}: missing").when(kind == "VOID", f"{column.name}: null").otherwise(wrong)


def interval(text: str) -> Expression:
    return F.expr(f"INTERVAL {int(duration(text).total_seconds())} SECONDS")


def log_schema(topic: Topic) -> str:
    """The log's columns as DDL, `day` last. Every topic column is nullable there: a reject has none of them."""
    own = [f"{c.name} {c.type}" for c in topic.columns]
    kafka = f"kafka STRUCT<partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY, headers {HEADERS}>"
    return ", ".join([*own, kafka, "reject STRING", "day DATE"])


def accepted(topic: Topic, log: DataFrame) -> DataFrame:
    """What a rollup reads: the accepted records of a log (or of `judged` rows), typed columns and `kafka`.

    Of a compacted topic these are its changes, which have `event_time` and `tombstone` (BOOLEAN) beside.
    """
    told = [event_time(topic).alias("event_time"), tombstone().alias("tombstone")] if topic.compacted else []
    return log.where(F.col("reject").isNull()).select(*(c.name for c in topic.columns), *told, "kafka")


def together(frames: Mapping[str, DataFrame], places: dict[str, Expression]) -> dict[str, pa.Table]:
    """The rows of several frames of any columns, by their names, computed in one job: a job costs more than few rows do.

    `places` is the caller's, kept between calls: the column of each frame there has been, as it is for all others. So every
    choice of frames is the same code to Spark, which else generates, compiles and runs cold what it has for another choice.
    """
    if not frames:
        return {}
    import pyarrow as pa
    from pyspark.sql.types import ArrayType

    places |= {n: F.lit(None).cast(ArrayType(f.schema, False)).alias(n) for n, f in frames.items() if n not in places}
    if len(places) < 2:
        return {name: frame.toArrow() for name, frame in frames.items()}
    # A list of one and not the row alone: a row that is null may not have columns which are not.
    apart = [f.select(*(places | {name: F.array(F.struct("*")).alias(name)}).values()) for name, f in frames.items()]
    whole = reduce(lambda one, other: one.union(other), apart).toArrow()
    found = {}
    for name in frames:
        rows = whole[name].combine_chunks().flatten()
        found[name] = pa.Table.from_arrays(rows.flatten(), names=[field.name for field in rows.type])
    return found


def spans(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """`{topic: {partition: [from, until]}}` over ledger rows."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        span = found.setdefault(row["topic"], {}).setdefault(str(row["partition"]), [row["from_offset"], row["until_offset"]])
        span[0], span[1] = min(span[0], row["from_offset"]), max(span[1], row["until_offset"])
    return found


def within_offsets(log_rows: DataFrame, offsets: Mapping[str, Sequence[int]] | Mapping[int, Sequence[int]]) -> DataFrame:
    """The records of a log that lie in `{partition: [from, until]}`."""
    spans = {int(partition): span for partition, span in offsets.items()}
    # Looked up: a comparison for each partition takes three times as long, for a record's place is deep in it.
    ends = [spans.get(p, (0, 0)) for p in range(max(spans, default=0) + 1)]
    begin, end = (F.get(F.array(*(F.lit(int(span[n])) for span in ends)), F.col("kafka.partition")) for n in (0, 1))
    return log_rows.where((F.col("kafka.offset") >= begin) & (F.col("kafka.offset") < end))


def event_time(topic: Topic) -> Expression:
    """When an event happened; a DATE is the beginning of that business day."""
    told = F.expr(topic.event_time)
    at = told.try_cast("timestamp")
    own = F.when(F.typeof(told) == "date", functions.midnight(at)).otherwise(at)
    return own if not topic.compacted else F.when(tombstone(), F.coalesce(told_time(), "kafka.timestamp")).otherwise(own)


def once(topic: Topic, events: DataFrame) -> DataFrame:
    """Accepted records distinct by the topic's `id` in each business day: the lowest Kafka timestamp, partition, offset wins.

    A repeat has its event's time. Where a faulty client gives one id two, or the time is Kafka's own, a day's answer still is of
    its own log, whatever else is looked at and however many days are computed at once; so are its checks. For that `events` must
    be whole days.
    """
    if topic.id is None:
        return events
    names = [c for c in events.columns if c != "kafka"]
    order = F.struct("kafka.timestamp", "kafka.partition", "kafka.offset")
    rest = F.struct(*(n for n in names if n != topic.id))
    first = events.groupBy(topic.id, functions.day(event_time(topic))).agg(F.min_by(rest, order).alias("_first"))
    return first.select(*(topic.id if n == topic.id else F.col(f"_first.{n}").alias(n) for n in names))


def changes(topic: Topic, log: DataFrame, period: DataFrame) -> DataFrame:
    """A compacted topic as a stream: every accepted record before the end of a period, from the first on.

    Columns: the topic's own (of a tombstone all but the key are null), `event_time`, `tombstone`, and `kafka` with partition,
    offset and timestamp. Distinct by the topic's `id`, as any topic is; tombstones have none, and each counts.
    """
    place = F.struct(*(F.col(f"kafka.{n}").alias(n) for n in ("partition", "offset", "timestamp")))
    rows = accepted(topic, log).withColumn("kafka", place)
    end = period.select(F.col("end").alias("_end"))
    rows = rows.join(F.broadcast(end), on=F.col("event_time") < F.col("_end"), how="leftsemi")
    if topic.id is None:
        return rows
    order = F.struct("kafka.timestamp", "kafka.partition", "kafka.offset")
    apart = F.when(F.col("tombstone"), order).alias("_tombstone")
    rest = [n for n in rows.columns if n != topic.id]
    first = rows.groupBy(topic.id, apart).agg(F.min_by(F.struct(*rest), order).alias("_first"))
    return first.select(*(topic.id if n == topic.id else F.col(f"_first.{n}").alias(n) for n in rows.columns))


def table(topic: Topic, log: DataFrame, period: DataFrame) -> DataFrame:
    """A compacted topic as a table at the end of a period: the last row of each key, without the keys whose last record is a
    tombstone.

    The last is the one that Kafka's compaction keeps, the greatest offset of its partition; of a key that has moved to
    another partition the one that Kafka took last. A repeat counts as Kafka has it, for a tombstone, which has no `id`, does too.
    """
    assert topic.key
    changed = changes(replace(topic, id=None), log, period)
    row = F.struct(*(c for c in changed.columns if c != topic.key))
    of_partition = changed.groupBy(topic.key, "kafka.partition").agg(F.max_by(row, "kafka.offset").alias("_row"))
    order = F.struct("_row.kafka.timestamp", "_row.kafka.partition")
    last = of_partition.groupBy(topic.key).agg(F.max_by("_row", order).alias("_row")).where(~F.col("_row.tombstone"))
    return last.select(*(c.name if c.name == topic.key else F.col(f"_row.{c.name}").alias(c.name) for c in topic.columns))


# ------------------------------------------------------------------------------------------------------ events → rows


def roll(rollup: Rollup, events: Mapping[str, DataFrame]) -> DataFrame:
    """Run a rollup over accepted records by parameter name: its key, its merged columns, and `day` of its time."""
    frame = given(f"rollup {rollup.name}", rollup.function, events)
    return with_day(shaped(f"rollup {rollup.name}", frame, (*rollup.key, *rollup.merge)), rollup.time)


def merge(rollup: Rollup, rows: DataFrame, many: bool = False, counted: Sequence[str] = ()) -> DataFrame:
    """Rows of any batches, in any order, some twice, as one row for each key: the law that everything stands on.

    `many`, of the call or of the rollup, says that hundreds of rows share a key: sets are then united by one aggregate instead
    of one after the other. Sets that are `counted` are counts already, of rows that stand there once each, and are added up.
    """
    sets = {c for c, m in rollup.merge.items() if m == "distinct" and c not in counted}
    sums = {c: F.sum(c) for c in counted if c in rollup.merge}
    if many or rollup.many:
        return gathered(rollup, rows, sums | {c: functions.union(c) for c in sets})
    arrays = gathered(rollup, rows, sums | {c: functions.sets_of(c) for c in sets})
    united = {c: functions.union_of(c).alias(c) for c in sets}
    return arrays.select(*(united.get(c, F.col(c)) for c in arrays.columns))


def gathered(rollup: Rollup, rows: DataFrame, sets: Mapping[str, Expression]) -> DataFrame:
    """One row for each key: its sets by the aggregates given, all else by its own way to merge."""
    latest = sorted(c for c, m in rollup.merge.items() if m.startswith("latest"))
    by = next((m[len("latest(by=") : -1] for m in rollup.merge.values() if m.startswith("latest")), None)
    whole = F.max(F.struct(*([by] if by else []), *(c for c in latest if c != by))).alias("_latest")
    plain = [getattr(F, m)(c).alias(c) for c, m in rollup.merge.items() if m in ("min", "max")]
    grouped = rows.groupBy(*rollup.key).agg(*plain, *(f.alias(c) for c, f in sets.items()), *([whole] if latest else []))
    columns = {c: F.col(f"_latest.{c}").alias(c) for c in latest}
    return grouped.select(*rollup.key, *(columns.get(c, F.col(c)) for c in rollup.merge))


def in_parts(rollup: Rollup, rows: DataFrame, counted: Sequence[str] = ()) -> DataFrame:
    """Rows of any batches, in any order, some twice, for whoever unites their sets anyway: one row for each of a key's sets.

    Sets that are `counted` become how many values they hold together, all of them in one row of the key and 0 in the others; what
    merges otherwise is the same in each.
    """
    arrays = gathered(rollup, rows, {c: functions.sets_of(c) for c, m in rollup.merge.items() if m == "distinct"})
    counts = {c: functions.how_many_of(c) for c in counted if c in rollup.merge}
    sets = [c for c, m in rollup.merge.items() if m == "distinct" and c not in counts]
    numbered = arrays.withColumns(counts) if counts else arrays
    if not sets:
        return numbered
    apart = F.posexplode_outer(F.arrays_zip(*sets)).alias("_n", "_set")
    parts = numbered.select(*(c for c in numbered.columns if c not in sets), apart)
    columns = {c: F.col(f"_set.{c}").alias(c) for c in sets}
    columns |= {c: F.when(F.coalesce("_n", F.lit(0)) == 0, F.col(c)).otherwise(0).alias(c) for c in counts}
    return parts.select(*(columns.get(c, F.col(c)) for c in arrays.columns))


def as_counts(rows: DataFrame, counted: Sequence[str]) -> DataFrame:
    """Merged rows with the named sets as how many values they hold."""
    return rows.withColumns({c: functions.how_many(c) for c in counted if c in rows.columns}) if counted else rows


def coarser(
    rollup: Rollup, rows: DataFrame, span: DataFrame, without: Sequence[str] = (), counted: Sequence[str] = ()
) -> DataFrame:
    """A rollup's merged rows, those of a span (one row: `start`, `end`) as one for each rest of the key, at its start.

    `without` names columns of the key that rows are merged over too, null afterwards; `counted` are counts, and added up.
    """
    for column in without:
        rows = rows.withColumn(column, F.lit(None).cast(rows.schema[column].dataType))
    start, end = F.col("_span.start"), F.col("_span.end")
    there = rows.crossJoin(F.broadcast(span.select(F.struct("start", "end").alias("_span"))))
    moved = F.when((F.col(rollup.time) >= start) & (F.col(rollup.time) < end), start).otherwise(F.col(rollup.time))
    return merge(rollup, there.withColumn(rollup.time, moved), many=True, counted=counted)


# ---------------------------------------------------------------------------------------------------- rows → answers


def answer(
    view: View, function: Callable[..., DataFrame], inputs: Mapping[str, DataFrame], period: DataFrame, settled: bool
) -> DataFrame:
    """A view's rows whose time falls in `period` (a one-row frame: timestamps `start`, `end`, exclusive), `settled`, `day`."""
    wants_period = {"period": period.select("start", "end")} if "period" in inspect.signature(function).parameters else {}
    frame = given(f"view {view.name}", function, {**inputs, **wants_period})
    own = frame.columns
    if missing := [c for c in view.key if c not in own]:
        raise DeclarationError(f"view {view.name}: its function gives no column {', '.join(missing)}; it gives {', '.join(own)}")
    if taken := [c for c in ("day", "settled") if c in own and c != view.time]:
        raise DeclarationError(f"view {view.name}: column {taken[0]} is a name that the platform uses; choose another")
    kept = within(frame, view.time, period)
    return with_day(kept.select(*own, F.lit(settled).alias("settled")), view.time)


def within(frame: DataFrame, time: str, period: DataFrame) -> DataFrame:
    """Rows whose `time` (TIMESTAMP, or DATE meaning that business day) falls in the period.

    A join and not a literal: a literal that changes every batch makes Spark generate and compile new code every batch.
    """
    bounds = period.select(F.col("start").alias("_start"), F.col("end").alias("_end"))
    if dict(frame.dtypes)[time] == "date":
        before_end = functions.day(F.col("_end") - F.expr("INTERVAL 1 MICROSECOND"))
        held = (F.col(time) >= functions.day("_start")) & (F.col(time) <= before_end)
    else:
        held = (F.col(time) >= F.col("_start")) & (F.col(time) < F.col("_end"))
    return frame.join(F.broadcast(bounds), on=held, how="leftsemi")


def with_day(frame: DataFrame, time: str) -> DataFrame:
    if time == "day":
        return frame
    date = F.col(time) if dict(frame.dtypes)[time] == "date" else functions.day(time)
    return frame.withColumn("day", date)


NO_COLUMN = {
    "UNRESOLVED_COLUMN": ("objectName", "proposal"),
    "UNRESOLVED_USING_COLUMN_FOR_JOIN": ("colName", "suggestion"),
    "ATTRIBUTE_NOT_SUPPORTED": ("attr_name", ""),
}
"""Spark's errors of a column that is not there: what it calls the name, and those that are."""


def given(owner: str, function: Callable[..., DataFrame], handed: Mapping[str, DataFrame]) -> DataFrame:
    """What a pipeline's function returns. Raises `DeclarationError` with its place for a column that is not there, a mistake of
    Python, or where it returns no DataFrame; what else the function raises is raised as it is."""
    from pyspark.errors import AnalysisException, PySparkException
    from pyspark.sql import DataFrame

    code = getattr(function, "function", function).__code__  # of a view that is handed itself, and of its live way
    place = f"{code.co_filename}:{code.co_firstlineno}"
    try:
        frame = function(**handed)
    except (AnalysisException, ImportError, NameError, AttributeError, TypeError) as error:
        kind = (error.getCondition() or "").split(".")[0] if isinstance(error, PySparkException) else ""
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, PySparkException) and kind in NO_COLUMN:
            name, told = ((error.getMessageParameters() or {}).get(word, "").replace("`", "") for word in NO_COLUMN[kind])
            there = told.split(", ") if told else sorted({c for f in handed.values() for c in f.columns})
            why = f"there is no column {name}; the nearest are {', '.join(difflib.get_close_matches(name, there, 5, 0))}"
        elif isinstance(error, AnalysisException):
            raise
        raise DeclarationError(f"{owner}: {written(error, code.co_filename) or place}: {why}") from error
    if not isinstance(frame, DataFrame):
        found = "None" if frame is None else f"a {type(frame).__name__}"
        raise DeclarationError(f"{owner}: {place}: its function returns {found} and no DataFrame; end it with: return …")
    return frame


def written(error: Exception, also: str = "") -> str | None:
    """The file and line of a pipeline, or of the file `also`, in which Python found it; None where it found it elsewhere."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    folder = Path(__file__).with_name("pipelines")
    mine = [at for at in places if at[0] == also or (Path(at[0]).parent == folder and Path(at[0]).name != "__init__.py")]
    return f"{mine[-1][0]}:{mine[-1][1]}" if mine else None


def shaped(owner: str, frame: DataFrame, names: tuple[str, ...]) -> DataFrame:
    """Exactly the declared columns. Raises `DeclarationError` naming what the function gives and does not give."""
    missing = [n for n in names if n not in frame.columns]
    extra = [n for n in frame.columns if n not in names]
    if missing or extra:
        lacks = f"it lacks {', '.join(missing)}" if missing else ""
        adds = f"it adds {', '.join(extra)}" if extra else ""
        said = "; ".join(filter(None, (lacks, adds)))
        raise DeclarationError(f"{owner}: its function gives other columns than its key and merge name: {said}")
    return frame.select(*names)


def beyond(view: View, rollup: Rollup) -> tuple[str, ...]:
    """The columns of a rollup's key, but for its time, that a view's key has not."""
    return tuple(c for c in rollup.key if c != rollup.time and c not in view.key)


def union(frames: list[DataFrame]) -> DataFrame:
    return reduce(lambda a, b: a.unionByName(b), frames)


def schema_of(frame: DataFrame) -> StructType:
    """A frame's schema with every column nullable, `day` last: what its table is created with."""
    from pyspark.sql.types import StructField, StructType

    fields = sorted(frame.schema.fields, key=lambda f: f.name == "day")
    return StructType([StructField(f.name, f.dataType, True, f.metadata) for f in fields])


def elsewhere(topic: Topic, log: DataFrame) -> int:
    """How many accepted records of a log are by the topic's event time of another day than the one in which they stand."""
    return log.where(F.col("reject").isNull() & ~functions.day(event_time(topic)).eqNullSafe(F.col("day"))).count()


def nameless(topic: Topic, log: DataFrame) -> int:
    """How many accepted records of a log have no id, by what the topic has for one; those of a tombstone have none."""
    if topic.id is None:
        return 0
    spared = ended() if topic.compacted else F.lit(False)
    return log.where(F.col("reject").isNull() & ~spared & F.col(topic.id).isNull()).count()


def tombstones(_: Topic, log: DataFrame) -> int:
    """How many accepted tombstones a log of a compacted topic has."""
    return log.where(ended()).count()


MISREAD = (elsewhere, nameless, tombstones)
"""What counts the records of a log that its topic's event time, id and key of now misread: `lake.refuse_other_reading` asks."""


def empty(spark: SparkSession, topic: Topic) -> DataFrame:
    """An absent topic: no rows, the accepted records' columns."""
    return accepted(topic, nothing(spark, log_schema(topic)))


def nothing(spark: SparkSession, columns: str) -> DataFrame:
    """No rows of the columns that a DDL string names."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    schema = cast("StructType", StructType.fromDDL(columns))
    return spark.createDataFrame(to_arrow_schema(schema, timezone="UTC").empty_table())


def period(spark: SparkSession, start: datetime, end: datetime) -> DataFrame:
    """One row of timestamps, `start` and `end`. From Arrow: a list of Python rows would go through a Python worker."""
    import pyarrow as pa

    return spark.createDataFrame(
        pa.table({k: pa.array([v], pa.timestamp("us", "UTC")) for k, v in (("start", start), ("end", end))})
    )


def schemas(spark: SparkSession, catalog: Catalog) -> Iterator[tuple[Declared, StructType | Exception]]:
    """Each declaration with the schema of its table, or with what its function raised on inputs without rows.

    What reads a failed declaration fails with it. `day` is last; every column is nullable.
    """
    frames: dict[str, DataFrame] = {}
    bounds = nothing(spark, "start TIMESTAMP, end TIMESTAMP")
    for declared in (*catalog.topics.values(), *catalog.derived):
        try:
            if isinstance(declared, Topic):
                whole = nothing(spark, log_schema(declared))
                refuse_event_time(declared, whole)
            elif isinstance(declared, Rollup):
                whole = roll(declared, {p: accepted(t, frames[t.name]) for p, t in declared.topics.items()})
            else:
                handed = {p: handed_in(s, frames[s.name], bounds, bounds) for p, s in declared.reads.items()}
                whole = answer(declared, declared.function, handed, bounds, settled=False)
                refuse_unsayable(declared, whole.schema)
            if not isinstance(declared, Topic):
                refuse_times(declared, whole.schema)
                refuse_no_set(declared, whole.schema)
                refuse_incomparable(declared, whole.schema)
            schema = schema_of(whole)
            frames[declared.name] = spark.createDataFrame([], schema)  # not `whole`: Spark would analyze its whole past again
            yield declared, described(declared, schema)
        except Exception as error:
            missing = error.args and error.args[0] in catalog.names
            yield declared, DeclarationError(f"{declared.name} reads {error.args[0]}, which failed") if missing else error


REMEMBERED = "schemas.json"
"""In the state: schemas that were analyzed once, and of which code."""


def remembered_schemas(spark: SparkSession, catalog: Catalog, file: Path) -> Iterator[tuple[Declared, StructType | Exception]]:
    """`schemas`, from `file` where they were analyzed before for the same code: Spark needs a quarter of a minute for them.

    Nothing is remembered where one has failed, or where a function's source cannot be read.
    """
    from pyspark.sql.types import StructType

    declarations = (*catalog.topics.values(), *catalog.derived)
    try:
        code = code_of(catalog)
    except (OSError, TypeError):
        yield from schemas(spark, catalog)
        return
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = json.loads(file.read_text())
        if known["code"] == code:
            found = [(d, StructType.fromJson(known["schemas"][d.name])) for d in declarations]
            yield from found
            return
    analyzed = []
    for declared, schema in schemas(spark, catalog):
        analyzed.append((declared.name, schema))
        yield declared, schema
    kept = {name: schema.jsonValue() for name, schema in analyzed if not isinstance(schema, Exception)}
    if len(kept) == len(declarations):
        part = file.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):  # a full disk, say: they are analyzed again
            part.write_text(json.dumps({"code": code, "schemas": kept}))
            part.replace(file)


def code_of(catalog: Catalog) -> str:
    """Changes with whatever the schemas may depend on: Spark, the zone, the platform's files, the declarations, what functions
    enclose."""
    said = [pyspark.__version__, functions.zone(), *(file.read_text() for file in sorted(Path(__file__).parent.rglob("*.py")))]
    said += [fingerprint(declared) for declared in (*catalog.topics.values(), *catalog.derived)]
    said += [repr(inspect.getclosurevars(declared.function).nonlocals) for declared in catalog.derived]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def refuse_event_time(topic: Topic, rows: DataFrame) -> None:
    """Raises `DeclarationError` for an event time that is no SQL over the topic's columns, or of which no time can be made."""
    from pyspark.errors import PySparkException

    try:
        rows.select(event_time(topic))
    except PySparkException as error:
        raise DeclarationError(
            f"topic {topic.name}: event_time {topic.event_time} gives no time ({str(error).strip().splitlines()[0]}); write a "
            f"column, kafka.timestamp, or SQL over the schema, like try_to_timestamp(text, 'yyyy-MM-dd HH:mm:ss')"
        ) from None


COMPARABLE = (
    *("string", "binary", "boolean", "date", "timestamp", "timestamp_ntz"),
    *("tinyint", "smallint", "int", "bigint", "float", "double", "decimal"),
)
"""The types in which a difference of one value is found, and that every reader of the lake reads; arrays and structs too."""


def refuse_incomparable(declared: Rollup | View, schema: StructType) -> None:
    """Raises `DeclarationError` for a column of a type that Spark cannot compare, such as MAP or VARIANT, or does not exactly."""
    owner = f"{type(declared).__name__.lower()} {declared.name}"
    for f in schema.fields:
        if wrong := incomparable(f.dataType):
            raise DeclarationError(
                f"{owner}: column {f.name} is {wrong}, in which no comparison would find every difference; types are "
                f"{', '.join(COMPARABLE).upper()}, and ARRAY and STRUCT of them. Of a map take the entries in order: "
                f"F.array_sort(F.map_entries(…))"
            )


def incomparable(kind: DataType) -> str:
    """What of a type cannot be compared; empty where all of it can."""
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, ArrayType):
        return incomparable(kind.elementType)
    if isinstance(kind, StructType):
        return next(filter(None, (incomparable(f.dataType) for f in kind.fields)), "")
    name = kind.simpleString()
    return "" if name.split("(")[0] in COMPARABLE else name.upper()


SAYABLE = {
    "string": "",
    "boolean": True,
    "decimal": Decimal(0),
    "date": date(2000, 1, 1),
    "timestamp": datetime(2000, 1, 1, tzinfo=UTC),
    **dict.fromkeys(("byte", "short", "integer", "long"), 0),
    **dict.fromkeys(("float", "double"), 0.0),
}
"""A value of each type, to see whether a message can be written of it; of any other type the empty list."""


def refuse_times(declared: Rollup | View, schema: StructType) -> None:
    """Raises `DeclarationError` for a time that is neither an instant nor a business day, or a live view of days under another
    name: it would be refreshed as one of instants."""
    owner, found = f"{type(declared).__name__.lower()} {declared.name}", schema[declared.time].dataType.simpleString().upper()
    if found == "DATE" and isinstance(declared, View) and declared.refresh and declared.time != "day":
        raise DeclarationError(f"{owner}: its time {declared.time} is a DATE; a live view calls such a column day")
    if found != "DATE" and (found != "TIMESTAMP" or declared.time == "day"):
        raise DeclarationError(
            f"{owner}: its time {declared.time} is a {found}; an instant is a TIMESTAMP, a business day a DATE, of functions.day"
        )


def refuse_no_set(declared: Rollup | View, schema: StructType) -> None:
    """Raises `DeclarationError` for a column of a rollup that merges by distinct and is no set."""
    for column in (c for c, merge in getattr(declared, "merge", {}).items() if merge == "distinct"):
        if (found := schema[column].dataType.simpleString().upper()) != "BINARY":
            raise DeclarationError(
                f"rollup {declared.name}: column {column} merges by distinct and is a {found}; make the set by functions.distinct"
            )


def refuse_unsayable(view: View, schema: StructType) -> None:
    """Raises `DeclarationError` for a view that announces a column which it has not, or in a format that does not fit it."""
    if view.announce is None:
        return
    kinds = {f.name: f.dataType.typeName() for f in schema.fields}
    if lacks := [c for c in view.announce.columns if c not in kinds]:
        raise DeclarationError(f"view {view.name}: announces {', '.join(lacks)}, which it has not; it has {', '.join(kinds)}")
    if (when := view.announce.mention_if) and kinds[when] != "boolean":
        raise DeclarationError(f"view {view.name}: mention_if={when!r} is {kinds[when]}; it must be a BOOLEAN column")
    row = {name: SAYABLE.get(kind, []) for name, kind in kinds.items()}
    for template in view.announce.templates.values():
        try:
            filled(template, row)
        except (ValueError, TypeError) as error:
            raise DeclarationError(f'view {view.name}: announces "{template}", which does not fit its columns: {error}') from None


def described(declared: Declared, schema: StructType) -> StructType:
    """The schema with a comment on each column that has something to say: its meaning, and the zone of its time."""
    from pyspark.sql.types import DateType, StructField, StructType, TimestampType

    said = dict(COMMENTS)
    if isinstance(declared, Topic):
        said |= {c.name: c.comment for c in declared.columns}
    else:
        said |= {c: "a set, as a theta sketch" for c, m in getattr(declared, "merge", {}).items() if m == "distinct"}
        said |= declared.comments
    fields = []
    for f in schema.fields:
        zone = "UTC" if isinstance(f.dataType, TimestampType) else functions.zone() if isinstance(f.dataType, DateType) else ""
        comment = ", ".join(filter(None, (said.get(f.name, ""), zone)))
        fields.append(StructField(f.name, f.dataType, True, {"comment": comment} if comment else {}))
    return StructType(fields)


Read = Callable[[Declared, datetime | None, datetime], "DataFrame"]
"""A table's rows of at least `[low, high)`, all before `high` where `low` is None: of a topic its log, by whole business days
unless live, of a rollup any rows that merge, of a view what is written."""


def handed_in(
    source: Source,
    rows: DataFrame,
    bounds: DataFrame,
    period: DataFrame,
    repeats: bool = False,
    merged: bool = False,
    live: bool = False,
) -> DataFrame:
    """What a view's function is handed of one source: topics are typed and distinct by `id` (or with their `repeats`), rollups
    merged (by whoever read them, if they are `merged`), views as they are, of the time in `bounds`. Of a topic's changes all that
    come before the end of `bounds`; a table as of the end of `period`.

    Of a topic `rows` are whole business days, so that an id that was told outside `bounds` and again within is of its first time:
    for 1.1 (visits) to 1.3 (study days) of the CPU. What is `live` reads some files alone, since to look through the day every
    second would cost too much: there it may be of the second time until the day is settled.
    """
    if isinstance(source, Changes):
        return changes(source.topic, rows, bounds)
    if isinstance(source, Topic) and source.compacted:
        return table(source, rows, period)
    if isinstance(source, Topic):
        events = accepted(source, rows).withColumn("_event_time", event_time(source))
        if not (repeats or live):
            events = once(source, events)
        held = within(events, "_event_time", bounds).drop("_event_time")
        return once(source, held) if live and not repeats else held
    if isinstance(source, Rollup):
        held = within(rows, source.time, bounds)
        return held.select(*source.key, *source.merge) if merged else merge(source, held)
    rows = within(rows, source.time, bounds).drop("settled")
    return rows if source.time == "day" else rows.drop("day")


def inputs(
    reads: Mapping[str, Source],
    read: Read,
    low: datetime,
    high: datetime,
    bounds: DataFrame,
    period: DataFrame,
    repeats: Sequence[str] = (),
    merged: bool = False,
    live: bool = False,
) -> dict[str, DataFrame]:
    """What a view's function is handed, by parameter: of `[low, high)`, from `bounds`, a one-row frame of the two.

    Tables are as of the end of `period`, a one-row frame too; they and changes are read from the beginning. Topics named in
    `repeats` come with theirs. `merged` says that what is read of a rollup has each key once, `live` that what is read of a topic
    are not whole days.
    """
    found = {}
    for parameter, source in reads.items():
        if isinstance(source, Changes) or is_table(source):
            rows = read(source.topic if isinstance(source, Changes) else source, None, high)
        else:
            rows = read(source, low, high)
        found[parameter] = handed_in(source, rows, bounds, period, parameter in repeats, merged, live)
    return found


def answers(
    spark: SparkSession,
    view: View,
    way: View | Shortcut,
    read: Read,
    start: datetime,
    end: datetime,
    settled: bool,
    merged: bool = False,
) -> DataFrame:
    """A view's rows of `[start, end)` by a way to them, itself or its live one: what live, nights and replays run.

    A view that reads a table is asked day by day, so that its rows do not depend on how many days are computed at once.
    `merged` says that what is read of a rollup has each key once: to merge it again costs more than most views do.
    """
    frames = []
    for since, until in days_of(start, end) if any(map(is_table, way.reads.values())) else [(start, end)]:
        low, ahead = since - duration(view.lookback), duration(view.lookahead)
        high = looked_at_until(until, ahead) if settled else until + ahead
        asked = period(spark, since, until)
        handed = inputs(way.reads, read, low, high, period(spark, low, high), asked, view.repeats, merged, live=not settled)
        if isinstance(way, Shortcut):
            handed = {p: as_counts(f, way.counted) if isinstance(way.reads[p], Rollup) else f for p, f in handed.items()}
        frames.append(answer(view, way.function, handed, asked, settled))
    return union(frames)


def looked_at_until(end: datetime, lookahead: timedelta) -> datetime:
    """Up to where the rows of a period look: to the end of the UTC hour that its end cuts at the least. Where a zone is half an
    hour off, so is a day's end, and the row of its last hour is of events of the next day too."""
    return max(end + lookahead, floor(end + HOUR - timedelta(microseconds=1), HOUR))


def floor(at: datetime, step: timedelta) -> datetime:
    """The multiple of `step`, counted from 1970-01-01 UTC, at or before an instant."""
    seconds = step.total_seconds()
    return datetime.fromtimestamp(at.timestamp() // seconds * seconds, UTC)


def days_of(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    """`[start, end)` cut at each midnight of the business zone."""
    zone = ZoneInfo(functions.zone())
    while start < end:
        following = midnight(start.astimezone(zone).date() + timedelta(days=1), zone)
        until = min(end, following.astimezone(start.tzinfo))
        yield start, until
        start = until
