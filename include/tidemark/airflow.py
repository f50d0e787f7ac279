"""Airflow on one machine: its home, its secrets, its four processes. Nothing here imports Airflow."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from tidemark import local, session
from tidemark.settings import ROOT, Settings

COMPONENTS = {"airflow-api": "api-server", "airflow-dags": "dag-processor"}
COMPONENTS |= {"airflow-triggerer": "triggerer", "airflow-scheduler": "scheduler"}
"""In the order of their start: a task that begins before the API server answers fails."""
WITHOUT_LOG_SERVERS = ("scheduler", "triggerer")
"""Their logs are read from this machine's disk; a server of each would listen beyond loopback."""

POOLS = {
    "stream": (32, "Watching the streams; a deferred watcher holds a slot."),
    "spark": (1, "One Spark application at a time, beside the streams."),
    "light": (8, "Looks, gates and publications: no Spark."),
    "wait": (8, "Nights that wait for the streams; a deferred one holds a slot."),
}


class AirflowFailed(RuntimeError):
    """A component of Airflow did not come up, and the sentence names its log; or a command of Airflow's failed."""


def home(settings: Settings) -> Path:
    return settings.home.absolute() / "airflow"


def url(settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.airflow_port}"


def secret(settings: Settings) -> Mapping[str, str]:
    """Keys and passwords, made at the first start and kept where only this user reads: `<home>/airflow/secrets.json`."""
    kept = home(settings) / "secrets.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = {name: secrets.token_urlsafe(64) for name in ("jwt", "session")}
        made["fernet"] = base64.urlsafe_b64encode(os.urandom(32)).decode()
        private(kept, made)
    return json.loads(kept.read_text())


def passwords(settings: Settings) -> tuple[dict[str, str], bool]:
    """The passwords of `admin` and `viewer`, and whether they were made just now."""
    kept = home(settings) / "passwords.json"
    if kept.exists():
        return json.loads(kept.read_text()), False
    kept.parent.mkdir(parents=True, exist_ok=True)
    made = {name: secrets.token_urlsafe(12) for name in ("admin", "viewer")}
    private(kept, made)
    return made, True


def private(path: Path, content: Mapping[str, str]) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def environment(settings: Settings) -> dict[str, str]:
    """What every process of Airflow is told, and every task inherits; settings of the platform included, so that whatever it
    starts is of one mind: what `.env` says later holds from the next start on."""
    keys = secret(settings)
    database = settings.airflow_database.get_secret_value() if settings.airflow_database else None
    said = {
        "AIRFLOW_HOME": str(home(settings)),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "8",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__DEFAULT_TIMEZONE": "utc",
        "AIRFLOW__CORE__FERNET_KEY": keys["fernet"],
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url(settings)}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home(settings) / "passwords.json"),
        # A reader of 5 s gives up while restarted components adopt tasks.
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database or f"sqlite:///{home(settings) / 'airflow.db'}?timeout=30",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(settings.airflow_port),
        "AIRFLOW__API__BASE_URL": url(settings),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__SECRET_KEY": keys["session"],
        "AIRFLOW__API_AUTH__JWT_SECRET": keys["jwt"],
        # A new DAG file is seen in seconds, not in five minutes.
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
        # A task outlives an API server that is away for two minutes, and a trigger that fires at once is not lost.
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "120",
        "AIRFLOW__WORKERS__EXECUTION_API_RETRIES": "30",
        "AIRFLOW__WORKERS__EXECUTION_API_RETRY_WAIT_MAX": "5",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(
            {"conn_type": "spark", "host": settings.master, "extra": {"deploy-mode": "client"}}
        ),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "GX_ANALYTICS_ENABLED": "false",
        "TIDEMARK_ENV_FILE": os.devnull,
        "NO_PROXY": unproxied(),
        "no_proxy": unproxied(),
        "PYTHONDONTWRITEBYTECODE": "",  # else each task compiles the platform's files again, a third of its CPU
    }
    hidden = {name for name, value in settings if isinstance(value, SecretStr)}  # a dump has asterisks for them
    own = settings.model_dump(mode="json", exclude_none=True, exclude=hidden)
    own |= {"home": str(settings.home.absolute()), "lake": str(settings.lake_path), "jars_dir": str(settings.jars)}
    for name in ("kafka_password", "airflow_database"):  # and no web hook: the notifier alone has them
        if given := getattr(settings, name):
            own[name] = given.get_secret_value()
    said |= {f"TIDEMARK_{name.upper()}": str(value) for name, value in own.items()}
    return said


def unproxied() -> str:
    """What no proxy is asked for: what this process was told, and this machine, where tasks ask Airflow's API."""
    told = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return told if told.strip() == "*" else ",".join(filter(None, [told, "127.0.0.1", "localhost"]))


