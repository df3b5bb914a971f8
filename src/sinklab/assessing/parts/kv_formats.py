"""KV formats: the loss with keys and values stored in the formats of inference servers, and the sink's part by layer.

x is the key, after RoPE, or the value of one token in one KV head, with D numbers:

    fp8                 e4m3(x), clipped at 448: vLLM's and SGLang's fp8 without calibrated scales
    fp8 per tensor      s e4m3(x / s), s = max |x| / 448 over all tokens and heads of a sequence
    fp8 per head        the same, s over all tokens of one head
    q8_0                s round(x / s), s = max |x| / 127 of 32 numbers (llama.cpp)
    q4_0                s (q - 8), q = min(15, trunc(x / s + 8.5)), s = m / -8, m the number of largest |x| of 32
    nvfp4               S b e2m1(x / (S b)) in blocks of 16 numbers (`quantisation.to_nvfp4`), S over a sequence
    turboquant keys     |x| times the unit vector whose rotation has been rounded (below), |x| in float16
    uniform values      l + s round((x - l) / s), l = min x, s = (max x - l) / (2^bits - 1), l and s in float16

Scales s of q8_0 and q4_0 are float16. Rotated formats round Q^T x, with Q a Hadamard matrix with random signs, and
rotate back; llama.cpp rotates keys, values and queries alike (#21038), which gives the same products. TurboQuant
(2504.19874) rounds sqrt(D) Q^T x / |x|, whose coordinates are nearly normal, to the nearest of the 2^bits Lloyd-Max
levels of the normal distribution; with norm correction (nc) the rounded vector is then scaled to unit length. The
presets are those of vLLM 0.23: k8v4 has fp8 keys and values of 4 bits; 4bit_nc, k3v4_nc and 3bit_nc have keys of 4, 3
and 3 bits and values of 4, 4 and 3 bits.

Every key and value is rounded, including the query's own. Every format is measured for keys alone, for values alone,
for both, and for both with the sink positions, the first n, in full precision and excluded from the scales:

    due_to_sink = loss(both rounded) - loss(both rounded except at the sink positions)                 nats per token

These losses are means of several draws (`sinklab.assessing.reading`). In addition each layer alone is stored in the
formats of `BY_LAYER`, in one draw. Its divergence with and without the sink positions shows whether a layer that is
costly to round is so because of the sink; vLLM leaves the first two and the last two layers unrounded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, several
from sinklab.assessing.parts.quantisation import E4M3, E4M3_MAX, rotated, to_e4m3, to_nvfp4, unrotated
from sinklab.assessing.reading import (
    ByPosition,
    Effect,
    PartInput,
    SinkCost,
    mean_of,
    perturbed,
    probe,
    refused,
    sink_cost,
)
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.models.adapter import Adapter
from sinklab.models.families import LATENT_WIDTH, text_config
from sinklab.tables import PlotAxis

BLOCK = 32  # numbers that share a scale in q8_0 and q4_0
Stored = Callable[[Tensor], Tensor]
"""Function from keys or values (B, G, S, D) to those that are read from the cache."""


def to_fp8(x: Tensor) -> Tensor:
    """Round x to float8 (E4M3) without a scale; larger values are clipped at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype)


def to_q8_0(x: Tensor) -> Tensor:
    """Round x to ggml's q8_0, in blocks of 32 along the last axis."""
    blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = _away_from_zero(blocks / torch.where(scale > 0, scale, 1)) * _half(scale)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def to_q4_0(x: Tensor) -> Tensor:
    """Round x to ggml's q4_0, in blocks of 32 along the last axis."""
    blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    levels = (blocks.double() / torch.where(scale == 0, 1, scale) + 8.5).trunc().clamp(0, 15)
    return ((levels - 8) * _half(scale)).to(x.dtype).flatten(-2)[..., : x.shape[-1]]


def uniform(x: Tensor, bits: int) -> Tensor:
    """Round every vector x to 2^bits equally spaced levels from its smallest to its largest number."""
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / (2**bits - 1)
    levels = ((x - low) / torch.where(scale > 0, scale, 1)).round()
    return _half(low) + levels * _half(scale)


@cache
def lloyd_max(bits: int) -> Tensor:
    """Return the 2^bits levels that minimise the mean squared error of a rounded standard normal variable, float64.

    They are the means of the normal distribution between the midpoints of neighbouring levels (Lloyd's iteration).
    """
    levels_C = torch.linspace(-2.5, 2.5, 2**bits, dtype=torch.float64)
    for _ in range(2_000):
        edges = F.pad((levels_C[1:] + levels_C[:-1]) / 2, (1, 1), value=math.inf)
        edges[0] = -math.inf
        density, mass = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi), torch.special.ndtr(edges)
        levels_C = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    return levels_C


