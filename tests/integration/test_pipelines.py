"""Every pipeline that has no rollup, on a real broker: live, settled and replayed, each held to DuckDB over what was sent."""

import importlib
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tidemark import kafka, lake, model, query, settle
from tidemark.model import Catalog, Topic, View, needed
from tidemark.pipelines import CATALOG as shipped
from tidemark.pipelines import alarms, local_buyers, payments, profiles, searches, stocks, study, visits, words
from tidemark.settings import Settings

sys.path.insert(0, str(Path(__file__).parent.parent))  # the laws of the pipelines stand one folder above
laws = importlib.import_module("laws")

pytestmark = pytest.mark.long  # a stream, a settling and a replay of two days

MODULES = (visits, searches, stocks, study, words, payments, local_buyers, profiles, alarms)
LAWS = {m: importlib.import_module(f"test_{m.__name__.rpartition('.')[2]}").LAW for m in MODULES}
ANSWERS = {name: sql for law in LAWS.values() for name, sql in law.answers.items()}
TODAY = datetime.now(UTC).date()
DAYS = [TODAY - timedelta(days=2), TODAY - timedelta(days=1)]
START, STOP = (datetime.combine(d, datetime.min.time(), UTC) for d in (DAYS[0], TODAY))
EARLY = timedelta(minutes=25)  # live views begin where the first of the days does
COUNT = 10_000
"""Events of each topic and day."""
DENSE = 72
"""So many times as dense come the events that alarms are made of, in twenty minutes around noon: else no minute has enough."""


def declared(mistaken: str | None = None) -> Catalog:
    """The pipelines as they are shipped, but for how often their live views are computed again, and a view that raises.

    `stock_closes` is read by another view, so views are replaced together with what they read.
    """

    def mistake(payments: Any) -> Any:
        raise ValueError("a mistake")

    found: dict[str, Any] = {}
    quick: dict[str, View] = {}
    for declaration in model.catalog(MODULES).derived:
        reads = {p: quick.get(s.name, s) for p, s in declaration.reads.items()}
        refresh = declaration.refresh and replace(declaration.refresh, every="1 second")
        function = mistake if declaration.name == mistaken else declaration.function
        quick[declaration.name] = replace(declaration, reads=reads, refresh=refresh, function=function)
    for topic in model.catalog(MODULES).topics.values():
        found[topic.name] = topic
    return model.catalog([type("shipped", (), found | quick)])


CATALOG = declared()


def accepted(topic: Topic, value: kafka.Sent) -> dict[str, Any] | None:
    """What Python alone makes of a value: an event with the topic's columns, a tombstone, or nothing."""
    if isinstance(value, kafka.Event):
        assert isinstance(value.key, bytes) and value.at
        return {topic.key: value.key.decode(), laws.ENDED: value.at.isoformat()}
    kinds = {"STRING": str, "INT": int, "BIGINT": int, "BOOLEAN": bool, "TIMESTAMP": str, "DECIMAL": (int, float)}
    try:
        text = value.decode()
        event = json.loads(text) if topic.format == "json" else {topic.columns[0].name: text}
        for column in topic.columns:
            if event.get(column.name) is None and column.nullable:
                event[column.name] = None
            elif not isinstance(event[column.name], kinds[column.type.split("(")[0]]):
                return None
        return event
    except (ValueError, KeyError, TypeError):
        return None


@dataclass
class Days:
    """What two days came to: by stage and view, the rows that only one of tidemark and DuckDB has."""

    settings: Settings
    sent: dict[str, list[dict]] = field(default_factory=dict)
    records: int = 0
    live: dict[str, int] = field(default_factory=dict)
    lines: int = -1
    settled: dict[str, int] = field(default_factory=dict)
    run: Any = None
    again: Any = None


def fresh(stream: Any, names: list[str], newest: str) -> bool:
    """Whether the stream has looked at each live view again with the event of that time; one without rows commits nothing."""
    told = re.findall(r"(?:refreshed|nothing new) .*until='([^']+)' view=(\w+)", stream.said)
    return {view for until, view in told if datetime.fromisoformat(until) >= datetime.fromisoformat(newest)} >= set(names)


