"""`Adapter`: common interface to sinklab and Hugging Face causal language models in memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

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

LanguageModel: TypeAlias = "PreTrainedModel | Transformer"
"""A Hugging Face causal language model, or a sinklab transformer."""


class Adapter(Protocol):
    """Interface to a causal language model.

    Attributes:
        device: device of the input tokens.
        dtype: dtype of the weights.
        blocks: decoder blocks in order; empty if they cannot be found.
        kinds: layers by kind (attention, linear or recurrent).
        leading: number of learned positions before every sequence, which are not tokens (a sink token or registers).
        first_target: 1-based position of the first target: 2, or the first after the prefix of a prefix mask.
        post_norms: norms after the sublayers of a post-norm model; empty for other models or if they cannot be found.
        proxy: whether importance is computed from proxy scores, because the attention weights do not sum to one.
        dispatches: whether attention calls can be intercepted (may run the model); otherwise attention is measured from
            the matrices that the model returns.
        context: context length in tokens; 2,048 if the config of a Hugging Face model has none.
        ends: reason why sequences beyond `context` are impossible; None if they are possible.
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
        """The wrapped model."""
        ...

    @property
    def dispatches(self) -> bool:
        """Whether the model's attention computation can be replaced or observed through `intercept`."""
        ...

    @property
    def attention_layers(self) -> int:
        """Number of layers with softmax attention.

        Raises:
            SinklabError: if no layer has softmax attention.
        """
        ...

    @property
    def heads(self) -> int:
        """Number of query heads per layer; the maximum if layers differ."""
        ...

    def check_length(self, length: int) -> None:
        """Check that sequences of `length` tokens are supported.

        Raises:
            InputError: if the sequences are too long; the message states the maximum length.
        """
        ...

    def check(self, tokens_NT: Tensor, longest: int, lengths: Sequence[int]) -> None:
        """Check that the tokens are supported and all `lengths` can be measured in one forward pass.

        Args:
            longest: length of the longest sequence, without padding.
            lengths: additional lengths to which the sequences are truncated.

        Raises:
            InputError: if a check fails; the message states the reason.
        """
        ...

    def read(
        self,
        tokens_BT: Tensor,
        real: RealTokens,
        first_target: int | None,
        paused: AbstractContextManager[None],
    ) -> tuple[Tensor, int]:
        """Run one forward pass; return the loss summed over targets, in nats, and the number of targets.

        The loss is a float64 scalar; that of a sinklab model is on its device, which avoids synchronisation.

        Args:
            real: real tokens of the batch; a target counts if it and the token before it are real.
            first_target: 1-based position of the first target; None skips the loss and the logits.
            paused: context manager that is entered while only the LM head runs.
        """
        ...

    def run(self, tokens_BT: Tensor) -> None:
        """Run one forward pass of whole sequences, only for its hooks and observers."""
        ...

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Compute the final hidden states (B, T, E), after the final norm: the input of the LM head."""
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Compute logits (R, vocabulary), at least float32, from rows of `hidden`."""
        ...

    def sizes(self, padded: bool, matrices: bool) -> Sizes:
        """Return the sizes of the tensors in a forward pass.

        Args:
            padded: whether the sequences have padding.
            matrices: whether the model computes whole attention matrices.
        """
        ...

    def notes(self) -> list[str]:
        """Return notes on the model for the result, in addition to `kinds.notes()`."""
        ...

    def inseparable(self) -> str | None:
        """Return why attention calls cannot be edited or replaced; None if they can be. May run the model."""
        ...

    def depends_on_length(self, short: int, long: int) -> bool:
        """Return True if hidden states of the first `short` tokens are different in a sequence of `long` tokens."""
        ...

    def fixed_positions(self) -> str | None:
        """Return why keys cannot be rotated to positions within a KV cache; None if they can be. May run the model."""
        ...

    def summed_loss(self, tokens_BT: Tensor, first_target: int) -> tuple[Tensor, int]:
        """Compute the differentiable loss of whole sequences, summed over targets, and the number of targets.

        Args:
            first_target: 1-based position of the first target.
        """
        ...

    def attention_inputs(self, change: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
        """Replace the input x_BTE of every attention layer by `change(index, x_BTE)` in the `with` block.

        May run the model. `index` counts the attention layers from 1; x includes learned positions before the sequence.

        Raises:
            InputError: if the input of an attention layer is not the output of a norm, an attention module cannot be
                found, the weights do not support gradients, or the model is compiled.
        """
        ...

    def gated(self, receive: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Call `receive(index, gates_BHTX)` for every attention layer with gates in each pass of the `with` block.

        May run the model. `index` counts the attention layers from 1; the gates are in [0, 1], with X channels or one.
        """
        ...

    def intercepted(self, handler: Callable[[LayerCall], Tensor]) -> AbstractContextManager[None]:
        """Compute the output of all attention calls in the `with` block with `handler` (see `intercept`)."""
        ...


def adapt(model: LanguageModel) -> Adapter:
    """Return the `Adapter` of a sinklab or Hugging Face model.

    Raises:
        InputError: if `model` is neither, or its weights are on the meta device.
    """
    if (own := own_transformer(model)) is not None:
        return NativeAdapter(own)
    check_causal_lm(model)
    assert not isinstance(model, Transformer)
    from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

    return HuggingFaceAdapter(model)


def check_causal_lm(model: Any) -> None:
    """Check that the argument is a Hugging Face model: a module with a transformers config.

    Raises:
        InputError: if `model` is anything else; the message states the string, or the type of the object.
    """
    if isinstance(model, str):
        raise InputError(
            f"the model is a string, {model[:80]!r}: load it first with AutoModelForCausalLM.from_pretrained, or pass "
            "the name to `sinklab measure`"
        )
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise InputError(
            f"the model is {type_text(model)}: expected a Hugging Face causal language model, as "
            "AutoModelForCausalLM.from_pretrained returns it, or a sinklab transformer"
        )


def type_text(thing: Any) -> str:
    """Return the type of an object as text: `of type list` or `of type numpy.ndarray`."""
    kind = type(thing)
    return f"of type {kind.__name__}" if kind.__module__ == "builtins" else f"of type {kind.__module__}.{kind.__name__}"
