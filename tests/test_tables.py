"""Tables, their changes, and what was valid when: by example, and the page's own code held to the law.

`[` and `)` are the ends of a row's validity, the first inside and the last outside, `I` is an event.
"""

import re
import types
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import ENDED, HOUR, ZONES, Law, broken, instants, log_of, said, unheld, worlds

from tidemark import fold
from tidemark.functions import as_of
from tidemark.model import DeclarationError, Topic, catalog

PAGE = (Path(__file__).parent.parent / "docs/pipelines.md").read_text()
(CODE,) = re.findall(r"^```python\n(\"\"\"Amounts.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
page = types.ModuleType("amounts")
exec(CODE, page.__dict__)

PLACES = Topic(
    "places",
    key="name",
    partitions=2,
    schema="name STRING NOT NULL, number BIGINT, place STRING, moved_at TIMESTAMP NOT NULL",
    event_time="moved_at",
    compacted=True,
)


def at(time: str) -> datetime:
    """An instant, UTC: `"10:00"` of October 25 unless a day is said."""
    return datetime.fromisoformat((time if "T" in time else f"2026-10-25T{time}") + "+00:00")


def changes(spark, *rows: str):
    """What a view is handed of PLACES.changes, from `"10:00 ann Ulm 7"`, in Kafka's order; a place `-` is a tombstone."""
    parts = [row.split() for row in rows]
    events = [
        {"name": name, ENDED: said(at(time))}
        if place == "-"
        else {"name": name, "number": int(*number or "0"), "place": place, "moved_at": said(at(time))}
        for time, name, place, *number in parts
    ]
    period = fold.period(spark, at("00:00"), at("23:59"))
    return fold.changes(PLACES, log_of(spark, PLACES, events), period)


def orders(spark, *rows: str):
    parts = [row.split() for row in rows]
    schema = pa.schema({"name": pa.string(), "at": pa.timestamp("us", "UTC")})
    return spark.createDataFrame(pa.Table.from_pylist([{"name": n if n != "-" else None, "at": at(t)} for t, n in parts], schema))


def found(events, changed, **more) -> list[tuple]:
    joined = as_of(events, changed, on="name", at="at", into="row", **more)
    rows = joined.select("name", "at", "row.place").toArrow().to_pylist()
    return sorted((f"{r['at']:%H:%M}", r["name"] or "", r["place"]) for r in rows)


# ------------------------------------------------------------------------------------------------------------- as_of


def test_an_event_sees_the_row_that_was_valid_at_its_time(spark):
    #   ann   [10:00 Ulm ────)[10:30 Jena ────
    #   I 09:59  I 10:00  I 10:29  I 10:30
    these = orders(spark, "09:59 ann", "10:00 ann", "10:29 ann", "10:30 ann", "10:45 bob")
    assert found(these, changes(spark, "10:00 ann Ulm", "10:30 ann Jena")) == [
        ("09:59", "ann", None),
        ("10:00", "ann", "Ulm"),  # from its instant on
        ("10:29", "ann", "Ulm"),
        ("10:30", "ann", "Jena"),
        ("10:45", "bob", None),
    ]


def test_a_tombstone_ends_a_row_from_its_instant_on_until_it_comes_again(spark):
    #   ann   [10:00 Ulm ──)[10:20 nothing ──)[10:40 Bonn ──
    these = orders(spark, "10:19 ann", "10:20 ann", "10:40 ann")
    assert found(these, changes(spark, "10:00 ann Ulm", "10:20 ann -", "10:40 ann Bonn")) == [
        ("10:19", "ann", "Ulm"),
        ("10:20", "ann", None),
        ("10:40", "ann", "Bonn"),
    ]


def test_it_does_not_matter_in_which_order_changes_come_nor_how_often(spark):
    #   in Kafka: Bonn, the end, Jena, Ulm twice; in time: Ulm, Jena, the end, Bonn
    these = orders(spark, "10:05 ann", "10:15 ann", "10:25 ann", "10:35 ann")
    told = ("10:30 ann Bonn", "10:20 ann -", "10:10 ann Jena", "10:00 ann Ulm", "10:00 ann Ulm")
    places = [("10:05", "ann", "Ulm"), ("10:15", "ann", "Jena"), ("10:25", "ann", None), ("10:35", "ann", "Bonn")]
    assert found(these, changes(spark, *told)) == found(these, changes(spark, *reversed(told))) == places


def test_of_changes_of_one_instant_the_later_in_kafka_is_valid(spark):
    these = orders(spark, "10:00 ann", "10:00 bob", "11:00 bob")
    assert found(these, changes(spark, "10:00 ann Ulm", "10:00 ann Jena", "10:00 bob Ulm", "10:00 bob -")) == [
        ("10:00", "ann", "Jena"),
        ("10:00", "bob", None),
        ("11:00", "bob", None),
    ]


def test_events_are_neither_lost_nor_doubled(spark):
    #   two of one instant, one without a name, no changes at all
    these = orders(spark, "10:00 ann", "10:00 ann", "10:00 -")
    many = [f"09:{n:02d} ann Ulm" for n in range(5)]
    assert found(these, changes(spark, *many)) == [("10:00", "", None), ("10:00", "ann", "Ulm"), ("10:00", "ann", "Ulm")]
    assert found(these, changes(spark, "09:00 bob Ulm")) == [("10:00", "", None), ("10:00", "ann", None), ("10:00", "ann", None)]


def test_a_row_without_a_place_is_a_row(spark):
    told = changes(spark, "10:00 ann Ulm").selectExpr("* EXCEPT (place)", "CAST(NULL AS STRING) AS place")
    joined = as_of(orders(spark, "10:01 ann", "09:00 ann"), told, on="name", at="at", into="row")
    assert sorted((r["at"].hour, r["row"] is None) for r in joined.collect()) == [(9, True), (10, False)]


def test_changes_with_an_order_of_their_own_stand_in_it(spark):
    #   sequence   1 Ulm 10:00    2 Jena 10:20    3 Bonn 10:10 (the clock stepped back)    4 Kiel 10:30
    #   valid      [10:00 Ulm ──)[10:10 Bonn ─────────────────────────)[10:30 Kiel ──
    these = orders(spark, "10:05 ann", "10:10 ann", "10:25 ann", "10:30 ann")
    told = ("10:30 ann Kiel 4", "10:10 ann Bonn 3", "10:00 ann Ulm 1", "10:20 ann Jena 2", "10:10 ann Bonn 3")
    places = [("10:05", "ann", "Ulm"), ("10:10", "ann", "Bonn"), ("10:25", "ann", "Bonn"), ("10:30", "ann", "Kiel")]
    assert found(these, changes(spark, *told), by="number") == places
    assert found(these, changes(spark, *reversed(told)), by="number") == places


def test_a_tombstone_has_no_number_and_ends_nothing_there(spark):
    these = orders(spark, "10:30 ann")
    assert found(these, changes(spark, "10:00 ann Ulm 1", "10:20 ann -"), by="number") == [("10:30", "ann", "Ulm")]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"on": "user"}, "as_of: the events have no column user; they have name, at"),
        ({"at": "time"}, "as_of: the events have no column time; they have name, at"),
        ({"into": "at"}, "as_of: the events have a column at already; write another into="),
        ({"by": "sequence"}, "as_of: the changes have no column sequence, but name, number, place"),
    ],
)
def test_a_join_with_what_is_not_there_is_refused(spark, wrong, sentence):
    with pytest.raises(DeclarationError) as refused:
        as_of(orders(spark, "10:00 ann"), changes(spark, "10:00 ann Ulm"), **{"on": "name", "at": "at", "into": "row"} | wrong)
    assert str(refused.value).startswith(sentence)


