"""The model against an independent one written from the documentation, in float64, relative to the largest value."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from independent_model import Result, loss_of, run
from independent_recipes import (
    DELTA,
    GROUPED_DELTA,
    GROUPED_KIMI,
    KERNELS,
    KIMI,
    cell_is_legal,
    covering_cells,
    covering_recipe,
    random_recipe,
)
from sampling import one_in
from torch import Tensor

from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.query_blocks import CHUNK
from sinklab.measuring.driver import measure as measure_tokens
from sinklab.measuring.options import Options
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import NativeAdapter
from sinklab.survey.api import measure
from sinklab.train.recipe import Recipe, build_recipe

CLOSE = 1e-8
FLOAT32 = 2**-23
"""Numbers that a measurement keeps in float32 were rounded to it once."""
VANISHING = 1e-4
"""Gradients below this share of the model's largest gradient are compared absolutely, as they may be rounding alone."""

CELLS = covering_cells()
LEGAL = [name for name, cell in CELLS.items() if cell_is_legal(cell)]
CHUNKED = [name for name in LEGAL if "mixer" in CELLS[name] or CELLS[name].get("operation") in KERNELS]
FEW = 20
"""Random recipes that are drawn each time; the rest are among the slow tests."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because threads that share matrices of 20 x 20 mostly wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(FEW))
def test_a_random_recipe_computes_its_documented_formula(seed: int) -> None:
    compare(random_recipe(seed))


@pytest.mark.parametrize("seed", range(FEW // 2))
def test_a_random_recipe_whose_layers_differ_computes_its_documented_formula(seed: int) -> None:
    compare(random_recipe(seed, pattern=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW // 2, 500))
def test_more_random_recipes_whose_layers_differ_compute_their_documented_formulas(seed: int) -> None:
    compare(random_recipe(seed, pattern=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, 1000))
def test_more_random_recipes_compute_their_documented_formulas(seed: int) -> None:
    compare(random_recipe(seed))


@pytest.mark.parametrize("name", one_in(12, LEGAL))
def test_a_chosen_recipe_computes_its_documented_formula(name: str) -> None:
    recipe = covering_recipe(name)
    assert recipe is not None
    compare(recipe)


@pytest.mark.parametrize("name", one_in(10, CHUNKED))
def test_chunked_computations_agree_over_several_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 positions, so that the contexts of 12 to 20 have three or four, most with an incomplete last one."""
    for module in ("model.mixer", "attention.operations.kernel"):
        monkeypatch.setattr(f"sinklab.{module}.CHUNK", 5)
    recipe = covering_recipe(name)
    assert recipe is not None
    compare(recipe)


@pytest.mark.parametrize(
    "mixer", [DELTA, GROUPED_DELTA, KIMI, GROUPED_KIMI], ids=["delta", "grouped", "kimi", "grouped kimi"]
)
def test_linear_layers_compute_their_documented_formula_beyond_a_chunk(mixer: dict[str, Any]) -> None:
    sizes = {"layers": 2, "width": 16, "heads": 2, "ffn_width": 12, "vocab_size": 20, "context": CHUNK + 9}
    compare(build_recipe({"model": {**sizes, "mixer": mixer}, "metric": {"length": CHUNK + 9}}))


@pytest.mark.parametrize("name", [name for name in CELLS if name not in LEGAL])
def test_a_bias_without_effect_or_without_scores_is_refused(name: str) -> None:
    assert covering_recipe(name) is None


def compare(recipe: Recipe) -> None:
    """Compare logits, loss, gradients, attention of every query and key, importance, and a measurement.

    The logits are also compared for sequences read step by step and, under a prefix mask, with right padding.
    """
    config: Any = recipe.model.model_dump(mode="json")
    ours, tokens = _far_from_its_start(recipe)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in ours.named_parameters()}
    read = tokens[:, :-1]
    theirs = run(config, weights, read)
    _close("logits", ours(read), theirs.logits)

    loss, expected = ours.loss(tokens), loss_of(config, theirs.logits, tokens)
    _close("loss", loss, expected)
    loss.backward()
    expected.backward()
    largest = max(_gradient(weight).abs().max().item() for weight in weights.values())
    floor = largest * VANISHING
    for name, parameter in ours.named_parameters():
        _close(f"gradient of {name}", _gradient(parameter), _gradient(weights[name]), floor=floor)

    _check_attention(ours, read, theirs)
    _check_continued(ours, read, theirs.logits, recipe.seed)
    if recipe.model.shared_tokens > 1:
        _check_padded(ours, config, weights, read, recipe.seed)
    predicted = read.shape[1] > recipe.model.shared_tokens
    _check_measurement(ours, read, theirs, _loss_without_gradient(config, weights, read) if predicted else None)


