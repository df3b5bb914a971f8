"""Watching an exported sinklab model in the user's own forward passes: hooks on each attention core.

The core itself gives the rows of its operation, bias and mask, as `sinklab.measure` has them; a core that came with the
code beside the weights (`trust_remote_code`) is asked in the same way. Positions here are those of the core: padding,
then the learned leading tokens, then the tokens of a row (model/past.py).

B batch, H heads, T new positions, S positions, N leading tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.importance import sum_rows
from sinklab.attention.real_tokens import RealTokens, real_tokens
from sinklab.attention.visible import visible_queries
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.huggingface.totals import LayerTotals
from sinklab.measuring.native import cut_importance
from sinklab.measuring.records import LayerRecord
from sinklab.measuring.statistics.block import Angles
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.models.hooks import hooked


def cores_of(model: PreTrainedModel) -> list[Any]:
    """The attention cores of an exported model in the order of its layers; none of another model."""
    if getattr(model.config, "model_type", "") != "sinklab":
        return []
    blocks = getattr(getattr(model, "transformer", None), "blocks", ())
    cores = (getattr(getattr(block, "attention", None), "core", None) for block in blocks)
    return [core for core in cores if core is not None]


class CoreTotals(LayerTotals):
    """`LayerTotals` of one core, with what goes to leading tokens and the sums of rows that do not sum to one."""

    def __init__(self, leading: int) -> None:
        super().__init__()
        self._leading = leading
        self._row_sums_BH: Tensor | None = None
        self.prefixes: tuple[Tensor, ...] = ()

    def add_row_sums(self, sums_BH: Tensor) -> None:
        """Take in those of a pass, summed over its counted queries."""
        self._row_sums_BH = sums_BH if self._row_sums_BH is None else self._row_sums_BH + sums_BH

    @torch.no_grad()
    def record(self, real: RealTokens) -> LayerRecord:
        """Means over the real tokens so far, `real` being where they stand behind the leading ones."""
        found, count_B1 = super().record(real), real.count_B[:, None]
        bias_BH, registers_BHN = found.bias_BH, None
        if self._leading:
            assert self._sums_BHT is not None
            at_BN = real.index_BR[:, :1] - self._leading + torch.arange(self._leading, device=real.index_BR.device)
            at_BHN = at_BN[:, None].expand(-1, self._sums_BHT.shape[1], -1)
            registers_BHN = self._sums_BHT.gather(-1, at_BHN) / count_B1[..., None]
            bias_BH = registers_BHN.sum(-1) if bias_BH is None else registers_BHN.sum(-1) + bias_BH
        return replace(
            found,
            bias_BH=bias_BH,
            prefixes=self.prefixes,
            row_sums_BH=None if self._row_sums_BH is None else self._row_sums_BH / count_B1,
            registers_BHN=registers_BHN if self._leading > 1 else None,
        )


class CoreProbe(Recorder):
    """What was recorded of the sequences that an exported model has read, while it decodes from a cache as well."""

    def __init__(self, model: PreTrainedModel, lengths: Sequence[int], details: DetailsWatch | None) -> None:
        super().__init__(model, lengths, details)
        self.cores = cores_of(model)
        self.backends = {str(self.cores[0].backend)}
        self._totals: dict[int, CoreTotals] = {}
        self._placed: RealTokens | None = None
        self._running = self._begun = False

    def _latest(self) -> list[LayerRecord]:
        if self._placed is None:
            return []
        return [self._totals[number].record(self._placed) for number in sorted(self._totals)]

    def _forget_latest(self) -> None:
        self._totals, self._placed = {}, None

    def _entering(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._paused:
            return
        given = self._signature.bind_partial(*args, **kwargs).arguments
        self._entering_sequences(given)
        tokens_BT, mask_BT = given["input_ids"], given.get("attention_mask")
        self._seen += tokens_BT.shape[1]
        self._real = self._real_tokens(tokens_BT.new_ones(len(tokens_BT), self._seen) if mask_BT is None else mask_BT)
        self._running, self._begun = True, False

    def _leaving(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        self._running, self._whole = False, self._whole or self._running

    @torch.no_grad()
    def _ran(self, number: int, core: Any, args: tuple[Any, ...], _: Any) -> None:
        """A hook: take in what the core of one layer was given, where the model itself was called."""
        if not self._running:
            return
        q, k, v = (x.detach().to(accumulate_dtype(x.dtype)) for x in args[:3])
        beside = tuple(None if x is None else x.detach() for x in args[3:])
        T, S, leading = q.shape[2], k.shape[2], core.leading
        if not self._begun:
            padding_B = beside[2] if len(beside) > 2 else None
            self._placed, self._begun = self._behind_leading(leading, S, padding_B, q.device), True
        real = self._placed
        assert real is not None
        counted_BT = real.mask_BT[:, S - T :] if real.padded else None
        with torch.autocast(q.device.type, enabled=False):
            call = core.call(q, k, *beside)
            if T == S:  # also where the beginning is read once more, as under a prefix mask
                self._totals[number] = CoreTotals(leading)
            totals = self._totals[number]
            sums = sum_rows(core.operation.rows(call), q, S, call.mask, counted_BT)
            totals.add(sums, visible_queries(call.mask, T, S, q.device, counted_BT), k, v, T)
            if core.proxy:
                row_sums_BHT = core.operation.row_sums(call)
                counted = row_sums_BHT if counted_BT is None else row_sums_BHT.where(counted_BT[:, None], 0)
                totals.add_row_sums(counted.sum(-1))
            totals.prefixes = tuple(cut_importance(core, q, k, beside, leading + length) for length in self._lengths)
            if self._details is not None:
                self._details.values(v)
                self._details.attention(core.rows(q, k, *beside), q.shape[1], Angles(q, k, call.mask))

    def _behind_leading(
        self, leading: int, positions: int, padding_B: Tensor | None, device: torch.device
    ) -> RealTokens:
        """Where the real tokens stand among the positions of a core."""
        assert self._real is not None
        count_B = self._real.count_B.to(device)
        start_B = torch.zeros_like(count_B) if padding_B is None else padding_B
        at_S, first_B1 = torch.arange(positions, device=device), (start_B + leading)[:, None]
        return real_tokens((at_S >= first_B1) & (at_S < first_B1 + count_B[:, None]))


@contextmanager
def core_probe(
    model: PreTrainedModel, lengths: Sequence[int] = (), details: DetailsWatch | None = None
) -> Iterator[CoreProbe]:
    """`probe` for an exported sinklab model."""
    watch = CoreProbe(model, lengths, details)
    watching = (
        model.register_forward_pre_hook(watch._entering, with_kwargs=True),
        model.register_forward_hook(watch._leaving),
        *(core.register_forward_hook(partial(watch._ran, number)) for number, core in enumerate(watch.cores)),
    )
    with hooked(watching):
        yield watch
