"""The drill's own bookkeeping: what broke off, was torn or had no answer is never taken for held."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from bench.drill import DAMAGES, EVENT, EVERY, MARKS, POINTS, SHORT, Drill, Outcome, in_parts, in_turn, lost, named, often
from bench.live import latencies, rollup_rows
from bench.replay import differing
from bench.world import STREAM, World
from page_lake import AT, COUNTED, write

from tidemark import kafka, lake, local, session, settle

WHOLE = Outcome("broker_killed", 9.0, 10, 0, 0, 0, 0, {}, 0, "")


@pytest.fixture
def drill() -> Iterator[Drill]:
    """Of a world in which nothing was started."""
    world = World(1)
    yield Drill(world, Random(1), date(2026, 1, 2))
    world.__exit__()


@pytest.mark.parametrize(
    "wrong",
    [{c: 1} for c in ("lost", "altered", "doubled", "unexplained", "torn", "unanswered")]
    + [{"differing": {"v": 1}}, {"failed": "x"}, {"records": 0}],
)
def test_one_thing_wrong_is_not_held(wrong):
    assert WHOLE.held
    assert not replace(WHOLE, **wrong).held


def test_every_fault_that_is_named_is_there_and_has_a_sentence():
    assert {*SHORT, *POINTS, *DAMAGES} <= {*EVERY}
    assert [name for name in EVERY if not getattr(Drill, name).__doc__] == []


@pytest.mark.parametrize("fault", POINTS)
def test_as_many_rounds_as_a_fault_has_points_die_at_each_of_them_once(fault):
    drawn = list(itertools.islice(in_turn(Random(3))[fault], 2 * len(POINTS[fault])))
    assert sorted(drawn[: len(POINTS[fault])]) == sorted(POINTS[fault])
    assert drawn[len(POINTS[fault]) :] == drawn[: len(POINTS[fault])]


@pytest.mark.parametrize(("long", "times"), [(True, 8), (False, 1)])
def test_the_long_form_has_a_fault_at_each_of_its_points(long, times):
    assert often("stream_killed_at_a_point", long) == times
    assert {often(name, long) for name in {*EVERY} - {*POINTS}} == {1}


def test_a_fault_that_breaks_off_is_an_outcome_that_did_not_hold(drill):
    outcome = drill.tried("file_gone", last=False)  # there is no lake to read
    assert (outcome.held, outcome.drill, outcome.failed != "") == (False, "file_gone", True)


def test_a_run_that_is_over_before_it_was_killed_was_not_tried(drill, monkeypatch):
    monkeypatch.setattr(drill, "starts", lambda name, *_: local.start(drill.settings, name, [sys.executable, "-c", ""]))
    monkeypatch.setattr(drill.random, "uniform", lambda *_: 30)
    with pytest.raises(AssertionError, match="settle was over before it was killed"):
        drill.killed_run("settle")


DIES = """
import os, signal, time
if point := os.environ.get("TIDEMARK_FAILPOINT"):
    os.kill(os.getpid(), signal.SIGKILL) if point != "never" else exit(3)
