"""Our own transformer taken apart: each attention core is stood in for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sinklab.assessing.layers import Change, LayerAttention, Turn
from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.core import AttentionCore
from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.position import Absolute, Learnable, Rotary, rotate
from sinklab.model.transformer import Transformer
from sinklab.models.native import NativeAdapter, attention_cores


class OwnPatient:
    """`layers.Patient` of a sinklab transformer.

    Raises:
        InputError: a prefix mask, under which queries see later tokens.
    """

    def __init__(self, model: Transformer, name: str) -> None:
        config = model.config
        if config.attention.mask.kind == "prefix":
            raise InputError(
                f"{name} has a prefix mask, under which queries see later tokens: a cache, which holds earlier ones, "
                "cannot be assessed with it"
            )
        self.module, self.name, self.context = model, name, config.context
        self.leading, self.first_target = model.leading, config.first_target
        self.device, self.blocks = model.head.weight.device, list(model.blocks)
        self.kinds = NativeAdapter(model).kinds
        self.fixed_positions = self.ends = None
        if isinstance(config.position, Learnable | Absolute):
            self.fixed_positions = f"its {config.position.kind} positions are added to the embeddings"
        if isinstance(config.position, Learnable):
            self.ends = f"its learned table of positions ends at {config.context}"
        self._turn = _turning(config) if isinstance(config.position, Rotary) else None

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Every core computes what `change` makes of its call."""
        with ExitStack() as stack:
            for number, core in enumerate(attention_cores(self.module), 1):
                stack.enter_context(_stood_in_for(core, number, change, self._turn))
            yield

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The stream after the final norm, leading token dropped."""
        return self.module.hidden(tokens_BT)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Of the next token."""
        logits_RV = self.module.head(hidden_RE)
        return logits_RV.to(accumulate_dtype(logits_RV.dtype))


@contextmanager
def _stood_in_for(core: AttentionCore, number: int, change: Change, turn: Turn | None) -> Iterator[None]:
    def forward(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *beside: Tensor | None) -> Tensor:
        with torch.autocast(q_BHLD.device.type, enabled=False):
            call = core.call(q_BHLD, k_BGLD, *beside)
            return change(LayerAttention(number, core.operation, call, v_BGLD, turn))

    core.__dict__["forward"] = forward
    try:
        yield
    finally:
        del core.__dict__["forward"]


def _turning(config: ModelConfig) -> Turn:
    """The rotation of `model/block.py`, by any number of positions; of `model/latent.py` that of the last numbers."""
    assert isinstance(config.position, Rotary)
    theta, key_width, width = config.position.theta, config.key_width, config.rotary_width

    def turn(x_BHLD: Tensor, by_L: Tensor) -> Tensor:
        dtype: Any = accumulate_dtype(x_BHLD.dtype)
        frequency = theta ** (-torch.arange(0, width, 2, device=x_BHLD.device, dtype=dtype) / width)
        angle_LC = by_L.to(x_BHLD.device, dtype)[:, None] * frequency
        cos_L1C, sin_L1C = angle_LC.cos()[:, None], angle_LC.sin()[:, None]
        still, turned = x_BHLD.unflatten(-1, (-1, key_width)).split((key_width - width, width), dim=-1)
        return torch.cat((still, rotate(turned, cos_L1C, sin_L1C)), dim=-1).flatten(-2)

    return turn
