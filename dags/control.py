"""A stream started, drained or begun again, by a form and with a reason."""

from datetime import datetime

from airflow.sdk import Param, dag, task


@dag(
    schedule=None,
    start_date=datetime(2026, 1, 1),
    max_active_runs=1,
    default_args={"owner": "tidemark", "pool": "light"},
    params={
        "action": Param("restart", enum=["start", "drain", "restart"], description="Drain: finish the batch, then stay stopped."),
        "stream": Param("main", type="string", pattern="^[a-z][a-z0-9_]*$", description="Which stream."),
        "reason": Param(type="string", minLength=3, description="Why; it is kept and shown."),
    },
    tags=["live", "form"],
)
def control() -> None:
    """
    ### Start, drain or restart a stream

    Writes the state that is wanted. The stream drains between two batches; `speed_layer` starts it when it is wanted running,
    and one of `tidemark speed --only …` whoever started it first. Nothing is lost: Kafka keeps what comes meanwhile.
    """

    @task
    def want(params: dict, dag_run=None) -> str:
        from tidemark import lake, local
        from tidemark.pipelines import CATALOG
        from tidemark.settings import Settings

        settings, stream, action = Settings(), params["stream"], params["action"]
        streams = lake.streams(settings, CATALOG.streams)
        if stream not in streams:
            raise ValueError(f"there is no stream {stream}; there are {', '.join(streams)}")
        state = "stopped" if action == "drain" else "running"
        by = getattr(dag_run, "triggering_user_name", None) or "Airflow"
        local.want(settings, stream, state, params["reason"], by, again=action == "restart")
        return f"{stream} is wanted {state}"

    want()


control()
