"""What is measured and how it is said: CPU-seconds and memory of a process tree, and figures with their goals."""

from __future__ import annotations

import json
import operator
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from tidemark.settings import Settings

ORDER = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Figure:
    """One measured number. `goal` is an order and a number (`"< 1.5"`), or None where nothing was asked; `at` is where on the
    axis of its curve it lies, or None where it is a point of none."""

    figure: str
    value: float | None
    unit: str
    against: str = ""
    goal: str | None = None
    at: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the value reaches the goal. What could not be measured has not reached it; no goal, no answer."""
        if self.goal is None:
            return None
        order, bound = self.goal.split()
        return self.value is not None and ORDER[order](self.value, float(bound))

    def plain(self) -> dict[str, Any]:
        value = None if self.value is None else float(f"{self.value:.4g}")
        return {
            "figure": self.figure,
            "value": value,
            "unit": self.unit,
            "against": self.against,
            "goal": self.goal,
            "met": self.met,
        } | ({} if self.at is None else {"at": self.at})


class Tree:
    """A process and everything below it: for a Spark program the Python driver, the JVM and its Python workers."""

    def __init__(self, pid: int | None = None) -> None:
        self.root = psutil.Process(pid)

    def cpu(self) -> float:
        """CPU-seconds so far, user and system, of those that run and of children that ended."""
        found = 0.0
        for process in (self.root, *self.root.children(recursive=True)):
            try:
                found += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return found

    def peak(self) -> float:
        """GiB: the sum of each process's own greatest resident memory, hence at least the greatest sum."""
        pids = (self.root.pid, *(p.pid for p in self.root.children(recursive=True)))
        marks = [
            line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")
        ]
        return sum(int(mark.split()[1]) for mark in marks) / 2**20


class Cost:
    """Wall and CPU-seconds of a block of work in this process tree."""

    def __enter__(self) -> Cost:
        self.tree = Tree()
        self.began, self.before = time.monotonic(), self.tree.cpu()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.monotonic() - self.began, self.tree.cpu() - self.before


def program(module: str, env: Mapping[str, str], **options: Any) -> Any:
    """Run a program of this folder in a process of its own and return the JSON on the last line it says."""
    said = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = subprocess.run([sys.executable, "-m", module, *said], capture_output=True, text=True, env=os.environ | dict(env))
    if done.returncode:
        raise RuntimeError(f"{module} ended with exit code {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def apart(db: Any, ours: str, theirs: str) -> int:
    """Rows that one of two queries of a DuckDB connection has and the other has not, as often as it has them."""
    both = f"(({ours}) EXCEPT ALL ({theirs})) UNION ALL (({theirs}) EXCEPT ALL ({ours}))"
    ((rows,),) = db.execute(f"SELECT count(*) FROM ({both})").fetchall()
    return rows


def stamp(command: str, seed: int) -> dict[str, Any]:
    """What a recorded run says of itself: its command, its time in UTC, its seed, the commit it ran on and the machine."""
    root = Path(__file__).parent.parent
    commit, at = "", datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(FileNotFoundError):  # there is no git
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True).stdout
    return {"command": command, "at": at, "seed": seed, "commit": commit.strip() or "unknown", "machine": machine()}


def machine() -> dict[str, Any]:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load": [round(load, 2) for load in psutil.getloadavg()],
    }


def plain_jvm(settings: Settings) -> dict[str, str]:
    """What `session` is told so that a peer has a JVM as it comes: ours has an archive of classes, and one compiler."""
    return {"spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile=file:{settings.state}/log4j2.properties"'}
