"""A period, again: read the log up to a pin, compute, stage, judge exactly what was staged, compare, and publish.

`settle` needs Spark and changes nothing that a reader sees. `publish` needs no Spark and is one commit a table.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import structlog

from tidemark import __version__, compare, fold, kafka, lake, local, quality, query, session
from tidemark.local import Lease
from tidemark.model import (
    OLDEST,
    Catalog,
    DeclarationError,
    Declared,
    Rollup,
    Topic,
    View,
    comment,
    duration,
    fingerprint,
    is_table,
    looking_at,
    midnight,
    needed,
    readers,
    remembered,
    row_of,
    streams_of,
)

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemark.settings import Settings

log = structlog.get_logger()

Progress = Callable[[str], None]
Run = lake.Run


MIB = 1024 * 1024
KEPT = 64 * MIB
"""A staged table of at most so many bytes is read once, and not once for each check."""
PART = 2_000_000
"""So many records of a log DuckDB counts at once."""
LARGE = 500_000
"""A day with so many records of a topic is read by itself."""
MONTH = 31
"""So many days at most in a plan that each makes longer."""
AT_ONCE = 2_000_000
"""So many records a task puts into sets."""
PARTITIONS = "spark.sql.shuffle.partitions"
LONG = {"log": 5_000_000, "kafka": 500_000}
"""From so many records on, by where they are read, a JVM that optimizes earns what it costs: to judge a million from Kafka again
takes 91 CPU-seconds without it, 48 with it; thirty days of 2,450,000 in the log take a fifteenth more with it."""
COMPUTING = ("fold", "functions", "kafka", "lake", "model", "pipelines/*", "session", "settle")
"""The files by which a row is computed, whatever its table; what pipelines share stands among them."""
START, RECORDS_A_SECOND = 30.0, 10_000.0
"""What a run takes on two cores, about: seconds before it computes, and records it computes a second."""


TOLD = """
    WITH batches AS (
        SELECT l.* FROM ledger l JOIN pins ON l.stream = pins.stream AND l.seq <= pins.seq LEFT JOIN kept USING (topic, partition)
        WHERE from_offset >= coalesce(low, 0)
    ),
    near AS (
        SELECT topic, stream, seq FROM batches JOIN seen USING (topic, partition)
        WHERE from_offset <= high AND until_offset > low
        UNION
        SELECT topic, stream, seq FROM batches JOIN spans USING (topic) WHERE started_at >= since AND started_at < until
    ),
    ends AS (SELECT topic, stream, min(seq) AS lo, max(seq) AS hi FROM near GROUP BY ALL),
    bounds AS (
        SELECT topic, partition, min(from_offset) AS first, max(until_offset) AS last
        FROM batches JOIN ends USING (topic, stream) WHERE seq BETWEEN lo AND hi GROUP BY ALL
    )
    SELECT topic, partition, stream, first, last, sum(until_offset - from_offset - coalesce(gaps, 0))::BIGINT AS offsets,
           min(seq) AS lo, max(seq) AS hi
    FROM batches JOIN bounds USING (topic, partition) WHERE from_offset >= first AND until_offset <= last
    GROUP BY ALL ORDER BY topic, partition"""
"""What the ledger says of the batches from the first to the last that hold a record of the days, or that were read in them: of
those every partition is counted, so that one whose records are all gone from the log is missed too. Where a topic changed its
stream within, the batches of both from the first offset to the last. None that may hold what `keep` has let expire."""


class SettleError(RuntimeError):
    """A settling or a publication refuses; the sentence names the day, the run or the table, and the way out."""


@dataclass(frozen=True)
class Published:
    """What became of one table of a run: the version its commit made (None where nothing was to do) and its cost."""

    table: str
    version: int | None
    files: int
    seconds: float
    blocked: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------- settling


def settle(
    settings: Settings,
    catalog: Catalog,
    days: Sequence[date],
    reason: str,
    progress: Progress = lambda _: None,
    only: Sequence[str] = (),
) -> Run:
    """Compute days again from the log up to a pin, stage every rollup and view, judge and compare them; publish nothing.

    `days` are business days of the settings' zone, each over and completely read by the stream; they need not follow each
    other. `only` names rollups and views: they and what reads them are computed, not the rest. Returns the run's record
    with the gate of each table. Raises `SettleError` for a day that is not over, not read, or no longer in a log that the tables
    look at, or when no stream has run.
    A table whose function raises fails its gate and blocks what reads it; the others go on.
    """
    days = sorted(set(days))
    refuse_days(settings, days)
    refuse_expired(settings, catalog, readers(catalog, only or catalog.names), days)
    with lake.pinning(settings):
        pins = pinned(settings, catalog)
        refuse_unread(settings, catalog, readers(catalog, only) if only else catalog.names, days, pins)
        refuse_unpinned(settings, catalog, readers(catalog, only or catalog.names), days, pins)
        run = new_run(settings, "settle", days, reason, pins, only=sorted(only))
        run.chunks = chunks_of(settings, catalog, days)
        lake.save(settings, run)
    return work(settings, catalog, run, progress)


def night(
    settings: Settings, catalog: Catalog, days: Sequence[date], reason: str, progress: Progress = lambda _: None
) -> list[Run]:
    """What a night settles: its own day, which is the newest, and those before it that got late records or were missed.

    All in one run; where a table of it is held back that one is dropped, and the night's day settled in a run of its own, those
    before it in another: neither is held back, nor taken for good, by what only the other fails. Returns the runs to publish, the
    night's own first. Raises as `settle` does.
    """
    run = settle(settings, catalog, days, reason, progress)
    held = [d.name for d in catalog.derived if d.name in run.tables and run.held_back(d.name)]
    if len(run.days) == 1 or not held:
        return [run]
    run.note = f"it would hold back {', '.join(held)}: {max(days)} is settled apart from the days before it"
    progress(f"run {run.id} is dropped, since {run.note}")
    lake.save(settings, run)
    lake.drop(settings, catalog, run)
    runs = list[Run]()
    try:
        for some in ([max(days)], sorted({*days} - {max(days)})):
            runs.append(settle(settings, catalog, some, reason, progress))
    except BaseException:  # nobody is told of the first, and the night's next try settles all again
        for run in runs:
            lake.drop(settings, catalog, run)
        raise
    return runs


def replay(
    settings: Settings,
    catalog: Catalog,
    reason: str,
    progress: Progress = lambda _: None,
    *,
    source: Literal["kafka", "log"] = "kafka",
    only: Sequence[str] = (),
    first: date | None = None,
    last: date | None = None,
    name: str | None = None,
    alone: bool = False,
) -> Run:
    """Every day from offset zero again, beside the live stream: computed, staged, judged, compared; nothing published.

    Reads Kafka itself while it holds offset zero, by a consumer group of its own; compacted topics, and topics whose first
    records have left Kafka, are read from the log. Days that a log no longer holds are left as they are, and that is said.
    Days that are not over have their rollups mended too, so that what is live rests on them. `name` names the run: one of
    that name that was cut off goes on after its last chunk, one that is done is returned as it is. Raises `SettleError` when
    an offset is missing, naming topic, partition and range; when the code is not that of the run so far; when a stream still
    runs other code; with `alone`, while another replay is undecided.
    """
    if name and (known := next((r for r in lake.runs(settings) if r.id == name), None)):
        refuse_dropped(known)
        return resume(settings, catalog, known, progress)
    chosen = [catalog[n] for n in readers(catalog, only or catalog.names)]
    refuse_other_code(settings, chosen)
    with lake.pinning(settings):
        if name and any(r.id == name for r in lake.runs(settings)):
            raise SettleError(f"run {name} was begun by another process meanwhile; give the same command again to go on with it")
        if alone:
            refuse_undecided(settings, name)
        pins = pinned(settings, catalog)
        since, why = held_from(settings, catalog, [d.name for d in chosen])
        asked = days_held(settings, catalog, chosen)
        asked = [d for d in asked if (first is None or d >= first) and (last is None or d <= last)]
        held = [d for d in asked if d >= since]
        if not held:
            raise SettleError("the log holds no day of that span, so there is nothing to replay; list them with: tidemark tables")
        refuse_unpinned(settings, catalog, [d.name for d in chosen], held, pins)
        over = [d for d in held if d <= yesterday(settings)]
        run = new_run(settings, "replay", over, reason, pins, only=sorted(only), source=source, name=name)
        run.open_days = [str(d) for d in held if d > yesterday(settings)]
        run.chunks = chunks_of(settings, catalog, over)
        run.code = code_of(chosen)
        if held != asked:
            progress(why)
            run.note = why
        lake.save(settings, run)
    return work(settings, catalog, run, progress)


def settle_rejects(settings: Settings, catalog: Catalog, reason: str, progress: Progress = lambda _: None) -> Run | None:
    """Judge every reject again by the code of now; those that are accepted get their rows in log and rollups. Their days
    that are over are settled, and every published day that looks at them; those that are not published yet are computed again
    live. Returns the run to publish; None where no settled day has changed.

    A record is mended once: it is no reject afterwards. Cut off and done again, it finishes: the days are noted first, and
    a rollup's rows merge. Days of which a run was dropped or taken back, and that none has settled since, are settled too.
    Raises `SettleError` while a replay is undecided.
    """
    refuse_undecided(settings)
    spark = session.session(settings, "tidemark-rejects")
    days, mended, last = set[date](), set[date](), yesterday(settings)
    cut_off = [r for r in lake.runs(settings) if r.kind == "rejects" and r.state in ("running", "failed")]
    for former in cut_off:
        mended |= {date.fromisoformat(d) for d in former.mended}
        days |= {date.fromisoformat(d) for d in former.days} | mended
    since, why = held_from(settings, catalog, catalog.names)
    days |= {d for d in given_up(lake.runs(settings)) if d >= since}
    with ExitStack() as at_work:
        with lake.pinning(settings):
            refuse_undecided(settings)  # one may have begun while Spark did
            pins = pinned(settings, catalog)
            found = {t.name: mendable(spark, settings, t, pins) for t in catalog.topics.values() if lake.upto(pins, t.name)}
            known, kept = lake.runs(settings), datetime.now(UTC) - duration(settings.rollback_for)
            under_way, may_come = days_of(r for r in known if r.undecided), days_of(r for r in known if r.publishable(kept))
            newest, nights = (
                pins_of(newest_runs(catalog, known)),
                {*missed(settings, catalog), *may_come, last, last + timedelta(days=1)},
            )
            live: Pinned = {name: dict.fromkeys(nights - published.keys(), pins) for name, published in newest.items()}
            for name, rejects in found.items():
                looking, waiting = (days_looking(settings, catalog, catalog.topics[name], of) for of in (newest, live))
                for r in (r for held in rejects.values() for r in held):
                    days |= {r["day"], *(d for d, _ in looking(r["low"], r["high"]))}
                    waits = {d for d, _ in waiting(r["low"], r["high"])}
                    # A night under way has computed without it, and is refused once this run has its days too.
                    days, mended = days | waits & under_way, mended | waits
            if not days:
                progress("no reject is accepted by the code of now")
                return None
            if min(days) < since:
                progress(why)
            over = sorted(d for d in days if since <= d <= last)
            refuse_unpinned(settings, catalog, catalog.names, over, pins)
            run = new_run(settings, "rejects", over, reason, pins)
            run.mended = [str(d) for d in sorted(mended | {d for d in days if d > last})]
            run.chunks = chunks_of(settings, catalog, over)
            at_work.enter_context(lease(settings, run))
            lake.save(settings, run)
            try:
                for name, rejects in found.items():
                    for group in groups(settings, lake.table(settings, catalog[name]), rejects):
                        mend(spark, settings, catalog, catalog.topics[name], group, progress)
            except Exception as error:
                run.state, run.note = "failed", " ".join(str(error).split())[:1000]
                lake.save(settings, run)
                raise
        if over:
            computed(settings, catalog, run, progress)
        else:
            run.state, run.note = "done", "only days that are not over, which are live, or that have expired were touched"
            progress(f"there is nothing to publish: {run.note}")
            lake.save(settings, run)
    for former in (lake.run_of(settings, r.id) for r in cut_off):
        if former.state in ("running", "failed"):  # else it was not cut off, but at work in another process
            former.state, former.note = "dropped", f"its days are in run {run.id}"
            lake.save(settings, former)
    return run if over else None


def given_up(known: Sequence[Run]) -> set[date]:
    """Days whose rejects were accepted by a run that was dropped or rolled back, and that nobody has settled since: no file of
    the log tells a night that they have changed."""
    found = set[str]()
    for former in (r for r in known if r.kind == "rejects" and r.state in ("dropped", "rolled back")):
        later = (r for r in known if r.created > former.created and r.state in ("staged", "published") and not r.only)
        found |= {*former.days}.difference(*(r.days for r in later))
    return {date.fromisoformat(d) for d in found}


def mendable(
    spark: SparkSession, settings: Settings, topic: Topic, pins: Mapping[str, lake.Pin]
) -> dict[str, list[dict[str, Any]]]:
    """The files of a log, up to the pin, with rejects that the code of now accepts; and of each the days of those, with their
    earliest and latest time: `day`, `low`, `high`."""
    from pyspark.sql import functions as F

    table = lake.table(settings, topic)
    if not table.exists:
        return {}
    files = [f for f in table.files() if not lake.beyond(pins, f, "hi")]
    rejects = lake.read(spark, table, files=files).where(F.col("reject").isNotNull())
    # The name of the file goes through the judge as one header more.
    file = F.struct(F.lit("file").alias("key"), F.input_file_name().cast("binary").alias("value"))
    none = F.array().cast(fold.HEADERS)
    tagged = rejects.select("kafka.*", F.array(file).alias("_file"))
    again = fold.judged(topic, tagged.withColumn("headers", F.concat(F.coalesce("headers", none), "_file")))
    name = F.element_at("kafka.headers", -1)["value"].cast("string")
    at = F.col("event_time")
    days = (
        again.where(F.col("reject").isNull())
        .groupBy(name.alias("file"), "day")
        .agg(F.min(at).alias("low"), F.max(at).alias("high"))
    )
    found: dict[str, list[dict[str, Any]]] = {}
    known = {f.path for f in files}
    for row in days.toArrow().to_pylist():
        path = unquote(row["file"]).split(f"{table.path}/", 1)[1]
        found.setdefault(path if path in known else row["file"], []).append(row)
    return found


def groups(settings: Settings, table: lake.Table, rejects: Collection[str]) -> list[list[lake.File]]:
    """A log's files that are rewritten together: never across a pin that parts files, as compaction does not either."""
    marks = lake.parting(settings)
    apart: dict[Any, list[lake.File]] = {}
    for file in table.files():
        if file.path in rejects:
            side = (file.live["stream"], sum(int(file.live["lo"]) > pin for pin in marks)) if file.live else None
            apart.setdefault(side, []).append(file)
    return list(apart.values())


