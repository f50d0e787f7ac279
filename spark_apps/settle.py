"""What spark-submit starts for a night: days settled and staged; the runs' names are left in a file for the tasks after it."""

from datetime import date
from pathlib import Path
from typing import Annotated

import structlog
import typer

from tidemark import local, settle
from tidemark.__main__ import terminated_as_interrupted
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings


def main(
    days: Annotated[str, typer.Option(help="Days, ISO, with commas between.")],
    reason: Annotated[str, typer.Option()],
    said: Annotated[Path, typer.Option(help="Where the runs' names go, a line each.")],
) -> None:
    """Exit code 0 also where a gate failed: the tasks of its table say so."""
    terminated_as_interrupted()  # as Airflow ends what is cleared or marked: the run's record says so
    local.step_aside()
    wanted = [date.fromisoformat(day) for day in days.split(",")]
    runs = settle.night(Settings(), CATALOG, wanted, reason, structlog.get_logger().info)
    said.parent.mkdir(parents=True, exist_ok=True)
    said.write_text("\n".join(run.id for run in runs))


if __name__ == "__main__":
    typer.run(main)
