"""1.5-entmax: the solution of its optimisation problem, the gradient of its authors' code, shares of exactly zero."""

import math
import shutil

import pytest
import torch
from attention_cases import G, H, T, config_of, core_of, qkv
from closeness import assert_close
from torch import Tensor

from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.operations import threshold

EDGES = {
    "equal scores": torch.zeros(T),
    "one key far above the others": torch.tensor([40.0] + [0.0] * (T - 1)),
    "two keys exactly at the edge": torch.tensor([2.0, 0.0, 0.0] + [-9.0] * (T - 3)),
    "all just above the edge": torch.tensor([2.0] + [1e-3] * (T - 1)),
    "scores of thousands": torch.linspace(-3000, 3000, T),
}


class Published(torch.autograd.Function):
    """`Entmax15Function` of github.com/deep-spin/entmax, entmax/activations.py, written anew over the last axis."""

    @staticmethod
    def forward(ctx, z):  # type: ignore[no-untyped-def]
        x = (z - z.max(-1, keepdim=True).values) / 2
        ordered = x.sort(-1, descending=True).values
        rho = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        mean, square = ordered.cumsum(-1) / rho, ordered.square().cumsum(-1) / rho
        tau = mean - ((1 - rho * (square - mean**2)) / rho).clamp(min=0).sqrt()
        support = (tau <= ordered).sum(-1, keepdim=True)
        shares = (x - tau.gather(-1, support - 1)).clamp(min=0) ** 2
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx, *slopes):  # type: ignore[no-untyped-def]
        root = ctx.saved_tensors[0].sqrt()
        dz = slopes[0] * root
        return dz - dz.sum(-1, keepdim=True) / root.sum(-1, keepdim=True) * root


def shares(core: AttentionCore, q: Tensor, k: Tensor) -> Tensor:
    """A (B, H, T, T), from the outputs for one-hot values."""
    names = torch.eye(k.shape[2], dtype=k.dtype).expand(len(k), k.shape[1], -1, -1)
    return core(q, k, names)


def scores_of(z_T: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head of width 6 of which every visible key s has the score z_s."""
    q, k = torch.zeros(1, H, T, 6, dtype=dtype), torch.zeros(1, G, T, 6, dtype=dtype)
    q[..., 0], k[..., 0] = math.sqrt(6), z_T.to(dtype)
    return q, k


@pytest.mark.parametrize("backend", ["chunked", "eager"])
def test_shares_and_gradients_are_those_of_the_published_code(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklab.attention.query_blocks.SMALLEST_BLOCK", 4)
    monkeypatch.setattr("sinklab.attention.query_blocks.BLOCK_ELEMENTS", 1)
    core = core_of(config_of("entmax15", "none", "causal", backend=backend))
    q, k, v = qkv()
    z = q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = Published.apply(z.masked_fill(hidden, -1e4)) @ v.repeat_interleave(H // G, 1)  # type: ignore[no-untyped-call]
    out = core(q, k, v)
    assert_close(out, expected, 1e-12)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))
    for mine, published in zip(ours, theirs, strict=True):
        assert_close(mine, published, 1e-11)


@pytest.mark.parametrize("edge", EDGES)
def test_every_row_is_the_optimum(edge: str) -> None:
    """Optimum of p.z + 4/3 sum (p - p^1.5): 2 tau = z - 2 sqrt(p) where p > 0, and 2 tau >= z elsewhere."""
    core, z = core_of(config_of("entmax15", "none", "causal")), EDGES[edge].double()
    for t, row in enumerate(shares(core, *scores_of(z))[0, 0]):
        p = row[: t + 1]
        threshold = (z[: t + 1] - 2 * p.sqrt())[p > 0]
        assert not row[t + 1 :].any()
        assert p.sum().item() == pytest.approx(1, abs=1e-12)
        assert_close(threshold, threshold[:1].expand_as(threshold), 1e-7)  # the root of a share near 0 is inexact
        assert (z[: t + 1][p == 0] <= threshold.max() + 1e-7).all()


def test_a_score_2_below_the_largest_has_no_share_at_all() -> None:
    core = core_of(config_of("entmax15", "none", "causal", backend="chunked"), dtype=torch.float32)
    row = shares(core, *scores_of(torch.tensor([2.001] + [0.0] * (T - 1)), torch.float32))[0, 0, -1]
    assert row[0] == 1
    assert not row[1:].any()


def test_a_sink_logit_takes_its_share_like_a_key() -> None:
    core = core_of(config_of("entmax15", "off_by_one", "causal"))
    q, k, _ = (x.detach() for x in qkv())
    z = q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(q.shape[-1])
    z = torch.cat([z.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e4), torch.zeros_like(z[..., :1])], -1)
    assert_close(shares(core, q, k), Published.apply(z)[..., :T], 1e-12)  # type: ignore[no-untyped-call]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_newton_steps_give_the_same_thresholds_and_compile_once_for_all_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for queries, keys in ((4, 9), (5, 13), (3, 40)):
        z = torch.randn(2, 3, queries, keys, generator=generator) * 3
        z[..., 0, 1:] = -torch.inf  # a row with one key
        x = (z - z.amax(-1, keepdim=True)) / 2
        for ours, eager in zip(threshold._compiled_rooted()(x, False), threshold._rooted(x, True), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
