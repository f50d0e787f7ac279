"""When a night begins: at the business zone's midnight, in zones too that leave one out."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from airflow.plugins_manager import AirflowPlugin
from airflow.timetables.base import Timetable
from airflow.timetables.interval import CronDataIntervalTimetable

if TYPE_CHECKING:
    from pendulum import DateTime


class EachMidnight(CronDataIntervalTimetable):
    """A run for each day of a zone, once it is over: `EachMidnight("0 0 * * *", timezone=…)`.

    Where the clock goes from 00:00 to 01:00, as in Cairo, Airflow 3.3.2 takes the 00:00 that never was, which is 01:00, for the
    midnight before 01:00: a run by hand would be of no time at all, and a night that is late, of the day that has just begun.
    """

    def _get_prev(self, current: DateTime) -> DateTime:
        before = super()._get_prev(current)
        return before if before < current else super()._get_prev(current - timedelta(seconds=1))


class Midnights(AirflowPlugin):
    """Has the scheduler know the timetable by its name."""

    name = "tidemark_midnights"
    timetables: ClassVar[list[type[Timetable]]] = [EachMidnight]
