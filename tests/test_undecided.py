"""What waits for a decision while the day goes on: what is refused meanwhile, and what is refused to it afterwards."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import DateType, StructField, StructType
from structlog.testing import capture_logs

from tidemark import fold, lake, local, repair, report, settle, speed
from tidemark.model import Catalog, Topic, rollup, view

NOW = datetime.now(UTC)
TODAY = NOW.date()
YESTERDAY, BEFORE = TODAY - timedelta(days=1), TODAY - timedelta(days=2)


def recorded(settings: Any, name: str, kind: str, days: tuple[date, ...] = (), seq: int = 3, **more: Any) -> lake.Run:
    """A run's record, saved, with stream main pinned at batch `seq`."""
    pins = {"main": lake.Pin("main", seq, {"clicks": {"0": seq}}, NOW.isoformat())}
    said = {"state": "staged", "created": NOW.isoformat(), "version": "0", **more}
    run = lake.Run(name, days=[str(d) for d in days], reason="a mistake", pins=pins, kind=kind, **said)
    lake.save(settings, run)
    return run


NOTHING = Catalog({}, {}, {})
WAITS = r"run r1 \(%s: a mistake\) waits for a decision; publish or drop it first: tidemark publish r1, or tidemark drop r1"
UNDONE = r"run r1 \(%s: a mistake\) is not done; let it end, go on .*: tidemark replay --run r1, or tidemark drop r1"


@pytest.mark.parametrize("state", ["running", "staged", "failed"])
def test_rejects_are_not_mended_while_a_replay_waits(settings, monkeypatch, state):
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: pytest.fail("Spark was started"))
    recorded(settings, "r1", "replay", (YESTERDAY,), state=state, open_days=[str(TODAY)])
    with pytest.raises(settle.SettleError, match=(WAITS if state == "staged" else UNDONE) % state):
        settle.settle_rejects(settings, NOTHING, "page may be null")


def test_rejects_that_are_mended_have_nothing_to_publish_where_their_days_are_live(settings):
    recorded(settings, "r1", "rejects", (), state="done", note="only days that are not over", mended=[str(TODAY)])
    with pytest.raises(
        settle.SettleError, match=r"run r1 is done: only .* not over; it has no day to publish, .* are read already$"
    ):
        settle.publish(settings, NOTHING, "r1")


@pytest.mark.parametrize(
    ("state", "said"), [("starting", "is starting, .* again once tidemark status"), ("running", "still runs minutes as it was")]
)
def test_replay_beside_a_stream_that_ran_other_code_says_whether_it_does_yet(settings, monkeypatch, state, said):
    """The code of a stream that starts is that of the run before until it has begun."""
    told = {"heartbeat": {"state": state}, "code": {"minutes": "as it was"}}
    monkeypatch.setattr(local, "status", lambda *_: told)
    monkeypatch.setattr(local, "beats", lambda *_: True)
    with pytest.raises(settle.SettleError, match=said):
        settle.refuse_other_code(settings, [minutes])


def test_replay_that_was_dropped_does_not_go_on(settings):
    """Airflow's run is cleared: a person would be asked about files that are gone."""
    recorded(settings, "r1", "replay", (YESTERDAY,), state="dropped")
    with pytest.raises(settle.SettleError, match=r"run r1 was dropped, and what it staged is gone; replay again as another run"):
        settle.replay(settings, NOTHING, "a mistake", name="r1")


def test_settling_that_was_dropped_as_it_began_says_how_it_begins_again(settings):
    run = recorded(settings, "s1", "settle", (BEFORE, YESTERDAY), state="running")
    lake.drop(settings, NOTHING, run)
    with pytest.raises(settle.SettleError, match=rf"gone; settle again: tidemark settle --day {BEFORE} --day {YESTERDAY}$"):
        settle.work(settings, NOTHING, run, print)


def test_rejects_are_not_mended_beside_a_replay_that_began_while_spark_did(settings, monkeypatch):
    begin = lambda *_, **__: recorded(settings, "r1", "replay", state="running")  # noqa: E731
    monkeypatch.setattr("tidemark.session.session", begin)
    with pytest.raises(settle.SettleError, match=UNDONE % "running"):
        settle.settle_rejects(settings, NOTHING, "page may be null")
    assert [run.id for run in lake.runs(settings)] == ["r1"]


@pytest.mark.parametrize(
    ("kind", "state", "way"),
    [
        ("settle", "failed", f"settle the days again: tidemark settle --day {YESTERDAY}"),
        ("settle", "running", f"settle the days again: tidemark settle --day {YESTERDAY}"),
        ("replay", "failed", "go on with it: tidemark replay --run r1"),
        ("replay", "running", "go on with it: tidemark replay --run r1"),
        ("replay", "dropped", "settle the days again: tidemark replay"),
    ],
)
def test_run_that_is_not_staged_whole_is_not_published_and_the_command_that_follows_is_said(settings, kind, state, way):
    run = recorded(settings, "r1", kind, (YESTERDAY,), state=state, note="the disk is full")
    with pytest.raises(settle.SettleError, match=f"^run r1 is {state}: the disk is full; {way}$"):
        settle.swap_in(settings, NOTHING, run, ())


@pytest.mark.parametrize(
    ("kind", "state", "said"),
    [
        ("settle", "failed", "nothing that readers see has changed, and there is nothing to undo: give the same command again"),
        ("replay", "running", "nothing that readers see has changed, and it goes on with: tidemark replay --run r1"),
        ("rejects", "failed", "what it has accepted stays so, and the rest is done by: tidemark settle --rejects"),
    ],
)
def test_run_that_is_interrupted_says_what_it_leaves_and_the_command_that_follows(settings, monkeypatch, kind, state, said):
    class Interrupted:
        def __init__(self, *_: Any) -> None: ...

        def work(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(settle, "Settling", Interrupted)
    run = recorded(settings, "r1", kind, (YESTERDAY,), state="running")
    with pytest.raises(KeyboardInterrupt, match=f"^run r1 was interrupted; {said}$"):
        settle.work(settings, NOTHING, run, lambda _: None)
    assert (lake.run_of(settings, "r1").state, lake.run_of(settings, "r1").note) == (state, "interrupted")


@pytest.mark.parametrize(("kind", "state"), [("replay", "published"), ("replay", "dropped"), ("settle", "staged")])
def test_rejects_are_mended_beside_what_is_decided_and_beside_a_night(settings, monkeypatch, kind, state):
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: None)
    recorded(settings, "r1", kind, (YESTERDAY,), state=state)
    with pytest.raises(settle.SettleError, match="no stream has committed a batch yet"):  # which is asked next
        settle.settle_rejects(settings, NOTHING, "page may be null")


