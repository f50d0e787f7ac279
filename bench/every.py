"""Every pipeline at once: does each stream keep up, how soon is a rollup's row readable, and what does it cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import structlog

from bench.live import latencies, rollup_rows
from bench.measure import Figure, Tree
from bench.world import World
from tidemark import lake
from tidemark.pipelines import CATALOG

log = structlog.get_logger()


def measure(world: World, rate: float, seconds: float, warmup: float) -> list[Figure]:
    """Traffic on every topic that has a sample, `rate` together and half of it page views, measured for `seconds`."""
    world.traffic(rate, 24 * 3600, every=True)
    trees = {stream: world.stream(stream) for stream in CATALOG.streams}
    time.sleep(warmup)
    start, before = time.time(), {stream: tree.cpu() for stream, tree in trees.items()}
    time.sleep(seconds)
    end = time.time()
    found: list[Figure] = []
    for stream, tree in trees.items():
        found += cost(world, stream, tree, start, end, tree.cpu() - before[stream])
    world.stop_producers()
    db = rollup_rows(world, start, end)
    return [*found, *latencies(db, "rollup page_panes, all pipelines beside", "seq", "< 6")]


def cost(world: World, stream: str, tree: Tree, start: float, end: float, spent: float) -> Iterator[Figure]:
    rows = [r for r in lake.ledger_rows(world.settings, stream) if start <= r["finished_at"].timestamp() < end]
    lengths = sorted({r["seq"]: (r["finished_at"] - r["started_at"]).total_seconds() for r in rows}.values())
    events = sum(r["records"] for r in rows)
    rate = f"at {events / (end - start):,.0f} events/s on {len({r['topic'] for r in rows})} topics"
    yield Figure(f"every: micro-batch of {stream}, median", statistics.median(lengths) if lengths else None, "s", rate)
    yield Figure(f"every: micro-batch of {stream}, p95", lengths[int(0.95 * len(lengths))] if lengths else None, "s", rate)
    yield Figure(f"every: cores that {stream} keeps busy", spent / (end - start), "cores", rate)
    yield Figure(f"every: CPU of {stream}", spent / events * 1000 if events else None, "CPU-s per 1,000 events", rate)
    yield Figure(f"every: greatest memory of {stream}, JVM and driver", tree.peak(), "GiB", "", "< 3")
    behind = world.unread(stream)
    yield Figure(f"every: records that {stream} has not read at the end", behind, "records", rate)
