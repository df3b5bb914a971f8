"""`sinklab reproduce`: trains missing runs, finds existing ones below its directory, and summarises them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import Run
from sampling import one_in
from sweeps import EXPERIMENT, write_experiment

from sinklab.commands import reproducing
from sinklab.experiments import shipped
from sinklab.experiments.documents import SUMMARY
from sinklab.experiments.sweep.preview import Pace, operations, preview
from sinklab.experiments.sweep.store import SweepCell, SweepPlan
from sinklab.train.lock import LOCK, lock_run
from sinklab.train.recipe import load_recipe

OTHER = """
id: other
title: "Two of them again"
base: small.yaml
cells:
  softmax: {}
  gate: gate_head
  softmax_again: {}
seeds: 1
rank: 1
"""
DIVERGING = """
id: diverging
title: "One of them does not train"
base: small.yaml
cells:
  softmax: {}
  huge: {optim: {lr: 1.0e+30, clip: null}, schedule: {warmup_steps: 0}}
seeds: 1
"""
OPTIONS = ("--text", "text.jsonl", "--jobs", 2)  # a thread each


@pytest.fixture
def run(run: Run) -> Run:
    """`sinklab ARGS` in a folder with experiments and a text."""
    write_experiment(Path(), other=OTHER, diverging=DIVERGING)
    return run


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / SUMMARY).read_text())


def records(out: Path) -> dict[str, int]:
    """Modification time of each record in ns, by run directory."""
    return {path.parent.name: os.stat(path).st_mtime_ns for path in out.rglob("record.json")}


def test_an_experiment_of_the_user_is_run_from_its_file_and_not_trained_twice(run: Run) -> None:
    status, out, err = run("reproduce", "mine.yaml", *OPTIONS, "--json")
    assert status == 0, err
    summary = json.loads(out)
    assert list(summary["cells"]) == ["softmax", "sigmoid", "decayed"]
    assert [(claim["verdict"], claim["seeds"]) for claim in summary["claims"]] == [("no verdict", 2)]
    assert summary_of(Path("runs/tiny")) == summary
    assert Path("runs/tiny/report.html").is_file()
    made = records(Path("runs/tiny"))
    assert len(made) == 6  # three cells, two seeds
    status, out, _ = run("reproduce", "mine.yaml", *OPTIONS)
    assert status == 0
    assert "it has learnt" in out
    assert made == records(Path("runs/tiny"))


def test_a_base_recipe_is_found_beside_its_experiment(run: Run) -> None:
    Path("elsewhere").mkdir()
    for name in ("mine.yaml", "small.yaml"):
        Path(name).rename(Path("elsewhere") / name)
    status, out, err = run("reproduce", "elsewhere/mine.yaml", *OPTIONS, "--dry-run", "--json")
    assert status == 0, err
    assert json.loads(out)["runs"] == 6


def test_experiments_share_their_cells_and_a_summary(run: Run) -> None:
    status, out, err = run("reproduce", "mine.yaml", "other.yaml", *OPTIONS, "--json")
    assert status == 0, err
    assert len(records(Path("runs/tiny"))) == 6 + 1  # softmax is there, softmax_again is softmax
    summary = json.loads(out)
    assert list(summary["experiments"]) == ["other", "mine"]  # by rank
    cells = summary["cells"]
    assert cells["softmax_again"]["runs"][0]["hash"] == cells["softmax"]["runs"][0]["hash"]
    assert cells["softmax"]["seeds"] == 2


def test_earlier_experiments_and_seeds_stay_in_the_summary(run: Run) -> None:
    assert run("reproduce", "mine.yaml", *OPTIONS)[0] == 0
    assert run("reproduce", "other.yaml", *OPTIONS)[0] == 0
    assert list(summary_of(Path("runs/tiny"))["experiments"]) == ["other", "mine"]
    assert run("reproduce", "mine.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    assert summary_of(Path("runs/tiny"))["cells"]["sigmoid"]["seeds"] == 2


def test_an_experiment_that_another_command_trains_meanwhile_is_in_the_summary(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = reproducing.train_all

    def after_another(*given: Any) -> Any:
        monkeypatch.setattr(reproducing, "train_all", train)
        assert run("reproduce", "other.yaml", *OPTIONS)[0] == 0
        return train(*given)

    monkeypatch.setattr(reproducing, "train_all", after_another)
    assert run("reproduce", "mine.yaml", *OPTIONS)[0] == 0
    assert list(summary_of(Path("runs/tiny"))["experiments"]) == ["other", "mine"]


def test_only_the_chosen_cells_are_trained(run: Run) -> None:
    chosen = ("reproduce", "mine.yaml", "other.yaml", *OPTIONS, "--cell", "sigmoid", "--cell", "gate")
    ahead = json.loads(run(*chosen, "--dry-run", "--json")[1])
    assert [(cell["name"], cell["seeds"]) for cell in ahead["cells"]] == [("gate", 1), ("sigmoid", 2)]
    assert ahead["missing"] == 3
    status, out, err = run(*chosen, "--json")
    assert status == 0, err
    cells = {name: [run["status"] for run in cell["runs"]] for name, cell in json.loads(out)["cells"].items()}
    assert cells["sigmoid"] == ["done", "done"]
    assert cells["gate"] == ["done"]
    assert cells["softmax"] == ["unfinished", "unfinished"]
    assert len(records(Path("runs/tiny"))) == 3
    status, _, err = run("reproduce", "mine.yaml", *OPTIONS, "--cell", "gate", "--out", "elsewhere")
    assert status == 2
    assert "--cell gate: there is no such cell; choose from: softmax, sigmoid, decayed" in err
    assert not Path("elsewhere").exists()


def test_shards_divide_the_runs_and_the_last_one_finds_all_of_them(run: Run) -> None:
    for shard, done in ((0, 2), (1, 4), (2, 6)):
        of_shard = ("reproduce", "mine.yaml", *OPTIONS, "--shard", f"{shard}/3")
        ahead = json.loads(run(*of_shard, "--dry-run", "--json")[1])
        assert (ahead["runs"], ahead["missing"]) == (2, 2)
        assert run(*of_shard)[0] == 0
        assert len(records(Path("runs/tiny"))) == done
    assert [cell["seeds"] for cell in summary_of(Path("runs/tiny"))["cells"].values()] == [2, 2, 2]
    status, _, err = run("reproduce", "mine.yaml", *OPTIONS, "--shard", "3/3")
    assert status == 2
    assert "--shard 3/3: the shards of 3 are 0/3 to 2/3" in err


def test_runs_with_another_number_of_steps_are_kept_but_not_summarised(run: Run) -> None:
    assert run("reproduce", "mine.yaml", *OPTIONS)[0] == 0
    status, _, err = run("reproduce", "other.yaml", *OPTIONS, "--steps", 2)
    assert status == 0
    assert "not in this summary, because scale, steps or text differ: mine" in err
    assert list(summary_of(Path("runs/tiny"))["experiments"]) == ["other"]
    assert len(records(Path("runs/tiny"))) == 6 + 2


def test_a_run_of_sinklab_train_in_a_subdirectory_is_not_trained_again(run: Run) -> None:
    told = ["--set", "data.source=text.jsonl", "--set", "model.attention.operation=sigmoid", "--set", "seed=1"]
    assert run("train", "small.yaml", *told, "--out", "out/elsewhere/mine")[0] == 0
    before = Path("out/elsewhere/mine/measurement.json").stat().st_mtime_ns
    assert run("reproduce", "mine.yaml", *OPTIONS, "--out", "out")[0] == 0
    assert before == Path("out/elsewhere/mine/measurement.json").stat().st_mtime_ns
    runs = summary_of(Path("out"))["cells"]["sigmoid"]["runs"]
    assert runs[1]["directory"] == "elsewhere/mine"
    assert runs[1]["status"] == "done"
    assert len(list(Path("out").rglob("env.json"))) == 6


def test_a_dry_run_lists_missing_runs_and_writes_nothing(run: Run) -> None:
    before = set(Path().rglob("*"))
    status, out, _ = run("reproduce", "mine.yaml", *OPTIONS, "--dry-run")
    assert status == 0
    assert "optim.weight_decay=0.5" in out
    assert "6 of 6 runs will be trained, 2 at a time" in out
    assert set(Path().rglob("*")) == before
    assert run("reproduce", "mine.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    status, out, _ = run("reproduce", "mine.yaml", *OPTIONS, "--dry-run", "--json")
    ahead = json.loads(out)
    assert (ahead["runs"], ahead["missing"]) == (6, 3)
    assert [cell["done"] for cell in ahead["cells"]] == [1, 1, 1]
    assert ahead["hours"] > 0
    assert ahead["estimated"] == "estimated from the finished runs in the directory of the sweep"


def test_a_dry_run_counts_the_hours_of_every_missing_run_of_cells_with_the_same_recipe() -> None:
    recipe = load_recipe("tiny")
    cells = {name: SweepCell(recipe, {}, range(seeds), False) for name, seeds in (("softmax", 2), ("again", 4))}
    plan = SweepPlan(cells, [(name, seed) for name, cell in cells.items() for seed in cell.seeds])
    found = preview(plan, [], "local", Pace(operations(recipe) / 3600, "one run an hour"), 1)
    assert (found.runs, found.missing, found.hours) == (4, 4, pytest.approx(4.0))


@pytest.mark.parametrize("native", one_in(2, [False, True]))
def test_runs_in_emulated_bf16_are_preceded_by_a_warning(
    run: Run, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native}, raising=False)
    base = Path("small.yaml")
    base.write_text(base.read_text().replace("fp32", "bf16"))
    monkeypatch.setattr(shipped, "experiment_ids", lambda: ["mine.yaml"])
    for arguments in (["mine.yaml", "--dry-run"], ["mine.yaml"], ["all", "--scale", "tiny"]):
        status, _, err = run("reproduce", *arguments, *OPTIONS, "--seeds", 1)
        assert status == 0
        assert err.count("this CPU has no instructions for it: training takes many times as long") == (not native)
    status, _, err = run("train", base, "--set", "data.source=text.jsonl", "--out", "run")
    assert status == 0, err
    assert ("this CPU has no instructions for it" in err) == (not native)


@pytest.mark.parametrize("engine", ["slurm", "ray"])
def test_a_dry_run_for_a_cluster_estimates_time_from_finished_runs_only(run: Run, engine: str) -> None:
    status, out, _ = run("reproduce", "mine.yaml", *OPTIONS, "--engine", engine, "--dry-run")
    assert status == 0
    assert f"6 of 6 runs will be trained by {engine}, which limits the number of concurrent runs; the time" in out
    assert "2 at a time" not in out
    status, out, _ = run("reproduce", "mine.yaml", *OPTIONS, "--engine", engine, "--dry-run", "--json")
    ahead = json.loads(out)
    assert (ahead["engine"], ahead["jobs"], ahead["hours"], ahead["estimated"]) == (engine, None, None, "")
    assert [cell["hours"] for cell in ahead["cells"]] == [None, None, None]
    assert run("reproduce", "mine.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    status, out, _ = run("reproduce", "mine.yaml", *OPTIONS, "--engine", engine, "--dry-run", "--json")
    assert all(cell["hours"] > 0 for cell in json.loads(out)["cells"])


def test_a_failed_cell_is_reported_the_others_are_trained_and_the_status_is_1(run: Run) -> None:
    status, out, err = run("reproduce", "diverging.yaml", *OPTIONS)
    assert status == 1
    assert "failed: huge: training diverged at step" in err
    assert "1 failed" in out
    cells = summary_of(Path("runs/tiny"))["cells"]
    assert cells["softmax"]["seeds"] == 1
    assert cells["huge"]["runs"][0]["status"] == "failed"
    assert "diverged" in cells["huge"]["runs"][0]["message"]
    before = records(Path("runs/tiny"))
    assert run("reproduce", "diverging.yaml", *OPTIONS)[0] == 1
    assert records(Path("runs/tiny")) == before


def test_a_cell_that_is_claimed_to_diverge_is_a_result(run: Run) -> None:
    claims = 'claims:\n  - {id: fails, text: "it does not train", check: {is: diverges, cell: huge}}\n'
    Path("diverging.yaml").write_text(DIVERGING + claims)
    status, out, err = run("reproduce", "diverging.yaml", *OPTIONS, "--json")
    assert status == 0, err
    (claim,) = json.loads(out)["claims"]
    assert (claim["verdict"], claim["evidence"]) == ("no verdict", "Training of huge diverged at 1 of 1 seed.")


def test_a_run_that_was_edited_is_named_and_not_trained_again(run: Run) -> None:
    assert run("reproduce", "other.yaml", *OPTIONS)[0] == 0
    before = records(Path("runs/tiny"))
    (directory,) = Path("runs/tiny").glob("gate-*")
    with (directory / "recipe.yaml").open("a") as file:
        file.write("# looked at\n")
    status, _, err = run("reproduce", "other.yaml", *OPTIONS)
    assert status == 0
    assert f"{directory} was modified after the run ended (recipe.yaml)" in err
    assert records(Path("runs/tiny")) == before
    assert summary_of(Path("runs/tiny"))["cells"]["gate"]["runs"][0]["edited"] == ["recipe.yaml"]


def test_a_finished_run_that_has_lost_its_metrics_is_named_and_the_others_are_summarised(run: Run) -> None:
    assert run("reproduce", "other.yaml", *OPTIONS)[0] == 0
    (directory,) = Path("runs/tiny").glob("gate-*")
    (directory / "metrics.jsonl").unlink()
    status, _, err = run("reproduce", "other.yaml", *OPTIONS)
    assert status == 0
    assert f"{directory} was modified after the run ended (metrics.jsonl)" in err
    cells = summary_of(Path("runs/tiny"))["cells"]
    assert [cells[name]["seeds"] for name in ("softmax", "gate")] == [1, 0]
    assert cells["gate"]["runs"][0]["status"] == "unfinished"
    assert "restore it, or remove the directory to train the run again" in cells["gate"]["runs"][0]["message"]


def test_a_stale_lock_file_does_not_block_a_run(run: Run) -> None:
    assert run("reproduce", "other.yaml", *OPTIONS)[0] == 0
    (directory,) = Path("runs/tiny").glob("gate-*")
    (directory / "record.json").unlink()
    lock_run(directory).close()
    assert (directory / LOCK).is_file()
    assert run("reproduce", "other.yaml", *OPTIONS)[0] == 0
    assert (directory / "record.json").is_file()


def not_ours(out: Path) -> None:
    (out / SUMMARY).write_text('{"mine": 1}')


def damaged_question(out: Path) -> None:
    (out / "asked").mkdir()
    (out / "asked" / "mine.json").write_text("{")


def incomplete_question(out: Path) -> None:
    (out / "asked").mkdir()
    (out / "asked" / "mine.json").write_text('{"schema": 1, "scale": "tiny"}')


def nothing(out: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("args", "prepare", "said"),
    [
        (["tabel_4"], nothing, "did you mean table_4"),
        (["emergence", "--scale", "60m"], nothing, "emergence has no scale '60m'; it has: tiny"),
        (["main_results", "table_4"], nothing, "main_results has laptop; table_4 has tiny, mini, small, 60m. Run them"),
        (["table_4", "--scale", "laptop"], nothing, "laptop: sinklab reproduce main_results laptop_biases"),
        (
            ["all", "--scale", "huge"],
            nothing,
            "no experiment has scale 'huge'; choose from: tiny, mini, laptop, lab, small, 60m, 1b, backcopy, "
            "trigger_average",
        ),
        (["mine.yaml", "--engine", "cloud"], nothing, "Invalid value for '--engine'"),
        (["mine.yaml", "--text", "nowhere.txt"], nothing, "--text nowhere.txt: there is no such file"),
        (["mine.yaml"], not_ours, "was not written by sinklab"),
        (["mine.yaml"], damaged_question, "asked/mine.json cannot be read"),
        (["mine.yaml"], incomplete_question, "asked/mine.json cannot be read (experiment: Field required)"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run: Run, args: list[str], prepare: Any, said: str) -> None:
    Path("out").mkdir()
    prepare(Path("out"))
    before = set(Path("out").rglob("*"))
    status, out, err = run("reproduce", "--text", "text.jsonl", *args, "--out", "out")
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())
    assert set(Path("out").rglob("*")) == before


def test_two_experiments_that_mean_different_things_by_a_name_are_refused(run: Run) -> None:
    Path("other.yaml").write_text(OTHER.replace("gate: gate_head", "sigmoid: gate_head"))
    status, _, err = run("reproduce", "mine.yaml", "other.yaml", *OPTIONS)
    assert status == 2
    assert "cell sigmoid of mine has a different recipe from that of other" in " ".join(err.split())
    assert not Path("runs").exists()


def test_a_name_that_meant_another_recipe_in_an_earlier_call_is_refused(run: Run) -> None:
    assert run("reproduce", "mine.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    Path("other.yaml").write_text(OTHER.replace("gate: gate_head", "sigmoid: gate_head"))
    status, _, err = run("reproduce", "other.yaml", *OPTIONS)
    assert status == 2
    assert (
        "sigmoid, seed 0, has a different recipe, text or initial weights in other than in mine, which was run"
        in " ".join(err.split())
    )


def test_the_help_states_the_default_number_of_seeds(run: Run) -> None:
    assert EXPERIMENT.count("seeds: 2") == 1
    _, out, _ = run("reproduce", "--help")
    assert "the first N seeds, draws or models; default: the experiment's, usually 5" in " ".join(out.split())


def test_too_little_validation_text_is_refused_before_a_run_begins(run: Run, tmp_path: Path) -> None:
    recipe = yaml.safe_load(Path("small.yaml").read_text())
    Path("small.yaml").write_text(yaml.safe_dump({**recipe, "metric": {**recipe["metric"], "sequences": 100000}}))
    status, _, err = run("reproduce", "mine.yaml", *OPTIONS, "--out", "out")
    assert status == 2
    assert err.count("the validation text has") == 1
    assert not (tmp_path / "out").exists()


def test_a_table_without_the_main_scale_names_the_experiments_that_have_it(run: Run) -> None:
    status, out, said = run("reproduce", "table_4", "--dry-run", "--json", "--steps", 2)
    assert (status, len(json.loads(out)["cells"])) == (0, 6)
    assert "The statements of table_4 at the main scale, laptop: sinklab reproduce main_results laptop_biases" in said
    assert shipped.counterparts("laptop_biases", "laptop") == shipped.counterparts("optimisers", "laptop") == []
