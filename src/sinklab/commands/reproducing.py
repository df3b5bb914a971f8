"""Implementation of `sinklab reproduce` and `lab`: sweeps of trained models, and measurements of existing ones.

A sweep prepares its data once, shares its runs with other processes, and writes summary.json and report.html.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import typer
from rich.console import Console

from sinklab.assessing.assess_model import assess, load_assessment
from sinklab.assessing.settings import AssessOptions
from sinklab.commands.options import ReproduceSettings, print_result, save_report
from sinklab.commands.results import print_passes
from sinklab.commands.terminal import DataDisplay, JobProgress, RunDisplay, print_text, stderr
from sinklab.data.corpora import documents
from sinklab.data.prepare import prepared
from sinklab.data.textfiles import read_conversations
from sinklab.errors import InputError, SinklabError
from sinklab.evaluating.evaluate_model import chosen_task
from sinklab.experiments.definition import Experiment, Scale
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
from sinklab.experiments.sweep.cluster import open_engine
from sinklab.experiments.sweep.engine import Event, train_all
from sinklab.experiments.sweep.local import cards_here, default_jobs, shares
from sinklab.experiments.sweep.packed import import_packed, unpack
from sinklab.experiments.sweep.preview import Preview, pace_here, pace_of_runs, preview, read_finished
from sinklab.experiments.sweep.store import SweepPlan, data_key, plan_sweep
from sinklab.files import REPORT, RUNS, check_results
from sinklab.models.huggingface.loading import Loading
from sinklab.signals import INTERRUPTED, PreemptedError
from sinklab.survey.measure import labels
from sinklab.tables import counted
from sinklab.train.lock import HeldError
from sinklab.train.planning import most_at_once
from sinklab.train.run import emulation_warning
from sinklab.tuning.sft_dataset import TuneSources
from sinklab.tuning.tune import check_extra, check_tuned, tune

MODELS = RUNS / "models"
NAMED = "named"
"""Folder in MODELS for the results of experiments with fixed models."""

SUMMARISED_EVERY_S = 60.0
"""Minimum interval in seconds between writes of summary.json during the sweep, which limit the loss at a power cut."""

LOOKS_EVERY_S = 2.0
"""Seconds between checks of runs that other processes assess or fine-tune."""


def look_ahead(experiments: Sequence[Experiment], settings: ReproduceSettings) -> Preview:
    """Find the finished runs of a sweep and estimate its duration without training its runs.

    On slurm or ray, only the duration of each run is estimated, and only if there are finished runs in the directory.

    Raises:
        InputError: if the directory, an option, the packed sweep or a recipe cannot be used.
        SinklabError: if an env.json cannot be read or is damaged.
    """
    out = settings.directory
    check_results(out, (SUMMARY, REPORT))
    plan = plan_sweep(experiments, settings.scale_name, settings.seeds, settings.overlay).only(settings.cells)
    if settings.dry_run:  # `train_experiments` warns as well
        _warn_of_emulation(plan, settings)
    with TemporaryDirectory() as folder:
        if settings.packed is not None:
            unpack(settings.packed, Path(folder))
        own = read_finished(store.found_runs(out))
        finished = [*own, *read_finished(store.found_runs(Path(folder)))]
    pace, jobs = pace_of_runs(own), None
    if settings.engine == "local":
        jobs = _jobs(plan, settings)
        pace = pace or pace_here(next(iter(plan.cells.values())).recipe, shares(jobs)[0].threads)
    return preview(plan, finished, settings.engine, pace, jobs, settings.shard_of)


def _jobs(plan: SweepPlan, settings: ReproduceSettings) -> int:
    """Return the number of concurrent runs on this machine: --jobs, or the default number of runs that fit into memory.

    Raises:
        InputError: if so many runs as --jobs do not fit into the memory of the machine or its GPUs.
    """
    most = most_at_once([cell.recipe for cell in plan.cells.values()], max(1, cards_here()))
    if settings.jobs is None:
        return min(default_jobs(len(plan.order)), most or sys.maxsize)
    if most is not None and settings.jobs > most:
        raise InputError(
            f"--jobs {settings.jobs}: only {counted(most, 'run')} of this size fit into memory at a time, by a rough "
            f"estimate: pass --jobs {most}"
        )
    return settings.jobs


def check_chats(experiments: Sequence[Experiment], chats: Path | None) -> None:
    """Check the conversations (--data) and packages for fine-tuning, if any of the experiments fine-tunes its runs.

    Raises:
        InputError: if the file is missing, malformed, without conversations or not used by any experiment, two
            experiments have different tuning settings, or a package is missing.
    """
    tuned = [one for one in experiments if one.tune is not None]
    if not tuned and chats is not None:
        raise InputError(
            f"--data {chats} applies to experiments with a downstream task or with `tune`, and "
            f"{experiments[0].id} has neither: remove it"
        )
    if not tuned:
        return
    if chats is None:
        raise InputError(
            f"{tuned[0].id} fine-tunes its models on conversations: pass them with --data, as a .jsonl file with one "
            'conversation per line, {"messages": [{"role": .., "content": ..}, ..]}, or as .json or .parquet'
        )
    if different := [one.id for one in tuned if one.tune != tuned[0].tune]:
        raise InputError(
            f"{tuned[0].id} and {different[0]} differ in `tune`: run them in separate commands, each with its own --out"
        )
    check_extra()
    if next(read_conversations(chats), None) is None:
        raise InputError(f"{chats} contains no conversation: pass a file whose rows have `messages`")


def train_experiments(
    experiments: Sequence[Experiment],
    settings: ReproduceSettings,
    as_json: bool,
    show: Callable[[Summary, Console], None],
) -> None:
    """Train the missing runs of the experiments, assess and fine-tune them if requested, and summarise all runs.

    Progress, warnings and failures are printed to stderr, the summary to standard output, with `show`.

    Raises:
        InputError: if a text or directory is unusable, a chosen cell does not exist, an overlay yields an invalid
            recipe, earlier results in the directory do not match this command, or an engine is not installed or does
            not respond.
        SinklabError: if a file of an earlier run is damaged, or a file cannot be written.
        KeyboardInterrupt, PreemptedError: on a signal; progress is saved, and the same command resumes.
        Exit: with status 1 if a run failed; divergence of a run whose cell may diverge is not a failure.
    """
    console, out = stderr(), settings.directory
    wanted = cast(Scale, settings.scale_name), settings.seeds, settings.overlay  # `plan_sweep` checks the scale
    check_results(out, (SUMMARY, REPORT))
    plan = plan_sweep(experiments, *wanted)
    chosen = plan.only(settings.cells)
    if settings.packed is not None:
        import_packed(settings.packed, out)
    store.read_manifests(out)  # damaged ones are refused before the data is prepared
    jobs = _jobs(chosen, settings) if settings.engine == "local" else 1
    engine = open_engine(settings.engine, jobs, out, settings.engine_options)
    _warn_of_emulation(chosen, settings)
    recipes = {data_key(cell.recipe): cell.recipe for cell in plan.cells.values()}
    with DataDisplay(console) as progress:
        data = {key: prepared(recipe.data, progress=progress) for key, recipe in recipes.items()}
    with JobProgress(console, phase=f"searching for runs in {out}"):
        found = store.found_runs(out)
        plan, chosen = plan.placed(data, out, found), chosen.placed(data, out, found)
    now = {one.id: store.manifest_of(one, *wanted, plan) for one in experiments}
    before = store.read_manifests(out)  # read late: other commands may add experiments and seeds meanwhile
    manifests = store.merged_manifests(before, now)
    if left_out := [name for name in before if name not in manifests]:
        print_text(f"not in this summary, because scale, steps or text differ: {', '.join(left_out)}", console)
    requested = [manifests[name] for name in now]
    for one in store.follow_ups(requested, out):
        if one.tune is not None and one.document.is_file() and settings.data is not None:
            check_tuned(one.document, one.tune, settings.data)
    for manifest in requested:
        manifest.save(out)

    def summarised() -> Summary:
        return store.summary_of(store.merged_manifests(store.read_manifests(out), now), out)

    shard, shards = settings.shard_of
    runs, written = chosen.runs[shard::shards], time.monotonic()
    try:
        with RunDisplay(console, {run.name: run.read_recipe().train.steps for run in runs}) as display:

            def watch(event: Event) -> None:
                nonlocal written
                display.watch(event)
                if event.is_last and time.monotonic() - written > SUMMARISED_EVERY_S:
                    summarised().save(out)
                    written = time.monotonic()

            ended = train_all(runs, engine, watch)
        warnings = _follow_up(store.follow_ups(requested, out), settings.data, console)
    finally:
        summary = summarised()
        summary.save(out)
    print_result(as_json, lambda: summary.model_dump(by_alias=True), lambda out: show(summary, out))
    for run in summary.runs:
        if run.edited:
            warnings.insert(0, f"{out / run.directory} was modified after the run ended ({', '.join(run.edited)})")
    for warning in warnings:
        print_text(f"warning: {warning}", console)
    save_report(out)
    expected = {run_hash for (name, _), run_hash in chosen.hashes.items() if chosen.cells[name].may_diverge}
    failed = [(run, ended[run.name]) for run in chosen.runs if run.name in ended and ended[run.name].kind == "failed"]
    failures = [
        f"failed: {run.name}: {event.message}"
        for run, event in failed
        if run.hash not in expected or record_of(run.directory, run.hash) is None  # else it diverged, as it may
    ]
    for failure in failures:
        print_text(failure, console)
    if failures:
        raise typer.Exit(1)


def _warn_of_emulation(plan: SweepPlan, settings: ReproduceSettings) -> None:
    """Print the `emulation_warning` of the cells' recipes, if the sweep trains on this machine."""
    recipes = [cell.recipe for cell in plan.cells.values()] if settings.engine == "local" else []
    for warning in sorted({emulation_warning(recipe) for recipe in recipes} - {""}):
        print_text(warning, stderr())


