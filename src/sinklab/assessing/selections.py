"""Which keys something is done to: the sink, or as many others as a control.

    bias     the bias key or sink logit of the model, in every row
    sink     the first n keys, for the queries after them
    recent   the n keys right before the query's own
    random   n of the keys before the query's own, drawn by layer, head and query

Controls never meet the first n keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.assessing.documents import Keys
from sinklab.assessing.layers import LayerAttention


@dataclass(frozen=True)
class SelectedKeys:
    """Some keys of every query.

    Attributes:
        count: n.
        seed: of the random ones.
    """

    keys: Keys
    count: int = 1
    seed: int = 0

    def matrix(self, layer: LayerAttention) -> Tensor:
        """Whether query t's key s is selected: (1 or H, L, L); nothing for the bias, which has no column."""
        L, device = layer.length, layer.call.q_BHTD.device
        q_L1, k_L = torch.arange(L, device=device)[:, None], torch.arange(L, device=device)
        if self.keys == "bias":
            return torch.zeros(1, L, L, dtype=torch.bool, device=device)
        if self.keys == "sink":
            return ((k_L < self.count) & (q_L1 >= self.count))[None]
        candidates_LL = (k_L >= self.count) & (k_L < q_L1)
        if self.keys == "recent":
            return (candidates_LL & (k_L >= q_L1 - self.count))[None]
        heads, draw = layer.call.q_BHTD.shape[1], torch.Generator().manual_seed(self.seed + layer.number)
        rank_HLL = torch.rand(heads, L, L, generator=draw).to(device).masked_fill(~candidates_LL, -1)
        chosen_HLN = rank_HLL.topk(min(self.count, L), -1).indices
        return torch.zeros_like(rank_HLL, dtype=torch.bool).scatter_(-1, chosen_HLN, True) & candidates_LL
