"""Airflow in charge, for real: a running Airflow over a real broker, stream and lake, asked by its REST API.

One home; the tests follow each other. The checkout is copied, so that a mistake can be shipped in it and mended.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tidemark import airflow, kafka, lake, local, query
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

pytestmark = pytest.mark.long

TODAY = datetime.now(UTC).date()
YESTERDAY = TODAY - timedelta(days=1)
DAYS = [TODAY - timedelta(days=n) for n in (4, 3, 2)]
PARTIAL = TODAY - timedelta(days=6)
RIGHT, WRONG = 'distinct("visitor_id").alias("visitors")', 'distinct(F.substring("visitor_id", 1, 4)).alias("visitors")'


class House:
    """A copy of the checkout, its broker, its Airflow, and a client that has logged in."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self.settings, self.root = settings, root
        self.started: datetime
        self.http = httpx.Client(base_url=airflow.url(settings), timeout=60)

    def tidemark(self, *argv: str) -> str:
        """A command of the copied checkout's platform."""
        env = airflow.clean() | airflow.environment(self.settings) | {"PYTHONPATH": str(self.root / "include")}
        done = subprocess.run([sys.executable, "-m", "tidemark", *argv], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def up(self) -> float:
        """Start Airflow as `tidemark up --airflow` does; the seconds until it was healthy."""
        began = time.monotonic()
        self.tidemark("up", "--airflow")
        self.log_in()
        return time.monotonic() - began

    def log_in(self, user: str = "admin") -> None:
        known, _ = airflow.passwords(self.settings)
        said = self.http.post("/auth/token", json={"username": user, "password": known[user]})
        said.raise_for_status()
        self.http.headers["Authorization"] = f"Bearer {said.json()['access_token']}"

    def get(self, path: str, **params: Any) -> Any:
        said = self.http.get(f"/api/v2/{path}", params=params)
        said.raise_for_status()
        return said.json()

    def post(self, path: str, body: Any, ok: bool = True) -> httpx.Response:
        said = self.http.post(f"/api/v2/{path}", json=body)
        assert said.is_success == ok, said.text
        return said

    def backfill(self, body: Any) -> int | None:
        """The backfill's number. Airflow on SQLite answers 503 where another process writes in that moment."""
        said = self.http.post("/api/v2/backfills", json=body)
        assert said.is_success or "Database is locked" in said.text, said.text
        return said.json()["id"] if said.is_success else None

    def backfill_by_command(self, *argv: str) -> bool:
        """Whether Airflow's own command made the backfill; it says of a lock what the API does."""
        try:
            airflow.command(self.settings, "backfill", "create", "--dag-id", "nightly", *argv)
        except airflow.AirflowFailed as refused:
            assert "database is locked" in str(refused)
            return False
        return True

    def backfilled(self) -> list[tuple[str, str]]:
        """Day and state of each run of a backfill, as they began."""
        runs = self.get("dags/nightly/dagRuns", run_type="backfill", limit=100, order_by="start_date")["dag_runs"]
        return [(r["data_interval_start"][:10], r["state"]) for r in runs]

    def trigger(self, dag: str, **conf: Any) -> str:
        return self.post(f"dags/{dag}/dagRuns", {"logical_date": None, "conf": conf}).json()["dag_run_id"]

    def tasks(self, dag: str, run: str) -> dict[str, dict[str, Any]]:
        found = self.get(f"dags/{dag}/dagRuns/{run}/taskInstances", limit=200)["task_instances"]
        return {
            t["task_id"] if t["map_index"] < 0 else f"{t['task_id']}[{t['rendered_map_index'] or t['map_index']}]": t
            for t in found
        }

    def ended(self, dag: str, run: str, seconds: float = 900) -> str:
        """The run's state, once it has one that lasts."""
        return self.until(lambda: (s := self.get(f"dags/{dag}/dagRuns/{run}")["state"]) in ("success", "failed") and s, seconds)

    def log(self, dag: str, run: str, task: str, number: int = 1, mapped: int = -1) -> str:
        path = f"dags/{dag}/dagRuns/{run}/taskInstances/{task}/logs/{number}"
        return json.dumps(self.get(path, map_index=mapped, full_content="true"))

    def until(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.3)
        return found

    def rows(self, sql: str) -> list[Any]:
        return query.query(self.settings, CATALOG, sql).rows

    def asset_events(self) -> set[str] | None:
        """The names of assets that something happened to. Airflow 3.3.2 answers 500 while a run waits that one has created."""
        said = self.http.get("/api/v2/assets/events", params={"limit": 100})
        return {event["name"] for event in said.json()["asset_events"]} if said.is_success else None

    def settled(self, table: str, day: date) -> int:
        [(n,)] = self.rows(f"SELECT count(*) FROM {table} WHERE day = '{day}' AND settled")
        return n

    def versions(self) -> dict[str, int]:
        return {d.name: lake.table(self.settings, d).delta().version() for d in CATALOG.derived}

    def watching(self) -> dict[str, Any] | None:
        """The task that watches stream main, the first of them, now."""
        if self.http.get("/api/v2/dags/speed_layer").status_code == 404:
            return None  # not parsed yet
        runs = self.get("dags/speed_layer/dagRuns", order_by="-run_after", limit=1)["dag_runs"]
        if not runs:
            return None
        found = self.tasks("speed_layer", runs[0]["dag_run_id"])
        watches = [t for name, t in found.items() if name.startswith("watch") and t["map_index"] == 0]
        return next((t for t in watches if t["state"] == "deferred"), None)

    def streams(self) -> list[psutil.Process]:
        """The processes of stream main of this home; a child of one is what it starts, in the moment before it is that."""
        found = [p for p in psutil.process_iter(["cmdline", "ppid"]) if {"speed", "main"} <= set(p.info["cmdline"] or [])]
        found = [p for p in found if p.info["ppid"] not in {other.pid for other in found}]
        return [p for p in found if p.environ().get("TIDEMARK_HOME") == str(self.settings.home)]

    def here(self) -> Iterator[psutil.Process]:
        """Whatever runs that was told of this home, names its folder, or is of the session of what was started here: Airflow's
        processes give themselves a title, which takes the place of both."""
        sessions = {process.pid for process in local.processes(self.settings)}
        for one in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                told = str(self.root) in " ".join(one.cmdline()) or one.environ().get("TIDEMARK_HOME") == str(self.settings.home)
                if told or os.getsid(one.pid) in sessions:
                    yield one

    def processes(self) -> list[str]:
        return [str(one) for one in self.here()]

    def pid(self) -> int:
        return local.status(self.settings)["heartbeat"]["pid"]

    def kill_airflow(self) -> None:
        """SIGKILL to every process of every component; one of them may end with another."""
        for name in airflow.COMPONENTS:
            for one in local.orphans(local.recorded(self.settings, name)):  # type: ignore[arg-type]
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)

    def begun_again(self, pid: int) -> None:
        """Wait until stream main runs in another process."""
        self.until(lambda: local.beats(self.settings, "main") and self.pid() != pid)
        self.until(lambda: local.status(self.settings)["heartbeat"]["state"] == "running")


