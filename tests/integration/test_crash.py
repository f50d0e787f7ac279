"""SIGKILL at every moment that matters, one after the other in one home: nothing lost, nothing twice."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import fold, kafka, lake, local, model, query, settle
from tidemark.functions import distinct, how_many, pane, union
from tidemark.model import Catalog, Topic, expect, rollup, view
from tidemark.settings import Settings

YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)


def declared(topic: str, quiet: str = "") -> Catalog:
    """Two rollups that use every merge, and a view: a batch is four commits, in this order: log, minutes, newest, ledger.

    A quiet topic may be beside it, with a rollup of its own.
    """
    sales = Topic(
        topic,
        key="buyer",
        partitions=2,
        schema="id STRING NOT NULL, buyer STRING NOT NULL, price BIGINT NOT NULL, sold_at TIMESTAMP NOT NULL",
        id="id",
        event_time="sold_at",
    )

    @rollup(
        reads={"sales": sales},
        key=("minute",),
        time="minute",
        merge={"ids": "distinct", "buyers": "distinct", "least": "min", "most": "max"},
    )
    def minutes(sales: DataFrame) -> DataFrame:
        return sales.groupBy(pane("sold_at", "1 minute").alias("minute")).agg(
            distinct("id").alias("ids"),
            distinct("buyer").alias("buyers"),
            F.min("price").alias("least"),
            F.max("price").alias("most"),
        )

    @rollup(
        reads={"sales": sales},
        key=("buyer", "hour"),
        time="hour",
        merge={"sold_at": "latest(by=sold_at)", "id": "latest(by=sold_at)", "price": "latest(by=sold_at)"},
    )
    def newest(sales: DataFrame) -> DataFrame:
        last = F.max(F.struct("sold_at", "id", "price")).alias("last")
        return sales.groupBy("buyer", pane("sold_at", "1 hour").alias("hour")).agg(last).select("buyer", "hour", "last.*")

    @view(
        reads={"minutes": minutes},
        key=("hour",),
        time="hour",
        checks=[expect("ExpectColumnValuesToBeBetween", column="sold", min_value=1)],
    )
    def hours(minutes: DataFrame) -> DataFrame:
        return minutes.groupBy(F.date_trunc("hour", "minute").alias("hour")).agg(
            F.sum(how_many("ids")).alias("sold"), how_many(union("buyers")).alias("buyers")
        )

    returns = replace(sales, name=quiet or "returns")

    @rollup(reads={"returns": returns}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def returned(returns: DataFrame) -> DataFrame:
        return returns.groupBy(pane("sold_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    beside = {"returns": returns, "returned": returned} if quiet else {}
    return model.catalog([type("shop", (), {"sales": sales, "minutes": minutes, "newest": newest, "hours": hours, **beside})])


class Shop:
    """One home that every test of this module kills a process in, and what was sent to its topic, and to a quiet one beside."""

    def __init__(self, settings: Settings, topic: str, quiet: str = "") -> None:
        self.settings, self.topic, self.quiet, self.catalog = settings, topic, quiet, declared(topic, quiet)
        self.arguments = {"topic": topic, "quiet": quiet}
        self.sent: list[bytes] = []
        self.returned: list[bytes] = []
        self.random = Random(topic)
        kafka.apply(settings, self.catalog.topics.values())

    def send_back(self, count: int = 20) -> None:
        """Into the quiet topic."""
        start = datetime.combine(YESTERDAY, datetime.min.time(), UTC).isoformat()
        events = [{"id": f"r{len(self.returned) + n}", "buyer": f"b{n}", "price": n, "sold_at": start} for n in range(count)]
        values = [json.dumps(event).encode() for event in events]
        assert kafka.produce(self.settings, self.catalog[self.quiet], values).complete  # type: ignore[arg-type]
        self.returned += values

    def send(self, count: int = 20) -> None:
        """Sales of yesterday, in no order, some sent again, one of them a value that is refused."""
        start = datetime.combine(YESTERDAY, datetime.min.time(), UTC)
        sales = [
            {
                "id": f"{self.random.getrandbits(64):016x}",
                "buyer": f"b{self.random.randrange(5)}",
                "price": self.random.randrange(1000),
                "sold_at": (start + timedelta(milliseconds=self.random.randrange(86_400_000))).isoformat(timespec="milliseconds"),
            }
            for _ in range(count)
        ]
        values = [json.dumps(s).encode() for s in sales]
        again = self.random.choices([v for v in [*self.sent, *values] if v.startswith(b"{")], k=3)
        values += [*again, b"not JSON"]
        assert kafka.produce(self.settings, self.catalog[self.topic], values).complete  # type: ignore[arg-type]
        self.sent += values

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return query.query(self.settings, self.catalog, sql.replace("LOG", self.topic), rows=100_000).rows

    def tables(self) -> dict[str, lake.Table]:
        """The tables of a batch, in the order of their commits."""
        minutes, newest = (lake.table(self.settings, self.catalog[name]) for name in ("minutes", "newest"))
        log, ledger = lake.table(self.settings, self.catalog[self.topic]), lake.ledger(self.settings)
        return {"log": log, "minutes": minutes, "newest": newest, "ledger": ledger}

    def planned(self) -> int | None:
        """The batch that was planned and not committed to the checkpoint, as its `seq`."""
        checkpoint = lake.Checkpoint.of(self.settings, "main")
        planned, done = checkpoint.newest("offsets"), checkpoint.newest("commits")
        assert checkpoint.identity is not None or planned is None
        return None if planned == done else checkpoint.identity.base + planned  # type: ignore[union-attr, operator]

    def holding(self, seq: int) -> list[str]:
        newest = {name: table.appended("main") for name, table in self.tables().items()}
        return [name for name, number in newest.items() if number is not None and number >= seq]

    def read(self) -> bool:
        """Whether the stream has finished batches with everything that was sent."""
        return sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == len(self.sent) + len(self.returned)

    def whole(self) -> bool:
        """Whether the newest batch is in the checkpoint too."""
        return self.read() and self.planned() is None


def changed(settings: Settings, **changes: Any) -> Settings:
    return Settings(_env_file=None, **(settings.model_dump() | changes))


@pytest.fixture(scope="module")
def shop(house: Callable[..., Settings]) -> Shop:
    return Shop(house(), "sales_of_the_crash_test")


def check_log_and_ledger(shop: Shop, topic: str = "LOG") -> None:
    """Every offset from zero on stands once in the log, as it was sent, and the ledger counts them without a gap."""
    once = "HAVING count(*) = count(DISTINCT kafka.offset)"
    until = dict(shop.rows(f"SELECT kafka.partition, max(kafka.offset) + 1 FROM {topic} GROUP BY ALL {once}"))
    assert until == dict(shop.rows(f"SELECT kafka.partition, count(*) FROM {topic} GROUP BY ALL"))
    asked = f"SELECT partition, from_offset, until_offset, records, rejects FROM ledger WHERE topic = '{topic}'"
    spans = shop.rows(f"{asked} ORDER BY partition, seq")
    for partition in until:
        mine = [s for s in spans if s[0] == partition]
        assert [s[1] for s in mine] == [0, *(s[2] for s in mine)][:-1]
        assert all(s[2] - s[1] == s[3] for s in mine)


def check_everything(shop: Shop, spark: SparkSession) -> None:
    """Log and ledger as they must be, the log what was sent, and both rollups, merged, the answer of brute force."""
    check_log_and_ledger(shop)
    assert Counter(bytes(v) for (v,) in shop.rows("SELECT kafka.value FROM LOG")) == Counter(shop.sent)
    held = kafka.offsets(shop.settings, [shop.topic], "latest")[shop.topic]
    entered = "SELECT partition, sum(until_offset - from_offset) FROM ledger WHERE topic = 'LOG' GROUP BY ALL"
    assert dict(shop.rows(entered)) == held
    rejects = shop.rows("SELECT (SELECT sum(rejects) FROM ledger), (SELECT count(reject) FROM LOG)")
    assert rejects == [(shop.sent.count(b"not JSON"),) * 2]

    sales = duckdb.connect()
    sales.execute("SET TimeZone = 'UTC'; CREATE TABLE sales (id VARCHAR, buyer VARCHAR, price BIGINT, sold_at TIMESTAMPTZ)")
    told = [json.loads(v) for v in shop.sent if v != b"not JSON"]
    sales.executemany("INSERT INTO sales VALUES (?, ?, ?, ?)", [[s["id"], s["buyer"], s["price"], s["sold_at"]] for s in told])

    def merged(name: str) -> DataFrame:
        declaration = shop.catalog.rollups[name]
        return fold.merge(declaration, lake.read(spark, lake.table(shop.settings, declaration)))

    minutes = merged("minutes").select("minute", how_many("ids"), how_many("buyers"), "least", "most")
    assert rows_of(minutes) == asked(
        sales,
        """SELECT date_trunc('minute', sold_at), count(DISTINCT id), count(DISTINCT buyer), min(price), max(price)
           FROM sales GROUP BY 1 ORDER BY ALL""",
    )
    assert rows_of(merged("newest").select("buyer", "hour", "sold_at", "id", "price")) == asked(
        sales,
        """SELECT buyer, date_trunc('hour', sold_at) AS hour, sold_at, id, price FROM (SELECT DISTINCT * FROM sales)
           QUALIFY row_number() OVER (PARTITION BY buyer, hour ORDER BY sold_at DESC, id DESC) = 1 ORDER BY ALL""",
    )


# A batch's four commits are log, minutes, newest, ledger: `files:1` is the moment before the first, `commit:2` after the second.
@pytest.mark.parametrize(
    ("point", "number", "held"),
    [
        pytest.param("offsets", 1, [], marks=pytest.mark.long),
        ("files", 1, []),
        pytest.param("between", 1, ["log"], marks=pytest.mark.long),
        ("commit", 2, ["log", "minutes"]),
        pytest.param("done", 1, ["log", "minutes", "newest", "ledger"], marks=pytest.mark.long),
    ],
)
def test_killed_in_a_batch(point: str, number: int, held: list[str], shop: Shop, run) -> None:
    before = shop.planned()
    if before is not None:  # the batch that the last crash left open comes first, and passes points of its own
        number += 4 - len(shop.holding(before)) if point in ("files", "commit") else 1
    shop.send()
    stream = run(shop.settings, {"topic": shop.topic}, failpoint=f"{point}:{number}")
    stream.dies()
    killed = shop.planned()
    assert killed is not None and killed == (0 if before is None else before + 1)
    assert shop.holding(killed) == held
    if "ledger" in held:
        check_log_and_ledger(shop)


def test_killed_while_compacting(shop: Shop, run) -> None:
    quick = changed(shop.settings, compact_every="1 second")
    stream = run(quick, {"topic": shop.topic}, failpoint="compaction")
    while stream.popen.poll() is None:  # batches of a few sales each, until there are files enough to merge
        shop.send(5)
        while stream.popen.poll() is None and not shop.read():
            time.sleep(0.02)
    stream.dies()
    assert len(lake.table(shop.settings, shop.catalog["minutes"]).files()) >= lake.WORTH_MERGING


def test_after_all_of_it_and_the_newest_commit_file_lost_too(shop: Shop, run, spark: SparkSession) -> None:
    commits = lake.Checkpoint.of(shop.settings, "main").path / "commits"
    max((p for p in commits.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)).unlink()
    minutes = lake.table(shop.settings, shop.catalog["minutes"])
    files = len(minutes.files())
    shop.send(200)
    stream = run(changed(shop.settings, compact_every="1 second"), {"topic": shop.topic})
    stream.until(lambda: shop.read() and len(minutes.files()) < files)
    stream.drains()
    check_everything(shop, spark)


def batches_away(table: lake.Table, count: int = 1) -> dict[Path, Path]:
    """What a person does with entries of a Delta log that are damaged: the newest, down to those of so many batches. A
    compaction's may lie above them. Where each was, by where it is."""
    moved = {}
    while count:
        entry = max((table.path / "_delta_log").glob("*.json"))
        count -= '"appId":"main"' in entry.read_text()
        away = table.path.parent / f"damaged-{table.path.name}-{entry.name}"
        moved[entry.rename(away)] = entry
    return moved


