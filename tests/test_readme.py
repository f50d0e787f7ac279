"""README's code runs: its pipeline declares itself, its snippets agree, its commands, settings, paths and links exist."""

import json
import re
import shlex
import shutil
import types
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import typer
from deltalake import DeltaTable, Schema
from pyspark.sql import functions as F
from typer.testing import CliRunner

from tidemark import __main__ as cli
from tidemark import fold, lake
from tidemark.model import catalog
from tidemark.pipelines import CATALOG
from tidemark.query import query
from tidemark.settings import Settings
from tidemark.speed import LEDGER

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
TRAFFIC = ROOT / "include/tidemark/pipelines/traffic.py"
RECORDS = "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, headers " + fold.HEADERS
NOON = datetime(2026, 11, 19, 12, tzinfo=UTC)


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [code for said, code in fenced if said == language]


def block(start: str) -> str:
    """The one Python block that begins so."""
    (found,) = [b for b in blocks("python") if b.startswith(start)]
    return found


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table whose first column is headed so."""
    _, _, below = README.partition(f"| {heading} |")
    lines = below.splitlines()[2:]
    table = lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


# ------------------------------------------------------------------------------------------------------------ pipelines

MACHINES = block('"""Machines')


def records(spark, lines: list[str]):
    """Kafka's records of some JSON lines, taken a minute after noon."""
    at = NOON + timedelta(minutes=1)
    return spark.createDataFrame([(b"k", line.encode(), 0, n, at, None) for n, line in enumerate(lines)], RECORDS)


def test_every_python_block_is_one_that_is_tested():
    starts = ('"""Machines', '"""Web traffic', "import duckdb", "import polars", "from pathlib", "records = ")
    assert [b.startswith(s) for b, s in zip(blocks("python"), starts, strict=True)] == [True] * len(starts)


def test_pipeline_in_full_is_the_file():
    assert block('"""Web traffic') == TRAFFIC.read_text(), f"copy {TRAFFIC.relative_to(ROOT)} into README.md as it is"


def test_own_pipeline_declares_itself_and_answers(spark):
    module = types.ModuleType("machines")
    exec(MACHINES, module.__dict__)
    own = catalog([module])
    refused = {d.name: schema for d, schema in fold.schemas(spark, own) if isinstance(schema, Exception)}
    read = '{"reading_id": "%s", "machine": "press", "celsius": %s, "read_at": "2026-11-19T%sZ"}'
    batches = (
        [read % ("r1", 20.5, "11:59:59"), read % ("r2", 21, "12:00:00")],
        [read % ("r3", 19, "12:00:30"), read % ("r4", 23, "12:00:40"), read % ("r2", 21, "12:00:00")],
    )
    logs = [fold.judged(own.topics["readings"], records(spark, lines)) for lines in batches]
    rolled = [fold.roll(own.rollups["machine_minutes"], {"readings": fold.accepted(own.topics["readings"], log)}) for log in logs]
    minutes = fold.merge(own.rollups["machine_minutes"], fold.union(rolled))
    period = spark.createDataFrame([(NOON - timedelta(hours=12), NOON + timedelta(hours=12))], "start TIMESTAMP, end TIMESTAMP")
    hours = fold.answer(own.views["machine_hours"], module.machine_hours, {"minutes": minutes}, period, settled=True)

    assert refused == {}
    assert own.names == ("readings", "machine_minutes", "machine_hours")
    assert sorted(tuple(row) for row in hours.select(hours.hour.cast("string"), "low", "high").collect()) == [
        ("2026-11-19 11:00:00", 20.5, 20.5),
        ("2026-11-19 12:00:00", 19.0, 23.0),
    ]


def test_own_events_are_judged_as_the_page_says(spark):
    lines = next(b for b in blocks("json")).splitlines()
    log = fold.judged(CATALOG.topics["page_views"], records(spark, lines)).orderBy("kafka.offset")
    judged = log.select("page", log.viewed_at.cast("string").alias("at"), "reject").collect()
    (said,) = [b for b in blocks("") if b.startswith("topic ")]

    assert [(row["page"], row["at"]) for row in judged if not row["reject"]] == [
        ("/", "2026-11-19 12:00:00.25"),
        ("/cart", "2026-11-19 12:00:05"),
    ]
    assert [re.split(r"\s{2,}", line) for line in said.splitlines()[1:]] == [
        ["page_views", row["reject"], "1"] for row in judged if row["reject"]
    ]