def test_what_was_cut_into_days_in_another_zone_is_not_read_by_days_of_this_one(settings, monkeypatch):
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: None)
    day = StructField("day", DateType(), metadata={"comment": "the business day, UTC"})
    lake.table(settings, CLICKS).create(StructType().add("id", "string").add(day))
    tokyo, catalog = settings.model_copy(update={"zone": "Asia/Tokyo"}), Catalog({"clicks": CLICKS}, {}, {})
    stream = speed.Stream(tokyo, catalog, "main", settings.state / "main")
    other = r"log/clicks are those of UTC, and TIDEMARK_ZONE is Asia/Tokyo; set TIDEMARK_ZONE=UTC"
    for work in (
        lambda: report.report(tokyo, catalog, BEFORE),
        lambda: settle.settle(tokyo, catalog, [BEFORE], "by hand"),
        lambda: settle.replay(tokyo, catalog, "a mistake"),
        lambda: settle.settle_rejects(tokyo, catalog, "page may be null"),
        stream.make_tables,
        lambda: lake.expire_all(tokyo, catalog),
        lambda: repair.repair(tokyo, catalog),
    ):
        with pytest.raises(lake.LakeError, match=other):
            work()
    lake.refuse_other_zone(settings, [CLICKS])
    assert lake.runs(settings) == []
    # A report goes out beside a damaged log, of which its part says so; the next log tells the zone.
    broken = replace(CLICKS, name="broken")
    lake.table(settings, broken).create(StructType().add("id", "string").add(day))
    next((lake.table(settings, broken).path / "_delta_log").glob("*.json")).write_text("{")
    lake.refuse_other_zone(settings, [broken])
    with pytest.raises(lake.LakeError, match=other):
        lake.refuse_other_zone(tokyo, [broken, CLICKS])
    # One that was cut off in this zone does not go on in another.
    monkeypatch.setattr(settle, "code_of", lambda _: "")
    cut_off = recorded(settings, "r1", "replay", (BEFORE,), state="running")
    with pytest.raises(lake.LakeError, match=other):
        settle.replay(tokyo, catalog, "a mistake", name="r1")
    assert lake.runs(settings) == [cut_off]


