"""Telling people from Airflow: what failed, what is late, what differs, and days anew; the notifier gives it its channels."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemark.notify import What

OVER = timedelta(minutes=10).total_seconds()
"""The span of batches over which the share of rejects is taken."""
FEW = 100
"""So many rejects are not a surge yet, whatever their share."""
TOLD = 5
"""Deaths of a stream in one window before somebody is told of them, and as many times that it hung."""


class Refused(ValueError):
    """A form asks for what cannot be. Whoever has filled it in reads why, and nobody else is told.

    Known by its mark: Airflow loads each file of `plugins/` once more than its imports do, in the order of the folder, so that
    one process may have this class twice.
    """

    form = True


def tell(what: What, title: str, text: str, **fields: Any) -> None:
    from tidemark import notify
    from tidemark.settings import Settings

    notify.notify(Settings(), what, title, text, **fields)


def task_failed(context: Any) -> None:
    """`on_failure_callback` of a task whose retries are used up, or whose form is refused."""
    if getattr(context.get("exception"), "form", False):
        return
    ti = context["ti"]
    tell("run_failed", f"{ti.dag_id}: {ti.task_id} failed", str(context.get("exception") or ""), run=ti.run_id)


def report(run: str) -> list[str]:
    """A task: the reports that the run's days have, anew. Of one that cannot be written somebody is told, and no more."""
    from tidemark.pipelines import CATALOG
    from tidemark.report import again
    from tidemark.settings import Settings

    return [str(page) for page in again(Settings(), CATALOG, run)]


def gate_failed(context: Any) -> None:
    """`on_failure_callback` of a gate; its exception names table, check, rows and what follows."""
    ti = context["ti"]
    tell("gate_failed", f"{ti.dag_id}: a table is held back", str(context.get("exception") or ""), run=ti.run_id)


def differences(run: Any) -> None:
    """Tell of the views of a settled run of which rows differ from what was live, and no late event explains it."""
    counts = {name: said["compare"].get("unexplained") for name, said in run.tables.items() if said.get("compare")}
    if found := {name: count for name, count in counts.items() if count}:
        words = ", ".join(f"{name} ({count:,} rows)" for name, count in found.items())
        tell("unexplained_difference", f"{words} differ from what was live", f"tidemark compare {run.id} shows some", run=run.id)


async def night_is_late(context: dict[str, Any] | None = None, **_: Any) -> None:
    """The deadline of `nightly` has passed. Runs in the triggerer. Days of a backfill wait for each other, and are not late."""
    run = (context or {}).get("dag_run", {})  # as the REST API shows one
    if run.get("run_type") != "backfill" and await asyncio.to_thread(unpublished, run):
        await asyncio.to_thread(tell, "nightly_late", "A night is late", f"run {run.get('dag_run_id')}")


def unpublished(run: Mapping[str, Any]) -> bool:
    """Whether a view has no publication of a night's day, though it was over when the night was asked for."""
    from tidemark import lake
    from tidemark.pipelines import CATALOG
    from tidemark.settings import Settings

    settings = Settings()

    def on(at: str) -> date:
        return datetime.fromisoformat(at).astimezone(settings.tz).date()

    asked, begins = (run["conf"] or {}).get("day"), run["data_interval_start"]
    day = date.fromisoformat(asked) if asked else begins and on(begins)
    if not day or day >= on(run["queued_at"]):
        return False  # it was refused, and whoever asked was told
    return any(day not in lake.settled_days(settings, lake.table(settings, view)) for view in CATALOG.views.values())


