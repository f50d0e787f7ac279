"""The notifier: takes messages from the topic `notify` and has the robots of DingTalk and WeCom say each once.

A message's offset is committed when its robot has said it, or when it lies in the topic `notify_dead_letters`. Each robot has a
thread and a queue of its own, so that the trouble of one delays no other.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import re
import ssl
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import structlog
from pydantic import SecretStr, ValidationError
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential
from tenacity.nap import sleep_using_event

from tidemark import kafka, lake, notify
from tidemark.kafka import Event, Member, Record, Share
from tidemark.local import Lease
from tidemark.model import duration
from tidemark.notify import DEAD_LETTERS, NOTIFY, SENT, Message
from tidemark.settings import PLATFORMS, Settings

log = structlog.get_logger()

GROUP = "tidemark-notify"
KEPT = duration(SENT.retention)
"""How long the id of a message that was said is remembered."""
HELD = 16 * 1024 * 1024
"""Bytes of messages that may wait for one robot; what is more goes to the dead letters at once."""
AS_LARGE: Mapping[str, Any] = {**notify.AT_ONCE, "message.max.bytes": 100_000_000, "queue.buffering.max.kbytes": 100_000}
"""For a producer of what has come in: as large as a consumer takes it (`receive.message.max.bytes`).

Kafka measures a batch as it comes, compressed; librdkafka measures a record that it sends before that.
"""
READ = 64 * 1024
"""Bytes of an answer that are read."""


class RobotWrong(ValueError):
    """A web hook that is not used; the sentence names the setting, and no secret."""


class Unsayable(ValueError):
    """A message that its platform has no way to say."""


# ---- robots


@dataclass(frozen=True)
class Robot:
    """A platform's robot: where it listens, and what it asks for."""

    platform: str
    webhook: SecretStr
    secret: SecretStr | None = None
    keyword: str = ""


@dataclass(frozen=True)
class Pace:
    """How fast a robot speaks, and how long one tries. Seconds, all of them but `rate` and `tries`."""

    rate: int = 20
    """The most messages in a minute: DingTalk and WeCom both take twenty, and DingTalk is deaf for ten minutes after more."""
    minute: float = 62.0
    """How long a message counts, from its answer on; two seconds more than a minute, since the ways there differ."""
    patience: float = 900.0
    """How long a message is tried again that cannot be said now."""
    tries: int = 3
    """How often a message is tried that the platform refuses."""
    first: float = 1.0
    """The longest first pause between two tries. Each may be twice as long as the one before; where in it, is chance."""
    longest: float = 60.0
    connect: float = 5.0
    answer: float = 10.0
    """How long one try may take, whatever the other side does."""
    closing: float = 20.0
    """How long an end may take."""


def pace(settings: Settings) -> Pace:
    """As the settings say."""
    return Pace(rate=settings.notify_rate, patience=duration(settings.notify_patience).total_seconds())


def robots(settings: Settings, connection: Callable[[str], Mapping[str, Any] | None] | None = None) -> dict[str, Robot]:
    """The robots that the settings name, by platform; then Airflow's connections `tidemark_<platform>`, where asked for.

    Of a connection the password is the web hook, and its extra may hold `secret` and `keyword`. Raises `RobotWrong`.
    """
    found = {}
    for platform in PLATFORMS:
        webhook, name = getattr(settings, f"{platform}_webhook"), f"TIDEMARK_{platform.upper()}_WEBHOOK"
        secret, keyword = getattr(settings, f"{platform}_secret", None), getattr(settings, f"{platform}_keyword", None)
        if webhook is None and connection and (known := connection(f"tidemark_{platform}")):
            name, extra = f"the password of Airflow's connection tidemark_{platform}", known["extra"]
            webhook, keyword = SecretStr(known["password"] or ""), extra.get("keyword")
            secret = SecretStr(extra["secret"]) if extra.get("secret") else None
        if webhook is None:
            continue
        if wrong := wrong_address(platform, webhook.get_secret_value(), settings.notify_hosts):
            raise RobotWrong(f"{name}: {wrong}")
        found[platform] = Robot(platform, webhook, secret, keyword or "")
    return found


TOKENS = {"dingtalk": "access_token", "wecom": "key"}
"""What the query of each platform's web hook holds."""


def wrong_address(platform: str, webhook: str, hosts: str) -> str | None:
    """Why a web hook is not used: only https, only hosts that are configured, nothing that could mean two things."""
    try:
        parsed, port = urlsplit(webhook), urlsplit(webhook).port or 443
    except ValueError:
        return "it is not an address; copy it from the robot's page"
    if parsed.scheme != "https":
        return "it does not begin with https://; copy it from the robot's page"
    host = parsed.hostname or ""
    allowed = {known.strip() for known in hosts.split(",") if known.strip()}
    if parsed.username is not None or "\\" in webhook or re.search(r"[\s\x00-\x1f]", webhook):
        return "it holds a user or signs that no address has; copy it from the robot's page"
    if (host if port == 443 else f"{host}:{port}") not in allowed:
        return f"its host {host}:{port} is not one of TIDEMARK_NOTIFY_HOSTS ({hosts})"
    if not parse_qs(parsed.query).get(TOKENS[platform]):
        return f"it has no {TOKENS[platform]}=; copy it from the robot's page, whole"
    return None


