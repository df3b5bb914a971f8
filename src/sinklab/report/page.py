"""Render the report as one self-contained HTML file, and export its charts.

The charts are drawn in the browser by Vega, whose code is embedded once. Names and texts come from models and files and
are not trusted: Jinja2 escapes them in the page and in the data, Vega draws them as text, and the page's content
security policy allows only the scripts whose hashes it lists.

Chart files are SVG and PDF for papers, and PNG for slides. A marker near the end of each file identifies it as written
by sinklab: a comment in SVG and PDF, a text chunk in PNG.
"""

import base64
import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vl_convert as vlc
import yaml
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

import sinklab
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import ANALYSES, verdict_counts
from sinklab.experiments.paper import statements
from sinklab.experiments.sweep.packed import CHECKSUMS
from sinklab.experiments.verdicts import RULE
from sinklab.files import (
    CHART,
    CHART_MARK,
    REPORT,
    REPORT_MARK,
    cache_folder,
    check_file,
    check_writable,
    write_text,
    written_aside,
)
from sinklab.measuring.answer import answer
from sinklab.report import charts
from sinklab.report import html as theme
from sinklab.report.cells import cells_table, headline
from sinklab.report.charts import Figure
from sinklab.report.collect import collect
from sinklab.report.data import ReportData, ReportedRun, model_label
from sinklab.report.figures import figures, leading_figures
from sinklab.report.html import template_text, templates
from sinklab.report.measurement_figures import explorers, tiles
from sinklab.report.result_tables import (
    answers_table,
    assessment_table,
    difference_sentence,
    settings_table,
    suite_tables,
)
from sinklab.report.sections import experiment_groups, experiment_sections, glance, leaderboard, sweep_sentences
from sinklab.report.sweep_figures import forests
from sinklab.report.sweeps import Sweep, origins, remarks_on_counts, subjects_of_claims
from sinklab.tables import Table

CHARTS = "charts"
"""Folder of the chart files, next to the page."""
SNIPPET = "window.vegaEmbed = vegaEmbed;"
OFFLINE: dict[str, Any] = {"allowed_base_urls": []}
"""Options of vl-convert that disallow loading data from URLs; chart data is inline."""
MOST_NAMED = 2
"""Maximum number of models named in the title of a page."""
EXPERIMENT_WIDTH = 420
"""Width in pixels of the charts of an experiment in chart files."""
PNG_END = 12
"""Length of the last chunk (IEND) of a PNG file in bytes."""

WRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "svg": lambda spec: vlc.vegalite_to_svg(spec, **OFFLINE).encode() + b"\n<!-- " + CHART_MARK + b" -->\n",
    "pdf": lambda spec: vlc.vegalite_to_pdf(spec, **OFFLINE) + b"\n% " + CHART_MARK + b"\n",
    "png": lambda spec: _marked_png(vlc.vegalite_to_png(spec, scale=2, **OFFLINE)),
}


def write_report(dirs: list[Path], out: Path | None = None, formats: Sequence[str] = ()) -> Path:
    """Read the results in `dirs` and write the report; see `collect` and `write_page` for arguments and errors."""
    return write_page(collect(dirs), out, formats)


def write_page(data: ReportData, out: Path | None = None, formats: Sequence[str] = ()) -> Path:
    """Write the report on results that have been read, and return the path of the HTML file.

    Args:
        out: path of the HTML file; default: `report.html` in the first directory.
        formats: formats ("svg", "pdf", "png") of chart files to write into `charts/` next to the HTML file.

    Raises:
        InputError: see `render` and `export_charts`; if the HTML file cannot be written, exists and was not written by
            sinklab, or is that of packed results, whose checksum would no longer agree.
        SinklabError: if a file cannot be written, or env.json of a run is damaged.
    """
    target = out or data.dirs[0] / REPORT
    if (target.parent / CHECKSUMS).is_file():
        raise InputError(f"{target.parent} has packed results with checksums: choose an --out in another folder")
    check_writable(target.parent)
    check_file(target, REPORT)
    if formats:
        export_charts(data, target.parent / CHARTS, formats)
    write_text(target, render(data, target.parent, datetime.now(UTC)))
    return target


