"""Quantisation: the loss under simulated quantisation of weights and activations, with and without the sink positions.

Activations at a sink position can be hundreds of times as large as those of other tokens. Tokens that share a scale
with them are then rounded to few steps, or to zero. Every setting is therefore evaluated twice: with all tokens
quantised, and with the sink positions in full precision and excluded from the scales.

Values are rounded to a grid and remain floating-point numbers:

    q(x) = s * clip(round(x / s), -m, m),  s = max |x| / m,  m = 2^(bits - 1) - 1         (symmetric)

The maximum is over the values x that share a scale: for activations, all calibration sequences (static), one sequence
(dynamic) or one token; for weights, one output channel, or a group of 32 in its row. Only the linear layers of the
blocks are quantised. Embedding, LM head, norms and the products inside attention are not; SmoothQuant (2211.10438) also
quantises the latter. Mixture-of-experts models are refused: hooks cannot observe the inputs of the down projections if
transformers fuses the experts into one tensor, and separate experts process only some of the tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.assessing.part import LOSS_ADDED, AssessPart, AssessText, Effect, PartFigure, PartJob, PartNumber, PartRow
from sinklab.assessing.reading import PairedReader, Step, refused
from sinklab.assessing.settings import AssessSettings
from sinklab.errors import InputError
from sinklab.measuring.statistics.details import kurtosis
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, hooked, residual_stream, token_norms
from sinklab.plots import PlotAxis
from sinklab.schema import ReadDocument

INT8, INT4 = 8, 4
GROUP = 32
Activations = Literal["full", "static per tensor", "dynamic per tensor", "per token"]
Weights = Literal["int8 per channel", "int4 in groups of 32"]
Maxima = dict[nn.Module, Tensor]

STATIC = "int8 static per tensor"
SETTINGS: dict[Weights, dict[str, Activations]] = {
    "int8 per channel": {
        STATIC: "static per tensor",
        "int8 dynamic per tensor": "dynamic per tensor",
        "int8 per token": "per token",
    },
    "int4 in groups of 32": {"int4 weights": "full"},
}
"""Quantisation of weights -> name of the setting -> quantisation of activations."""
SHARE_A_SCALE = {"dynamic per tensor": (1, 2), "per token": (2,)}
"""Axes of the activations (B, T, I) that share a scale; each sequence of a batch has its own scales."""
CALIBRATED = 4  # maximum number of calibration sequences
DESTROYED = 10  # multiple of the unchanged loss at which a model counts as destroyed
DEVIATIONS = 6  # standard deviations from the mean beyond which a value is an outlier (2306.12929)


class Quantised(ReadDocument):
    """Losses in one setting of quantisation.

    Attributes:
        name: name of the setting in SETTINGS.
        weights, activations: quantisation of weights and of activations.
        everything: loss with all tokens quantised.
        without_sink: loss with the sink positions in full precision and excluded from the scales.
        due_to_sink: loss of `everything` minus loss of `without_sink`.
        destroyed: whether the loss of `everything` is at least ten times that of the unchanged model.
    """

    name: str
    weights: str
    activations: str
    everything: Effect
    without_sink: Effect
    due_to_sink: float
    destroyed: bool


class Outliers(ReadDocument):
    """Outlier statistics of the residual stream after one block (`layer`, 1-based), on the first sequence.

    Attributes:
        kurtosis: kurtosis over channels, mean over tokens.
        largest: largest absolute activation.
        largest_norm, median_norm: maximum and median l2 norm over tokens.
        channels: number of channels with a value more than six standard deviations from the mean (2306.12929); mean
            and standard deviation are over all values.
    """

    layer: int
    kurtosis: float
    largest: float
    largest_norm: float
    median_norm: float
    channels: int


class Quantisation(AssessPart):
    """Loss after simulated quantisation, and outlier statistics of each block.

    Attributes:
        sink_positions: number of first positions in full precision in `without_sink`, learned leading tokens included.
        settings: losses of every setting.
        outliers: outlier statistics of every block.
    """

    name = "quantisation"
    rank = 2
    question = "Does the sink make few bits costly?"
    numbers = (
        PartNumber(
            "int8_added",
            "Static int8, added loss",
            ("Int8", "static, nats added"),
            "weights and activations in 8 bits, with fixed scales for activations",
        ),
        PartNumber(
            "int8_due_to_sink",
            "Part of static int8's added loss that is due to the sink",
            ("of the sink", "of these"),
            "the part of the loss in column Int8 that is due to the sink",
        ),
    )

    sink_positions: int
    settings: list[Quantised]
    outliers: list[Outliers]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        if adapter.quantised:
            return f"the weights are already quantised ({adapter.quantised})"
        for block in adapter.blocks:
            for name, weight in block.named_parameters():
                if weight.ndim > 2 and min(weight.shape[-2:]) > 1:
                    kinds = "such as fused experts or a convolution over channels"
                    return f"quantisation of weights with more than two axes ({name}), {kinds}, is not supported"
        with watched_maxima(linear_maps(adapter.blocks), 0):
            return refused(adapter)

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        calibrated = min(settings.sequences, CALIBRATED)
        tokens_NT, calibration_NT = text.split(settings.sequences, calibrated, settings.length)
        run = partial(assess_quantisation, text.model.adapter, tokens_NT, calibration_NT, settings)
        return PartJob((1 + 2 * sum(map(len, SETTINGS.values()))) * len(tokens_NT) + 2 * len(calibration_NT), run)

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        for one in self.settings:
            due = f"due to the sink {one.due_to_sink:+.4f}" + (", destroyed" if one.destroyed else "")
            static = one.name == STATIC
            numbers = ["int8_added"] if static else []
            yield self.row(one.name, one.everything, due, answer=one.name, numbers=numbers)
            if static:
                answer, words = "part of this loss due to the sink", "in static int8"
                yield PartRow("", None, one.due_to_sink, answer=answer, gained=words, numbers=["int8_due_to_sink"])

    def figure(self) -> PartFigure:
        rows = [
            self.point(effect, series, self.added(effect), one.name)
            for one in self.settings
            for series, effect in (("all tokens", one.everything), ("sink in full precision", one.without_sink))
        ]
        return PartFigure(
            "Quantisation with and without the sink",
            f"Loss added to {self.unchanged.loss:.3f} by simulated quantisation of all tokens, and with the first "
            f"{self.counted(self.sink_positions, 'token')} in full precision and excluded from the scales.",
            rows,
            PlotAxis(LOSS_ADDED, "x", "nats per token"),
            PlotAxis("", "y", "setting", order=[one.name for one in self.settings]),
            kind="dots",
            reference=0.0,
        )


def assess_quantisation(
    adapter: Adapter, tokens_NT: Tensor, calibration_NT: Tensor, settings: AssessSettings, step: Step
) -> Quantisation:
    """Measure the loss for every setting in SETTINGS, with and without quantisation of the sink positions.

    Args:
        calibration_NT: separate sequences from which static scales are computed.

    Raises:
        InputError: if a linear layer, such as an expert, processes only some of the tokens.
    """
    spared = adapter.leading + settings.sink_tokens
    maps = linear_maps(adapter.blocks)
    reader = PairedReader(adapter, tokens_NT, step)
    maxima: dict[int, Maxima] = {}
    for skipped in (0, spared):
        with evaluating(adapter.module), watched_maxima(maps, skipped) as maxima[skipped]:
            for tokens_T in calibration_NT:
                adapter.hidden(tokens_T[None].to(adapter.device))
                step()
    before = reader.unchanged.effect()
    found = []
    for weights, inputs in SETTINGS.items():
        with quantised_weights(maps, weights) as exact:
            for name, activations in inputs.items():
                effects = []
                for skipped in (0, spared):
                    with quantised_inputs(maps, exact, activations, maxima[skipped], skipped):
                        effects.append(reader.under().effect())
                everything, without = effects
                found.append(
                    Quantised(
                        name=name,
                        weights=weights,
                        activations=activations,
                        everything=everything,
                        without_sink=without,
                        due_to_sink=everything.loss - without.loss,
                        destroyed=everything.loss >= DESTROYED * before.loss,
                    )
                )
    outliers = outliers_by_block(adapter, tokens_NT)
    return Quantisation(**reader.result_fields(), sink_positions=spared, settings=found, outliers=outliers)


def outliers_by_block(adapter: Adapter, tokens_NT: Tensor) -> list[Outliers]:
    """Compute outlier statistics of the residual stream after each block, on the first sequence."""
    with evaluating(adapter.module), residual_stream(adapter.blocks, _outliers) as found:
        adapter.hidden(tokens_NT[:1].to(adapter.device))
    return [Outliers(layer=layer, **one) for layer, one in enumerate(found) if layer]


def _outliers(x_BTC: Tensor) -> dict[str, Any]:
    x_BTC = x_BTC.float()
    norms_BT = token_norms(x_BTC)
    far_BTC = (x_BTC - x_BTC.mean()).abs() > DEVIATIONS * x_BTC.std(correction=0)
    return {
        "kurtosis": float(kurtosis(x_BTC).mean()),
        "largest": float(x_BTC.abs().max()),
        "largest_norm": float(norms_BT.max()),
        "median_norm": float(norms_BT.median()),
        "channels": int(far_BTC.any((0, 1)).sum()),
    }


def on_grid(x: Tensor, bits: int, largest: Tensor) -> Tensor:
    """Round x to a symmetric grid of `bits` bits with maximum `largest`, which is broadcast to x."""
    steps = 2 ** (bits - 1) - 1
    scale = largest / steps
    scale = torch.where(scale > 0, scale, 1)
    return (x / scale).round().clamp(-steps, steps) * scale


def quantised_weight(weight_OI: Tensor, kind: Weights) -> Tensor:
    """Round a weight (O, I) to int8 per output channel, or to int4 in groups of at most 32 along a row."""
    if kind == "int8 per channel":
        return on_grid(weight_OI, INT8, weight_OI.abs().amax(1, keepdim=True))
    width = weight_OI.shape[1]
    grouped_OGI = F.pad(weight_OI, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    return on_grid(grouped_OGI, INT4, grouped_OGI.abs().amax(-1, keepdim=True)).flatten(1)[:, :width]


@dataclass(frozen=True)
class LinearMap:
    """A linear layer of a transformer block: `nn.Linear`, or GPT-2's `Conv1D`.

    Attributes:
        block: transformer block that contains the layer; the shape of its input determines (B, T).
    """

    module: nn.Module
    block: nn.Module

    @property
    def weight(self) -> Tensor:
        """View (O, I) of the layer's weight, detached; the weight of a `Conv1D` is (I, O)."""
        found: Any = self.module.weight
        return found.data if isinstance(self.module, nn.Linear) else found.data.T


