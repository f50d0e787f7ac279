"""What other people's topics are like: transactions, compaction, more partitions, lost records, no id, plain lines."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from pyspark.sql import DataFrame, SparkSession

from tidemark import fold, kafka, lake, local, model, query, settle, speed
from tidemark.functions import distinct, how_many, pane, position
from tidemark.model import Catalog, Topic, rollup
from tidemark.settings import Settings

NOW = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=1)
EVENT = "name STRING NOT NULL, said_at TIMESTAMP NOT NULL"


def declared(topic: str, partitions: int = 2, beside: str = "", **changes: Any) -> Catalog:
    """One topic without an `id`, and its minutes: an event is its partition and offset. Another topic may be beside it."""
    text = changes.get("format") == "text"
    schema, moment = ("line STRING NOT NULL", "kafka.timestamp") if text else (EVENT, "said_at")
    events = Topic(topic, None if text else "name", partitions, schema, moment, **changes)

    source = events.changes if events.compacted else events

    @rollup(reads={"events": source}, key=("minute",), time="minute", merge={"seen": "distinct"})
    def minutes(events: DataFrame) -> DataFrame:
        return events.groupBy(pane(moment, "1 minute").alias("minute")).agg(distinct(position()).alias("seen"))

    more = {"more": Topic(beside, "name", 1, EVENT, "said_at")} if beside else {}
    return model.catalog([type("talk", (), {"events": events, "minutes": minutes, **more})])


class Talk:
    """One home with a stream over one topic."""

    def __init__(self, settings: Settings, topic: str, **changes: Any) -> None:
        self.settings, self.topic, self.changes = settings, topic, changes
        self.catalog = declared(topic, **changes)
        self.admin = AdminClient(kafka.client_config(settings))
        kafka.apply(settings, self.catalog.topics.values())

    @property
    def arguments(self) -> dict[str, Any]:
        return {"topic": self.topic, **self.changes}

    def send(self, *names: str, ago: timedelta = timedelta()) -> None:
        events = [{"name": name, "said_at": (NOW - ago).isoformat()} for name in names]
        assert kafka.produce(self.settings, self.catalog[self.topic], events).complete  # type: ignore[arg-type]

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return query.query(self.settings, self.catalog, sql.replace("LOG", self.topic), rows=100_000).rows

    def ledger(self, columns: str) -> list[tuple[Any, ...]]:
        return (
            self.rows(f"SELECT {columns} FROM ledger WHERE topic = '{self.topic}'") if lake.ledger(self.settings).exists else []
        )

    def names(self) -> list[str]:
        there = lake.table(self.settings, self.catalog[self.topic]).exists
        return [name for (name,) in self.rows("SELECT name FROM LOG ORDER BY ALL")] if there else []

    def whole(self) -> bool:
        """Whether the ledger's batches follow each other from zero to Kafka's end, without a hole or an overlap."""
        ends = kafka.offsets(self.settings, [self.topic], "latest")[self.topic]
        spans: dict[int, list[tuple[int, int]]] = {}
        for partition, start, until in sorted(self.ledger('"partition", from_offset, until_offset')):
            spans.setdefault(partition, []).append((start, until))
        edges = {
            p: [0, *(until for _, until in parts)] == [*(start for start, _ in parts), ends[p]] for p, parts in spans.items()
        }
        return all(edges.values()) and set(spans) == {p for p, end in ends.items() if end}

    def counted(self, spark: SparkSession) -> int:
        """How many events the merged rollup has."""
        minutes = self.catalog.rollups["minutes"]
        rows = fold.merge(minutes, lake.read(spark, lake.table(self.settings, minutes)))
        return sum(r["n"] for r in rows.select(how_many("seen").alias("n")).collect())

    def replayed(self, spark: SparkSession) -> int:
        """How many events it has after a replay from Kafka, which found each record as the log has it and no row otherwise."""
        said: list[str] = []
        run = settle.replay(self.settings, self.catalog, "from zero", said.append)
        compared = run.tables["minutes"]["compare"]
        assert [compared[what] for what in ("missing", "extra", "changed")] == [0, 0, 0] and compared["rows"] > 0
        assert f"{self.topic}: read 1 of 1 parts from Kafka in" in " ".join(said)
        assert all(p.version for p in settle.publish(self.settings, self.catalog, run.id))
        return self.counted(spark)

    def delete(self, upto: dict[int, int]) -> None:
        """What retention does, at once."""
        for future in self.admin.delete_records([TopicPartition(self.topic, p, o) for p, o in upto.items()]).values():
            future.result()

    def compacted(self) -> None:
        """Have Kafka compact the topic now. A segment is closed by the record after it, of which some are sent."""
        lags = {"min.compaction.lag.ms": "0", "max.compaction.lag.ms": "100"}
        wanted = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"} | lags
        entries = [ConfigEntry(n, v, incremental_operation=AlterConfigOpType.SET) for n, v in wanted.items()]
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result()
        deadline = time.monotonic() + 90
        while len(list(kafka.consume(self.settings, self.topic, "earliest"))) == self.end():
            assert time.monotonic() < deadline, "Kafka has not compacted the topic"
            self.send("c")
            time.sleep(0.5)

    def end(self) -> int:
        return kafka.offsets(self.settings, [self.topic], "latest")[self.topic][0]


Homes = Callable[..., Settings]


def transactional(talk: Talk) -> Producer:
    producer = Producer({"bootstrap.servers": talk.settings.brokers, "transactional.id": talk.topic})
    producer.init_transactions(20)
    return producer


def transact(producer: Producer, talk: Talk, names: str, kept: bool) -> None:
    """One transaction with an event of each letter, committed or aborted once all of them are in Kafka."""
    producer.begin_transaction()
    for name in names:
        producer.produce(talk.topic, json.dumps({"name": name, "said_at": NOW.isoformat()}).encode(), name.encode())
    producer.flush(20)
    producer.commit_transaction(20) if kept else producer.abort_transaction(20)


def test_transactions_leave_gaps_that_the_ledger_explains_and_aborted_records_out(
    house: Homes, run: Any, spark: SparkSession
) -> None:
    talk = Talk(house(), "talk_in_transactions", partitions=1, transactional=True)
    producer = transactional(talk)
    for kept, names in ((True, "abc"), (False, "xyz"), (True, "de")):
        transact(producer, talk, names, kept)
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == list("abcde") and talk.whole())

    # A batch with nothing in it but an aborted transaction has its offsets in the ledger too.
    transact(producer, talk, "x", kept=False)
    stream.until(talk.whole)
    stream.drains()
    [(records, rejects, gaps, offsets, why)] = talk.ledger(
        "sum(records), sum(rejects), sum(gaps), sum(until_offset - from_offset), string_agg(DISTINCT gap)"
    )
    assert (records, rejects, gaps, offsets) == (5, 0, 8, 13)
    assert why == "transaction markers and aborted records"
    assert talk.replayed(spark) == 5


@pytest.mark.parametrize("point", ["between", "done"])
def test_stream_that_was_killed_in_a_batch_goes_on_though_a_day_of_it_has_expired_since(
    house: Homes, run: Any, spark: SparkSession, point: str
) -> None:
    talk = Talk(house(), f"talk_that_expires_{point}", partitions=1, keep="2 days")
    checkpoint = lake.Checkpoint.of(talk.settings, "main")
    talk.send("a", ago=timedelta(days=4))
    talk.send("b")
    run(talk.settings, talk.arguments, failpoint=point).dies()
    lake.expire_all(talk.settings, talk.catalog)
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.whole() and checkpoint.newest("commits") == checkpoint.newest("offsets"))
    stream.drains()
    assert talk.ledger("sum(records), sum(gaps)") == [(2, 0)] and talk.counted(spark) == 2
    lake.expire_all(talk.settings, talk.catalog)
    assert talk.names() == ["b"]


@pytest.mark.long
def test_of_a_batch_that_was_killed_behind_the_log_the_log_is_what_counts(house: Homes, run: Any, spark: Any) -> None:
    """By then the schema is mended; of a compacted topic Kafka may have less by then."""
    talk = Talk(house(), "talk_judged_once", partitions=1)
    talk.send("a", "b", "a name that is too long")
    run(talk.settings, talk.arguments | {"largest_event": 60}, failpoint="between").dies()
    assert talk.rows("SELECT name, reject FROM LOG WHERE reject IS NOT NULL") == [(None, "larger than 60 bytes")]
    stream = run(talk.settings, talk.arguments)
    stream.until(talk.whole)
    talk.send("c")
    stream.until(lambda: len(talk.names()) == 4 and talk.whole())
    stream.drains()
    assert talk.ledger("sum(records), sum(rejects)") == [(4, 1)]
    minutes = talk.catalog.rollups["minutes"]
    rows = fold.merge(minutes, lake.read(spark, lake.table(talk.settings, minutes)))
    assert [r["n"] for r in rows.select(how_many("seen").alias("n")).collect()] == [3]


@pytest.mark.long
def test_undeclared_transactions_stop_the_stream_with_the_word_to_write(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_undeclared", partitions=1)
    transact(transactional(talk), talk, "a", kept=True)
    stream = run(talk.settings, talk.arguments)
    stream.ends(1)
    assert "offsets 0 to 2 hold 1 records, not 2." in stream.said and "Topic(…, transactional=True)" in stream.said
    stream = run(talk.settings, talk.arguments | {"transactional": True})  # and with the word it goes on, losing nothing
    stream.until(lambda: talk.names() == ["a"] and talk.whole())
    stream.drains()


def test_partitions_added_to_a_live_topic_are_read_from_their_first_offset(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_that_grows", partitions=1)
    talk.send("a", "b")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a", "b"])
    wider = declared(talk.topic, partitions=4)[talk.topic]
    assert [c.what for c in kafka.apply(talk.settings, [wider])] == ["partitions"]  # type: ignore[list-item]
    talk.send(*(f"n{n}" for n in range(40)))
    stream.until(lambda: len(talk.names()) == 42 and talk.whole())
    assert {p for (p,) in talk.rows("SELECT DISTINCT kafka.partition FROM LOG")} == {0, 1, 2, 3}
    stream.drains()


@pytest.mark.parametrize("checkpoint", ["whole", pytest.param("damaged", marks=pytest.mark.long)])
def test_records_deleted_before_they_were_read_stop_the_stream_until_the_loss_is_accepted(
    checkpoint: str, house: Homes, run: Any
) -> None:
    talk = Talk(house(), f"talk_that_is_lost_{checkpoint}", partitions=1)
    talk.send("a", "b")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a", "b"])
    with stream.paused():
        talk.send("lost 1", "lost 2", "c")
        talk.delete({0: 4})
    stream.ends(1)
    lost = rf"topic {talk.topic}, partition 0, offsets 2 to 3\. .* tidemark speed --stream main --accept-loss"
    with pytest.raises(speed.SpeedError, match=lost):
        speed.run(talk.settings, talk.catalog)
    assert "offsets 2 to 3" in stream.said
    with pytest.raises(speed.SpeedError, match=f"{lost} --recover;"):
        speed.run(talk.settings, talk.catalog, recover=True)  # recovering is not accepting

    recover = checkpoint == "damaged"
    if recover:  # either word without the other asks for that one
        for plan in (lake.Checkpoint.of(talk.settings, "main").path / "offsets").glob("[0-9]*"):
            plan.write_bytes(b"")
        with pytest.raises(speed.SpeedError, match=r"is damaged .* --recover"):
            speed.run(talk.settings, talk.catalog, accept_loss=True)
    stream = run(talk.settings, talk.arguments, recover=recover, accept_loss=True)
    stream.until(lambda: talk.names() == ["a", "b", "c"] and talk.whole())
    talk.send("d")
    stream.until(lambda: talk.names() == ["a", "b", "c", "d"] and talk.whole())
    stream.drains()
    [(start, until, why)] = [r for r in talk.ledger("from_offset, until_offset, gap") if r[2]]
    assert (start, until) == (2, 4) and why.startswith("lost: deleted by Kafka before it was read")
    assert {g for (g,) in talk.ledger("generation")} == {1, 2}


@pytest.mark.long
def test_partition_added_between_a_new_generation_and_its_first_batch_is_read(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_that_grows_early", partitions=1)
    checkpoint = lake.Checkpoint.of(talk.settings, "main").path
    checkpoint.mkdir(parents=True)
    killed = lake.Generation(1, 0, {talk.topic: {"0": 0}}, kafka.topic_ids(talk.settings, [talk.topic]))
    (checkpoint / "tidemark.json").write_text(json.dumps(asdict(killed)))
    kafka.apply(talk.settings, [declared(talk.topic, partitions=2)[talk.topic]])  # type: ignore[list-item]
    talk.send(*(f"n{n}" for n in range(20)))
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: len(talk.names()) == 20 and talk.whole())
    stream.drains()


@pytest.mark.long
def test_a_loss_that_is_accepted_where_nothing_is_lost_changes_nothing(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_that_is_whole", partitions=1)
    for word, accept_loss in (("a", False), ("b", True)):
        talk.send(word)
        stream = run(talk.settings, talk.arguments, accept_loss=accept_loss)
        stream.until(lambda: talk.whole())
        stream.drains()
    assert talk.names() == ["a", "b"] and {r[1] for r in talk.ledger("gap, generation")} == {1}


@pytest.mark.long
def test_topic_that_is_added_is_read_from_the_first_offset_that_kafka_still_holds(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_first", partitions=1)
    talk.send("a")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a"])
    stream.drains()

    added = Talk(talk.settings, "talk_added", partitions=1)
    added.send("gone 1", "gone 2", "c")
    added.delete({0: 2})
    talk.send("b")
    stream = run(talk.settings, talk.arguments | {"beside": added.topic})
    stream.until(lambda: (talk.names(), added.names()) == (["a", "b"], ["c"]) and talk.whole())
    added.send("d")
    stream.until(lambda: added.names() == ["c", "d"] and local.status(talk.settings)["progress"]["lag"] == 0)
    stream.drains()
    assert sorted(added.ledger("from_offset, until_offset, records")) == [(2, 3, 1), (3, 4, 1)]
    assert talk.whole()


@pytest.mark.long
@pytest.mark.parametrize("reader", ["main", "second"], ids=["by its stream", "by who takes the topic over"])
def test_first_records_of_an_added_partition_are_lost_where_kafka_deleted_them_before_they_were_read(
    reader: str, house: Homes, run: Any
) -> None:
    talk = Talk(house(), f"talk_that_grows_late_{reader}", partitions=1)
    talk.send("a")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a"])
    stream.drains()

    kafka.apply(talk.settings, [declared(talk.topic, partitions=2)[talk.topic]])  # type: ignore[list-item]
    talk.send(*(f"n{n}" for n in range(20)))
    talk.delete({1: 2})
    with pytest.raises(speed.SpeedError, match=rf"topic {talk.topic}, partition 1, offsets 0 to 1\. .* --accept-loss"):
        speed.run(talk.settings, talk.catalog, reader, only=[talk.topic])
    stream = run(talk.settings, talk.arguments, stream=reader, only=[talk.topic], accept_loss=True)
    stream.until(lambda: len(talk.names()) == 21 - 2 and talk.whole())
    stream.drains()
    assert [r[:3] for r in talk.ledger('"partition", from_offset, until_offset, gap') if r[3]] == [(1, 0, 2)]


@pytest.mark.parametrize("events", ["xy", pytest.param("uvwxyz", marks=pytest.mark.long)], ids=["shorter", "longer"])
def test_topic_created_again_under_a_running_stream_stops_it_before_anything_of_it_is_entered(
    events: str, house: Homes, run: Any
) -> None:
    talk = Talk(house(), f"talk_created_again_{len(events)}", partitions=1)
    talk.send("a", "b", "c")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a", "b", "c"] and talk.whole())
    with stream.paused():
        talk.admin.delete_topics([talk.topic])[talk.topic].result()
        kafka.apply(talk.settings, talk.catalog.topics.values())
        talk.send(*events)
    stream.ends(1)
    assert f"topic {talk.topic} was deleted and created again" in stream.said and "Give the new topic and what is" in stream.said

    shutil.rmtree(talk.settings.checkpoints)  # the log knows whose records it holds, were all else lost
    with pytest.raises(speed.SpeedError, match=f"topic {talk.topic} was deleted and created again, or this is another Kafka"):
        speed.run(talk.settings, talk.catalog, recover=True)
    if len(events) == 2:  # as where an old copy of Kafka is put back: the same topic, with less in it
        log = lake.table(talk.settings, talk.catalog[talk.topic])
        new = kafka.topic_ids(talk.settings, [talk.topic])[talk.topic]
        log.delta().alter.set_table_properties({lake.TOPIC_ID: new}, raise_if_not_exists=False)
        with pytest.raises(
            speed.SpeedError, match="partition 0, ends at offset 2, and the stream has read it up to 3: Kafka has"
        ):
            speed.run(talk.settings, talk.catalog, recover=True)
    assert talk.names() == ["a", "b", "c"]
    assert talk.ledger("from_offset, until_offset") == [(0, 3)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["second", "main"], ids=["another stream", "the same one, which had left it"])
def test_topic_created_again_is_refused_by_who_takes_it_over(name: str, house: Homes, run: Any) -> None:
    talk = Talk(house(), f"talk_taken_by_{name}", partitions=1, beside=f"talk_beside_{name}")
    talk.send("a", "b", "c")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a", "b", "c"] and talk.whole())
    stream.drains()
    if name == "main":
        stream = run(talk.settings, talk.arguments, only=[f"talk_beside_{name}"])
        stream.until(lambda: local.status(talk.settings)["heartbeat"]["state"] == "running")
        stream.drains()
    talk.admin.delete_topics([talk.topic])[talk.topic].result()
    kafka.apply(talk.settings, talk.catalog.topics.values())
    talk.send(*"uvwxyz")  # its first three would be taken for those that were read
    stream = run(talk.settings, talk.arguments, stream=name, only=[talk.topic])
    stream.ends(1)
    assert f"topic {talk.topic} was deleted and created again" in stream.said
    assert talk.names() == ["a", "b", "c"]


@pytest.mark.long
def test_topic_deleted_under_a_running_stream_stops_it_by_name(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_deleted", partitions=1)
    talk.send("a", "b", "c")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: talk.names() == ["a", "b", "c"] and talk.whole())
    talk.admin.delete_topics([talk.topic])[talk.topic].result()
    stream.ends(1)
    assert stream.said.splitlines()[-1].endswith(
        f"Kafka has no topic {talk.topic}; `tidemark topics apply` creates those that pipelines declare"
    )


@pytest.mark.long
def test_plain_lines_count_by_partition_and_offset_and_a_repeat_counts_again(house: Homes, run: Any, spark: SparkSession) -> None:
    talk = Talk(house(), "talk_in_lines", format="text")
    lines = [b"to be", b"", b"or not", b"to be", b'{"not": "parsed"}', "être".encode(), b"\xff\xfe"]
    assert kafka.produce(talk.settings, talk.catalog[talk.topic], lines).complete  # type: ignore[arg-type]
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: sum(n for (n,) in talk.ledger("records")) == 7)
    found = talk.rows("SELECT line, reject FROM LOG ORDER BY ALL")
    assert found == sorted(
        [*((line.decode(), None) for line in lines[:-1]), (None, "not UTF-8")], key=lambda r: (r[0] is None, r[0])
    )
    stream.drains()
    assert (talk.counted(spark), talk.replayed(spark)) == (6, 6)


@pytest.mark.long
def test_counted_by_offset_is_every_record(house: Homes, run: Any, spark: SparkSession) -> None:
    talk = Talk(house(), "talk_twice")
    talk.send("a", "a", "b")
    stream = run(talk.settings, talk.arguments)
    stream.until(lambda: sum(n for (n,) in talk.ledger("records")) == 3)
    stream.drains()
    assert (talk.counted(spark), talk.replayed(spark)) == (3, 3)


@pytest.mark.long
def test_compacted_offsets_are_gaps_that_the_ledger_explains(house: Homes, run: Any) -> None:
    talk = Talk(house(), "talk_compacted", partitions=1, compacted=True)
    talk.send(*"ababab")
    talk.compacted()
    stream = run(talk.settings, talk.arguments)
    stream.until(talk.whole)
    stream.drains()
    [(records, gaps, why)] = talk.ledger("sum(records), sum(gaps), string_agg(DISTINCT gap)")
    assert records + gaps == talk.end()
    assert gaps > 0 and why == "compacted away"


@pytest.mark.long
def test_of_a_batch_that_was_killed_behind_the_log_no_record_is_a_gap_that_kafka_has_compacted_since(
    house: Homes, run: Any, spark: SparkSession
) -> None:
    talk = Talk(house(), "talk_compacted_since", partitions=1, compacted=True)
    talk.send(*"abab")
    run(talk.settings, talk.arguments, failpoint="between").dies()
    talk.compacted()
    stream = run(talk.settings, talk.arguments)
    stream.until(talk.whole)
    stream.drains()
    assert min(talk.ledger("from_offset, until_offset, records, gaps")) == (0, 4, 4, 0)
    assert talk.counted(spark) == len(talk.names())
