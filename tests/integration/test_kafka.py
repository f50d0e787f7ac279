"""kafka.py on a real broker: topics as code, delivery, keys, offsets, reading; and the samples that feed it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise, repeat
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType

from tidemark import kafka, local
from tidemark.kafka import BrokerAway, Change, TopicMissing, TopicRefused
from tidemark.model import Topic
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def visits(name: str, **changes: Any) -> Topic:
    schema = "id STRING NOT NULL, visitor STRING NOT NULL, at TIMESTAMP NOT NULL"
    return Topic(name, **{"key": "visitor", "partitions": 3, "schema": schema, "event_time": "at", "sample": visit} | changes)


def visit(random: Random, at: datetime) -> dict[str, str]:
    instant = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"id": f"{random.getrandbits(64):016x}", "visitor": f"v{random.randrange(500)}", "at": instant}


def held(broker: Settings, name: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, name)
    admin = AdminClient(kafka.client_config(broker))
    options = admin.describe_configs([resource])[resource].result()
    return {n: e.value for n, e in options.items()}


# ---- topics as code


def test_new_topic_is_created_as_the_code_says_and_a_second_apply_does_nothing(broker: Settings, topic_name: str) -> None:
    topic = visits(
        topic_name, retention="3 days", retention_bytes=10**9, segment="1 hour", segment_bytes=2**20, max_message_bytes=2**21
    )
    assert kafka.apply(broker, [topic]) == [Change(topic_name, "created", None, "3 partitions, replication factor 1")]
    options = held(broker, topic_name)
    assert {n: options[n] for n in kafka.wanted(topic)} == {
        "cleanup.policy": "delete",
        "retention.ms": "259200000",
        "retention.bytes": "1000000000",
        "segment.ms": "3600000",
        "segment.bytes": "1048576",
        "min.insync.replicas": "1",
        "unclean.leader.election.enable": "false",
        "max.message.bytes": "2097152",
        "message.timestamp.type": "LogAppendTime",
    }
    assert kafka.apply(broker, [topic]) == []


def test_changed_topic_is_altered_and_grows(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    assert kafka.apply(broker, [visits(topic_name, partitions=5, retention="1 day", compacted=True)]) == [
        Change(topic_name, "partitions", "3", "5"),
        Change(topic_name, "min.compaction.lag.ms", "0", "86400000"),  # a stream that is away for a day sees each deletion
        Change(topic_name, "cleanup.policy", "delete", "compact"),
        Change(topic_name, "retention.ms", "604800000", "86400000"),
    ]
    assert list(kafka.offsets(broker, [topic_name], "latest")[topic_name]) == [0, 1, 2, 3, 4]
    assert held(broker, topic_name)["cleanup.policy"] == "compact"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"partitions": 2}, r"the code says 2 partitions, Kafka has 3 and cannot take any away; write partitions=3"),
        ({"replication": 2}, r"the code says replication factor 2, Kafka has 1 and changes it only by moving replicas"),
        ({"min_insync": 2}, r"min_insync is 2 but the replication factor is 1, so nothing could be written"),
    ],
)
def test_refused_topic_is_left_as_it_was(change: dict[str, int], sentence: str, broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    with pytest.raises(TopicRefused, match=f"topic {topic_name}: {sentence}"):
        kafka.apply(broker, [visits(topic_name, retention="1 day", **change), visits(f"{topic_name}_new")])
    assert held(broker, topic_name)["retention.ms"] == "604800000"
    with pytest.raises(TopicMissing):
        kafka.topic_ids(broker, [f"{topic_name}_new"])


def test_new_topic_with_more_replicas_than_brokers_is_refused(broker: Settings, topic_name: str) -> None:
    with pytest.raises(TopicRefused, match=r"the code says replication factor 3, Kafka has 1 broker\(s\)"):
        kafka.apply(broker, [visits(topic_name, replication=3)])


def test_listing_shows_what_kafka_holds_and_where_the_code_differs(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    kafka.produce(broker, visits(topic_name), [b"1", b"2", b"3", b"4"])
    assert kafka.listing(broker, [visits(topic_name), visits(topic_name, retention="1 day"), visits(f"{topic_name}_not")]) == [
        kafka.Listing(topic_name, 3, 1, "7 days", "delete", 4, ()),
        kafka.Listing(topic_name, 3, 1, "7 days", "delete", 4, ("retention.ms is 604800000, code says 86400000",)),
        kafka.Listing(f"{topic_name}_not", 0, 0, "", "", 0, ("not created",)),
    ]


def test_recreated_topic_has_another_id(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    first = kafka.topic_ids(broker, [topic_name])
    assert kafka.topic_ids(broker, [topic_name]) == first
    admin = AdminClient(kafka.client_config(broker))
    admin.delete_topics([topic_name])[topic_name].result()
    until(lambda: kafka.listing(broker, [visits(topic_name)])[0].partitions == 0)
    kafka.apply(broker, [visits(topic_name)])
    assert kafka.topic_ids(broker, [topic_name]) != first


def test_a_topic_that_is_deleted_while_it_is_listed_is_listed_as_not_created(
    broker: Settings, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.apply(broker, [visits(topic_name)])
    admin, asked = AdminClient(kafka.client_config(broker)), kafka.offsets

    def offsets(*args: Any) -> Any:
        monkeypatch.setattr(kafka, "offsets", asked)
        admin.delete_topics([topic_name])[topic_name].result()
        until(lambda: not kafka.topic_ids_held(broker, [topic_name]))
        return asked(*args)

    monkeypatch.setattr(kafka, "offsets", offsets)
    assert kafka.listing(broker, [visits(topic_name)]) == [kafka.Listing(topic_name, 0, 0, "", "", 0, ("not created",))]


def test_missing_topic_names_the_command_that_creates_it(broker: Settings, topic_name: str) -> None:
    sentence = f"Kafka has no topic {topic_name}; `tidemark topics apply` creates those that pipelines declare"
    for call in (
        lambda: kafka.topic_ids(broker, [topic_name]),
        lambda: kafka.offsets(broker, [topic_name], "latest"),
        lambda: kafka.consume(broker, topic_name, "earliest"),
        lambda: kafka.produce(broker, visits(topic_name), [b"1"]),
    ):
        with pytest.raises(TopicMissing, match=sentence):
            call()


def test_broker_that_stays_away_is_a_sentence_that_names_its_address(settings: Settings) -> None:
    with pytest.raises(
        BrokerAway, match=rf"no Kafka broker answers at {settings.brokers} \(waited 0.3 seconds\); start one with"
    ):
        kafka.wait(settings, 0.3)


# ---- producing


def test_events_arrive_byte_for_byte_with_the_key_of_their_column(broker: Settings, topic_name: str) -> None:
    topic = visits(topic_name, partitions=1)
    kafka.apply(broker, [topic])
    sent = [
        ({"visitor": "zoë", "id": "1"}, '{"visitor":"zoë","id":"1"}'.encode(), "zoë".encode()),
        (b'{ "visitor": "v1" }', b'{ "visitor": "v1" }', b"v1"),
        (b'{"visitor": 7}', b'{"visitor": 7}', b"7"),
        (b'{"visitor": null}', b'{"visitor": null}', None),
        (b'{"id": "1"}', b'{"id": "1"}', None),
        (b'["visitor"]', b'["visitor"]', None),
        (b"not json \xff\x00", b"not json \xff\x00", None),
        (b"[" * 100_000, b"[" * 100_000, None),
        (b'{"visitor": "\\ud800"}', b'{"visitor": "\\ud800"}', b"\xed\xa0\x80"),
        (b"", b"", None),
    ]
    delivery = kafka.produce(broker, topic, [event for event, _, _ in sent])
    assert (delivery.sent, delivery.delivered, delivery.failed, delivery.complete) == (10, 10, 0, True)
    found = list(kafka.consume(broker, topic_name, "earliest"))
    assert [(r.value, r.key) for r in found] == [(value, key) for _, value, key in sent]
    assert [r.offset for r in found] == list(range(10))
    assert all(abs(r.timestamp - datetime.now(UTC)) < timedelta(minutes=1) for r in found)


def murmur2(data: bytes) -> int:
    """The hash of Java's default partitioner, as a signed 32-bit number."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    for at in range(0, len(data) // 4 * 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = h * m & mask ^ (k ^ k >> 24) * m & mask
    if tail := data[len(data) // 4 * 4 :]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    h ^= h >> 15
    return h - 2**32 if h >= 2**31 else h


def place(key: str, partitions: int = 3) -> int:
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def test_keys_lie_in_the_partition_of_javas_default_partitioner(broker: Settings, topic_name: str) -> None:
    known = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536, "abc": 479470107}  # Kafka's own test
    assert {key: murmur2(key.encode()) for key in known} == known
    topic = visits(topic_name, partitions=7)
    kafka.apply(broker, [topic])
    kafka.produce(broker, topic, [{"visitor": key} for key in [*known, *(f"v{i}" for i in range(200))]])
    found = {r.key: r.partition for r in kafka.consume(broker, topic_name, "earliest") if r.key is not None}
    assert len(found) == 204
    assert found == {key: place(key.decode(), 7) for key in found}


