"""How many queries can see each key under windows, prefixes and other masks.

alpha_k is a mean over all queries from k on (metrics.py). Under a sliding window of w tokens only w of them see k, so
that the rest are zeros and a sink is diluted by (T - k + 1) / w. The mean over the queries that may see
the key (`over_visible`) is reported beside alpha.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sinklab.attention.importance import over_visible
from sinklab.measuring.metrics import stacked
from sinklab.models.layer_kinds import layers_text


@dataclass(frozen=True)
class View:
    """How the keys that a layer's queries see differ from all tokens up to their own.

    Attributes:
        kind: "window": the last `tokens` tokens; "prefix": the first `tokens` keys are seen by earlier queries, too;
            "part": anything else, a key being seen by at most `tokens` queries.
        tokens: see above.
    """

    kind: Literal["window", "prefix", "part"]
    tokens: int


def seen_over(sums_BHT: Tensor, seen_by_BGT: Tensor, queries_B: Tensor) -> tuple[Tensor | None, View | None]:
    """The mean over the queries that may see each position, and why it differs from alpha; None if it does not.

    Args:
        sums_BHT: over these queries, aligned so that index 0 is the first real token.
        seen_by_BGT: their number, aligned likewise.
        queries_B: real tokens of each sequence.
    """
    later_B1T = (queries_B[:, None, None] - torch.arange(sums_BHT.shape[-1], device=sums_BHT.device)).clamp(min=0)
    visible_BHT = over_visible(sums_BHT, seen_by_BGT, later_B1T)
    return visible_BHT, None if visible_BHT is None else view_of(seen_by_BGT, later_B1T)


def view_of(seen_by_BGT: Tensor, later_BGT: Tensor) -> View:
    """Infer the mask from the number of queries that see each key.

    Args:
        seen_by_BGT: how many queries may see each key, index 0 being the first token.
        later_BGT: how many queries there are from the key on; broadcasts.
    """
    most = int(seen_by_BGT.max())
    if bool((seen_by_BGT == later_BGT.clamp(max=most)).all()):
        return View("window", most)
    beyond = (seen_by_BGT > later_BGT).flatten(0, -2).any(0)
    if bool(beyond.any()):
        return View("prefix", int(beyond.nonzero().max()) + 1)
    return View("part", most)


def visible_layers(alphas: Sequence[Tensor], visible: Sequence[Tensor | None]) -> Tensor | None:
    """The mean over the queries that may see each key (A, B, H, T); None if it equals alpha in every layer.

    Args:
        alphas: alpha (B, H, T) by layer.
        visible: this mean by layer; None in a layer where it equals alpha.
    """
    if all(one is None for one in visible):
        return None
    return stacked([alpha if one is None else one for alpha, one in zip(alphas, visible, strict=True)])


def joined(views: Iterable[View | None]) -> View | None:
    """The view of one layer over several batches; None of a batch whose sequences are too short for the mask."""
    found = [view for view in views if view is not None]
    if not found:
        return None
    kinds, most = {view.kind for view in found}, max(view.tokens for view in found)
    return View(found[0].kind if len(kinds) == 1 else "part", most)


def visibility_note(views: Sequence[View | None]) -> str | None:
    """A sentence on the layers, in order, in which the two means differ; None if they agree in all."""
    layers: dict[View, list[int]] = {}
    for number, view in enumerate(views, start=1):
        if view is not None:
            layers.setdefault(view, []).append(number)
    if not layers:
        return None
    parts = [
        _SENTENCES[view.kind].format(tokens=view.tokens, where=layers_text(at, len(views)))
        for view, at in layers.items()
    ]
    return (
        "; ".join(parts) + ": sink_rate and importance are means over all queries from a key on, sink_rate_visible and "
        "importance_visible over those that may see it"
    )


_SENTENCES: Mapping[str, str] = {
    "window": "a window of {tokens} tokens in {where}",
    "prefix": "the first {tokens} keys are seen by earlier queries in {where}",
    "part": "no key is seen by more than {tokens} queries in {where}",
}
