"""One frozen Settings, read from the environment (`TIDEMARK_…`) and from `.env`, with defaults that just work."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

from pydantic import field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where things are and how large they may be. Every field is the variable `TIDEMARK_<FIELD>`.

    Instants are UTC everywhere; `zone` only says where a business day begins and ends.
    """

    model_config = SettingsConfigDict(env_prefix="TIDEMARK_", env_file=".env", frozen=True, extra="ignore")

    home: Path = Path(".tidemark")
    """Everything that this machine keeps: lake, checkpoints, broker, jars, logs."""
    lake: Path | None = None
    """The Delta tables; `<home>/lake` unless said."""
    jars_dir: Path | None = None
    """The jars that Spark and the embedded broker load; `<home>/jars` unless said."""
    brokers: str = "127.0.0.1:19092"
    """Kafka's bootstrap servers. The embedded broker listens on the first of them."""
    controller_port: int = 19093
    """The embedded broker's KRaft controller, on loopback."""
    master: str = "local[2]"
    """Spark's master for the stream, settling and replays."""
    driver_memory: str = "1536m"
    zone: str = "UTC"
    """The business time zone: a name of the IANA database."""
    replication: int = 1
    """The replication factor of a topic that does not say its own."""
    trigger: str = "3 seconds"
    """How often a stream takes what has come."""
    batch_records: int = 200_000
    """The most records a micro-batch takes; a stream that is behind catches up in batches of this size."""
    compact_every: str = "1 minute"
    """How often the stream merges its own small files."""
    sweep_after: str = "1 day"
    """How old a folder that no table and no undecided run names must be before it is swept."""
    rollback_for: str = "14 days"
    """How long what a publication replaced is kept, so that it can be rolled back."""
    keep_records: str = "400 days"
    """How long the ledger, the verdicts and the records of runs are kept."""
    give_way_at: str = "30 seconds"
    """A settling or a replay waits between two chunks while a stream is behind by more than this."""
    chunk_records: int = 5_000_000
    """About how many records a settling or a replay computes at once; it resumes after the last chunk that was done."""
    query_rows: int = 10_000
    """The most rows that `tidemark query` returns."""
    query_seconds: int = 60
    """The longest that `tidemark query` runs."""

    @field_validator("zone")
    @classmethod
    def known_zone(cls, zone: str) -> str:
        if zone not in available_timezones():
            raise ValueError(f'"{zone}" is not a time zone of the IANA database; write one like "Europe/Berlin"')
        return zone

    @cached_property
    def lake_path(self) -> Path:
        return (self.lake or self.home / "lake").absolute()

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
