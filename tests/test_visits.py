"""Visits, said by example: `[` and `]` are a visit's first and last event, `L` is a login, `c` a click, `X` a logout."""

from datetime import date, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import HOUR, MINUTE, ZONES, Law, broken, declared_checks, instants, midnights, record, said, verdicts, worlds

from tidemark import fold
from tidemark.model import catalog
from tidemark.pipelines import visits as pipeline
from tidemark.pipelines.visits import ACTIVITY, visits

DAY = date(2026, 11, 18)


def at(time: str) -> datetime:
    """An instant, UTC: `"10:00"` of November 18 unless a day is said."""
    return datetime.fromisoformat((time if "T" in time else f"{DAY}T{time}") + "+00:00")


def events(spark, *rows: str):
    """Activity from `"10:00:02.5 ann click"`; ids are numbered."""
    parts = [row.split() for row in rows]
    told = [
        {"event_id": f"e{n}", "user_id": user, "kind": kind, "happened_at": at(time)}
        for n, (time, user, kind) in enumerate(parts)
    ]
    return spark.createDataFrame(pa.Table.from_pylist(told))


def found(spark, *rows: str) -> list[tuple]:
    """Each visit as `(user, began, ended, minutes, clicks, ended by)`, by user and end."""
    answer = visits(events=events(spark, *rows)).orderBy("user_id", "ended_at").toArrow().to_pylist()
    assert not any(v["cut"] for v in answer)
    return [
        (v["user_id"], f"{v['began_at']:%H:%M}", f"{v['ended_at']:%H:%M}", v["seconds"] / 60, v["clicks"], v["ended_by"])
        for v in answer
    ]


# -------------------------------------------------------------------------------------------------- begins and ends


def test_a_visit_lasts_from_the_login_to_the_logout(spark):
    #   L     c     c     X
    #   [                 ]
    told = found(spark, "10:00 ann login", "10:05 ann click", "10:10 ann click", "10:20 ann logout")
    assert told == [("ann", "10:00", "10:20", 20, 2, "logout")]


def test_a_visit_without_a_login_begins_with_its_first_event(spark):
    #   c     c
    #   [     ]
    assert found(spark, "10:00 ann click", "10:05 ann click") == [("ann", "10:00", "10:05", 5, 2, "silence")]


def test_a_visit_without_a_logout_ends_at_its_last_event_and_silence_is_not_part_of_it(spark):
    #   L     c   ···· 30 minutes ····
    #   [     ]
    assert found(spark, "10:00 ann login", "10:05 ann click") == [("ann", "10:00", "10:05", 5, 1, "silence")]


def test_a_logout_ends_at_once(spark):
    #   L     c     X  c
    #   [           ]  []
    told = found(spark, "10:00 ann login", "10:05 ann click", "10:10 ann logout", "10:10:01 ann click")
    assert told == [("ann", "10:00", "10:10", 10, 1, "logout"), ("ann", "10:10", "10:10", 0, 1, "silence")]


def test_a_login_begins_a_visit_though_the_one_before_had_no_logout(spark):
    #   L     c     L     c
    #   [     ]     [     ]
    told = found(spark, "10:00 ann login", "10:05 ann click", "10:10 ann login", "10:15 ann click")
    assert told == [("ann", "10:00", "10:05", 5, 1, "login"), ("ann", "10:10", "10:15", 5, 1, "silence")]


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ("10:29:59.999999", [("ann", "10:00", "10:29", 29 + 59.999999 / 60, 2, "silence")]),
        ("10:30:00", [("ann", "10:00", "10:00", 0, 1, "silence"), ("ann", "10:30", "10:30", 0, 1, "silence")]),
        ("10:30:00.000001", [("ann", "10:00", "10:00", 0, 1, "silence"), ("ann", "10:30", "10:30", 0, 1, "silence")]),
    ],
)
def test_gap_exactly_the_timeout_ends_the_visit(spark, second, told):
    #   c ──────── 30 minutes ────────)
    #   [                             second
    assert found(spark, "10:00 ann click", f"{second} ann click") == told


def test_users_do_not_disturb_each_other(spark):
    #   ann   L           c
    #   bob         X
    told = found(spark, "10:00 ann login", "10:05 bob logout", "10:10 ann click")
    assert told == [("ann", "10:00", "10:10", 10, 1, "silence"), ("bob", "10:05", "10:05", 0, 0, "logout")]


