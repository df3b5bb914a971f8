"""The theme of all charts: palette and configuration.

Text, axes and grid lines use `currentColor`, so that one chart works on light and dark pages and in print. Data marks
and reference lines have fixed colours. Chart files use dark text on white.
"""

from typing import Any

# Okabe and Ito's colour-blind-safe palette with a lighter blue, and without black and yellow, which are unreadable on a
# dark and on a light background. The last six colours are additional ones for experiments with many cells.
PALETTE = [
    "#1F83C4",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C6BB1",
    "#8A9A2B",
    "#B03A5B",
    "#4FB3A5",
    "#7F7F7F",
    "#A6761D",
]
HEAT_SCHEME = "viridis"
REFERENCE = "#8a8f98"  # dashed reference lines; readable on light and dark
DIVERGING_SCHEME = "blueorange"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
INK_ON_PAPER = "#1d2430"


def colours(cells: list[str]) -> dict[str, str]:
    """Return the colour of each cell by name: the palette in the order of `cells`, repeated if there are more cells."""
    return {cell: PALETTE[index % len(PALETTE)] for index, cell in enumerate(cells)}


def config(ink: str = "currentColor", background: str = "transparent", font: str = FONT) -> dict[str, Any]:
    """Build the Vega-Lite `config` shared by all charts, with text and axes in the colour `ink`."""
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    lines = {"gridColor": ink, "gridOpacity": 0.13, "domainColor": ink, "domainOpacity": 0.5}
    ticks = {"tickColor": ink, "tickOpacity": 0.5, "titlePadding": 8, "labelPadding": 4, "labelOpacity": 0.85}
    above = {"direction": "vertical", "anchor": "start", "margin": 2}
    legend = {"labelLimit": 260, "titleLimit": 320, "symbolStrokeWidth": 2.5, "layout": {"top": above}}
    title = {"fontSize": 14, "fontWeight": 600, "anchor": "start", "offset": 10}
    return {
        "background": background,
        "font": font,
        "view": {"stroke": None},
        "axis": {**text, **lines, **ticks},
        "legend": {**text, **legend},
        "title": {"color": ink, "subtitleColor": ink, **title},
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": ink},
        "line": {"strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round"},
        "point": {"filled": True, "size": 42},
    }


def on_paper() -> dict[str, Any]:
    """Build the configuration of chart files and notebook charts: dark text on white, in a widely available font."""
    return config(INK_ON_PAPER, "white", "DejaVu Sans, Liberation Sans, sans-serif")
