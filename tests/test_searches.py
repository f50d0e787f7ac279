"""Searches and clicks, said by example: `S` is a search, `c` a click, `[` and `]` are the ten minutes, both inclusive."""

from datetime import date, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import MINUTE, ZONES, Law, broken, declared_checks, instants, record, said, verdicts, worlds

from tidemark import fold
from tidemark.model import catalog
from tidemark.pipelines import searches as pipeline
from tidemark.pipelines.searches import CLICKS, SEARCHES, search_clicks

DAY = date(2026, 11, 18)


def at(time: str) -> datetime:
    """An instant, UTC: `"10:00"` of November 18 unless a day is said."""
    return datetime.fromisoformat((time if "T" in time else f"{DAY}T{time}") + "+00:00")


def searched(spark, *rows: str):
    """Searches of ann's, from `"10:00 s1"`."""
    parts = [row.split() for row in rows]
    told = [{"search_id": s, "user_id": "ann", "query": "tide", "searched_at": at(time)} for time, s in parts]
    return spark.createDataFrame(pa.Table.from_pylist(told))


def clicked(spark, *rows: str):
    """Clicks from `"10:00 s1 /a"`, or `"10:00 - /a"` for one elsewhere; ids are numbered."""
    parts = [row.split() for row in rows]
    told = [
        {"click_id": f"c{n}", "user_id": "ann", "search_id": None if s == "-" else s, "target": target, "clicked_at": at(time)}
        for n, (time, s, target) in enumerate(parts)
    ]
    schema = pa.schema([*((n, pa.string()) for n in ("click_id", "user_id", "search_id", "target"))])
    return spark.createDataFrame(pa.Table.from_pylist(told, schema.append(pa.field("clicked_at", pa.timestamp("us", "UTC")))))


def found(spark, searches: list[str], clicks: list[str]) -> dict[str, tuple]:
    """`{search: (its results in order, clicks, when first)}`."""
    answer = search_clicks(searches=searched(spark, *searches), clicks=clicked(spark, *clicks)).toArrow().to_pylist()
    assert len({r["search_id"] for r in answer}) == len(answer)
    first = {r["search_id"]: r["first_clicked_at"] for r in answer}
    return {r["search_id"]: (r["results"], r["clicks"], f"{f:%H:%M}" if (f := first[r["search_id"]]) else None) for r in answer}


def test_a_search_has_the_results_that_were_clicked_in_their_order(spark):
    #   S1   c /b   c /a
    #   [                     ]
    told = found(spark, ["10:00 s1"], ["10:05 s1 /a", "10:01 s1 /b"])
    assert told == {"s1": (["/b", "/a"], 2, "10:01")}


def test_a_search_without_a_click_stays(spark):
    #   S1   S2   c s2
    told = found(spark, ["10:00 s1", "10:01 s2"], ["10:02 s2 /a"])
    assert told == {"s1": ([], 0, None), "s2": (["/a"], 1, "10:02")}


def test_searches_stay_where_nothing_was_clicked_at_all(spark):
    assert found(spark, ["10:00 s1", "10:01 s2"], []) == {"s1": ([], 0, None), "s2": ([], 0, None)}


@pytest.mark.parametrize(
    ("click", "counts"),
    [
        ("09:59:59.999999", False),  # before its search, by a clock that is wrong
        ("10:00:00", True),
        ("10:10:00", True),
        ("10:10:00.000001", False),
    ],
)
def test_the_bound_is_inclusive(spark, click, counts):
    #   S1 ──── ten minutes ────
    #   [                       ]
    told = found(spark, ["10:00 s1"], [f"{click} s1 /a"])
    assert told == {"s1": (["/a"], 1, click[:5]) if counts else ([], 0, None)}


def test_a_click_counts_for_its_own_search_alone(spark):
    #   S1   S2   c s1   c elsewhere   c of a search that nobody made
    told = found(spark, ["10:00 s1", "10:01 s2"], ["10:02 s1 /a", "10:03 - /b", "10:04 s9 /c"])
    assert told == {"s1": (["/a"], 1, "10:02"), "s2": ([], 0, None)}


def test_a_result_that_was_clicked_twice_stands_twice_and_clicks_of_one_instant_go_by_their_id(spark):
    told = found(spark, ["10:00 s1"], ["10:02 s1 /z", "10:02 s1 /a", "10:01 s1 /a"])
    assert told == {"s1": (["/a", "/z", "/a"], 3, "10:01")}


# -------------------------------------------------------------------------------------------- order, lateness, repetition


