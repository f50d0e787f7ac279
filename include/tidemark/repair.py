"""Files that a table names and that are gone or cut: found without Spark, and made again from what holds their rows too."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from tidemark import fold, kafka, lake, quality, session, settle
from tidemark.model import Catalog, Declared, Topic, needed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidemark.settings import Settings

Progress = Callable[[str], None]


class RepairError(RuntimeError):
    """A file cannot be made again; the sentence names it and the way out."""


@dataclass(frozen=True)
class Damage:
    """A file that a table's newest version names, and `what` is wrong with it: it is gone, or is not as long as written; or the
    table's Delta log, with the sentence why it cannot be read."""

    table: str
    path: str
    day: date | None
    rows: int
    what: str


@dataclass(frozen=True)
class Repaired:
    """What became of one table: `rows` that are there again, and the command that does the rest, where there is one, or why a
    person has to: of such a table no file is repaired."""

    table: str
    files: int
    rows: int
    then: str | None


def damage(settings: Settings, catalog: Catalog) -> list[Damage]:
    """Every file of the lake's tables that is gone or cut; one look at each, without Spark. What is inside is not read. Raises
    `LakeError` where there is no lake at all."""
    lake.refuse_empty(settings)
    tables = [lake.table(settings, catalog[name]) for name in catalog.names]
    found = []
    for table in (*tables, lake.ledger(settings), lake.verdicts(settings)):
        try:
            files = table.files() if table.exists else []
            found += [Damage(table.name, f.path, f.day, f.rows, what) for f in files if (what := wrong(table, f))]
        except lake.LakeError as error:
            found.append(Damage(table.name, "_delta_log", None, 0, str(error)))
    return found


def wrong(table: lake.Table, file: lake.File) -> str | None:
    try:
        size = (table.path / file.path).stat().st_size
    except FileNotFoundError:
        return "is gone"
    return None if size == file.size else f"has {size:,} of {file.size:,} bytes"


def damaged(table: lake.Table) -> list[lake.File]:
    return [file for file in table.files() if wrong(table, file)] if table.exists else []


def repair(settings: Settings, catalog: Catalog, progress: Progress = lambda _: None) -> list[Repaired]:
    """Make a log's damaged files again from Kafka, and have rollups and views name theirs no more: those are replayed. Verdicts
    are written again from what is kept beside their runs' records.

    Beside a running stream too. What cannot be repaired says why, and keeps nothing else from it but what is made of it: a log
    of which Kafka no longer holds what a file held, or nobody knows what it held, what is made of days that a log no longer
    keeps, and verdicts that nothing holds any more.
    Raises `RepairError` for the ledger, which is made of nothing else, and `LakeError` in another business zone than the days'.
    """
    lake.refuse_other_zone(settings, catalog.topics.values())
    done, left = list[Repaired](), set[str]()
    ledger, verdicts = lake.ledger(settings), lake.verdicts(settings)
    if files := damaged(ledger):
        raise RepairError(f"table {ledger.name}: {files[0].path} {wrong(ledger, files[0])}; put it back from a copy")
    declared = [(lake.table(settings, d), d) for d in (*catalog.topics.values(), *catalog.derived)]
    for table, one in (*declared, (verdicts, None)):
        try:
            if files := damaged(table):
                if one and (wanting := sorted(left & needed(catalog, [one.name]))):
                    raise RepairError(f"table {table.name} is made of {', '.join(wanting)}, which must be repaired before")
                done.append(mended(settings, catalog, one, table, files))
                progress(f"{table.name}: {len(files)} files {'made again' if done[-1].rows else 'named no more'}")
        except (RepairError, lake.LakeError, kafka.TopicMissing, ConnectionError) as error:
            done.append(Repaired(table.name, 0, 0, str(error)))
            left |= {one.name} if one else set()
    return done


def mended(
    settings: Settings, catalog: Catalog, declared: Declared | None, table: lake.Table, files: Sequence[lake.File]
) -> Repaired:
    """One table's damaged files, by what it is of; of nothing for the verdicts. Raises `RepairError`."""
    rows, first = sum(f.rows for f in files), min((f.day for f in files if f.day), default=None)
    if isinstance(declared, Topic):
        otherwise = again(settings, declared, table, files)
        made_of_it = [d.name for d in catalog.derived if any(s.name == declared.name for s in d.reads.values())]
        return Repaired(table.name, len(files), rows, replayed(made_of_it, first) if otherwise and made_of_it else None)
    if declared is None:
        kept(settings, table, files)
        return Repaired(table.name, len(files), rows, None)
    refuse_expired(settings, catalog, declared, table, files)
    if lake.swap(table, files, [], {"damaged": [f.path for f in files]}) is None:
        raise RepairError(f"table {table.name} was rewritten meanwhile; run it again: tidemark verify --repair")
    return Repaired(table.name, len(files), 0, replayed([declared.name], first))


def replayed(names: Sequence[str], first: date | None) -> str:
    return f"tidemark replay --source log {' '.join(f'--only {name}' for name in names)} --from {first} --reason repair"


def refuse_expired(
    settings: Settings, catalog: Catalog, declared: Declared, table: lake.Table, files: Sequence[lake.File]
) -> None:
    """Raises `RepairError` where a damaged file is of a day that no replay computes again, since a log has expired of which it is
    made: named no more it would be lost, when a copy may have it yet."""
    since, why = settle.held_from(settings, catalog, [declared.name])
    if old := [f for f in files if f.day and f.day < since]:
        raise RepairError(
            f"table {table.name}: {why}; {old[0].path} of {old[0].day} is damaged, and cannot be made again: put it back from a "
            f"copy, or give the day up, by Spark: DELETE FROM delta.`{table.path}` WHERE day = '{old[0].day}'"
        )


