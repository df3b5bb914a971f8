"""The one way of measuring: batches of tokens through a model that an adapter watches, reduced while they come.

What differs between our transformer (native.py) and a Hugging Face model (huggingface/pretrained.py) stands behind
`Watched`: how a layer is watched, how the loss is made, and what the model refuses.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.attention.real_tokens import RealTokens, real_tokens
from sinklab.errors import InputError
from sinklab.measuring.accumulate import Accumulator, measurement_from
from sinklab.measuring.activations import largest_activations, strongest
from sinklab.measuring.batches import costing, in_batches, reporting
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.records import LayerRecord, batch_of
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import Progress, entering_norms, evaluating, residual_norms
from sinklab.models.layer_kinds import LayerKinds
from sinklab.models.memory import Sizes, fitting_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reader(Protocol):
    """Reads one batch after the other, and says what the attention layers have shown."""

    @property
    def layers(self) -> Sequence[LayerRecord]:
        """What the latest forward pass has shown, in the order of the layers."""
        ...

    @property
    def backend(self) -> str:
        """What computed the attention."""
        ...

    def read(self, tokens_BT: Tensor, real: RealTokens, first_target: int | None) -> tuple[Tensor, int]:
        """One forward pass: the loss summed over the targets from this position on, in nats, and their number.

        The loss is a float64 scalar, where the model is: nobody need wait for it yet.

        Args:
            first_target: 1-based; None leaves the loss out, and with it the logits.
        """
        ...

    def sizes(self, padded: bool) -> Sizes:
        """Of the model, as far as a forward pass holds them."""
        ...


class Watched(Protocol):
    """A model as the driver sees it.

    Attributes:
        device: where it takes its tokens.
        dtype: of the model.
        kinds: which of its layers have attention.
        leading: learned positions in front of every sequence, which are no tokens.
        post_norms: where norms stand behind the sublayers, these; empty elsewhere, and where they cannot be read.
        proxy: whether importance is that of proxy scores, the model's own not summing to one.
    """

    device: torch.device
    dtype: torch.dtype
    kinds: LayerKinds
    leading: int
    post_norms: Sequence[nn.Module]
    proxy: bool

    @property
    def model(self) -> "PreTrainedModel | Transformer":
        """Itself."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Of the residual stream in order; empty where they cannot be read."""
        ...

    def check(self, tokens_NT: Tensor, options: Options, longest: int) -> None:
        """Refuse tokens that this model cannot be measured on, and lengths and maps that it does not have.

        Args:
            longest: positions of the longest sequence, without padding.

        Raises:
            InputError: says what is possible.
        """
        ...

    def reading(self, lengths: Sequence[int], details: DetailsWatch | None) -> AbstractContextManager[Reader]:
        """Watch the attention of every forward pass inside the block; `details` is shown every layer as well."""
        ...

    def notes(self) -> list[str]:
        """What the reader of a result must know of the model, beside its kinds of layers."""
        ...


def measure(
    watched: Watched,
    tokens_NT: Tensor,
    options: Options,
    *,
    attention_mask_NT: Tensor | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Sinks, norms and loss of a model on the given tokens; it is left as it was found, also after an exception.

    Args:
        tokens_NT: token ids; a learned sink token is not part of them.
        attention_mask_NT: 1 at real tokens, 0 at padding (left or right); None where nothing is padded. Position 1
            is the first real token of each sequence; padding counts nowhere.
        progress: called with (sequences done, sequences in all) after every batch.

    Raises:
        InputError: nothing to measure, token ids outside the vocabulary, more tokens than the model has positions,
            lengths, layers or heads that are not there, a mask that is not a padding mask.
        SinklabError: attention that could not be recorded, or NaN or infinity in the activations (the layer is named).
    """
    check_shape(tokens_NT)
    tokens_NT = tokens_NT.cpu()  # what is looked at before a batch is looked at here, without waiting for a card
    mask_NT = _padding_mask(tokens_NT, attention_mask_NT)
    padded = not bool(mask_NT.all())
    longest = int(real_tokens(mask_NT).count_B.max())
    options.check_lengths(tokens_NT.shape[1])
    watched.check(tokens_NT, options, longest)
    if options.lengths and padded:
        raise InputError("several lengths need sequences without padding: leave out the padded ones, or `lengths`")
    totals = Accumulator(options.eps, longest, options.lengths)
    details = DetailsWatch(options.maps, longest) if options.detailed else None
    first_target = options.first_target if options.loss else None
    with ExitStack() as stack:
        cost = stack.enter_context(costing(watched.device))
        stack.enter_context(evaluating(watched.model))
        hidden = stack.enter_context(residual_norms(watched.blocks))
        before = stack.enter_context(entering_norms(watched.post_norms))
        reader = stack.enter_context(watched.reading(options.lengths, details))  # may try the model on two tokens
        real = _behind(watched.leading, mask_NT[:1])
        largest = stack.enter_context(largest_activations(watched.blocks, real))
        if details is not None:
            stack.enter_context(details.watching(watched.blocks))
        steps = stack.enter_context(reporting(watched.blocks, progress, len(tokens_NT)))

        def step(start: int, stop: int) -> None:
            tokens_BT = tokens_NT[start:stop].to(watched.device, non_blocking=True)
            real = _behind(watched.leading, mask_NT[start:stop]).to(watched.device)
            if details is not None:
                details.begin(real)
            steps.begin(start, stop)
            loss = reader.read(tokens_BT, real, first_target)
            shown = None if details is None else details.batch(F.pad(tokens_BT, (watched.leading, 0)))
            totals.add(batch_of(reader.layers, hidden, real, loss, shown, watched.leading, before))
            steps.end()

        N, T = tokens_NT.shape
        together = options.batch_size or fitting_batch(reader.sizes(padded), T, watched.device)
        notes = [*watched.kinds.notes(), *watched.notes(), *in_batches(N, together, step)]
    if options.loss and longest > 1 and not totals.targets:
        notes.append(f"no loss: of {longest} tokens the prefix mask leaves none to predict")
    return measurement_from(
        totals,
        cost,
        options,
        proxy=watched.proxy,
        backend=reader.backend,
        dtype=str(watched.dtype).removeprefix("torch."),
        massive_activations=strongest(largest) if watched.blocks else None,
        notes=notes,
    )


def check_shape(tokens_NT: Tensor) -> None:
    """Refuse what are no sequences.

    Raises:
        InputError: not a matrix of N x T tokens, or an empty one.
    """
    if tokens_NT.ndim != 2 or not tokens_NT.numel():
        raise InputError(f"tokens have shape {tuple(tokens_NT.shape)}; expected (sequences, length), neither empty")


def _padding_mask(tokens_NT: Tensor, attention_mask_NT: Tensor | None) -> Tensor:
    if attention_mask_NT is None:
        return torch.ones_like(tokens_NT)
    if attention_mask_NT.shape != tokens_NT.shape:
        raise InputError(
            f"the attention mask has shape {tuple(attention_mask_NT.shape)} and the tokens {tuple(tokens_NT.shape)}; "
            "they must be equal"
        )
    return attention_mask_NT.cpu()


def _behind(leading: int, mask_BT: Tensor) -> RealTokens:
    """Where the real tokens stand among the positions: after the learned ones."""
    return real_tokens(F.pad(mask_BT, (leading, 0)))
