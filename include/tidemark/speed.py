"""The stream: Kafka to Delta tables that are seconds fresh, one query and one checkpoint for each stream.

Nothing here holds state that a restart would miss: each micro-batch is reduced by itself and its rows are appended, and
the law of merging does the rest. What is kept is the checkpoint (which offsets are done) and its identity.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from py4j.protocol import Py4JError, Py4JNetworkError

from tidemark import fold, functions, kafka, lake, local, metrics, notify, session
from tidemark.fold import HOUR, floor
from tidemark.local import Lease, LeaseHeld
from tidemark.model import (
    Catalog,
    DeclarationError,
    Declared,
    Live,
    Rollup,
    Shortcut,
    Topic,
    View,
    comment,
    duration,
    fingerprint,
    looks_ahead,
    midnight,
    needed,
    row_of,
)

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    import pyarrow as pa
    from confluent_kafka.admin import AdminClient
    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemark.settings import Settings

log = structlog.get_logger()

Rows = TypeVar("Rows")

# Below this many records of a batch a topic's results come to the driver as Arrow, those of all such topics in one Spark job.
SMALL = 20_000
# A rollup that lacks batches is rolled from the log in steps of about this many records.
STEP = 1_000_000
# How many marks the sweep computes at once: the full way reads `lookback` more than it writes, so rarely is cheaper. Each mark is
# a file until then: with those of `back`'s ten minutes and of the minute that a sweep may be late they are 240.
SWEPT = timedelta(minutes=9)
# How many times as long as a job took the views that it refreshed are left off: views never take the stream's cores.
REST = 3
# A stream whose trigger is that long lets quicker ones have the cores first, and goes before what computes days again.
UNHURRIED, YIELDING = timedelta(seconds=10), 5
# How long live views wait, in seconds, while the stream has more than a full batch still to read: it catches up first.
PATIENCE = 300
EARLIEST = datetime(1, 1, 1, tzinfo=UTC)
# How long what is merged for the newest marks serves, and how long a pane is waited for before it is merged.
BASE, SETTLE_DOWN = timedelta(minutes=1), timedelta(seconds=30)
# What is merged for it in turn, and for how long that is kept, though no event comes late for it.
BLOCK, BLOCK_LIVES = timedelta(minutes=5), timedelta(minutes=30)
# How much of a view with a short way is computed at once by its full way, where it is far behind.
FAR = timedelta(hours=4)

LEDGER = (
    "stream STRING, generation INT, seq BIGINT, topic STRING, partition INT, from_offset BIGINT, until_offset BIGINT, "
    "records BIGINT, rejects BIGINT, tombstones BIGINT, gaps BIGINT, gap STRING, stream_time TIMESTAMP, started_at TIMESTAMP, "
    "finished_at TIMESTAMP, day DATE"
)


class SpeedError(RuntimeError):
    """The stream refuses to start, or stops; the sentence names the thing and the command that repairs it."""


# -------------------------------------------------------------------------------------------------------------- running


def run(
    settings: Settings,
    catalog: Catalog,
    stream: str = "main",
    recover: bool = False,
    accept_loss: bool = False,
    only: Sequence[str] = (),
) -> None:
    """Run one stream until SIGTERM, SIGINT or a stop marker; returns when it has drained between two batches.

    `only` names topics, rollups and views: the stream reads what they need and nothing else, and goes on where another stream
    that has read a topic of them has stopped. Without, it reads the topics that are declared to be its own.
    `recover` opens a new generation at the log's last offset of each partition, for a checkpoint that is lost;
    `accept_loss` does so where Kafka has deleted records that were never read, and enters the lost range in the ledger.
    Raises `LeaseHeld` when another copy runs, or another stream reads one of the topics, `SpeedError` when the checkpoint, the
    topics and the tables do not belong together, and whatever stopped a batch: nothing half-written is visible, and the next
    start goes on from there.
    """
    mine, settings = catalog.only(only) if only else catalog.stream(stream), settings.of(stream)
    if not mine.topics:
        raise SpeedError(f"no topic belongs to stream {stream}; streams are {', '.join(catalog.streams)}")
    state = settings.state / stream
    state.mkdir(parents=True, exist_ok=True)
    with Lease(state / "lease"):
        if unhurried(settings.trigger):
            local.step_aside(YIELDING)
        (state / "stop").unlink(missing_ok=True)
        if settings.stream_backend == "service":
            wait_until_wanted(settings, stream)
        lake.whole_or_nothing(state / "heartbeat.json", json.dumps(beat("starting")))
        try:
            running = Stream(settings, catalog, stream, state, mine)
            with readers(settings, mine), running.metrics.served():
                running.run(recover, accept_loss)
        except BaseException as error:
            gone = session.ended(settings, error)
            because = gone or lake.disk_full(settings, error) or " ".join(str(error).split())
            with suppress(OSError):  # where this disk is the full one, the error is told all the same
                lake.whole_or_nothing(state / "heartbeat.json", json.dumps(beat("failed", error=because[:2000])))
            if gone:
                raise SpeedError(gone) from None
            raise
        lake.whole_or_nothing(state / "heartbeat.json", json.dumps(beat("stopped")))


def unhurried(trigger: str) -> bool:
    """Whether a trigger is that long. It is in Spark's words: what is not a length of time in ours, as milliseconds, is short."""
    with suppress(DeclarationError):
        return duration(trigger) >= UNHURRIED
    return False


def readers(settings: Settings, mine: Catalog) -> ExitStack:
    """A lease for each topic: of two streams that want one, the second refuses. Raises `LeaseHeld`."""
    with ExitStack() as leases:
        for name in sorted(mine.topics):
            try:
                leases.enter_context(Lease(settings.state / "topics" / f"{name}.lease"))
            except LeaseHeld as held:
                raise LeaseHeld(
                    f"topic {name} is read by another stream: {held}. Or leave it out: tidemark speed --only …"
                ) from None
        return leases.pop_all()


def wait_until_wanted(settings: Settings, stream: str) -> None:
    """A service is started again by its container whenever it ends: one that is wanted stopped stays, and does nothing."""
    ended = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signum, lambda *_: ended.set())
    while local.wanted(settings, stream)["state"] == "stopped" and not ended.is_set():
        lake.whole_or_nothing(settings.state / stream / "heartbeat.json", json.dumps(beat("held")))
        ended.wait(1)
    if ended.is_set():
        raise SystemExit(0)


def beat(state: str, **more: Any) -> dict[str, Any]:
    return {"pid": os.getpid(), "state": state, "at": datetime.now(UTC).isoformat(), **more}


