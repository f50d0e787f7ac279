"""Producers and consumers as users write them, on a real broker: docs/kafka.md's examples, and what a group promises."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from structlog.testing import capture_logs
from typer.testing import CliRunner

from tidemark import __main__ as cli
from tidemark import kafka, local
from tidemark.kafka import CONSUMER, PRODUCER, Event, GroupBusy, Member, Record, TopicMissing
from tidemark.model import Topic
from tidemark.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs/kafka.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(start: str) -> str:
    """The one Python block of docs/kafka.md that holds this line."""
    (found,) = [code for code in BLOCKS if start in code]
    return found


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
    return found


@pytest.fixture
def orders(broker: Settings, topic_name: str) -> Topic:
    made = Topic(
        topic_name,
        key="customer",
        partitions=3,
        schema="order_id STRING NOT NULL, customer STRING NOT NULL, item STRING, ordered_at TIMESTAMP NOT NULL",
        event_time="ordered_at",
        id="order_id",
    )
    kafka.apply(broker, [made])
    return made


@pytest.fixture
def group(topic_name: str) -> str:
    return f"group-{topic_name}"


def sent(broker: Settings, orders: Topic, count: int, first: int = 0) -> list[str]:
    """Orders of many customers, over all partitions; their ids."""
    ids = [f"o{n:04}" for n in range(first, first + count)]
    events = [{"order_id": one, "customer": f"c{one}", "ordered_at": datetime(2026, 11, 19, tzinfo=UTC)} for one in ids]
    assert kafka.produce(broker, orders, events).complete
    return ids


def id_of(record: Record) -> str:
    return json.loads(record.value or b"{}")["order_id"]


def committed(broker: Settings, group: str, orders: Topic) -> int:
    return sum(kafka.group_offsets(broker, group, orders.name).values())


class Reader(threading.Thread):
    """A member in a thread of its own: takes and is done, until it is ended."""

    def __init__(self, broker: Settings, group: str, orders: Topic, **words: Any) -> None:
        super().__init__(daemon=True)
        self.member = Member(broker, group, [orders.name], **words)
        self.read: list[str] = []
        self.shares: list[tuple[str, int]] = []

    def run(self) -> None:
        with self.member as member:
            while not member.stopped:
                if (record := member.take(0.1)) is not None:
                    self.read.append(id_of(record))
                    member.done(record)
                self.shares = member.shares

    def __enter__(self) -> "Reader":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.member.stop()
        self.join(20)
        assert not self.is_alive()


# ---------------------------------------------------------------------------------------------------------- producing


def test_event_has_its_key_its_headers_and_its_time(broker: Settings, orders: Topic) -> None:
    at = datetime(2026, 11, 19, 13, 0, 0, 250000, tzinfo=timezone(timedelta(hours=1)))
    events = [
        Event({"order_id": "o1", "customer": "ann"}, headers={"trace": "7f", "raw": b"\x00", "none": None}, at=at),
        Event({"order_id": "o2", "customer": "ann", "ordered_at": at}, key="mine", at=datetime.now(UTC)),
        Event(b"as it is", key=b"\xff"),
        Event(None, key="ann"),
    ]
    assert kafka.produce(broker, orders, events).complete
    found = {record.key: record for record in kafka.consume(broker, orders.name, "earliest") if record.value is not None}
    said = {"order_id": "o1", "customer": "ann", "ordered_at": "2026-11-19T12:00:00.250000Z"}
    assert json.loads(found[b"ann"].value or b"") == said
    assert found[b"ann"].headers == (("trace", b"7f"), ("raw", b"\x00"), ("none", None))
    assert json.loads(found[b"mine"].value or b"")["ordered_at"] == "2026-11-19T12:00:00.250000Z"
    assert found[b"\xff"].value == b"as it is"
    [tombstone] = [r for r in kafka.consume(broker, orders.name, "earliest") if r.value is None]
    assert (tombstone.key, tombstone.topic) == (b"ann", orders.name)
    assert tombstone.partition == found[b"ann"].partition


def test_timestamp_is_the_events_where_the_topic_keeps_it(broker: Settings, orders: Topic) -> None:
    """A topic of others' making; those of the platform carry Kafka's own."""
    entry = ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, orders.name, incremental_configs=[entry])
    admin = AdminClient(kafka.client_config(broker))  # kept: a client that nobody holds never answers
    admin.incremental_alter_configs([resource])[resource].result()
    at = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=5)
    until(
        lambda: (
            kafka.produce(broker, orders, [Event({"order_id": "o1", "customer": "ann"}, at=at)]).complete
            and list(kafka.consume(broker, orders.name, "earliest"))[-1].timestamp == at
        )
    )


WRONG: dict[str, Any] = {
    "an instant needs a time zone": {"order_id": "o3", "customer": "ann", "ordered_at": datetime(2026, 11, 19)},
    "header": Event({"order_id": "o3", "customer": "ann"}, headers=cast(Any, {"source": 5})),
}


@pytest.mark.parametrize("because", WRONG)
def test_event_that_cannot_be_sent_is_told_when_those_before_it_are_delivered(
    broker: Settings, orders: Topic, because: str
) -> None:
    good = [{"order_id": one, "customer": "ann", "ordered_at": datetime(2026, 11, 19, tzinfo=UTC)} for one in ("o1", "o2")]
    with pytest.raises(TypeError, match=because) as error:
        kafka.produce(broker, orders, [*good, WRONG[because]])
    assert error.value.__notes__ == ["2 events before it were delivered, 0 failed"]
    assert [id_of(record) for record in kafka.consume(broker, orders.name, "earliest")] == ["o1", "o2"]


def test_option_of_kafkas_own_name_counts(broker: Settings, orders: Topic) -> None:
    with pytest.raises(KafkaException, match="No such configuration property"):
        kafka.produce(broker, orders, [b"1"], options={"linger.msec": 5})
    assert kafka.produce(broker, orders, [b"1"], options={"acks": 1, "enable.idempotence": False}).complete


# ------------------------------------------------------------------------------------------------- a group, and another


def test_members_of_a_group_share_the_partitions(broker: Settings, orders: Topic, group: str) -> None:
    """Three partitions: one member has all; two have three together; every record is read by one of them."""
    with Reader(broker, group, orders) as first:
        until(lambda: len(first.shares) == 3)
        with Reader(broker, group, orders) as second:
            until(lambda: len(first.shares) + len(second.shares) == 3 and first.shares and second.shares)
            assert {*first.shares} & {*second.shares} == set()
            ids = sent(broker, orders, 200)
            until(lambda: len(first.read) + len(second.read) == 200)
            assert Counter(first.read + second.read) == Counter(ids) and first.read and second.read


def test_one_member_too_many_idles_and_takes_over(broker: Settings, orders: Topic, group: str) -> None:
    with ExitStack() as stack:
        readers = [stack.enter_context(Reader(broker, group, orders)) for _ in range(4)]
        until(lambda: sorted(len(r.shares) for r in readers) == [0, 1, 1, 1])
        ids = sent(broker, orders, 100)
        until(lambda: sum(len(r.read) for r in readers) == 100)
        [idle] = [r for r in readers if not r.shares]
        assert idle.read == []
        busy = next(r for r in readers if r.shares)
        busy.member.stop()
        until(lambda: len(idle.shares) == 1)
        more = sent(broker, orders, 100, first=100)
        until(lambda: sum(len(r.read) for r in readers) == 200)
        assert Counter(one for r in readers for one in r.read) == Counter(ids + more) and idle.read


def test_second_group_gets_everything_too(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 50)
    with Reader(broker, group, orders) as invoices, Reader(broker, f"{group}-2", orders) as parcels:
        until(lambda: len(invoices.read) == len(parcels.read) == 50)
        assert sorted(invoices.read) == sorted(parcels.read) == ids


def test_group_goes_on_where_it_was(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 30)
    with Reader(broker, group, orders) as first:
        until(lambda: len(first.read) == 30)
    assert committed(broker, group, orders) == 30
    more = sent(broker, orders, 5, first=30)
    with Reader(broker, group, orders) as second:
        until(lambda: len(second.read) >= 5)
        assert sorted(second.read) == more and ids[0] not in second.read


DIES = """
import sys
from tidemark import kafka
from tidemark.settings import Settings
group, topic, done = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"session.timeout.ms": 6000}
with kafka.Member(Settings(_env_file=None), group, [topic], options=options) as member:
    for count in range(1000):
        record = None
        while record is None:
            record = member.take()
        if count < done:
            member.done(record)
        if count == done:
            member.commit(wait=True)
        print(record.value.decode(), flush=True)
