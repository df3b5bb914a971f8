"""Record how much seeds scatter at a scale, from the cells of a sweep that have most of them.

    python -m benchmarks.spread runs/tiny

Writes `src/sinklab/experiments/spread.json`, which comes with sinklab: an experiment without replicates of its own,
such as `sinklab lab`, is judged with it (docs/verdicts.md). Cells with fewer seeds than the most are left out.
"""

import argparse
from importlib import resources
from pathlib import Path

from sinklab.experiments.quantities import quantity
from sinklab.experiments.sweep.asked import read_asked
from sinklab.experiments.sweep.store import NUMBERS, results_of
from sinklab.experiments.verdicts.recorded import SPREAD
from sinklab.experiments.verdicts.recording import record_spreads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="directory that `sinklab reproduce` wrote")
    out = parser.parse_args().sweep
    asked = read_asked(out)
    if len({one.scale for one in asked.values()}) != 1 or any(one.overlay for one in asked.values()):
        parser.error(f"{out} holds no sweep of one scale at its own length")
    results = results_of(asked, out)
    most = max(len(one.numbers) for one in results.values())
    replicated = {cell: one for cell, one in results.items() if len(one.numbers) == most}
    path = Path(str(resources.files("sinklab") / "experiments" / SPREAD))
    names = [name for name in NUMBERS if quantity(name).unit != "steps"]
    record_spreads(path, next(iter(asked.values())).scale, replicated, names)
    print(f"{', '.join(replicated)}: {most} seeds each, in {path}")


if __name__ == "__main__":
    main()
