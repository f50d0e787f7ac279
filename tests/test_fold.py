"""Records are judged, folded and merged as the declarations say: the same for the stream, a night and a replay."""

import json
import re
import threading
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DecimalType, StructType

from tidemark import fold, functions, speed
from tidemark.model import Announce, DeclarationError, Live, Topic, catalog, rollup, view
from tidemark.pipelines import CATALOG, traffic
from tidemark.settings import Settings

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
HOUR, SECOND, MILLI = timedelta(hours=1), timedelta(seconds=1), timedelta(milliseconds=1)

WIDE = Topic(
    "wide",
    key="id",
    partitions=1,
    schema="""
        id STRING NOT NULL, at TIMESTAMP NOT NULL, page STRING NOT NULL, note STRING, flag BOOLEAN, n INT, big BIGINT,
        price DECIMAL(10,2), whole DECIMAL(38,0), ratio DOUBLE, born DATE, seen TIMESTAMP""",
    id="id",
    event_time="at",
)
RECORDS = (
    "topic STRING, key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)


def event(**changes) -> bytes:
    """A good event, changed; a field changed to `...` is left out."""
    whole = {"id": "e", "at": "2026-11-18T12:00:00Z", "page": "/"} | changes
    return json.dumps({k: v for k, v in whole.items() if v is not ...}, ensure_ascii=False).encode()


def raw(field: str) -> bytes:
    """A good event with one field more, written as it stands."""
    return event()[:-1] + b", " + field.encode() + b"}"


def records(spark, values, partition=0):
    """Kafka records with offsets from 0 on; each value with noon as Kafka's timestamp, or a pair of value and timestamp."""
    pairs = [v if isinstance(v, tuple) else (v, NOON) for v in values]
    rows = [("wide", b"k", v, partition, n, t, [("trace", b"\x01")]) for n, (v, t) in enumerate(pairs)]
    return spark.createDataFrame(rows, RECORDS)


def judged(spark, topic, values) -> list[dict]:
    return sorted(fold.judged(topic, records(spark, values)).toArrow().to_pylist(), key=lambda r: r["kafka"]["offset"])


def reasons(spark, topic, values) -> list[str | None]:
    return [r["reject"] for r in judged(spark, topic, values)]


# ---------------------------------------------------------------------------------------------------------- bad input

ISO = "TIMESTAMP (ISO 8601 with a zone, or epoch milliseconds)"
TOO_NEW = "event time is more than 5 minutes after Kafka's timestamp"
TOO_OLD = "event time is before the year 2000"
NOON_MS = int(NOON.timestamp() * 1000)

BAD = {
    "null value": (None, "no value"),
    "empty value": (b"", "empty value"),
    "blanks": (b"  \n", "not JSON"),
    "not JSON": (b"hello", "not JSON"),
    "cut off": (event()[:-1], "not JSON"),
    "trailing garbage": (event() + b" garbage", "not JSON"),
    "trailing bracket": (event() + b"]", "not JSON"),
    "two objects": (event() + b"," + event(), "not JSON"),
    "two lines": (event() + b"\n" + event(), "not JSON"),
    "duplicate key": (raw('"id": "other"'), "not JSON"),
    "duplicate key that is not declared": (raw('"x": 1, "x": 2'), "not JSON"),
    "single quotes": (b"{'id': 'e'}", "not JSON"),
    "comment": (event() + b" // yes", "not JSON"),
    "array": (b"[" + event() + b"]", "not a JSON object"),
    "array behind blanks": (b" \t\r\n[" + event() + b"]", "not a JSON object"),
    "string": (b'"e"', "not a JSON object"),
    "number": (b"17", "not a JSON object"),
    "JSON's null": (b"null", "not a JSON object"),
    "Python's NaN": (raw('"ratio": NaN'), "not JSON"),
    "Infinity": (raw('"ratio": -Infinity'), "not JSON"),
    "not UTF-8": (event(page="X").replace(b"X", b"\xff\xfe"), "not UTF-8"),
    "Latin-1": (event(page="caf\u00e9").decode().encode("latin-1"), "not UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf" + event(), "not JSON"),
    "UTF-16": (event().decode().encode("utf-16-le"), "not JSON"),
    "100,000 brackets": (b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
    "100,000 brackets never closed": (b"[" * 100_000, "not JSON"),
    "100,000 objects in one another": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not JSON"),
    "number of 100,000 digits": (raw(f'"n": {"9" * 100_000}'), "not JSON"),
    "10 MB": (event(page="x" * 10_000_000), "larger than 1048576 bytes"),
    "one byte too large": (event(page="x" * (1024 * 1024 - len(event()) + 2)), "larger than 1048576 bytes"),
    "missing": (event(page=...), "page: missing"),
    "another case": (event(page=..., Page="/"), "page: missing"),
    "null": (event(page=None), "page: null"),
    "missing event time": (event(at=...), "at: missing"),
    "number for text": (event(page=1), "page: wanted STRING, found BIGINT"),
    "boolean for text": (event(page=True), "page: wanted STRING, found BOOLEAN"),
    "object for text": (event(page={"path": "/"}), "page: wanted STRING, found OBJECT"),
    "array for text": (event(page=["/"]), "page: wanted STRING, found ARRAY"),
    "object for a text that may be null": (event(note={}), "note: wanted STRING, found OBJECT"),
    "text for boolean": (event(flag="true"), "flag: wanted BOOLEAN, found STRING"),
    "number for boolean": (event(flag=1), "flag: wanted BOOLEAN, found BIGINT"),
    "text for INT": (event(n="1"), "n: wanted INT, found STRING"),
    "fraction for INT": (event(n=1.5), "n: wanted INT, found DECIMAL"),
    "INT 2^31": (event(n=2**31), "n: wanted INT, found BIGINT"),
    "INT -2^31 - 1": (event(n=-(2**31) - 1), "n: wanted INT, found BIGINT"),
    "BIGINT 2^63": (event(big=2**63), "big: wanted BIGINT, found DECIMAL"),
    "BIGINT 1e3": (raw('"big": 1e3'), "big: wanted BIGINT, found DOUBLE"),
    "price of three decimals": (event(price=1.005), "price: wanted DECIMAL(10,2), found DECIMAL"),
    "price of twenty decimals": (raw('"price": 1.00000000000000000001'), "price: wanted DECIMAL(10,2), found DECIMAL"),
    "price too large": (event(price=123456789), "price: wanted DECIMAL(10,2), found BIGINT"),
    "price as a text": (event(price="1.00"), "price: wanted DECIMAL(10,2), found STRING"),
    "DECIMAL of 39 digits": (raw('"whole": ' + "9" * 39), "whole: wanted DECIMAL(38,0), found DOUBLE"),
    "DOUBLE 1e400": (raw('"ratio": 1e400'), "ratio: wanted DOUBLE, found DOUBLE"),
    "DOUBLE as a text": (event(ratio="NaN"), "ratio: wanted DOUBLE, found STRING"),
    "February 30 as a date": (event(born="2026-02-30"), "born: wanted DATE, found STRING"),
    "date with a time": (event(born="2026-02-28T00:00:00Z"), "born: wanted DATE, found STRING"),
    "date of the year 0": (event(born="0000-01-01"), "born: wanted DATE, found STRING"),
    "date as a number": (event(born=20260228), "born: wanted DATE, found BIGINT"),
    "year 0": (event(seen="0000-12-31T23:59:59Z"), f"seen: wanted {ISO}, found STRING"),
    "year 0 by its zone": (event(seen="0001-01-01T00:00:00+14:00"), f"seen: wanted {ISO}, found STRING"),
    "year 10000 by its zone": (event(seen="9999-12-31T23:59:59-14:00"), f"seen: wanted {ISO}, found STRING"),
    "milliseconds of the year 0": (event(seen=-62_135_596_800_001), f"seen: wanted {ISO}, found BIGINT"),
    "milliseconds of the year 10000": (event(seen=253_402_300_800_000), f"seen: wanted {ISO}, found BIGINT"),
    "milliseconds past BIGINT": (event(seen=2**70), f"seen: wanted {ISO}, found DECIMAL"),
    "milliseconds of -2^63": (event(seen=-(2**63)), f"seen: wanted {ISO}, found BIGINT"),
    "event time 1970": (event(at="1970-01-01T00:00:00Z"), TOO_OLD),
    "event time 0": (event(at=0), TOO_OLD),
    "a millisecond before 2000": (event(at="1999-12-31T23:59:59.999Z"), TOO_OLD),
    "epoch seconds": (event(at=NOON_MS // 1000), TOO_OLD),
    "epoch microseconds": (event(at=NOON_MS * 1000), f"at: wanted {ISO}, found BIGINT"),
    "epoch seconds with a fraction": (event(at=NOON_MS / 1000 + 0.5), f"at: wanted {ISO}, found DECIMAL"),
    "event time 9999": (event(at="9999-12-31T23:59:59Z"), TOO_NEW),
    "event time next year": (event(at="2027-11-18T12:00:00Z"), TOO_NEW),
    "five minutes and a millisecond ahead": (event(at="2026-11-18T12:05:00.001Z"), TOO_NEW),
    "no zone": (event(at="2026-11-18T12:00:00"), f"at: wanted {ISO}, found STRING"),
    "named zone": (event(at="2026-11-18T12:00:00 Europe/Berlin"), f"at: wanted {ISO}, found STRING"),
    "date only": (event(at="2026-11-18"), f"at: wanted {ISO}, found STRING"),
    "nanoseconds": (event(at="2026-11-18T12:00:00.123456789Z"), f"at: wanted {ISO}, found STRING"),
    "February 30": (event(at="2026-02-30T12:00:00Z"), f"at: wanted {ISO}, found STRING"),
    "leap second": (event(at="2016-12-31T23:59:60Z"), f"at: wanted {ISO}, found STRING"),
    "24 o'clock": (event(at="2026-11-17T24:00:00Z"), f"at: wanted {ISO}, found STRING"),
    "zone of 25 hours": (event(at="2026-11-18T12:00:00+25:00"), f"at: wanted {ISO}, found STRING"),
    "five digits of year": (event(at="12026-11-18T12:00:00Z"), f"at: wanted {ISO}, found STRING"),
    "epoch milliseconds as a text": (event(at=str(NOON_MS)), f"at: wanted {ISO}, found STRING"),
    "true for a time": (event(at=True), f"at: wanted {ISO}, found BOOLEAN"),
}

GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (event(page="/a b\u00e9\U0001f600\x00"), {"page": "/a b\u00e9\U0001f600\x00"}),
    "empty text": (event(page=""), {"page": ""}),
    "blanks around": (b" \t\r\n" + event() + b"\r\n\t", {"id": "e"}),
    "fields that are not declared": (event(more={"a": [1, {"b": None}]}, day="x", kafka=1), {"id": "e"}),
    "as large as may be": (event(page="x" * (1024 * 1024 - len(event()) + 1)), {"id": "e"}),
    "all that may be missing": (event(), dict.fromkeys(["note", "flag", "n", "big", "price", "ratio", "born", "seen"])),
    "null where it may be": (event(note=None, n=None, born=None, seen=None), {"note": None, "n": None, "seen": None}),
    "boolean": (event(flag=False), {"flag": False}),
    "INT 2^31 - 1": (event(n=2**31 - 1), {"n": 2**31 - 1}),
    "INT -2^31": (event(n=-(2**31)), {"n": -(2**31)}),
    "BIGINT 2^63 - 1": (event(big=2**63 - 1), {"big": 2**63 - 1}),
    "BIGINT -2^63": (event(big=-(2**63)), {"big": -(2**63)}),
    "price": (event(price=12345678.25), {"price": Decimal("12345678.25")}),
    "price that a DOUBLE cannot hold": (raw('"price": 0.10'), {"price": Decimal("0.10")}),
    "price with zeros behind": (raw('"price": -5.5000000000000000000000'), {"price": Decimal("-5.50")}),
    "whole price": (event(price=7), {"price": Decimal("7.00")}),
    "38 digits": (raw('"whole": -' + "9" * 38), {"whole": Decimal("-" + "9" * 38)}),
    "26 digits": (raw('"whole": 12345678901234567890123456'), {"whole": Decimal(12345678901234567890123456)}),
    "double": (event(ratio=0.1), {"ratio": 0.1}),
    "double of a whole number": (event(ratio=3), {"ratio": 3.0}),
    "double with an exponent": (raw('"ratio": -1.5E-300'), {"ratio": -1.5e-300}),
    "double 1e308": (raw('"ratio": 1e308'), {"ratio": 1e308}),
    "February 29": (event(born="2024-02-29"), {"born": date(2024, 2, 29)}),
    "first date": (event(born="0001-01-01"), {"born": date(1, 1, 1)}),
    "Z": (event(at="2026-11-18T11:59:59.123456Z"), {"at": NOON - SECOND + timedelta(microseconds=123456)}),
    "zone": (event(at="2026-11-18T17:29:59+05:30"), {"at": NOON - SECOND}),
    "zone without a colon": (event(at="2026-11-18T06:59:59-0500"), {"at": NOON - SECOND}),
    "blank for T": (event(at="2026-11-18 12:00:00Z"), {"at": NOON}),
    "no seconds": (event(at="2026-11-18T12:00Z"), {"at": NOON}),
    "no seconds, zone": (event(at="2026-11-18T13:00+01:00"), {"at": NOON}),
    "epoch milliseconds": (event(at=NOON_MS - 1), {"at": NOON - MILLI}),
    "five minutes ahead": (event(at="2026-11-18T12:05:00Z"), {"at": NOON + timedelta(minutes=5)}),
    "the year 2000": (event(at="2000-01-01T00:00:00Z"), {"at": datetime(2000, 1, 1, tzinfo=UTC)}),
    "the last microsecond": (
        event(seen="9999-12-31T23:59:59.999999Z"),
        {"seen": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)},
    ),
    "the first instant": (event(seen="0001-01-01T00:00:00Z"), {"seen": datetime(1, 1, 1, tzinfo=UTC)}),
}


@pytest.fixture(scope="module")
def verdicts(spark) -> dict[str, dict]:
    """Every case of both tables, judged in one Spark job."""
    cases = {f"bad {n}": v for n, (v, _) in BAD.items()} | {f"good {n}": v for n, (v, _) in GOOD.items()}
    return dict(zip(cases, judged(spark, WIDE, cases.values()), strict=True))


@pytest.mark.parametrize("case", BAD)
def test_bad_record_is_kept_with_its_bytes_and_its_reason(verdicts, case):
    value, reason = BAD[case]
    row = verdicts[f"bad {case}"]
    assert row["reject"] == reason
    assert row["kafka"]["value"] == value
    assert (row["kafka"]["key"], row["kafka"]["headers"]) == (b"k", [{"key": "trace", "value": b"\x01"}])
    assert {c.name: row[c.name] for c in WIDE.columns} == dict.fromkeys(c.name for c in WIDE.columns)
    assert (row["event_time"], row["day"]) == (None, NOON.date())


@pytest.mark.parametrize("case", GOOD)
def test_good_record_is_read_exactly(verdicts, case):
    value, wanted = GOOD[case]
    row = verdicts[f"good {case}"]
    assert row["reject"] is None
    assert {name: row[name] for name in wanted} == wanted
    assert (row["kafka"]["value"], row["event_time"]) == (value, row["at"])


def test_every_record_is_one_row_of_the_log_with_kafkas_own_place(verdicts):
    assert [(r["kafka"]["partition"], r["kafka"]["offset"]) for r in verdicts.values()] == [(0, n) for n in range(len(verdicts))]
    assert {r["kafka"]["timestamp"] for r in verdicts.values()} == {NOON}


def test_log_rows_have_the_columns_of_the_logs_table(spark):
    rows = fold.judged(WIDE, records(spark, [event()])).drop("event_time")
    assert fold.schema_of(rows) == fold.schema_of(spark.createDataFrame([], fold.log_schema(WIDE)))


def test_columns_called_like_kafkas_own_are_the_events(spark):
    names = "key STRING, value STRING, partition INT, offset BIGINT, timestamp TIMESTAMP NOT NULL, headers STRING, topic STRING"
    said = {"key": "a", "value": "b", "partition": 7, "offset": 8, "timestamp": NOON_MS, "headers": "c", "topic": "d"}
    (row,) = judged(spark, Topic("t", key="key", partitions=1, schema=names, event_time="timestamp"), [json.dumps(said).encode()])
    assert row["reject"] is None
    assert {n: row[n] for n in said} == said | {"timestamp": NOON}
    assert (row["kafka"]["partition"], row["kafka"]["offset"]) == (0, 0)


# --------------------------------------------------------------------------------------------------------------- time


def test_accept_late_counts_back_from_kafkas_timestamp(spark):
    #      11:00 ---------------- 12:00
    #        [  accepted            ]     accept_late = 1 hour
    #      I                               a millisecond too late
    topic = Topic("t", key="at", partitions=1, schema="at TIMESTAMP NOT NULL", event_time="at", accept_late="1 hour")
    late = "event time is more than 1 hour before Kafka's timestamp"
    values = [event(at=NOON_MS - 3_600_000), event(at=NOON_MS - 3_600_001)]
    assert reasons(spark, topic, values) == [None, late]


def test_a_text_that_is_no_event_time_is_a_reject(spark):
    topic = Topic("t", key="at", partitions=1, schema="at STRING NOT NULL", event_time="at")
    assert reasons(spark, topic, [event(), event(at="yesterday")]) == [None, f"no event time by {topic.event_time}"]


def test_time_is_judged_by_kafkas_timestamp_and_never_by_the_clock(spark):
    in_2050, in_2001 = datetime(2050, 1, 1, tzinfo=UTC), datetime(2001, 1, 1, tzinfo=UTC)
    values = [
        (event(at="2050-01-01T00:05:00Z"), in_2050),
        (event(at="2050-01-01T00:05:00.001Z"), in_2050),
        (event(at="2001-01-01T00:05:00Z"), in_2001),
        (event(at="2001-01-01T00:05:00.001Z"), in_2001),
    ]
    assert reasons(spark, WIDE, values) == [None, TOO_NEW, None, TOO_NEW]
    assert judged(spark, WIDE, values) == judged(spark, WIDE, values)


def test_a_record_whose_timestamp_is_beyond_the_calendar_is_a_reject_of_the_calendar_s_end(spark):
    """Microseconds where Kafka has milliseconds: by such a time all others would be late."""
    micros = F.when(F.col("offset") < 2, F.timestamp_millis(F.lit(NOON_MS * 1000))).otherwise(
        F.timestamp_millis(F.lit(-(10**15)))
    )
    sent = records(spark, [event(), b"hello", event(at="2000-01-01T00:00:00Z")]).withColumn("timestamp", micros)
    rows = fold.judged(WIDE, sent).orderBy("kafka.offset").toArrow().to_pylist()
    assert [r["kafka"]["timestamp"].year for r in rows] == [9999, 9999, 1]
    beyond, last, first = "Kafka's timestamp is beyond the calendar", date(9999, 12, 30), date(1, 1, 2)
    assert [(r["day"], r["reject"]) for r in rows] == [(last, beyond), (last, "not JSON"), (first, beyond)]


def test_an_event_belongs_to_its_own_day_and_a_reject_to_kafkas(spark):
    #   17th ----------)[---------- 18th
    #         I event    K kafka
    midnight = datetime(2026, 11, 18, tzinfo=UTC)
    values = [
        (event(at="2026-11-17T23:59:59.999Z"), midnight),
        (event(at="2026-11-17T23:59:59.999Z", page=7), midnight),
        (event(at="2026-11-18T00:00:00Z"), midnight - MILLI),
        (b"hello", midnight - MILLI),
    ]
    days = [r["day"].day for r in judged(spark, WIDE, values)]
    assert days == [17, 18, 18, 17]


@pytest.mark.parametrize("compacted", [False, True], ids=["of a topic", "of a table"])
@pytest.mark.parametrize(("zone", "begins"), [("Europe/Berlin", NOON - 13 * HOUR), ("America/New_York", NOON - 7 * HOUR)])
def test_an_event_of_a_date_happened_as_that_business_day_began(spark, zone, begins, compacted):
    #   Berlin's 18th begins at 23:00 UTC, New York's at 05:00 UTC: an event of it may come from then on
    schema = "id STRING NOT NULL, born DATE NOT NULL"
    topic = Topic("t", key="id", partitions=1, schema=schema, event_time="born", compacted=compacted)
    spark.conf.set("spark.tidemark.zone", zone)
    try:
        (row,) = judged(spark, topic, [(event(id="k", born="2026-11-18"), begins)])
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")
    assert (row["reject"], row["event_time"], row["day"]) == (None, begins, date(2026, 11, 18))


@pytest.fixture
def berlin(spark):
    spark.conf.set("spark.tidemark.zone", "Europe/Berlin")
    yield spark
    spark.conf.set("spark.tidemark.zone", "UTC")


BERLIN = {
    "2026-10-24T21:59:59.999Z": date(2026, 10, 24),
    "2026-10-24T22:00:00Z": date(2026, 10, 25),  # 00:00 in summer time: a day of 25 hours begins
    "2026-10-25T22:59:59.999Z": date(2026, 10, 25),
    "2026-10-25T23:00:00Z": date(2026, 10, 26),  # 00:00 in winter time
    "2026-03-28T22:59:59.999Z": date(2026, 3, 28),
    "2026-03-28T23:00:00Z": date(2026, 3, 29),  # a day of 23 hours begins
    "2026-03-29T21:59:59.999Z": date(2026, 3, 29),
    "2026-03-29T22:00:00Z": date(2026, 3, 30),
}


def test_a_business_day_in_berlin_has_23_or_25_hours_when_the_clocks_change(berlin):
    assert {r["id"]: r["day"] for r in judged(berlin, WIDE, [event(at=at, id=at) for at in BERLIN])} == BERLIN


def test_a_thread_of_its_own_knows_the_zone(berlin):
    found = []
    thread = threading.Thread(target=lambda: found.append(functions.zone()))
    thread.start()
    thread.join()
    assert found == ["Europe/Berlin"]


def test_a_pane_begins_at_whole_lengths_since_1970(spark):
    #   [00 ----- 05)[05 ----- 10)
    #   I       I    I
    ends = spark.createDataFrame([(NOON,), (NOON + 5 * SECOND - MILLI,), (NOON + 5 * SECOND,)], "at TIMESTAMP")
    panes = ends.select("at", functions.pane("at", "5 seconds").alias("pane")).orderBy("at").toArrow()["pane"].to_pylist()
    assert panes == [NOON, NOON, NOON + 5 * SECOND]


@pytest.mark.parametrize("length", ["0 seconds", "7 minutes", "25 minutes", "50 minutes", "61 minutes", "5 hours", "7 days"])
def test_a_pane_that_midnight_would_cut_is_refused(length):
    #   [23:20 ---- 23:45)[23:45 --- | --- 00:10)
    said = f'pane: a length goes into an hour without rest, or a longer one into a day, not "{length}"'
    with pytest.raises(DeclarationError, match=f"^{re.escape(said)}$"):
        functions.pane("at", length)


@pytest.mark.parametrize("length", ["1 second", "16 seconds", "20 minutes", "1 hour", "90 minutes", "6 hours", "1 day"])
def test_a_pane_may_be_any_whole_part_of_an_hour_or_of_a_day(spark, length):
    functions.pane("at", length)


# --------------------------------------------------------------------------------------------------------------- once


def test_the_lowest_kafka_timestamp_then_partition_then_offset_wins(spark):
    topic = Topic(
        "t", key="id", partitions=2, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL, n INT", id="id", event_time="at"
    )
    rows = [
        # id, n, kafka timestamp, partition, offset
        ("by timestamp", 1, NOON, 0, 0),
        ("by timestamp", 2, NOON - MILLI, 1, 9),
        ("by partition", 1, NOON, 1, 0),
        ("by partition", 2, NOON, 0, 9),
        ("by offset", 1, NOON, 0, 9),
        ("by offset", 2, NOON, 0, 8),
        ("single", 2, NOON, 0, 1),
        ("null wins too", 1, NOON, 0, 1),
        ("null wins too", None, NOON, 0, 0),
    ]
    events = spark.createDataFrame(
        [(i, NOON, n, (p, o, t)) for i, n, t, p, o in rows],
        "id STRING, at TIMESTAMP, n INT, kafka STRUCT<partition INT, offset BIGINT, timestamp TIMESTAMP>",
    )
    found = fold.once(topic, events)
    assert found.columns == ["id", "at", "n"]
    assert {r["id"]: r["n"] for r in found.collect()} == {
        "by timestamp": 2,
        "by partition": 2,
        "by offset": 2,
        "single": 2,
        "null wins too": None,
    }


def test_an_id_that_is_told_of_two_days_is_an_event_of_each(spark):
    """A day's answer does not depend on whether the day before is looked at too, nor on how many are computed at once.

    day  [ 18 --------------)[ 19 ------
    e1       15:00  15:01         01:00
    """
    topic = Topic("t", key="id", partitions=2, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL", id="id", event_time="at")
    midnight = datetime(2026, 11, 19, tzinfo=UTC)
    times = [midnight - 9 * HOUR, midnight - 9 * HOUR + 60 * SECOND, midnight + HOUR]
    events = spark.createDataFrame(
        [("e1", at, (0, offset, NOON)) for offset, at in enumerate(times)],
        "id STRING, at TIMESTAMP, kafka STRUCT<partition INT, offset BIGINT, timestamp TIMESTAMP>",
    )
    assert sorted(r["at"] for r in fold.once(topic, events).toArrow().to_pylist()) == [times[0], times[2]]


def test_a_topic_without_id_keeps_every_event(spark):
    topic = Topic("t", key="n", partitions=1, schema="n INT, at TIMESTAMP NOT NULL", event_time="at")
    events = spark.createDataFrame([(1, NOON), (1, NOON)], "n INT, at TIMESTAMP")
    assert fold.once(topic, events).count() == 2


# -------------------------------------------------------------------------------------------------------------- merge


@rollup(
    reads={"views": WIDE},
    key=("page", "pane"),
    time="pane",
    merge={
        "first": "min",
        "last": "max",
        "stage": "latest(by=seq)",
        "seq": "latest(by=seq)",
        "note": "latest(by=seq)",
        "visitors": "distinct",
    },
)
def everything(views):
    """Every merge at once."""
    return views.groupBy("page", functions.pane("at", "5 seconds").alias("pane")).agg(
        F.min("n").alias("first"),
        F.max("n").alias("last"),
        F.max_by("note", "big").alias("stage"),
        F.max("big").alias("seq"),
        F.max("note").alias("note"),
        functions.distinct("id").alias("visitors"),
    )


ROWS = [
    # page, first, last, stage, seq, note, visitors
    ("/a", 3, 3, "old", 1, "z", ["v1", ""]),
    ("/a", 1, None, "new", 2, "a", ["v1"]),
    ("/a", None, 9, "late, but older", 0, "y", ["v2", ""]),
    ("/tie", 1, 1, "a", 5, "n", ["v1"]),
    ("/tie", 1, 1, "b", 5, "m", ["v2"]),  # the same order: the greatest of all columns, by name, note first
    ("/null", None, None, None, None, "x", []),
    ("/null", None, None, "known", 0, None, ["v1"]),
    ("/nothing", None, None, None, None, None, []),
]
MERGED = {
    "/a": (1, 9, "new", 2, "a", 3),
    "/tie": (1, 1, "a", 5, "n", 2),
    "/null": (None, None, "known", 0, None, 1),
    "/nothing": (None, None, None, None, None, 0),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("order", [ROWS, ROWS[::-1], [*ROWS, *ROWS[::2]], sorted(ROWS, key=str)])
def test_merge_of_rows_in_any_order_and_some_twice(spark, order, many):
    kinds = "page STRING, first INT, last INT, stage STRING, seq BIGINT, note STRING, seen ARRAY<STRING>, n INT"
    rows = spark.createDataFrame([(*row, n) for n, row in enumerate(order)], kinds).withColumn("visitor", F.explode_outer("seen"))
    rows = rows.groupBy(*[c for c in rows.columns if c not in ("seen", "visitor")]).agg(
        functions.distinct("visitor").alias("visitors")
    )
    merged = fold.merge(replace(everything, many=many), rows.withColumn("pane", F.lit(NOON)).repartition(2))
    assert merged.columns == ["page", "pane", "first", "last", "stage", "seq", "note", "visitors"]
    found = merged.withColumn("visitors", functions.how_many("visitors")).drop("pane")
    assert {r[0]: tuple(r)[1:] for r in found.collect()} == MERGED


def sets_of(spark, rows: list[tuple[str, list[str] | None, list[str] | None]]):
    """Rows of `page_panes`: page, event ids, visitor ids; None for a set that is not there."""
    raw = spark.createDataFrame([(n, *row) for n, row in enumerate(rows)], "n INT, page STRING, v ARRAY<STRING>, u ARRAY<STRING>")
    sets = raw.withColumn("v", F.explode_outer("v")).withColumn("u", F.explode_outer("u"))
    sets = sets.groupBy("n", "page").agg(functions.distinct("v").alias("views"), functions.distinct("u").alias("visitors"))
    found = sets.join(raw.select("n", F.col("v").isNull().alias("_v"), F.col("u").isNull().alias("_u")), "n")
    absent = {c: F.when(~F.col(flag), F.col(c)).alias(c) for c, flag in (("views", "_v"), ("visitors", "_u"))}
    return found.select("page", F.lit(NOON).alias("pane"), *absent.values()).repartition(2)


PARTS = [
    ("/alone", ["e1", "e2"], ["ann"]),
    ("/two", ["e1", "e2"], ["ann"]),
    ("/two", ["e2", "e3"], ["bob"]),
    ("/five", ["e1"], ["ann"]),
    ("/five", ["e1"], ["ann"]),
    ("/five", ["e2"], ["bob"]),
    ("/five", ["e1", "e3"], []),
    ("/five", ["e4"], ["ann", "cem"]),
    ("/absent", ["e1"], None),
    ("/absent", None, ["ann"]),
    ("/nothing", None, None),
]
WHOLE = {"/alone": (2, 1), "/two": (3, 2), "/five": (4, 3), "/absent": (1, 1), "/nothing": (None, 0)}


@pytest.mark.parametrize("order", [PARTS, PARTS[::-1], PARTS + PARTS])
def test_sets_in_parts_are_counted_once_and_united_by_whoever_reads_them(spark, order):
    parts = fold.in_parts(traffic.page_panes, sets_of(spark, order), counted=("views",))
    assert parts.columns == ["page", "pane", "views", "visitors"]
    found = parts.groupBy("page").agg(F.sum("views"), functions.how_many(functions.union("visitors")), F.count("*"))
    rows = {page: rest for page, *rest in found.collect()}
    assert {page: tuple(rest[:2]) for page, rest in rows.items()} == WHOLE
    assert rows["/alone"][2] == order.count(PARTS[0])  # a row for each set


def test_rows_of_a_span_become_one_at_its_start_and_those_at_its_end_stay(spark):
    #   11:59:55   [12:00:00   12:00:55)   12:01:00
    minute, one = timedelta(minutes=1), sets_of(spark, [("/", ["e1"], ["ann"])])
    panes = [NOON - minute / 12, NOON, NOON + minute * 11 / 12, NOON + minute]
    span = spark.createDataFrame([(NOON, NOON + minute)], "start TIMESTAMP, end TIMESTAMP")
    found = fold.coarser(traffic.page_panes, fold.union([one.withColumn("pane", F.lit(at)) for at in panes]), span)
    assert sorted(r["pane"] for r in found.toArrow().to_pylist()) == [panes[0], NOON, NOON + minute]


@pytest.mark.parametrize("counted", [(), ("views",), ("views", "visitors")])
def test_parts_merged_once_more_are_what_merging_at_once_gives(spark, counted):
    rows = sets_of(spark, [row for row in PARTS if None not in row])
    at_once = fold.as_counts(fold.merge(traffic.page_panes, rows), counted)
    again = fold.merge(traffic.page_panes, fold.in_parts(traffic.page_panes, rows, counted), many=True, counted=counted)
    assert sorted(map(str, again.collect())) == sorted(map(str, at_once.collect()))


def test_what_merges_otherwise_is_the_same_in_each_part(spark):
    kinds = "page STRING, pane TIMESTAMP, first INT, last INT, stage STRING, seq BIGINT, note STRING, id STRING"
    rows = spark.createDataFrame([("/", NOON, 3, 3, "old", 1, "z", "ann"), ("/", NOON, 1, 9, "new", 2, "a", "bob")], kinds)
    keys = [c for c in rows.columns if c != "id"]
    parts = fold.in_parts(everything, rows.groupBy(*keys).agg(functions.distinct("id").alias("visitors")))
    assert parts.drop("pane", "visitors").collect() == [("/", 1, 9, "new", 2, "a")] * 2
    assert parts.agg(functions.how_many(functions.union("visitors"))).first()[0] == 2


def test_a_set_has_the_same_bytes_in_any_order_and_counts_empty_texts_but_not_nulls(spark):
    values = [("a",), ("b",), ("",), (None,), ("a",)]
    sets = [
        spark.createDataFrame(v, "v STRING").coalesce(1).agg(functions.distinct("v").alias("s")) for v in (values, values[::-1])
    ]
    (one, n), (other, _) = (s.select("s", functions.how_many("s")).first() for s in sets)
    assert (bytes(one), n) == (bytes(other), 3)


def test_a_set_is_exact_beyond_a_million_values(spark):
    #   a quarter of an hour of one page at 1,500 views a second
    assert spark.range(1_350_000).agg(functions.how_many(functions.distinct("id"))).first()[0] == 1_350_000


def test_a_union_of_sets_is_exact_below_67_million(spark):
    #   0 ------------- 100,000
    #          50,000 ------------- 150,000
    one, other = (spark.range(a, a + 100_000).agg(functions.distinct("id").alias("ids")) for a in (0, 50_000))
    both = one.union(other).agg(functions.union("ids").alias("by_aggregate"), F.collect_list("ids").alias("sets"))
    found = both.select(functions.how_many("by_aggregate"), functions.how_many(functions.union_of("sets")))
    assert (tuple(found.first()), 2**functions.LG_NOMINAL) == ((150_000, 150_000), 67_108_864)


def test_sets_of_a_rollup_with_many_rows_of_a_key_are_united_by_one_aggregate_and_others_one_after_the_other(spark):
    def plan_of(declared):
        rows = fold.nothing(spark, "page STRING, pane TIMESTAMP, views BINARY, visitors BINARY")
        return fold.merge(declared, rows)._jdf.queryExecution().analyzed().toString()

    assert "theta_union_agg" in plan_of(traffic.page_quarters) and "collect_list" not in plan_of(traffic.page_quarters)
    assert "collect_list" in plan_of(traffic.page_panes)


# --------------------------------------------------------------------------------------------------- shapes and periods


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (["page", "pane"], "rollup some_panes: its function gives other columns than its key and merge name: it lacks views"),
        (["page", "pane", "views", "extra"], "it adds extra"),
        (["page", "pane", "clicks"], "it lacks views; it adds clicks"),
    ],
)
def test_a_rollup_that_gives_other_columns_is_refused_by_name(spark, columns, sentence):
    def some_panes(events):
        return events.select(*(F.lit(1).alias(c) for c in columns))

    declared = rollup(reads={"events": WIDE}, key=("page", "pane"), time="pane", merge={"views": "max"})(some_panes)
    with pytest.raises(DeclarationError, match=sentence):
        fold.roll(declared, {"events": fold.empty(spark, WIDE)})


START, END = datetime(2026, 11, 17, tzinfo=UTC), datetime(2026, 11, 18, tzinfo=UTC)


def test_a_period_has_its_start_and_not_its_end(spark):
    #      [17th ------------------ 18th)
    #     I I                     I  I
    times = [START - MILLI, START, END - MILLI, END]
    frame = spark.createDataFrame([(t,) for t in times], "hour TIMESTAMP")
    period = spark.createDataFrame([(START, END)], "start TIMESTAMP, end TIMESTAMP")
    assert sorted(fold.within(frame, "hour", period).toArrow()["hour"].to_pylist()) == [START, END - MILLI]


def test_a_date_is_in_the_period_when_that_business_day_is(berlin):
    #   24th ---)[25th, 25 hours ------)[26th
    period = berlin.createDataFrame(
        [(datetime(2026, 10, 24, 22, tzinfo=UTC), datetime(2026, 10, 25, 23, tzinfo=UTC))], "start TIMESTAMP, end TIMESTAMP"
    )
    frame = berlin.createDataFrame([(date(2026, 10, d),) for d in (24, 25, 26)], "day DATE")
    assert [r["day"].day for r in fold.within(frame, "day", period).collect()] == [25]


def answered(spark, function, key=("page", "hour"), time="hour"):
    declared = view(reads={"events": WIDE}, key=key, time=time)(function)
    period = spark.createDataFrame([(START, END)], "start TIMESTAMP, end TIMESTAMP")
    return fold.answer(declared, declared.function, {"events": fold.empty(spark, WIDE)}, period, settled=True)


def test_an_answer_has_its_columns_then_settled_then_day(spark):
    def hours(events, period):
        return period.select(F.lit("/").alias("page"), F.explode(F.array("start", "end")).alias("hour"))

    frame = answered(spark, hours)
    assert frame.columns == ["page", "hour", "settled", "day"]
    assert frame.toArrow().to_pylist() == [{"page": "/", "hour": START, "settled": True, "day": START.date()}]


def test_a_view_without_its_key_is_refused_by_name(spark):
    def some_hours(events):
        return events.select("page", F.col("at").alias("hour_of_day"))

    with pytest.raises(DeclarationError, match="view some_hours: its function gives no column hour; it gives page, hour_of_day"):
        answered(spark, some_hours)


def no_such_name(events: DataFrame) -> DataFrame:
    few = events.select("page", "at")
    return few.select("pgae", F.col("at").alias("hour"))


def no_such_attribute(events: DataFrame) -> DataFrame:
    few = events.select("page", "at")
    return events.select(events.paeg, few["at"].alias("hour"))


def no_such_name_to_join_on(events: DataFrame) -> DataFrame:
    few = events.select("page", "at")
    return few.join(few, on="pag", how="inner")


def no_such_function(events: DataFrame) -> DataFrame:
    few = events.select("page", "at")
    return few.select(F.colum("page"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_such_name, "there is no column pgae; the nearest are page, at"),
        (no_such_attribute, "there is no column paeg; the nearest are page, "),
        (no_such_name_to_join_on, "there is no column pag; the nearest are page, at"),
        (no_such_function, "AttributeError: module 'pyspark.sql.functions' has no attribute 'colum'"),
    ],
)
def test_a_mistake_in_a_function_is_one_sentence_with_its_place(spark: SparkSession, function: Any, says: str) -> None:
    line = function.__code__.co_firstlineno + 2
    with pytest.raises(DeclarationError) as told:
        answered(spark, function)
    assert str(told.value).startswith(f"view {function.__name__}: {__file__}:{line}: {says}")


def test_a_function_that_returns_no_frame_is_one_sentence_with_its_place(spark: SparkSession) -> None:
    def forgetful(events):
        events.select("page", F.col("at").alias("hour"))

    def grouped(events):
        return events.groupBy("page", F.col("at").alias("pane"))

    begins = [f.__code__.co_firstlineno for f in (forgetful, grouped)]
    end = "and no DataFrame; end it with: return …"
    with pytest.raises(DeclarationError) as told:
        answered(spark, forgetful)
    assert str(told.value) == f"view forgetful: {__file__}:{begins[0]}: its function returns None {end}"
    panes = rollup(reads={"events": WIDE}, key=("page", "pane"), time="pane", merge={"n": "max"})(grouped)
    with pytest.raises(DeclarationError) as told:
        fold.roll(panes, {"events": fold.empty(spark, WIDE)})
    assert str(told.value) == f"rollup grouped: {__file__}:{begins[1]}: its function returns a GroupedData {end}"


@pytest.mark.parametrize("column", ["settled", "day"])
def test_a_view_that_gives_a_column_of_the_platform_is_refused_by_name(spark, column):
    found = {d.name: s for d, s in fold.schemas(spark, catalog([sound_pipeline(column)]))}
    said = f"view sound: column {column} is a name that the platform uses; choose another"
    assert str(found["sound"]) == said and isinstance(found["sound"], DeclarationError)


def test_inputs_are_cut_to_the_period_typed_once_and_merged(spark):
    log = fold.judged(
        WIDE,
        records(
            spark,
            [
                event(id="before", at="2026-11-16T23:59:59.999Z"),
                event(id="in", at="2026-11-17T00:00:00Z", page="/first"),
                event(id="in", at="2026-11-17T00:00:00Z", page="/again"),
                event(id="after", at="2026-11-18T00:00:00Z"),
                event(id="wrong", at="2026-11-17T00:00:00Z", page=1),
            ],
        ),
    )
    rows = fold.roll(everything, {"views": fold.accepted(WIDE, log)})
    tables = {"wide": log, "everything": rows.unionByName(rows)}
    bounds = spark.createDataFrame([(START, END)], "start TIMESTAMP, end TIMESTAMP")
    found = fold.inputs({"events": WIDE, "panes": everything}, lambda d, low, high: tables[d.name], START, END, bounds, bounds)
    assert [(r["id"], r["page"]) for r in found["events"].collect()] == [("in", "/first")]
    assert sorted(r["page"] for r in found["panes"].collect()) == ["/again", "/first"]
    # What has each key once already is not merged again: here it has not, so that it shows.
    whole = fold.inputs({"panes": everything}, lambda *_: tables["everything"], START, END, bounds, bounds, merged=True)
    assert whole["panes"].columns == found["panes"].columns
    assert sorted(r["page"] for r in whole["panes"].collect()) == ["/again", "/again", "/first", "/first"]
    assert found["events"].columns == [c.name for c in WIDE.columns]


@pytest.mark.parametrize("told", ["at", "kafka.timestamp"])
def test_an_id_that_is_told_again_in_the_margin_is_of_the_time_it_had_first(spark, told):
    """A night looks at the end of the day before, a replay at all of it: both take the same one. What is live may not.

    day  [ 16 ----- x 10:00 ------ [23:45 - x, y 23:50 )[ 17 ----- z 10:00 ------)
    """
    topic, day = replace(WIDE, event_time=told), "2026-11-{}:00Z".format
    times = [("x", day("16T10:00")), ("x", day("16T23:50")), ("y", day("16T23:50")), ("z", day("17T10:00"))]
    log = fold.judged(topic, records(spark, [(event(id=i, at=at), datetime.fromisoformat(at)) for i, at in times]))
    low = START - timedelta(minutes=15)
    bounds = spark.createDataFrame([(low, END)], "start TIMESTAMP, end TIMESTAMP")
    settled, live = (
        fold.inputs({"events": topic}, lambda *_: log, low, END, bounds, bounds, live=live)["events"] for live in (False, True)
    )
    assert settled.columns == live.columns == [c.name for c in topic.columns]
    assert sorted(r["id"] for r in settled.collect()) == ["y", "z"]
    assert sorted(r["id"] for r in live.collect()) == ["x", "y", "z"]  # which knows of no 10:00: it reads some files alone


@pytest.mark.parametrize("said", ["to_timestmp(page)", "at +", "page, at", "array(at)"])
def test_an_event_time_of_which_spark_makes_no_time_is_refused_with_its_topic(spark: SparkSession, said: str) -> None:
    pipeline = SimpleNamespace(__name__="pipeline", a=replace(WIDE, event_time=said))
    [(_, found)] = fold.schemas(spark, catalog([pipeline]))
    assert isinstance(found, DeclarationError)
    assert str(found).startswith(f"topic wide: event_time {said} gives no time ([") and "write a column" in str(found)


def test_an_event_time_that_gives_none_refuses_the_stream_that_reads_the_topic_and_no_other(
    spark: SparkSession, settings: Settings
) -> None:
    broken = replace(WIDE, name="broken", event_time="to_timestmp(page)", stream="other")

    @view(reads={"events": WIDE}, key=("page", "hour"), time="hour")
    def sound(events):
        return events.select("page", F.col("at").alias("hour"))

    @view(reads={"events": broken}, key=("page", "hour"), time="hour")
    def lost(events):
        return events.select("page", F.col("at").alias("hour"))

    declared = catalog([SimpleNamespace(__name__="pipeline", a=WIDE, b=broken, c=sound, d=lost)])
    main, other = (speed.Stream(settings, declared, name, settings.state / name) for name in ("main", "other"))
    main.spark = other.spark = spark
    with pytest.raises(DeclarationError, match=r"^topic broken: event_time to_timestmp\(page\) gives no time"):
        other.make_tables()
    main.make_tables()
    assert main.tables.keys() == {"wide", "sound"}
    assert main.set_aside["broken"].startswith("topic broken: event_time to_timestmp(page) gives no time")
    assert main.set_aside["lost"] == "lost reads broken, which failed"


def test_a_column_that_merges_by_distinct_and_is_no_set_is_refused_by_name(spark: SparkSession) -> None:
    def counted(views: DataFrame) -> DataFrame:
        return views.groupBy("page", F.date_trunc("hour", "at").alias("pane")).agg(F.count("id").alias("n"))

    bad = rollup(reads={"views": WIDE}, key=("page", "pane"), time="pane", merge={"n": "distinct"})(counted)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([SimpleNamespace(__name__="pipeline", a=WIDE, b=bad)]))}
    assert isinstance(found["counted"], DeclarationError)
    assert (
        str(found["counted"]) == "rollup counted: column n merges by distinct and is a BIGINT; make the set by functions.distinct"
    )


