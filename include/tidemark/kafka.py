"""Kafka: topics as code, producing and sampling events, reading records, consumer groups. No other module knows its client."""

from __future__ import annotations

import heapq
import json
import math
import re
import signal
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast
from zoneinfo import ZoneInfo

import structlog
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)
from tenacity import retry, retry_if_exception, stop_after_attempt, stop_after_delay, wait_fixed

from tidemark.model import EVENT_TIME, UNITS, Topic, duration
from tidemark.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger()

PATIENCE = 120.0
"""Seconds that a record is tried again before it counts as failed, and that a reading waits for a broker that went away."""
ANSWER = 15.0
"""Seconds that an administrative request may take."""
ERRORS_KEPT = 5
AWAY = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._RESOLVE,
    KafkaError.REQUEST_TIMED_OUT,
}
UNSETTLED = {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}


class BrokerAway(ConnectionError):
    """No broker answers; the sentence names the address."""


class BrokerRefused(ConnectionError):
    """Kafka is there and does not take us, or we do not take its certificate; waiting would not help.

    The sentence says why and which setting to look at; it holds no secret.
    """


class TopicMissing(LookupError):
    """Kafka does not hold a topic, or a partition of it; the sentence says what follows."""


class TopicRefused(ValueError):
    """Kafka cannot do what a topic's code asks for; the sentence says what it can."""


class GroupBusy(RuntimeError):
    """A consumer group has members, so Kafka takes its offsets from them alone."""


PRODUCER: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "retries": 2147483647,
    "max.in.flight.requests.per.connection": 5,
    "partitioner": "murmur2_random",
    "compression.type": "zstd",
    "linger.ms": 50,
    "batch.size": 1_000_000,
    "queue.buffering.max.kbytes": 64 * 1024,
}
"""How every producer of the platform is set, by librdkafka's own names; docs/kafka.md has each one's reason.

`delivery.timeout.ms` and `message.max.bytes` are beside them, as a call and its topic say.
"""
CONSUMER: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "partition.assignment.strategy": "cooperative-sticky",
    "isolation.level": "read_committed",
    "fetch.min.bytes": 1,
    "fetch.wait.max.ms": 500,
    "max.partition.fetch.bytes": 1024 * 1024,
    "fetch.max.bytes": 50 * 1024 * 1024,
    "queued.max.messages.kbytes": 16 * 1024,
    "session.timeout.ms": 15_000,
    "heartbeat.interval.ms": 3_000,
    "max.poll.interval.ms": 300_000,
}
"""How every member of a consumer group is set, likewise."""


def client_config(settings: Settings) -> dict[str, Any]:
    """What every librdkafka client of the platform starts from: the brokers, how to speak to them, quick reconnects."""
    config: dict[str, Any] = {
        "bootstrap.servers": settings.brokers,
        "client.id": "tidemark",
        "log_level": 2,  # librdkafka writes to the terminal itself; what matters arrives by callbacks and errors
        "reconnect.backoff.max.ms": 1000,
        "socket.keepalive.enable": True,
        "security.protocol": settings.kafka_protocol,
    }
    if settings.kafka_protocol.endswith("SSL"):
        config |= {"enable.ssl.certificate.verification": True, "ssl.endpoint.identification.algorithm": "https"}
        if settings.kafka_ca:
            config["ssl.ca.location"] = str(settings.kafka_ca.absolute())
        if settings.kafka_certificate and settings.kafka_key:
            config["ssl.certificate.location"] = str(settings.kafka_certificate.absolute())
            config["ssl.key.location"] = str(settings.kafka_key.absolute())
    if settings.kafka_user is not None and settings.kafka_password is not None:
        config |= {
            "sasl.mechanism": settings.kafka_mechanism,
            "sasl.username": settings.kafka_user,
            "sasl.password": settings.kafka_password.get_secret_value(),
        }
    return config


def spark_options(settings: Settings) -> dict[str, str]:
    """The options of Spark's Kafka source, for `readStream` and `read` alike. Topic and offsets are the caller's.

    The password and the client's key are among them: `session` tells Spark to redact these options wherever it shows any.
    """
    options = {
        "kafka.bootstrap.servers": settings.brokers,
        "kafka.security.protocol": settings.kafka_protocol,
        "kafka.isolation.level": "read_committed",
        "kafka.fetch.max.wait.ms": "20",  # a live read waits for the broker's long poll: 760 against 540 ms a batch
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }
    if settings.kafka_protocol.endswith("SSL"):
        options["kafka.ssl.endpoint.identification.algorithm"] = "https"
        if settings.kafka_ca:
            options["kafka.ssl.truststore.type"] = "PEM"
            options["kafka.ssl.truststore.location"] = str(settings.kafka_ca.absolute())
        if settings.kafka_certificate and settings.kafka_key:
            # As text: Java wants both in one file, and a second copy of a key on the disk is one too many.
            options["kafka.ssl.keystore.type"] = "PEM"
            options["kafka.ssl.keystore.certificate.chain"] = settings.kafka_certificate.read_text()
            options["kafka.ssl.keystore.key"] = settings.kafka_key.read_text()
    if settings.kafka_user is not None and settings.kafka_password is not None:
        module = "plain.PlainLoginModule" if settings.kafka_mechanism == "PLAIN" else "scram.ScramLoginModule"
        user, password = quoted(settings.kafka_user), quoted(settings.kafka_password.get_secret_value())
        options["kafka.sasl.mechanism"] = settings.kafka_mechanism
        options["kafka.sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required username={user} password={password};"
        )
    return options


def between(spark: SparkSession, settings: Settings, topic: str, places: Mapping[int, tuple[int, int]], group: str) -> DataFrame:
    """A topic's records at these places, offsets `[from, until)` by partition, as Spark's Kafka source gives them."""
    starts, ends = ({str(partition): place[n] for partition, place in places.items()} for n in (0, 1))
    options = {
        "assign": json.dumps({topic: sorted(places)}),
        "startingOffsets": json.dumps({topic: starts}),
        "endingOffsets": json.dumps({topic: ends}),
        "groupIdPrefix": group,
    }
    return spark.read.format("kafka").options(**(spark_options(settings) | options)).load()


