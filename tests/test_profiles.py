"""Each click with the profile of its time, said by example: `[` and `)` are the ends of a profile's validity, `I` is a click."""

from datetime import UTC, date, datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import HOUR, ZONES, Law, broken, declared_checks, instants, log_of, said, verdicts, worlds

from tidemark import fold
from tidemark.model import catalog
from tidemark.pipelines import profiles as pipeline
from tidemark.pipelines.profiles import PROFILE_CHANGES, profile_clicks, sample_change
from tidemark.pipelines.searches import CLICKS

CATALOG = catalog([pipeline])


def at(time: str) -> str:
    """An instant as an event says it: `"10:00"` of October 25 unless a day is said."""
    return said(datetime.fromisoformat((time if "T" in time else f"2026-10-25T{time}") + "+00:00"))


def clicks(*rows: str) -> list[dict]:
    """Of `"10:00 ann"`; ids are numbered."""
    parts = [row.split() for row in rows]
    return [
        {"click_id": f"c{n}", "user_id": user, "search_id": None, "target": "/", "clicked_at": at(time)}
        for n, (time, user) in enumerate(parts)
    ]


def changes(*rows: str) -> list[dict]:
    """Of `"7 09:00 insert ann Ulm"`, in the order in which they come; a deletion has no city."""
    parts = [row.split() for row in rows]
    return [
        {"sequence": int(n), "op": op, "user_id": user, "city": city[0] if city else None, "plan": None, "changed_at": at(time)}
        for n, time, op, user, *city in parts
    ]


def answer(spark, clicked: list[dict], changed: list[dict]) -> list[tuple]:
    """`(time, known, sequence, city)` of the day's clicks."""
    logs = {"clicks": log_of(spark, CLICKS, clicked), "profile_changes": log_of(spark, PROFILE_CHANGES, changed)}
    start = datetime.fromisoformat(at("00:00"))
    read = lambda topic, *_: logs[topic.name]  # noqa: E731
    found = fold.answers(spark, profile_clicks, profile_clicks, read, start, start + timedelta(days=1), settled=True)
    rows = sorted(found.toArrow().to_pylist(), key=lambda r: (r["clicked_at"], r["click_id"]))
    return [(f"{r['clicked_at']:%H:%M}", r["known"], r["sequence"], r["city"]) for r in rows]


ANN = changes("7 09:00 insert ann Ulm", "8 10:00 update ann Jena", "9 11:00 delete ann", "10 12:00 insert ann Bonn")
CLICKED = clicks("08:59 ann", "09:00 ann", "10:00 ann", "11:00 ann", "12:00 ann")
SEEN = [
    ("08:59", False, None, None),  # before the first change
    ("09:00", True, 7, "Ulm"),  # at its very instant
    ("10:00", True, 8, "Jena"),
    ("11:00", False, None, None),  # deleted
    ("12:00", True, 10, "Bonn"),  # and created again
]


def test_each_click_has_the_profile_of_its_time(spark):
    #   ann        [09:00 Ulm ──)[10:00 Jena ──)[11:00 nothing ──)[12:00 Bonn ──
    #   I 08:59    I 09:00       I 10:00        I 11:00           I 12:00
    assert answer(spark, CLICKED, ANN) == SEEN


def test_changes_may_come_in_any_order(spark):
    for order in ((3, 1, 0, 2), (2, 3, 1, 0)):
        assert answer(spark, CLICKED, [ANN[n] for n in order]) == SEEN


def test_a_change_that_comes_twice_is_one(spark):
    # The insert comes again after the deletion, and ann does not live again.
    assert answer(spark, CLICKED, [*ANN[:3], ANN[0], *ANN, ANN[1]]) == SEEN


def test_of_changes_of_one_instant_the_greater_sequence_is_valid(spark):
    told = changes("8 10:00 update ann Jena", "7 10:00 insert ann Ulm", "9 11:00 delete ann", "10 11:00 insert ann Bonn")
    assert answer(spark, clicks("10:00 ann", "11:00 ann"), told) == [("10:00", True, 8, "Jena"), ("11:00", True, 10, "Bonn")]


def test_a_clock_that_steps_back_does_not_bring_an_older_row_back(spark):
    #   7 Ulm 09:00     8 Jena 11:00     9 Bonn 10:00
    #   [09:00 Ulm ──)[10:00 Bonn ─────────────────
    told = changes("7 09:00 insert ann Ulm", "8 11:00 update ann Jena", "9 10:00 update ann Bonn")
    seen = [("09:30", True, 7, "Ulm"), ("10:30", True, 9, "Bonn"), ("11:30", True, 9, "Bonn")]
    assert answer(spark, clicks("09:30 ann", "10:30 ann", "11:30 ann"), told) == seen


