"""Live, settled, published: the same answer, on a real broker, with readers looking on."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from structlog.testing import capture_logs

from tidemark import compare, fold, kafka, lake, model, query, settle
from tidemark.functions import distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, View, expect, rollup, view
from tidemark.pipelines import traffic
from tidemark.settings import Settings

CATALOG = model.catalog([traffic])
YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)
MIDNIGHT = datetime.combine(YESTERDAY, datetime.min.time(), UTC)


def declared(topic: str) -> Catalog:
    """The shipped traffic pipeline, or the clicks below; live views refresh every second, so that no test waits minutes."""
    return quick() if topic == "page_views" else clicks(topic)


def quick() -> Catalog:
    """The shipped pipeline, but for how often its live views are computed again."""
    found = dict(vars(traffic))
    for name, one in found.items():
        if isinstance(one, View) and one.refresh:
            found[name] = replace(one, refresh=Live("1 second", one.refresh.back))
            if one.shortcut:
                object.__setattr__(found[name], "shortcut", replace(one.shortcut, live=Live("1 second", one.shortcut.live.back)))
    return model.catalog([type("traffic", (), found)])


def wait_for_views(stream: Any, settings: Settings, names: list[str], newest: datetime) -> None:
    """Until each live view has been computed again with the event of that time, which the last batch brought."""
    tables = [lake.Table(settings.lake_path, f"views/{name}") for name in names]

    def fresh(table: lake.Table) -> bool:
        entries = table.delta().history(30) if table.exists else []
        said = [json.loads(entry.get("userMetadata") or "{}").get("live") for entry in entries]
        return any(datetime.fromisoformat(live[1]) > newest for live in said if live)

    stream.until(lambda: all(map(fresh, tables)), 180)


# ------------------------------------------------------------------------------------------------- the shipped pipeline


def arrivals(count: int) -> list[bytes]:
    """Yesterday as it came in, of three pages: late, repeated and malformed events, none too late for the live last hour."""
    kept, newest = list[bytes](), MIDNIGHT
    for value in kafka.sample(traffic.PAGE_VIEWS, seed=7, count=count, day=YESTERDAY, zone=Settings().tz):
        if found := accepted(value):
            newest = max(newest, found["viewed_at"])
            if found["viewed_at"] < newest - timedelta(minutes=8) or found["page"] not in traffic.PAGES[:3]:
                continue
        kept.append(value)
    last = traffic.sample_view(Random(0), MIDNIGHT + timedelta(days=1, milliseconds=-100)) | {"page": "/"}
    return [*kept, json.dumps(last).encode()]


def parts(values: list[bytes], early: int) -> list[list[bytes]]:
    """The arrivals in six parts, in order: the first few, four of like size, and the last one alone."""
    cuts = [0, *(early + n * (len(values) - early) // 4 for n in range(4)), len(values) - 1, len(values)]
    return [values[a:b] for a, b in pairwise(cuts)]


def accepted(value: bytes) -> dict[str, Any] | None:
    """What Python alone makes of a value: an event with four texts, one of them an instant, or nothing."""
    try:
        event = json.loads(value.decode())
        event["viewed_at"] = datetime.fromisoformat(event["viewed_at"])
    except (ValueError, KeyError, TypeError):
        return None
    texts = [event.get(name) for name in ("event_id", "visitor_id", "page")]
    return event if all(isinstance(t, str) for t in texts) else None


BRUTE = {
    "hourly_traffic": "SELECT page, date_trunc('hour', viewed_at) AS hour, {counts} FROM told GROUP BY ALL",
    "site_hourly_traffic": "SELECT date_trunc('hour', viewed_at) AS hour, {counts} FROM told GROUP BY ALL",
    "daily_traffic": "SELECT page, viewed_at::DATE AS day, {counts} FROM told GROUP BY ALL",
    "site_daily_traffic": "SELECT viewed_at::DATE AS day, {counts} FROM told GROUP BY ALL",
    "last_hour": "SELECT page, mark, {counts} FROM seen GROUP BY ALL",
    "site_last_hour": "SELECT mark, {counts} FROM seen GROUP BY ALL",
}
TIMES = {"last_hour": "mark", "site_last_hour": "mark"}


def brute_force(told: pa.Table) -> dict[str, pa.Table]:
    """By view what its rows of yesterday come to, event by event."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("told_arrow", told)
    connection.execute("CREATE TABLE told AS SELECT * FROM told_arrow")
    connection.execute(
        """CREATE TABLE seen AS SELECT DISTINCT page, event_id, visitor_id, unnest(generate_series(
             time_bucket(INTERVAL 5 SECONDS, viewed_at) + INTERVAL 5 SECONDS,
             time_bucket(INTERVAL 5 SECONDS, viewed_at) + INTERVAL 1 HOUR, INTERVAL 5 SECONDS)) AS mark FROM told"""
    )
    counts = "count(DISTINCT event_id) AS pv, count(DISTINCT visitor_id) AS uv"
    return {name: connection.sql(sql.format(counts=counts)).to_arrow_table() for name, sql in BRUTE.items()}