CLICKS = Topic("clicks", key="id", partitions=1, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL", event_time="at")


@rollup(reads={"clicks": CLICKS}, key=("minute",), time="minute", merge={"n": "max"})
def minutes(clicks): ...


@view(reads={"minutes": minutes}, key=("hour",), time="hour")
def hours(minutes): ...


CATALOG = Catalog({"clicks": CLICKS}, {"minutes": minutes}, {"hours": hours})
ROWS = pa.schema([("n", pa.int64()), ("day", pa.date32())])


def rows(numbers: dict[int, date]) -> pa.Table:
    return pa.Table.from_pylist([{"n": n, "day": day} for n, day in numbers.items()], ROWS)


@pytest.fixture
def lived(settings: Any) -> Any:
    """Three days of which the stream has appended batches 0 to 5: of yesterday 2 to 4, of today 5."""
    days = (BEFORE, BEFORE, YESTERDAY, YESTERDAY, YESTERDAY, TODAY)
    for declared in (minutes, hours):
        table = lake.table(settings, declared)
        table.create(StructType().add("n", "long").add("day", "date"))
        for seq, day in enumerate(days):
            batch = lake.Batch("main", seq, seq)
            lake.append(table, batch, lake.write_arrow(table, batch.folder, rows({seq: day})))
    return settings


def staged(settings: Any, name: str, kind: str, seq: int, days: tuple[date, ...], first: int, **more: Any) -> lake.Run:
    """A run with a row of each of its days, numbered from `first`; the rollup has one of each day that was not over, too. From
    zero there are none."""
    run = recorded(settings, name, kind, days, seq, **more)
    for declared in (minutes, hours):
        numbers = dict(enumerate(run.days_of(declared) if first else (), first))
        write_deltalake(lake.staging(lake.table(settings, declared), name), rows(numbers), partition_by=["day"])
        run.tables[declared.name] = {"gate": "passed", "reasons": [], "warnings": [], "checks": 1, "rows": len(numbers)}
    lake.save(settings, run)
    return run


def read(settings: Any) -> dict[str, dict[date, list[int]]]:
    """By table and day what readers have."""
    found: dict[str, dict[date, list[int]]] = {"minutes": {}, "hours": {}}
    for declared in (minutes, hours):
        for r in lake.table(settings, declared).delta().to_pyarrow_table().sort_by("n").to_pylist():
            found[declared.name].setdefault(r["day"], []).append(r["n"])
    return found


@pytest.mark.parametrize("open_day", [True, False])
def test_replay_that_a_night_has_overtaken_is_published_by_the_commands_that_it_says(lived, open_day):
    #   batches   0   1   2   3   4   5
    #             before| yesterday |today
    #                           ▲   ▲ the pin of the replay, and of the night
    settings, over = lived, (BEFORE,) if open_day else (BEFORE, YESTERDAY)
    waits = staged(settings, "replay-1", "replay", 3, over, 20, open_days=[str(YESTERDAY)] if open_day else [])
    staged(settings, "night-1", "settle", 4, (YESTERDAY,), 30)
    settle.publish(settings, CATALOG, "night-1")
    before = read(settings)
    with pytest.raises(lake.LakeError, match=rf"read stream main up to batch 3, but {YESTERDAY} of .*; it need not") as refused:
        settle.publish(settings, CATALOG, waits.id)
    assert read(settings) == before
    commands = "tidemark rollback night-1, tidemark publish replay-1, tidemark settle --day"
    assert str(refused.value).endswith(f"settle again what was taken back: {commands} {YESTERDAY}")

    settle.rollback(settings, CATALOG, "night-1", "the replay first")
    settle.publish(settings, CATALOG, "replay-1")
    assert read(settings)["minutes"] == {BEFORE: [20], YESTERDAY: [4, 21], TODAY: [5]}
    assert read(settings)["hours"] == {BEFORE: [20], YESTERDAY: [2, 3, 4] if open_day else [21], TODAY: [5]}
    staged(settings, "night-2", "settle", 5, (YESTERDAY,), 40)
    settle.publish(settings, CATALOG, "night-2")
    assert read(settings) == {name: {BEFORE: [20], YESTERDAY: [40], TODAY: [5]} for name in ("minutes", "hours")}


def test_replay_that_two_nights_have_overtaken_says_the_newest_first_and_each_once(lived):
    waits = staged(lived, "replay-1", "replay", 3, (BEFORE,), 20, open_days=[str(YESTERDAY)])
    for name, seq, days in (("night-1", 4, (YESTERDAY,)), ("night-2", 5, (BEFORE, YESTERDAY))):
        staged(lived, name, "settle", seq, days, 30 + seq)
        settle.publish(lived, CATALOG, name)
    commands = f"tidemark rollback night-2, tidemark rollback night-1, tidemark publish replay-1, tidemark settle --day {BEFORE}"
    with pytest.raises(lake.LakeError, match=rf"{commands} --day {YESTERDAY}$"):
        settle.publish(lived, CATALOG, waits.id)
    for name in ("night-2", "night-1"):
        settle.rollback(lived, CATALOG, name, "the replay first")
    assert {p.table for p in settle.publish(lived, CATALOG, waits.id) if p.version} == {"minutes", "hours"}


@pytest.mark.parametrize("kind", ["settle", "replay"])
def test_replay_that_a_night_has_overtaken_on_which_another_lies_says_that_one_first_and_its_days_too(lived, kind):
    waits = staged(lived, "replay-1", "replay", 3, (BEFORE,), 20)
    for name, seq, days in (("night-1", 4, (BEFORE, YESTERDAY)), ("the-other", 5, (YESTERDAY,))):
        staged(lived, name, kind if name == "the-other" else "settle", seq, days, 30 + seq)
        settle.publish(lived, CATALOG, name)
    commands = (
        f"tidemark rollback the-other, tidemark rollback night-1, tidemark publish replay-1, tidemark settle --day {BEFORE}"
    )
    with pytest.raises(lake.LakeError, match=rf"{commands} --day {YESTERDAY}$"):
        settle.publish(lived, CATALOG, waits.id)
    for name in ("the-other", "night-1"):
        settle.rollback(lived, CATALOG, name, "the replay first")
    assert {p.table for p in settle.publish(lived, CATALOG, waits.id) if p.version} == {"minutes", "hours"}


def test_replay_takes_nothing_newer_back_that_could_not_be_computed_again(lived, monkeypatch):
    waits = staged(lived, "replay-1", "replay", 3, (BEFORE, YESTERDAY), 20)
    staged(lived, "night-1", "settle", 4, (BEFORE, YESTERDAY), 30)
    settle.publish(lived, CATALOG, "night-1")
    monkeypatch.setattr(settle, "held_from", lambda *_: (YESTERDAY, "the log keeps a day"))
    said = rf"of {BEFORE} could not be computed again, for the log keeps a day\. Drop this one: tidemark drop replay-1$"
    with pytest.raises(lake.LakeError, match=said):
        settle.publish(lived, CATALOG, waits.id)


def test_older_run_is_not_published_over_one_that_is_published_while_it_stands_before_its_commit(lived, monkeypatch):
    """As where its process was frozen: who reads the records before its turn knows nothing of the other."""
    older, commit = staged(lived, "older", "settle", 3, (YESTERDAY,), 20), lake.commit

    def after_another(table, decide, **more):
        monkeypatch.setattr(lake, "commit", commit)
        staged(lived, "newer", "settle", 4, (YESTERDAY,), 30)
        settle.publish(lived, CATALOG, "newer")
        return commit(table, decide, **more)

    monkeypatch.setattr(lake, "commit", after_another)
    with pytest.raises(lake.LakeError, match=rf"up to batch 3, but {YESTERDAY} of .* was published by run newer with batch 4; "):
        settle.publish(lived, CATALOG, older.id)
    assert read(lived) == {name: {BEFORE: [0, 1], YESTERDAY: [30], TODAY: [5]} for name in ("minutes", "hours")}


@pytest.mark.parametrize(
    ("kind", "newer", "way"),
    [
        ("replay", "replay", "run newer is the newer replay, so drop this one: tidemark drop older"),
        ("settle", "replay", f"settle again: tidemark settle --day {YESTERDAY}"),
        ("settle", "settle", f"settle again: tidemark settle --day {YESTERDAY}"),
    ],
)
@pytest.mark.parametrize("pin", [3, 4])  # of the older: what mends rejects, or is settled again of a still stream, has the same
def test_older_run_says_what_to_do_instead(lived, kind, newer, way, pin):
    before = (NOW - timedelta(minutes=1)).isoformat()
    staged(lived, "older", kind, pin, (YESTERDAY,), 20, created=before)
    staged(lived, "newer", newer, 4, (YESTERDAY,), 30)
    settle.publish(lived, CATALOG, "newer")
    later = ", which was begun later" if pin == 4 else ""
    with pytest.raises(lake.LakeError, match=rf"but {YESTERDAY} of .* was published by run newer with batch 4{later}; {way}$"):
        settle.publish(lived, CATALOG, "older")


def test_older_run_of_several_days_says_all_of_them_for_none_of_it_is_published(lived):
    staged(lived, "older", "settle", 3, (BEFORE, YESTERDAY), 20)
    staged(lived, "newer", "settle", 4, (YESTERDAY,), 30)
    settle.publish(lived, CATALOG, "newer")
    with pytest.raises(lake.LakeError, match=rf"settle again: tidemark settle --day {BEFORE} --day {YESTERDAY}$"):
        settle.publish(lived, CATALOG, "older")


CHECK = "n at least 1"


def failed(settings: Any, run: lake.Run, *checks: str) -> lake.Run:
    """The run with these checks failed of its view."""
    run.tables["hours"] |= {"gate": "failed", "reasons": list(checks), "failed": list(checks)}
    lake.save(settings, run)
    return run


@pytest.mark.parametrize(("days", "kept"), [(2, True), (15, False)])
@pytest.mark.parametrize("before", ["held back", "taken back"])
def test_what_can_still_be_published_is_swept_no_sooner_than_what_can_be_taken_back_and_then_refused(lived, before, days, kept):
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    if before == "held back":
        settle.publish(lived, CATALOG, failed(lived, run, CHECK).id)
    else:
        settle.publish(lived, CATALOG, run.id)
        settle.rollback(lived, CATALOG, run.id, "a mistake")
    tables, seen = [lake.table(lived, declared) for declared in (minutes, hours)], read(lived)
    for table in tables:  # an hour of history goes by
        names = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
        table.delta().alter.set_table_properties(dict.fromkeys(names, "interval 0 days"))
        table.delta().create_checkpoint()
        table.delta().cleanup_metadata()
    lake.sweep(lived, tables, NOW + timedelta(days=days))
    over = {"over": [CHECK], "reason": "it was a holiday"} if before == "held back" else {}
    if kept:
        settle.publish(lived, CATALOG, run.id, **over)
        assert [read(lived)[name][YESTERDAY] for name in ("minutes", "hours")] == [[30], [30]]
    else:
        with pytest.raises(lake.LakeError, match=r"what run night-1 staged of table .*s is gone; settle the days again"):
            settle.publish(lived, CATALOG, run.id, **over)
        assert read(lived) == seen


def test_person_s_word_over_one_of_two_failed_checks_is_refused(lived):
    run, seen = failed(lived, staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), CHECK, "n at most 9"), read(lived)
    sentence = rf"nothing of run night-1 is published over {CHECK}. hours is held back: {CHECK}; n at most 9. Name every check"
    settle.publish(lived, CATALOG, run.id, only=["minutes"])
    with pytest.raises(settle.SettleError, match=sentence):
        settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    assert read(lived)["hours"] == seen["hours"]
    settle.publish(lived, CATALOG, run.id, over=[CHECK, "n at most 9"], reason="it was a holiday")
    assert read(lived)["hours"][YESTERDAY] == [30]