def _loss_without_gradient(config: Any, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return loss_of(config, run(config, weights, tokens[:, :-1]).logits, tokens)


def _check_continued(model: Transformer, tokens: Tensor, logits: Tensor, seed: int) -> None:
    """Read a piece, then single tokens with the cache; logits within a prefix need all of it."""
    first, past = 1 + seed % (tokens.shape[1] - 1), model.new_past()
    pieces = (tokens[:, :first], *tokens[:, first:].split(1, dim=1))
    with torch.no_grad():
        ours = torch.cat([model.head(model.hidden(piece, past)) for piece in pieces], dim=1)
    seen = max(first, model.config.shared_tokens) - 1
    if seen < tokens.shape[1]:
        _close("logits, continued", ours[:, seen:], logits[:, seen:])


def _check_padded(model: Transformer, config: Any, weights: dict[str, Tensor], tokens: Tensor, seed: int) -> None:
    """Compare rows of several lengths, padded with other tokens; none ends within its prefix."""
    B, T = tokens.shape
    shortest = min(model.config.shared_tokens, T)
    lengths = [shortest + (seed + 5 * b) % (T - shortest + 1) for b in range(B)]
    padded = tokens.clone()
    for b, length in enumerate(lengths):
        padded[b, length:] = (tokens[b, length:] + 1 + seed) % config["vocab_size"]
    with torch.no_grad():
        ours = model(padded)
        for b, length in enumerate(lengths):
            alone = run(config, weights, tokens[b : b + 1, :length]).logits
            _close("logits before padding", ours[b : b + 1, :length], alone)


def _far_from_its_start(recipe: Recipe) -> tuple[Transformer, Tensor]:
    """A float64 model with every parameter perturbed, so that each has an effect, and tokens with one more target."""
    source = torch.Generator().manual_seed(recipe.seed)
    model = Transformer(recipe.model, recipe.seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.35 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
    length = max(recipe.model.context - recipe.seed % 3, recipe.model.shared_tokens)
    assert recipe.model.vocab_size is not None
    return model, torch.randint(recipe.model.vocab_size, (3, length + 1), generator=source)


def _check_attention(model: Transformer, tokens: Tensor, theirs: Result) -> None:
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    layers = iter(range(len(cores)))

    def check(core: Any, given: Any) -> None:
        q, k, v, *documents = given
        layer = next(layers)
        ours = core.layer_call(q, k, v, *documents).importance()
        _close("importance", ours.positions_BHT, theirs.importance[layer])
        _close_or_absent("share of the bias", ours.bias_BH, theirs.bias_share[layer])
        _close_or_absent("row sums", ours.row_sums_BH, theirs.row_sums[layer])
        shares = torch.zeros_like(theirs.shares[layer])
        for rows in core.layer_call(q, k, v, *documents).rows():
            here = slice(rows.block.start, rows.block.stop)
            shares[:, :, here, rows.block.low : rows.block.high] = rows.weights_BHQS
            if rows.bias_BHQ is not None:
                shares[:, :, here, -1] = rows.bias_BHQ
        _close("attention", shares, theirs.shares[layer])

    hooks = [core.register_forward_pre_hook(check) for core in cores]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    assert next(layers, None) is None


def _check_measurement(model: Transformer, tokens: Tensor, theirs: Result, loss: Tensor | None) -> None:
    got = measure(model, tokens, batch_size=2)
    assert got.proxy == (theirs.row_sums[0] is not None)
    means = {"importance": theirs.importance, "importance_bias": theirs.bias_share, "row_sums": theirs.row_sums}
    for name, by_layer in means.items():
        measured, found = getattr(got, name), [one for one in by_layer if one is not None]
        assert (measured is None) == (not found), name
        if measured is not None:
            known = ~np.isnan(measured.reshape(len(measured), -1)).any(1)  # layers without a bias have NaN
            assert known.tolist() == [one is not None for one in by_layer], name
            _close(f"measured {name}", torch.tensor(measured[known]).double(), torch.stack(found).mean(1), FLOAT32)
    _check_joint_statistics(model, tokens, theirs, got.eps)
    assert (got.loss is None) == (loss is None)
    if loss is not None:
        _close("measured loss", torch.tensor(got.loss, dtype=torch.float64), loss)


def _check_joint_statistics(model: Transformer, tokens: Tensor, theirs: Result, eps: float) -> None:
    got = measure_tokens(NativeAdapter(model), tokens, Options(eps=(eps,), dormant=True))
    least, most = torch.stack(theirs.dormant, 1).mean(2)
    dormant = torch.tensor(got.dormant).double()
    assert ((dormant >= least - FLOAT32) & (dormant <= most + FLOAT32)).all()
    shares = [one for one in theirs.bias_share if one is not None]
    assert (got.sink_rate_first_or_bias is None) == (len(shares) < len(theirs.bias_share))
    if got.sink_rate_first_or_bias is not None:
        joint = torch.stack(theirs.importance)[..., 0] + torch.stack(shares)
        least, most = (100 * (joint > eps + rounding).double().mean().item() for rounding in (FLOAT32, -FLOAT32))
        assert least - 1e-4 <= got.sink_rate_first_or_bias <= most + 1e-4


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _close_or_absent(what: str, ours: Tensor | None, theirs: Tensor | None) -> None:
    assert (ours is None) == (theirs is None), what
    if ours is not None and theirs is not None:
        _close(what, ours, theirs)


def _close(what: str, ours: Tensor, theirs: Tensor, bound: float = CLOSE, floor: float = 0.0) -> None:
    assert ours.shape == theirs.shape, what
    assert torch.isfinite(theirs).all(), what
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert difference <= bound * max(largest, floor), f"{what}: {difference:.2e} apart, the largest is {largest:.2e}"
