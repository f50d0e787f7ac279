"""The DAGs `nightly`, `nightly_report` and `reprocess` by `dag.test()`, over runs that are staged already: what follows on gates
that hold and on one that fails, which day is reported, and who publishes.

Waiting and Spark are left out; gates, publications, decisions and what is told are the real ones.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from dag_runs import AT, Ended
from deltalake import DeltaTable, Schema, write_deltalake
from pydantic import SecretStr

from tidemark import airflow, compare, lake, settle
from tidemark import report as reports
from tidemark.compare import Difference
from tidemark.lake import Pin, Run, Table
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

DAY = date(2026, 11, 19)
COLUMNS = pa.schema([("pv", pa.int64()), ("day", pa.date32())])
LOG = pa.schema([("viewed_at", pa.timestamp("us", "UTC")), ("day", pa.date32())])
STAGED = ("page_quarters", "hourly_traffic", "site_hourly_traffic", "site_daily_traffic")
CHECK = "every hour of the day is present"


@pytest.fixture(scope="module")
def database(fresh_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of Airflow's that is migrated and empty."""
    empty = fresh_settings(tmp_path_factory.mktemp("database"))
    airflow.command(empty, "db", "migrate")
    return airflow.home(empty) / "airflow.db"


def test_database_that_does_not_answer_is_not_taken_for_one_without_the_connection(database: Path, settings: Settings) -> None:
    there = settings.model_copy(update={"airflow_database": SecretStr(f"sqlite:///{database}")})
    assert airflow.connection(there, "tidemark_dingtalk") is None
    away = settings.model_copy(update={"airflow_database": SecretStr("postgresql+psycopg2://a:b@127.0.0.1:1/airflow")})
    with pytest.raises(airflow.AirflowFailed, match="airflow db check ended with exit code 1"):
        airflow.connection(away, "tidemark_dingtalk")


def stage(table: Table, run: str, days: Sequence[date]) -> None:
    """Rows of a table, one a day, as a run has staged them."""
    if not table.exists:
        table.path.mkdir(parents=True)
        DeltaTable.create(table.path, Schema.from_arrow(COLUMNS), partition_by=["day"], configuration=lake.CONFIGURATION)
    rows = pa.Table.from_pylist([{"pv": 7, "day": day} for day in days], COLUMNS)
    write_deltalake(lake.staging(table, run), rows, partition_by=["day"])


def log(settings: Settings, folder: str, days: Sequence[date]) -> None:
    """One page view at noon of each of these days, in a file of the log each."""
    table = lake.table(settings, CATALOG["page_views"])
    if not table.exists:
        table.path.mkdir(parents=True)
        DeltaTable.create(table.path, Schema.from_arrow(LOG), partition_by=["day"])
    noons = [{"viewed_at": datetime(d.year, d.month, d.day, 12, tzinfo=UTC), "day": d} for d in days]
    adds = lake.write_arrow(table, folder, pa.Table.from_pylist(noons, LOG))
    lake.commit(table, lambda: (adds, {}))


def published(settings: Settings) -> set[str]:
    """The tables of which readers see a run's rows."""
    return {n for n in STAGED if DeltaTable(lake.table(settings, CATALOG[n]).path).to_pyarrow_table().num_rows}


def told(settings: Settings) -> list[dict[str, Any]]:
    file = settings.state / "alerts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def recorded(settings: Settings, name: str, kind: str, failed: str | None = None, days: Sequence[date] = (DAY,)) -> Run:
    """A run that has staged its tables, one of which may have failed a check, and whose record says so."""
    now = datetime.now(UTC).isoformat()
    pins = {"main": Pin("main", 3, {"page_views": {"0": 40}}, now)}
    run = Run(name, "staged", [str(day) for day in days], kind, now, "0", pins, kind=kind)
    for table in STAGED:
        stage(lake.table(settings, CATALOG[table]), name, days)
        said: dict[str, Any] = {"gate": "passed", "reasons": [], "warnings": [], "checks": 3, "rows": len(days)}
        if table == failed:
            said |= {"gate": "failed", "reasons": [f'{table}: "{CHECK}" failed on 12 rows'], "failed": [CHECK]}
        run.tables[table] = said
    lake.save(settings, run)
    return run


