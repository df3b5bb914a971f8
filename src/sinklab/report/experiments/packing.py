"""A sweep as a folder to be committed: what its runs found, and how to repeat them, without weights and machines.

summary.json, asked/, README.md     what was asked, what came out
report.html, charts/*.svg           drawn from this folder alone
EXPERIMENT/                         its runs (experiments/sweep/packed.py)
checksums.txt                       of every file

The same sweep gives the same bytes. `sinklab verify` checks it, `sinklab reproduce --packed` continues it.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sinklab.assessing.assessment import ASSESSMENT
from sinklab.errors import InputError
from sinklab.experiments.documents import RECORD, SUMMARY, CellRun, Summary, read_record, verdict_counts
from sinklab.experiments.sweep.packed import (
    METRICS,
    PACKED_FILES,
    RECIPE,
    RUNS,
    PackedRun,
    environment_to_pack,
    write_checksums,
    write_packed,
)
from sinklab.files import parse_json, parse_yaml, write_text
from sinklab.outputs import REPORT, check_results
from sinklab.report.collect import collect
from sinklab.report.experiments.glance import GlanceLine, GlancePart, lines_of
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.export import export_charts
from sinklab.report.html import render
from sinklab.schema import leaves
from sinklab.tables import NOTHING, Table, counted, escaped, markdown, names
from sinklab.train.directory.environment import read_environment

CHECKED = (RECIPE, METRICS)
EARLIER_FILES = {RECIPE, f"{METRICS}.gz", RECORD, ASSESSMENT}
ASKED, CHARTS = "asked", "charts"


def pack_sweep(dirs: Sequence[Path], out: Path) -> Path:
    """Copy a sweep into a folder; an earlier copy there is brought up to date.

    Args:
        dirs: the directory of the sweep, one.

    Returns:
        The folder.

    Raises:
        InputError: there is not exactly one directory, it holds no sweep, the folder holds something else or lies
            within the sweep, or a recipe names a path of this machine.
        SinklabError: a file cannot be written.
    """
    if len(dirs) != 1:
        raise InputError(f"--pack copies one sweep, and {len(dirs)} directories were given: name one")
    top = dirs[0]
    sweeps = collect([top]).sweeps
    if not sweeps:
        raise InputError(f"{top} holds no sweep: expected a {SUMMARY} that names experiments, as reproduce writes it")
    if out.resolve().is_relative_to(top.resolve()) or top.resolve().is_relative_to(out.resolve()):
        raise InputError(f"--pack {out} and the sweep in {top} lie within each other: choose a folder elsewhere")
    sweep = sweeps[0]
    _check_target(out)
    _check_paths(sweep)
    packed = {
        name: [one for run in runs if (one := _packed(sweep, run))] for name, runs in _runs_by_experiment(sweep).items()
    }
    _without_leftovers(out)
    for name, runs in packed.items():
        write_packed(out / name, runs)
    _pack_documents(sweep, out)
    data = collect([out])
    export_charts(data, out / CHARTS, ("svg",))
    write_text(out / REPORT, render(data, out, None))
    write_checksums(out)
    return out


def _check_target(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / SUMMARY).is_file():
        raise InputError(f"{out} is not empty and holds no {SUMMARY} of an earlier copy: choose a new --pack folder")
    check_results(out, (SUMMARY, REPORT))


def _check_paths(sweep: Sweep) -> None:
    """Refuse what names a path of this machine, as it would mean nothing anywhere else."""
    documents = [(path, parse_json(path.read_text(encoding="utf-8"))) for path in _asked(sweep)]
    folders = [folder for run in sweep.runs if (folder := sweep.folder(run)) is not None]
    recipes = [folder / RECIPE for folder in folders if (folder / RECIPE).is_file()]
    documents += [(path, parse_yaml(path.read_text(encoding="utf-8"))) for path in recipes]
    for path, document in documents:
        for key, value in leaves(document).items():
            if isinstance(value, str) and Path(value).is_absolute():
                raise InputError(
                    f"{path}: {key} is {value}, a path of this machine, which nobody else could use: "
                    "train with a path relative to the working directory"
                )


def _asked(sweep: Sweep) -> Iterator[Path]:
    yield from sorted((sweep.top / ASKED).glob("*.json"))


def _without_leftovers(out: Path) -> None:
    """Remove the runs and charts of an earlier copy; one with a folder per run is of an earlier version."""
    for pattern in (f"*/{RUNS}", f"*/{RECORD}"):
        for path in out.glob(pattern):
            if {file.name for file in path.parent.iterdir()} <= {*PACKED_FILES, *EARLIER_FILES}:
                shutil.rmtree(path.parent)
    for name, pattern in ((ASKED, "*.json"), (CHARTS, "*.svg")):
        for path in (out / name).glob(pattern):
            path.unlink()


def _runs_by_experiment(sweep: Sweep) -> dict[str, list[CellRun]]:
    """Every run once, with the first experiment that has it."""
    found: dict[str, list[CellRun]] = {}
    taken: set[str] = set()
    for name, experiment in sweep.experiments.items():
        for cell in sweep.cells_of(experiment).values():
            new = [run for run in cell.runs if run.directory and run.hash not in taken]
            taken |= {run.hash for run in new}
            found.setdefault(name, []).extend(new)
    return {name: runs for name, runs in found.items() if runs}


def _packed(sweep: Sweep, run: CellRun) -> PackedRun | None:
    """A run as it is packed; None where it has not ended."""
    folder = sweep.folder(run)
    record = read_record(folder) if folder else None
    if folder is None or record is None or not (folder / RECIPE).is_file():
        return None
    files = {name: record.files[name] for name in CHECKED if name in record.files}
    record = record.model_copy(update={"files": files, "message": _without_place(record.message, sweep)})
    assessment = sweep.assessment(run)
    if assessment is not None:
        asked = {**assessment.asked, "model": run.directory}
        assessment = assessment.model_copy(update={"model": run.directory, "asked": asked})
    return PackedRun(
        directory=run.directory,
        recipe=(folder / RECIPE).read_text(encoding="utf-8"),
        metrics=(folder / METRICS).read_text(encoding="utf-8") if (folder / METRICS).is_file() else "",
        record=record.model_dump(mode="json", by_alias=True),
        environment=environment_to_pack(read_environment(folder)),
        assessment=assessment.model_dump(mode="json", by_alias=True) if assessment else None,
    )


def _pack_documents(sweep: Sweep, out: Path) -> None:
    cells = {
        name: cell.model_copy(
            update={
                "runs": [
                    run.model_copy(update={"message": _without_place(run.message, sweep), "edited": _kept(run.edited)})
                    for run in cell.runs
                ]
            }
        )
        for name, cell in sweep.summary.cells.items()
    }
    summary: Summary = sweep.summary.model_copy(update={"cells": cells})
    summary.save(out)
    for path in _asked(sweep):
        (out / ASKED).mkdir(exist_ok=True)
        write_text(out / ASKED / path.name, path.read_text(encoding="utf-8"))
    write_text(out / "README.md", readme(summary))


def _kept(edited: Sequence[str]) -> list[str]:
    return [name for name in edited if name in CHECKED]


def _without_place(message: str, sweep: Sweep) -> str:
    """A message that names files of the sweep by where they lie in it."""
    return message.replace(f"{sweep.top.resolve()}/", "").replace(f"{sweep.top}/", "")


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
