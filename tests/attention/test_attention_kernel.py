"""Every score function passes Inductor's check of FlexAttention's backward pass, which needs no GPU; and the form that
the kernel is given is the same function, in value and gradient.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import assert_core_equals_formula, config_of, core_of
from sampling import one_in
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch._inductor.kernel.flex.flex_attention import validate_joint_graph
from torch.fx import GraphModule

from sinklab.attention import primitive
from sinklab.attention.primitive import chunked_attend, eager_attend, score_mod
from sinklab.attention.scores import Score, for_flex
from sinklab.errors import InputError
from sinklab.interventions import VARIANTS
from sinklab.model.position import COPIES
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SIZES = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 32, "context": 16, "vocab_size": 23}
ON_FLEX = {"model": {"attention": {"backend": "flex"}}}
FORGETTING = {"operation": "forgetting"}
LEARNED = {"operation": {"kind": "sigmoid", "shift": "learned"}}
TOGETHER: dict[str, dict[str, Any]] = {
    "forgetting_prefix": {"attention": {**FORGETTING, "mask": {"kind": "prefix", "length": 5}}},
    "forgetting_capped_t5": {"attention": {**FORGETTING, "softcap": 30.0}, "position": "t5"},
    "scalable_capped": {"attention": {"operation": "scalable_softmax", "softcap": 30.0}},
    "scalable_t5": {"attention": {"operation": "scalable_softmax"}, "position": "t5"},
    "shift_learned_t5": {"attention": LEARNED, "position": "t5"},
    "clipped_alibi": {"attention": {"operation": "clipped_softmax"}, "position": "alibi"},
}
OVERLAYS = {
    **{name: variant.overlay for name, variant in VARIANTS.items()},
    **{n: {"model": m} for n, m in TOGETHER.items()},
}


def kernel_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Score]:
    """The score functions that FlexAttention is given in a training step of a variant; none where it is not used."""
    seen: list[Score] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, score: Score | None, *rest: Any) -> tuple[Tensor, Tensor]:
        seen.extend(part for part in [for_flex(score).score] if part is not None)
        return chunked_attend(q, k, v, score, *rest)

    monkeypatch.setattr(primitive, "flex_attend", watched)
    try:
        recipe = build_recipe({"model": SIZES, "metric": {"length": 16}}, OVERLAYS[name], ON_FLEX)
    except InputError:  # a kind that has no backends
        return seen
    with torch.autocast("cpu", torch.bfloat16):
        Transformer(recipe.model).loss(torch.randint(23, (2, 17), generator=torch.Generator().manual_seed(0)))
    return seen


def scattered(score: Score) -> list[tuple[int, ...]]:
    """Shapes of the captured tensors whose gradients the kernel adds score by score.

    Raises:
        NotImplementedError: the backward pass cannot be compiled for CUDA.
    """

    def mod(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
        return score_mod(replace(score, tensors=tensors), 0)(z, b, h, q, k)

    z, places = torch.zeros((), requires_grad=True), torch.zeros(4, dtype=torch.int32)
    tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in score.tensors)
    with TransformGetItemToIndex():
        _, joint = create_fw_bw_graph(mod, (z, places[0], places[1], places[2], places[3]), tensors)
    assert isinstance(joint, GraphModule)
    validate_joint_graph(joint.graph)
    found = [tuple(x.shape) for x in tensors if x.requires_grad]
    assert sum("zeros_and_scatter" in str(node.target) for node in joint.graph.nodes) == len(found)
    return found


@pytest.mark.parametrize("name", one_in(3, OVERLAYS))
def test_every_score_function_of_the_catalogue_can_be_trained_by_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for score in kernel_scores(name, monkeypatch):
        scattered(score)


B, H, T = 2, SIZES["heads"], SIZES["context"]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("forgetting", {(B, T, H)}),
        ("forgetting_prefix", {(B, T, H)}),
        ("scalable_softmax", set()),
        ("scalable_softmax_offset", set()),
        ("scalable_capped", {(B, H, T)}),  # the factor multiplies the output of the softcap
        ("sigmoid_shift_learned", {(H, T)}),
        ("sigmoid_shifted_by_row", set()),
        ("position_t5", {(COPIES, 129, H)}),
        ("clipped_softmax", {(B, H, T)}),
        ("elastic_softmax", {(B, H, T)}),
        ("entmax15", {(B, H, T)}),
    ],
)
def test_terms_shared_by_a_row_are_moved_out_of_the_kernel_where_possible(
    name: str, shapes: set[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = kernel_scores(name, monkeypatch)
    assert {shape for score in scores for shape in scattered(score)} == shapes
    assert name.startswith("scalable_softmax") or scores, "the variant does not reach the kernel"


def test_a_score_function_that_reads_one_tensor_twice_fails_the_check() -> None:
    table = torch.zeros(T, requires_grad=True)
    with pytest.raises(NotImplementedError, match="multiple indexing operations on the same tensor"):
        scattered(Score(lambda z, b, h, q, k, table_T: z + table_T[q] - table_T[k], (table,)))


def as_the_kernel(
    q: Tensor, k: Tensor, v: Tensor, score: Score | None, mask: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """`flex_attend` with explicit matrices in the place of the kernel."""
    kernel = for_flex(score)
    out, lse = eager_attend(kernel.query(q), k, v, kernel.score, mask, scale)
    return out, kernel.normaliser(lse)


CASES = itertools.product(
    ["forgetting", "scalable_softmax", "scalable_softmax_offset", "sigmoid_shift_learned"],
    ["none", "kv_biases", "sink_token"],
    ["causal", "prefix", "document"],
    [None, 3.0],
    ["none", "table"],
)


@pytest.mark.parametrize(("operation", "bias", "mask", "softcap", "position"), one_in(5, CASES))
def test_the_kernels_form_of_a_score_is_the_same_function(
    operation: str, bias: str, mask: str, softcap: float | None, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitive, "flex_attend", as_the_kernel)
    assert_core_equals_formula(core_of(config_of(operation, bias, mask, softcap, backend="flex"), position))
