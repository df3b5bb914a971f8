"""`sinklab verify` finds what was changed in packed results, and `reproduce --packed` continues them."""

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from sweeps import write_experiment

from sinklab.commands.app import app
from sinklab.errors import InputError
from sinklab.experiments.sweep.packed import Verified, import_packed, read_packed, verify_packed, write_checksums
from sinklab.files import sha256_of
from sinklab.report.packing import check_readme

OPTIONS = ("--text", "text.jsonl", "--jobs", "2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an experiment, its text, and in `packed` its results."""
    from typer.testing import CliRunner

    folder = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SINKLAB_CACHE", str(folder / "cache"))
        write_experiment(folder)
        for arguments in (
            ["reproduce", "mine.yaml", *OPTIONS, "--out", "runs"],
            ["report", "runs", "--pack", "packed"],
        ):
            ended = CliRunner().invoke(app, arguments)
            assert ended.exit_code == 0, ended.output
        yield folder


@pytest.fixture
def packed(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the packed results, in a working directory that has the text."""
    monkeypatch.setenv("SINKLAB_CACHE", str(results / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("text.jsonl", "mine.yaml", "small.yaml"):
        shutil.copyfile(results / name, name)
    return Path(shutil.copytree(results / "packed", tmp_path / "packed"))


def problems(checks: list[Verified]) -> str:
    return " | ".join(problem for check in checks for problem in check.problems)


def edit_lines(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change every line of a file of JSON lines, and update the checksums."""
    read = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    lines = [json.loads(line) for line in read.splitlines()]
    for line in lines:
        change(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode())) if path.suffix == ".gz" else path.write_text(text)
    write_checksums(path.parent.parent)


def test_sound_results_pass_and_runs_trained_again_have_the_same_bits(packed: Path, run: Run) -> None:
    status, out, err = run("verify", packed, "--retrain", 2, "--json")
    checks = [Verified(**one) for one in json.loads(out)]
    assert status == 0, problems(checks) + err
    assert [(one.name, one.checked > 0) for one in checks] == [
        ("checksums of files", True),
        ("recipes and metrics of runs", True),
        ("claims stated before their runs", False),
        ("summary computed again", True),
        ("runs trained again", True),
        ("README.md written again", True),
    ]
    assert all("bit for bit" in note for note in checks[4].notes)
    assert len(checks[4].notes) == 2


def test_a_file_that_was_changed_added_or_removed_is_named(packed: Path, run: Run) -> None:
    (packed / "README.md").write_text("all reproduced")
    (packed / "report.html").unlink()
    (packed / "notes.txt").write_text("mine")
    status, out, _ = run("verify", packed)
    assert status == 1
    for line in (
        "README.md differs from the packed file",
        "report.html is missing",
        "notes.txt is not in checksums.txt",
    ):
        assert line in out


def test_a_packed_file_that_cannot_be_read_is_named_and_not_its_unpacked_copy(packed: Path, run: Run) -> None:
    recipes = next(packed.glob("*/recipes.yaml"))
    recipes.write_text(recipes.read_text() + "x\n")
    status, _, err = run("verify", packed)
    assert status == 2
    assert f"{packed} cannot be read: {recipes.parent.name}/recipes.yaml differs from the packed file" in err


def test_an_unreadable_file_is_a_problem(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        if path.name == "README.md":
            raise PermissionError(13, "Permission denied", str(path))
        return sha256_of(path)

    monkeypatch.setattr("sinklab.experiments.sweep.packed.sha256_of", refused)
    assert "README.md cannot be read: Permission denied" in problems(verify_packed(packed))


def test_a_packed_manifest_that_is_damaged_is_refused_before_anything_is_written(
    packed: Path, run: Run, tmp_path: Path
) -> None:
    (manifest,) = (packed / "asked").glob("*.json")
    sound = manifest.read_bytes()
    for damage in (b"{", b"\xff"):
        manifest.write_bytes(damage)
        with pytest.raises(InputError, match=rf"{packed}/asked/{manifest.name} cannot be read"):
            import_packed(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest.write_bytes(sound)
    import_packed(packed, tmp_path / "out")
    assert (tmp_path / "out" / "asked" / manifest.name).read_bytes() == sound


def test_a_compressed_file_with_a_damaged_byte_is_refused_with_the_folder(packed: Path) -> None:
    (metrics,) = packed.glob("*/metrics.jsonl.gz")
    data = bytearray(metrics.read_bytes())
    data[10] = 0b111  # after the header: a block of an invalid type
    metrics.write_bytes(data)
    with pytest.raises(InputError, match=f"{metrics.parent} contains packed runs that cannot be read"):
        read_packed(metrics.parent)


def test_a_verdict_that_the_runs_do_not_give_is_found(packed: Path) -> None:
    summary = json.loads((packed / "summary.json").read_text())
    claim = summary["claims"][0]
    before, claim["verdict"] = claim["verdict"], "contradicted"
    (packed / "summary.json").write_text(json.dumps(summary))
    write_checksums(packed)
    found = problems(verify_packed(packed))
    where = "claims.mine.learns.verdict"
    assert f'{where} is "contradicted" in summary.json, and "{before}" when computed from its runs' in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "summary.json is missing"),
        ("{", "summary.json cannot be read"),
        ('{"cells": 1}', "cells"),
        ('{"schema": 2}', "schema version 2; this version of sinklab reads 3): restore it, or use the version"),
    ],
)
def test_a_summary_that_is_missing_or_damaged_is_a_problem(packed: Path, text: str | None, said: str) -> None:
    (packed / "summary.json").write_text(text) if text else (packed / "summary.json").unlink()
    checks = verify_packed(packed)
    assert said in problems(checks)
    assert [one.name for one in checks][-1] == "summary computed again"


