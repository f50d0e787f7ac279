"""Local buyers and a table of who lives where, on a real broker: live, settled, late, and replayed, tombstones included."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import kafka, lake, model, query, settle
from tidemark.functions import day
from tidemark.kafka import Event
from tidemark.model import Catalog, Live, view
from tidemark.pipelines import local_buyers
from tidemark.settings import Settings

SECOND_DAY = datetime.now(UTC).date() - timedelta(days=1)
FIRST_DAY = SECOND_DAY - timedelta(days=1)


def declared() -> Catalog:
    """The shipped pipeline and a table of days; live views refresh every second, so that no test waits minutes."""

    @view(reads={"users": local_buyers.USERS}, key=("address", "day"), time="day", live=Live(every="1 second", back="2 hours"))
    def living(users: DataFrame, period: DataFrame) -> DataFrame:
        today = period.select(day("start").alias("day"))
        return users.groupBy("address").agg(F.count("*").alias("people")).crossJoin(today)

    quick = replace(local_buyers.local_buyers, refresh=Live("1 second", "2 days"))
    return model.catalog([type("pipeline", (), dict(vars(local_buyers)) | {"local_buyers": quick, "living": living})])


def first(hour: int, minute: int = 0) -> datetime:
    return datetime.combine(FIRST_DAY, time(hour, minute), UTC)


def second(hour: int, minute: int = 0) -> datetime:
    return datetime.combine(SECOND_DAY, time(hour, minute), UTC)


def user(name: str, address: str, at: datetime) -> dict[str, Any]:
    return {"user_name": name, "address": address, "changed_at": at.isoformat()}


def item(name: str, origin: str, at: datetime) -> dict[str, Any]:
    return {"item_name": name, "origin": origin, "changed_at": at.isoformat()}


def order(n: int, user_name: str, item_name: str, at: datetime) -> dict[str, Any]:
    return {"order_id": f"o{n}", "user_name": user_name, "item_name": item_name, "quantity": 1, "ordered_at": at.isoformat()}


BUYERS = "SELECT hour, buyers, local_orders, orders, unknown_users, unknown_items, settled FROM local_buyers ORDER BY hour"
LIVING = "SELECT day, address, people, settled FROM living ORDER BY day, address"


@pytest.mark.long
def test_tables_live_settled_late_and_replayed(house: Callable[..., Settings], run: Any, spark: SparkSession) -> None:
    settings, catalog = house(), declared()
    kafka.apply(settings, catalog.topics.values())

    def send(topic: str, *events: Any) -> None:
        assert kafka.produce(settings, catalog.topics[topic], events).complete

    def ask(sql: str) -> list[tuple[Any, ...]]:
        return query.query(settings, catalog, sql).rows

    def read(records: int) -> bool:
        return sum(r["records"] for r in lake.ledger_rows(settings, "main")) == records

    #   ann    [first day: Ulm ─────────────────────────)[second day, 12:00: nothing ──
    #   bob    [first day: Jena ────────────[second day, 11:00: Ulm ───────────────────
    #   orders       I 10:00 local             I 10:00 local     I 11:00 local    I 13:00 of nobody
    send("users", user("ann", "Ulm", first(8)), user("bob", "Jena", first(8)), user("bob", "Ulm", second(11)))
    send("users", Event(None, "ann", at=second(12)), {"user_name": "eve", "address": 7, "changed_at": first(8).isoformat()})
    send("items", item("lamp", "Ulm", first(8)))
    send(
        "orders",
        order(1, "ann", "lamp", first(10)),
        order(2, "bob", "lamp", first(10, 1)),
        order(3, "ann", "lamp", second(10)),
        order(4, "bob", "lamp", second(11)),
        order(5, "ann", "lamp", second(13)),
        order(6, "ann", "lamp", second(23, 59)),
    )

    def answer(settled: bool, bob: int = 0) -> list[tuple[Any, ...]]:
        return [
            (first(10), 1 + bob, 1 + bob, 2, 0, 0, settled),
            (second(10), 1, 1, 1, 0, 0, settled),
            (second(11), 1, 1, 1, 0, 0, settled),
            (second(13), 0, 0, 1, 1, 0, settled),
            (second(23), 0, 0, 1, 1, 0, settled),
        ]

    stream = run(settings)
    stream.until(lambda: lake.ledger(settings).exists and read(12), 300)
    stream.until(lambda: lake.table(settings, catalog["local_buyers"]).exists and ask(BUYERS) == answer(settled=False), 300)
    stream.until(lambda: ask(LIVING)[-1:] == [(SECOND_DAY, "Ulm", 1, False)], 300)  # bob; ann is gone
    assert ask("SELECT sum(records), sum(rejects), sum(tombstones) FROM ledger WHERE topic = 'users'") == [(5, 1, 1)]
    ended = "SELECT user_name, address, changed_at, reject, day FROM users WHERE kafka.value IS NULL"
    assert ask(ended) == [("ann", None, None, None, SECOND_DAY)]

    # Settled day by day or both at once: the same.
    one = settle.settle(settings, catalog, [FIRST_DAY, SECOND_DAY], "two days")
    assert {n: t["gate"] for n, t in one.tables.items()} == dict.fromkeys(one.tables, "passed")
    settle.publish(settings, catalog, one.id)
    lived = [(FIRST_DAY, "Jena", 1, True), (FIRST_DAY, "Ulm", 1, True), (SECOND_DAY, "Ulm", 1, True)]
    assert ask(BUYERS) == answer(settled=True) and ask(LIVING) == lived
    assert settle.stale(settings, catalog) == []
    assert {n: t["compare"]["unexplained"] for n, t in one.tables.items() if "compare" in t} == {"local_buyers": 0, "living": 0}

    # A change that comes late for the second day makes that day stale; one for the first day both, whose rows it reaches.
    send("users", user("zoe", "Kiel", second(9)))
    stream.until(lambda: read(13), 300)
    assert settle.stale(settings, catalog) == [SECOND_DAY]
    send("users", user("bob", "Ulm", first(9)))
    stream.until(lambda: read(14), 300)
    assert settle.stale(settings, catalog) == [FIRST_DAY, SECOND_DAY]
    assert ask(BUYERS) == answer(settled=True)  # settled is settled, until the next settling
    stream.drains()
    again = settle.settle(settings, catalog, [FIRST_DAY, SECOND_DAY], "late changes")
    settle.publish(settings, catalog, again.id)
    assert ask(BUYERS) == answer(settled=True, bob=1)
    # By then bob's last record in Kafka is the one that came late: a table keeps what compaction keeps.
    lived = [(FIRST_DAY, "Ulm", 2, True), (SECOND_DAY, "Kiel", 1, True), (SECOND_DAY, "Ulm", 1, True)]
    assert ask(LIVING) == lived and settle.stale(settings, catalog) == []

    # And a replay gives the same answer: orders from Kafka, tables from the log, which has what Kafka may have compacted.
    whole = settle.replay(settings, catalog, "all again")
    said = {name: whole.tables[name]["compare"] for name in ("local_buyers", "living")}
    assert {name: (s["missing"], s["extra"], s["changed"]) for name, s in said.items()} == dict.fromkeys(said, (0, 0, 0))
    settle.publish(settings, catalog, whole.id)
    assert ask(BUYERS) == answer(settled=True, bob=1) and ask(LIVING) == lived
