"""Everything again from offset zero, beside the stream: checked, compared, and published when a person says so."""

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.operators.hitl import HITLBranchOperator
from airflow.sdk import Param, dag, task
from tell import report, task_failed

from tidemark import session
from tidemark.airflow import ROOT
from tidemark.settings import Settings

SETTINGS = Settings()
RUN = "{{ ti.xcom_pull('plan') }}"
SHOWN = 30_000
"""Characters of the comparison that the approval shows; the whole of it lies beside the run's record."""


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    max_active_runs=4,
    default_args={"owner": "tidemark", "pool": "light", "on_failure_callback": task_failed},
    params={
        "tables": Param(
            None,
            type=["null", "string"],  # an empty `string` counts as missing, and the form could not be sent
            pattern=r"^ *(\w+ *(, *\w+ *)*)?$",  # of commas alone everything would be replayed
            description="Rollups and views, with commas between; all where empty.",
        ),
        "first": Param(None, type=["null", "string"], format="date", description="From this day; from offset zero where empty."),
        "source": Param("kafka", enum=["kafka", "log"], description="Kafka while it holds offset zero, else the log."),
        "promote": Param("by a person", enum=["by a person", "automatically"], description="Who publishes."),
        "largest": Param(
            0,
            type="integer",
            minimum=0,
            description="Automatically only when at most so many rows change, go or come; else a person.",
        ),
        "reason": Param(type="string", minLength=3, description="Why; it is kept in the run and in each table's history."),
    },
    tags=["settled", "form"],
)
def reprocess() -> None:
    """
    ### Replay, compare, approve, publish

    Every day again, staged beside what is live: readers see nothing of it, the stream runs on and the replay waits where
    the stream is behind. Then *Required Action* shows what would change, by table and day, with samples; **Publish** makes
    all days the new ones in one commit a table, **Drop** deletes what was staged. Cut off, it goes on after its last part.
    Taken back by `rollback`. Days that have a report get it anew.
    """

    @task(retries=0, on_failure_callback=None)  # whoever has filled in the form reads why it is refused
    def plan(params: dict[str, Any], run_id: str) -> str:
        """Refuse what cannot be, say what it will take, and name the run."""
        import hashlib

        import structlog

        from tidemark import lake, settle
        from tidemark.model import readers
        from tidemark.pipelines import CATALOG

        only = [name.strip() for name in (params["tables"] or "").split(",") if name.strip()]
        known = [d.name for d in CATALOG.derived]
        if wrong := [name for name in only if name not in known]:
            raise ValueError(f"there is no rollup or view {', '.join(wrong)}; there are {', '.join(known)}")
        if params["first"] and date.fromisoformat(params["first"]) > settle.yesterday(SETTINGS):
            raise ValueError(f"{params['first']} is not over in {SETTINGS.zone}")
        name = f"reprocess-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"
        for known in (run for run in lake.runs(SETTINGS) if run.id == name):  # it is cleared
            settle.refuse_dropped(known)
        settle.refuse_undecided(SETTINGS, name)
        chosen = [CATALOG[n] for n in readers(CATALOG, only or CATALOG.names)]
        settle.refuse_other_code(SETTINGS, chosen)
        first = date.fromisoformat(params["first"]) if params["first"] else None
        days, records, seconds = settle.estimate(SETTINGS, CATALOG, only, first)
        log = structlog.get_logger()
        log.info(f"{days} days, {records:,} records: about {seconds / 60:.0f} minutes", run=name, tables=[d.name for d in chosen])
        return name

    replay = SparkSubmitOperator(
        task_id="replay",
        application=str(ROOT / "spark_apps" / "replay.py"),
        application_args=[
            "--run",
            RUN,
            "--reason",
            "{{ params.reason }}",
            "--source",
            "{{ params.source }}",
            "--only",
            "{{ (params.tables or '') | replace(' ', '') }}",
            "--from",
            "{{ params.first or '' }}",
        ],
        name="tidemark-reprocess",
        pool="spark",
        retries=2,
        retry_delay=timedelta(seconds=20),
        **session.submitted(SETTINGS, optimize=True),
    )

    @task(retries=0)
    def compare(run: str) -> str:
        """What the run would change, as Markdown; gates that failed first."""
        from tidemark import lake
        from tidemark.compare import cell

        record = lake.run_of(SETTINGS, run)
        held = [
            f"* **{n}** is held back: {cell('; '.join(t['reasons']))}" for n, t in record.tables.items() if t["gate"] != "passed"
        ]
        told = (SETTINGS.lake_path / "runs" / run / "compare.md").read_text()
        cut = f"\n\n… the rest is in `runs/{run}/compare.md` of the lake." if len(told) > SHOWN else ""
        return "\n".join([*held, "", told[:SHOWN] + cut])

    @task.branch(retries=0)
    def decide(run: str, params: dict[str, Any]) -> str:
        """To `publish` where it may go by itself, else to a person."""
        import structlog

        from tidemark import lake

        tables = lake.run_of(SETTINGS, run).tables.values()
        changed = sum(t.get("compare", {}).get(what, 0) for t in tables for what in ("changed", "extra", "missing"))
        by_itself = params["promote"] == "automatically"
        if by_itself and changed <= params["largest"] and all(t["gate"] == "passed" for t in tables):
            return "publish"
        if by_itself:
            structlog.get_logger().warning("a person decides", changed=changed, largest=params["largest"])
        return "approve"

    approve = HITLBranchOperator(
        task_id="approve",
        subject=f"Publish {RUN}? {{{{ params.reason }}}}",
        body="{{ ti.xcom_pull('compare') }}",
        options=["Publish", "Drop"],
        options_mapping={"Publish": "publish", "Drop": "drop"},
        # An answer within a second of the question may find Airflow still noting that it was asked: then it asks again.
        retries=10,
        retry_delay=timedelta(seconds=5),
    )

    def ways(ti: Any, branch: str) -> Sequence[str]:
        """The tasks that a branch goes on with; none where it was marked a success: of that Airflow takes every way."""
        from airflow.providers.standard.utils.skipmixin import XCOM_SKIPMIXIN_FOLLOWED, XCOM_SKIPMIXIN_KEY

        return (ti.xcom_pull(branch, key=XCOM_SKIPMIXIN_KEY) or {}).get(XCOM_SKIPMIXIN_FOLLOWED, ())

    @task(trigger_rule="none_failed_min_one_success", retries=1)
    def publish(run: str, ti: Any) -> None:
        """All days in one commit a table."""
        from airflow.sdk.exceptions import AirflowFailException

        from tidemark import settle
        from tidemark.pipelines import CATALOG

        by_itself = ways(ti, "decide") == ["publish"]
        if not by_itself and "publish" not in ways(ti, "approve"):
            raise AirflowFailException(
                "approve was marked a success, and nobody has answered Publish. Clear approve, and it asks again; "
                f"or publish it by: tidemark publish {run}"
            )
        done = settle.publish(SETTINGS, CATALOG, run, again=False)
        if held := [f"{p.table}: {'; '.join(p.blocked)}" for p in done if p.blocked]:
            raise AirflowFailException(f"published, but for {' | '.join(held)}")  # another try would find the same

    @task(retries=1)
    def drop(run: str, ti: Any) -> None:
        """What was staged is deleted; the run's record stays."""
        from airflow.sdk.exceptions import AirflowSkipException

        from tidemark import lake
        from tidemark.pipelines import CATALOG

        if "drop" not in ways(ti, "approve"):
            raise AirflowSkipException("nobody has answered Drop")
        lake.drop(SETTINGS, CATALOG, lake.run_of(SETTINGS, run))

    run = plan()
    decided = decide(run)
    run >> replay >> compare(run) >> decided
    published, dropped = publish(run), drop(run)
    decided >> [approve, published]
    approve >> [published, dropped]
    published >> task(report)(run).as_teardown()


reprocess()
