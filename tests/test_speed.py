"""The stream's clockwork that needs neither Kafka nor Spark; what it does with them is in tests/integration."""

import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.errors import StreamingQueryException
from structlog.testing import capture_logs

from tidemark import fold, kafka, lake, local, speed
from tidemark.fold import HOUR
from tidemark.model import Live, View, duration, view
from tidemark.pipelines import CATALOG
from tidemark.pipelines.searches import search_clicks
from tidemark.pipelines.traffic import last_hour
from tidemark.settings import Settings

END, STEP = datetime(2026, 11, 19, 14, 30, tzinfo=UTC), timedelta(seconds=5)
WRITTEN = END - timedelta(hours=9)


@pytest.mark.parametrize(
    ("ended", "written", "on"),
    [
        (None, WRITTEN, WRITTEN + STEP),
        # The hours since hold nothing, and left no file to tell that they were swept.
        (END - timedelta(hours=1), WRITTEN, END - timedelta(hours=1)),
        (None, None, datetime(2026, 11, 19, 14, tzinfo=UTC)),
        (END - timedelta(days=2), WRITTEN, datetime(2026, 11, 18, 16, tzinfo=UTC)),
    ],
    ids=["behind what is written", "where it ended", "nothing is known", "away for days"],
)
def test_a_sweep_goes_on_after_a_start(ended: datetime | None, written: datetime | None, on: datetime) -> None:
    files = [SimpleNamespace(span={"mark": "all"}, high=written)] if written else []
    stream: Any = SimpleNamespace(
        computed={last_hour.name: ended} if ended else {}, tables={last_hour.name: SimpleNamespace(files=lambda: files)}
    )
    refresher = object.__new__(speed.Refresher)
    refresher.stream, refresher.zone = stream, ZoneInfo("Asia/Shanghai")
    assert refresher.swept_before(last_hour, END, STEP) == on


@pytest.mark.parametrize(
    ("triggers", "yields"),
    [("alarms=2 seconds", []), ("main=200 milliseconds", []), ("alarms=2 seconds,main=10 seconds", [5])],
    ids=["every three seconds", "milliseconds", "ten"],
)
def test_a_stream_that_has_time_lets_quicker_ones_go_first(
    triggers: str, yields: list[int], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*_: object) -> None:
        raise speed.SpeedError("far enough")

    asked: list[int] = []
    monkeypatch.setattr(local, "step_aside", asked.append)
    monkeypatch.setattr(speed, "Stream", stream)
    with pytest.raises(speed.SpeedError, match="far enough"):
        speed.run(settings.model_copy(update={"triggers": triggers}), CATALOG)
    assert asked == yields


BATCH = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [FOREACH_BATCH_USER_FUNCTION_ERROR] An error \
occurred in the user provided function in foreach batch sink. Reason: Return Message: Traceback (most recent call last):
  File "speed.py", line 7, in f
    raise KeyError("page_views")
KeyError: 'page_views'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "speed.py", line 9, in g
    read()
    ^^^^^^
pyspark.errors.SparkException: Job aborted: [DIVIDE_BY_ZERO] of a judgement
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Current State: ACTIVE
"""
WITHIN = "[STREAM_FAILED] Query [id = 1] terminated with exception: java.lang.OutOfMemoryError\n=== Streaming Query ===\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [(BATCH, "pyspark.errors.SparkException: Job aborted: [DIVIDE_BY_ZERO] of a judgement"), (WITHIN, WITHIN.splitlines()[0])],
    ids=["raised in a batch", "raised by Spark itself"],
)
def test_of_a_batch_that_failed_what_was_raised_is_told(text: str, told: str) -> None:
    assert speed.raised(text) == told


def test_the_place_where_a_sweep_ended_is_kept_for_the_next_start() -> None:
    shortcut, refresh = last_hour.shortcut, last_hour.refresh
    assert shortcut and refresh
    end = END - duration(refresh.back)
    noted: dict[str, datetime] = {}
    files = [SimpleNamespace(span={"mark": "all"}, high=end - STEP)]
    stream: Any = SimpleNamespace(computed={}, tables={last_hour.name: SimpleNamespace(files=lambda: files)}, skipped=set())
    stream.remember_computed = noted.update
    refresher = object.__new__(speed.Refresher)
    refresher.stream, refresher.swept, refresher.seen, refresher.upto = stream, {}, {}, {}
    refresher.sweep(last_hour, shortcut, refresh, END, 7)
    assert noted == {last_hour.name: end}


@pytest.mark.usefixtures("apart")
#   old data [40 days ago, two hours of it]   nothing   [now
def test_a_sweep_passes_over_what_holds_nothing_where_stream_time_has_jumped() -> None:
    shortcut, refresh = last_hour.shortcut, last_hour.refresh
    assert shortcut and refresh
    old, end = END - timedelta(days=40), END - duration(refresh.back)
    panes = [lake.File("old", 1, 1, None, 0, old, old + 2 * HOUR), lake.File("new", 1, 1, None, 0, END - HOUR, END)]
    tables = {"page_panes": SimpleNamespace(files=lambda: panes), last_hour.name: SimpleNamespace(files=list)}
    stream: Any = SimpleNamespace(computed={}, tables=tables)
    stream.skipped, stream.remember_computed = {last_hour.name}, stream.computed.update
    refresher = object.__new__(speed.Refresher)
    refresher.stream, refresher.seen, refresher.upto, refresher.swept = stream, {}, {}, {last_hour.name: old + HOUR}
    refresher.due = {last_hour.name: SimpleNamespace(rest=lambda _: None)}  # type: ignore[dict-item]
    refresher.answers = lambda *_: SimpleNamespace(toArrow=lambda: pa.table({}))  # type: ignore[method-assign,assignment,return-value]
    swept: list[tuple[datetime, datetime]] = []
    refresher.swap = lambda view, rows, since, until, step: swept.append((since, until))  # type: ignore[method-assign]
    for _ in range(4):
        refresher.sweep(last_hour, shortcut, refresh, END, 7)
    assert swept == [(old + HOUR, (old + 5 * HOUR).replace(minute=0)), (END - HOUR, end)]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that are none of Spark's are brought one by one."""
    monkeypatch.setattr("tidemark.fold.together", lambda frames, _: {name: frame.toArrow() for name, frame in frames.items()})


