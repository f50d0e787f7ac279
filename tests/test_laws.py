"""The law that everything stands on, as properties: however the events are cut, ordered and repeated, one answer.

Here for traffic, with its rollup and its short ways; the other pipelines have theirs beside their examples.
"""

import importlib
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laws import HOUR, RECORDS, ZONES, Law, broken, instants, labelled, said, unheld, worlds
from pyspark.sql import SparkSession

from tidemark import fold, kafka, speed
from tidemark.model import catalog
from tidemark.pipelines import CATALOG, PIPELINES, traffic
from tidemark.settings import Settings

FIVE, NOON = timedelta(seconds=5), datetime(2026, 11, 18, 12, tzinfo=UTC)


@st.composite
def page_views(draw, zone: str) -> dict:
    return {
        "visitor_id": draw(st.sampled_from(("ann", "bob", "eve", ""))),
        "page": draw(st.sampled_from(("/", "/cart"))),
        "viewed_at": said(draw(instants(zone, HOUR, HOUR - FIVE, HOUR + FIVE))),
    }


MARKS = """
    (SELECT unnest(generate_series(start, stop - INTERVAL 5 SECOND, INTERVAL 5 SECOND)) AS mark FROM period)
    JOIN page_views ON viewed_at >= mark - INTERVAL 1 HOUR AND viewed_at < mark"""
COUNTED = "count(*) AS pv, count(DISTINCT visitor_id) AS uv"
WITHIN = "FROM page_views, period WHERE viewed_at >= start AND viewed_at < stop GROUP BY ALL"

LAW = Law(
    catalog([traffic]),
    {"page_views": page_views},
    {
        "last_hour": f"SELECT page, mark, {COUNTED} FROM {MARKS} GROUP BY ALL",
        "site_last_hour": f"SELECT mark, {COUNTED} FROM {MARKS} GROUP BY ALL",
        "hourly_traffic": f"SELECT page, date_trunc('hour', viewed_at) AS hour, {COUNTED} {WITHIN}",
        "site_hourly_traffic": f"SELECT date_trunc('hour', viewed_at) AS hour, {COUNTED} {WITHIN}",
        "daily_traffic": f"SELECT page, CAST(viewed_at AT TIME ZONE zone AS DATE) AS day, {COUNTED} {WITHIN}",
        "site_daily_traffic": f"SELECT CAST(viewed_at AT TIME ZONE zone AS DATE) AS day, {COUNTED} {WITHIN}",
    },
)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.__name__.rpartition(".")[2])
def test_every_topic_has_events_and_every_column_of_a_view_an_independent_answer(spark, pipeline):
    name = pipeline.__name__.rpartition(".")[2]
    law = LAW if pipeline is traffic else importlib.import_module(f"test_{name}").LAW
    assert law.catalog == catalog([pipeline])
    assert unheld(spark, law) == {}


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_cut_order_and_repetition_gives_by_every_way_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


#   panes, in steps from the first mark on: an hour before it, where what is merged beforehand begins and ends, where the first
#   and the last of its five minutes do, the mark itself
EDGES = (-720, -708, -660, -60, -6, 0)
VIEW = st.tuples(
    st.builds(lambda edge, steps: edge + steps, st.sampled_from(EDGES), st.integers(-2, 30)),
    st.sampled_from((timedelta(0), FIVE - timedelta(microseconds=1))),
    st.sampled_from(("ann", "bob", "")),
    st.sampled_from(("/", "/cart")),
)


def newest(spark: SparkSession, read: fold.Read) -> Any:
    """What a stream computes its newest marks with, over tables that `read` gives."""
    refresher: Any = object.__new__(speed.Refresher)
    refresher.spark, refresher.read_table, refresher.bases, refresher.blocks = spark, read, {}, {}
    nowhere = Settings(_env_file=None, home="/nowhere")
    refresher.stream = SimpleNamespace(done=0, low_since=lambda names, seq, nothing: nothing, settings=nowhere)
    refresher.stream.came = lambda names, seq, before: False
    return refresher


