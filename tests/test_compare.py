"""Which rows late events explain: the law of `compare.spans_of_late`, case by case, over a log and a ledger.

And that a difference which is planted in a rollup or a view is found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from tidemark import compare, fold, lake, query, speed
from tidemark.functions import distinct
from tidemark.model import Catalog, Live, Topic, View, rollup, view
from tidemark.settings import Settings

DAY = date(2024, 11, 20)
CLICKS = Topic(
    "clicks", key="id", partitions=2, schema="id STRING NOT NULL, clicked_at TIMESTAMP NOT NULL", event_time="clicked_at"
)


@rollup(reads={"clicks": CLICKS}, key=("minute",), time="minute", merge={"ids": "distinct"})
def minutes(clicks): ...


@view(reads={"minutes": minutes}, key=("hour",), time="hour", live=Live("30 seconds", "2 hours"))
def hours(minutes): ...


TABLE = replace(CLICKS, compacted=True)


@view(reads={"clicks": TABLE.changes}, key=("hour",), time="hour", live=Live("30 seconds", "2 hours"))
def joined(clicks): ...


@view(reads={"clicks": TABLE}, key=("day",), time="day", live=Live("30 seconds", "2 hours"))
def held(clicks): ...


OTHER = {"lookback": "1 hour", "lookahead": "90 minutes"}


@view(
    reads={"hours": replace(hours, **OTHER)}, key=("hour",), time="hour", lookback="30 minutes", live=Live("1 minute", "2 hours")
)
def over(hours): ...


ADS = replace(CLICKS, name="ads", stream="alarms")


@view(reads={"minutes": minutes, "ads": ADS}, key=("hour",), time="hour", live=Live("30 seconds", "2 hours"))
def of_two_streams(minutes, ads): ...


DAYS = replace(hours, name="days", key=("day",), time="day")


@view(reads={"days": DAYS}, key=("day",), time="day", lookback="12 hours", live=Live("1 minute", "2 hours"))
def over_days(days): ...


MARKS = replace(hours, name="marks")


@MARKS.live(every="5 seconds", back="2 hours", reads={"minutes": minutes}, coarse=True)
def newest(minutes): ...


SPRING = {"zone": "Europe/Berlin", "day": date(2024, 4, 1), "published": 8, "view": replace(hours, lookback="1 day")}


def at(hour: int, minute: int = 0, day: date = DAY) -> datetime:
    return datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)


NEXT = DAY + timedelta(days=1)
END = at(0, 0, NEXT + timedelta(days=1))
#  seq  partition  from, until  stream time
BATCHES = (
    (7, 0, 0, 10, at(12)),
    (8, 0, 10, 20, at(13)),
    (8, 1, 0, 10, at(13)),
    (9, 0, 20, 5000, at(13)),
)


def explained(spark: Any, tmp_path: Path, events: Sequence[tuple[int, int, datetime]], **more: Any) -> list[int] | list[date]:
    """Which hours of the day (or which days, for a view of days) late events explain, where a day's rows differ."""
    day = more.get("day", DAY)
    settings, one = Settings(_env_file=None, home=tmp_path, zone=more.get("zone", "UTC")), more.get("view", hours)
    ledger, log, ads = lake.ledger(settings), lake.table(settings, CLICKS), lake.table(settings, ADS)
    ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    for table in (log, ads) if one is of_two_streams else (log,):
        table.create(fold.schema_of(fold.nothing(spark, fold.log_schema(CLICKS))))
    entered = [
        {
            "stream": "main",
            "topic": "clicks",
            "seq": seq,
            "partition": partition,
            "from_offset": start,
            "until_offset": end,
            "stream_time": time,
            "started_at": time,
            "finished_at": more.get("finished", {}).get(seq, time),
            "day": DAY,
        }
        for seq, partition, start, end, time in BATCHES
    ]
    # Another stream was at 12:30 a minute before. Where they are not quiet, both have come to the end of all days since.
    alarms = {"stream": "alarms", "topic": "ads", "stream_time": at(12, 30), "finished_at": at(11, 59)}
    entered.append({**entered[0], **alarms})
    if "quiet" not in more:
        last = {"from_offset": 5000, "until_offset": 5000, "seq": 10}
        entered += [{**one, **last, **dict.fromkeys(("stream_time", "finished_at"), END)} for one in entered[-2:]]
    lake.append(ledger, lake.Batch("main", 7, 9), rows_of(ledger, entered))
    records = [
        {
            "clicked_at": time,
            "kafka": {"partition": p, "offset": o, "value": b"{}"},
            "reject": more.get("reject"),
            "day": time.astimezone(settings.tz).date(),
        }
        for p, o, time in events
    ]
    lake.append(log, lake.Batch("main", 7, 9), rows_of(log, records))
    run = lake.Run("new", "running", [str(day)], "", "", "0", pins={"main": lake.Pin("main", more.get("pin", 9), {}, "")})
    topic = TABLE if one in (joined, held) else CLICKS
    views = [v for v in (*one.reads.values(), one) if isinstance(v, View)]
    catalog = Catalog({"clicks": topic, "ads": ADS}, {"minutes": minutes}, {v.name: v for v in views})
    pins = {"main": lake.Pin("main", more["published"], {"clicks": {"0": 99, "1": 99}}, "")} if "published" in more else None
    arrivals = compare.Arrivals(spark, settings, more.get("lived", {}))
    spans = compare.spans_of_late(arrivals, catalog, one, one.refresh, run, [day], pins)
    times = [at(0, 0, day) + timedelta(hours=n) for n in range(-24, 48)]
    candidates = (
        pa.table({"day": sorted({t.date() for t in times})})
        if one.time == "day"
        else pa.table({"hour": pa.array(times, pa.timestamp("us", "UTC"))})
    )
    found = [r[one.time] for r in fold.within(spark.createDataFrame(candidates), one.time, spans).toArrow().to_pylist()]
    return sorted(found) if one.time == "day" else sorted(int((t - at(0, 0, day)) / timedelta(hours=1)) for t in found)


