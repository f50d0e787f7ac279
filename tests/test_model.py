"""Declarations: each misuse is refused where it is written, by a sentence that names it; the rest stays plain data."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest

from tidemark.model import (
    Announce,
    Check,
    Column,
    DeclarationError,
    Live,
    Topic,
    catalog,
    columns,
    comment,
    duration,
    expect,
    filled,
    fingerprint,
    midnight,
    needed,
    readers,
    remembered,
    rollup,
    sources,
    streams_of,
    view,
)

SCHEMA = "event_id STRING NOT NULL, page STRING, price DECIMAL(10, 2), at TIMESTAMP NOT NULL"


def topic(name: str = "page_views", **changes) -> Topic:
    return Topic(name, **{"key": "page", "partitions": 6, "schema": SCHEMA, "event_time": "at"} | changes)


VIEWS = topic()
ALARMS = topic("alarms", stream="alarms")


def named(name: str, function):
    function.__name__ = name
    return function


def panes(function=lambda views: views, **changes):
    wanted = {"reads": {"views": VIEWS}, "key": ("page", "pane"), "time": "pane", "merge": {"views": "distinct"}}
    return rollup(**wanted | changes)(named(function.__name__.replace("<lambda>", "some_panes"), function))


def page_panes(views):
    """Panes of
    each page."""
    return views


PANES = panes(page_panes)


def hours(function=lambda panes: panes, **changes):
    wanted = {"reads": {"panes": PANES}, "key": ("page", "hour"), "time": "hour"}
    return view(**wanted | changes)(named(function.__name__.replace("<lambda>", "some_hours"), function))


def pipeline(name: str, *declared) -> SimpleNamespace:
    return SimpleNamespace(__name__=name, **{f"d{n}": d for n, d in enumerate(declared)})


def test_a_check_of_a_set_is_the_same_check_in_each_process():
    """The order of a set's texts is drawn anew by each Python: a declaration that follows it would always have changed."""
    kinds = {f"kind-{n}" for n in range(20)}
    assert expect("ExpectColumnValuesToBeInSet", column="kind", value_set=kinds).arguments["value_set"] == sorted(kinds)


# Each case: what is written, and what the sentence must say of it.
TOPICS = {
    "no partition": (lambda: topic(partitions=0), "partitions must be 1 or more, not 0"),
    "stream with a dash": (lambda: topic(stream="a-b"), "stream a-b is not lower case"),
    "stream called as the notifier's folder": (lambda: topic(stream="notify"), "notify is what the platform calls a folder"),
    "key not in schema": (lambda: topic(key="user"), "key user is not in the schema (event_id, page, price, at)"),
    "id not in schema": (lambda: topic(id="uuid"), "id uuid is not in the schema"),
    "id may be null": (lambda: topic(id="page"), "id page may be null in the schema; write it NOT NULL"),
    "event time of no column": (lambda: topic(event_time="seen_at"), "event_time seen_at names no column of the schema"),
    "unknown type": (lambda: topic(schema="page STRING, at LONG"), "column at has type LONG; types are STRING, BOOLEAN, INT"),
    "sizes of an INT": (lambda: topic(schema="page INT(3,1), at TIMESTAMP"), "column page has type INT(3,1); only DECIMAL"),
    "too precise": (lambda: topic(schema="page DECIMAL(39,1), at TIMESTAMP"), "column page has type DECIMAL(39,1); only DECIMAL"),
    "array type": (lambda: topic(schema="page ARRAY<STRING>, at TIMESTAMP"), 'cannot read "page ARRAY<STRING>" in the schema'),
    "length": (
        lambda: topic(schema="page VARCHAR(10), at TIMESTAMP"),
        'cannot read "page VARCHAR(10)" in the schema; write "name TYPE [NOT NULL] [COMMENT \'meaning, unit\']"; types are',
    ),
    "column without type": (lambda: topic(schema="page, at TIMESTAMP"), 'cannot read "page" in the schema; write "name TYPE'),
    "empty schema": (lambda: topic(schema=""), 'cannot read "" in the schema'),
    "column with a capital": (lambda: topic(schema="page STRING, At TIMESTAMP"), "column name At is not lower case"),
    "column twice": (lambda: topic(schema="page STRING, page INT, at TIMESTAMP"), "column page stands twice in the schema"),
    "retention in months": (lambda: topic(retention="1 month"), '"1 month" is not a length of time'),
    "segment without unit": (lambda: topic(segment="60"), '"60" is not a length of time'),
    "accept_late of a half hour": (
        lambda: topic(accept_late="1.5 hours"),
        '"1.5 hours" is not a length of time',
    ),
    "platform column day": (
        lambda: topic(schema="page STRING, day DATE, at TIMESTAMP"),
        "column day is a name that the platform",
    ),
    "platform column kafka": (lambda: topic(schema="page STRING, kafka INT, at TIMESTAMP"), "column kafka is a name that the"),
    "platform column reject": (lambda: topic(schema="page STRING, reject INT, at TIMESTAMP"), "column reject is a name that the"),
    "platform column settled": (lambda: topic(schema="page STRING, settled INT, at TIMESTAMP"), "column settled is a name that"),
    "platform column event_time": (lambda: topic(schema="page STRING, event_time TIMESTAMP"), "column event_time is a name that"),
}

