"""The page in Airflow: what its routes answer on a small lake, who gets in, and what cannot get out."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import page_lake
import pyarrow as pa
import pytest
from page_lake import HOSTILE

from tidemark import lake, local
from tidemark.settings import Settings

PLUGINS = Path(__file__).parent.parent / "plugins"
HEAVY = ("pyspark", "deltalake", "duckdb", "great_expectations", "pyarrow", "pandas", "confluent_kafka", "fastapi")
ROUTES = ("hour", "pages", "streams", "days", "verdicts", "runs", "rejects", "tables", "views", "scheduler")


@pytest.fixture(scope="module")
def page(in_airflow: None) -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", PLUGINS / "page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def token(in_airflow: None) -> Callable[[str], dict[str, str]]:
    """The header of somebody with a role, as Airflow's own login makes it."""
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.models.revoked_token import RevokedToken
    from airflow.settings import get_engine

    RevokedToken.metadata.create_all(get_engine(), [RevokedToken.__table__])  # all that a look at a token needs
    manager = init_auth_manager()
    return lambda role: {"Authorization": f"Bearer {manager.generate_jwt(SimpleAuthManagerUser(username=role, role=role))}"}


@pytest.fixture(scope="module")
def opened(page: ModuleType, token: Callable[[str], dict[str, str]]) -> Callable[[Settings], Any]:
    """The page's app over a lake, seen by somebody who may look and nothing else."""
    from fastapi.testclient import TestClient

    return lambda settings: TestClient(
        page.application(page.Answers(settings)), headers=token("viewer"), raise_server_exceptions=True
    )


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, datetime]:
    settings = Settings(_env_file=None, home=tmp_path_factory.mktemp("filled"))
    return settings, page_lake.fill(settings)


@pytest.fixture(scope="module")
def client(opened: Callable[[Settings], Any], filled: tuple[Settings, datetime]) -> Any:
    return opened(filled[0])


def answer(client: Any, path: str) -> Any:
    found = client.get(path)
    assert found.status_code == 200, found.text
    return found.json()


# -------------------------------------------------------------------------------------------------------- who gets in


def test_loading_the_plugin_imports_nothing_heavy(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(PLUGINS)!r}); import airflow.plugins_manager; before = set(sys.modules)\n"
        f"import page; page.Page()\nprint([m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def routes_of(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every method and path of an app, those of apps within it too; a path's parameters are filled in."""
    for route in app.routes:
        inner = getattr(route, "app", None)
        if getattr(inner, "routes", None) or not hasattr(route, "methods"):
            assert hasattr(inner, "routes"), f"{prefix}{route.path} is no route that can be looked into; nobody guards it"
            yield from routes_of(inner, prefix + route.path)
            continue
        path = route.path
        for name in route.param_convertors:
            path = path.replace("{" + name + "}", "x").replace("{" + name + ":path}", "x")
        yield from ((method, prefix + path) for method in sorted(route.methods - {"HEAD", "OPTIONS"}))


@pytest.fixture(scope="module")
def every_app(in_airflow: None) -> list[dict[str, Any]]:
    """Every app of every plugin, loaded as Airflow loads them."""
    from airflow.plugins_manager import _load_plugins_from_plugin_directory

    plugins, errors = _load_plugins_from_plugin_directory(plugins_folder=str(PLUGINS))
    assert errors == {}
    return [app for plugin in plugins for app in plugin.fastapi_apps]


@pytest.mark.parametrize("with_token", [{}, {"Authorization": "Bearer nonsense"}, {"Cookie": "_token=nonsense"}])
def test_every_route_of_every_app_of_every_plugin_refuses_a_stranger(every_app, token, with_token):
    from fastapi.testclient import TestClient

    asked = [
        (app["url_prefix"], method, path, TestClient(app["app"], headers=with_token).request(method, path).status_code)
        for app in every_app
        for method, path in routes_of(app["app"])
    ]
    assert [one for one in asked if one[3] not in (401, 403)] == []
    mine = {path for prefix, _, path, _ in asked if prefix == "/tidemark"}
    assert mine >= {"/", "/docs/x", "/reports/x", *(f"/{r}" for r in ROUTES)}


