"""Model section of a recipe: the sizes, and a choice for each component that can be replaced.

Initialisation of all weights by one of two schemes (`model.init`).

tensor, d_in its last dimension              declared                            torch
linear weights, convolutions, value gates    normal, std sqrt(2 / (5 d_in))      uniform in +-1 / sqrt(d_in)
output projection of each feed-forward       normal, std 1 / (sqrt(d_in) layers) uniform in +-1 / sqrt(d_in)
token embedding, learned positions           normal, std sqrt(2 / (5 d_in))      normal, std 1
T5 bias table                                normal, std 0.02                    normal, std 1
bias of a value gate                         zero                                uniform in +-1 / sqrt(d)

In both schemes, learned tokens and the learned keys, values and logits of attention biases are normal with std 0.02.
Norms have weight one and bias zero. The slope of dynamic tanh is `norm.alpha`. A module may set the mean and std of its
parameters in its attribute `initial`, as biases with `start` and attention operations do. Its attribute `starts` may
contain functions that initialise its parameters.

`declared` is the scheme of the paper (2410.10781) and its code. `torch` is PyTorch's `reset_parameters` of nn.Linear
(kaiming_uniform with a = sqrt(5)) and nn.Embedding. The published models probably used `torch`: with several devices,
the library pinned by the paper's code discards the declared weights. PyTorch has no scheme for the T5 bias table,
learned positions and the value gate. The two tables are treated like nn.Embedding, and the value gate like nn.Linear
with d_in equal to d, the dimension of a value.

q, k and v are one matrix here, and so are both halves of a gated feed-forward network. d_in is the same as for separate
matrices.
"""

import hashlib
import math
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import nn

from sinklab.attention.biases import Bias
from sinklab.attention.config import AttentionConfig, AttentionMask
from sinklab.model.mixer import AttentionOnly, DeltaMixer, Mixer
from sinklab.model.norm import NormConfig
from sinklab.model.position import Distance, Position, Rotary
from sinklab.model.values import (
    FullProjection,
    Gate,
    HeadGate,
    LatentProjection,
    LatentSizes,
    NoGate,
    NoValueResidual,
    Projection,
    ValueResidual,
)
from sinklab.schema import LARGEST, Part


class DeclaredInit(Part):
    """Scheme of 2410.10781: normal, std sqrt(2 / (5 d_in)), for feed-forward output weights 1 / (sqrt(d_in) layers)."""

    kind: Literal["declared"] = "declared"


class TorchInit(Part):
    """PyTorch's default scheme: linear weights uniform in +-1 / sqrt(d_in), embeddings normal with std 1."""

    kind: Literal["torch"] = "torch"


Init = Annotated[DeclaredInit | TorchInit, Field(discriminator="kind")]


class Pattern(Part):
    """Layer pattern: layers `first`, `first + every`, .. have a different mask, bias or positional embedding.

    Examples: Gemma 3 has a causal mask and a different RoPE theta in every sixth layer and sliding windows in the
    others; MiMo-V2-Flash also has sink logits in the window layers only; SmolLM3 has no RoPE in every fourth layer.
    """

    every: int = Field(ge=1, description="period of the pattern, in layers")
    first: int | None = Field(default=None, ge=1, description="first pattern layer, 1-based; null: layer `every`")
    mask: AttentionMask | None = Field(default=None, description="mask of pattern layers; null: model.attention.mask")
    bias: Bias | None = Field(
        default=None, description="bias of pattern layers, other than sink_token; null: model.attention.bias"
    )
    position: Position | None = Field(
        default=None,
        description="position of pattern layers, other than absolute and learnable; null: model.position",
    )

    def has(self, layer: int) -> bool:
        """Return True if layer `layer` (1-based) is a pattern layer."""
        beyond = layer - (self.first or self.every)
        return beyond >= 0 and beyond % self.every == 0


