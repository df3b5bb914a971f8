"""The model part of a recipe: sizes, and one discriminated choice for each thing that can be exchanged."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sinklab.attention.config import AttentionConfig
from sinklab.model.gate import Gate, NoGate
from sinklab.model.norm import NormConfig
from sinklab.model.position import Position, Rotary
from sinklab.model.value_residual import NoValueResidual, ValueResidual
from sinklab.schema import LARGEST, Part


class DeclaredInit(Part):
    """The paper's: linear and embedding weights normal with std sqrt(2 / (5 d_in)), feed-forward outputs smaller."""

    kind: Literal["declared"] = "declared"


class TorchInit(Part):
    """PyTorch's defaults: linear weights uniform in +-1 / sqrt(d_in), embeddings normal with std 1."""

    kind: Literal["torch"] = "torch"


Init = Annotated[DeclaredInit | TorchInit, Field(discriminator="kind")]


class ModelConfig(Part):
    """A LLaMA-style decoder. The defaults are the 60M model of 2410.10781."""

    layers: int = Field(default=10, ge=1, le=10_000)
    width: int = Field(default=768, ge=1, le=LARGEST, description="of the residual stream")
    heads: int = Field(default=8, ge=1, description="attention heads, each of width / heads")
    kv_heads: int | None = Field(default=None, ge=1, description="fewer than heads: grouped-query attention")
    ffn_width: int = Field(default=1536, ge=1, le=LARGEST)
    vocab_size: int | None = Field(default=None, ge=2, le=LARGEST, description="default: the tokenizer's")
    context: int = Field(default=2048, ge=2, le=LARGEST, description="tokens a training sequence has")
    position: Position = Rotary()
    norm: NormConfig = NormConfig()
    ffn: Literal["relu", "gelu", "swish", "reglu", "geglu", "swiglu"] = Field(
        default="swiglu", description="act(x W) V; those ending in glu: (act(x W) * x U) V"
    )
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
    def shared_tokens(self) -> int:
        """How many tokens at the start every query sees, earlier ones included: a prefix mask's, else the first."""
        mask = self.attention.mask
        return mask.length if mask.kind == "prefix" else 1

    @property
    def first_target(self) -> int:
        """Position, 1-based, of the first token that any loss counts: those that all queries see are not predicted."""
        return self.shared_tokens + 1

    @property
    def key_width(self) -> int:
        """Width of a query and its keys: the head's, or its half where an operation cuts the head in two."""
        return self.head_width // self.attention.operation.keys_per_head

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
                f"attention.mask.length {self.first_target - 1} is above context {self.context}: a chunk has one token "
                "more than the context, and none of them would be predicted"
            )
        self.attention.check_fit(self.head_width, self.position.kind in ("relative", "t5", "alibi"))
        if self.position.kind == "rotary" and self.key_width % 2:
            name = self.attention.operation.kind
            halved = f" and {name} halves it" if self.key_width != self.head_width else ""
            raise ValueError(
                f"rotary turns pairs and needs an even width of keys: width / heads = {self.head_width}{halved}"
            )
        return self
