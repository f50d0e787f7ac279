"""What waits for a decision while the day goes on: what is refused meanwhile, and what is refused to it afterwards."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from tidemark import lake, settle
from tidemark.model import Catalog

NOW = datetime.now(UTC)
TODAY = NOW.date()
YESTERDAY, BEFORE = TODAY - timedelta(days=1), TODAY - timedelta(days=2)


def recorded(settings: Any, name: str, kind: str, days: tuple[date, ...] = (), seq: int = 3, **more: Any) -> lake.Run:
    """A run's record, saved, with stream main pinned at batch `seq`."""
    pins = {"main": lake.Pin("main", seq, {"clicks": {"0": seq}}, NOW.isoformat())}
    said = {"state": "staged", **more}
    run = lake.Run(name, said.pop("state"), [str(d) for d in days], "a mistake", NOW.isoformat(), "0", pins, kind=kind, **said)
    lake.save(settings, run)
    return run


NOTHING = Catalog({}, {}, {})
WAITS = r"run r1 \(%s: a mistake\) waits for a decision; publish or drop it first: tidemark publish r1, or tidemark drop r1"


@pytest.mark.parametrize("state", ["running", "staged", "failed"])
def test_rejects_are_not_mended_while_a_replay_waits(settings, monkeypatch, state):
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: pytest.fail("Spark was started"))
    recorded(settings, "r1", "replay", (YESTERDAY,), state=state, open_days=[str(TODAY)])
    with pytest.raises(settle.SettleError, match=WAITS % state):
        settle.settle_rejects(settings, NOTHING, "page may be null")


def test_rejects_are_not_mended_beside_a_replay_that_began_while_spark_did(settings, monkeypatch):
    begin = lambda *_, **__: recorded(settings, "r1", "replay", state="running")  # noqa: E731
    monkeypatch.setattr("tidemark.session.session", begin)
    with pytest.raises(settle.SettleError, match=WAITS % "running"):
        settle.settle_rejects(settings, NOTHING, "page may be null")
    assert [run.id for run in lake.runs(settings)] == ["r1"]


@pytest.mark.parametrize(("kind", "state"), [("replay", "published"), ("replay", "dropped"), ("settle", "staged")])
def test_rejects_are_mended_beside_what_is_decided_and_beside_a_night(settings, monkeypatch, kind, state):
    monkeypatch.setattr("tidemark.session.session", lambda *_, **__: None)
    recorded(settings, "r1", kind, (YESTERDAY,), state=state)
    with pytest.raises(settle.SettleError, match="no stream has committed a batch yet"):  # which is asked next
        settle.settle_rejects(settings, NOTHING, "page may be null")