def large(_: View, __: Any, since: datetime, until: datetime) -> Any:
    """Rows of which the driver takes three hours' at once."""

    def bring() -> pa.Table:
        if until - since > 3 * HOUR:
            raise ValueError("is bigger than spark.driver.maxResultSize (256.0 MiB)")
        return pa.table({"since": [since], "until": [until]})

    return SimpleNamespace(toArrow=bring)


#   END - 10 h ... of which each try would span more than the one before
@pytest.mark.parametrize("swept", [False, True], ids=["the full way", "marks"])
@pytest.mark.usefixtures("apart")
def test_what_was_missed_of_a_view_is_computed_in_pieces_that_the_driver_takes(swept: bool) -> None:
    refresher, swapped, computed = object.__new__(speed.Refresher), [], {}
    stream: Any = SimpleNamespace(computed=computed, remember_computed=computed.update, skipped={last_hour.name})
    stream.catalog = SimpleNamespace(views={last_hour.name: last_hour})
    refresher.stream, refresher.views, refresher.lanes, refresher.places = stream, [last_hour], 1, [{}]
    refresher.seen, refresher.upto, refresher.known, refresher.versions, refresher.told = {}, {}, {}, {}, {}
    refresher.due = {last_hour.name: SimpleNamespace(rest=lambda *_: None, seconds=5)}  # type: ignore[dict-item]
    refresher.answers, refresher.zone, refresher.rest = large, UTC, 1  # type: ignore[method-assign,assignment]
    refresher.swap = lambda view, rows, *span: swapped.append(span[:2])  # type: ignore[method-assign]
    assert last_hour.shortcut and last_hour.refresh
    since = END - timedelta(hours=9, minutes=30)
    if swept:
        refresher.swept, until = {last_hour.name: since}, END - duration(last_hour.refresh.back)
        refresher.filled_from = lambda view, shortcut, since, end: since  # type: ignore[method-assign]
        while refresher.swept[last_hour.name] < until:
            refresher.sweep(last_hour, last_hour.shortcut, last_hour.refresh, END, 7)
    else:
        until = END
        refresher.refresh({last_hour.name: speed.Span(since, until, STEP, END, 7, END, [], since)})
    assert [swapped[0][0], *(end for _, end in swapped)] == [*(start for start, _ in swapped), until]
    assert swapped[0][0] == since
    assert all(start.minute == 0 for start, _ in swapped)
    assert computed[last_hour.name] == until


@pytest.mark.usefixtures("apart")
def test_an_hour_of_a_view_that_the_driver_does_not_take_is_named() -> None:
    refresher = object.__new__(speed.Refresher)
    refresher.answers, refresher.zone = lambda *_: large(last_hour, None, END, END + 9 * HOUR), UTC  # type: ignore[method-assign,assignment]
    with pytest.raises(speed.SpeedError, match=rf"{last_hour.name} has from .* on more rows than the driver takes of an hour"):
        [*refresher.in_pieces(last_hour, END - HOUR / 2, END, {})]


def test_minutes_of_marks_that_could_not_be_computed_are_not_missed_once_for_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemark.fold.together", lambda *_: {}["a table that cannot be read"])
    refresher: Any = object.__new__(speed.Refresher)
    refresher.stream, refresher.views, refresher.missed = SimpleNamespace(stream_time=END, done=7), [last_hour], []
    refresher.failed = {}
    refresher.waits, refresher.lacking = lambda: False, lambda *_: (END - timedelta(minutes=9), END)
    refresher.short, refresher.places, refresher.bases = lambda *_: None, [{}], {}
    for _ in range(2):
        with pytest.raises(KeyError, match="cannot be read"):
            refresher.newest()
    assert refresher.missed == []


