"""The stream in a process of its own: bad input, rollups that raise, ends that are clean, and what it refuses."""

import json
import re
import shutil
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import psutil
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import fold, kafka, lake, local, model, query, speed
from tidemark.functions import distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, rollup, view
from tidemark.settings import Settings


def declared(topic: str, mended: bool = False) -> Catalog:
    """A rollup that works, one that divides by the value, with a live view, one that names no column; once mended, one that is
    new too."""
    readings = Topic(
        topic,
        key="sensor",
        partitions=2,
        schema="id STRING NOT NULL, sensor STRING NOT NULL, value BIGINT NOT NULL, measured_at TIMESTAMP NOT NULL",
        id="id",
        event_time="measured_at",
    )
    reads, key = {"readings": readings}, ("sensor", "minute")

    def by_minute(readings: DataFrame) -> Any:
        return readings.groupBy("sensor", pane("measured_at", "1 minute").alias("minute"))

    @rollup(reads=reads, key=key, time="minute", merge={"ids": "distinct", "most": "max"})
    def minutes(readings: DataFrame) -> DataFrame:
        return by_minute(readings).agg(distinct("id").alias("ids"), F.max("value").alias("most"))

    @rollup(reads=reads, key=key, time="minute", merge={"share": "max"})
    def shares(readings: DataFrame) -> DataFrame:
        return by_minute(readings).agg(F.max(F.expr("try_divide(100, value)" if mended else "100 / value")).alias("share"))

    @rollup(reads=reads, key=key, time="minute", merge={"least": "min"})
    def leasts(readings: DataFrame) -> DataFrame:
        return by_minute(readings).agg(F.min("value" if mended else "valeu").alias("least"))

    @rollup(reads=reads, key=key, time="minute", merge={"greatest": "max"})
    def nowheres(readings: DataFrame) -> DataFrame:
        some = readings if mended else readings.withColumn("measured_at", F.expr("if(value = 0, NULL, measured_at)"))
        return by_minute(some).agg(F.max("value").alias("greatest"))

    @rollup(reads=reads, key=key, time="minute", merge={"newest": "max"})
    def newests(readings: DataFrame) -> DataFrame:
        return by_minute(readings).agg(F.max("measured_at").alias("newest"))

    @view(reads={"shares": shares}, key=("sensor", "hour"), time="hour", live=Live(every="1 second", back="1 hour"))
    def hours(shares: DataFrame) -> DataFrame:
        return shares.groupBy("sensor", F.date_trunc("hour", "minute").alias("hour")).agg(F.max("share").alias("share"))

    rollups = {"minutes": minutes, "shares": shares, "leasts": leasts, "nowheres": nowheres} | (
        {"newests": newests} if mended else {}
    )
    return model.catalog([type("sensors", (), {"readings": readings, **rollups, "hours": hours})])


NOW = datetime.now(UTC).replace(microsecond=0)
TODAY = NOW.replace(hour=0, minute=0, second=0)
EARLY = max(NOW - timedelta(hours=5), TODAY)
"""Earlier today than what is live reaches back to, but for the first hours of a day."""


def reading(number: int, **changes: Any) -> bytes:
    """Three sensors, a reading each second up to now; `changes` replaces fields, or takes away those that are `...`."""
    at = (NOW - timedelta(seconds=600 - number)).isoformat()
    event = {"id": f"r{number}", "sensor": f"s{number % 3}", "value": 1 + number % 7, "measured_at": at} | changes
    return json.dumps({k: v for k, v in event.items() if v is not ...}).encode()


