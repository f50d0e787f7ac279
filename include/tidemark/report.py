"""The report of a day: how it stands, what it counted, what was late, refused or failed; one page and its numbers.

No Spark: it reads the lake in DuckDB, the records of runs, and what the streams say of themselves. All that it knows of web
traffic stands in `traffic`; the other sections are of every pipeline, `others` of each that is not web traffic.
"""

from __future__ import annotations

import csv
import html
import inspect
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from tidemark import lake, local, quality, query
from tidemark.model import Catalog, View, comment, duration, midnight, needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tidemark.settings import Settings

log = structlog.get_logger()

DAY, WEEK, HOUR = timedelta(days=1), timedelta(days=7), timedelta(hours=1)
SECONDS = 600
"""The longest that one question to the lake may take: a night has time."""
SITE_DAYS = "site_daily_traffic"
LISTED, BY_HOUR, IN_CSV, TREND, NEWEST = 15, 12, 1000, 28, 10
"""How many pages are listed, shown by hour, and kept in the CSV; how many days the trend has; how many rows of other views."""
LONGEST = 200
"""The most characters of a text of the data that are shown, in the CSV too; the last of one that is cut is `…`."""

# What pictures are drawn in, and the names by which the page's style colours them, light or dark.
COLOURS = {name: f"#0{n}0{n}0{n}" for n, name in enumerate(("ink", "muted", "line", "now", "before", "week"), 1)}
DRAWN: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
}


class ReportError(ValueError):
    """A day of which there can be no report; the sentence says why."""


class Figure(NamedTuple):
    """One number of the CSV. `key` names what within table and day; it is empty for the whole."""

    table: str
    day: date | str
    key: str
    measure: str
    value: Any


@dataclass(frozen=True)
class Table:
    """Rows to look at. Cells may hold text from anywhere and are shown as text; the columns of `numbers` stand to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numbers: Sequence[str] = ()
    caption: str = ""


@dataclass(frozen=True)
class Tile:
    """One number, large, and what it is held against."""

    label: str
    value: str
    notes: Sequence[str] = ()
    bad: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: a sentence, pictures under their captions, tables; a tile, which stands at the top of the page.

    `figures` are its numbers, for the CSV.
    """

    says: str = ""
    bad: bool = False
    legend: Sequence[tuple[str, str]] = ()
    pictures: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    tile: Tile | None = None