def raised(owner: str, error: Exception, of: str = "") -> str:
    return f"{owner}: its function raised {type(error).__name__}{of}: {' '.join(str(error).split())[:500]}"


def mend(
    spark: SparkSession, settings: Settings, catalog: Catalog, topic: Topic, files: Sequence[lake.File], progress: Progress
) -> None:
    """Rewrite files of a log with their rejects judged again, after adding the accepted ones' rows to the rollups."""
    from pyspark.sql import functions as F

    table = lake.table(settings, topic)
    rows = lake.read(spark, table, files=files)
    again = fold.judged(topic, rows.where(F.col("reject").isNotNull()).select("kafka.*")).drop("event_time").persist()
    accepted = again.where(F.col("reject").isNull())
    spans = [int(f.live[k]) for f in files if f.live for k in ("lo", "hi")]
    folder = (
        lake.Batch(files[0].live["stream"], min(spans), max(spans)).folder
        if files[0].live and len(spans) == 2 * len(files)
        else f"mended/{uuid.uuid4().hex[:8]}"
    )
    said = {"rejects judged again": topic.name}
    # Where no name tells the batch `publish` asks when a file is of: what these rows hold was in the log by then.
    since, rolled = max(f.modified for f in files), dict[lake.Table, list[Any]]()
    for rollup in catalog.rollups.values():
        if topic.name not in {t.name for t in rollup.topics.values()}:
            continue
        outer = lake.table(settings, rollup)
        events = {
            p: fold.accepted(t, accepted) if t.name == topic.name else fold.empty(spark, t) for p, t in rollup.topics.items()
        }
        try:
            rolled[outer] = lake.write_spark(outer, folder, fold.roll(rollup, events).coalesce(1), modified=since)
        except Exception as error:
            if isinstance(error, OSError | DeclarationError) or lake.disk_full(settings, error):
                raise
            why = raised(f"rollup {rollup.name}", error, f" of rejects of {topic.name} that are accepted now")
            raise SettleError(
                f"{why}. They stay rejects until it is mended; then run it again: tidemark settle --rejects"
            ) from error
    for outer, adds in rolled.items():  # of each or of none
        lake.swap(outer, [], adds, said)
    columns = [f.name for f in table.delta().schema().fields]
    whole = rows.where(F.col("reject").isNull()).select(*columns).unionByName(again.select(*columns)).coalesce(1)
    adds = lake.write_spark(table, folder, whole)
    lake.failpoint("mended")
    if lake.swap(table, files, adds, said) is None:
        raise lake.LakeError(f"table {table.name} was rewritten meanwhile; run it again: tidemark settle --rejects")
    progress(f"{topic.name}: {accepted.count()} rejects accepted now, {len(files)} files rewritten")
    again.unpersist()


def resume(settings: Settings, catalog: Catalog, run: Run, progress: Progress = lambda _: None) -> Run:
    """Go on with a replay that was cut off or failed, after its last chunk; one that is staged already is returned."""
    if run.state not in ("running", "failed") or run.kind != "replay":
        return run
    if run.code != code_of([catalog[n] for n in readers(catalog, run.only or catalog.names)]):
        raise SettleError(f"run {run.id} began with other code; drop it and begin again: tidemark drop {run.id}")
    since, why = held_from(settings, catalog, readers(catalog, run.only or catalog.names))
    if not run.undecided and min(run.days, default=str(since)) < str(since):  # while it is, nothing expires
        raise SettleError(f"{why}. Drop run {run.id} and begin again: tidemark drop {run.id}")
    progress(f"going on with run {run.id}")
    run.note = ""
    return work(settings, catalog, run, progress)


def lease(settings: Settings, run: Run) -> Lease:
    """What whoever works on a run holds. To end streams and broker would not end who holds it."""
    way = "Leave it at work, or end it where it was started (Ctrl-C), then give the same command again"
    return Lease(lake.lease_of(settings, run.id), way)


def work(settings: Settings, catalog: Catalog, run: Run, progress: Progress) -> Run:
    """Compute a run until it is staged, and keep its record true, whatever ends it. One that another process has finished, or
    dropped, since it was read is left as it is."""
    with lease(settings, run):
        return computed(settings, catalog, run, progress)


def computed(settings: Settings, catalog: Catalog, run: Run, progress: Progress) -> Run:
    """The same for who has the run's lease. Raises `LakeError` in another business zone than the logs' days are of."""
    lake.refuse_other_zone(settings, catalog.topics.values())  # one that goes on was pinned in what may have been another
    progress(f"run {run.id}: pinned at {', '.join(f'{p.stream} batch {p.seq}' for p in run.pins.values())}")
    if (found := lake.run_of(settings, run.id)).state not in ("running", "failed"):
        refuse_dropped(found)
        return found
    run.state = "running"
    lake.save(settings, run)
    try:
        Settling(settings, catalog, run, progress).work()
    except KeyboardInterrupt:
        run.state = "running" if run.kind == "replay" else "failed"
        run.note = "interrupted"
        lake.save(settings, run)
        raise KeyboardInterrupt(cut_off(run)) from None
    except BaseException as error:
        run.state, run.note = "failed", " ".join(str(error).split())[:1000]
        lake.save(settings, run)
        raise
    run.state = "staged"
    lake.save(settings, run)
    return run


def cut_off(run: Run) -> str:
    """What a run leaves that was interrupted, and the command that follows."""
    if run.kind == "rejects":
        return f"run {run.id} was interrupted; what it has accepted stays so, and the rest is done by: tidemark settle --rejects"
    goes_on = f"it goes on with: tidemark replay --run {run.id}"
    follows = goes_on if run.kind == "replay" else "there is nothing to undo: give the same command again"
    return f"run {run.id} was interrupted; nothing that readers see has changed, and {follows}"


def new_run(
    settings: Settings,
    kind: str,
    days: Sequence[date],
    reason: str,
    pins: dict[str, lake.Pin],
    name: str | None = None,
    **more: Any,
) -> Run:
    now = datetime.now(UTC)
    return Run(
        id=name or f"{kind}-{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}",
        state="running",
        days=[str(d) for d in days],
        reason=lake.plain(reason),
        created=now.isoformat(),
        version=__version__,
        pins=pins,
        kind=kind,
        **more,
    )


def pinned(settings: Settings, catalog: Catalog) -> dict[str, lake.Pin]:
    lake.refuse_empty(settings)
    lake.refuse_other_zone(settings, catalog.topics.values())
    pins = lake.pins(settings, catalog.streams)
    if not pins:
        raise SettleError("no stream has committed a batch yet, so there is nothing to settle; start it with: tidemark up")
    return pins


def refuse_days(settings: Settings, days: Sequence[date]) -> None:
    if not days:
        raise SettleError("no day to settle was given")
    for day in days:
        if day < OLDEST:
            raise SettleError(f"{day} lies before the year {OLDEST.year}, and an event of then is a reject")
        end = period(settings, day)[1]
        if end > datetime.now(UTC):
            raise SettleError(f"{day} is not over in {settings.zone}; the last day that can be settled is {yesterday(settings)}")


def held_from(settings: Settings, catalog: Catalog, names: Collection[str]) -> tuple[date, str]:
    """The first day of which the logs keep all that these tables look at, and why it is that one, as a sentence.

    What lies before cannot be computed again: the few records that came late for it would replace its rows. Yesterday can,
    unless it has expired itself, however far a view looks back.
    """
    found = [(date.min, "")]
    for topic in catalog.topics.values():
        looking = {*looking_at(catalog, topic)} & {*names}
        if looking and (kept := lake.kept_from(settings, topic)) > date.min:
            gone = period(settings, kept)[0] - timedelta(microseconds=1)
            spans = compare.rows_looking(settings, catalog, topic)(gone, gone)
            whole = max(spans[name][1] for name in looking).astimezone(settings.tz).date() + timedelta(days=1)
            first = min(whole, max(kept, yesterday(settings)))
            keeps = f"keeps {topic.keep}" if topic.keep else f"has nothing of before {kept}"
            enough = f"the log of {topic.name} {keeps}, which is enough for {', '.join(sorted(looking))} from {first} on"
            found.append((first, f"{enough}; before, readers keep what they have"))
    return max(found)


def refuse_expired(settings: Settings, catalog: Catalog, names: Collection[str], days: Sequence[date]) -> None:
    """Raises `SettleError` for days that a log which these tables look at no longer holds."""
    since, why = held_from(settings, catalog, names)
    if gone := [d for d in days if d < since]:
        raise SettleError(f"{why}. Leave out {compare.stretch_in_words([str(d) for d in gone])}, or name other tables: --only")


def refuse_unpinned(
    settings: Settings, catalog: Catalog, names: Collection[str], days: Collection[date], pins: Mapping[str, lake.Pin]
) -> None:
    """Raises `SettleError` where these tables look at a topic that no pin has, and its log holds records of the days: a run would
    read none of them, and publish the days without."""
    for topic in (catalog.topics[name] for name in sorted(needed(catalog, names) & catalog.topics.keys())):
        log = lake.table(settings, topic)
        if not lake.upto(pins, topic.name) and log.exists and any(f.day in days for f in log.files()):
            raise SettleError(
                f"no checkpoint says how far topic {topic.name} is read, of which the log has records: start the stream that "
                f"reads it (tidemark up), or where its checkpoint is lost: tidemark speed --stream {topic.stream} --recover, "
                f"or as the stream was started, with its --stream and --only. Or name other tables: --only"
            )


def refuse_unread(
    settings: Settings, catalog: Catalog, names: Collection[str], days: Sequence[date], pins: Mapping[str, lake.Pin]
) -> None:
    """Raises `SettleError` when the streams have not read what Kafka held, of topics that these tables look at, at the end of the
    last day. Where no broker answers the log is taken as it is."""
    try:
        lacks = unread_of(settings, catalog, names, days[-1], pins, timedelta(0))
    except kafka.BrokerAway as away:
        log.warning("cannot ask Kafka whether the day is complete; the log is taken as it is", because=str(away))
        return
    if lacks:
        raise SettleError(f"{lacks}; wait until it has (tidemark status), then settle again, or name other tables: --only")


def lacking(settings: Settings, catalog: Catalog, day: date) -> str | None:
    """What a day lacks to be complete, as a sentence; None when the streams have read what Kafka held once the day, the
    views' lookahead after it and `nightly_after` were over. Where no broker answers, that is what it lacks."""
    if (over := complete_at(settings, catalog, day)) > datetime.now(UTC):
        return f"late records of {day} are waited for until {over:%Y-%m-%d %H:%M} UTC"
    pins = lake.pins(settings, catalog.streams)
    if not pins:
        return "no stream has committed a batch yet; start it with: tidemark up"
    try:
        return unread_of(settings, catalog, catalog.names, day, pins, duration(settings.nightly_after))
    except kafka.BrokerAway as away:
        return str(away)


def complete_at(settings: Settings, catalog: Catalog, day: date) -> datetime:
    """Until when late records of a day are waited for: the day, what its views look ahead and `nightly_after` are over."""
    return looked_at_until(settings, catalog, catalog.names, day) + duration(settings.nightly_after)


def newest_complete(settings: Settings, catalog: Catalog) -> date:
    """The newest business day of which no late records are waited for any more."""
    day = yesterday(settings)
    while complete_at(settings, catalog, day) > datetime.now(UTC):
        day -= timedelta(days=1)
    return day


def looked_at_until(settings: Settings, catalog: Catalog, names: Collection[str], day: date) -> datetime:
    """Up to where a day's rows look, of these tables those of the view that looks furthest ahead."""
    looking = needed(catalog, names)
    ahead = max((duration(v.lookahead) for v in catalog.views.values() if v.name in looking), default=timedelta(0))
    return fold.looked_at_until(period(settings, day)[1], ahead)