def _follow_up(runs: Sequence[store.FollowUp], chats: Path | None, console: Console) -> list[str]:
    """Make the missing assessments and fine-tunings, one after the other; return a warning for each that failed.

    Those that another process makes are tried again until they are there.
    """
    waiting, warnings = deque(one for one in runs if not one.is_finished), list[str]()
    count = len(waiting)
    with JobProgress(console) as progress:
        while waiting:
            run = waiting.popleft()
            if run.is_finished:
                continue
            doing, done = ("tuning", "tuned") if run.tune else ("assessing", "assessed")
            progress.say(f"{doing} {run.name}, {count - len(waiting)} of {count}")
            try:
                if run.tune is None:
                    if run.document.is_file() and not load_assessment(run.document).on_held_out:
                        raise InputError(
                            f"{run.document} was computed on a text other than the run's validation text and is not "
                            "overwritten: move it elsewhere and run the same command again to assess the run"
                        )
                    options = AssessOptions(parts=run.parts)
                    assess(str(run.directory), None, options, out=run.directory, where_possible=True, observe=progress)
                else:
                    assert chats is not None  # checked by check_chats
                    sources, folder = TuneSources(chats), run.document.parent
                    ended = tune(str(run.directory), sources, run.tune, folder, observe=progress)
                    if ended.exit_status:
                        raise KeyboardInterrupt if ended.exit_status == INTERRUPTED else PreemptedError
            except HeldError:
                waiting.append(run)
                progress.begin("waiting for other processes that assess or tune the runs")
                time.sleep(LOOKS_EVERY_S)
            except SinklabError as error:
                warnings.append(f"{run.name} was not {done}: {error}")
    return warnings


def measure_experiments(
    experiments: Sequence[Experiment],
    settings: ReproduceSettings,
    as_json: bool,
    show: Callable[[Summary, list[str], Console], None],
) -> None:
    """Run the missing measurements of experiments on existing models, judge the claims, and print the summary.

    Progress is printed to stderr, the summary to standard output, with `show`. A single experiment is written to --out,
    several to subfolders named by their ids; without --out, each is written to runs/models/MODEL/ID.

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

    def show_all(out: Console) -> None:
        for one in done:
            show(one.summary(), [one.experiment.id], out)

    print_result(as_json, lambda: written[0] if len(written) == 1 else written, show_all)
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