def differences(days: Days, names: list[str], start: datetime, stop: datetime) -> dict[str, int]:
    """By view: how many rows of `[start, stop)` stand in the lake and not in DuckDB's answer, or the other way."""
    brute = laws.oracle(CATALOG, days.sent, "UTC", start, stop)
    reader = query.connect(days.settings, CATALOG, names)
    found = {}
    for name in names:
        columns = [c[0] for c in brute.execute(f"SELECT * FROM ({ANSWERS[name]}) LIMIT 0").description]
        said = ", ".join(f'"{c}"' for c in columns)
        span = f"day >= '{start.date()}' AND day < '{stop.date()}'"
        ours = reader.sql(f"SELECT {said} FROM {name} WHERE {span}").to_arrow_table()
        brute.register("ours", ours)
        theirs = f"SELECT {said} FROM ({ANSWERS[name]})"
        both = f"(FROM ours EXCEPT ALL {theirs}) UNION ALL ({theirs} EXCEPT ALL FROM ours)"
        found[name] = brute.execute(f"SELECT count(*) FROM ({both})").fetchall()[0][0]
        assert ours.num_rows > 0, name
    return found


def at_of(topic: Topic, event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event[laws.ENDED] if laws.ENDED in event else event[topic.event_time])


def sample(topic: Topic, seed: int, count: int, day: date) -> Iterator[kafka.Sent]:
    """A day as it comes in, late events and all: the topic's own sample, or one that is dense enough for alarms."""
    zone = Settings(_env_file=None).tz
    if topic not in (alarms.NETWORK_EVENTS, alarms.TRANSACTIONS):
        yield from kafka.sample(topic, seed=seed, count=count, day=day, zone=zone)
        return
    random, recent, midnight = (
        Random(f"{topic.name} {seed}"),
        deque[bytes](maxlen=1000),
        datetime.combine(day, datetime.min.time(), UTC),
    )
    came = []
    for number, (at, _) in enumerate(kafka.instants(random, count, day, zone)):
        dense = midnight + timedelta(hours=12) + (at - midnight) / DENSE
        late = timedelta(seconds=random.uniform(10, 900)) if random.random() < kafka.LATE else timedelta()
        came.append((dense + late, number, kafka.draw(topic, random, dense, recent)))
    yield from (value for _, _, value in sorted(came, key=lambda one: one[:2]))


def slices(topic: Topic, count: int) -> Iterator[list[kafka.Sent]]:
    """Both days' sample as it comes in, in the same five parts of time for every topic."""
    cuts = [START + EARLY, START + timedelta(hours=20), START + timedelta(hours=32), START + timedelta(hours=47), STOP]
    part: list[kafka.Sent] = []
    for number, day in enumerate(DAYS):
        for value in sample(topic, number, count, day):
            event = accepted(topic, value)
            while event and at_of(topic, event) >= cuts[0]:
                yield part
                part, cuts = [], cuts[1:]
            part.append(value)
    for _ in cuts:
        yield part
        part = []


@pytest.fixture(scope="module")
def days(house: Callable[..., Settings], run: Any, spark: SparkSession) -> Days:
    done = Days(house())
    admin = kafka.connected(done.settings)
    if held := list(kafka.topic_ids_held(done.settings, CATALOG.topics, admin)):  # from other tests' pipelines
        for deleted in admin.delete_topics(held).values():
            deleted.result()
    kafka.apply(done.settings, CATALOG.topics.values())
    timed = [t for t in CATALOG.topics.values() if t.format == "json"]
    live = [v.name for v in CATALOG.views.values() if v.refresh and v.name != "word_counts"]
    of_alarms = ["stock_closes", "top_movers", *LAWS[alarms].answers]
    of_main = [name for name in live if name not in of_alarms]
    done.sent = {t.name: [] for t in CATALOG.topics.values()}
    stream, quick = run(done.settings), run(done.settings, stream="alarms")
    for parts in zip(*(slices(t, COUNT) for t in timed), strict=True):
        with stream.paused(), quick.paused():
            for topic, values in zip(timed, parts, strict=True):
                assert kafka.produce(done.settings, topic, values).complete
                done.sent[topic.name] += [e for v in values if (e := accepted(topic, v))]
                done.records += len(values)
        stream.until(
            lambda: sum(r["records"] for s in CATALOG.streams for r in lake.ledger_rows(done.settings, s)) == done.records
        )
        stream.until(lambda: fresh(stream, of_main, max(e["clicked_at"] for e in done.sent["clicks"][-100:])), 180)
        quick.until(lambda: fresh(quick, of_alarms, max(e["quoted_at"] for e in done.sent["quotes"][-100:])), 180)
    done.live = differences(done, live, START, STOP)

    lines = words.LINES
    assert kafka.produce(done.settings, lines, kafka.sample(lines, seed=1, count=300, day=TODAY, zone=done.settings.tz)).complete
    came = [(accepted(lines, r.value or b""), r.timestamp) for r in kafka.consume(done.settings, "lines", "earliest")]
    done.sent["lines"] = [event | {laws.TOOK: at.isoformat()} for event, at in came if event]
    tomorrow = STOP + timedelta(days=1)
    stream.until(lambda: fresh(stream, ["word_counts"], max(e[laws.TOOK] for e in done.sent["lines"])), 60)
    done.lines = differences(done, ["word_counts"], STOP, tomorrow)["word_counts"]
    stream.drains()
    quick.drains()

    names = [v for v in CATALOG.views if v != "word_counts"]
    done.run = settle.settle(done.settings, CATALOG, DAYS, "the pipelines' test")
    settle.publish(done.settings, CATALOG, done.run.id)
    done.settled = differences(done, names, START, STOP)
    done.again = settle.replay(done.settings, CATALOG, "the pipelines' test, from zero")
    return done


