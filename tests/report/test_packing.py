"""A sweep is packed into a folder that can be committed: small, reproducible, free of local paths, and reportable."""

import gzip
import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import Run
from report_fixtures import make_lab
from sweep_fixtures import CELLS, EXPERIMENTS, make_sweep

from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import JudgedClaim, Summary
from sinklab.experiments.sweep.packed import read_checksums, read_packed, unpack
from sinklab.report.collect import collect, list_runs
from sinklab.report.packing import pack_sweep, readme
from sinklab.report.page import write_report
from sinklab.report.sweeps import Sweep, with_runs

TWO = {name: EXPERIMENTS[name] for name in ("table_4", "table_6")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def only_sweep(folder: Path) -> Sweep:
    return collect([folder]).sweeps[0]


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("packing") / "tiny", TWO)


@pytest.fixture(scope="module")
def packed(sweep_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_sweep(collect([sweep_folder]), tmp_path_factory.mktemp("results") / "tiny")


def test_a_packed_sweep_has_the_results_of_its_runs_in_few_files_without_weights(
    sweep_folder: Path, packed: Path
) -> None:
    found = contents(packed)
    assert {name for name in found if not name.startswith("charts/")} == {
        *(f"{one}/{file}" for one in TWO for file in ("recipes.yaml", "runs.jsonl", "metrics.jsonl.gz")),
        *("summary.json", "report.html", "README.md", "asked/table_4.json", "asked/table_6.json", "checksums.txt"),
    }
    assert any(name.startswith("charts/table_4-numbers") for name in found)
    ended = {path.parent.name for path in sweep_folder.glob("*/record.json")}
    assert {run.directory for one in TWO for run in read_packed(packed / one)} == ended
    assert len(list(yaml.safe_load_all(found["table_4/recipes.yaml"]))) == len(read_packed(packed / "table_4"))


def test_a_run_of_two_experiments_is_packed_once(packed: Path) -> None:
    lying = [run.directory for one in TWO for run in read_packed(packed / one)]
    assert len(lying) == len(set(lying))
    assert any(name.startswith("softmax-") for name in lying)


def test_only_the_manifests_of_the_summary_are_packed(sweep_folder: Path, packed: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep_folder, tmp_path / "tiny")
    manifest = (sweep_folder / "asked" / "table_4.json").read_text()
    (tmp_path / "tiny" / "asked" / "of_another_text.json").write_text(manifest)
    again = pack_sweep(collect([tmp_path / "tiny"]), tmp_path / "packed")
    assert set(contents(again)) == set(contents(packed))


def test_unpacked_runs_are_the_files_that_were_packed(sweep_folder: Path, packed: Path, tmp_path: Path) -> None:
    made = unpack(packed, tmp_path)
    assert made
    for directory in made:
        for name in ("recipe.yaml", "metrics.jsonl"):
            assert (directory / name).read_bytes() == (sweep_folder / directory.name / name).read_bytes()
        environment = json.loads((directory / "env.json").read_text())
        assert environment["hash"] == json.loads((directory / "record.json").read_text())["hash"]
        assert "command" not in environment
    assert unpack(packed, tmp_path) == [], "what is there is left alone"
    (made[0] / "env.json").unlink()  # as if the first call had been killed: env.json is written last
    (made[0] / "record.json").unlink()
    assert unpack(packed, tmp_path) == [made[0]]
    assert (made[0] / "record.json").is_file()


def test_unpacked_runs_are_listed_as_they_ended(packed: Path, tmp_path: Path) -> None:
    made = unpack(packed, tmp_path)
    records = {str(one): json.loads((one / "record.json").read_text()) for one in made}
    states = {run.directory: run.state for run in list_runs([tmp_path])}
    assert {"done", "failed"} == set(states.values())
    assert states == {one: record["status"] for one, record in records.items()}


def test_the_checksums_are_those_of_all_files(packed: Path) -> None:
    found = {name: hashlib.sha256(content).hexdigest() for name, content in contents(packed).items()}
    del found["checksums.txt"]
    assert read_checksums(packed) == found


def test_damaged_packed_runs_are_refused_with_their_folder(packed: Path, tmp_path: Path) -> None:
    for name in ("recipes.yaml", "runs.jsonl", "metrics.jsonl.gz"):
        copy = Path(shutil.copytree(packed, tmp_path / name))
        (copy / "table_6" / name).write_bytes(b"nothing of the kind")
        with pytest.raises(InputError, match="table_6 contains packed runs that cannot be read"):
            collect([copy])


def test_a_packed_run_outside_of_the_sweep_is_refused(packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    for name in ("recipes.yaml", "runs.jsonl"):
        file = copy / "table_6" / name
        file.write_text(file.read_text().replace("sigmoid-", "../sigmoid-"))
    with pytest.raises(InputError, match="which is no directory within the sweep"):
        unpack(copy, tmp_path / "runs")
    assert not list(tmp_path.glob("sigmoid-*"))


def test_a_packed_sweep_reads_as_the_sweep_it_was_made_from(sweep_folder: Path, packed: Path) -> None:
    before, after = only_sweep(sweep_folder), only_sweep(packed)
    there = with_runs(
        before.summary, lambda run: run.model_copy(update={"directory": ""}) if run.status == "unfinished" else run
    )
    assert after.summary == there
    run = after.summary.runs[0]
    assert after.history(run) == before.history(run)
    assert [one.edited for one in after.summary.runs].count(["metrics.jsonl"]) == 1


def test_edited_metrics_of_a_packed_sweep_are_noticed(sweep_folder: Path, tmp_path: Path) -> None:
    packed = pack_sweep(collect([sweep_folder]), tmp_path / "tiny")
    file = packed / "table_6" / "metrics.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).decode().splitlines(keepends=True)
    number, row = next(
        (i, json.loads(line)) for i, line in enumerate(lines) if json.loads(line)["run"].startswith("sig")
    )
    lines[number] = json.dumps(row | {"valid_loss": 0.5}) + "\n"
    file.write_bytes(gzip.compress("".join(lines).encode()))
    edited = {
        run.directory for run in only_sweep(packed).summary.runs if run.edited and run.directory.startswith("sigmoid")
    }
    assert edited == {row["run"]}


def test_packing_again_gives_the_same_bytes_and_adds_new_runs(sweep_folder: Path, tmp_path: Path) -> None:
    out = pack_sweep(collect([sweep_folder]), tmp_path / "tiny")
    first = contents(out)
    assert contents(pack_sweep(collect([sweep_folder]), out)) == first
    more = make_sweep(tmp_path / "more", {**TWO, "table_2": EXPERIMENTS["table_2"]})
    assert set(contents(pack_sweep(collect([more]), out))) > set(first)


def test_packed_runs_that_the_sweep_lacks_are_kept(sweep_folder: Path, tmp_path: Path, run: Run) -> None:
    more = make_sweep(tmp_path / "more", {**TWO, "table_2": EXPERIMENTS["table_2"]})
    out = pack_sweep(collect([more]), tmp_path / "tiny")
    before = contents(out)
    status, _, err = run("report", sweep_folder, "--pack", out)
    assert status == 2
    assert re.search(r"has \d+ packed runs, of which the sweep lacks \d+: choose another --pack folder", on_one(err))
    assert contents(out) == before
    (out / "checksums.txt").write_text("")  # as an interrupted copy leaves it
    (out / "table_2" / "metrics.jsonl.gz").unlink()
    assert contents(pack_sweep(collect([sweep_folder]), out)).keys() < before.keys()


def on_one(text: str) -> str:
    return " ".join(text.split())


def test_nothing_in_a_packed_sweep_names_the_machine(sweep_folder: Path, packed: Path) -> None:
    for name, content in contents(packed).items():
        text = gzip.decompress(content) if name.endswith(".gz") else content
        assert str(sweep_folder).encode() not in text
        assert str(packed).encode() not in text
        assert b"/home/me" not in text


def test_packing_a_packed_sweep_gives_the_same_files(packed: Path, tmp_path: Path) -> None:
    again = contents(pack_sweep(collect([packed]), tmp_path / "tiny"))
    assert again == contents(packed)


def test_a_packed_record_names_only_packed_files(packed: Path) -> None:
    records = [run.record for run in read_packed(packed / "table_6")]
    assert all(set(record["files"]) == {"recipe.yaml", "metrics.jsonl"} for record in records)


def test_the_readme_has_every_claim_with_its_verdict(packed: Path) -> None:
    text = (packed / "README.md").read_text(encoding="utf-8")
    sections = text.split("\n### ")[1:]
    assert [section.split(":")[0].replace("\\", "") for section in sections] == ["table_4", "table_6"]
    rows = [line for section in sections for line in section.splitlines()[4:] if line.startswith("|")]
    assert len(rows) == 5
    assert "\n- Statement 5 about the sink" in text.partition("\nNot asked. ")[2]
    assert text.partition("\n## Not run\n")[2].count("\n- ") == 1
    assert "Confirmatory claims: 1 reproduced, 1 contradicted, 1 no verdict, 1 not run." in text
    assert "| reproduced at tiny<br>confirmatory |" in rows[0]


def test_a_recipe_that_names_a_path_of_this_machine_is_refused(tmp_path: Path) -> None:
    top = make_sweep(tmp_path / "tiny", {"table_6": EXPERIMENTS["table_6"]})
    file = next(top.glob("sigmoid-*/recipe.yaml"))
    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    recipe["data"]["source"] = "/home/me/text.txt"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with pytest.raises(InputError, match=r"data\.source is /home/me/text\.txt, an absolute path"):
        pack_sweep(collect([top]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["sigmoid-*/recipe.yaml", "asked/table_6.json"])
def test_a_damaged_recipe_or_manifest_is_refused_with_its_path(sweep_folder: Path, file: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sweep_folder, tmp_path / "tiny"))
    damaged = next(copy.glob(file))
    damaged.write_text("{unfinished: [", encoding="utf-8")
    with pytest.raises(InputError, match=rf"{damaged.name} cannot be read .*rerun the experiment"):
        pack_sweep(collect([copy]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unsuitable_sweeps_and_folders_are_refused_and_not_changed(sweep_folder: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="not empty"):
        pack_sweep(collect([sweep_folder]), full)
    other = make_sweep(tmp_path / "other", EXPERIMENTS, CELLS)  # a sweep that is not packed
    with pytest.raises(InputError, match="not empty"):
        pack_sweep(collect([sweep_folder]), other)
    begun = {"sigmoid": replace(CELLS["sigmoid"], unfinished=(0, 1, 2))}
    unrun = make_sweep(
        tmp_path / "unrun", {"table_6": EXPERIMENTS["table_6"].model_copy(update={"cells": ["sigmoid"]})}, begun
    )
    with pytest.raises(InputError, match="no finished or failed run"):
        pack_sweep(collect([unrun]), tmp_path / "out")
    with pytest.raises(InputError, match="or is inside it"):
        pack_sweep(collect([sweep_folder]), sweep_folder / "packed")
    with pytest.raises(InputError, match="has no sweep"):
        pack_sweep(collect([make_lab(tmp_path / "lab")]), tmp_path / "out")
    with pytest.raises(InputError, match="2 directories"):
        pack_sweep(collect([sweep_folder, other]), tmp_path / "out")
    assert contents(full) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("option", [("--format", "gif"), ("--out", "thesis.html")])
def test_nothing_is_packed_where_the_report_is_refused(sweep_folder: Path, run: Run, option: tuple[str, str]) -> None:
    Path("thesis.html").write_text("mine", encoding="utf-8")
    status, _, err = run("report", sweep_folder, "--pack", "packed", *option)
    assert (status, "packed:" in err) == (2, False)
    assert not Path("packed").exists()


def test_an_interrupted_packing_can_be_repeated(
    sweep_folder: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(data: object, *rest: object) -> str:
        raise SinklabError("cannot write: no space left")

    out = tmp_path / packed.name
    with monkeypatch.context() as patch:
        patch.setattr("sinklab.report.packing.export_charts", full)
        with pytest.raises(SinklabError, match="no space"):
            pack_sweep(collect([sweep_folder]), out)
    assert (out / "summary.json").exists()
    assert contents(pack_sweep(collect([sweep_folder]), out)) == contents(packed)


def test_a_report_does_not_replace_that_of_packed_results(packed: Path, tmp_path: Path) -> None:
    before = contents(packed)
    for out in (None, packed / "more.html"):
        with pytest.raises(InputError, match="packed results with checksums: choose an --out in another folder"):
            write_report([packed], out)
    assert contents(packed) == before
    assert write_report([packed], tmp_path / "report.html").is_file()


def test_an_experiment_without_a_run_that_has_ended_gets_no_folder(tmp_path: Path) -> None:
    begun = replace(CELLS["sigmoid"], unfinished=(0, 1, 2))
    experiments = {name: EXPERIMENTS[name].model_copy(update={"cells": [cell]})
                   for name, cell in (("table_4", "k_biases"), ("table_6", "sigmoid"))}  # fmt: skip
    packed = pack_sweep(
        collect([make_sweep(tmp_path / "tiny", experiments, {**CELLS, "sigmoid": begun})]), tmp_path / "out"
    )
    assert [path.parent.name for path in packed.glob("*/runs.jsonl")] == ["table_4"]


def test_a_run_that_finished_after_the_summary_is_refused(tmp_path: Path) -> None:
    top = make_sweep(tmp_path / "tiny", {"table_6": EXPERIMENTS["table_6"]})
    summary = json.loads((top / "summary.json").read_text())
    ended = summary["cells"]["sigmoid"]["runs"][0]
    ended["status"] = "unfinished"
    (top / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match=rf"{ended['directory']} has finished after .*summary.json was written"):
        pack_sweep(collect([top]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_not_ended_has_no_directory_in_the_packed_summary(tmp_path: Path) -> None:
    begun = {**CELLS, "sigmoid": replace(CELLS["sigmoid"], unfinished=(0,))}
    packed = pack_sweep(collect([make_sweep(tmp_path / "tiny", EXPERIMENTS, begun)]), tmp_path / "out")
    summary = json.loads((packed / "summary.json").read_text())
    runs = {run["seed"]: run for run in summary["cells"]["sigmoid"]["runs"]}
    assert runs[0]["status"] == "unfinished"
    assert runs[0]["directory"] == ""
    assert all(run["directory"] for seed, run in runs.items() if seed)


def test_the_readme_shows_markup_in_the_kind_of_an_analysis_as_text() -> None:
    claim = JudgedClaim(id="one", experiment="mine", analysis="<b>bold</b>", verdict="reproduced", scale="tiny")
    assert (
        "<b>" not in readme(Summary(experiments={"mine": EXPERIMENTS["table_4"]}, claims=[claim]), (), "mine").lower()
    )


def test_the_readme_of_many_claims_counts_them_by_experiment() -> None:
    def claims(experiment: str, number: int) -> list[JudgedClaim]:
        return [
            JudgedClaim(
                id=f"c{place}", experiment=experiment, text=f"claim {place}", verdict="reproduced", scale="tiny"
            )
            for place in range(number)
        ]

    both = {"one": EXPERIMENTS["table_4"], "other": EXPERIMENTS["table_6"]}
    few = readme(Summary(experiments=both, claims=claims("one", 40)), (), "tiny")
    many = readme(Summary(experiments=both, claims=[*claims("one", 39), *claims("other", 2)]), (), "tiny")
    assert few.count("\n| claim ") == 41  # and the header
    assert "\n| claim " not in many
    assert "| one | " in many
    assert ": 39 reproduced |" in many
    assert ": 2 reproduced |" in many


def test_the_readme_says_how_the_models_of_all_experiments_differ_from_those_of_the_paper() -> None:
    scale, own = "Scale tiny has 0.3 M parameters.", "The heads have width 16."
    first, second = (EXPERIMENTS["table_4"].model_copy(update={"adapted": one}) for one in ([scale, own], [scale]))
    assert f"\n{scale} {own}\n" in readme(Summary(experiments={"one": first}), (), "tiny")
    assert f"\n{scale}\n" in readme(Summary(experiments={"one": first, "other": second}), (), "tiny")
