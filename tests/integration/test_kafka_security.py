"""A Kafka that demands TLS and a password: what the right settings do, and how each wrong one is refused by both clients.

One broker listens once in each way: `plain` in plain text, `safe` with TLS and SASL, `expired` and `other` likewise with a
certificate that has expired or names another host, `mutual` with TLS and a certificate of the client's.
"""

import base64
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from cryptography.hazmat.primitives import serialization

from tests.conftest import JARS, free_port
from tidemark import kafka, local
from tidemark.settings import Settings

USER = 'al"ice;'
CANARY = "9d41c7e2"
PASSWORD = f'it\'s "{CANARY}"\\n;${{env:HOME}} ='
LISTENERS = ("safe", "expired", "other", "mutual")


@dataclass(frozen=True)
class Kafka:
    """The broker: its address in each way, the files that speak to it, and settings that are right for `safe`."""

    ports: dict[str, int]
    folder: Path
    jars: Path

    def file(self, name: str) -> Path:
        return self.folder / name

    def settings(self, listener: str = "safe", **changes: Any) -> Settings:
        sasl: dict[str, Any] = {"kafka_protocol": "SASL_SSL", "kafka_user": USER, "kafka_password": PASSWORD}
        own = {"home": self.folder / "client", "jars_dir": self.jars, "kafka_ca": self.file("ca.pem")} | sasl
        if listener == "plain":
            own = {"home": self.folder / "client", "jars_dir": self.jars}
        return Settings(_env_file=None, **({"brokers": f"127.0.0.1:{self.ports[listener]}"} | own | changes))


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

    own = Settings(
        _env_file=None, home=folder / "broker", jars_dir=jars, brokers=f"127.0.0.1:{free_port()}", controller_port=free_port()
    )
    host, port = local.address(own)
    ports = {"plain": port} | {name: free_port() for name in LISTENERS}
    options = {
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://{host}:{own.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.type": "PEM",
        "listener.name.mutual.ssl.truststore.location": folder / "ca.pem",
    }
    for name, certificate in certificates.items():
        store = folder / f"{name}-broker.pem"
        store.write_bytes(pkcs8(certificate) + chain(certificate))
        options["listeners"] += f",{name.upper()}://{host}:{ports[name]}"
        options["advertised.listeners"] += f",{name.upper()}://{host}:{ports[name]}"
        options["listener.security.protocol.map"] += f",{name.upper()}:{'SSL' if name == 'mutual' else 'SASL_SSL'}"
        options[f"listener.name.{name}.ssl.keystore.type"] = "PEM"
        options[f"listener.name.{name}.ssl.keystore.location"] = store
        options[f"listener.name.{name}.sasl.enabled.mechanisms"] = "SCRAM-SHA-512,SCRAM-SHA-256"
        for mechanism in ("scram-sha-512", "scram-sha-256"):
            module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            options[f"listener.name.{name}.{mechanism}.sasl.jaas.config"] = module
    properties = own.home / "server.properties"
    logs = own.state / "logs"
    logs.mkdir(parents=True)
    (own.home / "log4j2.properties").write_text(local.log4j_properties(logs / "kafka.log"))
    properties.write_text(  # of two lines for one name Java takes the later
        local.server_properties(own, host, port, own.home / "data") + "".join(f"{n}={v}\n" for n, v in options.items())
    )
    command = [str(local.java()), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    command += [f"-Dlog4j2.configurationFile={own.home / 'log4j2.properties'}"]
    command += ["-cp", ":".join(map(str, local.broker_jars(own)))]
    local.format_storage(command, properties, logs / "broker.log")
    local.answering(own, local.start(own, local.BROKER, [*command, "kafka.Kafka", str(properties)]))
    admin = AdminClient(kafka.client_config(own))
    users = [
        UserScramCredentialUpsertion(USER, ScramCredentialInfo(m, 4096), PASSWORD.encode())
        for m in (ScramMechanism.SCRAM_SHA_512, ScramMechanism.SCRAM_SHA_256)
    ]
    for user in users:  # one at a time: Kafka refuses two changes of one user in a request
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result()
    yield Kafka(ports, folder, jars)
    local.stop_broker(own)