def test_what_happens_at_one_instant_happens_together(spark):
    #   Lcc          cX
    #   [            ]
    told = found(
        spark, "10:00 ann click", "10:00 ann login", "10:00 ann click", "10:20 ann logout", "10:20 ann click", "10:20 ann logout"
    )
    assert told == [("ann", "10:00", "10:20", 20, 3, "logout")]


def test_an_event_of_another_kind_keeps_a_visit_going_and_is_no_click(spark):
    #   c        scroll        c
    #   [                      ]
    told = found(spark, "10:00 ann click", "10:20 ann scroll", "10:40 ann click")
    assert told == [("ann", "10:00", "10:40", 40, 2, "silence")]


# ---------------------------------------------------------------------------------------------------------- late events


def test_a_late_click_joins_two_visits(spark):
    #   c                       c             c ── c ── c
    #   []  ── 40 minutes ──    []     late:  [         ]
    apart = ("10:00 ann click", "10:40 ann click")
    assert found(spark, *apart) == [("ann", "10:00", "10:00", 0, 1, "silence"), ("ann", "10:40", "10:40", 0, 1, "silence")]
    assert found(spark, *apart, "10:20 ann click") == [("ann", "10:00", "10:40", 40, 3, "silence")]


def test_a_late_logout_splits_a_visit(spark):
    #   L     c     c            L     X c     c
    #   [           ]     late:  [     ] [     ]
    one = ("10:00 ann login", "10:10 ann click", "10:20 ann click")
    assert found(spark, *one) == [("ann", "10:00", "10:20", 20, 2, "silence")]
    assert found(spark, *one, "10:05 ann logout") == [
        ("ann", "10:00", "10:05", 5, 0, "logout"),
        ("ann", "10:10", "10:20", 10, 2, "silence"),
    ]


# ------------------------------------------------------------------------------------------------- midnight, and longest


def settled(spark, which: str, *rows: str) -> list[tuple[str, str, int]]:
    """One day's visits as a night computes them, from the events that it is handed: `(began, ended, clicks)`."""
    start = at(f"{which}T00:00")
    low, high = start - timedelta(minutes=750), start + timedelta(days=1, minutes=30)
    handed = fold.within(events(spark, *rows), "happened_at", fold.period(spark, low, high))
    answer = fold.answer(visits, visits.function, {"events": handed}, fold.period(spark, start, start + 24 * HOUR), settled=True)
    kept = answer.orderBy("ended_at").toArrow().to_pylist()
    assert {str(v["day"]) for v in kept} <= {which}
    return [(f"{v['began_at']:%dT%H:%M}", f"{v['ended_at']:%dT%H:%M}", v["clicks"]) for v in kept]


def test_a_visit_across_midnight_is_one_visit_of_the_day_on_which_it_ends(spark):
    #   [18th ------- 23:50 c )[19th 00:10 c    00:35 c
    #                       [                         ]
    rows = ("2026-11-18T23:50 ann click", "2026-11-19T00:10 ann click", "2026-11-19T00:35 ann click")
    assert settled(spark, "2026-11-18", *rows) == []
    assert settled(spark, "2026-11-19", *rows) == [("18T23:50", "19T00:35", 3)]


def test_a_visit_that_ends_with_the_day_stays_there_though_the_next_begins_within_half_an_hour(spark):
    #   [18th --- 23:50 c  23:59 X )[19th 00:10 c
    #                   [        ]              []
    rows = ("2026-11-18T23:50 ann click", "2026-11-18T23:59 ann logout", "2026-11-19T00:10 ann click")
    assert settled(spark, "2026-11-18", *rows) == [("18T23:50", "18T23:59", 1)]
    assert settled(spark, "2026-11-19", *rows) == [("19T00:10", "19T00:10", 1)]


@pytest.mark.parametrize(
    ("last", "began", "cut", "clicks"), [("12:00", "00:00", False, 37), ("12:00:00.000001", "00:20", True, 36)]
)
def test_a_visit_longer_than_twelve_hours_is_told_by_its_last_twelve(spark, last, began, cut, clicks):
    #   c c c c ... c          a click every 20 minutes for twelve hours, and a moment more
    #   [           ]
    told = [f"{n // 3:02d}:{n % 3 * 20:02d} ann click" for n in range(36)]
    (visit,) = visits(events=events(spark, *told, f"{last} ann click")).toArrow().to_pylist()
    assert (f"{visit['began_at']:%H:%M}", visit["cut"], visit["clicks"]) == (began, cut, clicks)


