"""Checks, verdicts, the gate and Data Docs, on a real Spark session and real Great Expectations."""

import html
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from great_expectations.core import ExpectationValidationResult
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
from pyspark.sql import DataFrame, SparkSession

from tidemark import lake, quality, settle
from tidemark.model import Catalog, Check, DeclarationError, Live, Topic, View, catalog, expect, midnight, rollup, view
from tidemark.quality import Judged, Verdict
from tidemark.settings import Settings

START, END = datetime(2026, 11, 19, tzinfo=UTC), datetime(2026, 11, 20, tzinfo=UTC)
TEN, ELEVEN = START + timedelta(hours=10), START + timedelta(hours=11)
OPERATING = Path(__file__).parent.parent / "docs" / "operating.md"
HOSTILE = "<script>alert('x')</script>"

PAGE_VIEWS = Topic(
    "page_views",
    key="visitor_id",
    partitions=1,
    schema="event_id STRING NOT NULL, visitor_id STRING NOT NULL, viewed_at TIMESTAMP NOT NULL",
    id="event_id",
    event_time="viewed_at",
)


@rollup(reads={"views": PAGE_VIEWS}, key=("page", "pane"), time="pane", merge={"views": "distinct"})
def page_panes(views): ...


@view(reads={"panes": page_panes}, key=("page", "hour"), time="hour")
def hourly_traffic(panes): ...


@view(reads={"panes": page_panes}, key=("day",), time="day")
def site_days(panes): ...


@view(reads={"hours": hourly_traffic}, key=("page", "day"), time="day")
def daily_traffic(hours): ...


@view(reads={"days": daily_traffic}, key=("day",), time="day")
def best_days(days): ...


def hours(spark: SparkSession, *rows: tuple) -> DataFrame:
    return spark.createDataFrame(rows, "page STRING, hour TIMESTAMP, pv BIGINT")


def with_checks(*checks: Check) -> View:
    return view(reads={"panes": page_panes}, key=("page", "hour"), time="hour", checks=checks)(hourly_traffic.function)


def not_passed(verdicts: list[Verdict]) -> dict[str, str]:
    return {v.check: v.outcome for v in verdicts if v.outcome != "passed"}


# ------------------------------------------------------------------------------------------------------------ misspelt


MISSPELT = {
    "name": (
        expect("ExpectColumnValuesToBeBetwen", column="pv", min_value=1),
        "Great Expectations has no ExpectColumnValuesToBeBetwen; the nearest are ExpectColumnValuesToBeBetween, ",
    ),
    "argument": (
        expect("ExpectColumnValuesToBeBetween", column="pv", min_valu=1),
        "ExpectColumnValuesToBeBetween takes no min_valu; the nearest are min_value, ",
    ),
    "base class": (expect("Expectation", column="pv"), "Great Expectations has no Expectation; the nearest are "),
}


@pytest.mark.parametrize(("check", "says"), MISSPELT.values(), ids=MISSPELT)
def test_check_that_is_misspelt_is_refused_with_its_table_and_the_nearest_names(check, says):
    right = expect("ExpectColumnValuesToBeBetween", column="pv", min_value=1)
    view = with_checks(right, check)
    with pytest.raises(DeclarationError, match=f"^view hourly_traffic: {says}"):
        quality.refuse_misspelt(Catalog({}, {}, {view.name: view}))
    view = with_checks(right)
    quality.refuse_misspelt(Catalog({}, {}, {view.name: view}))


def test_check_that_is_misspelt_holds_back_its_own_table_and_the_gate_says_so_as_a_command_does(spark: SparkSession) -> None:
    wrong = with_checks(*(check for check, _ in MISSPELT.values()))

    @view(reads={"panes": page_panes}, key=("page", "hour"), time="hour")
    def right(panes: Any) -> Any: ...

    tables = {d.name: Judged(d, hours(spark, ("/a", TEN, 1)), START, END) for d in (wrong, right)}
    verdicts = quality.judge("r1", tables)
    gates = {name: quality.gate(one.declared, quality.checks_of(one), verdicts) for name, one in tables.items()}
    assert gates["right"].passed
    for reason, (check, says) in zip(gates["hourly_traffic"].reasons, MISSPELT.values(), strict=True):
        assert reason.startswith(f'hourly_traffic: "{check.name}" could not be asked: {says}')


