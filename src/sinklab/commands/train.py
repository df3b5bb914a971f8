"""Implementation of `sinklab train`, in one process or under torchrun."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from sinklab.commands.terminal import DataDisplay, RunDisplay, print_text
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepared
from sinklab.device import keep_freed_memory
from sinklab.errors import InputError, StoppedError, require_extra
from sinklab.experiments.sweep.engine import Event
from sinklab.files import check_writable
from sinklab.signals import stop_on_signals
from sinklab.train.evaluator import Tracker, TrackerName, tracked
from sinklab.train.loop import RunOutcome, Trainer
from sinklab.train.planning import TrainingPlan, check_fits, plan_of, sized
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.run import Run, emulation_warning, existing_run, open_run
from sinklab.train.start import with_checkpoint_values
from sinklab.train.update import Replay, replay
from sinklab.train.world import World, joined_world


def train_command(
    recipe: str,
    overrides: Iterable[str],
    out: Path | None,
    console: Console,
    trackers: Sequence[TrackerName] = (),
    anyway: bool = False,
    as_json: bool = False,
) -> None:
    """Train the model of a recipe, or resume its run; log progress to `console` and metrics to the trackers.

    Rank 0 prints the last evaluation or, with `as_json`, the measurement.

    Args:
        out: run directory; default: runs/NAME-HASH, with the recipe's name and the run's hash.
        anyway: train even if the memory estimate exceeds the memory of the GPU or machine.

    Raises:
        InputError: if a recipe, text or directory cannot be used, the estimate exceeds the memory, the batch size is
            not a multiple of the world size, or the optional dependency of a tracker is not installed.
        HeldError: if another process trains this run.
        SinklabError: if training failed; saved checkpoints are kept.
        Exit: if training was stopped, with status 130 (Ctrl-C) or 75 (SIGTERM, SIGUSR1, or a signal to another rank).
    """
    keep_freed_memory()
    with joined_world() as world:
        if not world.is_first:
            console.quiet = True
        world.on_all_ranks(lambda: require_extra("track", trackers, "--track"))
        loaded = world.on_all_ranks(lambda: _recipe(recipe, overrides, world))
        if out is not None:
            world.only_first(lambda: check_writable(out))
        if not anyway:
            device, prepare = loaded.train.device, lambda: _data(loaded, console)  # to find the vocabulary size
            world.on_all_ranks(lambda: check_fits(sized(loaded, world.device(device), prepare), world))
        dataset = world.on_all_ranks(lambda: _data(loaded, console))
        with stop_on_signals() as should_stop:
            run = world.on_all_ranks(lambda: open_run(loaded, dataset, out))
            try:
                outcome = _trained(run, world, console, should_stop, trackers)
            except StoppedError:  # before the model was built
                outcome = None
    if outcome is None or outcome.status != "done":
        if outcome is not None:
            reached = f"step {outcome.step} of {run.recipe.train.steps}"
            print_text(f"stopped at {reached}; the checkpoint is in {run.directory}", console)
        raise typer.Exit(should_stop.exit_status)
    if world.is_first and as_json:
        print((run.directory / "measurement.json").read_text(encoding="utf-8"), end="")
    elif world.is_first:
        from sinklab.commands.results import print_end

        print_end(run.directory, run.recipe, Console())


def _trained(
    run: Run, world: World, console: Console, should_stop: Callable[[], bool], trackers: Sequence[TrackerName]
) -> RunOutcome:
    name, steps = run.recipe.name, run.recipe.train.steps
    longer = "" if run.shorter is None else f", which continues the run of {run.shorter} steps"
    print_text(f"run {run.hash} in {run.directory}{longer}", console)
    for note in filter(None, (emulation_warning(run.recipe), *(run.dataset.manifest.notes or ()))):
        print_text(note, console)
    active: list[Tracker] = []
    with RunDisplay(console, {name: steps}) as display:

        def watch(step: int, row: dict[str, Any] | None) -> None:
            display.watch(Event(name, "step" if row is None else "row", step, row))
            if row is not None:
                for tracker in active:
                    tracker.row(row)

        trainer = Trainer(run, watch, should_stop, world)
        display.watch(Event(name, "ready", trainer.state.step))
        was_done = trainer.state.step == steps
        with tracked(trackers if world.is_first else (), run, trainer.state.step) as opened:
            active += opened
            outcome = trainer.train()
            without = [tracker for tracker in active if tracker.is_new or not was_done]
            if outcome.status == "done" and without:
                from sinklab.report.collect import collect
                from sinklab.report.page import export_charts

                with tempfile.TemporaryDirectory() as folder:
                    files = export_charts(collect([run.directory]), Path(folder), ("png",))
                    for tracker in without:
                        tracker.charts(files)
    return outcome


def plan_command(recipe: str, overrides: Iterable[str]) -> tuple[TrainingPlan, bool]:
    """Estimate parameters, FLOPs and memory of training a recipe, with the number of processes set by torchrun.

    Returns:
        The estimates, and True if this process (rank 0) prints them.

    Raises:
        InputError: if the recipe, device or text is unusable, or the batch size is not a multiple of the world size.
    """
    with joined_world() as world:
        loaded = world.on_all_ranks(lambda: _recipe(recipe, overrides, world))
        plan = world.on_all_ranks(lambda: plan_of(loaded, world.device(loaded.train.device), world.size))
        return plan, world.is_first


def replay_command(recipe: str, overrides: Iterable[str], out: Path | None, step: int, console: Console) -> Replay:
    """Recompute and return loss and gradients of one step of a run, with the first tensor that has NaN or infinity.

    Raises:
        InputError: see `replay`; also if there is no such run, or several processes were started.
        SinklabError: see `replay`.
    """
    with joined_world() as world:
        if world.size > 1:
            raise world.shared_error(InputError("--replay needs one process: start it without torchrun"))
        loaded = with_checkpoint_values(load_recipe(recipe, overrides))
        return replay(existing_run(loaded, _data(loaded, console), out), step)


def _recipe(name: str, overrides: Iterable[str], world: World) -> Recipe:
    """Load a recipe and fill in unset values; with several processes, make this one's GPU the current CUDA device."""
    recipe = with_checkpoint_values(load_recipe(name, overrides))
    world.use(recipe.train.device)
    return recipe


def _data(recipe: Recipe, console: Console) -> TokenDataset:
    with DataDisplay(console) as progress:
        return prepared(recipe.data, progress=progress)
