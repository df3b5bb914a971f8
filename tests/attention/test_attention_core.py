"""Operations, biases, masks and positions compute their papers' formulas, and their importance, without the matrix."""

import ast
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import independent_attention
import independent_core
import pytest
import torch
from attention_cases import (
    BIASES,
    KERNELS,
    MASKS,
    OPERATIONS,
    POSITIONS,
    PREFIXES,
    D,
    G,
    H,
    T,
    arguments,
    assert_core_equals_formula,
    config_of,
    core_of,
    legal,
    qkv,
)
from independent_core import formula
from sampling import one_in
from torch import Tensor

from sinklab.attention import masks
from sinklab.attention.config import AttentionConfig, kinds_of
from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.primitive import chunked_attend

BACKENDS = ("auto", "chunked", "eager")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries and chunks of a few positions, so that short sequences cross their borders."""
    monkeypatch.setattr("sinklab.attention.query_blocks.SMALLEST_BLOCK", 4)
    monkeypatch.setattr("sinklab.attention.query_blocks.BLOCK_ELEMENTS", 1)
    monkeypatch.setattr("sinklab.attention.operations.kernel.CHUNK", 4)
    monkeypatch.setattr("sinklab.attention.masks.COUNTED_ROWS", 5)


def drawn() -> Iterator[tuple[str, str, str, float | None, str, str]]:
    """Legal combinations: four of each operation, every pair of a bias and a mask, six of each kernel with a prefix."""
    draw = random.Random(1)
    options = [list(names) for names in (OPERATIONS, BIASES, MASKS, (None, None, 3.0), POSITIONS, BACKENDS)]
    wanted = [([operation], *options[1:]) for operation in OPERATIONS for _ in range(4)]
    wanted += [(options[0], [bias], [mask], *options[3:]) for bias in BIASES for mask in MASKS]
    wanted += [([kernel], options[1], PREFIXES, *options[3:]) for kernel in KERNELS for _ in range(6)]
    for names in wanted:
        case: list[Any] = [draw.choice(of) for of in names]
        while not legal(*case[:-1]):
            case = [draw.choice(of) for of in names]
        operation, bias, mask, softcap, position, backend = case
        yield operation, bias, mask, softcap, position, backend


@pytest.mark.parametrize(("operation", "bias", "mask", "softcap", "position", "backend"), drawn())
def test_any_legal_combination_equals_its_formula(
    operation: str, bias: str, mask: str, softcap: float | None, position: str, backend: str
) -> None:
    assert_core_equals_formula(core_of(config_of(operation, bias, mask, softcap, backend), position))


@pytest.mark.parametrize("operation", one_in(3, OPERATIONS))
def test_gradients_of_the_operations_pass_gradcheck(operation: str) -> None:
    bias = "kv_biases" if legal(operation, "kv_biases", "causal", None, "none") else "none"
    core = core_of(config_of(operation, bias, "causal", backend="chunked"))
    q, k, v = (x[:1, :, :3].detach().requires_grad_() for x in qkv(3, core=core))
    gates = [x[:1, :3] for x in arguments(core) if x is not None]

    def output(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return core(q, k, v, None, *gates)

    assert torch.autograd.gradcheck(output, (q, k, v, *gates), fast_mode=True)


TWO_PASSES = {
    *("clipped_softmax", "softpick", "elastic_softmax", "entmax15"),
    *("differential", "differential_v2", "threshold_differential"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_scores_are_computed_twice_only_for_a_normaliser_or_a_second_softmax(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return chunked_attend(*arguments)

    monkeypatch.setattr("sinklab.attention.primitive.chunked_attend", counted)
    core = core_of(config_of(operation, "none", "causal", backend="chunked"))
    core(*qkv(core=core), *arguments(core))
    twice = core.operation.kind in TWO_PASSES or getattr(core.operation, "p", 1) != 1
    otherwise = operation in KERNELS or core.operation.sequential
    assert len(calls) == (0 if otherwise else 1 + twice)


def test_every_operation_of_the_config_is_compared_with_a_formula() -> None:
    kinds = {kind.model_fields["kind"].default for kind in kinds_of("operation")}
    assert kinds == {values["kind"] for values in OPERATIONS.values()}


def test_the_reference_formulas_import_nothing_from_sinklab() -> None:
    for module in (independent_core, independent_attention):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        froms = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in froms + names if name.startswith("sinklab")]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_document_among_others_has_the_output_of_the_document_alone(operation: str) -> None:
    core = core_of(config_of(operation, "none", "document"))
    alone = core_of(config_of(operation, "none", "causal"))
    q, k, v = (x.detach() for x in qkv(core=core))
    together = core(q, k, v, *arguments(core))
    beside = (None if x is None else x[:1, 4:9] for x in arguments(alone))
    expected = alone(*(x[:1, :, 4:9] for x in (q, k, v)), *beside)
    torch.testing.assert_close(together[:1, :, 4:9], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mask_of", [masks.Document, masks.Dense, lambda tensor: masks.Padded(masks.CAUSAL, tensor)])
def test_masks_are_equal_if_they_have_the_same_tensor(mask_of: Callable[[Tensor], masks.Mask]) -> None:
    tensor = torch.ones(2, dtype=torch.int64)
    assert len({mask_of(tensor), mask_of(tensor)}) == 1
    assert mask_of(tensor) != mask_of(tensor.clone())


def test_the_document_mask_is_refused_without_document_numbers() -> None:
    with pytest.raises(ValueError, match="pass documents_BL"):
        core_of(config_of("softmax", "none", "document"))(*qkv())


@pytest.mark.parametrize("mask", MASKS)
def test_the_sink_token_sees_itself_alone_and_is_seen_by_every_query(mask: str) -> None:
    core = core_of(config_of("softmax", "sink_token", mask))
    q, k, _ = (x.detach() for x in qkv())
    matrix = torch.zeros(2, H, T, T, dtype=torch.float64)
    for rows in core.layer_call(q, k, k, *arguments(core)).rows():
        matrix[:, :, rows.block.start : rows.block.stop, rows.block.low : rows.block.high] = rows.weights_BHQS
    assert (matrix[:, :, 0, 0] == 1).all()
    assert (matrix[..., 0] > 0).all()


def test_importance_of_the_first_key_counts_its_own_query() -> None:
    core = core_of(config_of("softmax", "none", "causal"))
    q, k, _ = qkv()
    found = core.layer_call(*(x[:, :, :1].detach() for x in (q, k, k))).importance()
    torch.testing.assert_close(found.positions_BHT, torch.ones(2, H, 1, dtype=torch.float64))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_proxy_is_set_exactly_if_scores_do_not_sum_to_one(operation: str) -> None:
    core = core_of(config_of(operation, "none", "causal"))
    sums_BHT = formula(core, *qkv(core=core), *arguments(core))[1].sum(-1)
    assert core.proxy == bool((sums_BHT - 1).abs().max() > 1e-9)


@pytest.mark.parametrize(("operation", "total"), [("sigmoid", 1), ("elu1", 1), ("relu", 0), ("softpick", 0)])
def test_proxy_scores_of_a_row_that_is_zero_in_float32_are_those_of_its_logarithms(operation: str, total: int) -> None:
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    q[..., 0], k[..., 0] = 1.0, torch.tensor([-400.0, -800.0, -1200.0])
    core = AttentionCore(AttentionConfig.model_validate({"operation": {"kind": operation}}), 1, 4)
    importance = core.layer_call(q, k, k).importance()
    assert importance.row_sums_BH is not None
    assert importance.row_sums_BH.item() == 0
    assert not core(q, k, torch.ones(1, 1, 3, 4)).any()
    assert all((rows.weights_BHQS.sum(-1) == total).all() for rows in core.layer_call(q, k, k).rows())


def test_a_strong_key_bias_takes_the_attention() -> None:
    core = core_of(config_of("softmax", "k_biases", "causal"))
    q = torch.ones(1, H, T, D, dtype=torch.float64)
    with torch.no_grad():
        assert core.bias.key is not None
        core.bias.key.fill_(20.0)
    zeros = torch.zeros(1, G, T, D, dtype=torch.float64)
    found = core.layer_call(q, zeros, zeros).importance()
    assert found.bias_BH is not None
    assert (found.bias_BH > 0.99).all()
    assert (found.positions_BHT < 0.01).all()


@pytest.mark.parametrize(
    "operation",
    ["softpick", "softmax_p_2", "clipped_softmax", "elastic_softmax", "sigmoid", "relu_normalised", "entmax15"],
)
def test_scores_of_any_size_stay_finite_in_single_precision(operation: str) -> None:
    core = core_of(config_of(operation, "none", "causal", backend="chunked"), dtype=torch.float32)
    q, k, v = qkv(dtype=torch.float32)
    for size in (0.0, 1e-4, 300.0):
        out = core(q * size, k, v, *arguments(core))
        assert out.isfinite().all()
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(g.isfinite().all() for g in gradients)


def test_softpick_of_large_scores_is_softmax() -> None:
    q, k, v = (x.detach() for x in qkv())
    picked, soft = (core_of(config_of(name, "none", "causal")) for name in ("softpick", "softmax"))
    ones = torch.ones_like(k)
    torch.testing.assert_close(picked(900 + q.abs(), ones, v), soft(900 + q.abs(), ones, v), rtol=0, atol=1e-9)
