"""README.md of a packed sweep: the paper at a glance, and the verdicts of every claim, as tables."""

from collections.abc import Mapping, Sequence

from sinklab.experiments.documents import Summary, verdict_counts
from sinklab.report.experiments.glance import GlanceLine, GlancePart, lines_of
from sinklab.report.summary import counted
from sinklab.tables import NOTHING, Table, escaped, markdown, names


def readme(summary: Summary) -> str:
    """Markdown; what comes from files is escaped."""
    runs = {run.hash: run for cell in summary.cells.values() for run in cell.runs}
    done = sum(run.status == "done" for run in runs.values())
    failed = sum(run.status == "failed" for run in runs.values())
    lines = [
        f"# Results at scale {escaped(summary.scale)}" if summary.scale else "# Results",
        "",
        f"{counted(len(summary.experiments), 'experiment').capitalize()}, {counted(len(summary.cells), 'cell')}, "
        f"{counted(done, 'finished run')}, {failed} failed, {len(runs) - done - failed} not finished. "
        "`report.html` shows them with every seed; their recipes and metrics lie in a folder for each experiment. "
        "Verdicts follow the rule in `docs/verdicts.md`.",
        "",
        *(f"{_named(kind)}: {_counted(found)}." for kind, found in verdict_counts(summary.claims).items()),
        "",
        *_glance(lines_of([(summary, {})])),
        "## Every claim",
        "",
        markdown(_claims(summary)),
        "",
    ]
    return "\n".join(lines)


def _claims(summary: Summary) -> Table:
    rows = [
        (
            claim.experiment,
            claim.said,
            claim.analysis,
            f"{claim.verdict_said} at {claim.scale}",
            "; ".join(filter(None, (claim.evidence, *claim.remarks))),
        )
        for claim in summary.claims
    ]
    return Table("Every claim", names("experiment", "claim", "", "verdict", "evidence"), rows)


def _glance(lines: Sequence[GlanceLine]) -> list[str]:
    if not lines:
        return []
    columns = names("", "statement", "the paper (% of heads)", "ours, every seed", "verdict", "caveat")
    rows = [
        (
            str(place),
            line.statement.says,
            line.statement.paper,
            "\n".join(map(_ours, line.parts)) or NOTHING,
            "\n".join(map(_verdict, line.parts)) or "not run",
            line.statement.caveat,
        )
        for place, line in enumerate(lines, 1)
    ]
    return ["## The paper at a glance", "", markdown(Table("The paper at a glance", columns, rows)), ""]


def _ours(part: GlancePart) -> str:
    return "; ".join(f"{cell} {text}" for cell, text in part.ours) or part.claim.evidence


def _verdict(part: GlancePart) -> str:
    """`reproduced at tiny (figure_4.default_has_a_sink)`, exploratory ones marked."""
    claim = part.claim
    kind = f", {claim.analysis}" if claim.analysis != "confirmatory" else ""
    return f"{claim.verdict_said} at {claim.scale} ({claim.experiment}.{claim.id}{kind})"


def _named(kind: str) -> str:
    """`Confirmatory claims`."""
    return f"{kind} claims".strip().capitalize()


def _counted(verdicts: Mapping[str, int]) -> str:
    """`3 reproduced, 1 contradicted`."""
    return ", ".join(f"{number} {escaped(verdict)}" for verdict, number in verdicts.items())
