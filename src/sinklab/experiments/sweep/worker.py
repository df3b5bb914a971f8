"""Train a run and write record.json at its end; used by all engines, torchrun processes and `sinklab verify`.

The training process writes the record before it releases the run's lock. Several processes, also on different machines,
may therefore be given the same run: only one of them trains it.

With several GPUs, a run is trained by several processes of one machine, started by torchrun:

    torchrun --nproc-per-node 2 -m sinklab.experiments.sweep.worker FOLDER LAUNCHER

The launcher (`train_with_torchrun`) and the processes (`main`) share a temporary folder with the pickled run, the last
event, the output of the processes, and a file `stop`, which requests that they save a checkpoint and stop. Progress is
read from the run directory.
"""

import functools
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sinklab.data.prepare import prepared
from sinklab.device import keep_freed_memory
from sinklab.errors import InputError, SinklabError, StoppedError
from sinklab.experiments.documents import RunRecord, checksums, record_of
from sinklab.experiments.sweep.engine import Event, MetricsTail, PlannedRun
from sinklab.files import parse_json, write_json
from sinklab.measuring.accumulate import process_peak_mb
from sinklab.signals import PREEMPTING, stop_on_signals
from sinklab.train.checkpoint import steps_saved
from sinklab.train.lock import HeldError, lock_run
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe
from sinklab.train.run import open_run, read_history, recorded_hash, seconds_spent, timed_intervals
from sinklab.train.update import DivergedError
from sinklab.train.world import ALONE, World, joined_world

PLANNED, STOP, ENDED, PRINTED = "planned.pickle", "stop", "ended.json", "printed.log"
POLL_S = 0.2
PRINTED_TAIL = 2000  # number of characters at the end of the output that an error message shows

log = logging.getLogger(__name__)


def train_cell(
    planned: PlannedRun,
    threads: int | None,
    watch: Callable[[Event], None],
    should_stop: Callable[[], bool],
    world: World = ALONE,
) -> Event:
    """Train or resume a run and, if it finishes or diverges, write record.json. A recorded run is not trained again.

    If the run needs several processes (`cards_for`), torchrun is started to train it.

    Args:
        threads: number of PyTorch's CPU threads; default: unchanged.
        watch: callback, called with all events except the last one, which is returned; if torchrun trains the run,
            called only with evaluations.
        should_stop: callback, called before every update and during evaluations; if it returns True, training saves a
            checkpoint and stops. It must then keep returning True.
        world: training processes, all of which call this function.

    Returns:
        The last event: done, failed, stopped, or busy if another process has locked the run. Exceptions are returned as
        `failed` with a message.
    """
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        if (recorded := world.from_first(planned.recorded)) is not None:
            return recorded
        if world.from_first(lambda: _recorded_without_checkpoint(planned)):
            return Event(planned.name, "done")
        recipe = planned.read_recipe()
        if world.size == 1 and (processes := cards_for(recipe)) > 1:
            return train_with_torchrun(planned, processes, watch, should_stop)
        return _trained(planned, recipe, watch, should_stop, world)
    except HeldError as error:
        return Event(planned.name, "busy", message=str(error))
    except StoppedError:  # stopped while the model was built, or before a finished run was recorded
        return Event(planned.name, "stopped")
    except SinklabError as error:
        return Event(planned.name, "failed", message=str(error))
    except Exception as error:
        log.exception("%s failed", planned.name)
        return Event(planned.name, "failed", message=f"{type(error).__name__}: {error}")


def _recorded_without_checkpoint(planned: PlannedRun) -> bool:
    """Write record.json of a finished run of the planned hash without checkpoints; return whether there is one."""
    directory = planned.directory
    if not (directory / "measurement.json").is_file() or steps_saved(directory / "checkpoints"):
        return False
    if recorded_hash(directory) != planned.hash:
        return False
    recipe = planned.read_recipe()
    with lock_run(directory):
        if record_of(directory, planned.hash) is None:
            _record(directory, recipe, hash=planned.hash, status="done", step=recipe.train.steps)
    return True


def _trained(
    planned: PlannedRun, recipe: Recipe, watch: Callable[[Event], None], should_stop: Callable[[], bool], world: World
) -> Event:
    """Prepare the data, and train the run; raise InputError if its hash is not the planned one."""
    dataset = world.on_all_ranks(lambda: prepared(recipe.data))
    run = world.on_all_ranks(lambda: open_run(recipe, dataset, planned.directory))
    if run.hash != planned.hash:
        raise world.shared_error(
            InputError(
                f"{planned.name} is run {run.hash} on this machine, but was planned as {planned.hash}: the text of "
                f"{recipe.data.source} differs here or was changed since, or the version of sinklab differs"
            )
        )
    memory = _PeakMemory(world.device(run.recipe.train.device))

    def report(step: int, row: dict[str, Any] | None) -> None:
        if row is None:
            memory.updated()
        watch(Event(planned.name, "step" if row is None else "row", step, row))

    record = functools.partial(_record_end, memory=memory)
    trainer = Trainer(run, report, should_stop, world, record)
    with closing(trainer):
        watch(Event(planned.name, "ready", trainer.state.step))
        if (recorded := world.from_first(planned.recorded)) is not None:  # meanwhile, by another process
            return recorded
        measured = run.directory / "measurement.json"
        if world.from_first(lambda: measured.is_file() and trainer.state.step == run.recipe.train.steps):
            # trained by `sinklab train`, or stopped before it was recorded
            record(trainer, None)
            return Event(planned.name, "done", trainer.state.step)
        try:
            outcome = trainer.train()
        except DivergedError as error:
            return Event(planned.name, "failed", trainer.state.step, message=str(error))
    return Event(planned.name, outcome.status, outcome.step)


