"""Checks become Great Expectations, run on exactly the staged rows; their verdicts decide what may be published.

The only module that knows Great Expectations. `own_checks`, `gate`, `blocked` and the JSON are pure: no Spark, no import
of either, so that a gate may run anywhere.
"""

from __future__ import annotations

import difflib
import html
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import structlog

from tidemark.model import Catalog, Check, DeclarationError, Declared, Topic, expect, row_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

log = structlog.get_logger()

VERDICTS = (
    "run STRING, table_name STRING, check_name STRING, expectation STRING, severity STRING, outcome STRING, "
    "observed STRING, unexpected BIGINT, sample STRING, judged_at TIMESTAMP, day DATE, last_day DATE"
)
"""The columns of `lake/verdicts`: one row for each check of each table of each run; `day` is the first day judged."""

SAMPLE = 5
LONGEST_TEXT = 200
PAGES_KEPT = timedelta(days=60)
"""How long Data Docs keep a page; `lake/verdicts` keeps its verdicts longer."""

RECORD = ("kafka.partition", "kafka.offset")
"""By what a record of a topic's log is found."""

TWICE = "SELECT kafka.partition, kafka.offset, count(*) AS times FROM {batch} GROUP BY 1, 2 HAVING count(*) > 1"
"""The records that a log has more than once."""
WORD, BITS = "shiftright(kafka.offset, 6)", "bit_or(shiftleft(1L, CAST(kafka.offset & 63 AS INT)))"
"""SQL by which offsets are counted 64 at a time: each has a bit in its word, so that not every record goes from task to task."""
QUICKER = {TWICE: f"SELECT kafka.partition, {WORD} AS word FROM {{batch}} GROUP BY 1, 2 HAVING count(*) > bit_count({BITS})"}
"""Queries that have a row where those they stand for have one, and are asked while it is only yes or no."""

Outcome = Literal["passed", "failed", "error"]


@dataclass(frozen=True)
class Verdict:
    """What one check said of one table of one run.

    `outcome` is `error` when the check could not be asked; `observed` then says why. `unexpected` counts rows (of a
    uniqueness, every row that shares its key). `observed` and `sample` are JSON; `sample` has at most five rows, a
    judged column's values with the key of their rows; its instants are UTC. A passed check has neither: it was only asked
    yes or no. `judged_at` is UTC; `days` are the first and the last business day judged, both inclusive.
    """

    run: str
    table: str
    check: str
    expectation: str
    severity: Literal["critical", "warning"]
    outcome: Outcome
    observed: str | None
    unexpected: int | None
    sample: str | None
    judged_at: datetime
    days: tuple[date, date]


@dataclass(frozen=True)
class Judged:
    """A table to judge: its declaration, the staged rows (of a topic: its log), the period `[start, end)`.

    `start` and `end` are aware and in the business time zone: their dates are business days. `repeats` is how many records of a
    log have an offset that stands there already, where these were counted.
    """

    declared: Declared
    frame: DataFrame
    start: datetime
    end: datetime
    repeats: int | None = None


@dataclass(frozen=True)
class Gate:
    """May a table be published? `reasons` are sentences, none when it passed; `failed` the checks that were asked and failed."""

    passed: bool
    reasons: tuple[str, ...]
    failed: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------------- what is asked


