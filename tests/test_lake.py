"""The lake: batches enter once, publications are seen whole or not at all, and nothing that someone needs is deleted."""

import json
import math
import multiprocessing
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from tidemark import lake, model, repair, settle, speed
from tidemark.lake import Batch, LakeError, Pin, Run, Table
from tidemark.local import Lease
from tidemark.model import Topic
from tidemark.settings import Settings

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
DAY, NEXT = NOON.date(), NOON.date() + timedelta(days=1)
MICRO, MINUTE, HOUR = timedelta(microseconds=1), timedelta(minutes=1), timedelta(hours=1)
COLUMNS = pa.schema([("page", pa.string()), ("pane", pa.timestamp("us", "UTC")), ("n", pa.int64()), ("day", pa.date32())])
SCHEMA = StructType().add("page", "string").add("pane", "timestamp").add("n", "long").add("day", "date")


def rows(*numbers: int, at: datetime = NOON) -> pa.Table:
    return pa.Table.from_pylist([{"page": "/", "pane": at, "n": n, "day": at.date()} for n in numbers], COLUMNS)


@pytest.fixture
def table(settings) -> Table:
    made = Table(settings.lake_path, "rollups/panes", "pane")
    made.create(SCHEMA, "Panes of each page.")
    return made


def put(table: Table, seq: int, *numbers: int, at: datetime = NOON, stream: str = "main") -> bool:
    """Append a batch of these rows; its offsets follow from its number."""
    batch = Batch(stream, seq, seq, {"page_views": {"0": [seq * 10, seq * 10 + 10]}})
    return lake.append(table, batch, lake.write_arrow(table, batch.folder, rows(*numbers, at=at)))


def numbers(table: Table) -> list[int]:
    """What a reader sees now: the `n` of every row of the newest version, opened anew."""
    return sorted(DeltaTable(table.path).to_pyarrow_table(columns=["n"])["n"].to_pylist())


def a_run(settings, name: str, seq: int, *days: date, state: str = "staged", taken: datetime | None = None) -> Run:
    """A run's record, saved, with stream main pinned at batch `seq`."""
    now = datetime.now(UTC)
    pin = Pin("main", seq, {"page_views": {"0": seq * 10 + 10}}, (taken or now).isoformat())
    run = Run(name, state, [str(d) for d in days or (DAY,)], "test", now.isoformat(), "0", {"main": pin})
    lake.save(settings, run)
    return run


def stage(table: Table, run: Run, staged: pa.Table) -> Run:
    """What a run stages is a Delta table of its own, whoever writes it."""
    write_deltalake(lake.staging(table, run.id), staged, partition_by=["day"], mode="append")
    return run


def publish(settings, table: Table, run: Run, whole_days: bool = False) -> int | None:
    return lake.publish(settings, table, run, map(date.fromisoformat, run.days), ["main"], {"run": run.id}, whole_days)


# -------------------------------------------------------------------------------------------------------------- create


def test_a_table_is_made_once_and_says_what_it_is(table):
    table.create(SCHEMA)
    metadata = DeltaTable(table.path).metadata()
    assert (metadata.description, metadata.partition_columns) == ("Panes of each page.", ["day"])
    assert DeltaTable(table.path).version() == 0


def test_a_table_whose_making_was_cut_off_is_made(settings):
    """delta-rs writes its first entry beside, and links it in: killed in between, only that file is there."""
    cut = Table(settings.lake_path, "log/cut", "pane")
    (cut.path / "_delta_log").mkdir(parents=True)
    (cut.path / "_delta_log" / "00000000000000000000.json#1").write_text("{}")
    assert not cut.exists
    cut.create(SCHEMA)
    assert DeltaTable(cut.path).version() == 0


def test_a_log_is_checkpointed_and_expires_as_it_is_promised(table):
    assert DeltaTable(table.path).metadata().configuration == {
        "delta.checkpointInterval": "20",
        "delta.logRetentionDuration": "interval 1 hours",
        "delta.deletedFileRetentionDuration": "interval 3 hours",
        "delta.enableExpiredLogCleanup": "true",
    }


def test_expired_entries_leave_a_log_after_a_checkpoint_and_not_at_every_commit(table, monkeypatch):
    """To look for them takes longer than all else in a commit, once there are thousands."""
    often = {"delta.logRetentionDuration": "interval 0 days", "delta.checkpointInterval": "5"}
    DeltaTable(table.path).alter.set_table_properties(often)
    monkeypatch.setattr(lake, "CLEAN_EVERY", 5)
    held = []
    for seq in range(7):
        put(table, seq, seq)
        held.append([int(entry.stem) for entry in sorted((table.path / "_delta_log").glob("*.json"))])
    assert held[:3] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]  # the last is checkpointed
    assert held[3:] == [[4, 5], [4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7, 8]]
    assert numbers(table) == [*range(7)]


def test_the_entries_of_a_log_are_listed_only_where_there_is_a_newer_one(table, monkeypatch):
    put(table, 0, 1)
    update, listed = DeltaTable.update_incremental, []
    monkeypatch.setattr(DeltaTable, "update_incremental", lambda delta: (listed.append(delta.version()), update(delta)))
    before = table.delta().version()
    listed.clear()
    assert (table.delta().version(), len(table.files()), listed) == (before, 1, [])
    put(Table(table.root, table.name), 1, 2)  # someone else
    assert (table.delta().version(), len(table.files())) == (before + 1, 2)
    assert before in listed


def without(name: str) -> StructType:
    return StructType([f for f in SCHEMA.fields if f.name != name])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (without("n").add("n", "string"), "table rollups/panes: n is long, the code says string. Columns can only be added"),
        (without("n"), "table rollups/panes: n long is not in the code. Columns can only be added"),
        (without("n").add("number", "long"), r"n long is not in the code \(the code has gained number; a column that is renamed"),
        (without("n").add("n", "decimal(10,2)"), r"n is long, the code says decimal\(10,2\)"),
    ],
)
def test_a_column_that_is_lost_renamed_or_retyped_is_refused_with_the_ways_out(table, other, sentence):
    put(table, 0, 1)
    with pytest.raises(LakeError, match=sentence + r".*Write it back as it was, or give .* a new name \(panes_v2\)"):
        table.create(other)
    assert numbers(table) == [1]


@pytest.mark.parametrize(
    ("key", "time", "said"),
    [
        (("pane", "page"), "pane", None),
        (("page", "pane", "more"), "pane", "the code says key more, page, pane, time pane"),  # old rows are of no `more`
        (("pane",), "pane", "the code says key pane, time pane"),
        (("page", "pane", "day"), "day", "the code says key day, page, pane, time day"),
    ],
    ids=["another order", "a column more", "a column less", "another time"],
)
def test_rows_by_another_key_or_time_are_refused_with_the_ways_out(settings, key, time, said):
    own = Table(settings.lake_path, "rollups/panes", "pane")
    own.create(SCHEMA, key=("page", "pane"))
    later, gained = Table(settings.lake_path, "rollups/panes", time), StructField("more", StringType())
    wanted = StructType([*SCHEMA.fields, *([gained] if "more" in key else [])])
    refused = rf"its rows are by key page, pane, time pane, {said}.* a new name \(panes_v2\)"
    with pytest.raises(LakeError, match=refused) if said else nullcontext():
        later.create(wanted, key=key)
    assert own.told(lake.ROW_OF) == "key page, pane, time pane" and len(own.delta().schema().fields) == len(SCHEMA.fields)


def test_a_column_that_is_gained_is_null_in_old_rows_and_readers_go_on(table, spark):
    put(table, 0, 1)
    table.create(StructType([*SCHEMA.fields[:-1], StructField("more", StringType()), SCHEMA.fields[-1]]))
    put(table, 1, 2)
    batch = Batch("main", 2, 2, {})
    wider = rows(3).append_column("more", pa.array(["x"]))
    assert lake.append(table, batch, lake.write_arrow(table, batch.folder, wider))
    expected = [(1, None), (2, None), (3, "x")]
    assert (
        sorted(tuple(r.values()) for r in DeltaTable(table.path).to_pyarrow_table(columns=["n", "more"]).to_pylist()) == expected
    )
    assert sorted(tuple(r) for r in lake.read(spark, table).select("n", "more").collect()) == expected
    again = Table(table.root, table.name)
    again.create(StructType([*SCHEMA.fields[:-1], StructField("more", StringType()), SCHEMA.fields[-1]]))
    assert again.delta().version() == table.delta().version()


def test_columns_have_the_comments_of_the_code(table):
    table.create(StructType([StructField(f.name, f.dataType, True, {"comment": f"{f.name}, UTC"}) for f in SCHEMA.fields]))
    assert [f.metadata.get("comment") for f in DeltaTable(table.path).schema().fields] == [
        f"{f.name}, UTC" for f in SCHEMA.fields
    ]


def start(path: Path, version: str, go: "multiprocessing.synchronize.Barrier") -> None:
    """A process that makes the table as the code says, at the moment in which others do."""
    table = Table(path.parent.parent, f"{path.parent.name}/{path.name}")
    fields = [StructField(f.name, f.dataType, True, {"comment": f"{f.name}, {version}"}) for f in SCHEMA.fields]
    gained = [StructField(f"{n}_of_{version}", StringType()) for n in range(3)]
    wanted = StructType([*fields[:-1], *gained, fields[-1]])
    table.delta()
    go.wait(30)
    table.create(wanted)


def test_streams_that_start_at_once_on_changed_code_add_columns_and_comments_each_once(table):
    put(table, 0, 1)
    context = multiprocessing.get_context("spawn")
    go = context.Barrier(4)
    starts = [context.Process(target=start, args=(table.path, "v2", go)) for _ in range(4)]
    for one in starts:
        one.start()
    for one in starts:
        one.join(60)
    assert [one.exitcode for one in starts] == [0] * 4
    fields = {f.name: f.metadata.get("comment") for f in DeltaTable(table.path).schema().fields}
    assert fields == {f.name: f"{f.name}, v2" for f in SCHEMA.fields} | {f"{n}_of_v2": None for n in range(3)}


def test_a_table_that_is_not_there_is_named(settings):
    absent = Table(settings.lake_path, "views/hours")
    assert (absent.exists, absent.appended("main")) == (False, None)
    with pytest.raises(LakeError, match="there is no table views/hours"):
        absent.delta()


# -------------------------------------------------------------------------------------------------------------- append


@pytest.mark.parametrize("seq", [0, 1, 17])
def test_a_batch_that_comes_twice_enters_once(table, seq):
    assert put(table, seq, 1, 2) is True
    assert put(table, seq, 1, 2) is False
    assert put(Table(table.root, table.name), seq, 1, 2) is False  # a new process, too
    assert numbers(table) == [1, 2]
    assert table.appended("main") == seq


def test_a_batch_before_the_newest_is_there_already(table):
    put(table, 4, 1), put(table, 5, 2)
    assert put(table, 4, 1) is False
    assert numbers(table) == [1, 2]


def test_a_taken_number_with_other_offsets_stops_the_stream(table):
    put(table, 3, 1)
    other = Batch("main", 3, 3, {"page_views": {"0": [0, 99]}})
    with pytest.raises(
        LakeError, match=r"rollups/panes holds batch 3 of stream main with offsets .*\[30, 40\].* says .*\[0, 99\]"
    ):
        lake.append(table, other, lake.write_arrow(table, other.folder, rows(2)))
    assert numbers(table) == [1]


def test_streams_count_apart(table):
    assert put(table, 0, 1, stream="main")
    assert put(table, 0, 2, stream="alarms")
    assert numbers(table) == [1, 2]


def test_a_batch_without_rows_takes_its_number(table):
    put(table, 0, 1)
    assert put(table, 1)
    assert (table.appended("main"), numbers(table)) == (1, [1])


def test_written_files_are_invisible_until_they_are_committed(table):
    lake.write_arrow(table, "live/main-0-0-abc", rows(1))
    assert numbers(table) == []


def test_a_batch_of_two_days_has_a_file_in_each(table):
    both = pa.concat_tables([rows(1), rows(2, at=NOON + 24 * HOUR)])
    lake.append(table, Batch("main", 0, 0), lake.write_arrow(table, "live/main-0-0-abc", both))
    assert sorted((f.day, f.rows) for f in table.files()) == [(DAY, 1), (NEXT, 1)]
    assert numbers(table) == [1, 2]