def quoted(text: str) -> str:
    """A value in a JAAS line, which Java reads with its StreamTokenizer: quotes, backslashes and line ends are escaped."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'


def wait(settings: Settings, seconds: float) -> None:
    """Return once a broker answers. Raises `BrokerAway` when none has within `seconds`, `BrokerRefused` at once."""
    connected(settings, seconds)


def connected(settings: Settings, seconds: float = ANSWER) -> AdminClient:
    """A client that a broker has answered. Raises as `wait` does."""
    told: list[KafkaError] = []
    admin = AdminClient(client_config(settings) | {"error_cb": told.append})
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            # Not list_topics: it asks for every topic, and with a client just made it takes 55 ms where this takes 2.
            admin.describe_cluster(request_timeout=max(0.1, min(left, 1.0))).result()
            return admin
        except KafkaException as error:
            admin.poll(0)  # the reason comes by callback; the answer only says that there was none
            if because := refusal([*told, error.args[0]], settings):
                raise BrokerRefused(refused_with(settings, because)) from error
            if error.args[0].code() not in AWAY:
                raise
            if time.monotonic() >= deadline:
                away(settings, error, f" (waited {seconds:g} seconds)")


def away(settings: Settings, error: Exception | None, waited: str = "") -> NoReturn:
    start = "start one with `tidemark up`" if settings.kafka_protocol == "PLAINTEXT" else "see that it runs"
    raise BrokerAway(
        f"no Kafka broker answers at {settings.brokers}{waited}; {start}, or say where it is with TIDEMARK_BROKERS"
    ) from error


# ---- why Kafka does not take us


KNOCK = 1.0
"""Seconds that Kafka has to answer when it is asked by hand."""
ILLEGAL_SASL_STATE, UNSUPPORTED_SASL_MECHANISM = 34, 33
CERTIFICATE_ALERT = re.compile(r"SSL alert number (4[2-9]|116)\b")


def refusal(told: Iterable[KafkaError], settings: Settings) -> str | None:
    """Why Kafka will not take these settings however long one waits; None where waiting may help.

    A broker that stops in the middle of a handshake looks to librdkafka like one that refuses it, a wrong certificate like
    any other, and TLS where plain text was meant like no broker at all. So what it says is believed only where the broker
    itself has spoken; for the rest Kafka is asked by hand, with a request that holds no secret.
    """
    said = {error.str() for error in told if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL, *AWAY)}
    if any("authentication failed" in text.lower() for text in said):
        return (
            f'it does not accept the user "{settings.kafka_user}" with this password by {settings.kafka_mechanism}; see '
            "TIDEMARK_KAFKA_USER, TIDEMARK_KAFKA_PASSWORD and TIDEMARK_KAFKA_MECHANISM"
        )
    if any(CERTIFICATE_ALERT.search(text) for text in said):
        if settings.kafka_certificate:
            return f"it does not accept the client's certificate {settings.kafka_certificate}; see TIDEMARK_KAFKA_CERTIFICATE"
        return "it asks for a client's certificate; set TIDEMARK_KAFKA_CERTIFICATE and TIDEMARK_KAFKA_KEY"
    doubted = any("certificate verify failed" in text for text in said)
    return next((why for host, port in addresses(settings) if (why := wrong_way(settings, host, port, doubted))), None)


def refused_with(settings: Settings, because: str) -> str:
    return f"Kafka at {settings.brokers} cannot be used: {because}"


def wrong_way(settings: Settings, host: str, port: int, doubted: bool) -> str | None:
    """What is wrong with the protocol that the settings say, or with the certificate where librdkafka doubts it."""
    protocol = settings.kafka_protocol
    tls, sasl = protocol.endswith("SSL"), protocol.startswith("SASL")
    try:
        answer = asked(host, port, trusting(settings) if tls else None, settings.kafka_mechanism)
    except ssl.SSLCertVerificationError as wrong:
        return distrust(settings, host, wrong) if doubted else None
    if answer == () and not tls and asked(host, port, unverified(), settings.kafka_mechanism) is not None:
        return f"it speaks TLS at {host}:{port}, and TIDEMARK_KAFKA_PROTOCOL is {protocol}; write SSL or SASL_SSL there"
    if not answer and tls and asked(host, port, None, settings.kafka_mechanism):
        return (
            f"it speaks plain text at {host}:{port}, and TIDEMARK_KAFKA_PROTOCOL is {protocol}; "
            "give the address where it speaks TLS with TIDEMARK_BROKERS"
        )
    if not answer:
        return None
    code, mechanisms = answer
    if sasl and code == ILLEGAL_SASL_STATE:
        return (
            f"it asks for no user at {host}:{port}, and TIDEMARK_KAFKA_PROTOCOL is {protocol}; write "
            f"{protocol.removeprefix('SASL_')} there, or give another address with TIDEMARK_BROKERS"
        )
    if not sasl and code != ILLEGAL_SASL_STATE:
        with_user = "SASL_SSL" if tls else "SASL_PLAINTEXT"
        return f"it asks for a user at {host}:{port}, and TIDEMARK_KAFKA_PROTOCOL is {protocol}; write {with_user} there"
    if sasl and code == UNSUPPORTED_SASL_MECHANISM:
        return f"it does not know {settings.kafka_mechanism}, but {', '.join(mechanisms)}; set TIDEMARK_KAFKA_MECHANISM"
    return None


def distrust(settings: Settings, host: str, wrong: ssl.SSLCertVerificationError) -> str:
    """The numbers are those of OpenSSL's x509_vfy.h."""
    if wrong.verify_code == 10:
        return f"the certificate that it shows as {host} has expired; have it renewed"
    if wrong.verify_code in (62, 64):
        return f"its certificate is not made out to {host}; write the name that it is made out to in TIDEMARK_BROKERS"
    trusted = settings.kafka_ca or "those that this system trusts"
    return (
        f"its certificate does not go back to a trusted one ({trusted}): {wrong.verify_message}; see TIDEMARK_KAFKA_CA, and "
        "that nobody stands between"
    )


def addresses(settings: Settings) -> list[tuple[str, int]]:
    pairs = (address.strip().rpartition("://")[2].rpartition(":") for address in settings.brokers.split(","))
    return [(host.strip("[]"), int(port)) for host, _, port in pairs if host and port.isdigit()]


def trusting(settings: Settings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.kafka_ca)
    if settings.kafka_certificate:
        context.load_cert_chain(settings.kafka_certificate, settings.kafka_key)
    return context


def unverified() -> ssl.SSLContext:
    """To find out that the other side speaks TLS, no more: nothing is sent that matters."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def asked(host: str, port: int, context: ssl.SSLContext | None, mechanism: str) -> tuple[int, list[str]] | tuple[()] | None:
    """Kafka's answer to a SaslHandshake request (version 1): its error code and the mechanisms that it knows.

    None where no connection came about, an empty answer where nothing that is Kafka answered on it.
    Raises `ssl.SSLCertVerificationError`.
    """
    name = mechanism.encode()
    request = struct.pack(f">hhihh{len(name)}s", 17, 1, 7, -1, len(name), name)
    try:
        with socket.create_connection((host, port), KNOCK) as raw:
            if context is None:
                return answer_to(raw, request)
            with context.wrap_socket(raw, server_hostname=host) as wrapped:
                return answer_to(wrapped, request)
    except ssl.SSLCertVerificationError:
        raise
    except OSError:
        return None


def answer_to(connection: socket.socket, request: bytes) -> tuple[int, list[str]] | tuple[()]:
    try:
        connection.sendall(struct.pack(">i", len(request)) + request)
        with connection.makefile("rb") as stream:
            size, correlation, code, count = struct.unpack(">iihi", stream.read(14))
            if correlation != 7 or not 10 <= size <= 4096:
                return ()
            return code, [stream.read(struct.unpack(">h", stream.read(2))[0]).decode() for _ in range(count)]
    except (OSError, struct.error, ValueError):
        return ()


def refused_by_spark(settings: Settings, error: Exception) -> str | None:
    """The sentence, where Spark's own Kafka client says that it was refused; None for any other error.

    Java wraps the cause in pages of trace and does not name the setting, so the other client is asked for it.
    """
    found = re.search(
        r"org\.apache\.kafka\.common\.errors\.(?:\w*Authentication|UnsupportedSasl|IllegalSasl)\w*: ([^\n]*)", str(error)
    )
    if found is None:
        return None
    try:
        wait(settings, ANSWER)
    except ConnectionError as sentence:
        return str(sentence)
    return f"Kafka at {settings.brokers} cannot be used from Spark: {found[1]}"


# ---- topics as code


@dataclass(frozen=True)
class Change:
    """One thing that `apply` did: `what` is `created`, `partitions` or a Kafka option's name."""

    topic: str
    what: str
    before: str | None
    after: str

    def __str__(self) -> str:
        done = f"{self.what} {self.before} → {self.after}" if self.before else f"{self.what}, {self.after}"
        return f"{self.topic}: {done}"