def names_its_batch(table: lake.Table, back: int = 0) -> bool:
    """Whether the newest checkpoint of a Delta log has the newest batch, or the one so many back: then no entry that is moved
    away takes it out."""
    log = table.path / "_delta_log"
    newest = sorted(entry for entry in log.glob("*.json") if '"appId":"main"' in entry.read_text())[-1 - back]
    last = log / "_last_checkpoint"
    return last.exists() and json.loads(last.read_text())["version"] >= int(newest.stem)


def killed_behind(shop: Shop, run: Any, table: lake.Table, batches: int) -> None:
    """A stream that is killed behind so many whole batches, each of which can be moved away from a table's Delta log."""
    stream, sent = run(shop.settings, {"topic": shop.topic}), 0
    while sent < batches or names_its_batch(table, batches - 1):
        shop.send()
        stream.until(shop.whole)
        sent += 1
    stream.kill()


@pytest.mark.long
@pytest.mark.parametrize("lost", [["log"], ["ledger"], ["log", "minutes", "ledger"]], ids=" ".join)
def test_newest_log_entries_lost_are_read_from_kafka_again(lost: list[str], shop: Shop, run, spark: SparkSession) -> None:
    tables = shop.tables()
    shop.send()
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(shop.whole)
    while any(map(names_its_batch, tables.values())):
        shop.send()
        stream.until(shop.whole)
    stream.kill()
    before = {name: table.appended("main") for name, table in tables.items()}
    assert len(set(before.values())) == 1
    for name in lost:
        batches_away(tables[name])
        assert shop.tables()[name].appended("main") != before[name]
    shop.send()
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(shop.whole)
    stream.drains()
    check_everything(shop, spark)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "point", "refused"), [("log", "offsets:1", ""), ("ledger", "between:1", "--recover")], ids=["log", "ledger"]
)
def test_newest_log_entry_lost_while_the_next_batch_is_under_way(
    lost: str, point: str, refused: str, shop: Shop, run, spark: SparkSession
) -> None:
    """Spark goes on with what it has planned last: what came before would never be read again."""
    table = shop.tables()[lost]
    killed_behind(shop, run, table, 1)
    shop.send()
    run(shop.settings, {"topic": shop.topic}, failpoint=point).dies()
    assert shop.planned() is not None
    moved = batches_away(table)
    if refused:
        stream = run(shop.settings, {"topic": shop.topic})
        assert stream.popen.wait(180) > 0
        assert "the ledger lacks the newest whole batch of stream main" in stream.said and refused in stream.said
        for away, entry in moved.items():  # not what earlier tests have moved: the stream has written those anew
            away.rename(entry)
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(shop.whole)
    stream.drains()
    check_everything(shop, spark)


