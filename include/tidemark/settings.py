"""One frozen Settings, read from the environment (`TIDEMARK_…`) and from `.env`, with defaults that just work.

Another file than `.env` is read where the variable `TIDEMARK_ENV_FILE` names one: the tests have an empty one.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from functools import cached_property
from pathlib import Path
from typing import Literal, Self
from zoneinfo import ZoneInfo, available_timezones

from dotenv.parser import parse_stream
from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from tidemark.model import NAME, duration

ROOT = Path(__file__).parents[2]
"""The checkout: `dags`, `plugins` and `spark_apps` lie beside `include`."""
logging.getLogger("dotenv.main").setLevel(logging.ERROR)  # of a line that it passes over, which is refused here
PLATFORMS = ("dingtalk", "wecom")
"""Whose robots are known."""
LEAST_HEAP = 480
"""In MiB: Spark refuses to begin in less than 450 of what the JVM counts, which is less than it was given."""


class Settings(BaseSettings):
    """Where things are and how large they may be. Every field is the variable `TIDEMARK_<FIELD>`.

    Instants are UTC everywhere; `zone` only says where a business day begins and ends.
    """

    # An error must not show what it was given: the password is among it.
    model_config = SettingsConfigDict(
        env_prefix="TIDEMARK_",
        env_file=os.environ.get("TIDEMARK_ENV_FILE", ".env"),
        frozen=True,
        extra="forbid",
        dotenv_filtering="match_prefix",  # `.env` may say more than ours: docker compose reads it too
        hide_input_in_errors=True,
    )

    home: Path = Path(".tidemark")
    """Everything that this machine keeps: lake, checkpoints, broker, jars, logs."""
    lake: Path | None = None
    """The Delta tables; `<home>/lake` unless said."""
    jars_dir: Path | None = None
    """The jars that Spark and the embedded broker load; `<home>/jars` unless said."""
    brokers: str = "127.0.0.1:19092"
    """Kafka's bootstrap servers. The embedded broker listens on the first of them."""
    controller_port: int = Field(default=19093, ge=1, le=65535)
    """The embedded broker's KRaft controller, on loopback."""
    kafka_protocol: Literal["PLAINTEXT", "SSL", "SASL_SSL", "SASL_PLAINTEXT"] = "PLAINTEXT"
    """How every client speaks to Kafka; none ever tries another way. SSL is TLS, SASL asks for a user and a password.

    SASL_PLAINTEXT leaves the events readable on the wire; it is used only where it is written here.
    The embedded broker speaks PLAINTEXT on loopback; with another protocol none is started.
    """
    kafka_ca: Path | None = None
    """The certificates (PEM) that the broker's must go back to; those that the system trusts unless said."""
    kafka_certificate: Path | None = None
    """The client's own certificate and its chain (PEM), for a broker that asks for one (mutual TLS)."""
    kafka_key: Path | None = None
    """The private key of `kafka_certificate` (PEM, PKCS #8, without a pass phrase)."""
    kafka_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    """How SASL proves the password. PLAIN sends it, so it needs SASL_SSL."""
    kafka_user: str | None = None
    """The user of SASL."""
    kafka_password: SecretStr | None = None
    """The user's password; no message, log or file of the platform shows it."""
    master: str = "local[2]"
    """Spark's master for the stream, settling and replays."""
    driver_memory: str = "1408m"
    """The largest heap of a Spark process, on a cluster of an executor too."""
    driver_memories: str = "alarms=768m"
    """Which streams have another heap than `driver_memory` says, parted by commas: `NAME=768m`."""
    driver_host: str = "127.0.0.1"
    """The address at which the executors of a cluster reach this process; with a local master there are none."""
    cluster_cores: int = Field(default=2, ge=1)
    """The most cores that one Spark process takes of a cluster; without a limit the first would take all for itself."""
    zone: str = "UTC"
    """The business time zone: a name of the IANA database."""
    replication: int = Field(default=1, ge=1)
    """The replication factor of a topic that does not say its own."""
    trigger: str = "3 seconds"
    """How often a stream takes what has come."""
    triggers: str = "alarms=2 seconds"
    """Which streams take it more or less often than `trigger` says, parted by commas: `NAME=2 seconds`."""
    batch_records: int = Field(default=200_000, ge=1)
    """The most records a micro-batch takes; a stream that is behind catches up in batches of this size."""
    compact_every: str = "1 minute"
    """How often the stream merges its own small files."""
    sweep_after: str = "1 day"
    """How old a folder that no table and no undecided run names must be before it is swept."""
    rollback_for: str = "14 days"
    """How long what a publication replaced is kept, so that it can be rolled back."""
    keep_records: str = "400 days"
    """How long the verdicts and the records of runs are kept; the ledger at least so long, and as long as a log."""
    give_way_at: str = "30 seconds"
    """A settling or a replay waits between two chunks while a stream is behind by more than this."""
    chunk_records: int = Field(default=5_000_000, ge=1)
    """About how many records a settling or a replay computes at once; it resumes after the last chunk that was done."""
    stream_backend: Literal["process", "service"] = "process"
    """Who starts a stream: `process`, Airflow or `tidemark up` here; `service`, a container that restarts it by itself."""
    watch_window: str = "1 hour"
    """How long one run of the DAG `speed_layer` watches before the next takes over."""
    stale_after: str = "60 seconds"
    """A stream that lives and has not beaten for so long is killed and started again."""
    late_after: str = "5 minutes"
    """Someone is told of a stream that needs longer than this for what it has not read yet."""
    rejects_share: float = Field(default=0.05, ge=0, le=1)
    """Someone is told when a larger share of the records of ten minutes is rejected, and more than a hundred."""
    airflow_port: int = Field(default=18080, ge=1, le=65535)
    """Airflow's page and API, on loopback."""
    airflow_database: SecretStr | None = None
    """SQLAlchemy's URL of Airflow's database, like postgresql+psycopg2://user:password@host/name; SQLite unless said."""
    nightly_after: str = "10 minutes"
    """How long after a day's end, and after what its views look ahead, late records of it are waited for."""
    nightly_patience: str = "6 hours"
    """How long a night waits after that for the stream to have read its day before it fails."""
    metrics_port: int = Field(default=19100, ge=0, le=65535)
    """Where the stream `main` serves its metrics, the others each one port further, in the order of their names; 0 is off."""
    metrics_host: str = "127.0.0.1"
    """The address that the metrics are served at; in a container, where loopback is the container's own, 0.0.0.0."""
    notify_to: str = ""
    """Which robots the platform's own alarms and reports go to, parted by commas: `dingtalk`, `wecom`."""
    notify_hosts: str = "oapi.dingtalk.com,qyapi.weixin.qq.com"
    """The hosts that a web hook may name, parted by commas, with a port where it is not 443; always by https."""
    notify_ca: Path | None = None
    """The certificates (PEM) that a host's must go back to; those that the system trusts unless said."""
    notify_rate: int = Field(default=20, ge=1)
    """The most messages that a robot says in a minute; what is more goes into one."""
    notify_patience: str = "15 minutes"
    """How long a message is tried again that a robot cannot say now; then it goes to the dead letters."""
    notify_connections: bool = False
    """The web hooks are Airflow's connections `tidemark_dingtalk` and `tidemark_wecom` where none is said here."""
    dingtalk_webhook: SecretStr | None = None
    """The address of DingTalk's custom robot, its token included; only `tidemark notify` needs it."""
    dingtalk_secret: SecretStr | None = None
    """The secret that its messages are signed with, if it asks for that."""
    dingtalk_keyword: str | None = None
    """The word that each of its messages must hold, if it asks for one."""
    wecom_webhook: SecretStr | None = None
    """The address of WeCom's robot, its key included; only `tidemark notify` needs it."""
    query_rows: int = Field(default=10_000, ge=0)
    """The most rows that `tidemark query` returns."""
    query_seconds: int = Field(default=60, ge=1)
    """The longest that `tidemark query` runs."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Raises `SettingsError` for a line of `.env` that cannot be read, and does not show it: it may be a secret's."""
        file = Path(getattr(named["dotenv_settings"], "env_file", None) or os.devnull)
        if file.is_file():
            with file.open(encoding="utf-8") as text:
                if wrong := next((said.original for said in parse_stream(text) if said.error), None):
                    line = wrong.line + len(wrong.string.partition(wrong.string.lstrip())[0].splitlines())
                    raise SettingsError(f"line {line} is not NAME=value with its quotes closed")
        return super().settings_customise_sources(settings_cls, *sources, **named)

    @field_validator("home", "lake", "jars_dir")
    @classmethod
    def is_a_folder_of_its_own(cls, said: Path | None) -> Path | None:
        folder = said and Path(os.path.expanduser(said))  # noqa: PTH111 - `.env` is read by no shell, and a Path's own raises
        if folder and os.path.exists(folder) and not os.path.isdir(folder):  # noqa: PTH110, PTH112 - the same
            raise ValueError("there is a file; give a folder, which need not be there yet")
        if folder and folder.is_symlink() and not os.path.exists(folder):  # noqa: PTH110 - the same
            raise ValueError(f"it is a link to {folder.readlink()}, which is not there; mount its disk, or make it")
        if folder and folder.resolve() == ROOT.resolve():  # whose docs would be taken for Data Docs, and forgotten with them
            raise ValueError("tidemark itself is there; give a folder of its own")
        return folder

    @field_validator("brokers")
    @classmethod
    def are_addresses(cls, said: str) -> str:
        for address in said.split(","):
            found = re.fullmatch(r"\s*(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d+)\s*", address)
            if not found or not 0 < int(found[1]) < 65536:
                raise ValueError(
                    f'"{address}" is no address of a broker; write it like 127.0.0.1:19092, several parted by commas'
                )
        return said

    @field_validator("zone")
    @classmethod
    def known_zone(cls, zone: str) -> str:
        if zone not in available_timezones():
            raise ValueError(f'"{zone}" is not a time zone of the IANA database; write one like "Europe/Berlin"')
        return zone

    @field_validator("triggers", "driver_memories")
    @classmethod
    def said_by_stream(cls, said: str) -> str:
        by_stream(said)
        return said

    @field_validator("trigger", "triggers")
    @classmethod
    def is_an_interval_of_sparks(cls, said: str, field: ValidationInfo) -> str:
        for trigger in [said] if field.field_name == "trigger" else by_stream(said).values():
            if not re.fullmatch(r"\d+ (millisecond|second|minute|hour|day)s?", trigger):
                raise ValueError(f'"{trigger}" is no trigger; write it like 3 seconds, 200 milliseconds or 1 minute')
        return said

    @field_validator("driver_memory", "driver_memories")
    @classmethod
    def is_a_heap(cls, said: str, field: ValidationInfo) -> str:
        for size in [said] if field.field_name == "driver_memory" else by_stream(said).values():
            if not re.fullmatch(r"\d+[kmgt]", size, re.IGNORECASE):
                raise ValueError(f'"{size}" is not the size of a heap; write it like 1408m or 4g')
            if int(size[:-1]) * 1024 ** ("kmgt".index(size[-1].lower()) + 1) < LEAST_HEAP * 1024**2:
                raise ValueError(f'Spark needs a heap of {LEAST_HEAP}m at the least, and "{size}" is less')
        return said

    @field_validator("master")
    @classmethod
    def known_master(cls, master: str) -> str:
        if not re.fullmatch(r"local(\[.+\])?|(spark|k8s)://.+|yarn", master):
            raise ValueError(f'"{master}" is no master of Spark; write it like local[2] or spark://host:7077')
        return master

    @field_validator(
        *("compact_every", "sweep_after", "rollback_for", "keep_records", "give_way_at", "watch_window", "stale_after"),
        *("late_after", "nightly_after", "nightly_patience", "notify_patience"),
    )
    @classmethod
    def is_a_length_of_time(cls, said: str) -> str:
        # Not `trigger`, which Spark reads: it knows milliseconds too.
        duration(said)
        return said

    @field_validator("notify_to")
    @classmethod
    def known_platforms(cls, platforms: str) -> str:
        for platform in filter(None, map(str.strip, platforms.split(","))):
            if platform not in PLATFORMS:
                raise ValueError(f'there is no robot "{platform}"; there are {", ".join(PLATFORMS)}')
        return platforms

    @field_validator(
        *("kafka_ca", "kafka_certificate", "kafka_key", "kafka_user", "kafka_password", "airflow_database", "notify_ca"),
        *("dingtalk_webhook", "dingtalk_secret", "dingtalk_keyword", "wecom_webhook", "home", "lake", "jars_dir"),
        mode="before",
    )
    @classmethod
    def empty_is_not_given(cls, value: object, field: ValidationInfo) -> object:
        given = value.get_secret_value() if isinstance(value, SecretStr) else value
        return cls.model_fields[str(field.field_name)].default if given == "" else value

    @field_validator("kafka_ca", "kafka_certificate", "notify_ca")
    @classmethod
    def holds_certificates(cls, path: Path | None) -> Path | None:
        if path and "-----BEGIN CERTIFICATE-----" not in text_of(path):
            raise ValueError("the file holds no certificate in PEM; give one with -----BEGIN CERTIFICATE----- in it")
        return path

    @field_validator("kafka_key")
    @classmethod
    def holds_a_key(cls, path: Path | None) -> Path | None:
        # Java reads PKCS #8 alone, and librdkafka would ask for a pass phrase that nobody is there to give.
        if path and "-----BEGIN PRIVATE KEY-----" not in text_of(path):
            raise ValueError(
                "the file holds no private key in PKCS #8 (PEM) without a pass phrase; "
                f"make one with: openssl pkcs8 -topk8 -nocrypt -in {path} -out {path}.pkcs8"
            )
        return path

    @model_validator(mode="after")
    def places_are_read_as_one_path(self) -> Self:
        """Java's class path, Kafka's list of folders and Spark's list of jars part a path at these signs, or read more in it."""
        for name, said in (("TIDEMARK_HOME", self.home), ("TIDEMARK_JARS_DIR", self.jars_dir)):
            place = str(said.absolute()) if said else ""
            if found := re.search(r'[,:"#*?{}\[\]]', place):
                raise ValueError(
                    f"Java, Spark or Kafka takes {place} for another path, for {found[0]}; set {name} to another folder"
                )
        return self

    @model_validator(mode="after")
    def lake_is_found_where_it_is(self) -> Self:
        """Delta makes a URL of a table's path, with these signs of none or of another one: what was written is not there."""
        if found := re.search(r"%[0-9A-Fa-f]{2}|[\\\t\n\r]", str(self.lake_path)):
            raise ValueError(
                f"the lake would be {self.lake_path}, and no table is found below a path with {found[0]!r} in it; "
                "set TIDEMARK_LAKE to another folder"
            )
        return self

    @model_validator(mode="after")
    def kafka_is_consistent(self) -> Self:
        """Refuse what contradicts itself, so that nobody believes a connection safer than it is."""
        protocol, tls, sasl = self.kafka_protocol, self.kafka_protocol.endswith("SSL"), self.kafka_protocol.startswith("SASL")
        for name in ("kafka_user", "kafka_password"):
            given, variable = getattr(self, name) is not None, f"TIDEMARK_{name.upper()}"
            if sasl and not given:
                raise ValueError(f"TIDEMARK_KAFKA_PROTOCOL is {protocol}, and {variable} is not set; set it")
            if given and not sasl:
                raise ValueError(
                    f"{variable} is set, and TIDEMARK_KAFKA_PROTOCOL is {protocol}, which has no user; "
                    "write SASL_SSL there, or unset it"
                )
        for name in ("kafka_ca", "kafka_certificate", "kafka_key"):
            if getattr(self, name) is not None and not tls:
                raise ValueError(
                    f"TIDEMARK_{name.upper()} is set, and TIDEMARK_KAFKA_PROTOCOL is {protocol}, which has no TLS; "
                    "write SSL or SASL_SSL there, or unset it"
                )
        for name, other in (("kafka_certificate", "kafka_key"), ("kafka_key", "kafka_certificate")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(
                    f"TIDEMARK_{name.upper()} is set, and TIDEMARK_{other.upper()} is not; a certificate and its key go together"
                )
        if self.kafka_certificate and self.kafka_key:
            try:
                ssl.create_default_context().load_cert_chain(self.kafka_certificate, self.kafka_key)
            except ssl.SSLError as error:
                raise ValueError(
                    f"TIDEMARK_KAFKA_KEY={self.kafka_key} is not the key of TIDEMARK_KAFKA_CERTIFICATE="
                    f"{self.kafka_certificate} ({error.reason}); give the two that belong together"
                ) from None
        if protocol == "SASL_PLAINTEXT" and self.kafka_mechanism == "PLAIN":
            raise ValueError(
                "TIDEMARK_KAFKA_MECHANISM=PLAIN with TIDEMARK_KAFKA_PROTOCOL=SASL_PLAINTEXT would send the password readable "
                "to all; use SASL_SSL, or a SCRAM mechanism"
            )
        return self

    def of(self, stream: str) -> Settings:
        """These settings as one stream has them: with its own trigger and heap, where they are said."""
        trigger, memory = by_stream(self.triggers), by_stream(self.driver_memories)
        own = {"trigger": trigger.get(stream, self.trigger), "driver_memory": memory.get(stream, self.driver_memory)}
        return self.model_copy(update=own)

    @cached_property
    def lake_path(self) -> Path:
        return (self.lake or self.home / "lake").absolute()

    @cached_property
    def told(self) -> tuple[str, ...]:
        """The platforms of `notify_to`, each once."""
        return tuple(dict.fromkeys(filter(None, map(str.strip, self.notify_to.split(",")))))

    @cached_property
    def tz(self) -> ZoneInfo:
        return ZoneInfo(self.zone)

    @cached_property
    def checkpoints(self) -> Path:
        return (self.home / "checkpoints").absolute()

    @cached_property
    def jars(self) -> Path:
        return (self.jars_dir or self.home / "jars").absolute()

    @cached_property
    def state(self) -> Path:
        """`progress.json`, `heartbeat.json`, leases, process ids and logs, a folder each stream."""
        return (self.home / "state").absolute()


def by_stream(said: str) -> dict[str, str]:
    """`"alarms=1 second, orders=10 seconds"` by stream. Raises `ValueError` with a sentence."""
    pairs = [part.partition("=") for part in filter(None, map(str.strip, said.split(",")))]
    for name, equals, value in pairs:
        if not (NAME.fullmatch(name.strip()) and equals and value.strip()):
            raise ValueError(f'"{name}{equals}{value}" is not STREAM=VALUE; write it like alarms=1 second, parted by commas')
    return {name.strip(): value.strip() for name, _, value in pairs}


def text_of(path: Path) -> str:
    """A PEM file's text. Raises `ValueError` with a sentence that names the file."""
    try:
        return path.read_text("latin-1")
    except OSError as error:
        raise ValueError(f"the file cannot be read ({error.strerror}); give one that is there") from None