@dataclass(frozen=True)
class Listing:
    """A topic as Kafka holds it. `messages` is the sum of latest minus earliest offsets; a missing topic has 0 partitions."""

    name: str
    partitions: int
    replication: int
    retention: str
    cleanup: str
    messages: int
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Held:
    """What Kafka holds of one topic."""

    partitions: int
    replication: int
    options: Mapping[str, str]


def wanted(topic: Topic) -> dict[str, str]:
    """The topic's options in Kafka's words.

    A compacted topic keeps each change for as long as another topic keeps its records, and a deletion a day longer: a stream
    that is away for less sees all of them.
    """
    compacted = {"min.compaction.lag.ms": str(milliseconds(topic.retention))} if topic.compacted else {}
    return compacted | {
        "cleanup.policy": "compact" if topic.compacted else "delete",
        "retention.ms": str(milliseconds(topic.retention)),
        "retention.bytes": str(topic.retention_bytes),
        "segment.ms": str(milliseconds(topic.segment)),
        "segment.bytes": str(topic.segment_bytes),
        "min.insync.replicas": str(topic.min_insync),
        "unclean.leader.election.enable": "false",
        "max.message.bytes": str(topic.max_message_bytes),
        "message.timestamp.type": "LogAppendTime",
    }


def apply(settings: Settings, topics: Iterable[Topic]) -> list[Change]:
    """Create and alter Kafka's topics until they are as the code says; what was done, nothing if nothing was needed.

    Everything is looked at first: if any topic is refused, nothing is done and `TopicRefused` lists them all.
    Options that the code does not name are left alone. Raises `BrokerAway`, `BrokerRefused`.
    """
    topics = list(topics)
    admin = connected(settings)
    held = holdings(settings, admin, [t.name for t in topics])
    brokers = len(metadata(settings, admin).brokers)
    refusals = [s for t in topics for s in refused(t, held.get(t.name), t.replication or settings.replication, brokers)]
    if refusals:
        raise TopicRefused("\n".join(refusals))

    changes: list[Change] = []
    for topic in topics:
        known = held.get(topic.name)
        if known is None:
            replication = topic.replication or settings.replication
            new = NewTopic(topic.name, topic.partitions, replication, config=wanted(topic))
            answers(settings, admin.create_topics([new], request_timeout=ANSWER))
            shape = f"{topic.partitions} partitions, replication factor {replication}"
            changes.append(Change(topic.name, "created", None, shape))
            continue
        if topic.partitions > known.partitions:
            log.warning("partitions added; keys may move to other partitions", topic=topic.name, to=topic.partitions)
            answers(settings, admin.create_partitions([NewPartitions(topic.name, topic.partitions)], request_timeout=ANSWER))
            changes.append(Change(topic.name, "partitions", str(known.partitions), str(topic.partitions)))
        options = {n: v for n, v in wanted(topic).items() if known.options.get(n) != v}
        if options:
            resource = ConfigResource(
                ResourceType.TOPIC,
                topic.name,
                incremental_configs=[ConfigEntry(n, v, incremental_operation=AlterConfigOpType.SET) for n, v in options.items()],
            )
            answers(settings, admin.incremental_alter_configs([resource], request_timeout=ANSWER))
            changes += [Change(topic.name, n, known.options.get(n), v) for n, v in options.items()]
    if changes:
        settle_down(settings, admin, {t.name: t for t in topics if t.name in {c.topic for c in changes}})
    return changes


def deleted(error: BaseException) -> bool:
    gone = isinstance(error, KafkaException) and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    return gone or isinstance(error, TopicMissing)


# Three questions are asked one after the other, and a topic may be deleted between two.
@retry(retry=retry_if_exception(deleted), stop=stop_after_attempt(3), wait=wait_fixed(0.2), reraise=True)
def listing(settings: Settings, topics: Sequence[Topic]) -> list[Listing]:
    """Each topic of the code as Kafka holds it, with the differences between the two. Raises `BrokerAway`."""
    admin = connected(settings)
    held = holdings(settings, admin, [t.name for t in topics])
    first, last = offsets(settings, list(held), "earliest"), offsets(settings, list(held), "latest")
    rows = []
    for topic in topics:
        known = held.get(topic.name)
        if known is None:
            rows.append(Listing(topic.name, 0, 0, "", "", 0, ("not created",)))
            continue
        rows.append(
            Listing(
                topic.name,
                known.partitions,
                known.replication,
                in_words(int(known.options["retention.ms"])),
                known.options["cleanup.policy"],
                sum(last[topic.name].values()) - sum(first[topic.name].values()),
                tuple(differences(topic, known, topic.replication or settings.replication)),
            )
        )
    return rows


def topic_ids(settings: Settings, names: Iterable[str]) -> dict[str, str]:
    """Kafka's own id of each topic, which changes when a topic is recreated. Raises `TopicMissing`, `BrokerAway`."""
    names = list(names)
    found = topic_ids_held(settings, names)
    refuse_missing(names, found)
    return found


def topic_ids_held(settings: Settings, names: Iterable[str], admin: AdminClient | None = None) -> dict[str, str]:
    """The same of those topics that Kafka holds, by a client that is connected, or a new one. Raises `BrokerAway`."""
    found = descriptions(settings, admin or connected(settings), names)
    return {name: topic_id(description) for name, description in found.items()}


def offsets(
    settings: Settings, topics: Iterable[str], at: Literal["earliest", "latest"] | datetime, seconds: float = ANSWER
) -> dict[str, dict[int, int]]:
    """By topic and partition: the first offset held, the next one to come, or the first whose timestamp is `at` or later.

    For an instant after the last record, the next offset to come. Committed records only, as everything here reads.
    `at` has a time zone. Raises `TopicMissing`, `BrokerAway` (where none answers within `seconds`).
    """
    names = list(topics)
    if not names:
        return {}
    admin = connected(settings, seconds)
    found = descriptions(settings, admin, names)
    refuse_missing(names, found)
    places = [TopicPartition(name, p.id) for name in names for p in found[name].partitions]
    # The end is asked before the instant: a record that comes between the two then lies at or after both answers.
    edge = offsets_at(settings, admin, places, OffsetSpec.earliest() if at == "earliest" else OffsetSpec.latest())
    if isinstance(at, datetime):
        instant = offsets_at(settings, admin, places, OffsetSpec.for_timestamp(as_milliseconds(at)))
        edge = {place: instant[place] if instant[place] >= 0 else end for place, end in edge.items()}
    result: dict[str, dict[int, int]] = {name: {} for name in names}
    for (name, partition), offset in edge.items():
        result[name][partition] = offset
    return result