@pytest.mark.parametrize("fails", ["its plan", "its job"])
def test_a_view_whose_newest_marks_fail_keeps_no_other_s_from_being_computed(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """It rests for a minute; of one that fails alone the error is raised, for whoever looks after the thread."""
    clock, site, jobs, swapped = [1000.0], CATALOG.views["site_last_hour"], [], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def together(frames: dict[str, Any], _: Any) -> dict[str, Any]:
        jobs.append([*frames])
        if "the job fails" in frames.values():
            raise ValueError("a mistake in a view")
        return frames

    def short(view: View, *_: Any) -> str:
        if view is site and fails == "its plan":
            raise ValueError("a mistake in a view")
        return "the job fails" if view is site else "rows"

    monkeypatch.setattr("tidemark.fold.together", together)
    refresher: Any = object.__new__(speed.Refresher)
    refresher.stream = SimpleNamespace(stream_time=END, done=7, catalog=CATALOG, stopping=threading.Event())
    refresher.views, refresher.missed, refresher.places, refresher.failed = [site, last_hour], [], [{}], {}
    refresher.seen, refresher.holds, refresher.due = {}, {}, {v.name: speed.Due("5 seconds") for v in refresher.views}
    refresher.waits, refresher.lacking = lambda: False, lambda *_: (END - STEP, END)
    refresher.short, refresher.held, refresher.prepared = short, lambda *_: 7, lambda: True
    refresher.swap = lambda view, *_: swapped.append(view.name)
    for seconds in (0, 5, 60):
        clock[0] += seconds
        refresher.newest()
    assert swapped == [last_hour.name] * 3
    assert site.name not in refresher.seen
    if fails == "its job":
        both, alone = [site.name, last_hour.name], [last_hour.name]
        assert jobs == [both, [site.name], alone, alone, both, [site.name], alone]
    clock[0] += 60
    refresher.views = [site]
    with pytest.raises(ValueError, match="a mistake in a view"):
        refresher.newest()


def test_marks_that_were_swept_stay_so_while_earlier_ones_are_swept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has given today other rollups; what is missed of the newest marks is still written once."""
    monkeypatch.setattr(lake, "swap_live", lambda *_, **__: None)
    refresher = object.__new__(speed.Refresher)
    covered, midnight = {last_hour.name: END}, END.replace(hour=0, minute=0)
    refresher.stream = SimpleNamespace(tables={last_hour.name: None}, locks={}, covered=covered, settings=None)  # type: ignore[assignment]
    refresher.zone = Settings(_env_file=None).tz
    refresher.swap(last_hour, pa.table({"mark": pa.array([], pa.timestamp("us", "UTC"))}), midnight, midnight + 4 * HOUR, None)
    assert covered == {last_hour.name: END}


TODAY, YESTERDAY = END.replace(hour=0, minute=0), END.replace(hour=0, minute=0) - timedelta(days=1)
EIGHT, EVENING, WEEK = END.replace(hour=8), YESTERDAY + timedelta(hours=20), END - timedelta(days=7)
HOURS = ("hourly_traffic", "site_hourly_traffic", "daily_traffic", "site_daily_traffic")


@pytest.mark.parametrize(
    ("lows", "again"),
    [
        ({"page_quarters": EIGHT}, dict.fromkeys(HOURS, EIGHT)),
        ({"page_quarters": EVENING}, dict.fromkeys(HOURS, EVENING)),
        ({"page_quarters": WEEK}, dict.fromkeys(HOURS, YESTERDAY)),
        ({"page_quarters": END + STEP}, {}),
        ({"page_panes": EVENING}, {"last_hour": TODAY, "site_last_hour": TODAY}),  # which are swept
        ({"payment_ledger": EIGHT}, {"payment_ledger": EIGHT, "payment_days": EIGHT}),
        ({"large_transactions": TODAY}, {}),  # a new view that announces: nobody is told of the morning
    ],
    ids=["today", "since yesterday", "a week", "nothing that was computed", "swept", "through another view", "new"],
)
def test_live_views_are_computed_again_from_where_what_they_read_lacked_rows(
    lows: dict[str, datetime], again: dict[str, datetime], settings: Settings
) -> None:
    stream = object.__new__(speed.Stream)
    stream.catalog, stream.settings, stream.state, stream.ended_at = CATALOG, settings, settings.state, END
    stream.state.mkdir(parents=True)
    stream.live_views = lambda: [v for v in CATALOG.views.values() if v.refresh]  # type: ignore[method-assign]
    stream.remembering, stream.versions = threading.Lock(), {}
    stream.computed = before = {v.name: END for v in stream.live_views() if v.name != "large_transactions"}
    stream.look_back(lows)
    kept = json.loads((stream.state / "views.json").read_text()) if again else {}
    assert {name: at for name, at in stream.computed.items() if at != END} == again
    assert kept == ({name: str(at) for name, at in (before | again).items()} if again else {})


@pytest.mark.parametrize("version", [None, 6], ids=["never computed", "of which an entry was moved away"])
def test_live_view_that_lacks_what_this_stream_computes_has_today_though_its_table_is_older(
    version: int | None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night, or another stream, has made the table, or its newest entry was damaged. Nobody is told of the morning by a view
    that announces and is new."""
    stream: Any = object.__new__(speed.Stream)
    stream.name, stream.catalog, stream.settings, stream.state = "main", CATALOG, settings, settings.state
    stream.computed, stream.versions, stream.ended_at, stream.remembering = {}, {}, None, threading.Lock()
    stream.generation = lake.Generation(1, 0, {}, {})
    stream.live_views = lambda: [v for v in CATALOG.views.values() if v.refresh]
    stream.metrics = SimpleNamespace(committed=lambda _: None)
    made = SimpleNamespace(metadata=lambda: SimpleNamespace(created_time=0), version=lambda: 5)
    stream.tables = {v.name: SimpleNamespace(delta=lambda: made) for v in stream.live_views()}
    lacks = () if version else ("hourly_traffic", "large_transactions")
    before = {v.name: END for v in stream.live_views() if v.name not in lacks}
    stream.state.mkdir(parents=True)
    (stream.state / "versions.json").write_text(json.dumps({"hourly_traffic": version} if version else {"site_daily_traffic": 5}))
    (stream.state / "views.json").write_text(json.dumps({name: str(at) for name, at in before.items()}))
    monkeypatch.setattr(lake, "newest_batch", lambda *_: [{"seq": 7, "stream_time": END, "finished_at": END}])
    stream.remember_time()
    assert stream.computed == before | {"hourly_traffic": TODAY}


def test_live_view_whose_pipeline_has_changed_has_all_of_today_by_the_code_of_now(settings: Settings) -> None:
    """Else its hours before `back` stay by the code of before, beside those of now, until the night."""
    stream: Any = object.__new__(speed.Stream)
    stream.name, stream.catalog, stream.mine, stream.set_aside = "main", CATALOG, CATALOG.stream("main"), {}
    stream.settings, stream.state, stream.ended_at = settings, settings.state / "main", END
    stream.live_views = lambda: stream.own(v for v in CATALOG.views.values() if v.refresh)
    stream.remembering, stream.versions = threading.Lock(), {}
    stream.computed = before = {v.name: END for v in stream.live_views()}
    stream.state.mkdir(parents=True)
    stream.remember_code()
    assert stream.computed == before
    code = json.loads((stream.state / "code.json").read_text())
    of_before = dict.fromkeys(("hourly_traffic", "large_transactions"), "of before")  # the latter announces
    (stream.state / "code.json").write_text(json.dumps(code | of_before))
    stream.remember_code()
    assert stream.computed == before | {"hourly_traffic": TODAY}
    assert json.loads((stream.state / "code.json").read_text()) == code


def test_views_that_went_together_go_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of both reads what they share once: two that are due a moment after each other would read it twice, for ever."""
    clock = [1000.0]

    def later(seconds: float = 0.01) -> float:  # each look at the clock takes ten milliseconds
        clock[0] += seconds
        return clock[0]

    monkeypatch.setattr("time.monotonic", later)
    views = [CATALOG.views["hourly_traffic"], CATALOG.views["site_hourly_traffic"]]
    stream: Any = SimpleNamespace(caught_up=True, progress={}, settings=Settings(_env_file=None), catalog=CATALOG)
    stream.remember_computed = lambda _: None
    refresher: Any = object.__new__(speed.Refresher)
    refresher.stream, refresher.views, refresher.rounds, refresher.lanes, refresher.places = stream, views, [views], 1, [{}]
    refresher.rest, refresher.due = speed.REST, {v.name: speed.Due("30 seconds") for v in views}
    refresher.seen, refresher.upto, refresher.known, refresher.versions, refresher.told = {}, {}, {}, {}, {}
    refresher.answers = refresher.swap = lambda *_: None
    span = speed.Span(END - HOUR, END, HOUR, END, 7, datetime.now(UTC), [], END - HOUR)
    refresher.span = lambda view, *now: span if refresher.due[view.name](*now) else None
    jobs: list[list[str]] = []

    def together(frames: dict[str, Any], _places: Any) -> dict[str, None]:
        later(20)
        jobs.append([*frames])
        return dict.fromkeys(frames)

    monkeypatch.setattr("tidemark.fold.together", together)
    while len(jobs) < 4:
        refresher.whole()
    assert jobs == [[v.name for v in views]] * 4


def test_what_reads_a_view_that_is_behind_is_computed_again_from_where_that_one_was() -> None:
    yesterday, today = END - timedelta(hours=20), END
    ledger, days = CATALOG.views["payment_ledger"], CATALOG.views["payment_days"]
    stream: Any = SimpleNamespace(
        done=7, stream_time=today, ended_at=None, skipped=set(), computed={ledger.name: yesterday, days.name: yesterday}
    )
    stream.low_since = lambda *_: speed.EARLIEST
    refresher = object.__new__(speed.Refresher)
    refresher.stream, refresher.zone, refresher.live = stream, Settings(_env_file=None).tz, {ledger.name, days.name}
    refresher.seen, refresher.upto = {days.name: yesterday}, {ledger.name: 6, days.name: 6}
    refresher.others, refresher.versions, refresher.due = {days.name: []}, {}, {days.name: lambda _: True}
    refresher.known = dict.fromkeys((ledger.name, days.name), END)
    refresher.reopened = lambda view: None
    refresher.untouched = lambda view, at: False

    early = refresher.span(days)
    assert early
    assert early.come < today  # as the log tells it
    refresher.seen[days.name], refresher.upto[days.name] = early.at, early.seq
    stream.computed[ledger.name], refresher.upto[ledger.name] = today, 7
    again = refresher.span(days)
    assert again
    assert (again.since.date(), again.at, again.seq) == (yesterday.date(), today, 7)


def test_what_reads_a_view_that_lacks_a_reopened_day_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run gave today other rollups. The view's turn came before that of the one that it reads, which goes beside it.

    the run ──▶ days: from what the ledger was ──▶ the ledger ──▶ days once more ──▶ nothing
    """
    run, names = datetime.now(UTC) - HOUR, ("payment_ledger", "payment_days")
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("tidemark.lake.reopened", lambda _, since, back: END.date() if since < run else None)
    refreshers, known = [], {}
    for name in names:
        one: Any = object.__new__(speed.Refresher)
        one.stream = SimpleNamespace(done=7, stream_time=END, ended_at=None, skipped=set(), computed=dict.fromkeys(names, END))
        one.stream.low_since, one.stream.settings = lambda *_: speed.EARLIEST, SimpleNamespace(lake_path=tmp_path)
        one.zone, one.live, one.known = UTC, {*names}, known
        one.seen, one.upto = dict.fromkeys(names, END), dict.fromkeys(names, 7)
        one.others = one.versions = {name: []}
        one.due = {name: lambda _: True}
        refreshers.append(one)

    def turn(of: int) -> bool:
        one, view = refreshers[of], CATALOG.views[names[of]]
        span = one.span(view)
        if span:
            known[view.name] = span.looking
        return span is not None

    ledger, days = 0, 1
    assert [turn(of) for of in (days, ledger, days, days, ledger)] == [True, True, True, False, False]


def test_a_view_that_looks_back_is_computed_until_the_last_event_is_that_old() -> None:
    """
    event, computed ──── a minute: rows may still come ──── nothing new ──── the next event
    """
    bursts, movers = CATALOG.views["card_bursts"], CATALOG.views["top_movers"]
    refresher: Any = object.__new__(speed.Refresher)
    refresher.zone, refresher.touched, minute = UTC, {}, timedelta(minutes=1)
    noon = END.replace(hour=12)

    def skipped(view: Any, computed: datetime, upto: int) -> bool:
        topics = {topic: [(7, noon)] for topic in CATALOG.topics}
        refresher.stream = SimpleNamespace(catalog=CATALOG, mine=SimpleNamespace(topics=CATALOG.topics), lows=topics)
        refresher.seen, refresher.upto = {view.name: computed}, {view.name: upto}
        return refresher.untouched(view, computed + minute / 2)

    assert [skipped(bursts, noon + n * minute / 2, 7 if n else 6) for n in range(5)] == [False, False, False, True, True]
    assert [skipped(movers, noon + n * minute / 2, 7 if n else 6) for n in range(3)] == [False, True, True]  # but for a new day
    assert not skipped(bursts, noon + 5 * minute, 6)


def test_a_live_view_reaches_back_further_than_a_clock_may_be_ahead() -> None:
    """Stream time is of all topics: one client's clock would leave what has Kafka's own time behind for ever."""
    views = [view for view in CATALOG.views.values() if view.refresh]
    assert views
    assert [v.name for v in views if duration(v.refresh.back) <= duration(fold.AHEAD)] == []


class Ready:
    """A view that is always due."""

    def __call__(self, *_: Any) -> bool:
        return True

    def rest(self, *_: Any) -> None: ...


def sweeper(swept: datetime, *tables: tuple[str, list[lake.File]]) -> tuple[Any, list[tuple[datetime, datetime]]]:
    """What sweeps the last hour, of a stream into which nothing comes; and the spans that it will have written."""
    refresher, written = object.__new__(speed.Refresher), list[tuple[datetime, datetime]]()
    stream: Any = SimpleNamespace(computed={}, skipped=set(), done=7, stream_time=END)
    stream.remember_computed = stream.computed.update
    stream.tables = {name: SimpleNamespace(files=lambda files=files: files) for name, files in tables}
    refresher.stream, refresher.zone, refresher.swept = stream, UTC, {last_hour.name: swept}  # type: ignore[assignment]
    refresher.seen, refresher.upto, refresher.known = {last_hour.name: END}, {last_hour.name: 7}, {}
    refresher.others, refresher.versions, refresher.due = {last_hour.name: []}, {}, {last_hour.name: Ready()}  # type: ignore[dict-item]
    refresher.in_pieces = lambda view, since, until, _: [(since, until, pa.table({}))]  # type: ignore[method-assign,assignment]
    refresher.swap = lambda view, rows, since, until, step: written.append((since, until))  # type: ignore[method-assign]
    return refresher, written


def test_a_piece_of_a_sweep_ends_with_an_hour_whose_file_holds_what_was_swept_before() -> None:
    """
    06:17 ──── 10:00 ──── 14:00 ──── 14:20     and not 10:17: the file of ten o'clock would lose what is behind that
    """
    assert last_hour.shortcut and last_hour.refresh
    end = END - duration(last_hour.refresh.back)
    refresher, written = sweeper(END.replace(hour=6, minute=17))
    refresher.filled_from = lambda view, shortcut, since, end: since
    for _ in range(3):
        refresher.sweep(last_hour, last_hour.shortcut, last_hour.refresh, END, 7)
    assert written == [
        (END.replace(hour=6, minute=17), END.replace(hour=10, minute=0)),
        (END.replace(hour=10, minute=0), END.replace(hour=14, minute=0)),
        (END.replace(hour=14, minute=0), end),
    ]


def test_a_day_that_a_run_gave_other_rollups_is_swept_to_its_end_though_no_batch_comes_and_a_try_fails() -> None:
    assert last_hour.refresh
    end = END - duration(last_hour.refresh.back)
    refresher, written = sweeper(end, ("page_panes", [lake.File("p", 1, 1, None, 0, TODAY, END)]), (last_hour.name, []))
    reopened, tries = [TODAY.date()], iter([OSError("a disk that was away")])
    refresher.reopened = lambda _: reopened.pop() if reopened else None

    def in_pieces(_: View, since: datetime, until: datetime, __: Any) -> list[Any]:
        if error := next(tries, None):
            raise error
        return [(since, until, pa.table({}))]

    refresher.in_pieces = in_pieces
    with pytest.raises(OSError, match="a disk that was away"):
        refresher.span(last_hour)
    for _ in range(6):
        refresher.span(last_hour)
    assert (written[0][0], written[-1][1], refresher.swept[last_hour.name]) == (TODAY, end, end)


def test_hours_of_which_a_run_has_left_no_rows_are_swept_where_marks_of_them_stand() -> None:
    assert last_hour.shortcut and last_hour.refresh
    six = END.replace(hour=6, minute=0)
    panes = ("page_panes", [lake.File("p", 1, 1, None, 0, END - HOUR, END)])
    marks = lake.File("live/20261119T06-all-aa/day=2026-11-19/x.parquet", 1, 1, six.date(), 0, six, six + HOUR)
    refresher, _ = sweeper(TODAY, panes, (last_hour.name, [marks]))
    assert refresher.filled_from(last_hour, last_hour.shortcut, TODAY, END) == six


@pytest.mark.parametrize(
    ("computed", "reopened", "since", "told"),
    [
        (END, None, END.replace(minute=0), END - timedelta(minutes=16)),
        (END, TODAY.date(), TODAY, END - timedelta(minutes=16)),
        (None, None, END.replace(hour=12, minute=0), END - timedelta(minutes=16)),
        (None, TODAY.date(), TODAY, END - timedelta(minutes=16)),
        (END - 3 * HOUR, None, END.replace(hour=11, minute=0), END - 3 * HOUR - timedelta(minutes=16)),
    ],
    ids=["after a start", "a run has changed today", "begins with history", "both", "was away"],
)
def test_of_what_a_view_is_computed_besides_nobody_is_told(
    computed: datetime | None, reopened: Any, since: datetime, told: datetime
) -> None:
    """It goes back a quarter of an hour, and looks one minute ahead; before it was there the stream had two hours of history."""
    jumps = CATALOG.views["price_jumps"]
    refresher, _ = sweeper(TODAY)
    refresher.stream.ended_at, refresher.stream.computed = END - 2 * HOUR, {jumps.name: computed} if computed else {}
    refresher.live, refresher.others, refresher.due = {jumps.name}, {jumps.name: []}, {jumps.name: Ready()}
    refresher.touched, refresher.reopened = {}, lambda _: reopened
    refresher.untouched = lambda view, at: False
    span = refresher.span(jumps)
    assert (span.since, span.told) == (since, told)


def test_the_mark_that_is_being_filled_is_left_to_the_live_way() -> None:
    """The full way takes its time: the live way has written that mark whole by then."""
    assert last_hour.shortcut
    marks = replace(last_hour)
    object.__setattr__(marks, "shortcut", replace(last_hour.shortcut, coarse=False))
    refresher, _ = sweeper(TODAY)
    refresher.seen, refresher.live, refresher.reopened = {}, {marks.name}, lambda _: None
    refresher.stream.stream_time, refresher.stream.ended_at = END + timedelta(seconds=2), None
    assert refresher.span(marks).until == END + STEP


def test_a_new_key_from_before_anybody_is_told_is_written_and_not_announced(settings: Settings) -> None:
    jumps = CATALOG.views["price_jumps"]
    minutes = pa.array([END - HOUR, END], pa.timestamp("us", "UTC"))
    rows = pa.table({"symbol": ["early", "now"], "minute": minutes, "day": pa.array([END.date()] * 2, pa.date32())})
    table = lake.Table(settings.lake_path, jumps.table, jumps.time)
    write_deltalake(table.path, rows.slice(0, 0), partition_by=["day"])
    refresher, _ = sweeper(TODAY)
    refresher.stream.settings, refresher.told = settings, {}
    assert [row["symbol"] for row in refresher.fresh(jumps, table, rows)] == ["early", "now"]
    refresher.told = {jumps.name: END - HOUR / 2}
    assert [row["symbol"] for row in refresher.fresh(jumps, table, rows)] == ["now"]


def test_a_view_waits_for_a_live_view_that_another_stream_refreshes() -> None:
    one: Any = object.__new__(speed.Stream)
    one.catalog, one.mine = CATALOG, CATALOG.stream("main")
    one.tables = {name: name for name in CATALOG.names}
    assert one.others(CATALOG.views["payment_days"]) == []
    one.mine = CATALOG.only(["word_counts"])
    assert "payment_ledger" in one.others(CATALOG.views["payment_days"])


def rounds_of(spans: dict[str, Any]) -> Any:
    """A refresher of a live view and of one that reads it, whose spans are these; and it notes what it computes."""
    refresher: Any = object.__new__(speed.Refresher)
    stream = SimpleNamespace(caught_up=True, progress={}, settings=Settings(_env_file=None), stopping=threading.Event())
    refresher.stream, refresher.rounds, refresher.waiting = stream, [[CATALOG.views[name]] for name in spans], None
    refresher.due, refresher.computed, refresher.failed = {name: speed.Due("1 second") for name in spans}, [], {}
    refresher.span = lambda view, *_: spans[view.name]() if callable(spans[view.name]) else spans[view.name]
    refresher.refresh = lambda found: refresher.computed.extend(found)
    return refresher


def test_while_a_stream_catches_up_a_view_that_reads_a_live_view_has_its_turn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    refresher = rounds_of({"stock_closes": "a span", "top_movers": "a span"})
    refresher.stream.caught_up = False
    refresher.whole()
    assert refresher.computed == []
    clock[0] += speed.PATIENCE
    refresher.whole()
    assert refresher.computed == ["stock_closes", "top_movers"]


def test_a_view_that_fails_keeps_none_of_the_others_from_being_computed() -> None:
    def broken() -> Any:
        raise ValueError("its sweep found a file gone")

    refresher = rounds_of({"stock_closes": broken, "top_movers": "a span"})
    refresher.whole()
    assert refresher.computed == ["top_movers"]
    assert not refresher.due["stock_closes"]()  # it rests

    def refresh(found: dict[str, Any]) -> None:
        if "stock_closes" in found:
            raise ValueError("its function raises")
        refresher.computed.extend(found)

    refresher = rounds_of({"stock_closes": "a span", "top_movers": "a span"})
    refresher.refresh = refresh
    with pytest.raises(ValueError, match="its function raises"):  # the thread says so, and comes again
        refresher.whole()
    assert refresher.computed == ["top_movers"]


def test_a_stream_whose_broker_has_come_is_starting_and_has_the_time_of_a_start(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark comes up for longer than a stream that waits may be silent."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    came = iter([False, True])

    def wait(*_: Any) -> None:
        if not next(came):
            raise kafka.BrokerAway("no broker yet")

    def prepare(*_: Any) -> None:
        told.append(local.status(settings)["heartbeat"]["state"])
        raise KeyboardInterrupt

    told: list[str] = []
    monkeypatch.setattr("tidemark.kafka.wait", wait)
    monkeypatch.setattr(speed.Stream, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        speed.run(settings, CATALOG)
    assert told == ["starting"]


def test_stream_that_waits_for_a_broker_ends_when_it_is_asked_to(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    local.want(settings, "main", "stopped", "no broker today", "a test")
    speed.run(settings, CATALOG)
    assert local.status(settings)["heartbeat"]["state"] == "stopped"


LEADERLESS = "org.apache.kafka.common.errors.TimeoutException: Timeout of 60000ms expired before the position could be determined"


@pytest.mark.parametrize(
    ("away", "said", "pauses"),
    [(False, ["a query ended for want of Kafka, which answers; it begins again"], [5]), (True, ["the broker is back"], [])],
    ids=["a partition without a leader", "a broker that comes back"],
)
def test_a_query_that_lacks_kafka_while_kafka_answers_is_told_and_not_begun_again_at_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, away: bool, said: list[str], pauses: list[float]
) -> None:
    def end(_: float) -> None:
        raise StreamingQueryException(f"[STREAM_FAILED] Query [id = 1] terminated with exception: {LEADERLESS}")

    monkeypatch.setattr(kafka, "wait", lambda *_: None)
    monkeypatch.setattr(speed, "Due", lambda _: lambda: False)
    waited = list[float]()
    stream: Any = object.__new__(speed.Stream)
    stream.settings, stream.name, stream.away = settings, "main", away
    stream.asked_to_end, stream.beat = lambda: False, lambda _: None
    stream.stopping = SimpleNamespace(wait=waited.append, is_set=lambda: False)
    stream.spark = SimpleNamespace(catalog=SimpleNamespace(clearCache=lambda: None))
    query = SimpleNamespace(isActive=True, status={"isTriggerActive": False}, awaitTermination=end, stop=lambda: None)
    with capture_logs() as events:
        stream.follow(query)
    assert ([event["event"] for event in events], waited) == (said, pauses)
    assert away or LEADERLESS in events[0]["because"]


@pytest.mark.parametrize("asked", [True, False], ids=["asked to end", "its query has ended"])
def test_a_stream_that_is_asked_to_end_says_that_it_drains_before_it_waits_for_its_batch(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    stream, told = object.__new__(speed.Stream), list[str]()
    stream.settings, stream.name, stream.away, stream.stopping = settings, "main", False, threading.Event()
    monkeypatch.setattr(stream, "asked_to_end", lambda: stream.stopping.set() or True)
    monkeypatch.setattr(stream, "beat", told.append)
    monkeypatch.setattr(speed, "drain", lambda _: told.append("its batch"))
    stream.follow(SimpleNamespace(isActive=asked))
    assert told == ["draining", "its batch"][not asked :]


def test_a_stream_obeys_what_it_is_told_though_the_clock_was_set_back_and_not_what_the_one_before_it_was_told(
    settings: Settings,
) -> None:
    stream: Any = object.__new__(speed.Stream)
    stream.settings, stream.name, stream.state, stream.stopping = settings, "main", settings.state / "main", threading.Event()
    hour, now = timedelta(hours=1), datetime.now(UTC)
    told = settings.state / "main" / "desired.json"
    local.want(settings, "main", "running", "new code", "a test", again=True)
    for began, at in ((now + hour, now), (now - hour, now + hour)):  # the wish is obeyed; its hour is yet to come once more
        told.write_text(json.dumps(json.loads(told.read_text()) | {"at": at.isoformat()}))
        stream.began, stream.asked_before = began, at.isoformat()
        assert not stream.asked_to_end()
    stream.began, stream.asked_before = now + hour, local.wanted(settings, "main")["at"]
    local.want(settings, "main", "stopped", "the disk", "a test")
    assert stream.asked_to_end()


def test_of_what_a_rollup_lacks_a_stream_that_is_asked_to_end_finishes_the_step(settings: Settings) -> None:
    rolled: list[int] = []
    stream: Any = object.__new__(speed.Stream)
    stream.settings, stream.name, stream.state, stream.began = settings, "main", settings.state / "main", datetime.now(UTC)
    stream.mine, stream.set_aside, stream.progress, stream.stopping = CATALOG.stream("main"), {}, {}, threading.Event()
    stream.ledger, stream.checkpoint = SimpleNamespace(appended=lambda _: 9), SimpleNamespace(newest=lambda _: 9)
    stream.generation, stream.tables = lake.Generation(1, 0, {}, {}), dict.fromkeys(CATALOG.rollups, stream.ledger)
    stream.tables["page_panes"] = SimpleNamespace(appended=lambda _: 3)
    stream.steps = lambda *_: [lake.Batch("main", 4, 6), lake.Batch("main", 7, 9)]
    stream.asked_before = local.wanted(settings, "main")["at"]
    stream.state.mkdir(parents=True)

    def roll_step(_rollup: Any, step: lake.Batch) -> None:
        rolled.append(step.hi)
        (stream.state / "stop").touch()

    stream.roll_step = roll_step
    stream.roll_what_lacks()
    assert rolled == [6]
    assert local.status(settings)["heartbeat"]["state"] == "starting"  # told before each step, so nobody takes it for silent


@pytest.mark.parametrize("before", [{"seq": 7, "set_aside": {"mended": "no column b"}}, None])
def test_what_a_start_sets_aside_is_told_before_its_first_batch(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any] | None
) -> None:
    """What the last batch told is kept but for that; where there was none, the first one tells."""
    stream: Any = object.__new__(speed.Stream)
    stream.settings, stream.name, stream.state, stream.mine = settings, "main", settings.state / "main", CATALOG.stream("main")
    stream.catalog, stream.set_aside, progress = CATALOG, {}, settings.state / "main" / "progress.json"
    stream.state.mkdir(parents=True)
    if before:
        progress.write_text(json.dumps(before))
    context = SimpleNamespace(setLocalProperty=lambda *_: None)
    monkeypatch.setattr(speed.session, "session", lambda *_, **__: SimpleNamespace(sparkContext=context))
    monkeypatch.setattr(speed, "Refresher", lambda *_, **__: None)
    for step in ("open_generation", "remember_topics", "remember_time", "roll_what_lacks"):
        setattr(stream, step, lambda *_: None)
    stream.pools, stream.read_upto, stream.lag, stream.live_views = lambda: "pools.xml", dict, dict, list
    stream.make_tables = lambda: stream.set_aside.update(broken="no column c")
    stream.prepare()
    told = local.status(settings).get("progress")
    assert told == (before and {"seq": 7, "set_aside": {"broken": "no column c"}})


@pytest.mark.parametrize("newest", ["second", "main.before-2-1"])
def test_a_topic_begins_where_the_stream_began_which_took_it_up_last(settings: Settings, newest: str) -> None:
    """What was set aside tells too: a stream that left a topic may take it up again."""
    aside = "main.before-2-1"
    began = {"main": {"views": {"0": 0}}, "second": {"clicks": {"0": 7}}, aside: {"clicks": {"0": 3}, "views": {"0": 0}}}
    for name, start in began.items():
        file = settings.checkpoints / name / "tidemark.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"start": start}))
        os.utime(file, (at := 2 if name == newest else 1, at))
    for damaged in ("[]", "{}", ""):
        (third := settings.checkpoints / f"third{len(damaged)}{damaged[:1]}").mkdir()
        (third / "tidemark.json").write_text(damaged)
    (settings.checkpoints / "fourth").mkdir()
    stream, born = object.__new__(speed.Stream), SimpleNamespace(created_time=0)
    stream.settings, stream.ledger = settings, SimpleNamespace(delta=lambda: SimpleNamespace(metadata=lambda: born))  # type: ignore[assignment]
    assert stream.starts_of_all() == {"clicks": began[newest]["clicks"], "views": {"0": 0}}
    born.created_time = 1_500  # of a lake that was begun afresh between the two nothing is told by the older
    assert stream.starts_of_all() == began[newest]


@view(reads={"clicks": search_clicks}, key=("hour",), time="hour", live=Live("1 minute", "30 minutes"))
def hourly_clicks(clicks: Any) -> Any: ...


@pytest.mark.parametrize(
    ("view", "seen", "clicked", "since"),
    [
        (search_clicks, "10:31", "10:04", "09:00"),
        (search_clicks, "10:31", None, "09:00"),
        (search_clicks, None, None, "09:00"),
        (hourly_clicks, "10:31", None, "09:00"),  # of searches, which look ten minutes ahead
    ],
)
def test_rows_that_look_ahead_at_a_late_event_are_computed_again(
    view: View, seen: str | None, clicked: str | None, since: str
) -> None:
    #   09:58 search   10:04 its click, thirty minutes late at most    10:32 stream time
    def at(time: str) -> datetime:
        return datetime.fromisoformat(f"2026-11-19T{time}+00:00")

    stream: Any = SimpleNamespace(done=7, stream_time=at("10:32"), ended_at=None, skipped=set(), computed={})
    stream.low_since = lambda *_: at(clicked) if clicked else speed.EARLIEST
    refresher = object.__new__(speed.Refresher)
    refresher.stream, refresher.zone, refresher.live = stream, Settings(_env_file=None).tz, set()
    refresher.seen, refresher.upto = {view.name: at(seen)} if seen else {}, {view.name: 6}
    refresher.others, refresher.versions, refresher.due = {view.name: []}, {}, {view.name: lambda _: True}
    refresher.reopened = lambda view: None
    refresher.untouched = lambda view, at: False
    span = refresher.span(view)
    assert span and span.since == at(since)


def test_a_table_that_cannot_be_merged_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[str] = []

    def compact(_spark: Any, _settings: Any, table: str, *_: Any) -> None:
        merged.append(table)
        if table == "page_views":
            raise FileNotFoundError("a file is gone")

    monkeypatch.setattr("tidemark.lake.compact", compact)
    monkeypatch.setattr("tidemark.lake.pins", lambda *_: {})
    stream: Any = object.__new__(speed.Stream)
    stream.settings = SimpleNamespace(state=tmp_path, compact_every="1 minute")
    stream.spark, stream.name, stream.catalog, stream.mine = None, "main", CATALOG, CATALOG.stream("main")
    stream.stopping, stream.caught_up, stream.ledger = threading.Event(), True, "ledger"
    stream.checkpoint = SimpleNamespace(pin=lambda: SimpleNamespace(seq=7))
    stream.tables = {name: name for name in ("page_views", "page_panes", "page_quarters")}
    stream.compactions()()
    assert merged == ["page_views", "page_panes", "page_quarters", "ledger"]


def test_a_batch_announces_what_it_brings_and_a_failure_there_does_not_stop_the_stream(tmp_path: Path) -> None:
    done: list[str] = []
    stream = object.__new__(speed.Stream)
    stream.turn, stream.stopping = threading.Lock(), threading.Event()
    stream.settings = SimpleNamespace(state=tmp_path)  # type: ignore[assignment]

    def whole() -> None:
        assert stream.turn.locked()
        done.append("announced")
        raise ValueError("a mistake in a view")

    stream.batch = lambda records, number: done.append(f"batch {number}")  # type: ignore[method-assign,assignment]
    stream.announcing = SimpleNamespace(views=["host_errors"], whole=whole)  # type: ignore[assignment]
    stream.batch_and_what_it_announces(None, 7)  # type: ignore[arg-type]
    assert done == ["batch 7", "announced"]
    with pytest.raises(ValueError, match="a mistake in a view"):
        stream.announced()()  # the thread beside tries again, and never in the middle of a batch
    assert not stream.turn.locked()


def test_a_rollup_whose_time_is_a_date_says_no_instant_from_which_on_views_are_computed_again() -> None:
    stream: Any = object.__new__(speed.Stream)
    stream.tables = {"days": SimpleNamespace(time="on"), "panes": SimpleNamespace(time="pane")}
    told = [SimpleNamespace(stats='{"minValues": {"on": "2025-01-01", "pane": "0001-01-01T00:00:00.000Z"}}')]
    assert stream.lowest("days", told) == speed.EARLIEST
    assert stream.lowest("panes", told) == datetime.min.replace(tzinfo=UTC)
    assert stream.lowest("days", []) is None
