"""The notifier as a process: Kafka on the one side, platforms on the other, and deaths, repeats and absences in between."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil
import pytest
from platforms import SECRET, TOKENS, Platforms, errcode, fine, heard_then, status
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from tidemark import __main__ as cli
from tidemark import kafka, local, notifier, notify
from tidemark.kafka import Event
from tidemark.notify import DEAD_LETTERS, NOTIFY, Message
from tidemark.settings import Settings

NOTIFIER = "from tidemark.__main__ import app; app(['notify'])"
PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Platforms]:
    with Platforms(tmp_path / "platforms") as there:
        yield there


@pytest.fixture
def told(world: Platforms, house: Callable[..., Settings]) -> Iterator[Callable[..., Settings]]:
    """Settings of a home whose robots are the test's, on the shared broker; what the test leaves there is taken away.

    The robots may say as much as they like: the minute is the topic's, and the tests before had a share in it.
    """
    world.signed, world.rate = True, 10_000
    built: list[Settings] = []

    def build(**changes: Any) -> Settings:
        own = {
            "notify_to": "dingtalk,wecom",
            "notify_hosts": world.host,
            "notify_ca": world.ca,
            "notify_rate": 10_000,
            "dingtalk_webhook": SecretStr(world.webhook("dingtalk")),
            "dingtalk_secret": SecretStr(SECRET),
            "wecom_webhook": SecretStr(world.webhook("wecom")),
        }
        built.append(house(**own | changes))
        kafka.apply(built[-1], notify.TOPICS)
        return built[-1]

    yield build
    world.until(lambda: alone(built[0]), 30)
    kafka.seek(built[0], notifier.GROUP, NOTIFY.name, "latest")
    notifier.drop(built[0], notifier.dead_letters(built[0]))


def alone(settings: Settings) -> bool:
    """Whether the group has no member any more: one that was killed is missed after fifteen seconds."""
    try:
        kafka.seek(settings, notifier.GROUP, NOTIFY.name, "latest")
    except kafka.GroupBusy:
        return False
    return True


@pytest.fixture
def start(run: Callable[..., Any]) -> Iterator[Callable[[Settings], Any]]:
    """Start a notifier; it ends with its test, and leaves its group."""
    started = []

    def begin(settings: Settings) -> Any:
        started.append(run(settings, program=NOTIFIER))
        return started[-1]

    yield begin
    for process in started:
        if process.popen.poll() is None:
            process.drains()


def running(start: Callable[[Settings], Any], settings: Settings) -> Any:
    """A notifier that speaks: the group may still miss one that was killed, for fifteen seconds."""
    process = start(settings)
    process.until(lambda: local.status(settings, "notify").get("heartbeat", {}).get("state") == "running", 60)
    return process


def message(one: str, platform: str = "dingtalk", **words: Any) -> Message:
    return Message(id=one, platform=platform, **{"title": one, "content": "12 records"} | words)


def uncommitted(settings: Settings) -> int:
    ends = kafka.offsets(settings, [NOTIFY.name], "latest")[NOTIFY.name]
    return sum(ends.values()) - sum(kafka.group_offsets(settings, notifier.GROUP, NOTIFY.name).values())


def variables(settings: Settings) -> dict[str, str]:
    """What says the same as these settings to a command."""
    said = settings.model_dump(exclude_none=True)
    return {f"TIDEMARK_{n.upper()}": v.get_secret_value() if isinstance(v, SecretStr) else str(v) for n, v in said.items()}


def command(settings: Settings, *words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words), env=variables(settings), prog_name="tidemark")


# ------------------------------------------------------------------------------------------------------------- delivered


def test_alarm_is_said_by_each_robot_and_then_committed(told, world, start) -> None:
    settings = told()
    process = running(start, settings)
    notify.notify(settings, "stream_down", "The stream ended", "exit code 1", stream="main")
    world.until(lambda: world.texts("dingtalk") and world.texts("wecom"))
    process.drains()
    text = "The stream ended\nexit code 1\nstream: main"
    assert (world.texts("dingtalk"), world.texts("wecom"), uncommitted(settings)) == ([text], [text], 0)
    heartbeat = local.status(settings, "notify")["heartbeat"]
    assert heartbeat["state"] == "stopped"
    assert heartbeat["robots"]["wecom"] == {"waiting": 0, "said": 1, "dead": 0, "trouble": ""}


def test_alarms_and_reports_of_airflow_are_said(told, world, start, monkeypatch) -> None:
    settings = told()
    monkeypatch.syspath_prepend(PLUGINS)
    for name, value in variables(settings).items():
        monkeypatch.setenv(name, value)
    import tell

    class Instance:
        dag_id, task_id, run_id = "nightly", "gate", "run-1"

    tell.gate_failed({"ti": Instance, "exception": "pv < uv in 3 rows"})
    tell.tell("report", "Report of 2026-11-19", "It is in /lake/reports/2026-11-19.html")
    running(start, settings)
    world.until(lambda: len(world.texts("wecom")) == 2)
    assert world.texts("wecom") == [
        "nightly: a table is held back\npv < uv in 3 rows\nrun: run-1",
        "Report of 2026-11-19\nIt is in /lake/reports/2026-11-19.html",
    ]


def test_message_is_said_within_a_second(told, world, start) -> None:
    settings = told()
    running(start, settings)
    took = []
    for n in range(30):
        began = time.monotonic()
        notify.send(settings, [message(f"quick{n}", "wecom")])
        world.until(lambda n=n: len(world.texts("wecom")) == n + 1)
        took.append(time.monotonic() - began)
    assert median(took) < 1, sorted(took)


@pytest.mark.long
def test_everything_is_said_or_a_dead_letter_while_a_robot_fails_three_tries_in_ten(told, world, start) -> None:
    """The other robot is as fast as ever."""
    settings, random = told(notify_patience="20 seconds"), Random(7)
    tricks = [status(500), status(429), errcode(-1), errcode(40035, "param error"), heard_then(lambda: None)]
    world.tricks["dingtalk"].extend(random.choice(tricks) if random.random() < 0.3 else fine for _ in range(500))
    running(start, settings)
    ids = [f"storm{n}" for n in range(60)]
    events = [json.loads(message(one, p).model_dump_json()) for one in ids for p in ("dingtalk", "wecom")]
    assert kafka.produce(settings, NOTIFY, [*events, b"no message", {"id": "x"}]).complete
    world.until(lambda: uncommitted(settings) == 0, 120)
    said = Counter(text.splitlines()[0] for text in world.texts("dingtalk"))
    dead = {letter.key for letter in notifier.dead_letters(settings)}
    assert {*said} | {key.split("/")[1] for key in dead if key.startswith("dingtalk/")} == {*ids}
    assert Counter(text.splitlines()[0] for text in world.texts("wecom")) == Counter(ids)
    assert len([key for key in dead if key.startswith("notify/")]) == 2


# ---------------------------------------------------------------------------------------------------------- once, always


def test_repeat_is_not_said_twice_by_this_notifier_nor_the_next(told, world, start) -> None:
    settings = told()
    one = message("repeat", "wecom")
    first = running(start, settings)
    notify.send(settings, [one, one])
    notify.send(settings, [one])
    world.until(lambda: uncommitted(settings) == 0)
    first.drains()
    second = running(start, settings)
    notify.send(settings, [one, message("other", "wecom")])
    world.until(lambda: "other\n12 records" in world.texts("wecom"))
    second.drains()
    assert world.texts("wecom") == ["repeat\n12 records", "other\n12 records"]
    assert uncommitted(settings) == 0


def test_group_that_is_moved_back_says_nothing_twice(told, world, start) -> None:
    settings = told()
    first = running(start, settings)
    notify.send(settings, [message(f"moved{n}", "wecom") for n in range(5)])
    world.until(lambda: uncommitted(settings) == 0)
    first.drains()
    assert command(settings, "seek", notifier.GROUP, NOTIFY.name, "--to", "earliest").exit_code == 0
    running(start, settings)
    world.until(lambda: uncommitted(settings) == 0)
    assert len(world.texts("wecom")) == 5


def test_killed_between_the_answer_and_the_commit_it_says_so_when_it_says_it_again(told, world, start) -> None:
    """Nothing tells a message that was heard from one that was not: it is said again rather than never.

    saying ──▶ heard ✕            again, marked
    """
    settings = told()
    first = running(start, settings)
    world.tricks["wecom"].append(heard_then(lambda: os.killpg(first.popen.pid, signal.SIGKILL)))
    notify.send(settings, [message("in the air", "wecom")])
    first.dies()
    running(start, settings)
    world.until(lambda: len(world.texts("wecom")) == 2)
    assert world.texts("wecom") == [
        "in the air\n12 records",
        "in the air\n(sent again: the last try may have been heard)\n12 records",
    ]


def test_killed_at_a_try_nothing_is_lost(told, world, start) -> None:
    settings = told()
    first = running(start, settings)
    world.tricks["wecom"].extend([fine, fine, heard_then(lambda: os.killpg(first.popen.pid, signal.SIGKILL))])
    ids = [f"kill{n}" for n in range(8)]
    notify.send(settings, [message(one, "wecom") for one in ids])
    first.dies()
    running(start, settings)
    world.until(lambda: uncommitted(settings) == 0, 60)
    said = Counter(text.splitlines()[0] for text in world.texts("wecom"))
    assert {*said} == {*ids}
    assert sum(said.values()) == len(ids) + 1  # the one in the air


def test_second_notifier_waits_and_takes_over(told, world, start) -> None:
    here, there = told(), told()
    first = running(start, here)
    second = start(there)
    second.until(lambda: local.status(there, "notify").get("heartbeat", {}).get("state") == "waiting")
    notify.send(here, [message(f"one{n}", "wecom") for n in range(5)])
    world.until(lambda: len(world.texts("wecom")) == 5)
    assert local.status(there, "notify")["heartbeat"]["state"] == "waiting"
    world.tricks["wecom"].extend([status(500)] * 3)  # it has something on its hands when it goes
    notify.send(here, [message(f"two{n}", "wecom") for n in range(5)])
    world.until(lambda: len(world.tries["wecom"]) > 5)
    first.drains()
    world.until(lambda: len(world.texts("wecom")) == 10)
    assert Counter(t.splitlines()[0] for t in world.texts("wecom")) == Counter(
        f"{w}{n}" for w in ("one", "two") for n in range(5)
    )
    world.until(lambda: uncommitted(here) == 0)


def test_second_notifier_of_one_home_is_refused(told, start) -> None:
    settings = told()
    running(start, settings)
    start(settings).ends(75)


def test_topics_that_are_not_there_are_a_sentence(settings: Settings, jars: Path, start) -> None:
    local.start_broker(settings)
    process = start(settings)
    process.ends(2)
    assert "Kafka has no topic notify" in process.said and "tidemark topics apply" in process.said


# ------------------------------------------------------------------------------------------------------- dead letters


def test_dead_letter_has_its_reason_and_goes_again_once_mended(told, world, start) -> None:
    settings = told()
    process = running(start, settings)
    world.tricks["dingtalk"].extend([errcode(300001, "token is not exist")] * 3)
    refused = Event(message("refused").model_dump_json().encode(), headers={"kept": "2026-11-19T12:00:05+00:00"})
    assert kafka.produce(settings, NOTIFY, [refused, b"\xff", {"id": "t", "platform": "telex"}]).complete
    world.until(lambda: len(notifier.dead_letters(settings)) == 3)
    listed = {one["key"]: one for one in json.loads(command(settings, "dead-letters", "list", "--json").stdout)}
    token, poison, telex = sorted(listed, key=lambda key: int(key.split("/")[-1]))
    assert [key.rsplit("/", 1)[0] for key in (token, poison, telex)] == ["dingtalk/refused/0", "notify/0", "telex/t/0"]
    assert listed[token]["because"] == "errcode 300001: token is not exist"
    assert listed[telex]["because"] == "there is no robot for platform 'telex'; there are: dingtalk, wecom"
    assert listed[poison]["because"].startswith("not a message: Invalid JSON")
    assert "letter\tat\tbecause\tmessage" in command(settings, "dead-letters", "list").stdout

    assert command(settings, "dead-letters", "drop", telex, poison).exit_code == 0
    assert command(settings, "dead-letters", "replay", "--all").stderr == "1 sent again\n"
    world.until(lambda: world.texts("dingtalk"))
    assert command(settings, "dead-letters", "replay", "--all").stderr == "0 sent again\n"
    assert notifier.dead_letters(settings) == []
    process.drains()
    assert world.texts("dingtalk") == ["refused\n(of 2026-11-19 12:00:05 UTC)\n12 records"]


def test_message_that_came_in_by_its_compression_goes_the_same_way_to_the_dead_letters_and_back(told, world, start) -> None:
    """Kafka measures a batch as it comes, a producer of ours each record before it is compressed."""
    settings = told()
    process = running(start, settings)
    large = {"message.max.bytes": 2**20}
    events = [message("large", "telex", content="x" * 900_000).model_dump_json().encode()]
    assert kafka.produce(settings, NOTIFY, events, options=large).complete
    world.until(lambda: uncommitted(settings) == 0)
    [letter] = notifier.dead_letters(settings)
    assert len(letter.value) > 900_000 and letter.because.startswith("there is no robot for platform")
    process.drains()
    assert command(settings, "dead-letters", "replay", "--all").stderr == "1 sent again\n"
    assert uncommitted(settings) == 1 and notifier.dead_letters(settings) == []


def test_letters_whose_ids_are_masked_stay_apart(told) -> None:
    settings = told()
    here = notifier.Notifier(settings, {}, notifier.Pace())
    for one in ("token:gateway-1", "token:gateway-2", "token:gateway-1"):
        assert here.bury_record(None, message(one, "telex"), "a test")
    first, second = notifier.dead_letters(settings)
    assert {json.loads(first.value)["id"], json.loads(second.value)["id"]} == {"token:gateway-1", "token:gateway-2"}
    assert first.key.startswith("telex/token:**********#") and "gateway" not in first.key + second.key


def test_replay_of_a_letter_that_was_said_meanwhile_says_nothing(told, world, start) -> None:
    settings = told()
    running(start, settings)
    one = message("meanwhile", "wecom").model_dump_json().encode()
    dead = Event(one, key="wecom/meanwhile", headers={"because": "a test"})
    assert kafka.produce(settings, DEAD_LETTERS, [dead]).complete
    assert kafka.produce(settings, NOTIFY, [one]).complete
    world.until(lambda: world.texts("wecom"))
    assert command(settings, "dead-letters", "replay", "wecom/meanwhile").exit_code == 0
    world.until(lambda: uncommitted(settings) == 0)
    assert len(world.texts("wecom")) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["replay"], "say which letters, as `tidemark dead-letters list` names them, or --all"),
        (["replay", "x", "--all"], "say which letters"),
        (["drop", "nobody/x"], "there is no dead letter nobody/x; list them with: tidemark dead-letters list"),
    ],
)
def test_letter_that_nobody_knows_is_a_sentence(words: list[str], sentence: str, told) -> None:
    done = command(told(), "dead-letters", *words)
    assert done.exit_code == 2 and sentence in done.stderr


# ------------------------------------------------------------------------------------------------------ Kafka is away


@pytest.mark.long
def test_alarm_is_said_while_kafka_is_away_and_not_again_when_it_is_back(
    settings: Settings, jars: Path, world: Platforms, start
) -> None:
    settings = settings.model_copy(
        update={
            "notify_to": "wecom",
            "notify_hosts": world.host,
            "notify_ca": world.ca,
            "wecom_webhook": SecretStr(world.webhook("wecom")),
        }
    )
    local.start_broker(settings)
    kafka.apply(settings, notify.TOPICS)
    process = running(start, settings)
    local.stop_broker(settings)
    notify.notify(settings, "stream_down", "Kafka is away", "")
    world.until(lambda: world.texts("wecom") == ["Kafka is away"], 60)
    process.until(lambda: not list(notify.unsent(settings).glob("*.json")))
    local.start_broker(settings)
    notify.notify(settings, "report", "Kafka is back", "")
    process.until(lambda: len(world.texts("wecom")) == 2, 60)
    world.until(lambda: uncommitted(settings) == 0)
    process.drains()
    assert world.texts("wecom") == ["Kafka is away", "Kafka is back"]


# ------------------------------------------------------------------------------------------------------------- secrets


def test_secret_is_in_no_log_no_list_of_processes_no_dead_letter_and_no_state(told, world, start) -> None:
    settings = told()
    echo = f"no token {TOKENS['dingtalk']} at {world.webhook('dingtalk')} with {SECRET}"
    world.tricks["dingtalk"].extend([status(500), *([errcode(300001, echo)] * 3)])
    process = running(start, settings)
    notify.notify(settings, "run_failed", "A task failed", f"posting to {world.webhook('dingtalk')} failed")
    kafka.produce(settings, NOTIFY, [message("leak", content=f"{echo}").model_dump_json().encode()])
    kafka.produce(settings, NOTIFY, [f"no JSON but {echo}".encode()])
    world.until(lambda: len(notifier.dead_letters(settings)) >= 2)
    argv = " ".join(word for p in psutil.process_iter() for word in safely(p.cmdline))
    process.drains()
    kept = [path.read_bytes().decode("utf-8", "replace") for path in settings.state.rglob("*") if path.is_file()]
    letters = [str(record) for record in kafka.consume(settings, DEAD_LETTERS.name, "earliest")]
    shown = command(settings, "status", "--json").output + command(settings, "dead-letters", "list").output
    told_of = [process.said, argv, shown, *kept, *letters]
    assert [secret for secret in (*TOKENS.values(), SECRET) if any(secret in text for text in told_of)] == []
    assert "errcode 300001: no token **********" in process.said


def safely(call: Callable[[], list[str]]) -> list[str]:
    try:
        return call()
    except psutil.Error:
        return []


def test_wrong_web_hook_ends_with_a_sentence_without_it(told, start) -> None:
    process = start(told(notify_hosts="oapi.dingtalk.com"))
    process.ends(2)
    assert "TIDEMARK_DINGTALK_WEBHOOK: its host" in process.said and TOKENS["dingtalk"] not in process.said


def test_airflows_connection_is_a_robot(told, world, start, monkeypatch) -> None:
    known = {"conn_type": "http", "password": world.webhook("dingtalk"), "extra": {"secret": SECRET}}
    monkeypatch.setenv("AIRFLOW_CONN_TIDEMARK_DINGTALK", json.dumps(known))
    settings = told(dingtalk_webhook=None, dingtalk_secret=None, notify_connections=True)
    process = running(start, settings)
    notify.send(settings, [message("by connection")])
    world.until(lambda: world.texts("dingtalk"))
    process.drains()
    assert TOKENS["dingtalk"] not in process.said and SECRET not in process.said