def test_person_s_word_that_was_refused_is_not_in_force_when_another_check_is_named(lived):
    """Each table that is published was published over checks that one and the same person named."""
    run, seen = failed(lived, staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), CHECK), read(lived)
    run.tables["minutes"] |= {"gate": "failed", "reasons": ["n at most 9"], "failed": ["n at most 9"]}
    run.tables["hours"]["reads"] = ["minutes"]
    lake.save(lived, run)
    refused = r"nothing of run night-1 is published over n at least 1\. hours is held back: n at most 9\. Name every"
    with pytest.raises(settle.SettleError, match=refused):
        settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    assert not any("forced" in said for said in lake.run_of(lived, run.id).tables.values())
    settle.publish(lived, CATALOG, run.id, over=["n at most 9"], reason="a new shop")
    assert (read(lived)["minutes"][YESTERDAY], read(lived)["hours"]) == ([30], seen["hours"])
    assert lake.run_of(lived, run.id).tables["minutes"]["forced"] == {"checks": ["n at most 9"], "reason": "a new shop"}
    settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    assert read(lived)["hours"][YESTERDAY] == [30]


@pytest.mark.parametrize("moment", [None, "published"], ids=["done", "killed before it was noted"])
def test_person_s_word_over_what_is_published_already_leaves_the_first_one_s_reason(lived, moment):
    run = failed(lived, staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), CHECK)
    settle.publish(lived, CATALOG, run.id, only=["minutes"])
    if moment:
        kill(lived, moment, over=[CHECK], reason="it was a holiday")
    else:
        settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    again = settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="another")
    assert [(p.table, p.version, p.blocked) for p in again] == [("minutes", None, ()), ("hours", None, ())]
    said = {"checks": [CHECK], "reason": "it was a holiday"}
    history = json.loads(lake.table(lived, hours).delta().history(1)[0]["userMetadata"])
    assert (lake.run_of(lived, run.id).tables["hours"]["forced"], history["over"]) == (said, {"hours": said})


def test_person_s_word_over_a_failed_check_of_a_topic_stays_in_force_once_what_reads_it_is_published(lived):
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    run.tables["clicks"] = {"gate": "failed", "reasons": [CHECK], "failed": [CHECK], "warnings": [], "checks": 1, "rows": None}
    for name, reads in (("minutes", ["clicks"]), ("hours", ["clicks", "minutes"])):
        run.tables[name] |= {"gate": "blocked", "reasons": ["it reads clicks"], "reads": reads}
    lake.save(lived, run)
    settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="another")
    said = {"checks": [CHECK], "reason": "it was a holiday"}
    history = json.loads(lake.table(lived, hours).delta().history(1)[0]["userMetadata"])
    assert (lake.run_of(lived, run.id).tables["clicks"]["forced"], history["over"]) == (said, {"clicks": said})
    assert [p.blocked for p in settle.publish(lived, CATALOG, run.id)] == [(), ()]


def test_person_s_word_is_for_one_publication_and_has_to_be_said_again_once_that_is_taken_back(lived):
    run, seen = failed(lived, staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), CHECK), read(lived)
    settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    assert [(p.table, bool(p.blocked)) for p in settle.publish(lived, CATALOG, run.id)] == [("minutes", False), ("hours", True)]
    assert read(lived)["hours"] == seen["hours"]
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    settle.publish(lived, CATALOG, staged(lived, "night-2", "settle", 5, (YESTERDAY,), 40).id)
    before = lake.run_of(lived, run.id).tables
    with pytest.raises(lake.LakeError, match="was published by run night-2"):
        settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="another")
    assert lake.run_of(lived, run.id).tables == before
    assert not any("forced" in said for said in before.values())


