"""Prompt cache: the loss of a continuation that sees only C keys of its prompt, by method of choosing them.

The first half of a sequence is the prompt. It is read with all of its keys. Each KV head then keeps C of them, with
their positions in the text, and the second half is read with these and all of its own keys. The methods keep:

    recent                  the C latest keys
    first and recent        the first n and the C - n latest keys (StreamingLLM, 2309.17453)
    SnapKV                  the w latest keys, and those with the most attention of the w latest queries, averaged over
                            5 neighbouring keys (2404.14469); w = min(64, C // 2)
    SnapKV without sink     the same, without the first n keys
    TOVA                    the latest key, and those with the most attention of the latest query (2401.06104)
    KeyDiff                 the keys with the smallest cosine to the mean unit key (2504.15364)
    key norm                the keys with the smallest norm (2406.11430)
    random                  the w latest keys, and random others

As in NVIDIA/kvpress, attention is averaged over the query heads of a KV head, and under TOVA over all heads of the
layer, which keep the same keys. Keys that no query of the continuation sees, such as those outside a sliding window,
are not kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.assessing.part import AssessPart, AssessText, Effect, PartFigure, PartJob, PartRow
from sinklab.assessing.reading import PairedReader, Step, refused, seen_by_key_heads
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.plots import PlotAxis

METHODS = 8
WINDOW, POOLED = 64, 5  # latest queries and neighbouring keys of SnapKV
KeyScore = Callable[[LayerCall], Tensor]
"""Function from the attention call of the prompt to a score of every key, (B, G, P); keys with high scores are kept."""


class KeptKeys(Effect):
    """Loss of the continuation with `budget` keys of the prompt, chosen by `method`.

    Attributes:
        first_kept: fraction of the pairs (sequence, KV head) that keep the first key, or the first learned token.
            Layers in which the continuation does not see it are excluded; None if there are no others.
    """

    method: str
    budget: int
    first_kept: float | None


class PromptCache(AssessPart):
    """Loss of the continuation by method and budget.

    Attributes:
        prompt: number of tokens P of the prompt, learned leading tokens not included.
        first: number n of first keys, limited to C - 1 for each budget C.
        methods: losses over the targets from position P + 2 on, the first that a query after the prompt predicts. The
            targets of `unchanged` are the same.
    """

    name = "prompt_cache"
    question = "Which keys of a prompt must be kept?"

    prompt: int
    first: int
    methods: list[KeptKeys]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        if min(settings.budgets) >= settings.length // 2:
            return (
                f"prompts of {settings.length // 2} tokens, half of --length, have no more keys than the smallest "
                f"--budget, {min(settings.budgets)}: set a smaller --budget, or a larger --length"
            )
        return refused(adapter, edit=PromptKeys(1, partial(observed_attention, window=1)))

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT = text.sequences(settings.sequences, settings.length)
        run = partial(assess_prompt_cache, text.model.adapter, tokens_NT, settings)
        return PartJob((1 + METHODS * len(settings.budgets)) * len(tokens_NT), run)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all methods at the smallest budget."""
        yield self.row("unchanged", self.unchanged, f"{self.sequences} prompts of {self.prompt:,} tokens")
        smallest = min(one.budget for one in self.methods)
        for one in self.methods:
            answer = f"{one.method}, {one.budget:,} of {self.prompt:,} keys" if one.budget == smallest else ""
            kept = "" if one.first_kept is None else f"first key kept by {100 * one.first_kept:.0f} % of KV heads"
            yield self.row(f"{one.method}, {one.budget} keys", one, kept, answer=answer)

    def figure(self) -> PartFigure:
        rows = [{**self.point(one, one.method, one.budget), "first_kept": one.first_kept} for one in self.methods]
        return PartFigure(
            "Keeping few keys of a prompt",
            f"Loss added to {self.unchanged.loss:.3f} after prompts of {self.prompt:,} tokens ({self.sequences} "
            "sequences) of which few keys are kept, by method and number of keys; random keys are the control.",
            rows,
            PlotAxis("Keys of the prompt kept", "x", "keys", order=sorted({one.budget for one in self.methods})),
            tooltip=(
                ("loss", "loss, nats", ".4f"),
                ("kl", "KL from the unchanged model", ".4f"),
                ("first_kept", "KV heads that keep the first key", ".0%"),
            ),
        )


