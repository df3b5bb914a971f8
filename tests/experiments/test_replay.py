"""The committed packs are reproduced from their runs: verdicts with every kind of check, and the packed files."""

import json
from pathlib import Path

import pytest

from sinklab.experiments.documents import SUMMARY, Summary
from sinklab.experiments.sweep.packed import PACKED_FILES, RUNS, import_packed, write_packed
from sinklab.experiments.sweep.packed import read_packed as runs_in
from sinklab.experiments.sweep.store import MANIFESTS, read_manifests, summary_of
from sinklab.files import read_document, write_text
from sinklab.report import packing
from sinklab.report.collect import collect
from sinklab.report.data import ReportData

RESULTS = Path(__file__).parents[2] / "results"
PACKS = {path.parent.name: path.parent for path in RESULTS.rglob("checksums.txt")}
REPLAYED = {
    "tiny": ("table_10", "figure_4", "figure_30", "table_5", "table_11"),
    "mini": ("massive_activations_mini", "figure_29", "table_2"),
    "exploratory": ("threshold_attention", "heads_first", "optimisers"),
    "backcopy": ("backcopy",),
    "laptop": ("main_results",),
    "trigger_average": ("trigger_average",),
    "continued": ("continued",),
}


def with_runs_of(pack: Path, experiments: tuple[str, ...], folder: Path) -> Path:
    """A sweep with these experiments of a pack and their runs, unpacked."""
    some = folder / "some"
    for name in experiments:
        path = Path(MANIFESTS, f"{name}.json")
        write_text(some / path, (pack / path).read_text())
    wanted = {run_hash for one in read_manifests(some).values() for *_, run_hash in one.runs()}
    for path in pack.glob(f"*/{RUNS}"):
        if kept := [run for run in runs_in(path.parent) if run.environment["hash"] in wanted]:
            write_packed(some / path.parent.name, kept)
    import_packed(some, folder / "sweep")
    return folder / "sweep"


@pytest.mark.parametrize("name", REPLAYED)
def test_committed_verdicts_are_reproduced_from_their_runs(name: str, tmp_path: Path) -> None:
    before = read_document(Summary, PACKS[name] / SUMMARY, "")
    top = with_runs_of(PACKS[name], REPLAYED[name], tmp_path)
    now = summary_of(read_manifests(top), top)
    for experiment in REPLAYED[name]:
        there, here = (one.experiments[experiment].model_copy(update={"adapted": []}) for one in (before, now))
        assert here == there  # but for the notes on scales, which are texts of sinklab
        claims = [claim for claim in before.claims if claim.experiment == experiment]
        own = {f"{experiment}.{claim.id}" for claim in claims}
        for claim in claims:  # other references are to experiments that are not replayed
            if not claim.same_as or claim.same_as in own:
                assert claim in now.claims


def test_packing_the_runs_of_a_pack_again_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(data: ReportData, *others: object) -> str:
        return "drawn"

    monkeypatch.setattr(packing, "export_charts", drawn)
    monkeypatch.setattr(packing, "render", drawn)
    pack = PACKS["trigger_average"]
    top = with_runs_of(pack, ("trigger_average",), tmp_path)
    summary_of(read_manifests(top), top).save(top)
    again = packing.pack_sweep(collect([top]), tmp_path / "trigger_average")
    assert json.loads((again / SUMMARY).read_text()) == json.loads((pack / SUMMARY).read_text())
    for path in ("README.md", "asked/trigger_average.json", *(f"trigger_average/{name}" for name in PACKED_FILES)):
        assert (again / path).exists() == (pack / path).exists()
        if (pack / path).exists():
            assert (again / path).read_bytes() == (pack / path).read_bytes(), path
