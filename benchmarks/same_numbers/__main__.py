"""Detect changed numbers: record the results of all commands before and after a change of the code, and compare them.

    PYTHONPATH=BEFORE/src python -m benchmarks.same_numbers record /tmp/before
    python -m benchmarks.same_numbers record /tmp/after --before /tmp/before
    python -m benchmarks.same_numbers compare /tmp/before /tmp/after

    python -m benchmarks.same_numbers record /tmp/part --before /tmp/before --only assess/,compare/
    python -m benchmarks.same_numbers compare /tmp/before /tmp/part --common

A recording contains trainings of twelve steps of every variant in the catalogue (losses, metrics, weights), a lab,
measurements of TinyStories-656K and of tiny random models of many families, every part of `assess`, exports, small
experiments and their verdicts, `verify` of the committed results, functions of the library, reports of all these
results, and the help of the commands. Numbers are compared bit by bit; times, memory and versions are not compared.
Both recordings must be made on the same machine; every command uses one thread. Requires SINKLAB_DATA.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.same_numbers.comparing import compare
from benchmarks.same_numbers.recording import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doing = parser.add_subparsers(dest="doing", required=True)
    recording = doing.add_parser("record", help="run every command")
    recording.add_argument("out", type=Path)
    recording.add_argument(
        "--before",
        type=Path,
        help="earlier recording, whose results the reports show and, with --only, the commands read",
    )
    recording.add_argument("--jobs", type=int, default=2)
    recording.add_argument("--only", default="", help="prefixes of command names, such as train/,measure/,report/lab")
    comparing = doing.add_parser("compare", help="compare two recordings; exit status 1 if they differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--common", action="store_true", help="skip files in only one recording (after --only)")
    comparing.add_argument(
        "--numbers", action="store_true", help="skip reports, printed text and results that are sentences"
    )
    options = parser.parse_args()
    if options.doing == "record":
        record(options.out, options.before, options.jobs, tuple(options.only.split(",")))
    elif compare(options.before, options.after, options.common, options.numbers):
        sys.exit(1)


if __name__ == "__main__":
    main()
