"""Whose turn it is: tonight's run goes before backfills, older nights and replays."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from airflow.plugins_manager import AirflowPlugin
from airflow.task.priority_strategy import PriorityWeightStrategy

if TYPE_CHECKING:
    from airflow.models.taskinstance import TaskInstance

FIRST, LATER = 20, 1
"""The weight of a task: more than a replay's, which has seven because six tasks follow it; and less than that."""
OLD = timedelta(days=2)


class TonightFirst(PriorityWeightStrategy):
    """A `weight_rule`: what waits for a slot of a pool goes by its weight first, and only then the oldest day before others.

    A backfill that takes up a night's own run keeps that run's name; so does a night that is cleared later. Both are told by the
    time in it. What a person asks for by the form is asked for now.
    """

    def get_weight(self, ti: TaskInstance) -> int:
        old = f"scheduled__{datetime.now(UTC) - OLD:%Y-%m-%dT%H}"
        backfill = ti.run_id.startswith("backfill__")
        return LATER if backfill or (ti.run_id.startswith("scheduled__") and ti.run_id < old) else FIRST


class Turns(AirflowPlugin):
    """Has the scheduler know the rule by its name."""

    name = "tidemark_turns"
    priority_weight_strategies: ClassVar[list[type[PriorityWeightStrategy]]] = [TonightFirst]
