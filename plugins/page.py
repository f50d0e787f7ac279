"""The page in Airflow's navigation: what is live, what is settled, what was judged and why, on one screen.

It only reads. What changes something (roll a run back; start, drain or restart a stream) the page asks of Airflow's own API,
with the session of whoever looks, so Airflow decides who may. Every route needs a logged-in user.

A plugin is loaded in every process of Airflow, each task's too, and the API server may fork afterwards: at import nothing is
imported that costs, and deltalake is not used before the first answer.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from tidemark.model import midnight
from tidemark.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tidemark.lake import File, Run, Table
    from tidemark.model import Catalog

PAGE = Path(__file__).with_suffix(".html")

SECONDS, ROWS = 5.0, 20_000
"""The longest that one query of the page runs, and the most rows that it returns."""
HOUR = timedelta(hours=1)
DAYS, JUDGED, SHOWN, BATCHES, PAGES, REASONS, NEWEST = 28, 30, 60, 60, 20, 50, 12
"""How many the page shows: days, judged runs, runs, batches of a stream, busiest pages, reasons of rejects, rows of a view."""
REJECTED_WITHIN = timedelta(days=6)
FILLED = timedelta(seconds=15)
"""Marks of the next ten seconds are written and still filled; what is further off is not of this stream's time."""
TICK = 1_000_000_000
TEXT = 300
"""The most characters shown of a record that was rejected."""

# No script, style, picture or frame from elsewhere, and nobody else's page around it.
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
OF_DOCS = f"{NOTHING}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:"
PLAIN = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Content-Security-Policy": NOTHING}


# ------------------------------------------------------------------------------------------------------------- answers


