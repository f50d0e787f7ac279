"""Page views and unique visitors, said by example: `[` and `)` are a window's edges, `I` is a view."""

from datetime import date, datetime, timedelta

import pyarrow as pa
import pytest

from tidemark import fold
from tidemark.functions import how_many
from tidemark.pipelines.traffic import (
    daily_traffic,
    hourly_traffic,
    last_hour,
    last_hour_now,
    page_panes,
    page_quarters,
    site_daily_traffic,
    site_hourly_traffic,
    site_last_hour,
    site_last_hour_now,
)


def at(time: str) -> datetime:
    """An instant, UTC: `"10:00:00"` of November 18 unless a day is said."""
    return datetime.fromisoformat((time if "T" in time else f"2026-11-18T{time}") + "+00:00")


def views(spark, *rows: str):
    """Page views as accepted records, from `"10:00:02.5 ann /"`; ids are numbered."""
    parts = [row.split() for row in rows]
    events = [
        {"event_id": f"e{n}", "visitor_id": visitor, "page": page, "viewed_at": at(time)}
        for n, (time, visitor, page) in enumerate(parts)
    ]
    return spark.createDataFrame(pa.Table.from_pylist(events))


def panes(spark, *rows: str):
    return fold.merge(page_panes, page_panes(views=views(spark, *rows)))


def quarters(spark, *rows: str):
    return fold.merge(page_quarters, page_quarters(views=views(spark, *rows)))


def hour_of(view, spark, *rows: str):
    """A view of the last hour, over these views and their panes."""
    return view(panes=panes(spark, *rows), views=views(spark, *rows))


def rows(frame, *columns: str) -> list[tuple]:
    return sorted(tuple(r[c] for c in columns) for r in frame.toArrow().to_pylist())


def spans(frame, *columns: str) -> dict[tuple, list[tuple[str, str]]]:
    """A series of marks as `{answer: [(first mark, last mark), …]}`, where marks that follow each other are one span."""
    found: dict[tuple, list[list[datetime]]] = {}
    for mark, *answer in rows(frame, "mark", *columns):
        known = found.setdefault(tuple(answer), [])
        if known and mark - known[-1][1] == timedelta(seconds=5):
            known[-1][1] = mark
        else:
            known.append([mark, mark])
    return {answer: [(f"{a:%H:%M:%S}", f"{b:%H:%M:%S}") for a, b in known] for answer, known in found.items()}


# ---------------------------------------------------------------------------------------------------------------- panes


def test_a_pane_has_its_start_and_not_its_end(spark):
    #   [10:00:00 ----- 10:00:05)[10:00:05 -----
    #    I              I         I
    frame = panes(spark, "10:00:00 ann /", "10:00:04.999999 bob /", "10:00:05 ann /")
    counted = frame.select("pane", how_many("views").alias("pv"), how_many("visitors").alias("uv"))
    assert rows(counted, "pane", "pv", "uv") == [(at("10:00:00"), 2, 2), (at("10:00:05"), 1, 1)]


# ------------------------------------------------------------------------------------------------------------ last hour


def test_a_view_counts_from_the_end_of_its_pane_for_exactly_an_hour(spark):
    #   pane [10:00:00 - 10:00:05)
    #            I
    #   marks             10:00:05 ................. 11:00:00 | 11:00:05
    #                     first that has it     last          | gone
    for view in "10:00:00 ann /", "10:00:04.999 ann /":
        assert spans(hour_of(last_hour, spark, view), "page", "pv", "uv") == {("/", 1, 1): [("10:00:05", "11:00:00")]}


def test_a_visitor_in_two_panes_is_one_visitor(spark):
    #   I       I
    #   10:00   10:30            11:00        11:30
    #   [ pv 1 )[ pv 2           )[ pv 1       )
    #   [ uv 1                                 )
    frame = hour_of(site_last_hour, spark, "10:00:00 ann /", "10:30:00 ann /")
    assert spans(frame, "pv", "uv") == {
        (1, 1): [("10:00:05", "10:30:00"), ("11:00:05", "11:30:00")],
        (2, 1): [("10:30:05", "11:00:00")],
    }


@pytest.mark.parametrize(
    ("second", "series"),
    [
        # an hour less a pane: at one mark both views count, of one visitor
        ("10:59:55", {(1, 1): [("10:00:05", "10:59:55"), ("11:00:05", "11:59:55")], (2, 1): [("11:00:00", "11:00:00")]}),
        # exactly an hour: the second comes when the first goes
        ("11:00:00", {(1, 1): [("10:00:05", "12:00:00")]}),
        # an hour and a pane: between the two is one mark without anyone
        ("11:00:05", {(1, 1): [("10:00:05", "11:00:00"), ("11:00:10", "12:00:05")]}),
    ],
)
def test_a_visitor_who_comes_again_after_about_an_hour(spark, second, series):
    #   I                        I
    #   10:00:00                 second
    #   [10:00:05 .... 11:00:00]
    assert spans(hour_of(site_last_hour, spark, "10:00:00 ann /", f"{second} ann /"), "pv", "uv") == series


def test_the_site_counts_a_visitor_of_two_pages_once(spark):
    #   /      I ann    I bob
    #   /cart  I ann
    these = ("10:00:01 ann /", "10:00:02 ann /cart", "10:00:03 bob /")
    assert spans(hour_of(last_hour, spark, *these), "page", "pv", "uv") == {
        ("/", 2, 2): [("10:00:05", "11:00:00")],
        ("/cart", 1, 1): [("10:00:05", "11:00:00")],
    }
    assert spans(hour_of(site_last_hour, spark, *these), "pv", "uv") == {(3, 2): [("10:00:05", "11:00:00")]}


