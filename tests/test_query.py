"""query.py over real Delta tables, written as lake.py writes them: Parquet in folders of its own, one commit by delta-rs."""

import datetime as dt
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction

from tidemark import lake
from tidemark.model import Catalog, Live, Topic, View, rollup
from tidemark.query import QueryError, Result, TableDamaged, connect, goes_on, query, snapshot, wrong
from tidemark.settings import Settings

NOV_18, NOV_19 = dt.date(2026, 11, 18), dt.date(2026, 11, 19)
NOON = dt.datetime(2026, 11, 19, 12, tzinfo=dt.UTC)

VIEWS = Topic(
    "page_views", key="page", partitions=1, schema="page STRING NOT NULL, viewed_at TIMESTAMP NOT NULL", event_time="viewed_at"
)


@rollup(reads={"views": VIEWS}, key=("page", "pane"), time="pane", merge={"views": "distinct"})
def page_panes(views):
    return views


HOURLY = View("hourly_traffic", lambda panes: panes, {"panes": page_panes}, ("hour",), "hour", Live("1 second", "1 hour"))
CATALOG = Catalog({"page_views": VIEWS}, {"page_panes": page_panes}, {"hourly_traffic": HOURLY})

KAFKA = pa.struct([("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.binary())])
LOG = pa.schema([("page", pa.string()), ("viewed_at", pa.timestamp("us", "UTC")), ("kafka", KAFKA), ("reject", pa.string())])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def ask(settings: Settings) -> Callable[..., Result]:
    return lambda sql, rows=100, seconds=20: query(settings, CATALOG, sql, rows=rows, seconds=seconds)


def table(settings: Settings, where: str, schema: pa.Schema = LOG) -> DeltaTable:
    path = settings.lake_path / where
    path.mkdir(parents=True)
    return DeltaTable.create(path, Schema.from_arrow(schema.append(pa.field("day", pa.date32()))), partition_by=["day"])


def add(table: DeltaTable, folder: str, day: dt.date, rows: list[dict], schema: pa.Schema = LOG) -> str:
    """One commit of one file, as lake.py makes it; the file has no column for the partition."""
    path = f"{folder}/day={day}/part-0.parquet"
    file = Path(unquote(table.table_uri.removeprefix("file://"))) / path
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), file)
    action = AddAction(path, file.stat().st_size, {"day": str(day)}, 0, True, json.dumps({"numRecords": len(rows)}))
    table.create_write_transaction([action], "append", table.schema(), ["day"])
    table.update_incremental()
    return path


def view_of(page: str | None, offset: int = 0, reject: str | None = None) -> dict:
    return {"page": page, "viewed_at": NOON, "kafka": {"partition": 0, "offset": offset, "value": b"{}"}, "reject": reject}


def test_log_stands_by_its_name_with_rejects_and_day(settings, ask):
    log = table(settings, "log/page_views")
    add(log, "live/main-1-a1", NOV_18, [view_of("/a", 0)])
    add(log, "live/main-2-b2", NOV_19, [view_of("/b", 1), view_of(None, 2, reject="not JSON")])

    found = ask("SELECT day, kafka.offset, page, reject, viewed_at FROM page_views ORDER BY 2")

    assert found.columns == ("day", "offset", "page", "reject", "viewed_at")
    assert found.types == ("DATE", "BIGINT", "VARCHAR", "VARCHAR", "TIMESTAMP WITH TIME ZONE")
    assert [row[:4] for row in found.rows] == [
        (NOV_18, 0, "/a", None),
        (NOV_19, 1, "/b", None),
        (NOV_19, 2, None, "not JSON"),
    ]
    assert found.rows[0][4] == NOON and found.rows[0][4].utcoffset() == dt.timedelta(0)
    assert not found.truncated


def test_every_kind_of_table_stands_by_its_name(settings, ask):
    for where in ("log/page_views", "rollups/page_panes", "views/hourly_traffic", "verdicts", "ledger"):
        table(settings, where)
    assert [row[0] for row in ask("SHOW TABLES").rows] == ["hourly_traffic", "ledger", "page_panes", "page_views", "verdicts"]


def test_table_without_files_is_empty_with_its_columns(settings, ask):
    table(settings, "log/page_views")
    found = ask("SELECT * FROM page_views")
    assert found.columns == ("page", "viewed_at", "kafka", "reject", "day")
    assert found.types[-1] == "DATE" and found.rows == []


def test_sketch_column_is_bytes(settings, ask):
    schema = pa.schema([("page", pa.string()), ("views", pa.binary())])
    add(table(settings, "rollups/page_panes", schema), "live/main-1-a1", NOV_19, [{"page": "/", "views": b"\x00\x01"}], schema)
    assert ask("SELECT views FROM page_panes").rows == [(b"\x00\x01",)]


def test_column_added_later_is_null_in_older_files(settings, ask):
    log = table(settings, "log/page_views")
    add(log, "live/main-1-a1", NOV_19, [view_of("/old", 1)])
    log.alter.add_columns([Schema.from_arrow(pa.schema([("price", pa.decimal128(10, 2))])).fields[0]])
    wide = LOG.append(pa.field("price", pa.decimal128(10, 2)))
    add(log, "live/main-2-b2", NOV_19, [view_of("/new", 2) | {"price": 5}], wide)
    assert ask("SELECT page, price::VARCHAR FROM page_views ORDER BY kafka.offset").rows == [("/old", None), ("/new", "5.00")]


def test_member_added_to_a_struct_is_null_in_older_files(settings, ask):
    narrow = pa.schema([("kafka", pa.struct([("offset", pa.int64())]))])
    log = table(settings, "log/page_views")
    add(log, "live/main-1-a1", NOV_19, [{"kafka": {"offset": 7}}], narrow)
    assert ask("SELECT kafka FROM page_views").rows == [({"partition": None, "offset": 7, "value": None},)]


def test_field_of_a_struct_that_older_files_lack_is_null_there(settings, ask):
    log, old = table(settings, "log/page_views"), pa.schema([("page", pa.string())])
    add(log, "live/main-0-a0", NOV_19, [{"page": "/"}], old)
    add(log, "live/main-1-a1", NOV_19, [{"kafka": {"offset": 7}}], pa.schema([("kafka", pa.struct([("offset", pa.int64())]))]))
    add(log, "live/main-2-b2", NOV_19, [view_of("/b", 8)])
    found = ask("SELECT kafka.offset, kafka.partition FROM page_views ORDER BY 1 NULLS FIRST")
    assert found.rows == [(None, None), (7, None), (8, 0)]
    assert ask("SELECT kafka.partition FROM page_views WHERE kafka.offset = 7").rows == [(None,)]


@pytest.mark.parametrize(
    ("beside", "older"),
    [([], None), ([("n", pa.int64())], None), ([("n", pa.int64())], {"n": 1})],
    ids=["lists alone", "beside a number", "beside a number that is there"],
)
def test_list_in_a_struct_that_older_files_lack_is_null_there(settings, beside, older):
    """No statistics tell of a list."""
    said = pa.struct([*beside, ("tags", pa.list_(pa.string())), ("more", pa.list_(pa.int64()))])
    fields, path = [("page", pa.string()), ("z", pa.int64())], settings.lake_path / "rollups" / "t"
    new = pa.schema([*fields, ("said", said)])
    table(settings, "rollups/t", new)
    both = [(new, {"page": "/new", "z": 2, "said": {"n": 3, "tags": ["x"], "more": [5]}})]
    both += [(pa.schema([*fields, *([("said", pa.struct(beside))] if older else [])]), {"page": "/old", "z": 1, "said": older})]
    for n, (schema, row) in enumerate(both):
        rows = pa.Table.from_pylist([row | {"day": NOV_19}], schema.append(pa.field("day", pa.date32())))
        whole = lake.Table(settings.lake_path, "rollups/t", None)
        lake.commit(whole, lambda n=n, rows=rows, whole=whole: (lake.write_arrow(whole, f"live/main-{n}-{n}-a", rows), {}))
    with duckdb.connect() as db:
        selected, _ = snapshot("t", path)
        assert db.sql(f"SELECT page, said.more FROM ({selected}) ORDER BY z").fetchall() == [("/old", None), ("/new", [5])]
        assert db.sql(f"SELECT page FROM ({selected}) WHERE said.more IS NULL").fetchall() == [("/old",)]


def test_path_with_signs_that_urls_and_patterns_use(tmp_path):
    settings = Settings(home=tmp_path, lake=tmp_path / "it's [1] *" / "lake")
    add(table(settings, "log/page_views"), "live/main 1+%41é", NOV_19, [view_of("/a")])
    shutil.copytree(settings.lake_path.parent, tmp_path / "it's 1 as the pattern has it")
    assert query(settings, CATALOG, "SELECT page FROM page_views", rows=9, seconds=20).rows == [("/a",)]


def test_file_outside_the_table_is_not_read(settings, ask):
    log = table(settings, "log/page_views")
    add(log, "live/main-1-a1", NOV_19, [view_of("/a")])
    undecided = settings.lake_path / "log/page_views/runs/r1/day=2026-11-19/part-0.parquet"
    undecided.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([view_of("/undecided")], LOG), undecided)
    assert ask("SELECT page FROM page_views").rows == [("/a",)]


