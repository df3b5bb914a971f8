"""A sweep from what was asked to its summary: data once, runs shared with whoever trains them, summary.json, a page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from sinklab.assessing.assessment import ASSESSMENT
from sinklab.commands.assess import AssessProgress
from sinklab.commands.console import PLAIN, RunBoard, data_progress
from sinklab.commands.timing import RunLength
from sinklab.data.prepare import prepared
from sinklab.data.shards import TokenDataset
from sinklab.data.text_tokenizer import StageProgress
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import SUMMARY, Summary
from sinklab.experiments.sweep.asked import AskedExperiment, asked_for, joined, read_asked
from sinklab.experiments.sweep.assessed import assess_run, unassessed
from sinklab.experiments.sweep.driving import train_all
from sinklab.experiments.sweep.engines.choice import EngineName, open_engine
from sinklab.experiments.sweep.engines.local import cards_here, cores_here, jobs_for, shares
from sinklab.experiments.sweep.estimate import pace_here, pace_of_runs
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
from sinklab.experiments.sweep.planned import Event, PlannedRun
from sinklab.experiments.sweep.preview import Preview, preview
from sinklab.experiments.sweep.store import found_runs, record_of, summary_of
from sinklab.files import parse_json
from sinklab.outputs import REPORT, check_results
from sinklab.report import write_report
from sinklab.train.directory.lock import HeldError, is_written

if TYPE_CHECKING:
    from sinklab.assessing.running import AssessListener

SUMMARISED_EVERY_S = 60.0
"""Meanwhile, so that a night that ends in a power cut has a summary, too."""

LOOKS_EVERY_S = 2.0
"""For the end of what other processes assess."""

SCHEMA = Summary.model_fields["schema_version"].default


@dataclass(frozen=True)
class SweepRequest:
    """What is to be run.

    Attributes:
        questions: experiments, of one scale.
        out: directory of the runs, summary.json and report.html.
        overlay: laid over every recipe.
        jobs: runs at a time; as many as the machine suggests unless given.
        engine: where they are trained.
        settings: of the engine, KEY=VALUE each.
        packed: a folder of packed runs, which count as finished ones.
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
    """What has come of a sweep.

    Attributes:
        summary: as it was written.
        failures: by run, why it failed; those left out that would be a result.
        edited: by run directory, its files that were changed since.
        unassessed: by run, why what its experiment wants assessed was not.
    """

    summary: Summary
    failures: Mapping[str, str]
    edited: Mapping[str, Sequence[str]]
    unassessed: Mapping[str, str]


def look_ahead(request: SweepRequest) -> Preview:
    """What the sweep will take; nothing is written. Of a cluster only its finished runs say how fast it is.

    Raises:
        InputError: as `sweep`.
    """
    check_results(request.out, (SUMMARY, REPORT))
    plan = plan_sweep(request.questions, request.overlay)
    with TemporaryDirectory() as folder:
        if request.packed is not None:
            unpack(request.packed, Path(folder))
        found = found_runs(Path(folder)) | found_runs(request.out)
        if request.engine != EngineName.local:
            return preview(plan, request.out, found, request.engine, pace_of_runs(request.out), None)
        jobs = _jobs(request, len(plan.order))
        base = next(iter(cells_of(request.questions[0], request.overlay).values())).recipe
        pace = pace_here(base, shares(jobs)[0].threads, request.out)
        return preview(plan, request.out, found, request.engine, pace, jobs)