@pytest.mark.long
def test_log_that_lacks_two_batches_gets_them_from_kafka_again(shop: Shop, run, spark: SparkSession) -> None:
    log = shop.tables()["log"]
    killed_behind(shop, run, log, 2)
    batches_away(log, 2)
    shop.send()
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(shop.whole)
    stream.drains()
    check_everything(shop, spark)


@pytest.mark.long
def test_ledger_that_lacks_two_batches_is_refused_with_what_enters_them_again(shop: Shop, run, spark: SparkSession) -> None:
    ledger = shop.tables()["ledger"]
    killed_behind(shop, run, ledger, 2)
    batches_away(ledger, 2)
    shop.send()
    stream = run(shop.settings, {"topic": shop.topic})
    stream.ends(1)
    assert "the ledger lacks more than the newest batch of stream main" in stream.said
    assert stream.said.endswith("with: tidemark speed --stream main --recover\n")
    stream = run(shop.settings, {"topic": shop.topic}, recover=True)
    stream.until(shop.whole)
    stream.drains()
    check_everything(shop, spark)


def check_returns(shop: Shop, spark: SparkSession) -> None:
    """The quiet topic's log holds what was sent to it, once, and its rollup has every one of them."""
    check_log_and_ledger(shop, shop.quiet)
    assert Counter(bytes(v) for (v,) in shop.rows(f"SELECT kafka.value FROM {shop.quiet}")) == Counter(shop.returned)
    returned = shop.catalog.rollups["returned"]
    merged = fold.merge(returned, lake.read(spark, lake.table(shop.settings, returned)))
    assert merged.agg(F.sum(how_many("ids"))).collect()[0][0] == len(shop.returned)