@pytest.mark.parametrize("first", ["search", "click"])
def test_either_side_may_come_first_and_a_repeat_counts_once(spark, first):
    #   in Kafka:   c c S S   or   S S c c
    search = {"search_id": "s1", "user_id": "ann", "query": "tide", "searched_at": at("10:00")}
    click = {"click_id": "c1", "user_id": "ann", "search_id": "s1", "target": "/a", "clicked_at": at("10:01")}
    frames = {}
    for topic, event, came in ((SEARCHES, search, 0 if first == "search" else 10), (CLICKS, click, 5)):
        rows = [event | {"kafka": {"timestamp": at("10:02") + (came + n) * MINUTE, "partition": n, "offset": 0}} for n in (0, 1)]
        frames[topic.name] = fold.once(topic, spark.createDataFrame(pa.Table.from_pylist(rows)))
    (row,) = search_clicks(**frames).toArrow().to_pylist()
    assert (row["results"], row["clicks"]) == (["/a"], 1)


def test_a_click_after_midnight_counts_for_the_search_before_it(spark):
    #   [18th ------ S1 23:59 )[19th  c 00:05
    start, clicks = at("2026-11-18T00:00"), clicked(spark, "2026-11-19T00:05 s1 /a")
    handed = fold.within(clicks, "clicked_at", fold.period(spark, start, start + timedelta(hours=24, minutes=10)))
    inputs = {"searches": searched(spark, "23:59 s1"), "clicks": handed}
    period = fold.period(spark, start, start + timedelta(hours=24))
    (row,) = fold.answer(search_clicks, search_clicks.function, inputs, period, settled=True).toArrow().to_pylist()
    assert (row["day"], row["results"]) == (DAY, ["/a"])
    assert search_clicks.lookahead == "10 minutes"


# ------------------------------------------------------------------------------------------------------------------ law

TEN = 10 * MINUTE


@st.composite
def search(draw, zone: str) -> dict:
    return {
        "user_id": draw(st.sampled_from(("ann", "bob"))),
        "query": draw(st.sampled_from(("tide", "", "Ebbe & Flut"))),
        "searched_at": said(draw(instants(zone, TEN, 2 * TEN))),
    }


@st.composite
def click(draw, zone: str) -> dict:
    return {
        "user_id": draw(st.sampled_from(("ann", "bob"))),
        "search_id": draw(st.sampled_from((None, "e900", *(f"e{n}" for n in range(30))))),
        "target": draw(st.sampled_from(("/a", "/b"))),
        "clicked_at": said(draw(instants(zone, TEN, 2 * TEN))),
    }


LAW = Law(
    catalog([pipeline]),
    {"searches": search, "clicks": click},
    {
        "search_clicks": """
            SELECT s.search_id, searched_at, s.user_id, query, count(click_id) AS clicks, min(clicked_at) AS first_clicked_at,
                   coalesce(list(target ORDER BY clicked_at, click_id) FILTER (click_id IS NOT NULL), []) AS results
            FROM period, searches s LEFT JOIN clicks c
                ON c.search_id = s.search_id AND clicked_at >= searched_at AND clicked_at <= searched_at + INTERVAL 10 MINUTE
            WHERE searched_at >= start AND searched_at < stop GROUP BY ALL"""
    },
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_repetition_and_cut_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# --------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def judged(spark):
    def tables(rejects: int, *answer: tuple) -> dict[str, list[tuple]]:
        made = [record(SEARCHES, n, DAY, f"s{n}", "ann", "tide", at("10:00")) for n in range(199)]
        clicks = [record(CLICKS, n, DAY, f"c{n}", "ann", "s1", "/a", at("10:01")) for n in range(199)]
        bad = {t.name: [record(t, 199 + n, DAY, reject="not JSON") for n in range(rejects)] for t in (SEARCHES, CLICKS)}
        return {"searches": made + bad["searches"], "clicks": clicks + bad["clicks"], "search_clicks": list(answer)}

    def answer(search: str, first: str | None, *results: str) -> tuple:
        return (search, at("10:00"), "ann", "tide", list(results), len(results), at(first) if first else None, True, DAY)

    right = tables(1, answer("s0", "10:10", "/a", "/b"), *(answer(f"s{n}", None) for n in range(1, 199)))
    wrong = tables(9, answer("s0", "10:11", "/a"))
    return {
        "right": verdicts(spark, LAW.catalog, DAY, right, {"searches": 200, "clicks": 200}),
        "wrong": verdicts(spark, LAW.catalog, DAY, wrong, {"searches": 210, "clicks": 210}),
    }


@pytest.mark.parametrize("check", declared_checks(LAW.catalog))
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")
