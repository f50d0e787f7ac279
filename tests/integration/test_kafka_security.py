"""A Kafka that demands TLS and a password: what the right settings do, and how each wrong one is refused by both clients.

One broker listens once in each way: `plain` in plain text, `safe` with TLS and SASL, `brief` likewise but asking for the
password again every two seconds, `expired` and `other` with a certificate that has expired or names another host, `mutual` with
TLS and a certificate of the client's, `open` with SASL in plain text. `brief` also takes the user `plain` by PLAIN.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization
from pyspark.sql import DataFrame

from tidemark import __main__ as cli
from tidemark import kafka, local, model, query
from tidemark.functions import distinct, pane, position
from tidemark.kafka import BrokerRefused
from tidemark.local import BrokerFailed
from tidemark.model import Catalog, Topic, rollup
from tidemark.settings import Settings

USER = 'al"ice;'
CANARY = "9d41c7e2"
PASSWORD = f'it\'s "{CANARY}"\\n;${{env:HOME}} = // /* \t\n ß€'
LISTENERS = ("safe", "brief", "expired", "other", "mutual", "open")
NO_USER = {"kafka_protocol": "SSL", "kafka_user": None, "kafka_password": None}
SECONDS = 10.0
"""What a refusal may take at most; the broker is waited for three times as long."""


def declared(topic: str) -> Catalog:
    """One topic and its minutes."""
    events = Topic(topic, "name", 2, "name STRING NOT NULL, said_at TIMESTAMP NOT NULL", "said_at")

    @rollup(reads={"events": events}, key=("minute",), time="minute", merge={"seen": "distinct"})
    def minutes(events: DataFrame) -> DataFrame:
        return events.groupBy(pane("said_at", "1 minute").alias("minute")).agg(distinct(position()).alias("seen"))

    return model.catalog([type("talk", (), {"events": events, "minutes": minutes})])


def event(name: str) -> dict[str, str]:
    return {"name": name, "said_at": (datetime.now(UTC) - timedelta(minutes=1)).isoformat()}


@dataclass(frozen=True)
class Kafka:
    """The broker: its address in each way, the files that speak to it, and settings that are right for `safe`."""

    ports: dict[str, int]
    folder: Path
    jars: Path

    def file(self, name: str) -> Path:
        return self.folder / name

    def settings(self, listener: str = "safe", **changes: Any) -> Settings:
        own: dict[str, Any] = {"home": self.folder / "client", "jars_dir": self.jars}
        if listener != "plain":
            own |= {"kafka_protocol": "SASL_SSL", "kafka_ca": self.file("ca.pem"), "kafka_user": USER, "kafka_password": PASSWORD}
        return Settings(_env_file=None, **({"brokers": f"127.0.0.1:{self.ports[listener]}"} | own | changes))

    def admit(self, user: str) -> None:
        admin = AdminClient(kafka.client_config(self.settings("plain")))
        for mechanism in (ScramMechanism.SCRAM_SHA_512, ScramMechanism.SCRAM_SHA_256):  # Kafka takes one change of a user at once
            change = UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
            admin.alter_user_scram_credentials([change])[user].result()

    def expel(self, user: str) -> None:
        admin = AdminClient(kafka.client_config(self.settings("plain")))
        admin.alter_user_scram_credentials([UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512)])[user].result()


def free_ports(count: int) -> list[int]:
    with ExitStack() as probes:
        return [probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def pkcs8(certificate: trustme.LeafCert) -> bytes:
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), password=None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form)


def chain(certificate: trustme.LeafCert) -> bytes:
    return b"".join(part.bytes() for part in certificate.cert_chain_pems)


@pytest.fixture(scope="module")
def theirs(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    folder = tmp_path_factory.mktemp("theirs")
    ca, foreign, yesterday = trustme.CA(), trustme.CA(), datetime.now(UTC) - timedelta(days=1)
    certificates = {
        "safe": ca.issue_cert("127.0.0.1"),
        "brief": ca.issue_cert("127.0.0.1"),
        "expired": ca.issue_cert("127.0.0.1", not_before=yesterday - timedelta(days=1), not_after=yesterday),
        "other": ca.issue_cert("kafka.example"),
        "mutual": ca.issue_cert("127.0.0.1"),
    }
    ca.cert_pem.write_to_path(folder / "ca.pem")
    foreign.cert_pem.write_to_path(folder / "foreign.pem")
    for who, issuer in (("client", ca), ("stranger", foreign)):
        certificate = issuer.issue_cert("client.example")
        (folder / f"{who}.pem").write_bytes(chain(certificate))
        (folder / f"{who}.key").write_bytes(pkcs8(certificate))

    controller, port, *others = free_ports(2 + len(LISTENERS))
    host, ports = "127.0.0.1", {"plain": port, **dict(zip(LISTENERS, others, strict=True))}
    own = Settings(_env_file=None, home=folder / "broker", jars_dir=jars, brokers=f"{host}:{port}", controller_port=controller)
    options = {
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://{host}:{own.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.name.brief.connections.max.reauth.ms": 2000,
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.type": "PEM",
        "listener.name.mutual.ssl.truststore.location": folder / "ca.pem",
    }
    for name in LISTENERS:
        options["listeners"] += f",{name.upper()}://{host}:{ports[name]}"
        options["advertised.listeners"] += f",{name.upper()}://{host}:{ports[name]}"
        protocol = {"mutual": "SSL", "open": "SASL_PLAINTEXT"}.get(name, "SASL_SSL")
        options["listener.security.protocol.map"] += f",{name.upper()}:{protocol}"
        if certificate := certificates.get(name):
            store = folder / f"{name}-broker.pem"
            store.write_bytes(pkcs8(certificate) + chain(certificate))
            options[f"listener.name.{name}.ssl.keystore.type"] = "PEM"
            options[f"listener.name.{name}.ssl.keystore.location"] = store
        options[f"listener.name.{name}.sasl.enabled.mechanisms"] = "SCRAM-SHA-512,SCRAM-SHA-256"
        for mechanism in ("scram-sha-512", "scram-sha-256"):
            module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            options[f"listener.name.{name}.{mechanism}.sasl.jaas.config"] = module
    plain = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_plain="{CANARY}";'
    options["listener.name.brief.sasl.enabled.mechanisms"] += ",PLAIN"
    options["listener.name.brief.plain.sasl.jaas.config"] = plain
    properties = own.home / "server.properties"
    logs = own.state / "logs"
    logs.mkdir(parents=True)
    (own.home / "log4j2.properties").write_text(local.log4j_properties(logs / "kafka.log"))
    properties.write_text(  # of two lines for one name Java takes the later
        local.server_properties(own, host, port, own.home / "data") + "".join(f"{n}={v}\n" for n, v in options.items())
    )
    command = local.broker_command(own, own.home)
    local.format_storage(command, properties, logs / "broker.log", local.cluster_id())
    local.answering(own, local.start(own, local.BROKER, [*command, "kafka.Kafka", str(properties)]))
    theirs = Kafka(ports, folder, jars)
    theirs.admit(USER)
    yield theirs
    local.stop_broker(own)


def batch(spark: Any, settings: Settings, topic: str, seconds: int = 3) -> list[tuple[int, bytes]]:
    """A topic's records as Spark reads them; a broker that refuses is waited for so many seconds."""
    patience = {"kafka.request.timeout.ms": f"{seconds - 1}000", "kafka.default.api.timeout.ms": f"{seconds}000"}
    patience["fetchOffset.numRetries"] = "1"
    source = spark.read.format("kafka").options(**(kafka.spark_options(settings) | patience | {"subscribe": topic})).load()
    return [(r["partition"], bytes(r["value"])) for r in source.select("partition", "value").collect()]


