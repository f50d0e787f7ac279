"""One notifier: a whole line for each telling, from any process, without a secret, and never an error to its caller."""

import datetime as dt
import hashlib
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from tidemark import notify
from tidemark.model import Announce, Live, Topic, view
from tidemark.settings import Settings

ROOT = Path(__file__).parent.parent
PASSWORD = "k4fka-p4ssw0rd"


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    return Settings(_env_file=None, home=tmp_path)


def told(config: Settings) -> list[dict]:
    return [json.loads(line) for line in (config.state / "alerts.jsonl").read_text().splitlines()]


def test_telling_is_a_line_and_an_event(config):
    with capture_logs() as events:
        notify.notify(config, "gate_failed", "2 tables held back", "pv < uv", run="settle-1", day=dt.date(2026, 11, 19), rows=3)
    (line,) = told(config)
    assert {k: v for k, v in line.items() if k != "at"} == {
        "what": "gate_failed",
        "title": "2 tables held back",
        "text": "pv < uv",
        "fields": {"run": "settle-1", "day": "2026-11-19", "rows": 3},
    }
    assert dt.datetime.fromisoformat(line["at"]).utcoffset() == dt.timedelta(0)
    (event,) = events
    assert (event["event"], event["log_level"], event["what"]) == ("2 tables held back", "warning", "gate_failed")


def test_report_is_no_alarm(config):
    with capture_logs() as events:
        notify.notify(config, "report", "the report of a day", "/lake/reports/2026-11-19.html")
    assert [e["log_level"] for e in events] == ["info"]


def test_a_newline_a_quote_and_what_json_has_no_word_for_stay_in_one_line(config):
    notify.notify(config, "report", 'a\nb"c', "\u2028 \ud800", of=float("nan"), far=[float("inf"), {1: b"\xff"}], path=Path("/x"))
    (line,) = told(config)
    assert (line["title"], line["fields"]["of"], line["fields"]["path"]) == ('a\nb"c', "nan", "/x")


@pytest.mark.parametrize(
    "words",
    [
        {"title": f"refused with {PASSWORD}"},
        {"text": f"sasl.password={PASSWORD}; sasl.username=ann"},
        {"text": 'sasl.jaas.config=… username="ann" password="other-one";'},
        {"text": "postgresql+psycopg2://airflow:other-one@db:5432/airflow"},
        {"text": "Authorization: Bearer other-one"},
        {"text": "admin signed in with p4ge-p4ssw0rd"},
        {"password": "other-one"},
        {"deep": [{"kafka": {"SASL_PASSWORD": "other-one", PASSWORD: 1}}]},
        {"given": SecretStr("other-one")},
        {"error": ValueError(f"bad {PASSWORD}")},
    ],
    ids=lambda words: next(iter(words)),
)
def test_secret_is_told_nowhere(tmp_path, words):
    config = Settings(
        _env_file=None, home=tmp_path, kafka_protocol="SASL_SSL", kafka_user="ann", kafka_password=SecretStr(PASSWORD)
    )
    (tmp_path / "airflow").mkdir()
    (tmp_path / "airflow/passwords.json").write_text(json.dumps({"admin": "p4ge-p4ssw0rd", "viewer": ""}))
    with capture_logs() as events:
        notify.notify(config, "stream_down", **{"title": "t", "text": "t", **words})
    said = (config.state / "alerts.jsonl").read_text() + str(events)
    assert [s for s in (PASSWORD, "other-one", "p4ge-p4ssw0rd") if s in said] == []
    assert notify.MASK in said and len(told(config)) == len(events) == 1


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("postgresql+psycopg2://airflow:p%40ge-p4ss@db/airflow", "airflow signed in with p@ge-p4ss, and p%40ge-p4ss"),
        (
            "postgresql+psycopg2://airflow:p[ge-p4ss@db/airflow",
            "no such host: postgresql+psycopg2://airflow:p[ge-p4ss@db/airflow",
        ),
    ],
    ids=["password", "malformed"],
)
def test_address_of_a_database_is_told_nowhere_and_stops_no_telling(tmp_path, secret, text):
    """Nor is its password without the address around it; where the address is none, all of it is secret."""
    config = Settings(_env_file=None, home=tmp_path, airflow_database=SecretStr(secret))
    notify.notify(config, "stream_down", "t", text)
    [line] = told(config)
    assert notify.MASK in line["text"] and "ge-p4ss" not in line["text"]


def test_what_is_not_secret_is_left_as_it_is(config):
    text = "passed 12 of 12 checks: http://127.0.0.1:18080/dags/nightly, tidemark settle --day 2026-11-19"
    notify.notify(config, "report", text, text, key="page, pane", passed=True)
    assert (told(config)[0]["text"], told(config)[0]["fields"]) == (text, {"key": "page, pane", "passed": True})


def test_a_caller_is_not_stopped_by_a_state_that_cannot_be_written(tmp_path):
    (tmp_path / "state").write_text("a file where the folder would be")
    with capture_logs() as events:
        notify.notify(Settings(_env_file=None, home=tmp_path), "stream_down", "the stream ended", "exit code 1")
    assert [e["event"] for e in events] == ["the stream ended", "could not be written where alerts are kept"]


def test_a_caller_is_not_stopped_by_what_cannot_be_told(config):
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    notify.notify(config, "report", "t", "t", mute=Mute())
    assert not (config.state / "alerts.jsonl").exists()