def test_event_larger_than_the_topic_allows_counts_as_failed_and_the_rest_go_on(broker: Settings, topic_name: str) -> None:
    topic = visits(topic_name, max_message_bytes=20_000)
    kafka.apply(broker, [topic])
    delivery = kafka.produce(broker, topic, [b"before", os.urandom(50_000), b"after", b"later"])
    assert (delivery.sent, delivery.delivered, delivery.failed, delivery.complete) == (4, 3, 1, False)
    assert "too large" in delivery.errors[0].lower()
    assert sorted(r.value or b"" for r in kafka.consume(broker, topic_name, "earliest")) == [b"after", b"before", b"later"]


def test_event_that_only_the_broker_finds_too_large_counts_as_failed_and_other_partitions_go_on(
    broker: Settings, topic_name: str
) -> None:
    kafka.apply(broker, [visits(topic_name, max_message_bytes=20_000)])
    here, there = "v0", next(f"v{i}" for i in range(100) if place(f"v{i}") != place("v0"))
    large = {"visitor": there, "id": os.urandom(25_000).hex()}  # a broker refuses whole batches, and a batch is a partition's
    events = [{"visitor": here, "id": "1"}, large, {"visitor": here, "id": "2"}]
    delivery = kafka.produce(broker, visits(topic_name, max_message_bytes=2_000_000), events)
    assert (delivery.sent, delivery.delivered, delivery.failed, delivery.complete) == (3, 2, 1, False)
    assert "too large" in delivery.errors[0].lower()
    assert [r.key for r in kafka.consume(broker, topic_name, "earliest")] == [b"v0", b"v0"]


