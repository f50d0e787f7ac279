"""The speed layer: each stream started or adopted, watched, and started again when it dies."""

from datetime import datetime, timedelta

from airflow.sdk import dag, task
from stream import WatchStream, WithinItsRun
from tell import task_failed

from tidemark.model import duration
from tidemark.settings import Settings

WINDOW = duration(Settings().watch_window).total_seconds()


@dag(
    schedule="@continuous",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    max_consecutive_failed_dag_runs=3,
    default_args={"owner": "tidemark", "pool": "stream", "retries": 0, "on_failure_callback": task_failed},
    tags=["live"],
)
def speed_layer() -> None:
    """
    ### The streams, watched

    One run a watch window (`TIDEMARK_WATCH_WINDOW`, an hour); a task for each stream. The stream is a process of its own: it
    outlives the task, the run and every process of Airflow. The task's log has a line of progress twice a minute.

    * **It died, or does not beat**: started again. Five deaths in one window are told of, and so is one that hung five times.
      Fifteen deaths fail the try with the end of the stream's log; the next one begins a minute later, then after two, and so on
      up to ten, and with the run's end at the latest. Three failed runs pause this DAG.
    * **Clear or mark the task**: the stream finishes its batch, however long that takes, and begins again. The run
      of a task that was marked ends five minutes later, a quarter of an hour where the stream was dead, and the next one
      starts the stream.
    * **Stop it, or begin again**: trigger `control`, with a reason. Pausing this DAG stops nothing.
    """

    @task
    def streams() -> list[str]:
        from tidemark.pipelines import CATALOG

        return list(CATALOG.streams)

    watch = WatchStream.partial(
        task_id="watch",
        window=WINDOW,
        map_index_template="{{ task.stream }}",
        # The run lasts for as long as the other streams are watched: one that died too often is not left dead till then.
        retries=10,
        retry_delay=timedelta(minutes=1),  # where a killed task has no time to say how long
        retry_policy=WithinItsRun(WINDOW),
    )
    watch.expand(stream=streams())


speed_layer()