@given(
    viewed=st.lists(VIEW, min_size=9, max_size=60, unique=True),
    spans=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 13)), min_size=2, max_size=3),
)
def test_marks_from_rows_that_were_merged_beforehand_are_those_over_all_panes(interpreted, viewed, spans):
    """One after the other, as the stream asks for them: what was merged for some serves others as long as it can."""
    events = [
        {"event_id": f"e{n}", "visitor_id": visitor, "page": page, "viewed_at": NOON + step * FIVE + within}
        for n, (step, within, visitor, page) in enumerate([*viewed, (-700, timedelta(0), "eve", "/")])
    ]
    panes = traffic.page_panes(views=interpreted.createDataFrame(pa.Table.from_pylist(events))).persist()
    twice = panes.union(panes)  # as a batch that was tried again leaves them
    refresher, frames, at = newest(interpreted, lambda *_: twice), [], NOON
    for gap, steps in spans:
        since, at = at + gap * FIVE, at + (gap + steps) * FIVE
        for view in (traffic.last_hour, traffic.site_last_hour):
            all_panes = fold.answers(interpreted, view, view.shortcut, lambda *_: twice, since, at, settled=False)
            frames += [("merged", view.name, refresher.marks(view, view.shortcut, since, at, aside=False))]
            frames += [("all", view.name, all_panes)]
    found = sorted(labelled(frames).to_pylist(), key=str)
    merged, whole = ([r | {"_way": ""} for r in found if r["_way"] == way] for way in ("merged", "all"))
    interpreted.catalog.clearCache()
    assert merged == whole != []


@pytest.mark.parametrize("known", ["when it came", "nothing", "that a run changed the rollups"])
@example(viewed=[(-299, timedelta(0), "bob", "/")], late=[(-300, timedelta(0), "ann", "/")], gap=1)
@given(viewed=st.lists(VIEW, max_size=30), late=st.lists(VIEW, min_size=1, max_size=8), gap=st.integers(1, 130))
def test_what_is_kept_of_an_hour_in_fives_of_minutes_is_merged_again_where_an_event_came_late(
    interpreted, viewed, late, gap, known
):
    """A minute or more later, so that it is merged anew for the marks of then, by what is `known` of the event."""

    def panes(views: list[Any], first: int) -> Any:
        events = [
            {"event_id": f"e{n}", "visitor_id": visitor, "page": page, "viewed_at": NOON + step * FIVE + within}
            for n, (step, within, visitor, page) in enumerate(views, first)
        ]
        return traffic.page_panes(views=interpreted.createDataFrame(pa.Table.from_pylist(events))).persist()

    before, came = panes([*viewed, (-700, timedelta(0), "eve", "/")], 0), panes(late, 100)
    tables = [before]
    refresher, at = newest(interpreted, lambda *_: tables[-1]), NOON + FIVE
    refresher.marks(traffic.last_hour, traffic.last_hour.shortcut, NOON, at, aside=False)
    tables.append(before.union(came))
    lowest = NOON + min(step for step, *_ in late) * FIVE
    lows = {"when it came": lowest, "nothing": speed.EARLIEST}
    refresher.stream.done, refresher.stream.low_since = 2, lambda names, seq, nothing: lows.get(known, nothing)
    refresher.bases.clear()
    since, at = at + gap * FIVE, at + (gap + 1) * FIVE
    with mock.patch.object(speed.lake, "reopened", lambda *_: NOON.date() if known not in lows else None):
        marks = refresher.marks(traffic.last_hour, traffic.last_hour.shortcut, since, at, aside=False)
    shortcut = traffic.last_hour.shortcut
    every = fold.answers(interpreted, traffic.last_hour, shortcut, lambda *_: tables[-1], since, at, settled=False)
    found = sorted(labelled([("merged", "", marks), ("all", "", every)]).to_pylist(), key=str)
    merged, whole = ([r | {"_way": ""} for r in found if r["_way"] == way] for way in ("merged", "all"))
    interpreted.catalog.clearCache()
    assert merged == whole


