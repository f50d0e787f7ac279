"""A run published over failed checks that a person names and takes upon themselves."""

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
        "run": Param(type="string", minLength=3, description="The run that was held back; its gate's log names it."),
        "checks": Param(type="array", items={"type": "string"}, minItems=1, description="The failed checks, each by its name."),
        "reason": Param(type="string", minLength=3, description="Why; the page, the report and each table's history show it."),
    },
    tags=["settled", "form"],
)
def publish_over() -> None:
    """
    ### Publish over failed checks

    Only tables whose every failed check is named here are published, and what was held back for them alone. Where another one
    whose failed check is named stays held back, the task is red and its log says why. Days that have a report get it anew.
    """

    @task
    def publish(params: dict[str, Any]) -> list[str]:
        from tidemark import lake, settle
        from tidemark.pipelines import CATALOG

        settings, over = Settings(), params["checks"]
        try:
            done = settle.publish(settings, CATALOG, params["run"], over=over, reason=params["reason"])
        except (KeyError, settle.SettleError, lake.LakeError) as error:
            raise Refused(error.args[0]) from None
        run, published = lake.run_of(settings, params["run"]), [p.table for p in done if p.version is not None]
        held = []
        for name in (p.table for p in done if p.blocked and {*over} & {*run.tables[p.table].get("failed", [])}):
            why = dict.fromkeys(reason for said in run.failing(name) for reason in said["reasons"])
            held.append(f"{name}: {'; '.join(why)}")
        if held:
            raise Refused(
                f"published {', '.join(published)} over {', '.join(over)}, but held back is {' | '.join(held)}. "
                "Name every check that failed, or mend the cause and settle again"
            )
        return published

    publish() >> task(report)("{{ params.run }}").as_teardown()


publish_over()
