"""What keeps a stream alive: an operator that starts or adopts it, and a trigger that watches it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent
from tell import Alarms, tell

if TYPE_CHECKING:
    from airflow.sdk import Context

LOOK = 2.0
"""Seconds between two looks at the stream's heartbeat and progress."""
SAY = 30.0
"""Seconds between two lines of progress in the task's log: 120 an hour."""
TOLD = 5
"""Deaths of a stream in one window, before somebody is told of them."""


class WatchStream(BaseOperator):
    """Have a stream run, or adopt the one that does, and watch it for a window; the stream outlives the task.

    It is started again when it dies, or when it lives and its heartbeat is older than `TIDEMARK_STALE_AFTER`. Clearing or
    marking the task drains it. Wanted stopped (DAG `control`), it is left stopped and the task says so. With the back end
    `service` nothing is started here: the container does. One that dies five times within one window is told of; one that dies
    `deaths` times fails the task with the end of its log.
    """

    def __init__(self, *, stream: str, window: float, deaths: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream, self.window, self.deaths = stream, window, deaths

    def execute(self, context: Context) -> None:
        self.watch(datetime.now(UTC).timestamp() + self.window, died=0)

    def watch(self, until: float, died: int) -> None:
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
        self.defer(trigger=StreamTrigger(self.stream, until), method_name="resume", kwargs={"until": until, "died": died})

    def resume(self, context: Context, event: dict[str, Any], until: float, died: int) -> str:
        """What the trigger saw: the window is over, or the stream must be started again."""
        from tidemark import local
        from tidemark.settings import Settings

        if event["what"] == "over":
            return event["said"]
        settings = Settings()
        self.log.warning("stream %s %s: %s", self.stream, event["what"], event["said"])
        if event["what"] == "failed":
            died += 1
            log = settings.state / "logs" / f"speed-{self.stream}.log"
            if died == TOLD or died >= self.deaths:
                tell("stream_down", f"Stream {self.stream} died {died} times", event["said"], stream=self.stream, log=str(log))
            if died >= self.deaths:
                end = log.read_text(errors="replace")[-3000:] if log.exists() else ""
                raise RuntimeError(f"stream {self.stream} died {died} times in one window; the end of {log}:\n{end}")
        if event["what"] == "stale":
            with suppress(ProcessLookupError):
                os.kill(local.status(settings, self.stream)["heartbeat"]["pid"], signal.SIGKILL)
        self.watch(until, died)
        raise AssertionError("watch defers")


class StreamTrigger(BaseTrigger):
    """Looks every two seconds; fires `over`, `failed` (it died), `ended` (it drained and is wanted) or `stale`."""

    def __init__(self, stream: str, until: float) -> None:
        super().__init__()
        self.stream, self.until = stream, until

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return ("stream.StreamTrigger", {"stream": self.stream, "until": self.until})

    async def run(self) -> AsyncIterator[TriggerEvent]:
        told, at = "", 0.0
        alarms = Alarms(self.stream)
        while True:
            now = datetime.now(UTC).timestamp()
            what, said = await asyncio.to_thread(look, self.stream)
            if said != told and (now - at >= SAY or what != "runs"):
                self.log.info(said)
                told, at = said, now
            await asyncio.to_thread(alarms.look)
            if what in ("failed", "ended", "stale"):
                yield TriggerEvent({"what": what, "said": said})
                return
            if now >= self.until:
                yield TriggerEvent({"what": "over", "said": said})
                return
            await asyncio.sleep(LOOK)

    async def on_kill(self) -> None:
        """Someone cleared or marked the task: the stream is drained, so that the next run starts it afresh."""
        await asyncio.to_thread(drain, self.stream)


def look(stream: str) -> tuple[str, str]:
    """How a stream is: `runs`, `stopped` (as wanted), `failed`, `ended` or `stale`, and a line that says it."""
    from tidemark import local
    from tidemark.model import duration
    from tidemark.settings import Settings

    settings = Settings()
    status, wanted = local.status(settings, stream), local.wanted(settings, stream)
    beat = status.get("heartbeat", {})
    process = local.running(settings, f"speed-{stream}")
    if local.beats(settings, stream):
        age = (datetime.now(UTC) - datetime.fromisoformat(beat["at"])).total_seconds()
        # One that starts says nothing until Spark is there.
        if age > duration(settings.stale_after).total_seconds() and beat["state"] != "starting":
            return "stale", f"pid {beat['pid']} has not beaten for {age:.0f} s"
        return "runs", line(beat, status.get("progress"))
    if process or (settings.stream_backend == "service" and beat.get("state") in (None, "held")):
        return "runs", "starting"
    if wanted["state"] == "stopped":
        return "stopped", f"stopped, as {wanted['by']} asked: {wanted['reason']}"
    if settings.stream_backend == "service":
        return "runs", f"{beat.get('state', 'nothing')}: waiting for its container"
    if beat.get("state") == "stopped":
        return "ended", "drained, and wanted running"
    return "failed", beat.get("error") or "ended without a word"


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
    from tidemark import local
    from tidemark.settings import Settings

    settings = Settings()
    if settings.stream_backend == "service":
        local.want(settings, stream, "running", "the task was cleared or marked", "Airflow", again=True)
    elif not local.stop(settings, f"speed-{stream}", patience=25) and local.beats(settings, stream):
        (settings.state / stream / "stop").touch()
