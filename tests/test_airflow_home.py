"""What every process of Airflow is told."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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

    def command(_settings: Settings, what: str, *_: str) -> str:
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
