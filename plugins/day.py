"""Waiting for a day to be complete: an operator and its trigger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException
from airflow.triggers.base import BaseTrigger, TriggerEvent
from tell import Refused

if TYPE_CHECKING:
    from airflow.sdk import Context

LOOK = 5.0
"""Seconds between two questions to Kafka and the checkpoint."""
AGAIN = timedelta(minutes=1)
"""Between two questions where a day is complete by the triggerer's code, which is that of its start, and not by that of now."""


class DayRefused(AirflowFailException, Refused):
    """A night of a day that no night can have."""


class WaitForDay(BaseOperator):
    """Wait until the streams have read all that Kafka held when a day, its lookahead and a grace were over.

    `day` is a business day, ISO, templated. Fails with what is missing `TIDEMARK_NIGHTLY_PATIENCE` after late records are waited
    for, and at once for a day that is not over or before 2000; neither is tried again, and the second is told to nobody.
    """

    template_fields = ("day",)

    def __init__(self, *, day: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.day = day

    def execute(self, context: Context) -> None:
        from tidemark import settle
        from tidemark.model import duration
        from tidemark.pipelines import CATALOG
        from tidemark.settings import Settings

        if not self.day:
            raise DayRefused("the run has neither a day in its form nor a data interval; trigger it with a day")
        settings = Settings()
        day = date.fromisoformat(self.day)
        try:
            settle.refuse_days(settings, [day])
        except settle.SettleError as refused:
            raise DayRefused(str(refused)) from None
        # Patience begins where late records are waited for no more: before that no stream could be quick enough.
        until = max(datetime.now(UTC), settle.complete_at(settings, CATALOG, day)) + duration(settings.nightly_patience)
        if unread(self.day) is None:
            return
        patience = until.timestamp()
        self.defer(trigger=DayTrigger(self.day, patience), method_name="resume", kwargs={"until": patience})

    def resume(self, context: Context, event: Any, until: float = 0.0) -> None:
        """The triggerer answers by the code that it was started with; that of now may look further ahead, and is asked last."""
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        if not (lacks := unread(self.day)):
            return
        if datetime.now(UTC).timestamp() >= until:
            raise AirflowFailException(f"{self.day} is not complete: {lacks}")
        self.log.info(lacks)
        self.defer(trigger=TimeDeltaTrigger(AGAIN), method_name="resume", kwargs={"until": until})


class DayTrigger(BaseTrigger):
    """Fires once the day is complete, or with what it lacks when the patience is over."""

    def __init__(self, day: str, until: float) -> None:
        super().__init__()
        self.day, self.until = day, until

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return ("day.DayTrigger", {"day": self.day, "until": self.until})

    async def run(self) -> AsyncIterator[TriggerEvent]:
        told = None
        while (lacks := await asyncio.to_thread(unread, self.day)) and datetime.now(UTC).timestamp() < self.until:
            if lacks != told:
                self.log.info(lacks)
                told = lacks
            await asyncio.sleep(LOOK)
        yield TriggerEvent({"lacks": lacks})


def unread(day: str) -> str | None:
    """What a day lacks to be complete, as a sentence; None where nothing."""
    from tidemark import settle
    from tidemark.pipelines import CATALOG
    from tidemark.settings import Settings

    return settle.lacking(Settings(), CATALOG, date.fromisoformat(day))