@pytest.fixture(scope="module")
def filled(theirs: Kafka) -> str:
    """A topic with one event, put there in plain text."""
    plain, topic = theirs.settings("plain"), declared("filled").topics["filled"]
    kafka.apply(plain, [topic])
    assert kafka.produce(plain, topic, [event("here")]).complete
    return topic.name


@pytest.fixture(scope="module")
def said_by_java(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the session's JVM logs, in a file too: its own stderr is what pytest's was when it began."""
    file, log4j = tmp_path_factory.mktemp("java") / "log", spark._jvm.org.apache.logging.log4j
    appender = log4j.core.appender.FileAppender.newBuilder().setName("said").withFileName(str(file)).build()
    appender.start()
    log4j.LogManager.getContext(False).getRootLogger().addAppender(appender)
    log4j.LogManager.getLogger("org.apache.kafka.clients").error("it is heard")
    assert file.read_text() == "it is heard\n"
    return file


# ---- the right settings


@pytest.mark.parametrize(
    "way", ["SCRAM-SHA-512", pytest.param("SCRAM-SHA-256", marks=pytest.mark.long), "PLAIN", "SASL_PLAINTEXT", "mutual TLS"]
)
def test_right_settings_do_everything_by_both_clients(
    way: str, theirs: Kafka, spark: Any, topic_name: str, capfd: Any, said_by_java: Path
) -> None:
    if way == "mutual TLS":
        files = {"kafka_certificate": theirs.file("client.pem"), "kafka_key": theirs.file("client.key")}
        settings = theirs.settings("mutual", **NO_USER, **files)
    elif way == "PLAIN":
        settings = theirs.settings("brief", kafka_mechanism=way, kafka_user="plain", kafka_password=CANARY)
    elif way == "SASL_PLAINTEXT":
        settings = theirs.settings("open", kafka_protocol=way, kafka_ca=None)
    else:
        settings = theirs.settings(kafka_mechanism=way)
    topic = declared(topic_name).topics[topic_name]
    assert [c.what for c in kafka.apply(settings, [topic])] == ["created"]
    assert kafka.produce(settings, topic, [event("a"), event("b"), event("c")]).complete
    assert sum(kafka.offsets(settings, [topic_name], "latest")[topic_name].values()) == 3
    records = sorted((r.partition, r.value) for r in kafka.consume(settings, topic_name, "earliest"))
    assert len(records) == 3
    assert sorted(batch(spark, settings, topic_name, seconds=30)) == records
    stream = spark.readStream.format("kafka").options(**(kafka.spark_options(settings) | {"subscribe": topic_name})).load()
    plan = stream._jdf.queryExecution().analyzed().verboseStringWithSuffix(1000)  # every option of the source is in it
    assert "kafka.security.protocol" in plan
    assert not secrets_in(plan + "".join(capfd.readouterr()) + said_by_java.read_text(), theirs)


@pytest.mark.long
def test_stream_reads_and_ends_at_once_when_its_user_is_taken_away(
    theirs: Kafka, run: Any, topic_name: str, tmp_path: Path
) -> None:
    theirs.admit("leaver")
    changes = {"home": tmp_path, "trigger": "200 milliseconds", "driver_memory": "1g", "kafka_user": "leaver"}
    settings, catalog = theirs.settings(**changes), declared(topic_name)
    kafka.apply(settings, catalog.topics.values())
    assert kafka.produce(settings, catalog.topics[topic_name], [event("a"), event("b")]).complete
    stream = run(settings, {"topic": topic_name})
    stream.until(lambda: local.status(settings).get("progress", {}).get("records") == 2)
    assert query.query(settings, catalog, f"SELECT name FROM {topic_name} ORDER BY name").rows == [("a",), ("b",)]
    assert broker_of(run, settings) == "answers"

    theirs.expel("leaver")
    stream.ends(1, seconds=60)
    heartbeat = local.status(settings)["heartbeat"]
    assert (heartbeat["state"], heartbeat["error"]) == ("failed", refused_user(settings, "leaver"))
    assert broker_of(run, settings) == refused_user(settings, "leaver")
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        assert not secrets_in(file.read_text("latin-1"), theirs), file


@pytest.mark.long
def test_up_starts_a_stream_on_a_broker_that_asks_for_tls_and_a_password(theirs: Kafka, run: Any, tmp_path: Path) -> None:
    settings = theirs.settings(home=tmp_path, driver_memory="1g")
    tidemark(run, settings, "up")
    try:
        process = local.running(settings, "speed-main")
        assert process is not None and {p.name for p in local.processes(settings)} == {"speed-main", "speed-alarms"}
        deadline = time.monotonic() + 90
        while local.status(settings).get("heartbeat", {}).get("state") != "running":
            assert process.alive() and time.monotonic() < deadline, process.log.read_text()
            time.sleep(0.2)
    finally:
        tidemark(run, settings, "down")
    assert local.processes(settings) == []
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        assert not secrets_in(file.read_text("latin-1"), theirs), file


COMMAND = "import json, sys; from tidemark.__main__ import main; sys.argv = ['tidemark', *json.loads(sys.argv[1])[1]]; main()"


def tidemark(run: Any, settings: Settings, *argv: str) -> str:
    """A command of the platform in a process of its own: what it said."""
    process = run(settings, list(argv), program=COMMAND)
    process.ends(0)
    return process.said


def broker_of(run: Any, settings: Settings) -> str:
    """What `tidemark status --json` says of the broker; all that it says is kept in the home."""
    return json.loads(tidemark(run, settings, "status", "--json"))["broker"]


def refused_user(settings: Settings, user: str) -> str:
    return (
        f'Kafka at {settings.brokers} cannot be used: it does not accept the user "{user}" with this password by SCRAM-SHA-512; '
        "see TIDEMARK_KAFKA_USER, TIDEMARK_KAFKA_PASSWORD and TIDEMARK_KAFKA_MECHANISM"
    )


def secrets_in(text: str, theirs: Kafka) -> list[str]:
    """Which secrets a text holds, if only in part: the password's middle, a line of a private key."""
    keys = [line for name in ("client", "stranger") for line in theirs.file(f"{name}.key").read_text().splitlines()[1:-1]]
    return [secret for secret in (CANARY, *keys) if secret in text]


# ---- the wrong ones

SSL, SASL, SILENT = "SslAuthenticationException", "SaslAuthenticationException", "TimeoutException"


@pytest.mark.parametrize(
    ("listener", "changes", "sentence", "java"),
    [
        pytest.param(
            "safe", {"kafka_password": PASSWORD + "!"}, 'does not accept the user "al"ice;" with this', SASL, id="password"
        ),
        pytest.param("safe", {"kafka_user": "nobody"}, 'does not accept the user "nobody" with this', SASL, id="user"),
        pytest.param(
            "safe",
            {"kafka_mechanism": "PLAIN"},
            "does not know PLAIN, but SCRAM-SHA-512, SCRAM-SHA-256",
            "Unsupported",
            id="mechanism",
        ),
        pytest.param("safe", {"kafka_ca": "foreign.pem"}, "certificate does not go back to a trusted one", SSL, id="foreign CA"),
        pytest.param("safe", {"kafka_ca": None}, "(those that this system trusts)", SSL, id="no CA"),
        pytest.param("expired", {}, "the certificate that it shows as 127.0.0.1 has expired", SSL, id="expired"),
        pytest.param("other", {}, "its certificate is not made out to 127.0.0.1", SSL, id="wrong name"),
        pytest.param("mutual", NO_USER, "it asks for a client's certificate", SSL, id="no client certificate"),
        pytest.param(
            "mutual",
            NO_USER | {"kafka_certificate": "stranger.pem", "kafka_key": "stranger.key"},
            "does not accept the client's certificate",
            SSL,
            id="foreign client certificate",
        ),
        pytest.param(
            "safe",
            NO_USER | {"kafka_protocol": "PLAINTEXT", "kafka_ca": None},
            "it speaks TLS at",
            SILENT,
            id="plain text to TLS",
        ),
        pytest.param(
            "safe",
            {"kafka_protocol": "SASL_PLAINTEXT", "kafka_ca": None},
            "it speaks TLS at",
            SILENT,
            id="SASL in plain text to TLS",
        ),
        pytest.param("plain", {"kafka_ca": "ca.pem", **NO_USER}, "it speaks plain text at", SILENT, id="TLS to plain text"),
        pytest.param("safe", NO_USER, "it asks for a user at", SILENT, id="no user"),
        pytest.param(
            "plain",
            {"kafka_protocol": "SASL_PLAINTEXT", "kafka_user": USER, "kafka_password": PASSWORD},
            "it asks for no user at",
            "IllegalSaslState",
            id="user where none is asked",
        ),
    ],
)
def test_wrong_settings_are_refused_by_both_clients_and_the_sentence_says_why(
    listener: str,
    changes: dict[str, Any],
    sentence: str,
    java: str,
    theirs: Kafka,
    filled: str,
    spark: Any,
    capfd: Any,
    said_by_java: Path,
) -> None:
    files = {n: theirs.file(v) for n, v in changes.items() if n in ("kafka_ca", "kafka_certificate", "kafka_key") and v}
    settings = theirs.settings(listener, **(changes | files))
    began = time.monotonic()
    with pytest.raises(BrokerRefused, match=re.escape(sentence)) as refused:
        kafka.wait(settings, 3 * SECONDS)
    assert time.monotonic() - began < SECONDS

    with pytest.raises(Exception, match=rf"org.apache.kafka.common.errors.\w*{java}") as spark_says:
        batch(spark, settings, filled)
    assert kafka.refused_by_spark(settings, spark_says.value) == (None if java == SILENT else str(refused.value))
    assert not secrets_in(f"{refused.value} {spark_says.value} {''.join(capfd.readouterr())}", theirs)
    assert not secrets_in(said_by_java.read_text(), theirs)
    assert sum(kafka.offsets(theirs.settings("plain"), [filled], "latest")[filled].values()) == 1


def test_every_call_says_that_it_is_refused(theirs: Kafka, filled: str) -> None:
    settings, topic = theirs.settings(kafka_user="nobody"), declared(filled).topics[filled]
    for call in (
        lambda: kafka.apply(settings, [topic]),
        lambda: kafka.listing(settings, [topic]),
        lambda: kafka.topic_ids(settings, [filled]),
        lambda: kafka.offsets(settings, [filled], "latest"),
        lambda: kafka.produce(settings, topic, [event("never")]),
        lambda: kafka.consume(settings, filled, "earliest"),
    ):
        with pytest.raises(BrokerRefused) as refused:
            call()
        assert str(refused.value) == refused_user(settings, "nobody")


def test_producing_and_following_end_when_their_user_is_taken_away(theirs: Kafka, topic_name: str) -> None:
    theirs.admit("guest")
    settings, topic = theirs.settings("brief", kafka_user="guest"), declared(topic_name).topics[topic_name]
    kafka.apply(settings, [topic])
    followed = kafka.consume(settings, topic_name, "earliest", follow=True)

    def endless() -> Iterator[dict[str, str]]:
        while True:
            yield event("a")

    def expel_once(delivery: kafka.Delivery) -> None:
        if delivery.delivered and not expelled:
            expelled.append(next(followed))
            theirs.expel("guest")

    expelled: list[Any] = []
    delivery = kafka.produce(settings, topic, endless(), rate=20, progress=expel_once, patience=300)
    assert (delivery.sent, delivery.errors[0]) == (delivery.delivered + delivery.failed, refused_user(settings, "guest"))
    assert not delivery.complete
    with pytest.raises(BrokerRefused) as refused:
        for _record in followed:
            pass
    assert str(refused.value) == refused_user(settings, "guest")


def test_password_never_leaves_where_no_tls_answers(theirs: Kafka, spark: Any) -> None:
    """Whoever listens at the port hears nothing but the start of TLS and, once, the question which way Kafka speaks."""
    with listening() as (port, heard):
        settings = theirs.settings(brokers=f"127.0.0.1:{port}")
        with pytest.raises(ConnectionError):
            kafka.wait(settings, 1.0)
        by_hand = [said for said in heard if said[:1] != b"\x16"]
        assert by_hand and {said[4:] for said in by_hand} == {b"\x00\x11\x00\x01\x00\x00\x00\x07\xff\xff\x00\x0dSCRAM-SHA-512"}
        heard.clear()
        with pytest.raises(Exception, match="TimeoutException"):
            batch(spark, settings, "any")
        assert heard and {said[:1] for said in heard} == {b"\x16"}


@contextmanager
def listening() -> Iterator[tuple[int, list[bytes]]]:
    """A port that takes whatever is said first, answers nothing and hangs up; what was said."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    if said := connection.recv(4096):
                        heard.append(said)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


# ---- what stays as it was


def test_broker_is_not_started_where_the_settings_ask_for_tls(
    theirs: Kafka, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = theirs.settings(home=settings.home, brokers=settings.brokers)
    with pytest.raises(kafka.BrokerAway, match=r"no Kafka broker answers at \S+ \(waited 0.3 seconds\); see that it runs"):
        kafka.wait(nobody, 0.3)
    monkeypatch.setattr(kafka, "ANSWER", 0.3)
    with pytest.raises(BrokerFailed, match=r"none is started where TIDEMARK_KAFKA_PROTOCOL is SASL_SSL"):
        cli.bring_up(nobody, cli.Steps())
    assert local.processes(nobody) == []