def own_checks(declared: Declared, start: datetime, end: datetime, *, dates: bool | None = None) -> tuple[Check, ...]:
    """What every declaration brings, all critical, for the period `[start, end)` (aware, in the business time zone).

    A rollup or view: each key column is not null, the key is unique, the time is in the period (start inclusive, end
    exclusive). A topic's log: each Kafka record stands once, each accepted event has its id, the day is in the period.
    `dates` says that the time is a DATE, which is compared by business days; by itself that is assumed of `day` alone.
    The names of the checks do not depend on it.
    """
    if isinstance(declared, Topic):
        checks = [expect("UnexpectedRowsExpectation", unexpected_rows_query=TWICE, description="each record stands once")]
        if declared.id is not None:
            event = f"reject IS NULL{' AND kafka.value IS NOT NULL' if declared.compacted else ''}"  # a tombstone has none
            bare = f"SELECT kafka.partition, kafka.offset FROM {{batch}} WHERE {event} AND {declared.id} IS NULL"
            named = f"{declared.id} of an accepted event is not null"
            checks.append(expect("UnexpectedRowsExpectation", unexpected_rows_query=bare, description=named))
        moment = "day"
    else:
        checks = [
            expect("ExpectColumnValuesToNotBeNull", column=column, description=f"{column} is not null") for column in declared.key
        ]
        named = f"key {', '.join(declared.key)} is unique"
        if len(declared.key) == 1:
            checks.append(expect("ExpectColumnValuesToBeUnique", column=declared.key[0], description=named))
        else:
            checks.append(expect("ExpectCompoundColumnsToBeUnique", column_list=list(declared.key), description=named))
        moment = declared.time
    by_date = moment == "day" if dates is None else dates
    limits: dict[str, Any] = {"min_value": start, "max_value": end, "strict_max": True}
    if by_date:
        limits = dict(zip(("min_value", "max_value"), days(start, end), strict=True))
    checks.append(expect("ExpectColumnValuesToBeBetween", column=moment, description=f"{moment} is in the period", **limits))
    return tuple(checks)


def refuse_misspelt(catalog: Catalog) -> None:
    """Raises `DeclarationError` for a declared check that Great Expectations does not have, or that takes no such argument."""
    for declared in (*catalog.topics.values(), *catalog.derived):
        for check in declared.checks:
            if wrong := misspelt(check):
                raise DeclarationError(f"{type(declared).__name__.lower()} {declared.name}: {wrong}")


def misspelt(check: Check) -> str | None:
    """What Great Expectations does not have of a check, its class or an argument, and the nearest that it has; None for none."""
    name, known = check.expectation, gallery().get(check.expectation)
    if known is None:
        return f"Great Expectations has no {name}; {nearest(name, gallery())}"
    wrong = next((argument for argument in check.arguments if known and argument not in known), None)
    return wrong and f"{name} takes no {wrong}; {nearest(wrong, known)}"


@cache
def gallery() -> Mapping[str, Collection[str]]:
    """What Great Expectations has, each with its arguments, of a few none: by its files, since its import takes 3 CPU-seconds."""
    spec = find_spec("great_expectations")
    assert spec and spec.origin
    folder = Path(spec.origin).with_name("expectations")
    names = re.findall(r"^    (\w+),$", (folder / "__init__.py").read_text(), re.MULTILINE)
    schemas = {name: folder / "core" / "schemas" / f"{name}.json" for name in names}
    return {name: [*json.loads(file.read_text())["properties"]] if file.exists() else [] for name, file in schemas.items()}


def nearest(word: str, known: Iterable[str]) -> str:
    return f"the nearest are {', '.join(difflib.get_close_matches(word, known, cutoff=0))}"


def days(start: datetime, end: datetime) -> tuple[date, date]:
    """The first and the last business day that `[start, end)` touches, both inclusive."""
    # In UTC: an hour that the zone's clocks leave out is none to take a microsecond from.
    last = (end.astimezone(UTC) - timedelta(microseconds=1)).astimezone(end.tzinfo)
    return start.date(), last.date()


# ------------------------------------------------------------------------------------------------------------- judging


