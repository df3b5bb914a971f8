"""Jinja2 templates of the page, captions and README.md, a measurement as HTML for notebooks, and the theme of charts.

In charts, text, axes and grid lines use `currentColor`, so that one chart works on light and dark pages and in print.
Data marks and reference lines have fixed colours. Chart files use dark text on white.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from sinklab.experiments.documents import VERDICTS
from sinklab.measuring.answer import answer
from sinklab.measuring.measurement import Measurement
from sinklab.report.result_tables import measurement_facts, measurement_tables, measurement_title
from sinklab.tables import SINK_1, counted, escaped, markdown

BREAKS = re.compile(r"(?<=[_/])(?=\w)")


@cache
def templates() -> jinja2.Environment:
    """Return the Jinja2 environment of the page's templates, with autoescaping of all values except `Markup`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sinklab.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"verdict_class": verdict_class, "html_text": html_text}
    return environment


@cache
def texts() -> jinja2.Environment:
    """Return the Jinja2 environment of texts that are not HTML: captions and README.md; values are not escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sinklab.report"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"escaped": escaped, "markdown": markdown}
    environment.globals["counted"] = counted  # pyrefly: ignore[unsupported-operation]
    return environment


@cache
def _captions() -> Any:
    return texts().overlay(trim_blocks=False).get_template("captions.j2").module


def caption(name: str, **values: object) -> str:
    """Return the caption with this name in `templates/captions.j2`."""
    return " ".join(getattr(_captions(), name)(**values).split())


def template_text(name: str) -> str:
    """Return the text of a file in `templates/`, such as a script or a style sheet."""
    return (files("sinklab.report") / "templates" / name).read_text(encoding="utf-8")


def html_text(text: str) -> Markup:
    """Escape a text for HTML, with a subscript in `Sink_1` and optional line breaks (`<wbr>`) after `_` and `/`."""
    plain = text.replace("Sink_1", SINK_1)
    return Markup("<wbr>").join(BREAKS.split(plain))


def verdict_class(verdict: str) -> str:
    """Return the CSS class of a verdict's badge; `inconclusive` for an unknown verdict."""
    return verdict.replace(" ", "-") if verdict in VERDICTS else "inconclusive"


def html(m: Measurement) -> str:
    """Render a measurement (facts, answer, tables, notes) as an HTML fragment without scripts or external resources."""
    draw = templates().get_template("table.html.j2").module.draw  # type: ignore[attr-defined]
    texts = (measurement_title(m), ", ".join(measurement_facts(m)), " ".join(answer(m)))
    parts = [Markup("<p><b>{}</b><br>{}</p><p>{}</p>").format(*texts), *map(draw, measurement_tables(m))]
    parts += [] if m.fed is None else [Markup("<p>{}</p>").format(m.fed.line())]
    return str(Markup("").join([*parts, *(Markup("<p>note: {}</p>").format(note) for note in m.notes)]))


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
VERDICT_COLOURS = {"safe": PALETTE[2], "undecided": "#8a8f98", "not safe": PALETTE[1]}
"""Colours of the verdicts on settings of an assessment."""
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
