"""A Hugging Face causal language model as the driver sees it: batches of tokens through a probe."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.real_tokens import RealTokens
from sinklab.errors import InputError
from sinklab.measuring.huggingface.probe import probe
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.options import Options
from sinklab.measuring.records import LayerRecord
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.models.huggingface import anatomy
from sinklab.models.huggingface.gguf import is_unpacked
from sinklab.models.huggingface.piecewise_loss import forward_loss, forward_only, makes_logits_in_pieces
from sinklab.models.memory import Sizes, sizes_of_pretrained


class WatchedPretrained:
    """`driver.Watched` of a Hugging Face model."""

    leading = 0
    post_norms: Sequence[nn.Module] = ()
    proxy = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.dtype = model, model.dtype
        self.device, self.blocks = anatomy.input_device(model), anatomy.decoder_blocks(model)
        self.kinds = anatomy.layer_kinds(model.config)

    def check(self, tokens_NT: Tensor, options: Options, longest: int) -> None:
        """Refuse ids outside the vocabulary, too long sequences, lengths that one pass cannot give, maps of no head.

        Raises:
            InputError: any of them.
        """
        vocabulary = anatomy.vocabulary_size(self.model)
        low, high = int(tokens_NT.min()), int(tokens_NT.max())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens: "
                "the tokenizer belongs to another model"
            )
        if options.maps:
            config = self.model.config
            options.check_maps(anatomy.attention_layers(config), anatomy.query_heads(config))
        for length in options.lengths:
            if anatomy.turns_otherwise(self.model.config, length, tokens_NT.shape[1]):
                raise InputError(
                    f"the model turns its positions otherwise in sequences of {tokens_NT.shape[1]} tokens than in "
                    f"those of {length} (its rotary embedding depends on the length), so one pass cannot give both: "
                    f"measure {length} apart"
                )
        anatomy.check_length(self.model.config, longest)

    @contextmanager
    def reading(self, lengths: Sequence[int], details: DetailsWatch | None) -> Iterator["_ProbeReader"]:
        """Watch every attention layer through a probe; it may try the model on two tokens first."""
        with probe(self.model, lengths, details) as watch:
            yield _ProbeReader(self.model, watch)

    def notes(self) -> list[str]:
        """How the weights are quantised, or were."""
        method = anatomy.quantisation(self.model.config)
        if method == "gguf" and is_unpacked(self.model):
            return ["the weights come from a gguf file and are unpacked"]
        return [f"the weights are quantised ({method}); dtype is that of the rest"] if method else []


class _ProbeReader:
    """`driver.Reader` through a probe."""

    def __init__(self, model: PreTrainedModel, watch: Recorder) -> None:
        self._model, self._watch = model, watch

    @property
    def layers(self) -> list[LayerRecord]:
        """Of the latest forward pass."""
        return self._watch.layers

    @property
    def backend(self) -> str:
        """Of all passes so far: "one pass+sdpa" where there were two."""
        return "+".join(sorted(self._watch.backends))

    def read(self, tokens_BT: Tensor, real: RealTokens, first_target: int | None) -> tuple[Tensor, int]:
        """One forward pass, and the loss over the real targets."""
        self._watch.clear()
        arguments = _arguments(self._model, real)
        if first_target is None:
            forward_only(self._model, tokens_BT, arguments)
            return torch.zeros((), dtype=torch.float64), 0
        loss, targets = forward_loss(
            self._model,
            tokens_BT,
            real.from_position(first_target - 1),
            arguments=arguments,
            vocabulary=anatomy.vocabulary_size(self._model),
            paused=self._watch.paused(),
        )
        return torch.tensor(loss, dtype=torch.float64), targets

    def sizes(self, padded: bool) -> Sizes:
        """Of the model's config, and of what this probe makes it compute."""
        return sizes_of_pretrained(
            self._model.config,
            matrices="eager" in self._watch.backends,
            padded=padded,
            logits=not makes_logits_in_pieces(self._model),
        )


def _arguments(model: PreTrainedModel, real: RealTokens) -> dict[str, Any]:
    """A mask and positions where there is padding (learned positions start at the first real token), no cache."""
    arguments: dict[str, Any] = {"use_cache": False}
    if real.padded:
        arguments["attention_mask"] = real.mask_BT.long()
        if "position_ids" in inspect.signature(model.forward).parameters:
            arguments["position_ids"] = (real.mask_BT.long().cumsum(-1) - 1).clamp(min=0)
    return arguments