def test_a_table_that_another_process_makes_at_the_same_moment_is_there(settings, monkeypatch):
    """Of three, delta-rs 1.6.6 tells the last a conflict."""
    table, create = Table(settings.lake_path, "rollups/contended", "pane"), DeltaTable.create

    def outrun(*said: Any, **named: Any) -> None:
        create(*said, **named)
        raise CommitFailedError("Protocol changed since last commit")

    monkeypatch.setattr(DeltaTable, "create", outrun)
    table.create(SCHEMA, "of two")
    assert table.exists and table.delta().metadata().description == "of two"


def test_a_log_tells_since_when_its_records_are_judged_by_the_accept_late_that_its_topic_has(settings):
    """Of one that a version of before has made, none but this one is known."""
    from tidemark.model import Topic

    topics = [Topic("clicks", None, 1, "at TIMESTAMP NOT NULL", "at", accept_late=late) for late in (None, "1 day")]
    log = Table(settings.lake_path, "log/clicks", None)
    log.create(SCHEMA)
    since = list[datetime | None]()
    for topic in (topics[1], topics[1], topics[0], topics[0], topics[1]):
        now = datetime.now(UTC)
        asked = log.judged_since(topic)  # a run of the new code, before a stream has begun with it
        assert asked is None or asked >= now or asked == since[-1]
        log.cut_by(topic)
        since.append(log.judged_since(topic))
    assert since[:2] == [None, None] and since[2] == since[3] and since[4] > since[2] > now - timedelta(minutes=1)


def test_a_file_bounded_by_dates_may_hold_every_row():
    bounded = lake.File("part-0.parquet", 1, 1, None, 0, DAY, NEXT)
    assert bounded.meets(NOON, NOON + HOUR) and bounded.meets(None, NOON) and bounded.meets(NOON, None)


@pytest.mark.parametrize("of", ["", "{}", "[]", "7", "no pins", "a pin of a later version", "a later version"])
def test_a_run_s_record_that_is_damaged_is_named_with_the_way_out(settings, of):
    lake.save(settings, a_run(settings, "whole", 1))
    said = json.loads((settings.lake_path / "runs" / "whole.json").read_text())
    more = {"no pins": {"pins": None}, "a later version": {"approved": "by somebody"}}
    more["a pin of a later version"] = {"pins": {n: pin | {"epoch": 1} for n, pin in said["pins"].items()}}
    (settings.lake_path / "runs" / "cut.json").write_text(json.dumps(said | more[of]) if of in more else of)
    assert lake.read_runs(settings)[1].keys() == {"cut"}
    with pytest.raises(LakeError, match=r"runs/cut.json is damaged, it holds no run .*, or move it away"):
        lake.runs(settings)


@pytest.mark.parametrize("content", ["", "[]", "7", '{"start": {}}', '{"number": 1, "other": 2}'])
def test_a_checkpoint_s_identity_that_is_damaged_is_named_with_the_way_out(settings, content):
    checkpoint = lake.Checkpoint.of(settings, "main")
    checkpoint.path.mkdir(parents=True)
    (checkpoint.path / "tidemark.json").write_text(content)
    with pytest.raises(LakeError, match=r"/main away, then: tidemark speed --stream main --recover, with the --only"):
        checkpoint.identity  # noqa: B018


TOPIC = Topic("prices", key=None, partitions=1, schema="at TIMESTAMP NOT NULL", event_time="at")


def works(settings: Settings) -> list[Callable[[], Any]]:
    """What begins by the checkpoints: a stream, with what repairs it or not, a settling, and what looks at every file."""
    of = model.catalog([type("p", (), {"prices": TOPIC})])

    def stream() -> speed.Stream:
        return speed.Stream(settings, of, "main", settings.state / "main")

    begun = [lambda: stream().prepare(), lambda: stream().prepare(recover=True), lambda: stream().prepare(accept_loss=True)]
    return [*begun, lambda: settle.pinned(settings, of), lambda: repair.damage(settings, of)]


@pytest.mark.parametrize("nth", range(5))
@pytest.mark.parametrize(
    "there", [(), ("log/prices",), ("ledger",), None], ids=["nothing", "a log", "the ledger", "no checkpoint"]
)
def test_a_lake_that_is_not_mounted_is_refused_before_anything_is_made(settings, monkeypatch, nth, there):
    """Its checkpoint has read on: Kafka may have deleted since what the lake held, and no ledger would tell of it."""

    (settings.state / "main").mkdir(parents=True)

    def begins(*_: Any, **__: Any) -> None:
        raise InterruptedError

    for later in ("tidemark.session.session", "tidemark.lake.pins", "tidemark.lake.verdicts"):
        monkeypatch.setattr(later, begins)
    if there is not None:
        checkpoint(settings, base=0, planned=[0, 1], done=[0])
        path = settings.checkpoints / "main" / "tidemark.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"topic_ids": {"prices": "x"}}))
    for name in there or ():
        folder = settings.lake_path / name / "_delta_log"
        folder.mkdir(parents=True)
        (folder / f"{0:020}.json").touch()
    said = r"lake has no ledger, and no log of prices, which .*/main has read: mount its disk, or write the right TIDEMARK_LAKE"
    with (
        pytest.raises(LakeError, match=said) if there == () else pytest.raises((InterruptedError, LakeError), match=r"^$|damaged")
    ):
        works(settings)[nth]()
    assert there or not settings.lake_path.exists() or not any(settings.lake_path.iterdir())


@pytest.mark.parametrize("name", ["[1]", "{1}", "{1,2} *", "a?b"])
def test_a_path_is_no_pattern(settings, spark, name):
    table, beside = (
        Table(settings.lake_path / n, "rollups/panes", "pane") for n in (name, "1 and more" if "*" in name else "axb")
    )
    for n, one in enumerate((table, beside)):
        one.create(SCHEMA, "Panes of each page.")
        put(one, 0, n)
    assert [r["n"] for r in lake.read(spark, table).collect()] == [0]


def test_a_row_without_a_day_is_refused(table, spark):
    nowhere = rows(1).set_column(3, "day", pa.array([None], pa.date32()))
    with pytest.raises(ValueError, match="rollups/panes: a row has no pane, so it belongs to no day"):
        lake.write_arrow(table, "live/main-0-0-abc", nowhere)
    with pytest.raises(ValueError, match="rollups/panes: a row has no pane, so it belongs to no day"):
        lake.write_spark(table, "live/main-0-0-def", spark.createDataFrame([("/", None, 1, None)], SCHEMA))


def test_rows_that_are_large_are_few_to_a_row_group(table, spark):
    # Texts of a megabyte each, as a set of a page's 130,000 event ids: a reader has a row group in memory.
    rows = spark.range(48, numPartitions=1).select(
        F.randstr(F.lit(1_000_000), 1).alias("page"),
        F.lit(NOON).alias("pane"),
        F.lit(1).alias("n"),
        F.lit(NOON.date()).alias("day"),
    )
    (add,) = lake.write_spark(table, "live/main-0-0-abc", rows)
    footer = pq.read_metadata(table.path / add.path)
    largest = max(footer.row_group(n).total_byte_size for n in range(footer.num_row_groups))
    assert (footer.num_rows, largest < 25_000_000) == (48, True)


def test_dictionary_of_many_ids_is_small(table, spark):
    # Each of 20,000 comes three times: to look it up costs who reads more than to read it.
    rows = spark.range(60_000, numPartitions=1).select(
        F.md5((F.col("id") % 20_000).cast("string")).alias("page"),
        F.lit(NOON).alias("pane"),
        F.lit(1).alias("n"),
        F.lit(NOON.date()).alias("day"),
    )
    (add,) = lake.write_spark(table, "live/main-0-0-abc", rows)
    page = pq.read_metadata(table.path / add.path).row_group(0).column(0)
    first = page.dictionary_page_offset if page.has_dictionary_page else page.data_page_offset
    assert page.data_page_offset - first < 150_000


def test_spark_and_arrow_write_files_that_say_the_same_of_themselves(table, spark):
    written = rows(1, 2, at=NOON + MICRO)
    lake.append(table, Batch("main", 0, 0), lake.write_arrow(table, "live/main-0-0-abc", written))
    lake.append(table, Batch("main", 1, 1), lake.write_spark(table, "live/main-1-1-abc", frame_of(spark, written).coalesce(1)))
    one, other = table.files()
    assert (one.day, one.rows, one.low, one.high) == (other.day, other.rows, other.low, other.high)
    assert numbers(table) == [1, 1, 2, 2]


def frame_of(spark, written: pa.Table):
    return spark.createDataFrame([tuple(r.values()) for r in written.to_pylist()], SCHEMA)


# ---------------------------------------------------------------------------------------------------------- statistics


def test_the_last_instant_of_the_calendar_is_found_by_every_reader(table, spark):
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    put(table, 0, 1, at=last)
    (file,) = table.files()
    assert (file.low, file.high) == (last.replace(microsecond=999000), last)
    assert lake.read(spark, table, low=last).count() == 1
    assert spark.read.format("delta").load(str(table.path)).where(F.col("pane") >= F.lit(last)).count() == 1
    assert polars.scan_delta(str(table.path)).filter(polars.col("pane") >= last).collect().height == 1
    seen = DeltaTable(table.path).to_pyarrow_dataset()
    assert seen.to_table(filter=pc.field("pane") >= pa.scalar(last, pa.timestamp("us", "UTC"))).num_rows == 1


LONG, LAST, SOME = "é" * 40 + "x", "\U0010ffff" * 50, datetime(2025, 1, 1, 12, 0, 0, 1500, tzinfo=UTC)
#  a file for each: of everyday values with a null in each column, of none but nulls, of values at the ends
KINDS: dict[str, tuple[pa.DataType, list[list[Any]]]] = {
    "n": (pa.int64(), [[3, 7, None], [None], [-(2**63), 2**63 - 1]]),
    "small": (pa.int16(), [[3, 7, None], [None], [-(2**15), 2**15 - 1]]),
    "page": (pa.string(), [["/3", "/7", None], [None], [LONG, "x" * 5_000]]),
    "word": (pa.string(), [["\U00020bb7野家", "a", None], [None], ["田\U00020bb7", LAST]]),
    "share": (pa.float64(), [[3.0, 7.5, None], [None], [math.nan, -math.inf]]),
    "ok": (pa.bool_(), [[True, True, None], [None], [False, True]]),
    "paid": (pa.decimal128(38, 2), [[Decimal("3.00"), Decimal("7.05"), None], [None], [Decimal(10**35) + Decimal("0.07"), 0]]),
    "born": (pa.date32(), [[date(2025, 1, 3), date(2025, 1, 7), None], [None], [date.min, date.max]]),
    "seen": (pa.timestamp("us", "UTC"), [[SOME, SOME + HOUR, None], [None], [datetime(1, 1, 1, tzinfo=UTC), SOME]]),
    "sets": (pa.binary(), [[b"3", b"7", None], [None], [b"", b"7" * 5_000]]),
    "place": (
        pa.struct([("offset", pa.int64())]),
        [[{"offset": 3}, {"offset": 7}, None], [None], [{"offset": 0}, {"offset": 9}]],
    ),
}
ASKED = (
    *(f"{column} {is_}" for column in KINDS for is_ in ("IS NULL", "IS NOT NULL")),
    *("n = 3", "n > 7", "n < 0", "small > 7", "page = '/7'", f"page = '{LONG}'", "page > 'x'", "share = 7.5", "share < 0"),
    *("word = '\U00020bb7野家'", "word = '田\U00020bb7'", "word > '\U00020bb7'", f"word = '{LAST}'"),
    *("ok = true", "ok = false", "paid = 7.05", "paid > 99999999999999999999999999999999999.05", "born > DATE '2025-01-05'"),
    *("born < DATE '1900-01-01'", "born = DATE '9999-12-31'", "place.offset = 7", "place.offset > 7"),
    *(
        "seen > TIMESTAMP '2025-01-01 12:30:00Z'",
        "seen < TIMESTAMP '1900-01-01 00:00:00Z'",
        "seen = TIMESTAMP '2025-01-01 12:00:00.0015Z'",
    ),
)


