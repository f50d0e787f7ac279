"""`make soak`: steady traffic for an hour, the stream killed every five minutes, and what it holds on to as a slope."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench.drill import ANSWERS, RATE, Drill
from bench.measure import stamp
from bench.world import STREAM, World, until
from tidemark import lake, local
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import last_hour, page_panes

OUT = Path(__file__).parent / "out" / "soak.json"
CAUGHT_UP = 5.0
"""Seconds of traffic that may be unread where a stream has caught up; a running one has one or two."""


@dataclass(frozen=True)
class Sample:
    """What the stream holds on to at a moment, the broker's share left out. Sizes are MiB."""

    minute: float
    memory: float
    descriptors: int
    rollup_files: int
    view_files: int
    delta_logs: float
    checkpoint: float
    process_log: float


def soak(
    minutes: Annotated[float, typer.Option(min=2, help="How long.")] = 60,
    rate: Annotated[float, typer.Option(min=RATE + 1, help="Page views a second.")] = 1000,
    kill: Annotated[float, typer.Option(min=1, help="Minutes from one kill of the stream to the next.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Of moments and events; drawn and told unless said.")] = None,
    out: Annotated[Path, typer.Option(help="Where the samples go.")] = OUT,
) -> None:
    """Kill the stream again and again under steady traffic: nothing is lost or doubled, and nothing grows without end."""
    seed = int(time.time()) if seed is None else seed
    console, taken = Console(width=170), list[Sample]()
    console.print(f"seed {seed}, {rate:g} events/s for {minutes:g} minutes, a kill every {kill:g}", highlight=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    caught: list[tuple[float, float]] = []
    run = stamp("make soak", seed)
    with World(seed) as world:
        one = Drill(world, Random(seed), world.yesterday(24))
        one.starts_stream()
        until(lambda: world.unread() == 0, 300)
        one.settles()  # yesterday's events came too late for the live views
        producer = world.traffic(rate - RATE, minutes * 60 + 3600)
        began = time.monotonic()
        with one.witness():
            killed = 0.0
            while (minute := (time.monotonic() - began) / 60) < minutes:
                if minute - killed >= kill and minutes - minute > 1:
                    at, killed = one.kills(STREAM), minute
                    until(lambda: world.unread() < CAUGHT_UP * rate, 300)
                    caught.append((round(minute, 2), round(time.time() - at, 1)))
                    console.print(f"minute {minute:.0f}: killed, and caught up {caught[-1][1]} s later", highlight=False)
                time.sleep(15)
                if found := sample(world, (time.monotonic() - began) / 60):
                    taken.append(found)
        world.stop(producer.name)
        console.print("the traffic has ended; waiting until everything is read", highlight=False)
        seen = run | {"rate": rate, "caught_up": caught, "samples": [asdict(s) for s in taken]}
        out.write_text(json.dumps(seen, indent=1) + "\n")
        outcome = one.held("soak", 0, list(ANSWERS))
    out.write_text(json.dumps(seen | {"outcome": asdict(outcome)}, indent=1) + "\n")
    console.print(shown(taken, [minute for minute, _ in caught]))
    if caught:
        late = [seconds for _, seconds in caught]
        console.print(
            f"{len(late)} kills, caught up after {statistics.median(late)} s, the slowest {max(late)} s", highlight=False
        )
    counts = ("records", "lost", "altered", "doubled", "unexplained", "differing")
    said = ", ".join(f"{name} {getattr(outcome, name)}" for name in counts)
    console.print(f"{said}: {'held' if outcome.held else 'NOT HELD'}", highlight=False)
    raise typer.Exit(0 if outcome.held else 1)


def sample(world: World, minute: float) -> Sample | None:
    """None while the stream is between a kill and its start."""
    process = local.running(world.settings, STREAM)
    if process is None:
        return None
    try:
        tree = local.orphans(process)
        memory, descriptors = sum(p.memory_info().rss for p in tree), sum(p.num_fds() for p in tree)
    except psutil.NoSuchProcess:
        return None
    tables = [lake.table(world.settings, CATALOG[name]) for name in CATALOG.names]
    return Sample(
        round(minute, 2),
        mib(memory),
        descriptors,
        len(lake.table(world.settings, page_panes).files()),
        len(lake.table(world.settings, last_hour).files()),
        sum(size(t.path / "_delta_log") for t in tables),
        size(lake.Checkpoint.of(world.settings, "main").path),
        mib(process.log.stat().st_size),
    )


def size(folder: Path) -> float:
    """A file may go while somebody looks."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return mib(total)


def mib(size: float) -> float:
    return round(size / 2**20, 2)


def shown(taken: list[Sample], kills: list[float]) -> Table:
    """The first sample, the last, the greatest, and the slope of what was greatest between two kills, over the second half."""
    table = Table("what", "first", "last", "greatest", "slope per hour")
    for name in list(asdict(taken[0]))[1:]:
        values = [getattr(s, name) for s in taken]
        slope = growth([(s.minute, getattr(s, name)) for s in taken], kills)
        table.add_row(name, f"{values[0]:,}", f"{values[-1]:,}", f"{max(values):,}", "" if slope is None else f"{slope:+,.1f}")
    return table


def growth(samples: list[tuple[float, float]], kills: list[float]) -> float | None:
    """What is held on to more after an hour: the slope, an hour, of the greatest value between two kills, over the second half of
    them; of the samples where nobody was killed. None where there is too little. Samples and kills are by minute.

    A process that is killed begins anew, so that what one has gained since its start is not what the next one adds to.
    """
    lives = [[s] for s in samples]
    if kills:
        lives = [[s for s in samples if a <= s[0] < b] for a, b in pairwise([0.0, *kills, math.inf])]
    peaks = [max(life, key=lambda s: s[1]) for life in lives if life]
    late = peaks[len(peaks) // 2 :]
    if len(late) < 3:
        return None
    return statistics.linear_regression([minute / 60 for minute, _ in late], [value for _, value in late]).slope


if __name__ == "__main__":
    typer.run(soak)
