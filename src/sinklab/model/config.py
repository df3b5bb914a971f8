"""The model part of a recipe: sizes, and a discriminated choice for each exchangeable part."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from sinklab.attention.biases import Bias
from sinklab.attention.config import AttentionConfig, AttentionMask
from sinklab.model.gate import Gate, NoGate
from sinklab.model.latent import FullProjection, LatentProjection, LatentSizes, Projection
from sinklab.model.mixer import AttentionOnly, DeltaMixer, Mixer
from sinklab.model.norm import NormConfig
from sinklab.model.position import Distance, Position, Rotary
from sinklab.model.values import NoValueResidual, ValueResidual
from sinklab.schema import LARGEST, Part


class DeclaredInit(Part):
    """The paper's: linear and embedding weights normal with std sqrt(2 / (5 d_in)), feed-forward outputs smaller."""

    kind: Literal["declared"] = "declared"


class TorchInit(Part):
    """PyTorch's defaults: linear weights uniform in +-1 / sqrt(d_in), embeddings normal with std 1."""

    kind: Literal["torch"] = "torch"


Init = Annotated[DeclaredInit | TorchInit, Field(discriminator="kind")]


def linear_gain(init: Init) -> float:
    """d_in times the variance that linear weights start with: the mean square that a map gives an input's."""
    return 2 / 5 if init.kind == "declared" else 1 / 3


class Pattern(Part):
    """Layers first, first + every, .. have a mask, bias or position of their own, the others those of the model.

    Gemma 3 has a causal mask and another theta in every sixth layer and windows in the others, MiMo-V2-Flash also sink
    logits in the windows alone, SmolLM3 no position in every fourth layer.
    """

    every: int = Field(ge=1, description="layers for one of its own, counted from the first layer on")
    first: int | None = Field(default=None, ge=1, description="the first such layer, from 1; null: layer `every`")
    mask: AttentionMask | None = Field(default=None, description="of these layers; null: model.attention.mask")
    bias: Bias | None = Field(default=None, description="of these layers, no sink_token; null: model.attention.bias")
    position: Position | None = Field(default=None, description="of these layers, not absolute; null: model.position")

    def has(self, layer: int) -> bool:
        """Whether layer `layer`, from 1, is one of them."""
        beyond = layer - (self.first or self.every)
        return beyond >= 0 and beyond % self.every == 0