class Stream:
    """One stream's run: its tables, its generation, its query, and the live views that hang on it."""

    def __init__(self, settings: Settings, catalog: Catalog, name: str, state: Path, mine: Catalog | None = None) -> None:
        self.settings, self.catalog, self.name, self.state = settings, catalog, name, state
        self.mine = mine or catalog.stream(name)
        self.checkpoint = lake.Checkpoint.of(settings, name)
        self.stopping = threading.Event()
        # What somebody wants while Python comes up is said to this process too. A service has waited until it is wanted.
        self.asked_before = local.wanted(settings, name)["at"]
        self.began = local.born() if settings.stream_backend == "process" else datetime.now(UTC)
        self.away = False
        self.admin: AdminClient | None = None
        # Whether three batches in a row since the start have left no more unread than they read, or one has left nothing.
        self.caught_up, self.keeping_up = False, 0
        self.set_aside: dict[str, str] = {}
        self.places: dict[str, Column] = {}
        self.stream_time: datetime | None = None
        # The newest batch whose rows are all there.
        self.done = -1
        # The batch that was begun last: of it, if it is begun again, and of the first one the logs may have the rows.
        self.begun = -1
        self.tables: dict[str, lake.Table] = {}
        self.ledger = lake.ledger(settings)
        self.progress: dict[str, Any] = {}
        self.metrics = metrics.Metrics(settings, name, catalog.streams, self.mine.topics, lake.streams(settings, ()))
        self.metrics.of(metrics.BROKER_AWAY).set_function(lambda: float(self.away))
        # The next offset of each topic and partition that the ledger does not have.
        self.upto: dict[tuple[str, int], int] = {}
        # The earliest time that each batch brought to each table, of the last batches: what a refresh must reach back to.
        self.lows: dict[str, deque[tuple[int, datetime]]] = {}
        # What two refreshers share: up to where the full way has written a view, and whose turn it is.
        self.covered: dict[str, datetime] = {}
        self.locks: dict[str, threading.Lock] = {}
        self.refreshed: dict[str, int] = {}
        self.known: dict[str, datetime] = {}
        # Up to which stream time each view is computed the full way, kept in a file; for one that is not there, the stream time
        # at the start, or that of the first batch.
        self.computed: dict[str, datetime] = {}
        # Which version of its table that made, kept in a file too: one that is older now lacks what it has brought.
        self.versions: dict[str, int] = {}
        self.ended_at: datetime | None = None
        self.remembering = threading.Lock()
        # Views with marks that the short way never wrote: older than `back` when the stream came to them.
        self.skipped: set[str] = set()
        # Whose turn it is: a batch's, or that of the views that announce.
        self.turn = threading.Lock()

    # ---- start

    def run(self, recover: bool, accept_loss: bool) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            if threading.current_thread() is threading.main_thread():
                signal.signal(signum, lambda *_: self.stopping.set())
        self.wait_for_broker()
        if self.stopping.is_set():
            return
        self.beat("starting")  # what waits must beat more often than Spark takes to come up
        self.prepare(recover, accept_loss)
        beside = (self.shortcuts, self.announced, self.refreshes, self.compactions, self.tellings)
        background = [Background(self, work) for work in beside]
        try:
            while not self.stopping.is_set():
                self.follow(self.start_query())
        finally:
            self.stopping.set()
            with suppress(Py4JError, ConnectionError):  # of a JVM that has ended nothing is left to end
                self.end(background)
            if not self.away:
                self.metrics.tell(self.upto, seconds=1)
            with suppress(Py4JError, ConnectionError):
                self.spark.stop()
        (self.state / "stop").unlink(missing_ok=True)

    def prepare(self, recover: bool = False, accept_loss: bool = False) -> None:
        """All that the first query needs: a session, the tables, a checkpoint, and of new rollups what the log has."""
        lake.refuse_empty(self.settings)
        self.spark: SparkSession = session.session(
            self.settings,
            f"tidemark-{self.name}",
            {"spark.scheduler.allocation.file": f"file:{self.pools()}"},
            optimize=bool(self.mine.rollups),
        )
        self.spark.sparkContext.setLocalProperty("spark.scheduler.pool", "stream")
        self.make_tables()
        self.generation = self.open_generation(recover, accept_loss)
        self.remember_topics()
        self.remember_time()
        self.remember_code()
        self.upto = {(t, int(p)): o for t, parts in self.read_upto().items() for p, o in parts.items()}
        self.caught_up = not any(self.lag().values())
        self.roll_what_lacks()
        if told := local.status(self.settings, self.name).get("progress"):  # of the last batch, and of the code of then
            lake.whole_or_nothing(self.state / "progress.json", json.dumps(told | {"set_aside": self.set_aside}))
        self.announcing = Refresher(self, [v for v in self.live_views() if v.announce], "announced", rest=0)

    def remember_code(self) -> None:
        """Say of which code each table's rows are from now on, and warn where those of before are of another: a rollup's stand
        side by side until the night, a view's settled days beside those that follow; its live rows of today are computed again.
        What reads one that has changed is not named too, for a replay takes it along. The pipeline's file tells, so it may have
        been a comment that was changed."""
        was = local.status(self.settings, self.name).get("code", {})
        mine: list[Rollup | View] = [*self.mine.rollups.values(), *self.own(self.catalog.views.values())]
        told = [d for d in mine if d.name not in self.set_aside]
        code = {d.name: fingerprint(d) for d in told}
        changed = {name for name in code.keys() & was.keys() if code[name] != was[name]}
        if first := sorted(d.name for d in told if d.name in changed and not changed & {s.name for s in d.reads.values()}):
            log.warning(
                "changed since the stream last ran: what a rollup has, and a view's settled days, stay as they were computed; if "
                "the change is more than words, replay lists what differs and mends it",
                stream=self.name,
                tables=first,
                mend=f"tidemark replay --only {','.join(first)} --reason …",
            )
        if changed:  # but nobody is told of this morning by other code
            self.look_back({v.name: self.today() for v in self.live_views() if v.name in changed and not v.announce})
        lake.whole_or_nothing(self.state / "code.json", json.dumps(code))

    def end(self, background: Sequence[Background], seconds: float = 30) -> None:
        """End the work beside the batches, in the middle of a refresh too: it is done again at the next start."""
        self.spark.sparkContext.setLogLevel("OFF")  # else Spark tells a stack of each job that is cancelled here
        until = time.monotonic() + seconds
        while any(b.thread.is_alive() for b in background) and time.monotonic() < until:
            self.spark.sparkContext.cancelAllJobs()
            for work in background:
                work.thread.join(timeout=0.2)

    def follow(self, query: Any) -> None:
        """Watch a query until it drains; returns for another try when only the broker was away."""
        from pyspark.errors import StreamingQueryException

        look = Due("5 seconds")  # Spark says nothing for a minute when the broker is gone
        try:
            while query.isActive and not self.asked_to_end():
                if look():
                    self.broker_away(seconds=1)
                self.beat("waiting" if self.away else "running")
                query.awaitTermination(1)
        except StreamingQueryException as error:
            if not of_broker(error):
                raise SpeedError(self.because(error)) from error
            self.spark.catalog.clearCache()  # what the batch that was cut off has held
            if self.away or self.broker_away(seconds=5):
                self.wait_for_broker()
            else:  # a partition may have no leader
                because = raised(str(error))
                log.warning("a query ended for want of Kafka, which answers; it begins again", stream=self.name, because=because)
                self.stopping.wait(5)
        finally:
            if self.stopping.is_set():
                with suppress(OSError):  # a full disk keeps no batch from its end
                    self.beat("draining")
            drain(query)

    def asked_to_end(self) -> bool:
        """Whether the stream shall end: by a signal, by a stop marker, or since it is wanted stopped, or to begin again."""
        wanted = local.wanted(self.settings, self.name)
        # What was there at the beginning counts where it came since: the clock may have been set back meanwhile.
        since = wanted["at"] != self.asked_before or self.began < datetime.fromisoformat(wanted["at"]) <= datetime.now(UTC)
        unwanted = (wanted["state"] == "stopped" or wanted["again"]) and since
        if unwanted or (self.state / "stop").exists():
            self.stopping.set()
        return self.stopping.is_set()

    def beat(self, state: str) -> None:
        lake.whole_or_nothing(self.state / "heartbeat.json", json.dumps(beat(state, seq=self.progress.get("seq"))))

    def wait_for_broker(self) -> None:
        while not self.asked_to_end() and self.broker_away(seconds=5):
            self.beat("waiting")

    def broker_away(self, seconds: float) -> bool:
        """Whether no broker answers within so many seconds; said once when it goes, and once when it is back."""
        before = self.away
        try:
            kafka.wait(self.settings, seconds)
            self.away = False
        except kafka.BrokerAway as gone:
            self.away = True
            if not before:
                log.warning(f"{gone}; the stream waits for it", stream=self.name)
        if before and not self.away:
            log.info("the broker is back", stream=self.name, brokers=self.settings.brokers)
        return self.away

    def because(self, error: Exception) -> str:
        """The sentence behind Spark's wrapping of what stopped a batch."""
        text = str(error)
        for mark in ("tidemark.lake.LakeError: ", "tidemark.speed.SpeedError: ", "tidemark.kafka.BrokerRefused: "):
            if mark in text:
                return text.split(mark, 1)[1].splitlines()[0]
        if refused := kafka.refused_by_spark(self.settings, error):
            return refused
        # A topic that is gone, or is another now, ends a query in as many ways as there are moments in a batch.
        topics, lost = list(self.mine.topics), any(mark in text for mark in LOST)
        try:
            self.refuse_created_again(kafka.topic_ids(self.settings, topics), self.generation.topic_ids)
            if lost:
                self.refuse_lost(self.lost(self.read_upto(), kafka.offsets(self.settings, topics, "earliest")))
        except (SpeedError, kafka.TopicMissing) as sentence:
            return str(sentence)
        except ConnectionError:
            pass
        if lost:
            return f"Kafka no longer holds offsets that stream {self.name} has not read: {text.splitlines()[0]}"
        return f"stream {self.name} has stopped: {raised(text)}"

    def pools(self) -> Path:
        """Scheduler pools: the stream before its live views, and both before compaction."""
        path = self.state / "pools.xml"
        pool = '<pool name="{}"><schedulingMode>FIFO</schedulingMode><weight>{}</weight><minShare>{}</minShare></pool>'
        path.write_text(
            f"<allocations>{pool.format('stream', 8, 2)}{pool.format('marks', 4, 1)}{pool.format('views', 1, 0)}</allocations>"
        )
        return path

    def make_tables(self) -> None:
        """Create what is missing; a rollup or view whose function does not fit its sources is set aside, and a topic of another
        stream whose event time gives none, with what reads it. Raises `DeclarationError` for such a topic of its own."""
        lake.refuse_other_zone(self.settings, self.catalog.topics.values())
        for declared, schema in fold.remembered_schemas(self.spark, self.catalog, self.settings.state / fold.REMEMBERED):
            if isinstance(schema, Exception):
                if declared.name in self.mine.topics:
                    raise schema
                self.aside(declared, schema)
                continue
            table = lake.table(self.settings, declared)
            table.create(schema, comment(declared), row_of(declared))
            self.tables[declared.name] = table
        for topic in self.mine.topics.values():
            lake.refuse_other_reading(self.spark, self.settings, self.tables[topic.name], topic, *fold.MISREAD)
            self.tables[topic.name].cut_by(topic)
        self.ledger.create(
            fold.schema_of(fold.nothing(self.spark, LEDGER)),
            "Every micro-batch of every stream: offsets, records, rejects.",
        )

    def aside(self, declared: Declared, error: Exception) -> None:
        self.set_aside[declared.name] = " ".join(str(error).split())[:500]
        (self.settings.state / fold.REMEMBERED).unlink(missing_ok=True)  # it may be that they are others now
        self.metrics.of(metrics.SET_ASIDE, declared.name).set(1)
        log.error("set aside; the others go on", name=declared.name, stream=self.name, because=self.set_aside[declared.name])

    def started(self, *options: str) -> str:
        return lake.started(self.catalog, self.name, self.mine.topics, *options)

    @property
    def repair(self) -> str:
        return f"open a new generation at the log's last offsets with: {self.started('--recover')}"

    @property
    def afresh(self) -> str:
        away = f"move {self.settings.lake_path} and {self.settings.checkpoints} away"
        return f"begin afresh with what Kafka holds: end the streams, {away}, and start them again"

    def open_generation(self, recover: bool, accept_loss: bool) -> lake.Generation:
        """The checkpoint's generation: the one it carries, a first one, or a new one above all before: with `recover`, and
        where its topics are others than before.

        A checkpoint takes a new topic up at offset zero and nowhere else: one that begins later needs a new generation too.
        """
        topics = list(self.mine.topics)
        found = self.checkpoint.identity
        entered = [t.appended(self.name) for t in (self.ledger, *self.tables.values())]
        last = max((seq for seq in entered if seq is not None), default=-1)
        ids = kafka.topic_ids(self.settings, topics)
        logged = {t: one for t in topics if (one := self.tables[t].topic_id)}
        self.refuse_created_again(ids, logged | (found.topic_ids if found else {}))
        earliest = kafka.offsets(self.settings, topics, "earliest")
        known = self.known_upto(found, recover)
        moved, taken = self.taken_over(found, known)
        given = [t for t in (found.topic_ids if found else ()) if t not in topics]
        late = [t for t, parts in earliest.items() if found and t not in known and any(parts.values())]
        if not found and last >= 0 and not (recover or accept_loss):
            raise SpeedError(
                f"the checkpoint in {self.checkpoint.path} is lost, but the lake has {last + 1} batches of stream "
                f"{self.name}; {self.repair}"
            )
        self.read_again()
        if found and not (recover or moved or given or late):
            newest = self.checkpoint.newest("offsets")
            planned = found.base + (-1 if newest is None else newest)
            if planned < last:
                raise SpeedError(
                    f"the checkpoint in {self.checkpoint.path} ends at batch {planned} of stream {self.name}, the lake at "
                    f"{last}: an old copy, or files are lost; {self.repair}"
                )
            self.plan_again(found)
            known = self.read_upto(found)  # less, where the newest batch is read again
            self.refuse_ahead(known)
            lost = self.lost(known, earliest)
            if not accept_loss:
                self.refuse_lost(lost)
            if not lost:
                if not set(topics) - set(found.topic_ids):
                    return found
                return self.write_identity(replace(found, topic_ids={**ids, **found.topic_ids}))
        start = {t: {str(p): o for p, o in parts.items()} for t, parts in earliest.items()}
        number = 1 if last < 0 else self.newest_generation() + 1
        if last >= 0 or moved or late:
            # A killed batch may have held what is given away, unless another has read on: it starts after whole batches only.
            mine = (t for t in given if t in self.tables and lake.reader(self.settings, self.catalog.topics[t]) == self.name)
            held = [*topics, *mine]
            done = self.finish_ledger(self.entered_spans(held), self.log_spans(held), max(1, number - 1))
            read = self.starts_of_all() | known  # a topic that is taken over may have a partition more since, as one's own may
            known |= {t: {**read.get(t, start.get(t, {})), **parts} for t, parts in done.items()}
            self.refuse_ahead(known)
            lost = self.lost(known, earliest)
            if not accept_loss:
                self.refuse_lost(lost, recover)
            last = max(last, self.ledger.appended(self.name) or 0)
            if lost:
                last += 1
                self.enter_loss(lost, last, number)
            for topic, parts in done.items():
                if topic in start:
                    start[topic] |= {p: max(until, start[topic].get(p, 0)) for p, until in parts.items()}
        if self.checkpoint.path.exists():
            aside = self.checkpoint.path.with_name(f"{self.name}.before-{number}-{int(time.time())}")
            shutil.move(self.checkpoint.path, aside)
            log.warning("the old checkpoint is kept", path=str(aside))
        log.info("a new generation", stream=self.name, generation=number, start=start, taken=taken, given=given)
        return self.write_identity(lake.Generation(number, last + 1, start, ids, (found.taken if found else {}) | taken))

    def starts_of_all(self) -> dict[str, dict[str, int]]:
        """Where reading of each partition has begun last, whichever of this lake's streams did, those set aside too; one that was
        added since is not there. What was set aside before the lake began is of other topics."""
        told, began = list[tuple[int, dict[str, Any]]](), (self.ledger.delta().metadata().created_time or 0) * 1_000_000
        for file in self.settings.checkpoints.glob("*/tidemark.json"):
            with suppress(OSError, ValueError, TypeError, KeyError):  # another stream may set its own aside just now
                told.append((file.stat().st_mtime_ns, json.loads(file.read_text())["start"]))
        found: dict[str, dict[str, int]] = {}
        for start in (one for at, one in sorted(told, key=lambda pair: pair[0]) if at >= began):
            for topic, parts in start.items():
                found[topic] = found.get(topic, {}) | parts
        return found

    def refuse_created_again(self, ids: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Raises `SpeedError` where one of these topics, by Kafka's own id, is not the one that was read."""
        for topic, new in ids.items():
            if new != (read := known.get(topic, new)):
                raise SpeedError(
                    f"topic {topic} was deleted and created again, or this is another Kafka (its id is {new}, the stream has "
                    f"read {read}); its offsets begin again and would be taken for old ones. {self.other_topic}"
                )

    @property
    def other_topic(self) -> str:
        return f"Give the new topic and what is made of it other names, or {self.afresh}"

    def refuse_ahead(self, known: Mapping[str, Mapping[str, int]]) -> None:
        """Raises `SpeedError` where a topic ends before what was read of it: what comes to it now has offsets that were read."""
        for topic, parts in kafka.offsets(self.settings, list(self.mine.topics), "latest").items():
            for p, end in parts.items():
                if (upto := known.get(topic, {}).get(str(p), 0)) > end:
                    raise SpeedError(
                        f"topic {topic}, partition {p}, ends at offset {end}, and the stream has read it up to {upto}: Kafka "
                        f"has lost records, or an old copy of it was put back. What comes now has offsets that were read before, "
                        f"and would be taken for that. {self.other_topic}"
                    )

    def read_again(self) -> None:
        """Read from Kafka again what the ledger has of a topic and its log has not, and append it to the log.

        So it is when the newest entries of a log's Delta log were damaged and moved away; a quiet topic's may be of a batch long
        ago. Rollups know it already, or get it from the log. Raises `SpeedError` where Kafka does not give it.
        """
        lost = lake.entered_beyond(self.settings, {t: self.tables[t] for t in self.mine.topics})
        for (topic, stream), rows in groupby(lost, lambda r: (r["topic"], r["stream"])):
            self.log_again(self.mine.topics[topic], stream, list(rows))

    def log_again(self, topic: Topic, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append to a log what it lacks of a stream's records, as these rows of the ledger count them.

        It may hold them all: `finish_ledger` enters a batch of several topics under the latest number of them. Then the log is
        given that number.
        """
        from pyspark.sql import functions as F

        table, lo, hi = self.tables[topic.name], rows[0]["seq"], rows[-1]["seq"]
        spans, lacks = fold.spans(rows)[topic.name], Counter[str]()
        there = fold.within_offsets(lake.read(self.spark, table), spans)
        for row in rows:
            lacks[str(row["partition"])] += row["records"]
        for held in there.groupBy("kafka.partition").agg(F.count("*").alias("records")).toArrow().to_pylist():
            lacks[str(held["partition"])] -= held["records"]
        lost = {p: (spans[p][0], spans[p][1]) for p, count in lacks.items() if count > 0}
        newest = [r for r in lake.newest_batch(self.settings, stream) if lo == hi == r["seq"]]  # Spark may try it once more
        batch, files = lake.Batch(stream, lo, hi, fold.spans(newest or rows)), list[Any]()
        if lost:
            first = kafka.offsets(self.settings, [topic.name], "earliest")[topic.name]
            end = kafka.offsets(self.settings, [topic.name], "latest")[topic.name]
            ranges = "; ".join(f"partition {p}, offsets {a} to {b - 1}" for p, (a, b) in lost.items())
            refused = (
                f"table {table.name} lacks records that the ledger has: topic {topic.name}, {ranges}; and Kafka {{}}. Put "
                f"{table.path} back from a copy of the lake, or {self.afresh}"
            )
            if any(a < first.get(int(p), b) or end.get(int(p), 0) < b for p, (a, b) in lost.items()):
                raise SpeedError(refused.format("no longer holds all of them"))
            place = (F.col("kafka.partition").alias("_p"), F.col("kafka.offset").alias("_o"))
            places = {int(p): span for p, span in lost.items()}
            source = kafka.between(self.spark, self.settings, topic.name, places, f"tidemark-{self.name}-again")
            found = fold.judged(topic, source).drop("event_time").select("*", *place)
            found = found.join(there.select(*place), on=["_p", "_o"], how="left_anti").drop("_p", "_o")
            files = lake.write_spark(table, batch.folder, found)
            wanted, given = sum(lacks[p] for p in lost), sum(json.loads(f.stats)["numRecords"] for f in files)
            if given != wanted:
                raise SpeedError(refused.format(f"gives {given:,} of {wanted:,}"))
            log.warning("read again: its log had lost it", topic=topic.name, stream=stream, batches=[lo, hi], records=given)
        lake.append(table, batch, files)

    def plan_again(self, found: lake.Generation) -> None:
        """Have Spark plan its newest batch once more where the ledger has lost it; every other table knows it already, or gets it
        with that.

        So it is when the newest entry of its Delta log was damaged and moved away. Raises `SpeedError` where more is lost: a new
        generation enters what the logs have, and reads the rest again.
        """
        done, entered = self.checkpoint.newest("commits"), self.ledger.appended(self.name)
        entered = -1 if entered is None else entered
        if done is None or entered >= (seq := found.base + done):
            return
        if entered < seq - 1:
            raise SpeedError(
                f"the ledger lacks more than the newest batch of stream {self.name}, {seq}: put {self.ledger.path} back from a "
                f"copy of the lake, or {self.repair}"
            )
        planned = self.checkpoint.newest("offsets") or done
        if planned > done:  # Spark would go on with what it planned last, and never come back to this batch
            if begun := [n for n, t in self.tables.items() if (t.appended(self.name) or 0) >= found.base + planned]:
                raise SpeedError(
                    f"the ledger lacks the newest whole batch of stream {self.name}, {seq}, and {begun[0]} has some of the next "
                    f"one; {self.repair}"
                )
            for file in (str(planned), f".{planned}.crc"):
                (self.checkpoint.path / "offsets" / file).unlink(missing_ok=True)
        log.warning("its newest batch is read again: the ledger does not have it any more", stream=self.name, seq=seq)
        (self.checkpoint.path / "commits" / str(done)).unlink()

    def known_upto(self, found: lake.Generation | None, recover: bool) -> dict[str, dict[str, int]]:
        """What the checkpoint has committed; nothing where it is damaged and another is opened: the logs and the ledger know."""
        if not found:
            return {}
        try:
            self.checkpoint.refuse_damaged()
            return self.read_upto(found)
        except lake.LakeError as error:
            if recover:
                return {}
            raise SpeedError(f"{error}; {self.repair}") from None

    def taken_over(self, found: lake.Generation | None, mine: Mapping[str, Mapping[str, int]]) -> tuple[bool, dict[str, int]]:
        """Whether a topic of this stream was read on elsewhere, or before; and the streams that were ever at it, each with its
        last batch. Raises `SpeedError` for one that has not drained.
        """
        from pyspark.sql import functions as F

        checkpoints = {s: lake.Checkpoint.of(self.settings, s) for s in lake.streams(self.settings, ()) if s != self.name}
        reading = {s: c.identity.topic_ids for s, c in checkpoints.items() if c.identity}
        theirs = {s: both for s, topics in reading.items() if (both := topics.keys() & self.mine.topics.keys())}
        own = set(found.topic_ids) if found else set()
        asked = [t for t in self.mine.topics if t not in own or any(t in topics for topics in theirs.values())]
        if not asked or (not checkpoints and self.ledger.appended(self.name) is None):
            return False, {}
        rows = lake.read(self.spark, self.ledger).where(F.col("topic").isin(asked)).groupBy("topic", "partition")
        ends = rows.agg(
            F.max("until_offset").alias("until"),
            F.max_by("stream", "until_offset").alias("stream"),
            F.collect_set("stream").alias("streams"),
        )
        told = ends.toArrow().to_pylist()
        entered = {(r["topic"], str(r["partition"])): (r["until"], r["stream"]) for r in told}
        for stream, topics in theirs.items():
            planned, committed = (checkpoints[stream].newest(kind) for kind in ("offsets", "commits"))
            try:
                until = checkpoints[stream].offsets(planned) if planned is not None else {}
                whole = checkpoints[stream].offsets(committed) if committed is not None else {}
            except lake.LakeError as error:
                again = lake.started(self.catalog, stream, reading[stream], "--recover")
                raise SpeedError(f"{error}; start that one and drain it: {again}. Then start this one again") from None
            # Nothing is entered of a partition that retention has emptied, which begins beyond zero, nor of one that has been
            # quiet for longer than the ledger is kept.
            at = checkpoints[stream].identity
            without = [at.start if at else {}, whole]
            read = {
                (t, p): max(entered.get((t, p), (0, ""))[0], *(o.get(t, {}).get(p, 0) for o in without))
                for t in topics
                for p in until.get(t, {})
            }
            if half := [t for (t, p), done in read.items() if until[t][p] > done]:
                raise SpeedError(
                    f"stream {stream} was reading {half[0]} and has ended inside a batch. Start it, so that it finishes what it "
                    f"has begun, and drain it: {lake.started(self.catalog, stream, reading[stream])}. Then start this one again"
                )
        read_on = {
            stream
            for (topic, p), (until, stream) in entered.items()
            if until > mine.get(topic, {}).get(p, 0) and not (stream == self.name and topic in own)
        }
        at_it = {s for r in told for s in r["streams"]} - {self.name}
        return bool(read_on), {s: self.ledger.appended(s) or 0 for s in at_it}

    def read_upto(self, generation: lake.Generation | None = None) -> dict[str, dict[str, int]]:
        """The next offset of each partition that the checkpoint has committed none beyond."""
        generation, done = generation or self.generation, self.checkpoint.newest("commits")
        upto = self.checkpoint.offsets(done) if done is not None else {}
        return {t: {**generation.start.get(t, {}), **upto.get(t, {})} for t in {*generation.start, *upto}}

    def lost(
        self, upto: Mapping[str, Mapping[str, int]], earliest: Mapping[str, Mapping[int, int]]
    ) -> dict[str, dict[str, list[int]]]:
        """What Kafka has deleted and nobody has read, `{topic: {partition: [from, until]}}`; of topics that were read.

        A partition of them that is not in `upto` was added since, and is lost from zero on.
        """
        gone = {
            t: {str(p): [at, first] for p, first in parts.items() if (at := upto[t].get(str(p), 0)) < first}
            for t, parts in earliest.items()
            if t in upto
        }
        return {t: parts for t, parts in gone.items() if parts}

    def refuse_lost(self, lost: Mapping[str, Mapping[str, Sequence[int]]], recover: bool = False) -> None:
        """Raises `SpeedError` where anything is lost, with the command that goes on without: of a checkpoint that nothing goes on
        from, with `--recover` too."""
        ranges = [f"{t}, partition {p}, offsets {a} to {b - 1}" for t, parts in lost.items() for p, (a, b) in parts.items()]
        options = ["--recover"] if recover else []
        if ranges:
            raise SpeedError(
                f"Kafka has deleted records that stream {self.name} has not read: topic {'; topic '.join(ranges)}. If they "
                f"cannot be produced again, go on without them: {self.started('--accept-loss', *options)}; the "
                f"ledger keeps the range. So that it does not happen again, raise the topic's retention"
            )

    def enter_loss(self, lost: Mapping[str, Mapping[str, Sequence[int]]], seq: int, generation: int) -> None:
        """The lost range, in the ledger: offsets that nobody has read, with the reason."""
        why = "lost: deleted by Kafka before it was read, accepted with --accept-loss"
        counts = [
            {"topic": t, "partition": int(p), "records": 0, "rejects": 0, "tombstones": 0, "gaps": b - a, "gap": why}
            for t, parts in lost.items()
            for p, (a, b) in parts.items()
        ]
        log.warning("going on without what Kafka has deleted; the ledger keeps the range", stream=self.name, lost=lost)
        self.write_ledger(lake.Batch(self.name, seq, seq, lost), counts, datetime.now(UTC), generation, self.stream_time)

    def entered(self, stream: str = "") -> DataFrame:
        """A stream's ledger, this one's unless said, as Spark reads it: it may hold years."""
        rows = lake.read(self.spark, self.ledger)
        return rows.where(rows["stream"] == (stream or self.name))

    def newest_generation(self) -> int:
        from pyspark.sql import functions as F

        found = self.entered().agg(F.max("generation").alias("number")).first() if self.ledger.exists else None
        return found["number"] if found and found["number"] is not None else 0

    def entered_spans(self, topics: Sequence[str]) -> dict[str, dict[str, list[int]]]:
        """The first offset of each partition in the ledger and the one after its last, whichever stream has entered them."""
        from pyspark.sql import functions as F

        rows = lake.read(self.spark, self.ledger)
        ends = (
            rows.where(rows["topic"].isin(list(topics)))
            .groupBy("topic", "partition")
            .agg(F.min("from_offset").alias("from_offset"), F.max("until_offset").alias("until_offset"))
        )
        return fold.spans(ends.toArrow().to_pylist())

    def write_identity(self, generation: lake.Generation) -> lake.Generation:
        self.checkpoint.path.mkdir(parents=True, exist_ok=True)
        lake.whole_or_nothing(self.checkpoint.path / "tidemark.json", json.dumps(asdict(generation), indent=1), kept=True)
        return generation

    def log_spans(self, topics: Sequence[str]) -> dict[str, dict[str, list[int]]]:
        """The first offset in each topic's log and the one after its last, by partition."""
        from pyspark.sql import functions as F

        offset, found = F.col("kafka.offset"), {}
        for topic in topics:
            held = lake.read(self.spark, self.tables[topic]).groupBy("kafka.partition")
            rows = held.agg(F.min(offset).alias("first"), F.max(offset).alias("last")).collect()
            found[topic] = {str(r["partition"]): [r["first"], r["last"] + 1] for r in rows}
        return found

    def finish_ledger(
        self,
        entered: Mapping[str, Mapping[str, Sequence[int]]],
        held: Mapping[str, Mapping[str, Sequence[int]]],
        generation: int,
    ) -> dict[str, dict[str, int]]:
        """Enter what a killed batch has put into the logs and no further, so that the rollups get it from there.

        Without its checkpoint that batch is not tried again: the new generation starts after the offsets returned, the
        last of the logs and the ledger.
        """
        from pyspark.sql import functions as F

        done = {t: {p: until for p, (_, until) in parts.items()} for t, parts in entered.items()}
        offsets: dict[str, dict[str, list[int]]] = {}
        counts: list[dict[str, Any]] = []
        for topic, parts in held.items():
            known = entered.get(topic, {})
            spans = {p: [known[p][1] if p in known else first, until] for p, (first, until) in parts.items()}
            if not (spans := {p: s for p, s in spans.items() if s[1] > s[0]}):
                continue
            offsets[topic] = spans
            done[topic] = {**done.get(topic, {}), **{p: until for p, (_, until) in spans.items()}}
            left = fold.within_offsets(lake.read(self.spark, self.tables[topic]), spans)
            found = left.groupBy("kafka.partition").agg(
                F.count("*").alias("records"),
                F.count("reject").alias("rejects"),
                F.count_if(fold.ended()).alias("tombstones"),
                F.max(fold.event_time(self.catalog.topics[topic])).alias("stream_time"),
            )
            mine = [{"topic": topic, **r} for r in found.toArrow().to_pylist()]
            counts += self.explained(self.catalog.topics[topic], mine, spans)
        if counts:
            # What another stream has left has no number of this one's, and one that the ledger has would enter nothing.
            newest = self.ledger.appended(self.name)
            unused = 0 if newest is None else newest + 1
            seq = max(unused, *(self.tables[topic].appended(self.name) or 0 for topic in offsets))
            self.stream_time = max(filter(None, (self.come_to({}), *(c.get("stream_time") for c in counts))), default=None)
            batch = lake.Batch(self.name, seq, seq, offsets)
            for topic in offsets:
                self.renumber(self.tables[topic], batch)
            log.info("entered into the ledger what the logs have beyond it", stream=self.name, seq=seq, offsets=offsets)
            self.write_ledger(batch, counts, datetime.now(UTC), generation, self.stream_time)
        return done

    def renumber(self, table: lake.Table, batch: lake.Batch) -> None:
        """Give a log's files of batches that the ledger does not have the number under which it gets them: rollups and nights
        find a batch's records by the names of its files."""
        named = [(f, f.live["stream"], int(f.live["lo"]), int(f.live["hi"])) for f in table.files() if f.live]
        entered = {stream: self.ledger.appended(stream) for _, stream, _, _ in named}
        left = [
            file
            for file, stream, lo, hi in named
            if (stream, hi) != (batch.stream, batch.hi) and ((last := entered[stream]) is None or lo > last)
        ]
        if left:
            rows = lake.read(self.spark, table, files=left)
            lake.swap(table, left, lake.write_spark(table, batch.folder, rows), {"entered as": [batch.stream, batch.hi]})

    def remember_topics(self) -> None:
        """Have each log know, by Kafka's own id, whose records it holds, were all checkpoints lost."""
        for topic in self.mine.topics:
            self.tables[topic].belong_to(self.generation.topic_ids[topic])

    def remember_time(self) -> None:
        rows, others = lake.newest_batch(self.settings, self.name), self.generation.taken
        if rows and rows[0]["seq"] >= self.generation.base:  # it has read on since it took over what others had
            others, come = {}, rows[0]["stream_time"]
        else:  # Spark begins a generation by a batch of nothing, where nothing has come
            come = self.come_to(others) if others or self.ledger.appended(self.name) is not None else None
            rows = rows or [r for stream in others for r in lake.newest_batch(self.settings, stream)]
        self.stream_time = self.ended_at = come
        states = (*(self.settings.state / other for other in others), self.state)
        told = [file for state in states if (file := state / "views.json").is_file()]
        if come and told:  # of another lake they say nothing
            written = told[-1].stat().st_mtime
            for path in told:
                with suppress(ValueError):  # a power cut may have emptied it
                    for view, at in json.loads(path.read_text()).items():
                        self.computed[view] = max(datetime.fromisoformat(at), self.computed.get(view, EARLIEST))
                with suppress(FileNotFoundError, ValueError):
                    for view, version in json.loads(path.with_name("versions.json").read_text()).items():
                        self.versions[view] = max(version, self.versions.get(view, 0))
            # A table that was made since is new, or the one before it was moved away. That of a new view may be of a night. One
            # that is older has lost a damaged entry, or is a copy that was put back.
            there = {v.name: self.tables[v.name].delta() for v in self.live_views()}
            made = {v for v, table in there.items() if (table.metadata().created_time or 0) / 1000 > written}
            older = {v for v, table in there.items() if v in self.versions and table.version() < self.versions[v]}
            self.look_back(dict.fromkeys(made | older | (there.keys() - self.computed.keys()), self.today()))
        self.metrics.committed(rows[0]["finished_at"] if rows else self.began)

    def come_to(self, taken: Mapping[str, int]) -> datetime | None:
        """The latest stream time of this stream, and of others up to the batches by which it took topics from them."""
        from pyspark.sql import functions as F

        stream, seq = F.col("stream"), F.col("seq")
        come = stream == self.name
        for other, last in taken.items():
            come = come | ((stream == other) & (seq <= last))
        found = lake.read(self.spark, self.ledger).where(come).agg(F.max("stream_time").alias("at"))
        return found.toArrow()["at"][0].as_py()

    def today(self, before: int = 0) -> datetime:
        """When the day of business began that stream time was in at the start, or one so many days before."""
        at = (self.ended_at or self.began).astimezone(self.settings.tz)
        return midnight(at.date() - timedelta(days=before), self.settings.tz)

    def look_back(self, lows: Mapping[str, datetime]) -> None:
        """Have live views computed again from a time on, by name, since their tables lack rows from there, or those of rollups
        that they read, through others too.

        No further back than yesterday: days before that come with their nights; of what is swept only today, since a sweep goes
        on within a day. What a view announces is not told of times before there was such a view.
        """
        lows = {name: max(low, self.today(1)) for name, low in lows.items()}
        for view in self.catalog.views.values():  # each after what it reads
            if found := [lows[source.name] for source in view.reads.values() if source.name in lows]:
                lows[view.name] = min(found) - duration(view.lookahead)
        again = {}
        for view in self.live_views():
            before, swept = self.computed.get(view.name, self.ended_at), view.shortcut and view.shortcut.coarse
            if view.name in lows and before and (view.name in self.computed or not view.announce):
                again[view.name] = min(before, max(lows[view.name], self.today()) if swept else lows[view.name])
        if again:
            self.remember_computed(again)

    # ---- what a rollup lacks

    def roll_what_lacks(self) -> None:
        """Roll from the log, for each rollup, the batches that the ledger has and the rollup's table has not.

        Those of streams that this one has taken topics from too: they do not come back to them.
        """
        entered, committed = self.ledger.appended(self.name), self.checkpoint.newest("commits")
        if entered is not None:  # a batch that will be planned again comes to the rollups with it
            entered = min(entered, self.generation.base + (-1 if committed is None else committed))
        read = {self.name: entered} | self.generation.taken
        for rollup, stream, done in ((r, s, d) for r in self.mine.rollups.values() for s, d in read.items()):
            have = self.tables[rollup.name].appended(stream) if rollup.name not in self.set_aside else done
            if done is None or (have is not None and have >= done):
                continue
            for step in self.steps(rollup, stream, -1 if have is None else have, done):
                if self.asked_to_end():
                    return
                self.beat("starting")
                log.info("rolling from the log", rollup=rollup.name, batches=[step.lo, step.hi], upto=done)
                try:
                    self.roll_step(rollup, step)
                except Exception as error:
                    if of_storage(error):
                        raise
                    self.aside(rollup, error)
                    break

    def steps(self, rollup: Rollup, stream: str, have: int, upto: int) -> list[lake.Batch]:
        """A stream's batches after `have`, until `upto`, that hold a rollup's topics, in runs of about `STEP` records, and none
        across a pin that parts files."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        reads = sorted({t.name for t in rollup.topics.values()})
        lacks = self.entered(stream).where((F.col("seq") > have) & (F.col("seq") <= upto) & F.col("topic").isin(reads))
        before = F.sum("n").over(Window.orderBy("seq").rowsBetween(Window.unboundedPreceding, -1))
        side = sum(((F.col("seq") > pin).cast("int") for pin in lake.parting(self.settings, stream)), F.lit(0))
        numbered = (
            lacks.groupBy("seq")
            .agg(F.sum("records").alias("n"))
            .select("seq", side.alias("side"), F.floor(F.coalesce(before, F.lit(0)) / STEP).alias("step"))
        )
        spans = (
            lacks.join(numbered, on="seq", how="inner")
            .groupBy("side", "step", "topic", "partition")
            .agg(
                F.min("seq").alias("lo"),
                F.max("seq").alias("hi"),
                F.min("from_offset").alias("from_offset"),
                F.max("until_offset").alias("until_offset"),
            )
        )
        found: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in spans.orderBy("side", "step").toArrow().to_pylist():
            found.setdefault((row["side"], row["step"]), []).append(row)
        return [
            lake.Batch(stream, min(r["lo"] for r in rows), max(r["hi"] for r in rows), fold.spans(rows))
            for rows in found.values()
        ]

    def roll_step(self, rollup: Rollup, batch: lake.Batch) -> None:
        events = {}
        for parameter, topic in rollup.topics.items():
            table = self.tables[topic.name]
            files = table.files_of(batch.lo, batch.hi, batch.stream)
            rows = fold.within_offsets(lake.read(self.spark, table, files=files), batch.offsets.get(topic.name, {}))
            events[parameter] = fold.accepted(topic, rows)
        table = self.tables[rollup.name]
        files = lake.write_spark(table, batch.folder, fold.roll(rollup, events))
        if low := self.lowest(rollup.name, files):
            self.look_back({rollup.name: low})
        lake.append(table, batch, files)

    # ---- the query and its batches

    def start_query(self) -> Any:
        start = self.generation.start
        if self.checkpoint.newest("offsets") is None:  # Spark wants to be told every partition, those added since too
            held = kafka.offsets(self.settings, list(self.mine.topics), "earliest")
            start = {t: {str(p): start.get(t, {}).get(str(p), 0) for p in parts} for t, parts in held.items()}
        options = {
            "subscribe": ",".join(sorted(self.mine.topics)),
            "startingOffsets": json.dumps(start),
            "maxOffsetsPerTrigger": str(self.settings.batch_records),
            "kafka.request.timeout.ms": "10000",
            "kafka.default.api.timeout.ms": "20000",
            "groupIdPrefix": f"tidemark-{self.name}-reader",
        }
        source = self.spark.readStream.format("kafka").options(**(kafka.spark_options(self.settings) | options)).load()
        return (
            source.writeStream.queryName(self.name)
            .foreachBatch(self.batch_and_what_it_announces)
            .option("checkpointLocation", str(self.checkpoint.path))
            .trigger(processingTime=self.settings.trigger)
            .start()
        )

    def offsets_of(self, number: int) -> dict[str, dict[str, list[int]]]:
        """`{topic: {partition: [from, until]}}` of what a batch brings: `from` is the `until` of the batch before, zero of a new
        partition: Spark takes it up there or not at all."""
        until = self.checkpoint.offsets(number)
        before = self.checkpoint.offsets(number - 1) if number > 0 else self.generation.start
        spans = {t: {p: [before.get(t, {}).get(p, 0), u] for p, u in parts.items()} for t, parts in until.items()}
        brought = {t: {p: s for p, s in parts.items() if s[1] > s[0]} for t, parts in spans.items()}
        return {t: parts for t, parts in brought.items() if parts}

    def batch_and_what_it_announces(self, records: DataFrame, number: int) -> None:
        """A micro-batch, and the views that announce: beside each other both would take twice as long, and an alarm waits for
        both."""
        with self.turn:
            self.batch(records, number)
            if self.announcing.views:
                self.attempt(self.announcing.whole, "announced")

    def attempt(self, work: Callable[[], object], name: str) -> bool:
        """Do a piece of work beside the batches; False where it fails, which is logged, and tried again."""
        try:
            work()
        except Exception as error:
            if not self.stopping.is_set():
                log.warning("will be tried again", work=name, because=" ".join(str(error).split())[:500])
                (self.settings.state / fold.REMEMBERED).unlink(missing_ok=True)
            return False
        return True

    def batch(self, records: DataFrame, number: int) -> None:
        """One micro-batch: judge, append to the logs, roll and append, write the ledger. In that order, each once."""
        started = datetime.now(UTC)
        offsets, seq = self.offsets_of(number), self.generation.base + number
        batch = lake.Batch(self.name, seq, seq, offsets)
        again, self.begun = self.begun in (-1, seq), seq
        lake.failpoint("offsets")
        small = {t for t, parts in offsets.items() if sum(u - f for f, u in parts.values()) <= SMALL}
        timings: dict[str, float] = {}
        events: dict[str, DataFrame] = {}
        held: list[DataFrame] = []
        counts: list[dict[str, Any]] = []
        active = [r for r in self.mine.rollups.values() if r.name not in self.set_aside]
        active = [r for r in active if any(t.name in offsets for t in r.topics.values())]
        rolled = {t.name for r in active for t in r.topics.values()}
        with ThreadPoolExecutor(2, initializer=self.in_pool, initargs=("stream",)) as writers:
            if len(offsets) > 1:
                # Else Kafka would be read once for each topic. In few parts, for each topic is a task in each of them.
                records = records.coalesce(self.spark.sparkContext.defaultParallelism).persist()
                held.append(records)
            judged = {}
            for name in offsets:
                topic = self.mine.topics[name]
                rows = self.logged(topic, batch) if again else None
                if rows is None:
                    rows = fold.judged(topic, records.where(records["topic"] == name) if len(self.mine.topics) > 1 else records)
                if name in rolled or name not in small:  # somebody else reads them too
                    rows = rows.persist()
                    held.append(rows)
                    events[name] = fold.accepted(topic, rows)
                judged[name] = rows
            few = {name: rows for name, rows in judged.items() if name in small}
            together = writers.submit(timed, timings, "records", fold.together, few, self.places)
            logs, rolling = {}, {}
            for name in judged.keys() - small:
                logs[name] = writers.submit(timed, timings, name, self.write_log, self.mine.topics[name], judged[name], batch)
            for one in active:
                slight = offsets.keys() & {t.name for t in one.topics.values()} <= small
                rolling[one.name] = writers.submit(timed, timings, one.name, self.write_rollup, one, events, batch, slight)
            brought = small_enough(together.result) or {}
            for name in few.keys() - brought.keys():
                logs[name] = writers.submit(timed, timings, name, self.write_log, self.mine.topics[name], few[name], batch)
            for name, whole in brought.items():
                logs[name] = writers.submit(timed, timings, name, self.write_small_log, self.mine.topics[name], whole, batch)
            read = {name: logs[name].result() for name in judged}
            # Nothing tells the records of a topic that was created again since the last batch but its id.
            self.admin = self.admin or kafka.connected(self.settings)
            held_now = kafka.topic_ids_held(self.settings, judged, self.admin)
            self.refuse_created_again(held_now, self.generation.topic_ids)
            # Killed behind the ledger: it was explained then, and of the log days may have expired since.
            entered = again and self.ledger.appended(self.name) == seq
            for name, (files, counted) in read.items():
                counts += counted if entered else self.explained(self.mine.topics[name], counted, offsets[name])
                lake.append(self.tables[name], batch, files)
                self.remember_low(name, seq, files)
                lake.failpoint("between")
            for name, written in rolling.items():
                try:
                    files = written.result()
                except Exception as error:
                    if of_storage(error) or of_broker(error):
                        raise
                    self.aside(self.mine.rollups[name], error)
                    continue
                lake.append(self.tables[name], batch, files)
                self.remember_low(name, seq, files)
        for rows in held:
            rows.unpersist()
        at = max((t for t in (self.stream_time, *(c.get("stream_time") for c in counts)) if t), default=None)
        self.write_ledger(batch, counts, started, self.generation.number, at)
        # At once, or a view is computed for the new time, and then again for the number that comes after it.
        self.stream_time, self.done = at, seq
        self.ended_at = self.ended_at or at
        self.report(batch, counts, started, timings)
        lake.failpoint("done")

    def logged(self, topic: Topic, batch: lake.Batch) -> DataFrame | None:
        """What the log has of a batch already, as `fold.judged` gives it; None where the batch is not there.

        It was killed behind the log. Kafka may have compacted it since, or a mended schema judge it otherwise: ledger and rollups
        would then be of something else than what the log has, for ever.
        """
        from pyspark.sql import functions as F

        table = self.tables[topic.name]
        there = table.appended(batch.stream)
        if there is None or there < batch.hi:
            return None
        rows = lake.read(self.spark, table, files=table.files_of(batch.lo, batch.hi, batch.stream))
        at = F.when(F.col("reject").isNull(), fold.event_time(topic)).alias("event_time")
        names = [c.name for c in topic.columns]
        return fold.within_offsets(rows, batch.offsets[topic.name]).select(*names, "kafka", "reject", at, "day")

    def lowest(self, name: str, files: Sequence[Any]) -> datetime | None:
        """The earliest time that files bring to a table; the beginning where they do not say, None without files."""
        lows = [json.loads(f.stats)["minValues"].get(self.tables[name].time) for f in files]
        # A time that is a DATE says no instant.
        return min((datetime.fromisoformat(at) for at in lows if at and "T" in at), default=EARLIEST if lows else None)

    def remember_low(self, name: str, seq: int, files: Sequence[Any]) -> None:
        if low := self.lowest(name, files):
            self.lows.setdefault(name, deque(maxlen=1000)).append((seq, low))

    def low_since(self, names: Iterable[str], seq: int, nothing: datetime = EARLIEST) -> datetime:
        """The earliest time that batches after `seq` brought to the named tables; the beginning where nobody knows, and `nothing`
        where they brought nothing."""
        found = []
        for name in names:
            lows = list(self.lows.get(name, ()))
            if not lows or lows[0][0] > seq + 1:
                return EARLIEST
            found += [low for s, low in lows if s > seq]
        return min(found, default=nothing)

    def came(self, names: Iterable[str], seq: int, before: datetime) -> bool:
        """Whether batches after `seq` brought the named tables anything earlier than an instant, or nobody knows."""
        return self.done > seq and self.low_since(names, seq, before) < before

    def in_pool(self, pool: str) -> None:
        self.spark.sparkContext.setLocalProperty("spark.scheduler.pool", pool)

    def write_small_log(self, topic: Topic, rows: pa.Table, batch: lake.Batch) -> tuple[list[Any], list[dict[str, Any]]]:
        """Write a small batch's log file from the driver and count it, as `by_partition` says."""
        table = self.tables[topic.name]
        return lake.write_arrow(table, batch.folder, rows.drop_columns(["event_time"])), counted(topic.name, rows)

    def write_log(self, topic: Topic, rows: DataFrame, batch: lake.Batch) -> tuple[list[Any], list[dict[str, Any]]]:
        """Write a batch's log files and count them, as `by_partition` says."""
        from pyspark.sql import functions as F

        files = lake.write_spark(self.tables[topic.name], batch.folder, rows.drop("event_time"))
        found = rows.groupBy("kafka.partition", "reject", fold.ended().alias("tombstone")).agg(
            F.count("*").alias("records"), F.max("event_time").alias("stream_time")
        )
        return files, by_partition(topic.name, found.toArrow().to_pylist())

    def write_rollup(self, rollup: Rollup, events: Mapping[str, DataFrame], batch: lake.Batch, small: bool) -> list[Any]:
        frames = {p: events[t.name] if t.name in events else fold.empty(self.spark, t) for p, t in rollup.topics.items()}
        rows, table = fold.roll(rollup, frames), self.tables[rollup.name]
        whole = small_enough(rows.toArrow) if small else None
        return lake.write_spark(table, batch.folder, rows) if whole is None else lake.write_arrow(table, batch.folder, whole)

    def explained(
        self, topic: Topic, counted: Sequence[Mapping[str, Any]], offsets: Mapping[str, Sequence[int]]
    ) -> list[dict[str, Any]]:
        """One row for each partition of the batch, with the offsets that hold no record and why. Raises `SpeedError` for a
        topic that may have no such gaps."""
        counts = {str(c["partition"]): c for c in counted}
        nothing = {"topic": topic.name, "records": 0, "rejects": 0, "tombstones": 0, "stream_time": None, "reasons": {}}
        found = []
        for partition, (start, until) in offsets.items():
            row = {**nothing, "partition": int(partition), **counts.get(partition, {})}
            gaps = until - start - row["records"]
            if gaps < 0 or (gaps and not topic.gaps):
                raise SpeedError(
                    f"topic {topic.name}, partition {partition}: offsets {start} to {until} hold {row['records']} records, "
                    f"not {until - start}. A compacted topic, or one whose producers use transactions, has such gaps and must "
                    f"say so: Topic(…, compacted=True) or Topic(…, transactional=True)"
                )
            found.append({**row, "gaps": gaps, "gap": topic.gaps if gaps else None})
        return found

    def remember_computed(self, upto: Mapping[str, datetime]) -> None:
        """Up to which stream time views are computed: after a start, however long the stream was away, they go on from there."""
        with self.remembering:
            self.computed |= upto
            lake.whole_or_nothing(self.state / "versions.json", json.dumps(self.versions))
            whole = {name: str(time) for name, time in self.computed.items()}
            lake.whole_or_nothing(self.state / "views.json", json.dumps(whole))

    def write_ledger(
        self,
        batch: lake.Batch,
        counts: Sequence[Mapping[str, Any]],
        started: datetime,
        generation: int,
        stream_time: datetime | None,
    ) -> None:
        import pyarrow as pa

        finished, schema = datetime.now(UTC), pa.schema(self.ledger.delta().schema())
        rows = [
            {
                **c,
                "stream": self.name,
                "generation": generation,
                "seq": batch.hi,
                "from_offset": batch.offsets[c["topic"]][str(c["partition"])][0],
                "until_offset": batch.offsets[c["topic"]][str(c["partition"])][1],
                "stream_time": stream_time,
                "started_at": started,
                "finished_at": finished,
                "day": started.date(),
            }
            for c in counts
        ]
        lake.append(self.ledger, batch, lake.write_arrow(self.ledger, batch.folder, pa.Table.from_pylist(rows, schema)))

    def report(
        self, batch: lake.Batch, counts: Sequence[Mapping[str, Any]], started: datetime, timings: Mapping[str, float]
    ) -> None:
        finished = datetime.now(UTC)
        seconds, records = (finished - started).total_seconds(), sum(c["records"] for c in counts)
        before = self.progress.get("finished_at")
        span = (finished - datetime.fromisoformat(before)).total_seconds() if before else seconds
        self.upto = self.upto | {(t, int(p)): u for t, parts in batch.offsets.items() for p, (_, u) in parts.items()}
        lag = self.lag()
        unread = sum(lag.values())
        self.keeping_up = self.keeping_up + 1 if unread <= records else 0
        self.caught_up = self.caught_up or not unread or self.keeping_up == 3
        self.progress = {
            "stream": self.name,
            "generation": self.generation.number,
            "seq": batch.hi,
            "records": records,
            "rejects": sum(c["rejects"] for c in counts),
            "records_per_second": round(records / max(span, 0.001), 1),
            "seconds": round(seconds, 3),
            "lag": unread,
            "stream_time": self.stream_time.isoformat() if self.stream_time else None,
            "started_at": started.isoformat(),
            "finished_at": finished.isoformat(),
            "slowest": max(timings, key=lambda n: timings[n], default=None),
            "timings": {n: round(s, 3) for n, s in timings.items()},
            "set_aside": self.set_aside,
        }
        lake.whole_or_nothing(self.state / "progress.json", json.dumps(self.progress))
        self.metrics.batch(self.progress, counts, lag)
        log.info("batch", **{k: self.progress[k] for k in ("seq", "records", "rejects", "seconds", "lag")})

    def lag(self) -> dict[tuple[str, int], int]:
        """By topic and partition, the records that Kafka holds and no batch has read."""
        ends = kafka.offsets(self.settings, list(self.mine.topics), "latest")
        return {(t, p): max(0, end - self.upto.get((t, p), 0)) for t, parts in ends.items() for p, end in parts.items()}

    # ---- beside the batches

    def own(self, views: Iterable[View]) -> list[View]:
        """Those of which this stream reads the first topic, by name."""
        return [v for v in views if min(needed(self.catalog, [v.name]) & self.catalog.topics.keys()) in self.mine.topics]

    def live_views(self) -> list[View]:
        """The live views that this stream refreshes. Its stream time is theirs: what another stream reads later than `back`
        behind it they have with their night."""
        return self.own(v for v in self.catalog.views.values() if v.refresh and v.name in self.tables)

    def others(self, view: View) -> list[lake.Table]:
        """The tables that a view looks at and another stream writes."""
        looked_at = needed(self.catalog, [view.name]) - {*self.mine.names}
        theirs = {v.name for v in self.catalog.views.values() if v.refresh} - {v.name for v in self.live_views()}
        names = [n for n in self.catalog.names if n in looked_at and n in self.tables]
        return [self.tables[n] for n in names if n not in self.catalog.views or n in theirs]

    def shortcuts(self) -> Callable[[], None]:
        return Refresher(self, [v for v in self.live_views() if v.shortcut], "marks").newest

    def announced(self) -> Callable[[], None]:
        """What is due of the views that announce when no batch comes: most of it is done by the batch that brings their rows."""

        def work() -> None:
            with self.turn:
                self.announcing.whole()

        return work

    def refreshes(self) -> Callable[[], None]:
        return Refresher(self, [v for v in self.live_views() if not v.announce], "views").whole

    def compactions(self) -> Callable[[], None]:
        due = Due(self.settings.compact_every)

        def work() -> None:
            pin = self.checkpoint.pin()
            if not self.caught_up or not due() or not pin:
                return
            declarations: tuple[Declared, ...] = (*self.mine.topics.values(), *self.mine.rollups.values())
            upto = {name: pin.seq for name, pin in lake.pins(self.settings, self.catalog.streams).items()}
            for declared in declarations:
                if declared.name in self.tables:
                    merge = partial(lake.compact, self.spark, self.settings, self.tables[declared.name], merging(declared), upto)
                    self.attempt(merge, f"compaction of {declared.name}")
            lake.compact(self.spark, self.settings, self.ledger, None, {self.name: pin.seq})

        return work

    def tellings(self) -> Callable[[], None]:
        due, look = Due("1 second"), Due("5 seconds")

        def work() -> None:
            if self.away or not due():
                return
            self.metrics.tell(self.upto)
            if self.metrics.port and look():
                self.metrics.look(list(self.mine.topics), self.upto)

        return work


def merging(declared: Declared) -> Callable[[DataFrame], DataFrame] | None:
    """How a table's rows merge when its files do: a rollup's by its law, a log's not at all."""
    return (lambda rows: fold.merge(declared, rows)) if isinstance(declared, Rollup) else None


def small_enough(bring: Callable[[], Rows]) -> Rows | None:
    """What comes to the driver; None where it is more bytes than that takes, for few records may be large ones."""
    try:
        return bring()
    except Exception as error:
        if "spark.driver.maxResultSize" not in str(error):
            raise
        log.info("more bytes than the driver takes at once")
        return None


def timed(timings: dict[str, float], name: str, work: Callable[..., Any], *args: Any) -> Any:
    began = time.monotonic()
    try:
        return work(*args)
    finally:
        timings[name] = time.monotonic() - began


def counted(topic: str, rows: pa.Table) -> list[dict[str, Any]]:
    """What a batch's rows come to, as `by_partition` says."""
    import pyarrow as pa
    import pyarrow.compute as pc

    flat = pa.table(
        {
            "partition": pc.struct_field(rows["kafka"].combine_chunks(), "partition"),
            "reject": (reject := rows["reject"].combine_chunks()),
            "stream_time": rows["event_time"].combine_chunks(),
            "tombstone": pc.and_(pc.is_null(reject), pc.is_null(pc.struct_field(rows["kafka"].combine_chunks(), "value"))),
        }
    )
    found = flat.group_by(["partition", "reject", "tombstone"]).aggregate([([], "count_all"), ("stream_time", "max")])
    return by_partition(topic, found.rename_columns({"count_all": "records", "stream_time_max": "stream_time"}).to_pylist())


def by_partition(topic: str, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`{topic, partition, records, rejects, tombstones, reasons, stream_time}` by partition, from groups of a partition, a
    reason, and whether they are tombstones.

    `reasons` counts the rejects by why, without the column: `wanted BIGINT, found STRING`.
    """
    found: dict[int, dict[str, Any]] = {}
    for group in groups:
        empty = {"topic": topic, "records": 0, "rejects": 0, "tombstones": 0, "reasons": {}, "stream_time": None}
        one = found.setdefault(group["partition"], {"partition": group["partition"], **empty})
        one["records"] += group["records"]
        one["tombstones"] += group["records"] if group["tombstone"] else 0
        one["stream_time"] = max((t for t in (one["stream_time"], group["stream_time"]) if t), default=None)
        if group["reject"] is not None:
            reason = group["reject"].rpartition(": ")[2]
            one["rejects"] += group["records"]
            one["reasons"][reason] = one["reasons"].get(reason, 0) + group["records"]
    return list(found.values())


def of_storage(error: BaseException) -> bool:
    """Whether an error is of disks, networks or Spark's end, not of a rollup's function: the first must stop the stream."""
    if isinstance(error, OSError | lake.LakeError | Py4JNetworkError) or session.exit_code(error) is not None:
        return True
    return any(
        mark in str(error)
        for mark in ("java.io.IOException", "No space left on device", "FileNotFoundException", "CommitFailed", "was shut down")
    )


LOST = ("KafkaDataLoss", "KAFKA_DATA_LOSS", "ome data may have been lost")


def raised(text: str) -> str:
    """What was raised at last in Python, of Spark's words about a batch that failed; their first line where nothing was."""
    found = re.findall(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+(\S.*)", text, re.MULTILINE)
    return found[-1] if found else text.splitlines()[0]


def of_broker(error: BaseException) -> bool:
    """Whether a query ended because Kafka did not answer, and for no other reason."""
    text = str(error)
    if "tidemark.kafka.BrokerAway" in text or "Cannot fetch record for offset" in text:
        return True
    return "org.apache.kafka.common.errors" in text and any(
        m in text for m in ("TimeoutException", "DisconnectException", "NetworkException")
    )


def drain(query: Any, seconds: float = 120) -> None:
    """Stop a query between two batches: stopping inside one leaves a stack trace, though the data is safe."""
    until = time.monotonic() + seconds
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until:
        time.sleep(0.002)
    query.stop()


# ------------------------------------------------------------------------------------------- the work beside the batches


class Background:
    """A thread that does a piece of work over and over until the stream stops. A failure is logged and tried again."""

    def __init__(self, stream: Stream, prepare: Callable[[], Callable[[], None]]) -> None:
        from pyspark.util import InheritableThread

        self.stream = stream
        self.thread = InheritableThread(target=self.loop, args=(prepare,), daemon=True)
        self.thread.start()

    def loop(self, prepare: Callable[[], Callable[[], None]]) -> None:
        self.stream.in_pool("marks" if prepare.__name__ in ("shortcuts", "announced") else "views")
        work = prepare()
        while not self.stream.stopping.wait(0.1):
            if not self.stream.attempt(work, prepare.__name__):
                self.stream.stopping.wait(5)


class Due:
    """True once in every `every`, and at once the first time. `now` is of the monotonic clock: who asks several asks all of one
    instant, or one of them is due a moment before the other, and they never go together again."""

    def __init__(self, every: str) -> None:
        self.seconds, self.next = duration(every).total_seconds(), 0.0

    def rest(self, seconds: float, now: float | None = None) -> None:
        """Not due again before so long from now."""
        self.next = (now or time.monotonic()) + seconds

    def __call__(self, now: float | None = None) -> bool:
        now = now or time.monotonic()
        if now < self.next:
            return False
        self.next = now + self.seconds
        return True


class Refresher:
    """Computes the newest rows of live views again from the tables, and swaps them in; a settled day is never touched.

    Three of them run: one for the short ways, every few seconds, one for the full ways, and one for the full ways of views that
    announce, after each batch. `covered` says up to where the full way has last written, so that no two write one mark twice.
    """

    def __init__(self, stream: Stream, views: Sequence[View], pool: str, rest: int = REST) -> None:
        self.stream, self.views, self.pool, self.rest = stream, views, pool, rest
        self.spark = stream.spark if pool == "marks" else session.beside(stream.spark)
        self.due = {
            v.name: Due((v.shortcut.live if v.shortcut and pool == "marks" else v.refresh).every) for v in views if v.refresh
        }
        self.seen: dict[str, datetime] = {}
        # The stream time at which something last was there for a view.
        self.touched: dict[str, datetime] = {}
        # From which time on a view's new keys are announced.
        self.told: dict[str, datetime] = {}
        # Up to which batch each view is computed: all of them know, for one view may read another.
        self.upto, self.live = stream.refreshed, {v.name for v in stream.live_views()}
        # The tables of other streams that a view looks at, and at which version it has seen them.
        self.others = {v.name: stream.others(v) for v in views}
        self.versions: dict[str, list[int]] = {}
        # Up to when each view knows what was published: a replay may have given today other rollups since. All know it, as above.
        self.known = stream.known
        # One round after the other: a view comes after those that it reads, as in the catalog.
        depths: dict[str, int] = {}
        for view in views:
            depths[view.name] = 1 + max(depths.get(s.name, 0) for s in view.reads.values())
        self.rounds = [[v for v in views if depths[v.name] == depth] for depth in sorted({*depths.values()})]
        # Whoever waits for an announcement waits for plans as long as for jobs: half of the views go beside the others.
        self.lanes = 2 if pool == "announced" and len(views) > 1 else 1
        self.workers = ThreadPoolExecutor(1, initializer=stream.in_pool, initargs=("stream",))
        self.zone, self.places = stream.settings.tz, [dict[str, "Column"]() for _ in range(self.lanes)]
        self.bases: dict[tuple[str, tuple[str, ...], bool, tuple[str, ...]], Base] = {}
        self.blocks: dict[tuple[str, tuple[str, ...]], list[Block]] = {}
        # Up to where each view's marks were computed again.
        self.swept: dict[str, datetime] = {}
        # Up to when each view's marks are written, and up to which batch the newest holds all that came.
        self.holds: dict[str, tuple[datetime, int]] = {}
        self.waiting: float | None = None
        # Until when a view that has failed rests.
        self.failed: dict[str, float] = {}
        # Minutes of marks, by view, that were missed while the stream was away or caught up.
        self.missed: list[tuple[datetime, datetime, str]] = []
        # What was to be announced and neither Kafka nor a file took: it goes with what is announced next.
        self.unsaid: list[notify.Message] = []

    def waits(self) -> bool:
        """Whether the stream catches up, and its views wait: what they would show is old at once, and costs it its cores.

        After a start, until three batches in a row have left no more unread than they read, or one has left nothing.
        """
        if self.stream.caught_up and self.stream.progress.get("lag", 0) <= self.stream.settings.batch_records:
            self.waiting = None
            return False
        now = time.monotonic()
        self.waiting = self.waiting or now
        if now - self.waiting < PATIENCE:
            return True
        self.waiting = now
        return False

    def newest(self) -> None:
        """The short way: marks that are new since the last time, and the last one again, which was still being filled, or for
        which something came late before the stream fell silent.

        After a pause the newest minute comes first, and what was missed before it a minute at a time, when nothing else is
        due. What is merged beforehand serves every view of a minute's marks.
        """
        at = self.stream.stream_time
        if at is None or self.waits():
            return
        began, frames, spans, holds, seq = time.monotonic(), {}, {}, {}, self.stream.done
        fit = [v for v in self.views if self.failed.get(v.name, began) <= began]
        due = [(v, v.shortcut, *span) for v in fit if v.shortcut and (span := self.lacking(v, v.shortcut, at))]
        for view, shortcut, since, until in due:
            low = max(since, until - BASE) if shortcut.coarse else since
            try:
                frames[view.name] = self.short(view, shortcut, low, until)
            except Exception as error:
                if len(due) == 1:
                    raise
                self.put_off(view.name, error)
                continue
            spans[view.name], holds[view.name] = (since, low, until), (until, self.held(view, shortcut, seq))
        for name, rows in self.brought(frames).items():
            view, (since, low, until) = self.stream.catalog.views[name], spans[name]
            assert view.shortcut
            self.swap(view, rows, low, until, duration(view.shortcut.step))
            self.missed += [(start, end, name) for start, end in pieces(since, low, BASE)]
            self.seen[name], self.holds[name] = at, holds[name]
            self.due[name].rest(2 * duration(view.shortcut.step).total_seconds())
            log.info("marks", view=name, since=str(low), until=str(until), seconds=round(time.monotonic() - began, 3))
        if not due and not self.prepared() and self.missed:
            start, end, name = max(self.missed)
            self.missed.remove((start, end, name))
            view = self.stream.catalog.views[name]
            assert view.shortcut
            rows = self.short(view, view.shortcut, start, end, aside=True).toArrow()
            self.swap(view, rows, start, end, duration(view.shortcut.step))

    def brought(self, frames: Mapping[str, DataFrame]) -> dict[str, pa.Table]:
        """Rows of views in one job: each would wait for the one before it. Where that fails, of those that do not."""
        try:
            return fold.together(frames, self.places[0])
        except Exception:
            if len(frames) == 1 or self.stream.stopping.is_set():
                raise
        found: dict[str, pa.Table] = {}
        for name, frame in frames.items():
            try:
                found |= fold.together({name: frame}, self.places[0])
            except Exception as error:
                self.put_off(name, error)
        return found

    def prepared(self) -> bool:
        """Merge what the next marks need merged, before they are due; False where it was there already."""
        before = dict(self.bases)
        for view in self.views:
            if view.shortcut and view.shortcut.coarse and view.name in self.seen:
                step = duration(view.shortcut.step)
                mark, lookback = floor(self.seen[view.name], step) + step, duration(view.lookback)
                for source in view.shortcut.reads.values():
                    if isinstance(source, Rollup):
                        self.base(source, view.shortcut, mark, mark, lookback, False, fold.beyond(view, source))
        return self.bases != before

    def lacking(self, view: View, shortcut: Shortcut, at: datetime) -> tuple[datetime, datetime] | None:
        """The marks, from and until, that the short way has to write now; None where there are none."""
        covered, last, step = self.stream.covered.get(view.name), self.seen.get(view.name), duration(shortcut.step)
        if covered is None and not shortcut.coarse:
            return None
        names, end = [s.name for s in shortcut.reads.values()], floor(at, step) + step
        until, seq = self.holds.get(view.name, (EARLIEST, -1))
        if last == at and until > end and not self.stream.came(names, seq, end):
            return None
        # Once a pane is enough: its first batch brings the mark before it to its end. The mark that is being filled is
        # written only for a stream that falls silent in the middle of a pane, two steps later, and then once more.
        silent = last is not None and floor(last, step) == floor(at, step)
        if silent and not self.due[view.name]():
            return None
        # The first time it goes on where the full way ended, which took its time.
        back = floor(at, step) - duration(shortcut.live.back)
        since = floor(last, step) + step if last else covered or EARLIEST
        if since < back:
            self.stream.skipped.add(view.name)
        since = max(since, back)
        return since, end + step if silent or not last else end

    def held(self, view: View, shortcut: Shortcut, seq: int) -> int:
        """Up to which batch newest marks hold all that came, where what was read for them now held `seq`: what they were merged
        from beforehand may lack what came late for it."""
        for source in shortcut.reads.values():
            if isinstance(source, Rollup):
                base = self.bases.get((source.name, shortcut.counted, False, fold.beyond(view, source)))
                if base and self.stream.came([source.name], base.seq, base.end):
                    seq = min(seq, base.seq)
        return seq

    def short(self, view: View, shortcut: Shortcut, since: datetime, until: datetime, aside: bool = False) -> DataFrame:
        """A view's rows of `[since, until)` by its short way, from rows merged before where it takes them so; `aside` keeps
        those apart from the rows that the newest marks go on from."""
        rows = self.marks(view, shortcut, since, until, aside) if shortcut.coarse else None
        return self.answers(view, shortcut, since, until) if rows is None else rows

    def sweep(self, view: View, shortcut: Shortcut, refresh: Live, at: datetime, seq: int) -> None:
        """Compute each mark again, once, by the full way, when it is at least `back` old: late events have come by then.

        Nine minutes at a time; at once where the short way has skipped marks, after a stream was away or has caught up,
        and then some hours at a time.
        """
        step = duration(shortcut.step)
        end = floor(at, step) - duration(refresh.back)
        since = self.swept.get(view.name) or self.swept_before(view, end, step)
        if end - since > FAR:
            since = self.filled_from(view, shortcut, since, end)
        if since < end and (end - since >= SWEPT or view.name in self.stream.skipped):
            # A whole hour's file is replaced as one: rows that were swept before stand behind a cut within it.
            began, until = time.monotonic(), min(end, floor(since + FAR, HOUR))
            for low, high, rows in self.in_pieces(view, since, until, {}):
                self.swap(view, rows, low, high, None)
            took, since = time.monotonic() - began, until
            self.due[view.name].rest(took)
            log.info("swept", view=view.name, until=str(until), seconds=round(took, 3))
        if since >= end:
            self.stream.skipped.discard(view.name)
        self.swept[view.name] = since
        if self.stream.computed.get(view.name) != since:
            self.stream.remember_computed({view.name: since})
        self.seen[view.name], self.upto[view.name] = at, seq

    def swept_before(self, view: View, end: datetime, step: timedelta) -> datetime:
        """Where the sweep goes on after a start: where it ended, or behind what it has written; if that was a day ago, at
        midnight, since the night brings what is older. Of a view that is new, at the hour. Hours that hold nothing leave no file
        to tell that they were swept."""
        if (since := self.stream.computed.get(view.name)) is None:
            files = self.stream.tables[view.name].files()
            highs = [lake.comparable(f.high, end) for f in files if f.span and f.span["mark"] == "all" and f.high is not None]
            since = max(highs) + step if highs else floor(end, HOUR)
        if end - since >= timedelta(days=1):
            since = max(since, midnight(end.astimezone(self.zone).date(), self.zone))
        return since

    def filled_from(self, view: View, shortcut: Shortcut, since: datetime, end: datetime) -> datetime:
        """From where on up to `end` there is anything to sweep, or was: between old data and what comes now may lie years."""
        sources = (s for s in shortcut.reads.values() if isinstance(s, Rollup))
        files = [f for s in sources for f in self.stream.tables[s.name].files() if f.meets(since - duration(view.lookback), None)]
        files += [f for f in self.stream.tables[view.name].files() if f.span and f.meets(since, None)]
        first = min((lake.comparable(f.low, since) for f in files), default=end)
        return max(since, min(floor(first, duration(shortcut.step)), end))

    def whole(self) -> None:
        """The full way: whole hours (or days) from `stream time - back - lookahead` on, what was missed while away included."""
        if self.waits():  # asked once: it lets one look pass in five minutes, which is all rounds' turn
            return
        failed: Exception | None = None
        for views in self.rounds:
            now, spans = time.monotonic(), dict[str, Span]()
            for view in views:
                try:
                    if span := self.span(view, now):
                        spans[view.name] = span
                except Exception as error:
                    self.put_off(view.name, error)
            try:
                if spans:
                    self.together(spans)
            except Exception as error:
                if self.stream.stopping.is_set():
                    raise
                failed = error
        if failed:
            raise failed

    def put_off(self, name: str, error: Exception) -> None:
        """A view that fails rests, and must not silence the others."""
        if self.stream.stopping.is_set():
            raise error
        self.due[name].rest(60)
        self.failed[name] = time.monotonic() + 60
        log.warning("will be tried again", view=name, because=" ".join(str(error).split())[:500])

    def together(self, spans: Mapping[str, Span]) -> None:
        """Refresh views at once: a job costs more than most views do, and each would wait for the one before it."""
        try:
            self.refresh(spans)
        except Exception:
            if len(spans) == 1 or self.stream.stopping.is_set():
                raise
            for name, span in spans.items():
                try:
                    self.refresh({name: span})
                except Exception as error:
                    self.put_off(name, error)

    def span(self, view: View, now: float | None = None) -> Span | None:
        """What of a view is to be computed by the full way now; None where nothing is. Marks are swept here."""
        # In this order, as a batch tells them: no batch counts as looked at whose time is not reached.
        seq, at = self.stream.done, self.stream.stream_time
        # A batch of late events alone moves no time, and corrects rows all the same.
        same = self.seen.get(view.name) == at and self.upto.get(view.name) == seq
        same &= view.name not in self.stream.skipped
        others = [table.delta().version() for table in self.others[view.name]]
        same &= others == self.versions.get(view.name, [])
        looking, reopened = looked(), self.reopened(view)
        if at is None or view.refresh is None or (same and not reopened) or not self.due[view.name](now):
            return None
        if view.shortcut and view.shortcut.coarse:
            if reopened:
                self.swept[view.name], self.known[view.name] = midnight(reopened, self.zone), looking
                self.stream.skipped.add(view.name)  # until it is swept whole: no batch may come, and a sweep may fail
            self.sweep(view, view.shortcut, view.refresh, at, seq)
            return None
        if not (reopened or view.shortcut) and self.untouched(view, at):
            self.seen[view.name], self.upto[view.name] = at, seq
            self.stream.remember_computed({view.name: at})
            log.info("nothing new", view=view.name, until=str(at))
            return None
        dates = view.time == "day"
        step = duration(view.shortcut.step) if view.shortcut else timedelta(0)
        # The mark that is being filled is left to the short way, which has written it whole by the time that this is computed.
        until = floor(at, step) + step if step else at + timedelta(microseconds=1)
        last = self.seen.get(view.name)
        before = last or self.stream.computed.get(view.name) or self.stream.ended_at or at
        # What a view reads may be a live view that is behind it: then it is computed again once that one has caught up, and
        # from where that one was. What has a short way is only ever behind with what is swept.
        behind = [s for s in view.reads.values() if s.name in self.live]
        seq = min([seq, *(self.upto.get(s.name, -1) for s in behind)])
        looking = min([looking, *(self.known.get(s.name, self.known[view.name]) for s in behind)])
        whole = [self.stream.computed.get(s.name, before) for s in behind if not getattr(s, "shortcut", None)]
        at = min([at, *whole])
        ahead = looks_ahead(view)
        back = min(at, before) - duration(view.refresh.back) - ahead
        if last:
            # Only what came since can have changed a row: most refreshes need not reach back all the way.
            low = self.stream.low_since((s.name for s in view.reads.values()), self.upto[view.name])
            back = max(back, min(low - ahead, last)) if low > EARLIEST else back
        # Of a view with a short way a part of an hour is enough: the rest is taken over from what is written.
        part = HOUR if view.shortcut or dates else duration(view.refresh.step)

        def begin(back: datetime, grid: timedelta) -> datetime:
            return midnight(back.astimezone(self.zone).date(), self.zone) if dates else floor(back, grid)

        # Of what is computed besides, since a run gave the day other rollups, or since there was no such view, nobody is told.
        new = not last and view.name not in self.stream.computed
        told = begin(at - duration(view.refresh.back) - ahead if new else back, step or part)
        if reopened:
            back = min(back, midnight(reopened, self.zone))
        # The first time from a whole hour on: the files there may be of another step, as the code before this one had it.
        since = begin(back, step or (part if last and not reopened else HOUR))
        return Span(since, until, part, at, seq, looking, others, told)

    def refresh(self, spans: Mapping[str, Span]) -> None:
        """Compute views by the full way, in one job a lane, and swap them in."""
        began, views = time.monotonic(), self.stream.catalog.views
        lanes = [[v.name for v in self.views[lane :: self.lanes] if v.name in spans] for lane in range(self.lanes)]

        def computed(names: Sequence[str], places: dict[str, Column]) -> dict[str, Iterable[Piece]]:
            if len(spans) == 1:
                return {n: self.in_pieces(views[n], spans[n].since, spans[n].until, places) for n in names}
            frames = {n: self.answers(views[n], views[n], spans[n].since, spans[n].until) for n in names}
            return {n: [(spans[n].since, spans[n].until, rows)] for n, rows in fold.together(frames, places).items()}

        beside = [self.workers.submit(computed, *lane) for lane in zip(lanes[1:], self.places[1:], strict=True)]
        found = computed(lanes[0], self.places[0])
        for lane in beside:
            found |= lane.result()
        first = spans.keys() - self.seen.keys()
        for name, pieces in found.items():
            span = spans[name]
            self.told[name] = span.told
            for since, until, rows in pieces:
                self.swap(views[name], rows, since, until, span.part if span.part < HOUR else None)
            self.seen[name], self.upto[name], self.known[name], self.versions[name] = span.at, span.seq, span.looking, span.others
            self.stream.remember_computed({name: span.at})
            took = time.monotonic() - began
            log.info("refreshed", view=name, since=str(span.since), until=str(span.come), seconds=round(took, 3))
        took = (now := time.monotonic()) - began
        for name in found:
            rest = 0 if name in first else self.rest  # the first time measures a cold JVM, not the view
            self.due[name].rest(max(rest * took, self.due[name].seconds - took), now)

    def in_pieces(self, view: View, since: datetime, until: datetime, places: dict[str, Column]) -> Iterator[Piece]:
        """A view's rows of `[since, until)` by the full way, oldest first: at once, or, where that is more than the driver takes,
        in halves, of whole hours or days. Raises `SpeedError` where one of those is too much."""
        frames = {view.name: self.answers(view, view, since, until)}
        rows = small_enough(lambda: fold.together(frames, places)[view.name])
        if rows is not None:
            yield since, until, rows
            return
        days, middle = view.time == "day", since + (until - since) / 2
        middle = midnight(middle.astimezone(self.zone).date(), self.zone) if days else floor(middle, HOUR)
        if middle <= since:
            middle = (
                midnight(since.astimezone(self.zone).date() + timedelta(days=1), self.zone) if days else floor(since, HOUR) + HOUR
            )
        if middle >= until:
            raise SpeedError(
                f"{view.name} has from {since} on more rows than the driver takes of {'a day' if days else 'an hour'}"
            )
        yield from self.in_pieces(view, since, middle, places)
        yield from self.in_pieces(view, middle, until, places)

    def untouched(self, view: View, at: datetime) -> bool:
        """Whether nothing that a view looks at, however far, has come since it was last computed, nor has a day begun.

        Where a view looks back, its rows may come after their events, until the last of these is `lookback` old.
        """
        upto, seen = self.upto.get(view.name), self.seen.get(view.name)
        topics = needed(self.stream.catalog, [view.name]) & self.stream.catalog.topics.keys()
        if (
            upto is None
            or seen is None
            or seen.astimezone(self.zone).date() != at.astimezone(self.zone).date()
            or not topics <= self.stream.mine.topics.keys()
            or any(seq > upto for topic in topics for seq, _ in list(self.stream.lows.get(topic, ())))
        ):
            self.touched[view.name] = at
            return False
        return view.time == "day" or seen >= self.touched.get(view.name, seen) + duration(view.lookback)

    def reopened(self, view: View) -> date | None:
        """The earliest live day for which a run has changed the rollups since the view was last computed the full way."""
        folder = self.stream.settings.lake_path / "runs"
        since = self.known.setdefault(view.name, datetime.now(UTC) - timedelta(days=1))
        if not folder.exists() or folder.stat().st_mtime <= since.timestamp():
            return None
        looking = looked()
        back = duration(view.refresh.back) if view.refresh else timedelta(0)
        found = lake.reopened(self.stream.settings, since, back)
        if not found:
            self.known[view.name] = looking
        return found

    def answers(self, view: View, way: View | Shortcut, since: datetime, until: datetime) -> DataFrame:
        """A view's rows of `[since, until)`, from the tables as they are, by the given way."""
        return fold.answers(self.spark, view, way, self.read_table, since, until, settled=False)

    def marks(self, view: View, shortcut: Shortcut, since: datetime, until: datetime, aside: bool) -> DataFrame | None:
        """A view's newest marks from rows most of which are merged already: once a minute, instead of at every mark.

        None where the period is too long for it. A row that comes late for what is merged is seen with the next, a minute later.
        """
        lookback, step = duration(view.lookback), duration(shortcut.step)
        inputs = {}
        for parameter, source in shortcut.reads.items():
            if not isinstance(source, Rollup) or until - since > lookback / 2:
                return None
            base = self.base(source, shortcut, since, until - step, lookback, aside, fold.beyond(view, source))
            newest = self.parts(source, shortcut, base.end, until)
            inputs[parameter] = fold.union([base.rows.select(*newest.columns), newest])
        return fold.answer(view, shortcut.function, inputs, fold.period(self.spark, since, until), settled=False)

    def parts(self, rollup: Rollup, shortcut: Shortcut, low: datetime, high: datetime) -> DataFrame:
        """A rollup's rows of `[low, high)`, in parts, its counted sets as counts."""
        there = self.read_table(rollup, low, high)
        return fold.in_parts(rollup, fold.within(there, rollup.time, fold.period(self.spark, low, high)), shortcut.counted)

    def base(
        self,
        rollup: Rollup,
        shortcut: Shortcut,
        first: datetime,
        last: datetime,
        lookback: timedelta,
        aside: bool,
        without: tuple[str, ...],
    ) -> Base:
        """What is merged beforehand for marks from `first` to `last`; over columns too, from what is merged for each of them."""
        kept = (rollup.name, shortcut.counted, aside)
        before = self.bases.get((*kept, without))
        if before and before.serves(first, last, lookback) and not self.outdated(rollup, before):
            return before
        low, start, end = first - lookback, last - lookback + BASE, first - SETTLE_DOWN
        apart, seq = self.bases.get((*kept, ())) if without else None, self.stream.done
        if apart and apart.serves(first, last, lookback) and not self.outdated(rollup, apart):
            (low, start, end), seq, rows = (apart.low, apart.start, apart.end), apart.seq, apart.rows
        elif aside:
            rows = self.parts(rollup, shortcut, low, end)
        else:
            rows = self.from_blocks(rollup, shortcut, low, start, end)
        merged = fold.coarser(rollup, rows, fold.period(self.spark, start, end), without, shortcut.counted).persist()
        merged.count()
        if before:
            before.rows.unpersist()
        self.bases[*kept, without] = found = Base(low, start, end, seq, time.monotonic(), merged)
        return found

    def outdated(self, rollup: Rollup, base: Base) -> bool:
        """Whether something came late for what was merged a minute ago or longer: no next one is due while a stream is silent."""
        old = time.monotonic() - base.made > BASE.total_seconds()
        return old and self.stream.came([rollup.name], base.seq, base.end)

    def from_blocks(self, rollup: Rollup, shortcut: Shortcut, low: datetime, start: datetime, end: datetime) -> DataFrame:
        """A rollup's rows of `[low, end)`, in parts; whole five minutes of `[start, end)` as one for each rest of the key.

        What was merged so is kept until an event comes late for it, or a run has changed the rollups: each minute six or seven of
        the hour's are read, and not all sixty. What anybody else did to a rollup is seen half an hour later at the latest.
        """
        since, until = floor(start + BLOCK - timedelta(microseconds=1), BLOCK), floor(end, BLOCK)
        if since >= until:
            return self.parts(rollup, shortcut, low, end)
        at, kept, parts = since, [], [self.parts(rollup, shortcut, low, since)]
        held = self.blocks.setdefault((rollup.name, shortcut.counted), [])
        looking = looked()
        changed = lake.reopened(self.stream.settings, min((b.looking for b in held), default=looking))
        for block in held if not changed else ():
            late = floor(self.stream.low_since([rollup.name], block.seq, block.until), BLOCK)
            whole = min(block.until, late, until)
            if block.since <= at < whole and looking - block.looking < BLOCK_LIVES:
                rows = block.rows
                if (at, whole) != (block.since, block.until):
                    rows = fold.within(rows, rollup.time, fold.period(self.spark, at, whole))
                parts.append(rows)
                kept.append(block)
                at = whole
        if at < until:
            seq = self.stream.done
            rows = self.parts(rollup, shortcut, at, until)
            coarse = rows.withColumn(rollup.time, functions.pane(rollup.time, f"{int(BLOCK.total_seconds())} seconds"))
            rows = fold.merge(rollup, coarse, many=True, counted=shortcut.counted).persist()
            rows.count()
            kept.append(Block(at, until, seq, looking, rows))
            parts.append(rows)
        for block in held:
            if block not in kept:
                block.rows.unpersist()
        held[:] = kept
        return fold.union([*parts, self.parts(rollup, shortcut, until, end)])

    def read_table(self, declared: Declared, low: datetime | None, high: datetime) -> DataFrame:
        there = lake.read(self.spark, self.stream.tables[declared.name], low=low, high=high)
        # In one part: what somebody waits for is a few minutes of rows, and each exchange between stages would cost more.
        return there.coalesce(1) if self.pool == "announced" else there

    def swap(self, view: View, rows: pa.Table, since: datetime, until: datetime, step: timedelta | None) -> None:
        import pyarrow as pa

        table = self.stream.tables[view.name]
        with self.stream.locks.setdefault(view.name, threading.Lock()):
            covered = self.stream.covered.get(view.name, EARLIEST)
            if step:
                since = max(since, covered)
            elif view.shortcut and since > (hour := floor(since, HOUR)):
                # The files are of whole hours: what is before `since` in its hour is taken over as it is.
                there = fold.within(
                    lake.read(self.spark, table, low=hour, high=since), view.time, fold.period(self.spark, hour, since)
                )
                rows = pa.concat_tables([there.select(*rows.column_names).toArrow().cast(rows.schema), rows])
                since = hour
            parts = [(span, p) for span, p in by_span(rows, view.time, step or HOUR, self.zone) if span >= since or not step]
            adds = []
            for span, part in parts:
                mark = f"{span:%M%S}" if step else "all"
                adds += lake.write_arrow(table, f"live/{lake.hour_of(span)}-{mark}-{os.urandom(4).hex()}", part)
            if view.announce and self.stream.settings.told and parts:
                self.announce(view, table, pa.concat_tables([part for _, part in parts]))
            made = lake.swap_live(self.stream.settings, table, since, until, adds, marks=bool(step and view.shortcut))
            if not step:
                self.stream.covered[view.name] = max(until, covered)
                if made is not None:
                    with self.stream.remembering:
                        self.stream.versions[view.name] = made

    def announce(self, view: View, table: lake.Table, rows: pa.Table) -> None:
        """Send what is said of the rows whose key the table has not, before it has them: whoever is killed in between sends it
        again, under the same id. Raises nothing: rows are never held back by their announcement.
        """
        began = time.monotonic()
        try:
            fresh = self.fresh(view, table, rows)
            self.unsaid += notify.announced(self.stream.settings, view, fresh)
            if self.unsaid:
                notify.send(self.stream.settings, self.unsaid)
                self.unsaid = []
                log.info("announced", view=view.name, rows=len(fresh), seconds=round(time.monotonic() - began, 3))
                lake.failpoint("announced")
        except Exception as error:
            log.error(
                "could not be announced", view=view.name, unsaid=len(self.unsaid), because=" ".join(str(error).split())[:500]
            )

    def fresh(self, view: View, table: lake.Table, rows: pa.Table) -> list[dict[str, Any]]:
        """The rows whose key the table has not, by time; none of a settled day, which live rows do not enter, nor of before
        anybody is told. By Arrow alone."""
        import pyarrow as pa

        key = list(view.key)
        numbered = rows.select(key).append_column("_row", pa.array(range(rows.num_rows))).drop_null()
        new = numbered.join(lake.beside(table, rows, key), keys=key, join_type="left anti")
        if not new.num_rows:
            return []
        settled = lake.settled_days(self.stream.settings, table)
        order = [(column, "ascending") for column in dict.fromkeys([view.time, *key])]
        found = [row for row in rows.take(new["_row"]).sort_by(order).to_pylist() if row["day"] not in settled]
        if (since := self.told.get(view.name)) is None:
            return found
        first = since.astimezone(self.zone).date()
        return [row for row in found if row["day"] >= first and lake.comparable(row[view.time], since) >= since]


def looked() -> datetime:
    """When somebody looks for publications: a moment ago, since a file's time may be some milliseconds behind the clock's."""
    return datetime.now(UTC) - timedelta(seconds=1)


def pieces(since: datetime, until: datetime, length: timedelta) -> Iterator[tuple[datetime, datetime]]:
    """`[since, until)` in pieces of a length, the last one shorter."""
    while since < until:
        yield since, min(until, since + length)
        since += length


Piece = tuple[datetime, datetime, "pa.Table"]
"""Rows of a view, from and until."""


@dataclass(frozen=True)
class Span:
    """What of a view is computed, `[since, until)` in pieces of `part`: at which stream time, up to which batch, when somebody
    looked for publications, with which versions of other streams' tables, and from when on its new keys are announced."""

    since: datetime
    until: datetime
    part: timedelta
    at: datetime
    seq: int
    looking: datetime
    others: list[int]
    told: datetime

    @property
    def come(self) -> datetime:
        """Up to where the view is right once this is computed: no further than what it reads had come."""
        return min(self.until, self.at + timedelta(microseconds=1))


@dataclass(frozen=True)
class Base:
    """A rollup's rows of `[low, end)` behind batch `seq`, those of `[start, end)` merged into one for each rest of the key.

    `made` at that time of the monotonic clock.
    """

    low: datetime
    start: datetime
    end: datetime
    seq: int
    made: float
    rows: DataFrame

    def serves(self, first: datetime, last: datetime, lookback: timedelta) -> bool:
        """Whether every mark from `first` to `last` looks back over all of what is merged, and no further than there is."""
        return self.low <= first - lookback and last - lookback <= self.start and self.end <= first


@dataclass(frozen=True, eq=False)
class Block:
    """A rollup's rows of `[since, until)`, five minutes in one, as they were behind batch `seq` and at the instant `looking`."""

    since: datetime
    until: datetime
    seq: int
    looking: datetime
    rows: DataFrame


def by_span(rows: pa.Table, column: str, step: timedelta, zone: ZoneInfo) -> Iterator[tuple[datetime, pa.Table]]:
    """A live view's rows apart by spans of `step` (days for a column of dates), each with its start."""
    import pyarrow.compute as pc

    times: dict[datetime, list[Any]] = {}
    for value in pc.unique(rows[column]).to_pylist():
        times.setdefault(floor(value, step) if isinstance(value, datetime) else midnight(value, zone), []).append(value)
    for start, values in times.items():
        low, high = pc.greater_equal(rows[column], min(values)), pc.less_equal(rows[column], max(values))
        yield start, rows.filter(pc.and_(low, high))
