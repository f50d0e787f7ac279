"""The command `tidemark`: what a person or a script does with the platform, from topics to answers.

Exit codes: 0 done; 1 tried and failed; 2 a wrong word on the command line; 75 another copy holds the lease; 130 interrupted.
What was asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import errno
import json
import locale
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tidemark import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console

    from tidemark import local
    from tidemark.lake import Run, Table
    from tidemark.model import Catalog, Declared, Topic
    from tidemark.settings import Settings

FAILED, WRONG, HELD, INTERRUPTED = 1, 2, 75, 130
CODES = {
    "QueryError": WRONG,
    "QueryStopped": FAILED,
    "TableDamaged": FAILED,
    "DeclarationError": WRONG,
    "RobotWrong": WRONG,
    "TopicMissing": WRONG,
    "ReportError": WRONG,
    "LeaseHeld": HELD,
}
TEXT_SHOWN = 120


class Wrong(Exception):
    """A word on the command line, or in the environment, that nothing can be done with."""


class Failed(Exception):
    """Something was tried and did not succeed; the sentence says what and where to look."""


class Commands(TyperGroup):
    """Ends every command with an exit code, and every expected error with one sentence on stderr."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except Exception as error:
            foreseen = ending(error)
            if foreseen is None:
                raise
            code, said = foreseen
            typer.echo(f"tidemark: {said}", err=True)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def ending(error: Exception) -> tuple[int, str] | None:
    """The exit code and the sentence of an error that was foreseen; None for any other, which deserves its trace."""
    from pydantic import ValidationError

    from tidemark import lake, session
    from tidemark.settings import Settings

    if isinstance(error, Wrong | Failed):
        return WRONG if isinstance(error, Wrong) else FAILED, one_line(str(error))
    if hasattr(error, "format_message"):  # of the command-line library: an unknown option, a missing argument
        asked = getattr(getattr(error, "ctx", None), "command_path", "tidemark")
        return WRONG, one_line(f"{error.format_message() or 'a command is missing'} ({asked} --help shows what there is)")
    if isinstance(error, ValidationError) and error.title == "Settings":
        first = error.errors()[0]
        sentence = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several settings together: the sentence names them, and the input is all there are
            return WRONG, one_line(sentence)
        name = f"TIDEMARK_{'_'.join(map(str, first['loc'])).upper()}"
        if first["type"] == "extra_forbidden":  # its value may be a secret
            return WRONG, f"{name}: there is no such setting; .env.example has them all"
        return WRONG, one_line(f"{name}={first['input']}: {sentence}")
    kind = type(error)
    if gone := session.ended(Settings(), error):
        return FAILED, gone
    if kind.__module__.startswith("psutil") and kind.__name__ == "AccessDenied":
        return FAILED, f"process {getattr(error, 'pid', None)} is another user's; ask them to end it"
    if full := lake.disk_full(Settings(), error):
        return FAILED, full
    if kind.__module__.startswith("tidemark") or kind.__name__ == "KafkaException":
        return CODES.get(kind.__name__, FAILED), one_line(str(error))
    if isinstance(error, FileNotFoundError) and error.errno is None:  # raised by us with a sentence, not by the system
        return FAILED, one_line(str(error))
    home, place = Settings().home.absolute(), Settings().lake_path.absolute()
    nowhere = isinstance(error, FileNotFoundError) and not home.exists()  # nor can it be made, as below /proc
    denied = isinstance(error, NotADirectoryError | PermissionError)
    if isinstance(error, OSError) and (denied or nowhere or error.errno == errno.EROFS):
        own = str(error.filename).startswith(f"{place}/")
        there = f"the lake is {place} (TIDEMARK_LAKE)" if own else f"the home is {home} (TIDEMARK_HOME)"
        return FAILED, one_line(f"{error.strerror}: {error.filename}; {there}")
    return None


def one_line(text: str) -> str:
    return " ".join(text.split())


