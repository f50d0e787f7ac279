"""`make figures`: take over what the newest runs left in `bench/out`, and write `docs/figures.md` with its pictures, and
`docs/figures.json` with every figure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Run = dict[str, Any]

ROOT = Path(__file__).parent.parent
OUT, PAGE, RECORDED = ROOT / "bench" / "out", ROOT / "docs" / "figures.md", ROOT / "docs" / "figures"
COUNTS = ("lost", "altered", "doubled", "unexplained", "torn")
OTHERS = ("drill", "hostile", "soak")
"""Runs that are no bench and have a chapter of their own."""
SHORT = "make drill"
GOOD, BAD, SOFT = "#2a7f62", "#c2410c", "#6b7280"
LINES = (GOOD, "#1d4ed8", "#b45309", "#7c3aed", SOFT)
HELD_ON_TO = {
    "memory": "memory of the stream (MiB)",
    "descriptors": "open descriptors",
    "rollup_files": "files of a rollup, all days",
    "view_files": "files of the last hour, all days",
    "delta_logs": "Delta logs (MiB)",
    "checkpoint": "checkpoint (MiB)",
}
HEAD = """# Figures

What was measured, by which command, on which machine, what missed its goal included. `make figures` writes this page from the
runs in [figures](figures), which `make bench`, `make drill`, `make soak` and `make hostile` leave in `bench/out`.
[bench/README.md](../bench/README.md) says how each is measured. Seconds are wall clock where no CPU is named, and vary by a tenth
or two with other programs on the same cores: compare ratios.
"""


def figures(
    out: Annotated[Path, typer.Option(help="Where runs were left.")] = OUT,
    page: Annotated[
        Path, typer.Option(help="What is written; pictures and recorded runs go into the folder of its name.")
    ] = PAGE,
) -> None:
    """Take over the newest runs, and draw and write what they say."""
    recorded = page.with_suffix("")
    recorded.mkdir(parents=True, exist_ok=True)
    take_over(out, recorded)
    runs = {file.stem: json.loads(file.read_text()) for file in sorted(recorded.glob("*.json"))}
    if not runs:
        raise typer.BadParameter(
            f"no run in {out}: run make bench, make drill, make soak or make hostile first", param_hint="--out"
        )
    page.with_suffix(".json").write_text(json.dumps(list(every_figure(runs)), indent=1) + "\n")
    page.write_text(
        "\n".join([HEAD, *of_benches(runs, recorded), *of_drills(runs, recorded), *of_soak(runs, recorded), *of_hostile(runs)])
    )


def take_over(out: Path, recorded: Path) -> None:
    """Copy each run that is whole and not quick; of drills, each fault's newest outcomes take the place of its former ones, a
    short run's not of a long one's."""
    for file in out.glob("*.json"):
        run = json.loads(file.read_text())
        if not isinstance(run, dict) or "at" not in run or "--quick" in run["command"]:
            continue
        kept = recorded / file.name
        if file.stem == "drill":
            run = merged(json.loads(kept.read_text()) if kept.exists() else None, run)
            kept.write_text(json.dumps(run, indent=1) + "\n")
        elif file.stem != "soak" or "outcome" in run:
            shutil.copyfile(file, kept)


def merged(before: Run | None, run: Run) -> Run:
    """The drills of two runs, each outcome with its own command, seed, time and commit. The short form, whose day is small and
    whose daily answers nobody has asked, takes the place of itself alone."""
    kept = (before or {"drills": []})["drills"]
    longer = {o["drill"] for o in kept if o["command"] != SHORT} if run["command"] == SHORT else set[str]()
    told = {name: run[name] for name in ("command", "seed", "at", "commit")}
    mine = [{**told, **outcome} for outcome in run["drills"] if outcome["drill"] not in longer]
    again = {outcome["drill"] for outcome in mine}
    others = [o for o in kept if o["drill"] not in again]
    return run | {"drills": sorted([*others, *mine], key=lambda o: o["drill"])}


def every_figure(runs: dict[str, Run]) -> Iterator[Run]:
    """Each figure of each run, of whatever kind, with the command, time and commit that it is of. What is counted is to be 0."""

    def one(run: Run, figure: str, value: float, unit: str, against: str, goal: str | None = None) -> Run:
        asked = {"figure": figure, "value": value, "unit": unit, "against": against, "goal": goal}
        return of(run, asked | {"met": None if goal is None else value <= 0})

    def of(run: Run, figure: Run) -> Run:
        return figure | {what: run[what] for what in ("command", "at", "commit")}

    for name, run in runs.items():
        yield from (of(run, figure) for figure in run.get("figures", []))
        for o in [run["outcome"]] if name == "soak" else run.get("drills", []):
            its = run | {k: o[k] for k in ("command", "at", "commit") if k in o}
            what = f"{o['drill']}{at_point(o)}, seed {o.get('seed', run['seed'])}"
            for count, value in counts_of(o).items():
                yield one(its, f"{'drill: ' * (name == 'drill')}{what}: {count}", value, "", f"{o['records']:,} records", "<= 0")
            if name == "drill":
                yield one(its, f"drill: {what}: until well", o["well"], "s", "")
        for o in run["outcomes"] if name == "hostile" else ():
            asked = o["held"] is not None
            against = f"{o['tried']:,} tried" if asked else f"could not be asked: {o['unasked']}"
            yield one(run, f"hostile: {o['outcome']}", len(o["wrong"]), "wrong", against, "<= 0" if asked else None)


def at_point(outcome: Run) -> str:
    """Where it died, of a drill that dies at named points and not at a random moment."""
    return f" ({outcome['point']})" if outcome.get("point") else ""


def counts_of(outcome: Run) -> dict[str, int]:
    """What of a drill is to be zero, whether it broke off included."""
    counts = {name: outcome[name] for name in COUNTS} | {"rows that differ": sum(outcome["differing"].values())}
    return counts | {"no answer": outcome["unanswered"], "broke off": int(bool(outcome["failed"]))}


# --------------------------------------------------------------------------------------------------------------- parts


def of_benches(runs: dict[str, Run], folder: Path) -> Iterator[str]:
    benches = {name: run for name, run in runs.items() if name not in OTHERS}
    held = [f for run in runs.values() for f in run.get("figures", []) if f["goal"] and f["value"] is not None]
    if not benches and not held:
        return
    yield "## Against the goals\n"
    if ratios := [(f"{f['figure']}  ({f['goal']})", share(f), f["met"]) for f in held if float(f["goal"].split()[1])]:
        picture(folder / "goals.svg", (9, 0.34 * len(ratios) + 0.9), draw_goals, ratios)
        yield "![how much of its goal each figure takes](figures/goals.svg)\n"
    for name, run in benches.items():
        yield f"### {name}\n\n{told(run)}\n"
        if curves := curves_of(run["figures"]):
            picture(folder / f"{name}.svg", (9, 5.5), draw_curves, curves, grid=(2, -(-len(curves) // 2)))
            yield f"![{name}, by what grows](figures/{name}.svg)\n"
        yield from table_of(run["figures"])


def table_of(figures: Sequence[Run]) -> Iterator[str]:
    met = {True: "yes", False: "**no**", None: ""}
    rows = [(f["figure"], said(f["value"]), f["unit"], f["against"], f["goal"] or "", met[f["met"]]) for f in figures]
    yield from table(("figure", "value", "unit", "of", "goal", "met"), rows)


Curves = dict[str, dict[str, list[tuple[float, float]]]]


def curves_of(figures: Sequence[Run]) -> Curves:
    """`{panel: {line: [(at, value)]}}` of the figures that are points of a curve. Their names are `panel: line`; a panel has its
    unit in its name."""
    found: Curves = {}
    for figure in figures:
        if "at" in figure and figure["value"] is not None:
            panel, line = figure["figure"].split(": ", 1)
            found.setdefault(f"{panel} ({figure['unit']})", {}).setdefault(line, []).append((figure["at"], figure["value"]))
    return found


def share(figure: Run) -> float:
    """How much of its goal a figure takes: up to 1 it holds, be the goal a most or a least."""
    order, bound = figure["goal"].split()
    value = max(figure["value"], 1e-9)
    return value / float(bound) if order[0] == "<" else float(bound) / value


def of_drills(runs: dict[str, Run], folder: Path) -> Iterator[str]:
    if not (run := runs.get("drill")):
        return
    names = list(dict.fromkeys(o["drill"] for o in run["drills"]))
    of = {name: [o for o in run["drills"] if o["drill"] == name] for name in names}
    each = "`make drill LONG=1` tries every fault; each line has the seed and the commit of its newest run"
    each += ", of the short form where there is no other"
    yield f"## The drill\n\n{each}. {machine(run)}\n"
    picture(
        folder / "drill.svg",
        (9, 0.28 * len(names) + 0.9),
        draw_wells,
        {n.replace("_", " "): [o["well"] for o in of[n]] for n in names},
    )
    yield "Seconds from a fault until it was repaired and a batch was committed again; each dot is one drill.\n"
    yield "![seconds until well, by fault](figures/drill.svg)\n"
    yield "What was left afterwards, held to a ledger outside, to Kafka's offsets and to DuckDB's answers:\n"
    rows = []
    for name in names:
        counts = [counts_of(o) for o in of[name]]
        sums = [str(sum(one[count] for one in counts)) for count in counts[0]]
        seeds = ", ".join(dict.fromkeys(str(o["seed"]) for o in of[name]))
        points = ", ".join(o["point"] for o in of[name] if o.get("point"))
        commits = ", ".join(dict.fromkeys(o["commit"] for o in of[name]))
        held = "yes" if all(o["records"] for o in of[name]) and not any(any(one.values()) for one in counts) else "**no**"
        rows.append(
            (f"{name} ({points})" if points else name, seeds, commits, f"{max(o['records'] for o in of[name]):,}", *sums, held)
        )
    yield from table(("fault", "seed", "commit", "records", *counts_of(run["drills"][0]), "held"), rows)


def of_soak(runs: dict[str, Run], folder: Path) -> Iterator[str]:
    if not (run := runs.get("soak")):
        return
    samples, outcome, kills = run["samples"], run["outcome"], len(run["caught_up"])
    yield f"## The soak\n\n{told(run)}\n"
    yield f"{run['rate']:,.0f} page views a second for {samples[-1]['minute']:.0f} minutes, the stream killed {kills} times."
    yield "Afterwards: " + ", ".join(f"{name} {count}" for name, count in counts_of(outcome).items()) + ".\n"
    yield from table_of(run["figures"])
    picture(folder / "soak.svg", (9, 5.5), draw_soak, run, grid=(2, 3))
    yield "What the stream holds on to; the thin lines are kills.\n\n![what is held on to, over the minutes](figures/soak.svg)\n"


def of_hostile(runs: dict[str, Run]) -> Iterator[str]:
    if not (run := runs.get("hostile")):
        return
    yield f"## Hostile input\n\n{told(run)}\n"
    yield "Texts: " + ", ".join(f"{count:,} of {name}" for name, count in run["used"].items()) + ".\n"
    held = {True: "yes", False: "**no**", None: "could not be asked"}
    rows = [(o["outcome"], f"{o['tried']:,}", held[o["held"]], cell((o["wrong"] or [o["unasked"]])[0])) for o in run["outcomes"]]
    yield from table(("outcome", "tried", "held", "the first that did not, or why nobody was asked"), rows)


def cell(text: str) -> str:
    """A text that somebody else has written, as one cell: of one line, and no markup."""
    return f"`{' '.join(text.split())[:120].replace('`', '').replace('|', '/')}`" if text.strip() else ""


def told(run: Run) -> str:
    return f"`{run['command']}`, seed {run['seed']}, commit {run['commit']}, {run['at'][:10]}. {machine(run)}"


def machine(run: Run) -> str:
    has = run["machine"]
    return f"{has['cores']} cores ({has['cpu']}), {has['memory_gib']:g} GiB, {has['system'].split(',')[1].strip()}."


def said(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.4g}"


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield "\n".join("| " + " | ".join(row) + " |" for row in (columns, ("---",) * len(columns), *rows)) + "\n"


# ------------------------------------------------------------------------------------------------------------- pictures


def picture(file: Path, size: tuple[float, float], draw: Callable[..., None], what: Any, grid: tuple[int, int] = (1, 1)) -> None:
    """An SVG on white; the same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": file.name, "font.size": 9, "axes.edgecolor": SOFT, "xtick.color": SOFT, "axes.titlesize": 9}
    with matplotlib.rc_context(style):
        canvas = Figure(figsize=size, layout="constrained", facecolor="white")
        draw(canvas.subplots(*grid), what)
        canvas.savefig(file, metadata={"Date": None})


