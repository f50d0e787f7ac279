"""A replay of a recorded day beside a live stream: how fast it goes, and what it costs those who read what is live."""

from __future__ import annotations

import time

from bench import live
from bench.measure import Figure
from bench.world import World, until
from tidemark import lake


def measure(world: World, events: int, rate: float, calm: float) -> list[Figure]:
    """`events` of yesterday, recorded at 1,000 a second in thought; live traffic at `rate`, `calm` seconds of it alone first."""
    world.yesterday(events)
    world.stream()
    world.wait_read()
    producer = world.traffic(rate, calm + 60 + events / 1000)
    time.sleep(30)
    with live.Viewing(world) as probes:
        quiet = time.time()
        time.sleep(calm)
        began = time.time()
        world.tidemark("replay", "--run", "bench", "--reason", "bench")
        ended = time.time()
    until(lambda: all(live.newest_mark(world, view) > ended for view in live.VIEWS), 600)  # it moves with traffic only
    world.stop(producer.name)
    until(lambda: not producer.alive(), 60)
    alone = {f.figure: f for f in live.readable(world, quiet, began, probes)}
    beside = {f.figure: f for f in live.readable(world, began, ended, probes)}
    run = lake.run_of(world.settings, "bench")
    different = sum(sum(t.get("compare", {}).get(k, 0) for k in ("changed", "extra")) for t in run.tables.values())
    seconds, size = ended - began, f"{events:,} events of one day, live traffic at {rate:,.0f}/s"
    found = [
        Figure("replay: times real time", events / 1000 / seconds, "", f"{size}; {seconds:.0f} s, start and checks in", ">= 10"),
        Figure("replay: rows changed or extra beside what is live", different, "rows", size, "<= 0"),
    ]
    for name in [n for n in alone if n.endswith("p99")]:
        a, b = alone[name].value, beside[name].value
        what = name.removeprefix("live: ")
        found.append(Figure(f"replay: {what}, beside it", b, "s", f"{a:.1f} s without" if a else ""))
        found.append(Figure(f"replay: {what}, times that without", b / a if a and b else None, "", "", "<= 2"))
    return found
