"""A topic, a rollup and a view that change while their tables live on; and rejects that a mended schema accepts."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import fold, kafka, lake, model, query, settle, speed
from tidemark.functions import distinct, how_many, pane
from tidemark.model import Catalog, Live, Topic, rollup, view
from tidemark.settings import Settings

TOPIC = "visits_of_the_change_test"
YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)
NOON = datetime(YESTERDAY.year, YESTERDAY.month, YESTERDAY.day, 12, tzinfo=UTC)
SCHEMAS = {
    "first": "id STRING NOT NULL, page STRING NOT NULL, seen_at TIMESTAMP NOT NULL",
    "wider": "id STRING NOT NULL, page STRING COMMENT 'the path', seen_at TIMESTAMP NOT NULL, note STRING COMMENT 'as told'",
    "renamed": "id STRING NOT NULL, path STRING, seen_at TIMESTAMP NOT NULL, note STRING",
    "retyped": "id STRING NOT NULL, page STRING, seen_at TIMESTAMP NOT NULL, note BIGINT",
}
OLD_LEDGER = (
    "stream STRING, generation INT, seq BIGINT, topic STRING, partition INT, from_offset BIGINT, until_offset BIGINT, "
    "records BIGINT, rejects BIGINT, stream_time TIMESTAMP, started_at TIMESTAMP, finished_at TIMESTAMP, day DATE"
)


def declared(version: str = "", step: str = "") -> Catalog:
    """Visits by minute and hour; from `wider` on both have columns more, and a rollup of pages stands beside."""
    if step:
        return stepped(step)
    visits = Topic(TOPIC, "id", 2, SCHEMAS.get(version, SCHEMAS["wider"]), "seen_at", id="id")
    if version == "renamed" or version == "retyped":
        return model.catalog([type("visits", (), {"visits": visits})])

    gained = {} if version == "first" else {"pages": "distinct", "first": "min"}

    @rollup(reads={"visits": visits}, key=("minute",), time="minute", merge={"ids": "distinct", **gained})
    def minutes(visits: DataFrame) -> DataFrame:
        told = {"ids": distinct("id"), "pages": distinct("page"), "first": F.min("id")}
        minute = pane("seen_at", "1 minute").alias("minute")
        return visits.groupBy(minute).agg(*(told[c].alias(c) for c in ("ids", *gained)))

    @view(reads={"minutes": minutes}, key=("hour",), time="hour")
    def hours(minutes: DataFrame) -> DataFrame:
        counted = minutes.groupBy(F.date_trunc("hour", "minute").alias("hour")).agg(F.sum(how_many("ids")).alias("visits"))
        half = F.col("visits") / 2
        told = counted.withColumn("half", half.cast("string") if version == "view retyped" else half)
        return counted if version in ("first", "view less") else told

    note = "remark" if version == "rollup renamed" else "note"

    @rollup(reads={"visits": visits}, key=("page", "minute"), time="minute", merge={"ids": "distinct", note: "max"})
    def pages(visits: DataFrame) -> DataFrame:
        minute = pane("seen_at", "1 minute").alias("minute")
        page = F.coalesce("page", F.lit("none")).alias("page")
        told = F.length("note") if version == "rollup retyped" else F.col("note")
        return visits.groupBy(page, minute).agg(distinct("id").alias("ids"), F.max(told).alias(note))

    found = {"visits": visits, "minutes": minutes, "hours": hours} | ({} if version == "first" else {"pages": pages})
    return model.catalog([type("visits", (), found)])


def stepped(step: str) -> Catalog:
    """Visits by minute, live for two hours, written in steps of a length."""
    clicks = Topic("clicks_of_the_change_test", "id", 1, SCHEMAS["first"], "seen_at", id="id")

    @view(reads={"clicks": clicks}, key=("minute",), time="minute", live=Live("1 second", "2 hours", step))
    def minutes_seen(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy(F.date_trunc("minute", "seen_at").alias("minute")).agg(F.count("*").alias("n"))

    return model.catalog([type("clicks", (), {"clicks": clicks, "minutes_seen": minutes_seen})])


class Visits:
    """One home whose code changes between two starts of its stream."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.sent = settings, 0
        kafka.apply(settings, declared("first").topics.values())

    def send(self, *events: dict[str, Any]) -> None:
        whole = [{"id": f"v{n}", "seen_at": NOON.isoformat()} | e for n, e in enumerate(events, self.sent)]
        assert kafka.produce(self.settings, declared("first").topics[TOPIC], whole).complete
        self.sent += len(whole)

    def read(self) -> bool:
        return sum(r["records"] for r in lake.ledger_rows(self.settings, "main")) == self.sent

    def rows(self, sql: str, version: str = "wider") -> list[tuple[Any, ...]]:
        return query.query(self.settings, declared(version), sql.replace("LOG", TOPIC)).rows

    def counted(self, spark: SparkSession, name: str) -> list[tuple[Any, ...]]:
        one = declared("wider").rollups[name]
        merged = fold.merge(one, lake.read(spark, lake.table(self.settings, one)))
        columns = [how_many(c) if c == "pages" else F.col(c) for c in (*one.key, *one.merge) if c not in ("minute", "ids")]
        return sorted(tuple(r) for r in merged.select(*columns, how_many("ids").alias("n")).collect())

    def comments(self) -> dict[str, str]:
        fields = lake.table(self.settings, declared("first").topics[TOPIC]).delta().schema().fields
        return {f.name: f.metadata["comment"] for f in fields if f.name in ("page", "note") and f.metadata}