"""


def test_member_that_dies_hands_over_what_it_had_not_committed(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 100)
    command = [sys.executable, "-c", DIES, group, orders.name, "40"]
    environment = os.environ | {"TIDEMARK_BROKERS": broker.brokers}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        read = [json.loads(process.stdout.readline())["order_id"] for _ in range(60)]
        process.send_signal(signal.SIGKILL)
    assert committed(broker, group, orders) == 40
    with Reader(broker, group, orders) as heir:
        until(lambda: len(heir.read) >= 60, 60)
        time_to_read_too_much = time.monotonic() + 0.5
        until(lambda: time.monotonic() > time_to_read_too_much)
        assert sorted(heir.read) == sorted({*ids} - {*read[:40]})


# ----------------------------------------------------------------------------------------------- what a loop promises


class Broken(Exception):
    """The machine failed in the middle of the work."""


def loop(broker: Settings, group: str, orders: Topic, work: Callable[[Record], None], enough: int, **words: Any) -> None:
    """The loop as users write it, until so many records came."""
    with Member(broker, group, [orders.name], **words) as member:
        for count, record in enumerate(member, start=1):
            work(record)
            if count == enough:
                member.stop()


@pytest.mark.parametrize(("before", "times"), [(False, 2), (True, 1)], ids=["at least once", "at most once"])
@pytest.mark.parametrize("moment", ["before the work", "after the work"])
def test_crash_in_the_work(broker: Settings, orders: Topic, group: str, before: bool, times: int, moment: str) -> None:
    """What a crash interrupts: with `before` it does not come again, without it does, whether its work was done or not.

    work o0  work o1  work o2 ✕          at least once: o2 again      at most once: o3
    """
    ids = sent(broker, orders, 5)
    done: list[str] = []

    def work(record: Record) -> None:
        crash = id_of(record) == "o0002" and moment != "past"
        if crash and moment == "before the work":
            raise Broken
        done.append(id_of(record))
        if crash:
            raise Broken

    came: list[str] = []

    def seen(record: Record) -> None:
        came.append(id_of(record))
        work(record)

    with pytest.raises(Broken):
        loop(broker, group, orders, seen, 5, before=before)
    moment = "past"
    left = [one for one in ids if one not in came] if before else ["o0002", *(one for one in ids if one not in came)]
    loop(broker, group, orders, seen, len(left), before=before)
    assert Counter(came) == Counter({one: times if one == "o0002" else 1 for one in ids})
    if before and done.count("o0002") == 0:
        assert sorted({*ids} - {*done}) == ["o0002"]  # at most once: it may be never


KILLED = """
import os, signal, sys
from tidemark import kafka
from tidemark.settings import Settings
group, topic, before = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
with kafka.Member(Settings(_env_file=None), group, [topic], before=before) as member:
    for count, record in enumerate(member, start=1):
        if count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("before", [False, True], ids=["at least once", "at most once"])
