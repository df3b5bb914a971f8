"""FlexAttention computes the score and mask closures as eager attention does; on CUDA its kernel trains with them."""

import itertools

import pytest
import torch
from attention_cases import (
    TAKING_BIAS_KEYS,
    B,
    G,
    H,
    Table,
    arguments,
    config_of,
    core_of,
    documents,
    qkv,
)
from sampling import one_in

from sinklab.attention import masks
from sinklab.attention import primitive as flex_backend
from sinklab.attention.importance import flex_column_sums, score_rows, sum_rows
from sinklab.attention.primitive import attend
from sinklab.attention.query_blocks import ScoreMatrix
from sinklab.attention.scores import (
    Score,
    compose,
    log_elu_plus_one,
    log_magnitude,
    log_relu,
    log_sigmoid,
    softcap,
    times,
)
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

MASKS = {
    "causal": masks.CAUSAL,
    "window": masks.Window(5),
    "prefix": masks.Prefix(4),
    "document": masks.Document(documents()),
    "sink_token_prefix": masks.Leading(masks.Prefix(3)),
    "sink_token_document": masks.Leading(masks.Document(documents()[:, 1:])),
}


def scores() -> dict[str, Score | None]:
    """Score functions of each form: plain, composed, and reading tensors."""
    table = Table().double()
    torch.nn.init.normal_(table.table, generator=torch.Generator().manual_seed(1))
    return {
        "none": None,
        "sigmoid": log_sigmoid(),
        "elu1_squared": compose(log_elu_plus_one(), times(2)),
        "relu": log_relu(),
        "magnitude": log_magnitude(),
        "softcap_table": compose(softcap(2.0), table.score()),
    }


@pytest.mark.parametrize(("score", "mask"), one_in(5, itertools.product(scores(), MASKS)))
def test_flex_forward_equals_eager(score: str, mask: str) -> None:
    q, k, v = (x.detach().float() for x in qkv())
    function = scores()[score]
    with torch.no_grad():
        flex, eager = (attend(ScoreMatrix(q, k, MASKS[mask], function), v, backend) for backend in ("flex", "eager"))
    for ours, reference in zip(flex, eager, strict=True):
        torch.testing.assert_close(ours, reference.to(ours.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("score", "mask"), one_in(5, itertools.product(scores(), MASKS)))
def test_padding_to_whole_blocks_changes_nothing(score: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach().float() for x in qkv())
    matrix = ScoreMatrix(q[:, :, 1:], k, MASKS[mask], scores()[score])
    monkeypatch.setattr(flex_backend, "_needs_padding", lambda *_: True)
    with torch.no_grad():
        padded, eager = (attend(matrix, v, backend) for backend in ("flex", "eager"))
    for ours, reference in zip(padded, eager, strict=True):
        torch.testing.assert_close(ours, reference.to(ours.dtype), rtol=1e-4, atol=1e-4)


SHORT = torch.arange(70) < torch.tensor([[70], [41]])  # the second sequence has padding on the right
SUMMED: dict[str, Score | None] = {"none": None, "sigmoid": log_sigmoid(), "softcap": softcap(2.0), "relu": log_relu()}


@pytest.mark.parametrize("mask", [*MASKS, "leading", "left_padding"])
@pytest.mark.parametrize("score", SUMMED)
@pytest.mark.parametrize("bias", [False, True])
def test_column_sums_by_flex_are_those_of_the_rows(mask: str, score: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 70, 16, generator=generator) for heads in (4, 2))
    others = {
        "document": masks.Document(torch.arange(70).expand(2, -1) // 13),
        "sink_token_document": masks.Leading(masks.Document(torch.arange(69).expand(2, -1) // 13)),
        "leading": masks.Leading(masks.CAUSAL, 3),
        "left_padding": masks.Padded(masks.Window(9), torch.tensor([0, 29])),
    }
    matrix = ScoreMatrix(q, k, {**MASKS, **others}[mask], SUMMED[score])
    logits = torch.randn(1, 4, 1, generator=generator) if bias else None
    counted = SHORT.flip(1) if mask == "left_padding" else SHORT
    expected = sum_rows(score_rows(matrix, logits), q, 70, matrix.mask, counted)
    found = flex_column_sums(matrix, logits, counted)
    for name in ("keys_BHS", "bias_BH", "earlier_BHS"):
        ours, reference = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (reference is None)
        if ours is not None:
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6 * float(reference.max()))


def test_column_sums_by_flex_of_the_last_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 20, 16, generator=generator), torch.randn(1, 2, 70, 16, generator=generator)
    matrix = ScoreMatrix(q, k, masks.Window(40))
    expected = sum_rows(score_rows(matrix), q, 70, matrix.mask)
    torch.testing.assert_close(flex_column_sums(matrix).keys_BHS, expected.keys_BHS, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operation", one_in(4, TAKING_BIAS_KEYS))
def test_every_operation_runs_on_flex(operation: str) -> None:
    flex, chunked = (
        core_of(config_of(operation, "kv_biases", "document", backend=backend), dtype=torch.float32)
        for backend in ("flex", "chunked")
    )
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32, core=flex))
    with torch.no_grad():
        out, expected = (core(q, k, v, *arguments(core)) for core in (flex, chunked))
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_the_blocks_of_a_document_mask_are_found_once_for_all_layers() -> None:
    sizes = {"layers": 3, "width": 16, "heads": 2, "ffn_width": 16, "context": 8, "vocab_size": 9}
    attention = {"mask": {"kind": "document", "eos_id": 3}, "backend": "flex"}
    model = Transformer(build_recipe({"model": {**sizes, "attention": attention}, "metric": {"length": 8}}).model)
    before = flex_backend._block_mask.cache_info().misses
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3, 4, 5, 3, 1, 1], [3, 1, 2, 2, 2, 2, 3, 1]]))
    assert flex_backend._block_mask.cache_info().misses == before + 1


def test_flex_says_that_it_does_not_train_on_a_cpu() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="trains on CUDA only"):
        attend(ScoreMatrix(q, k), v, "flex")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's compiled kernel and its gradients need CUDA")
@pytest.mark.parametrize("operation", TAKING_BIAS_KEYS)
@pytest.mark.parametrize("length", [256, 201])  # 201 is no whole number of blocks
def test_flex_trains_on_cuda(operation: str, length: int) -> None:
    width = 64
    generator = torch.Generator().manual_seed(0)
    queries = config_of(operation, "none", "causal").operation.queries_per_head
    shapes = ((H, queries * width), (G, width), (G, width))
    double = [torch.randn(B, h, length, d, generator=generator, dtype=torch.float64) for h, d in shapes]
    results = []
    for backend, dtype, device in (("flex", torch.float32, "cuda"), ("chunked", torch.float64, "cpu")):
        config = config_of(operation, "none", "causal", backend=backend)
        core = core_of(config, dtype=dtype, head_width=width).to(device)
        inputs = [x.to(device, dtype).requires_grad_() for x in double]
        kept = torch.linspace(0, -20, length, dtype=dtype, device=device)[None, :, None].expand(B, -1, H)
        out = core(*inputs, *((None, kept) if core.operation.forgets or core.operation.weighs else ()))
        results.append([out, *torch.autograd.grad(out.square().mean(), inputs)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu().double(), reference, rtol=1e-2, atol=1e-3)