def test_a_route_that_nobody_guards_is_found(page):
    """The walk itself can fail: an open route, an open mount and FastAPI's own pages are all seen."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    inner, outer = FastAPI(openapi_url=None), FastAPI()
    inner.get("/open/{name}")(lambda name: name)
    outer.mount("/inner", inner)
    found = list(routes_of(outer))
    assert ("GET", "/inner/open/x") in found and ("GET", "/openapi.json") in found
    assert TestClient(outer).get("/inner/open/x").status_code == 200


def test_the_page_has_no_route_that_writes(every_app):
    (app,) = [one["app"] for one in every_app if one["url_prefix"] == "/tidemark"]
    assert {method for method, _ in routes_of(app)} == {"GET"}


def test_the_navigation_has_an_entry_that_airflow_accepts(page):
    from airflow.api_fastapi.core_api.datamodels.plugins import ExternalViewResponse

    (entry,) = page.Page.external_views
    assert ExternalViewResponse(**entry).nav_top_level
    assert len(entry["name"]) <= 9  # more is cut


# ----------------------------------------------------------------------------------------------------- Airflow's scheduler

PAST, FUTURE = (datetime.now(UTC) + timedelta(days=n) for n in (-1, 1))


@pytest.fixture
def jobs(in_airflow: None) -> Iterator[Any]:
    """Airflow's own table of its processes, with its model."""
    from airflow.jobs.job import Job
    from airflow.settings import get_engine

    Job.metadata.create_all(get_engine(), [Job.__table__])
    yield Job
    Job.__table__.drop(get_engine())


@pytest.mark.parametrize(
    ("beats", "silent", "since"),
    [
        ([], True, None),
        ([("running", PAST)], True, PAST),
        ([("running", PAST), ("running", FUTURE)], False, None),
        ([("success", FUTURE)], True, FUTURE),
    ],
    ids=["never ran", "killed", "begun again", "ended"],
)
def test_a_scheduler_without_a_heartbeat_is_silent_since_its_last_one(opened, jobs, tmp_path, beats, silent, since):
    from airflow.utils.session import create_session

    with create_session() as session:
        session.add_all([jobs(job_type="SchedulerJob", state=state, latest_heartbeat=at) for state, at in beats])
    found = answer(opened(Settings(_env_file=None, home=tmp_path)), "scheduler")
    assert found == {"silent": silent, "since": since and since.isoformat()}


# ------------------------------------------------------------------------------------------------- a lake that is not there


def test_a_lake_that_does_not_exist_is_an_empty_page_with_the_command_that_fills_it(opened, tmp_path):
    client = opened(Settings(_env_file=None, home=tmp_path / "nowhere"))
    found = {route: answer(client, route) for route in ROUTES}
    assert found.pop("streams")["streams"][0]["state"] == "not started"
    assert found.pop("rejects")["rejects"] == []
    assert found == {
        "hour": {"marks": []},
        "pages": {"pages": [], "of": 0},
        "days": {"days": []},
        "verdicts": {"runs": [], "tables": []},
        "runs": {"runs": [], "of": 0, "damaged": []},
        "tables": {"tables": [], "damaged": []},
        "views": {"views": []},
        "scheduler": {"silent": False, "since": None},  # of a database that has no tables nothing is said either
    }
    assert "tidemark produce page_views --sample" in client.get("/").text
    assert not (tmp_path / "nowhere").exists()