TOPICS |= {
    "changes of a topic that is not compacted": (
        lambda: topic().changes,
        "changes of a topic that is not compacted; read the topic itself",
    ),
    "compacted without a key": (lambda: topic(key=None, compacted=True), "a compacted topic is a table and needs a key"),
    "compacted by what may be null": (lambda: topic(compacted=True), "key page of a compacted topic may be null in the schema"),
    "compacted by an instant": (
        lambda: topic(key="at", compacted=True),
        "key at of a compacted topic is TIMESTAMP; a tombstone has but Kafka's key, which is read as one of STRING, INT, BIGINT",
    ),
    "compacted lines": (
        lambda: topic(schema="line STRING NOT NULL", key="line", event_time="kafka.timestamp", format="text", compacted=True),
        "a compacted topic of lines is no table",
    ),
    "compacted, each change a repeat": (
        lambda: topic(key="event_id", id="event_id", compacted=True),
        "id event_id is the key, so every change of a key would be a repeat of its first",
    ),
    "compacted and forgotten": (
        lambda: topic(key="event_id", compacted=True, keep="30 days"),
        "keep='30 days' would make the table forget keys",
    ),
    "platform column tombstone": (
        lambda: topic(schema="page STRING, tombstone INT, at TIMESTAMP"),
        "column tombstone is a name that the platform",
    ),
}