def test_run_is_taken_back_and_dropped_without_a_table_that_is_declared_no_more(lived):
    run, left = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), Catalog({"clicks": CLICKS}, {"minutes": minutes}, {})
    seen = read(lived)
    settle.publish(lived, CATALOG, run.id)
    with capture_logs() as said:
        settle.rollback(lived, left, run.id, "a mistake")
    assert [one["tables"] for one in said if "no pipeline declares it" in one["event"]] == [["hours"]]
    lake.drop(lived, left, lake.run_of(lived, run.id))
    assert (read(lived)["minutes"], read(lived)["hours"][YESTERDAY]) == (seen["minutes"], [30])
    settle.rollback(lived, CATALOG, run.id, "it is declared again")
    assert read(lived) == seen


def test_publication_leaves_a_table_that_is_declared_no_more_and_says_so(lived):
    run, left = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), Catalog({"clicks": CLICKS}, {"minutes": minutes}, {})
    before = read(lived)["hours"]
    with capture_logs() as said:
        assert [p.table for p in settle.publish(lived, left, run.id)] == ["minutes"]
    assert [one["tables"] for one in said if "no pipeline declares it" in one["event"]] == [["hours"]]
    assert (read(lived)["minutes"][YESTERDAY], read(lived)["hours"]) == ([30], before)
    with capture_logs() as said:
        settle.publish(lived, CATALOG, run.id)
    assert (read(lived)["hours"][YESTERDAY], said) == ([30], [])


#   by table: its checks, its warnings, why its gate has failed, what its history says of it
@pytest.mark.parametrize(
    ("of", "checks", "warnings", "reasons", "verdict"),
    [
        ("minutes", 7, 0, [f'minutes: "{CHECK}" failed on 3 rows'], "6 of 7 checks passed, published over 1"),
        ("minutes", 7, 1, [f'minutes: "{CHECK}" failed on 3 rows'], "6 of 7 checks passed, published over 1, 1 warnings"),
        ("hours", 7, 0, ["hours reads minutes, which failed its checks"], "passed 7 checks"),
        ("hours", 7, 0, [f'days: "{CHECK}" failed on 3 rows'], "passed 7 checks"),
        ("hours", 7, 2, [], "passed 7 checks, 2 warnings"),
    ],
    ids=["its own", "a warning too", "what it reads", "what it is made of and was left out", "none"],
)
def test_history_counts_the_checks_that_a_table_was_published_over(lived, of, checks, warnings, reasons, verdict):
    run = failed(lived, staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), CHECK)
    run.tables[of] |= {"checks": checks, "warnings": ["a warning"] * warnings, "gate": "passed", "reasons": reasons}
    if reasons:
        run.tables[of] |= {"gate": "failed", "failed": [CHECK]}
    lake.save(lived, run)
    settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    said = json.loads(lake.table(lived, CATALOG[of]).delta().history(1)[0]["userMetadata"])
    assert said["verdict"] == verdict


def test_person_s_word_over_a_failed_check_publishes_nothing_over_one_that_could_not_be_asked(lived):
    run, seen = failed(lived, staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), CHECK), read(lived)
    run.tables["hours"]["reasons"].append("n at most 9 could not be asked")
    lake.save(lived, run)
    settle.publish(lived, CATALOG, run.id, only=["minutes"])
    with pytest.raises(settle.SettleError, match=r"nothing of run night-1 is published over n at least 1\. hours is held"):
        settle.publish(lived, CATALOG, run.id, over=[CHECK], reason="it was a holiday")
    assert read(lived)["hours"] == seen["hours"]


def test_run_of_which_every_table_is_held_back_waits_after_a_publication_as_before(lived):
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    for said in run.tables.values():
        said |= {"gate": "failed", "reasons": [CHECK], "failed": [CHECK]}
    lake.save(lived, run)
    assert all(p.blocked for p in settle.publish(lived, CATALOG, run.id))
    assert lake.run_of(lived, run.id).undecided
    lake.drop(lived, CATALOG, lake.run_of(lived, run.id))


def test_night_that_goes_on_does_not_undo_a_roll_back_and_a_person_may(lived):
    run, seen = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), read(lived)
    settle.publish(lived, CATALOG, run.id, only=["minutes"], again=False)
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    refused = r"run night-1 was rolled back \(a mistake\); to publish it all the same: tidemark publish night-1"
    with pytest.raises(settle.SettleError, match=refused):
        settle.publish(lived, CATALOG, run.id, only=["hours"], again=False)
    assert read(lived) == seen
    settle.publish(lived, CATALOG, run.id)
    assert read(lived)["hours"][YESTERDAY] == [30]


@pytest.mark.parametrize(("swap", "back"), [("publish", False), ("roll_back", True)])
def test_who_publishes_a_run_or_takes_it_back_has_its_record_alone(lived, monkeypatch, swap, back):
    run, swapped, held = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), getattr(lake, swap), []
    if back:
        settle.publish(lived, CATALOG, run.id)
    turn = lived.lake_path / "runs" / ".night-1.publishing"
    monkeypatch.setattr(lake, swap, lambda *said, **more: (held.append(lake.is_held(turn)), swapped(*said, **more))[1])
    settle.rollback(lived, CATALOG, run.id, "a mistake") if back else settle.publish(lived, CATALOG, run.id)
    assert held == [True, True]


APART = Catalog({"clicks": CLICKS}, {"minutes": minutes}, {"hours": replace(hours, reads={"minutes": CLICKS})})
"""Two tables of which neither reads the other."""


def test_night_is_taken_back_though_a_replay_of_a_view_alone_was_published_since_to_which_the_day_was_not_over(lived):
    waits = staged(lived, "replay-1", "replay", 3, (BEFORE,), 20, open_days=[str(YESTERDAY)])
    del waits.tables["minutes"]
    lake.save(lived, waits)
    seen, night = read(lived), staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    settle.publish(lived, CATALOG, night.id)
    settle.publish(lived, CATALOG, waits.id)
    settle.rollback(lived, CATALOG, night.id, "a mistake")
    assert read(lived) == {**seen, "hours": {**seen["hours"], BEFORE: [20]}}