def test_names_and_arguments_are_those_that_great_expectations_takes():
    import great_expectations.expectations as library

    known = quality.gallery()
    kinds: dict[str, Any] = {n: kind for n, kind in vars(library).items() if isinstance(kind, type) and n != "Expectation"}
    assert known.keys() == kinds.keys()
    assert {n for n, arguments in known.items() if arguments} >= {"UnexpectedRowsExpectation", "ExpectColumnValuesToBeBetween"}
    for name, arguments in known.items():
        assert not arguments or {*arguments} == {*kinds[name].__fields__, "metadata"}, name


# --------------------------------------------------------------------------------------------------------- own checks


@pytest.mark.parametrize(
    ("row", "failed"),
    [
        (("/b", START, 1), []),  # start is inside
        (("/b", END - timedelta(microseconds=1), 1), []),
        (("/b", END, 1), ["hour is in the period"]),  # end is outside
        (("/b", START - timedelta(microseconds=1), 1), ["hour is in the period"]),
        ((None, TEN, 1), ["page is not null"]),
        (("/b", None, 1), ["hour is not null"]),
        (("/a", TEN, 2), ["key page, hour is unique"]),
    ],
)
def test_a_view_row_outside_its_own_checks_fails_exactly_that_check(spark, row, failed):
    verdicts = quality.judge("r1", {"hourly_traffic": Judged(hourly_traffic, hours(spark, ("/a", TEN, 1), row), START, END)})
    assert len(verdicts) == 4
    assert not_passed(verdicts) == dict.fromkeys(failed, "failed")


@pytest.mark.parametrize(
    ("days", "failed"),
    [
        ([date(2026, 11, 19)], []),
        ([date(2026, 11, 20)], ["day is in the period"]),
        ([date(2026, 11, 18)], ["day is in the period"]),
        ([date(2026, 11, 19), date(2026, 11, 19)], ["key day is unique"]),
        ([date(2026, 11, 19), None], ["day is not null"]),
    ],
)
@pytest.mark.parametrize("column", ["day", "date"])
def test_a_date_is_compared_by_business_days(spark, column, days, failed):
    new_york = ZoneInfo("America/New_York")  # its day begins at 05:00 UTC
    start, end = datetime(2026, 11, 19, tzinfo=new_york), datetime(2026, 11, 20, tzinfo=new_york)
    declared = view(reads={"panes": page_panes}, key=(column,), time=column)(site_days.function)
    frame = spark.createDataFrame([(d,) for d in days], f"{column} DATE")
    verdicts = quality.judge("r1", {"site_days": Judged(declared, frame, start, end)})
    assert not_passed(verdicts) == {name.replace("day", column): "failed" for name in failed}
    assert {v.days for v in verdicts} == {(date(2026, 11, 19), date(2026, 11, 19))}


@pytest.mark.parametrize(
    ("row", "failed"),
    [
        (("e2", 0, 2, None, date(2026, 11, 19)), []),
        ((None, 0, 2, "not JSON", date(2026, 11, 19)), []),  # a reject has no columns
        ((None, 0, 2, None, date(2026, 11, 19)), ["event_id of an accepted event is not null"]),
        (("e1", 0, 1, None, date(2026, 11, 19)), ["each record stands once"]),
        (("e1", 1, 1, None, date(2026, 11, 19)), []),  # a producer's repeat is another record
        (("e2", 0, 2, None, date(2026, 11, 20)), ["day is in the period"]),
    ],
)
def test_a_log_row_outside_its_own_checks_fails_exactly_that_check(spark, row, failed):
    rows = [("e1", 0, 1, None, date(2026, 11, 19)), row]
    frame = spark.createDataFrame(
        [(e, {"partition": p, "offset": o}, r, d) for e, p, o, r, d in rows],
        "event_id STRING, kafka STRUCT<partition INT, offset BIGINT>, reject STRING, day DATE",
    )
    verdicts = quality.judge("r1", {"page_views": Judged(PAGE_VIEWS, frame, START, END)})
    assert len(verdicts) == 3
    assert not_passed(verdicts) == dict.fromkeys(failed, "failed")


