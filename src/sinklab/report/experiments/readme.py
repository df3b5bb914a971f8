"""README.md of a packed sweep: the paper at a glance, and the verdicts of every claim, as tables."""

from collections.abc import Mapping, Sequence

from sinklab.experiments.documents import Summary, verdict_counts
from sinklab.report.experiments.glance import GlanceLine, GlancePart, lines_of
from sinklab.report.experiments.numbers import NOTHING
from sinklab.report.summary import counted


def readme(summary: Summary) -> str:
    """Markdown; what comes from files is escaped."""
    runs = {run.hash: run for cell in summary.cells.values() for run in cell.runs}
    done = sum(run.status == "done" for run in runs.values())
    failed = sum(run.status == "failed" for run in runs.values())
    lines = [
        f"# Results at scale {_escaped(summary.scale)}" if summary.scale else "# Results",
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
        "| experiment | claim | | verdict | evidence |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {_escaped(claim.experiment)} | {_escaped(claim.said)} | {_escaped(claim.analysis)} | "
        f"{_escaped(claim.verdict_said)} at {_escaped(claim.scale)} | "
        f"{_escaped('; '.join(filter(None, (claim.evidence, *claim.remarks))))} |"
        for claim in summary.claims
    ]
    return "\n".join([*lines, ""])


def _glance(lines: Sequence[GlanceLine]) -> list[str]:
    if not lines:
        return []
    return [
        "## The paper at a glance",
        "",
        "| | statement | the paper (% of heads) | ours, every seed | verdict | caveat |",
        "|---|---|---|---|---|---|",
        *(
            f"| {place} | {_escaped(line.statement.says)} | {_escaped(line.statement.paper)} | "
            f"{'<br>'.join(map(_ours, line.parts)) or NOTHING} | "
            f"{'<br>'.join(map(_verdict, line.parts)) or 'not run'} | {_escaped(line.statement.caveat)} |"
            for place, line in enumerate(lines, 1)
        ),
        "",
    ]


def _ours(part: GlancePart) -> str:
    return _escaped("; ".join(f"{cell} {text}" for cell, text in part.ours) or part.claim.evidence)


def _verdict(part: GlancePart) -> str:
    """`reproduced at tiny (figure_4.default_has_a_sink)`, exploratory ones marked."""
    claim = part.claim
    kind = f", {claim.analysis}" if claim.analysis != "confirmatory" else ""
    return _escaped(f"{claim.verdict_said} at {claim.scale} ({claim.experiment}.{claim.id}{kind})")


def _named(kind: str) -> str:
    """`Confirmatory claims`."""
    return f"{kind} claims".strip().capitalize()


def _counted(verdicts: Mapping[str, int]) -> str:
    """`3 reproduced, 1 contradicted`."""
    return ", ".join(f"{number} {_escaped(verdict)}" for verdict, number in verdicts.items())


def _escaped(text: str) -> str:
    """Without anything that Markdown or HTML would take for markup."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    for character in "|`*_[]":
        plain = plain.replace(character, f"\\{character}")
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
