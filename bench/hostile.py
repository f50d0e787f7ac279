"""`make hostile`: broken JSON, naughty strings, hostile SQL, names, forms and paths through the real platform, and what held."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Annotated, Any

import psutil
import structlog
import typer
from markdown_it import MarkdownIt
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import others
from bench.measure import stamp
from bench.world import STREAM, World, free_ports, until
from tidemark import kafka, lake, local, notifier, notify, query
from tidemark.kafka import Event, Record
from tidemark.model import Topic
from tidemark.pipelines import CATALOG
from tidemark.pipelines.local_buyers import USERS
from tidemark.pipelines.payments import PAYMENTS
from tidemark.pipelines.traffic import PAGE_VIEWS
from tidemark.pipelines.words import LINES
from tidemark.settings import Settings

OUT, ROOT = Path(__file__).parent / "out" / "hostile.json", Path(__file__).parent.parent
MARK, SECRET, OUTSIDE = "h0stile", "canary-in-a-setting", "canary-outside-of-the-lake"
SECONDS = 3
"""What a query is given; a process needs some more to begin and to end."""
DAYS = 2
"""Settled days that the naughty strings are spread over: a report draws twelve pages of each, those with the mark first."""


def parted(text: str) -> tuple[str, ...]:
    return tuple(text.split(" ¦ "))


NAUGHTY = (
    *parted("""\