class Alarms:
    """A running stream's: told when it begins to be so, and again only once it was over, whoever watches it by then."""

    def __init__(self, stream: str) -> None:
        from tidemark.settings import Settings

        self.stream, self.kept = stream, Settings().state / stream / "told.json"
        self.raised: set[str] = set()
        self.recent: deque[tuple[float, int, int, int]] = deque()
        self.deaths: deque[str] = deque(maxlen=TOLD)
        self.since = datetime.now(UTC)
        """When the stream was first looked at, whoever did."""
        with suppress(FileNotFoundError, ValueError):  # a power cut may have emptied it
            said = json.loads(self.kept.read_text())
            self.raised, self.recent = set(said["raised"]), deque(said["recent"])
            self.deaths.extend(said.get("deaths", []))
            self.since = datetime.fromisoformat(said.get("since", self.since.isoformat()))
        self.seq: int | None = None
        self.over, self.before = "stream_late" in self.raised, False
        """Whether the last batch seen said that it is late, and whether the one before it did."""

    def look(self) -> None:
        """Tell whether the stream is late, or rejects more than it should, by its progress and the settings' limits."""
        from tidemark import local
        from tidemark.model import duration
        from tidemark.settings import Settings

        settings = Settings()
        progress = local.status(settings, self.stream).get("progress")
        behind, batch = local.behind(settings, self.stream), local.under_way(settings, self.stream)
        late_after, lag = duration(settings.late_after), progress["lag"] if progress else 0
        if progress and progress["seq"] != self.seq:
            self.seq, self.before = progress["seq"], self.over
        self.over = behind > late_after
        # The first batch after a quiet hour says few records an hour; the next one knows how quick the stream is.
        late = (self.over and self.before) or batch > late_after
        said = f"{lag:,} records are unread, about {behind} of work; it has been at its batch for {batch}"
        self.turn("stream_late", late, f"Stream {self.stream} is late", said)
        records, rejects = self.count(progress)
        surge = rejects > FEW and rejects > settings.rejects_share * records
        said = f"{rejects:,} of the last {records:,} records were rejected; tidemark rejects shows why"
        self.turn("rejects_surge", surge, f"Stream {self.stream} rejects {rejects / max(records, 1):.0%} of its records", said)

    def down(self, silent: bool, said: str) -> None:
        """Tell of a stream that does not beat, or of a service that has died `TOLD` times within a window and not a window ago:
        nobody here starts it again. A service's deaths are what its heartbeat says; of a process its operator counts them."""
        from tidemark import local
        from tidemark.model import duration
        from tidemark.settings import Settings

        settings = Settings()
        beat = local.status(settings, self.stream).get("heartbeat", {})
        if settings.stream_backend == "service" and beat.get("state") == "failed" and beat["at"] not in self.deaths:
            self.deaths.append(beat["at"])
            self.keep()
        died, window = [datetime.fromisoformat(at) for at in self.deaths], duration(settings.watch_window)
        if len(died) == TOLD and max(died[-1] - died[0], datetime.now(UTC) - died[-1]) <= window:
            self.turn("stream_down", True, f"Stream {self.stream} died {TOLD} times", beat.get("error") or said)
        else:
            self.turn("stream_down", silent, f"Stream {self.stream} is silent", said)

    def count(self, progress: dict[str, Any] | None) -> tuple[int, int]:
        """Records and rejects of the batches seen that ended in the last ten minutes."""
        since = datetime.now(UTC).timestamp() - OVER
        if progress and (not self.recent or self.recent[-1][1] != progress["seq"]):
            ended = datetime.fromisoformat(progress["finished_at"]).timestamp()
            self.recent.append((ended, progress["seq"], progress["records"], progress["rejects"]))
        while self.recent and self.recent[0][0] < since:
            self.recent.popleft()
        return sum(r[2] for r in self.recent), sum(r[3] for r in self.recent)

    def turn(self, what: What, so: bool, title: str, text: str) -> None:
        if so == (what in self.raised):
            return
        if so:
            tell(what, title, text, stream=self.stream)
        self.raised ^= {what}
        self.keep()

    def keep(self) -> None:
        """Write down since when the stream is looked at, what was told, deaths and the batches seen: when what was told or the
        deaths change, and at the end of a watch."""
        from tidemark import lake

        with suppress(OSError):  # a full disk ends no watcher
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            said = {"raised": sorted(self.raised), "recent": [*self.recent], "deaths": [*self.deaths]}
            lake.whole_or_nothing(self.kept, json.dumps(said | {"since": self.since.isoformat()}))
