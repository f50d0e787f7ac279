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
    own = {name: value for name, value in os.environ.items() if name not in ("UV_CACHE_DIR", "XDG_CACHE_HOME")}
    return subprocess.run(["make", *words], cwd=folder, env=own | said, capture_output=True, text=True)


def java(folder: Path, version: str) -> str:
    program(folder / "bin" / "java", f"echo 'openjdk version \"{version}\" 2020-01-01' >&2")
    return str(folder)


@pytest.mark.parametrize(
    ("home", "path", "says"),
    [
        ("11.0.2", "17.0.15", ""),
        ("21.0.1", "1.8.0_392", ""),
        ("11.0.2", "1.8.0_392", "needs a Java runtime of version 17 or newer, on the PATH or in JAVA_HOME; found: 11 8"),
    ],
)
def test_java_of_java_home_gives_way_to_that_of_the_path(tmp_path: Path, home: str, path: str, says: str) -> None:
    """The folders of both have a space in their names."""
    there = f"{java(tmp_path / 'a path', path)}/bin{os.pathsep}{os.environ['PATH']}"
    done = make(tmp_path, "prerequisites", JAVA_HOME=java(tmp_path / "a home", home), PATH=there)
    assert (done.returncode == 0, says in done.stderr) == (not says, True), done.stderr


def test_python_that_can_make_no_environment_for_uv_is_one_sentence(tmp_path: Path) -> None:
    python = program(tmp_path / "python3", 'case "$*" in *ensurepip*) exit 1;; esac')
    done = make(tmp_path, "prerequisites", "UV=.uv/bin/uv", f"PYTHON={python}")
    assert done.returncode and "on Debian: apt install python3-venv; or install uv" in done.stderr
    assert make(tmp_path, "prerequisites", f"UV={program(tmp_path / 'uv', '')}", f"PYTHON={python}").returncode == 0


@pytest.mark.parametrize(("demo", "code", "left"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_demo_is_forgotten_once_everything_has_ended_and_what_is_no_demo_is_not_ended(
    tmp_path: Path, demo: bool, code: int, left: bool
) -> None:
    kept, ended = tmp_path / "kept", tmp_path / "ended"
    kept.touch()
    program(tmp_path / ".venv/bin/tidemark", f"touch {ended}; exit {code}")
    program(tmp_path / ".venv/bin/python", f'case "$*" in *demo.json*) exit {int(not demo)};; esac; rm {kept}')
    assert (make(tmp_path, "clean-demo", "-o", "install").returncode != 0, kept.exists()) == (left, left)
    assert ended.exists() == demo


def test_what_is_downloaded_is_kept_where_uv_keeps_it_or_here_where_the_home_is_read_only(tmp_path: Path) -> None:
    program(tmp_path / "uv", f"echo $UV_CACHE_DIR > {tmp_path / 'said'}")
    (tmp_path / ".venv").mkdir()
    for name in ("pyproject.toml", "uv.lock"):
        (tmp_path / name).touch()
    home, here = str(tmp_path / "a home"), str(tmp_path / ".uv" / "cache")
    for said, wanted in (
        ({"HOME": home}, f"{home}/.cache/uv"),
        ({"HOME": "/proc"}, here),
        ({"HOME": home, "XDG_CACHE_HOME": "/proc"}, here),
        ({"HOME": "/proc", "UV_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
    ):
        assert make(tmp_path, "-B", "install", "UV=./uv", **said).returncode == 0
        assert (tmp_path / "said").read_text() == f"{wanted}\n"
