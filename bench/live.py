"""The stream at a stated rate: is every mark there, how soon is an event readable, and what does it cost."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import structlog

from bench.drill import accepted, in_parts
from bench.measure import Figure, Tree
from bench.world import Probes, World, until
from tidemark import kafka, lake, local, query
from tidemark.model import View, duration
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS, last_hour, page_panes, site_last_hour
from tidemark.speed import SWEPT

log = structlog.get_logger()

VIEWS = (last_hour, site_last_hour)
LONGEST = 2400
"""Seconds that can be measured. A table's log says when a row became readable and is kept for an hour, in which all must be read
and the log be looked at; kept for longer, it would make the commits dearer that are measured."""
SENT = pa.schema(
    {
        "event_id": pa.string(),
        "happened": pa.float64(),
        "arrived": pa.float64(),
        "partition": pa.int32(),
        "number": pa.int64(),
    }
)
ROWS = "read_parquet(?, filename = true, hive_partitioning = false) JOIN file ON file.path = filename"


def measure(world: World, rate: float, seconds: float, history: float, warmup: float) -> list[Figure]:
    """Traffic at `rate`, measured for `seconds`, behind `history` seconds of it; yesterday is settled beside, as in the demo.

    The traffic goes on while the stream catches up, and measuring begins when it has: its views too.
    """
    day, oldest = world.yesterday(100_000), time.time() - history
    world.past(rate, history)
    producer = world.traffic(rate, 24 * 3600)
    tree, began = world.stream(), time.monotonic()
    until(lambda: world.unread() < 10 * rate, 1800)
    log.info("history read", events=int(rate * history), seconds=round(time.monotonic() - began, 1), cpu=round(tree.cpu(), 1))
    until(lambda: all(behind(world, view, oldest) < 0 for view in VIEWS), 1800, between=5)
    log.info("views caught up", seconds=round(time.monotonic() - began, 1), cpu=round(tree.cpu(), 1))
    time.sleep(warmup)
    start, before = time.time(), tree.cpu()
    settle = [sys.executable, "-m", "tidemark", "settle", "--day", str(day), "--reason", "bench"]
    settling = local.start(world.settings, "settle", settle, world.environment())
    with Viewing(world) as probes:
        time.sleep(seconds)
    end, spent = time.time(), tree.cpu() - before
    world.stop(producer.name)
    until(lambda: not settling.alive(), 900)
    states = [run.state for run in lake.runs(world.settings)]
    assert states == ["staged"], f"the settling beside came to {states}: {settling.log.read_text()[-2000:]}"
    world.wait_read()
    with suppress(TimeoutError):  # then they are missing, and the figures say so
        until(lambda: all(newest_mark(world, view) > end for view in VIEWS), 120)
    return [*readable(world, start, end, probes), *cost(world, tree, start, end, spent)]


def behind(world: World, view: View, oldest: float) -> float:
    """Seconds by which a view's marks, the newest or those that are computed once more, are later than they always are; of
    what is older than `oldest` (seconds since 1970) there are none."""
    files = lake.table(world.settings, view).files()
    highs = [
        (f.span is not None and f.span["mark"] == "all", lake.comparable(f.high, datetime.now(UTC))) for f in files if f.high
    ]
    once_more = max([oldest, *(high.timestamp() for again, high in highs if again)])
    assert view.refresh is not None
    late = duration(view.refresh.back).total_seconds() + SWEPT.total_seconds()
    return time.time() - min(newest_mark(world, view) + 30, once_more + late + 60)


def newest_mark(world: World, view: View) -> float:
    """The newest mark that a reader of the view finds, in seconds since 1970; 0 where there is none."""
    highs = [f.high for f in lake.table(world.settings, view).files() if f.high]
    return max((lake.comparable(high, datetime.now(UTC)).timestamp() for high in highs), default=0.0)


def commits(path: Path) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """A table's commits, oldest first: when each became readable (seconds since 1970, its file's time) and its actions."""
    for entry in sorted((path / "_delta_log").glob("*.json")):
        yield entry.stat().st_mtime, [json.loads(line) for line in entry.read_text().splitlines()]


def added(path: Path) -> list[tuple[str, float]]:
    """Every data file that a table ever added, replaced ones too, with the time of the first commit that did."""
    found: dict[str, float] = {}
    for at, actions in commits(path):
        for action in actions:
            if "add" in action:
                found.setdefault(str(path / unquote(action["add"]["path"])), at)
    return list(found.items())


def rollup_rows(world: World, start: float, end: float) -> duckdb.DuckDBPyConnection:
    """Tables `file`, `event` (of `[start, end)` what Kafka holds, and of which batch the log has it), `prompt` (what of it was in
    Kafka within a second) and `first` (when the rollup's rows of each batch became readable)."""
    db = duckdb.connect()
    db.execute("SET TimeZone = 'UTC'; CREATE TABLE file (path VARCHAR, seq BIGINT, committed DOUBLE, source VARCHAR)")
    for declared in (PAGE_VIEWS, page_panes, *VIEWS):
        for path, at in added(world.settings.lake_path / declared.table):
            span = lake.LIVE.search(path)
            if span is None or span["lo"] == span["hi"]:  # what compaction wrote holds nothing new
                db.execute("INSERT INTO file VALUES (?, ?, ?, ?)", [path, span and int(span["lo"]), at, declared.name])
    db.register("sent", in_parts(sent(world, start, end), SENT))
    db.execute(
        f"""CREATE TABLE event AS
        WITH logged AS (SELECT kafka.partition AS partition, kafka.offset AS number, seq FROM {ROWS} WHERE reject IS NULL)
        SELECT min(seq) AS seq, min(happened) AS happened, min(arrived) AS arrived
        FROM sent LEFT JOIN logged USING (partition, number) GROUP BY event_id""",
        [paths(db, PAGE_VIEWS.name)],
    )
    db.execute("CREATE TABLE prompt AS FROM event WHERE arrived < happened + 1")
    db.execute(
        f"CREATE TABLE first AS SELECT seq, min(committed) AS committed FROM file WHERE source = '{page_panes.name}' GROUP BY seq"
    )
    return db


def sent(world: World, start: float, end: float) -> Iterator[dict[str, Any]]:
    """The records of Kafka's that Python alone takes for events of that time."""
    for record in kafka.consume(world.settings, PAGE_VIEWS.name, datetime.fromtimestamp(start, UTC)):
        event = accepted(record.value or b"")
        if event and start <= (happened := event["viewed_at"].timestamp()) < end:
            place = {"partition": record.partition, "number": record.offset, "arrived": record.timestamp.timestamp()}
            yield {"event_id": event["event_id"], "happened": happened, **place}


def paths(db: duckdb.DuckDBPyConnection, source: str) -> list[str]:
    return [path for (path,) in db.execute("SELECT path FROM file WHERE source = ?", [source]).fetchall()]


def readable(world: World, start: float, end: float, probes: Viewing) -> list[Figure]:
    """Marks that are missing, and seconds from event time to the commit after which a reader's answer has the event.

    In the rollup of events of `[start, end)` that reached Kafka within a second: the sample sends 5 % late on purpose. In the
    last hour of the probes of that time.
    """
    db = rollup_rows(world, start, end)
    found = [*latencies(db, "rollup page_panes", "seq", "< 5"), *probes.read(db, start, end)]
    found += [missing_marks(world, view, start, end) for view in VIEWS]
    db.execute(
        f"""CREATE TABLE mark AS SELECT source, epoch(mark) AS mark, min(committed) AS committed
        FROM (SELECT mark, committed, source FROM {ROWS}) GROUP BY ALL""",
        [[path for view in VIEWS for path in paths(db, view.name)]],
    )
    ((after,),) = db.execute(
        f"""SELECT quantile_cont(site.committed - page.committed, 0.99) FROM mark site JOIN mark page USING (mark)
        WHERE site.source = '{site_last_hour.name}' AND page.source = '{last_hour.name}' AND mark > {start} AND mark < {end}"""
    ).fetchall()
    return [*found, Figure("live: a mark of the whole site comes after that of its pages, p99", after, "s")]


class Viewing(Probes):
    """Views of a page that nobody else looks at."""

    topic, PAGE = PAGE_VIEWS, "/probe"

    def event(self, name: str, at: datetime) -> dict[str, Any]:
        return {"event_id": name, "visitor_id": "probe", "page": self.PAGE, "viewed_at": at.isoformat()}

    def read(self, db: duckdb.DuckDBPyConnection, start: float, end: float) -> Iterator[Figure]:
        """They come in order: the n-th is readable with the first row of a later mark that counts n of them."""
        db.execute("CREATE TABLE probe (n BIGINT, happened DOUBLE)")
        db.executemany("INSERT INTO probe VALUES (?, ?)", [[n, at] for n, at in enumerate(self.happened.values(), 1)])
        sql = f"""
            WITH seen AS (SELECT committed, epoch(mark) AS mark, pv FROM {ROWS} WHERE page = '{self.PAGE}'),
                 first AS (SELECT n, happened, min(committed) - happened AS late FROM probe
                           LEFT JOIN seen ON pv >= n AND mark > happened
                           WHERE happened >= {start} AND happened < {end} GROUP BY n, happened)
            SELECT quantile_cont(late, 0.5), quantile_cont(late, 0.99), count(*) - count(late), count(*) FROM first"""
        ((median, p99, never, count),) = db.execute(sql, [paths(db, last_hour.name)]).fetchall()
        says = f"{count} events, a little more than one a second"
        yield Figure("live: event to readable in view last_hour, median", median, "s", says)
        yield Figure("live: event to readable in view last_hour, p99", p99, "s", says, "< 12")
        yield Figure("live: events never readable in view last_hour", never, "events", says, "<= 0")


def latencies(db: duckdb.DuckDBPyConnection, what: str, on: str, goal: str) -> Iterator[Figure]:
    """From event time to the commit that `first` has for it, over the prompt events; what of all events it has for none, and how
    many were not prompt."""
    waited = "committed - happened"
    sql = f"quantile_cont({waited}, 0.5), quantile_cont({waited}, 0.99)"
    ((median, p99),) = db.execute(f"SELECT {sql} FROM prompt LEFT JOIN first USING ({on})").fetchall()
    sql = "count(*), count(*) - count(committed), 1 - (SELECT count(*) FROM prompt) / count(*)"
    ((count, never, late),) = db.execute(f"SELECT {sql} FROM event LEFT JOIN first USING ({on})").fetchall()
    held = f"{count:,} events that Kafka holds"
    yield Figure(f"live: event to readable in {what}, median", median, "s")
    yield Figure(f"live: event to readable in {what}, p99", p99, "s", "", goal)
    yield Figure(f"live: events never readable in {what}", never, "events", held, "<= 0")
    yield Figure(f"live: share left out of {what}, sent more than a second late", late, "", f"{held}; 5 % on purpose", "<= 0.06")


def missing_marks(world: World, view: View, start: float, end: float) -> Figure:
    wanted = set(range(int(start // 5) * 5 + 5, int(end // 5) * 5 + 5, 5))
    with query.connect(world.settings, CATALOG, [view.name]) as db:
        there = {int(mark) for (mark,) in db.execute(f"SELECT DISTINCT epoch(mark) FROM {view.name}").fetchall()}
    return Figure(f"live: five-second marks missing in {view.name}", len(wanted - there), "marks", f"{len(wanted)} marks", "<= 0")


def cost(world: World, tree: Tree, start: float, end: float, spent: float) -> Iterator[Figure]:
    rows = [r for r in lake.ledger_rows(world.settings, "main") if start <= r["finished_at"].timestamp() < end]
    batches = {r["seq"]: (r["finished_at"] - r["started_at"]).total_seconds() for r in rows}
    events, lengths = sum(r["records"] for r in rows), sorted(batches.values())
    rate = f"at {events / (end - start):,.0f} events/s"
    yield Figure("live: micro-batch, median", statistics.median(lengths) if lengths else None, "s", rate, "< 1.5")
    yield Figure("live: micro-batch, p95", lengths[int(0.95 * len(lengths))] if lengths else None, "s", rate)
    yield Figure("live: CPU of stream and refresh", spent / events * 1000 if events else None, "CPU-s per 1,000 events", rate)
    yield Figure("live: cores that stream and refresh keep busy", spent / (end - start), "cores", rate)
    yield Figure("live: greatest memory, JVM and driver", tree.peak(), "GiB", "", "< 2.5")
    tables = {d: lake.table(world.settings, CATALOG[d]) for d in CATALOG.names} | {"ledger": lake.ledger(world.settings)}
    most = {name: most_files(table.path) for name, table in tables.items() if table.exists}
    worst = max(most, key=lambda name: most[name])
    ever = sum("add" in action for _, actions in commits(tables[worst].path) for action in actions)
    yield Figure("live: most files of one table and day at any time", most[worst], "files", f"{worst}, {ever} added", "<= 250")


def most_files(path: Path) -> int:
    there: dict[str, str] = {}
    held, most = Counter[str](), 0
    for _, actions in commits(path):
        for action in actions:
            if "add" in action:
                there[action["add"]["path"]] = day = action["add"]["partitionValues"]["day"]
                held[day] += 1
            elif "remove" in action and (day := there.pop(action["remove"]["path"], "")):
                held[day] -= 1
        most = max([most, *held.values()])
    return most
