"""Policies of KV caches with few keys, shared by the parts `eviction`, `prompt_cache` and `budgets`.

A policy is an entry of `POLICIES`: a function that scores keys, and how many of the latest keys are kept in any case.
It shows up in all three parts unless `parts` names some of them. The part has the schedule: `CachePolicy.mask` evicts
keys after every query, `CachePolicy.of_prompt` once, after a prompt. A cache of C keys keeps:

    recent                  the C latest keys
    first and recent        the first n and the C - n latest keys (StreamingLLM, 2309.17453)
    heavy hitters           the C // 2 latest keys, and older keys with the most accumulated attention (H2O, 2306.14048)
    heavy without sink      as `heavy hitters`, but once the cache is full, the first n keys are kept only while recent
    SnapKV                  the w latest keys, and those with the most attention of the w latest queries, averaged over
                            5 neighbouring keys (2404.14469); w = min(64, C // 2)
    SnapKV without sink     the same, without the first n keys
    AdaKV                   as SnapKV, but the G KV heads of a layer share G C keys, those with the highest scores in
                            the layer; each head has at least 0.2 C (2407.11550)
    PyramidKV               as SnapKV, but later layers keep fewer keys: besides the w latest, from about 2 (C - w) in
                            the first layer to (C - w) / 20 in the last, C on average (2406.02069)
    expected attention      the first n keys, and those with the largest norm of the value times the expected attention
                            of the next 512 queries, whose distribution is normal, with the mean and covariance of the
                            queries of the prompt from position n + 1 on (2510.00636)
    TOVA                    the latest key, and those with the most attention of the latest query, mean over the heads
                            (2401.06104)
    KeyDiff                 the keys with the smallest cosine to the mean of the unit keys in the cache (2504.15364)
    key norm                the keys with the smallest norm (2406.11430)
    random                  a uniformly random subset, and the C // 2 (after a prompt: w) latest keys

Keys keep their positions in the text. Keys that no later query sees, such as those outside a sliding window, are
evicted first. As in H2O's public code, the attention to a key is summed over the queries for which it was in the cache,
with the softmax over the cache. Query heads that share a KV head share a cache, so their sums are added; H2O's code
predates grouped-query attention and has a cache per query head. Under TOVA all heads of a layer keep the same keys, as
in its public code and in NVIDIA/kvpress. KeyDiff compares keys with their positions, as they are in a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense, Mask

EVICTION, PROMPT, BUDGETS = "eviction", "prompt_cache", "budgets"
LEAST_SHARE = 1e-20  # a row with less attention in total on the keys in the cache is recomputed
WINDOW, POOLED = 64, 5  # latest queries and neighbouring keys of SnapKV
LEAST_SHARED = 0.2  # least part of its budget that a KV head keeps under AdaKV
PYRAMID = 20  # mean budget of PyramidKV divided by the smallest
FUTURE = 512  # number of queries after the prompt whose mean attention `expected_attention` estimates


@dataclass(frozen=True)
class KeyBudget:
    """Size C of a cache, number n < C of first keys that policies keep or bar, and random seed.

    Attributes:
        few: whether the scores are read for few queries, so that attention is computed row by row.
        layers: number of attention layers of the model, over which budgets by layer are divided.
    """

    keys: int
    first: int = 0
    seed: int = 0
    few: bool = False
    layers: int = 1

    @property
    def half(self) -> int:
        """Half of the cache, at least one key."""
        return max(1, self.keys // 2)

    @property
    def window(self) -> int:
        """Number w of latest queries of SnapKV."""
        return min(WINDOW, self.half)


Scores = Callable[[int, Tensor], Tensor]
"""Function (query index t, boolean mask (B, G, t + 1) of the keys in its cache) -> scores (B, G, t + 1) of these keys.

