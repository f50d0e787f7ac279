"""Events per CPU-second of the platform and of its peers, each at its own highest sustained rate."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

from bench.live import VIEWS, newest_mark
from bench.measure import Figure, Tree, program
from bench.peers import engines
from bench.world import World, until
from tidemark import lake
from tidemark.pipelines.traffic import PAGE_VIEWS

log = structlog.get_logger()

BEHIND = 3 * 5
"""Seconds of traffic that may be unread when a rate counts as sustained: three triggers."""
OLD = 30
"""Seconds that the newest mark of the last hour may be behind the clock then."""
OFFERED = 0.95
"""The share of a rate that a producer must have sent: one that falls behind offers less than it says."""


@dataclass(frozen=True)
class Held:
    """A rate: what was sent and what was read at it, for how much, and whether stream and refresh kept up."""

    rate: float
    sent: int
    events: int
    cpu: float
    seconds: float
    behind: float
    age: float

    @property
    def sustained(self) -> bool:
        return self.behind <= BEHIND and self.age <= OLD and self.sent >= OFFERED * self.rate * self.seconds

    @property
    def told(self) -> str:
        late = f"{self.behind:.0f} s unread ({BEHIND} at most), the newest mark {self.age:.0f} s old ({OLD})"
        return f"{self.rate:,.0f} {late}, {self.sent / self.seconds:,.0f} sent a second"

    @property
    def an_event(self) -> float:
        return self.events / self.cpu


def measure(
    world: World, rates: Sequence[float], step: float, hold: float, batch: int, batches: int, rounds: int, others: Sequence[str]
) -> list[Figure]:
    """Ramp the platform's rate until it falls behind; then hold the highest, and each peer's backlog, in turns. A rate that a
    step sustains and a hold does not is given up for the next lower one.

    The stream runs beside the peers, with nothing to read; `others` are names of `engines.ENGINES`.
    """
    world.backlog((batches + 2) * batch)
    tree = world.stream()
    world.wait_read()
    highest, ends, ramp = 0.0, f"up to {max(rates):,.0f} was offered", list[Held]()
    for rate in rates:
        ramp.append(tried := offer(world, tree, rate, step))
        if not tried.sustained:
            ends = f"at {tried.told}"
            break
        highest = rate
    if not highest:
        return [
            Figure("plain: events per CPU-second, times", None, "", f"not even {rates[0]:,.0f} events/s were sustained", ">= 10")
        ]
    ours: list[Held] = []
    theirs: list[dict[str, float]] = []
    engine: dict[str, list[dict[str, float]]] = {name: [] for name in others}
    for turn in range(rounds):
        ours.append(offer(world, tree, highest, hold))
        while not ours[-1].sustained and (lower := [rate for rate in rates if rate < highest]):
            ends = f"held for {hold:.0f} s, at {ours[-1].told}"
            highest = max(lower)
            ours = [offer(world, tree, highest, hold)]
        home = world.settings.model_copy(update={"home": world.home / f"plain-{turn}", "lake": None})
        start = {PAGE_VIEWS.name: {str(p): max(0, end - share) for p, end, share in shares(world, (batches + 2) * batch)}}
        theirs += program(
            "bench.peers.plain_spark", world.environment(home), start=json.dumps(start), batch=batch, batches=batches
        )
        log.info("plain", batches=theirs[-batches:])
        for name, runs in engine.items():
            try:
                runs.append(engines.run(world, name, warm=hold / 2, hold=hold))
            except (RuntimeError, TimeoutError) as error:  # a peer that gives up takes nobody else's figures with it
                log.warning("a peer gave no figure", peer=name, because=str(error))
            else:
                log.info(name, **runs[-1])
    held = all(one.sustained for one in ours)
    mine, peer = statistics.median(o.an_event for o in ours), statistics.median(t["events"] / t["cpu"] for t in theirs)
    speed = statistics.median(t["events"] / t["wall"] for t in theirs)
    at = f"{highest:,.0f} events/s of live traffic" + ("" if held else ", not sustained when held")
    return [
        Figure("plain: events per CPU-second of tidemark, refresh counted in", mine, "events per CPU-s", at),
        Figure("plain: events per CPU-second of plain Spark", peer, "events per CPU-s", f"{speed:,.0f} events/s from a backlog"),
        Figure("plain: highest sustained rate, tidemark", highest, "events/s", ends),
        *(
            Figure("plain: cores that tidemark keeps busy", t.cpu / t.seconds, "cores", f"{t.rate:,.0f}/s", at=t.rate)
            for t in ramp
        ),
        Figure("plain: events per CPU-second, times", mine / peer if held else None, "", "plain Spark", ">= 10"),
        Figure("moonshot: events per CPU-second, times", mine / peer if held else None, "", "plain Spark", ">= 100"),
        *(figure for name, runs in engine.items() for figure in beside(name, runs, mine if held else None)),
    ]


def beside(name: str, runs: Sequence[dict[str, float]], mine: float | None) -> Iterator[Figure]:
    """An engine's own events per CPU-second, and how many times that the platform's are; none where it gave no figure."""
    if not runs:
        yield Figure(f"plain: events per CPU-second of {name}", None, "events per CPU-s", "it did not come to two commits")
        yield Figure(f"moonshot: events per CPU-second, times {name}", None, "", "it did not come to two commits", "> 1")
        return
    its = statistics.median(run["events"] / run["cpu"] for run in runs)
    speed = statistics.median(run["events"] / run["wall"] for run in runs)
    yield Figure(f"plain: events per CPU-second of {name}", its, "events per CPU-s", f"{speed:,.0f} events/s from a backlog")
    yield Figure(
        f"moonshot: events per CPU-second, times {name}", mine and mine / its, "", f"{name}, which writes nowhere", "> 1"
    )


def shares(world: World, events: int) -> list[tuple[int, int, int]]:
    """Each partition with its end and its part of the newest `events`, with a tenth to spare."""
    ends = world.ends()
    return [(p, end, int(1.1 * events * end / sum(ends.values()))) for p, end in ends.items()]


def offer(world: World, tree: Tree, rate: float, seconds: float) -> Held:
    """Traffic at a rate for so long; measured from its first trigger on, then waited for."""
    producer = world.traffic(rate, seconds + 10)
    time.sleep(10)
    start, before, sent = time.time(), tree.cpu(), sum(world.ends().values())
    time.sleep(seconds)
    end, spent, sent = time.time(), tree.cpu() - before, sum(world.ends().values()) - sent
    behind, age = world.unread() / rate, time.time() - min(newest_mark(world, view) for view in VIEWS)
    rows = [r for r in lake.ledger_rows(world.settings, "main") if start <= r["finished_at"].timestamp() < end]
    held = Held(rate, sent, sum(r["records"] for r in rows), spent, end - start, round(behind, 1), round(age, 1))
    log.info("offered", **vars(held), sustained=held.sustained)
    until(lambda: not producer.alive(), 120)
    world.wait_read()
    return held
