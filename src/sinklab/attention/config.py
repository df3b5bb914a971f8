"""Attention section of a recipe (operation, bias, mask, softcap, backend), and checks of the combination."""

import typing
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sinklab.attention import masks
from sinklab.attention.biases import Bias, NoBias
from sinklab.attention.operations import Operation, Softmax
from sinklab.attention.primitive import Backend
from sinklab.schema import BEYOND, Example, Kind, NeutralExample, Part


class CausalMask(Kind):
    """Causal mask: query t sees keys 1 .. t."""

    kind: Literal["causal"] = "causal"

    def build(self) -> masks.Mask:
        return masks.CAUSAL


class WindowMask(Kind):
    """Sliding window mask: query t sees keys t - width + 1 .. t."""

    kind: Literal["window"] = "window"
    width: int = Field(ge=1, description="maximum number of keys that a query sees, including its own")
    examples: ClassVar = {"window": Example({"width": 8})}
    neutral: ClassVar = {"width": NeutralExample("the context or more", {"width": BEYOND})}

    def build(self) -> masks.Mask:
        return masks.Window(self.width)


class PrefixMask(Kind):
    """Prefix mask: causal, but every query also sees the first `length` keys, which are not targets of the loss."""

    kind: Literal["prefix"] = "prefix"
    length: int = Field(ge=1, description="number of initial keys that every query sees")
    examples: ClassVar = {"prefix": Example({"length": 5})}
    neutral: ClassVar = {"length": NeutralExample("1", {"length": 1})}

    def build(self) -> masks.Mask:
        return masks.Prefix(self.length)


class DocumentMask(Kind):
    """Document mask: causal within each of the documents packed into one sequence."""

    kind: Literal["document"] = "document"
    eos_id: int = Field(default=0, ge=0, description="id of the end-of-document token; set by the run from its data")
    examples: ClassVar = {"document": Example()}
    neutral: ClassVar = {"": NeutralExample("document, on text without EOS", {"eos_id": BEYOND})}

    def build(self) -> masks.Mask:
        """Build the causal mask; `AttentionCore` replaces it by a mask with the documents of the batch."""
        return masks.CAUSAL


AttentionMask = Annotated[CausalMask | WindowMask | PrefixMask | DocumentMask, Field(discriminator="kind")]


class AttentionConfig(Part):
    """Attention section of a recipe: computation of the attention output from q, k and v."""

    operation: Operation = Softmax()
    bias: Bias = NoBias()
    mask: AttentionMask = CausalMask()
    softcap: float | None = Field(
        default=None, gt=0, description="softcap of the q.k scores z: softcap * tanh(z / softcap); null: none"
    )
    backend: Backend = "auto"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        operation, bias = self.operation, self.bias
        name = operation.kind
        on_logits = {
            "softcap": self.softcap is not None,
            f"bias {bias.kind}": bias.adds_logit,
            "bias.start": bias.starts_at is not None,
        }
        if not operation.has_logits and (given := [key for key, is_set in on_logits.items() if is_set]):
            raise ValueError(
                f"{given[0]} acts on logits, and operation {name} is a kernel without logits: leave it out, or use an "
                "operation on logits such as softmax (bias kv without start is supported)"
            )
        if operation.sequential and (bias.adds_logit or bias.adds_key):
            raise ValueError(
                f"bias {bias.kind} adds a key or a logit, but operation {name} already has an implicit sink, the "
                "remaining attention: use operation.rest instead"
            )
        if operation.sequential and self.backend == "flex":
            raise ValueError(f"backend flex does not support operation {name}: use auto, chunked or eager")
        if bias.without_value and not operation.divides:
            remedy = "set operation.normalised or use bias kv" if hasattr(operation, "normalised") else "use bias kv"
            raise ValueError(
                f"bias {bias.kind} has the value zero, and operation {name} does not divide by the row sum, so the "
                f"bias would change nothing: {remedy}"
            )
        if bias.kind == "off_by_one" and operation.zero_at_zero:
            raise ValueError(f"a logit of 0 adds nothing under operation {name}: use bias sink_logit, not off_by_one")
        if self.backend == "sdpa" and (name != "softmax" or not operation.plain or self.softcap is not None):
            raise ValueError(
                "backend sdpa supports plain softmax only: alpha 1, p 1 and softcap null "
                f"(here operation {self.operation}, softcap {self.softcap}); use auto, chunked or eager"
            )
        return self

    def check_fit(self, head_width: int, position_on_scores: bool) -> None:
        """Check that the attention config fits the model's sizes and positional embedding.

        Args:
            head_width: dimension of a head's queries and keys.
            position_on_scores: whether the positional embedding is a relative position bias (ALiBi, relative, T5).

        Raises:
            ValueError: if `bias.learnable_dims` exceeds the head width, if the operation splits heads of odd width, or
                if the operation or backend does not support the position bias.
        """
        if (dims := getattr(self.bias, "learnable_dims", None) or 0) > head_width:
            raise ValueError(f"attention.bias.learnable_dims {dims} is above the head width {head_width}: reduce it")
        name = self.operation.kind
        if head_width % self.operation.keys_per_head:
            raise ValueError(f"{name} attention halves the head width, but {head_width} is odd: change width or heads")
        if position_on_scores and not self.operation.has_logits:
            raise ValueError(
                f"a relative position bias is added to logits, but attention.operation {name} is a kernel without "
                "logits: use position rotary, absolute, learnable or none"
            )
        if position_on_scores and self.backend == "sdpa":
            raise ValueError(
                "attention.backend sdpa cannot add a position bias to the scores: use auto, chunked or eager"
            )


Choice = Literal["operation", "bias", "mask"]


def kinds_of(choice: Choice) -> tuple[type[Kind], ...]:
    """Return the classes of all operations, biases or masks that a recipe can choose."""
    return typing.get_args(AttentionConfig.model_fields[choice].annotation)


def examples_of(choice: Choice) -> dict[str, Example]:
    """Return the examples of all operations, biases or masks, by name; their values include `kind`."""
    return {
        name: replace(example, values=kind.chosen(example.values))
        for kind in kinds_of(choice)
        for name, example in kind.examples.items()
    }