It is called once for each query, in order, as it may accumulate attention.
"""


@dataclass(frozen=True)
class CachePolicy:
    """Rule by which a cache keeps some of the keys.

    Attributes:
        scores: function that prepares the scores of an attention call; the cache keeps the keys with the highest
            scores. None keeps the latest keys.
        recent: number of latest keys that are kept in any case.
        first: whether the first n keys are always kept, or barred: kept only while recent, once the cache is full.
        queries: number of latest queries of a prompt on which the scores depend; None for all.
        keys: number of keys of a prompt that a KV head of a layer keeps; on average over the layers it is C.
        shared: whether the KV heads of a layer share the sum of their budgets, except a fifth of each (LEAST_SHARED).
        parts: parts of an assessment in which the policy is used.
    """

    name: str
    scores: Callable[[LayerCall, KeyBudget], Scores] | None = None
    recent: Callable[[KeyBudget], int] = lambda size: 0
    first: Literal["kept", "barred"] | None = None
    queries: Callable[[KeyBudget], int] | None = None
    keys: Callable[[LayerCall, KeyBudget], int] = lambda prompt, size: size.keys
    shared: bool = False
    parts: tuple[str, ...] = (EVICTION, PROMPT, BUDGETS)

    def evict(self, layer: LayerCall, size: KeyBudget) -> LayerCall:
        """Return the call with every query restricted to the keys in its cache, which include its own."""
        return layer.masked(self.mask(layer, size))

    def mask(self, layer: LayerCall, size: KeyBudget) -> Mask:
        """Return the mask of the keys in the cache of every query; evicted keys do not return to the cache."""
        if self.scores is None:
            return Kept(size.keys, size.first if self.first == "kept" else 0)
        B, G, L, _ = layer.call.k_BGTD.shape
        kept_BGLL = torch.zeros(B, G, L, L, dtype=torch.bool, device=layer.call.k_BGTD.device)
        held_BGL = torch.zeros_like(kept_BGLL[:, :, 0])
        seen_BGLL = seen_by_key_heads(layer, 0, L)  # by the query, and below also by later ones
        needed_BGLL = seen_BGLL.flip(-2).byte().cummax(-2).values.flip(-2).bool()
        scores, recent = self.scores(layer, size), max(1, self.recent(size))
        for t in range(L):
            held_BGL[..., t] = True
            kept_BGLL[:, :, t] = held_BGL
            score_BGS = self._of_first(scores(t, held_BGL[..., : t + 1]), size)
            if not size.keys <= t + 1 < L:
                continue
            older_BGS = held_BGL[..., : t + 2 - recent]  # in the cache of the next query, whose own key is recent
            older_BGS &= needed_BGLL[..., t + 1, : t + 2 - recent]
            candidates = score_BGS[..., : t + 2 - recent].masked_fill(~older_BGS, -torch.inf)
            chosen = candidates.topk(size.keys - recent, -1).indices
            older_BGS &= torch.zeros_like(older_BGS).scatter_(-1, chosen, True) & (candidates > -torch.inf)
        return Dense(kept_BGLL.repeat_interleave(layer.call.q_BHTD.shape[1] // G, 1))

    def of_prompt(self, prompt: LayerCall, size: KeyBudget, needed_BGP: Tensor) -> Tensor:
        """Return True for the keys of a prompt that are kept after it, among those that are needed: (B, G, P)."""
        B, G, P, _ = prompt.call.k_BGTD.shape
        score_BGP = torch.arange(P, device=needed_BGP.device, dtype=torch.float32).expand(B, G, P)
        if self.scores is not None:
            held_BGP = torch.ones_like(needed_BGP)
            scores = self.scores(prompt, replace(size, few=self.queries is not None))
            for t in range(0 if self.queries is None else P - self.queries(size), P):
                score_BGP = scores(t, held_BGP[..., : t + 1])
        score_BGP = self._of_first(score_BGP, size)
        score_BGP[..., P - self.recent(size) :] = torch.inf
        score_BGP.masked_fill_(~needed_BGP, -torch.inf)
        keys, seen_BGP = self.keys(prompt, size), score_BGP > -torch.inf
        if self.shared:
            least = max(1, int(LEAST_SHARED * keys))
            score_BGP = score_BGP.scatter(-1, score_BGP.topk(least, -1).indices, torch.inf).flatten(1)
            keys *= G
        kept = torch.zeros_like(score_BGP, dtype=torch.bool).scatter(-1, score_BGP.topk(keys, -1).indices, True)
        return kept.view(B, G, P) & seen_BGP

    def _of_first(self, score_BGS: Tensor, size: KeyBudget) -> Tensor:
        score_BGS = score_BGS.clone()
        if self.first is not None:
            score_BGS[..., : size.first] = torch.inf if self.first == "kept" else -torch.inf
        return score_BGS


@dataclass(frozen=True)
class Kept(Mask):
    """Causal mask: a query sees the first `first` keys and the latest keys, its own included, `size` in total."""

    size: int
    first: int

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((k < self.first) | (k > q - (self.size - self.first)))

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0 if self.first else max(0, first - self.size + 1), min(end, keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        start = max(0, end - (self.size - self.first))
        return start, max(start, min(first + 1, keys))


def accumulated_attention(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys by the sum of their attention so far (H2O)."""
    row, total_BGL = (
        rows_of(layer, size.few),
        layer.call.k_BGTD.new_zeros(layer.call.k_BGTD.shape[:3], dtype=torch.float32),
    )

    def scores(t: int, kept_BGS: Tensor) -> Tensor:
        total_BGL[..., : t + 1] += row(t, kept_BGS).float().sum(2)
        return total_BGL[..., : t + 1]

    return scores