def test_the_last_hour_goes_on_through_midnight(spark):
    #   [18th ----- 23:59:59 I)[19th
    #   marks                   00:00:00 ... 00:59:55
    marks = rows(hour_of(site_last_hour, spark, "23:59:59 ann /"), "mark", "pv", "uv")
    assert (marks[0], marks[-1]) == ((at("2026-11-19T00:00:00"), 1, 1), (at("2026-11-19T00:59:55"), 1, 1))


def test_the_newest_marks_from_panes_have_the_same_edges(spark):
    #   I ann 10:00:00                                  I bob 10:59:57
    #   marks from 10:59:55 on:    10:59:55   11:00:00   11:00:05
    #                              ann        ann, bob   bob
    these = fold.as_counts(panes(spark, "10:00:00 ann /", "10:59:57 bob /", "10:59:58 bob /cart"), ("views",))
    period = fold.period(spark, at("10:59:55"), at("11:00:10"))
    assert rows(site_last_hour_now(panes=these, period=period), "mark", "pv", "uv") == [
        (at("10:59:55"), 1, 1),
        (at("11:00:00"), 3, 2),
        (at("11:00:05"), 2, 1),
    ]
    assert rows(last_hour_now(panes=these, period=period), "mark", "page", "pv", "uv") == [
        (at("10:59:55"), "/", 1, 1),
        (at("11:00:00"), "/", 2, 2),
        (at("11:00:00"), "/cart", 1, 1),
        (at("11:00:05"), "/", 1, 1),
        (at("11:00:05"), "/cart", 1, 1),
    ]


# ------------------------------------------------------------------------------------------------------- hours and days


def test_a_millisecond_around_midnight_is_another_hour_and_another_day(spark):
    #   [23:00 ------------------ I)[00:00, the next day -----
    #                                I
    frame = quarters(spark, "23:59:59.999 ann /", "23:59:59.999 bob /", "2026-11-19T00:00:00 ann /")
    assert rows(hourly_traffic(panes=frame), "page", "hour", "pv", "uv") == [
        ("/", at("23:00:00"), 2, 2),
        ("/", at("2026-11-19T00:00:00"), 1, 1),
    ]
    assert rows(daily_traffic(panes=frame), "page", "day", "pv", "uv") == [
        ("/", date(2026, 11, 18), 2, 2),
        ("/", date(2026, 11, 19), 1, 1),
    ]


def test_unique_visitors_are_a_union_and_never_a_sum(spark):
    #   10:00 I ann I bob     11:00 I ann          a day: 3 views of 2 visitors
    frame = quarters(spark, "10:00:00 ann /", "10:30:00 bob /", "11:00:00 ann /cart")
    assert rows(site_hourly_traffic(panes=frame), "hour", "pv", "uv") == [(at("10:00:00"), 2, 2), (at("11:00:00"), 1, 1)]
    assert rows(site_daily_traffic(panes=frame), "day", "pv", "uv") == [(date(2026, 11, 18), 3, 2)]
    assert rows(daily_traffic(panes=frame), "page", "pv", "uv") == [("/", 2, 2), ("/cart", 1, 1)]


def test_an_event_that_came_twice_is_one_view(spark):
    once = page_quarters(views=views(spark, "10:00:00 ann /", "10:00:01 bob /"))
    twice = fold.merge(page_quarters, once.union(once))
    assert rows(site_hourly_traffic(panes=twice), "pv", "uv") == [(2, 2)]


def test_visitors_without_a_name_are_one_visitor(spark):
    these = views(spark, "10:00:00 ann /", "10:00:01 bob /").replace("ann", "", subset="visitor_id")
    frame = fold.merge(page_quarters, page_quarters(views=these))
    assert rows(site_hourly_traffic(panes=frame), "pv", "uv") == [(2, 2)]


@pytest.mark.parametrize(
    ("zone", "last", "first"), [("Asia/Kathmandu", "18:14:59.999", "18:15:00"), ("Europe/Berlin", "22:59:59.999", "23:00:00")]
)
def test_a_day_ends_when_it_is_midnight_there_and_a_quarter_of_an_hour_too(spark, zone, last, first):
    #   there: [18th -------- 23:59:59.999)[19th
    spark.conf.set("spark.tidemark.zone", zone)
    try:
        frame = quarters(spark, f"{last} ann /", f"{first} ann /")
        assert rows(site_daily_traffic(panes=frame), "day", "pv") == [(date(2026, 11, 18), 1), (date(2026, 11, 19), 1)]
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")


@pytest.mark.parametrize("view", [hourly_traffic, site_hourly_traffic])
def test_an_hour_that_midnight_cuts_is_whole_and_the_earlier_day_s(spark, view):
    #   there: [18th ------- 23:50 00:10 ---- [19th       UTC: [18:00 I 18:30 I 19:00)
    frame, days = quarters(spark, "18:20:00 ann /", "18:40:00 bob /"), [at("2026-11-17T18:30:00"), at("18:30:00")]
    spark.conf.set("spark.tidemark.zone", "Asia/Kolkata")
    try:

        def read(_, low, high):
            return frame.where(f"pane >= TIMESTAMP '{low}' AND pane < TIMESTAMP '{high}'")

        found = [
            rows(fold.answers(spark, view, view, read, day, day + timedelta(days=1), settled=True, merged=True), "hour", "pv")
            for day in days
        ]
        assert found == [[(at("18:00:00"), 2)], []]
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")
