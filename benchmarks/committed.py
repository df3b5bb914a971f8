"""Record the verdicts of committed results, which are shown with claims that are judged on fewer than five seeds.

    python -m benchmarks.committed results/archive/tiny

Writes `src/sinklab/experiments/committed.json`, which is part of the package; other scales in the file are kept. Also
writes the table of confirmatory claims by scale, subject and verdict in results/archive/README.md.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import JUDGED, SUMMARY, VERDICTS, Summary, counts_by_subject
from sinklab.experiments.verdicts import wording
from sinklab.experiments.verdicts.wording import CommittedVerdict, shipped_verdicts
from sinklab.files import parse_json, write_json
from sinklab.report.sweeps import ABOUT
from sinklab.tables import Table, markdown, names

PATH = Path(wording.__file__).parents[1] / wording.COMMITTED
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "archive" / "README.md"
BEGIN, END = "<!-- made by benchmarks/committed.py -->\n\n", "\n\n<!-- end -->"


def committed_verdicts(summary: Summary) -> dict[str, CommittedVerdict]:
    """Return a summary's verdicts by five seeds or more, by EXPERIMENT.CLAIM; claims with `same_as` are excluded."""
    return {
        f"{claim.experiment}.{claim.id}": CommittedVerdict(
            verdict=claim.verdict, seeds=claim.seeds, evidence=claim.evidence
        )
        for claim in summary.claims
        if claim.verdict in JUDGED and not claim.same_as and claim.replicate == "seed"
    }


def summary_in(results: Path) -> Summary:
    """Read the summary.json of a packed sweep in the folder `results`."""
    return Summary.model_validate(parse_json((results / SUMMARY).read_text(encoding="utf-8")))


def count_table(summaries: Sequence[Summary]) -> str:
    """Return a Markdown table of confirmatory claims by verdict, with a row per scale and one per subject."""
    counts = [Counter(summary.counts["confirmatory"]) for summary in summaries]
    verdicts = [verdict for verdict in VERDICTS if any(count[verdict] for count in counts)]
    rows = []
    for summary, count in zip(summaries, counts, strict=True):
        finished = sum(run.status == "done" for run in summary.runs)
        runs = f"{finished} of {len(summary.runs)}" if finished < len(summary.runs) else str(finished)
        subjects = counts_by_subject(summary.claims)["confirmatory"]
        lines = [("all", count), *((ABOUT[name], Counter(found)) for name, found in subjects.items())]
        for at, (about, found) in enumerate(lines):
            numbers = (str(found.total()), *(str(found[verdict]) for verdict in verdicts))
            rows.append((*((summary.scale, runs) if at == 0 else ("", "")), about, *numbers))
    return markdown(Table("", names("scale", "finished runs", "claims about", "claims", *verdicts), rows))


def page_with(text: str, summaries: Sequence[Summary]) -> str:
    """Return the text of the page with its table of counts replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{count_table(summaries)}{END}{rest.split(END, 1)[1]}"


def committed_summaries() -> list[Summary]:
    """Read the summaries with confirmatory verdicts in the folders of `results/archive/` named for a scale."""
    folders = [PAGE.parent / name for name in SCALES if (PAGE.parent / name / SUMMARY).exists()]
    found = [summary for summary in map(summary_in, folders) if committed_verdicts(summary)]
    return [summary for summary in found if "confirmatory" in summary.counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="directory that `sinklab report --pack` wrote")
    results = parser.parse_args().results
    summary = summary_in(results)
    before, found = shipped_verdicts(), committed_verdicts(summary)
    if not summary.scale or not found:
        parser.error(f"{results} has no verdicts of one scale by five seeds or more")
    scales = {**before.scales, summary.scale: found}
    write_json(PATH, before.model_copy(update={"scales": scales}).model_dump(by_alias=True))
    PAGE.write_text(page_with(PAGE.read_text("utf-8"), committed_summaries()), "utf-8")
    print(f"{len(found)} verdicts at {summary.scale}: in {PATH}; counts: in {PAGE}")


if __name__ == "__main__":
    main()
