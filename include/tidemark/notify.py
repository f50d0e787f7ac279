"""Telling people: one call for whatever somebody should hear of, and the message that the notifier's robots say."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import structlog
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tidemark import lake
from tidemark.model import Topic, View, filled

if TYPE_CHECKING:
    from tidemark.settings import Settings

log = structlog.get_logger()

What = Literal[
    "nightly_late",
    "gate_failed",
    "run_failed",
    "stream_down",
    "stream_late",
    "rejects_surge",
    "unexplained_difference",
    "report",
]
WORDS: Mapping[str, str] = {
    "nightly_late": "A day that is over was not published by its deadline; readers still have it live.",
    "gate_failed": "A table of a run failed a critical check, so it and what reads it were held back.",
    "run_failed": "A task failed for another reason than a check, and so did its retries.",
    "stream_down": "A stream ended, or is silent, and its orchestrator could not bring it back.",
    "stream_late": "A stream runs, and is further behind Kafka than its limit.",
    "rejects_surge": "A stream rejects a larger share of its records than its limit.",
    "unexplained_difference": "Rows that were live and were settled differ, and no late event explains it.",
    "report": "The report of a day is written.",
}
"""Every word that `what` may be, and what it means. What follows on each is in docs/operating.md."""

NOTIFY = Topic(
    "notify",
    key="id",
    partitions=1,
    schema="id STRING NOT NULL, platform STRING NOT NULL, kind STRING, title STRING, content STRING, picture STRING, link STRING",
    event_time="kafka.timestamp",
    id="id",
    max_message_bytes=256 * 1024,
)
"""Messages to be said. One partition: one notifier speaks, and any other waits to take over (decision 0018)."""
SENT = Topic(
    "notify_sent",
    key="id",
    partitions=1,
    schema="id STRING NOT NULL, platform STRING NOT NULL, state STRING NOT NULL, attempt STRING NOT NULL",
    event_time="kafka.timestamp",
)
"""What the notifier has said, so that a repeat is not said again for as long as this is kept."""
DEAD_LETTERS = Topic(
    "notify_dead_letters",
    key="letter",
    partitions=1,
    schema="letter STRING NOT NULL COMMENT 'platform, id, and where it lay', id STRING, platform STRING",
    event_time="kafka.timestamp",
    compacted=True,
    max_message_bytes=512 * 1024,
)
"""Messages that could not be said, with the reason in their headers; a tombstone says that somebody has seen to one."""
TOPICS = (NOTIFY, SENT, DEAD_LETTERS)


class Message(BaseModel):
    """What a platform's robot is to say. One id is one message: however often it is sent, the robot says it once.

    `platform` is `dingtalk` or `wecom`; `kind` is an open word, as platforms differ: each has `text`, `link` (a card, which
    needs `link`) and `markdown`. `picture` and `link` are addresses. `mention` holds user ids, telephone numbers, or `all`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    id: str = Field(min_length=1, max_length=200)
    platform: str
    kind: str = "text"
    title: str = ""
    content: str = ""
    picture: str | None = None
    link: str | None = None
    mention: tuple[str, ...] = ()