def judge(
    run: str,
    tables: Mapping[str, Judged],
    docs: Path | None = None,
    beside: Mapping[str, DataFrame] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Verdict]:
    """Ask every table's own and declared checks of exactly the rows given, one verdict each, and build Data Docs.

    `tables` are by declaration name; for as long as it takes, each is also a temporary view of that name in the frames'
    Spark session, so that an `unexpected_rows_query` may compare tables (`{batch}` is the judged one). `beside` are frames
    that are only named so, not judged: inputs, what is published. Views of those names from before are gone afterwards.
    Two calls at once must not share a session.
    A check that cannot be asked (no such column, wrong SQL, unknown expectation) is a verdict with outcome `error`.
    `docs` is one folder, one site, for all runs; pages that cannot be written cost a log line, not the verdicts. `progress` is
    told of each table.
    Raises nothing but what the death of Spark or a name that is no declaration's brings.
    """
    for name, judged in tables.items():
        if name != judged.declared.name:
            raise ValueError(f"{name} is handed in with the declaration {judged.declared.name}; hand it in by its own name")
    judged_at = datetime.now(UTC)
    verdicts, pages = [], []
    frames = {**(beside or {}), **{name: judged.frame for name, judged in tables.items()}}
    with quiet(), named_views(frames):
        context = great_context(None)
        for name, judged in tables.items():
            checks, began = checks_of(judged), monotonic()
            quicker = QUICKER if judged.repeats is None else {TWICE: f"SELECT * FROM range({judged.repeats})"}
            results = ask(context, name, judged.frame, checks, row_of(judged.declared) or RECORD, quicker)
            progress(f"asked {len(checks)} checks of {name} in {monotonic() - began:.1f} s")
            for check, result in zip(checks, results, strict=True):
                verdicts.append(verdict(run, judged, check, result, judged_at))
            pages.append((name, results))
        if docs is not None:
            try:
                write_pages(docs, run, judged_at, pages)
            except Exception:
                log.warning("data docs were not written; the verdicts stand", docs=str(docs), run=run, exc_info=True)
    return verdicts


def checks_of(judged: Judged) -> tuple[Check, ...]:
    """A table's own checks, then the declared ones."""
    declared = judged.declared
    moment = "day" if isinstance(declared, Topic) else declared.time
    dates = dict(judged.frame.dtypes).get(moment) == "date"
    return (*own_checks(declared, judged.start, judged.end, dates=dates), *declared.checks)


@contextmanager
def quiet() -> Iterator[None]:
    """170 lines of information, and a stack for each check that could not be asked: the verdicts say it in one line."""
    loggers = [logging.getLogger(name) for name in ("great_expectations", "SQLQueryContextLogger", "DataFrameQueryContextLogger")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def named_views(frames: Mapping[str, DataFrame]) -> Iterator[None]:
    try:
        for name, frame in frames.items():
            frame.createOrReplaceTempView(name)
        yield
    finally:
        for name, frame in frames.items():
            frame.sparkSession.catalog.dropTempView(name)
            frame.sparkSession.catalog.dropTempView("tmp_view")  # what Great Expectations calls {batch}


def great_context(docs: Path | None) -> Any:
    """An ephemeral context; with `docs`, its results and one site live there, because a site that is built from a
    context without the earlier results removes their pages."""
    import great_expectations as gx
    from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults, ProgressBarsConfig

    defaults = InMemoryStoreBackendDefaults()
    sites: dict[str, Any] = {}
    if docs is not None:
        results, pages = (
            {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.absolute())}
            for folder in (docs / "results", docs)
        )
        defaults.stores[defaults.validation_results_store_name]["store_backend"] = {**results, "filepath_suffix": ".json"}
        sites["verdicts"] = {
            "class_name": "SiteBuilder",
            "show_how_to_buttons": False,
            "store_backend": pages,
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder", "show_cta_footer": False},
            "site_section_builders": {"expectations": "None", "profiling": "None"},
        }
    config = DataContextConfig(
        store_backend_defaults=defaults,
        data_docs_sites=sites,
        analytics_enabled=False,
        progress_bars=ProgressBarsConfig(globally=False, metric_calculations=False),
    )
    return gx.get_context(mode="ephemeral", project_config=config)