def test_what_reads_a_failed_declaration_fails_with_it_and_the_rest_goes_on(spark):
    def broken(views):
        return views.groupBy("no_such_column").count()

    def over_broken(rows):
        return rows

    def sound(events):
        return events.select("page", F.col("at").alias("hour"))

    bad = rollup(reads={"views": WIDE}, key=("page", "pane"), time="pane", merge={"n": "max"})(broken)
    after = view(reads={"rows": bad}, key=("page", "pane"), time="pane")(over_broken)
    good = view(reads={"events": WIDE}, key=("page", "hour"), time="hour")(sound)

    pipeline = SimpleNamespace(__name__="pipeline", a=WIDE, b=bad, c=after, d=good)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([pipeline]))}
    assert "no_such_column" in str(found["broken"])
    assert str(found["over_broken"]) == "over_broken reads broken, which failed"
    assert found["sound"].fieldNames() == ["page", "hour", "settled", "day"]
    assert found["wide"].fieldNames()[-3:] == ["kafka", "reject", "day"]


def sound_pipeline(column: str, reads: str = "page") -> SimpleNamespace:
    def sound(events):
        return events.select(reads, F.col("at").alias("hour"), F.lit(1).alias(column))

    good = view(reads={"events": WIDE}, key=("page", "hour"), time="hour")(sound)
    return SimpleNamespace(__name__="pipeline", a=WIDE, b=good)


