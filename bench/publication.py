"""A publication of a settled day: commits, milliseconds, and bytes of data written."""

from __future__ import annotations

import statistics

from bench.measure import Figure
from bench.world import World
from tidemark import lake, settle
from tidemark.pipelines import CATALOG


def measure(world: World, events: int) -> list[Figure]:
    """Publishes the run that `live` staged, or else settles yesterday first."""
    day = world.yesterday(events)
    if not any(run.state == "staged" for run in lake.runs(world.settings)):
        world.stream()
        world.wait_read()
        world.tidemark("settle", "--day", str(day), "--reason", "bench")
    run = next(run for run in lake.runs(world.settings) if run.state == "staged")
    tables = {d.name: lake.table(world.settings, d) for d in CATALOG.derived}
    world.stop_stream()  # its own commits must not be counted as the publication's
    for table in tables.values():
        table.files()  # loads pyarrow, once a process: not the publication's milliseconds
    versions, data = {n: t.delta().version() for n, t in tables.items()}, data_files(world)
    published = settle.publish(world.settings, CATALOG, run.id)
    made = [tables[p.table].delta().version() - versions[p.table] for p in published]
    written = sum(size for path, size in data_files(world).items() if path not in data)
    blocked = [p.table for p in published if p.blocked]
    milliseconds = [p.seconds * 1000 for p in published if p.version is not None]
    one = f"{len(milliseconds)} tables" + (f", blocked: {', '.join(blocked)}" if blocked else "")
    return [
        Figure("publication: most commits for a table", max(made), "commits", one, "<= 1"),
        Figure("publication: slowest table", max(milliseconds, default=None), "ms", one, "< 100"),
        Figure("publication: median table", statistics.median(milliseconds) if milliseconds else None, "ms", one),
        Figure("publication: data written", written, "bytes", f"{sum(data.values()):,} bytes in the lake", "<= 0"),
    ]


def data_files(world: World) -> dict[str, int]:
    return {
        str(path): path.stat().st_size for path in world.settings.lake_path.rglob("*.parquet") if "_delta_log" not in path.parts
    }