def address(robot: Robot, at: float) -> str:
    """The web hook, signed for an instant where the robot asks for it: HMAC-SHA256 over `<milliseconds>\\n<secret>`, base64."""
    webhook = robot.webhook.get_secret_value()
    if robot.secret is None:
        return webhook
    secret, stamp = robot.secret.get_secret_value(), str(round(at * 1000))
    sign = base64.b64encode(hmac.digest(secret.encode(), f"{stamp}\n{secret}".encode(), "sha256")).decode()
    return f"{webhook}&{urlencode({'timestamp': stamp, 'sign': sign})}"


# ---- what a message looks like on each platform


def body(robot: Robot, message: Message) -> dict[str, Any]:
    """The JSON that a platform takes. A card can mention nobody, so with a mention it becomes markdown.

    What is longer than the platform takes is cut, and says so. Raises `Unsayable`.
    """
    kind = "markdown" if message.kind == "link" and message.mention else message.kind
    kinds = BODIES[robot.platform]
    if kind not in kinds:
        raise Unsayable(f"{robot.platform} has no kind {message.kind}; it has {', '.join(kinds)}")
    if message.kind == "link" and not message.link:
        raise Unsayable("a message of kind link has no link")
    if not message.title and not message.content:
        raise Unsayable("it says nothing: title and content are empty")
    name, made = kinds[kind]
    return {"msgtype": name} | made(robot, message)


def headline(message: Message) -> str:
    """The title, else the first line that says something, else the name of a message that says nothing."""
    return next((line for line in (message.title, *message.content.splitlines()) if line.strip()), message.id)


def mentioned(message: Message) -> tuple[list[str], list[str], bool]:
    """Telephone numbers, user ids, and whether everybody is meant."""
    rest = [one for one in message.mention if one != "all"]
    numbers = [one for one in rest if re.fullmatch(r"\+?\d[\d-]{5,}", one)]
    return numbers, [one for one in rest if one not in numbers], "all" in message.mention


def cut(text: str, most: int) -> str:
    """The text, or as much of it as has `most` bytes of UTF-8 with a sign that there was more."""
    if len(text.encode()) <= most:
        return text
    return text.encode()[: most - 3].decode("utf-8", "ignore") + "…"


LEAST = 200
"""Bytes of a text that are always left for it, and for the word that a robot asks for."""


def fitted(robot: Robot, text: str, *after: str, most: int, beside: str = "") -> str:
    """A text with what must not be lost behind it, on lines of their own, in `most` bytes; what alone is longer than that is.

    The word that the robot asks for comes last where neither what is left of the text nor what stands `beside` it has it.
    """
    kept = [one for one in after if one]
    while sum(len(f"\n{one}".encode()) for one in kept) > most - LEAST:
        kept.remove(max(kept, key=len))
    for word in ("", robot.keyword):
        tail = "".join(f"\n{one}" for one in (*kept, word) if one)
        whole = cut(text, max(3, most - len(tail.encode()))) + tail
        if robot.keyword in whole or robot.keyword in beside:
            break
    return whole


def as_text(message: Message) -> str:
    return "\n".join(filter(None, (message.title, message.content)))


def as_markdown(message: Message) -> list[str]:
    """The text, and behind it picture and link. The title is its heading, unless the first heading of the content has it: nowhere
    else does WeCom show a title."""
    first = next((line for line in message.content.splitlines() if re.match("#{1,6} ", line)), "")
    heading = f"### {message.title}" if message.title not in first else ""
    picture = f"\n![]({message.picture})" if message.picture else ""
    link = f"\n[{cut(message.title or message.link, 128)}]({message.link})" if message.link else ""
    return ["\n\n".join(filter(None, (heading, message.content))), picture, link]


def ding_at(message: Message) -> dict[str, Any]:
    numbers, people, everybody = mentioned(message)
    return {"atMobiles": numbers, "atUserIds": people, "isAtAll": everybody}


def ding_text(robot: Robot, message: Message) -> dict[str, Any]:
    content = fitted(robot, as_text(message), message.link or "", most=DING_MOST)
    return {"text": {"content": content}, "at": ding_at(message)}


def ding_link(robot: Robot, message: Message) -> dict[str, Any]:
    title = cut(headline(message), 200)
    text = fitted(robot, message.content or headline(message), most=DING_MOST, beside=title)
    return {"link": {"title": title, "text": text, "picUrl": message.picture or "", "messageUrl": message.link}}


def ding_markdown(robot: Robot, message: Message) -> dict[str, Any]:
    numbers, people, _ = mentioned(message)
    title = headline(message)
    names = " ".join(f"@{one}" for one in (*numbers, *people))  # without its name in the text nobody is called
    content = fitted(robot, *as_markdown(message), f"\n{names}" if names else "", most=DING_MOST)
    return {"markdown": {"title": cut(title, 200), "text": content}, "at": ding_at(message)}


def wecom_text(robot: Robot, message: Message) -> dict[str, Any]:
    numbers, people, everybody = mentioned(message)
    all_of_them = ["@all"] if everybody else []
    content = fitted(robot, as_text(message), message.link or "", most=2048)
    return {"text": {"content": content, "mentioned_list": [*people, *all_of_them], "mentioned_mobile_list": numbers}}


