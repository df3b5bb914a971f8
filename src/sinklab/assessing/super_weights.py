"""Super weights (2411.07191) and super experts (2507.23279): two published criteria on down projections.

Both use the largest |x| over all tokens of the text, in every block:

    super weight    W_down[c, j], with c the channel of the largest |output| of the down projection and j that of its
                    largest |input|, if both exceed `SPIKE`; they may be of different tokens
    super expert    a > P99.5 of the a of all experts, and a > max(a) // 10, with a the largest |output| of the down
                    projection of an expert, in the first 75 % of the blocks, before the routing weight

The public code is mengxiayu/LLMSuperWeight 232e4ee (analyze.py) and ZunhaiSu/Super-Experts-Profilling 573aead
(eval_utils.py). The latter has output[0] in the place of output, which for a routed expert is its first token of each
sequence; here all tokens of the expert are used. Experts without tokens have a = 0 in both.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sinklab.assessing.reading import TOKENS_AT_ONCE
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, hooked
from sinklab.schema import ReadDocument

SPIKE = 50.0  # analyze.py, plot_down_proj_input_output
SHARED = ("shared_expert", "shared_experts")
Largest = dict[tuple[int, str | int], tuple[float, int]]
"""Largest |x| by 1-based block and "input", "output", "shared" or expert: x with its sign, and its 0-based channel."""


class DownProjection(ReadDocument):
    """Largest |input| and |output| of the down projection of one block (`layer`, 1-based) over all tokens of the text.

    Attributes:
        channel, neuron: 0-based indices of the largest output and of the largest input.
        weight: W_down[channel, neuron].
        input, output: largest input and output, with their signs.
    """

    layer: int
    channel: int
    neuron: int
    weight: float
    input: float
    output: float

    @property
    def spike(self) -> float:
        """The smaller of |input| and |output|; above `SPIKE` the weight is a super weight."""
        return min(abs(self.input), abs(self.output))


class SuperExpert(ReadDocument):
    """A super expert: block (`layer`, 1-based), expert (0-based; None: the shared experts) and largest |output|."""

    layer: int
    expert: int | None
    output: float


def largest_activations(adapter: Adapter, parts: Sequence[nn.Module], tokens_NT: Tensor, down: str | None) -> Largest:
    """Compute the largest activations of the down projections.

    Experts are recorded if a module with 3-D weights is called with states, indices of experts and routing weights, as
    in transformers. It is called again for every expert, with the expert's tokens and a routing weight of 1.

    Args:
        parts: feed-forward layers of the blocks.
        tokens_NT: token ids.
        down: name of the down projection within the feed-forward layers; None to record experts only.
    """
    largest: Largest = {}

    def keep(layer: int, of: str | int, x: Tensor) -> None:
        place = int(x.abs().argmax())
        value, before = float(x.flatten()[place]), largest.get((layer, of), (0.0, 0))[0]
        if not abs(value) < abs(before):
            largest[layer, of] = value, place % x.shape[-1]

    def of_down(layer: int, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        keep(layer, "input", args[0])
        keep(layer, "output", output)

    def of_shared(layer: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        keep(layer, "shared", output)

    def of_experts(layer: int, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        if len(given) != 3 or given[1].is_floating_point():
            return
        x_RE, chosen_RK, weights_RK = (x.flatten(0, -2) for x in given)
        for expert in range(next(weight for weight in experts.parameters() if weight.ndim == 3).shape[0]):
            rows = (chosen_RK == expert).any(1)
            alone = torch.full_like(chosen_RK[rows, :1], expert), torch.ones_like(weights_RK[rows, :1])
            keep(layer, expert, experts.forward(x_RE[rows], *alone) if rows.any() else x_RE.new_zeros(1))

    def hooks() -> Iterator[RemovableHandle]:
        for layer, part in enumerate(parts, 1):
            for name, module in part.named_modules():
                if name == down:
                    yield module.register_forward_hook(partial(of_down, layer))
                if name.rpartition(".")[2] in SHARED:
                    yield module.register_forward_hook(partial(of_shared, layer))
                if any(weight.ndim == 3 for weight in module.parameters(recurse=False)):
                    yield module.register_forward_pre_hook(partial(of_experts, layer), with_kwargs=True)

    with evaluating(adapter.module), hooked(hooks()):
        for tokens_BT in tokens_NT.split(max(1, TOKENS_AT_ONCE // tokens_NT.shape[1])):
            adapter.hidden(tokens_BT.to(adapter.device))
    return largest


def down_weights(parts: Sequence[nn.Module], down: str | None, axis: int) -> dict[int, Tensor]:
    """Return the weight (channels, neurons) of each block's down projection, a view, by 1-based block.

    Args:
        parts, down: as for `largest_activations`.
        axis: axis of the channels in the parameters.
    """
    return {
        layer: module.get_parameter("weight").detach().movedim(axis, 0)
        for layer, part in enumerate(parts, 1)
        for name, module in part.named_modules()
        if name == down
    }


def down_projections(largest: Largest, weights: Mapping[int, Tensor]) -> list[DownProjection]:
    """Return the largest input and output of each block's down projection, and the weight that joins the two.

    Args:
        weights: see `down_weights`.
    """
    found = []
    for layer, weight in weights.items():
        (given, neuron), (output, channel) = largest[layer, "input"], largest[layer, "output"]
        at = float(weight[channel, neuron])
        found.append(DownProjection(layer=layer, channel=channel, neuron=neuron, weight=at, input=given, output=output))
    return found


def super_experts(largest: Largest, blocks: int) -> list[SuperExpert] | None:
    """Return the super experts, largest output first; None if no routed experts were recorded."""
    outputs = {key: abs(value) for key, (value, _) in largest.items() if key[1] not in ("input", "output")}
    outputs = {key: output for key, output in outputs.items() if key[0] <= round(0.75 * blocks)}
    if not any(isinstance(expert, int) for _, expert in outputs):
        return None
    a = torch.tensor(list(outputs.values()), dtype=torch.float64)
    bound = max(float(a.quantile(0.995)), float(a.max()) // 10)
    found = [
        SuperExpert(layer=layer, expert=None if isinstance(expert, str) else expert, output=output)
        for (layer, expert), output in outputs.items()
        if output > bound
    ]
    return sorted(found, key=lambda one: -one.output)
