"""Study days, said by example: `e` is an event of a sitting, `=` the time that counts."""

from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import MINUTE, ZONES, Law, broken, declared_checks, instants, midnights, record, said, verdicts, worlds

from tidemark.model import catalog
from tidemark.pipelines import study as pipeline
from tidemark.pipelines.study import STUDY_EVENTS, study_days

DAY = date(2026, 11, 18)


def at(time: str) -> datetime:
    """An instant, UTC: `"10:00"` of November 18 unless a day is said."""
    return datetime.fromisoformat((time if "T" in time else f"{DAY}T{time}") + "+00:00")


def found(spark, *rows: str) -> list[tuple]:
    """From `"10:00 ann 3"` (three lines): each day as `(student, day, minutes, lines)`."""
    told = [
        {"event_id": f"e{n}", "student_id": student, "lines": int(lines), "studied_at": at(time)}
        for n, (time, student, lines) in enumerate(row.split() for row in rows)
    ]
    answer = study_days(events=spark.createDataFrame(pa.Table.from_pylist(told))).orderBy("student_id", "day")
    return [(r["student_id"], str(r["day"]), r["minutes"], r["lines"]) for r in answer.toArrow().to_pylist()]


@pytest.fixture
def berlin(spark):
    spark.conf.set("spark.tidemark.zone", "Europe/Berlin")
    yield spark
    spark.conf.set("spark.tidemark.zone", "UTC")


# ------------------------------------------------------------------------------------------------------------- sittings


def test_minutes_are_from_event_to_event_and_lines_their_sum(spark):
    #   e ==== e === e
    #   3      0     5
    assert found(spark, "10:00 ann 3", "10:10 ann 0", "10:12 ann 5") == [("ann", "2026-11-18", 12, 8)]


def test_a_lone_event_has_its_lines_and_no_minute(spark):
    assert found(spark, "10:00 ann 7") == [("ann", "2026-11-18", 0, 7)]


@pytest.mark.parametrize(("second", "minutes"), [("10:14:59.999", 14 + 59.999 / 60), ("10:15:00", 0), ("10:15:00.001", 0)])
def test_a_pause_of_exactly_fifteen_minutes_ends_the_sitting(spark, second, minutes):
    #   e ──── 15 minutes ────)
    #                         second
    assert found(spark, "10:00 ann 1", f"{second} ann 1") == [("ann", "2026-11-18", minutes, 2)]


def test_two_sittings_of_a_day_are_added_and_the_pause_between_them_is_not(spark):
    #   e === e ──── an hour ──── e == e
    told = found(spark, "10:00 ann 1", "10:10 ann 1", "11:10 ann 1", "11:15 ann 1")
    assert told == [("ann", "2026-11-18", 15, 4)]


def test_students_do_not_disturb_each_other(spark):
    told = found(spark, "10:00 ann 1", "10:05 bob 1", "10:10 ann 1")
    assert told == [("ann", "2026-11-18", 10, 2), ("bob", "2026-11-18", 0, 1)]


# ----------------------------------------------------------------------------------------------------------------- days


def test_a_sitting_across_midnight_gives_each_day_its_part(spark):
    #   [18th ------- e ======)[19th ==== e
    #                 23:55                00:08
    told = found(spark, "23:55 ann 2", "2026-11-19T00:08 ann 3")
    assert told == [("ann", "2026-11-18", 5, 2), ("ann", "2026-11-19", 8, 3)]


def test_an_event_at_midnight_is_of_the_day_that_begins(spark):
    #   [18th ------- e ======)[19th
    #                 23:50     e 00:00
    told = found(spark, "23:50 ann 2", "2026-11-19T00:00 ann 3")
    assert told == [("ann", "2026-11-18", 10, 2), ("ann", "2026-11-19", 0, 3)]


def test_midnight_is_the_business_zone_s(berlin):
    #   Berlin: [18th ------ 23:55 e ===)[19th === e 00:05
    #   UTC:                 22:55                 23:05
    told = found(berlin, "22:55 ann 1", "23:05 ann 1")
    assert told == [("ann", "2026-11-18", 5, 1), ("ann", "2026-11-19", 5, 1)]


