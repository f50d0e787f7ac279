"""The report of a day, over real tables written as lake.py writes them, and looked at in a real browser."""

import csv
import fcntl
import html
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from typer.testing import CliRunner

from tidemark import __main__ as cli
from tidemark import lake, quality, settle
from tidemark import report as engine
from tidemark.local import Lease
from tidemark.model import Catalog, Live, Topic, View
from tidemark.pipelines import CATALOG
from tidemark.report import ReportError, report
from tidemark.settings import Settings

DAY = date(2024, 11, 20)
BEFORE, WEEK = DAY - timedelta(days=1), DAY - timedelta(days=7)
UTC_TIME = pa.timestamp("us", "UTC")
COUNTS = [("pv", pa.int64()), ("uv", pa.int64()), ("settled", pa.bool_()), ("day", pa.date32())]
KAFKA = pa.struct([("partition", pa.int32()), ("offset", pa.int64()), ("timestamp", UTC_TIME), ("value", pa.binary())])
SCHEMAS = {
    "site_hourly_traffic": pa.schema([("hour", UTC_TIME), *COUNTS]),
    "hourly_traffic": pa.schema([("page", pa.string()), ("hour", UTC_TIME), *COUNTS]),
    "site_daily_traffic": pa.schema(COUNTS),
    "daily_traffic": pa.schema([("page", pa.string()), *COUNTS]),
    "page_views": pa.schema([("viewed_at", UTC_TIME), ("kafka", KAFKA), ("reject", pa.string()), ("day", pa.date32())]),
    "users": pa.schema([("changed_at", UTC_TIME), ("kafka", KAFKA), ("reject", pa.string()), ("day", pa.date32())]),
    "word_counts": pa.schema([("second", UTC_TIME), ("word", pa.string()), ("count", pa.int64()), *COUNTS[2:]]),
    "ledger": pa.schema(
        [
            *(("topic", pa.string()), ("partition", pa.int32()), ("from_offset", pa.int64())),
            *(("stream_time", UTC_TIME), ("day", pa.date32())),
        ]
    ),
}
VIEWS = tuple(SCHEMAS)[:4]
EVIL = "<script>document.title = 'taken'</script>&$x^2$"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(_env_file=None, home=tmp_path)