def test_open_connection_keeps_its_snapshot_through_a_publication(settings, ask):
    log = table(settings, "log/page_views")
    old = add(log, "live/main-1-a1", NOV_19, [view_of("/live")])
    connection = connect(settings, CATALOG, {"page_views"})
    new = "runs/r1/day=2026-11-19/part-0.parquet"
    file = settings.lake_path / "log/page_views" / new
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([view_of("/settled")], LOG), file)
    swap = [
        AddAction(new, file.stat().st_size, {"day": "2026-11-19"}, 0, True, "{}"),
        RemoveAction(old, True, 0, partition_values={"day": "2026-11-19"}),
    ]
    log.create_write_transaction(swap, "append", log.schema(), ["day"])
    assert connection.execute("SELECT page FROM page_views").fetchall() == [("/live",)]
    assert ask("SELECT page FROM page_views").rows == [("/settled",)]


def test_day_filter_reads_the_files_of_that_day_only(settings, ask):
    log = table(settings, "log/page_views")
    other = add(log, "live/main-1-a1", NOV_18, [view_of("/a")])
    add(log, "live/main-2-b2", NOV_19, [view_of("/b")])
    (settings.lake_path / "log/page_views" / other).write_bytes(b"not Parquet, though long enough")
    assert ask("SELECT page FROM page_views WHERE day = '2026-11-19'").rows == [("/b",)]
    with pytest.raises(TableDamaged, match="No magic bytes"):
        ask("SELECT page FROM page_views")


