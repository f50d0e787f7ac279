"""What the author of a pipeline uses beside PySpark: exact distinct counts that merge, panes, business days, checks of a log,
and the row of a table that was valid at an event's time."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

from tidemark.model import Check, DeclarationError, duration, expect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LG_NOMINAL = 26
HOUR = timedelta(hours=1)


def distinct(column: str | Column) -> Column:
    """The set of a column's values, as a theta sketch (BINARY): an aggregate for a rollup that merges by `distinct`.

    A hash set while it has fewer than 2^26 (67 million) values, hence exact to there, 8 bytes a value, the same bytes in any
    order. The value is prefixed because sketches skip empty strings; nulls are not counted.

    What it counts are texts: several columns are told apart by `F.to_json(F.struct(…))`, for the text of a struct or an array
    itself may be that of another, as of `("a, b", "c")` and `("a", "b, c")`.
    """
    value = (F.col(column) if isinstance(column, str) else column).cast("string")
    return F.theta_sketch_agg(F.concat(F.lit("="), value), LG_NOMINAL)


def position() -> Column:
    """Where Kafka holds a record, `partition/offset`: what tells events apart in a topic without an `id`.

    A record that its producer sent twice stands at two offsets, and counts twice.
    """
    return F.concat_ws("/", F.col("kafka.partition"), F.col("kafka.offset"))


def union(column: str) -> Column:
    """The union of sets over a group, as a sketch: an aggregate for a view. Exact below 2^26 (67 million) values.

    Beyond, the relative standard error of a count is 1 / sqrt(2^26), the bound of the theta sketch framework
    (Dasgupta, Lang, Rhodes, Thaler: A Framework for Estimating Stream Expression Cardinalities, 2016).
    """
    return F.theta_union_agg(F.col(column), LG_NOMINAL)


def sets_of(column: str) -> Column:
    """The sets of a group as an array: an aggregate. The smallest first, for each union is sorted and packed anew, and what comes
    late for a pane are many small sets."""
    return F.array_sort(F.collect_list(column), lambda a, b: F.length(a) - F.length(b))


def union_of(sketches: Column | str) -> Column:
    """The union of an array of sketches, in its order, null for an empty array. A set that stands alone passes as it is.

    Most panes have one row once their files are compacted; hashing them again took 3.5 CPU-seconds of an hour at 1,000
    events/s, this takes 2.2.
    """
    first = F.get(sketches, F.lit(0))
    rest = F.slice(sketches, 2, F.size(sketches))
    both = F.aggregate(rest, first, lambda a, b: F.theta_union(a, b, LG_NOMINAL))
    return F.when(F.size(sketches) <= 1, first).otherwise(both)


def how_many_of(sketches: str) -> Column:
    """How many values an array of sketches holds together (BIGINT), null for an empty array.

    Of the last, which `sets_of` has as the largest, only what it shares with the others is looked for: |A| + |B| - |A and B|.
    Sets of events share nearly nothing, and to unite them is to sort and to pack what is counted and thrown away, two and a half
    times the work.
    """
    size, last = F.size(sketches), F.element_at(sketches, -1)
    others = F.array(union_of(F.slice(sketches, 1, size - 1)))
    both = F.transform(others, lambda them: how_many(them) + how_many(last) - how_many(F.theta_intersection(them, last)))
    return F.when(size > 1, F.get(both, F.lit(0))).when(size == 1, how_many(last))


def how_many(sketch: Column | str) -> Column:
    """How many values a set holds (BIGINT). Not an aggregate: `how_many(union("visitors"))` counts a union."""
    return F.theta_sketch_estimate(sketch)


def pane(column: str, length: str) -> Column:
    """The start of the pane that an instant lies in; panes are `[start, start + length)` counted from 1970-01-01 UTC.

    A rollup's day is settled with its own events and those of the hours that its ends cut, so a pane must not cross them. Raises
    `DeclarationError` for a length that goes neither into an hour without rest nor, where it is longer, into a day. One that is
    longer than an hour lies in one business day only where midnight is a pane's start, as in UTC each is.
    """
    whole = duration(length, "pane")
    if not whole or (HOUR if whole <= HOUR else timedelta(days=1)) % whole:
        raise DeclarationError(f'pane: a length goes into an hour without rest, or a longer one into a day, not "{length}"')
    seconds = F.lit(int(whole.total_seconds()))
    return F.timestamp_seconds(F.floor(F.unix_seconds(F.col(column)) / seconds) * seconds)


def day(column: Column | str) -> Column:
    """The business day (DATE) that an instant lies in, in the zone of the settings: 23, 24 or 25 hours long."""
    return F.to_date(F.from_utc_timestamp(F.col(column) if isinstance(column, str) else column, zone()))


def midnight(date: Column) -> Column:
    """The instant at which a business day begins; where the clock goes forward at midnight, the day's first instant."""
    return F.to_utc_timestamp(date.cast("timestamp"), zone())