@pytest.fixture(scope="module")
def house(jars: Path, fresh_settings: Callable[[Path], Settings], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("charge")
    for part in ("include", "dags", "plugins", "spark_apps"):
        shutil.copytree(airflow.ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    own = fresh_settings(folder / "home").model_dump() | {"driver_memory": "1g", "nightly_after": "1 second"}
    own["airflow_port"] = int(fresh_settings(folder).brokers.rpartition(":")[2])
    there = House(Settings(_env_file=None, **own), folder)
    local.start_broker(there.settings)
    kafka.apply(there.settings, CATALOG.topics.values())
    for n, day in enumerate([*DAYS, YESTERDAY]):
        produce(there, kafka.sample(CATALOG.topics["page_views"], seed=n, count=2000, day=day, zone=there.settings.tz))
    noon = datetime(PARTIAL.year, PARTIAL.month, PARTIAL.day, 12, tzinfo=UTC)
    produce(there, (event(f"noon-{n}", noon + timedelta(seconds=n)) for n in range(50)))
    yield there
    assert there.processes() != []
    there.tidemark("down")
    assert there.processes() == []


def event(name: str, at: datetime) -> dict[str, str]:
    return {"event_id": name, "visitor_id": f"v{name}", "page": "/", "viewed_at": at.isoformat()}


def produce(house: House, events: Any) -> None:
    assert kafka.produce(house.settings, CATALOG.topics["page_views"], events).complete


def test_airflow_is_healthy_and_has_adopted_the_stream(house: House) -> None:
    house.up()
    began = local.recorded(house.settings, "airflow-api").created  # type: ignore[union-attr]  # the first of the four
    assert time.clock_gettime(time.CLOCK_BOOTTIME) - began < 30
    watching = house.until(house.watching)
    house.until(lambda: local.status(house.settings).get("heartbeat", {}).get("state") == "running")
    log = house.log("speed_layer", watching["dag_run_id"], "watch", mapped=watching["map_index"])
    assert "adopted stream main" in log or "started stream main" in log
    house.until(lambda: sum(r["records"] for r in lake.ledger_rows(house.settings, "main")) >= 4 * 2000 + 50)


def test_whatever_listens_listens_on_loopback_alone(house: House) -> None:
    open_doors = set()
    for one in house.here():
        with suppress(psutil.NoSuchProcess):
            open_doors |= {c.laddr for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    wanted = {house.settings.airflow_port, int(house.settings.brokers.rpartition(":")[2])}
    assert wanted <= {door.port for door in open_doors}
    assert [door for door in open_doors if door.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")] == []


def test_kill_of_all_of_airflow_leaves_the_stream_and_its_watcher_goes_on(house: House) -> None:
    before, pid = house.until(house.watching), house.pid()
    house.kill_airflow()
    produce(house, [event("while-away", datetime.now(UTC))])
    house.up()
    after = house.until(house.watching)
    assert house.pid() == pid
    assert (after["dag_run_id"], after["try_number"]) == (before["dag_run_id"], before["try_number"])
    produce(house, [event("after-it", datetime.now(UTC))])
    house.until(lambda: house.rows("SELECT count(*) FROM page_views WHERE event_id = 'after-it'") == [(1,)])

    def says_the_newest_batch() -> bool:
        seq = local.status(house.settings)["progress"]["seq"]
        return f"batch {seq}" in house.log("speed_layer", after["dag_run_id"], "watch", mapped=after["map_index"])

    house.until(says_the_newest_batch)


def test_killed_stream_is_started_again_and_there_is_never_a_second(house: House) -> None:
    pid = house.pid()
    os.kill(pid, signal.SIGKILL)
    house.begun_again(pid)
    assert len(house.streams()) == 1


def test_ten_kills_of_all_of_airflow_and_of_the_stream_lose_and_double_nothing(
    house: House, record_testsuite_property: Callable[[str, Any], None]
) -> None:
    watched_again: list[float] = []
    for n in range(10):
        house.until(house.watching)
        house.until(lambda: local.status(house.settings).get("heartbeat", {}).get("state") == "running")
        os.kill(house.pid(), signal.SIGKILL)
        produce(house, [event(f"kill-{n}-a", datetime.now(UTC))])
        house.kill_airflow()
        produce(house, [event(f"kill-{n}-b", datetime.now(UTC))])
        house.up()
        back = time.monotonic()
        house.until(house.watching)
        watched_again.append(time.monotonic() - back)
        house.until(lambda: local.beats(house.settings, "main"))
        assert len(house.streams()) == 1
    record_testsuite_property("seconds_until_watched_again", [round(s, 1) for s in watched_again])
    assert max(watched_again) < 30, watched_again
    told = "SELECT count(*), count(DISTINCT event_id) FROM page_views WHERE event_id LIKE 'kill-%'"
    house.until(lambda: house.rows(told) == [(20, 20)])


def test_night_settles_yesterday_and_publishes_each_table(house: House) -> None:
    house.until(lambda: house.http.get("/api/v2/dags/nightly").is_success)
    run = house.until(lambda: house.get("dags/nightly/dagRuns", limit=5)["dag_runs"])[0]["dag_run_id"]
    assert house.ended("nightly", run) == "success"
    assert house.settled("site_daily_traffic", YESTERDAY) == 1
    tasks = house.tasks("nightly", run)
    assert tasks["each.publish[site_daily_traffic]"]["state"] == "success" and tasks["settle"]["priority_weight"] == 20
    assert {"tidemark_site_daily_traffic", "tidemark_night"} <= house.until(house.asset_events)


def test_failing_gate_holds_back_its_own_table_and_the_run_is_red(house: House) -> None:
    before = house.versions()
    run = house.trigger("nightly", day=str(PARTIAL))
    assert house.ended("nightly", run) == "failed"
    tasks = house.tasks("nightly", run)
    states = {name: t["state"] for name, t in tasks.items()}
    assert states["each.gate[site_hourly_traffic]"] == "failed"
    [held] = [t for name, t in tasks.items() if name.startswith("each.publish") and t["state"] == "upstream_failed"]
    assert held["map_index"] == tasks["each.gate[site_hourly_traffic]"]["map_index"]
    assert states["each.publish[hourly_traffic]"] == "success"
    gate = tasks["each.gate[site_hourly_traffic]"]
    log = house.log("nightly", run, "each.gate", mapped=gate["map_index"])
    assert "every hour of the day is present" in log and "publish_over" in log
    after = house.versions()
    assert house.settled("site_hourly_traffic", PARTIAL) == 0 and after["page_panes"] > before["page_panes"]

    # A person takes the check upon themselves, with a reason that stays.
    known = next(r for r in lake.runs(house.settings) if r.days == [str(PARTIAL)])
    over = house.trigger("publish_over", run=known.id, checks=["every hour of the day is present"], reason="a partial first day")
    assert house.ended("publish_over", over) == "success"
    assert house.settled("site_hourly_traffic", PARTIAL) == 1
    assert lake.run_of(house.settings, known.id).tables["site_hourly_traffic"]["forced"]["reason"] == "a partial first day"


def test_backfill_is_paused_cancelled_and_asked_again_for_the_days_that_lack(house: House) -> None:
    """Three days in order, each once and behind tonight: one before the pause, one before the end, one of the second backfill."""
    before = {run.id for run in lake.runs(house.settings)}
    first, second, third = map(str, DAYS)

    def states(*wanted: str) -> bool:
        return sorted(house.backfilled()) == [(first, wanted[0]), (second, wanted[1]), (third, wanted[2])]

    def change(verb: str) -> bool:
        return house.http.put(f"/api/v2/backfills/{backfill}/{verb}").is_success

    def settled() -> list[list[str]]:
        return [run.days for run in lake.runs(house.settings) if run.id not in before]

    def scheduler_has_looked() -> None:
        assert house.ended("control", house.trigger("control", action="start", reason="it runs already")) == "success"

    house.until(lambda: house.backfill_by_command("--from-date", first, "--to-date", third, "--max-active-runs", "1"))
    backfill = house.get("backfills", dag_id="nightly", order_by="-id")["backfills"][0]["id"]
    house.until(lambda: states("running", "queued", "queued"))
    house.until(lambda: change("pause"))
    house.until(lambda: states("success", "queued", "queued"), 600)
    scheduler_has_looked()
    assert states("success", "queued", "queued")

    house.until(lambda: change("unpause"))
    house.until(lambda: states("success", "running", "queued"))
    house.until(lambda: change("cancel"))
    assert house.get(f"backfills/{backfill}")["completed_at"]
    house.until(lambda: states("success", "success", "failed"), 600)
    scheduler_has_looked()
    assert states("success", "success", "failed")
    assert settled() == [[first], [second]] and house.settled("site_daily_traffic", DAYS[2]) == 0

    from_first, to_third = (datetime.combine(d, datetime.min.time(), UTC).isoformat() for d in (DAYS[0], DAYS[2]))
    body = {"dag_id": "nightly", "from_date": from_first, "to_date": to_third, "max_active_runs": 1}
    again = house.until(lambda: house.backfill(body | {"reprocess_behavior": "failed"}))
    house.until(lambda: house.get(f"backfills/{again}")["completed_at"], 600)
    assert house.backfilled() == [(first, "success"), (second, "success"), (third, "success")]
    assert [house.settled("site_daily_traffic", d) for d in DAYS] == [1, 1, 1]
    # Each Spark application notes one run; of the tasks that wait for the pool the heaviest goes first.
    assert settled() == [[first], [second], [third]]
    runs = house.get("dags/nightly/dagRuns", run_type="backfill", limit=100)["dag_runs"]
    assert {house.tasks("nightly", r["dag_run_id"])["settle"]["priority_weight"] for r in runs} == {1}


@pytest.mark.parametrize(
    ("dag", "conf", "said"),
    [
        ("nightly", {"day": "2026-13-01"}, "2026-13-01"),
        ("nightly", {"day": "yesterday"}, "yesterday"),
        ("reprocess", {"reason": "x"}, "x"),
        ("reprocess", {"source": "tape", "reason": "why not"}, "tape"),
        ("reprocess", {"tables": ",", "reason": "why not"}, "does not match"),
        ("control", {"action": "explode", "reason": "why not"}, "explode"),
        ("rollback", {"run": "some-run"}, "reason"),
    ],
)
def test_form_value_outside_its_schema_is_refused(house: House, dag: str, conf: dict[str, Any], said: str) -> None:
    assert said in house.post(f"dags/{dag}/dagRuns", {"logical_date": None, "conf": conf}, ok=False).text


def test_page_asks_who_looks_starts_no_spark_and_a_viewer_starts_nothing(house: House) -> None:
    def shown(part: str) -> bool:
        said = house.http.get(f"/tidemark/{part}").status_code
        assert said in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE)  # that says a question took too long
        return said == httpx.codes.OK

    parts = ("", "hour", "pages", "streams", "days", "verdicts", "runs", "rejects", "tables", "views")
    nobody = [httpx.get(f"{airflow.url(house.settings)}/tidemark/{part}", timeout=60).status_code for part in parts]
    assert nobody == [httpx.codes.UNAUTHORIZED] * len(parts)
    house.log_in("viewer")
    try:
        for part in parts:
            house.until(lambda: shown(part))  # noqa: B023
        form = {"logical_date": None, "conf": {"action": "drain", "reason": "a viewer's"}}
        assert house.http.post("/api/v2/dags/control/dagRuns", json=form).status_code == httpx.codes.FORBIDDEN
    finally:
        house.log_in()
    server = local.recorded(house.settings, "airflow-api")
    assert "java" not in {one.name() for one in local.orphans(server)}  # type: ignore[arg-type]


def test_day_in_the_future_is_refused_with_a_sentence(house: House) -> None:
    run = house.trigger("nightly", day=str(TODAY + timedelta(days=3)))
    assert house.ended("nightly", run) == "failed"
    assert "is not over in UTC; the last day that can be settled is" in house.log("nightly", run, "wait")


def test_night_past_its_deadline_is_told_of_while_it_runs(house: House) -> None:
    """One of a day without an event, which nobody has settled: Spark alone takes longer than its five seconds."""

    def known(seconds: float) -> bool:
        alerts = house.http.get("/ui/dags/nightly/deadlineAlerts").raise_for_status().json()["deadline_alerts"]
        return [alert["interval"] for alert in alerts] == [seconds]

    def told(run: str) -> bool:
        alerts = house.settings.state / "alerts.jsonl"
        lines = map(json.loads, alerts.read_text().splitlines() if alerts.exists() else [])
        return [line["text"] for line in lines if line["what"] == "nightly_late"] == [f"run {run}"]

    promised = 8 * 3600 + 1
    assert known(promised)
    said = "(duration(SETTINGS.nightly_after) + duration(SETTINGS.nightly_patience) + timedelta(hours=2)).total_seconds()"
    with changed(house.root / "dags" / "nightly.py", said, "5.0"):
        house.until(lambda: known(5))
        run = house.trigger("nightly", day=str(TODAY - timedelta(days=5)))
        house.until(lambda: told(run))
        assert house.get(f"dags/nightly/dagRuns/{run}")["state"] == "running"
    house.until(lambda: known(promised))
    house.ended("nightly", run)


@contextmanager
def changed(file: Path, before: str, after: str) -> Iterator[None]:
    """A file of the copied checkout, meanwhile otherwise."""
    text = edit(file, before, after)
    try:
        yield
    finally:
        file.write_text(text)


def edit(file: Path, before: str, after: str) -> str:
    """Change a file at its one place; what it held."""
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    return text


def test_reprocess_is_compared_and_dropped_or_published_by_a_person(house: House) -> None:
    before = house.versions()
    first = house.trigger("reprocess", reason="to see", first=str(DAYS[0]))
    house.until(lambda: house.tasks("reprocess", first)["approve"]["state"] == "awaiting_input", 400)
    second = house.trigger("reprocess", reason="a second one")
    assert house.ended("reprocess", second) == "failed"
    assert "waits for a decision" in house.log("reprocess", second, "plan")
    asked = house.get(f"dags/reprocess/dagRuns/{first}/taskInstances/approve/-1/hitlDetails")
    assert "The same on every day" in asked["body"] and "| table | day |" not in asked["body"]  # of all, and none that differs
    assert decided(house, first, "Drop") == "success" and house.versions() == before
    assert [r.state for r in lake.runs(house.settings) if r.reason == "to see"] == ["dropped"]


def decided(house: House, run: str, option: str) -> str:
    """The run's state once it has ended. Each time it asks it is answered, two seconds later as a quick person would: it asks
    again where an answer came too soon for it."""
    asked: dict[int, float] = {}
    path = f"/api/v2/dags/reprocess/dagRuns/{run}/taskInstances/approve/-1/hitlDetails"

    def over() -> str | None:
        approve = house.tasks("reprocess", run)["approve"]
        waits = time.monotonic() - asked.setdefault(approve["try_number"], time.monotonic())
        if approve["state"] == "awaiting_input" and waits > 2:
            said = house.http.patch(path, json={"chosen_options": [option], "params_input": {}})
            assert said.is_success or said.status_code == httpx.codes.CONFLICT, said.text  # it has the answer already
        state = house.get(f"dags/reprocess/dagRuns/{run}")["state"]
        return state if state in ("success", "failed") else None

    return house.until(over, 900)


def test_airflow_without_its_database_comes_back_and_a_night_again_changes_nothing(house: House) -> None:
    rows = {name: house.rows(f"SELECT * FROM {name} WHERE settled ORDER BY ALL") for name in CATALOG.views}
    pid = house.pid()
    airflow.take_down(house.settings)
    for file in (house.settings.home / "airflow").glob("airflow.db*"):
        file.unlink()
    house.up()
    house.until(house.watching)
    assert house.pid() == pid
    house.until(lambda: house.http.get("/api/v2/dags/nightly").is_success)
    run = house.trigger("nightly", day=str(DAYS[0]))
    assert house.ended("nightly", run) == "success"
    assert {name: house.rows(f"SELECT * FROM {name} WHERE settled ORDER BY ALL") for name in CATALOG.views} == rows


def test_a_mistake_is_mended_and_taken_back_all_through_airflow(house: House) -> None:
    """As shipped, visitors are told apart by their first four letters; mended, replayed, approved, taken back."""
    uv = "SELECT uv FROM site_daily_traffic WHERE day = '{}'"
    right = {d: house.rows(uv.format(d)) for d in (*DAYS, YESTERDAY)}
    ship(house, RIGHT, WRONG)
    wrongly = reprocessed(house, "the mistake")
    wrong = {d: house.rows(uv.format(d)) for d in right}
    assert all(wrong[d][0][0] < right[d][0][0] for d in right)
    ship(house, WRONG, RIGHT)
    mended = reprocessed(house, "mended")
    assert {d: house.rows(uv.format(d)) for d in right} == right
    back = house.trigger("rollback", run=mended, reason="to see it go back")
    assert house.ended("rollback", back) == "success"
    assert {d: house.rows(uv.format(d)) for d in right} == wrong and wrongly != mended
    again = house.trigger("rollback", run="no-such-run", reason="to see it refused")
    assert house.ended("rollback", again) == "failed" and "there is no run no-such-run" in house.log(
        "rollback", again, "take_back"
    )


def ship(house: House, before: str, after: str) -> None:
    """Change the copied checkout's pipeline, and have the stream begin again on it."""
    pid = house.pid()
    edit(house.root / "include" / "tidemark" / "pipelines" / "traffic.py", before, after)
    assert house.ended("control", house.trigger("control", action="restart", reason="new code")) == "success"
    house.begun_again(pid)


def reprocessed(house: House, reason: str) -> str:
    run = house.trigger("reprocess", reason=reason, first=str(DAYS[0]))
    house.until(lambda: house.tasks("reprocess", run)["approve"]["state"] == "awaiting_input", 900)
    assert decided(house, run, "Publish") == "success"
    return next(r.id for r in lake.runs(house.settings) if r.reason == reason)


def test_drained_stream_stays_stopped_until_it_is_started(house: House) -> None:
    assert house.ended("control", house.trigger("control", action="drain", reason="to look at the disk")) == "success"
    house.until(lambda: not local.beats(house.settings, "main"))
    assert local.status(house.settings)["heartbeat"]["state"] == "stopped"
    watching = house.until(house.watching)
    house.until(
        lambda: "to look at the disk" in house.log("speed_layer", watching["dag_run_id"], "watch", mapped=watching["map_index"])
    )
    assert house.ended("control", house.trigger("control", action="start", reason="looked")) == "success"
    house.until(lambda: local.status(house.settings).get("heartbeat", {}).get("state") == "running")


def test_stream_whose_watcher_is_cleared_drains_and_begins_again(house: House) -> None:
    clear_the_watcher(house, ["watch", 0])
    assert len(house.streams()) == 1


def clear_the_watcher(house: House, task: Any) -> None:
    """Clear it, of one stream or of all, and wait until stream main has begun again."""
    watching, pid = house.until(house.watching), house.pid()
    cleared = {"dry_run": False, "only_failed": False, "dag_run_id": watching["dag_run_id"], "task_ids": [task]}
    house.post("dags/speed_layer/clearTaskInstances", cleared)
    house.begun_again(pid)


def test_window_that_ends_hands_the_same_stream_to_the_next_run_within_seconds(house: House) -> None:
    with changed(house.root / "dags" / "speed_layer.py", "Settings().watch_window", '"45 seconds"'):
        clear_the_watcher(house, "watch")
        pid, before, seen = house.pid(), house.until(house.watching), set[int]()

        def next_one() -> dict[str, Any] | None:
            seen.update(one.pid for one in house.streams())
            return (now := house.watching()) and now["dag_run_id"] != before["dag_run_id"] and now

        after = house.until(next_one)
    assert house.get(f"dags/speed_layer/dagRuns/{before['dag_run_id']}")["state"] == "success"
    adopted = house.log("speed_layer", after["dag_run_id"], "watch", mapped=after["map_index"])
    assert f"adopted stream main, pid {pid}" in adopted and (seen, house.pid()) == ({pid}, pid)
    ended = house.tasks("speed_layer", before["dag_run_id"])["watch[main]"]["end_date"]
    unwatched = datetime.fromisoformat(after["start_date"]) - datetime.fromisoformat(ended)
    assert unwatched < timedelta(seconds=30)
