"""Peers that are other engines: brought by their package managers, and measured from outside by the offsets they commit."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from confluent_kafka import Consumer, TopicPartition
from filelock import FileLock

from bench.measure import Tree
from bench.world import World, until
from tidemark import kafka, local
from tidemark.pipelines.traffic import PAGE_VIEWS

HERE, ROOT = Path(__file__).parent, Path(__file__).parent.parent.parent
BROUGHT = ROOT / ".tidemark" / "peers"
FLINK = "apache-flink==2.2.0"


def flink(brokers: str, group: str, state: Path) -> list[str]:
    beside = ";".join(f"file://{jar}" for jar in sorted(jars("flink").glob("*.jar")))
    return [str(python(FLINK)), str(HERE / "flink.py"), brokers, PAGE_VIEWS.name, group, str(state), beside]


def kafka_streams(brokers: str, group: str, state: Path) -> list[str]:
    """A file of Java that the JDK compiles as it starts."""
    java = [str(local.java()), "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{jars('streams')}/*"]
    return [*java, str(HERE / "PlainStreams.java"), brokers, PAGE_VIEWS.name, group, str(state)]


ENGINES: dict[str, Callable[[str, str, Path], list[str]]] = {"Flink SQL": flink, "Kafka Streams": kafka_streams}


def python(requirement: str) -> Path:
    """The interpreter of an environment that has this package and nothing of the platform's."""
    folder = BROUGHT / requirement
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
            subprocess.run([uv, "venv", "--quiet", "--clear", str(folder)], check=True)
            subprocess.run([uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), requirement], check=True)
            (folder / "whole").touch()
    return folder / "bin" / "python"


def jars(conf: str) -> Path:
    """The folder of a configuration of `ivy.xml`, fetched by the Ivy inside pyspark."""
    folder = BROUGHT / conf
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            argv = [str(local.java()), "-cp", f"{local.pyspark_jars()}/*", "org.apache.ivy.Main", "-ivy", str(HERE / "ivy.xml")]
            argv += ["-cache", f"{folder}.cache", "-confs", conf, "-types", "jar", "bundle"]
            argv += ["-retrieve", f"{folder}/[artifact]-[revision].[ext]"]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            (folder / "whole").touch()
    return folder


def run(world: World, name: str, warm: float, hold: float) -> dict[str, float]:
    """Have an engine read the topic from offset zero; says `{events, wall, cpu}` between two of its commits.

    The first is the next one when it has read for `warm` seconds, or a quarter of the topic; the second the first one `hold`
    seconds later, or the last where it has read everything. Raises `RuntimeError` with what it said where it ends, and
    `TimeoutError` where a quarter of an hour brings no commit.
    """
    group, ends = f"race-{name.lower().replace(' ', '-')}-{time.time_ns()}", world.ends()
    watch = Consumer(kafka.client_config(world.settings) | {"group.id": group, "enable.auto.commit": False})
    watch.commit(offsets=[TopicPartition(PAGE_VIEWS.name, p, 0) for p in ends], asynchronous=False)

    def read() -> int:
        found = watch.committed([TopicPartition(PAGE_VIEWS.name, p) for p in ends], timeout=30)
        return sum(max(0, at.offset) for at in found)

    said = world.home / f"{group}.log"
    with said.open("w") as output:
        argv = ENGINES[name](world.settings.brokers, group, world.home / group)
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    tree = Tree(process.pid)

    def commits(after: int, seconds: float) -> tuple[int, float, float]:
        """The next commit beyond `after`: what was read, CPU-seconds, and when."""
        seen: list[int] = []

        def further() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with exit code {process.returncode}: {said.read_text()[-3000:]}")
            seen[:] = [read()]
            return seen[0] > after

        until(further, seconds)
        return seen[0], tree.cpu(), time.monotonic()

    try:
        commits(0, 900)
        began, whole = time.monotonic(), sum(ends.values())
        until(lambda: read() >= whole / 4 or time.monotonic() - began > warm, warm + 60)
        start = end = commits(read(), 900)  # what was committed before is of a moment that is past, its CPU is not
        while end[2] - start[2] < hold and end[0] < whole:
            end = commits(end[0], 900)
    finally:
        with suppress(psutil.NoSuchProcess):
            for one in (*tree.root.children(recursive=True), tree.root):
                one.kill()
        process.wait()
        watch.close()
    return {"events": end[0] - start[0], "cpu": end[1] - start[1], "wall": end[2] - start[2]}
