"""Run the cases of a benchmark in turn: a line of JSON each as it finishes; a failing case does not end the others."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import environment

Case = tuple[str, Callable[[], dict[str, Any]]]


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line with --only, --out and --dry-run; end with status 2 without a card or --dry-run."""
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only cases whose name contains one of these")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also append every line to this .jsonl file")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.dry_run:
        parser.error("this benchmark needs a CUDA device; --dry-run shows on a CPU that it works")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    return given


def run_cases(cases: Iterable[Case], given: argparse.Namespace) -> int:
    """Run the chosen cases and print a line for each, after one with the environment; return the number of failures.

    Args:
        cases: pairs of a name and a function that returns the numbers of the case.
        given: options of `options_of`.
    """
    failed = 0
    _say({"environment": environment()}, given.out)
    for name, work in cases:
        if given.only and not any(text in name for text in given.only):
            continue
        row: dict[str, Any] = {"case": name}
        try:
            row |= work()
        except Exception as error:  # whatever goes wrong on a machine that nobody here has seen
            failed += 1
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        _say(row, given.out)
    return failed


def _say(row: dict[str, Any], out: Path | None) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
