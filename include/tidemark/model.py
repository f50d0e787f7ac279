"""Topic, Rollup, View, Live, Announce and Check: the declarations of a pipeline, as frozen data.

Nothing here runs anything or imports Spark. A declaration that contradicts itself is refused where it is written,
with a `DeclarationError` whose sentence names the thing, what was wanted and what was found.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from string import Formatter
from typing import Any, Literal
from zoneinfo import ZoneInfo

MERGES = ("min", "max", "latest", "distinct")
PLATFORM_COLUMNS = ("day", "kafka", "reject", "settled", "event_time", "tombstone")
PLATFORM_TABLES = ("ledger", "verdicts", "period")
PLATFORM_TOPICS = ("notify", "notify_sent", "notify_dead_letters")
UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
TYPES = ("STRING", "BOOLEAN", "INT", "BIGINT", "DOUBLE", "DECIMAL", "TIMESTAMP", "DATE")
EVENT_TIME = "event_time"
"""The header by which a tombstone says when."""
KEYS_OF_TABLES = ("STRING", "INT", "BIGINT")
NAME = re.compile(r"[a-z][a-z0-9_]*")
OLDEST = date(2000, 1, 1)
"""The first day that an event can be of: a time before it is a reject."""
TAKEN = ("logs", "notify", "processes", "spark", "topics")
"""Folders of the platform beside those of the streams, which no stream can be called."""


class DeclarationError(ValueError):
    """A topic, rollup, view or pipeline contradicts itself; the sentence says where and how."""


def refuse_if(wrong: bool, sentence: str) -> None:
    if wrong:
        raise DeclarationError(sentence)


def duration(text: str, owner: str = "") -> timedelta:
    """A length of time in words: `"5 seconds"`, `"2 hours"`, `"7 days"`. Raises `DeclarationError` that names `owner`."""
    found = re.fullmatch(r"(\d+) (second|minute|hour|day|week)s?", text)
    if not found:
        said = f'"{text}" is not a length of time; write it like "5 seconds", "2 hours" or "7 days"'
        raise DeclarationError(f"{owner}: {said}" if owner else said)
    if (seconds := int(found[1]) * UNITS[found[2]]) > 365_000 * UNITS["day"]:  # and no calendar goes back so far
        raise DeclarationError(f'{owner}{owner and ": "}"{text}" is more than a thousand years; write fewer')
    return timedelta(seconds=seconds)


def midnight(day: date, zone: ZoneInfo) -> datetime:
    """The instant at which a business day begins, UTC; where the clock goes forward at midnight, the day's first instant."""
    return datetime.combine(day, datetime.min.time(), zone).astimezone(UTC)


@dataclass(frozen=True)
class Column:
    """One column of a topic's schema: a closed list of types, because each is compared with JSON's own."""

    name: str
    type: str
    nullable: bool
    comment: str = ""


COLUMN = re.compile(
    r"\s*(\w+)\s+([A-Za-z]+(?:\(\s*\d+\s*,\s*\d+\s*\))?)(\s+NOT\s+NULL)?(?:\s+COMMENT\s+'((?:[^']|'')*)')?\s*", re.IGNORECASE
)


def columns(schema: str, owner: str) -> tuple[Column, ...]:
    """`"event_id STRING NOT NULL, price DECIMAL(10,2) COMMENT 'in euros'"` as columns. Raises `DeclarationError`."""
    found: list[Column] = []
    for part in re.findall(r"((?:'(?:[^']|'')*'|\([^)]*\)|[^,])+)", schema) or [schema]:
        match = COLUMN.fullmatch(part)
        if not match:
            raise DeclarationError(
                f'{owner}: cannot read "{part.strip()}" in the schema; write "name TYPE [NOT NULL] [COMMENT \'meaning, unit\']"; '
                f"types are {', '.join(TYPES)}, and DECIMAL(precision, scale)"
            )
        name, kind, required = match[1], re.sub(r"\s", "", match[2].upper()), bool(match[3])
        refuse_if(kind.split("(")[0] not in TYPES, f"{owner}: column {name} has type {kind}; types are {', '.join(TYPES)}")
        sizes = [int(n) for n in re.findall(r"\d+", kind)]
        fits = not sizes or (kind.startswith("DECIMAL") and 1 <= sizes[0] <= 38 and sizes[1] <= sizes[0])
        refuse_if(not fits, f"{owner}: column {name} has type {kind}; only DECIMAL(precision up to 38, scale) has sizes")
        refuse_if(not NAME.fullmatch(name), f"{owner}: column name {name} is not lower case with underscores")
        refuse_if(name in PLATFORM_COLUMNS, f"{owner}: column {name} is a name that the platform uses; choose another")
        refuse_if(name in (c.name for c in found), f"{owner}: column {name} stands twice in the schema")
        found.append(Column(name, kind, not required, (match[4] or "").replace("''", "'")))
    return tuple(found)


