"""The lake in DuckDB: each log, rollup and view by its name, read-only, within limits of rows, time and memory."""

from __future__ import annotations

import json
import queue
import re
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tidemark.model import Catalog
from tidemark.settings import Settings

if TYPE_CHECKING:
    import datetime as dt

    import duckdb
    from deltalake import DeltaTable

MEMORY = "1GB"
"""What DuckDB may take, and beside it the rows of an answer."""
LARGEST = 10**9
GRACE = 5.0
"""Seconds that DuckDB has for stopping once it is told to."""
THREAD = "tidemark-query"
READABLE = {"deletionVectors", "columnMapping", "timestampNtz", "vacuumProtocolCheck", "v2Checkpoint"}
FUNCTIONS = {"unnest", "range", "generate_series", "repeat", "json_each", "json_tree"}
NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE", "VALUES_NODE"}
TYPES = {
    "string": "VARCHAR",
    "long": "BIGINT",
    "integer": "INTEGER",
    "short": "SMALLINT",
    "byte": "TINYINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "binary": "BLOB",
    "date": "DATE",
    "timestamp": "TIMESTAMPTZ",
    "timestamp_ntz": "TIMESTAMP",
}


class QueryError(ValueError):
    """A query is refused, wrong or too long; one sentence says which and what would do."""


class QueryStopped(QueryError):
    """It took longer than it was given, or more memory."""


class TableDamaged(QueryError):
    """A file of a table is gone or cut: the query is not at fault."""