def again(settings: Settings, topic: Topic, table: lake.Table, files: Sequence[lake.File]) -> bool:
    """Read from Kafka again what a log's files held, and put it in their place, in one commit for each stream and day.

    Returns whether the log now has other rejects of their batches than the ledger: they were mended before, or the code of now
    judges otherwise than that by which they were read, and what is made of the log does not have what it accepts.
    """
    asked: list[tuple[lake.Batch, dict[int, tuple[int, int]], int]] = []
    groups: dict[tuple[str, date], list[lake.File]] = {}
    for file in files:
        if not file.live or not file.day:
            raise RepairError(
                f"table {table.name}: {file.path} {wrong(table, file)}, and was not written by a stream (OPTIMIZE, UPDATE or the "
                f"like), so that nobody knows which records it held; put it back from a copy"
            )
        groups.setdefault((file.live["stream"], file.day), []).append(file)
    now = kafka.topic_ids(settings, [topic.name])[topic.name]
    if now != (table.topic_id or now):  # its offsets are of other records
        raise RepairError(
            f"table {table.name}: {files[0].path} {wrong(table, files[0])}, and Kafka's topic {topic.name} is another than the "
            f"one that it holds (its id is {now}, the stream has read {table.topic_id}); put it back from a copy"
        )
    for (stream, day), mine in groups.items():
        span = [int(f.live[k]) for f in mine if f.live for k in ("lo", "hi")]
        batch = lake.Batch(stream, min(span), max(span))
        places, rejects = dict[int, tuple[int, int]](), 0
        for row in lake.ledger_rows(settings, stream, batch.lo - 1):
            if row["topic"] == topic.name and row["seq"] <= batch.hi:
                low, high = places.get(row["partition"], (row["from_offset"], 0))
                places[row["partition"]] = min(low, row["from_offset"]), max(high, row["until_offset"])
                rejects += row["rejects"]
        asked.append((batch, places, rejects))
        rows = sum(f.rows for f in mine)
        first = kafka.offsets(settings, [topic.name], "earliest")[topic.name]
        if gone := [p for p, (low, _) in places.items() if low < first.get(p, 0)]:
            raise RepairError(
                f"table {table.name}: {mine[0].path} {wrong(table, mine[0])}, and Kafka no longer holds all that it held: of "
                f"partition {gone[0]} offsets {places[gone[0]][0]} to {first[gone[0]] - 1} are deleted; put it back from a copy"
            )
        whole = [f for f in table.files() if f.day == day and not wrong(table, f)]
        adds = lake.write_spark(table, batch.folder, missing(settings, topic, table, whole, places, day))
        found = sum(json.loads(add.stats)["numRecords"] for add in adds)
        if found != rows:
            raise RepairError(
                f"table {table.name}: {mine[0].path} {wrong(table, mine[0])}; of the {rows:,} records of {day} that are missing "
                f"Kafka, judged by the code of now, gives {found:,}; put it back from a copy"
            )
        if lake.swap(table, mine, adds, {"made again": [f.path for f in mine]}) is None:
            raise RepairError(f"table {table.name} was rewritten meanwhile; run it again: tidemark verify --repair")
    spark = session.session(settings, "tidemark-repair")

    def rejected(batch: lake.Batch, places: dict[int, tuple[int, int]]) -> int:
        files = table.files_of(batch.lo, batch.hi, batch.stream)
        return sum(row["rejected"] for row in settle.counted(spark, table, files, places))

    return any(rejected(batch, places) != rejects for batch, places, rejects in asked)


def kept(settings: Settings, verdicts: lake.Table, files: Sequence[lake.File]) -> None:
    """Write the verdicts of damaged files again, in one commit: `runs/<run>.verdicts` holds them too."""
    adds = []
    for file in files:
        run = file.path.split("/")[1]
        beside = settings.lake_path / "runs" / f"{run}.verdicts"
        found = [v for v in quality.from_json(lake.told(beside)) if v.days[0] == file.day] if beside.exists() else []
        if len(found) != file.rows:
            raise RepairError(
                f"table {verdicts.name}: {file.path} {wrong(verdicts, file)}, and no run's record has its {file.rows:,} verdicts "
                f"beside it; put it back from a copy"
            )
        adds += lake.write_arrow(verdicts, f"live/{run}/{uuid.uuid4().hex[:8]}", quality.to_arrow(found))
    if lake.swap(verdicts, files, adds, {"written again": [f.path for f in files]}) is None:
        raise RepairError(f"table {verdicts.name} was rewritten meanwhile; run it again: tidemark verify --repair")


def missing(
    settings: Settings, topic: Topic, table: lake.Table, whole: Sequence[lake.File], places: dict[int, tuple[int, int]], day: date
) -> DataFrame:
    """The records of a day at these places, `[from, until)` by partition, that the log's whole files lack; judged again."""
    from pyspark.sql import functions as F

    spark = session.session(settings, "tidemark-repair")
    source = kafka.between(spark, settings, topic.name, places, "tidemark-repair")
    columns = [f.name for f in table.delta().schema().fields]
    rows = fold.judged(topic, source).where(F.col("day") == F.lit(day)).select(*columns)
    place = (F.col("kafka.partition").alias("_p"), F.col("kafka.offset").alias("_o"))
    there = lake.read(spark, table, files=whole).select(*place)
    return rows.select("*", *place).join(there, on=["_p", "_o"], how="left_anti").select(*columns).coalesce(1)
