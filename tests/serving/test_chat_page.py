"""The chat page in a real browser: a question answered live, by keyboard, at 390 px, nothing parsed as HTML."""

from collections.abc import Iterator

import pytest

pytest.importorskip("httpx", reason="no HTTP client")
pytest.importorskip("starlette", reason="the serve extra is not installed")

from served import WIDE, Site, site

from tests.services.browser import CHROMIUM, Page, browser

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile") / "chromium", 390, 800) as opened:
        opened.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        yield opened


def type_and_enter(page: Page, text: str) -> None:
    """As a person at a keyboard: the field has the focus when the page is there."""
    page.call("Input.insertText", text=text)
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")


def test_a_question_is_answered_live_and_judged(running: Site, page: Page) -> None:
    page.open(running.url)
    page.wait_for("people, answered by script")
    type_and_enter(page, "How many people by city ?")
    page.wait_for("SELECT DISTINCT city FROM person")
    page.wait_for("Download CSV")
    assert page.evaluate("[...document.querySelectorAll('tbody td')].map(e => e.textContent).join()") == "Oslo,2,Rome,1"
    assert page.evaluate("document.querySelectorAll('svg rect').length") == 2
    page.click("n")  # the head of the column sorts
    assert page.evaluate("document.querySelector('tbody td').textContent") == "Rome"
    page.evaluate("document.querySelector('article textarea').value = 'SELECT 7 AS seven'")
    page.click("Run again")
    page.wait_for("seven")
    page.click("Right")
    page.wait_for("the next night learns from it")
    assert "How many people by city ?" in (running.folder / "feedback" / "inbox" / "serve.jsonl").read_text()
    page.evaluate("window.confirm = () => true")
    page.click("Delete mine")
    page.wait_for("1 of your questions deleted")
    assert (running.folder / "feedback" / "inbox" / "serve.jsonl").read_text() == ""
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_cells_of_a_wide_table_stay_whole_and_a_correction_begins_with_the_answer(running: Site, page: Page) -> None:
    page.open(running.url)
    page.wait_for("answered by script")
    page.evaluate("document.getElementById('question').focus()")
    type_and_enter(page, "What is wide ?")
    page.wait_for("Download CSV")
    for width in (1280, 390):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 1280
        )
        assert page.evaluate("[...document.querySelectorAll('td, th')].every(e => e.offsetHeight < 36)")  # of one line
        assert page.evaluate("(e => e.scrollWidth > e.clientWidth)(document.querySelector('.scroll'))")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("Wrong")
    assert page.evaluate("document.querySelector('article form textarea').value") == WIDE
    page.click("Send")
    page.wait_for("this is the SQL that was wrong: change it first")


def test_text_of_the_database_and_of_the_model_is_text(running: Site, page: Page) -> None:
    page.open(running.url)
    page.wait_for("answered by script")
    page.evaluate("document.getElementById('question').focus()")
    type_and_enter(page, "What are the names ?")
    page.wait_for("<img src=x onerror=alert(1)>")
    assert page.evaluate("document.querySelectorAll('article img, article b, #bold').length") == 0
    csv = "download({columns: ['a'], rows: [['=1+1']]})"
    kept = "URL.createObjectURL = b => { window.kept = b; return 'blob:x'; }"
    page.evaluate(f"{kept}; HTMLAnchorElement.prototype.click = () => 0; {csv}")
    page.evaluate("window.kept.text().then(t => { window.read = t; })")
    page.wait_for("Ask")
    assert page.evaluate("window.read") == "a\r\n'=1+1"


def test_it_is_dark_and_light_and_a_question_can_be_stopped(running: Site, page: Page) -> None:
    page.open(running.url)
    page.wait_for("answered by script")
    seen = set()
    for _ in range(2):
        page.click("Dark or light")
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    page.evaluate("document.getElementById('question').focus()")
    type_and_enter(page, "Wait")
    page.wait_for("RECURSIVE")
    page.click("Stop")
    page.wait_for("stopped")