@pytest.mark.parametrize(
    "way", ["start", pytest.param("recover", marks=pytest.mark.long), pytest.param("nothing_yet", marks=pytest.mark.long)]
)
def test_quiet_topics_newest_log_entry_lost_is_read_from_kafka_again(way: str, house, run, spark: SparkSession) -> None:
    """At a start, with a new generation, and where the generation has committed nothing yet."""
    shop = Shop(house(), f"sales_beside_a_quiet_topic_{way}", f"returns_{way}")
    # batch      0     1     2
    # sales     24    24    24
    # returns   20    20     ·   ← of its log the entry of 1 is lost
    stream = run(shop.settings, shop.arguments)
    for _ in range(2):
        shop.send()
        shop.send_back()
        stream.until(shop.whole)
    shop.send()
    stream.until(shop.whole)
    stream.kill()
    checkpoint = lake.Checkpoint.of(shop.settings, "main")
    if way == "nothing_yet":
        stream = run(shop.settings, shop.arguments, recover=True)
        stream.until(lambda: checkpoint.identity and checkpoint.identity.number == 2)
        stream.until(lambda: local.status(shop.settings)["heartbeat"]["state"] == "running")
        stream.kill()
        assert checkpoint.newest("commits") is None
    batches_away(lake.table(shop.settings, shop.catalog[shop.quiet]))
    shop.send()
    stream = run(shop.settings, shop.arguments, recover=way == "recover")
    stream.until(shop.whole)
    stream.drains()
    check_returns(shop, spark)
    check_everything(shop, spark)