def pooled_attention(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys by the attention of the w latest queries, averaged over neighbouring keys before these (SnapKV)."""
    row, latest = rows_of(layer, size.few), list[Tensor]()

    def scores(t: int, kept_BGS: Tensor) -> Tensor:
        latest[:] = [*latest, row(t, kept_BGS).mean(2)][-size.window :]
        older = max(t + 1 - size.window, 0)
        score_BGS = torch.zeros_like(latest[-1])
        if older:
            sum_BGS = torch.stack([one_BGS[..., :older] for one_BGS in latest]).sum(0)
            score_BGS[..., :older] = F.avg_pool1d(sum_BGS, POOLED, stride=1, padding=POOLED // 2)
        return score_BGS

    return scores


def latest_attention(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys by the attention of the latest query, mean over the heads of the layer (TOVA)."""
    row, G = rows_of(layer, size.few), layer.call.k_BGTD.shape[1]
    return lambda t, kept_BGS: row(t, kept_BGS).float().mean((1, 2))[:, None].expand(-1, G, -1)


def distinctness(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys by minus the cosine to the mean of the unit keys in the cache (KeyDiff)."""
    unit_BGLD = F.normalize(layer.exact().call.k_BGTD, dim=-1)

    def scores(t: int, kept_BGS: Tensor) -> Tensor:
        seen_BGSD = unit_BGLD[:, :, : t + 1]
        mean_BGD1 = (seen_BGSD * kept_BGS[..., None]).sum(2)[..., None]  # its length does not change the order
        return -(seen_BGSD @ mean_BGD1)[..., 0]

    return scores


def small_norm(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys by minus their norm."""
    norm_BGL = layer.exact().call.k_BGTD.norm(dim=-1)
    return lambda t, kept_BGS: -norm_BGL[..., : t + 1]


def expected_attention(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys by the norm of the value times the expected attention of later queries (2510.00636).

        mean over query heads of softmax_s(mu . k_s / sqrt(D) + k_s . Sigma k_s / (2 D)) |v_s|,    s > n
        mu = R mean(q),  Sigma = R cov(q) R^T,  R = mean over the next 512 positions of the rotation to the position

    q are the queries of the prompt from n + 1 on, rotated to position 0. In models without a RoPE that can be shifted,
    R is the identity and q remain as they are.
    """
    exact, n = layer.exact(), size.first
    q_BHTD, k_BGTD = exact.call.q_BHTD, exact.call.k_BGTD
    (P, D), G = q_BHTD.shape[2:], k_BGTD.shape[1]
    rotation_DD = torch.eye(D, dtype=q_BHTD.dtype, device=q_BHTD.device)  # transposed
    if layer.shift_rope is not None:
        q_BHTD = layer.shift_rope(q_BHTD, -torch.arange(P, device=q_BHTD.device))
        future_F = torch.arange(P, P + FUTURE, device=q_BHTD.device)
        rotation_DD = layer.shift_rope(rotation_DD[None, :, None].expand(1, D, FUTURE, D), future_F)[0].mean(1)
    q_BGRTD = q_BHTD[:, :, n:].unflatten(1, (G, -1))
    mean_BGR1D = q_BGRTD.mean(3, keepdim=True)
    apart_BGRTD = (q_BGRTD - mean_BGR1D) @ rotation_DD
    covariance_BGRDD = apart_BGRTD.mT @ apart_BGRTD / apart_BGRTD.shape[3]
    k_BG1SD = k_BGTD[:, :, None, n:]
    z_BGRS = (mean_BGR1D @ rotation_DD @ k_BG1SD.mT)[..., 0, :] / D**0.5
    z_BGRS = z_BGRS + (k_BG1SD @ covariance_BGRDD * k_BG1SD).sum(-1) / (2 * D)
    score_BGS = z_BGRS.softmax(-1).mean(2) * exact.value_BGSV[:, :, n:].norm(dim=-1)
    score_BGP = F.pad(score_BGS, (n, 0))
    return lambda t, kept_BGS: score_BGP[..., : t + 1]


def pyramid(prompt: LayerCall, size: KeyBudget) -> int:
    """Return the number of keys of a layer under PyramidKV, which decreases linearly from layer to layer.

    Besides the w latest keys, with C - w of them on average (2406.02069, eq. 2; `pyramidkv_utils.py` of
    Zefan-Cai/KVCache-Factory 5fb995d): from 2 (C - w) minus the smallest budget, at most P - w, to (C - w) // 20.
    """
    older = size.keys - size.window
    most = min(2 * older - older // PYRAMID, prompt.length - size.window)
    depth = (prompt.index - 1) / (size.layers - 1) if size.layers > 1 else 0.5
    return size.window + round(most + (2 * older - 2 * most) * depth)


def chance(layer: LayerCall, size: KeyBudget) -> Scores:
    """Score keys at random, independently for each layer, KV head and sequence of a batch; all batches are alike."""
    draw = torch.Generator().manual_seed(size.seed + layer.index)
    rank_BGL = torch.rand(layer.call.k_BGTD.shape[:3], generator=draw).to(layer.call.k_BGTD.device)
    return lambda t, kept_BGS: rank_BGL[..., : t + 1]


def rows_of(layer: LayerCall, few: bool) -> Callable[[int, Tensor], Tensor]:
    """Return a function (t, kept_BGS) -> attention weights of query t over the keys in its cache, (B, G, H/G, t + 1).

    For softmax and more than a few queries, full rows are renormalised over the keys in the cache, which is faster.
    """
    G = layer.call.k_BGTD.shape[1]

    def computed(t: int, kept_BGS: Tensor) -> Tensor:
        call = layer.call
        kept_BHS = kept_BGS.repeat_interleave(call.q_BHTD.shape[1] // G, 1)
        seen = call.mask.block(t, t + 1, 0, t + 1, kept_BHS.device) & kept_BHS[:, :, None]
        short = replace(call.cut(t + 1, first=t), mask=Dense(seen, later=False))
        return next(iter(layer.operation.rows(short))).weights_BHQS[:, :, 0].unflatten(1, (G, -1))

    if few or not layer.operation.plain:
        return computed
    scores_BHLL, bias_BHL = layer.scores()
    scores_BGRLL = scores_BHLL.unflatten(1, (G, -1))
    bias_BGRL = None if bias_BHL is None else bias_BHL.unflatten(1, (G, -1))

    def renormalised(t: int, kept_BGS: Tensor) -> Tensor:
        held_BGRS = scores_BGRLL[..., t, : t + 1] * kept_BGS[:, :, None]
        total_BGR1 = held_BGRS.sum(-1, keepdim=True)
        if bias_BGRL is not None:
            total_BGR1 += bias_BGRL[..., t, None]
        if total_BGR1.min() < LEAST_SHARE:  # renormalisation would be inaccurate
            return computed(t, kept_BGS)
        return held_BGRS / total_BGR1

    return renormalised


def seen_by_key_heads(layer: LayerCall, first: int, keys: int) -> Tensor:
    """Return True where a query from index `first` on sees one of the first `keys` keys in some of the query heads.

    Shape (B or 1, G or 1, T - first, keys), for each KV head.
    """
    mask, k_BGTD = layer.call.mask, layer.call.k_BGTD
    seen = mask.block(first, layer.length, 0, keys, k_BGTD.device).expand(*mask.sizes, layer.length - first, keys)
    return seen if seen.shape[1] == 1 else seen.unflatten(1, (k_BGTD.shape[1], -1)).any(2)


FIRST_AND_RECENT = CachePolicy("first and recent", first="kept")
_heavy = partial(CachePolicy, scores=accumulated_attention, recent=lambda size: size.half, parts=(EVICTION,))
_snapkv = partial(
    CachePolicy,
    scores=pooled_attention,
    recent=lambda size: size.window,
    queries=lambda size: size.window,
    parts=(PROMPT,),
)
POLICIES = [
    CachePolicy("recent", parts=(EVICTION, PROMPT)),
    FIRST_AND_RECENT,
    _heavy("heavy hitters"),
    _heavy("heavy without sink", first="barred"),
    _snapkv("SnapKV"),
    _snapkv("SnapKV without sink", first="barred"),
    _snapkv("AdaKV", shared=True),
    _snapkv("PyramidKV", keys=pyramid),
    CachePolicy("expected attention", expected_attention, queries=lambda size: 1, first="kept", parts=(PROMPT,)),
    CachePolicy("TOVA", latest_attention, lambda size: 1, queries=lambda size: 1, parts=(EVICTION, PROMPT)),
    CachePolicy("KeyDiff", distinctness, queries=lambda size: 1, parts=(EVICTION, PROMPT)),
    CachePolicy("key norm", small_norm, queries=lambda size: 1, parts=(PROMPT,)),
    CachePolicy("random", chance, lambda size: size.half, parts=(EVICTION,)),
    CachePolicy("random", chance, lambda size: size.window, queries=lambda size: 1, parts=(PROMPT,)),
]
"""Cache policies, in the order of display."""


def policies_of(part: str) -> list[CachePolicy]:
    """Return the policies that a part of an assessment uses."""
    return [policy for policy in POLICIES if part in policy.parts]
