"""The page of figures says what was measured, what missed its goal included."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from bench import __main__ as bench
from bench import figures
from bench.measure import stamp
from bench.soak import FLAT, OF_A_LIFE, Sample, command, figures_of, growth, sent_of

OUTCOME = {"well": 20.5, "records": 10, "lost": 0, "altered": 0, "doubled": 0, "unexplained": 0, "differing": {}, "torn": 0}
OUTCOME |= {"unanswered": 0, "failed": ""}

PROGRAMS = sorted(set(re.findall(r"-m (bench[.\w]*)", (figures.ROOT / "Makefile").read_text())))
POINTS = (("events", 1e5, 4.0), ("events", 1e6, 9.0), ("pages", 50, 9.0))


def left(out: Path, name: str, **more: object) -> None:
    """A run as `bench`, `drill` and the others leave it."""
    out.mkdir(exist_ok=True)
    command = more.pop("command", f"python -m bench --only {name}")
    (out / f"{name}.json").write_text(json.dumps(stamp(str(command), 1) | more))


def figure(value: float | None, goal: str | None, met: bool | None) -> dict[str, object]:
    return {"figure": "event to readable, p99", "value": value, "unit": "s", "against": "", "goal": goal, "met": met}


def test_run_on_a_machine_without_git_is_of_an_unknown_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert stamp("make drill", 1)["commit"] == "unknown"


def test_what_missed_its_goal_is_on_the_page_and_in_the_picture(tmp_path):
    page = tmp_path / "docs" / "figures.md"
    left(tmp_path / "out", "live", figures=[figure(12.5, "< 5", False), figure(None, "< 5", False), figure(3.0, None, None)])
    figures.figures(tmp_path / "out", page)
    said = page.read_text()
    assert "| event to readable, p99 | 12.5 | s |  | < 5 | **no** |" in said
    assert "| event to readable, p99 | not measured | s |  | < 5 | **no** |" in said
    assert figures.BAD in (page.with_suffix("") / "goals.svg").read_text()


@pytest.mark.parametrize(("goal", "value", "share"), [("< 5", 10, 2), (">= 10", 30, 1 / 3), (">= 10", 5, 2), ("<= 4", 1, 0.25)])
def test_a_share_of_at_most_one_holds_the_goal(goal, value, share):
    assert figures.share(figure(value, goal, None)) == pytest.approx(share)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_make_names_says_how_to_use_it(program):
    told = subprocess.run([sys.executable, "-m", program, "--help"], cwd=figures.ROOT, capture_output=True, text=True)
    assert (told.returncode, "Usage" in told.stdout) == (0, True), told.stderr


def test_a_night_of_duckdbs_pays_for_no_import_of_the_platform():
    asks = "import sys, bench.peers.night; print([name for name in sys.modules if name.split('.')[0] in ('tidemark', 'pyspark')])"
    told = subprocess.run([sys.executable, "-c", asks], cwd=figures.ROOT, capture_output=True, text=True)
    assert (told.stdout.strip(), told.stderr) == ("[]", "")


def test_points_of_a_curve_are_drawn_by_panel_and_line(tmp_path):
    page = tmp_path / "docs" / "figures.md"
    points = [figure(v, None, None) | {"figure": f"growth with {axis}: log", "at": at} for axis, at, v in POINTS]
    left(tmp_path / "out", "growth", figures=[*points, figure(3.0, None, None)])
    figures.figures(tmp_path / "out", page)
    lines = {"growth with events (s)": {"log": [(1e5, 4.0), (1e6, 9.0)]}, "growth with pages (s)": {"log": [(50, 9.0)]}}
    assert figures.curves_of(json.loads((page.with_suffix("") / "growth.json").read_text())["figures"]) == lines
    assert "figures/growth.svg" in page.read_text()
    assert (page.with_suffix("") / "growth.svg").stat().st_size > 1000


def test_quick_runs_and_soaks_that_broke_off_are_not_taken_over(tmp_path):
    left(tmp_path / "out", "live", command="python -m bench --only live --quick", figures=[figure(1.0, "< 5", True)])
    left(tmp_path / "out", "soak", command="make soak", samples=[], caught_up=[])
    with pytest.raises(typer.BadParameter, match="no run in"):
        figures.figures(tmp_path / "out", tmp_path / "docs" / "figures.md")


def test_a_faults_newest_drills_take_the_place_of_its_former_ones_and_the_others_stay(tmp_path):
    page, out = tmp_path / "docs" / "figures.md", tmp_path / "out"
    first = [{"drill": "broker_killed", **OUTCOME}, {"drill": "stream_killed", **OUTCOME, "lost": 7}]
    left(out, "drill", command="make drill", drills=first)
    figures.figures(out, page)
    assert "| 7 |" in page.read_text()
    left(out, "drill", command="make drill", drills=[{"drill": "stream_killed", **OUTCOME, "records": 4321}])
    for _ in range(2):  # the same run again changes nothing
        figures.figures(out, page)
        kept = json.loads((page.with_suffix("") / "drill.json").read_text())["drills"]
        assert [(o["drill"], o["records"], o["lost"]) for o in kept] == [("broker_killed", 10, 0), ("stream_killed", 4321, 0)]
    assert "| 7 |" not in page.read_text()


def test_each_drill_keeps_the_command_of_its_own_run(tmp_path):
    page, out = tmp_path / "docs" / "figures.md", tmp_path / "out"
    died = [{"drill": "settling_killed", **OUTCOME, "point": point} for point in ("", "chunk", "staged")]
    left(out, "drill", command="make drill LONG=1", drills=[{"drill": "broker_killed", **OUTCOME}, *died])
    figures.figures(out, page)
    left(out, "drill", command="python -m bench.drill --only broker_killed", drills=[{"drill": "broker_killed", **OUTCOME}])
    figures.figures(out, page)
    of = {f["figure"]: f["command"] for f in json.loads(page.with_suffix(".json").read_text())}
    assert of["drill: broker_killed, seed 1: lost"] == "python -m bench.drill --only broker_killed"
    assert of["drill: settling_killed, seed 1: lost"] == "make drill LONG=1"
    assert of["drill: settling_killed (chunk), seed 1: until well"] == "make drill LONG=1"
    assert "| settling_killed (chunk, staged) | 1 |" in page.read_text()


def test_a_short_drill_takes_the_place_of_a_short_one_and_not_of_a_long_one(tmp_path):
    page, out = tmp_path / "docs" / "figures.md", tmp_path / "out"
    left(out, "drill", command="python -m bench.drill --only file_gone", drills=[{"drill": "file_gone", **OUTCOME}])
    figures.figures(out, page)
    for records in (11, 12):
        again = [{"drill": name, **OUTCOME, "records": records} for name in ("file_gone", "stream_killed")]
        left(out, "drill", command="make drill", drills=again)
        figures.figures(out, page)
    kept = json.loads((page.with_suffix("") / "drill.json").read_text())["drills"]
    assert [(o["drill"], o["records"]) for o in kept] == [("file_gone", 10), ("stream_killed", 12)]


def test_what_a_process_gains_before_each_kill_is_no_growth_and_what_every_next_one_adds_is():
    kills = [5.0 * n for n in range(1, 12)]
    saw = [(m / 4, 1000 + 100 * (m / 4 % 5)) for m in range(240)]
    assert growth(saw, kills) == pytest.approx(0)
    assert growth([(m, value + m) for m, value in saw], kills) == pytest.approx(60)
    assert growth([(m, 3 * m) for m, _ in saw], []) == pytest.approx(180)
    assert growth([(m, value + 1000 * (m == 33)) for m, value in saw], kills) == pytest.approx(0)  # a moment's peak
    assert growth(saw[:40], kills[:1]) is None  # two lives say nothing


KILLS = [(5.0 * n, 10.0 + n) for n in range(1, 9)]


def hour(**leak: float) -> list[Sample]:
    """A sample each quarter of a minute, in which some things grow by so much an hour, and the rest goes up and down.

         killed  x  x  x  x  x  x  x  x             ]
    minute 0     5 10 15 20 25 30 35 40            60    what a process holds on to begins anew with each life
    """
    begins = [max((at for at, _ in KILLS if at <= m / 4), default=0) for m in range(240)]
    grown = {n: [(m / 4 - begins[m] * (n in OF_A_LIFE)) / 60 * leak.get(n, 0) for m in range(240)] for n in OF_A_LIFE | FLAT}
    return [Sample(m / 4, **{n: 1000 + m % 4 + more[m] for n, more in grown.items()}) for m in range(240)]


@pytest.mark.parametrize("name", OF_A_LIFE | FLAT)
def test_a_soak_in_which_one_thing_grows_by_more_than_it_may_misses_that_goal(name):
    most = (OF_A_LIFE | FLAT)[name][0]
    assert all(figure.met for figure in figures_of(hour(**{name: most * 0.9}), KILLS))
    missed = [figure.figure for figure in figures_of(hour(**{name: most * 1.1}), KILLS) if not figure.met]
    assert missed == [f"soak: growth of {name.replace('_', ' ')}{' in the last life' * (name in OF_A_LIFE)}"]


@pytest.mark.parametrize(("sent", "met"), [(951, True), (949, False)])
def test_a_soak_of_less_traffic_than_was_asked_for_misses_that_goal(sent, met):
    assert sent_of(sent, 1000).met is met


def test_one_kill_that_took_longer_to_catch_up_misses_the_goal_of_the_slowest_and_not_the_medians():
    figure = {f.figure: (f.value, f.met) for f in figures_of(hour(), [*KILLS, (60.0, 31.0)])}
    assert figure["soak: kill to caught up, median"] == (15.0, True)
    assert figure["soak: kill to caught up, slowest"] == (31.0, False)


def test_a_soak_says_what_was_run():
    assert command(60, 1000, 5) == "make soak"
    assert command(20, 1000, 2.5) == "python -m bench.soak --minutes 20 --kill 2.5"


def test_every_run_is_in_one_file_and_each_count_is_to_be_zero(tmp_path):
    page, out = tmp_path / "docs" / "figures.md", tmp_path / "out"
    left(out, "live", figures=[figure(12.5, "< 5", False)])
    left(out, "drill", command="make drill", drills=[{"drill": "file_gone", **OUTCOME, "doubled": 1, "failed": "it broke"}])
    samples = [vars(sample) for sample in hour()]
    told = [f.plain() for f in figures_of(hour(), KILLS)]
    left(
        out,
        "soak",
        command="make soak",
        rate=1000,
        samples=samples,
        caught_up=KILLS,
        outcome={"drill": "soak", **OUTCOME},
        figures=told,
    )
    tried = [
        {"outcome": "no name is markup", "tried": 9, "held": False, "wrong": ["<b>|", "<i>"], "unasked": ""},
        {"outcome": "an audit", "tried": 0, "held": None, "wrong": [], "unasked": "nobody answers"},
    ]
    left(out, "hostile", command="make hostile", used={"our own": 81}, outcomes=tried)
    figures.figures(out, page)
    every = {f["figure"]: (f["command"], f["value"], f["met"]) for f in json.loads(page.with_suffix(".json").read_text())}
    assert every["event to readable, p99"] == ("python -m bench --only live", 12.5, False)
    assert every["drill: file_gone, seed 1: doubled"] == ("make drill", 1, False)
    assert every["drill: file_gone, seed 1: broke off"] == ("make drill", 1, False)
    assert every["drill: file_gone, seed 1: lost"] == ("make drill", 0, True)
    assert every["soak: kill to caught up, slowest"] == ("make soak", 18, True)
    assert every["soak, seed 1: lost"] == ("make soak", 0, True)
    assert every["hostile: no name is markup"] == ("make hostile", 2, False)
    assert every["hostile: an audit"] == ("make hostile", 0, None)
    said = page.read_text()
    assert "| no name is markup | 9 | **no** | `<b>/` |" in said
    assert "| an audit | 0 | could not be asked | `nobody answers` |" in said
    assert "| soak: kill to caught up, slowest | 18 | s |" in said


def test_one_bench_alone_leaves_the_figures_of_the_others(tmp_path):
    left(tmp_path, "live", figures=[figure(1.0, "< 5", True)])
    left(tmp_path, "night", figures=[figure(2.0, None, None)])
    assert [(f["value"], f["command"]) for f in bench.newest(tmp_path)] == [
        (1.0, "python -m bench --only live"),
        (2.0, "python -m bench --only night"),
    ]


@pytest.mark.parametrize("name", ["live", "night"])
def test_a_benchs_own_run_is_no_place_for_all_figures(tmp_path, name):
    left(tmp_path, name, figures=[])
    with pytest.raises(typer.BadParameter, match=f"a run of {name} is itself kept in {name}.json; name another file"):
        bench.bench(only=name, out=tmp_path / f"{name}.json")
    assert json.loads((tmp_path / f"{name}.json").read_text())["figures"] == []


@pytest.mark.parametrize("only", ["live", ""])
def test_live_is_measured_for_no_longer_than_a_tables_log_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    monkeypatch.setattr(bench, "World", None)  # nothing is started
    with pytest.raises(typer.BadParameter, match=r"live is measured for 2400 at most, not 2401: .* is kept for an hour"):
        bench.bench(only=only, seconds=2401, out=tmp_path / "figures.json")
