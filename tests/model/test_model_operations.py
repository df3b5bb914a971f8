"""Operations inside the model: under rotary positions, behind a sink token, with biases, under a prefix."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import BIASES, KERNELS, OPERATIONS, close
from pydantic import ValidationError
from sampling import one_in
from torch import Tensor, nn

from sinklab.attention.operations.differential import Lambda
from sinklab.model.block import Attention, LayerInputs
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

LENGTH, VOCABULARY, HEADS, WIDTH = 9, 31, 4, 32
POSITIONS = ("none", "absolute", "learnable", "relative", "t5", "alibi", "rotary")
TURNED_BEFORE_PHI = ("elu_kernel", "elu_kernel_normalised", "mlp", "mlp_normalised")
WITHOUT_QUERY = ("none", "sink_token", "v_biases", "sink_logit", "off_by_one")


def model_of(operation: str, bias: str = "none", **changes: Any) -> Transformer | None:
    """A float64 model whose weights are large enough for attention to matter; None where the recipe refuses it."""
    attention = {"operation": OPERATIONS[operation], "bias": BIASES[bias], **changes.pop("attention", {})}
    sizes = {"layers": 2, "width": WIDTH, "heads": HEADS, "kv_heads": 2, "ffn_width": 48, "vocab_size": VOCABULARY}
    try:
        config = ModelConfig.model_validate({**sizes, "context": 24, "attention": attention, **changes})
    except ValidationError:
        return None
    model = Transformer(config, seed=5).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(40 if ".bias." in name or name == "sink_token" else 2)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@contextmanager
def shifted(model: Transformer, by: int) -> Iterator[None]:
    """All rotary positions `by` higher, in float64."""

    def places_of(_: nn.Module, args: tuple[Tensor, LayerInputs]) -> tuple[Tensor, LayerInputs]:
        x_BLE, inputs = args
        assert inputs.rotary is not None
        pairs = inputs.rotary[0].shape[1]
        position = torch.arange(x_BLE.shape[1], dtype=torch.float64) - model.leading + by
        angle = position[:, None] * 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        return x_BLE, replace(inputs, rotary=(angle.cos(), angle.sin()))

    handles = [block.register_forward_pre_hook(places_of) for block in model.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def effect_of_a_shift(model: Transformer) -> float:
    """The largest change of a logit when all positions grow by 100, relative to the largest logit."""
    with torch.no_grad():
        with shifted(model, 0):
            here = model(tokens())
        with shifted(model, 100):
            there = model(tokens())
    return float((there - here).abs().max() / here.abs().max())


ROTATED = itertools.product((name for name in OPERATIONS if name not in TURNED_BEFORE_PHI), (False, True))


@pytest.mark.parametrize(("operation", "qk_norm"), one_in(3, ROTATED))
def test_under_rotary_only_distances_matter(operation: str, qk_norm: bool) -> None:
    tried = 0
    for bias in WITHOUT_QUERY:
        model = model_of(operation, bias, norm={"qk_norm": qk_norm})
        if model is not None:
            tried += 1
            assert effect_of_a_shift(model) < 1e-9, bias
    assert tried >= 3


@pytest.mark.parametrize(
    ("operation", "bias"),
    [*((name, "none") for name in TURNED_BEFORE_PHI), ("softmax", "k_biases"), ("differential", "kv_biases")],
)
def test_operations_without_scores_depend_on_absolute_positions(operation: str, bias: str) -> None:
    """A feature map reads the rotated query, and a bias key has no position."""
    model = model_of(operation, bias)
    assert model is not None
    assert effect_of_a_shift(model) > 1e-3


@pytest.mark.parametrize("operation", ["softmax", "differential"])
def test_each_query_and_key_is_normed_and_rotated_over_its_own_width(operation: str) -> None:
    model = model_of(operation, norm={"qk_norm": True})
    assert model is not None
    layer = model.blocks[0].attention
    assert isinstance(layer, Attention)
    assert layer.qkv is not None
    x_BLE = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    width = 4 if operation == "differential" else 8
    angle = torch.arange(LENGTH)[:, None] * 10000.0 ** -(torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    with torch.no_grad():
        q_BHLD, *_ = layer.inputs(x_BLE, LayerInputs((angle.cos(), angle.sin())))
        raw = (x_BLE @ layer.qkv.weight[:WIDTH].T).view(2, LENGTH, WIDTH // width, width)
        unit = raw / (raw.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        pairs = torch.complex(unit[..., : width // 2], unit[..., width // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        expected = torch.cat((pairs.real, pairs.imag), -1).view(2, LENGTH, HEADS, 8).transpose(1, 2)
    close(q_BHLD, expected, 1e-9)


@pytest.mark.parametrize("operation", ["softmax", "differential", "mlp", "identity"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_sink_token_leaves_queries_keys_and_values_of_real_tokens_unchanged(position: str, operation: str) -> None:
    plain, led = (model_of(operation, bias, position={"kind": position}) for bias in ("none", "sink_token"))
    if plain is None or led is None:
        assert position in ("relative", "t5", "alibi")
        return
    first, second = (inputs_of_the_first_layer(model) for model in (plain, led))
    for without, behind in zip(first, second, strict=True):
        close(behind[:, :, 1:], without, 1e-12)


def inputs_of_the_first_layer(model: Transformer) -> tuple[Tensor, ...]:
    """Queries, keys and values as the first attention core receives them."""
    seen: list[tuple[Tensor, ...]] = []
    core = model.get_submodule("blocks.0.attention.core")
    handle = core.register_forward_pre_hook(lambda _, args: seen.append(args[:3]))
    with torch.no_grad():
        model(tokens())
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(("operation", "bias"), one_in(11, itertools.product(KERNELS, BIASES)))
def test_kernels_under_a_prefix_train_and_measure_as_on_explicit_matrices(operation: str, bias: str) -> None:
    """Prefixes of one token, of some tokens, of the whole sequence, and longer than the sequence."""
    for length in (1, 4, LENGTH, LENGTH + 5):
        results = []
        for backend in ("eager", "auto"):
            mask = {"kind": "prefix", "length": length}
            model = model_of(operation, bias, attention={"mask": mask, "backend": backend})
            if model is None:  # refused by the recipe, as without a prefix
                added = bias in ("off_by_one", "sink_logit", "k_biases_start", "kv_biases_start")
                assert added or (bias.startswith("k_biases") and not operation.endswith("_normalised"))
                return
            logits = model(tokens())
            gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
            measured = torch.from_numpy(measure(model, tokens(), loss=False).importance)
            results.append((logits, measured, *gradients))
        for explicit, ours in zip(*results, strict=True):
            close(ours, explicit, 1e-9)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_finite_gradients_under_every_mask(operation: str) -> None:
    masks = [{"kind": "window", "width": 3}, {"kind": "prefix", "length": 3}, {"kind": "document", "eos_id": 3}]
    for bias, mask in itertools.product(("none", "sink_token"), masks):
        model = model_of(operation, bias, attention={"mask": mask})
        assert model is not None
        model.loss(tokens()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), (bias, mask)


def test_differential_attention_weighs_its_second_softmax_by_depth() -> None:
    by_depth, constant = ({"kind": "differential"}, {"kind": "differential", "lambda_init": 0.5})
    for operation, expected in ((by_depth, [0.2, 0.35551, 0.47071, 0.55606]), (constant, [0.5] * 4)):
        config = {"layers": 4, "width": 32, "heads": 4, "vocab_size": 9, "attention": {"operation": operation}}
        model = Transformer(ModelConfig.model_validate(config))
        strengths = [module.lambda_init for module in model.modules() if isinstance(module, Lambda)]
        assert strengths == pytest.approx(expected, abs=1e-5)
