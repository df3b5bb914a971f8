"""Figure 30 of 2410.10781 from tuned runs: loss, sink and gradient norms of softmax and sigmoid attention.

    python -m benchmarks.figure_30 results/sft --runs results/archive/exploratory

The first folder contains the output directories of `sinklab sft`, each with the name CELL-HASH of its run. Prints a
Markdown table of the runs, and one with median, minimum and maximum over the seeds that both cells have, also of the
differences at the same seed.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from sinklab.experiments.sweep.packed import RUNS, is_packed, read_packed
from sinklab.files import parse_yaml
from sinklab.train.recipe import load_recipe
from sinklab.tuning.tuned_directory import SFT, UPDATES, TuneEvaluation, TuneUpdate, load_tuning

SETTLED = 13
"""Number of updates of the first epoch, whose gradient norms are excluded from `Tuned.settled`."""


@dataclass(frozen=True)
class Tuned:
    """A tuned run: evaluations before (`base`) and after (`chat`) tuning, and the gradient norms of all updates."""

    cell: str
    seed: int
    base: TuneEvaluation
    chat: TuneEvaluation
    norms: Sequence[float]

    @property
    def fall(self) -> float:
        """Decrease of the loss on held-out conversations, nats per assistant token."""
        return self.base.valid_loss - self.chat.valid_loss

    @property
    def settled(self) -> float:
        """Mean gradient norm after the first epoch."""
        return fmean(self.norms[SETTLED:])


MEASURES: dict[str, Callable[[Tuned], float]] = {
    "loss before, nats": lambda one: one.base.valid_loss,
    "loss after": lambda one: one.chat.valid_loss,
    "fall of the loss": lambda one: one.fall,
    "change of Sink_1, points": lambda one: one.chat.sink_rate[0] - one.base.sink_rate[0],
    "largest gradient norm": lambda one: max(one.norms),
    "mean norm after the first epoch": lambda one: one.settled,
}


def seeds_of(runs: Path) -> dict[str, int]:
    """Return the seed of every run in a packed sweep or a folder of run directories, by the run directory's name."""
    if is_packed(runs):
        packed = [run for path in runs.glob(f"*/{RUNS}") for run in read_packed(path.parent)]
        return {run.directory: parse_yaml(run.recipe)["seed"] for run in packed}
    return {path.parent.name: load_recipe(str(path)).seed for path in runs.glob("*/recipe.yaml")}


def read_tuned(folder: Path, seeds: Mapping[str, int]) -> Tuned:
    """Read an output directory of `sinklab sft` with the name of its run; raise SystemExit if it is not complete."""
    tuning = load_tuning(folder / SFT)
    if tuning.base is None or tuning.chat is None:
        raise SystemExit(f"{folder} has no complete tuning run: resume it with `sinklab sft`")
    seed = seeds[folder.name]
    updates = (folder / UPDATES).read_text(encoding="utf-8").splitlines()
    norms = [TuneUpdate.model_validate_json(row).grad_norm for row in updates]
    return Tuned(folder.name.rpartition("-")[0], seed, tuning.base, tuning.chat, norms)


def spread(values: Sequence[float]) -> str:
    """Format the median with minimum and maximum, as in docs/verdicts.md: `+1.20 [+0.90, +1.40]`."""
    return f"{median(values):+.2f} [{min(values):+.2f}, {max(values):+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, or a packed sweep")
    given = parser.parse_args()
    seeds = seeds_of(given.runs)
    tuned = [read_tuned(path.parent, seeds) for path in sorted(given.folder.glob("*/sft.json"))]
    tuned.sort(key=lambda one: (one.cell != "softmax", one.seed))
    print("| attention | seed | Sink_1 before, % | after | loss before, nats | after | largest norm | mean norm |")
    print("|---|---|---|---|---|---|---|---|")
    for one in tuned:
        rates = f"{one.base.sink_rate[0]:.1f} | {one.chat.sink_rate[0]:.1f}"
        losses = f"{one.base.valid_loss:.3f} | {one.chat.valid_loss:.3f}"
        print(f"| {one.cell} | {one.seed} | {rates} | {losses} | {max(one.norms):.2f} | {one.settled:.2f} |")
    of = {(one.cell, one.seed): one for one in tuned}
    seeds = [seed for cell, seed in of if cell == "softmax" and ("sigmoid", seed) in of]
    print(f"\n| over {len(seeds)} seeds | softmax | sigmoid | sigmoid - softmax, by seed |\n|---|---|---|---|")
    for name, measure in MEASURES.items():
        softmax, sigmoid = ([measure(of[cell, seed]) for seed in seeds] for cell in ("softmax", "sigmoid"))
        apart = [after - before for before, after in zip(softmax, sigmoid, strict=True)]
        print(f"| {name} | {spread(softmax)} | {spread(sigmoid)} | {spread(apart)} |")


if __name__ == "__main__":
    main()