@dataclass(frozen=True)
class Check:
    """One Great Expectations expectation, in its own words. `critical` blocks the publication, `warning` does not."""

    expectation: str
    severity: Literal["critical", "warning"]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What a verdict calls it: the description given, else the expectation and its column."""
        column = self.arguments.get("column") or ",".join(self.arguments.get("column_list", ()))
        return self.arguments.get("description") or " ".join(filter(None, (self.expectation, column)))


def expect(expectation: str, *, severity: Literal["critical", "warning"] = "critical", **arguments: Any) -> Check:
    """A check: an expectation's class name and its arguments, unchanged from Great Expectations' gallery.

    `unexpected_rows_query` may name `{batch}` (the table that is judged) and, by name, any other topic, rollup or view
    that the judged one reads or that reads the same rollups and is settled in the same run.
    """
    refuse_if(
        not re.fullmatch(r"(Expect\w+|UnexpectedRowsExpectation)", expectation),
        f'"{expectation}" is not an expectation; write its class name, like "ExpectColumnValuesToNotBeNull"',
    )
    refuse_if(severity not in ("critical", "warning"), f'{expectation}: severity is "critical" or "warning", not "{severity}"')
    # The order of a set is another in each process, and a declaration is known by its words.
    ordered = {name: sorted(of, key=repr) if isinstance(of, set | frozenset) else of for name, of in arguments.items()}
    return Check(expectation, severity, ordered)


@dataclass(frozen=True)
class Topic:
    """A Kafka topic, as code.

    `schema` is what an accepted record holds; `id` what makes an event itself (a repeat must equal its original): without
    one a record is its partition and offset (`functions.position`), so a repeat counts again. `event_time` is a SQL
    expression over the schema, or `kafka.timestamp`; a DATE is the beginning of that business day. Where it is null the record
    is a reject, and where it raises the stream stops: write `try_to_timestamp` and its like.
    `format="text"` takes each value as a line, into one STRING column. `compacted` and `transactional` topics may have offsets
    without a record, which the ledger then counts and explains.
    A compacted topic is a table to who reads it, and a stream to who reads its `changes`; a record without a value, a
    tombstone, ends its key. Its event time is its header `event_time` (ISO 8601 with a zone), else Kafka's own timestamp.
    `accept_late` refuses records whose event time is older than that beside Kafka's own timestamp; without it nothing is
    too late. `keep` is how long the log holds a day, and so how long it can be settled; without it, for ever.
    It is a day more, at least, than what a view of the topic looks back.
    `largest_event` (bytes) is judged, `max_message_bytes` is Kafka's own limit. `sample` draws one event at an instant, for
    demonstrations.
    """

    name: str
    key: str | None
    partitions: int
    schema: str
    event_time: str
    id: str | None = None
    retention: str = "7 days"
    retention_bytes: int = -1
    segment: str = "1 day"
    segment_bytes: int = 256 * 1024 * 1024
    replication: int | None = None
    min_insync: int = 1
    max_message_bytes: int = 16 * 1024 * 1024
    largest_event: int = 1024 * 1024
    compacted: bool = False
    transactional: bool = False
    format: Literal["json", "text"] = "json"
    accept_late: str | None = None
    keep: str | None = None
    stream: str = "main"
    checks: tuple[Check, ...] = ()
    sample: Callable[[Any, datetime], dict[str, Any]] | None = field(default=None, compare=False)
    columns: tuple[Column, ...] = field(init=False)

    def __post_init__(self) -> None:
        owner = f"topic {self.name}"
        refuse_if(not NAME.fullmatch(self.name), f"{owner}: a topic's name is lower case with underscores")
        refuse_if(self.partitions < 1, f"{owner}: partitions must be 1 or more, not {self.partitions}")
        refuse_if(not NAME.fullmatch(self.stream), f"{owner}: stream {self.stream} is not lower case with underscores")
        refuse_if(
            self.stream in TAKEN, f"{owner}: {self.stream} is what the platform calls a folder of its own; name another stream"
        )
        object.__setattr__(self, "columns", columns(self.schema, owner))
        object.__setattr__(self, "checks", tuple(self.checks))
        names = [c.name for c in self.columns]
        for role in ("key", "id"):
            column = getattr(self, role)
            refuse_if(
                column is not None and column not in names, f"{owner}: {role} {column} is not in the schema ({', '.join(names)})"
            )
        refuse_if(
            not set(re.findall(r"\w+", self.event_time)) & set(names) and "kafka.timestamp" not in self.event_time,
            f"{owner}: event_time {self.event_time} names no column of the schema ({', '.join(names)}) nor kafka.timestamp",
        )
        refuse_if(self.format not in ("json", "text"), f'{owner}: format is "json" or "text", not "{self.format}"')
        lines = [(c.type, c.nullable) for c in self.columns] == [("STRING", False)]
        refuse_if(
            self.format == "text" and not lines,
            f'{owner}: format="text" has one column, "line STRING NOT NULL"; its schema is {self.schema}',
        )
        required = [c.name for c in self.columns if not c.nullable]
        refuse_if(
            self.id is not None and self.id not in required, f"{owner}: id {self.id} may be null in the schema; write it NOT NULL"
        )
        for text in filter(None, (self.retention, self.segment, self.accept_late, self.keep)):
            duration(text, owner)
        if self.compacted:
            check_table(owner, self)

    @property
    def changes(self) -> Changes:
        """A compacted topic as a stream. Raises `DeclarationError` for any other topic, which is one already."""
        refuse_if(
            not self.compacted,
            f"topic {self.name}: changes of a topic that is not compacted; read the topic itself, or write compacted=True",
        )
        return Changes(self)

    @property
    def gaps(self) -> str:
        """Why offsets may hold no record; empty where every offset must hold one."""
        why = (("compacted away", self.compacted), ("transaction markers and aborted records", self.transactional))
        return " or ".join(said for said, so in why if so)

    @property
    def table(self) -> str:
        """Where the topic's log stands below the lake."""
        return f"log/{self.name}"


