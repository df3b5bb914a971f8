"""Train a run with several processes of this machine, started by torchrun, usually one per GPU.

The launcher and the processes (`worker.main`) share a temporary folder with the pickled run, the last event, the output
of the processes, and a file `stop`, which requests that they save a checkpoint and stop. Progress is read from the run
directory.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sinklab.errors import SinklabError
from sinklab.experiments.sweep.engine import Event, MetricsTail, PlannedRun
from sinklab.files import parse_json
from sinklab.train.recipe import Recipe

ENTRY = "sinklab.experiments.sweep.worker"
PLANNED, STOP, ENDED, PRINTED = "planned.pickle", "stop", "ended.json", "printed.log"
POLL_S = 0.2
PRINTED_TAIL = 2000  # number of characters at the end of the output that an error message shows


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
                [*torchrun, "-m", ENTRY, str(folder), str(os.getpid())],
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
