"""The notifier's robots against a server that behaves as each platform does, and as each should not."""

from __future__ import annotations

import json
import logging
import os
import signal
import ssl
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import platforms
import pytest
from platforms import SECRET, TOKENS, Platforms, Trick, errcode, garbage, status
from pydantic import SecretStr, ValidationError
from structlog.testing import capture_logs

from tidemark import airflow, kafka, notifier, notify
from tidemark.notifier import Letter, Pace, Robot, RobotWrong, Sent, Target
from tidemark.notify import Message
from tidemark.settings import Settings

QUICK = Pace(patience=60, first=0.01, longest=0.02, connect=60, answer=60, closing=5.0)
"""Short pauses between tries. Its limits are for what never comes: a busy machine answers late, and that is no trouble."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Platforms]:
    with Platforms(tmp_path / "platforms") as there:
        yield there


class Post:
    """Targets without Kafka: their letters came from files. `said` and `buried` are what became of each, by id."""

    def __init__(self, world: Platforms, settings: Settings) -> None:
        self.world, self.sent = world, Sent(settings)
        self.said: list[str] = []
        self.buried: dict[str, str] = {}
        self.targets: dict[str, Target] = {}
        self.hidden = [*TOKENS.values(), SECRET]

    def target(self, platform: str, pace: Pace = QUICK, secret: str | None = None, keyword: str = "") -> Target:
        robot = Robot(platform, SecretStr(self.world.webhook(platform)), SecretStr(secret) if secret else None, keyword)
        trusted = ssl.create_default_context(cafile=self.world.ca)
        made = Target(robot, pace, trusted, self.sent, self.done, self.bury, self.hidden)
        self.targets[platform] = made
        made.start()
        return made

    def send(self, *messages: Message) -> None:
        for message in messages:
            assert self.targets[message.platform].put(Letter(message, path=Path("kept")))

    def done(self, letters: Any) -> None:
        self.said += [letter.message.id for letter in letters]

    def bury(self, letters: Any, because: str) -> None:
        self.buried |= {letter.message.id: because for letter in letters}

    def settled(self, *ids: str) -> None:
        """Wait until each was said or buried."""
        self.world.until(lambda: {*self.said, *self.buried} >= {*ids})


@pytest.fixture
def post(world: Platforms, settings: Settings) -> Iterator[Post]:
    made = Post(world, settings)
    yield made
    for target in made.targets.values():
        target.finish()
        target.thread.join(60)
        assert not target.thread.is_alive() and target.broken is None


def message(one: str, platform: str = "dingtalk", **words: Any) -> Message:
    return Message(id=one, platform=platform, **{"title": "Late", "content": "12 records"} | words)


# --------------------------------------------------------------------------------------------- what each platform takes

CARD = {"kind": "link", "link": "https://example.org/r", "picture": "https://example.org/p.png"}
NOBODY = {"atMobiles": [], "atUserIds": [], "isAtAll": False}
SHAPES = {
    ("dingtalk", "text"): {"msgtype": "text", "text": {"content": "Late\n12 records"}, "at": NOBODY},
    ("dingtalk", "link"): {
        "msgtype": "link",
        "link": {"title": "Late", "text": "12 records", "picUrl": CARD["picture"], "messageUrl": CARD["link"]},
    },
    ("dingtalk", "markdown"): {
        "msgtype": "markdown",
        "markdown": {"title": "Late", "text": "### Late\n\n12 records"},
        "at": NOBODY,
    },
    ("wecom", "text"): {
        "msgtype": "text",
        "text": {"content": "Late\n12 records", "mentioned_list": [], "mentioned_mobile_list": []},
    },
    ("wecom", "link"): {
        "msgtype": "news",
        "news": {"articles": [{"title": "Late", "description": "12 records", "url": CARD["link"], "picurl": CARD["picture"]}]},
    },
    ("wecom", "markdown"): {"msgtype": "markdown", "markdown": {"content": "### Late\n\n12 records"}},
}


@pytest.mark.parametrize(("platform", "kind"), SHAPES)
def test_kind_is_said_as_its_platform_takes_it(platform: str, kind: str, world: Platforms, post: Post) -> None:
    post.target(platform)
    post.send(message("m1", platform, **(CARD if kind == "link" else {"kind": kind})))
    post.settled("m1")
    assert (post.said, post.buried) == (["m1"], {})
    assert [heard.body for heard in world.heard] == [SHAPES[platform, kind]]


@pytest.mark.parametrize("platform", ["dingtalk", "wecom"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("#1 in line", "### Late\n\n#1 in line"),
        ("# Late\n12 records", "# Late\n12 records"),
        ("#### Late @ann\n12 records", "#### Late @ann\n12 records"),
        ("(of 2026-11-19 12:00:05 UTC)\n# Late\n12 records", "(of 2026-11-19 12:00:05 UTC)\n# Late\n12 records"),
        ("# Orders\n12 records", "### Late\n\n# Orders\n12 records"),
    ],
    ids=["no heading", "its own", "more than its own", "its own, late", "another"],
)
def test_title_is_the_heading_of_markdown_unless_a_heading_has_it(platform: str, content: str, text: str) -> None:
    robot = Robot(platform, SecretStr("https://h"))
    assert text in notifier.body(robot, message("m1", platform, kind="markdown", content=content))["markdown"].values()


CALLED = {"mention": ("all", "13800001111", "+49-151-1234567", "zhang.san")}


@pytest.mark.parametrize(
    ("platform", "kind", "calls"),
    [
        ("dingtalk", "text", {"atMobiles": ["13800001111", "+49-151-1234567"], "atUserIds": ["zhang.san"], "isAtAll": True}),
        ("dingtalk", "markdown", "@13800001111 @+49-151-1234567 @zhang.san"),
        ("dingtalk", "link", "@13800001111 @+49-151-1234567 @zhang.san"),
        ("wecom", "text", (["zhang.san", "@all"], ["13800001111", "+49-151-1234567"])),
        ("wecom", "markdown", "<@zhang.san> @13800001111 @+49-151-1234567 @all"),
        ("wecom", "link", "<@zhang.san> @13800001111 @+49-151-1234567 @all"),
    ],
)
def test_who_is_mentioned_is_called(platform: str, kind: str, calls: Any, world: Platforms, post: Post) -> None:
    post.target(platform)
    post.send(message("m1", platform, **{**CARD, "kind": kind}, **CALLED))
    post.settled("m1")
    body = world.heard[0].body
    if platform == "dingtalk":  # a card calls nobody, so it is markdown here
        assert body["at"] == {"atMobiles": ["13800001111", "+49-151-1234567"], "atUserIds": ["zhang.san"], "isAtAll": True}
    if isinstance(calls, str):
        assert body["msgtype"] == "markdown" and calls in world.heard[0].text
    elif isinstance(calls, tuple):
        assert (body["text"]["mentioned_list"], body["text"]["mentioned_mobile_list"]) == calls


@pytest.mark.parametrize("kind", ["text", "link", "markdown"])
@pytest.mark.parametrize("secret", [SECRET, "another"])
def test_signature_is_the_one_that_dingtalk_computes(kind: str, secret: str, world: Platforms, post: Post) -> None:
    world.signed = True
    post.target("dingtalk", secret=secret)
    post.send(message("m1", **{**CARD, "kind": kind}))
    post.settled("m1")
    assert post.buried == ({} if secret == SECRET else {"m1": "errcode 310000: sign not match"})


def test_signature_of_a_known_instant() -> None:
    robot = Robot("dingtalk", SecretStr("https://h/robot/send?access_token=t"), SecretStr("this is secret"))
    assert notifier.address(robot, 1577262236.757) == (  # computed with openssl dgst -sha256 -hmac
        "https://h/robot/send?access_token=t&timestamp=1577262236757&sign=hmPWwU%2B7lVdm3ZZz0r9tSfx0L4Q26jWOZr9%2BGs6EZQM%3D"
    )


@pytest.mark.parametrize("kind", ["text", "link", "markdown"])
@pytest.mark.parametrize("content", ["12 records", "12 records on tidemark's stream"])
def test_keyword_is_there_once(kind: str, content: str, world: Platforms, post: Post) -> None:
    world.keyword = "tidemark"
    post.target("dingtalk", keyword="tidemark")
    post.send(message("m1", **{**CARD, "kind": kind}, content=content))
    post.settled("m1")
    assert post.buried == {}
    assert json.dumps(world.heard[0].body).count("tidemark") == 1


@pytest.mark.parametrize("kind", ["text", "link", "markdown"])
@pytest.mark.parametrize("title", ["Late", "x" * 300 + " tidemark"])
def test_keyword_that_is_cut_off_is_put_behind(kind: str, title: str, world: Platforms, post: Post) -> None:
    world.keyword = "tidemark"
    post.target("dingtalk", keyword="tidemark")
    post.send(message("m1", **{**CARD, "kind": kind}, title=title, content="x" * 10_000 + " tidemark"))
    post.settled("m1")
    assert post.buried == {}
    assert json.dumps(world.heard[0].body).count("tidemark") == 1


def test_keyword_that_nobody_told_us_is_a_dead_letter_that_says_so(world: Platforms, post: Post) -> None:
    world.keyword = "tidemark"
    post.target("dingtalk")
    post.send(message("m1"))
    post.settled("m1")
    assert post.buried == {"m1": "errcode 310000: keywords not in content"}
    assert len(world.tries["dingtalk"]) == QUICK.tries


@pytest.mark.parametrize(("platform", "kind"), SHAPES)
@pytest.mark.parametrize("letter", ["x", "“", "出", '"'])
def test_content_longer_than_the_platform_takes_is_cut_between_letters(
    platform: str, kind: str, letter: str, world: Platforms, post: Post
) -> None:
    post.target(platform, keyword="KEY")
    post.send(message("m1", platform, **{**CARD, "kind": kind}, content=letter * 30_000, title=letter * 300))
    post.settled("m1")
    assert post.buried == {}
    assert "KEY" in json.dumps(world.heard[0].body) and "…" in json.dumps(world.heard[0].body, ensure_ascii=False)


@pytest.mark.parametrize(("platform", "most"), [("dingtalk", notifier.DING_MOST), ("wecom", 4096)])
@pytest.mark.parametrize(
    "words", [CARD | {"kind": "markdown"}, CARD | {"mention": ("erin",)}], ids=["markdown", "card that calls"]
)
def test_markdown_that_is_cut_keeps_picture_link_and_names(platform: str, most: int, words: dict[str, Any]) -> None:
    robot = Robot(platform, SecretStr("https://example.org/hook"))
    said = notifier.body(robot, message("m1", platform, **words, content="出" * 5_000))["markdown"]
    text = said["text" if platform == "dingtalk" else "content"]
    assert f"…\n\n![]({CARD['picture']})\n\n[Late]({CARD['link']})" in text
    assert len(text.encode()) <= most and ("erin" in text) == ("mention" in words)


@pytest.mark.parametrize(("platform", "most"), [("dingtalk", notifier.DING_MOST), ("wecom", 2048)])
def test_link_that_a_text_has_no_room_for_is_left_out(platform: str, most: int) -> None:
    robot = Robot(platform, SecretStr("https://example.org/hook"))
    said = notifier.body(robot, message("m1", platform, kind="text", link="https://example.org/" + "x" * most))
    assert said["text"]["content"] == "Late\n12 records"


@pytest.mark.parametrize(
    ("words", "because"),
    [
        ({"kind": "feedCard"}, "dingtalk has no kind feedCard; it has text, link, markdown"),
        ({"kind": "link"}, "a message of kind link has no link"),
        ({"title": "", "content": ""}, "it says nothing: title and content are empty"),
    ],
)
def test_message_that_cannot_be_said_is_a_dead_letter_without_a_try(
    words: dict[str, Any], because: str, world: Platforms, post: Post
) -> None:
    post.target("dingtalk")
    post.send(message("m1", **words))
    post.settled("m1")
    assert (post.buried, world.tries["dingtalk"]) == ({"m1": because}, [])


@pytest.mark.parametrize(
    "wrong",
    [
        b"no json",
        b"[]",
        b'{"platform": "dingtalk"}',
        b'{"id": "", "platform": "dingtalk"}',
        b'{"id": 7, "platform": "dingtalk"}',
        b'{"id": "1", "platform": "dingtalk", "mention": "all"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda wrong: repr(wrong[:40]),
)
def test_what_is_no_message_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValidationError):
        Message.model_validate_json(wrong)


# ------------------------------------------------------------------------------------------------------- misbehaviour

HTML = garbage(b"<html>hello</html>")
PASSES: dict[str, Trick] = {
    "500": status(500),
    "503 with Retry-After": status(503, Retry_After="0"),
    "429": status(429),
    "429 with a date": status(429, Retry_After=format_datetime(datetime(2020, 1, 1, tzinfo=UTC), usegmt=True)),
    "408": status(408),
    "no robot's answer": HTML,
    "an empty answer": garbage(b""),
    "a list": garbage(b"[]"),
    "a bare number": garbage(b"0"),
    "errcode as a text": errcode("0"),
    "errcode as true": errcode(False),
    "no errcode": garbage(b'{"errmsg": "ok"}'),
    "deep": garbage(b"[" * 60_000),
    "busy": errcode(-1, "system busy"),
    "unknown errcode": errcode(99_999),
    "drops": platforms.drops,
    "half an answer": platforms.half,
    "silent": platforms.silent,
    "drips": platforms.drips,
    "endless": platforms.endless,
}


NEVER = {"silent", "drips"}
"""What only the limit of a try ends, so that it has to be short."""


@pytest.mark.parametrize("trick", PASSES)
@pytest.mark.parametrize("platform", ["dingtalk", "wecom"])
def test_trouble_that_passes_costs_a_second_try(platform: str, trick: str, world: Platforms, post: Post) -> None:
    def first(talk: platforms.Talk) -> None:
        target.pace = QUICK  # the try under way keeps its half second, the second has time
        PASSES[trick](talk)

    world.tricks[platform].append(first)
    target = post.target(platform, replace(QUICK, answer=0.5) if trick in NEVER else QUICK)
    post.send(message("m1", platform))
    post.settled("m1")
    assert (post.said, post.buried, len(world.heard), len(world.tries[platform])) == (["m1"], {}, 1, 2)


@pytest.mark.parametrize(
    ("trick", "because"),
    [
        ("500", "HTTP 500"),
        ("429", "HTTP 429"),
        ("no robot's answer", "an answer that no robot gives"),
        ("busy", "errcode -1: system busy"),
        ("drops", "no connection, or it broke"),
        ("silent", "no answer within 0.5 seconds"),
        ("drips", "no answer within 0.5 seconds"),
    ],
)
def test_trouble_that_stays_is_a_dead_letter_after_the_patience(trick: str, because: str, world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].extend([PASSES[trick]] * 1000)
    answer = 0.5 if trick in NEVER else QUICK.answer
    post.target("dingtalk", replace(QUICK, patience=0.5, answer=answer, rate=1000))  # twenty tries fit into half a second here
    began = time.monotonic()
    post.send(message("m1"))
    post.settled("m1")
    assert post.buried["m1"].startswith(because)
    assert time.monotonic() - began < 15
    assert world.heard == []
    assert post.sent.state(message("m1")) == "refused"  # so that a replay does not say that it may have been heard


@pytest.mark.parametrize(
    ("trick", "because"),
    [
        (errcode(300001, "token is not exist"), "errcode 300001: token is not exist"),
        (errcode(40035, "a\n b"), "errcode 40035: a b"),
        (status(404), "HTTP 404"),
        (status(302, Location="https://elsewhere.example/"), "HTTP 302, a redirect, which is not followed"),
    ],
)
def test_refusal_is_a_dead_letter_after_three_tries(trick: Trick, because: str, world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].extend([trick] * 10)
    post.target("dingtalk")
    post.send(message("m1"), message("m2"))
    post.settled("m1", "m2")
    assert post.buried == {"m1": because, "m2": because}
    assert len(world.tries["dingtalk"]) == 2 * QUICK.tries


def test_redirect_is_not_followed_anywhere(world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].extend([status(307, Location=world.webhook("wecom"))] * 3)
    post.target("dingtalk")
    post.send(message("m1"))
    post.settled("m1")
    assert "redirect" in post.buried["m1"] and world.tries["wecom"] == []


def test_nobody_listening_is_waited_for(world: Platforms, settings: Settings, port: int) -> None:
    answer = notifier.say(
        Robot("wecom", SecretStr(f"https://127.0.0.1:{port}/cgi-bin/webhook/send?key=k")),
        message("m1", "wecom"),
        QUICK,
        ssl.create_default_context(),
    )
    assert (answer.outcome, answer.because) == ("later", "no connection, or it broke (ConnectError)")


def test_certificate_that_nobody_vouches_for_is_not_taken(world: Platforms) -> None:
    robot = Robot("wecom", SecretStr(world.webhook("wecom")))
    answer = notifier.say(robot, message("m1", "wecom"), QUICK, ssl.create_default_context())
    assert (answer.outcome, world.tries["wecom"]) == ("later", [])


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(None, 0), ("7", 7), (" 7 ", 7), ("soon", 0), ("-7", 0), ("", 0), ("²", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after_in_either_form(said: str | None, seconds: float) -> None:
    assert notifier.seconds_of(said) == seconds


def test_retry_after_as_a_date_to_come() -> None:
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 95 < notifier.seconds_of(at) <= 100


def test_retry_after_is_waited_for(world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].append(status(429, Retry_After="1"))
    post.target("dingtalk", QUICK)
    post.send(message("m1"))
    post.settled("m1")
    first, second = world.tries["dingtalk"]
    assert second - first >= 1


# ------------------------------------------------------------------------------------------ how fast, and one by one


def test_more_than_a_minute_takes_goes_into_digests_that_name_everything(world: Platforms, post: Post) -> None:
    world.rate, world.minute = 5, 5.5
    post.target("dingtalk", Pace(rate=5, minute=6))
    ids = [f"m{n:03}" for n in range(100)]
    post.send(*(message(one, title=f"title {one}", content="") for one in ids))
    post.settled(*ids)
    assert (sorted(post.said), post.buried) == (ids, {})
    assert len(world.heard) == len(world.tries["dingtalk"]) <= 15  # the platform refused none
    read = [line for text in world.texts("dingtalk") for line in text.splitlines() if line.startswith("title")]
    assert read == [f"title {one}" for one in ids]
    digests = [text for text in world.texts("dingtalk") if "messages in one: more came than a robot may say" in text]
    assert len(digests) >= 1
    window = [sum(0 <= b - a < 5.5 for b in world.tries["dingtalk"]) for a in world.tries["dingtalk"]]
    assert max(window) <= 5


def test_digest_counts_equal_titles_and_calls_whom_its_messages_call() -> None:
    many = [message(f"m{n}", title="Late" if n % 3 else "Down", mention=("ann",) if n < 2 else ("bob", "ann")) for n in range(9)]
    one = notifier.digest([*many, message("m9", title="", content="first line\nsecond")])
    assert one.title.startswith("10 messages in one")
    assert one.content.splitlines() == ["Down ×3", "Late ×6", "first line"]
    assert one.mention == ("ann", "bob")


@pytest.mark.parametrize("nothing", ["", "\n", " \n "])
def test_digest_names_a_message_that_says_nothing(nothing: str) -> None:
    one = notifier.digest([message("m1", title="", content=nothing), message("m2", title="", content="\nsecond line")])
    assert one.content.splitlines() == ["m1", "second line"]


@pytest.mark.parametrize("platform", ["dingtalk", "wecom"])
def test_digest_of_ten_thousand_is_one_message_that_says_how_many(platform: str, world: Platforms, post: Post) -> None:
    post.target(platform, Pace(rate=1, minute=0.3))
    many = [message(f"m{n}", platform, title=f"host {n} is down") for n in range(10_000)]
    post.send(*many)
    post.settled(*(one.id for one in many))
    assert post.buried == {} and len(world.heard) <= 20
    counted = [text.split(" messages in one")[0] for text in world.texts(platform)]
    assert sum(int(count) if count.isdigit() else 1 for count in counted) == 10_000


def test_queue_is_bounded(post: Post, world: Platforms) -> None:
    world.tricks["dingtalk"].append(platforms.silent)
    target = post.target("dingtalk", Pace(answer=30))
    large = message("m0", content="x" * 1_000_000)
    taken = [target.put(Letter(large.model_copy(update={"id": f"m{n}"}), path=Path("kept"))) for n in range(40)]
    assert taken.count(False) > 20
    assert target.bytes <= notifier.HELD
    world.ended.set()


def test_trouble_of_one_robot_delays_no_other(world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].extend([platforms.silent] * 100)
    post.target("dingtalk", Pace(patience=60, answer=30))
    post.target("wecom")
    post.send(*(message(f"d{n}") for n in range(50)))
    for n in range(15):
        post.send(message(f"w{n}", "wecom"))
        post.settled(f"w{n}")
    assert post.said == [f"w{n}" for n in range(15)] and len(world.tries["dingtalk"]) == 1  # which still waits for its answer
    world.ended.set()


def test_messages_are_said_in_their_order(world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].extend([status(500), HTML])
    post.target("dingtalk")
    post.send(*(message(f"m{n}", title=str(n)) for n in range(10)))
    post.settled(*(f"m{n}" for n in range(10)))
    assert [text.splitlines()[0] for text in world.texts("dingtalk")] == [str(n) for n in range(10)]


def test_repeat_is_not_said_twice(world: Platforms, post: Post) -> None:
    post.target("dingtalk")
    post.send(message("m1"), message("m1"), message("m2"), message("m1"))
    world.until(lambda: len(post.said) == 4)
    assert len(world.heard) == 2


def test_repeat_within_a_digest_is_not_said_twice(world: Platforms, post: Post) -> None:
    post.target("dingtalk", Pace(rate=1, minute=0.3))
    post.send(message("m0"), *(message("m1", title="once") for _ in range(20)))
    world.until(lambda: len(post.said) == 21)
    assert sum(text.count("once") for text in world.texts("dingtalk")) == 1


def test_minute_goes_on_after_a_restart(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty messages of the last life, and DingTalk would be deaf after one more.

    [ 20 said )[ restart )     I
    0         32              62
    """
    last, clock = time.time() - 32, time.monotonic
    for n in range(20):
        noted = {"id": f"old{n}", "platform": "dingtalk", "state": "said", "attempt": f"a{n}"}
        post.sent.remember(noted, last)
    room, until = post.target("dingtalk").room()
    assert room == 0 and 10 < until <= 30
    monkeypatch.setattr(notifier.time, "monotonic", lambda: clock() + until)
    post.send(message("m1"))
    post.settled("m1")