def linear_maps(blocks: Sequence[nn.Module]) -> list[LinearMap]:
    """List the linear layers of the blocks in order."""
    return [
        LinearMap(module, block)
        for block in blocks
        for module in block.modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]


@contextmanager
def watched_maxima(maps: Sequence[LinearMap], skipped: int) -> Iterator[Maxima]:
    """Yield a dict that collects each layer's largest |x| of the inputs after the first `skipped` positions."""
    found: Maxima = {}

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        rest = unflattened(args[0])[:, skipped:]
        if rest.numel():
            here = rest.abs().amax()
            found[module] = torch.maximum(found[module], here) if module in found else here

    with _unflattening(maps) as unflattened, hooked(one.module.register_forward_pre_hook(entering) for one in maps):
        yield found


@contextmanager
def quantised_weights(maps: Sequence[LinearMap], weights: Weights) -> Iterator[dict[nn.Module, Tensor]]:
    """Quantise the weights of the layers in the `with` block, and restore them on exit; yields the original weights."""
    exact = {one.module: one.weight.clone() for one in maps}
    try:
        for one in maps:
            one.weight.copy_(quantised_weight(one.weight, weights))
        yield exact
    finally:
        for one in maps:
            one.weight.copy_(exact[one.module])


@contextmanager
def quantised_inputs(
    maps: Sequence[LinearMap], weights: dict[nn.Module, Tensor], activations: Activations, maxima: Maxima, spared: int
) -> Iterator[None]:
    """Quantise the inputs of the linear layers in the `with` block.

    Args:
        weights: unquantised weights, applied at the first `spared` positions.
        maxima: largest |x| of the inputs of every layer, for static scales; otherwise it may be empty.
        spared: number of first positions in full precision and excluded from dynamic scales.
    """
    exact: dict[nn.Module, Tensor] = {}
    last: tuple[Tensor, int, Tensor | None, Tensor] | None = None

    def entering(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal last
        x, largest = args[0], maxima.get(module)
        x_BTI = unflattened(x)
        exact[module] = x_BTI[:, :spared]
        # q, k and v often share an input, as do gate and up: the last result is reused unless x was modified in place
        if last is None or x is not last[0] or x._version != last[1] or (largest is not None and largest != last[2]):
            rounded_BTI = _rounded(x_BTI[:, spared:], activations, largest)
            last = x, x._version, largest, torch.cat((exact[module], rounded_BTI), 1).view_as(x)
        return (last[-1],)

    def leaving(module: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor | None:
        first_BSI, bias = exact.pop(module), cast("Tensor | None", module.bias)
        if not spared:
            return None
        first_BSO = F.linear(first_BSI, weights[module], bias)
        return torch.cat((first_BSO, unflattened(output)[:, spared:]), 1).view_as(output)

    hooks = [one.module.register_forward_pre_hook(entering) for one in maps]
    hooks += [one.module.register_forward_hook(leaving) for one in maps]
    with _unflattening(maps) as unflattened, hooked(hooks):
        yield


@contextmanager
def _unflattening(maps: Sequence[LinearMap]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that reshapes (B T, I) to (B, T, I), because OPT flattens the inputs of its feed-forward layers.

    The function raises InputError if the number of rows is not B T.
    """
    shape = torch.Size((1, 1))

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal shape
        shape = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def unflattened(x: Tensor) -> Tensor:
        if x.ndim == 2 and len(x) != shape.numel():
            raise InputError("a linear layer of a block, such as an expert, processes only some of the tokens")
        return x.unflatten(0, shape) if x.ndim == 2 else x

    with hooked(one.block.register_forward_pre_hook(entering, with_kwargs=True) for one in maps[:1]):
        yield unflattened


def _rounded(x_BTI: Tensor, activations: Activations, largest: Tensor | None) -> Tensor:
    if activations == "full" or not x_BTI.numel():
        return x_BTI
    if activations in SHARE_A_SCALE:
        largest = x_BTI.abs().amax(SHARE_A_SCALE[activations], keepdim=True)
    assert largest is not None, "static scales require the maxima of a calibration"
    return on_grid(x_BTI, INT8, largest)
