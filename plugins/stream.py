"""What keeps a stream alive: an operator that starts or adopts it, and a trigger that watches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psutil
from airflow.sdk import BaseOperator, RetryDecision, RetryPolicy
from airflow.triggers.base import BaseTrigger, TriggerEvent
from tell import TOLD, Alarms, tell

if TYPE_CHECKING:
    from airflow.sdk import Context

LOOK = 2.0
"""Seconds between two looks at the stream's heartbeat and progress."""
SAY = 30.0
"""Seconds between two lines of progress in the task's log: 120 an hour."""
DRAINS = timedelta(minutes=3)
"""How long a stream that was asked to end may finish its batch, and what is beside it, without a heartbeat."""
LONGEST = timedelta(minutes=10)
"""The longest that a watcher whose stream died too often waits before it tries again."""
LEFT = timedelta(minutes=5)
"""How long a stream that has drained and is wanted may wait for its own watcher to start it again; a dead one, `LONGEST` more."""


class WatchStream(BaseOperator):
    """Have a stream run, or adopt the one that does, and watch it until its run is as old as the window; the stream outlives it.

    It is started again when it dies, or when it lives and its heartbeat is older than `TIDEMARK_STALE_AFTER`. Clearing or
    marking the task asks it to drain, however long its batch takes, and then it begins again. Wanted stopped (DAG `control`), it
    is left stopped and the task says so. With the back end `service` nothing is started or killed here: that is its container's,
    and one whose heartbeat is too old is told of. One that dies five times within one window, or hangs so often, is told of; one
    that dies `deaths` times fails the task with the end of its log.
    """

    def __init__(self, *, stream: str, window: float, deaths: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream, self.window, self.deaths = stream, window, deaths

    def execute(self, context: Context) -> None:
        # Not from now on: the other streams' watchers end with the run, and only the next one has all of them again.
        self.watch(context["dag_run"].start_date.timestamp() + self.window, died=0)

    def watch(self, until: float, died: int, hung: int = 0) -> None:
        from tidemark import local
        from tidemark.settings import Settings

        settings = Settings()
        wanted = local.wanted(settings, self.stream)
        if local.beats(settings, self.stream):
            self.log.info("adopted stream %s, pid %s", self.stream, local.status(settings, self.stream)["heartbeat"]["pid"])
        elif wanted["state"] == "stopped":
            self.log.info("stream %s is wanted stopped, by %s: %s", self.stream, wanted["by"], wanted["reason"])
        elif settings.stream_backend == "process":
            process = local.start_stream(settings, self.stream)
            self.log.info("started stream %s, pid %s, its log is %s", self.stream, process.pid, process.log)
        else:
            self.log.info("stream %s is a service; its container starts it", self.stream)
        so_far = {"until": until, "died": died, "hung": hung}
        self.defer(trigger=StreamTrigger(self.stream, until), method_name="resume", kwargs=so_far)

    def resume(self, context: Context, event: dict[str, Any], until: float, died: int, hung: int = 0) -> str:
        """What the trigger saw: the window is over, or the stream must be started again."""
        from tidemark import local
        from tidemark.settings import Settings

        if event["what"] == "over" or datetime.now(UTC).timestamp() >= until:
            return event["said"]  # what there is to start, the next run does
        settings = Settings()
        self.log.warning("stream %s %s: %s", self.stream, event["what"], event["said"])
        log = settings.state / "logs" / f"speed-{self.stream}.log"
        if event["what"] == "failed":
            died += 1
            if died == TOLD or died >= self.deaths:
                tell("stream_down", f"Stream {self.stream} died {died} times", event["said"], stream=self.stream, log=str(log))
            if died >= self.deaths:
                end = log.read_text(errors="replace")[-3000:] if log.exists() else ""
                raise RuntimeError(f"stream {self.stream} died {died} times in one window; the end of {log}:\n{end}")
        if event["what"] == "stale" and look(self.stream)[0] == "stale":  # while this task waited, another one may have begun
            with suppress(psutil.NoSuchProcess):
                silent = psutil.Process(local.status(settings, self.stream)["heartbeat"]["pid"])
                family = [silent, *silent.children(recursive=True)]  # a JVM that hangs does not end with it
                for one in family:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
                psutil.wait_procs(family, 10)  # else it is adopted while it ends
            hung += 1
            if hung == TOLD:
                tell("stream_down", f"Stream {self.stream} hung {hung} times", event["said"], stream=self.stream, log=str(log))
        self.watch(until, died, hung)
        raise AssertionError("watch defers")


class WithinItsRun(RetryPolicy):
    """A watcher that has failed begins again after a minute, then after two, and so on up to `LONGEST`; and at the latest when
    its run is as old as the window: the other streams' watchers end then, and only the next run has all of them."""

    def __init__(self, window: float) -> None:
        self.window = window

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        pause = min(timedelta(minutes=2 ** (min(try_number, 9) - 1)), LONGEST)
        if context:
            end = context["dag_run"].start_date + timedelta(seconds=self.window)
            pause = max(min(pause, end - datetime.now(UTC)), timedelta(0))
        return RetryDecision.retry(pause)


class StreamTrigger(BaseTrigger):
    """Looks every two seconds; fires `over`, `failed` (it died), `ended` (it drained and is wanted) or `stale`."""

    def __init__(self, stream: str, until: float) -> None:
        super().__init__()
        self.stream, self.until = stream, until

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return ("stream.StreamTrigger", {"stream": self.stream, "until": self.until})

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from tidemark.model import duration
        from tidemark.settings import Settings

        told, at = "", 0.0
        alarms, began = Alarms(self.stream), datetime.now(UTC)
        since = datetime.fromtimestamp(self.until, UTC) - duration(Settings().watch_window)  # the run's begin
        try:
            while True:
                now = datetime.now(UTC).timestamp()
                what, said = await asyncio.to_thread(look, self.stream, alarms.since)
                if said != told and (now - at >= SAY or what != "runs"):
                    self.log.info(said)
                    told, at = said, now
                await asyncio.to_thread(alarms.look)
                await asyncio.to_thread(alarms.down, what == "silent", said)
                if what in ("failed", "ended", "stale"):
                    yield TriggerEvent({"what": what, "said": said})
                    return
                if now >= self.until or await asyncio.to_thread(left, self.stream, since, began):
                    yield TriggerEvent({"what": "over", "said": said})
                    return
                await asyncio.sleep(LOOK)
        finally:
            alarms.keep()  # since when, and the batches seen, for whoever watches next

    async def on_kill(self) -> None:
        """Someone cleared or marked the task: the stream drains, and whoever watches it next starts it afresh."""
        await asyncio.to_thread(drain, self.stream)


def look(stream: str, since: datetime | None = None) -> tuple[str, str]:
    """How a stream is, and a line that says it: `runs`, `stopped` (as wanted), `failed`, `ended`, `stale` (also one that has
    said its last and whose process stays), or `silent`, which is a service that should beat and does not, or a process that
    takes too long to start. `since` is when it was first looked at."""
    from tidemark import local
    from tidemark.model import duration
    from tidemark.settings import Settings

    settings = Settings()
    status, wanted = local.status(settings, stream), local.wanted(settings, stream)
    beat = status.get("heartbeat", {})
    state, service = beat.get("state"), settings.stream_backend == "service"
    now = datetime.now(UTC)
    age = now - (datetime.fromisoformat(beat["at"]) if beat else since or now)
    asked = now - datetime.fromisoformat(wanted["at"]) if wanted["again"] or wanted["state"] == "stopped" else DRAINS
    # One that starts says nothing until Spark is there.
    silent = age > (local.STARTING if state in (None, "starting") else duration(settings.stale_after))
    if local.beats(settings, stream):
        if silent and asked < DRAINS:
            return "runs", f"pid {beat['pid']} drains, as {wanted['by']} asked: {wanted['reason']}"
        if silent and state == "starting":  # it may be at work, and would be killed at the same place again
            return "silent", f"pid {beat['pid']} starts, and has said nothing for {age.total_seconds():.0f} s; see its log"
        if silent:
            return "stale", f"pid {beat['pid']} has not beaten for {age.total_seconds():.0f} s"
        return "runs", line(beat, status.get("progress"))
    process = local.running(settings, f"speed-{stream}")
    if process and state in ("failed", "stopped") and beat["pid"] == process.pid:
        last = f"pid {process.pid} has drained" if state == "stopped" else f"pid {process.pid} has failed: {beat.get('error')}"
        return ("stale", f"{last}; it has not ended for {age.total_seconds():.0f} s") if silent else ("runs", f"{last}; it ends")
    if process or (service and state in (None, "held") and not silent):
        return "runs", "starting"
    if wanted["state"] == "stopped":
        return "stopped", f"stopped, as {wanted['by']} asked: {wanted['reason']}"
    if service and silent and not beat:
        return "silent", f"it has never beaten, and is watched for {age.total_seconds():.0f} s; its container has to begin"
    if service and silent and asked >= DRAINS:
        return "silent", f"{state}, and has not beaten for {age.total_seconds():.0f} s; its container has to begin again"
    if service:
        return "runs", f"{state}: waiting for its container"
    if beat.get("state") == "stopped":
        return "ended", "drained, and wanted running"
    return "failed", beat.get("error") or "ended without a word"


def left(stream: str, since: datetime, began: datetime) -> bool:
    """Whether another stream has drained or died since the run began, is wanted, and nobody has started it again: its task was
    marked. The next run does, and this one lasts for as long as one stream is watched. `began` is when this watch did: after a
    time without Airflow each stream's own watcher comes first."""
    from tidemark import local
    from tidemark.pipelines import CATALOG
    from tidemark.settings import Settings

    settings = Settings()
    for other in CATALOG.streams:
        if other == stream or (how := look(other)[0]) not in ("ended", "failed"):
            continue
        if beat := local.status(settings, other).get("heartbeat"):
            ended, wanted = (datetime.fromisoformat(one["at"]) for one in (beat, local.wanted(settings, other)))
            patience = LEFT if how == "ended" else LEFT + LONGEST
            if ended > since and max(ended, wanted, began) < datetime.now(UTC) - patience:
                return True
    return False


def line(beat: dict[str, Any], progress: dict[str, Any] | None) -> str:
    if not progress:
        return f"pid {beat['pid']}, {beat['state']}, no batch yet"
    aside = f", set aside: {', '.join(progress['set_aside'])}" if progress.get("set_aside") else ""
    slowest = progress.get("slowest")
    slow = f", slowest {slowest} {progress['timings'][slowest]:.2f} s" if slowest else ""
    return (
        f"pid {beat['pid']}, {beat['state']}, batch {progress['seq']}: {progress['records']:,} records in "
        f"{progress['seconds']:.2f} s, {progress['records_per_second']:,} a second, lag {progress['lag']:,}{slow}{aside}"
    )


def drain(stream: str) -> None:
    """Ask a stream to end after its batch and to begin again. Nobody waits for it here: Airflow would for half a minute only."""
    from tidemark import local
    from tidemark.settings import Settings

    settings = Settings()
    if local.wanted(settings, stream)["state"] == "running":
        local.want(settings, stream, "running", "the task was cleared or marked", "Airflow", again=True)
