"""A table with a week of commits behind it, or of many files, beside a fresh one: what an append and an opening cost."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.measure import Figure
from bench.world import World
from tidemark import lake

EVERY = 5.0  # seconds from one mark of a live view to the next


def measure(world: World, commits: int, files: tuple[int, ...]) -> list[Figure]:
    """`commits` real commits, each a file added and the one before it taken out, as live views make them; then in turns.

    Each is dated as if they had come every five seconds and the last were of now, so that a log's entries and its replaced
    files expire as in a real week. `kept` has a history of twelve hours, as a user may give it, and thirteen behind it.
    """
    ages = {"aged": commits, "kept": min(commits, int(13 * 3600 / EVERY)), "fresh": 100}
    began = time.monotonic()
    aged, kept, fresh = (
        Ageing(world.home / "long", name, count, "12 hours" if name == "kept" else "") for name, count in ages.items()
    )
    made = time.monotonic() - began
    said: dict[str, dict[str, list[float]]] = {one.name: {"append": [], "open": []} for one in (aged, kept, fresh)}
    for turn in range(60):
        for one in (aged, kept, fresh) if turn % 2 else (fresh, kept, aged):
            began = time.perf_counter()
            one.commit()
            said[one.name]["append"].append(time.perf_counter() - began)
            began = time.perf_counter()
            lake.Table(one.table.root, one.table.name).files()
            said[one.name]["open"].append(time.perf_counter() - began)
    found, notes = [], {}
    for one in (aged, kept):
        notes[one.name] = f"{ages[one.name]:,} commits, of which the log keeps {one.entries():,}"
    for what in ("append", "open"):
        times = {name: statistics.median(seconds[what]) * 1000 for name, seconds in said.items()}
        new = f"a fresh table's: {times['fresh']:.1f} ms"
        found.append(Figure(f"long: {what}, median", times["aged"], "ms", f"{notes['aged']}; made in {made:.0f} s"))
        found.append(Figure(f"long: {what}, times a fresh table's", times["aged"] / times["fresh"], "", new, "<= 1.5"))
        found.append(Figure(f"long: {what}, twelve hours of history", times["kept"], "ms", f"{notes['kept']}; {new}"))
    for count in files:
        full = Ageing(world.home / "long", f"full-{count}")
        full.fill(count)
        costs: dict[str, list[float]] = {"append": [], "open": []}
        for _ in range(20):
            began = time.perf_counter()
            full.commit()
            costs["append"].append(time.perf_counter() - began)
            began = time.perf_counter()
            lake.Table(full.table.root, full.table.name).files()
            costs["open"].append(time.perf_counter() - began)
        for what, seconds in costs.items():
            middle = statistics.median(seconds) * 1000
            found.append(Figure(f"long with files: {what}", middle, "ms", f"{count:,} files, median of 20", at=count))
    return found


class Ageing:
    """One table and how many commits it has taken."""

    def __init__(self, root: Path, name: str, commits: int = 0, history: str = "") -> None:
        from pyspark.sql.types import DateType, LongType, StructField, StructType

        self.name, self.number, self.last = name, 0, ""
        self.table = lake.Table(root, name)
        self.table.create(StructType([StructField("n", LongType()), StructField("day", DateType())]))
        rows = pa.table({"n": pa.array([1]), "day": pa.array([20_000], pa.date32())})
        self.first: Any = lake.write_arrow(self.table, "live/main-0-0-aaaaaaaa", rows)[0]
        if history:
            longer = {f"delta.{what}RetentionDuration": f"interval {history}" for what in ("log", "deletedFile")}
            self.table.delta().alter.set_table_properties(longer)
        for version in range(self.table.delta().version() + 1):
            self.date(version, time.time() - EVERY * (commits + 1))
        for left in range(commits, 0, -1):
            self.commit(ago=EVERY * left)

    def date(self, version: int, at: float) -> None:
        """Have the log's files of a version be of then."""
        for file in (self.table.path / "_delta_log").glob(f"{version:020}.*"):
            os.utime(file, (at, at))

    def file(self, number: int) -> Any:
        """The add of one more file. It is not on the disk: of what is measured here only the names count."""
        from deltalake.transaction import AddAction

        path, first = f"live/main-{number}-{number}-{uuid.uuid4().hex[:8]}/day=2024-10-04/part-0.parquet", self.first
        return AddAction(path, first.size, first.partition_values, first.modification_time, True, first.stats)

    def fill(self, count: int) -> None:
        """Have so many files by one commit."""
        many = [self.file(number) for number in range(10, 10 + count)]
        lake.commit(self.table, lambda: (many, {}), [])

    def commit(self, ago: float = 0) -> None:
        """A file is added and the one before it taken out, so many seconds ago."""
        from deltalake import Transaction
        from deltalake.transaction import RemoveAction

        self.number, at = self.number + 1, time.time() - ago
        add, size, day = self.file(self.number), self.first.size, self.first.partition_values
        gone = [RemoveAction(self.last, True, int(at * 1000), size, day)] if self.last else []
        self.last, said = add.path, {"seq": self.number}
        version = lake.commit(self.table, lambda: ([add, *gone], said), [Transaction("main", self.number)])
        if ago and version is not None:
            self.date(version, at)

    def entries(self) -> int:
        return sum(1 for _ in (self.table.path / "_delta_log").glob("*.json"))