def render(data: ReportData, page: Path, written: datetime | None) -> str:
    """Render the whole page as HTML.

    Args:
        page: folder of the page; links to runs are relative to it.
        written: date and time (UTC) shown in the footer; None omits them.

    Raises:
        InputError: if metrics.jsonl or assessment.json of a run cannot be read or is damaged.
        SinklabError: if env.json of a run cannot be read or is damaged.
    """
    drawn, experiments, lines = figures(data), experiment_sections(data.sweeps, page), glance(data.sweeps)
    compared, boards = forests(data.sweeps, page), _boards(data.sweeps)
    in_sections = [one for shown in experiments for one in shown.figures]
    answers: dict[str, Table] = {}
    every_change = []
    for number, one in enumerate(data.assessed):
        key, of = f"answers-{number}", data.of_model(one)
        if settings := one.settings():
            answers[f"settings-table-{number}"] = settings_table(one, settings, f"settings-table-{number}", of)
        answers[key] = answers_table(one, key, of)
        every_change.append(assessment_table(one, f"All changes{of}", f"assessment-{number}"))
    tables = [*([cells_table(data)] if data.cells and not data.sweeps else []), *suite_tables(data), *answers.values()]
    groups, explored = experiment_groups(experiments), explorers(data)
    leading = leading_figures(data, drawn)
    others = [figure for figure in drawn if figure.key not in {one.key for one in leading}]
    ranked = [table for table, _ in boards]
    charted = [*leading, *compared, *(figure for _, figure in boards if figure), *in_sections, *others]
    parts = [*leading, *explored, *compared, *ranked, *groups, *tables, *others, *every_change]
    contents = [(part.key, part.title) for part in parts]
    if lines:
        contents.insert(len(leading) + len(explored) + len(compared), ("glance", "The paper at a glance"))
    specs = {f"{one.key}-{at}": _page_spec(one, chart) for one in charted for at, chart in enumerate(one.charts)}
    own = [template_text(f"{name}.js") for name in ("report", "board", *["explore"] * bool(explored))]
    scripts = [vega_bundle(), *own]
    template = templates().get_template("report.html.j2")
    return template.render(
        title=_title(data),
        mark=Markup(REPORT_MARK),
        headline=lead(data),
        tiles=tiles(data),
        contents=contents,
        verdicts=_verdict_counts(data),
        lines=lines,
        unstated=[f"{n} {one.says}" for n, one in enumerate(statements(), 1) if n not in {x.number for x in lines}],
        forests=compared,
        origins=origins(data.sweeps),
        rule=RULE,
        boards=boards,
        experiments=experiments,
        groups=groups,
        ours=charts.OURS,
        paper=charts.PAPER,
        notes=data.notes,
        tables=tables,
        grouped=answers,
        folded=every_change,
        leading=leading,
        explorers=explored,
        explored=htmlsafe_json_dumps([one.data for one in explored], allow_nan=False, separators=(",", ":")),
        swatches=theme.colours(data.cells),
        figures=others,
        charts=htmlsafe_json_dumps({"config": theme.config(), "specs": specs}, allow_nan=False, separators=(",", ":")),
        scripts=[Markup(script) for script in scripts],
        style=Markup("".join(template_text(f"{name}.css") for name in ("report", "experiments", "explore"))),
        policy=content_policy(scripts),
        runs=[_provenance(data, run, page) for run in data.runs],
        written=written.strftime(" %Y-%m-%d %H:%M UTC") if written else "",
        version=sinklab.__version__,
    )


