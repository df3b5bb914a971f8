"""Pack a sweep into a folder for version control: results and recipes of its runs, without weights and local paths.

summary.json, asked/, README.md     results, manifests, and counts and claims as text
report.html, charts/*.svg           report, generated from the other files of this folder
EXPERIMENT/                         the experiment's packed runs (experiments/sweep/packed.py)
checksums.txt                       SHA-256 of every other file

Packing the same sweep again with the same version gives identical files. `sinklab verify` checks the folder, and
`sinklab reproduce --packed` continues the sweep.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import SUMMARY, CellRun, JudgedClaim, Summary, read_record, verdict_counts
from sinklab.experiments.sweep.packed import (
    CHECKSUMS,
    METRICS,
    PACKED_FILES,
    RUNS,
    PackedRun,
    Verified,
    read_packed,
    write_checksums,
    write_packed,
)
from sinklab.experiments.sweep.store import MANIFESTS
from sinklab.files import RECIPE, REPORT, check_results, read_mapping, write_text
from sinklab.report.collect import collect
from sinklab.report.data import ReportData
from sinklab.report.html import texts
from sinklab.report.page import CHARTS, export_charts, render
from sinklab.report.sections import glance
from sinklab.report.sweeps import Sweep, origins, remarks_on_counts, with_runs
from sinklab.schema import leaves
from sinklab.tables import Table, counted, names
from sinklab.train.run import read_environment
from sinklab.tuning.tuned_directory import SFT, load_tuning, tuned_beside

CHECKED = (RECIPE, METRICS)
README = "README.md"
MOST_CLAIMS = 40  # the README of a sweep with more claims has counts by experiment instead
COMMAND = "command"  # key of env.json that is not packed, because it contains local paths


def pack_sweep(found: ReportData, out: Path) -> Path:
    """Copy the results and recipes of a sweep into a folder, and return it.

    The runs, manifests and charts of an earlier copy in the folder are removed first.

    Args:
        found: content of a single directory, that of the sweep (`collect`).
        out: target folder; it must be new, empty or an earlier copy, all of whose runs are in the sweep.

    Raises:
        InputError: if `found` is not of exactly one directory, the directory has no sweep, `out` has other content,
            contains the sweep or is inside it, or has runs that the sweep lacks, a recipe or manifest contains an
            absolute path, or another file to be packed cannot be read or is damaged.
        SinklabError: if a file cannot be written, or env.json of a run is damaged.
    """
    if len(found.dirs) != 1:
        raise InputError(f"--pack takes the directory of one sweep, but {len(found.dirs)} directories were given")
    top = found.dirs[0]
    if not found.sweeps:
        raise InputError(
            f"{top} has no sweep: expected a {SUMMARY} that lists experiments, as written by sinklab reproduce"
        )
    if out.resolve().is_relative_to(top.resolve()) or top.resolve().is_relative_to(out.resolve()):
        raise InputError(f"--pack {out} contains the sweep in {top} or is inside it: choose a folder elsewhere")
    sweep = found.sweeps[0]
    if out.is_dir() and any(out.iterdir()) and not (out / CHECKSUMS).is_file():
        raise InputError(f"{out} is not empty and has no {CHECKSUMS} of an earlier copy: choose a new --pack folder")
    check_results(out, (SUMMARY, REPORT))
    _check_paths(sweep)
    packed = _packed_runs(sweep)
    if not packed:
        raise InputError(f"{top} has no finished or failed run to pack; measurements of existing models are not packed")
    _check_keeps_runs(out, packed)
    write_text(out / CHECKSUMS, "")  # after an interruption, the next call recognises its own copy
    for path in out.glob(f"*/{RUNS}"):  # the earlier copy is removed; folders with other files are kept
        if {file.name for file in path.parent.iterdir()} <= set(PACKED_FILES):
            shutil.rmtree(path.parent)
    for name, pattern in ((MANIFESTS, "*.json"), (CHARTS, "*.svg")):
        for path in (out / name).glob(pattern):
            path.unlink()
    for name, runs in packed.items():
        write_packed(out / name, runs)
    _pack_documents(sweep, out)
    data = collect([out])
    export_charts(data, out / CHARTS, ("svg",))
    write_text(out / REPORT, render(data, out, None))
    write_checksums(out)
    return out


def _manifests(sweep: Sweep) -> list[Path]:
    """Return the paths of the manifests of the experiments in the summary.

    Other manifests in the folder, from calls with another scale, text or number of steps, are omitted.
    """
    found = sorted((sweep.top / MANIFESTS).glob("*.json"))
    return [path for path in found if path.stem in sweep.summary.experiments]


def _check_paths(sweep: Sweep) -> None:
    """Raise InputError if a recipe or manifest cannot be read, is not a mapping, or contains an absolute path.

    Absolute paths are rejected because they may not exist on another machine.
    """
    folders = [folder for run in sweep.summary.runs if (folder := sweep.folder(run)) is not None]
    recipes = [folder / RECIPE for folder in folders if (folder / RECIPE).is_file()]
    for path in (*_manifests(sweep), *recipes):
        for key, value in leaves(read_mapping(path, "rerun the experiment to rewrite the file")).items():
            if isinstance(value, str) and Path(value).is_absolute():
                raise InputError(
                    f"{path}: {key} is {value}, an absolute path, which may not exist on another machine: "
                    "run the experiment with a path relative to the working directory"
                )


def _check_keeps_runs(out: Path, packed: Mapping[str, Sequence[PackedRun]]) -> None:
    """Raise InputError if an earlier copy in `out` has runs that are not to be packed and would be lost."""
    if not out.is_dir() or not any(out.iterdir()) or not (out / CHECKSUMS).stat().st_size:
        return  # there is no copy, or an incomplete one, whose runs were compared before
    before = {run.environment["hash"] for path in out.glob(f"*/{RUNS}") for run in read_packed(path.parent)}
    if lost := before - {run.environment["hash"] for runs in packed.values() for run in runs}:
        raise InputError(
            f"{out} has {counted(len(before), 'packed run')}, of which the sweep lacks {len(lost)}: choose another "
            f"--pack folder, or add its runs to the sweep first (`sinklab reproduce .. --packed {out}`)"
        )


def _packed_runs(sweep: Sweep) -> dict[str, list[PackedRun]]:
    """Return the finished and failed runs in packed form, each once, under the first experiment that uses it."""
    found: dict[str, list[PackedRun]] = {}
    taken: set[str] = set()
    for name in sweep.summary.experiments:
        runs = {run.hash: run for cell in sweep.summary.cells_of(name).values() for run in cell.runs if run.directory}
        packed = [_packed(sweep, run) for run_hash, run in runs.items() if run_hash not in taken]
        if ended := [one for one in packed if one is not None]:
            found[name] = ended
        taken |= runs.keys()
    return found


def _packed(sweep: Sweep, run: CellRun) -> PackedRun | None:
    """Return a run in packed form; None if it has no record (it has not ended) or no recipe."""
    folder = sweep.folder(run)
    record = read_record(folder) if folder else None
    if folder is None or record is None or not (folder / RECIPE).is_file():
        return None
    if run.status == "unfinished":
        raise InputError(
            f"{run.directory} has finished after {sweep.top / SUMMARY} was written: call `sinklab reproduce` with this "
            "directory again, which judges the claims with all runs, and then pack"
        )
    files = {name: record.files[name] for name in CHECKED if name in record.files}
    record = record.model_copy(update={"files": files, "message": _relative(record.message, sweep)})
    assessment = sweep.assessment(run)
    if assessment is not None:
        asked = {**assessment.asked, "model": run.directory}
        assessment = assessment.model_copy(update={"model": run.directory, "asked": asked})
    sft = tuned_beside(folder) / SFT
    tuning = load_tuning(sft).model_copy(update={"model": run.directory}) if sft.is_file() else None
    return PackedRun(
        directory=run.directory,
        recipe=(folder / RECIPE).read_text(encoding="utf-8"),
        metrics=(folder / METRICS).read_text(encoding="utf-8") if (folder / METRICS).is_file() else "",
        record=record.model_dump(mode="json", by_alias=True),
        environment={key: value for key, value in read_environment(folder).items() if key != COMMAND},
        assessment=assessment.model_dump(mode="json", by_alias=True) if assessment else None,
        tuning=tuning.document() if tuning and tuning.chat else None,
    )


def _pack_documents(sweep: Sweep, out: Path) -> None:
    """Write summary.json, the manifests of the experiments and README.md to `out`."""

    def packed(run: CellRun) -> CellRun:
        edited = [name for name in run.edited if name in CHECKED]
        directory = "" if run.status == "unfinished" else run.directory  # runs that have not ended are not packed
        changed = {"message": _relative(run.message, sweep), "edited": edited, "directory": directory}
        return run.model_copy(update=changed)

    summary = with_runs(sweep.summary, packed)
    summary.save(out)
    for path in _manifests(sweep):
        write_text(out / MANIFESTS / path.name, path.read_text(encoding="utf-8"))
    write_text(out / README, readme(summary, origins([sweep]), out.resolve().name))


def check_readme(top: Path) -> Verified:
    """Compare README.md of a packed sweep with the text that its summary and runs give, except for the title.

    The title has the name of the folder in which the sweep was packed.
    """
    drawn = f"{REPORT} and {CHARTS}/, which `sinklab report {top}` draws again from the other files"
    check = Verified(f"{README} written again", 1, notes=[f"not verified: {drawn}"])
    try:
        there = (top / README).read_text(encoding="utf-8").splitlines()
        sweeps = collect([top]).sweeps
        if not sweeps:
            raise InputError(f"{top} has no {SUMMARY} of a sweep")
        here = readme(sweeps[0].summary, origins(sweeps), "").splitlines()
    except (OSError, UnicodeDecodeError, SinklabError) as error:
        check.problems.append(f"{README} cannot be compared: {error}")
        return check
    places = range(1, max(len(there), len(here)))
    line = next((place for place in places if there[place : place + 1] != here[place : place + 1]), None)
    if line is not None:
        check.problems.append(
            f"line {line + 1} of {README} is not what this version of sinklab writes: "
            f"{''.join(there[line : line + 1])[:80]!r} instead of {''.join(here[line : line + 1])[:80]!r}"
        )
    return check


def _relative(message: str, sweep: Sweep) -> str:
    """Return a message in which the paths of the sweep's files are relative to its directory."""
    return message.replace(f"{sweep.top.resolve()}/", "").replace(f"{sweep.top}/", "")