def check_table(owner: str, topic: Topic) -> None:
    """What a compacted topic must be, so that it is a table."""
    refuse_if(topic.format == "text", f"{owner}: a compacted topic of lines is no table; its records have no key")
    refuse_if(topic.key is None, f"{owner}: a compacted topic is a table and needs a key; Kafka keeps the newest record of each")
    key = next(c for c in topic.columns if c.name == topic.key)
    refuse_if(key.nullable, f"{owner}: key {key.name} of a compacted topic may be null in the schema; write it NOT NULL")
    refuse_if(
        key.type not in KEYS_OF_TABLES,
        f"{owner}: key {key.name} of a compacted topic is {key.type}; a tombstone has but Kafka's key, which is read as one of "
        f"{', '.join(KEYS_OF_TABLES)}",
    )
    refuse_if(
        topic.id == topic.key,
        f"{owner}: id {topic.id} is the key, so every change of a key would be a repeat of its first; name what tells the "
        f"changes apart, or leave id out",
    )
    refuse_if(
        topic.keep is not None,
        f"{owner}: keep={topic.keep!r} would make the table forget keys that have not changed for so long; leave it out",
    )


@dataclass(frozen=True)
class Changes:
    """A compacted topic read as a stream: every change from offset zero to the period's end, tombstones too."""

    topic: Topic

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def stream(self) -> str:
        return self.topic.stream


