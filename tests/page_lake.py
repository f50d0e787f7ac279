"""A small lake for the tests of the page, written by the lake's own functions and without Spark: a day that was settled twice,
one that was settled over a failed check, one whose gate failed, and today, live."""

import json
import math
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema

from tidemark import compare, lake, local, quality
from tidemark.compare import Difference
from tidemark.lake import Batch, Pin, Run, Table
from tidemark.quality import Verdict
from tidemark.settings import Settings

HOSTILE = "<script>window.hacked = 1</script>\"'><img src=x onerror='window.hacked = 2'>\n\u202egnp.exe"
"""Markup, quotes of both kinds, a new line, and a sign that turns what follows around."""

AT, DAY = pa.timestamp("us", "UTC"), pa.date32()
COUNTED = {"pv": pa.int64(), "uv": pa.int64(), "settled": pa.bool_(), "day": DAY}
KAFKA = pa.struct({"partition": pa.int32(), "offset": pa.int64(), "timestamp": AT, "key": pa.binary(), "value": pa.binary()})
SCHEMAS = {
    "log/page_views": pa.schema({"page": pa.string(), "viewed_at": AT, "kafka": KAFKA, "reject": pa.string(), "day": DAY}),
    "views/site_last_hour": pa.schema({"mark": AT, **COUNTED}),
    "views/last_hour": pa.schema({"page": pa.string(), "mark": AT, **COUNTED}),
    "views/site_hourly_traffic": pa.schema({"hour": AT, **COUNTED}),
    "views/site_daily_traffic": pa.schema(COUNTED),
    "ledger": pa.schema(
        {
            **{n: pa.string() for n in ("stream", "topic", "gap")},
            **{n: pa.int32() for n in ("generation", "partition")},
            **{n: pa.int64() for n in ("seq", "from_offset", "until_offset", "records", "rejects", "gaps")},
            **dict.fromkeys(("stream_time", "started_at", "finished_at"), AT),
            "day": DAY,
        }
    ),
}
TIMES = {"views/site_last_hour": "mark", "views/last_hour": "mark", "views/site_hourly_traffic": "hour"}


def write(settings: Settings, where: str, rows: list[dict], folder: str, schema: pa.Schema | None = None) -> None:
    """Rows in one commit, a file each day, as the stream and the runs add them."""
    schema = schema or SCHEMAS[where]
    table = Table(settings.lake_path, where, TIMES.get(where))
    if not table.exists:
        table.path.mkdir(parents=True)
        DeltaTable.create(table.path, Schema.from_arrow(schema), partition_by=["day"], configuration=lake.CONFIGURATION)
    lake.swap(table, [], lake.write_arrow(table, folder, pa.Table.from_pylist(rows, schema)), {"test": folder})


