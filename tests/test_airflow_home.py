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