def test_killed_in_the_work_of_the_fifth(broker: Settings, orders: Topic, group: str, before: bool) -> None:
    """With `before` the fifth is committed and gone; without, it is not, and comes again."""
    sent(broker, orders, 9)
    command = [sys.executable, "-c", KILLED, group, orders.name, str(before)]
    ended = subprocess.run(command, env=os.environ | {"TIDEMARK_BROKERS": broker.brokers}, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert committed(broker, group, orders) == 5 if before else committed(broker, group, orders) < 5


def test_at_most_once_hands_out_nothing_while_kafka_takes_no_commit(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 20)
    options = {"session.timeout.ms": 6000}
    with ThreadPoolExecutor(1) as beside, Member(broker, group, [orders.name], before=True, options=options) as member:
        records = iter(member)
        read = [id_of(next(records))]
        local.stop_broker(broker)
        try:
            with capture_logs() as told:
                coming = beside.submit(next, records)
                until(lambda: [one for one in told if one["event"].startswith("offsets are not committed")])
                with pytest.raises(TimeoutError):
                    coming.result(0.5)
        finally:
            local.start_broker(broker)
        read += [id_of(coming.result(60))]
        read += [id_of(next(records)) for _ in range(18)]
    assert sorted(read) == ids and committed(broker, group, orders) == 20


def test_promise_of_once_by_the_id_of_the_event(broker: Settings, orders: Topic, group: str, tmp_path: Path) -> None:
    """The example of docs/kafka.md, killed between the work and the commit, and the producer repeats itself."""
    names: dict[str, Any] = {}
    exec(block("def book("), names)
    ids = sent(broker, orders, 20)
    assert sent(broker, orders, 20) == ids  # a producer's repeat: the same ids again
    books = tmp_path / "books.db"
    came: list[str] = []

    def booked(database: Any, record: Record) -> None:
        came.append(id_of(record))
        names["book"](database, record)
        if len(came) == 7:
            raise Broken

    with closing(names["opened"](books)) as database:
        with pytest.raises(Broken):
            loop(broker, group, orders, lambda record: booked(database, record), 40)
        assert committed(broker, group, orders) == 6
        loop(broker, group, orders, lambda record: booked(database, record), 34)
        assert len(came) == 41
        assert [row[0] for row in database.execute("SELECT order_id FROM booked ORDER BY 1")] == ids
        assert database.execute("SELECT count FROM total").fetchone() == (20,)


def test_record_out_of_order_is_committed_when_those_before_it_are_done(broker: Settings, orders: Topic, group: str) -> None:
    one = [{"order_id": f"o{n}", "customer": "ann", "ordered_at": datetime.now(UTC)} for n in range(4)]
    assert kafka.produce(broker, orders, one).complete
    with Member(broker, group, [orders.name]) as member:
        found: list[Record] = []
        while len(found) < 4:
            found += filter(None, [member.take()])
        for wanted, n in [(0, 1), (0, 3), (2, 0), (2, 0), (4, 2)]:
            member.done(found[n])
            member.commit(wait=True)
            assert committed(broker, group, orders) == wanted


def test_full_queue_pauses_and_the_member_stays_in_its_group(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 100)
    short = {"max.poll.interval.ms": 7000, "session.timeout.ms": 6000}
    with Member(broker, group, [orders.name], most=10, options=short) as member:
        out: list[Record] = []
        until(lambda: out.extend(filter(None, [member.take(0.1)])) or member.paused)
        longer_than_the_session = time.monotonic() + 8
        until(lambda: out.extend(filter(None, [member.take(0.1)])) or time.monotonic() > longer_than_the_session)
        assert len(out) == 10 and len(member.shares) == 3
        read: list[str] = []
        while len(read) < 100:
            for record in out:
                read.append(id_of(record))
                member.done(record)
            out = list(filter(None, [member.take(0.1)]))
        assert sorted(read) == ids


def test_partitions_of_a_member_that_was_paused_in_a_rebalance_are_read_on(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 100)
    with Member(broker, group, [orders.name], most=10) as member:
        out: list[Record] = []
        read: list[str] = []

        def done(most: int) -> None:
            for record in out[:most]:
                read.append(id_of(record))
                member.done(record)
            del out[:most]

        until(lambda: out.extend(filter(None, [member.take(0.1)])) or member.paused)
        done(3)
        with Reader(broker, group, orders) as second:
            until(lambda: out.extend(filter(None, [member.take(0.1)])) or second.shares)
            until(lambda: done(100) or out.extend(filter(None, [member.take(0.1)])) or {*read, *second.read} == {*ids})


def test_pool_of_threads_is_done_in_any_order(broker: Settings, orders: Topic, group: str) -> None:
    """The example of docs/kafka.md: work beside the loop, drained when partitions go."""
    names: dict[str, Any] = {}
    exec(block("ThreadPoolExecutor"), names)
    ids = sent(broker, orders, 300)
    read: list[str] = []

    def work(record: Record) -> None:
        read.append(id_of(record))

    names["work_beside"](broker, group, orders.name, work, lambda: len(read) >= 300)
    assert sorted(read) == ids and committed(broker, group, orders) == 300


def test_listener_is_told_what_comes_and_what_goes(broker: Settings, orders: Topic, group: str) -> None:
    told: list[tuple[str, int]] = []
    words = {"assigned": lambda s: told.append(("+", len(s))), "revoked": lambda s: told.append(("-", len(s)))}
    with Reader(broker, group, orders, **words) as first:
        until(lambda: len(first.shares) == 3)
        with Reader(broker, group, orders) as second:
            until(lambda: second.shares and len(first.shares) + len(second.shares) == 3)
            gone = 3 - len(first.shares)
            assert ("-", gone) in told and told[0] == ("+", 3)
    assert sum(n if sign == "+" else -n for sign, n in told) == 0


def test_whole_rebalance_of_other_strategies_works_too(broker: Settings, orders: Topic, group: str) -> None:
    words = {"options": {"partition.assignment.strategy": "range,roundrobin"}}
    with Reader(broker, group, orders, **words) as first, Reader(broker, group, orders, **words) as second:
        until(lambda: sorted([len(first.shares), len(second.shares)]) == [1, 2])
        ids = sent(broker, orders, 60)
        until(lambda: len(first.read) + len(second.read) >= 60)
        assert Counter(first.read + second.read) == Counter(ids)


def test_topic_that_is_not_there_is_a_sentence(broker: Settings, topic_name: str, group: str) -> None:
    with pytest.raises(TopicMissing, match=f"Kafka has no topic {topic_name}"), Member(broker, group, [topic_name]):
        pass


def test_what_has_a_place_in_the_documentation_is_what_is_set() -> None:
    """Each row of the two tables of docs/kafka.md is a setting as it is, and every setting has its row."""
    rows = re.findall(r"^\| `([a-z.]+)`[^|]* \| `([^`]*)` \| (\S[^|]+) \|$", PAGE, re.MULTILINE)
    said = {name: value for name, value, _ in rows}
    wanted = {n: str(v).lower() if isinstance(v, bool) else str(v) for n, v in {**PRODUCER, **CONSUMER}.items()}
    assert {n: said.get(n) for n in wanted} == wanted
    assert {*said} - {*wanted} == {"delivery.timeout.ms", "message.max.bytes"}


def test_every_example_of_the_page_runs_here() -> None:
    assert [len([mark for mark in MARKS if mark in code]) for code in BLOCKS] == [1] * len(BLOCKS)


MARKS = ("Event(", "for record in member", "def book(", "ThreadPoolExecutor", "begin=")


def test_example_of_producing(broker: Settings, orders: Topic) -> None:
    names: dict[str, Any] = {"settings": broker, "ORDERS": orders}
    exec(block("Event("), names)
    [record] = kafka.consume(broker, orders.name, "earliest")
    assert record.key == b"ann" and dict(record.headers)["source"] == b"shop" and names["delivery"].complete


def test_example_of_the_loop(broker: Settings, orders: Topic, group: str) -> None:
    ids = sent(broker, orders, 10)
    printed: list[str] = []

    def print_invoice(record: Record) -> None:
        printed.append(id_of(record))
        if len(printed) == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    code = block("for record in member").replace('"orders"', f'"{orders.name}"').replace('"invoices"', f'"{group}"')
    before = signal.getsignal(signal.SIGTERM)
    try:
        exec(code, {"settings": broker, "print_invoice": print_invoice})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert sorted(printed) == ids
    assert committed(broker, group, orders) == 10


# ------------------------------------------------------------------------------------------------------------- seeking


def halves(broker: Settings, orders: Topic) -> datetime:
    """Ten orders, then an instant, then ten more."""
    sent(broker, orders, 10)
    first = max(r.timestamp for r in kafka.consume(broker, orders.name, "earliest"))
    until(lambda: datetime.now(UTC) > first + timedelta(milliseconds=20))
    between = datetime.now(UTC)
    until(lambda: datetime.now(UTC) > between + timedelta(milliseconds=20))
    sent(broker, orders, 10, first=10)
    return between


SECOND_HALF = [f"o{n:04}" for n in range(10, 20)]


def test_member_seeks_to_an_instant_while_it_runs(broker: Settings, orders: Topic, group: str) -> None:
    between = halves(broker, orders)
    with Member(broker, group, [orders.name]) as member:
        with pytest.raises(LookupError, match="has no partition of"):
            member.seek(orders.name, between)
        read: list[str] = []
        while len(read) < 20:
            for record in filter(None, [member.take()]):
                read.append(id_of(record))
                member.done(record)
        member.seek(orders.name, between)
        again: list[str] = []
        while len(again) < 10:
            for record in filter(None, [member.take()]):
                again.append(id_of(record))
                member.done(record)
        assert sorted(again) == SECOND_HALF
        member.seek(orders.name, "latest")
        assert member.take(0.5) is None
    assert committed(broker, group, orders) == 20


def test_member_begins_where_it_is_told(broker: Settings, orders: Topic, group: str) -> None:
    between = halves(broker, orders)
    names: dict[str, Any] = {"settings": broker}
    exec(block("begin="), names)
    assert names["member"].begin == datetime(2026, 11, 19, 12, tzinfo=UTC)
    read: list[str] = []
    with Member(broker, group, [orders.name], begin=between) as member:
        for record in member:
            read.append(id_of(record))
            if len(read) == 10:
                member.stop()
    assert sorted(read) == SECOND_HALF


@pytest.mark.parametrize("to", ["earliest", "latest", "an instant", 2])
def test_group_without_members_is_moved(broker: Settings, orders: Topic, group: str, to: Any) -> None:
    between = halves(broker, orders)
    ends = kafka.offsets(broker, [orders.name], "latest")[orders.name]
    wanted = {
        "earliest": dict.fromkeys(ends, 0),
        "latest": ends,
        "an instant": kafka.offsets(broker, [orders.name], between)[orders.name],
        2: {p: min(2, end) for p, end in ends.items()},
    }[to]
    said = {"an instant": between.isoformat(), 2: "2"}.get(to, to)
    environment = {"TIDEMARK_BROKERS": broker.brokers}
    for before in (None, wanted):
        words = ["seek", group, orders.name, "--to", said, "--json"]
        done = CliRunner().invoke(cli.app, words, env=environment, prog_name="tidemark")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout) == [
            {"partition": p, "before": before[p] if before else None, "after": wanted[p]} for p in sorted(wanted)
        ]
    assert kafka.group_offsets(broker, group, orders.name) == wanted


