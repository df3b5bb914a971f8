"""Every operation, bias, mask, softcap and position of the attention side, and cores made of them, for the tests."""

from typing import Any

import torch
from independent_core import formula
from torch import Tensor, nn

from sinklab.attention.config import AttentionConfig, examples_of
from sinklab.attention.config import Choice as ChoiceName
from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.scores import Score

Choice = dict[str, Any]
"""A kind and its values, as a recipe has them."""


def declared(choice: ChoiceName) -> dict[str, Choice]:
    """Declared examples of the kinds of a choice, by name."""
    return {name: dict(example.values) for name, example in examples_of(choice).items()}


# The baseline of each choice, the declared examples of its kinds, and extreme values of the formulas.
OPERATIONS: dict[str, Choice] = {
    "softmax": {"kind": "softmax"},
    **declared("operation"),
    "softmax_p_half_sums_to_2": {"kind": "softmax", "p": 0.5, "alpha": 2},
    "relu_p_2": {"kind": "relu", "normalised": True, "p": 2},
    "clipped_at_both_ends": {"kind": "clipped_softmax", "zeta": 1.3, "gamma": -0.05},
}
BIASES: dict[str, Choice] = {
    "none": {"kind": "none"},
    **declared("bias"),
    "k_biases_two_dims": {"kind": "k", "learnable_dims": 2},
    "kv_biases_one_dim": {"kind": "kv", "learnable_dims": 1},
    "v_biases_shared": {"kind": "v", "shared": True},
    "k_biases_start": {"kind": "k", "start": -1.5},
    "kv_biases_start": {"kind": "kv", "start": 0.5, "shared": True},
}
MASKS: dict[str, Choice] = {
    "causal": {"kind": "causal"},
    **declared("mask"),
    "prefix_one": {"kind": "prefix", "length": 1},
    "prefix_all": {"kind": "prefix", "length": 13},
    "prefix_beyond": {"kind": "prefix", "length": 40},
}
KERNELS = [
    name
    for name, values in OPERATIONS.items()
    if not AttentionConfig.model_validate({"operation": values}).operation.has_logits
]
TAKING_BIAS_KEYS = [
    name
    for name, values in OPERATIONS.items()
    if not AttentionConfig.model_validate({"operation": values}).operation.sequential
]
PREFIXES = [name for name, values in MASKS.items() if values["kind"] == "prefix"]
POSITIONS = ("none", "slopes", "table")
B, H, G, T, D = 2, 4, 2, 13, 6


class Slopes(nn.Module):
    """ALiBi's form: z - slope_h * (q - k), nothing learned."""

    def score(self) -> Score:
        slopes = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)
        return Score(lambda z, b, h, q, k, slopes_H: z - slopes_H[h] * (q - k), (slopes,))


class Table(nn.Module):
    """The form of relative and T5 positions: a learned bias per head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(H, T))

    def score(self) -> Score:
        return Score(lambda z, b, h, q, k, table_HT: z + table_HT[h, (q - k).clamp(min=0)], (self.table,))


def config_of(
    operation: str, bias: str, mask: str, softcap: float | None = None, backend: str = "auto"
) -> AttentionConfig:
    """The validated combination; pydantic's ValidationError where it is refused."""
    return AttentionConfig.model_validate(
        {
            "operation": OPERATIONS[operation],
            "bias": BIASES[bias],
            "mask": MASKS[mask],
            "softcap": softcap,
            "backend": backend,
        }
    )


def core_of(
    config: AttentionConfig, position: str = "none", dtype: torch.dtype = torch.float64, head_width: int = D
) -> AttentionCore:
    """A core with random parameters."""
    module = {"none": None, "slopes": Slopes(), "table": Table()}[position]
    score = None if module is None else module.score
    core = AttentionCore(config, kv_heads=G, head_width=head_width, position=score, heads=H, context=T)
    core.add_module("table", module)  # so that its parameters are among the core's
    core = core.to(dtype)
    for i, parameter in enumerate(core.parameters()):
        with torch.no_grad():
            parameter.normal_(generator=torch.Generator().manual_seed(100 + i))
    return core