@pytest.mark.parametrize("repeats", [None, 3])
def test_records_that_a_log_has_twice_are_counted_and_shown(spark, repeats):
    held = [(p, o) for p in (0, 1) for o in range(150) if (p, o) != (0, 70)]
    rows = [(f"{p}-{o}", {"partition": p, "offset": o}, None, START.date()) for p, o in [*held, (0, 63), (1, 64), (1, 64)]]
    schema = "event_id STRING, kafka STRUCT<partition INT, offset BIGINT>, reject STRING, day DATE"
    frame = spark.createDataFrame(rows, schema).repartition(4)
    found = quality.judge("r1", {"page_views": Judged(PAGE_VIEWS, frame, START, END, repeats)})
    (twice,) = [v for v in found if v.outcome != "passed"]
    assert (twice.check, twice.unexpected) == ("each record stands once", 2)
    shown = sorted((r["partition"], r["offset"], r["times"]) for r in json.loads(twice.sample))
    assert shown == [(0, 63, 2), (1, 64, 3)]


def test_records_that_were_counted_once_each_are_not_counted_again(spark):
    raises = "struct(0 AS partition, CAST(raise_error('it is read') AS BIGINT) AS offset) AS kafka"
    frame = spark.range(1).selectExpr("'e1' AS event_id", raises, "CAST(NULL AS STRING) AS reject", "DATE '2026-11-19' AS day")
    asked = [quality.judge("r1", {"page_views": Judged(PAGE_VIEWS, frame, START, END, repeats)}) for repeats in (None, 0)]
    assert [not_passed(verdicts) for verdicts in asked] == [{"each record stands once": "error"}, {}]


def test_own_checks_have_the_same_names_whatever_type_time_has():
    names = [[c.name for c in quality.own_checks(hourly_traffic, START, END, dates=d)] for d in (True, False, None)]
    assert names[0] == names[1] == names[2]


@pytest.mark.parametrize(
    ("zone", "day"),
    [("Europe/Berlin", date(2026, 10, 25)), ("Europe/Berlin", date(2026, 3, 29)), ("Africa/Cairo", date(2026, 4, 23))],
    ids=["of 25 hours", "of 23 hours", "before one that begins at 01:00"],
)
def test_a_day_is_one_day_whatever_the_clocks_do(zone, day):
    start, end = (midnight(d, ZoneInfo(zone)).astimezone(ZoneInfo(zone)) for d in (day, day + timedelta(days=1)))
    assert quality.days(start, end) == (day, day)


# ----------------------------------------------------------------------------------------------------- declared checks


def test_a_failed_check_tells_how_many_rows_and_shows_some(spark):
    declared = with_checks(expect("ExpectColumnValuesToBeBetween", column="pv", min_value=1))
    frame = hours(spark, *((f"/{n}", TEN, 0) for n in range(7)), ("/a", TEN, 1))
    (found,) = (v for v in quality.judge("r1", {"hourly_traffic": Judged(declared, frame, START, END)}) if v.outcome != "passed")
    assert (found.run, found.table, found.check) == ("r1", "hourly_traffic", "ExpectColumnValuesToBeBetween pv")
    assert (found.outcome, found.severity, found.unexpected) == ("failed", "critical", 7)
    shown = [{"page": f"/{n}", "hour": "2026-11-19T10:00:00+00:00", "pv": 0} for n in range(5)]
    assert json.loads(found.sample) == shown
    assert found.observed == '{"element_count": 8, "unexpected_percent": 87.5}'
    assert list(quality.gate(declared, declared.checks, [found]).reasons) == [
        f'hourly_traffic: "{found.check}" failed on 7 rows; observed {found.observed}; for example {found.sample}'
    ]