def readme(summary: Summary, provenance: Sequence[tuple[str, str]], folder: str) -> str:
    """Return the README of a packed sweep: scale, counts, provenance, the paper at a glance, and the claims.

    The differences from the paper (`ExperimentSummary.adapted`) are those that all experiments share.

    Args:
        folder: name of the folder of the packed sweep.
    """
    adapted = [one.adapted for one in summary.experiments.values()]
    title = f"Results at scale {summary.scale}" if summary.scale else "Results"
    text = (
        texts()
        .get_template("readme.md.j2")
        .render(
            title=title + (f" ({folder})" if folder != summary.scale else ""),
            summary=summary,
            done=sum(run.status == "done" for run in summary.runs),
            failed=sum(run.status == "failed" for run in summary.runs),
            scale=[said for said in (adapted or [[]])[0] if all(said in one for one in adapted)],
            provenance=provenance,
            counts=verdict_counts(summary.claims),
            remarks=remarks_on_counts(summary.claims),
            glance=_glance(summary),
            by_experiment=_counts(summary) if len(summary.claims) > MOST_CLAIMS else None,
            claims_table=_claims,
        )
    )
    return text.removesuffix("\n")


def _claims(claims: Sequence[JudgedClaim]) -> Table:
    rows = [
        (claim.statement, f"{claim.shown_verdict} at {claim.scale}\n{claim.analysis}", claim.full_evidence)
        for claim in claims
        if claim.verdict != "not asked"
    ]
    return Table("", names("claim", "verdict", "evidence"), rows)