def draw_goals(axes: Axes, ratios: list[tuple[str, float, bool]]) -> None:
    names, shares, met = zip(*reversed(ratios), strict=True)
    colours = [GOOD if m else BAD for m in met]
    axes.barh(range(len(names)), [max(s, 1e-3) - 1 for s in shares], left=1, color=colours, height=0.55)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("how many times its goal a figure takes: left of the line it holds")
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_curves(panels: Any, curves: Curves) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    for axes, (panel, lines) in zip(panels.flat, curves.items(), strict=False):
        for colour, (line, points) in zip(LINES, lines.items(), strict=False):
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", markersize=3, linewidth=1.3, label=line)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted({at for points in lines.values() for at, _ in points}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(EngFormatter(sep=""))
        axes.set_title(panel, loc="left")
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in panels.flat[len(curves) :]:
        axes.set_visible(False)


def draw_wells(axes: Axes, wells: dict[str, list[float]]) -> None:
    for place, (_, seconds) in enumerate(reversed(wells.items())):
        axes.hlines(place, 0, max(seconds), color="#d1d5db", linewidth=2, zorder=1)
        axes.scatter(seconds, [place] * len(seconds), color=GOOD, s=22, zorder=2)
    axes.set_yticks(range(len(wells)), list(reversed(wells)))
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color="#e5e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_soak(panels: Any, run: Run) -> None:
    minutes = [s["minute"] for s in run["samples"]]
    for axes, (name, title) in zip(panels.flat, HELD_ON_TO.items(), strict=True):
        for minute, _ in run["caught_up"]:
            axes.axvline(minute, color="#e5e7eb", linewidth=1)
        axes.plot(minutes, [s[name] for s in run["samples"]], color=GOOD, linewidth=1.3)
        axes.set_title(title, loc="left")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minute")
        axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    typer.run(figures)