def rows_of(table: lake.Table, rows: list[dict[str, Any]]) -> list[Any]:
    return lake.write_arrow(table, "live/main-7-9-aa", pa.Table.from_pylist(rows, pa.schema(table.delta().schema())))


@pytest.mark.parametrize(
    ("events", "more", "hours_"),
    [
        # stream time of batch 7 is 12:00, `back` is two hours
        ([(0, 0, at(10))], {}, []),
        ([(0, 0, at(9, 59))], {}, [9]),
        ([(0, 9, at(10, 30))], {}, []),
        ([(0, 10, at(10, 30))], {}, [10]),  # the first offset of batch 8
        ([(1, 9, at(10, 30))], {}, [10]),  # the same offset of another partition is of another batch
        ([(0, 0, at(9, 59))], {"reject": "not JSON"}, []),
        ([(0, 0, at(1)), (0, 1, at(1, 59)), (0, 2, at(5, 30)), (0, 3, at(11, 30))], {}, [1, 5]),
        # the stream that refreshes the view is not the one that has read the event
        ([(0, 0, at(10, 29))], {"view": of_two_streams}, [10]),
        ([(0, 0, at(10, 30))], {"view": of_two_streams}, []),
        ([(0, 10, at(10, 59))], {"view": of_two_streams}, [10]),
        # what one side cannot have: beyond this run's pin, after the last refreshes, beyond the publication's pin
        ([(0, 20, at(12, 30))], {"pin": 8}, [12]),
        ([(0, 4999, at(12, 30))], {"pin": 8}, [12]),
        ([(0, 19, at(12, 30))], {"pin": 8}, []),
        ([(0, 20, at(12, 30))], {"finished": {9: datetime.now(UTC) + timedelta(hours=1)}}, [12]),
        # the stream had ended half a minute after batch 9, and two minutes after it
        ([(0, 20, at(12, 30))], {"lived": {"main": at(13) + timedelta(seconds=30)}}, [*range(12, 48)]),
        ([(0, 20, at(12, 30))], {"lived": {"main": at(13, 2)}}, [*range(14, 48)]),
        ([(0, 20, at(12, 30))], {"lived": {"alarms": at(13)}}, []),
        ([(0, 10, at(12, 30)), (0, 20, at(11, 30))], {"published": 8}, [11]),
        ([(0, 0, at(1))], {"published": 7}, []),
        # marks are computed again once they are two hours old, and stream time is 13:00
        ([(0, 10, at(11, 30))], {}, []),
        ([(0, 10, at(11, 30))], {"view": MARKS, "quiet": True}, [11, *range(14, 48)]),
        ([(0, 0, at(11, 30))], {"view": MARKS, "published": 9}, []),
        # stream time came to 13:00, and no further
        ([(0, 0, at(10))], {"view": held, "quiet": True}, [NEXT]),
        ([(0, 0, at(10))], {"view": held, "quiet": True, "published": 9}, []),
        ([(0, 10, at(12, 30))], {"view": replace(hours, lookback="2 hours"), "quiet": True}, [*range(14, 48)]),
        # what a row looks at
        ([(0, 0, at(5, 30))], {"view": replace(hours, lookback="1 hour")}, [5, 6]),
        ([(0, 0, at(5, 30))], {"view": replace(hours, lookahead="1 hour")}, [4, 5]),
        ([(0, 0, at(5, 30))], {"view": replace(hours, **OTHER)}, [4, 5, 6]),
        ([(0, 0, at(5, 30))], {"view": over}, [4, 5, 6, 7]),
        ([(0, 0, at(23, 30, DAY - timedelta(days=1)))], {"view": replace(hours, lookback="1 hour")}, [-1, 0]),
        ([(0, 0, at(5, 30))], {"view": DAYS}, [DAY]),
        ([(0, 0, at(0))], {"view": DAYS}, [DAY]),
        ([(0, 0, at(0, 30))], {"view": replace(DAYS, lookahead="1 hour")}, [DAY - timedelta(days=1), DAY]),
        ([(0, 0, at(5, 30))], {"view": over_days}, [DAY, NEXT]),
        ([(0, 0, at(5, 30, DAY - timedelta(days=1)))], {"view": over_days}, [DAY - timedelta(days=1), DAY]),
        # midnight is 18:30 and cuts an hour, which is the earlier day's: the event is of the later one
        ([(0, 20, at(18, 45))], {"zone": "Asia/Kolkata", "published": 8}, [18]),
        # the day begins at 22:00, and the one before it has 23 hours: its first row looks at the last hour of the one before that
        ([(0, 20, at(22, 30, date(2024, 3, 30)))], SPRING, [*range(-24, -1)]),
        # a change is looked at for ever after, also one of days ago
        ([(0, 0, at(9, 59))], {"view": joined}, [*range(9, 48)]),
        ([(0, 0, at(10))], {"view": joined}, []),
        ([(0, 20, at(12, 30, DAY - timedelta(days=9)))], {"view": joined, "published": 8}, [*range(-24, 48)]),
        ([(0, 0, at(9, 59))], {"view": held}, [DAY, NEXT]),
    ],
)
def test_rows_that_late_events_explain(spark, tmp_path, events, more, hours_):
    assert explained(spark, tmp_path, events, **more) == hours_