ROLLUPS = {
    "sum": (lambda: panes(merge={"views": "sum"}), "column views merges by sum; merges are min, max, latest, distinct"),
    "argument of min": (lambda: panes(merge={"views": "min(by=at)"}), "merges by min(by=at); min takes no argument"),
    "latest of nothing": (lambda: panes(merge={"views": "latest"}), "merges by latest; write latest(by=column)"),
    "latest without by": (lambda: panes(merge={"views": "latest(at)"}), "merges by latest(at); write latest(by=column)"),
    "latest by a column that is not there": (
        lambda: panes(merge={"views": "latest(by=at)"}),
        "latest(by=at) orders by at, which must itself merge by latest(by=at)",
    ),
    "latest by a column that merges otherwise": (
        lambda: panes(merge={"views": "latest(by=at)", "at": "max"}),
        "orders by at, which must itself merge by latest(by=at)",
    ),
    "two orders": (
        lambda: panes(merge={"at": "latest(by=at)", "no": "latest(by=no)"}),
        "latest names different orders (latest(by=at), latest(by=no)); a row has one",
    ),
    "nothing merges": (lambda: panes(merge={}), "merge names no column"),
    "key column merges": (lambda: panes(merge={"page": "max"}), "column page is in the key and cannot merge"),
    "platform column merges": (lambda: panes(merge={"reject": "max"}), "column reject is a name that the platform uses"),
    "platform column in the key": (lambda: panes(key=("kafka", "pane")), "column kafka is a name that the platform uses"),
    "time is the platform's day": (lambda: panes(key=("page", "day"), time="day"), "column day is a name that the platform uses"),
    "time not in the key": (lambda: panes(time="hour"), "time hour is not in the key (page, pane)"),
    "key is a text": (lambda: panes(key="pane"), "key must be a tuple of column names, not 'pane'"),
    "key is empty": (lambda: panes(key=()), "key must be a tuple of column names, not ()"),
    "key column twice": (lambda: panes(key=("pane", "pane")), "a column stands twice in the key (pane, pane)"),
    "parameter not read": (lambda: panes(lambda views, users: views), "parameter users is not in reads (views)"),
    "reads not taken": (lambda: panes(lambda: None), "reads views, which its function does not take"),
    "reads nothing": (lambda: panes(lambda: None, reads={}), "reads nothing"),
    "reads a rollup": (lambda: panes(reads={"views": PANES}), "a rollup reads topics only"),
    "wants the period": (lambda: panes(lambda views, period: views), "parameter period is not in reads (views)"),
    "two streams": (
        lambda: panes(lambda views, alarms: views, reads={"views": VIEWS, "alarms": ALARMS}),
        "its topics belong to different streams (alarms, main); they must share one",
    ),
}

USERS = topic("users", key="event_id", compacted=True)
ROLLUPS |= {
    "reads a table": (
        lambda: panes(lambda users: users, reads={"users": USERS}),
        "reads users as a table, which is another one later, so its rows do not merge; read the topic's changes",
    ),
}

VIEW = {
    "time not in the key": (lambda: hours(time="mark"), "time mark is not in the key (page, hour)"),
    "settled in the key": (lambda: hours(key=("settled", "hour")), "column settled is a name that the platform uses"),
    "day beside another time": (lambda: hours(key=("day", "hour")), "column day is a name that the platform uses"),
    "parameter not read": (lambda: hours(lambda panes, users: panes), "parameter users is not in reads (panes)"),
    "reads not taken": (lambda: hours(lambda period: period), "reads panes, which its function does not take"),
    "reads a name": (
        lambda: hours(reads={"panes": "page_panes"}),
        "reads panes from 'page_panes'; a view reads topics, rollups and",
    ),
    "lookback in words": (lambda: hours(lookback="an hour"), 'lookback: "an hour" is not a length of time'),
    "a lookback to what a log keeps no longer": (
        lambda: hours(reads={"panes": topic(keep="7 days")}, lookback="7 days"),
        "looks back 7 days in topic page_views, whose log keeps 7 days: its nights would lack what is gone. Let keep be a day",
    ),
    "lookahead at a view": (
        lambda: hours(reads={"panes": hours()}, lookahead="1 minute"),
        "looks ahead at view some_hours, of which a night has no settled rows after its day; read what that view reads",
    ),
    "a live lookahead at live views beside a rollup": (
        lambda: hours(
            lambda panes, one, other: panes,
            reads={"panes": PANES, "one": HOURS, "other": hours(named("others", lambda panes: panes), live=LIVE)},
            lookahead="1 minute",
            live=LIVE,
        ),
        "looks ahead at view hourly, others, of which a night has no settled rows after its day; read what those views read",
    ),
    "lookahead in years": (lambda: hours(lookahead="1 year"), 'lookahead: "1 year" is not a length of time'),
}