def test_a_word_that_is_not_on_the_list_is_told_as_an_error(config):
    with capture_logs() as events:
        notify.notify(config, "coffee_is_out", "t", "t")  # type: ignore[arg-type]
    assert (told(config)[0]["what"], events[0]["log_level"]) == ("coffee_is_out", "error")


def test_line_that_was_cut_off_spoils_no_other(config):
    config.state.mkdir(parents=True)
    (config.state / "alerts.jsonl").write_text('{"at": "2026-')
    notify.notify(config, "report", "whole", "t")
    assert json.loads((config.state / "alerts.jsonl").read_text().splitlines()[1])["title"] == "whole"


def test_lines_of_several_processes_are_whole(config):
    program = f"""
from tidemark.notify import notify
from tidemark.settings import Settings
import sys
for n in range(50):
    notify(Settings(_env_file=None, home={str(config.home)!r}), "report", sys.argv[1], "x" * 20_000, n=n)
"""
    started = [subprocess.Popen([sys.executable, "-c", program, str(k)], stdout=subprocess.DEVNULL) for k in range(3)]
    assert [p.wait(60) for p in started] == [0, 0, 0]
    found = [(line["title"], line["fields"]["n"]) for line in told(config)]
    assert sorted(found) == [(str(k), n) for k in range(3) for n in range(50)]


def test_every_word_has_its_sentence_and_what_follows():
    page = (ROOT / "docs/operating.md").read_text()
    assert tuple(notify.WORDS) == get_args(notify.What)
    assert [word for word, sentence in notify.WORDS.items() if not sentence.endswith(".") or f"| `{word}` |" not in page] == []


# ------------------------------------------------------------------------------------------------------ what views announce

SALES = Topic("sales", key="id", partitions=1, schema="id STRING NOT NULL, at TIMESTAMP NOT NULL", event_time="at", id="id")
NOON = dt.datetime(2026, 11, 18, 12, tzinfo=dt.UTC)
SOLD = {"id": "s1", "at": NOON, "price": Decimal("9.50"), "first": True}


def announcing(said: Announce, name: str = "sold", key: tuple[str, ...] = ("id", "at")):
    def function(sales):
        return sales

    function.__name__ = name
    return view(reads={"sales": SALES}, key=key, time="at", live=Live("1 second", "1 hour"), announce=said)(function)


def ids(config: Settings, rows: list[dict], **changes) -> set[str]:
    return {m.id for m in notify.announced(config, announcing(Announce("{id}"), **changes), rows)}


@pytest.fixture
def both(tmp_path: Path) -> Settings:
    return Settings(_env_file=None, home=tmp_path, notify_to="dingtalk, wecom")


def test_a_row_is_one_message_for_each_robot(both):
    said = Announce("Sold {id}", "for {price:.1f} at {at:%H:%M}", kind="link", link="https://shop/{id}", mention=("ann",))
    dingtalk, wecom = notify.announced(both, announcing(said), [SOLD])
    assert dingtalk.model_dump(exclude={"id", "platform"}) == {
        "kind": "link",
        "title": "Sold s1",
        "content": "for 9.5 at 12:00",
        "picture": None,
        "link": "https://shop/s1",
        "mention": ("ann",),
    }
    assert (dingtalk.platform, wecom.platform) == ("dingtalk", "wecom")
    assert dingtalk.id == wecom.id and dingtalk.id.startswith("sold-")
    assert notify.Message.model_validate_json(dingtalk.model_dump_json()) == dingtalk


def test_nothing_is_said_where_no_robot_is_configured(config, both):
    assert notify.announced(config, announcing(Announce("{id}")), [SOLD]) == []
    assert len(notify.announced(both, announcing(Announce("{id}")), [])) == 0


@pytest.mark.parametrize(("first", "called"), [(True, ("all",)), (False, ()), (None, ())])
def test_only_rows_in_which_the_column_is_true_mention_anybody(both, first, called):
    said = announcing(Announce("{id}", mention=("all",), mention_if="first"))
    assert {m.mention for m in notify.announced(both, said, [SOLD | {"first": first}])} == {called}


def test_the_id_is_of_the_view_and_the_key_and_of_nothing_else(both):
    (one,) = ids(both, [SOLD])
    assert one == "sold-" + hashlib.sha256(b'["s1","2026-11-18T12:00:00+00:00"]').hexdigest()[:32]
    elsewhere = NOON.astimezone(dt.timezone(dt.timedelta(hours=8)))
    assert ids(both, [SOLD | {"price": Decimal(1), "at": elsewhere}]) == {one}
    others = [SOLD | {"id": "s2"}, SOLD | {"at": NOON + dt.timedelta(microseconds=1)}, SOLD | {"id": 's1","'}]
    assert len(ids(both, [SOLD, *others])) == 4
    assert ids(both, [SOLD], name="refunded") & ids(both, [SOLD], key=("at", "id")) & {one} == set()
    assert len(ids(both, [{"id": d, "at": NOON} for d in (Decimal("1.0"), dt.date(2026, 1, 1), 1, None, "1")])) == 5


def test_text_that_utf8_cannot_hold_is_said_all_the_same(both):
    assert notify.announced(both, announcing(Announce("{id}")), [SOLD | {"id": "a\ud800"}])[0].title == "a?"
