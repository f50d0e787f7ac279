"""Local buyers, said by example: `[` and `)` are the ends of a row's validity, `I` is an order."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import ENDED, HOUR, ZONES, Law, broken, declared_checks, instants, log_of, said, verdicts, worlds

from tidemark import fold, kafka
from tidemark.model import catalog
from tidemark.pipelines import local_buyers as pipeline
from tidemark.pipelines.local_buyers import ITEMS, ORDERS, USERS, local_buyers

CATALOG = catalog([pipeline])


def at(time: str) -> str:
    """An instant as an event says it: `"10:00"` of October 25 unless a day is said."""
    return said(datetime.fromisoformat((time if "T" in time else f"2026-10-25T{time}") + "+00:00"))


def orders(*rows: str) -> list[dict]:
    """Of `"10:00 ann lamp"`; ids are numbered."""
    parts = [row.split() for row in rows]
    return [
        {"order_id": f"o{n}", "user_name": user, "item_name": item, "quantity": 1, "ordered_at": at(time)}
        for n, (time, user, item) in enumerate(parts)
    ]


def rows_of(key: str, column: str, rows: tuple[str, ...]) -> list[dict]:
    """Changes of `"09:00 ann Ulm"`; a place `-` is a tombstone, `?` is not known."""
    parts = [row.split() for row in rows]
    return [
        {key: name, ENDED: at(time)}
        if place == "-"
        else {key: name, column: place if place != "?" else None, "changed_at": at(time)}
        for time, name, place in parts
    ]


def users(*rows: str) -> list[dict]:
    return rows_of("user_name", "address", rows)


def items(*rows: str) -> list[dict]:
    return rows_of("item_name", "origin", rows)


def answer(spark, ordered: list[dict], people: list[dict], things: list[dict]) -> list[tuple]:
    """`(hour, buyers, local orders, orders, unknown users, unknown items)` of the day."""
    logs = {
        "orders": log_of(spark, ORDERS, ordered),
        "users": log_of(spark, USERS, people),
        "items": log_of(spark, ITEMS, things),
    }
    begins = datetime.fromisoformat(at("00:00"))
    read = lambda topic, *_: logs[topic.name]  # noqa: E731
    found = fold.answers(spark, local_buyers, local_buyers, read, begins, begins + timedelta(days=1), settled=True)
    columns = ("buyers", "local_orders", "orders", "unknown_users", "unknown_items")
    return sorted((f"{r['hour']:%H}", *(r[c] for c in columns)) for r in found.toArrow().to_pylist())


LAMP = items("00:00 lamp Ulm", "00:00 tea Jena")
ANN = users("00:00 ann Ulm", "00:00 bob Jena")


def test_a_buyer_of_an_item_from_where_they_live_counts_once_an_hour(spark):
    #   ann, of Ulm:   10:00 I lamp  I lamp  I tea      11:00 I lamp
    #   bob, of Jena:  10:00 I lamp
    ordered = orders("10:00 ann lamp", "10:20 ann lamp", "10:40 ann tea", "11:00 ann lamp", "10:10 bob lamp")
    assert answer(spark, ordered, ANN, LAMP) == [("10", 1, 2, 4, 0, 0), ("11", 1, 1, 1, 0, 0)]


def test_a_user_who_moves_is_local_elsewhere_from_then_on(spark):
    #   ann   [00:00 Ulm ─────)[10:30 Jena ──
    #   lamp from Ulm    I 10:29   I 10:30       tea from Jena   I 10:31
    ordered = orders("10:29 ann lamp", "10:30 ann lamp", "10:31 ann tea")
    assert answer(spark, ordered, [*ANN, *users("10:30 ann Jena")], LAMP) == [("10", 1, 2, 3, 0, 0)]


def test_an_item_that_comes_from_elsewhere_is_local_there_from_then_on(spark):
    ordered = orders("10:29 ann lamp", "10:30 ann lamp", "10:31 bob lamp")
    assert answer(spark, ordered, ANN, [*LAMP, *items("10:30 lamp Jena")]) == [("10", 2, 2, 3, 0, 0)]


def test_a_deleted_user_or_item_is_unknown_from_then_on_and_known_again_when_it_comes_back(spark):
    #   ann    [Ulm ──)[10:10 nothing ──)[10:20 Ulm ──────────────────────────
    #   lamp   [Ulm ───────────────────────────────────)[10:40 nothing ─────
    #          I 10:09     I 10:10           I 10:20           I 10:40
    ordered = orders("10:09 ann lamp", "10:10 ann lamp", "10:20 ann lamp", "10:40 ann lamp", "11:00 bob tea")
    people = [*ANN, *users("10:10 ann -", "10:20 ann Ulm")]
    assert answer(spark, ordered, people, [*LAMP, *items("10:40 lamp -")]) == [("10", 1, 2, 4, 1, 1), ("11", 1, 1, 1, 0, 0)]


def test_a_row_that_arrives_after_the_order_is_joined_as_of_the_orders_time(spark):
    # The rows come in another order than they happened: ann's first address last.
    people = users("12:00 ann Bonn", "09:00 ann Ulm")
    assert answer(spark, orders("10:00 ann lamp", "12:00 ann lamp"), people, LAMP) == [
        ("10", 1, 1, 1, 0, 0),
        ("12", 0, 0, 1, 0, 0),
    ]


def test_unknown_users_and_items_are_kept_out_and_counted(spark):
    ordered = orders("10:00 zoe lamp", "10:01 ann sofa", "10:02 zoe sofa", "10:03 ann lamp", "10:04 bob tea")
    assert answer(spark, ordered, ANN, LAMP) == [("10", 2, 2, 5, 2, 2)]
    assert answer(spark, ordered, [], []) == [("10", 0, 0, 5, 5, 5)]


def test_what_nobody_has_said_is_nobodys_place(spark):
    ordered = orders("10:00 ann lamp")
    assert answer(spark, ordered, users("00:00 ann ?"), items("00:00 lamp ?")) == [("10", 0, 0, 1, 0, 0)]


def test_an_order_that_came_twice_is_one_order(spark):
    ordered = orders("10:00 ann lamp")
    assert answer(spark, ordered * 3, ANN, LAMP) == [("10", 1, 1, 1, 0, 0)]


def test_a_row_of_long_ago_is_valid_still_and_one_of_tomorrow_not_yet(spark):
    people = users("2020-01-01T00:00 ann Ulm", "2026-10-26T00:00 ann Jena")
    assert answer(spark, orders("23:59 ann lamp"), people, LAMP) == [("23", 1, 1, 1, 0, 0)]


# --------------------------------------------------------------------------------------------------------------- the law

STEPS = (HOUR, HOUR - timedelta(seconds=5), timedelta(hours=30))


@st.composite
def an_order(draw, zone: str) -> dict:
    return {
        "user_name": draw(st.sampled_from(("ann", "bob", "eve"))),
        "item_name": draw(st.sampled_from(("lamp", "tea", "silk"))),
        "quantity": draw(st.integers(1, 3)),
        "ordered_at": said(draw(instants(zone, *STEPS))),
    }


@st.composite
def a_row(draw, zone: str, key: str, names: tuple[str, ...], column: str) -> dict:
    name, instant = draw(st.sampled_from(names)), said(draw(instants(zone, *STEPS)))
    if draw(st.integers(0, 4)) == 0:
        return {key: name, ENDED: instant}
    return {key: name, column: draw(st.sampled_from(("Ulm", "Jena", None))), "changed_at": instant}


VALID = """(SELECT max_by({{'gone': t.ended, 'place': t.{column}}}, (t.changed, t.n)) FROM {topic} t
            WHERE t.{key} = o.{key} AND t.changed <= o.ordered_at)"""
LAW = Law(
    CATALOG,
    {
        "orders": an_order,
        "users": lambda zone: a_row(zone, "user_name", ("ann", "bob"), "address"),
        "items": lambda zone: a_row(zone, "item_name", ("lamp", "tea"), "origin"),
    },
    {
        "local_buyers": f"""
            SELECT date_trunc('hour', ordered_at) AS hour,
                   count(DISTINCT user_name) FILTER (address = origin) AS buyers,
                   count(*) FILTER (address = origin) AS local_orders,
                   count(*) AS orders,
                   count(*) FILTER (no_user) AS unknown_users,
                   count(*) FILTER (no_item) AS unknown_items
            FROM (
                SELECT ordered_at, user_name,
                       coalesce(u.gone, true) AS no_user, coalesce(i.gone, true) AS no_item,
                       CASE WHEN NOT u.gone THEN u.place END AS address, CASE WHEN NOT i.gone THEN i.place END AS origin
                FROM (SELECT *, {VALID.format(key="user_name", topic="users", column="address")} AS u,
                             {VALID.format(key="item_name", topic="items", column="origin")} AS i FROM orders o)
            ), period WHERE ordered_at >= start AND ordered_at < stop GROUP BY ALL"""
    },
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_cut_order_and_repetition_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# --------------------------------------------------------------------------------------------------- checks and the sample

DAY = date(2026, 10, 25)
TEN = datetime(2026, 10, 25, 10, tzinfo=UTC)
#           hour  buyers  local  orders  users  items
RIGHT = [(TEN, 1, 2, 20, 1, 1, True, DAY)]
WRONG = {
    "ExpectColumnValuesToBeBetween orders": (TEN, 0, 0, 0, 0, 0, True, DAY),
    "buyers <= local orders <= orders of known users and items": (TEN, 1, 0, 20, 0, 0, True, DAY),
    "at most a tenth of the orders is of unknown users or items": (TEN, 1, 1, 20, 2, 1, True, DAY),
}


def said_by(spark, rows: list[tuple]) -> dict[tuple[str, str], str]:
    return verdicts(spark, CATALOG, DAY, {"local_buyers": rows}, {})


def test_each_check_holds_on_a_day_that_is_right_and_trips_on_one_that_is_wrong(spark):
    right = said_by(spark, RIGHT)
    assert set(right.values()) == {"passed"}
    declared = {c for table, c in declared_checks(CATALOG) if table == "local_buyers"}
    assert declared == set(WRONG)
    for check, row in WRONG.items():
        assert said_by(spark, [row])["local_buyers", check] == "failed", check


@pytest.mark.parametrize("topic", [USERS, ITEMS], ids=lambda t: t.name)
def test_a_sampled_day_of_a_table_ends_keys_and_kafka_takes_every_record(topic):
    drawn = list(kafka.sample(topic, seed=1, count=2000, day=DAY, zone=ZoneInfo("UTC")))
    keys = [e.key if isinstance(e, kafka.Event) else kafka.key_of(topic, e) for e in drawn]
    assert len(drawn) == 2000 and None not in keys  # a compacted topic takes nothing without a key
    ends = [e.at for e in drawn if isinstance(e, kafka.Event)]
    assert 20 < len(ends) < 150 and {at.date() for at in ends} == {DAY}
