"""The business day at its edges: midnight, month, leap day and both clock changes, a millisecond before and after."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from laws import TOOK, log_of
from pyspark.sql import Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from structlog.testing import capture_logs

from tidemark import compare, fold, kafka, lake, local, query, repair, session, settle, speed
from tidemark.functions import day, distinct, how_many, pane
from tidemark.lake import File, Pin, Run
from tidemark.model import Catalog, Rollup, Topic, View, catalog, expect, looking_at, rollup, view
from tidemark.settings import Settings

MILLI = timedelta(milliseconds=1)
NOW = datetime.now(UTC)

#                zone               the day            begins at (UTC)       hours
DAYS = [
    ("UTC", date(2026, 12, 31), "2026-12-31T00:00", 24),
    ("UTC", date(2027, 1, 1), "2027-01-01T00:00", 24),
    ("Asia/Shanghai", date(2026, 2, 28), "2026-02-27T16:00", 24),
    ("Asia/Shanghai", date(2026, 3, 1), "2026-02-28T16:00", 24),  # no leap year: March follows
    ("Asia/Shanghai", date(2028, 2, 29), "2028-02-28T16:00", 24),
    ("Asia/Shanghai", date(2028, 3, 1), "2028-02-29T16:00", 24),
    ("Asia/Kolkata", date(2026, 6, 1), "2026-05-31T18:30", 24),
    ("Europe/Berlin", date(2026, 3, 29), "2026-03-28T23:00", 23),  # the clock goes forward
    ("Europe/Berlin", date(2026, 3, 30), "2026-03-29T22:00", 24),
    ("Europe/Berlin", date(2026, 10, 25), "2026-10-24T22:00", 25),  # and back
    ("Europe/Berlin", date(2026, 10, 26), "2026-10-25T23:00", 24),
]


@pytest.mark.parametrize(("zone", "which", "begins", "hours"), DAYS)
def test_day_begins_and_ends_at_the_zone_s_midnight(spark, zone, which, begins, hours):
    start = datetime.fromisoformat(begins).replace(tzinfo=UTC)
    end = start + timedelta(hours=hours)
    assert settle.period(Settings(_env_file=None, zone=zone), which) == (start, end)

    #    day before   [ which                ]  day after
    edges = [start - MILLI, start, start + MILLI, end - MILLI, end, end + MILLI]
    spark.conf.set("spark.tidemark.zone", zone)
    try:
        frame = spark.createDataFrame(pa.table({"at": pa.array(edges, pa.timestamp("us", "UTC"))}))
        found = frame.orderBy("at").select(day("at").alias("day")).toArrow()["day"].to_pylist()
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")
    one = timedelta(days=1)
    assert found == [which - one, which, which, which, which + one, which + one]
    assert [at.astimezone(ZoneInfo(zone)).date() for at in edges] == found


def test_days_that_follow_each_other_are_one_stretch():
    days = [date(2026, 2, 27), date(2026, 3, 1), date(2026, 2, 28), date(2026, 3, 3), date(2026, 3, 3)]
    assert compare.stretches(days) == [(date(2026, 2, 27), date(2026, 3, 1)), (date(2026, 3, 3), date(2026, 3, 3))]


def at(hour: int) -> datetime:
    return datetime(2026, 11, 19, hour, tzinfo=UTC)


@pytest.mark.parametrize(
    ("held", "left"),
    [
        #   [low        high)            of 10 to 20
        ([], [(10, 20)]),
        ([(10, 20)], []),
        ([(8, 22)], []),
        ([(12, 14), (16, 18)], [(10, 12), (14, 16), (18, 20)]),
        ([(8, 12)], [(12, 20)]),
        ([(18, 22)], [(10, 18)]),
        ([(1, 5), (21, 22)], [(10, 20)]),
    ],
)
def test_what_lies_outside_the_run_s_days(held, left):
    spans = [(at(a), at(b)) for a, b in held]
    assert settle.without((at(10), at(20)), spans) == [(at(a), at(b)) for a, b in left]


def test_chunks_hold_about_so_many_records_and_never_skip_a_day(settings, monkeypatch):
    from tidemark.pipelines import traffic

    first = date(2026, 11, 1)
    rows = {first + timedelta(days=n): count for n, count in enumerate((3, 3, 3, 10, 1, 1))}
    files = [File(f"live/main-0-0-x/{d}", 1, n, d, 0) for d, n in rows.items()]
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda _: files)
    own = settings.model_copy(update={"chunk_records": 6})
    days = [*rows, first + timedelta(days=9)]
    found = [(int(a[-2:]), int(b[-2:])) for a, b in settle.chunks_of(own, catalog([traffic]), days)]
    assert found == [(1, 2), (3, 3), (4, 4), (5, 6), (10, 10)]


@pytest.mark.parametrize("source", settle.LONG)
@pytest.mark.parametrize(("of_long", "optimize"), [(0.4, False), (0.5, True)])
def test_run_over_many_records_takes_a_jvm_that_optimizes(settings, monkeypatch, source, of_long, optimize):
    from tidemark.pipelines import traffic

    days, each = [date(2026, 11, 1), date(2026, 11, 2)], int(settle.LONG[source] * of_long)
    files = [File(f"live/main-0-0-x/{d}", 1, each, d, 0) for d in (*days, date(2026, 11, 3))]
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda _: files)
    run = Run("r", "running", [str(days[0])], "test", "", "", {}, kind="replay", source=source, open_days=[str(days[1])])
    found = []

    def session(*_, optimize):
        found.append(optimize)
        raise InterruptedError

    monkeypatch.setattr("tidemark.session.session", session)
    with pytest.raises(InterruptedError):
        settle.Settling(settings, catalog([traffic]), run, print).work()
    assert found == [optimize]


#   a price's view looks an hour back and ten minutes ahead; the days over it look two days back
PRICES = Topic("prices", key=None, partitions=1, schema="at TIMESTAMP NOT NULL", event_time="at")
OTHERS = Topic("others", key=None, partitions=1, schema="at TIMESTAMP NOT NULL", event_time="at")


@view(reads={"prices": PRICES}, key=("at",), time="at", lookback="1 hour", lookahead="10 minutes")
def closes(prices): ...


@view(reads={"closes": closes, "others": OTHERS}, key=("day",), time="day", lookback="2 days")
def moves(closes, others): ...


@view(reads={"prices": PRICES}, key=("day",), time="day", lookback="2 days")
def weeks(prices): ...


USERS = Topic("users", "name", 1, "name STRING NOT NULL, at TIMESTAMP NOT NULL", "at", compacted=True)


@view(reads={"prices": PRICES, "users": USERS.changes}, key=("at",), time="at", lookahead="10 minutes")
def owned(prices, users): ...


@view(reads={"users": USERS}, key=("day",), time="day")
def people(users): ...


CLOSES = catalog([type("closes", (), {"prices": PRICES, "others": OTHERS, "closes": closes, "moves": moves})])
WEEKS = catalog([type("weeks", (), {"prices": PRICES, "others": OTHERS, "moves": moves, "closes": closes, "weeks": weeks})])
ALONE = catalog([type("alone", (), {"prices": PRICES, "closes": closes})])
OWNED = catalog([type("owned", (), {"prices": PRICES, "users": USERS, "owned": owned})])
PEOPLE = catalog([type("people", (), {"users": USERS, "people": people})])
READ = {topic: {"0": 9} for topic in ("prices", "others", "users")}


def test_where_a_view_reads_a_table_a_chunk_is_a_month_at_most(settings, monkeypatch):
    monkeypatch.setattr(lake.Table, "exists", False)
    days = [date(2026, 1, 1) + timedelta(days=n) for n in range(365)]
    found = [(date.fromisoformat(b) - date.fromisoformat(a)).days + 1 for a, b in settle.chunks_of(settings, PEOPLE, days)]
    assert (max(found), sum(found)) == (31, 365)
    assert len(settle.chunks_of(settings, OWNED, days)) == 1  # a view of changes is asked at once


def test_what_looks_at_a_topic_is_told_behind_what_it_reads():
    assert looking_at(CLOSES, PRICES) == ("closes", "moves")
    assert looking_at(CLOSES, OTHERS) == ("moves",)


@pytest.mark.parametrize(
    ("topic", "late", "again"),
    [
        # the first five days of November are published, and the late event's batch is past their pin
        ("prices", "02T12:00:00", [2, 3, 4]),
        ("prices", "02T22:59:59", [2, 3, 4]),
        ("prices", "02T23:00:00", [2, 3, 4, 5]),
        ("prices", "02T00:10:00", [2, 3, 4]),
        ("prices", "02T00:09:59", [1, 2, 3, 4]),
        ("others", "02T00:00:00", [2, 3, 4]),
        ("others", "02T23:59:59", [2, 3, 4]),
    ],
)
def test_every_published_day_that_looks_at_a_late_event_is_settled_again(settings, monkeypatch, topic, late, again):
    at = datetime.fromisoformat(f"2026-11-{late}+00:00")
    file = File("live/main-7-7-x/day=2026-11-02/part-0.parquet", 1, 1, date(2026, 11, 2), 0, at, at)
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == f"log/{topic}" else [])
    days = [f"2026-11-{n:02d}" for n in range(1, 6)]
    pins, said = {"main": Pin("main", 6, READ, "")}, {name: {"published": "at one"} for name in ("closes", "moves")}
    run = Run("settle-1", "published", days, "", "", "", pins, said)
    monkeypatch.setattr(lake, "runs", lambda _: [run])
    assert [d.day for d in settle.stale(settings, CLOSES)] == again
    has_read_it = replace(run, pins={"main": Pin("main", 7, READ, "")})
    monkeypatch.setattr(lake, "runs", lambda _: [has_read_it])
    assert settle.stale(settings, CLOSES) == []


def test_a_late_event_in_a_file_that_someone_optimized_settles_its_day_again(settings, monkeypatch):
    """The file's name tells no batch any more; its offsets do."""
    table = lake.table(settings, PRICES)
    place = pa.struct([("partition", pa.int32()), ("offset", pa.int64())])
    columns = {
        "at": pa.array([datetime(2026, 11, 2, 12, tzinfo=UTC)] * 2, pa.timestamp("us", "UTC")),
        "kafka": pa.array([{"partition": 0, "offset": n} for n in (8, 9)], place),  # the pin has read 8, and not 9
        "reject": pa.array([None, None], pa.string()),
        "day": pa.array([date(2026, 11, 2)] * 2),
    }
    write_deltalake(str(table.path), pa.table(columns), partition_by=["day"])
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)
    before, after = ((datetime.now(UTC) + timedelta(days=n)).isoformat() for n in (-1, 1))
    run = Run("settle-1", "published", [f"2026-11-{n:02d}" for n in range(1, 6)], "", "", "", {})
    run.tables = {name: {"published": "at one"} for name in ("closes", "moves")}
    monkeypatch.setattr(lake, "runs", lambda _: [run])
    cases = ((9, before, before, [2, 3, 4]), (10, before, before, []), (9, after, after, []), (9, before, after, [2, 3, 4]))
    for offset, taken, other, again in cases:
        run.pins = {"main": Pin("main", 6, {"prices": {"0": offset}}, taken), "alarms": Pin("alarms", 6, {}, other)}
        assert [d.day for d in settle.stale(settings, CLOSES)] == again


def test_a_log_is_not_repaired_from_another_topic_of_its_name(settings, monkeypatch):
    log = lake.table(settings, PRICES)
    log.create(StructType().add("at", "timestamp").add("day", "date"))
    adds = lake.write_arrow(
        log, "live/main-0-0-x", pa.Table.from_pylist([{"at": NOW, "day": NOW.date()}], pa.schema(log.delta().schema()))
    )
    lake.append(log, lake.Batch("main", 0, 0), adds)
    (log.path / adds[0].path).unlink()
    log.belong_to("the one that was read")
    monkeypatch.setattr(kafka, "topic_ids", lambda *_: {"prices": "another"})
    [repaired] = repair.repair(settings, ALONE)
    assert "Kafka's topic prices is another than the one that it holds (its id is another, the stream" in str(repaired.then)
    log.belong_to("another")  # it says so once, for ever
    assert log.topic_id == "the one that was read"


#   the fifth day, whose prices are looked at until 00:10      ][ I 00:05   | the pin, of batch 6      I 00:50      batch 9
@pytest.mark.parametrize(
    ("unread", "again"),
    [
        ([(0, 9, "06T00:50", None)], []),
        ([(0, 9, "06T00:10", None)], []),
        ([(0, 9, "06T00:09:59.999", None), (0, 10, "06T00:50", None)], [5]),
        ([(1, 0, "06T00:05", None)], [5]),  # of a partition that is new since
        ([(1, 0, "06T00:50", None)], []),
        ([(0, 9, "06T00:05", "not JSON")], []),
    ],
)
def test_a_file_merged_across_a_pin_settles_again_the_days_that_look_at_what_came_after_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, unread: list[tuple[int, int, str, str | None]], again: list[int]
) -> None:
    log, place = lake.table(settings, PRICES), StructType().add("partition", "integer").add("offset", "long")
    log.create(StructType().add("at", "timestamp").add("kafka", place).add("reject", "string").add("day", "date"))
    rows = [
        {
            "at": datetime.fromisoformat(f"2026-11-{at}+00:00"),
            "kafka": {"partition": p, "offset": offset},
            "reject": reject,
            "day": date(2026, 11, 6),
        }
        for p, offset, at, reject in ((0, 7, "06T00:05", None), (0, 8, "06T00:20", None), *unread)
    ]
    adds = lake.write_arrow(log, "live/main-3-9-x", pa.Table.from_pylist(rows, pa.schema(log.delta().schema())))
    lake.append(log, lake.Batch("main", 9, 9), adds)
    days, said = [f"2026-11-{n:02d}" for n in range(1, 6)], {name: {"published": "at one"} for name in ("closes", "moves")}
    run = Run("settle-1", "published", days, "", "", "", {"main": Pin("main", 6, READ, "")}, said)
    monkeypatch.setattr(lake, "runs", lambda _: [run])
    assert [d.day for d in settle.stale(settings, CLOSES)] == again