def test_publishing_twice_leaves_the_record_as_it_was(lived):
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    record = lived.lake_path / "runs" / "night-1.json"
    settle.publish(lived, CATALOG, run.id, only=["minutes"])
    first = lake.run_of(lived, run.id).published
    settle.publish(lived, CATALOG, run.id)
    told = record.read_bytes()
    for only in ([], ["minutes"], ["hours"]):
        settle.publish(lived, CATALOG, run.id, only=only)
    assert record.read_bytes() == told
    assert first is not None and first < (lake.run_of(lived, run.id).published or "")


def test_publication_whose_record_was_cut_off_is_published_once_it_is_told_again(lived):
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    settle.publish(lived, CATALOG, run.id)
    known = lake.run_of(lived, run.id)
    lake.save(lived, replace(known, state="staged", published=None))  # killed behind the mark of the last table
    settle.publish(lived, CATALOG, run.id)
    again = lake.run_of(lived, run.id)
    assert (again.state, again.published) == ("published", known.published)


def test_publishing_again_what_a_newer_run_has_replaced_does_nothing(lived):
    for name, seq, first in (("night-1", 3, 30), ("night-2", 4, 40)):
        settle.publish(lived, CATALOG, staged(lived, name, "settle", seq, (YESTERDAY,), first).id)
    seen = read(lived)
    assert [p.version for p in settle.publish(lived, CATALOG, "night-1")] == [None, None]
    assert read(lived) == seen


@pytest.mark.parametrize("back", [False, True], ids=["published in part", "taken back"])
def test_what_may_be_published_yet_has_no_files_merged_across_its_pin(lived, spark, back):
    run, last = staged(lived, "replay-1", "replay", 4, (BEFORE,), 30, open_days=[str(YESTERDAY)]), 24
    table = lake.Table(lake.table(lived, minutes).root, "rollups/minutes", None)
    for seq in range(6, last + 1):
        batch = lake.Batch("main", seq, seq)
        lake.append(table, batch, lake.write_arrow(table, batch.folder, rows({seq: YESTERDAY})))
    settle.publish(lived, APART, run.id, only=["hours", "minutes"] if back else ["hours"])
    if back:
        settle.rollback(lived, APART, run.id, "a mistake")
    assert lake.compact(spark, lived, table, None, {"main": last})
    settle.publish(lived, APART, run.id)
    assert read(lived)["minutes"] == {BEFORE: [30], YESTERDAY: [*range(6, last + 1), 31], TODAY: [5]}
    assert lake.parting(lived) == []


def test_rest_of_a_replay_is_not_published_over_rejects_that_were_mended_since(lived):
    earlier = (NOW - timedelta(hours=1)).isoformat()  # the replay has read them as they were mended
    recorded(lived, "rejects-0", "rejects", state="done", created=earlier, mended=[str(YESTERDAY)])
    run = staged(lived, "replay-1", "replay", 4, (BEFORE,), 30, open_days=[str(YESTERDAY)])
    settle.publish(lived, APART, run.id, only=["hours"])
    seen = read(lived)
    recorded(lived, "rejects-1", "rejects", state="done", created=datetime.now(UTC).isoformat(), mended=[str(YESTERDAY)])
    refused = rf"read the rejects of {YESTERDAY} as such, and run rejects-1 has mended them since: their rows of minutes would"
    with pytest.raises(lake.LakeError, match=f"{refused} be lost; tidemark replay$"):
        settle.publish(lived, APART, run.id)
    assert read(lived) == seen
    settle.rollback(lived, APART, run.id, "a mistake")


def test_two_publications_of_one_run_leave_the_marks_of_both(lived):
    run, go = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), threading.Barrier(2)

    def publish(name: str) -> None:
        go.wait(30)
        settle.publish(lived, APART, run.id, only=[name])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(publish, ("minutes", "hours")))
    assert all(said.get("published") for said in lake.run_of(lived, run.id).tables.values())


def test_roll_back_of_which_one_table_cannot_go_back_takes_none_back(lived):
    run, minutes_ = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), lake.table(lived, minutes)
    replaced = [f for f in minutes_.files() if f.day == YESTERDAY]
    settle.publish(lived, CATALOG, run.id)
    seen = read(lived)
    for file in replaced:
        (minutes_.path / file.path).unlink()
    with pytest.raises(lake.LakeError, match="3 files that run night-1 replaced in rollups/minutes are deleted"):
        settle.rollback(lived, CATALOG, run.id, "a mistake")
    assert (read(lived), lake.run_of(lived, run.id).state) == (seen, "published")


@pytest.mark.parametrize("left", ["", "{cut"])
def test_what_was_staged_and_has_lost_an_entry_of_its_log_is_not_published_and_empties_no_day(lived, left):
    run, view_ = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), lake.table(lived, hours)
    own, seen = lake.staged_table(view_, run.id), read(lived)
    shutil.rmtree(own.path)
    DeltaTable.create(own.path, view_.delta().schema(), partition_by=["day"], configuration=lake.STAGED)
    lake.append(own, lake.Batch(run.id, 0, 0), lake.write_arrow(own, "chunk-0", rows({30: YESTERDAY})))
    entry = own.entry(1)
    entry.write_text(left)
    with pytest.raises(lake.LakeError, match=rf"{entry} is damaged .* or settle the days again$"):
        settle.publish(lived, CATALOG, run.id)
    entry.unlink()
    with pytest.raises(
        lake.LakeError, match="night-1 staged 1 rows of table views/hours, and 0 are there; settle the days again"
    ):
        settle.publish(lived, CATALOG, run.id)
    assert read(lived) == seen


@pytest.mark.parametrize("lost", ["what was staged of the view", "the view"])
def test_publication_of_which_one_table_is_refused_changes_none_and_its_run_can_be_dropped(lived, lost):
    run, view_ = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), lake.table(lived, hours)
    version = lake.table(lived, minutes).delta().version()
    shutil.rmtree(view_.path if lost == "the view" else lake.staging(view_, run.id))
    with pytest.raises(lake.LakeError, match="what run night-1 staged of table views/hours is gone; settle the days again"):
        settle.publish(lived, CATALOG, run.id)
    assert lake.table(lived, minutes).delta().version() == version
    lake.drop(lived, CATALOG, lake.run_of(lived, run.id))
    assert lake.parting(lived) == []


