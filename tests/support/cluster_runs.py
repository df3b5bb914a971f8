"""Runs of some seconds each for tests on a cluster, and the logs of the machines that trained them."""

import re
from collections.abc import Callable
from pathlib import Path

from sinklab.data.prepare import prepared
from sinklab.experiments.documents import read_record
from sinklab.experiments.sweep.engine import Engine, Event, PlannedRun, train_all
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run

STEPS = 1200
EVAL_EVERY = 100


def six_runs(sweep: Path) -> list[PlannedRun]:
    """Six seeds of one recipe; the text is a file beside the sweep."""
    text = sweep.with_suffix(".jsonl")
    text.write_text(
        "\n".join(f'{{"text": "sheep {i} jumps {i * i * 7} fences and {i * i} more"}}' for i in range(2000))
    )
    return [_run(sweep, text, seed) for seed in range(6)]


def _run(sweep: Path, text: Path, seed: int) -> PlannedRun:
    recipe = build_recipe(
        {
            "seed": seed,
            "model": {"layers": 2, "width": 32, "heads": 2, "ffn_width": 64, "context": 32},
            "data": {"source": str(text), "tokenizer": "train:300", "valid_fraction": 0.2},
            "train": {
                "steps": STEPS,
                "batch_size": 8,
                "eval_sequences": 4,
                "eval_every": EVAL_EVERY,
                "save_every": EVAL_EVERY,
                "device": "cpu",
            },
            "metric": {"sequences": 4, "length": 16},
        }
    )
    run = open_run(recipe, prepared(recipe.data), sweep / f"seed-{seed}")
    return PlannedRun(f"seed {seed}", recipe.to_yaml(), run.directory, run.hash)


class Disturbance:
    """Observer that disturbs runs during training.

    Args:
        deeds: action by name of the run, called once after its first checkpoint.
    """

    def __init__(self, deeds: dict[str, Callable[[], None]]) -> None:
        self._deeds = dict(deeds)

    def watch(self, event: Event) -> None:
        """Observe the events of all runs."""
        if event.kind == "row" and 2 * EVAL_EVERY <= event.step < STEPS and event.run in self._deeds:
            self._deeds.pop(event.run)()

    @property
    def is_done(self) -> bool:
        """True if every disturbance was triggered."""
        return not self._deeds


def train_disturbed(runs: list[PlannedRun], engine: Engine, deeds: dict[str, Callable[[], None]]) -> None:
    """Train all runs with disturbances; check that all are done, also in their records."""
    disturbance = Disturbance(deeds)
    ended = train_all(runs, engine, disturbance.watch)
    assert {name: event.kind for name, event in ended.items()} == {run.name: "done" for run in runs}
    assert disturbance.is_done
    for run in runs:
        record = read_record(run.directory)
        assert record is not None
        assert (record.hash, record.status, record.step) == (run.hash, "done", STEPS)


class Diary:
    """Log of a run's processes on all machines (`HASH.log` in the engine's folder)."""

    def __init__(self, folder: Path, run: PlannedRun) -> None:
        self.lines = (folder / f"{run.hash}.log").read_text(encoding="utf-8").splitlines()

    def _steps(self, kind: str) -> list[int]:
        return [int(step) for line in self.lines for step in re.findall(rf" {kind} at step (\d+)", line)]

    @property
    def last_process(self) -> int:
        """The id of the process that wrote last."""
        return int(self.lines[-1].split()[2])

    @property
    def begun_at(self) -> list[int]:
        """The step at which each process began or resumed the run."""
        return self._steps("ready")

    @property
    def completions(self) -> int:
        """Number of processes that reached the last step."""
        return self._steps("row").count(STEPS)

    @property
    def stopped_at(self) -> list[int]:
        """Steps at which a process was stopped and saved a checkpoint."""
        return self._steps("stopped")