def unsettled(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and error.args[0].code() in UNSETTLED


@retry(retry=retry_if_exception(unsettled), stop=stop_after_delay(5), wait=wait_fixed(0.2), reraise=True)
def commit_group(settings: Settings, group: str, upto: Mapping[tuple[str, int], int], seconds: float = ANSWER) -> None:
    """Commit the next offset to read of each topic and partition, for a consumer group that has no members.

    For the tools that show a group's lag; nothing here reads it back. Raises `BrokerAway`, or Kafka's own error.
    """
    places = [TopicPartition(topic, partition, offset) for (topic, partition), offset in upto.items()]
    admin = connected(settings, seconds)  # kept: a client that nobody holds never answers
    futures = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)], request_timeout=seconds)
    for found in answers(settings, futures).values():
        for place in found.topic_partitions:
            if place.error:
                raise KafkaException(place.error)


def refused(topic: Topic, known: Held | None, replication: int, brokers: int) -> Iterator[str]:
    if topic.min_insync > replication:
        yield (
            f"topic {topic.name}: min_insync is {topic.min_insync} but the replication factor is {replication}, so nothing could "
            f"be written; set min_insync to {replication} or less, or raise TIDEMARK_REPLICATION"
        )
    if known is None:
        if replication > brokers:
            yield (
                f"topic {topic.name}: the code says replication factor {replication}, Kafka has {brokers} broker(s); "
                "lower replication (or TIDEMARK_REPLICATION), or add brokers"
            )
        return
    if topic.partitions < known.partitions:
        yield (
            f"topic {topic.name}: the code says {topic.partitions} partitions, Kafka has {known.partitions} and cannot take "
            f"any away; write partitions={known.partitions}, or give the topic a new name"
        )
    if replication != known.replication:
        yield (
            f"topic {topic.name}: the code says replication factor {replication}, Kafka has {known.replication} and changes "
            f"it only by moving replicas; run kafka-reassign-partitions, or write replication={known.replication}"
        )


def differences(topic: Topic, known: Held, replication: int) -> Iterator[str]:
    if topic.partitions != known.partitions:
        yield f"partitions is {known.partitions}, code says {topic.partitions}"
    if replication != known.replication:
        yield f"replication factor is {known.replication}, code says {replication}"
    for name, value in wanted(topic).items():
        if known.options.get(name) != value:
            yield f"{name} is {known.options.get(name)}, code says {value}"


def metadata(settings: Settings, admin: AdminClient) -> Any:
    try:
        return admin.list_topics(timeout=ANSWER)
    except KafkaException as error:
        away(settings, error)


def answers(settings: Settings, futures: Mapping[Any, Any]) -> dict[Any, Any]:
    """The results of an administrative request. Raises `BrokerAway` or Kafka's own error."""
    try:
        return {what: future.result() for what, future in futures.items()}
    except KafkaException as error:
        if error.args[0].code() in AWAY:
            away(settings, error)
        raise


def descriptions(
    settings: Settings, admin: AdminClient, names: Iterable[str], seconds: float = ANSWER
) -> dict[str, TopicDescription]:
    """What Kafka says of the topics it holds; missing ones are left out."""
    names = list(dict.fromkeys(names))
    if not names:
        return {}
    found = {}
    for name, future in admin.describe_topics(TopicCollection(names), request_timeout=seconds).items():
        try:
            found[name] = future.result()
        except KafkaException as error:
            if error.args[0].code() in AWAY:
                away(settings, error)
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return found


def holdings(settings: Settings, admin: AdminClient, names: list[str]) -> dict[str, Held]:
    found = descriptions(settings, admin, names)
    if not found:
        return {}
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in found]
    configs = answers(settings, admin.describe_configs(resources, request_timeout=ANSWER))
    options = {resource.name: entries for resource, entries in configs.items()}
    return {
        name: Held(len(d.partitions), len(d.partitions[0].replicas), {n: e.value for n, e in options[name].items()})
        for name, d in found.items()
    }


def topic_id(description: TopicDescription) -> str:
    """As Kafka's own tools write it; librdkafka uses the other base64 alphabet."""
    return str(description.topic_id).replace("+", "-").replace("/", "_")