@pytest.mark.parametrize("way", [lake.write_arrow, lake.write_spark], ids=["by the driver", "by executors"])
def test_every_reader_finds_what_it_asks_for_whatever_a_column_holds(settings, spark, way):
    """Of three files each reader opens those whose statistics do not exclude its rows."""
    kinds = Table(settings.lake_path, "log/kinds", "seen")
    frames = [pa.table([pa.array(of[n], kind) for kind, of in KINDS.values()], names=list(KINDS)) for n in range(3)]
    days = [frame.append_column("day", pa.array([DAY] * frame.num_rows)) for frame in frames]
    kinds.create(spark.createDataFrame(days[0]).schema)
    for seq, frame in enumerate(days):
        rows = spark.createDataFrame(frame).coalesce(1) if way is lake.write_spark else frame
        assert lake.append(kinds, Batch("main", seq, seq, {}), way(kinds, f"live/main-{seq}-{seq}-x", rows))
    assert len(kinds.files()) == 3

    spark.read.format("delta").load(str(kinds.path)).createOrReplaceTempView("kinds")
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        db.register("whole", pa.concat_tables(days))
        db.register("kinds", DeltaTable(kinds.path).to_pyarrow_dataset())
        for asked in ASKED:
            zoned = asked.replace("TIMESTAMP '", "TIMESTAMPTZ '")
            [[wanted]] = db.sql(f"SELECT count(*) FROM whole WHERE {zoned}").fetchall()
            assert wanted or asked == "small > 7", asked
            assert db.sql(f"SELECT count(*) FROM kinds WHERE {zoned}").fetchall() == [(wanted,)], asked
            if way is lake.write_spark:  # the statistics are the same, and to ask costs more than to write
                assert spark.sql(f"SELECT count(*) FROM kinds WHERE {asked}").collect() == [(wanted,)], asked
    spark.catalog.dropTempView("kinds")


def test_files_outside_the_bounds_or_the_days_are_not_opened(table, spark):
    #   files    0 [12:00]   1 [13:00]   2 [14:00]   3 [next day 12:00]
    #   asked for      [13:00 ------- 14:00)
    for seq, at in enumerate((NOON, NOON + HOUR, NOON + 2 * HOUR, NOON + 24 * HOUR)):
        put(table, seq, seq, at=at)

    def opened(**bounds) -> list[int]:
        return sorted(int(Path(f).parent.parent.name.split("-")[1]) for f in lake.read(spark, table, **bounds).inputFiles())

    assert opened() == [0, 1, 2, 3]
    assert opened(low=NOON + HOUR, high=NOON + 2 * HOUR) == [1]
    assert opened(low=NOON + HOUR + 1000 * MICRO) == [2, 3]
    assert opened(high=NOON) == []
    assert opened(days=[NEXT]) == [3]
    assert opened(days=[DAY], low=NOON + 2 * HOUR) == [2]
    assert lake.read(spark, table, high=NOON).columns == ["page", "pane", "n", "day"]


@pytest.mark.parametrize("micros", [1, 999])
@pytest.mark.parametrize("write", ["arrow", "spark"])
def test_an_instant_between_two_milliseconds_is_found_by_every_reader_that_prunes(table, spark, micros, write):
    at = NOON + micros * MICRO
    if write == "arrow":
        put(table, 0, 1, at=at)
    else:
        adds = lake.write_spark(table, "live/main-0-0-abc", frame_of(spark, rows(1, at=at)))
        lake.append(table, Batch("main", 0, 0), adds)
    assert lake.read(spark, table, low=at, high=at + MICRO).count() == 1
    assert spark.read.format("delta").load(str(table.path)).where(F.col("pane") == F.lit(at)).count() == 1
    assert polars.scan_delta(str(table.path)).filter(polars.col("pane") == at).collect().height == 1
    assert DeltaTable(table.path).to_pyarrow_table(filters=[("pane", "=", at)]).num_rows == 1


# --------------------------------------------------------------------------------------------------------------- races


def open_table(root: Path | Table) -> Table:
    """A thread shares the test's table, a process opens its own."""
    return root if isinstance(root, Table) else Table(root, "rollups/panes", "pane")


def append_many(root: Path | Table, stream: str, many: int, first: int) -> int:
    """Batches 0 to `many`; each is a row, numbered from `first` on. Each is tried twice."""
    table = open_table(root)
    return sum(put(table, seq, first + seq, stream=stream) for seq in range(many) for _ in range(2))


def publish_often(settings, root: Path | Table, times: int, last: int) -> int:
    """Publish what stream main has appended, time and again, until its last batch is in; returns how many times."""
    table, done = open_table(root), 0
    while done < times or (table.appended("main") or 0) < last:
        pin = table.appended("main")
        if pin is None:
            continue
        run = stage(table, a_run(settings, f"r{done}", pin), rows(*range(pin + 1)))
        publish(settings, table, run)
        done += 1
    return done


@pytest.mark.parametrize("pool", ["threads of one table", pytest.param("processes", marks=pytest.mark.long)])
def test_streams_and_publications_that_race_lose_nothing_and_double_nothing(settings, table, pool):
    threads = pool == "threads of one table"
    workers = ThreadPoolExecutor(3) if threads else ProcessPoolExecutor(3, multiprocessing.get_context("spawn"))
    root = table if threads else table.root
    many = 40
    with workers:
        appends = [workers.submit(append_many, root, s, many, first) for s, first in (("main", 0), ("alarms", 1000))]
        publications = workers.submit(publish_often, settings, root, 8, many - 1)
        assert [a.result(timeout=120) for a in appends] == [many, many]
        assert publications.result(timeout=120) >= 8
    assert numbers(table) == [*range(many), *range(1000, 1000 + many)]
    assert (table.appended("main"), table.appended("alarms")) == (many - 1, many - 1)


def test_what_was_decided_on_a_version_is_decided_again_when_another_commits_first(settings, table):
    put(table, 0, 1), put(table, 1, 2)
    another = Table(table.root, table.name)
    run = stage(table, a_run(settings, "r1", 1), rows(1, 2))
    merged = lake.write_arrow(table, "live/main-0-1-merged", rows(1, 2))
    looks = []

    def decide():
        gone = [lake.remove_action(f) for f in table.files() if f.live]
        looks.append(len(gone))
        if len(looks) == 1:
            publish(settings, another, run)  # removes the same files
            table.files()  # a second look must not move what the commit rests on
        return ([*merged, *gone], {}) if gone else None

    assert lake.commit(table, decide) is None
    assert looks == [2, 0]
    assert numbers(table) == [1, 2]


def test_what_is_appended_to_a_view_s_day_while_that_is_published_is_replaced_too(settings, table):
    another = Table(table.root, table.name)
    run = stage(table, a_run(settings, "r1", 0), rows(1))
    listed = table.files
    looks = []

    def files():
        looks.append(listed())
        if len(looks) == 2:  # decided, and not committed yet
            put(another, 0, 2)
        return looks[-1]

    table.files = files
    publish(settings, table, run, whole_days=True)
    assert numbers(table) == [1]


def test_of_two_rewrites_that_only_add_the_second_is_decided_again(settings, table):
    another = Table(table.root, table.name)
    run = stage(table, a_run(settings, "r1", 0), rows(1))
    mine = lake.write_arrow(table, "live/20261118T12-all-a", rows(2))
    looks = []

    def decide():
        looks.append(len(table.files()))
        if len(looks) == 1:
            publish(settings, another, run)
        return None if looks[-1] else (mine, {})

    assert lake.commit(table, decide) is None
    assert looks == [0, 1]
    assert numbers(table) == [1]


def test_a_commit_returns_the_version_that_it_made(table):
    put(table, 0, 1)
    fresh = lake.write_arrow(table, "live/main-1-1-abc", rows(2))
    assert lake.commit(table, lambda: (fresh, {"why": "test"})) == 2
    assert json.loads(DeltaTable(table.path).history(1)[0]["userMetadata"]) == {"why": "test"}


@pytest.mark.parametrize("reader", ["delta-rs", "duckdb"])
def test_a_reader_who_polls_through_publications_sees_whole_states_only(settings, table, reader):
    # Whatever is appended and published, the rows are 0, 1, 2, … up to some batch: a gap or a repeat is a mixture.
    states: list[list[int]] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            if reader == "delta-rs":
                states.append(numbers(table))
            else:
                files = [str(table.path / f.path) for f in Table(table.root, table.name).files()]
                found = duckdb.connect().execute("SELECT n FROM read_parquet(?) ORDER BY n", [files]).fetchall() if files else []
                states.append([n for (n,) in found])

    with ThreadPoolExecutor(2) as pool:
        polling = pool.submit(poll)
        appending = pool.submit(append_many, table.root, "main", 60, 0)
        try:
            publish_often(settings, table.root, 15, 59)
        finally:
            stop.set()
        assert appending.result(timeout=60) == 60
        polling.result(timeout=60)
    assert [s for s in states if s != list(range(len(s)))] == []
    assert len({len(s) for s in states}) > 3  # it did see it grow
    assert [len(s) for s in states] == sorted(len(s) for s in states)
    assert numbers(table) == list(range(60))


# -------------------------------------------------------------------------------------------------------------- publish


def test_a_publication_replaces_what_its_run_has_read_and_keeps_what_came_later(settings, table):
    #   batches   0   1   2 | 3      pin 2
    for seq in range(4):
        put(table, seq, seq)
    put(table, 4, 100, at=NOON + 24 * HOUR)  # another day
    run = stage(table, a_run(settings, "r1", 2), rows(10, 11))
    version = publish(settings, table, run)
    assert (version, DeltaTable(table.path).version()) == (6, 6)
    assert numbers(table) == [3, 10, 11, 100]
    assert [f.run for f in table.files() if f.run] == ["r1"]


def test_a_publication_replaces_the_one_before(settings, table):
    put(table, 0, 1)
    publish(settings, table, stage(table, a_run(settings, "r1", 0), rows(1)))
    put(table, 1, 2)
    publish(settings, table, stage(table, a_run(settings, "r2", 1), rows(1, 2)))
    assert numbers(table) == [1, 2]
    assert {f.run for f in table.files()} == {"r2"}


def test_a_late_batch_for_a_settled_day_counts_beside_it(settings, table):
    put(table, 0, 1)
    publish(settings, table, stage(table, a_run(settings, "r1", 0), rows(1)))
    put(table, 1, 2)
    assert numbers(table) == [1, 2]


def test_a_day_that_turned_out_empty_is_emptied(settings, table):
    put(table, 0, 1)
    run = stage(table, a_run(settings, "r1", 0), rows())
    publish(settings, table, run)
    assert numbers(table) == []


def test_publishing_twice_does_nothing(settings, table):
    put(table, 0, 1)
    run = stage(table, a_run(settings, "r1", 0), rows(1))
    assert publish(settings, table, run) == 2
    put(table, 1, 2)
    assert publish(settings, table, run) is None
    assert publish(settings, Table(table.root, table.name, "pane"), run) is None
    assert numbers(table) == [1, 2]


def test_an_older_run_does_not_replace_a_newer_publication(settings, table):
    put(table, 0, 1), put(table, 1, 2)
    older = stage(table, a_run(settings, "older", 0), rows(1))
    publish(settings, table, stage(table, a_run(settings, "newer", 1), rows(1, 2)))
    sentence = f"run older has read stream main up to batch 0, but {DAY} of rollups/panes was published by run newer with batch 1"
    with pytest.raises(LakeError, match=sentence):
        publish(settings, table, older)
    assert numbers(table) == [1, 2]


def test_of_two_runs_with_one_pin_the_one_begun_later_stays(settings, table):
    put(table, 0, 1)
    older, newer = (stage(table, a_run(settings, name, 0), rows(n)) for name, n in (("older", 1), ("newer", 2)))
    publish(settings, table, newer)
    with pytest.raises(LakeError, match=r"run older has .* batch 0, but .* by run newer with batch 0; settle again"):
        publish(settings, table, older)
    assert numbers(table) == [2]


def test_a_file_on_both_sides_of_the_pin_is_refused(settings, table):
    merged = Batch("main", 0, 5)
    lake.append(table, merged, lake.write_arrow(table, merged.folder, rows(1, 2)))
    run = stage(table, a_run(settings, "r1", 3), rows(1))
    with pytest.raises(
        LakeError, match=r"live/main-0-5-\w+/.* of rollups/panes holds batches on both sides of the pin 3 of run r1"
    ):
        publish(settings, table, run)
    assert numbers(table) == [1, 2]


def test_a_staged_file_that_is_gone_is_named_before_anything_is_published(settings, table):
    put(table, 0, 1)
    run = stage(table, a_run(settings, "r1", 0), rows(1))
    (staged,) = lake.staging(table, run.id).glob("day=*/*.parquet")
    staged.unlink()
    with pytest.raises(LakeError, match=rf"run r1: staged file {staged} of table rollups/panes is gone; settle the days again"):
        publish(settings, table, run)
    assert numbers(table) == [1]


