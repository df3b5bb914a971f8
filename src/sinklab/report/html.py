"""The report as one HTML file that needs no network.

The charts are drawn in the reader's browser by Vega, whose code is embedded once. Names and texts come from
models and files and are not trusted: Jinja2 escapes them in the page, `json_for_script` in the data, Vega draws
them as text, and the page's own content policy runs no script but the two whose hashes it carries.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import vl_convert as vlc
import yaml
from markupsafe import Markup

import sinklab
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import verdict_counts
from sinklab.files import cache_folder, write_text
from sinklab.outputs import REPORT, REPORT_MARK, check_report
from sinklab.report import charts, theme
from sinklab.report.collect import collect
from sinklab.report.data import ReportData, ReportedRun
from sinklab.report.experiments.glance import forests, glance
from sinklab.report.experiments.sections import board_sections, experiment_sections, grouped
from sinklab.report.experiments.sweeps import Sweep, origins
from sinklab.report.export import export_charts
from sinklab.report.figures import figures
from sinklab.report.summary import headline
from sinklab.report.tables import assessment_table, cells_table, tables, templates

SNIPPET = "window.vegaEmbed = vegaEmbed;"


def write_report(dirs: list[Path], out: Path | None = None, formats: tuple[str, ...] = ()) -> Path:
    """Draw the report of all runs, measurements and experiments in `dirs`.

    Args:
        out: the HTML file, by default `report.html` in the first directory.
        formats: also write every chart as a file of these formats ("svg", "pdf", "png") into `charts/` beside it.

    Returns:
        The path of the HTML file.

    Raises:
        InputError: nothing to report on, a damaged file, an unknown format, or a file that no report is to replace.
        SinklabError: the report cannot be written.
    """
    data = collect(dirs)
    target = out or dirs[0] / REPORT
    check_report(target)
    if formats:
        export_charts(data, target.parent / "charts", formats)
    write_text(target, render(data, target.parent, datetime.now(UTC)))
    return target


def render(data: ReportData, page: Path, written: datetime | None) -> str:
    """The whole page as text.

    Args:
        page: the folder of the page, from which links lead to runs.
        written: what it says about when it was drawn, if anything.

    Raises:
        InputError: the metrics of a run are damaged.
    """
    drawn, experiments = figures(data), experiment_sections(data.sweeps, page)
    compared, boards = forests(data.sweeps, page, "container"), board_sections(data.sweeps, "container")
    charted = [
        *compared,
        *(board.figure for board in boards if board.figure),
        *(one for shown in experiments for one in shown.figures),
        *drawn,
    ]
    cells = [cells_table(data)] if data.cells else []
    assessed = [
        assessment_table(one.document, f"Costs and benefits of the sink: {one.name}", f"assessment-{number}")
        for number, one in enumerate(data.assessed)
    ]
    scripts = [vega_bundle(), *(_template(name) for name in ("report.js", "board.js"))]
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            title=_title(data),
            mark=Markup(REPORT_MARK),
            headline=headline(data),
            claims=data.claims,
            verdicts=_verdict_counts(data),
            lines=glance(data.sweeps),
            forests=compared,
            origins=origins(data.sweeps),
            boards=boards,
            experiments=experiments,
            groups=grouped(experiments),
            ours=charts.OURS,
            paper=charts.PAPER,
            notes=[*((data.label(run), note) for run in data.runs for note in run.notes), *data.failures],
            tables=[*cells, *tables(data), *assessed],
            swatches=theme.colours(data.cells),
            figures=drawn,
            charts=Markup(json_for_script(_charts_document(charted))),
            scripts=[Markup(script) for script in scripts],
            style=Markup(_template("report.css") + _template("experiments.css")),
            policy=content_policy(scripts),
            runs=[_provenance(data, run, page) for run in data.runs],
            written=written.strftime(" %Y-%m-%d %H:%M UTC") if written else "",
            version=sinklab.__version__,
        )
    )


def _template(name: str) -> str:
    return (files("sinklab.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def vega_bundle() -> str:
    """The code of Vega, Vega-Lite and Vega-Embed as one script that sets `window.vegaEmbed`.

    Bundling takes longer than all the rest of a small page, so the script is kept in the cache, for this version; where
    nothing can be written there, it is bundled in every process.
    """
    asked = hashlib.sha256(SNIPPET.encode()).hexdigest()[:8]
    name = f"vega-{version('vl-convert-python')}-{asked}.js"
    try:
        bundle = (cache_folder() / name).read_text(encoding="utf-8")
    except (InputError, OSError, UnicodeDecodeError):
        bundle = ""
    if not bundle:
        bundle = vlc.javascript_bundle(snippet=SNIPPET)
        with suppress(SinklabError):
            write_text(cache_folder() / name, bundle)
    assert "</script" not in bundle.lower(), "the bundle would end its own script element"
    return bundle


def json_for_script(document: object) -> str:
    """JSON that is safe inside a script element: no character that HTML gives a meaning to is left in it.

    Raises:
        ValueError: the document holds NaN or an infinity.
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_policy(scripts: list[str]) -> str:
    """A content security policy that runs only `scripts` (by their hashes) and loads nothing from anywhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _charts_document(drawn: list[charts.Figure]) -> dict[str, object]:
    specs = {}
    for figure in drawn:
        for index, chart in enumerate(figure.charts):
            spec = chart.to_dict(validate=False)
            spec.pop("config", None)
            spec.pop("$schema", None)
            specs[f"{figure.key}-{index}"] = spec
    return {"config": theme.config(), "specs": specs}


def _title(data: ReportData) -> str:
    """Sweeps by what is in them, so that a copied or renamed folder keeps its title; others by their directory."""
    swept = {sweep.top: _sweep_title(sweep) for sweep in data.sweeps}
    titles = [swept.get(path) or path.resolve().name or str(path) for path in data.dirs]
    return ", ".join(dict.fromkeys(titles))


def _sweep_title(sweep: Sweep) -> str:
    if len(sweep.experiments) == 1:
        return next(iter(sweep.experiments))
    return f"experiments at scale {sweep.summary.scale}" if sweep.summary.scale in SCALES else ""


def _verdict_counts(data: ReportData) -> list[tuple[str, dict[str, dict[str, int]]]]:
    """Of every scale, how often there is each verdict, confirmatory and exploratory claims apart."""
    claims = [*data.claims, *(claim for sweep in data.sweeps for claim in sweep.summary.claims if claim.experiment)]
    scales = dict.fromkeys(claim.scale for claim in claims)
    return [(scale, verdict_counts([claim for claim in claims if claim.scale == scale])) for scale in scales]


@dataclass(frozen=True)
class Provenance:
    """The provenance of a run: its directory, recipe, seed, versions and machine, as texts."""

    name: str
    path: str
    settings: dict[str, str]
    environment: dict[str, str]
    recipe: str


def _provenance(data: ReportData, run: ReportedRun, page: Path) -> Provenance:
    one, env = run.measurement, run.env
    settings: dict[str, object] = {}
    if one is not None:
        settings = {"model": one.model, "revision": one.revision, "commit": one.commit, "inputs": one.inputs}
        settings |= {"sequences": one.sequences, "length": one.length, "bos": one.bos}
    settings |= {
        "seed": run.seed,
        "steps": f"{run.steps_done or 0} of {run.planned_steps}" if run.trained else None,
        "run hash": env.get("hash"),
        "backend": one.backend if one else env.get("backend"),
        "dtype": one.dtype if one else env.get("dtype"),
        "device": env.get("device"),
    }
    recipe = yaml.safe_dump(run.recipe.values, sort_keys=False, allow_unicode=True) if run.recipe else ""
    return Provenance(
        data.label(run), str(_below(run.path, page)), _plain_values(settings), _plain_values(run.env), recipe
    )


def _below(path: Path, page: Path) -> Path:
    """From the page's folder, where it lies below that: a page and its runs may be moved together."""
    return path.relative_to(page) if path != page and path.is_relative_to(page) else path


def _plain_values(values: Mapping[str, object]) -> dict[str, str]:
    return {key: _plain(value) for key, value in values.items() if value is not None}


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
