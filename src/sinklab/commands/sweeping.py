"""A sweep from its options to its summary: data prepared once, runs shared with other processes, summary and page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from sinklab.assessing.assess_model import assess
from sinklab.assessing.assessment import ASSESSMENT, load_assessment
from sinklab.assessing.plan import AssessOptions
from sinklab.commands.console import RunBoard, data_progress
from sinklab.commands.ending import PLAIN
from sinklab.commands.terminal.job_progress import JobProgress
from sinklab.data.prepare import prepared
from sinklab.data.shards import TokenDataset
from sinklab.data.texts import StageProgress
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import SUMMARY, Summary, record_of
from sinklab.experiments.sweep.engine import Event, train_all
from sinklab.experiments.sweep.engines import EngineName, open_engine
from sinklab.experiments.sweep.engines.local import cards_here, cores_here, jobs_for, shares
from sinklab.experiments.sweep.packed import take_up, unpack
from sinklab.experiments.sweep.plan import (
    PlannedSweep,
    Question,
    SweepPlan,
    cells_of,
    data_key,
    place_sweep,
    plan_sweep,
)
from sinklab.experiments.sweep.preview import Preview, pace_here, pace_of_runs, preview
from sinklab.experiments.sweep.store import (
    SweepManifest,
    Unassessed,
    found_runs,
    manifest_of,
    merged_manifests,
    read_manifests,
    summary_of,
    unassessed,
)
from sinklab.files import parse_json
from sinklab.jobs.progress import Observer
from sinklab.outputs import REPORT, check_results
from sinklab.report import write_report
from sinklab.train.directory.lock import HeldError, is_written

SUMMARISED_EVERY_S = 60.0
"""Interval between summaries during training, so that a power cut leaves one."""

LOOKS_EVERY_S = 2.0
"""Between two looks at runs that other processes assess."""

SCHEMA = Summary.model_fields["schema_version"].default


@dataclass(frozen=True)
class SweepRequest:
    """The options of a sweep.

    Attributes:
        questions: experiments, of one scale.
        out: directory of the runs, summary.json and report.html.
        overlay: laid over every recipe.
        jobs: runs at a time; chosen for the machine unless given.
        engine: that trains them.
        settings: of the engine, KEY=VALUE each.
        packed: a folder of packed runs, which count as finished.
    """

    questions: Sequence[Question]
    out: Path
    overlay: Mapping[str, Any]
    jobs: int | None = None
    engine: EngineName = EngineName.local
    settings: Sequence[str] = ()
    packed: Path | None = None


@dataclass(frozen=True)
class SweepEnding:
    """The outcome of a sweep.

    Attributes:
        summary: as it was written.
        failures: the reasons by run; a divergence that is a result is left out.
        edited: the files that have changed since their run ended, by run directory.
        unassessed: the reasons why a run was not assessed, by run.
    """

    summary: Summary
    failures: Mapping[str, str]
    edited: Mapping[str, Sequence[str]]
    unassessed: Mapping[str, str]


def look_ahead(request: SweepRequest) -> Preview:
    """The cost of the sweep; writes nothing. The pace of a cluster is known from its finished runs only.

    Raises:
        InputError: as `sweep`.
    """
    check_results(request.out, (SUMMARY, REPORT))
    plan = plan_sweep(request.questions, request.overlay)
    with TemporaryDirectory() as folder:
        if request.packed is not None:
            unpack(request.packed, Path(folder))
        own = found_runs(request.out)
        found = found_runs(Path(folder)) | own
        if request.engine != EngineName.local:
            return preview(plan, request.out, found, request.engine, pace_of_runs(own.values()), None)
        jobs = _jobs(request, len(plan.order))
        base = next(iter(cells_of(request.questions[0], request.overlay).values())).recipe
        pace = pace_here(base, shares(jobs)[0].threads, own.values())
        return preview(plan, request.out, found, request.engine, pace, jobs)


def sweep(request: SweepRequest, console: Console) -> SweepEnding:
    """Train the missing runs and summarise all; progress is printed to `console`.

    Raises:
        InputError: a scale that an experiment lacks, an unusable text or directory, an overlay that makes an invalid
            recipe, an engine that is not installed or does not answer.
        KeyboardInterrupt: Ctrl-C; everything is saved and the same call resumes.
        PreemptedError: SIGTERM or SIGUSR1, likewise.
    """
    out, overlay = request.out, request.overlay
    check_results(out, (SUMMARY, REPORT))
    _check_version(out / SUMMARY)
    if request.packed is not None:
        take_up(request.packed, out)
    before = read_manifests(out)
    plan = plan_sweep(request.questions, overlay)
    engine = open_engine(request.engine, _jobs(request, len(plan.order)), out, request.settings)
    with data_progress(console) as progress:
        data = _prepared(plan, progress)
    planned = place_sweep(plan, data, out, found_runs(out))
    now = {one.experiment.id: manifest_of(one, planned, overlay) for one in request.questions}
    manifests = merged_manifests(before, now)
    if left_out := [name for name in before if name not in manifests]:
        console.print(f"not in this summary, as their scale, steps or text differ: {', '.join(left_out)}", **PLAIN)
    for name in now:
        manifests[name].save(out)
    lengths = {run.name: run.read_recipe().train.steps for run in planned.runs}
    try:
        with RunBoard(console, lengths) as board:
            written = time.monotonic()

            def watch(event: Event) -> None:
                nonlocal written
                board.watch(event)
                if event.is_last and time.monotonic() - written > SUMMARISED_EVERY_S:
                    _summarised(manifests, out)
                    written = time.monotonic()

            ended = train_all(planned.runs, engine, watch)
        left = _assess([manifests[name] for name in now], out, console)
    finally:
        summary = _summarised(manifests, out)
    write_report([out])
    return SweepEnding(summary, _failures(planned, ended), _edited(summary), left)


def _jobs(request: SweepRequest, runs: int) -> int:
    """Runs at a time: as requested, else one per card, else by the number of cores."""
    return request.jobs or cards_here() or jobs_for(runs, cores_here())


def _prepared(plan: SweepPlan, progress: StageProgress) -> dict[str, TokenDataset]:
    """The data of all cells, each kind once."""
    recipes = {data_key(cell.recipe): cell.recipe for cell in plan.cells.values()}
    return {key: prepared(recipe.data, progress=progress) for key, recipe in recipes.items()}


def _check_version(path: Path) -> None:
    """Refuse to replace a summary of another schema version.

    Raises:
        InputError: it names both.
    """
    if not path.is_file():
        return
    try:
        version = parse_json(path.read_text(encoding="utf-8")).get("schema")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it, or choose another --out") from error
    if version != SCHEMA:
        raise InputError(
            f"{path} has schema {version} and this version of sinklab writes {SCHEMA}: choose another --out, or move "
            "the file away; the runs stay"
        )


def _assess(manifests: Sequence[SweepManifest], out: Path, console: Console) -> dict[str, str]:
    """Run the missing parts of `assess` that the experiments ask for; returns the errors by run."""
    left: dict[str, str] = {}
    done = set[str]()
    with JobProgress(console) as progress:
        while runs := [run for run in unassessed(manifests, out) if run.name not in done | left.keys()]:
            free = [run for run in runs if not is_written(run.directory / ASSESSMENT)]
            if not free:  # other processes of this sweep are assessing them
                time.sleep(LOOKS_EVERY_S)
            for number, run in enumerate(free, 1):
                progress.say(f"assessing {run.name}, {number} of {len(free)}")
                try:
                    _assess_run(run, progress)
                    done.add(run.name)
                except HeldError:
                    pass
                except SinklabError as error:
                    left[run.name] = str(error)
    return left


def _assess_run(run: Unassessed, observe: Observer) -> None:
    """Assess a run on its own validation text; parts that do not apply to it are skipped.

    Raises:
        InputError: it was assessed on another text before, or its text or weights are no longer there.
    """
    path = run.directory / ASSESSMENT
    if path.is_file() and not load_assessment(path).on_held_out:
        raise InputError(
            f"{path} is of another text than the run's own, and is kept: move it elsewhere and call this again to have "
            "the run assessed as its experiment wants"
        )
    options = AssessOptions(parts=tuple(run.parts), where_possible=True)
    assess(str(run.directory), None, options, out=run.directory, observe=observe)


def _summarised(manifests: Mapping[str, SweepManifest], out: Path) -> Summary:
    """The summary, written."""
    summary = summary_of(manifests, out)
    summary.save(out)
    return summary


def _failures(planned: PlannedSweep, ended: Mapping[str, Event]) -> dict[str, str]:
    """The reasons of failures by run; the divergence of a cell that may diverge is a result."""
    expected = {
        planned.hashes[name, seed]
        for name, cell in planned.plan.cells.items()
        for seed in cell.seeds
        if cell.may_diverge and (name, seed) in planned.hashes
    }
    failed = {run: ended[run.name] for run in planned.runs if ended[run.name].kind == "failed"}
    return {
        run.name: event.message
        for run, event in failed.items()
        if run.hash not in expected or record_of(run.directory, run.hash) is None
    }


def _edited(summary: Summary) -> dict[str, Sequence[str]]:
    return {run.directory: run.edited for cell in summary.cells.values() for run in cell.runs if run.edited}