def lead(data: ReportData) -> list[str]:
    """Return the sentences at the top of the page: on sweeps, the recommendations of assessments, then the headline.

    If the only run of the report is a measured model, the answer of its measurement replaces the headline.
    """
    several = len(data.assessed) > 1
    answers = [
        sentence
        for one in data.assessed
        for sentence in (
            [f"{model_label(one.model)}: {' '.join([*one.recommendation(), *one.answer()])}"]
            if several
            else [*one.recommendation(), *one.answer()]
        )
    ]
    alone = len(data.measured) == len(data.runs) == 1 and not data.runs[0].trained
    measured = answer(data.measured[0][1]) if alone else []
    swept = [sentence for one in data.sweeps for sentence in sweep_sentences(one)]
    swept += [difference_sentence(suite.document.rows) for suite in data.suites if suite.document.models]
    return [*swept, *measured, *answers, *([] if alone else headline(data, bool(swept)))]


def _boards(sweeps: Sequence[Sweep]) -> list[tuple[Table, Figure | None]]:
    """Return the table and the figure (None if there is none) of the leaderboard of every sweep that has one."""
    found = [board for sweep in sweeps if (board := leaderboard(sweep)) is not None]
    keys = [f"leaderboard{number or ''}" for number in range(len(found))]
    return [(board.table(key), board.figure(f"{key}-scatter")) for board, key in zip(found, keys, strict=True)]


def _page_spec(figure: Figure, chart: charts.Drawing) -> dict[str, Any]:
    """Return a chart's specification for the page, without `config`, which is stored once for all charts.

    If the figure has a colour scale, the legend is removed, because the page draws the scale once per figure.
    """
    spec: dict[str, Any] = chart.to_dict(validate=False) | {"width": "container"}
    if figure.scale:
        spec["layer"][0]["encoding"]["color"]["legend"] = None
    return {key: value for key, value in spec.items() if key not in ("config", "$schema")}


def export_charts(data: ReportData, out_dir: Path, formats: Sequence[str]) -> list[Path]:
    """Write every chart of the report, without links, into `out_dir`, and return the paths in reading order.

    Files are named KEY.FORMAT (KEY: `Figure.key`), or KEY-NUMBER.FORMAT if the figure has several charts.

    Raises:
        InputError: if a format is unknown, an existing file is not a chart written by sinklab, or metrics.jsonl or
            assessment.json of a run cannot be read or is damaged.
        SinklabError: if a file cannot be written.
    """
    unknown = sorted(set(formats) - set(WRITERS))
    if unknown:
        raise InputError(f"unknown chart format {', '.join(unknown)}: choose from {', '.join(WRITERS)}.")
    compared = [*forests(data.sweeps, out_dir), *(figure for _, figure in _boards(data.sweeps) if figure)]
    experiments = [figure for one in experiment_sections(data.sweeps, out_dir) for figure in one.figures]
    own = figures(data)
    widths = [charts.SMALL if figure.small else charts.WIDE_CHART for figure in own]
    widths = [charts.WIDE_CHART] * len(compared) + [EXPERIMENT_WIDTH] * len(experiments) + widths
    wanted = [
        (out_dir / f"{figure.key if len(figure.charts) == 1 else f'{figure.key}-{number}'}.{kind}", chart, width)
        for figure, width in zip([*compared, *experiments, *own], widths, strict=True)
        for number, chart in enumerate(figure.charts, start=1)
        for kind in formats
    ]
    for path, _, _ in wanted:
        check_file(path, CHART)
    for path, chart, width in wanted:
        spec: dict[str, Any] = chart.to_dict(validate=False) | {"width": width, "config": theme.on_paper()}
        for layer in spec["layer"]:
            layer.get("encoding", {}).pop("href", None)  # the converter would resolve links
        with written_aside(path) as aside:
            aside.write_bytes(WRITERS[path.suffix[1:]](spec))
    return [path for path, _, _ in wanted]


def _marked_png(png: bytes) -> bytes:
    """Insert sinklab's marker into a PNG as a tEXt chunk before the last chunk (PNG, second edition, 11.3.4.3)."""
    chunk = b"tEXtSoftware\0" + CHART_MARK
    whole = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:-PNG_END] + whole + png[-PNG_END:]