def test_schemas_are_analyzed_once_for_the_same_code(spark, tmp_path, monkeypatch):
    file, declared = tmp_path / "schemas.json", catalog([sound_pipeline("n")])
    analyzed = [(d.name, s) for d, s in fold.schemas(spark, declared)]
    assert [(d.name, s) for d, s in fold.remembered_schemas(spark, declared, file)] == analyzed
    with monkeypatch.context() as patch:
        patch.setattr(fold, "schemas", None)
        again = [(d.name, s) for d, s in fold.remembered_schemas(spark, declared, file)]
    assert again == analyzed
    assert [s.json() for _, s in again] == [s.json() for _, s in analyzed]  # what is said of columns, too

    changed = {d.name: s for d, s in fold.remembered_schemas(spark, catalog([sound_pipeline("m")]), file)}
    assert changed["sound"].fieldNames() == ["page", "hour", "m", "settled", "day"]
    file.write_text(file.read_text()[:-40])
    assert [(d.name, s) for d, s in fold.remembered_schemas(spark, declared, file)] == analyzed


def test_remembered_schemas_say_the_zone_of_now(spark, berlin, tmp_path):
    file, declared = tmp_path / "schemas.json", catalog([sound_pipeline("n")])
    for zone in ("UTC", "Europe/Berlin"):
        spark.conf.set("spark.tidemark.zone", zone)
        found = {d.name: s for d, s in fold.remembered_schemas(spark, declared, file)}
        assert found["sound"]["day"].metadata == {"comment": f"the business day, {zone}"}


