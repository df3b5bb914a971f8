"""Quantisation: the loss under simulated quantisation of weights and activations, with and without the sink positions.

Activations at a sink position can be hundreds of times as large as those of other tokens. Tokens that share a scale
with them are then rounded to few steps, or to zero. Every setting is therefore evaluated twice: with all tokens
quantised, and with the sink positions in full precision and excluded from the scales.

Values are rounded to a grid and remain floating-point numbers. Integers:

    q(x) = s * clip(round(x / s), -m, m),  s = max |x| / m,  m = 2^(bits - 1) - 1         (symmetric)

fp8 is q(x) = s e4m3(x / s) with s = max |x| / 448, where e4m3 rounds to float8 (E4M3) and clips at 448. NVFP4 has
blocks of 16 values, each with a scale in float8, and a scale S for the whole tensor:

    q(x) = S b e2m1(x / (S b)),  b = e4m3(max |x of the block| / (6 S)),  S = max |x of the tensor| / (6 * 448)

e2m1 rounds to 0, 0.5, 1, 1.5, 2, 3, 4 and 6; b is at least the smallest normal float8, as in torchao.

The maximum is over the values x that share a scale: for activations, all calibration sequences (static; also S), one
sequence (dynamic) or one token; for weights, one output channel, or a group of 32 in its row. Rotated settings round
W Q and Q^T x instead of W and x, with Q a random Hadamard matrix (`rotated`), as QuaRot (2404.00456), which merges most
rotations into the weights. Only the linear layers of the blocks are quantised. Embedding, LM head, norms and the
products inside attention are not; SmoothQuant (2211.10438) also quantises the latter. Mixture-of-experts models are
refused: hooks cannot observe the inputs of the down projections if transformers fuses the experts into one tensor, and
separate experts process only some of the tokens.

Losses with rounded activations are means of several draws (`sinklab.assessing.reading`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.assessing.part import LOSS_ADDED, AssessPart, PartFigure, PartNumber, PartRow, TextSize, several
from sinklab.assessing.reading import ByPosition, Effect, PartInput, SinkCost, mean_of, perturbed, refused, sink_cost
from sinklab.assessing.settings import AssessSettings
from sinklab.errors import InputError
from sinklab.measuring.statistics.details import kurtosis
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, first_input, hooked, residual_stream, token_norms
from sinklab.schema import ReadDocument
from sinklab.tables import PlotAxis

INT8, INT4 = 8, 4
GROUP, FP4_BLOCK = 32, 16
E4M3, E4M3_MAX, E4M3_TINY = torch.float8_e4m3fn, 448.0, 2.0**-6  # the largest value, and the smallest normal one
E2M1_MAX = 6.0
Maxima = dict[nn.Module, Tensor]


@dataclass(frozen=True)
class Rounding:
    """Quantisation of weights and of activations; if `rotate` is True, both are rotated before rounding.

    Weights: int8 or fp8 per channel, int4 in groups of 32, nvfp4. Activations: int8 static or dynamic per tensor, int8
    or int4 per token, fp8 static per tensor, nvfp4, full.
    """

    weights: str
    activations: str
    rotate: bool = False


STATIC = "int8 static per tensor"
SETTINGS = {
    STATIC: Rounding("int8 per channel", "int8 static per tensor"),
    "int8 dynamic per tensor": Rounding("int8 per channel", "int8 dynamic per tensor"),
    "int8 per token": Rounding("int8 per channel", "int8 per token"),
    "int8 static per tensor, rotated": Rounding("int8 per channel", "int8 static per tensor", rotate=True),
    "fp8 static per tensor": Rounding("fp8 per channel", "fp8 static per tensor"),
    "int4 weights": Rounding("int4 in groups of 32", "full"),
    "int4 per token": Rounding("int4 in groups of 32", "int4 per token"),
    "int4 per token, rotated": Rounding("int4 in groups of 32", "int4 per token", rotate=True),
    "nvfp4": Rounding("nvfp4", "nvfp4"),
}
QUICK = (STATIC, "int8 per token", "fp8 static per tensor", "int4 weights")
"""Settings that are tried with --quick."""
CALIBRATED = 4  # maximum number of calibration sequences
DEVIATIONS = 6  # standard deviations from the mean beyond which a value is an outlier (2306.12929)


class Quantised(SinkCost):
    """Losses in one setting of quantisation.

    Attributes:
        name: name of the setting in SETTINGS.
        weights, activations, rotated: quantisation of weights and of activations, and whether both are rotated.
        everything: loss with all tokens quantised, mean over the draws.
        without_sink: loss with the sink positions in full precision and excluded from the scales, likewise.
    """

    name: str
    weights: str
    activations: str
    rotated: bool = False
    everything: Effect
    without_sink: Effect


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
    question = "Does the sink increase the loss of low-bit quantisation?"
    in_quick = True
    setting = "quantisation"
    numbers = (
        PartNumber("int8_added", "Static int8, added loss", ("Int8", "static, nats added")),
        PartNumber(
            "int8_due_to_sink", "Part of static int8's added loss that is due to the sink", ("of the sink", "of these")
        ),
    )
    layout = PartFigure(
        "Quantisation with and without the sink",
        "Loss added to {0.unchanged.loss:.3f} by simulated quantisation of all tokens, and with the first {0.spared} "
        "in full precision and excluded from the scales.",
        PlotAxis(LOSS_ADDED, "x", "nats per token"),
        PlotAxis("", "y", "setting"),
        kind="dots",
        reference=0.0,
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
    def text_size(cls, settings: AssessSettings) -> TextSize:
        return TextSize(settings.sequences, settings.length, others=min(settings.sequences, CALIBRATED))

    @property
    def spared(self) -> str:
        """Number of sink positions as text, such as `token` or `2 tokens`."""
        return several(self.sink_positions, "token")

    @classmethod
    def run(cls, given: PartInput) -> "Quantisation":
        """Measure the loss for the settings, with and without quantisation of the sink positions.

        Static scales are computed from the other sequences.
        """
        adapter, settings, reader = given.adapter, given.settings, given.reader()
        assert given.others_MT is not None, "see text_size"
        spared, maps = adapter.leading + settings.sink_tokens, linear_maps(adapter.blocks)
        tried = {name: one for name, one in SETTINGS.items() if name in QUICK or not settings.quick}
        draws = {name: 1 if one.activations == "full" else settings.sizes.draws for name, one in tried.items()}
        given.passes.expect(len(given.others_MT) + 2 * sum(draws.values()) * len(given.tokens_NT))
        rotations = sorted({one.rotate for one in tried.values()})
        cases = [(skipped, rotate) for skipped in (0, spared) for rotate in rotations]
        with evaluating(adapter.module), ExitStack() as stack:
            maxima = {case: stack.enter_context(watched_maxima(maps, *case)) for case in cases}
            for tokens_T in given.others_MT:
                adapter.hidden(tokens_T[None].to(adapter.device))
                given.passes.read(1)
        found = []
        for name, one in tried.items():
            with quantised_weights(maps, one) as exact:
                read: list[list[ByPosition]] = [[], []]
                for in_draws, skipped in zip(read, (0, spared), strict=True):
                    with quantised_inputs(maps, exact, one, maxima[skipped, one.rotate], skipped):
                        for draw in range(draws[name]):
                            with perturbed(adapter, draw, settings.seed):
                                in_draws.append(reader.under())
            found.append(
                Quantised(
                    name=name,
                    weights=one.weights,
                    activations=one.activations,
                    rotated=one.rotate,
                    everything=mean_of(read[0]).effect(),
                    without_sink=mean_of(read[1]).effect(),
                    **sink_cost(*read),
                )
            )
        outliers = outliers_by_block(adapter, given.tokens_NT)
        return cls(**reader.result_fields(), sink_positions=spared, settings=found, outliers=outliers)

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        for one in self.settings:
            static = one.name == STATIC
            numbers = ["int8_added"] if static else []
            found = (re.search(r"\d+", name) for name in (one.weights, one.activations))
            bits = sum(16 if bits is None else int(bits[0]) for bits in found)
            yield self.row(one.name, one.everything, one.due_said, answer=one.name, numbers=numbers, size=bits)
            if static:
                answer, words = "part of this loss due to the sink", "in static int8"
                yield self.cost_row(one, answer, "int8_due_to_sink", gained=words)

    def figure(self) -> PartFigure:
        points = [
            self.point(effect, series, self.added(effect), one.name)
            for one in self.settings
            for series, effect in (("all tokens", one.everything), ("sink in full precision", one.without_sink))
        ]
        return self.drawn(points, y=replace(self.layout.y, order=[one.name for one in self.settings]))


def outliers_by_block(adapter: Adapter, tokens_NT: Tensor) -> list[Outliers]:
    """Compute outlier statistics of the residual stream after each block, on the first sequence."""

    def statistics(x_BTC: Tensor) -> dict[str, Any]:
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

    with evaluating(adapter.module), residual_stream(adapter.blocks, statistics) as found:
        adapter.hidden(tokens_NT[:1].to(adapter.device))
    return [Outliers(layer=layer, **one) for layer, one in enumerate(found) if layer]


def on_grid(x: Tensor, bits: int, largest: Tensor) -> Tensor:
    """Round x to a symmetric grid of `bits` bits with maximum `largest`, which is broadcast to x."""
    steps = 2 ** (bits - 1) - 1
    scale = largest / steps
    scale = torch.where(scale > 0, scale, 1)
    return (x / scale).round().clamp(-steps, steps) * scale


def to_e4m3(x: Tensor, largest: Tensor) -> Tensor:
    """Round x to float8 (E4M3) with scale `largest` / 448, which is broadcast to x; larger values are clipped."""
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype) * scale


def to_nvfp4(x: Tensor, largest: Tensor) -> Tensor:
    """Round x to NVFP4 along its last axis, in blocks of 16 (see the module docstring).

    Args:
        largest: largest |x| of the tensor, a scalar.
    """
    width = x.shape[-1]
    blocks = F.pad(x, (0, -width % FP4_BLOCK)).unflatten(-1, (-1, FP4_BLOCK))
    whole = torch.where(largest > 0, largest / (E2M1_MAX * E4M3_MAX), 1)
    scale = (blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * whole)).clamp(E4M3_TINY, E4M3_MAX)
    scale = whole * scale.to(E4M3).to(x.dtype)
    z = (blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)
    spacing = 2 ** (z.abs().clamp(min=1).log2().floor() - 1)  # one bit of mantissa; 0.5 below 2
    return ((z / spacing).round() * spacing * scale).flatten(-2)[..., :width]


def rotated(x: Tensor) -> Tensor:
    """Multiply the last axis by an orthogonal matrix, the same for every x of this width.

    The matrix is diag(random signs) times a normalised Hadamard matrix in blocks of the largest power of two that
    divides the width.
    """
    return _hadamard(x * _signs(x))


def unrotated(y: Tensor) -> Tensor:
    """Invert `rotated`."""
    return _hadamard(y) * _signs(y)


def _signs(x: Tensor) -> Tensor:
    width = x.shape[-1]
    return (torch.randint(2, (width,), generator=torch.Generator().manual_seed(width)) * 2 - 1).to(x)


def _hadamard(x: Tensor) -> Tensor:
    size = x.shape[-1] & -x.shape[-1]
    y = x.unflatten(-1, (-1, size))
    step = 1
    while step < size:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return (y / size**0.5).flatten(-2)


def quantised_weight(weight_OI: Tensor, kind: str) -> Tensor:
    """Round a weight (O, I) with one scale per output channel, per group of at most 32 in a row, or as NVFP4."""
    largest_O1, width = weight_OI.abs().amax(1, keepdim=True), weight_OI.shape[1]
    if kind == "nvfp4":
        return to_nvfp4(weight_OI, largest_O1.amax())
    if kind != "int4 in groups of 32":
        return on_grid(weight_OI, INT8, largest_O1) if kind == "int8 per channel" else to_e4m3(weight_OI, largest_O1)
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
def watched_maxima(maps: Sequence[LinearMap], skipped: int, rotate: bool = False) -> Iterator[Maxima]:
    """Yield a dict that collects each layer's largest |x| of the inputs after the first `skipped` positions.

    Args:
        rotate: whether x are the rotated inputs.
    """
    found: Maxima = {}

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        rest = unflattened(args[0])[:, skipped:]
        if rest.numel():
            here = (rotated(rest) if rotate else rest).abs().amax()
            found[module] = torch.maximum(found[module], here) if module in found else here

    with _unflattening(maps) as unflattened, hooked(one.module.register_forward_pre_hook(entering) for one in maps):
        yield found


@contextmanager
def quantised_weights(maps: Sequence[LinearMap], setting: Rounding) -> Iterator[dict[nn.Module, Tensor]]:
    """Quantise the weights of the layers in the `with` block, and restore them on exit; yields the original weights."""
    exact = {one.module: one.weight.clone() for one in maps}
    try:
        for one in maps:
            one.weight.copy_(quantised_weight(rotated(one.weight) if setting.rotate else one.weight, setting.weights))
        yield exact
    finally:
        for one in maps:
            one.weight.copy_(exact[one.module])


@contextmanager
def quantised_inputs(
    maps: Sequence[LinearMap], weights: dict[nn.Module, Tensor], setting: Rounding, maxima: Maxima, spared: int
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
            rest_BTI = rotated(x_BTI[:, spared:]) if setting.rotate else x_BTI[:, spared:]
            rounded_BTI = _rounded_inputs(rest_BTI, setting.activations, largest)
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
        shape = first_input(args, kwargs).shape[:2]

    def unflattened(x: Tensor) -> Tensor:
        if x.ndim == 2 and len(x) != shape.numel():
            raise InputError("a linear layer of a block, such as an expert, processes only some of the tokens")
        return x.unflatten(0, shape) if x.ndim == 2 else x

    with hooked(one.block.register_forward_pre_hook(entering, with_kwargs=True) for one in maps[:1]):
        yield unflattened


def _rounded_inputs(x_BTI: Tensor, kind: str, largest: Tensor | None) -> Tensor:
    """Round activations; `largest` is that of the calibration, for static scales."""
    if kind == "full" or not x_BTI.numel():
        return x_BTI
    if kind in ("int8 per token", "int4 per token", "int8 dynamic per tensor"):  # a tensor is one sequence
        largest = x_BTI.abs().amax(2 if "token" in kind else (1, 2), keepdim=True)
    assert largest is not None, "static scales require the maxima of a calibration"
    if kind == "nvfp4":
        return to_nvfp4(x_BTI, largest)
    return to_e4m3(x_BTI, largest) if "fp8" in kind else on_grid(x_BTI, INT4 if "int4" in kind else INT8, largest)
