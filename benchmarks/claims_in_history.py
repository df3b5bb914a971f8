"""Compare the claims of packed results with those in the repository when their runs were trained.

    python -m benchmarks.claims_in_history results/laptop

For every claim, reads the experiment's file at the commit from which the first run of the claim's cells was trained
(env.json of the run), and compares the check. If the cells began at different times, as a baseline that experiments
share, the commit is that of the cell which began last. Prints the number of claims by result and commit, and every
claim that was missing from its commit or had another check. Requires a clone with its full history.
"""

import argparse
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from sinklab.experiments.claims import Check, Claim
from sinklab.experiments.sweep.packed import read_packed
from sinklab.experiments.sweep.store import SweepManifest, read_manifests
from sinklab.measuring.registry import OTHERS

ROOT = Path(__file__).parents[1]
CHECK = TypeAdapter(Check)
EARLIER_KEYS = {"against": "scatter", "but": "without_families"}
EARLIER_KINDS = {
    "alike": "equal",
    "alike_over_domains": "equal",
    "alike_over_sizes": "equal",
    "grows_with_size": "rising",
}
"""Keys and kinds of checks in commits before 2026-11-28."""


def renamed(check: Any) -> Any:
    """Return a check of an earlier commit with the present names, including the checks of `all`.

    Three earlier kinds are now comparisons of two quantities, or of two steps: `peak_at` (earlier `stands_at`),
    `precedes` and `appears`.
    """
    new = {EARLIER_KEYS.get(key, key): value for key, value in check.items()}
    match new.get("is"):
        case "peak_at" | "stands_at":
            k = new.pop("position", None)
            return {"at_least": 1.0, **new, "is": "greater", "value": f"sink_{k}", "than_value": f"{OTHERS}{k}"}
        case "precedes":
            first, then = new.pop("first", None), new.pop("then", None)
            return {**new, "is": "greater", "value": then, "than_value": first}
        case "appears":
            return {**new, "is": "within", "value": "sink_1", "at_least": new.pop("rate", 10.0)}
        case "all":
            return {**new, "of": [renamed(part) for part in new["of"]]}
        case str(kind):
            return {**new, "is": EARLIER_KINDS.get(kind, kind)}
    return new


def git(*arguments: str) -> str:
    """Return the output of a git command in the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@cache
def checks_at(commit: str, experiment: str) -> dict[str, Any]:
    """Return the checks of an experiment at a commit, by id of the claim; empty if there was no such experiment."""
    paths = git("ls-tree", "-r", "--name-only", commit, "src").splitlines()
    found = [path for path in paths if path.endswith(f"/{experiment}.yaml")]
    if not found:
        return {}
    content = yaml.safe_load(git("show", f"{commit}:{found[0]}"))
    return {claim["id"]: claim.get("check") for claim in content.get("claims") or ()}


def compared(claim: Claim, manifest: SweepManifest, trained: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Compare a claim with the claim of the same id at the commit from which the last of its cells began to be trained.

    Args:
        manifest: manifest of the claim's experiment.
        trained: start time and commit of each run, by hash.

    Returns:
        The result (`same check`, `another check`, `not in that commit`, `not begun`), and the commit.
    """
    cells = [manifest.cells[name].hashes.values() for name in claim.cells if name in manifest.cells]
    begun = [[trained[run] for run in hashes if run in trained] for hashes in cells]
    first = max(map(min, begun)) if begun and all(begun) else ("", "")
    if not first[1]:
        return "not begun", ""
    checks = checks_at(first[1], manifest.experiment.id)
    if claim.id not in checks:
        return "not in that commit", first[1]
    same = checks[claim.id] is not None and CHECK.validate_python(renamed(checks[claim.id])) == claim.check
    return "same check" if same else "another check", first[1]


def main() -> None:
    """Print the counts for confirmatory and exploratory claims, and the claims that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    runs = [run for path in results.glob("*/runs.jsonl") for run in read_packed(path.parent)]
    trained = {
        run.environment["hash"]: (run.environment.get("begun", ""), run.environment.get("git", "")) for run in runs
    }
    counts, differing = Counter[tuple[str, str, str]](), list[str]()
    for manifest in read_manifests(results).values():
        for claim in manifest.experiment.claims_at(manifest.scale):
            if claim.same_as:
                continue
            said, commit = compared(claim, manifest, trained)
            kind = claim.evidence or manifest.experiment.evidence
            counts[str(kind), said, commit] += 1
            if said in ("another check", "not in that commit"):
                differing.append(f"  {manifest.experiment.id}.{claim.id}: {said} ({kind}, {commit[:10]})")
    for (kind, said, commit), count in sorted(counts.items()):
        when = f" {commit[:10]} of {git('show', '-s', '--format=%cI', commit)}" if commit else ""
        print(f"{count} {kind} claims: {said}{when}")
    begun = sorted(start for start, _ in trained.values() if start)
    if begun:
        print(f"runs with a start time: {len(begun)} of {len(trained)}, {begun[0]} to {begun[-1]}")
    print("\n".join(differing))


if __name__ == "__main__":
    main()