@pytest.mark.long
def test_quiet_topics_log_that_kafka_no_longer_gives_is_refused_by_its_offsets(house, run, spark: SparkSession) -> None:
    shop = Shop(house(), "sales_beside_deleted_returns", "returns_that_are_deleted")
    log = lake.table(shop.settings, shop.catalog[shop.quiet])
    stream = run(shop.settings, shop.arguments)
    shop.send_back()
    stream.until(shop.whole)
    shop.send()
    stream.until(shop.whole)
    stream.kill()
    batches_away(log)
    deleted(shop, {0: 1})
    stream = run(shop.settings, shop.arguments)
    stream.ends(1)
    held = kafka.offsets(shop.settings, [shop.quiet], "latest")[shop.quiet]
    assert f"lacks records that the ledger has: topic {shop.quiet}, partition 0, offsets 0 to {held[0] - 1}" in stream.said
    assert f"Kafka no longer holds all of them. Put {log.path} back from a copy of the lake" in stream.said
    for entry in log.path.parent.glob(f"damaged-{log.path.name}-*"):
        entry.rename(log.path / "_delta_log" / entry.name.split("-")[-1])
    stream = run(shop.settings, shop.arguments)
    stream.until(lambda: local.status(shop.settings)["heartbeat"]["state"] == "running")
    stream.drains()
    check_returns(shop, spark)


