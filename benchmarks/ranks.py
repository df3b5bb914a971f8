"""Does the order of interventions at a small width hold at a larger one? (`sinklab reproduce rank_stability`)

    python -m benchmarks.ranks runs/tiny [--suffix _128] [--values sink_1 valid_loss norm_ratio] [--save]

Reads `summary.json` of a sweep. Of every cell X that has a cell X_128 beside it, each number's order over the cells is
compared between the two: the share of pairs decided alike, over all pairs and over those that are certain at the larger
width (`sinklab/experiments/ranks.py`).

The rule, fixed before the first run: the order of a number holds where at least four fifths of its certain pairs are
decided alike; where fewer than five pairs are certain, nothing is said.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS
from sinklab.experiments.documents import SUMMARY, CellSummary, Summary
from sinklab.experiments.ranks import BySeed, ranked, stability
from sinklab.files import write_json

HOLDS, FEWEST = 0.8, 5


def by_seed(cell: CellSummary, name: str) -> BySeed:
    """The number of each finished run."""
    return {run.seed: run.values[name] for run in cell.runs if name in run.values}


def compared(summary: Summary, suffix: str, name: str) -> dict[str, Any]:
    """One number at both widths."""
    both = [cell for cell in summary.cells if cell + suffix in summary.cells]
    small = {cell: by_seed(summary.cells[cell], name) for cell in both}
    large = {cell: by_seed(summary.cells[cell + suffix], name) for cell in both}
    found = stability(small, large)
    verdict = "nothing to say" if found.certain < FEWEST or found.certain_accuracy is None else (
        "holds" if found.certain_accuracy >= HOLDS else "does not hold"
    )  # fmt: skip
    return {
        "small": ranked(small),
        "large": ranked(large),
        "pairs": found.pairs,
        "alike": found.accuracy,
        "certain": found.certain,
        "certain_alike": found.certain_accuracy,
        "verdict": verdict,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="directory that `sinklab reproduce` wrote")
    parser.add_argument("--suffix", default="_128", help="of the cells at the larger width")
    parser.add_argument("--values", nargs="+", default=["sink_1", "valid_loss", "norm_ratio"])
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/ranksSUFFIX.json")
    given = parser.parse_args()
    summary = Summary.model_validate_json((given.sweep / SUMMARY).read_text(encoding="utf-8"))
    result = {name: compared(summary, given.suffix, name) for name in given.values}
    print(json.dumps(result, indent=2))
    if given.save:
        write_json(RESULTS / f"ranks{given.suffix}.json", result)


if __name__ == "__main__":
    main()
