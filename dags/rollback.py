"""A publication taken back, by a form and with a reason."""

from datetime import datetime
from typing import Any

from airflow.sdk import Param, dag, task
from tell import Refused, report, task_failed

from tidemark.settings import Settings


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    max_active_runs=1,
    default_args={"owner": "tidemark", "pool": "light", "retries": 0, "on_failure_callback": task_failed},
    params={
        "run": Param(
            type="string", minLength=3, description="The run whose publication is taken back; `tidemark runs` lists them."
        ),
        "reason": Param(type="string", minLength=3, description="Why; it is kept in the run and in each table's history."),
    },
    tags=["settled", "form"],
)
def rollback() -> None:
    """
    ### Take a publication back

    Each table as it was before the run, in one commit a table; only the newest publication of its days. Days that have a report
    get it anew.
    """

    @task
    def take_back(params: dict[str, Any]) -> list[str]:
        from tidemark import lake, settle
        from tidemark.pipelines import CATALOG

        try:
            return [p.table for p in settle.rollback(Settings(), CATALOG, params["run"], params["reason"])]
        except (KeyError, settle.SettleError, lake.LakeError) as error:
            raise Refused(error.args[0]) from None

    take_back() >> task(report)("{{ params.run }}").as_teardown()


rollback()
