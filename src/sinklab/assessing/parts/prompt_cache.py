"""Prompt cache: the loss of a continuation that sees only C keys of its prompt, by policy (`cache_policies`).

The first half of a sequence is the prompt. It is read with all of its keys. Each KV head then keeps C of them, and the
second half is read with these and all of its own keys. Keys that no query of the continuation sees, such as those
outside a sliding window, are not kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sinklab.assessing.cache_policies import CachePolicy, KeyBudget, latest_attention, policies_of, seen_by_key_heads
from sinklab.assessing.part import AssessPart, PartFigure, PartRow
from sinklab.assessing.reading import Effect, PartInput, refused
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.tables import PlotAxis


class KeptKeys(Effect):
    """Loss of the continuation with `budget` keys of the prompt, chosen by the policy `method`.

    Attributes:
        first_kept: fraction of the pairs (sequence, KV head) that keep the first key, or the first learned token.
            Layers in which the continuation does not see it are excluded; None if there are no others.
    """

    method: str
    budget: int
    first_kept: float | None


class PromptCache(AssessPart):
    """Loss of the continuation by policy and budget.

    Attributes:
        prompt: number of tokens P of the prompt, learned leading tokens not included.
        first: number n of first keys, limited to C - 1 for each budget C.
        methods: losses over the targets from position P + 2 on, the first that a query after the prompt predicts. The
            targets of `unchanged` are the same.
    """

    name = "prompt_cache"
    question = "Which keys of a prompt must be kept?"
    layout = PartFigure(
        "Keeping few keys of a prompt",
        "Loss added to {0.unchanged.loss:.3f} after prompts of {0.prompt:,} tokens ({0.sequences} sequences) of which "
        "few keys are kept, by method and number of keys; random keys are the control.",
        PlotAxis("Keys of the prompt kept", "x", "keys", order=()),
        tooltip=(*PartFigure.tooltip, ("first_kept", "KV heads that keep the first key", ".0%")),
    )

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
        return refused(adapter, PromptKeys(CachePolicy("probe", latest_attention), KeyBudget(1)))

    @classmethod
    def run(cls, given: PartInput) -> "PromptCache":
        """Measure the loss of the continuation for every policy, and every budget that is smaller than the prompt."""
        reader, settings = given.reader(), given.settings
        prompt = given.tokens_NT.shape[1] // 2
        sizes = [KeyBudget(C, min(settings.most_kept, C - 1), settings.seed) for C in settings.budgets if prompt > C]
        edits = [PromptKeys(policy, size) for size in sizes for policy in policies_of(cls.name)]
        given.passes.expect(len(edits) * len(given.tokens_NT))
        found = []
        for edit in edits:
            effect = reader.under(edit).effect(start=prompt + 2)
            kept = torch.cat([one.flatten() for one in edit.first_kept]).float() if edit.first_kept else None
            share = None if kept is None else float(kept.mean())
            labels = {"method": edit.policy.name, "budget": edit.size.keys, "first_kept": share}
            found.append(KeptKeys(**labels, **effect.model_dump()))
        shared: dict[str, Any] = {**reader.result_fields(), "unchanged": reader.unchanged.effect(start=prompt + 2)}
        return cls(**shared, prompt=prompt, first=settings.most_kept, methods=found)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all policies at the smallest budget."""
        yield self.row("unchanged", self.unchanged, f"{self.sequences} prompts of {self.prompt:,} tokens")
        smallest = min(one.budget for one in self.methods)
        for one in self.methods:
            answer = f"{one.method}, {one.budget:,} of {self.prompt:,} keys" if one.budget == smallest else ""
            kept = "" if one.first_kept is None else f"first key kept by {100 * one.first_kept:.0f} % of KV heads"
            points = [(one.method, one.budget)]
            yield self.row(f"{one.method}, {one.budget} keys", one, kept, answer=answer, points=points)

    def figure(self) -> PartFigure:
        points = [{**self.point(one, one.method, one.budget), "first_kept": one.first_kept} for one in self.methods]
        return self.drawn(points)


@dataclass
class PromptKeys:
    """Attention edit: queries after the prompt see the keys of the prompt that a policy keeps.

    The prompt is the first half of the sequence, and the learned leading tokens before it.

    Attributes:
        first_kept: whether the first key is kept, by sequence and KV head; a tensor (B, G) for each call of a layer in
            which some query after the prompt sees it.
    """

    policy: CachePolicy
    size: KeyBudget
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
        kept_BGP = self.policy.of_prompt(layer.cut(P), self.size, needed_BGP)
        if needed_BGP[..., 0].any():
            self.first_kept.append(kept_BGP[..., 0].cpu())
        seen_BGLL = torch.ones(B, groups, L, L, dtype=torch.bool, device=kept_BGP.device).tril()
        seen_BGLL[:, :, P:, :P] = kept_BGP[:, :, None]
        return layer.masked(Dense(seen_BGLL.repeat_interleave(layer.call.q_BHTD.shape[1] // groups, 1)))