def test_a_run_that_stages_for_days_is_published_whole(settings, table, spark):
    run = a_run(settings, "r1", 0)
    own, three_days_ago = lake.staged_table(table, run.id), time.time() - 3 * 86400
    lake.stage(table, run.id, frame_of(spark, rows(0)))
    for number in range(1, 205):  # every 100 commits expired entries leave a log
        lake.append(own, Batch(run.id, number, number), lake.write_arrow(own, f"chunk-{number}", rows(number)))
        for entry in (own.path / "_delta_log").iterdir() if number in (98, 150) else ():
            os.utime(entry, (three_days_ago, three_days_ago))
    assert len(lake.staged(table, run.id)) == 205
    publish(settings, table, run)
    assert numbers(table) == [*range(205)]


def test_what_was_staged_is_published_only_as_far_as_its_log_tells_of_it(settings, table):
    put(table, 0, 1)
    run = stage(table, stage(table, a_run(settings, "r1", 0), rows(10)), rows(20))
    own = lake.staging(table, run.id)
    DeltaTable(own).create_checkpoint()
    (own / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(LakeError, match=r"run r1 staged 2 files of table rollups/panes, of which its log names 1; settle the"):
        publish(settings, table, run)
    assert numbers(table) == [1]


def test_what_is_staged_or_replaced_is_dated_ahead_for_as_long_as_vacuum_is_to_spare_it(settings, table, spark):
    put(table, 0, 1)
    [live], run = table.files(), a_run(settings, "r1", 0)
    lake.stage(table, run.id, frame_of(spark, rows(10)))
    [waiting] = lake.staging(table, run.id).glob("*/day=*/*.parquet")
    publish(settings, table, run)
    days = [round((path.stat().st_mtime - time.time()) / 86400, 2) for path in (waiting, table.path / live.path)]
    assert days == [2, 14]


def test_a_views_publication_replaces_every_file_of_its_days(settings, table):
    lake.swap_live(settings, table, NOON, NOON + HOUR, lake.write_arrow(table, "live/20261118T12-all-a", rows(1)), marks=False)
    write_deltalake(DeltaTable(table.path), rows(2), mode="append")  # someone else's
    lake.commit(table, lambda: (lake.write_arrow(table, "live/20261119T12-all-a", rows(3, at=NOON + 24 * HOUR)), {}))
    publish(settings, table, stage(table, a_run(settings, "r1", 0), rows(10)), whole_days=True)
    assert numbers(table) == [3, 10]


def test_a_publication_says_who_and_why_in_the_history(settings, table):
    put(table, 0, 1)
    run = stage(table, a_run(settings, "r1", 0), rows(1))
    lake.publish(
        settings,
        table,
        run,
        map(date.fromisoformat, run.days),
        ["main"],
        {"run": "r1", "reason": "nightly", "pins": {"main": 0}},
        whole_days=False,
    )
    said = json.loads(DeltaTable(table.path).history(1)[0]["userMetadata"])
    assert said == {"run": "r1", "reason": "nightly", "pins": {"main": 0}}


def test_a_run_staged_by_spark_is_invisible_until_published_and_then_the_tables_own(settings, table, spark):
    put(table, 0, 1)
    run = a_run(settings, "r1", 0, DAY, NEXT)
    assert lake.staged_upto(table, run.id) == -1
    for number, part in enumerate((rows(10, at=NOON + MICRO), rows(11, at=NOON + 24 * HOUR))):  # a day at a time
        lake.stage(table, run.id, frame_of(spark, part), number)
        lake.stage(table, run.id, frame_of(spark, part), number)  # a chunk that comes twice enters once
        assert lake.staged_upto(table, run.id) == number
    assert numbers(table) == [1]
    assert spark.read.format("delta").load(str(lake.staging(table, run.id))).count() == 2
    publish(settings, table, run)
    assert numbers(table) == [10, 11]
    found = lake.read(spark, table, low=NOON + MICRO, high=NOON + 2 * MICRO)
    assert [(r["n"], r["day"]) for r in found.collect()] == [(10, DAY)]


def test_a_person_s_optimize_before_the_pin_is_replaced_and_after_it_refused(settings, table):
    for seq in range(3):
        put(table, seq, seq)
    before = datetime.now(UTC) - MINUTE
    DeltaTable(table.path).optimize.compact()
    early = stage(table, a_run(settings, "early", 2, taken=before), rows(10))
    late = stage(table, a_run(settings, "late", 2, taken=datetime.now(UTC) + MINUTE), rows(20))
    with pytest.raises(LakeError, match="was written by someone else after the pin of run early; settle the day again"):
        publish(settings, table, early)
    assert numbers(table) == [0, 1, 2]
    publish(settings, table, late)
    assert numbers(table) == [20]


def test_someone_elses_file_is_replaced_only_where_it_is_older_than_every_pin(settings, table):
    run = stage(table, a_run(settings, "r1", 1, taken=datetime.now(UTC) + MINUTE), rows(10))
    run.pins["alarms"] = replace(run.pins["main"], stream="alarms", taken=(datetime.now(UTC) - MINUTE).isoformat())
    write_deltalake(table.path, rows(1), mode="append")
    with pytest.raises(LakeError, match="was written by someone else after the pin of run r1"):
        lake.publish(settings, table, run, [DAY], ["main", "alarms"], {}, whole_days=False)
    assert numbers(table) == [1]


# ----------------------------------------------------------------------------------------------------------- live views


def swap(settings, table: Table, since: datetime, until: datetime, name: str, written: pa.Table) -> None:
    adds = lake.write_arrow(table, f"live/{name}", written)
    lake.swap_live(settings, table, since, until, adds, marks="-all-" not in name)


def test_marks_replace_the_marks_of_their_span_only(settings, table):
    #   12:00:00   12:00:05   12:00:10
    #              [ again  )
    for n, mark in enumerate(("0000", "0005", "0010")):
        at = NOON + n * timedelta(seconds=5)
        swap(settings, table, at, at + timedelta(seconds=5), f"20261118T12-{mark}-a", rows(n))
    swap(settings, table, NOON + timedelta(seconds=5), NOON + timedelta(seconds=10), "20261118T12-0005-b", rows(100))
    assert numbers(table) == [0, 2, 100]


def test_whole_hours_replace_hours_and_marks_but_for_marks_from_their_end_on(settings, table):
    swap(settings, table, NOON - HOUR, NOON, "20261118T11-all-a", rows(0))
    swap(settings, table, NOON, NOON + HOUR, "20261118T12-all-a", rows(1))
    swap(settings, table, NOON, NOON + MINUTE, "20261118T12-0000-a", rows(2))
    swap(settings, table, NOON + MINUTE, NOON + 2 * MINUTE, "20261118T12-0100-a", rows(3))
    swap(settings, table, NOON, NOON + MINUTE, "20261118T12-all-b", rows(10))
    assert numbers(table) == [0, 3, 10]


def test_a_day_that_begins_at_half_past_an_hour_is_replaced_too(settings, table):
    midnight_in_kolkata = datetime(2026, 11, 17, 18, 30, tzinfo=UTC)
    for n in (1, 2):
        swap(settings, table, midnight_in_kolkata, NOON, f"20261117T18-all-{n}", rows(n))
    assert numbers(table) == [2]


def test_a_live_view_never_touches_a_settled_day(settings, table):
    swap(settings, table, NOON, NOON + HOUR, "20261118T12-all-a", rows(1))
    publish(settings, table, stage(table, a_run(settings, "r1", 0), rows(10)), whole_days=True)
    swap(settings, table, NOON, NOON + 25 * HOUR, "20261118T12-all-b", rows(2))
    assert numbers(table) == [10]
    swap(settings, table, NOON, NOON + 25 * HOUR, "20261119T12-all-b", rows(3, at=NOON + 24 * HOUR))
    assert numbers(table) == [3, 10]


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ([NOON - MICRO, NOON, NOON + HOUR - MICRO, NOON + HOUR], [0, 3, 10]),
        ([NOON], [10]),
        ([NOON - MINUTE, NOON - MICRO], [0, 1, 10]),
        ([NOON + HOUR], [0, 10]),
    ],
)
def test_someone_elses_file_keeps_its_rows_outside_the_span(settings, table, held, left):
    #    11:59:59.999999   12:00   12:59:59.999999   13:00
    #                        [                         )
    write_deltalake(table.path, pa.concat_tables(rows(n, at=at) for n, at in enumerate(held)), mode="append")
    swap(settings, table, NOON, NOON + HOUR, "20261118T12-all-a", rows(10))
    assert numbers(table) == left


def test_someone_elses_file_of_business_days_is_replaced_on_those_of_the_span(settings):
    by_day = Table(settings.lake_path, "views/days", "day")
    by_day.create(SCHEMA)
    before = pa.concat_tables(rows(n, at=NOON + n * 24 * HOUR) for n in (-1, 0, 1))
    write_deltalake(by_day.path, before, mode="append")
    midnight = NOON - 12 * HOUR
    swap(settings, by_day, midnight, midnight + 24 * HOUR, "20261118T00-all-a", rows(10))
    assert numbers(by_day) == [-1, 1, 10]


def test_someone_elses_file_of_a_settled_day_is_not_touched(settings, table):
    run = a_run(settings, "r1", 0)
    run.tables["panes"] = {"published": "now"}
    lake.save(settings, run)
    write_deltalake(table.path, rows(1), mode="append")
    swap(settings, table, NOON, NOON + HOUR, "20261118T12-all-a", rows(2))
    assert numbers(table) == [1]


def test_a_live_view_leaves_what_a_roll_back_has_brought_back_until_that_is_noted(settings, table):
    swap(settings, table, NOON, NOON + HOUR, "20261118T12-all-a", rows(1))
    run = a_run(settings, "r1", 0)
    run.tables["panes"] = {"published": "now"}
    lake.save(settings, run)
    swap(settings, table, NOON, NOON + HOUR, "20261118T12-all-b", rows(2))
    assert numbers(table) == [1]


# -------------------------------------------------------------------------------------------------------------- compact


def sums(frame):
    """A law for these rows: one row for each page and pane, with their greatest number."""
    return frame.groupBy("page", "pane").agg(F.max("n").alias("n"))


def test_small_files_become_one_and_a_reader_sees_the_same_rows(settings, table, spark):
    for seq in range(lake.WORTH_MERGING):
        put(table, seq, seq)
    fewer = lake.compact(spark, settings, table, None, {"main": lake.WORTH_MERGING - 1})
    assert (fewer, len(table.files())) == (lake.WORTH_MERGING - 1, 1)
    assert table.files()[0].path.startswith(f"live/main-0-{lake.WORTH_MERGING - 1}-")
    assert numbers(table) == list(range(lake.WORTH_MERGING))
    assert put(table, lake.WORTH_MERGING - 1, 99) is False  # the batches stay known


def test_rows_that_merge_are_merged(settings, table, spark):
    for seq in range(lake.WORTH_MERGING):
        put(table, seq, seq)
    lake.compact(spark, settings, table, sums, {"main": lake.WORTH_MERGING - 1})
    assert numbers(table) == [lake.WORTH_MERGING - 1]
    assert lake.read(spark, table, low=NOON, high=NOON + MICRO, days=[DAY]).count() == 1


@pytest.mark.parametrize(
    ("state", "spans"),
    [
        ("staged", [(0, 12), (13, 25)]),
        ("running", [(0, 12), (13, 25)]),
        ("published", [(0, 25)]),
        ("failed", [(0, 25)]),
    ],
)
def test_files_never_merge_across_the_pin_of_an_undecided_run(settings, table, spark, state, spans):
    #   batches   0 … 12 | 13 … 25      pin 12
    for seq in range(26):
        put(table, seq, seq)
    run = stage(table, a_run(settings, "r1", 12, state=state), rows(100))
    lake.compact(spark, settings, table, None, {"main": 25})
    assert sorted((int(f.live["lo"]), int(f.live["hi"])) for f in table.files()) == spans
    assert numbers(table) == list(range(26))
    if len(spans) == 2:
        publish(settings, table, run)
        assert numbers(table) == [*range(13, 26), 100]


