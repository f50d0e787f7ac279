"""A zone that is not UTC, events of four hundred days ago, and a topic that takes nothing so late."""

import json
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import kafka, lake, model, query, settle
from tidemark.functions import day, distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, rollup, view
from tidemark.settings import Settings

EVENT = "id STRING NOT NULL, happened_at TIMESTAMP NOT NULL"
ZONE = "Asia/Shanghai"
MILLI = timedelta(milliseconds=1)


def declared(topic: str, live: dict[str, str] | None = None) -> Catalog:
    """Old news, counted by hour and by business day; and a topic beside it that takes nothing later than thirty days."""
    news = Topic(topic, "id", 2, EVENT, "happened_at", id="id")
    strict = Topic(f"{topic}_strict", "id", 1, EVENT, "happened_at", id="id", accept_late="30 days")

    @rollup(reads={"news": news}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def minutes(news: DataFrame) -> DataFrame:
        return news.groupBy(pane("happened_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    @view(reads={"minutes": minutes}, key=("day",), time="day", live=Live(**live) if live else None)
    def days(minutes: DataFrame) -> DataFrame:
        return minutes.groupBy(day("minute").alias("day")).agg(F.sum(how_many("ids")).alias("events"))

    return model.catalog([type("news", (), {"news": news, "strict": strict, "minutes": minutes, "days": days})])


@pytest.mark.long
def test_events_of_four_hundred_days_ago_are_loaded_settled_and_asked(
    house: Callable[..., Settings], run: Any, spark: SparkSession, tmp_path: Path
) -> None:
    settings = house(zone=ZONE)
    catalog = declared("old_news")
    kafka.apply(settings, catalog.topics.values())
    first = (datetime.now(settings.tz) - timedelta(days=400)).date()
    edges = [settle.period(settings, first + timedelta(days=n))[0] for n in range(3)]
    #           before | first day                 | second day               | after
    instants = [edges[0] - MILLI, edges[0], edges[0] + MILLI, edges[1] - MILLI, edges[1], edges[2] - MILLI, edges[2]]
    events = [json.dumps({"id": f"n{n}", "happened_at": at.isoformat()}) for n, at in enumerate(instants)]
    random.Random(1).shuffle(events)
    file = tmp_path / "old.jsonl"
    file.write_text("\n".join(events))
    for topic in catalog.topics.values():
        assert kafka.produce(settings, topic, kafka.from_file(topic, file)).complete
    recent = {"id": "recent", "happened_at": (datetime.now(UTC) - timedelta(days=29)).isoformat()}
    kafka.produce(settings, catalog.topics["old_news_strict"], [recent])

    stream = run(settings, {"topic": "old_news"})
    stream.until(lambda: sum(r["records"] for r in lake.ledger_rows(settings, "main")) == 2 * len(events) + 1)
    stream.drains()

    def ask(sql: str) -> list[tuple[Any, ...]]:
        return query.query(settings, catalog, sql).rows

    one = timedelta(days=1)
    assert ask("SELECT day, count(*) FROM old_news GROUP BY day ORDER BY day") == [
        (first - one, 1),
        (first, 3),
        (first + one, 2),
        (first + 2 * one, 1),
    ]
    late = "event time is more than 30 days before Kafka's timestamp"
    assert ask("SELECT reject, count(*), count(id) FROM old_news_strict GROUP BY reject ORDER BY 2") == [
        (None, 1, 1),
        (late, 7, 0),
    ]

    run_ = settle.settle(settings, catalog, [first, first + one], "old news")
    assert all(p.version for p in settle.publish(settings, catalog, run_.id))
    assert ask("SELECT day, events, settled FROM days ORDER BY day") == [(first, 3, True), (first + one, 2, True)]

    # Days that do not follow each other are one run too, and what lies between them stays as it is.
    apart = settle.settle(settings, catalog, [first - one, first + 2 * one], "the days around")
    settle.publish(settings, catalog, apart.id)
    assert ask("SELECT day, events FROM days ORDER BY day") == [
        (first - one, 1),
        (first, 3),
        (first + one, 2),
        (first + 2 * one, 1),
    ]
    assert spark.conf.get("spark.tidemark.zone") == ZONE


def test_live_days_begin_and_end_at_the_zones_midnight(house: Callable[..., Settings], run: Any) -> None:
    settings, arguments = house(zone=ZONE), {"topic": "news_of_today", "live": {"every": "1 second", "back": "1 hour"}}
    catalog = declared(**arguments)
    kafka.apply(settings, catalog.topics.values())
    today = (datetime.now(settings.tz) - timedelta(days=1)).date()  # whose end has passed, wherever the clock stands
    begin, end = settle.period(settings, today)
    late, minute = iter("abcdefgh"), timedelta(minutes=1)

    def send(*instants: datetime) -> None:
        events = [{"id": next(late), "happened_at": at.isoformat()} for at in instants]
        assert kafka.produce(settings, catalog.topics["news_of_today"], events).complete

    def days() -> list[tuple[date, int]]:
        written = lake.table(settings, catalog["days"]).exists
        return query.query(settings, catalog, "SELECT day, events FROM days ORDER BY day").rows if written else []

    send(begin - MILLI, begin, end - 2 * minute)
    stream = run(settings, arguments)
    stream.until(lambda: days() == [(today, 2)])  # a stream that begins goes back as far as the view does, in whole days
    send(end - minute, end - MILLI, end)
    stream.until(lambda: days() == [(today, 4), (today + timedelta(days=1), 1)])
    send(end - minute, end + minute)  # the first of them late
    stream.until(lambda: days() == [(today, 5), (today + timedelta(days=1), 2)])
    stream.drains()
