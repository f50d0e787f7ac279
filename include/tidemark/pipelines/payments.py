"""Payments: three answers from one topic, each on its own: the ledger, the status of each order, the pieces sold of each item."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from tidemark.functions import FIRST, day, of_log
from tidemark.model import Announce, Live, Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

STATUSES = ("placed", "paid", "shipped", "delivered", "returned", "cancelled", "closed")
ITEMS = {"lamp": 39.90, "tea": 4.50, "silk": 89.00, "kettle": 24.95, "atlas": 32.00, "rope": 7.80}
ORDERS_A_SECOND, LATER = 20, (0, 2, 3, 30, 60, 90)


def sample_payment(random: Random, at: datetime) -> dict[str, Any]:
    """One of the six events of an order, of which the sample's shop takes 20 a second. What is drawn twice is a repeat.

    One order in ten is paid at the second try, one in five has a piece refunded.
    """
    step = random.randrange(len(LATER))
    number = int((at.timestamp() - LATER[step]) * ORDERS_A_SECOND)
    order = Random(number)
    item, quantity, fate = order.choice(list(ITEMS)), order.randint(1, 3), order.random()
    second_try, refunded = fate < 0.1, fate > 0.8

    def money(kind: str, success: bool, pieces: int) -> dict[str, Any]:
        return {"kind": kind, "success": success, "amount": round(pieces * ITEMS[item], 2), "item": item, "quantity": pieces}

    def status(word: str, version: int) -> dict[str, Any]:
        return {"kind": "status", "status": word, "version": version}

    told = (
        status("placed", 1),
        money("payment", not second_try, quantity),
        money("payment", True, quantity) if second_try else status("paid", 2),
        status("shipped", 3),
        status("delivered", 4),
        money("refund", True, 1) if refunded else status("closed", 5),
    )[step]
    happened = datetime.fromtimestamp(number / ORDERS_A_SECOND + LATER[step], UTC)
    of_kind = dict.fromkeys(("success", "amount", "item", "quantity", "status", "version")) | told
    return {
        "event_id": f"{number:x}-{step}",
        "order_id": f"o{number:x}",
        **of_kind,
        "happened_at": happened.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }


PAYMENTS = Topic(
    "payments",
    key="order_id",
    partitions=3,
    retention="7 days",
    schema="""
        event_id STRING NOT NULL COMMENT 'made by the shop; a repeat has the same one',
        order_id STRING NOT NULL COMMENT 'the order that it is about',
        kind STRING NOT NULL COMMENT 'payment, refund or status; any other is for who may come',
        success BOOLEAN COMMENT 'of a payment or a refund: whether the money moved',
        amount DECIMAL(12, 2) COMMENT 'of a payment or a refund, more than nothing, in the currency of the shop',
        item STRING COMMENT 'what is paid or refunded; null where it is no item, like a fee',
        quantity INT COMMENT 'pieces of the item',
        status STRING COMMENT 'of a status: the order''s new one, in a word',
        version INT COMMENT 'of a status: the shop''s own number of it, by order; the new order is 1',
        happened_at TIMESTAMP NOT NULL COMMENT 'by the shop''s clock'""",
    id="event_id",
    event_time="happened_at",
    sample=sample_payment,
    checks=(
        *of_log("payments"),
        expect(
            "UnexpectedRowsExpectation",
            severity="warning",
            description="a payment or a refund says whether and how much, a status which and its version",
            unexpected_rows_query="""
                SELECT * FROM {batch} WHERE reject IS NULL AND (
                    (kind IN ('payment', 'refund') AND (success IS NULL OR amount IS NULL OR amount <= 0))
                    OR (kind = 'status' AND (status IS NULL OR version IS NULL OR version < 1)))""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------------ the ledger


def money_moved() -> Column:
    """Whether an event is a payment or a refund that moved money, which alone counts, in the ledger and in the items."""
    return F.col("kind").isin("payment", "refund") & F.col("success") & (F.col("amount") > 0)


