"""Implementation of `sinklab reproduce` and `lab`: sweeps of trained models, and measurements of existing ones.

A sweep prepares its data once, shares its runs with other processes, and writes summary.json and report.html.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console

from sinklab.assessing.assess_model import assess
from sinklab.assessing.assessment import load_assessment
from sinklab.assessing.settings import AssessOptions
from sinklab.commands.options import ReproduceSettings, print_result, save_report
from sinklab.commands.terminal.plans import print_passes
from sinklab.commands.terminal.progress import DataDisplay, JobProgress, RunDisplay
from sinklab.commands.terminal.results import print_summary
from sinklab.commands.terminal.tables import print_text, stderr
from sinklab.data.prepare import prepared
from sinklab.data.sources.corpora import documents
from sinklab.data.sources.textfiles import read_conversations
from sinklab.errors import InputError, SinklabError
from sinklab.evaluating.tasks import chosen_task
from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import SUMMARY, Summary, record_of
from sinklab.experiments.measured import (
    MeasuredResults,
    Pass,
    downstream_tasks,
    measure_experiment,
    passes_of,
    subjects_of,
    with_models,
)
from sinklab.experiments.sweep import store
from sinklab.experiments.sweep.engine import Event, train_all
from sinklab.experiments.sweep.engines import EngineName, open_engine
from sinklab.experiments.sweep.engines.local import cards_here, cores_here, jobs_for, shares
from sinklab.experiments.sweep.packed import import_packed, unpack
from sinklab.experiments.sweep.plan import (
    ExperimentRequest,
    PlannedSweep,
    SweepPlan,
    cells_of,
    data_key,
    place_sweep,
    plan_sweep,
)
from sinklab.experiments.sweep.preview import Preview, pace_here, pace_of_runs, preview
from sinklab.jobs.progress import Observer
from sinklab.models.huggingface.loading import Loading
from sinklab.outputs import REPORT, RUNS, check_results
from sinklab.signals import INTERRUPTED, PreemptedError
from sinklab.survey.measure_many import labels
from sinklab.train.directory.lock import HeldError, is_written
from sinklab.train.directory.run import emulation_warning
from sinklab.tuning.sft_dataset import TuneSources
from sinklab.tuning.tune import check_extra, check_tuned, tune

MODELS = RUNS / "models"
NAMED = "named"
"""Folder in MODELS for the results of experiments with fixed models."""

SUMMARISED_EVERY_S = 60.0
"""Minimum interval in seconds between writes of summary.json during the sweep, which limit the loss at a power cut."""

LOOKS_EVERY_S = 2.0
"""Interval in seconds between checks of runs that other processes assess or fine-tune."""


def look_ahead(requests: Sequence[ExperimentRequest], settings: ReproduceSettings) -> Preview:
    """Find the finished runs of a sweep and estimate its duration without training its runs.

    On slurm or ray, only the duration of each run is estimated, and only if there are finished runs in the directory.

    Raises:
        InputError: see `check_results`, `plan_sweep`, `SweepPlan.only`, `unpack`, `preview`, `pace_here` and
            `ReproduceSettings.overlay`.
        SinklabError: if an env.json cannot be read or is damaged.
    """
    out, overlay = settings.directory, settings.overlay
    check_results(out, (SUMMARY, REPORT))
    plan = plan_sweep(requests, overlay).only(settings.cells)
    if settings.dry_run:  # `train_experiments` warns as well
        _warn_of_emulation(plan, settings)
    with TemporaryDirectory() as folder:
        if settings.packed is not None:
            unpack(settings.packed, Path(folder))
        own = store.found_runs(out)
        found = store.found_runs(Path(folder)) | own
        if settings.engine != EngineName.local:
            return preview(plan, out, found, settings.engine, pace_of_runs(own.values()), None)
        jobs = _jobs(settings, len(plan.order))
        base = next(iter(cells_of(requests[0], overlay).values())).recipe
        pace = pace_here(base, shares(jobs)[0].threads, own.values())
        return preview(plan, out, found, settings.engine, pace, jobs)


def check_chats(experiments: Sequence[Experiment], chats: Path | None) -> None:
    """Check the conversations (--data) and packages for fine-tuning, if any of the experiments fine-tunes its runs.

    Raises:
        InputError: if the file is missing, malformed, without conversations or not used by any experiment, two
            experiments have different tuning settings, or see `check_extra`.
    """
    tuned = [one for one in experiments if one.tune is not None]
    if not tuned:
        if chats is not None:
            raise InputError(
                f"--data {chats} applies to experiments with a downstream task or with `tune`, and "
                f"{experiments[0].id} has neither: remove it"
            )
        return
    first, *others = tuned
    if chats is None:
        raise InputError(
            f"{first.id} fine-tunes its models on conversations: pass them with --data, as a .jsonl file with one "
            'conversation per line, {"messages": [{"role": .., "content": ..}, ..]}, or as .json or .parquet'
        )
    if different := [one.id for one in others if one.tune != first.tune]:
        raise InputError(
            f"{first.id} and {different[0]} differ in `tune`: run them in separate commands, each with its own --out"
        )
    check_extra()
    if next(read_conversations(chats), None) is None:
        raise InputError(f"{chats} contains no conversation: pass a file whose rows have `messages`")


def train_experiments(requests: Sequence[ExperimentRequest], settings: ReproduceSettings, as_json: bool) -> None:
    """Train the missing runs of the experiments, assess and fine-tune them if requested, and summarise all runs.

    Progress, warnings and failures are printed to stderr, the summary to standard output.

    Raises:
        InputError: if a text or directory is unusable, a chosen cell does not exist, an overlay yields an invalid
            recipe, earlier results in the directory do not match this command, or an engine is not installed or does
            not respond.
        SinklabError: if a file of an earlier run is damaged, or a file cannot be written.
        KeyboardInterrupt, PreemptedError: on a signal; progress is saved, and the same command resumes.
        Exit: with status 1 if a run failed; divergence of a run whose cell may diverge is not a failure.
    """
    console, out, overlay = stderr(), settings.directory, settings.overlay
    check_results(out, (SUMMARY, REPORT))
    plan = plan_sweep(requests, overlay)
    chosen = plan.only(settings.cells)
    if settings.packed is not None:
        import_packed(settings.packed, out)
    store.read_manifests(out)  # damaged ones are refused before the data is prepared
    engine = open_engine(settings.engine, _jobs(settings, len(chosen.order)), out, settings.engine_options)
    _warn_of_emulation(chosen, settings)
    recipes = {data_key(cell.recipe): cell.recipe for cell in plan.cells.values()}
    with DataDisplay(console) as progress:
        data = {key: prepared(recipe.data, progress=progress) for key, recipe in recipes.items()}
    with JobProgress(console, phase=f"searching for runs in {out}"):
        found = store.found_runs(out)
        whole = place_sweep(plan, data, out, found)
        planned = whole if chosen is plan else place_sweep(chosen, data, out, found)
    now = {one.experiment.id: store.manifest_of(one, whole, overlay) for one in requests}
    before = store.read_manifests(out)  # read late: other commands may add experiments and seeds meanwhile
    manifests = store.merged_manifests(before, now)
    if left_out := [name for name in before if name not in manifests]:
        print_text(f"not in this summary, because scale, steps or text differ: {', '.join(left_out)}", console)
    asked = [manifests[name] for name in now]
    for tuning in store.tuning_requests(asked, out):
        if tuning.document.is_file() and settings.data is not None:
            check_tuned(tuning.document, tuning.options, settings.data)
    for manifest in asked:
        manifest.save(out)

    def summarised() -> Summary:
        return store.summary_of(store.merged_manifests(store.read_manifests(out), now), out)

    written = time.monotonic()
    try:
        with RunDisplay(console, {run.name: run.read_recipe().train.steps for run in planned.runs}) as display:

            def watch(event: Event) -> None:
                nonlocal written
                display.watch(event)
                if event.is_last and time.monotonic() - written > SUMMARISED_EVERY_S:
                    summarised().save(out)
                    written = time.monotonic()

            ended = train_all(planned.runs, engine, watch)
        undone = _assess_and_tune(asked, out, settings.data, console)
    finally:
        summary = summarised()
        summary.save(out)
    print_result(as_json, lambda: summary.model_dump(by_alias=True), lambda out: print_summary(summary, now, out))
    failed = _failures(planned, ended)
    edited = {
        f"{out / run.directory} was modified after the run ended": run.edited for run in summary.runs if run.edited
    }
    for what, files in edited.items():
        print_text(f"warning: {what} ({', '.join(files)})", console)
    for what, why in undone.items():
        print_text(f"warning: {what}: {why}", console)
    save_report(out)
    for run, message in failed.items():
        print_text(f"failed: {run}: {message}", console)
    if failed:
        raise typer.Exit(1)


def _warn_of_emulation(plan: SweepPlan, settings: ReproduceSettings) -> None:
    """Print the `emulation_warning` of the cells' recipes, if the sweep trains on this machine."""
    recipes = [cell.recipe for cell in plan.cells.values()] if settings.engine == EngineName.local else []
    for warning in sorted({emulation_warning(recipe) for recipe in recipes} - {""}):
        print_text(warning, stderr())