OTHERS = {
    "topic's name with a capital": (lambda: topic("PageViews"), "topic PageViews: a topic's name is lower case"),
    "rollup's name with a capital": (
        lambda: panes(named("Panes", lambda views: views)),
        "rollup Panes: a rollup's name is lower case",
    ),
    "live every so often": (lambda: Live(every="often", back="1 hour"), 'live: every: "often" is not a length of time'),
    "live without a pause": (lambda: Live(every="0 seconds", back="1 hour"), 'every must be longer than "0 seconds"'),
    "live by steps that cross hours": (
        lambda: Live("1 second", "1 hour", step="7 minutes"),
        'live: step is an hour, or goes into one without rest, not "7 minutes"',
    ),
    "live back for ever": (lambda: Live(every="5 seconds", back="ever"), 'live: back: "ever" is not a length of time'),
    "expectation in snake case": (lambda: expect("expect_column_to_exist"), '"expect_column_to_exist" is not an expectation'),
    "severity unheard of": (
        lambda: expect("ExpectColumnToExist", severity="fatal"),
        'severity is "critical" or "warning", not "fatal"',
    ),
}


def live_way(function=lambda panes: panes, refresh=None, **changes):
    wanted = {"every": "5 seconds", "back": "10 minutes", "reads": {"panes": PANES}}
    named("now", function)
    return hours(live=refresh).live(**wanted | changes)(function)


def second_live_way():
    declared = hours(live=LIVE)
    for name in ("first", "second"):
        declared.live(every="5 seconds", back="10 minutes", reads={"panes": PANES})(named(name, lambda panes: panes))


VIEW |= {
    "reads a table by the hour": (
        lambda: hours(lambda users: users, reads={"users": USERS}),
        "reads users as a table, which is as of the end of a day, but its time is hour; make its time day, or read the changes",
    ),
}

LIVE = Live(every="30 seconds", back="2 hours")
LIVE_WAYS = {
    "reads a table by the hour": (
        lambda: live_way(lambda users: users, LIVE, reads={"users": USERS}),
        "now: reads users as a table, which is as of the end of a day",
    ),
    "of a view that is not live": (lambda: live_way(), "now: the view is not live; give it live=Live("),
    "a second one": (second_live_way, "second: the view has a live way already"),
    "parameter not read": (lambda: live_way(lambda panes, at: panes, LIVE), "now: parameter at is not in reads (panes)"),
    "reads a name": (lambda: live_way(refresh=LIVE, reads={"panes": "p"}), "now: reads panes from 'p'"),
    "step in words": (lambda: live_way(refresh=LIVE, step="tick"), 'now: step: "tick" is not a length of time'),
    "coarse and further back than the view": (
        lambda: live_way(refresh=LIVE, coarse=True, back="3 hours"),
        "now: coarse, and goes back 3 hours, further than the view; its marks would stand beside",
    ),
    "step of nothing": (lambda: live_way(refresh=LIVE, step="0 seconds"), 'step must be longer than "0 seconds"'),
}

VIEW |= {
    "announces and is not live": (
        lambda: hours(announce=Announce("{page}")),
        "announces rows, and is not live; only live rows are announced, so give it live=Live(",
    ),
}
READ = "write a column as {column} or {column:format}, and a brace as {{"
ANNOUNCED = {
    "nothing to say": (lambda: Announce(""), "title and content are empty"),
    "an open brace": (lambda: Announce("{page"), "title \"{page\" cannot be read (expected '}' before end of string); " + READ),
    "a lone brace": (lambda: Announce("t", content="page}"), 'content "page}" cannot be read'),
    "a place": (lambda: Announce("{} of {}"), 'title "{} of {}" names "", which is no column; ' + READ),
    "a number": (lambda: Announce("{0}"), 'names "0", which is no column'),
    "what a value has": (lambda: Announce("{page.__class__}"), 'names "page.__class__", which is no column'),
    "what a value holds": (lambda: Announce("{page[0]}"), 'names "page[0]", which is no column'),
    "a conversion": (lambda: Announce("{page!r}"), 'names "page", which is no column'),
    "a format of another column's": (lambda: Announce("{page:{width}}"), 'names "page", which is no column'),
    "a link that cannot be read": (lambda: Announce("t", link="https://shop/{"), 'link "https://shop/{" cannot be read'),
    "no kind": (lambda: Announce("t", kind=""), "kind is empty"),
    "a card that leads nowhere": (lambda: Announce("t", kind="link"), 'kind="link" is a card; say where it leads'),
    "mention as a text": (
        lambda: Announce("t", mention="all"),
        "mention is a tuple of ids, telephone numbers or \"all\", not 'all'",
    ),
    "mention of nobody": (lambda: Announce("t", mention=("",)), "mention is a tuple of ids"),
    "when, and not whom": (lambda: Announce("t", mention_if="new"), "mention_if='new' says when, and mention does not say whom"),
}