@dataclass(frozen=True)
class Rollup:
    """Events folded into rows that merge. Calling it calls its function, so a test can.

    It is settled day by day, from the events of the business day and of the hours that its midnights cut: what a row is of must
    not reach over a midnight by more, as a pane of six hours from 18:00 UTC on reaches over Berlin's.
    `many` says that a key is so long-lived that every batch has a row of it: hundreds of sets of a key are then united by one
    aggregate, and not one after the other. The answer is the same.
    """

    name: str
    function: Callable[..., Any] = field(compare=False)
    reads: Mapping[str, Topic | Changes]
    key: tuple[str, ...]
    time: str
    merge: Mapping[str, str]
    checks: tuple[Check, ...] = ()
    comments: Mapping[str, str] = field(default_factory=dict)
    many: bool = False

    def __post_init__(self) -> None:
        owner = f"rollup {self.name}"
        refuse_if(not NAME.fullmatch(self.name), f"{owner}: a rollup's name is lower case with underscores")
        check_wiring(owner, self.function, self.reads, also=())
        for parameter, source in self.reads.items():
            wrong = not isinstance(source, Topic | Changes)
            refuse_if(wrong, f"{owner}: reads {parameter} from {source!r}; a rollup reads topics only")
            refuse_if(
                is_table(source),
                f"{owner}: reads {source.name} as a table, which is another one later, so its rows do not merge; read the "
                f"topic's changes, or its table in a view",
            )
        streams = sorted({t.stream for t in self.reads.values()})
        refuse_if(
            len(streams) > 1, f"{owner}: its topics belong to different streams ({', '.join(streams)}); they must share one"
        )
        check_key(owner, self.key, self.time)
        refuse_if(not self.merge, f"{owner}: merge names no column; a rollup has one column or more beside its key")
        for column, merge in self.merge.items():
            word = merge.split("(")[0]
            refuse_if(word not in MERGES, f"{owner}: column {column} merges by {merge}; merges are {', '.join(MERGES)}")
            refuse_if(
                word == "latest" and not re.fullmatch(r"latest\(by=\w+\)", merge),
                f"{owner}: column {column} merges by {merge}; write latest(by=column)",
            )
            refuse_if(word != "latest" and merge != word, f"{owner}: column {column} merges by {merge}; {word} takes no argument")
            refuse_if(column in PLATFORM_COLUMNS, f"{owner}: column {column} is a name that the platform uses; choose another")
            refuse_if(column in self.key, f"{owner}: column {column} is in the key and cannot merge")
        by = {m for m in self.merge.values() if m.startswith("latest")}
        refuse_if(len(by) > 1, f"{owner}: latest names different orders ({', '.join(sorted(by))}); a row has one")
        for order in by:
            column = order[len("latest(by=") : -1]
            refuse_if(self.merge.get(column) != order, f"{owner}: {order} orders by {column}, which must itself merge by {order}")
        object.__setattr__(self, "checks", tuple(self.checks))

    def __call__(self, *args: Any, **frames: Any) -> Any:
        return self.function(*args, **frames)

    @property
    def topics(self) -> dict[str, Topic]:
        """What it reads, by parameter: a topic, or the topic whose changes it reads."""
        return {p: s.topic if isinstance(s, Changes) else s for p, s in self.reads.items()}

    @property
    def stream(self) -> str:
        return next(iter(self.reads.values())).stream

    @property
    def table(self) -> str:
        return f"rollups/{self.name}"


@dataclass(frozen=True)
class Live:
    """How often a view's newest rows are computed again, and how far back a late event still corrects them live.

    An event corrects rows of up to the view's lookahead before its own time, or that of a view that it reads, so these too are
    computed again.
    They are computed and written in whole steps: hours, unless `step` says a shorter part of one. A short one costs less each
    time and leaves more files, so it is for views of few rows that are wanted soon. A view of days takes whole days.
    """

    every: str
    back: str
    step: str = "1 hour"

    def __post_init__(self) -> None:
        refuse_if(not duration(self.every, "live: every"), f'live: every must be longer than "{self.every}"')
        duration(self.back, "live: back")
        step = duration(self.step, "live: step")
        part = step and not timedelta(hours=1) % step
        refuse_if(not part, f'live: step is an hour, or goes into one without rest, not "{self.step}"')


@dataclass(frozen=True)
class Shortcut:
    """A shorter way to a view's newest rows, held to the same answer by its law test.

    `step` is the spacing of the view's rows in time. It fills rows missing up to `live.back` behind stream time.
    `coarse` promises that a row's answer is of the rollups' rows within `lookback` before it and merges them, so that those
    which lie before every row of the period may be handed in merged into one, at the time of the earliest; that key columns of
    the rollups which are not the view's do not matter: rows may be handed in merged over them, null there; and that one key may
    have several rows, whose sets are its set together.
    `counted` names sets of which only the numbers are added up: they are handed in as counts (BIGINT), of merged rows their sum,
    and of several rows of one key in the first of them, 0 in the others.
    """

    function: Callable[..., Any] = field(compare=False)
    live: Live
    reads: Mapping[str, Source]
    step: str
    coarse: bool = False
    counted: tuple[str, ...] = ()

    def __call__(self, *args: Any, **frames: Any) -> Any:
        return self.function(*args, **frames)