def test_batches_that_the_checkpoint_has_not_committed_and_other_days_stay_apart(settings, table, spark):
    for seq in range(24):
        put(table, seq, seq, at=NOON + seq % 2 * 24 * HOUR)
    put(table, 24, 24), put(table, 25, 25)
    fewer = lake.compact(spark, settings, table, None, {"main": 24})
    files = sorted((f.day, int(f.live["lo"]), int(f.live["hi"])) for f in table.files())
    assert (fewer, files) == (23, [(DAY, 0, 24), (DAY, 25, 25), (NEXT, 1, 23)])
    assert numbers(table) == list(range(26))


def test_batches_of_two_streams_stay_apart(settings, table, spark):
    for seq in range(2 * lake.WORTH_MERGING):
        put(table, seq, seq, stream=("main", "alarms")[seq % 2])
    lake.compact(spark, settings, table, None, {"main": 99, "alarms": 99})
    assert sorted((f.live["stream"], int(f.live["lo"]), int(f.live["hi"])) for f in table.files()) == [
        ("alarms", 1, 2 * lake.WORTH_MERGING - 1),
        ("main", 0, 2 * lake.WORTH_MERGING - 2),
    ]
    assert numbers(table) == list(range(2 * lake.WORTH_MERGING))


def test_many_small_files_become_few_in_parts_of_batches_that_follow_each_other(settings, table, spark, monkeypatch):
    #   a settling waits for its pin while files merge: a day that a stream has caught up with must not be one merge
    for seq in range(3 * lake.WORTH_MERGING):
        put(table, seq, seq)
    monkeypatch.setattr(lake, "MERGED_AT_ONCE", sum(sorted(f.size for f in table.files())[-14:]))
    fewer, upto = 0, {"main": 99}
    while some := lake.compact(spark, settings, table, None, upto):
        spans = sorted((int(f.live["lo"]), int(f.live["hi"])) for f in table.files())
        assert [hi + 1 for _, hi in spans[:-1]] == [lo for lo, _ in spans[1:]]
        assert fewer or spans[0] in ((0, 13), (0, 14))
        fewer += some
    assert len(table.files()) == 3 * lake.WORTH_MERGING - fewer < lake.WORTH_MERGING
    assert numbers(table) == list(range(3 * lake.WORTH_MERGING))


def test_too_few_small_files_are_left_alone(settings, table, spark):
    for seq in range(lake.WORTH_MERGING - 1):
        put(table, seq, seq)
    assert lake.compact(spark, settings, table, None, {"main": 99}) == 0
    assert DeltaTable(table.path).version() == lake.WORTH_MERGING - 1


def test_a_large_file_is_not_rewritten_for_a_few_small_ones():
    def file(size: int) -> lake.File:
        return lake.File(f"live/main-{size}-{size}-a/day=2026-11-18/p", size, 1, DAY, 0)

    small = [file(100 + n) for n in range(lake.WORTH_MERGING)]
    assert lake.alike([file(1_000_000), *small]) == small
    assert lake.alike([file(1_000), *small]) == [*small, file(1_000)]
    assert lake.alike([file(lake.LARGEST_MERGED)]) == []


@pytest.mark.parametrize(("pin", "left"), [(1, [10]), (0, [2, 10])], ids=["all of them", "one of them"])
def test_a_merge_of_files_that_a_publication_took_does_nothing(settings, table, pin, left):
    put(table, 0, 1), put(table, 1, 2)
    chosen = table.files()
    publish(settings, table, stage(table, a_run(settings, "r1", pin), rows(10)))
    merged = lake.write_arrow(table, "live/main-0-1-merged", rows(1, 2))
    assert lake.swap(table, chosen, merged, {}) is None
    assert numbers(table) == left


# ---------------------------------------------------------------------------------------------------------------- sweep

TOMORROW = timedelta(days=1, minutes=1)


def folders(table: Table) -> set[str]:
    return {f"{f.parent.name}/{f.name.split('-')[0]}" for f in (*table.path.glob("live/*"), *table.path.glob("runs/*"))}


@pytest.fixture
def littered(settings, table) -> Table:
    """A table with folders of every kind; each is named by what becomes of it."""
    lake.append(table, Batch("main", 0, 0), lake.write_arrow(table, "live/replaced-0-0-a", rows(1)))
    lake.commit(table, lambda: ([lake.remove_action(f) for f in table.files()], {}))
    lake.append(table, Batch("main", 1, 1), lake.write_arrow(table, "live/used-1-1-a", rows(2)))
    lake.write_arrow(table, "live/orphan-2-2-a", rows(3))
    lake.write_arrow(table, "mended/lost-a", rows(3))  # of rejects of which no batch is known
    stage(table, a_run(settings, "staged", 1), rows(4))
    stage(table, a_run(settings, "failed", 1, state="failed"), rows(5))
    run = stage(table, a_run(settings, "published", 1, NEXT, state="published"), rows(6, at=NOON + 24 * HOUR))
    publish(settings, table, run)
    return table


def test_what_neither_history_nor_an_undecided_run_names_is_swept(settings, littered):
    gone = lake.sweep(settings, [littered], now=datetime.now(UTC) + TOMORROW)
    assert sorted(f.name.split("-")[0] for f in gone) == ["failed", "lost", "orphan"]
    assert folders(littered) == {"live/replaced", "live/used", "runs/staged", "runs/published"}
    assert numbers(littered) == [2, 6]


@pytest.mark.parametrize(("name", "swept"), [("log/clicks", ["published"]), ("rollups/clicks", [])])
def test_what_was_staged_of_a_log_is_swept_once_its_run_is_decided_since_no_log_is_published(settings, name, swept):
    table = Table(settings.lake_path, name, "pane")
    table.create(SCHEMA)
    for state in ("staged", "published"):
        stage(table, a_run(settings, state, 0, state=state), rows(1))
    assert [f.name for f in lake.sweep(settings, [table], now=datetime.now(UTC) + TOMORROW)] == swept


def test_nothing_young_is_swept(settings, littered):
    before = folders(littered)
    assert lake.sweep(settings, [littered]) == []
    assert folders(littered) == before


def test_what_the_history_stopped_naming_is_swept(settings, littered):
    delta = DeltaTable(littered.path)
    retention = {"delta.logRetentionDuration": "interval 0 days", "delta.deletedFileRetentionDuration": "interval 0 days"}
    delta.alter.set_table_properties(retention)
    delta.create_checkpoint()
    delta.cleanup_metadata()
    put(littered, 2, 7)
    lake.sweep(settings, [littered], now=datetime.now(UTC) + TOMORROW)
    assert folders(littered) == {"live/used", "live/main", "runs/staged", "runs/published"}
    assert numbers(littered) == [2, 6, 7]


def test_a_checkpoint_of_the_log_still_names_what_it_holds(settings, littered):
    DeltaTable(littered.path).create_checkpoint()
    for entry in (littered.path / "_delta_log").glob("*.json"):
        if int(entry.stem) < DeltaTable(littered.path).version():
            entry.unlink()
    lake.sweep(settings, [littered], now=datetime.now(UTC) + TOMORROW)
    assert folders(littered) == {"live/replaced", "live/used", "runs/staged", "runs/published"}


def test_what_a_checkpoint_took_over_in_the_middle_of_a_sweep_stays(settings, littered, monkeypatch):
    """The table is quiet: all its entries are old, and clean-up deletes them once there is a checkpoint."""
    retention = {"delta.logRetentionDuration": "interval 0 days", "delta.deletedFileRetentionDuration": "interval 9 days"}
    DeltaTable(littered.path).alter.set_table_properties(retention)
    there, seen, listed = folders(littered), numbers(littered), Path.glob

    def listing(folder: Path, pattern: str) -> Iterator[Path]:
        if pattern == "*.json" and folder.name == "_delta_log" and not [*listed(folder, "*.checkpoint.parquet")]:
            DeltaTable(littered.path).create_checkpoint()
            DeltaTable(littered.path).cleanup_metadata()
        return listed(folder, pattern)

    monkeypatch.setattr(Path, "glob", listing)
    lake.sweep(settings, [littered], now=datetime.now(UTC) + TOMORROW)
    monkeypatch.undo()
    assert {"live/used", "live/replaced", "runs/published"} <= folders(littered) < there
    assert numbers(littered) == seen


@pytest.mark.parametrize("left", ["cut", "gone meanwhile"])
def test_what_a_checkpoint_has_is_not_missed_by_a_sweep(settings, littered, left):
    log = littered.path / "_delta_log"
    DeltaTable(littered.path).create_checkpoint()
    for entry in sorted(log.glob("*.json"))[:-1]:
        if left == "cut":
            entry.write_text('{"add": {"path": "li')
        else:
            entry.unlink()
            entry.symlink_to("what-was-cleaned-up")  # in the listing, and gone when it is read
    if left == "gone meanwhile":
        (log / f"{0:020}.checkpoint.parquet").symlink_to("what-was-cleaned-up")
    lake.sweep(settings, [littered], now=datetime.now(UTC) + TOMORROW)
    assert folders(littered) == {"live/replaced", "live/used", "runs/staged", "runs/published"}
    assert numbers(littered) == [2, 6]


@pytest.mark.parametrize("which", [max, min], ids=["the newest", "one that was read before"])
def test_a_sweep_of_a_log_that_is_cut_deletes_nothing(settings, littered, which):
    before, entry = folders(littered), which((littered.path / "_delta_log").glob("*.json"))
    entry.write_text('{"add": {"path": "li')
    with pytest.raises(LakeError, match=f"its log entry {entry} is damaged"):
        lake.sweep(settings, [littered], now=datetime.now(UTC) + TOMORROW)
    assert folders(littered) == before


# ------------------------------------------------------------------------------------------------------- runs and pins


@pytest.mark.parametrize("damage", ["", "cut", "another digit"])
def test_a_damaged_plan_of_a_checkpoint_is_named(settings, damage):
    checkpoint, said = lake.Checkpoint.of(settings, "main"), b'v1\n{}\n{"clicks":{"0":1298}}' + b" " * 600
    file = checkpoint.path / "offsets" / "7"
    file.parent.mkdir(parents=True)
    file.write_bytes(said)
    assert checkpoint.offsets(7) == {"clicks": {"0": 1298}}  # an older one may be without sums
    sums = b"".join(zlib.crc32(part).to_bytes(4, "big") for part in (said[:512], said[512:]))
    file.with_name(".7.crc").write_bytes(b"crc\0\0\0\2\0" + sums)
    file.write_bytes({"": said, "cut": b"", "another digit": said.replace(b"1298", b"1299")}[damage])
    if not damage:
        assert checkpoint.offsets(7) == {"clicks": {"0": 1298}}
        return
    with pytest.raises(LakeError, match=f"stream main: {file} of its checkpoint is damaged"):
        checkpoint.offsets(7)


@pytest.mark.parametrize("damaged", ["metadata", "offsets/7", "commits/7"])
@pytest.mark.parametrize("left", [b"", b"v1\n{}\n{"], ids=["empty", "cut"])
def test_a_checkpoint_from_which_spark_would_not_go_on_is_named(settings, damaged, left):
    checkpoint = lake.Checkpoint.of(settings, "main")
    for name in ("metadata", "offsets/6", "offsets/7", "commits/6", "commits/7"):
        file, said = checkpoint.path / name, b'v1\n{}\n{"clicks":{"0":1298}}'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(said)
        file.with_name(f".{file.name}.crc").write_bytes(b"crc\0\0\0\2\0" + zlib.crc32(said).to_bytes(4, "big"))
    (checkpoint.path / "commits" / "6").write_bytes(b"")  # which nobody reads any more
    checkpoint.refuse_damaged()
    (checkpoint.path / damaged).write_bytes(left)
    with pytest.raises(LakeError, match=f"stream main: {checkpoint.path / damaged} of its checkpoint is damaged"):
        checkpoint.refuse_damaged()


def test_a_runs_record_is_read_as_it_was_written(settings):
    run = a_run(settings, "r1", 3, DAY, NEXT)
    assert lake.run_of(settings, "r1") == run
    assert lake.runs(settings) == [run]


@pytest.mark.parametrize("name", ["r2", "../r1", "", "r" * 300])
def test_a_run_that_is_not_there_is_named(settings, name):
    a_run(settings, "r1", 0)
    with pytest.raises(KeyError, match=f"there is no run {name}; list them with: tidemark runs"):
        lake.run_of(settings, name)


