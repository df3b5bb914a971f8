"""Detect changed numbers: record the results of every command before and after a change of the code, and compare.

    PYTHONPATH=BEFORE/src python -m benchmarks.same_numbers record /tmp/before
    python -m benchmarks.same_numbers record /tmp/after --before /tmp/before
    python -m benchmarks.same_numbers compare /tmp/before /tmp/after

    python -m benchmarks.same_numbers record /tmp/part --before /tmp/before --only assess/,parity/
    python -m benchmarks.same_numbers compare /tmp/before /tmp/part --common

Recorded are: twelve steps of every variant of the catalogue (losses, metrics, weights), a lab, TinyStories-656K and
tiny random models of many families measured in every way, every part of assess, exports, small experiments and their
verdicts, the committed results verified, functions of the library, the reports of all of these, and the help of every
command. Numbers are compared to the last bit, reports as bytes; what depends on the clock or the memory is left out.
Both recordings have to be made on the same machine, with one thread each. Needs SINKLAB_DATA.
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
        help="an earlier recording: reports are drawn of its results, and with --only its runs read",
    )
    recording.add_argument("--jobs", type=int, default=2)
    recording.add_argument("--only", default="", help="commands whose names begin so: train/,measure/,report/lab,..")
    comparing = doing.add_parser("compare", help="two recordings; status 1 where they differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--common", action="store_true", help="only what is in both (after --only)")
    comparing.add_argument(
        "--numbers", action="store_true", help="no words: pages, what is printed, sentences in results"
    )
    options = parser.parse_args()
    if options.doing == "record":
        record(options.out, options.before, options.jobs, tuple(options.only.split(",")))
    elif compare(options.before, options.after, options.common, options.numbers):
        sys.exit(1)


if __name__ == "__main__":
    main()
