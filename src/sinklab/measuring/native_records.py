"""Records of whole sequences through our own transformer, while it trains or afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Around, Window
from sinklab.measuring.mask_coverage import view_of
from sinklab.measuring.records import LayerRecord
from sinklab.measuring.statistics.block import Angles
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.models.hooks import token_norms
from sinklab.models.intercept import intercept
from sinklab.models.native import NativeAdapter


class NativeRecords:
    """What every attention layer showed since the last `clear`.

    Attributes:
        backend: of the attention primitive.
    """

    def __init__(self, backend: str, lengths: Sequence[int], details: DetailsWatch | None) -> None:
        self.backend, self.layers = backend, list[LayerRecord]()
        self._lengths, self._details = lengths, details

    def clear(self) -> None:
        """Forget what was recorded."""
        self.layers.clear()

    def paused(self) -> AbstractContextManager[None]:
        """Nothing is called twice."""
        return nullcontext()

    def observe(self, layer: LayerCall) -> None:
        """Record a call."""
        layer = layer.exact()
        q_BHTD, k_BGSD, v_BGSD = layer.call.q_BHTD, layer.call.k_BGTD, layer.value_BGSV
        alpha = layer.importance()
        key_BT, value_BT = (token_norms(x[:, :, layer.leading :]).mean(1) for x in (k_BGSD, v_BGSD))
        cut = (layer.cut(layer.leading + length).importance().positions_BHT for length in self._lengths)
        view = None
        if alpha.visible_BHT is not None:
            view = view_of(alpha.seen_by_BGT, torch.arange(alpha.positions_BHT.shape[-1], 0, -1))
        self.layers.append(
            LayerRecord(
                importance_BHT=alpha.positions_BHT,
                bias_BH=alpha.bias_BH,
                key_norm_BT=key_BT,
                value_norm_BT=value_BT,
                prefixes=tuple(cut),
                visible_BHT=alpha.visible_BHT,
                view=view,
                row_sums_BH=alpha.row_sums_BH,
                registers_BHN=alpha.registers_BHN,
                window_start_BH=_window_start(layer),
            )
        )
        if self._details is not None:
            self._details.values(v_BGSD)
            self._details.attention(layer.rows(), q_BHTD.shape[1], Angles(q_BHTD, k_BGSD, layer.call.mask))


@contextmanager
def native_records(
    adapter: NativeAdapter, lengths: Sequence[int], details: DetailsWatch | None
) -> Iterator[NativeRecords]:
    """Record every forward pass of whole sequences inside the block."""
    records = NativeRecords(str(adapter.cores[0].backend), lengths, details)
    with intercept(adapter, observe=records.observe):
        yield records


def _window_start(layer: LayerCall) -> Tensor | None:
    """Mean score of the first key of a query's window, over the queries that no longer see position 1.

    None without a window, with learned positions in front, or where every query sees position 1.
    """
    mask, T = layer.call.mask, layer.length
    while isinstance(mask, Around):
        mask = mask.rest
    width = mask.width if isinstance(mask, Window) else T
    if width >= T or layer.leading:
        return None
    sums_BH = layer.call.q_BHTD.new_zeros(layer.call.q_BHTD.shape[:2])
    for rows in layer.rows():
        query_Q = torch.arange(rows.block.start, rows.block.stop, device=sums_BH.device)
        key_Q = (query_Q - width + 1 - rows.block.low).clamp(min=0)
        score_BHQ = rows.weights_BHQS.gather(-1, key_Q[:, None].expand(*rows.weights_BHQS.shape[:3], 1))[..., 0]
        sums_BH += (score_BHQ * (query_Q >= width)).sum(-1)
    return sums_BH / (T - width)