def legal(operation: str, bias: str, mask: str, softcap: float | None, position: str) -> bool:
    """Return True if the config accepts the combination."""
    try:
        config_of(operation, bias, mask, softcap).check_fit(D, position != "none")
    except ValueError:
        return False
    return True


def qkv(
    seed: int = 0, dtype: torch.dtype = torch.float64, core: AttentionCore | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of H heads, one or two per head as the core takes, and keys and values of G; all require gradients."""
    generator, queries = torch.Generator().manual_seed(seed), 1 if core is None else core.operation.queries_per_head
    shapes = ((H, queries * D), (G, D), (G, D))
    q, k, v = (torch.randn(B, h, T, width, generator=generator, dtype=torch.float64) for h, width in shapes)
    q, k, v = (x.to(dtype).requires_grad_() for x in (2 * q, k, v))
    return q, k, v


def documents() -> Tensor:
    """Document numbers of packed texts, leading token included."""
    return torch.tensor([[0] * 4 + [1] * 5 + [2] * (T - 9), [7] * 8 + [3] * (T - 8)])


def log_kept() -> Tensor:
    """Running sums of the logarithms of forget gates, or logits of weights, that require gradients: (B, T, H)."""
    gates = torch.randn(B, T, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return torch.nn.functional.logsigmoid(gates).cumsum(1).requires_grad_()


def arguments(core: AttentionCore) -> tuple[Tensor | None, ...]:
    """Arguments of the core after q, k and v."""
    given = documents() if core.by_document else None
    gated = core.operation.forgets or core.operation.weighs
    return (given, log_kept()) if gated else () if given is None else (given,)


def assert_core_equals_formula(core: AttentionCore, seed: int = 0, tolerance: float = 1e-9) -> None:
    """Output, gradients to inputs and parameters, importance, share of the bias and row sums."""
    inputs = qkv(seed, core=core)
    beside = arguments(core)
    expected, scores = formula(core, *inputs, *beside)
    out = core(*inputs, *beside)
    close(out, expected, tolerance)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    wanted = [*inputs, *core.parameters(), *(x for x in beside if x is not None and x.requires_grad)]
    ours = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad((expected * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
    for mine, reference_gradient in zip(ours, theirs, strict=True):
        close(mine, reference_gradient, tolerance)
    assert_importance_is_that_of(core, inputs, scores.detach(), tolerance)


def proxy_scores(scores_BHTS: Tensor) -> Tensor:
    """|A_ts| / sum_s |A_ts|, and 0 where the row sums to 0 (2410.10781, table 6)."""
    size = scores_BHTS.abs()
    total = size.sum(-1, keepdim=True)
    return torch.where(total > 0, size / total.clamp(min=torch.finfo(size.dtype).tiny), 0)


def assert_importance_is_that_of(
    core: AttentionCore, inputs: tuple[Tensor, Tensor, Tensor], scores: Tensor, tolerance: float
) -> None:
    """The importance equals its definition, computed key by key from explicit scores."""
    found = core.layer_call(*(x.detach() for x in inputs), *arguments(core)).importance()
    first, extra = core.leading, scores.shape[-1] - T  # a sink token and a rest: both go to no token
    raw, proxy = scores[:, :, first:], proxy_scores(scores)[:, :, first:]
    for k in range(T - first):
        close(found.positions_BHT[..., k], proxy[:, :, k:, extra + first + k].mean(-1), tolerance)
    if extra or first:
        assert found.bias_BH is not None
        close(found.bias_BH, proxy[..., : extra + first].sum(-1).mean(-1), tolerance)
    else:
        assert found.bias_BH is None
    if first > 1:
        assert found.registers_BHN is not None
        close(found.registers_BHN, proxy[..., extra : extra + first].mean(-2), tolerance)
    else:
        assert found.registers_BHN is None
    if core.proxy:
        assert found.row_sums_BH is not None
        close(found.row_sums_BH, raw.sum(-1).mean(-1), tolerance)
    else:
        assert found.row_sums_BH is None
        close(raw.sum(-1), torch.ones_like(raw[..., 0]), tolerance)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Equal within `tolerance`, relative to the largest entry where that is above one."""
    size = max(1.0, theirs.detach().abs().max().item()) if theirs.numel() else 1.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size, check_dtype=False)