def test_compaction_of_a_day_s_log_makes_the_day_before_no_stale_one(spark: Any, settings: Settings) -> None:
    #   the fifth day, which is published   ][ I 00:00   I 00:05   | the pin, of batch 1      I 00:10   …   I 01:05
    before, log = [f"2026-11-{n:02d}" for n in range(1, 6)], lake.table(settings, PRICES)
    for n in range(lake.WORTH_MERGING + 2):
        at = datetime(2026, 11, 6, tzinfo=UTC) + n * timedelta(minutes=5)
        logged(settings, spark, PRICES, [(0, n, at)], folder=f"live/main-{n}-{n}-x")
    run = Run("settle-1", "published", before, "", NOW.isoformat(), "", {"main": Pin("main", 1, {"prices": {"0": 2}}, "")})
    run.tables = {name: {"gate": "passed", "rows": 1, "published": NOW.isoformat()} for name in ("closes", "moves")}
    lake.save(settings, run)
    assert settle.stale(settings, CLOSES) == []
    assert lake.compact(spark, settings, log, None, {"main": lake.WORTH_MERGING + 1}) == lake.WORTH_MERGING - 1
    assert settle.stale(settings, CLOSES) == []
    spans = sorted((int(f.live["lo"]), int(f.live["hi"])) for f in log.files() if f.live)
    assert spans == [(0, 0), (1, 1), (2, lake.WORTH_MERGING + 1)]  # so that no night reads a file to know it


@pytest.mark.parametrize(("late", "earlier"), [("18:40", True), ("19:00", False)])
def test_where_midnight_cuts_an_hour_a_late_event_of_that_hour_settles_the_earlier_day_too(settings, monkeypatch, late, earlier):
    at, there = datetime.fromisoformat(f"2026-11-01T{late}+00:00"), settings.model_copy(update={"zone": "Asia/Kolkata"})
    file = File("live/main-7-7-x/day=2026-11-02/part-0.parquet", 1, 1, date(2026, 11, 2), 0, at, at)
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == "log/others" else [])
    pins, said = {"main": Pin("main", 6, READ, "")}, {name: {"published": "at one"} for name in ("closes", "moves")}
    run = Run("settle-1", "published", ["2026-11-01", "2026-11-02"], "", "", "", pins, said)
    monkeypatch.setattr(lake, "runs", lambda _: [run])
    assert settle.stale(there, CLOSES) == [date(2026, 11, n) for n in ((1, 2) if earlier else (2,))]


@view(reads={"prices": PRICES}, key=("day",), time="day", lookback="5 minutes")
def daily(prices): ...


@view(reads={"daily": daily}, key=("day",), time="day", lookback="1 day")
def change(daily): ...


@view(reads={"change": change}, key=("at",), time="at", lookback="12 hours")
def of_change(change): ...


@rollup(reads={"prices": PRICES}, key=("on",), time="on", merge={"last": "max"})
def dates(prices): ...


@view(reads={"dates": dates}, key=("at",), time="at", lookback="12 hours", lookahead="12 hours")
def of_dates(dates): ...


#   whoever looks at a part of a day of `daily`, of `change` or of `dates` is handed all of it
@pytest.mark.parametrize(
    ("zone", "late", "again"),
    [
        ("UTC", "25T10:00", {"daily": [25], "change": [25, 26], "of_change": [25, 26, 27], "of_dates": [24, 25, 26]}),
        ("UTC", "25T23:55", {"daily": [25, 26], "change": [25, 26, 27], "of_change": [25, 26, 27, 28], "of_dates": [24, 25, 26]}),
        # a day of 25 hours
        ("Europe/Berlin", "24T22:30", {"daily": [25], "change": [25, 26], "of_change": [25, 26, 27], "of_dates": [24, 25, 26]}),
    ],
)
def test_every_published_day_that_looks_at_a_whole_day_with_a_late_event_is_settled_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, zone: str, late: str, again: dict[str, list[int]]
) -> None:
    at, there = datetime.fromisoformat(f"2026-10-{late}+00:00"), settings.model_copy(update={"zone": zone})
    file = File("live/main-7-7-x/day=2026-10-25/part-0.parquet", 1, 1, date(2026, 10, 25), 0, at, at)
    lake.table(there, dates).create(StructType().add("on", "date").add("last", "timestamp").add("day", "date"))
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == "log/prices" else [])
    declared = {"daily": daily, "change": change, "of_change": of_change, "dates": dates, "of_dates": of_dates}
    of = catalog([type("days", (), {"prices": PRICES, **declared})])
    days, pins = [f"2026-10-{n}" for n in range(22, 31)], {"main": Pin("main", 6, READ, "")}
    for name, wanted in again.items():
        run = Run("settle-1", "published", days, "", "", "", pins, {name: {"published": "at one"}})
        monkeypatch.setattr(lake, "runs", lambda _, run=run: [run])
        assert [d.day for d in settle.stale(there, of)] == wanted


#   26th: settled from 04:00 on │           │ published at 07:00
@pytest.mark.parametrize(
    ("begun", "taken_back", "again"),
    [("03", "06", [26]), ("03", "09", [26]), ("05", "09", [26]), ("05", "06", [26]), ("01", "03", []), ("08", "09", [])],
)
def test_day_that_may_have_looked_at_a_publication_that_was_taken_back_is_settled_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, begun: str, taken_back: str, again: list[int]
) -> None:
    """Also at one that was begun after it, and published before it had read that day."""
    file = File("live/main-5-5-x/day=2026-10-25/part-0.parquet", 1, 1, date(2026, 10, 25), 0, None, None)
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == "log/prices" else [])
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    of, pins = (
        catalog([type("days", (), {"prices": PRICES, "daily": daily, "change": change})]),
        {"main": Pin("main", 6, READ, "")},
    )

    def settled(name: str, day: int, state: str, begun: str, mark: str, at: str) -> Run:
        tables = {view: {mark: f"2026-10-27T{at}"} for view in ("daily", "change")}
        return Run(name, state, [f"2026-10-{day}"], "", f"2026-10-27T{begun}", "", pins, tables)

    runs = [
        settled("first", 25, "published", "00", "published", "00"),
        settled("second", 26, "published", "04", "published", "07"),
        settled("third", 25, "rolled back", begun, "rolled_back", taken_back),
    ]
    monkeypatch.setattr(lake, "runs", lambda _: runs)
    assert [d.day for d in settle.stale(settings, of)] == again


@rollup(reads={"prices": PRICES}, key=("hour",), time="hour", merge={"times": "distinct"})
def hours(prices):
    return prices.groupBy(pane("at", "1 hour").alias("hour")).agg(distinct("at").alias("times"))


@view(reads={"hours": hours}, key=("day",), time="day", lookback="1 hour")
def of_hours(hours, period):
    return period.select(day("start").alias("day")).crossJoin(hours.agg(F.sum(how_many("times")).alias("prices")))


@view(reads={"prices": PRICES}, key=("day",), time="day", lookback="1 hour")
def of_prices(prices, period):
    return period.select(day("start").alias("day")).crossJoin(prices.agg(F.count("*").alias("prices")))


def over_two_prices(spark, settings, first: str, second: str) -> settle.Settling:
    """A settling of October 25 over the log of two prices."""
    return over(spark, settings, log_of(spark, PRICES, [{"at": first}, {"at": second}]))


def over(spark, settings, log) -> settle.Settling:
    """A settling of October 25 over a log."""
    settling = settle.Settling(settings, CLOSES, Run("r", "running", ["2026-10-25"], "test", "", "", {}), print)
    settling.spark, settling.log_of = spark, lambda topic, days: log.where(F.col("day").isin(list(days)))
    settling.outer = {declared.name: lake.table(settings, declared) for declared in (PRICES, hours)}
    return settling


def test_a_night_reads_rollups_and_topics_beyond_midnight(spark, settings):
    #   24th        23:50 I )[ 25th, which is settled alone        I 00:10
    settling = over_two_prices(spark, settings, "2026-10-24T23:50:00Z", "2026-10-25T00:10:00Z")
    start, end = settle.period(settings, date(2026, 10, 25))
    settling.kept = {hours.name: settling.rolled(hours, start, end)}
    asked = (fold.answers(spark, v, v, settling.read, start, end, settled=True, merged=True) for v in (of_hours, of_prices))
    assert [tuple(r) for found in asked for r in found.select("day", "prices").collect()] == [(date(2026, 10, 25), 2)] * 2


@pytest.mark.parametrize(
    ("let_go", "wanted"), [("2026-10-25", [2, 1, 2]), ("2026-10-24", [2, 1, 1]), ("2026-10-23", [1]), (None, [1])]
)
def test_a_night_finds_in_rollups_what_their_log_has_let_go(spark, settings, monkeypatch, let_go, wanted):
    #   rolled   23rd  22:10, 22:20 of two batches  23:10  24th  23:50 23:55      by hour 2 1 2
    #   the log                                            24th  23:50            [ 25th, which is settled alone
    def log(*at):
        return log_of(spark, PRICES, [{"at": f"2026-10-{one}:00Z"} for one in at])

    settling = over(spark, settings, log("24T23:50"))
    for n, told in enumerate((["23T22:10"], ["23T22:20", "23T23:10", "24T23:50", "24T23:55"])):
        rolled, table = fold.roll(hours, {"prices": fold.accepted(PRICES, log(*told))}), settling.outer["hours"]
        table.create(fold.schema_of(rolled))
        lake.append(table, batch := lake.Batch("main", n, n), lake.write_spark(table, batch.folder, rolled))
    monkeypatch.setattr(lake.Table, "expired_before", date.fromisoformat(let_go) if let_go else date.min)
    start, end = (settle.period(settings, date(2026, 10, n))[0] for n in (23, 25))
    found = settling.outside(hours, start, end).select("day", "hour", how_many("times").alias("n")).orderBy("hour").toArrow()
    assert found.column("n").to_pylist() == wanted
    assert all(hour.date() == day for day, hour in zip(found["day"].to_pylist(), found["hour"].to_pylist(), strict=True))


def test_where_midnight_cuts_a_pane_days_rolled_one_by_one_have_all_of_it_as_those_rolled_at_once(spark, settings):
    #   Kolkata  24th    I 23:50  )[ 25th     I 00:10
    #   UTC      [18:00  I 18:20   18:30      I 18:40   19:00)     a pane of the 24th
    there = settings.model_copy(update={"zone": "Asia/Kolkata"})
    spark.conf.set("spark.tidemark.zone", there.zone)
    try:
        settling = over_two_prices(spark, there, "2026-10-24T18:20:00Z", "2026-10-24T18:40:00Z")
        spans = [settle.period(there, date(2026, 10, n)) for n in (24, 25)]
        at_once, *one_by_one = (settling.rolled(hours, *s) for s in ((spans[0][0], spans[1][1]), *spans))
        for rows in (at_once, fold.union(one_by_one)):
            found = rows.select("day", "hour", how_many("times").alias("prices")).toArrow().to_pylist()
            assert found == [{"day": date(2026, 10, 24), "hour": datetime(2026, 10, 24, 18, tzinfo=UTC), "prices": 2}]
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")


#   24th  10:00 ---- 23:50  23:55 )[ 25th  00:05 ---- 10:00        a quarter of an hour to either side is looked at
@pytest.mark.parametrize(
    ("event_time", "told", "wanted"),
    [
        # A repeat as it was.
        ("at", "x 24T23:50, x 24T23:50, y 25T00:05", "24T23:50 x x y, 25T00:05 y x y"),
        # Another time: both in the margin, the first before it, the first within, and of the day after.
        ("at", "x 24T23:50, x 24T23:55, y 25T00:05", "24T23:50 x x y, 25T00:05 y x y"),
        ("at", "x 24T10:00, x 24T23:50, y 25T00:05", "24T10:00 x x, 25T00:05 y y"),
        ("at", "x 24T23:50, x 24T10:00, y 25T00:05", "24T23:50 x x y, 25T00:05 y x y"),
        ("at", "x 25T10:00, x 25T00:05, y 24T23:55", "24T23:55 y y, 25T10:00 x x"),
        # Of two days it is an event of each.
        ("at", "x 24T23:55, x 25T00:05", "24T23:55 x x x, 25T00:05 x x x"),
        # Where Kafka's is the time, an honest repeat has another one.
        ("kafka.timestamp", "x 24T10:00, x 24T23:50, y 25T00:05", "24T10:00 x x, 25T00:05 y y"),
        ("kafka.timestamp", "x 24T23:55, x 25T00:05", "24T23:55 x x x, 25T00:05 x x x"),
    ],
)
def test_nights_take_an_id_that_is_told_again_as_a_replay_of_their_days_does(spark, settings, event_time, told, wanted):
    topic = Topic("t", key="id", partitions=3, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL", id="id", event_time=event_time)

    @view(reads={"calls": topic}, key=("at", "id"), time="at", lookback="15 minutes", lookahead="15 minutes")
    def near(calls):
        around = Window.orderBy(F.unix_seconds("at")).rangeBetween(-900, 900)
        return calls.select("at", "id", F.array_join(F.sort_array(F.collect_list("id").over(around)), " ").alias("ids"))

    calls = [(one, f"2026-10-{at}:00Z") for one, at in map(str.split, told.split(", "))]
    took = [{TOOK: at} if event_time == "kafka.timestamp" else {} for _, at in calls]
    log = log_of(spark, topic, [{"id": one, "at": at, **its} for (one, at), its in zip(calls, took, strict=True)])
    read, (first, second) = over(spark, settings, log).read, (settle.period(settings, date(2026, 10, n)) for n in (24, 25))
    for spans in ([first, second], [(first[0], second[1])]):
        rows = fold.union([fold.answers(spark, near, near, read, *span, settled=True, merged=True) for span in spans])
        found = sorted(f"{r['at']:%dT%H:%M} {r['id']} {r['ids']}" for r in rows.toArrow().to_pylist())
        assert ", ".join(found) == wanted


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (OSError(28, "No space left on device"), True),
        (RuntimeError("An error occurred while calling o7.save: java.io.IOException: No space left on device"), True),  # by Spark
        (RuntimeError("[DIVIDE_BY_ZERO] Division by zero"), False),
    ],
)
def test_a_full_disk_ends_a_run_and_what_a_function_raises_fails_its_table(settings, monkeypatch, error, ends):
    """A run that ended goes on; one whose tables failed is staged, and is not done again."""

    def full(*_: Any, **__: Any) -> None:
        raise error

    run = Run("r", "running", ["2026-11-02"], "test", "", "", {}, chunks=[["2026-11-02", "2026-11-02"]])
    settling = settle.Settling(settings, CLOSES, run, print)
    schema = SimpleNamespace(schema=lambda: SimpleNamespace(fields=[]))
    settling.outer = {"closes": SimpleNamespace(delta=lambda: schema)}
    settling.give_way, settling.spark = lambda _: None, None
    monkeypatch.setattr(lake, "staged_upto", lambda *_: -1)
    monkeypatch.setattr(fold, "answers", full)
    with pytest.raises(type(error), match="No space") if ends else nullcontext():
        settling.stage(closes)
    assert ("closes" in settling.failed) is not ends