def mark_of(now: datetime) -> datetime:
    return datetime.fromtimestamp(now.timestamp() // 5 * 5, UTC)


def wave(n: float, height: int) -> int:
    return round(height * (1 + 0.08 * math.sin(n / 60) + 0.03 * math.sin(n / 13)))


PAGES = ("/", "/search", "/cart", "/checkout", "/item/7", HOSTILE)


def beat(settings: Settings, at: datetime) -> None:
    """What the stream says each second that it runs; one that has not said so for 15 seconds is shown as silent."""
    said = {"pid": 1, "state": "running", "at": at.isoformat(), "seq": 41}
    lake.whole_or_nothing(settings.state / "main" / "heartbeat.json", json.dumps(said))


def live(settings: Settings, now: datetime) -> None:
    """The last hour's marks and the one an hour before, of site and pages; a stream that has just done its batch 41."""
    newest = mark_of(now)
    marks = [newest - timedelta(seconds=5 * n) for n in range(721)]
    site: list[dict[str, Any]] = [
        {"mark": m, "pv": 361_204 if m == newest else wave(n, 350_000), "uv": 18_377 if m == newest else wave(n, 18_000)}
        for n, m in enumerate(marks)
    ]
    write(
        settings,
        "views/site_last_hour",
        [{**r, "settled": False, "day": r["mark"].date()} for r in site],
        "live/20261119T12-all-aa",
    )
    for m, times in ((newest, 10), (newest - timedelta(hours=1), 8)):
        rows = [{"page": p, "mark": m, "pv": times * 1000 // (n + 1), "uv": times * 100 // (n + 1)} for n, p in enumerate(PAGES)]
        rows = rows if times == 10 else rows[:-1]  # the last page is new
        write(
            settings,
            "views/last_hour",
            [{**r, "settled": False, "day": m.date()} for r in rows],
            f"live/{lake.hour_of(m)}-{m:%M%S}-aa",
        )
    for seq in range(40):
        finished = now - timedelta(seconds=3 * (39 - seq))
        row = {
            "stream": "main", "topic": "page_views", "gap": None, "generation": 1, "partition": 0, "seq": seq + 2,
            "from_offset": 300 * seq, "until_offset": 300 * seq + 300, "records": wave(seq * 8, 300), "rejects": seq % 7 // 5,
            "gaps": 0, "stream_time": finished, "started_at": finished - timedelta(milliseconds=840), "finished_at": finished,
            "day": now.date(),
        }  # fmt: skip
        write(settings, "ledger", [row], f"live/main-{seq + 2}-{seq + 2}-aa")
    state = settings.state / "main"
    state.mkdir(parents=True)
    beat(settings, now)
    local.want(settings, "main", "running", f"an upgrade {HOSTILE}", "admin", again=True)
    progress = {
        "stream": "main", "generation": 1, "seq": 41, "records": 300, "rejects": 0, "records_per_second": 101.4, "seconds": 0.84,
        "lag": 12, "stream_time": now.isoformat(), "started_at": now.isoformat(), "finished_at": now.isoformat(),
        "slowest": "page_panes", "timings": {"page_panes": 0.31, "page_views": 0.22},
        "set_aside": {"page_panes": f"a column is missing {HOSTILE}"},
    }  # fmt: skip
    (state / "progress.json").write_text(json.dumps(progress))


def days(settings: Settings, today: date) -> None:
    """Four days of the whole site; all but today are settled."""
    for back in range(4):
        day, settled = today - timedelta(days=back), back > 0
        folder = f"runs/settle-{day}" if settled else "live/today-all-aa"
        pv = 8_640_000 - 120_000 * back
        midnight = datetime.combine(day, datetime.min.time(), UTC)
        hours = [
            {"hour": midnight + timedelta(hours=h), "pv": wave(h * 18, pv // 24), "uv": wave(h * 18, 9000)} for h in range(24)
        ]
        rows = [{**r, "settled": settled, "day": day} for r in (hours if settled else hours[:9])]
        write(settings, "views/site_hourly_traffic", rows, folder)
        write(settings, "views/site_daily_traffic", [{"pv": pv, "uv": 19_998 - back, "settled": settled, "day": day}], folder)


def rejects(settings: Settings, now: datetime) -> None:
    def record(offset: int, value: bytes, reject: str | None, back: int = 0) -> dict:
        at = now - timedelta(days=back, seconds=offset)
        own = {"partition": 3, "offset": offset, "timestamp": at, "key": None, "value": value}
        return {"page": None, "viewed_at": None, "kafka": own, "reject": reject, "day": at.date()}

    rows = [record(n, b'{"page": 1}', "page: a number, not a string", n % 3) for n in range(1, 9)]
    rows += [record(20, HOSTILE.encode(), HOSTILE), record(21, b"\xff\xfe", "not UTF-8"), record(22, b"{}", None)]
    rows += [record(23, b"{}", "too long ago to be shown", 30)]
    write(settings, "log/page_views", rows, "live/main-2-41-aa")


def verdict(run: str, table: str, check: str, outcome: str, day: date, at: datetime, **more) -> Verdict:
    said = {"severity": "critical", "observed": None, "unexpected": None, "sample": None} | more
    return Verdict(run, table, check, "UnexpectedRowsExpectation", outcome=outcome, judged_at=at, days=(day, day), **said)


def keep(settings: Settings, found: list[Verdict]) -> None:
    """Verdicts as a settling keeps them: in the lake's table, and beside the run's record."""
    run = found[0].run
    where = Table(settings.lake_path, "verdicts")
    rows = quality.to_arrow(found)
    if not where.exists:
        where.path.mkdir(parents=True)
        DeltaTable.create(where.path, Schema.from_arrow(rows.schema), partition_by=["day"])
    lake.append(where, Batch(run, 0, 0), lake.write_arrow(where, f"live/{run}", rows))
    lake.whole_or_nothing(settings.lake_path / "runs" / f"{run}.verdicts", quality.to_json(found))


def run(settings: Settings, name: str, state: str, day: date, at: datetime, tables: dict, **more) -> Run:
    pins = {"main": Pin("main", 17, {"page_views": {"0": 5100}}, at.isoformat())}
    made = Run(name, state, [str(day)], "the nightly", at.isoformat(), "0.1.0", pins, tables, **more)
    lake.save(settings, made)
    return made


def runs(settings: Settings, today: date, now: datetime) -> None:
    """Three days ago: settled, and settled again after. Two days ago: a gate failed. Yesterday: published over a failed check."""
    third, second, first = (today - timedelta(days=n) for n in (3, 2, 1))
    sums = {"rows": 25, "changed": 0, "missing": 0, "extra": 0}
    passed = {"gate": "passed", "reasons": [], "warnings": [], "checks": 6, "rows": 1, "compare": sums}

    def published(at: datetime, **more) -> dict:
        return {**passed, "published": at.isoformat(), **more}

    one, two, three, four = (now - timedelta(hours=h) for h in (60, 36, 30, 12))
    made = run(
        settings, f"settle-{third}", "published", third, one, {"site_daily_traffic": published(one)}, published=one.isoformat()
    )
    sides = [{"what": "changed", "published": {"pv": 8_279_940, "uv": 19_991}, "run": {"pv": 8_280_000, "uv": 19_995}}]
    found = [
        Difference("site_daily_traffic", third, 1, 1, 0, 0, sides),
        Difference("site_hourly_traffic", third, 24, 2, 1, 0, []),
    ]
    compare.keep(settings, made, found[:1])
    later = published(three, compare={**sums, "changed": 3, "missing": 1})
    tables = {"site_daily_traffic": later, "site_hourly_traffic": later}
    made = run(settings, f"again-{third}", "published", third, three, tables, kind="replay", published=three.isoformat())
    compare.keep(settings, made, found)
    why = f'site_daily_traffic: "PV is right" failed on 2 rows; for example {HOSTILE}'
    failed = {"gate": "failed", "reasons": [why], "failed": ["PV is right"], "warnings": [], "checks": 2, "rows": 1}
    run(settings, f"settle-{second}", "staged", second, two, {"site_daily_traffic": failed}, note=HOSTILE)
    forced = {"checks": ["PV is right"], "reason": f"the check is wrong {HOSTILE}"}
    tables = {"site_daily_traffic": {**failed, "published": four.isoformat(), "forced": forced}}
    run(settings, f"settle-{first}", "published", first, four, tables, published=four.isoformat())

    rows = json.dumps([{"day": str(second), "pv": 12, "page": HOSTILE}, {"day": str(second), "pv": 13, "page": None}])
    for name, day, at, outcome in ((f"settle-{third}", third, one, "passed"), (f"settle-{second}", second, two, "failed")):
        told = {"unexpected": 7, "sample": rows} if outcome == "failed" else {}
        warned = {"severity": "warning", "unexpected": 1, "observed": '"<b>3</b>"'} if outcome == "failed" else {}
        keep(
            settings,
            [
                verdict(name, "site_daily_traffic", "PV is right", outcome, day, at, **told),
                verdict(name, "site_daily_traffic", HOSTILE, outcome, day, at, **warned),
                verdict(name, "page_panes", "key page, pane is unique", "passed", day, at),
            ],
        )


def fill(settings: Settings, now: datetime | None = None) -> datetime:
    """Write all of it, as of now, in UTC. Returns the newest mark."""
    now = now or datetime.now(UTC)
    live(settings, now)
    days(settings, now.date())
    rejects(settings, now)
    runs(settings, now.date(), now)
    return mark_of(now)