def test_file_that_is_gone_is_said(settings, ask):
    log = table(settings, "log/page_views")
    (settings.lake_path / "log/page_views" / add(log, "live/main-1-a1", NOV_19, [view_of("/a")])).unlink()
    with pytest.raises(
        TableDamaged, match=r"page_views cannot be read: No files found .*live/main-1-a1.*; tidemark verify finds"
    ):
        ask("SELECT page FROM page_views")


def test_file_that_goes_while_a_connection_has_its_table_is_a_table_s_damage(settings):
    log = table(settings, "log/page_views")
    path = add(log, "live/main-1-a1", NOV_19, [view_of("/a")])
    connection = connect(settings, CATALOG)
    (settings.lake_path / "log/page_views" / path).unlink()
    with pytest.raises(duckdb.Error) as raised:
        connection.execute("SELECT page FROM page_views")
    assert isinstance(wrong(raised.value, {}), TableDamaged)


@pytest.mark.parametrize("name", ["x.parquet", "/nowhere/*.parquet", "{lake}/log/page_views/live/x.parquet"])
def test_file_that_a_query_names_is_refused_and_no_table_s_damage(settings, ask, name):
    table(settings, "log/page_views")
    name = name.format(lake=settings.lake_path)
    with pytest.raises(QueryError, match=f"{re.escape(name)} is refused: a query reads the lake's tables by name") as raised:
        ask(f"SELECT * FROM '{name}'")
    assert not isinstance(raised.value, TableDamaged)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "WITH a AS (SELECT page FROM page_views) SELECT count(*) FROM a",
        "FROM PAGE_VIEWS",
        'SELECT v.page FROM "page_views" v JOIN main.page_views w USING (page)',
        "SELECT 1 WHERE EXISTS (SELECT 1 FROM page_views)",
        "SELECT page FROM page_views UNION SELECT 'x'",
        "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 3) SELECT * FROM n",
        "DESCRIBE page_views",
        "SHOW page_views",
        "SUMMARIZE page_views",
        "SELECT * FROM information_schema.tables",
        "SELECT view_name FROM duckdb_views",
        "SELECT unnest(range(3))",
        "SELECT * FROM range(3)",
        "VALUES (1)",
        "SELECT 1;",
    ],
)
def test_reading_statement_is_answered(settings, ask, sql):
    add(table(settings, "log/page_views"), "live/main-1-a1", NOV_19, [view_of("/a")])
    assert ask(sql).columns


