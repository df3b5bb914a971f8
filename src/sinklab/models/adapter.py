"""`Adapter`: one interface to causal language models in memory, ours and those of transformers."""

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
from sinklab.models.memory_budget import Sizes
from sinklab.models.native import NativeAdapter, own_transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Adapter(Protocol):
    """A model.

    Attributes:
        device: of its input tokens.
        dtype: of its weights.
        blocks: of the residual stream in order; empty if they cannot be read.
        kinds: which of its layers have attention.
        leading: learned positions in front of every sequence, which are not tokens.
        first_target: 1-based position of the first token that a loss counts.
        post_norms: norms after the sublayers of a post-norm model; empty elsewhere, and where they cannot be read.
        proxy: whether importance is that of proxy scores, because the model's own do not sum to one.
        dispatches: whether its attention calls can be intercepted; it may run the model. Others return their attention
            matrices.
        context: tokens of its training sequences.
        ends: why it cannot read beyond its context; None if it can.
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
        """As described above."""
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
        """Refuse sequences that are too long.

        Raises:
            InputError: with the longest possible length.
        """
        ...

    def check(self, tokens_NT: Tensor, longest: int, lengths: Sequence[int]) -> None:
        """Refuse tokens that this model cannot be measured on, and lengths that need passes of their own.

        Args:
            longest: positions of the longest sequence, without padding.
            lengths: at which the sequences are cut as well.

        Raises:
            InputError: with the possible values.
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

        The loss is a float64 scalar on the device of the model, so that nothing is synchronised.

        Args:
            first_target: 1-based; None leaves the loss out, and with it the logits.
            paused: entered while only the head runs.
        """
        ...

    def run(self, tokens_BT: Tensor) -> None:
        """One forward pass of whole sequences, for its hooks and observers."""
        ...

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The hidden states that the head reads: (B, T, E)."""
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Of rows of `hidden`: (R, vocabulary), float32 at least."""
        ...

    def sizes(self, padded: bool, matrices: bool) -> Sizes:
        """Sizes of the tensors of a forward pass.

        Args:
            padded: whether there is padding.
            matrices: whether the model computes whole attention matrices.
        """
        ...

    def notes(self) -> list[str]:
        """Remarks on the model for the reader of a result, beside those on its layers."""
        ...

    def inseparable(self) -> str | None:
        """Why its attention calls cannot be edited or replaced; None if they can. It may run the model."""
        ...

    def depends_on_length(self, short: int, long: int) -> bool:
        """Whether the first `short` tokens have other hidden states in a sequence of `long` tokens."""
        ...

    def fixed_positions(self) -> str | None:
        """Why its keys cannot have positions within a cache; None if they can. It may run the model."""
        ...

    def summed_loss(self, tokens_BT: Tensor, first_target: int) -> tuple[Tensor, int]:
        """The loss summed over the targets from this position on (1-based), with its graph, and their number.

        Of whole sequences; the attention is the model's own.
        """
        ...

    def attention_inputs(self, change: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
        """Inside the block, every attention layer reads `change(index, x_BTE)` in place of x_BTE, the output of a norm.

        It may run the model. `index` is that of the layer among those with attention, from 1; learned positions in
        front are part of x.

        Raises:
            InputError: with the reason, where a layer does not read the output of a norm, where its attention cannot be
                found, or where no gradient passes through the weights.
        """
        ...

    def gated(self, receive: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Inside the block, `receive` gets the gates of every attention layer that has some, in each forward pass.

        It may run the model. `receive(index, gates_BHTX)`: index of the layer among those with attention, from 1; gates
        in (0, 1) of every head, X channels or one.
        """
        ...

    def intercepted(self, handler: Callable[[LayerCall], Tensor]) -> AbstractContextManager[None]:
        """Inside the block, all attention calls go through `handler` (see `intercept`)."""
        ...


def adapt(model: "PreTrainedModel | Transformer") -> Adapter:
    """The adapter of a model.

    Raises:
        InputError: not a model, or a model without weights.
    """
    if (own := own_transformer(model)) is not None:
        return NativeAdapter(own)
    check_causal_lm(model)
    assert not isinstance(model, Transformer)
    from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

    return HuggingFaceAdapter(model)


def check_causal_lm(model: Any) -> None:
    """Refuse anything but a Hugging Face causal language model.

    Raises:
        InputError: with its type.
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