def test_publication_of_which_the_second_table_was_rewritten_by_someone_changes_none(lived):
    @rollup(reads={"clicks": CLICKS}, key=("second",), time="second", merge={"n": "max"})
    def seconds(clicks): ...

    run, table, before = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), lake.table(lived, seconds), read(lived)
    table.create(StructType().add("n", "long").add("day", "date"))
    write_deltalake(table.path, rows({7: YESTERDAY}), mode="append")
    write_deltalake(lake.staging(table, run.id), rows({30: YESTERDAY}), partition_by=["day"])
    run.tables["seconds"] = run.tables["minutes"]
    lake.save(lived, run)
    with pytest.raises(lake.LakeError, match="of rollups/seconds was written by someone else after the pin of run night-1"):
        settle.publish(lived, Catalog({"clicks": CLICKS}, {"minutes": minutes, "seconds": seconds}, {}), run.id)
    assert read(lived) == before


def test_publication_replaces_what_another_stream_has_added_that_the_run_has_read(lived):
    table, batch = lake.table(lived, minutes), lake.Batch("second", 0, 0)
    lake.append(table, batch, lake.write_arrow(table, batch.folder, rows({9: YESTERDAY})))
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    run.pins["second"] = replace(run.pins["main"], stream="second", seq=0)
    lake.save(lived, run)
    settle.publish(lived, CATALOG, run.id)
    assert read(lived)["minutes"][YESTERDAY] == [30]


def test_table_that_is_published_alone_brings_what_it_reads(lived):
    run = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30)
    assert [p.table for p in settle.publish(lived, CATALOG, run.id, only=["hours"])] == ["minutes", "hours"]


def test_roll_back_of_a_run_before_one_whose_record_was_moved_away_says_to_settle_again_and_takes_no_table_back(lived):
    staged(lived, "night-1", "settle", 3, (YESTERDAY,), 30)
    settle.publish(lived, CATALOG, "night-1")
    later, view_ = staged(lived, "night-2", "settle", 4, (YESTERDAY,), 40), lake.table(lived, hours)
    shutil.rmtree(lake.staging(view_, later.id))  # of the view no file tells of it: its day turned out empty
    write_deltalake(lake.staging(view_, later.id), rows({}), partition_by=["day"])
    later.tables["hours"]["rows"] = 0
    lake.save(lived, later)
    settle.publish(lived, CATALOG, later.id)
    (lived.lake_path / "runs" / f"{later.id}.json").unlink()
    seen = read(lived)
    with pytest.raises(lake.LakeError, match=rf"nobody knows any more.* tidemark settle --day {YESTERDAY}$"):
        settle.rollback(lived, CATALOG, "night-1", "a mistake")
    assert (read(lived), lake.run_of(lived, "night-1").state) == (seen, "published")
    settle.publish(lived, CATALOG, staged(lived, "night-3", "settle", 4, (YESTERDAY,), 50).id)
    settle.rollback(lived, CATALOG, "night-3", "a mistake")
    assert read(lived) == seen


def killed(settings: Any, moment: str, said: dict[str, Any]) -> None:
    """A process that publishes a run or takes it back, and is killed once its first table is swapped."""
    os.setsid()
    os.environ["TIDEMARK_FAILPOINT"] = moment
    if moment == "published":
        settle.publish(settings, CATALOG, "night-1", **said)
    settle.rollback(settings, CATALOG, "night-1", "a mistake")


def kill(settings: Any, moment: str, **said: Any) -> None:
    one = multiprocessing.get_context("spawn").Process(target=killed, args=(settings, moment, said))
    one.start()
    one.join(60)
    assert one.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("first", [30, 0], ids=["a row", "an empty day"])
def test_publication_that_was_killed_before_it_was_noted_is_not_dropped_nor_swept_and_can_be_taken_back(lived, first):
    run, seen = staged(lived, "night-1", "settle", 4, (YESTERDAY,), first), read(lived)
    kill(lived, "published")
    swapped = {day: numbers for day, numbers in {**seen["minutes"], YESTERDAY: [first] if first else []}.items() if numbers}
    assert read(lived) == {**seen, "minutes": swapped}
    with pytest.raises(lake.LakeError, match="run night-1 is published; take it back first: tidemark rollback night-1"):
        lake.drop(lived, CATALOG, lake.run_of(lived, run.id))
    history_goes_by(lake.table(lived, minutes))
    lake.sweep(lived, [lake.table(lived, minutes)], NOW + timedelta(days=2))
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    assert read(lived) == seen
    lake.drop(lived, CATALOG, lake.run_of(lived, run.id))
    settle.publish(lived, CATALOG, staged(lived, "night-2", "settle", 4, (YESTERDAY,), first).id)
    settle.rollback(lived, CATALOG, "night-2", "the same")
    settle.publish(lived, CATALOG, "night-2")
    assert read(lived)["minutes"].get(YESTERDAY) == ([first] if first else None)


@pytest.mark.parametrize("first", [30, 0], ids=["a row", "an empty day"])
def test_run_is_not_dropped_while_somebody_publishes_it(lived, first):
    run, turn = staged(lived, "night-1", "settle", 4, (YESTERDAY,), first), lake.publishing(lived, "night-1")
    with ThreadPoolExecutor(1) as pool:
        with turn:
            dropped = pool.submit(lake.drop, lived, CATALOG, lake.run_of(lived, run.id))
            settle.swap_in(lived, CATALOG, lake.run_of(lived, run.id), {"minutes", "hours"})
        with pytest.raises(lake.LakeError, match="run night-1 is published"):
            dropped.result()
    assert read(lived)["minutes"].get(YESTERDAY) == ([first] if first else None)


@pytest.mark.parametrize("first", [30, 0], ids=["a row", "an empty day"])
def test_roll_back_that_was_killed_between_two_tables_is_finished(lived, first):
    run, seen = staged(lived, "night-1", "settle", 4, (YESTERDAY,), first), read(lived)
    settle.publish(lived, CATALOG, run.id)
    kill(lived, "rolled back")
    assert (read(lived)["hours"], read(lived)["minutes"].get(YESTERDAY)) == (seen["hours"], [first] if first else None)
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    assert (read(lived), lake.run_of(lived, run.id).state) == (seen, "rolled back")
    lake.drop(lived, CATALOG, lake.run_of(lived, run.id))


