"""Rows that are announced, on a real broker by a real stream: each new key once, whatever is killed, settled or replayed."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import kafka, lake, model, notifier, notify, query, settle
from tidemark.model import Announce, Catalog, Live, Topic, view
from tidemark.settings import Settings

TODAY = datetime.now(UTC).date()
LATE = datetime.combine(TODAY, datetime.min.time(), UTC) - timedelta(minutes=30)
"""Half an hour before midnight: of a day that is over, and live for as long as nothing later comes."""


def declared(topic: str) -> Catalog:
    """Changes of orders, announced; the first of each calls everybody. Beside it an answer whose function raises."""
    orders = Topic(
        topic,
        key="order_id",
        partitions=2,
        schema="event_id STRING NOT NULL, order_id STRING NOT NULL, version INT NOT NULL, note STRING, at TIMESTAMP NOT NULL",
        id="event_id",
        event_time="at",
    )

    @view(
        reads={"orders": orders},
        key=("order_id", "version", "at"),
        time="at",
        live=Live("1 second", "2 hours"),
        announce=Announce("{order_id} {version}", content="{note}", mention=("all",), mention_if="is_new"),
    )
    def changes(orders: DataFrame) -> DataFrame:
        return orders.select("order_id", "version", "at", "note", (F.col("version") == 1).alias("is_new"))

    @view(reads={"orders": orders}, key=("order_id", "at"), time="at", live=Live("1 second", "2 hours"))
    def broken(orders: DataFrame) -> DataFrame:
        raise ValueError("a mistake")

    object.__setattr__(changes, "name", f"changes_of_{topic}")
    return model.catalog([type("shop", (), {"orders": orders, "changes": changes, "broken": broken})])


class Shop:
    """One home, its topic, and what its view has announced."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self.settings, self.topic, self.catalog, self.sent = settings, topic, declared(topic), 0
        self.view = self.catalog.views[f"changes_of_{topic}"]
        kafka.apply(settings, [*self.catalog.topics.values(), *notify.TOPICS])

    def send(self, *changes: tuple[str, int, datetime], note: str = "", repeats: int = 1) -> None:
        events = [
            {"event_id": f"{o}-{v}", "order_id": o, "version": v, "note": note, "at": at.isoformat()} for o, v, at in changes
        ]
        assert kafka.produce(self.settings, self.catalog.topics[self.topic], events * repeats).complete
        self.sent += len(events) * repeats

    def rows(self) -> list[str]:
        """What readers see: `order version`."""
        if not lake.table(self.settings, self.view).exists:
            return []
        found = query.query(self.settings, self.catalog, f"SELECT order_id || ' ' || version FROM {self.view.name}")
        return sorted(row[0] for row in found.rows)

    def read(self) -> bool:
        return sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == self.sent

    def announced(self) -> list[dict[str, Any]]:
        """Every message of this shop that the topic holds, repeats included."""
        own = f"{self.view.name}-".encode()  # other tests share the topic, and not all they send is a message
        held = [r.value or b"" for r in kafka.consume(self.settings, notify.NOTIFY.name, "earliest")]
        return [m for m in (json.loads(value) for value in held if own in value) if m["id"].startswith(own.decode())]

    def titles(self) -> dict[str, int]:
        return dict(Counter(m["title"] for m in self.announced()))

    def version(self) -> int:
        return lake.table(self.settings, self.view).delta().version()


@pytest.fixture(scope="module")
def shop(house: Callable[..., Settings], broker: Settings) -> Iterator[Callable[..., Shop]]:
    """A shop by the name of its topic, whose robot is DingTalk's; no other test's notifier says what it announced."""

    def build(topic: str, **changes: Any) -> Shop:
        return Shop(house(**{"notify_to": "dingtalk"} | changes), topic)

    yield build
    kafka.seek(broker, notifier.GROUP, notify.NOTIFY.name, "latest")


