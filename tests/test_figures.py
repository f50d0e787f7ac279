"""The page of figures says what was measured, what missed its goal included."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from bench import figures
from bench.measure import stamp
from bench.soak import growth

OUTCOME = {"well": 20.5, "records": 10, "lost": 0, "altered": 0, "doubled": 0, "unexplained": 0, "differing": {}, "torn": 0}

PROGRAMS = sorted(set(re.findall(r"-m (bench[.\w]*)", (figures.ROOT / "Makefile").read_text())))
POINTS = (("events", 1e5, 4.0), ("events", 1e6, 9.0), ("pages", 50, 9.0))


def left(out: Path, name: str, **more: object) -> None:
    """A run as `bench`, `drill` and the others leave it."""
    out.mkdir(exist_ok=True)
    command = more.pop("command", f"python -m bench --only {name}")
    (out / f"{name}.json").write_text(json.dumps(stamp(str(command), 1) | more))


def figure(value: float | None, goal: str | None, met: bool | None) -> dict[str, object]:
    return {"figure": "event to readable, p99", "value": value, "unit": "s", "against": "", "goal": goal, "met": met}


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


def test_points_of_a_curve_are_drawn_by_panel_and_line(tmp_path):
    page = tmp_path / "docs" / "figures.md"
    points = [figure(v, None, None) | {"figure": f"growth with {axis}: log", "at": at} for axis, at, v in POINTS]
    left(tmp_path / "out", "growth", figures=[*points, figure(3.0, None, None)])
    figures.figures(tmp_path / "out", page)
    lines = {"growth with events": {"log": [(1e5, 4.0), (1e6, 9.0)]}, "growth with pages": {"log": [(50, 9.0)]}}
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


def test_what_a_process_gains_before_each_kill_is_no_growth_and_what_every_next_one_adds_is():
    kills = [5.0 * n for n in range(1, 12)]
    saw = [(m / 4, 1000 + 100 * (m / 4 % 5)) for m in range(240)]
    assert growth(saw, kills) == pytest.approx(0)
    assert growth([(m, value + m) for m, value in saw], kills) == pytest.approx(60)
    assert growth([(m, 3 * m) for m, _ in saw], []) == pytest.approx(180)
    assert growth(saw[:80], kills[:3]) is None  # two lives say nothing
