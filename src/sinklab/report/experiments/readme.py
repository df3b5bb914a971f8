"""README.md of a packed sweep: the verdicts of every claim, as a table."""

from collections.abc import Mapping

from sinklab.experiments.documents import Summary, verdict_counts
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
        "`report.html` shows them with every seed; each run's recipe and metrics lie in its folder.",
        "",
        *(f"{_named(kind)}: {_counted(found)}." for kind, found in verdict_counts(summary.claims).items()),
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