def _counts(summary: Summary) -> Table:
    """Make the table of experiments with the number of their claims by verdict and kind of analysis."""
    rows = [
        (
            name,
            experiment.title,
            "\n".join(
                f"{kind}: {', '.join(f'{number} {verdict}' for verdict, number in found.items())}"
                for kind, found in verdict_counts(summary.claims_of(name)).items()
            ),
        )
        for name, experiment in summary.experiments.items()
        if summary.claims_of(name)
    ]
    return Table("Claims by experiment", names("experiment", "subject", "verdicts"), rows)


def _glance(summary: Summary) -> Table | None:
    """Make the table of the paper's statements with a claim in the sweep; None if there are none."""
    rows = []
    for line in glance([Sweep(Path(), summary, Path())]):
        ours, verdicts = [], []
        for part in line.parts:
            claim = part.claim
            kind = "" if claim.analysis == "confirmatory" else f", {claim.analysis}"
            texts = "; ".join(f"{cell} {text}" for cell, text in part.ours)
            ours.append(f"{part.quantity}: {texts}" if texts else claim.evidence)
            beside = f"; by mean importance: {other}" if (other := claim.changed_by_importance) else ""
            verdicts.append(f"{claim.shown_verdict} at {claim.scale} ({claim.experiment}.{claim.id}{kind}{beside})")
        said, values = line.statement, "\n".join(dict.fromkeys(ours))
        rows.append((str(line.number), said.says, said.paper, values, "\n".join(verdicts), said.caveat))
    columns = names(
        "", "statement", "the paper (% of heads unless stated)", "our values, every seed", "verdict", "caveat"
    )
    return Table("The paper at a glance", columns, rows) if rows else None