def test_nothing_is_remembered_where_a_declaration_failed_or_where_nothing_can_be_written(spark, tmp_path):
    file = tmp_path / "schemas.json"
    found = {d.name: s for d, s in fold.remembered_schemas(spark, catalog([sound_pipeline("n", "no_such")]), file)}
    assert "no_such" in str(found["sound"]) and not file.exists()
    nowhere = tmp_path / "no" / "folder.json"
    assert len([*fold.remembered_schemas(spark, catalog([sound_pipeline("n")]), nowhere)]) == 2

    made = dict[str, Any]()
    exec("def typed_in(events):\n    return events.select('page', events['at'].alias('hour'))", made)
    shown = view(reads={"events": WIDE}, key=("page", "hour"), time="hour")(made["typed_in"])  # it has no source
    declared = catalog([SimpleNamespace(__name__="pipeline", a=WIDE, b=shown)])
    found = {d.name: s for d, s in fold.remembered_schemas(spark, declared, file)}
    assert found["typed_in"].fieldNames() == ["page", "hour", "settled", "day"] and not file.exists()


def test_a_column_says_its_meaning_then_the_zone_of_its_time_and_a_set_what_it_is(berlin):
    topic = replace(WIDE, schema="id STRING NOT NULL COMMENT 'who', at TIMESTAMP COMMENT 'by a clock', born DATE, seen TIMESTAMP")
    merge = {"ids": "distinct", "names": "distinct", "n": "max"}

    @rollup(reads={"views": topic}, key=("pane",), time="pane", merge=merge, comments={"names": "names, a sketch"})
    def panes(views): ...

    def said(declared, columns):
        return {f.name: f.metadata.get("comment") for f in fold.described(declared, StructType.fromDDL(columns))}

    log = said(topic, fold.log_schema(topic))
    assert log["kafka"].startswith("where the record comes from: partition, offset")
    assert log | {"kafka": ""} == {
        "id": "who",
        "at": "by a clock, UTC",
        "born": "Europe/Berlin",
        "seen": "UTC",
        "kafka": "",
        "reject": "why the record was not accepted; null when it was",
        "day": "the business day, Europe/Berlin",
    }
    assert said(panes, "pane TIMESTAMP, ids BINARY, names BINARY, n INT, day DATE") == {
        "pane": "UTC",
        "ids": "a set, as a theta sketch",
        "names": "names, a sketch",
        "n": None,
        "day": "the business day, Europe/Berlin",
    }


