"""DAGs run to their end by `dag.test()`, in a process of their own."""

import json
import os
import subprocess
import sys
from typing import Any

from tidemark import airflow
from tidemark.settings import Settings

THIS_CODE = {"PYTHONPATH": os.pathsep.join(str(airflow.ROOT / part) for part in ("plugins", "include"))}
"""What has a process import this checkout's files: what is installed may be another one's."""
AT = "manual__2026-11-20T00:00:00+00:00"
"""The name of each run: its time is `at` below."""
ENDED = """
import json, sys
from datetime import UTC, datetime
import airflow.models.dagrun
from airflow.dag_processing.dagbag import DagBag
from airflow.models.asset import AssetEvent
from airflow.providers.standard.operators.hitl import HITLBranchOperator
from airflow.utils.session import create_session

at, made = datetime(2026, 11, 20, tzinfo=UTC), airflow.models.dagrun.get_or_create_dagrun


def happened(session):
    return session.query(AssetEvent).order_by(AssetEvent.id).all()


def begun_by_events(*, session, dag, **more):
    # A scheduler gives a run the events that have begun it, and says how it was begun; `dag.test()` begins each by hand.
    run = made(session=session, dag=dag, **more)
    run.run_type = (more["conf"] or {}).get("begun", run.run_type)
    if dag.dag_id == "nightly_report":
        run.consumed_asset_events += [event for event in happened(session) if event.name == "tidemark_night"]
        session.commit()
    return run


def answered(self, context):
    # What a person says once they are asked; `dag.test()` waits until somebody does.
    said = {"chosen_options": [context["dag_run"].conf["answer"]], "params_input": {}}
    return self.execute_complete(context, said | {"responded_at": at, "responded_by_user": None})


airflow.models.dagrun.get_or_create_dagrun = begun_by_events
HITLBranchOperator.execute = answered
said = []
for file, conf, marked in json.loads(sys.argv[1]):
    bag = DagBag("/nowhere", collect_dags=False)  # a run leaves its form's values in its DAG
    bag.process_file(file)
    assert not bag.import_errors, bag.import_errors
    [dag] = bag.dags.values()
    dag.deadline = None  # `dag.test()` of Airflow 3.3.2 looks up by its content what a scheduler looks up by its number
    for task in dag.tasks:
        task.retries = 0
    run = dag.test(run_after=at, logical_date=at, run_conf=conf, mark_success_pattern=marked)
    tis = run.get_task_instances()
    tasks = {f"{ti.task_id}[{ti.rendered_map_index}]" if ti.map_index >= 0 else ti.task_id: ti.state for ti in tis}
    gave = {ti.task_id: ti.xcom_pull(task_ids=ti.task_id) for ti in tis if ti.map_index < 0}
    said.append({"state": run.state, "tasks": tasks, "gave": gave})
with create_session() as session:
    events = [[event.name, event.extra] for event in happened(session)]
print(json.dumps({"runs": said, "events": events}, default=str))
"""


class Ended:
    """DAGs run by `dag.test()` one after the other, each as `(its name, its form, the tasks that are left out)`."""

    def __init__(self, settings: Settings, *runs: tuple[str, dict[str, Any], str]) -> None:
        asked = [[str(airflow.ROOT / "dags" / f"{dag}.py"), form, without] for dag, form, without in runs]
        done = subprocess.run(
            [sys.executable, "-c", ENDED, json.dumps(asked)],
            env=airflow.clean() | airflow.environment(settings) | THIS_CODE,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.log = done.stdout + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        self.runs, self.events = found["runs"], found["events"]