@dataclass(frozen=True)
class Announce:
    """What the robots of `TIDEMARK_NOTIFY_TO` say of each row of a live view whose key is new; nothing where there are none.

    `title`, `content` and `link` name the view's columns in braces, and may format them as Python does:
    `"Order {order_id}: {total:,.2f}"`. `kind` is an open word: `text`, `markdown`, `link` (a card, which needs `link`).
    `mention` holds user ids, telephone numbers, or `all`; with `mention_if`, a BOOLEAN column, a row calls them only where that
    is true.

    New is a key that the view's table does not hold when the live view writes it. The message goes into the topic `notify` just
    before the row is there to read, under an id made of the view's name and the key: whatever is done again, and a key that goes
    and comes back, is said once for as long as the notifier remembers (seven days). Only what is live announces: no settling,
    replay, publication or roll-back, and no row of a settled day. A stream that begins with history announces of it what lies
    within `back` and what the view looks ahead of its stream time, and nothing older; one that was away, all that came meanwhile.
    Of older rows that a run has changed nobody is told. A row that changes under its key is not announced again.
    """

    title: str
    content: str = ""
    kind: str = "text"
    link: str = ""
    mention: tuple[str, ...] = ()
    mention_if: str | None = None

    def __post_init__(self) -> None:
        refuse_if(not (self.title or self.content), "announce: title and content are empty; there is nothing to say")
        for part, template in self.templates.items():
            named(template, f"announce: {part}")
        refuse_if(not self.kind, "announce: kind is empty; the known ones are text, markdown and link")
        refuse_if(
            self.kind == "link" and not self.link, 'announce: kind="link" is a card; say where it leads with link="https://…"'
        )
        whom, when = self.mention, self.mention_if
        wrong = not isinstance(whom, tuple) or not all(isinstance(one, str) and one for one in whom)
        refuse_if(wrong, f'announce: mention is a tuple of ids, telephone numbers or "all", not {whom!r}')
        refuse_if(when is not None and not whom, f"announce: mention_if={when!r} says when, and mention does not say whom")

    @property
    def templates(self) -> dict[str, str]:
        return {"title": self.title, "content": self.content, "link": self.link}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it needs, each once."""
        found = [c for part, template in self.templates.items() for c in named(template, part)]
        return tuple(dict.fromkeys([*found, *([self.mention_if] if self.mention_if else [])]))


def named(template: str, owner: str) -> list[str]:
    """The columns that a template names. Raises `DeclarationError` for one that cannot be read, or names more than columns."""
    write = "write a column as {column} or {column:format}, and a brace as {{"
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise DeclarationError(f'{owner} "{template}" cannot be read ({error}); {write}') from None
    for _, column, how, conversion in parts:
        plain = NAME.fullmatch(column or "") and not conversion and "{" not in (how or "")
        refuse_if(not plain, f'{owner} "{template}" names "{column}", which is no column; {write}')
    return [column for _, column, _, _ in parts if column]


def filled(template: str, row: Mapping[str, Any]) -> str:
    """A template with a row's values: an instant as UTC to the second, a number with all its digits, a null as a dash.

    Raises `KeyError` for a column that the row has not, `ValueError` or `TypeError` for a format that does not fit.
    """
    return template.format_map({column: Said(row[column]) for column in named(template, "template")})


@dataclass(frozen=True)
class Said:
    """A value in a message."""

    value: Any

    def __format__(self, how: str) -> str:
        if self.value is None:
            return "–"
        if isinstance(self.value, datetime):
            return format(self.value.astimezone(UTC), how or "%Y-%m-%d %H:%M:%S UTC")
        return format(self.value, how or ("f" if isinstance(self.value, Decimal) else ""))


@dataclass(frozen=True)
class View:
    """The answer to a question about a period `[start, end)`: plain columns, one row per key.

    Its function gets inputs from `start - lookback` to `end + lookahead`; rows whose `time` lies in the period are kept. Days of
    these lengths have 24 hours: of seven business days with a clock change, `lookback="7 days"` may lack the first hour.
    A parameter named `period` is handed a one-row frame with the timestamps `start` and `end`.
    """

    name: str
    function: Callable[..., Any] = field(compare=False)
    reads: Mapping[str, Source]
    key: tuple[str, ...]
    time: str
    refresh: Live | None = None
    lookback: str = "0 seconds"
    lookahead: str = "0 seconds"
    checks: tuple[Check, ...] = ()
    comments: Mapping[str, str] = field(default_factory=dict)
    repeats: tuple[str, ...] = ()
    announce: Announce | None = None
    shortcut: Shortcut | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        owner = f"view {self.name}"
        refuse_if(not NAME.fullmatch(self.name), f"{owner}: a view's name is lower case with underscores")
        check_wiring(owner, self.function, self.reads, also=("period",))
        check_sources(owner, self.reads, self.time)
        check_key(owner, self.key, self.time, day_is_time=True)
        duration(self.lookback, f"{owner}: lookback")
        ahead = duration(self.lookahead, f"{owner}: lookahead")
        views = [source.name for source in self.reads.values() if ahead and isinstance(source, View)]
        refuse_if(
            bool(views),
            f"{owner}: looks ahead at view {', '.join(views)}, of which a night has no settled rows after its day; read what "
            f"{'that view reads' if len(views) == 1 else 'those views read'}, topics and rollups, and look ahead at these",
        )
        for source in self.reads.values():
            kept = source.keep if isinstance(source, Topic) else None
            refuse_if(
                kept is not None and duration(kept) < duration(self.lookback) + timedelta(days=1),
                f"{owner}: looks back {self.lookback} in topic {source.name}, whose log keeps {kept}: its nights would lack what "
                f"is gone. Let keep be a day more than the lookback, or read a rollup of the topic, which stays",
            )
        for name in self.repeats:
            refuse_if(
                not isinstance(self.reads.get(name), Topic),
                f"{owner}: repeats names {name}, which is no topic that it reads; rollups and views have no repeats",
            )
        refuse_if(
            self.announce is not None and self.refresh is None,
            f"{owner}: announces rows, and is not live; only live rows are announced, so give it live=Live(every=…, back=…)",
        )
        object.__setattr__(self, "checks", tuple(self.checks))

    def __call__(self, *args: Any, **frames: Any) -> Any:
        return self.function(*args, **frames)

    def live(
        self,
        *,
        every: str,
        back: str,
        reads: Mapping[str, Source],
        step: str | None = None,
        coarse: bool = False,
        counted: tuple[str, ...] = (),
    ) -> Callable[..., Shortcut]:
        """Declare a shorter way to this view's newest rows; the decorated function stays callable."""

        def declare(function: Callable[..., Any]) -> Shortcut:
            owner = f"view {self.name}, live way {function.__name__}"
            refuse_if(self.shortcut is not None, f"{owner}: the view has a live way already")
            refuse_if(self.refresh is None, f"{owner}: the view is not live; give it live=Live(every=…, back=…) first")
            check_wiring(owner, function, reads, also=("period",))
            check_sources(owner, reads, self.time)
            refuse_if(step is not None and not duration(step, f"{owner}: step"), f'{owner}: step must be longer than "{step}"')
            further = self.refresh is not None and duration(back, f"{owner}: back") > duration(self.refresh.back)
            refuse_if(
                coarse and further,
                f"{owner}: coarse, and goes back {back}, further than the view; its marks would stand beside swept ones",
            )
            sets = {c for r in reads.values() if isinstance(r, Rollup) for c, m in r.merge.items() if m == "distinct"}
            wrong = sorted(set(counted) - sets)
            refuse_if(bool(wrong), f"{owner}: counted names {', '.join(wrong)}, which no rollup that it reads merges by distinct")
            shortcut = Shortcut(function, Live(every, back), dict(reads), step or every, coarse, tuple(counted))
            object.__setattr__(self, "shortcut", shortcut)
            return shortcut

        return declare

    @property
    def table(self) -> str:
        return f"views/{self.name}"


