"""The screen: page views and visitors of the last hour as they move, how far the stream is, and what is settled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live as LiveScreen
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tidemark import lake, local
from tidemark.model import Catalog
from tidemark.settings import Settings

if TYPE_CHECKING:
    from deltalake import DeltaTable

BARS = "▁▂▃▄▅▆▇█"
TRAIL = timedelta(minutes=10)
TOP = 10
PAGE, ERROR = 200, 800
"""The most signs shown of a page's name, of which a line has no room for more, and of a stream's error."""
VIEWS = ("site_last_hour", "last_hour", "site_daily_traffic")
"""What the screen shows."""
EVERY = 1.0
"""Seconds between looks. A look at an unchanged table costs under a millisecond."""


@dataclass(frozen=True)
class Sight:
    """What the screen shows: of the newest mark and the ten minutes before it, of the stream, and of settled days.

    `trail` is (mark, pv, uv) of the whole site, oldest first; `pages` is (page, pv, uv) at the newest mark, most views
    first; `days` is (day, pv, uv, settled), newest first, and `written` when the newest was. Everything is empty until there are
    rows.
    """

    trail: tuple[tuple[datetime, int, int], ...] = ()
    pages: tuple[tuple[str, int, int], ...] = ()
    days: tuple[tuple[Any, int, int, bool], ...] = ()
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: datetime | None = None

    @property
    def mark(self) -> datetime | None:
        """The newest mark, in UTC."""
        return self.trail[-1][0] if self.trail else None


class Newest:
    """The newest rows of one view, read again only when its table has a new version, and only from the files with them."""

    def __init__(self, table: lake.Table, back: timedelta) -> None:
        self.table, self.time, self.back = table, table.time or "day", back
        self.version = -1
        self.found: list[dict[str, Any]] = []
        self.written: datetime | None = None
        """When the newest file of the newest day was written, in UTC."""

    def rows(self) -> list[dict[str, Any]]:
        """The rows within `back` of the newest, which are included, oldest first; none while there is no table.

        Raises `LakeError` where its Delta log or a file is damaged.
        """
        if not any((self.table.path / "_delta_log").glob("*.json")):
            return []
        newest = self.table.delta()
        if newest.version() != self.version:
            self.found = self.read(newest)
            self.version = newest.version()
        return self.found

    def read(self, table: DeltaTable) -> list[dict[str, Any]]:
        adds = table.get_add_actions(flatten=True)
        written, days = (adds.column(name).to_pylist() for name in ("modification_time", "partition.day"))
        day = max((d for d in days if d), default=None)
        if day is None:
            return []
        self.written = datetime.fromtimestamp(max(at for at, d in zip(written, days, strict=True) if d == day) / 1000, UTC)
        wanted: list[tuple[str, str, Any]] = [("day", ">=", day - self.back - timedelta(days=1))]
        if f"max.{self.time}" in adds.schema.names:
            stated = [t for t in adds.column(f"max.{self.time}").to_pylist() if t]
            wanted += [(self.time, ">=", max(stated) - self.back)] if stated else []
        rows = self.within(table, wanted)
        if not rows:
            return []
        newest = max(row[self.time] for row in rows)
        return sorted((row for row in rows if row[self.time] >= newest - self.back), key=lambda row: row[self.time])

    def within(self, table: DeltaTable, wanted: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
        """The rows of the files that may hold what is wanted. Raises `LakeError` where one of them cannot be read."""
        from deltalake.exceptions import DeltaError
        from pyarrow import ArrowException

        try:
            return table.to_pyarrow_dataset(file_pruning_predicate=wanted).to_table().to_pylist()
        except (ArrowException, DeltaError, OSError) as error:
            because = str(error).splitlines()[0].rstrip(".")
            raise lake.LakeError(
                f"table {self.table.name} cannot be read ({because}); see what is damaged: tidemark verify"
            ) from None


class Look:
    """Reads what the screen shows, again and again, from the lake and from the streams' own files."""

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self.settings, self.catalog = settings, catalog
        site, pages, days = (f"views/{name}" for name in VIEWS)
        self.site = Newest(lake.Table(settings.lake_path, site, "mark"), TRAIL)
        self.pages = Newest(lake.Table(settings.lake_path, pages, "mark"), timedelta())
        self.days = Newest(lake.Table(settings.lake_path, days, "day"), timedelta(days=6))

    def now(self) -> Sight:
        pages = sorted(self.pages.rows(), key=lambda row: (-row["pv"], row["page"]))
        return Sight(
            tuple((row["mark"], row["pv"], row["uv"]) for row in self.site.rows()),
            tuple((row["page"], row["pv"], row["uv"]) for row in pages[:TOP]),
            tuple((row["day"], row["pv"], row["uv"], row["settled"]) for row in reversed(self.days.rows())),
            {name: local.status(self.settings, name) for name in lake.streams(self.settings, self.catalog.streams)},
            self.days.written,
        )