KEYED = {
    "null in the key": ((None, TEN, 1), "page is not null", {"hour": "2026-11-19T10:00:00+00:00", "page": None}),
    "null beside the key": (("/a", TEN, None), "pv", {"page": "/a", "hour": "2026-11-19T10:00:00+00:00", "pv": None}),
    "two columns": (("/a", TEN, -1), "-pv", {"page": "/a", "hour": "2026-11-19T10:00:00+00:00", "pv": -1, "floor": 0}),
}


@pytest.mark.parametrize(("row", "check", "sample"), KEYED.values(), ids=KEYED)
def test_a_failed_check_shows_the_key_of_each_row(spark: SparkSession, row: tuple, check: str, sample: dict[str, Any]) -> None:
    declared = with_checks(
        expect("ExpectColumnValuesToNotBeNull", column="pv", description="pv"),
        expect("ExpectColumnPairValuesAToBeGreaterThanB", column_A="pv", column_B="floor", description="-pv"),
    )
    frame = hours(spark, ("/b", ELEVEN, 1), row).selectExpr("*", "0 AS floor")
    found = {v.check: v for v in quality.judge("r1", {"hourly_traffic": Judged(declared, frame, START, END)})}
    assert (found[check].unexpected, json.loads(found[check].sample or "")) == (1, [sample])


def test_a_failed_check_of_a_log_shows_which_record_it_is(spark: SparkSession) -> None:
    topic = replace(PAGE_VIEWS, checks=(expect("ExpectColumnValuesToNotBeNull", column="event_id"),))
    schema = "event_id STRING, kafka STRUCT<partition INT, offset BIGINT>, reject STRING, day DATE"
    frame = spark.createDataFrame([("e1", (0, 1), None, START.date()), (None, (2, 7), "not JSON", START.date())], schema)
    (found,) = (v for v in quality.judge("r1", {"page_views": Judged(topic, frame, START, END)}) if v.outcome != "passed")
    assert json.loads(found.sample or "") == [{"kafka.partition": 2, "kafka.offset": 7, "event_id": None}]


def test_a_check_compares_two_tables_and_leaves_no_view_behind(spark):
    sums = """
        SELECT d.day, d.pv, h.pv AS hours
        FROM {batch} d JOIN (SELECT day, sum(pv) AS pv FROM hourly_traffic GROUP BY day) h USING (day)
        WHERE d.pv <> h.pv
    """
    checks = [expect("UnexpectedRowsExpectation", unexpected_rows_query=sums, description="pv is the sum of its hours")]
    declared = view(reads={"panes": page_panes}, key=("day",), time="day", checks=checks)(site_days.function)
    by_hour = spark.createDataFrame(
        [("/a", TEN, 2, START.date()), ("/a", ELEVEN, 3, START.date())], "page STRING, hour TIMESTAMP, pv BIGINT, day DATE"
    )
    found = {}
    for pv in (5, 6):
        by_day = spark.createDataFrame([(START.date(), pv)], "day DATE, pv BIGINT")
        tables = {
            "hourly_traffic": Judged(hourly_traffic, by_hour, START, END),
            "site_days": Judged(declared, by_day, START, END),
        }
        found[pv] = [v for v in quality.judge("r1", tables) if v.outcome != "passed"]
    assert found[5] == []
    assert [(v.check, v.unexpected, v.sample) for v in found[6]] == [
        ("pv is the sum of its hours", 1, '[{"day": "2026-11-19", "pv": 6, "hours": 5}]')
    ]
    assert spark.catalog.listTables() == []


def test_a_check_compares_with_a_frame_that_is_not_judged(spark):
    query = "SELECT d.hour FROM {batch} d JOIN published p USING (page, hour) WHERE d.pv < p.pv"
    declared = with_checks(expect("UnexpectedRowsExpectation", unexpected_rows_query=query, description="pv does not shrink"))
    tables = {"hourly_traffic": Judged(declared, hours(spark, ("/a", TEN, 2)), START, END)}
    verdicts = quality.judge("r1", tables, beside={"published": hours(spark, ("/a", TEN, 3))})
    assert not_passed(verdicts) == {"pv does not shrink": "failed"}
    assert {v.table for v in verdicts} == {"hourly_traffic"}
    assert spark.catalog.listTables() == []