class _PeakMemory:
    """Peak memory of training in this process.

    On a GPU, the peak allocation is read after every update, because measurements between updates reset the counter. On
    a CPU, the peak of the whole process so far is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._largest, self._updated = device, 0, False

    def updated(self) -> None:
        """Read the peak memory after a training update."""
        self._updated = True
        if self._device.type == "cuda":
            self._largest = max(self._largest, torch.cuda.max_memory_allocated(self._device))

    def mb(self) -> float | None:
        """Return the peak memory in MB (2**20 bytes); None if this process did no update or the peak is unknown."""
        if not self._updated:
            return None
        return self._largest / 2**20 if self._device.type == "cuda" else process_peak_mb()


def _record_end(trainer: Trainer, diverged: DivergedError | None, memory: _PeakMemory) -> None:
    """Write record.json of a finished or diverged run, whose lock the trainer holds; all processes call this function.

    For a finished run, the kurtosis of the hidden states is measured first. If a stop is requested before or (with one
    process) during this measurement, StoppedError is raised, and the next call of `train_cell` writes the record.
    """
    run, recipe = trainer.run, trainer.recipe
    peak_memory_mb = memory.mb()  # read before the kurtosis is measured, which needs more memory than training
    details = None if diverged else trainer.evaluator.measure(details=True).details
    kurtosis_by_block = details.by_layer.get("kurtosis_by_block") if details else None

    def write() -> None:
        _record(
            run.directory,
            recipe,
            hash=run.hash,
            status="failed" if diverged else "done",
            message=str(diverged or ""),
            step=trainer.state.step,
            peak_memory_mb=peak_memory_mb,
            kurtosis=max(kurtosis_by_block) if kurtosis_by_block else None,
        )

    trainer.world.only_first(write)


def _record(directory: Path, recipe: Recipe, **fields: Any) -> None:
    """Write record.json with `fields`; the other fields are taken from the recipe and the run's files."""
    history = read_history(directory / "metrics.jsonl")
    seconds = seconds_spent(history)
    RunRecord(
        name=recipe.name,
        seed=recipe.seed,
        steps=recipe.train.steps,
        triples=recipe.metric.sequences * len(recipe.model.attention_layers) * recipe.model.heads,
        seconds=seconds,
        tokens_per_second=sum(tokens for tokens, _ in timed_intervals(history)) / seconds if seconds else None,
        files=checksums(directory),
        **fields,
    ).save(directory)


def cards_for(recipe: Recipe) -> int:
    """Return the number of training processes: the largest number of visible GPUs that divides the batch size.

    The number is 1 if CUDA is not available, or if `train.device` is neither auto nor cuda.
    """
    if recipe.train.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return 1
    cards = torch.cuda.device_count()
    return next(count for count in range(cards, 0, -1) if recipe.train.batch_size % count == 0)


def train_with_torchrun(
    planned: PlannedRun, processes: int, watch: Callable[[Event], None], should_stop: Callable[[], bool]
) -> Event:
    """Train a run with several torchrun processes; return the run's last event.

    Args:
        watch: callback, called with the evaluations (`row` events).
        should_stop: see `train_cell`; called every `POLL_S` seconds.

    Raises:
        SinklabError: if the processes ended and rank 0 has not written a last event.
    """
    with tempfile.TemporaryDirectory(prefix="sinklab-") as name:
        folder = Path(name)
        (folder / PLANNED).write_bytes(pickle.dumps(planned))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        with (folder / PRINTED).open("wb") as printed:
            process = subprocess.Popen(
                [*torchrun, "-m", __name__, str(folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )
            try:
                tail = MetricsTail(planned)
                while process.poll() is None:
                    if should_stop():
                        (folder / STOP).touch()
                    for row in tail.rows():
                        watch(row)
                    time.sleep(POLL_S)
            finally:
                process.terminate()
                process.wait()
        if (folder / ENDED).is_file():
            return Event(**parse_json((folder / ENDED).read_text(encoding="utf-8")))
        output = (folder / PRINTED).read_text(encoding="utf-8", errors="replace").strip()
        raise SinklabError(
            f"torchrun ended with status {process.returncode} and no result; run the same command again to resume. "
            f"The end of its output:\n{output[-PRINTED_TAIL:]}"
        )


def main(folder: Path, launcher: int) -> None:
    """Entry point of a torchrun process: train the run in `folder`; rank 0 writes the run's last event there.

    Unless an exception is raised, the process exits with status 0.

    Args:
        folder: temporary folder of `train_with_torchrun`.
        launcher: id of the process that started torchrun; if it dies, the run saves a checkpoint and stops.
    """
    planned: PlannedRun = pickle.loads((folder / PLANNED).read_bytes())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the launcher writes `stop`
    with stop_on_signals(*PREEMPTING) as preempted, joined_world() as world:
        recipe = planned.read_recipe()
        world.use(recipe.train.device)
        stop = folder / STOP

        def should_stop() -> bool:
            return preempted() or stop.exists() or not _is_alive(launcher)

        ended = train_cell(planned, None, lambda event: None, should_stop, world)
        if world.is_first:
            write_json(folder / ENDED, asdict(ended))
    sys.stdout.flush()
    os._exit(0)  # see joined_world


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
