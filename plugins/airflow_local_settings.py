"""What the scheduler imports before it forks its workers, so that no task imports it again: half of a short task's CPU.

Libraries alone. The platform's own files, pipelines above all, are read by each task as they are then.
"""

import sys
from importlib import import_module

__all__: list[str] = []
"""Airflow takes over every name that it finds here; it shall find none."""

LIBRARIES = (
    "airflow.providers.apache.spark.operators.spark_submit",
    "airflow.providers.standard.decorators.python",
    "airflow.sdk.definitions.decorators",
    "airflow.sdk.execution_time.task_runner",
    "airflow.timetables.interval",
    "confluent_kafka.admin",
    "deltalake",
    "filelock",
    "psutil",
    "pyarrow",
    "pydantic_settings",
    "pyspark.sql",
    "structlog",
    "tenacity",
)

if "scheduler" in sys.argv:
    for library in LIBRARIES:
        import_module(library)