def turboquant(x: Tensor, bits: int, correct_norm: bool = True) -> Tensor:
    """Round the direction of every vector x to Lloyd-Max levels after a rotation, and its norm to float16."""
    norm, width = x.norm(dim=-1, keepdim=True), x.shape[-1]
    levels_C = lloyd_max(bits).to(x)
    z = rotated(x / torch.where(norm > 0, norm, 1)) * width**0.5
    y = levels_C[torch.bucketize(z, (levels_C[1:] + levels_C[:-1]) / 2)]
    y = F.normalize(y, dim=-1) if correct_norm else y / width**0.5
    return unrotated(y) * _half(norm)


def _half(x: Tensor) -> Tensor:
    return x.half().to(x.dtype)


def _away_from_zero(x: Tensor) -> Tensor:
    """Round to the nearest integer; halves are rounded away from zero, as C's roundf does."""
    return x.sign() * (x.abs() + 0.5).floor()


def _per_tensor(x: Tensor) -> Tensor:
    return to_e4m3(x, x.abs().amax((1, 2, 3), keepdim=True))


def _per_head(x: Tensor) -> Tensor:
    return to_e4m3(x, x.abs().amax((2, 3), keepdim=True))


def _nvfp4(x: Tensor) -> Tensor:
    return torch.stack([to_nvfp4(one, one.abs().amax()) for one in x])


def _rotated(stored: Stored) -> Stored:
    return lambda x: unrotated(stored(rotated(x)))


@dataclass(frozen=True)
class Format:
    """A storage format of the KV cache.

    Attributes:
        keys, values: what is read from the cache for keys and values that were written to it.
        key_bits, value_bits: bits per number; `per_key`, `per_value`: further bits per vector.
    """

    keys: Stored
    values: Stored
    key_bits: float
    value_bits: float
    per_key: int = 0
    per_value: int = 0

    def bits(self, width: int) -> float:
        """Return bits per number, mean of keys and values of this width."""
        return (self.key_bits + self.value_bits + (self.per_key + self.per_value) / width) / 2


def _both(stored: Stored, bits: float) -> Format:
    return Format(stored, stored, bits, bits)


def _preset(keys: int, values: int) -> Format:
    return Format(partial(turboquant, bits=keys), partial(uniform, bits=values), keys, values, 16, 32)


FORMATS = {
    "fp8": _both(to_fp8, 8),
    "fp8 per tensor": _both(_per_tensor, 8),
    "fp8 per head": _both(_per_head, 8),
    "q8_0": _both(to_q8_0, 8.5),
    "q4_0": _both(to_q4_0, 4.5),
    "q4_0 rotated": _both(_rotated(to_q4_0), 4.5),
    "nvfp4": _both(_nvfp4, 4.5),
    "turboquant_k8v4": Format(to_fp8, partial(uniform, bits=4), 8, 4, 0, 32),
    "turboquant_4bit_nc": _preset(4, 4),
    "turboquant_k3v4_nc": _preset(3, 4),
    "turboquant_3bit_nc": _preset(3, 3),
}
BY_LAYER = ("q4_0", "turboquant_3bit_nc")


class StoredFormat(SinkCost):
    """Losses with the cache in one format, means over draws.

    Attributes:
        name: name of the format in FORMATS.
        bits: bits per number, scales included, mean of keys and values.
        keys, values: loss with only the keys, or only the values, in this format.
        everything: loss with both.
        without_sink: loss with both except at the sink positions, which are excluded from the scales.
    """

    name: str
    bits: float
    keys: Effect
    values: Effect
    everything: Effect
    without_sink: Effect


class StoredLayer(SinkCost):
    """Losses with the cache of one attention layer (1-based) in one format.

    Attributes:
        name: name of the format in FORMATS.
        everything, without_sink: loss and divergence, and the same except at the sink positions.
    """

    name: str
    layer: int
    everything: Effect
    without_sink: Effect

    @property
    def share(self) -> float:
        """Share of the layer's divergence that disappears without the sink positions; negative if it grows."""
        return 1 - self.without_sink.kl / self.everything.kl if self.everything.kl > 0 else 0.0


