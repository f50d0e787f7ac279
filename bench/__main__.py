"""`python -m bench`: measure, show, and write bench/out/figures.json, and each bench's own run beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import append, batch, buyers, every, growth, live, long, night, nightly, plain, publication, replay, series
from bench.charge import InCharge
from bench.measure import Figure, machine, stamp
from bench.peers.engines import ENGINES
from bench.world import World

OUT = Path(__file__).parent / "out" / "figures.json"
NAMES = ("live", "plain", "publication", "append", "batch", "series", "long")
"""In this order: the first three share one stream and its lake, the others have the machine to themselves."""
OWN = ("buyers", "every", "full", "growth", "large", "month", "night", "nightly", "replay")
"""Each in a world of its own: they need a topic with nothing else in it."""
KEPT = {"full", "large", "month", "night"}
"""What may stay where `--keep` says: of `full` it takes an hour to make, and may so be measured by the code of another day."""
WORLDS = {"nightly": InCharge}
SIZES = {
    "large": (10_000_000, 100_000, 2),
    "full": (86_400_000, 100_000, 2),
    "month": (2_000_000, 2_000_000, 30),
    "quick large": (200_000, 20_000, 2),
    "quick full": (200_000, 20_000, 2),
    "quick month": (50_000, 50_000, 3),
}
"""What is `night` of another size: events of yesterday, of each day before, and how many days; `full` as 1,000 a second make."""


def bench(
    only: Annotated[str, typer.Option(help=f"Some of {','.join((*NAMES, *OWN))}; all unless said.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Minutes, not hours: shows that it works, decides little.")] = False,
    rate: Annotated[float, typer.Option(help="Events a second of `live`.")] = 1000,
    seconds: Annotated[float | None, typer.Option(help="How long `live` is measured, 2400 at most; 600 unless said.")] = None,
    history: Annotated[float | None, typer.Option(help="Seconds of traffic that `live` finds; 3600 unless said.")] = None,
    seed: Annotated[int, typer.Option(help="Of every random draw.")] = 1,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = OUT,
    keep: Annotated[Path | None, typer.Option(help="Where the lake of one night stays, to be measured again.")] = None,
) -> None:
    """Measure the platform beside what a user would pick instead. Goals are compared, never assumed."""
    chosen = {name for name in only.split(",") if name} or {*NAMES, *OWN}
    if wrong := chosen - {*NAMES, *OWN}:
        raise typer.BadParameter(f"{', '.join(sorted(wrong))}; there are {', '.join((*NAMES, *OWN))}", param_hint="--only")
    if out.stem in {*NAMES, *OWN}:
        raise typer.BadParameter(f"a run of {out.stem} is itself kept in {out.name}; name another file", param_hint="--out")
    if "live" in chosen and seconds and seconds > live.LONGEST:
        said = f"live is measured for {live.LONGEST} at most, not {seconds:g}: a table's log, which it reads, is kept for an hour"
        raise typer.BadParameter(said, param_hint="--seconds")
    if keep and not (len(chosen) == 1 and chosen <= KEPT):
        raise typer.BadParameter(f"of one of {', '.join(sorted(KEPT))} alone", param_hint="--keep")
    console, before = Console(width=170), machine()
    console.print(f"{before}, seed {seed}", soft_wrap=True, highlight=False)
    seconds = seconds or (60 if quick else 600)
    history = history if history is not None else (60 if quick else 3600)
    out.parent.mkdir(parents=True, exist_ok=True)
    found: list[Figure] = []
    for names in ([n for n in NAMES if n in chosen], *([n] for n in OWN if n in chosen)):
        if not names:
            continue
        with World(seed, keep) if keep else WORLDS.get(names[0], World)(seed) as world:
            for name in names:
                run = stamp(f"python -m bench --only {name}" + " --quick" * quick, seed)
                figures = measured(world, name, quick, rate, seconds, history)
                show(console, figures)
                run["figures"] = [figure.plain() for figure in figures]
                (out.parent / f"{name}.json").write_text(json.dumps(run, indent=1) + "\n")
                found += figures
                out.write_text(json.dumps(newest(out.parent), indent=1) + "\n")
    console.print(f"load {before['load']} at the start, {machine()['load']} at the end", highlight=False)
    raise typer.Exit(1 if any(figure.met is False for figure in found) else 0)


def newest(folder: Path) -> list[dict[str, Any]]:
    """The figures of each bench's newest run, with what was run and when: one bench alone leaves the others' as they were."""
    files = [folder / f"{name}.json" for name in (*NAMES, *OWN)]
    runs = [json.loads(file.read_text()) for file in files if file.exists()]
    return [figure | {what: run[what] for what in ("command", "at", "commit")} for run in runs for figure in run["figures"]]


def measured(world: World, name: str, quick: bool, rate: float, seconds: float, history: float) -> list[Figure]:
    if name in ("append", "batch", "series", "long"):
        world.stop_stream()
    match name:
        case "live":
            return live.measure(world, rate, seconds, history, warmup=20 if quick else 30)
        case "plain" if quick:
            return plain.measure(world, (2000,), step=10, hold=20, batch=5000, batches=1, rounds=1, others=())
        case "plain":
            rates = (2000, 4000, 8000, 12000, 16000, 24000, 32000, 48000)
            return plain.measure(world, rates, step=20, hold=60, batch=40_000, batches=1, rounds=2, others=[*ENGINES])
        case "publication":
            return publication.measure(world, 20_000)
        case "append":
            return append.measure(world, 5000, batches=6 if quick else 30)
        case "batch" if quick:
            return batch.measure(world, (100, 5000), (1, 4), batches=4)
        case "batch":
            return batch.measure(world, (100, 5000, 20_000), (1, 4, 16), batches=12)
        case "series":
            return series.measure(world, 5000 if quick else 20_000, rounds=1 if quick else 3)
        case "long":
            return long.measure(world, 2500 if quick else 120_000, (100, 1000) if quick else (100, 1000, 10_000))
        case "every":
            return every.measure(world, rate, 60 if quick else 180, warmup=60 if quick else 300)
        case "buyers":
            return buyers.measure(world, 20_000 if quick else 1_000_000, 500 if quick else 5_000, rounds=1 if quick else 2)
        case "growth":
            return growth.measure(world, shrink=20 if quick else 1)
        case "night":
            return night.measure(
                world,
                50_000 if quick else 1_000_000,
                20_000 if quick else 50_000,
                days=3 if quick else 30,
                rounds=1 if quick else 3,
            )
        case "large" | "full" | "month":
            events, others, days = SIZES["quick " * quick + name]
            figures = night.measure(world, events, others, days, rounds=1)
            return [replace(one, figure=one.figure.replace("night", name, 1)) for one in figures]
        case "nightly":
            assert isinstance(world, InCharge)
            return nightly.measure(world, 50_000 if quick else 1_000_000, rounds=1 if quick else 3)
        case "replay":
            return replay.measure(world, 100_000 if quick else 3_600_000, rate, calm=30 if quick else 60)
    raise ValueError(name)


def show(console: Console, figures: list[Figure]) -> None:
    table = Table("figure", "value", "unit", "against", "goal", "met")
    for figure in figures:
        said = figure.plain()
        met = {True: "yes", False: "NO", None: ""}[figure.met]
        table.add_row(figure.figure, f"{said['value']}", figure.unit, figure.against, figure.goal or "", met)
    console.print(table)


if __name__ == "__main__":
    typer.run(bench)