app = typer.Typer(
    cls=Commands,
    name="tidemark",
    no_args_is_help=False,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Kafka in, Delta tables out. Above the tidemark a day is settled; below it, live.

Start with `tidemark demo`, or step by step:

    tidemark up                                   # broker, topics, stream
    tidemark produce page_views --sample --rate 100
    tidemark watch                                # in another terminal
    tidemark query "SELECT * FROM site_hourly_traffic ORDER BY hour"
    tidemark settle --day 2026-11-19              # prints the run
    tidemark publish RUN
    tidemark down

Settings are environment variables, `TIDEMARK_HOME` and so on; `tidemark status` shows those that matter.
Exit codes: 0 done, 1 failed, 2 a wrong word, 75 another copy runs, 130 interrupted.
""",
)
topics_app = typer.Typer(
    help="Topics as code: bring Kafka to what the pipelines declare, or compare the two.", no_args_is_help=True
)
app.add_typer(topics_app, name="topics")
letters_app = typer.Typer(help="Messages that no robot said: why, and once more.", no_args_is_help=True)
app.add_typer(letters_app, name="dead-letters")

AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, for a script.")]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help="The name that `settle` or `replay` printed; `runs` lists them.")]
Only = Annotated[list[str] | None, typer.Option(help="Rollups or views, parted by commas, and what reads them.")]
Reason = Annotated[str, typer.Option(help="Why; it is kept with the run and in each table's history.")]
OneTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic that a pipeline declares.")]


def show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        others = (f"{name} {version(name)}" for name in ("pyspark", "delta-spark", "deltalake", "duckdb"))
        typer.echo(", ".join((f"tidemark {__version__}", *others)))
        raise typer.Exit


@app.callback()
def prepare(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Its version, and those of what reads and writes."),
    ] = False,
) -> None:
    import structlog

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ------------------------------------------------------------------------------------------------------ words and output


def settings() -> Settings:
    from pydantic_settings import SettingsError

    from tidemark.settings import Settings

    try:
        return Settings()
    except (OSError, UnicodeDecodeError, SettingsError) as error:
        raise Wrong(f"the settings in {Settings.model_config['env_file']} cannot be read: {error}") from None


def catalog() -> Catalog:
    """What the pipelines declare. A mistake of Python in one of their files is `Wrong`, with its place."""
    try:
        from tidemark.pipelines import CATALOG
    except (SyntaxError, ImportError, NameError, AttributeError, TypeError) as error:
        from tidemark import fold

        if (where := fold.written(error)) is None:
            raise
        said = error.msg if isinstance(error, SyntaxError) else error
        raise Wrong(f"{where}: {type(error).__name__}: {said}") from error
    return CATALOG


def checked_catalog() -> Catalog:
    """The same for a command that asks the checks. Raises `DeclarationError` for one that is misspelt."""
    from tidemark import quality

    quality.refuse_misspelt(known := catalog())
    return known


def every_topic() -> list[Topic]:
    """What the pipelines declare, and what the notifier needs."""
    from tidemark import notify

    return [*catalog().topics.values(), *notify.TOPICS]


PATIENCE = 2.0
"""Seconds that a command waits for a broker that does not answer, before it says so."""


def with_broker() -> Settings:
    """The settings, once their broker has answered. Raises `BrokerAway`."""
    from tidemark import kafka

    config = settings()
    kafka.wait(config, PATIENCE)
    return config


def topic_named(name: str, topics: Iterable[Topic]) -> Topic:
    """The one of these that is called so. Raises `Wrong`."""
    there = {topic.name: topic for topic in topics}
    if name not in there:
        raise Wrong(f"there is no topic {name}; there are {', '.join(sorted(there))}")
    return there[name]


def stream_named(name: str) -> str:
    streams = catalog().streams
    if name not in streams:
        raise Wrong(f"there is no stream {name}; there are {', '.join(streams)}")
    return name


def day_of(text: str, option: str) -> date:
    from tidemark.model import OLDEST

    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise Wrong(f"{option} {text} is not a day; write it like {date.today() - timedelta(days=1)}") from None
    if day < OLDEST:
        raise Wrong(f"{option} {text} lies before the year {OLDEST.year}, and an event of then is a reject")
    return day


def run_named(config: Settings, name: str) -> Run:
    from tidemark import lake

    try:
        return lake.run_of(config, name)
    except KeyError as error:
        raise Wrong(error.args[0]) from None


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def show(found: Any) -> None:
    """JSON on stdout, for a script."""
    typer.echo(json.dumps(found, default=plain, ensure_ascii=False, allow_nan=False, indent=None if sys.stdout.isatty() else 1))


def plain(value: Any) -> Any:
    """What JSON has no word for: instants and days in ISO 8601, bytes as text with the rest escaped, decimals as text."""
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "backslashreplace")
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, set | tuple | frozenset):
        return list(value)
    return str(value)


def finite(value: Any) -> Any:
    """NaN and the infinities as text, at any depth: JSON has no word for them either."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Rows for a person; where nobody looks (a pipe, a file), columns are parted by tabs and nothing is cut."""
    looked_at = sys.stdout.isatty()
    cells = [[cell(value, looked_at) for value in row] for row in rows]
    if not looked_at:
        typer.echo("\t".join(columns))
        for row in cells:
            typer.echo("\t".join(one_line(value) for value in row))
        return
    from rich.table import Table
    from rich.text import Text

    from tidemark.watch import visible

    shown = Table(box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in cells:
        shown.add_row(*(Text(visible(value)) for value in row))
    console().print(shown)


def cell(value: Any, looked_at: bool = True) -> str:
    """A value in a table; what has values inside is JSON. Of bytes that are no text, as a sketch, who looks sees how many."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S") + (f".{value.microsecond:06d}" if value.microsecond else "")
    if isinstance(value, dict | list):
        return json.dumps(finite(value), default=lambda inside: cell(inside, looked_at), ensure_ascii=False)
    if isinstance(value, bytes) and looked_at and b"\0" in value:
        return f"0x{value.hex()}" if len(value) <= 16 else f"<{len(value):,} bytes>"
    return value if isinstance(value, str) else str(plain(value)) if isinstance(value, bytes | date) else str(value)


class Steps:
    """Says each step of long work on stderr, with the time it took."""

    def __init__(self) -> None:
        self.console, self.began = console(stderr=True), time.monotonic()

    @contextmanager
    def step(self, doing: str) -> Iterator[Callable[[str], None]]:
        """`with steps.step("starting the broker") as say:`; `say` puts what came of it behind the time."""
        from rich.markup import escape

        came: list[str] = []
        began = time.monotonic()
        with self.console.status(escape(doing)) as self.status:
            yield came.append
        self.say(f"{escape(doing)}: {escape(came[-1]) if came else 'done'} [dim]({time.monotonic() - began:.1f} s)[/dim]")

    def now(self, doing: str) -> None:
        """What the step is at, in the place of what it was called: only where a terminal shows it."""
        from rich.markup import escape

        self.status.update(escape(doing))

    def say(self, sentence: str) -> None:
        """A line on stderr; where nobody reads it any more, the work goes on all the same."""
        with suppress(OSError, SystemExit):  # a closed pipe ends the program, in the library's opinion
            self.console.print(sentence, soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------- up, down


@app.command()
def up(
    airflow: Annotated[bool, typer.Option("--airflow", help="Airflow too: it watches the streams and runs the nights.")] = False,
    json_: AsJson = False,
) -> None:
    """Start what runs on this machine: jars, broker, topics, and a stream for each that the pipelines name.

    What is there already is left as it is, so running it twice changes nothing. A stream that somebody has drained is started
    too, and told. A broker that is not on loopback, or that asks for TLS or a user, is used, never started.
    `tidemark down` ends it all.
    """
    config, steps = settings(), Steps()
    tell_unknown_settings()
    asks = airflow and config.notify_connections  # the notifier asks Airflow's database, which may come up with Airflow
    with interrupted("what was started runs on; tidemark up does the rest, tidemark down ends it"):
        bring_up(config, steps, notifier=not asks)
        if airflow:
            with steps.step("airflow") as say:
                for line in airflow_up(config):
                    say(line)
        if asks:
            begin_notifier(config, steps)
    if json_:
        show(whole_status(config))


@contextmanager
def interrupted(then: str) -> Iterator[None]:
    """Ctrl-C ends the command with one sentence: what it has left, and what follows; where the work says so itself, with that."""
    try:
        yield
    except KeyboardInterrupt as cut:
        typer.echo(f"tidemark: {str(cut) or f'interrupted; {then}'}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def airflow_up(config: Settings, say: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """Start Airflow; then where it is, and its passwords where they were made just now."""
    from tidemark import airflow

    made, new = airflow.passwords(config)
    airflow.bring_up(config, say)
    who = f"user admin, password {made['admin']}; user viewer, password {made['viewer']}" if new else "users as before"
    yield f"{airflow.url(config)} ({who}; kept in {airflow.home(config) / 'passwords.json'})"


def bring_up(config: Settings, steps: Steps, streams: Sequence[str] | None = None, notifier: bool = True) -> None:
    """Broker, topics, notifier where a robot is set, and streams: all of them unless said."""
    from tidemark import kafka, local
    from tidemark.model import DeclarationError
    from tidemark.notifier import robots
    from tidemark.watch import visible

    refuse_unknown_streams(config)
    robots(config)  # of a wrong web hook only the notifier's log would tell
    try:
        checked_catalog()
    except DeclarationError as error:  # which a stream does not ask, nor who looks
        typer.echo(f"tidemark: {one_line(str(error))}; each night holds it back until that is mended", err=True)
    with steps.step("jars"):
        local.fetch_jars(config)
    with steps.step(f"broker at {config.brokers}") as say:
        try:
            kafka.wait(config, 0.5 if local.is_here(config) else kafka.ANSWER)
            say("answers already")
        except kafka.BrokerAway:
            local.start_broker(config)
            say("started")
    with steps.step("topics") as say:
        changes = kafka.apply(config, every_topic())
        created = sum(change.what == "created" for change in changes)
        others = [str(change) for change in changes if change.what != "created"]
        say("; ".join([f"{created} created"] * bool(created) + others) or "as declared")
    if notifier and (config.dingtalk_webhook or config.wecom_webhook or config.notify_connections):
        begin_notifier(config, steps)
    for stream in catalog().streams if streams is None else streams:
        with steps.step(f"stream {stream}") as say:
            before, started = local.wanted(config, stream), begin_stream(config, stream)
            asked = f"; it was wanted stopped, by {before['by']}: {before['reason']}" if before["state"] == "stopped" else ""
            say((f"started, its log is {started.log}" if started else "runs already") + visible(asked))


def tell_unknown_settings() -> None:
    """Of variables that would be settings and are none: in `.env` they are refused, the environment may be others' too."""
    from tidemark.settings import Settings

    known = {f"TIDEMARK_{name.upper()}" for name in (*Settings.model_fields, "env_file", "failpoint")}
    if unknown := sorted(name for name in os.environ if name.upper().startswith("TIDEMARK_") and name.upper() not in known):
        typer.echo(f"tidemark: {', '.join(unknown)}: there is no such setting; .env.example has them all", err=True)


def refuse_unknown_streams(config: Settings) -> None:
    """A misspelt name would leave its stream as it is, and say nothing. What is not set names streams that need not be there."""
    from tidemark import lake
    from tidemark.settings import by_stream

    known = lake.streams(config, catalog().streams)
    for name in sorted({"triggers", "driver_memories"} & config.model_fields_set):
        if unknown := by_stream(getattr(config, name)).keys() - {*known}:
            some = f"TIDEMARK_{name.upper()} names stream {', '.join(sorted(unknown))}"
            raise Wrong(f"{some}, and there is none; there are: {', '.join(known)}")


def begin_notifier(config: Settings, steps: Steps) -> None:
    from tidemark import local

    with steps.step("notifier") as say:
        begun = local.start(config, "notify", [sys.executable, "-m", "tidemark", "notify"], home(config))
        say(f"its log is {begun.log}")


def begin_stream(config: Settings, stream: str) -> local.Process | None:
    """Want a stream, and start it; None where it runs already. One that drains is waited for: it would end, and stay so."""
    from tidemark import local

    local.want(config, stream, "running", "tidemark up", "the command line")
    deadline = time.monotonic() + DRAINING
    while local.drains(config, stream) and time.monotonic() < deadline:
        time.sleep(0.2)
    return None if local.beats(config, stream) else local.start_stream(config, stream)


def home(config: Settings) -> dict[str, str]:
    """What a started process must be told so that it finds the same home from wherever it runs."""
    return {"TIDEMARK_HOME": str(config.home.absolute()), "TIDEMARK_LAKE": str(config.lake_path)}


@app.command()
def down() -> None:
    """End the streams, each between two batches, then the broker that `tidemark up` started. Nothing is lost.

    A stream may take three minutes to drain. Exit code 1 when one did not, and so failed, was killed or runs on.
    """
    with interrupted("what has not ended runs on; tidemark down ends the rest"):
        ended = bring_down(settings(), Steps())
    if not ended:
        raise typer.Exit(FAILED)


DRAINING = 180.0
"""Seconds that a stream may take to end: two minutes of a batch, half a minute of the work beside it, and Spark's own end."""


def bring_down(config: Settings, steps: Steps, patience: float = DRAINING) -> bool:
    """End what was started here: Airflow, which would start a stream again, then sources and streams, the broker last.
    Returns whether every stream ended in time."""
    from tidemark import airflow, lake, local

    if any(local.recorded(config, name) for name in airflow.COMPONENTS):
        with steps.step("airflow") as say:
            say("ended" if airflow.take_down(config) else "swept")
    named = streams_known(config, "ended")
    streams = {f"speed-{stream}": stream for stream in lake.streams(config, named)}
    others = [p.name for p in reversed(local.processes(config)) if p.name not in (*streams, local.BROKER)]
    ended = True

    def drain(stream: str) -> str:
        if local.stop(config, f"speed-{stream}", patience=patience):
            beat = local.status(config, stream).get("heartbeat", {})
            if (state := beat.get("state")) not in (*local.ALIVE, "failed"):
                return "drained"
            killed = f"killed, as it had not drained after {patience:g} s"
            how = f"failed while it drained: {beat['error']}" if state == "failed" else killed
            return f"{how}; what it was at is done again at the next start"
        if not local.beats(config, stream):
            return "does not run"
        (config.state / stream / "stop").touch()
        deadline = time.monotonic() + patience
        while local.beats(config, stream):
            if time.monotonic() > deadline:
                return f"still runs after {patience:g} s; end it where it was started"
            time.sleep(0.2)
        return "drained"

    with ThreadPoolExecutor() as at_once:
        ending_others = {name: at_once.submit(local.stop, config, name, patience=min(patience, 60)) for name in others}
        ending_streams = {stream: at_once.submit(drain, stream) for stream in streams.values()}
        for name, ends in ending_others.items():
            with steps.step(name) as say:
                ends.result()
                say("ended")
        for stream, drains in ending_streams.items():
            with steps.step(f"stream {stream}") as say:
                say(drains.result())
                ended &= drains.result() in ("drained", "does not run")
    with steps.step("broker") as say:
        say("ended" if local.stop_broker(config) else "none was started here")
    return ended


def streams_known(config: Settings, done: str) -> tuple[str, ...]:
    """The streams that pipelines name; where a pipeline has a mistake, which nobody has to mend first who looks or wants an end,
    those that were started here, and it is told that these are `done` all the same."""
    from tidemark import local
    from tidemark.model import DeclarationError

    try:
        return catalog().streams
    except (Wrong, DeclarationError) as broken:
        typer.echo(f"tidemark: {one_line(str(broken))}; what runs is {done} all the same", err=True)
        return tuple(p.name.removeprefix("speed-") for p in local.processes(config) if p.name.startswith("speed-"))


@app.command()
def jars() -> None:
    """Fetch the jars of Spark's connectors and of the broker, compare each with its pinned SHA-256, and archive Spark's classes.

    The archive (200 MB) is made once for a Java and a PySpark, in a minute: every later start of Spark costs a third less CPU.
    """
    from tidemark import local, session

    config, steps = settings(), Steps()
    with steps.step("jars") as say:
        local.fetch_jars(config)
        say(str(config.jars))
    with steps.step("archive of Spark's classes") as say:
        try:
            say(str(config.jars / session.ARCHIVE) if session.archive(config, local.java()) else "there already")
        except Exception as problem:  # whatever it is: everything runs without it, only starts are slower
            say(f"not made, so Spark starts more slowly: {str(problem).splitlines()[0]}")


# --------------------------------------------------------------------------------------------------------------- topics


@topics_app.command("apply")
def topics_apply(json_: AsJson = False) -> None:
    """Create and alter Kafka's topics, the notifier's too, until they are as declared; refuse what Kafka cannot do."""
    from tidemark import kafka

    changes = kafka.apply(with_broker(), every_topic())
    if json_:
        show(changes)
    else:
        for change in changes:
            typer.echo(str(change))
        if not changes:
            typer.echo("nothing to change")


@topics_app.command("list")
def topics_list(json_: AsJson = False) -> None:
    """Each declared topic as Kafka holds it, and where the two differ."""
    from tidemark import kafka

    found = kafka.listing(with_broker(), every_topic())
    if json_:
        show(found)
        return
    columns = ("name", "partitions", "replication", "retention", "cleanup", "messages", "differences")
    rows = [[("; ".join(t.differences) if c == "differences" else getattr(t, c)) for c in columns] for t in found]
    table(columns, rows, right=("partitions", "replication", "messages"))


@app.command()
def produce(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="A topic that a pipeline declares; several by sample.")],
    file: Annotated[Path | None, typer.Option(help="JSONL: an event on each line, sent as it stands; /dev/stdin too.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Events drawn by the topic's own sample.")] = False,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Events a second; as fast as it goes unless said.")] = None,
    burst: Annotated[float, typer.Option(min=0, help="With --rate: send the events of so many seconds at once.")] = 0,
    day: Annotated[str | None, typer.Option(help="A whole past day of sample, instead of events from now on.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many sample events; for ever unless said, of a day 100,000.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, day and count: the same bytes.")] = 1,
    json_: AsJson = False,
) -> None:
    """Send events to a topic and say what became of each.

    Exit code 1 if any was not delivered, or Kafka took no more. Ctrl-C ends the sending and delivers what was taken.

        tidemark produce page_views --file clicks.jsonl

        tidemark produce page_views --sample --rate 100

        tidemark produce page_views --sample --day 2026-11-19 --count 100000

        tidemark produce network_events transactions quotes --sample --rate 5    # each of them
    """
    from tidemark import kafka

    declared = [topic_named(name, every_topic()) for name in topics]
    if sample == (file is not None):
        raise Wrong("say either --file F.jsonl or --sample")
    if not sample and (day is not None or count):
        raise Wrong("--day and --count go with --sample")
    if burst and not rate:
        raise Wrong("--burst goes with --rate")
    if not sample and len(declared) > 1:
        raise Wrong("a file goes to one topic; several go with --sample")
    config = settings()
    try:
        if file is not None:
            events: list[Iterator[kafka.Sent]] = [kafka.from_file(declared[0], file)]
        else:
            whole = day_of(day, "--day") if day is not None else None
            if whole and whole >= datetime.now(config.tz).date():
                raise Wrong(f"{whole} is not over in {config.zone}; its events would lie ahead, and a time ahead is a reject")
            many = count or (100_000 if whole else None)
            events = [kafka.sample(one, seed=seed, count=many, day=whole, zone=config.tz) for one in declared]
    except (OSError, ValueError) as error:
        raise Wrong(str(error)) from None
    if len(declared) == 1:
        terminated_as_interrupted()
        found = {declared[0].name: delivered(config, declared[0], events[0], rate, burst, count)}
    else:
        found = delivered_at_once(config, list(zip(declared, events, strict=True)), rate, burst)
    if json_:
        show(found if len(found) > 1 else next(iter(found.values())))
    for name, delivery in found.items():
        if not json_:
            of = f"{name}: " if len(found) > 1 else ""
            typer.echo(f"{of}{delivery.delivered:,} delivered, {delivery.failed:,} failed")
        for reason in delivery.errors:
            typer.echo(f"tidemark: {name}: {one_line(reason)}", err=True)
    if not all(delivery.complete for delivery in found.values()):
        if not any(delivery.delivered or delivery.refused for delivery in found.values()):
            kafka.wait(config, PATIENCE)  # a broker that is away is told, with the way out
        raise typer.Exit(FAILED)
    if any(delivery.interrupted for delivery in found.values()):
        raise typer.Exit(INTERRUPTED)


