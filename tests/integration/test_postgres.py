"""Airflow's database in a real Postgres: a night is published, what is old is deleted there, and nothing is kept in SQLite."""

import getpass
import importlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
from pydantic import SecretStr

from tidemark import airflow, kafka, local
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

charge = importlib.import_module("test_airflow")
PASSWORD = "of-postgres-3b"


def servers() -> dict[str, str]:
    """The programs that make and run a server: of the PATH, or where Debian has the newest."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    path = str(folders[-1]) if folders else None
    return {name: found for name in ("initdb", "postgres") if (found := shutil.which(name, path=path) or shutil.which(name))}


pytestmark = [pytest.mark.long, pytest.mark.skipif(len(servers()) < 2, reason="there is no Postgres on this machine")]


@pytest.fixture
def url() -> Iterator[str]:
    """SQLAlchemy's URL of a server of its own, which refuses to run as root and wants a password."""
    folder = Path(tempfile.mkdtemp(prefix="tidemark-postgres-"))
    secret, data = folder / "password", folder / "data"
    secret.write_text(PASSWORD)
    own: list[str] = []
    if getpass.getuser() == "root":
        own = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        for path in (folder, secret):
            shutil.chown(path, "postgres", "postgres")
    made = [servers()["initdb"], "-D", data, "-U", "airflow", "--auth=scram-sha-256", f"--pwfile={secret}"]
    subprocess.run([*own, *map(str, made)], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*own, servers()["postgres"], "-D", data, "-p", str(port), *options], stderr=log, cwd=folder)
    yield f"postgresql+psycopg2://airflow:{PASSWORD}@127.0.0.1:{port}/postgres"
    server.terminate()
    server.wait(30)
    shutil.rmtree(folder)


@pytest.fixture
def house(url: str, jars: Path, fresh_settings: Callable[[Path], Settings], tmp_path: Path) -> Iterator[Any]:
    own = fresh_settings(tmp_path / "home").model_dump() | {"driver_memory": "1g", "nightly_after": "1 second"}
    own["airflow_port"] = int(fresh_settings(tmp_path).brokers.rpartition(":")[2])
    there = charge.House(Settings(_env_file=None, **own | {"airflow_database": SecretStr(url)}), airflow.ROOT)
    yield there
    there.tidemark("down")


def test_a_night_is_published_and_nothing_is_kept_elsewhere(house: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMARK_AIRFLOW_DATABASE", url)
    local.start_broker(house.settings)
    kafka.apply(house.settings, CATALOG.topics.values())
    views, zone = CATALOG.topics["page_views"], house.settings.tz
    charge.produce(house, kafka.sample(views, seed=1, count=2000, day=charge.YESTERDAY, zone=zone))
    house.up()
    house.until(house.watching)
    house.until(lambda: house.http.get("/api/v2/dags/nightly").is_success)
    run = house.until(lambda: house.get("dags/nightly/dagRuns", limit=5)["dag_runs"])[0]["dag_run_id"]
    assert house.ended("nightly", run) == "success"
    assert house.settled("site_daily_traffic", charge.YESTERDAY) == 1
    assert {"tidemark_site_daily_traffic", "tidemark_night"} <= house.until(house.asset_events)

    # What is old is deleted in that database, and there is no other.
    cleaned = house.trigger("maintenance")
    house.ended("maintenance", cleaned)
    assert house.tasks("maintenance", cleaned)["airflow_database"]["state"] == "success"
    assert list((house.settings.home / "airflow").glob("*.db*")) == []
    with psycopg2.connect(url.replace("+psycopg2", "")) as talk, talk.cursor() as cursor:
        cursor.execute("SELECT state FROM dag_run WHERE run_id = %s AND dag_id = 'nightly'", (run,))
        assert cursor.fetchall() == [("success",)]

    # A second start finds it as it was, and the password stands in no process's arguments.
    assert not [p for p in psutil.process_iter(["cmdline"]) if PASSWORD in " ".join(p.info["cmdline"] or [])]
    house.tidemark("down")
    house.up()
    assert house.get(f"dags/nightly/dagRuns/{run}")["state"] == "success"
