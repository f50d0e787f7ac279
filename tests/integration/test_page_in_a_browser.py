"""The page in a real browser: its numbers, its pictures, what it does with hostile text, and what a reader can do."""

import importlib.util
import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import page_lake
import pytest
from page_lake import HOSTILE

from tidemark import quality
from tidemark.model import expect
from tidemark.settings import Settings

CHROMIUM = Path("/usr/bin/chromium")
PLUGIN = Path(__file__).parent.parent.parent / "plugins" / "page.py"

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no browser at {CHROMIUM}; apt-get install chromium")


@pytest.fixture(scope="module")
def page_module(in_airflow: None) -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", PLUGIN)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def serve(page_module: ModuleType) -> Iterator[Callable[[Settings], str]]:
    """The page's app over a lake, mounted as Airflow mounts it, with everyone let in; gives its address."""
    import uvicorn
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import FastAPI

    servers: list[tuple[Any, threading.Thread]] = []

    def start(settings: Settings) -> str:
        app = page_module.application(page_module.Answers(settings))
        app.dependency_overrides[get_user] = lambda: None
        root = FastAPI()
        root.mount("/tidemark", app)
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(root, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{listening.getsockname()[1]}/tidemark/"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    settings, ended = Settings(_env_file=None, home=tmp_path_factory.mktemp("filled")), threading.Event()
    page_lake.fill(settings)

    def beats() -> None:
        while not ended.wait(1):
            page_lake.beat(settings, datetime.now(UTC))

    thread = threading.Thread(target=beats)
    thread.start()
    yield settings
    ended.set()
    thread.join()


@pytest.fixture(scope="module")
def address(serve: Callable[[Settings], str], filled: Settings) -> str:
    return serve(filled)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """The page in a tab of its own. Whatever it says on the console, asks of another host or opens, fails the test."""
    contexts, wrong = [], []

    def open_it(where: str = address, wait_for: str = "#now-pv", wide: int = 1500, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": wide, "height": 1000}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("http://127.0.0.1:") else None)
        tab.on("requestfailed", lambda asked: wrong.remove(asked.url) if asked.failure == "csp" else None)  # it was never sent
        tab.wrong = wrong
        tab.goto(where)
        tab.wait_for_selector(wait_for)
        return tab

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []


def until(tab: Any, condition: str, seconds: float = 15) -> None:
    """Until it is true in the page. Playwright's own way to wait for it evaluates text there, which the page forbids."""
    deadline = time.monotonic() + seconds
    while not tab.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {condition}"
        tab.wait_for_timeout(50)


def settle_down(tab: Any) -> None:
    """Until every part has drawn what it was answered."""
    until(tab, "PARTS.every((part) => part.known || !part.path)")


def picture(tab: Any, **options: Any) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(tab.screenshot(**options))).convert("RGB")


# -------------------------------------------------------------------------------------------------------------- to see


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_its_numbers_and_pictures(opened, tmp_path, scheme):
    tab = opened(color_scheme=scheme)
    settle_down(tab)
    assert tab.inner_text("#now-pv") == "361,204"
    assert tab.inner_text("#now-uv") == "18,377"
    said = tab.inner_text("main")
    for words in (
        "lag",
        "rows a second",
        "site_daily_traffic",
        "the nightly",
        "roll back…",
        "page: a number, not a string",
        "site_last_hour",
    ):
        assert words in said, words
    assert tab.inner_text("#states").split("\n") == ["main running", "alarms not started"]
    for way in tab.query_selector_all("#hour svg .trace"):
        assert len(way.get_attribute("d")) > 2000  # 721 marks

    shot = picture(tab, path=tmp_path / f"{scheme}.png", full_page=True)
    ground = shot.getpixel((3, 3))
    assert (sum(ground) > 600) == (scheme == "light"), ground
    assert len(shot.getcolors(maxcolors=1 << 24)) > 200
    # The two traces are really there, each in its own colour.
    for name, box in (("pv", "#hour svg >> nth=0"), ("uv", "#hour svg >> nth=1")):
        r, g, b = map(int, re.findall(r"\d+", tab.eval_on_selector(f".trace.{name}", "(e) => getComputedStyle(e).stroke"))[:3])
        drawn = picture(tab.locator(box))
        near = sum(n for n, (x, y, z) in drawn.getcolors(1 << 24) if abs(x - r) + abs(y - g) + abs(z - b) < 60)
        assert near > 300, (name, near)


def test_the_newest_rows_are_those_of_the_view_that_is_chosen(opened):
    tab = opened()
    settle_down(tab)
    tab.select_option("#view", "last_hour")
    until(tab, "document.querySelector('#newest').textContent.includes('/checkout')")
    assert tab.inner_text("#newest th >> nth=0") == "page"
    tab.select_option("#view", "site_last_hour")
    until(tab, "document.querySelector('#newest').textContent.includes('361204')")
    assert "five-second mark" in tab.inner_text("#views-note")


ANSWERED = """() => {
    const was = answerOf;
    window.answered = [];
    answerOf = async (path) => { const answer = await was(path); answered.push(path); return answer; };
}"""


def test_an_answer_that_comes_after_a_later_one_is_not_shown(opened):
    """
    last_hour        [asked ························· answered)   another view is looked at by then
    site_last_hour               [asked ── answered)
    """
    tab, held = opened(), []
    settle_down(tab)
    tab.evaluate(ANSWERED)
    tab.route("**/newest/last_hour", lambda route: held.append(route))
    with tab.expect_request("**/newest/last_hour"):
        tab.select_option("#view", "last_hour")
    tab.select_option("#view", "site_last_hour")
    until(tab, "document.querySelector('#newest').textContent.includes('361204')")
    held[0].continue_()
    until(tab, "answered.includes('newest/last_hour')")
    assert "361204" in tab.inner_text("#newest")


AT_ONCE = """async () => {
    const was = answerOf, view = document.querySelector("#view"), turns = () => new Promise((go) => setTimeout(go, 20));
    let answer = null;
    answerOf = (path) => (path === "newest/last_hour" ? new Promise((go) => { answer = go; }) : was(path));
    const choose = (name) => { view.value = name; view.dispatchEvent(new Event("change")); };
    choose("last_hour");
    while (!answer) await turns();
    choose("site_last_hour");
    answer({ columns: ["page"], rows: [["of the view before"]] });
    for (let n = 0; n < 9; n += 1) await null;
    return document.querySelector("#newest").textContent;
}"""


def test_an_answer_that_comes_before_the_next_one_is_asked_for_is_not_shown(opened):
    tab = opened()
    settle_down(tab)
    assert "of the view before" not in tab.evaluate(AT_ONCE)
    until(tab, "document.querySelector('#newest').textContent.includes('361204')")


def test_a_verdict_that_comes_after_a_later_one_is_not_shown(opened):
    tab, held = opened(), []
    settle_down(tab)
    tab.evaluate(ANSWERED)
    tab.route("**/verdicts/*", lambda route: route.continue_() if held else held.append(route))
    with tab.expect_request("**/verdicts/*"):
        tab.locator("#verdicts .mark.passed >> nth=0").click()
    tab.locator("#verdicts .mark.failed").click()
    tab.wait_for_selector("#detail .sample")
    held[0].continue_()
    until(tab, "answered.filter((path) => path.startsWith('verdicts/')).length === 2")
    assert "PV is right failed" in tab.inner_text("#detail")


def test_what_could_not_be_had_of_one_view_is_forgotten_with_it(opened):
    tab = opened()
    settle_down(tab)
    tab.select_option("#view", "site_last_hour")
    until(tab, "document.querySelector('#newest').textContent.includes('361204')")
    tab.route("**/newest/last_hour", lambda route: route.fulfill(status=503, json={"detail": "a table cannot be read"}))
    tab.select_option("#view", "last_hour")
    until(tab, "document.querySelector('#trouble').textContent.includes('a table cannot be read')")
    assert tab.inner_text("#newest") == "…"
    tab.select_option("#view", "site_last_hour")
    until(tab, "document.querySelector('#trouble').textContent === ''")
    tab.wrong[:] = [one for one in tab.wrong if "503" not in one]


@pytest.mark.parametrize("wide", [760, 400])
def test_a_narrow_window_needs_no_sideways_scrolling(opened, wide):
    tab = opened(wide=wide)
    settle_down(tab)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    inside = "(e) => e.getBoundingClientRect().right <= document.querySelector('#hour').getBoundingClientRect().right"
    assert tab.evaluate(f"[...document.querySelectorAll('#hour svg')].every({inside})")


# In how many lines each name in a cell stands: more than one, and it was broken.
NAMES = "[...document.querySelectorAll('td > bdi')].filter((e) => /^[\\w-]+$/.test(e.textContent))"
LINES = f"{NAMES}.map((e) => e.getClientRects().length)"


@pytest.mark.parametrize("wide", [1272, 400])
def test_a_name_is_not_broken_and_a_reason_not_into_single_letters(opened, wide):
    tab = opened(wide=wide)
    settle_down(tab)
    for key in [fold.get_attribute("data-key") for fold in tab.query_selector_all("#runs button.plain")]:
        tab.locator(f"[data-key={json.dumps(key)}]").click()
    lines = tab.evaluate(LINES)
    assert len(lines) > 10 and set(lines) == {1}
    assert min(tab.locator(f"#rejects td:nth-child({n}) >> nth=0").bounding_box()["width"] for n in (1, 5)) >= 90


def test_a_usual_window_shows_every_column(opened):
    tab = opened(wide=1400)
    settle_down(tab)
    cut = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.id)"
    assert tab.evaluate(cut) == []