class KVFormats(AssessPart):
    """Loss with keys and values in the formats of servers.

    Attributes:
        sink_positions: number n of sink positions, including a learned sink token or registers.
        formats: losses by format.
        layers: losses of each layer alone, by format and layer; empty with --quick.
    """

    name = "kv_formats"
    question = "In which format can the KV cache be stored?"
    on_request = True
    setting = "KV format"
    numbers = (
        PartNumber("cache_q4_added", "KV cache in q4_0, added loss"),
        PartNumber("cache_q4_due_to_sink", "Part of q4_0's added loss that is due to the sink"),
    )
    layout = PartFigure(
        "Storing the KV cache of one layer",
        "Divergence from the unchanged model with the keys and values of one layer stored in a format, and the same "
        "with the first {0.spared} in full precision. The difference is due to the sink.",
        PlotAxis("Attention layer", "x", "layer"),
        PlotAxis("KL divergence (nats per token)", "y", "KL", scale="log"),
    )

    sink_positions: int
    formats: list[StoredFormat]
    layers: list[StoredLayer]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        text = text_config(adapter.module.config)
        if getattr(text, "latent", None) or getattr(text, LATENT_WIDTH, None):
            return "the KV cache contains latent vectors (MLA) instead of keys and values"
        return refused(adapter, StoredCache(FORMATS["q4_0"]))

    @classmethod
    def run(cls, given: PartInput) -> "KVFormats":
        """Measure the loss in every format, and without `quick` with each layer alone in the formats of BY_LAYER."""
        adapter, settings, reader = given.adapter, given.settings, given.reader()
        spared, draws = adapter.leading + settings.sink_tokens, settings.sizes.draws
        layers = probe(adapter)
        width = layers[0].call.k_BGTD.shape[-1]
        alone = [] if settings.quick else layers
        passes = 4 * draws * len(FORMATS) + 2 * len(BY_LAYER) * len(alone)
        given.passes.expect(passes * len(given.tokens_NT))

        def drawn(change: StoredCache) -> list[ByPosition]:
            read = []
            for draw in range(draws):
                with perturbed(adapter, draw, settings.seed):
                    read.append(reader.under(change))
            return read

        formats = []
        for name, stored in FORMATS.items():
            both, rest = drawn(StoredCache(stored)), drawn(StoredCache(stored, spared))
            formats.append(
                StoredFormat(
                    name=name,
                    bits=stored.bits(width),
                    keys=mean_of(drawn(StoredCache(stored, values=False))).effect(),
                    values=mean_of(drawn(StoredCache(stored, keys=False))).effect(),
                    everything=mean_of(both).effect(),
                    without_sink=mean_of(rest).effect(),
                    **sink_cost(both, rest),
                )
            )
        by_layer = []
        for name in BY_LAYER:
            for one in alone:
                change = StoredCache(FORMATS[name], layer=one.index)
                both, rest = reader.under(change), reader.under(replace(change, spared=spared))
                effects = {"everything": both.effect(), "without_sink": rest.effect()}
                by_layer.append(StoredLayer(name=name, layer=one.index, **effects, **sink_cost([both], [rest])))
        return cls(**reader.result_fields(), sink_positions=spared, formats=formats, layers=by_layer)

    @property
    def spared(self) -> str:
        """Number of sink positions as text, such as `token` or `2 tokens`."""
        return several(self.sink_positions, "token")

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        for one in self.formats:
            what, q4_0 = f"{one.name}, {one.bits:.2f} bits", one.name == "q4_0"
            numbers = ["cache_q4_added"] if q4_0 else []
            answer = f"keys and values in {what}"
            yield self.row(what, one.everything, one.due_said, answer=answer, numbers=numbers, size=one.bits)
            yield self.row(f"{one.name}, keys only", one.keys)
            yield self.row(f"{one.name}, values only", one.values)
            yield self.row(f"{one.name}, first {self.spared} in full precision", one.without_sink)
            if q4_0:
                yield self.cost_row(one, "part of the loss in q4_0 due to the sink", "cache_q4_due_to_sink")
        for one in self.layers:
            series = (f"{one.name}", f"{one.name}, first {self.spared} exact")
            more = f"KL {one.everything.kl:.2e}, {one.share:.0%} of it due to the sink; {one.due_said}"
            points = [(series[0], one.layer)]
            yield self.row(f"{one.name} in layer {one.layer} only", one.everything, more, points=points)
            yield replace(self.row("", one.without_sink), points=[(series[1], one.layer)])

    def point(self, effect: Effect, series: str, x: object, y: object = None) -> dict[str, object]:
        return super().point(effect, series, x, effect.kl)

    def remark(self) -> str:
        if not self.layers:
            return ""
        named = []
        for name in BY_LAYER:
            costliest = sorted((one for one in self.layers if one.name == name), key=lambda one: -one.everything.kl)[:3]
            layers = ", ".join(f"{one.layer} ({one.share:.0%} due to the sink)" for one in costliest)
            named.append(f"costliest layers in {name}: {layers}")
        return f"kv_formats: {'; '.join(named)}"


@dataclass(frozen=True)
class StoredCache:
    """Attention edit that reads keys and values from a cache in a format.

    Attributes:
        spared: number of first positions in full precision and excluded from the scales.
        keys, values: whether keys and values are stored in the format.
        layer: the only attention layer whose cache is in the format (1-based); None for all.
    """

    stored: Format
    spared: int = 0
    keys: bool = True
    values: bool = True
    layer: int | None = None

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with stored keys and values."""
        if self.layer is not None and layer.index != self.layer:
            return layer
        if self.keys:
            layer = layer.changed(k_BGTD=self._read(self.stored.keys, layer.call.k_BGTD))
        return replace(layer, value_BGSV=self._read(self.stored.values, layer.value_BGSV)) if self.values else layer

    def _read(self, stored: Stored, x_BGSD: Tensor) -> Tensor:
        rest = x_BGSD[:, :, self.spared :]
        return (
            torch.cat((x_BGSD[:, :, : self.spared], stored(rest.float()).to(rest.dtype)), 2) if rest.numel() else x_BGSD
        )
