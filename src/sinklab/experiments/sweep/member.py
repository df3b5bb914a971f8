"""A process of torchrun that trains a run of a sweep together with others (`together.py`).

torchrun --nproc-per-node 2 -m sinklab.experiments.sweep.member FOLDER WAITING
"""

import os
import pickle
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from sinklab.experiments.sweep.planned import PlannedRun
from sinklab.experiments.sweep.together import ENDED, PLANNED, STOP
from sinklab.experiments.sweep.worker import train_cell
from sinklab.files import write_json
from sinklab.signals import PREEMPTING, stop_on_signals
from sinklab.train.world import joined_world


def main(folder: Path, waiting: int) -> None:
    """Train what the folder says, and leave there how it ended.

    Args:
        waiting: id of the process that started torchrun; without it nobody hears how the run ends, and it stops.
    """
    planned: PlannedRun = pickle.loads((folder / PLANNED).read_bytes())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the command, which asks in its own way
    with stop_on_signals(*PREEMPTING) as preempted, joined_world() as world:
        recipe = planned.read_recipe()
        world.use(recipe.train.device)
        stop = folder / STOP

        def should_stop() -> bool:
            return preempted() or stop.exists() or not _is_there(waiting)

        ended = train_cell(planned, None, lambda event: None, should_stop, world)
        if world.is_first:
            write_json(folder / ENDED, asdict(ended))
    sys.stdout.flush()
    os._exit(0)  # see joined_world


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
