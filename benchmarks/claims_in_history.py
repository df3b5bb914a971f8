"""Compare the claims of packed results with those in the repository when their runs were trained.

    python -m benchmarks.claims_in_history results/archive/tiny

For every claim, reads the experiment's file at the commit from which the earliest run of the claim's cells was trained
(env.json of the run), and compares the check. Prints the number of claims by result and commit, and every claim that
was missing from its commit or had another check. Requires a clone with its full history.
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

ROOT = Path(__file__).parents[1]
CHECK = TypeAdapter(Check)


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
    """Compare a claim with the claim of the same id at the commit from which the first run of its cells was trained.

    Args:
        manifest: manifest of the claim's experiment.
        trained: start time and commit of each run, by hash.

    Returns:
        The result (`same check`, `another check`, `not in that commit`, `no commit known`), and the commit.
    """
    hashes = {run for name in claim.cells if name in manifest.cells for run in manifest.cells[name].hashes.values()}
    first = min((trained[run] for run in hashes if run in trained), default=("", ""))
    if not first[1]:
        return "no commit known", ""
    checks = checks_at(first[1], manifest.experiment.id)
    if claim.id not in checks:
        return "not in that commit", first[1]
    same = checks[claim.id] is not None and CHECK.validate_python(checks[claim.id]) == claim.check
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
