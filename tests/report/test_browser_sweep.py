"""The page of a sweep in a real browser: by mouse and keyboard, on a telephone, in print, large, with hostile names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import BrowserTab, browser_tab
from sweep_fixtures import CELLS, EXPERIMENTS, MadeCell, judge_the_paper, make_sweep, many_experiments
from test_browser import browser  # noqa: F401

from sinklab.report.page import write_report

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>"
MB = 2**20
OPENS_IN = 2.0  # seconds, on a machine that does nothing else
SLOWER = 10  # times as long on a busy one
BRING_NEAR = (
    "(async () => { for (const one of document.querySelectorAll('.chart')) {"
    " one.scrollIntoView(); await new Promise(requestAnimationFrame); } })()"
)
UNFOLD = "document.querySelectorAll('details').forEach((one) => (one.open = true))"


@pytest.fixture(scope="module")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([judge_the_paper(make_sweep(tmp_path_factory.mktemp("sweep") / "tiny"))])


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiments, cells = many_experiments()
    return write_report([make_sweep(tmp_path_factory.mktemp("large") / "tiny", experiments, cells)])


@pytest.fixture
def tab(browser: str, tmp_path: Path) -> Iterator[BrowserTab]:  # noqa: F811
    with browser_tab(browser, tmp_path / "profile") as tab:
        yield tab


def column(tab: BrowserTab, number: int) -> list[str]:
    """The texts of a column of the leaderboard, from above."""
    cells = (
        f"[...document.querySelectorAll('.board tbody tr')].map((row) => row.cells[{number}].firstChild.textContent)"
    )
    return tab.evaluate(cells)


def sorted_by(tab: BrowserTab) -> list[str | None]:
    return tab.evaluate("[...document.querySelectorAll('.board thead th')].map((head) => head.ariaSort)")


def test_the_page_makes_no_requests_and_logs_no_errors_or_warnings(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page)
    tab.evaluate(UNFOLD)
    tab.evaluate(BRING_NEAR)
    tab.until("document.querySelectorAll('.chart').length === document.querySelectorAll('.chart svg.marks').length")
    assert tab.complaints == []
    assert tab.requests == [sweep_page.as_uri()]


def test_experiments_are_folded_and_a_link_unfolds_the_one_it_leads_to(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page)
    opened = "[...document.querySelectorAll('details[open]')].map((one) => one.querySelector('h2, h3').id)"
    assert tab.evaluate(opened) == []
    height = tab.evaluate("document.documentElement.scrollHeight")
    tab.evaluate("location.hash = 'experiment-table_6'")  # folded within the experiments that are not run
    tab.until("document.querySelector('#experiment-table_6').closest('details').open")
    assert tab.evaluate(opened) == ["not-run", "experiment-table_6"]
    tab.click("a[href='#experiment-table_4']")
    tab.until("document.querySelector('#chart-table_4-numbers-0 svg.marks')")
    assert tab.evaluate(opened) == ["experiment-table_4", "not-run", "experiment-table_6"]
    drawn = "document.querySelector('#chart-table_4-numbers-0 svg.marks').getBoundingClientRect().width"
    assert tab.evaluate(drawn) > 200  # it had no width while it was folded away
    assert tab.evaluate("document.documentElement.scrollHeight") > height


def test_the_leaderboard_shows_cells_by_their_names_and_keeps_its_heading(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page)
    rows = "[...document.querySelectorAll('.board tbody tr')].filter((one) => !one.hidden)"
    shown = f"{rows}.map((one) => one.cells[0].innerText)"
    everything = tab.evaluate(shown)
    typed = (
        "const one = document.querySelector('.filter input'); one.value = 'SIG'; one.dispatchEvent(new Event('input'))"
    )
    tab.evaluate(typed)
    assert tab.evaluate(shown) == ["sigmoid"]
    tab.evaluate(typed.replace("SIG", "").replace("const one", "var two").replace("one.", "two."))
    assert tab.evaluate(shown) == everything
    tab.evaluate("document.querySelector('.leaderboard .scroll').style.maxHeight = '10rem'")
    top = "document.querySelector('.board thead th').getBoundingClientRect().top"
    within = "document.querySelector('.leaderboard .scroll')"
    tab.evaluate(f"{within}.scrollTop = 100")
    assert tab.evaluate(f"{within}.scrollTop") > 50
    assert abs(tab.evaluate(f"{top} - {within}.getBoundingClientRect().top")) < 2


def test_at_a_glance_a_statement_is_a_row_or_on_a_telephone_a_block(tab: BrowserTab, sweep_page: Path) -> None:
    across = (
        "[...document.querySelectorAll('.glance tbody:nth-of-type(3) tr:first-child > *')]"
        ".map((one) => Math.round(one.getBoundingClientRect().left))"
    )
    tab.open(sweep_page)
    assert len(set(tab.evaluate(across))) == 5
    tab.open(sweep_page, width=390)
    assert len(set(tab.evaluate(across))) == 1


def test_the_leaderboard_is_sorted_by_click_numerically_with_missing_values_last(
    tab: BrowserTab, sweep_page: Path
) -> None:
    tab.open(sweep_page)
    bias = 4
    for expected, state in ((False, "ascending"), (True, "descending")):
        tab.click(f".board thead th:nth-child({bias + 1}) button")
        shown = column(tab, bias)
        numbers = [float(text) for text in shown if text != "–"]
        assert len(numbers) == 2
        assert numbers == sorted(numbers, reverse=expected)
        assert shown[2:] == ["–"] * 3
        assert sorted_by(tab)[bias] == state
        assert sum(one is not None for one in sorted_by(tab)) == 1
    tab.click(".board thead th:nth-child(1) button")
    names = column(tab, 0)
    assert names == sorted(names)


def test_the_leaderboard_is_sorted_by_keyboard(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page)
    tab.evaluate("document.querySelector('.board thead th:nth-child(2) button').focus()")
    tab.press("Tab")
    tab.press("Tab")
    tab.press("Enter")
    assert sorted_by(tab)[3] == "ascending"
    tab.press(" ")
    assert sorted_by(tab)[3] == "descending"
    numbers = [float(text) for text in column(tab, 3) if text != "–"]
    assert numbers == sorted(numbers, reverse=True)


def test_a_point_says_its_seed_and_value_and_leads_to_its_recipe(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page)
    tab.evaluate("location.hash = 'experiment-table_4'")
    tab.until("document.querySelector('#chart-table_4-numbers-0 svg.marks')")
    point = "#chart-table_4-numbers-0 path[aria-label*='seed: 0']"
    tab.hover(point)
    tab.until("document.querySelector('#vg-tooltip-element.visible')")
    said = tab.evaluate("document.querySelector('#vg-tooltip-element').innerText")
    assert re.search(r"cell\W+softmax\W+seed\W+0\W+value\W+\d+\.\d\d", said)
    names = "[...document.querySelectorAll('#vg-tooltip-element td.key')].map((one) => getComputedStyle(one).display)"
    assert set(tab.evaluate(names)) == {"table-cell"}  # names and values are two columns
    tab.click(point)
    tab.until_asked_for("/recipe.yaml")
    recipe = Path(unquote(urlsplit(tab.requests[-1]).path))
    assert recipe.is_file()
    assert recipe.parent.name.startswith("softmax-")


def test_every_recipe_link_of_the_page_leads_to_a_file(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page)
    links = tab.evaluate("[...document.querySelectorAll('.cell a')].map((one) => one.href)")
    assert len(links) > 20
    assert all(Path(unquote(urlsplit(link).path)).is_file() for link in links)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_no_wider_than_the_window(tab: BrowserTab, sweep_page: Path, width: int) -> None:
    tab.open(sweep_page, width=width)
    tab.evaluate(UNFOLD)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_the_first_column_stays_where_it_is_while_the_board_is_scrolled(tab: BrowserTab, sweep_page: Path) -> None:
    tab.open(sweep_page, width=390)
    left = "document.querySelector('.board tbody th').getBoundingClientRect().left"
    before = tab.evaluate(left)
    tab.evaluate("document.querySelector('.leaderboard .scroll').scrollLeft = 300")
    assert tab.evaluate(left) == before
    assert tab.evaluate("document.querySelector('.board tbody td').getBoundingClientRect().left") < 0


def test_a_large_page_is_small_and_opens_at_once(tab: BrowserTab, large_page: Path) -> None:
    assert large_page.stat().st_size < 5 * MB
    tab.open(large_page)
    timing = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd / 1000"
    loaded, drawn = tab.evaluate(timing), tab.evaluate("performance.now() / 1000")
    size = large_page.stat().st_size / MB
    print(f"{size:.2f} MB, DOMContentLoaded after {loaded:.2f} s, first charts drawn by {drawn:.2f} s")
    assert drawn < OPENS_IN * SLOWER
    assert tab.complaints == []


def test_charts_of_a_large_page_are_drawn_when_they_are_scrolled_near(tab: BrowserTab, large_page: Path) -> None:
    tab.open(large_page)
    last = "#chart-experiment_59-numbers-3"
    tab.evaluate(UNFOLD)
    assert tab.evaluate(f"document.querySelector('{last}').childElementCount") == 0
    tab.show(last)
    tab.until(f"document.querySelector('{last} svg.marks')")


def test_print_shows_unfolded_sections_with_their_charts(tab: BrowserTab, large_page: Path, tmp_path: Path) -> None:
    tab.open(large_page)
    tab.evaluate("document.querySelector('details.experiment').open = true")
    shown = "[...document.querySelectorAll('.chart')].filter((one) => !one.closest('details:not([open])'))"
    folded = "document.querySelectorAll('details:not([open]):not(.vega-embed details)').length"
    tab.evaluate(
        f"window.before = {folded};"
        f"addEventListener('afterprint', () => (window.atPrint = [{folded},"
        f" {shown}.filter((one) => one.querySelector('svg.marks')).length, {shown}.length]))"
    )
    tab.printed(tmp_path / "page.pdf")
    tab.until("window.atPrint")
    still_folded, drawn, charts = tab.evaluate("window.atPrint")
    assert still_folded == tab.evaluate("window.before") > 50
    assert drawn == charts > 3
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes()))
    assert 1 < pages < 20


def test_hostile_names_do_no_harm_in_tables_charts_tooltips_and_links(tab: BrowserTab, tmp_path: Path) -> None:
    title = {"title": HOSTILE, "question": HOSTILE, "source": HOSTILE, "adapted": [HOSTILE]}
    experiment = EXPERIMENTS["table_4"].model_copy(update={**title, "cells": [HOSTILE, "k_biases"]})
    cells = {**CELLS, HOSTILE: MadeCell((18.0, None, 6.2, 2.84), {HOSTILE: HOSTILE})}
    page = write_report([make_sweep(tmp_path / "tiny", {HOSTILE: experiment, "mitigations": experiment}, cells)])
    policy = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    page.write_text(policy, encoding="utf-8")  # names are harmless even without the content policy
    tab.open(page)
    tab.evaluate(UNFOLD)
    tab.show(".experiment .chart")
    tab.until("document.querySelector('.experiment .chart path[aria-label*=\"seed: 0\"]')")
    tab.hover(".experiment .chart path[aria-label*='seed: 0']")
    tab.until("document.querySelector('#vg-tooltip-element.visible')")
    assert HOSTILE in tab.evaluate("document.querySelector('#vg-tooltip-element').innerText")
    drawn = tab.evaluate("document.querySelector('.experiment .chart svg').textContent")
    assert HOSTILE.replace(" ", "") in drawn.replace(" ", "")  # a name in lines
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.complaints == []
    links = tab.evaluate("[...document.querySelectorAll('.cell a')].map((one) => one.href)")
    assert json.dumps(links).count("alert") > 0
    assert all(Path(unquote(urlsplit(link).path)).is_file() for link in links)