def test_every_column_of_every_table_says_what_it_means_and_an_amount_its_unit(spark):
    silent = []
    for declared, schema in fold.schemas(spark, CATALOG):
        for f in schema:
            meaning = f.metadata.get("comment", "").removesuffix("UTC")
            of_a_unit = re.search("currency|percent|new shares for an old one", f"{f.name}: {meaning}")
            if not meaning or (isinstance(f.dataType, DecimalType) and not of_a_unit):
                silent.append(f"{declared.name}.{f.name}")
    assert silent == [], "give each a comment: its meaning in a short phrase, and of an amount the unit"


@pytest.mark.parametrize(("time", "live", "wrong"), [("date", True, True), ("date", False, False), ("day", True, False)])
def test_a_live_view_of_days_calls_them_day(spark, time, live, wrong):
    def days(events):
        return events.select("page", F.to_date("at").alias(time))

    refresh = Live(every="1 second", back="1 hour") if live else None
    declared = view(reads={"events": WIDE}, key=("page", time), time=time, live=refresh)(days)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([SimpleNamespace(__name__="p", a=WIDE, b=declared)]))}
    said = "view days: its time date is a DATE; a live view calls such a column day"
    assert (str(found["days"]) == said) is wrong and isinstance(found["days"], Exception) is wrong