def of_the_version_before(settings: Settings) -> None:
    """Take from a drained stream what a version before did not write: streams taken over, how far each view is computed."""
    identity = lake.Checkpoint.of(settings, "main").path / "tidemark.json"
    said = json.loads(identity.read_text())
    del said["taken"]
    identity.write_text(json.dumps(said))
    for name in ("views.json", "versions.json", "code.json"):
        (settings.state / "main" / name).unlink(missing_ok=True)
    (settings.state / fold.REMEMBERED).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def visits(house: Callable[..., Settings], spark: SparkSession) -> Visits:
    """The home of a version before: its ledger has no columns for gaps."""
    home = Visits(house())
    lake.ledger(home.settings).create(fold.schema_of(fold.nothing(spark, OLD_LEDGER)), "of the version before")
    return home


def test_columns_and_a_rollup_are_added_while_the_tables_live_on(visits: Visits, run: Any, spark: SparkSession) -> None:
    visits.send({"page": "/a"}, {"page": "/a"}, {"page": "/b", "note": "not asked for yet"}, {"page": None}, {})
    stream = run(visits.settings, {"version": "first"})
    stream.until(lambda: visits.read() and visits.rows("SELECT count(*) FROM LOG", "first") == [(5,)])
    stream.drains()
    assert visits.comments() == {}
    of_the_version_before(visits.settings)
    first = settle.settle(visits.settings, declared("first"), [YESTERDAY], "the first night")
    settle.publish(visits.settings, declared("first"), first.id)
    assert visits.rows("SELECT visits FROM hours", "first") == [(3,)]

    # Restarted with the wider code: the checkpoint is carried on, old rows have null there, readers go on, the new rollup
    # has its history.
    stream = run(visits.settings, {"version": "wider"})
    visits.send({"page": "/a", "note": "hello"}, {"page": None, "note": None})
    stream.until(lambda: visits.read() and visits.rows("SELECT count(*) FROM LOG") == [(7,)])
    stream.drains()
    found = visits.rows("SELECT id, page, note, reject FROM LOG ORDER BY id NULLS LAST")
    assert [r for r in found if r[3] is None and r[0] in ("v0", "v5", "v6")] == [
        ("v0", "/a", None, None),
        ("v5", "/a", "hello", None),
        ("v6", None, None, None),
    ]
    assert visits.counted(spark, "pages") == [("/a", "hello", 3), ("/b", None, 1), ("none", None, 1)]
    assert visits.rows("SELECT visits, half FROM hours") == [(3, None)]  # settled before there was a half
    assert {gaps for (gaps,) in visits.rows("SELECT gaps FROM ledger")} == {0}
    assert visits.comments() == {"page": "the path", "note": "as told"}
    # Of one minute: its row of before has no pages and no first, that of the new batch has those of v5 and v6.
    assert visits.counted(spark, "minutes") == [(1, "v5", 5)]
    batches = "SELECT partition, from_offset, until_offset, seq, generation FROM ledger ORDER BY partition, seq"
    ledger = visits.rows(batches)
    for (one, _, until, *_), (other, begins, *_) in pairwise([(None, 0, 0), *ledger]):
        assert begins == (until if one == other else 0)
    assert {generation for *_, generation in ledger} == {1}


