"""`make drill`: break one part after the other beside steady traffic, and hold what is left to a ledger kept outside.

After each: lost, altered and doubled records, ledger against Kafka's offsets, every answer against DuckDB's over what Kafka
holds, and the seconds until a batch was committed again.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date, datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import polars as pl
import psutil
import pyarrow as pa
import structlog
import typer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from bench.brokers import NODES, ThreeBrokers, name_of
from bench.disks import SmallDisks
from bench.measure import stamp
from bench.world import STREAM, World, until
from tidemark import kafka, lake, local, query, session, settle
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS, hourly_traffic, page_quarters

log = structlog.get_logger()

OUT = Path(__file__).parent / "out" / "drill.json"
RATE = 100.0
POINTS = ("offsets", "files", "files:2", "commit", "commit:2", "commit:3", "between", "done")
"""Of a batch: planned, a table's files written, a table committed, all of it done and the checkpoint not."""
REPAIR = re.compile(r"tidemark (speed --stream \w+ --\w[\w-]*)")
COUNTED = "count(DISTINCT event_id) AS pv, count(DISTINCT visitor_id) AS uv"
ROLLED = ("--only", page_quarters.name)
"""What is settled and replayed: the rollup that the views of `ANSWERS` are of, and they."""
ANSWERS = {
    "hourly_traffic": f"SELECT page, date_trunc('hour', viewed_at) AS hour, {COUNTED} FROM held GROUP BY ALL",
    "site_hourly_traffic": f"SELECT date_trunc('hour', viewed_at) AS hour, {COUNTED} FROM held GROUP BY ALL",
    "daily_traffic": f"SELECT page, viewed_at::DATE AS day, {COUNTED} FROM held GROUP BY ALL",
    "site_daily_traffic": f"SELECT viewed_at::DATE AS day, {COUNTED} FROM held GROUP BY ALL",
}


@dataclass
class Outcome:
    """What one drill came to. All counts but `records` are to be zero; `well` is seconds from the fault until it is repaired and
    a batch was committed again."""

    drill: str
    well: float
    records: int
    lost: int
    altered: int
    doubled: int
    unexplained: int
    """Offsets that the stream's ledger has and Kafka has not, or the other way."""
    differing: dict[str, int]
    torn: int
    """Answers of a reader that were neither a publication's before nor its after."""
    said: str
    """What refused, where something did; its repair was then done."""

    @property
    def held(self) -> bool:
        return not (self.lost or self.altered or self.doubled or self.unexplained or self.differing or self.torn)


