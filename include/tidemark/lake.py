"""The lake: how a table is created, appended to, staged beside, published into, compacted, swept and read.

The only module that writes Delta. Appends and publications are single delta-rs commits of milliseconds; staging and
reading are Spark's. Where a file came from is its path:

    live/<stream>-<lo>-<hi>-<unique>/…   rows of the stream's batches lo to hi
    live/<hour>-<mark|all>-<unique>/…    a live view's rows of an hour, or of one mark in it
    runs/<run>/…                         what a run staged, and a publication made visible
    anything else                        someone else's work (OPTIMIZE, UPDATE, …)
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import structlog

from tidemark.model import NAME, Catalog, Declared, Rollup, Topic, duration, midnight

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable, Schema
    from filelock import FileLock
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from tenacity import Retrying

    from tidemark.settings import Settings

log = structlog.get_logger()

# A live table makes 17,000 commits a day. A commit lists the names in the log three times, an opening once; both read every
# entry since the last checkpoint, and an opening each file that the checkpoint says is replaced. So what is kept is what is
# paid for (`bench --only long`), and it is the time-travel promise: an hour, and replaced files for queries of three.
# Transactions never expire: they are what keeps a batch from counting twice.
CHECKPOINT_EVERY = 20
CLEAN_EVERY = 100
CONFIGURATION = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.logRetentionDuration": "interval 1 hours",
    "delta.deletedFileRetentionDuration": "interval 3 hours",
    "delta.enableExpiredLogCleanup": "true",
}
# What a log's table tells of itself: whose records it holds, the day before which all have expired, whatever `keep` is now, the
# event time by which its records have their days, by what they are told apart, and the key that a tombstone of it names. And that
# of a rollup or view: what a row of it is of.
TOPIC_ID, EXPIRED_BEFORE = "tidemark.topicId", "tidemark.expiredBefore"
EVENT_TIME, ID, OFFSET = "tidemark.eventTime", "tidemark.id", "partition and offset"
KEY, NO_TABLE = "tidemark.key", "none, for the topic is not compacted"
LATE, LATE_SINCE = "tidemark.acceptLate", "tidemark.acceptLateSince"
ROW_OF = "tidemark.rowOf"
# What a run has staged is named by its own log alone until it is published, however long that takes.
STAGED = CONFIGURATION | {"delta.enableExpiredLogCleanup": "false"}
# How long VACUUM spares a file that no version names: one that is being written, and one that is staged for a decision.
WRITING, STAGING = timedelta(hours=1), timedelta(days=2)
# By what a rewrite of a table is known to another, and a run's publication of no row (`empties`), in Delta's transactions.
REWRITE, EMPTIES = "tidemark-rewrite", "tidemark-empties-"
ATTEMPTS = 30
# Whoever reads an hour opens whole files: larger ones would hold many hours.
LARGEST_MERGED = 32 * 1024 * 1024
WORTH_MERGING = 12
# One task sorts what is merged at once, and a settling waits for its pin meanwhile.
MERGED_AT_ONCE = 128 * 1024 * 1024

LIVE = re.compile(r"live/(?P<stream>[a-z][a-z0-9_]*)-(?P<lo>\d+)-(?P<hi>\d+)-\w+/")
SPAN = re.compile(r"live/(?P<hour>\d{8}T\d\d)-(?P<mark>\d{4}|all)-\w+/")
RUN = re.compile(r"runs/(?P<run>[^/]+)/")
# A checkpoint that another generation has followed, and when, in seconds since 1970.
ASIDE = re.compile(r"[a-z][a-z0-9_]*\.before-\d+-(?P<at>\d+)")
# What a person may call a run: a file's name on any disk, and not one that a run's own files have.
RUN_NAME = re.compile(r"(?!.*[.](json|verdicts)$)[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


class LakeError(RuntimeError):
    """The lake refuses; the sentence names the table, what was found and the command that repairs it."""


def failpoint(name: str) -> None:
    """Die here by SIGKILL when `TIDEMARK_FAILPOINT` is `name` or `name:nth`; how crash tests name their moment."""
    wanted, _, nth = os.environ.get("TIDEMARK_FAILPOINT", "").partition(":")
    if wanted == name:
        FAILPOINTS[name] = FAILPOINTS.get(name, 0) + 1
        if FAILPOINTS[name] == int(nth or 1):
            os.killpg(os.getpgid(0), signal.SIGKILL)


FAILPOINTS: dict[str, int] = {}

# -------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class File:
    """One file of a table's current version. `low` and `high` bound its time column where its statistics say so."""

    path: str
    size: int
    rows: int
    day: date | None
    modified: int
    low: Any = None
    high: Any = None

    @property
    def live(self) -> re.Match[str] | None:
        return LIVE.match(self.path)

    @property
    def span(self) -> re.Match[str] | None:
        return SPAN.match(self.path)

    @property
    def foreign(self) -> bool:
        """Whether someone else wrote it: a person's OPTIMIZE, UPDATE or DELETE."""
        return not (self.live or self.span or self.run)

    @property
    def run(self) -> str | None:
        found = RUN.match(self.path)
        return found["run"] if found else None

    def may_hold(self, lo: int, hi: int, stream: str) -> bool:
        """Whether it may hold rows of a stream's batches `lo` to `hi`: live, and its span meets them, or of other origin."""
        live = self.live
        return not live or (live["stream"] == stream and int(live["hi"]) >= lo and int(live["lo"]) <= hi)

    def meets(self, low: datetime | None, high: datetime | None) -> bool:
        """Whether it may hold rows of `[low, high)`, as far as its statistics say."""
        begins = low is None or self.high is None or comparable(self.high, low) >= millisecond(low)
        unsaid = not isinstance(self.low, datetime)  # or said by a DATE, whose whole day counts
        return begins and (high is None or unsaid or comparable(self.low, high) < high)


class Table:
    """One Delta table of the lake, opened once and kept up to date. `time` names the column that files are pruned by."""

    def __init__(self, root: Path, name: str, time: str | None = None) -> None:
        self.root, self.name, self.time = root, name, time
        self.path = root / name
        self._delta: DeltaTable | None = None
        self._checkpoint = 0
        self._lock, self._still = threading.RLock(), False

    def __repr__(self) -> str:
        return f"Table({self.name})"

    @property
    def exists(self) -> bool:
        log_folder = self.path / "_delta_log"
        # By its entries: one that was being written when it was killed lies beside them under another name.
        return self._delta is not None or any(entry.suffix in (".json", ".parquet") for entry in log_folder.glob("*"))

    def delta(self) -> DeltaTable:
        """The table at its newest version. Raises `LakeError` when there is none, and where its log is damaged."""
        with self._lock:
            if self._delta is None:
                if not self.exists:
                    raise LakeError(f"there is no table {self.name} in {self.root}; the stream makes it with its first batch")
                self._checkpoint = self.checkpoint()
                self._delta = self.opened()
            elif not self._still and self.other_log(self._delta.version()):
                self._checkpoint = self.checkpoint()
                with self.read_or_named():
                    self._delta.update_incremental()  # which looks at the name of every entry
            return self._delta

    def other_log(self, version: int) -> bool:
        """Whether the log is not as it was when this version was read: it has a newer one, or entries may have been taken out."""
        return self.entry(version + 1).exists() or not self.entry(version).exists() or self.checkpoint() != self._checkpoint

    def entry(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020}.json"

    def checkpoint(self) -> int:
        """When the log was checkpointed last, in nanoseconds; 0 before the first time."""
        try:
            return (self.path / "_delta_log" / "_last_checkpoint").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def opened(self) -> DeltaTable:
        from deltalake import DeltaTable

        with self.read_or_named():
            found = DeltaTable(self.path)
        # Delta takes an entry without a line for a commit of nothing; a power cut leaves one in place of what was committed.
        for version in range(found.version(), -1, -1):
            entry = self.entry(version)
            if not entry.is_file() or checkpointed(entry):
                break
            if not entry.stat().st_size:
                raise LakeError(self.damage(entry, "it is empty, as a power cut leaves it"))
        return found

    @contextmanager
    def read_or_named(self) -> Iterator[None]:
        """Reads of the table's log: what cannot be read is a `LakeError` that names the entry."""
        from deltalake.exceptions import DeltaError

        try:
            yield
        except DeltaError as error:
            raise LakeError(self.damage(damaged(self.path), error)) from None

    def damage(self, entry: Path | None, why: object) -> str:
        """What is broken, and the way out: what is folded from a log comes again from there."""
        what = f"table {self.name}: {f'its log entry {entry}' if entry else f'the Delta log of {self.path}'} is damaged"
        copy = f"{what} ({str(why).splitlines()[0]}). Put it back from a copy of the lake"
        if not self.name.startswith(("rollups/", "views/")):
            return f"{copy}; docs/operating.md, Damaged files, has more"
        if RUN.match(f"{self.name.split('/', 2)[-1]}/"):  # of less than was staged a day would be published
            return f"{copy}, or settle the days again"
        if entry == max((self.path / "_delta_log").glob("*.json"), default=None):
            return f"{copy}; without one move it away, start the stream, and settle again what was published since"
        name = self.name.split("/")[-1]
        return f"{copy}; without one move {self.path} away, start the stream, then: tidemark replay --only {name}"

    @contextmanager
    def still(self) -> Iterator[DeltaTable]:
        """The newest version, and no newer one until the block ends; other threads wait.

        What is decided and what is committed must rest on one version: a conflict with anything newer is then seen.
        """
        with self._lock:
            delta = self.delta()
            self._still = True
            try:
                yield delta
            finally:
                self._still = False

    def create(self, schema: StructType, comment: str = "", key: Sequence[str] = ()) -> None:
        """Make the table, partitioned by `day`, unless it is there; columns that the code has gained are added to it.

        Old rows have null there. Raises `LakeError` for a column that the code has lost, renamed or retyped, and for another
        `key` or time than the table's rows are by, in whatever order: rows of both would stand side by side, some twice.
        """
        from deltalake import DeltaTable, Schema

        wanted = Schema.from_json(schema.json())
        row_of = {ROW_OF: f"key {', '.join(sorted(key))}, time {self.time}"} if key else {}
        made: dict[str, Any] = {"partition_by": ["day"], "configuration": CONFIGURATION, "description": comment or None}
        # Streams and runs that start at once on a new lake, or on changed code, all come here: whoever is second looks again.
        for attempt in anew():
            with attempt:
                if not self.exists:
                    DeltaTable.create(self.path, wanted, mode="ignore", **made)
                with self.still() as delta:
                    self.widen(delta, wanted, row_of)

    def widen(self, delta: DeltaTable, wanted: Schema, row_of: Mapping[str, str]) -> None:
        """Give the table the columns that it lacks and the comments that differ; `create` says what is refused."""
        found = {f.name: f for f in delta.schema().fields}
        declared = {f.name: f for f in wanted.fields}
        lost = [f"{n} {kind(f)} is not in the code" for n, f in found.items() if n not in declared]
        retyped = [
            f"{n} is {kind(f)}, the code says {kind(declared[n])}"
            for n, f in found.items()
            if n in declared and kind(f) != kind(declared[n])
        ]
        was = {n: (delta.metadata().configuration or {}).get(n) for n in row_of}
        rekeyed = [f"its rows are by {was[n]}, the code says {of}" for n, of in row_of.items() if was[n] and was[n] != of]
        if lost or retyped or rekeyed:
            gained = ", ".join(sorted(declared.keys() - found.keys()))
            also = f" (the code has gained {gained}; a column that is renamed is one lost and one gained)" if gained else ""
            wrong = "; ".join([*lost, *retyped, *rekeyed])
            raise LakeError(
                f"table {self.name}: {wrong}{also}. Columns can only be added; key and time stay. Write it back as it was, or "
                f"give the changed definition a new name ({self.name.split('/')[-1]}_v2), replay it, move its readers and delete "
                f"{self.path}"
            )
        for name, field_ in found.items():
            if (comment_ := declared[name].metadata.get("comment")) and field_.metadata.get("comment") != comment_:
                delta.alter.set_column_metadata(name, {"comment": comment_})
        if fresh := [f for n, f in declared.items() if n not in found]:
            delta.alter.add_columns(fresh)
            self._delta = None
            log.info("columns added; old rows have null there", table=self.name, columns=[f.name for f in fresh])
        if was != row_of:  # a new one, which delta-rs makes with properties of Delta's own alone, or one of the version before
            delta.alter.set_table_properties(dict(row_of), raise_if_not_exists=False)
            self._delta = None

    @property
    def topic_id(self) -> str | None:
        """Of a log, by Kafka's own id, the topic whose records it holds; None before a stream has begun with it."""
        return self.told(TOPIC_ID)

    @property
    def expired_before(self) -> date:
        """Of a log, the day before which all days have expired; the first of all days where none has."""
        return date.fromisoformat((self.exists and self.told(EXPIRED_BEFORE)) or str(date.min))

    def told(self, name: str) -> str | None:
        return (self.delta().metadata().configuration or {}).get(name)

    def tell(self, values: Mapping[str, str], where: Callable[[], bool]) -> None:
        """Set properties of the table, where it is so at its newest version."""
        if not where():
            return
        for attempt in anew():
            with attempt, self.still() as delta:
                if where():  # nobody else has meanwhile
                    delta.alter.set_table_properties(dict(values), raise_if_not_exists=False)
                    self._delta = None

    def belong_to(self, topic_id: str) -> None:
        """Have a log's table tell whose records it holds, for ever: their offsets are those of no other topic."""
        self.tell({TOPIC_ID: topic_id}, lambda: self.topic_id is None)

    def cut_by(self, topic: Topic) -> None:
        """Have a log's table tell by which event time its records have their days, by what they are told apart, whom a tombstone
        ends, and how late they may be: since when, where it was otherwise before."""
        wanted = {EVENT_TIME: topic.event_time, ID: topic.id or OFFSET, LATE: topic.accept_late or "any", KEY: key_of(topic)}
        since = {LATE_SINCE: at.isoformat()} if (at := self.judged_since(topic)) else {}
        self.tell(wanted | since, lambda: any(self.told(name) != value for name, value in wanted.items()))

    def judged_since(self, topic: Topic) -> datetime | None:
        """From when on a log's records are judged by the `accept_late` that the topic has: now, where no stream has begun with it
        yet; None where no other is known of."""
        if self.told(LATE) not in (None, topic.accept_late or "any"):
            return datetime.now(UTC)
        at = self.told(LATE_SINCE)
        return datetime.fromisoformat(at) if at else None

    def files(self) -> list[File]:
        """Every file of the newest version."""
        # Not through `pyarrow.table`, which imports pandas: a second of CPU for each task that publishes.
        told, low, high = self.delta().get_add_actions(flatten=True), f"min.{self.time}", f"max.{self.time}"
        wanted = {"path", "size_bytes", "num_records", "partition.day", "modification_time", low, high}
        adds = told.select([c for c in told.column_names if c in wanted]).to_struct_array().to_pylist()
        return [
            File(
                unquote(a["path"]),
                a["size_bytes"],
                a.get("num_records") or 0,
                a.get("partition.day"),
                a["modification_time"],
                a.get(low),
                a.get(high),
            )
            for a in adds
        ]

    def files_of(self, lo: int, hi: int, stream: str) -> list[File]:
        """The files that may hold rows of a stream's batches `lo` to `hi`: live ones whose span meets it, and all of other
        origin."""
        return [f for f in self.files() if f.may_hold(lo, hi, stream)]

    def appended(self, stream: str) -> int | None:
        """The `seq` of the stream's newest batch in this table, or None. Batch 0 is a number like any other."""
        return self.delta().transaction_version(stream) if self.exists else None


