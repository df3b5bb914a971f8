"""KV cache of the sinklab transformer.

New queries attend to cached and new keys with the same operation, mask and bias as without a cache. For kernel
attention, keys and values are cached too, because running sums support causal and prefix masks only, not windows or
documents.

A linear attention layer caches its state, which has a fixed size. The state cannot be reset to an earlier token, so
after `crop` the remaining tokens are recomputed.

B batch, H query heads, G KV heads, S positions so far (including leading tokens), D head dimension; in a linear layer:
H heads, D key dimension, V value dimension, C channels and W kernel size of the convolution.
"""

from collections.abc import Collection

import torch
from torch import Tensor


class LayerPast:
    """Cache of one attention layer.

    Attributes:
        keys_BGSD, values_BGSD: keys and values as they entered the attention core; None before the first call.
        log_kept_BSH: cumulative sums of the log forget gates; None before the first call and without forget gates.
    """

    def __init__(self) -> None:
        self.keys_BGSD: Tensor | None = None
        self.values_BGSD: Tensor | None = None
        self.log_kept_BSH: Tensor | None = None

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new positions, and return those of all positions so far."""
        if self.keys_BGSD is None or self.values_BGSD is None:
            self.keys_BGSD, self.values_BGSD = k_BGTD, v_BGTD
        else:
            self.keys_BGSD = torch.cat((self.keys_BGSD, k_BGTD), dim=2)
            self.values_BGSD = torch.cat((self.values_BGSD, v_BGTD), dim=2)
        return self.keys_BGSD, self.values_BGSD

    def extend_kept(self, log_kept_BTH: Tensor) -> Tensor:
        """Add the last cached sum to the cumulative sums of new positions, append them, and return all sums."""
        if self.log_kept_BSH is None:
            self.log_kept_BSH = log_kept_BTH
        else:
            self.log_kept_BSH = torch.cat((self.log_kept_BSH, self.log_kept_BSH[:, -1:] + log_kept_BTH), dim=1)
        return self.log_kept_BSH

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch by index, in this order."""
        self.keys_BGSD, self.values_BGSD = _taken(self.keys_BGSD, rows), _taken(self.values_BGSD, rows)
        self.log_kept_BSH = _taken(self.log_kept_BSH, rows)

    def crop(self, positions: int) -> None:
        """Keep the first `positions` positions."""
        if self.keys_BGSD is not None and self.values_BGSD is not None:
            self.keys_BGSD, self.values_BGSD = self.keys_BGSD[:, :, :positions], self.values_BGSD[:, :, :positions]
        if self.log_kept_BSH is not None:
            self.log_kept_BSH = self.log_kept_BSH[:, :positions]


class StatePast:
    """Cache of one layer of linear attention.

    Attributes:
        recent_BCW: inputs of the convolution at the last W - 1 positions; None before the first call.
        state_BHDV: state after the last position; None before the first call.
    """

    def __init__(self) -> None:
        self.recent_BCW: Tensor | None = None
        self.state_BHDV: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch by index, in this order."""
        self.recent_BCW, self.state_BHDV = _taken(self.recent_BCW, rows), _taken(self.state_BHDV, rows)


def _taken(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x.index_select(0, rows.to(x.device))


class Past:
    """Cache of a batch of sequences, extended by `Transformer.hidden`; compatible with transformers' `generate`.

    Args:
        layers: number of layers.
        leading: number of learned tokens before each sequence, which are also cached.
        linear: 1-based indices of the linear attention layers.

    Attributes:
        tokens_BT: all tokens so far, including padding; None before the first call.
        padding_B: number of padding tokens at the start of each row; None if there are none. Leading tokens follow
            the padding.
        layers: cache of each layer.
        forgotten: True if `crop` cleared the layers' caches, so that the tokens must be recomputed.
    """

    is_compileable = False

    def __init__(self, layers: int, leading: int, linear: Collection[int] = ()) -> None:
        self.leading, self.linear = leading, frozenset(linear)
        self.tokens_BT: Tensor | None = None
        self.padding_B: Tensor | None = None
        self.layers = self._empty(layers)
        self.forgotten = False

    @property
    def positions(self) -> int:
        """Number of cached positions, including padding and learned leading tokens."""
        return 0 if self.tokens_BT is None else self.leading + self.tokens_BT.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, including padding."""
        return 0 if self.tokens_BT is None else self.tokens_BT.shape[1]

    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Append new tokens to `tokens_BT` and return all tokens so far."""
        self.tokens_BT = tokens_BT if self.tokens_BT is None else torch.cat((self.tokens_BT, tokens_BT), dim=1)
        return self.tokens_BT

    def restart(self) -> Tensor | None:
        """Clear the cache and return the tokens that it contained; None if there were none."""
        tokens_BT, self.tokens_BT, self.padding_B = self.tokens_BT, None, None
        self.layers, self.forgotten = self._empty(len(self.layers)), False
        return tokens_BT

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch: new row i is a copy of row beam_idx[i]."""
        self.tokens_BT, self.padding_B = _taken(self.tokens_BT, beam_idx), _taken(self.padding_B, beam_idx)
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows of the batch with these indices."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        if self.tokens_BT is not None:
            self.reorder_cache(torch.arange(len(self.tokens_BT)).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens, including padding; if it is negative, drop the last -max_length tokens.

        If there are linear attention layers and a token is dropped, the caches of all layers are cleared. The next call
        of `Transformer.hidden` recomputes the remaining tokens.
        """
        length = self.get_seq_length()
        kept = min(length, max_length if max_length >= 0 else max(length + max_length, 0))
        if kept == 0:
            self.restart()
        elif self.tokens_BT is not None:
            self.tokens_BT = self.tokens_BT[:, :kept]
            if self.linear and kept < length:
                self.layers, self.forgotten = self._empty(len(self.layers)), True
            for layer in self.layers:
                if isinstance(layer, LayerPast):
                    layer.crop(self.leading + kept)

    def _empty(self, layers: int) -> list[LayerPast | StatePast]:
        return [StatePast() if number in self.linear else LayerPast() for number in range(1, layers + 1)]