def delivered(config: Settings, topic: Topic, events: Any, rate: float | None, burst: float, total: int | None) -> Any:
    """Produce, with a progress bar where somebody looks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from tidemark import kafka

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        console=console(stderr=True),
        transient=True,
    )
    began = time.monotonic()
    with bar:
        task = bar.add_task(topic.name, total=total, rate="")

        def tell(delivery: kafka.Delivery) -> None:
            speed = delivery.delivered / max(time.monotonic() - began, 0.001)
            bar.update(task, completed=delivery.delivered, rate=f"{speed:,.0f}/s")

        return kafka.produce(config, topic, events, rate=rate, burst=burst, progress=tell)


def awake(*work: Future[Any]) -> None:
    """Wait until all of it has ended. A signal that another thread was given is noted when this one, the main one, looks up."""
    while wait(work, timeout=0.5).not_done:
        pass


def delivered_at_once(
    config: Settings, events: Sequence[tuple[Topic, Iterator[Any]]], rate: float | None, burst: float
) -> dict[str, Any]:
    """Produce to several topics, `rate` events a second to each, until Ctrl-C or SIGTERM, or one cannot be sent to; what was
    taken is delivered."""
    from tidemark import kafka

    going: dict[str, Future[Any]] = {}
    # Beside the main thread, which alone is told of signals.
    with kafka.noted_interrupts() as pressed, ThreadPoolExecutor(len(events)) as beside:

        def over() -> int:
            ended = [one for one in list(going.values()) if one.done()]
            return pressed() + any(one.exception() is not None or one.result().refused for one in ended)

        for topic, drawn in events:
            going[topic.name] = beside.submit(kafka.produce, config, topic, drawn, rate=rate, burst=burst, interrupts=over)
        awake(*going.values())
    return {name: one.result() for name, one in going.items()}


def terminated_as_interrupted() -> None:
    """SIGTERM ends a command as Ctrl-C does; SIGINT too where a shell's `&` has set it to be ignored."""
    from tidemark import session

    def interrupt(number: int, *_: Any) -> NoReturn:
        if number == signal.SIGINT:  # a person looks; what Airflow ends tells all
            session.hush()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)