@pytest.mark.parametrize(("of", "again"), [(PEOPLE, [2, 3, 4, 5]), (OWNED, [1, 2, 3, 4, 5])])
def test_a_change_that_came_late_settles_every_published_day_from_its_own_on_again(settings, monkeypatch, of, again):
    # Of a table's log no file says its times, so what looks ahead of the day may look at any of its changes.
    file = File("live/main-7-7-x/day=2026-11-02/part-0.parquet", 1, 1, date(2026, 11, 2), 0)
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == "log/users" else [])
    run = Run("settle-1", "published", [f"2026-11-{n:02d}" for n in range(1, 6)], "", "", "", {"main": Pin("main", 6, READ, "")})
    run.tables = {view: {"published": "at one"} for view in of.views}
    monkeypatch.setattr(lake, "runs", lambda _: [run])
    assert [d.day for d in settle.stale(settings, of)] == again
    run.pins = {"main": Pin("main", 7, READ, "")}
    assert settle.stale(settings, of) == []


def logged(
    settings: Settings,
    spark: Any,
    topic: Topic,
    events: Sequence[tuple[int, int, datetime]],
    reject: str | None = None,
    folder: str = "live/main-5-5-x",
) -> lake.Table:
    """A topic's log with an event at each partition, offset and time, which its day is too."""
    log = lake.table(settings, topic)
    log.create(fold.schema_of(fold.nothing(spark, fold.log_schema(topic))))
    rows = [
        {
            "at": None if reject else at,
            "kafka": {"partition": p, "offset": o, "timestamp": at, "value": json.dumps({"at": at.isoformat()}).encode()},
            "reject": reject,
            "day": at.date(),
        }
        for p, o, at in events
    ]
    adds = lake.write_arrow(log, folder, pa.Table.from_pylist(rows, pa.schema(log.delta().schema())))
    seq = int(folder.split("-")[1]) if folder.startswith("live/main-") else 5
    lake.append(log, lake.Batch("main", seq, seq), adds)
    return log


def logs_of(settings: Settings, spark: Any, files: dict[str, Sequence[tuple[int, int, str | None]]]) -> lake.Table:
    """The log of prices with files by their folders: of each record partition, offset and why it was rejected."""
    log, at = lake.table(settings, PRICES), datetime(2026, 10, 25, 12, tzinfo=UTC)
    log.create(fold.schema_of(fold.nothing(spark, fold.log_schema(PRICES))))
    for n, (folder, records) in enumerate(files.items()):
        rows = [
            {"kafka": {"partition": p, "offset": o, "timestamp": at, "value": b"{}"}, "reject": reject, "day": at.date()}
            for p, o, reject in records
        ]
        adds = lake.write_arrow(log, folder, pa.Table.from_pylist(rows, pa.schema(log.delta().schema())))
        lake.append(log, lake.Batch("main", n, n), adds)
    return log


@pytest.mark.parametrize("part", [2_000_000, 1, 7])
def test_records_of_a_log_are_counted_by_duckdb_as_by_spark(spark, settings, monkeypatch, part):
    monkeypatch.setattr(settle, "PART", part)
    one = [(0, 3, None), (0, 63, "not JSON"), (0, 64, None), (0, 127, None), (2, 0, "empty value")]
    two = [(0, 64, None), (2, 1, None), (2, 2**40, None), (1, 5, None)]  # an offset of the other file again
    log = logs_of(settings, spark, {"live/main-1-1-a": one, "live/main-2-2-b": two})
    spans = {0: (4, 127), 2: (0, 2**41), 7: (0, 9)}
    wanted = [
        {"partition": 0, "low": 63, "high": 64, "accepted": 2, "rejected": 1, "there": 2},
        {"partition": 2, "low": 0, "high": 2**40, "accepted": 2, "rejected": 1, "there": 3},
    ]
    (first,) = (f for f in log.files() if f.path.startswith("live/main-1-1-a"))
    others = [f for f in log.files() if f != first]

    def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=lambda r: r["partition"])

    def counts_as_wanted() -> None:
        assert in_order(settle.counted(spark, log, log.files(), spans)) == wanted
        with settle.Counting(spark, log) as count:
            assert in_order(count.add([first], spans)) == [
                {"partition": 0, "low": 63, "high": 64, "accepted": 1, "rejected": 1, "there": 2},
                {"partition": 2, "low": 0, "high": 0, "accepted": 0, "rejected": 1, "there": 1},
            ]
            assert (
                in_order(count.add(others, spans)) == wanted == in_order(count.add([], spans)) == in_order(count.add(others, {}))
            )
        assert settle.counted(spark, log, [], spans) == settle.counted(spark, log, log.files(), {}) == []

    with monkeypatch.context() as patched:
        patched.setattr(settle.Counting, "by_spark", lambda _: pytest.fail("DuckDB reads it"))
        counts_as_wanted()
    asked, by_duckdb = list[int](), settle.Counting.by_duckdb

    def refuses_the_second(count: settle.Counting, *of: Any) -> list[dict[str, Any]]:
        asked.append(len(count.added))
        found = by_duckdb(count, *of)
        if len(count.added) == 2:
            raise query.QueryError("deletion vectors")
        return found

    def refuses(*_: Any) -> None:
        raise query.QueryError("deletion vectors")

    for refusing in (refuses_the_second, refuses):
        monkeypatch.setattr(settle.Counting, "by_duckdb", refusing)
        counts_as_wanted()
    assert asked == [1, 1, 2]


def test_a_day_of_many_millions_is_counted_by_duckdb_in_the_memory_that_it_has(spark, settings, monkeypatch):
    # A hundredth of the memory and fewer records: as words of offsets that lie scattered, all of them do not fit in.
    log, each = logs_of(settings, spark, {}), 400_000
    schema = pa.schema(log.delta().schema())
    place = {"partition": pa.array([0] * each, pa.int32()), "timestamp": pa.array([0] * each, pa.timestamp("us", "UTC"))}
    nothing = {f.name: pa.nulls(each, f.type) for f in schema}
    for n in range(8):
        offsets = list(range(n * each, (n + 1) * each))
        Random(n).shuffle(offsets)
        kafka = place | {"offset": pa.array(offsets, pa.int64())}
        columns = [kafka.get(f.name, pa.nulls(each, f.type)) for f in schema.field("kafka").type]
        rows = nothing | {
            "kafka": pa.StructArray.from_arrays(columns, fields=list(schema.field("kafka").type)),
            "day": pa.array([date(2026, 10, 25)] * each, pa.date32()),
        }
        adds = lake.write_arrow(log, f"live/main-{n}-{n}-a", pa.table([rows[f.name] for f in schema], schema))
        lake.append(log, lake.Batch("main", n, n), adds)
    monkeypatch.setattr(query, "MEMORY", "12MB")
    monkeypatch.setattr(settle, "PART", each)
    monkeypatch.setattr(settle.Counting, "by_spark", lambda _: pytest.fail("DuckDB has no room for it"))
    (found,) = settle.counted(spark, log, log.files(), {0: (0, 2**40)})
    assert (found["accepted"], found["there"]) == (8 * each, 8 * each)


def test_a_log_is_read_up_to_the_pin_whatever_file_a_record_lies_in(spark, settings):
    files = {
        "live/main-5-5-a": [(0, 4, None)],
        "live/main-6-7-b": [(0, 5, None), (0, 6, None)],  # its second batch is beyond the pin
        "live/main-8-8-c": [(0, 7, None)],
        "mended/d": [(0, 3, None), (0, 8, None), (1, 0, None)],  # of which no name tells
    }
    run = Run("r", "running", ["2026-10-25"], "", "", "0", pins={"main": Pin("main", 6, {"prices": {"0": 6}}, "")})
    settling = settle.Settling(settings, CLOSES, run, print)
    settling.spark, settling.outer = spark, {"prices": logs_of(settings, spark, files)}
    for days in (None, [date(2026, 10, 25)]):
        found = settling.up_to_pin(PRICES, days).select("kafka.partition", "kafka.offset", "day").collect()
        assert sorted(map(tuple, found)) == [(0, n, date(2026, 10, 25)) for n in (3, 4, 5)]
    assert settling.up_to_pin(PRICES, [date(2026, 10, 24)]).count() == 0


#   a reject of so many days ago is accepted now, and a price's view looks an hour back; yesterday is published, or waits
@pytest.mark.parametrize(
    ("ago", "at", "published", "settled", "mended"),
    [
        (2, "12:00", [2, 1], [2], []),
        (2, "23:50", [2, 1], [2, 1], []),
        (2, "23:50", [2], [2], [1]),
        (1, "12:00", [2], [1], [1]),
        (1, "12:00", [2, 1], [1], []),
        (1, "23:50", [2, 1], [1], [0]),
        (1, "23:50", [2], [1], [1, 0]),
        (0, "12:00", [2, 1], [], [0]),
    ],
)
def test_rejects_that_are_accepted_now_settle_every_published_day_that_looks_at_them_and_reopen_those_that_are_live(
    settings: Settings,
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    ago: int,
    at: str,
    published: list[int],
    settled: list[int],
    mended: list[int],
) -> None:
    own = catalog([type("closes", (), {"prices": PRICES, "closes": closes})])
    days = [settle.yesterday(settings) - timedelta(days=n - 1) for n in range(3)]
    when = datetime.fromisoformat(f"{days[ago]}T{at}+00:00")
    logged(settings, spark, PRICES, [(0, 1, when)], reject="at: wanted DATE, found string")
    pins, said = {"main": Pin("main", 6, READ, "")}, {"closes": {"published": "at one"}}
    lake.save(settings, Run("settle-1", "published", [str(days[n]) for n in published], "", NOW.isoformat(), "", pins, said))
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    monkeypatch.setattr("tidemark.session.session", lambda *_: spark)
    at_work: list[str] = []

    def mend(*_: Any) -> None:
        (run,) = (r for r in lake.runs_now(settings)[0] if r.kind == "rejects")
        at_work.append(run.state)
        with pytest.raises(lake.LakeError, match="is being worked on"):
            lake.drop(settings, own, run)

    monkeypatch.setattr(settle, "mend", mend)
    monkeypatch.setattr(settle, "computed", lambda settings, catalog, run, progress: run)
    told: list[str] = []
    settle.settle_rejects(settings, own, "a date is an instant", told.append)
    assert at_work == ["running"]
    (found,) = (r for r in lake.runs(settings) if r.kind == "rejects")
    assert any(line.startswith("there is nothing to publish: only days") for line in told) == (not settled)
    assert (found.days, found.mended) == ([str(days[n]) for n in settled], [str(days[n]) for n in mended])
    # The run that is not worked on here is still running, where it has days to settle.
    assert found.state == ("running" if settled else "done")
    assert not settled or lake.reopened(settings, NOW - timedelta(days=1)) is None  # its rows may be on their way
    lake.save(settings, replace(found, state="staged"))
    assert lake.reopened(settings, NOW - timedelta(days=1)) == (days[max(mended)] if mended else None)