# ------------------------------------------------------------------------------------------------------------- snippets

DAY, NEXT = date(2026, 11, 19), date(2026, 11, 20)
TRAFFIC_ROWS = pa.schema(
    [("page", pa.string()), ("pv", pa.int64()), ("uv", pa.int64()), ("settled", pa.bool_()), ("day", pa.date32())]
)
SETTLED = [("/a", 70, 7), ("/b", 90, 9), ("/c", 50, 5), ("/d", 50, 6), ("/e", 1, 1), ("/f", 2, 2)]
ANSWER = [(DAY, "/b", 90, 9), (DAY, "/a", 70, 7), (DAY, "/c", 50, 5), (DAY, "/d", 50, 6), (DAY, "/f", 2, 2)]


@pytest.fixture(scope="module")
def folder(spark, tmp_path_factory) -> Iterator[Path]:
    """A folder with a space in its path, whose lake has a settled day over live rows that it replaced, and a day that is live."""
    folder = tmp_path_factory.mktemp("a reader")
    config = Settings(_env_file=None, home=folder / ".tidemark")
    view = CATALOG.views["daily_traffic"]
    schema = next(schema for declared, schema in fold.schemas(spark, CATALOG) if declared is view)
    table = lake.table(config, view)
    table.create(schema)
    live: list[dict[str, Any]] = [{"page": "/a", "pv": 999, "uv": 99, "settled": False, "day": day} for day in (DAY, NEXT)]
    for row in live:
        since = datetime(row["day"].year, row["day"].month, row["day"].day, tzinfo=UTC)
        files = lake.write_arrow(table, f"live/{lake.hour_of(since)}-all-aa", pa.Table.from_pylist([row], TRAFFIC_ROWS))
        lake.swap_live(config, table, since, since + timedelta(days=1), files, marks=False)
    run = lake.Run("settle-1", "staged", [str(DAY)], "a test", NOON.isoformat(), "0")
    rows = [{"page": p, "pv": pv, "uv": uv, "settled": True, "day": DAY} for p, pv, uv in SETTLED]
    lake.stage(table, run.id, spark.createDataFrame(rows, schema))
    lake.publish(config, table, run, map(date.fromisoformat, run.days), ["main"], {"run": run.id}, whole_days=True)
    yield folder


@pytest.mark.parametrize("start", ["import duckdb", "from pathlib"], ids=["duckdb", "spark"])
def test_snippet_answers_from_the_settled_rows(start, spark, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {"spark": spark}
    exec(block(start), names)
    assert [tuple(row) for row in names["answer"]] == ANSWER


def test_snippet_of_polars_answers_likewise_and_counts_every_row(folder, tmp_path, monkeypatch):
    shutil.copytree(folder / ".tidemark", tmp_path / ".tidemark")  # where the path has no space
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("import polars"), names)
    assert names["answer"] == ANSWER
    assert names["traffic"].select(polars.len()).collect().item() == names["traffic"].collect().height == 1 + len(SETTLED)


def test_advice_on_polars_reads_a_table_whose_path_has_a_space(folder):
    said = "pl.from_arrow(DeltaTable(path).to_pyarrow_table())"
    assert f"`{said}`" in README
    found = eval(said, {"pl": polars, "DeltaTable": DeltaTable, "path": folder / ".tidemark/lake/views/daily_traffic"})
    assert found.height == 1 + len(SETTLED)


