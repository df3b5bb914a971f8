"""Experiments that name their models: seeds of one model as replicates, revisions, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sinklab.data.prepare import prepared
from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import Summary
from sinklab.experiments.measured import (
    MeasuredResults,
    ModelChoice,
    download_of,
    measure_experiment,
    passes_of,
    subjects_of,
    with_models,
)
from sinklab.experiments.shipped import load_experiment
from sinklab.export.directory import export_run
from sinklab.survey.measure import measure_model
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run

SEEDS = 5
STEPS = (1, 12)
NAMED = ("polypythias", "smollm2_checkpoints", "outlier_safe", "gated_attention")


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five training seeds, exported after 1 and 12 steps to seedN/stepS, and the text that they were trained on."""
    folder = tmp_path_factory.mktemp("series")
    text = folder / "text.jsonl"
    counted = (" ".join(str(i * i * fence) for fence in range(1, 9)) for i in range(1000, 1400))
    text.write_text("\n".join(f'{{"text": "sheep jumps {numbers}"}}' for numbers in counted))
    for seed in range(SEEDS):
        for steps in STEPS:
            recipe = build_recipe(
                {
                    "seed": seed,
                    "model": {"layers": 2, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
                    "data": {"source": str(text), "tokenizer": "train:300", "valid_fraction": 0.2},
                    "optim": {"lr": 0.01},
                    "schedule": {"warmup_steps": 0},
                    "train": {"steps": steps, "batch_size": 8, "eval_sequences": 4},
                    "metric": {"sequences": 4, "length": 8},
                }
            )
            run = folder / "runs" / f"{seed}_{steps}"
            Trainer(open_run(recipe, prepared(recipe.data, folder / "cache"), run)).train()
            export_run(run, folder / f"seed{seed}" / f"step{steps}")
    return folder


def of_series(folder: Path, **others: Any) -> Experiment:
    models = [str(folder / f"seed{seed}") for seed in range(SEEDS)]
    sized = {"inputs": "natural", "sequences": 6, "length": 12, "loss": True, "models": models}
    cells = {"start": {**sized, "revision": "step1"}, "end": {**sized, "revision": "step12"}}
    learned = {"is": "less", "value": "valid_loss", "cell": "end", "than": "start"}
    claims = [{"id": "learned", "text": "They learn", "check": learned}]
    return Experiment.model_validate({"id": "mine", "title": "Mine", "cells": cells, "claims": claims, **others})


def measured(
    experiment: Experiment, folder: Path, out: Path, models: tuple[str, ...] = (), n: int = 9
) -> MeasuredResults:
    return measure_experiment(experiment, models, folder / "text.jsonl", n, out=out)


@pytest.fixture(scope="module")
def few_then_all(series: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, Summary]:
    """Summaries of two models and then of all, in the same directory; the two are not measured again."""
    out = tmp_path_factory.mktemp("measured")
    few = measured(of_series(series), series, out, n=2).summary()
    file = out / "end/seed1_step12/measurement.json"
    before = file.stat().st_mtime_ns
    found = measured(of_series(series), series, out).summary()
    assert file.stat().st_mtime_ns == before
    return few, found


def test_training_seeds_are_the_replicates_of_a_verdict(few_then_all: tuple[Summary, Summary]) -> None:
    _, found = few_then_all
    (claim,) = found.claims
    assert (claim.verdict, claim.shown_verdict, claim.replicate, claim.seeds) == ("reproduced",) * 2 + ("model", SEEDS)
    assert "5 models on 6 sequences" in claim.evidence
    assert [run.directory for run in found.cells["end"].runs] == [f"end/seed{seed}_step12" for seed in range(SEEDS)]


def test_every_seed_reads_the_same_sequences_and_has_the_numbers_of_its_own_measurement(
    series: Path, few_then_all: tuple[Summary, Summary]
) -> None:
    experiment, (_, found) = of_series(series), few_then_all
    (one, _) = passes_of(experiment, subjects_of(experiment, (), series / "text.jsonl"))
    for seed in (0, 3):
        alone = measure_model(str(series / f"seed{seed}" / "step1"), series / "text.jsonl", one.request(0))
        assert found.cells["start"].by_seed("valid_loss")[seed][1] == alone.loss


def test_fewer_replicates_are_the_first_models(few_then_all: tuple[Summary, Summary]) -> None:
    few, found = few_then_all
    assert (few.claims[0].verdict, few.claims[0].seeds) == ("no verdict", 2)
    assert found.claims[0].seeds == SEEDS


def test_a_shipped_experiment_accepts_the_users_own_series_of_models(series: Path) -> None:
    own = tuple(str(series / f"seed{seed}") for seed in range(SEEDS))
    experiment = with_models(of_series(Path("elsewhere")), own)
    (start, end) = passes_of(experiment, subjects_of(experiment, own, series / "text.jsonl"))
    assert [str(model) for model in end.models.values()] == [f"{seed}/step12" for seed in own]
    assert [str(model) for model in start.models.values()] == [f"{seed}/step1" for seed in own]
    asked = with_models(load_experiment("polypythias"), own)
    with pytest.raises(InputError, match="seed0 has no folder step1000"):
        passes_of(asked, subjects_of(asked, own, series / "text.jsonl"))


def test_a_single_model_per_cell_is_measured_on_draws(series: Path, tmp_path: Path) -> None:
    cells = {
        name: {"inputs": "natural", "sequences": 6, "length": 12, "loss": True, "models": [f"{series}/seed0@{name}"]}
        for name in ("step1", "step12")
    }
    learned = {"is": "less", "value": "valid_loss", "cell": "step12", "than": "step1"}
    said = {"id": "mine", "title": "Mine", "cells": cells, "claims": [{"id": "a", "text": "..", "check": learned}]}
    (claim,) = measured(Experiment.model_validate(said), series, tmp_path / "out", n=5).summary().claims
    assert (claim.replicate, claim.shown_verdict) == ("draw", "reproduced for these models")


@pytest.mark.parametrize("name", NAMED)
def test_the_download_size_of_a_shipped_experiment_follows_from_names_of_models(name: str) -> None:
    experiment = load_experiment(name)
    passes = passes_of(experiment, subjects_of(experiment, (), Path("text.jsonl")))
    models = [model for one in passes for model in one.models.values()]
    assert len(set(models)) == sum(len(cell.models) for cell in experiment.requests.values())
    assert "unknown" not in download_of(models)


def test_the_download_size_is_two_bytes_for_each_parameter_in_the_names_of_models() -> None:
    named = [ModelChoice("EleutherAI/pythia-160m-seed1", "step1000"), ModelChoice("dmis-lab/OSP-1.4B-100B-Adam")]
    assert download_of(named) == "2 models to download unless cached, about 3.1 GB at 16 bits"
    assert "1 model of unknown size" in download_of([*named, ModelChoice("org/a")])
    assert str(ModelChoice("org/models", "main", "1B_gate")) == "org/models/1B_gate@main"


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"a": {"models": ["x", "y"]}, "b": {}}, "cells 'a' and 'b' differ in the number of `models`: set"),
        ({"a": {"models": ["x", "y"]}, "b": {"models": ["x"]}}, "cells 'a' and 'b' differ in the number of `models`"),
        ({"a": {"models": ["x", "x"]}}, "lists a model twice"),
        ({"a": {"revision": "step1"}}, "require `models`"),
        ({"a": {"models": ["x"], "model": "chat"}}, "remove `model: chat` from the cell"),
    ],
)
def test_cells_whose_replicates_cannot_be_compared_are_refused(cells: dict[str, Any], said: str) -> None:
    sized = {name: {"inputs": "natural", **cell} for name, cell in cells.items()}
    with pytest.raises(ValidationError, match=said):
        Experiment.model_validate({"id": "mine", "title": "Mine", "cells": sized})


def test_a_model_given_with_and_without_the_revision_of_its_cell_is_refused_as_repeated() -> None:
    cells = {"a": {"inputs": "random", "models": ["org/x@r", "org/x"], "revision": "r"}}
    experiment = Experiment.model_validate({"id": "mine", "title": "Mine", "cells": cells})
    with pytest.raises(InputError, match="org/x@r is repeated"):
        passes_of(experiment, subjects_of(experiment, (), None))


def test_models_that_an_experiment_does_not_take_are_refused() -> None:
    with pytest.raises(InputError, match="has a fixed list of models: remove --model a"):
        with_models(load_experiment("outlier_safe"), ("a", "b"))
    with pytest.raises(InputError, match="pass at least two --model"):
        with_models(load_experiment("polypythias"), ("a",))
