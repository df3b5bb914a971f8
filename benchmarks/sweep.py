"""Overhead of a sweep: use of the cores, and time per cell besides training.

    python -m benchmarks.sweep [--steps 150] [--rounds 3] [--save]

Twelve runs of the recipe `tiny`, two at a time, as `sinklab reproduce --jobs 2` trains them; medians over the rounds.

busy      user and system time of all processes that the sweep started, over two cores and the time until all had ended
overhead  per cell: what two slots were there for, less what they trained and evaluated, from the model's being there to
          the last evaluation: processes, models, checkpoints at the end, records
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

from benchmarks.timing import RESULTS, environment
from sinklab.data.prepare import prepared
from sinklab.experiments.sweep.engine import Event, PlannedRun, train_all
from sinklab.experiments.sweep.engines.local import LocalEngine
from sinklab.files import write_json
from sinklab.train.directory.run import open_run
from sinklab.train.recipe import load_recipe

CELLS, JOBS = 12, 2


class Clock:
    """Times of each run's first event and last evaluation."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}
        self.evaluated: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Record the time of an event."""
        now = time.perf_counter()
        if event.kind == "ready":
            self.begun[event.run] = now
        elif event.kind == "row":
            self.evaluated[event.run] = now

    def training(self) -> float:
        """Total training time of all runs, in seconds."""
        return sum(self.evaluated[name] - begun for name, begun in self.begun.items())


def planned(folder: Path, steps: int) -> list[PlannedRun]:
    """Twelve seeds of `tiny`."""
    runs = []
    for seed in range(CELLS):
        recipe = load_recipe("tiny", [f"seed={seed}", f"train.steps={steps}"])
        run = open_run(recipe, prepared(recipe.data), folder / str(seed))
        runs.append(PlannedRun(str(seed), run.recipe.to_yaml(), run.directory, run.hash))
    return runs


def cpu_seconds() -> float:
    """Of all processes that have been started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one_round(steps: int) -> dict[str, float]:
    """A sweep from its begin to its end."""
    with tempfile.TemporaryDirectory() as folder:
        runs, clock = planned(Path(folder), steps), Clock()
        before, start = cpu_seconds(), time.perf_counter()
        ended = train_all(runs, LocalEngine(JOBS), clock)
        seconds = time.perf_counter() - start
        forkserver._forkserver._stop()  # pyright: ignore  # its time, and its children's, counts once it has ended
        assert all(event.kind == "done" for event in ended.values())
    return {
        "seconds": seconds,
        "busy": (cpu_seconds() - before) / (seconds * min(JOBS, os.cpu_count() or 1)),
        "overhead": (seconds * JOBS - clock.training()) / CELLS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/sweep.json")
    options = parser.parse_args()
    rounds = [one_round(options.steps) for _ in range(options.rounds)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    print(f"{CELLS} cells of {options.steps} steps, {JOBS} at a time: {medians['seconds']:.1f} s")
    print(f"cores busy: {medians['busy']:.0%}    overhead: {medians['overhead']:.2f} s a cell")
    if options.save:
        found = {"environment": environment(), "steps": options.steps, "rounds": rounds, "medians": medians}
        write_json(RESULTS / "sweep.json", found)


if __name__ == "__main__":
    main()