@contextmanager
def noted(damaged: list[LakeError]) -> Iterator[None]:
    """What is damaged of one table is noted: the work on the others goes on."""
    try:
        yield
    except LakeError as error:
        damaged.append(error)


def refuse(damaged: list[LakeError]) -> None:
    """Raises the first of what was `noted`."""
    for error in damaged:
        raise error


def checkpointed(entry: Path) -> bool:
    """Whether a checkpoint has what an entry of a Delta log says."""
    return entry.with_suffix(".checkpoint.parquet").exists()


def damaged(path: Path) -> Path | None:
    """The newest entry of a table's Delta log that is not lines of JSON, if there is one."""
    for entry in sorted((path / "_delta_log").glob("*.json"), reverse=True):
        try:
            if not [json.loads(line) for line in entry.read_bytes().splitlines()]:
                return entry
        except ValueError:
            return entry
    return None


def kind(field: Any) -> str:
    """A Delta field's type in words: `string`, `decimal(10,2)`, `struct<partition integer, …>`."""
    found = json.loads(field.to_json())["type"]

    def word(said: Any) -> str:
        if isinstance(said, str):
            return said
        if said["type"] == "struct":
            members = (f"{member['name']} {word(member['type'])}" for member in said["fields"])
            return f"struct<{', '.join(members)}>"
        return f"array<{word(said['elementType'])}>" if said["type"] == "array" else json.dumps(said)

    return word(found)


def table(settings: Settings, declared: Declared) -> Table:
    """The table of a topic's log, a rollup or a view."""
    column = event_column(declared) if isinstance(declared, Topic) else declared.time
    return Table(settings.lake_path, declared.table, column)


def event_column(topic: Topic) -> str | None:
    """The column that a topic's event time is, where its expression is just that; not where tombstones have none of it."""
    return topic.event_time if not topic.compacted and re.fullmatch(r"\w+", topic.event_time) else None


def refuse_other_zone(settings: Settings, topics: Iterable[Topic]) -> None:
    """Raises `LakeError` where the days of these topics' logs, as the first log that says so has them, are of another business
    zone: records of a day would be looked for in the files of another one, and be missing from both."""
    for log in (table(settings, topic) for topic in topics):
        comments = dict[str, str]()
        with suppress(LakeError):  # of one that is damaged who reads it says so
            comments = {f.name: f.metadata.get("comment") or "" for f in log.delta().schema().fields} if log.exists else {}
        if was := comments.get("day", "").rpartition(", ")[2]:
            if was != settings.zone:
                raise LakeError(
                    f"the days of {log.path} are those of {was}, and TIDEMARK_ZONE is {settings.zone}; set TIDEMARK_ZONE={was}, "
                    f"or {afresh(settings)}"
                )
            return


def refuse_empty(settings: Settings) -> None:
    """Raises `LakeError` where a checkpoint has read what no log has, nor the ledger: their disk is not mounted, or they were
    moved away alone. A stream would go on behind what they held, or from what Kafka still holds."""
    if ledger(settings).exists:
        return
    for stream in streams(settings, ()):
        checkpoint, read = Checkpoint.of(settings, stream), list[str]()
        with suppress(LakeError):  # of one that is damaged who reads it says so
            read = sorted(checkpoint.identity.topic_ids) if checkpoint.identity else []
        if read and not any(Table(settings.lake_path, f"log/{topic}").exists for topic in read):
            raise LakeError(
                f"{settings.lake_path} has no ledger, and no log of {', '.join(read)}, which {checkpoint.path} has read: mount "
                f"its disk, or write the right TIDEMARK_LAKE. To begin afresh, move {settings.checkpoints} away too: the stream "
                f"then reads again what Kafka holds"
            )


def afresh(settings: Settings) -> str:
    """The way out where a log's days cannot stay as they are."""
    return f"move {settings.lake_path} and {settings.checkpoints} away: the stream then reads again what Kafka holds"


def key_of(topic: Topic) -> str:
    return (topic.compacted and topic.key) or NO_TABLE


def refuse_other_reading(
    spark: SparkSession,
    settings: Settings,
    log: Table,
    topic: Topic,
    elsewhere: Callable[[Topic, DataFrame], int],
    nameless: Callable[[Topic, DataFrame], int],
    tombstones: Callable[[Topic, DataFrame], int],
) -> None:
    """Raises `LakeError` where a topic has another event time, id or key than its log was written with, and that matters.

    `elsewhere` counts records of other days by the event time of now: they would be looked for in the files of these, and be
    missing from both. `nameless` counts accepted ones without the id of now: all would be repeats of one event. `tombstones`
    counts those that name whom they end by the key of before: they would end nobody, and who was deleted would be back.
    """
    was = log.told(EVENT_TIME)
    if was and was != topic.event_time and (count := elsewhere(topic, read(spark, log))):
        raise LakeError(
            f"topic {topic.name}: its event time is {topic.event_time}, and {log.path} has its days by {was}: {count:,} of its "
            f"records would be looked for in files of other days, and be in no table. Write it back: a view can go by another "
            f"time of an event, with a lookback or lookahead of as much as the two differ. Or give the topic another name, or "
            f"{afresh(settings)}"
        )
    was = log.told(ID)
    if topic.id and was and was != topic.id and (count := nameless(topic, read(spark, log))):
        raise LakeError(
            f"topic {topic.name}: its id is {topic.id}, and {count:,} accepted records of {log.path} have none: they would count "
            f"as repeats of one event. Records were told apart by {was}: write that back, or give the topic another name, or "
            f"{afresh(settings)}"
        )
    was, now = log.told(KEY), key_of(topic)
    if was and was != now and (count := tombstones(topic, read(spark, log))):
        raise LakeError(
            f"topic {topic.name}: its key as a table is {now}, and {count:,} tombstones of {log.path} have another ({was}): they "
            f"would end nobody, and what they deleted would be there again. Write that back, or give the topic another name, or "
            f"{afresh(settings)}"
        )


def ledger(settings: Settings) -> Table:
    return Table(settings.lake_path, "ledger", "started_at")


def verdicts(settings: Settings) -> Table:
    return Table(settings.lake_path, "verdicts", "judged_at")


# -------------------------------------------------------------------------------------------------------------- append


@dataclass(frozen=True)
class Batch:
    """Micro-batches `lo` to `hi` of a stream (one, but for what is rolled later), with the Kafka offsets they cover.

    `seq` grows for ever: a new checkpoint is a new generation and continues above the old. `offsets` is
    `{topic: {partition: [from, until]}}`.
    """

    stream: str
    lo: int
    hi: int
    offsets: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"live/{self.stream}-{self.lo}-{self.hi}-{uuid.uuid4().hex[:8]}"