def ask(
    context: Any, name: str, frame: DataFrame, checks: Sequence[Check], key: Sequence[str], quicker: Mapping[str, str] = QUICKER
) -> list[Any]:
    """One result of Great Expectations for each check, in their order; a check that it refuses is an `Unasked`. Examples of what
    failed have the `key` of their row.

    Everything is asked yes or no in one validation, and only what failed again for counts and samples, which cost Spark jobs of
    their own. Nothing is persisted: a staged table is as cheap to read again, and stays out of memory.
    """
    found: dict[int, Any] = {}
    expectations: dict[int, Any] = {}
    for i, check in enumerate(checks):
        if wrong := misspelt(check):  # a night asks what no command has refused: the other tables go on
            found[i] = Unasked(check, wrong)
            continue
        try:
            expectations[i] = expectation(check, i, quicker)
        except Exception as reason:  # whatever it raises is its verdict
            found[i] = Unasked(check, sentence(reason))
    try:
        source = context.data_sources.add_or_update_spark("lake", persist=False)
        whole = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("staged")
        batch = whole.get_batch(batch_parameters={"dataframe": frame})
        found |= validate(batch, expectations, "BOOLEAN_ONLY")
    except Exception as reason:
        return [found.get(i) or Unasked(check, sentence(reason)) for i, check in enumerate(checks)]
    for i in [i for i in expectations if i in found and not found[i].success and error_of(found[i]) is None]:
        query = checks[i].expectation == "UnexpectedRowsExpectation"
        try:
            one = {i: expectation(checks[i], i)}
            told = validate(batch, one, "COMPLETE" if query else with_keys(checks[i], key))[i]
        except Exception as reason:
            log.warning("a failed check could not be asked for its rows", table=name, reason=sentence(reason))
            continue
        # A query that was counted need not have computed its columns: those may raise now, and then it cannot be asked.
        if not told.success and (query or error_of(told) is None):
            found[i] = told
    return [found.get(i, Unasked(check, "Great Expectations gave no result")) for i, check in enumerate(checks)]


def with_keys(check: Check, key: Iterable[str]) -> dict[str, Any]:
    """The `result_format` of a failed check: some rows, by their key and the columns that it judges, of which none is named
    twice: by that it cannot be asked."""
    judged = {check.arguments.get(name) for name in ("column", "column_A", "column_B")} | {
        *check.arguments.get("column_list", ())
    }
    beside = [column for column in key if column not in judged]
    told = {"result_format": "SUMMARY", "unexpected_index_column_names": beside} if beside else {"result_format": "BASIC"}
    return {**told, "partial_unexpected_count": SAMPLE}


@dataclass(frozen=True)
class Unasked:
    """A check that Great Expectations refused before it looked at a row."""

    check: Check
    reason: str
    success: bool = False
    result: None = None


def expectation(check: Check, number: int, quicker: Mapping[str, str] | None = None) -> Any:
    """A check in Great Expectations' words: to be answered by yes or no, with queries that are `quicker`, or, without these,
    with the rows of a query.

    Raises what Great Expectations says against the arguments.
    """
    import great_expectations.expectations as gallery

    kind = getattr(gallery, check.expectation)
    arguments = dict(check.arguments)
    query = arguments.get("unexpected_rows_query")
    if quicker is not None and isinstance(query, str) and query in quicker:
        query = arguments["unexpected_rows_query"] = quicker[query]
    if isinstance(query, str) and "{batch}" not in query:
        # A query may name the judged table instead; without the word Great Expectations prints a warning to the terminal.
        arguments["unexpected_rows_query"] = query.rstrip("; \t\r\n") + "\n/* {batch} */"
    meta = {**arguments.pop("meta", {}), "number": number}
    if kind is gallery.UnexpectedRowsExpectation and quicker is not None:
        kind = counted()
    return kind(**arguments, severity=check.severity, meta=meta)