def _jobs(settings: ReproduceSettings, runs: int) -> int:
    """Return the number of concurrent runs: --jobs; else the number of GPUs; without a GPU, see `jobs_for`."""
    return settings.jobs or cards_here() or jobs_for(runs, cores_here())


def _assess_and_tune(
    manifests: Sequence[store.SweepManifest], out: Path, chats: Path | None, console: Console
) -> dict[str, str]:
    """Run the missing assessments (`assess`) and fine-tunings (`sft`) that the experiments request.

    Returns:
        Error messages, by a phrase such as "softmax seed 0 was not tuned".
    """
    left: dict[str, str] = {}
    done = set[str]()
    with JobProgress(console) as progress:
        while True:
            tunings = (run for run in store.tuning_requests(manifests, out) if not run.is_finished)
            assessments = store.assessment_requests(manifests, out)
            missing = {f"{run.name} was not {run.done}": run for run in (*assessments, *tunings)}
            runs = {undone: run for undone, run in missing.items() if undone not in done | left.keys()}
            if not runs:
                return left
            free = {undone: run for undone, run in runs.items() if not is_written(run.document)}
            if not free:  # all are assessed or tuned by other processes
                progress.begin("waiting for other processes that assess or tune the runs")
                time.sleep(LOOKS_EVERY_S)
            for number, (undone, run) in enumerate(free.items(), 1):
                progress.say(f"{run.doing} {run.name}, {number} of {len(free)}")
                try:
                    if isinstance(run, store.AssessmentRequest):
                        _assess_run(run, progress)
                    else:
                        assert chats is not None  # checked by check_chats
                        folder, sources = run.document.parent, TuneSources(chats)
                        ended = tune(str(run.directory), sources, run.options, folder, observe=progress)
                        if ended.exit_status:
                            raise KeyboardInterrupt if ended.exit_status == INTERRUPTED else PreemptedError
                    done.add(undone)
                except HeldError:
                    pass
                except SinklabError as error:
                    left[undone] = str(error)


