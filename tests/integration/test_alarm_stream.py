"""Alarms on a real broker: each is told once, over kills, restarts, repeats, late events and a replay."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaException
from pyspark.sql import SparkSession
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from tidemark import kafka, model, notifier, notify, query, settle
from tidemark.model import Catalog, Topic
from tidemark.pipelines import alarms
from tidemark.pipelines.alarms import NETWORK_EVENTS, TRANSACTIONS
from tidemark.pipelines.stocks import QUOTES
from tidemark.settings import Settings

NOON = datetime.combine(datetime.now(UTC).date(), datetime.min.time(), UTC) - timedelta(hours=12)
"""Of yesterday, which can be settled."""
ALARMS = {"h1: 21 errors within a minute", "Card c1: 10,000.01 at once", "Card c2: 5 transactions within a minute"}
ALARMS |= {"ABC: +12.0 % within a minute"}


def declared() -> Catalog:
    return model.catalog([alarms])


CATALOG = declared()


def said(seconds: float, day: datetime = NOON) -> str:
    return (day + timedelta(seconds=seconds)).isoformat()


def error(one: str, seconds: float, host: str = "h1") -> dict[str, Any]:
    return {"event_id": one, "host": host, "level": "error", "message": None, "happened_at": said(seconds)}


def paid(one: str, seconds: float, card: str = "c2", amount: float = 5) -> dict[str, Any]:
    return {"transaction_id": one, "card": card, "amount": amount, "happened_at": said(seconds)}


def quoted(one: str, seconds: float, price: float) -> dict[str, Any]:
    own = {"event_id": one, "quote_id": one, "revision": 0, "symbol": "ABC", "kind": "quote", "split": None}
    return own | {"price": price, "quoted_at": said(seconds)}


FIRST: tuple[tuple[Topic, list[dict[str, Any]]], ...] = (
    (NETWORK_EVENTS, [error(f"e{n}", n) for n in range(21)]),
    (TRANSACTIONS, [paid("t0", 1, "c1", 10_000.01), *(paid(f"t{n}", 10 * n) for n in range(1, 6))]),
    (QUOTES, [quoted("q0", 1, 100), quoted("q1", 20, 112)]),
)


@pytest.fixture
def settings(house: Callable[..., Settings]) -> Iterator[Settings]:
    settings = house(notify_to="dingtalk", triggers="")
    kafka.apply(settings, [*CATALOG.topics.values(), *notify.TOPICS])
    yield settings
    again = Retrying(retry=retry_if_exception_type(KafkaException), stop=stop_after_delay(30), wait=wait_fixed(0.5))
    again(kafka.seek, settings, notifier.GROUP, notify.NOTIFY.name, "latest")  # or the robots of another test would say them


def send(settings: Settings, *sent: tuple[Topic, list[dict[str, Any]]]) -> None:
    for topic, events in sent:
        assert kafka.produce(settings, topic, events).complete


def refreshed(stream: Any, until: str) -> bool:
    """Whether every view has been looked at with the event of that time."""
    told = re.findall(r"(?:refreshed|nothing new) .*until='([^']+)' view=(\w+)", stream.said)
    reached = {view: at for at, view in told}
    return all(v in reached and datetime.fromisoformat(reached[v]) >= datetime.fromisoformat(until) for v in CATALOG.views)


class Told:
    """What was put into the topic `notify` since."""

    def __init__(self, settings: Settings) -> None:
        self.settings, (self.start,) = settings, kafka.offsets(settings, ["notify"], "latest")["notify"].values()

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(r.value or b"") for r in kafka.consume(self.settings, "notify", self.start)]

    def titles(self) -> list[str]:
        """Each message's title, once for each id: a robot says an id once."""
        return sorted({m["id"]: m["title"] for m in self.messages()}.values())


@pytest.mark.long
def test_each_alarm_is_told_once_over_kills_restarts_late_events_and_a_replay(
    settings: Settings, run: Any, spark: SparkSession
) -> None:
    told = Told(settings)

    # Killed when the first is told and its row is not yet there: it is told again, under the same id.
    send(settings, *FIRST)
    run(settings, stream="alarms", failpoint="announced").dies(300)
    assert len(told.titles()) == 1
    stream = run(settings, stream="alarms")
    stream.until(lambda: len(told.titles()) == len(ALARMS), 300)
    assert told.titles() == sorted(ALARMS)
    assert sorted(Counter(m["id"] for m in told.messages()).values()) == [1, 1, 1, 2]

    # Repeats, and late events that add to what was told or move what completed it, are no news.
    stream.until(lambda: refreshed(stream, said(50)))
    late = (NETWORK_EVENTS, [error("late", 30)]), (TRANSACTIONS, [paid("late", 25)]), (QUOTES, [quoted("late", 15, 105)])
    send(settings, *FIRST, *late, (NETWORK_EVENTS, [error("next", 61)]), (TRANSACTIONS, [paid("next", 61, "c3")]))
    stream.until(lambda: refreshed(stream, said(61)))
    assert len(told.messages()) == len(ALARMS) + 1
    stream.drains()

    # A restart computes the last quarter of an hour again.
    send(settings, (NETWORK_EVENTS, [error("again", 62)]))
    stream = run(settings, stream="alarms")
    stream.until(lambda: refreshed(stream, said(62)))
    stream.drains()
    assert len(told.messages()) == len(ALARMS) + 1

    # A replay and its publication tell nothing, nor does the stream that goes on above them.
    replayed = settle.replay(settings, CATALOG, "to be sure")
    settle.publish(settings, CATALOG, replayed.id)
    send(settings, (NETWORK_EVENTS, [error(f"n{n}", 63, "late-host") for n in range(21)]))
    now = datetime.now(UTC)
    newest = said(0, max(now - timedelta(seconds=70), now.replace(hour=0, minute=0, second=0, microsecond=0)))
    send(settings, (NETWORK_EVENTS, [error(f"t{n}", 0, "h9") | {"happened_at": newest} for n in range(21)]))
    stream = run(settings, stream="alarms")
    stream.until(lambda: refreshed(stream, newest))
    stream.drains()
    assert told.titles() == sorted([*ALARMS, "h9: 21 errors within a minute"])
    assert len(told.messages()) == len(ALARMS) + 2

    # What was told is what stands there.
    rows = query.query(settings, CATALOG, "SELECT host, errors, settled FROM host_errors ORDER BY minute").rows
    assert rows == [("h1", 22, True), ("h9", 21, False)]
    assert query.query(settings, CATALOG, "SELECT card, transactions FROM card_bursts").rows == [("c2", 6)]