def unread_of(
    settings: Settings, catalog: Catalog, names: Collection[str], day: date, pins: Mapping[str, lake.Pin], grace: timedelta
) -> str | None:
    """What the streams have not read of what Kafka held, of the topics that these tables look at, at a day's end, and a grace and
    their lookahead after it.

    While these are not over, at the day's end alone: of what comes this very moment a stream has never read everything, and what
    comes after a pin settles again what looks at it. A topic that Kafka does not have holds nothing. Raises `BrokerAway`.
    """
    end = looked_at_until(settings, catalog, names, day) + grace
    if end > datetime.now(UTC):
        end = period(settings, day)[1]
    there = kafka.topic_ids_held(settings, needed(catalog, names) & catalog.topics.keys())
    for topic, parts in kafka.offsets(settings, there, end).items():
        if behind := lake.unread(pins, {topic: parts}):
            return f"the stream has not yet read {behind} records of {topic} that Kafka held at the end of {day}"
    return None


def stale(settings: Settings, catalog: Catalog) -> list[date]:
    """Published days whose inputs have changed past the pin of a table that looks at them: records came late for them, or for
    what they look at.

    Told by the names of the log's files: a file's batches, its day, its earliest and latest time. Those alone are read that hold
    batches on both sides of a pin, as compaction leaves them, or have other names, as a person's OPTIMIZE has made them since.
    A change that came late for a table, or for who joins with its changes, may be looked at from its day on for ever. What a
    day has read of a view's earlier days has seen no more than they had, however new its own pin (`overtaken`).
    Without the days that a log no longer holds, of whatever table: a night settles all.
    """
    known, found = lake.runs(settings), set[date]()
    published = newest_runs(catalog, known)
    newest, rests = pins_of(published), overtaken(settings, catalog, known, published)
    since, _ = held_from(settings, catalog, catalog.names)
    for topic in catalog.topics.values():
        table, looking = lake.table(settings, topic), days_looking(settings, catalog, topic, newest, rests)
        for file in table.files() if table.exists else ():
            if not (file.live or file.foreign) or file.day is None:
                continue
            start, end = period(settings, file.day)
            last = end - timedelta(microseconds=1)
            low = start if file.low is None else lake.comparable(file.low, start)
            high = last if file.high is None else min(last, lake.comparable(file.high, last))
            spans: dict[int, Span | None] = {}  # days of one run have the very same pins
            for day, pins in looking(low, high):
                if day in found:
                    continue
                if id(pins) not in spans:
                    spans[id(pins)] = unread_span(table, file, topic, pins, (low, high))
                span = spans[id(pins)]
                if span == (low, high) or (span and (day, pins) in looking(*span)):
                    found.add(day)
    return sorted(d for d in found if d >= since)


def unread_span(table: lake.Table, file: lake.File, topic: Topic, pins: Mapping[str, lake.Pin], span: Span) -> Span | None:
    """From when to when the accepted events are that these pins have not read, of a log's file that has events of `span`; None
    where it has none such.

    A file is read where its name tells of batches on both sides of a pin, or, since someone else wrote it after, of none. One
    that cannot be read here, or whose event time is no column, may have them anywhere.
    """
    if not pins or lake.beyond(pins, file, "lo"):
        return span
    if file.live and not lake.beyond(pins, file, "hi"):
        return None
    if file.foreign and all(file.modified < datetime.fromisoformat(p.taken).timestamp() * 1000 for p in pins.values()):
        return None
    try:
        count, low, high = unread_by_duckdb(table, file, lake.upto(pins, topic.name))
    except query.QueryError:
        return span
    return (lake.comparable(low, span[0]), lake.comparable(high, span[1])) if count else None


def unread_by_duckdb(table: lake.Table, file: lake.File, read: Mapping[str, int]) -> tuple[int, Any, Any]:
    """How many accepted records of a log's file lie past what is read, by partition, and the first and the last of their times
    where these are a column. Raises `QueryError` for a table that DuckDB does not read."""
    times = {f.name: query.duckdb_type(table.name, lake.kind(f)) for f in table.delta().schema().fields if f.name == table.time}
    column = f'log."{table.time}"' if times else "NULL"
    upto = ", ".join(f"({int(p)}, {int(until)})" for p, until in read.items())
    asked = f"""
        SELECT count(*) AS count, min(moment) AS low, max(moment) AS high
        FROM (
            SELECT log.kafka.partition AS part, log.kafka."offset" AS place, {column} AS moment FROM {{log}} WHERE reject IS NULL
        )
        LEFT JOIN (VALUES {upto}) AS pins(part, until) USING (part) WHERE place >= coalesce(until, 0)"""
    (found,) = of_log_by_duckdb(table, [file], asked, times)
    return found["count"], found["low"], found["high"]


def of_log_by_duckdb(
    table: lake.Table,
    files: Sequence[lake.File],
    asked: str,
    more: Mapping[str, str] | None = None,
    whole: str = "FROM parts",
    db: duckdb.DuckDBPyConnection | None = None,
) -> list[Row]:
    """The answer to a query of `{log}`: `kafka` and `reject` of some files of a log, and `more` columns by their types. Instants
    are UTC. It is asked of `PART` records at once, and `whole` of all its answers, which are the table `parts`: in one go DuckDB
    has no room for the groups of a day of 80 million. A caller's `db` keeps them for its next files. Raises `QueryError` for a
    table that DuckDB does not read."""
    import duckdb

    query.refuse_unreadable(table.name, table.delta())
    types = {"kafka": 'STRUCT(partition INTEGER, "offset" BIGINT)', "reject": "VARCHAR"}  # else all is read that Kafka had
    with ExitStack() as opened:
        if db is None:
            db = opened.enter_context(duckdb.connect())
            query.bounded(db)
        try:
            db.execute("SET TimeZone = 'UTC'")
            for some in parts(files):
                rows = query.parquet((table.path / f.path for f in some), {**types, **(more or {})})
                found = asked.replace("{log}", f"{rows} AS log")
                db.execute(f"CREATE TEMP TABLE IF NOT EXISTS parts AS {found} WITH NO DATA")
                db.execute(f"INSERT INTO parts {found}")
            return db.sql(whole).to_arrow_table().to_pylist()
        except duckdb.Error as error:
            raise query.QueryError(f"{table.name} cannot be read: {error}") from None


def parts(files: Sequence[lake.File]) -> Iterator[list[lake.File]]:
    """Files by about `PART` records, in their order; one that has more stands alone."""
    some, rows = list[lake.File](), 0
    for file in files:
        if some and rows + file.rows > PART:
            yield some
            some, rows = [], 0
        some.append(file)
        rows += file.rows
    yield some


Pinned = dict[str, dict[date, Mapping[str, lake.Pin]]]
"""By rollup and view the pins of each day that was published, of the newest run that has published it."""
Rests = dict[str, dict[date, list[tuple[date, Mapping[str, lake.Pin]]]]]
"""By view and day the later days of views that rest on its rows of before, with the pins of those rows: none of live ones."""


def days_looking(
    settings: Settings, catalog: Catalog, topic: Topic, newest: Pinned, rests: Rests | None = None
) -> Callable[[datetime, datetime], list[tuple[date, Mapping[str, lake.Pin]]]]:
    """What gives the published days of each table that may look at a topic's events from one time to another, with their pins;
    and those that rest on rows which do."""
    rows = compare.rows_looking(settings, catalog, topic)
    read = {n: {d: pins for d, pins in newest[n].items() if lake.upto(pins, topic.name)} for n in looking_at(catalog, topic)}
    for_ever = {n for n in read if topic.name in remembered(catalog[n])}

    def looking(low: datetime, high: datetime) -> list[tuple[date, Mapping[str, lake.Pin]]]:
        found = []
        for name, span in rows(low, high).items():
            first, until = compare.days_that_look(settings.tz, low, span)
            near = {first + timedelta(days=n) for n in range((until - first).days + 1)}
            near |= {d for d in read[name] if d >= first} if name in for_ever else set()
            found += [(d, read[name][d]) for d in near & read[name].keys()]
            of_name = rests.get(name, {}) if rests else {}
            found += [one for d in near & of_name.keys() for one in of_name[d] if not one[1] or lake.upto(one[1], topic.name)]
        return found

    return looking


def pins_of(newest: Mapping[str, Mapping[date, Run]]) -> Pinned:
    return {name: {d: run.pins for d, run in days.items()} for name, days in newest.items()}


def newest_runs(catalog: Catalog, runs: Sequence[Run]) -> dict[str, dict[date, Run]]:
    """By rollup and view the newest of these runs that has published each day.

    A table that its gate held back, in a night's run that was not dropped, waits for a person, and counts as published.
    """
    newest: dict[str, dict[date, Run]] = {d.name: {} for d in catalog.derived}
    for run in runs:  # oldest first, and none is published over a greater pin
        if run.visible or (run.kind == "settle" and run.state == "staged"):
            for name in newest.keys() & run.tables.keys():
                if run.tables[name].get("published") or run.held_back(name):
                    newest[name] |= {date.fromisoformat(d): run for d in run.days}
    return newest


def overtaken(settings: Settings, catalog: Catalog, runs: Sequence[Run], newest: Mapping[str, Mapping[date, Run]]) -> Rests:
    """The days of views that have read earlier days of a view which were published, or taken back, after their run, of the
    `newest`, had begun.

    Outside its run's days a view reads of another what is published by then, or live rows where nothing is. None looks ahead at
    a view.
    """
    found = Rests()
    for view in catalog.views.values():
        looking, publications = compare.rows_looking(settings, catalog, view), dict[date, list[tuple[str, Run]]]()
        gone = dict[date, list[tuple[str, str]]]()  # when a run began whose publication was taken back, and when it was
        for run in runs:
            said = run.tables.get(view.name, {})
            for d in map(date.fromisoformat, run.days):
                if at := said.get("published"):
                    publications.setdefault(d, []).append((at, run))
                elif at := said.get("rolled_back"):
                    gone.setdefault(d, []).append((run.created, at))
        for day in publications.keys() | gone.keys():
            start, end = period(settings, day)
            published = publications.get(day, [])
            for name, (_, last) in looking(start, end - timedelta(microseconds=1)).items():
                for n in range((last.astimezone(settings.tz).date() - day).days):
                    mine = newest[name].get(later := day + timedelta(days=n + 1))
                    if not mine or str(day) in mine.days:
                        continue
                    # It may have read a publication that was made after it was begun, and before it was published itself.
                    until = mine.tables[name].get("published", mine.touched)
                    taken_back = any(began < until and mine.created < at for began, at in gone.get(day, ()))
                    if taken_back or any(at > mine.created for at, _ in published):
                        before = [run.pins for at, run in published if at <= mine.created and not taken_back]
                        found.setdefault(view.name, {}).setdefault(day, []).append((later, before[-1] if before else {}))
    return found


def missed(settings: Settings, catalog: Catalog) -> list[date]:
    """Days before yesterday, and after the first that was published, of which tables have rows and that no run has taken: Airflow
    was away at night. Those too that runs have taken without a table which was published before and has rows of them, or have
    published but for it: its pipeline was taken out meanwhile, or it had another name; and whose rejects were mended without it.
    What lies before the first is left to a person, as are days so old that the records of their runs have expired, and what a log
    no longer holds as it is."""
    runs = lake.runs(settings)
    whole, taking = [run for run in runs if not run.only and run.visible], [run for run in runs if takes(settings, catalog, run)]
    newest, taken = newest_runs(catalog, runs), days_of(taking)
    first = min(days_of(whole), default=date.max)
    found = {d for d in {*days_held(settings, catalog, catalog.derived)} - taken if d > first}
    for declared in catalog.derived:
        begun = min(days_of(r for r in whole if r.tables.get(declared.name, {}).get("published")), default=date.max)
        # A run may have computed it and published the others: it was in no pipeline by then.
        waits = (r for r in taking if not r.tables or (declared.name in r.tables and r.state != "published"))
        mine = days_of(waits) | newest[declared.name].keys()
        if without := {d for d in taken - mine if d > begun}:
            found |= without & {*days_held(settings, catalog, [declared])}
    found |= mended_without(settings, catalog, runs, newest)
    since, _ = held_from(settings, catalog, catalog.names)
    told = (datetime.now(UTC) - duration(settings.keep_records)).astimezone(settings.tz).date()
    return sorted(d for d in found if max(since, told) <= d < yesterday(settings))


def mended_without(
    settings: Settings, catalog: Catalog, runs: Sequence[Run], newest: Mapping[str, Mapping[date, Run]]
) -> set[date]:
    """Published days of tables that look at what mended rejects have changed, by a run that had not these tables: no file of a
    log tells it, for what is mended keeps the batches that it came in."""
    found = set[date]()
    for run in (r for r in runs if r.kind == "rejects" and r.visible):
        before: Pinned = {
            name: {d: r.pins for d, r in days.items() if name not in run.tables and r.created < run.created}
            for name, days in newest.items()
        }
        for topic in catalog.topics.values() if any(before.values()) else ():
            looking = days_looking(settings, catalog, topic, before)
            for start, end in (period(settings, day) for day in days_of([run])):
                found |= {d for d, _ in looking(start, end - timedelta(microseconds=1))}
    return found