# ------------------------------------------------------------------------------------------------------------------ law


@st.composite
def activity(draw, zone: str) -> dict:
    return {
        "user_id": draw(st.sampled_from(("ann", "bob", ""))),
        "kind": draw(st.sampled_from(("login", "click", "click", "click", "logout", "scroll"))),
        "happened_at": said(draw(instants(zone, 30 * MINUTE, 60 * MINUTE, 20 * MINUTE, 90 * MINUTE))),
    }


def restless(zone: str) -> dict:
    """One who never stops: a click each 29 minutes, from a day before the period to its end."""
    first = midnights(zone)[0] - 24 * HOUR
    clicks = [{"user_id": "bot", "kind": "click", "happened_at": said(first + n * 29 * MINUTE)} for n in range(150)]
    return {"activity": clicks}


LAW = Law(
    catalog([pipeline]),
    {"activity": activity},
    {
        "visits": """
            WITH moments AS (
                SELECT user_id, happened_at AS t, bool_or(kind = 'login') AS login, bool_or(kind = 'logout') AS logout,
                       count(*) FILTER (kind = 'click') AS clicks FROM activity GROUP BY ALL
            ), beginnings AS (
                SELECT user_id, t AS began FROM moments m WHERE login
                OR NOT EXISTS (FROM moments p WHERE p.user_id = m.user_id AND p.t < m.t AND p.t > m.t - INTERVAL 30 MINUTE)
                OR (SELECT arg_max(p.logout, p.t) FROM moments p WHERE p.user_id = m.user_id AND p.t < m.t)
            ), placed AS (
                SELECT m.*, (SELECT max(began) FROM beginnings b WHERE b.user_id = m.user_id AND began <= t) AS began
                FROM moments m
            ), ends AS (
                SELECT user_id, began, max(t) AS ended_at, arg_max(logout, t) AS out FROM placed GROUP BY ALL
            )
            SELECT user_id, ended_at, min(t) AS began_at, (epoch_us(ended_at) - epoch_us(min(t))) / 1000000 AS seconds,
                   sum(clicks) AS clicks, began < ended_at - INTERVAL 12 HOUR AS cut,
                   CASE WHEN out THEN 'logout' WHEN EXISTS (
                       FROM moments n WHERE n.user_id = ends.user_id AND n.t > ended_at AND n.t < ended_at + INTERVAL 30 MINUTE
                   ) THEN 'login' ELSE 'silence' END AS ended_by
            FROM ends JOIN placed USING (user_id, began), period
            WHERE t >= ended_at - INTERVAL 12 HOUR AND ended_at >= start AND ended_at < stop
            GROUP BY user_id, began, ended_at, out""",
    },
    restless,
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_repetition_and_cut_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# ------------------------------------------------------------------------------------------------------- checks


def visit(user: str, began: str, ended: str, by: str = "silence", seconds: float | None = None) -> tuple:
    length = (at(ended) - at(began)).total_seconds() if seconds is None else seconds
    return (user, at(ended), at(began), length, 1, by, False, True, DAY)


@pytest.fixture(scope="module")
def judged(spark):
    good = [record(ACTIVITY, n, DAY, f"e{n}", "ann", "click", at("12:00")) for n in range(199)]
    right = [visit("ann", "10:00", "10:20", "logout"), visit("ann", "10:21", "10:40"), visit("ann", "11:10", "11:10")]
    wrong = [visit("ann", "10:00", "10:20"), visit("ann", "10:49", "11:00", "tired"), visit("bob", "01:00", "14:00")]
    rejects = [record(ACTIVITY, 199 + n, DAY, reject="not JSON") for n in range(9)]
    return {
        "right": verdicts(spark, LAW.catalog, DAY, {"activity": good + rejects[:1], "visits": right}, {"activity": 200}),
        "wrong": verdicts(spark, LAW.catalog, DAY, {"activity": good + rejects, "visits": wrong}, {"activity": 209 + 1}),
    }


@pytest.mark.parametrize("check", declared_checks(LAW.catalog))
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")