@dataclass(frozen=True)
class Result:
    """The rows of a query, in DuckDB's order. `types` are DuckDB's names, `elapsed` is in seconds.

    Instants come with a time zone, UTC. `truncated` says that there were more rows than asked for.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool
    elapsed: float


def places(settings: Settings, catalog: Catalog) -> dict[str, Path]:
    """Where each table of the lake stands, written already or not, by the name that a query uses."""
    tables = {name: settings.lake_path / catalog[name].table for name in catalog.names}
    return tables | {name: settings.lake_path / name for name in ("verdicts", "ledger")}


def written(places: dict[str, Path]) -> dict[str, Path]:
    """Those of the places that hold a Delta table with at least one commit."""
    return {name: path for name, path in places.items() if any((path / "_delta_log").glob("*.json"))}


def connect(
    settings: Settings,
    catalog: Catalog,
    names: Collection[str] | None = None,
    connection: duckdb.DuckDBPyConnection | None = None,
) -> duckdb.DuckDBPyConnection:
    """A closed DuckDB connection in which the named tables (all that are written, unless said) are views.

    Each view is its Delta table as of this call, whatever is published afterwards. The partition column `day` is the
    last column. The connection reads the tables' own files and no other; it cannot load, attach or be set otherwise.
    It does not by itself keep `COPY` from those files: SQL from a person goes through `query`. `connection` is made so
    instead of a new one, which costs 27 ms.
    Raises `QueryError` for a table that cannot be read rightly.
    """
    import duckdb

    tables = written(places(settings, catalog))
    connection = connection or duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'; SET autoinstall_known_extensions = false; SET python_enable_replacements = false")
    bounded(connection)
    allowed: list[str] = []
    for name, path in tables.items():
        if names is None or name in names:
            select, files = snapshot(name, path)
            try:
                connection.execute(f'CREATE VIEW "{name}" AS {select}')
            except duckdb.Error as error:
                connection.close()
                raise wrong(error, {}, f"{name} cannot be read: ") from None
            allowed += files
    both = {*allowed, *map(literal, allowed)}  # DuckDB asks first for the pattern, then for the file
    connection.execute(f"SET allowed_paths = [{', '.join(map(quoted, sorted(both)))}]")
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    return connection


def bounded(connection: duckdb.DuckDBPyConnection) -> None:
    """Have a connection take `MEMORY` at most, and put what is more into a folder of its own, which goes with it."""
    connection.execute(f"SET memory_limit = '{MEMORY}'")
    connection.execute(f"SET temp_directory = {quoted(str(Path(tempfile.gettempdir()) / f'tidemark-{uuid.uuid4().hex}'))}")


def query(settings: Settings, catalog: Catalog, sql: str, *, rows: int | None = None, seconds: float | None = None) -> Result:
    """Answer one SELECT, WITH, VALUES, DESCRIBE, SUMMARIZE or SHOW over the lake.

    `rows` and `seconds` are the settings' limits unless said. Raises `QueryError` for any other statement, a function
    that reads files, an unknown table or column, and when the time or memory is used up.
    """
    import duckdb

    rows = settings.query_rows if rows is None else rows
    seconds = settings.query_seconds if seconds is None else seconds
    started = time.monotonic()
    known = places(settings, catalog)
    connection = duckdb.connect()
    try:
        named = names(sql, connection)
        connect(settings, catalog, None if named is None else {n for n in known if n in named}, connection)
    except BaseException:
        connection.close()
        raise
    asking = Asking(connection, sql, rows)
    try:
        description, found = asking.answer(seconds)
    except (duckdb.InterruptException, TimeoutError):
        raise QueryStopped(
            f"the query took longer than {seconds:g} seconds and was stopped; ask for fewer days "
            "(day is the partition), or give it longer with --seconds"
        ) from None
    except (duckdb.OutOfMemoryException, MemoryError):
        raise QueryStopped(f"the query needs more than {MEMORY} of memory; ask for fewer days or columns") from None
    except duckdb.Error as error:
        raise wrong(error, known) from None
    except (OverflowError, ValueError) as error:
        raise QueryError(f"a value does not fit into Python ({error}); cast the column to VARCHAR") from None
    finally:
        asking.ends()
    return Result(
        tuple(d[0] for d in description),
        tuple(str(d[1]) for d in description),
        found[:rows],
        len(found) > rows,
        time.monotonic() - started,
    )


class Asking:
    """A statement in a thread of its own. DuckDB looks between two parts of the data whether it is to stop: one call of a
    function over a long text may take hours, in which Python handles no signal either. Nobody waits for it."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, sql: str, rows: int) -> None:
        self.connection, self.told = connection, queue.SimpleQueue[Any]()
        self.thread = threading.Thread(target=self.ask, args=(sql, rows), name=THREAD, daemon=True)
        self.thread.start()

    def ask(self, sql: str, rows: int) -> None:
        try:
            self.connection.execute(sql)
            found, size = list[tuple[Any, ...]](), 0
            while len(found) <= rows and (row := self.connection.fetchone()):
                found.append(row)
                if (size := size + memory_of(row)) > LARGEST:
                    found.clear()
                    raise MemoryError
            self.told.put((self.connection.description or [], found))
        except BaseException as error:
            self.told.put(error)

    def answer(self, seconds: float) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """The columns' description, and the rows, one more than asked for where there are more. Raises what DuckDB raises, and
        `TimeoutError`."""
        try:
            found = self.told.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(found, BaseException):
            raise found
        return found

    def ends(self) -> None:
        if self.thread.is_alive():
            self.connection.interrupt()
            self.thread.join(GRACE)
        if not self.thread.is_alive():
            self.connection.close()