PATIENCE = 2.0
"""Seconds that a message waits for Kafka before it is kept in a file."""
AT_ONCE: Mapping[str, Any] = {"linger.ms": 0, "enable.idempotence": False}
"""For a producer of one message: it needs half a second for the number that idempotence asks for, and 35 ms without.

What is stored twice then has the same id, and is said once.
"""
MASK = "**********"
NAMED = r"pass(?:word|wd|phrase)|secret|token|api[_-]?key|private[_-]?key|authorization|credential"
SECRET_NAME = re.compile(NAMED, re.IGNORECASE)
SAID = re.compile(rf"((?:{NAMED})['\"]?\s*[=:]\s*(?:bearer\s+|basic\s+)?['\"]?)[^\s'\",;&]+", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+@")


def notify(settings: Settings, what: What, title: str, text: str, **fields: Any) -> None:
    """Tell that something happened: an event in the log, a line of JSON appended to `<state>/alerts.jsonl`, and a message to
    each robot of `TIDEMARK_NOTIFY_TO`, by the notifier.

    The line is `{"at", "what", "title", "text", "fields"}`, instants in ISO 8601, and is appended whole or not at all, also
    beside other processes. Raises nothing, whatever fails: who tells must not be stopped by it, nor held up for more than a few
    seconds where Kafka is away. What is secret is masked: the settings' own passwords and Airflow's wherever they stand, and
    what is named like one. It does not promise that somebody reads it, nor that telling twice is one line.
    """
    try:
        hidden = secrets(settings)
        said = {
            "at": datetime.now(UTC).isoformat(),
            "what": masked(what, hidden),
            "title": masked(title, hidden),
            "text": masked(text, hidden),
            "fields": masked(fields, hidden),
        }
        try:
            append(settings.state / "alerts.jsonl", json.dumps(said, allow_nan=False))
        finally:
            tell = log.info if what == "report" else log.warning if what in WORDS else log.error
            tell(said["title"], what=said["what"], text=said["text"], fields=said["fields"])
            if settings.told:
                lines = [said["text"], *(f"{name}: {value}" for name, value in said["fields"].items())]
                one, title, content = str(uuid.uuid4()), lake.plain(said["title"]), lake.plain("\n".join(filter(None, lines)))
                send(settings, [Message(id=one, platform=p, title=title, content=content) for p in settings.told])
    except Exception as error:
        with suppress(Exception):  # a log whose stream is closed raises too
            log.error("could not be written where alerts are kept", because=type(error).__name__)


def send(settings: Settings, messages: Iterable[Message]) -> None:
    """Put messages into the topic `notify`, from where the notifier takes them, or into files where Kafka does not take them.

    A file is in the notifier's folder (`unsent`); it says what is there itself while Kafka is away. Raises `OSError`.
    """
    from tidemark import kafka

    messages = list(messages)
    try:
        values = [message.model_dump_json().encode() for message in messages]
        done = kafka.produce(settings, NOTIFY, values, patience=PATIENCE, options=AT_ONCE)
        if done.delivered == len(values):  # Ctrl-C may have come before one was taken
            return
        because = "; ".join(done.errors)
    except Exception as error:
        because = str(error)
    log.warning("messages are kept in files until Kafka takes them", messages=len(messages), because=because)
    for message in messages:
        keep(settings, message)


def announced(settings: Settings, view: View, rows: Iterable[Mapping[str, Any]]) -> list[Message]:
    """What a view announces of some rows: a message for each robot of `TIDEMARK_NOTIFY_TO`.

    Its id is made of the view's name and the row's key, and of nothing else: the same row has the same id for ever.
    """
    if (said := view.announce) is None:
        return []
    found = []
    for row in rows:
        key = json.dumps([instant(row[c]) for c in view.key], default=str, separators=(",", ":"))
        title, content, link = (lake.plain(filled(template, row)) for template in (said.title, said.content, said.link))
        one = Message(
            id=f"{view.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}",
            platform="",
            kind=said.kind,
            title=title,
            content=content,
            link=link or None,
            mention=said.mention if said.mention_if is None or row[said.mention_if] else (),
        )
        found += [one.model_copy(update={"platform": platform}) for platform in settings.told]
    return found


def instant(value: Any) -> Any:
    """A value as a key's JSON has it: an instant as UTC, whatever zone it was read in."""
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value


def unsent(settings: Settings) -> Path:
    """Where messages wait that Kafka did not take, a file each."""
    return settings.state / "notify" / "unsent"


def keep(settings: Settings, message: Message) -> Path:
    """Keep a message in a file, whole or not at all."""
    folder = unsent(settings)
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{message.platform}/{message.id}".encode()).hexdigest()[:32]
    path = folder / f"{name}.json"
    lake.whole_or_nothing(path, message.model_dump_json())
    return path


def append(path: Path, line: str) -> None:
    """Add a line to a file, by one write behind a lock; what did not go in whole is taken out again. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=10):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            before, whole = os.fstat(file).st_size, f"{line}\n".encode()
            if before and os.pread(file, 1, before - 1) != b"\n":  # whoever wrote it was killed in the middle
                whole = b"\n" + whole
            if os.write(file, whole) < len(whole):
                os.ftruncate(file, before)
                raise OSError(f"{path} takes no more")
        finally:
            os.close(file)


def secrets(settings: Settings) -> list[str]:
    """Every secret that this machine knows of, the longest first: one may be a part of another."""
    found = [part for _, v in settings if isinstance(v, SecretStr) for part in parts(v.get_secret_value())]
    with suppress(OSError, ValueError, AttributeError):
        found += map(str, json.loads((settings.home / "airflow" / "passwords.json").read_text()).values())
    return sorted(filter(None, found), key=len, reverse=True)


def parts(secret: str) -> list[str]:
    """A secret, and of an address its password and the values of its query too: they are secret without the address around them.

    Values of a few letters are none, and to hide them would spoil every text. Raises nothing, whatever somebody has set.
    """
    values: list[str] = []
    with suppress(ValueError):  # it may look like an address and be none
        address = urlsplit(secret if "://" in secret else "")
        values = [unquote(address.password or ""), *(value for _, value in parse_qsl(address.query))]
    values = [value for value in values if len(value) > 7]
    return [secret, *values, *(quote(value, safe="") for value in values)]


def masked(value: Any, hidden: list[str]) -> Any:
    """A value as JSON has it, at any depth, without what is secret."""
    if isinstance(value, Mapping):
        return {
            masked(str(k), hidden): MASK if SECRET_NAME.search(str(k)) and v is not None else masked(v, hidden)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(v, hidden) for v in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and value - value == 0:  # JSON has no word for NaN and the infinities
        return value
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    for secret in hidden:
        text = text.replace(secret, MASK)
    return IN_ADDRESS.sub(rf"\1:{MASK}@", SAID.sub(rf"\1{MASK}", text))