FORBIDDEN = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM read_json('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM '{file}'",
    "SELECT * FROM read_parquet('{file}')",
    "SELECT * FROM parquet_metadata('{file}')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM glob('{lake}/**')",
    "SELECT * FROM sniff_csv('/etc/passwd')",
    "SELECT * FROM read_parquet('https://127.0.0.1:1/x.parquet')",
    "SELECT * FROM (DESCRIBE SELECT * FROM read_csv('/etc/passwd'))",
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM query_table('page_views')",
    "SELECT * FROM duckdb_secrets()",
    "COPY page_views TO '{out}'",
    "COPY page_views TO '{file}'",
    "WITH x AS (COPY (SELECT 1 AS i) TO '{file}' (USE_TMP_FILE false)) SELECT * FROM x",
    "WITH x AS (COPY (SELECT page FROM page_views LIMIT 0) TO '{file}' (USE_TMP_FILE false)) SELECT * FROM x",
    "WITH x AS (INSERT INTO page_views VALUES (1) RETURNING *) SELECT * FROM x",
    "EXPLAIN ANALYZE COPY page_views TO '{out}'",
    "EXPORT DATABASE '{out}'",
    "ATTACH '{out}'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA threads = 1",
    "CALL pragma_version()",
    "CREATE TABLE x (i INTEGER)",
    "CREATE VIEW x AS SELECT 1",
    "INSERT INTO page_views VALUES (1)",
    "DELETE FROM page_views",
    "DROP VIEW page_views",
    "BEGIN",
    "PREPARE x AS SELECT 1",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY page_views TO '{out}'",
    "",
]


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_statement_that_does_more_than_read_the_lake_is_refused(settings, ask, tmp_path, sql):
    file = settings.lake_path / "log/page_views" / add(table(settings, "log/page_views"), "live/m-1-a", NOV_19, [view_of("/a")])
    before, out = file.read_bytes(), tmp_path / "out"
    with pytest.raises(QueryError) as refused:
        ask(sql.format(file=file, lake=settings.lake_path, out=out))
    assert len(str(refused.value).splitlines()) == 1
    assert file.read_bytes() == before and not out.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM glob('{lake}/**')",
        "SELECT * FROM read_text('{lake}/log/page_views/_delta_log/00000000000000000000.json')",
        "SELECT * FROM read_parquet('{unpublished}')",
        "COPY page_views TO '{out}'",
        "ATTACH '{out}'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET allowed_directories = ['/']",
        "SET memory_limit = '64GB'",
    ],
)
def test_connection_is_closed_even_to_sql_that_nobody_looked_through(settings, tmp_path, sql):
    import duckdb

    add(table(settings, "log/page_views"), "live/main-1-a1", NOV_19, [view_of("/a")])
    unpublished, out = settings.lake_path / "log/page_views/unpublished.parquet", tmp_path / "out"
    pq.write_table(pa.table({"x": [1]}), unpublished)
    connection = connect(settings, CATALOG)
    with pytest.raises(duckdb.Error):
        connection.execute(sql.format(lake=settings.lake_path, unpublished=unpublished, out=out)).fetchall()
    assert not out.exists()