def differences(settings: Settings, brute: dict[str, pa.Table], until: datetime, run: str = "") -> dict[str, int]:
    """By view: how many of yesterday's rows before `until` stand in the lake and not in brute force, or the other way.

    Of a `run` it is what that one has staged.
    """
    connection, found = query.connect(settings, CATALOG), {}
    for name, rows in brute.items():
        connection.register("brute", rows)
        if run:
            staged = lake.staged_table(lake.table(settings, CATALOG[name]), run)
            connection.register("staged", staged.delta().to_pyarrow_table())
        columns = ", ".join((*CATALOG.views[name].key, "pv", "uv"))
        span = f"WHERE {TIMES[name]} >= '{MIDNIGHT}' AND {TIMES[name]} < '{until}'" if name in TIMES else ""
        ours = f"SELECT {columns} FROM {'staged' if run else name} WHERE day = '{YESTERDAY}'" + span.replace("WHERE", " AND")
        theirs = f"SELECT {columns} FROM brute {span}"
        both = f"({ours} EXCEPT ALL {theirs}) UNION ALL ({theirs} EXCEPT ALL {ours})"
        found[name] = connection.execute(f"SELECT count(*) FROM ({both})").fetchall()[0][0]
        assert connection.execute(f"SELECT count(*) FROM ({ours})").fetchall()[0][0] > 0, name
    connection.close()
    return found


@dataclass
class Traffic:
    """What the shipped pipeline came to, stage by stage; the tests below look at it."""

    settings: Settings
    values: list[bytes]
    told: pa.Table
    brute: dict[str, pa.Table]
    until: datetime
    sent: int = 0
    live: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    run: lake.Run | None = None
    published: list[settle.Published] = field(default_factory=list)
    again: list[settle.Published] = field(default_factory=list)
    versions: list[dict[str, int]] = field(default_factory=list)
    files: list[set[Path]] = field(default_factory=list)
    readers: list[Any] = field(default_factory=list)


ANSWER = "SELECT bool_and(settled), bool_or(settled), count(*), sum(pv), sum(uv), count(DISTINCT hour) FROM hourly_traffic"


