"""Every kind of report: axe-core, keyboard, narrow screens; the maps of --explore by mouse, keys and address."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe import grave_findings
from browser import BrowserTab, browser_tab
from made_assessment import make_assessment
from own_models import own_model, own_tokens
from report_fixtures import make_lab
from sweep_fixtures import judge_the_paper, make_sweep
from test_browser import browser  # noqa: F401
from test_browser_sweep import BRING_NEAR, UNFOLD

from sinklab.files import write_json
from sinklab.measuring.measurement import Measurement
from sinklab.report.page import write_report
from sinklab.survey.api import measure
from sinklab.survey.measure import Outcome
from sinklab.survey.suites import Survey

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>"
KINDS = ("measure", "details", "explore", "compare", "domains", "assess", "sweep", "lab")
SHOWN = "document.querySelector('.explore .place').textContent"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of report, by its name."""
    top = tmp_path_factory.mktemp("pages")
    options: dict[str, dict[str, Any]] = {
        "measure": {},
        "details": {"details": True, "maps": [(1, 1)], "ablate": ["mask_first:1"]},
        "explore": {"explore": True},
    }
    for kind, given in options.items():
        found = measure(own_model("softmax"), own_tokens(), model_name=f"a_{kind}_model", **given)
        if found.explored is not None:
            found = found.model_copy(update={"explored": found.explored.with_texts(lambda ids: f"{HOSTILE}{ids}")})
        found.save(top / kind)
    measured = {
        name: measure(own_model("softmax"), own_tokens(), model_name=name) for name in ("one_text", "two_texts")
    }
    documents = {name: one.document() for name, one in measured.items()}
    for kind, document in (
        ("compare", Survey("models", {"text": "text"}, Outcome(measured)).document()),
        ("domains", {"schema": 1, "model": "a_model", "domains": documents}),
    ):
        for name, one in measured.items():
            one.save(top / kind / name)
        write_json(top / kind / ("comparison.json" if kind == "compare" else "domains.json"), document)
    make_assessment(top / "assess")
    judge_the_paper(make_sweep(top / "sweep"))
    make_lab(top / "lab", seeds=2)
    return {kind: write_report([top / kind]) for kind in KINDS}


@pytest.fixture(scope="module")
def tab(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserTab]:  # noqa: F811
    with browser_tab(browser, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", KINDS)
def test_no_finding_of_axe_is_serious_and_nothing_is_wider_than_the_screen(
    tab: BrowserTab, pages: dict[str, Path], kind: str, width: int
) -> None:
    tab.complaints.clear()
    tab.open(pages[kind], width=width)
    if kind == "explore":
        tab.until("document.body.dataset.explorers === 'ready'")
    tab.evaluate(UNFOLD)
    tab.evaluate(BRING_NEAR)
    tab.until("document.querySelectorAll('.chart').length === document.querySelectorAll('.chart svg.marks').length")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert grave_findings(tab) == []
    assert tab.complaints == []


def test_points_are_reached_and_read_by_keyboard(tab: BrowserTab, pages: dict[str, Path]) -> None:
    tab.open(pages["measure"])
    chart = "#chart-importance-heads-0"
    reached = f"document.querySelectorAll('{chart} .role-mark [tabindex=\"0\"]').length"
    assert tab.evaluate(reached) == 1
    tab.evaluate(f"document.querySelector('{chart} .role-mark [tabindex]').focus()")
    focused = "document.activeElement.getAttribute('aria-label')"
    first = re.fullmatch(r"layer: 1; head: 1; importance: (0\.\d{4})", tab.evaluate(focused))
    assert first
    tab.until("document.querySelector('#vg-tooltip-element.visible')")
    assert first[1] in tab.evaluate("document.querySelector('#vg-tooltip-element').innerText")
    tab.press("ArrowRight")
    assert tab.evaluate(focused).startswith("layer: 1; head: 2;")
    tab.press("ArrowUp")
    assert tab.evaluate(focused).startswith("layer: 2; head: 2;")
    assert tab.evaluate(reached) == 1


def test_heads_are_explored_by_click_and_keys_and_the_address_holds_the_place(
    tab: BrowserTab, pages: dict[str, Path]
) -> None:
    tab.requests.clear()
    tab.open(pages["explore"])
    tab.until("document.body.dataset.explorers === 'ready'")
    tab.click("#chart-importance-heads-0 [aria-label^='layer: 1; head: 3']")
    assert tab.evaluate(SHOWN).startswith("Layer 1, head 3:")
    tab.press("ArrowUp")
    tab.press("ArrowRight")
    assert tab.evaluate(SHOWN).startswith("Layer 2, head 4:")
    tab.press("ArrowUp")  # there is no third layer
    assert tab.evaluate(SHOWN).startswith("Layer 2, head 4:")
    tab.click(".explore .tokens li:nth-child(5) button")
    assert tab.evaluate("location.hash") == "#explore-0-2.4-5"
    tab.press("ArrowLeft")
    assert tab.evaluate("document.querySelector('.reading').textContent").startswith(f"Query 4 “{HOSTILE}")
    assert tab.evaluate("location.hash") == "#explore-0-2.4-4"
    tab.evaluate("location.hash = '#explore-0-1.2-3'")
    tab.until(f"{SHOWN}.startsWith('Layer 1, head 2:')")
    tab.until("document.querySelector('.reading').textContent.startsWith('Query 3 ')")
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.requests == [pages["explore"].as_uri()]


def test_an_attention_map_in_the_page_equals_the_measured_one(tab: BrowserTab, pages: dict[str, Path]) -> None:
    explored = Measurement.load(pages["explore"].parent).explored
    assert explored is not None
    tab.open(pages["explore"])
    tab.until("document.body.dataset.explorers === 'ready'")
    tab.evaluate("location.hash = '#explore-0-2.3-6'")
    tab.until(f"{SHOWN}.startsWith('Layer 2, head 3:')")
    said = tab.evaluate("[...document.querySelectorAll('.tokens button')].map((one) => one.getAttribute('aria-label'))")
    shares = [float(re.search(r"attention ([\d.]+) %", one)[1]) / 100 for one in said]  # type: ignore[index]
    expected = (explored.attention[explored.heads.index((2, 3)), 5] / 255.0) ** 2
    assert np.abs(np.array(shares) - expected).max() < 0.006


def test_a_page_of_few_charts_is_printed_unfolded_and_folded_again(
    tab: BrowserTab, pages: dict[str, Path], tmp_path: Path
) -> None:
    tab.open(pages["details"])
    folded = "document.querySelectorAll('details:not([open], .vega-embed details)').length"
    tab.evaluate(f"window.before = {folded}; addEventListener('beforeprint', () => (window.atPrint = {folded}))")
    tab.printed(tmp_path / "page.pdf")
    assert tab.evaluate("window.atPrint") == 0 < tab.evaluate("window.before")
    tab.until(f"{folded} === window.before")


def test_the_contents_lead_to_every_section(tab: BrowserTab, pages: dict[str, Path]) -> None:
    tab.open(pages["measure"])
    links = tab.evaluate("[...document.querySelectorAll('.contents a')].map((one) => one.hash.slice(1))")
    heads = tab.evaluate("[...document.querySelectorAll('main h2')].map((one) => one.id)")
    assert links == [one for one in heads if one != "provenance"]