def _assess_run(run: store.AssessmentRequest, observe: Observer) -> None:
    """Assess the model of a run on the run's validation text; parts that do not apply to the model are skipped."""
    if run.document.is_file() and not load_assessment(run.document).on_held_out:
        raise InputError(
            f"{run.document} was computed on a text other than the run's validation text and is not overwritten: move "
            "it elsewhere and run the same command again to assess the run"
        )
    options = AssessOptions(parts=tuple(run.parts))
    assess(str(run.directory), None, options, out=run.directory, where_possible=True, observe=observe)


def _failures(planned: PlannedSweep, ended: Mapping[str, Event]) -> dict[str, str]:
    """Return the reason for failure by run name; divergence of a run whose cell may diverge is not a failure."""
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


def measure_experiments(experiments: Sequence[Experiment], settings: ReproduceSettings, as_json: bool) -> None:
    """Run the missing measurements of experiments on existing models, judge the claims, and print the summary.

    Progress is printed to stderr, the summary to standard output. A single experiment is written to --out, several
    to subfolders named by their ids; without --out, each is written to runs/models/MODEL/ID.

    Raises:
        InputError: if a model or text is missing, or a model, text, --data or output directory cannot be used.
        SinklabError: if a measurement failed (the finished ones are saved, summarised and printed), or a result cannot
            be saved.
        KeyboardInterrupt, PreemptedError: on a signal; finished measurements are saved, and the same command resumes.
    """
    console, models, text, data = stderr(), settings.models, settings.text, settings.data
    passes = _passes(experiments, settings)
    if data is not None and not any(downstream_tasks(one) for one in experiments):
        raise InputError(f"--data {data} applies to downstream tasks, and {experiments[0].id} has none: remove it")
    for one in experiments:  # before the first measurement
        for task in downstream_tasks(one):
            chosen_task(task, data)
    given = "+".join(label.replace("/", "_") for label in labels(models)) if models else NAMED
    top = settings.out or MODELS / given
    places = {name: top if settings.out and len(passes) == 1 else top / name for name in passes}
    for place in places.values():
        check_results(place, (REPORT,))
    done: list[MeasuredResults] = []
    loading = Loading(trust_remote_code=settings.trust_remote_code)
    for one in experiments:
        draws = settings.seeds or one.seeds
        passes_here = sum(len(each.replicates(draws)) for each in passes[one.id])
        with JobProgress(console, one.id, passes_here, phase="reading the text and the models") as observe:
            place, file = places[one.id], data if downstream_tasks(one) else None
            found = measure_experiment(one, models, text, draws, loading=loading, out=place, observe=observe, data=file)
            done.append(found)
    written = [one.document() for one in done]

    def show(out: Console) -> None:
        for one in done:
            print_summary(one.summary(), [one.experiment.id], out)

    print_result(as_json, lambda: written[0] if len(written) == 1 else written, show)
    for place in places.values():
        if any(place.rglob("measurement.json")):
            save_report(place)
    if failed := [f"{name}: {why}" for one in done for name, why in one.outcome.failed.items()]:
        raise SinklabError("\n".join(failed))


