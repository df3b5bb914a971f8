"""A causal language model in memory, ours or of transformers, as measuring, surgery and assessments see it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.real_tokens import RealTokens
from sinklab.errors import InputError
from sinklab.model.transformer import Transformer
from sinklab.models.layer_kinds import LayerKinds
from sinklab.models.memory import Sizes
from sinklab.models.native import NativeAdapter, own_transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Adapter(Protocol):
    """A model.

    Attributes:
        device: where it takes its tokens.
        dtype: of its weights.
        blocks: of the residual stream in order; empty where they cannot be read.
        kinds: which of its layers have attention.
        leading: learned positions in front of every sequence, which are no tokens.
        first_target: 1-based position of the first token that a loss counts.
        post_norms: where norms stand behind the sublayers, these; empty elsewhere, and where they cannot be read.
        proxy: whether importance is that of proxy scores, the model's own not summing to one.
        dispatches: whether its attention calls can be intercepted; it may run the model. Others return their attention
            matrices.
        context: tokens that it was trained to read at once.
        ends: why it cannot read beyond its context; None where it can.
    """

    leading: int
    first_target: int
    post_norms: Sequence[nn.Module]
    proxy: bool
    device: torch.device
    dtype: torch.dtype
    blocks: Sequence[nn.Module]
    kinds: LayerKinds
    context: int
    ends: str | None

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        ...

    @property
    def dispatches(self) -> bool:
        """See above."""
        ...

    @property
    def attention_layers(self) -> int:
        """How many layers have softmax attention.

        Raises:
            SinklabError: none has.
        """
        ...

    @property
    def heads(self) -> int:
        """Query heads of a layer; of the layer with most, where layers differ."""
        ...

    def check_length(self, length: int) -> None:
        """Refuse sequences of so many tokens, where it knows no positions.

        Raises:
            InputError: says how many are possible.
        """
        ...

    def check(self, tokens_NT: Tensor, longest: int, lengths: Sequence[int]) -> None:
        """Refuse tokens that this model cannot be measured on, and lengths that one pass cannot give.

        Args:
            longest: positions of the longest sequence, without padding.
            lengths: at which the sequences are cut as well.

        Raises:
            InputError: says what is possible.
        """
        ...

    def read(
        self,
        tokens_BT: Tensor,
        real: RealTokens,
        first_target: int | None,
        paused: AbstractContextManager[None],
    ) -> tuple[Tensor, int]:
        """One forward pass: the loss summed over the targets from this position on, in nats, and their number.

        The loss is a float64 scalar, where the model is: nobody need wait for it yet.

        Args:
            first_target: 1-based; None leaves the loss out, and with it the logits.
            paused: entered while the head alone is run, in which there is nothing to record.
        """
        ...

    def run(self, tokens_BT: Tensor) -> None:
        """One forward pass of whole sequences, for those who observe it."""
        ...

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The stream that the head reads: (B, T, E)."""
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Of rows of `hidden`: (R, vocabulary), float32 at least."""
        ...

    def sizes(self, padded: bool, matrices: bool) -> Sizes:
        """What a forward pass holds.

        Args:
            padded: whether there is padding.
            matrices: whether the model makes its attention matrices itself.
        """
        ...

    def notes(self) -> list[str]:
        """What the reader of a result must know of the model, beside its kinds of layers."""
        ...

    def inseparable(self) -> str | None:
        """Why its attention cannot be edited or computed otherwise; None where it can. It may run the model."""
        ...

    def fixed_positions(self) -> str | None:
        """Why positions cannot be those in a cache; None where they can. It may run the model."""
        ...

    def intercepted(self, door: Callable[[LayerCall], Tensor]) -> AbstractContextManager[None]:
        """All attention is computed by `door` inside the block (see `intercept`)."""
        ...


def adapt(model: "PreTrainedModel | Transformer") -> Adapter:
    """The adapter of a model.

    Raises:
        InputError: no model, or one without weights.
    """
    if (own := own_transformer(model)) is not None:
        return NativeAdapter(own)
    check_causal_lm(model)
    assert not isinstance(model, Transformer)
    from sinklab.models.huggingface.adapter import HuggingFaceAdapter

    return HuggingFaceAdapter(model)


def check_causal_lm(model: Any) -> None:
    """Refuse what is no Hugging Face model.

    Raises:
        InputError: says what it is instead.
    """
    if isinstance(model, str):
        raise InputError(
            f"the model is a string, {model[:80]!r}: load it first, as AutoModelForCausalLM.from_pretrained does; "
            "`sinklab measure` takes names"
        )
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise InputError(
            f"the model is {type_text(model)}: expected a Hugging Face causal language model, as "
            "AutoModelForCausalLM.from_pretrained gives it, or a transformer of sinklab"
        )


def type_text(thing: Any) -> str:
    """`of type list`, `of type numpy.ndarray`."""
    kind = type(thing)
    return f"of type {kind.__name__}" if kind.__module__ == "builtins" else f"of type {kind.__module__}.{kind.__name__}"
