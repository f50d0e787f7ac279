"""The queries of docs/pipelines.md over what the pipelines make of a few events, asked of `tidemark query`, DuckDB and Spark."""

import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from laws import TOOK, Lake, log_of, said

from tidemark import fold, lake, query
from tidemark.model import Topic, catalog
from tidemark.pipelines import alarms, local_buyers, payments, profiles, searches, stocks, study, visits, words
from tidemark.settings import Settings

PAGE = (Path(__file__).parent.parent / "docs/pipelines.md").read_text()
CATALOG = catalog((visits, searches, stocks, study, words, local_buyers, profiles, payments, alarms))
D17, D18, D19 = (date(2026, 10, day) for day in (17, 18, 19))


def at(time: str) -> datetime:
    """An instant, UTC, of October: `18T10:00:30`."""
    return datetime.fromisoformat(f"2026-10-{time}+00:00")


def money(amount: str) -> Decimal:
    return Decimal(amount)


def sent(topic: str, columns: str, *rows: tuple) -> list[dict[str, Any]]:
    """Events of a topic in Kafka's order, the last column their time; their ids, where they have any, are e0, e1 and so on."""
    own, names = CATALOG.topics[topic].id, columns.split()
    ids: list[dict[str, Any]] = [
        {own: n if own == "sequence" else f"e{n}"} if own and own not in names else {} for n in range(len(rows))
    ]
    return [made | dict(zip(names, (*row[:-1], said(at(row[-1]))), strict=True)) for made, row in zip(ids, rows, strict=True)]


SENT = {
    "activity": sent(
        "activity",
        "user_id kind happened_at",
        ("bob", "login", "18T10:01:30"),
        ("bob", "logout", "18T10:30"),
        ("ann", "login", "18T10:00"),
        ("ann", "click", "18T10:10"),
        ("ann", "logout", "18T10:30"),
        ("cat", "click", "17T09:00"),
        ("dan", "login", "17T09:00"),
    ),
    "searches": sent(
        "searches",
        "user_id query searched_at",
        ("ann", "tide", "18T10:00"),
        ("bob", "tide", "18T10:00"),
        ("cat", "ebb", "18T10:05"),
        ("dan", "flow", "18T09:00"),
        ("eve", "foam", "18T10:00"),
    ),
    "clicks": sent(
        "clicks",
        "user_id search_id target clicked_at",
        ("ann", "e0", "/b", "18T10:00:40.5"),
        ("ann", "e0", "/a", "18T10:01"),
        ("cat", "e2", "/d", "18T10:15"),
        ("dan", None, "/", "18T10:15"),
    ),
    "quotes": sent(
        "quotes",
        "quote_id revision symbol kind price split quoted_at",
        ("a17", 0, "ABC", "close", 100, None, "17T16:00"),
        ("d17", 0, "DEF", "close", 100, None, "17T16:00"),
        ("x17", 0, "XYZ", "close", 80, None, "17T16:00"),
        ("x17", 1, "XYZ", "close", 100, None, "17T16:00"),
        ("a1", 0, "ABC", "quote", 100, None, "18T12:00"),
        ("a2", 0, "ABC", "quote", 112, None, "18T12:00:30"),
        ("d1", 0, "DEF", "quote", 40, None, "18T12:00"),
        ("d2", 0, "DEF", "quote", 50, None, "18T12:00:30"),
        ("g1", 0, "GHI", "quote", 10, None, "18T12:00"),
        ("g2", 0, "GHI", "quote", 12, None, "18T12:00:30"),
        ("d18", 0, "DEF", "close", 51, 2, "18T16:00"),
        ("x18", 0, "XYZ", "close", 105, None, "18T16:00"),
        ("a19", 0, "ABC", "close", 110, None, "19T16:00"),
        ("d19", 0, "DEF", "close", 51, None, "19T16:00"),
    ),
    "study_events": sent(
        "study_events",
        "student_id lines studied_at",
        ("bob", 5, "18T23:49"),
        ("bob", 0, "18T23:59:02"),
        ("ann", 3, "18T23:50"),
        ("ann", 2, "19T00:02"),
    ),
    "lines": [
        {"line": line, TOOK: said(at(time))}
        for line, time in (
            ("flow flow flow flow", "18T09:59:01"),
            ("The tide, the TIDE!", "18T10:00"),
            ("Ebb, moon", "18T10:00:00.5"),
            ("tide", "18T10:00:01"),
        )
    ],
    "users": sent("users", "user_name address changed_at", ("ann", "Ulm", "17T09:00"), ("ann", "Jena", "18T11:00")),
    "items": sent("items", "item_name origin changed_at", ("lamp", "Ulm", "17T09:00")),
    "orders": sent(
        "orders",
        "user_name item_name quantity ordered_at",
        ("ann", "lamp", 1, "18T10:00"),
        ("bob", "lamp", 1, "18T10:20"),
        ("ann", "lamp", 1, "18T11:20"),
        ("bob", "rope", 1, "18T11:50"),
    ),
    "profile_changes": sent(
        "profile_changes",
        "op user_id city plan changed_at",
        ("insert", "ann", "Ulm", "free", "17T09:00"),
        ("insert", "cat", "Bonn", None, "17T09:00"),
        ("update", "ann", "Jena", "family", "18T10:01"),
    ),
    "network_events": sent(
        "network_events",
        "host level happened_at",
        *([("h2", "error", "18T10:01:10")] * 22 + [("h1", "error", "18T10:01:20")] * 21),
    ),
    "transactions": sent(
        "transactions",
        "card amount happened_at",
        *[("c2", 1.5, "18T10:00:30")] * 5,
        ("c3", 10_000.01, "18T10:00:30"),
        ("c1", 20_000, "18T10:00:30"),
        ("c1", 10_000, "18T10:00:40"),
    ),
    "payments": [
        *sent(
            "payments",
            "event_id order_id kind status version happened_at",
            ("s1", "o7", "status", "placed", 1, "18T10:00"),
            ("s2", "o7", "status", "shipped", 3, "18T10:03"),
            ("s3", "o7", "status", "paid", 2, "19T10:02"),
            ("s4", "o6", "status", "placed", 1, "18T10:03"),
        ),
        *sent(
            "payments",
            "event_id order_id kind success amount item quantity happened_at",
            ("p1", "o7", "payment", True, 79.8, "lamp", 2, "18T10:01"),
            ("p2", "o6", "payment", True, 9, "tea", 2, "18T10:01"),
            ("p3", "o6", "payment", False, 9, "tea", 2, "18T10:00"),
            ("p4", "o6", "refund", True, 4.5, "tea", 1, "19T09:00"),
            ("p5", "o7", "refund", True, 39.9, "lamp", 1, "19T09:00"),
        ),
    ],
}

