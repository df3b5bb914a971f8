"""A sweep as a folder to be committed: what its runs found, and how to repeat them, without weights and machines.

summary.json, asked/, README.md     what was asked, what came out
report.html, charts/*.svg           drawn from this folder alone
NAME-HASH/record.json               how a run ended, with the checksums of the two files beside it
NAME-HASH/recipe.yaml, metrics.jsonl.gz, assessment.json

The same sweep gives the same bytes.
"""

import gzip
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from sinklab.assessing.documents import ASSESSMENT
from sinklab.errors import InputError
from sinklab.experiments.documents import RECORD, SUMMARY, CellRun, Summary, read_record
from sinklab.files import parse_json, parse_yaml, write_json, write_text, written_aside
from sinklab.outputs import REPORT, check_results
from sinklab.report.collect import collect
from sinklab.report.experiments.readme import readme
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.export import export_charts
from sinklab.report.html import render
from sinklab.schema import leaves

RECIPE, METRICS = "recipe.yaml", "metrics.jsonl"
PACKED = (RECIPE, METRICS)
RUN_FILES = {RECIPE, f"{METRICS}.gz", RECORD, ASSESSMENT}
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
    _without_leftovers(out, {run.directory for run in sweep.runs})
    for run in sweep.runs:
        _pack_run(sweep, run, out)
    _pack_documents(sweep, out)
    data = collect([out])
    export_charts(data, out / CHARTS, ("svg",))
    write_text(out / REPORT, render(data, out, None))
    return out


def _check_target(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / SUMMARY).is_file():
        raise InputError(f"{out} is not empty and holds no {SUMMARY} of an earlier copy: choose a new --pack folder")
    check_results(out, (SUMMARY, REPORT))


def _check_paths(sweep: Sweep) -> None:
    """Refuse what names a path of this machine, as it would mean nothing anywhere else."""
    documents = [(path, parse_json(path.read_text(encoding="utf-8"))) for path in _asked(sweep)]
    recipes = [path for run in sweep.runs if (path := sweep.provenance(run)) is not None and path.name == RECIPE]
    documents += [(path, parse_yaml(path.read_text(encoding="utf-8"))) for path in recipes]
    for path, document in documents:
        for key, value in leaves(document).items():
            if isinstance(value, str) and Path(value).is_absolute():
                raise InputError(
                    f"{path}: {key} is {value}, a path of this machine, which nobody else could use: "
                    "train with one that is relative to the working directory"
                )


def _asked(sweep: Sweep) -> Iterator[Path]:
    yield from sorted((sweep.top / ASKED).glob("*.json"))


def _without_leftovers(out: Path, wanted: set[str]) -> None:
    """Take away what an earlier copy has and this one has not."""
    for record in [*out.rglob(RECIPE)] if out.is_dir() else []:
        folder = record.parent
        if folder.relative_to(out).as_posix() not in wanted and {path.name for path in folder.iterdir()} <= RUN_FILES:
            shutil.rmtree(folder)
    for name, pattern in ((ASKED, "*.json"), (CHARTS, "*.svg")):
        for path in (out / name).glob(pattern):
            path.unlink()


def _pack_run(sweep: Sweep, run: CellRun, out: Path) -> None:
    folder = sweep.folder(run)
    if folder is None or not (folder / RECIPE).is_file():
        return
    target = out / run.directory
    target.mkdir(parents=True, exist_ok=True)
    _write(target / RECIPE, (folder / RECIPE).read_bytes())
    metrics = _metrics(folder)
    if metrics is not None:
        _write(target / f"{METRICS}.gz", gzip.compress(metrics, mtime=0))
    assessment = sweep.assessment(run)
    if assessment is not None:
        found = assessment.model_copy(
            update={"model": run.directory, "asked": {**assessment.asked, "model": run.directory}}
        )
        write_json(target / ASSESSMENT, found.model_dump(mode="json", by_alias=True))
    record = read_record(folder)
    if record is not None:
        files = {name: record.files[name] for name in PACKED if name in record.files}
        said = _without_place(record.message, sweep)
        record.model_copy(update={"files": files, "message": said}).save(target)


def _metrics(folder: Path) -> bytes | None:
    if (folder / METRICS).is_file():
        return (folder / METRICS).read_bytes()
    packed = folder / f"{METRICS}.gz"
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else None


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
        _write(out / ASKED / path.name, path.read_bytes())
    write_text(out / "README.md", readme(summary))


def _kept(edited: Sequence[str]) -> list[str]:
    return [name for name in edited if name in PACKED]


def _without_place(message: str, sweep: Sweep) -> str:
    """A message that names files of the sweep by where they lie in it."""
    return message.replace(f"{sweep.top.resolve()}/", "").replace(f"{sweep.top}/", "")


def _write(path: Path, content: bytes) -> None:
    with written_aside(path) as aside:
        aside.write_bytes(content)
