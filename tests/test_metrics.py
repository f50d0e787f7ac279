"""Metrics: the list, the page and the documents agree; alert rules are such as Prometheus takes; a busy port is a warning."""

import re
import socket
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import structlog
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tidemark import lake, metrics, speed
from tidemark.metrics import METRICS, Metrics
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

DOCS = Path(__file__).parent.parent / "docs"
OPERATING = (DOCS / "operating.md").read_text()
ALERTS: dict[str, Any] = yaml.safe_load((DOCS / "alerts.yml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
NOON = datetime(2026, 11, 19, 12, tzinfo=UTC)


def page(of: Metrics) -> dict[tuple[str, ...], float]:
    """What the page shows: values by name and labels, the stream's left out."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{of.port}/metrics", timeout=60).read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {s.labels["stream"] for s in samples} == {of.stream}
    return {(s.name, *(v for n, v in s.labels.items() if n != "stream")): s.value for s in samples}


def progress(seq: int, **changes: Any) -> dict[str, Any]:
    said = {"seq": seq, "records_per_second": 50.0, "seconds": 0.6, "stream_time": NOON.isoformat()}
    return said | {"finished_at": datetime.now(UTC).isoformat()} | changes


COUNTS = [
    {"topic": "clicks", "records": 7, "reasons": {"not JSON": 2}},
    {"topic": "clicks", "records": 3, "reasons": {"not JSON": 1, "missing": 1}},
    {"topic": "views", "records": 5, "reasons": {}},
]


def test_page_has_every_metric_and_no_other(port: int) -> None:
    told = Metrics(Settings(_env_file=None, metrics_port=port), "main", ["main"])
    told.of(metrics.BROKER_AWAY).set(0)
    told.of(metrics.SET_ASIDE, "panes").set(1)
    with told.served():
        told.batch(progress(3), COUNTS, {("clicks", 0): 4, ("clicks", 1): 0})
        told.batch(progress(3), COUNTS, {("clicks", 0): 4, ("clicks", 1): 0})  # tried again: it counts once
        shown = page(told)
        told.batch(progress(4, finished_at=(datetime.now(UTC) - timedelta(minutes=1)).isoformat()), COUNTS, {("clicks", 0): 1})
        later = page(told)
    with pytest.raises(OSError):
        page(told)  # it ends with the stream

    assert {name for name, *_ in shown} == {m.name for m in METRICS}
    age = shown.pop(("tidemark_commit_age_seconds",))
    assert 0 <= age < 60
    assert shown == {
        ("tidemark_lag_records", "0", "clicks"): 4,
        ("tidemark_lag_records", "1", "clicks"): 0,
        ("tidemark_records_per_second",): 50,
        ("tidemark_records_total", "clicks"): 10,
        ("tidemark_records_total", "views"): 5,
        ("tidemark_rejected_total", "clicks"): 4,
        ("tidemark_rejected_total", "views"): 0,
        ("tidemark_rejects_total", "not JSON", "clicks"): 3,
        ("tidemark_rejects_total", "missing", "clicks"): 1,
        ("tidemark_batch_seconds",): 0.6,
        ("tidemark_set_aside", "panes"): 1,
        ("tidemark_stream_time_seconds",): NOON.timestamp(),
        ("tidemark_broker_away",): 0,
    }
    assert later[("tidemark_records_total", "clicks")] == 20
    assert later[("tidemark_lag_records", "0", "clicks")] == 1
    assert 60 <= later[("tidemark_commit_age_seconds",)] < 120


def test_new_stream_counts_from_zero_and_from_its_start(port: int, tmp_path: Path) -> None:
    """Before its first batch: one that never ends it is stuck, and its first rejects are an increase."""
    settings = Settings(_env_file=None, home=tmp_path, metrics_port=port)
    stream = speed.Stream(settings, CATALOG, "alarms", settings.state / "alarms")
    stream.generation = lake.Generation(0, 0, {}, {})
    stream.remember_time()
    with stream.metrics.served():
        asked, shown, told = datetime.now(UTC), page(stream.metrics), datetime.now(UTC)
    age = shown.pop(("tidemark_commit_age_seconds",))
    assert asked <= stream.began + timedelta(seconds=age) <= told
    counted = {(m.name, topic): 0 for m in (metrics.RECORDS, metrics.REJECTED) for topic in stream.mine.topics}
    assert shown == counted | {("tidemark_broker_away",): 0}


def test_busy_port_is_a_warning_that_names_it(port: int) -> None:
    told = Metrics(Settings(_env_file=None, metrics_port=port), "main", ["main"])
    with socket.create_server(("127.0.0.1", port)), structlog.testing.capture_logs() as said, told.served():
        told.batch(progress(1), COUNTS, {})
    [warning] = said
    assert (warning["log_level"], warning["address"]) == ("warning", f"127.0.0.1:{port}")
    assert "TIDEMARK_METRICS_PORT" in warning["event"] and "in use" in warning["because"]


def test_each_stream_has_a_port_of_its_own() -> None:
    on, off = Settings(_env_file=None, metrics_port=19100), Settings(_env_file=None, metrics_port=0)
    streams = ["alarms", "main", "orders"]
    assert {s: metrics.port(on, s, streams) for s in streams} == {"main": 19100, "alarms": 19101, "orders": 19102}
    assert {s: metrics.port(off, s, streams) for s in streams} == {"main": 0, "alarms": 0, "orders": 0}
    # What `speed --only` has split off comes after what is declared, whatever it is called.
    beside = ["main", "a_second", "third"]
    split = {s: metrics.port(on, s, streams, beside) for s in ("alarms", "orders", "a_second", "third")}
    assert split == {"alarms": 19101, "orders": 19102, "a_second": 19103, "third": 19104}


def test_reasons_are_counted_by_partition_without_their_column() -> None:
    rows = pa.table(
        {
            "kafka": [{"partition": p, "value": b"{}"} for p in (0, 0, 0, 1, 1)],
            "reject": [None, "price: missing", "id: missing", None, "at: wanted TIMESTAMP (ISO 8601), found STRING"],
            "event_time": pa.array([NOON, None, None, NOON - timedelta(hours=1), None], pa.timestamp("us", "UTC")),
        }
    )
    zero, one = sorted(speed.counted("sales", rows), key=lambda counted: counted["partition"])
    assert zero == {
        "topic": "sales",
        "partition": 0,
        "records": 3,
        "rejects": 2,
        "tombstones": 0,
        "reasons": {"missing": 2},
        "stream_time": NOON,
    }
    assert one == {
        "topic": "sales",
        "partition": 1,
        "records": 2,
        "rejects": 1,
        "tombstones": 0,
        "reasons": {"wanted TIMESTAMP (ISO 8601), found STRING": 1},
        "stream_time": NOON - timedelta(hours=1),
    }


# ------------------------------------------------------------------------------------------------------------ documents


def test_every_metric_is_in_the_document_with_its_sentence() -> None:
    said = dict(re.findall(r"^\| `(tidemark_\w+)` \| (.*) \|$", OPERATING, re.MULTILINE))
    assert said.keys() == {m.name for m in METRICS}
    assert {m.name for m in METRICS if not said[m.name].startswith(m.sentence.rstrip(".").split(", by ")[0])} == set()


def test_rules_have_the_fields_that_prometheus_demands() -> None:
    """As its documentation of rule files says: groups have a name and rules; an alert its expression, texts and durations."""
    assert ALERTS.keys() == {"groups"}
    assert all(group.keys() <= {"name", "interval", "limit", "rules"} and group["name"] for group in ALERTS["groups"])
    for rule in RULES:
        assert {"alert", "expr"} <= rule.keys() <= {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"]) and isinstance(rule["expr"], str)
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "0s"))
        assert rule["labels"].keys() == {"severity"} and rule["labels"]["severity"] in ("critical", "warning")
        assert isinstance(rule["annotations"]["summary"], str)
        assert rule["expr"].count("(") == rule["expr"].count(")")
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


LABELS = {"up": {"instance", "job"}} | {m.name: {"instance", "job", "stream", *m.labels} for m in METRICS}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alarm_asks_for_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    metrics_asked = set(re.findall(r"\btidemark_\w+|\bup\b", rule["expr"]))
    assert metrics_asked and metrics_asked <= LABELS.keys()
    labels = {name for names in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"]) for name in names.split(", ")}
    labels |= set(re.findall(r"(\w+)\s*=~?\s*\"", rule["expr"])) | set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert labels <= set.union(*(LABELS[m] for m in metrics_asked))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alarm_asks_for_the_increase_only_of_what_begins_at_zero(rule: dict[str, Any]) -> None:
    increasing = {m for m in METRICS if m.name in re.findall(r"increase\((\w+)", rule["expr"])}
    assert all(m.counts and m.labels == ("topic",) for m in increasing)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alarm_about_the_last_batch_looks_how_old_that_is_or_what_waits(rule: dict[str, Any]) -> None:
    asked = set(re.findall(r"\btidemark_\w+", rule["expr"]))
    if asked & {metrics.BATCH.name, metrics.RATE.name}:
        assert asked & {metrics.COMMIT_AGE.name, metrics.LAG.name}


def test_every_alarm_says_what_follows() -> None:
    said = dict(re.findall(r"^\| (Tidemark\w+) \| .+ \| (.+) \|$", OPERATING, re.MULTILINE))
    assert said.keys() == {rule["alert"] for rule in RULES}
    assert all(len(then) > 10 for then in said.values())