@pytest.mark.parametrize(
    ("day", "begins", "hours"),
    [("2026-03-29", "2026-03-28T23:00", 23), ("2026-10-25", "2026-10-24T22:00", 25), ("2026-11-18", "2026-11-17T23:00", 24)],
)
def test_who_studies_all_day_has_all_its_hours(berlin, day, begins, hours):
    #   e = e = e = … = e      every ten minutes from ten before the day to ten after it
    start = at(begins) - timedelta(minutes=10)
    times = [f"{start + timedelta(minutes=10 * n):%Y-%m-%dT%H:%M} ann 1" for n in range(6 * hours + 3)]
    minutes = {which: (minutes, lines) for _, which, minutes, lines in found(berlin, *times)}
    assert minutes[day] == (60 * hours, 6 * hours)
    assert sorted(m for m, _ in minutes.values()) == [10, 10, 60 * hours]


# ------------------------------------------------------------------------------------------------------------------ law


@st.composite
def study_event(draw, zone: str) -> dict:
    return {
        "student_id": draw(st.sampled_from(("ann", "bob", ""))),
        "lines": draw(st.integers(-3, 20)),
        "studied_at": said(draw(instants(zone, 10 * MINUTE, 15 * MINUTE, 20 * MINUTE, 25 * MINUTE))),
    }


def tireless(zone: str) -> dict:
    """One who never stops, from half an hour before the first day to half an hour after the last."""
    first, last = midnights(zone)[0] - 30 * MINUTE, midnights(zone)[-1] + 30 * MINUTE
    times = [first + n * 14 * MINUTE for n in range((last - first) // (14 * MINUTE))]
    return {"study_events": [{"student_id": "bot", "lines": 1, "studied_at": said(t)} for t in times]}


LAW = Law(
    catalog([pipeline]),
    {"study_events": study_event},
    {
        "study_days": """
            WITH days AS (
                SELECT d::DATE AS day, d AT TIME ZONE zone AS begins, (d + INTERVAL 1 DAY) AT TIME ZONE zone AS ends
                FROM period, (SELECT unnest(generate_series(
                    (start AT TIME ZONE zone), (stop AT TIME ZONE zone) - INTERVAL 1 DAY, INTERVAL 1 DAY)) AS d FROM period)
            ), times AS (SELECT DISTINCT student_id, studied_at AS t FROM study_events),
            stretches AS (
                SELECT student_id, t AS since, (SELECT min(n.t) FROM times n WHERE n.student_id = o.student_id AND n.t > o.t)
                AS until FROM times o
            ), studied AS (
                SELECT student_id, day, sum(epoch_us(least(until, ends)) - epoch_us(greatest(since, begins))) AS micros
                FROM stretches, days WHERE until < since + INTERVAL 15 MINUTE AND since < ends AND until > begins GROUP BY ALL
            ), written AS (
                SELECT student_id, day, sum(lines) AS lines FROM study_events, days
                WHERE studied_at >= begins AND studied_at < ends GROUP BY ALL
            )
            SELECT student_id, day, coalesce(micros, 0) / 60000000 AS minutes, lines
            FROM written LEFT JOIN studied USING (student_id, day)"""
    },
    tireless,
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_repetition_and_cut_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# --------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def judged(spark):
    noon = datetime(2026, 11, 18, 12, tzinfo=UTC)
    # Every event came twice: the check must count it once, as the view does.
    sent = [record(STUDY_EVENTS, n, DAY, f"e{n // 2}", "ann", 2, noon) for n in range(198)]
    rejects = [record(STUDY_EVENTS, 198 + n, DAY, reject="not JSON") for n in range(9)]
    right = {"study_events": sent + rejects[:1], "study_days": [("ann", 60.0, 150, True, DAY), ("bob", 0.0, 48, True, DAY)]}
    wrong = {"study_events": sent + rejects, "study_days": [("ann", 1501.0, 396, True, DAY)]}
    return {
        "right": verdicts(spark, LAW.catalog, DAY, right, {"study_events": 199}),
        "wrong": verdicts(spark, LAW.catalog, DAY, wrong, {"study_events": 210}),
    }


@pytest.mark.parametrize("check", declared_checks(LAW.catalog))
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")