def test_more_rows_than_the_limit_are_cut_and_said(ask):
    found = ask("SELECT * FROM range(1000000000000)", rows=5)
    assert found.rows == [(0,), (1,), (2,), (3,), (4,)] and found.truncated


def test_exactly_as_many_rows_as_the_limit_are_whole(ask):
    assert not ask("SELECT * FROM range(5)", rows=5).truncated


def test_limits_greater_than_any_are_none(ask):
    found = ask("SELECT 1", rows=10**30, seconds=float("inf"))
    assert (found.rows, found.truncated) == ([(1,)], False)


@pytest.mark.parametrize("text", ["repeat('a', 1000)", "[repeat('a', 1000)]", "{'value': repeat('a', 1000)::BLOB}"])
def test_few_rows_but_large_ones_are_refused_before_they_fill_the_memory(ask, monkeypatch, text):
    monkeypatch.setattr("tidemark.query.LARGEST", 100_000)
    assert len(ask(f"SELECT {text} FROM range(50)").rows) == 50
    with pytest.raises(QueryError, match=r"the query needs more than 1GB of memory; ask for fewer days or columns"):
        ask(f"SELECT {text} FROM range(1000000000)", rows=1000)


def test_query_longer_than_the_limit_is_stopped(ask):
    with pytest.raises(QueryError, match=r"longer than 0.2 seconds"):
        ask("SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(10000000) b", seconds=0.2)


def test_one_call_of_a_function_that_takes_for_ever_is_left_to_itself(ask, monkeypatch):
    monkeypatch.setattr("tidemark.query.GRACE", 0.1)
    with pytest.raises(QueryError, match=r"longer than 0.2 seconds"):
        ask("SELECT levenshtein(repeat('a', 50000), repeat('b', 50000))", seconds=0.2)
    assert goes_on()


def test_limits_are_the_settings_unless_said(tmp_path):
    settings = Settings(home=tmp_path, query_rows=2)
    assert query(settings, CATALOG, "SELECT * FROM range(5)").truncated


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT * FROM page_vews", "there is no table page_vews; there are page_views"),
        (
            "SELECT * FROM hourly_traffic",
            "hourly_traffic holds nothing yet: its table is written with its first rows; written are",
        ),
        ("SELECT pagee FROM page_views", 'Referenced column "pagee" not found in FROM clause! Candidate bindings: "page"'),
        ("SELECT 1 +", 'this is not SQL that DuckDB reads: syntax error at or near "+"'),
        ("SELECT nothing_like_it(1)", "Scalar Function with name nothing_like_it does not exist!"),
        ("SELECT 1; SELECT 2", "a query is one statement, not 2"),
        (f"SELECT 1{'+1' * 900}", "the query is nested too deep"),
        (f"SELECT {'[' * 900}{']' * 900}", "the query is nested too deep"),
        ("DROP VIEW page_views", "the lake is read-only"),
    ],
)
def test_error_is_one_sentence_that_names_the_thing(settings, ask, sql, says):
    table(settings, "log/page_views")
    with pytest.raises(QueryError) as error:
        ask(sql)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_only_tables_that_the_sql_names_are_listed(settings, ask):
    add(table(settings, "log/page_views"), "live/main-1-a1", NOV_19, [view_of("/a")])
    broken = table(settings, "views/hourly_traffic")
    (settings.lake_path / "views/hourly_traffic/_delta_log/00000000000000000000.json").write_text("{}")
    assert ask("SELECT page FROM page_views").rows == [("/a",)]
    with pytest.raises(TableDamaged, match="hourly_traffic cannot be read"):
        ask("SELECT * FROM hourly_traffic")
    assert broken


