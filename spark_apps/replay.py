"""What spark-submit starts for a reprocessing: every day again, beside the stream; done again, it goes on where it was."""

from datetime import date
from typing import Annotated

import structlog
import typer

from tidemark import local, settle
from tidemark.__main__ import terminated_as_interrupted
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings


def main(
    run: Annotated[str, typer.Option(help="The run's name.")],
    reason: Annotated[str, typer.Option()],
    source: Annotated[str, typer.Option(help="kafka or log")] = "kafka",
    only: Annotated[str, typer.Option(help="Rollups and views, with commas between; all unless said.")] = "",
    first: Annotated[str, typer.Option("--from", help="The first day, ISO; from offset zero unless said.")] = "",
) -> None:
    """Exit code 0 also where a gate failed: the person who decides sees it. One replay at a time waits for a decision."""
    terminated_as_interrupted()  # as Airflow ends what is cleared or marked: the run's record says so
    local.step_aside()
    settle.replay(
        Settings(),
        CATALOG,
        reason,
        structlog.get_logger().info,
        source="log" if source == "log" else "kafka",
        only=[name for name in only.split(",") if name],
        first=date.fromisoformat(first) if first else None,
        name=run,
        alone=True,
    )


if __name__ == "__main__":
    typer.run(main)