class Drill:
    """One world with steady traffic, and what can happen to it. Each fault ends with everything started again."""

    def __init__(self, world: World, random: Random, day: date) -> None:
        self.world, self.random, self.day = world, random, day
        self.settings = world.settings
        self.ledger, self.traffic, self.said, self.torn = world.home / "witness.jsonl", 0, "", 0
        self.skipped = 0  # so many bytes of it are of a topic that is gone
        # What retention has taken: records that were read before, and where those were that were not: partition, from, until.
        self.taken: list[kafka.Record] = []
        self.unseen: list[tuple[int, int, int]] = []
        self.settle_argv = ("settle", "--day", str(day), *ROLLED, "--reason", "drill")

    # ---- faults: each returns when it happened

    def stream_killed(self) -> float:
        """The stream, at a random moment."""
        return self.kills(STREAM)

    def stream_killed_at_a_point(self) -> float:
        """The stream, between two of the steps of a batch."""
        return self.dies({"TIDEMARK_FAILPOINT": self.random.choice(POINTS)})

    def stream_killed_in_compaction(self) -> float:
        """The stream, when the merged file of a table is written and not committed."""
        return self.dies({"TIDEMARK_FAILPOINT": "compaction", "TIDEMARK_COMPACT_EVERY": "5 seconds"})

    def broker_killed(self) -> float:
        """The broker, away for some seconds."""
        at = self.kills(local.BROKER, start=False)
        time.sleep(self.random.uniform(0, 10))
        local.start_broker(self.settings)
        self.starts_stream()
        return at

    def everything_killed(self) -> float:
        """The broker and the stream at once; the broker comes first, as `tidemark up` has it."""
        at = self.kills(local.BROKER, STREAM, start=False)
        local.start_broker(self.settings)
        self.starts_stream()
        return at

    def broker_frozen(self) -> float:
        """The broker takes connections and answers none, for a quarter of a minute."""
        with self.frozen(local.BROKER) as at:
            time.sleep(15)
        self.starts_stream()
        return at

    def stream_frozen_and_a_second_started(self) -> float:
        """The stream stops where it is; a second copy is refused as long as it may wake up."""
        with self.frozen(STREAM) as at:
            second = local.start(self.settings, "second", self.speed(), self.world.environment())
            until(lambda: not second.alive(), 120)
            self.refused(second)
            assert "runs already" in self.said or "holds" in self.said, self.said
        return at

    def batch_forgotten(self) -> float:
        """The checkpoint does not know of the newest batch, which every table holds: that one is planned again."""
        at = self.kills(STREAM, start=False)
        self.newest("commits").unlink()
        self.starts_stream()
        return at

    def partition_added(self) -> float:
        """The topic has a partition more, and records in it, while the stream runs."""
        at, name = time.time(), PAGE_VIEWS.name
        admin = AdminClient(kafka.client_config(self.settings))
        admin.create_partitions([NewPartitions(name, len(self.world.ends()) + 1)])[name].result()
        events = kafka.sample(PAGE_VIEWS, seed=self.random.getrandbits(32), count=500, zone=self.settings.tz)
        kafka.produce(self.settings, PAGE_VIEWS, events)
        return at

    def records_deleted(self) -> float:
        """Retention passes the stream while it is away: some of what it has not read is gone from Kafka, and entered as lost."""
        at = self.kills(STREAM, start=False)
        time.sleep(8)
        admin, name = AdminClient(kafka.client_config(self.settings)), PAGE_VIEWS.name
        first, ends = kafka.offsets(self.settings, [name], "earliest")[name], self.world.ends()
        read = lake.upto(lake.pins(self.settings, ["main"]), name)
        gone = {p: (read.get(str(p), 0) + end) // 2 for p, end in ends.items()}
        gone = {p: upto for p, upto in gone.items() if upto > max(first[p], read.get(str(p), 0))}
        held = kafka.consume(self.settings, name, "earliest")
        self.taken += [r for r in held if r.partition in gone and r.offset < read.get(str(r.partition), 0)]
        self.unseen += [(p, read.get(str(p), 0), upto) for p, upto in gone.items()]
        for future in admin.delete_records([TopicPartition(name, p, upto) for p, upto in gone.items()]).values():
            future.result()
        self.starts_stream()
        assert "--accept-loss" in self.said, self.said
        return at

    def topic_created_again(self) -> float:
        """The topic is deleted and created again, shorter or longer than it was: the stream refuses, and begins afresh beside
        what it had, as the refusal says."""
        admin, name = AdminClient(kafka.client_config(self.settings)), PAGE_VIEWS.name
        stream, had = local.running(self.settings, STREAM), sum(self.world.ends().values())
        assert stream is not None
        admin.delete_topics([name])[name].result()
        until(lambda: name not in admin.list_topics(timeout=10).topics, 60)
        time.sleep(2)  # what was acknowledged before comes to its ledger
        at, self.skipped, self.taken, self.unseen = time.time(), self.ledger.stat().st_size, [], []
        kafka.apply(self.settings, [PAGE_VIEWS])
        count = self.random.choice((500, had + 5_000))
        events = kafka.sample(PAGE_VIEWS, seed=self.random.getrandbits(32), count=count, zone=self.settings.tz)
        kafka.produce(self.settings, PAGE_VIEWS, events)
        until(lambda: not stream.alive(), 180)
        self.refused(stream)
        assert "was deleted and created again" in self.said, self.said
        for folder in (self.settings.lake_path, self.checkpoint.path):
            folder.rename(self.world.home / f"{folder.name}-before-{self.traffic}")
        self.world.tidemark("produce", name, "--sample", "--day", str(self.day), "--count", "5000")
        ends = kafka.offsets(self.settings, [name], "latest")
        self.starts_stream()
        until(lambda: lake.unread(lake.pins(self.settings, ["main"]), ends) == 0, 300)
        self.settles()
        return at

    def everything_at_once(self) -> float:
        """A settling, a replay, a compaction and a sweep beside the stream and three readers; both runs are published, and the
        newer one is rolled back."""
        at, name = time.time(), f"drill-{self.random.getrandbits(32):08x}"
        replay = ("replay", *ROLLED, "--reason", "drill", "--run", name)
        spark = session.session(self.settings, "drill")

        def by_spark() -> tuple[Any, ...]:
            rows = spark.read.format("delta").load(str(lake.table(self.settings, hourly_traffic).path))
            sums = (F.count("*"), F.sum("pv"), F.sum("uv"), F.sum(F.col("settled").cast("int")))
            return tuple(rows.where(F.col("day") == F.lit(self.day)).agg(*sums).first() or ())

        try:
            with self.readers(self.by_duckdb, self.by_polars, by_spark, rest=0.3) as still, ThreadPoolExecutor() as pool:
                still()
                staged = [pool.submit(self.world.tidemark, *argv) for argv in (self.settle_argv, replay)]
                for beside in [pool.submit(self.world.tidemark, word) for word in ("compact", "sweep")]:
                    beside.result()
                runs = [lake.run_of(self.settings, one.result().splitlines()[-1].strip()) for one in staged]
                runs.sort(key=lambda run: run.pins["main"].seq)
                for run in runs:
                    settle.publish(self.settings, CATALOG, run.id)
                    still()
                settle.rollback(self.settings, CATALOG, runs[-1].id, "drill")
                still()
        finally:
            spark.stop()
        return at

    def checkpoint_deleted(self) -> float:
        at = self.kills(STREAM, start=False)
        shutil.rmtree(self.checkpoint.path)
        self.starts_stream()
        return at

    def checkpoint_cut(self) -> float:
        """Its newest file of planned offsets is empty, as after a power cut."""
        at = self.kills(STREAM, start=False)
        os.truncate(self.newest("offsets"), 0)
        self.starts_stream()
        return at

    def checkpoint_flipped(self) -> float:
        """One bit of its newest file of planned offsets is another."""
        at = self.kills(STREAM, start=False)
        file = self.newest("offsets")
        content = bytearray(file.read_bytes())
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(7)
        file.write_bytes(content)
        self.starts_stream()
        return at

    def log_entry_damaged(self) -> float:
        """The newest entry of the Delta log of one table, be it of any kind, is cut or empty.

        It is moved away and the day settled again, as the refusal says.
        """
        at = self.kills(STREAM, start=False)
        declared = (PAGE_VIEWS, page_quarters, hourly_traffic)
        tables = [lake.ledger(self.settings), *(lake.table(self.settings, d) for d in declared)]
        table = self.random.choice(tables)
        entry = max((table.path / "_delta_log").glob("*.json"))
        os.truncate(entry, self.random.choice((0, entry.stat().st_size // 2)))
        refuses = local.start(self.settings, STREAM, self.speed(), self.world.environment())
        until(lambda: not refuses.alive(), 180)
        self.refused(refuses)
        assert str(entry) in self.said, self.said
        entry.rename(self.world.home / f"damaged-{entry.name}")
        self.starts_stream()
        self.settles()  # the entry may have been a publication
        return at

    def file_gone(self) -> float:
        """A file of a log, a rollup or a view is deleted. It is looked for, made again or named no more, and its day replayed."""
        at = self.kills(STREAM, start=False)
        declared = self.random.choice((PAGE_VIEWS, page_quarters, hourly_traffic))
        table = lake.table(self.settings, declared)
        file = self.random.choice(table.files())
        (table.path / file.path).unlink()
        try:
            raise AssertionError(f"{file.path} is not missed: {self.world.tidemark('verify', '--json')}")
        except RuntimeError as found:
            assert file.path in str(found), found
        self.said = self.world.tidemark("verify", "--repair", "--json")
        assert self.world.tidemark("verify").strip() == "every file is there"
        self.starts_stream()
        if then := re.search(r'"then": "tidemark ([^"]+)"', self.said):
            self.publishes(self.world.tidemark(*shlex.split(then[1])))
        return at

    def settling_killed(self) -> float:
        """A settling, at a random moment; the day is settled again, and published while a reader looks on."""
        settling = self.starts("settle", *self.settle_argv)
        time.sleep(self.random.uniform(5, 25))
        at = time.time()
        self.kill(settling)
        self.settles()
        return at

    def replay_killed(self) -> float:
        """A replay from offset zero, at a random moment; it is begun again where it was, and published with a reader."""
        argv = ("replay", *ROLLED, "--reason", "drill", "--run", f"drill-{self.random.getrandbits(32):08x}")
        replay = self.starts("replay", *argv)
        time.sleep(self.random.uniform(10, 40))
        at = time.time()
        self.kill(replay)
        self.publishes(self.world.tidemark("replay", *argv))
        return at

    # ---- faults of three brokers, each with every record, of which two must have what is acknowledged

    def leader_killed(self) -> float:
        """A broker that leads partitions; nobody waits until it is back."""
        at, node = self.kills_nodes(1)
        until(lambda: self.committed_since(at + 5), 120)
        self.three.start_node(*node)
        return at

    def two_brokers_killed(self) -> float:
        """Nothing is acknowledged while one of three is left, and all that was is there afterwards."""
        at, nodes = self.kills_nodes(2)
        time.sleep(2)  # what was acknowledged before comes to its ledger
        held = self.ledger.stat().st_size
        time.sleep(15)
        assert self.ledger.stat().st_size == held, "records were acknowledged with one broker of three"
        for node in nodes:
            self.three.start_node(node)
        return at

    def brokers_slow(self) -> float:
        """Whatever is said to or by a broker takes a fifth of a second more, for half a minute."""
        with self.three.slow(0.2) as at:
            time.sleep(30)
        return at

    def brokers_half_open(self) -> float:
        """Connections to every broker stay open and nothing comes through, for longer than a request may take."""
        with self.three.silent() as at:
            time.sleep(45)
        self.starts_stream()
        return at

    def connections_cut(self) -> float:
        """Every connection to every broker breaks, again and again for a quarter of a minute."""
        at = time.time()
        for _ in range(15):
            for proxy in self.three.proxies.values():
                proxy.cut()
            time.sleep(1)
        return at

    @property
    def three(self) -> ThreeBrokers:
        assert isinstance(self.world, ThreeBrokers)
        return self.world

    def kills_nodes(self, count: int) -> tuple[float, list[int]]:
        time.sleep(self.random.uniform(0, 5))
        nodes, at = self.random.sample(NODES, count), time.time()
        for node in nodes:
            process = local.running(self.settings, name_of(node))
            assert process is not None
            self.kill(process)
        return at, nodes

    # ---- faults of small disks: nothing more can be written for a third of a minute

    def tables_full(self) -> float:
        return self.out_of_space("lake")

    def checkpoint_full(self) -> float:
        return self.out_of_space("checkpoints")

    def broker_full(self) -> float:
        """Kafka ends itself when it cannot write its log."""
        return self.out_of_space("kafka")

    def state_full(self) -> float:
        """Where the stream says how it is, and all processes log."""
        return self.out_of_space(".")

    def out_of_space(self, disk: str) -> float:
        assert isinstance(self.world, SmallDisks)
        stream = local.running(self.settings, STREAM)
        assert stream is not None
        with self.world.full(disk) as at:
            time.sleep(20)
            if not stream.alive():
                self.refused(stream)
                assert "No space left on device" in self.said, self.said
        local.start_broker(self.settings)
        self.starts_stream()
        return at

    # ---- what they are made of

    @property
    def checkpoint(self) -> lake.Checkpoint:
        return lake.Checkpoint.of(self.settings, "main")

    def newest(self, kind: str) -> Path:
        return self.checkpoint.path / kind / str(self.checkpoint.newest(kind))

    def speed(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "tidemark", "speed", *options]

    def starts(self, name: str, *argv: str) -> local.Process:
        return local.start(self.settings, name, [sys.executable, "-m", "tidemark", *argv], self.world.environment())

    def starts_stream(self, more: dict[str, str] | None = None) -> None:
        """Start the stream; where it refuses, by the command that its own words tell."""
        argv = self.speed()
        for _ in range(3):
            process = local.start(self.settings, STREAM, argv, self.world.environment() | (more or {}))
            until(lambda: self.world.beating(process) or not process.alive(), 180)  # noqa: B023
            if process.alive():
                return
            self.refused(process)
            if not (repair := REPAIR.search(self.said)):
                raise RuntimeError(f"the stream refuses and tells no command that would repair it: {self.said}")
            argv = self.speed(*shlex.split(repair[1])[1:])
        raise RuntimeError(f"the stream refuses still: {self.said}")

    def dies(self, more: dict[str, str]) -> float:
        """Have the stream kill itself, and start it again."""
        self.world.stop_stream()
        self.starts_stream(more)
        until(lambda: local.running(self.settings, STREAM) is None, 180)
        at = time.time()
        self.starts_stream()
        return at

    def refused(self, process: local.Process) -> None:
        lines = [line for line in process.log.read_text().splitlines() if line.strip()]
        self.said = " ".join(" ".join(lines[-12:]).split())

    def kills(self, *names: str, start: bool = True) -> float:
        time.sleep(self.random.uniform(0, 5))
        at = time.time()
        for name in names:
            if process := local.running(self.settings, name):
                self.kill(process)
        if start:
            self.starts_stream()
        return at

    def kill(self, process: local.Process) -> None:
        for one in local.orphans(process):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        until(lambda: not process.alive(), 30)

    @contextmanager
    def frozen(self, name: str) -> Iterator[float]:
        time.sleep(self.random.uniform(0, 3))
        process = local.running(self.settings, name)
        assert process is not None
        held = local.orphans(process)
        for one in held:
            one.suspend()
        try:
            yield time.time()
        finally:
            for one in held:
                with suppress(psutil.NoSuchProcess):
                    one.resume()

    def settles(self) -> None:
        self.publishes(self.world.tidemark(*self.settle_argv))

    def publishes(self, said: str) -> None:
        """Publish the run that a command named last, while two readers ask without a pause: each answer is the one before, or the
        one after."""
        run = said.splitlines()[-1].strip()
        with self.readers(self.by_duckdb, self.by_polars) as still:
            still()
            settle.publish(self.settings, CATALOG, run)
            still()

    @contextmanager
    def readers(self, *looks: Callable[[], tuple[Any, ...]], rest: float = 0) -> Iterator[Callable[[], None]]:
        """Readers that ask again and again, after a rest of some seconds. Whatever they find must be an answer of a moment at
        which `still()` was called, when nothing was being published."""
        seen, whole, ended = Counter[Any](), set[Any](), threading.Event()

        def poll(look: Callable[[], tuple[Any, ...]]) -> None:
            while not ended.wait(rest):
                seen[look()] += 1

        readers = [threading.Thread(target=poll, args=(look,)) for look in looks]
        for reader in readers:
            reader.start()
        try:
            yield lambda: whole.update(look() for look in looks)
        finally:
            ended.set()
            for reader in readers:
                reader.join()
        self.torn += sum(count for answer, count in seen.items() if answer not in whole)

    def by_duckdb(self) -> tuple[Any, ...]:
        """What a reader finds of the settled day: rows, page views, visitors, and how many rows are settled."""
        sql = f"SELECT count(*), sum(pv), sum(uv), count_if(settled) FROM hourly_traffic WHERE day = '{self.day}'"
        return query.query(self.settings, CATALOG, sql).rows[0]

    def by_polars(self) -> tuple[Any, ...]:
        """The same by Polars, which reads the table by its path."""
        rows = pl.scan_delta(str(lake.table(self.settings, hourly_traffic).path)).filter(pl.col("day") == self.day)
        found = rows.select(pl.len(), pl.col("pv").sum(), pl.col("uv").sum(), settled=pl.col("settled").sum()).collect()
        return found.row(0)

    # ---- the round, and what is held against it

    def once(self, name: str, fault: Callable[[], float], last: bool) -> Outcome:
        """One fault. Daily views are refreshed every five minutes: they are held to DuckDB after the last one."""
        views = [view for view in ANSWERS if last or "hourly" in view]
        self.said, self.torn = "", 0
        with self.witness():
            time.sleep(3)
            began = fault()
            until(lambda: self.committed_since(began), 300)
            well = time.time() - began
            time.sleep(2)
        return self.held(name, well, views)

    def held(self, name: str, well: float, views: Sequence[str]) -> Outcome:
        """What is left, held to the witness, to Kafka and to DuckDB, once the stream and its views have caught up."""
        until(lambda: self.world.unread() == 0, 300)
        events = self.events()
        with suppress(TimeoutError):  # then they differ, and the outcome says so
            until(lambda: not self.differing(events, views), 400, between=2)
        differing = self.differing(events, views)
        return Outcome(name, round(well, 1), **self.counted(), differing=differing, torn=self.torn, said=self.said[-600:])

    @contextmanager
    def witness(self) -> Iterator[None]:
        self.traffic += 1
        argv = [sys.executable, "-m", "bench.witness", f"--ledger={self.ledger}", f"--rate={RATE}"]
        argv.append(f"--seed={self.random.getrandbits(32)}")
        name = f"witness-{self.traffic}"
        local.start(self.settings, name, argv, self.world.environment())
        try:
            yield
        finally:
            local.stop(self.settings, name, patience=320)

    def committed_since(self, at: float) -> bool:
        """Whether the stream has entered a batch that was planned after the fault, of whatever it is about."""
        return any(row["started_at"].timestamp() > at for row in lake.ledger_rows(self.settings, "main"))

    def counted(self) -> dict[str, int]:
        """What of the witness's ledger the log lacks, has otherwise, has twice; and the stream's ledger against Kafka."""
        told = [json.loads(line) for line in self.ledger.read_bytes()[self.skipped :].splitlines()]
        acknowledged = {(t["partition"], t["offset"]): base64.b64decode(t["value"]) for t in told if "failed" not in t}
        unseen = {(p, o) for p, start, until in self.unseen for o in range(start, until)}
        sql = f"SELECT kafka.partition, kafka.offset, kafka.value FROM {PAGE_VIEWS.name}"
        rows = [(p, o, bytes(v)) for p, o, v in query.query(self.settings, CATALOG, sql, rows=10_000_000).rows]
        held = {(p, o): v for p, o, v in rows}
        entered: Counter[int] = Counter()
        for row in lake.ledger_rows(self.settings, "main"):
            if row["topic"] == PAGE_VIEWS.name:
                entered[row["partition"]] += row["until_offset"] - row["from_offset"]
        ends, logged = self.world.ends(), Counter(partition for partition, _ in held.keys() | unseen)
        return {
            "records": len(acknowledged),
            "lost": len(acknowledged.keys() - held.keys() - unseen),
            "altered": sum(held[place] != value for place, value in acknowledged.items() if place in held),
            "doubled": len(rows) - len(held),
            "unexplained": sum(abs(entered[p] - ends[p]) + abs(logged[p] - ends[p]) for p in ends),
        }

    def events(self) -> pa.Table:
        """The events that Kafka holds, or has held until the stream had read them."""
        records = [*self.taken, *kafka.consume(self.settings, PAGE_VIEWS.name, "earliest")]
        return pa.Table.from_pylist([found for r in records if (found := accepted(r.value or b""))])

    def differing(self, events: pa.Table, views: Sequence[str]) -> dict[str, int]:
        """By view: its rows that are not DuckDB's over the events that Kafka holds, and DuckDB's that are not its."""
        db = query.connect(self.settings, CATALOG)
        db.register("held", events)
        found = {}
        for view in views:
            theirs = ANSWERS[view]
            ours = f"SELECT {', '.join((*CATALOG.views[view].key, 'pv', 'uv'))} FROM {view}"
            both = f"(({ours}) EXCEPT ALL ({theirs})) UNION ALL (({theirs}) EXCEPT ALL ({ours}))"
            ((rows,),) = db.execute(f"SELECT count(*) FROM ({both})").fetchall()
            if rows:
                found[view] = rows
        db.close()
        return found


def accepted(value: bytes) -> dict[str, Any] | None:
    """What Python alone makes of a value: an event with three texts and an instant, or nothing."""
    try:
        event = json.loads(value.decode())
        event["viewed_at"] = datetime.fromisoformat(event["viewed_at"])
    except (ValueError, KeyError, TypeError):
        return None
    texts = [event.get(name) for name in ("event_id", "visitor_id", "page")]
    return event if all(isinstance(text, str) for text in texts) else None


SHORT = ("stream_killed_at_a_point", "everything_killed", "checkpoint_deleted", "settling_killed")
FAULTS = (
    "stream_killed",
    "stream_killed_at_a_point",
    "stream_killed_in_compaction",
    "broker_killed",
    "everything_killed",
    "broker_frozen",
    "stream_frozen_and_a_second_started",
    "batch_forgotten",
    "partition_added",
    "records_deleted",
    "topic_created_again",
    "everything_at_once",
    "checkpoint_deleted",
    "checkpoint_cut",
    "checkpoint_flipped",
    "log_entry_damaged",
    "file_gone",
    "settling_killed",
    "replay_killed",
)
OF_THREE = ("leader_killed", "two_brokers_killed", "brokers_slow", "brokers_half_open", "connections_cut")
OF_DISKS = ("tables_full", "checkpoint_full", "broker_full", "state_full")
EVERY = (*FAULTS, *OF_THREE, *OF_DISKS)


def drill(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(EVERY)}.")] = "",
    long: Annotated[bool, typer.Option("--long", help="Each fault, in random order; otherwise four of them.")] = False,
    rounds: Annotated[int, typer.Option(help="How often each.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of order, moments and events; drawn and told unless said.")] = None,
    out: Annotated[Path, typer.Option(help="Where the outcomes go.")] = OUT,
) -> None:
    """Break one part after the other beside steady traffic; nothing is lost, doubled or answered otherwise afterwards."""
    seed = int(time.time()) if seed is None else seed
    names = [name for name in only.split(",") if name] or (EVERY if long else SHORT)
    if wrong := set(names) - {*EVERY}:
        raise typer.BadParameter(f"{', '.join(sorted(wrong))}; there are {', '.join(EVERY)}", param_hint="--only")
    console, random = Console(width=170), Random(seed)
    console.print(f"seed {seed}, {RATE:g} events/s, {len(names) * rounds} drills", highlight=False)
    outcomes: list[Outcome] = []
    command = f"python -m bench.drill --only {only}" if only else "make drill" + " LONG=1" * long
    run = stamp(command, seed) | {"drills": []}
    out.parent.mkdir(parents=True, exist_ok=True)
    for kind, faults in ((World, FAULTS), (ThreeBrokers, OF_THREE), (SmallDisks, OF_DISKS)):
        drawn = [name for name in names for _ in range(rounds) if name in faults]
        random.shuffle(drawn)
        if drawn and kind is SmallDisks and os.geteuid():
            console.print(f"left out, since only root may mount small disks: {', '.join(drawn)}")
            continue
        if not drawn:
            continue
        with kind(seed) as world:
            one = Drill(world, random, world.yesterday(5_000))
            one.starts_stream()
            until(lambda: world.unread() == 0, 300)
            one.settles()
            for number, name in enumerate(drawn, 1):
                done = one.once(name, getattr(one, name), last=number == len(drawn))
                outcomes.append(done)
                run["drills"].append(asdict(done))
                console.print(f"{number}/{len(drawn)} {name}: well after {done.well} s, {'held' if done.held else 'NOT HELD'}")
                out.write_text(json.dumps(run, indent=1) + "\n")
    console.print(shown(outcomes))
    raise typer.Exit(0 if all(o.held for o in outcomes) else 1)


def shown(outcomes: list[Outcome]) -> Table:
    table = Table(
        "drill", "times", "well after, median (s)", "slowest", "lost", "altered", "doubled", "unexplained", "rows that differ"
    )
    table.add_column("torn reads")
    for name in dict.fromkeys(o.drill for o in outcomes):
        mine = [o for o in outcomes if o.drill == name]
        sums = [str(sum(getattr(o, what) for o in mine)) for what in ("lost", "altered", "doubled", "unexplained")]
        wells = [o.well for o in mine]
        rows = sum(sum(o.differing.values()) for o in mine)
        times = [str(len(mine)), f"{statistics.median(wells):.1f}", f"{max(wells):.1f}"]
        table.add_row(name, *times, *sums, str(rows), str(sum(o.torn for o in mine)))
    return table


if __name__ == "__main__":
    typer.run(drill)