@pytest.mark.parametrize("wide", [1185, 400])  # Airflow's frame in a window of 1280; a telephone
def test_the_report_of_a_day_opens_without_scrolling_for_it(serve, opened, tmp_path, wide):
    settings, today = Settings(_env_file=None, home=tmp_path), datetime.now(UTC).date()
    page_lake.days(settings, today)
    folder = settings.lake_path / "reports"
    folder.mkdir()
    for day in (today - timedelta(days=n) for n in (1, 2, 4)):
        (folder / f"{day}.html").write_text(f"the report of {day}")
    tab = opened(serve(settings), wait_for="#days button", wide=wide)
    card, button = (tab.locator(one).bounding_box() for one in ("#days", "#days button >> nth=0"))
    assert button["x"] + button["width"] <= card["x"] + card["width"]
    tab.click("#days button >> nth=0")
    tab.frame_locator("#docs iframe").locator(f"text=the report of {today - timedelta(days=1)}").wait_for()
    tab.click("#docs >> text=close")
    held = today - timedelta(days=4)  # it has no row, only its report
    assert tab.inner_text("#days tbody tr:last-child").split() == [str(held), *"–––––––"]
    tab.click("#days button >> nth=-1")
    tab.frame_locator("#docs iframe").locator(f"text=the report of {held}").wait_for()