def test_advice_on_a_column_that_was_added_later_counts_its_nulls(tmp_path):
    assert "`DeltaTable(path).to_pyarrow_table()`, whole, counts them right" in README
    table = lake.Table(tmp_path, "views/more")
    for seq, row in enumerate(({"n": 1}, {"n": 2, "more": "x"})):
        schema = pa.schema([("n", pa.int64()), *([("more", pa.string())] if seq else []), ("day", pa.date32())])
        rows = pa.Table.from_pylist([row | {"day": DAY}], schema)
        if seq:
            DeltaTable(table.path).alter.add_columns([Schema.from_arrow(schema).fields[1]])
        else:
            DeltaTable.create(table.path, Schema.from_arrow(schema), partition_by=["day"])
        lake.append(table, lake.Batch("main", seq, seq), lake.write_arrow(table, f"live/main-{seq}-{seq}-a", rows))
    found = DeltaTable(table.path).to_pyarrow_table()
    assert found.filter(pc.field("more").is_null()).num_rows == found.filter(pc.field("more").is_valid()).num_rows == 1


def test_query_of_the_page_answers_the_same(folder):
    (line,) = [words for words in map(shlex.split, COMMANDS) if "FROM daily_traffic" in words[-1]]
    found = query(Settings(_env_file=None, home=folder / ".tidemark"), CATALOG, line[2])
    assert found.rows == ANSWER


def test_ledger_query_of_the_page_answers_its_newest_batches_in_one_order(spark, tmp_path):
    (line,) = [words for words in map(shlex.split, COMMANDS) if "FROM ledger" in words[-2]]
    config = Settings(_env_file=None, home=tmp_path)
    table = lake.ledger(config)
    rows = [  # two streams, which count their batches apart
        {"stream": s, "seq": seq, "topic": t, "partition": p, "finished_at": NOON + timedelta(seconds=second), "day": DAY}
        for s, seq, second, t, p in (("alarms", 90, 1, "quotes", 0), ("main", 7, 2, "clicks", 1), ("main", 7, 2, "clicks", 0))
    ]
    ledger = spark.createDataFrame(rows, LEDGER)
    table.create(ledger.schema)
    lake.swap(table, [], lake.write_arrow(table, "live/rows", ledger.toArrow()), {})
    found = query(config, CATALOG, line[2])
    told = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    assert [(r["topic"], r["partition"]) for r in told] == [("clicks", 0), ("clicks", 1), ("quotes", 0)]
    spark.read.format("delta").load(str(table.path)).createOrReplaceTempView("ledger")
    assert spark.sql(line[2]).toArrow().to_pylist() == told


def test_a_stream_of_one_s_own_sees_each_record_once_while_files_are_merged(spark, tmp_path, monkeypatch):
    topic = CATALOG.topics["page_views"]
    table = lake.Table(tmp_path / ".tidemark/lake", topic.table, "viewed_at")
    table.create(fold.schema_of(fold.nothing(spark, fold.log_schema(topic))))
    monkeypatch.chdir(tmp_path)
    said: dict[str, Any] = {"spark": spark}
    source = block("records = ").replace('load(".', f'load("{tmp_path}/.')
    exec(source, said)

    def append(seq: int) -> None:
        line = json.dumps({"event_id": f"e{seq}", "visitor_id": "ann", "page": "/", "viewed_at": "2026-11-19T12:00:00Z"})
        rows = fold.judged(topic, records(spark, [line])).drop("event_time").toArrow()
        batch = lake.Batch("main", seq, seq, {})
        lake.append(table, batch, lake.write_arrow(table, batch.folder, rows))

    def read() -> list[str]:
        writer = said["records"].writeStream.format("delta").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(tmp_path / "mine")).awaitTermination()
        return sorted(r["event_id"] for r in spark.read.format("delta").load(str(tmp_path / "mine")).collect())

    append(0), append(1)
    assert read() == ["e0", "e1"]
    files = table.files()
    merged = lake.read(spark, table).drop("day").withColumn("day", F.lit(files[0].day)).coalesce(1)
    assert lake.swap(table, files, lake.write_spark(table, "live/main-0-1-merged", merged), {}) == 1
    append(2)
    assert read() == ["e0", "e1", "e2"]


# ------------------------------------------------------------------------------------------------- commands and settings