def days_of(runs: Iterable[Run]) -> set[date]:
    return {date.fromisoformat(d) for run in runs for d in run.days}


def takes(settings: Settings, catalog: Catalog, run: Run) -> bool:
    """Whether a run of all tables leaves none of its days to a night: also where it failed or a gate did, for that was told.

    One that was dropped or killed takes none, a replay those that are published or wait for a decision. A settling of today
    counts once all of it is published: a night that is cleared settles the same days again.
    """
    if run.only or (run.state in ("dropped", "running") and not run.undecided):
        return False
    if run.kind != "settle":
        return run.undecided or run.published is not None
    derived = [said for name, said in run.tables.items() if name not in catalog.topics]
    whole = run.published is not None and all(said.get("published") for said in derived)
    return whole or datetime.fromisoformat(run.created) < period(settings, yesterday(settings))[1]


def refuse_other_code(settings: Settings, chosen: Sequence[Declared]) -> None:
    """What a stream adds after the pin must be of the same code as what the replay computes up to it."""
    for declared in chosen:
        if not isinstance(declared, Rollup):
            continue
        stream, runs_with = live_code(settings, declared)
        if runs_with and runs_with != fingerprint(declared):
            if local.status(settings, stream)["heartbeat"]["state"] == "starting":
                raise SettleError(
                    f"stream {stream} is starting, and by which code it rolls {declared.name} is not known yet; give the command "
                    f"again once tidemark status says that it is running"
                )
            raise SettleError(
                f"stream {stream} still runs {declared.name} as it was before it was changed, and would go on adding "
                f"such rows; restart it (tidemark down, tidemark up), then replay"
            )


def refuse_code_since(settings: Settings, catalog: Catalog, run: Run) -> None:
    """Of a replay that waited while code was changed the rows would stand among rows of other code: of a rollup those that its
    stream adds, of a view those of every later day. One that has begun to be published is finished all the same."""
    if run.visible:
        return
    computed = dict(item.split(":") for item in run.code.split(",") if item)
    for declared in catalog.derived:
        stream, runs_with = live_code(settings, declared) if isinstance(declared, Rollup) else ("", None)
        was, now = computed.get(declared.name), runs_with or fingerprint(declared)
        if was and was != now:
            adds = f"stream {stream} adds rows" if stream else "later days are"
            raise SettleError(
                f"run {run.id} computed {declared.name} as it was before it was changed, and {adds} of the code of now: the two "
                f"would be mixed. Drop it and replay again: tidemark drop {run.id}, then tidemark replay. Where a log "
                f"holds its days no more: put the pipeline's file back as it was, restart its stream, and publish"
            )


def live_code(settings: Settings, rollup: Rollup) -> tuple[str, str | None]:
    """The stream that adds to a rollup, and the fingerprint of the code that it does so by; None where it does not run."""
    stream = lake.reader(settings, next(iter(rollup.topics.values())))
    return stream, local.status(settings, stream).get("code", {}).get(rollup.name) if local.beats(settings, stream) else None


def refuse_undecided(settings: Settings, name: str | None = None) -> None:
    """Another replay would be compared with what the one that waits replaces; and of a day that is not over this one would
    replace what mended rejects have added since by what it computed without them. `name` is the run's own."""
    if other := next((r for r in lake.runs(settings) if r.kind == "replay" and r.undecided and r.id != name), None):
        waits = f"waits for a decision; publish or drop it first: tidemark publish {other.id}"
        stays = f"is not done; let it end, go on with it or drop it first: tidemark replay --run {other.id}"
        raise SettleError(
            f"run {other.id} ({other.state}: {other.reason}) {waits if other.state == 'staged' else stays}, "
            f"or tidemark drop {other.id}"
        )


def refuse_dropped(run: Run) -> None:
    if run.state == "dropped":
        way = "replay again as another run: leave out --run, or trigger `reprocess` anew"
        way = way if run.kind == "replay" else f"settle again: {run.anew}"
        raise SettleError(f"run {run.id} was dropped, and what it staged is gone; {way}")


def topics_of(catalog: Catalog, declared: Declared) -> list[Topic]:
    """The topics that a declaration looks at, however far, itself included."""
    return [catalog.topics[n] for n in sorted(needed(catalog, [declared.name])) if n in catalog.topics]


def code_of(chosen: Sequence[Declared]) -> str:
    """The fingerprint of each table, and as `*` that of what computes them all: a replay goes on by the code it began with."""
    import pyspark

    files = sorted(file for name in COMPUTING for file in Path(__file__).parent.glob(f"{name}.py"))
    said = b"\n".join([pyspark.__version__.encode(), *(file.read_bytes() for file in files)])
    all_of_them = f"*:{hashlib.sha256(said).hexdigest()[:12]}"
    return ",".join([all_of_them, *sorted(f"{d.name}:{fingerprint(d)}" for d in chosen)])


def days_held(settings: Settings, catalog: Catalog, chosen: Sequence[Declared]) -> list[date]:
    """Every day of which the logs hold a record or a chosen table a row, and each quiet one that is over of which a chosen table
    has rows all the same: it looks back at a record, as far as the files say when that was, or reads a table as of its day."""
    topics = [catalog.topics[n] for n in needed(catalog, [d.name for d in chosen]) if n in catalog.topics]
    held = {d.name: t.files() for d in (*topics, *chosen) if (t := lake.table(settings, d)).exists}
    found, last = {f.day for files in held.values() for f in files if f.day}, yesterday(settings)
    for topic in topics:
        files = [(f.day, f.high) for f in held.get(topic.name, []) if f.day]
        if any(topic.name in remembered(d) for d in chosen):
            spans = {(min(day for day, _ in files), last)} if files else set()
        else:
            names = {*looking_at(catalog, topic)} & {d.name for d in chosen}
            rows = compare.rows_looking(settings, catalog, topic)
            highs = [(day, lake.comparable(high, high)) for day, high in files if isinstance(high, datetime)]
            spans = {(day, max(rows(high, high)[n][1] for n in names).astimezone(settings.tz).date()) for day, high in highs}
        for first, until in spans:
            found |= {first + timedelta(days=n) for n in range((min(until, last) - first).days + 1)}
    return sorted(found)


def estimate(settings: Settings, catalog: Catalog, only: Sequence[str], first: date | None) -> tuple[int, int, float]:
    """What a replay would compute: days, records, and about how many seconds, about."""
    chosen = [catalog[n] for n in readers(catalog, only or catalog.names)]
    since = max(first or date.min, held_from(settings, catalog, [d.name for d in chosen])[0])
    days = [d for d in days_held(settings, catalog, chosen) if d >= since]
    records = records_of(settings, catalog, needed(catalog, [d.name for d in chosen]), days)
    return len(days), records, START + records / RECORDS_A_SECOND


def records_of(settings: Settings, catalog: Catalog, names: Collection[str], days: Collection[date]) -> int:
    """How many records the logs of these topics hold of some days, late ones and rejects included; without Spark."""
    logs, asked = [lake.table(settings, t) for t in catalog.topics.values() if t.name in names], set(days)
    return sum(f.rows for t in logs if t.exists for f in t.files() if f.day in asked)


def chunks_of(settings: Settings, catalog: Catalog, days: Sequence[date]) -> list[list[str]]:
    """Days as chunks that are computed at once, `[first, last]`: they follow each other, and hold about `chunk_records`.

    A view that reads a table is asked day by day: then a chunk is a month at most, for each day makes its plan longer.
    """
    longest = MONTH if any(is_table(s) for v in catalog.views.values() for s in v.reads.values()) else 10_000
    records: dict[date | None, int] = {}
    for topic in catalog.topics.values():
        if (one := lake.table(settings, topic)).exists:
            for file in one.files():
                records[file.day] = records.get(file.day, 0) + file.rows
    chunks: list[list[str]] = []
    held = 0
    for first, last in compare.stretches(days):
        for day in (first + timedelta(days=n) for n in range((last - first).days + 1)):
            full = held + records.get(day, 0) > settings.chunk_records
            if day == first or full or (day - date.fromisoformat(chunks[-1][0])).days >= longest:
                chunks.append([str(day), str(day)])
                held = 0
            chunks[-1][1] = str(day)
            held += records.get(day, 0)
    return chunks


def period(settings: Settings, day: date, last: date | None = None) -> tuple[datetime, datetime]:
    """A business day, or several to `last`, as instants `[start, end)`, UTC; one day has 23, 24 or 25 hours."""
    return midnight(day, settings.tz), midnight((last or day) + timedelta(days=1), settings.tz)


def yesterday(settings: Settings) -> date:
    return datetime.now(settings.tz).date() - timedelta(days=1)


Span = tuple[datetime, datetime]
Row = dict[str, Any]
Spans = Mapping[int, Sequence[int]]


def without(span: Span, held: Sequence[Span]) -> list[Span]:
    """What of `[start, end)` lies in none of the spans held, which are in order and apart."""
    found, at = [], span[0]
    for start, end in held:
        if start >= span[1]:
            break
        if at < start:
            found.append((at, start))
        at = max(at, end)
    return [*found, (at, span[1])] if at < span[1] else found


def unexpired(lows: Mapping[int, int]) -> Column:
    """Whether a batch of the ledger, by partition and first offset, begins where nothing has expired yet, or later."""
    from pyspark.sql import functions as F

    found = F.lit(False)
    for partition, low in lows.items():
        found = found | ((F.col("partition") == partition) & (F.col("from_offset") >= low))
    return found


def counted(spark: SparkSession, table: lake.Table, files: Sequence[lake.File], spans: Spans) -> list[Row]:
    """What `Counting` says of the records in some files of a log that lie in `spans`."""
    with Counting(spark, table) as count:
        return count.add(files, spans)


def repeated(row: Row) -> int:
    """Of counted records how many have an offset that another has."""
    return row["accepted"] + row["rejected"] - row["there"]


def encloses(span: Sequence[int] | None, row: Row) -> bool:
    """Whether all counted records of a partition lie in `(from, until)`."""
    return span is not None and span[0] <= row["low"] and row["high"] < span[1]


class Counting:
    """Records of a log, counted: what was added stays so, and is not read again when there is more.

    Of all so far, by `partition`: the `low`est and the `high`est offset, how many are `accepted` and `rejected`, and how many
    offsets are `there`: a bit each, of words that are merged. DuckDB takes a tenth of the CPU that it costs Spark, which reads
    what DuckDB does not, such as deletion vectors.
    """

    def __init__(self, spark: SparkSession, table: lake.Table) -> None:
        import duckdb

        self.spark, self.table = spark, table
        self.added, self.said = list[tuple[Sequence[lake.File], Spans]](), list[Row]()
        self.quick = True
        self.db = duckdb.connect()
        query.bounded(self.db)

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def add(self, files: Sequence[lake.File], spans: Spans) -> list[Row]:
        """Count what of `files`, none of which was added before, lies in `{partition: (from, until)}`; of all so far."""
        if files and spans:
            self.added.append((files, spans))
            try:
                self.said = self.by_duckdb(files, spans) if self.quick else self.by_spark()
            except query.QueryError:
                self.quick, self.said = False, self.by_spark()  # DuckDB may have counted a part of them
        return self.said

    def by_duckdb(self, files: Sequence[lake.File], spans: Spans) -> list[Row]:
        """Raises `QueryError` for a table that DuckDB does not read."""
        within = ", ".join(f"({int(p)}, {int(since)}, {int(until)})" for p, (since, until) in spans.items())
        asked = f"""
            SELECT part, place >> 6 AS word, min(place) AS low, max(place) AS high, count_if(reject IS NULL) AS accepted,
                   count_if(reject IS NOT NULL) AS rejected, bit_or(1::UBIGINT << (place & 63)::UBIGINT) AS bits
            FROM (SELECT log.kafka.partition AS part, log.kafka."offset" AS place, reject FROM {{log}})
            JOIN (VALUES {within}) AS spans(part, since, until) USING (part)
            WHERE place >= since AND place < until GROUP BY ALL"""
        whole = """
            SELECT part AS partition, min(low) AS low, max(high) AS high, sum(accepted)::BIGINT AS accepted,
                   sum(rejected)::BIGINT AS rejected, sum(bit_count(bits))::BIGINT AS there
            FROM (
                SELECT part, word, min(low) AS low, max(high) AS high, sum(accepted) AS accepted, sum(rejected) AS rejected,
                       bit_or(bits) AS bits
                FROM parts GROUP BY part, word
            ) GROUP BY ALL"""
        return of_log_by_duckdb(self.table, files, asked, whole=whole, db=self.db)

    def by_spark(self) -> list[Row]:
        from pyspark.sql import functions as F

        partition, word = F.col("kafka.partition").alias("partition"), F.expr(quality.WORD).alias("word")
        offset, reject = F.col("kafka.offset"), F.col("reject")
        parts = [
            fold.within_offsets(lake.read(self.spark, self.table, files=files), spans)
            .groupBy(partition, word)
            .agg(
                F.min(offset).alias("low"),
                F.max(offset).alias("high"),
                F.count_if(reject.isNull()).alias("accepted"),
                F.count_if(reject.isNotNull()).alias("rejected"),
                F.expr(quality.BITS).alias("bits"),
            )
            for files, spans in self.added
        ]
        ends = F.min("low").alias("low"), F.max("high").alias("high")
        sums = [F.sum(name).alias(name) for name in ("accepted", "rejected")]
        words = fold.union(parts).groupBy("partition", "word").agg(*ends, *sums, F.bit_or("bits").alias("bits"))
        there = F.sum(F.bit_count("bits")).alias("there")
        return words.groupBy("partition").agg(*ends, *sums, there).toArrow().to_pylist()


