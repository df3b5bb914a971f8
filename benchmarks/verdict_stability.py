"""Verdicts on the claims of packed results if training had ended one or two evaluations earlier.

    python -m benchmarks.verdict_stability results/laptop

Unpacks the runs into a temporary folder, removes the last evaluations of each run, and judges every claim again. Prints
the number of verdicts that change, and each of them. Quantities that are measured once at the end of a run (kurtosis,
assessments), and claims about a step before the removed evaluations, do not change.
"""

import argparse
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from sinklab.experiments.documents import JUDGED, JudgedClaim
from sinklab.experiments.sweep.packed import import_packed
from sinklab.experiments.sweep.store import read_manifests, summary_of

METRICS = "metrics.jsonl"


def judged_claims(results: Path, removed: int) -> dict[str, JudgedClaim]:
    """Judge the claims of packed results without the last `removed` evaluations of each run.

    Returns:
        The judged claims by EXPERIMENT.CLAIM, without those that repeat another claim (`same_as`).
    """
    with TemporaryDirectory() as folder:
        out = Path(folder)
        import_packed(results, out)
        for path in out.rglob(METRICS):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[: len(lines) - removed]), encoding="utf-8")
        claims = summary_of(read_manifests(out), out).claims
    return {f"{one.experiment}.{one.id}": one for one in claims if not one.same_as}


def main() -> None:
    """Print the verdicts that change, by number of removed evaluations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--removed", type=int, nargs="+", default=[1, 2], help="numbers of evaluations to remove")
    options = parser.parse_args()
    before = {name: one for name, one in judged_claims(options.results, 0).items() if one.verdict in JUDGED}
    for removed in options.removed:
        after = judged_claims(options.results, removed)
        changed = {name: one for name, one in before.items() if after[name].verdict != one.verdict}
        for analysis, count in Counter(one.analysis for one in before.values()).items():
            here = sum(one.analysis == analysis for one in changed.values())
            print(f"without the last {removed} evaluations: {here} of {count} {analysis} verdicts change")
        for name, one in sorted(changed.items()):
            print(f"  {name}: {one.verdict} becomes {after[name].verdict} ({one.rule})")


if __name__ == "__main__":
    main()