@dataclass(frozen=True)
class Shown:
    """What a pipeline shows of a day, and the numbers of every published day, by which one that was restated is known."""

    tiles: Sequence[Tile] = ()
    sections: Mapping[str, Section] = field(default_factory=dict)
    numbers: Mapping[date, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Standing:
    """How a day stands with its readers: a word, a sentence, and what follows, its commands between backticks.

    `runs` have settled the day, the newest last. `held` are the tables that a gate holds back, `over` those that were
    published over one, each with its reasons, and that of the person who did so.
    """

    state: str
    says: str
    bad: bool = True
    follows: Sequence[str] = ()
    runs: Sequence[lake.Run] = ()
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    over: Mapping[str, Sequence[str]] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------------------------- writing


def report(settings: Settings, catalog: Catalog, day: date) -> Path:
    """Write the report of a day that is over, and return its page, `<lake>/reports/<day>.html`; its numbers stand beside it
    in `<day>.csv`.

    A day that is not published, or not whole, has its report too: it says what holds it back and what follows, and shows the
    last good day. Each file is written whole or not at all. Written twice with nothing changed in between, a report is the
    same; what was restated is held against the reports of the days before, which `last.json` remembers. The page needs no
    network, runs nothing, and shows every text of the data as text. Raises `ReportError` for a day that is not over,
    `LakeError` in another business zone than the logs' days are of.
    """
    import jinja2

    lake.refuse_other_zone(settings, catalog.topics.values())
    last = datetime.now(settings.tz).date() - DAY
    if day > last:
        raise ReportError(f"{day} is not over in {settings.zone}; the last day that has a report is {last}")
    folder, standing = settings.lake_path / "reports", stands(settings, catalog, day)
    lost: Section | None = None
    try:
        shown = traffic(settings, catalog, day)
    except UNREADABLE as error:
        lost = unread(error)
        shown = Shown(sections={"Traffic": lost})
    memory: Mapping[str, Any] = remembered(folder / "last.json")
    try:  # without its numbers every day would have changed
        again, memory = (lost, memory) if lost else restated(settings, day, shown.numbers, memory)
    except UNREADABLE as error:
        again = unread(error)
    sections = {
        **shown.sections,
        **others(settings, catalog, day),
        "Live against settled": tried(differences, settings, catalog, day, standing.runs),
        "Late events": tried(lateness, settings, catalog, day),
        "Rejects": tried(rejects, settings, catalog, day),
        "Checks": tried(verdicts, settings, standing.runs),
        "Restated days": again,
        "The stream now": tried(streams, settings, catalog),
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text())
    tiles = [*shown.tiles, *(s.tile for s in sections.values() if s.tile)]
    page = template.render(day=day, zone=settings.zone, standing=standing, tiles=tiles, sections=sections)
    folder.mkdir(parents=True, exist_ok=True)
    lake.whole_or_nothing(folder / f"{day}.csv", as_csv(sections))
    lake.whole_or_nothing(folder / f"{day}.html", page)
    lake.whole_or_nothing(folder / "last.json", json.dumps(memory, indent=1))
    return folder / f"{day}.html"


def again(settings: Settings, catalog: Catalog, run: str) -> list[Path]:
    """Write the reports again of those days of a run that have one already, and return their pages: the run was published since,
    or taken back, and what they say of it is no longer so. Of a run that is neither, nothing is written.

    One that cannot be written keeps no other from it; a `ReportError` at the end says which, why, and the command.
    """
    from tidemark.compare import stretch_in_words

    runs = [known for known in lake.read_runs(settings)[0] if known.id == run and (known.visible or known.state == "rolled back")]
    days = sorted({date.fromisoformat(day) for known in runs for day in known.days} & reported(settings))
    if days:
        log.info("reports are written again", days=stretch_in_words([str(day) for day in days]))
    pages, lacks = [], {}
    for day in days:
        try:
            pages.append(report(settings, catalog, day))
        except Exception as error:  # whatever it is, what the run has done stands
            lacks[str(day)] = error
    if lacks:
        first, why = next(iter(lacks.items()))
        of = stretch_in_words([*lacks])
        raise ReportError(
            f"the report of {of} still shows what was before: {why}; tidemark report --day {first} writes that of a day"
        )
    return pages


def reported(settings: Settings) -> set[date]:
    """The days that have a report."""
    found = set()
    for page in (settings.lake_path / "reports").glob("????-??-??.html"):
        with suppress(ValueError):
            found.add(date.fromisoformat(page.stem))
    return found


UNREADABLE = (query.QueryError, lake.LakeError)


def tried(part: Callable[..., Section], *of: Any) -> Section:
    """A part of the report; where the lake refuses it, the sentence why: the other parts go out all the same."""
    try:
        return part(*of)
    except UNREADABLE as error:
        return unread(error)


def unread(error: Exception) -> Section:
    log.warning("a part of the report cannot be had", because=str(error))
    return Section(f"This cannot be had: {error}", bad=True)


def as_csv(sections: Mapping[str, Section]) -> str:
    """Every number of a report, one a line. A text that a spreadsheet would take for a formula has an apostrophe before it."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(("section", *Figure._fields))
    for title, section in sections.items():
        for figure in section.figures:
            cells = (title, *figure)
            writer.writerow([f"'{c}" if isinstance(c, str) and re.match(r"[=+\-@\t\r]", c) else c for c in cells])
    return written.getvalue()


def ask(settings: Settings, catalog: Catalog, sql: str) -> list[dict[str, Any]]:
    found = query.query(settings, catalog, sql, rows=100_000, seconds=SECONDS)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def cut(column: str) -> str:
    """SQL for the text of a column as it is shown: a long one is cut."""
    return f"CASE WHEN length({column}) > {LONGEST} THEN left({column}, {LONGEST - 1}) || '…' ELSE {column} END"


def listed(days: Iterable[date]) -> str:
    return ", ".join(f"DATE '{day}'" for day in days)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def change(now: float | None, before: float | None) -> str:
    """`+3.2 %`, `−0.4 %`; a dash where there is nothing to hold it against."""
    if now is None or not before:
        return "–"
    return f"{100 * (now - before) / before:+,.1f} %".replace("-", "−")


def many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def instant(at: datetime | str | None) -> str:
    """An instant in UTC to the second, as it was, never as an age: a page is read later."""
    at = datetime.fromisoformat(at) if isinstance(at, str) else at
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if at else "–"


def length(span: timedelta | None) -> str:
    """`5 h 12 min`, `3 min 20 s`, `4 s`."""
    if span is None:
        return "–"
    minutes, seconds = divmod(round(span.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


# ------------------------------------------------------------------------------------------------------- how a day stands


def stands(settings: Settings, catalog: Catalog, day: date) -> Standing:
    """How a day stands, by the records of runs; of each table by that of the newest run which has computed it. A damaged record
    is named: nobody knows what it would tell."""
    known, damaged = lake.runs_now(settings)
    runs, but = [r for r in known if str(day) in r.days and r.state != "dropped"], "".join(f" {e}." for e in damaged.values())
    settle = f'`tidemark settle --day {day} --reason "…"`, then `tidemark publish` with the name that it prints'
    ends = instant(midnight(day + DAY, settings.tz))
    click = f"or in Airflow: DAG `nightly`, the run of {day}, listed under its end, {ends}: Clear"
    if not runs:
        says = "No run has settled this day; readers have it live. Its night does so; where that is over, or never came:"
        return Standing("not settled", says + but, follows=(settle, click))
    run, derived = runs[-1], {d.name for d in catalog.derived}
    whole = next((r for r in reversed(runs) if not r.only), run)  # of a run of some tables the others know nothing
    newest = {n: (r, t) for r in runs if r.state not in ("running", "failed") for n, t in r.tables.items()}
    said = [(t["published"], n, r) for r in runs for n, t in r.tables.items() if t.get("published")]
    origin = {n: r for _, n, r in sorted(said, key=lambda one: one[0])}
    origins = [r for r in runs if r in origin.values()]
    before, vain = next((r for r in reversed(runs) if not r.only and r.state != "failed"), None), ""
    if whole.state == "failed" and before in origins:  # a run that failed takes nothing from readers
        vain, whole = f" Run {whole.id} failed since, and changed nothing.", before
    have = f"readers have what {' and '.join(r.id for r in origins)} published" if origins else "readers have the day live"
    failed = {n: t.get("reasons", []) for n, (_, t) in newest.items() if t.get("gate") not in (None, "passed")}
    forced = {n: t["forced"]["reason"] for n, (_, t) in newest.items() if t.get("forced")}
    mine = {n: [f"{n} was published all the same: {reason}"] for n, reason in forced.items()}
    done = [n for n, (_, t) in newest.items() if t.get("published")]
    # A topic is never published: what was taken over of it is, with the first table of its run.
    ran = {newest[n][0].id for n in done}
    done += [n for n in forced if n not in derived and newest[n][0].id in ran]
    over = {n: [*reasons, *mine.get(n, [])] for n, reasons in failed.items() if n in done}
    held = {n: reasons for n, reasons in failed.items() if n not in over}
    waiting = [n for n in newest if n in derived and n not in (*origin, *held)]

    def of(names: Iterable[str]) -> list[str]:
        return sorted({newest[n][0].id for n in names})

    def standing(state: str, says: str, *follows: str, bad: bool = True) -> Standing:
        return Standing(state, says + vain + but, bad or bool(damaged), follows, runs, held, over)

    if run.state == "running":
        return standing("being settled", f"Run {run.id} is at work on it; {have}.", "`tidemark runs`")
    if whole.state == "failed":
        return standing("failed", f"Run {whole.id} failed: {whole.note}; {have}.", f"mend the cause, then {settle}", click)
    if whole.state == "rolled back":
        return standing("taken back", f"Run {whole.id} was taken back: {whole.note}; {have}.", settle, click)
    if held:
        these = " OR ".join(f"run = '{one}'" for one in of(held))
        rows = f"SELECT table_name, check_name, observed, sample FROM verdicts WHERE ({these}) AND outcome <> 'passed'"
        state = "published in part" if done else "held back"
        says = f"{many(len(held), 'table')} of run {' and '.join(of(held))} may not be published; {have}."
        return standing(state, says, f'`tidemark query "{rows}"`', f"mend the cause, then {settle}", click)
    if waiting:
        says = (
            f"Run {' and '.join(of(waiting))} has passed its checks, and {many(len(waiting), 'table')} of it wait to be published"
        )
        return standing("not published", f"{says}; {have}.", *(f"`tidemark publish {one}`" for one in of(waiting)), click)
    says = "; ".join(f"run {r.id}: {r.reason}" for r in origins or [run])
    undecided = of(n for n, (r, _) in newest.items() if r.state == "staged")
    more = f" Run {' and '.join(undecided)} waits to be published." if undecided else ""
    return standing("published", f"Settled by {says}.{more}", bad=bool(over))


# --------------------------------------------------------------------------------------------------------------- traffic


def traffic(settings: Settings, catalog: Catalog, day: date) -> Shown:
    """Page views and unique visitors of a day, by hour and by page, against the day and the week before it.

    Of the last good day where this one is not: a day is good when all the views named here are published of it. Nothing
    where the pipeline or its tables are not there.
    """
    site_hours, hours, site_days, days = names = "site_hourly_traffic", "hourly_traffic", SITE_DAYS, "daily_traffic"
    measures = {"pv": "Page views", "uv": "Unique visitors"}
    if not set(names) <= query.written(query.places(settings, catalog)).keys():
        return Shown()
    published = set.intersection(*(lake.settled_days(settings, lake.table(settings, catalog[name])) for name in names))
    good = max((d for d in published if d <= day), default=None)
    if good is None:
        none = "No day up to this one is published whole, so there are no numbers to show."
        return Shown(sections={"Traffic": Section(none, bad=True)})
    held = {"now": good, "before": good - DAY, "week": good - WEEK}
    others = ("the day before", "the week before")

    site = {r["day"]: r for r in ask(settings, catalog, f"SELECT day, pv, uv FROM {site_days} ORDER BY day")}
    of_hours = ask(settings, catalog, f"SELECT * FROM {site_hours} WHERE day IN ({listed(held.values())}) ORDER BY hour")
    columns = ", ".join(f"{name}.{m} AS {m}_{name}" for name in held for m in measures)
    joins = " ".join(f"LEFT JOIN {days} {n} ON {n}.page = now.page AND {n}.day = DATE '{held[n]}'" for n in ("before", "week"))
    busiest = f"WHERE now.day = DATE '{good}' ORDER BY now.pv DESC, now.page LIMIT"
    named = f"{cut('now.page')} AS page, count(*) OVER () AS pages"
    of_pages = ask(settings, catalog, f"SELECT {named}, {columns} FROM {days} now {joins} {busiest} {IN_CSV}")
    # By rank: names that are cut may be the same.
    among = f"SELECT now.page, row_number() OVER (ORDER BY now.pv DESC, now.page) - 1 AS rank FROM {days} now {busiest} {BY_HOUR}"
    both = (
        f"SELECT rank, day, hour, pv, uv FROM {hours} JOIN ({among}) USING (page) WHERE day = DATE '{good}' ORDER BY rank, hour"
    )
    of_both = ask(settings, catalog, both)

    last = int((midnight(good + DAY, settings.tz) - midnight(good, settings.tz)) / HOUR)
    clock = [(midnight(good, settings.tz) + n * HOUR).astimezone(settings.tz).hour for n in range(last)]

    def nth(row: Mapping[str, Any]) -> int:
        """Which hour of its day a row is."""
        return int((row["hour"] - midnight(row["day"], settings.tz)) / HOUR)

    def by_hour(d: date, m: str) -> dict[int, int]:
        """What a day has in the hours of the good one, by the clock: either may have 23 or 25."""
        of_day = [r for r in of_hours if r["day"] == d]
        if d == good:
            return {nth(r): r[m] for r in of_day}
        at = {r["hour"].astimezone(settings.tz).hour: r[m] for r in of_day}
        return {n: at[hour] for n, hour in enumerate(clock) if hour in at}

    def cells(row: Mapping[str, Any], m: str) -> list[str]:
        now, *before = (row[f"{m}_{name}"] for name in held)
        return [number(now), *(change(now, b) for b in before)]

    tiles, curves, trends = [], [], []
    for m, label in measures.items():
        now, *before = (site.get(d, {}).get(m) for d in held.values())
        notes = [f"{change(now, b)} on {what}" for b, what in zip(before, others, strict=True)]
        tiles.append(Tile(label if good == day else f"{label}, {good}", number(now), notes))
        series = {name: by_hour(d, m) for name, d in held.items()}
        curves.append((label, picture(f"{label} by hour", (5.2, 2.6), draw_hours, series, clock)))
        recent = {d: site[d][m] for d in (good - n * DAY for n in range(TREND)) if d in site}
        trends.append((label, picture(f"{label} by day", (5.2, 2.0), draw_days, recent, good)))
    shown = [r["page"] for r in of_pages[:BY_HOUR]]
    views = {(r["rank"], nth(r)): r["pv"] for r in of_both}
    size = (10.6, 0.5 + 0.27 * len(shown))
    grid = picture("Page views by page and hour", size, draw_grid, shown, views, clock) if shown else ""
    heads = [column for label in measures.values() for column in (label.lower(), *others)]
    pages = [[r["page"], *(cell for m in measures for cell in cells(r, m))] for r in of_pages[:LISTED]]
    how_many = many(of_pages[0]["pages"], "page") if of_pages else "no page"

    hour = Section(
        "" if good == day else f"{day} is not published whole. These are the numbers of {good}, the last good day.",
        good != day,
        legend=[(name, f"{what}, {d}") for (name, d), what in zip(held.items(), ("the day", *others), strict=True)],
        pictures=curves,
        figures=[Figure(site_hours, r["day"], r["hour"].isoformat(), m, r[m]) for r in of_hours for m in measures],
    )
    page = Section(
        f"Of {how_many} the {BY_HOUR} busiest by hour, the fuller the more page views, and the {LISTED} busiest of the day.",
        pictures=[("Page views", grid)] if grid else [],
        tables=[Table(("page", *heads), pages, heads)],
        figures=[
            *(Figure(days, held[n], r["page"], m, r[f"{m}_{n}"]) for r in of_pages for n in held for m in measures),
            *(Figure(hours, good, f"{shown[r['rank']]} {r['hour'].isoformat()}", m, r[m]) for r in of_both for m in measures),
        ],
    )
    weeks = Section(
        pictures=trends,
        figures=[Figure(site_days, d, "", m, r[m]) for d, r in site.items() if good - TREND * DAY < d <= good for m in measures],
    )
    numbers = {d: {label.lower(): site[d][m] for m, label in measures.items()} for d in published if d in site}
    return Shown(tiles, {"By hour": hour, "By page": page, "Four weeks": weeks}, numbers)


# ------------------------------------------------------------------------------------------------------ of every pipeline


def others(settings: Settings, catalog: Catalog, day: date) -> dict[str, Section]:
    """A section for each pipeline beside web traffic whose tables are there: how many rows each view has of the day and of
    the day before, and its newest."""
    written = query.written(query.places(settings, catalog)).keys()
    of_traffic = catalog.views[SITE_DAYS].function.__module__ if SITE_DAYS in catalog.views else None
    pipelines: dict[str, list[View]] = {}
    for view in catalog.views.values():
        if view.name in written and view.function.__module__ != of_traffic:
            pipelines.setdefault(view.function.__module__, []).append(view)
    return {title(views[0]): tried(newest, settings, catalog, day, views) for views in pipelines.values()}


def title(view: View) -> str:
    """What the file of a view's pipeline calls itself: its first words, up to the colon."""
    said = (inspect.getdoc(inspect.getmodule(view.function)) or "").partition(":")[0]
    return said if said and len(said) < 40 else view.function.__module__.rpartition(".")[2].replace("_", " ").capitalize()


def newest(settings: Settings, catalog: Catalog, day: date, views: Sequence[View]) -> Section:
    """How many rows each view of a pipeline has of a day, and the newest of them."""
    says, tables, figures = [], [], []
    for view in views:
        both = listed((day, day - DAY))
        counted = f'SELECT day, count(*) AS n, bool_and(settled) AS settled FROM "{view.name}" WHERE day IN ({both}) GROUP BY day'
        count = {r["day"]: r for r in ask(settings, catalog, counted)}
        now, before = (count[d]["n"] if d in count else 0 for d in (day, day - DAY))
        live = "" if day not in count or count[day]["settled"] else ", live"
        says.append(f"{view.name}: {many(now, 'row')}{live} ({number(before)} the day before)")
        rows = ask(settings, catalog, newest_of(view, day, NEWEST))
        if rows:
            columns = [c for c in rows[0] if c != "settled" and (c != "day" or view.time == "day")]
            numbers = [c for c in columns if all(isinstance(r[c], int | float | Decimal | None) for r in rows)]
            cells = [[shown_as(r[c]) for c in columns] for r in rows]
            tables.append(Table(columns, cells, numbers, f"{view.name}: {comment(view)}"))
        figures += [Figure(view.name, d, "", "rows", n) for d, n in ((day, now), (day - DAY, before))]
    return Section("; ".join(says) + ".", tables=tables, figures=figures)


def newest_of(view: View, day: date | str, limit: int) -> str:
    """SQL for the newest rows that a view has of a day."""
    order = ", ".join([f'"{view.time}" DESC', *(f'"{c}"' for c in view.key if c != view.time)])
    return f"SELECT * FROM \"{view.name}\" WHERE day = DATE '{day}' ORDER BY {order} LIMIT {limit}"


def shown_as(value: Any) -> str:
    """A cell of any type as text; a long one is cut."""
    if isinstance(value, datetime):
        return instant(value)
    said = "–" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"


def differences(settings: Settings, catalog: Catalog, day: date, runs: Sequence[lake.Run]) -> Section:
    """What readers had live beside what was settled, of each view by the newest run that has compared it, apart by cause."""
    from tidemark import compare

    live = {v.name for v in catalog.views.values() if v.refresh}  # of the others readers have nothing before the night
    by = {d.table: (r, d) for r in runs for d in compare.kept(settings, r) or [] if d.day == day and d.table in live}
    if not by:
        return Section("No run has compared a live view of the day.")
    found = [d for _, d in by.values()]
    differ, total = sum(d.changed + d.missing + d.extra for d in found), many(sum(d.rows for d in found), "row")
    asked = [d.unexplained for d in found if d.unexplained is not None]
    unexplained = sum(asked)
    says = f"Every row that readers had is as run {' and '.join(sorted({r.id for r, _ in by.values()}))} has settled it."
    if unexplained:
        says = f"{differ:,} of {total} differ from what readers had. Late events do not explain {unexplained:,} of them: "
        says += " and ".join(sorted({f"tidemark compare {r.id}" for r, d in by.values() if d.unexplained})) + " shows some."
    elif differ:
        says = f"{differ:,} of {total} differ from what readers had."
        says += " Late events explain all of them." if sum(d.late or 0 for d in found) == differ else ""
    rows = [[d.table, *(number(getattr(d, name)) for name in compare.COUNTS)] for d in found]
    figures = [Figure(d.table, day, "", name, getattr(d, name)) for d in found for name in compare.COUNTS]
    tables = [Table(("view", *compare.COUNTS), rows, compare.COUNTS)]
    tile = Tile("Unexplained rows", number(unexplained), [f"{differ:,} rows differ"], bool(unexplained)) if asked else None
    return Section(says, bool(unexplained), tables=tables, figures=figures, tile=tile)


def lateness(settings: Settings, catalog: Catalog, day: date) -> Section:
    """How many of the day's accepted events, tombstones aside, came when stream time was past them by more than a live view's
    `back`."""
    there = query.written(query.places(settings, catalog))
    rows: list[tuple[str, dict[str, Any]]] = []
    backs: dict[str, timedelta] = {}
    refused: list[str] = []
    for topic in catalog.topics.values():
        if topic.name not in there or "ledger" not in there:
            continue
        live = [v.refresh.back for v in catalog.views.values() if v.refresh and topic.name in needed(catalog, [v.name])]
        mine = {text: duration(text) for text in live}
        counts = "".join(f', count(*) FILTER (late > to_seconds({b.total_seconds()})) AS "{text}"' for text, b in mine.items())
        sql = f"""
            SELECT count(*) AS events{counts}, max(late) AS latest FROM (
                SELECT stream_time - happened AS late
                FROM (SELECT kafka.partition AS p, kafka."offset" AS o, {topic.event_time} AS happened
                      FROM "{topic.name}" WHERE day = DATE '{day}' AND reject IS NULL AND kafka.value IS NOT NULL) events
                ASOF LEFT JOIN (SELECT "partition" AS p, from_offset AS o, stream_time
                      FROM ledger WHERE topic = '{topic.name}' AND day >= DATE '{day - DAY}') batches
                ON events.p = batches.p AND events.o >= batches.o)"""
        try:
            rows.append((topic.name, ask(settings, catalog, sql)[0]))
            backs |= mine
        except query.QueryError as error:  # an event time that only Spark can compute, or more than the time allows
            refused.append(f"Those of {topic.name} are not counted: {error}.")
    if not rows:
        return Section(" ".join(refused) or "No batch has brought an event.")
    says = "How far stream time was past an event when it came, a repeat counted too. The limits are how far back live views are "
    says += "computed again."
    limits = sorted(backs, key=lambda text: backs[text])
    cells = [[name, number(r["events"]), *(number(r.get(text)) for text in limits), length(r["latest"])] for name, r in rows]
    columns = ("topic", "events", *(f"by over {text}" for text in limits), "the latest")
    figures = [Figure(name, day, "", f"late by over {text}", r[text]) for name, r in rows for text in limits if text in r]
    figures = [*(Figure(name, day, "", "events", r["events"]) for name, r in rows), *figures]
    tile = None
    if limits:
        held = {name: r for name, r in rows if limits[0] in r}  # against the others that limit is not held
        late, events = (sum(r[column] for r in held.values()) for column in (limits[0], "events"))
        of = ", ".join(held) if len(held) <= 3 else many(len(held), "topic")
        tile = Tile(f"Late, over {limits[0]}", number(late), [f"of {many(events, 'event')} of {of}"])
    return Section(" ".join((says, *refused)), tables=[Table(columns, cells, columns[1:])], figures=figures, tile=tile)


def rejects(settings: Settings, catalog: Catalog, day: date) -> Section:
    """Records that were not accepted, by topic and reason, beside the day and the week before."""
    days = (day, day - DAY, day - WEEK)
    there = query.written(query.places(settings, catalog))
    records: Counter[tuple[str, date]] = Counter()
    refused: Counter[tuple[str, str, date]] = Counter()
    for name in (n for n in catalog.topics if n in there):
        sql = f'SELECT day, reject, count(*) AS records FROM "{name}" WHERE day IN ({listed(days)}) GROUP BY ALL'
        for r in ask(settings, catalog, sql):
            records[name, r["day"]] += r["records"]
            if r["reject"] is not None:
                refused[name, r["reject"], r["day"]] += r["records"]
    total, bad = (sum(c for (*_, d), c in counter.items() if d == day) for counter in (records, refused))
    share = f"{100 * bad / total:.2f} %" if total else "–"
    says = f"{bad:,} of {many(total, 'record')}, {share}." if total else "The day has no records."
    kinds = sorted({(name, reason) for name, reason, _ in refused}, key=lambda k: (-refused[*k, day], k))
    rows = [[name, reason, *(number(refused[name, reason, d]) for d in days)] for name, reason in kinds]
    figures = [Figure(name, d, reason, "rejects", refused[name, reason, d]) for name, reason in kinds for d in days]
    figures += [Figure(name, d, "", "records", count) for (name, d), count in sorted(records.items())]
    columns = ("topic", "reason", "the day", "the day before", "the week before")
    tile = Tile("Rejects", number(bad), [f"{share} of the records"])
    return Section(says, tables=[Table(columns, rows, columns[2:])] if rows else [], figures=figures, tile=tile)


def verdicts(settings: Settings, runs: Sequence[lake.Run]) -> Section:
    """What the checks of each table said in the newest run that asked them; those that failed, warned or could not be asked by
    name, with what they observed."""
    found: list[quality.Verdict] = []
    for kept in (settings.lake_path / "runs" / f"{run.id}.verdicts" for run in runs):
        fresh = quality.from_json(lake.told(kept)) if kept.exists() else []
        found = [v for v in found if v.table not in {f.table for f in fresh}] + fresh
    if not found:
        return Section("No check was asked of this day.")
    other = sorted((v for v in found if v.outcome != "passed"), key=lambda v: (v.outcome, v.severity, v.table, v.check))
    words = ("passed", "warned", "failed", "not asked")
    tables = {v.table: Counter[str]() for v in found}
    for v in found:
        tables[v.table][outcome(v)] += 1
    sums = [[name, *(number(counts[w]) for w in words)] for name, counts in tables.items()]
    said = [[v.table, v.check, outcome(v), number(v.unexpected), v.observed or "", v.sample or ""] for v in other]
    total = Counter(outcome(v) for v in found)
    bad = total["failed"] + total["not asked"] > 0
    says = ", ".join(f"{total[w]:,} {w}" for w in words if total[w]) + f", of {many(len(found), 'check')}."
    shown = [Table(("table", "check", "outcome", "rows", "observed", "for example"), said, ("rows",))] if other else []
    figures = [Figure(name, "", "", w, counts[w]) for name, counts in tables.items() for w in words]
    tile = Tile("Checks passed", f"{total['passed']:,} of {len(found):,}", [f"{total['warned']:,} warned"], bad)
    return Section(says, bad, tables=[*shown, Table(("table", *words), sums, words)], figures=figures, tile=tile)


def outcome(verdict: quality.Verdict) -> str:
    if verdict.outcome == "failed":
        return "warned" if verdict.severity == "warning" else "failed"
    return "passed" if verdict.outcome == "passed" else "not asked"


def restated(
    settings: Settings, day: date, numbers: Mapping[date, Mapping[str, int]], memory: Mapping[str, Any]
) -> tuple[Section, Mapping[str, Any]]:
    """The days whose publication is another than when a report last saw it, old numbers and new, and the runs that published
    them since, each with what it changed; and what to remember.

    The memory is `{"last": the newest day reported, "days": {day: [{report, run, at, numbers}, …]}}`, of each day what the newest
    report saw and what one before it did: the report of one day, written again, is held against the same. Of its own day it
    keeps what its first writing saw, which the next day's is held against. `at` is when the run had published last: it may
    publish a table that was held back later. A report of a day before the last changes nothing in it.
    """
    from tidemark import compare

    known = lake.runs(settings)
    at = {r.id: max((t.get("published") or "" for t in r.tables.values()), default="") for r in known}
    origins: dict[str, list[lake.Run]] = {}  # oldest first
    for r in sorted((r for r in known if at[r.id]), key=lambda r: at[r.id]):
        for d in r.days:
            origins.setdefault(d, []).append(r)
    of_day = {d: dict(numbers.get(date.fromisoformat(d), {})) for d in origins if d <= str(day)}
    seen = {d: {"run": origins[d][-1].id, "at": at[origins[d][-1].id], "numbers": counted} for d, counted in of_day.items()}
    kept = {d: [e for e in entries if e["report"] < str(day)] for d, entries in memory.get("days", {}).items()}
    nothing: dict[str, Any] = {"run": None, "at": None, "numbers": {}}
    moved = []
    for d, old in ((d, entries[-1]) for d, entries in sorted(kept.items()) if entries):
        new = seen.get(d, nothing)
        there = d in seen or old["run"] in at  # a record that has expired says nothing of its days
        if there and any(old[name] != new[name] for name in ("run", "numbers")):
            moved.append((d, old, new))
    measures = list(dict.fromkeys(m for _, *both in moved for one in both for m in one["numbers"]))
    rows = []
    for d, old, new in moved:
        by = origins.get(d, [])
        ids = [r.id for r in by]
        if old["run"]:  # where it was taken back, the last one stands in its place
            since = old.get("at") or at.get(old["run"], "")
            by = [r for r in by if at[r.id] > since] if old["run"] in ids else by[-1:]
        found = [[c for c in compare.kept(settings, r) or [] if str(c.day) == d] for r in by]
        touched = ", ".join(number(sum(c.changed + c.missing + c.extra for c in them) if them else None) for them in found)
        names, because = ", ".join(r.id for r in by), "; ".join(r.reason for r in by)
        values = [number(one["numbers"].get(m)) for m in measures for one in (old, new)]
        other = "changed by hand" if ids else "taken back"
        rows.append((d, *values, touched or "–", names or new["run"] or "–", because or other))
    figures = [
        Figure("", d, when, m, one["numbers"].get(m))
        for d, old, new in moved
        for when, one in (("was", old), ("is", new))
        for m in measures
    ]
    if memory.get("last", "") <= str(day):
        oldest = str(day - duration(settings.keep_records))
        for d in sorted({*seen, *kept}):
            entries, new = kept.get(d, []), seen.get(d, nothing)
            if d == str(day):  # what its first writing saw: no report has told yet what a later one saw
                new = next((e for e in memory.get("days", {}).get(d, []) if e["report"] == d), new)
            if not entries or any(entries[-1].get(name) != new[name] for name in nothing):
                entries = [*entries, {"report": str(day), **new}]
            kept[d] = entries[-2:]
        memory = {"last": str(day), "days": {d: entries for d, entries in sorted(kept.items()) if d >= oldest}}
    heads = [head for m in measures for head in (f"{m} were", f"{m} are")] + ["rows changed"]
    says = "No day that the report of an earlier day has shown has changed since."
    if rows:
        says = f"{many(len(rows), 'day')} changed since a report has shown them: published again, taken back, or changed by hand."
    tables = [Table(("day", *heads, "by run", "reason"), rows, heads)] if rows else []
    return Section(says, tables=tables, figures=figures), memory


def remembered(path: Path) -> dict[str, Any]:
    """What the reports so far have shown; nothing where it is lost or broken, which is said."""
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return {}
    except ValueError:
        log.warning("what was reported is lost; this report begins anew", path=str(path))
        return {}


def streams(settings: Settings, catalog: Catalog) -> Section:
    """How each stream is, as it said last; of one that does not run, when its last batch ended, and no lag."""
    rows, figures, ill, tiles, down, now = [], [], [], [], [], datetime.now(UTC)
    for name in lake.streams(settings, catalog.streams):
        status = local.status(settings, name)
        beat, progress = status.get("heartbeat", {}), status.get("progress", {})
        state, heard = beat.get("state", "never ran"), beat.get("at")
        if local.silent(beat, now):
            state = "silent"
        aside, runs, ended = progress.get("set_aside") or {}, local.runs_now(beat, now), progress.get("finished_at")
        since = f", and ended its last batch at {instant(ended)}" if ended else ""
        how = f"{name} {'is ' * bool(beat)}{state}"
        down += [] if runs else [how]
        ill += [] if runs else [f"{how}{since}"]
        ill += [f"{name} has set {rollup} aside: {why}" for rollup, why in aside.items()]
        lag, time_ = progress.get("lag") if runs else None, progress.get("stream_time")
        behind = "–" if lag is None else length(local.behind(settings, name))
        tiles.append(Tile(f"Stream {name} now", f"{number(lag)} behind" if runs else state, [state] if runs else [], not runs))
        rows.append((name, state, number(lag), behind, instant(time_), instant(heard)))
        figures.append(Figure("", "", name, "lag", lag))
    tile = next(iter([*(t for t in tiles if t.bad), *tiles]), None)
    if len(down) > 1:
        tile = Tile("Streams now", f"{len(down)} of {len(rows)} do not run", down, bad=True)
    columns = ("stream", "state", "records behind", "about", "stream time", "heard of")
    says = "; ".join(ill) + "." if ill else "Every stream runs."
    return Section(says, bool(ill), tables=[Table(columns, rows, columns[2:4])], figures=figures, tile=tile)


# ------------------------------------------------------------------------------------------------------------- pictures


def picture(title: str, size: tuple[float, float], draw: Callable[..., None], *what: Any) -> str:
    """A drawing as SVG to stand inside the page, which colours it; the same drawing is the same text. Returns safe markup."""
    import matplotlib
    from markupsafe import Markup
    from matplotlib.figure import Figure as Canvas

    written = io.StringIO()
    with matplotlib.rc_context({**DRAWN, "svg.hashsalt": title}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page's name may have signs that the font has not; the browser has them
        canvas = Canvas(figsize=size, layout="constrained")
        axes = canvas.subplots()
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(length=0, pad=6)
        draw(axes, *what)
        canvas.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # the same in every picture; what is referred to has other names
    head = f'<svg role="img" aria-label="{html.escape(title)}" style="min-width: {54 * size[0]:.0f}px" '
    svg = re.sub(r'<svg ([^>]*?)width="[^"]+" height="[^"]+"', rf"{head}\1", svg, count=1)
    names = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
    styles = re.compile(r'style="[^"]*"')
    return Markup(styles.sub(lambda style: re.sub(r"#\w{6}", lambda c: names.get(c[0], c[0]), style[0]), svg))


def thousands(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.grid(axis="y")


def hour_axis(axes: Axes, clock: Sequence[int]) -> None:
    """An axis of a day's hours, every third on the clock named."""
    named = [(n, f"{hour:02d}") for n, hour in enumerate(clock) if hour % 3 == 0]
    axes.set_xlim(0, len(clock))
    axes.set_xticks(*zip(*named, (len(clock), "24"), strict=True))


def draw_hours(axes: Axes, series: Mapping[str, Mapping[int, int]], clock: Sequence[int]) -> None:
    """Lines by hour of the day; an hour without a row counted nothing. The last series is drawn first, below the others."""
    last = len(clock)
    styles: dict[str, dict[str, Any]] = {"now": {"linewidth": 2}, "before": {"linewidth": 1.2}}
    for name, values in reversed(list(series.items())):
        if values:
            at, counts = [h + 0.5 for h in range(last)], [values.get(h, 0) for h in range(last)]
            axes.plot(at, counts, color=COLOURS[name], **styles.get(name, {"linewidth": 1.2, "linestyle": (0, (4, 2))}))
            if name == "now":
                axes.fill_between(at, counts, color=COLOURS[name], alpha=0.1, linewidth=0)
    hour_axis(axes, clock)
    thousands(axes)


def draw_days(axes: Axes, values: Mapping[date, int], day: date) -> None:
    """A bar each day of four weeks, the day itself and its weekdays marked."""
    at = {d: (d - day).days for d in values}
    axes.bar(list(at.values()), list(values.values()), 0.72, color=[COLOURS["now" if d == day else "before"] for d in values])
    axes.set_xlim(-TREND + 0.4, 0.6)
    axes.set_xticks(range(-TREND + 7, 1, 7), [f"{day + n * DAY:%d %b}" for n in range(-TREND + 7, 1, 7)])
    thousands(axes)


def draw_grid(axes: Axes, pages: Sequence[str], values: Mapping[tuple[int, int], int], clock: Sequence[int]) -> None:
    """A cell for each page, by its place among `pages`, and hour, the fuller the more; the busiest page on top."""
    from matplotlib.patches import Rectangle

    most = max(values.values(), default=1)
    for (rank, hour), count in values.items():
        place = (hour + 0.03, rank + 0.06)
        axes.add_patch(Rectangle(place, 0.94, 0.88, color=COLOURS["now"], alpha=0.06 + 0.94 * count / most, linewidth=0))
    hour_axis(axes, clock)
    axes.set_ylim(len(pages), 0)
    axes.set_yticks([n + 0.5 for n in range(len(pages))], [p if len(p) <= 28 else f"{p[:27]}…" for p in pages])