def test_seeking_refuses_in_a_sentence(broker: Settings, orders: Topic, group: str) -> None:
    def seek(*words: str) -> tuple[int, str]:
        environment = {"TIDEMARK_BROKERS": broker.brokers}
        done = CliRunner().invoke(cli.app, ["seek", *words], env=environment, prog_name="tidemark")
        return done.exit_code, done.stderr

    assert seek("tidemark-main", orders.name, "--to", "earliest")[0] == 2
    assert "is a stream, which reads on from its checkpoint" in seek("tidemark-main", orders.name, "--to", "earliest")[1]
    assert seek(group, orders.name, "--to", "noon") == (2, SAID_NOON)
    assert seek(group, "nowhere", "--to", "earliest")[0] == 2
    assert "has partitions 0 to 2, and no partition 7" in seek(group, orders.name, "--to", "earliest", "--partition", "7")[1]
    with Reader(broker, group, orders) as reader:
        until(lambda: reader.shares)
        code, said = seek(group, orders.name, "--to", "earliest")
        assert code == 1 and f"group {group} has 1 member(s)" in said
        with pytest.raises(GroupBusy):
            kafka.seek(broker, group, orders.name, "earliest")


SAID_NOON = "tidemark: --to noon is neither earliest, latest, an offset nor an instant like 2026-11-19T12:00Z\n"


def test_members_are_told_apart_by_their_group_alone(broker: Settings, orders: Topic, group: str) -> None:
    """Five groups at once, each whole."""
    ids = sent(broker, orders, 20)

    def read(n: int) -> list[str]:
        found: list[str] = []
        loop(broker, f"{group}-{n}", orders, lambda record: found.append(id_of(record)), 20)
        return sorted(found)

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(read, range(5))) == [ids] * 5
