"""A home that nothing else uses: a broker on free ports, a topic with traffic, the stream as a process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from bench.measure import Tree
from tidemark import kafka, lake, local, notify
from tidemark.model import Topic
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS
from tidemark.settings import Settings

STREAM = "speed-main"


class World:
    """Starts what a figure asks for, once; on leaving, everything it started is ended and its home deleted, unless it is kept."""

    def __init__(self, seed: int, keep: Path | None = None) -> None:
        self.seed, self.runs, self.kept = seed, 0, keep is not None
        self.home = keep.absolute() if keep else Path(tempfile.mkdtemp(prefix="tidemark-bench-"))
        ports = free_ports(2)
        self.settings = Settings(
            home=self.home / "home",
            jars_dir=Settings().jars,
            brokers=f"127.0.0.1:{ports[0]}",
            controller_port=ports[1],
            notify_to="dingtalk",  # nobody says what is put into the topic
        )

    def __enter__(self) -> Self:
        local.fetch_jars(self.settings)
        self.start_brokers()
        return self

    def start_brokers(self) -> None:
        """Have Kafka answer at the settings' address, with every topic."""
        local.start_broker(self.settings)
        kafka.apply(self.settings, [*CATALOG.topics.values(), *notify.TOPICS])

    def __exit__(self, *_: object) -> None:
        self.stop_all()
        if not self.kept:
            shutil.rmtree(self.home, ignore_errors=True)

    def stop_all(self) -> None:
        local.stop_all(self.settings, patience=30)

    def environment(self, settings: Settings | None = None) -> dict[str, str]:
        """What a process must be told to find the same home."""
        said = (settings or self.settings).model_dump(mode="json", exclude_none=True)
        return {f"TIDEMARK_{name.upper()}": str(value) for name, value in said.items()}

    def tidemark(self, *argv: str) -> str:
        """What one command of the platform answers, without what it and its JVM say beside; raises `RuntimeError` with both where
        the command fails."""
        words = [sys.executable, "-m", "tidemark", *argv]
        done = subprocess.run(words, env=os.environ | self.environment(), capture_output=True, text=True)
        if done.returncode:
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise RuntimeError(f"tidemark {' '.join(argv)} ended with exit code {done.returncode}: {said}")
        return done.stdout

    def traffic(
        self, rate: float, seconds: float, past: bool = False, every: bool = False, ends: datetime | None = None
    ) -> local.Process:
        """A producer in a process of its own; `past` sends the seconds before now, or before it `ends`, as fast as it goes;
        `every` on all topics."""
        self.runs += 1
        argv = [
            sys.executable,
            "-m",
            "bench.traffic",
            f"--rate={rate}",
            f"--seconds={seconds}",
            f"--seed={self.seed + self.runs}",
        ]
        argv += ["--past"] * past + ["--every"] * every + ([f"--ends={ends:%Y-%m-%dT%H:%M:%S%z}"] if ends else [])
        return local.start(self.settings, f"traffic-{self.runs}", argv, self.environment())

    def backlog(self, events: int) -> None:
        """Have at least so many events in the topic, of 1,000 events a second up to now."""
        lacking = events - sum(self.ends().values())
        if lacking > 0:
            self.past(1000, lacking / 1000)

    def past(self, rate: float, seconds: float, ends: datetime | None = None) -> None:
        """Have that traffic in the topic. Raises `AssertionError` with what its producer said where it has not come."""
        before, asked = sum(self.ends().values()), int(rate * seconds)
        producer = self.traffic(rate, seconds, past=True, ends=ends)
        until(lambda: not producer.alive(), 900)
        came = sum(self.ends().values()) - before
        assert came >= 0.99 * asked, f"{came:,} of {asked:,} events came: {producer.log.read_text()[-1000:]}"

    def yesterday(self, events: int) -> date:
        """Have yesterday's day in the topic, and return it."""
        day = datetime.now(self.settings.tz).date() - timedelta(days=1)
        if not (self.home / "yesterday").exists():
            self.tidemark("produce", PAGE_VIEWS.name, "--sample", "--day", str(day), "--count", str(events))
            (self.home / "yesterday").touch()
        return day

    def stream(self, name: str = "main", only: Sequence[str] = ()) -> Tree:
        """A stream's process tree, started where it does not run; of the named topics only, where some are named."""
        argv = [sys.executable, "-m", "tidemark", "speed", "--stream", name, *(f"--only={topic}" for topic in only)]
        process = local.start(self.settings, f"speed-{name}", argv, self.environment())
        until(lambda: self.beating(process, name) or not process.alive(), 180)
        if not process.alive():
            raise RuntimeError(f"the stream ended: {process.log.read_text()[-2000:]}")
        return Tree(process.pid)

    def beating(self, process: local.Process, name: str = "main") -> bool:
        """Whether it is this process that says that the stream runs, and not the one before it."""
        beat = local.status(self.settings, name).get("heartbeat", {})
        return beat.get("state") == "running" and beat.get("pid") == process.pid

    def stop_stream(self) -> None:
        local.stop(self.settings, STREAM)

    def stop(self, name: str) -> None:
        local.stop(self.settings, name)

    def stop_producers(self) -> None:
        for number in range(1, self.runs + 1):
            self.stop(f"traffic-{number}")

    def ends(self) -> dict[int, int]:
        return kafka.offsets(self.settings, [PAGE_VIEWS.name], "latest")[PAGE_VIEWS.name]

    def unread(self, stream: str = "main", only: Sequence[str] = ()) -> int:
        """Records of a stream's topics, or of the named ones, that Kafka holds and no committed batch has read."""
        ends = kafka.offsets(self.settings, list(only or CATALOG.stream(stream).topics), "latest")
        return lake.unread(lake.pins(self.settings, [stream]), ends)

    def wait_read(self, seconds: float = 900) -> None:
        until(lambda: self.unread() == 0, seconds)


class Probes(ABC):
    """One event at once, a little more often than once a second, from entering to leaving; `happened` has each one's time."""

    topic: Topic

    def __init__(self, world: World) -> None:
        self.world, self.ended, self.happened = world, threading.Event(), dict[str, float]()
        self.thread = threading.Thread(target=self.send)

    @abstractmethod
    def event(self, name: str, at: datetime) -> dict[str, Any]:
        """An event of this name that happens at an instant."""

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def send(self) -> None:
        while not self.ended.wait(0.87):
            name, at = f"probe-{len(self.happened)}", datetime.now(UTC)
            kafka.produce(self.world.settings, self.topic, [self.event(name, at)], options=notify.AT_ONCE)
            self.happened[name] = at.timestamp()


def until(condition: Callable[[], Any], seconds: float, between: float = 0.2) -> None:
    """Wait for a condition; raises `TimeoutError` after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(between)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