LARGE = "from tidemark import speed as s\ns.STEP, s.SMALL = 10, 0\n"
"""What has a stream take every batch for a large one."""
AFTER = "event time is more than 5 minutes after Kafka's timestamp"
BEFORE = "event time is before the year 2000"
BAD = [
    (b"<html>504 Gateway Time-out</html>", "not JSON"),
    (reading(1)[:-5], "not JSON"),
    (reading(1) + b" and more", "not JSON"),
    (reading(1, value=float("nan")), "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"[" * 100_000 + b"]" * 100_000, "not JSON"),
    (b"", "empty value"),
    (b"\xff\xfe" + reading(1), "not UTF-8"),
    (b'["a", "list"]', "not a JSON object"),
    (reading(1, id="x" * 10_000_000), "larger than 1048576 bytes"),
    (reading(1, value="7"), "value: wanted BIGINT, found STRING"),
    (reading(1, value=...), "value: missing"),
    (reading(1, value=None), "value: null"),
    (reading(1, sensor={"name": "s1"}), "sensor: wanted STRING, found OBJECT"),
    (reading(1, measured_at="1970-01-01T00:00:00Z"), BEFORE),
    (reading(1, measured_at=int(NOW.timestamp())), BEFORE),  # seconds where milliseconds are meant
    (reading(1, measured_at="9999-12-31T23:59:59Z"), AFTER),
    (reading(1, measured_at=(NOW + timedelta(days=365)).isoformat()), AFTER),
    (
        reading(1, measured_at="yesterday"),
        "measured_at: wanted TIMESTAMP (ISO 8601 with a zone, or epoch milliseconds), found STRING",
    ),
]


class Sensors:
    """One home for the module: a stream that is started, ended and refused in it, and what was sent to its topic."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self.settings, self.topic, self.sent = settings, topic, list[bytes]()
        self.checkpoint = lake.Checkpoint.of(settings, "main")
        kafka.apply(settings, declared(topic).topics.values())

    def send(self, *values: bytes) -> None:
        assert kafka.produce(self.settings, declared(self.topic)[self.topic], values).complete  # type: ignore[arg-type]
        self.sent += values

    def read(self) -> bool:
        """Whether the stream has finished batches with everything that was sent."""
        return sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == len(self.sent)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        catalog = declared(self.topic, mended=True)
        return query.query(self.settings, catalog, sql.replace("LOG", self.topic), rows=100_000).rows

    def group(self) -> dict[int, int]:
        """The offsets that the consumer group of the stream has committed, by partition."""
        places = [TopicPartition(self.topic, p) for p in (0, 1)]
        admin = AdminClient({"bootstrap.servers": self.settings.brokers})
        [answer] = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("tidemark-main", places)]).values()
        return {place.partition: place.offset for place in answer.result().topic_partitions}

    def move_group(self) -> None:
        """What anyone may do to the group of a stream that is down: one partition back to its begin, one far ahead."""
        moved = {0: 0, 1: 1_000_000}
        kafka.commit_group(self.settings, "tidemark-main", {(self.topic, p): offset for p, offset in moved.items()})
        assert self.group() == moved

    def hours(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT sensor, hour, share FROM hours ORDER BY ALL")

    def told(self) -> bool:
        """Whether the group has committed everything that was sent."""
        return self.group() == kafka.offsets(self.settings, [self.topic], "latest")[self.topic]

    def refreshed(self) -> bool:
        """Whether the live view is computed up to the newest event."""
        newest = max(json.loads(v)["measured_at"] for v in self.sent if v not in {value for value, _ in BAD})
        views = self.settings.state / "main" / "views.json"
        return views.exists() and json.loads(views.read_text()).get("hours") == str(datetime.fromisoformat(newest))

    def refused(self, sentence: str) -> None:
        """A start that is refused, with a sentence that says how to go on."""
        with pytest.raises(speed.SpeedError, match=sentence):
            speed.run(self.settings, declared(self.topic, mended=True))


@pytest.fixture(scope="module")
def sensors(house: Callable[..., Settings]) -> Sensors:
    return Sensors(house(), "readings_of_the_stream_test")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A start that is refused in this process must not keep its handlers."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def check_everything(sensors: Sensors, spark: SparkSession) -> None:
    """The log holds what was sent, once; the ledger counts it without a gap; every rollup has the answer of brute force."""
    assert sorted(bytes(v) for (v,) in sensors.rows("SELECT kafka.value FROM LOG")) == sorted(sensors.sent)
    held = kafka.offsets(sensors.settings, [sensors.topic], "latest")[sensors.topic]
    offsets = "SELECT kafka.partition, count(DISTINCT kafka.offset), min(kafka.offset) FROM LOG GROUP BY ALL"
    assert {p: (n, low) for p, n, low in sensors.rows(offsets)} == {p: (end, 0) for p, end in held.items()}
    spans = sensors.rows("SELECT partition, from_offset, until_offset, records FROM ledger ORDER BY seq")
    for partition, end in held.items():
        mine = [s[1:] for s in spans if s[0] == partition]
        assert [s[0] for s in mine] + [end] == [0] + [s[1] for s in mine]
        assert all(s[1] - s[0] == s[2] for s in mine)

    bad = {value for value, _ in BAD}
    told = [json.loads(v) for v in sensors.sent if v not in bad]
    brute = duckdb.connect()
    brute.execute("SET TimeZone = 'UTC'; CREATE TABLE r (id VARCHAR, sensor VARCHAR, value BIGINT, measured_at TIMESTAMPTZ)")
    brute.executemany("INSERT INTO r VALUES (?, ?, ?, ?)", [[e["id"], e["sensor"], e["value"], e["measured_at"]] for e in told])
    catalog = declared(sensors.topic, mended=True)
    for name, ours, theirs in [
        ("minutes", ["most", how_many("ids")], "max(value), count(DISTINCT id)"),
        ("shares", ["share"], "max(CASE WHEN value <> 0 THEN 100 / value END)"),
        ("leasts", ["least"], "min(value)"),
        ("nowheres", ["greatest"], "max(value)"),
        ("newests", ["newest"], "max(measured_at)"),
    ]:
        rows = lake.read(spark, lake.table(sensors.settings, catalog[name]))
        merged = fold.merge(catalog.rollups[name], rows).select("sensor", "minute", *ours).toArrow()
        answer = brute.sql(f"SELECT sensor, date_trunc('minute', measured_at), {theirs} FROM r GROUP BY ALL").to_arrow_table()
        assert values(merged) == values(answer)


def by_hour(sensors: Sensors) -> list[tuple[Any, ...]]:
    """What the live view must say, by brute force."""
    told = [json.loads(v) for v in sensors.sent if v not in {value for value, _ in BAD}]
    shares: dict[tuple[str, datetime], float] = {}
    for event in (e for e in told if e["value"]):
        key = event["sensor"], datetime.fromisoformat(event["measured_at"]).replace(minute=0, second=0)
        shares[key] = max(100 / event["value"], shares.get(key, 0))
    return sorted((*key, share) for key, share in shares.items())


def values(table: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


def shown(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """What the stream's page shows: by metric, its values by their labels."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        assert sample.labels.pop("stream") == "main"
        found.setdefault(sample.name, {})[tuple(v for _, v in sorted(sample.labels.items()))] = sample.value
    return found


@pytest.mark.long
def test_rollup_of_few_rows_but_large_ones_is_written_by_the_executors(settings: Settings, spark: SparkSession) -> None:
    letters = Topic("letters", "id", 1, "id STRING NOT NULL, text STRING NOT NULL, at TIMESTAMP NOT NULL", "at")

    @rollup(reads={"letters": letters}, key=("id", "at"), time="at", merge={"text": "max"})
    def texts(letters: DataFrame) -> DataFrame:
        return letters.groupBy("id", "at").agg(F.max("text").alias("text"))

    # 300 MB, of which the driver takes 256.
    text = F.repeat(F.lit("x"), F.lit(1_000_000)).alias("text")
    sent = spark.range(300).select(F.col("id").cast("string").alias("id"), text, F.lit(NOW).alias("at"))
    stream, table = object.__new__(speed.Stream), lake.table(settings, texts)
    stream.spark, stream.tables = spark, {"texts": table}
    table.create(fold.schema_of(fold.roll(texts, {"letters": sent})))
    files = stream.write_rollup(texts, {"letters": sent}, lake.Batch("main", 0, 0), small=True)
    assert sum(json.loads(file.stats)["numRecords"] for file in files) == 300


# The tests below follow one home through its days, in this order.


def test_bad_input_is_in_the_log_with_bytes_and_reason_and_rollups_that_raise_are_set_aside(
    sensors: Sensors, run, port: int
) -> None:
    sensors.send(*(reading(n) for n in range(200)))
    stream = run(sensors.settings.model_copy(update={"metrics_port": port}), {"topic": sensors.topic})
    stream.until(sensors.read)
    sensors.send(*(value for value, _ in BAD))
    stream.until(sensors.read)
    sensors.send(reading(200, value=0), *(reading(n) for n in range(201, 300)))
    stream.until(sensors.read)
    sensors.send(*(reading(n, id=f"early{n}", measured_at=EARLY.isoformat()) for n in range(20)))
    stream.until(sensors.read)
    sensors.send(*(reading(n) for n in range(300, 400)))
    stream.until(lambda: sensors.read() and local.status(sensors.settings)["progress"]["lag"] == 0)
    stream.until(sensors.refreshed)  # without what its rollup lacks

    found = {(bytes(v), r) for v, r in sensors.rows("SELECT kafka.value, reject FROM LOG WHERE reject IS NOT NULL")}
    assert {r for _, r in found} == {r for _, r in BAD}
    assert found == set(BAD)
    [counted] = sensors.rows("SELECT count(id), count(reject), (SELECT sum(rejects) FROM ledger) FROM LOG")
    assert counted == (420, len(BAD), len(BAD))

    aside = local.status(sensors.settings)["progress"]["set_aside"]
    assert sorted(aside) == ["leasts", "nowheres", "shares"]
    assert "a row has no minute, so it belongs to no day" in aside["nowheres"]
    assert "valeu" in aside["leasts"] and "DIVIDE_BY_ZERO" in aside["shares"]
    tables = {name: lake.table(sensors.settings, declared(sensors.topic)[name]) for name in ("minutes", "shares", "leasts")}
    newest = lake.table(sensors.settings, declared(sensors.topic)[sensors.topic]).appended("main")
    assert tables["minutes"].appended("main") == newest
    assert (tables["shares"].appended("main") or 0) < newest and not tables["leasts"].exists

    # What is told of it: the page agrees with the ledger and answers on loopback alone; so does the consumer group.
    page, now, ledger = shown(port), datetime.now(UTC), lake.ledger_rows(sensors.settings, "main")
    age = (now - max(r["finished_at"] for r in ledger)).total_seconds()
    assert age - 60 < page.pop("tidemark_commit_age_seconds")[()] < age + 1
    assert page == {
        "tidemark_records_total": {(sensors.topic,): sum(r["records"] for r in ledger)},
        "tidemark_rejected_total": {(sensors.topic,): len(BAD)},
        "tidemark_rejects_total": {(r, sensors.topic): n for r, n in Counter(r.rpartition(": ")[2] for _, r in BAD).items()},
        "tidemark_lag_records": {("0", sensors.topic): 0, ("1", sensors.topic): 0},
        "tidemark_stream_time_seconds": {(): max(r["stream_time"] for r in ledger).timestamp()},
        "tidemark_batch_seconds": {(): local.status(sensors.settings)["progress"]["seconds"]},
        "tidemark_records_per_second": {(): local.status(sensors.settings)["progress"]["records_per_second"]},
        "tidemark_set_aside": {("leasts",): 1, ("nowheres",): 1, ("shares",): 1},
        "tidemark_broker_away": {(): 0},
    }
    listening = [c.laddr for c in psutil.Process(stream.popen.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]

    with pytest.raises(local.LeaseHeld, match=f"process {stream.popen.pid} holds .*only one may run"):
        speed.run(sensors.settings, declared(sensors.topic))
    stream.drains(by_terminal=True)
    assert sensors.group() == {p: max(r["until_offset"] for r in ledger if r["partition"] == p) for p in (0, 1)}


def test_mended_and_new_rollups_get_what_they_lack_from_the_log_and_a_broker_that_is_away_is_waited_for(
    sensors: Sensors, run, spark: SparkSession, broker: Settings, port: int
) -> None:
    """The port of its metrics is taken all the while, and its consumer group, which nobody reads back, was moved.

    It rolls in many steps, and takes each batch for a large one, whose files the executors write.
    """
    shutil.copytree(sensors.checkpoint.path, sensors.settings.home / "older")
    sensors.send(*(reading(n) for n in range(400, 450)))
    sensors.move_group()
    with socket.create_server(("127.0.0.1", port)):
        own = sensors.settings.model_copy(update={"metrics_port": port})
        stream = run(own, {"topic": sensors.topic, "mended": True}, before=LARGE)
        stream.until(lambda: "metrics are not served, the stream runs without" in stream.said)
    stream.until(lambda: sensors.read() and local.status(sensors.settings)["progress"]["set_aside"] == {})
    stream.until(sensors.told)
    assert len(re.findall(r"rolling from the log .*newests", stream.said)) > 1
    check_everything(sensors, spark)
    stream.until(lambda: sensors.hours() == by_hour(sensors))

    local.stop(broker, local.BROKER, signal.SIGKILL)
    try:
        stream.until(lambda: "no Kafka broker answers" in stream.said)
        stream.until(lambda: local.status(sensors.settings)["heartbeat"]["state"] == "waiting")
    finally:
        local.start_broker(broker)
    stream.until(lambda: "the broker is back" in stream.said)
    sensors.send(*(reading(n) for n in range(450, 500)))
    stream.until(sensors.read)
    stream.drains()
    check_everything(sensors, spark)


@pytest.mark.parametrize("moved", ["its folder", "the newest entries of its log"])
def test_live_view_of_which_was_moved_away_has_the_day_that_is_open_again(moved: str, sensors: Sensors, run) -> None:
    view = lake.table(sensors.settings, declared(sensors.topic)["hours"])
    if moved == "its folder":
        view.path.rename(sensors.settings.home / "damaged")
    else:
        for entry in sorted((view.path / "_delta_log").glob("*.json"))[1:]:
            entry.unlink()
        assert not sensors.hours()
    stream = run(sensors.settings, {"topic": sensors.topic, "mended": True})
    today = [row for row in by_hour(sensors) if row[1] >= TODAY]
    stream.until(lambda: view.exists and [row for row in sensors.hours() if row[1] >= TODAY] == today)
    stream.drains()


def test_stream_whose_jvm_is_killed_ends_with_a_sentence(sensors: Sensors, run) -> None:
    stream = run(sensors.settings, {"topic": sensors.topic, "mended": True})
    stream.until(lambda: local.status(sensors.settings)["heartbeat"]["state"] == "running")
    next(p for p in psutil.Process(stream.popen.pid).children(recursive=True) if p.name() == "java").kill()
    stream.ends(1)
    heartbeat = local.status(sensors.settings)["heartbeat"]
    assert heartbeat["state"] == "failed" and heartbeat["error"].startswith("Spark's JVM has ended: exit code -9. Nothing half")
    assert stream.said.endswith(f"tidemark.speed.SpeedError: {heartbeat['error']}\n") and "set aside" not in stream.said


def test_stream_obeys_what_is_wanted_of_it_and_a_service_waits_until_it_is_wanted(sensors: Sensors, run) -> None:
    local.want(sensors.settings, "main", "stopped", "said before this start", "a test")
    stream = run(sensors.settings, {"topic": sensors.topic, "mended": True})
    stream.until(lambda: local.status(sensors.settings)["heartbeat"]["state"] == "running")
    local.want(sensors.settings, "main", "running", "new code", "a test", again=True)
    stream.ends(0)
    assert local.status(sensors.settings)["heartbeat"]["state"] == "stopped"
    local.want(sensors.settings, "main", "running", "", "a test")
    early = run(sensors.settings, {"topic": sensors.topic, "mended": True})
    early.until(lambda: psutil.Process(early.popen.pid).cpu_times().user > 0.1)  # it still imports
    local.want(sensors.settings, "main", "stopped", "while it comes up", "a test")
    early.ends(0)

    service = sensors.settings.model_copy(update={"stream_backend": "service"})
    local.want(sensors.settings, "main", "stopped", "to look at the disk", "a test")
    held = run(service, {"topic": sensors.topic, "mended": True})
    held.until(lambda: local.status(sensors.settings)["heartbeat"]["state"] == "held")
    local.want(sensors.settings, "main", "running", "looked", "a test")
    held.until(lambda: local.status(sensors.settings)["heartbeat"]["state"] == "running")
    local.want(sensors.settings, "main", "stopped", "again", "a test")
    held.ends(0)
    local.want(sensors.settings, "main", "running", "", "a test")


def test_older_copy_of_the_checkpoint_is_refused(sensors: Sensors, spark: SparkSession) -> None:
    path, newest = sensors.checkpoint.path, sensors.settings.home / "newest"
    path.rename(newest)
    (sensors.settings.home / "older").rename(path)
    sensors.refused("an old copy, or files are lost; open a new generation .* tidemark speed --stream main --recover")
    shutil.rmtree(path)
    newest.rename(path)


def test_lost_checkpoint_is_refused_until_recovered_and_then_nothing_is_lost_or_doubled(
    sensors: Sensors, run, spark: SparkSession
) -> None:
    """The worst moment: killed between the log and the rollups of a batch, so that only the checkpoint knew of it.

    The consumer group, which was moved, is not asked instead.
    """
    sensors.send(*(reading(n) for n in range(500, 520)))
    run(sensors.settings, {"topic": sensors.topic, "mended": True}, failpoint="between").dies()
    last = lake.table(sensors.settings, declared(sensors.topic)[sensors.topic]).appended("main")
    assert last is not None and last > max((r["seq"] for r in lake.ledger_rows(sensors.settings, "main")), default=-1)
    shutil.rmtree(sensors.checkpoint.path)
    sensors.send(*(reading(n, note="x" * 60_000) for n in range(520, 540)))
    sensors.refused("is lost, but the lake has .* batches of stream main; open a new generation")

    sensors.move_group()
    narrow = "from tidemark import session; session.SETTINGS['spark.driver.maxResultSize'] = '1m'"
    stream = run(sensors.settings, {"topic": sensors.topic, "mended": True}, recover=True, before=narrow)
    stream.until(lambda: sensors.read() and sensors.told())
    assert "more bytes than the driver takes at once" in stream.said
    stream.drains()
    check_everything(sensors, spark)
    generations = {(r["generation"], r["seq"] > last) for r in lake.ledger_rows(sensors.settings, "main")}
    assert generations == {(1, False), (2, True)}

    # SIGTERM drained between two batches: the last one is committed, and nobody reads a stack trace.
    assert sensors.checkpoint.newest("offsets") == sensors.checkpoint.newest("commits")
    assert local.status(sensors.settings)["heartbeat"]["state"] == "stopped"
    assert "Traceback" not in stream.said and "\tat " not in stream.said and "Exception" not in stream.said


def test_topic_that_was_created_again_is_refused(sensors: Sensors, spark: SparkSession, broker: Settings) -> None:
    admin = AdminClient({"bootstrap.servers": broker.brokers})
    admin.delete_topics([sensors.topic])[sensors.topic].result()
    kafka.apply(broker, declared(sensors.topic).topics.values())
    lake_, all_of_them = sensors.settings.lake_path, sensors.settings.checkpoints  # what is moved away is every stream's
    way = f"Give the new topic and what is made of it other names, or begin afresh .* move {lake_} and {all_of_them} away, and"
    sensors.refused(f"topic {sensors.topic} was deleted and created again, .* {way}")