def test_a_table_that_cannot_be_read_is_a_sentence(opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    log = settings.lake_path / "views/site_last_hour/_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("{")
    found = opened(settings).get("/hour")
    assert found.status_code == 503
    assert found.json()["detail"].startswith("table views/site_last_hour: its log entry ")


def test_a_query_that_takes_too_long_is_a_sentence(page, opened, filled, monkeypatch):
    # 10^14 pairs: it is stopped by the limit, or the test by its own.
    monkeypatch.setattr(page, "SECONDS", 0.2)
    slow = "(SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(10000000) b) > 0"
    monkeypatch.setattr(page.Answers, "since", lambda self, view: slow)
    found = opened(filled[0]).get("/hour")
    assert (found.status_code, "took longer than 0.2 seconds" in found.json()["detail"]) == (503, True)


# ------------------------------------------------------------------------------------------------------------- answers


def test_the_hour_is_its_marks(client, filled):
    found, newest = answer(client, "hour"), filled[1]
    assert len(found["marks"]) == 721
    assert found["marks"][0][0] == (newest - timedelta(hours=1)).isoformat()
    assert found["marks"][-1] == [newest.isoformat(), 361_204, 18_377]


def test_the_busiest_pages_are_beside_what_they_were_an_hour_before(client):
    found = answer(client, "pages")
    assert [(p["page"], p["pv"], p["uv"], p["before"]) for p in found["pages"][:2]] == [
        ("/", 10_000, 1000, 8000),
        ("/search", 5000, 500, 4000),
    ]
    assert (found["pages"][-1]["page"], found["pages"][-1]["before"], found["of"]) == (HOSTILE, None, 6)


def test_a_table_that_was_made_again_is_another_one(page, tmp_path):
    """The lake may be deleted while Airflow goes on: `make clean-demo`."""
    answers = page.Answers(Settings(_env_file=None, home=tmp_path))
    later, sooner = datetime(2026, 11, 19, 12, tzinfo=UTC), datetime(2026, 11, 18, 12, tzinfo=UTC)
    for mark, times in ((later, 3), (sooner, 1)):
        for n in range(times):
            row = {"mark": mark, "pv": 1, "uv": 1, "settled": False, "day": mark.date()}
            page_lake.write(answers.settings, "views/site_last_hour", [row], f"live/{n}-all-aa")
        assert [m for m, *_ in answers.hour()["marks"]] == [mark] * times
        shutil.rmtree(answers.settings.lake_path)
    assert answers.hour()["marks"] == []


@pytest.mark.parametrize("statistics", [True, False])
def test_marks_older_than_an_hour_before_the_newest_are_left_out(opened, tmp_path, statistics):
    #   day    2026-11-18 ─────────────────────┬─ 2026-11-19
    #   marks      22:50    23:29  23:30       │      00:20  00:30
    #   shown                      [───────────┼─────────────────]
    settings = Settings(_env_file=None, home=tmp_path)
    newest = datetime(2026, 11, 19, 0, 30, tzinfo=UTC)
    marks = [(newest - timedelta(minutes=m), m + 1) for m in (0, 10, 60, 61, 100)]
    rows = [{"mark": at, "pv": pv, "uv": 1, "settled": False, "day": at.date()} for at, pv in marks]
    page_lake.write(settings, "views/site_last_hour", [], "live/none")
    table = lake.Table(settings.lake_path, "views/site_last_hour", "mark")
    adds = lake.write_arrow(table, "optimized", pa.Table.from_pylist(rows, page_lake.SCHEMAS["views/site_last_hour"]))
    lake.swap(table, [], adds if statistics else [dataclasses.replace(one, stats="{}") for one in adds], {})
    assert [pv for _, pv, _ in answer(opened(settings), "hour")["marks"]] == [61, 11, 1]


def test_pages_are_those_of_the_last_mark_that_is_whole(opened, tmp_path):
    #   marks   12:00:05 ─── an hour ─── 13:00:05   13:00:10   13:00:15
    #   stream time                             13:00:07
    settings = Settings(_env_file=None, home=tmp_path)
    whole = datetime(2026, 11, 19, 13, 0, 5, tzinfo=UTC)
    marks = [
        (whole - timedelta(hours=1), 80),
        (whole, 100),
        (whole + timedelta(seconds=5), 60),
        (whole + timedelta(seconds=10), 9),
    ]
    rows = [{"page": "/", "mark": at, "pv": pv, "uv": 1, "settled": False, "day": at.date()} for at, pv in marks]
    page_lake.write(settings, "views/last_hour", rows, "live/20261119T12-all-aa")
    (settings.state / "main").mkdir(parents=True)
    at = whole + timedelta(seconds=2)
    (settings.state / "main" / "progress.json").write_text(json.dumps({"stream_time": at.isoformat()}))
    assert answer(opened(settings), "pages") == {"pages": [{"page": "/", "pv": 100, "uv": 1, "before": 80}], "of": 1}


def test_a_page_of_a_long_name_is_beside_its_own_hour_before_and_cut(opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    now = datetime(2026, 11, 19, 13, tzinfo=UTC)
    before = now - timedelta(hours=1)
    name = "/" + "🚀" * 300
    seen = [(name + "one", now, 9), (name + "one", before, 8), (name + "two", now, 7), (name + "two", before, 6)]
    rows = [{"page": page, "mark": at, "pv": pv, "uv": 1, "settled": False, "day": at.date()} for page, at, pv in seen]
    page_lake.write(settings, "views/last_hour", rows, "live/20261119T12-all-aa")
    shown = {"page": f"{name[:199]}…", "uv": 1}
    pages = [{**shown, "pv": 9, "before": 8}, {**shown, "pv": 7, "before": 6}]
    assert answer(opened(settings), "pages") == {"pages": pages, "of": 2}


@pytest.mark.parametrize(("ahead", "shown"), [(0, [0, 5, 10]), (3, [0, 5]), (10, [0]), (60, [0, 5, 10])])
def test_a_mark_that_the_stream_still_fills_is_not_shown(opened, tmp_path, ahead, shown):
    #   marks   0    5    10
    #   stream time, so many seconds before the newest mark; a minute before it, it is of another lake
    settings = Settings(_env_file=None, home=tmp_path)
    first = datetime(2026, 11, 19, 12, tzinfo=UTC)
    rows = [
        {"mark": first + timedelta(seconds=s), "pv": s, "uv": s, "settled": False, "day": first.date()} for s in (-3600, 0, 5, 10)
    ]
    page_lake.write(settings, "views/site_last_hour", rows, "live/20261119T12-all-aa")
    (settings.state / "main").mkdir(parents=True)
    at = first + timedelta(seconds=10 - ahead)
    (settings.state / "main" / "progress.json").write_text(json.dumps({"stream_time": at.isoformat()}))
    assert [pv for _, pv, _ in answer(opened(settings), "hour")["marks"] if pv >= 0] == shown


def test_the_last_marks_are_shown_once_the_stream_has_fallen_silent(opened, tmp_path, page, monkeypatch):
    #   marks   0    5    10            and no event for 15 s
    #   stream time   7
    settings = Settings(_env_file=None, home=tmp_path)
    first, state = datetime(2026, 11, 19, 12, tzinfo=UTC), settings.state / "main"
    rows = [{"mark": first + timedelta(seconds=s), "pv": s, "uv": s, "settled": False, "day": first.date()} for s in (0, 5, 10)]
    page_lake.write(settings, "views/site_last_hour", rows, "live/20261119T12-all-aa")
    log = settings.lake_path / "views/site_last_hour/_delta_log"
    os.utime(log, (time.time() - 60,) * 2)
    state.mkdir(parents=True)
    client, shown = opened(settings), []
    for ago in (1, 20):
        said = {"stream_time": (first + timedelta(seconds=7)).isoformat()}
        said["finished_at"] = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
        (state / "progress.json").write_text(json.dumps(said))
        due = time.monotonic() + 60 * ago
        monkeypatch.setattr(page.time, "monotonic", lambda due=due: due)
        shown.append([pv for _, pv, _ in answer(client, "hour")["marks"]])
        monkeypatch.undo()
    assert shown == [[0, 5], [0, 5, 10]]


def test_a_stream_is_its_state_its_progress_and_its_last_batches(client, filled):
    page_lake.beat(filled[0], datetime.now(UTC))
    found, other = answer(client, "streams")["streams"]
    assert (other["name"], other["state"]) == ("alarms", "not started")
    assert (found["name"], found["state"], found["progress"]["lag"]) == ("main", "running", 12)
    assert [b["seq"] for b in found["batches"]] == list(range(2, 42))
    assert sum(b["rejects"] for b in found["batches"]) == 10
    assert list(found["set_aside"]) == ["page_panes"]
    assert (found["wanted"]["state"], found["wanted"]["by"]) == ("running", "admin")


@pytest.mark.parametrize(
    ("said", "seconds", "state"),
    [
        ("running", 5, "running"),
        ("running", 20, "silent"),
        ("starting", 60, "starting"),
        ("starting", 180, "silent"),
        ("stopped", 9999, "stopped"),
    ],
)
def test_a_stream_without_a_heartbeat_is_silent(opened, tmp_path, said, seconds, state):
    settings = Settings(_env_file=None, home=tmp_path)
    folder = settings.state / "main"
    folder.mkdir(parents=True)
    at = datetime.now(UTC) - timedelta(seconds=seconds)
    (folder / "heartbeat.json").write_text(json.dumps({"pid": 1, "state": said, "at": at.isoformat()}))
    assert answer(opened(settings), "streams")["streams"][0]["state"] == state


def test_days_say_what_their_settling_changed(client, filled):
    today, yesterday, second, third = answer(client, "days")["days"]
    assert [d["settled"] for d in (today, yesterday, second, third)] == [False, True, True, True]
    assert (today["pv"], len(today["hours"]), today["settling"], today["again"]) == (8_640_000, 9, None, [])
    assert (yesterday["settling"]["compared"], second["settling"]) == (False, None)  # the second was never published
    settling = third["settling"]
    assert (settling["run"], settling["changed"], settling["missing"]) == (f"settle-{third['day']}", 1, 0)
    assert (settling["before"]["pv"], settling["after"]["pv"]) == (8_279_940, 8_280_000)
    assert [(a["run"], a["changed"], a["missing"], a["rows"]) for a in third["again"]] == [(f"again-{third['day']}", 3, 1, 25)]


def test_a_comparison_that_a_bad_disk_has_emptied_is_a_sentence_that_names_it(opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    page_lake.fill(settings)
    kept = next((settings.lake_path / "runs").glob("*/compare.json"))
    kept.write_text("")
    found = opened(settings).get("/days")
    assert (found.status_code, found.json()["detail"].startswith(f"{kept} is damaged")) == (503, True)


def test_a_run_s_record_that_a_bad_disk_has_emptied_is_named_beside_the_others(opened: Any, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path)
    page_lake.fill(settings)
    one, *others = sorted((settings.lake_path / "runs").glob("*.json"))
    one.write_text("")
    found = answer(opened(settings), "runs")
    assert {r["id"] for r in found["runs"]} == {other.stem for other in others}
    assert [why.startswith(f"{one} is damaged") for why in found["damaged"]] == [True]


def test_verdicts_are_a_history_of_each_check(client):
    found = answer(client, "verdicts")
    assert [len(found["runs"]), *(t["table"] for t in found["tables"])] == [2, "page_panes", "site_daily_traffic"]
    checks = {c["check"]: (c["outcomes"], c["unexpected"]) for c in found["tables"][1]["checks"]}
    assert checks == {"PV is right": (["passed", "failed"], [None, 7]), HOSTILE: (["passed", "warned"], [None, 1])}


@pytest.mark.parametrize("kept", ["beside the run", "in the lake", "damaged beside the run"])
def test_failing_rows_are_there_as_they_were_stored(opened, tmp_path, kept):
    settings = Settings(_env_file=None, home=tmp_path)
    now = datetime.now(UTC)
    page_lake.runs(settings, now.date(), now)
    run = f"settle-{now.date() - timedelta(days=2)}"
    if kept == "in the lake":
        (settings.lake_path / "runs" / f"{run}.verdicts").unlink()
    if kept == "damaged beside the run":
        (settings.lake_path / "runs" / f"{run}.verdicts").write_text("[{")
    found = answer(opened(settings), f"verdicts/{run}")
    (failed,) = [v for v in found["verdicts"] if v["outcome"] == "failed" and v["severity"] == "critical"]
    assert (failed["unexpected"], [row["pv"] for row in failed["sample"]]) == (7, [12, 13])
    assert failed["sample"][0]["page"] == HOSTILE


@pytest.mark.parametrize("run", ["nowhere", "%2e%2e", "%2e%2e%2fruns", "x' OR 'a' = 'a", "settle-2026*", "s" * 300])
def test_verdicts_of_a_run_that_is_none_are_not_found(client, run):
    assert client.get(f"/verdicts/{run}").status_code == 404


def test_runs_say_what_became_of_each_table_and_what_stands_in_the_way_of_a_roll_back(client):
    found = {r["id"].split("-")[0] + str(n): r for n, r in enumerate(answer(client, "runs")["runs"])}
    forced, again, failed, settled = found.values()  # newest first
    assert forced["tables"]["site_daily_traffic"]["forced"]["reason"] == f"the check is wrong {HOSTILE}"
    assert (settled["can_go_back"], settled["in_the_way"]) == (True, again["id"])
    assert (again["can_go_back"], again["in_the_way"]) == (True, None)
    assert (failed["can_go_back"], failed["undecided"], failed["pins"]) == (False, True, {"main": 17})


@pytest.mark.parametrize(("table", "way"), [("hourly_traffic", None), ("page_quarters", "night")])
def test_a_day_that_was_not_over_stands_in_the_way_of_rollups_alone(opened, tmp_path, table, way):
    """A replay publishes of views the days that are over."""
    settings = Settings(_env_file=None, home=tmp_path)
    for n, (name, days, open_days) in enumerate((("replay", ["2026-11-18"], ["2026-11-19"]), ("night", ["2026-11-19"], []))):
        said = {table: {"gate": "passed", "reasons": [], "warnings": [], "published": f"2026-11-20T0{n}:00:00+00:00"}}
        made = lake.Run(
            name, "published", days, "a mistake", f"2026-11-20T0{n}:00:00+00:00", "0", tables=said, open_days=open_days
        )
        lake.save(settings, made)
    found = {r["id"]: r["in_the_way"] for r in answer(opened(settings), "runs")["runs"]}
    assert found == {"replay": way, "night": None}


def test_rejects_are_counted_by_reason_with_the_newest_of_each(client):
    found = {r["reason"]: r for r in answer(client, "rejects")["rejects"]}
    assert {reason: r["records"] for reason, r in found.items()} == {
        "page: a number, not a string": 8,
        HOSTILE: 1,
        "not UTF-8": 1,
    }
    assert sum(found["page: a number, not a string"]["by_day"].values()) == 8
    assert found["not UTF-8"]["example"] == {"partition": 3, "offset": 21, "value": "\\xff\\xfe"}
    assert found[HOSTILE]["example"]["value"] == HOSTILE


def test_tables_have_files_and_bytes(client):
    found = {t["name"]: t for t in answer(client, "tables")["tables"]}
    assert set(found) == {
        "page_views", "last_hour", "site_last_hour", "site_hourly_traffic", "site_daily_traffic", "ledger", "verdicts",
    }  # fmt: skip
    assert (found["ledger"]["files"], found["ledger"]["rows"]) == (40, 40)
    assert all(t["bytes"] > 0 for t in found.values())


def test_every_view_that_is_written_has_its_question_and_its_newest_rows(client, filled):
    found = {v["name"]: v for v in answer(client, "views")["views"]}
    assert set(found) == {"last_hour", "site_last_hour", "site_hourly_traffic", "site_daily_traffic"}
    assert found["last_hour"]["pipeline"] == "Web traffic" and found["last_hour"]["says"].endswith(".")
    newest = answer(client, "newest/last_hour")
    assert newest["columns"] == ["page", "mark", "pv", "uv", "settled"]
    assert [HOSTILE in row for row in newest["rows"]].count(True) == 1  # the data's text, as it is
    assert [r["rows"] for r in (answer(client, f"newest/{name}") for name in found)].count([]) == 0


@pytest.mark.parametrize("view", ["none", "page_views", "ledger", "last_hour; DROP TABLE x", "..%2Flast_hour"])
def test_newest_rows_of_what_is_no_view_are_not_found(client, view):
    assert client.get(f"/newest/{view}").status_code == 404


def test_an_answer_is_computed_once_for_all_who_ask_at_once(page):
    computed, go = [], threading.Event()

    def ask() -> list[int]:
        go.wait(10)
        computed.append(1)
        return computed

    kept, found = page.Kept(ask, 60), []
    threads = [threading.Thread(target=lambda: found.append(kept.answer())) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert (found, computed) == ([b"[1]"] * 8, [1])


def test_an_answer_is_computed_again_when_its_time_is_over_and_an_error_not_sooner(page):
    asked = []

    def ask() -> None:
        asked.append(1)
        raise lake.LakeError("not now")

    kept = page.Kept(ask, 60)
    for _ in range(3):
        with pytest.raises(lake.LakeError, match="not now"):
            kept.answer()
    assert len(asked) == 1
    kept.until = time.monotonic()
    with pytest.raises(lake.LakeError):
        kept.answer()
    assert len(asked) == 2


def test_an_answer_is_not_computed_again_before_its_folder_has_changed(page, tmp_path):
    asked = []
    kept = page.Kept(lambda: asked.append(1), 0, lambda: [page.changed_at(tmp_path), page.changed_at(tmp_path / "nowhere")])

    def asked_after(seconds_ago: int) -> int:
        at = time.time_ns() // 10**9 - seconds_ago
        os.utime(tmp_path, (at, at))
        kept.answer(), kept.answer()
        return len(asked)

    assert (asked_after(60), asked_after(30)) == (1, 2)
    kept.answer()
    assert len(asked) == 2
    assert asked_after(0) == 4  # touched just now: whatever comes within the same tick of the clock must be seen too


# ------------------------------------------------------------------------------------------------------- text from data


@pytest.mark.parametrize("path", [*ROUTES])
def test_answers_are_json_that_no_browser_takes_for_markup(client, path):
    found = client.get(f"/{path}")
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["content-security-policy"].startswith("default-src 'none'")
    assert found.headers["cache-control"] == "no-store"


def test_half_a_surrogate_pair_is_answered(opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    local.want(settings, "main", "running", "half \ud83d", "admin")
    assert b"half \\ud83d" in opened(settings).get("/streams").content


def test_the_page_never_parses_text():
    html = (PLUGINS / "page.html").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc", "DOMParser"):
        assert way not in html, way
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html


def test_the_page_runs_its_own_script_and_no_other(client):
    found = client.get("/")
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-") and policy["style-src"].startswith("'sha256-")
    assert "unsafe" not in found.headers["content-security-policy"]
    assert policy["frame-ancestors"] == "'self'"


# ----------------------------------------------------------------------------------------------------------- Data Docs


@pytest.fixture
def docs(opened: Callable[[Settings], Any], tmp_path: Path) -> Any:
    settings = Settings(_env_file=None, home=tmp_path / "home")
    folder = settings.home / "docs"
    (folder / "validations" / "site").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>Data Docs</h1>")
    (folder / "validations" / "site" / "a run.html").write_text("<h1>a run</h1>")
    (settings.home / "secret.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "index.html").write_text("outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "passwords").symlink_to(settings.home / "secret.json")
    return opened(settings)


@pytest.mark.parametrize(
    ("path", "says"), [("", "Data Docs"), ("index.html", "Data Docs"), ("validations/site/a%20run.html", "a run")]
)
def test_data_docs_are_served_without_any_script(docs, path, says):
    found = docs.get(f"/docs/{path}")
    assert (found.status_code, says in found.text) == (200, True)
    assert found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy and "http" not in policy


OUTSIDE = """
%2e%2e/secret.json %2e%2e%2fsecret.json %2e%2e%2f%2e%2e%2foutside/index.html validations/%2e%2e/%2e%2e/secret.json
%252e%252e/secret.json %2e%2e%5csecret.json ....//secret.json /etc/passwd %2fetc%2fpasswd ~/.bashrc link link/index.html passwords
nowhere.html validations %00 index.html%00.png
"""
"""Dots are written as %2e: a client would resolve them itself, and Airflow would never see them."""


@pytest.mark.parametrize("path", [*OUTSIDE.split(), "x" * 5000])
def test_no_path_leads_out_of_the_docs(docs, path):
    assert docs.get(f"/docs/{path}").status_code == 404


def test_the_report_of_a_day_is_served_with_its_numbers_and_nothing_beside_it(opened, filled, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    now = datetime.now(UTC)
    page_lake.days(settings, now.date())
    client, day = opened(settings), now.date() - timedelta(days=1)
    assert {d["report"] for d in answer(client, "days")["days"]} == {False}
    folder = settings.lake_path / "reports"
    folder.mkdir()
    for name, text in ((f"{day}.html", "its report"), (f"{day}.csv", "pv"), ("last.json", "{}")):
        (folder / name).write_text(text)
    found = client.get(f"/reports/{day}.html")
    assert (found.status_code, found.text) == (200, "its report")
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert client.get(f"/reports/{day}.csv").text == "pv"
    for path in ("last.json", "nowhere.html", "%2e%2e/runs", "..%2fledger", "%00"):
        assert client.get(f"/reports/{path}").status_code == 404, path
    assert {d["day"]: d["report"] for d in answer(opened(settings), "days")["days"]}[str(day)]


def test_a_day_that_has_a_report_alone_is_among_the_days_of_the_span(opened, tmp_path):
    #   days      18   17   16   15   14        12        21 October, the 29th day from there
    #   traffic        *    *    *    *
    #   report    *    *                       *         *
    settings, newest = Settings(_env_file=None, home=tmp_path), date(2026, 11, 17)
    folder = settings.lake_path / "reports"
    folder.mkdir(parents=True)
    for name in ("2026-11-18.html", "2026-11-17.html", "2026-11-12.html", "2026-10-21.html", "2026-13-45.html", "last.json"):
        (folder / name).write_text("")
    alone = [(day["day"], day["pv"], day["hours"]) for day in answer(opened(settings), "days")["days"]]
    assert alone == [("2026-11-18", None, []), ("2026-11-17", None, []), ("2026-11-12", None, [])]  # and nothing was settled yet
    page_lake.days(settings, newest)
    found = answer(opened(settings), "days")["days"]
    assert [(day["day"][-2:], day["pv"] is not None, day["report"]) for day in found] == [
        ("18", False, True), ("17", True, True), ("16", True, False), ("15", True, False), ("14", True, False),
        ("12", False, True),
    ]  # fmt: skip


def test_a_verdict_knows_its_page_in_the_docs(opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    now = datetime.now(UTC)
    page_lake.runs(settings, now.date(), now)
    run = f"settle-{now.date() - timedelta(days=2)}"
    folder = settings.home / "docs" / "validations" / "site_daily_traffic" / run / "20261119T000000.000000Z"
    folder.mkdir(parents=True)
    (folder / "site_daily_traffic.html").write_text("its page")
    client = opened(settings)
    found = answer(client, f"verdicts/{run}")["docs"]
    assert list(found) == ["site_daily_traffic"]
    assert client.get(f"/docs/{found['site_daily_traffic']}").text == "its page"