Declared = Topic | Rollup | View
Source = Topic | Changes | Rollup | View


def is_table(source: Any) -> bool:
    """Whether a source is read as a table: as it is at the end of the period."""
    return isinstance(source, Topic) and source.compacted


def check_wiring(owner: str, function: Callable[..., Any], reads: Mapping[str, Any], also: Iterable[str]) -> None:
    parameters = set(inspect.signature(function).parameters) - set(also)
    unread, unused = sorted(parameters - set(reads)), sorted(set(reads) - parameters)
    refuse_if(bool(unread), f"{owner}: parameter {', '.join(unread)} is not in reads ({', '.join(reads) or 'empty'})")
    refuse_if(bool(unused), f"{owner}: reads {', '.join(unused)}, which its function does not take")
    refuse_if(not reads, f"{owner}: reads nothing")


def check_sources(owner: str, reads: Mapping[str, Any], time: str) -> None:
    for parameter, source in reads.items():
        wrong = not isinstance(source, Source)
        refuse_if(wrong, f"{owner}: reads {parameter} from {source!r}; a view reads topics, rollups and views")
        refuse_if(
            is_table(source) and time != "day",
            f"{owner}: reads {source.name} as a table, which is as of the end of a day, but its time is {time}; make its time "
            f"day, or read the changes of {source.name} and join them as_of the event",
        )


def check_key(owner: str, key: tuple[str, ...], time: str, day_is_time: bool = False) -> None:
    refuse_if(not isinstance(key, tuple) or not key, f"{owner}: key must be a tuple of column names, not {key!r}")
    refuse_if(time not in key, f"{owner}: time {time} is not in the key ({', '.join(key)})")
    refuse_if(len(set(key)) < len(key), f"{owner}: a column stands twice in the key ({', '.join(key)})")
    for column in key:
        platform = column in PLATFORM_COLUMNS and not (day_is_time and column == time == "day")
        refuse_if(platform, f"{owner}: column {column} is a name that the platform uses; choose another")


