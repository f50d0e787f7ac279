"""One notifier: a whole line for each telling, from any process, without a secret, and never an error to its caller."""

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from tidemark import notify
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
