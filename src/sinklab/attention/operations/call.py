"""What an operation is called with: queries, keys and everything that acts on a score before its similarity."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinklab.attention.biases import ExtraKey, extra_logits
from sinklab.attention.blocks import accumulate_dtype, default_scale
from sinklab.attention.primitive import Backend, log_normaliser
from sinklab.attention.scores import Score, compose
from sinklab.attention.visible import Mask, visible_keys


@dataclass(frozen=True)
class Call:
    """One call of the core.

    Attributes:
        q_BHTD, k_BGTD: queries and keys; scores are scaled by 1 / sqrt(D).
        mask: who sees whom.
        backend: of the primitive.
        cap: softcap of the scores, bias keys included.
        position: what the positional embedding does to the scores of the sequence's own keys.
        key_HD: the key of a bias.
        logit_H: a sink logit; takes the place of q.k_s.
        value_HV: the value of the bias; None stands for zero.
        learned: the operation's own parameters.
    """

    q_BHTD: Tensor
    k_BGTD: Tensor
    mask: Mask
    backend: Backend = "auto"
    cap: Score | None = None
    position: Score | None = None
    key_HD: Tensor | None = None
    logit_H: Tensor | None = None
    value_HV: Tensor | None = None
    learned: nn.Module | None = None

    @property
    def score(self) -> Score | None:
        """Softcap and position, in this order."""
        return compose(self.cap, self.position)

    def keys_per_row(self) -> Tensor:
        """(B, T), in the precision of scores: how many keys take part in each row, bias key included."""
        B, _, T, _ = self.q_BHTD.shape
        has_bias = self.key_HD is not None or self.logit_H is not None
        keys_BT = visible_keys(self.mask, T, self.q_BHTD.device).expand(B, T) + int(has_bias)
        return keys_BT.to(accumulate_dtype(self.q_BHTD.dtype))

    def bias_logits(self, similarity: Score | None = None) -> Tensor | None:
        """(B, H, T): the similarity's logarithm of every query with the bias key, None where there is no bias."""
        if self.logit_H is not None:
            B, H, T, _ = self.q_BHTD.shape
            dtype = torch.promote_types(self.q_BHTD.dtype, torch.float32)
            return at_every_query(similarity, self.logit_H.to(dtype)[None, :, None].expand(B, H, T))
        if self.key_HD is None:
            return None
        z_BHT = extra_logits(self.q_BHTD, self.key_HD, default_scale(self.q_BHTD))
        return at_every_query(compose(self.cap, similarity), z_BHT)

    def normaliser(self, similarity: Score | None) -> Tensor:
        """(B, H, T): the logarithm of the row sum of the similarity, bias key included."""
        lse_BHT = log_normaliser(
            self.q_BHTD, self.k_BGTD, score=compose(self.score, similarity), mask=self.mask, backend=self.backend
        )
        logits_BHT = self.bias_logits(similarity)
        return lse_BHT if logits_BHT is None else ExtraKey(logits_BHT).merge(lse_BHT[..., None], lse_BHT)[1]


def at_every_query(score: Score | None, z_BHT: Tensor) -> Tensor:
    """A score function applied to one score per query, as that of a bias key."""
    if score is None:
        return z_BHT
    B, H, T = z_BHT.shape
    device = z_BHT.device
    rows, heads = torch.arange(B, device=device).view(-1, 1, 1), torch.arange(H, device=device).view(-1, 1)
    return score(z_BHT, rows, heads, torch.arange(T, device=device), torch.zeros((), dtype=torch.long, device=device))
