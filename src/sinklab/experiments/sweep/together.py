"""One run on several cards of a machine: torchrun starts the processes (`member.py`), this one waits for them.

They share a folder, which holds what is to be trained, a file `stop` once they are to save and end, and in the end how
it went. How far they are is read from the run's directory.
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

from sinklab.errors import LostProcessError
from sinklab.experiments.sweep.following import Follower
from sinklab.experiments.sweep.planned import Event, PlannedRun
from sinklab.files import parse_json
from sinklab.train.recipe import Recipe

MEMBER = "sinklab.experiments.sweep.member"
PLANNED, STOP, ENDED, PRINTED = "planned.pickle", "stop", "ended.json", "printed.log"
LOOKS_EVERY = 0.2  # seconds
MUCH = 2000  # characters of what was printed


def cards_for(recipe: Recipe) -> int:
    """How many processes train the recipe together here: one per card, no more than share its batch; one on a CPU."""
    if recipe.train.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return 1
    cards = torch.cuda.device_count()
    return next(count for count in range(cards, 0, -1) if recipe.train.batch_size % count == 0)


def train_together(
    planned: PlannedRun, processes: int, watch: Callable[[Event], None], should_stop: Callable[[], bool]
) -> Event:
    """Have so many processes train a run; returns its last event.

    Raises:
        LostProcessError: they ended without one.
    """
    with tempfile.TemporaryDirectory(prefix="sinklab-") as name:
        folder = Path(name)
        (folder / PLANNED).write_bytes(pickle.dumps(planned))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        with (folder / PRINTED).open("wb") as printed:
            process = subprocess.Popen(
                [*torchrun, "-m", MEMBER, str(folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )
            try:
                _wait(process, planned, folder, watch, should_stop)
            finally:
                process.terminate()
                process.wait()
        if (folder / ENDED).is_file():
            return Event(**parse_json((folder / ENDED).read_text(encoding="utf-8")))
        said = (folder / PRINTED).read_text(encoding="utf-8", errors="replace").strip()
        raise LostProcessError(
            f"torchrun ended with status {process.returncode}; the run goes on when it is started again:"
            f"\n{said[-MUCH:]}"
        )


def _wait(
    process: subprocess.Popen[bytes],
    planned: PlannedRun,
    folder: Path,
    watch: Callable[[Event], None],
    should_stop: Callable[[], bool],
) -> None:
    """Until all processes have ended; meanwhile say how far they are, and pass on that they are to stop."""
    follower = Follower(planned.directory)
    while process.poll() is None:
        if should_stop():
            (folder / STOP).touch()
        for row in follower.new_rows():
            watch(Event(planned.name, "row", row["step"], row))
        time.sleep(LOOKS_EVERY)