def test_only_files_that_may_hold_a_late_event_are_read_for_it(spark, tmp_path):
    explained(spark, tmp_path, [(0, 0, at(10))])  # for its ledger: stream time of batch 7 is 12:00, of 8 and 9 13:00

    def file(lo: int, hi: int, low: Any, folder: str = "live") -> lake.File:
        path = f"{folder}/main-{lo}-{hi}-{len(files):04x}/day=2024-11-20/part-0.parquet"
        return lake.File(path, 1, 1, DAY, 0, low, at(10, 59))

    files: list[lake.File] = []
    for lo, hi, low in ((7, 7, at(10)), (7, 7, at(9, 59)), (8, 9, at(11)), (7, 8, at(10, 59)), (5, 5, at(11)), (7, 7, None)):
        files.append(file(lo, hi, low))
    files += [file(7, 7, at(11), folder="mended"), file(7, 7, DAY)]
    arrivals, never = compare.Arrivals(spark, Settings(_env_file=None, home=tmp_path)), datetime.max.replace(tzinfo=UTC)

    def late(due: datetime = never, recent: datetime | None = None) -> list[int]:
        found = arrivals.late(files, timedelta(hours=2), due, recent)
        return [n for n, f in enumerate(files) if f.path in found]

    assert late() == [1, 3, 4, 5, 6, 7]  # of batch 5 the ledger has nothing
    assert late(due=at(12)) == [1, 2, 3, 4, 5, 6, 7]  # when batch 7 came
    assert late(due=at(11, 59)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert late(recent=at(10, 58)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert late(recent=at(11)) == late()


def test_publications_that_readers_have_days_from(tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)

    def save(name: str, days: list[date], published: str | None) -> lake.Run:
        tables = {"hours": {"gate": "passed", **({"published": published} if published else {})}}
        pins = {"main": lake.Pin("main", len(name), {}, "")}
        run = lake.Run(name, "published", [str(d) for d in days], "", published or "", "0", pins=pins, tables=tables)
        lake.save(settings, run)
        return run

    save("a", [DAY, NEXT], "2024-11-22T00:00")
    save("bbb", [NEXT], "2024-11-24T00:00")
    save("cc", [NEXT], "2024-11-23T00:00")
    save("staged", [DAY], None)
    run = save("own", [DAY, NEXT], "2024-11-25T00:00")
    later = NEXT + timedelta(days=1)
    found = compare.origins(settings, hours, run, [DAY, NEXT, later])
    assert [(pins and pins["main"].seq, days) for pins, days in found] == [(1, [DAY]), (3, [NEXT]), (None, [later])]


def rolled(spark: Any, held: Mapping[int, str]) -> Any:
    """Rows of the rollup: by minute the ids of its set, a letter each."""
    clicks = [{"minute": at(10, minute), "id": letter} for minute, letters in held.items() for letter in letters]
    rows = spark.createDataFrame(pa.Table.from_pylist(clicks)).groupBy("minute").agg(distinct("id").alias("ids"))
    return fold.with_day(rows.select(F.col("minute"), "ids"), "minute")


PUBLISHED = ({0: "ab", 1: "cd", 2: "e"}, {0: "bA", 1: "d"})
"""Two batches, of which readers have the union: Aab, cd, e."""
BEYOND = {0: "z", 9: "y"}
"""A third one, that the run has not read and so does not compare."""


@pytest.mark.parametrize(
    ("staged", "found"),
    [
        ({0: "baA", 1: "dc", 2: "ee"}, None),
        ({0: "abA", 1: "cd", 2: "e", 3: "f"}, ("missing", {"ids": 1}, None)),
        ({0: "abA", 1: "cd"}, ("extra", None, {"ids": 1})),
        ({0: "abA", 1: "cd", 2: "ef"}, ("changed", {"ids": 2}, {"ids": 1})),
        ({0: "ab", 1: "cd", 2: "e"}, ("changed", {"ids": 2}, {"ids": 3})),
        ({0: "abA", 1: "cD", 2: "e"}, ("changed", {"ids": 2}, {"ids": 2})),  # as many, and another one
        ({0: "abA", 1: "cd", 2: "a"}, ("changed", {"ids": 1}, {"ids": 1})),
    ],
)
def test_a_row_and_a_value_of_a_set_that_are_planted_in_a_rollup_are_found(spark, tmp_path, staged, found):
    settings = Settings(_env_file=None, home=tmp_path)
    table = lake.table(settings, minutes)
    table.create(fold.schema_of(rolled(spark, staged)))
    for seq, held in enumerate((*PUBLISHED, BEYOND)):
        batch = lake.Batch("main", seq, seq)
        lake.append(table, batch, lake.write_spark(table, batch.folder, rolled(spark, held)))
    lake.stage(table, "new", rolled(spark, staged))
    run = lake.Run("new", "staged", [str(DAY)], "", "", "0", pins={"main": lake.Pin("main", 1, {}, "")})
    [one] = compare.compare(spark, settings, Catalog({"clicks": CLICKS}, {"minutes": minutes}, {}), run, ["minutes"])

    sides = [(s["what"], *(s[side] and {"ids": s[side]["ids"]} for side in ("run", "published"))) for s in one.samples]
    assert sides == ([found] if found else [])
    counts = {"missing": one.missing, "extra": one.extra, "changed": one.changed}
    assert counts == {what: int(bool(found) and found[0] == what) for what in counts}
    assert one.rows == len(staged)


@rollup(
    reads={"clicks": CLICKS},
    key=("name", "minute"),
    time="minute",
    merge={"least": "min", "most": "max", "status": "latest(by=seq)", "seq": "latest(by=seq)"},
)
def bids(clicks): ...


BIDS = "name STRING, least DECIMAL(18,2), most DECIMAL(18,2), status STRING, seq BIGINT, minute TIMESTAMP"
TWO: list[list[tuple[Any, ...]]] = [
    [("a", "1.00", "2.00", "new", 1), ("b", "5.00", None, None, 1)],
    [("a", "0.50", "1.00", "paid", 2)],
]
ANN, BOB = ("a", "0.50", "2.00", "paid", 2), ("b", "5.00", None, None, 1)
"""Two batches of bids, and what they merge to."""
PLANTED: list[tuple[list[tuple[Any, ...]], tuple[int, int, int]]] = [
    ([BOB, ANN], (0, 0, 0)),
    ([("a", "0.51", "2.00", "paid", 2), BOB], (1, 0, 0)),
    ([("a", "0.50", "2.01", "paid", 2), BOB], (1, 0, 0)),
    ([("a", "0.50", "2.00", "new", 2), BOB], (1, 0, 0)),
    ([("a", "0.50", "2.00", "paid", 3), BOB], (1, 0, 0)),
    ([ANN, ("b", None, "5.00", None, 1)], (1, 0, 0)),
    ([ANN, ("b", "5.00", None, "", 1)], (1, 0, 0)),
    ([("A", *ANN[1:]), BOB], (0, 1, 1)),
    ([("", *ANN[1:]), (None, *BOB[1:])], (0, 2, 2)),
    ([ANN], (0, 0, 1)),
    ([], (0, 0, 2)),
]
"""Of a day each: what is staged, and how many rows are changed, missing and extra."""


def test_a_cent_a_key_and_a_null_that_are_planted_in_a_rollup_are_found(spark, tmp_path):
    days = [DAY + timedelta(days=n) for n in range(len(PLANTED))]

    def made(by_day: Sequence[Sequence[tuple[Any, ...]]]) -> Any:
        told = [
            (name, *(amount and Decimal(amount) for amount in (least, most)), *rest, at(10, 0, day))
            for day, rows in zip(days, by_day, strict=True)
            for name, least, most, *rest in rows
        ]
        return fold.with_day(spark.createDataFrame(told, BIDS), "minute")

    settings = Settings(_env_file=None, home=tmp_path)
    table, staged = lake.table(settings, bids), made([rows for rows, _ in PLANTED])
    table.create(fold.schema_of(staged))
    for seq, held in enumerate(TWO):
        batch = lake.Batch("main", seq, seq)
        lake.append(table, batch, lake.write_spark(table, batch.folder, made([held] * len(days)).coalesce(1)))
    lake.stage(table, "new", staged.coalesce(1))
    run = lake.Run("new", "staged", [str(d) for d in days], "", "", "0", pins={"main": lake.Pin("main", 1, {}, "")})
    found = compare.compare(spark, settings, Catalog({"clicks": CLICKS}, {"bids": bids}, {}), run, ["bids"])
    assert [one.day for one in found] == days
    assert [(one.rows, (one.changed, one.missing, one.extra)) for one in found] == [(len(rows), n) for rows, n in PLANTED]


AMOUNTS = "hour TIMESTAMP, name STRING, amount DECIMAL(18,2), settled BOOLEAN, day DATE"
SHOWN = [(at(10), "a", "1.00"), (at(11), None, "2.00"), (at(11), "b", None)]


def amounts(spark: Any, rows: Sequence[tuple[datetime, str | None, str | None]], settled: bool) -> Any:
    told = [(hour, name, amount and Decimal(amount), settled, hour.date()) for hour, name, amount in rows]
    return spark.createDataFrame(told, AMOUNTS)


@pytest.mark.parametrize(
    ("staged", "vectors", "counts"),
    [
        (SHOWN[::-1], False, (0, 0, 0)),
        (SHOWN[::-1], True, (0, 0, 0)),
        ([*SHOWN[1:], (at(10), "a", "1.01")], False, (1, 0, 0)),
        ([*SHOWN[1:], (at(10), "a", "1.01")], True, (1, 0, 0)),
        ([*SHOWN[1:], (at(10), "A", "1.00")], False, (0, 1, 1)),
        ([*SHOWN[:2], (at(11), "b", "0.00")], False, (1, 0, 0)),
        ([SHOWN[0], (at(11), "", "2.00"), SHOWN[2]], False, (0, 1, 1)),
        ([(at(10), "a", "2.00"), (at(11), None, "1.00"), SHOWN[2]], False, (2, 0, 0)),
        (SHOWN[:2], False, (0, 0, 1)),
        ([], False, (0, 0, 3)),
    ],
)
def test_a_cent_a_key_and_a_null_that_are_planted_in_a_view_are_found(spark, tmp_path, staged, vectors, counts):
    """A view with deletion vectors DuckDB does not read; where it reads one that is the same, nobody asks Spark."""
    view, settings = replace(hours, key=("hour", "name"), refresh=None), Settings(_env_file=None, home=tmp_path)
    table = lake.table(settings, view)
    table.create(fold.schema_of(amounts(spark, SHOWN, settled=False)))
    batch, gone = lake.Batch("main", 0, 0), [(at(9), "gone", "1.00")] if vectors else []
    lake.append(table, batch, lake.write_spark(table, batch.folder, amounts(spark, [*SHOWN, *gone], settled=False)))
    if vectors:
        spark.sql(f"ALTER TABLE delta.`{table.path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
        spark.sql(f"DELETE FROM delta.`{table.path}` WHERE name = 'gone'")
    lake.stage(table, "new", amounts(spark, staged, settled=True))
    run = lake.Run("new", "staged", [str(DAY)], "", "", "0")
    asked = None if staged == SHOWN[::-1] and not vectors else spark
    [one] = compare.compare(asked, settings, Catalog({"clicks": CLICKS}, {}, {view.name: view}), run, [view.name])
    assert (one.rows, (one.changed, one.missing, one.extra)) == (len(staged), counts)


ONCE, OTHER_CENT = SHOWN[0], (at(10), "a", "1.01")


@pytest.mark.parametrize(
    ("published", "staged", "counts"),
    [
        ([*SHOWN, ONCE], SHOWN, (0, 0, 1)),
        (SHOWN, [*SHOWN, ONCE], (0, 1, 0)),
        ([*SHOWN, ONCE, ONCE], SHOWN, (0, 0, 2)),
        ([*SHOWN, SHOWN[1]], SHOWN, (0, 0, 1)),  # of a key with a null
        ([*SHOWN, OTHER_CENT], SHOWN, (0, 0, 1)),
        ([*SHOWN, ONCE], [*SHOWN[1:], OTHER_CENT], (1, 0, 1)),
        ([*SHOWN, ONCE], [*SHOWN, SHOWN[2]], (0, 1, 1)),  # as many rows
        ([*SHOWN, ONCE], [*SHOWN, ONCE], (0, 0, 0)),
    ],
)
def test_row_that_a_view_has_twice_is_found(spark, tmp_path, published, staged, counts):
    view, settings = replace(hours, key=("hour", "name"), refresh=None), Settings(_env_file=None, home=tmp_path)
    table = lake.table(settings, view)
    table.create(fold.schema_of(amounts(spark, SHOWN, settled=False)))
    batch = lake.Batch("main", 0, 0)
    lake.append(table, batch, lake.write_spark(table, batch.folder, amounts(spark, published, settled=False)))
    lake.stage(table, "new", amounts(spark, staged, settled=True))
    run = lake.Run("new", "staged", [str(DAY)], "", "", "0")
    [one] = compare.compare(spark, settings, Catalog({"clicks": CLICKS}, {}, {view.name: view}), run, [view.name])
    assert (one.rows, (one.changed, one.missing, one.extra)) == (len(staged), counts)
    assert len(one.samples) == sum(counts)


NESTED = """hour TIMESTAMP, a STRING, b STRING, one ARRAY<INT>, other ARRAY<INT>, place STRUCT<x: INT, y: INT>,
    lists ARRAY<ARRAY<INT>>, times ARRAY<TIMESTAMP>, settled BOOLEAN, day DATE"""
PLAIN: dict[str, Any] = dict.fromkeys(("a", "b", "one", "other", "place", "lists", "times"))
LIKE = [
    ({"a": "x"}, {"b": "x"}),
    ({"a": ""}, {}),
    ({"one": []}, {}),
    ({"one": [None]}, {"one": []}),
    ({"one": [1], "other": [2]}, {"one": [1, 2], "other": []}),
    ({"one": [1]}, {"other": [1]}),
    ({"one": [1, None]}, {"one": [None, 1]}),
    ({"place": (None, None)}, {}),
    ({"place": (1, None)}, {"place": (None, 1)}),
    ({"lists": [[1], []]}, {"lists": [[], [1]]}),
    ({"lists": [[1], [2]]}, {"lists": [[1, 2]]}),
    ({"lists": [None]}, {"lists": [[]]}),
    ({"times": [at(1)]}, {"times": [at(1) + timedelta(microseconds=1)]}),
    ({"a": "x", "one": [1], "place": (1, None)}, {"a": "x", "one": [1], "place": (1, None)}),
]
"""What readers have of a day and what is staged; of the last one it is the same."""


@pytest.mark.parametrize("vectors", [False, True])
def test_a_null_and_where_an_array_ends_that_are_planted_in_a_view_are_found(spark, tmp_path, vectors):
    """By DuckDB, and of a view with deletion vectors by Spark."""
    view, settings = replace(hours, refresh=None), Settings(_env_file=None, home=tmp_path)
    days = [DAY + timedelta(days=n) for n in range(len(LIKE))]

    def rows(side: int, settled: bool) -> Any:
        told = [(at(10, 0, d), *(PLAIN | one[side]).values(), settled, d) for d, one in zip(days, LIKE, strict=True)]
        return spark.createDataFrame(told, NESTED)

    table = lake.table(settings, view)
    table.create(fold.schema_of(rows(0, settled=False)))
    batch, published = lake.Batch("main", 0, 0), rows(0, settled=False)
    published = published.union(published.withColumn("a", F.lit("gone"))) if vectors else published
    lake.append(table, batch, lake.write_spark(table, batch.folder, published.coalesce(1)))
    lake.stage(table, "new", rows(1, settled=True))
    run = lake.Run("new", "staged", [str(d) for d in days], "", "", "0")
    if vectors:
        spark.sql(f"ALTER TABLE delta.`{table.path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
        spark.sql(f"DELETE FROM delta.`{table.path}` WHERE a = 'gone'")
        with pytest.raises(query.QueryError, match="deletion vectors"):
            compare.by_duckdb(settings, view, run, days)
    found = compare.compare(spark, settings, Catalog({"clicks": CLICKS}, {}, {view.name: view}), run, [view.name])
    assert [(one.changed, one.missing, one.extra) for one in found] == [(1, 0, 0)] * (len(LIKE) - 1) + [(0, 0, 0)]


def only_sample(spark, settings: Settings, view: View, published: Any, staged: Any) -> Any:
    """The one row of a day that differs between what readers have of a view and what is staged."""
    table = lake.table(settings, view)
    table.create(fold.schema_of(published))
    lake.append(table, lake.Batch("main", 0, 0), lake.write_spark(table, lake.Batch("main", 0, 0).folder, published))
    lake.stage(table, "new", staged)
    run = lake.Run("new", "staged", [str(DAY)], "", "", "0")
    [one] = compare.compare(spark, settings, Catalog({"clicks": CLICKS}, {}, {view.name: view}), run, [view.name])
    (sample,) = one.samples
    return sample


def test_difference_is_shown_of_a_view_with_a_key_that_is_called_what(spark, tmp_path):
    view, settings = replace(hours, key=("hour", "what"), refresh=None), Settings(_env_file=None, home=tmp_path)
    published, staged = (
        amounts(spark, rows, n == 1).withColumnRenamed("name", "what") for n, rows in enumerate((SHOWN[:2], SHOWN))
    )
    sample = only_sample(spark, settings, view, published, staged)
    assert (sample["what"], sample["run"]["what"], sample["published"]) == ("missing", "b", None)


def test_sample_shows_a_difference_of_a_microsecond(spark, tmp_path):
    view, settings = replace(hours, refresh=None), Settings(_env_file=None, home=tmp_path)
    columns = "hour TIMESTAMP, last TIMESTAMP, settled BOOLEAN, day DATE"
    published, staged = (
        spark.createDataFrame([(at(10), at(10) + n * timedelta(microseconds=1), n == 1, DAY)], columns) for n in (0, 1)
    )
    sample = only_sample(spark, settings, view, published, staged)
    assert [sample[side]["last"][-10:] for side in ("published", "run")] == ["00.000000Z", "00.000001Z"]
