"""Losses added to the cross-entropy: their formulas, their gradients, and their separate reporting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.model.loss import AddedLosses
from sinklab.model.transformer import Transformer
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, build_recipe
from sinklab.train.run import open_run, read_metrics

RECIPE = {
    "model": {"layers": 3, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "data": {"source": "synthetic:bigram_backcopy:length=33,documents=300", "tokenizer": "words"},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 0},
    "train": {"steps": 4, "batch_size": 4, "eval_every": 2, "eval_sequences": 8, "save_every": 4},
    "metric": {"sequences": 8, "length": 16},
}
BOTH = {"hidden_z": {"weight": 0.3}, "tweo": {"weight": 0.2, "tau": 0.5, "p": 3.0}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return prepare(settings_of(recipe().data.source, "words", valid_fraction=0.2), tmp_path_factory.mktemp("data"))


def recipe(**changes: Any) -> Recipe:
    return build_recipe(RECIPE, changes)


def expected(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Both terms with the weights of `BOTH`, entry by entry, as the papers write them."""
    stream, outputs, places = model.embedding(tokens[:, :-1]), [], []
    if model.sink_token is not None:
        stream = torch.cat([model.sink_token.expand(len(tokens), -1, -1), stream], 1)
    hook = model.blocks[0].register_forward_pre_hook(lambda block, given: places.append(given[1]))
    model.hidden(tokens[:, :-1])
    hook.remove()
    for block in model.blocks:
        stream = block(stream, places[0])
        outputs.append(stream)
    z_terms = [torch.log(torch.exp(row.abs()).sum()) ** 2 for row in outputs[-1].flatten(0, 1)]
    entries = torch.stack(outputs).flatten()
    return 0.3 * torch.stack(z_terms).mean(), 0.2 * ((entries.abs() / (0.5 + 1e-6)) ** 3).mean()


@pytest.mark.parametrize("bias", ["none", "sink_token"])
def test_added_losses_equal_the_papers_formulas_in_value_and_gradient(bias: str) -> None:
    config = recipe(model={"vocab_size": 31, "attention": {"bias": bias}}).model
    model = Transformer(config, seed=1).double()
    tokens = torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(0))
    added = AddedLosses.model_validate(BOTH)
    found = model.losses(tokens, added)
    theirs = (model.loss(tokens), *expected(model, tokens))
    weights = list(model.parameters())
    for ours, other in zip(found, theirs, strict=True):
        assert_close(ours, other, 1e-12)
        gradients = (torch.autograd.grad(x, weights, retain_graph=True, materialize_grads=True) for x in (ours, other))
        for mine, formula in zip(*gradients, strict=True):
            assert_close(mine, formula, 1e-11)


@pytest.mark.parametrize("weight", [1e-7, 0.3])
def test_the_hidden_z_loss_equals_public_code(weight: float) -> None:
    """github.com/ShinnChow/LongCat-Next, sft/losses/z_loss.py (copyright Meituan): `compute_hidden_z_loss`.

    `AddHiddenZLossToBackward` there adds its gradient to that of the hidden states before the final norm.
    """
    outputs = block_outputs()
    ours = AddedLosses.model_validate({"hidden_z": {"weight": weight}}).terms["hidden_z"].of(outputs)
    theirs = (weight * outputs[-1].abs().logsumexp(-1).pow(2)).mean()
    gradient, expected = (torch.autograd.grad(loss, outputs[-1])[0] for loss in (ours, theirs))
    assert_close(ours, theirs, 1e-12)
    assert_close(gradient, expected, 1e-12)


def test_tweo_equals_public_code() -> None:
    """github.com/OpenEuroLLM/NVIDIA-Megatron-LM, megatron/core/transformer/tweo.py, not by the paper's authors.

    `attach` there records the sum of (A / (tau + eps))^4 of each layer, and the backward pass of `_TWEOIdentity` adds
    the loss's gradient to that of the layer's output; p 4 and eps 1e-6 are constants.
    """
    outputs = block_outputs()
    found = AddedLosses.model_validate({"tweo": {}}).terms["tweo"].of(outputs)
    scaled = [A_BLE.detach() / (3 + 1e-6) for A_BLE in outputs]
    moments = [x_BLE.square().square().sum() / x_BLE.numel() for x_BLE in scaled]
    assert_close(found, 0.01 * torch.stack(moments).sum() / len(outputs), 1e-12)
    for gradient, x_BLE in zip(torch.autograd.grad(found, outputs), scaled, strict=True):
        assert_close(gradient, x_BLE.pow(3) * 0.01 * (4 / (len(outputs) * x_BLE.numel())) / (3 + 1e-6), 1e-12)


def block_outputs() -> list[Tensor]:
    """Outputs (B, L, E) of three blocks, in float64, with entries below and above tau."""
    stream = torch.Generator().manual_seed(0)
    return [(4 * torch.randn(2, 5, 8, generator=stream, dtype=torch.float64)).requires_grad_() for _ in range(3)]


def test_added_losses_are_reported_separately_from_the_loss_and_the_metrics(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    """Before the first update, both models have the same weights and therefore the same metrics."""
    plain, changed = (
        Trainer(open_run(recipe(**x), dataset, tmp_path / n)) for n, x in (("a", {}), ("b", {"losses": BOTH}))
    )
    first = [trainer._update() for trainer in (plain, changed)]
    assert first[0] == first[1]
    assert not torch.equal(plain.model.embedding.weight, changed.model.embedding.weight)
    changed.close()
    plain.close()
    Trainer(open_run(recipe(losses=BOTH), dataset, tmp_path / "c")).train()
    Trainer(open_run(recipe(), dataset, tmp_path / "d")).train()
    rows, others = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("c", "d"))
    assert rows[0]["valid_loss"] == others[0]["valid_loss"]
    assert set(rows[0]["valid_added_losses"]) == {"hidden_z", "tweo"}
    assert "valid_added_losses" not in others[0]
    assert rows[-1]["valid_added_losses"]["tweo"] < rows[0]["valid_added_losses"]["tweo"]


def test_micro_batches_with_added_losses_give_the_gradient_of_the_whole_batch(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    gradients = []
    for size in (4, 2):
        trainer = Trainer(open_run(recipe(losses=BOTH, train={"micro_batch": size}), dataset, tmp_path / str(size)))
        trainer.updater.gradient()
        gradients.append([p.grad for p in trainer.model.parameters()])
        trainer.close()
    for whole, parts in zip(*gradients, strict=True):
        assert_close(parts, whole, 1e-6)


def test_recomputed_blocks_have_the_same_gradient(dataset: TokenDataset, tmp_path: Path) -> None:
    gradients = []
    for choice in ("none", "blocks"):
        trainer = Trainer(open_run(recipe(losses=BOTH, train={"recompute": choice}), dataset, tmp_path / choice))
        trainer.updater.gradient()
        gradients.append([p.grad for p in trainer.model.parameters()])
        trainer.close()
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_unset_added_losses_do_not_change_the_hash_of_a_recipe() -> None:
    hashes = {recipe(losses=x).content_hash("data") for x in ({}, {"hidden_z": None}, BOTH)}
    assert len(hashes) == 2
    dumped = recipe().model_dump(mode="json")
    assert dumped.pop("losses") == {"hidden_z": None, "tweo": None}
    assert Recipe.model_validate(dumped).content_hash("data") in hashes