class ModelConfig(Part):
    """A LLaMA-style decoder. The defaults are the 60M model of 2410.10781."""

    layers: int = Field(default=10, ge=1, le=10_000)
    width: int = Field(default=768, ge=1, le=LARGEST, description="of the residual stream")
    heads: int = Field(default=8, ge=1, description="attention heads, each of width / heads")
    kv_heads: int | None = Field(default=None, ge=1, description="fewer than heads: grouped-query attention")
    ffn_width: int = Field(default=1536, ge=1, le=LARGEST)
    vocab_size: int | None = Field(default=None, ge=2, le=LARGEST, description="default: the tokenizer's")
    context: int = Field(default=2048, ge=2, le=LARGEST, description="tokens of a training sequence")
    position: Position = Rotary()
    embedding: Literal["plain", "projected"] = Field(
        default="plain",
        description="projected: embeddings and the input of the head each go through a matrix of width x width",
    )
    norm: NormConfig = NormConfig()
    ffn: Literal["relu", "gelu", "swish", "reglu", "geglu", "swiglu"] = Field(
        default="swiglu", description="act(x W) V; those ending in glu: (act(x W) * x U) V"
    )
    mixer: Mixer = AttentionOnly()
    pattern: Pattern | None = Field(
        default=None, description="layers whose mask, bias or position differ; null: all layers are alike"
    )
    projection: Projection = FullProjection()
    attention: AttentionConfig = AttentionConfig()
    gate: Gate = NoGate()
    head_outputs: Literal["concat", "sum"] = Field(
        default="concat", description="concat: [o_1 .. o_H] W; sum: (o_1 + .. + o_H) W with W of head width x width"
    )
    exclusive: bool = Field(
        default=False, description="exclusive self-attention: o_t - (o_t.v_t) v_t / |v_t|^2, without the own value"
    )
    value_residual: ValueResidual = NoValueResidual()
    init: Init = DeclaredInit()
    init_from: str | None = Field(
        default=None, min_length=1, description="a Llama (directory, .gguf file, name on the hub) or a run: its weights"
    )
    init_sha256: str | None = Field(default=None, description="of those weights; a run sets it")

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers, from 1, of the layers that have attention."""
        layers = range(1, self.layers + 1)
        if isinstance(self.mixer, DeltaMixer):
            return tuple(layer for layer in layers if self.mixer.has_attention(layer, self.layers))
        return tuple(layers)

    @property
    def layer_kinds(self) -> tuple["ModelConfig", ...]:
        """The different configs of its attention layers: one, or two under a pattern."""
        if self.pattern is None:
            return (self,)
        first_of = {self.pattern.has(layer): layer for layer in reversed(self.attention_layers)}
        return tuple(self.of_layer(layer) for layer in sorted(first_of.values()))

    def of_layer(self, layer: int) -> "ModelConfig":
        """The config of a model all of whose layers are as layer `layer`, from 1."""
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
        """The position that acts on the scores, of all layers or of some; None without."""
        found = (kind.position for kind in self.layer_kinds if isinstance(kind.position, Distance))
        return next(found, None)

    @property
    def latent(self) -> LatentSizes | None:
        """Widths of a latent projection; None of a full one."""
        return self.projection.sizes(self.head_width) if isinstance(self.projection, LatentProjection) else None

    @property
    def query_width(self) -> int:
        """Width of a query and a key of one head in the call of attention."""
        return self.head_width if self.latent is None else self.latent.nope + self.latent.rope

    @property
    def value_width(self) -> int:
        """Width of a value and of the output of one head."""
        return self.head_width if self.latent is None else self.latent.value

    @property
    def shared_tokens(self) -> int:
        """Number of tokens at the start that every query sees, also earlier queries: a prefix mask's length, else 1."""
        masks = (kind.attention.mask for kind in self.layer_kinds)
        return max(mask.length if mask.kind == "prefix" else 1 for mask in masks)

    @property
    def first_target(self) -> int:
        """Position, 1-based, of the first token that is predicted: tokens that all queries see are not."""
        return self.shared_tokens + 1

    @property
    def key_width(self) -> int:
        """Width of a query and its keys: the head's, or half of it where the operation halves heads."""
        return self.query_width // self.attention.operation.keys_per_head

    @property
    def rotary_width(self) -> int:
        """How many of the numbers of a query or key are rotated: the first, or the last with a latent projection."""
        width = self.key_width if self.latent is None else self.latent.rope
        return round(width * self.position.share) if isinstance(self.position, Rotary) else width

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.position.kind == "absolute" and self.width % 2:
            raise ValueError(f"absolute positions need an even width for sine and cosine, not {self.width}")
        if self.first_target > self.context + 1:
            raise ValueError(
                f"mask.length {self.first_target - 1} is above context {self.context}: a chunk has one token "
                "more than the context, and none of them would be predicted"
            )
        self._check_latent()
        self._check_mixer()
        self._check_share()
        self.attention.check_fit(self.query_width, self.position.kind in ("relative", "t5", "alibi"))
        if self.latent is None and self.position.kind == "rotary" and self.key_width % 2:
            name = self.attention.operation.kind
            halved = f" and {name} halves it" if self.key_width != self.head_width else ""
            raise ValueError(
                f"rotary rotates pairs and needs an even width of keys: width / heads = {self.head_width}{halved}"
            )
        self._check_pattern()
        return self

    def _check_share(self) -> None:
        """Refuse a share of the channels that rotary cannot rotate."""
        if not isinstance(self.position, Rotary) or self.position.share == 1:
            return
        if self.latent is not None:
            raise ValueError(
                f"position.share {self.position.share:g}: projection latent rotates a part of its own; leave share "
                "out, and set projection.rope_width"
            )
        rotated = self.key_width * self.position.share
        if round(rotated) % 2 or not round(rotated) > 0 or abs(rotated - round(rotated)) > 1e-6:
            raise ValueError(
                f"position.share {self.position.share:g} of the {self.key_width} numbers of a key is {rotated:g}, and "
                f"rotary rotates pairs: give a multiple of {2 / self.key_width:g}"
            )

    def _check_pattern(self) -> None:
        """Refuse a pattern that has no layer or no difference, differences of what layers share, and what no model
        could have in all its layers."""
        own = self.pattern
        if own is None:
            return
        if own.mask is own.bias is own.position is None:
            raise ValueError("pattern changes nothing: give the mask, bias or position of its layers")
        if not (layers := [layer for layer in self.attention_layers if own.has(layer)]):
            raise ValueError(
                f"pattern begins at layer {own.first or own.every}, and no layer from there on is one of its own: the "
                f"layers with attention are {', '.join(map(str, self.attention_layers))}"
            )
        if own.bias is not None and (own.bias.leading or self.attention.bias.leading):
            raise ValueError(
                "pattern.bias: a sink token precedes the sequence and is in every layer; leave pattern.bias out, or "
                "use other biases such as sink_logit"
            )
        if own.position is not None:
            self._check_positions(own.position)
        masks = [mask for mask in (own.mask, self.attention.mask) if mask is not None and mask.kind == "document"]
        if len({mask.eos_id for mask in masks}) > 1:
            raise ValueError(
                f"pattern.mask.eos_id {masks[0].eos_id} and attention.mask.eos_id {masks[1].eos_id} differ, and a "
                "sequence has the same documents in every layer: give one"
            )
        try:
            ModelConfig.model_validate(self.of_layer(layers[0]).model_dump())
        except ValidationError as error:
            reasons = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
            raise ValueError(f"the layers of pattern: {'; '.join(reasons)}") from error

    def _check_positions(self, position: Position) -> None:
        """Refuse positions of the layers of a pattern that cannot differ from those of the others."""
        for one in (position, self.position):
            if one.kind in ("absolute", "learnable") and position != self.position:
                raise ValueError(
                    f"pattern.position is {position.kind} and position is {self.position.kind}: {one.kind} positions "
                    "are added to the embeddings, which all layers read; use rotary, relative, t5, alibi or none"
                )
        if isinstance(position, Distance) and isinstance(self.position, Distance) and position != self.position:
            raise ValueError(
                f"pattern.position {position.kind} and position {self.position.kind} differ, and all layers share one "
                "term of the distance: use the same values, or rotary or none for one of the two"
            )

    def _check_mixer(self) -> None:
        """Refuse combinations that linear layers cannot have."""
        if not isinstance(self.mixer, DeltaMixer):
            return
        heads = self.mixer.heads or self.heads
        if heads % (self.mixer.key_heads or heads):
            raise ValueError(
                f"mixer.heads {heads} is not a multiple of mixer.key_heads {self.mixer.key_heads}: make it one, or "
                "leave key_heads out"
            )
        if not isinstance(self.value_residual, NoValueResidual) and 1 not in self.attention_layers:
            raise ValueError(
                "value_residual mixes the first layer's values into later ones, and the first layer of mixer "
                f"{self.mixer.kind} has a state and no values to mix: use one of the two"
            )
        if self.attention.mask.kind == "document" and len(self.attention_layers) < self.layers:
            raise ValueError(
                "attention.mask document keeps documents apart, and the linear layers of mixer "
                f"{self.mixer.kind} carry their state from one to the next: use another mask"
            )

    def _check_latent(self) -> None:
        """Refuse combinations that a latent projection cannot have."""
        if self.latent is None:
            return
        if self.key_heads != self.heads:
            raise ValueError(
                f"projection latent makes a key and a value for every head of one latent, and kv_heads {self.kv_heads} "
                "has heads share them: use one of the two"
            )
        if self.norm.qk_norm:
            raise ValueError(
                "norm.qk_norm norms every key over its width, so that heads would no longer share the rotated part of "
                "projection latent, which norms its latents instead: leave it out"
            )
        if self.attention.operation.queries_per_head != 1:
            raise ValueError(
                f"attention.operation {self.attention.operation.kind} has two queries for every head, and projection "
                "latent makes one: use projection full"
            )
        if self.attention.operation.keys_per_head != 1:
            raise ValueError(
                f"attention.operation {self.attention.operation.kind} cuts queries and keys in halves, and those of "
                "projection latent have a rotated part and another: use projection full"
            )
        if self.position.kind == "rotary" and self.latent.rope % 2:
            raise ValueError(f"rotary rotates pairs and needs an even projection.rope_width, not {self.latent.rope}")