def put(settings: Settings, name: str, folder: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows into a table of the lake, in one commit that replaces what it held of their days, unless they are live."""
    schema = SCHEMAS[name]
    table = lake.ledger(settings) if name == "ledger" else lake.table(settings, CATALOG[name])
    if not table.exists:
        table.path.mkdir(parents=True)
        DeltaTable.create(table.path, Schema.from_arrow(schema), partition_by=["day"])
    days = {r["day"] for r in rows}
    gone = [lake.remove_action(f) for f in table.files() if f.day in days and folder.startswith("runs/")]
    adds = lake.write_arrow(table, folder, pa.Table.from_pylist(list(rows), schema))
    lake.commit(table, lambda: ([*adds, *gone], {}))


def midnight(settings: Settings, day: date) -> datetime:
    return datetime.combine(day, datetime.min.time(), settings.tz).astimezone(UTC)


def traffic(settings: Settings, day: date, pages: Mapping[str, Sequence[int]]) -> dict[str, list[dict[str, Any]]]:
    """What the views hold of a day, from page views by page in each of its first hours; half as many visitors."""
    settled = {"settled": True, "day": day}
    hours = [midnight(settings, day) + timedelta(hours=n) for n in range(25)]
    cells = [(page, hours[n], pv) for page, counts in pages.items() for n, pv in enumerate(counts)]
    by_hour = {h: sum(pv for _, at, pv in cells if at == h) for h in hours if any(at == h for _, at, _ in cells)}
    whole = sum(by_hour.values())
    return {
        "site_hourly_traffic": [{"hour": h, "pv": pv, "uv": pv // 2, **settled} for h, pv in by_hour.items()],
        "hourly_traffic": [{"page": p, "hour": h, "pv": pv, "uv": pv // 2, **settled} for p, h, pv in cells],
        "site_daily_traffic": [{"pv": whole, "uv": whole // 2, **settled}],
        "daily_traffic": [{"page": p, "pv": sum(c), "uv": sum(c) // 2, **settled} for p, c in pages.items()],
    }


def publish(
    settings: Settings, run: str, days: Mapping[date, Mapping[str, Sequence[int]]], number: int = 0, **more: Any
) -> lake.Run:
    """Settled days as a publication leaves them: files below `runs/<run>/`, and the run's record."""
    at = datetime(2024, 11, 21, tzinfo=UTC) + timedelta(minutes=number)
    for name in VIEWS:
        put(settings, name, f"runs/{run}", [r for day, pages in days.items() for r in traffic(settings, day, pages)[name]])
    tables = {name: {"gate": "passed", "reasons": [], "published": at.isoformat()} for name in VIEWS}
    return save(settings, run, days, number, tables, **more)


def save(settings: Settings, run: str, days: Any, number: int = 0, tables: Any = None, **more: Any) -> lake.Run:
    at = datetime(2024, 11, 21, tzinfo=UTC) + timedelta(minutes=number)
    said = {"state": "published", "reason": "the night", **more}
    record = lake.Run(
        run,
        days=sorted(map(str, days)),
        created=at.isoformat(),
        version="0",
        tables=tables or {},
        **said,  # type: ignore[arg-type]
    )
    lake.save(settings, record)
    return record


def section(page: Path, title: str) -> str:
    (found,) = re.findall(rf"<section>\s*<h2>{re.escape(title)}</h2>(.*?)</section>", page.read_text(), re.DOTALL)
    return found


def rows(page: Path, title: str) -> list[list[str]]:
    """The cells of a section's tables, as a reader sees them."""
    lines = re.findall(r"<tr>(<td.*?)</tr>", section(page, title))
    return [[html.unescape(c) for c in re.findall(r"<bdi>(.*?)</bdi>", line, re.DOTALL)] for line in lines]


def says(page: Path, title: str) -> str:
    (found,) = re.findall(r'<p class="says[^"]*"><bdi>(.*?)</bdi></p>', section(page, title))
    return html.unescape(found)


def numbers(page: Path) -> list[list[str]]:
    with page.with_suffix(".csv").open(newline="") as file:
        return list(csv.reader(file))[1:]


# -------------------------------------------------------------------------------------------------------------- traffic


def test_a_published_day_stands_beside_the_day_and_the_week_before(settings):
    publish(settings, "old", {WEEK: {"/": [100]}, BEFORE: {"/": [30, 10], "/gone": [40]}})
    publish(settings, "new", {DAY: {"/": [50, 30], "/fresh": [10]}}, 1)
    page = report(settings, CATALOG, DAY)

    assert page == settings.lake_path / "reports/2024-11-20.html"
    text = page.read_text()
    assert "Wednesday, 20 November 2024" in text and '<span class="state">published</span>' in text
    tiles = re.findall(r'class="tile first"><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span><span>(.*?)</span>', text)
    assert tiles == [
        ("Page views", "90", "+12.5 % on the day before", "−10.0 % on the week before"),
        ("Unique visitors", "45", "+12.5 % on the day before", "−10.0 % on the week before"),
    ]
    assert rows(page, "By page") == [
        ["/", "80", "+100.0 %", "−20.0 %", "40", "+100.0 %", "−20.0 %"],
        ["/fresh", "10", "–", "–", "5", "–", "–"],
    ]
    assert section(page, "By hour").count("<svg") == 2 and section(page, "Four weeks").count("<svg") == 2


def test_numbers_of_the_page_and_more_are_in_the_csv(settings):
    publish(settings, "old", {BEFORE: {"/": [30]}})
    publish(settings, "new", {DAY: {"/": [50, 30]}}, 1)
    found = numbers(report(settings, CATALOG, DAY))
    assert [r for r in found if r[0] == "By hour"] == [
        ["By hour", "site_hourly_traffic", str(d), f"{d}T0{h}:00:00+00:00", m, str(n)]
        for d, h, pv in ((BEFORE, 0, 30), (DAY, 0, 50), (DAY, 1, 30))
        for m, n in (("pv", pv), ("uv", pv // 2))
    ]
    assert ["By page", "daily_traffic", str(BEFORE), "/", "pv", "30"] in found
    assert ["By page", "hourly_traffic", str(DAY), f"/ {DAY}T01:00:00+00:00", "uv", "15"] in found
    assert ["Four weeks", "site_daily_traffic", str(DAY), "", "pv", "80"] in found


def test_a_day_of_25_hours_has_25_and_they_are_the_zone_s(tmp_path):
    berlin = Settings(_env_file=None, home=tmp_path, zone="Europe/Berlin")
    day = date(2024, 10, 27)
    publish(berlin, "new", {day: {"/": range(1, 26)}})
    page = report(berlin, CATALOG, day)
    hours = [r for r in numbers(page) if r[0] == "By hour" and r[4] == "pv"]
    assert [r[5] for r in hours] == [str(n) for n in range(1, 26)] and hours[0][3] == "2024-10-26T22:00:00+00:00"
    assert section(page, "By page").count("clip-path") >= 25 and "Europe/Berlin" in page.read_text()


@pytest.mark.parametrize(("day", "two"), [(date(2024, 3, 31), []), (date(2024, 10, 27), [2, 2]), (date(2024, 11, 20), [2])])
def test_hours_are_those_of_the_clock_and_days_of_other_lengths_stand_beside_them(tmp_path, monkeypatch, day, two):
    """Two in the afternoon, when each day has its peak, is the fourteenth hour of a day of 23, the sixteenth of one of 25."""
    berlin = Settings(_env_file=None, home=tmp_path, zone="Europe/Berlin")
    at = {d: midnight(berlin, d) for d in (day, day - timedelta(days=1))}
    peaks = {
        d: int((datetime(d.year, d.month, d.day, 14, tzinfo=berlin.tz) - start) / timedelta(hours=1)) for d, start in at.items()
    }
    publish(berlin, "new", {d: {"/": [9 if n == peak else 1 for n in range(peak + 9)]} for d, peak in peaks.items()})
    drawn = []
    monkeypatch.setattr(engine, "draw_hours", lambda _, series, clock: drawn.append((series, clock)))
    shown = engine.traffic(berlin, CATALOG, day)
    series, clock = drawn[0]
    assert clock == [0, 1, *two, *range(3, 24)] and clock[peaks[day]] == 14
    assert [max(values, key=values.get) for values in (series["now"], series["before"])] == [peaks[day]] * 2
    grid = str(shown.sections["By page"].pictures[0][1])
    assert re.findall(r"<text[^>]*>(\d\d)</text>", grid) == ["00", "03", "06", "09", "12", "15", "18", "21", "24"]


def test_text_of_the_data_is_shown_as_text(settings):
    whole = "/" + "x" * 199
    publish(settings, "new", {DAY: {EVIL: [3], "=1+1": [2], whole: [1], "\u202egnp.exe": [1], "日本 🚀": [1]}}, reason=EVIL)
    page = report(settings, CATALOG, DAY)
    assert [r[0] for r in rows(page, "By page")] == [EVIL, "=1+1", whole, "\u202egnp.exe", "日本 🚀"]
    text = page.read_text()
    assert "<script" not in text and text.count("&lt;script&gt;") == 3  # the table, the picture, the run's reason
    assert {r[3] for r in numbers(page) if r[1] == "daily_traffic"} >= {EVIL, "'=1+1"}


def test_long_names_are_cut_and_those_that_begin_alike_stay_apart(settings, monkeypatch):
    one, two, shown = (f"/{'🚀' * n}{end}" for n, end in ((250, "one"), (250, "two"), (198, "…")))
    publish(settings, "new", {DAY: {one: [1, 2], two: [30, 40]}})
    drawn = []
    monkeypatch.setattr(engine, "draw_grid", lambda _, names, values, clock: drawn.append((names, values)))
    page = report(settings, CATALOG, DAY)
    assert drawn == [([shown, shown], {(0, 0): 30, (0, 1): 40, (1, 0): 1, (1, 1): 2})]
    assert [r[:2] for r in rows(page, "By page")] == [[shown, "70"], [shown, "3"]]
    of_pages = [r[3:] for r in numbers(page) if r[0] == "By page" and r[2] == str(DAY) and r[4] == "pv"]
    hours = [f"{shown} {DAY}T0{n}:00:00+00:00" for n in (0, 1, 0, 1)]
    assert of_pages == [
        [name, "pv", n] for name, n in zip((shown, shown, *hours), ("70", "3", "30", "40", "1", "2"), strict=True)
    ]


def test_a_page_asks_no_network_and_runs_nothing(settings):
    publish(settings, "new", {DAY: {"/": [50, 30]}})
    text = report(settings, CATALOG, DAY).read_text()
    assert "default-src 'none'" in text
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not places
    assert set(re.findall(r'href="([^"#]+)"', text)) == {"2024-11-20.csv"}
    assert re.findall(r"(?i)<(?:script|link|iframe|img|object)|@import|\son\w+=", text) == []
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 0


# ------------------------------------------------------------------------------------------------------- how a day stands

PASSED, FAILED = {"gate": "passed", "reasons": []}, {"gate": "failed", "reasons": ['hourly_traffic: "pv < uv" failed on 3 rows']}
DONE = PASSED | {"published": "2024-11-21T00:10:00+00:00"}


@pytest.mark.parametrize(
    ("run", "state", "says", "follows"),
    [
        (
            None,
            "not settled",
            "No run has settled this day; readers have it live. Its night does so; where that is over",
            "tidemark settle --day 2024-11-20",
        ),
        (
            ("staged", {"a": PASSED, "hourly_traffic": FAILED}),
            "held back",
            "1 table of run new may not be published",
            "run = &#39;new&#39;",
        ),
        (("staged", {"hourly_traffic": PASSED}), "not published", "Run new has passed its checks", "tidemark publish new"),
        (("published", {"daily_traffic": DONE, "hourly_traffic": FAILED}), "published in part", "1 table of run new", "Clear"),
        (("published", {"page_views": PASSED, "daily_traffic": DONE}), "published", "Settled by run new: the night.", None),
        (("failed", {}), "failed", "Run new failed: disk full; readers have the day live.", "tidemark settle --day 2024-11-20"),
        (("running", {}), "being settled", "Run new is at work on it; readers have the day live.", "tidemark runs"),
        (("rolled back", {"daily_traffic": PASSED}), "taken back", "Run new was taken back: disk full;", "tidemark settle"),
        (("dropped", {"daily_traffic": PASSED}), "not settled", "No run has settled this day", "tidemark settle"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "none" if value is None else value[:12],
)
def test_a_day_says_how_it_stands_and_what_follows(settings, run, state, says, follows):
    if run:
        save(settings, "new", [DAY], tables=run[1], state=run[0], note="disk full")
    with Lease(settings.lake_path / "runs" / ".new.lease") if run and run[0] == "running" else nullcontext():
        text = report(settings, CATALOG, DAY).read_text()
    assert re.findall(r'class="state[^"]*">(.*?)</span>', text) == [state]
    assert re.findall(r"</h1>\s*<p>(.*?)</p>", text)[0].startswith(says)
    assert (follows in text.split("What follows:")[1].split("</div>")[0]) if follows else "What follows:" not in text


@pytest.mark.parametrize(
    ("zone", "ends"),
    [("UTC", "2024-11-21 00:00:00"), ("Europe/Berlin", "2024-11-20 23:00:00"), ("Asia/Shanghai", "2024-11-20 16:00:00")],
)
def test_a_night_to_clear_is_named_as_airflow_lists_it_by_its_end(tmp_path, zone, ends):
    follows = engine.stands(Settings(_env_file=None, home=tmp_path, zone=zone), CATALOG, DAY).follows
    assert follows[-1] == f"or in Airflow: DAG `nightly`, the run of 2024-11-20, listed under its end, {ends} UTC: Clear"


def test_a_reason_that_is_no_utf_8_is_kept_and_shown_as_text(settings):
    reason = os.fsdecode(b"h\xfcbsch")  # as Python has it from a command line
    save(settings, "old", [DAY], reason=reason)
    assert "h?bsch" in report(settings, CATALOG, DAY).read_text()
    listed = CliRunner().invoke(cli.app, ["runs"], env={"TIDEMARK_HOME": str(settings.home)})
    assert (listed.exit_code, "h?bsch" in listed.stdout) == (0, True)

    failed = save(settings, "failed", [DAY], tables={"daily_traffic": {"gate": "failed", "failed": ["c"], "reasons": ["c"]}})
    settle.take_over(settings, failed, ["c"], reason)
    settle.rollback(settings, CATALOG, "old", reason)
    new = settle.new_run(settings, "settle", [DAY], reason, {})
    assert (new.reason, failed.tables["daily_traffic"]["forced"]["reason"]) == ("h?bsch", "h?bsch")
    assert b'"note": "h?bsch"' in (settings.lake_path / "runs/old.json").read_bytes()


def test_a_run_that_was_killed_is_not_at_work_any_more(settings):
    publish(settings, "old", {DAY: {"/": [30]}})
    save(settings, "new", [DAY], 1, state="running", note="")
    with Lease(settings.lake_path / "runs" / ".new.lease"):
        assert engine.stands(settings, CATALOG, DAY).state == "being settled"
    assert (
        engine.stands(settings, CATALOG, DAY).says == "Settled by run old: the night. Run new failed since, and changed nothing."
    )
    (settings.lake_path / "runs" / "old.json").unlink()
    assert engine.stands(settings, CATALOG, DAY).says == "Run new failed: it was cut off; readers have the day live."
    listed = CliRunner().invoke(cli.app, ["runs", "--json"], env={"TIDEMARK_HOME": str(settings.home)})
    assert [(run["state"], run["note"]) for run in json.loads(listed.stdout)] == [("failed", "it was cut off")]
    assert lake.run_of(settings, "new").undecided  # its files stay for a day: a replay may go on


def test_a_run_that_ends_while_one_looks_is_told_as_it_ended(settings, monkeypatch):
    run = save(settings, "new", [DAY], state="running", note="")
    monkeypatch.setattr(lake, "is_held", lambda _: lake.save(settings, replace(run, state="staged")))  # and lets go
    assert [r.state for r in lake.runs_now(settings)[0]] == ["staged"]


def test_a_remark_of_a_run_is_not_told_as_the_cause_of_its_end(settings):
    save(settings, "new", [DAY], state="running", note="the log keeps 30 days")
    assert [r.note for r in lake.runs_now(settings)[0]] == ["the log keeps 30 days; it was cut off"]


def test_who_may_only_read_a_lake_can_look_whether_a_run_is_at_work(settings, monkeypatch):
    save(settings, "new", [DAY], state="running")
    lease = lake.lease_of(settings, "new")
    opened = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *more, **of: opened(path, flags, *more, **of) if not flags & os.O_RDWR else 1 / 0
    )
    with open(lease, "w") as holder:  # noqa: PTH123
        assert [r.state for r in lake.runs_now(settings)[0]] == ["failed"]
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert [r.state for r in lake.runs_now(settings)[0]] == ["running"]


NIGHT, MENDED = ("published", [], {"daily_traffic": DONE, "hourly_traffic": DONE}), {"hourly_traffic": DONE}


@pytest.mark.parametrize(
    ("first", "second", "state", "says"),
    [
        (
            ("staged", [], {"daily_traffic": PASSED, "hourly_traffic": FAILED}),
            ("published", ["site_daily_traffic"], {"site_daily_traffic": DONE}),
            "published in part",
            "1 table of run first may not be published; readers have what second published.",
        ),
        (
            ("failed", [], {}),
            ("published", ["hourly_traffic"], MENDED),
            "failed",
            "Run first failed: disk full; readers have what second published.",
        ),
        (
            NIGHT,
            ("staged", ["hourly_traffic"], {"hourly_traffic": PASSED}),
            "published",
            "Settled by run first: night. Run second waits to be published.",
        ),
        (NIGHT, ("failed", ["hourly_traffic"], {}), "published", "Settled by run first: night."),
        (NIGHT, ("failed", [], {}), "published", "Settled by run first: night. Run second failed since, and changed nothing."),
        (
            ("published", [], {"daily_traffic": DONE, "hourly_traffic": FAILED}),
            ("failed", [], {}),
            "published in part",
            "1 table of run first may not be published; readers have what first published. Run second failed since, and changed"
            " nothing.",
        ),
        (
            ("staged", [], {"daily_traffic": PASSED, "hourly_traffic": FAILED}),
            ("failed", [], {}),
            "failed",
            "Run second failed: disk full; readers have the day live.",
        ),
        (
            ("rolled back", [], {"daily_traffic": PASSED}),
            ("failed", [], {}),
            "failed",
            "Run second failed: disk full; readers have the day live.",
        ),
        (NIGHT, ("rolled back", ["hourly_traffic"], {"hourly_traffic": PASSED}), "published", "Settled by run first: night."),
        (NIGHT, ("published", ["hourly_traffic"], MENDED), "published", "Settled by run first: night; run second: mended."),
        (NIGHT, ("published", [], NIGHT[2]), "published", "Settled by run second: mended."),
        (
            NIGHT,
            ("staged", [], {"daily_traffic": PASSED, "hourly_traffic": FAILED}),
            "held back",
            "1 table of run second may not be published; readers have what first published.",
        ),
    ],
)
def test_each_table_stands_as_the_newest_run_left_it_that_computed_it(settings, first, second, state, says):
    for number, (name, reason, (was, only, tables)) in enumerate([("first", "night", first), ("second", "mended", second)]):
        done = {"published": f"2024-11-21T00:1{number}:00+00:00"}
        at = {n: t | done if "published" in t else t for n, t in tables.items()}
        save(settings, name, [DAY], number, at, state=was, only=only, reason=reason, note="disk full")
    found = engine.stands(settings, CATALOG, DAY)
    assert (found.state, found.says) == (state, says)


def test_a_blocked_day_has_its_report_with_the_last_good_one_and_the_failed_checks(settings):
    publish(settings, "old", {BEFORE: {"/": [30]}})
    for name in VIEWS:
        put(
            settings, name, "live/20241120T00-all-aa", [r | {"settled": False} for r in traffic(settings, DAY, {"/": [99]})[name]]
        )
    reason = f'hourly_traffic: "{EVIL}" failed on 3 rows; observed {{"pv": 1}}; for example [{{"page": "/"}}]'
    blocked = {"gate": "blocked", "reasons": ["daily_traffic reads hourly_traffic, which failed its checks"]}
    save(
        settings,
        "new",
        [DAY],
        1,
        {"hourly_traffic": {"gate": "failed", "reasons": [reason]}, "daily_traffic": blocked},
        state="staged",
    )
    page = report(settings, CATALOG, DAY)
    text = page.read_text()
    assert [html.unescape(r) for r in re.findall(r"<li><bdi>(.*?)</bdi></li>", text)] == [reason, *blocked["reasons"]]
    assert says(page, "By hour") == "2024-11-20 is not published whole. These are the numbers of 2024-11-19, the last good day."
    assert rows(page, "By page") == [["/", "30", "–", "–", "15", "–", "–"]]
    assert "99" not in {r[5] for r in numbers(page)}


def test_a_table_published_over_its_failed_checks_is_named(settings):
    publish(settings, "new", {DAY: {"/": [30]}})
    save(
        settings,
        "new",
        [DAY],
        tables={**dict.fromkeys(VIEWS, DONE), "hourly_traffic": FAILED | DONE | {"gate": "failed", **FAILED}},
    )
    text = report(settings, CATALOG, DAY).read_text()
    over = text.split("Published over failed checks:")[1].split("</div>")[0]
    assert "&#34;pv &lt; uv&#34; failed on 3 rows" in over and '<span class="state bad">published</span>' in text


def test_why_a_person_published_over_a_check_is_in_the_report(settings):
    publish(settings, "new", {DAY: {"/": [30]}})
    forced = {"forced": {"checks": ["pv < uv"], "reason": f"a partial first day {EVIL}"}}
    reads_it = {"gate": "blocked", "reasons": ["daily_traffic reads hourly_traffic, which failed its checks"]}
    save(
        settings,
        "new",
        [DAY],
        tables={**dict.fromkeys(VIEWS, DONE), "hourly_traffic": DONE | FAILED | forced, "daily_traffic": DONE | reads_it},
    )
    over = report(settings, CATALOG, DAY).read_text().split("Published over failed checks:")[1].split("</div>")[0]
    assert [html.unescape(said) for said in re.findall(r"<li><bdi>(.*?)</bdi></li>", over)] == [
        *FAILED["reasons"],
        f"hourly_traffic was published all the same: a partial first day {EVIL}",
        *reads_it["reasons"],
    ]


def test_failed_check_of_a_topic_that_a_person_took_over_holds_nothing_back(settings):
    failed = {"gate": "failed", "reasons": ['page_views: "each record stands once" failed on 2 rows']}
    forced = {"forced": {"checks": ["each record stands once"], "reason": "they are the same"}}
    save(settings, "new", [DAY], tables={"daily_traffic": DONE, "page_views": failed | forced})
    found = engine.stands(settings, CATALOG, DAY)
    assert (found.state, found.held) == ("published", {})
    assert found.over == {"page_views": [*failed["reasons"], "page_views was published all the same: they are the same"]}


def test_a_topic_and_a_view_may_be_called_by_words_of_sql(settings, monkeypatch):
    noon, schema = datetime(2024, 11, 20, 12, tzinfo=UTC), "id STRING NOT NULL, viewed_at TIMESTAMP NOT NULL"
    order = Topic("order", key="id", partitions=1, schema=schema, event_time="viewed_at")
    group = View("group", lambda order: order, {"order": order}, ("table", "end"), "end", Live("1 minute", "1 hour"))
    own = Catalog({"order": order}, {}, {"group": group})
    monkeypatch.setitem(globals(), "CATALOG", own)
    monkeypatch.setitem(SCHEMAS, "order", SCHEMAS["page_views"])
    monkeypatch.setitem(SCHEMAS, "group", pa.schema([("table", pa.string()), ("end", UTC_TIME), *COUNTS[2:]]))
    put(
        settings,
        "ledger",
        "live/main-0-0-aa",
        [{"topic": "order", "partition": 0, "from_offset": 0, "stream_time": noon, "day": DAY}],
    )
    put(settings, "order", "live/main-0-0-aa", [event(0, noon), event(1, noon, "not JSON")])
    put(settings, "group", "live/main-0-0-aa", [{"table": "a", "end": noon, "settled": False, "day": DAY}])
    page = report(settings, own, DAY)
    assert "This cannot be had" not in page.read_text() and "group: 1 row, live" in page.read_text()
    assert [rows(page, part)[0][:2] for part in ("Late events", "Rejects")] == [["order", "1"], ["order", "not JSON"]]


def test_an_empty_lake_has_its_report(settings):
    page = report(settings, CATALOG, DAY)
    assert rows(page, "The stream now") == [[s, "never ran", "–", "–", "–", "–"] for s in ("main", "alarms")]
    assert says(page, "The stream now") == "main never ran; alarms never ran."
    assert says(page, "Late events") == "No batch has brought an event."


def test_every_other_pipeline_has_its_section_with_the_newest_rows_of_each_view(settings):
    at = datetime(2024, 11, 20, 10, tzinfo=UTC)
    spoken = [
        {"second": at + timedelta(seconds=n), "word": word, "count": n, "settled": True, "day": DAY}
        for n, word in enumerate(("a", "潮" * 300))
    ]
    put(settings, "word_counts", "runs/new", [*spoken, {**spoken[0], "word": EVIL, "count": 7}])
    page = report(settings, CATALOG, DAY)
    assert says(page, "Word counts") == "word_counts: 3 rows (0 the day before)."
    assert rows(page, "Word counts") == [
        ["2024-11-20 10:00:01 UTC", "潮" * 199 + "…", "1"],
        ["2024-11-20 10:00:00 UTC", EVIL, "7"],
        ["2024-11-20 10:00:00 UTC", "a", "0"],
    ]
    assert ["Word counts", "word_counts", str(DAY), "", "rows", "3"] in numbers(page)
    assert "Visits" not in page.read_text()  # its tables are not there


def test_a_day_that_is_not_over_has_none(settings):
    today = datetime.now(UTC).date()
    with pytest.raises(
        ReportError, match=f"{today} is not over in UTC; the last day that has a report is {today - timedelta(days=1)}"
    ):
        report(settings, CATALOG, today)
    assert not (settings.lake_path / "reports").exists()


def test_a_table_that_cannot_be_read_costs_its_part_and_no_other(settings):
    """Its numbers are not held against those of the reports before, nor remembered: the next report finds nothing changed."""
    publish(settings, "new", {DAY: {"/": [30]}})
    table, memory = lake.table(settings, CATALOG["daily_traffic"]), settings.lake_path / "reports/last.json"
    report(settings, CATALOG, DAY)
    before = memory.read_bytes()
    held = {table.path / file.path: (table.path / file.path).read_bytes() for file in table.files()}
    for file in held:
        file.unlink()
    page = report(settings, CATALOG, DAY + timedelta(days=1))
    assert says(page, "Traffic").startswith("This cannot be had:") and says(page, "The stream now")
    assert says(page, "Restated days") == says(page, "Traffic") and rows(page, "Restated days") == []
    assert memory.read_bytes() == before
    for file, content in held.items():
        file.write_bytes(content)
    page = report(settings, CATALOG, DAY + timedelta(days=2))
    assert says(page, "Restated days") == UNCHANGED


# ------------------------------------------------------------------------------------------------------ the other parts


def compared(settings: Settings, run: str, *differences: Mapping[str, Any]) -> None:
    none = {"rows": 24, "changed": 0, "missing": 0, "extra": 0, "samples": [], "late": 0, "unexplained": 0, "day": str(DAY)}
    folder = settings.lake_path / "runs" / run
    folder.mkdir(parents=True)
    (folder / "compare.json").write_text(json.dumps({"differences": [none | d for d in differences]}))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({}, "Every row that readers had is as run new has settled it."),
        ({"changed": 2, "late": 2}, "2 of 48 rows differ from what readers had. Late events explain all of them."),
        (
            {"changed": 2, "late": 1, "unexplained": 1},
            "2 of 48 rows differ from what readers had. Late events do not explain 1 of them: tidemark compare new shows some.",
        ),
        ({"changed": 2, "late": None, "unexplained": None}, "2 of 48 rows differ from what readers had."),
    ],
    ids=["same", "late", "unexplained", "not asked"],
)
def test_live_against_settled_is_apart_by_cause(settings, more, sentence):
    save(settings, "new", [DAY, BEFORE])
    compared(
        settings,
        "new",
        {"table": "hourly_traffic", **more},
        {"table": "daily_traffic"},
        {"table": "page_panes", "changed": 9},
        {"table": "daily_traffic", "day": str(BEFORE), "changed": 9},
    )
    page = report(settings, CATALOG, DAY)
    cells = [
        "–" if (v := ({"late": 0, "unexplained": 0} | more).get(c, 0)) is None else str(v)
        for c in ("changed", "late", "unexplained")
    ]
    assert rows(page, "Live against settled")[0] == ["hourly_traffic", "24", "0", "0", *cells]
    assert len(rows(page, "Live against settled")) == 2 and says(page, "Live against settled") == sentence
    assert ("says bad" in section(page, "Live against settled")) == bool(more.get("unexplained"))


def test_each_view_was_compared_by_the_newest_run_that_computed_it(settings):
    save(settings, "new", [DAY])
    compared(settings, "new", {"table": "hourly_traffic", "changed": 5, "unexplained": 5}, {"table": "daily_traffic"})
    save(settings, "some", [DAY], 1, state="staged")
    compared(settings, "some", {"table": "daily_traffic", "changed": 2, "late": 2})
    page = report(settings, CATALOG, DAY)
    differ = "7 of 48 rows differ from what readers had. Late events do not explain 5 of them"
    assert says(page, "Live against settled") == f"{differ}: tidemark compare new shows some."


def test_view_that_is_never_live_is_not_held_against_what_was_live(settings):
    save(settings, "new", [DAY])
    compared(
        settings, "new", {"table": "hourly_traffic"}, {"table": "study_days", "missing": 24, "late": None, "unexplained": None}
    )
    page = report(settings, CATALOG, DAY)
    assert [row[0] for row in rows(page, "Live against settled")] == ["hourly_traffic"]
    assert says(page, "Live against settled") == "Every row that readers had is as run new has settled it."


def test_rows_that_nobody_asked_about_are_not_said_to_be_explained(settings):
    save(settings, "new", [DAY])
    none = {"changed": 2, "late": None, "unexplained": None}
    compared(settings, "new", {"table": "hourly_traffic", **none}, {"table": "daily_traffic", **none})
    assert "Unexplained rows" not in report(settings, CATALOG, DAY).read_text()
    save(settings, "newer", [DAY], 1)
    compared(settings, "newer", {"table": "hourly_traffic", **none}, {"table": "daily_traffic", "changed": 1, "late": 1})
    page = report(settings, CATALOG, DAY)
    assert says(page, "Live against settled") == "3 of 48 rows differ from what readers had."


def test_a_comparison_that_a_bad_disk_has_emptied_costs_its_parts_and_is_named(settings):
    publish(settings, "first", {BEFORE: {"/": [30]}})
    report(settings, CATALOG, BEFORE)
    publish(settings, "new", {DAY: {"/": [30]}, BEFORE: {"/": [31]}}, 1)
    compared(settings, "new", {"table": "hourly_traffic"})
    (settings.lake_path / "runs/new/compare.json").write_text("")
    page = report(settings, CATALOG, DAY)
    for part in ("Live against settled", "Restated days"):
        assert "runs/new/compare.json is damaged" in says(page, part)
    assert rows(page, "By page")[0][:2] == ["/", "30"]


def test_a_run_s_record_that_a_bad_disk_has_emptied_costs_its_parts_and_is_named(settings: Settings) -> None:
    publish(settings, "new", {DAY: {"/": [30]}})
    assert report(settings, CATALOG, DAY).read_text().count("is damaged") == 0
    (settings.lake_path / "runs/old.json").write_text("")
    found = engine.stands(settings, CATALOG, DAY)
    assert found.state == "published" and found.bad
    assert found.says.startswith("Settled by run new: ") and "runs/old.json is damaged" in found.says
    page = report(settings, CATALOG, DAY)
    assert "runs/old.json is damaged" in page.read_text() and "<svg" in section(page, "By hour")
    assert "cannot be had" not in says(page, "Rejects")
    assert "runs/old.json is damaged" in engine.stands(settings, CATALOG, BEFORE).says


def event(offset: int, at: datetime, reject: str | None = None, partition: int = 0) -> dict[str, Any]:
    kafka = {"partition": partition, "offset": offset, "timestamp": at, "value": b"{}"}
    return {"viewed_at": None if reject else at, "kafka": kafka, "reject": reject, "day": at.date()}


def test_late_events_are_counted_by_the_stream_time_of_their_batch(settings):
    noon = datetime(2024, 11, 20, 12, tzinfo=UTC)

    # batch  offsets  stream time   │ events, by how long stream time was past them
    #   0     0-1      12:00        │ 0    5 min
    #   1     2-5      12:30        │ 30 min   61 min   3 h   (a reject)
    batches = [(0, noon), (2, noon + timedelta(minutes=30))]
    put(
        settings,
        "ledger",
        "live/main-0-1-aa",
        [
            {"topic": "page_views", "partition": p, "from_offset": o, "stream_time": t, "day": DAY}
            for p in (0, 1)
            for o, t in batches
        ],
    )
    late = [noon, noon - timedelta(minutes=5), noon, noon - timedelta(minutes=31), noon - timedelta(minutes=150)]
    put(
        settings,
        "page_views",
        "live/main-0-1-aa",
        [
            *(event(o, at) for o, at in enumerate(late)),
            event(5, noon, "not JSON"),
            event(9, noon, partition=1),
            event(1, noon - timedelta(days=1)),
        ],
    )
    page = report(settings, CATALOG, DAY)
    assert re.findall(r"<th[^>]*>(.*?)</th>", section(page, "Late events"))[2:] == [
        "by over 10 minutes",
        "by over 1 hour",
        "by over 2 hours",
        "the latest",
    ]
    assert rows(page, "Late events") == [["page_views", "6", "4", "2", "1", "3 h 0 min"]]
    assert ["Late events", "page_views", str(DAY), "", "late by over 2 hours", "1"] in numbers(page)


def test_late_events_are_shared_by_the_topics_that_are_held_against_the_limit(settings):
    """Users are in no view that is computed again for ten minutes back: none of theirs could be late by over that."""
    noon, half_past = (datetime(2024, 11, 20, 12, minute, tzinfo=UTC) for minute in (0, 30))
    batch = {"partition": 0, "from_offset": 0, "day": DAY}
    topics = (("page_views", noon), ("users", half_past))
    put(settings, "ledger", "live/main-0-1-aa", [batch | {"topic": name, "stream_time": at} for name, at in topics])
    put(settings, "page_views", "live/main-0-1-aa", [event(0, noon)])
    put(settings, "users", "live/main-0-1-aa", [event(n, noon) | {"changed_at": noon} for n in range(5)])
    text = report(settings, CATALOG, DAY).read_text()
    assert re.findall(r"<span>Late, over 10 minutes</span><b>(.*?)</b><span>(.*?)</span>", text) == [
        ("0", "of 1 event of page_views")
    ]


def test_tombstones_are_no_events_that_could_be_late(settings):
    noon = datetime(2024, 11, 20, 12, tzinfo=UTC)
    ledger = {"topic": "users", "partition": 0, "from_offset": 0, "stream_time": noon, "day": DAY}
    put(settings, "ledger", "live/main-0-1-aa", [ledger])
    kafka = {"partition": 0, "timestamp": noon}
    user = {"changed_at": noon, "kafka": kafka | {"offset": 0, "value": b"{}"}, "reject": None, "day": DAY}
    gone = {"changed_at": None, "kafka": kafka | {"offset": 1, "value": None}, "reject": None, "day": DAY}
    put(settings, "users", "live/main-0-1-aa", [user, gone])
    assert rows(report(settings, CATALOG, DAY), "Late events")[0][:2] == ["users", "1"]


def test_rejects_stand_by_reason_beside_the_days_before(settings):
    noon, day = datetime(2024, 11, 20, 12, tzinfo=UTC), timedelta(days=1)
    put(
        settings,
        "page_views",
        "live/main-0-0-aa",
        [
            event(0, noon),
            event(1, noon),
            event(2, noon, "not JSON"),
            event(3, noon, "not JSON"),
            event(4, noon, EVIL),
            event(5, noon - day, "not JSON"),
            event(6, noon - 7 * day, "empty value"),
            event(7, noon - 2 * day, "no value"),
        ],
    )
    page = report(settings, CATALOG, DAY)
    assert says(page, "Rejects") == "3 of 5 records, 60.00 %."
    assert rows(page, "Rejects") == [
        ["page_views", "not JSON", "2", "1", "0"],
        ["page_views", EVIL, "1", "0", "0"],
        ["page_views", "empty value", "0", "0", "1"],
    ]


def test_checks_that_failed_warned_or_were_not_asked_are_named_with_what_was_observed(settings):
    def said(check: str, outcome: str, severity: str = "critical", table: str = "hourly_traffic") -> quality.Verdict:
        seen = ('"no column pv"', None, None) if outcome == "error" else ('{"pv": 1}', 3, '[{"page": "/"}]')
        none = (None, None, None)
        observed, unexpected, sample = none if outcome == "passed" else seen
        return quality.Verdict(
            "new",
            table,
            check,
            "Expect",
            severity,
            outcome,
            observed,
            unexpected,
            sample,
            datetime.now(UTC),
            (DAY, DAY),  # type: ignore[arg-type]
        )

    found = [said("a", "passed"), said("b", "failed"), said("c", "failed", "warning"), said("d", "error", table="page_panes")]
    save(settings, "new", [DAY])
    (settings.lake_path / "runs/new.verdicts").write_text(quality.to_json(found))
    page = report(settings, CATALOG, DAY)
    assert says(page, "Checks") == "1 passed, 1 warned, 1 failed, 1 not asked, of 4 checks."
    assert rows(page, "Checks") == [
        ["page_panes", "d", "not asked", "–", '"no column pv"', ""],
        ["hourly_traffic", "b", "failed", "3", '{"pv": 1}', '[{"page": "/"}]'],
        ["hourly_traffic", "c", "warned", "3", '{"pv": 1}', '[{"page": "/"}]'],
        ["hourly_traffic", "1", "1", "1", "0"],
        ["page_panes", "0", "0", "0", "1"],
    ]
    (settings.lake_path / "runs/new.verdicts").write_text(quality.to_json(found[:1]))
    assert says(report(settings, CATALOG, DAY), "Checks") == "1 passed, of 1 check."

    (settings.lake_path / "runs/new.verdicts").write_text("[{")
    said_instead = says(report(settings, CATALOG, DAY), "Checks")
    assert re.match(
        r"This cannot be had: .*new\.verdicts is damaged .* Put it back from a copy of the lake, or move", said_instead
    )

    # A run of some tables says nothing of the others.
    (settings.lake_path / "runs/new.verdicts").write_text(quality.to_json(found))
    save(settings, "some", [DAY], 1, state="staged")
    (settings.lake_path / "runs/some.verdicts").write_text(quality.to_json([said("d", "passed", table="page_panes")]))
    assert says(report(settings, CATALOG, DAY), "Checks") == "2 passed, 1 warned, 1 failed, of 4 checks."


@pytest.mark.parametrize(
    ("beat", "old", "state", "behind"),
    [("running", False, "running", "1,200"), ("running", True, "silent", "–"), ("failed", False, "failed", "–")],
)
def test_stream_is_shown_as_it_said_last_and_behind_only_while_it_runs(settings, beat, old, state, behind):
    then = datetime(2024, 11, 20, 12, tzinfo=UTC).isoformat()
    progress = {"lag": 1200, "records_per_second": 100.0, "stream_time": then, "finished_at": then, "set_aside": {"panes": EVIL}}
    said = {"state": beat, "pid": 1, "at": then if old else datetime.now(UTC).isoformat()}
    for folder in (settings.state / name for name in CATALOG.streams):
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text(json.dumps(progress))
        (folder / "heartbeat.json").write_text(json.dumps(said))
    page, runs = report(settings, CATALOG, DAY), state == "running"
    about = "12 s" if runs else "–"
    assert rows(page, "The stream now")[0][:5] == ["main", state, behind, about, "2024-11-20 12:00:00 UTC"]
    assert f"main has set panes aside: {EVIL}; " in says(page, "The stream now")
    ended = f"main is {state}, and ended its last batch at 2024-11-20 12:00:00 UTC"
    assert (ended in says(page, "The stream now")) == (not runs)
    assert f"<b>{'1,200 behind' if runs else '2 of 2 do not run'}</b>" in page.read_text()
    assert runs or all(f"<span>{name} is {state}</span>" in page.read_text() for name in CATALOG.streams)
    assert ["The stream now", "", "", "main", "lag", "1200" if runs else ""] in numbers(page)


@pytest.mark.parametrize(("seconds", "state"), [(60, "starting"), (180, "silent")])
def test_stream_that_starts_is_silent_after_two_minutes(settings, seconds, state):
    (settings.state / "main").mkdir(parents=True)
    beat = {"state": "starting", "pid": 1, "at": (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()}
    (settings.state / "main/heartbeat.json").write_text(json.dumps(beat))
    assert rows(report(settings, CATALOG, DAY), "The stream now")[0][:2] == ["main", state]


# ------------------------------------------------------------------------------------------------- memory and writing


UNCHANGED = "No day that the report of an earlier day has shown has changed since."


def test_a_day_that_is_published_again_under_its_own_report_is_told_by_the_next_day_s(settings):
    publish(settings, "first", {BEFORE: {"/": [30]}})
    report(settings, CATALOG, BEFORE)
    publish(settings, "second", {BEFORE: {"/": [40]}}, 1, reason="late events")
    assert says(report(settings, CATALOG, BEFORE), "Restated days") == UNCHANGED
    told = [[str(BEFORE), "30", "40", "15", "20", "–", "second", "late events"]]
    assert rows(report(settings, CATALOG, DAY), "Restated days") == told
    assert rows(report(settings, CATALOG, DAY), "Restated days") == told
    assert says(report(settings, CATALOG, DAY + timedelta(days=1)), "Restated days") == UNCHANGED


def test_days_published_again_are_shown_old_and_new_until_the_next_report(settings):
    publish(settings, "first", {WEEK: {"/": [100]}, BEFORE: {"/": [30]}})
    assert says(report(settings, CATALOG, BEFORE), "Restated days") == UNCHANGED

    publish(settings, "second", {WEEK: {"/": [110]}, DAY: {"/": [50]}}, 1, reason="late events")
    compared(settings, "second", {"table": "daily_traffic", "day": str(WEEK), "changed": 4, "missing": 1})
    page = report(settings, CATALOG, DAY)
    restated = [["2024-11-13", "100", "110", "50", "55", "5", "second", "late events"]]
    assert rows(page, "Restated days") == restated
    assert ["Restated days", "", "2024-11-13", "was", "page views", "100"] in numbers(page)

    # Written again, also for a day before, it says the same; the next day's does not say it again.
    assert rows(report(settings, CATALOG, DAY), "Restated days") == restated
    assert says(report(settings, CATALOG, BEFORE), "Restated days") == UNCHANGED
    assert rows(report(settings, CATALOG, DAY), "Restated days") == restated
    assert says(report(settings, CATALOG, DAY + timedelta(days=1)), "Restated days") == UNCHANGED

    # A publication that was taken back is a change too.
    run = lake.run_of(settings, "second")
    run.tables, run.state = dict.fromkeys(VIEWS, PASSED), "rolled back"
    lake.save(settings, run)
    put(settings, "site_daily_traffic", "runs/first", traffic(settings, WEEK, {"/": [100]})["site_daily_traffic"])
    back = rows(report(settings, CATALOG, DAY + timedelta(days=2)), "Restated days")
    assert back[0] == ["2024-11-13", "110", "100", "55", "50", "–", "first", "the night"]
    assert back[1][0] == "2024-11-20" and back[1][-2:] == ["–", "taken back"]


@pytest.mark.parametrize("says_when", [True, False])
def test_a_day_published_again_by_two_runs_names_both_and_what_each_changed(settings, says_when):
    """Also where what is remembered is of a version that did not say when a run had published last."""
    publish(settings, "first", {WEEK: {"/": [100]}})
    memory = report(settings, CATALOG, BEFORE).with_name("last.json")
    if not says_when:
        memory.write_text(re.sub(r'\n *"at": .*', "", memory.read_text()))
    assert ('"at"' in memory.read_text()) == says_when
    for number, (run, views, changed) in enumerate((("second", 130, 9), ("third", 131, 1)), 1):
        publish(settings, run, {WEEK: {"/": [views]}}, number, reason=f"the {run} reason")
        compared(settings, run, {"table": "daily_traffic", "day": str(WEEK), "changed": changed})
    told = ["9, 1", "second, third", "the second reason; the third reason"]
    assert rows(report(settings, CATALOG, DAY), "Restated days") == [["2024-11-13", "100", "131", "50", "65", *told]]


def test_a_table_that_its_run_publishes_later_is_that_run_s(settings):
    """Three of the four views are published; a person publishes the last over its check when the report has gone out."""
    publish(settings, "first", {BEFORE: {"/": [30]}})
    held = dict.fromkeys(VIEWS, DONE) | {"site_hourly_traffic": FAILED}
    report(settings, CATALOG, BEFORE)
    save(settings, "night", [DAY], 1, held)
    for name in VIEWS[1:]:
        put(settings, name, "runs/night", traffic(settings, DAY, {"/": [50]})[name])
    report(settings, CATALOG, DAY)
    put(settings, VIEWS[0], "runs/night", traffic(settings, DAY, {"/": [50]})[VIEWS[0]])
    over = FAILED | {"published": "2024-11-21T09:00:00+00:00"}
    save(settings, "night", [DAY], 1, held | {VIEWS[0]: over}, reason="the night")
    page = report(settings, CATALOG, DAY + timedelta(days=1))
    assert rows(page, "Restated days") == [["2024-11-20", "–", "50", "–", "25", "–", "night", "the night"]]
    # With nothing published in between, it was by hand.
    put(settings, "site_daily_traffic", "runs/hand", traffic(settings, DAY, {"/": [60]})["site_daily_traffic"])
    page = report(settings, CATALOG, DAY + timedelta(days=2))
    assert rows(page, "Restated days") == [["2024-11-20", "50", "60", "25", "30", "–", "night", "changed by hand"]]


def test_a_day_of_whose_run_the_record_has_expired_has_not_changed(settings):
    publish(settings, "first", {WEEK: {"/": [100]}})
    report(settings, CATALOG, BEFORE)
    (settings.lake_path / "runs/first.json").unlink()  # what upkeep does after `keep_records`
    assert says(report(settings, CATALOG, DAY), "Restated days") == UNCHANGED


def test_written_twice_it_is_the_same(settings):
    publish(settings, "old", {BEFORE: {"/": [30]}})
    report(settings, CATALOG, BEFORE)
    publish(settings, "new", {BEFORE: {"/": [31]}, DAY: {f"/{n}": [n + 1] * 24 for n in range(20)}}, 1)
    page = report(settings, CATALOG, DAY)
    files = [page, page.with_suffix(".csv"), page.with_name("last.json")]
    first = [file.read_bytes() for file in files]
    assert [f.read_bytes() for f in files if report(settings, CATALOG, DAY)] == first
    assert sorted(f.name for f in page.parent.iterdir()) == [
        "2024-11-19.csv",
        "2024-11-19.html",
        "2024-11-20.csv",
        "2024-11-20.html",
        "last.json",
    ]


@pytest.mark.parametrize("broken", ["", "[]", '{"last": '])
def test_a_memory_that_is_broken_begins_anew(settings, broken):
    publish(settings, "new", {DAY: {"/": [30]}})
    folder = settings.lake_path / "reports"
    folder.mkdir()
    (folder / "last.json").write_text(broken)
    report(settings, CATALOG, DAY)
    assert json.loads((folder / "last.json").read_text())["last"] == str(DAY)


def test_what_cannot_be_written_leaves_the_old_page_and_the_memory(settings, monkeypatch):
    publish(settings, "old", {BEFORE: {"/": [30]}})
    before = {f: f.read_bytes() for f in report(settings, CATALOG, BEFORE).parent.iterdir()}
    publish(settings, "new", {BEFORE: {"/": [31]}}, 1)
    whole = Path.write_text

    def full(path: Path, text: str, *more: Any, **words: Any) -> int:
        if ".html" not in str(path) and "<html" not in text:
            return whole(path, text, *more, **words)
        whole(path, text[:100], *more, **words)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report(settings, CATALOG, BEFORE)
    held = {f: f.read_bytes() for f in before}
    assert {f.name for f in before if held[f] != before[f]} == {"2024-11-19.csv"}


def test_command_prints_where_the_report_is(settings):
    publish(settings, "new", {DAY: {"/": [30]}})
    environment = {"TIDEMARK_HOME": str(settings.home)}
    plain = CliRunner().invoke(cli.app, ["report", "--day", str(DAY)], env=environment, prog_name="tidemark")
    assert plain.stdout == f"{settings.lake_path / 'reports/2024-11-20.html'}\n"
    found = json.loads(CliRunner().invoke(cli.app, ["report", "--day", str(DAY), "--json"], env=environment).stdout)
    assert found == {"day": str(DAY), "report": plain.stdout.strip(), "numbers": plain.stdout.strip().replace(".html", ".csv")}
    assert str(datetime.now(UTC).date() - timedelta(days=1)) in CliRunner().invoke(cli.app, ["report"], env=environment).stdout


def staged(settings: Settings, days: Mapping[date, Mapping[str, Sequence[int]]]) -> Callable[..., Any]:
    """A run `new` that has staged these days, and a command over it."""
    passed = {}
    for name in VIEWS:
        made = [r for day, pages in days.items() for r in traffic(settings, day, pages)[name]]
        staging = lake.staging(lake.table(settings, CATALOG[name]), "new")
        write_deltalake(staging, pa.Table.from_pylist(made, SCHEMAS[name]), partition_by=["day"])
        passed[name] = {"gate": "passed", "reasons": [], "warnings": [], "checks": 3, "rows": len(made)}
    save(settings, "new", days, 1, passed, state="staged", pins={"main": lake.Pin("main", 3, {"page_views": {"0": 40}}, "")})
    environment = {"TIDEMARK_HOME": str(settings.home)}
    return lambda *words: CliRunner().invoke(cli.app, [*words], env=environment, prog_name="tidemark")


def test_command_that_publishes_or_takes_back_writes_the_reports_again_that_the_days_have(settings):
    publish(settings, "old", {BEFORE: {"/": [30]}, DAY: {"/": [30]}})
    command = staged(settings, {BEFORE: {"/": [31]}, DAY: {"/": [31]}})
    page = report(settings, CATALOG, DAY)
    for word, views, state in (("publish", "31", "published"), ("rollback", "30", "taken back")):
        assert command(word, "new").exit_code == 0
        assert (rows(page, "By page")[0][1], f">{state}</span>" in page.read_text()) == (views, True)
    assert [file.name for file in page.parent.glob("*.html")] == [page.name]


def test_report_that_cannot_be_written_again_is_a_sentence_and_the_others_are_written(settings):
    publish(settings, "old", {BEFORE: {"/": [30]}, DAY: {"/": [30]}})
    command = staged(settings, {BEFORE: {"/": [31]}, DAY: {"/": [31]}})
    page = report(settings, CATALOG, DAY)
    page.with_stem(str(BEFORE)).mkdir()
    published = command("publish", "new", "--json")
    assert (published.exit_code, {one["table"] for one in json.loads(published.stdout)}) == (0, set(VIEWS))
    assert f"tidemark: the report of {BEFORE} still shows what was before: " in published.stderr
    assert published.stderr.endswith(f"; tidemark report --day {BEFORE} writes that of a day\n")
    assert "Settled by run new: " in page.read_text()


# ----------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed (on Debian: apt install chromium)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


INK = """() => {
    const style = e => getComputedStyle(e);
    const line = [...document.querySelectorAll('svg path')].find(p => p.style.strokeWidth == '2');
    return [style(document.body).backgroundColor, style(document.body).color,
            style(document.querySelector('svg text')).fill, style(line).stroke];
}"""


@pytest.mark.parametrize("width", [390, 1100])
def test_page_is_legible_light_and_dark_on_a_phone_and_a_desk(settings, browser, width):
    pages = {EVIL: [99] * 24, **{f"/item/{n}": [n * h % 97 for h in range(24)] for n in range(1, 20)}}
    publish(settings, "old", {BEFORE: pages, WEEK: pages})
    publish(settings, "new", {DAY: pages}, 1)
    page = report(settings, CATALOG, DAY)
    seen = {}
    for scheme in ("light", "dark"):
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        asked, said = [], []
        tab.on("request", lambda request, asked=asked: asked.append(request.url))
        tab.on("console", lambda message, said=said: said.append(message.text))
        tab.goto(page.as_uri())
        seen[scheme] = tab.evaluate(INK)
        assert (asked, said, tab.title()) == ([page.as_uri()], [], "2024-11-20 · published · tidemark")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert EVIL[:20] in tab.locator("svg").nth(2).text_content()
        tab.close()
    assert [a != b for a, b in zip(seen["light"], seen["dark"], strict=True)] == [True] * 4
    assert "none" not in seen["light"] + seen["dark"]


def test_length_and_change_in_words():
    assert [engine.length(timedelta(seconds=s)) for s in (4, 200, 18720)] == ["4 s", "3 min 20 s", "5 h 12 min"]
    assert [engine.change(*pair) for pair in ((103, 100), (96, 100), (5, 0), (5, None), (None, 5))] == [
        "+3.0 %",
        "−4.0 %",
        "–",
        "–",
        "–",
    ]