def wecom_link(robot: Robot, message: Message) -> dict[str, Any]:
    title = cut(headline(message), 128)
    article = {"title": title, "description": fitted(robot, message.content, most=512, beside=title)}
    return {"news": {"articles": [article | {"url": message.link, "picurl": message.picture or ""}]}}


def wecom_markdown(robot: Robot, message: Message) -> dict[str, Any]:
    numbers, people, everybody = mentioned(message)
    # WeCom's markdown calls people by their ids alone; the others are named, and not called.
    names = " ".join([*(f"<@{one}>" for one in people), *(f"@{one}" for one in numbers), *(["@all"] if everybody else [])])
    return {"markdown": {"content": fitted(robot, *as_markdown(message), names, most=4096)}}


DING_MOST = 9_000
"""Bytes of a text: DingTalk takes 20,000 of the whole JSON, in which a quote and a line's end are two."""
Body = Callable[[Robot, Message], dict[str, Any]]
BODIES: Mapping[str, Mapping[str, tuple[str, Body]]] = {
    "dingtalk": {"text": ("text", ding_text), "link": ("link", ding_link), "markdown": ("markdown", ding_markdown)},
    "wecom": {"text": ("text", wecom_text), "link": ("news", wecom_link), "markdown": ("markdown", wecom_markdown)},
}
"""By platform and kind: what the platform calls it, and how it is made."""


def digest(messages: Sequence[Message]) -> Message:
    """One message in the place of many: their titles in order, equal ones counted. It calls whom they call.

    The platform's limit cuts the list at its end; that there are more than it shows, its first line says.
    """
    titles = Counter(headline(message) for message in messages)
    lines = [title if count == 1 else f"{title} ×{count}" for title, count in titles.items()]
    mention = tuple(dict.fromkeys(one for message in messages for one in message.mention))
    return Message(
        id="digest",
        platform=messages[0].platform,
        title=f"{len(messages)} messages in one: more came than a robot may say in a minute",
        content="\n".join(lines),
        mention=mention[:50],
    )


# ---- one try


@dataclass(frozen=True)
class Answer:
    """What came of a try. `later` may come right by itself; `refused` will hardly. `wait` is how long the platform asks for."""

    outcome: Literal["said", "later", "refused"]
    because: str = ""
    wait: float = 0.0


BUSY = {-1, 130101, 410100, 90018, 90030, 45009, 45033}
"""Answers of both platforms that mean: too fast, or too busy. https://open.dingtalk.com/document/robots/custom-robot-access,
https://developer.work.weixin.qq.com/document/path/90313"""


async def asked(robot: Robot, payload: bytes, pace: Pace, trusted: ssl.SSLContext) -> Answer:
    """One POST to a robot, and what came of it, within `pace.answer` seconds. No redirect is followed, no proxy asked.

    Raises nothing that a network can do; no reason that it gives holds an address.
    """
    headers = {"Content-Type": "application/json; charset=utf-8", "Accept-Encoding": "identity", "User-Agent": "tidemark"}
    limits = httpx.Timeout(pace.answer, connect=pace.connect)
    try:
        async with (
            asyncio.timeout(pace.answer),  # the client's own limits begin again with each byte
            httpx.AsyncClient(verify=trusted, follow_redirects=False, trust_env=False, timeout=limits) as client,
            client.stream("POST", address(robot, time.time()), content=payload, headers=headers) as response,
        ):
            said = b""
            async for piece in response.aiter_raw():
                said += piece
                if len(said) > READ:
                    break
            return judged(response.status_code, response.headers.get("Retry-After"), said)
    except (TimeoutError, httpx.TimeoutException):
        return Answer("later", f"no answer within {pace.answer:g} seconds")
    except (httpx.TransportError, OSError) as error:
        return Answer("later", f"no connection, or it broke ({type(error).__name__})")
    except Exception as error:  # its words could hold the address
        return Answer("refused", f"it could not be sent ({type(error).__name__})")