# ------------------------------------------------------------------------------------- the page's code: stream and table

CATALOG = catalog([page])


def told(value: str, time: str, rows: tuple[str, ...]) -> list[dict]:
    """Records of `"10:00 Jack 1"`; `-` is a tombstone."""
    parts = [row.split() for row in rows]
    ended = [{"name": name, ENDED: said(at(when))} for when, name, _ in parts]
    return [
        e if v == "-" else {"name": e["name"], value: int(v), time: e[ENDED]} for e, (*_, v) in zip(ended, parts, strict=True)
    ]


def amounts(*rows: str) -> list[dict]:
    return told("amount", "said_at", rows)


def limits(*rows: str) -> list[dict]:
    return told("most", "set_at", rows)


FIVE = amounts("10:00 Jack 1", "10:01 Lily 2", "10:02 Mike 4", "10:03 Jack 3", "10:04 Lily 5")


def answer(spark, name: str, said_: list[dict], set_: list[dict] = [], until: str = "23:00") -> list[tuple]:  # noqa: B006
    """A view's rows of the day so far, without `day`, `settled` and where a record stands."""
    view = CATALOG.views[name]
    logs = {"amounts": log_of(spark, page.AMOUNTS, said_), "limits": log_of(spark, page.LIMITS, set_)}
    rows = fold.answers(spark, view, view, lambda topic, *_: logs[topic.name], at("00:00"), at(until), settled=False)
    shown = [c for c in rows.columns if c not in ("day", "settled", "record", "said_at")]
    return sorted(tuple(r[c] for c in shown) for r in rows.toArrow().to_pylist())


def test_jack_lily_and_mike_as_a_stream_and_as_a_table(spark):
    assert answer(spark, "as_a_stream", FIVE) == [("Jack", 4), ("Lily", 7), ("Mike", 4)]
    assert answer(spark, "as_a_table", FIVE) == [("Jack", 3), ("Lily", 5), ("Mike", 4)]