def rollup(
    *,
    reads: Mapping[str, Topic | Changes],
    key: tuple[str, ...],
    time: str,
    merge: Mapping[str, str],
    checks: Iterable[Check] = (),
    comments: Mapping[str, str] | None = None,
    many: bool = False,
) -> Callable[[Callable[..., Any]], Rollup]:
    """Declare a rollup: the decorated function groups accepted records by `key`, `merge` says how its rows merge.

    `comments` are the columns' meanings and units, as DESCRIBE shows them. `many` says that every batch has a row of a key.
    """
    return lambda function: Rollup(
        function.__name__, function, dict(reads), key, time, dict(merge), tuple(checks), dict(comments or {}), many
    )


def view(
    *,
    reads: Mapping[str, Source],
    key: tuple[str, ...],
    time: str,
    live: Live | None = None,
    lookback: str = "0 seconds",
    lookahead: str = "0 seconds",
    checks: Iterable[Check] = (),
    comments: Mapping[str, str] | None = None,
    repeats: Iterable[str] = (),
    announce: Announce | None = None,
) -> Callable[[Callable[..., Any]], View]:
    """Declare a view: the decorated function answers for a period; `live` keeps its newest rows fresh.

    `comments` are the columns' meanings and units, as DESCRIBE shows them. `repeats` names parameters whose topic is handed
    over with its repeats, not distinct by `id`: cheaper, and right where an event that stands there twice changes nothing.
    `announce` says what people are told of each row that is new.
    """
    return lambda function: View(
        function.__name__,
        function,
        dict(reads),
        key,
        time,
        live,
        lookback,
        lookahead,
        tuple(checks),
        dict(comments or {}),
        tuple(repeats),
        announce,
    )


@dataclass(frozen=True)
class Catalog:
    """Every declaration of the listed pipelines, by name. Names are unique over topics, rollups and views."""

    topics: Mapping[str, Topic]
    rollups: Mapping[str, Rollup]
    views: Mapping[str, View]

    def __getitem__(self, name: str) -> Declared:
        """The declaration called `name`. Raises `KeyError` with a sentence that lists what there is."""
        for kind in (self.topics, self.rollups, self.views):
            if name in kind:
                return kind[name]
        raise KeyError(f"there is no topic, rollup or view called {name}; there are {', '.join(sorted(self.names))}")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.topics, *self.rollups, *self.views)

    @property
    def derived(self) -> tuple[Rollup | View, ...]:
        """Rollups, then views: each after what it reads."""
        return (*self.rollups.values(), *self.views.values())

    def stream(self, name: str) -> Catalog:
        """What one stream runs: its topics and the rollups over them. Views belong to no stream."""
        return Catalog(
            {n: t for n, t in self.topics.items() if t.stream == name},
            {n: r for n, r in self.rollups.items() if r.stream == name},
            {},
        )

    def only(self, names: Iterable[str]) -> Catalog:
        """The topics that the named topics, rollups and views read, however far, and every rollup over them.

        Raises `KeyError` for an unknown name, `DeclarationError` for a rollup that would have a part of its topics.
        """
        chosen = needed(self, [self[name].name for name in names])
        topics = {n: t for n, t in self.topics.items() if n in chosen}
        rollups = {n: r for n, r in self.rollups.items() if any(t.name in topics for t in r.topics.values())}
        for rollup in rollups.values():
            lacks = [t.name for t in rollup.topics.values() if t.name not in topics]
            refuse_if(bool(lacks), f"rollup {rollup.name} reads {', '.join(lacks)} too; its topics must share a stream")
        return Catalog(topics, rollups, {})

    @property
    def streams(self) -> tuple[str, ...]:
        """Main first, the others by name."""
        return tuple(sorted({t.stream for t in self.topics.values()}, key=lambda s: (s != "main", s)))


def sources(declared: Declared) -> tuple[Declared, ...]:
    """What a declaration reads, its live way included, each once."""
    reads: list[Source] = list(getattr(declared, "reads", {}).values())
    if isinstance(declared, View) and declared.shortcut:
        reads += declared.shortcut.reads.values()
    return tuple({r.name: r.topic if isinstance(r, Changes) else r for r in reads}.values())


def remembered(declared: Declared) -> dict[str, Topic]:
    """The topics of which a declaration, or what it reads, needs every record from the beginning: tables and changes."""
    found: dict[str, Topic] = {}
    for source in declared.reads.values() if isinstance(declared, View) else ():
        if isinstance(source, Changes):
            found[source.name] = source.topic
        elif isinstance(source, Topic):
            found |= {source.name: source} if source.compacted else {}
        else:
            found |= remembered(source)
    return found


