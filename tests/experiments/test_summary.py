"""summary.json from the runs of a sweep, and the spread that a sweep leaves for later ones."""

import json
from pathlib import Path

import pytest
from made_runs import cell_of, cells_of, experiment_of, reading, run_of

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import CellRun, Summary
from sinklab.experiments.results import CellResults
from sinklab.experiments.shipped import load_experiment
from sinklab.experiments.summary import summarise
from sinklab.experiments.verdicts.judging import judge
from sinklab.experiments.verdicts.recorded import RecordedSpreads
from sinklab.experiments.verdicts.recording import record_spreads

LESS = {"is": "less", "value": "sink_1", "cell": "k_biases", "than": "softmax"}
SINKS = {"softmax": [36.0, 30.0, 42.0], "k_biases": [0.0, 0.0, 0.0]}


def trained(name: str) -> Experiment:
    """An experiment that comes with sinklab and trains its cells."""
    experiment = load_experiment(name)
    assert isinstance(experiment, Experiment)
    return experiment


def test_a_cell_has_plain_means_and_estimates_with_intervals() -> None:
    runs = [CellRun(seed=seed, hash="0" * 16, directory=f"softmax-{seed}", status="done") for seed in range(3)]
    numbers = cells_of("sink_1", SINKS)
    results = {**numbers, "softmax": CellResults({"optim.lr": 0.1}, runs, numbers["softmax"].numbers)}
    summary = summarise([(experiment_of(LESS, cells=list(SINKS)), "tiny")], results)
    softmax = summary.cells["softmax"]
    assert softmax.sink_rate == pytest.approx([36.0, 0.0])
    assert (softmax.valid_loss, softmax.hidden_norm_ratio_max, softmax.sink_rate_bias) == (3.0, 2.0, None)
    assert (softmax.seeds, softmax.change, softmax.runs) == (3, {"optim.lr": 0.1}, runs)
    estimate = softmax.values["sink_1"]
    assert estimate.low is not None
    assert estimate.high is not None
    assert 20 < estimate.low < 34 < estimate.mean < 37 < estimate.high < 55
    assert set(softmax.values) == {"sink_1", "valid_loss", "norm_ratio"}  # the sink on a bias was not measured
    assert summary.cells["k_biases"].values["sink_1"].mean == pytest.approx(0.0, abs=1e-9)


def test_one_seed_has_no_interval() -> None:
    results = cells_of("sink_1", {cell: values[:1] for cell, values in SINKS.items()})
    mine = experiment_of(LESS, cells=list(SINKS)).model_copy(update={"base": {"tiny": "my.yaml"}})
    estimate = summarise([(mine, "tiny")], results).cells["softmax"].values["sink_1"]
    assert (estimate.mean, estimate.low, estimate.high) == (pytest.approx(36.0), None, None)


def test_the_mean_of_a_step_that_a_seed_never_reached_is_a_bound_without_an_interval() -> None:
    sinks = [[0.0, 20.0], [0.0, 0.0], [20.0, 20.0]]
    runs = [
        run_of(seed, *(reading(500 * (at + 1), sink_1=sink) for at, sink in enumerate(two)))
        for seed, two in enumerate(sinks)
    ]
    experiment = trained("emergence")
    summary = summarise([(experiment, "tiny")], {"softmax": cell_of(*runs), "lr_half": cell_of(runs[0], runs[2])})
    estimate = summary.cells["softmax"].values["emergence_step"]
    assert (estimate.never_reached, estimate.low, estimate.high) == (1, None, None)
    assert 500 < estimate.mean < 1000
    assert summary.cells["lr_half"].values["emergence_step"].never_reached == 0
    assert summary.cells["softmax"].values["sink_1"].never_reached == 0


def test_a_cell_without_finished_runs_is_there_with_its_failures() -> None:
    failed = CellRun(seed=0, hash="0" * 16, directory="x", status="failed", message="the loss is not finite")
    results = {"softmax": CellResults({}, [failed], [], failed=1)}
    summary = summarise([(experiment_of(LESS, cells=list(SINKS)), "tiny")], results)
    assert list(summary.cells) == ["softmax"]
    assert (summary.cells["softmax"].seeds, summary.cells["softmax"].runs) == (0, [failed])
    assert [claim.verdict for claim in summary.claims] == ["not run"]