def test_a_tombstone_removes_from_the_table_and_not_from_the_stream(spark):
    ended = [*FIVE, *amounts("10:05 Jack -")]
    assert answer(spark, "as_a_table", ended) == [("Lily", 5), ("Mike", 4)]
    assert answer(spark, "as_a_stream", ended) == [("Jack", 4), ("Lily", 7), ("Mike", 4)]
    assert answer(spark, "as_a_table", [*ended, *amounts("10:06 Jack 9")]) == [("Jack", 9), ("Lily", 5), ("Mike", 4)]
    assert answer(spark, "as_a_table", ended, until="10:05") == [("Jack", 3), ("Lily", 5), ("Mike", 4)]  # not over yet


def test_a_table_joined_with_a_table_follows_either_sides_changes(spark):
    set_ = limits("09:00 Jack 10", "09:00 Lily 20")
    assert answer(spark, "table_with_table", FIVE, set_) == [("Jack", 3, 10), ("Lily", 5, 20)]
    assert answer(spark, "table_with_table", [*FIVE, *amounts("11:00 Jack 8")], set_) == [("Jack", 8, 10), ("Lily", 5, 20)]
    changed = [*set_, *limits("11:00 Jack 11", "11:00 Lily -", "11:00 Mike 30")]
    assert answer(spark, "table_with_table", FIVE, changed) == [("Jack", 3, 11), ("Mike", 4, 30)]


def test_a_tables_change_alone_emits_nothing_in_a_streams_join(spark):
    #   limits    [09:00 Jack 10 ──────────)[10:03 Jack 11 ──
    #   amounts         I 10:00 Jack 1       I 10:03 Jack 3
    set_ = limits("09:00 Jack 10", "10:03 Jack 11")
    five = [("Jack", 1, 10), ("Jack", 3, 11), ("Lily", 2, None), ("Lily", 5, None), ("Mike", 4, None)]
    assert sorted(answer(spark, "stream_with_table", FIVE, set_), key=str) == sorted(five, key=str)
    later = [*set_, *limits("10:10 Jack 12", "10:11 Jack -", "10:12 Zoe 1")]
    assert sorted(answer(spark, "stream_with_table", FIVE, later), key=str) == sorted(five, key=str)
    assert answer(spark, "stream_with_table", [], later) == []


# --------------------------------------------------------------------------------------------------------------- the law


@st.composite
def drawn(draw, zone: str, value: str, time: str) -> dict:
    name, instant = draw(st.sampled_from(("Jack", "Lily", "Mike", ""))), said(draw(instants(zone, HOUR, timedelta(hours=30))))
    if draw(st.integers(0, 4)) == 0:
        return {"name": name, ENDED: instant}
    return {"name": name, value: draw(st.integers(0, 3)), time: instant}


EVENTS = {"amounts": lambda zone: drawn(zone, "amount", "said_at"), "limits": lambda zone: drawn(zone, "most", "set_at")}
DAYS = """(SELECT unnest([(start AT TIME ZONE zone)::DATE, (start AT TIME ZONE zone)::DATE + 1]) AS day, zone FROM period)"""
LAST = f"""
    SELECT day, name, max_by({{column}}, n) AS {{column}}, max_by(ended, n) AS gone
    FROM {{topic}} JOIN {DAYS} ON changed < (day + INTERVAL 1 DAY)::TIMESTAMP AT TIME ZONE zone GROUP BY ALL"""
AMOUNTS, LIMITS = LAST.format(topic="amounts", column="amount"), LAST.format(topic="limits", column="most")
ANSWERS = {
    "as_a_stream": """
        SELECT name, (said_at AT TIME ZONE zone)::DATE AS day, sum(amount)::BIGINT AS amount
        FROM amounts, period WHERE NOT ended AND said_at >= start AND said_at < stop GROUP BY ALL""",
    "as_a_table": f"SELECT name, day, amount FROM ({AMOUNTS}) WHERE NOT gone",
    "table_with_table": f"""
        SELECT name, day, amount, most FROM ({AMOUNTS}) a JOIN ({LIMITS}) b USING (name, day) WHERE NOT a.gone AND NOT b.gone""",
    "stream_with_table": """
        SELECT (a.n % 3) || '/' || a.n AS record, a.said_at, a.name, a.amount, (
            SELECT max_by({'most': CASE WHEN NOT l.ended THEN l.most END}, (l.changed, l.n)).most
            FROM limits l WHERE l.name = a.name AND l.changed <= a.said_at) AS most
        FROM amounts a, period WHERE NOT a.ended AND a.said_at >= start AND a.said_at < stop""",
}
LAW = Law(CATALOG, EVENTS, ANSWERS)


def test_every_view_of_the_page_has_an_independent_answer(spark):
    assert unheld(spark, LAW) == {}


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_cut_order_and_repetition_gives_by_every_way_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}
