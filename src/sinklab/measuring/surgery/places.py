"""Where surgery cuts in, in a Hugging Face model and in ours: blocks, learned positions, first tokens."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.attention.real_tokens import real_tokens
from sinklab.errors import SinklabError
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hooked
from sinklab.models.huggingface import anatomy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def residual_blocks(model: "PreTrainedModel | Transformer") -> list[nn.Module]:
    """The blocks of the residual stream in order.

    Raises:
        SinklabError: they are not kept in one list.
    """
    if isinstance(model, Transformer):
        return list(model.blocks)
    blocks = anatomy.decoder_blocks(model)
    if not blocks:
        raise SinklabError(
            f"the blocks of a {model.config.model_type!r} model could not be found: its residual stream cannot be "
            "changed from outside"
        )
    return blocks


def learned_positions(model: "PreTrainedModel | Transformer") -> Tensor | None:
    """The learned table of positions, row 0 being position 1: (positions, width), a view of the weight; None without.

    Rows that no position uses (OPT has two before its first) are left out.
    """
    return model.position_table if isinstance(model, Transformer) else anatomy.learned_positions(model)


@dataclass
class FirstTokens:
    """Where the real tokens of the current forward pass begin."""

    leading: int = 0
    first_B: Tensor | None = None

    def columns(self, like: Tensor) -> Tensor:
        """The column of each sequence's first real token, on the device of `like` (B, ...)."""
        if self.first_B is None:
            return torch.full((len(like),), self.leading, device=like.device)
        return self.first_B.to(like.device)


@contextmanager
def first_tokens(model: "PreTrainedModel | Transformer") -> Iterator[FirstTokens]:
    """Know, in every forward pass, where the sequences begin behind their padding.

    Raises:
        InputError: in a forward pass, where the attention mask is not a padding mask.
        SinklabError: in a forward pass that continues from a cache.
    """
    if isinstance(model, Transformer):
        yield FirstTokens(leading=model.leading)
        return
    start, signature = FirstTokens(), inspect.signature(model.forward)

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature.bind_partial(*args, **kwargs).arguments
        cache = given.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise SinklabError(
                "a model under surgery reads whole sequences only: call it without past_key_values, and generate "
                "with use_cache=False"
            )
        mask_BT = given.get("attention_mask")
        start.first_B = None if mask_BT is None else real_tokens(mask_BT).index_BR[:, 0]

    with hooked([model.register_forward_pre_hook(entering, with_kwargs=True)]):
        yield start