def memory_of(value: Any) -> int:
    """Bytes that a value of an answer takes, what is inside it included."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sys.getsizeof(value) + sum(map(memory_of, inside))


def goes_on() -> bool:
    """Whether a statement of this process, which was stopped, still runs."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def names(sql: str, parser: duckdb.DuckDBPyConnection) -> set[str] | None:
    """The tables that a statement names, in lower case, or None when it asks about all (SHOW TABLES, the catalog).

    Raises `QueryError` for anything but one reading statement. A statement's type is not enough: DuckDB calls
    `WITH x AS (COPY … TO …) SELECT …` a SELECT, so its syntax tree is looked through.
    """
    try:
        tree = json.loads(parser.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0][0])
        every = list(nodes(tree))
    except RecursionError:
        raise QueryError("the query is nested too deep; write it flatter, a list instead of a chain of operators") from None
    if tree["error"] and tree.get("error_type") == "parser":
        raise QueryError(f"this is not SQL that DuckDB reads: {tree['error_message'].splitlines()[0]}")
    if tree["error"]:
        raise QueryError("the lake is read-only: a query is one SELECT, WITH, VALUES, DESCRIBE, SUMMARIZE or SHOW")
    if len(tree["statements"]) != 1:
        raise QueryError(f"a query is one statement, not {len(tree['statements'])}")
    found: set[str] = set()
    everything = False
    for node in every:
        kind = node.get("type")
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in NODES:
            raise QueryError(f"the lake is read-only: {kind.split('_')[0]} within a query is refused")
        if kind == "TABLE_FUNCTION" and node["function"].get("function_name") not in FUNCTIONS:
            function = node["function"].get("function_name")
            raise QueryError(f"{function}() is refused: a query reads the lake's tables by name (tidemark tables lists them)")
        if kind in ("BASE_TABLE", "SHOW_REF"):
            everything |= node.get("schema_name") not in ("", "main") or node.get("show_type") in ("SHOW_SPECIAL", "SHOW_FROM")
            everything |= node["table_name"].startswith(("duckdb_", "pg_", "sqlite_"))
            found.add(node["table_name"].strip('"').lower())
    return None if everything else found


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from nodes(child)
    if isinstance(tree, dict):
        yield tree


def snapshot(name: str, path: Path) -> tuple[str, list[str]]:
    """A Delta table's newest version as a SELECT over its files, and those files.

    The columns and types are the table's: a column that a file lacks reads as null, and an empty table has its columns.
    The partition column is each file's own, from the Delta log. DuckDB opens no file before the query asks for it.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        table = DeltaTable(path)
        refuse_unreadable(name, table)
        fields = {f["name"]: f["type"] for f in json.loads(table.schema().to_json())["fields"]}
        adds = table.get_add_actions(flatten=True)
    except DeltaError as error:
        raise TableDamaged(f"{name} cannot be read at {path}: {str(error).splitlines()[0]}; {MENDS}") from None
    for version in range(table.version(), -1, -1):
        entry = path / "_delta_log" / f"{version:020}.json"
        if not entry.is_file() or entry.with_suffix(".checkpoint.parquet").exists():
            break
        if not entry.stat().st_size:  # which Delta takes for a commit of nothing
            why = f"log entry {entry.name} is empty, as a power cut leaves it"
            raise TableDamaged(f"{name} cannot be read at {path}: {why}; {MENDS}")
    partitions = table.metadata().partition_columns
    if partitions != ["day"]:
        raise QueryError(f"{name} at {path} is partitioned by {', '.join(partitions) or 'nothing'}; the lake's tables are by day")
    types = {column: duckdb_type(name, kind) for column, kind in fields.items() if column != "day"}
    # DuckDB 2.0.0 reads a field alone, and of a file that lacks it gives another one's values or an internal error.
    told = {c for c in adds.column_names if c.startswith("null_count.") and not adds.column(c).null_count}
    lacking = [
        f'CASE WHEN "{c}" IS NOT NULL THEN "{c}" END AS "{c}"'
        for c, kind in fields.items()
        if any(f"null_count.{leaf}" not in told for leaf in leaves(c, kind, inside=False))
    ]
    whole = f" REPLACE ({', '.join(lacking)})" if lacking else ""
    days: dict[dt.date | None, list[Path]] = defaultdict(list)
    for file, day in zip(adds.column("path").to_pylist(), adds.column("partition.day").to_pylist(), strict=True):
        days[day].append(path / unquote(file))
    selects = [
        f"SELECT *{whole}, {f'DATE {quoted(str(day))}' if day else 'NULL::DATE'} AS day FROM {parquet(files, types)}"
        for day, files in sorted(days.items(), key=lambda item: str(item[0]))
    ]
    empty = ", ".join(f'NULL::{t} AS "{c}"' for c, t in types.items())
    return " UNION ALL ".join(selects) or f"SELECT {empty}, NULL::DATE AS day WHERE false", [
        str(f) for d in days.values() for f in d
    ]


def leaves(column: str, kind: Any, inside: bool = True) -> list[str]:
    """The fields of a struct column, however deep, lists and maps among them, of which no statistics tell; none of any other
    column."""
    if isinstance(kind, dict) and kind["type"] == "struct":
        return [leaf for field in kind["fields"] for leaf in leaves(f"{column}.{field['name']}", field["type"])]
    return [column] if inside else []


def parquet(files: Iterable[Path], types: Mapping[str, str]) -> str:
    """Parquet files as DuckDB's FROM takes them, by these columns and types alone; a struct may have some of its fields."""
    columns = ", ".join(f"{quoted(c)}: {{name: {quoted(c)}, type: {quoted(t)}, default_value: NULL}}" for c, t in types.items())
    return f"read_parquet([{', '.join(quoted(literal(str(f))) for f in files)}], schema = MAP {{{columns}}})"