@pytest.mark.parametrize("later", [0, 1], ids=["newest", "older"])
def test_empty_log_entry_is_refused_rather_than_read_as_nothing(settings, ask, later):
    one = table(settings, "log/page_views")
    for n in range(1 + later):
        add(one, f"live/main-{n}-a{n}", NOV_19, [view_of("/a")])
    (settings.lake_path / "log/page_views/_delta_log/00000000000000000001.json").write_bytes(b"")
    with pytest.raises(TableDamaged, match=r"page_views cannot be read at \S+: log entry 00000000000000000001.json is empty"):
        ask("SELECT page FROM page_views")


def test_column_mapping_is_refused_rather_than_read_wrongly(settings, ask):
    change_protocol(
        table(settings, "log/page_views"),
        {"minReaderVersion": 2, "minWriterVersion": 5},
        {"delta.columnMapping.mode": "name"},
    )
    with pytest.raises(QueryError, match="page_views maps its columns"):
        ask("SELECT * FROM page_views")


def test_unknown_reader_feature_is_refused(settings, ask):
    features = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["typeWidening"],
        "writerFeatures": ["typeWidening"],
    }
    change_protocol(table(settings, "log/page_views"), features, {})
    with pytest.raises(QueryError, match=r"page_views .*typeWidening"):
        ask("SELECT * FROM page_views")


def test_deletion_vectors_are_refused_where_there_are_any(settings, ask):
    log = table(settings, "log/page_views")
    features = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors"],
    }
    change_protocol(log, features, {"delta.enableDeletionVectors": "true"})
    assert ask("SELECT * FROM page_views").rows == []
    file = settings.lake_path / "log/page_views/part-0.parquet"
    pq.write_table(pa.Table.from_pylist([view_of("/a"), view_of("/deleted")], LOG), file)
    # The vector of row 1 alone, inline: the encoding that the Delta protocol gives in "Deletion Vector Format".
    vector = {"storageType": "i", "pathOrInlineDv": inline_vector(1), "sizeInBytes": 34, "cardinality": 1}
    action = {"path": file.name, "partitionValues": {"day": "2026-11-19"}, "size": file.stat().st_size, "modificationTime": 0}
    commit(log, [{"add": action | {"dataChange": True, "stats": '{"numRecords":2}', "deletionVector": vector}}])
    with pytest.raises(QueryError, match="page_views has deletion vectors; run REORG TABLE"):
        ask("SELECT * FROM page_views")


def inline_vector(row: int) -> str:
    import base64
    import struct

    bitmap = struct.pack("<IIHHIH", 12346, 1, 0, 0, 16, row)
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    z85 = bytes.maketrans(
        b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
        b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    )
    return base64.b85encode(data + b"\0" * (-len(data) % 4)).translate(z85).decode()


def change_protocol(table: DeltaTable, protocol: dict, configuration: dict) -> None:
    first = Path(unquote(table.table_uri.removeprefix("file://"))) / "_delta_log/00000000000000000000.json"
    metadata = next(json.loads(line) for line in first.read_text().splitlines() if "metaData" in line)
    metadata["metaData"]["configuration"] |= configuration
    if "columnMapping" in str(configuration):
        fields = json.loads(metadata["metaData"]["schemaString"])
        fields["fields"] = [f for f in fields["fields"] if f["name"] in ("page", "day")]
        for number, field in enumerate(fields["fields"]):
            field["metadata"] |= {"delta.columnMapping.id": number + 1, "delta.columnMapping.physicalName": f"c{number}"}
        metadata["metaData"]["schemaString"] = json.dumps(fields)
    commit(table, [{"protocol": protocol}, metadata])


def commit(table: DeltaTable, actions: list[dict]) -> None:
    log = Path(unquote(table.table_uri.removeprefix("file://"))) / "_delta_log"
    number = len(list(log.glob("*.json")))
    (log / f"{number:020}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")