def hung_up_as_interrupted() -> None:
    """SIGHUP too, which a terminal that is closed sends. What is said from then on goes nowhere: to write there would raise."""
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def interrupt(*_: Any) -> NoReturn:
        for number in terminals:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, interrupt)


@app.command()
def consume(
    topic: OneTopic,
    start: Annotated[
        str,
        typer.Option(
            "--from", help="earliest, an offset, an instant like 2026-11-19T12:00Z (UTC without a zone), or latest, for ever."
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many records.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on for ever, as records come.")] = False,
    json_: AsJson = False,
) -> None:
    """Print a topic's records as Kafka holds them, up to the end it had when asked. No consumer group is left behind.

    tidemark consume page_views --from earliest --limit 10
    """
    from tidemark import kafka
    from tidemark.watch import visible

    declared, at = topic_named(topic, every_topic()), place(start)
    shown, config, record = visible if sys.stdout.isatty() else str, with_broker(), None
    for record in kafka.consume(config, declared.name, at, limit=limit, follow=follow or at == "latest"):
        if json_:
            typer.echo(json.dumps(record, default=plain, ensure_ascii=False))
        else:
            said = ("∅" if b is None else b.decode("utf-8", "backslashreplace") for b in (record.key, record.value))
            key, value = map(shown, said)
            typer.echo(f"{record.partition}/{record.offset}  {record.timestamp:%Y-%m-%d %H:%M:%S.%f}  {key}  {value}")
    if record is None:
        ends = kafka.offsets(config, [topic], "latest")[topic]
        at_ends = ", ".join(f"{p} at {end}" for p, end in sorted(ends.items()))
        typer.echo(f"tidemark: topic {topic} holds nothing from {start} on; its partitions end: {at_ends}", err=True)


def place(text: str, option: str = "--from") -> Any:
    """Where to read from. An instant without a time zone is UTC."""
    if text in ("earliest", "latest"):
        return text
    if text.isdecimal():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise Wrong(f"{option} {text} is neither earliest, latest, an offset nor an instant like 2026-11-19T12:00Z") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@app.command()
def seek(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="A consumer group that no member is in now.")],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A topic that it reads.")],
    to: Annotated[str, typer.Option("--to", help="earliest, latest, an offset, or an instant like 2026-11-19T12:00Z.")],
    partition: Annotated[int | None, typer.Option(min=0, help="One partition only.")] = None,
    json_: AsJson = False,
) -> None:
    """Move a consumer group: its next member begins there. What it has done since comes again.

        tidemark seek invoices orders --to 2026-11-19T12:00Z

    Exit code 1 while the group has members: end them first. A stream keeps its offsets in its checkpoint and is not moved.
    """
    from tidemark import kafka, lake

    at, config = place(to, "--to"), settings()
    if topic in (".", "..") or not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic):
        raise Wrong(f"{topic} is no name of a topic: letters, digits, points, dashes and underscores, 249 at most")
    if group in {f"tidemark-{stream}" for stream in lake.streams(config, catalog().streams)}:
        raise Wrong(f"{group} is a stream, which reads on from its checkpoint; its group only shows how far it is")
    moved = kafka.seek(with_broker(), group, topic, at, partition)
    rows = [{"partition": p, "before": before, "after": after} for p, (before, after) in sorted(moved.items())]
    if json_:
        show(rows)
    else:
        table(("partition", "before", "after"), [[*row.values()] for row in rows], right=("partition", "before", "after"))


# ------------------------------------------------------------------------------------------------------- notifications


@app.command("notify")
def notify_robots() -> None:
    """Have the robots of DingTalk and WeCom say what comes into the topic `notify`, each message once, until Ctrl-C or SIGTERM.

    `tidemark up` runs it in the background where a web hook is set. Exit code 75 when another copy runs here; on another
    machine, a copy waits to take over.
    """
    from tidemark import airflow, kafka, notifier

    config = settings()
    robots = notifier.robots(config, (lambda name: airflow.connection(config, name)) if config.notify_connections else None)
    # Beside the main thread: Kafka's producer counts the signals that come while it is at work.
    with kafka.noted_interrupts() as pressed, ThreadPoolExecutor(1) as beside:
        done = beside.submit(notifier.run, config, robots, lambda: pressed() > 0)
        awake(done)
    done.result()


@letters_app.command("list")
def letters_list(json_: AsJson = False) -> None:
    """Each message that no robot said, why, and where it lay in the topic; oldest first."""
    from tidemark import notifier

    found = notifier.dead_letters(with_broker())
    if json_:
        show(found)
        return
    rows = [[one.key, one.at, one.because, shortened(one.value)] for one in found]
    table(("letter", "at", "because", "message"), rows)


Letters = Annotated[list[str] | None, typer.Argument(metavar="[LETTER]...", help="As `tidemark dead-letters list` names them.")]
AllOfThem = Annotated[bool, typer.Option("--all", help="Every letter.")]


@letters_app.command("replay")
def letters_replay(letters: Letters = None, every: AllOfThem = False) -> None:
    """Send dead letters again, once their cause is mended. One that was said meanwhile is not said twice."""
    from tidemark import notifier

    config = with_broker()
    typer.echo(f"{notifier.replay(config, chosen(config, letters, every)):,} sent again", err=True)


@letters_app.command("drop")
def letters_drop(letters: Letters = None, every: AllOfThem = False) -> None:
    """Take dead letters off the list without sending them."""
    from tidemark import notifier

    config = with_broker()
    typer.echo(f"{notifier.drop(config, chosen(config, letters, every)):,} dropped", err=True)


def chosen(config: Settings, letters: Sequence[str] | None, every: bool) -> list[Any]:
    """The dead letters that a command names. Raises `Wrong`."""
    from tidemark import notifier

    if bool(letters) == every:
        raise Wrong("say which letters, as `tidemark dead-letters list` names them, or --all")
    known = {one.key: one for one in notifier.dead_letters(config)}
    if unknown := [name for name in letters or () if name not in known]:
        raise Wrong(f"there is no dead letter {unknown[0]}; list them with: tidemark dead-letters list")
    return [one for name, one in known.items() if every or name in (letters or ())]


# --------------------------------------------------------------------------------------------------- stream and settling


@app.command()
def speed(
    stream: Annotated[str, typer.Option(help="Which stream.")] = "main",
    only: Annotated[
        list[str] | None,
        typer.Option(help="A topic, rollup or view: read what it needs, nothing else; may be given more than once."),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="The checkpoint is lost: go on from the log's last offsets.")
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Kafka has deleted records that were not read: enter them as lost, and go on."),
    ] = False,
) -> None:
    """Run a stream here until Ctrl-C or SIGTERM, which end it between two batches. `tidemark up` runs it in the background.

    With `--only` pipelines are split over streams, each a consumer of its own: end the stream that reads them, then start two, of
    which one may have a new name. Each goes on where the other stopped. Without `--only` a stream takes its own back.

        tidemark speed --only site_last_hour --only hourly_traffic --only daily_traffic

        tidemark speed --stream second --only visits --only search_clicks    # in another terminal

    Exit code 75 when another copy runs, or another stream reads one of the topics.
    """
    from tidemark import speed as engine
    from tidemark.model import NAME, TAKEN

    for name in only or ():
        if name not in catalog().names:
            raise Wrong(f"there is no topic, rollup or view {name}; there are {', '.join(catalog().names)}")
    if not only:
        stream_named(stream)
    elif not NAME.fullmatch(stream) or stream in TAKEN:
        raise Wrong(f"--stream {stream} is no name: lower case letters, digits and underscores, and none of {', '.join(TAKEN)}")
    engine.run(settings(), catalog(), stream, recover, accept_loss, only or ())


