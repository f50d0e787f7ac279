"""A producer that keeps a ledger outside the platform: page views, and a line on disk for each that Kafka has acknowledged."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from confluent_kafka import KafkaError, Message, Producer

from tidemark import kafka
from tidemark.pipelines.traffic import PAGE_VIEWS
from tidemark.settings import Settings


def witness(
    ledger: Annotated[Path, typer.Option(help="Where the lines are added.")],
    rate: Annotated[float, typer.Option()],
    seed: Annotated[int, typer.Option()],
    patience: Annotated[float, typer.Option(help="Seconds until an event that is not acknowledged has failed.")] = 300,
) -> None:
    """Send until SIGTERM; each line was written and synced in the delivery report of its event, and says where it lies."""
    random, recent, ended = Random(f"witness {seed}"), deque[bytes](maxlen=1000), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    with ledger.open("ab", buffering=0) as file:

        def report(error: KafkaError | None, message: Message) -> None:
            said: dict[str, Any] = {"partition": message.partition(), "offset": message.offset()}
            said["value"] = base64.b64encode(message.value() or b"").decode()
            if error is not None:
                said["failed"] = error.str()
            file.write(json.dumps(said).encode() + b"\n")
            os.fdatasync(file.fileno())

        producer = Producer(
            kafka.client_config(Settings()) | dict(kafka.PRODUCER) | {"delivery.timeout.ms": round(patience * 1000)}
        )
        due = time.monotonic()
        while not ended:
            value = kafka.draw(PAGE_VIEWS, random, datetime.now(UTC), recent)
            assert isinstance(value, bytes)
            producer.produce(PAGE_VIEWS.name, value, kafka.key_of(PAGE_VIEWS, value), on_delivery=report)
            due = max(due + 1 / rate, time.monotonic() - 1)
            producer.poll(max(0.0, due - time.monotonic()))
        while producer.flush(1):
            pass


if __name__ == "__main__":
    typer.run(witness)