def refuse_missing(names: Iterable[str], found: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise TopicMissing(
            f"Kafka has no topic {', '.join(missing)}; `tidemark topics apply` creates those that pipelines declare"
        )


@retry(retry=retry_if_exception(unsettled), stop=stop_after_delay(ANSWER), wait=wait_fixed(0.1), reraise=True)
def offsets_at(
    settings: Settings, admin: AdminClient, places: list[TopicPartition], spec: OffsetSpec
) -> dict[tuple[str, int], int]:
    futures = admin.list_offsets(
        dict.fromkeys(places, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER
    )
    return {(place.topic, place.partition): result.offset for place, result in answers(settings, futures).items()}


def settle_down(settings: Settings, admin: AdminClient, topics: Mapping[str, Topic]) -> None:
    """Wait until every partition of the topics has a leader: Kafka answers a creation before the brokers know of it."""
    deadline = time.monotonic() + ANSWER
    while True:
        found = descriptions(settings, admin, list(topics))
        if all(
            name in found
            and len(found[name].partitions) >= topic.partitions
            and all(p.leader is not None and p.leader.id >= 0 for p in found[name].partitions)
            for name, topic in topics.items()
        ):
            return
        if time.monotonic() > deadline:
            raise BrokerAway(f"{', '.join(topics)}: partitions without a leader after {ANSWER:g} seconds; is every broker up?")
        time.sleep(0.05)


def milliseconds(text: str) -> int:
    return int(duration(text) / timedelta(milliseconds=1))


def in_words(ms: int) -> str:
    if ms < 0:
        return "for ever"
    for unit, seconds in sorted(UNITS.items(), key=lambda pair: -pair[1]):
        if unit != "week" and ms >= seconds * 1000 and ms % (seconds * 1000) == 0:
            count = ms // (seconds * 1000)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{ms} ms"


def as_milliseconds(at: datetime) -> int:
    """Milliseconds since 1970, rounded up, so that a record at or after the result is at or after `at`."""
    if at.tzinfo is None:
        raise ValueError(f"{at} has no time zone; write it with one, like {at}+00:00")
    return -((datetime(1970, 1, 1, tzinfo=UTC) - at) // timedelta(milliseconds=1))


# ---- producing


@dataclass(frozen=True)
class Event:
    """An event with what its value alone does not say.

    `key` is the topic's key column unless given; equal keys share a partition. `at` is when it happened: it fills the topic's
    event time column where the value lacks it, and is the record's timestamp in a topic that keeps the producer's (those of the
    platform carry Kafka's own). A value of None is a tombstone, the end of its key in a compacted topic: it needs a key, and
    tells its `at` in the header `event_time`.
    """

    value: bytes | Mapping[str, Any] | None
    key: bytes | str | None = None
    headers: Mapping[str, bytes | str | None] = field(default_factory=dict)
    at: datetime | None = None


@dataclass
class Delivery:
    """What became of the events of one `produce`. At its end `sent == delivered + failed`.

    `errors` are the first few reasons of failure; `interrupted` says that Ctrl-C ended the sending, `refused` that Kafka did.
    """

    sent: int = 0
    delivered: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False
    refused: bool = False

    @property
    def complete(self) -> bool:
        """Whether every event taken was delivered, and Kafka refused none that were to come."""
        return self.sent == self.delivered and not self.refused


def produce(
    settings: Settings,
    topic: Topic,
    events: Iterable[bytes | Mapping[str, Any] | Event],
    *,
    rate: float | None = None,
    burst: float = 0,
    progress: Callable[[Delivery], None] | None = None,
    patience: float = PATIENCE,
    options: Mapping[str, Any] | None = None,
    interrupts: Callable[[], int] | None = None,
) -> Delivery:
    """Send events to a topic, and return once each is delivered to all in-sync replicas or has failed.

    Bytes go as they are, a mapping as JSON (of a text topic: its one column's text), its instants in ISO 8601; an `Event` has
    headers, a key or an event time beside. The key is the topic's key column when the event is a JSON object that holds it, else
    null; equal keys share a partition, the one that Java's default partitioner picks. `options` are Kafka's own, over those of
    `PRODUCER`. `rate` is events a second, with `burst` those of so many seconds at once; an event is taken from `events` when its
    turn has come. A record is tried again, in order and without repeats, for `patience` seconds: a broker that is away is waited
    for, an event that Kafka refuses is counted and the rest go on; when Kafka refuses us, no more is taken, what is under way has
    failed and the delivery is `refused`. Ctrl-C ends the sending; what was taken is still delivered, unless Ctrl-C comes again;
    `interrupts` counts them for another thread than the main one. `progress` is called about five times a second and at the end,
    with the same `Delivery`.
    Raises `TopicMissing`, `BrokerRefused`; and what `events` raises, or an event that cannot be written as a record, once those
    before it are delivered or have failed.
    """
    delivery = Delivery()
    connection = Connection(settings)
    told = 0.0

    def report(error: KafkaError | None, _message: Message) -> None:
        connection.answered(error)
        if error is None:
            delivery.delivered += 1
        else:
            fail(delivery, error.str())

    def tell(now: float, at_once: bool = False) -> None:
        nonlocal told
        if progress and (at_once or now - told >= 0.2):
            told = now
            progress(delivery)

    try:
        refuse_missing([topic.name], descriptions(settings, connected(settings, 2.0), [topic.name], seconds=2.0))
        there = True
    except BrokerAway:
        there = False  # the records wait for the broker, up to their patience
    producer = Producer(
        client_config(settings)
        | dict(PRODUCER)
        | {"delivery.timeout.ms": round(patience * 1000), "message.max.bytes": topic.max_message_bytes}
        | dict(options or {})
        | {"error_cb": connection.failed}
    )
    due = began = time.monotonic()
    broken: Exception | None = None
    with noted_interrupts() if interrupts is None else nullcontext(interrupts) as pressed:
        try:
            for event in pressed.awaited(events) if isinstance(pressed, Interrupts) else events:
                if connection.refused:
                    delivery.refused = True  # also where nothing is under way that would fail
                    break
                if pressed():
                    break
                delivery.sent += 1
                send(producer, topic, event, delivery, lambda: tell(time.monotonic()), report, pressed)
                if not there and delivery.sent == 1:
                    connection.gone()
                producer.poll(0)
                now = time.monotonic()
                tell(now)
                if rate:
                    due = max(due + 1 / rate, now - max(1.0, burst))  # after a stall, at most one second's events at once
                    turn = began + math.ceil((due - began) / burst) * burst if burst else due
                    while (early := turn - time.monotonic()) > 0.02 and not pressed():
                        producer.poll(min(early, 0.2))
                        tell(time.monotonic())
        except KeyboardInterrupt:
            pass  # while the next event was waited for
        except Exception as error:
            broken = error  # what was taken before is in the client's queue, and would be gone with it
        while producer.flush(0.2):
            tell(time.monotonic())
            if connection.refused:
                producer.purge()  # no patience changes a refusal
            if pressed() and not delivery.interrupted:
                delivery.interrupted = True
                waiting = len(producer)
                log.info("interrupted; delivering what was taken, Ctrl-C again gives it up", topic=topic.name, waiting=waiting)
            if pressed() > 1:
                raise KeyboardInterrupt
        delivery.interrupted = delivery.interrupted or pressed() > 0
        if connection.refused:
            delivery.errors.insert(0, connection.refused)
        if broken:
            delivery.sent = delivery.delivered + delivery.failed
        tell(time.monotonic(), at_once=True)
    if broken:
        broken.add_note(f"{delivery.delivered:,} events before it were delivered, {delivery.failed:,} failed")
        raise broken
    return delivery


class Interrupts:
    """How often Ctrl-C or SIGTERM came. Raised is none of them but where nobody else looks: while an event is waited for."""

    def __init__(self) -> None:
        self.count, self.waiting = 0, False

    def __call__(self) -> int:
        return self.count

    def note(self, _number: int, _frame: object) -> None:
        self.count += 1
        if self.waiting:
            raise KeyboardInterrupt

    def awaited(self, events: Iterable[Any]) -> Iterator[Any]:
        """The events; a pipe's next line may never come, and Ctrl-C raises `KeyboardInterrupt` while it is waited for."""
        each = iter(events)
        while True:
            self.waiting = True  # before the look: no signal falls between
            try:
                if self.count:
                    return
                event = next(each)
            except StopIteration:
                return
            finally:
                self.waiting = False
            yield event


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Count Ctrl-C and SIGTERM instead of raising: inside a callback of the client an exception is lost, or worse."""
    pressed = Interrupts()
    own = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGINT, signal.SIGTERM) if own else ()
    before = {number: signal.signal(number, pressed.note) for number in wanted}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def send(
    producer: Producer,
    topic: Topic,
    event: bytes | Mapping[str, Any] | Event,
    delivery: Delivery,
    waiting: Callable[[], None],
    report: Callable[[KafkaError | None, Message], None],
    pressed: Callable[[], int],
) -> None:
    """Hand one event to the client's queue, waiting while it is full; an event that Ctrl-C comes before is not sent."""
    one = event if isinstance(event, Event) else Event(event)
    value = filled(topic, one)
    key = key_of(topic, value) if one.key is None and value is not None else one.key
    ended = [(EVENT_TIME, one.at.isoformat())] if one.at and value is None else []
    record: dict[str, Any] = {
        "value": value if value is None or isinstance(value, bytes) else as_value(topic, value),
        "key": key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key,
        "headers": [*one.headers.items(), *ended],
        "timestamp": as_milliseconds(one.at) if one.at else 0,  # 0 is the clock's
    }
    while True:
        try:
            producer.produce(topic.name, on_delivery=report, **record)
            return
        except BufferError:
            producer.poll(0.1)
            waiting()
            if pressed():
                delivery.sent -= 1
                return
        except KafkaException as error:
            fail(delivery, error.args[0].str())
            return


def fail(delivery: Delivery, reason: str) -> None:
    delivery.failed += 1
    if reason not in delivery.errors and len(delivery.errors) < ERRORS_KEPT:
        delivery.errors.append(reason)


def filled(topic: Topic, event: Event) -> bytes | Mapping[str, Any] | None:
    """The event's value, with its time in the topic's event time column where that is missing."""
    if event.at is None or not isinstance(event.value, Mapping) or topic.event_time in event.value:
        return event.value
    has_its_own = topic.event_time in (column.name for column in topic.columns)
    return {**event.value, topic.event_time: event.at} if has_its_own else event.value


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=instant).encode("utf-8", "surrogatepass")


def instant(value: Any) -> str:
    """An instant in ISO 8601 and UTC, as the platform reads it; JSON has a word for nothing else that comes here."""
    if isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    raise TypeError(f"{value!r} is nothing that JSON holds; an instant needs a time zone")


def as_value(topic: Topic, event: Mapping[str, Any]) -> bytes:
    return str(event[topic.columns[0].name]).encode("utf-8", "surrogatepass") if topic.format == "text" else as_json(event)


def key_of(topic: Topic, event: bytes | Mapping[str, Any]) -> bytes | None:
    """A text's own bytes, any other JSON value as JSON; None for null, for no such field and for what is no JSON object."""
    if topic.key is None or topic.format == "text":
        return None
    if isinstance(event, bytes):
        try:
            event = json.loads(event.decode())
        except (ValueError, RecursionError):
            return None
    found = event.get(topic.key) if isinstance(event, Mapping) else None
    if found is None:
        return None
    return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else as_json(found)


class Connection:
    """Says once when the brokers go away, and once when they are back. `refused` is why they take us no more, if so."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.brokers = settings, settings.brokers
        self.lost = False
        self.refused: str | None = None

    def failed(self, error: KafkaError) -> None:
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) and (because := refusal([error], self.settings)):
            self.refused = refused_with(self.settings, because)
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.gone()
        elif error.code() not in AWAY:
            log.warning("Kafka says", brokers=self.brokers, error=error.str())

    def gone(self) -> None:
        if not self.lost:
            self.lost = True
            log.warning("no broker answers; waiting for it", brokers=self.brokers)

    def answered(self, error: KafkaError | None) -> None:
        if self.lost and error is None:
            self.lost = False
            log.info("the broker is back", brokers=self.brokers)


# ---- events to produce


def from_file(topic: Topic, path: Path) -> Iterator[bytes]:
    """The lines of a file or a pipe, as they are; of JSON, blank ones are left out. Raises `FileNotFoundError` at once."""
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(f"there is no file {path}; give one with an event in JSON on each line")
    return lines(path, text=topic.format == "text")


def lines(path: Path, text: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            event = line.rstrip(b"\r\n") if text else line.strip()
            if event or text:
                yield event


LATE, REPEATED, MALFORMED = 0.05, 0.01, 0.005


Sent = bytes | Event


def sample(topic: Topic, *, seed: int, count: int | None = None, day: date | None = None, zone: ZoneInfo) -> Iterator[Sent]:
    """Events as `topic.sample` draws them, with what real traffic brings: 5 % late, 1 % exact repeats, 0.5 % malformed.
    Of a compacted topic what is drawn with its key alone is a tombstone.

    With `day`: exactly `count` of them over that day of `zone`, more by day than by night, every hour present, roughly in
    order, and the same bytes each time for one seed, day and count. Without: each at the instant it is taken, ids new in
    each run, for ever unless `count` says. Raises `ValueError` at once for a topic that has no sample.
    """
    if topic.sample is None:
        raise ValueError(f"topic {topic.name} has no sample; declare sample=, or give a file with --file")
    if day is None:
        # Ids of an earlier run must not come again: the platform would rightly take them for repeats.
        return live(topic, Random(f"{topic.name} {seed} {time.time_ns()}"), count)
    if count is None:
        raise ValueError(f"topic {topic.name}: a sample of {day} needs a count")
    return of_day(topic, Random(f"{topic.name} {seed} {day}"), count, day, zone)


def of_day(topic: Topic, random: Random, count: int, day: date, zone: ZoneInfo) -> Iterator[Sent]:
    recent: deque[bytes] = deque(maxlen=1000)
    waiting: list[tuple[datetime, int, Sent]] = []  # by arrival: a late event arrives after others that are younger
    for number, (at, first_of_hour) in enumerate(instants(random, count, day, zone)):
        while waiting and waiting[0][0] <= at:
            yield heapq.heappop(waiting)[2]
        event = draw(topic, random, at, recent, plain=first_of_hour)
        late = timedelta(seconds=random.uniform(10, 900)) if random.random() < LATE else timedelta()
        heapq.heappush(waiting, (at + late, number, event))
    while waiting:
        yield heapq.heappop(waiting)[2]


def live(topic: Topic, random: Random, count: int | None) -> Iterator[Sent]:
    recent: deque[bytes] = deque(maxlen=1000)
    sent = 0
    while count is None or sent < count:
        late = timedelta(seconds=random.uniform(1, 60)) if random.random() < LATE else timedelta()
        yield draw(topic, random, datetime.now(UTC) - late, recent)
        sent += 1


def draw(topic: Topic, random: Random, at: datetime, recent: deque[bytes], plain: bool = False) -> Sent:
    assert topic.sample is not None
    chance = 1.0 if plain else random.random()
    if chance < REPEATED and recent:
        return random.choice(recent)
    event = topic.sample(random, at)
    if REPEATED <= chance < REPEATED + MALFORMED:
        return malformed(topic, random, event)
    if topic.compacted and set(event) == {topic.key}:
        return Event(None, key_of(topic, event), at=at)
    recent.append(as_value(topic, event))
    return recent[-1]


def malformed(topic: Topic, random: Random, event: dict[str, Any]) -> bytes:
    """The event with one thing wrong that no topic accepts."""
    if topic.format == "text":
        return b"\xff\xfe" + as_value(topic, event)
    if topic.compacted:  # Kafka takes nothing without a key there
        return as_json(event | {random.choice([c.name for c in topic.columns if c.name != topic.key]): {"not": "this"}})
    required = [c.name for c in topic.columns if not c.nullable] or [topic.columns[0].name]
    wrong = random.choice(required)
    good = as_json(event)
    ways = [
        good[: len(good) // 2],
        b"\xff\xfe" + good,
        as_json(event | {wrong: {"not": "this"}}),
        as_json({n: v for n, v in event.items() if n not in required}),
        b"<html>504 Gateway Time-out</html>",
    ]
    return random.choice(ways)


def instants(random: Random, count: int, day: date, zone: ZoneInfo) -> Iterator[tuple[datetime, bool]]:
    """`count` ascending instants (UTC, whole milliseconds) of a day of 23, 24 or 25 hours; True marks an hour's first."""
    start, end = (datetime(d.year, d.month, d.day, tzinfo=zone).astimezone(UTC) for d in (day, day + timedelta(days=1)))
    hour = timedelta(hours=1)
    hours = [start + i * hour for i in range(math.ceil((end - start) / hour))]
    weights = [1 + 0.8 * math.cos((h.astimezone(zone).hour - 15) * math.tau / 24) for h in hours]
    one_each = 1 if count >= len(hours) else 0
    share, given, total = count - one_each * len(hours), 0, 0.0
    for begin, weight in zip(hours, weights, strict=True):
        total += weight
        upto = round(share * total / sum(weights))
        length = min(end - begin, hour) // timedelta(milliseconds=1)
        drawn = sorted(random.randrange(length) for _ in range(upto - given + one_each))
        given = upto
        yield from ((begin + timedelta(milliseconds=ms), i == 0) for i, ms in enumerate(drawn))


# ---- reading


@dataclass(frozen=True)
class Record:
    """One record as Kafka holds it; `timestamp` is Kafka's own, in UTC. A null value is a tombstone."""

    partition: int
    offset: int
    timestamp: datetime
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    topic: str = ""


Place = Literal["earliest", "latest"] | datetime | int
"""Where to read from: an end, the first record at or after an instant, or an offset."""


def consume(
    settings: Settings,
    topic: str,
    start: Place,
    limit: int | None = None,
    follow: bool = False,
    *,
    patience: float = PATIENCE,
) -> Iterator[Record]:
    """The records of a topic from `start` on, in order within each partition, up to the end that Kafka held when asked.

    An `int` is an offset, the same in every partition, moved into what the partition holds. `follow` goes on for ever;
    `limit` ends after so many. Partitions are assigned, so no consumer group is left behind. A broker that goes away is
    waited for: by `follow` for ever, else for `patience` seconds without any answer. Raises `TopicMissing`, `BrokerAway` (in
    the middle it says how many records were read), `BrokerRefused`.
    """
    begin, ends = places(settings, topic, start)
    return records(settings, topic, begin, None if follow else ends, limit, patience)


def places(settings: Settings, topic: str, start: Place) -> tuple[dict[int, int], dict[int, int]]:
    """By partition: the offset that reading from `start` begins with, and the next one to come. Raises as `offsets`."""
    at = "earliest" if isinstance(start, int) else start
    begin, ends = offsets(settings, [topic], at)[topic], offsets(settings, [topic], "latest")[topic]
    if isinstance(start, int):
        begin = {p: min(max(start, first), ends[p]) for p, first in begin.items()}
    return begin, ends


def records(
    settings: Settings,
    topic: str,
    begin: Mapping[int, int],
    ends: Mapping[int, int] | None,
    limit: int | None,
    patience: float = PATIENCE,
) -> Iterator[Record]:
    connection = Connection(settings)
    consumer = Consumer(
        client_config(settings)
        | {
            "group.id": "tidemark-consume",  # librdkafka wants one, and asks who coordinates it; nobody joins it
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "error_cb": connection.failed,
        }
    )
    try:
        unread = {p for p in begin if ends is None or begin[p] < ends[p]}
        consumer.assign([TopicPartition(topic, p, begin[p]) for p in unread])
        taken, silent, step = 0, 0.0, min(0.5, patience)
        while unread and (limit is None or taken < limit):
            message = consumer.poll(step)
            if connection.refused:
                raise BrokerRefused(connection.refused)
            if message is None:
                silent += step  # not by the clock: a command that was stopped with Ctrl-Z has waited for nobody
                if ends is not None and silent >= patience:
                    away(settings, None, f" any more: {taken:,} records of topic {topic} were read (waited {patience:g} seconds)")
                continue
            error, partition, offset = message.error(), cast(int, message.partition()), cast(int, message.offset())
            connection.answered(error)
            if error is None and (ends is None or offset < ends[partition]):
                taken += 1
                yield record(message)
            elif error is not None and error.code() not in PASSED_OVER:
                raise KafkaException(error)
            if ends is not None and (error is None or error.code() == KafkaError._PARTITION_EOF):
                silent, reached = 0.0, offset + 1 if error is None else offset
                if reached >= ends[partition]:
                    unread.discard(partition)
                    consumer.pause([TopicPartition(topic, partition)])  # what comes behind the end answers for no other
    finally:
        consumer.close()


PASSED_OVER = (*AWAY, KafkaError._PARTITION_EOF, KafkaError.GROUP_AUTHORIZATION_FAILED)
"""What ends no reading by assignment: it waits for brokers, and needs no group."""
EARLIEST_MS, LATEST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The first and the last millisecond of the years 1 to 9999, from 1970 on: what Python has of instants."""


def record(message: Message) -> Record:
    _kind, ms = message.timestamp()  # where a producer gives it, any number
    ms = min(max(ms, EARLIEST_MS), LATEST_MS)
    return Record(
        cast(int, message.partition()),
        cast(int, message.offset()),
        datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms),
        message.key(),
        message.value(),
        tuple(cast(list[tuple[str, bytes | None]], message.headers() or [])),
        cast(str, message.topic()),
    )


# ---- consumer groups


Share = tuple[str, int]
"""A topic and one of its partitions."""
COMMIT_EVERY = 1.0
"""Seconds between two commits of what a member has done."""


class Member:
    """A member of a consumer group. It takes records, and commits the offset of what was said to be done.

        with Member(settings, "invoices", ["orders"]) as member:
            for record in member:      # asking for the next record says that the last one is done
                print_invoice(record)

    An exception in the loop ends it, and that record is not done: it comes again, at this member or another (at least once).
    `before=True` hands each record out after Kafka has taken its commit: what a crash interrupts does not come again (at most
    once). For once, let what you write know the event's id; docs/kafka.md shows it.

    To work beside the loop, `take` records and say `done(record)` from any thread, in any order: what is committed is what lies
    before the first record of a partition that is not done. While `most` records are out, the partitions are paused, and the
    member stays in its group. Commits go out every second, before a partition is given away, and at the end.

    `assigned` and `revoked` are told of partitions that come and go. When `revoked` returns, what is done is committed, and the
    rest is another's; so finish or drop there what you hold. `begin` is where to read from instead of the group's offsets, for
    each partition that this member gets for the first time. `options` are Kafka's own, over those of `CONSUMER`.
    Entering raises `TopicMissing`, `BrokerAway`, `BrokerRefused`; taking raises `BrokerRefused` and Kafka's errors.
    A broker that goes away is waited for. Only `done` and `stop` may be called from other threads.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        topics: Iterable[str],
        *,
        most: int = 1000,
        before: bool = False,
        begin: Place | None = None,
        assigned: Callable[[list[Share]], None] | None = None,
        revoked: Callable[[list[Share]], None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.group, self.topics = settings, group, list(topics)
        self.most, self.before, self.begin = most, before, begin
        self.told_assigned, self.told_revoked = assigned, revoked
        self.connection = Connection(settings)
        self.config = client_config(settings) | dict(CONSUMER) | dict(options or {})
        self.config |= {"group.id": group, "error_cb": self.connection.failed, "on_commit": self.committed}
        self.out: dict[Share, OrderedDict[int, None]] = {}  # handed out and not committable yet, in order
        self.finished: dict[Share, set[int]] = {}  # done, but behind one that is not
        self.ready: dict[Share, int] = {}  # the next offset to commit
        self.begun: set[Share] = set()
        self.lock, self.stopped, self.paused, self.commit_due = threading.Lock(), False, False, 0.0

    def __enter__(self) -> Member:
        refuse_missing(self.topics, descriptions(self.settings, connected(self.settings), self.topics))
        self.consumer = Consumer(self.config)
        self.consumer.subscribe(self.topics, on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()  # leaves the group at once, through on_revoke

    def __iter__(self) -> Iterator[Record]:
        """Records, until `stop`. One is done when the next is asked for."""
        while not self.stopped:
            if (record := self.take()) is None:
                continue
            if self.before:
                self.done(record)
                if not self.commit(wait=True):
                    self.put_back(record)
                    continue
            yield record
            self.done(record)

    def put_back(self, record: Record) -> None:
        """Have a record come again that is not committed, and so may not be handed out."""
        share = record.topic, record.partition
        with self.lock:
            self.ready.pop(share, None)
        if share in self.out:
            self.consumer.seek(TopicPartition(*share, record.offset))

    @property
    def shares(self) -> list[Share]:
        """The partitions that this member has now."""
        return sorted(self.out)

    def stop(self) -> None:
        """End the loop once its record is done; from a signal handler too."""
        self.stopped = True

    def take(self, seconds: float = 0.5) -> Record | None:
        """The next record; None if none came in time. Call it often: it is also what keeps the member in its group."""
        if time.monotonic() >= self.commit_due:
            self.commit()
        message = self.consumer.poll(min(seconds, 0.05) if self.hold() else seconds)
        if self.connection.refused:
            raise BrokerRefused(self.connection.refused)
        if message is None:
            return None
        if error := message.error():
            self.connection.answered(error)
            if error.code() == KafkaError._MAX_POLL_EXCEEDED:
                log.warning("a record took longer than max.poll.interval.ms, so its partition is another's", group=self.group)
            elif error.code() not in AWAY:
                raise KafkaException(error)
            return None
        self.connection.answered(None)
        found = record(message)
        with self.lock:
            if (queue := self.out.get((found.topic, found.partition))) is None:
                return None  # of a partition that was given away meanwhile
            queue[found.offset] = None
        return found

    def done(self, record: Record) -> None:
        """Say that a record is processed. Of a partition that is another's by now it says nothing."""
        share = record.topic, record.partition
        with self.lock:
            queue, finished = self.out.get(share), self.finished.get(share)
            if queue is None or finished is None or record.offset not in queue:
                return
            finished.add(record.offset)
            while queue and (first := next(iter(queue))) in finished:
                self.ready[share] = first + 1
                finished.remove(first)
                del queue[first]

    def commit(self, wait: bool = False) -> bool:
        """Commit what is done, which also happens by itself. Without `wait` it is under way when this returns; with it, returns
        whether Kafka took it."""
        self.commit_due = time.monotonic() + COMMIT_EVERY
        with self.lock:
            upto, self.ready = self.ready, {}
        if not upto:
            return True
        places = [TopicPartition(topic, partition, offset) for (topic, partition), offset in upto.items()]
        try:
            if wait:
                self.consumer.commit(offsets=places, asynchronous=False)
            else:
                self.consumer.commit(offsets=places)
        except KafkaException as error:
            self.committed(error.args[0], places)
            return False
        return True

    def committed(self, error: KafkaError | None, places: list[TopicPartition]) -> None:
        """Kafka's answer. What it did not take is committed again with the next."""
        if error is None:
            return
        log.warning("offsets are not committed, and will be tried again", group=self.group, because=error.str())
        with self.lock:
            for place in places:
                share = place.topic, place.partition
                if share in self.out:
                    self.ready[share] = max(place.offset, self.ready.get(share, 0))

    def seek(self, topic: str, to: Place) -> None:
        """Go on reading the partitions that this member has from somewhere else; what is out comes again or never.

        Raises `LookupError` for a topic of which it has none.
        """
        mine = [partition for name, partition in self.shares if name == topic]
        if not mine:
            raise LookupError(f"this member of group {self.group} has no partition of {topic} yet; take first, or say begin=")
        begin, _ = places(self.settings, topic, to)
        for partition in mine:
            with self.lock:
                self.out[topic, partition], self.finished[topic, partition] = OrderedDict(), set()
                self.ready[topic, partition] = begin[partition]
            self.consumer.seek(TopicPartition(topic, partition, begin[partition]))

    def hold(self) -> bool:
        """Whether the partitions are paused: from `most` records out, until half of them are done."""
        with self.lock:
            out = sum(map(len, self.out.values())) - sum(map(len, self.finished.values()))
        if not self.paused and out >= self.most:
            self.consumer.pause(self.consumer.assignment())
            self.paused = True
        elif self.paused and out <= self.most // 2:
            self.consumer.resume(self.consumer.assignment())
            self.paused = False
        return self.paused

    def on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for place in partitions:
            share = place.topic, place.partition
            if self.begin is not None and share not in self.begun:
                place.offset = places(self.settings, place.topic, self.begin)[0][place.partition]
            self.begun.add(share)
            with self.lock:
                self.out[share], self.finished[share] = OrderedDict(), set()
        (consumer.incremental_assign if self.cooperative else consumer.assign)(partitions)
        if self.paused and partitions:
            consumer.pause(partitions)  # as those that it has are, until `hold` has all of them go on
        if self.told_assigned and partitions:
            self.told_assigned([(place.topic, place.partition) for place in partitions])

    def on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        shares = [(place.topic, place.partition) for place in partitions]
        if self.told_revoked and shares:
            self.told_revoked(shares)
        self.commit(wait=True)
        self.forget(shares)

    def on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """They are another's already: nothing of them may be committed."""
        shares = [(place.topic, place.partition) for place in partitions]
        log.warning(
            "partitions are lost: Kafka was away, or this member silent, for too long", group=self.group, lost=len(shares)
        )
        self.forget(shares)
        if self.told_revoked and shares:
            self.told_revoked(shares)

    def forget(self, shares: Iterable[Share]) -> None:
        with self.lock:
            for share in shares:
                for known in (self.out, self.finished, self.ready):
                    known.pop(share, None)

    @property
    def cooperative(self) -> bool:
        return "cooperative" in self.config["partition.assignment.strategy"]


def seek(
    settings: Settings, group: str, topic: str, to: Place, partition: int | None = None
) -> dict[int, tuple[int | None, int]]:
    """Move a consumer group that has no members: by partition, the offset it had committed and the one it has now.

    Its next member begins there. Of one partition only, if said. Raises `GroupBusy` where it has members, `TopicMissing` (for
    a partition that is not there too), `BrokerAway`.
    """
    begin, _ = places(settings, topic, to)
    if partition is not None and partition not in begin:
        raise TopicMissing(f"topic {topic} has partitions {min(begin)} to {max(begin)}, and no partition {partition}")
    admin = connected(settings)
    if count := members(settings, admin, group):
        raise GroupBusy(f"group {group} has {count} member(s), and Kafka takes offsets from them alone; end them, then seek")
    before = group_offsets(settings, group, topic)
    wanted = {p: offset for p, offset in begin.items() if partition in (None, p)}
    commit_group(settings, group, {(topic, p): offset for p, offset in wanted.items()})
    return {p: (before.get(p), offset) for p, offset in wanted.items()}


def members(settings: Settings, admin: AdminClient, group: str) -> int:
    """How many members a group has now; none for one that Kafka does not know."""
    try:
        found = answers(settings, admin.describe_consumer_groups([group], request_timeout=ANSWER))[group]
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return 0
        raise
    return len(found.members or ())


def group_offsets(settings: Settings, group: str, topic: str) -> dict[int, int]:
    """What a group has committed of a topic, by partition; empty for a group that Kafka does not know."""
    admin = connected(settings)
    asked = [ConsumerGroupTopicPartitions(group)]
    found = answers(settings, admin.list_consumer_group_offsets(asked, request_timeout=ANSWER))[group]
    return {p.partition: p.offset for p in found.topic_partitions if p.topic == topic and p.offset >= 0}