REJECTS = """
import importlib, json, sys
from tidemark import settle
from tidemark.settings import Settings
module, arguments, _ = json.loads(sys.argv[1])
settle.settle_rejects(Settings(_env_file=None), importlib.import_module(module).declared(**arguments), "page may be null")
"""


def test_rejects_that_the_mended_schema_accepts_are_mended_once_and_their_days_settled(
    visits: Visits, run: Any, spark: SparkSession
) -> None:
    assert visits.rows("SELECT count(*) FROM LOG WHERE reject IS NOT NULL") == [(2,)]
    # Killed when the rollups have their rows and the log has them as rejects still; then run again.
    run(visits.settings, {"version": "wider"}, program=REJECTS, failpoint="mended").dies()
    assert visits.rows("SELECT count(*), count(reject) FROM LOG") == [(7, 2)]
    mended = settle.settle_rejects(visits.settings, declared("wider"), "page may be null")
    assert mended is not None and (mended.days, mended.state) == ([str(YESTERDAY)], "staged")
    assert visits.rows("SELECT count(*), count(reject), count(DISTINCT (kafka.partition, kafka.offset)) FROM LOG") == [(7, 0, 7)]
    assert visits.counted(spark, "pages") == [("/a", "hello", 3), ("/b", None, 1), ("none", None, 3)]
    assert [(r.state, r.note) for r in lake.runs(visits.settings)][-2:] == [
        ("dropped", f"its days are in run {mended.id}"),
        ("staged", ""),
    ]
    settle.publish(visits.settings, declared("wider"), mended.id)
    assert visits.rows("SELECT visits, half FROM hours") == [(7, 3.5)]
    assert visits.counted(spark, "minutes") == [(2, "v0", 7)]
    assert settle.settle_rejects(visits.settings, declared("wider"), "again") is None
    assert visits.rows("SELECT count(*) FROM LOG") == [(7,)]


@pytest.mark.parametrize(
    ("version", "table", "sentence"),
    [
        ("first", f"log/{TOPIC}", "note string is not in the code"),
        ("renamed", f"log/{TOPIC}", "page string is not in the code .the code has gained path; a column that is renamed"),
        ("retyped", f"log/{TOPIC}", "note is string, the code says long"),
        (
            "rollup renamed",
            "rollups/pages",
            "note string is not in the code .the code has gained remark; a column that is renamed",
        ),
        ("rollup retyped", "rollups/pages", "note is string, the code says integer"),
        ("view less", "views/hours", "half double is not in the code"),
        ("view retyped", "views/hours", "half is double, the code says string"),
    ],
)
def test_a_column_that_is_removed_renamed_or_retyped_is_refused_at_the_start(
    visits: Visits, version: str, table: str, sentence: str
) -> None:
    name = table.split("/")[1]
    ways = rf"Write it back as it was, or give .* a new name \({name}_v2\), replay it, move its readers and delete .*/{table}$"
    with pytest.raises(lake.LakeError, match=rf"^table {table}: {sentence}.* {ways}"):
        speed.run(visits.settings, declared(version))
    assert visits.rows("SELECT count(*) FROM LOG") == [(7,)]
    assert visits.rows("SELECT visits, half FROM hours") == [(7, 3.5)]


@pytest.mark.long
def test_step_of_a_live_view_changes_and_each_row_is_there_once(house: Callable[..., Settings], run: Any) -> None:
    settings, catalog = house(), stepped("1 hour")
    (clicks,) = catalog.topics.values()
    kafka.apply(settings, [clicks])
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    ago = (95, 61, 60, 14, 3, 0)

    def minutes() -> list[tuple[Any, ...]]:
        there = lake.table(settings, catalog.views["minutes_seen"]).exists
        return query.query(settings, catalog, "SELECT minute, n FROM minutes_seen ORDER BY minute").rows if there else []

    for n, step in enumerate(("1 hour", "10 minutes", "1 hour")):
        events = [
            {"id": f"{n}-{m}", "page": "/", "seen_at": (now - timedelta(minutes=m)).isoformat()}
            for m in (ago if n == 0 else (14, 0))
        ]
        assert kafka.produce(settings, clicks, events).complete
        stream = run(settings, {"step": step})
        wanted = [(now - timedelta(minutes=m), 1 + n * (m in (14, 0))) for m in ago]
        stream.until(lambda wanted=wanted: minutes() == wanted)
        stream.drains()
        assert minutes() == wanted
        said = re.findall(r"\] (batch|refreshed|nothing new) ", stream.said)
        assert said[0] == "batch", said  # what a view would show before what has come is read is old at once
