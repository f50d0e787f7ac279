"""The report of a night: pictures and numbers beside the tables, whether its gates held or not."""

from datetime import date, datetime

from airflow.sdk import Asset, dag, task
from airflow.timetables.assets import AssetOrTimeSchedule
from airflow.timetables.trigger import CronTriggerTimetable
from tell import task_failed

from tidemark.settings import Settings

SETTINGS = Settings()


@dag(
    # With the night's end; and at six, with what there is, where it has not ended by then.
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("0 6 * * *", timezone=SETTINGS.zone), assets=[Asset("tidemark_night")]
    ),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "tidemark", "pool": "light", "retries": 1, "on_failure_callback": task_failed},
    tags=["settled", "report"],
)
def nightly_report() -> None:
    """
    ### The report of each night

    Page views and visitors by hour and page, against the day and the week before; live against settled; late records,
    rejects, verdicts, lag; days restated since the last report. If a gate held the day back, the last good day and the failed
    check. Written to `reports/` of the lake, with the numbers as CSV; the page opens it by its day in *Live against settled*.
    """

    @task
    def report(triggering_asset_events=None, dag_run=None) -> list[str]:
        from tidemark import lake, notify, settle
        from tidemark import report as reports
        from tidemark.model import OLDEST
        from tidemark.pipelines import CATALOG

        events = [e for many in (triggering_asset_events or {}).values() for e in many]
        last = settle.yesterday(SETTINGS)
        told = {date.fromisoformat(e.extra["day"]) for e in events if e.extra.get("day")}
        # A night may have no day, one that is not over, or one that was refused.
        days = {day for day in told if OLDEST <= day <= last} if events else {last}
        reported = reports.reported(SETTINGS)
        if not events and dag_run.run_type == "scheduled" and last in reported:
            return []  # the night has brought it
        # A night that others were missed before, or that records came late for, has settled their days too.
        runs = [lake.run_of(SETTINGS, run) for e in events for run in e.extra.get("runs", ())]
        settled = {date.fromisoformat(day) for run in runs for day in run.days}
        days |= settled - reported
        written = []
        for day in sorted(days | settled):
            written.append(str(reports.report(SETTINGS, CATALOG, day)))
            if day in days:  # people have heard of the others
                notify.notify(SETTINGS, "report", f"Report of {day}", f"It is in {written[-1]}")
        return written

    report()


nightly_report()