def test_numbers_of_a_cell_may_differ_only_by_rounding(packed: Path) -> None:
    summary = json.loads((packed / "summary.json").read_text())
    values = summary["cells"]["softmax"]["values"]["valid_loss"]
    changed = "cells.softmax.values.valid_loss.median is "
    for factor, expected in ((1 + 1e-13, ""), (1 + 1e-6, changed)):
        values["median"] *= factor
        (packed / "summary.json").write_text(json.dumps(summary))
        write_checksums(packed)
        assert problems(verify_packed(packed))[: len(changed)] == expected


def test_edited_metrics_and_the_numbers_computed_from_them_are_found(packed: Path) -> None:
    edit_lines(packed / "mine" / "metrics.jsonl.gz", lambda row: row.update(valid_loss=row["valid_loss"] / 2))
    found = problems(verify_packed(packed))
    assert "metrics.jsonl was changed or removed since the run ended" in found
    assert "cells.softmax.valid_loss is" in found


def test_a_recipe_that_does_not_have_its_hash_is_found(packed: Path) -> None:
    path = packed / "mine" / "recipes.yaml"
    path.write_text(path.read_text().replace("warmup_steps: 100", "warmup_steps: 10"))
    write_checksums(packed)
    found = problems(verify_packed(packed))
    assert found.count("its recipe and text fingerprint do not have the hash") == 6
    assert found.count("recipe.yaml was changed or removed since the run ended") == 6


def test_runs_trained_on_another_text_cannot_be_trained_again(packed: Path) -> None:
    Path("text.jsonl").write_text(Path("text.jsonl").read_text().replace("and", "or"))
    found = problems(verify_packed(packed, retrain=1))
    assert "(text.jsonl) or the recipe of the run has changed since it was trained with sinklab" in found


@pytest.mark.parametrize("key", ["processor", "device"])
def test_on_another_processor_losses_are_compared_with_a_stated_tolerance(packed: Path, key: str) -> None:
    edit_lines(packed / "mine" / "runs.jsonl", lambda row: row["environment"].update({key: "an abacus"}))
    checks = verify_packed(packed, retrain=1)
    assert not problems(checks)
    assert f"{key} an abacus there" in checks[-1].notes[0]
    assert "the last by 3%" in checks[-1].notes[0]


def test_on_another_processor_a_loss_5_percent_away_is_found_and_both_sink_rates_are_printed(packed: Path) -> None:
    def changed(row: dict[str, Any]) -> None:
        row["sink_rate"][0] = 77.0
        row["valid_loss"] *= 1.05 if row["step"] == 4 else 1.0

    edit_lines(packed / "mine" / "runs.jsonl", lambda row: row["environment"].update({"processor": "an abacus"}))
    edit_lines(packed / "mine" / "metrics.jsonl.gz", changed)
    checks = verify_packed(packed, retrain=1)
    assert "step 4: validation loss" in problems(checks[-1:])
    assert " % here and 77.00 % there, and may differ as between two seeds" in checks[-1].notes[0]


