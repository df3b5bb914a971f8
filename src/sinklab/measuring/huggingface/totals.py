"""Sums of one layer over the passes of the same sequences, while they are decoded from a cache as well."""

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
    """Column sums and norms of one layer, over the passes of one sequence. T new queries meet S keys in each.

    Args:
        leading: learned tokens in front of the real ones.

    Attributes:
        prefixes: alpha of the sequences cut at each of the lengths asked for.
    """

    def __init__(self, leading: int = 0) -> None:
        self.prefixes: tuple[Tensor, ...] = ()
        self._leading = leading
        self._row_sums_BH: Tensor | None = None
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

    def add_row_sums(self, sums_BH: Tensor) -> None:
        """Take in sums of rows that do not sum to one, over the counted queries of a pass."""
        self._row_sums_BH = sums_BH if self._row_sums_BH is None else self._row_sums_BH + sums_BH

    @torch.no_grad()
    def record(self, real: RealTokens) -> LayerRecord:
        """Means over the real tokens so far, `real` being where they are behind the leading ones."""
        assert self._sums_BHT is not None
        count_B = real.count_B.to(self._sums_BHT.device)
        importance_BHT = importance_from_sums(real.align(self._sums_BHT), count_B)
        visible_BHT, view = self._visible(real, count_B)
        bias_BH, registers_BHN = None if self._bias_BH is None else self._bias_BH / count_B[:, None], None
        if self._leading:
            at_BN = real.index_BR[:, :1] - self._leading + torch.arange(self._leading, device=real.index_BR.device)
            at_BHN = at_BN[:, None].expand(-1, self._sums_BHT.shape[1], -1)
            registers_BHN = self._sums_BHT.gather(-1, at_BHN) / count_B[:, None, None]
            bias_BH = registers_BHN.sum(-1) if bias_BH is None else registers_BHN.sum(-1) + bias_BH
        return LayerRecord(
            importance_BHT,
            bias_BH,
            real.align(torch.cat(self._key_norms, -1)),
            real.align(torch.cat(self._value_norms, -1)),
            self.prefixes,
            visible_BHT,
            view,
            row_sums_BH=None if self._row_sums_BH is None else self._row_sums_BH / count_B[:, None],
            registers_BHN=registers_BHN if self._leading > 1 else None,
        )

    def _visible(self, real: RealTokens, count_B: Tensor) -> tuple[Tensor | None, View | None]:
        assert self._sums_BHT is not None
        assert self._seen_by_BGT is not None
        sums_BHT = self._sums_BHT
        if self._earlier_BHT is not None:
            sums_BHT = sums_BHT + F.pad(self._earlier_BHT, (0, sums_BHT.shape[-1] - self._earlier_BHT.shape[-1]))
        seen_by_BGT = real.align(self._seen_by_BGT.expand(len(sums_BHT), -1, -1))
        return seen_over(real.align(sums_BHT), seen_by_BGT, count_B)


def _grown(total_BHT: Tensor | None, part_BHS: Tensor, positions: int) -> Tensor:
    """Sums over the passes so far, at all positions, with those of another pass added to the last S of them."""
    part_BHT = F.pad(part_BHS, (positions - part_BHS.shape[-1], 0))
    return part_BHT if total_BHT is None else F.pad(total_BHT, (0, positions - total_BHT.shape[-1])) + part_BHT


def prefix_importance(sums_BHS: Tensor, length: int) -> Tensor:
    """alpha (B, H, length) from sums over the first `length` queries, of sequences without padding."""
    return importance_from_sums(sums_BHS[..., :length], torch.full((len(sums_BHS),), length))
