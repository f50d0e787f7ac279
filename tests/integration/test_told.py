"""What is told beside the batches, to a real broker: the lag where no batch says it, and the offsets to a consumer group."""

from collections.abc import Iterator

import pytest
import structlog
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from tidemark import kafka, metrics
from tidemark.metrics import Metrics
from tidemark.model import Topic
from tidemark.settings import Settings


@pytest.fixture
def topic(broker: Settings, topic_name: str) -> Topic:
    made = Topic(topic_name, key="id", partitions=2, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL", event_time="at")
    kafka.apply(broker, [made])
    return made


@pytest.fixture
def told(broker: Settings, topic_name: str) -> Metrics:
    return Metrics(broker, topic_name, [topic_name])


def committed(broker: Settings, told: Metrics, topic: Topic) -> dict[int, int]:
    """What the group has committed, by partition; -1001 where nothing."""
    asked = [ConsumerGroupTopicPartitions(told.group, [TopicPartition(topic.name, p) for p in (0, 1)])]
    admin = AdminClient({"bootstrap.servers": broker.brokers})
    [answer] = admin.list_consumer_group_offsets(asked).values()
    return {place.partition: place.offset for place in answer.result().topic_partitions}


@pytest.fixture
def member(broker: Settings, told: Metrics, topic: Topic) -> Iterator[Consumer]:
    """Somebody who reads as a member of the stream's group: Kafka then takes no offsets from outside it."""
    consumer = Consumer({"bootstrap.servers": broker.brokers, "group.id": told.group, "enable.auto.commit": False})
    consumer.subscribe([topic.name])
    for _ in range(100):
        consumer.poll(0.1)
        if consumer.assignment():
            break
    yield consumer
    consumer.close()


def test_lag_is_looked_up_where_no_batch_says_it(broker: Settings, told: Metrics, topic: Topic) -> None:
    assert kafka.produce(broker, topic, [f'{{"id": "{n}", "at": 0}}'.encode() for n in range(9)]).complete
    ends = kafka.offsets(broker, [topic.name], "latest")[topic.name]
    told.look([topic.name], {(topic.name, 0): ends[0]})
    lag = {p: told.of(metrics.LAG, topic.name, p)._value.get() for p in (0, 1)}
    assert lag == {0: 0, 1: ends[1]} and ends[1] > 0


def test_offsets_are_told_and_the_newest_count(broker: Settings, told: Metrics, topic: Topic) -> None:
    told.tell({})
    assert committed(broker, told, topic) == {0: -1001, 1: -1001}
    told.tell({(topic.name, 0): 3, (topic.name, 1): 0})
    assert committed(broker, told, topic) == {0: 3, 1: 0}
    told.tell({(topic.name, 0): 5, (topic.name, 1): 4})
    assert committed(broker, told, topic) == {0: 5, 1: 4}


def test_group_that_takes_no_offsets_is_a_warning_said_once(
    broker: Settings, told: Metrics, topic: Topic, member: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PAUSE", 0.0)  # it is tried again each time
    with structlog.testing.capture_logs() as said:
        told.tell({(topic.name, 0): 3})
        told.tell({(topic.name, 0): 4})
    [warning] = said
    assert (warning["log_level"], warning["group"]) == ("warning", told.group)
    assert committed(broker, told, topic) == {0: -1001, 1: -1001}
    member.close()
    told.tell({(topic.name, 0): 5})
    assert committed(broker, told, topic)[0] == 5


def test_broker_that_is_away_costs_a_warning(settings: Settings) -> None:
    told = Metrics(settings, "main", ["main"])
    with structlog.testing.capture_logs() as said:
        told.look(["nothing"], {}, seconds=0.2)  # the stream itself says that it waits
        told.tell({("nothing", 0): 1}, seconds=0.2)
        told.tell({("nothing", 0): 2}, seconds=0.2)  # left alone for a minute
    [warning] = said
    assert "no Kafka broker answers" in warning["because"]
