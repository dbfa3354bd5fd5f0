"""The review page in a real browser: by keyboard, at 390 px, dark and light, and nothing is parsed as HTML."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="no HTTP client")
pytest.importorskip("starlette", reason="the serve extra is not installed")

from review_site import COUNT, Running, lines, reviewing, shop

from tests.services.browser import CHROMIUM, Page, browser

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]
BETTER = "SELECT name FROM item WHERE price = 5"


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.chdir(tmp_path)
    with reviewing(shop(tmp_path)) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile") / "chromium", 390, 800) as opened:
        opened.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        yield opened


def press(page: Page, key: str, **more: object) -> None:
    text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, **({**text, **more} if kind == "keyDown" else more))


def value(page: Page, id: str) -> str:
    return str(page.evaluate(f"document.getElementById('{id}').value"))


def test_questions_are_looked_through_by_keyboard_and_a_closed_page_loses_nothing(running: Running, page: Page) -> None:
    page.open(f"{running.url}/#{running.site.token}")
    page.wait_for("0 of 4")
    page.wait_for("count(*)")  # the result, without asking for it
    assert value(page, "question") == COUNT["question"]
    press(page, "a")
    page.wait_for("1 of 4: 1 accepted")
    press(page, "u")
    page.wait_for("0 of 4")
    press(page, "a")
    page.wait_for("1 of 4: 1 accepted")
    page.wait_for("order ambiguous: rows 1 and 2 tie on 5")
    page.wait_for("other answered the question with SQL that gives another result")
    press(page, "e")
    page.evaluate("document.getElementById('sql').select()")
    page.call("Input.insertText", text=BETTER)
    press(page, "Enter", modifiers=2)
    page.wait_for("2 rows")
    press(page, "Escape")
    page.wait_for("Keep as mended")
    press(page, "a")
    page.wait_for("2 of 4: 1 accepted, 1 mended")
    page.wait_for("failing: hidden")
    press(page, "r")
    page.wait_for("Say why")
    page.call("Input.insertText", text="nobody may know")
    press(page, "Enter")
    page.wait_for("1 rejected")
    page.open("about:blank")
    page.open(f"{running.url}/#{running.site.token}")
    page.wait_for("3 of 4: 1 accepted, 1 mended, 1 rejected")
    press(page, "w")
    page.wait_for("wrote 2 to mine.reviewed.jsonl, 1 to mine.rejected.jsonl; 1 to decide")
    out = lines(running.site.review.files.out)
    assert [row["sql"] for row in out] == [COUNT["sql"], BETTER]


def test_it_fits_a_phone_in_dark_and_light_and_shows_text_as_text(running: Running, page: Page) -> None:
    page.open(f"{running.url}/#{running.site.token}")
    page.wait_for("0 of 4")
    page.evaluate("document.getElementById('question').value = 'How many items of each kind are there ? '.repeat(5)")
    assert page.evaluate("(e => e.scrollHeight <= e.clientHeight)(document.getElementById('question'))")
    page.evaluate("document.getElementById('sql').value = 'SELECT name FROM item'")
    page.evaluate("document.getElementById('run').click()")
    page.wait_for("<img src=x onerror=alert(1)>")
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    seen = set()
    for _ in range(2):
        page.click("Dark or light")
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    small = "[...document.querySelectorAll('.foot button')].filter(b => b.getBoundingClientRect().height < 24).length"
    assert page.evaluate(small) == 0
