"""DingTalk's and WeCom's robots on loopback, by https: what each takes and refuses, and every way in which one may misbehave."""

from __future__ import annotations

import base64
import hmac
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trustme

TOKENS = {"dingtalk": "d1ng-t0ken-4f", "wecom": "wec0m-key-9c"}
SECRET = "SECd1ng-s3cret-77"
"""What signs the messages of a DingTalk robot that asks for it."""
Trick = Callable[["Talk"], None]


@dataclass(frozen=True)
class Heard:
    """A message that a robot has said to its group."""

    platform: str
    body: dict[str, Any]
    at: float

    @property
    def text(self) -> str:
        """What people read, whatever its kind."""
        one = self.body[self.body["msgtype"]]
        return one.get("content") or one.get("text") or one["articles"][0]["title"]


class Platforms:
    """Both platforms on one port. `rate` messages a `minute` are taken; `tricks` of a platform come first, one a try.

    `signed` and `keyword` are what DingTalk's robot asks for. `heard` is what was said, `tries` when each try came, by platform.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        authority, self.ca = trustme.CA(), folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self.server = Server(self)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.heard: list[Heard] = []
        self.tries: dict[str, list[float]] = {"dingtalk": [], "wecom": []}
        self.tricks: dict[str, deque[Trick]] = {"dingtalk": deque(), "wecom": deque()}
        self.rate, self.minute = 20, 60.0
        self.signed, self.keyword = False, ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Platforms:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def webhook(self, platform: str) -> str:
        path = {"dingtalk": "/robot/send?access_token=", "wecom": "/cgi-bin/webhook/send?key="}[platform]
        return f"https://{self.host}{path}{TOKENS[platform]}"

    def texts(self, platform: str) -> list[str]:
        return [heard.text for heard in self.heard if heard.platform == platform]

    def until(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {seconds} seconds; heard: {[h.text for h in self.heard]}"
            time.sleep(0.01)
        return found

    def said(self, platform: str, query: dict[str, list[str]], kind: str, raw: bytes) -> dict[str, Any]:
        """What the platform answers, always in a 200."""
        now = time.time()
        recent = [one.at for one in self.heard if one.platform == platform and now - one.at < self.minute]
        refuse = ding_refuses if platform == "dingtalk" else wecom_refuses
        try:
            body = json.loads(raw)
        except ValueError:
            return {"errcode": 40035, "errmsg": "invalid json"}
        if refused := refuse(self, query, kind, body, raw, now):
            return {"errcode": refused[0], "errmsg": refused[1]}
        if len(recent) >= self.rate:
            code = 130101 if platform == "dingtalk" else 45009
            return {"errcode": code, "errmsg": f"send too fast, exceed {self.rate} times per minute"}
        self.heard.append(Heard(platform, body, now))
        return {"errcode": 0, "errmsg": "ok"}


def ding_refuses(
    world: Platforms, query: dict[str, list[str]], kind: str, body: dict[str, Any], raw: bytes, now: float
) -> tuple[int, str] | None:
    if query.get("access_token") != [TOKENS["dingtalk"]]:
        return 300001, "token is not exist"
    if not kind.startswith("application/json"):
        return 43004, "invalid content-type"
    if world.signed:
        stamp = query.get("timestamp", ["0"])[0]
        wanted = base64.b64encode(hmac.digest(SECRET.encode(), f"{stamp}\n{SECRET}".encode(), "sha256")).decode()
        if abs(now * 1000 - int(stamp)) > 3_600_000:
            return 310000, "invalid timestamp"
        if query.get("sign") != [wanted]:
            return 310000, "sign not match"
    needs = {"text": ["content"], "link": ["title", "text", "messageUrl"], "markdown": ["title", "text"]}
    if body.get("msgtype") not in needs:
        return 400105, "unsupported msgtype"
    one = body[body["msgtype"]]
    if missing := [name for name in needs[body["msgtype"]] if not one.get(name)]:
        return 40035, f"param error: {missing[0]}"
    if world.keyword and not any(world.keyword in str(value) for value in one.values()):
        return 310000, "keywords not in content"
    return (460101, "message too long, exceed 20000 bytes") if len(raw) > 20_000 else None


def wecom_refuses(
    world: Platforms, query: dict[str, list[str]], kind: str, body: dict[str, Any], raw: bytes, now: float
) -> tuple[int, str] | None:
    if query.get("key") != [TOKENS["wecom"]]:
        return 93000, "invalid webhook url"
    if body.get("msgtype") not in ("text", "markdown", "news"):
        return 40008, "invalid message type"
    one = body[body["msgtype"]]
    if body["msgtype"] == "news":
        article = one["articles"][0]
        return None if article.get("title") and article.get("url") else (40058, "invalid article")
    most = {"text": 2048, "markdown": 4096}[body["msgtype"]]
    if not one.get("content"):
        return 44004, "empty content"
    return (40058, f"content exceed max length {most}") if len(one["content"].encode()) > most else None


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, world: Platforms) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.world = world

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests are about."""


class Talk(BaseHTTPRequestHandler):
    """One try of a client."""

    server: Server

    def do_POST(self) -> None:
        world = self.server.world
        self.platform = "dingtalk" if urlsplit(self.path).path == "/robot/send" else "wecom"
        self.raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        world.tries[self.platform].append(time.time())
        trick = world.tricks[self.platform].popleft() if world.tricks[self.platform] else fine
        trick(self)

    def judged(self) -> dict[str, Any]:
        """What the platform thinks of the message; heard, if it takes it."""
        query, kind = parse_qs(urlsplit(self.path).query), self.headers.get("Content-Type", "")
        return self.server.world.said(self.platform, query, kind, self.raw)

    def answer(self, status: int, said: Any, **headers: str) -> None:
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


# ---- misbehaviour: each is one try


def fine(talk: Talk) -> None:
    """Behaves."""
    talk.answer(200, talk.judged())


def heard_then(act: Callable[[], None]) -> Trick:
    """Says the message to its group, and then something happens instead of an answer."""

    def trick(talk: Talk) -> None:
        talk.judged()
        act()
        talk.close_connection = True

    return trick


def status(code: int, **headers: str) -> Trick:
    return lambda talk: talk.answer(code, b"<html>502 Bad Gateway</html>", **headers)


def errcode(code: Any, words: str = "") -> Trick:
    return lambda talk: talk.answer(200, {"errcode": code, "errmsg": words})


def garbage(said: bytes) -> Trick:
    return lambda talk: talk.answer(200, said)


def drops(talk: Talk) -> None:
    """Closes without a word."""
    talk.close_connection = True


def half(talk: Talk) -> None:
    """Promises more than it sends, and closes."""
    talk.send_response(200)
    talk.send_header("Content-Length", "1000")
    talk.end_headers()
    talk.wfile.write(b'{"errcode"')
    talk.close_connection = True


def silent(talk: Talk) -> None:
    """Never answers."""
    talk.server.world.ended.wait(30)
    talk.close_connection = True


def drips(talk: Talk) -> None:
    """Sends a byte now and then, so that no limit of a single read is ever reached."""
    talk.send_response(200)
    talk.end_headers()
    while not talk.server.world.ended.wait(0.05):
        talk.wfile.write(b" ")


def endless(talk: Talk) -> None:
    """Sends as fast as it is read, without an end."""
    talk.send_response(200)
    talk.end_headers()
    while not talk.server.world.ended.is_set():
        talk.wfile.write(b" " * 65536)
