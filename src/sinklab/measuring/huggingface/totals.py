"""Sums of one layer over the passes of the same sequences, while they are decoded from a cache as well."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.importance import ColumnSums
from sinklab.attention.real_tokens import RealTokens
from sinklab.errors import SinklabError
from sinklab.measuring.mask_coverage import View, seen_over
from sinklab.measuring.metrics import importance_from_sums
from sinklab.measuring.records import LayerRecord
from sinklab.models.hooks import token_norms

READ_AFTERWARDS = "Generate outside of the probe, then call model(sequences) inside it"
TOLD_BY = 4  # numbers of a key by which it is known again
TOLD_APART = 0.05  # of their size; keys that are made anew of a latent differ by rounding


class LayerTotals:
    """Column sums and norms of one layer, over the passes of one sequence. T new queries meet S keys in each."""

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._lengths = lengths
        self._prefixes_BHES: Tensor | None = None
        self._sums_BHT: Tensor | None = None
        self._earlier_BHT: Tensor | None = None
        self._seen_by_BGT: Tensor | None = None
        self._bias_BH: Tensor | None = None
        self._keys_BTN: Tensor | None = None  # a few numbers of each
        self._key_norms: list[Tensor] = []
        self._value_norms: list[Tensor] = []

    @torch.no_grad()
    def add(self, sums: ColumnSums, seen_by_BGS: Tensor, key_BGSD: Tensor, value_BGSV: Tensor, queries: int) -> None:
        """Take in a pass. A cache that drops keys behind a sliding window hands over the last S of them.

        Args:
            seen_by_BGS: how many of the pass's counted queries may see each key; batch and head may be 1.

        Raises:
            SinklabError: more keys than tokens have been seen: a static cache; or keys of other tokens than then.
        """
        before = 0 if self._sums_BHT is None else self._sums_BHT.shape[-1]
        seen, keys = before + queries, key_BGSD.shape[2]
        if keys > seen:
            raise SinklabError(
                f"{keys} keys met {seen} tokens that the probe has seen: put the probe around the whole sequence, the "
                "first call included, with a dynamic cache (the default) or use_cache=False"
            )
        self._check_keys(key_BGSD[:, 0, :, :TOLD_BY], keys - queries)
        self._sums_BHT = _grown(self._sums_BHT, sums.keys_BHS, seen)
        self._seen_by_BGT = _grown(self._seen_by_BGT, seen_by_BGS, seen)
        if sums.earlier_BHS is not None:
            self._earlier_BHT = _grown(self._earlier_BHT, sums.earlier_BHS, seen)
        if sums.bias_BH is not None:
            self._bias_BH = sums.bias_BH if self._bias_BH is None else self._bias_BH + sums.bias_BH
        self._key_norms.append(token_norms(key_BGSD[:, :, -queries:]).mean(1))
        self._value_norms.append(token_norms(value_BGSV[:, :, -queries:]).mean(1))

    def _check_keys(self, key_BSN: Tensor, earlier: int) -> None:
        """Refuse a pass whose earlier keys are not those of the passes before, in the same rows."""
        new_BTN, before_BTN = key_BSN[:, earlier:].clone(), self._keys_BTN  # not a view: all of the keys would be kept
        same = before_BTN is None or len(before_BTN) == len(key_BSN)
        if before_BTN is not None and same:
            before_BSN = before_BTN[:, before_BTN.shape[1] - earlier :]
            moved_BS, size_BS = (x.float().norm(dim=-1) for x in (key_BSN[:, :earlier] - before_BSN, before_BSN))
            same = not bool((moved_BS > TOLD_APART * size_BS).any())
        if not same:
            raise SinklabError(
                "the cache holds other sequences, or in another order, than in the pass before, as in beam search: the "
                f"sums are of those that were there. {READ_AFTERWARDS}"
            )
        self._keys_BTN = new_BTN if before_BTN is None else torch.cat((before_BTN, new_BTN), dim=1)

    def add_prefixes(self, prefixes_BHES: Tensor) -> None:
        """Take in the sums over the queries before each length."""
        self._prefixes_BHES = prefixes_BHES

    @torch.no_grad()
    def record(self, real: RealTokens) -> LayerRecord:
        """Means over the real tokens so far."""
        assert self._sums_BHT is not None
        assert self._seen_by_BGT is not None
        count_B = real.count_B.to(self._sums_BHT.device)
        importance_BHT = importance_from_sums(real.align(self._sums_BHT), count_B)
        visible_BHT, view = self._visible(real, count_B)
        return LayerRecord(
            importance_BHT,
            None if self._bias_BH is None else self._bias_BH / count_B[:, None],
            real.align(torch.cat(self._key_norms, -1)),
            real.align(torch.cat(self._value_norms, -1)),
            self._cut(),
            visible_BHT,
            view,
        )

    def _visible(self, real: RealTokens, count_B: Tensor) -> tuple[Tensor | None, View | None]:
        assert self._sums_BHT is not None
        assert self._seen_by_BGT is not None
        sums_BHT = self._sums_BHT
        if self._earlier_BHT is not None:
            sums_BHT = sums_BHT + F.pad(self._earlier_BHT, (0, sums_BHT.shape[-1] - self._earlier_BHT.shape[-1]))
        seen_by_BGT = real.align(self._seen_by_BGT.expand(len(sums_BHT), -1, -1))
        return seen_over(real.align(sums_BHT), seen_by_BGT, count_B)

    def _cut(self) -> tuple[Tensor, ...]:
        if self._prefixes_BHES is None:
            return ()
        sums = zip(self._lengths, self._prefixes_BHES.unbind(2), strict=True)
        return tuple(prefix_importance(sums_BHS, length) for length, sums_BHS in sums)


def _grown(total_BHT: Tensor | None, part_BHS: Tensor, positions: int) -> Tensor:
    """Sums over the passes so far, at all positions, with those of another pass added to the last S of them."""
    part_BHT = F.pad(part_BHS, (positions - part_BHS.shape[-1], 0))
    return part_BHT if total_BHT is None else F.pad(total_BHT, (0, positions - total_BHT.shape[-1])) + part_BHT


def prefix_importance(sums_BHS: Tensor, length: int) -> Tensor:
    """alpha (B, H, length) from sums over the first `length` queries, of sequences without padding."""
    return importance_from_sums(sums_BHS[..., :length], torch.full((len(sums_BHS),), length))