def test_a_query_may_name_the_judged_table_itself(spark, capfd):
    query = "SELECT * FROM hourly_traffic WHERE pv > 1;"
    declared = with_checks(expect("UnexpectedRowsExpectation", unexpected_rows_query=query, description="small"))
    tables = {"hourly_traffic": Judged(declared, hours(spark, ("/a", TEN, 2)), START, END)}
    assert not_passed(quality.judge("r1", tables)) == {"small": "failed"}
    assert capfd.readouterr().out == ""


def test_instants_in_a_sample_are_utc_whatever_zone_the_process_has(spark, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        frame = hours(spark, ("/a", END, 1), ("/a", END, 1))
        found = {v.check: v.sample for v in quality.judge("r1", {"hourly_traffic": Judged(hourly_traffic, frame, START, END)})}
    finally:
        monkeypatch.undo()
        time.tzset()
    instant = "2026-11-20T00:00:00+00:00"
    assert found["hour is in the period"].count(instant) == 2
    assert found["key page, hour is unique"].count(instant) == 2


ERRORS = [
    (expect("ExpectColumnValuesToBeBetween", column="nope", min_value=1, severity="warning"), "nope"),
    (expect("UnexpectedRowsExpectation", unexpected_rows_query="SELEC {batch}", severity="warning"), "SELEC"),
    (expect("UnexpectedRowsExpectation", unexpected_rows_query="SELECT * FROM no_such", severity="warning"), "no_such"),
    (expect("UnexpectedRowsExpectation", unexpected_rows_query="SELECT '{' FROM {batch}", severity="warning"), "brace"),
    (expect("ExpectNoSuchThing", column="pv", severity="warning"), "ExpectNoSuchThing"),
    (expect("ExpectColumnValuesToBeBetween", column="pv", severity="warning"), "min_value"),
]


def test_a_check_that_cannot_be_asked_is_an_error_and_fails_the_gate_even_as_a_warning(spark, tmp_path):
    declared = with_checks(*(check for check, _ in ERRORS))
    judged = Judged(declared, hours(spark, ("/a", TEN, 1)), START, END)
    verdicts = quality.judge("r1", {"hourly_traffic": judged}, tmp_path)
    assert [v.outcome for v in verdicts] == ["passed"] * 4 + ["error"] * len(ERRORS)
    for found, (_, word) in zip(verdicts[4:], ERRORS, strict=True):
        assert word in found.observed
        decided = quality.gate(declared, [c for c in quality.checks_of(judged) if c.name == found.check], [found])
        assert not decided.passed
        assert "could not be asked" in decided.reasons[0]
    (page,) = tmp_path.glob("validations/hourly_traffic/**/*.html")
    assert "ExpectNoSuchThing" in page.read_text()


def test_a_frame_that_cannot_be_read_is_an_error_of_every_check(spark, tmp_path):
    hours(spark, ("/a", TEN, 1)).write.parquet(str(tmp_path / "t"))
    frame = spark.read.parquet(str(tmp_path / "t"))
    for file in (tmp_path / "t").glob("*.parquet"):
        file.unlink()
    verdicts = quality.judge("r1", {"hourly_traffic": Judged(hourly_traffic, frame, START, END)})
    assert [v.outcome for v in verdicts] == ["error"] * 4


def test_a_table_handed_in_by_another_name_is_refused(spark):
    with pytest.raises(ValueError, match="hourly is handed in with the declaration hourly_traffic"):
        quality.judge("r1", {"hourly": Judged(hourly_traffic, hours(spark, ("/a", TEN, 1)), START, END)})


# ----------------------------------------------------------------------------------------------------------- Data Docs


def test_docs_keep_every_run_name_the_failed_check_and_escape_what_data_says(spark, tmp_path):
    declared = with_checks(
        expect("ExpectColumnValuesToNotMatchRegex", column="page", regex="alert"),
        expect(
            "UnexpectedRowsExpectation", unexpected_rows_query="SELECT int(page) FROM {batch}", description="page <b>counts</b>"
        ),
        expect("ExpectColumnMinToBeBetween", column="page", min_value="z", description="least page"),
    )
    judged = Judged(declared, hours(spark, (HOSTILE, TEN, 1)), START, END)
    for run in ("nightly/1", "nightly/2"):
        quality.judge(run, {"hourly_traffic": judged}, tmp_path)
    pages = sorted(tmp_path.glob("validations/**/*.html"))
    assert [page.relative_to(tmp_path).parts[1:3] for page in pages] == [
        ("hourly_traffic", "nightly-1"),
        ("hourly_traffic", "nightly-2"),
    ]
    for page in pages:
        text = page.read_text()
        assert "page is not null" in text
        assert "least page" in text
        assert html.escape("page <b>counts</b>") in text
        assert "CAST_INVALID_INPUT" in text
        assert html.escape(HOSTILE) in text
        assert "<script>alert" not in text
        assert "<b>counts" not in text
    index = (tmp_path / "index.html").read_text()
    assert "nightly-1" in index
    assert "nightly-2" in index


def test_a_query_is_run_once_where_it_finds_no_row_and_again_for_its_rows_where_it_does(spark, monkeypatch):
    asked, sql = [], SparkSession.sql
    monkeypatch.setattr(SparkSession, "sql", lambda self, query, *more: asked.append(query) or sql(self, query, *more))
    checks = [
        expect("UnexpectedRowsExpectation", unexpected_rows_query=f"SELECT * FROM {{batch}} WHERE pv < {n}") for n in (1, 2)
    ]
    judged = Judged(with_checks(*checks), hours(spark, ("/a", TEN, 1)), START, END)
    found = [v for v in quality.judge("r1", {"hourly_traffic": judged}) if v.outcome == "failed"]
    assert [(v.unexpected, "/a" in v.sample) for v in found] == [(1, True)]
    assert [sum(f"pv < {n}" in query for query in asked) for n in (1, 2)] == [1, 3]


def test_a_result_that_is_numpy_s_is_on_its_page():
    told: Any = np.False_
    config = ExpectationConfiguration(type="expect_column_stdev_to_be_between", kwargs={"column": "price"})
    result = ExpectationValidationResult(success=told, expectation_config=config, result={"observed_value": 1.0})
    assert json.loads(json.dumps(quality.on_page(result).to_json_dict()))["success"] is False


def test_pages_go_once_they_are_as_old_as_operating_says(tmp_path):
    (kept,) = re.findall(r"^\| pages of checks in `docs`; .* \| (\d+) days,", OPERATING.read_text(), re.MULTILINE)
    now, table = datetime.now(UTC), [("hourly_traffic", [quality.Unasked(expect("ExpectX", column="a"), "it is unknown")])]
    for ago in (int(kept) + 1, int(kept) - 1, 0):
        quality.write_pages(tmp_path, f"settle-{ago}", now - timedelta(days=ago), table)
    for kind in ("results/**/*.json", "validations/**/*.html"):
        assert {file.parts[-3] for file in tmp_path.glob(kind)} == {f"settle-{int(kept) - 1}", "settle-0"}


def test_docs_that_cannot_be_written_cost_no_verdict(spark, tmp_path):
    (tmp_path / "docs").write_text("a file where the folder should be")
    judged = Judged(hourly_traffic, hours(spark, ("/a", TEN, 1)), START, END)
    assert len(quality.judge("r1", {"hourly_traffic": judged}, tmp_path / "docs")) == 4


# ---------------------------------------------------------------------------------------------------- deciding, purely


def said(check: str, outcome: str = "passed", severity: str = "critical", table: str = "hourly_traffic") -> Verdict:
    return Verdict("r1", table, check, "ExpectX", severity, outcome, None, None, None, END, (START.date(), START.date()))


FIRST, SECOND = expect("ExpectX", column="a"), expect("ExpectX", column="b", severity="warning")


@pytest.mark.parametrize(
    ("verdicts", "reasons"),
    [
        ([said("ExpectX a"), said("ExpectX b")], []),
        ([said("ExpectX a"), said("ExpectX b", "failed", "warning")], []),
        ([said("ExpectX a", "failed"), said("ExpectX b")], ['hourly_traffic: "ExpectX a" failed']),
        (
            [said("ExpectX a", "failed", "warning"), said("ExpectX b")],
            ['hourly_traffic: "ExpectX a" failed'],
        ),  # declared critical
        (
            [said("ExpectX a"), said("ExpectX b", "error", "warning")],
            ['hourly_traffic: "ExpectX b" could not be asked: no reason is known'],
        ),
        ([said("ExpectX a")], ['hourly_traffic: 2 checks were expected and 1 ran; missing: "ExpectX b"']),
        (
            [said("ExpectX a"), said("ExpectX b", table="daily_traffic")],
            ['hourly_traffic: 2 checks were expected and 1 ran; missing: "ExpectX b"'],
        ),
        ([said("ExpectX a"), said("ExpectX a")], ['hourly_traffic: 2 checks were expected and 1 ran; missing: "ExpectX b"']),
        ([], ['hourly_traffic: 2 checks were expected and 0 ran; missing: "ExpectX a", "ExpectX b"']),
    ],
)
def test_gate(verdicts, reasons):
    decided = quality.gate(hourly_traffic, [FIRST, SECOND], verdicts)
    assert list(decided.reasons) == reasons
    assert decided.passed == (not reasons)


@pytest.mark.parametrize(("failed", "passes"), [("warning", True), ("critical", False)])
def test_warning_that_shares_its_name_with_a_critical_check_blocks_nothing(failed, passes):
    pair = [expect("ExpectX", column="a", min_value=1), expect("ExpectX", column="a", max_value=9, severity="warning")]
    verdicts = [said(c.name, "failed" if c.severity == failed else "passed", c.severity) for c in pair]
    assert quality.gate(hourly_traffic, pair, verdicts).passed == passes


def test_one_check_declared_twice_must_run_twice():
    decided = quality.gate(hourly_traffic, [FIRST, FIRST], [said("ExpectX a")])
    assert decided.reasons == ('hourly_traffic: 2 checks were expected and 1 ran; missing: "ExpectX a"',)


def test_a_gate_that_expects_nothing_fails():
    assert not quality.gate(hourly_traffic, [], []).passed


@pytest.mark.parametrize(
    ("failed", "blocked"),
    [
        ([], set()),
        (["best_days"], set()),
        (["site_days"], set()),
        (["daily_traffic"], {"best_days"}),
        (["hourly_traffic"], {"daily_traffic", "best_days"}),
        (["page_views"], {"page_panes", "hourly_traffic", "site_days", "daily_traffic", "best_days"}),
    ],
)
def test_what_reads_a_failed_table_is_blocked_through_others_too(failed, blocked):
    declared = (PAGE_VIEWS, page_panes, hourly_traffic, site_days, daily_traffic, best_days)
    pipeline = SimpleNamespace(__name__="pipeline", **{d.name: d for d in declared})
    assert set(quality.blocked(catalog([pipeline]), failed)) == blocked


def test_a_block_says_why_to_its_root():
    pipeline = SimpleNamespace(__name__="pipeline", a=PAGE_VIEWS, b=page_panes, c=hourly_traffic, d=daily_traffic)
    assert quality.blocked(catalog([pipeline]), ["page_panes"])["daily_traffic"] == (
        "daily_traffic reads hourly_traffic, which is blocked: hourly_traffic reads page_panes, which failed its checks"
    )


@pytest.mark.parametrize(("failed", "blocked"), [("minutes", set()), ("page_panes", {"last_hour", "peaks"})])
def test_what_is_blocked_is_held_back_and_what_a_live_way_alone_reads_blocks_nothing(settings, monkeypatch, failed, blocked):
    @rollup(reads={"views": PAGE_VIEWS}, key=("page", "minute"), time="minute", merge={"views": "distinct"})
    def minutes(views): ...

    @view(reads={"panes": page_panes}, key=("page", "hour"), time="hour", live=Live(every="30 seconds", back="2 hours"))
    def last_hour(panes): ...

    @last_hour.live(every="5 seconds", back="10 minutes", reads={"minutes": minutes})
    def newest(minutes): ...

    @view(reads={"hours": last_hour}, key=("page", "day"), time="day")
    def peaks(hours): ...

    pipeline = SimpleNamespace(__name__="pipeline", a=PAGE_VIEWS, b=page_panes, c=minutes, d=last_hour, e=peaks)
    everything = catalog([pipeline])
    monkeypatch.setattr(settle.Settling, "keep", lambda *_: None)
    monkeypatch.setattr(settle.Settling, "rows_staged", lambda *_: 1)
    settling = settle.Settling(settings, everything, lake.Run("r", "running", [], "test", "", ""), print)
    settling.failed = {failed: "its function raised"}
    settling.judge(everything.derived)
    tables = settling.run.tables
    assert {name for name in tables if tables[name]["gate"] == "blocked"} == blocked
    assert {name for name in tables if settling.run.held_back(name)} == {failed, *blocked}


def test_a_settling_says_of_each_table_that_its_checks_were_asked(
    spark: SparkSession, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = {"hourly_traffic": hours(spark, ("/a", TEN, 1)), "site_days": spark.createDataFrame([(START.date(),)], "day DATE")}
    derived = {"hourly_traffic": hourly_traffic, "site_days": site_days}
    monkeypatch.setattr(settle.Settling, "keep", lambda *_: None)
    monkeypatch.setattr(settle.Settling, "rows_staged", lambda *_: 1)
    monkeypatch.setattr(settle.Settling, "beside", lambda _: {})
    monkeypatch.setattr(settle.Settling, "judged", lambda _, declared, days: Judged(declared, frames[declared.name], START, END))
    said: list[str] = []
    run = lake.Run("r", "running", ["2026-11-19"], "test", "", "")
    settle.Settling(settings, Catalog({}, {}, derived), run, said.append).judge([*derived.values()])
    assert [line.rsplit(" in ")[0] for line in said] == [
        "asked 4 checks of hourly_traffic",
        "asked 3 checks of site_days",
        "asked 7 checks of 2 tables",
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DeclarationError("view t: its function gives no column a"), "view t: its function gives no column a"),
        (ValueError("not so"), "hourly_traffic: its function raised ValueError: not so"),
    ],
)
def test_what_is_foreseen_of_a_table_that_fails_is_told_in_its_own_sentence(
    settings: Settings, error: Exception, told: str
) -> None:
    settling = settle.Settling(settings, Catalog({}, {}, {}), lake.Run("r", "running", [], "test", "", ""), print)
    settling.fail(hourly_traffic, error)
    assert settling.failed == {"hourly_traffic": told}