def commands(page: str) -> Iterator[str]:
    """Every command line of a page that begins with `tidemark`."""
    for line in "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines():
        if line.startswith("tidemark "):
            yield shlex.join(shlex.split(line, comments=True))
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    yield from (shlex.join(shlex.split(line)) for line in re.findall(r"`(tidemark [^`]+)`", prose))


COMMANDS = sorted(set(commands(README)))
IN_DOCS = sorted({line for page in (ROOT / "docs").rglob("*.md") for line in commands(page.read_text())} - {*COMMANDS})


def parsed(words: list[str]) -> list[str]:
    """The words that name the command, once the command line has taken all the others. Raises what it refuses.

    A command that is only named, as in prose, need not be complete.
    """
    command: Any = typer.main.get_command(cli.app)
    named: list[str] = []
    while True:
        context = command.make_context(words[0], words[1:], resilient_parsing=not words[1:])
        if not hasattr(command, "commands"):
            return named
        rest = [*context._protected_args, *context.args]
        if not rest:
            return named
        _, command, after = command.resolve_command(context, rest)
        words = [rest[0], *after]
        named.append(rest[0])


@pytest.mark.parametrize("line", [*COMMANDS, *IN_DOCS])
def test_command_of_the_page_is_one_that_the_command_line_takes(line):
    words = shlex.split(line)
    named = parsed([word for word in words if word != "--help"])
    assert CliRunner().invoke(cli.app, [*named, "--help"], prog_name="tidemark").exit_code == 0


@pytest.mark.parametrize(
    "line", ["tidemark sttle", "tidemark settle --dya D", "tidemark produce --sample", "tidemark watch --seconds soon"]
)
def test_command_that_is_wrong_would_be_refused(line):
    with pytest.raises(Exception, match=r"(No such|Missing|not a valid|should be)"):
        parsed(shlex.split(line))


def test_every_command_is_on_the_page():
    top: Any = typer.main.get_command(cli.app)
    every = {(n,) for n, c in top.commands.items() if not hasattr(c, "commands")}
    every |= {(n, below) for n, c in top.commands.items() if hasattr(c, "commands") for below in c.commands}
    said = {tuple(parsed([w for w in shlex.split(line) if w != "--help"])) for line in COMMANDS}
    assert every - said == set()


def test_exit_codes_are_those_of_the_command_line():
    assert [int(row[0]) for row in rows_of("exit code")] == [0, cli.FAILED, cli.WRONG, cli.HELD, cli.INTERRUPTED]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = {word for page in PAGES for word in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert said - targets == set()


def test_every_setting_is_on_the_page_with_its_default_and_no_other():
    below_home = {"lake": ".tidemark/lake", "jars_dir": ".tidemark/jars"}
    wanted = {
        f"TIDEMARK_{name.upper()}": below_home.get(name, "" if field.default is None else str(field.default))
        for name, field in Settings.model_fields.items()
    }
    assert {row[0].strip("`"): row[1].strip("`") for row in rows_of("setting")} == wanted
    assert set(re.findall(r"TIDEMARK_[A-Z_]+", README)) == set(wanted)


def test_env_example_has_every_setting_and_changes_nothing(tmp_path):
    lines = re.findall(r"^# (TIDEMARK_\w+=.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    (tmp_path / ".env").write_text("\n".join(lines))
    example, default = Settings(_env_file=tmp_path / ".env"), Settings(_env_file=None)

    assert sorted(line.split("=")[0] for line in lines) == sorted(f"TIDEMARK_{name.upper()}" for name in Settings.model_fields)
    assert {n: v for n, v in example if n not in ("lake", "jars_dir")} == {
        n: v for n, v in default if n not in ("lake", "jars_dir")
    }
    assert (example.lake_path, example.jars) == (default.lake_path, default.jars)


# -------------------------------------------------------------------------------------------------------- map and links


def test_map_names_what_exists_and_every_module():
    said = {path for row in rows_of("where") for path in re.findall(r"`([^`]+)`", row[0])}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "include/tidemark").glob("*.py") if file.name != "__init__.py"}
    assert {path for path in said if not (ROOT / path).exists()} == set()
    assert modules - said == set()


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in a link."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(link)
    assert dead == []