HOURS = hours(named("hourly", lambda panes: panes))
OTHERS |= {
    "a topic and a rollup of one name": (
        lambda: catalog([pipeline("a", VIEWS), pipeline("b", VIEWS, panes(named("page_views", lambda views: views)))]),
        "page_views is declared in a and in b; names are unique",
    ),
    "two of one name in one file": (lambda: catalog([pipeline("a", VIEWS, topic())]), "page_views is declared in a and in a"),
    "a topic that no file declares": (
        lambda: catalog([pipeline("a", PANES)]),
        "page_panes reads page_views, which no listed pipeline declares; add its file to pipelines/__init__.py",
    ),
    "a live way's source that no file declares": (
        lambda: catalog([pipeline("a", VIEWS, PANES, with_live_way(panes(named("elsewhere", lambda views: views))))]),
        "reads elsewhere, which no listed pipeline declares",
    ),
    "a twin of the declared topic": (lambda: catalog([pipeline("a", topic(partitions=2), PANES)]), "page_panes reads page_views"),
    "the platform's own table": (
        lambda: catalog([pipeline("a", topic("ledger"))]),
        "ledger in a is a name that the platform uses",
    ),
}


def with_live_way(read):
    declared = hours(named("hourly", lambda panes: panes), live=LIVE)
    declared.live(every="5 seconds", back="10 minutes", reads={"panes": read})(lambda panes: panes)
    return declared


@pytest.mark.parametrize(
    ("owner", "declare", "sentence"),
    [
        pytest.param(owner, *case, id=f"{kind}: {name}")
        for kind, owner, cases in (
            ("topic", "topic page_views: ", TOPICS),
            ("rollup", "rollup some_panes: ", ROLLUPS),
            ("view", "view some_hours: ", VIEW),
            ("live way", "view some_hours, live way ", LIVE_WAYS),
            ("announce", "announce: ", ANNOUNCED),
            ("other", "", OTHERS),
        )
        for name, case in cases.items()
    ],
)
def test_misuse_is_refused_by_a_sentence_that_names_it(owner, declare, sentence):
    with pytest.raises(DeclarationError) as refused:
        declare()
    assert str(refused.value).startswith(owner)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("1 second", timedelta(seconds=1)),
        ("90 seconds", timedelta(seconds=90)),
        ("5 minutes", timedelta(minutes=5)),
        ("2 hours", timedelta(hours=2)),
        ("7 days", timedelta(days=7)),
        ("2 weeks", timedelta(days=14)),
        ("0 seconds", timedelta(0)),
    ],
)
def test_duration_in_words(text, length):
    assert duration(text) == length


@pytest.mark.parametrize(
    ("zone", "day", "begins"),
    [
        ("UTC", date(2026, 3, 29), "2026-03-29T00:00"),
        ("Europe/Berlin", date(2026, 3, 29), "2026-03-28T23:00"),
        ("Europe/Berlin", date(2026, 3, 30), "2026-03-29T22:00"),
        ("America/Sao_Paulo", date(2018, 11, 4), "2018-11-04T03:00"),  # 01:00 is the day's first hour
    ],
)
def test_a_business_day_begins_with_its_first_instant_in_its_zone(zone, day, begins):
    assert midnight(day, ZoneInfo(zone)) == datetime.fromisoformat(begins).replace(tzinfo=UTC)


