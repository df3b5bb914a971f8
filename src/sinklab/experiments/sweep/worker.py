"""What every engine runs: train one run to its end, and write its record.

Whoever trains a run holds its lock, and the record is written before it is let go: of any number of processes, on
whatever machines, one trains a run, and none trains it again.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import closing

import torch

from sinklab.data.prepare import prepared
from sinklab.device import keep_freed_memory
from sinklab.errors import InputError, SinklabError, StoppedError
from sinklab.experiments.documents import RunRecord
from sinklab.experiments.sweep.planned import Event, PlannedRun
from sinklab.experiments.sweep.recording import PeakMemory, record_end, record_without_model
from sinklab.experiments.sweep.store import record_of
from sinklab.experiments.sweep.together import cards_for, train_together
from sinklab.train.directory.checkpoint import steps_saved
from sinklab.train.directory.environment import recorded_hash
from sinklab.train.directory.lock import HeldError, lock_run
from sinklab.train.directory.run import Run, open_run
from sinklab.train.finite import DivergedError
from sinklab.train.loop import StepReport, Trainer
from sinklab.train.recipe import Recipe
from sinklab.train.world import ALONE, World

log = logging.getLogger(__name__)


def train_cell(
    planned: PlannedRun,
    threads: int | None,
    watch: Callable[[Event], None],
    should_stop: Callable[[], bool],
    world: World = ALONE,
) -> Event:
    """Train a run, continuing what is there, and record how it ended; what is recorded already is only looked up.

    Args:
        threads: of PyTorch on a CPU; as it is unless given.
        watch: told of the model, of every update and every evaluation; never of the end, which is returned.
        should_stop: asked before every update; True saves and ends. Once True it stays so.
        world: the processes that train it together, each of which calls this.

    Returns:
        The last event: done, failed, stopped or busy. Errors are failures with a message, never raised.
    """
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _ended(planned, watch, should_stop, world)
    except HeldError as error:
        return Event(planned.name, "busy", message=str(error))
    except StoppedError:  # before there was a model, or while it was measured once more
        return Event(planned.name, "stopped")
    except SinklabError as error:
        return Event(planned.name, "failed", message=str(error))
    except Exception as error:
        log.exception("%s failed", planned.name)
        return Event(planned.name, "failed", message=f"{type(error).__name__}: {error}")


def _ended(planned: PlannedRun, watch: Callable[[Event], None], should_stop: Callable[[], bool], world: World) -> Event:
    if (record := world.from_first(lambda: record_of(planned.directory, planned.hash))) is not None:
        return _as_recorded(planned, record)
    if world.from_first(lambda: _record_remains(planned)):
        return Event(planned.name, "done")
    recipe = planned.read_recipe()
    processes = planned.processes or cards_for(recipe)
    if world.size == 1 and processes > 1:
        return train_together(planned, processes, watch, should_stop)
    return _trained(planned, _opened(planned, recipe, world), watch, should_stop, world)


def _as_recorded(planned: PlannedRun, record: RunRecord) -> Event:
    return Event(planned.name, record.status, record.step, message=record.message)


def _record_remains(planned: PlannedRun) -> bool:
    """Record a run that is done and of which no checkpoint is left: it is not trained again to be measured once more.

    Returns:
        Whether it is such a run.
    """
    directory = planned.directory
    if not (directory / "measurement.json").is_file() or steps_saved(directory / "checkpoints"):
        return False
    if recorded_hash(directory) != planned.hash:
        return False
    recipe = planned.read_recipe()
    with lock_run(directory):
        if record_of(directory, planned.hash) is None:
            record_without_model(directory, planned.hash, recipe.name, recipe.seed)
    return True


def _opened(planned: PlannedRun, recipe: Recipe, world: World) -> Run:
    """The run, which must be the one that was planned."""
    dataset = world.together(lambda: prepared(recipe.data))
    run = world.together(lambda: open_run(recipe, dataset, planned.directory))
    if run.hash != planned.hash:
        raise world.shared_error(
            InputError(
                f"{planned.name} is run {run.hash} here and was planned as {planned.hash}: the text of "
                f"{recipe.data.source} or the version of sinklab differs between the machines"
            )
        )
    return run


def _trained(
    planned: PlannedRun, run: Run, watch: Callable[[Event], None], should_stop: Callable[[], bool], world: World
) -> Event:
    memory = PeakMemory(world.device(run.recipe.train.device))

    def told(progress: StepReport) -> None:
        if progress.row is None:
            memory.updated()
        watch(Event(planned.name, "step" if progress.row is None else "row", progress.step, progress.row))

    record = functools.partial(record_end, memory=memory)
    trainer = Trainer(run, told, should_stop, world, record)
    with closing(trainer):
        watch(Event(planned.name, "ready", trainer.state.step))
        if (found := world.from_first(lambda: record_of(run.directory, run.hash))) is not None:  # since
            return _as_recorded(planned, found)
        if world.from_first(lambda: _is_finished(trainer)):
            record(trainer, None)
            return Event(planned.name, "done", trainer.state.step)
        try:
            outcome = trainer.train()
        except DivergedError as error:
            return Event(planned.name, "failed", trainer.state.step, message=str(error))
    return Event(planned.name, outcome.status, outcome.step)


def _is_finished(trainer: Trainer) -> bool:
    """Whether the run was trained and measured before, such as by `sinklab train`, and only its record is missing."""
    is_measured = (trainer.run.directory / "measurement.json").is_file()
    return is_measured and trainer.state.step == trainer.recipe.train.steps