ANSWERS: dict[str, list[list[tuple]]] = {
    "Visits": [
        [
            ("ann", at("18T10:00"), at("18T10:30"), 30.0, 1, "logout"),
            ("bob", at("18T10:01:30"), at("18T10:30"), 28.5, 0, "logout"),
        ],
        [(D17, 2, 0.0, 1, 1), (D18, 2, 29.3, 1, 1)],
    ],
    "Searches and clicks": [
        [
            (at("18T10:05"), "ebb", 1, ["/d"], timedelta(minutes=10)),
            (at("18T10:00"), "tide", 2, ["/b", "/a"], timedelta(seconds=40.5)),
            (at("18T10:00"), "tide", 0, [], None),
            (at("18T10:00"), "foam", 0, [], None),
            (at("18T09:00"), "flow", 0, [], None),
        ],
        [("tide", 2, 50.0), ("ebb", 1, 100.0), ("flow", 1, 0.0), ("foam", 1, 0.0)],
    ],
    "Stock movers": [
        [
            (1, "ABC", money("10"), money("110"), money("100"), None, True),
            (2, "DEF", money("0"), money("51"), money("51"), None, True),
        ],
        [(D18, "ABC"), (D18, "GHI")],
    ],
    "Study days": [[(D19, "ann", 2.0, 2), (D18, "ann", 10.0, 3), (D18, "bob", 10.0, 5)]],
    "Word counts": [
        [
            (at("18T10:00:01"), "tide", 1),
            (at("18T10:00"), "the", 2),
            (at("18T10:00"), "tide", 2),
            (at("18T10:00"), "ebb", 1),
            (at("18T10:00"), "moon", 1),
            (at("18T09:59:01"), "flow", 4),
        ],
        [("tide", 3), ("the", 2), ("ebb", 1), ("moon", 1)],
    ],
    "Local buyers": [[(at("18T10:00"), 1, 1, 2, 1, 0), (at("18T11:00"), 0, 0, 2, 1, 1)]],
    "Click profiles": [
        [
            (at("18T10:15"), "cat", "/d", True, "Bonn", None),
            (at("18T10:15"), "dan", "/", False, None, None),
            (at("18T10:01"), "ann", "/a", True, "Jena", "family"),
            (at("18T10:00:40.5"), "ann", "/b", True, "Ulm", "free"),
        ],
        [("family", 1), ("free", 1), (None, 1)],
    ],
    "Alarms": [
        [(at("18T10:01"), "h1", 21), (at("18T10:01"), "h2", 22)],
        [
            ("burst", "c2", at("18T10:00:30"), money("7.5")),
            ("large", "c1", at("18T10:00:30"), money("20000")),
            ("large", "c3", at("18T10:00:30"), money("10000.01")),
        ],
        [
            (at("18T12:00:30"), "ABC", money("12")),
            (at("18T12:00:30"), "DEF", money("25")),
            (at("18T12:00:30"), "GHI", money("20")),
            (at("17T16:00"), "XYZ", money("25")),
        ],
    ],
    "Payments": [
        [
            (at("19T09:00"), "o7", "refund", money("-39.9"), money("44.4")),
            (at("19T09:00"), "o6", "refund", money("-4.5"), money("84.3")),
            (at("18T10:01"), "o6", "payment", money("9"), money("88.8")),
            (at("18T10:01"), "o7", "payment", money("79.8"), money("79.8")),
        ],
        [
            (D19, 0, 2, money("0"), money("44.4"), money("-44.4"), True),
            (D18, 2, 0, money("88.8"), money("0"), money("88.8"), True),
        ],
        [("o6", "placed", at("18T10:03")), ("o7", "shipped", at("18T10:03"))],
        [("lamp", 0, 1, -1), ("tea", 0, 1, -1)],
    ],
}


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the page with the heading that it stands below."""
    for section in PAGE.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        yield from ((heading, sql) for sql in re.findall(r"^```sql\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))


Ask = Callable[[str], list[tuple]]


@pytest.fixture(scope="module")
def readers(interpreted, tmp_path_factory) -> dict[str, Ask]:
    """Who is asked. DuckDB by itself has each table's rows in the opposite order: it shows what a query leaves open."""
    spark, config, backwards = interpreted, Settings(_env_file=None, home=tmp_path_factory.mktemp("lake")), duckdb.connect()
    backwards.execute("SET TimeZone = 'UTC'")
    logs = {t.name: log_of(spark, t, SENT[t.name]).persist() for t in CATALOG.topics.values()}
    whole = Lake(logs, {})
    for declared, schema in fold.schemas(spark, CATALOG):
        assert not isinstance(schema, Exception)
        if isinstance(declared, Topic):
            rows = logs[declared.name]
        else:
            rows = whole.answers(declared, declared, at("17T00:00"), at("20T00:00"))
        found = rows.select(*schema.names).toArrow()
        table = lake.table(config, declared)
        table.create(schema)
        lake.swap(table, [], lake.write_arrow(table, "live/rows", found), {})
        spark.read.format("delta").load(str(table.path)).createOrReplaceTempView(declared.name)
        backwards.register(declared.name, found.take([*reversed(range(found.num_rows))]))
    return {
        "tidemark query": lambda sql: query.query(config, CATALOG, sql).rows,
        "DuckDB": lambda sql: backwards.execute(sql).fetchall(),
        "Spark": lambda sql: [tuple(row.values()) for row in spark.sql(sql).toArrow().to_pylist()],
    }


def test_every_query_of_the_page_has_an_answer_here():
    asked = [heading for heading, _ in queries()]
    assert asked == [heading for heading, answers in ANSWERS.items() for _ in answers]


@pytest.mark.parametrize("reader", ["tidemark query", "DuckDB", "Spark"])
@pytest.mark.parametrize(("heading", "n"), [(heading, n) for heading, answers in ANSWERS.items() for n in range(len(answers))])
def test_query_answers_its_text(readers, heading, n, reader):
    sql = [sql for above, sql in queries() if above == heading][n]
    assert readers[reader](sql) == ANSWERS[heading][n]
