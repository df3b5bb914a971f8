"""Record the standard deviations over seeds of pilot runs at a scale, for the power of five seeds (docs/verdicts.md).

    python -m benchmarks.pilots --scale tiny runs/pilots

Writes `src/sinklab/experiments/pilots.json`, which is part of the package; other scales in the file are kept. Finished
runs in and below the directories are grouped by the name of their recipe. Only seeds from 1000 on are used, because
verdicts use lower seeds. For each quantity, cells are excluded if all their seeds have the same value, or if the
quantity is a percentage below 1 % for all their seeds (no sink).
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev, variance

from sinklab.errors import SinklabError
from sinklab.experiments.quantities import RunNumbers, quantity
from sinklab.experiments.summary import read_numbers
from sinklab.experiments.sweep.store import found_runs
from sinklab.experiments.verdicts import wording as five_seeds
from sinklab.experiments.verdicts.wording import PilotSpread, shipped_pilots
from sinklab.files import write_json
from sinklab.measuring.registry import STORED
from sinklab.tables import NO_SINK
from sinklab.train.recipe import load_recipe

FIRST_SEED = 1000
PATH = Path(five_seeds.__file__).parents[1] / five_seeds.PILOTS


def spread_of(name: str, cells: Mapping[str, Sequence[RunNumbers]]) -> PilotSpread | None:
    """Return the spread of quantity `name` over seeds, pooled over cells; None if all cells are excluded.

    Cells are excluded as in the module docstring, and if fewer than two of their runs have a finite value.
    """
    found: dict[str, dict[int, float]] = {}
    for cell, runs in cells.items():
        values = {run.seed: value for run in runs if (value := run.value(name)) is not None and isfinite(value)}
        if len(values) > 1 and stdev(values.values()) > 0 and not (quantity(name).unit == "%" and _none(values)):
            found[cell] = values
    if not found:
        return None
    return PilotSpread(
        sd=_pooled([list(values.values()) for values in found.values()]),
        sd_of_difference=_of_differences(list(found.values())),
        cells={cell: sorted(values) for cell, values in found.items()},
    )


def _none(values: Mapping[int, float]) -> bool:
    return max(values.values()) < NO_SINK


def _pooled(groups: Sequence[Sequence[float]]) -> float:
    return sqrt(sum((len(one) - 1) * variance(one) for one in groups) / sum(len(one) - 1 for one in groups))


def _of_differences(cells: Sequence[Mapping[int, float]]) -> float | None:
    pairs = [[one[seed] - other[seed] for seed in one if seed in other] for one, other in combinations(cells, 2)]
    known = [variance(pair) for pair in pairs if len(pair) > 1]
    return sqrt(fmean(known)) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", required=True)
    parser.add_argument("directories", type=Path, nargs="+")
    asked = parser.parse_args()
    cells: dict[str, list[RunNumbers]] = {}
    for top in asked.directories:
        for directory in found_runs(top).values():
            try:
                run = read_numbers(directory)
            except SinklabError:
                continue  # an unfinished run
            if run.seed >= FIRST_SEED:
                cells.setdefault(load_recipe(str(directory / "recipe.yaml")).name, []).append(run)
    found = {name: one for name in STORED if (one := spread_of(name, cells))}
    if not found:
        parser.error(f"no two finished runs of one recipe with seeds from {FIRST_SEED} on")
    before = shipped_pilots()
    write_json(
        PATH, before.model_copy(update={"scales": {**before.scales, asked.scale: found}}).model_dump(by_alias=True)
    )
    print(f"{', '.join(f'{cell} ({len(runs)})' for cell, runs in cells.items())}: in {PATH}")


if __name__ == "__main__":
    main()