def test_schema_as_columns():
    assert columns("id STRING NOT NULL, price decimal( 10 , 2 ), n INT not  null", "topic t") == (
        Column("id", "STRING", nullable=False),
        Column("price", "DECIMAL(10,2)", nullable=True),
        Column("n", "INT", nullable=False),
    )


def test_declared_functions_stay_callable():
    assert PANES(views="frame") == "frame"
    assert hours(lambda panes, period: (panes, period))(panes="frame", period="day") == ("frame", "day")
    assert live_way(lambda panes: [panes], LIVE)(panes="frame") == ["frame"]


def test_declarations_are_frozen():
    for declared in (VIEWS, PANES, HOURS, LIVE, Announce("{page}"), expect("ExpectColumnToExist", column="page")):
        field = next(iter(vars(declared)))
        with pytest.raises(FrozenInstanceError):
            setattr(declared, field, "other")


def test_a_declaration_is_named_and_described_by_its_function():
    assert (PANES.name, PANES.table, comment(PANES)) == ("page_panes", "rollups/page_panes", "Panes of each page.")
    assert (VIEWS.table, HOURS.table, comment(HOURS)) == ("log/page_views", "views/hourly", "")


def test_a_check_is_called_by_its_description_else_by_expectation_and_column():
    assert expect("ExpectColumnToExist", column="page", severity="warning").name == "ExpectColumnToExist page"
    assert expect("ExpectCompoundColumnsToBeUnique", column_list=["a", "b"]).name == "ExpectCompoundColumnsToBeUnique a,b"
    assert expect("UnexpectedRowsExpectation", description="PV is positive").name == "PV is positive"
    assert expect("ExpectColumnToExist", column="page") == Check("ExpectColumnToExist", "critical", {"column": "page"})


def test_a_log_that_keeps_a_day_more_than_a_view_looks_back_has_all_of_it():
    assert hours(reads={"panes": topic(keep="8 days")}, lookback="7 days").lookback == "7 days"


def test_a_view_follows_what_it_reads_however_the_file_is_ordered():
    days = view(reads={"hours": HOURS}, key=("page", "day"), time="day")(named("daily", lambda hours: hours))
    weeks = view(reads={"days": days}, key=("page", "week"), time="week")(named("weekly", lambda days: days))
    found = catalog([pipeline("late", weeks, days), pipeline("early", HOURS, PANES, VIEWS)])
    assert [d.name for d in found.derived] == ["page_panes", "hourly", "daily", "weekly"]
    assert found.names == ("page_views", "page_panes", "hourly", "daily", "weekly")


def test_a_topic_imported_by_a_second_pipeline_is_one_topic():
    assert list(catalog([pipeline("owner", VIEWS), pipeline("guest", VIEWS, PANES)]).topics) == ["page_views"]


def test_catalog_finds_by_name_and_says_what_there_is():
    found = catalog([pipeline("traffic", VIEWS, PANES, HOURS)])
    assert (found["page_views"], found["page_panes"], found["hourly"]) == (VIEWS, PANES, HOURS)
    with pytest.raises(KeyError, match="there is no topic, rollup or view called hours; there are hourly, page_panes, "):
        found["hours"]


def test_a_stream_has_its_topics_and_their_rollups_only():
    loud = panes(named("loud", lambda views: views), reads={"views": ALARMS})
    found = catalog([pipeline("both", VIEWS, ALARMS, PANES, loud, HOURS)])
    assert found.streams == ("main", "alarms")
    assert found.stream("alarms").names == ("alarms", "loud")
    assert found.stream("main").names == ("page_views", "page_panes")