@pytest.mark.parametrize(
    ("state", "age", "undecided"),
    [
        ("staged", timedelta(days=9), True),
        ("running", timedelta(0), True),
        ("running", timedelta(days=1, minutes=1), False),  # it was killed
        ("published", timedelta(0), False),
        ("rolled back", timedelta(0), False),
        ("dropped", timedelta(0), False),
        ("failed", timedelta(0), False),
    ],
)
def test_which_runs_are_undecided(state, age, undecided):
    created = (datetime.now(UTC) - age).isoformat()
    assert Run("r1", state, [], "", created, "0").undecided is undecided


def test_a_run_that_somebody_works_on_is_undecided_however_long_it_takes(settings):
    run = a_run(settings, "r1", 0, state="running")
    record = settings.lake_path / "runs" / "r1.json"
    record.write_text(record.read_text().replace(run.touched, (datetime.now(UTC) - timedelta(days=3)).isoformat()))
    lease = Lease(settings.lake_path / "runs" / ".r1.lease")
    with lease:
        assert [r.undecided for r in lake.runs(settings)] == [True]
        assert lake.run_of(settings, "r1").undecided
        assert lease.path.read_text() == str(os.getpid())
    assert [r.undecided for r in lake.runs(settings)] == [False]  # it was killed
    with lease:  # and whoever looked holds nothing
        pass


def test_a_replay_that_failed_can_go_on_for_a_day(settings):
    now = datetime.now(UTC)
    long_ago = (now - timedelta(days=9)).isoformat()
    run = Run("r1", "failed", [], "", long_ago, "0", kind="replay", touched=now.isoformat())
    assert run.undecided
    run.touched = (now - timedelta(days=1, minutes=1)).isoformat()
    assert not run.undecided


def test_an_empty_day_is_settled_when_its_run_was_published(settings, table):
    run = a_run(settings, "r1", 0, DAY)
    assert lake.settled_days(settings, table) == set()
    run.tables["panes"] = {"published": "now"}
    lake.save(settings, run)
    assert lake.settled_days(settings, table) == {DAY}


def checkpoint(settings, base: int, planned: list[int], done: list[int]) -> None:
    path = settings.checkpoints / "main"
    for kind, batches in (("offsets", planned), ("commits", done)):
        (path / kind).mkdir(parents=True)
        for number in batches:
            (path / kind / str(number)).write_text(f'v1\n{{}}\n{{"page_views":{{"0":{number * 10 + 10}}}}}')
            (path / kind / f".{number}.crc").touch()
    identity = {"number": 2, "base": base, "start": {"page_views": {"0": 5}}, "topic_ids": {}}
    (path / "tidemark.json").write_text(json.dumps(identity))


def test_a_pin_is_the_last_batch_that_the_checkpoint_has_committed(settings):
    checkpoint(settings, base=100, planned=[8, 9, 10], done=[8, 9])
    (pin,) = lake.pins(settings, ["main"]).values()
    assert (pin.stream, pin.seq, pin.offsets) == ("main", 109, {"page_views": {"0": 100}})


def test_a_batch_that_the_ledger_has_is_pinned_though_its_stream_was_killed_before_it_was_committed(settings):
    checkpoint(settings, base=100, planned=[8, 9, 10], done=[8, 9])
    for seq in (109, 110):
        enter(settings, "main", seq, page_views=10)
        (pin,) = lake.pins(settings, ["main"]).values()
        assert (pin.seq, pin.offsets) == (seq, {"page_views": {"0": 10 * (seq - 100) + 10}})
    enter(settings, "main", 140, page_views=10)  # the checkpoint is an old copy: nothing in it says what those batches hold
    (pin,) = lake.pins(settings, ["main"]).values()
    assert pin.seq == 109


def test_unread_counts_what_no_committed_batch_has_read():
    pin = Pin("main", 4, {"page_views": {"0": 10, "1": 5}}, "")
    assert lake.unread({"main": pin}, {"page_views": {0: 10, 1: 7, 2: 1}}) == 3
    assert lake.unread({"main": pin}, {"page_views": {0: 9, 1: 5}}) == 0
    assert lake.unread({}, {"page_views": {0: 2}}) == 2


@pytest.mark.parametrize(("base", "seq"), [(0, None), (100, 99)])
def test_a_generation_that_has_committed_nothing_is_pinned_at_its_start(settings, base, seq):
    checkpoint(settings, base=base, planned=[0], done=[])
    found = lake.pins(settings, ["main", "never_started"])
    assert {s: (p.seq, p.offsets) for s, p in found.items()} == ({} if seq is None else {"main": (seq, {"page_views": {"0": 5}})})


@pytest.mark.parametrize("when", ["appended", "newest"])
def test_a_generation_that_is_opened_while_pins_are_taken_is_pinned_at_its_own_start(settings, monkeypatch, when):
    """A replay that is pinned where the one before it began computes its days from a part of the log."""
    checkpoint(settings, base=100, planned=[8, 9, 10], done=[8, 9])
    owner, opened = {"appended": Table, "newest": lake.Checkpoint}[when], []
    plain = getattr(owner, when)

    def meanwhile(self, *said):
        if not opened:
            opened.append(1)
            shutil.rmtree(lake.Checkpoint.of(settings, "main").path)
            checkpoint(settings, base=150, planned=[], done=[])
        return plain(self, *said)

    monkeypatch.setattr(owner, when, meanwhile)
    assert lake.pins(settings, ["main"])["main"].seq == 149


@pytest.mark.parametrize(("planned", "done"), [([0], []), ([8, 9, 10], [8, 9])], ids=["a new generation", "two batches"])
def test_a_pin_was_taken_when_the_batch_after_it_was_planned(settings, planned: list[int], done: list[int]):
    """What a person wrote by then holds nothing of that batch; what was written later may."""
    checkpoint(settings, base=100, planned=planned, done=done)
    then = NOON - timedelta(minutes=3)
    os.utime(lake.Checkpoint.of(settings, "main").path / "offsets" / str(planned[-1]), (then.timestamp(),) * 2)
    (pin,) = lake.pins(settings, ["main"]).values()
    assert datetime.fromisoformat(pin.taken) == then


LEDGER = StructType().add("stream", "string").add("topic", "string").add("finished_at", "timestamp").add("day", "date")
for number in ("partition", "seq", "from_offset", "until_offset", "records"):
    LEDGER.add(number, "long")


def enter(settings, stream: str, seq: int, **records: int) -> None:
    """A batch in the ledger, of so many records of each topic."""
    ledger, batch = lake.ledger(settings), Batch(stream, seq, seq)
    ledger.create(LEDGER)
    common = {"stream": stream, "seq": seq, "partition": 0, "from_offset": 10 * seq, "until_offset": 10 * seq + 10, "day": DAY}
    found = [{**common, "topic": topic, "records": count, "finished_at": NOON + seq * MINUTE} for topic, count in records.items()]
    entered = pa.Table.from_pylist(found, pa.schema(ledger.delta().schema()))
    lake.append(ledger, batch, lake.write_arrow(ledger, batch.folder, entered))


def test_what_the_ledger_has_and_a_log_has_not_is_told_however_long_ago_it_came(settings):
    logs = {name: Table(settings.lake_path, f"log/{name}", "pane") for name in ("busy", "quiet", "never", "lossy")}
    for log in logs.values():
        log.create(SCHEMA)
    # batch   main 0   second 1   main 2   3   4
    # busy      10                  10     10  10
    # quiet     10        10        10     ·   ·    ← its log has lost main 2
    # lossy                                10  lost
    for stream, seq, records in [
        ("main", 0, {"busy": 10, "quiet": 10}),
        ("second", 1, {"quiet": 10}),
        ("main", 2, {"busy": 10, "quiet": 10}),
        ("main", 3, {"busy": 10, "lossy": 10}),
        ("main", 4, {"busy": 10, "lossy": 0}),
    ]:
        enter(settings, stream, seq, **records)
        for topic, count in records.items():
            if count and (topic, seq) != ("quiet", 2):
                put(logs[topic], seq, seq, stream=stream)

    def told() -> list[tuple[str, str, int]]:
        return [(r["topic"], r["stream"], r["seq"]) for r in lake.entered_beyond(settings, logs)]

    assert told() == [("quiet", "main", 2)]
    # Nor is it missed where somebody has rewritten the ledger, nor is more missed where somebody has rewritten a log.
    DeltaTable(lake.ledger(settings).path).optimize.compact()
    DeltaTable(logs["busy"].path).delete("n > 0")
    assert told() == [("quiet", "main", 2)]
    put(logs["quiet"], 2, 2)
    assert told() == []
    # A log that begins anew lacks all of it, of each stream in turn.
    logs["quiet"] = Table(settings.lake_path, "log/made_anew", "pane")
    logs["quiet"].create(SCHEMA)
    assert told() == [("quiet", "main", 0), ("quiet", "second", 1), ("quiet", "main", 2)]


# -------------------------------------------------------------------------------------------------------------- readers


def read_by_tidemark(spark, table):
    return lake.read(spark, table).toArrow()


def read_by_delta_spark(spark, table):
    return spark.read.format("delta").load(str(table.path)).toArrow()


def read_by_delta_rs(spark, table):
    return DeltaTable(table.path).to_pyarrow_table()


def read_by_polars(spark, table):
    return polars.read_delta(str(table.path)).to_arrow()


def read_by_duckdb(spark, table):
    files = [str(table.path / f.path) for f in table.files()]
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    return connection.sql("SELECT * FROM read_parquet(?, hive_partitioning = true)", params=[files]).to_arrow_table()


@pytest.mark.parametrize("reader", [read_by_tidemark, read_by_delta_spark, read_by_delta_rs, read_by_polars, read_by_duckdb])
def test_every_reader_sees_the_same_rows(settings, table, spark, reader: Callable):
    # What a table may hold at once: live files of driver and executors, a merged one, a publication by Spark, removed ones.
    for seq in range(lake.WORTH_MERGING):
        put(table, seq, seq, at=NOON + 24 * HOUR + MICRO)
    lake.compact(spark, settings, table, None, {"main": lake.WORTH_MERGING - 1})
    put(table, 50, 50)
    run = a_run(settings, "r1", 50)
    lake.stage(table, run.id, frame_of(spark, rows(60, 61, at=NOON + 7 * MICRO)))
    publish(settings, table, run)
    put(table, 51, 51)
    found = reader(spark, table).select(["page", "pane", "n", "day"]).to_pylist()
    late = [("/", NOON + 24 * HOUR + MICRO, n, NEXT) for n in range(lake.WORTH_MERGING)]
    early = [("/", NOON, 51, DAY), ("/", NOON + 7 * MICRO, 60, DAY), ("/", NOON + 7 * MICRO, 61, DAY)]
    assert sorted(tuple(r.values()) for r in found) == sorted([*late, *early])


