"""The page in a real browser: no error, no request, quick with 2,000 trajectories, and usable by keyboard alone."""

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, Browser
from evaluation_world import EVIL, report_data

from pipelines.core.types import Turn
from pipelines.report import writer

pytestmark = [pytest.mark.services, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
ACTIVE = "document.activeElement"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    writer.write(report_data(), path)
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared: Browser, page: Path) -> Browser:
    shared.errors.clear()
    shared.requests.clear()
    shared.open(page)
    return shared


def listed(browser: Browser) -> int:
    return int(browser.ask("parseInt(document.getElementById('count').textContent.replace(/,/g, '')) || 0"))


def pick(browser: Browser, select: str, value: str) -> None:
    change = "dispatchEvent(new Event('input', { bubbles: true }))"
    browser.ask(f"(() => {{ const s = document.getElementById('by-{select}'); s.value = '{value}'; s.{change}; }})()")


def test_it_opens_without_an_error_or_an_outside_request(browser: Browser, page: Path) -> None:
    browser.ask("new Promise((done) => setTimeout(done, 300))")
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.ask("document.querySelectorAll('svg.chart').length") > 20
    assert browser.ask("performance.getEntriesByType('resource').length") == 0


def test_hostile_text_is_shown_and_does_nothing(browser: Browser) -> None:
    pick(browser, "system", "0")
    browser.ask("document.querySelectorAll('#list .item')[1].click()")
    assert EVIL in browser.ask("document.querySelector('#detail h3').textContent")
    assert EVIL.strip() in browser.ask("document.querySelector('#detail .seen pre').textContent")
    assert browser.ask("window.pwned === undefined && document.images.length === 0")
    assert browser.errors == []


def test_the_policy_stops_a_script_that_got_in(browser: Browser) -> None:
    browser.ask(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.pwned = 3' }))"
    )
    assert browser.ask("window.pwned === undefined")
    browser.ask("document.body.append(Object.assign(new Image(), { src: 'https://example.com/x.png' }))")
    browser.ask("new Promise((done) => setTimeout(done, 200))")
    assert any("Content Security Policy" in error for error in browser.errors)


def test_filters_and_search_narrow_the_list(browser: Browser) -> None:
    assert listed(browser) == 36 * 5  # it opens on the last system: one greedy episode and four samples a question
    pick(browser, "system", "")
    assert listed(browser) == 36 * 5 * 3
    pick(browser, "mode", "0")
    pick(browser, "verdict", "1")
    right = sum((n * 7) % 10 < share for n in range(36) for share in (0, 6, 8))
    assert listed(browser) == right
    pick(browser, "flip", "1")
    gained = sum((n * 7) % 10 < 6 for n in range(36)) + sum(6 <= (n * 7) % 10 < 8 for n in range(36))
    assert listed(browser) == gained
    browser.ask("document.getElementById('clear').click()")
    browser.wait("document.getElementById('count').textContent.startsWith('540')")
    browser.ask("document.getElementById('search').focus()")
    for key in "ship 17":
        browser.press(key)
    assert listed(browser) == 15  # "Which ship 17 ...": three systems, five episodes
    for key in " no such words":
        browser.press(key)
    assert browser.ask("document.getElementById('count').textContent") == "No trajectory matches"


def test_it_can_be_used_by_keyboard_alone(browser: Browser) -> None:
    browser.press("/")
    assert browser.ask(f"{ACTIVE}.id") == "search"
    browser.press("Escape")
    browser.press("j")
    chosen = "document.querySelector('.item[aria-selected=true]').id"
    first = browser.ask(chosen)
    browser.press("j")
    assert browser.ask(chosen) != first
    browser.press("k")
    assert browser.ask(chosen) == first
    browser.press("[")
    pressed = "document.querySelector('.switch [aria-pressed=true]').textContent"
    assert browser.ask(pressed).endswith("after SFT")
    browser.ask("document.getElementById('list').focus()")
    browser.press("End")
    assert browser.ask("document.getElementById('list').scrollTop") > 5000
    assert browser.ask("document.getElementById('list').getAttribute('aria-activedescendant')") == browser.ask(chosen)
    browser.press("?")
    assert browser.ask("document.getElementById('keys').open")


