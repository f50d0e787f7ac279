"""A file of a table is gone or cut: it is found, and made again from Kafka or from the log, while the stream runs on."""

import re
import shutil
from collections.abc import Callable
from dataclasses import astuple
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable, Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import kafka, lake, model, quality, query, repair, settle
from tidemark.functions import distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, rollup, view
from tidemark.settings import Settings

TODAY = datetime.now(UTC).date()
MIDNIGHT = datetime.combine(TODAY, datetime.min.time(), UTC)
LATE, EARLY = MIDNIGHT - timedelta(hours=3), MIDNIGHT + timedelta(seconds=1)
"""Of yesterday, and of today."""


def declared(topic: str, keep: str | None = None, page: str = "STRING") -> Catalog:
    """Clicks by minute and by hour."""
    schema = f"id STRING NOT NULL, clicked_at TIMESTAMP NOT NULL, page {page}"
    clicks = Topic(topic, "id", 2, schema, "clicked_at", id="id", keep=keep)

    @rollup(reads={"clicks": clicks}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def minutes(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy(pane("clicked_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    @view(reads={"minutes": minutes}, key=("hour",), time="hour", live=Live("1 second", "12 hours"))
    def hours(minutes: DataFrame) -> DataFrame:
        return minutes.groupBy(F.date_trunc("hour", "minute").alias("hour")).agg(F.sum(how_many("ids")).alias("clicks"))

    return model.catalog([type("shop", (), {"clicks": clicks, "minutes": minutes, "hours": hours})])


class Shop:
    def __init__(self, settings: Settings, topic: str, run: Any, page: str = "STRING") -> None:
        self.settings, self.topic, self.catalog, self.sent = settings, topic, declared(topic, page=page), 0
        kafka.apply(settings, self.catalog.topics.values())
        self.stream = run(settings, {"topic": topic, "page": page})

    def batch(self, at: datetime, count: int = 3) -> None:
        events = [{"id": f"c{self.sent + n}", "clicked_at": at.isoformat()} for n in range(count)]
        assert kafka.produce(self.settings, self.catalog.topics[self.topic], events).complete
        self.sent += count
        self.stream.until(lambda: sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == self.sent)

    def table(self, name: str) -> lake.Table:
        return lake.table(self.settings, self.catalog[name])

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return query.query(self.settings, self.catalog, sql.replace("LOG", self.topic), rows=1000).rows

    def log(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT id, clicked_at, kafka.partition, kafka.offset, kafka.value, day FROM LOG ORDER BY ALL")

    def hours(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT hour, clicks FROM hours ORDER BY ALL")

    def replayed(self, name: str, first: date) -> None:
        run = settle.replay(self.settings, self.catalog, "repair", source="log", only=[name], first=first)
        settle.publish(self.settings, self.catalog, run.id)

    def damage(self) -> list[tuple[str, str]]:
        return [(d.table, d.what) for d in repair.damage(self.settings, self.catalog)]


@pytest.fixture
def shop(house: Callable[..., Settings], run: Any, request: pytest.FixtureRequest) -> Shop:
    return Shop(house(compact_every="1 hour"), f"clicks_{request.node.name[5:30]}", run)


@pytest.mark.long
def test_files_of_every_kind_that_are_gone_or_cut_are_made_again_beside_the_stream(shop: Shop) -> None:
    shop.batch(LATE)
    shop.batch(EARLY)
    shop.batch(EARLY)
    hours = [(LATE.replace(minute=0, second=0), 3), (MIDNIGHT, 6)]
    shop.stream.until(lambda: shop.hours() == hours)
    whole = shop.log()
    assert shop.damage() == []

    log, minutes, view = (shop.table(name) for name in (shop.topic, "minutes", "hours"))
    for file in log.files():
        if file.day == TODAY:
            (log.path / file.path).unlink()
    (old,) = [file for file in log.files() if file.day != TODAY]
    (log.path / old.path).write_bytes((log.path / old.path).read_bytes()[:-100])
    for table in (minutes, view):
        for file in table.files():
            (table.path / file.path).unlink()
    assert {table for table, _ in shop.damage()} == {log.name, minutes.name, view.name}
    assert (log.name, f"has {old.size - 100:,} of {old.size:,} bytes") in shop.damage()

    done = {d.table: d for d in repair.repair(shop.settings, shop.catalog)}
    assert shop.damage() == [] and shop.log() == whole and done[log.name].rows == 9
    first = LATE.date()
    assert [done[t.name].then for t in (minutes, view)] == [
        f"tidemark replay --source log --only {name} --from {first} --reason repair" for name in ("minutes", "hours")
    ]
    shop.replayed("minutes", first)
    shop.stream.until(lambda: shop.hours() == hours)
    shop.batch(EARLY, 1)  # and the stream goes on
    hours[1] = (MIDNIGHT, 7)
    shop.stream.until(lambda: shop.hours() == hours)

    # Of a view alone, and of a day that is not over: the stream computes it again.
    (file,) = [file for file in view.files() if file.day == TODAY]
    (view.path / file.path).unlink()
    (one,) = repair.repair(shop.settings, shop.catalog)
    assert one.then and f"--only hours --from {TODAY}" in one.then
    shop.replayed("hours", TODAY)
    shop.stream.until(lambda: shop.hours() == hours)
    shop.stream.drains()


def test_what_kafka_no_longer_holds_is_refused_and_nothing_is_done(shop: Shop) -> None:
    shop.batch(EARLY, 6)
    shop.stream.drains()
    log = shop.table(shop.topic)
    ends = kafka.offsets(shop.settings, [shop.topic], "latest")[shop.topic]
    partition = max(ends, key=lambda p: ends[p])
    admin = AdminClient(kafka.client_config(shop.settings))
    for future in admin.delete_records([TopicPartition(shop.topic, partition, 1)]).values():
        future.result()
    (file,) = log.files()
    (log.path / file.path).unlink()
    version = log.delta().version()
    (one,) = repair.repair(shop.settings, shop.catalog)
    assert (one.table, one.files, one.rows) == (log.name, 0, 0)
    assert f"partition {partition} offsets 0 to 0 are deleted; put it back from a copy" in str(one.then)
    assert log.delta().version() == version and shop.damage() == [(log.name, "is gone")]


def test_rejects_that_are_accepted_when_a_log_s_file_is_made_again_have_their_rows_by_the_replay_that_is_told(
    house: Callable[..., Settings], run: Any
) -> None:
    shop = Shop(house(compact_every="1 hour"), "clicks_without_a_page", run, page="STRING NOT NULL")
    shop.batch(EARLY)
    shop.stream.drains()
    log = shop.table(shop.topic)
    assert sum(r["rejects"] for r in lake.ledger_rows(shop.settings, "main")) == 3 and not shop.table("minutes").files()

    shop.catalog = declared(shop.topic)  # a click need not have a page
    for file in log.files():
        (log.path / file.path).unlink()
    (one,) = repair.repair(shop.settings, shop.catalog)
    assert one.then == f"tidemark replay --source log --only minutes --from {TODAY} --reason repair"
    assert settle.settle_rejects(shop.settings, shop.catalog, "no reject is left") is None
    shop.replayed("minutes", TODAY)
    assert shop.rows("SELECT minute FROM minutes") == [(MIDNIGHT,)]


def written(table: lake.Table, folder: str, rows: pa.Table) -> lake.Table:
    """A table of a lake without a stream, with these rows."""
    if not table.exists:
        DeltaTable.create(table.path, Schema.from_arrow(rows.schema), mode="ignore", partition_by=["day"])
    lake.append(table, lake.Batch(folder, 0, 0), lake.write_arrow(table, f"live/{folder}", rows))
    return table


@pytest.fixture
def nights(settings: Settings) -> tuple[lake.Table, lake.Table]:
    """The verdicts of two nights, as a settling keeps them, and a rollup whose only file is gone."""
    (settings.lake_path / "runs").mkdir(parents=True)
    for run in ("first", "second"):
        said = ("", "critical", "passed", None, None, None, LATE, (LATE.date(), TODAY))
        judged = [quality.Verdict(run, "minutes", check, *said) for check in ("key is unique", "minute is not null")]
        verdicts = written(lake.verdicts(settings), run, quality.to_arrow(judged))
        lake.whole_or_nothing(settings.lake_path / "runs" / f"{run}.verdicts", quality.to_json(judged))
    row = {"minute": LATE, "ids": b"", "day": LATE.date()}
    minutes = written(lake.table(settings, declared("clicks")["minutes"]), "main-1-1-aa", pa.Table.from_pylist([row]))
    shutil.rmtree(minutes.path / "live")
    return verdicts, minutes


THEN = f"tidemark replay --source log --only minutes --from {LATE.date()} --reason repair"


def test_verdicts_that_are_gone_are_written_again_from_what_is_kept_beside_their_runs_records(
    settings: Settings, nights: tuple[lake.Table, lake.Table]
) -> None:
    verdicts, minutes = nights
    before = query.query(settings, declared("clicks"), "SELECT * FROM verdicts ORDER BY ALL").rows
    shutil.rmtree(verdicts.path / "live" / "second")
    done = repair.repair(settings, declared("clicks"))
    assert [(d.table, d.rows, d.then) for d in done] == [(minutes.name, 0, THEN), ("verdicts", 2, None)]
    assert repair.damage(settings, declared("clicks")) == []
    assert len(before) == 4 and query.query(settings, declared("clicks"), "SELECT * FROM verdicts ORDER BY ALL").rows == before


def test_days_that_a_log_no_longer_keeps_stay_named_for_nothing_could_make_them_again(
    settings: Settings, spark: SparkSession
) -> None:
    old, catalog = TODAY - timedelta(days=40), declared("clicks", keep="30 days")
    for n, day in enumerate((old, LATE.date())):
        row = {"minute": datetime.combine(day, datetime.min.time(), UTC), "ids": b"", "day": day}
        minutes = written(lake.table(settings, catalog["minutes"]), f"main-{n}-{n}-aa", pa.Table.from_pylist([row]))
    shutil.rmtree(minutes.path / "live")
    [(table, files, _, why)] = [astuple(d) for d in repair.repair(settings, catalog)]
    assert (table, files, len(minutes.files())) == (minutes.name, 0, 2)
    assert re.search(
        rf"the log of clicks keeps 30 days.*{old} is damaged, and cannot be made again: put it back from a copy", str(why)
    )
    spark.sql(str(why).rpartition("by Spark: ")[2])
    assert [f.day for f in minutes.files()] == [LATE.date()]


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ("live", r"table verdicts: live/\w+/day=[-\d]+/part-0.parquet is gone, and no run's record has its 2 verdicts"),
        ("_delta_log", "table verdicts: its log entry .*0001.json is damaged"),
    ],
)
def test_verdicts_that_nothing_holds_any_more_keep_nothing_else_from_being_repaired(
    settings: Settings, nights: tuple[lake.Table, lake.Table], lost: str, why: str
) -> None:
    verdicts, minutes = nights
    if lost == "live":
        shutil.rmtree(verdicts.path / lost)
        shutil.rmtree(settings.lake_path / "runs")
    else:
        verdicts.entry(1).write_text("{")
    assert {d.table for d in repair.damage(settings, declared("clicks"))} == {"verdicts", minutes.name}
    one, other = repair.repair(settings, declared("clicks"))
    assert (one.table, one.then, other.files) == (minutes.name, THEN, 0) and re.match(why, str(other.then))
    assert {d.table for d in repair.damage(settings, declared("clicks"))} == {"verdicts"}


def test_log_that_cannot_be_made_again_keeps_nothing_from_being_repaired_but_what_is_made_of_it(
    settings: Settings, nights: tuple[lake.Table, lake.Table]
) -> None:
    verdicts, minutes = nights
    clicks = written(lake.table(settings, declared("clicks")["clicks"]), "optimized", pa.Table.from_pylist([{"day": TODAY}]))
    for table, folder in ((clicks, "optimized"), (verdicts, "second")):
        shutil.rmtree(table.path / "live" / folder)
    done = {d.table: d for d in repair.repair(settings, declared("clicks"))}
    assert (done[clicks.name].files, done[minutes.name].files, done["verdicts"].rows) == (0, 0, 2)
    assert "was not written by a stream" in str(done[clicks.name].then)
    assert done[minutes.name].then == "table rollups/minutes is made of clicks, which must be repaired before"
    assert {d.table for d in repair.damage(settings, declared("clicks"))} == {clicks.name, minutes.name}