def test_rows_that_a_person_deleted_by_a_deletion_vector_are_not_read_and_their_file_is_not_replaced(settings, table, spark):
    put(table, 0, 1, 2, 3)
    spark.sql(f"ALTER TABLE delta.`{table.path}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
    spark.sql(f"DELETE FROM delta.`{table.path}` WHERE n = 2")
    assert sorted(r["n"] for r in lake.read(spark, table).collect()) == [1, 3]
    assert lake.read(spark, table, days=[NEXT]).count() == 0
    with pytest.raises(LakeError, match=r"1 files of rollups/panes that are to be replaced have deletion vectors.*REORG TABLE"):
        publish(settings, table, stage(table, a_run(settings, "r1", 0), rows(10)))


def test_someone_elses_files_are_read_by_their_partition(table, spark):
    put(table, 0, 1)
    write_deltalake(DeltaTable(table.path), rows(2, at=NOON + 24 * HOUR), mode="append")
    assert sorted((r["n"], r["day"]) for r in lake.read(spark, table).collect()) == [(1, DAY), (2, NEXT)]


# --------------------------------------------------------------------------------------------------- roll back, expire


def published(settings, table: Table, name: str, seq: int, *staged_numbers: int, whole_days: bool = False) -> Run:
    """A run that was staged and published, as `settle.publish` leaves it."""
    run = stage(table, a_run(settings, name, seq), rows(*staged_numbers))
    publish(settings, table, run, whole_days)
    run.state, run.tables["panes"] = "published", {"published": datetime.now(UTC).isoformat()}
    run.published = run.tables["panes"]["published"]
    lake.save(settings, run)
    return run


def roll_back(settings, table: Table, run: Run) -> int | None:
    return lake.roll_back(settings, table, run, map(date.fromisoformat, run.days), {"rollback": run.id})


def test_roll_back_brings_back_what_was_there_and_leaves_what_came_since(settings, table):
    put(table, 0, 1, 2)
    put(table, 1, 3)
    run = published(settings, table, "r1", 1, 10, 20)
    put(table, 2, 4)
    assert numbers(table) == [4, 10, 20]
    before = table.delta().version()
    assert roll_back(settings, table, run) == before + 1
    assert numbers(table) == [1, 2, 3, 4]
    assert roll_back(settings, table, run) is None  # once is enough
    publish(settings, table, run)
    assert numbers(table) == [4, 10, 20]


def test_roll_back_of_a_second_publication_brings_back_the_first(settings, table):
    put(table, 0, 1)
    published(settings, table, "r1", 0, 10)
    second = published(settings, table, "r2", 0, 20)
    assert numbers(table) == [20]
    roll_back(settings, table, second)
    assert numbers(table) == [10]


def test_publication_that_is_finished_after_a_kill_still_knows_all_that_it_replaced(settings, table):
    """
    live 0, 1 ──▶ the run's one commit ──▶ killed ──▶ a mended reject's row ──▶ published again ──▶ rolled back: all of them
    """
    put(table, 0, 0), put(table, 1, 1)
    run = stage(table, a_run(settings, "night", 1), rows(20))
    publish(settings, table, run)
    lake.swap(table, [], lake.write_arrow(table, Batch("main", 1, 1).folder, rows(2)), {})
    assert numbers(table) == [2, 20]
    publish(settings, table, run)
    assert numbers(table) == [20]
    run.state, run.tables["panes"] = "published", {"published": datetime.now(UTC).isoformat()}
    lake.save(settings, run)
    roll_back(settings, table, run)
    assert numbers(table) == [0, 1, 2]


def test_a_live_swap_reads_no_record_of_a_run_again_that_is_as_it_was(settings, table, monkeypatch):
    """A year has some four hundred of them, and a live view is written every five seconds."""
    for n in range(3):
        run = a_run(settings, f"night-{n}", n, DAY + timedelta(days=n))
        run.tables["panes"] = {"published": NOON.isoformat()}
        lake.save(settings, run)
    days, read, plain = {DAY + timedelta(days=n) for n in range(3)}, [], lake.as_run
    assert lake.settled_days(settings, table) == days
    monkeypatch.setattr(lake, "as_run", lambda path: (read.append(path.stem), plain(path))[1])
    assert (lake.settled_days(settings, table), read) == (days, [])
    run.tables["panes"].pop("published")
    lake.save(settings, run)
    assert (lake.settled_days(settings, table), read) == (days - {DAY + timedelta(days=2)}, ["night-2"])


def test_a_damaged_record_does_not_keep_what_is_live_from_its_readers(settings, table):
    for n, name in enumerate(("good", "bad")):
        run = a_run(settings, name, n, DAY + timedelta(days=n))
        run.tables["panes"], run.state, run.open_days = {"published": NOON.isoformat()}, "published", [str(DAY)]
        lake.save(settings, run)
    (settings.lake_path / "runs" / "bad.json").write_text("{")
    assert lake.settled_days(settings, table) == {DAY}
    assert lake.reopened(settings, NOON) == DAY


def test_a_day_whose_publication_was_taken_back_is_computed_again_where_events_still_came_in_time_for_it(settings):
    """What came while it was settled no refresh has written, nor does one look back so far by now."""
    run = a_run(settings, "night-1", 0, DAY - timedelta(days=9), DAY)
    for at, back, day in (
        (NOON + timedelta(hours=14), HOUR, DAY),
        (NOON + timedelta(hours=40), 6 * HOUR, DAY),  # the stream may be behind by so much
        (NOON + timedelta(days=5), HOUR, None),
        (NOON + timedelta(days=5), timedelta(days=4), DAY),
    ):
        run.created, run.state = at.isoformat(), "published"
        lake.save(settings, run)
        assert lake.reopened(settings, NOON, back) is None
        run.state = "rolled back"
        lake.save(settings, run)
        assert lake.reopened(settings, NOON, back) == day


def test_a_record_is_new_since_it_came_to_its_name_and_not_since_it_was_written(settings):
    """
    written beside ──▶ somebody looks, and finds the record of before ──▶ it has its name
    """
    run = a_run(settings, "replay-1", 0, state="published")
    run.open_days = [str(DAY)]
    lake.save(settings, run)
    looked = datetime.now(UTC) - timedelta(seconds=1)
    os.utime(settings.lake_path / "runs" / "replay-1.json", (looked.timestamp() - 1,) * 2)
    assert lake.reopened(settings, looked) == DAY


def test_a_day_of_no_row_that_is_published_again_after_a_kill_gives_back_what_was_there_both_times(settings, table):
    put(table, 0, 1)
    run = stage(table, a_run(settings, "r1", 0), rows())
    publish(settings, table, run)  # and is killed before its record says so: a live refresh writes the day once more
    lake.swap(table, [], lake.write_arrow(table, Batch("main", 0, 0).folder, rows(2)), {})
    publish(settings, table, run)
    assert numbers(table) == []
    run.state, run.tables["panes"] = "published", {"published": datetime.now(UTC).isoformat()}
    lake.save(settings, run)
    roll_back(settings, table, run)
    assert numbers(table) == [1, 2]


def test_a_folder_that_is_called_as_a_record_would_be_stops_nobody(settings, table):
    run = a_run(settings, "r1", 0)
    (settings.lake_path / "runs" / "mend.json").mkdir()
    assert [r.id for r in lake.runs(settings)] == [lake.run_of(settings, "r1").id] == [run.id]
    assert (lake.settled_days(settings, table), lake.reopened(settings, NOON)) == (set(), None)


def test_only_the_newest_publication_of_a_day_is_rolled_back(settings, table):
    put(table, 0, 1)
    first = published(settings, table, "r1", 0, 10)
    published(settings, table, "r2", 0, 20)
    with pytest.raises(LakeError, match=r"was published again by run r2, after run r1; roll that one back first: .* rollback r2"):
        roll_back(settings, table, first)
    assert numbers(table) == [20]


def test_a_roll_back_beside_which_another_run_is_published_brings_nothing_back(settings, table, monkeypatch):
    """
    roll-back looks ──▶ the other commits, its record not saved yet ──▶ roll-back commits: refused, and looks again
    """
    put(table, 0, 1)
    first, plain = published(settings, table, "r1", 0, 10), lake.add_action
    second = stage(table, a_run(settings, "r2", 0), rows(20))

    def beside(*file: Any) -> Any:
        monkeypatch.setattr(lake, "add_action", plain)
        publish(settings, Table(table.root, table.name, table.time), second)
        return plain(*file)

    monkeypatch.setattr(lake, "add_action", beside)
    with pytest.raises(LakeError, match=r"published again by run r2, after run r1; roll that one back first: .* rollback r2"):
        roll_back(settings, table, first)
    assert numbers(table) == [20]


def test_a_roll_back_minds_and_takes_out_no_run_of_other_days_and_minds_one_that_had_its_day_open(settings, table):
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    later = stage(table, a_run(settings, "r2", 0, NEXT), rows(20, at=NOON + 24 * HOUR))
    publish(settings, table, later)
    later.state, later.tables["panes"] = "published", {"published": datetime.now(UTC).isoformat()}
    later.open_days = [str(DAY)]
    lake.save(settings, later)
    with pytest.raises(LakeError, match=rf"{DAY} of rollups/panes was published again by run r2, after run r1"):
        roll_back(settings, table, run)
    later.open_days = []
    lake.save(settings, later)
    roll_back(settings, table, run)
    assert numbers(table) == [1, 20]


@pytest.mark.parametrize("later", [None, (20,), ()], ids=["of no publication", "of a later one", "of a later one of no row"])
def test_damaged_record_is_in_the_way_of_a_roll_back_only_where_its_run_has_published_the_table(
    settings: Any, table: Table, later: tuple[int, ...] | None
) -> None:
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    if later is not None:
        published(settings, table, "r2", 0, *later)
    (settings.lake_path / "runs" / "r2.json").write_text("")
    if later is None:
        roll_back(settings, table, run)
        assert numbers(table) == [1]
    else:
        with pytest.raises(LakeError, match=r"runs/r2.json is damaged"):
            roll_back(settings, table, run)
        assert numbers(table) == [*later]


def test_roll_back_before_a_publication_of_no_row_whose_record_is_gone_is_refused(settings: Any, table: Table) -> None:
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    published(settings, table, "r2", 0)
    (settings.lake_path / "runs" / "r2.json").unlink()
    with pytest.raises(LakeError, match=rf"what run r1 published in rollups/panes is .* tidemark settle --day {DAY}$"):
        roll_back(settings, table, run)
    assert numbers(table) == []


def test_roll_back_of_what_somebody_has_rewritten_is_refused(settings, table):
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    put(table, 1, 2)
    DeltaTable(table.path).optimize.compact()
    with pytest.raises(LakeError, match="what run r1 published in rollups/panes was rewritten by someone else since"):
        roll_back(settings, table, run)
    assert numbers(table) == [2, 10]


def test_what_a_person_wrote_before_the_pin_is_as_old_as_it_was_once_it_came_back(settings, table):
    put(table, 0, 1)
    write_deltalake(table.path, rows(2), mode="append")  # by nobody whose names tell batches
    run = published(settings, table, "r1", 0, 10)
    roll_back(settings, table, run)
    assert numbers(table) == [1, 2]
    publish(settings, table, run)
    assert numbers(table) == [10]


@pytest.mark.parametrize(("left", "why"), [(None, "which says what run r1 replaced in .*panes"), ("[[", "is damaged")])
def test_roll_back_whose_note_is_gone_or_cut_empties_no_day(settings, table, left, why):
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    note = lake.replaced_note(settings, run.id, table)
    note.unlink() if left is None else note.write_text(left)
    with pytest.raises(LakeError, match=rf"{note} is .*{why.removeprefix('is ')}"):
        roll_back(settings, table, run)
    assert numbers(table) == [10]


def test_roll_back_refuses_when_a_file_is_gone(settings, table):
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    for file in (table.path / "live").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(LakeError, match=r"1 files that run r1 replaced in rollups/panes are deleted, live/main-0-0-.* Settle"):
        roll_back(settings, table, run)
    assert numbers(table) == [10]


def test_sweep_keeps_what_can_be_rolled_back_and_no_longer(settings, table):
    put(table, 0, 1)
    [folder] = (table.path / "live").iterdir()
    run = published(settings, table, "r1", 0, 10)
    for entry in (table.path / "_delta_log").glob("*.json"):
        if entry.name != f"{table.delta().version():020d}.json":
            continue
        kept = [line for line in entry.read_text().splitlines() if "remove" not in json.loads(line)]
        entry.write_text("\n".join(kept) + "\n")  # the history has expired: nothing in it names the file any more
    first = table.path / "_delta_log" / f"{1:020d}.json"
    first.write_text("\n".join(line for line in first.read_text().splitlines() if "add" not in json.loads(line)) + "\n")
    published_at = datetime.fromisoformat(run.published or "")
    assert lake.sweep(settings, [table], published_at + timedelta(days=13)) == []
    assert lake.sweep(settings, [table], published_at + timedelta(days=15)) == [folder]


def test_expired_days_leave_the_table(table):
    put(table, 0, 1)
    put(table, 1, 2, at=NOON + timedelta(days=1))
    assert lake.expire(table, NEXT) == 1
    assert numbers(table) == [2]
    assert lake.expire(table, NEXT) == 0


#   batches 0 and 1 of the log are old; the ledger has so many of them
@pytest.mark.parametrize(("entered", "left"), [(0, [0, 1, 2]), (1, [1, 2]), (2, [2])])
def test_batch_that_is_not_in_the_ledger_yet_does_not_expire(settings: Any, table: Table, entered: int, left: list[int]) -> None:
    """Its stream was killed in it, and goes on from the log."""
    ledger = Table(settings.lake_path, "ledger", "pane")
    ledger.create(SCHEMA)
    for seq in range(3):
        put(table, seq, seq, at=NOON + timedelta(days=seq // 2))
    for seq in range(entered):
        put(ledger, seq, seq)
    put(ledger, 7, 7, stream="other")
    assert lake.expire(table, NEXT, ledger) == 3 - len(left)
    assert numbers(table) == left


def test_what_is_kept_no_longer_is_taken_out_and_an_undecided_run_never(settings):
    from tidemark.model import Topic, catalog

    kept = Topic("kept", "k", 1, "k STRING NOT NULL, at TIMESTAMP NOT NULL", "at", keep="30 days")
    for_ever = Topic("for_ever", "k", 1, "k STRING NOT NULL, at TIMESTAMP NOT NULL", "at")
    both, one_alone = catalog([type("p", (), {"kept": kept, "for_ever": for_ever})]), catalog([type("p", (), {"kept": kept})])
    now = datetime(2026, 11, 21, tzinfo=UTC)
    tables = {name: Table(settings.lake_path, name, "pane") for name in ("log/kept", "log/for_ever", "ledger", "verdicts")}
    for one in tables.values():
        one.create(SCHEMA)
        for seq, age in enumerate((500, 31, 29)):
            put(one, seq, age, at=now - timedelta(days=age))
    for name, state, age in (("old", "published", 500), ("waits", "staged", 500), ("young", "published", 300)):
        run = a_run(settings, name, 0, state=state)
        run.created = (now - timedelta(days=age)).isoformat()
        lake.save(settings, run)
        for lock in ("lease", "publishing"):
            (settings.lake_path / "runs" / f".{name}.{lock}").touch()
    for age in (401, 399):
        (settings.checkpoints / f"main.before-2-{int((now - timedelta(days=age)).timestamp())}" / "offsets").mkdir(parents=True)
    (settings.checkpoints / "main").mkdir()
    works = a_run(settings, "works", 0, state="running")
    lake.expire_all(settings, one_alone, now)  # what it still has to compute is there
    assert [numbers(tables[name]) for name in ("log/kept", "ledger")] == [[29, 31, 500]] * 2
    works.state = "failed"
    lake.save(settings, works)
    lake.expire_all(settings, both, now)
    assert {name: numbers(one) for name, one in tables.items()} == {
        "log/kept": [29],
        "log/for_ever": [29, 31, 500],
        "ledger": [29, 31, 500],  # as long as the log of which it tells
        "verdicts": [29, 31],
    }
    assert sorted(r.id for r in lake.runs(settings)) == ["waits", "works", "young"]
    locks = sorted(path.name for path in (settings.lake_path / "runs").glob(".*"))
    assert locks == [".waits.lease", ".waits.publishing", ".young.lease", ".young.publishing"]
    assert sorted(path.name.partition(".")[0] for path in settings.checkpoints.iterdir()) == ["main", "main"]
    lake.expire_all(settings, one_alone, now)
    assert numbers(tables["ledger"]) == [29, 31, 500]  # the log stays of a topic that is declared no more
    shutil.rmtree(tables["log/for_ever"].path)
    lake.expire_all(settings, one_alone, now)
    assert numbers(tables["ledger"]) == [29, 31]


@pytest.mark.parametrize("keep", ["30 days", "400 days", None])
def test_what_has_expired_is_not_held_again_once_it_is_kept_for_longer(settings, keep):
    from tidemark import model
    from tidemark.model import Topic, catalog

    topic = Topic("fees", None, 1, "at TIMESTAMP NOT NULL", "at", keep="30 days")
    log, now = Table(settings.lake_path, "log/fees", "pane"), datetime(2026, 11, 21, tzinfo=UTC)
    log.create(SCHEMA)
    assert (
        lake.kept_from(settings, replace(topic, keep=keep), now) == (now - model.duration(keep) if keep else datetime.min).date()
    )
    ledger = lake.ledger(settings)
    for one in (log, ledger):
        one.create(SCHEMA)
        for seq, age in enumerate((31, 29)):
            put(one, seq, age, at=now - timedelta(days=age))
    lake.expire_all(settings, catalog([type("p", (), {"fees": topic})]), now)
    assert lake.kept_from(settings, replace(topic, keep=keep), now) == (now - timedelta(days=30)).date()
    # And by whatever keep some days later no earlier one.
    later = now + timedelta(days=5)
    assert lake.kept_from(settings, topic, later) == (later - timedelta(days=30)).date()
    assert lake.lets_go(settings, replace(topic, keep=keep))


def test_dropped_run_leaves_no_staged_file_and_a_published_one_is_not_dropped(settings, table):
    from tidemark.model import catalog

    own = catalog([])
    run = a_run(settings, "r1", 0)
    run.published, run.tables["panes"] = "now", {"published": "now"}
    lake.save(settings, run)
    with pytest.raises(LakeError, match="run r1 is published; take it back first: tidemark rollback r1"):
        lake.drop(settings, own, run)
    run.published = None  # it was taken back, but for a table that no pipeline declares any more
    lake.save(settings, run)
    at_work = pytest.raises(LakeError, match=r"run r1 is being worked on; end that first \(Ctrl-C\), then: tidemark drop r1")
    with Lease(settings.lake_path / "runs" / ".r1.lease"), at_work:
        lake.drop(settings, own, run)
    lake.drop(settings, own, run)
    assert lake.run_of(settings, "r1").state == "dropped"


def test_what_readers_have_seen_of_a_run_goes_with_the_history_and_not_with_its_drop(settings, table):
    """Whoever has opened the table while it was published, or goes back there, finds every file."""
    from tidemark.model import Topic, catalog, rollup

    clicks = Topic("clicks", "page", 1, "page STRING NOT NULL, at TIMESTAMP NOT NULL", "at")

    @rollup(reads={"clicks": clicks}, key=("page", "pane"), time="pane", merge={"n": "max"})
    def panes(clicks: Any) -> Any: ...

    own = catalog([type("p", (), {"clicks": clicks, "panes": panes})])
    put(table, 0, 1)
    run = published(settings, table, "r1", 0, 10)
    opened = DeltaTable(table.path)
    roll_back(settings, table, run)
    run.state, run.published, run.tables = "rolled back", None, {}
    lake.save(settings, run)
    lake.drop(settings, own, run)
    assert (lake.run_of(settings, "r1").state, numbers(table)) == ("dropped", [1])
    assert opened.to_pyarrow_table()["n"].to_pylist() == [10]
    assert DeltaTable(table.path, version=opened.version()).to_pyarrow_table()["n"].to_pylist() == [10]
    never = stage(table, a_run(settings, "r2", 0), rows(11))
    lake.drop(settings, own, never)
    assert [folder.name for folder in (table.path / "runs").iterdir()] == ["r1"]


def test_nobody_begins_to_work_on_a_run_while_it_is_dropped(settings, monkeypatch):
    from tidemark.model import catalog

    run, save, held = a_run(settings, "r1", 0), lake.save, []
    monkeypatch.setattr(
        lake, "save", lambda *said: (held.append(lake.is_held(settings.lake_path / "runs" / ".r1.lease")), save(*said))
    )
    lake.drop(settings, catalog([]), run)
    assert (held, lake.run_of(settings, "r1").state) == ([True], "dropped")


# -------------------------------------------------------------------------------------------------------- beside some rows


def test_what_a_table_holds_beside_some_rows_is_of_their_days_and_times_and_of_their_types(table):
    #   [12:00 ─── 13:00)[13:00 ───      a file each, and one of the next day
    for seq, at in enumerate((NOON, NOON + HOUR, NOON + timedelta(days=1))):
        put(table, seq, seq, at=at)
    asked = rows(7, at=NOON + HOUR)
    assert lake.beside(table, asked, ["n", "day"]).to_pylist() == [{"n": 1, "day": DAY}]
    assert sorted(lake.beside(table, pa.concat_tables([asked, rows(8)]), ["n"])["n"].to_pylist()) == [0, 1]
    narrow = asked.set_column(2, "n", asked["n"].cast(pa.int32()))
    assert lake.beside(table, narrow, ["page", "n"]).schema == narrow.select(["page", "n"]).schema
    assert lake.beside(table, rows(7, at=NOON - 9 * HOUR), ["n"]).num_rows == 0


def test_rows_of_the_day_itself_are_found_by_it(settings):
    by_day = Table(settings.lake_path, "views/daily", "day")
    by_day.create(StructType().add("page", "string").add("day", "date"))
    daily = pa.table({"page": ["/"], "day": [DAY]})
    lake.swap_live(settings, by_day, NOON, NOON + HOUR, lake.write_arrow(by_day, "live/20261118T00-all-a", daily), marks=False)
    assert lake.beside(by_day, daily, ["day", "page"]).to_pylist() == [{"day": DAY, "page": "/"}]
    assert lake.beside(by_day, daily.set_column(1, "day", pa.array([NEXT])), ["day", "page"]).num_rows == 0


# ------------------------------------------------------------------------------------------------------------ damaged files


@pytest.mark.parametrize("left", [b"", b'{"add": {"path": "live'], ids=["empty", "cut"])
def test_damaged_newest_entry_is_named_with_the_way_out(table: Table, left: bytes) -> None:
    put(table, 0, 1)
    put(table, 1, 2)
    entry = table.path / "_delta_log" / "00000000000000000002.json"
    entry.write_bytes(left)
    with pytest.raises(LakeError, match=rf"table rollups/panes: its log entry {entry} is damaged.*move it away") as refused:
        Table(table.root, table.name, "pane").delta()
    assert "\n" not in str(refused.value)
    entry.unlink()
    again = Table(table.root, table.name, "pane")
    assert again.appended("main") == 0  # so the stream rolls batch 1 from the log again
    assert put(again, 1, 2) and numbers(again) == [1, 2]


@pytest.mark.parametrize("then", ["left", "moved away"])
def test_damaged_older_entry_is_not_said_to_be_moved_away_alone(table: Table, then: str) -> None:
    for seq in range(3):
        put(table, seq, seq)
    entry = table.entry(2)
    entry.write_bytes(b"{")
    if then == "moved away":
        entry.unlink()
    with pytest.raises(LakeError, match=rf"without one move {table.path} away, start the stream, then: .* replay --only panes$"):
        Table(table.root, table.name, "pane").delta()


@pytest.mark.parametrize("then", ["left", "moved away"])
def test_empty_newest_entry_that_a_checkpoint_has_loses_nothing(table: Table, spark, then: str) -> None:
    put(table, 0, 1)
    DeltaTable(table.path).create_checkpoint()
    entry = table.path / "_delta_log" / "00000000000000000001.json"
    entry.write_bytes(b"")
    if then == "moved away":
        entry.unlink()
    again = Table(table.root, table.name, "pane")
    assert again.appended("main") == 0 and put(again, 1, 2)
    assert numbers(again) == [1, 2] == sorted(r.n for r in spark.read.format("delta").load(str(table.path)).collect())


@pytest.mark.parametrize("checkpoint", [False, True], ids=["in no checkpoint", "in one"])
def test_empty_older_entry_is_named_unless_a_checkpoint_has_it(table: Table, checkpoint: bool) -> None:
    for seq in range(3):
        put(table, seq, seq)
    if checkpoint:
        DeltaTable(table.path).create_checkpoint()
    put(table, 3, 3)
    table.entry(2).write_bytes(b"")
    again = Table(table.root, table.name, "pane")
    if checkpoint:
        assert numbers(again) == [0, 1, 2, 3]
    else:
        with pytest.raises(LakeError, match=rf"its log entry {table.entry(2)} is damaged \(it is empty.*move {table.path} away"):
            again.delta()


def test_damaged_log_is_not_said_to_come_again(settings) -> None:
    log = Table(settings.lake_path, "log/page_views", "pane")
    log.create(SCHEMA)
    put(log, 0, 1)
    (log.path / "_delta_log" / "00000000000000000001.json").write_bytes(b"")
    with pytest.raises(LakeError, match=r"damaged.*from a copy of the lake; docs/operating\.md"):
        Table(log.root, log.name).delta()


@pytest.mark.parametrize(
    ("own", "reads", "held"),
    [
        ({"gate": "passed"}, {"gate": "passed"}, False),
        ({"gate": "failed"}, {"gate": "passed"}, True),
        ({"gate": "failed", "forced": {"checks": ["a"]}}, {"gate": "passed"}, False),
        ({"gate": "blocked"}, {"gate": "failed"}, True),
        ({"gate": "blocked"}, {"gate": "failed", "forced": {"checks": ["a"]}}, False),
    ],
)
def test_table_is_held_back_by_its_own_gate_and_those_of_what_it_reads_unless_a_person_has_taken_it(settings, own, reads, held):
    tables = {"hours": own | {"reasons": ["why"], "reads": ["panes", "page_views"]}, "panes": reads | {"reasons": ["because"]}}
    run = a_run(settings, "r1", 12)
    run.tables = tables
    assert run.held_back("hours") == (("why",) if held else ())