class ModelConfig(Part):
    """LLaMA-style decoder. The defaults are the 60M model of 2410.10781."""

    layers: int = Field(default=10, ge=1, le=10_000)
    width: int = Field(default=768, ge=1, le=LARGEST, description="hidden size")
    heads: int = Field(default=8, ge=1, description="number of query heads; the head width is width / heads")
    kv_heads: int | None = Field(default=None, ge=1, description="number of KV heads; null: heads")
    ffn_width: int = Field(default=1536, ge=1, le=LARGEST)
    vocab_size: int | None = Field(default=None, ge=2, le=LARGEST, description="vocabulary size; null: the tokenizer's")
    context: int = Field(default=2048, ge=2, le=LARGEST, description="training sequence length, in input tokens")
    position: Position = Rotary()
    embedding: Literal["plain", "projected"] = Field(
        default="plain",
        description="projected: token embeddings and the LM head input are each multiplied by a width x width matrix",
    )
    norm: NormConfig = NormConfig()
    ffn: Literal["relu", "gelu", "swish", "reglu", "geglu", "swiglu"] = Field(
        default="swiglu",
        description="feed-forward network act(x W) V, or (act(x W) * x U) V for kinds that end in glu",
    )
    mixer: Mixer = AttentionOnly()
    pattern: Pattern | None = Field(
        default=None, description="layers with a different mask, bias or position; null: none"
    )
    projection: Projection = FullProjection()
    attention: AttentionConfig = AttentionConfig()
    gate: Gate = NoGate()
    head_outputs: Literal["concat", "sum"] = Field(
        default="concat", description="concat: [o_1 .. o_H] W; sum: (o_1 + .. + o_H) W with W of head width x width"
    )
    exclusive: bool = Field(
        default=False,
        description="exclusive self-attention: remove the component of o_t along v_t, o_t - (o_t.v_t) v_t / |v_t|^2",
    )
    value_residual: ValueResidual = NoValueResidual()
    init: Init = DeclaredInit()
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="initial weights: directory of a run; or a Llama or an exported run (directory, .gguf file or name "
        "on the Hub); null: random",
    )
    init_sha256: str | None = Field(default=None, description="SHA-256 of the weights of init_from; set by the run")

    @property
    def key_heads(self) -> int:
        """Number of KV heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Hidden size divided by query heads: the head dimension unless a latent projection sets other dimensions."""
        return self.width // self.heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """1-based indices of the layers that have attention."""
        every = self.mixer.every if isinstance(self.mixer, DeltaMixer) else 1
        return tuple(layer for layer in range(1, self.layers + 1) if (self.layers - layer) % every == 0)

    @property
    def layer_kinds(self) -> tuple["ModelConfig", ...]:
        """Distinct configs of the attention layers, in layer order: two if only some are pattern layers, else one."""
        if self.pattern is None:
            return (self,)
        first_of = {self.pattern.has(layer): layer for layer in reversed(self.attention_layers)}
        return tuple(self.of_layer(layer) for layer in sorted(first_of.values()))

    def of_layer(self, layer: int) -> "ModelConfig":
        """Return the config of a model without pattern in which every layer is like layer `layer` (1-based)."""
        own = self.pattern
        if own is None:
            return self
        alike: dict[str, object] = {"pattern": None}
        if own.has(layer):
            given = {"mask": own.mask, "bias": own.bias}
            changed = {key: value for key, value in given.items() if value is not None}
            alike["attention"] = self.attention.model_copy(update=changed)
            alike["position"] = own.position or self.position
        return self.model_copy(update=alike)

    @property
    def distance(self) -> Distance | None:
        """Relative position bias (relative, t5, alibi) that some or all attention layers have; None without one."""
        found = (kind.position for kind in self.layer_kinds if isinstance(kind.position, Distance))
        return next(found, None)

    @property
    def latent(self) -> LatentSizes | None:
        """Sizes of the latent projection (MLA); None for full projections."""
        return self.projection.sizes(self.head_width) if isinstance(self.projection, LatentProjection) else None

    @property
    def query_width(self) -> int:
        """Dimension of a head's query or key before an operation splits it into several (`key_width`)."""
        return self.head_width if self.latent is None else self.latent.nope + self.latent.rope

    @property
    def value_width(self) -> int:
        """Dimension of a head's values and output."""
        return self.head_width if self.latent is None else self.latent.value

    @property
    def shared_tokens(self) -> int:
        """Largest `length` of the attention layers' prefix masks; 1 without a prefix mask."""
        masks = (kind.attention.mask for kind in self.layer_kinds)
        return max(mask.length if mask.kind == "prefix" else 1 for mask in masks)

    @property
    def first_target(self) -> int:
        """1-based position of the first target: 2, or the first position after the prefix of a prefix mask."""
        return self.shared_tokens + 1

    @property
    def key_width(self) -> int:
        """Dimension of one query or key: `query_width`, or half of it for operations that split heads."""
        return self.query_width // self.attention.operation.keys_per_head

    @property
    def rotary_width(self) -> int:
        """Number of channels of a query or key that RoPE rotates.

        They are the first channels, or the last ones with a latent projection.
        """
        width = self.key_width if self.latent is None else self.latent.rope
        return round(width * self.position.share) if isinstance(self.position, Rotary) else width

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}: change one of them")
        if self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: change one of them")
        if self.position.kind == "absolute" and self.width % 2:
            raise ValueError(f"absolute positions need as many sines as cosines: use an even width, not {self.width}")
        if self.shared_tokens > self.context:
            raise ValueError(
                f"the prefix mask's length {self.shared_tokens} is above context {self.context}: reduce "
                "the length, because no targets are left"
            )
        if isinstance(self.gate, HeadGate) and (self.gate.channels or 0) > self.width:
            raise ValueError(f"gate.channels {self.gate.channels} exceeds width {self.width}: reduce it")
        self._check_latent()
        self._check_mixer()
        self.attention.check_fit(self.query_width, isinstance(self.position, Distance))
        if isinstance(self.position, Rotary) and self.latent is None:
            self._check_rotary(self.position.share)
        self._check_pattern()
        return self

    def _check_rotary(self, share: float) -> None:
        rotated, name = self.key_width * share, self.attention.operation.kind
        if self.key_width % 2:
            halved = f" and {name} halves it" if self.key_width != self.head_width else ""
            raise ValueError(
                f"rotary rotates pairs of channels and needs an even key width, but width / heads is {self.head_width}"
                f"{halved}: change width or heads"
            )
        if round(rotated) % 2 or not round(rotated) > 0 or abs(rotated - round(rotated)) > 1e-6:
            raise ValueError(
                f"position.share {share:g} of the {self.key_width} channels of a key is {rotated:g}, and rotary "
                f"rotates pairs: use a multiple of {2 / self.key_width:g}"
            )

    def _check_pattern(self) -> None:
        own = self.pattern
        if own is None:
            return
        if own.mask is own.bias is own.position is None:
            raise ValueError("pattern changes nothing: set the mask, bias or position of its layers")
        if not (layers := [layer for layer in self.attention_layers if own.has(layer)]):
            raise ValueError(
                f"pattern begins at layer {own.first or own.every} and contains no attention layer: the "
                f"layers with attention are {', '.join(map(str, self.attention_layers))}"
            )
        if own.bias is not None and (own.bias.leading or self.attention.bias.leading):
            raise ValueError("pattern.bias: a sink token is part of the sequence in every layer; use another bias")
        both = (own.position or self.position, self.position)
        if both[0] != both[1]:
            if added := [one.kind for one in both if one.kind in ("absolute", "learnable")]:
                raise ValueError(f"{added[0]} positions are added to the token embeddings: leave pattern.position out")
            if all(isinstance(one, Distance) for one in both):
                raise ValueError("pattern.position and position differ: all layers share one relative position bias")
        ids = {mask.eos_id for mask in (own.mask, self.attention.mask) if mask is not None and mask.kind == "document"}
        if len(ids) > 1:
            raise ValueError("pattern.mask.eos_id and attention.mask.eos_id differ: all layers have the same documents")
        try:
            ModelConfig.model_validate(self.of_layer(layers[0]).model_dump())
        except ValidationError as error:
            reasons = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
            raise ValueError(f"pattern gives its layers an invalid config: {'; '.join(reasons)}") from error

    def _check_mixer(self) -> None:
        if not isinstance(self.mixer, DeltaMixer):
            return
        heads = self.mixer.heads or self.heads
        if heads % (self.mixer.key_heads or heads):
            raise ValueError(
                f"mixer.heads {heads} is not a multiple of mixer.key_heads {self.mixer.key_heads}: change one of them, "
                "or leave key_heads out"
            )
        if not isinstance(self.value_residual, NoValueResidual) and 1 not in self.attention_layers:
            raise ValueError(f"value_residual: the first layer of mixer {self.mixer.kind} has no attention values")
        if self.attention.mask.kind == "document" and len(self.attention_layers) < self.layers:
            raise ValueError(
                "attention.mask document separates documents, but the linear layers of mixer "
                f"{self.mixer.kind} carry their state from one document to the next: use another mask"
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        operation = self.attention.operation
        if self.key_heads != self.heads:
            raise ValueError("projection latent has separate keys and values for every head: leave kv_heads out")
        if self.norm.qk_norm:
            raise ValueError("projection latent normalises its latents instead of each head's key: leave qk_norm out")
        if operation.keys_per_head * operation.queries_per_head != 1:
            raise ValueError(
                f"projection latent has one query and key per head, but operation {operation.kind} needs two: use "
                "another operation or projection full"
            )
        if isinstance(self.position, Rotary) and self.position.share != 1:
            raise ValueError("projection latent: leave position.share out, and set projection.rope_width")
        if self.position.kind == "rotary" and self.latent.rope % 2:
            raise ValueError(
                f"rotary rotates pairs of channels: use an even projection.rope_width, not {self.latent.rope}"
            )


SMALL = 0.02  # std of attention biases and sink token in the paper
TABLES = ("embedding.weight", "position_table", "distance.weight")


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise all weights of a transformer, in place, by the scheme of `config.init`.

    Each tensor has its own random generator, seeded by `seed` and the tensor's name. If an intervention adds a tensor,
    all other tensors are therefore identical to the baseline. Tensors on the meta device are skipped.
    """
    for name, tensor in model.named_parameters():
        if tensor.is_meta:
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        stream = torch.Generator(device=tensor.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        owner, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if leaf in (starts := getattr(module, "starts", {})):
            starts[leaf](tensor, stream)
        elif law := getattr(module, "initial", {}).get(leaf) or _mean_and_std(name, tensor.shape[-1], config):
            tensor.normal_(*law, generator=stream)
        else:
            bound = 1 / math.sqrt(config.value_width if name.endswith("gate.bias") else tensor.shape[-1])
            tensor.uniform_(-bound, bound, generator=stream)


def _mean_and_std(name: str, d_in: int, config: ModelConfig) -> tuple[float, float] | None:
    """Return mean and std of a normally distributed tensor (std 0: constant); None for a uniformly distributed one."""
    declared = config.init.kind == "declared"
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    if name.endswith("norm.alpha"):
        return config.norm.alpha, 0.0
    if name.endswith("norm.bias") or (declared and name.endswith("gate.bias")):
        return 0.0, 0.0
    if ".bias." in name or name == "sink_token" or (declared and name == "distance.weight"):
        return 0.0, SMALL
    if declared:
        last = name.endswith("ffn.down.weight")
        return 0.0, 1 / (math.sqrt(d_in) * config.layers) if last else math.sqrt(2 / (5 * d_in))
    return (0.0, 1.0) if name in TABLES else None
