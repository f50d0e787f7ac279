"""Every night: yesterday again from the log, exactly; checked, and published only where the checks hold."""

from datetime import date, datetime, timedelta
from pathlib import Path

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Asset, AssetAlias, AsyncCallback, DeadlineAlert, DeadlineReference, Param, dag, task, task_group
from day import WaitForDay
from midnight import EachMidnight
from tell import differences, gate_failed, night_is_late, task_failed

from tidemark import session
from tidemark.airflow import ROOT
from tidemark.model import duration
from tidemark.settings import Settings

SETTINGS = Settings()
OF_INTERVAL = f"data_interval_start.in_timezone('{SETTINGS.zone}').strftime('%Y-%m-%d') if data_interval_start else ''"
DAY = f"{{{{ params.day or ({OF_INTERVAL}) }}}}"
SAID = f"{SETTINGS.state}/runs/nightly-{{{{ run_id }}}}"
NIGHT = Asset("tidemark_night")
PUBLISHED = AssetAlias("tidemark_published")


def forget(context) -> None:
    """An earlier try of the night has left its runs' names, and this one may fail before it has a run."""
    Path(context["task"].render_template(SAID, context)).unlink(missing_ok=True)


@dag(
    schedule=EachMidnight("0 0 * * *", timezone=SETTINGS.zone),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={
        "owner": "tidemark",
        "pool": "light",
        "retries": 1,
        "retry_delay": timedelta(seconds=20),
        "on_failure_callback": task_failed,
        "weight_rule": "turn.TonightFirst",
    },
    params={"day": Param(None, type=["null", "string"], format="date", description="One day instead of the interval's.")},
    # A night may wait for the stream as long as the settings say; two hours more, and someone is told. In seconds: with a
    # `timedelta` Airflow 3.3.2 cannot clear a run (apache/airflow#70368).
    deadline=DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=(duration(SETTINGS.nightly_after) + duration(SETTINGS.nightly_patience) + timedelta(hours=2)).total_seconds(),
        callback=AsyncCallback(night_is_late),
    ),
    tags=["settled"],
)
def nightly() -> None:
    """
    ### Yesterday, exactly

    Waits until the streams have read the whole day, computes it again from the log in one Spark application, asks every check
    of exactly the staged files, and publishes table by table: a gate that fails holds back its own table and what reads it.
    The newest night also settles days again that got late records, and those whose nights were missed while Airflow was away or
    the DAG paused: 31 of them at most, newest first. Where a gate fails they are settled and published apart from the night's own
    day, so that neither holds the other back. Backfill works day by day.

    * **A gate is red**: its log names the check, the rows and the command that follows. Readers still see the state before.
    * **wait is red**: the stream has not read the day; see `speed_layer`.
    """

    wait = WaitForDay(task_id="wait", day=DAY, pool="wait", pre_execute=forget)

    @task
    def days(day: str) -> str:
        """The day; where none newer is complete, those before it too that got late records or whose night was missed."""
        from tidemark import settle
        from tidemark.pipelines import CATALOG

        mine, newest = date.fromisoformat(day), settle.newest_complete(SETTINGS, CATALOG)
        more = {*settle.stale(SETTINGS, CATALOG), *settle.missed(SETTINGS, CATALOG)} if mine == newest else set()
        return ",".join(str(d) for d in sorted({mine, *sorted(d for d in more if d < newest)[-31:]}))

    chosen = days(DAY)
    settle_them = SparkSubmitOperator(
        task_id="settle",
        application=str(ROOT / "spark_apps" / "settle.py"),
        application_args=["--days", "{{ ti.xcom_pull('days') }}", "--reason", "nightly", "--said", SAID],
        name="tidemark-nightly",
        pool="spark",
        pre_execute=forget,
        **session.submitted(SETTINGS),
    )

    @task
    def tables(said: str) -> list[dict[str, str]]:
        """The runs' tables, for a gate and a publication each."""
        from tidemark import compare, lake
        from tidemark.pipelines import CATALOG

        if not Path(said).exists():
            raise ValueError("settle has left no run: it was marked a success before it had one. Clear settle")
        runs = [lake.run_of(SETTINGS, name) for name in Path(said).read_text().split()]
        of = [(run, "" if run is runs[0] else f", {compare.stretch_in_words(run.days)}") for run in runs]
        return [
            {"run": run.id, "table": d.name, "name": f"{d.name}{days}"}
            for run, days in of
            for d in CATALOG.derived
            if d.name in run.tables
        ]

    @task_group
    def each(of: dict[str, str]) -> None:
        @task(map_index_template="{{ of }}", retries=0, on_failure_callback=gate_failed)
        def gate(of: dict[str, str]) -> None:
            """Red where a check of the staged files failed, with what it found."""
            from airflow.sdk import get_current_context

            from tidemark import lake

            get_current_context()["of"] = of["name"]
            run = lake.run_of(SETTINGS, of["run"])
            if held := run.held_back(of["table"]):
                # The night settles its own day again; those before it wait for a person, and it leaves them out.
                again = "clear this run" if of["name"] == of["table"] else f"settle its days again: {run.anew}"
                raise ValueError(
                    f"{of['table']} is held back: {'; '.join(held)}. Readers see it as it was. The rows are on the page, under "
                    f"Verdicts. Mend the cause and {again}; or publish over the check: DAG publish_over, run {run.id}"
                )

        @task(map_index_template="{{ of }}", outlets=[PUBLISHED])
        def publish(of: dict[str, str], outlet_events=None) -> int:
            """One commit of metadata; what the table reads is published before it."""
            from airflow.sdk import get_current_context

            from tidemark import lake, settle
            from tidemark.pipelines import CATALOG

            get_current_context()["of"] = of["name"]
            done = settle.publish(SETTINGS, CATALOG, of["run"], only=[of["table"]], again=False)
            if held := next((p.blocked for p in done if p.table == of["table"]), ()):  # whatever its gate is marked as
                raise ValueError(f"{of['table']} is held back: {'; '.join(held)}. To publish it all the same: DAG publish_over")
            run = lake.run_of(SETTINGS, of["run"])
            for day in run.days:
                outlet_events[PUBLISHED].add(Asset(f"tidemark_{of['table']}"), extra={"run": run.id, "day": day})
            return lake.table(SETTINGS, CATALOG[of["table"]]).delta().version()

        gate(of=of) >> publish(of=of)

    @task(trigger_rule="all_done", outlets=[NIGHT], retries=0)
    def night(said: str, day: str, outlet_events=None) -> None:
        """Tell the report that the night is over, however it went; and people, where rows differ that should not."""
        from tidemark import lake

        runs = Path(said).read_text().split() if Path(said).exists() else []
        for run in runs:
            differences(lake.run_of(SETTINGS, run))
        outlet_events[NIGHT].extra = {"day": day, "runs": runs}

    found = tables(SAID)
    wait >> chosen >> settle_them >> found
    each.expand(of=found) >> night(SAID, DAY).as_teardown()


nightly()
