"""A run published over failed checks that a person names and takes upon themselves."""

from datetime import datetime
from typing import Any

from airflow.sdk import Param, dag, task
from tell import task_failed

from tidemark.settings import Settings


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    max_active_runs=1,
    default_args={"owner": "tidemark", "pool": "light", "retries": 0, "on_failure_callback": task_failed},
    params={
        "run": Param(type="string", minLength=3, description="The run that was held back; its gate's log names it."),
        "checks": Param(type="array", items={"type": "string"}, minItems=1, description="The failed checks, each by its name."),
        "reason": Param(type="string", minLength=3, description="Why; the page, the report and each table's history show it."),
    },
    tags=["settled", "form"],
)
def publish_over() -> None:
    """
    ### Publish over failed checks

    Only tables whose every failed check is named here are published, and what was held back for them alone.
    """

    @task
    def publish(params: dict[str, Any]) -> list[str]:
        from tidemark import settle
        from tidemark.pipelines import CATALOG

        done = settle.publish(Settings(), CATALOG, params["run"], over=params["checks"], reason=params["reason"])
        return [p.table for p in done if p.version is not None]

    publish()


publish_over()
