"""Record what five seeds gave, for `sinklab lab` and others who train fewer, from committed results.

    python -m benchmarks.committed results/tiny

Writes `src/sinklab/experiments/committed.json`, which comes with sinklab; other scales there stay.
"""

import argparse
from pathlib import Path

from sinklab.experiments.documents import JUDGED, SUMMARY, Summary
from sinklab.experiments.verdicts import five_seeds
from sinklab.experiments.verdicts.five_seeds import CommittedVerdict, shipped_verdicts
from sinklab.files import parse_json, write_json

PATH = Path(five_seeds.__file__).parents[1] / five_seeds.COMMITTED


def committed_verdicts(summary: Summary) -> dict[str, CommittedVerdict]:
    """The verdicts of a summary by EXPERIMENT.CLAIM; those on existing models are left out."""
    return {
        f"{claim.experiment}.{claim.id}": CommittedVerdict(
            verdict=claim.verdict, seeds=claim.seeds, evidence=claim.evidence
        )
        for claim in summary.claims
        if claim.verdict in JUDGED and not claim.same_as and claim.replicate == "seed"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="directory that `sinklab report --pack` wrote")
    path = parser.parse_args().results / SUMMARY
    summary = Summary.model_validate(parse_json(path.read_text(encoding="utf-8")))
    before, found = shipped_verdicts(), committed_verdicts(summary)
    if not summary.scale or not found:
        parser.error(f"{path} has no verdicts of one scale by five seeds or more")
    scales = {**before.scales, summary.scale: found}
    write_json(PATH, before.model_copy(update={"scales": scales}).model_dump(by_alias=True))
    print(f"{len(found)} verdicts at {summary.scale}: in {PATH}")


if __name__ == "__main__":
    main()
