"""What every process of Airflow is told."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from tidemark import airflow
from tidemark.settings import Settings


def test_tasks_keep_what_they_compile_whatever_the_shell_says(
    fresh_settings: Callable[[Path], Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = os.environ | airflow.environment(fresh_settings(tmp_path))
    argv = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_pools_that_could_not_be_set_are_set_at_the_next_start(
    fresh_settings: Callable[[Path], Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    start     [pools set)   another pool   [killed)   [pools set)   [nothing to set)
    """
    settings, broken, done = fresh_settings(tmp_path), [], list[str]()
    airflow.home(settings).mkdir(parents=True)
    (airflow.home(settings) / "airflow.db").touch()

    def command(_settings: Settings, what: str, *_: str, **__: object) -> str:
        if what == "pools" and broken:
            raise KeyboardInterrupt
        done.append(what)
        return ""

    monkeypatch.setattr(airflow, "command", command)
    airflow.prepare(settings)
    monkeypatch.setitem(airflow.POOLS, "more", (1, "Another pool."))
    broken.append(True)
    with pytest.raises(KeyboardInterrupt):
        airflow.prepare(settings)
    broken.clear()
    for _ in range(2):
        airflow.prepare(settings)
    assert done == ["db", "pools", "db", "db", "pools", "db"]


def test_migration_has_whatever_time_it_takes_and_another_command_that_is_slow_is_a_sentence(
    fresh_settings: Callable[[Path], Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration that is cut off leaves a database that is neither the old nor the new."""

    def slow(argv: list[str], *, timeout: float | None, **_: object) -> subprocess.CompletedProcess[str]:
        if timeout is not None:
            raise subprocess.TimeoutExpired(argv, timeout)
        done.append(argv[3:])
        return subprocess.CompletedProcess(argv, 0, "", "")

    done = list[list[str]]()
    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(airflow.AirflowFailed, match=r"^airflow pools import .*pools\.new did not end within 180 s$"):
        airflow.prepare(fresh_settings(tmp_path))
    assert done == [["db", "migrate"]]


TOLD = """
from tidemark.settings import Settings
said = Settings()
print(said.zone, said.airflow_database.get_secret_value(), said.wecom_webhook)
"""


@pytest.mark.parametrize("line", ["TIDEMARK_WECOM_WEBHOOK=https://a", "TIDEMARK_ZONE: Asia/Tokyo"], ids=["another", "broken"])
def test_airflow_and_what_it_starts_keep_what_was_said_at_its_start_whatever_env_says_later(
    fresh_settings: Callable[[Path], Settings], tmp_path: Path, line: str
) -> None:
    """
    .env      [Europe/Berlin              [another line
    Airflow             [Europe/Berlin ······· a night)
    """
    then = fresh_settings(tmp_path).model_copy(update={"zone": "Europe/Berlin", "airflow_database": SecretStr("sqlite:///x")})
    (tmp_path / ".env").write_text(f"{line}\n")
    env = {n: v for n, v in airflow.clean().items() if n != "TIDEMARK_ENV_FILE"} | airflow.environment(then)
    done = subprocess.run([sys.executable, "-c", TOLD], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("Europe/Berlin sqlite:///x None\n", "")


class Healthy(BaseHTTPRequestHandler):
    """Airflow's API, as far as a start asks it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"scheduler": {"status": "healthy"}}')

    def log_message(self, *_: object) -> None: ...


def test_airflow_is_asked_how_it_is_without_a_proxy(settings: Settings, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")  # where nothing listens
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        found = airflow.health(settings.model_copy(update={"airflow_port": server.server_port}))
    assert found == {"scheduler": {"status": "healthy"}}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "intra.example"}, "intra.example,127.0.0.1,localhost"),
        ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, "a.example,127.0.0.1,localhost"),  # as urllib chooses
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_tasks_ask_airflow_without_a_proxy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], told: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    handed = airflow.environment(settings)
    assert (handed["NO_PROXY"], handed["no_proxy"]) == (told, told)