def refreshed(stream: Any, times: int) -> bool:
    """Whether the view was computed so many times, since the stream began."""
    return stream.said.count("refreshed") >= times


def test_new_row_is_announced_once_beside_an_answer_that_fails(shop: Callable[..., Shop], run: Any) -> None:
    one = shop("announced_once")
    stream = run(one.settings, {"topic": one.topic})
    now = datetime.now(UTC)
    one.send(("o1", 1, now), note="a lamp", repeats=3)
    stream.until(lambda: one.rows() == ["o1 1"])
    (message,) = one.announced()
    assert {k: v for k, v in message.items() if k != "id"} == {
        "platform": "dingtalk",
        "kind": "text",
        "title": "o1 1",
        "content": "a lamp",
        "picture": None,
        "link": None,
        "mention": ["all"],
    }

    # A change of status calls nobody; a late one is new too; what is there already is not said again.
    one.send(("o1", 2, now + timedelta(seconds=1)), ("o0", 1, now - timedelta(minutes=50)))
    stream.until(lambda: one.rows() == ["o0 1", "o1 1", "o1 2"])
    assert one.titles() == {"o0 1": 1, "o1 1": 1, "o1 2": 1}
    assert {m["title"]: m["mention"] for m in one.announced()} == {"o0 1": ["all"], "o1 1": ["all"], "o1 2": []}
    assert "set aside; the others go on" in stream.said and "a mistake" in stream.said
    stream.drains()
    batches = {row["seq"] for row in lake.ledger_rows(one.settings, "main")}
    assert stream.said.count("refreshed") <= len(batches)  # once for a batch: not for its time, and then for its number

    # Started again it computes its rows again, and says nothing.
    stream = run(one.settings, {"topic": one.topic})
    stream.until(lambda: refreshed(stream, 1))
    one.send(("o2", 1, now + timedelta(seconds=2)))
    stream.until(lambda: "o2 1" in one.rows())
    assert one.titles() == {"o0 1": 1, "o1 1": 1, "o1 2": 1, "o2 1": 1}
    stream.drains()


@pytest.mark.long
def test_what_happened_while_the_stream_was_away_for_longer_than_a_view_looks_back_is_there_and_announced(
    shop: Callable[..., Shop], run: Any
) -> None:
    one = shop("announced_after_hours")
    now = datetime.now(UTC)
    one.send(("o1", 1, now - timedelta(hours=9)))
    stream = run(one.settings, {"topic": one.topic})
    stream.until(lambda: one.rows() == ["o1 1"])
    stream.drains()
    one.send(*((f"o{n}", 1, now - timedelta(hours=9 - n)) for n in range(2, 10)))
    stream = run(one.settings, {"topic": one.topic})
    stream.until(lambda: "o9 1" in one.rows())
    assert one.rows() == [f"o{n} 1" for n in range(1, 10)]
    assert one.titles() == {f"o{n} 1": 1 for n in range(1, 10)}
    stream.drains()


@pytest.mark.parametrize("moment", [pytest.param("announced", marks=pytest.mark.long), "announced:2"])
def test_killed_between_saying_and_committing_it_says_the_same_again(shop: Callable[..., Shop], run: Any, moment: str) -> None:
    nth = int(moment.partition(":")[2] or 1)
    one = shop(f"announced_killed_{nth}")
    stream = run(one.settings, {"topic": one.topic}, failpoint=moment)
    now = datetime.now(UTC)
    orders = [(f"o{n}", 1, now + timedelta(seconds=n)) for n in range(nth)]
    for order in orders[:-1]:
        one.send(order)
        stream.until(lambda: len(one.rows()) == 1)
    one.send(orders[-1])
    stream.dies()
    assert (len(one.rows()), len(one.announced())) == (nth - 1, nth)

    stream = run(one.settings, {"topic": one.topic})
    stream.until(lambda: len(one.rows()) == nth)
    stream.drains()
    last = f"{orders[-1][0]} 1"
    assert one.titles() == {f"{o} 1": 1 for o, _, _ in orders} | {last: 2}
    assert len({m["id"] for m in one.announced()}) == nth


