"""A producer: the topics' own samples (late events, repeats and malformed ones included), now or of the past."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Annotated

import typer

from tidemark import kafka
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS
from tidemark.settings import Settings


def produce(
    rate: Annotated[float, typer.Option()],
    seconds: Annotated[float, typer.Option()],
    seed: Annotated[int, typer.Option()],
    past: Annotated[bool, typer.Option()] = False,
    ends: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%dT%H:%M:%S%z"])] = None,
    every: Annotated[bool, typer.Option()] = False,
) -> None:
    """Events of `seconds` at `rate` a second: from now on, or of the past, which `ends` now unless said, at once; page views, or
    half of them on every other topic that has a sample."""
    settings, count = Settings(), int(rate * seconds)
    if every:
        others = [t for t in CATALOG.topics.values() if t.sample and t is not PAGE_VIEWS]
        for topic in others:
            share = rate / 2 / len(others)
            events = kafka.sample(topic, seed=seed, count=int(share * seconds), zone=settings.tz)
            paced = {"rate": share, "burst": 0.5}  # a producer that sends each event by itself costs as much as a stream
            threading.Thread(target=kafka.produce, args=(settings, topic, events), kwargs=paced, daemon=True).start()
        rate, count = rate / 2, count // 2
    if past:
        delivery = kafka.produce(settings, PAGE_VIEWS, before(ends or datetime.now(UTC), rate, count, seed))
    else:
        events = kafka.sample(PAGE_VIEWS, seed=seed, count=count, zone=settings.tz)
        delivery = kafka.produce(settings, PAGE_VIEWS, events, rate=rate)
    if not delivery.complete:
        raise SystemExit(f"{delivery.failed} events were not delivered: {'; '.join(delivery.errors)}")


def before(end: datetime, rate: float, count: int, seed: int) -> Iterator[bytes]:
    random, recent, start = Random(f"past {seed}"), deque[bytes](maxlen=1000), end - timedelta(seconds=count / rate)
    return (kafka.draw(PAGE_VIEWS, random, start + timedelta(seconds=n / rate), recent) for n in range(count))


if __name__ == "__main__":
    typer.run(produce)