@pytest.mark.long
def test_log_that_the_ledger_has_under_a_later_number_lacks_nothing(house, run, spark: SparkSession) -> None:
    """A killed batch was in one of two logs and the ledger had lost the batch before: both are entered as the killed one."""
    shop = Shop(house(), "sales_beside_half_a_batch", "returns_beside_half_a_batch")
    logs = {name: lake.table(shop.settings, shop.catalog[name]) for name in (shop.topic, shop.quiet)}
    stream = run(shop.settings, shop.arguments)
    for _ in range(2):
        with stream.paused():
            shop.send()
            shop.send_back()
        stream.until(shop.whole)
    stream.kill()
    shop.send()
    shop.send_back()
    run(shop.settings, shop.arguments, failpoint="between:1").dies()
    half, whole = sorted(logs, key=lambda name: logs[name].appended("main") or 0)
    assert logs[half].appended("main") < logs[whole].appended("main")
    batches_away(lake.ledger(shop.settings))
    run(shop.settings, shop.arguments, recover=True, failpoint="offsets:1").dies()
    rows = [r for r in lake.ledger_rows(shop.settings, "main") if r["topic"] == half]
    assert rows[-1]["seq"] > logs[half].appended("main")
    deleted(shop, {r["partition"]: r["until_offset"] for r in rows if r["seq"] == rows[-1]["seq"]}, half)
    stream = run(shop.settings, shop.arguments)
    stream.until(shop.whole)
    stream.drains()
    assert "read again" not in stream.said
    check_returns(shop, spark)
    check_everything(shop, spark)


def deleted(shop: Shop, upto: dict[int, int], topic: str = "") -> None:
    """What retention does, at once, with the quiet topic unless said."""
    places = [TopicPartition(topic or shop.quiet, partition, offset) for partition, offset in upto.items()]
    admin = AdminClient(kafka.client_config(shop.settings))
    for future in admin.delete_records(places).values():
        future.result()


SETTLE = """
import importlib, json, sys
from datetime import date
from tidemark import settle
from tidemark.settings import Settings
module, arguments, _ = json.loads(sys.argv[1])
catalog = importlib.import_module(module).declared(arguments["topic"])
if "run" in arguments:
    settle.publish(Settings(_env_file=None), catalog, arguments["run"])
else:
    settle.settle(Settings(_env_file=None), catalog, [date.fromisoformat(arguments["day"])], "the crash test")
"""


def test_killed_while_settling_then_while_publishing(shop: Shop, run, spark: SparkSession) -> None:
    """The reader's tables are as they were until a table's one commit; publishing again finishes the rest."""
    versions = lambda: {n: lake.table(shop.settings, d).delta().version() for n, d in derived.items()}  # noqa: E731
    derived = {d.name: d for d in shop.catalog.derived}
    before = versions()
    run(shop.settings, {"topic": shop.topic, "day": str(YESTERDAY)}, program=SETTLE, failpoint="staged").dies()
    [killed] = lake.runs(shop.settings)
    assert (killed.state, versions()) == ("running", before)
    with pytest.raises(settle.SettleError, match=f"run {killed.id} is running; settle the days again"):
        settle.publish(shop.settings, shop.catalog, killed.id)

    good = settle.settle(shop.settings, shop.catalog, [YESTERDAY], "the day again")
    run(shop.settings, {"topic": shop.topic, "run": good.id}, program=SETTLE, failpoint="published:2").dies()
    assert versions() == before | {n: before[n] + 1 for n in ("minutes", "newest")}
    done = settle.publish(shop.settings, shop.catalog, good.id)
    assert {p.table: p.version for p in done} == {"minutes": None, "newest": None, "hours": before["hours"] + 1}
    assert versions() == {n: v + 1 for n, v in before.items()}
    check_everything(shop, spark)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB, in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.long
def test_full_disk_stops_the_stream_with_nothing_half_visible_and_it_goes_on_when_there_is_room(
    house: Callable[..., Settings], run, spark: SparkSession, small_disk: Path
) -> None:
    shop = Shop(house(home=small_disk / "home"), "sales_of_the_full_disk")
    shop.send()
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(shop.read)
    before = {name: table.delta().version() for name, table in shop.tables().items()}
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    shop.send(200)
    assert stream.popen.wait(90) > 0
    assert {name: table.delta().version() for name, table in shop.tables().items()} == before
    check_log_and_ledger(shop)
    ballast.unlink()
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(shop.read)
    stream.drains()
    check_everything(shop, spark)


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(r.values()) for r in frame.toArrow().to_pylist())


def asked(connection: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(r.values()) for r in connection.sql(sql).to_arrow_table().to_pylist()]
