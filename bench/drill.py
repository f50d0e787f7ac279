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
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import date, datetime, timedelta
from functools import partial
from itertools import chain, cycle, islice
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
from bench.charge import REPLAYING, SETTLING, InCharge
from bench.disks import SmallDisks
from bench.measure import apart, stamp
from bench.world import STREAM, World, until
from tidemark import airflow, kafka, lake, local, notifier, notify, query, session, settle
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS, hourly_traffic, page_quarters

log = structlog.get_logger()

OUT = Path(__file__).parent / "out" / "drill.json"
RATE = 100.0
POINTS = {
    "stream_killed_at_a_point": ("offsets", "files", "files:2", "commit", "commit:2", "commit:3", "between", "done"),
    "settling_killed": ("", "chunk", "chunk:2", "staged", "published", "rolled back"),
    "replay_killed": ("", "chunk", "chunk:3", "staged", "published"),
    "airflow_killed": (*airflow.COMPONENTS, ""),
}
"""Where each of these dies, one point a round, in an order that is drawn. Of a batch: planned, a table's files written, a table
committed, all of it done and the checkpoint not. Of a run: at a random moment, a table staged, all of them, the first table
published, or taken back. Of Airflow: each of its processes, or all."""
REPAIR = re.compile(r"tidemark (speed --stream \w+ --\w[\w-]*)")
COUNTED = "count(DISTINCT event_id) AS pv, count(DISTINCT visitor_id) AS uv"
TEXTS = ("event_id", "visitor_id", "page")
EVENT = pa.schema([*((name, pa.string()) for name in TEXTS), ("viewed_at", pa.timestamp("us", "UTC"))])
ROLLED = ("--only", page_quarters.name)
"""What is settled and replayed: the rollup that the views of `ANSWERS` are of, and they."""
ANSWERS = {
    "hourly_traffic": f"SELECT page, date_trunc('hour', viewed_at) AS hour, {COUNTED} FROM held GROUP BY ALL",
    "site_hourly_traffic": f"SELECT date_trunc('hour', viewed_at) AS hour, {COUNTED} FROM held GROUP BY ALL",
    "daily_traffic": f"SELECT page, viewed_at::DATE AS day, {COUNTED} FROM held GROUP BY ALL",
    "site_daily_traffic": f"SELECT viewed_at::DATE AS day, {COUNTED} FROM held GROUP BY ALL",
}
MARKS = {"last_hour": "page, ", "site_last_hour": ""}
"""Views of which the newest mark alone is held to DuckDB: once traffic has ended nothing comes too late for it."""


@dataclass
class Outcome:
    """What one drill came to. All counts but `records`, which were acknowledged, are to be zero; `well` is seconds from the fault
    until it is repaired and a batch was committed again."""

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
    """Answers of a reader that were neither a publication's before nor its after, or of a day that nothing changes another."""
    said: str
    """What refused, where something did; its repair was then done."""
    unanswered: int = 0
    """Readers that got no answer, while no table was damaged."""
    point: str = ""
    failed: str = ""
    """What the fault broke off with, where it did: then nothing was counted."""

    @property
    def held(self) -> bool:
        counts = (self.lost, self.altered, self.doubled, self.unexplained, self.torn, self.unanswered)
        return self.records > 0 and not (any(counts) or self.differing or self.failed)


