"""Writer: the block, neuron, expert and single weight that write the massive activation of the first position.

Let x be the residual stream at the first position, mean over sequences. Channel c is the channel of the largest |x|
after any block. Each block adds to x_c

    feed-forward = x_c after the block - x_c after the block with its feed-forward output set to zero
    attention    = x_c after the block - x_c before it - feed-forward              (or another token mixer)

so x_c after block l is x_c of the embedding plus the additions of the blocks up to l. Under a causal mask the first
position attends only to itself, so sequences of one token are sufficient.

Within the feed-forward layer that adds most up to the block with the largest |x|, neuron j adds

    a_j W_down[c, j] g,      g = feed-forward / (output of the layer in c)

where g is 1, or the factor that a norm after the layer applies to c. The down projection W_down is identified by a
gradient, not by name: the gradient of the layer's output in c with respect to W_down is non-zero in row c only. a_j is
entry j of this row, and includes the routing weight of an expert. An expert adds the sum over its neurons.

The first position is that of the first learned token, if the model has any.

The single weight is the W_down[c, j], among those of the 8 neurons with the largest additions, that leaves the smallest
|x_c| after the block with the largest |x| when this weight alone is set to zero. (After later blocks, |x_c| is not
informative, because they often cancel x_c in any case.) Also zeroed are the neuron, the expert (its down projection, as
for super experts, 2507.23279), the layer's output at the first position (2510.06477, section 3.3) and, as a control,
the largest weight of the down projection to another channel.

Super weights and super experts do not depend on c or on the first position (`sinklab.assessing.super_weights`). All
super weights are zeroed at once.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow
from sinklab.assessing.reading import Effect, PairedReader, PartInput, first_importance
from sinklab.assessing.settings import AssessSettings
from sinklab.assessing.super_weights import (
    SPIKE,
    DownProjection,
    SuperExpert,
    down_projections,
    down_weights,
    largest_activations,
    super_experts,
)
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import InputError
from sinklab.measuring.options import SINK_EPS
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import (
    NO_BLOCKS,
    changed_entries,
    evaluating,
    hidden_states,
    hooked,
    intercept,
    requiring_grad,
    residual_stream,
)
from sinklab.schema import ReadDocument
from sinklab.tables import PlotAxis

OTHER_MODULES = re.compile("attn|attention|mamba|mixer|conv|temporal|norm")  # token mixers, and norms with a gate
STRONGEST_NEURONS = 8
WEIGHT = "single weight"
Sublayer = Literal["attention", "feed-forward"]


class BlockWrites(ReadDocument):
    """Additions of one block (`layer`, 1-based) to channel c at the first position, mean over sequences."""

    layer: int
    attention: float
    feed_forward: float

    def by_sublayer(self) -> list[tuple[Sublayer, float]]:
        """Return the additions as pairs of sublayer and addition."""
        return [("attention", self.attention), ("feed-forward", self.feed_forward)]


class NeuronWrites(ReadDocument):
    """Addition of one neuron of the feed-forward layer to channel c at the first position, mean over sequences.

    Attributes:
        name: parameter name of the down projection W_down within the feed-forward layer.
        expert: 0-based index of the expert in W_down; None if W_down has no expert axis.
        neuron: 0-based index j of the neuron.
        activation: activation a_j of the neuron.
        weight: W_down[c, j].
        adds: addition to x_c, a_j W_down[c, j] g.
    """

    name: str
    expert: int | None
    neuron: int
    activation: float
    weight: float
    adds: float


class ExpertWrites(ReadDocument):
    """Addition `adds` of one expert (0-based) of the down projection `name` to channel c at the first position."""

    name: str
    expert: int
    adds: float


class ZeroedWriter(Effect):
    """Loss and activations with a weight, neuron, expert or feed-forward output zeroed, or with nothing zeroed.

    Attributes:
        what: name of the ablation, or "nothing zeroed".
        channel: |x_c| at the first position after the block where it is largest in the unchanged model, mean over
            sequences.
        largest: largest |x| over channels and blocks at the first position, mean over sequences.
        elsewhere: largest |x| over channels, blocks and all other positions, mean over sequences.
        sink: percentage of (sequence, layer, head) triples in which the importance of the first position, or of learned
            leading tokens, is above 0.3.
    """

    what: str
    channel: float
    largest: float
    elsewhere: float
    sink: float


class Writer(AssessPart):
    """The sublayers, neurons, experts and weight that write the massive activation.

    Attributes:
        channel: 0-based index of channel c.
        block: 1-based index of the block after which |x_c| is largest.
        value: x_c after `block`.
        median: median |x| after `block`, at the first position.
        embedding: x_c before the first block.
        blocks: additions to x_c by block.
        layer, sublayer: block and sublayer with the largest addition up to `block`, in the direction of `value`.
        ffn_layer: block of the feed-forward layer with the largest addition up to `block`.
        experts: experts of this feed-forward layer that add to x_c, largest addition first; empty without experts.
        neurons: up to 8 neurons of this feed-forward layer with the largest additions, largest first.
        weight: neuron j of the single weight W_down[c, j].
        down_projections: largest input and output of the down projection of every block; None if the writing layer has
            experts or several down projections.
        super_experts: super experts, largest output first; None without experts.
        zeroed: losses with nothing zeroed, then with each writer and the control zeroed.
    """

    name = "writer"
    question = "Does the model need its massive activation?"
    numbers = (
        PartNumber(
            "single_weight_added",
            "The single weight that writes the massive activation zeroed, added loss",
            ("Single weight", "zeroed, nats added"),
        ),
    )
    layout = PartFigure(
        "Sublayers that write the massive activation",
        "Additions of each block's attention and feed-forward layer to channel {0.channel} at the first position, "
        "which is {0.value:,.5g} after block {0.block} (median |x|: {0.median:.3g}).",
        PlotAxis("Block", "x", "block"),
        tooltip=(),
    )

    channel: int
    block: int
    value: float
    median: float
    embedding: float
    blocks: list[BlockWrites]
    layer: int
    sublayer: Sublayer
    ffn_layer: int
    experts: list[ExpertWrites]
    neurons: list[NeuronWrites]
    weight: NeuronWrites
    down_projections: list[DownProjection] | None = None
    super_experts: list[SuperExpert] | None = None
    zeroed: list[ZeroedWriter]

    @property
    def super_weights(self) -> list[DownProjection]:
        """The super weights, by block."""
        return [one for one in self.down_projections or () if one.spike > SPIKE]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        if not adapter.blocks:
            return NO_BLOCKS
        for layer, block in enumerate(adapter.blocks, 1):
            part = feed_forward(block)
            if part is None:
                return f"no feed-forward layer was found in block {layer}"
            several = [name for name, child in _candidates(block) if not isinstance(child, nn.Linear) or child is part]
            if len(several) > 1:
                return f"block {layer} has several feed-forward layers ({', '.join(several)})"
            if not all(weight.is_floating_point() for weight in part.parameters()):
                return "the weights are quantised, so a single weight cannot be zeroed"
        if _ends_with_norm(adapter):
            return "norms after the sublayers scale the residual stream, so it is not the sum of sublayer outputs"
        return None

    @classmethod
    def run(cls, given: PartInput) -> "Writer":
        """Find the writers of the largest activation of the first position, and the loss with each of them zeroed."""
        adapter, tokens_NT = given.adapter, given.tokens_NT
        tokens_N1, S = tokens_NT[:, :1], adapter.leading + tokens_NT.shape[1]
        parts = [part for block in adapter.blocks if (part := feed_forward(block)) is not None]  # one per block
        x_ME = _first_position(adapter, tokens_N1).mean(1)
        block, channel = divmod(int(x_ME[1:].abs().argmax()), x_ME.shape[1])
        block, value = block + 1, float(x_ME[block + 1, channel])
        blocks = []
        for layer, part in enumerate(parts, 1):
            with silenced(part):
                without = float(_first_position(adapter, tokens_N1)[layer, :, channel].mean())
            whole, before = float(x_ME[layer, channel]), float(x_ME[layer - 1, channel])
            blocks.append(BlockWrites(layer=layer, attention=without - before, feed_forward=whole - without))
        sign = 1 if value > 0 else -1
        additions = [(sign * adds, one.layer, name) for one in blocks[:block] for name, adds in one.by_sublayer()]
        _, layer, sublayer = max(additions)
        added, ffn_layer, _ = max(one for one in additions if one[-1] == "feed-forward")
        part = parts[ffn_layer - 1]
        maps, out_E = down_maps(adapter, part, tokens_N1, channel)
        if not maps or not out_E[channel]:
            raise InputError(
                f"no weight was found that writes channel {channel} of the first position in block {ffn_layer}, whose "
                "feed-forward layer adds most to it: the gradients or the output of the layer are zero"
            )
        g = sign * added / float(out_E[channel])
        by_name = {one.name: one for one in maps}
        neurons, experts = _neurons_and_experts(maps, channel, g, sign)

        def zeroed(one: NeuronWrites, channels: int | slice) -> AbstractContextManager[None]:
            at = (one.neuron,) if one.expert is None else (one.expert, one.neuron)
            return changed_entries((by_name[one.name].by_channel, (channels, *at), 0))

        def remaining(one: NeuronWrites) -> float:
            with zeroed(one, channel):
                return float(_first_position(adapter, tokens_N1)[block, :, channel].abs().mean())

        chosen = min(neurons, key=remaining)
        here, everywhere = by_name[chosen.name], slice(None)
        owner, _, leaf = here.name.rpartition(".")
        down = owner if len(maps) == 1 and chosen.expert is None and leaf == "weight" else None
        reader = given.reader()
        magnitude = here.weight.detach().abs()
        magnitude.movedim(here.axis, 0)[channel] = 0
        largest = torch.unravel_index(magnitude.argmax(), magnitude.shape)
        changes: dict[str, AbstractContextManager[None]] = {
            "nothing zeroed": nullcontext(),
            WEIGHT: zeroed(chosen, channel),
            "neuron": zeroed(chosen, everywhere),
            "feed-forward at the first position": silenced(part, S),
            "largest weight to others": changed_entries((here.weight, tuple(map(int, largest)), 0)),
        }
        if chosen.expert is not None:
            changes["expert"] = changed_entries((here.by_channel, (everywhere, chosen.expert), 0))
        largest_of, weights = largest_activations(adapter, parts, tokens_NT, down), down_weights(parts, down, here.axis)
        projections = down_projections(largest_of, weights)
        if supers := [(weights[one.layer], (one.channel, one.neuron), 0) for one in projections if one.spike > SPIKE]:
            changes["super weights"] = changed_entries(*supers)
        given.passes.expect(len(changes) * len(tokens_NT))
        return cls(
            **reader.result_fields(),
            channel=channel,
            block=block,
            value=value,
            median=float(x_ME[block].abs().median()),
            embedding=float(x_ME[0, channel]),
            blocks=blocks,
            layer=layer,
            sublayer=sublayer,
            ffn_layer=ffn_layer,
            experts=experts,
            neurons=neurons,
            weight=chosen,
            down_projections=projections or None,
            super_experts=super_experts(largest_of, len(parts)),
            zeroed=[_zeroed(reader, block, channel, what, change) for what, change in changes.items()],
        )

    def rows(self) -> Iterator[PartRow]:
        """The answers are all ablations."""
        for number, one in enumerate(self.zeroed):
            more = f"channel {self.channel}: {one.channel:,.0f}, all: {one.largest:,.0f}, sink {one.sink:.1f} %"
            numbers = ["single_weight_added"] if one.what == WEIGHT else []
            yield self.row(one.what, one, more, answer=f"{one.what} zeroed" if number else "", numbers=numbers)

    def remark(self) -> str:
        one, expert = self.weight, "" if self.weight.expert is None else f", expert {self.weight.expert}"
        supers = ""
        if self.down_projections:
            near = max(self.down_projections, key=lambda one: one.spike)
            none = f"none (largest input and output in block {near.layer}: {near.input:.4g} and {near.output:.4g})"
            found = [f"[{one.channel}, {one.neuron}] of block {one.layer}" for one in self.super_weights]
            supers = f"; super weights: {', '.join(found) or none}"
        if self.super_experts is not None:
            found = [f"{one.layer}.{'shared' if one.expert is None else one.expert}" for one in self.super_experts]
            supers += f"; super experts: {', '.join(found) or 'none'}"
        return (
            f"writer: channel {self.channel} of the first position is {self.value:,.5g} after block {self.block}; the "
            f"largest addition is by the {self.sublayer} of block {self.layer}; the single weight, {one.weight:.4g}, "
            f"is that of neuron {one.neuron}{expert} in block {self.ffn_layer} and adds {one.adds:,.5g}{supers}"
        )

    def figure(self) -> PartFigure:
        points = [
            {"series": name, "x": one.layer, "y": adds} for one in self.blocks for name, adds in one.by_sublayer()
        ]
        return self.drawn(points, y=PlotAxis(f"Added to channel {self.channel}", "y", "added"))


def feed_forward(block: nn.Module) -> nn.Module | None:
    """Return the feed-forward layer of a block; None if there is none.

    It is the last child module that has weight matrices and a name without the words in `OTHER_MODULES`. The others,
    if any, are linear layers that come before it, such as OPT's fc1 before fc2; `Writer.refusal` excludes other blocks.
    """
    found = _candidates(block)
    return found[-1][1] if found else None


def _ends_with_norm(adapter: Adapter) -> bool:
    """Return whether the output of the first block is that of a norm (post-norm), found by a pass over one token."""
    block, normed, outputs = adapter.blocks[0], list[Tensor](), list[Tensor]()
    norms = [module for module in block.modules() if "norm" in type(module).__name__.lower()]
    hooks = [one.register_forward_hook(lambda _, __, output: normed.append(hidden_states(output))) for one in norms]
    hooks.append(block.register_forward_hook(lambda _, __, output: outputs.append(hidden_states(output))))
    with evaluating(adapter.module), hooked(hooks):
        adapter.hidden(torch.tensor([[1]], device=adapter.device))
    return any(one is outputs[0] for one in normed)


def _candidates(block: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, child)
        for name, child in block.named_children()
        if not OTHER_MODULES.search(name) and any(weight.ndim > 1 for weight in child.parameters())
    ]


@contextmanager
def silenced(part: nn.Module, positions: int | None = None) -> Iterator[None]:
    """Set the output of the feed-forward layer `part` to zero in the `with` block.

    Args:
        positions: length of the sequences, to zero only their first position; None zeroes all positions.
    """

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        out = hidden_states(output)
        zeros = torch.zeros_like(out)
        if positions is not None:  # the feed-forward layers of some models receive flattened sequences
            zeros = out.reshape(-1, positions, out.shape[-1]).clone()
            zeros[:, 0] = 0
            zeros = zeros.view_as(out)
        return (zeros, *output[1:]) if isinstance(output, tuple) else zeros

    with hooked([part.register_forward_hook(leaving)]):
        yield


@dataclass(frozen=True)
class DownMap:
    """A down projection: a weight matrix of a feed-forward layer that writes to the residual stream.

    Attributes:
        name: parameter name within the feed-forward layer.
        weight: weight of shape (I, E) or (E, I), with I neurons and E channels of the residual stream, and a leading
            axis for experts, if any.
        axis: axis of the E channels.
        activation: activation a_j of each neuron, (I,) or (experts, I).
    """

    name: str
    weight: Tensor
    axis: int
    activation: Tensor

    @property
    def by_channel(self) -> Tensor:
        """View of the weight with the channel axis first: (E, I) or (E, experts, I)."""
        return self.weight.detach().movedim(self.axis, 0)


def down_maps(adapter: Adapter, part: nn.Module, tokens_N1: Tensor, channel: int) -> tuple[list[DownMap], Tensor]:
    """Return the down projections of a feed-forward layer, and its output (E,) at the first position, mean over N.

    Args:
        part: the feed-forward layer.
        channel: channel of the output whose gradient identifies the down projections.
    """
    outputs: list[Tensor] = []
    weights = {name: weight for name, weight in part.named_parameters() if weight.ndim > 1}
    keep = part.register_forward_hook(lambda _, __, output: outputs.append(hidden_states(output)))
    with hooked([keep]), evaluating(adapter.module), requiring_grad(weights.values(), True), torch.enable_grad():
        adapter.hidden(tokens_N1.to(adapter.device))
        out = outputs[-1]
        out_E = out.reshape(-1, adapter.leading + 1, out.shape[-1])[:, 0].mean(0)
        grads = torch.autograd.grad(out_E[channel], list(weights.values()), allow_unused=True)
    found = []
    for (name, weight), grad in zip(weights.items(), grads, strict=True):
        for axis in range(max(0, weight.ndim - 2), weight.ndim):
            if grad is None or weight.shape[axis] != len(out_E):
                continue
            ordered = grad.movedim(axis, 0)
            if ordered.any(tuple(range(1, ordered.ndim))).nonzero().tolist() == [[channel]]:
                found.append(DownMap(name, weight, axis, ordered[channel].detach()))
    return found, out_E.detach()


def _first_position(adapter: Adapter, tokens_N1: Tensor) -> Tensor:
    """Compute the residual stream at the first position, before the first and after every block: (blocks + 1, N, E)."""
    with evaluating(adapter.module), residual_stream(adapter.blocks, lambda x_NSE: x_NSE[:, 0]) as found:
        adapter.hidden(tokens_N1.to(adapter.device))
    return torch.stack(found).float()


def _neurons_and_experts(
    maps: Sequence[DownMap], channel: int, g: float, sign: int
) -> tuple[list[NeuronWrites], list[ExpertWrites]]:
    """Return the neurons with the largest additions, and all experts with non-zero additions, largest first.

    Args:
        g: factor g of the module docstring.
        sign: 1 or -1; with -1, the most negative addition is the largest.
    """
    neurons: list[NeuronWrites] = []
    experts: list[ExpertWrites] = []
    for one in maps:
        writes = (one.activation * one.by_channel[channel]).float()
        adds = g * writes
        for place in (sign * adds).flatten().topk(min(STRONGEST_NEURONS, adds.numel())).indices:
            at = tuple(map(int, torch.unravel_index(place, adds.shape)))
            neurons.append(
                NeuronWrites(
                    name=one.name,
                    expert=at[0] if adds.ndim > 1 else None,
                    neuron=at[-1],
                    activation=float(one.activation[at]),
                    weight=float(one.by_channel[channel][at]),
                    adds=float(adds[at]),
                )
            )
        if adds.ndim > 1:
            sums = enumerate((g * writes.sum(-1)).tolist())
            experts += [ExpertWrites(name=one.name, expert=expert, adds=total) for expert, total in sums if total]
    neurons.sort(key=lambda one: -sign * one.adds)
    experts.sort(key=lambda one: -sign * one.adds)
    return neurons[:STRONGEST_NEURONS], experts


def _zeroed(
    reader: PairedReader, block: int, channel: int, what: str, change: AbstractContextManager[None]
) -> ZeroedWriter:
    """Measure loss, residual stream and sink at the first position within `change`, which zeroes weights or outputs."""
    written: list[Tensor] = []
    largest: list[Tensor] = []
    above: list[Tensor] = []

    def stream(x_BSE: Tensor) -> None:
        written.append(x_BSE[:, 0, channel].abs().float().cpu())
        largest.append(x_BSE.abs().amax(-1).float().cpu())

    def observe(layer: LayerCall) -> None:
        above.append((first_importance(layer) > SINK_EPS).flatten().cpu())

    adapter = reader.adapter
    with change, intercept(adapter, observe=observe), residual_stream(adapter.blocks, stream):
        effect = reader.under().effect()
    M = len(adapter.blocks) + 1
    largest_NS = torch.cat([torch.stack(largest[start + 1 : start + M]).amax(0) for start in range(0, len(largest), M)])
    return ZeroedWriter(
        what=what,
        channel=float(torch.cat(written[block::M]).mean()),
        largest=float(largest_NS[:, 0].mean()),
        elsewhere=float(largest_NS[:, 1:].amax(-1).mean()),
        sink=100 * float(torch.cat(above).float().mean()),
        **effect.model_dump(),
    )
