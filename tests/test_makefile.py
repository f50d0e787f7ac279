"""The Makefile, run as it is: what it asks of a machine, and what it forgets."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make(folder: Path, *words: str, **said: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "Makefile", folder)
    own = {name: value for name, value in os.environ.items() if name != "UV_CACHE_DIR"}
    return subprocess.run(["make", *words], cwd=folder, env=own | said, capture_output=True, text=True)


@pytest.mark.parametrize(("code", "left"), [(1, True), (0, False)])
def test_demo_is_forgotten_once_everything_has_ended(tmp_path: Path, code: int, left: bool) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    program(tmp_path / ".venv/bin/tidemark", f"exit {code}")
    program(tmp_path / ".venv/bin/python", f"rm {kept}")
    assert (make(tmp_path, "clean-demo", "-o", "install").returncode != 0, kept.exists()) == (left, left)
