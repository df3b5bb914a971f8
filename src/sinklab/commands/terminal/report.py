"""The report in a terminal: the table of cells, the claims with their evidence, and the sink as a small curve."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.commands.terminal.text import printable
from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import JudgedClaim, verdict_counts
from sinklab.measuring.statistics.highest import in_brackets
from sinklab.report.data import ReportData
from sinklab.report.experiments.comparison import compared
from sinklab.report.experiments.numbers import estimate_text, number_text
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.summary import curve
from sinklab.report.tables import table_of_cells

BARS = "▁▂▃▄▅▆▇█"
VERDICT_STYLES = {
    "reproduced": "bold green",
    "direction only": "bold cyan",
    "contradicted": "bold red",
    "inconclusive": "bold yellow",
    "no verdict": "yellow",
    "not asked": "dim",
    "not run": "dim",
}


def print_report(data: ReportData, console: Console) -> None:
    """Print the cells with the notes of their measurements, each experiment's numbers and claims, and other claims."""
    if data.cells:
        console.print(cells_table(data, console.width))
    for name, note in [*((data.label(run), note) for run in data.runs for note in run.notes), *data.failures]:
        console.print(Text("note: ", style="yellow"), Text(printable(f"{name}: {note}")), sep="")
    for sweep in data.sweeps:
        for name in sweep.experiments:
            print_experiment(sweep, name, console)
    if data.claims:
        console.print(claims_table(data.claims))


def print_experiment(sweep: Sweep, name: str, console: Console) -> None:
    """Ours beside the paper's, what is wrong with a run, and the claims with their verdicts."""
    experiment = sweep.experiments[name]
    console.print(compared_table(sweep, name))
    for cell, found in sweep.cells_of(experiment).items():
        for run in found.runs:
            edited = [f"edited since it ended: {', '.join(run.edited)}"] if run.edited else []
            for said in (*edited, *([run.message] if run.message else [])):
                note = f"{cell}, seed {run.seed}: {said}"
                console.print(Text("note: ", style="yellow"), Text(printable(note)), sep="")
    if claims := sweep.claims_of(name):
        console.print(claims_table(claims))


def compared_table(sweep: Sweep, name: str) -> Table:
    """A line per cell: seeds, and of each number our median with the smallest and the largest, and the paper's."""
    experiment, found = sweep.experiments[name], compared(sweep, name)
    title = printable(f"{name} {where(experiment.scale)}: {experiment.title}")
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("Cell", overflow="fold", min_width=8)
    table.add_column("Seeds", justify="right")
    for one in found.columns:
        once = ", once at the end" if one.once else ""
        table.add_column(f"{one.label}\n[dim]{one.unit}{once}", justify="right")
        if one.name in found.in_paper:
            table.add_column("paper", justify="right", style="dim")
    for cell in found.cells:
        texts = [cell.seeds + (f", {cell.failed} failed" if cell.failed else "")]
        for one in found.columns:
            estimate = cell.ours[one.name]
            texts.append(estimate_text(estimate, one.decimals) + in_brackets(cell.elsewhere[one.name]))
            if one.name in found.in_paper:
                paper = cell.paper.get(one.name)
                failed = paper is None and not cell.trained_there
                texts.append("did not train" if failed else number_text(paper, max(one.decimals, 2)))
        table.add_row(*(Text(printable(text)) for text in (cell.name, *texts)))
    return table


def cells_table(data: ReportData, width: int | None = None) -> Table:
    """The table of cells as in the HTML report, with the sink's growth as a curve in the last column.

    Args:
        width: characters there is room for; the last columns are left out until the table fits.
    """
    columns, rows = _with_curve(data)
    kept = len(columns)
    drawn = _cells(columns, rows, kept)
    while width is not None and kept > 4 and Console(width=1000).measure(drawn).maximum > width:
        kept -= 1
        drawn = _cells(columns, rows, kept)
    return drawn


def _with_curve(data: ReportData) -> tuple[list[tuple[str, str]], list[list[str]]]:
    columns, rows = table_of_cells(data)
    curves = [_sink_curve(data, cell) for cell in data.cells]
    if not any(curves):
        return columns, rows
    return [*columns, ("Sink", "by step")], [[*row, drawn] for row, drawn in zip(rows, curves, strict=True)]


def _cells(columns: list[tuple[str, str]], rows: list[list[str]], kept: int) -> Table:
    drawn = Table(title="Cells", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for index, (name, unit) in enumerate(columns[:kept]):
        first = index == 0
        justify = "left" if first else "right"
        drawn.add_column(f"{name}\n[dim]{unit}", justify=justify, no_wrap=not first, overflow="fold")
    drawn.columns[0].min_width = 8
    for row in rows:
        drawn.add_row(*(Text(printable(text)) for text in row[:kept]))
    return drawn


def where(scale: str) -> str:
    """`at tiny`; of an experiment on an existing model, `in` its name."""
    return f"{'at' if scale in SCALES else 'in'} {scale}"


def claims_table(claims: Sequence[JudgedClaim]) -> Table:
    """One line per claim: verdict with its scale, what is claimed, evidence; how many of each verdict above them."""
    table = Table(
        title=Text(printable(counts_line(claims))), title_justify="left", header_style="bold", box=SIMPLE_HEAD
    )
    for name in ("Verdict", "Claim", "Evidence"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        model = claim.replicate == "draw" or not claim.scale
        said = claim.verdict_said if model else f"{claim.verdict_said} {where(claim.scale)}"
        table.add_row(
            Text(printable(said), style=VERDICT_STYLES.get(claim.verdict, "bold yellow")),
            Text(printable(claim.said)),
            Text(printable("; ".join(filter(None, (claim.evidence, *claim.remarks))))),
        )
    return table


def counts_line(claims: Sequence[JudgedClaim]) -> str:
    """`Claims: confirmatory 3 reproduced, 1 contradicted; exploratory 2 reproduced`."""
    kinds = [
        f"{kind} {', '.join(f'{number} {verdict}' for verdict, number in found.items())}".strip()
        for kind, found in verdict_counts(claims).items()
    ]
    return f"Claims: {'; '.join(kinds)}" if kinds else "Claims"


def sparkline(values: Sequence[float], highest: float | None = None, width: int = 16) -> str:
    """Values as bars of height 0..`highest` (default: their maximum), thinned to at most `width` characters."""
    if not values:
        return ""
    top = max(highest if highest is not None else max(values), 1e-12)
    count = min(width, len(values))
    picked = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value / top * len(BARS))))] for value in picked)


def _sink_curve(data: ReportData, cell: str) -> str:
    """The larger of the sink on the first token and on the bias, on a scale that all cells share."""
    highest = max((value for name in data.cells for value in _growth(data, name)), default=0.0)
    return sparkline(_growth(data, cell), max(highest, 1.0))


def _growth(data: ReportData, cell: str) -> list[float]:
    rows = curve(
        data.runs_of(cell),
        lambda one: max(one.sink_rate[0] or 0.0, one.sink_rate_bias or 0.0) if one.sink_rate else None,
        "anywhere",
    )
    return [row["mean"] for row in sorted(rows, key=lambda row: row["step"])]