def test_a_run_whose_numbers_differ_when_trained_again_is_found(packed: Path) -> None:
    def changed(row: dict[str, Any]) -> None:
        row["train_loss"] = row["train_loss"] and row["train_loss"] + 1e-9

    edit_lines(packed / "mine" / "metrics.jsonl.gz", changed)
    checks = verify_packed(packed, retrain=1)
    assert "train_loss differ" in problems(checks[-1:])


def test_a_folder_without_packed_results_is_refused(run: Run, tmp_path: Path) -> None:
    status, _, err = run("verify", tmp_path)
    assert status == 2
    assert "expected a sweep that `sinklab report --pack` has written" in err
    status, _, err = run("verify", tmp_path / "nowhere")
    assert status == 2
    assert "nowhere/checksums.txt cannot be read (No such file or directory): expected a sweep" in err


def test_a_dry_run_recognises_packed_runs_before_the_text_is_prepared(
    packed: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "empty"))
    asked = ("reproduce", "mine.yaml", *OPTIONS, "--packed", packed, "--seeds", 3, "--dry-run")
    status, out, err = run(*asked, "--json")
    ahead = json.loads(out)
    assert status == 0, err
    assert (ahead["runs"], ahead["missing"]) == (9, 3)
    assert [cell["done"] for cell in ahead["cells"]] == [2, 2, 2]
    _, out, _ = run(*asked, "--steps", 2, "--json")
    assert json.loads(out)["missing"] == 9


def test_packed_results_are_continued(packed: Path, run: Run) -> None:
    more = ("reproduce", "mine.yaml", *OPTIONS, "--packed", packed, "--seeds", 3, "--json")
    status, out, err = run(*more, "--out", "again")
    assert status == 0, err
    assert len(json.loads(out)["cells"]["softmax"]["runs"]) == 3
    assert len(list(Path("again").glob("*/record.json"))) == 9
    assert len(list(Path("again").glob("*/checkpoints"))) == 3, "three runs were trained"
    before = {one.directory: one.metrics for one in read_packed(packed / "mine")}
    assert {name: Path("again", name, "metrics.jsonl").read_text() for name in before} == before
    status, out, err = run(*more, "--out", "elsewhere", "--dry-run")
    assert status == 0, err
    assert (json.loads(out)["runs"], json.loads(out)["missing"]) == (9, 3)
    assert not Path("elsewhere").exists()


COMMITTED = sorted(path.parent for path in (Path(__file__).parents[2] / "results").rglob("checksums.txt"))
LARGE = [
    pytest.param(one, marks=[pytest.mark.slow] * (one.name in ("tiny", "mini", "exploratory"))) for one in COMMITTED
]