def command(settings: Settings, *argv: str, seconds: float | None = 180, own: Mapping[str, str] | None = None) -> str:
    """Run one command of Airflow's, with variables of one's own beside. Raises `AirflowFailed` with what it said last, or where
    it did not end in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *argv],
            env=clean() | environment(settings) | dict(own or {}),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise AirflowFailed(f"airflow {' '.join(argv)} did not end within {seconds:g} s") from None
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()
        said = [line for line in told if not line.startswith(("[SQL:", "[parameters:", "(Background on"))]  # SQLAlchemy's last
        raise AirflowFailed(f"airflow {' '.join(argv)} ended with exit code {done.returncode}: {said[-1] if said else ''}")
    return done.stdout


def connection(settings: Settings, name: str) -> dict[str, Any] | None:
    """A connection as Airflow knows it (from its environment, a secrets backend or its database): host, login, password, extra.

    None where it knows no such connection. Takes the seconds that Airflow's command line needs. The password is in no argument
    and no log. Where this process was told of an Airflow (in a container), that one is asked. Raises `AirflowFailed`.
    """
    told = "AIRFLOW_" if "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN" in os.environ else "AIRFLOW_CONN_"
    own = {n: v for n, v in os.environ.items() if n.startswith(told)}
    try:
        said = json.loads(command(settings, "connections", "get", name, "--output", "json", own=own))[0]
    except AirflowFailed as error:
        if "Connection not found" not in str(error):
            raise
        command(settings, "db", "check", own=own)  # of a database that does not answer Airflow says the same
        return None
    extra = said.get("extra_dejson") or {}
    return {"host": said.get("host"), "login": said.get("login"), "password": said.get("password"), "extra": extra}


def clean() -> dict[str, str]:
    """This process's environment without what would tell Airflow otherwise, or slow its imports threefold."""
    return {n: v for n, v in os.environ.items() if not n.startswith("AIRFLOW_") and n != "PYTHONDONTWRITEBYTECODE"}


def bring_up(settings: Settings, say: Callable[[str], None] = lambda _: None, patience: float = 120) -> None:
    """Start what of Airflow does not run, and return once all four components are healthy.

    Its database is made or migrated first, its pools are set. `say` is told of each step, and ends all by raising.
    Raises `AirflowFailed`, `PortBusy`, `JavaMissing`.
    """
    session.one_java()
    if not local.running(settings, "airflow-api"):
        local.refuse_busy("127.0.0.1", settings.airflow_port, "TIDEMARK_AIRFLOW_PORT")
    passwords(settings)
    if any(not local.running(settings, name) for name in COMPONENTS):
        say("database")
        prepare(settings)
    began = datetime.now(UTC)
    for name in COMPONENTS:
        if not local.running(settings, name):
            local.stop(settings, name, patience=5)  # what a killed one has left would keep its ports
    for name, component in COMPONENTS.items():
        if not local.running(settings, name):
            argv = [sys.executable, "-m", "airflow", component]
            argv += ["--skip-serve-logs"] if component in WITHOUT_LOG_SERVERS else []
            say(component)
            local.start(settings, name, argv, environment(settings))
        if name == "airflow-api":
            wait(settings, lambda: health(settings) == {}, patience)
    wait(settings, lambda: bool(unwell(settings, began)), patience)


def prepare(settings: Settings) -> None:
    # Whether a database has its pools is known of the file that is here alone; one that was lost has none.
    same = settings.airflow_database is None and (home(settings) / "airflow.db").exists()
    command(settings, "db", "migrate", seconds=None)  # one that is killed leaves a database between two versions
    pools = home(settings) / "pools.json"  # what the database has
    said = json.dumps({n: {"slots": s, "description": d, "include_deferred": True} for n, (s, d) in POOLS.items()})
    if not same or not pools.exists() or pools.read_text() != said:
        wanted = pools.with_suffix(".new")
        wanted.write_text(said)
        command(settings, "pools", "import", str(wanted))
        wanted.replace(pools)


def wait(settings: Settings, sick: Callable[[], bool], patience: float) -> None:
    """Until nothing is sick any more. Raises `AirflowFailed` for a component that ends, or when it takes too long."""
    deadline = time.monotonic() + patience
    while sick():
        for name in COMPONENTS:
            if local.recorded(settings, name) and not local.running(settings, name):
                raise AirflowFailed(f"{name} ended; it says why in {settings.state / 'logs' / f'{name}.log'}")
        if time.monotonic() > deadline:
            raise AirflowFailed(
                f"Airflow is not healthy after {patience:g} s; its components say why in {settings.state / 'logs'}"
            )
        time.sleep(0.25)


def health(settings: Settings) -> dict[str, Any]:
    """What Airflow says of its components; empty where it does not answer."""
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has another 127.0.0.1
        with direct.open(f"{url(settings)}/api/v2/monitor/health", timeout=5) as answer:
            return json.load(answer)
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError):
        return {}


def unwell(settings: Settings, since: datetime) -> list[str]:
    """Components that are not healthy, or whose last heartbeat may be of a process before this start."""
    said = health(settings)
    found = []
    for name in ("metadatabase", "scheduler", "triggerer", "dag_processor"):
        one = said.get(name, {})
        at = one.get(f"latest_{name}_heartbeat")
        fresh = name == "metadatabase" or (at and datetime.fromisoformat(at) >= since)
        if one.get("status") != "healthy" or not fresh:
            found.append(name)
    return found


def take_down(settings: Settings) -> bool:
    """End Airflow's processes and what they started, but no stream. Returns whether any ran.

    The scheduler first, whose tasks speak with the API server to their end; then the others side by side.
    """

    def end(name: str) -> bool:
        return local.stop(settings, name, patience=15)

    others = [name for name in COMPONENTS if name != "airflow-scheduler"]
    ran = end("airflow-scheduler")
    with ThreadPoolExecutor(len(others)) as side_by_side:
        return any([ran, *side_by_side.map(end, others)])
