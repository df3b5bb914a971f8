"""Training loop: updates, evaluations and checkpoints.

A batch of a run depends only on (seed, step), and a checkpoint contains all other state. On a CPU, a resumed run is
therefore bit-identical to an uninterrupted one with the same number of processes and threads. With several processes,
each writes its own shard of a checkpoint, and rank 0 writes all other files. All processes take the same branches.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sinklab.errors import InputError, SinklabError, StoppedError
from sinklab.files import append_line, write_json
from sinklab.measuring.registry import recorded
from sinklab.train.checkpoint import (
    TrainState,
    find_checkpoint,
    load_checkpoint,
    remove_earlier,
    remove_leftovers,
    save_checkpoint,
    step_of,
)
from sinklab.train.evaluator import OTHER_EPS, Evaluator
from sinklab.train.lock import holder, lock_run, remove_if_empty, wait_for_holder
from sinklab.train.planning import model_flops, peak_flops
from sinklab.train.recipe import Recipe
from sinklab.train.run import Run, establish, finite, read_metrics, rewrite_metrics
from sinklab.train.update import DivergedError, NotFiniteError, Updater
from sinklab.train.world import ALONE, PATIENCE, STEP_PATIENCE, World, compile_blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOutcome:
    """Result of `Trainer.train`: "done" if the run is complete, else "stopped", and the number of updates done."""

    status: Literal["done", "stopped"]
    step: int


class Trainer:
    """Trainer of one run. It locks the run directory when it is constructed, and unlocks it when training ends.

    Args:
        run: opened run directory; training resumes from its newest valid checkpoint.
        watch: callback, called after each update and evaluation with the number of updates done and the content of the
            evaluation's line in metrics.jsonl, or None after an update.
        should_stop: callback, called while the model is initialised, before each update and during evaluations; if it
            returns True on any process, `train` saves a checkpoint and returns. From then on it must return True.
        world: training processes; each constructs a trainer.
        at_end: callback, called on all processes before the directory is unlocked, with this trainer and the
            `DivergedError` of a diverged run or None for a complete run.

    Raises:
        InputError: as `Updater` and `Evaluator`; also if another run was started in the directory, or processes have
            different recipes, texts, kinds of device or directories.
        HeldError: if another process is training this run.
        SinklabError: as `Updater` and `Evaluator`; also if none of the run's checkpoints is valid, env.json or
            metrics.jsonl is damaged, or the directory cannot be written.
        StoppedError: if a stop was requested while the model was initialised; nothing was saved.
    """

    def __init__(
        self,
        run: Run,
        watch: Callable[[int, dict[str, Any] | None], None] = lambda step, row: None,
        should_stop: Callable[[], bool] = lambda: False,
        world: World = ALONE,
        at_end: Callable[["Trainer", DivergedError | None], None] = lambda trainer, error: None,
    ) -> None:
        self.at_end = at_end
        self.run, self.recipe, self.watch, self.should_stop, self.world = run, run.recipe, watch, should_stop, world
        world.limit_waiting(PATIENCE)
        what = (run.hash, run.recipe.train)  # the hash excludes some keys of train (`UNHASHED_TRAIN_KEYS`)
        self._must_all(
            what == world.from_first(lambda: what),
            "have different recipes, texts or kinds of device: start all of them with the same",
        )
        with ExitStack() as holding:
            world.only_first(lambda: self._hold(holding))
            first = world.from_first(lambda: holder(run.directory))
            self._must_all(wait_for_holder(run.directory, first), "see different directories: use a shared --out")
            self.updater = Updater(run, world, self._raise_if_stopped)
            self.evaluator = Evaluator(run, self.updater, self._raise_if_stopped)
            if run.shorter is not None:
                # Before the shorter run is converted, damaged metrics or checkpoints raise an error.
                world.only_first(lambda: (read_metrics(run.metrics), self._newest_checkpoint()))
            world.only_first(lambda: establish(run, self.updater.compiles_loss))
            self.model, self.optimizer = self.updater.model, self.updater.optimizer
            compile_blocks(self.model, self.recipe.train.compile, self.updater.device)
            self._checkpoint = self._resume()
            self._held = holding.pop_all()
        self._speed = Speedometer(self.recipe, self.updater.device, world.size)

    def _hold(self, holding: ExitStack) -> None:
        """Lock the run directory until `holding` is closed, which first calls `remove_if_empty`."""
        is_new = not self.run.directory.exists()
        holding.enter_context(lock_run(self.run.directory))
        holding.callback(remove_if_empty, self.run.directory, is_new)

    def _newest_checkpoint(self) -> Path | None:
        return find_checkpoint(self.run.checkpoints, self.updater.model, self.run.hashes)

    def _must_all(self, agree: bool, otherwise: str) -> None:
        if self.world.any(not agree):
            raise self.world.shared_error(InputError(f"the processes {otherwise}"))

    @property
    def state(self) -> TrainState:
        """Training state other than weights and optimiser state."""
        return self.updater.state

    def train(self) -> RunOutcome:
        """Train to the last step of the recipe or until a stop is requested, then unlock the run directory.

        In both cases a checkpoint is saved. After the last step the model is measured, and measurement.json and
        measurement.npz are written. After a SinklabError, failed.json is written.

        Returns:
            The status and the number of updates done.

        Raises:
            DivergedError: if a training or validation loss, a gradient or a weight is not finite.
            SinklabError: if the training shard cannot be read or has changed, an activation is not finite in an
                evaluation, or a file cannot be written, for example because the disk is full.
        """
        try:
            self.world.only_first(lambda: self.run.failure.unlink(missing_ok=True))
            try:
                outcome = self._train()
                self.at_end(self, None)
            except StoppedError:
                self._save()
                outcome = RunOutcome("stopped", self.state.step)
            return outcome
        except SinklabError as error:
            if self.world.is_first and self.run.directory.is_dir():
                with suppress(SinklabError):  # the disk may be full
                    write_json(self.run.failure, {"step": self.state.step, "message": str(error)})
            if isinstance(error, DivergedError):
                self.at_end(self, error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Unlock the run directory; called by `train`."""
        self._held.close()

    def _train(self) -> RunOutcome:
        options, state = self.recipe.train, self.state
        self._speed.begin(state.step, self.updater.batches.waited)
        if state.step == self._unevaluated:
            self._raise_if_stopped()
            self._evaluate()
        waiting = PATIENCE
        while state.step < options.steps:
            self._raise_if_stopped()
            self._update()
            if waiting > STEP_PATIENCE:
                self.world.limit_waiting(waiting := STEP_PATIENCE)
            last = state.step == options.steps
            self.watch(state.step, None)
            if state.step % options.eval_every == 0 or last:
                self._evaluate()
            if state.step % options.save_every == 0 or last:
                self._save()
        measurement = self.evaluator.measure(maps=True).of_step(state.step, options.steps)
        self.world.only_first(lambda: measurement.save(self.run.directory))
        return RunOutcome("done", state.step)

    def _raise_if_stopped(self) -> None:
        """Raise StoppedError on all processes if a stop was requested on any."""
        if self.world.any(self.should_stop()):
            raise self.world.shared_error(StoppedError("a stop of the training was requested"))

    def _update(self) -> float:
        """Do one optimiser step; return the newest available training loss, nats per token."""
        with self._with_advice():
            return self.updater.update()

    @contextmanager
    def _updates_done(self) -> Iterator[None]:
        """Complete pending updates, check the weights, and exclude the `with` block from the throughput."""
        with self._with_advice():
            self.updater.settle()
        if self.world.any(not self.updater.has_finite_weights()):
            raise self._diverged(
                f"training diverged at step {self.state.step}: the update produced non-finite weights."
            )
        with self._speed.paused():
            yield

    @contextmanager
    def _with_advice(self) -> Iterator[None]:
        """Convert a NotFiniteError to a DivergedError with advice."""
        try:
            yield
        except NotFiniteError as error:
            replayed = f" Run the same command with --replay {self.state.step + 1} to find the first non-finite tensor."
            raise self._diverged(str(error), replayed) from error

    def _diverged(self, how: str, more: str = "") -> DivergedError:
        advice = "Try a smaller optim.lr or a larger schedule.warmup_steps."
        message = f"{how} Last checkpoint: {self._checkpoint or 'none yet'}.{more} {advice}"
        return self.world.shared_error(DivergedError(message))

    def _evaluate(self) -> None:
        """Evaluate the model, and append a line to metrics.jsonl."""
        state, options = self.state, self.recipe.train
        with self._updates_done():
            loss, added = self.evaluator.losses()
            if not math.isfinite(loss):
                raise self._diverged(f"training diverged at step {state.step}: the validation loss is {loss}.")
            row = finite(
                {
                    "step": state.step,
                    "tokens": state.step * options.batch_size * self.recipe.model.context,
                    "train_loss": state.loss_sum / state.loss_count if state.loss_count else None,
                    "valid_loss": loss,
                    **({"valid_added_losses": added} if added else {}),
                    **recorded(self.evaluator.measure(other_eps=OTHER_EPS, dormant=True)),
                    "lr": self.updater.rate,
                    "grad_norm": state.grad_norm if state.step else None,
                    **self._speed.read(state.step, self.updater.batches.waited),
                }
            )
            self.world.only_first(lambda: append_line(self.run.metrics, json.dumps(row)))
            if state.step % options.eval_every == 0:  # a run that extends this one evaluates only there
                state.loss_sum, state.loss_count = 0.0, 0
            self.watch(state.step, row)
        self._speed.begin(state.step, self.updater.batches.waited)

    def _save(self) -> None:
        if self._checkpoint is not None and step_of(self._checkpoint) == self.state.step:
            return  # a valid checkpoint is not overwritten
        with self._updates_done():
            # never save weights trained on changed text
            self.world.on_all_ranks(self.run.dataset.train.check_unchanged)
            self._checkpoint = save_checkpoint(
                self.run.checkpoints,
                self.model,
                self.optimizer,
                self.state,
                self.run.hash,
                self.recipe.train.keep,
                self.world,
                previous=self._checkpoint,
            )

    def _resume(self) -> Path | None:
        """Resume from the newest valid checkpoint and return its folder; None if the run has no checkpoint."""
        run, world = self.run, self.world
        world.only_first(lambda: remove_leftovers(run.checkpoints))
        checkpoint = world.from_first(self._newest_checkpoint)
        if checkpoint is not None:
            world.only_first(lambda: remove_earlier(checkpoint, self.recipe.train.keep))
            self.updater.state = load_checkpoint(checkpoint, self.model, self.optimizer, world)
        self._unevaluated = self.state.step if world.from_first(self._resume_history) else None
        if self.state.step % self.recipe.train.eval_every == 0 and self._unevaluated is None:
            self.state.loss_sum, self.state.loss_count = 0.0, 0
        return checkpoint

    def _resume_history(self) -> bool:
        """Remove evaluations from metrics.jsonl that will be repeated, or that only a shorter run has.

        Returns:
            True if the current step must still be evaluated: step 0 of a new run, or a step whose evaluation was
            interrupted.
        """
        state, options = self.state, self.recipe.train
        regular = {*range(0, state.step + 1, options.eval_every)}
        made = regular | {options.steps}
        rows = read_metrics(self.run.metrics) if state.step else []
        kept = [row for row in rows if row["step"] <= state.step and row["step"] in made]
        there = {row["step"] for row in kept}
        missing = state.step not in there and state.step in made and (state.loss_count > 0 or state.step == 0)
        if lost := sorted(regular - there - ({state.step} if missing else set())) if state.step else []:
            log.warning("%s lacks evaluations that cannot be repeated, the first at step %s", self.run.metrics, lost[0])
        rewrite_metrics(self.run.metrics, kept)
        return missing


