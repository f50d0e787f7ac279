"""Once a day: small files merged, what is kept no longer deleted, Airflow's own database and logs tidied."""

from datetime import datetime, timedelta

from airflow.sdk import dag, task
from airflow.timetables.trigger import CronTriggerTimetable
from tell import task_failed

from tidemark.settings import Settings

SETTINGS = Settings()
KEEP_AIRFLOW = timedelta(days=60)


@dag(
    schedule=CronTriggerTimetable("30 3 * * *", timezone=SETTINGS.zone),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "tidemark", "pool": "light", "retries": 1, "on_failure_callback": task_failed},
    tags=["upkeep"],
)
def maintenance() -> None:
    """
    ### Upkeep

    Nothing inside a table's time-travel promise, of an undecided run or of a publication that can be taken back is touched.
    """

    @task
    def expire() -> None:
        """Log days beyond a topic's `keep`; verdicts, runs and old checkpoints beyond `TIDEMARK_KEEP_RECORDS`."""
        from tidemark import lake
        from tidemark.pipelines import CATALOG

        lake.expire_all(SETTINGS, CATALOG)

    @task(trigger_rule="all_done")  # what is damaged of one table keeps nothing else
    def sweep() -> int:
        """Folders that nothing names any more."""
        from tidemark import lake
        from tidemark.pipelines import CATALOG

        tables = [lake.table(SETTINGS, CATALOG[name]) for name in CATALOG.names]
        return len(lake.sweep(SETTINGS, [*tables, lake.ledger(SETTINGS), lake.verdicts(SETTINGS)]))

    @task
    def logs() -> list[str]:
        """What the stream, Airflow and the others have written, where it is longer than 16 MiB: it begins again."""
        from tidemark import local

        return [log.name for log in local.turn_logs(SETTINGS)]

    @task(pool="spark")
    def compact() -> str:
        """Live files of tables whose stream does not run; one that runs merges its own."""
        import subprocess
        import sys

        done = subprocess.run([sys.executable, "-m", "tidemark", "compact"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])
        return done.stderr.strip().splitlines()[-1]

    @task
    def docs() -> int:
        """Pages of validations older than sixty days."""
        import time

        from tidemark.quality import PAGES_KEPT

        old, gone = time.time() - PAGES_KEPT.total_seconds(), 0
        for page in (SETTINGS.home / "docs").rglob("validations/**/*"):
            if page.is_file() and page.stat().st_mtime < old:
                page.unlink()
                gone += 1
        return gone

    @task
    def airflow_database() -> None:
        """Runs, XComs and who did what, older than sixty days."""
        from datetime import UTC

        from tidemark import airflow

        before = (datetime.now(UTC) - KEEP_AIRFLOW).isoformat()
        airflow.command(SETTINGS, "db", "clean", "--clean-before-timestamp", before, "--skip-archive", "--yes", seconds=600)

    @task
    def airflow_logs() -> int:
        """What tasks and Airflow's processes logged more than sixty days ago: its own tidying leaves the files."""
        import os
        import time
        from contextlib import suppress

        from tidemark import airflow

        old = time.time() - KEEP_AIRFLOW.total_seconds()
        logs = [f for f in (airflow.home(SETTINGS) / "logs").rglob("*") if f.is_file() and f.stat().st_mtime < old]
        for log in logs:
            log.unlink()
            with suppress(OSError):  # it holds younger ones
                os.removedirs(log.parent)
        return len(logs)

    expire() >> sweep()
    logs()
    compact()
    docs()
    airflow_database()
    airflow_logs()


maintenance()