def test_rejects_that_are_accepted_beside_a_night_settle_its_day_too_where_that_looks_at_them(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The night has computed its day without them, and no file of the log would tell that they are new."""
    own = catalog([type("closes", (), {"prices": PRICES, "closes": closes})])
    last = settle.yesterday(settings)
    before = last - timedelta(days=1)
    logged(settings, spark, PRICES, [(0, 1, datetime.fromisoformat(f"{before}T23:50+00:00"))], reject="at: wanted DATE")
    pins, said = {"main": Pin("main", 6, READ, "")}, {"closes": {"published": "at one"}}
    lake.save(settings, Run("settle-1", "published", [str(before)], "", NOW.isoformat(), "", pins, said))
    lake.save(
        settings,
        Run("settle-2", "staged", [str(last)], "", NOW.isoformat(), "", pins, {"closes": {"gate": "passed", "reasons": []}}),
    )
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    monkeypatch.setattr("tidemark.session.session", lambda *_: spark)
    monkeypatch.setattr(settle, "mend", lambda *_: None)
    monkeypatch.setattr(settle, "computed", lambda settings, catalog, run, progress: run)
    settle.settle_rejects(settings, own, "a date is an instant")
    (found,) = (r for r in lake.runs(settings) if r.kind == "rejects")
    assert found.days == [str(before), str(last)]


def test_files_with_rejects_are_rewritten_together_within_a_stream_and_one_side_of_a_pin(settings: Settings) -> None:
    log = lake.table(settings, PRICES)
    log.create(StructType().add("at", "timestamp").add("day", "date"))
    rows = pa.Table.from_pylist([{"at": NOW, "day": NOW.date()}], pa.schema(log.delta().schema()))
    for stream, seq in (("main", 6), ("main", 7), ("main", 8), ("alarms", 6)):
        batch = lake.Batch(stream, seq, seq)
        lake.append(log, batch, lake.write_arrow(log, batch.folder, rows))
    pins = {"main": Pin("main", 7, READ, "")}
    lake.save(settings, Run("settle-1", "staged", ["2026-11-05"], "", NOW.isoformat(), "", pins))
    found = settle.groups(settings, log, {f.path for f in log.files()})
    names = [sorted(f"{f.live['stream']} {f.live['lo']}" for f in group if f.live) for group in found]
    assert sorted(names) == [["alarms 6"], ["main 6", "main 7"], ["main 8"]]


#   days ago       3 ─── 2          mended by a run, of which this became;          then this was done
@pytest.mark.parametrize(
    ("state", "then", "again"),
    [
        ("dropped", None, [3, 2]),
        ("rolled back", None, [3, 2]),
        ("staged", None, None),
        ("published", None, None),
        ("dropped", {"state": "published", "days": [2]}, [3]),
        ("dropped", {"state": "staged", "days": [3, 2]}, None),
        ("dropped", {"state": "rolled back", "days": [3, 2]}, [3, 2]),
        ("dropped", {"state": "published", "days": [3, 2], "only": ["closes"]}, [3, 2]),
        ("dropped", {"state": "published", "days": [3, 2], "created": NOW - timedelta(hours=2)}, [3, 2]),
    ],
)
def test_days_whose_mended_rejects_were_given_up_are_settled_when_rejects_are_judged_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, state: str, then: dict[str, Any] | None, again: list[int] | None
) -> None:
    def days(ago: Iterable[int]) -> list[str]:
        return [str(settle.yesterday(settings) - timedelta(days=n - 1)) for n in ago]

    pins = {"main": Pin("main", 6, READ, "")}
    lake.save(settings, Run("r1", state, days([3, 2]), "", (NOW - timedelta(hours=1)).isoformat(), "", pins, kind="rejects"))
    if then:
        created = then.get("created", NOW - timedelta(minutes=1)).isoformat()
        lake.save(settings, Run("r2", then["state"], days(then["days"]), "", created, "", pins, only=then.get("only", [])))
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    monkeypatch.setattr("tidemark.session.session", lambda *_: None)
    monkeypatch.setattr(settle, "mendable", lambda *_: {})
    monkeypatch.setattr(settle, "groups", lambda *_: [])
    monkeypatch.setattr(settle, "computed", lambda settings, catalog, run, progress: run)
    found = settle.settle_rejects(settings, ALONE, "again")
    assert (found.days if found else None) == (days(again) if again else None)


@pytest.mark.parametrize(("came_to", "state"), [("published", "published"), ("failed", "dropped")])
def test_run_that_was_at_work_when_rejects_were_judged_again_is_not_dropped_once_it_is_published(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, came_to: str, state: str
) -> None:
    pins = {"main": Pin("main", 6, READ, "")}
    other = Run("r1", "running", [str(settle.yesterday(settings))], "", NOW.isoformat(), "", pins, kind="rejects")
    lake.save(settings, other)
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    monkeypatch.setattr("tidemark.session.session", lambda *_: None)
    monkeypatch.setattr(settle, "mendable", lambda *_: {})
    monkeypatch.setattr(settle, "groups", lambda *_: [])
    monkeypatch.setattr(settle, "computed", lambda *_: lake.save(settings, replace(other, state=came_to)))
    settle.settle_rejects(settings, ALONE, "at once")
    assert lake.run_of(settings, "r1").state == state


#   the night's pin is batch 6, the late event of the second day in batch 7, the pin of a run after it batch 8
@pytest.mark.parametrize(
    ("late", "after", "again"),
    [
        ("12:00:00", {"moves": {"published": "at two"}}, [2]),
        ("23:00:00", {"moves": {"published": "at two"}}, [2, 3]),
        ("12:00:00", {"closes": {"published": "at two"}}, [2, 3, 4]),
        ("12:00:00", {"closes": {"published": "at two"}, "moves": {"published": "at two"}}, []),
        ("12:00:00", {"closes": {"published": "at two"}, "moves": {"gate": "failed", "reasons": ["so"]}}, []),
        ("12:00:00", {"closes": {"published": "at two"}, "moves": {"gate": "passed", "reasons": []}}, [2, 3, 4]),
        ("12:00:00", {"closes": {"gate": "passed", "reasons": []}, "moves": {"gate": "failed", "reasons": ["so"]}}, [2]),
        ("12:00:00", {name: {"gate": "failed", "reasons": ["so"]} for name in ("closes", "moves")}, []),
    ],
    ids=[
        "of another",
        "of another, at night",
        "of the other",
        "of both",
        "held back",
        "left for later",
        "not published",
        "waits",
    ],
)
def test_run_hides_a_late_event_from_no_table_that_it_left_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, late: str, after: dict[str, dict[str, Any]], again: list[int]
) -> None:
    at = datetime.fromisoformat(f"2026-11-02T{late}+00:00")
    file = File("live/main-7-7-x/day=2026-11-02/part-0.parquet", 1, 1, date(2026, 11, 2), 0, at, at)
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == "log/prices" else [])
    days, both = [f"2026-11-{n:02d}" for n in range(1, 6)], {name: {"published": "at one"} for name in ("closes", "moves")}
    night = Run("settle-1", "published", days, "", "", "", {"main": Pin("main", 6, READ, "")}, both)
    state = "published" if any(said.get("published") for said in after.values()) else "staged"
    other = Run("settle-2", state, days, "", "", "", {"main": Pin("main", 8, READ, "")}, after)
    monkeypatch.setattr(lake, "runs", lambda _: [night, other])
    assert [d.day for d in settle.stale(settings, CLOSES)] == again


#   the late event of the second day is in batch 7; `moves` looks two days back at `closes`; of each run in turn its days and pin
@pytest.mark.parametrize(
    ("runs", "again"),
    [
        ([([3, 4], 8), ([2], 9)], [3, 4]),
        ([([3, 4], 8), ([2], 9), ([3, 4], 10)], []),
        ([([1, 2, 3, 4, 5], 6), ([3], 8)], [2, 4]),
        ([([1, 2, 3, 4, 5], 6), ([3], 8), ([2, 4], 9)], [3]),
        ([([1, 2, 3, 4, 5], 6), ([3], 8), ([2, 4], 9), ([3], 10)], []),
        ([([1, 2, 3, 4, 5], 6), ([2, 3, 4], 8)], []),
        ([([1], 7), ([2], 8), ([3], 9), ([4], 10)], []),
        ([([2], 7), ([3], 8), ([2], 9)], []),  # once more, and nothing came
        ([([2], 8, 2), ([3], 9)], [3]),  # taken back, and the third day has read it
        ([([2], 8, 2), ([3], 9), ([3], 10)], []),
        ([([2], 7), ([2], 8, 3), ([3], 9)], [3]),
        ([([2], 8, 1), ([3], 9)], []),  # before the third day was begun
        ([([3], 8), ([2], 9, 2)], []),
    ],
)
def test_a_day_that_has_read_a_view_s_rows_of_another_day_is_settled_again_once_they_are_corrected(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[Any, ...]], again: list[int]
) -> None:
    """A third number says before which of the runs it was taken back."""
    at = datetime(2026, 11, 2, 12, tzinfo=UTC)
    file = File("live/main-7-7-x/day=2026-11-02/part-0.parquet", 1, 1, date(2026, 11, 2), 0, at, at)
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: [file] if table.name == "log/prices" else [])
    known = []
    for n, (days, seq, *back) in enumerate(runs):
        created, published, *taken = ((NOW + timedelta(hours=n)).isoformat() for n in (n, n + 0.1, *(b - 0.1 for b in back)))
        said = {name: {"rolled_back": taken[0]} if taken else {"published": published} for name in CLOSES.views}
        pins = {"main": Pin("main", seq, READ, "")}
        known.append(Run(f"settle-{n}", "published", [f"2026-11-0{d}" for d in days], "", created, "", pins, said))
    monkeypatch.setattr(lake, "runs", lambda _: known)
    assert [d.day for d in settle.stale(settings, CLOSES)] == again


def there(monkeypatch: pytest.MonkeyPatch, files: Sequence[File], *logs: str) -> None:
    """Tables without a lake: these logs have the files, and all others none."""
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: files if table.name in logs else [])


#   days ago    9 8 7 6 5 4 3 2 1      published: 9 and 8; in the log: all but 6; of 5 and 4 there is a run
WHOLE, HALF = {"closes": {"published": "so"}}, {"closes": {"published": "so"}, "moves": {"gate": "failed", "reasons": ["so"]}}
RUNS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "none": ({"days": []}, [7, 5, 4, 3, 2]),
    "waits": ({}, [7, 3, 2]),
    "held back in part": ({"state": "published", "published": "so", "tables": HALF}, [7, 3, 2]),
    "failed": ({"state": "failed"}, [7, 3, 2]),
    "taken back": ({"state": "rolled back"}, [7, 3, 2]),
    "dropped": ({"state": "dropped"}, [7, 5, 4, 3, 2]),
    "killed": ({"state": "running"}, [7, 5, 4, 3, 2]),
    "of some tables": ({"only": ["closes"], "state": "published", "published": "so", "tables": WHOLE}, [7, 5, 4, 3, 2]),
    "today": ({"ago": timedelta(), "state": "published", "published": "so", "tables": WHOLE}, [7, 3, 2]),
    "today in part": ({"ago": timedelta(), "state": "published", "published": "so", "tables": HALF}, [7, 5, 4, 3, 2]),
    "waits today": ({"ago": timedelta(), "tables": HALF}, [7, 5, 4, 3, 2]),
    "failed today": ({"ago": timedelta(), "state": "failed"}, [7, 5, 4, 3, 2]),
    "replay waits": ({"kind": "replay"}, [7, 3, 2]),
    "replayed": ({"kind": "replay", "state": "published", "published": "so", "tables": WHOLE}, [7, 3, 2]),
    "replay failed": ({"kind": "replay", "state": "failed"}, [7, 5, 4, 3, 2]),
    "replay dropped": ({"kind": "replay", "state": "dropped"}, [7, 5, 4, 3, 2]),
    "rejects": ({"kind": "rejects", "state": "published", "published": "so", "tables": WHOLE}, [7, 3, 2]),
}


@pytest.mark.parametrize(("run", "missed"), RUNS.values(), ids=RUNS)
def test_night_that_no_run_of_all_tables_has_taken_is_missed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, run: dict[str, Any], missed: list[int]
) -> None:
    def ago(days: int) -> date:
        return settle.yesterday(settings) - timedelta(days=days - 1)

    files = [File(f"live/main-7-7-x/day={ago(n)}/part-0.parquet", 1, 1, ago(n), 0) for n in (99, 9, 8, 7, 5, 4, 3, 2, 1, 0)]
    there(monkeypatch, files, "log/prices")
    now = datetime.now(UTC)
    said: dict[str, Any] = {"days": [str(ago(5)), str(ago(4))], "state": "staged"} | run
    said["created"] = (now - said.pop("ago", timedelta(days=2))).isoformat()
    before = (now - timedelta(days=7)).isoformat()
    first = Run("settle-1", "published", [str(ago(9)), str(ago(8))], "", before, "", {}, WHOLE, before)
    other = Run("settle-2", reason="", version="", **said)
    monkeypatch.setattr(lake, "runs", lambda _: [first, other])
    assert settle.missed(settings, CLOSES) == [ago(n) for n in missed]
    # Of days whose runs' records have expired nothing tells that they were taken.
    kept = settings.model_copy(update={"keep_records": "5 days"})
    assert settle.missed(kept, CLOSES) == [ago(n) for n in missed if n <= 5]
    monkeypatch.setattr(lake, "runs", lambda _: [])
    assert settle.missed(settings, CLOSES) == []  # before the first publication nothing is


OUT = {"moves": {"published": "so"}}


#   days ago    9 8 7 6 5 4 3 2 1      both views are published: 9, 8, 3, 2, 1; 7 to 4 were taken without `closes`
@pytest.mark.parametrize(
    ("before", "runs", "missed"),
    [
        (WHOLE | OUT, [([7, 6, 5, 4], OUT, [])], [7, 6, 5, 4]),
        (WHOLE | OUT, [([7, 6, 5, 4], OUT, []), ([6, 5], WHOLE, ["closes"])], [7, 4]),
        (WHOLE | OUT, [([7, 6, 5, 4], OUT, []), ([7, 6, 5, 4], HALF, [])], []),
        (WHOLE | OUT, [([7, 6, 5, 4], OUT | {"closes": {"gate": "passed", "reasons": []}}, [])], [7, 6, 5, 4]),
        (WHOLE | OUT, [([7, 6, 5, 4], {}, [])], []),  # a run that failed, which was told
        (OUT, [([7, 6, 5, 4], OUT, [])], []),  # it is new
    ],
    ids=["taken out", "settled by hand since", "held back since", "taken out before it was published", "failed", "new"],
)
def test_night_that_was_taken_without_a_table_which_was_published_before_is_missed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], runs: Sequence[Any], missed: list[int]
) -> None:
    """Its pipeline was taken out, or the table had another name: nothing else would ever settle its days."""
    ago = {n: settle.yesterday(settings) - timedelta(days=n - 1) for n in range(10)}
    files = [File(f"live/main-7-7-x/day={d}/part-0.parquet", 1, 1, d, 0) for d in ago.values()]
    there(monkeypatch, files, "log/prices")
    at = (NOW - timedelta(days=2)).isoformat()
    known = [Run("settle-0", "published", [str(ago[9]), str(ago[8])], "", at, "", {}, before, at)]
    for n, (days, tables, only) in enumerate([*runs, ([3, 2, 1], WHOLE | OUT, [])], 1):
        state = "published" if tables else "failed"
        known.append(Run(f"settle-{n}", state, [str(ago[d]) for d in days], "", at, "", {}, tables, at, only=only))
    monkeypatch.setattr(lake, "runs", lambda _: known)
    assert settle.missed(settings, CLOSES) == [ago[n] for n in missed]


#   days ago    9 8 7 6 5 4 3 2 1      both views are published: 9 to 1; rejects of 6 were mended
@pytest.mark.parametrize(
    ("of", "runs", "missed"),
    [
        ("closes", [("rejects", OUT, [6])], [7, 6, 5]),  # it looks an hour back and ten minutes ahead
        ("weeks", [("rejects", OUT, [6])], [6, 5, 4]),
        ("closes", [("rejects", OUT, [6]), ("settle", WHOLE, [7, 6, 5])], []),
        ("closes", [("rejects", WHOLE | OUT, [6])], []),
        ("closes", [("settle", OUT, [6])], []),
    ],
    ids=["without it", "what looks back", "settled since", "with it", "a settling"],
)
def test_published_day_whose_rejects_were_mended_without_a_table_is_missed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, of: str, runs: Sequence[Any], missed: list[int]
) -> None:
    """Its pipeline was taken out, or the table had another name: what is mended keeps the batches that it came in."""
    ago = {n: settle.yesterday(settings) - timedelta(days=n - 1) for n in range(10)}
    files = [File(f"live/main-7-7-x/day={d}/part-0.parquet", 1, 1, d, 0) for d in ago.values()]
    there(monkeypatch, files, "log/fees", "log/prices")
    read = {"main": Pin("main", 7, {"fees": {"0": 10}, "prices": {"0": 10}}, "")}
    all_days = [str(ago[n]) for n in range(9, 0, -1)]
    at = [(NOW - timedelta(hours=n)).isoformat() for n in (9, 8, 7)]
    known = [Run("settle-0", "published", all_days, "", at[0], "", read, OUT | {of: {"published": at[0]}}, at[0])]
    for n, (kind, tables, days) in enumerate(runs, 1):
        known.append(Run(f"{kind}-{n}", "published", [str(ago[d]) for d in days], "", at[n], "", read, tables, at[n], kind=kind))
    monkeypatch.setattr(lake, "runs", lambda _: known)
    assert settle.missed(settings, WEEKS) == [ago[n] for n in missed]


#   fees are kept for 30 days: of the 31st day ago there are none; a day's trends look at two days more
FEES = Topic("fees", key=None, partitions=1, schema="at TIMESTAMP NOT NULL", event_time="at", keep="30 days")


@view(reads={"fees": FEES}, key=("at",), time="at")
def charges(fees): ...


@view(reads={"fees": FEES}, key=("day",), time="day", lookback="2 days")
def trends(fees): ...


CHARGES = catalog([type("charges", (), {"fees": FEES, "prices": PRICES, "closes": closes, "charges": charges})])
TRENDS = catalog([type("trends", (), {"fees": FEES, "prices": PRICES, "closes": closes, "charges": charges, "trends": trends})])


def kept(settings: Settings, monkeypatch: pytest.MonkeyPatch, of: Catalog, published: Sequence[int]) -> dict[int, date]:
    """Fees and prices of 29 to 34 days ago, each of a batch that was read after some of the days were published."""
    today = datetime.now(settings.tz).date()
    ago = {n: today - timedelta(days=n) for n in (34, 33, 32, 31, 30, 29)}
    files = [File(f"live/main-7-7-x/day={d}/part-0.parquet", 1, 1, d, 0) for d in ago.values()]
    there(monkeypatch, files, "log/fees", "log/prices")
    monkeypatch.setattr(lake, "pins", lambda *_: {"main": Pin("main", 7, {"fees": {"0": 10}, "prices": {"0": 10}}, "")})
    before, days = (NOW - timedelta(days=27)).isoformat(), [str(ago[n]) for n in published]
    pins, said = {"main": Pin("main", 6, {"fees": {"0": 9}} | READ, "")}, {view: {"published": before} for view in of.views}
    run = Run("settle-1", "published", days, "", before, "", pins, said, published=before)
    monkeypatch.setattr(lake, "runs", lambda _: [run])
    return ago


@pytest.mark.parametrize(("of", "first"), [(CHARGES, 30), (TRENDS, 28)], ids=["its own day", "two days before as well"])
def test_day_that_a_log_no_longer_holds_is_not_settled_again_and_was_not_missed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, of: Catalog, first: int
) -> None:
    ago = kept(settings, monkeypatch, of, (34, 33, 32, 31, 30, 29))
    assert settle.stale(settings, of) == [d for n, d in ago.items() if n <= first]
    ago = kept(settings, monkeypatch, of, (34,))
    assert settle.missed(settings, of) == [d for n, d in ago.items() if n <= first]


@pytest.mark.parametrize(
    ("of", "day", "only", "refused"),
    [
        (CHARGES, 31, (), "charges from {30} on; before, readers keep what they have. Leave out {31}, or"),
        (CHARGES, 31, ["charges"], "charges from {30} on"),
        (CHARGES, 31, ["closes"], None),
        (CHARGES, 30, (), None),
        (TRENDS, 30, (), "charges, trends from {28} on"),
        (TRENDS, 30, ["charges"], None),
    ],
)
def test_settling_refuses_a_day_that_a_log_which_its_tables_look_at_no_longer_holds(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, of: Catalog, day: int, only: list[str], refused: str | None
) -> None:
    ago = kept(settings, monkeypatch, of, ())
    monkeypatch.setattr(settle, "refuse_unread", lambda *_: None)
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    if refused is None:
        assert settle.settle(settings, of, [ago[day]], "again", only=only).days == [str(ago[day])]
        return
    for n in (31, 30, 28):
        refused = refused.replace(f"{{{n}}}", str(datetime.now(settings.tz).date() - timedelta(days=n)))
    with pytest.raises(settle.SettleError, match=f"the log of fees keeps 30 days, which is enough for {refused}"):
        settle.settle(settings, of, [ago[29], ago[day]], "again", only=only)


def test_yesterday_is_settled_though_a_log_has_let_go_what_a_view_looks_back_at(settings: Settings, monkeypatch: Any) -> None:
    """Under a shorter `keep`, when nothing looked so far back."""
    monkeypatch.setattr(lake.Table, "expired_before", settle.yesterday(settings))
    assert settle.held_from(settings, TRENDS, TRENDS.names)[0] == settle.yesterday(settings)


@pytest.mark.parametrize(("only", "first"), [((), 30), (["charges"], 30), (["closes"], 34)])
def test_replay_leaves_days_that_a_log_no_longer_holds_as_they_are_and_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, only: Sequence[str], first: int
) -> None:
    ago, said = kept(settings, monkeypatch, CHARGES, ()), list[str]()
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    run = settle.replay(settings, CHARGES, "again", said.append, only=only)
    assert run.days == [str(d) for n, d in ago.items() if n <= first]
    left = f"the log of fees keeps 30 days, which is enough for charges from {ago[30]} on; before, readers keep what they have"
    assert said == ([left] if first == 30 else []) and run.note == "".join(said)
    assert settle.estimate(settings, CHARGES, only, None)[0] == len(run.days)


@pytest.mark.parametrize("keep", ["400 days", None])
def test_days_that_have_expired_stay_as_they_are_once_a_log_is_kept_for_longer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, keep: str | None
) -> None:
    """A late record is all that the log has of them: settled, it alone would take the place of their rows."""
    ago = kept(settings, monkeypatch, CHARGES, (34, 33, 32, 31, 30, 29))
    monkeypatch.setattr(lake.Table, "expired_before", property(lambda log: ago[30] if log.name == "log/fees" else date.min))
    longer = replace(FEES, keep=keep)

    @view(reads={"fees": longer}, key=("at",), time="at")
    def charges(fees): ...

    of = catalog([type("charges", (), {"fees": longer, "prices": PRICES, "closes": closes, "charges": charges})])
    assert settle.held_from(settings, of, of.names)[0] == ago[30]
    assert settle.stale(settings, of) == [ago[30], ago[29]]
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    run = settle.replay(settings, of, "again", only=["charges"])
    assert (run.days, "charges from" in run.note) == ([str(ago[30]), str(ago[29])], True)
    with pytest.raises(settle.SettleError, match="before, readers keep what they have"):
        settle.refuse_expired(settings, of, ["charges"], [ago[31]])


#   prices are read by no stream: it was given up and not taken yet, or its checkpoint is lost
def test_run_is_refused_that_looks_at_records_of_a_topic_of_which_no_pin_says_how_far_it_is_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ago = kept(settings, monkeypatch, CHARGES, ())
    monkeypatch.setattr(lake, "pins", lambda *_: {"main": Pin("main", 7, {"fees": {"0": 10}}, "")})
    monkeypatch.setattr(settle, "refuse_unread", lambda *_: None)
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    refused = r"no checkpoint says how far topic prices is read, .* tidemark speed --stream main --recover.* other tables: --only"
    with pytest.raises(settle.SettleError, match=refused):
        settle.replay(settings, CHARGES, "again")
    with pytest.raises(settle.SettleError, match=refused):
        settle.settle(settings, CHARGES, [ago[29]], "again")
    assert settle.replay(settings, CHARGES, "again", only=["charges"]).days == [str(ago[30]), str(ago[29])]
    quiet = settle.yesterday(settings)  # what nobody reads any more holds up no night of what is read
    assert settle.settle(settings, CHARGES, [quiet], "the night").days == [str(quiet)]
    given_up = Run("rejects-1", "dropped", [str(ago[29])], "", NOW.isoformat(), "", {}, kind="rejects")
    monkeypatch.setattr(lake, "runs", lambda _: [given_up])
    monkeypatch.setattr("tidemark.session.session", lambda *_: None)
    monkeypatch.setattr(settle, "mendable", lambda *_: {})
    monkeypatch.setattr(settle, "computed", lambda settings, catalog, run, progress: run)
    with pytest.raises(settle.SettleError, match=refused):
        settle.settle_rejects(settings, CHARGES, "again")


@pytest.mark.parametrize(("idle", "refused"), [(0, False), (2, True)])
def test_replay_that_goes_on_after_a_day_refuses_where_a_log_no_longer_holds_its_days(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, idle: int, refused: bool
) -> None:
    ago, code = kept(settings, monkeypatch, CHARGES, ()), settle.code_of([charges])
    run = Run("replay-1", "failed", [str(ago[31])], "", NOW.isoformat(), "", kind="replay", only=["charges"], code=code)
    run.touched = (NOW - timedelta(days=idle)).isoformat()
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    if not refused:
        assert settle.resume(settings, CHARGES, run) == run
        return
    with pytest.raises(settle.SettleError, match=r"charges from .* on; .* Drop run replay-1 and begin again: tidemark drop"):
        settle.resume(settings, CHARGES, run)


#   a helper that pipelines share stands among them; no row is made by what writes the report
@pytest.mark.parametrize(
    ("mended", "refused"), [("fold.py", True), ("functions.py", True), ("pipelines/words.py", True), ("report.py", False)]
)
def test_replay_that_was_cut_off_does_not_go_on_by_other_code_of_what_all_tables_are_computed_by(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, mended: str, refused: bool
) -> None:
    code, held = settle.code_of([closes]), Path.read_bytes
    run = Run("replay-1", "failed", ["2026-11-19"], "", NOW.isoformat(), "", kind="replay", only=["closes"], code=code)
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    monkeypatch.setattr(Path, "read_bytes", lambda path: held(path) + b"# mended" * path.match(f"tidemark/{mended}"))
    with pytest.raises(settle.SettleError, match="run replay-1 began with other code; drop it") if refused else nullcontext():
        assert settle.resume(settings, ALONE, run) == run


@pytest.mark.parametrize("state", ["staged", "published", "dropped"])
def test_replay_that_another_process_has_finished_since_its_record_was_read_is_left_as_it_is(
    settings: Settings, state: str
) -> None:
    read = Run(
        "replay-1",
        "failed",
        ["2026-11-19"],
        "",
        NOW.isoformat(),
        "",
        kind="replay",
        code=settle.code_of([closes]),
        only=["closes"],
    )
    lake.save(settings, replace(read, state=state))
    with pytest.raises(settle.SettleError, match="was dropped") if state == "dropped" else nullcontext():
        assert settle.resume(settings, ALONE, read).state == state
    assert lake.run_of(settings, read.id).state == state


def test_run_that_is_at_work_elsewhere_is_left_there_or_ended_there(settings: Settings) -> None:
    """What ends streams and broker would not end it, and it may be reading from them."""
    run = Run("replay-1", "failed", ["2026-11-19"], "", NOW.isoformat(), "", kind="replay", only=["closes"])
    run.code = settle.code_of([closes])
    lake.save(settings, run)
    with local.Lease(settings.lake_path / "runs" / ".replay-1.lease"), pytest.raises(local.LeaseHeld) as held:
        settle.resume(settings, ALONE, run)
    assert "end it where it was started" in str(held.value) and "down" not in str(held.value)


def test_replay_whose_name_another_process_has_taken_meanwhile_is_refused_and_leaves_its_record(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(settings, monkeypatch, CHARGES, ())
    other = Run("mine", "running", ["2026-11-19"], "the other's", NOW.isoformat(), "", kind="replay")
    begins = monkeypatch.setattr
    monkeypatch.setattr(settle, "refuse_other_code", lambda *_: begins(lake, "runs", lambda _: [other]))
    monkeypatch.setattr(lake, "save", lambda *_: pytest.fail("the other's record is written over"))
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    with pytest.raises(settle.SettleError, match="run mine was begun by another process meanwhile; give the same command again"):
        settle.replay(settings, CHARGES, "again", name="mine")


#   days ago    7        6     5     4     3        2     1     0        seven and three days ago something came, at the time told
@pytest.mark.parametrize(
    ("of", "topic", "time", "days"),
    [
        (ALONE, "prices", "22:59", [7, 3]),
        (ALONE, "prices", "23:00", [7, 6, 3, 2]),
        (CLOSES, "prices", "22:59", [7, 6, 5, 3, 2, 1]),
        (CLOSES, "prices", "23:00", [7, 6, 5, 4, 3, 2, 1]),
        (PEOPLE, "users", None, [7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_quiet_day_whose_rows_look_back_at_a_record_is_replayed_and_was_missed(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    of: Catalog,
    topic: str,
    time: str | None,
    days: list[int],
) -> None:
    ago = {n: settle.yesterday(settings) - timedelta(days=n - 1) for n in range(9)}
    at = {n: datetime.fromisoformat(f"{ago[n]}T{time}+00:00") if time else None for n in (7, 3)}
    files = [File(f"live/main-7-7-x/day={ago[n]}/part-0.parquet", 1, 1, ago[n], 0, at[n], at[n]) for n in at]
    monkeypatch.setattr(lake.Table, "exists", True)
    monkeypatch.setattr(lake.Table, "expired_before", date.min)
    monkeypatch.setattr(lake, "refuse_other_zone", lambda *_: None)  # which asks a log, and there is none
    monkeypatch.setattr(lake.Table, "files", lambda table: files if table.name == f"log/{topic}" else [])
    monkeypatch.setattr(lake, "pins", lambda *_: {"main": Pin("main", 7, READ, "")})
    monkeypatch.setattr(settle, "work", lambda settings, catalog, run, progress: run)
    run = settle.replay(settings, of, "again")
    assert (run.days, run.open_days) == ([str(ago[n]) for n in days], [])
    before, said = (NOW - timedelta(days=7)).isoformat(), {view: {"published": "so"} for view in of.views}
    first = Run("settle-1", "published", [str(ago[8])], "", before, "", {}, said, before)
    monkeypatch.setattr(lake, "runs", lambda _: [first])
    assert settle.missed(settings, of) == [ago[n] for n in days if n > 1]


UNREAD = "the stream has not yet read 1 records of prices that Kafka held at the end of 2026-11-01"


#   the views look ten minutes ahead, and late records are waited for five minutes more
@pytest.mark.parametrize(("came", "lacks"), [("00:14:59.999", True), ("00:15:00", False), ("09:00:00", False)])
def test_a_day_lacks_what_kafka_held_once_its_views_lookahead_and_the_wait_for_late_records_were_over(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, came: str, lacks: bool
) -> None:
    own, day = settings.model_copy(update={"nightly_after": "5 minutes"}), date(2026, 11, 1)
    arrived = [datetime(2026, 11, 1, 12, tzinfo=UTC)] * 9 + [datetime.fromisoformat(f"2026-11-02T{came}+00:00")]
    monkeypatch.setattr("tidemark.kafka.topic_ids_held", lambda *_: {"prices": "an id", "others": "another"})
    monkeypatch.setattr(
        "tidemark.kafka.offsets", lambda _, topics, at: {"prices": {0: sum(one < at for one in arrived)}} | {"others": {0: 9}}
    )
    monkeypatch.setattr(lake, "pins", lambda *_: {"main": Pin("main", 6, READ, "")})
    assert settle.lacking(own, CLOSES, day) == (UNREAD if lacks else None)


#   22:00 | 23:00 | 00:00   settled at 00:05                   00:10 the views have looked ahead
#             nine       one second ago comes the tenth
@pytest.mark.parametrize(
    ("now", "came", "refused"),
    [
        ("00:05:00", "00:04:59", False),
        ("00:05:00", "00:00:00", False),
        ("00:05:00", "23:59:59", True),
        ("00:10:00", "00:09:59", True),
    ],
)
def test_soon_after_midnight_a_day_lacks_what_came_before_it_and_not_what_comes_this_very_moment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, now: str, came: str, refused: bool
) -> None:
    day = date(2026, 11, 1)
    at = datetime.fromisoformat(f"2026-11-0{1 if came > now else 2}T{came}+00:00")
    arrived = [datetime(2026, 11, 1, 12, tzinfo=UTC)] * 9 + [at]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromisoformat(f"2026-11-02T{now}+00:00")

    monkeypatch.setattr(settle, "datetime", Clock)
    monkeypatch.setattr("tidemark.kafka.topic_ids_held", lambda *_: {"prices": "an id"})
    monkeypatch.setattr("tidemark.kafka.offsets", lambda _, topics, at: {"prices": {0: sum(one < at for one in arrived)}})
    pins = {"main": Pin("main", 6, READ, "")}
    with pytest.raises(settle.SettleError, match=UNREAD) if refused else nullcontext():
        settle.refuse_unread(settings, CLOSES, CLOSES.names, [day], pins)


def test_topic_that_kafka_does_not_have_is_left_out_of_what_a_day_lacks_and_the_others_are_asked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offsets(_: Settings, topics: Iterable[str], at: datetime) -> dict[str, dict[int, int]]:
        if "others" in (asked := list(topics)):
            raise kafka.TopicMissing("Kafka has no topic others")
        return {topic: {0: 10} for topic in asked}

    monkeypatch.setattr("tidemark.kafka.topic_ids_held", lambda *_: {"prices": "an id"})
    monkeypatch.setattr("tidemark.kafka.offsets", offsets)
    pins = {"main": Pin("main", 6, READ, "")}
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    assert settle.lacking(settings, CLOSES, date(2026, 11, 1)) == UNREAD
    with pytest.raises(settle.SettleError, match=UNREAD):
        settle.refuse_unread(settings, CLOSES, CLOSES.names, [date(2026, 11, 1)], pins)


@pytest.mark.parametrize(("names", "refused"), [(["closes"], False), (["moves"], True), (["others"], True)])
def test_tables_are_settled_though_a_topic_is_unread_that_they_do_not_look_at(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, names: list[str], refused: bool
) -> None:
    monkeypatch.setattr("tidemark.kafka.topic_ids_held", lambda _, topics: dict.fromkeys(topics, "an id"))
    held = {"prices": {0: 9}, "others": {0: 10}}
    monkeypatch.setattr("tidemark.kafka.offsets", lambda _, topics, at: {t: held[t] for t in topics})
    pins = {"main": Pin("main", 6, READ, "")}
    with pytest.raises(settle.SettleError, match=r"1 records of others .* --only") if refused else nullcontext():
        settle.refuse_unread(settings, CLOSES, names, [date(2026, 11, 1)], pins)


def test_day_lacks_a_broker_that_is_away_and_a_settling_takes_the_log_as_it_is(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise kafka.BrokerAway("no Kafka broker answers at 127.0.0.1:1")

    monkeypatch.setattr("tidemark.kafka.topic_ids_held", away)
    monkeypatch.setattr("tidemark.kafka.offsets", away)
    pins = {"main": Pin("main", 6, READ, "")}
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    assert settle.lacking(settings, CLOSES, date(2026, 11, 1)) == "no Kafka broker answers at 127.0.0.1:1"
    with capture_logs() as logs:
        settle.refuse_unread(settings, CLOSES, CLOSES.names, [date(2026, 11, 1)], pins)
    assert [(e["log_level"], e["because"]) for e in logs] == [("warning", "no Kafka broker answers at 127.0.0.1:1")]


def test_a_day_is_not_asked_for_before_its_late_records_may_be_there(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemark.kafka.offsets", lambda *_: pytest.fail("it is too early to ask"))
    own = settings.model_copy(update={"nightly_after": "2 days", "zone": "Asia/Shanghai"})
    day = settle.yesterday(own)
    until = datetime(day.year, day.month, day.day, 0, 10, tzinfo=ZoneInfo(own.zone)) + timedelta(days=3)
    said = f"late records of {day} are waited for until {until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    assert settle.lacking(own, CLOSES, day) == said


def at_work(settings: Settings, say: Callable[[str], None]) -> settle.Settling:
    """A replay of the prices of a day, nine records, up to where it needs Spark."""
    run = Run("r", "running", ["2026-11-01"], "test", "", "", {"main": Pin("main", 6, READ, "")}, chunks=[["2026-11-01"] * 2])
    settling = settle.Settling(settings, CLOSES, run, say)
    settling.outer = {d.name: lake.table(settings, d) for d in (PRICES, closes)}
    for table in settling.outer.values():
        table.create(StructType().add("at", "timestamp").add("day", "date"))
    return settling


def test_night_computes_a_log_up_to_its_pin_and_no_record_further(settings: Settings, spark: Any) -> None:
    """Of partition 0 the pin has read nine records, of partition 1 none; all of them are of one file and of the day."""
    noon = datetime(2026, 11, 1, 12, tzinfo=UTC)
    run = Run("r", "running", ["2026-11-01"], "test", "", "", {"main": Pin("main", 6, READ, "")})
    settling = settle.Settling(settings, CLOSES, run, print)
    log = logged(settings, spark, PRICES, [(0, 8, noon), (0, 9, noon), (1, 0, noon)], folder="live/main-5-7-x")
    settling.spark, settling.outer = spark, {"prices": log}
    found = settling.read(PRICES, noon - timedelta(hours=1), noon + timedelta(hours=1))
    assert [tuple(r) for r in found.select("kafka.partition", "kafka.offset").collect()] == [(0, 8)]


HOURS_OF = "SELECT DISTINCT date_trunc('hour', at) AS hour FROM prices WHERE reject IS NULL"


@rollup(
    reads={"prices": PRICES},
    key=("hour",),
    time="hour",
    merge={"last": "max"},
    checks=[
        expect("UnexpectedRowsExpectation", unexpected_rows_query=f"{HOURS_OF} EXCEPT SELECT hour FROM {{batch}}"),
        expect("UnexpectedRowsExpectation", unexpected_rows_query=f"SELECT hour FROM {{batch}} EXCEPT {HOURS_OF}"),
    ],
)
def lasts(prices):
    return prices.groupBy(F.date_trunc("hour", "at").alias("hour")).agg(F.max("at").alias("last"))


LASTS = catalog([type("lasts", (), {"prices": PRICES, "lasts": lasts})])


@pytest.mark.parametrize("after", [False, True], ids=["before the pin", "after the pin"])
def test_run_over_rejects_that_are_accepted_from_a_log_that_someone_optimized_is_published_where_that_was_before_its_pin(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The rollup gets their rows in a file whose name tells no batch either."""
    last = settle.yesterday(settings)
    begins, _ = settle.period(settings, last)
    wrong = "at: wanted DATE, found string"
    for n in (5, 6):
        log = logged(settings, spark, PRICES, [(0, n, begins)], reject=wrong, folder=f"live/main-{n}-{n}-x")
    outer = lake.table(settings, lasts)
    outer.create(fold.schema_of(fold.nothing(spark, "hour TIMESTAMP, last TIMESTAMP, day DATE")))
    before = datetime.now(UTC).isoformat()
    assert log.delta().optimize.compact()["numFilesRemoved"] == 2
    taken = before if after else datetime.now(UTC).isoformat()
    monkeypatch.setattr(lake, "pins", lambda *_: {"main": Pin("main", 6, READ, taken)})
    monkeypatch.setattr("tidemark.session.session", lambda *_: spark)
    monkeypatch.setattr(settle, "computed", lambda settings, catalog, run, progress: run)
    run = settle.settle_rejects(settings, LASTS, "a date is an instant")
    assert run is not None and run.days == [str(last)]
    (mended,) = outer.files()
    lake.stage(outer, run.id, lake.read(spark, outer))
    with pytest.raises(lake.LakeError, match="written by someone else after the pin") if after else nullcontext():
        lake.publish(settings, outer, run, [last], ["main"], {}, False)
    (found,) = outer.files()
    assert (found.path == mended.path, found.run) == ((True, None) if after else (False, run.id))


def test_rejects_that_a_rollup_raises_of_are_mended_for_none(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one has the row of what the log still rejects, once more with each try."""

    @rollup(reads={"prices": PRICES}, key=("hour",), time="hour", merge={"last": "max"})
    def refusing(prices):
        wrong = F.raise_error(F.lit("no such hour")).cast("timestamp")
        return prices.groupBy(F.date_trunc("hour", "at").alias("hour")).agg(F.max(wrong).alias("last"))

    begins, _ = settle.period(settings, settle.yesterday(settings))
    log = logged(settings, spark, PRICES, [(0, 5, begins)], reject="at: wanted DATE, found string", folder="live/main-5-5-x")
    outer = [lake.table(settings, one) for one in (lasts, refusing)]
    for table in outer:
        table.create(fold.schema_of(fold.nothing(spark, "hour TIMESTAMP, last TIMESTAMP, day DATE")))
    monkeypatch.setattr(lake, "pins", lambda *_: {"main": Pin("main", 6, READ, "")})
    monkeypatch.setattr("tidemark.session.session", lambda *_: spark)
    of = catalog([type("p", (), {"prices": PRICES, "lasts": lasts, "refusing": refusing})])
    said = (
        r"^rollup refusing: its function raised SparkRuntimeException of rejects of prices .* no such hour.* tidemark settle --r"
    )
    for _ in range(2):
        with pytest.raises(settle.SettleError, match=said):
            settle.settle_rejects(settings, of, "a date is an instant")
    assert [table.files() for table in outer] == [[], []] and lake.read(spark, log).where("reject IS NULL").count() == 0
    assert {run.state for run in lake.runs(settings)} == {"failed"}
    monkeypatch.setattr(settle, "computed", lambda settings, catalog, run, progress: run)
    mended = settle.settle_rejects(settings, LASTS, "its rollup is taken out")
    assert mended and [run.state for run in lake.runs(settings)] == ["dropped", "dropped", "running"]
    assert len(outer[0].files()) == 1


@pytest.mark.parametrize(
    ("first", "held", "said"),
    [
        (0, "one", None),
        (0, None, None),  # no stream has begun with it yet
        (7, "one", "Kafka no longer holds offsets 0 to 6 of partition 0"),
        (0, "another", "Kafka's topic was deleted and created again"),
    ],
)
def test_a_replay_reads_the_log_where_kafka_does_not_hold_what_it_holds(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, first: int, held: str | None, said: str | None
) -> None:
    monkeypatch.setattr(kafka, "offsets", lambda *_: {"prices": {0: first}})
    monkeypatch.setattr(kafka, "topic_ids", lambda *_: {"prices": "one"})
    monkeypatch.setattr(lake.Table, "topic_id", held)
    told = list[str]()
    run = Run("r", "running", ["2026-11-01"], "test", "", "", {}, kind="replay", source="kafka")
    work = settle.Settling(settings, CLOSES, run, told.append)
    work.outer = {"prices": lake.table(settings, PRICES)}
    assert work.in_kafka(PRICES) == (said is None)
    assert (said is None and not told) or (said and f"prices: read from the log, because {said}" in told[0])


#   yesterday at  00:30     12:00                by an event time of now that is an hour before the one of then
@pytest.mark.parametrize(("hours", "refused"), [((0.5, 12), True), ((12,), False)], ids=["another day", "the same day"])
def test_event_time_by_which_records_of_a_log_are_of_other_days_is_refused(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, hours: Sequence[float], refused: bool
) -> None:
    """A settling would look for them in the files of these days, and find them in neither."""
    last = settle.yesterday(settings)
    start = settle.period(settings, last)[0]
    stream = speed.Stream(settings, LASTS, "main", settings.state / "main")
    stream.spark = spark
    stream.make_tables()
    log = logged(settings, spark, PRICES, [(0, n, start + timedelta(hours=hour)) for n, hour in enumerate(hours)])
    logged(settings, spark, PRICES, [(0, 9, start)], reject="not JSON", folder="live/main-6-6-x")  # which has no event time
    moved = replace(PRICES, event_time="at - INTERVAL 1 HOUR")
    of = catalog([type("moved", (), {"prices": moved, "lasts": replace(lasts, reads={"prices": moved})})])
    run = Run("r", "running", [str(last)], "test", NOW.isoformat(), "", {"main": Pin("main", 5, READ, "")})
    run.chunks = [[str(last), str(last)]]
    lake.save(settings, run)
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    later = speed.Stream(settings, of, "main", settings.state / "main")
    later.spark = spark
    said = r"^topic prices: its event time is at - INTERVAL 1 HOUR, and .*/log/prices has its days by at: 1 of its records would"
    for work in (lambda: settle.work(settings, of, run, print), later.make_tables):
        with pytest.raises(lake.LakeError, match=said) if refused else nullcontext():
            work()
    assert log.told(lake.EVENT_TIME) == ("at" if refused else moved.event_time)
    stream.make_tables()  # written back, it is taken


NAMED = replace(PRICES, schema="at TIMESTAMP NOT NULL, name STRING NOT NULL", id="name")


@pytest.mark.parametrize(("names", "refused"), [(("a", None), True), (("a", "b"), False)])
def test_id_that_records_of_a_log_have_not_is_refused(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, names: Sequence[str | None], refused: bool
) -> None:
    """They would all be one event, live until the night and in each replay; what is told apart anew by what all have is taken."""
    plain = replace(NAMED, schema=NAMED.schema.replace("name STRING NOT NULL", "name STRING"), id=None)
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)

    def works(topic: Topic) -> list[Callable[[], Any]]:
        of = catalog([type("p", (), {"prices": topic, "lasts": replace(lasts, reads={"prices": topic})})])
        stream = speed.Stream(settings, of, "main", settings.state / "main")
        stream.spark = spark
        return [lambda: settle.work(settings, of, run, print), stream.make_tables]

    works(plain)[1]()
    last = settle.yesterday(settings)
    at, log = settle.period(settings, last)[0], lake.table(settings, plain)
    schema = pa.schema(log.delta().schema())
    rows = [
        {"at": at, "name": name, "kafka": {"partition": 0, "offset": n, "timestamp": at, "value": b"{}"}, "day": last}
        for n, name in enumerate(names)
    ]
    rows.append({"kafka": {"partition": 0, "offset": 9, "timestamp": at, "value": b"{}"}, "reject": "not JSON", "day": last})
    adds = lake.write_arrow(log, "live/main-5-5-x", pa.Table.from_pylist(rows, schema))
    lake.append(log, lake.Batch("main", 5, 5), adds)
    run = Run("r", "running", [str(last)], "test", NOW.isoformat(), "", {"main": Pin("main", 5, READ, "")})
    run.chunks = [[str(last), str(last)]]
    lake.save(settings, run)
    said = (
        r"^topic prices: its id is name, and 1 accepted records of .*/log/prices have none: .* told apart by partition and offset"
    )
    for work in works(NAMED):
        with pytest.raises(lake.LakeError, match=said) if refused else nullcontext():
            work()
    assert log.told(lake.ID) == (lake.OFFSET if refused else "name")
    works(plain)[1]()  # written back, it is taken


@pytest.mark.parametrize(
    ("change", "value", "refused"),
    [
        ({"key": "mail"}, None, True),
        ({"compacted": False}, None, True),
        ({"key": "mail"}, b"{}", False),
        ({"event_time": "at - INTERVAL 0 HOURS"}, None, False),
    ],
    ids=["key", "compacted no more", "key, nobody deleted", "something else"],
)
def test_key_by_which_tombstones_of_a_log_end_nobody_is_refused(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], value: bytes | None, refused: bool
) -> None:
    """Whoever was deleted would be in the table again, live and settled."""
    mailed = replace(USERS, schema=f"mail STRING NOT NULL, {USERS.schema}")
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)

    @rollup(reads={"users": mailed.changes}, key=("at",), time="at", merge={"name": "max"})
    def renamed(users):
        return users.groupBy("at").agg(F.max("name").alias("name"))

    def works(topic: Topic) -> list[Callable[[], Any]]:
        reads = {"users": topic.changes if topic.compacted else topic}
        of = catalog([type("p", (), {"users": topic, "renamed": replace(renamed, reads=reads)})])
        stream = speed.Stream(settings, of, "main", settings.state / "main")
        stream.spark = spark
        return [lambda: settle.work(settings, of, run, print), stream.make_tables]

    works(mailed)[1]()
    last = settle.yesterday(settings)
    at, log = settle.period(settings, last)[0], lake.table(settings, mailed)
    rows = [{"at": at, "name": "ann", "mail": "a@x", "kafka": {"partition": 0, "offset": 0, "timestamp": at, "value": b"{}"}}]
    rows.append({"name": "ann", "kafka": {"partition": 0, "offset": 1, "timestamp": at, "value": value}})
    schema = pa.schema(log.delta().schema())
    adds = lake.write_arrow(log, "live/main-5-5-x", pa.Table.from_pylist([row | {"day": last} for row in rows], schema))
    lake.append(log, lake.Batch("main", 5, 5), adds)
    run = Run("r", "running", [str(last)], "test", NOW.isoformat(), "", {"main": Pin("main", 5, READ, "")})
    run.chunks = [[str(last), str(last)]]
    lake.save(settings, run)
    said = (
        r"^topic users: its key as a table is .*, and 1 tombstones of .*/log/users have another \(name\): they would end nobody"
    )
    for work in works(replace(mailed, **change)):
        with pytest.raises(lake.LakeError, match=said) if refused else nullcontext():
            work()
    assert log.told(lake.KEY) == ("name" if refused else change.get("key", "name"))
    works(mailed)[1]()  # written back, it is taken


def test_table_whose_pipeline_has_changed_is_named_when_the_stream_starts(settings: Settings) -> None:
    def starts(of: Rollup, seen: View) -> list[Any]:
        changed = catalog([type("p", (), {"prices": PRICES, "lasts": of, "others": OTHERS, "counts": seen})])
        with capture_logs() as events:
            speed.Stream(settings, changed, "main", settings.state / "main").remember_code()
        return [(e["tables"], e["mend"]) for e in events if e["log_level"] == "warning"]

    (settings.state / "main").mkdir(parents=True)
    of, seen = replace(lasts, merge={"last": "min"}), replace(counts, lookback="1 day")
    # What reads a rollup that has changed is replayed with it.
    other, further = replace(counts, reads={"lasts": of}), replace(seen, reads={"lasts": of})
    told = [starts(*both) for both in ((lasts, counts), (lasts, counts), (of, other), (of, other), (of, further))]
    mend = "tidemark replay --only {0} --reason …".format
    assert told == [[], [], [(["lasts"], mend("lasts"))], [], [(["counts"], mend("counts"))]]
    # Of what it left before it told of views, nothing is said.
    of_rollups = json.loads((settings.state / "main" / "code.json").read_text())
    (settings.state / "main" / "code.json").write_text(json.dumps({"lasts": of_rollups["lasts"]}))
    assert starts(of, other) == []


def test_replay_that_waited_while_a_view_was_changed_is_not_published(settings: Settings) -> None:
    """Published, its days would be of the code of before, and those that nights settle from now on of the new."""
    run = Run("r1", "staged", ["2026-07-01"], "a mistake", NOW.isoformat(), "", {}, kind="replay")
    run.code = settle.code_of([lasts, counts])
    of = {"prices": PRICES, "lasts": lasts}
    lake.save(settings, run)
    changed = catalog([type("p", (), of | {"counts": replace(counts, lookback="1 day")})])
    said = r"run r1 computed counts as it was before it was changed, and later days are of .* Drop it .*: tidemark drop r1"
    with pytest.raises(settle.SettleError, match=said):
        settle.publish(settings, changed, "r1")
    # Where a topic is to be found in Kafka, and for how long, changes no row.
    moved = replace(PRICES, partitions=PRICES.partitions + 2, retention="30 days")
    on = replace(lasts, reads={"prices": moved})
    same = catalog([type("p", (), {"prices": moved, "lasts": on, "counts": replace(counts, reads={"lasts": on})})])
    settle.refuse_code_since(settings, same, run)
    assert settle.publish(settings, catalog([type("p", (), of | {"counts": counts})]), "r1") == []


@view(reads={"prices": PRICES}, key=("at",), time="at", lookback="1 hour")
def gaps(prices):
    return prices.select("at", F.lag("at").over(Window.orderBy("at")).alias("before"))


@pytest.mark.parametrize("ago", [0, 2], ids=["this morning", "two days ago"])
def test_night_that_was_taken_back_is_not_published_again_once_what_its_view_looks_back_at_was_mended(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, ago: int
) -> None:
    last = settle.yesterday(settings) - timedelta(days=ago)
    before, midnight = last - timedelta(days=1), settle.period(settings, last)[0]
    ten = timedelta(minutes=10)
    logged(settings, spark, PRICES, [(0, 0, midnight - 12 * fold.HOUR)], folder="live/main-4-4-x")
    logged(settings, spark, PRICES, [(0, 1, midnight - ten)], reject="at: wanted DATE, found string", folder="live/main-5-5-x")
    logged(settings, spark, PRICES, [(0, 2, midnight + ten)], folder="live/main-6-6-x")
    ledger = lake.ledger(settings)
    ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    same = {"stream": "main", "topic": "prices", "partition": 0, "records": 1, "gaps": 0, "started_at": NOW, "finished_at": NOW}
    its = [same | {"seq": 4 + n, "from_offset": n, "until_offset": n + 1, "rejects": int(n == 1), "day": last} for n in range(3)]
    adds = lake.write_arrow(ledger, "live/main-4-6-x", pa.Table.from_pylist(its, pa.schema(ledger.delta().schema())))
    lake.append(ledger, lake.Batch("main", 4, 6), adds)
    pins = {"main": Pin("main", 6, {"prices": {"0": 3}}, NOW.isoformat())}
    monkeypatch.setattr(lake, "pins", lambda *_: pins)
    monkeypatch.setattr(settle, "refuse_unread", lambda *_: None)
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    of = catalog([type("p", (), {"prices": PRICES, "gaps": gaps})])

    for one in (before, last):
        night = settle.settle(settings, of, [one], "night")
        settle.publish(settings, of, night.id)
    settle.rollback(settings, of, night.id, "rejects were wrong")
    back = lake.run_of(settings, night.id)
    lake.save(settings, replace(back, created=(datetime.now(UTC) - timedelta(days=ago)).isoformat()))
    mended = settle.settle_rejects(settings, of, "an instant is a date too")
    assert mended and (mended.days, mended.mended) == ([str(before)], [str(last)])
    settle.publish(settings, of, mended.id)
    said = f"read the rejects of {last} as such, and run {mended.id} has mended them since"
    with pytest.raises(lake.LakeError, match=said):
        settle.publish(settings, of, night.id)
    settle.publish(settings, of, settle.settle(settings, of, [last], "night").id)
    rows = lake.read(spark, lake.table(settings, gaps), days=[last]).collect()
    assert [(r["at"] - r["before"]) for r in rows] == [2 * ten]


def test_tombstone_has_no_id_and_is_none_of_those_that_lack_it(spark: Any) -> None:
    rows = [(None, None, None), (None, b"{}", None), ("a", b"{}", None), (None, b"{}", "not JSON")]
    log = spark.createDataFrame(rows, "name STRING, value BINARY, reject STRING")
    log = log.select("name", F.struct("value").alias("kafka"), "reject")
    kept = replace(NAMED, schema=f"page STRING NOT NULL, {NAMED.schema}", key="page", compacted=True)
    assert [fold.nameless(one, log) for one in (kept, NAMED)] == [1, 2]
    assert fold.nameless(PRICES, log) == 0


UNLIKE = """
    SELECT day FROM {batch} FULL JOIN (SELECT day, count(*) AS rolled FROM lasts GROUP BY day) USING (day)
    WHERE hours IS DISTINCT FROM rolled"""


@view(
    reads={"lasts": lasts},
    key=("day",),
    time="day",
    checks=[expect("UnexpectedRowsExpectation", unexpected_rows_query=UNLIKE)],
)
def counts(lasts):
    return lasts.groupBy(day("hour").alias("day")).agg(F.count("*").alias("hours"))


def begun(settings: Settings, spark: Any, days: Sequence[date], kind: str, only: list[str], twice: date | None = None) -> Run:
    """A run over a price at the beginning of each of these days, of `twice` two; today is a day that is not over."""
    starts = [settle.period(settings, d)[0] for d in days]
    times = [*starts, *(start + 3 * fold.HOUR for d, start in zip(days, starts, strict=True) if d == twice)]
    logged(settings, spark, PRICES, [(0, n, at) for n, at in enumerate(times)])
    ledger = lake.ledger(settings)
    ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    batch = {"stream": "main", "topic": "prices", "seq": 5, "partition": 0, "from_offset": 0, "until_offset": len(times)}
    batch |= {"records": len(times), "rejects": 0, "gaps": 0, "started_at": NOW, "finished_at": NOW, "day": NOW.date()}
    rows = pa.Table.from_pylist([batch], pa.schema(ledger.delta().schema()))
    lake.append(ledger, lake.Batch("main", 5, 5), lake.write_arrow(ledger, "live/main-5-5-x", rows))
    over = [str(d) for d in days if d <= settle.yesterday(settings)]
    run = Run("r", "running", over, "test", NOW.isoformat(), "", kind=kind, only=only)
    run.pins, run.chunks = {"main": Pin("main", 5, {"prices": {"0": len(times)}}, NOW.isoformat())}, [[d, d] for d in over]
    run.open_days = [str(d) for d in days if kind == "replay" and str(d) not in over]
    lake.save(settings, run)
    return run


def test_view_reads_of_what_is_staged_the_days_of_its_chunk_alone(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a month in as many chunks, or a year replayed, reads the sets of all its days once for each of them."""
    days = [settle.yesterday(settings) - timedelta(days=n) for n in (2, 1, 0)]
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    read, opened = settle.Settling.read, list[set[str]]()

    def looked(self: settle.Settling, declared: Any, low: datetime | None, high: datetime) -> Any:
        frame = read(self, declared, low, high)
        if declared is lasts:
            opened.append({part.removeprefix("day=") for f in frame.inputFiles() for part in Path(f).parts if "day=" in part})
        return frame

    monkeypatch.setattr(settle.Settling, "read", looked)
    run = begun(settings, spark, days, "settle", [])
    done = settle.work(settings, catalog([type("p", (), {"prices": PRICES, "lasts": lasts, "counts": counts})]), run, print)
    assert done.tables["counts"]["rows"] == 3
    assert opened == [{str(d)} for d in days]


@pytest.mark.parametrize(("large", "cut"), [(2, 0), (3, 1)], ids=["a day each", "all together"])
def test_large_day_of_a_log_is_read_by_itself_and_its_day_is_no_part_of_each_path(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, large: int, cut: int
) -> None:
    monkeypatch.setattr(settle, "LARGE", large)
    days = [date(2026, 11, n) for n in (1, 2)]
    at = [datetime.combine(d, datetime.min.time(), UTC) + timedelta(hours=h) for d in days for h in (1, 2)]
    log = logged(settings, spark, PRICES, [(0, n, when) for n, when in enumerate(at)], folder="live/main-5-5-x")
    run = Run("r", "running", [str(d) for d in days], "test", "", "", {"main": Pin("main", 6, READ, "")})
    settling = settle.Settling(settings, CLOSES, run, print)
    settling.spark, settling.outer = spark, {"prices": log}
    frame = settling.log_of(PRICES, days)
    found = sorted(tuple(r) for r in frame.select("day", "kafka.offset").collect())
    assert found == [(days[n // 2], n) for n in range(4)]
    assert frame._jdf.queryExecution().optimizedPlan().toString().count("substring_index") == cut


@pytest.mark.parametrize(
    ("rows", "reads"),
    [
        ([], [[]]),
        ([9, 5, 4], [[0], [1, 2]]),
        ([9, 9], [[0], [1]]),
        ([1, 2], [[0, 1]]),
        ([9, 9, 9, 1], [[0, 1, 2, 3]]),  # more than the plan may have
    ],
)
def test_small_days_are_read_together(monkeypatch: pytest.MonkeyPatch, rows: list[int], reads: list[list[int]]) -> None:
    monkeypatch.setattr(settle, "LARGE", 6)
    monkeypatch.setattr(settle, "MONTH", 2)
    files = [File(f"live/main-0-0-x/{n}", 1, count, date(2026, 11, 1 + n), 0) for n, count in enumerate(rows)]
    assert settle.by_large_days(files) == [[files[n] for n in some] for some in reads]


SORTED = "spark.sql.objectHashAggregate.sortBased.fallbackThreshold"


def test_rollup_alone_is_staged_with_all_its_groups_at_once(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view unites sets that may each have a day's values: those stay one after the other."""
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    stage, found = lake.stage, dict[str, str]()

    def staged(table: lake.Table, *words: Any) -> None:
        found[table.name.split("/")[-1]] = spark.conf.get(SORTED)
        stage(table, *words)

    monkeypatch.setattr(lake, "stage", staged)
    run = begun(settings, spark, [settle.yesterday(settings)], "settle", [])
    settle.work(settings, catalog([type("p", (), {"prices": PRICES, "lasts": lasts, "counts": counts})]), run, print)
    assert found == {"lasts": "50000", "counts": "1"}
    assert spark.conf.get(SORTED) == "1"


@pytest.mark.parametrize(
    ("rows", "each", "parts", "mib"),
    [
        (0, 0, 2, 1),
        (100_000, 100, 2, 128),
        (86_400_000, 100, 44, 128),
        (86_400_000, 20, 44, 38),  # smaller ones in smaller parts
        (1_000_000_000, 100, 200, 128),
    ],
)
def test_task_of_a_rollup_has_two_million_records_at_most(rows: int, each: int, parts: int, mib: int) -> None:
    files = [File(f"live/main-0-0-x/{n}", rows * each // 2, rows // 2, date(2026, 11, 1), 0) for n in range(2)]
    _, shuffled, read = settle.at_once(files).values()
    assert (int(shuffled), int(read) // settle.MIB) == (parts, mib)


def test_settings_of_a_part_of_the_work_end_with_it(spark: Any) -> None:
    unset = "spark.sql.files.maxPartitionBytes"
    with pytest.raises(InterruptedError), session.under(spark, {SORTED: "7", unset: "8m"}):
        assert (spark.conf.get(SORTED), spark.conf.get(unset)) == ("7", "8m")
        raise InterruptedError
    assert (spark.conf.get(SORTED), spark.conf.get(unset, None)) == ("1", None)


BESIDE = """
    SELECT c.day FROM {batch} AS c LEFT JOIN counts AS other ON c.day = other.day WHERE c.hours IS DISTINCT FROM other.hours"""


@view(
    reads={"lasts": lasts}, key=("day",), time="day", checks=[expect("UnexpectedRowsExpectation", unexpected_rows_query=BESIDE)]
)
def recounts(lasts):
    return lasts.groupBy(day("hour").alias("day")).agg(F.count("*").alias("hours"))


@pytest.mark.parametrize(("only", "held"), [(["recounts"], True), (["recounts", "counts"], False)])
def test_check_that_names_a_view_which_the_run_leaves_out_says_so(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, only: list[str], held: bool
) -> None:
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    run = begun(settings, spark, [settle.yesterday(settings)], "settle", only)
    of = catalog([type("p", (), {"prices": PRICES, "lasts": lasts, "counts": counts, "recounts": recounts})])
    done = settle.work(settings, of, run, print)
    said = " ".join(done.tables["recounts"]["reasons"])
    assert ("(it was held to counts, as readers have it: --only has left it out)" in said, bool(said)) == (held, held)


#   prices of yesterday and of today, which is not over
@pytest.mark.parametrize(
    ("kind", "only", "over", "passed"),
    [
        ("settle", ["counts"], True, {"prices": 2, "counts": 4}),
        ("replay", [], True, {"prices": 2, "lasts": 8, "counts": 4}),
        ("replay", [], False, {"lasts": 3}),
    ],
    ids=["of a rollup that is not chosen", "with a day that is not over", "with that day alone"],
)
def test_checks_of_a_run_compare_tables_of_the_same_days(
    settings: Settings,
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    only: list[str],
    over: bool,
    passed: dict[str, int],
) -> None:
    last = settle.yesterday(settings)
    days = [last, last + timedelta(days=1)][0 if over else 1 :]
    run = begun(settings, spark, days, kind, only)
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    settle.work(settings, catalog([type("sums", (), {"prices": PRICES, "lasts": lasts, "counts": counts})]), run, print)
    assert {name: said["reasons"] for name, said in run.tables.items()} == {name: [] for name in run.tables}
    assert {name: said["checks"] for name, said in run.tables.items() if said["checks"]} == passed


NO_ROW = expect("UnexpectedRowsExpectation", unexpected_rows_query="SELECT * FROM {batch}", description="there is no row")


def most(counts):
    return counts.select("day", "hours")


@pytest.mark.parametrize(
    "lower",
    [
        replace(lasts, checks=(NO_ROW,)),
        view(reads={"prices": PRICES}, key=("hour",), time="hour", checks=[NO_ROW])(lasts.function),
    ],
    ids=["rollup", "view"],
)
def test_table_is_held_back_by_a_check_of_what_it_is_made_of_though_it_was_settled_alone(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch, lower: Rollup | View
) -> None:
    upper = replace(counts, reads={"lasts": lower}, checks=())
    top = view(reads={"counts": upper}, key=("day",), time="day")(most)
    of = catalog([type("sums", (), {"prices": PRICES, "lasts": lower, "counts": upper, "most": top})])
    run = begun(settings, spark, [settle.yesterday(settings)], "settle", only=["counts"])
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    settle.work(settings, of, run, print)
    assert {n: said["gate"] for n, said in run.tables.items()} == {"prices": "passed", "counts": "failed", "most": "failed"}
    [why] = run.tables["counts"]["reasons"]
    assert why.startswith('lasts: "there is no row" failed on 1 row') and run.tables["most"]["reasons"] == [why]
    held = [(p.table, p.version, p.blocked) for p in settle.publish(settings, of, run.id)]
    assert held == [("counts", None, (why,)), ("most", None, (why,))]
    done = settle.publish(settings, of, run.id, over=["there is no row"], reason="it is known")
    assert [(p.table, p.blocked, p.version is not None) for p in done] == [("counts", (), True), ("most", (), True)]


ONE_HOUR = expect(
    "UnexpectedRowsExpectation", unexpected_rows_query="SELECT * FROM {batch} WHERE hours > 1", description="one hour"
)


#   days before today; a day that is wrong has prices of two hours
@pytest.mark.parametrize(
    ("days", "wrong", "runs"),
    [
        ([3, 2, 1], None, [([3, 2, 1], "passed")]),
        ([1], 1, [([1], "failed")]),
        ([3, 2, 1], 2, [([1], "passed"), ([3, 2], "failed")]),
        ([3, 2, 1], 1, [([1], "failed"), ([3, 2], "passed")]),
    ],
    ids=["all right", "one day", "an old day is wrong", "the night's own is"],
)
def test_night_s_day_is_not_held_back_by_a_check_that_an_older_one_fails_nor_that_one_by_its(
    settings: Settings,
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    days: Sequence[int],
    wrong: int | None,
    runs: list[tuple[list[int], str]],
) -> None:
    today = settle.yesterday(settings) + timedelta(days=1)
    ago = {n: today - timedelta(days=n) for n in days}
    first = begun(settings, spark, [*ago.values()], "settle", [], twice=ago.get(wrong or 0))
    monkeypatch.setattr(lake, "pins", lambda *_: first.pins)
    monkeypatch.setattr(settle, "refuse_unread", lambda *_: None)
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    of = catalog([type("sums", (), {"prices": PRICES, "lasts": lasts, "counts": replace(counts, checks=(ONE_HOUR,))})])
    found = settle.night(settings, of, list(ago.values()), "nightly")
    assert [(r.days, r.state, r.tables["counts"]["gate"]) for r in found] == [
        ([str(ago[n]) for n in of_run], "staged", gate) for of_run, gate in runs
    ]
    others = [(r.state, r.note) for r in lake.runs(settings) if r.id not in {first.id, *(one.id for one in found)}]
    note = f"it would hold back counts: {ago[1]} is settled apart from the days before it"
    assert others == ([("dropped", note)] if len(runs) > 1 else [])


def test_a_night_that_is_taken_apart_and_then_ended_leaves_no_run_that_waits(
    settings: Settings, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [settle.yesterday(settings) - timedelta(days=n) for n in (0, 1)]
    first = begun(settings, spark, days, "settle", [], twice=days[1])
    monkeypatch.setattr(lake, "pins", lambda *_: first.pins)
    monkeypatch.setattr(settle, "refuse_unread", lambda *_: None)
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: spark)
    sums = {"prices": PRICES, "lasts": lasts, "counts": replace(counts, checks=(ONE_HOUR,))}
    settles, of = settle.settle, catalog([type("sums", (), sums)])
    ended = KeyboardInterrupt("cleared in Airflow")

    def until_the_older(settings: Settings, catalog: Catalog, some: Sequence[date], *said: Any) -> Run:
        if list(some) == days[1:]:
            raise ended
        return settles(settings, catalog, some, *said)

    monkeypatch.setattr(settle, "settle", until_the_older)
    with pytest.raises(KeyboardInterrupt, match="cleared in Airflow"):
        settle.night(settings, of, days, "nightly")
    assert [r.state for r in lake.runs(settings) if r.id != first.id] == ["dropped", "dropped"]


def test_a_replay_reads_each_part_of_kafka_by_a_group_of_its_own(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def between(*words: object) -> None:
        asked.append(words)
        raise InterruptedError

    monkeypatch.setattr("tidemark.kafka.between", between)
    settling = at_work(settings.model_copy(update={"chunk_records": 5}), lambda _: None)
    settling.spark = None  # type: ignore[assignment]
    with pytest.raises(InterruptedError):
        settling.read_again(PRICES)
    assert asked == [(None, settling.settings, "prices", {0: (0, 4)}, "tidemark-r")]


#   at 100 records a second, of which `give_way_at` (30 seconds) is 3,000; a beat before this process began is of one that is gone
@pytest.mark.parametrize(
    ("until", "beat", "waited"), [(0, NOW, 0), (7, NOW, 7), (10_000, NOW, 600), (10_000, NOW - timedelta(days=999), 0)]
)
@pytest.mark.parametrize("work", [lambda one: one.stage(closes), lambda one: one.read_again(PRICES)], ids=["a chunk", "a part"])
def test_what_is_computed_again_waits_while_a_stream_is_behind_and_ten_minutes_at_most_but_not_for_one_that_was_killed(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[settle.Settling], None],
    until: int,
    beat: datetime,
    waited: int,
) -> None:
    now, said = [0], []
    (settings.state / "main").mkdir(parents=True)
    said_last = {"state": "running", "pid": os.getpid(), "at": beat.isoformat()}
    (settings.state / "main" / "heartbeat.json").write_text(json.dumps(said_last))

    def goes_by(seconds: int) -> None:
        now[0] += seconds
        progress = {"lag": 3_001 if now[0] < until else 3_000, "records_per_second": 100.0}
        (settings.state / "main" / "progress.json").write_text(json.dumps(progress))

    goes_by(0)
    settling = at_work(settings, said.append)
    monkeypatch.setattr(settle, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=goes_by))  # other threads keep theirs
    with suppress(AttributeError):  # then it begins, for which there is no Spark here
        work(settling)
    assert now == [waited]
    assert said == (["waiting: stream main is behind by more than 30 seconds"] if waited else [])