def streams_of(declared: Declared) -> frozenset[str]:
    """The streams whose batches a table depends on."""
    if isinstance(declared, Topic):
        return frozenset({declared.stream})
    return frozenset().union(*(streams_of(s) for s in sources(declared)))


def fingerprint(declared: Source) -> str:
    """Twelve hex digits that change when a declaration, its pipeline's file or anything that it reads changes."""
    if isinstance(declared, Changes):
        return f"changes of {fingerprint(declared.topic)}"
    # A topic is the same in whatever stream and however Kafka holds it, a rollup however its sets are united.
    held = ("partitions", "retention", "retention_bytes", "segment", "segment_bytes", "replication", "min_insync")
    beside = ("function", "reads", "shortcut", "sample", "stream", "many", *held)
    said = [repr(sorted((n, v) for n, v in vars(declared).items() if n not in beside))]
    if not isinstance(declared, Topic):
        said += [
            inspect.getsource(declared.function),
            inspect.getsource(inspect.getmodule(declared.function) or declared.function),
        ]
        said += [f"{parameter}={fingerprint(source)}" for parameter, source in declared.reads.items()]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]


def readers(catalog: Catalog, names: Iterable[str]) -> set[str]:
    """The rollups and views among `names`, and all that read them, however far."""
    found = set(names)
    for declared in catalog.derived:  # each after what it reads
        if any(s.name in found for s in declared.reads.values()):
            found.add(declared.name)
    return found & {d.name for d in catalog.derived}


def needed(catalog: Catalog, names: Iterable[str]) -> set[str]:
    """`names` and all that they read, however far, topics included."""
    found = set(names)
    for declared in reversed((*catalog.topics.values(), *catalog.derived)):
        if declared.name in found and not isinstance(declared, Topic):
            found |= {s.name for s in declared.reads.values()}
    return found


def looking_at(catalog: Catalog, source: Declared) -> tuple[str, ...]:
    """The rollups and views that read a topic or a view, directly or through others, each after what it reads."""
    found = {source.name}
    for declared in catalog.derived:
        if any(read.name in found for read in declared.reads.values()):
            found.add(declared.name)
    return tuple(d.name for d in catalog.derived if d.name in found - {source.name})


def looks_ahead(declared: Declared) -> timedelta:
    """How far after its own time a row may look: itself, or through the views that it reads."""
    own = duration(declared.lookahead) if isinstance(declared, View) else timedelta(0)
    return max(own, *map(looks_ahead, sources(declared)), timedelta(0))


def comment(declared: Declared) -> str:
    """What a table's description says: the docstring of its function."""
    if isinstance(declared, Topic):
        return f"Every record of topic {declared.name}, once; reject says why one was not accepted."
    return " ".join((declared.function.__doc__ or "").split())


def row_of(declared: Declared) -> tuple[str, ...]:
    """The columns that a row of a table is of; none of a log, where each record stands for itself."""
    return () if isinstance(declared, Topic) else declared.key


def catalog(pipelines: Iterable[Any]) -> Catalog:
    """Everything that the given modules declare, views ordered so that each follows what it reads.

    Raises `DeclarationError` for two declarations of one name, and for a source that no listed pipeline declares.
    """
    found: dict[str, Declared] = {}
    homes: dict[str, str] = {}
    for pipeline in pipelines:
        for declared in vars(pipeline).values():
            if isinstance(declared, Topic | Rollup | View):
                refuse_if(
                    declared.name in (*PLATFORM_TABLES, *PLATFORM_TOPICS),
                    f"{declared.name} in {pipeline.__name__} is a name that the platform uses; choose another",
                )
                known = found.setdefault(declared.name, declared)
                refuse_if(
                    known is not declared,
                    f"{declared.name} is declared in {homes.get(declared.name)} and in {pipeline.__name__}; names are unique",
                )
                homes.setdefault(declared.name, pipeline.__name__)
    ordered: dict[str, Declared] = {}

    def place(declared: Declared) -> None:
        for source in sources(declared):
            refuse_if(
                found.get(source.name) is not source,
                f"{declared.name} reads {source.name}, which no listed pipeline declares; add its file to pipelines/__init__.py",
            )
            place(source)
        ordered[declared.name] = declared

    for declared in found.values():
        place(declared)
    return Catalog(
        {n: d for n, d in ordered.items() if isinstance(d, Topic)},
        {n: d for n, d in ordered.items() if isinstance(d, Rollup)},
        {n: d for n, d in ordered.items() if isinstance(d, View)},
    )
