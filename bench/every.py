"""Every pipeline at once: does each stream keep up, how soon are a rollup's row readable and an alarm told, what does it cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import structlog

from bench.live import latencies, rollup_rows
from bench.measure import Figure, Tree
from bench.world import Probes, World, until
from tidemark import kafka, lake, notify
from tidemark.pipelines import CATALOG
from tidemark.pipelines.alarms import LIMIT, TRANSACTIONS
from tidemark.pipelines.traffic import PAGE_VIEWS

log = structlog.get_logger()


def measure(world: World, rate: float, seconds: float, warmup: float) -> list[Figure]:
    """Traffic on every topic that has a sample, `rate` together and half of it page views, measured for `seconds`.

    Page views, what is left of `main` and the alarms are a stream each: a batch is planned for every topic that it has.
    """
    world.settings = world.settings.model_copy(update={"triggers": f"{world.settings.triggers}, others=10 seconds"})
    mine = {PAGE_VIEWS.name: "main"} | {topic.name: topic.stream for topic in CATALOG.topics.values() if topic.stream != "main"}
    topics: dict[str, list[str]] = {}
    for topic in CATALOG.topics:
        topics.setdefault(mine.get(topic, "others"), []).append(topic)
    trees = {stream: world.stream(stream, only) for stream, only in topics.items()}
    world.traffic(rate, 24 * 3600, every=True)
    time.sleep(warmup)
    start, before = time.time(), {stream: tree.cpu() for stream, tree in trees.items()}
    with Alarming(world) as probes:
        time.sleep(seconds)
    end = time.time()
    found: list[Figure] = []
    for stream, tree in trees.items():
        found += cost(world, stream, topics[stream], tree, start, end, tree.cpu() - before[stream])
    time.sleep(15)  # so that the last ones are told
    world.stop_producers()
    with suppress(TimeoutError):  # then they are missing, and the figures say so
        until(lambda: world.unread("main", topics["main"]) == 0, 300)
    db = rollup_rows(world, start, end)
    return [*found, *probes.told(), *latencies(db, "rollup page_panes, all pipelines beside", "seq", "< 6")]


class Alarming(Probes):
    """Transactions that are alarms."""

    topic = TRANSACTIONS

    def event(self, name: str, at: datetime) -> dict[str, Any]:
        return {"transaction_id": name, "card": name, "amount": LIMIT + 1, "happened_at": at.isoformat()}

    def told(self) -> Iterator[Figure]:
        """Seconds from the event to Kafka's timestamp of its message in the topic `notify`."""
        came: dict[str, float] = {}
        for record in kafka.consume(self.world.settings, notify.NOTIFY.name, "earliest"):
            for one in (record.value or b"").decode().split():
                if one in self.happened:
                    came.setdefault(one, record.timestamp.timestamp())
        late = sorted(came[one] - at for one, at in self.happened.items() if one in came)
        says = f"{len(self.happened)} transactions beyond the limit, one each second"
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            value = late[min(len(late) - 1, int(share * len(late)))] if late else None
            yield Figure(f"alarm told, {name}", value, "s", says, "< 6" if name == "p99" else None)
        yield Figure("alarms not told", len(self.happened) - len(late), "alarms", says, "<= 0")


def cost(
    world: World, stream: str, topics: Sequence[str], tree: Tree, start: float, end: float, spent: float
) -> Iterator[Figure]:
    rows = [r for r in lake.ledger_rows(world.settings, stream) if start <= r["finished_at"].timestamp() < end]
    lengths = sorted({r["seq"]: (r["finished_at"] - r["started_at"]).total_seconds() for r in rows}.values())
    events = sum(r["records"] for r in rows)
    rate = f"at {events / (end - start):,.0f} events/s on {len({r['topic'] for r in rows})} topics"
    yield Figure(f"every: micro-batch of {stream}, median", statistics.median(lengths) if lengths else None, "s", rate)
    yield Figure(f"every: micro-batch of {stream}, p95", lengths[int(0.95 * len(lengths))] if lengths else None, "s", rate)
    yield Figure(f"every: cores that {stream} keeps busy", spent / (end - start), "cores", rate)
    yield Figure(f"every: CPU of {stream}", spent / events * 1000 if events else None, "CPU-s per 1,000 events", rate)
    yield Figure(f"every: greatest memory of {stream}, JVM and driver", tree.peak(), "GiB", "", "< 3")
    behind = world.unread(stream, topics)
    yield Figure(f"every: records that {stream} has not read at the end", behind, "records", rate)
