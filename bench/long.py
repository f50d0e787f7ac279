"""A table with a week of commits behind it, or of many files, beside a fresh one: what an append and an opening cost."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.measure import Figure
from bench.world import World
from tidemark import lake


def measure(world: World, commits: int, files: tuple[int, ...]) -> list[Figure]:
    """`commits` real commits, each a file added and the one before it taken out, as live views make them; then in turns."""
    aged, fresh = (Ageing(world.home / "long", name) for name in ("aged", "fresh"))
    began = time.monotonic()
    for number in range(commits):
        aged.commit(number)
    made = time.monotonic() - began
    for number in range(100):
        fresh.commit(number)
    said: dict[str, dict[str, list[float]]] = {one.name: {"append": [], "open": []} for one in (aged, fresh)}
    for turn in range(60):
        for one in (aged, fresh) if turn % 2 else (fresh, aged):
            began = time.perf_counter()
            one.commit(one.number + 1)
            said[one.name]["append"].append(time.perf_counter() - began)
            began = time.perf_counter()
            lake.Table(one.table.root, one.table.name).files()
            said[one.name]["open"].append(time.perf_counter() - began)
    size = f"{commits:,} commits in {made:.0f} s, {sum(1 for _ in (aged.table.path / '_delta_log').iterdir()):,} files in the log"
    found = []
    for what in ("append", "open"):
        old, new = (statistics.median(said[one.name][what]) * 1000 for one in (aged, fresh))
        found.append(Figure(f"long: {what}, median", old, "ms", size))
        found.append(Figure(f"long: {what}, times a fresh table's", old / new, "", f"{new:.1f} ms", "<= 1.5"))
    for count in files:
        full = Ageing(world.home / "long", f"full-{count}")
        full.fill(count)
        costs: dict[str, list[float]] = {"append": [], "open": []}
        for turn in range(20):
            began = time.perf_counter()
            full.commit(turn)
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

    def __init__(self, root: Path, name: str) -> None:
        from pyspark.sql.types import DateType, LongType, StructField, StructType

        self.name, self.number = name, -1
        self.table = lake.Table(root, name)
        self.table.create(StructType([StructField("n", LongType()), StructField("day", DateType())]))
        rows = pa.table({"n": pa.array([1]), "day": pa.array([20_000], pa.date32())})
        self.adds: list[Any] = [lake.write_arrow(self.table, f"live/main-{k}-{k}-aaaaaaaa", rows)[0] for k in range(2)]

    def fill(self, count: int) -> None:
        """Have so many files by one commit: of a log, only the names count."""
        from deltalake.transaction import AddAction

        first = self.adds[0]
        many = [
            AddAction(
                first.path.replace("main-0-0", f"main-{k}-{k}"),
                first.size,
                first.partition_values,
                first.modification_time,
                True,
                first.stats,
            )
            for k in range(10, 10 + count)
        ]
        lake.commit(self.table, lambda: (many, {}), [])

    def commit(self, number: int) -> None:
        from deltalake import Transaction

        add, other = self.adds[number % 2], self.adds[(number + 1) % 2]
        gone = [f for f in [lake.File(other.path, other.size, 1, None, 0)] if number]
        removes = [lake.remove_action(lake.File(f.path, f.size, 1, lake.date(2024, 10, 4), 0)) for f in gone]
        lake.commit(self.table, lambda: ([add, *removes], {"seq": number}), [Transaction("main", number)])
        self.number = number