def history_goes_by(table: lake.Table) -> None:
    table.delta().alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 days"})
    table.delta().create_checkpoint()
    for entry in (table.path / "_delta_log").glob("*.json"):
        if entry != table.entry(table.delta().version()):
            entry.unlink()


@pytest.mark.parametrize("before", ["all of it, taken back", "its other table, long ago"])
def test_publication_that_was_killed_after_an_earlier_one_of_its_run_can_be_taken_back_after_a_sweep(lived, before):
    run, seen = staged(lived, "night-1", "settle", 4, (YESTERDAY,), 30), read(lived)
    if before.startswith("all"):
        settle.publish(lived, CATALOG, run.id)
        settle.rollback(lived, CATALOG, run.id, "a mistake")
    else:
        settle.publish(lived, APART, run.id, only=["hours"])
        run = lake.run_of(lived, run.id)
        run.published = run.tables["hours"]["published"] = (NOW - timedelta(days=13)).isoformat()
        lake.save(lived, run)
    kill(lived, "published")
    assert read(lived)["minutes"][YESTERDAY] == [30]
    history_goes_by(lake.table(lived, minutes))
    lake.sweep(lived, [lake.table(lived, minutes)], NOW + timedelta(days=2))
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    assert read(lived) == seen


def test_roll_back_that_was_killed_is_finished_after_what_came_back_was_merged(lived, spark):
    table = lake.Table(lake.table(lived, minutes).root, "rollups/minutes", None)  # of which no column is a time
    for seq in range(6, 24):
        batch = lake.Batch("main", seq, seq)
        lake.append(table, batch, lake.write_arrow(table, batch.folder, rows({seq: YESTERDAY})))
    staged(lived, "night-1", "settle", 30, (YESTERDAY,), 30)
    seen = read(lived)
    settle.publish(lived, CATALOG, "night-1")
    kill(lived, "rolled back:2")
    assert read(lived) == seen and lake.run_of(lived, "night-1").tables["minutes"]["published"]
    assert lake.compact(spark, lived, table, None, {"main": 30})
    settle.rollback(lived, CATALOG, "night-1", "a mistake")
    assert (read(lived), lake.run_of(lived, "night-1").state) == (seen, "rolled back")


def test_publication_that_was_killed_is_not_taken_back_from_under_a_newer_one_of_no_row(lived):
    run = staged(lived, "night-1", "settle", 3, (BEFORE, YESTERDAY), 30)
    kill(lived, "published")
    settle.publish(lived, CATALOG, staged(lived, "night-2", "settle", 4, (YESTERDAY,), 0).id)
    seen = read(lived)
    with pytest.raises(lake.LakeError, match="published again by run night-2, after run night-1; roll that one back first"):
        settle.rollback(lived, CATALOG, run.id, "a mistake")
    assert read(lived) == seen and YESTERDAY not in seen["minutes"]


def test_older_run_is_not_published_over_a_newer_one_of_no_row_that_was_killed(lived):
    older = staged(lived, "older", "settle", 3, (YESTERDAY,), 20)
    staged(lived, "night-1", "settle", 4, (YESTERDAY,), 0)
    kill(lived, "published")
    seen = read(lived)
    with pytest.raises(lake.LakeError, match=f"but {YESTERDAY} of minutes was published by run night-1 with batch 4"):
        settle.publish(lived, CATALOG, older.id)
    assert read(lived) == seen and YESTERDAY not in seen["minutes"]


@pytest.mark.parametrize("kind", ["settle", "replay"])
def test_run_that_was_taken_back_is_not_published_again_over_rejects_that_were_mended_since(lived, kind):
    run = staged(lived, "night-1", kind, 4, (BEFORE, YESTERDAY), 30)
    settle.publish(lived, CATALOG, run.id)
    settle.rollback(lived, CATALOG, run.id, "a mistake")
    later = datetime.now(UTC).isoformat()
    recorded(lived, "rejects-1", "rejects", (BEFORE,), state="staged", created=later, mended=[str(YESTERDAY)])
    seen = read(lived)
    with pytest.raises(lake.LakeError, match=f"read the rejects of {YESTERDAY} as such, and run rejects-1 has mended them since"):
        settle.publish(lived, CATALOG, run.id)
    assert read(lived) == seen


#   batches   0   1   2   3   4   5    of ten records each
@pytest.mark.parametrize(
    ("step", "pin", "rolled"),
    [
        (speed.STEP, None, [(0, 5)]),
        (30, None, [(0, 2), (3, 5)]),
        (speed.STEP, 3, [(0, 3), (4, 5)]),
        (30, 3, [(0, 2), (3, 3), (4, 5)]),
    ],
)
def test_what_a_new_rollup_lacks_is_rolled_in_steps_and_never_across_the_pin_of_what_waits(
    settings, spark, monkeypatch, step, pin, rolled
):
    monkeypatch.setattr(speed, "STEP", step)
    if pin:
        recorded(settings, "r1", "replay", (BEFORE,), pin)
    stream = object.__new__(speed.Stream)
    stream.settings, stream.spark, stream.name, stream.ledger = settings, spark, "main", lake.ledger(settings)
    stream.ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    common = {"stream": "main", "topic": "clicks", "partition": 0, "records": 10, "started_at": NOW, "day": TODAY}
    entered = [common | {"seq": n, "from_offset": 10 * n, "until_offset": 10 * n + 10} for n in range(6)]
    told = pa.Table.from_pylist(entered, pa.schema(stream.ledger.delta().schema()))
    lake.append(stream.ledger, lake.Batch("main", 0, 5), lake.write_arrow(stream.ledger, "live/main-0-5-x", told))
    steps = stream.steps(minutes, "main", -1, 5)
    assert [(s.lo, s.hi) for s in steps] == rolled
    assert [s.offsets for s in steps] == [{"clicks": {"0": [10 * lo, 10 * hi + 10]}} for lo, hi in rolled]