def sparkline(values: Sequence[int], width: int) -> str:
    """At most `width` bars over all the values, ending with the newest; the lowest value shown is the lowest bar."""
    values = values[:: -max(1, -(-len(values) // width))][::-1]
    low, high = min(values, default=0), max(values, default=0)
    return "".join(BARS[(v - low) * (len(BARS) - 1) // (high - low) if high > low else 0] for v in values)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def visible(text: str) -> str:
    """What would command a terminal, as Python writes it: a page, a key or a value is whatever somebody sent."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def age(then: datetime | None, now: datetime) -> str:
    """How long ago, in words; a clock that is ahead reads as now."""
    if then is None:
        return "–"
    seconds = max(0, round((now - then).total_seconds()))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"


def screen(sight: Sight, now: datetime, notes: Sequence[str] = ()) -> RenderableType:
    """The sight as one screen of about 80 by 30 characters."""
    parts: list[RenderableType] = []
    if sight.trail:
        mark, pv, uv = sight.trail[-1]
        site = Table.grid(padding=(0, 2))
        site.add_row("page views", Text(f"{pv:,}", style="bold"), sparkline([t[1] for t in sight.trail], 60))
        site.add_row("unique visitors", Text(f"{uv:,}", style="bold"), sparkline([t[2] for t in sight.trail], 60))
        parts.append(Panel(site, title=f"last hour at {mark:%H:%M:%S} UTC, {age(mark, now)}", title_align="left"))
        pages = Table(box=None, padding=(0, 2))
        pages.add_column("page", no_wrap=True, overflow="ellipsis")
        pages.add_column("page views", justify="right")
        pages.add_column("unique visitors", justify="right")
        for page, views, visitors in sight.pages:
            pages.add_row(Text(visible(page[:PAGE]).replace("\n", r"\n").replace("\t", r"\t")), f"{views:,}", f"{visitors:,}")
        parts.append(pages)
    else:
        parts.append(Text(waiting(sight, now)))
    parts += [Text(stream_line(name, status, now), style="dim") for name, status in sight.streams.items()]
    for n, (day, pv, uv, settled) in enumerate(sight.days[:2]):
        state = "settled" if settled else "live" if n else f"live, {age(sight.written, now)}"
        parts.append(Text(f"{day}  {pv:,} page views  {uv:,} unique visitors  {state}"))
    parts += [Text(note, style="cyan") for note in notes]
    return Group(*parts)


def waiting(sight: Sight, now: datetime) -> str:
    """What is said while there are no rows, with the way out where no stream runs."""
    beats = [status.get("heartbeat", {}) for status in sight.streams.values()]
    runs = any(beat.get("state") in local.ALIVE and not local.silent(beat, now) for beat in beats)
    return "waiting for the first rows" + ("" if runs else "; no stream runs, start them: tidemark up")


def line(sight: Sight, now: datetime) -> str:
    """The sight in one line, for a log."""
    streams = "; ".join(stream_line(name, status, now) for name, status in sight.streams.items())
    if not sight.trail:
        return f"{waiting(sight, now)}  ({streams})"
    mark, pv, uv = sight.trail[-1]
    return f"{mark:%H:%M:%S} UTC  last hour: {pv:,} page views, {uv:,} unique visitors  ({streams})"


def stream_line(name: str, status: dict[str, Any], now: datetime) -> str:
    """One stream in one line: its state, lag in records, records a second, its last batch's seconds, and its stream time.

    Of one that does not run now, a dash for its lag, and when its last batch ended.
    """
    beat, progress = status.get("heartbeat", {}), status.get("progress")
    state = beat.get("state", "not started")
    if local.silent(beat, now):
        state = f"silent since {age(datetime.fromisoformat(beat['at']), now).removesuffix(' ago')}"
    words = [f"stream {name}: {state}"]
    if beat.get("error"):
        said = visible(beat["error"].splitlines()[0])
        words.append(said if len(said) <= ERROR else f"{said[: ERROR - 1]}…")
    if progress:
        at = progress["stream_time"] and datetime.fromisoformat(progress["stream_time"])
        batch = f"batch {progress['seconds']:.1f} s"
        if local.runs_now(beat, now):
            words += [f"lag {number(progress['lag'])}", f"{number(progress['records_per_second'])} rows/s", batch]
        else:
            words += ["lag –", f"last {batch} at {datetime.fromisoformat(progress['finished_at']):%Y-%m-%d %H:%M:%S}"]
        words.append(f"stream time {at:%Y-%m-%d %H:%M:%S}" if at else "no event yet")
        words += [f"set aside: {', '.join(progress['set_aside'])}"] if progress.get("set_aside") else []
    return ", ".join(words)


def watch(
    settings: Settings,
    catalog: Catalog,
    console: Console,
    *,
    notes: Callable[[], Sequence[str]] = lambda: (),
    seconds: float | None = None,
) -> None:
    """Show the screen, looked at anew each second, until Ctrl-C or for so many seconds.

    Without a terminal: a line for each new mark, and each note once.
    """
    look, until = Look(settings, catalog), time.monotonic() + seconds if seconds is not None else None
    if console.is_terminal:
        with LiveScreen(console=console, auto_refresh=False, screen=False) as live:
            while until is None or time.monotonic() < until:
                live.update(screen(look.now(), datetime.now(UTC), notes()), refresh=True)
                time.sleep(EVERY)
        return
    told: set[str] = set()
    shown: object = ()
    while until is None or time.monotonic() < until:
        sight = look.now()
        if sight.mark != shown:
            shown = sight.mark
            console.print(line(sight, datetime.now(UTC)), soft_wrap=True, markup=False, highlight=False)
        for note in notes():
            if note not in told:
                told.add(note)
                console.print(note, soft_wrap=True, markup=False, highlight=False)
        time.sleep(EVERY)
