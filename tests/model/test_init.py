"""Initial weights: by the paper's law or by PyTorch's own, each tensor from its own random stream."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SIZES = {"layers": 2, "width": 128, "heads": 2, "ffn_width": 192, "vocab_size": 1000, "context": 400}
SHARES = torch.linspace(0.1, 0.9, 17)


def start(kind: str, seed: int = 1, **model: Any) -> Transformer:
    return Transformer(build_recipe({"model": {**SIZES, "init": kind}}, {"model": model}).model, seed=seed)


def alike(weight: Tensor, other: Tensor) -> bool:
    """Compare the quantiles in SHARES of two samples, with a tolerance of 4.5 standard errors.

    A quantile's standard error is up to 1.75 std / sqrt(n) there, for normal and uniform samples alike.
    """
    error = 1.75 * other.std() * math.sqrt(1 / weight.numel() + 1 / other.numel())
    quantiles, others = (x.detach().flatten().quantile(SHARES) for x in (weight, other))
    return bool(((quantiles - others).abs() < 4.5 * error).all())


@pytest.mark.parametrize(
    "model",
    [{}, {"gate": "element", "ffn": "relu"}, {"attention": {"operation": "mlp"}}, {"head_outputs": "sum"}],
    ids=str,
)
def test_torch_initialises_every_module_as_its_reset_parameters(model: dict[str, Any]) -> None:
    started = start("torch", **model)
    modules = {n: m for n, m in started.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.RMSNorm)}
    assert len(modules) >= 14
    for name, module in modules.items():
        fresh = copy.deepcopy(module)
        torch.manual_seed(0)
        fresh.reset_parameters()
        if isinstance(module, nn.RMSNorm):
            assert torch.equal(module.weight, fresh.weight)
            continue
        assert alike(module.weight, fresh.weight), name
        if isinstance(module, nn.Linear):
            edge = 1 / math.sqrt(module.in_features)
            assert 0.98 * edge < module.weight.detach().abs().max().item() <= edge


def test_the_declared_law_differs_from_pytorchs() -> None:
    declared, torchs = start("declared"), start("torch")
    for name in ("embedding.weight", "head.weight", "blocks.0.ffn.down.weight"):
        assert not alike(declared.get_parameter(name), torchs.get_parameter(name))
    assert torchs.embedding.weight.std().item() == pytest.approx(1, rel=0.02)
    assert declared.embedding.weight.std().item() == pytest.approx(math.sqrt(2 / (5 * 128)), rel=0.02)


def test_tables_start_like_embeddings_and_a_value_gate_like_a_linear_layer() -> None:
    learned = start("torch", position="learnable")
    assert alike(learned.get_parameter("position_table"), nn.Embedding(400, 128).weight)
    t5 = start("torch", position={"kind": "t5", "buckets": 128, "max_distance": 256}, heads=16)
    assert alike(t5.get_parameter("distance.weight"), nn.Embedding(128, 16).weight)
    gated = start("torch", gate="value", width=512, heads=64)  # 64 maps from a head's width of 8
    for name in ("weight", "bias"):
        started = torch.cat([block.get_parameter(f"attention.value_gate.{name}") for block in gated.blocks])
        assert alike(started, getattr(nn.Linear(8, 2000), name))
        assert started.abs().max() <= 8**-0.5
        assert started.unique().numel() == started.numel()


def test_a_gate_on_narrow_values_starts_like_a_linear_layer_of_their_width() -> None:
    gated = start("torch", gate="value", heads=16, projection={"kind": "latent", "value_width": 2})
    for name in ("weight", "bias"):
        started = torch.cat([block.get_parameter(f"attention.value_gate.{name}").flatten() for block in gated.blocks])
        assert 8**-0.5 < started.abs().max() <= 2**-0.5


@pytest.mark.parametrize(
    "model",
    [
        {"attention": {"bias": "kv"}},
        {"attention": {"bias": "sink_token"}},
        {"attention": {"bias": "sink_logit"}},
        {"attention": {"operation": "differential"}},
        {"norm": {"kind": "dynamic_tanh"}},
        {"value_residual": "learned"},
    ],
    ids=str,
)
def test_other_tensors_start_the_same_by_both_laws(model: dict[str, Any]) -> None:
    plain = {name for name, _ in start("torch").named_parameters() if not name.endswith("norm.weight")}
    declared, torchs = start("declared", **model), start("torch", **model)
    others = [name for name, _ in torchs.named_parameters() if name not in plain]
    assert others
    for name in others:
        assert torch.equal(declared.get_parameter(name), torchs.get_parameter(name)), name


def test_each_tensor_has_its_own_random_stream_under_both_laws() -> None:
    for kind in ("declared", "torch"):
        plain, gated = start(kind).state_dict(), start(kind, gate="value").state_dict()
        assert len(gated) > len(plain)
        assert all(torch.equal(gated[name], weight) for name, weight in plain.items())
        assert not torch.equal(plain["head.weight"], start(kind, seed=2).head.weight)