def preview_measured(experiments: Sequence[Experiment], settings: ReproduceSettings, as_json: bool) -> None:
    """Print the planned measurements of experiments on existing models; no model is loaded. Errors: see `_passes`."""
    passes = _passes(experiments, settings)
    if settings.text is not None:
        next(documents(str(settings.text)))
    planned = [
        (one.id, each, each.replicates(settings.seeds or one.seeds)) for one in experiments for each in passes[one.id]
    ]

    def document() -> dict[str, object]:
        asked: dict[str, dict[str, object]] = {one.id: {} for one in experiments}
        for experiment, each, replicates in planned:
            models = list(dict.fromkeys(str(each.model(number)) for number in replicates))
            counts = {"models": models, "replicates": len(replicates)}
            asked[experiment][each.name] = {**counts, **each.request(0).document()}
        return {"schema": 2, "experiments": asked}

    print_result(as_json, document, lambda out: print_passes(planned, out))


def _passes(experiments: Sequence[Experiment], settings: ReproduceSettings) -> dict[str, list[Pass]]:
    """Return the measurement passes of each experiment by its id; see `with_models` and `passes_of` for errors."""
    chosen = [with_models(one, settings.models) for one in experiments]
    return {one.id: passes_of(one, subjects_of(one, settings.models, settings.text)) for one in chosen}