@pytest.mark.parametrize(
    ("late", "moved"),
    [(timedelta(seconds=1), timedelta(0)), (timedelta(0), FIVE), (timedelta(minutes=10), FIVE)],
    ids=["a little", "not at all, and something new", "behind what is merged, and something new"],
)
def test_the_newest_mark_holds_what_came_late_before_the_stream_fell_silent(interpreted, monkeypatch, late, moved):
    #   bob, whose mark is written   ann, late, and perhaps eve   nothing ever after
    def panes(*views: tuple[str, datetime]) -> Any:
        events = [{"event_id": v, "visitor_id": v, "page": "/", "viewed_at": at} for v, at in views]
        return traffic.page_panes(views=interpreted.createDataFrame(pa.Table.from_pylist(events)))

    clock, newer = [1000.0], [("eve", NOON + moved)] if moved else []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(speed.lake, "reopened", lambda *_: None)
    monkeypatch.setattr(speed.fold, "together", lambda frames, _: {name: rows.toArrow() for name, rows in frames.items()})
    tables, views = [panes(("bob", NOON))], [traffic.last_hour, traffic.site_last_hour]
    refresher, stream = newest(interpreted, lambda *_: tables[-1]), object.__new__(speed.Stream)
    stream.settings, stream.catalog, stream.done, stream.stream_time = refresher.stream.settings, CATALOG, 0, NOON
    stream.caught_up, stream.progress, stream.covered, stream.skipped = True, {}, {}, set()
    stream.lows = {"page_panes": speed.deque([(0, NOON)])}
    refresher.stream, refresher.views, refresher.places, refresher.missed = stream, views, [{}], []
    refresher.failed = {}
    refresher.seen, refresher.holds, refresher.due = {}, {}, {v.name: speed.Due("5 seconds") for v in views}
    written: dict[tuple[str, datetime], list[int]] = {}

    def swap(view: Any, rows: pa.Table, *_: Any) -> None:
        for row in rows.to_pylist():
            written.setdefault((view.name, row["mark"]), []).append(row["pv"])

    refresher.swap = swap
    refresher.newest()
    tables.append(tables[0].union(panes(("ann", NOON - late), *newer)))
    stream.lows["page_panes"].append((1, NOON - late))
    stream.done, stream.stream_time = 1, NOON + moved
    for _ in range(15):
        clock[0] += 10
        refresher.newest()
    interpreted.catalog.clearCache()
    assert {name: said[-1] for (name, mark), said in written.items() if mark == NOON + moved + FIVE} == {
        v.name: len([*newer, "ann", "bob"]) for v in views
    }
    assert all(len(said) < 12 for said in written.values())  # until it holds all, and not for ever


def test_marks_of_more_than_half_of_what_they_look_back_on_are_not_merged_beforehand(spark):
    refresher = newest(spark, lambda *_: None)
    late = NOON + timedelta(minutes=30) + FIVE
    assert refresher.marks(traffic.last_hour, traffic.last_hour.shortcut, NOON, late, aside=False) is None


def test_every_declaration_that_ships_fits_what_it_reads_and_what_it_announces(spark):
    assert {d.name: str(schema) for d, schema in fold.schemas(spark, CATALOG) if isinstance(schema, Exception)} == {}


@pytest.mark.parametrize("topic", [t for t in CATALOG.topics.values() if t.sample], ids=lambda t: t.name)
def test_a_sample_is_accepted_drawn_again_by_the_same_seed_and_repeats_itself_exactly(spark, topic):
    drawn, again = ([topic.sample(Random(n), NOON + n * timedelta(milliseconds=50)) for n in range(60)] for _ in range(2))
    assert drawn == again
    if topic.id:
        assert all(one == other for one in drawn for other in drawn if one[topic.id] == other[topic.id])
        assert len({event[topic.id] for event in drawn}) > 20
    ends = [topic.compacted and set(event) == {topic.key} for event in drawn]  # which `produce` makes a tombstone
    rows = [
        {
            "key": kafka.key_of(topic, event),
            "value": None if end else kafka.as_value(topic, event),
            "partition": 0,
            "offset": n,
            "timestamp": NOON + timedelta(seconds=10),
        }
        for n, (event, end) in enumerate(zip(drawn, ends, strict=True))
    ]
    log = fold.judged(topic, spark.createDataFrame(pa.Table.from_pylist(rows, RECORDS)))
    assert log.select("reject").distinct().toArrow().to_pylist() == [{"reject": None}]
