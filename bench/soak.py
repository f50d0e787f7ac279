"""`make soak`: steady traffic for an hour, the stream killed every five minutes of its first forty, and what it holds on to as a
slope."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import psutil
import typer
from deltalake import DeltaTable
from rich.console import Console
from rich.table import Table

from bench.drill import ANSWERS, RATE, Drill
from bench.measure import Figure, stamp
from bench.world import STREAM, World, until
from tidemark import lake, local
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import last_hour, page_panes

OUT = Path(__file__).parent / "out" / "soak.json"
CAUGHT_UP = 5.0
"""Seconds of traffic that may be unread where a stream has caught up; a running one has one or two."""
HISTORY = {f"delta.{what}Duration": "interval 10 minutes" for what in ("logRetention", "deletedFileRetention")}
"""What each table keeps, here: an hour's and three hours' end would not be seen within an hour."""
ALONE = 1 / 3
"""The share of the time, its last, in which nobody is killed: what a process leaks is gone with it, and is seen there alone."""
OF_A_LIFE = {"memory": (512, "MiB"), "descriptors": (60, "")}
"""What each may grow by in an hour of one life and be flat: 128 MiB and 15 in the quarter of an hour that is looked at. In the
second half of recorded lives of five minutes, when a heap has been touched, memory moved by 50 MiB up and down, by 152 once; what
leaks within a heap ends the stream. Descriptors go up and down by 20; one left by each batch or refresh would be 700 and more."""
FLAT = {
    "rollup_files": (60, ""),
    "view_files": (60, ""),
    "delta_logs": (15, "MiB"),
    "checkpoint": (0.1, "MiB"),
    "process_log": (2, "MiB"),
}
"""What each of these, which outlive the process, may grow by in an hour and be flat: twice what slopes without a leak differ by.
Files are merged at moments of their own."""


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
    run = stamp(command(minutes, rate, kill), seed)
    with World(seed) as world:
        one = Drill(world, Random(seed), world.yesterday(24))
        one.starts_stream()
        console.print("an hour of the past comes first, so that the last hour is as full in the first minute as in the last")
        world.past(rate, 3600)
        until(lambda: world.unread() < CAUGHT_UP * rate, 900)
        one.settles()  # yesterday's events came too late for the live views; a part of the hour may be yesterday's
        for declared in CATALOG.names:
            DeltaTable(lake.table(world.settings, CATALOG[declared]).path).alter.set_table_properties(HISTORY)
        producer = world.traffic(rate - RATE, minutes * 60 + 3600)
        began, held = time.monotonic(), sum(world.ends().values())
        with one.witness():
            killed = 0.0
            while (minute := (time.monotonic() - began) / 60) < minutes:
                if minute - killed >= kill and minute < minutes * (1 - ALONE):
                    at, killed = one.kills(STREAM), minute
                    until(lambda: world.unread() < CAUGHT_UP * rate, 300)
                    caught.append((round(minute, 2), round(time.time() - at, 1)))
                    console.print(f"minute {minute:.0f}: killed, and caught up {caught[-1][1]} s later", highlight=False)
                time.sleep(15)
                if found := sample(world, (time.monotonic() - began) / 60):
                    taken.append(found)
            sent = (sum(world.ends().values()) - held) / (time.monotonic() - began)
        world.stop(producer.name)
        console.print("the traffic has ended; waiting until everything is read", highlight=False)
        figures = [*figures_of(taken, caught), sent_of(sent, rate)]
        seen = run | {"rate": rate, "caught_up": caught, "samples": [asdict(s) for s in taken]}
        seen["figures"] = [figure.plain() for figure in figures]
        out.write_text(json.dumps(seen, indent=1) + "\n")
        outcome = one.held("soak", 0, list(ANSWERS))
    out.write_text(json.dumps(seen | {"outcome": asdict(outcome)}, indent=1) + "\n")
    console.print(shown(figures))
    counts = ("records", "lost", "altered", "doubled", "unexplained", "differing")
    said = ", ".join(f"{name} {getattr(outcome, name)}" for name in counts)
    console.print(f"{said}: {'held' if outcome.held else 'NOT HELD'}", highlight=False)
    raise typer.Exit(0 if outcome.held and all(figure.met for figure in figures) else 1)


def command(minutes: float, rate: float, kill: float) -> str:
    """What was run: `make soak`, or the options that differ from its own."""
    said = {"minutes": (minutes, 60), "rate": (rate, 1000), "kill": (kill, 5)}
    options = [f"--{name} {value:g}" for name, (value, usual) in said.items() if value != usual]
    return " ".join(["python -m bench.soak", *options]) if options else "make soak"


def figures_of(taken: list[Sample], caught: list[tuple[float, float]]) -> list[Figure]:
    """How soon a killed stream had caught up, and what it holds on to more after an hour: of a process in its last life, the
    first quarter left out, and of what outlives one over all of them."""
    late = [seconds for _, seconds in caught]
    against = f"{len(late)} kills, until {CAUGHT_UP:g} s of traffic are unread at most"
    middle, slowest = (statistics.median(late), max(late)) if late else (None, None)
    found = [
        Figure("soak: kill to caught up, median", middle, "s", against, "<= 30"),
        Figure("soak: kill to caught up, slowest", slowest, "s", against, "<= 30"),
    ]
    kills = [minute for minute, _ in caught]
    last = [s for s in taken if s.minute > max(kills, default=0)]
    for name, (most, unit) in (OF_A_LIFE | FLAT).items():
        seen, cuts, of = (last, [], " in the last life") if name in OF_A_LIFE else (taken, kills, "")
        values = [getattr(s, name) for s in seen]
        slope = growth([(s.minute, getattr(s, name)) for s in seen], cuts)
        against = f"from {values[0]:,.4g} to {values[-1]:,.4g}, {max(values):,.4g} at most" if values else ""
        figure = f"soak: growth of {name.replace('_', ' ')}{of}"
        found.append(Figure(figure, slope, f"{unit} an hour".strip(), against, f"<= {most}"))
    return found


def sent_of(sent: float, rate: float) -> Figure:
    """The traffic that there was, and not only what was asked for."""
    return Figure("soak: page views sent a second", sent, "", f"{rate:g} asked", f">= {0.95 * rate:g}")


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


def shown(figures: list[Figure]) -> Table:
    table = Table("figure", "value", "unit", "of", "goal", "met")
    for figure in figures:
        said = "" if figure.value is None else f"{figure.value:,.5g}"
        table.add_row(figure.figure, said, figure.unit, figure.against, figure.goal, "yes" if figure.met else "NO")
    return table


def growth(samples: list[tuple[float, float]], kills: list[float]) -> float | None:
    """What is held on to more after an hour: the median of the slopes, an hour, between the medians of every two lives (Theil and
    Sen), without the first quarter of the lives; of the samples where nobody was killed. None where there is too little. Samples
    and kills are by minute.

    A process that is killed begins anew, so that what one has gained since its start is not what the next one adds to. Medians,
    since one moment's peak is no growth.
    """
    lives = [[s] for s in samples]
    if kills:
        lives = [[s for s in samples if a <= s[0] < b] for a, b in pairwise([0.0, *kills, math.inf])]
    middles = [(statistics.median(m for m, _ in life), statistics.median(v for _, v in life)) for life in lives if life]
    late = middles[len(middles) // 4 :]
    if len(late) < 3:
        return None
    return statistics.median((b - a) / (n - m) * 60 for (m, a), (n, b) in combinations(late, 2))


if __name__ == "__main__":
    typer.run(soak)