def test_a_user_nobody_has_told_of_is_not_known_and_the_click_stands(spark):
    assert answer(spark, clicks("10:00 zoe"), ANN) == [("10:00", False, None, None)]
    assert answer(spark, clicks("10:00 zoe"), []) == [("10:00", False, None, None)]


def test_a_click_that_came_twice_is_one_row(spark):
    assert answer(spark, clicks("10:00 ann") * 3, ANN) == [("10:00", True, 8, "Jena")]


def test_a_tombstone_that_a_tool_sends_after_the_deletion_says_nothing_more(spark):
    late = {"user_id": "ann", "ended_at": at("12:30")}  # of the deletion at 11:00, after she came back
    assert answer(spark, CLICKED, [*ANN, late]) == SEEN
    assert answer(spark, clicks("13:00 ann"), [*ANN, late]) == [("13:00", True, 10, "Bonn")]


# --------------------------------------------------------------------------------------------------------------- the law

STEPS = (HOUR, HOUR - timedelta(seconds=5), timedelta(hours=30))


@st.composite
def a_click(draw, zone: str) -> dict:
    user = draw(st.sampled_from(("ann", "bob", "eve")))
    return {"user_id": user, "search_id": None, "target": "/", "clicked_at": said(draw(instants(zone, *STEPS)))}


@st.composite
def a_change(draw, zone: str) -> dict:
    op = draw(st.sampled_from(("insert", "update", "update", "delete")))
    row = {"city": draw(st.sampled_from(("Ulm", "Jena"))) if op != "delete" else None, "plan": None}
    return {"op": op, "user_id": draw(st.sampled_from(("ann", "bob"))), **row, "changed_at": said(draw(instants(zone, *STEPS)))}


LAW = Law(
    CATALOG,
    {"clicks": a_click, "profile_changes": a_change},
    {
        "profile_clicks": """
            SELECT click_id, clicked_at, user_id, target, coalesce(p.op <> 'delete', false) AS known,
                   CASE WHEN p.op <> 'delete' THEN p.sequence END AS sequence,
                   CASE WHEN p.op <> 'delete' THEN p.city END AS city, CASE WHEN p.op <> 'delete' THEN p.plan END AS plan
            FROM (SELECT *, (SELECT max_by({'op': c.op, 'sequence': c.sequence, 'city': c.city, 'plan': c.plan}, c.sequence)
                             FROM profile_changes c WHERE c.user_id = k.user_id AND c.changed_at <= k.clicked_at) AS p
                  FROM clicks k), period
            WHERE clicked_at >= start AND clicked_at < stop"""
    },
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_cut_order_and_repetition_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# --------------------------------------------------------------------------------------------------- checks and the sample

DAY = date(2026, 10, 25)
TEN = datetime(2026, 10, 25, 10, tzinfo=UTC)


def test_each_check_holds_on_a_day_that_is_right_and_trips_on_one_that_is_wrong(spark):
    kafka = lambda offset: (0, offset, TEN, b"ann", bytearray(b"{}"), None)  # noqa: E731
    click = ("c1", "ann", None, "/", TEN, kafka(0), None, DAY)
    change = (7, "insert", "ann", "Ulm", None, TEN, kafka(0), None, DAY)
    seen = ("c1", TEN, "ann", "/", True, 7, "Ulm", None, True, DAY)
    own = [c for c in declared_checks(CATALOG) if c[0] != "clicks"]

    def outcomes(clicked, changed, rows) -> dict:
        tables = {"clicks": [clicked], "profile_changes": [changed], "profile_clicks": rows}
        told = verdicts(spark, CATALOG, DAY, tables, {"clicks": 1, "profile_changes": 1})
        return {c: told[c] for c in own}

    assert outcomes(click, change, [seen]) == dict.fromkeys(own, "passed")
    other = ("c2", TEN, "ann", "/", False, 7, "Ulm", None, True, DAY)
    assert outcomes(click, (7, "upsert", *change[2:]), [other]) == dict.fromkeys(own, "failed")


def test_what_is_sampled_inserts_updates_and_deletes():
    drawn = [sample_change(Random(n), datetime(2026, 10, 25, 12, tzinfo=UTC)) for n in range(60)]
    assert {e["op"] for e in drawn} == {"insert", "update", "delete"}
    assert {(e["op"] == "delete") == (e["city"] is None) for e in drawn} == {True}
