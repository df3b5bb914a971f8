"""Base class of the recorders of attention in Hugging Face models."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.errors import SinklabError
from sinklab.measuring.records import LayerRecord, end_to_end
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.models.huggingface.forward_call import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel
READ_AFTERWARDS = "Generate outside the probe, then call model(sequences) inside it"


class Recorder(ABC):
    """Recorder of the attention of a Hugging Face model.

    It keeps the records of completed sequences, and those of the current sequences, which later passes may continue.

    Args:
        model: model whose forward passes are recorded.
        expected: number of attention layers.
        lengths: additional lengths to which the sequences are truncated.
        details: collector that receives the attention of every layer, if any.

    Attributes:
        backends: backends that computed the attention, such as "one pass", "sdpa" or "eager" (`Interception.backends`).
    """

    def __init__(
        self, model: "PreTrainedModel", expected: int, lengths: Sequence[int], details: DetailsCollector | None
    ) -> None:
        self.backends: set[str] = set()
        self._model, self._lengths, self._details = model, tuple(lengths), details
        self._signature = inspect.signature(model.forward)
        self._expected = expected
        self._done: list[list[LayerRecord]] = []  # of completed sequences
        self._tokens_BT: Tensor | None = None
        self._real: RealTokens | None = None
        self._paused = self._whole = False
        self._seen = 0  # length of the current sequences, including padding
        self._ends: Sequence[int] = ()  # end-of-sequence ids within `generate`
        self._text_BT: Tensor | None = None  # tokens of the prompt and of the passes within `generate`
        self._prompt = 0  # number of tokens of the prompt

    @property
    def backend(self) -> str:
        """Backends of all passes so far, such as "one pass+sdpa"."""
        return "+".join(sorted(self.backends))

    @property
    def layers(self) -> list[LayerRecord]:
        """Records of all sequences, one per attention layer in call order; empty before the first pass.

        Values past the end of a sequence are 0. The sequences of a pass that failed are left out.
        """
        batches = [layers for layers in (*self._done, self._latest() if self._whole else []) if layers]
        return [end_to_end(parts) for parts in zip(*batches, strict=True)]

    def clear(self) -> None:
        """Discard all records."""
        self._done, self._tokens_BT, self._real = [], None, None
        self._drop_latest()

    def _entering_sequences(self, arguments: dict[str, Any]) -> None:
        """Begin a forward pass: a prefill of new sequences, or a decoding step of the current ones with their KV cache.

        Args:
            arguments: arguments of the model's `forward` (`named_arguments`).
        """
        cache, tokens_BT = arguments[CACHE], arguments.get("input_ids")
        if getattr(cache, "is_compileable", False):
            raise SinklabError(
                "a probe does not support a static KV cache, whose keys are not only those of tokens: use a dynamic "
                "cache (the default) or use_cache=False"
            )
        kept = 0 if cache is None else int(cache.get_seq_length())
        if not kept:
            layers = self._latest() if self._whole else []  # the last pass may have failed
            if layers and not _continued(self._tokens_BT, tokens_BT):
                self._done.append(layers)
            self._tokens_BT, self._real, self._seen = tokens_BT, None, 0
            self._drop_latest()
        elif kept > self._seen:
            raise SinklabError(
                f"the cache contains {kept} tokens, but the probe has seen {self._seen} tokens of these sequences: "
                "start the probe before the first call on a sequence, and use a dynamic cache (the default) or "
                "use_cache=False"
            )
        elif kept < self._seen:
            raise SinklabError(
                f"the cache was cropped to {kept} of the {self._seen} tokens that the probe has seen, as in assisted "
                f"decoding, so the recorded sums include removed tokens. {READ_AFTERWARDS}"
            )
        self._whole = False
        given = arguments["inputs_embeds"] if tokens_BT is None else tokens_BT
        self._seen += given.shape[1]
        mask_BT = arguments.get("attention_mask")
        if mask_BT is None:
            mask_BT = torch.ones(len(given), self._seen, device=given.device)
        if self._ends and tokens_BT is not None:
            ended_BT = self._ended(tokens_BT, continued=bool(kept))
            # The mask also covers the tokens that were in the cache before `generate`.
            ended_BT = F.pad(ended_BT, (mask_BT.shape[-1] - ended_BT.shape[1], 0))
            mask_BT = (mask_BT != 0) & ~ended_BT.to(mask_BT.device)
        self._real = real_tokens(mask_BT)

    @contextmanager
    def generating(self, ends: Sequence[int]) -> Iterator[None]:
        """Treat tokens after an end-of-sequence id in `ends` as padding in the `with` block, which runs `generate`."""
        self._ends, self._text_BT = ends, None
        try:
            yield
        finally:
            self._ends = ()

    def _ended(self, tokens_BT: Tensor, continued: bool) -> Tensor:
        """Return a mask (B, T) of the generated tokens after the end of their sequence, which are padding.

        The attention mask of `generate` is 1 at these tokens, until the last sequence has ended.

        Args:
            tokens_BT: tokens of this pass: whole sequences, or only the new tokens if `continued`.
            continued: whether the pass continues from a KV cache.
        """
        if self._text_BT is None:
            self._prompt = tokens_BT.shape[1]
        elif continued:
            tokens_BT = torch.cat((self._text_BT, tokens_BT), dim=1)
        self._text_BT = tokens_BT
        ends_BT = torch.isin(tokens_BT, tokens_BT.new_tensor(self._ends))
        ends_BT[:, : self._prompt] = False
        return ends_BT.cumsum(1) - ends_BT.int() > 0

    def paused(self) -> AbstractContextManager[Any]:
        """Return a context manager that disables recording; code in it must not run an attention layer."""
        return patch.object(self, "_paused", True)

    @abstractmethod
    def _latest(self) -> list[LayerRecord]:
        """Return the records of the current sequences, one per attention layer."""

    @abstractmethod
    def _drop_latest(self) -> None:
        """Discard the records of the current sequences."""


def _continued(before_BT: Tensor | None, now_BT: Tensor | None) -> bool:
    if before_BT is None or now_BT is None or len(before_BT) != len(now_BT) or before_BT.shape[1] >= now_BT.shape[1]:
        return False
    return torch.equal(before_BT, now_BT[:, : before_BT.shape[1]])