def test_several_experiments_share_their_cells_and_each_has_its_claims() -> None:
    asked = [trained("table_4"), trained("table_6")]
    results = cells_of("sink_1", {**SINKS, "sigmoid": [0.1, 0.1, 0.05], "of_nobody": [1.0]})
    summary = summarise([(one, "tiny") for one in asked], results)
    assert (summary.id, summary.title, summary.scale) == ("", "", "tiny")
    assert list(summary.cells) == ["softmax", "k_biases", "sigmoid"]
    assert len(summary.claims) == sum(len(one.claims_at("tiny")) for one in asked)
    verdicts = {(claim.experiment, claim.id): claim.verdict for claim in summary.claims}
    assert verdicts["table_4", "k_biases_free_the_first_token"] == "reproduced"
    assert verdicts["table_6", "sigmoid_has_none"] == "reproduced"
    assert verdicts["table_6", "elu1_has_none"] == "not run"
    described = summary.experiments["table_4"]
    assert described.published["k_biases"] == {"sink_bias": 73.34, "sink_1": 0.0, "valid_loss": 3.72}
    assert summary.experiments["table_6"].published["elu_kernel"] == {"trains": 0.0}
    assert described.adapted[0].startswith("tiny is 0.3 M parameters")
    assert described.adapted[1:] == [one.why for one in asked[0].adapted["tiny"]]
    assert described.baseline == "softmax"
    assert set(described.cells) == set(asked[0].cells_at("tiny"))


def test_one_experiment_names_the_summary_and_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    summary = summarise([(trained("lab"), "tiny")], cells_of("sink_1", SINKS))
    assert (summary.id, summary.title) == ("lab", trained("lab").title)
    summary.save(tmp_path)
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["schema"] == 2
    assert Summary.model_validate(document) == summary


ONE_SEED = cells_of("sink_1", {"softmax": [36.0], "k_biases": [0.1]})
SEVERAL = cells_of("sink_1", {"softmax": [36.0, 30.0, 42.0], "other": [20.0, 22.0, 31.0], "third": [9.0, 5.0, 7.0]})


def recorded(folder: Path, results: dict[str, CellResults]) -> RecordedSpreads:
    record_spreads(folder / "spread.json", "tiny", results, ["sink_1", "sink_bias"])
    return RecordedSpreads.model_validate(json.loads((folder / "spread.json").read_text()))


def test_an_experiment_without_replicates_takes_the_spread_that_was_recorded_for_its_scale(tmp_path: Path) -> None:
    spreads, experiment = recorded(tmp_path, SEVERAL), experiment_of(LESS, cells=["softmax", "k_biases"])
    assert set(spreads.scales["tiny"]) == {"sink_1"}
    assert judge(experiment, "tiny", ONE_SEED, spreads)[0].verdict == "reproduced"
    assert judge(experiment, "tiny", ONE_SEED, RecordedSpreads())[0].verdict == "inconclusive"


def test_a_recorded_spread_is_for_the_scales_own_recipe_at_its_own_length(tmp_path: Path) -> None:
    spreads, experiment = recorded(tmp_path, SEVERAL), experiment_of(LESS, cells=["softmax", "k_biases"])
    short = {
        cell: cell_of(run_of(0, reading(40, sink_1=rate))) for cell, rate in (("softmax", 36.0), ("k_biases", 0.1))
    }
    assert judge(experiment, "tiny", short, spreads)[0].verdict == "inconclusive"
    mine = experiment.model_copy(update={"base": {"tiny": "my.yaml"}})
    assert judge(mine, "tiny", ONE_SEED, spreads)[0].verdict == "inconclusive"
    assert recorded(tmp_path / "short", short).scales["tiny"] == {}


def test_replicates_of_the_experiment_itself_count_before_recorded_ones(tmp_path: Path) -> None:
    wild = cells_of("sink_1", {"softmax": [1.0, 90.0, 5.0], "other": [90.0, 1.0, 70.0]})
    experiment = experiment_of(LESS, cells=["softmax", "k_biases", "other"])
    results = cells_of("sink_1", {**SINKS, "other": [20.0, 22.0, 21.0]})
    assert judge(experiment, "tiny", results, recorded(tmp_path, wild)) == judge(
        experiment, "tiny", results, RecordedSpreads()
    )


def test_recording_one_scale_leaves_the_others_and_refuses_another_file(tmp_path: Path) -> None:
    path = tmp_path / "spread.json"
    path.write_text('{"schema": 1, "scales": {"60m": {"sink_1": {"single": {"sd": 0.1, "df": 4}}}}}')
    assert set(recorded(tmp_path, SEVERAL).scales) == {"60m", "tiny"}
    path.write_text("[1]")
    with pytest.raises(InputError, match=r"spread\.json holds no spreads"):
        recorded(tmp_path, SEVERAL)
