"""Their hands on the tables: a person's own delta-spark beside a real stream, its settlings and its publications.

One home and one stream; the tests follow each other and each begins where the one before ended.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import fold, kafka, lake, model, query, settle
from tidemark.functions import distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, expect, rollup, view
from tidemark.settings import Settings

TOPIC = "clicks_of_the_hands_test"
TODAY = datetime.now(UTC).date()
YESTERDAY = TODAY - timedelta(days=1)
MIDNIGHT = datetime.combine(YESTERDAY, datetime.min.time(), UTC)
pytestmark = pytest.mark.long

EVERY = (f"log/{TOPIC}", "rollups/minutes", "views/hours", "ledger", "verdicts")


def declared() -> Catalog:
    """Clicks by minute and by hour; the topic has the shipped pipeline's check of its offsets."""
    every_offset = expect(
        "UnexpectedRowsExpectation",
        description="accepted + rejected = offsets",
        unexpected_rows_query=f"SELECT * FROM {TOPIC}_offsets WHERE accepted + rejected <> offsets",
    )
    source = Topic(
        TOPIC,
        key="id",
        partitions=2,
        schema="id STRING NOT NULL, clicked_at TIMESTAMP NOT NULL",
        id="id",
        event_time="clicked_at",
        checks=(every_offset,),
    )

    @rollup(reads={"clicks": source}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def minutes(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy(pane("clicked_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    @view(reads={"minutes": minutes}, key=("hour",), time="hour", live=Live("1 second", "2 hours"))
    def hours(minutes: DataFrame) -> DataFrame:
        return minutes.groupBy(F.date_trunc("hour", "minute").alias("hour")).agg(F.sum(how_many("ids")).alias("clicks"))

    return model.catalog([type("shop", (), {"source": source, "minutes": minutes, "hours": hours})])


def at(hour: int, minute: int = 0) -> datetime:
    return MIDNIGHT + timedelta(hours=hour, minutes=minute)


class Shop:
    """The home, its stream, what was sent, and a person's Spark: other defaults, another zone, instants as INT96."""

    def __init__(self, settings: Settings, start: Callable[..., Any], spark: SparkSession) -> None:
        self.settings, self.catalog, self.spark, self.start = settings, declared(), spark, start
        self.sent: list[dict[str, Any]] = []
        self.theirs = spark.newSession()
        self.theirs.conf.set("spark.sql.session.timeZone", "Asia/Shanghai")
        self.theirs.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
        self.theirs.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        # VACUUM lists a table in as many tasks as this says, 10,000 unless it is set: 100 s and more on two cores.
        self.theirs.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "2")
        kafka.apply(settings, self.catalog.topics.values())
        self.stream = start(settings)

    def path(self, name: str) -> Path:
        return self.settings.lake_path / name

    def sql(self, statement: str, *names: str) -> list[Any]:
        """A person's statement on each of the tables, `{t}` in it; the last row of each answer."""
        return [self.theirs.sql(statement.format(t=f"delta.`{self.path(name)}`")).collect()[-1] for name in names]

    def batch(self, *instants: datetime) -> None:
        """Send clicks and wait until the stream has entered them."""
        events = [{"id": f"c{len(self.sent) + n}", "clicked_at": moment.isoformat()} for n, moment in enumerate(instants)]
        assert kafka.produce(self.settings, self.catalog.topics[TOPIC], events).complete
        self.sent += [{"id": e["id"], "moment": moment} for e, moment in zip(events, instants, strict=True)]
        self.stream.until(lambda: sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == len(self.sent))

    def told(self, day: date = YESTERDAY) -> list[tuple[int, int]]:
        """Clicks by hour of a day, by DuckDB over what was sent."""
        with duckdb.connect() as brute:
            brute.execute("SET TimeZone = 'UTC'")
            brute.register("sent", pa.Table.from_pylist(self.sent))
            sql = f"SELECT hour(moment), count(DISTINCT id) FROM sent WHERE moment::DATE = '{day}' GROUP BY 1 ORDER BY 1"
            return brute.execute(sql).fetchall()

    def hours(self, day: date = YESTERDAY) -> list[tuple[int, int]]:
        """Clicks by hour of a day, as a reader finds them: a row that is there twice is there twice."""
        return query.query(
            self.settings, self.catalog, f"SELECT hour(hour), clicks FROM hours WHERE day = '{day}' ORDER BY 1"
        ).rows

    def rolled(self) -> list[tuple[int, int]]:
        """Clicks by hour of yesterday, merged from the rollup."""
        merged = fold.merge(self.catalog.rollups["minutes"], lake.read(self.spark, self.table("minutes"), days=[YESTERDAY]))
        by_hour = merged.groupBy(F.hour("minute").alias("h")).agg(F.sum(how_many("ids")).alias("n")).orderBy("h")
        return [(r["h"], r["n"]) for r in by_hour.collect()]

    def records(self, of: str = "") -> tuple[int, int]:
        """How many rows the log has, and how many records those are."""
        clause = f"SELECT count(*), count(DISTINCT kafka.partition, kafka.offset) FROM {{t}}{of}"
        [row] = self.sql(clause, f"log/{TOPIC}")
        return row[0], row[1]

    def rows(self, name: str, of: str = "") -> list[str]:
        """What a table, or a version of it, holds."""
        return sorted(map(str, self.theirs.sql(f"SELECT * FROM delta.`{self.path(name)}`{of}").collect()))

    def table(self, name: str) -> lake.Table:
        return lake.table(self.settings, self.catalog[name])

    def settled(self, reason: str) -> lake.Run:
        return settle.settle(self.settings, self.catalog, [YESTERDAY], reason)

    def publish(self, run: lake.Run) -> dict[str, settle.Published]:
        return {p.table: p for p in settle.publish(self.settings, self.catalog, run.id)}


@pytest.fixture(scope="module")
def shop(house: Callable[..., Settings], run: Any, spark: SparkSession) -> Iterator[Shop]:
    yield Shop(house(compact_every="1 hour"), lambda settings: run(settings), spark)


@pytest.mark.parametrize("written", [lake.write_arrow, lake.write_spark])
def test_vacuum_between_the_writing_of_a_batch_and_its_commit_leaves_its_files(shop: Shop, tmp_path: Path, written: Any) -> None:
    rows = pa.table({"n": [1], "at": pa.array([at(10)]), "day": [YESTERDAY]})
    frame = shop.spark.createDataFrame(rows)
    table = lake.Table(tmp_path, "log/numbers", "at")
    table.create(frame.schema)
    batch = lake.Batch("main", 0, 0)
    adds = written(table, batch.folder, rows if written is lake.write_arrow else frame)
    shop.theirs.sql(f"VACUUM delta.`{table.path}` RETAIN 0 HOURS")
    assert lake.append(table, batch, adds)
    assert [r["n"] for r in shop.theirs.read.format("delta").load(str(table.path)).collect()] == [1]


def test_note_of_their_own_in_the_history_does_not_stop_a_batch_that_comes_twice(shop: Shop, tmp_path: Path) -> None:
    rows = pa.table({"n": [1, 2], "at": pa.array([at(10)] * 2), "day": [YESTERDAY] * 2})
    table = lake.Table(tmp_path, "log/numbers", "at")
    table.create(shop.spark.createDataFrame(rows).schema)
    batch = lake.Batch("main", 0, 0)
    lake.append(table, batch, lake.write_arrow(table, batch.folder, rows))
    shop.theirs.conf.set("spark.databricks.delta.commitInfo.userMetadata", "tidied up by Ann")
    shop.theirs.sql(f"DELETE FROM delta.`{table.path}` WHERE n = 2")
    shop.theirs.conf.unset("spark.databricks.delta.commitInfo.userMetadata")
    assert not lake.append(table, batch, lake.write_arrow(table, batch.folder, rows))


def test_optimize_of_every_table_while_the_stream_runs_then_batches_then_a_settling(shop: Shop) -> None:
    # hours   10          14     15     16
    #         3                  3      3    ← stream time is 16:40: `back`, two hours, reaches to 14
    shop.batch(*(at(10, minute) for minute in (0, 20, 40)))
    shop.stream.until(lambda: shop.hours() == shop.told())
    shop.batch(*(at(hour, minute) for hour in (15, 16) for minute in (0, 20, 40)))
    shop.stream.until(lambda: shop.hours() == shop.told() == [(10, 3), (15, 3), (16, 3)])

    done = shop.sql("OPTIMIZE {t}", *EVERY[:-1])
    assert all(answer["metrics"]["numFilesRemoved"] > 1 for answer in done)

    # What OPTIMIZE put into one file lies on both sides of what is computed again: hour 10 stays, 16 is replaced.
    shop.batch(at(16, 50), at(16, 51))
    shop.stream.until(lambda: (16, 5) in shop.hours(), 60)
    assert shop.hours() == shop.told() == [(10, 3), (15, 3), (16, 5)]
    assert shop.rolled() == shop.told()

    run = shop.settled("after OPTIMIZE")
    assert {p.blocked for p in shop.publish(run).values()} == {()}
    assert shop.hours() == shop.rolled() == shop.told()
    assert shop.records() == (11, 11)


def test_every_kind_of_table_keeps_its_history_for_as_long_as_it_is_promised(shop: Shop) -> None:
    kept = {"delta.logRetentionDuration": "interval 1 hours", "delta.deletedFileRetentionDuration": "interval 3 hours"}
    for name in EVERY:
        properties = shop.theirs.sql(f"DESCRIBE DETAIL delta.`{shop.path(name)}`").collect()[0]["properties"]
        assert kept.items() <= properties.items(), name


def test_vacuum_of_everything_while_the_stream_runs_takes_no_file_that_a_table_names(shop: Shop) -> None:
    for names in (EVERY[:2], EVERY[2:]):
        shop.batch(at(11), at(12))
        shop.sql("VACUUM {t} RETAIN 0 HOURS", *names)
    shop.batch(at(13))
    for name in EVERY:
        table = lake.Table(shop.settings.lake_path, name)
        assert [f.path for f in table.files() if not (table.path / f.path).exists()] == []
    assert shop.rolled() == shop.told()
    assert shop.records() == (16, 16)


def test_stream_of_their_own_sees_each_record_once_through_batches_compaction_and_optimize(shop: Shop) -> None:
    source = shop.theirs.readStream.format("delta").option("skipChangeCommits", "true").load(str(shop.path(f"log/{TOPIC}")))
    theirs = source.selectExpr("kafka.partition", "kafka.offset").writeStream.format("memory").queryName("theirs").start()
    for second in range(lake.WORTH_MERGING):
        shop.batch(at(14) + timedelta(seconds=second))
    theirs.processAllAvailable()
    log = shop.table(TOPIC)
    shop.before = log.delta().version(), shop.records()  # type: ignore[attr-defined]
    whole = {name: (DeltaTable(shop.path(name)).version(), shop.rows(name)) for name in EVERY}
    shop.whole = whole  # type: ignore[attr-defined]
    pin = lake.Checkpoint.of(shop.settings, "main").pin()
    assert pin and lake.compact(shop.spark, shop.settings, log, None, {"main": pin.seq}) >= lake.WORTH_MERGING - 1
    shop.batch(at(14, 1))
    [done] = shop.sql("OPTIMIZE {t}", f"log/{TOPIC}")
    assert done["metrics"]["numFilesRemoved"] > 1
    shop.batch(at(14, 2))
    theirs.processAllAvailable()
    seen = shop.theirs.sql("SELECT count(*) AS rows, count(DISTINCT partition, offset) AS records FROM theirs").collect()[0]
    theirs.stop()
    assert (seen["rows"], seen["records"]) == (len(shop.sent), len(shop.sent)) == shop.records()


def test_version_before_a_compaction_and_an_optimize_reads_what_was_there(shop: Shop) -> None:
    version, records = shop.before  # type: ignore[attr-defined]
    assert shop.records(f" VERSION AS OF {version}") == records == (28, 28)
    assert DeltaTable(shop.path(f"log/{TOPIC}"), version=version).count() == 28


def test_delete_and_update_beside_an_idle_stream_then_batches_then_a_settling(shop: Shop) -> None:
    ten, eleven, fifteen, today = (f"timestamp'{at(hour):%Y-%m-%dT%H:%M:%SZ}'" for hour in (10, 11, 15, 24))
    shop.batch(at(24))
    shop.stream.until(lambda: shop.hours(TODAY) == shop.told(TODAY) == [(0, 1)])

    shop.sql(f"DELETE FROM {{t}} WHERE minute < {ten} + INTERVAL 1 HOUR", "rollups/minutes")
    shop.sql(f"UPDATE {{t}} SET minute = minute + INTERVAL 9 HOURS WHERE minute = {eleven}", "rollups/minutes")
    shop.sql(f"DELETE FROM {{t}} WHERE hour = {ten}", "views/hours")
    shop.sql(f"UPDATE {{t}} SET clicks = 99 WHERE hour IN ({fifteen}, {today})", "views/hours")
    shop.sql("UPDATE {t} SET rejects = rejects", "ledger")
    shop.sql("DELETE FROM {t} WHERE outcome = 'passed'", "verdicts")
    assert shop.hours(TODAY) == [(0, 99)]

    # What is live is computed again with the next event; what is settled stays as a person has made it.
    shop.batch(at(12, 30), at(24, 1))
    shop.stream.until(lambda: shop.hours(TODAY) == shop.told(TODAY) == [(0, 2)])
    assert (10 in dict(shop.hours()), dict(shop.hours())[15]) == (False, 99)
    assert shop.rolled() == sorted((20 if hour == 11 else hour, clicks) for hour, clicks in shop.told() if hour != 10)

    run = shop.settled("what a person changed beside the stream")
    assert {p.blocked for p in shop.publish(run).values()} == {()}
    assert shop.hours() == shop.rolled() == shop.told()
    assert shop.hours(TODAY) == shop.told(TODAY)
    assert shop.records() == (len(shop.sent), len(shop.sent))


def test_every_kind_of_table_is_read_as_it_was_at_a_version(shop: Shop) -> None:
    for name, (version, rows) in shop.whole.items():  # type: ignore[attr-defined]
        assert shop.rows(name, f" VERSION AS OF {version}") == rows != shop.rows(name), name
        assert DeltaTable(shop.path(name), version=version).count() == len(rows)


def test_run_staged_before_a_person_s_changes_refuses_and_the_next_settling_brings_every_row_back(shop: Shop) -> None:
    shop.stream.drains()
    early = shop.settled("before the changes")
    ten, fifteen = (f"timestamp'{at(hour):%Y-%m-%dT%H:%M:%SZ}'" for hour in (10, 15))
    shop.sql(f"DELETE FROM {{t}} WHERE minute < {fifteen}", "rollups/minutes")
    shop.sql(f"UPDATE {{t}} SET minute = minute + INTERVAL 4 HOURS WHERE minute < {fifteen} + INTERVAL 1 HOUR", "rollups/minutes")
    shop.sql(f"DELETE FROM {{t}} WHERE hour = {ten}", "views/hours")
    shop.sql(f"UPDATE {{t}} SET clicks = 99 WHERE hour = {fifteen}", "views/hours")
    shop.sql("UPDATE {t} SET day = day", "ledger", "verdicts")
    shop.sql("OPTIMIZE {t}", *EVERY)
    changed = [(hour, 99 if hour == 15 else clicks) for hour, clicks in shop.told() if hour in (15, 16)]
    assert shop.rolled() == [(16, 5), (19, 3)]
    assert [row for row in shop.hours() if row[0] in (10, 15, 16)] == changed == [(15, 99), (16, 5)]
    with pytest.raises(lake.LakeError, match=f"was written by someone else after the pin .* tidemark settle --day {YESTERDAY}"):
        shop.publish(early)
    shop.sql("VACUUM {t} RETAIN 0 HOURS", "rollups/minutes")  # spares what has just been staged: its files are dated ahead
    lake.staged(shop.table("minutes"), early.id)
    for file in lake.staging(shop.table("minutes"), early.id).glob("*/day=*/*.parquet"):
        file.unlink()
    with pytest.raises(lake.LakeError, match=f"run {early.id}: staged file .* is gone; settle the days again"):
        shop.publish(early)

    later = shop.settled("what a person changed")  # its pin is the last batch again, and the changes came after that batch
    shop.sql("VACUUM {t} RETAIN 0 HOURS", "rollups/minutes", "views/hours")
    shop.publish(later)
    assert shop.hours() == shop.rolled() == shop.told()


def test_vacuum_leaves_what_a_publication_replaced_so_that_it_comes_back_by_a_roll_back(shop: Shop) -> None:
    newest, before = lake.runs(shop.settings)[-1], shop.hours()
    shop.sql("VACUUM {t} RETAIN 0 HOURS", "rollups/minutes", "views/hours")
    settle.rollback(shop.settings, shop.catalog, newest.id, "to see what was there")
    assert (15, 99) in shop.hours() != before
    shop.publish(shop.settled("and back"))
    assert shop.hours() == shop.rolled() == shop.told() == before


def test_roll_back_of_what_a_person_has_rewritten_is_refused(shop: Shop) -> None:
    newest = lake.runs(shop.settings)[-1]
    shop.sql("UPDATE {t} SET clicks = clicks WHERE true", "views/hours")
    with pytest.raises(
        lake.LakeError, match=f"what run {newest.id} published in views/hours was rewritten by someone else since"
    ):
        settle.rollback(shop.settings, shop.catalog, newest.id, "a mistake")
    assert shop.hours() == shop.rolled() == shop.told()


def test_deletion_vectors_let_batches_in_and_hold_a_publication_back_until_they_are_purged(shop: Shop) -> None:
    ten = f"timestamp'{at(10):%Y-%m-%dT%H:%M:%SZ}'"
    three = EVERY[:3]
    shop.sql("OPTIMIZE {t}", *three)
    for name in three:
        shop.theirs.sql(f"ALTER TABLE delta.`{shop.path(name)}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
    shop.sql("UPDATE {t} SET id = id WHERE id = 'c0'", three[0])  # the row moves, its old place is left out
    shop.sql(f"DELETE FROM {{t}} WHERE minute = {ten}", three[1])
    shop.sql(f"DELETE FROM {{t}} WHERE hour = {ten}", three[2])
    assert shop.rolled()[0] == (10, 2)  # read by delta-spark from now on

    shop.stream = shop.start(shop.settings)
    shop.batch(at(17), at(17, 1))
    assert shop.records() == (len(shop.sent), len(shop.sent))
    log = shop.table(TOPIC)
    [newest] = [f for f in log.files() if f.live and int(f.live["hi"]) == log.appended("main") and f.rows]
    assert lake.read(shop.spark, log, files=[newest]).count() == newest.rows == 2

    held = shop.settled("over deletion vectors")
    with pytest.raises(lake.LakeError, match="of rollups/minutes that are to be replaced have deletion vectors") as refused:
        shop.publish(held)
    off, purge = re.findall(r"(ALTER TABLE .*?\)|REORG TABLE .*?\(PURGE\))", str(refused.value))
    assert str(shop.path("rollups/minutes")) in off and str(shop.path("rollups/minutes")) in purge
    for name in three:
        for repair in (off, purge):
            shop.theirs.sql(repair.replace("rollups/minutes", name)).collect()
    purged = shop.settled("after REORG")
    shop.publish(purged)
    assert shop.hours() == shop.rolled() == shop.told()
    assert shop.records() == (len(shop.sent), len(shop.sent))


def test_spark_duckdb_and_polars_give_one_answer_after_all_of_it(shop: Shop) -> None:
    answers = {
        TOPIC: "SELECT count(*) AS n, count(DISTINCT id) AS ids, min(clicked_at) AS low, max(clicked_at) AS high FROM {t}",
        "hours": "SELECT count(*) AS n, sum(clicks) AS clicks, min(hour) AS low, max(hour) AS high FROM {t}",
        "ledger": "SELECT count(*) AS n, sum(records) AS records, min(started_at) AS low, max(finished_at) AS high FROM {t}",
    }
    lazily = {
        TOPIC: (pl.len(), pl.col("id").n_unique(), pl.min("clicked_at").alias("low"), pl.max("clicked_at").alias("high")),
        "hours": (pl.len(), pl.sum("clicks"), pl.min("hour").alias("low"), pl.max("hour").alias("high")),
        "ledger": (pl.len(), pl.sum("records"), pl.min("started_at").alias("low"), pl.max("finished_at").alias("high")),
    }
    for name, sql in answers.items():
        path = shop.settings.lake_path / (name if name == "ledger" else shop.catalog[name].table)
        by_spark = tuple(shop.spark.sql(sql.format(t=f"delta.`{path}`")).toArrow().to_pylist()[0].values())
        by_duckdb = query.query(shop.settings, shop.catalog, sql.format(t=name)).rows[0]
        by_polars = pl.scan_delta(str(path)).select(*lazily[name]).collect().row(0)
        assert by_spark == by_duckdb == by_polars, name
    assert query.query(shop.settings, shop.catalog, "SELECT sum(records)::INT FROM ledger").rows == [(len(shop.sent),)]


def test_stream_of_their_own_that_was_away_for_longer_than_the_history_stops_and_loses_nothing_unsaid(
    shop: Shop, tmp_path: Path
) -> None:
    path, seen = shop.path(f"log/{TOPIC}"), []

    def follow() -> None:
        source = shop.theirs.readStream.format("delta").option("skipChangeCommits", "true").load(str(path))
        writing = source.writeStream.foreachBatch(lambda rows, _: seen.append(rows.count()))
        writing.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start().awaitTermination()

    follow()
    assert sum(seen) == len(shop.sent)
    shop.batch(at(24, 2))
    shop.batch(at(24, 3))
    two_hours_ago = time.time() - 7200
    for file in (path / "_delta_log").glob("*.*"):
        os.utime(file, (two_hours_ago, two_hours_ago))
    DeltaTable(path).create_checkpoint()
    DeltaTable(path).cleanup_metadata()
    shop.batch(at(24, 4))
    with pytest.raises(StreamingQueryException, match="update your retention policy"):
        follow()
    assert shop.records() == (len(shop.sent), len(shop.sent))


def test_record_deleted_from_a_log_fails_its_gate_and_nothing_that_reads_it_is_published(shop: Shop) -> None:
    shop.sql("DELETE FROM {t} WHERE id = 'c4'", f"log/{TOPIC}")
    before = shop.told()
    lacking = shop.settled("a record is gone")
    assert {name: said["gate"] for name, said in lacking.tables.items()} == {
        TOPIC: "failed",
        "minutes": "blocked",
        "hours": "blocked",
    }
    done = shop.publish(lacking)
    assert "accepted + rejected = offsets" in " ".join(lacking.tables[TOPIC]["reasons"])
    assert all(f"reads {TOPIC}" in done[name].blocked[0] or "reads minutes" in done[name].blocked[0] for name in done)
    assert [p.version for p in done.values()] == [None, None]
    assert shop.hours() == shop.rolled() == before


def test_partition_that_is_gone_whole_from_a_log_is_missed_too(shop: Shop) -> None:
    shop.sql("DELETE FROM {t} WHERE kafka.partition = 1", f"log/{TOPIC}")
    lacking = shop.settled("a partition is gone")
    kept = json.loads((shop.settings.lake_path / "runs" / f"{lacking.id}.verdicts").read_text())
    [missed] = [v for v in kept if v["check_name"] == "accepted + rejected = offsets"]
    assert lacking.tables[TOPIC]["gate"] == "failed"
    assert {row["partition"]: row["accepted"] for row in json.loads(missed["sample"])}[1] == 0