def test_a_rollup_may_be_of_business_days(spark):
    def days(views):
        return views.groupBy("page", functions.day("at").alias("date")).agg(F.max("n").alias("n"))

    declared = rollup(reads={"views": WIDE}, key=("page", "date"), time="date", merge={"n": "max"})(days)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([SimpleNamespace(__name__="p", a=WIDE, b=declared)]))}
    assert found["days"].fieldNames() == ["page", "date", "n", "day"]


@pytest.mark.parametrize(
    ("time", "made", "found"),
    [
        ("day", "date_trunc('day', at)", "TIMESTAMP"),
        ("day", "date_format(at, 'yyyy-MM-dd')", "STRING"),
        ("date", "date_format(at, 'yyyy-MM-dd')", "STRING"),
        ("hour", "CAST(date_trunc('hour', at) AS TIMESTAMP_NTZ)", "TIMESTAMP_NTZ"),
    ],
)
def test_a_time_that_is_no_instant_and_no_business_day_is_refused(spark, time, made, found):
    def shown(events):
        return events.select("page", F.expr(made).alias(time))

    def rolled(views):
        return views.groupBy("page", F.expr(made).alias(time)).agg(F.max("n").alias("n"))

    declared: list[Any] = [view(reads={"events": WIDE}, key=("page", time), time=time)(shown)]
    if time != "day":
        declared.append(rollup(reads={"views": WIDE}, key=("page", time), time=time, merge={"n": "max"})(rolled))
    kept = {str(n): d for n, d in enumerate([WIDE, *declared])}
    said = {d.name: str(s) for d, s in fold.schemas(spark, catalog([SimpleNamespace(__name__="p", **kept)]))}
    for one in declared:
        owner = f"{type(one).__name__.lower()} {one.name}"
        wanted = "an instant is a TIMESTAMP, a business day a DATE, of functions.day"
        assert said[one.name] == f"{owner}: its time {time} is a {found}; {wanted}"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (Announce("{page} {pages}"), "view told: announces pages, which it has not; it has page, hour, settled, day"),
        (Announce("t", mention=("all",), mention_if="new"), "view told: announces new, which it has not"),
        (
            Announce("t", mention=("all",), mention_if="page"),
            "view told: mention_if='page' is string; it must be a BOOLEAN",
        ),
        (Announce("{page:.2f}"), 'view told: announces "{page:.2f}", which does not fit its columns: Unknown format code'),
        (Announce("{page:>9} {hour:%H} {day:%d} {settled}", mention=("all",), mention_if="settled"), None),
    ],
)
def test_an_announcement_must_fit_the_columns_of_its_view(spark, said, sentence):
    def told(events):
        return events.select("page", F.col("at").alias("hour"))

    live = Live(every="1 second", back="1 hour")
    declared = view(reads={"events": WIDE}, key=("page", "hour"), time="hour", live=live, announce=said)(told)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([SimpleNamespace(__name__="p", a=WIDE, b=declared)]))}
    assert isinstance(found["told"], Exception) == (sentence is not None)
    assert sentence is None or str(found["told"]).startswith(sentence)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        ("map(page, 1)", "MAP<STRING,INT>"),
        ("array(map(page, 1))", "MAP<STRING,INT>"),
        ("named_struct('of', named_struct('pages', map(page, 1)))", "MAP<STRING,INT>"),
        ("parse_json('[1]')", "VARIANT"),
        ("NULL", "VOID"),
        ("INTERVAL '1' DAY", "INTERVAL DAY"),
        ("make_interval(1)", "INTERVAL"),
        ("page COLLATE UTF8_LCASE", "STRING COLLATE UTF8_LCASE"),  # to which `a` is `A`
        ("array_sort(map_entries(map(page, 1)))", None),
        ("array(named_struct('n', 1.50, 'at', at, 'bytes', page::BINARY))", None),
        ("named_struct('day', DATE '2026-11-18', 'ntz', TIMESTAMP_NTZ '2026-11-18 10:00:00', 'x', 1.5e0, 'new', true)", None),
    ],
)
def test_a_column_in_which_no_comparison_finds_a_difference_is_refused(spark, made, wrong):
    def shown(events):
        return events.select("page", F.col("at").alias("hour"), F.expr(made).alias("made"))

    def rolled(views):
        return views.groupBy("page", F.col("at").alias("pane")).agg(F.first(F.expr(made)).alias("made"))

    one = view(reads={"events": WIDE}, key=("page", "hour"), time="hour")(shown)
    other = rollup(reads={"views": WIDE}, key=("page", "pane"), time="pane", merge={"made": "max"})(rolled)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([SimpleNamespace(__name__="p", a=WIDE, b=one, c=other)]))}
    for owner in ("view shown", "rollup rolled"):
        said = found[owner.split()[1]]
        assert isinstance(said, Exception) == (wrong is not None), said
        assert wrong is None or str(said).startswith(f"{owner}: column made is {wrong}, in which no comparison would find")