def by_large_days(files: Sequence[lake.File]) -> list[list[lake.File]]:
    """A log's files of each day that has many records, and those of all other days together.

    Of one day alone `day` is a constant. To cut it out of each row's path, for each check, was a fifth of what two days cost of
    which one had 86 million records; a scan of its own is a few tasks more. Of more than a month all are read together: each scan
    makes the plan longer.
    """
    of_day: dict[date | None, list[lake.File]] = {}
    for file in files:
        of_day.setdefault(file.day, []).append(file)
    large, rest = list[list[lake.File]](), list[lake.File]()
    for its in of_day.values():
        if sum(f.rows for f in its) >= LARGE:
            large.append(its)
        else:
            rest += its
    if len(large) > MONTH:
        return [list(files)]
    return [*large, rest] if rest or not large else large


def at_once(files: Sequence[lake.File]) -> dict[str, str]:
    """Settings for a rollup of a log's files, by which the sets of a task's records grow side by side (decision 0037).

    To sort the records first, as every other aggregate does, is a seventh of what it takes to roll a day of 86 million. What
    their sets take in memory is bounded by how many records a task has, `AT_ONCE` of what it reads and of what it is sent, and
    by how many groups; where there are more it sorts the rest.
    """
    rows, size = sum(f.rows for f in files), sum(f.size for f in files)
    each = size / rows if rows else 1
    return {
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "50000",
        PARTITIONS: str(min(200, max(2, -(-rows // AT_ONCE)))),
        "spark.sql.files.maxPartitionBytes": str(int(min(128 * MIB, max(MIB, each * AT_ONCE)))),
    }


class Settling:
    """One run at work: the tables as of its pins, what it has staged, and what failed on the way."""

    def __init__(self, settings: Settings, catalog: Catalog, run: Run, progress: Progress) -> None:
        self.settings, self.catalog, self.run, self.progress = settings, catalog, run, progress
        self.failed: dict[str, str] = {}
        self.chosen = readers(catalog, run.only or catalog.names)
        self.needed = needed(catalog, self.chosen)
        self.from_kafka: set[str] = set()
        # Staged tables that are small enough to stand in memory while they are judged and compared.
        self.kept: dict[str, DataFrame] = {}
        # Of each log, how many of the days' records have an offset that stands there already.
        self.repeats: dict[str, int] = {}

    def work(self) -> None:
        days = {date.fromisoformat(d) for d in (*self.run.days, *self.run.open_days)}
        many = records_of(self.settings, self.catalog, self.needed, days) >= LONG[self.run.source]
        self.spark: SparkSession = session.session(self.settings, f"tidemark-{self.run.id}", optimize=many)
        self.outer: dict[str, lake.Table] = {}
        for declared, schema in fold.remembered_schemas(self.spark, self.catalog, self.settings.state / fold.REMEMBERED):
            self.outer[declared.name] = lake.table(self.settings, declared)
            if isinstance(schema, Exception):
                self.fail(declared, schema)
            else:
                self.outer[declared.name].create(schema, comment(declared), row_of(declared))
        for topic in (t for t in self.catalog.topics.values() if t.name in self.needed - self.failed.keys()):
            lake.refuse_other_reading(self.spark, self.settings, self.outer[topic.name], topic, *fold.MISREAD)
        if self.run.kind == "replay":
            for topic in self.catalog.topics.values():
                if topic.name in self.needed and lake.upto(self.run.pins, topic.name):
                    self.whole(topic)
        # Of days that are not over views are the stream's, which computes them again once the run is published.
        derived = [d for d in self.catalog.derived if d.name in self.needed and self.run.days_of(d)]
        for declared in derived:
            if declared.name not in self.failed:
                self.stage(declared)
        lake.failpoint("staged")
        for declared in derived:
            if declared.name not in self.failed and self.bytes_staged(declared.name) <= KEPT:
                self.kept[declared.name] = self.staged(declared).persist()
        self.judge(derived)
        chosen = [d for d in derived if d.name in self.chosen and d.name not in self.failed]
        self.compare([d for d in chosen if self.run.kind == "replay" or isinstance(d, View)])
        for frame in self.kept.values():
            frame.unpersist()

    def fail(self, declared: Declared, error: Exception) -> None:
        said = " ".join(str(error).split())[:500]
        foreseen = isinstance(error, DeclarationError)  # which names the table, and where
        self.failed[declared.name] = said if foreseen else raised(declared.name, error)
        log.error("a table cannot be settled; the others go on", table=declared.name, because=self.failed[declared.name])

    # ---- the log, whole

    def whole(self, topic: Topic) -> None:
        """Have every offset of a topic from zero to the pin: from Kafka, or from the log. Raises `SettleError`."""
        if self.run.source == "kafka" and not topic.compacted and self.in_kafka(topic):
            self.read_again(topic)
            self.same_as_log(topic)
            self.from_kafka.add(topic.name)
        else:
            self.complete(topic)

    def in_kafka(self, topic: Topic) -> bool:
        """Whether Kafka still holds every record of the topic up to the pin, and that is the topic that the log holds."""
        try:
            first = kafka.offsets(self.settings, [topic.name], "earliest")[topic.name]
            now, held = kafka.topic_ids(self.settings, [topic.name])[topic.name], self.outer[topic.name].topic_id
        except (kafka.BrokerAway, kafka.TopicMissing) as away:
            self.progress(f"{topic.name}: read from the log, because {away}")
            return False
        if held and now != held:
            self.progress(
                f"{topic.name}: read from the log, because Kafka's topic was deleted and created again (its id is another)"
            )
            return False
        gone = {p: o for p, o in first.items() if o > 0}
        if gone:
            partition = min(gone)
            self.progress(
                f"{topic.name}: read from the log, because Kafka no longer holds offsets 0 to {gone[partition] - 1:,} of "
                f"partition {partition}"
            )
        return not gone

    def read_again(self, topic: Topic) -> None:
        """Read a topic from Kafka up to the pin, judge it again, and stage it beside the log, in steps."""
        until = {int(p): o for p, o in lake.upto(self.run.pins, topic.name).items() if o > 0}
        total, outer = sum(until.values()), self.outer[topic.name]
        # As it began: what is staged already was cut by that number.
        steps = self.run.parts.setdefault(topic.name, max(1, -(-total // self.settings.chunk_records)))
        lake.save(self.settings, self.run)
        columns = [f.name for f in outer.delta().schema().fields]
        done = lake.staged_upto(outer, self.run.id)
        for step in range(done + 1, steps):
            self.give_way(topic)
            began = time.monotonic()
            places = {p: (o * step // steps, o * (step + 1) // steps) for p, o in until.items()}
            if until:
                source = kafka.between(self.spark, self.settings, topic.name, places, f"tidemark-{self.run.id}")
                rows = fold.judged(topic, source).drop("event_time")
            else:
                rows = fold.nothing(self.spark, fold.log_schema(topic))
            try:
                lake.stage(outer, self.run.id, rows.select(*columns), step)
            except Exception as error:
                self.refuse_deleted(topic, places, error)
                raise
            lake.save(self.settings, self.run)
            self.progress(f"{topic.name}: read {step + 1} of {steps} parts from Kafka in {time.monotonic() - began:.1f} s")
            lake.failpoint("chunk")

    def refuse_deleted(self, topic: Topic, places: Mapping[int, tuple[int, int]], error: Exception) -> None:
        """Raises `SettleError` where an error is that Kafka has deleted what was being read: retention goes on meanwhile."""
        try:
            first = kafka.offsets(self.settings, [topic.name], "earliest")[topic.name]
        except (kafka.BrokerAway, kafka.TopicMissing):
            return
        for partition, (low, until) in sorted(places.items()):
            if low < min(until, first.get(partition, 0)):
                raise SettleError(
                    f"topic {topic.name}, partition {partition}: Kafka has deleted offsets {low} to "
                    f"{min(until, first[partition]) - 1} before they were read again. Drop the run and replay the log: "
                    f"tidemark drop {self.run.id}, then tidemark replay --source log"
                ) from error

    def same_as_log(self, topic: Topic) -> None:
        """What Kafka holds, judged by the code of now, must be what the log holds, once: the next settling reads the log."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        plain = ("kafka.offset", "kafka.timestamp", "kafka.key", "kafka.value", "reject", *(c.name for c in topic.columns))
        values = [v for name in plain for v in compare.hashable(F.col(name))]
        hashed = F.xxhash64(*values, *compare.hashable(F.col("kafka.headers"), nested=True))

        def prints(rows: DataFrame) -> dict[int, Any]:
            sums = rows.groupBy("kafka.partition").agg(F.count("*").alias("n"), F.sum(hashed.cast("decimal(20,0)")).alias("sum"))
            return {r["partition"]: (r["n"], r["sum"]) for r in sums.toArrow().to_pylist()}

        again, held = self.staged(topic), self.up_to_pin(topic)
        if lake.lets_go(self.settings, topic):  # Kafka may still hold what the log has let go
            kept = F.col("day") >= F.lit(lake.kept_from(self.settings, topic))
            again, held = again.where(kept), held.where(kept)
        if prints(again) == prints(held):
            return
        place = (F.col("kafka.partition").alias("partition"), F.col("kafka.offset").alias("offset"))
        a = again.select(
            *place,
            F.struct("kafka.timestamp", "kafka.key", "kafka.value").alias("a_bytes"),
            F.col("reject").alias("a_reject"),
            hashed.alias("a"),
        )
        b = held.select(
            *place,
            F.struct("kafka.timestamp", "kafka.key", "kafka.value").alias("b_bytes"),
            F.col("reject").alias("b_reject"),
            hashed.alias("b"),
            F.count("*").over(Window.partitionBy("kafka.partition", "kafka.offset")).alias("times"),
        )
        both = a.join(b, on=["partition", "offset"], how="full").where(~F.col("a").eqNullSafe(F.col("b")) | (F.col("times") > 1))
        what = (
            F.when(F.col("b").isNull(), "lacks")
            .when(F.col("times") > 1, "has more than once")
            .when(F.col("a").isNull() | ~F.col("a_bytes").eqNullSafe(F.col("b_bytes")), "holds otherwise than Kafka")
            .when(F.col("a_reject").isNull() & F.col("b_reject").isNotNull(), "has as rejects, and the code of now accepts")
            .when(F.col("a_reject").isNotNull() & F.col("b_reject").isNull(), "has accepted, and the code of now does not")
            .when(F.col("a_reject") != F.col("b_reject"), "rejects for another reason")
            .otherwise("has without values of columns that were added later")
        )
        found = (
            both.groupBy(what.alias("what"))
            .agg(F.count_distinct("partition", "offset").alias("n"), F.min(F.struct("partition", "offset")).alias("first"))
            .toArrow()
        )
        said = "; ".join(
            f"{r['n']} records that the log {r['what']}, the first at partition {r['first']['partition']}, "
            f"offset {r['first']['offset']}"
            for r in found.to_pylist()
        )
        raise SettleError(
            f"topic {topic.name}: Kafka, judged by the code of now, and the log differ: {said}. The next settling reads the "
            f"log and would undo the replay. Drop the run (tidemark drop {self.run.id}), then mend rejects that are accepted now "
            f"(tidemark settle --rejects), take back what somebody did to the log (DESCRIBE HISTORY "
            f"delta.`{self.outer[topic.name].path}`), or replay the log, where what was accepted stays so: tidemark replay "
            f"--source log"
        )

    def complete(self, topic: Topic) -> None:
        """The log must hold every record of the ledger, and the ledger every offset up to the pin. Raises `SettleError` with
        the range.

        What Kafka had deleted before a stream first read the topic nobody has: it is said, and is no refusal. Of a topic with
        `keep` only what cannot have expired is held to it; without `accept_late` any record can, so that a hole is only said.
        """
        from pyspark.sql import functions as F

        ledger = lake.read(self.spark, lake.ledger(self.settings))
        entered = ledger.where((F.col("topic") == topic.name) & compare.read_by(self.run.pins, "stream", "seq"))
        log_rows = self.up_to_pin(topic)
        lets_go = lake.lets_go(self.settings, topic)
        lows = self.unexpired_from(topic, log_rows) if lets_go else {}
        kept = unexpired(lows) if lets_go else F.lit(True)
        sums = entered.groupBy("partition").agg(
            F.min("from_offset").alias("first"),
            F.max("until_offset").alias("until"),
            F.sum(F.col("until_offset") - F.col("from_offset")).alias("offsets"),
            F.min(F.when(kept, F.col("from_offset"))).alias("low"),
            F.sum(F.when(kept, F.col("records"))).alias("records"),
        )
        told = {r["partition"]: r for r in sums.toArrow().to_pylist()}
        self.refuse_untold(topic, told, lows)
        inside = {p: (r["low"], r["until"]) for p, r in told.items() if r["low"] is not None}
        counts = counted(self.spark, self.outer[topic.name], self.outer[topic.name].files(), inside)
        held = {r["partition"]: (r["accepted"] + r["rejected"], r["there"]) for r in counts}
        for partition, r in sorted(told.items()):
            if r["low"] is None or held.get(partition, (0, 0)) == (r["records"], r["records"]):
                continue
            lacks = (
                f"topic {topic.name}, partition {partition}: the log lacks records of which the ledger has {r['records']}: "
                f"{self.hole(entered.where(kept), log_rows, partition)}"
            )
            if lets_go and not topic.accept_late:
                self.say(f"{lacks}. They may have come too late for keep={topic.keep}; with accept_late it would be known")
                continue
            raise SettleError(
                f"{lacks}. Replay from Kafka while it holds them (tidemark replay --source kafka), or take back what removed "
                f"or repeated them (DESCRIBE HISTORY delta.`{self.outer[topic.name].path}`)"
            )

    def unexpired_from(self, topic: Topic, log_rows: DataFrame) -> dict[int, int]:
        """By partition the first offset from which on `keep` has let nothing expire yet."""
        from pyspark.sql import functions as F

        limit = lake.kept_from(self.settings, topic)
        oldest = max(limit, min((f.day for f in self.outer[topic.name].files() if f.day), default=limit))
        lows = log_rows.where(F.col("kafka.timestamp") >= F.lit(self.none_before(topic, oldest))).groupBy("kafka.partition")
        found = {r["partition"]: r["low"] for r in lows.agg(F.min("kafka.offset").alias("low")).toArrow().to_pylist()}
        return {int(p): found.get(int(p), until) for p, until in lake.upto(self.run.pins, topic.name).items()}

    def none_before(self, topic: Topic, oldest: date) -> datetime:
        """From when on no record of a day before `oldest` has come.

        A record comes at most `accept_late` after its event: what came so long after the oldest day that is kept had begun is of
        that day or a later one. What came under another `accept_late` may be of any.
        """
        in_time = period(self.settings, oldest)[0] + duration(topic.accept_late or "0 seconds")
        return max(in_time, self.outer[topic.name].judged_since(topic) or in_time)

    def expires(self, topic: Topic, since: datetime) -> bool:
        """Whether a batch that was read a day before an instant, or later, may hold what `keep` has let expire already."""
        if topic.name in self.from_kafka or not lake.lets_go(self.settings, topic):
            return False
        return since - timedelta(days=1) < self.none_before(topic, lake.kept_from(self.settings, topic))

    def refuse_untold(self, topic: Topic, told: Mapping[int, Mapping[str, Any]], lows: Mapping[int, int]) -> None:
        """Raises `SettleError` where the ledger lacks offsets up to the pin; says from where on it has them, if not from zero.

        Where every topic has `keep` the ledger expires with the logs: a partition that has been quiet for longer has no row in
        either. `lows` are the first offsets that cannot have expired.
        """
        expires = all(lake.lets_go(self.settings, t) for t in self.catalog.topics.values())
        start: dict[str, int] = {}
        for stream in self.run.pins:
            generation = lake.Checkpoint.of(self.settings, stream).identity
            start |= generation.start.get(topic.name, {}) if generation else {}
        for partition, until in sorted((int(p), until) for p, until in lake.upto(self.run.pins, topic.name).items()):
            first = start.get(str(partition), 0)
            if partition not in told and expires and lows[partition] == until:
                continue
            r = told.get(partition, {"first": first, "until": first, "offsets": 0})
            if r["until"] < until or r["offsets"] != r["until"] - r["first"]:
                raise SettleError(
                    f"topic {topic.name}, partition {partition}: the ledger lacks offsets between {r['first']} and {until}. "
                    f"Replay from Kafka while it holds them: tidemark replay --source kafka"
                )
            if r["first"] and not lake.lets_go(self.settings, topic):
                self.say(
                    f"topic {topic.name}, partition {partition}: offsets 0 to {r['first'] - 1:,} are in no table; Kafka had "
                    f"deleted them before a stream first read the topic"
                )

    def hole(self, entered: DataFrame, log_rows: DataFrame, partition: int) -> str:
        """The first offsets that a log lacks: exactly, or of a batch with gaps how many of its records."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        batch = F.struct("from_offset", "until_offset", "records", F.coalesce("gaps", F.lit(0)).alias("gaps"))
        batches = entered.where(F.col("partition") == partition).select(F.col("from_offset").alias("at"), batch.alias("batch"))
        mine = log_rows.where(F.col("kafka.partition") == partition).select(F.col("kafka.offset").alias("at"))
        # Each record after its batch, in order.
        order = Window.orderBy("at", F.col("batch").isNull())
        both = mine.unionByName(batches, allowMissingColumns=True).select(
            F.when(F.col("batch").isNull(), F.col("at")).alias("at"), F.last("batch", ignorenulls=True).over(order).alias("batch")
        )
        held = both.groupBy("batch").agg(F.count("at").alias("held"), F.count_distinct("at").alias("there"))
        wrong = held.where("held != batch.records OR there != batch.records")
        r = wrong.select("batch.*", "held", "there").orderBy("from_offset").first()
        assert r is not None
        if r["gaps"] or r["there"] == r["records"]:
            span = f"offsets {r['from_offset']} to {r['until_offset'] - 1}"
            has = r["held"] if r["there"] == r["records"] else r["there"]
            return f"of {span} it has {has}, the ledger {r['records']}"
        # What follows each offset, the end of the batch included: the first hole is the range.
        inside = mine.where((F.col("at") >= r["from_offset"]) & (F.col("at") < r["until_offset"]))
        ends = inside.union(self.spark.range(1).select(F.lit(r["until_offset"]).alias("at")))
        before = F.coalesce(F.lag("at").over(Window.orderBy("at")), F.lit(r["from_offset"] - 1))
        hole = ends.select((before + 1).alias("from"), F.col("at").alias("until")).where("until > from").orderBy("from").first()
        assert hole is not None
        return f"offsets {hole['from']} to {hole['until'] - 1} are not there"

    def say(self, what: str) -> None:
        """Show it, and keep it with the run's record."""
        self.progress(what)
        self.run.note = "; ".join(filter(None, (self.run.note, what)))

    def is_behind(self, stream: str) -> bool:
        """Of one that was killed what it said last lies there still, and nobody waits for it."""
        return local.behind(self.settings, stream) > duration(self.settings.give_way_at) and local.beats(self.settings, stream)

    def give_way(self, declared: Declared) -> None:
        """Wait while a stream is behind: what is live comes before what is computed again. Ten minutes at most."""
        until, told = time.monotonic() + 600, False
        for stream in sorted({lake.reader(self.settings, t) for t in topics_of(self.catalog, declared)}):
            while time.monotonic() < until and self.is_behind(stream):
                if not told:
                    self.progress(f"waiting: stream {stream} is behind by more than {self.settings.give_way_at}")
                told = True
                time.sleep(1)

    # ---- computing

    def stage(self, declared: Rollup | View) -> None:
        """Compute a table's chunks that are not staged yet. What its function raises fails the table, not the run."""
        outer = self.outer[declared.name]
        columns = [f.name for f in outer.delta().schema().fields]
        spans = [(date.fromisoformat(a), date.fromisoformat(b)) for a, b in self.run.chunks]
        if isinstance(declared, Rollup):
            spans += compare.stretches(date.fromisoformat(d) for d in self.run.open_days)
        done = lake.staged_upto(outer, self.run.id)
        for number, (first, last) in enumerate(spans):
            if number <= done:
                continue
            self.give_way(declared)
            began = time.monotonic()
            start, end = period(self.settings, first, last)
            try:
                if isinstance(declared, Rollup):
                    rows = self.rolled(declared, start, end)
                else:
                    rows = fold.answers(self.spark, declared, declared, self.read, start, end, settled=True, merged=True)
                days = (last - first).days + 1
                sets = at_once(self.files_of(declared, first, last)) if isinstance(declared, Rollup) else {}
                # One task that merged many parts in turn would have the memory that each has sorted in until its own end.
                one = rows.repartition(1) if int(sets.get(PARTITIONS, 2)) > 2 else rows.coalesce(1)
                apart = one if days == 1 else rows.repartition(min(days, 8), "day")
                order = dict.fromkeys(("day", *declared.key))
                with session.under(self.spark, sets):
                    lake.stage(outer, self.run.id, apart.select(*columns).sortWithinPartitions(*order), number)
                lake.save(self.settings, self.run)
            except Exception as error:
                if isinstance(error, OSError) or lake.disk_full(self.settings, error):
                    raise
                self.fail(declared, error)
                return
            which = str(first) if first == last else f"{first} to {last}"
            self.progress(f"{which}: staged {declared.name} in {time.monotonic() - began:.1f} s ({number + 1} of {len(spans)})")
            lake.failpoint("chunk")

    def files_of(self, rollup: Rollup, first: date, last: date) -> list[lake.File]:
        """What has the records of these business days that a rollup reads."""
        return [f for t in rollup.topics.values() for f in self.read_from(t).files() if f.day and first <= f.day <= last]

    def bounds(self, *spans: Span) -> DataFrame:
        return fold.union([fold.period(self.spark, start, end) for start, end in spans])

    def spans(self, declared: Declared) -> list[Span]:
        """The stretches of the run's days of a table, as instants."""
        return [period(self.settings, first, last) for first, last in compare.stretches(self.run.days_of(declared))]

    def rolled(self, rollup: Rollup, low: datetime, high: datetime) -> DataFrame:
        """A rollup's rows whose time lies in `[low, high)`, computed from the log up to the pin: of events of the hours that its
        ends cut too, where a zone is half an hour off."""
        since, until = fold.floor(low, fold.HOUR), fold.looked_at_until(high, timedelta(0))
        events = {}
        for parameter, topic in rollup.topics.items():
            accepted = fold.accepted(topic, self.log_rows(topic, since, until))
            # Of other hours of the files no row is kept: they are not rolled. Of whole days every record is looked at.
            if period(self.settings, *self.touched(since, until)) != (since, until):
                timed = accepted.withColumn("_at", fold.event_time(topic))
                accepted = fold.within(timed, "_at", self.bounds((since, until))).drop("_at")
            events[parameter] = accepted
        return fold.within(fold.roll(rollup, events), rollup.time, self.bounds((low, high)))

    def touched(self, low: datetime, high: datetime) -> tuple[date, date]:
        """The first and the last business day that `[low, high)` touches."""
        return quality.days(low.astimezone(self.settings.tz), high.astimezone(self.settings.tz))

    def log_rows(self, topic: Topic, low: datetime | None, high: datetime) -> DataFrame:
        """The log's rows up to the pin, of the business days that `[low, high)` touches; from the first where `low` is None."""
        first, last = self.touched(low or high, high)
        if low is None:
            return self.log_of(topic, sorted({f.day for f in self.outer[topic.name].files() if f.day and f.day <= last}))
        return self.log_of(topic, [first + timedelta(days=n) for n in range((last - first).days + 1)])

    def log_of(self, topic: Topic, days: Sequence[date]) -> DataFrame:
        if topic.name in self.from_kafka:
            return self.staged(topic, days=days)
        return self.up_to_pin(topic, days)

    def read_from(self, topic: Topic) -> lake.Table:
        """The table that has a topic's records: its log, or what was read again from Kafka."""
        outer = self.outer[topic.name]
        return lake.staged_table(outer, self.run.id) if topic.name in self.from_kafka else outer

    def below_pin(self, topic: Topic) -> dict[int, tuple[int, int]]:
        """The offsets of a topic, from and until, that the pin has read, by partition."""
        return {int(p): (0, until) for p, until in lake.upto(self.run.pins, topic.name).items()}

    def up_to_pin(self, topic: Topic, days: Collection[date] | None = None) -> DataFrame:
        """The log's records up to the pin: of some days, or all. Each offset is looked at only in files whose batches do not
        tell: that costs as much as most of what is asked of a record."""
        table = self.outer[topic.name]
        files = [f for f in table.files() if days is None or f.day in days]
        whole, cut = list[lake.File](), list[lake.File]()
        for file in files:
            (whole if file.live and not lake.beyond(self.run.pins, file, "hi") else cut).append(file)
        rows = [lake.read(self.spark, table, files=some) for some in by_large_days(whole)] if whole or not cut else []
        if cut:
            rows.append(fold.within_offsets(lake.read(self.spark, table, files=cut), self.below_pin(topic)))
        return fold.union(rows)

    def read(self, declared: Declared, low: datetime | None, high: datetime) -> DataFrame:
        """What a view reads of `[low, high)`: logs up to the pin; rollups and views as staged, and beyond the run's days
        rollups rolled from the log, each key once as they are staged, and views as they are published. What a log has let go
        is in its rollups."""
        if isinstance(declared, Topic):
            return self.log_rows(declared, low, high)
        assert low is not None
        if declared.name in self.failed:
            raise SettleError(f"it reads {declared.name}, which failed")
        parts = [self.staged(declared, low=low, high=high)]
        parts += (self.outside(declared, *span) for span in without((low, high), self.spans(declared)))
        return fold.union(parts)

    def outside(self, declared: Rollup | View, low: datetime, high: datetime) -> DataFrame:
        """The rows of `[low, high)`, in which the run has no day."""
        if isinstance(declared, View):
            return self.standing(declared, low, high)
        if (kept := min(max(low, self.expired(declared)), high)) == low:
            return self.rolled(declared, low, high)
        stands = fold.with_day(fold.merge(declared, self.standing(declared, low, kept)), declared.time)
        return fold.union([stands, self.rolled(declared, kept, high)]) if kept < high else stands

    def standing(self, declared: Rollup | View, low: datetime, high: datetime) -> DataFrame:
        rows = lake.read(self.spark, self.outer[declared.name], low=low, high=high)
        return fold.within(rows, declared.time, self.bounds((low, high)))

    def expired(self, rollup: Rollup) -> datetime:
        """Up to when the logs of a rollup have let days go; the first of all instants where they have not."""
        before = max(self.outer[topic.name].expired_before for topic in rollup.topics.values())
        return period(self.settings, before)[0] if before > date.min else datetime.min.replace(tzinfo=UTC)

    def staged(self, declared: Declared, **bounds: Any) -> DataFrame:
        """What is staged of a table; with bounds, which `lake.read` has, at least what lies in them: a chunk reads no other's."""
        if declared.name in self.kept:
            return self.kept[declared.name]
        return lake.read(self.spark, lake.staged_table(self.outer[declared.name], self.run.id), **bounds)

    # ---- judging

    def judge(self, derived: Sequence[Rollup | View]) -> None:
        """Ask every check of exactly the staged files, write the verdicts, and decide each table's gate.

        What `--only` has left out has no gate of its own: a chosen table that is made of it fails by what it fails by.
        Of days that are not over a rollup is asked its own checks alone: those it declares are of whole days, and are asked when
        these are settled.
        """
        topics = [t for t in self.catalog.topics.values() if t.name in self.needed]
        judged: dict[str, list[quality.Judged]] = {}
        found, began = list[quality.Verdict](), time.monotonic()
        over, rest = ([date.fromisoformat(d) for d in days] for days in (self.run.days, self.run.open_days))
        own = [replace(d, checks=()) for d in derived if isinstance(d, Rollup)]
        asks: list[tuple[Sequence[Declared], list[date]]] = [((*topics, *derived), over), (own, rest)]
        for tables, days in asks:
            there = [d for d in tables if days and d.name not in self.failed]
            if there:
                beside = self.beside() if days is over else {}
                asked = {d.name: self.judged(d, days) for d in there}
                found += quality.judge(self.run.id, asked, self.settings.home / "docs", beside, self.progress)
                for name, one in asked.items():
                    judged.setdefault(name, []).append(one)
        self.progress(f"asked {len(found)} checks of {len(judged)} tables in {time.monotonic() - began:.1f} s")
        self.keep(found)
        failed: dict[str, list[str]] = {}
        reasons: dict[str, tuple[str, ...]] = {name: (sentence,) for name, sentence in self.failed.items()}
        for name, asked_of in judged.items():
            expected = [check for one in asked_of for check in quality.checks_of(one)]
            gate = quality.gate(self.catalog[name], expected, found, self.catalog.views.keys() - self.needed)
            if not gate.passed:
                reasons[name], failed[name] = gate.reasons, list(gate.failed)
        for left_out in [d.name for d in derived if d.name in reasons.keys() - self.chosen]:
            for name in readers(self.catalog, [left_out]) & self.chosen:
                reasons[name] = (*reasons.get(name, ()), *reasons[left_out])
                failed[name] = [*failed.get(name, []), *failed.get(left_out, [])]
        blocked = quality.blocked(self.catalog, reasons)
        for name in (*(t.name for t in topics), *(d.name for d in derived if d.name in self.chosen)):
            gate_of = "failed" if name in reasons else "blocked" if name in blocked else "passed"
            warned = [v.check for v in found if v.table == name and v.outcome == "failed" and v.severity == "warning"]
            self.run.tables[name] = {
                "gate": gate_of,
                "reasons": [*reasons.get(name, ()), *([blocked[name]] if name in blocked and name not in reasons else [])],
                "failed": failed.get(name, []),
                "reads": sorted(needed(self.catalog, [name]) - {name}),
                "warnings": warned,
                "checks": sum(v.table == name for v in found),
                "rows": None if name in self.catalog.topics or name in self.failed else self.rows_staged(name),
            }
        lake.save(self.settings, self.run)

    def judged(self, declared: Declared, days: Sequence[date]) -> quality.Judged:
        """What is judged of a table: what is staged of these days, of a topic its log."""
        from pyspark.sql import functions as F

        start, end = (at.astimezone(self.settings.tz) for at in period(self.settings, days[0], days[-1]))
        if isinstance(declared, Topic):
            return quality.Judged(declared, self.log_of(declared, days), start, end, self.repeats.get(declared.name))
        frame = self.staged(declared)
        return quality.Judged(declared, frame.where(F.col("day").isin(days)) if self.run.open_days else frame, start, end)

    def bytes_staged(self, name: str) -> int:
        return sum(a.size for a in lake.staged(self.outer[name], self.run.id))

    def rows_staged(self, name: str) -> int:
        return sum(json.loads(a.stats).get("numRecords", 0) for a in lake.staged(self.outer[name], self.run.id))

    def keep(self, found: Sequence[quality.Verdict]) -> None:
        """Write verdicts to `lake/verdicts` and, as JSON, beside the run's record; those from before it was cut off go."""
        table = lake.verdicts(self.settings)
        table.create(fold.schema_of(fold.nothing(self.spark, quality.VERDICTS)), "Every check of every run.")
        folder = f"live/{self.run.id}"
        before = [f for f in table.files() if f.path.startswith(f"{folder}/")]
        adds = lake.write_arrow(table, f"{folder}/{uuid.uuid4().hex[:8]}", quality.to_arrow(found))
        lake.swap(table, before, adds, {"run": self.run.id})
        lake.whole_or_nothing(self.settings.lake_path / "runs" / f"{self.run.id}.verdicts", quality.to_json(found), kept=True)

    def beside(self) -> dict[str, DataFrame]:
        """What checks may name beside the judged tables: `period` (a row for each stretch of days that follow each other:
        start, end, zone), `<topic>_offsets`, `published_<view>`, and the views that this run does not compute."""
        from pyspark.sql import functions as F

        days = [date.fromisoformat(d) for d in self.run.days]
        spans = [period(self.settings, first, last) for first, last in compare.stretches(days)]
        views = {"period": self.bounds(*spans).withColumn("zone", F.lit(self.settings.zone))}
        topics = [t for t in self.catalog.topics.values() if t.name in self.needed]
        views |= {f"{name}_offsets": frame for name, frame in self.offsets(topics, days, spans).items()}
        written = [v for v in self.catalog.views.values() if v.name not in self.failed]
        # A check of a table may name one that this run leaves alone: it is as readers have it.
        views |= {v.name: lake.read(self.spark, self.outer[v.name], days=days) for v in written if v.name not in self.needed}
        return views | {f"published_{v.name}": self.published(v, spans[0][0], spans[-1][1]) for v in written}

    def published(self, view: View, start: datetime, end: datetime) -> DataFrame:
        """A view as readers have it now, of the four weeks before the period and the period itself."""
        return lake.read(self.spark, self.outer[view.name], low=start - timedelta(days=28), high=end)

    def offsets(self, topics: Sequence[Topic], days: Sequence[date], spans: Sequence[Span]) -> dict[str, DataFrame]:
        """Of each topic, by partition: `offsets` that the ledger has of the batches with the days' records, gaps that it
        explains left out, and the `accepted` and `rejected` records that the log has of them. One that it has twice counts as
        none, or it would stand for one that is lost. Of a topic with `keep` and without `accept_late` any record can have
        expired: that the log lacks some is only said. Keeps how many of the days' records stand in the log again.
        """
        import pyarrow as pa

        logged: dict[tuple[str, int], Row] = {}
        with ExitStack() as opened:
            counts = {t.name: opened.enter_context(Counting(self.spark, self.read_from(t))) for t in topics}
            files = {t.name: self.read_from(t).files() for t in topics}  # once: the stream compacts them meanwhile
            mine = {name: [f for f in its if f.day in days] for name, its in files.items()}
            of_days = {t.name: counts[t.name].add(mine[t.name], self.below_pin(t)) for t in topics}
            self.repeats = {name: sum(map(repeated, found)) for name, found in of_days.items()}
            told = self.told(topics, spans, of_days)
            for topic in topics:
                batches = [r for r in told if r["topic"] == topic.name]
                inside, whole = {r["partition"]: (r["first"], r["last"]) for r in batches}, topic.name in self.from_kafka
                holding = [
                    f for f in files[topic.name] if whole or any(f.may_hold(r["lo"], r["hi"], r["stream"]) for r in batches)
                ]
                if all(encloses(inside.get(r["partition"]), r) for r in of_days[topic.name]):
                    counted_already = {f.path for f in mine[topic.name]}
                    found = counts[topic.name].add([f for f in holding if f.path not in counted_already], inside)
                else:  # the ledger lacks some of their batches, or those may hold what `keep` has let expire
                    found = counted(self.spark, self.read_from(topic), holding, inside)
                logged |= {(topic.name, r["partition"]): r for r in found}
        rows: dict[str, list[dict[str, Any]]] = {topic.name: [] for topic in topics}
        for (name, partition), of_one in groupby(told, key=lambda r: (r["topic"], r["partition"])):
            has = logged.get((name, partition), {"accepted": 0, "rejected": 0, "there": 0})
            offsets, topic = sum(r["offsets"] for r in of_one), self.catalog.topics[name]
            late = not topic.accept_late and name not in self.from_kafka
            if has["there"] < offsets and late and lake.lets_go(self.settings, topic):
                self.say(
                    f"topic {name}, partition {partition}: of the batches of these days the log lacks {offsets - has['there']:,} "
                    f"records. They may have come too late for keep={topic.keep}; with accept_late it would be known"
                )
                offsets = has["there"]
            sums = {"offsets": offsets, "accepted": has["accepted"] - 2 * repeated(has)}
            rows[name].append({"partition": partition, "rejected": has["rejected"], **sums})
        schema = pa.schema([("partition", pa.int32()), *((c, pa.int64()) for c in ("offsets", "accepted", "rejected"))])
        return {name: self.spark.createDataFrame(pa.Table.from_pylist(its, schema)) for name, its in rows.items()}

    def told(self, topics: Sequence[Topic], spans: Sequence[Span], of_days: Mapping[str, Sequence[Row]]) -> list[Row]:
        """`TOLD` of the days' spans and the records `of_days`, by topic, as they were counted. It is a few numbers of each batch,
        for which DuckDB needs no plan of Spark's for each topic."""
        import pyarrow as pa

        seen = [r | {"topic": name} for name, found in of_days.items() for r in found]
        places = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("low", pa.int64()), ("high", pa.int64())])
        read_in = [{"topic": t.name, "since": since, "until": until} for t in topics for since, until in spans]
        near = [t for t in topics if self.expires(t, spans[0][0])]
        lows = {t: self.unexpired_from(t, self.up_to_pin(t)) for t in near}
        kept = [{"topic": t.name, "partition": p, "low": low} for t, found in lows.items() for p, low in found.items()]
        with query.connect(self.settings, self.catalog, ["ledger"]) as db:
            db.register("seen", pa.Table.from_pylist(seen, places))
            db.register(
                "kept", pa.Table.from_pylist(kept, pa.schema({"topic": pa.string(), "partition": pa.int32(), "low": pa.int64()}))
            )
            db.register("spans", pa.Table.from_pylist(read_in))
            pins = self.run.pins.values()
            db.register("pins", pa.table({"stream": [p.stream for p in pins], "seq": [p.seq for p in pins]}))
            return db.sql(TOLD).to_arrow_table().to_pylist()

    # ---- comparing

    def compare(self, chosen: Sequence[Rollup | View]) -> None:
        """Staged against what readers have of the run's days; kept beside the run's record, for the person who decides."""
        beats = {s: local.status(self.settings, s).get("heartbeat") for s in self.catalog.streams}
        lived = {s: datetime.fromisoformat(beat["at"]) for s, beat in beats.items() if beat}
        found, arrivals = [], compare.Arrivals(self.spark, self.settings, lived)
        for declared in chosen:
            began = time.monotonic()
            mine = compare.table(self.spark, self.settings, self.catalog, declared, self.run, arrivals)
            found += mine
            sums = compare.totals(mine).get(declared.name, {"rows": 0, "missing": 0, "extra": 0, "changed": 0})
            self.run.tables[declared.name]["compare"] = sums
            self.progress(f"{declared.name}: {in_words(sums)} ({time.monotonic() - began:.1f} s)")
            if count := sums.get("unexplained"):
                said = f"rows of {declared.name} that differ from what readers have, and that no late event explains: {count:,}"
                log.error(said, run=self.run.id, see=f"tidemark compare {self.run.id}")
                self.run.note = "; ".join(filter(None, (self.run.note, said)))
        compare.keep(self.settings, self.run, found)
        lake.save(self.settings, self.run)


def in_words(sums: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sums.items())


# ------------------------------------------------------------------------------------------------------------ publishing


def publish(
    settings: Settings,
    catalog: Catalog,
    run_id: str,
    only: Sequence[str] = (),
    over: Sequence[str] = (),
    reason: str = "",
    again: bool = True,
) -> list[Published]:
    """Make a run's staged tables what readers see, each in one commit, rollups before views; without Spark.

    A table whose gate failed, and what reads it, is left as it was and said so in `blocked`. `only` names tables: they and
    what they read are published, the others left for another call. `over` names failed checks that a person takes upon
    themselves, for a `reason`: a table all of whose failed checks are named is published, and its record and history say
    so. Publishing twice does nothing; after a kill, publishing again finishes; two at once take turns, and with a roll-back.
    Without `again` a run that was rolled back stays so: a task that is tried again does not undo what a person has done.
    Raises `KeyError` for an unknown run, `SettleError` for one that is not staged, for a replay whose code was changed since, and
    where what `over` names publishes nothing, `LakeError` when a day was published with a greater pin meanwhile, or with the same
    by a run that was begun later.
    """
    with lake.publishing(settings, run_id):
        run = lake.run_of(settings, run_id)
        if run.state == "rolled back" and not again:
            raise SettleError(f"run {run.id} was rolled back ({run.note}); to publish it all the same: tidemark publish {run.id}")
        refuse_code_since(settings, catalog, run)
        if over:
            lake.note_published(settings, catalog, run)  # that was killed before it said so, and has its reason
        taken = take_over(settings, run, over, reason) if over else {}
        try:
            done = swap_in(settings, catalog, run, needed(catalog, only or catalog.names))
        finally:  # what was refused, or held back for another check, is not in force when somebody asks again
            if refused := {name: before for name, before in taken.items() if not run.seen(name)}:
                for name, before in refused.items():
                    run.tables[name].pop("forced")
                    run.tables[name] |= before
                lake.save(settings, run)
        waiting = [n for n, its in run.tables.items() if its.get("rows") is not None and not its.get("published")]
        if not only and (left := [n for n in waiting if n not in catalog.names]):
            log.warning("stays as it was: no pipeline declares it any more", tables=left, run=run.id)
        held = [p for p in done if p.blocked and set(over) & set(run.tables[p.table].get("failed", []))]
        if held and all(p.version is None for p in done):
            said = "; ".join(f"{p.table} is held back: {'; '.join(p.blocked)}" for p in held)
            raise SettleError(
                f"nothing of run {run.id} is published over {', '.join(over)}. {said}. Name every check that failed"
            )
        return done


def take_over(settings: Settings, run: Run, over: Sequence[str], reason: str) -> dict[str, dict[str, Any]]:
    """Mark the tables all of whose reasons are failed checks named in `over`, and return of each the mark that it had before. One
    that is published keeps the reason that its history has. Raises `SettleError` for any other name."""
    known = {check for said in run.tables.values() for check in said.get("failed", [])}
    if wrong := set(over) - known:
        there = "; ".join(sorted(known)) or "none"
        raise SettleError(f"run {run.id} has no failed check {', '.join(sorted(wrong))}; those that failed: {there}")
    taken = dict[str, dict[str, Any]]()
    for name, said in run.tables.items():
        failed = said.get("failed", [])
        if said.get("forced") and run.seen(name):
            continue
        # What could not be asked, or raised, has no answer that a person could take upon themselves.
        if said["gate"] == "failed" and failed and len(failed) == len(said["reasons"]) and set(failed) <= set(over):
            taken[name] = {"forced": said["forced"]} if said.get("forced") else {}
            said["forced"] = {"checks": failed, "reason": lake.plain(reason)}
    lake.save(settings, run)
    return taken


def swap_in(settings: Settings, catalog: Catalog, run: Run, names: Collection[str]) -> list[Published]:
    if run.state not in ("staged", "published", "rolled back"):
        way = f"settle the days again: {run.anew}"
        if run.state == "done":
            way = "it has no day to publish, and its mended rows are read already"
        elif run.kind == "replay" and run.state in ("running", "failed"):
            way = f"go on with it: tidemark replay --run {run.id}"
        raise SettleError(f"run {run.id} is {run.state}{': ' + run.note if run.note else ''}; {way}")
    refuse_older(settings, catalog, run)
    chosen = [d for d in catalog.derived if d.name in run.tables and d.name in names]
    known, ready = lake.runs(settings), dict[str, tuple[lake.Table, list[Any], list[str]]]()
    for declared in chosen:  # what is refused of one table leaves all as they are
        if not run.held_back(declared.name) and not run.tables[declared.name].get("published"):
            table = lake.table(settings, declared)
            adds, writers = lake.staged_whole(table, run), writers_of(table, declared, run)
            lake.replaced_by_now(table, run, adds, run.days_of(declared), writers, isinstance(declared, View), known)
            ready[declared.name] = table, adds, writers
    done = []
    for declared in chosen:
        said = run.tables[declared.name]
        if held := run.held_back(declared.name):
            done.append(Published(declared.name, None, 0, 0.0, held))
            continue
        if said.get("published"):
            done.append(Published(declared.name, None, 0, 0.0))
            continue
        table, adds, writers = ready[declared.name]
        pins = {s: run.pins[s].seq for s in writers}
        began = time.monotonic()
        version = lake.publish(
            settings,
            table,
            run,
            run.days_of(declared),
            writers,
            {
                "run": run.id,
                "days": run.days if len(run.days) <= 31 else compare.stretch_in_words(run.days),
                "pins": pins,
                "verdict": verdict_of(declared.name, said),
                **({"over": over} if (over := forced_of(catalog, run, declared.name)) else {}),
                "version": run.version,
                "reason": run.reason,
            },
            whole_days=isinstance(declared, View),
            adds=adds,
        )
        seconds = time.monotonic() - began
        lake.failpoint("published")
        said["published"] = datetime.now(UTC).isoformat()
        said.pop("rolled_back", None)
        lake.save(settings, run)
        done.append(Published(declared.name, version, len(adds), seconds))
    if done and all(p.blocked for p in done):
        return done  # it waits as before
    marks = [said["published"] for said in run.tables.values() if said.get("published")]
    published = max(marks, default=run.published or datetime.now(UTC).isoformat())
    if (run.state, run.published) != ("published", published):  # also where a kill left only the tables marked
        run.state, run.published = "published", published
        lake.save(settings, run)
    return done


def writers_of(table: lake.Table, declared: Rollup | View, run: Run) -> list[str]:
    """The streams whose rows a table has, or may have, of those that the run has read."""
    return sorted({*streams_of(declared), *(f.live["stream"] for f in table.files() if f.live)} & run.pins.keys())


def verdict_of(name: str, said: dict[str, Any]) -> str:
    """What its own checks have said of a table that is published, as its history has it: all have passed of one that is published
    over what it reads, or over what `--only` has left out."""
    checks, failed = said["checks"], sum(why.startswith(f'{name}: "') for why in said["reasons"])
    passed = f"{checks - failed} of {checks} checks passed, published over {failed}" if failed else f"passed {checks} checks"
    return passed + (f", {len(said['warnings'])} warnings" if said["warnings"] else "")


def forced_of(catalog: Catalog, run: Run, name: str) -> dict[str, Any]:
    """The failed checks that a person took upon themselves for a table, or for what it reads: by table."""
    names = needed(catalog, [name]) & run.tables.keys()
    return {n: run.tables[n]["forced"] for n in sorted(names) if run.tables[n].get("forced")}


def refuse_older(settings: Settings, catalog: Catalog, run: Run) -> None:
    """Nothing of a run is published when any of its days was published with a greater pin since, or with the same by a run that
    was begun later: of a still stream nights and what mends rejects have one pin. Raises `LakeError`.

    Nor is it published without those days: what the newer run computed of them may rest on what this one replaces, and
    nobody was shown the two beside each other. Nor, of a replay that waits with a part or a run that was taken back, what rests
    on days that were live when rejects of them were mended, and that nothing has computed since: their rows would go.
    """
    known = lake.runs(settings)
    waits = [d for d in catalog.derived if d.name in run.tables and not run.tables[d.name].get("published")]
    for other in (r for r in known if r.created > run.created):
        live = {date.fromisoformat(d) for d in {*other.mended} - {*other.days}}
        if lost := {d.name: min(both) for d in waits if (both := live & {*run.days_of(d)})}:
            raise lake.LakeError(
                f"run {run.id} has read the rejects of {min(lost.values())} as such, and run {other.id} has mended them since: "
                f"their rows of {min(lost)} would be lost; {run.anew}"
            )
    newer: list[tuple[Run, str]] = []
    for other in sorted(known, key=lambda r: r.published or ""):
        ahead = [stream for stream in other.pins if other.id != run.id and run.behind(other, stream)]
        for declared in (d for d in waits if ahead and d.name in other.tables):
            both = {*run.days_of(declared)} & {*other.days_of(declared)}
            if not both or not has_published(settings, declared, other):
                continue
            for stream in ahead:
                mine, theirs = run.pins[stream].seq, other.pins[stream].seq
                same = ", which was begun later" if mine == theirs else ""
                said = (
                    f"run {run.id} has read stream {stream} up to batch {mine}, but {min(both)} of {declared.name} was published "
                    f"by run {other.id} with batch {theirs}{same}"
                )
                newer.append((other, said))
    if newer:
        way = f"settle again: {run.anew}"
        if run.kind == "replay":
            lying = with_what_lies_on(catalog, known, [other for other, _ in newer])
            way = way_back(run, lying, *held_from(settings, catalog, catalog.names))
        raise lake.LakeError(f"{newer[0][1]}; {way}")


def has_published(settings: Settings, declared: Declared, run: Run) -> bool:
    """Whether a run has published a table: also no row of it, where it was killed before it said so."""
    table = lake.table(settings, declared)
    return bool(run.tables[declared.name].get("published")) or (table.exists and lake.empties(table, run.id))


def with_what_lies_on(catalog: Catalog, known: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Runs, and all others that have to be taken back first: they have published days of theirs since. Oldest first."""
    found = {run.id: run for run in runs}
    waits = [*found.values()]
    while waits:
        run = waits.pop()
        for other in (r for r in known if r.id not in found):
            shared = [d.name for d in catalog.derived if {*run.days_of(d)} & {*other.days_of(d)}]
            if any(other.tables.get(n, {}).get("published", "") > run.tables.get(n, {}).get("published", "") for n in shared):
                waits.append(found.setdefault(other.id, other))
    return sorted(found.values(), key=lambda r: r.published or "")


def way_back(run: Run, newer: Sequence[Run], since: date, why: str) -> str:
    """How a replay comes to be published although runs have published some of its days since, oldest first. What the logs hold
    from `since` on alone could be computed again."""
    both = {*run.days, *run.open_days}  # a replay of other days may lie on a night of these
    if replays := [other.id for other in newer if other.kind == "replay" and both & {*other.days, *other.open_days}]:
        return f"run {replays[-1]} is the newer replay, so drop this one: tidemark drop {run.id}"
    back = ", ".join(f"tidemark rollback {other.id}" for other in reversed(newer))
    days = sorted({day for other in newer for day in other.days})
    if days[0] < str(since):
        return f"what is newer of {days[0]} could not be computed again, for {why}. Drop this one: tidemark drop {run.id}"
    return (
        f"it need not be computed again: take the newer back, publish this one, and settle again what was taken back: {back}, "
        f"tidemark publish {run.id}, tidemark settle {' '.join(f'--day {day}' for day in days)}"
    )


def rollback(settings: Settings, catalog: Catalog, run_id: str, reason: str) -> list[Published]:
    """Take a publication back: each table as it was before, in one commit a table, views before rollups; without Spark.

    Only the newest publication of its days can be taken back. Done twice, or after a kill again, it finishes and does
    nothing more. Failed checks that a person took upon themselves are in force no longer. Raises `SettleError` for a run that is
    not published, `LakeError` when a table cannot go back; then nothing is done.
    """
    with lake.publishing(settings, run_id):
        run = lake.run_of(settings, run_id)
        lake.note_published(settings, catalog, run)
        if run.state not in ("published", "rolled back") and not run.visible:
            raise SettleError(f"run {run_id} is {run.state}, so there is nothing to take back")
        done = []
        swapped = [d for d in reversed(catalog.derived) if run.tables.get(d.name, {}).get("published")]
        reason = lake.plain(reason)
        said = {"rollback": run.id, "days": run.days, "reason": reason}
        for declared in swapped:
            lake.refuse_rollback(settings, lake.table(settings, declared), run, run.days_of(declared))
        for declared in swapped:
            began = time.monotonic()
            table = lake.table(settings, declared)
            its = run.tables[declared.name]
            its["going_back"] = True  # killed behind the commit, it knows that what is gone is so by itself
            lake.save(settings, run)
            try:
                version = lake.roll_back(settings, table, run, run.days_of(declared), said)
            except lake.LakeError:
                its.pop("going_back")
                lake.save(settings, run)
                raise
            lake.failpoint("rolled back")
            for mark in ("published", "going_back"):
                its.pop(mark)
            its["rolled_back"] = datetime.now(UTC).isoformat()
            lake.save(settings, run)
            done.append(Published(declared.name, version, 0, time.monotonic() - began))
        for name, its in run.tables.items():
            if not run.seen(name):  # a person's word was for the publication that is taken back
                its.pop("forced", None)
        if left := [name for name, its in run.tables.items() if its.get("published")]:
            log.warning("stays as the run has published it: no pipeline declares it any more", tables=left, run=run.id)
        run.state, run.published = "rolled back", None
        run.note = reason
        lake.save(settings, run)
        return done