@cache
def vega_bundle() -> str:
    """Return the code of Vega, Vega-Lite and Vega-Embed as one script that sets `window.vegaEmbed`.

    Bundling takes longer than the rest of a small page, so the script is cached on disk for each version of vl-convert.
    If the cache folder is not writable, every process bundles it again.
    """
    name = f"vega-{version('vl-convert-python')}-{hashlib.sha256(SNIPPET.encode()).hexdigest()[:8]}.js"
    bundle = ""
    with suppress(InputError, OSError, UnicodeDecodeError):
        bundle = (cache_folder() / name).read_text(encoding="utf-8")
    if not bundle:
        bundle = vlc.javascript_bundle(snippet=SNIPPET)
        with suppress(SinklabError):
            write_text(cache_folder() / name, bundle)
    assert "</script" not in bundle.lower(), "the bundle would end its own script element"
    return bundle


def content_policy(scripts: list[str]) -> str:
    """Build a content security policy that allows `scripts` (by hash), inline styles and embedded images only.

    The page can make no network requests.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _title(data: ReportData) -> str:
    """Return the page's title: one part per directory, equal parts only once.

    For a sweep, the part is the id of its only experiment or, for several experiments, their scale, so that a copy of
    the sweep has the same title. Other results have the names of their models, if there are at most MOST_NAMED. In all
    other cases the part is the name of the directory.
    """
    models = [model_label(one.model) for _, one in data.measured if one.model]
    models = [*(run.cell for run in data.runs if run.trained)] or [
        *models,
        *(model_label(x.model) for x in data.assessed),
    ]
    models = list(dict.fromkeys((data.only_suite and data.only_suite.models) or models))
    if not data.sweeps and 0 < len(models) <= MOST_NAMED:
        return " and ".join(models)
    swept: dict[Path, str] = {}
    for sweep in data.sweeps:
        experiments, scale = list(sweep.summary.experiments), sweep.summary.scale
        kind = "" if any(one.analysis == ANALYSES[0] for one in sweep.summary.claims) else f"{ANALYSES[1]} "
        swept[sweep.top] = f"{kind}experiments at scale {scale}" if scale in SCALES else ""
        if len(experiments) == 1:
            swept[sweep.top] = experiments[0]
    titles = [swept.get(path) or path.resolve().name or str(path) for path in data.dirs]
    return ", ".join(dict.fromkeys(titles))


def _verdict_counts(data: ReportData) -> list[tuple[str, dict[str, dict[str, int]], str]]:
    """Count the claims by scale, kind of analysis and verdict, with `subjects_of_claims` and `remarks_on_counts`.

    Scales whose claims are all references are omitted.
    """
    claims = [claim for sweep in data.sweeps for claim in sweep.summary.claims]
    counted = []
    for scale in dict.fromkeys(claim.scale for claim in claims):
        of = [claim for claim in claims if claim.scale == scale]
        if found := verdict_counts(of):
            counted.append((scale, found, " ".join(filter(None, (subjects_of_claims(of), remarks_on_counts(of))))))
    return counted


def _provenance(data: ReportData, run: ReportedRun, page: Path) -> Mapping[str, object]:
    """Return name, directory, settings, env.json and recipe of a run for the page's template."""
    one, env = run.measurement, run.env
    asked = ("model", "revision", "commit", "inputs", "sequences", "length", "bos") if one else ()
    settings = {key: getattr(one, key) for key in asked} | {
        "seed": run.seed,
        "steps": f"{run.steps_done or 0} of {run.planned_steps}" if run.trained else None,
        "run hash": env.get("hash"),
        "backend": one.backend if one else env.get("backend"),
        "dtype": one.dtype if one else None,
        "device": env.get("device"),
    }
    # Paths below the page's folder are relative, so that the folder can be moved.
    path = run.path.relative_to(page) if run.path != page and run.path.is_relative_to(page) else run.path
    plain = ({key: _plain(value) for key, value in of.items() if value is not None} for of in (settings, env))
    recipe = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True) if run.recipe else ""
    return dict(zip(("settings", "environment"), plain, strict=True)) | {
        "name": data.label(run),
        "path": str(path),
        "recipe": recipe,
    }


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