def test_dark_and_light_follow_the_system_and_the_button(browser: Browser, page: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.ask(background)
    browser.press("t")
    dark = browser.ask(background)
    assert dark != light
    browser.open(page, dark=True)
    assert browser.ask(background) == dark
    assert browser.ask("document.getElementById('theme').textContent") == "Light"
    browser.ask("document.getElementById('theme').click()")
    assert browser.ask(background) == light


# WCAG 2.2, 1.4.3: the relative luminances of a text's colour and of the first opaque background behind it.
CONTRAST = """
(() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const worst = {};
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.getClientRects().length || node.closest("script, style, dialog, #tip, option")) continue;
    const style = getComputedStyle(node);
    const text = rgba(node.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(text), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) worst[`${node.tagName}.${node.getAttribute("class")}`] = ratio.toFixed(2);
  }
  return JSON.stringify(worst);
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_enough_contrast(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    assert browser.ask(CONTRAST) == "{}"


def test_it_is_accessible_in_its_structure(browser: Browser) -> None:
    assert browser.ask(
        "[...document.querySelectorAll('svg.chart:not(.key)')].every((svg) => svg.getAttribute('aria-label'))"
    )
    named = "(node) => node.labels?.length || node.getAttribute('aria-label') || node.textContent.trim()"
    assert browser.ask(f"[...document.querySelectorAll('input, select, button')].every({named})")
    levels = browser.ask("[...document.querySelectorAll('h1, h2, h3, h4')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = browser.ask("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    assert browser.ask("document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [360, 768, 1280, 2000])
def test_no_width_makes_the_page_scroll_sideways_and_what_is_cut_has_a_shadow(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width=width)
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    cut = "(e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === 'auto'"
    bare = "(e) => !getComputedStyle(e).backgroundImage.includes('gradient')"
    found = browser.ask(
        f"[...document.querySelectorAll('body *')].filter({cut}).filter({bare}).map((e) => e.outerHTML)"
    )
    assert found == []


def test_a_link_opens_its_trajectory(browser: Browser, page: Path) -> None:
    browser.open(page, fragment="#trajectory-7")
    assert "Which ship 2 " in browser.ask("document.querySelector('#detail h3').textContent")


def opening(browser: Browser, path: Path) -> float:
    """Seconds until a page shows its list and a trajectory."""
    start = time.perf_counter()
    browser.open(path)
    browser.wait(
        "document.querySelectorAll('#list .item').length > 5 && document.querySelectorAll('#detail h3').length"
    )
    return time.perf_counter() - start


def pressing(browser: Browser) -> float:
    """Seconds until the next trajectory is drawn, which has three short turns and four long ones."""
    start = time.perf_counter()
    browser.press("j")
    assert browser.ask("document.querySelectorAll('.turn').length") == 7
    return time.perf_counter() - start


def test_a_page_of_records_alone_has_no_reader_and_no_error(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "records.html"
    data = report_data()
    systems = tuple(dataclasses.replace(system, trajectories=()) for system in data.systems)
    writer.write(dataclasses.replace(data, systems=systems, examples={}), path)
    browser.open(path)
    for key in ("j", "/", "]"):
        browser.press(key)
    before = browser.ask("document.getElementById('theme').textContent")
    browser.press("t")
    assert browser.ask("document.getElementById('theme').textContent") != before
    assert browser.ask("document.getElementById('trajectories') === null")
    assert browser.ask("document.querySelectorAll('svg.chart').length") > 20
    assert browser.errors == []


def test_two_thousand_trajectories_open_in_three_seconds(browser: Browser, tmp_path: Path) -> None:
    data = report_data(questions=134, samples=4)
    long = Turn("x" * 1500, data.systems[0].trajectories[0].turns[0].action, "row | value\n" * 60)
    systems = tuple(
        dataclasses.replace(
            system,
            trajectories=tuple(
                dataclasses.replace(each, turns=each.turns + (long,) * 4) for each in system.trajectories
            ),
        )
        for system in data.systems
    )
    path = tmp_path / "large.html"
    writer.write(dataclasses.replace(data, systems=systems), path)
    assert path.stat().st_size > 5_000_000
    took = min(opening(browser, path) for _ in range(3))  # other processes may be at work beside it
    assert browser.ask("document.querySelectorAll('#list .item').length") < 60  # only what is looked at is drawn
    pick(browser, "system", "")
    assert listed(browser) == 2000
    pressed = min(pressing(browser) for _ in range(3))
    if (took >= 3 or pressed >= 0.5) and os.getloadavg()[0] > len(os.sched_getaffinity(0)) + 1:
        pytest.skip(f"the machine is too busy to time anything (load {os.getloadavg()[0]:.1f}, {took:.1f} s)")
    assert took < 3, took
    assert pressed < 0.5, pressed