@pytest.fixture(scope="module")
def day(house: Callable[..., Settings], run: Any, spark: SparkSession) -> Traffic:
    """Yesterday's traffic, streamed, settled and published while a reader looks on."""
    settings, values = house(), arrivals(5_000)
    kafka.apply(settings, CATALOG.topics.values())
    told = pa.Table.from_pylist([e for v in values if (e := accepted(v))])
    times = told["viewed_at"].to_pylist()
    brute = brute_force(told)
    done = Traffic(settings, values, told, brute, fold.floor(times[-1], timedelta(seconds=5)))

    def state() -> dict[str, int]:
        return {d.name: lake.table(settings, d).delta().version() for d in CATALOG.derived}

    def parquet() -> set[Path]:
        return {p for p in settings.lake_path.rglob("*.parquet") if "_delta_log" not in p.parts}

    def read() -> bool:
        return sum(r["records"] for r in lake.ledger_rows(settings, "main")) == done.sent

    stream = run(settings, {"topic": "page_views"})
    early = sum(1 for at in times[:100] if at < MIDNIGHT + timedelta(minutes=50))  # live views begin where the day does
    for part in parts(values, early):
        with stream.paused():
            kafka.produce(settings, traffic.PAGE_VIEWS, part)
        done.sent += len(part)
        stream.until(read)
        if done.sent in (early, len(values)):
            newest = max(e["viewed_at"] for v in part if (e := accepted(v)))
            wait_for_views(stream, settings, list(CATALOG.views), newest)
    # The marks of the hours that the stream leapt over are swept behind it.
    with suppress(AssertionError):
        stream.until(lambda: not any(differences(settings, brute, done.until).values()), 180)
    stream.drains()
    done.live = differences(settings, brute, done.until)

    done.run = settle.settle(settings, CATALOG, [YESTERDAY], "the settling test")
    done.versions.append(state())
    done.files.append(parquet())
    seen, ended = done.readers, threading.Event()

    def look() -> None:
        while not ended.is_set():
            answer = query.query(settings, CATALOG, ANSWER).rows[0]
            if not seen or answer != seen[-1]:
                seen.append(answer)

    reader = threading.Thread(target=look)
    reader.start()
    while not seen:
        time.sleep(0.01)
    done.published = settle.publish(settings, CATALOG, done.run.id)
    deadline = time.monotonic() + 30
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    ended.set()
    reader.join()
    done.versions.append(state())
    done.again = settle.publish(settings, CATALOG, done.run.id)
    done.versions.append(state())
    done.files.append(parquet())
    done.settled = differences(settings, brute, MIDNIGHT + timedelta(days=1))
    return done


def test_live_views_equal_brute_force_after_several_batches(day: Traffic) -> None:
    assert day.live == dict.fromkeys(BRUTE, 0)
    assert len({r["seq"] for r in lake.ledger_rows(day.settings, "main")}) == 6


def panes_that_differ(spark: SparkSession, day: Traffic, table: lake.Table) -> list[tuple[Any, ...]]:
    """How many of a rollup's merged rows are not DuckDB's over what was told, or the other way; and whether it has many."""
    merged = fold.merge(CATALOG.rollups["page_panes"], lake.read(spark, table))
    ours = merged.select("page", "pane", how_many("views").alias("pv"), how_many("visitors").alias("uv")).toArrow()
    told, brute = day.told, duckdb.connect()
    brute.execute("SET TimeZone = 'UTC'")
    brute.register("told", told)
    brute.register("ours", ours)
    theirs = """SELECT page, time_bucket(INTERVAL 5 SECONDS, viewed_at), count(DISTINCT event_id), count(DISTINCT visitor_id)
                FROM told GROUP BY ALL"""
    both = f"(FROM ours EXCEPT ALL {theirs}) UNION ALL ({theirs} EXCEPT ALL FROM ours)"
    return brute.execute(f"SELECT count(*), (SELECT count(*) FROM ours) > 1000 FROM ({both})").fetchall()


def test_settled_views_and_rollup_equal_brute_force(day: Traffic, spark: SparkSession) -> None:
    assert day.settled == dict.fromkeys(BRUTE, 0)
    assert panes_that_differ(spark, day, lake.table(day.settings, CATALOG["page_panes"])) == [(0, True)]


def test_ledger_is_the_offsets_and_the_rows_of_each_partition(day: Traffic) -> None:
    held = kafka.offsets(day.settings, ["page_views"], "latest")["page_views"]
    rows = query.query(
        day.settings,
        CATALOG,
        """SELECT kafka.partition, count(*), count(DISTINCT kafka.offset), count(reject) FROM page_views GROUP BY ALL""",
    ).rows
    assert {p: (n, distinct) for p, n, distinct, _ in rows} == {p: (end, end) for p, end in held.items()}
    assert sum(held.values()) == len(day.values)
    assert sum(rejects for *_, rejects in rows) == len(day.values) - day.told.num_rows > 0
    for partition, end in held.items():
        mine = [r for r in lake.ledger_rows(day.settings, "main") if r["partition"] == partition]
        assert [r["from_offset"] for r in mine] + [end] == [0] + [r["until_offset"] for r in mine]
        assert all(r["until_offset"] - r["from_offset"] == r["records"] for r in mine)


