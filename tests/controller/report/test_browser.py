"""The page in a headless Chromium: silent, by itself, by keyboard, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.records import index
from controller.report.gather import gather_runs, local_reader
from controller.report.model import build_report
from controller.report.page import render
from tests.controller.report.browser import BROWSER_PATH, BrowserTab, browser
from tests.controller.report.recorded import write_sweep
from tests.controller.report.test_hostile import MARKUP, with_words

pytestmark = [
    pytest.mark.skipif(BROWSER_PATH is None, reason="no Chromium here"),
    pytest.mark.e2e,
]
MEANS = "[...document.querySelectorAll('#lines tbody tr')].map((row) => row.cells[1].textContent)"


@pytest.fixture(scope="module")
def tab() -> Iterator[BrowserTab]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_sweep(home)
    return written(home)


@pytest.fixture(autouse=True)
def silent(tab: BrowserTab) -> Iterator[None]:
    """Nothing on the console, and no request but for the page itself, whatever a test does."""
    tab.said.clear()
    tab.requests.clear()
    yield
    assert tab.said == []
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
    assert all(url.endswith(".html") for url in tab.requests if url.startswith("file"))


def written(home: Path) -> Path:
    file = home / "page.html"
    file.write_text(
        render(build_report("a sweep", gather_runs(index.load_rows(home), local_reader(home))), 1e9), encoding="utf-8"
    )
    return file


def test_choosing_a_metric_changes_curves_and_table(tab: BrowserTab, page: Path) -> None:
    tab.open(page)
    assert tab.run("document.querySelectorAll('#chart path.line').length") == 4
    assert tab.run("document.querySelectorAll('#chart path.band').length") == 4
    first = tab.run(MEANS)
    shown = "[...document.querySelectorAll('[data-metric]')].filter((one) => !one.hidden).map((one) => one.textContent)"
    assert "eval: eval_accuracy" in tab.run(shown)[0]
    tab.run("document.getElementById('metric').focus()")
    tab.press("ArrowDown")
    assert tab.run(MEANS) != first
    assert len(tab.run(shown)) == 1
    assert "eval: eval_accuracy" not in tab.run(shown)[0]


def test_every_control_is_reached_by_the_tab_key(tab: BrowserTab, page: Path) -> None:
    tab.open(page)
    there = (
        "[...document.querySelectorAll('a, select, input, summary, [tabindex]')].filter((one) => one.checkVisibility())"
    )
    wanted = tab.run(f"{there}.length")
    tab.run("window.reached = new Set()")
    for _ in range(wanted):
        tab.press("Tab")
        tab.run("window.reached.add(document.activeElement)")
    assert wanted >= 25
    assert tab.run(f"{there}.filter((one) => !window.reached.has(one)).map((one) => one.outerHTML)") == []


def test_the_slider_tells_the_values_at_a_step(tab: BrowserTab, page: Path) -> None:
    tab.open(page)
    end = tab.run(MEANS)
    tab.run("document.getElementById('step').focus()")
    tab.press("Home")
    assert tab.run("document.getElementById('at').textContent") == "30"
    assert tab.run("document.getElementById('step').getAttribute('aria-valuetext')") == "step 30"
    assert all(float(first) < float(last) for first, last in zip(tab.run(MEANS), end, strict=True))


def test_lines_are_hidden_and_shown_and_the_axis_is_logarithmic_by_the_space_bar(tab: BrowserTab, page: Path) -> None:
    tab.open(page)
    for left in (3, 2, 1, 0):
        tab.run(f"document.querySelectorAll('#lines input')[{left}].focus()")
        tab.press("Space")
        assert tab.run("document.querySelectorAll('#chart path.line').length") == left
    assert tab.run("document.getElementById('nothing').hidden") is False
    tab.press("Space")
    before = tab.run("document.querySelector('#chart path.line').getAttribute('d')")
    tab.run("document.getElementById('log').focus()")
    tab.press("Space")
    assert tab.run("document.querySelector('#chart path.line').getAttribute('d')") != before
    tab.run("document.querySelectorAll('summary')[0].focus()")
    tab.press("Enter")
    assert tab.run("document.querySelectorAll('details')[0].open") is True


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_it_fits_the_screen_in_both_schemes(tab: BrowserTab, page: Path, scheme: str, width: int) -> None:
    tab.open(page, width=width, scheme=scheme)
    assert tab.run("document.scrollingElement.scrollWidth") <= width
    paper = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, paper[4:-1].split(","))) > 200) == (scheme == "light")
    assert tab.run("document.querySelector('#chart svg').getBoundingClientRect().width") <= width


def test_hostile_words_stay_words(tab: BrowserTab, tmp_path: Path) -> None:
    tab.open(written(with_words(tmp_path, MARKUP)))
    assert tab.run("document.title") == "a sweep: report"
    assert tab.run("document.querySelectorAll('h1, main, script').length") == 4
    assert tab.run("document.querySelectorAll('img, form, iframe, [onerror], [onfocus], [style]').length") == 0
    for i in range(tab.run("document.getElementById('metric').length")):
        tab.run(f"document.getElementById('metric').value = {i}")
        tab.run("document.getElementById('metric').dispatchEvent(new Event('change'))")
    assert tab.run("document.querySelectorAll('h1, main, script').length") == 4
