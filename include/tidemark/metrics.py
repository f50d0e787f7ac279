"""What a stream tells Prometheus and the usual lag tools: every metric with a sentence, its page, and its consumer group.

Nothing here raises into a batch, and nothing is read back: a stream whose port is taken, or whose group Kafka refuses, runs on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server

from tidemark import kafka
from tidemark.settings import Settings

log = structlog.get_logger()

AGAIN = 3600.0
"""Seconds after which the same offsets are committed again: Kafka forgets a group that is silent for a week."""
PAUSE = 60.0
"""Seconds that a group which Kafka refuses is left alone."""


@dataclass(frozen=True)
class Metric:
    """One metric. Each has the label `stream`, and `labels` beside it; one that `counts` begins at 0 with its process.

    What is counted by topic alone is there from the start on: of a series that comes later Prometheus sees no increase to its
    first value.
    """

    name: str
    sentence: str
    labels: tuple[str, ...] = ()
    counts: bool = False


LAG = Metric("tidemark_lag_records", "Records that Kafka holds and the ledger does not have yet.", ("topic", "partition"))
RATE = Metric("tidemark_records_per_second", "Records of the last batch, over the time since the batch before it ended.")
RECORDS = Metric("tidemark_records_total", "Records that this process has read, rejects included.", ("topic",), counts=True)
REJECTED = Metric("tidemark_rejected_total", "Records that this process did not accept.", ("topic",), counts=True)
REJECTS = Metric(
    "tidemark_rejects_total",
    "Records that this process did not accept, by the reason without the column it names.",
    ("topic", "reason"),
    counts=True,
)
COMMIT_AGE = Metric(
    "tidemark_commit_age_seconds", "Seconds since the last batch was entered into the ledger, or since the start of a new stream."
)
BATCH = Metric("tidemark_batch_seconds", "Seconds that the last batch took, from its records to the ledger.")
SET_ASIDE = Metric(
    "tidemark_set_aside",
    "1 for each rollup or view that is set aside, because its function raised, and for a topic whose event time gives none.",
    ("table",),
)
STREAM_TIME = Metric("tidemark_stream_time_seconds", "The latest event time that was read, in seconds since 1970.")
BROKER_AWAY = Metric("tidemark_broker_away", "1 while no Kafka broker answers and the stream waits for one, else 0.")

METRICS = (LAG, RATE, RECORDS, REJECTED, REJECTS, COMMIT_AGE, BATCH, SET_ASIDE, STREAM_TIME, BROKER_AWAY)
"""Every metric there is; `tests/test_metrics.py` holds the alert rules in docs/alerts.yml to it."""


def port(settings: Settings, stream: str, streams: Iterable[str], beside: Iterable[str] = ()) -> int:
    """Where a stream's page is: `main` at `metrics_port`, the others one further each by name, those `beside` the declared ones
    after them; 0 where it is off."""
    known = ["main", *sorted({*streams} - {"main"})]
    known += sorted({*beside, stream} - {*known})
    return settings.metrics_port and settings.metrics_port + known.index(stream)


class Metrics:
    """One stream's numbers as they are now, and whom they are told."""

    def __init__(
        self, settings: Settings, stream: str, streams: Iterable[str], topics: Iterable[str] = (), beside: Iterable[str] = ()
    ) -> None:
        disable_created_metrics()  # they would be a second series for each that counts
        self.settings, self.stream, self.port = settings, stream, port(settings, stream, streams, beside)
        self.group = f"tidemark-{stream}"
        self.registry = CollectorRegistry()
        self.families = {
            m: (Counter if m.counts else Gauge)(m.name, m.sentence, ("stream", *m.labels), registry=self.registry)
            for m in METRICS
        }
        for topic in topics:
            for metric in (RECORDS, REJECTED):
                self.of(metric, topic)
        self.seq = -1
        self.told: Mapping[tuple[str, int], int] = {}
        self.quiet_until, self.refused = 0.0, False

    def of(self, metric: Metric, *labels: object) -> Any:
        """The one series of a metric with these labels: prometheus_client's Gauge or Counter."""
        return self.families[metric].labels(self.stream, *map(str, labels))

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serve the page while the block runs. A port that cannot be had is a warning, and the stream goes without a page."""
        server = None
        if self.port:
            try:
                server, _ = start_http_server(self.port, self.settings.metrics_host, self.registry)
            except (OSError, OverflowError) as error:
                log.warning(
                    "metrics are not served, the stream runs without; end what listens there, or choose another port with "
                    "TIDEMARK_METRICS_PORT, and start the stream again",
                    stream=self.stream,
                    address=f"{self.settings.metrics_host}:{self.port}",
                    because=str(error),
                )
        try:
            yield
        finally:
            if server:
                server.shutdown()
                server.server_close()

    def batch(self, progress: Mapping[str, Any], counts: Sequence[Mapping[str, Any]], lag: Mapping[tuple[str, int], int]) -> None:
        """What a batch came to. One that is tried again, after the broker was away, counts once."""
        if progress["seq"] > self.seq:
            self.seq = progress["seq"]
            for one in counts:
                self.of(RECORDS, one["topic"]).inc(one["records"])
                self.of(REJECTED, one["topic"]).inc(sum(one["reasons"].values()))
                for reason, rejects in one["reasons"].items():
                    self.of(REJECTS, one["topic"], reason).inc(rejects)
        self.of(RATE).set(progress["records_per_second"])
        self.of(BATCH).set(progress["seconds"])
        if progress["stream_time"]:
            self.of(STREAM_TIME).set(datetime.fromisoformat(progress["stream_time"]).timestamp())
        self.committed(datetime.fromisoformat(progress["finished_at"]))
        self.lags(lag)

    def committed(self, at: datetime) -> None:
        self.of(COMMIT_AGE).set_function(lambda: time.time() - at.timestamp())

    def lags(self, lag: Mapping[tuple[str, int], int]) -> None:
        for (topic, partition), records in lag.items():
            self.of(LAG, topic, partition).set(records)

    # ---- beside the batches

    def look(self, topics: Sequence[str], upto: Mapping[tuple[str, int], int], seconds: float = 2) -> None:
        """Ask Kafka how far it is: between two batches, and in a long one, the lag grows and no batch says so."""
        with suppress(kafka.BrokerAway):  # the stream itself says that it is away
            ends = kafka.offsets(self.settings, topics, "latest", seconds)
            self.lags({(t, p): max(0, end - upto.get((t, p), 0)) for t, parts in ends.items() for p, end in parts.items()})

    def tell(self, upto: Mapping[tuple[str, int], int], seconds: float = 2) -> None:
        """Commit offsets to the consumer group `tidemark-<stream>` unless it was told the same within the hour.

        Kafka not taking them is a warning, said once, and tried again a minute later.
        """
        if not upto or (time.monotonic() < self.quiet_until and (self.refused or upto == self.told)):
            return
        try:
            kafka.commit_group(self.settings, self.group, upto, seconds)
        except Exception as error:
            if not self.refused:
                because = " ".join(str(error).split())[:500]
                log.warning("offsets are not told to the consumer group, the stream goes on", group=self.group, because=because)
            self.refused, self.quiet_until = True, time.monotonic() + PAUSE
            return
        self.refused, self.told, self.quiet_until = False, dict(upto), time.monotonic() + AGAIN
