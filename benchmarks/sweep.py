"""Overhead of a sweep: utilisation of the cores, and time per run besides training.

    python -m benchmarks.sweep [--steps 150] [--rounds 3] [--save]

Trains twelve runs of the recipe `tiny`, two at a time, like `sinklab reproduce --jobs 2`. Prints medians over rounds:

busy      user and system time of all processes of the sweep, divided by the duration of the sweep and by two cores (one
          if the machine has only one)
overhead  seconds per run: twice the duration of the sweep, minus the time of each run from the built model to the last
          evaluation, divided by the number of runs. It includes starting processes, building models, the last
          checkpoints and the records
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
from sinklab.experiments.sweep.local import LocalEngine
from sinklab.files import write_json
from sinklab.train.recipe import load_recipe
from sinklab.train.run import open_run

CELLS, JOBS = 12, 2


class Clock:
    """Observer that records when each run was ready to train, and when it was last evaluated, in seconds."""

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
        """Return the total time of all runs from the built model to the last evaluation, in seconds."""
        return sum(self.evaluated[name] - begun for name, begun in self.begun.items())


def planned(folder: Path, steps: int) -> list[PlannedRun]:
    """Return the plans of twelve runs of `tiny`, with seeds 0 to 11, in `folder`."""
    runs = []
    for seed in range(CELLS):
        recipe = load_recipe("tiny", [f"seed={seed}", f"train.steps={steps}"])
        run = open_run(recipe, prepared(recipe.data), folder / str(seed))
        runs.append(PlannedRun(str(seed), run.recipe.to_yaml(), run.directory, run.hash))
    return runs


def cpu_seconds() -> float:
    """Return the user and system time of all child processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one_round(steps: int) -> dict[str, float]:
    """Run the sweep once and return its duration in seconds, `busy` and `overhead`."""
    with tempfile.TemporaryDirectory() as folder:
        runs, clock = planned(Path(folder), steps), Clock()
        before, start = cpu_seconds(), time.perf_counter()
        ended = train_all(runs, LocalEngine(JOBS), clock)
        seconds = time.perf_counter() - start
        forkserver._forkserver._stop()  # pyrefly: ignore[missing-attribute]  # `cpu_seconds` counts only processes that have ended
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