print("beats", flush=True)
time.sleep(300)
"""


@pytest.fixture
def quick(drill, monkeypatch) -> Drill:
    """Of a world whose stream is no stream: it dies before it beats, and beats where it is to die nowhere."""
    monkeypatch.setattr(drill, "speed", lambda *_: [sys.executable, "-c", DIES])
    monkeypatch.setattr(drill.world, "beating", lambda process: "beats" in process.log.read_text())
    return drill


def test_a_stream_that_dies_before_it_says_that_it_runs_has_died_and_is_started_again(quick):
    quick.dies({"TIDEMARK_FAILPOINT": "offsets"})
    assert local.running(quick.settings, STREAM)


def test_a_stream_that_ends_otherwise_has_not_died_at_its_point(quick):
    with pytest.raises(AssertionError, match="the stream did not come to where it dies"):
        quick.dies({"TIDEMARK_FAILPOINT": "never"})


@pytest.fixture
def program(drill, monkeypatch) -> Callable[[str], None]:
    """Have every command of the platform be this script."""

    def made(script: str) -> None:
        path = drill.world.home / "program"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return made


def test_the_run_that_a_command_names_is_the_last_line_whatever_a_jvm_says_as_it_ends(drill, program):
    program("echo settle-1; echo WARN ShutdownHookManager >&2")
    assert named(drill.world.tidemark("settle")) == "settle-1"


def test_what_a_command_that_fails_has_found_and_why_it_failed_are_both_told(drill, program):
    program("echo part-0.parquet; echo no broker >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"(?s)tidemark verify ended with exit code 1: part-0\.parquet\n.*no broker"):
        drill.world.tidemark("verify")


def test_a_command_finds_java_as_the_drill_itself_does(drill, program, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/a jvm")
    program('echo "$JAVA_HOME"; test -z "$TIDEMARK_FAILPOINT" || kill -9 $$')
    assert drill.world.tidemark("settle") == "/a jvm\n"
    drill.dies_at("staged", "settle")
    assert (drill.world.home / "died.log").read_text() == "/a jvm\n"


#   settle, 12:00:02 [ read up to 7        replay, 12:00:01 [ read up to 7, or 8
@pytest.mark.parametrize(("replayed", "order"), [(7, ["drill", "settle-1"]), (8, ["settle-1", "drill"])])
def test_of_two_runs_that_have_read_as_much_the_one_that_was_begun_first_is_published_first(drill, monkeypatch, replayed, order):
    done: list[str] = []

    def tidemark(command: str, *argv: str) -> str:
        if command not in ("settle", "replay"):
            return ""
        name, second, seq = ("drill", 1, replayed) if command == "replay" else ("settle-1", 2, 7)
        pins = {"main": lake.Pin("main", seq, {}, "")}
        lake.save(drill.settings, lake.Run(name, "staged", [], "", f"2026-11-19T12:00:0{second}+00:00", "", pins))
        return f"{name}\n"

    monkeypatch.setattr(session, "session", lambda *_: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(drill, "readers", lambda *_, **__: nullcontext(lambda: None))
    monkeypatch.setattr(drill.world, "tidemark", tidemark)
    monkeypatch.setattr(settle, "publish", lambda settings, catalog, run: done.append(run))
    monkeypatch.setattr(settle, "rollback", lambda settings, catalog, run, reason: done.append(f"{run} back"))
    drill.everything_at_once()
    assert done == [*order, f"{order[-1]} back"]


@pytest.mark.parametrize("tables", [{}, {"hourly_traffic": {"gate": "passed"}}], ids=["stages", "compares"])
def test_a_run_judges_once_its_record_names_tables(drill, tables):
    """One that was killed before and settled since is not the newest."""
    for n, (state, said) in enumerate(
        (("running", {"hourly_traffic": {}}), ("staged", {"hourly_traffic": {}}), ("running", tables))
    ):
        lake.save(drill.settings, lake.Run(f"r{n}", state, [], "", f"2026-11-19T12:00:0{n}+00:00", "", tables=said))
    assert drill.judges() is bool(tables)


@pytest.mark.parametrize(
    ("offset", "value", "missing"), [(7, b"a", 0), (8, b"a", 1), (9, b"a", 0), (None, b"a", 0), (None, b"b", 1)]
)
def test_an_acknowledged_record_is_looked_for_where_it_lies_and_without_an_offset_by_its_bytes(offset, value, missing):
    told = [{"partition": 0, "offset": offset, "value": value}]
    assert lost(told, held={(0, 7): b"a", (1, 8): b"b"}, unseen={(0, 9)}) == missing


def test_answers_that_are_neither_before_nor_after_are_torn_and_those_that_fail_are_counted(drill):
    answers: Any = iter([("before",), ("torn",), KeyError("gone"), ("after",)])
    begun, enough = threading.Event(), threading.Event()

    def look() -> tuple[Any, ...]:
        if threading.current_thread() is threading.main_thread():
            return ("after",) if enough.is_set() else ("before",)
        begun.wait(10)
        answer = next(answers, None)
        if answer is None:
            enough.set()
            return ("after",)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with drill.readers(look) as still:
        still()
        begun.set()
        assert enough.wait(10)
        still()
    assert (drill.torn, drill.unanswered) == (1, 1)


def test_readers_that_were_answered_nothing_have_not_seen_whole_versions(drill):
    with drill.readers(lambda: ("the same",), rest=60) as still:
        still()
    assert (drill.torn, drill.unanswered) == (0, 1)


DAY = date(2026, 1, 2)
KEYS = {
    "hourly_traffic": ("page", "hour"),
    "site_hourly_traffic": ("hour",),
    "daily_traffic": ("page",),
    "site_daily_traffic": (),
}
TYPES = {
    "page": pa.string(),
    "hour": AT,
}


def event(name: str, at: datetime) -> dict[str, Any]:
    return {"event_id": name, "visitor_id": "v", "page": "/", "viewed_at": at}


def of_day(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 1, 2, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(("visitors", "differs"), [(2, 0), (3, 2)])
def test_a_published_answer_that_is_not_duckdbs_over_the_events_is_found(drill, visitors, differs):
    """The repeat counts once, the next day not at all. No log is asked."""
    settings = drill.world.settings
    views = [("a", "v", 10), ("a", "v", 10), ("b", "v", 23), ("c", "w", 10)]
    held = [event(e, of_day(h, 5)) | {"visitor_id": v} for e, v, h in views]
    held.append(event("e", datetime(2026, 1, 3, tzinfo=UTC)))
    answers: dict[str, list[tuple[Any, ...]]] = {
        "hourly_traffic": [("/", of_day(10), 2, 2), ("/", of_day(23), 1, 1)],
        "site_hourly_traffic": [(of_day(10), 2, 2), (of_day(23), 1, 1)],
        "daily_traffic": [("/", 3, 2)],
        "site_daily_traffic": [(3, visitors)],
    }
    for view, found in answers.items():
        key = KEYS[view]
        rows = [dict(zip((*key, "pv", "uv"), row, strict=True)) | {"settled": True, "day": DAY} for row in found]
        write(settings, f"views/{view}", rows, "runs/bench", pa.schema({**{c: TYPES[c] for c in key}, **COUNTED}))
    assert differing(drill.world, DAY, in_parts(iter(held), EVENT)) == (3, differs)


@pytest.mark.parametrize(("uv", "differs"), [(1, {}), (2, {"last_hour": 2, "site_last_hour": 2})])
def test_the_newest_mark_of_the_last_hour_is_held_to_duckdb_and_no_older_one(drill, uv, differs):
    """
    early   09:05 [   a, b   ) 10:05
    """
    settings, newest, older = drill.world.settings, of_day(10, 5), of_day(10, 4)
    at = [("a", of_day(9, 30)), ("b", of_day(9, 31)), ("early", of_day(9, 4)), ("its own", newest)]
    events = pa.Table.from_pylist([event(e, t) for e, t in at])
    for view, key in {"last_hour": {"page": "/"}, "site_last_hour": {}}.items():
        marks = [(older, 77, 77), (newest, 2, uv)]
        rows = [key | {"mark": mark, "pv": p, "uv": u, "settled": False, "day": DAY} for mark, p, u in marks]
        write(settings, f"views/{view}", rows, "runs/bench")
    assert drill.differing(events, [], MARKS) == differs


def test_an_event_that_kafka_holds_and_no_rollup_has_is_never_readable_be_it_in_the_log_or_not(drill, monkeypatch):
    """
    Kafka      a   b          c           d, five seconds late   and what is none
    log        a   b, batch 1             d
    rollup     a                          d
    """
    at, settings = of_day(10), drill.world.settings
    records = [
        kafka.Record(0, n, at + timedelta(seconds=late), None, json.dumps(event(e, at), default=str).encode(), ())
        for n, (e, late) in enumerate([("a", 0.2), ("b", 0.2), ("c", 0.2), ("d", 5)])
    ]
    records.append(kafka.Record(0, 4, at, None, b"<html>", ()))
    monkeypatch.setattr(kafka, "consume", lambda *_: iter(records))
    for seq, numbers in ((0, (0, 3)), (1, (1,))):
        logged = [{"viewed_at": at, "kafka": {"partition": 0, "offset": n}, "day": DAY} for n in numbers]
        write(settings, "log/page_views", logged, f"live/main-{seq}-{seq}-aaaaaaaa")
    panes = pa.schema({"page": pa.string(), "day": pa.date32()})
    write(settings, "rollups/page_panes", [{"page": "/", "day": DAY}], "live/main-0-0-aaaaaaaa", panes)
    db = rollup_rows(drill.world, at.timestamp(), at.timestamp() + 1)
    found = {figure.figure: (figure.value, figure.met) for figure in latencies(db, "it", "seq", "< 5")}
    assert found["live: events never readable in it"] == (2, False)
    assert found["live: share left out of it, sent more than a second late"] == (0.25, False)


def test_traffic_that_has_not_come_is_none(drill, monkeypatch):
    ended = local.start(drill.settings, "traffic-1", [sys.executable, "-c", "print('no broker')"])
    came = iter([{0: 10, 1: 0}, {0: 990, 1: 9}])
    monkeypatch.setattr(drill.world, "ends", lambda: next(came))
    monkeypatch.setattr(drill.world, "traffic", lambda *_, **__: ended)
    with pytest.raises(AssertionError, match="989 of 1,000 events came: no broker"):
        drill.world.past(1000, 1)