@app.command()
def settle(
    day: Annotated[list[str] | None, typer.Option(help="A day of the business zone; may be given more than once.")] = None,
    first: Annotated[str | None, typer.Option("--from", help="The first of several days.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="The last of them, included.")] = None,
    only: Only = None,
    rejects: Annotated[
        bool, typer.Option("--rejects", help="Judge all rejects again by the code of now, and settle the days of those mended.")
    ] = False,
    reason: Reason = "by hand",
    json_: AsJson = False,
) -> None:
    """Compute days again from the log, stage them, judge them and compare with what is live. Readers see nothing yet.

    Exit code 1 when a table failed its gate; the others can be published. The run's name is the last line.

        tidemark settle --day 2026-11-19

        tidemark settle --from 2026-11-01 --to 2026-11-19 --reason "bots removed"

        tidemark settle --rejects --reason "page may be null"
    """
    from tidemark import settle as engine

    config = settings()
    if rejects:
        if day or first or last or only:
            raise Wrong("--rejects settles the days of the records that it mends; say no --day, --from, --to or --only")
        report(lambda say: engine.settle_rejects(config, checked_catalog(), reason, say), json_)
        return
    days = days_of(day or [], first, last)
    if days[-1] > engine.yesterday(config):
        raise Wrong(f"{days[-1]} is not over in {config.zone}; the last day that can be settled is {engine.yesterday(config)}")
    report(lambda say: engine.settle(config, checked_catalog(), days, reason, say, tables_named(only)), json_)


def report(work: Callable[[Callable[[str], None]], Run | None], json_: bool) -> None:
    """Do a run's work with its progress shown, and show what came of it, or what Ctrl-C has left of it."""
    from rich.markup import escape

    from tidemark import local

    terminated_as_interrupted()
    local.step_aside()
    began, out = time.monotonic(), console(stderr=True)
    with interrupted("give the same command again"), out.status("at work") as status:

        def say(what: str) -> None:
            with suppress(OSError, SystemExit):  # as in `Steps`: the work goes on where nobody reads of it any more
                status.update(escape(what))
                out.print(f"{time.monotonic() - began:6.1f} s  {what}", soft_wrap=True, markup=False)

        run = work(say)
    if json_:
        show(run)
    elif run:
        show_run(run)
        typer.echo(run.id)
    if run and failed(run):
        raise typer.Exit(FAILED)


def tables_named(names: Sequence[str] | None) -> list[str]:
    """Rollups and views, as the command line names them. Raises `Wrong`."""
    known, named = [d.name for d in catalog().derived], [name.strip() for said in names or () for name in said.split(",")]
    for name in named:
        if name not in known:
            raise Wrong(f"there is no rollup or view {name}; there are {', '.join(known)}")
    return named


@app.command()
def replay(
    source: Annotated[
        str, typer.Option(help="kafka: read it again while it holds offset zero, else the log. log: the log, always.")
    ] = "kafka",
    only: Only = None,
    first: Annotated[str | None, typer.Option("--from", help="Leave out the days before.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="Leave out the days after.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's name; one that was cut off goes on, one that is done is shown.")
    ] = None,
    reason: Reason = "by hand",
    json_: AsJson = False,
) -> None:
    """Every day again from offset zero, beside the running stream: staged, judged, compared. Readers see nothing yet.

    Ctrl-C, or a crash, costs a part of the work: say `--run` with its name and it goes on. Then look and decide:

        tidemark replay --reason "visitors counted twice"

        tidemark compare RUN        # what would change, by table and day, with samples

        tidemark publish RUN        # all days, one commit a table; `tidemark rollback RUN` takes it back

        tidemark drop RUN           # or not
    """
    from tidemark import lake
    from tidemark import settle as engine

    if source not in ("kafka", "log"):
        raise Wrong(f"--source is kafka or log, not {source}")
    if run is not None and not lake.RUN_NAME.fullmatch(run):
        raise Wrong(
            f"--run {run} is no name: letters of A to Z, digits, points, dashes and underscores, a hundred at most; no .json"
        )
    begin, end = from_to(first, last)
    names, config = tables_named(only), settings()
    which: Any = source
    report(
        lambda say: engine.replay(
            config, checked_catalog(), reason, say, source=which, only=names, first=begin, last=end, name=run
        ),
        json_,
    )


@app.command()
def compare(
    run: OneRun,
    again: Annotated[bool, typer.Option("--again", help="Compare with what is published now, not with what was then.")] = False,
    json_: AsJson = False,
) -> None:
    """What a run would change for readers: by table and day, the rows changed, missing and extra, with samples. Markdown.

    Exit code 0 either way; `--json` tells a script.
    """
    config = settings()
    known = run_named(config, run)
    from tidemark import compare as engine

    found = engine.kept(config, known)
    if again or found is None:
        from tidemark import lake, local, session

        if known.state not in ("staged", "published", "rolled back"):
            raise Failed(f"run {run} is {known.state}; there is nothing staged to compare")
        names = [d.name for d in catalog().derived if known.tables.get(d.name, {}).get("rows") is not None]
        for name in names:
            lake.staged(lake.table(config, catalog()[name]), known.id)  # or the sentence that it is gone, without Spark
        local.step_aside()
        spark = session.session(config, f"tidemark-compare-{known.id}")
        found = engine.compare(spark, config, catalog(), known, names)
    typer.echo(engine.as_json(known, found) if json_ else engine.as_markdown(known, found))


def days_of(days: Sequence[str], first: str | None, last: str | None) -> list[date]:
    """The days that the options name. Raises `Wrong`."""
    if not days and bool(first) != bool(last):
        said, lacks = ("--from", "--to") if first else ("--to", "--from")
        raise Wrong(f"{said} {first or last} lacks its {lacks}; of one day say --day {first or last}")
    if bool(days) == bool(first or last):
        raise Wrong("say --day D, or --from D --to D")
    if days:
        return sorted({day_of(d, "--day") for d in days})
    begin, end = from_to(first, last)
    assert begin and end
    return [begin + timedelta(days=n) for n in range((end - begin).days + 1)]


def from_to(first: str | None, last: str | None) -> tuple[date | None, date | None]:
    """The days of --from and --to, None for one that is not said. Raises `Wrong`."""
    begin, end = (day_of(text, option) if text is not None else None for text, option in ((first, "--from"), (last, "--to")))
    if begin and end and end < begin:
        raise Wrong(f"--to {end} lies before --from {begin}")
    return begin, end


def failed(run: Run) -> bool:
    return run.state == "failed" or any(t.get("gate") not in (None, "passed") for t in run.tables.values())


def held_back(run: Run) -> dict[str, tuple[str, ...]]:
    """Why tables of a run are not published; nothing of those that a person has published over it, taken back or not."""
    waits = (n for n, t in run.tables.items() if t.get("gate") not in (None, "passed") and not t.get("published"))
    return {name: why for name in waits if (why := run.held_back(name))}


def show_run(run: Run) -> None:
    counts = ("missing", "extra", "changed", "late", "unexplained")
    rows = []
    for name, one in run.tables.items():
        compared = one.get("compare") or {}
        reasons = one.get("reasons") or []
        rows.append(
            [
                name,
                one.get("rows"),
                *(compared.get(c) for c in counts),
                one.get("gate"),
                "; ".join(reasons),
            ]
        )
    table(("table", "rows", *counts, "gate", "because"), rows, right=("rows", *counts))


def report_again(config: Settings, run: Run) -> None:
    """Write the reports again that the days of a run have, once it is published or taken back, which stands whatever they do."""
    from tidemark import report as engine

    try:
        engine.again(config, catalog(), run.id)
    except engine.ReportError as error:
        typer.echo(f"tidemark: {one_line(str(error))}", err=True)


@app.command()
def publish(
    run: OneRun,
    json_: AsJson = False,
) -> None:
    """Swap a settled run in, one commit for each table that passed its gate. Publishing twice does nothing.

    Days that have a report get it anew. Exit code 1 when a table was held back.
    """
    config = settings()
    known = run_named(config, run)
    from tidemark import settle as engine

    began = time.monotonic()
    found = engine.publish(config, catalog(), known.id)
    if json_:
        show(found)
    else:
        rows = [[p.table, p.version, p.files, f"{1000 * p.seconds:.0f}", "; ".join(p.blocked)] for p in found]
        table(("table", "version", "files", "ms", "held back because"), rows, right=("version", "files", "ms"))
        swapped, already = sum(p.version is not None for p in found), sum(p.version is None and not p.blocked for p in found)
        before = f"; {already} were before, and are left as they are" if already else ""
        typer.echo(f"{swapped} tables of run {known.id} published in {time.monotonic() - began:.2f} s{before}", err=True)
    report_again(config, known)
    if any(p.blocked for p in found):
        raise typer.Exit(FAILED)


@app.command()
def rollback(run: OneRun, reason: Reason = "by hand", json_: AsJson = False) -> None:
    """Take a run's publication back: each table as it was before, in one commit; the newest publication of its days only.

    Days that have a report get it anew.
    """
    config = settings()
    known = run_named(config, run)
    from tidemark import settle as engine

    began = time.monotonic()
    found = engine.rollback(config, catalog(), known.id, reason)
    if json_:
        show(found)
    else:
        table(
            ("table", "version", "ms"), [[p.table, p.version, f"{1000 * p.seconds:.0f}"] for p in found], right=("version", "ms")
        )
        typer.echo(f"{len(found)} tables are as they were before run {known.id} ({time.monotonic() - began:.2f} s)", err=True)
    report_again(config, known)


@app.command()
def drop(run: OneRun) -> None:
    """Give up a run that is not published: its staged files go, its record stays. Nothing that readers see changes."""
    from tidemark import lake

    config = settings()
    lake.drop(config, catalog(), run_named(config, run))
    too = "; answer Drop in Airflow too where it waits under Required Action" if run.startswith("reprocess-") else ""
    typer.echo(f"run {run} is dropped{too}", err=True)


@app.command()
def runs(json_: AsJson = False) -> None:
    """Every settling, oldest first: its days, its state, why it was made and what held a table back."""
    from tidemark import lake

    found, damaged = lake.runs_now(settings())
    rows = []
    for run in found:
        held = [f"{name}: {', '.join(why)}" for name, why in held_back(run).items()]
        days = run.days[0] if len(run.days) == 1 else f"{run.days[0]} to {run.days[-1]}" if run.days else "today"
        rows.append([run.id, run.state, days, run.created, run.reason, "; ".join(held)])
    if json_:
        show(found)
    else:
        table(("run", "state", "days", "created", "reason", "held back"), rows)
    tell_damaged(damaged.values())


def tell_damaged(damaged: Iterable[Exception]) -> None:
    """What a list lacks, and exit code 1 for it."""
    said = [f"tidemark: {one_line(str(error))}" for error in damaged]
    for one in said:
        typer.echo(one, err=True)
    if said:
        raise typer.Exit(FAILED)


# -------------------------------------------------------------------------------------------------------------- looking


@app.command()
def query(
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT, WITH, VALUES, DESCRIBE, SUMMARIZE or SHOW, in DuckDB's SQL.")
    ],
    rows: Annotated[int | None, typer.Option(min=0, help="The most rows; TIDEMARK_QUERY_ROWS unless said.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, help="The longest it may take; TIDEMARK_QUERY_SECONDS unless said.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Ask the lake. Each log, rollup and view is a table by its name; `verdicts` and `ledger` are there too. Read-only.

    tidemark query "SHOW TABLES"

    tidemark query "SELECT * FROM site_daily_traffic ORDER BY day DESC"

    tidemark query "SELECT page, pv, uv FROM daily_traffic WHERE day = '2026-11-19' ORDER BY pv DESC, page" --json
    """
    from tidemark import query as lake

    found = lake.query(settings(), catalog(), sql, rows=rows, seconds=seconds)
    if json_:
        show(
            {
                "columns": found.columns,
                "types": found.types,
                "rows": [finite(row) for row in found.rows],
                "truncated": found.truncated,
                "elapsed": round(found.elapsed, 3),
            }
        )
        return
    numbers = [
        c for c, t in zip(found.columns, found.types, strict=True) if t.endswith("INT") or t.startswith(("DECIMAL", "DOUBLE"))
    ]
    table(found.columns, found.rows, right=numbers)
    cut = "; there are more, ask for them with --rows" if found.truncated else ""
    typer.echo(f"{len(found.rows):,} row{'s' * (len(found.rows) != 1)} in {found.elapsed:.2f} s{cut}", err=True)


@app.command("report")
def report_of_day(
    day: Annotated[str | None, typer.Option(help="A day that is over; yesterday of the business zone unless said.")] = None,
    json_: AsJson = False,
) -> None:
    """Write the report of a day, a page with pictures and its numbers as CSV, and print where it is.

    Page views and visitors against the day and the week before, live against settled, late events, rejects, checks, days that
    were restated, and the streams now. A day that is held back has its report too: it says why, and what follows.

    tidemark report

    tidemark report --day 2026-11-19
    """
    from tidemark import report as engine

    config = settings()
    wanted = day_of(day, "--day") if day is not None else datetime.now(config.tz).date() - timedelta(days=1)
    page = engine.report(config, catalog(), wanted)
    if json_:
        show({"day": wanted, "report": page, "numbers": page.with_suffix(".csv")})
    else:
        typer.echo(str(page))


@app.command()
def watch(seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so many seconds.")] = None) -> None:
    """Page views and visitors of the last hour as they move, with the stream's lag. Ctrl-C ends the looking, nothing else.

    Without a terminal: a line for each new mark.
    """
    from tidemark import watch as screen

    screen.watch(settings(), catalog(), console(), seconds=seconds)


@app.command()
def status(json_: AsJson = False) -> None:
    """Where things are and how they are: broker, streams, processes, the newest run."""
    found = whole_status(settings())
    tell_unknown_settings()
    if json_:
        show(found)
        return
    from tidemark import local
    from tidemark.watch import stream_line

    now = datetime.now(UTC)
    lines = [["home", found["home"]], ["lake", found["lake"]], ["broker", f"{found['brokers']} {found['broker']}"]]
    if found["airflow"]:
        lines.append(["airflow", f"{found['airflow']['url']} {found['airflow']['health']}"])
    lines += [["stream", stream_line(name, one, now).removeprefix("stream ")] for name, one in found["streams"].items()]
    if ended := found["notifier_ended"]:
        lines.append(["notifier", f"has ended; its log is {ended}"])
    elif beat := found["notifier"]:
        robots = "; ".join(
            f"{name}: {one['said']} said, {one['waiting']} waiting, {one['dead']} dead letters"
            + (f", trouble: {one['trouble']}" if one["trouble"] else "")
            for name, one in beat["robots"].items()
        )
        state = "silent" if local.silent(beat, now) else beat["state"]
        lines.append(["notifier", f"{state} at {beat['at'][:19]}; {robots or 'no robot is set'}"])
    lines += [["process", f"{p['name']} (pid {p['pid']}), log {p['log']}"] for p in found["processes"]]
    newest = found["newest_run"]
    said = [newest["id"], newest["state"], *newest["days"]] if newest else []
    held = [f"held back: {' '.join(newest['held_back'])}"] if newest and newest["held_back"] else []
    damaged = [found["runs_damaged"]] if found["runs_damaged"] else []
    lines.append(["newest run", ", ".join([*said, *held, *damaged]) or "none yet"])
    table(("what", "how"), lines)


def whole_status(config: Settings) -> dict[str, Any]:
    from tidemark import airflow, kafka, lake, local

    started = any(local.recorded(config, name) for name in airflow.COMPONENTS)
    sick = airflow.unwell(config, datetime.min.replace(tzinfo=UTC)) if started else []
    try:
        kafka.wait(config, 1.0)
        broker = "answers"
    except kafka.BrokerAway:
        broker = "does not answer"
    except kafka.BrokerRefused as refused:
        broker = str(refused)
    known, unread = lake.runs_now(config)
    newest, damaged = max(known, key=lambda r: r.created, default=None), "; ".join(one_line(str(why)) for why in unread.values())
    notifier = local.recorded(config, "notify")
    ended = notifier if notifier and not notifier.alive() and not local.beats(config, "notify") else None
    return {
        "home": str(config.home.absolute()),
        "lake": str(config.lake_path),
        "brokers": config.brokers,
        "broker": broker,
        "airflow": {"url": airflow.url(config), "health": f"not healthy: {', '.join(sick)}" if sick else "healthy"}
        if started
        else None,
        "streams": {name: local.status(config, name) for name in lake.streams(config, streams_known(config, "shown"))},
        "notifier": local.status(config, "notify").get("heartbeat"),
        "notifier_ended": str(ended.log) if ended else None,
        "processes": [{"name": p.name, "pid": p.pid, "log": str(p.log)} for p in local.processes(config)],
        "newest_run": {"id": newest.id, "state": newest.state, "days": newest.days, "held_back": [*held_back(newest)]}
        if newest
        else None,
        "runs_damaged": damaged or None,
    }


@app.command()
def rejects(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="One topic's rejects; without, how many of each.")
    ] = None,
    day: Annotated[str | None, typer.Option(help="Only those that came on a day.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The newest so many of a TOPIC; 20 unless said.")] = None,
    json_: AsJson = False,
) -> None:
    """Records that no rollup reads, each with its reason and its bytes. They stay in the log.

    tidemark rejects

    tidemark rejects page_views --day 2026-11-19
    """
    from tidemark import query as lake

    if limit and topic is None:
        raise Wrong("--limit goes with a TOPIC; without one every reject is counted")
    config, limit = settings(), limit or 20
    where = "reject IS NOT NULL" + (f" AND day = DATE '{day_of(day, '--day')}'" if day is not None else "")
    if topic is None:
        there = lake.written({n: p for n, p in lake.places(config, catalog()).items() if n in catalog().topics})
        counts = f"SELECT '{{0}}' AS topic, reject, count(*) AS records FROM \"{{0}}\" WHERE {where} GROUP BY ALL"
        asked = [f"{counts.format(n)} ORDER BY records DESC, reject" for n in sorted(there)]
        columns: tuple[str, ...] = ("topic", "reject", "records")
    else:
        name = topic_named(topic, catalog().topics.values()).name
        fields = (
            'kafka.partition AS partition, kafka.offset AS "offset", kafka.timestamp AS arrived, reject, kafka.value AS value'
        )
        asked = [f'SELECT {fields} FROM "{name}" WHERE {where} ORDER BY arrived DESC, partition, "offset" DESC LIMIT {limit}']
        columns = ("partition", "offset", "arrived", "reject", "value")
    rows, cut, damaged = list[tuple[Any, ...]](), False, list[Exception]()
    for sql in asked:
        try:
            found = lake.query(config, catalog(), sql, rows=limit if topic else None)
        except lake.TableDamaged as error:
            if topic:
                raise
            damaged.append(error)
        else:
            rows, cut = rows + found.rows, cut or found.truncated
    if json_:
        show([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        table(columns, [[shortened(value) for value in row] for row in rows], right=("records", "partition", "offset"))
    if cut:
        typer.echo(f"{len(rows):,} rows; there are more, for them raise TIDEMARK_QUERY_ROWS", err=True)
    tell_damaged(damaged)


def shortened(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    text = plain(value[:TEXT_SHOWN])
    return f"{text} … ({len(value):,} bytes)" if len(value) > TEXT_SHOWN else text


@app.command()
def tables(json_: AsJson = False) -> None:
    """Each table of the lake: its version, files, bytes, rows and days."""
    from tidemark import lake

    found, damaged = lake.overview(settings(), catalog())
    columns = ("name", "kind", "version", "files", "bytes", "rows", "days")
    if json_:
        show(found)
    else:
        table(columns, [[row[c] for c in columns] for row in found], right=columns[2:])
    tell_damaged(damaged)


# -------------------------------------------------------------------------------------------------------------- upkeep


@app.command()
def compact() -> None:
    """Merge the small live files of logs, rollups and ledger now. A running stream does it by itself, every so often."""
    from tidemark import lake, session
    from tidemark import speed as engine

    config = settings()
    upto = {name: pin.seq for name, pin in lake.pins(config, catalog().streams).items()}
    with Steps().step("compact") as say:
        known: list[Declared] = [*catalog().topics.values(), *catalog().rollups.values()]
        merged = [(lake.table(config, one), engine.merging(one)) for one in known]
        there = [(one, merge) for one, merge in [*merged, (lake.ledger(config), None)] if one.exists]
        spark = session.session(config, "tidemark-compact") if there and upto else None
        fewer = sum(all_merged(spark, config, one, merge, upto) for one, merge in there) if spark else 0
        say(f"{fewer:,} files fewer")


def all_merged(spark: SparkSession, config: Settings, table: Table, merge: Any, upto: Mapping[str, int]) -> int:
    """Merge all that is worth it of a table, a part at a time; returns how many files fewer it has."""
    from tidemark import lake

    fewer = 0
    while some := lake.compact(spark, config, table, merge, upto):
        fewer += some
        time.sleep(0.1)  # who waits for a pin looks every 50 ms
    return fewer


@app.command()
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Make a log's files again from Kafka; say what to replay.")] = False,
    json_: AsJson = False,
) -> None:
    """Look whether every file that a table names is there, and as long as it was written. Exit code 1 where one is not.

    With --repair a log's files are made again from Kafka, while it holds their records, and those of rollups and views are named
    no more: readers go on without their rows, until the replay is published that the command tells. Verdicts are written again
    from what is kept beside their runs' records.
    """
    from tidemark import lake
    from tidemark import repair as engine

    config = settings()
    found = engine.damage(config, catalog())
    if not repair or not found:
        if json_:
            show(found)
        elif found:
            table(
                ("table", "day", "rows", "file", "what"),
                [[d.table, d.day, d.rows, d.path, d.what] for d in found],
                right=("rows",),
            )
            # Of a Delta log, or of the ledger, nothing else holds what they held.
            again = [d for d in found if d.path != "_delta_log" and d.table != lake.ledger(config).name]
            mends = "mend them with: tidemark verify --repair" if again else ""
            copy = "docs/operating.md, Damaged files, says what to do for a Delta log or the ledger" if again != found else ""
            typer.echo(f"{len(found)} files are damaged; {'; '.join(filter(None, (copy, mends)))}", err=True)
        else:
            typer.echo("every file is there", err=True)
        raise typer.Exit(FAILED if found else 0)
    done = engine.repair(config, catalog(), lambda said: typer.echo(said, err=True))
    if json_:
        show(done)
    else:
        table(
            ("table", "files", "rows again", "then"),
            [[d.table, d.files, d.rows, d.then] for d in done],
            right=("files", "rows again"),
        )
        if any(d.files and d.then for d in done):
            typer.echo("then tidemark compare and tidemark publish the run that it names", err=True)
    if engine.damage(config, catalog()):
        raise typer.Exit(FAILED)


@app.command()
def sweep(json_: AsJson = False) -> None:
    """Delete what is kept no longer: log days beyond a topic's `keep`, verdicts, runs and old checkpoints beyond
    TIDEMARK_KEEP_RECORDS, and folders that no table's history, no undecided run and no publication that can be taken back names,
    when older than TIDEMARK_SWEEP_AFTER. A process's log that is longer than 16 MiB begins again; its .log.1 is what it was."""
    from tidemark import lake, local

    config = settings()
    every = [lake.table(config, catalog()[name]) for name in catalog().names]
    try:
        lake.expire_all(config, catalog())
    finally:  # what it refuses of one table keeps nothing else
        gone = lake.sweep(config, [*every, lake.ledger(config), lake.verdicts(config)])
    if json_:
        show([str(folder) for folder in gone])
    else:
        for folder in gone:
            typer.echo(str(folder))
        typer.echo(f"{len(gone):,} folders deleted", err=True)
    local.turn_logs(config)  # which takes room first


# ---------------------------------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    rate: Annotated[
        float,
        typer.Option(min=0.1, help="Live page views a second; of every other topic a twentieth, a minute's at once."),
    ] = 100,
    count: Annotated[int, typer.Option(min=24, help="Page views of yesterday; of every other topic a hundredth.")] = 100_000,
    seconds: Annotated[float | None, typer.Option(min=1, help="End after so many seconds of watching.")] = None,
    airflow: Annotated[bool, typer.Option("--airflow/--no-airflow", help="With Airflow in charge, or settled here.")] = True,
) -> None:
    """Everything at once on this machine: yesterday loaded, live traffic, the screen, and Airflow, which watches the stream
    and settles and publishes yesterday.

    Ctrl-C, or closing the terminal, ends it cleanly. The next run carries on: yesterday is loaded and settled once, a new
    yesterday again. It wants a home of its own: where anyone else has sent or kept events it refuses.
    """
    from tidemark import local
    from tidemark import watch as screen

    config, steps = settings(), Steps()
    terminated_as_interrupted()
    hung_up_as_interrupted()
    yesterday = datetime.now(config.tz).date() - timedelta(days=1)
    watching, settling = False, None
    shown, others = samples()
    own = local.Lease(
        config.state / "demo.lock", "A demo runs in this home; look at it with `tidemark watch`, or end it where it runs"
    )
    with own:
        refuse_others_home(config, [*shown, *others])
        try:
            bring_up(config, steps, sorted({t.stream for t in shown}))
            with steps.step(f"{count:,} events of {yesterday} into {', '.join(t.name for t in shown)}") as say:
                say(load(config, yesterday, shown, count))
            with steps.step(f"live traffic into {', '.join(t.name for t in shown)}") as say:
                send_samples(config, "sample", shown, rate)
                say(f"{rate:g} events a second each")
            with steps.step("the stream reads them"):
                wait_read(config, shown, threading.Event(), lambda left: steps.now(f"the stream reads them: {left:,} to go"))
            settling = (Charge if airflow else Settling)(config, yesterday, count, rate)
            settling.start()
            steps.say(f"ready after {time.monotonic() - steps.began:.1f} s; Ctrl-C ends everything")
            watching = True
            screen.watch(config, catalog(), console(), notes=settling.notes, seconds=seconds)
        except KeyboardInterrupt:
            if not watching:
                raise typer.Exit(INTERRUPTED) from None
        finally:
            with undisturbed():
                began = time.monotonic()
                if settling:
                    settling.end()
                bring_down(config, steps, patience=60)
                steps.say(f"ended in {time.monotonic() - began:.1f} s; the next `make demo` carries on from here")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C pressed again must not cut the ending short. Not by `SIG_IGN`: what is started then would ignore its end too."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_others_home(config: Settings, topics: Sequence[Topic]) -> None:
    """Sample events cannot be told from those that are there, and the end of a demo ends every stream of its home.

    The topics to which it sends are in its record before it does: one that is killed leaves nothing of which no demo knows.
    """
    from tidemark import kafka, lake, local

    record, found = config.state / "demo.json", local.others(config)
    for topic in catalog().topics if not found and not record.exists() else ():
        try:
            ends = kafka.offsets(config, [topic], "latest", 0.5 if local.is_here(config) else kafka.ANSWER)
        except kafka.TopicMissing:
            continue
        except kafka.BrokerAway:
            break
        if any(ends[topic].values()):
            found = [f"topic {topic} at {config.brokers} has records"]
            break
    if found:
        raise Failed(
            f"{found[0]}, of which no demo knows; its sample events would be counted among yours, and its end would end your "
            "streams. Give it a home and a broker of its own: "
            "TIDEMARK_HOME=~/tidemark-demo TIDEMARK_BROKERS=127.0.0.1:29092 TIDEMARK_CONTROLLER_PORT=29093 make demo"
        )
    sent = json.loads(record.read_text()) if record.exists() else {}
    record.parent.mkdir(parents=True, exist_ok=True)
    lake.whole_or_nothing(record, json.dumps(dict.fromkeys((t.name for t in topics), "") | sent))


def load(config: Settings, day: date, topics: Sequence[Topic], count: int) -> str:
    """Produce a day's sample to each topic once. Cut off and done again, it sends the same events, and nothing counts twice."""
    from tidemark import lake

    record = config.state / "demo.json"
    loaded = json.loads(record.read_text()) if record.is_file() else {}
    lacks = [t.name for t in topics if loaded.get(t.name) != str(day)]
    if not lacks:
        return "sent already"
    command = [sys.executable, "-m", "tidemark", "produce", *lacks, "--sample", "--day", str(day), "--count", str(count)]
    told = os.environ | home(config)
    sent = subprocess.run(command, env=told, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if sent.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if sent.returncode:
        raise Failed(f"{day} was not sent whole to {', '.join(lacks)}: {one_line(sent.stdout + sent.stderr)}")
    record.parent.mkdir(parents=True, exist_ok=True)
    lake.whole_or_nothing(record, json.dumps(loaded | dict.fromkeys(lacks, str(day))))
    return one_line(sent.stdout)


def wait_read(
    config: Settings, topics: Sequence[Topic], ended: threading.Event, say: Callable[[int], None] = lambda _: None
) -> None:
    """Wait until the streams have read what the topics hold now, or it is ended, and say how many records are left."""
    from tidemark import kafka, lake

    ends = kafka.offsets(config, [t.name for t in topics], "latest")
    while not ended.wait(0.2) and (left := lake.unread(lake.pins(config, catalog().streams), ends)):
        say(left)
        for stream in {t.stream for t in topics}:
            refuse_ended(config, stream)


def samples() -> tuple[list[Topic], list[Topic]]:
    """The topics that have a sample: those of the screen, and all others."""
    from tidemark.model import needed
    from tidemark.watch import VIEWS

    if lacks := [name for name in VIEWS if name not in catalog().views]:
        raise Wrong(
            f"the demo shows {', '.join(lacks)}, which no pipeline declares; name traffic in PIPELINES of "
            "include/tidemark/pipelines/__init__.py again, or start your own pipelines without a demo: tidemark up"
        )
    seen = needed(catalog(), VIEWS)
    every = [t for t in catalog().topics.values() if t.sample]
    return [t for t in every if t.name in seen], [t for t in every if t.name not in seen]


def refuse_ended(config: Settings, stream: str) -> None:
    from tidemark import local

    if not local.running(config, f"speed-{stream}") and not local.beats(config, stream):
        said = local.status(config, stream).get("heartbeat", {}).get("error", "")
        log = config.state / "logs" / f"speed-{stream}.log"
        raise Failed(f"stream {stream} ended{f': {said}' if said else ''}; its log is {log}")


def send_samples(config: Settings, name: str, topics: Sequence[Topic], rate: float, burst: float = 0) -> None:
    from tidemark import local

    command = [sys.executable, "-m", "tidemark", "produce", *(t.name for t in topics), "--sample", "--rate", f"{rate:g}"]
    local.start(config, name, [*command, "--burst", f"{burst:g}"] if burst else command, home(config))


class Beside(threading.Thread, ABC):
    """What the demo does once the screen has its first rows: every other topic and stream, then a day settled."""

    def __init__(self, config: Settings, day: date, count: int, rate: float) -> None:
        super().__init__(name="beside", daemon=True)
        self.config, self.day, self.count, self.rate, self.said = config, day, count, rate, list[str]()
        self.ended, self.started = threading.Event(), threading.Event()

    @abstractmethod
    def settles(self) -> None:
        """Have the day settled, and say `started` once an end need not wait for it."""

    def notes(self) -> list[str]:
        return list(self.said)

    def run(self) -> None:
        try:
            self.others()
            if not self.ended.is_set():
                self.settles()
        except (Exception, KeyboardInterrupt) as error:
            self.said.append(one_line(str(error)))
        finally:
            self.started.set()

    def end(self) -> None:
        """From here on it starts nothing that somebody would have to end."""
        self.ended.set()
        self.started.wait(60)

    def others(self) -> None:
        from tidemark import lake
        from tidemark.watch import VIEWS

        _, others = samples()
        until = time.monotonic() + 120
        newest = lake.table(self.config, catalog().views[VIEWS[0]])
        while time.monotonic() < until and not (newest.exists and newest.files()):
            if self.ended.wait(0.5):
                return
        self.said.append("the other topics: their yesterday is sent")
        steps: list[Callable[[], object]] = [
            partial(load, self.config, self.day, others, max(24, self.count // 100)),
            partial(send_samples, self.config, "sample-others", others, self.rate / 20, burst=60),
            *(partial(begin_stream, self.config, stream) for stream in catalog().streams),
        ]
        for step in steps:
            if self.ended.is_set():
                return
            step()
        self.said[-1] = "the other topics: the streams read their yesterday"
        wait_read(self.config, others, self.ended)
        del self.said[-1]


class Charge(Beside):
    """Brings Airflow up beside the screen, and notes where it is and what has become of the day."""

    def notes(self) -> list[str]:
        from tidemark import lake

        mine = [r for r in lake.runs(self.config) if str(self.day) in r.days]
        then = f"; {self.day} is settled again by: tidemark settle --day {self.day}"
        return [*self.said, *(f"{self.day}: run {r.id} is {r.state}{self.why(r, then)}" for r in mine[-1:])]

    @staticmethod
    def why(run: Run, then: str) -> str:
        return f": {one_line(run.note)[:160]}{then}" if run.state == "failed" else ""

    def settles(self) -> None:
        self.started.set()
        self.said = ["Airflow is starting"]
        try:
            self.said = [f"Airflow: {line}" for line in airflow_up(self.config, self.refuse_ended)]
        except Exception as error:
            self.said = [f"Airflow did not start: {one_line(str(error))}"]

    def refuse_ended(self, next_step: str) -> None:
        if self.ended.is_set():
            raise Failed(f"the demo has ended before {next_step}")


class Settling(Beside):
    """Settles and publishes the day in processes of their own, unless it is published already, and notes what came of it."""

    def settles(self) -> None:
        from tidemark import lake, local

        before = {run.id: run for run in lake.runs(self.config)}
        done = next((r for r in before.values() if r.state == "published" and str(self.day) in r.days), None)
        if done:
            self.said.append(f"{self.day} is settled and published already, by run {done.id}")
            return
        if self.ended.is_set():
            return
        began = time.monotonic()
        self.said.append(f"settling {self.day}")
        command = [sys.executable, "-m", "tidemark", "settle", "--day", str(self.day), "--reason", "demo"]
        process = local.start(self.config, "settle", command, home(self.config))
        self.started.set()
        while process.alive():
            time.sleep(0.2)
        staged = next((r for r in lake.runs(self.config) if r.id not in before and r.state == "staged"), None)
        if staged is None:
            self.said.append(f"{self.day} was not settled; its log is {process.log}")
            return
        self.said.append(f"settled {self.day} in {time.monotonic() - began:.1f} s: run {staged.id}")
        command = [sys.executable, "-m", "tidemark", "publish", staged.id]
        ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        came = "published" if ended.returncode == 0 else "not published whole"
        self.said.append(f"{self.day} {came}: {one_line(ended.stderr)}")


def main() -> None:
    """The console script."""
    open_all_three()
    have_java_read_names()
    try:
        app()
    except SystemExit as ending:
        asked = sys.modules.get("tidemark.query")
        if asked and asked.goes_on():  # an exit in order would end in pages of DuckDB's about what is still in use
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code if isinstance(ending.code, int) else 0)
        raise


def open_all_three() -> None:
    """What was started with input, output or errors closed (`>&-`) has them go nowhere: else the next file that is opened takes
    that number, and gets whatever is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def have_java_read_names() -> None:
    """Have a JVM read names of files as this process does: under `LC_ALL=C` Python takes them as UTF-8, and Java as ASCII, to
    which a home with any other letter is no path."""
    if sys.getfilesystemencoding() == "utf-8" and locale.getencoding().lower() not in ("utf-8", "utf8"):
        os.environ["LC_ALL"] = "C.UTF-8"


if __name__ == "__main__":
    main()