@dataclass
class PromptKeys:
    """Attention edit: queries after the prompt see `budget` keys of the prompt, those with the highest scores.

    The prompt is the first half of the sequence, and the learned leading tokens before it.

    Attributes:
        first_kept: whether the first key is kept, by sequence and KV head; a tensor (B, G) for each call of a layer in
            which some query after the prompt sees it.
    """

    budget: int
    score: KeyScore
    first_kept: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the edited call.

        Raises:
            InputError: if queries attend to later keys.
        """
        if not layer.call.mask.causal:
            raise InputError("queries attend to later keys, so the prompt cannot be read alone")
        B, groups, L, _ = layer.call.k_BGTD.shape
        P = layer.leading + (L - layer.leading) // 2
        needed_BGP = seen_by_key_heads(layer, P, P).any(-2).expand(B, groups, P)
        score_BGP = self.score(layer.cut(P)).masked_fill(~needed_BGP, -torch.inf)
        kept_BGP = torch.zeros_like(needed_BGP).scatter(-1, score_BGP.topk(self.budget, -1).indices, True)
        kept_BGP &= score_BGP > -torch.inf
        if needed_BGP[..., 0].any():
            self.first_kept.append(kept_BGP[..., 0].cpu())
        seen_BGLL = torch.ones(B, groups, L, L, dtype=torch.bool, device=kept_BGP.device).tril()
        seen_BGLL[:, :, P:, :P] = kept_BGP[:, :, None]
        return layer.masked(Dense(seen_BGLL.repeat_interleave(layer.call.q_BHTD.shape[1] // groups, 1)))


def latest(prompt: LayerCall, first: int = 0) -> Tensor:
    """Score keys by position; the first `first` keys are always kept."""
    B, groups, P, _ = prompt.call.k_BGTD.shape
    score_P = torch.arange(P, device=prompt.call.k_BGTD.device, dtype=torch.float32)
    score_P[:first] = torch.inf
    return score_P.expand(B, groups, P)


def observed_attention(prompt: LayerCall, window: int, barred: int = 0) -> Tensor:
    """Score keys as SnapKV does, with `window` queries; the first `barred` keys are kept only while in the window."""
    groups, P = prompt.call.k_BGTD.shape[1:3]
    attention_BHS = attention_of_latest(prompt, window)[..., : P - window]
    pooled_BHS = F.avg_pool1d(attention_BHS, POOLED, stride=1, padding=POOLED // 2)
    score_BGS = pooled_BHS.unflatten(1, (groups, -1)).mean(2)
    score_BGS[..., :barred] = -torch.inf
    return F.pad(score_BGS, (0, window), value=torch.inf)


def latest_attention(prompt: LayerCall) -> Tensor:
    """Score keys as TOVA does, by the attention of the latest query; the latest key is kept."""
    score_B1S = attention_of_latest(prompt, 1)[..., :-1].mean(1, keepdim=True)
    return F.pad(score_B1S, (0, 1), value=torch.inf).expand(-1, prompt.call.k_BGTD.shape[1], -1)


def attention_of_latest(prompt: LayerCall, window: int) -> Tensor:
    """Return the mean attention of the latest `window` queries to every key: (B, H, P)."""
    call, P = prompt.call, prompt.length
    seen = call.mask.block(P - window, P, 0, P, call.k_BGTD.device).expand(*call.mask.sizes, window, P)
    short = replace(call.cut(P, P - window), mask=Dense(seen))
    return replace(prompt, call=short).column_sums().keys_BHS / window


def distinctness(prompt: LayerCall) -> Tensor:
    """Score keys as KeyDiff does, by minus the cosine to the mean unit key."""
    unit_BGPD = F.normalize(prompt.exact().call.k_BGTD, dim=-1)
    return -F.cosine_similarity(unit_BGPD, unit_BGPD.mean(2, keepdim=True), dim=-1)


def small_norm(prompt: LayerCall) -> Tensor:
    """Score keys by minus their norm."""
    return -prompt.exact().call.k_BGTD.norm(dim=-1)


def chance(prompt: LayerCall, window: int, seed: int) -> Tensor:
    """Score keys at random; the latest `window` keys are kept. All batches have the same scores."""
    draw = torch.Generator().manual_seed(seed + prompt.index)
    score_BGP = torch.rand(prompt.call.k_BGTD.shape[:3], generator=draw).to(prompt.call.k_BGTD.device)
    score_BGP[..., prompt.length - window :] = torch.inf
    return score_BGP


def assess_prompt_cache(adapter: Adapter, tokens_NT: Tensor, settings: AssessSettings, step: Step) -> PromptCache:
    """Measure the loss of the continuation for every method, and every budget that is smaller than the prompt."""
    reader = PairedReader(adapter, tokens_NT, step)
    prompt = tokens_NT.shape[1] // 2
    found = []
    for budget in (size for size in settings.budgets if size < prompt):
        first, window = min(settings.most_kept, budget - 1), max(1, min(WINDOW, budget // 2))
        methods: dict[str, KeyScore] = {
            "recent": latest,
            "first and recent": partial(latest, first=first),
            "SnapKV": partial(observed_attention, window=window),
            "SnapKV without sink": partial(observed_attention, window=window, barred=first),
            "TOVA": latest_attention,
            "KeyDiff": distinctness,
            "key norm": small_norm,
            "random": partial(chance, window=window, seed=settings.seed),
        }
        for method, score in methods.items():
            edit = PromptKeys(budget, score)
            effect = reader.under(edit).effect(start=prompt + 2)
            kept = torch.cat([one.flatten() for one in edit.first_kept]).float() if edit.first_kept else None
            share = None if kept is None else float(kept.mean())
            found.append(KeptKeys(method=method, budget=budget, first_kept=share, **effect.model_dump()))
    shared = {**reader.result_fields(), "unchanged": reader.unchanged.effect(start=prompt + 2)}
    return PromptCache(**shared, prompt=prompt, first=settings.most_kept, methods=found)