@pytest.mark.parametrize(
    ("chosen", "system", "bright"), [("light", "dark", True), ("dark", "light", False), ("system", "dark", False)]
)
def test_airflows_theme_comes_before_the_systems(opened, chosen, system, bright):
    tab = opened(color_scheme=system)
    tab.evaluate(f"localStorage.setItem('theme', '{chosen}')")
    tab.reload()
    tab.wait_for_selector("#now-pv")
    assert (sum(picture(tab).getpixel((3, 3))) > 600) == bright


def test_the_numbers_move(serve, opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    mark = page_lake.mark_of(datetime.now(UTC))

    def add(at: datetime, pv: int) -> None:
        row = {"mark": at, "pv": pv, "uv": 1, "settled": False, "day": at.date()}
        page_lake.write(settings, "views/site_last_hour", [row], f"live/{at:%Y%m%dT%H}-{at:%M%S}-aa")

    add(mark, 1234)
    tab = opened(serve(settings))
    assert tab.inner_text("#now-pv") == "1,234"
    add(mark + timedelta(seconds=5), 1240)
    until(tab, "document.querySelector('#now-pv').textContent === '1,240'")


def test_a_pointed_mark_is_read_out(opened):
    tab = opened()
    settle_down(tab)
    box = tab.locator("#hour svg >> nth=0").bounding_box()
    tab.mouse.move(box["x"] + 60, box["y"] + 40)
    tab.wait_for_selector("#hour .cross", state="attached")
    assert tab.inner_text("#now-pv") != "361,204"
    for _ in range(5):  # out of a picture drawn anew under a resting pointer, which hears of no leaving
        tab.mouse.move(box["x"] + 60, box["y"] + 40)
        tab.evaluate("drawMarks()")
        tab.mouse.move(2, 2)
        until(tab, "document.querySelector('#now-pv').textContent === '361,204'")


def test_a_stream_that_was_drained_has_no_lag_and_no_rate_of_now(serve, opened, tmp_path):
    settings = Settings(_env_file=None, home=tmp_path)
    page_lake.live(settings, datetime(2026, 11, 19, 12, tzinfo=UTC))
    said = {"pid": 1, "state": "stopped", "at": "2026-11-19T12:00:00+00:00"}
    (settings.state / "main" / "heartbeat.json").write_text(json.dumps(said))
    tab = opened(serve(settings))
    settle_down(tab)
    facts = tab.inner_text("#streams .facts").replace("\n", " ").lower()
    assert facts.startswith("lag – rows a second – last batch 0.84 s, 2026-11-19 12:00 utc "), facts


def test_an_empty_lake_is_a_page_with_commands(serve, opened, tmp_path):
    tab = opened(serve(Settings(_env_file=None, home=tmp_path / "nowhere")), wait_for="#tables .empty code")
    settle_down(tab)
    said = tab.inner_text("main")
    for command in ("tidemark up", "tidemark produce page_views --sample", "tidemark settle --day", "make demo"):
        assert command in said


def test_a_scheduler_that_is_silent_is_said_with_the_way_out_and_forgotten_once_it_beats(opened):
    tab = opened()
    settle_down(tab)
    assert not tab.is_visible("#scheduler")
    silent = {"silent": True, "since": "2026-11-19T02:03:04+00:00"}
    tab.route("**/tidemark/scheduler", lambda route: route.fulfill(json=silent))
    tab.evaluate("PARTS.at(-1).soon()")
    until(tab, "document.querySelector('#scheduler').textContent.includes('since 2026-11-19 02:03 UTC')")
    assert "tidemark up --airflow" in tab.inner_text("#scheduler")
    tab.unroute("**/tidemark/scheduler")
    tab.evaluate("PARTS.at(-1).soon()")
    until(tab, "document.querySelector('#scheduler').textContent === ''")


def test_an_api_that_is_away_is_said_and_forgotten_when_it_is_back(opened):
    tab = opened()
    settle_down(tab)
    tab.route("**/tidemark/hour", lambda route: route.abort())
    tab.evaluate("PARTS[0].soon()")
    until(tab, "document.querySelector('#trouble').textContent.includes('does not answer')")
    assert tab.inner_text("#now-pv") == "361,204"
    tab.unroute("**/tidemark/hour")
    tab.evaluate("PARTS[0].soon()")
    until(tab, "document.querySelector('#trouble').textContent === ''")
    tab.wrong[:] = [one for one in tab.wrong if "ERR_FAILED" not in one]


# ------------------------------------------------------------------------------------------------------- text from data


def test_hostile_text_is_shown_and_never_becomes_markup(opened):
    tab = opened()
    settle_down(tab)
    for fold in tab.query_selector_all("#verdicts button.plain, #runs button.plain"):
        key = fold.get_attribute("data-key")
        tab.locator(f"[data-key={json.dumps(key)}]").click()
    tab.locator("#verdicts .mark.failed >> nth=0").click()
    tab.wait_for_selector("#detail .sample")
    seen = "<script>window.hacked = 1</script>\"'><img src=x onerror='window.hacked = 2'>↵\\u202egnp.exe"
    for part in ("streams", "verdicts", "detail", "runs"):
        assert seen in tab.text_content(f"#{part}"), part
    for part in ("pages", "rejects", "streams"):  # cut to what fits, whole in the title
        assert seen[:30] in tab.text_content(f"#{part}"), part
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("main script, main img, main iframe, body > script ~ *").count() == 0
    assert "\u202e" not in tab.content()


# -------------------------------------------------------------------------------------------------------- what one can do


def test_a_failed_verdict_leads_to_its_rows(opened):
    tab = opened()
    settle_down(tab)
    tab.locator("#verdicts .mark.failed").click()
    tab.wait_for_selector("#detail .sample")
    assert [cell.inner_text() for cell in tab.query_selector_all("#detail .sample th")] == ["day", "pv", "page"]
    assert [cell.inner_text() for cell in tab.query_selector_all("#detail .sample tr td:nth-child(2)")] == ["12", "13"]
    said = tab.inner_text("#detail")
    assert "PV is right failed, and holds the table back · 7 rows" in said and "2 of 7" in said
    tab.locator("#detail >> text=close").click()
    assert tab.inner_text("#detail") == ""


def test_a_publication_over_failed_checks_shows_its_reason(opened):
    tab = opened()
    settle_down(tab)
    row = tab.locator("#runs tr", has_text="published over failed checks")
    row.locator("button.plain").click()
    said = tab.inner_text("#runs .forced")
    assert said.startswith("published over failed checks: the check is wrong") and said.endswith("(checks: PV is right)")


class Airflow:
    """What Airflow's public API says to the page: the states of the DAG run that it asks for, or a refusal."""

    def __init__(self, tab: Any, status: int, states: tuple[str, ...] = (), detail: Any = None, paused: bool = False) -> None:
        self.status, self.states, self.detail, self.paused = status, list(states), detail, paused
        self.asked: list[tuple[str, Any]] = []
        tab.route("**/api/v2/**", self.answer)

    def answer(self, route: Any) -> None:
        path = route.request.url.split("/api/v2/")[1]
        if route.request.method == "POST":
            self.asked.append((path, json.loads(route.request.post_data)))
            told = {"dag_run_id": "manual__1", "state": "queued"} if self.status == 200 else {"detail": self.detail}
            route.fulfill(status=self.status, json=told)
        elif path.endswith("manual__1"):
            route.fulfill(json={"state": self.states.pop(0)})
        else:
            route.fulfill(json={"is_paused": self.paused})


def test_a_roll_back_needs_a_reason_and_is_asked_of_airflow(opened):
    tab = opened()
    settle_down(tab)
    airflow = Airflow(tab, 200, ("queued", "running", "success"))
    buttons = tab.locator("#runs >> text=roll back…")
    tab.locator("#runs tr", has_text="again-").locator("text=roll back…").click()
    for reason in ("", "   ", " x "):
        tab.fill("#ask textarea", reason)
        tab.click("#ask button[type=submit]")
        assert airflow.asked == []
    tab.fill("#ask textarea", " it was the wrong code ")
    tab.click("#ask button[type=submit]")
    tab.wait_for_selector("#ask .said.good")
    assert tab.inner_text("#ask .said") == "Done, by run manual__1 of the DAG rollback. See it in Airflow."
    assert tab.get_attribute("#ask .said a", "href") == "/dags/rollback/runs/manual__1"
    ((path, body),) = airflow.asked
    run = body["conf"]["run"]
    assert (path, run.split("-")[0]) == ("dags/rollback/dagRuns", "again")
    assert body == {"logical_date": None, "conf": {"run": run, "reason": "it was the wrong code"}}
    assert tab.locator("#ask button[type=submit]").is_disabled()
    assert [b.is_disabled() for b in buttons.element_handles()] == [False, False, True]  # the first was published again


def test_a_run_is_published_over_failed_checks_that_are_named(opened):
    tab = opened()
    settle_down(tab)
    airflow = Airflow(tab, 200, ("success",))
    tab.locator("#runs tr", has_text="held back").locator("button.plain").click()
    tab.click("#runs >> text=publish over failed checks…")
    tab.fill("#ask textarea", "a sale")
    tab.click("#ask button[type=submit]")
    assert airflow.asked == []  # no check is chosen
    tab.check("#ask label.choice input")
    tab.click("#ask button[type=submit]")
    tab.wait_for_selector("#ask .said.good")
    ((path, body),) = airflow.asked
    assert path == "dags/publish_over/dagRuns"
    assert body["conf"] == {"run": body["conf"]["run"], "checks": ["PV is right"], "reason": "a sale"}


@pytest.mark.parametrize("action", ["start", "drain", "restart"])
def test_a_stream_is_controlled_by_airflow(opened, action):
    tab = opened()
    settle_down(tab)
    airflow = Airflow(tab, 200, ("success",))
    tab.click(f"#streams >> text={action}…")
    tab.fill("#ask textarea", "an upgrade")
    tab.click("#ask button[type=submit]")
    tab.wait_for_selector("#ask .said.good")
    conf = {"stream": "main", "action": action, "reason": "an upgrade"}
    assert airflow.asked == [("dags/control/dagRuns", {"logical_date": None, "conf": conf})]


@pytest.mark.parametrize(
    ("status", "detail", "says"),
    [
        (401, "Token Expired", "Your session has ended. Log in to Airflow again, then try again. (401: Token Expired)"),
        (403, "Forbidden", "Airflow refuses: you have no right to start the DAG rollback. Ask someone who has. (403: Forbidden)"),
        (404, "Dag not found", "Airflow knows no DAG rollback yet. (404: Dag not found)"),
        (400, f"no run {HOSTILE}", "Airflow refuses. (400: no run <script>window.hacked = 1</script>"),
        (422, [{"msg": "Field required"}], "Airflow refuses. (422: Field required)"),
    ],
)
def test_a_refusal_is_said_in_words(opened, status, detail, says):
    tab = opened()
    settle_down(tab)
    Airflow(tab, status, detail=detail)
    tab.click("#runs >> text=roll back… >> nth=0")
    tab.fill("#ask textarea", "why")
    tab.click("#ask button[type=submit]")
    tab.wait_for_selector("#ask .said.bad")
    assert tab.inner_text("#ask .said").startswith(says)
    assert tab.locator("#ask button[type=submit]").is_enabled()
    tab.wrong[:] = [one for one in tab.wrong if f"{status}" not in one]  # the browser notes the status


def test_a_run_that_fails_or_waits_is_said(opened):
    tab = opened()
    settle_down(tab)
    airflow = Airflow(tab, 200, ("queued", "queued", "failed"), paused=True)
    tab.click("#runs >> text=roll back… >> nth=0")
    tab.fill("#ask textarea", "why")
    tab.click("#ask button[type=submit]")
    until(tab, "document.querySelector('#ask .said').textContent.includes('the DAG rollback is paused')")
    tab.wait_for_selector("#ask .said.bad")
    assert tab.inner_text("#ask .said") == "It failed. The log of run manual__1 of the DAG rollback says why. See it in Airflow."
    assert airflow.states == []


# ----------------------------------------------------------------------------------------------------------- Data Docs


def test_data_docs_open_beside_the_verdict_and_run_nothing(serve, opened, tmp_path):
    """Great Expectations' own pages: they ask for scripts of other hosts, and get none."""
    settings = Settings(_env_file=None, home=tmp_path)
    now = datetime.now(UTC)
    page_lake.fill(settings)
    run = f"settle-{now.date() - timedelta(days=2)}"
    check = expect(
        "UnexpectedRowsExpectation", unexpected_rows_query="SELECT * FROM {batch}", description=f"PV is right {HOSTILE}"
    )
    results = [quality.Unasked(check, f"no column {HOSTILE}")]
    quality.write_pages(settings.home / "docs", run, now, [("site_daily_traffic", results)])
    tab = opened(serve(settings))
    settle_down(tab)
    tab.locator("#verdicts .mark.failed").click()
    tab.click("#detail >> text=Data Docs…")
    frame = tab.frame_locator("#docs iframe")
    frame.locator("text=PV is right").first.wait_for()
    assert tab.frames[-1].evaluate("window.hacked") is None
    picture(tab, path=tmp_path / "docs.png")
    refused = [one for one in tab.wrong if "Content Security Policy" in one]
    assert any("https://" in one for one in refused)  # the page does ask other hosts for scripts and styles
    tab.wrong[:] = [one for one in tab.wrong if one not in refused]
