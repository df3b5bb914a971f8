"""Jinja2 templates of the page, captions and README.md, with their filters, and a measurement as HTML for notebooks."""

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