def test_what_a_live_way_reads_counts_as_read():
    loud = panes(named("loud", lambda views: views), reads={"views": ALARMS})
    declared = with_live_way(loud)
    assert [s.name for s in sources(declared)] == ["page_panes", "loud"]
    assert streams_of(declared) == {"main", "alarms"}
    assert declared.shortcut.step == "5 seconds"


def test_importing_the_model_imports_neither_spark_nor_delta_nor_great_expectations():
    heavy = ["pyspark", "delta", "deltalake", "great_expectations", "pandas", "pyarrow", "duckdb", "confluent_kafka"]
    said = f"import sys, tidemark.model, tidemark.settings; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_compacted_topic_is_a_table_and_its_changes_are_a_stream():
    def counted(changes):
        return changes

    def joined(users, views, panes):
        return views

    counting = rollup(reads={"changes": USERS.changes}, key=("page", "minute"), time="minute", merge={"seen": "distinct"})(
        counted
    )
    everything = {"users": USERS, "views": VIEWS, "panes": counting}
    daily = view(reads=everything, key=("page", "day"), time="day")(joined)
    by_hour = hours(lambda changes, days: changes, reads={"changes": USERS.changes, "days": daily})
    assert counting.topics == {"changes": USERS} and counting.stream == "main"
    assert [s.name for s in sources(by_hour)] == ["users", "joined"]
    assert (remembered(daily), remembered(by_hour)) == ({"users": USERS}, {"users": USERS})
    assert (remembered(counting), remembered(HOURS)) == ({}, {})
    found = catalog([pipeline("a", USERS, VIEWS, counting, daily, by_hour)])
    assert found.names == ("users", "page_views", "counted", "joined", "some_hours")
    assert readers(found, ["users"]) == {"counted", "joined", "some_hours"}
    assert needed(found, ["some_hours"]) == set(found.names)
    told = named("told", lambda users: users)
    as_table = view(reads={"users": USERS}, key=("day",), time="day")(told)
    as_stream = view(reads={"users": USERS.changes}, key=("day",), time="day")(told)
    assert fingerprint(as_table) != fingerprint(as_stream)


# ------------------------------------------------------------------------------------------------------------- announcing


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("Order {it}", "o1", "Order o1"),
        ("{it} of {it}", 3, "3 of 3"),
        ("{it}", None, "–"),
        ("{it:,.2f}", None, "–"),
        ("{it}", Decimal("1E+3"), "1000"),
        ("{it}", Decimal("0.0000001"), "0.0000001"),
        ("{it:,.2f}", Decimal("1234.5"), "1,234.50"),
        ("{it}", datetime(2026, 11, 18, 10, 0, 5, 250_000, tzinfo=UTC), "2026-11-18 10:00:05 UTC"),
        ("{it}", datetime(2026, 11, 18, 11, tzinfo=timezone(timedelta(hours=1))), "2026-11-18 10:00:00 UTC"),
        ("{it:%H:%M}", datetime(2026, 11, 18, 10, tzinfo=UTC), "10:00"),
        ("{it}", date(2026, 11, 18), "2026-11-18"),
        ("{it}", ["a", "b"], "['a', 'b']"),
        ("{{it}} {it}", "{it}", "{it} {it}"),
        ("", "o1", ""),
    ],
)
def test_a_template_is_filled_with_a_row_s_values(template, value, text):
    assert filled(template, {"it": value, "other": 1}) == text


def test_an_announcement_needs_the_columns_that_it_names_each_once():
    said = Announce("{a} {b}", content="{b:,.2f} {{c}}", link="https://shop/{d}", mention=("all",), mention_if="new")
    assert said.columns == ("a", "b", "d", "new")
    assert Announce("plain").columns == ()
    assert hours(live=LIVE, announce=said).announce is said
    assert hours(live=LIVE).announce is None