class Speedometer:
    """Measure the training throughput between two evaluations, excluding the time of evaluations and checkpoints.

    Args:
        recipe: recipe with the model's `vocab_size` set.
        device: device of this process.
        processes: number of data-parallel processes; all are assumed to have the same kind of device.
    """

    def __init__(self, recipe: Recipe, device: torch.device, processes: int) -> None:
        self._tokens_per_step = recipe.train.batch_size * recipe.model.context
        self._flops_per_token = model_flops(recipe.model).total / recipe.model.context
        peak = recipe.train.peak_flops or peak_flops(device)
        self._peak = None if peak is None else peak * processes
        self.begin(0, 0.0)

    def begin(self, step: int, waited: float) -> None:
        """Start the timer at `step`; `waited` is the total time spent waiting for batches so far, seconds."""
        self._seconds, self._running_since = 0.0, time.perf_counter()
        self._step, self._waited = step, waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the `with` block from the measurement. All updates must be complete before it."""
        self._seconds += time.perf_counter() - self._running_since
        try:
            yield
        finally:
            self._running_since = time.perf_counter()

    def read(self, step: int, waited: float) -> dict[str, float | None]:
        """Return `tokens_per_second`, `mfu` and `stall_share` since `begin` (see `Evaluation`).

        All are None if there were no updates. Call this method only inside `paused`.
        """
        if step == self._step:
            return dict.fromkeys(("tokens_per_second", "mfu", "stall_share"))
        rate = (step - self._step) * self._tokens_per_step / self._seconds
        mfu = None if self._peak is None else rate * self._flops_per_token / self._peak
        return {"tokens_per_second": rate, "mfu": mfu, "stall_share": (waited - self._waited) / self._seconds}