@cache
def counted() -> Any:
    """`UnexpectedRowsExpectation` whose query is run once, to be counted: the library's own runs it for its rows too, whatever it
    is asked, and that is half of what a check of a query costs."""
    from great_expectations.expectations import UnexpectedRowsExpectation

    class UnexpectedRowCount(UnexpectedRowsExpectation):
        metric_dependencies = ("unexpected_rows_query.row_count",)

        def _validate(self, metrics: dict[str, Any], *rest: Any, **more: Any) -> Any:
            return super()._validate({"unexpected_rows_query.table": [], **metrics}, *rest, **more)

    return UnexpectedRowCount


def validate(batch: Any, expectations: Mapping[int, Any], result_format: Any) -> dict[int, Any]:
    import great_expectations as gx

    if not expectations:
        return {}
    suite = gx.ExpectationSuite(name=batch.data_asset.name, expectations=list(expectations.values()))
    results = batch.validate(suite, result_format=result_format).results
    return {result.expectation_config.meta["number"]: result for result in results}


def error_of(result: Any) -> str | None:
    """Why a check could not be asked, in one line, or None: Great Expectations tells it once, or once for each metric."""
    if isinstance(result, Unasked):
        return result.reason
    info = result.exception_info or {}
    told = [info] if "raised_exception" in info else list(info.values())
    for one in told:
        if one.get("raised_exception"):
            return sentence(one.get("exception_message") or "it raised without saying why")
    return None


def sentence(reason: object) -> str:
    said = next((line.strip() for line in str(reason).splitlines() if line.strip()), "")
    if isinstance(reason, Exception):
        said = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
    return said[: 2 * LONGEST_TEXT]


def verdict(run: str, judged: Judged, check: Check, result: Any, judged_at: datetime) -> Verdict:
    made = Verdict(
        run=run,
        table=judged.declared.name,
        check=check.name,
        expectation=check.expectation,
        severity=check.severity,
        outcome="passed",
        observed=None,
        unexpected=None,
        sample=None,
        judged_at=judged_at,
        days=days(judged.start, judged.end),
    )
    error = error_of(result)
    if error is not None:
        return replace(made, outcome="error", observed=text(error))
    if result.success:
        return made
    told = result.result or {}
    if check.expectation == "UnexpectedRowsExpectation":
        count, rows, observed = told.get("observed_value"), told.get("details", {}).get("unexpected_rows"), None
    else:
        count = told.get("unexpected_count")
        rows = told.get("partial_unexpected_index_list") or told.get("partial_unexpected_list")
        share = {k: told[k] for k in ("element_count", "unexpected_percent") if k in told}
        observed = told.get("observed_value", share or None)
    return replace(
        made,
        outcome="failed",
        observed=None if observed is None else text(observed),
        unexpected=None if count is None else int(count),
        sample=text(rows[:SAMPLE]) if rows else None,
    )


