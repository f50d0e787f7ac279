"""Payments, said by example: an event is `time order kind`, with what else is to say of it."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import HOUR, ZONES, Law, broken, declared_checks, instants, record, said, verdicts, worlds

from tidemark import fold, notify
from tidemark.model import catalog
from tidemark.pipelines import payments as pipeline
from tidemark.pipelines.payments import (
    PAYMENTS,
    item_sales,
    order_changes,
    order_status,
    payment_days,
    payment_ledger,
    sample_payment,
)
from tidemark.settings import Settings

DAY = date(2026, 11, 18)
COLUMNS = pa.schema(
    {
        **{n: pa.string() for n in ("event_id", "order_id", "kind", "item", "status")},
        "success": pa.bool_(),
        "amount": pa.decimal128(12, 2),
        "quantity": pa.int32(),
        "version": pa.int32(),
        "happened_at": pa.timestamp("us", "UTC"),
    }
)


def happened(spark, *rows: str):
    """Events of November from `"18T10:00 o1 payment 9.50 lamp 2"`, `… refund 9.50 lamp 1 failed` or `… status 3 shipped`.

    Ids are numbered; an item `-` is none.
    """
    told = []
    for n, row in enumerate(rows):
        time, order, kind, *rest = row.split()
        event = {"event_id": f"e{n:02d}", "order_id": order, "kind": kind}
        if kind == "status":
            event |= {"version": int(rest[0]), "status": rest[1]}
        else:
            item, quantity = (rest[1], int(rest[2])) if rest[1] != "-" else (None, None)
            event |= {"amount": Decimal(rest[0]), "item": item, "quantity": quantity, "success": "failed" not in rest}
        told.append(event | {"happened_at": datetime.fromisoformat(f"2026-11-{time}+00:00")})
    return spark.createDataFrame(pa.Table.from_pylist(told, COLUMNS))


def booked(spark, *rows: str) -> list[tuple[str, str, str]]:
    """The ledger by time: `(order, kind, amount)`."""
    entries = payment_ledger(payments=happened(spark, *rows)).orderBy("booked_at").toArrow().to_pylist()
    return [(e["order_id"], e["kind"], f"{e['amount']}") for e in entries]


def days(spark, *rows: str) -> list[tuple]:
    """What each day came to: `(day, payments, refunds, received, refunded, net)`."""
    ledger = payment_ledger(payments=happened(spark, *rows))
    found = payment_days(ledger=ledger).orderBy("day").toArrow().to_pylist()
    return [(d["day"].day, d["payments"], d["refunds"], *(f"{d[c]}" for c in ("received", "refunded", "net"))) for d in found]


def status(spark, *rows: str) -> list[tuple[str, int, str, int]]:
    """What each order was by each day's changes: `(order, day, status, version)`."""
    changes = order_changes(payments=happened(spark, *rows))
    found = order_status(changes=changes).orderBy("order_id", "day").toArrow().to_pylist()
    return [(o["order_id"], o["day"].day, o["status"], o["version"]) for o in found]


def sold(spark, *rows: str) -> list[tuple[str, str, int, int, int]]:
    """What was sold: `(item, hour, sold, refunded, net)`."""
    found = item_sales(payments=happened(spark, *rows)).orderBy("item", "hour").toArrow().to_pylist()
    return [(i["item"], f"{i['hour']:%dT%H}", i["sold"], i["refunded"], i["net"]) for i in found]


# ------------------------------------------------------------------------------------------------------------ the ledger


def test_a_payment_adds_and_a_refund_takes(spark):
    told = booked(spark, "18T10:00 o1 payment 79.80 lamp 2", "18T11:00 o1 refund 39.90 lamp 1")
    assert told == [("o1", "payment", "79.80"), ("o1", "refund", "-39.90")]


def test_money_that_did_not_move_is_in_no_ledger(spark):
    told = booked(
        spark, "18T10:00 o1 payment 9.50 tea 2 failed", "18T10:01 o1 payment 9.50 tea 2", "18T12:00 o1 refund 9.50 tea 2 failed"
    )
    assert told == [("o1", "payment", "9.50")]