def refuse_unreadable(name: str, table: DeltaTable) -> None:
    """Raises `QueryError` where the Parquet files alone would give wrong rows."""
    features = set(table.protocol().reader_features or ())
    unknown = sorted(features - READABLE)
    if unknown:
        raise QueryError(f"{name} needs a reader with {', '.join(unknown)}; read it with Spark")
    if (table.metadata().configuration or {}).get("delta.columnMapping.mode", "none") != "none":
        raise QueryError(f"{name} maps its columns to other names in the files (delta.columnMapping.mode); read it with Spark")
    if "deletionVectors" in features and any(batch.num_rows > 0 for batch in table.deletion_vectors()):
        raise QueryError(f"{name} has deletion vectors; run REORG TABLE delta.`{table.table_uri}` APPLY (PURGE) in Spark")


def duckdb_type(name: str, kind: Any) -> str:
    """DuckDB's type for a type of Delta's schema. Raises `QueryError` for one that it does not have."""
    if isinstance(kind, dict) and kind["type"] == "struct":
        members = ", ".join(f'"{field["name"]}" {duckdb_type(name, field["type"])}' for field in kind["fields"])
        return f"STRUCT({members})"
    if isinstance(kind, dict) and kind["type"] == "array":
        return f"{duckdb_type(name, kind['elementType'])}[]"
    if isinstance(kind, dict) and kind["type"] == "map":
        return f"MAP({duckdb_type(name, kind['keyType'])}, {duckdb_type(name, kind['valueType'])})"
    if isinstance(kind, str) and kind.startswith("decimal"):
        return kind.upper()
    if kind not in TYPES:
        raise QueryError(f"{name} has a column of type {kind}, which DuckDB does not read; read it with Spark")
    return TYPES[kind]


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def literal(path: str) -> str:
    """A path whose `*`, `?` and `[` mean themselves: DuckDB takes file names for patterns."""
    return re.sub(r"([*?\[])", r"[\1]", path)


MENDS = "tidemark verify finds what else is damaged, and docs/operating.md, Damaged files, has the way out"


def wrong(error: duckdb.Error, known: dict[str, Path], what: str = "") -> QueryError:
    """What DuckDB raised, as ours: against the query, or against a file of the lake."""
    said = what + sentence(str(error), known)
    file = re.match(r'Permission Error: Cannot access file "(.+?)"', str(error))
    if file and not file[1].endswith("/**/*.parquet"):  # which DuckDB looks for where one of ours is gone
        return QueryError(f"{file[1]} is refused: a query reads the lake's tables by name (tidemark tables lists them)")
    return TableDamaged(f"{said}; {MENDS}") if re.search(r"\.parquet\b", str(error)) else QueryError(said)


def sentence(message: str, known: dict[str, Path]) -> str:
    """DuckDB's message as one sentence that lists the tables where one was missing."""
    lines = [line.strip() for line in message.splitlines()]
    missing = re.match(r"Catalog Error: Table with name (.+?) does not exist", lines[0])
    if missing:
        there = sorted(written(known))
        name = missing[1].strip('"')
        if name.lower() in known:
            return f"{name} holds nothing yet: its table is written with its first rows; written are {', '.join(there) or 'none'}"
        return f"there is no table {name}; there are {', '.join(there) or 'none yet (tidemark up, then tidemark produce)'}"
    also = [line for line in lines[1:] if line.startswith("Candidate")]
    return " ".join((re.sub(r"^[\w ]+ Error: ", "", lines[0]), *also))