FIRST = "struct(kafka.timestamp, kafka.partition, kafka.offset)"
"""What a check finds the first of an id's records by in a log: what a repeat says otherwise does not count."""


def of_log(topic: str) -> tuple[Check, Check]:
    """What every topic's log is asked: each offset is a record, and at most 1 % of a day's records are rejects."""
    return (
        expect(
            "UnexpectedRowsExpectation",
            description="accepted + rejected = offsets",
            unexpected_rows_query=f"SELECT * FROM {topic}_offsets WHERE accepted + rejected <> offsets",
        ),
        expect(
            "UnexpectedRowsExpectation",
            description="at most 1 % of the records are rejects",
            unexpected_rows_query="""
                SELECT day, count_if(reject IS NOT NULL) AS rejects, count(*) AS records FROM {batch}
                GROUP BY day HAVING count_if(reject IS NOT NULL) > 0.01 * count(*)""",
        ),
    )


def as_of(events: DataFrame, changes: DataFrame, *, on: str, at: str, into: str, by: str | None = None) -> DataFrame:
    """Each event with the row of its key that was valid at its time, as one column `into`: a struct, null where there was none.

    `changes` is what a view is handed for `TOPIC.changes`, all of it. `on` is the topic's key, which the events have by the same
    name; `at` the events' time. A change is valid from its event time on, that instant included, until the next one of its key;
    a tombstone ends it. Of changes of one instant the one that Kafka has last is valid. It does not matter when they arrived.

    `by` names an order that the changes bring themselves, as a database's sequence: valid is the greatest of those that had
    happened by then, and a tombstone, which has no such number, ends nothing; a deletion is a row then, for the caller to see.

    Events are neither lost nor doubled; one whose key or time is null finds nothing. Raises `DeclarationError` for a column that
    is not there, or there already.
    """
    if lacks := [c for c in (on, at) if c not in events.columns]:
        raise DeclarationError(f"as_of: the events have no column {', '.join(lacks)}; they have {', '.join(events.columns)}")
    if lacks := [c for c in (on, by, "event_time", "tombstone", "kafka") if c and c not in changes.columns]:
        raise DeclarationError(
            f"as_of: the changes have no column {', '.join(lacks)}, but {', '.join(changes.columns)}; read them by TOPIC.changes"
        )
    if into in events.columns:
        raise DeclarationError(f"as_of: the events have a column {into} already; write another into=")
    place = [F.col("kafka.timestamp"), F.col("kafka.partition"), F.col("kafka.offset")]
    order = F.struct(*([F.col(by)] if by else []), F.col("event_time"), *place)
    # Newest first: a change is over when the earliest of those that come after it in order has happened.
    after = Window.partitionBy(on).orderBy(order.desc()).rowsBetween(Window.unboundedPreceding, -1)
    row = F.struct(*(c for c in changes.columns if c not in ("event_time", "tombstone", "kafka")))
    until = F.min("event_time").over(after)
    ordered = changes.where(F.col(by).isNotNull()) if by else changes
    valid = ordered.withColumn("_until", until).where(F.col("_until").isNull() | (F.col("_until") > F.col("event_time")))
    # Changes and events in one line by time, a change before the events of its instant: each event sees the last change.
    line = valid.select(
        F.col(on).alias("_on"),
        F.col("event_time").alias("_at"),
        F.struct(F.when(~F.col("tombstone"), row).alias("row")).alias("_change"),
    ).unionByName(
        events.select(F.col(on).alias("_on"), F.col(at).alias("_at"), F.struct(*events.columns).alias("_event")),
        allowMissingColumns=True,
    )
    along = Window.partitionBy("_on").orderBy("_at", F.col("_event").isNotNull())
    before = along.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    seen = line.withColumn("_seen", F.last("_change", ignorenulls=True).over(before)).where(F.col("_event").isNotNull())
    return seen.select("_event.*", F.col("_seen.row").alias(into))


def zone() -> str:
    """The business time zone of the running Spark session: an IANA name."""
    # A thread of its own has no active session, yet belongs to the one that runs.
    session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    return session.conf.get("spark.tidemark.zone", "UTC") or "UTC"
