"""Arguments of an attention operation: queries, keys, mask, biases and score functions.

B batch, H query heads, G KV heads, T queries, D key dimension, V value dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.biases import extra_logits, with_extra_key
from sinklab.attention.importance import Rows, score_rows
from sinklab.attention.masks import Mask, visible_keys
from sinklab.attention.primitive import Backend, attend, attend_output, log_normaliser
from sinklab.attention.query_blocks import ScoreMatrix, accumulate_dtype
from sinklab.attention.scores import Score, compose, plus_of_head


@dataclass(frozen=True)
class Call:
    """Arguments of one call of the attention core, except the values.

    Attributes:
        q_BHTD, k_BGTD: queries and keys. If there are more keys than queries (KV cache), the queries are at the last
            positions. If a head has several queries, they are concatenated in the last dimension of q_BHTD.
        mask: mask of visible keys.
        backend: backend of the primitive.
        cap: softcap of the scores and of the bias key's logit; None without a softcap, and for Hugging Face models.
        position: relative position bias, which is not applied to a bias key; None without one. For Hugging Face models:
            softcap, position bias and additive mask.
        forget_gates: score function of forget gates, applied after the position bias but not to a bias key; None
            without forget gates.
        key_HD: bias key; None without one.
        offset_H: number added to the logit of the bias key after the softcap; None means zero.
        logit_BHT: sink logit, used in place of a bias key's logit; None without one. Axes B and T may be 1.
        value_HV: value of the bias key, or the V bias if there is no bias key; None means zero.
        learned: learned parameters of the operation; None without parameters.
        weight_BTH: logits of the second softmax's weights (`OperationPart.weight_gate`); None for operations without
            them.
        scale: factor of q.k; None means 1 / sqrt(D). Kernel attention and stick-breaking support only None.
    """

    q_BHTD: Tensor
    k_BGTD: Tensor
    mask: Mask
    backend: Backend = "auto"
    cap: Score | None = None
    position: Score | None = None
    forget_gates: Score | None = None
    key_HD: Tensor | None = None
    offset_H: Tensor | None = None
    logit_BHT: Tensor | None = None
    value_HV: Tensor | None = None
    learned: Any = None
    weight_BTH: Tensor | None = None
    scale: float | None = None

    @property
    def first(self) -> int:
        """Position of the first query among the keys."""
        return self.k_BGTD.shape[2] - self.q_BHTD.shape[2]

    @property
    def has_bias(self) -> bool:
        """True if there is a bias key or a sink logit."""
        return self.key_HD is not None or self.logit_BHT is not None

    def cut(self, positions: int, first: int = 0) -> "Call":
        """Return the call for the first `positions` positions, with queries from index `first` on; requires T = S."""
        q_BHTD, k_BGTD = self.q_BHTD[:, :, first:positions], self.k_BGTD[:, :, :positions]
        weight_BTH = None if self.weight_BTH is None else self.weight_BTH[:, first:positions]
        logit_BHT = self.logit_BHT
        if logit_BHT is not None and logit_BHT.shape[-1] > 1:
            logit_BHT = logit_BHT[..., first:positions]
        return replace(self, q_BHTD=q_BHTD, k_BGTD=k_BGTD, weight_BTH=weight_BTH, logit_BHT=logit_BHT)

    def matrix(self, similarity: Score | None = None, mask: Mask | None = None) -> ScoreMatrix:
        """Return the score matrix for a log-similarity, without bias key and sink logit; `mask` replaces the mask."""
        mask = self.mask if mask is None else mask
        return ScoreMatrix(self.q_BHTD, self.k_BGTD, mask, self.score(similarity), self.scale)

    def attend(self, v_BGTV: Tensor, similarity: Score | None = None) -> tuple[Tensor, Tensor]:
        """Compute (out_BHTV, lse_BHT) for a log-similarity, without bias key and sink logit.

        Raises:
            ValueError: see `primitive.attend`.
        """
        return attend(self.matrix(similarity), v_BGTV, self.backend)

    def attend_output(self, v_BGTV: Tensor, similarity: Score | None = None) -> Tensor:
        """Compute the output of `attend` without lse, for which a fused kernel may be used.

        Raises:
            ValueError: see `primitive.attend`.
        """
        return attend_output(self.matrix(similarity), v_BGTV, self.backend)

    def rows(self, similarity: Score | None = None) -> Iterator[Rows]:
        """Yield similarities divided by their row sums, including a bias key or sink logit, in blocks of queries."""
        return score_rows(self.matrix(similarity), self.bias_logits(similarity))

    def keys_per_row(self) -> Tensor:
        """Return the number of keys that each query sees, including a bias key or sink logit: (B, H or 1, T), float."""
        B, _, T, _ = self.q_BHTD.shape
        seen_BHT = visible_keys(self.mask, T, self.q_BHTD.device, self.k_BGTD.shape[2])
        keys_BHT = seen_BHT.expand(B, -1, T) + int(self.has_bias)
        return keys_BHT.to(accumulate_dtype(self.q_BHTD.dtype))

    def bias_logits(self, similarity: Score | None = None) -> Tensor | None:
        """Compute the log-similarity of every query with the bias key or sink logit, (B, H, T); None without either.

        Kernel attention passes queries and keys after the feature map; the result is then the similarity itself.
        """
        if self.logit_BHT is not None:
            logit_BHT = self.logit_BHT.to(accumulate_dtype(self.q_BHTD.dtype)).expand(self.q_BHTD.shape[:3])
            return at_every_query(similarity, logit_BHT, self.first)
        if self.key_HD is None:
            return None
        z_BHT = extra_logits(self.q_BHTD, self.key_HD, self.matrix().factor)
        offset = None if self.offset_H is None else Score(plus_of_head, (self.offset_H,))
        return at_every_query(compose(self.cap, offset, similarity), z_BHT, self.first)

    def normaliser(self, similarity: Score | None) -> Tensor:
        """Compute the log of the similarity's row sum, including a bias key or sink logit: (B, H, T)."""
        lse_BHT = log_normaliser(self.matrix(similarity), self.backend)
        logits_BHT = self.bias_logits(similarity)
        return lse_BHT if logits_BHT is None else with_extra_key(lse_BHT[..., None], lse_BHT, logits_BHT)[1]

    def score(self, similarity: Score | None = None) -> Score | None:
        """Compose the score function: softcap, position bias, forget gates, then the log-similarity."""
        return compose(self.cap, self.position, self.forget_gates, similarity)


def at_every_query(score: Score | None, z_BHT: Tensor, first: int) -> Tensor:
    """Apply a score function to one score per query (B, H, T), such as the score of a bias key; None is the identity.

    Args:
        first: position of the first query among the keys.
    """
    if score is None:
        return z_BHT
    B, H, T = z_BHT.shape
    device = z_BHT.device
    rows, heads = torch.arange(B, device=device).view(-1, 1, 1), torch.arange(H, device=device).view(-1, 1)
    queries, key = torch.arange(first, first + T, device=device), torch.zeros((), dtype=torch.long, device=device)
    return score(z_BHT, rows, heads, queries, key)