class Drill:
    """One world with steady traffic, and what can happen to it. Each fault ends with everything started again."""

    def __init__(self, world: World, random: Random, day: date, turns: Mapping[str, Iterator[str]] | None = None) -> None:
        self.world, self.random, self.day = world, random, day
        self.still, self.turns = day - timedelta(days=1), turns or in_turn(random)
        self.settings = world.settings
        self.ledger, self.traffic = world.home / "witness.jsonl", 0
        self.forgets()
        self.skipped = 0  # so many bytes of it are of a topic that is gone
        # What retention has taken: records that were read before, and where those were that were not: partition, from, until.
        self.taken: list[kafka.Record] = []
        self.unseen: list[tuple[int, int, int]] = []
        self.settle_argv = ("settle", "--day", str(day), *ROLLED, "--reason", "drill")

    def begins(self) -> None:
        """The stream, and two days settled: one that faults settle again, and the one before it, whose answer nothing changes."""
        self.produces(self.still, 240)
        self.starts_stream()
        until(lambda: self.world.unread() == 0, 300)
        self.settles_both()
        if isinstance(self.world, InCharge):
            self.world.takes_charge()

    def forgets(self) -> None:
        self.said, self.torn, self.unanswered, self.point = "", 0, 0, ""

    # ---- faults: each returns when it happened

    def stream_killed(self) -> float:
        """The stream, at a random moment."""
        return self.kills(STREAM)

    def stream_killed_at_a_point(self) -> float:
        """The stream, between two of the steps of a batch."""
        self.point = next(self.turns["stream_killed_at_a_point"])
        return self.dies({"TIDEMARK_FAILPOINT": self.point})

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

    def topic_created_again_shorter(self) -> float:
        """The topic is deleted, and created again with fewer records than it had: the stream refuses, and begins afresh beside
        what it had, as the refusal says."""
        return self.created_again(lambda had: 500)

    def topic_created_again_longer(self) -> float:
        """The same with more records than it had, so that its offsets tell nothing."""
        return self.created_again(lambda had: had + 5_000)

    def created_again(self, count: Callable[[int], int]) -> float:
        admin, name = AdminClient(kafka.client_config(self.settings)), PAGE_VIEWS.name
        stream, had = local.running(self.settings, STREAM), sum(self.world.ends().values())
        assert stream is not None
        admin.delete_topics([name])[name].result()
        until(lambda: name not in admin.list_topics(timeout=10).topics, 60)
        time.sleep(2)  # what was acknowledged before comes to its ledger
        at, self.skipped, self.taken, self.unseen = time.time(), self.ledger.stat().st_size, [], []
        kafka.apply(self.settings, [PAGE_VIEWS])
        events = kafka.sample(PAGE_VIEWS, seed=self.random.getrandbits(32), count=count(had), zone=self.settings.tz)
        kafka.produce(self.settings, PAGE_VIEWS, events)
        until(lambda: not stream.alive(), 180)
        self.refused(stream)
        if "`tidemark topics apply`" in self.said:  # a batch began while there was none, and it has been applied since
            self.refuses()
        assert "was deleted and created again" in self.said, self.said
        for folder in (self.settings.lake_path, self.checkpoint.path):
            folder.rename(self.world.home / f"{folder.name}-before-{self.traffic}")
        self.produces(self.day, 5000)
        self.produces(self.still, 240)
        ends = kafka.offsets(self.settings, [name], "latest")
        self.starts_stream()
        until(lambda: lake.unread(lake.pins(self.settings, ["main"]), ends) == 0, 300)
        self.settles_both()
        said = self.ledger.read_bytes()  # an answer without an offset is of a record that lies in the topic that is gone
        if (unplaced := said.rfind(b'"offset": null')) >= self.skipped:
            self.skipped = said.find(b"\n", unplaced) + 1
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
                runs = [lake.run_of(self.settings, named(one.result())) for one in staged]
                runs.sort(key=lambda run: (run.pins["main"].seq, run.created))
                for run in runs:
                    settle.publish(self.settings, CATALOG, run.id)
                    still()
                settle.rollback(self.settings, CATALOG, runs[-1].id, "drill")
                still()
        finally:
            spark.stop()
        return at

    def checkpoint_deleted(self) -> float:
        """The folder of the checkpoint is gone."""
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
        newest = [max((table.path / "_delta_log").glob("*.json")) for table in tables]
        # What a checkpoint has nobody reads from its entry.
        entry = self.random.choice([e for e in newest if not lake.checkpointed(e)])
        os.truncate(entry, self.random.choice((0, entry.stat().st_size // 2)))
        self.refuses()
        assert str(entry) in self.said, self.said
        entry.rename(self.world.home / f"damaged-{entry.name}")
        self.starts_stream()
        self.settles_both()  # the entry may have been a publication
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
        self.world.tidemark("verify")  # which fails where a file is not there
        self.starts_stream()
        if then := re.search(r'"then": "tidemark ([^"]+)"', self.said):
            self.publishes(self.world.tidemark(*shlex.split(then[1])))
        return at

    def settling_killed(self) -> float:
        """A settling, its publication or its roll-back, at a random moment or between two steps; it is begun again, and published
        while a reader looks on."""
        self.point = next(self.turns["settling_killed"])
        if self.point not in ("published", "rolled back"):
            at = self.killed_run(*self.settle_argv)
            self.settles()
            return at
        said = self.world.tidemark(*self.settle_argv)
        run = named(said)
        if self.point == "published":
            at = self.dies_at(self.point, "publish", run)
            self.publishes(said)
        else:
            settle.publish(self.settings, CATALOG, run)
            at = self.dies_at(self.point, "rollback", run, "--reason", "drill")
            self.world.tidemark("rollback", run, "--reason", "drill")
            self.settles()
        return at

    def replay_killed(self) -> float:
        """A replay from offset zero, or its publication, at a random moment or between two steps; it is begun again where it was,
        and published with a reader."""
        self.point = next(self.turns["replay_killed"])
        argv = ("replay", *ROLLED, "--reason", "drill", "--run", f"drill-{self.random.getrandbits(32):08x}")
        if self.point != "published":
            at = self.killed_run(*argv)
            said = self.world.tidemark(*argv)
        else:
            said = self.world.tidemark(*argv)
            at = self.dies_at(self.point, "publish", named(said))
        self.publishes(said)
        return at

    def notifier_killed(self) -> float:
        """The notifier, twice while it speaks: each message was said or is a dead letter, and only what was in the air at a death
        was said again."""
        sys.path.append(str(Path(__file__).parent.parent / "tests"))
        from platforms import Platforms, drops, fine, heard_then

        ids, deaths, at = [f"drill-{self.traffic}-{n}" for n in range(40)], 2, 0.0
        unsayable = ids[::10]
        with Platforms(self.world.home / "platforms") as there:
            there.rate = 10_000
            robot = {"NOTIFY_HOSTS": there.host, "NOTIFY_CA": there.ca, "NOTIFY_RATE": 10_000}
            robot |= {"DINGTALK_WEBHOOK": there.webhook("dingtalk")}
            env = self.world.environment() | {f"TIDEMARK_{name}": str(value) for name, value in robot.items()}

            def start() -> local.Process:
                return local.start(self.settings, "notify", [sys.executable, "-m", "tidemark", "notify"], env)

            def unheard(process: local.Process, talk: Any) -> None:
                self.kill(process)
                drops(talk)

            messages = [{"id": one, "platform": "telex" if one in unsayable else "dingtalk", "title": one} for one in ids]
            assert kafka.produce(self.settings, notify.NOTIFY, [json.dumps(one).encode() for one in messages]).complete
            for _ in range(deaths):
                process = start()
                dies = self.random.choice((heard_then(partial(self.kill, process)), partial(unheard, process)))
                there.tricks["dingtalk"].extend([*[fine] * self.random.randrange(1, 9), dies])
                until(lambda: not process.alive(), 120)  # noqa: B023
                at = at or time.time()
            start()
            until(lambda: self.unsaid() == 0, 180)
            local.stop(self.settings, "notify")
            said = Counter(text.splitlines()[0] for text in there.texts("dingtalk"))
        dead = {json.loads(letter.value or b"{}").get("id") for letter in notifier.dead_letters(self.settings)}
        assert {*ids} <= said.keys() | dead, f"neither said nor a dead letter: {sorted({*ids} - said.keys() - dead)}"
        assert {*unsayable} <= dead, f"no dead letters: {sorted({*unsayable} - dead)}"
        again = sum(said[one] - 1 for one in ids if one in said)
        assert again <= deaths, f"{again} messages were said again after {deaths} deaths"
        return at

    def unsaid(self) -> int:
        name = notify.NOTIFY.name
        ends = kafka.offsets(self.settings, [name], "latest")[name]
        return sum(ends.values()) - sum(kafka.group_offsets(self.settings, notifier.GROUP, name).values())

    # ---- faults of three brokers, each with every record, of which two must have what is acknowledged

    def leader_killed(self) -> float:
        """A broker that leads partitions of the topic; nobody waits until it is back."""
        admin = AdminClient(kafka.client_config(self.settings))
        partitions = admin.list_topics(PAGE_VIEWS.name, timeout=30).topics[PAGE_VIEWS.name].partitions
        node = self.random.choice(sorted({partition.leader for partition in partitions.values()} & {*NODES}))
        at = self.kills_nodes(node)
        until(lambda: self.committed_since(at + 5), 120)
        self.three.start_node(node)
        return at

    def two_brokers_killed(self) -> float:
        """Nothing is acknowledged while one of three is left, and all that was is there afterwards."""
        nodes, impatient = self.random.sample(NODES, 2), self.world.home / "impatient.jsonl"
        at = self.kills_nodes(*nodes)
        time.sleep(2)  # what was acknowledged before comes to its ledger
        held = self.ledger.stat().st_size
        with self.witness(impatient, rate=5, patience=5):
            time.sleep(20)
        told = [json.loads(line) for line in impatient.read_text().splitlines()]
        assert told and all("failed" in one for one in told), f"of {len(told)} records some were not refused"
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

    def kills_nodes(self, *nodes: int) -> float:
        time.sleep(self.random.uniform(0, 5))
        at = time.time()
        for node in nodes:
            process = local.running(self.settings, name_of(node))
            assert process is not None
            self.kill(process)
        return at

    # ---- faults while Airflow is in charge

    def airflow_killed(self) -> float:
        """One of Airflow's processes with what it has started, or all: the stream runs on, and is watched again."""
        self.point, pid = next(self.turns["airflow_killed"]), self.stream_pid()
        at = self.kills(*([self.point] if self.point else airflow.COMPONENTS), start=False)
        time.sleep(self.random.uniform(0, 10))
        self.charge.bring_up()
        until(self.charge.watched, 120)
        assert self.stream_pid() == pid, "another stream runs"
        return at

    def nightly_killed(self) -> float:
        """The Spark application of a night, at a random moment: Airflow begins it again, and each table is published."""
        return self.killed_application("nightly", SETTLING, day=str(self.day))

    def reprocess_killed(self) -> float:
        """The Spark application of a replay that publishes by itself, at a random moment: it goes on after its last part."""
        form = {"tables": page_quarters.name, "promote": "automatically", "largest": 1_000_000, "reason": "drill"}
        return self.killed_application("reprocess", REPLAYING, **form)

    def killed_application(self, dag: str, named: str, **conf: Any) -> float:
        run = self.charge.triggered(dag, **conf)
        self.charge.begun(named)
        time.sleep(self.random.uniform(0, 30))
        running, at = [*self.charge.applications(named)], time.time()
        assert running, f"the application of {dag} was over before it was killed"
        for one in running:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.charge.succeeds(run)
        return at

    def stream_pid(self) -> int:
        stream = local.running(self.settings, STREAM)
        assert stream is not None
        return stream.pid

    @property
    def charge(self) -> InCharge:
        assert isinstance(self.world, InCharge)
        return self.world

    # ---- faults of small disks: nothing more can be written for a third of a minute

    def tables_full(self) -> float:
        """The lake's disk."""
        return self.out_of_space("lake")

    def checkpoint_full(self) -> float:
        """The disk of the checkpoints."""
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

    def starts_stream(self) -> None:
        """Start the stream; where it refuses, by the command that its own words tell."""
        argv = self.speed()
        for _ in range(3):
            process = local.start(self.settings, STREAM, argv, self.world.environment())
            until(lambda: self.world.beating(process) or not process.alive(), 180)  # noqa: B023
            if process.alive():
                return
            self.refused(process)
            if not (repair := REPAIR.search(self.said)):
                raise RuntimeError(f"the stream refuses and tells no command that would repair it: {self.said}")
            argv = self.speed(*shlex.split(repair[1])[1:])
        raise RuntimeError(f"the stream refuses still: {self.said}")

    def dies(self, more: dict[str, str]) -> float:
        """Have the stream kill itself, be it before it says that it runs, and start it again. Raises `AssertionError` where it
        ends otherwise."""
        self.world.stop_stream()
        process = local.start(self.settings, STREAM, self.speed(), self.world.environment() | more)
        until(lambda: not process.alive(), 360)
        at, code = time.time(), local.STARTED[-1].wait()
        assert code == -signal.SIGKILL, f"the stream did not come to where it dies: {process.log.read_text()[-300:]}"
        self.starts_stream()
        return at

    def killed_run(self, *argv: str) -> float:
        """Have a settling or a replay die at the point of this round, or at a random moment, before it compares at the latest.
        Raises `AssertionError` where it is over before."""
        if self.point:
            return self.dies_at(self.point, *argv)
        run, moment = self.starts(argv[0], *argv), time.monotonic() + self.random.uniform(5, 25)
        until(lambda: time.monotonic() > moment or not run.alive() or self.judges(), 60, between=0.05)
        assert run.alive(), f"{argv[0]} was over before it was killed"
        at = time.time()
        self.kill(run)
        return at

    def judges(self) -> bool:
        """Whether the newest run has asked its checks, and only compares yet."""
        return any(run.state == "running" and run.tables for run in lake.runs(self.settings)[-1:])

    def dies_at(self, point: str, *argv: str) -> float:
        """Have a command kill itself at a point. Raises `AssertionError` where it never comes there."""
        env = os.environ | self.world.environment() | {"TIDEMARK_FAILPOINT": point}
        said = self.world.home / "died.log"
        with said.open("wb") as file:
            words = [sys.executable, "-m", "tidemark", *argv]
            done = subprocess.run(words, env=env, start_new_session=True, stdout=file, stderr=file, timeout=900)
        assert done.returncode == -signal.SIGKILL, f"{argv[0]} did not come to {point!r}: {said.read_text()[-300:]}"
        return time.time()

    def refuses(self) -> None:
        """Start the stream, which ends with what it says against it."""
        stream = local.start(self.settings, STREAM, self.speed(), self.world.environment())
        until(lambda: not stream.alive(), 180)
        self.refused(stream)

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

    def produces(self, day: date, count: int) -> None:
        self.world.tidemark("produce", PAGE_VIEWS.name, "--sample", "--day", str(day), "--count", str(count))

    def settles_both(self) -> None:
        span = ("--from", str(self.still), "--to", str(self.day))
        settle.publish(self.settings, CATALOG, named(self.world.tidemark("settle", *span, *ROLLED, "--reason", "drill")))

    def settles(self) -> None:
        self.publishes(self.world.tidemark(*self.settle_argv))

    def publishes(self, said: str) -> None:
        """Publish the run that a command named last, while two readers ask without a pause: each answer is the one before, or the
        one after."""
        with self.readers(self.by_duckdb, self.by_polars) as still:
            still()
            settle.publish(self.settings, CATALOG, named(said))
            still()

    @contextmanager
    def readers(self, *looks: Callable[[], tuple[Any, ...]], rest: float = 0) -> Iterator[Callable[[], None]]:
        """Readers that ask again and again, after a rest of some seconds. Whatever they find must be an answer of a moment at
        which `still()` was called, when nothing was being published."""
        seen, whole, ended = Counter[Any](), set[Any](), threading.Event()

        def poll(look: Callable[[], tuple[Any, ...]]) -> None:
            while not ended.wait(rest):
                try:
                    seen[look()] += 1
                except Exception as error:
                    log.warning("a reader has no answer", because=" ".join(str(error).split())[:300])
                    self.unanswered += 1

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
        self.unanswered += not seen

    def by_duckdb(self, day: date | None = None) -> tuple[Any, ...]:
        """What a reader finds of the settled day: rows, page views, visitors, and how many rows are settled."""
        sql = f"SELECT count(*), sum(pv), sum(uv), count_if(settled) FROM hourly_traffic WHERE day = '{day or self.day}'"
        return query.query(self.settings, CATALOG, sql).rows[0]

    def by_polars(self, day: date | None = None) -> tuple[Any, ...]:
        """The same by Polars, which reads the table by its path."""
        rows = pl.scan_delta(str(lake.table(self.settings, hourly_traffic).path)).filter(pl.col("day") == (day or self.day))
        found = rows.select(pl.len(), pl.col("pv").sum(), pl.col("uv").sum(), settled=pl.col("settled").sum()).collect()
        return found.row(0)

    # ---- the round, and what is held against it

    def tried(self, name: str, last: bool) -> Outcome:
        """One fault, or what it broke off with; then its world is no ground for the next one."""
        self.forgets()
        try:
            return self.once(name, getattr(self, name), last)
        except Exception as error:
            log.exception("the drill broke off", drill=name)
            failed = " ".join(f"{type(error).__name__}: {error}".split())[:600]
            nothing: dict[str, int] = dict.fromkeys(("records", "lost", "altered", "doubled", "unexplained"), 0)
            kept = {"said": self.said[-600:], "point": self.point, "failed": failed}
            return Outcome(name, 0.0, **nothing, differing={}, torn=self.torn, unanswered=self.unanswered, **kept)

    def once(self, name: str, fault: Callable[[], float], last: bool) -> Outcome:
        """One fault, while DuckDB and Polars read a day that it does not change. Daily views are refreshed every five minutes:
        they are held to DuckDB after the last one, of the short form not at all."""
        views = [view for view in ANSWERS if last or "hourly" in view]
        looks = [partial(look, self.still) for look in (self.by_duckdb, self.by_polars)]
        # Where the whole lake is moved away there is nothing to read.
        looking = nullcontext(lambda: None) if name.startswith("topic_created_again") else self.readers(*looks, rest=1)
        with looking as still:
            still()
            with self.witness():
                time.sleep(3)
                began = fault()
                until(lambda: self.committed_since(began), 300)
                well = time.time() - began
                time.sleep(2)
        if name in DAMAGES:
            self.unanswered = 0
        return self.held(name, well, views)

    def held(self, name: str, well: float, views: Sequence[str]) -> Outcome:
        """What is left, held to the witness, to Kafka and to DuckDB, once the stream and its views have caught up."""
        until(lambda: self.world.unread() == 0, 300)
        events = self.events()
        with suppress(TimeoutError):  # then they differ, and the outcome says so
            until(lambda: not self.differing(events, views, MARKS), 400, between=2)
        differing = self.differing(events, views, MARKS)
        seen = {"torn": self.torn, "unanswered": self.unanswered, "said": self.said[-600:], "point": self.point}
        return Outcome(name, round(well, 1), **self.counted(), differing=differing, **seen)

    @contextmanager
    def witness(self, ledger: Path | None = None, rate: float = RATE, patience: float = 300) -> Iterator[None]:
        self.traffic += 1
        argv = [sys.executable, "-m", "bench.witness", f"--ledger={ledger or self.ledger}", f"--rate={rate}"]
        argv += [f"--seed={self.random.getrandbits(32)}", f"--patience={patience}"]
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
        lines = self.ledger.read_bytes()[self.skipped :].splitlines()
        told = [t | {"value": base64.b64decode(t["value"])} for t in map(json.loads, lines) if "failed" not in t]
        acknowledged = {(t["partition"], t["offset"]): t["value"] for t in told}
        unseen = {(p, o) for p, start, until in self.unseen for o in range(start, until)}
        sql = f"SELECT kafka.partition, kafka.offset, kafka.value FROM {PAGE_VIEWS.name}"
        with query.connect(self.settings, CATALOG, [PAGE_VIEWS.name]) as db:  # a soak's millions are more than `query` answers
            rows = [(p, o, bytes(v)) for p, o, v in db.execute(sql).fetchall()]
        held = {(p, o): v for p, o, v in rows}
        entered: Counter[int] = Counter()
        for row in lake.ledger_rows(self.settings, "main"):
            if row["topic"] == PAGE_VIEWS.name:
                entered[row["partition"]] += row["until_offset"] - row["from_offset"]
        ends, logged = self.world.ends(), Counter(partition for partition, _ in held.keys() | unseen)
        return {
            "records": len(acknowledged),
            "lost": lost(told, held, unseen),
            "altered": sum(held[place] != value for place, value in acknowledged.items() if place in held),
            "doubled": len(rows) - len(held),
            "unexplained": sum(abs(entered[p] - ends[p]) + abs(logged[p] - ends[p]) for p in ends),
        }

    def events(self) -> pa.Table:
        """The events that Kafka holds, or has held until the stream had read them."""
        records = chain(self.taken, kafka.consume(self.settings, PAGE_VIEWS.name, "earliest"))
        return events_of(records)

    def differing(self, events: pa.Table, views: Sequence[str], marks: Mapping[str, str]) -> dict[str, int]:
        """By view: its rows that are not DuckDB's over the events that Kafka holds, and DuckDB's that are not its."""
        db = query.connect(self.settings, CATALOG)
        db.register("held", events)
        found = {}
        for view in views:
            theirs = ANSWERS[view]
            ours = f"SELECT {', '.join((*CATALOG.views[view].key, 'pv', 'uv'))} FROM {view}"
            if rows := apart(db, ours, theirs):
                found[view] = rows
        for view, key in marks.items():
            ((mark,),) = db.execute(f"SELECT max(mark) FROM {view}").fetchall()
            if mark is None:
                found[view] = 1
                continue
            hour = f"viewed_at >= TIMESTAMPTZ '{mark}' - INTERVAL 1 HOUR AND viewed_at < TIMESTAMPTZ '{mark}'"
            theirs = f"SELECT {key}{COUNTED} FROM held WHERE {hour} GROUP BY ALL"
            ours = f"SELECT {key}pv, uv FROM {view} WHERE mark = TIMESTAMPTZ '{mark}'"
            if rows := apart(db, ours, theirs):
                found[view] = rows
        db.close()
        return found


Place = tuple[int, int]


def lost(told: Sequence[dict[str, Any]], held: Mapping[Place, bytes], unseen: Collection[Place]) -> int:
    """How many acknowledged records the log lacks. Where one is sent again that Kafka has, the answer may have no offset: it is
    looked for by its bytes then."""
    unplaced = [t for t in told if t["offset"] is None]
    values = {(p, value) for (p, _), value in held.items()} if unplaced else set()
    places = {(t["partition"], t["offset"]) for t in told if t["offset"] is not None}
    return len(places - held.keys() - {*unseen}) + sum((t["partition"], t["value"]) not in values for t in unplaced)


def named(said: str) -> str:
    """The run that a command has named last."""
    return said.splitlines()[-1].strip()


def in_turn(random: Random) -> dict[str, Iterator[str]]:
    """By fault: its points one after the other for ever, in an order that is drawn."""
    return {fault: cycle(random.sample(points, len(points))) for fault, points in POINTS.items()}


def often(fault: str, long: bool) -> int:
    """How often one round has a fault: the long form at each of its points."""
    return len(POINTS.get(fault, "_")) if long else 1


def accepted(value: bytes) -> dict[str, Any] | None:
    """What Python alone makes of a value: an event with three texts and an instant, or nothing."""
    try:
        event = json.loads(value.decode())
        event["viewed_at"] = datetime.fromisoformat(event["viewed_at"])
    except (ValueError, KeyError, TypeError):
        return None
    texts = [event.get(name) for name in TEXTS]
    return event if all(isinstance(text, str) for text in texts) else None


def events_of(records: Iterable[kafka.Record]) -> pa.Table:
    """What of Kafka's records Python alone takes for events, repeats included."""
    return in_parts((event for r in records if (event := accepted(r.value or b""))), EVENT)


def in_parts(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """The rows as a table; as dictionaries a soak's millions would fill the machine."""
    parts = iter(lambda: list(islice(rows, 100_000)), [])
    return pa.concat_tables([schema.empty_table(), *(pa.Table.from_pylist(part, schema) for part in parts)])


SHORT = ("stream_killed_at_a_point", "settling_killed")
DAMAGES = ("log_entry_damaged", "file_gone")
"""Faults of the tables themselves: a reader of one may have no answer until it is repaired, but never another one."""
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
    "topic_created_again_shorter",
    "topic_created_again_longer",
    "everything_at_once",
    "checkpoint_deleted",
    "checkpoint_cut",
    "checkpoint_flipped",
    "log_entry_damaged",
    "file_gone",
    "settling_killed",
    "replay_killed",
    "notifier_killed",
)
OF_THREE = ("leader_killed", "two_brokers_killed", "brokers_slow", "brokers_half_open", "connections_cut")
OF_AIRFLOW = ("airflow_killed", "nightly_killed", "reprocess_killed")
OF_DISKS = ("tables_full", "checkpoint_full", "broker_full", "state_full")
WORLDS = ((World, FAULTS), (ThreeBrokers, OF_THREE), (InCharge, OF_AIRFLOW), (SmallDisks, OF_DISKS))
EVERY = tuple(name for _, faults in WORLDS for name in faults)


def drill(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(EVERY)}.")] = "",
    long: Annotated[
        bool,
        typer.Option(
            "--long", help="Each fault, in random order, and at each of its points; otherwise two of them, of a smaller day."
        ),
    ] = False,
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
    count = sum(rounds * often(name, long) for name in names)
    console.print(f"seed {seed}, {RATE:g} events/s, {count} drills", highlight=False)
    outcomes: list[Outcome] = []
    turns, short = in_turn(random), names == SHORT
    command = f"python -m bench.drill --only {only}" + " --long" * long if only else "make drill" + " LONG=1" * long
    run = stamp(command, seed) | {"drills": []}
    out.parent.mkdir(parents=True, exist_ok=True)
    for kind, faults in WORLDS:
        drawn = [name for name in names if name in faults for _ in range(rounds * often(name, long))]
        random.shuffle(drawn)
        if drawn and kind is SmallDisks and os.geteuid():
            console.print(f"left out, since only root may mount small disks: {', '.join(drawn)}")
            continue
        if not drawn:
            continue
        number = 0
        while number < len(drawn):
            with kind(seed) as world:
                one = Drill(world, random, world.yesterday(1_000 if short else 5_000), turns)
                one.begins()
                while number < len(drawn):
                    number += 1
                    done = one.tried(name := drawn[number - 1], last=not short and number == len(drawn))
                    outcomes.append(done)
                    run["drills"].append(asdict(done))
                    what = f"{name}{f' ({done.point})' if done.point else ''}"
                    held = "held" if done.held else f"NOT HELD {done.failed}"
                    console.print(
                        f"{number}/{len(drawn)} {what}: well after {done.well} s, {held}", highlight=False, markup=False
                    )
                    out.write_text(json.dumps(run, indent=1) + "\n")
                    if done.failed:
                        break
    console.print(shown(outcomes))
    raise typer.Exit(0 if all(o.held for o in outcomes) else 1)


def shown(outcomes: list[Outcome]) -> Table:
    table = Table(
        "drill", "times", "well after, median (s)", "slowest", "lost", "altered", "doubled", "unexplained", "rows that differ"
    )
    for name in ("torn reads", "no answer", "held"):
        table.add_column(name)
    for name in dict.fromkeys(o.drill for o in outcomes):
        mine = [o for o in outcomes if o.drill == name]
        sums = [str(sum(getattr(o, what) for o in mine)) for what in ("lost", "altered", "doubled", "unexplained")]
        wells = [o.well for o in mine]
        rows = sum(sum(o.differing.values()) for o in mine)
        times = [str(len(mine)), f"{statistics.median(wells):.1f}", f"{max(wells):.1f}"]
        reads = [str(sum(o.torn for o in mine)), str(sum(o.unanswered for o in mine))]
        table.add_row(name, *times, *sums, str(rows), *reads, "yes" if all(o.held for o in mine) else "NO")
    return table


if __name__ == "__main__":
    typer.run(drill)