def judged(status: int, retry_after: str | None, said: bytes) -> Answer:
    """What an answer means. Only `errcode` 0 in a 200 is said: both platforms answer 200 to what they do not say."""
    if status in (408, 425, 429) or status >= 500:
        return Answer("later", f"HTTP {status}", seconds_of(retry_after))
    if status != 200:
        return Answer("refused", f"HTTP {status}" + (", a redirect, which is not followed" if 300 <= status < 400 else ""))
    try:
        answer = json.loads(said)
        code, words = answer["errcode"], str(answer.get("errmsg", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Answer("later", "an answer that no robot gives")
    if type(code) is not int:
        return Answer("later", "an answer that no robot gives")
    if code == 0:
        return Answer("said")
    because = f"errcode {code}: {' '.join(words.split())[:200]}"
    return Answer("later", because, 0.0 if code == -1 else 60.0) if code in BUSY else Answer("refused", because)


def seconds_of(retry_after: str | None) -> float:
    """How long a `Retry-After` asks for, in either of its forms; 0 for what is neither."""
    if not retry_after:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    return 0.0


def say(robot: Robot, message: Message, pace: Pace, trusted: ssl.SSLContext) -> Answer:
    """Try once, and wait for the answer. Raises `Unsayable`."""
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)  # at INFO it writes each address down, token included
    payload = json.dumps(body(robot, message), ensure_ascii=False).encode("utf-8", "replace")
    return asyncio.run(asked(robot, payload, pace, trusted))


# ---- what was said before


State = Literal["saying", "said", "refused"]


def apart(name: str, hidden: list[str]) -> str:
    """A name without what is secret in it, and still another one than every other."""
    shown = notify.masked(name, hidden)
    return shown if shown == name else f"{shown}#{hashlib.sha256(name.encode()).hexdigest()[:12]}"


class Sent:
    """Which messages were said, in memory and in the topic `notify_sent`.

    A message is noted as `saying` before its first try, and as `said` after its answer or `refused` when it is given up. One
    that is only `saying` when a notifier starts was in the air when the last one died: it is said again, and says so. No id is
    noted with what is secret in it.
    """

    def __init__(self, settings: Settings, hidden: Sequence[str] = ()) -> None:
        self.settings, self.lock, self.upto = settings, threading.Lock(), 0
        self.hidden = list(hidden)
        self.own = uuid.uuid4().hex  # what the attempts of this notifier begin with
        self.states: dict[str, tuple[str, float]] = {}  # oldest first
        self.tries: dict[str, dict[str, float]] = {platform: {} for platform in PLATFORMS}
        self.owed: list[bytes] = []

    def catch_up(self) -> None:
        """Read what was noted since the last time, by whomever. Raises as `kafka.consume`."""
        for record in kafka.consume(self.settings, SENT.name, self.upto):
            self.upto = record.offset + 1
            try:
                self.remember(json.loads(record.value or b""), record.timestamp.timestamp())
            except (ValueError, LookupError, TypeError, RecursionError):
                log.warning("a record that is no note is left out", topic=SENT.name, offset=record.offset)

    def remember(self, noted: Mapping[str, str], at: float) -> None:
        platform, state, attempt = noted["platform"], noted["state"], noted["attempt"]
        key = f"{platform}/{noted['id']}"
        with self.lock:
            self.forget(at)
            if self.states.get(key, ("", 0.0))[0] != "said":
                self.states.pop(key, None)
                self.states[key] = state, at
            tries = self.tries.setdefault(platform, {})
            tries[attempt] = at
            if len(tries) > 1000:  # the minute of a robot has no more
                del tries[next(iter(tries))]

    def forget(self, at: float) -> None:
        """What was noted too long before an instant; the lock is the caller's."""
        while self.states and next(iter(self.states.values()))[1] < at - KEPT.total_seconds():
            del self.states[next(iter(self.states))]

    def state(self, message: Message) -> str:
        """What was noted of a message last; empty where nothing was, or too long ago. Until then, what was said stays said."""
        with self.lock:
            self.forget(time.time())
            return self.states.get(f"{message.platform}/{apart(message.id, self.hidden)}", ("", 0.0))[0]

    def ages(self, platform: str, within: float) -> list[float]:
        """How many seconds ago the last messages of a robot were tried by other notifiers, oldest first."""
        now = time.time()
        with self.lock:
            self.tries[platform] = {name: at for name, at in self.tries[platform].items() if now - at < within}
            return sorted((now - at for n, at in self.tries[platform].items() if not n.startswith(self.own)), reverse=True)

    def note(self, messages: Iterable[Message], state: State, attempt: str, now: bool = True) -> None:
        """Remember, and tell the topic `now` or with the next; what Kafka does not take is told later."""
        for message in messages:
            name = apart(message.id, self.hidden)
            noted = {"id": name, "platform": message.platform, "state": state, "attempt": attempt}
            self.remember(noted, time.time())
            with self.lock:
                self.owed.append(json.dumps(noted).encode())
        if now:
            self.flush()

    def flush(self) -> None:
        with self.lock:
            owed, self.owed = self.owed, []
        if not owed:
            return
        try:
            complete = kafka.produce(self.settings, SENT, owed, patience=notify.PATIENCE, options=notify.AT_ONCE).complete
        except Exception as error:
            complete = False
            log.warning("what was said is not noted yet", because=type(error).__name__)
        if not complete:
            with self.lock:
                self.owed = owed + self.owed  # noted twice is noted


# ---- one robot's thread


def sent_at(record: Record) -> datetime:
    """When what a record holds was sent first: it may have waited in a file, or been a dead letter, and says so in `kept`."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat((dict(record.headers).get("kept") or b"").decode()).astimezone(UTC)
    return record.timestamp


@dataclass(frozen=True, eq=False)
class Letter:
    """A message that waits for its robot, and where it came from: a record of Kafka, or a file."""

    message: Message
    record: Record | None = None
    path: Path | None = None
    again: bool = False
    """Whether it may have been said before."""
    kept: datetime | None = None
    """Since when it has been in its file."""

    @property
    def at(self) -> datetime | None:
        """When it was sent: to Kafka, or into the file in which it waited for Kafka."""
        return sent_at(self.record) if self.record else self.kept

    @property
    def size(self) -> int:
        return len(self.record.value or b"") if self.record else len(self.message.content) + 1000


class NotSaid(Exception):
    """A try that did not succeed."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.because)
        self.answer = answer


@dataclass
class Count:
    """How a robot is doing."""

    said: int = 0
    buried: int = 0
    trouble: str = ""


@dataclass(eq=False)
class Target:
    """A robot's queue, and the thread that says what is in it.

    While the minute has room, each message is said by itself. The last room of a minute takes all that waits, in one digest.
    `done` is told of letters that were said, `bury` of those that could not be, with the reason.
    """

    robot: Robot
    pace: Pace
    trusted: ssl.SSLContext
    sent: Sent
    done: Callable[[Sequence[Letter]], None]
    bury: Callable[[Sequence[Letter], str], None]
    hidden: list[str] = field(default_factory=list, repr=False)
    waiting: deque[Letter] = field(default_factory=deque)
    busy: list[Letter] = field(default_factory=list)
    count: Count = field(default_factory=Count)
    broken: BaseException | None = None
    closing: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.hush = threading.Event()  # end the pauses between tries
        # When the last messages were, by the monotonic clock: its own, and those of other notifiers.
        self.answered: deque[float] = deque()
        self.others: deque[float] = deque()
        self.bytes = 0
        self.thread = threading.Thread(target=self.run, name=f"robot-{self.robot.platform}", daemon=True)

    def start(self) -> None:
        """Begin, or go on: what others have said meanwhile has its share in the minute."""
        now = time.monotonic()
        self.others = deque(now - age for age in self.sent.ages(self.robot.platform, self.pace.minute))
        if not self.thread.is_alive():
            self.thread.start()

    def put(self, letter: Letter) -> bool:
        """Queue a letter; False where more waits already than is held."""
        with self.changed:
            if self.bytes + letter.size > HELD:
                return False
            self.bytes += letter.size
            self.waiting.append(letter)
            self.changed.notify_all()
        return True

    def let_go(self) -> None:
        """Drop what came from Kafka and was not said, and return when no try is under way: it is another's from now on."""
        self.hush.set()
        with self.changed:
            kept = [letter for letter in self.waiting if letter.record is None]
            self.waiting.clear()
            self.waiting.extend(kept)
            self.bytes = sum(letter.size for letter in kept)
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.busy or self.broken, timeout=self.pace.answer + 5)
        if not self.closing:
            self.hush.clear()

    def finish(self) -> None:
        """Say what waits, as far as the minute has room, each tried once more at most; then end."""
        with self.changed:
            self.closing = True
            self.hush.set()
            self.changed.notify_all()

    def run(self) -> None:
        try:
            while batch := self.next_batch():
                self.deliver(batch)
                with self.changed:
                    self.busy = []
                    self.changed.notify_all()
        except BaseException as error:
            self.broken = error
            with self.changed:
                self.changed.notify_all()

    def next_batch(self) -> list[Letter]:
        """What is to be said next; nothing at the end."""
        with self.changed:
            while True:
                room, until = self.room()
                if self.waiting and room > 0:
                    count = len(self.waiting) if room == 1 or (self.closing and len(self.waiting) > room) else 1
                    self.busy = [self.waiting.popleft() for _ in range(count)]
                    self.bytes -= sum(letter.size for letter in self.busy)
                    return self.busy
                if self.closing:
                    return []
                self.changed.wait(until if self.waiting else None)

    def room(self) -> tuple[int, float]:
        """How many messages the minute still takes, and in how many seconds it takes one more."""
        now, both = time.monotonic(), (self.answered, self.others)
        for times in both:
            while times and times[0] <= now - self.pace.minute:
                times.popleft()
        first = min((times[0] for times in both if times), default=now - self.pace.minute)
        return self.pace.rate - sum(map(len, both)), first + self.pace.minute - now

    def deliver(self, batch: Sequence[Letter]) -> None:
        """Say some letters, as one message, until it is said or given up. What is let go stays where it was."""
        states = [self.sent.state(letter.message) for letter in batch]
        self.done([letter for letter, state in zip(batch, states, strict=True) if state == "said"])
        if not (fresh := [letter for letter, state in zip(batch, states, strict=True) if state != "said"]):
            return
        messages = list({letter.message.id: letter.message for letter in fresh}.values())
        message = messages[0] if len(messages) == 1 else digest(messages)
        attempt, in_kafka = f"{self.sent.own}-{uuid.uuid4().hex}", any(letter.record for letter in fresh)
        retrying = Retrying(
            retry=retry_if_exception_type(NotSaid),
            stop=self.enough,
            wait=self.pause,
            sleep=sleep_using_event(self.hush),
            reraise=True,
        )
        unnoted = [lambda: self.sent.note(messages, "saying", attempt, now=in_kafka)]
        try:
            retrying(self.attempt, with_its_age(message, fresh), unnoted)
        except (NotSaid, Unsayable) as error:
            answer = error.answer if isinstance(error, NotSaid) else Answer("refused", str(error))
            because = notify.masked(answer.because, self.hidden)
            self.count.trouble = because
            refused = answer.outcome == "refused" and retrying.statistics.get("attempt_number", 1) >= self.pace.tries
            if self.hush.is_set() and not refused and isinstance(error, NotSaid):
                log.info("given back; it comes again", platform=self.robot.platform, messages=len(fresh), because=because)
                kept = [letter for letter in fresh if letter.path and not self.closing]
                with self.changed:
                    self.waiting.extendleft(reversed(kept))
                    self.bytes += sum(letter.size for letter in kept)
                return
            self.sent.note(messages, "refused", attempt, now=False)
            self.bury(fresh, because)
            return
        self.sent.note(messages, "said", attempt, now=in_kafka)
        self.done(fresh)
        self.count.said += len(fresh)
        self.count.trouble = ""

    def attempt(self, message: Message, unnoted: list[Callable[[], None]]) -> None:
        """Try once, when the minute has room; note it before the first time. Raises `NotSaid`, `Unsayable`."""
        while (room := self.room())[0] <= 0:
            if self.hush.wait(room[1]):
                raise NotSaid(Answer("later", "the minute has no room"))
        while unnoted:
            unnoted.pop()()
        answer = say(self.robot, message, self.pace, self.trusted)
        self.answered.append(time.monotonic())
        if answer.outcome != "said":
            because = notify.masked(answer.because, self.hidden)
            named = notify.masked(message.id, self.hidden)
            log.warning("a robot does not say a message", platform=self.robot.platform, id=named, because=because)
            self.count.trouble = because
            raise NotSaid(answer)

    def enough(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        if not isinstance(error, NotSaid) or self.hush.is_set():
            return True
        if error.answer.outcome == "refused":
            return state.attempt_number >= self.pace.tries
        return (state.seconds_since_start or 0.0) + state.upcoming_sleep >= self.pace.patience

    def pause(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_for = error.answer.wait if isinstance(error, NotSaid) else 0.0
        return asked_for + wait_random_exponential(multiplier=self.pace.first, max=self.pace.longest)(state)


def with_its_age(message: Message, letters: Sequence[Letter]) -> Message:
    """A message that is said late says when it was sent, and one that may have been said before says that."""
    said = []
    if letters[0].again:
        said.append("(sent again: the last try may have been heard)")
    if (at := letters[0].at) and datetime.now(UTC) - at > timedelta(minutes=1):
        said.append(f"(of {at:%Y-%m-%d %H:%M:%S} UTC)")
    # In front: a platform's limit cuts at the end.
    return message.model_copy(update={"content": "\n".join(filter(None, (*said, message.content)))}) if said else message


# ---- the process


BEAT = 5.0
"""Seconds between two heartbeats."""
LOOK = 1.0
"""Seconds between two looks at the files that Kafka did not take."""


class Notifier:
    """Kafka on the one side, the robots on the other."""

    def __init__(self, settings: Settings, robots: Mapping[str, Robot], pace: Pace) -> None:
        self.settings, self.pace = settings, pace
        self.hidden = sorted({*notify.secrets(settings), *of_robots(robots.values())}, key=len, reverse=True)
        self.sent = Sent(settings, self.hidden)
        self.trusted = ssl.create_default_context(cafile=settings.notify_ca)
        self.targets = {
            name: Target(robot, pace, self.trusted, self.sent, self.done, self.bury, self.hidden)
            for name, robot in robots.items()
        }
        self.member = Member(
            settings, GROUP, [NOTIFY.name], most=1_000_000, assigned=self.assigned, revoked=self.revoked
        )  # a robot's queue has a limit of its own, and no robot's shall hold up another's
        self.spooled: set[Path] = set()
        self.unburied: deque[tuple[Record | None, Path | None, Message | None, str, datetime | None]] = deque()
        self.early: deque[Record] = deque()
        self.beat_due = self.look_due = 0.0
        self.started = False  # whether it has the partition, and knows what was said before

    def run(self, stopped: Callable[[], bool]) -> None:
        """Work until told to stop. Raises `LeaseHeld`, `TopicMissing`, `BrokerRefused`."""
        way = "End it where it was started, or with `tidemark down`, then start again"
        with Lease(self.settings.state / "notify" / "lease", way):
            log.info("the notifier runs", robots=", ".join(self.targets) or "none", group=GROUP)
            while not stopped() and not self.answers():
                self.beside()
            if not stopped():
                kafka.topic_ids(self.settings, [topic.name for topic in notify.TOPICS])
                with self.member:
                    while not stopped():
                        if (record := self.member.take(0.2)) is not None:
                            self.receive(record)
                        self.beside()
                    self.finish()
            else:
                self.finish()
            self.beat("stopped")
        log.info("the notifier has ended")

    def answers(self) -> bool:
        """Whether Kafka does. Until then, what waits in files is said without it."""
        try:
            kafka.wait(self.settings, notify.PATIENCE)
        except kafka.BrokerAway:
            return False
        return True

    def beside(self) -> None:
        """What is due beside the records."""
        for target in self.targets.values():
            if target.broken:
                raise RuntimeError(f"the thread of robot {target.robot.platform} ended") from target.broken
        now = time.monotonic()
        if now >= self.look_due:
            self.relay()
            self.lay()
            if self.member.shares and not self.started:
                self.begin()
            if self.sent.owed:
                self.sent.flush()
            self.look_due = time.monotonic() + LOOK  # whatever it took, records have their turn
        if now >= self.beat_due:
            self.beat_due = now + BEAT
            self.beat("running" if self.started else "waiting")

    def assigned(self, shares: list[Share]) -> None:
        """This notifier speaks from now on. What the last one said it must know first, the minute's messages too."""
        self.started = False
        self.begin()

    def begin(self) -> None:
        """Where Kafka goes away in that moment, it is tried again; what it has given waits for it."""
        try:
            self.sent.catch_up()
        except (kafka.BrokerAway, kafka.KafkaException) as error:
            log.warning("what was said before cannot be read yet", because=" ".join(str(error).split()))
            return
        for target in self.targets.values():
            target.start()
        self.started = True
        while self.early:
            self.receive(self.early.popleft())

    def revoked(self, shares: list[Share]) -> None:
        self.started = False
        self.early.clear()
        for target in self.targets.values():
            target.let_go()
        for _ in range(len(self.unburied)):  # what came from Kafka comes again, here or elsewhere
            if (one := self.unburied.popleft())[0] is None:
                self.unburied.append(one)

    def receive(self, record: Record) -> None:
        if not self.started:
            self.early.append(record)
            return
        try:
            message = Message.model_validate_json(record.value or b"")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            because = f"not a message: {where + ': ' if where else ''}{first['msg']}"
            self.unburied.append((record, None, None, because, sent_at(record)))
            return
        self.queue(Letter(message, record=record))

    def queue(self, letter: Letter) -> None:
        state = self.sent.state(letter.message)
        if state == "said":
            named = notify.masked(letter.message.id, self.hidden)
            log.info("said before, and not again", platform=letter.message.platform, id=named)
            self.done([letter])
            return
        target = self.targets.get(letter.message.platform)
        if target is None:
            named = ", ".join(self.targets) or "none"
            self.bury([letter], f"there is no robot for platform {letter.message.platform[:100]!r}; there are: {named}")
            return
        if not target.put(replace(letter, again=state == "saying")):
            self.bury([letter], f"more than {HELD:,} bytes of messages waited for this robot")

    def done(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self.done_with(letter.record, letter.path)

    def done_with(self, record: Record | None, path: Path | None) -> None:
        if record:
            self.member.done(record)
        if path:
            path.unlink(missing_ok=True)
            self.spooled.discard(path)

    def bury(self, letters: Sequence[Letter], because: str) -> None:
        """Have letters laid into the dead-letter topic, soon; until they lie there, they stay where they were."""
        self.unburied.extend((letter.record, letter.path, letter.message, because, letter.at) for letter in letters)

    def lay(self) -> None:
        """Lay down what is to be buried, for a moment, and be done with it. What Kafka does not take is the last next time."""
        until = time.monotonic() + LOOK
        while self.unburied and time.monotonic() < until:
            record, path, message, because, sent = one = self.unburied.popleft()
            if not self.bury_record(record, message, because, sent):
                self.unburied.append(one)
                return
            self.done_with(record, path)

    def bury_record(self, record: Record | None, message: Message | None, because: str, sent: datetime | None = None) -> bool:
        """One dead letter: the bytes as they came but for our own secrets, and why, where from, when, and when sent beside."""
        value = record.value if record and record.value is not None else message.model_dump_json().encode() if message else b""
        for secret in self.hidden:
            value = value.replace(secret.encode(), notify.MASK.encode())
        named = [message.platform, message.id] if message else [NOTIFY.name]
        named += [str(record.partition), str(record.offset)] if record else []  # buried again, it comes of another record
        whole = apart("/".join(named), self.hidden)  # of one key the topic keeps the last letter alone
        because = notify.masked(because, self.hidden)
        headers = {"because": because, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        headers |= {"from": f"{record.topic}/{record.partition}/{record.offset}"} if record else {}
        headers |= {"kept": sent.isoformat()} if sent else {}
        event = Event(value, key=whole, headers={n: v.encode() for n, v in headers.items()})
        try:
            done = kafka.produce(self.settings, DEAD_LETTERS, [event], patience=notify.PATIENCE, options=AS_LARGE)
            wrong = "; ".join(done.errors)
        except Exception as error:
            wrong = type(error).__name__
        if wrong:
            log.error("a message cannot be laid into the dead letters yet", id=whole, because=because, wrong=wrong)
            return False
        log.error("a message went to the dead letters", id=whole, because=because)
        if message and message.platform in self.targets:
            self.targets[message.platform].count.buried += 1
        return True

    def relay(self) -> None:
        """Put into the topic what waits in files; while Kafka is away, have it said without."""
        there = True
        for path in sorted(set(notify.unsent(self.settings).glob("*.json")) - self.spooled):
            try:
                message = Message.model_validate_json(path.read_bytes())
                kept = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            except FileNotFoundError:
                continue
            except ValidationError:
                path.replace(path.with_suffix(".wrong"))
                log.error("a file that holds no message is left aside", path=str(path.with_suffix(".wrong")))
                continue
            if there and (there := self.put(message, kept)):
                path.unlink(missing_ok=True)
                continue
            self.spooled.add(path)
            for target in self.targets.values():
                if not target.thread.is_alive():
                    target.start()
            self.queue(Letter(message, path=path, kept=kept))

    def put(self, message: Message, kept: datetime) -> bool:
        try:
            event = Event(message.model_dump_json().encode(), headers={"kept": kept.isoformat()})
            return kafka.produce(self.settings, NOTIFY, [event], patience=notify.PATIENCE, options=notify.AT_ONCE).complete
        except Exception:
            return False

    def finish(self) -> None:
        """Have what waits said, as far as a minute and `closing` seconds allow. The rest stays in Kafka and comes again."""
        for target in self.targets.values():
            target.finish()
        deadline = time.monotonic() + self.pace.closing
        for target in self.targets.values():
            if target.thread.is_alive():
                target.thread.join(max(0.0, deadline - time.monotonic()))
        self.lay()
        self.sent.flush()

    def beat(self, state: str) -> None:
        """Say how it goes, for `tidemark status` and whoever watches the process."""
        said: dict[str, Any] = {"state": state, "pid": os.getpid(), "at": datetime.now(UTC).isoformat(), "robots": {}}
        for name, target in self.targets.items():
            counts = {"waiting": len(target.waiting) + len(target.busy), "said": target.count.said, "dead": target.count.buried}
            said["robots"][name] = counts | {"trouble": target.count.trouble}
        with suppress(OSError):  # a full disk ends no notifier
            lake.whole_or_nothing(self.settings.state / "notify" / "heartbeat.json", json.dumps(said))


def of_robots(robots: Iterable[Robot]) -> Iterable[str]:
    """Every part of the robots' addresses and secrets that must be shown nowhere."""
    for robot in robots:
        for secret in filter(None, (robot.webhook, robot.secret)):
            yield from filter(None, notify.parts(secret.get_secret_value()))


def run(settings: Settings, robots: Mapping[str, Robot], stopped: Callable[[], bool], pace_: Pace | None = None) -> None:
    """The notifier, until `stopped` says so. Raises `LeaseHeld`, `TopicMissing`, `BrokerRefused`."""
    Notifier(settings, robots, pace_ or pace(settings)).run(stopped)


# ---- dead letters


@dataclass(frozen=True)
class DeadLetter:
    """A message that was not said, and why. `key` names it: platform, id, and the partition and offset where it lay.

    `at` is when it was laid down, `kept` when it was sent first.
    """

    key: str
    because: str
    at: str
    origin: str
    value: bytes
    kept: str = ""


def dead_letters(settings: Settings) -> list[DeadLetter]:
    """Those that nobody has seen to, oldest first. Raises as `kafka.consume`."""
    found: dict[str, DeadLetter] = {}
    for record in kafka.consume(settings, DEAD_LETTERS.name, "earliest"):
        key = (record.key or b"").decode("utf-8", "replace")
        found.pop(key, None)
        if record.value is not None:
            said = {name: (value or b"").decode("utf-8", "replace") for name, value in record.headers}
            because, at, origin, kept = (said.get(name, "") for name in ("because", "at", "from", "kept"))
            found[key] = DeadLetter(key, because, at, origin, record.value, kept)
    return list(found.values())


def replay(settings: Settings, letters: Sequence[DeadLetter]) -> int:
    """Put dead letters into the topic again, each as it was, and take them out here. Returns how many.

    Ctrl-C ends it with the letter it is at, a second one at once. Cut off in between, one may come twice; its id is the same, and
    it is said once. Raises `ConnectionError`, `TopicMissing`.
    """

    def again(letter: DeadLetter) -> Event:
        return Event(letter.value, headers={"kept": letter.kept} if letter.kept else {})

    return written(settings, letters, lambda letter: [(NOTIFY, again(letter)), (DEAD_LETTERS, taken_out(letter))])


def drop(settings: Settings, letters: Sequence[DeadLetter]) -> int:
    """Take dead letters out without saying them. Returns how many. Raises `ConnectionError`, `TopicMissing`."""
    return written(settings, letters, lambda letter: [(DEAD_LETTERS, taken_out(letter))])


def taken_out(letter: DeadLetter) -> Event:
    return Event(None, key=letter.key)


def written(
    settings: Settings, letters: Sequence[DeadLetter], events: Callable[[DeadLetter], Sequence[tuple[Any, Event]]]
) -> int:
    """Send each letter's events, in order, up to the letter at which Ctrl-C comes. Returns how many letters."""
    with kafka.noted_interrupts() as pressed:
        for letter in letters:
            for topic, event in events(letter):
                write(settings, topic, event, pressed)
            if pressed():
                raise KeyboardInterrupt
    return len(letters)


def write(settings: Settings, topic: Any, event: Event, pressed: Callable[[], int]) -> None:
    """Send one event; the first Ctrl-C is left to who writes."""

    def given_up() -> int:
        return pressed() if pressed() > 1 else 0

    delivery = kafka.produce(settings, topic, [event], options=AS_LARGE, patience=30, interrupts=given_up)
    if delivery.interrupted:
        raise KeyboardInterrupt
    if delivery.delivered != 1:
        raise kafka.BrokerAway(f"topic {topic.name} did not take it: {'; '.join(delivery.errors)}")
