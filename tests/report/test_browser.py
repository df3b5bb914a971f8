"""The report in a real browser: every chart is drawn, nothing fails, nothing hostile runs."""

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from report_fixtures import make_lab, make_run

from sinklab.report.page import write_report

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ATTACK = "document.body.dataset.owned=1"
HOSTILE = f'<img src=x onerror="{ATTACK}"><script>{ATTACK}</script>'
HOVER = """<script type="module">
if (!document.body.dataset.charts)
  await new Promise((done) => new MutationObserver(done).observe(document.body, { attributeFilter: ["data-charts"] }));
const point = document.querySelector("#chart-sink-by-step-0 .mark-symbol.role-mark path");
const { left, top } = point.getBoundingClientRect();
for (const kind of ["pointerover", "pointermove", "mouseover", "mousemove"])
  point.dispatchEvent(new PointerEvent(kind, { bubbles: true, clientX: left + 2, clientY: top + 2 }));
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip(f"no browser: install one of {', '.join(BROWSERS)} (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run = make_run(folder / "run", name=HOSTILE)
    return write_report([make_lab(folder / "lab", hostile=True), run], out=folder / "report.html")


@pytest.fixture(scope="module")
def dom(browser: str, hostile_page: Path) -> str:
    return visit(browser, hostile_page, "--dump-dom").stdout


def visit(browser: str, page: Path, *what: str) -> subprocess.CompletedProcess[str]:
    profile = page.parent / "profile"
    settings = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
    place = (f"--user-data-dir={profile}", "--window-size=1000,1600", "--virtual-time-budget=10000")
    command = [browser, *settings, *place, *what, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_every_chart_becomes_a_drawing(dom: str) -> None:
    assert 'data-charts="drawn"' in dom
    places = re.split(r'<div class="chart[ "]', dom)[1:]
    lines, heatmaps, norms = 4, 2 * 4, 3
    assert len(places) == lines + heatmaps + norms
    assert all(re.search(r'<svg[^>]*class="marks"', place) for place in places)


def test_no_chart_reports_an_error(dom: str) -> None:
    assert 'class="chart-error"' not in dom


def test_the_browser_console_stays_empty(browser: str, hostile_page: Path) -> None:
    assert "CONSOLE" not in visit(browser, hostile_page, "--dump-dom").stderr


def test_a_hostile_name_is_visible_and_does_not_run(dom: str) -> None:
    assert "&lt;img src=x" in dom
    assert re.search(r"<body[^>]*>", dom)
    assert not re.search(r"<body[^>]*data-owned", dom)


def test_a_hostile_name_does_not_run_in_a_tooltip_even_without_the_content_policy(browser: str, tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", name=HOSTILE)])
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    before, end, after = text.rpartition("</body>")
    page.write_text(before + HOVER + end + after, encoding="utf-8")
    dom = visit(browser, page, "--dump-dom").stdout
    tooltip = dom[dom.index('id="vg-tooltip-element"') :]
    assert "&lt;img src=x" in tooltip
    assert not re.search(r"<body[^>]*data-owned", dom)


@pytest.mark.parametrize("size", ["1000,1600", "420,1600"])
def test_the_page_is_not_blank(browser: str, hostile_page: Path, tmp_path: Path, size: str) -> None:
    picture = tmp_path / "page.png"
    visit(browser, hostile_page, f"--window-size={size}", f"--screenshot={picture}")
    assert share_of_rows_with_ink(picture.read_bytes()) > 0.3


@pytest.mark.parametrize(("width", "says_so"), [(1280, False), (390, True)])
def test_a_table_that_is_wider_than_the_screen_says_that_it_scrolls(
    browser: str, hostile_page: Path, width: int, says_so: bool
) -> None:
    dom = visit(browser, hostile_page, f"--window-size={width},1600", "--dump-dom").stdout
    assert ('class="scroll wider"' in dom) == says_so


def share_of_rows_with_ink(png: bytes) -> float:
    """The share of pixel rows with more than a flat colour in them, of an 8-bit, non-interlaced PNG."""
    width, height, _, colour = struct.unpack(">IIBB", png[16:26])
    packed, at = b"", 8
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += length + 12
    row = 1 + width * {2: 3, 6: 4}[colour]
    data = zlib.decompress(packed)
    return sum(len(set(data[y * row + 1 : (y + 1) * row])) > 4 for y in range(height)) / height
