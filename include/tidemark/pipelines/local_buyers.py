"""Local buyers: each hour, how many users bought an item that comes from where they live."""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from tidemark.functions import as_of, of_log
from tidemark.model import Live, Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PLACES = ("Beijing", "Shanghai", "Chengdu", "Hangzhou", "Shenzhen")
NAMES = tuple(f"{first} {last}" for first in ("Jack", "Lily", "Mike", "Mary", "Luka") for last in ("Li", "Wu", "Xu", "Ma"))
THINGS = tuple(f"{kind} {n}" for kind in ("tea", "silk", "lamp", "rice") for n in range(1, 9))


def instant(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def sample_order(random: Random, at: datetime) -> dict[str, Any]:
    """One order, now and then of a user or an item that nobody has heard of."""
    return {
        "order_id": f"{random.getrandbits(96):024x}",
        "user_name": random.choice(NAMES) if random.random() < 0.98 else "nobody",
        "item_name": random.choice(THINGS) if random.random() < 0.98 else "nothing",
        "quantity": random.randint(1, 5),
        "ordered_at": instant(at),
    }


def sample_user(random: Random, at: datetime) -> dict[str, Any]:
    """One user as they are from now on; of twenty one leaves, which is a tombstone: the key alone."""
    name = random.choice(NAMES)
    if random.random() < 0.05:
        return {"user_name": name}
    row = {"gender": random.choice("fm"), "address": random.choice(PLACES), "age": random.randint(18, 80)}
    return {"user_name": name, **row, "changed_at": instant(at)}


def sample_item(random: Random, at: datetime) -> dict[str, Any]:
    """One item as it is from now on; of fifty one is taken out of the shop."""
    name = random.choice(THINGS)
    if random.random() < 0.02:
        return {"item_name": name}
    row = {"price": random.randint(100, 9_999) / 100, "kind": name.split()[0], "origin": random.choice(PLACES)}
    return {"item_name": name, **row, "changed_at": instant(at)}


ORDERS = Topic(
    "orders",
    key="user_name",
    partitions=3,
    schema="""
        order_id STRING NOT NULL COMMENT 'made by the shop; a repeat has the same one',
        user_name STRING NOT NULL COMMENT 'who ordered',
        item_name STRING NOT NULL COMMENT 'what was ordered',
        quantity INT NOT NULL COMMENT 'pieces',
        ordered_at TIMESTAMP NOT NULL COMMENT 'when the shop took the order'""",
    id="order_id",
    event_time="ordered_at",
    sample=sample_order,
    checks=of_log("orders"),
)

USERS = Topic(
    "users",
    key="user_name",
    partitions=3,
    compacted=True,
    schema="""
        user_name STRING NOT NULL COMMENT 'the user; no two have the same one',
        gender STRING COMMENT 'f, m, or as they have said; null where they have not',
        address STRING COMMENT 'the place where they live; null where they have not said',
        age INT COMMENT 'years',
        changed_at TIMESTAMP NOT NULL COMMENT 'from when on the row is valid'""",
    event_time="changed_at",
    sample=sample_user,
)

ITEMS = Topic(
    "items",
    key="item_name",
    partitions=6,
    compacted=True,
    schema="""
        item_name STRING NOT NULL COMMENT 'the item; no two have the same one',
        price DECIMAL(10,2) COMMENT 'for a piece, in the currency of the shop',
        kind STRING COMMENT 'what sort of thing it is',
        origin STRING COMMENT 'the place where it comes from; null where nobody knows',
        changed_at TIMESTAMP NOT NULL COMMENT 'from when on the row is valid'""",
    event_time="changed_at",
    sample=sample_item,
)


@view(
    reads={"orders": ORDERS, "users": USERS.changes, "items": ITEMS.changes},
    key=("hour",),
    time="hour",
    live=Live(every="30 seconds", back="2 hours"),
    comments={
        "hour": "the start of the hour",
        "buyers": "users with an order of an item whose origin was their address when they ordered it",
        "local_orders": "such orders",
        "orders": "orders of the hour, whoever placed them",
        "unknown_users": "orders that no user's row was valid for; kept out",
        "unknown_items": "orders that no item's row was valid for; kept out",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="orders", min_value=1),
        expect(
            "UnexpectedRowsExpectation",
            description="buyers <= local orders <= orders of known users and items",
            unexpected_rows_query="""
                SELECT * FROM {batch}
                WHERE buyers > local_orders OR local_orders > orders - greatest(unknown_users, unknown_items)
                   OR (buyers = 0) <> (local_orders = 0)""",
        ),
        expect(
            "UnexpectedRowsExpectation",
            severity="warning",
            description="at most a tenth of the orders is of unknown users or items",
            unexpected_rows_query="SELECT * FROM {batch} WHERE unknown_users + unknown_items > 0.1 * orders",
        ),
    ],
)
def local_buyers(orders: DataFrame, users: DataFrame, items: DataFrame) -> DataFrame:
    """How many users bought an item from where they lived, by hour; user and item as they were when it was ordered."""
    known = as_of(orders, users, on="user_name", at="ordered_at", into="user")
    known = as_of(known, items, on="item_name", at="ordered_at", into="item")
    local = F.col("user.address") == F.col("item.origin")
    return known.groupBy(F.date_trunc("hour", "ordered_at").alias("hour")).agg(
        F.count_distinct(F.when(local, F.col("user_name"))).alias("buyers"),
        F.count_if(local).alias("local_orders"),
        F.count("*").alias("orders"),
        F.count_if(F.col("user").isNull()).alias("unknown_users"),
        F.count_if(F.col("item").isNull()).alias("unknown_items"),
    )
