"""Each check that the traffic pipeline declares holds on a day that is right, and trips on a day that is wrong."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from tidemark import fold, quality
from tidemark.model import catalog
from tidemark.pipelines import traffic

CATALOG = catalog([traffic])
DAY = date(2026, 11, 19)
START = datetime(2026, 11, 19, tzinfo=UTC)
END = START + timedelta(days=1)
HOURS = [START + timedelta(hours=n) for n in range(24)]
NOON = START + timedelta(hours=12)


def record(offset, reject=None, day=DAY):
    own = (None,) * 4 if reject else (f"e{offset}", "v", "/", NOON)
    return (*own, (0, offset, NOON, None, bytearray(b"{}"), None), reject, day)


def rows_of(right):
    """Every table of one day: right, or wrong in each way that a declared check names."""
    hours = [("/", h, 10, 4) for h in HOURS] if right else [("/", h, 10, 4) for h in HOURS[:-2]] + [("/", HOURS[-2], 0, 11)]
    pv, uv = (240, 30) if right else (241, 3)
    before = (
        [] if right else [record(n, day=DAY - timedelta(days=1)) for n in range(1000, 1800)]
    )  # which do not make up for the day
    return {
        "page_views": [record(n) for n in range(199)] + [record(199, "not JSON")] * (1 if right else 9) + before,
        "last_hour": [("/", NOON, 2, 2 if right else 3, True, DAY)],
        "site_last_hour": [(NOON, 2, 2 if right else 3, True, DAY)],
        "hourly_traffic": [(*h, True, DAY) for h in hours],
        "site_hourly_traffic": [(*h[1:], True, DAY) for h in hours],
        "daily_traffic": [("/", pv, uv, True, DAY), *([] if right else [("/b", 1, 2, True, DAY)])],
        "site_daily_traffic": [(pv, uv, True, DAY), *([] if right else [(1, 2, True, DAY)])],
    }


def verdicts(spark, right):
    schemas = {d.name: s for d, s in fold.schemas(spark, CATALOG)}
    frames = {n: spark.createDataFrame(rows, schemas[n]) for n, rows in rows_of(right).items()}
    beside = {
        "period": spark.createDataFrame([(START, END, "UTC")], "start TIMESTAMP, end TIMESTAMP, zone STRING"),
        "page_views_offsets": spark.createDataFrame(
            [(0, 200, 199, 1 if right else 0)], "partition INT, offsets BIGINT, accepted BIGINT, rejected BIGINT"
        ),
        "published_site_daily_traffic": spark.createDataFrame(
            [(DAY - timedelta(days=7), 200 if right else 5000)], "day DATE, pv BIGINT"
        ),
    }
    judged = {n: quality.Judged(CATALOG[n], f, START, END) for n, f in frames.items()}
    return {(v.table, v.check): v for v in quality.judge("run", judged, beside=beside)}


@pytest.fixture(scope="module")
def right(spark):
    return verdicts(spark, right=True)


@pytest.fixture(scope="module")
def wrong(spark):
    return verdicts(spark, right=False)


DECLARED = [(d.name, c.name) for d in (*CATALOG.topics.values(), *CATALOG.derived) for c in d.checks]


@pytest.mark.parametrize(("table", "check"), DECLARED)
def test_a_declared_check_holds_on_a_right_day_and_trips_on_a_wrong_one(right, wrong, table, check):
    assert right[table, check].outcome == "passed", right[table, check].observed
    assert wrong[table, check].outcome == "failed", wrong[table, check].observed


@pytest.mark.parametrize(("lacks", "outcome"), [(None, "passed"), (0, "failed"), (23, "failed")])
def test_where_midnight_cuts_an_hour_each_that_begins_in_the_day_is_present_and_sums_are_not_asked(spark, lacks, outcome):
    start = START - timedelta(hours=5, minutes=30)  # Asia/Kolkata
    begun = [h for n, h in enumerate(start + timedelta(hours=n, minutes=30) for n in range(24)) if n != lacks]
    schemas, names = {d.name: s for d, s in fold.schemas(spark, CATALOG)}, ("site_hourly_traffic", "site_daily_traffic")
    found = [(h, 10, 4, True, DAY) for h in begun], [(235, 30, True, DAY)]
    frames = {n: spark.createDataFrame(rows, schemas[n]) for n, rows in zip(names, found, strict=True)}
    schema = "start TIMESTAMP, end TIMESTAMP, zone STRING"
    beside = {
        "period": spark.createDataFrame([(start, start + timedelta(days=1), "Asia/Kolkata")], schema),
        "published_site_daily_traffic": spark.createDataFrame([], "day DATE, pv BIGINT"),
    }
    zone = ZoneInfo("Asia/Kolkata")
    end = (start + timedelta(days=1)).astimezone(zone)
    judged = {n: quality.Judged(CATALOG[n], f, start.astimezone(zone), end) for n, f in frames.items()}
    said = {v.check: v.outcome for v in quality.judge("run", judged, beside=beside)}
    assert said.pop("every hour of the day is present") == outcome
    assert {*said.values()} == {"passed"}


@pytest.mark.parametrize(("first", "outcome"), [(10, "passed"), (9, "failed")])
def test_where_a_clock_moves_by_half_an_hour_sums_are_asked_of_days_that_midnight_cuts_no_hour_of(spark, first, outcome):
    #        4 April, UTC+11          5 April, the clock goes back by half an hour
    # UTC    13:00            13:00                   13:30, in the middle of an hour
    zone, days = ZoneInfo("Australia/Lord_Howe"), [date(2026, 4, 4), date(2026, 4, 5)]
    start, end = (datetime(2026, 4, d, tzinfo=zone) for d in (4, 6))
    begun = [start.astimezone(UTC) + timedelta(hours=n) for n in range(49)]
    hours = [(h, first if n == 0 else 10, 4, True, days[n >= 24]) for n, h in enumerate(begun)]
    schemas, names = {d.name: s for d, s in fold.schemas(spark, CATALOG)}, ("site_hourly_traffic", "site_daily_traffic")
    found = hours, [(240, 30, True, days[0]), (245, 30, True, days[1])]
    frames = {n: spark.createDataFrame(rows, schemas[n]) for n, rows in zip(names, found, strict=True)}
    beside = {
        "period": spark.createDataFrame([(start, end, str(zone))], "start TIMESTAMP, end TIMESTAMP, zone STRING"),
        "published_site_daily_traffic": spark.createDataFrame([], "day DATE, pv BIGINT"),
    }
    judged = {n: quality.Judged(CATALOG[n], f, start, end) for n, f in frames.items()}
    said = {v.check: v.outcome for v in quality.judge("run", judged, beside=beside)}
    assert said.pop("a day's PV is the sum of its hours'") == outcome
    assert {*said.values()} == {"passed"}


@pytest.mark.parametrize(("more", "outcome"), [(2, "passed"), (3, "failed")])
def test_few_event_ids_that_came_with_two_visitors_hold_no_table_back_and_a_wrong_count_does(spark, more, outcome):
    schemas = {d.name: s for d, s in fold.schemas(spark, CATALOG)}
    rows = [(f"/{n}", NOON, 1, 1 + (n < more), True, DAY) for n in range(200)]
    frame = spark.createDataFrame(rows, schemas["hourly_traffic"])
    said = quality.judge("run", {"hourly_traffic": quality.Judged(CATALOG["hourly_traffic"], frame, START, END)})
    assert {v.check: v.outcome for v in said}["page views are at least unique visitors"] == outcome


def test_only_the_weekday_before_is_a_warning(wrong):
    warnings = {v.check for (table, check), v in wrong.items() if (table, check) in DECLARED and v.severity == "warning"}
    assert warnings == {"PV is within half and double of the same weekday a week before"}


def test_a_wrong_day_blocks_every_view_and_the_right_one_none(spark, right, wrong):
    for declared in CATALOG.views.values():
        expected = (*quality.own_checks(declared, START, END), *declared.checks)
        assert quality.gate(declared, expected, list(right.values())).passed
        assert not quality.gate(declared, expected, list(wrong.values())).passed