@view(
    reads={"payments": PAYMENTS},
    key=("entry_id", "booked_at"),
    time="booked_at",
    live=Live(every="10 seconds", back="1 hour"),
    announce=Announce(title="{kind} of {amount:,.2f} for order {order_id}", content="booked at {booked_at}"),
    comments={
        "entry_id": "the event_id of the payment or the refund",
        "booked_at": "when the money moved, by the shop's clock",
        "order_id": "the order that was paid or refunded",
        "kind": "payment or refund",
        "amount": "a payment adds, a refund takes; in the currency of the shop",
    },
    checks=[
        expect("ExpectColumnValuesToBeInSet", column="kind", value_set=["payment", "refund"]),
        expect(
            "UnexpectedRowsExpectation",
            description="a payment adds and a refund takes",
            unexpected_rows_query="""
                SELECT * FROM {batch}
                WHERE amount IS NULL OR sign(amount) <> CASE kind WHEN 'payment' THEN 1 WHEN 'refund' THEN -1 END""",
        ),
        expect(
            "UnexpectedRowsExpectation",
            description="every payment and refund that moved money stands, and nothing else",
            unexpected_rows_query=f"""
                SELECT coalesce(entry_id, event_id) AS entry FROM {{batch}}
                FULL JOIN (
                    SELECT event_id,
                           min_by(struct(success, amount, kind), {FIRST}) AS e
                    FROM payments WHERE reject IS NULL GROUP BY day, event_id
                    HAVING e.success AND e.amount > 0 AND e.kind IN ('payment', 'refund')
                ) ON entry_id = event_id
                WHERE entry_id IS NULL OR event_id IS NULL""",
        ),
    ],
)
def payment_ledger(payments: DataFrame) -> DataFrame:
    """Each payment and each refund that moved money, an entry each."""
    signed = F.when(F.col("kind") == "refund", -F.col("amount")).otherwise(F.col("amount"))
    return payments.where(money_moved()).select(
        F.col("event_id").alias("entry_id"), F.col("happened_at").alias("booked_at"), "order_id", "kind", signed.alias("amount")
    )


@view(
    reads={"ledger": payment_ledger},
    key=("day",),
    time="day",
    live=Live(every="1 minute", back="1 hour"),
    comments={
        "payments": "entries that are payments",
        "refunds": "entries that are refunds, on the day of the refund",
        "received": "the sum of the payments, in the currency of the shop",
        "refunded": "the sum of the refunds, as a positive number, in the currency of the shop",
        "net": "received less refunded, in the currency of the shop",
    },
    checks=[
        expect(
            "UnexpectedRowsExpectation",
            description="a day is the sum of its entries, and net is received less refunded",
            unexpected_rows_query="""
                SELECT day, received, refunded, net, entries, balance
                FROM {batch} FULL JOIN (
                    SELECT day, count(*) AS entries, sum(amount) AS balance FROM payment_ledger GROUP BY day
                ) USING (day)
                WHERE net IS DISTINCT FROM balance OR net <> received - refunded OR payments + refunds <> entries""",
        ),
    ],
)
def payment_days(ledger: DataFrame) -> DataFrame:
    """What came in, what went back and what is left of each business day, exact to the cent."""
    nothing = F.lit(0).cast("decimal(12,2)")
    return ledger.groupBy(day("booked_at").alias("day")).agg(
        F.count_if(F.col("kind") == "payment").alias("payments"),
        F.count_if(F.col("kind") == "refund").alias("refunds"),
        F.sum(F.greatest("amount", nothing)).alias("received"),
        F.sum(F.greatest(-F.col("amount"), nothing)).alias("refunded"),
        F.sum("amount").alias("net"),
    )


# ------------------------------------------------------------------------------------------------------------ the orders