# ------------------------------------------------------------------------------------------------------------- keeping


KEPT = [
    Verdict("r1", "t", "größe", "ExpectX", "critical", "failed", '{"a": 1}', 3, '["<b>"]', END, (START.date(), END.date())),
    Verdict("r1", "t", "b", "ExpectY", "warning", "passed", None, None, None, END, (START.date(), START.date())),
]


def test_verdicts_survive_json():
    assert quality.from_json(json.loads(quality.to_json(KEPT))) == KEPT


def test_verdicts_are_rows_of_the_stated_columns():
    table = quality.to_arrow(KEPT)
    assert ", ".join(table.column_names) == ", ".join(column.split()[0] for column in quality.VERDICTS.split(", "))
    assert table.to_pylist()[0] == {
        "run": "r1",
        "table_name": "t",
        "check_name": "größe",
        "expectation": "ExpectX",
        "severity": "critical",
        "outcome": "failed",
        "observed": '{"a": 1}',
        "unexpected": 3,
        "sample": '["<b>"]',
        "judged_at": END,
        "day": START.date(),
        "last_day": END.date(),
    }


def test_a_gate_costs_no_heavy_import():
    heavy = ("pyspark", "great_expectations", "pyarrow", "pandas", "deltalake")
    code = f"import sys, tidemark.quality; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