# ------------------------------------------------------------------------------------------------- tables and their changes

USERS = Topic(
    "users",
    key="name",
    partitions=2,
    schema="name STRING NOT NULL, address STRING NOT NULL, changed_at TIMESTAMP NOT NULL",
    event_time="changed_at",
    compacted=True,
)
NUMBERED = Topic(
    "numbered",
    key="number",
    partitions=2,
    schema="id STRING NOT NULL, number BIGINT NOT NULL, changed_at TIMESTAMP NOT NULL",
    id="id",
    event_time="changed_at",
    compacted=True,
)


def user(name: str, address: str, minute: int) -> bytes:
    return json.dumps({"name": name, "address": address, "changed_at": f"2026-11-18T11:{minute:02d}:00Z"}).encode()


def placed(spark, *rows):
    """Kafka records, from (key, value, partition, offset) and, of some, the header `event_time`."""
    whole = [
        ("users", key, value, partition, offset, NOON + offset * MILLI, [("event_time", told[0])] if told else None)
        for key, value, partition, offset, *told in rows
    ]
    return spark.createDataFrame(whole, RECORDS)


def test_a_tombstone_is_accepted_with_kafkas_key_and_the_time_of_its_header_or_of_kafka(spark):
    records_ = placed(spark, (b"ann", None, 0, 0), (b"bob", None, 0, 1, b"2026-11-17T10:00:00+01:00"))
    rows = fold.judged(USERS, records_).orderBy("kafka.offset").toArrow().to_pylist()
    assert [(r["name"], r["address"], r["changed_at"], r["reject"], r["event_time"], r["day"]) for r in rows] == [
        ("ann", None, None, None, NOON, date(2026, 11, 18)),
        ("bob", None, None, None, datetime(2026, 11, 17, 9, tzinfo=UTC), date(2026, 11, 17)),
    ]


def test_what_ends_no_key_or_is_under_another_one_is_rejected(spark):
    event = b'{"id": "e", "number": 7, "changed_at": "2026-11-18T11:00:00Z"}'
    cases = {
        (b"7", event): None,
        (b"7", None): None,
        (b"8", event): "number: Kafka's key is another one",
        (None, event): "number: Kafka's key is another one",
        (b"7", b""): "empty value",
        (None, None): "number: wanted BIGINT as Kafka's key of a tombstone",
        (b"007", None): "number: wanted BIGINT as Kafka's key of a tombstone",
        (b"seven", None): "number: wanted BIGINT as Kafka's key of a tombstone",
        (b"\xff", None): "number: wanted BIGINT as Kafka's key of a tombstone",
        (b"7", None, b"yesterday"): "header event_time: wanted TIMESTAMP (ISO 8601 with a zone)",
        (b"7", None, b"2026-11-17T10:00:00"): "header event_time: wanted TIMESTAMP (ISO 8601 with a zone)",
        (b"7", None, b"1999-12-31T23:59:59Z"): "event time is before the year 2000",
        (b"7", None, b"2026-11-18T12:06Z"): "event time is more than 5 minutes after Kafka's timestamp",
    }
    rows = [(key, value, 0, n, *told) for n, (key, value, *told) in enumerate(cases)]
    found = fold.judged(NUMBERED, placed(spark, *rows)).orderBy("kafka.offset").toArrow().to_pylist()
    assert [r["reject"] for r in found] == list(cases.values())
    assert [r["number"] for r in found[:2]] == [7, 7]


def before(spark, end: datetime):
    return spark.createDataFrame([(OLD, end)], "start TIMESTAMP, end TIMESTAMP")


OLD = datetime(2000, 1, 1, tzinfo=UTC)


def table_of(spark, topic: Topic, end: datetime, *rows) -> list[tuple]:
    log, period = fold.judged(topic, placed(spark, *rows)), before(spark, end)
    found = fold.handed_in(topic, log, period, period)
    assert found.columns == [c.name for c in topic.columns]
    return sorted(tuple(r.values())[:2] for r in found.toArrow().to_pylist())


