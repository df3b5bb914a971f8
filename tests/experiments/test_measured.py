"""Experiments on existing models: measurements, draws, resuming, refusals, and the models that a verdict covers."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_measurement import made_measurement
from pydantic import ValidationError
from stops import Stops
from tiny_models import text_file, tiny_model
from trained_run import trained_run

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment, MeasuredCell
from sinklab.experiments.measured import (
    MeasuredResults,
    measure_experiment,
    paper_model,
    paper_rows,
    passes_of,
    published_numbers,
    subjects_of,
)
from sinklab.experiments.shipped import load_experiment
from sinklab.experiments.summary import measured_numbers
from sinklab.measuring.options import Options, Request
from sinklab.survey.measure import measure_model

SMALL = {"sequences": 6, "length": 16}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("measured") / "gpt2"))


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("measured") / "neox", "gptneox"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return text_file(tmp_path / "text.jsonl")


def made(cells: dict[str, Any], claims: list[dict[str, Any]] | None = None, **others: Any) -> Experiment:
    sized = {name: {"inputs": "natural", **SMALL, **cell} for name, cell in cells.items()}
    said = {"id": "mine", "title": "Mine", "cells": sized, "claims": claims or [], **others}
    return Experiment.model_validate(said)


def shipped(name: str, **sizes: int) -> Experiment:
    """Shipped experiment with fewer sequences."""
    experiment = load_experiment(name)
    cells = {name: cell.model_copy(update=sizes) for name, cell in experiment.requests.items()}
    return experiment.model_copy(update={"cells": cells})


def verdicts(results: MeasuredResults) -> dict[str, str]:
    return {claim.id: claim.verdict for claim in results.summary().claims}


def without_cost(document: dict[str, Any]) -> dict[str, Any]:
    cells = document["cells"]
    for cell in cells.values():
        cell["seconds"] = None
        for run in cell["runs"]:
            run["seconds"] = None
    return document


def test_cells_that_differ_in_threshold_and_length_share_a_pass_and_have_its_numbers(
    gpt2: str, text: Path, tmp_path: Path
) -> None:
    cells = {f"eps_{eps}_length_{length}": {"eps": eps, "length": length} for eps in (0.1, 0.3) for length in (8, 16)}
    experiment = made({**cells, "random": {"inputs": "random"}})
    assert [one.name for one in passes_of(experiment, subjects_of(experiment, [gpt2], text))] == ["natural", "random"]
    done = measure_experiment(experiment, [gpt2], text, 2, out=tmp_path / "out").summary()
    for draw in range(2):
        request = Request(
            options=Options(eps=(0.1, 0.3), lengths=(8,)), sequences=6, length=16, seed=draw, drawn_text=True
        )
        alone = measure_model(gpt2, text, request)
        assert alone.sink_rates
        assert alone.sink_rate_by_length
        expected = {
            "eps_0.1_length_16": alone.sink_rates["0.1"][0],
            "eps_0.3_length_16": alone.sink_rates["0.3"][0],
            "eps_0.1_length_8": alone.sink_rate_by_length["8"]["0.1"][0],
            "eps_0.3_length_8": alone.sink_rate_by_length["8"]["0.3"][0],
        }
        assert {name: done.cells[name].runs[draw].values["sink_1"] for name in expected} == expected


def test_draws_differ_from_each_other_and_are_reproducible(gpt2: str, text: Path, tmp_path: Path) -> None:
    experiment = made({"natural": {}, "random": {"inputs": "random"}, "repeat": {"inputs": "repeat"}})
    once, again = (measure_experiment(experiment, [gpt2], text, 2, out=tmp_path / name) for name in ("a", "b"))
    for cell in ("natural", "random", "repeat"):
        first, second = (once.outcome.measured[f"{cell}/seed_{draw}"].importance for draw in range(2))
        assert not np.array_equal(first, second)
        assert np.array_equal(first, again.outcome.measured[f"{cell}/seed_0"].importance)


def test_an_interrupted_experiment_resumes_and_more_draws_keep_finished_ones(
    gpt2: str, text: Path, tmp_path: Path
) -> None:
    experiment = made(
        {"natural": {}, "random": {"inputs": "random"}},
        [{"id": "some", "text": "..", "check": {"is": "within", "value": "sink_1", "cell": "natural", "at_least": 0}}],
    )
    with pytest.raises(KeyboardInterrupt):
        measure_experiment(experiment, [gpt2], text, 2, out=tmp_path / "cut", observe=Stops(3))
    after = Stops()
    went_on = measure_experiment(experiment, [gpt2], text, 2, out=tmp_path / "cut", observe=after)
    assert after.started == ["random/seed_1"]
    whole = measure_experiment(experiment, [gpt2], text, 2, out=tmp_path / "whole")
    assert without_cost(went_on.document()) == without_cost(whole.document())
    more = Stops()
    measure_experiment(experiment, [gpt2], text, 3, out=tmp_path / "cut", observe=more)
    assert more.started == ["natural/seed_2", "random/seed_2"]


def test_a_repeated_token_has_no_sink_in_a_real_model_with_rotary_positions(data_dir: Path, tmp_path: Path) -> None:
    model, web = str(data_dir / "models" / "TinyStories-656K"), data_dir / "domains" / "c4_web.jsonl"
    results = measure_experiment(shipped("table_1", sequences=12), [model], web, 5, out=tmp_path)
    found, summary = verdicts(results), results.summary()
    assert found["no_sink_on_repeated_tokens"] == "reproduced"
    assert "sink_on_repeated_tokens" not in found  # which is claimed of models that add positions
    assert found["chat_model_has_it_too"] == "not run"
    assert found["sink_on_random_tokens"] == "contradicted"  # this model has a sink on BOS only
    assert found["sink_on_random_tokens_like_text"] == "reproduced"
    assert summary.scale == "TinyStories-656K"
    evidence = next(claim.evidence for claim in summary.claims if claim.id == "no_sink_on_repeated_tokens")
    assert evidence.endswith("5 draws of 12 sequences.")
    assert "seed" not in evidence
    assert {claim.shown_verdict for claim in summary.claims} >= {"reproduced for this model", "not run"}
    assert summary.cells["natural"].seeds == 5
    assert list(summary.cells) == ["natural", "random", "random_like_text", "repeat"]
    assert summary.experiments["table_1"].published == {}
    assert summary.experiments["table_1"].elsewhere["GPT2-XL"]["repeat"] == {"sink_1": 62.28}


def test_claims_about_added_positions_are_judged_for_models_that_add_them(
    gpt2: str, text: Path, tmp_path: Path
) -> None:
    results = measure_experiment(shipped("table_1", **SMALL), [gpt2], text, 2, out=tmp_path)
    assert "sink_on_repeated_tokens" in verdicts(results)
    assert "no_sink_on_repeated_tokens" not in verdicts(results)


def test_a_pair_is_measured_as_base_and_chat(gpt2: str, neox: str, text: Path, tmp_path: Path) -> None:
    results = measure_experiment(shipped("table_1", **SMALL), [gpt2, neox], text, 2, out=tmp_path)
    assert results.outcome.measured["natural/seed_0"].model == gpt2
    assert results.outcome.measured["chat/seed_0"].model == neox
    assert verdicts(results)["chat_model_has_it_too"] != "not run"
    assert results.summary().scale == "gpt2, neox"


def test_swapping_two_positions_swaps_their_hidden_norms(gpt2: str, tmp_path: Path) -> None:
    experiment = shipped("table_7", sequences=4, length=32)
    few = {name: cell for name, cell in experiment.requests.items() if name in ("unchanged", "swapped_5", "replaced_5")}
    claims = tuple(claim for claim in experiment.claims if set(claim.cells) <= set(few))
    assert len(claims) == 4
    results = measure_experiment(
        experiment.model_copy(update={"cells": few, "claims": claims}), [gpt2], None, 2, out=tmp_path
    )
    unchanged, swapped = (results.outcome.measured[f"{name}/seed_0"] for name in ("unchanged", "swapped_5"))
    assert swapped.notes == ["the learned positions 1 and 5 were swapped"]
    assert not np.allclose(unchanged.hidden_norm[0, 0], swapped.hidden_norm[0, 0])  # type: ignore[index]
    assert np.allclose(unchanged.hidden_norm[0, 0], swapped.hidden_norm[0, 4])  # type: ignore[index]
    assert set(results.summary().cells["swapped_5"].values) == {"sink_1", "sink_5", "sink_10", "sink_15", "sink_20",
                                                                "sink_25", "sink_30"}  # fmt: skip


def test_a_model_without_learned_positions_is_refused_before_anything_is_measured(neox: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no learned positional embeddings to change, unlike GPT-2"):
        measure_experiment(shipped("table_7"), [neox], None, 1, out=tmp_path / "out")
    assert not list(tmp_path.rglob("measurement.json"))


def test_sequences_beyond_a_models_context_are_refused_before_anything_is_measured(
    gpt2: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="256"):
        measure_experiment(shipped("figure_3"), [gpt2], text, 1, out=tmp_path / "out")
    assert not list(tmp_path.rglob("measurement.json"))


def test_every_domain_is_a_cell_and_the_claim_is_about_all_of_them(gpt2: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    for seed, name in enumerate(("alpha", "beta", "small")):
        text_file(texts / f"{name}.jsonl", documents=2 if name == "small" else 12, seed=30 * seed)
    results = measure_experiment(shipped("figure_9", **SMALL), [gpt2], texts, 2, out=tmp_path / "out")
    summary = results.summary()
    assert list(summary.cells)[:4] == ["alpha/eps_0.2", "alpha/eps_0.3", "alpha/eps_0.4", "beta/eps_0.2"]
    claim = next(one for one in summary.claims if one.id == "alike_at_eps_0_2")
    assert claim.cells == ["alpha/eps_0.2", "beta/eps_0.2", "small/eps_0.2"]
    assert claim.verdict != "not run"
    assert len(list((tmp_path / "out").rglob("measurement.json"))) == 6  # thresholds share a pass


def test_a_family_is_ordered_by_size_whatever_the_order_given(gpt2: str, text: Path, tmp_path: Path) -> None:
    sizes = ("gpt2-medium", "gpt2-large", "gpt2")
    models = [str(shutil.copytree(gpt2, tmp_path / "models" / name)) for name in sizes]
    results = measure_experiment(shipped("table_8", **SMALL), models, text, 2, out=tmp_path / "out")
    claims = {one.id: one for one in results.summary().claims}
    of_each = [f"small_models_have_a_sink_{name.replace('-', '_')}" for name in sizes]
    assert list(claims) == [
        *of_each, "grows_with_size_in_pythia", "does_not_grow_with_size_elsewhere_gpt2", "grows_with_size_gpt2"
    ]  # fmt: skip
    for name in ("does_not_grow_with_size_elsewhere_gpt2", "grows_with_size_gpt2"):
        assert claims[name].cells == ["gpt2/natural", "gpt2-medium/natural", "gpt2-large/natural"]
    assert claims[of_each[0]].cells == ["gpt2-medium/natural"]
    assert claims["grows_with_size_in_pythia"].evidence == "The claim requires 3 models of pythia."
    two = measure_experiment(shipped("table_8", **SMALL), models[:2], text, 2, out=tmp_path / "two").summary()
    assert (two.claims[-1].verdict, two.claims[-1].evidence) == (
        "not run",
        "The claim requires 3 models of one family of the paper's list other than pythia.",
    )


def test_a_claim_of_an_unknown_family_is_refused() -> None:
    check = {"is": "rising", "cell": "a", "value": "sink_1", "families": ["bert"]}
    with pytest.raises(ValidationError, match="unknown family 'bert'; choose from: gpt2"):
        made({"a": {}}, [{"id": "one", "text": "..", "check": check}], each="model")


@pytest.mark.parametrize(("kind", "number"), [("none", 1), ("relative", 2), ("alibi", 3), ("rotary", 4)])
def test_each_proposition_is_judged_for_models_with_its_kind_of_positions(
    kind: str, number: int, tmp_path: Path
) -> None:
    run, _ = trained_run(tmp_path, {}, {"position": kind})
    results = measure_experiment(shipped("propositions", **SMALL), [str(run)], None, 5, out=tmp_path / "out")
    (claim,) = results.summary().claims
    assert (claim.id, claim.verdict) == (f"proposition_{number}", "reproduced")


def test_no_proposition_applies_to_a_model_that_adds_positions(gpt2: str, tmp_path: Path) -> None:
    results = measure_experiment(shipped("propositions", **SMALL), [gpt2], None, 5, out=tmp_path / "out")
    assert results.summary().claims == []
    values = results.summary().cells["repeat"].runs[0].values
    assert values["proposition_excess"] > 1


def test_importance_is_that_of_the_first_quarter_of_the_layers_and_of_the_others() -> None:
    made_of_two = made_measurement()
    measured = made_of_two.model_copy(
        update={"importance": np.concatenate([made_of_two.importance * k for k in (1, 0.5, 0.2, 0.1)])}
    )
    layers_L = 100 * measured.importance[..., 0].mean(-1)
    found = measured_numbers(MeasuredCell(length=measured.length), measured, 0)
    assert found.value("importance_first") == pytest.approx(layers_L.mean())
    assert found.value("importance_early") == pytest.approx(layers_L[:2].mean())
    assert found.value("importance_gap") == pytest.approx(layers_L[2:].mean() - layers_L[:2].mean())


def test_published_numbers_are_shown_only_for_the_models_and_settings_of_the_paper(tmp_path: Path) -> None:
    (tmp_path / "Llama-2-7b-chat-hf").mkdir()
    experiment = shipped("table_1")
    natural, chat = experiment.requests["natural"], experiment.requests["chat"]
    assert published_numbers(experiment, "natural", natural, "openai-community/gpt2-xl") == {"sink_1": 77.0}
    assert published_numbers(experiment, "chat", chat, str(tmp_path / "Llama-2-7b-chat-hf")) == {"sink_1": 92.88}
    assert published_numbers(experiment, "natural", natural, "my-gpt2-xl") == {}
    assert published_numbers(experiment, "natural", natural.model_copy(update={"length": 32}), "gpt2-xl") == {}
    swap = shipped("table_7")
    cell = swap.requests["swapped_5"]
    assert published_numbers(swap, "swapped_5", cell, "gpt2-xl") == {"sink_1": 1.44, "sink_5": 57.63}
    assert published_numbers(swap, "swapped_5", cell, "openai-community/gpt2") == {}
    assert paper_rows(swap)["GPT2-XL"]["replaced_30"] == {"sink_1": 10.21, "sink_30": 0.0}
    assert paper_model("gpt2-xl") == paper_model("openai-community/gpt2-xl")
    assert paper_model("gpt2-xl") is not None
    assert paper_model("nobody/gpt2-xxl") is None


def test_angles_are_means_over_the_heads_with_a_sink(data_dir: Path, tmp_path: Path) -> None:
    model, web = str(data_dir / "models" / "TinyStories-656K"), data_dir / "domains" / "tinystories.jsonl"
    measured = measure_model(model, web, Request(options=Options(details=True), sequences=8, length=32))
    found = measured_numbers(MeasuredCell(sequences=8, length=32, details=True), measured, 0).measured
    heads = measured.importance[:, :, 0] > 0.3
    assert heads.any()
    assert measured.details is not None
    assert measured.details.cosine is not None
    cosine = torch.from_numpy(measured.details.cosine[heads])
    first, rest = float(cosine[:, 0].mean()), float(cosine[:, 1:].mean())
    assert found["cosine_first"] == pytest.approx(first)
    assert found["cosine_gap"] == pytest.approx(first - rest)
    assert found["largest_activation"] == max(abs(one.value) for one in measured.massive_activations or [])
    nowhere = measured_numbers(MeasuredCell(sequences=8, length=32, eps=0.99, details=True), measured, 0).measured
    assert "cosine_first" not in nowhere


def test_a_number_that_was_not_measured_is_none() -> None:
    numbers = measured_numbers(MeasuredCell(sequences=4, length=16), made_measurement(), 1)
    assert numbers.value("cosine_gap") is None
    assert numbers.value("valid_loss") is not None
    assert numbers.seed == 1
    assert math.isclose(numbers.value("norm_ratio") or 0, max(made_measurement().hidden_norm_ratio or []))


BOUND = {"is": "within", "value": "sink_1", "cell": "no", "at_most": 1}
CHAT = {"natural": {"inputs": "natural"}, "chat": {"inputs": "natural", "model": "chat"}}
OVER_DOMAINS = {"is": "equal", "value": "sink_1", "cell": "natural", "margin": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"claims": [{"id": "a", "text": "..", "check": BOUND}]}, "unknown cell 'no'"),
        (
            {"claims": [{"id": "a", "text": "..", "check": OVER_DOMAINS}]},
            "compares domains or models, but the experiment does not set `each`",
        ),
        ({"each": "domain", "cells": {"random": {"inputs": "random"}}}, "must set inputs: natural"),
        ({"each": "domain", "cells": CHAT}, "cell 'chat' sets model, and the experiment sets `each`"),
        ({"each": "model", "cells": CHAT}, "cell 'chat' sets model, and the experiment sets `each`"),
        ({"cells": {"natural": {"inputs": "natural", "eps": 2}}}, "eps"),
        ({"columns": ["sinks"]}, "unknown quantity 'sinks'"),
        ({"scale": "tiny"}, "scale"),
    ],
)
def test_an_experiment_that_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    whole = {"id": "mine", "title": "Mine", "cells": {"natural": {"inputs": "natural"}}, **change}
    with pytest.raises(ValidationError, match=said):
        Experiment.model_validate(whole)


@pytest.mark.parametrize("key", [{"positions": "added"}, {"proposition": 1}])
def test_a_claim_about_models_of_one_kind_of_positions_is_refused_of_several_models(key: dict[str, Any]) -> None:
    claim = {"id": "one", "text": "..", "check": {**BOUND, "cell": "natural"}, **key}
    made({"natural": {}}, [claim])
    with pytest.raises(ValidationError, match=r"require a single model, but the experiment sets `each: model`"):
        made({"natural": {}}, [claim], each="model")
    with pytest.raises(ValidationError, match=r"require a single model, but the experiment has several `models`"):
        made({"natural": {"models": ["x", "y"]}}, [claim])


def test_measurements_of_other_settings_are_not_mixed(gpt2: str, text: Path, tmp_path: Path) -> None:
    measure_experiment(made({"natural": {}}), [gpt2], text, 1, out=tmp_path)
    with pytest.raises(InputError, match="contains a measurement with other settings"):
        measure_experiment(made({"natural": {"loss": True}}), [gpt2], text, 1, out=tmp_path)


def test_draws_that_may_share_pieces_of_the_text_are_not_taken_for_disjoint_ones(
    gpt2: str, text: Path, tmp_path: Path
) -> None:
    measure_experiment(made({"natural": {}}), [gpt2], text, 1, out=tmp_path)
    request = tmp_path / "natural" / "seed_0" / "request.json"
    asked = json.loads(request.read_text(encoding="utf-8"))
    request.write_text(json.dumps({**asked, "drawn_text": True}), encoding="utf-8")  # the format of earlier versions
    with pytest.raises(InputError, match=r"other settings \(drawn_text is True, requested disjoint\)"):
        measure_experiment(made({"natural": {}}), [gpt2], text, 2, out=tmp_path)


def test_a_model_may_be_given_with_its_revision(text: Path) -> None:
    experiment = made({"text": {}, "random": {"inputs": "random"}})
    passes = passes_of(experiment, subjects_of(experiment, ("org/x@main",), text))
    assert [str(one.model(0)) for one in passes] == ["org/x@main"] * 2
