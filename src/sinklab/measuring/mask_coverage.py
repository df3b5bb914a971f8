"""Number of queries that can see each key under sliding windows, prefixes and other masks.

alpha_k is the mean attention to key k over all T - k + 1 queries t >= k. Under a sliding window of w < T - k + 1
tokens, only w of these queries see key k. The others contribute zeros, so that alpha of a sink is smaller by the factor
(T - k + 1) / w. The mean over the queries that may see the key is therefore reported in addition to alpha.

B sequences, H query heads, G heads of the mask, T positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sinklab.models.layer_kinds import layers_text


@dataclass(frozen=True)
class View:
    """Difference between a layer's mask and the full causal mask.

    Attributes:
        kind: "window": a query sees the last `tokens` tokens, including its own. "prefix": keys among the first
            `tokens` are also seen by earlier queries. "part": any other mask; at most `tokens` queries see a key.
        tokens: number of tokens, keys or queries, depending on `kind`.
    """

    kind: Literal["window", "prefix", "part"]
    tokens: int


def seen_over(sums_BHT: Tensor, seen_by_BGT: Tensor, queries_B: Tensor) -> tuple[Tensor | None, View | None]:
    """Return the mean attention (B, H, T) to each key over the queries that may see it, and the view of the layer.

    Both are None if every key is seen by as many queries as under the full causal mask; the mean is then alpha. The
    mean of a key that no query sees is 0.

    Args:
        sums_BHT: attention to each key, summed over the queries that may see it; index 0 is the first real token.
        seen_by_BGT: number of queries that may see each key; batch axis B and head axis G may have size 1.
        queries_B: number of real tokens of each sequence.
    """
    later_B1T = (queries_B[:, None, None] - torch.arange(sums_BHT.shape[-1], device=sums_BHT.device)).clamp(min=0)
    if bool((seen_by_BGT == later_B1T).all()):
        return None, None
    return sums_BHT / seen_by_BGT.clamp(min=1), view_of(seen_by_BGT, later_B1T)


def view_of(seen_by_BGT: Tensor, later_BGT: Tensor) -> View:
    """Infer, from the number of queries that see each key, how a mask differs from the full causal mask.

    Args:
        seen_by_BGT: number of queries that may see each key; index 0 is the first token.
        later_BGT: number of queries t >= k for each key k; broadcastable to `seen_by_BGT`.
    """
    most = int(seen_by_BGT.max())
    if bool((seen_by_BGT == later_BGT.clamp(max=most)).all()):
        return View("window", most)
    beyond = (seen_by_BGT > later_BGT).flatten(0, -2).any(0)
    if bool(beyond.any()):
        return View("prefix", int(beyond.nonzero().max()) + 1)
    return View("part", most)


def joined(views: Iterable[View | None]) -> View | None:
    """Combine the views of one layer over batches; None if all are None.

    The result has the common kind, or "part" if the kinds differ, and the largest `tokens`.
    """
    found = [view for view in views if view is not None]
    if not found:
        return None
    kinds, most = {view.kind for view in found}, max(view.tokens for view in found)
    return View(found[0].kind if len(kinds) == 1 else "part", most)


def visibility_note(views: Sequence[View | None]) -> str | None:
    """Build the note on the layers whose mask differs from the full causal mask; None if there are none.

    Args:
        views: view of each layer, in order; None for the full causal mask.
    """
    layers: dict[View, list[int]] = {}
    for number, view in enumerate(views, start=1):
        if view is not None:
            layers.setdefault(view, []).append(number)
    if not layers:
        return None
    sentences = {
        "window": "a sliding window of {} tokens in {}",
        "prefix": "the first {} keys are visible to earlier queries in {}",
        "part": "no key is visible to more than {} queries in {}",
    }
    parts = (sentences[view.kind].format(view.tokens, layers_text(at, len(views))) for view, at in layers.items())
    return (
        "; ".join(parts) + ": sink_rate and importance are means over all queries t >= k of key k, sink_rate_visible "
        "and importance_visible over the queries that may see it"
    )