def test_a_table_has_the_last_row_of_each_key_and_no_key_that_ended(spark):
    rows = (
        (b"ann", user("ann", "Ulm", 1), 0, 0),
        (b"bob", user("bob", "Ulm", 2), 1, 0),
        (b"ann", user("ann", "Jena", 3), 0, 1),
        (b"eve", user("eve", "Kiel", 4), 0, 2),
        (b"eve", None, 0, 3, b"2026-11-18T11:05:00Z"),
        (b"bob", None, 1, 1, b"2026-11-18T11:06:00Z"),
        (b"bob", user("bob", "Bonn", 7), 1, 2),  # and came back
    )
    minute = lambda n: NOON.replace(hour=11, minute=n)  # noqa: E731
    assert table_of(spark, USERS, minute(8), *rows) == [("ann", "Jena"), ("bob", "Bonn")]
    assert table_of(spark, USERS, minute(7), *rows) == [("ann", "Jena")]  # the end is exclusive
    assert table_of(spark, USERS, minute(5), *rows) == [("ann", "Jena"), ("bob", "Ulm"), ("eve", "Kiel")]
    assert table_of(spark, USERS, minute(1), *rows) == []


def test_a_table_keeps_what_kafkas_compaction_keeps_also_when_time_runs_otherwise(spark):
    # The offset decides within a partition, whatever the events say; of two partitions what Kafka took last.
    assert table_of(
        spark,
        USERS,
        NOON,
        (b"ann", user("ann", "later", 9), 0, 5),
        (b"ann", user("ann", "last", 1), 0, 6),
        (b"bob", user("bob", "moved away", 9), 0, 7),
        (b"bob", user("bob", "moved in", 1), 1, 8),
    ) == [("ann", "last"), ("bob", "moved in")]


def test_a_table_has_the_greatest_offset_of_a_partition_though_kafkas_timestamp_runs_back(spark):
    rows = placed(spark, (b"ann", user("ann", "Ulm", 1), 0, 5), (b"ann", user("ann", "Jena", 1), 0, 6))
    back = rows.withColumn("timestamp", F.timestamp_seconds(F.unix_timestamp("timestamp") - F.col("offset")))
    period = before(spark, NOON)
    found = fold.handed_in(USERS, fold.judged(USERS, back), period, period)
    assert [r["address"] for r in found.toArrow().to_pylist()] == ["Jena"]


def test_a_stretch_that_its_producer_sends_again_leaves_the_table_as_it_was(spark):
    one, two = (f'{{"id": "{i}", "number": 7, "changed_at": "2026-11-18T11:00:0{i}Z"}}'.encode() for i in (1, 2))
    rows = [(b"7", value, 0, offset) for offset, value in enumerate((one, None, two) * 2)]
    assert table_of(spark, NUMBERED, NOON + SECOND, *rows[:3]) == [("2", 7)]
    assert table_of(spark, NUMBERED, NOON + SECOND, *rows) == [("2", 7)]


def test_changes_are_every_accepted_record_a_repeat_once_and_each_tombstone(spark):
    one, two = (f'{{"id": "{i}", "number": 7, "changed_at": "2026-11-18T11:00:0{i}Z"}}'.encode() for i in (1, 2))
    rows = ((b"7", one, 0, 0), (b"7", None, 0, 1), (b"7", two, 0, 2), (b"7", None, 0, 3), (b"7", one, 0, 4), (b"7", b"{", 0, 5))
    log = fold.judged(NUMBERED, placed(spark, *rows))
    found = fold.changes(NUMBERED, log, before(spark, NOON + SECOND))
    assert found.columns == ["id", "number", "changed_at", "event_time", "tombstone", "kafka"]
    assert [(r["id"], r["tombstone"], r["kafka"]["offset"]) for r in found.orderBy("kafka.offset").collect()] == [
        ("1", False, 0),
        (None, True, 1),
        ("2", False, 2),
        (None, True, 3),
    ]


def test_a_view_of_a_table_is_asked_day_by_day_however_many_days_are_computed_at_once(spark):
    #   [17th ------ Ulm I)[18th ------ Jena I)
    def people(users, period):
        return users.crossJoin(period.select(functions.day("start").alias("day")))

    declared = view(reads={"users": USERS}, key=("name", "day"), time="day")(people)
    rows = ((b"ann", None, 0, 0, b"2026-11-16T00:00:00Z"), (b"ann", user("ann", "Jena", 1), 0, 2))
    ulm = user("ann", "Ulm", 1).replace(b"2026-11-18", b"2026-11-17")
    log = fold.judged(USERS, placed(spark, rows[0], (b"ann", ulm, 0, 1), rows[1]))
    found = fold.answers(spark, declared, declared, lambda *_: log, START, datetime(2026, 11, 19, tzinfo=UTC), settled=True)
    assert sorted((str(r["day"]), r["address"]) for r in found.collect()) == [("2026-11-17", "Ulm"), ("2026-11-18", "Jena")]


@pytest.mark.parametrize(("zone", "hours"), [("UTC", (24, 24, 6)), ("Europe/Berlin", (22, 25, 7))])
def test_days_of_a_period_end_at_midnight_of_the_business_zone(spark, zone, hours):
    start = datetime(2026, 10, 24, tzinfo=UTC)
    spark.conf.set("spark.tidemark.zone", zone)
    try:
        found = list(fold.days_of(start, start + timedelta(hours=54)))
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")
    assert tuple((b - a) // timedelta(hours=1) for a, b in found) == hours
    assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]


def test_a_rollup_over_changes_is_handed_tombstones_too(spark):
    def seen(changes):
        return changes.groupBy("name", functions.pane("event_time", "1 minute").alias("minute")).agg(
            functions.distinct(functions.position()).alias("changes"), F.max("tombstone").alias("ended")
        )

    declared = rollup(
        reads={"changes": USERS.changes}, key=("name", "minute"), time="minute", merge={"changes": "distinct", "ended": "max"}
    )(seen)
    log = fold.judged(USERS, placed(spark, (b"ann", user("ann", "Ulm", 0), 0, 0), (b"ann", None, 0, 1)))
    found = fold.merge(declared, fold.roll(declared, {"changes": fold.accepted(USERS, log)}))
    assert sorted((r["minute"].minute, r["ended"]) for r in found.collect()) == [(0, False), (0, True)]


def test_spans_of_ledger_rows_are_by_topic_and_partition():
    rows = [
        {"topic": "a", "partition": 0, "from_offset": 5, "until_offset": 9},
        {"topic": "a", "partition": 0, "from_offset": 0, "until_offset": 5},
        {"topic": "b", "partition": 3, "from_offset": 7, "until_offset": 8},
    ]
    assert fold.spans(rows) == {"a": {"0": [0, 9]}, "b": {"3": [7, 8]}}


def test_offsets_hold_their_from_and_not_their_until(spark):
    log = fold.judged(WIDE, records(spark, [event()] * 4).unionByName(records(spark, [event()] * 2, partition=1)))
    found = fold.within_offsets(log, {"0": [1, 3]})
    assert sorted((r["kafka"]["partition"], r["kafka"]["offset"]) for r in found.collect()) == [(0, 1), (0, 2)]
    assert fold.within_offsets(log, {}).count() == 0


def test_rows_of_several_frames_come_in_one_job_and_apart(spark):
    noon = datetime(2026, 11, 18, 12, tzinfo=UTC)
    ones = spark.range(3).select("id", F.lit(noon).alias("at"), F.struct(F.lit("a").alias("b")).alias("kafka"))
    twos = spark.range(2).select(F.lit(None).cast("string").alias("id"), F.array(F.lit(1)).alias("numbers"))
    found = fold.together({"ones": ones, "none": twos.where("id = 'x'"), "twos": twos}, {})
    assert {name: sorted(rows.to_pylist(), key=lambda r: r["id"] or 0) for name, rows in found.items()} == {
        "ones": [{"id": n, "at": noon, "kafka": {"b": "a"}} for n in range(3)],
        "none": [],
        "twos": [{"id": None, "numbers": [1]}] * 2,
    }
    assert [rows.schema.types for rows in found.values()] == [f.toArrow().schema.types for f in (ones, twos, twos)]
    assert fold.together({}, {}) == {}  # a stream's first batch over topics that hold nothing yet


def test_another_choice_of_frames_is_no_new_code_to_compile(spark):
    frames = {n: spark.range(3).groupBy((F.col("id") % 2).alias(n)).agg(F.sum("id").alias("sum")) for n in ("a", "b", "c")}
    compiled = spark._jvm.org.apache.spark.metrics.source.CodegenMetrics.METRIC_COMPILATION_TIME()
    options = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
    before = {name: spark.conf.get(name) for name in options}
    try:
        for name, value in options.items():
            spark.conf.set(name, value)
        places: dict = {}
        fold.together(frames, places)
        count = compiled.getCount()
        for chosen in (("a", "c"), ("b",), ("c", "b")):
            found = fold.together({name: frames[name] for name in chosen}, places)
            assert {name: sorted(rows["sum"].to_pylist()) for name, rows in found.items()} == {name: [1, 2] for name in chosen}
        assert compiled.getCount() == count > 0
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