def test_minute_that_another_notifier_has_used_meanwhile_is_used(world: Platforms, post: Post) -> None:
    """A partition that comes back, while this notifier's robot goes on; what it said itself counts once.

    own   I               I
    other   [ 2 said )  ^ the partition is back
    """
    target = post.target("dingtalk", Pace(rate=4))
    post.send(message("m1"))
    post.settled("m1")
    for n in range(2):
        noted = {"id": f"other{n}", "platform": "dingtalk", "state": "said", "attempt": f"a{n}"}
        post.sent.remember(noted, time.time() - 20)
    for _ in range(2):
        target.start()
        room, until = target.room()
        assert room == 1 and 0 < until <= 42


def test_id_is_forgotten_when_the_topic_forgets_it(settings: Settings) -> None:
    sent, long_ago = Sent(settings), time.time() - notifier.KEPT.total_seconds() - 60
    for n in range(100):
        sent.remember({"id": f"m{n}", "platform": "wecom", "state": "said", "attempt": "a"}, long_ago)
    assert len(sent.states) == 100
    sent.remember({"id": "m1", "platform": "wecom", "state": "said", "attempt": "b"}, time.time())
    assert (sent.state(message("m1", "wecom")), len(sent.states)) == ("said", 1)


def test_id_is_forgotten_where_nothing_else_is_said(settings: Settings) -> None:
    sent, long_ago = Sent(settings), time.time() - notifier.KEPT.total_seconds() - 60
    sent.remember({"id": "m1", "platform": "wecom", "state": "said", "attempt": "a"}, long_ago)
    assert sent.state(message("m1", "wecom")) == ""