def sweep(request: SweepRequest, console: Console) -> SweepEnding:
    """Train what is missing and add up what there is; `console` is told how it goes.

    Raises:
        InputError: a scale that an experiment lacks, text or a directory that cannot be used, an overlay that makes an
            invalid recipe, an engine that is not installed or does not answer.
        KeyboardInterrupt: Ctrl-C; everything is saved and the same call continues.
        PreemptedError: SIGTERM or SIGUSR1, likewise.
    """
    out, overlay = request.out, request.overlay
    check_results(out, (SUMMARY, REPORT))
    _check_version(out / SUMMARY)
    if request.packed is not None:
        take_up(request.packed, out)
    before = read_asked(out)
    plan = plan_sweep(request.questions, overlay)
    engine = open_engine(request.engine, _jobs(request, len(plan.order)), out, request.settings)
    with data_progress(console) as progress:
        data = _prepared(plan, progress)
    planned = place_sweep(plan, data, out, found_runs(out))
    now = {one.experiment.id: asked_for(one, planned, overlay) for one in request.questions}
    asked = joined(before, now)
    if left_out := [name for name in before if name not in asked]:
        console.print(f"not in this summary, as their scale, steps or text differ: {', '.join(left_out)}", **PLAIN)
    missing = [run for run in planned.runs if record_of(run.directory, run.hash) is None]
    for name in now:
        asked[name].save(out)
    lengths = {run.name: _length(run) for run in planned.runs}
    try:
        with RunBoard(console, lengths, _jobs(request, len(missing))) as board:
            written = time.monotonic()

            def watch(event: Event) -> None:
                nonlocal written
                board.watch(event)
                if event.is_last and time.monotonic() - written > SUMMARISED_EVERY_S:
                    _summarised(asked, out)
                    written = time.monotonic()

            ended = train_all(planned.runs, engine, watch)
        left = _assess([asked[name] for name in now], out, console)
    finally:
        summary = _summarised(asked, out)
    write_report([out])
    return SweepEnding(summary, _failures(planned, ended), _edited(summary), left)


def _jobs(request: SweepRequest, runs: int) -> int:
    """How many at a time: as asked, else one per card or as many as the cores suggest."""
    return request.jobs or cards_here() or jobs_for(runs, cores_here())


def _prepared(plan: SweepPlan, progress: StageProgress) -> dict[str, TokenDataset]:
    """The data of all cells, each kind once."""
    recipes = {data_key(cell.recipe): cell.recipe for cell in plan.cells.values()}
    return {key: prepared(recipe.data, progress=progress) for key, recipe in recipes.items()}


def _length(run: PlannedRun) -> RunLength:
    train = run.read_recipe().train
    return RunLength(train.steps, train.eval_every)


def _check_version(path: Path) -> None:
    """Refuse to replace a summary of another schema version; one from before there were versions is replaced.

    Raises:
        InputError: it names both.
    """
    if not path.is_file():
        return
    try:
        version = parse_json(path.read_text(encoding="utf-8")).get("schema", SCHEMA)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Remove it, or choose another --out") from error
    if version != SCHEMA:
        raise InputError(
            f"{path} has schema {version} and this version of sinklab writes {SCHEMA}: choose another --out, or move "
            "the file away; the runs stay"
        )


def _assess(asked: Sequence[AskedExperiment], out: Path, console: Console) -> dict[str, str]:
    """Assess what the experiments want of their runs; returns by run why that could not be."""
    left: dict[str, str] = {}
    done = set[str]()
    with AssessProgress(console) as listener:
        while runs := [run for run in unassessed(asked, out) if run.name not in done | left.keys()]:
            free = [run for run in runs if not is_written(run.directory / ASSESSMENT)]
            if not free:  # other processes of this sweep are at them
                time.sleep(LOOKS_EVERY_S)
            for number, run in enumerate(free, 1):
                listener.say(f"assessing {run.name}, {number} of {len(free)}")
                try:
                    assess_run(run, cast("AssessListener", listener))
                    done.add(run.name)
                except HeldError:
                    pass
                except SinklabError as error:
                    left[run.name] = str(error)
    return left


def _summarised(asked: Mapping[str, AskedExperiment], out: Path) -> Summary:
    """The summary, written."""
    summary = summary_of(asked, out)
    summary.save(out)
    return summary


def _failures(planned: PlannedSweep, ended: Mapping[str, Event]) -> dict[str, str]:
    """By run, why it failed; that a cell diverged of which that may be expected is a result."""
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