@pytest.mark.parametrize("folder", LARGE, ids=[folder.name for folder in COMMITTED])
def test_committed_results_pass(folder: Path) -> None:
    assert problems([*verify_packed(folder), check_readme(folder)]) == ""


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("cells", "softmax", "sink_rate", 0), 99.5, "cells.softmax.sink_rate[0] is 99.5 in summary.json"),
        (("cells", "softmax", "valid_loss"), 0.5, "cells.softmax.valid_loss is 0.5 in summary.json, and "),
        (
            ("cells", "softmax", "seeds"),
            9,
            "cells.softmax.seeds is 9 in summary.json, and 2 when computed from its runs",
        ),
        (
            ("cells", "softmax", "runs", 0, "values", "sink_1"),
            99.5,
            "cells.softmax.runs[0].values.sink_1 is 99.5 in summary.json, and ",
        ),
        (
            ("cells", "softmax", "change", "optim.lr"),
            1.0,
            "cells.softmax.change.optim.lr is 1.0 in summary.json, and null when",
        ),
        (("counts", "exploratory", "reproduced"), 7, "counts.exploratory.reproduced is 7 in summary.json"),
        (("experiments", "mine", "title"), "Proof", 'experiments.mine.title is "Proof" in summary.json, and '),
        (("experiments", "mine", "published", "softmax"), {"sink_1": 1.0}, "experiments.mine.published.softmax is "),
        (("experiments", "mine", "adapted"), ["Nothing."], "experiments.mine.adapted is "),
        (("title",), "Proof", 'title is "Proof" in summary.json, and '),
        (("scale",), "1b", 'scale is "1b" in summary.json, and '),
    ],
)
def test_every_field_of_the_summary_is_computed_again(
    packed: Path, path: tuple[str | int, ...], value: object, said: str
) -> None:
    summary = json.loads((packed / "summary.json").read_text())
    place = summary
    for key in path[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
    place[path[-1]] = value
    (packed / "summary.json").write_text(json.dumps(summary))
    write_checksums(packed)
    assert said in problems(verify_packed(packed))


def test_a_readme_that_its_summary_does_not_give_is_found(packed: Path, run: Run) -> None:
    text = (packed / "README.md").read_text()
    (packed / "README.md").write_text(text.replace("finished run", "sound run"))
    write_checksums(packed)
    status, out, _ = run("verify", packed, "--json")
    assert status == 1
    (problem,) = json.loads(out)[-1]["problems"]
    assert problem.startswith("line 3 of README.md is not what this version of sinklab writes: 'This folder contains")
    moved = packed.rename("elsewhere")
    (moved / "README.md").write_text(text)
    assert check_readme(moved).problems == []
    assert "report.html and charts/" in check_readme(moved).notes[0]


def test_a_record_without_checksums_does_not_pass(packed: Path) -> None:
    edit_lines(packed / "mine" / "runs.jsonl", lambda row: row["record"].update(files={}))
    found = problems(verify_packed(packed))
    assert found.count("its record has no checksum of recipe.yaml") == 6
    assert found.count("its record has no checksum of metrics.jsonl") == 6


@pytest.mark.parametrize(
    ("begun", "said"),
    [("3", "which is no date"), ("2099-01-01T00:00:00+00:00", "which is in the future"), ("", "which is no date")],
)
def test_the_start_of_a_run_is_a_date_in_the_past(packed: Path, begun: str, said: str) -> None:
    edit_lines(packed / "mine" / "runs.jsonl", lambda row: row["environment"].update(begun=begun))
    assert problems(verify_packed(packed)).count(f"began on {begun!r}, {said}") == 6


def test_a_run_in_the_cell_of_another_is_found(packed: Path) -> None:
    manifest = json.loads((packed / "asked" / "mine.json").read_text())
    first, second = (manifest["cells"][name]["hashes"] for name in list(manifest["cells"])[:2])
    first["0"], first["1"], second["1"] = second["1"], first["0"], first["1"]
    (packed / "asked" / "mine.json").write_text(json.dumps(manifest))
    found = problems(verify_packed(packed))
    assert found.count("its seed is not that of cell") == 2
    assert re.search(r"its (?!seed)\S+ is not that of cell", found)


def test_a_claim_stated_in_the_future_is_found(packed: Path) -> None:
    manifest = json.loads((packed / "asked" / "mine.json").read_text())
    manifest["experiment"]["stated"] = "2099-01-01"
    (packed / "asked" / "mine.json").write_text(json.dumps(manifest))
    assert "was stated on 2099-01-01, which is in the future" in problems(verify_packed(packed))


def damaged(**changes: object) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged(run="a\0b"), "which is no directory within the sweep"),
        (damaged(run="x" * 300), "which is no directory within the sweep"),
        (damaged(run="."), "which is no directory within the sweep"),
        (damaged(run="../out"), "which is no directory within the sweep"),
        (damaged(run=5), "0.run: Input should be a valid string"),
        (damaged(record=3), "0.record: "),
        (damaged(environment={"hash": "a", "data": 3}), "0.environment.data: "),
        (damaged(environment={"hash": "a", "threads": "many"}), "0.environment.threads: "),
        (damaged(environment=[]), "0.environment: "),
        (lambda rows: rows.append(rows[0]), "is packed twice"),
        (lambda rows: rows[1]["environment"].update(hash=rows[0]["environment"]["hash"]), "is packed twice"),
    ],
)
def test_damaged_runs_are_refused_with_the_reason(
    packed: Path, run: Run, change: Callable[[list[dict[str, Any]]], None], said: str
) -> None:
    path = packed / "mine" / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    name = rows[0]["run"]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipes = path.with_name("recipes.yaml")
    recipes.write_text(recipes.read_text().replace(f"--- # {name}\n", f"--- # {rows[0]['run']}\n"))
    write_checksums(packed)
    status, _, err = run("verify", packed)
    assert status == 2
    assert said in " ".join(err.split())
    assert "Traceback" not in err