def text(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """As JSON has it: instants in UTC, long text cut, what is no number as its name."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "asDict"):
        return plain(value.asDict())
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value][:100]
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()  # Spark hands out instants in the process's own zone, without saying so
    if isinstance(value, date | time):
        return value.isoformat()
    said = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes | bytearray) else str(value)
    return said if len(said) <= LONGEST_TEXT else f"{said[:LONGEST_TEXT]}…"


# ----------------------------------------------------------------------------------------------------------- Data Docs


def write_pages(docs: Path, run: str, judged_at: datetime, pages: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """One page for each table of the run, in the site of all runs; those older than `PAGES_KEPT` go."""
    from great_expectations.core import ExpectationSuiteValidationResult, RunIdentifier
    from great_expectations.data_context.types.resource_identifiers import ExpectationSuiteIdentifier, ValidationResultIdentifier

    context = great_context(docs)
    store = context.stores[context.validation_results_store_name]
    named = RunIdentifier(run_name=re.sub(r"[^\w.:-]", "-", run), run_time=judged_at)
    keys = []
    for table, results in pages:
        shown = [on_page(result) for result in results]
        good = sum(bool(one.success) for one in shown)
        whole = ExpectationSuiteValidationResult(
            success=good == len(shown),
            results=shown,
            suite_name=table,
            statistics={
                "evaluated_expectations": len(shown),
                "successful_expectations": good,
                "unsuccessful_expectations": len(shown) - good,
                "success_percent": 100 * good / len(shown),
            },
            meta={"run_id": named, "validation_time": judged_at, "active_batch_definition": {"data_asset_name": table}},
            batch_id=table,
        )
        keys.append(ValidationResultIdentifier(ExpectationSuiteIdentifier(table), named, table))
        store.set(keys[-1], whole)
    for key in store.list_keys():
        if key.run_id.run_time < judged_at - PAGES_KEPT:
            store.remove_key(key)
    context.build_data_docs(site_names=["verdicts"], resource_identifiers=keys)


def on_page(result: Any) -> Any:
    """A result as its page may show it. Great Expectations 1.24 puts values, stacks and descriptions into the page as
    they are, so what comes from data is escaped here; a page would otherwise run a visitor's `<script>`."""
    from great_expectations.core import ExpectationValidationResult
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    error = error_of(result)
    told: dict[str, Any] = {"raised_exception": error is not None, "exception_message": None, "exception_traceback": None}
    if error is not None:
        told |= {"exception_message": error, "exception_traceback": escaped(error)}  # the message it escapes itself
    if isinstance(result, Unasked):
        check = result.check
        arguments = ", ".join(f"{k}={text(v)}" for k, v in check.arguments.items() if k != "description")
        asked = f"{check.expectation}({arguments})".replace("{", "{{").replace("}", "}}")
        shown = ExpectationConfiguration(
            type="unexpected_rows_expectation",  # a page shows only expectations that can be made; this one takes any text
            kwargs={"unexpected_rows_query": f"{asked} /* {{batch}} */"},
            description=check.name,
            severity=check.severity,  # type: ignore[arg-type]
        )
    else:
        shown = result.expectation_config
    values = result.result or {}
    if "details" in values:
        values = {**values, "details": {"unexpected_rows": values["details"].get("unexpected_rows", [])[:SAMPLE]}}
    if result.success and shown.kwargs.get("mostly", 1) == 1:
        values = {"unexpected_percent": 0.0, **values}
    return ExpectationValidationResult(
        success=bool(result.success),  # of some checks it is NumPy's, of which JSON knows nothing
        expectation_config=ExpectationConfiguration(
            type=shown.type.replace("unexpected_row_count", "unexpected_rows_expectation"),
            kwargs=shown.kwargs,
            description=shown.description and escaped(shown.description),
            severity=shown.severity,
        ),
        result=escaped(plain(values)),
        exception_info=told,
    )


def escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {escaped(k): escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escaped(v) for v in value]
    return html.escape(value) if isinstance(value, str) else value


# ----------------------------------------------------------------------------------------------------------- deciding


def gate(declared: Declared, expected: Sequence[Check], verdicts: Sequence[Verdict], left_out: Collection[str] = ()) -> Gate:
    """Whether a table may be published: `expected` are all its checks (`own_checks` and the declared), `verdicts` those of
    one run (of other tables too). A reason says where a check names a view that the run has `left_out`.

    Fails on a critical failure, on a check that could not be asked (a warning too), when fewer checks ran than were
    expected, and when none was expected. A check is critical if its verdict or its declaration says so; where a critical one
    and a warning share a name, the verdict alone.
    """
    mine = [v for v in verdicts if v.table == declared.name]
    critical = {c.name for c in expected if c.severity == "critical"} - {c.name for c in expected if c.severity == "warning"}
    reasons, failed = [], []
    for v in mine:
        if v.outcome == "failed" and (v.severity == "critical" or v.check in critical):
            rows = "" if v.unexpected is None else f" on {v.unexpected} {'row' if v.unexpected == 1 else 'rows'}"
            observed = f"; observed {v.observed}" if v.observed else ""
            sample = f"; for example {v.sample}" if v.sample else ""
            asked = " ".join(str(c.arguments) for c in expected if c.name == v.check)
            others = ", ".join(name for name in sorted(left_out) if re.search(rf"\b{name}\b", asked))
            beside = f" (it was held to {others}, as readers have it: --only has left it out)" if others else ""
            reasons.append(f'{v.table}: "{v.check}" failed{rows}{observed}{sample}{beside}')
            failed.append(v.check)
        elif v.outcome not in ("passed", "failed"):
            why = json.loads(v.observed) if v.observed else "no reason is known"
            reasons.append(f'{v.table}: "{v.check}" could not be asked: {why}')
    missing = Counter(c.name for c in expected) - Counter(v.check for v in mine)
    if missing:
        which = ", ".join(f'"{name}"' for name in missing.elements())
        ran = len(expected) - missing.total()
        reasons.append(f"{declared.name}: {len(expected)} checks were expected and {ran} ran; missing: {which}")
    if not expected:
        reasons.append(f"{declared.name}: no check was expected; every table brings its own, so the gate was asked wrongly")
    return Gate(passed=not reasons, reasons=tuple(reasons), failed=tuple(failed))


def blocked(catalog: Catalog, failed: Iterable[str]) -> dict[str, str]:
    """Every rollup and view that reads a failed table, directly or through others, with the sentence why. What a live way alone
    reads blocks nothing: no settled row is made of it.

    Raises `KeyError` for a name that the catalog does not have.
    """
    broken = {catalog[name].name for name in failed}
    why: dict[str, str] = {}
    for declared in catalog.derived:  # each after what it reads
        for source in declared.reads.values():
            if source.name in broken:
                why[declared.name] = f"{declared.name} reads {source.name}, which failed its checks"
                break
            if source.name in why:
                why[declared.name] = f"{declared.name} reads {source.name}, which is blocked: {why[source.name]}"
                break
    return why


# -------------------------------------------------------------------------------------------------------------- keeping


def row(verdict: Verdict) -> dict[str, Any]:
    """A verdict by the columns of `VERDICTS`."""
    fields = asdict(verdict)
    first, last = fields.pop("days")
    return {
        "run": fields.pop("run"),
        "table_name": fields.pop("table"),
        "check_name": fields.pop("check"),
        **fields,
        "day": first,
        "last_day": last,
    }


def to_arrow(verdicts: Sequence[Verdict]) -> pyarrow.Table:
    """The rows of `lake/verdicts`, columns as in `VERDICTS`; instants in microseconds, UTC."""
    import pyarrow as pa

    types = {"STRING": pa.string(), "BIGINT": pa.int64(), "TIMESTAMP": pa.timestamp("us", tz="UTC"), "DATE": pa.date32()}
    schema = pa.schema([(name, types[kind]) for name, kind in (column.split() for column in VERDICTS.split(", "))])
    return pa.Table.from_pylist([row(v) for v in verdicts], schema=schema)


def to_json(verdicts: Sequence[Verdict]) -> str:
    """A list of objects with the columns of `VERDICTS`; instants and dates as ISO 8601."""
    written = [{k: v.isoformat() if isinstance(v, date) else v for k, v in row(one).items()} for one in verdicts]
    return json.dumps(written, indent=1, ensure_ascii=False)


def from_json(written: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """The verdicts that `to_json` wrote, once parsed. Raises `KeyError` or `ValueError` for anything else."""
    return [
        Verdict(
            run=one["run"],
            table=one["table_name"],
            check=one["check_name"],
            expectation=one["expectation"],
            severity=one["severity"],
            outcome=one["outcome"],
            observed=one["observed"],
            unexpected=one["unexpected"],
            sample=one["sample"],
            judged_at=datetime.fromisoformat(one["judged_at"]),
            days=(date.fromisoformat(one["day"]), date.fromisoformat(one["last_day"])),
        )
        for one in written
    ]