def test_a_status_is_no_entry_and_neither_is_an_amount_of_nothing_or_less(spark):
    assert booked(spark, "18T10:00 o1 status 1 placed", "18T10:01 o1 payment 0.00 tea 1", "18T10:02 o1 refund -1.00 tea 1") == []


def test_a_fee_is_an_entry_and_no_item(spark):
    rows = ("18T10:00 o1 payment 4.90 - -",)
    assert (booked(spark, *rows), sold(spark, *rows)) == ([("o1", "payment", "4.90")], [])


def test_a_day_is_the_sum_of_its_entries_exact_to_the_cent(spark):
    #   [18th  +0.10  +0.20  +0.10 -0.10 )[19th  -0.20
    told = days(
        spark,
        *("18T10:00 o1 payment 0.10 tea 1", "18T11:00 o2 payment 0.20 tea 1", "18T12:00 o3 payment 0.10 tea 1"),
        *("18T13:00 o3 refund 0.10 tea 1", "19T09:00 o2 refund 0.20 tea 1"),
    )
    assert told == [(18, 3, 1, "0.40", "0.10", "0.30"), (19, 0, 1, "0.00", "0.20", "-0.20")]


def test_a_day_is_the_business_day(spark):
    #   Berlin: [18th ------ 23:59 )[19th 00:01
    #   UTC:                22:59     23:01 (still the 18th)
    rows = ("18T22:59 o1 payment 1.00 tea 1", "18T23:01 o2 payment 2.00 tea 1")
    assert days(spark, *rows) == [(18, 2, 0, "3.00", "0.00", "3.00")]
    spark.conf.set("spark.tidemark.zone", "Europe/Berlin")
    try:
        assert [(d[0], d[5]) for d in days(spark, *rows)] == [(18, "1.00"), (19, "2.00")]
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")


# ------------------------------------------------------------------------------------------------------------ the orders


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_shop_s_version_decides_in_whatever_order_statuses_come(spark, order):
    rows = ["18T10:00 o1 status 1 placed", "18T10:05 o1 status 2 paid", "18T11:00 o1 status 3 shipped"]
    assert status(spark, *(rows[n] for n in order)) == [("o1", 18, "shipped", 3)]


def test_the_version_decides_also_where_the_shop_s_clock_steps_back(spark):
    assert status(spark, "18T10:05 o1 status 2 paid", "18T10:04 o1 status 3 shipped") == [("o1", 18, "shipped", 3)]


def test_of_two_changes_of_one_version_the_later_holds_and_of_one_instant_the_greater_event_id(spark):
    assert status(spark, "18T11:00 o1 status 2 cancelled", "18T10:00 o1 status 2 paid") == [("o1", 18, "cancelled", 2)]
    assert status(spark, "18T10:00 o1 status 2 paid", "18T10:00 o1 status 2 cancelled") == [("o1", 18, "cancelled", 2)]


def test_an_order_has_a_row_for_each_day_on_which_it_changed(spark):
    told = status(spark, "18T10:00 o1 status 1 placed", "18T10:05 o1 status 2 paid", "20T09:00 o1 status 3 shipped")
    assert told == [("o1", 18, "paid", 2), ("o1", 20, "shipped", 3)]


def test_a_payment_changes_no_status_and_a_status_without_a_version_of_one_or_more_is_none(spark):
    assert status(spark, "18T10:00 o1 payment 9.50 tea 2", "18T10:00 o2 status 0 placed") == []


def test_every_change_stands_and_the_first_version_is_the_new_order(spark):
    changes = order_changes(payments=happened(spark, "18T10:05 o1 status 2 paid", "18T10:00 o1 status 1 placed"))
    told = [(r["version"], r["status"], r["is_new"]) for r in changes.orderBy("version").toArrow().to_pylist()]
    assert told == [(1, "placed", True), (2, "paid", False)]