@pytest.fixture
def settings(settings: Settings, database: Path) -> Settings:
    """A home of its own, with an Airflow that is migrated."""
    airflow.home(settings).mkdir(parents=True)
    shutil.copy(database, airflow.home(settings))
    return settings


@pytest.fixture
def task(in_airflow: None, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """What a task does in this home, by the names of its DAG and its own."""
    monkeypatch.setenv("TIDEMARK_HOME", str(settings.home))
    monkeypatch.syspath_prepend(str(airflow.ROOT / "plugins"))
    return lambda dag, name: runpy.run_path(str(airflow.ROOT / "dags" / f"{dag}.py"))[dag]().get_task(name).python_callable


# --------------------------------------------------------------------------------------------------------------- nights


class Night:
    """A home with a lake, a run of `DAY` that is staged, one of the days before it where it is apart, and the DAG over them."""

    def __init__(self, settings: Settings, failed: str | None, before: Sequence[date]) -> None:
        self.settings, self.runs = settings, [recorded(settings, "settle-1", "settle", None if before else failed)]
        self.runs += [recorded(settings, "settle-2", "settle", failed, before)] if before else []
        self.run = self.runs[0]
        self.run.tables["site_hourly_traffic"]["compare"] = {"rows": 24, "unexplained": 2}
        lake.save(settings, self.run)
        said_by = settings.state / "runs" / f"nightly-{AT}"
        said_by.parent.mkdir(parents=True, exist_ok=True)
        said_by.write_text("\n".join(run.id for run in self.runs))

    def ends(self, *then: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
        ended = Ended(self.settings, ("nightly", {"day": str(DAY)}, "wait|days|settle"), *then)
        self.said, self.events, self.then = ended.log, ended.events, ended.runs[1:]
        return ended.runs[0]


@pytest.fixture
def night(settings: Settings) -> Callable[..., Night]:
    return lambda failed=None, before=(): Night(settings, failed, before)


@pytest.mark.long
def test_a_night_whose_gates_hold_publishes_every_table(night: Callable[..., Night]) -> None:
    green = night()
    ended = green.ends()
    assert ended["state"] == "success", green.said[-4000:]
    assert set(ended["tasks"].values()) == {"success"}
    assert published(green.settings) == set(STAGED)
    assert [(one["what"], one["title"]) for one in told(green.settings)] == [
        ("unexplained_difference", "site_hourly_traffic (2 rows) differ from what was live")
    ]


def test_a_gate_that_fails_holds_back_its_own_table_on_its_own_days_and_what_is_published_is_an_event_by_table_and_day(
    night: Callable[..., Night],
) -> None:
    days = [DAY - timedelta(days=n) for n in (2, 1)]
    red = night("site_hourly_traffic", days)
    before = red.settings.lake_path / "reports" / f"{days[0]}.html"
    before.parent.mkdir()
    before.write_text("of its own night")
    ended = red.ends(("nightly_report", {}, ""))
    assert ended["state"] == "failed"
    failed = f"site_hourly_traffic, {days[0]} to {days[1]} (2 days)"
    assert {t for t, state in ended["tasks"].items() if state == "failed"} == {f"each.gate[{failed}]"}
    [held] = [t for t, state in ended["tasks"].items() if state == "upstream_failed"]
    assert held.startswith("each.publish[")
    assert ended["tasks"]["each.publish[site_hourly_traffic]"] == ended["tasks"]["night"] == "success"
    own, older = ({n for n, t in lake.run_of(red.settings, r.id).tables.items() if t.get("published")} for r in red.runs)
    assert (own, older) == (set(STAGED), set(STAGED) - {"site_hourly_traffic"})
    assert sorted((e for e in red.events if e[0] != "tidemark_night"), key=lambda e: (e[0], e[1]["day"])) == [
        [f"tidemark_{table}", {"run": run.id, "day": day}]
        for table in sorted(STAGED)
        for run in reversed(red.runs)
        for day in run.days
        if run is red.run or table in older
    ]
    said = {one["what"]: one["text"] for one in told(red.settings)}
    assert set(said) == {"gate_failed", "unexplained_difference", "report"}
    again = f"settle its days again: tidemark settle --day {days[0]} --day {days[1]};"
    for part in (f'site_hourly_traffic: "{CHECK}" failed on 12 rows', again, "publish_over", red.runs[1].id):
        assert part in said["gate_failed"]
    reported(red, ["published in part", "published in part", "published"], [*days, DAY], heard_of=[days[0]])


@pytest.mark.long
def test_a_gate_that_is_marked_a_success_publishes_nothing_and_the_publication_says_why(night: Callable[..., Night]) -> None:
    marked = night("site_hourly_traffic")
    [ended] = Ended(marked.settings, ("nightly", {"day": str(DAY)}, "wait|days|settle|each.gate")).runs
    assert {t for t, state in ended["tasks"].items() if state == "failed"} == {"each.publish[site_hourly_traffic]"}
    assert published(marked.settings) == set(STAGED) - {"site_hourly_traffic"}


def test_a_settling_that_is_marked_a_success_before_it_has_a_run_is_said_to_have_left_none(
    settings: Settings, task: Callable[[str, str], Any]
) -> None:
    with pytest.raises(ValueError, match=r"^settle has left no run: .* Clear settle$"):
        task("nightly", "tables")(str(settings.state / "runs" / f"nightly-{AT}"))


@pytest.mark.long
def test_a_night_whose_run_was_rolled_back_meanwhile_publishes_nothing(night: Callable[..., Night]) -> None:
    taken = night()
    taken.run.state, taken.run.note = "rolled back", "a mistake"
    lake.save(taken.settings, taken.run)
    assert taken.ends()["state"] == "failed"
    assert published(taken.settings) == set()
    assert "run settle-1 was rolled back (a mistake); to publish it all the same: tidemark publish settle-1" in taken.said


@pytest.mark.long
def test_a_publication_over_one_of_two_failed_checks_is_red_and_says_which_others_failed(settings: Settings) -> None:
    run = recorded(settings, "settle-1", "settle", "site_hourly_traffic")
    run.tables["site_hourly_traffic"] |= {"reasons": [CHECK, "pv at least 1"], "failed": [CHECK, "pv at least 1"]}
    lake.save(settings, run)
    settle.publish(settings, CATALOG, run.id)
    ended = Ended(settings, ("publish_over", {"run": run.id, "checks": [CHECK], "reason": "a holiday"}, ""))
    assert (ended.runs[0]["state"], ended.runs[0]["tasks"]) == ("failed", {"publish": "failed", "report": "success"})
    assert f"site_hourly_traffic is held back: {CHECK}; pv at least 1. Name every check that failed" in ended.log


def test_the_report_of_a_day_that_is_published_over_a_check_or_taken_back_is_written_again(settings: Settings) -> None:
    before = DAY - timedelta(days=1)
    run = recorded(settings, "settle-1", "settle", "site_hourly_traffic", days=[before, DAY])
    settle.publish(settings, CATALOG, run.id)
    page = reports.report(settings, CATALOG, DAY)
    assert ">published in part</span>" in page.read_text()
    over = Ended(settings, ("publish_over", {"run": run.id, "checks": [CHECK], "reason": "a holiday"}, ""))
    assert over.runs[0]["state"] == "success", over.log[-4000:]
    assert "site_hourly_traffic was published all the same: a holiday" in page.read_text()
    back = Ended(settings, ("rollback", {"run": run.id, "reason": "no holiday"}, ""))
    assert back.runs[0]["state"] == "success", back.log[-4000:]
    assert f"Run {run.id} was taken back: no holiday" in page.read_text()
    assert not page.with_stem(str(before)).exists()


@pytest.mark.long
def test_a_report_that_cannot_be_written_again_is_told_and_the_publication_stands(settings: Settings) -> None:
    run = recorded(settings, "settle-1", "settle", "site_hourly_traffic")
    (settings.lake_path / "reports" / f"{DAY}.html").mkdir(parents=True)
    ended = Ended(settings, ("publish_over", {"run": run.id, "checks": [CHECK], "reason": "a holiday"}, ""))
    assert (ended.runs[0]["state"], ended.runs[0]["tasks"]) == ("success", {"publish": "success", "report": "failed"})
    assert [one["title"] for one in told(settings)] == ["publish_over: report failed"]


def test_a_publication_over_checks_of_two_tables_is_red_where_one_of_them_stays_held_back_and_says_why(
    settings: Settings, task: Callable[[str, str], Any]
) -> None:
    run = recorded(settings, "settle-1", "settle", "site_hourly_traffic")
    other = 'hourly_traffic: "pv at least 1" failed on 3 rows'
    run.tables["hourly_traffic"] |= {"gate": "failed", "reasons": [CHECK, other], "failed": [CHECK, "pv at least 1"]}
    lake.save(settings, run)
    with pytest.raises(ValueError, match=rf"site_hourly_.* over {CHECK}, but held back is hourly_traffic: {CHECK}; {other}"):
        task("publish_over", "publish")({"run": run.id, "checks": [CHECK], "reason": "a holiday"})
    assert published(settings) == set(STAGED) - {"hourly_traffic"}


@pytest.mark.parametrize(
    ("dag", "name", "form", "why"),
    [
        ("publish_over", "publish", {"run": "settle-9", "checks": [CHECK]}, "there is no run settle-9"),
        ("publish_over", "publish", {"run": "settle-1", "checks": ["no such"]}, "run settle-1 has no failed check no such"),
        ("rollback", "take_back", {"run": "settle-9"}, "there is no run settle-9"),
        ("rollback", "take_back", {"run": "settle-1"}, "run settle-1 is staged, so there is nothing to take back"),
    ],
)
def test_a_form_that_asks_for_what_cannot_be_is_told_to_nobody_but_who_filled_it_in(
    settings: Settings, task: Callable[[str, str], Any], dag: str, name: str, form: dict[str, Any], why: str
) -> None:
    recorded(settings, "settle-1", "settle", "site_hourly_traffic")
    with pytest.raises(ValueError, match=why) as refused:
        task(dag, name)(form | {"reason": "a holiday"})
    import tell

    tell.task_failed({"ti": None, "exception": refused.value})
    assert told(settings) == []


@pytest.mark.parametrize(("dag", "name"), [("rollback", "take_back"), ("publish_over", "publish")])
def test_a_form_for_a_run_that_a_newer_one_has_followed_is_told_to_nobody_either(
    settings: Settings, task: Callable[[str, str], Any], dag: str, name: str
) -> None:
    older = recorded(settings, "settle-1", "settle", "site_hourly_traffic")
    settle.publish(settings, CATALOG, older.id)
    settle.publish(settings, CATALOG, recorded(settings, "settle-2", "settle").id)
    import tell

    with pytest.raises(tell.Refused, match=r"was published .*by run settle-2"):
        task(dag, name)({"run": older.id, "checks": [CHECK], "reason": "a holiday"})


@pytest.mark.long
def test_a_night_that_is_cleared_and_then_fails_tells_nothing_of_the_run_before(night: Callable[..., Night]) -> None:
    cleared = night()
    form = {"day": str(datetime.now(UTC).date())}
    [ended] = Ended(cleared.settings, ("nightly", form, "settle")).runs
    assert (ended["tasks"]["wait"], ended["tasks"]["night"]) == ("failed", "success")
    assert told(cleared.settings) == []


@pytest.mark.long
def test_a_night_whose_gates_hold_is_reported_as_published(night: Callable[..., Night]) -> None:
    green = night()
    green.ends(("nightly_report", {}, ""))
    reported(green, ["published"])


def reported(night: Night, stands: Sequence[str], days: Sequence[date] = (DAY,), heard_of: Sequence[date] = ()) -> None:
    """The report that the night has begun is of the days of its runs, and told of those that people have not heard of before."""
    assert ["tidemark_night", {"day": str(DAY), "runs": [run.id for run in night.runs]}] in night.events
    [report] = night.then
    pages = [night.settings.lake_path / "reports" / f"{day}.html" for day in days]
    assert (report["state"], report["gave"]["report"]) == ("success", [str(page) for page in pages]), night.said[-4000:]
    assert all(f">{so}</span>" in page.read_text() for page, so in zip(pages, stands, strict=True))
    assert [one["title"] for one in told(night.settings) if one["what"] == "report"] == [
        f"Report of {day}" for day in days if day not in heard_of
    ]


@pytest.mark.long
def test_a_report_that_no_night_has_begun_is_of_yesterday(settings: Settings) -> None:
    ended = Ended(settings, ("nightly_report", {}, ""))
    assert [Path(path).stem for path in ended.runs[0]["gave"]["report"]] == [str(settle.yesterday(settings))], ended.log[-4000:]


@pytest.mark.long
def test_the_report_at_six_is_written_where_there_is_none_and_by_hand_always(settings: Settings) -> None:
    six = ("nightly_report", {"begun": "scheduled"}, "")
    ended = Ended(settings, six, six, ("nightly_report", {}, ""))
    assert [len(run["gave"]["report"]) for run in ended.runs] == [1, 0, 1], ended.log[-4000:]
    assert [one["title"] for one in told(settings)] == [f"Report of {settle.yesterday(settings)}"] * 2


@pytest.mark.parametrize("day", ["", "0026-11-19"])
def test_a_night_without_a_day_brings_no_report(settings: Settings, task: Callable[[str, str], Any], day: str) -> None:
    """It was refused: neither its form nor an interval said which, or one of a year that no event has."""
    refused = SimpleNamespace(extra={"day": day, "runs": []})
    assert task("nightly_report", "report")({"night": [refused]}, SimpleNamespace(run_type="asset_triggered")) == []
    assert told(settings) == []


def test_a_report_is_told_of_though_the_next_one_cannot_be_written(
    settings: Settings, task: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try finds it written, and leaves it out."""
    newest = settle.yesterday(settings)
    run = recorded(settings, "settle-1", "settle", days=[newest - timedelta(days=1), newest])
    night = SimpleNamespace(extra={"day": str(newest), "runs": [run.id]})
    full, write = [newest], reports.report

    def written(settings: Settings, catalog: Any, day: date) -> Path:
        if day in full:
            raise OSError(28, "No space left on device")
        return write(settings, catalog, day)

    monkeypatch.setattr(reports, "report", written)
    with pytest.raises(OSError, match="No space"):
        task("nightly_report", "report")({"night": [night]})
    full.clear()
    task("nightly_report", "report")({"night": [night]})
    assert [one["title"] for one in told(settings)] == [f"Report of {day}" for day in run.days]


@pytest.mark.long
def test_the_newest_night_settles_at_most_thirty_one_days_again_and_another_night_none(settings: Settings) -> None:
    newest = settle.yesterday(settings)
    before = [newest - timedelta(days=n) for n in range(40, 0, -1)]
    log(settings, "live/main-0-3-aa", before)
    run = Run("settle-0", "published", [str(d) for d in before], "", datetime.now(UTC).isoformat(), "0")
    run.pins, run.tables = {"main": Pin("main", 3, {"page_views": {"0": 40}}, "")}, {"daily_traffic": {"published": run.created}}
    lake.save(settings, run)
    log(settings, "live/main-4-4-bb", before)  # a late event of each day
    forms = [{"day": str(newest)}, {"day": str(before[-1])}]
    ended = Ended(settings, *(("nightly", form, "(?!days).*") for form in forms))
    assert [run["gave"]["days"] for run in ended.runs] == [
        ",".join(str(d) for d in [*before[-31:], newest]),
        str(before[-1]),
    ], ended.log[-4000:]


@pytest.mark.long
def test_the_newest_night_also_settles_the_days_whose_nights_airflow_missed_and_another_night_none(settings: Settings) -> None:
    newest = settle.yesterday(settings)
    days = [newest - timedelta(days=n) for n in range(9, -1, -1)]
    log(settings, "live/main-0-3-aa", days)
    at = (datetime.now(UTC) - timedelta(days=5)).isoformat()
    run = Run("settle-0", "published", [str(d) for d in days[2:5]], "nightly", at, "0", published=at)
    run.pins, run.tables = {"main": Pin("main", 3, {"page_views": {"0": 40}}, "")}, {"daily_traffic": {"published": at}}
    lake.save(settings, run)
    forms = [{"day": str(newest)}, {"day": str(days[-2])}]
    ended = Ended(settings, *(("nightly", form, "(?!days).*") for form in forms))
    assert [run["gave"]["days"] for run in ended.runs] == [
        ",".join(str(d) for d in days[5:]),
        str(days[-2]),
    ], ended.log[-4000:]


# ------------------------------------------------------------------------------------------------------------ reprocess

REPLAY = f"reprocess-{sha256(AT.encode()).hexdigest()[:12]}"
FORM = {"reason": "the mistake"}


@pytest.mark.parametrize(
    ("promote", "largest", "failed", "who"),
    [
        ("automatically", 6, None, "itself"),
        ("automatically", 5, None, "a person"),
        pytest.param("automatically", 6, "site_hourly_traffic", "a person", marks=pytest.mark.long),
        pytest.param("by a person", 6, None, "a person", marks=pytest.mark.long),
    ],
    ids=["as many", "one more", "a gate failed", "never by itself"],
)
def test_a_replay_goes_by_itself_where_no_more_rows_change_go_or_come_than_may_and_no_check_failed(
    settings: Settings, promote: str, largest: int, failed: str | None, who: str
) -> None:
    run = recorded(settings, REPLAY, "replay", failed)
    for table, counts in (("hourly_traffic", (1, 2, 0)), ("site_daily_traffic", (0, 0, 3))):
        run.tables[table]["compare"] = {"rows": 9, **dict(zip(("changed", "extra", "missing"), counts, strict=True))}
    lake.save(settings, run)
    compare.keep(settings, run, [])
    page = reports.report(settings, CATALOG, DAY)
    form = FORM | {"promote": promote, "largest": largest}
    ended = Ended(settings, ("reprocess", form, "replay|approve|drop"))
    [tasks] = [one["tasks"] for one in ended.runs]
    assert tasks["decide"] == "success", ended.log[-4000:]
    decided = {"itself": ("skipped", "success"), "a person": ("success", "failed")}  # who was not asked, as below
    assert (tasks["approve"], tasks["publish"]) == decided[who]
    assert (tasks["report"], ">published</span>" in page.read_text()) == ("success", who == "itself")


@pytest.mark.long
def test_what_a_person_is_asked_has_the_gates_that_failed_before_the_rows_that_differ(settings: Settings) -> None:
    run = recorded(settings, REPLAY, "replay", "site_hourly_traffic")
    sample = {"what": "changed", "run": {"pv": 8}, "published": {"pv": 7}}
    compare.keep(settings, run, [Difference("hourly_traffic", DAY, 24, 1, 0, 0, [sample]), Difference("visits", DAY, 9, 0, 0, 0)])
    ended = Ended(settings, ("reprocess", FORM, "replay|approve|publish|drop"))
    asked = ended.runs[0]["gave"]["compare"].splitlines()
    assert asked[0] == (f'* **site_hourly_traffic** is held back: site\\_hourly\\_traffic: "{CHECK}" failed on 12 rows'), (
        ended.log[-4000:]
    )
    for line in (
        f"# What run {REPLAY} would change",
        "| table | day | rows | changed | missing | extra |",
        f"| hourly_traffic | {DAY} | 24 | 1 | 0 | 0 |",
        "The same on every day: visits (9 rows).",
        "| changed | published | 7 |",
        "| changed | run | 8 |",
    ):
        assert line in asked


@pytest.mark.long
def test_a_replay_is_published_but_for_what_a_check_holds_back_and_says_so(settings: Settings) -> None:
    run = recorded(settings, REPLAY, "replay", "site_hourly_traffic")
    compare.keep(settings, run, [])
    ended = Ended(settings, ("reprocess", FORM | {"answer": "Publish"}, "replay"))
    assert ended.runs[0]["tasks"]["publish"] == "failed"
    assert published(settings) == set(STAGED) - {"site_hourly_traffic"}
    said = f'published, but for site_hourly_traffic: site_hourly_traffic: "{CHECK}" failed on 12 rows'
    assert said in ended.log.replace('\\"', '"'), ended.log[-4000:]
    assert [(one["what"], one["title"]) for one in told(settings)] == [("run_failed", "reprocess: publish failed")]


@pytest.mark.long
def test_a_replay_that_was_rolled_back_meanwhile_stays_so_when_its_publication_is_tried_again(settings: Settings) -> None:
    run = recorded(settings, REPLAY, "replay")
    compare.keep(settings, run, [])
    run.state, run.note = "rolled back", "a mistake"
    lake.save(settings, run)
    ended = Ended(settings, ("reprocess", FORM | {"answer": "Publish"}, "replay"))
    assert ended.runs[0]["tasks"]["publish"] == "failed", ended.log[-4000:]
    assert published(settings) == set()
    assert f"run {REPLAY} was rolled back (a mistake); to publish it all the same: tidemark publish {REPLAY}" in ended.log


def test_a_replay_that_a_check_holds_back_is_not_tried_again(settings: Settings, task: Callable[[str, str], Any]) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    recorded(settings, REPLAY, "replay", "site_hourly_traffic")
    answered = SimpleNamespace(xcom_pull=lambda branch, key: {"followed": ["publish"]})
    with pytest.raises(AirflowFailException, match=r"^published, but for site_hourly_traffic: "):
        task("reprocess", "publish")(REPLAY, answered)
    assert published(settings) == set(STAGED) - {"site_hourly_traffic"}


def test_an_approval_that_is_marked_a_success_publishes_and_drops_nothing(settings: Settings) -> None:
    run = recorded(settings, REPLAY, "replay")
    compare.keep(settings, run, [])
    ended = Ended(settings, ("reprocess", FORM, "replay|approve"))
    [tasks] = [one["tasks"] for one in ended.runs]
    assert (tasks["publish"], tasks["drop"]) == ("failed", "skipped"), ended.log[-4000:]
    assert published(settings) == set() and lake.run_of(settings, REPLAY).state == "staged"
    [said] = told(settings)
    assert said["title"] == "reprocess: publish failed"
    assert "approve was marked a success, and nobody has answered Publish." in said["text"]
    assert said["text"].endswith(f"tidemark publish {REPLAY}")


@pytest.mark.long
@pytest.mark.parametrize(("answer", "state"), [("Publish", "published"), ("Drop", "dropped")])
def test_a_replay_is_what_a_person_has_answered(settings: Settings, answer: str, state: str) -> None:
    compare.keep(settings, recorded(settings, REPLAY, "replay"), [])
    ended = Ended(settings, ("reprocess", FORM | {"answer": answer}, "replay"))
    assert ended.runs[0]["state"] == "success", ended.log[-4000:]
    assert lake.run_of(settings, REPLAY).state == state


def test_a_replay_that_was_dropped_is_not_planned_again_when_its_run_is_cleared(
    settings: Settings, task: Callable[[str, str], Any]
) -> None:
    lake.drop(settings, CATALOG, recorded(settings, REPLAY, "replay"))
    with pytest.raises(settle.SettleError, match=rf"run {REPLAY} was dropped, .* trigger `reprocess` anew"):
        task("reprocess", "plan")(FORM | {"tables": "", "first": None}, AT)


@pytest.mark.parametrize("tables", [None, "", " "])
def test_a_replay_of_which_no_table_is_named_is_planned(task: Callable[[str, str], Any], tables: str | None) -> None:
    assert task("reprocess", "plan")(FORM | {"tables": tables, "first": None}, AT) == REPLAY


@pytest.mark.long
def test_a_form_is_refused_with_a_sentence_and_told_to_nobody_else(settings: Settings) -> None:
    today = datetime.now(UTC).date()
    forms = [FORM | {"tables": "visits, no_such"}, FORM | {"first": str(today)}]
    ended = Ended(settings, *(("reprocess", form, "") for form in forms))
    assert [run["tasks"]["plan"] for run in ended.runs] == ["failed", "failed"]
    for sentence in ("there is no rollup or view no_such; there are ", f"{today} is not over in UTC"):
        assert sentence in ended.log
    assert told(settings) == []


@pytest.mark.long
def test_a_plan_says_how_much_there_is_to_replay_and_names_the_run(settings: Settings) -> None:
    log(settings, "live/main-0-0-aa", [DAY - timedelta(days=1), DAY])
    ended = Ended(settings, ("reprocess", FORM | {"tables": "hourly_traffic"}, "(?!plan).*"))
    assert ended.runs[0]["gave"]["plan"] == REPLAY
    assert "2 days, 2 records: about " in ended.log, ended.log[-4000:]


def test_a_second_replay_is_refused_though_the_first_was_planned_after_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are planned; the one that comes first to the lock notes its run, and the other finds it there."""
    first = Run("reprocess-1", "running", [], "the first", datetime.now(UTC).isoformat(), "0", kind="replay")
    pinning = lake.pinning
    monkeypatch.setattr(lake, "pinning", lambda settings: (lake.save(settings, first), pinning(settings))[1])
    with pytest.raises(settle.SettleError, match=r"run reprocess-1 \(running: the first\) is not done; let it end"):
        settle.replay(settings, CATALOG, "the second", name="reprocess-2", alone=True)
    assert [run.id for run in lake.runs(settings)] == ["reprocess-1"]


def test_what_spark_starts_for_a_replay_refuses_to_be_the_second(settings: Settings) -> None:
    recorded(settings, "reprocess-1", "replay")
    done = subprocess.run(
        [sys.executable, str(airflow.ROOT / "spark_apps" / "replay.py"), "--run", "reprocess-2", "--reason", "the second"],
        env=airflow.clean() | airflow.environment(settings),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "run reprocess-1 (staged: replay) waits for a decision" in " ".join(done.stderr.replace("│", "").split())


WAITS = """
import runpy, sys, threading
from datetime import UTC, datetime
from tidemark import lake, local, settle
app, kind, *words = sys.argv[1:]

class Waits:
    def __init__(self, *_): ...
    def work(self):
        print("at work", flush=True)
        for _ in range(600):  # as work goes: a signal that comes just before a long wait is not seen until it is over
            threading.Event().wait(0.1)

def at_work(settings, catalog, *_, **__):
    run = lake.Run("run-1", "running", [], "a night", datetime.now(UTC).isoformat(), "0", kind=kind)
    lake.save(settings, run)
    return settle.work(settings, catalog, run, lambda _: None)

local.step_aside, settle.Settling, settle.settle, settle.replay = lambda: None, Waits, at_work, at_work
sys.argv = [app, *words]
runpy.run_path(app, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("kind", "words", "state"),
    [
        ("settle", ["--days", str(DAY), "--reason", "a night", "--said", "said"], "failed"),
        ("replay", ["--run", "run-1", "--reason", "a mistake"], "running"),  # it goes on when it is begun again
    ],
)
def test_what_is_cleared_or_marked_at_work_says_in_its_record_that_it_was_interrupted(
    settings: Settings, tmp_path: Path, kind: str, words: list[str], state: str
) -> None:
    """Airflow sends SIGTERM to all that the task has started."""
    (settings.lake_path / "runs").mkdir(parents=True)
    argv = [sys.executable, "-c", WAITS, str(airflow.ROOT / "spark_apps" / f"{kind}.py"), kind, *words]
    env = airflow.clean() | airflow.environment(settings)
    with subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert next(running.stdout) == "at work\n"
        running.terminate()
        assert running.wait(30) != 0
    [run] = lake.runs(settings)
    assert (run.state, run.note) == (state, "interrupted")


# --------------------------------------------------------------------------------------------------------------- upkeep


def aged(file: Path, days: int) -> Path:
    """A file that was written last so many days ago."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    at = (datetime.now(UTC) - timedelta(days=days)).timestamp()
    os.utime(file, (at, at))
    return file


def test_pages_of_validations_older_than_sixty_days_are_deleted_and_no_others(
    settings: Settings, task: Callable[[str, str], Any]
) -> None:
    pages = settings.home / "docs" / "validations" / "visits" / "settle-1"
    for name, age in (("old.html", 61), ("young.html", 59)):
        aged(pages / name, age)
    assert task("maintenance", "docs")() == 1
    assert [page.name for page in pages.iterdir()] == ["young.html"]


def test_logs_of_airflow_older_than_sixty_days_are_deleted_with_the_folders_that_they_leave_empty(
    settings: Settings, task: Callable[[str, str], Any]
) -> None:
    logs = airflow.home(settings) / "logs"
    old = aged(logs / "dag_id=nightly" / "run_id=old" / "task_id=wait" / "attempt=1.log", 61)
    young = aged(logs / "dag_id=nightly" / "run_id=young" / "task_id=wait" / "attempt=1.log", 59)
    beside = aged(young.with_name("attempt=0.log"), 61)
    kept = aged(airflow.home(settings) / "pools.json", 61)
    assert task("maintenance", "airflow_logs")() == 2
    assert (old.parents[1].exists(), beside.exists(), young.exists(), kept.exists()) == (False, False, True, True)