def test_what_is_secret_in_an_id_is_not_noted_and_ids_that_differ_in_it_alone_stay_apart(settings: Settings) -> None:
    sent = Sent(settings, [SECRET])
    sent.note([message(f"m-{SECRET}"), message("token=1")], "said", "a", now=False)
    assert not any(told in line for line in sent.owed for told in (SECRET.encode(), b"token=1"))
    ids = (f"m-{SECRET}", "m-another", "token=1", "token=2")
    assert [sent.state(message(one)) for one in ids] == ["said", "", "said", ""]
    elsewhere = Sent(settings, [SECRET])
    for line in sent.owed:
        elsewhere.remember(json.loads(line), time.time())
    assert [elsewhere.state(message(one)) for one in ids] == ["said", "", "said", ""]


def test_letter_that_kafka_does_not_take_lies_there_once_it_does(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its offset is not committed, and neither the count nor the log has it among the dead letters.

    bury ──▶ not taken      ──▶ taken, committed
    """
    took = iter([kafka.Delivery(sent=1, failed=1, errors=["timed out"]), kafka.Delivery(sent=1, delivered=1)])
    monkeypatch.setattr(kafka, "produce", lambda *_, **__: next(took))
    here = notifier.Notifier(settings, {"dingtalk": Robot("dingtalk", SecretStr("https://h/?access_token=t"))}, QUICK)
    (settings.state / "notify").mkdir(parents=True)
    here.member.out["notify", 0], here.member.finished["notify", 0] = OrderedDict({7: None}), set()
    here.started = True
    record = notifier.Record(0, 7, datetime.now(UTC), None, b"", (), "notify")
    found = []
    with capture_logs() as events:
        here.bury([Letter(message("m1"), record=record)], "a test")
        for _ in range(2):
            here.look_due = 0.0
            here.beside()
            said = sum(event["event"] == "a message went to the dead letters" for event in events)
            found.append((here.targets["dingtalk"].count.buried, said, here.member.ready.get(("notify", 0))))
    assert found == [(0, 0, None), (1, 1, 8)]


def test_letter_that_is_buried_again_has_a_key_of_its_own(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dead-letters replay` takes the first out after it has sent it; what was buried again meanwhile stays.

    bury m1 ──▶ key 7 ──▶ replay: sent ──▶ buried again, key 9 ──▶ key 7 taken out
    """
    keys = list[str]()

    def took(_settings: Settings, _topic: Any, events: Any, **_: Any) -> kafka.Delivery:
        keys.extend(event.key for event in events)
        return kafka.Delivery(sent=1, delivered=1)

    monkeypatch.setattr(kafka, "produce", took)
    here = notifier.Notifier(settings, {}, QUICK)
    for offset, one in ((7, message("m1")), (9, message("m1")), (7, message("m1")), (8, None)):
        record = notifier.Record(0, offset, datetime.now(UTC), None, b"", (), "notify")
        assert here.bury_record(record, one, "a test")
    assert keys == ["dingtalk/m1/0/7", "dingtalk/m1/0/9", "dingtalk/m1/0/7", "notify/0/8"]


def test_letter_that_is_replayed_says_when_it_was_sent_first(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    sent, 12:00:05 ──▶ buried ──▶ replayed ──▶ buried again ──▶ replayed
    """
    old, there = datetime(2026, 11, 19, 12, 0, 5, tzinfo=UTC), dict[str, list[notifier.Record]]()

    def produce(_: Settings, topic: Any, events: list[kafka.Event], **__: Any) -> kafka.Delivery:
        for event in events:
            headers = tuple(
                (name, value if isinstance(value, bytes) else str(value).encode()) for name, value in event.headers.items()
            )
            key = str(event.key).encode()
            record = notifier.Record(0, 7, datetime.now(UTC), key, event.value, headers, topic.name)  # type: ignore[arg-type]
            there.setdefault(topic.name, []).append(record)
        return kafka.Delivery(sent=1, delivered=1)

    monkeypatch.setattr(kafka, "produce", produce)
    monkeypatch.setattr(kafka, "consume", lambda _, topic, *__: iter(there[topic]))
    here = notifier.Notifier(settings, {}, QUICK)
    one = message("m1", "telex")
    value = one.model_dump_json().encode()
    by_kafka = notifier.Record(0, 7, old, None, value, (), "notify")
    for first in (Letter(one, record=by_kafka), Letter(one, path=Path("kept"), kept=old)):
        letter = first
        for _ in range(2):
            there.clear()
            here.bury([letter], "a test")
            here.lay()
            notifier.replay(settings, notifier.dead_letters(settings))
            letter = Letter(one, record=there["notify"][0])
        assert notifier.with_its_age(one, [letter]).content == "(of 2026-11-19 12:00:05 UTC)\n12 records"


class Interrupted:
    """A producer whose records arrive, and Ctrl-C at the second letter: as it is made, or once it has taken a record."""

    def __init__(self, at: str, topic: str) -> None:
        self.at, self.topic = at, topic
        self.made, self.taken = 0, dict[str, list[Any]]()

    def __call__(self, _: Any) -> Interrupted:
        self.made += 1
        self.press("made", self.made == 4)
        return self

    def produce(self, topic: str, *, on_delivery: Any, **record: Any) -> None:
        self.taken.setdefault(topic, []).append(record["key"] or record["value"])
        on_delivery(None, None)
        self.press("taken", topic == self.topic and len(self.taken[topic]) == 2)

    def poll(self, _: float) -> None: ...

    def flush(self, _: float) -> int:
        return 0

    def press(self, at: str, now: bool) -> None:
        if now and at == self.at:
            signal.raise_signal(signal.SIGINT)


#   [message, tombstone)  [message, tombstone)  4 letters
#                            I        I
@pytest.mark.parametrize(("at", "topic"), [("taken", "notify"), ("made", ""), ("taken", "notify_dead_letters")])
def test_replay_that_is_interrupted_ends_with_the_letter_it_is_at(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, at: str, topic: str
) -> None:
    producer = Interrupted(at, topic)
    monkeypatch.setattr(kafka, "connected", lambda *_: None)
    monkeypatch.setattr(kafka, "descriptions", lambda _, __, names, **___: dict.fromkeys(names))
    monkeypatch.setattr(kafka, "Producer", producer)
    letters = [notifier.DeadLetter(f"m{n}", "a test", "", "", b"m%d" % n) for n in range(6)]
    with pytest.raises(KeyboardInterrupt):
        notifier.replay(settings, letters)
    assert producer.taken == {"notify": [b"m0", b"m1"], "notify_dead_letters": [b"m0", b"m1"]}


def test_letters_are_dropped_until_ctrl_c(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Interrupted("taken", "notify_dead_letters")
    monkeypatch.setattr(kafka, "connected", lambda *_: None)
    monkeypatch.setattr(kafka, "descriptions", lambda _, __, names, **___: dict.fromkeys(names))
    monkeypatch.setattr(kafka, "Producer", producer)
    with pytest.raises(KeyboardInterrupt):
        notifier.drop(settings, [notifier.DeadLetter(f"m{n}", "a test", "", "", b"") for n in range(6)])
    assert producer.taken == {"notify_dead_letters": [b"m0", b"m1"]}


def test_letter_whose_message_was_not_taken_is_not_taken_out(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C does not wait for the letter."""
    asked = list[str]()

    def produce(_: Settings, topic: Any, __: Any, **___: Any) -> kafka.Delivery:
        asked.append(topic.name)
        return kafka.Delivery(interrupted=True)

    monkeypatch.setattr(kafka, "produce", produce)
    with pytest.raises(KeyboardInterrupt):
        notifier.replay(settings, [notifier.DeadLetter("m0", "a test", "", "", b"m0")])
    assert asked == ["notify"]


#   [look, 5 s         )  1 s  [look
#                       I I I            records
def test_records_have_their_turn_after_a_look_that_takes_longer_than_looks_are_apart(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, now, looks = notifier.Notifier(settings, {}, QUICK), [100.0], list[float]()

    def look() -> None:
        looks.append(now[0])
        now[0] += 5 * notifier.LOOK

    (settings.state / "notify").mkdir(parents=True)
    monkeypatch.setattr(here, "lay", look)
    monkeypatch.setattr(notifier.time, "monotonic", lambda: now[0])
    for _ in range(3):
        here.beside()
    assert looks == [100.0]
    now[0] += notifier.LOOK
    here.beside()
    assert looks == [100.0, 100 + 6 * notifier.LOOK]


def test_broker_that_goes_away_while_a_partition_comes_is_waited_for(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said before is read later, and nothing is said until it is known."""
    here = notifier.Notifier(settings, {}, QUICK)
    (settings.state / "notify").mkdir(parents=True)
    here.member.out["notify", 0] = OrderedDict()
    one = message("m1", "telex").model_dump_json().encode()
    answers = iter([kafka.BrokerAway("no Kafka broker answers"), None])

    def catch_up() -> None:
        if error := next(answers):
            raise error

    monkeypatch.setattr(here.sent, "catch_up", catch_up)
    here.assigned([("notify", 0)])
    here.receive(notifier.Record(0, 7, datetime.now(UTC), None, one, (), "notify"))
    assert (here.started, len(here.unburied)) == (False, 0)
    here.beside()
    assert (here.started, len(here.unburied)) == (True, 1)


def test_what_is_no_note_among_those_of_what_was_said_silences_nobody(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the topic can put anything there, and a notifier reads all of it at each start."""
    note = {"id": "m1", "platform": "dingtalk", "state": "said", "attempt": "a-1"}
    strange = [note | {"platform": ["dingtalk"]}, note | {"attempt": {}}, {"id": "m1"}, [], 7, "said"]
    values = [None, b"", b"not json", b"\xff", b"[" * 100_000, *(json.dumps(one).encode() for one in [*strange, note])]
    now = datetime.now(UTC)
    held = [notifier.Record(0, n, now, None, value, (), "notify_sent") for n, value in enumerate(values)]
    monkeypatch.setattr(kafka, "consume", lambda settings, topic, start: iter(held[start:]))
    sent = notifier.Sent(settings)
    sent.catch_up()
    assert (sent.upto, sent.state(message("m1"))) == (len(values), "said")
    assert len(sent.ages("dingtalk", 60)) == 1


def test_full_disk_ends_no_notifier(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is then that people have to hear of something; who looks at its heartbeat sees the last one."""
    here, write = notifier.Notifier(settings, {}, QUICK), Path.write_text
    (settings.state / "notify").mkdir(parents=True)
    here.beside()
    before = (settings.state / "notify" / "heartbeat.json").read_text()

    def full(path: Path, text: str) -> int:
        write(path, text[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    here.beat_due = 0.0
    here.beside()
    assert (settings.state / "notify" / "heartbeat.json").read_text() == before


# ----------------------------------------------------------------------------------------------------------- its end


def test_end_says_what_waits_and_tries_nothing_twice(world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].append(platforms.silent)
    target = post.target("dingtalk", replace(QUICK, rate=3, first=10_000, longest=10_000, patience=20_000))
    post.send(message("m1"))
    world.until(lambda: world.tries["dingtalk"])
    post.send(*(message(f"m{n}") for n in range(2, 8)))
    target.finish()
    world.ended.set()
    target.thread.join(30)
    assert not target.thread.is_alive(), "it waits for another try of m1"
    assert (post.said, post.buried) == (["m2", "m3", "m4", "m5", "m6", "m7"], {})  # m1 was not heard, and comes again
    assert len(world.tries["dingtalk"]) == 2


def test_what_is_let_go_is_neither_said_nor_buried(world: Platforms, post: Post) -> None:
    world.tricks["dingtalk"].extend([status(500)] * 100)
    target = post.target("dingtalk", Pace(first=30, longest=30))
    record = notifier.Record(0, 7, datetime.now(UTC), None, b"", (), "notify")
    for one in ("m1", "m2"):
        assert target.put(Letter(message(one), record=record))
    world.until(lambda: world.tries["dingtalk"])
    target.let_go()
    assert (post.said, post.buried, list(target.waiting), target.busy, target.bytes) == ([], {}, [], [], 0)
    world.tricks["dingtalk"].clear()
    post.send(message("m3"))
    post.settled("m3")
    assert post.said == ["m3"]


# ------------------------------------------------------------------------------------------------- secrets and addresses


def test_secret_is_in_no_log_and_no_dead_letter(world: Platforms, post: Post, caplog: pytest.LogCaptureFixture) -> None:
    canaries = [*TOKENS.values(), SECRET]
    echo = f"no such token {TOKENS['dingtalk']} at {world.webhook('dingtalk')} signed with {SECRET}"
    world.tricks["dingtalk"].extend([errcode(300001, echo), status(500), platforms.drops, errcode(300001, echo)])
    caplog.set_level(logging.DEBUG)
    with capture_logs() as events:
        target = post.target("dingtalk", Pace(first=0.01, longest=0.02), secret=SECRET)
        post.send(message("m1"), message("m2"))
        post.settled("m1", "m2")
    told = str(events) + caplog.text + str(post.buried) + repr(target) + repr(target.robot)
    assert [one for one in canaries if one in told] == []
    assert "errcode 300001: no such token **********" in told and post.buried.keys() == {"m1"}


@pytest.mark.parametrize(
    ("webhook", "wrong"),
    [
        ("http://oapi.dingtalk.com/robot/send?access_token=t0ken", "does not begin with https://"),
        ("ftp://oapi.dingtalk.com/robot/send?access_token=t0ken", "does not begin with https://"),
        ("oapi.dingtalk.com/robot/send?access_token=t0ken", "does not begin with https://"),
        ("https://127.0.0.1/robot/send?access_token=t0ken", "its host 127.0.0.1:443 is not one of TIDEMARK_NOTIFY_HOSTS"),
        ("https://2130706433/robot/send?access_token=t0ken", "is not one of"),
        ("https://[::1]/robot/send?access_token=t0ken", "is not one of"),
        ("https://169.254.169.254/?access_token=t0ken", "is not one of"),
        ("https://oapi.dingtalk.com.evil.example/?access_token=t0ken", "is not one of"),
        ("https://evil.example/oapi.dingtalk.com?access_token=t0ken", "is not one of"),
        ("https://oapi.dingtalk.com:8443/?access_token=t0ken", "its host oapi.dingtalk.com:8443 is not one of"),
        ("https://oapi.dingtalk.com@evil.example/?access_token=t0ken", "holds a user"),
        ("https://evil@oapi.dingtalk.com/?access_token=t0ken", "holds a user"),
        ("https://evil.example\\@oapi.dingtalk.com/?access_token=t0ken", "holds a user"),
        ("https://oapi.dingtalk.com/ ?access_token=t0ken", "signs that no address has"),
        ("https://oapi.dingtalk.com:port/?access_token=t0ken", "is not an address"),
        ("https://oapi.dingtalk.com/robot/send", "has no access_token="),
        ("https://oapi.dingtalk.com/robot/send?key=t0ken", "has no access_token="),
    ],
)
def test_address_that_is_not_meant_is_refused_without_showing_it(webhook: str, wrong: str, tmp_path: Path) -> None:
    settings = Settings(_env_file=None, home=tmp_path, dingtalk_webhook=SecretStr(webhook))
    with pytest.raises(RobotWrong, match="TIDEMARK_DINGTALK_WEBHOOK: ") as error:
        notifier.robots(settings)
    assert wrong in str(error.value) and "t0ken" not in str(error.value)


def test_robots_are_those_of_the_environment_then_those_of_airflow(tmp_path: Path) -> None:
    hook = "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=k"
    known = {
        "tidemark_dingtalk": {"password": "https://oapi.dingtalk.com/?access_token=t", "extra": {"secret": "s", "keyword": "w"}}
    }
    settings = Settings(_env_file=None, home=tmp_path, wecom_webhook=SecretStr(hook))
    assert notifier.robots(settings, known.get) == {
        "dingtalk": Robot("dingtalk", SecretStr("https://oapi.dingtalk.com/?access_token=t"), SecretStr("s"), "w"),
        "wecom": Robot("wecom", SecretStr(hook)),
    }
    assert [*notifier.robots(settings)] == ["wecom"]
    with pytest.raises(RobotWrong, match="the password of Airflow's connection tidemark_dingtalk: it does not begin"):
        notifier.robots(settings, lambda name: {"password": None, "extra": {}})


def test_every_part_of_an_address_is_hidden(tmp_path: Path) -> None:
    hook = "https://oapi.dingtalk.com/robot/send?access_token=t0ken-a%2Bb&x=7f"
    hidden = notify.secrets(Settings(_env_file=None, home=tmp_path, dingtalk_webhook=SecretStr(hook)))
    assert {hook, "t0ken-a+b", "t0ken-a%2Bb"} <= {*hidden}
    assert [notify.masked(text, hidden) for text in (f"at {hook}", "as t0ken-a+b", "?t=t0ken-a%2Bb", "run 7f")] == [
        f"at {notify.MASK}",
        f"as {notify.MASK}",
        f"?t={notify.MASK}",
        "run 7f",
    ]


def test_airflow_is_told_whom_to_tell_and_no_web_hook(settings: Settings) -> None:
    """Not as asterisks either, which would be taken for one."""
    hook = SecretStr("https://oapi.dingtalk.com/robot/send?access_token=t0ken-4f7a")
    said = airflow.environment(settings.model_copy(update={"dingtalk_webhook": hook, "notify_to": "dingtalk"}))
    assert said["TIDEMARK_NOTIFY_TO"] == "dingtalk" and "TIDEMARK_DINGTALK_WEBHOOK" not in said
    assert not any("t0ken" in value or "***" in value for value in said.values())


def test_settings_that_are_told_the_platforms(tmp_path: Path) -> None:
    assert Settings(_env_file=None, notify_to=" wecom, dingtalk,wecom").told == ("wecom", "dingtalk")
    with pytest.raises(ValidationError, match='there is no robot "slack"; there are dingtalk, wecom'):
        Settings(_env_file=None, notify_to="slack")


# ------------------------------------------------------------------------------------------------------------ telling


def test_telling_without_kafka_keeps_a_file_for_each_robot(settings: Settings) -> None:
    settings = settings.model_copy(update={"notify_to": "dingtalk,wecom"})
    began = time.monotonic()
    notify.notify(settings, "stream_down", "The stream ended", "exit code 1 \ud800", stream="main")
    assert time.monotonic() - began < 30
    kept = [Message.model_validate_json(path.read_bytes()) for path in notify.unsent(settings).glob("*.json")]
    assert {one.platform for one in kept} == {"dingtalk", "wecom"}
    assert {(one.kind, one.title, one.content) for one in kept} == {("text", "The stream ended", "exit code 1 ?\nstream: main")}
    assert len({one.id for one in kept}) == 1


def test_telling_nobody_touches_no_kafka(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kafka, "produce", lambda *words, **_: asked.append(words))
    notify.notify(settings, "report", "t", "t")
    assert asked == [] and not notify.unsent(settings).exists()


def test_message_that_ctrl_c_came_before_is_kept_in_a_file(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "produce", lambda *_, **__: kafka.Delivery(interrupted=True))
    notify.send(settings, [message("m1")])
    assert [Message.model_validate_json(path.read_bytes()).id for path in notify.unsent(settings).iterdir()] == ["m1"]


def test_message_said_late_says_when_it_was_sent() -> None:
    old = notifier.Record(0, 7, datetime(2026, 11, 19, 12, 0, 5, tzinfo=UTC), None, b"", (), "notify")
    letters = [Letter(message("m1"), record=old, again=True)]
    said = notifier.with_its_age(letters[0].message, letters).content
    assert said == "(sent again: the last try may have been heard)\n(of 2026-11-19 12:00:05 UTC)\n12 records"
    fresh = [Letter(message("m1"))]
    assert notifier.with_its_age(fresh[0].message, fresh) is fresh[0].message


@pytest.mark.parametrize(("platform", "kind"), SHAPES)
def test_message_that_is_cut_says_that_it_is_late_and_said_again(platform: str, kind: str) -> None:
    old = notifier.Record(0, 7, datetime(2026, 11, 19, 12, 0, 5, tzinfo=UTC), None, b"", (), "notify")
    one = message("m1", platform, **{**CARD, "kind": kind}, content="x" * 10_000)
    late = notifier.with_its_age(one, [Letter(one, record=old, again=True)])
    body = json.dumps(notifier.body(Robot(platform, SecretStr("https://h")), late), ensure_ascii=False)
    assert "…" in body and "(sent again: " in body and "(of 2026-11-19 12:00:05 UTC)" in body


def test_message_that_waited_in_a_file_says_when_it_was_sent(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Kafka or without: there it has the time at which the file was put into the topic."""
    old = datetime(2026, 11, 19, 12, 0, 5, tzinfo=UTC)
    put: list[kafka.Event] = []

    def produce(_: Settings, topic: Any, events: list[kafka.Event], **__: Any) -> kafka.Delivery:
        put.extend(events)
        return kafka.Delivery(sent=1, delivered=1)

    monkeypatch.setattr(kafka, "produce", produce)
    path = notify.keep(settings, message("m1"))
    os.utime(path, (old.timestamp(), old.timestamp()))
    notifier.Notifier(settings, {}, QUICK).relay()
    headers = tuple((name, str(value).encode()) for name, value in put[0].headers.items())
    by_kafka = notifier.Record(0, 7, datetime.now(UTC), None, b"", headers, "notify")
    for letter in (Letter(message("m1"), record=by_kafka), Letter(message("m1"), path=path, kept=old)):
        assert notifier.with_its_age(letter.message, [letter]).content == "(of 2026-11-19 12:00:05 UTC)\n12 records"
    wrong = replace(by_kafka, headers=(("kept", b"\xff"),))
    assert Letter(message("m1"), record=wrong).at == wrong.timestamp