<script>h0stile()</script> ¦ <img src=x onerror='h0stile()'> ¦ "'><h0stile a=" ¦ </td></table></script><h0stile> ¦ \
<!-- h0stile ¦ <svg/onload=h0stile()> ¦ <![CDATA[<h0stile>]]> ¦ &lt;h0stile&gt;&#60;h0stile&#62; ¦ javascript:h0stile() ¦ \
[h0stile](javascript:h0stile()) ¦ ![](http://127.0.0.1/h0stile) ¦ | h0stile |\n|---| ¦ \n# h0stile ¦ \
**h0stile** `h0stile` ¦ <@all> @all h0stile ¦ <http://h0stile> ¦ [dim]h0stile[/dim][/] ¦ $x^{h0stile$ \\frac ¦ \
\x1b[31mh0stile\x1b[0m\x07\x08 ¦ '; DROP TABLE page_views; -- ¦ ' OR '1'='1 ¦ " OR ""=" ¦ 1); SELECT 1 -- ¦ \\ ¦ ' ¦ " ¦ \
`` ¦ % ¦ _ ¦ ? ¦ * ¦ ; ¦ ../../../etc/passwd ¦ ..\\..\\etc ¦ %2e%2e%2fetc%2fpasswd ¦ /etc/passwd ¦ file:///etc/passwd ¦ \
C:\\con ¦ ~root ¦ . ¦ \u202egnp.exe ¦ \u2066x\u2069\u200f ¦ ze\u200bro\u200dwidth\ufeff ¦ 𝕳 ¦ \
👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇨🇭 ¦ 田中さん ﷽ عربى ¦ ß İ ı ǅ ¦ \u2028\u2029\x85\xa0 ¦ \ufffe\uffff ¦ \x00 ¦ a\x00b ¦ \
\x01\x7f ¦ \ud7ff\ue000 ¦ \r\nSet-Cookie: h0stile=1 ¦ a\nb\tc\rd ¦   ¦ ${jndi:ldap://127.0.0.1/h0stile} ¦ \
$(touch h0stile) ¦ `touch h0stile` ¦ %s%n%d ¦ {0}{page}{page.__class__} ¦ {{ 7 * 7 }}{% raw %} ¦ =1+1 ¦ +1 ¦ -1+1 ¦ \
@SUM(1) ¦ \t=1 ¦ null ¦ None ¦ NaN ¦ 0 ¦ -0 ¦ 1e309 ¦ true ¦ \\N ¦ day=2026-01-01 ¦ __HIVE_DEFAULT_PARTITION__ ¦ \
a.parquet?x[1]* ¦ --------------------"""),
    "Z" + "\u0351\u036b\u0343\u036a\u0302" * 30,
    "x" * 100_000,
)
VIEWS = [f"--only={name}" for name in ("hourly_traffic", "site_hourly_traffic", "daily_traffic", "site_daily_traffic")]
TEXTS = {"page_views": "page", "users": "user_name", "payments": "order_id", "lines": "line"}
"""The topics that are tried, and a text of each."""
GOOD = '"event_id": "e", "visitor_id": "v", "page": "/", "viewed_at": "@"'
"""Members of an event that is accepted; `@` is its time."""
MEMBERS = parted("""\
"page": "/" ¦ "pa\\u0067e": "/" ¦ "a": 1, "a": 2 ¦ "a": {"b": 1, "b": 1} ¦ "a": NaN ¦ "a": Infinity ¦ "a": -Infinity ¦ \
"a": 01 ¦ "a": 1. ¦ "a": .5 ¦ "a": +1 ¦ "a": 0x1 ¦ "a": 1e ¦ "a": - ¦ "a": 1_0 ¦ "a": True ¦ "a": nul ¦ 'a': 1 ¦ a: 1 ¦ \
"a" ¦ "a":  ¦ "a":: 1 ¦ "a": 1 "b" ¦ "a": [1,] ¦ "a": [1 ¦ "a": "\\x41" ¦ "a": "\\u12" ¦ "a": "\n" ¦ "a": "\t" ¦ \
"a": "\x00" ¦ "a": /* no */ 1 ¦ "a": 1e400 ¦ "a": -0 ¦ "a": 1e-400 ¦ "A": 1 ¦ "a": "\\ud83d\\ude00" ¦ "a": "\\ud800" ¦ \
"a": "\\u0000" ¦ "": "" ¦ "a.b": 1, "$": 1 ¦ "a": [[], {}, null, true, false, "", 0, -1.5e+3] ¦ """)
VISITORS = parted("""\
1 ¦ null ¦ [] ¦ {} ¦ true ¦ "" ¦ "\\u0000" ¦ "\\udead" ¦ 1.0""")
TIMES = parted("""\
1 ¦ 9e99 ¦ 946684799999 ¦ 9223372036854775808 ¦ -9223372036854775808 ¦ -1 ¦ 0.5 ¦ "2026-11-19" ¦ "2026-02-30T00:00:00Z" ¦ \
"2026-11-19T12:00:00" ¦ "9999-12-31T23:59:59Z" ¦ "0001-01-01T00:00:00Z" ¦ "now" ¦ "" ¦ "١٢٣٤-١١-١٩T12:00:00Z" ¦ \
"-2026-11-19T12:00:00Z" ¦ "2026-11-19T25:00:00Z" ¦ null ¦ ["@"]""")
WHOLE = parted("""\
null ¦ true ¦ 1 ¦ "x" ¦ [] ¦ {} ¦ "" ¦   ¦ \n ¦ \x00 ¦ { ¦ } ¦ \ufeff ¦ NaN ¦ <xml/> ¦ []] ¦ {"a" ¦ \ufeff{} ¦ --""")
AFTER = parted("""\
 x ¦ \n ¦   \t ¦ , ¦ ], ¦ ] ¦ \x00 ¦ # ¦ ,0 ¦ \xa0 ¦ \x0c ¦ \u2028 ¦ , 1] ¦ ], [ ¦ {}""")
BEFORE = parted("""\
x ¦ [ ¦ \ufeff ¦ \x00 ¦ //\n ¦ ( ¦ {}""")
RAW = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\xfe\xff\x00{")


def broken(at: str, suite: Sequence[str] = ()) -> list[bytes]:
    """JSON and what is not quite; some of it is right, so that neither answer alone will do. Texts of a suite come as they are
    and as a member."""
    good = GOOD.replace("@", at)
    whole = f"{{{good}}}"
    deep = [f'"a": {"[" * n}{"]" * m}' for n, m in ((50, 50), (100_000, 100_000), (100_000, 0))]
    texts = [
        *(whole[:n] for n in range(0, len(whole), 7)),
        *(
            f"{{{good}, {more}}}"
            for more in (*MEMBERS, *deep, f'"a": {"9" * 400}', f'"a": 0.{"3" * 400}', f'"{"k" * 10_000}": 1')
        ),
        *("{" + good.replace('"v"', visitor) + "}" for visitor in VISITORS),
        *("{" + good.replace(f'"{at}"', told) + "}" for told in TIMES),
        *(whole + after for after in AFTER),
        *(before + whole for before in BEFORE),
        *(*WHOLE, whole * 2, "[" * 100_000, '{"a":' * 100_000, "x" * 10_000_000),
        *(f'{{{good}, "a": "{"x" * n}"}}' for n in (900_000, 1_048_576)),
        *suite,
        *(f'{{{good}, "a": {text}}}' for text in suite),
    ]
    return [t.encode() for t in texts] + [whole.encode().replace(b"/", r) for r in RAW] + [*RAW, whole.encode("utf-16")]


SQL = (
    *parted("""\
SELECT * FROM read_csv('{outside}') ¦ SELECT * FROM read_text('{outside}') ¦ SELECT * FROM '{outside}' ¦ FROM "{outside}" ¦ \
SELECT * FROM read_csv('/etc/passwd') ¦ SELECT * FROM glob('/etc/*') ¦ SELECT * FROM read_blob('/proc/self/environ') ¦ \
SELECT (SELECT content FROM read_text('{outside}')) ¦ SELECT * FROM (DESCRIBE SELECT * FROM read_csv('{outside}')) ¦ \
SUMMARIZE SELECT * FROM '{outside}' ¦ SELECT * FROM query('SELECT * FROM ''{outside}''') ¦ \
SELECT * FROM query_table('{outside}') ¦ WITH a AS MATERIALIZED (FROM read_text('{outside}')) FROM a ¦ \
SELECT * FROM read_parquet('{inside}') ¦ SELECT * FROM duckdb_secrets() ¦ SELECT * FROM sqlite_scan('{outside}', 'a') ¦ \
SELECT * FROM 'http://127.0.0.1:1/x.csv' ¦ SELECT * FROM sniff_csv('{outside}') ¦ COPY (SELECT 1) TO '{out}' ¦ \
COPY page_views TO '{inside}' ¦ COPY page_views FROM '{outside}' ¦ EXPORT DATABASE '{out}' ¦ \
WITH x AS (COPY (SELECT 1) TO '{out}') SELECT * FROM x ¦ EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}' ¦ \
IMPORT DATABASE '{out}' ¦ ATTACH '{out}' ¦ ATTACH '{out}' AS a (TYPE sqlite) ¦ INSTALL httpfs ¦ LOAD '{outside}' ¦ \
SET enable_external_access = true ¦ SET VARIABLE a = 1 ¦ RESET allowed_paths ¦ PRAGMA database_list ¦ \
CALL pragma_version() ¦ CREATE TABLE x (i INTEGER) ¦ USE memory ¦ CREATE SECRET x (TYPE s3) ¦ \
CREATE MACRO m() AS TABLE FROM read_text('{outside}') ¦ INSERT INTO page_views VALUES (1) ¦ CHECKPOINT ¦ \
DELETE FROM ledger ¦ UPDATE ledger SET seq = 0 ¦ DROP VIEW ledger ¦ ALTER TABLE ledger RENAME TO x ¦ TRUNCATE ledger ¦ \
VACUUM ¦ BEGIN ¦ PREPARE x AS SELECT 1 ¦ EXECUTE x ¦ SELECT 1; DROP VIEW ledger ¦ SELECT 1; SELECT 2 ¦ FORCE CHECKPOINT ¦ \
/* ¦ -- ¦ ; ¦ WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n ¦ \
SELECT repeat('x', 1000000000000) ¦ SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(10000000) b ¦ \
SELECT list_sum(range(100000000000)) ¦ SELECT levenshtein(repeat('a', 300000), repeat('b', 300000)) ¦ \
SELECT count(*) FROM page_views a, page_views b, page_views c, page_views d WHERE a.page || b.page < c.page || d.page ¦ \
SELECT string_agg(a.range::VARCHAR, '') FROM range(100000000000) a ¦ SELECT ' ¦ SELECT "\x01" ¦ \
SELECT * FROM page_views LIMIT -1 OFFSET x ¦ \u202eSELECT 1 ¦ {{{{ 7 * 7 }}}} ¦ ${{HOME}} ¦ %s"""),
    f"SELECT {'(' * 50_000}1{')' * 50_000}",
    f"SELECT 1{'+1' * 50_000}",
    f"SELECT 1{'+1' * 900}",
    f"SELECT {'NOT ' * 900}1 FROM nowhere",
    f"SELECT * FROM {'(SELECT * FROM ' * 300}x{')' * 300}",
)


WAYS = parted("""\
publish @ ¦ drop @ ¦ rollback @ ¦ compare @ ¦ rejects @ ¦ produce --sample --count=1 @ ¦ consume --from=earliest @ ¦ \
consume --from=@ page_views ¦ report --day=@ ¦ settle --day=@ ¦ settle --from=@ --to=@ ¦ settle --day=2026-01-01 --only=@ ¦ \
replay --run=@ ¦ replay --only=@ ¦ speed --stream=@ ¦ speed --only=@ ¦ rejects page_views --day=@ ¦ seek g @ --to=earliest ¦ \
seek g page_views --to=@ ¦ dead-letters drop @ ¦ @""")
"""Commands that take a name."""


@dataclass
class Outcome:
    """What was tried so often, and each time that it did not hold; `unasked` says why nobody knows."""

    outcome: str
    tried: int
    wrong: list[str] = field(default_factory=list)
    unasked: str = ""

    @property
    def held(self) -> bool | None:
        return None if self.unasked else self.tried > 0 and not self.wrong

    def plain(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "tried": self.tried, "held": self.held, "wrong": self.wrong, "unasked": self.unasked}


@dataclass(frozen=True)
class Said:
    """How a command ended, and after how long."""

    code: int
    out: str
    seconds: float


class Markup(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text, self.hidden = Counter[str](), list[tuple[str, str | None]](), "", list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:  # a script or a style
            self.hidden.append(data)
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.hidden.append(data)

    def unknown_decl(self, data: str) -> None:
        self.hidden.append(data)

    def of_data(self, known: Iterable[str]) -> list[str]:
        """What of the data has become more than text."""
        wrong = [f"<{tag}>" for tag in self.tags if tag not in known]
        wrong += [f"{n}={v}" for n, v in self.attributes if n.startswith("on") or MARK in f"{n}{v}" or "javascript:" in (v or "")]
        return wrong + [text[:80] for text in self.hidden if MARK in text]


class Hostile(World):
    """A world whose processes know secrets, with a robot that nobody is."""

    def __init__(self, seed: int) -> None:
        metrics, nobody = free_ports(2)
        self.secrets = {
            "TIDEMARK_DINGTALK_WEBHOOK": f"https://127.0.0.1:{nobody}/robot/send?access_token={SECRET}-1",
            "TIDEMARK_DINGTALK_SECRET": f"{SECRET}-2",
            "TIDEMARK_WECOM_WEBHOOK": f"https://127.0.0.1:{nobody}/send?key={SECRET}-3",
        }
        more = {"NOTIFY_HOSTS": f"127.0.0.1:{nobody}", "NOTIFY_PATIENCE": "2 seconds", "METRICS_PORT": str(metrics)}
        os.environ |= self.secrets | {f"TIDEMARK_{name}": value for name, value in more.items()}
        super().__init__(seed)
        os.environ |= self.environment() | {"AIRFLOW_HOME": str(self.home / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
        self.outcomes: list[Outcome] = []
        self.outside, self.out = self.home / "outside.csv", self.home / "out"
        self.outside.write_text(f"a\n{OUTSIDE}\n")
        self.now = datetime.now(UTC)
        self.all_said = ""
        brought = {name: others.strings(name) for name in others.SETS}
        own = {"our own": len(NAUGHTY)}
        self.used = own | {f"{name} ({others.SETS[name][0]})": len(texts) for name, texts in brought.items() if texts}
        self.naughty = tuple(dict.fromkeys((*NAUGHTY, *brought["Big List of Naughty Strings"])))
        self.suite = brought["JSONTestSuite"]

    def environment(self, settings: Settings | None = None) -> dict[str, str]:
        return super().environment(settings) | self.secrets

    def command(self, *argv: str | bytes, more: dict[str, str] | None = None) -> Said:
        began = time.monotonic()
        env = os.environ | (more or {})
        ran = [sys.executable, "-m", "tidemark", *argv]
        try:
            done = subprocess.run(ran, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=900, check=False)
            code, out = done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            code, out = -1, "it did not end within fifteen minutes"
        self.all_said += out
        return Said(code, out, time.monotonic() - began)

    def commands(self, every: Sequence[Sequence[str | bytes]]) -> list[Said]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda argv: self.command(*argv), every))

    def tries(self, work: Callable[..., object], *told: Any) -> None:
        """Do one piece of it; where it breaks off, that is what did not hold, and the others go on."""
        try:
            work(*told)
        except Exception as error:
            self.holds(f"{work.__name__.replace('_', ' ')} ends", 1, [repr(error)])

    def holds(self, outcome: str, tried: int, wrong: Iterable[str]) -> None:
        self.outcomes.append(Outcome(outcome, tried, [repr(w)[:400] for w in wrong]))

    # ---- events

    def events(self, random: Random) -> dict[str, list[Event]]:
        """What is sent: broken JSON, naughty members, keys and headers, today and on each settled day."""
        broken_ones = broken(self.now.isoformat(), self.suite)
        random.shuffle(broken_ones)
        views = [Event(value) for value in broken_ones]
        for n, text in enumerate(self.naughty):
            name = "".join(c for c in text if c != "\0")[:1000]  # the client ends a header's name there
            for back in (0, 1 + n % DAYS):
                at = self.now - timedelta(days=back)
                one = {"event_id": f"{back} {text}", "visitor_id": text, "page": text, "viewed_at": at.isoformat(), name: text}
                views.append(Event(json.dumps(one).encode(), text, {name: text, f"{name}-": None}))
                if MARK in text:
                    views.append(Event(json.dumps(one | {"event_id": f"{back} {text} again"}).encode()))
            views.append(Event(text.encode(), text.encode("utf-16")))
        midnight = self.now.replace(hour=0, minute=0, second=0, microsecond=0)
        for hour in range(1, 24 * DAYS + 1):  # a day that lacks an hour is held back
            of_hour = {"event_id": f"hour {hour}", "visitor_id": "v", "page": "/", "viewed_at": midnight - timedelta(hours=hour)}
            views.append(Event(of_hour))
        users = [Event({"user_name": t, "changed_at": self.now}, t) for t in self.naughty]
        users += [Event(None, t) for t in self.naughty[::2]] + [Event(None, "a", {"event_time": t}) for t in self.naughty]
        users += [Event(None, b"\xff"), Event({"user_name": "a", "changed_at": self.now}, "b")]
        told = {"success": True, "amount": 1, "item": None, "quantity": 1, "status": None, "version": 1, "happened_at": self.now}
        pays = [
            Event(told | {"event_id": f"{kind} {t}", "order_id": t, "kind": kind, "item": t, "status": t})
            for t in NAUGHTY[:20]
            for kind in ("payment", "status")
        ]
        long = (b"a'" * 200_000, "a\u200c".encode() * 200_000, b"a" * 900_000)  # a pattern may recurse over each sign
        lines = [Event(value) for value in (*broken_ones, *long, *(t.encode() for t in self.naughty))]
        return {PAGE_VIEWS.name: views, USERS.name: users, PAYMENTS.name: pays, LINES.name: lines}

    def held_in_the_lake(self, sent: dict[str, list[Event]]) -> None:
        """Every record once, its bytes, whether it was accepted, and its text where it was."""
        rows, lost, altered, otherwise, bent = 0, list[str](), list[str](), list[str](), list[str]()
        for topic, events in ((CATALOG.topics[name], events) for name, events in sent.items()):
            text = TEXTS[topic.name]
            told = {(r.partition, r.offset): r for r in kafka.consume(self.settings, topic.name, "earliest")}
            fields = f'kafka.partition, kafka."offset", kafka.key, kafka.value, kafka.headers, reject, {text}'
            found = query.query(self.settings, CATALOG, f"SELECT {fields} FROM {topic.name}", rows=10**7).rows
            entered = [r for r in lake.ledger_rows(self.settings, "main") if r["topic"] == topic.name]
            counts = [len(events), len(told), len(found), len({row[:2] for row in found}), sum(r["records"] for r in entered)]
            rejects = sum(row[5] is not None for row in found), sum(r["rejects"] for r in entered)
            if len(set(counts)) > 1 or rejects[0] != rejects[1]:
                lost.append(f"{topic.name}: sent, Kafka, log, its places, ledger {counts}; rejects {rejects}")
            rows += len(told)
            for partition, offset, key, value, headers, reject, kept in found:
                record = told[partition, offset]
                there = (key, value, tuple((h["key"], h["value"]) for h in headers or ()))
                name = f"{topic.name} {(record.value or record.key or b'')[:120]!r}"
                if there != (record.key, record.value, record.headers):
                    altered.append(name)
                well, wanted = accepted(topic, record)
                if well != (reject is None):
                    otherwise.append(f"{name}: {'rejected: ' + reject if reject else 'accepted'}")
                elif well and kept != wanted:
                    bent.append(f"{name}: {kept!r}")
            as_sent = Counter(e.value for e in events if isinstance(e.value, bytes))
            if as_sent - Counter(r.value for r in told.values()):
                altered.append(f"{topic.name}: what was sent is not what Kafka holds")
        self.holds("each record is in the log once; accepted + rejected = sent", rows, lost)
        self.holds("bytes of value, key and headers are equal", rows, altered)
        self.holds("accepted and rejected as Python judges", rows, otherwise)
        self.holds("an accepted text is the text that was sent", rows, bent)

    def running(self, name: str, pid: int) -> None:
        """The stream is the one that was started, beats, and has set nothing aside."""
        said = local.status(self.settings)
        process = local.running(self.settings, name)
        aside = said.get("progress", {}).get("set_aside")
        alive = process is not None and process.pid == pid and self.beating(process)
        self.holds("the stream has not stopped, and sets no table aside", 1, [] if alive and not aside else [f"{said}"])

    # ---- what people see

    def settled(self) -> str:
        """Settle and publish the days, for a naughty reason; the run's name."""
        days = [str((self.now - timedelta(days=back)).date()) for back in (DAYS, 1)]
        said = self.command("settle", "--from", days[0], "--to", days[1], *VIEWS, "--reason", NAUGHTY[0] + NAUGHTY[3])
        run = max((r.id for r in lake.runs(self.settings)), default="none")
        published = self.command("publish", run)
        self.holds("days of naughty names are settled and published", DAYS, [s.out for s in (said, published) if s.code])
        return run

    def reports(self) -> None:
        run = self.settled()
        known = {*re.findall(r"<(\w+)", (ROOT / "include" / "tidemark" / "report.html").read_text())}
        known |= {"svg", "g", "path", "defs", "use", "text", "tspan", "rect", "clippath", "metadata"}
        wrong, formulas, names = list[str](), list[str](), 0
        for back in range(1, DAYS + 1):
            day = (self.now - timedelta(days=back)).date()
            said = self.command("report", "--day", str(day))
            page = self.settings.lake_path / "reports" / f"{day}.html"
            if said.code or not page.exists():
                wrong.append(said.out)
                continue
            read = Markup(page.read_text())
            names += sum(text in read.text for text in NAUGHTY if MARK in text)
            wrong += read.of_data(known - {"script", "img", "iframe", "object", "embed", "form", "base"})
            cells = page.with_suffix(".csv").read_text().splitlines()
            formulas += [cell for cell in cells if re.search(r'(^|,)"?[=+@\t]', cell)]
        told = Markup(MarkdownIt("commonmark").enable("table").render(self.command("compare", run).out))
        wrong += told.of_data({"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "em", "strong", "code"})
        self.holds("no name becomes markup in a report or an approval", names, wrong)
        self.holds("no name becomes a formula in a report's numbers", DAYS, formulas)

    def page(self) -> None:
        """The page's answers are data, its document is the same whatever the data, and its paths end at their roots."""
        from airflow.api_fastapi.core_api.security import get_user
        from fastapi.testclient import TestClient

        spec = importlib.util.spec_from_file_location("page", ROOT / "plugins" / "page.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        app = module.application(module.Answers(self.settings))
        app.dependency_overrides[get_user] = lambda: None
        client, wrong, shown = TestClient(app, raise_server_exceptions=False), list[str](), 0
        for reason in NAUGHTY[:20]:
            local.want(self.settings, "main", "running", reason, reason)
            told = json.loads(module.as_json(module.Answers(self.settings).streams()))
            wrong += [f"another reason than {reason!r}"] * (told["streams"][0]["wanted"]["reason"] != reason)
        for route in ("hour", "pages", "streams", "days", "verdicts", "runs", "rejects", "tables", "views", "newest/last_hour"):
            answer = client.get(f"/{route}")
            kinds = [answer.headers.get("content-type"), answer.headers.get("x-content-type-options")]
            if answer.status_code != 200 or kinds != ["application/json", "nosniff"] or not answer.content.isascii():
                wrong.append(f"{route}: {answer.status_code} {kinds}")
            else:
                shown += sum(json.dumps(text)[1:-1] in answer.text for text in NAUGHTY if len(text) > 4)
        document = client.get("/")
        script = Markup(document.text)
        wrong += script.of_data(script.tags)
        wrong += re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", document.text)
        wrong += [] if "default-src 'none'" in document.headers["content-security-policy"] else ["no policy"]
        self.holds("the page's answers are data, and its document holds none", shown, wrong)
        self.paths(client)

    def paths(self, client: Any) -> None:
        """Ways out of the roots of the page; each root also has a link that leads out."""
        reports, docs = self.settings.lake_path / "reports", self.settings.home / "docs"
        for root in (reports, docs):
            root.mkdir(parents=True, exist_ok=True)
            (root / "link.html").symlink_to(self.outside)
        ways = parted("../ ¦ %2e%2e/ ¦ ..%2f ¦ %2e%2e%2f ¦ %252e%252e%252f ¦ ..\\ ¦ ....//")
        up = [f"{way * n}{file}" for n in range(1, 8) for way in ways for file in ("outside.csv", "etc/passwd")]
        up += [
            f"{self.outside}",
            f"%2f{self.outside}",
            *parted("link.html ¦ %00 ¦ x%00.html ¦ ~root/.bashrc ¦ file:///etc/passwd"),
        ]
        up.append("a" * 5000)
        tries = [f"/{root}/{path}" for root in ("docs", "reports", "newest", "verdicts") for path in up]
        wrong = []
        for path in tries:
            answer = client.get(path)
            if answer.status_code != 404 or OUTSIDE in answer.text or "root:" in answer.text:
                wrong.append(f"{path[:200]}: {answer.status_code}")
        self.holds("no path of the page leaves its root", len(tries), wrong)

    def messages(self, sent: dict[str, list[Event]]) -> None:
        """Hostile messages end as dead letters, each; an announcement of naughty rows is plain text; an alarm has no secret."""
        members = [{"id": f"{n} {t}"[:150], "title": t, "content": t, "link": t} for n, t in enumerate(NAUGHTY)]
        kinds = ("text", "link", "markdown", "<script>")
        values = [json.dumps(m | {"platform": "dingtalk", "kind": kinds[n % 4]}).encode() for n, m in enumerate(members)]
        values += [v for v in broken(self.now.isoformat()) if len(v) < 200_000]
        kafka.produce(self.settings, notify.NOTIFY, values)
        notify.notify(self.settings, "stream_down", f"{SECRET}-2", NAUGHTY[0], address=self.secrets["TIDEMARK_DINGTALK_WEBHOOK"])
        whole = len(values) + len(sent[PAYMENTS.name])
        with suppress(TimeoutError):
            until(lambda: len(list(kafka.consume(self.settings, notify.NOTIFY.name, "earliest"))) > whole, 180, between=5)
        there = {f"{r.topic}/{r.partition}/{r.offset}": r for r in kafka.consume(self.settings, notify.NOTIFY.name, "earliest")}
        with suppress(TimeoutError):
            until(lambda: there.keys() <= {d.origin for d in notifier.dead_letters(self.settings)}, 180, between=2)
        dead = {d.origin: d for d in notifier.dead_letters(self.settings)}
        process = local.running(self.settings, "notify")
        wrong = [f"{place}: {r.value!r}" for place, r in there.items() if place not in dead or dead[place].value != r.value]
        wrong += [] if process else ["the notifier has ended"]
        self.holds("each hostile message is a dead letter, and the notifier runs", len(there), wrong)
        robots = {p: notifier.Robot(p, SecretStr("https://x")) for p in ("dingtalk", "wecom")}
        said, wrong = 0, []
        for record in there.values():
            with suppress(ValueError):
                one = notify.Message.model_validate_json(record.value or b"")
                if one.id.startswith(("payment_ledger-", "order_changes-")):
                    said += 1
                    wrong += [one.title for robot in robots.values() if notifier.body(robot, one)["msgtype"] != "text"]
        self.holds("a naughty row is announced as plain text", said, wrong)

    # ---- what people type

    def queries(self) -> None:
        inside = next(self.settings.lake_path.glob("log/page_views/**/*.parquet"))
        before = inside.read_bytes()
        every = [sql.format(outside=self.outside, inside=inside, out=self.out) for sql in SQL]
        wrong = []
        answers = self.commands([("query", "--seconds", str(SECONDS), "--", sql) for sql in every])
        for sql, said in zip(every, answers, strict=True):
            one_line = len(said.out.strip().splitlines()) == 1
            if said.code not in (1, 2) or not one_line or OUTSIDE in said.out or "root:" in said.out:
                wrong.append(f"{sql[:100]}: {said.code} {said.out[-200:]}")
            if said.seconds > SECONDS + 30:
                wrong.append(f"{sql[:100]}: {said.seconds:.0f} s")
        wrong += ["something was written"] * (self.out.exists() or (inside.exists() and inside.read_bytes() != before))
        self.holds("`query` reads no file outside the lake, writes none, and ends in time", len(every), wrong)

    def asked(self) -> None:
        """Naughty strings as a query, as what a query asks for and as a name in it: an answer, or one sentence."""
        wrong, tried = list[str](), 0
        for text in self.naughty:
            held = query.quoted(text)
            for sql in (
                text,
                f"SELECT '{text}'",
                f'SELECT * FROM "{text}"',
                f"SELECT {held}, * FROM users WHERE user_name = {held}",
            ):
                tried += 1
                try:
                    said = repr(query.query(self.settings, CATALOG, sql, rows=10, seconds=SECONDS).rows)
                except query.QueryError as refused:
                    said = str(refused)
                    wrong += [f"{sql[:100]!r} is refused in several lines"] * ("\n" in said)
                except Exception as error:
                    said = ""
                    wrong.append(f"{sql[:100]!r}: {error!r}")
                wrong += [f"{sql[:100]!r}: {said[:200]}"] * (OUTSIDE in said or "root:" in said)
        whole = [text for text in self.naughty if "\0" not in text and len(text) < 1000][:: max(1, len(self.naughty) // 40)]
        for text, said_of in zip(whole, self.commands([("query", "--", text) for text in whole]), strict=True):
            if said_of.code not in (0, 1, 2) or "Traceback" in said_of.out or OUTSIDE in said_of.out:
                wrong.append(f"{text!r}: {said_of.code} {said_of.out[-200:]}")
        self.holds("a naughty string as query text has an answer or a sentence", tried + len(whole), wrong)

    def names(self) -> None:
        """Each command that takes a name, with naughty ones: exit code 2, and one sentence."""
        texts = [os.fsencode(t) for t in NAUGHTY if "\0" not in t and not t.isdigit()] + [b"\xff\xfe", b"\xed\xa0\x80"]
        every = [(way, texts[(n * 7 + m * 23) % len(texts)]) for n, way in enumerate(WAYS) for m in (0, 1)]
        every += [(way, text) for way in WAYS for text in (b"../../etc/passwd", b"x" * 100_000)]
        tries = [[part.encode().replace(b"@", text) for part in way.split()] for way, text in every]
        wrong = [
            f"{b' '.join(argv)[:120]!r}: {said.code} {said.out[-300:]}"
            for argv, said in zip(tries, self.commands(tries), strict=True)
            if said.code != 2 or "Traceback" in said.out or len(said.out.strip().splitlines()) != 1
        ]
        self.holds("a hostile name on the command line is a wrong word, in a sentence", len(tries), wrong)

    def forms(self) -> None:
        """What a form's tasks do with naughty values: the form or the task refuses them, each with a sentence."""
        from airflow.dag_processing.dagbag import DagBag

        sys.path.append(str(ROOT / "plugins"))  # as Airflow does
        bag, wrong, tried = DagBag("/nowhere", collect_dags=False), list[str](), 0
        asked = {"control": "stream", "rollback": "run", "publish_over": "run", "reprocess": "tables"}
        for name, parameter in asked.items():
            bag.process_file(str(ROOT / "dags" / f"{name}.py"))
            dag = bag.dags[name]
            call: Any = dag.get_task("plan" if name == "reprocess" else dag.task_ids[0])
            for text in (
                t for t in self.naughty if t.replace(",", "").strip()
            ):  # a list that names nothing is that of all tables
                params = {n: p.value for n, p in dag.params.items()} | {"reason": text, "checks": [text], parameter: text}
                more = {"run_id": text} if name == "reprocess" else {}
                tried += 1
                try:
                    call.python_callable(params=params, **more)
                    wrong.append(f"{name}: {parameter} {text[:80]!r} was taken")
                except (ValueError, LookupError, lake.LakeError):
                    pass
                except Exception as error:
                    wrong.append(f"{name}: {parameter} {text[:80]!r}: {error!r}")
        self.holds("a form refuses a stream, run or table that is none", tried, wrong)

    # ---- doors, secrets and what others know

    def doors(self) -> None:
        """Every listener of every process that was started here."""
        open_doors = {c.laddr for p in self.tree() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        wrong = [f"{door.ip}:{door.port}" for door in open_doors if door.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
        ports = {int(self.settings.brokers.rpartition(":")[2]), self.settings.controller_port, self.settings.metrics_port}
        wrong += [f"nothing listens at {port}" for port in ports - {door.port for door in open_doors}]
        self.holds("listeners are on loopback only", len(open_doors), wrong)

    def search(self, text: str) -> tuple[int, list[str]]:
        """How many records of Kafka and rows of tables were looked through, and the topics and tables that have the text."""
        looked, found = 0, list[str]()
        for topic in (*CATALOG.topics.values(), *notify.TOPICS):
            records = list(kafka.consume(self.settings, topic.name, "earliest"))
            looked += len(records)
            parts = [(r.key, r.value, *(part for n, v in r.headers for part in (n.encode(), v))) for r in records]
            found += [f"topic {topic.name}"] * any(text.encode() in part for every in parts for part in every if part)
        for name in query.written(query.places(self.settings, CATALOG)):
            sql = f"SELECT count(*), count_if(contains(one::VARCHAR, '{text}')) FROM \"{name}\" AS one"
            ((rows, with_it),) = query.query(self.settings, CATALOG, sql, seconds=300).rows
            looked += rows
            found += [f"table {name}"] * bool(with_it)
        return looked, found

    def dependencies(self) -> None:
        try:
            tried, wrong = others.audit()
        except RuntimeError as away:
            self.outcomes.append(Outcome("no locked package has a known vulnerability", 0, unasked=str(away)))
        else:
            self.holds("no locked package has a known vulnerability", tried, wrong)

    def tree(self) -> list[psutil.Process]:
        return [one for p in local.processes(self.settings) for one in local.orphans(p)]

    def canaries(self) -> None:
        """The secrets are in no file below the home, no command line and no command's words."""
        user = {"TIDEMARK_KAFKA_USER": "ann", "TIDEMARK_KAFKA_PASSWORD": f"{SECRET}-4"}
        wrong_ones = (
            user | {"TIDEMARK_KAFKA_PROTOCOL": "SASL_PLAINTEXT"},
            user,
            {"TIDEMARK_WECOM_WEBHOOK": f"http://x/{SECRET}-5"},
        )
        for more in wrong_ones:
            for words in ("status", "topics list", "consume page_views --from=0 --limit=1", "notify", "dead-letters list"):
                self.command(*words.split(), more=more)
        rows, found = self.search(SECRET)
        _, planted = self.search(MARK)
        wrong = [f"{SECRET} is in {place}" for place in found]
        # Compressed, no file shows its text: records and rows are looked through as readers have them, and there as well.
        wrong += [
            f"what was sent is not found in {place}" for place in ("topic page_views", "table page_views") if place not in planted
        ]
        self.holds("secrets are in no record and no row, by whomever it is read", rows, wrong)
        files = [f for f in self.home.rglob("*") if f.is_file() and not f.is_symlink()]
        wrong = [str(f.relative_to(self.home)) for f in files if SECRET.encode() in f.read_bytes()]
        lines = []
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):  # one that has ended, and that nobody has asked how
                lines.append(" ".join(process.cmdline()))
        wrong += [line for line in lines if SECRET in line] + ["the words of a command"] * (SECRET in self.all_said)
        self.holds("secrets are in no file, no command line and no command's words", len(files) + len(lines), wrong)


def strict(text: str) -> Any:
    """JSON by its letter, of texts that have UTF-8: no NaN, no member twice. Raises `ValueError`, `RecursionError`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a member twice")
        return dict(pairs)

    def never(word: str) -> None:
        raise ValueError(word)

    found = json.loads(text, object_pairs_hook=once, parse_constant=never)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def instant(told: Any) -> datetime | None:
    """ISO 8601 with a zone, or whole milliseconds."""
    with suppress(ValueError, OverflowError, OSError):
        if type(told) is int:
            return datetime.fromtimestamp(told / 1000, UTC)
        if isinstance(told, str) and (at := datetime.fromisoformat(told)).tzinfo:
            return at
    return None


def accepted(topic: Topic, record: Record) -> tuple[bool, str | None]:
    """Whether a record is an event, by Python alone and by what the README says; and its text."""
    value, key = record.value, record.key
    try:
        if topic is USERS and value is None:
            times = [v for n, v in record.headers if n == "event_time"]
            return bool(key) and not (times and instant((times[0] or b"").decode()) is None), (key or b"").decode()
        if value is None or (not value and topic is not LINES) or len(value) > topic.largest_event:
            return False, None
        if topic is LINES:
            return True, value.decode()
        event = strict(value.decode())
        texts = [event[c.name] for c in topic.columns if c.type == "STRING" and not c.nullable]
        at, text = instant(event[topic.event_time]), TEXTS[topic.name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False, None
    well = at is not None and datetime(2000, 1, 1, tzinfo=UTC) <= at <= record.timestamp + timedelta(minutes=5)
    well &= all(isinstance(t, str) for t in texts) and (topic is not USERS or (key or b"").decode() == event[text])
    return well, event[text] if well else None


def hostile(
    seed: Annotated[int | None, typer.Option(help="Of the order; drawn and told unless said.")] = None,
    out: Annotated[Path, typer.Option(help="Where the outcomes go.")] = OUT,
) -> None:
    """Send hostile input through the real platform and count what held."""
    seed = int(time.time()) if seed is None else seed
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    console, record = Console(width=150), stamp("make hostile", seed)
    console.print(f"seed {seed}", highlight=False)
    with Hostile(seed) as world:
        console.print(f"naughty strings: {world.used}", highlight=False)
        world.stream()
        stream = local.running(world.settings, STREAM)
        assert stream is not None
        local.start(world.settings, "notify", [sys.executable, "-m", "tidemark", "notify"], world.environment())
        sent = world.events(Random(seed))
        for topic, events in sent.items():
            delivery = kafka.produce(world.settings, CATALOG.topics[topic], events)
            assert delivery.complete, delivery.errors
        world.wait_read(300)
        world.tries(world.held_in_the_lake, sent)
        world.tries(world.messages, sent)
        world.tries(world.reports)
        for work in (world.page, world.queries, world.asked, world.names, world.forms, world.doors, world.canaries):
            world.tries(work)
        world.tries(world.dependencies)
        world.running(STREAM, stream.pid)
        outcomes = world.outcomes
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record | {"used": world.used, "outcomes": [o.plain() for o in outcomes]}, indent=1) + "\n")
    table = Table("outcome", "tried", "held", "first wrong")
    for o in outcomes:
        held = {True: "yes", False: f"NO ({len(o.wrong)})", None: "could not be asked"}[o.held]
        table.add_row(o.outcome, f"{o.tried:,}", held, Text((o.wrong or [o.unasked])[0][:90]))
    console.print(table)
    raise typer.Exit(1 if any(o.held is False for o in outcomes) else 0)


if __name__ == "__main__":
    typer.run(hostile)