def test_live_views_equal_duckdb_over_what_was_sent(days: Days) -> None:
    assert days.live == dict.fromkeys(days.live, 0)
    of_topics = {"visits", "search_clicks", "stock_closes", "top_movers", "local_buyers", "profile_clicks"}
    assert set(days.live) == {*of_topics, *LAWS[payments].answers, *LAWS[alarms].answers}
    assert {v.name for v in shipped.views.values() if not needed(shipped, [v.name]) & {*shipped.rollups}} == set(CATALOG.views)
    assert days.lines == 0


def test_settled_views_equal_duckdb_over_what_was_sent(days: Days) -> None:
    assert days.settled == dict.fromkeys(days.settled, 0)
    assert set(days.settled) == set(CATALOG.views) - {"word_counts"}


def test_every_gate_holds_and_no_difference_is_unexplained(days: Days) -> None:
    assert {name: said["reasons"] for name, said in days.run.tables.items() if said["gate"] != "passed"} == {}
    assert {days.run.tables[v.name]["compare"]["unexplained"] for v in CATALOG.views.values() if v.refresh} == {0}


def test_replay_from_zero_finds_every_row_as_it_was_settled(days: Days) -> None:
    compared = {name: said["compare"] for name, said in days.again.tables.items() if name in days.settled}
    assert {n: (c["missing"], c["extra"], c["changed"]) for n, c in compared.items()} == dict.fromkeys(days.settled, (0, 0, 0))


def test_one_answer_of_a_topic_fails_and_is_replayed_alone(days: Days) -> None:
    def versions() -> dict[str, int]:
        return {v.name: lake.table(days.settings, v).delta().version() for v in CATALOG.views.values()}

    answers = ["payment_ledger", "order_changes", "item_sales"]
    run = settle.settle(days.settings, declared("payment_ledger"), DAYS, "with a mistake", only=answers)
    gates = {n: said["gate"] for n, said in run.tables.items() if n in CATALOG.views}
    alone = {"payment_ledger": "failed", "payment_days": "failed"}
    assert gates == dict.fromkeys(("order_changes", "order_status", "item_sales"), "passed") | alone
    assert "a mistake" in run.tables["payment_ledger"]["reasons"][0]
    before = versions()
    settle.publish(days.settings, CATALOG, run.id)
    after = versions()
    assert {n for n in after if after[n] > before[n]} == {"order_changes", "order_status", "item_sales"}

    again = settle.replay(days.settings, CATALOG, "the ledger alone, mended", only=["payment_ledger"])
    assert set(again.tables) & CATALOG.views.keys() == {"payment_ledger", "payment_days"}
    settle.publish(days.settings, CATALOG, again.id)
    assert {n for n, version in versions().items() if version > after[n]} == {"payment_ledger", "payment_days"}
    assert differences(days, list(LAWS[payments].answers), START, STOP) == dict.fromkeys(LAWS[payments].answers, 0)