def append(table: Table, batch: Batch, files: Sequence[Any]) -> bool:
    """Add files in one commit that carries `(stream, seq)` and the batch's offsets. False when the batch is there already.

    Promises that a batch enters once, whatever is retried. Raises `LakeError` when the number is taken by a batch of
    other offsets: a checkpoint and a table that do not belong together.
    """
    from deltalake import Transaction

    def decide() -> tuple[list[Any], dict[str, Any]] | None:
        taken = table.appended(batch.stream)
        if taken is not None and taken >= batch.hi:
            refuse_other_offsets(table, batch)
            return None
        return list(files), {"stream": batch.stream, "seq": [batch.lo, batch.hi], "offsets": batch.offsets}

    return commit(table, decide, [Transaction(batch.stream, batch.hi)]) is not None


def refuse_other_offsets(table: Table, batch: Batch) -> None:
    for entry in table.delta().history(2000):
        said = note_of(entry)
        if said.get("stream") == batch.stream and said.get("seq") == [batch.lo, batch.hi]:
            if json.loads(json.dumps(batch.offsets)) != said["offsets"]:
                raise LakeError(
                    f"table {table.name} holds batch {batch.hi} of stream {batch.stream} with offsets {said['offsets']}, "
                    f"the checkpoint says {json.dumps(batch.offsets)}; the two do not belong together. "
                    f"Open a new generation with: tidemark speed --stream {batch.stream} --recover, with the --only that it had"
                )
            return


def note_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the lake noted with a commit; nothing where a person noted something of their own."""
    try:
        said = json.loads(entry.get("userMetadata") or "{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def anew() -> Retrying:
    """Tries, each after a conflict with a commit of someone else."""
    from deltalake.exceptions import CommitFailedError
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random

    return Retrying(
        retry=retry_if_exception_type(CommitFailedError),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random(0, 0.1),
        reraise=True,
    )


def commit(
    table: Table,
    decide: Callable[[], tuple[list[Any], dict[str, Any]] | None],
    transactions: list[Any] | None = None,
    turns: str | None = None,
) -> int | None:
    """Commit the actions that `decide` returns, decided again from the newest version after every conflict.

    Returns the version, or None when `decide` found nothing to do. Every rewrite of a table carries one transaction
    (`transactions` unsaid), so that of two that race one is refused and decides again; `turns` names another to count up.
    """
    from deltalake import CommitProperties, PostCommitHookProperties, Transaction

    for attempt in anew():
        with attempt, table.still() as delta:
            decided = decide()
            if decided is None:
                return None
            actions, said = decided
            refuse_vectors(table, delta, actions)
            counted = [REWRITE, turns] if turns else [REWRITE]
            carried = transactions or [Transaction(name, (delta.transaction_version(name) or 0) + 1) for name in counted]
            entry = table.entry(delta.version())
            if not entry.exists() and checkpointed(entry):
                entry.touch()  # somebody moved it away as damaged: the checkpoint has what it said, but Delta wants to see one
            failpoint("files")
            delta.create_write_transaction(
                actions,
                mode="append",
                schema=delta.schema(),
                partition_by=["day"],
                commit_properties=CommitProperties(
                    custom_metadata={"userMetadata": json.dumps(said, default=str)},
                    app_transactions=carried,
                    max_commit_retries=0,
                ),
                post_commithook_properties=PostCommitHookProperties(
                    # None is what the table says. It looks at each entry, so not at every checkpoint.
                    cleanup_expired_logs=None if (delta.version() + 1) % CLEAN_EVERY == 0 else False,
                ),
            )
            failpoint("commit")
    return delta.version() + 1  # the handle stays at the version that was read; the commit is the next, or was refused


def vectored(table: Table, delta: DeltaTable) -> set[str]:
    """The files of which a person's DELETE or UPDATE has left rows out by a deletion vector."""
    if "deletionVectors" not in (delta.protocol().reader_features or ()):
        return set()
    uris = {uri for batch in delta.deletion_vectors() for uri in batch.column(0).to_pylist()}
    return {unquote(uri).split(f"{table.path}/", 1)[-1] for uri in uris}


def refuse_vectors(table: Table, delta: DeltaTable, actions: Sequence[Any]) -> None:
    """A remove by delta-rs cannot name a deletion vector, and without it removes nothing: every row would be there twice."""
    from deltalake.transaction import RemoveAction

    held = {unquote(a.path) for a in actions if isinstance(a, RemoveAction)}
    if held and (found := sorted(held & vectored(table, delta))):
        raise LakeError(
            f"{len(found)} files of {table.name} that are to be replaced have deletion vectors, {found[0]} the first of them; "
            f"take them out in Spark: ALTER TABLE delta.`{table.path}` SET TBLPROPERTIES "
            f"('delta.enableDeletionVectors' = false), then REORG TABLE delta.`{table.path}` APPLY (PURGE)"
        )


def write_arrow(table: Table, folder: str, rows: pa.Table) -> list[Any]:
    """Write a small result from the driver, a file each day. Returns the add actions; readers see nothing yet."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if rows.num_rows == 0:
        return []
    days = pc.unique(rows["day"]).to_pylist()
    if None in days:
        raise ValueError(f"table {table.name}: a row has no {table.time or 'time'}, so it belongs to no day")
    adds = []
    for day in days:
        part = rows if len(days) == 1 else rows.filter(pc.equal(rows["day"], day))
        path = table.path / folder / f"day={day}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}")
        pq.write_table(part.drop_columns(["day"]), hidden, compression="zstd", compression_level=1)
        date_ahead(hidden)
        hidden.rename(path)
        adds.append(add_action(table, path, day))
    return adds


WRITTEN: dict[str, str | int] = {
    "compression": "zstd",
    "maxRecordsPerFile": 5_000_000,
    # A reader has a row group in memory, and Spark all rows of one in a batch: of sets with a quarter of a million values each a
    # hundred were 135 MB, the fewest after which Parquet looks how many they are unless told.
    "parquet.block.size": 16 * 1024 * 1024,
    # A 128th of a row group, as Parquet has it of its own: of ids that come a few times each, more is written and looked up for
    # little. A tenth of the CPU of writing a log went into it, and a twentieth of rolling one.
    "parquet.dictionary.page.size": 128 * 1024,
    "parquet.block.size.row.check.min": 1,
    "parquet.page.size.row.check.min": 1,
}


def write_spark(table: Table, folder: str, rows: DataFrame, ahead: timedelta = WRITING, modified: int | None = None) -> list[Any]:
    """Write a large result from the executors. Returns the add actions, as `add_action` gives them; readers see nothing yet.
    VACUUM spares it for `ahead`."""
    hidden = (table.path / folder).with_name(f"_{Path(folder).name}")
    rows.write.partitionBy("day").options(**WRITTEN).parquet(str(hidden))
    for path in hidden.glob("day=*/*.parquet"):
        date_ahead(path, ahead)
    hidden.rename(table.path / folder)
    adds = []
    for path in sorted((table.path / folder).glob("day=*/*.parquet")):
        day = path.parent.name.removeprefix("day=")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
            raise ValueError(f"table {table.name}: a row has no {table.time or 'time'}, so it belongs to no day")
        adds.append(add_action(table, path, date.fromisoformat(day), modified))
    return adds


def date_ahead(path: Path, by: timedelta = WRITING) -> None:
    """Date a file so far ahead: VACUUM, RETAIN 0 HOURS too, deletes what no version names and is older than now."""
    soon = time.time() + by.total_seconds()
    os.utime(path, (soon, soon))


WIDEST = {"STRING": ("", "\U0010ffff" * 32), "FLOAT": (-math.inf, math.inf), "DOUBLE": (-math.inf, math.inf)}
"""Bounds of what a footer has none for: long texts, and numbers of which one is none."""


def add_action(table: Table, path: Path, day: date, modified: int | None = None) -> Any:
    """A file as Delta's add, with the statistics of its footer: rows, and nulls and bounds of each column and field that is no
    list; `modified` (Unix milliseconds) where it is none of now.

    None is left out: of a column without bounds, beside others that have some, delta-rs 1.6.6 tells PyArrow, and with it DuckDB,
    that no row of the file can match.
    """
    import pyarrow.parquet as pq
    from deltalake.transaction import AddAction

    footer, at = pq.read_metadata(path), path.stat()
    low, high, nulls, exact = dict[str, Any](), dict[str, Any](), dict[str, Any](), True
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        parts = [footer.row_group(g).column(index) for g in range(footer.num_row_groups)]
        told = [p.statistics for p in parts]
        if column.max_repetition_level or not parts:
            continue
        *structs, name = column.path.split(".")
        counted = all(s is not None and s.has_null_count for s in told)
        some = [s for s, p in zip(told, parts, strict=True) if not counted or s.null_count < p.num_values]
        if all(s is not None and s.has_min_max for s in some):
            bounds = (min(s.min for s in some), max(s.max for s in some)) if some else None
        else:
            kind = column.logical_type.type
            bounds = WIDEST.get(column.physical_type if kind == "NONE" else kind)
        least, most, absent = (within(of, structs) for of in (low, high, nulls))
        if bounds and not isinstance(bounds[0], bytes):
            least[name], most[name] = bound(bounds[0]), bound(bounds[1], above=True)
            exact = exact and counted and not isinstance(bounds[0], float)
        if counted or bounds:  # one of some for who looks for nulls where nobody has counted them
            absent[name] = str(sum(s.null_count for s in told) if counted else min(1, footer.num_rows - 1))
    said = {"numRecords": str(footer.num_rows), "tightBounds": json.dumps(exact)}
    stats = as_object(said | {"minValues": low, "maxValues": high, "nullCount": nulls})
    when = int(time.time() * 1000) if modified is None else modified
    return AddAction(str(path.relative_to(table.path)), at.st_size, {"day": str(day)}, when, True, stats)


def within(said: dict[str, Any], structs: Iterable[str]) -> dict[str, Any]:
    for name in structs:
        said = said.setdefault(name, {})
    return said


def as_object(said: Mapping[str, Any]) -> str:
    """Texts that are JSON already, as an object: of a DECIMAL Python would not write every digit."""
    members = (f"{as_text(name)}: {of if isinstance(of, str) else as_object(of)}" for name, of in said.items())
    return f"{{{', '.join(members)}}}"


def as_text(value: str) -> str:
    """As JSON, every sign as itself: of two escapes that are one sign, as 𠮷 would be, delta-rs 1.6.6 makes another."""
    return json.dumps(value, ensure_ascii=False)


def bound(value: Any, above: bool = False) -> str:
    """A bound as JSON, as Delta writes it, that excludes nothing: its instants have milliseconds, its texts 32 characters, and a
    footer does not tell of numbers that are none, which Spark has as the greatest."""
    match value:
        case float():
            return '"Infinity"' if above else json.dumps(value) if math.isfinite(value) else '"-Infinity"'
        case Decimal():
            return f"{value:f}"
        case datetime():
            at = value.replace(tzinfo=None)
            if above and at <= datetime.max - timedelta(milliseconds=1):
                at += timedelta(microseconds=999)
            elif above:  # there is no later one
                return json.dumps(at.isoformat() + "Z")
            return json.dumps(at.isoformat(timespec="milliseconds") + "Z")
        case date():
            return json.dumps(str(value))
        case str() if len(value) > 32:
            return as_text(max(value, value[:32] + "\U0010ffff" * 8) if above else value[:32])
        case str():
            return as_text(value)
        case _:
            return json.dumps(value)


def remove_action(file: File) -> Any:
    from deltalake.transaction import RemoveAction

    return RemoveAction(file.path, True, int(time.time() * 1000), file.size, {"day": str(file.day)})


# ---------------------------------------------------------------------------------------------------- live view → table


def hour_of(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y%m%dT%H")


def swap_live(
    settings: Settings, table: Table, since: datetime, until: datetime, files: Sequence[Any], marks: bool
) -> int | None:
    """Replace a live view's rows of `[since, until)` by `files`, in one commit; a settled day is never touched.

    With `marks` the files hold single marks and replace the files of those marks; without, they hold whole steps and replace
    everything of the hours that begin there, but for marks from `until` on. A file of other origin (someone ran OPTIMIZE) may
    hold hours on both sides: its rows outside the span are written again.
    """

    def replaced(file: File, settled: set[date]) -> bool:
        if not file.span or file.day in settled:
            return False
        at = datetime.strptime(file.span["hour"], "%Y%m%dT%H").replace(tzinfo=UTC)
        if file.span["mark"] == "all":
            # A day may begin at half past an hour; its file is named after the hour.
            return not marks and since.replace(minute=0, second=0, microsecond=0) <= at < until
        at += timedelta(minutes=int(file.span["mark"][:2]), seconds=int(file.span["mark"][2:]))
        return since <= at < until

    def decide() -> tuple[list[Any], dict[str, Any]] | None:
        settled, found = settled_days(settings, table), table.files()
        kept = [a for a in files if date.fromisoformat(a.partition_values["day"]) not in settled]
        gone = [remove_action(f) for f in found if replaced(f, settled)]
        for file in found:
            if file.foreign and file.day not in settled and (rest := outside(settings, table, file, since, until)) is not None:
                gone.append(remove_action(file))
                kept += write_arrow(table, f"live/rest-{uuid.uuid4().hex[:8]}", rest)
        said = {"live": [since.isoformat(), until.isoformat()]}
        return ([*kept, *gone], said) if kept or gone else None

    return commit(table, decide)


def outside(settings: Settings, table: Table, file: File, since: datetime, until: datetime) -> pa.Table | None:
    """The rows of a file whose time lies outside `[since, until)`; None when all of them do."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.time or "day"
    before = file.high is not None and comparable(file.high, since) < millisecond(since)
    if before or (file.low is not None and comparable(file.low, since) >= until):
        return None
    rows = typed(table, file, pa.schema(table.delta().schema()))
    rows = rows.append_column("day", pa.array([file.day] * rows.num_rows, pa.date32()))
    if pa.types.is_date(rows[column].type):
        low, high = since.astimezone(settings.tz).date(), (until - timedelta(microseconds=1)).astimezone(settings.tz).date()
        within = pc.and_(pc.greater_equal(rows[column], low), pc.less_equal(rows[column], high))
    else:
        within = pc.and_(pc.greater_equal(rows[column], since), pc.less(rows[column], until))
    rest = rows.filter(pc.invert(within))
    return rest if rest.num_rows < rows.num_rows else None