def test_event_of_fifteen_mebibytes_that_does_not_compress_passes(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    event = os.urandom(15 * 2**20)
    assert kafka.produce(broker, visits(topic_name), [event]).complete
    assert [r.value == event for r in kafka.consume(broker, topic_name, "earliest")] == [True]


def test_more_events_than_the_queue_holds_are_all_delivered(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    seen: list[int] = []
    delivery = kafka.produce(
        broker, visits(topic_name), (b"%d" % i for i in range(150_000)), progress=lambda d: seen.append(d.delivered)
    )
    assert (delivery.sent, delivery.delivered) == (150_000, 150_000)
    assert seen == sorted(seen)
    assert seen[-1] == 150_000
    assert sum(kafka.offsets(broker, [topic_name], "latest")[topic_name].values()) == 150_000


def test_events_are_taken_at_the_rate(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    taken: list[float] = []
    events = (taken.append(time.monotonic()) or b"1" for _ in range(101))
    assert kafka.produce(broker, visits(topic_name), events, rate=200).complete
    assert 0.45 < taken[-1] - taken[0] < 30


def test_events_are_taken_in_bursts_at_the_rate(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    taken: list[float] = []
    events = (taken.append(time.monotonic()) or b"1" for _ in range(41))
    assert kafka.produce(broker, visits(topic_name), events, rate=40, burst=0.5).complete
    pauses = sorted(later - one for one, later in pairwise(taken))
    assert 0.7 < taken[-1] - taken[0] < 30
    assert pauses[-2] > 0.1, "the first comes at once, then two bursts"
    assert pauses[len(pauses) // 2] < 0.0125, "one by one they come every 25 ms; slow cores part some of a burst, not most"


def test_broker_that_is_away_is_waited_for(
    jars: Path, settings: Settings, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    local.start_broker(settings)
    kafka.apply(settings, [visits(topic_name)])
    local.stop_broker(settings)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(kafka.produce, settings, visits(topic_name), [b"1", b"2", b"3"])
        until(lambda: "no broker answers; waiting for it" in capsys.readouterr().out)
        local.start_broker(settings)
        delivery = future.result(timeout=60)
    assert (delivery.sent, delivery.delivered, delivery.failed) == (3, 3, 0)
    assert sorted(r.value or b"" for r in kafka.consume(settings, topic_name, "earliest")) == [b"1", b"2", b"3"]


def test_broker_that_stays_away_longer_than_the_patience_fails_the_events(settings: Settings, topic_name: str) -> None:
    delivery = kafka.produce(settings, visits(topic_name), [b"1", b"2"], patience=0.5)
    assert (delivery.sent, delivery.delivered, delivery.failed) == (2, 0, 2)
    assert delivery.errors == ["Local: Message timed out"]


FOR_EVER = """
import itertools, sys
from tidemark import kafka
from tidemark.model import Topic
from tidemark.settings import Settings
topic = Topic(sys.argv[1], key="k", partitions=3, schema="k STRING NOT NULL", event_time="k")
events = (b"%d" % i for i in itertools.count())
done = kafka.produce(Settings(), topic, events, rate=2000, progress=lambda d: d.interrupted or print("going", flush=True))
print("done", done.sent, done.delivered, done.failed, done.interrupted)
"""


def test_ctrl_c_delivers_what_was_taken(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    environment = os.environ | {"TIDEMARK_BROKERS": broker.brokers}
    command = [sys.executable, "-c", FOR_EVER, topic_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as producer:
        assert producer.stdout
        assert [producer.stdout.readline() for _ in range(3)] == ["going\n"] * 3
        producer.send_signal(signal.SIGINT)
        last = producer.stdout.read().splitlines()[-1]
    arrived = sum(1 for _ in kafka.consume(broker, topic_name, "earliest"))
    assert arrived > 0
    assert last == f"done {arrived} {arrived} 0 True"
    assert producer.returncode == 0


def test_ctrl_c_ends_sending_to_several_topics_between_two_bursts(broker: Settings) -> None:
    topics = ["lines", "activity"]
    kafka.apply(broker, [CATALOG.topics[name] for name in topics])
    command = [sys.executable, "-m", "tidemark", "produce", *topics, "--sample", "--rate", "1", "--burst", "600"]
    environment = os.environ | {"TIDEMARK_BROKERS": broker.brokers}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as producer:
        until(lambda: all(sum(kafka.offsets(broker, [name], "latest")[name].values()) == 1 for name in topics))
        producer.send_signal(signal.SIGTERM)
        try:
            said, _ = producer.communicate(timeout=30)
        finally:
            producer.kill()
    assert said == "lines: 1 delivered, 0 failed\nactivity: 1 delivered, 0 failed\n"
    assert producer.returncode == 130


def test_ctrl_c_ends_the_wait_for_the_next_line(broker: Settings) -> None:
    kafka.apply(broker, [CATALOG.topics["lines"]])
    before = sum(kafka.offsets(broker, ["lines"], "latest")["lines"].values())
    command = [sys.executable, "-m", "tidemark", "produce", "lines", "--file", "/dev/stdin"]
    environment = os.environ | {"TIDEMARK_BROKERS": broker.brokers}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as producer:
        assert producer.stdin and producer.stdout
        producer.stdin.write("one\ntwo\n")
        producer.stdin.flush()
        until(lambda: sum(kafka.offsets(broker, ["lines"], "latest")["lines"].values()) == before + 2)
        producer.send_signal(signal.SIGINT)
        try:
            assert producer.wait(timeout=20) == 130
        finally:
            producer.kill()
        assert producer.stdout.read() == "2 delivered, 0 failed\n"


def test_no_event_is_waited_for_once_ctrl_c_came_between_two() -> None:
    def events() -> Iterator[bytes]:
        yield b"1"
        raise AssertionError("the next one is waited for, and a pipe may never give it")

    pressed = kafka.Interrupts()
    each = pressed.awaited(events())
    assert next(each) == b"1"
    pressed.note(signal.SIGINT, None)
    assert list(each) == []


# ---- offsets and reading


def test_reader_in_no_group_needs_no_right_to_one(broker: Settings, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka.apply(broker, [visits(topic_name, partitions=1)])
    kafka.produce(broker, visits(topic_name, partitions=1), [b"1", b"2"])
    refused = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    first = [SimpleNamespace(error=lambda: refused, partition=lambda: None, offset=lambda: None)]

    class Refused(Consumer):
        """Tells first that who coordinates its group may not be asked."""

        def poll(self, timeout: float = -1) -> Any:
            return first.pop() if first else super().poll(timeout)

    monkeypatch.setattr(kafka, "Consumer", Refused)
    assert [record.value for record in kafka.consume(broker, topic_name, "earliest")] == [b"1", b"2"]
    assert not first


def test_offsets_of_an_instant_are_the_first_at_or_after_it(broker: Settings, topic_name: str) -> None:
    topic = visits(topic_name, partitions=1)
    kafka.apply(broker, [topic])
    kafka.produce(broker, topic, [b"1", b"2"])
    first = next(kafka.consume(broker, topic_name, 1)).timestamp
    until(lambda: datetime.now(UTC) > first + timedelta(milliseconds=20))
    kafka.produce(broker, topic, [b"3"])
    third = next(kafka.consume(broker, topic_name, 2)).timestamp

    def at(instant: Any) -> int:
        return kafka.offsets(broker, [topic_name], instant)[topic_name][0]

    assert (at("earliest"), at("latest")) == (0, 3)
    assert at(first - timedelta(hours=1)) == 0
    assert at(third) == 2
    assert at(first + timedelta(microseconds=1)) == 2
    assert at(third + timedelta(microseconds=1)) == 3
    assert at(datetime(2199, 1, 1, tzinfo=UTC)) == 3


@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.FENCED_LEADER_EPOCH])
def test_offsets_are_asked_again_while_leaders_change(
    broker: Settings, topic_name: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    kafka.apply(broker, [visits(topic_name)])
    answers, asked = kafka.answers, []

    def changing(*request: Any) -> Any:
        asked.append(request)
        if len(asked) == 1:
            raise KafkaException(KafkaError(code))
        return answers(*request)

    monkeypatch.setattr(kafka, "answers", changing)
    admin, place = kafka.connected(broker), TopicPartition(topic_name, 0)
    assert kafka.offsets_at(broker, admin, [place], OffsetSpec.latest()) == {(topic_name, 0): 0}
    assert len(asked) >= 2  # a partition that was just made may have no leader yet for some more


def test_instant_without_a_time_zone_is_refused(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    with pytest.raises(ValueError, match="2026-11-20 00:00:00 has no time zone"):
        kafka.offsets(broker, [topic_name], datetime(2026, 11, 20))


@pytest.mark.parametrize(
    ("start", "limit", "expected"),
    [
        ("earliest", None, [b"0", b"1", b"2", b"3"]),
        ("earliest", 2, [b"0", b"1"]),
        ("earliest", 0, []),
        (2, None, [b"2", b"3"]),
        (99, None, []),
        ("latest", None, []),
        (datetime(2020, 1, 1, tzinfo=UTC), 1, [b"0"]),
        (datetime(2199, 1, 1, tzinfo=UTC), None, []),
    ],
)
def test_consume_from(start: Any, limit: int | None, expected: list[bytes], broker: Settings, topic_name: str) -> None:
    topic = visits(topic_name, partitions=1)
    kafka.apply(broker, [topic])
    kafka.produce(broker, topic, [b"0", b"1", b"2", b"3"])
    assert [r.value for r in kafka.consume(broker, topic_name, start, limit)] == expected


@pytest.mark.parametrize(("sent", "year"), [(1_763_553_600_000_000, 9999), (-(2**63), 1), (0, 1970)])
def test_timestamp_beyond_the_calendar_is_the_calendar_s_end(sent: int, year: int) -> None:
    """A producer that gives it may have written microseconds, which Kafka took by itself before version 4."""
    told = {"partition": 0, "offset": 0, "key": None, "value": b"1", "headers": None, "topic": "orders", "timestamp": (1, sent)}
    message: Any = SimpleNamespace(**{name: lambda value=value: value for name, value in told.items()})
    assert kafka.record(message).timestamp.year == year


def test_records_that_come_after_the_call_are_not_read(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    before, after = ([{"visitor": f"{word} {i}"} for i in range(500)] for word in ("before", "after"))
    kafka.produce(broker, visits(topic_name), before)
    reading = kafka.consume(broker, topic_name, "earliest")
    kafka.produce(broker, visits(topic_name), after)
    assert sorted(r.key or b"" for r in reading) == sorted(f"before {i}".encode() for i in range(500))


@pytest.mark.parametrize(("start", "expected"), [(0, [b"2", b"3"]), (3, [b"3"])])
def test_offset_that_retention_took_moves_to_the_first_held(
    start: int, expected: list[bytes], broker: Settings, topic_name: str
) -> None:
    topic = visits(topic_name, partitions=1)
    kafka.apply(broker, [topic])
    kafka.produce(broker, topic, [b"0", b"1", b"2", b"3"])
    admin = AdminClient(kafka.client_config(broker))
    for future in admin.delete_records([TopicPartition(topic_name, 0, 2)]).values():
        future.result()
    assert kafka.offsets(broker, [topic_name], "earliest") == {topic_name: {0: 2}}
    assert [r.value for r in kafka.consume(broker, topic_name, start)] == expected


def test_following_reads_what_comes_after_the_call(broker: Settings, topic_name: str) -> None:
    kafka.apply(broker, [visits(topic_name)])
    kafka.produce(broker, visits(topic_name), [b"before"])
    following = kafka.consume(broker, topic_name, "latest", limit=2, follow=True)
    kafka.produce(broker, visits(topic_name), [b"after", b"later"])
    assert sorted(r.value or b"" for r in following) == [b"after", b"later"]


def test_reading_ends_after_its_patience_without_an_answer_and_says_how_far_it_came(broker: Settings, topic_name: str) -> None:
    """Two records of three that were promised, and beside them a partition that goes on behind its end."""
    topic, ended = visits(topic_name, partitions=2), threading.Event()
    kafka.apply(broker, [topic])
    first, second = ({"visitor": next(f"v{n}" for n in range(99) if place(f"v{n}", 2) == partition)} for partition in (0, 1))
    kafka.produce(broker, topic, [first, first, second])
    reading = kafka.records(broker, topic_name, {0: 0, 1: 0}, {0: 3, 1: 1}, None, patience=1.0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(kafka.produce, broker, topic, repeat(second), rate=20, interrupts=ended.is_set)
        try:
            assert sorted(next(reading).partition for _ in range(3)) == [0, 0, 1]
            said = rf"at {broker.brokers} any more: 3 records of topic {topic_name} were read \(waited 1 seconds\)"
            with pytest.raises(BrokerAway, match=said):
                next(reading)
        finally:
            ended.set()


def test_reading_waits_for_a_broker_that_comes_back_and_following_for_ever(
    jars: Path, settings: Settings, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    local.start_broker(settings)
    kafka.apply(settings, [visits(topic_name)])
    kafka.produce(settings, visits(topic_name), [b"1", b"2", b"3"])
    reading = [kafka.consume(settings, topic_name, "earliest", patience=60)]
    reading += [kafka.consume(settings, topic_name, "earliest", limit=3, follow=True, patience=0.5)]
    away = kafka.consume(settings, topic_name, "earliest", patience=0.5)
    local.stop_broker(settings)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(list, one) for one in reading]
        with pytest.raises(BrokerAway, match=f"at {settings.brokers} any more: 0 records of topic {topic_name} were read"):
            list(away)
        until(lambda: "no broker answers; waiting for it" in capsys.readouterr().out)
        local.start_broker(settings)
        assert [sorted(r.value or b"" for r in one.result(timeout=60)) for one in found] == [[b"1", b"2", b"3"]] * 2


def test_consuming_leaves_no_consumer_group_behind(broker: Settings, topic_name: str) -> None:
    admin = AdminClient(kafka.client_config(broker))

    def groups() -> set[str]:
        return {group.group_id for group in admin.list_consumer_groups().result().valid}

    kafka.apply(broker, [visits(topic_name)])
    kafka.produce(broker, visits(topic_name), [b"1"])
    before = groups()  # streams of other tests on this broker have told it how far they are
    assert len(list(kafka.consume(broker, topic_name, "earliest"))) == 1
    assert groups() == before


# ---- what is produced


def test_file_gives_its_lines_without_the_empty_ones(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"a": 1}\r\n\n   \n{"b": "\xc3\xab"}\nnot json\n{"last": "no newline"}')
    assert list(kafka.from_file(visits("any"), file)) == [
        b'{"a": 1}',
        b'{"b": "\xc3\xab"}',
        b"not json",
        b'{"last": "no newline"}',
    ]


def test_missing_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no file {tmp_path / 'none.jsonl'}"):
        kafka.from_file(visits("any"), tmp_path / "none.jsonl")


def read(events: list[bytes]) -> list[dict[str, str]]:
    """The events that are JSON objects with every column, as the strict reader of the platform would take them."""
    found = []
    for event in events:
        try:
            value = json.loads(event.decode())
        except ValueError:
            continue
        if isinstance(value, dict) and all(isinstance(value.get(n), str) for n in ("id", "visitor", "at")):
            found.append(value)
    return found


@pytest.mark.parametrize(
    ("zone", "day", "hours", "start"),
    [
        ("UTC", date(2026, 11, 19), 24, datetime(2026, 11, 19, 0, tzinfo=UTC)),
        ("Europe/Berlin", date(2026, 3, 29), 23, datetime(2026, 3, 28, 23, tzinfo=UTC)),
        ("Europe/Berlin", date(2026, 10, 25), 25, datetime(2026, 10, 24, 22, tzinfo=UTC)),
    ],
)
def test_sampled_day_has_every_hour_and_nothing_outside(zone: str, day: date, hours: int, start: datetime) -> None:
    for seed in range(50):
        events = list(kafka.sample(visits("visits"), seed=seed, count=hours, day=day, zone=ZoneInfo(zone)))
        assert len(events) == hours
        assert {(datetime.fromisoformat(e["at"]) - start) // timedelta(hours=1) for e in read(events)} == set(range(hours))


def test_sampled_day_is_busier_by_day_than_by_night() -> None:
    events = read(list(kafka.sample(visits("visits"), seed=1, count=5000, day=date(2026, 11, 19), zone=ZoneInfo("Asia/Tokyo"))))
    local_hours = [datetime.fromisoformat(e["at"]).astimezone(ZoneInfo("Asia/Tokyo")).hour for e in events]
    assert sum(12 <= h < 18 for h in local_hours) > 3 * sum(h < 6 for h in local_hours)


def test_sampled_day_has_its_shares_of_late_repeated_and_malformed_events() -> None:
    count = 20_000
    events = list(kafka.sample(visits("visits"), seed=1, count=count, day=date(2026, 11, 19), zone=ZoneInfo("UTC")))
    good = read(events)
    assert len(events) == count
    assert 0.003 < 1 - len(good) / count < 0.007
    assert 0.008 < 1 - len({e["id"] for e in good}) / len(good) < 0.012
    assert len({e["id"] for e in good}) == len({tuple(e.values()) for e in good})
    late = sum(later["at"] < earlier["at"] for earlier, later in pairwise(good))
    assert 0.03 < late / count < 0.07


def test_same_seed_and_day_give_the_same_bytes_and_another_seed_other_ids() -> None:
    def day(seed: int, of: date) -> list[bytes]:
        return list(kafka.sample(visits("visits"), seed=seed, count=300, day=of, zone=ZoneInfo("UTC")))

    first = day(1, date(2026, 11, 19))
    assert day(1, date(2026, 11, 19)) == first
    for other in (day(2, date(2026, 11, 19)), day(1, date(2026, 11, 18))):
        assert not {e["id"] for e in read(first)} & {e["id"] for e in read(other)}


def test_live_sample_happens_now_and_its_ids_never_come_again() -> None:
    begun = datetime.now(UTC) - timedelta(milliseconds=1)
    first, second = (read(list(kafka.sample(visits("visits"), seed=1, count=2000, zone=ZoneInfo("UTC")))) for _ in range(2))
    ages = [begun - datetime.fromisoformat(e["at"]) for e in first]
    late = [age for age in ages if age > timedelta()]
    assert 0.03 < len(late) / 2000 < 0.07
    assert max(late) <= timedelta(minutes=1)
    assert not {e["id"] for e in first} & {e["id"] for e in second}


def test_topic_without_a_sample_says_so_at_once() -> None:
    with pytest.raises(ValueError, match="topic visits has no sample; declare sample=, or give a file with --file"):
        kafka.sample(visits("visits", sample=None), seed=1, count=10, day=date(2026, 11, 19), zone=ZoneInfo("UTC"))


def test_a_tombstone_is_a_key_without_a_value_and_says_when(broker: Settings, topic_name: str) -> None:
    topic = visits(topic_name, partitions=3, compacted=True)
    kafka.apply(broker, [topic])
    noon = datetime(2026, 11, 19, 12, tzinfo=UTC)
    sent = [visit(Random(1), noon) | {"visitor": "v0"}, kafka.Event(None, b"v0", at=noon), kafka.Event(None, b"v0")]
    assert kafka.produce(broker, topic, sent).complete
    found = list(kafka.consume(broker, topic_name, "earliest"))
    assert [(r.key, r.value is None, r.headers) for r in found] == [
        (b"v0", False, ()),
        (b"v0", True, (("event_time", b"2026-11-19T12:00:00+00:00"),)),
        (b"v0", True, ()),
    ]
    assert len({r.partition for r in found}) == 1