@view(
    reads={"payments": PAYMENTS},
    key=("order_id", "version", "changed_at"),
    time="changed_at",
    live=Live(every="10 seconds", back="1 hour"),
    announce=Announce(
        title="Order {order_id}: {status}", content="version {version}, {changed_at}", mention=("all",), mention_if="is_new"
    ),
    comments={
        "order_id": "the order that changed",
        "version": "the shop's own number of the status, by order",
        "changed_at": "when the shop changed it",
        "status": "what the order became",
        "is_new": "whether it is the order's first status: version 1",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="version", min_value=1),
        expect("ExpectColumnValuesToBeInSet", severity="warning", column="status", value_set=list(STATUSES)),
        expect(
            "UnexpectedRowsExpectation",
            severity="warning",
            description="a version of an order is one status",
            unexpected_rows_query="SELECT order_id, version FROM {batch} GROUP BY ALL HAVING count(DISTINCT status) > 1",
        ),
    ],
)
def order_changes(payments: DataFrame) -> DataFrame:
    """Each status that each order has had. Of two that are told of one version and one instant the greater event_id holds."""
    said = payments.where((F.col("kind") == "status") & F.col("status").isNotNull() & (F.col("version") >= 1))
    told = said.groupBy("order_id", "version", F.col("happened_at").alias("changed_at")).agg(
        F.max_by("status", "event_id").alias("status")
    )
    return told.select("order_id", "version", "changed_at", "status", (F.col("version") == 1).alias("is_new"))


@view(
    reads={"changes": order_changes},
    key=("order_id", "day"),
    time="day",
    live=Live(every="30 seconds", back="1 hour"),
    comments={
        "order_id": "the order that changed on the day",
        "status": "of the day's changes, all or those by now, that of the greatest version",
        "version": "the shop's own number of the status, by order",
        "changed_at": "when the shop changed it",
    },
    checks=[
        expect(
            "UnexpectedRowsExpectation",
            description="every order that changed has the greatest version of its day",
            unexpected_rows_query="""
                SELECT order_id, day, version, greatest_version
                FROM {batch} FULL JOIN (
                    SELECT order_id, day, max(version) AS greatest_version FROM order_changes GROUP BY ALL
                ) USING (order_id, day)
                WHERE version IS DISTINCT FROM greatest_version""",
        ),
    ],
)
def order_status(changes: DataFrame) -> DataFrame:
    """The status of each order on each day on which it changed: of the day's changes that of the greatest version, by the
    shop's own count, whenever they came or were made.

    Of two changes of one version the later one holds.
    """
    last = F.max(F.struct("version", "changed_at", "status")).alias("last")
    by_day = changes.groupBy("order_id", day("changed_at").alias("day")).agg(last)
    return by_day.select("order_id", "day", "last.status", "last.version", "last.changed_at")


# ------------------------------------------------------------------------------------------------------------- the items


@view(
    reads={"payments": PAYMENTS},
    key=("item", "hour"),
    time="hour",
    live=Live(every="30 seconds", back="2 hours"),
    comments={
        "item": "what was sold or refunded",
        "hour": "the start of the hour",
        "sold": "gross: pieces that were paid for in the hour",
        "refunded": "pieces whose refund was made in the hour, whenever they were sold",
        "net": "sold less refunded; less than nothing where more came back than went out",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="sold", min_value=0),
        expect("ExpectColumnValuesToBeBetween", column="refunded", min_value=0),
        expect(
            "UnexpectedRowsExpectation",
            description="net is sold less refunded, and something was",
            unexpected_rows_query="SELECT * FROM {batch} WHERE net <> sold - refunded OR sold + refunded = 0",
        ),
    ],
)
def item_sales(payments: DataFrame) -> DataFrame:
    """How many pieces of each item were sold in each hour, and how many were refunded."""
    counts = money_moved() & (F.col("quantity") > 0) & F.col("item").isNotNull()
    pieces = F.when(F.col("kind") == "payment", F.col("quantity")).otherwise(0)
    back = F.when(F.col("kind") == "refund", F.col("quantity")).otherwise(0)
    return (
        payments.where(counts)
        .groupBy("item", F.date_trunc("hour", "happened_at").alias("hour"))
        .agg(F.sum(pieces).alias("sold"), F.sum(back).alias("refunded"), F.sum(pieces - back).alias("net"))
    )