@pytest.mark.long
def test_settling_publishing_rolling_back_and_replaying_say_nothing(
    shop: Callable[..., Shop], run: Any, spark: SparkSession
) -> None:
    #   [yesterday ······ o1 o2 ]   stream time stays here, so that yesterday is within `back`
    one, yesterday = shop("announced_settled"), TODAY - timedelta(days=1)
    stream = run(one.settings, {"topic": one.topic})
    one.send(("o1", 1, LATE), ("o2", 1, LATE + timedelta(seconds=1)))
    stream.until(lambda: one.rows() == ["o1 1", "o2 1"])
    told = {"o1 1": 1, "o2 1": 1}
    assert one.titles() == told

    def settled(days: list[date]) -> lake.Run:
        found = settle.settle(one.settings, one.catalog, days, "the night", only=[one.view.name])
        settle.publish(one.settings, one.catalog, found.id)
        return found

    settled([yesterday])
    assert one.rows() == ["o1 1", "o2 1"]

    # What comes late for the settled day is live nowhere, hence not said; nor is it when the day is settled again.
    one.send(("o3", 1, LATE + timedelta(seconds=2)))
    seen = stream.said.count("refreshed")
    stream.until(lambda: one.read() and refreshed(stream, seen + 1))
    assert (one.rows(), one.titles()) == (["o1 1", "o2 1"], told)
    again = settled([yesterday])
    assert one.rows() == ["o1 1", "o2 1", "o3 1"]
    settle.rollback(one.settings, one.catalog, again.id, "to see")
    replayed = settle.replay(one.settings, one.catalog, "from zero", only=[one.view.name])
    settle.publish(one.settings, one.catalog, replayed.id)
    assert one.rows() == ["o1 1", "o2 1", "o3 1"]

    # The stream goes on over all of it: a new key is said, and no other.
    midnight = datetime.combine(TODAY, datetime.min.time(), UTC)
    one.send(("o4", 1, midnight))
    stream.until(lambda: "o4 1" in one.rows())
    assert one.titles() == told | {"o4 1": 1}
    stream.drains()


@pytest.mark.long
def test_rows_stand_though_nothing_takes_their_announcement(shop: Callable[..., Shop], run: Any) -> None:
    # Kafka refuses a message as long as that, and a file lies where the folder of unsent messages would be.
    one = shop("announced_nowhere")
    blocked = one.settings.state / "notify"
    one.settings.state.mkdir(parents=True)
    blocked.write_text("no folder")
    stream = run(one.settings, {"topic": one.topic})
    now = datetime.now(UTC)
    one.send(("o1", 1, now), note="long " * 100_000)
    stream.until(lambda: one.rows() == ["o1 1"])
    assert "could not be announced" in stream.said and one.announced() == []

    # It is not forgotten: it goes with what is announced next, here into files.
    blocked.unlink()
    one.send(("o2", 1, now + timedelta(seconds=1)))
    stream.until(lambda: one.rows() == ["o1 1", "o2 1"])
    kept = [json.loads(p.read_text())["title"] for p in notify.unsent(one.settings).glob("*.json")]
    assert "o1 1" in kept
    assert {*kept, *one.titles()} == {"o1 1", "o2 1"}
    stream.drains()


@pytest.mark.long
def test_nothing_is_said_where_nobody_is_to_be_told(shop: Callable[..., Shop], run: Any) -> None:
    one = shop("announced_to_nobody", notify_to="")
    stream = run(one.settings, {"topic": one.topic})
    one.send(("o1", 1, datetime.now(UTC)))
    stream.until(lambda: one.rows() == ["o1 1"])
    stream.drains()
    assert one.announced() == []
