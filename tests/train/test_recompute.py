"""`train.recompute: blocks` leaves losses and gradients unchanged, bit for bit."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import one_in
from torch import Tensor

from sinklab.data.prepare import prepare, settings_of
from sinklab.device import float32_matmul
from sinklab.interventions import VARIANTS
from sinklab.model.transformer import Transformer
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run, read_metrics
from sinklab.train.world import compile_blocks, recompute_blocks

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "model": {"layers": 3, "width": 32, "heads": 4, "ffn_width": 48, "context": 16},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 6, "batch_size": 4, "micro_batch": 2, "eval_every": 3, "eval_sequences": 4, "save_every": 3},
    "metric": {"sequences": 4, "length": 16},
}


def a_model(name: str) -> Transformer:
    recipe = build_recipe(BASE, {"model": {"vocab_size": 50}}, VARIANTS[name].overlay)
    return Transformer(recipe.model)


def loss_and_gradients(model: Transformer, precision: torch.dtype = torch.float32) -> list[Tensor]:
    tokens_BT = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = model.loss(tokens_BT)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return [loss, *gradients]


@pytest.mark.parametrize(("name", "precision"), one_in(5, itertools.product(VARIANTS, (torch.float32, torch.bfloat16))))
def test_recomputation_leaves_losses_and_gradients_unchanged(name: str, precision: torch.dtype) -> None:
    plain, again = a_model(name), a_model(name)
    recompute_blocks(again, "blocks")
    assert list(again.state_dict()) == list(plain.state_dict())
    for expected, ours in zip(*(loss_and_gradients(m, precision) for m in (plain, again)), strict=True):
        assert torch.equal(ours, expected)


def test_every_block_runs_twice_in_a_step_and_once_without_gradients() -> None:
    model, ran = a_model("softmax"), []
    recompute_blocks(model, "blocks")
    for block in model.blocks:
        block.get_submodule("ffn").register_forward_pre_hook(lambda *_: ran.append(1))
    loss_and_gradients(model)
    assert len(ran) == 2 * len(model.blocks)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert len(ran) == 3 * len(model.blocks)


@pytest.mark.parametrize("name", ["k_biases", "linear_hybrid", "value_residual_learned"])
def test_compiled_blocks_can_be_recomputed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    models = [a_model(name), a_model(name)]
    recompute_blocks(models[1], "blocks")
    for model in models:
        compile_blocks(model, "on", CPU)
    for expected, ours in zip(*(loss_and_gradients(model) for model in models), strict=True):
        assert torch.equal(ours, expected)


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains a small run with these settings of `train`; returns its metrics without those that depend on the clock."""
    data = prepare(
        settings_of("synthetic:bigram_backcopy:length=17,documents=200", "words", valid_fraction=0.2), tmp_path / "data"
    )

    def train(**settings: object) -> list[dict[str, Any]]:
        out = tmp_path / "-".join(map(str, settings.values()))
        Trainer(open_run(build_recipe(BASE, {"train": settings}), data, out)).train()
        clock = ("tokens_per_second", "stall_share", "seconds")
        return [{k: v for k, v in row.items() if k not in clock} for row in read_metrics(out / "metrics.jsonl")]

    return train


def test_recomputation_leaves_the_run_unchanged(trained: Callable[..., list[dict[str, Any]]]) -> None:
    assert trained(recompute="blocks") == trained(recompute="none")


def test_float32_matmul_changes_nothing_on_a_cpu(trained: Callable[..., list[dict[str, Any]]]) -> None:
    assert trained(float32_matmul="high") == trained(float32_matmul="highest")


def test_tf32_is_allowed_on_a_card_within_an_update_and_not_after_it() -> None:
    before = torch.get_float32_matmul_precision()
    with float32_matmul("high", CPU):
        assert torch.get_float32_matmul_precision() == before
    with float32_matmul("high", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