# ------------------------------------------------------------------------------------------------------------- the items


def test_gross_is_what_was_paid_for_and_net_is_without_what_came_back(spark):
    told = sold(
        spark,
        *("18T10:00 o1 payment 9.00 tea 2", "18T10:59 o2 payment 13.50 tea 3", "18T10:30 o3 payment 39.90 lamp 1"),
        "18T10:59:59.999 o2 refund 4.50 tea 1",
    )
    assert told == [("lamp", "18T10", 1, 0, 1), ("tea", "18T10", 5, 1, 4)]


def test_a_refund_counts_in_its_own_hour(spark):
    #   [10:00  +2 )[11:00  -2
    told = sold(spark, "18T10:00 o1 payment 9.00 tea 2", "18T11:00 o1 refund 9.00 tea 2")
    assert told == [("tea", "18T10", 2, 0, 2), ("tea", "18T11", 0, 2, -2)]


def test_what_failed_is_not_sold_and_not_refunded(spark):
    assert sold(spark, "18T10:00 o1 payment 9.00 tea 2 failed", "18T10:30 o1 refund 9.00 tea 2 failed") == []


def test_what_moved_no_money_is_not_sold_and_not_refunded(spark):
    assert sold(spark, "18T10:00 o1 payment 0.00 tea 2", "18T10:30 o1 refund -1.00 tea 1") == []


def test_a_repeat_is_one_sale_one_entry_and_one_change(spark):
    event = {"event_id": "e1", "order_id": "o1", "kind": "payment", "item": "tea", "status": None, "version": None}
    event |= {"success": True, "amount": Decimal("4.50"), "quantity": 1, "happened_at": datetime(2026, 11, 18, 10, tzinfo=UTC)}
    place = pa.struct({"timestamp": pa.timestamp("us", "UTC"), "partition": pa.int32(), "offset": pa.int64()})
    rows = [event | {"kafka": {"timestamp": event["happened_at"], "partition": 0, "offset": n}} for n in (0, 1)]
    once = fold.once(PAYMENTS, spark.createDataFrame(pa.Table.from_pylist(rows, COLUMNS.append(pa.field("kafka", place)))))
    assert item_sales(payments=once).select("sold").toArrow().to_pylist() == [{"sold": 1}]
    assert payment_ledger(payments=once).count() == 1


# ------------------------------------------------------------------------------------------- what is told, and each alone


def announced(spark, view, *rows: str) -> list[tuple[str, str, tuple[str, ...]]]:
    answer = view(payments=happened(spark, *rows)).orderBy(view.time).toArrow().to_pylist()
    messages = notify.announced(Settings(_env_file=None, notify_to="dingtalk"), view, answer)
    return [(m.title, m.content, m.mention) for m in messages]


def test_a_new_order_calls_everybody_and_a_change_of_status_nobody(spark):
    told = announced(spark, order_changes, "18T10:00 o1 status 1 placed", "18T10:05 o1 status 2 paid")
    assert told == [
        ("Order o1: placed", "version 1, 2026-11-18 10:00:00 UTC", ("all",)),
        ("Order o1: paid", "version 2, 2026-11-18 10:05:00 UTC", ()),
    ]


def test_a_payment_and_a_refund_are_told_with_their_amount(spark):
    told = announced(spark, payment_ledger, "18T10:00 o1 payment 1234.50 lamp 2", "18T11:00 o1 refund 39.90 lamp 1")
    assert [title for title, _, _ in told] == ["payment of 1,234.50 for order o1", "refund of -39.90 for order o1"]