def typed(table: Table, file: File, schema: pa.Schema) -> pa.Table:
    """A file's rows with a schema's columns and types but `day`, whoever wrote it: instants of a person's Spark are INT96."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = pq.ParquetFile(table.path / file.path).read(columns=schema.names)
    columns = {
        f.name: found[f.name].cast(f.type, safe=False) if f.name in found.column_names else pa.nulls(found.num_rows, f.type)
        for f in schema
        if f.name != "day"
    }
    return pa.table(columns)


# ------------------------------------------------------------------------------------------------------- runs and pins


@dataclass(frozen=True)
class Pin:
    """What a run has read of a stream, exactly: the last whole batch and the Kafka offsets up to it (exclusive)."""

    stream: str
    seq: int
    offsets: dict[str, dict[str, int]]
    taken: str


@dataclass(frozen=True)
class Generation:
    """What a checkpoint is: its number, the `seq` of its batch 0, where each partition starts, and which topics it reads.

    `taken` are the streams that it has taken topics from, each with its last batch by then: what rollups may lack of them.
    """

    number: int
    base: int
    start: dict[str, dict[str, int]]
    topic_ids: dict[str, str]
    taken: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A stream's checkpoint on disk: Spark's own files, and `tidemark.json` beside them, its identity."""

    path: Path
    stream: str

    @classmethod
    def of(cls, settings: Settings, stream: str) -> Checkpoint:
        return cls(settings.checkpoints / stream, stream)

    @property
    def identity(self) -> Generation | None:
        """Raises `LakeError` where it is damaged."""
        file = self.path / "tidemark.json"
        if not file.exists():
            return None
        try:
            return Generation(**json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise LakeError(
                f"{file} is damaged ({error}). Move {self.path} away, then: tidemark speed --stream {self.stream} --recover, "
                f"with the --only that it had"
            ) from error

    def newest(self, kind: str) -> int | None:
        """The greatest batch number in `offsets` (planned) or `commits` (done), or None."""
        numbers = [int(p.name) for p in (self.path / kind).glob("[0-9]*") if p.name.isdigit()]
        return max(numbers, default=None)

    def offsets(self, number: int) -> dict[str, dict[str, int]]:
        """`{topic: {partition: until}}` of a planned batch, from Spark's own offset log. Raises `LakeError` for a damaged one."""
        file = self.path / "offsets" / str(number)
        try:
            content = file.read_bytes()
            if not as_summed(content, file.with_name(f".{number}.crc")):
                raise ValueError("its checksum is another")
            return json.loads(content.splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise LakeError(f"stream {self.stream}: {file} of its checkpoint is damaged ({error})") from None

    def refuse_damaged(self) -> None:
        """Raises `LakeError` where Spark would not go on from it: a power cut leaves what was written last empty or cut."""
        planned, done = self.newest("offsets"), self.newest("commits")
        if planned is not None:
            self.offsets(planned)
        for file in (self.path / "metadata", *([] if done is None else [self.path / "commits" / str(done)])):
            content = file.read_bytes() if file.exists() else b"-"
            if not content or not as_summed(content, file.with_name(f".{file.name}.crc")):
                raise LakeError(f"stream {self.stream}: {file} of its checkpoint is damaged")

    def planned_at(self, number: int) -> datetime:
        return datetime.fromtimestamp((self.path / "offsets" / str(number)).stat().st_mtime, UTC)

    def not_beyond(self, number: int, now: datetime | None = None) -> datetime:
        """When a pin of this batch is `taken`: when the next was planned, or now. What a person wrote before holds no more."""
        after = self.path / "offsets" / str(number + 1)
        return self.planned_at(number + 1) if after.exists() else now or datetime.now(UTC)

    def pin(self, entered: int | None = None) -> Pin | None:
        """The last committed batch with its offsets: what a run may read, exactly. None before the first.

        One that is `entered`, that the ledger has, is as whole: a stream that was killed in between never commits it where
        another has taken its topics since.
        """
        now, generation, done = datetime.now(UTC), self.identity, self.newest("commits")
        if generation and entered is not None and (self.path / "offsets" / str(entered - generation.base)).exists():
            done = max(entered - generation.base, -1 if done is None else done)
        if generation is None or done is None:
            return None
        return Pin(self.stream, generation.base + done, self.offsets(done), self.not_beyond(done, now).isoformat())


def as_summed(content: bytes, sums: Path) -> bool:
    """Whether a file is what Hadoop's checksums beside it say: after a header of eight bytes a CRC-32 of each 512 bytes."""
    told = sums.read_bytes()[8:] if sums.exists() else b""
    parts = [content[at : at + 512] for at in range(0, len(content), 512)]
    return not told or told == b"".join(zlib.crc32(part).to_bytes(4, "big") for part in parts)


def streams(settings: Settings, named: Sequence[str]) -> tuple[str, ...]:
    """The streams that the catalog names, and after them those that have a checkpoint beside: of `speed --only`, or of once."""
    kept = (p.parent.name for p in settings.checkpoints.glob("*/tidemark.json"))
    return (*named, *sorted(name for name in kept if NAME.fullmatch(name) and name not in named))


def reader(settings: Settings, topic: Topic) -> str:
    """The stream that reads a topic: the last one to have begun with it."""
    began = {}
    for stream in streams(settings, ()):
        checkpoint = Checkpoint.of(settings, stream)
        if (generation := checkpoint.identity) and topic.name in generation.topic_ids:
            began[stream] = (checkpoint.path / "tidemark.json").stat().st_mtime_ns
    return max(began, key=lambda s: began[s], default=topic.stream)


def started(catalog: Catalog, stream: str, topics: Iterable[str], *options: str) -> str:
    """The command that starts a stream of these topics: with `--only` where they are others than those declared to be its own."""
    known = [topic for topic in sorted(topics) if topic in catalog.topics]
    only = [f"--only {topic}" for topic in known] if {*known} != {*catalog.stream(stream).topics} else []
    return " ".join((f"tidemark speed --stream {stream}", *only, *options))


def upto(pins: Mapping[str, Pin], topic: str) -> dict[str, int]:
    """How far a topic is read by these pins, by partition: the furthest, whichever streams have read it."""
    found: dict[str, int] = {}
    for pin in pins.values():
        for partition, offset in pin.offsets.get(topic, {}).items():
            found[partition] = max(offset, found.get(partition, 0))
    return found


def unread(pins: Mapping[str, Pin], ends: Mapping[str, Mapping[int, int]]) -> int:
    """Records below `ends` that no committed batch has read."""
    done = {topic: upto(pins, topic) for topic in ends}
    return sum(max(0, end - done[t].get(str(p), 0)) for t, parts in ends.items() for p, end in parts.items())


def beyond(pins: Mapping[str, Pin], file: File, end: Literal["lo", "hi"]) -> bool:
    """Whether a file holds a batch, its first or its last, that these pins have not read."""
    if not file.live:
        return False
    pin = pins.get(file.live["stream"])
    return pin is None or int(file.live[end]) > pin.seq


def pins(settings: Settings, named: Sequence[str]) -> dict[str, Pin]:
    """The pin of each stream that has one, the catalog's and all others that have a checkpoint.

    A new generation that has committed nothing yet pins at its start.
    """
    found, entered = {}, ledger(settings)
    for stream in streams(settings, named):
        checkpoint = Checkpoint.of(settings, stream)
        while True:  # until no generation was opened in between
            done, generation = entered.appended(stream), checkpoint.identity
            pin = checkpoint.pin(done)
            if checkpoint.identity == generation:
                break
        if pin:
            found[stream] = pin
        elif generation and generation.base:
            found[stream] = Pin(stream, generation.base - 1, generation.start, checkpoint.not_beyond(-1).isoformat())
    return found


def ledger_rows(settings: Settings, stream: str, since: int = -1) -> list[dict[str, Any]]:
    """The ledger of one stream, oldest batch first; only batches after `since`, whose files alone are opened."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = ledger(settings)
    if not table.exists:
        return []
    rows: list[dict[str, Any]] = []
    files, schema = table.files(), pa.schema(table.delta().schema())
    for file in files:
        if file.live and (file.live["stream"] != stream or int(file.live["hi"]) <= since):
            continue
        part = typed(table, file, schema)
        rows += part.filter(pc.and_(pc.equal(part["stream"], stream), pc.greater(part["seq"], since))).to_pylist()
    return sorted(rows, key=lambda r: (r["seq"], r["topic"], r["partition"]))


def entered_beyond(settings: Settings, logs: Mapping[str, Table]) -> list[dict[str, Any]]:
    """The ledger's rows of batches with records that these logs, by topic, do not have; of each topic oldest first.

    Whichever stream has read it, by the number that its log knows of that stream: what a person rewrites keeps it. Of the
    ledger's files those are opened that may have a later batch, and read whole where they name such a topic: a quiet topic's
    last batch may be long ago, and those of a day take 8 ms.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table, known = ledger(settings), dict[tuple[str, str], int]()

    def upto(topic: str, stream: str) -> int:
        if (topic, stream) not in known:
            at = logs[topic].appended(stream)
            known[topic, stream] = -1 if at is None else at
        return known[topic, stream]

    rows: list[dict[str, Any]] = []
    names = ["stream", "topic", "partition", "seq", "from_offset", "until_offset", "records", "finished_at"]
    schema = pa.schema([pa.schema(table.delta().schema()).field(name) for name in names])
    for file in table.files():
        asked = [t for t in logs if not file.live or int(file.live["hi"]) > upto(t, file.live["stream"])]
        if not asked:
            continue
        # In parts: what a person's OPTIMIZE has written may be a year.
        told = pq.ParquetFile(table.path / file.path, read_dictionary=["topic"])
        topics = {t for part in told.iter_batches(columns=["topic"]) for t in pc.unique(part["topic"]).to_pylist()}
        for batch in told.iter_batches(columns=names) if topics & {*asked} else ():
            part = pa.table(batch).select(names).cast(schema, safe=False)
            part = part.filter(pc.and_(pc.greater(part["records"], 0), pc.is_in(part["topic"], pa.array(asked))))
            for pair in part.group_by(["topic", "stream"]).aggregate([]).to_pylist():
                mine = pc.and_(pc.equal(part["topic"], pair["topic"]), pc.equal(part["stream"], pair["stream"]))
                rows += part.filter(pc.and_(mine, pc.greater(part["seq"], upto(**pair)))).to_pylist()
    return sorted(rows, key=lambda r: (r["topic"], r["finished_at"], r["seq"], r["partition"]))


def newest_batch(settings: Settings, stream: str) -> list[dict[str, Any]]:
    """The ledger's rows of a stream's newest batch; none before the first."""
    entered = ledger(settings).appended(stream)
    return ledger_rows(settings, stream, entered - 1) if entered is not None else []


@dataclass
class Run:
    """A settling or a replay: what it reads (pins), its days, why, and what became of each table.

    `state` goes running → staged → published (→ rolled back), or to failed, or to dropped, or to done, where mended rejects
    leave nothing to publish. `open_days` are days not over yet, of which a replay mends the rollups; `mended` are days not
    published yet that look at rejects which were accepted; `chunks` are the stretches of days that it computes one after the
    other, `parts` how many it reads a topic of Kafka in.
    """

    id: str
    state: str
    days: list[str]
    reason: str
    created: str
    version: str
    pins: dict[str, Pin] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    published: str | None = None
    note: str = ""
    kind: str = "settle"
    only: list[str] = field(default_factory=list)
    source: str = "log"
    open_days: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    chunks: list[list[str]] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    code: str = ""
    touched: str = ""

    @property
    def undecided(self) -> bool:
        """Staged and neither published nor dropped, or at work; a run that nobody has worked on for a day was killed."""
        young = datetime.now(UTC) - datetime.fromisoformat(self.touched or self.created) < timedelta(days=1)
        resumable = self.state == "running" or (self.kind == "replay" and self.state == "failed")
        return self.state == "staged" or (resumable and young)

    @property
    def visible(self) -> bool:
        """Whether readers see a table of it, be the rest held back, or its record cut off."""
        return any(said.get("published") for said in self.tables.values())

    def seen(self, name: str) -> bool:
        """Whether readers see a table, or one that reads it: a topic, which is judged too, is never published itself."""
        return any(said.get("published") for n, said in self.tables.items() if name in (n, *said.get("reads", ())))

    def publishable(self, since: datetime) -> bool:
        """Whether something of it may be published yet: undecided, or published in part or taken back, touched after `since`.

        `tables` tells of topics too, which are judged and never published: they have no rows of their own.
        """
        mine = (t for t in self.tables.values() if t.get("gate", "passed") != "passed" or t.get("rows") is not None)
        rest = [t for t in mine if not t.get("published")]
        kept = datetime.fromisoformat(self.touched or self.created) > since
        return self.undecided or (self.state in ("published", "rolled back") and bool(rest) and kept)

    def held_back(self, name: str) -> tuple[str, ...]:
        """Why a table is not published: its own gate, or that of something it reads; empty where nothing holds it."""
        said, failing = self.tables[name], self.failing(name)
        if failing and said.get("forced"):
            return tuple(reason for one in failing for reason in one["reasons"])
        return tuple(said["reasons"]) if failing else ()

    def failing(self, name: str) -> list[dict[str, Any]]:
        """What was said of the table, and of those it `reads`, however far, whose gate failed and was not published over."""
        read = (self.tables[n] for n in (name, *self.tables[name].get("reads", ())) if n in self.tables)
        return [t for t in read if t["gate"] == "failed" and not t.get("forced")]

    def behind(self, other: Run, stream: str) -> bool:
        """Whether another has read more of a stream; or as much and was begun later, by which time the code may have been mended,
        and rejects that this one has read as such."""
        mine, theirs = self.pins.get(stream), other.pins.get(stream)
        return bool(mine and theirs and (theirs.seq, other.created) > (mine.seq, self.created))

    @property
    def anew(self) -> str:
        """The commands that compute all its days again: of a run that is refused none is published."""
        if self.kind == "replay":
            return f"tidemark drop {self.id}, tidemark replay" if self.undecided else "tidemark replay"
        return f"tidemark settle {' '.join(f'--day {day}' for day in self.days)}"

    def days_of(self, declared: Declared) -> list[date]:
        """The days of a table that the run computes: of a rollup also those that are not over."""
        more = self.open_days if isinstance(declared, Rollup) else []
        return [date.fromisoformat(d) for d in (*self.days, *more)]


def save(settings: Settings, run: Run) -> None:
    """Write a run's record, whole or not at all."""
    path = settings.lake_path / "runs" / f"{run.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run.touched = datetime.now(UTC).isoformat()
    whole_or_nothing(path, json.dumps(asdict(run), indent=1, default=str), kept=True)


def disk_full(settings: Settings, error: BaseException) -> str | None:
    """The sentence of an error that a full disk caused, whoever met it: Python, Spark, Delta. None for any other."""
    if "No space left on device" not in f"{error} {error.__cause__} {error.__context__}":
        return None
    folders = (settings.lake_path, settings.checkpoints, settings.state, Path(tempfile.gettempdir()))
    places: dict[str, Path | int] = {str(folder): folder for folder in folders if folder.exists()}
    with suppress(OSError):  # it may be closed
        if stat.S_ISREG(os.fstat(1).st_mode):
            places["standard output"] = 1
    free = ", ".join(f"{name} {shutil.disk_usage(at).free / 2**20:.1f} MiB{no_inode(at)}" for name, at in places.items())
    return (
        f"No space left on device; free now: {free}. Free some space, then start it again: it goes on where it was, and nothing "
        "half-written is visible"
    )


def no_inode(place: Path | int) -> str:
    """What to add of a disk that has room, but for no more files; one that counts none (btrfs) has no such end."""
    disk = os.statvfs(place)
    return " but no inode (too many files)" if disk.f_files and not disk.f_favail else ""


def whole_or_nothing(path: Path, text: str, kept: bool = False) -> None:
    """Write a file that readers see whole or not at all; one that is `kept` is on the disk before it has its name."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(text)
        if kept:
            with part.open("r+") as file:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def plain(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def run_of(settings: Settings, name: str) -> Run:
    """A run's record. Raises `KeyError` with a sentence that says how to list them."""
    path = next((p for p in records(settings) if p.name == f"{name}.json"), None)  # a name may be none that a file can have
    if path is None:
        raise KeyError(f"there is no run {name}; list them with: tidemark runs")
    return as_run(path)


def as_run(path: Path) -> Run:
    try:
        text = path.read_text()
        said = json.loads(text)
        if "\\ud" in text:  # a record from before `plain` may have half a surrogate pair in its reason
            said = json.loads(plain(json.dumps(said, ensure_ascii=False)))
        run = Run(**{**said, "pins": {n: Pin(**p) for n, p in said["pins"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # JSON of another version, or of no run at all
        raise LakeError(
            f"{path} is damaged, it holds no run ({error}). Put it back from a copy of the lake, or move it away: what the run "
            f"has published stays, and cannot be taken back any more"
        ) from error
    if run.state == "running" and not run.undecided and is_held(path.with_name(f".{run.id}.lease")):
        run.touched = datetime.now(UTC).isoformat()
    return run


def told(path: Path, without: str = "nothing else is lost with it") -> Any:
    """What a file beside a run's record tells, as JSON. Raises `LakeError` where it is damaged: what there is `without`."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise LakeError(
            f"{path} is damaged ({error}). Put it back from a copy of the lake, or move it away: {without}"
        ) from error


LOOKS = 1.0
"""Seconds to wait for a lock that may be held by one who only looks whether it is (`is_held`), for a moment."""


def is_held(lease: Path) -> bool:
    """Whether somebody on this machine holds a lease; also for one who may only read it."""
    try:
        with lease.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # those who look do not take each other for the holder
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def lease_of(settings: Settings, run: str) -> Path:
    """The lease of whoever is at work on a run."""
    return settings.lake_path / "runs" / f".{run}.lease"


def records(settings: Settings) -> list[Path]:
    """The file of each run, which a folder of such a name is none."""
    return [path for path in (settings.lake_path / "runs").glob("*.json") if path.is_file()]


def read_runs(settings: Settings) -> tuple[list[Run], dict[str, LakeError]]:
    """Every run whose record can be read, oldest first, and by its name why another cannot."""
    found, damaged = list[Run](), dict[str, LakeError]()
    for path in records(settings):
        try:
            found.append(as_run(path))
        except LakeError as error:
            damaged[path.stem] = error
    return sorted(found, key=lambda r: r.created), damaged


def runs(settings: Settings) -> list[Run]:
    """Every run, oldest first. Raises `LakeError` for a damaged record: who decides by them asks for all."""
    found, damaged = read_runs(settings)
    refuse([*damaged.values()])
    return found


def runs_now(settings: Settings) -> tuple[list[Run], dict[str, LakeError]]:
    """`read_runs`, as people are told of them: one that nobody on this machine is at work on any more has failed."""
    found, damaged = read_runs(settings)
    for n, run in enumerate(found):
        # One that ended well while the records were read has let go only after that was in its record.
        if run.state == "running" and not is_held(lease_of(settings, run.id)):
            found[n] = run = run_of(settings, run.id)
            if run.state == "running":
                run.state, run.note = "failed", "; ".join(filter(None, (run.note, "it was cut off")))
    return found, damaged


def settled_days(settings: Settings, table: Table) -> set[date]:
    """Days of which the table has a publication, those that turned out empty included.

    A damaged record is as one that was moved away, which is its way out: what is live goes on.
    """
    days = {f.day for f in table.files() if f.run and f.day} if table.exists else set()
    name = table.name.split("/")[-1]
    for path in records(settings):
        at = path.stat()
        with suppress(LakeError):
            names, of = published_by(path, at.st_ino, at.st_mtime_ns, at.st_size)
            days |= of if name in names else set()
    return days


@lru_cache(maxsize=4096)
def published_by(path: Path, _inode: int, _changed_at: int, _size: int) -> tuple[frozenset[str], frozenset[date]]:
    """Which tables a run has published, and its days, from its record as it is now: every live swap asks for all of them."""
    run = as_run(path)
    names = (name for name, said in run.tables.items() if said.get("published"))
    return frozenset(names), frozenset(map(date.fromisoformat, run.days))


def reopened(settings: Settings, since: datetime, back: timedelta = timedelta(0)) -> date | None:
    """The earliest live day whose rollups a run has replaced or given back, or that looks at rejects it mended, since then; or
    whose publication was taken back: what came meanwhile in time for it, up to `back` after its end, no refresh has written into
    a settled day. A day more is for a stream that was behind. A damaged record is as one that was moved away."""
    found = list[str]()
    for path in records(settings):
        if path.stat().st_ctime > since.timestamp():  # when it came to its name; it was written a moment before
            with suppress(LakeError):
                run = as_run(path)
                found += run.open_days if run.state in ("published", "rolled back") else []
                found += run.mended if run.state != "running" else []  # whose rows may be on their way
                if run.state == "rolled back":
                    whole = datetime.fromisoformat(run.created) - back - timedelta(days=2)
                    found += [d for d in run.days if midnight(date.fromisoformat(d), settings.tz) > whole]
    return date.fromisoformat(min(found)) if found else None


def parting(settings: Settings, stream: str | None = None, known: Iterable[Run] | None = None) -> list[int]:
    """The pins, of one stream or of all, across which no file is merged: of each run (`known`, or all there are) of which
    something may be published yet. A file on both sides of one could not be replaced."""
    since = datetime.now(UTC) - duration(settings.rollback_for)
    waiting = (run for run in (runs(settings) if known is None else known) if run.publishable(since))
    return sorted({p.seq for run in waiting for name, p in run.pins.items() if stream in (None, name)})


@contextmanager
def pinning(settings: Settings) -> Iterator[None]:
    """Taking a pin and compacting exclude each other: a file merged across a pin could not be replaced by its run."""
    from filelock import FileLock

    settings.lake_path.mkdir(parents=True, exist_ok=True)
    with FileLock(settings.lake_path / ".pinning.lock"):
        yield


# ----------------------------------------------------------------------------------------------------- stage and publish


def staging(table: Table, run: str) -> Path:
    return table.path / "runs" / run


def staged_table(table: Table, run: str) -> Table:
    """What a run has staged of a table: a Delta table of its own."""
    return Table(table.root, f"{table.name}/runs/{run}", table.time)


def stage(table: Table, run: str, rows: DataFrame, number: int = 0) -> None:
    """Write a run's rows as a Delta table of its own below the table: anyone can read it there, readers of the table do not.

    `number` counts the run's chunks of this table: one that is there already is not written again.
    """
    from deltalake import DeltaTable

    own = staged_table(table, run)
    if not own.exists:
        schema = table.delta().schema()
        DeltaTable.create(own.path, schema, mode="ignore", partition_by=["day"], configuration=STAGED)
    if number > staged_upto(table, run):
        append(own, Batch(run, number, number), write_spark(own, f"chunk-{number}-{uuid.uuid4().hex[:8]}", rows, STAGING))


def staged_upto(table: Table, run: str) -> int:
    """The number of the last chunk that a run has staged of a table; -1 before the first."""
    found = staged_table(table, run).appended(run)
    return -1 if found is None else found


def staged(table: Table, run: str) -> list[Any]:
    """The add actions of a run's staged files, statistics included, as the outer table will have them.

    Raises `LakeError` where one is gone or the whole folder, which is there for no row too, or where entries of the log are, so
    that it names fewer than there are.
    """
    from deltalake.transaction import AddAction

    adds: dict[str, Any] = {}
    root, own = staging(table, run), staged_table(table, run)
    if not own.exists:
        raise LakeError(f"what run {run} staged of table {table.name} is gone; settle the days again")
    kept = {f.path for f in own.files()}  # first: a damaged entry is named
    for entry in sorted((root / "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                a = action["add"]
                adds[a["path"]] = AddAction(
                    f"runs/{run}/{a['path']}",
                    a["size"],
                    a["partitionValues"],
                    a["modificationTime"],
                    True,
                    a.get("stats") or "{}",
                )
            elif "remove" in action:
                adds.pop(action["remove"]["path"], None)
    if kept != set(map(unquote, adds)):
        raise LakeError(
            f"run {run} staged {len(kept)} files of table {table.name}, of which its log names {len(adds)}; settle the days again"
        )
    missing = [p for p in adds if not (root / unquote(p)).exists()]
    if missing:
        raise LakeError(f"run {run}: staged file {root / missing[0]} of table {table.name} is gone; settle the days again")
    return list(adds.values())


def staged_whole(table: Table, run: Run) -> list[Any]:
    """`staged`, of all rows that were judged: a Delta log of which somebody has moved the newest entry away tells of fewer."""
    adds, rows = staged(table, run.id), run.tables.get(table.name.split("/")[-1], {}).get("rows")
    there = sum(json.loads(add.stats).get("numRecords", 0) for add in adds)
    if rows is not None and rows != there:
        raise LakeError(f"run {run.id} staged {rows} rows of table {table.name}, and {there} are there; settle the days again")
    return adds


def replaced_by_now(
    table: Table,
    run: Run,
    adds: Iterable[Any],
    days: Iterable[date],
    streams: Iterable[str],
    whole_days: bool,
    known: Iterable[Run],
) -> list[File]:
    """The files that a run's publication replaces as the table is now. Raises `LakeError` as `publish` does, which asks again."""
    days, wanted, others = set(days), {unquote(a.path) for a in adds}, {r.id: r for r in known}
    pins = {s: run.pins[s] for s in streams if s in run.pins}

    def replaced(file: File) -> bool:
        if file.day not in days or file.path in wanted:
            return False
        if file.run:
            for stream, pin in pins.items():
                if (other := others.get(file.run)) and run.behind(other, stream):
                    raise LakeError(
                        f"run {run.id} has read stream {stream} up to batch {pin.seq}, but {file.day} of {table.name} "
                        f"was published by run {other.id} with batch {other.pins[stream].seq}; "
                        f"settle again: {run.anew}"
                    )
            return True
        if whole_days:
            return True
        if found := file.live:
            pin_of = pins.get(found["stream"])
            if pin_of is None or int(found["lo"]) > pin_of.seq:
                return False
            if int(found["hi"]) > pin_of.seq:
                raise LakeError(
                    f"file {file.path} of {table.name} holds batches on both sides of the pin {pin_of.seq} of run {run.id}; "
                    f"settle the day again: {run.anew}"
                )
            return True
        if all(file.modified < datetime.fromisoformat(p.taken).timestamp() * 1000 for p in pins.values()):
            return True
        raise LakeError(
            f"file {file.path} of {table.name} was written by someone else after the pin of run {run.id}; "
            f"settle the day again: {run.anew}"
        )

    gone = [f for f in table.files() if replaced(f)]
    refuse_vectors(table, table.delta(), list(map(remove_action, gone)))
    return gone


def publish(
    settings: Settings,
    table: Table,
    run: Run,
    days: Iterable[date],
    streams: Iterable[str],
    said: Mapping[str, Any],
    whole_days: bool,
    adds: Sequence[Any] | None = None,
) -> int | None:
    """Make a run's staged files the table's, in one metadata-only commit; None when they are already. `adds` are those files,
    where who calls has read them.

    Removes what they replace on each of the run's days: every file of the day (`whole_days`, a view), or earlier
    publications and the live files of batches that the run has read (a rollup). Readers see the old or the new. What was
    replaced is noted beside the run's record, so that `roll_back` can bring it back, and dated ahead for as long, so that
    VACUUM spares it.
    Raises `LakeError` when a day was published with a greater pin, or with the same by a run that was begun later, or a file
    cannot be told to lie before the pin.
    """
    adds = staged_whole(table, run) if adds is None else adds
    note, days, streams = replaced_note(settings, run.id, table), set(days), set(streams)

    def decide() -> tuple[list[Any], dict[str, Any]] | None:
        present = {f.path for f in table.files()}
        gone = replaced_by_now(table, run, adds, days, streams, whole_days, runs(settings))
        fresh = [a for a in adds if unquote(a.path) not in present]
        if not fresh and not gone:
            return None
        note.parent.mkdir(parents=True, exist_ok=True)
        # Killed behind its commit, and published again: what that one replaced comes back too.
        again = len(fresh) < len(adds) or empties(table, run.id)
        noted = replaced_by(settings, run.id, table) if again else []
        replaces = [*noted, *((f.path, f.day, f.modified) for f in gone)]
        whole_or_nothing(note, json.dumps([[path, str(day), at] for path, day, at in replaces]), kept=True)
        for file in gone:
            with suppress(FileNotFoundError):
                date_ahead(table.path / file.path, duration(settings.rollback_for))
        return [*fresh, *map(remove_action, gone)], dict(said)

    return commit(table, decide, turns=None if adds or empties(table, run.id) else f"{EMPTIES}{run.id}")


def empties(table: Table, run: str) -> bool:
    """Whether a run's publication of no row stands: no file tells of it, so a transaction counts its commits and roll-backs."""
    return (table.appended(f"{EMPTIES}{run}") or 0) % 2 == 1


def stands(table: Table, run: str) -> bool:
    """Whether a table has what a run has published."""
    return any(f.run == run for f in table.files()) or empties(table, run)


def publishing(settings: Settings, run_id: str) -> FileLock:
    """Held by whoever publishes a run, takes it back or drops it: all write its record. Raises `KeyError` for an unknown run."""
    from filelock import FileLock

    return FileLock(settings.lake_path / "runs" / f".{run_of(settings, run_id).id}.publishing")


def half_way(table: Table, decided: Iterable[Run]) -> list[Run]:
    """The runs whose publication was killed behind a table's commit: it stands, and their records do not say so."""
    name, standing = table.name.split("/")[-1], {f.run for f in table.files()}
    silent = [r for r in decided if name in r.tables and not r.tables[name].get("published")]
    return [r for r in silent if r.id in standing or empties(table, r.id)]


def note_published(settings: Settings, catalog: Catalog, run: Run) -> None:
    """Mark the tables that a publication has swapped in, and was killed before it said so: they name files of the run."""
    for declared in catalog.derived:
        said, one = run.tables.get(declared.name), table(settings, declared)
        if said is not None and one.exists and stands(one, run.id):
            said.setdefault("published", datetime.now(UTC).isoformat())


def replaced_note(settings: Settings, run: str, table: Table) -> Path:
    """Where a publication notes the files that it replaced in one table: `[[path, day, modified], …]`."""
    return settings.lake_path / "runs" / run / f"{table.name.split('/')[-1]}.replaced.json"


def replaced_by(settings: Settings, run: str, table: Table) -> list[tuple[str, date, int | None]]:
    """The files that a publication replaced in a table: path, day, and when it was modified, which older notes do not tell."""
    note = replaced_note(settings, run, table)
    rows = told(note, f"without it run {run} cannot be taken back") if note.exists() else []
    return [(path, date.fromisoformat(day), at[0] if at else None) for path, day, *at in rows]


def refuse_rollback(settings: Settings, table: Table, run: Run, days: Iterable[date]) -> list[tuple[str, date, int | None]]:
    """What would come back, as `replaced_by` gives it. Raises `LakeError` when a day was published again since, or a file is
    gone, or someone has rewritten what the run published, or nothing notes what it replaced, or a damaged record is of a run that
    may have published a day again."""
    name, days, files = table.name.split("/")[-1], set(days), table.files()
    back, (known, damaged) = replaced_by(settings, run.id, table), read_runs(settings)
    for other_id, error in damaged.items():
        if empties(table, other_id) or any(f.run == other_id and f.day in days for f in files):
            raise error
    for other in known:
        open_days = other.open_days if table.name.startswith("rollups/") else []
        again = days & {date.fromisoformat(d) for d in (*other.days, *open_days)}
        since = other.tables.get(name, {}).get("published", "")
        # Killed before it said when, this one may be marked later than what came after it, which has read more.
        after = since > run.tables[name].get("published", "") or any(run.behind(other, stream) for stream in run.pins)
        if other.id != run.id and again and since and after:
            raise LakeError(
                f"{min(again)} of {table.name} was published again by run {other.id}, after run {run.id}; "
                f"roll that one back first: tidemark rollback {other.id}"
            )
    held, ours = {f.path for f in files}, {path for path, *_ in back}
    if since := sorted({f.run for f in files if f.day in days and f.run not in (None, run.id) and f.path not in ours}):
        first = f"roll that one back first: tidemark rollback {since[0]}"
        gone = f"whose record is gone, so that it cannot be taken back. Settle the days again: {run.anew}"
        way = first if since[0] in {other.id for other in known} else gone
        raise LakeError(f"{table.name} was published again by run {since[0]}, after run {run.id}; {way}")
    if stands(table, run.id) and not (note := replaced_note(settings, run.id, table)).exists():
        raise LakeError(
            f"{note} is gone, which says what run {run.id} replaced in {table.name}, so nothing could come back. Put it back "
            f"from a copy of the lake, or settle the days again: {run.anew}"
        )
    theirs = [f.path for f in files if f.foreign and f.day in days]
    if theirs and not {unquote(a.path) for a in staged(table, run.id)} <= held:
        raise LakeError(
            f"what run {run.id} published in {table.name} was rewritten by someone else since, {theirs[0]} the first of it, and "
            f"would stay beside what comes back. Settle the days again: {run.anew}"
        )
    if any(path not in held for path, *_ in back) and not stands(table, run.id):
        if run.tables[name].get("going_back"):  # killed behind its commit; what had come back has been merged since
            return []
        raise LakeError(
            f"what run {run.id} published in {table.name} is replaced since, by whom nobody knows any more, and what was there "
            f"before it would come in its place. Settle the days again: {run.anew}"
        )
    lost = [path for path, *_ in back if not (table.path / path).exists()]
    if lost:
        raise LakeError(
            f"{len(lost)} files that run {run.id} replaced in {table.name} are deleted, {lost[0]} the first of them; "
            f"what was there before cannot come back. Settle the days again: {run.anew}"
        )
    return back


def roll_back(settings: Settings, table: Table, run: Run, days: Iterable[date], said: Mapping[str, Any]) -> int | None:
    """The swap of a publication, backwards, in one commit: its files go, those that it replaced come back.

    None when that is done already. Raises `LakeError` as `refuse_rollback` does.
    """
    days = set(days)

    def decide() -> tuple[list[Any], dict[str, Any]] | None:
        # Asked anew each time: another run may just have published, and what comes back would stand beside that.
        back = refuse_rollback(settings, table, run, days)
        files = table.files()
        present = {f.path for f in files}
        ours = [remove_action(f) for f in files if f.run == run.id]
        again = [add_action(table, table.path / path, day, at) for path, day, at in back if path not in present]
        return ([*again, *ours], dict(said)) if again or ours else None

    return commit(table, decide, turns=f"{EMPTIES}{run.id}" if empties(table, run.id) else None)


# ------------------------------------------------------------------------------------------------------- compact, sweep


def compact(
    spark: SparkSession, settings: Settings, table: Table, merge: Callable[[DataFrame], DataFrame] | None, upto: Mapping[str, int]
) -> int:
    """Merge a table's small live files, beside the stream and beside runs. Returns how many files fewer it has; where that is not
    none there may be more to merge, since a call merges 128 MB: a day that a stream has caught up with in minutes is gigabytes.

    Takes files of batches up to `upto` of each stream (what the checkpoint has committed), grouped by day and never
    across a pin that parts files (`parting`), nor in a log across one of a run of the day before: the names of files tell then
    what of a day's first minutes came too late for it. Files of like size merge, so each byte is rewritten a logarithmic number
    of times.
    """
    from pyspark.sql import functions as F

    fewer, left_to_merge = 0, MERGED_AT_ONCE
    with pinning(settings):
        known, before = runs(settings), dict[date, set[int]]()
        pins = parting(settings, known=known)
        for run in (r for r in known if r.visible and table.name.startswith("log/")):
            for settled in run.days:
                following = date.fromisoformat(settled) + timedelta(days=1)
                before.setdefault(following, set()).update(pin.seq for pin in run.pins.values())
        groups: dict[tuple[str, date, int], list[File]] = {}
        left = vectored(table, table.delta())
        for file in table.files():
            if file.path not in left and (found := file.live) and int(found["hi"]) <= upto.get(found["stream"], -1) and file.day:
                side = sum(int(found["lo"]) > pin for pin in {*pins, *before.get(file.day, ())})
                groups.setdefault((found["stream"], file.day, side), []).append(file)
        for (stream, day, _), files in groups.items():
            chosen = alike(files)
            if len(chosen) < WORTH_MERGING or not (chosen := first_of(chosen, left_to_merge)):
                continue
            left_to_merge -= sum(f.size for f in chosen)
            span = [int(f.live[k]) for f in chosen if f.live for k in ("lo", "hi")]
            batch = Batch(stream, min(span), max(span))
            rows = read(spark, table, files=chosen)
            merged = (merge(rows) if merge else rows.drop("day")).coalesce(1)
            merged = merged.sortWithinPartitions(table.time) if table.time else merged
            adds = write_spark(table, batch.folder, merged.withColumn("day", F.lit(day)))
            failpoint("compaction")
            fewer += swap(table, chosen, adds, {"compact": [batch.lo, batch.hi], "day": str(day)}) or 0
    return fewer


def swap(table: Table, gone: Sequence[File], adds: Sequence[Any], said: Mapping[str, Any]) -> int | None:
    """Replace chosen files by others; returns how many files fewer. None, and nothing happens, when one is gone by now."""

    def decide() -> tuple[list[Any], dict[str, Any]] | None:
        present = {f.path for f in table.files()}
        if not {f.path for f in gone} <= present:
            return None
        return [*adds, *map(remove_action, gone)], dict(said)

    return len(gone) - len(adds) if commit(table, decide) is not None else None


def alike(files: Sequence[File]) -> list[File]:
    """The small files that are worth merging: from the smallest up, as long as the next is no larger than all before."""
    chosen: list[File] = []
    for file in sorted((f for f in files if f.size < LARGEST_MERGED), key=lambda f: f.size):
        if len(chosen) >= WORTH_MERGING and file.size > sum(f.size for f in chosen):
            break
        chosen.append(file)
    return chosen


def first_of(files: Sequence[File], size: int) -> list[File]:
    """The first of live files by their batches, of so many bytes at most; none where that is but one."""
    ordered = sorted(files, key=lambda f: int(f.live["lo"]) if f.live else 0)
    found = [f for f, upto in zip(ordered, accumulate(f.size for f in ordered), strict=True) if upto <= size]
    return found if len(found) > 1 else []


def sweep(settings: Settings, tables: Iterable[Table], now: datetime | None = None) -> list[Path]:
    """Delete folders that neither a table's history nor an undecided run names, when older than the settings say.

    What the history still names stays, so that time travel keeps its promise, and so does what a publication replaced
    that can still be rolled back, and for as long what was staged and not published with the rest, or rolled back: a person
    may publish it yet. What nothing names any more goes. Raises `LakeError` at the end where the log of a table is damaged, of
    which nothing is deleted.
    """
    now = now or datetime.now(UTC)
    limit, since = now - duration(settings.sweep_after), now - duration(settings.rollback_for)
    known = runs(settings)
    undecided = {r.id for r in known if r.undecided}
    # Of a publication that was killed half-way nothing says when; its run is undecided still.
    back = [r for r in known if r.undecided or (r.published and datetime.fromisoformat(r.published) > since)]
    decided = [r for r in known if r.state in ("published", "rolled back")]
    yet = {r.id for r in decided if datetime.fromisoformat(r.touched or r.created) > since}
    gone, damaged = list[Path](), list[LakeError]()
    for table in tables:
        if not table.exists:
            continue
        with noted(damaged):
            named = named_folders(table)
            log_table = table.name.startswith("log/")  # of which nothing is ever published
            spared, killed = (undecided, []) if log_table else (undecided | yet, half_way(table, decided))
            for run in (*back, *killed):
                named |= {"/".join(path.split("/")[:2]) for path, *_ in replaced_by(settings, run.id, table)}
            for folder in [f for kind in ("live", "runs", "mended") for f in (table.path / kind).glob("*")]:
                key = f"{folder.parent.name}/{folder.name}"
                old = datetime.fromtimestamp(folder.stat().st_mtime, UTC) < limit
                if old and key not in named and folder.name not in spared:
                    shutil.rmtree(folder)
                    gone.append(folder)
    refuse(damaged)
    return gone


def expire(table: Table, before: date, ledger: Table | None = None) -> int:
    """Take the days before `before` out of a table, in one commit; returns how many files. VACUUM or `sweep` deletes them.

    Of a log, with the `ledger` that tells of it, a batch that is not entered yet waits for the next time: its stream, which is at
    it or was killed in it, rolls it from the log. And the log tells from then on what it has let go, for when `keep` is longer.
    """
    gone: list[File] = []
    appended = cache(ledger.appended) if ledger else None  # opened once a stream, and not for each file

    def begun(file: File) -> bool:
        if appended is None or not file.live:
            return False
        entered = appended(file.live["stream"])
        return entered is None or int(file.live["hi"]) > entered

    def decide() -> tuple[list[Any], dict[str, Any]] | None:
        gone[:] = [f for f in table.files() if f.day and f.day < before and not begun(f)]
        return (list(map(remove_action, gone)), {"expired before": str(before)}) if gone else None

    if not table.exists:
        return 0
    if ledger and decide():  # before they go: else a kill in between would leave nobody who knows
        table.tell({EXPIRED_BEFORE: str(before)}, lambda: table.expired_before < before)
    return len(gone) if commit(table, decide) is not None else 0


def kept_from(settings: Settings, topic: Topic, now: datetime | None = None) -> date:
    """The first business day that a topic's log still keeps, swept or not, and has not let go under a shorter `keep`; the first
    of all days where none has expired and none will."""
    by_keep = ((now or datetime.now(UTC)).astimezone(settings.tz) - duration(topic.keep)).date() if topic.keep else date.min
    return max(by_keep, table(settings, topic).expired_before)


def lets_go(settings: Settings, topic: Topic) -> bool:
    """Whether days of a topic's log expire, or have."""
    return kept_from(settings, topic) > date.min


def expire_all(settings: Settings, catalog: Catalog, now: datetime | None = None) -> None:
    """Take out what is kept no longer: log days beyond a topic's `keep`; verdicts, runs' records and checkpoints set aside
    beyond `keep_records`, but no run that is undecided. The ledger is kept as long as every log is of which it tells. What a run
    that is at work may read yet waits for the next time: it would stage what has expired meanwhile as empty days. So does a
    batch that is not in the ledger yet, and a table whose log is damaged, for which it raises `LakeError` at the end. In another
    business zone than the days', where `keep` would end hours too soon, it raises it at once."""
    refuse_other_zone(settings, catalog.topics.values())
    now = now or datetime.now(UTC)
    limit, keeps = now - duration(settings.keep_records), [topic.keep for topic in catalog.topics.values()]
    known, folder, damaged = runs(settings), settings.lake_path / "runs", list[LakeError]()
    if not any(run.undecided and run.state != "staged" for run in known):
        for topic in catalog.topics.values():
            with noted(damaged):
                if topic.keep:
                    expire(table(settings, topic), kept_from(settings, topic, now), ledger(settings))
        others = {log.parent.name for log in settings.lake_path.glob("log/*/_delta_log")} - catalog.topics.keys()
        if all(keeps) and not others:  # a log stays whose topic is declared no more
            with noted(damaged):
                expire(ledger(settings), min([limit, *(now - duration(keep) for keep in keeps if keep)]).date())
    with noted(damaged):
        expire(verdicts(settings), limit.date())
    for run in known:
        if datetime.fromisoformat(run.created) < limit and not run.undecided:
            for name in (f"{run.id}.json", f"{run.id}.verdicts", f".{run.id}.lease", f".{run.id}.publishing"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / run.id, ignore_errors=True)
    for aside in settings.checkpoints.glob("*.before-*"):
        if (found := ASIDE.fullmatch(aside.name)) and int(found["at"]) < limit.timestamp():
            shutil.rmtree(aside)
    refuse(damaged)


def drop(settings: Settings, catalog: Catalog, run: Run) -> None:
    """Give a run up: its staged files are deleted, its record stays. Nothing that readers see changes, nor what they go back to:
    where it was published and taken back, `sweep` deletes its files once the table's history names them no more.

    Raises `LakeError` for a run that readers see, and for one that somebody works on: it would go on without what is gone.
    """
    from filelock import FileLock, Timeout

    with publishing(settings, run.id):
        run = run_of(settings, run.id)
        note_published(settings, catalog, run)
        # Of a table that no pipeline declares any more nothing is taken back, nor is anything of it deleted here.
        if run.published or any(run.tables[name].get("published") for name in run.tables.keys() & set(catalog.names)):
            raise LakeError(f"run {run.id} is published; take it back first: tidemark rollback {run.id}")
        try:
            with FileLock(lease_of(settings, run.id), timeout=LOOKS):  # nor may anybody begin meanwhile
                for one in (table(settings, catalog[name]) for name in catalog.names):
                    folder = staging(one, run.id)
                    if folder.exists() and not (one.exists and f"runs/{run.id}" in named_folders(one)):
                        shutil.rmtree(folder)
                run.state = "dropped"
                save(settings, run)
        except Timeout:
            raise LakeError(f"run {run.id} is being worked on; end that first (Ctrl-C), then: tidemark drop {run.id}") from None


def named_folders(table: Table) -> set[str]:
    """The first two path segments of every file that the table's log still names, added or removed.

    What the stream's clean-up takes away meanwhile is named by the checkpoint that let it: where there is a newer one by the end,
    everything is read again.
    """
    import pyarrow.parquet as pq

    table.delta()
    named: set[str] = set()
    checkpoints = sorted((table.path / "_delta_log").glob("*.checkpoint*.parquet"))
    for entry in (table.path / "_delta_log").glob("*.json"):
        try:
            actions = [json.loads(line) for line in entry.read_text().splitlines()]
        except FileNotFoundError:
            continue
        except ValueError as error:
            if checkpoints and entry.stem <= checkpoints[-1].name.split(".")[0]:
                continue  # cut by a power cut; the checkpoint names its files, those that were removed since as well
            raise LakeError(table.damage(entry, error)) from None
        for action in actions:
            for kind in ("add", "remove"):
                if kind in action:
                    named.add("/".join(unquote(action[kind]["path"]).split("/")[:2]))
    for checkpoint in checkpoints:
        with suppress(FileNotFoundError):
            # Not `read_table`: it gives the nested column another name.
            columns = pq.ParquetFile(checkpoint).read(columns=["add.path", "remove.path"])
            for rows in (columns["add"].to_pylist(), columns["remove"].to_pylist()):
                named |= {"/".join(unquote(r["path"]).split("/")[:2]) for r in rows if r and r["path"]}
    newer = {*(table.path / "_delta_log").glob("*.checkpoint*.parquet")}.difference(checkpoints)
    return named | named_folders(table) if newer else named


# ---------------------------------------------------------------------------------------------------------------- read


def beside(table: Table, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """What a table holds, in these columns, of the days and the times of some rows: at least that. By Arrow, without Spark."""
    import pyarrow as pa
    import pyarrow.compute as pc

    days, schema = set(pc.unique(rows["day"]).to_pylist()), pa.schema(rows.schema.field(c) for c in columns)
    instants = bool(table.time) and pa.types.is_timestamp(rows[table.time].type)
    low, high = pc.min_max(rows[table.time]).as_py().values() if instants else (None, None)
    found = [schema.empty_table()]
    for file in table.files():
        if file.day in days and file.meets(low, high + timedelta.resolution if high else None):
            part = typed(table, file, schema)
            if "day" in columns:
                part = part.append_column("day", pa.array([file.day] * part.num_rows, pa.date32()))
            found.append(part.select(columns).cast(schema))
    return pa.concat_tables(found)


def read(
    spark: SparkSession,
    table: Table,
    *,
    days: Iterable[date] | None = None,
    low: datetime | None = None,
    high: datetime | None = None,
    files: Sequence[File] | None = None,
) -> DataFrame:
    """One snapshot of a table as a frame, `day` last. Files that lie outside `days` or `[low, high)` are not opened.

    Pruning leaves rows outside the bounds in: who asks for a period filters by it. Read by Spark from delta-rs' file
    list, which saves 250 ms a read; a table that someone gave deletion vectors or column mapping is read by delta-spark.
    """
    import pyarrow as pa
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    delta = table.delta()
    if delta.protocol().min_reader_version > 1:
        frame = spark.read.format("delta").load(str(table.path))
        if files is not None:
            path = F.regexp_extract(F.col("_metadata.file_path"), f"^.*/{re.escape(table.name)}/(.+)$", 1)
            frame = frame.where(path.isin([f.path for f in files]))
        return frame.where(F.col("day").isin(list(days))) if days is not None else frame
    schema = StructType.fromJson(json.loads(delta.schema().to_json()))
    inside = StructType([f for f in schema.fields if f.name != "day"])
    wanted = set(days) if days is not None else None
    chosen = [
        f for f in (files if files is not None else table.files()) if (wanted is None or f.day in wanted) and f.meets(low, high)
    ]
    if not chosen:
        return spark.createDataFrame(pa.schema(delta.schema()).empty_table(), schema)
    # A path is one file's, whatever its signs: none is a pattern.
    there = spark.read.schema(inside).options(recursiveFileLookup="true", __globPaths__="false")
    frame = there.parquet(*(str(table.path / f.path) for f in chosen))
    if len(of := {f.day for f in chosen}) == 1:
        return frame.withColumn("day", F.lit(of.pop()).cast("date"))
    # Cut out of the path for each row: a regular expression takes three times as long.
    folder = F.substring_index(F.col("_metadata.file_path"), "day=", -1)
    return frame.withColumn("day", F.to_date(F.left(folder, F.lit(len("2026-11-18")))))


def millisecond(at: datetime) -> datetime:
    """An instant without its microseconds: Spark's statistics cut them off a file's bounds."""
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


def comparable(bound: Any, like: datetime) -> datetime:
    """A file's bound as an instant: statistics give TIMESTAMPs with or without a zone, and DATEs (their whole day counts)."""
    if isinstance(bound, datetime):
        return bound if bound.tzinfo else bound.replace(tzinfo=UTC)
    return like


def overview(settings: Settings, catalog: Catalog) -> tuple[list[dict[str, Any]], list[LakeError]]:
    """Each table that exists: name, kind, version, files, bytes, rows (of files that say so), days; why one cannot be read."""
    known = [(d.name, d.table.split("/")[0], table(settings, d)) for d in map(catalog.__getitem__, catalog.names)]
    found, damaged = list[dict[str, Any]](), list[LakeError]()
    for name, kind, one in [*known, ("ledger", "ledger", ledger(settings)), ("verdicts", "verdicts", verdicts(settings))]:
        with noted(damaged):
            if one.exists:
                files = one.files()
                found.append(
                    {
                        "name": name,
                        "kind": kind,
                        "version": one.delta().version(),
                        "files": len(files),
                        "bytes": sum(f.size for f in files),
                        "rows": sum(f.rows for f in files),
                        "days": len({f.day for f in files}),
                    }
                )
    return found, damaged