class Answers:
    """What the page shows, each part as data that JSON has words for: from the lake, the streams' own files and the runs; and
    whether Airflow's scheduler beats.

    A lake that does not exist yet gives empty lists. Raises `QueryError` or `LakeError`, with a sentence, for what cannot be
    read, and for a query that takes longer than it may.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.given = settings
        self.opened: dict[str, tuple[Table, int, tuple[int, int] | None]] = {}

    @cached_property
    def settings(self) -> Settings:
        return self.given or Settings()

    @cached_property
    def catalog(self) -> Catalog:
        from tidemark.pipelines import CATALOG

        return CATALOG

    def ask(self, sql: str, *tables: str) -> list[dict[str, Any]]:
        """The rows of a query over these tables; none while one of them is not written."""
        from tidemark import query

        if not set(tables) <= query.written(query.places(self.settings, self.catalog)).keys():
            return []
        found = query.query(self.settings, self.catalog, sql, rows=ROWS, seconds=SECONDS)
        return [dict(zip(found.columns, row, strict=True)) for row in found.rows]

    def files(self, name: str) -> list[File]:
        """The files of a view, or of the ledger; none where there is no such table, or nothing in it."""
        from tidemark import lake

        if name != "ledger" and name not in self.catalog.views:
            return []
        fresh = lake.ledger(self.settings) if name == "ledger" else lake.table(self.settings, self.catalog.views[name])
        if not fresh.exists:
            return []
        # To open a table costs 30 ms, to bring it up to date 2. One that was deleted and made again is another one.
        table, version, commit = self.opened.get(name, (fresh, 0, None))
        if commit is None or commit_of(table, version) != commit:
            table = fresh
        files, version = table.files(), table.delta().version()
        self.opened[name] = (table, version, commit_of(table, version))
        return files

    def last_day(self, name: str) -> date | None:
        return max((f.day for f in self.files(name) if f.day), default=None)

    def runs_kept(self) -> tuple[list[Run], list[str]]:
        """Every run's record, newest first, and what is said of those that are damaged."""
        from tidemark import lake

        known, damaged = lake.runs_now(self.settings)
        return known[::-1], [str(error) for error in damaged.values()]

    # ---- live

    def hour(self) -> dict[str, Any]:
        """The marks of the last hour of the whole site, oldest first, as `[mark, pv, uv]`."""
        since = self.since("site_last_hour")
        rows = self.ask(f"SELECT mark, pv, uv FROM site_last_hour WHERE {since} ORDER BY mark", "site_last_hour") if since else []
        newest = rows[-1]["mark"] if rows else None
        return {"marks": [[r["mark"], r["pv"], r["uv"]] for r in rows if r["mark"] >= newest - HOUR]}

    def pages(self) -> dict[str, Any]:
        """The busiest pages at the newest mark, each with its page views at the mark an hour before; a long name is cut."""
        from tidemark import report

        since = self.since("last_hour")
        if not since:
            return {"pages": [], "of": 0}
        rows = self.ask(
            f"""WITH marks AS (SELECT page, mark, pv, uv FROM last_hour WHERE {since}),
                     newest AS (SELECT max(mark) AS newest FROM marks)
                SELECT {report.cut("n.page")} AS page, n.pv, n.uv, b.pv AS before
                FROM marks n LEFT JOIN marks b ON b.page = n.page AND b.mark = n.mark - INTERVAL 1 HOUR
                WHERE n.mark = (SELECT newest FROM newest) ORDER BY n.pv DESC, n.page""",
            "last_hour",
        )
        return {"pages": rows[:PAGES], "of": len(rows)}

    def since(self, view: str) -> str:
        """The last hour of a view of marks, as a condition that names the days that hold it; empty while the view is.

        It may begin a little too early. Marks that the stream still fills are left out; where it has fallen silent there is
        nothing to fill them with.
        """
        from tidemark import lake

        files = self.files(view)
        last = max((f.day for f in files if f.day), default=None)
        if last is None:
            return ""
        began = midnight(last, self.settings.tz)
        newest = max((lake.comparable(f.high, began) for f in files if f.day == last and f.high is not None), default=None)
        whole = self.stream_time(view)
        filling = newest and whole and timedelta(0) < newest - whole < FILLED and self.at_work(view)
        first = (whole - FILLED if filling and whole else newest or began) - HOUR
        day = first.astimezone(self.settings.tz).date()
        since = f"day >= DATE '{day}' AND mark >= TIMESTAMPTZ '{first.replace(microsecond=0).isoformat()}'"
        return since + (f" AND mark <= TIMESTAMPTZ '{whole.isoformat()}'" if filling and whole else "")

    def stream_time(self, view: str) -> datetime | None:
        """Up to when the streams of a view have read; None where one has not said."""
        times = [one["stream_time"] if one else None for one in self.progress(view)]
        return min(datetime.fromisoformat(at) for at in times) if all(times) else None

    def at_work(self, view: str) -> bool:
        """Whether a stream of a view has finished a batch within the time that marks take to be filled."""
        ends = [one["finished_at"] for one in self.progress(view) if one and one.get("finished_at")]
        return not ends or datetime.now(UTC) - max(datetime.fromisoformat(at) for at in ends) < FILLED

    def progress(self, view: str) -> list[dict[str, Any] | None]:
        """What the streams of a view have said of their last batch."""
        from tidemark import lake, local
        from tidemark.model import needed

        topics = needed(self.catalog, [view]) & self.catalog.topics.keys()
        streams = {lake.reader(self.settings, self.catalog.topics[name]) for name in topics}
        return [local.status(self.settings, name).get("progress") for name in streams]

    def streams(self) -> dict[str, Any]:
        """Each stream: its state, what it said of its last batch, and its last batches from the ledger, oldest first."""
        from tidemark import lake

        return {"streams": [self.stream(name) for name in lake.streams(self.settings, self.catalog.streams)]}

    def stream(self, name: str) -> dict[str, Any]:
        from tidemark import local

        said = local.status(self.settings, name)
        beat, progress = said.get("heartbeat", {}), said.get("progress")
        state = beat.get("state", "not started")
        at = datetime.fromisoformat(beat["at"]) if beat else None
        if local.silent(beat, datetime.now(UTC)):
            state = "silent"
        last = self.last_day("ledger")
        sql = f"""
            SELECT seq, min(started_at) AS started, max(finished_at) AS finished, sum(records)::BIGINT AS records,
                   sum(rejects)::BIGINT AS rejects, sum(gaps)::BIGINT AS gaps
            FROM ledger WHERE stream = '{name}' AND day >= DATE '{last}' - 1 GROUP BY seq ORDER BY seq DESC LIMIT {BATCHES}"""
        batches = self.ask(sql, "ledger") if last else []
        return {
            "name": name,
            "state": state,
            "at": at,
            "error": beat.get("error"),
            "wanted": local.wanted(self.settings, name),
            "progress": progress,
            "set_aside": (progress or {}).get("set_aside") or {},
            "batches": batches[::-1],
        }

    def scheduler(self) -> dict[str, Any]:
        """Whether Airflow's scheduler has no heartbeat, by Airflow's own measure, and since when; null where it never had one."""
        from airflow.api.common.airflow_health import get_airflow_health

        said = get_airflow_health()
        one, known = said["scheduler"], said["metadatabase"]["status"] == "healthy"
        silent = known and one["status"] != "healthy"
        return {"silent": silent, "since": one["latest_scheduler_heartbeat"] if silent else None}

    # ---- settled

    def days(self) -> dict[str, Any]:
        """The last days, newest first: what readers see of the whole site, by hour too, and what the settling of the day
        changed, in all views. `settling` is the day's first publication, of what was live; `again` are the later ones.

        A day that has a report alone is among them, without figures: it is held back, empty or not yet settled."""
        from tidemark.report import reported

        reports, last = reported(self.settings), self.last_day("site_daily_traffic")
        last = max([*reports, *([last] if last else [])], default=None)
        if last is None:
            return {"days": []}
        first = last - timedelta(days=DAYS - 1)
        sql = f"SELECT day, pv, uv, settled FROM site_daily_traffic WHERE day >= DATE '{first}'"
        rows = {day: {"day": day, "pv": None, "uv": None, "settled": None} for day in reports if day >= first}
        rows |= {r["day"]: r for r in self.ask(sql, "site_daily_traffic")}
        days = [rows[day] for day in sorted(rows, reverse=True)]
        hours: dict[date, list[Any]] = {}
        for r in self.ask(
            f"SELECT day, hour, pv FROM site_hourly_traffic WHERE day >= DATE '{first}' ORDER BY hour", "site_hourly_traffic"
        ):
            hours.setdefault(r["day"], []).append([r["hour"], r["pv"]])
        settlings = self.settlings()
        for day in days:
            first_one, *again = settlings.get(str(day["day"]), [None])
            start, end = (midnight(day["day"] + timedelta(days=n), self.settings.tz) for n in (0, 1))
            day |= {"start": start, "length": (end - start) // HOUR, "hours": hours.get(day["day"], [])}
            day |= {"settling": first_one, "again": again}
            day["report"] = day["day"] in reports
        return {"days": days}

    def settlings(self) -> dict[str, list[dict[str, Any]]]:
        """By day, its publications of views that stand, oldest first, each with what it changed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for run in self.runs_kept()[0]:
            seen = {n: said["published"] for n, said in run.tables.items() if n in self.catalog.views and said.get("published")}
            changes = changed(self.settings.lake_path / "runs" / run.id / "compare.json") if seen else {}
            for day in run.days if seen else ():
                views = {n: c for n, c in changes.get(day, {}).items() if n in seen}
                sums = {k: sum(one[k] for one in views.values()) for k in ("rows", "changed", "missing", "extra")}
                site = views.get("site_daily_traffic", {})
                said = {"run": run.id, "published": min(seen.values()), "compared": bool(views), "site": bool(site), **sums}
                found.setdefault(day, []).append(said | {side: site.get(side) for side in ("before", "after")})
        return {day: sorted(them, key=lambda one: one["published"]) for day, them in found.items()}

    def verdicts(self) -> dict[str, Any]:
        """The last runs that were judged, oldest first, and of each table's checks the outcome in each of them, or null."""
        rows = self.ask(
            f"""WITH newest AS (
                    SELECT run, max(judged_at) AS judged FROM verdicts GROUP BY run ORDER BY judged DESC LIMIT {JUDGED})
                SELECT run, judged, table_name, check_name, severity, outcome, unexpected, day, last_day
                FROM verdicts JOIN newest USING (run) ORDER BY judged, run, table_name, check_name""",
            "verdicts",
        )
        runs = {r["run"]: {"run": r["run"], "judged": r["judged"], "day": r["day"], "last_day": r["last_day"]} for r in rows}
        column = {run: n for n, run in enumerate(runs)}
        tables: dict[str, dict[str, dict[str, Any]]] = {}
        for r in rows:
            nothing = {"check": r["check_name"], "outcomes": [None] * len(runs), "unexpected": [None] * len(runs)}
            check = tables.setdefault(r["table_name"], {}).setdefault(r["check_name"], nothing)
            warned = r["outcome"] == "failed" and r["severity"] == "warning"
            check["outcomes"][column[r["run"]]] = "warned" if warned else r["outcome"]
            check["unexpected"][column[r["run"]]] = r["unexpected"]
        order = [*self.catalog.names, *sorted(tables.keys() - set(self.catalog.names))]
        return {
            "runs": list(runs.values()),
            "tables": [{"table": name, "checks": list(tables[name].values())} for name in order if name in tables],
        }

    def verdicts_of(self, run: str) -> dict[str, Any] | None:
        """Every verdict of one run, with the failing rows as they were stored, and the Data Docs' page of each table; None
        for a run of which there are none."""
        from tidemark import lake, query

        kept = self.settings.lake_path / "runs" / f"{run}.verdicts"
        rows = None
        if lake.RUN_NAME.fullmatch(run) and kept.exists():
            with suppress(ValueError):  # damaged: the lake has them too
                rows = json.loads(kept.read_text())
        if rows is None:
            rows = self.ask(f"SELECT * FROM verdicts WHERE run = {query.quoted(run)}", "verdicts")
        if not rows:
            return None
        docs = self.settings.home / "docs"
        pages = {name: page_of(docs, name, run) for name in {r["table_name"] for r in rows}}
        parsed = [{**r, **{k: json.loads(r[k]) if r[k] else None for k in ("observed", "sample")}} for r in rows]
        return {"run": run, "verdicts": parsed, "docs": {name: page for name, page in pages.items() if page}}

    def runs(self) -> dict[str, Any]:
        """The last runs, and all that wait for a decision, newest first. `in_the_way` names the run that published one of
        its days again: a roll-back begins with that one."""
        known, damaged = self.runs_kept()
        shown = [r for n, r in enumerate(known) if n < SHOWN or r.undecided]
        return {"runs": [self.run(r, known) for r in shown], "of": len(known), "damaged": damaged}

    def run(self, run: Run, known: Sequence[Run]) -> dict[str, Any]:
        published = [name for name, said in run.tables.items() if said.get("published")]

        def days(one: Run, name: str) -> set[str]:  # of views those alone that were over
            return {*one.days, *(one.open_days if name in self.catalog.rollups else ())}

        later = [
            (other.tables[name]["published"], other.id)
            for other in known
            for name in published
            if other.id != run.id
            and other.tables.get(name, {}).get("published", "") > run.tables[name]["published"]
            and days(run, name) & days(other, name)
        ]
        return {
            "id": run.id,
            "kind": run.kind,
            "state": run.state,
            "days": in_words(run.days),
            "open_days": in_words(run.open_days),
            "reason": run.reason,
            "created": run.created,
            "published": run.published,
            "note": run.note,
            "version": run.version,
            "undecided": run.undecided,
            "pins": {name: pin.seq for name, pin in run.pins.items()},
            "tables": run.tables,
            "can_go_back": bool(published),
            "in_the_way": max(later, default=(None, None))[1],
        }

    # ---- what is kept

    def rejects(self) -> dict[str, Any]:
        """The rejects of the last days by reason, most first, by day too, each with the newest record of its kind."""
        first = datetime.now(self.settings.tz).date() - REJECTED_WITHIN
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for topic in self.catalog.topics:
            rows = self.ask(
                f"""SELECT reject, day, count(*) AS records, max(kafka.timestamp) AS newest,
                           arg_max({{'partition': kafka.partition, 'offset': kafka."offset", 'value': kafka.value}},
                                   kafka.timestamp) AS example
                    FROM "{topic}" WHERE day >= DATE '{first}' AND reject IS NOT NULL GROUP BY reject, day ORDER BY day""",
                topic,
            )
            for r in rows:
                nothing = {"topic": topic, "reason": r["reject"], "records": 0, "by_day": {}}
                one = found.setdefault((topic, r["reject"]), nothing)
                one["records"] += r["records"]
                one["by_day"][str(r["day"])] = r["records"]
                one |= {"newest": r["newest"], "example": r["example"]}  # days come in order, so the last is the newest
        ordered = sorted(found.values(), key=lambda one: (-one["records"], one["topic"], one["reason"]))
        days = [str(first + timedelta(days=n)) for n in range(REJECTED_WITHIN.days + 1)]
        return {"rejects": ordered[:REASONS], "of": len(ordered), "days": days}

    def views(self) -> dict[str, Any]:
        """The views that are written, by their pipelines, each with its question."""
        from tidemark import query, report
        from tidemark.model import comment

        written = query.written(query.places(self.settings, self.catalog))
        views = [v for v in self.catalog.views.values() if v.name in written]
        return {"views": [{"name": v.name, "pipeline": report.title(v), "says": comment(v)} for v in views]}

    def newest(self, name: str) -> dict[str, Any] | None:
        """The newest rows of a view, as text; None where it is not one, or not written."""
        from tidemark import report

        if name not in self.catalog.views:
            return None
        view, last = self.catalog.views[name], self.last_day(name)
        if last is None:
            return {"columns": [], "rows": []}
        rows = self.ask(report.newest_of(view, last, NEWEST), name)
        columns = [c for c in rows[0] if c != "day" or view.time == "day"] if rows else []
        return {"columns": columns, "rows": [[report.shown_as(r[c]) for c in columns] for r in rows]}

    def tables(self) -> dict[str, Any]:
        """Each table that is written: its files, bytes, rows, days and version."""
        from tidemark import lake

        found, damaged = lake.overview(self.settings, self.catalog)
        return {"tables": found, "damaged": [str(error) for error in damaged]}


@lru_cache(maxsize=512)
def parsed(path: Path, written: int) -> dict[str, dict[str, dict[str, Any]]]:
    from tidemark import lake

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for one in lake.told(path)["differences"]:
        sample = (one["samples"] or [{}])[0]
        sides = {"before": sample.get("published"), "after": sample.get("run")}
        counts = {k: one[k] for k in ("rows", "changed", "missing", "extra")}
        found.setdefault(one["day"], {})[one["table"]] = counts | (sides if one["table"] == "site_daily_traffic" else {})
    return found


def changed(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What a run found when it compared itself with what was published, by day and table; of the whole site's day also the
    row before and after, where they differ. Nothing where it compared nothing. A file is parsed once."""
    try:
        return parsed(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


def commit_of(table: Table, version: int) -> tuple[int, int] | None:
    """What tells a commit's file from another of its name; None where there is none (any more)."""
    try:
        found = (table.path / "_delta_log" / f"{version:020}.json").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def in_words(days: Sequence[str]) -> str:
    from tidemark import compare

    return compare.stretch_in_words(days) if days else ""


def page_of(docs: Path, table: str, run: str) -> str | None:
    """Where the Data Docs have their page of a table in a run, below their folder."""
    folder = docs / "validations" / table / re.sub(r"[^\w.:-]", "-", run)
    pages = sorted(folder.glob("*/*.html"))
    return str(pages[-1].relative_to(docs)) if pages else None


def plain(value: Any) -> Any:
    """As JSON has it: instants and days by ISO 8601, bytes as text, what is no number as null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        text = bytes(value[:TEXT]).decode("utf-8", "backslashreplace")
        return f"{text} … ({len(value):,} bytes)" if len(value) > TEXT else text
    return value if isinstance(value, str | int | None) else str(value)


def as_json(value: Any) -> bytes:
    """JSON in ASCII: half a surrogate pair, which a browser could have sent as a reason, has no UTF-8."""
    return json.dumps(plain(value), separators=(",", ":")).encode("ascii")


def changed_at(folder: Path) -> int:
    """When a file last came into a folder or went, in nanoseconds; 0 where there is no folder."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def as_sentence(error: Exception) -> Exception:
    """What was raised; a `LakeError` instead of what delta-rs raises."""
    from deltalake.exceptions import DeltaError

    from tidemark.lake import LakeError

    return LakeError(f"a table cannot be read: {str(error).splitlines()[0]}") if isinstance(error, DeltaError) else error


class Kept:
    """An answer as JSON, computed at most once in so many seconds, by one caller at a time; what it raises is kept likewise.

    With `of` it is not computed again, either, before one of these numbers has changed.
    What delta-rs raises becomes a `LakeError`: a sentence, not a stack.
    """

    def __init__(self, ask: Callable[[], Any], seconds: float, of: Callable[[], list[int]] | None = None) -> None:
        self.ask, self.seconds, self.of = ask, seconds, of
        self.lock, self.until = threading.Lock(), 0.0
        self.seen: list[int] | None = None
        self.found: bytes | Exception = b""

    def answer(self) -> bytes:
        with self.lock:
            if time.monotonic() >= self.until:
                seen = self.of() if self.of else None
                if seen is None or seen != self.seen or isinstance(self.found, Exception):
                    try:
                        self.found = as_json(self.ask())
                    except Exception as error:
                        self.found = as_sentence(error)
                # A clock of files ticks a few milliseconds long: two changes in one tick look like one.
                fresh = seen is not None and max(seen) > time.time_ns() - TICK
                self.seen, self.until = None if fresh else seen, time.monotonic() + self.seconds
            found = self.found
        if isinstance(found, Exception):
            raise found
        return found


# -------------------------------------------------------------------------------------------------------------- routes


def inside(folder: Path, path: str) -> Path | None:
    """The file at a path below a folder, `index.html` for a folder; None where there is none, or where it leads outside."""
    try:
        root = folder.resolve()
        file = (root / path).resolve()
        file = (file / "index.html").resolve() if file.is_dir() else file
        return file if file.is_relative_to(root) and file.is_file() else None
    except (OSError, ValueError):  # a name that is too long, a null byte
        return None


def policy(page: str) -> str:
    """What the page may load: its own script and style, by their hashes, its own answers, and the Data Docs in a frame."""
    parts = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style")}
    hashes = {tag: [f"'sha256-{b64encode(sha256(x.encode()).digest()).decode()}'" for x in texts] for tag, texts in parts.items()}
    sources = [f"{tag}-src {' '.join(them)}" for tag, them in hashes.items()]
    return "; ".join([NOTHING, *sources, "connect-src 'self'", "img-src data:", "frame-src 'self'"])


def application(answers: Answers) -> FastAPI:
    """The page, its answers, the reports and the Data Docs, each for logged-in users only."""
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.responses import FileResponse, Response

    from tidemark.lake import LakeError
    from tidemark.query import QueryError

    def cannot(_request: Any, error: Exception) -> Any:
        return Response(as_json({"detail": str(error)}), 503, PLAIN, "application/json")

    # FastAPI's own pages about itself know no user.
    app = FastAPI(
        title="tidemark",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(get_user)],
        exception_handlers={QueryError: cannot, LakeError: cannot},
    )
    page = PAGE.read_text("utf-8")
    of_page = {**PLAIN, "Content-Security-Policy": policy(page)}

    @app.get("/", response_model=None)
    def whole_page() -> Any:
        return Response(page, headers=of_page, media_type="text/html")

    def route(ask: Callable[[], Any], seconds: float, *of: str, marks: str = "") -> None:
        """An answer of what these folders hold; of a view of `marks` it is another once its stream is at work no more."""

        def changed() -> list[int]:
            found = [changed_at(answers.settings.lake_path / folder) for folder in of]
            return [*found, int(answers.at_work(marks))] if marks else found

        kept = Kept(ask, seconds, changed if of else None)

        def answer() -> Any:
            return Response(kept.answer(), headers=PLAIN, media_type="application/json")

        app.get(f"/{ask.__name__}", response_model=None, name=ask.__name__)(answer)

    def logs(*views: str) -> list[str]:
        return [f"views/{name}/_delta_log" for name in views]

    route(answers.hour, 1, *logs("site_last_hour"), marks="site_last_hour")
    route(answers.pages, 5, *logs("last_hour"), marks="last_hour")
    route(answers.streams, 2)
    route(answers.days, 5, "runs", "reports", *logs("site_daily_traffic", "site_hourly_traffic"))
    route(answers.verdicts, 5, "verdicts/_delta_log")
    route(answers.runs, 2, "runs")
    route(answers.rejects, 60)
    route(answers.tables, 10)
    route(answers.views, 30)
    route(answers.scheduler, 5)

    @app.get("/newest/{view}", response_model=None)
    def newest(view: str) -> Any:
        found = answers.newest(view)
        if found is None:
            raise HTTPException(404, f"there is no view {view}")
        return Response(as_json(found), headers=PLAIN, media_type="application/json")

    @app.get("/verdicts/{run}", response_model=None)
    def verdicts_of(run: str) -> Any:
        found = answers.verdicts_of(run)
        if found is None:
            raise HTTPException(404, f"there are no verdicts of a run {run}")
        return Response(as_json(found), headers=PLAIN, media_type="application/json")

    @app.get("/docs/{path:path}", response_model=None)
    def docs(path: str) -> Any:
        file = inside(answers.settings.home / "docs", path)
        if file is None:
            raise HTTPException(404, "the Data Docs have no such page")
        return FileResponse(file, headers={**PLAIN, "Content-Security-Policy": OF_DOCS})

    @app.get("/reports/{name}", response_model=None)
    def reports(name: str) -> Any:
        file = inside(answers.settings.lake_path / "reports", name)
        if file is None or file.suffix not in (".html", ".csv"):
            raise HTTPException(404, f"there is no report {name}")
        return FileResponse(file, headers={**PLAIN, "Content-Security-Policy": OF_DOCS})

    return app


def picture(colour: str) -> str:
    """The mark that the tide leaves, as the navigation's icon."""
    drawn = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 20 20' fill='none' stroke='{colour}' stroke-width='1.6' "
        "stroke-linecap='round'><path d='M2 6h16'/><path d='M2 11q2-2 4 0t4 0 4 0 4 0M2 15.5q2-2 4 0t4 0 4 0 4 0'/></svg>"
    )
    return f"data:image/svg+xml;base64,{b64encode(drawn.encode()).decode()}"


class Page(AirflowPlugin):
    """The page under `/tidemark/`, and its entry in the navigation."""

    name = "tidemark_page"

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:
        """Built when the API server asks for it, and in no other process."""
        return [{"app": application(Answers()), "url_prefix": "/tidemark", "name": "tidemark"}]

    external_views: ClassVar[list[dict[str, Any]]] = [
        {
            "name": "tidemark",
            "href": "tidemark/",  # of the page's base, so that it holds below a path too
            "destination": "nav",
            "url_route": "tidemark",
            "nav_top_level": True,
            "icon": picture("#475569"),
            "icon_dark_mode": picture("#cbd5e1"),
        }
    ]