def test_settling_finds_no_live_row_changed_and_none_too_many(day: Traffic) -> None:
    assert day.run is not None
    compared = {name: day.run.tables[name]["compare"] for name in BRUTE}
    assert {name: (c["changed"], c["extra"]) for name, c in compared.items()} == dict.fromkeys(BRUTE, (0, 0))
    assert {name: c["missing"] for name, c in compared.items() if name not in TIMES} == dict.fromkeys(set(BRUTE) - set(TIMES), 0)
    assert {name: c["late"] + c["unexplained"] for name, c in compared.items()} == {n: c["missing"] for n, c in compared.items()}
    assert [t for t, said in day.run.tables.items() if said["gate"] != "passed"] == []


def test_publication_is_one_commit_a_table_that_writes_no_data(
    day: Traffic, spark: SparkSession, record_testsuite_property: Callable[[str, Any], None]
) -> None:
    before, after, again = day.versions
    assert after == {name: version + 1 for name, version in before.items()}
    assert {p.table: p.version for p in day.published} == after
    assert day.files[0] == day.files[1] and len(day.files[0]) > 0
    seconds = {p.table: round(p.seconds, 4) for p in day.published}
    record_testsuite_property("publication_seconds", seconds)
    assert sorted(seconds.values())[len(seconds) // 2] < 1, seconds

    assert again == after and {p.version for p in day.again} == {None}  # publishing twice does nothing


def test_history_tells_the_publication(day: Traffic, spark: SparkSession) -> None:
    assert day.run is not None
    for declaration in (CATALOG["page_panes"], CATALOG["daily_traffic"]):
        path = lake.table(day.settings, declaration).path
        [said] = spark.sql(f"DESCRIBE HISTORY delta.`{path}` LIMIT 1").select("userMetadata").collect()
        told = json.loads(said["userMetadata"])
        assert {k: told[k] for k in ("run", "days", "pins", "reason")} == {
            "run": day.run.id,
            "days": [str(YESTERDAY)],
            "pins": {"main": day.run.pins["main"].seq},
            "reason": "the settling test",
        }
        assert told["verdict"] == f"passed {day.run.tables[declaration.name]['checks']} checks" + (
            ", 1 warnings" if day.run.tables[declaration.name]["warnings"] else ""
        )


def test_reader_that_polls_through_a_publication_sees_old_or_new_only(day: Traffic) -> None:
    old, new = day.readers
    assert (old[:2], new[:2]) == ((False, False), (True, True))
    assert old[2:] == new[2:]  # and the live rows were right


@pytest.mark.long
def test_replayed_views_and_rollup_equal_brute_force_and_what_is_published(day: Traffic, spark: SparkSession) -> None:
    run = settle.replay(day.settings, CATALOG, "from zero")
    assert differences(day.settings, day.brute, MIDNIGHT + timedelta(days=1), run.id) == dict.fromkeys(BRUTE, 0)
    staged = lake.staged_table(lake.table(day.settings, CATALOG["page_panes"]), run.id)
    assert panes_that_differ(spark, day, staged) == [(0, True)]
    unlike = {d.name: sum(run.tables[d.name]["compare"][n] for n in ("changed", "missing", "extra")) for d in CATALOG.derived}
    assert (run.state, unlike) == ("staged", dict.fromkeys(unlike, 0))


# -------------------------------------------------------------------------------------------------- late events, refusals


def clicks(topic: str, keep: str | None = None) -> Catalog:
    """Hours of clicks, the busiest minute of each with a check that many clicks trip, and a view that reads that one."""
    source = Topic(
        topic,
        key="id",
        partitions=2,
        schema="id STRING NOT NULL, clicked_at TIMESTAMP NOT NULL",
        id="id",
        event_time="clicked_at",
        keep=keep,
    )

    @rollup(reads={"clicks": source}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def minutes(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy(pane("clicked_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    @view(reads={"minutes": minutes}, key=("hour",), time="hour", live=Live("1 second", "2 hours"))
    def hours(minutes: DataFrame) -> DataFrame:
        return minutes.groupBy(F.date_trunc("hour", "minute").alias("hour")).agg(F.sum(how_many("ids")).alias("clicks"))

    few = expect("ExpectColumnValuesToBeBetween", column="clicks", max_value=10)

    @view(reads={"minutes": minutes}, key=("hour",), time="hour", lookahead="1 day", checks=[few])
    def peaks(minutes: DataFrame) -> DataFrame:
        return minutes.groupBy(F.date_trunc("hour", "minute").alias("hour")).agg(F.max(how_many("ids")).alias("clicks"))

    @view(reads={"peaks": peaks}, key=("day",), time="day")
    def peak_of_day(peaks: DataFrame) -> DataFrame:
        return peaks.groupBy(F.to_date("hour").alias("day")).agg(F.max("clicks").alias("clicks"))

    return model.catalog(
        [type("shop", (), {"source": source, "minutes": minutes, "hours": hours, "peaks": peaks, "peak_of_day": peak_of_day})]
    )


class Clicks:
    """One home and one stream over yesterday's clicks."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self.settings, self.topic, self.catalog, self.sent = settings, topic, clicks(topic), 0
        kafka.apply(settings, self.catalog.topics.values())

    def send(self, *instants: datetime) -> None:
        values = [{"id": f"c{self.sent + n}", "clicked_at": at.isoformat()} for n, at in enumerate(instants)]
        assert kafka.produce(self.settings, self.catalog[self.topic], values).complete  # type: ignore[arg-type]
        self.sent += len(values)

    def read(self) -> bool:
        return sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == self.sent

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return query.query(self.settings, self.catalog, sql).rows

    def hours(self) -> dict[int, int]:
        """Clicks by hour of yesterday, as a reader finds them."""
        return dict(self.rows(f"SELECT hour(hour), clicks FROM hours WHERE day = '{YESTERDAY}'"))

    def rolled(self, spark: SparkSession) -> dict[int, int]:
        """Clicks by hour of yesterday, merged from the rollup."""
        merged = fold.merge(self.catalog.rollups["minutes"], lake.read(spark, lake.table(self.settings, self.catalog["minutes"])))
        rows = (
            merged.where(F.to_date("minute") == F.lit(YESTERDAY)).select(F.hour("minute"), how_many("ids")).toArrow().to_pylist()
        )
        hours: dict[int, int] = {}
        for hour, clicks_ in (row.values() for row in rows):
            hours[hour] = hours.get(hour, 0) + clicks_
        return hours

    def plant(self, hour: int, clicks_: int) -> None:
        """A live row of yesterday that is not what was clicked."""
        table = lake.table(self.settings, self.catalog["hours"])
        row = {"hour": at(hour), "clicks": clicks_, "settled": False, "day": YESTERDAY}
        schema = pa.schema(table.delta().schema())
        files = lake.write_arrow(table, f"live/{lake.hour_of(at(hour))}-all-wrong", pa.Table.from_pylist([row], schema))
        lake.swap_live(self.settings, table, at(hour), at(hour + 1), files, marks=False)

    def settled(self, reason: str, day: date = YESTERDAY) -> lake.Run:
        return settle.settle(self.settings, self.catalog, [day], reason)

    def publish(self, run: lake.Run) -> dict[str, settle.Published]:
        return {p.table: p for p in settle.publish(self.settings, self.catalog, run.id)}


def at(hour: int, minute: int = 0, second: int = 0) -> datetime:
    return MIDNIGHT + timedelta(hours=hour, minutes=minute, seconds=second)


def test_late_events_and_every_refusal_of_a_settling(house: Callable[..., Settings], run: Any, spark: SparkSession) -> None:
    shop = Clicks(house(), "clicks_of_the_settling_test")
    with pytest.raises(settle.SettleError, match="no stream has committed a batch yet, so there is nothing to settle"):
        shop.settled("too early")
    shop.send(*(at(hour, minute) for hour in range(10, 13) for minute in (0, 20, 40)))
    stream = run(shop.settings, {"topic": shop.topic})
    stream.until(lambda: shop.read() and shop.hours() == {10: 3, 11: 3, 12: 3})

    # hours   10     11     12     13     14     15     16
    #         3      3      3                    3      3 ← stream time is 16:40: `back`, two hours, reaches to 14
    shop.send(*(at(hour, minute) for hour in (15, 16) for minute in (0, 20, 40)))
    live = {10: 3, 11: 3, 12: 3, 15: 3, 16: 3}
    stream.until(lambda: shop.hours() == live)

    # A late event inside `back` corrects the live row; one beyond it is in log and rollup, and in no live row.
    shop.send(at(11, 30))
    stream.until(shop.read)
    shop.send(at(15, 30))
    stream.until(lambda: shop.hours() == live | {15: 4})
    assert shop.rolled(spark) == live | {15: 4, 11: 4}
    assert shop.rows(f"SELECT count(*) FROM {shop.topic} WHERE hour(clicked_at) = 11") == [(4,)]

    # It counts from the day's next settling on, which says what changed. A pin that is older than another's is refused.
    older = shop.settled("the first")
    assert older.tables["hours"]["compare"] == {"rows": 5, "missing": 0, "extra": 0, "changed": 1, "late": 1, "unexplained": 0}
    assert (older.note, "late" in older.tables["peaks"]["compare"]) == ("", False)  # `peaks` is not live
    shop.send(at(15, 31))
    stream.until(lambda: shop.hours() == live | {15: 5})

    # A live row that is wrong, with no late event beside it, is said to be unexplained, as an error and in the run's note.
    shop.plant(12, 99)
    with capture_logs() as logs:
        newer = shop.settled("the second")
    assert newer.tables["hours"]["compare"] == {"rows": 5, "missing": 0, "extra": 0, "changed": 2, "late": 1, "unexplained": 1}
    assert newer.note == "rows of hours that differ from what readers have, and that no late event explains: 1"
    assert [(e["event"], e["run"]) for e in logs if e["log_level"] == "error"] == [(newer.note, newer.id)]
    told = {d.table: d for d in compare.kept(shop.settings, newer) or []}
    assert (told["hours"].late, told["hours"].unexplained, told["peaks"].late) == (1, 1, None)
    assert f"| hours | {YESTERDAY} | 5 | 2 | 0 | 0 | 1 | 1 |" in compare.as_markdown(newer, list(told.values()))
    assert {p.blocked for p in shop.publish(newer).values()} == {()}
    assert shop.hours() == live | {11: 4, 15: 5}
    with pytest.raises(lake.LakeError, match=rf"run {older.id} has read stream main up to .* settle again:"):
        shop.publish(older)
    assert shop.hours() == live | {11: 4, 15: 5}

    # A late event of a settled day: at once in log and rollup, in the view from its next settling. Live views go on.
    assert settle.stale(shop.settings, shop.catalog) == []
    now = datetime.now(UTC)
    shop.send(*(at(16, 20, second) for second in range(1, 11)), now)
    today = f"SELECT clicks FROM hours WHERE day = '{now.date()}' AND NOT settled"
    stream.until(lambda: shop.read() and shop.rows(today) == [(1,)])
    assert shop.rolled(spark) == live | {11: 4, 15: 5, 16: 13}
    assert shop.hours() == live | {11: 4, 15: 5}
    assert shop.rows("SELECT clicks FROM peak_of_day") == [(1,)]
    assert settle.stale(shop.settings, shop.catalog) == [YESTERDAY]

    # Eleven clicks in a minute trip a check of `peaks`: it and what reads it keep their rows, the others are published.
    # What differs from a publication is explained by what came after its pin.
    third = shop.settled("the third")
    assert third.tables["hours"]["compare"] == {"rows": 5, "missing": 0, "extra": 0, "changed": 1, "late": 1, "unexplained": 0}
    assert {t: said["gate"] for t, said in third.tables.items()} == {
        shop.topic: "passed",
        "minutes": "passed",
        "hours": "passed",
        "peaks": "failed",
        "peak_of_day": "blocked",
    }
    done = shop.publish(third)
    assert [t for t, p in done.items() if p.blocked] == ["peaks", "peak_of_day"]
    assert "ExpectColumnValuesToBeBetween clicks" in done["peaks"].blocked[0]
    assert "peak_of_day reads peaks, which failed its checks" in done["peak_of_day"].blocked[0]
    assert shop.hours() == live | {11: 4, 15: 5, 16: 13}
    assert shop.rows("SELECT max(clicks), count(*) FROM peaks") == [(1, 5)]
    assert shop.rows("SELECT clicks FROM peak_of_day") == [(1,)]
    assert settle.stale(shop.settings, shop.catalog) == []
    stream.drains()

    # A person takes the failed check upon themselves: it and what waited for it alone are published, and say so.
    check = third.tables["peaks"]["failed"]
    with pytest.raises(settle.SettleError, match="has no failed check no such check; those that failed: ExpectColumnValues"):
        settle.publish(shop.settings, shop.catalog, third.id, over=["no such check"], reason="why not")
    taken = {p.table: p for p in settle.publish(shop.settings, shop.catalog, third.id, over=check, reason="a sale")}
    assert all(not p.blocked for p in taken.values()) and taken["hours"].version is None
    assert shop.rows("SELECT max(clicks), count(*) FROM peaks") == [(11, 5)]
    assert lake.run_of(shop.settings, third.id).tables["peaks"]["forced"] == {"checks": check, "reason": "a sale"}
    told = lake.table(shop.settings, shop.catalog["peak_of_day"]).delta().history(1)[0]["userMetadata"]
    assert json.loads(told)["over"] == {"peaks": {"checks": check, "reason": "a sale"}}

    today = datetime.now(UTC).date()
    last = today - timedelta(days=1)
    with pytest.raises(settle.SettleError, match=f"{today} is not over in UTC; the last day that can be settled is {last}"):
        shop.settled("today", today)
    with pytest.raises(KeyError, match="there is no run settle-nowhere; list them with: tidemark runs"):
        settle.publish(shop.settings, shop.catalog, "settle-nowhere")
    shop.send(at(20))
    # A topic that is declared and was not made yet turns no question off.
    unmade = Topic("never_made", key=None, partitions=1, schema="at TIMESTAMP NOT NULL", event_time="at")
    whole = replace(shop.catalog, topics={**shop.catalog.topics, unmade.name: unmade})
    for catalog in (shop.catalog, whole):
        shop.catalog = catalog
        # `peaks` looks a day ahead, so that what came a moment ago is late for now; once that is over, Kafka held it by then.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settle, "looked_at_until", lambda *_: datetime.now(UTC))
            said = f"the stream has not yet read 1 records of {shop.topic} .* then settle again"
            with pytest.raises(settle.SettleError, match=said):
                shop.settled("unread")
    assert [r.state for r in lake.runs(shop.settings)] == ["staged", "published", "published"]


def test_day_that_has_expired_keeps_its_rows_though_a_record_comes_late_for_it(house: Callable[..., Settings], run: Any) -> None:
    # forty days ago, at 10   I I I   settled, then expired   I late                yesterday   I
    shop, long_ago = Clicks(house(), "clicks_that_expire"), at(10) - timedelta(days=40)
    both = (clicks(shop.topic, keep) for keep in (None, "30 days"))
    shop.catalog, kept = (replace(one, views={"hours": one.views["hours"]}) for one in both)  # the others take most of the time
    shop.send(*(long_ago + timedelta(minutes=n) for n in range(3)), at(10))
    stream, checkpoint = run(shop.settings, {"topic": shop.topic}), lake.Checkpoint.of(shop.settings, "main")
    stream.until(lambda: shop.read() and checkpoint.newest("commits") == checkpoint.newest("offsets"))
    day, settled = long_ago.date(), f"SELECT hour, clicks FROM hours WHERE settled AND day <= '{YESTERDAY}' ORDER BY hour"
    shop.publish(shop.settled("the night", day))
    assert shop.rows(settled) == [(long_ago, 3)]

    lake.expire_all(shop.settings, kept)
    shop.send(long_ago + timedelta(minutes=30))
    stream.until(shop.read)
    stream.drains()
    assert shop.rows(f"SELECT count(*) FROM {shop.topic} WHERE day = '{day}'") == [(1,)]
    # Nor where it is kept for ever from now on: what has expired comes back by nothing.
    assert (settle.stale(shop.settings, shop.catalog), settle.stale(shop.settings, kept)) == ([], [])
    first = datetime.now(UTC).date() - timedelta(days=30)
    with pytest.raises(settle.SettleError, match=rf"keeps 30 days, which is enough for .* from {first} on.* Leave out {day}"):
        settle.settle(shop.settings, kept, [day], "again")
    again = settle.replay(shop.settings, kept, "again", source="log")
    assert again.days == [str(YESTERDAY)] and f"from {first} on; before, readers keep what they have" in again.note
    settle.publish(shop.settings, kept, again.id)
    assert shop.rows(settled) == [(long_ago, 3), (at(10), 1)]