@pytest.mark.parametrize(
    ("view", "fail"),
    [
        (payment_ledger, {"payment_ledger", "payment_days"}),
        (order_changes, {"order_changes", "order_status"}),
        (item_sales, {"item_sales"}),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_an_answer_that_fails_takes_no_other_with_it(spark, view, fail):
    def mistaken(payments):
        return payments.select("no_such_column")

    quick: dict = {}
    for declared in catalog([pipeline]).derived:
        reads = {p: quick.get(source.name, source) for p, source in declared.reads.items()}
        function = mistaken if declared is view else declared.function
        quick[declared.name] = replace(declared, reads=reads, function=function)
    found = {d.name: s for d, s in fold.schemas(spark, catalog([type("payments", (), {"topic": PAYMENTS, **quick})]))}
    assert {name for name, schema in found.items() if isinstance(schema, Exception)} == fail


# ------------------------------------------------------------------------------------------------------------------- law


@st.composite
def payment(draw, zone: str) -> dict:
    return {
        "order_id": draw(st.sampled_from(("o1", "o2", "o3"))),
        "kind": draw(st.sampled_from(("payment", "payment", "refund", "status", "status", "note"))),
        "success": draw(st.sampled_from((True, True, True, False, None))),
        "amount": draw(st.sampled_from((0.01, 9.99, 20, 1234567890.12, 0, -1, None))),
        "item": draw(st.sampled_from(("lamp", "tea", None))),
        "quantity": draw(st.sampled_from((1, 2, 3, 0, None))),
        "status": draw(st.sampled_from(("placed", "paid", "shipped", None))),
        "version": draw(st.sampled_from((1, 2, 2, 3, 0, None))),
        "happened_at": said(draw(instants(zone, HOUR))),
    }


ENTRIES = """
    entries AS (
        SELECT event_id AS entry_id, happened_at AS booked_at, order_id, kind, if(kind = 'refund', -amount, amount) AS amount
        FROM payments, period
        WHERE kind IN ('payment', 'refund') AND success AND amount > 0 AND happened_at >= start AND happened_at < stop
    )"""
CHANGES = """
    changes AS (
        SELECT order_id, version, happened_at AS changed_at, status, version = 1 AS is_new, event_id FROM payments p, period
        WHERE kind = 'status' AND version >= 1 AND status IS NOT NULL AND happened_at >= start AND happened_at < stop
            AND NOT EXISTS (
                FROM payments o WHERE o.kind = 'status' AND o.status IS NOT NULL AND o.event_id > p.event_id
                    AND (o.order_id, o.version, o.happened_at) = (p.order_id, p.version, p.happened_at))
    )"""

LAW = Law(
    catalog([pipeline]),
    {"payments": payment},
    {
        "payment_ledger": f"WITH {ENTRIES} FROM entries",
        "payment_days": f"""
            WITH {ENTRIES}
            SELECT CAST(booked_at AT TIME ZONE zone AS DATE) AS day, count(*) FILTER (amount > 0) AS payments,
                   count(*) FILTER (amount < 0) AS refunds, coalesce(sum(amount) FILTER (amount > 0), 0) AS received,
                   coalesce(-sum(amount) FILTER (amount < 0), 0) AS refunded, sum(amount) AS net
            FROM entries, period GROUP BY ALL""",
        "order_changes": f"WITH {CHANGES} SELECT * EXCLUDE (event_id) FROM changes",
        "order_status": f"""
            WITH {CHANGES}
            SELECT order_id, CAST(changed_at AT TIME ZONE zone AS DATE) AS day, status, version, changed_at FROM changes, period
            QUALIFY row_number() OVER (PARTITION BY order_id, day ORDER BY version DESC, changed_at DESC) = 1""",
        "item_sales": """
            SELECT item, date_trunc('hour', happened_at) AS hour,
                   coalesce(sum(quantity) FILTER (kind = 'payment'), 0) AS sold,
                   coalesce(sum(quantity) FILTER (kind = 'refund'), 0) AS refunded, sold - refunded AS net
            FROM payments, period
            WHERE kind IN ('payment', 'refund') AND success AND amount > 0 AND item IS NOT NULL AND quantity > 0
                AND date_trunc('hour', happened_at) >= start AND date_trunc('hour', happened_at) < stop
            GROUP BY ALL""",
    },
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_repetition_and_cut_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# -------------------------------------------------------------------------------------------------- checks and the sample


@pytest.fixture(scope="module")
def judged(spark):
    ten = datetime(2026, 11, 18, 10, tzinfo=UTC)

    def money(event: str, kind: str, amount: str | None) -> tuple:
        return (event, "o1", kind, True, Decimal(amount) if amount else None, "tea", 1, None, None, ten)

    def logged(rejects: int, *events: tuple) -> list[tuple]:
        told = [*events, *(("e", "o1", "status", None, None, None, None, "placed", 1, ten) for _ in range(199 - len(events)))]
        rows = [record(PAYMENTS, n, DAY, *own) for n, own in enumerate(told)]
        return rows + [record(PAYMENTS, 199 + n, DAY, reject="not JSON") for n in range(rejects)]

    def entry(event: str, kind: str, amount: str) -> tuple:
        return (event, ten, "o1", kind, Decimal(amount), True, DAY)

    def change(version: int, word: str) -> tuple:
        return ("o1", version, ten, word, version == 1, True, DAY)

    # Of an id the first is what happened, whatever a repeat says.
    failed = ("e4", "o1", "payment", False, Decimal("7.00"), "tea", 1, None, None, ten)
    right = {
        "payments": logged(
            1, money("e1", "payment", "9.50"), money("e2", "refund", "4.50"), failed, money("e4", "payment", "7.00")
        ),
        "payment_ledger": [entry("e1", "payment", "9.50"), entry("e2", "refund", "-4.50")],
        "payment_days": [(1, 1, Decimal("9.50"), Decimal("4.50"), Decimal("5.00"), True, DAY)],
        "order_changes": [change(1, "placed"), change(2, "paid")],
        "order_status": [("o1", "paid", 2, ten, True, DAY)],
        "item_sales": [("tea", ten, 1, 1, 0, True, DAY)],
    }
    wrong = {
        "payments": logged(9, money("e1", "payment", "9.50"), money("e2", "refund", None)),
        "payment_ledger": [entry("e2", "refund", "4.50"), entry("e3", "gift", "1.00")],
        "payment_days": [(1, 1, Decimal("9.50"), Decimal("4.50"), Decimal("5.01"), True, DAY)],
        "order_changes": [change(0, "lost"), change(2, "paid"), change(2, "placed")],
        "order_status": [("o1", "placed", 1, ten, True, DAY)],
        "item_sales": [("tea", ten, -1, 0, 1, True, DAY), ("lamp", ten, 0, -1, 1, True, DAY)],
    }
    return {
        "right": verdicts(spark, LAW.catalog, DAY, right, {"payments": 200}),
        "wrong": verdicts(spark, LAW.catalog, DAY, wrong, {"payments": 210}),
    }


@pytest.mark.parametrize("check", declared_checks(LAW.catalog))
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")


def test_a_sample_is_of_orders_that_are_placed_and_paid_and_moves_on_in_time():
    noon = datetime(2026, 11, 18, 12, tzinfo=UTC)
    dice = Random(1)
    drawn = [sample_payment(dice, noon + n * timedelta(milliseconds=10)) for n in range(20_000)]
    lags = [noon + n * timedelta(milliseconds=10) - datetime.fromisoformat(e["happened_at"]) for n, e in enumerate(drawn)]
    assert timedelta(0) <= min(lags) and max(lags) < timedelta(milliseconds=100)
    once = {e["event_id"]: e for e in drawn}
    assert all(once[e["event_id"]] == e for e in drawn)
    assert {e["kind"] for e in drawn} == {"payment", "refund", "status"} and {e["success"] for e in drawn} == {True, False, None}
    of_order: dict[str, set[str]] = {}
    for event in once.values():
        of_order.setdefault(event["order_id"], set()).add(event["status"] or event["kind"])
    assert sum({"placed", "payment", "shipped", "delivered"} <= steps for steps in of_order.values()) > 200
