"""Compare an inference server with the model that it should serve: the log-probabilities of a prompt's tokens.

    d = mean over tokens of |log p_server(x_t | x_<t) - log p(x_t | x_<t)|        nats

p is the model here as configured, or altered in a way in which servers err:

    no sink logits   softmax without the learned logits (vllm-project/vllm#52156)
    no window        full causal attention in the layers with a sliding window (sgl-project/sglang#30050)
    no softcap       attention scores without their softcap
    no BOS, two BOS  the same tokens without the tokenizer's special tokens in front, or with them twice
    BOS added        the same tokens with BOS in front, if the tokenizer puts none

An alteration is tried if the model has the feature, alone and with the others. The prompt is sent as token ids, and as
a text, which the server tokenises.

The verdict is the model with the fewest alterations whose d is at most twice (`NEARER`) the smallest d. If that is the
model as configured and its d exceeds the tolerance, the server differs from all. The tolerance is three times
(`ROUNDINGS`) the rounding: d between the model here and itself in bfloat16, that is under autocast, with the LM head,
and with the input x of every block rounded, after a perturbation x (1 + eps n / 4) with n normal, which rounds
differently also if the weights are in bfloat16. It is the mean of four perturbations (`DRAWS`), since rounding sends a
few tokens to other experts of a mixture.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sinklab.assessing.reading import Change, changed_attention
from sinklab.assessing.server import PromptScores, ScoredToken, Server
from sinklab.assessing.settings import FEWEST_SCORED
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import CAUSAL, visible_keys
from sinklab.data.corpora import default_text, documents
from sinklab.errors import InputError, SinklabError
from sinklab.files import check_results, write_json
from sinklab.jobs import unsaved
from sinklab.models.families import sliding_window
from sinklab.models.hooks import evaluating, replaced_inputs
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.models.memory_budget import LOGITS_AT_ONCE
from sinklab.opening import Model, is_run, open_model
from sinklab.schema import Omitted, ReadDocument, VersionedDocument
from sinklab.tables import Table, TableColumn, table_of

PARITY = "parity.json"
AS_CONFIGURED, DIFFERS, SPLIT = "as configured", "differs from all", "tokenised differently"
SINKS, WINDOW, SOFTCAP = "no sink logits", "no window", "no softcap"
NEARER = 2.0
ROUNDINGS = 3.0
DRAWS = 4
LEAST_TOLERANCE = 1e-4
TOKENS = 512
BEYOND_WINDOW = 1.5  # default length in windows
IDS, TEXT, TEXT_WITH_BOS = "token ids", "text", "text that begins with BOS"

CHANGES: dict[str, Callable[[LayerCall], LayerCall]] = {
    SINKS: lambda layer: layer.changed(logit_BHT=None),
    WINDOW: lambda layer: layer.changed(mask=CAUSAL),
    SOFTCAP: lambda layer: layer.changed(cap=None),
}


class Compared(ReadDocument):
    """Log-probabilities of the server compared with those of the model here, as configured or altered.

    Attributes:
        variant: name of the model here: `AS_CONFIGURED`, or its alterations, separated by ", ".
        mean, largest: mean and largest |difference of log p| over the scored tokens, in nats.
        position: 1-based position in the text of the token with the largest difference.
        beyond: mean over the tokens that a sliding window separates from the first one; None without such tokens.
        effect: mean |difference of log p| that the alteration makes here.
    """

    variant: str
    mean: float
    largest: float
    position: int
    beyond: Omitted[float] = None
    effect: float


class JudgedPrompt(ReadDocument):
    """A prompt that the server scored.

    Attributes:
        prompt: form in which it was sent: `IDS`, `TEXT` or `TEXT_WITH_BOS`.
        way: request that returned the log-probabilities.
        scored: number of compared log-probabilities.
        rounding, tolerance: see the module docstring; nats.
        verdict: the variant that the server serves, `DIFFERS` or `SPLIT`.
        compared: the comparisons, as configured first; empty if the text is tokenised differently.
    """

    prompt: str
    way: str
    scored: int
    rounding: float
    tolerance: float
    verdict: str
    compared: list[Compared]

    @property
    def nearest(self) -> Compared:
        """The comparison with the smallest mean."""
        return min(self.compared, key=lambda one: one.mean)

    def table(self) -> Table:
        """Return the comparisons as a table: with one alteration or none, the nearest, and that of the verdict."""
        columns: list[tuple[TableColumn, Callable[[Compared], float | str | None]]] = [
            (TableColumn("model here", text=True), lambda one: one.variant),
            (TableColumn("mean |Δ log p|", "nats", ".4f"), lambda one: one.mean),
            (TableColumn("beyond the window", "nats", ".4f"), lambda one: one.beyond),
            (TableColumn("largest", "nats", ".3f"), lambda one: one.largest),
            (TableColumn("at token", form="d"), lambda one: one.position),
            (TableColumn("changes here", "nats", ".4f"), lambda one: one.effect),
        ]
        title = f"{self.prompt}: {self.verdict}"
        note = f"{self.scored:,} log-probabilities by {self.way}; tolerance {self.tolerance:.4f} nats"
        wanted = {self.verdict, self.nearest.variant} if self.compared else set()
        shown = [one for one in self.compared if _alterations(one.variant) < 2 or one.variant in wanted]
        return table_of(title, shown, columns, [note]).without_empty_columns()


class Parity(VersionedDocument):
    """Content of parity.json.

    Attributes:
        server: address of the server.
        served: name of the model there.
        model: name or path of the model here.
        dtype: dtype in which the model here was loaded.
        length: number of tokens of the text.
        window: smallest number of keys that the last token sees in a layer; None if it sees all of them.
        prompts: the prompts that the server scored.
        notes: notes on the model, the text and the server.
    """

    server: str
    served: str
    model: str
    dtype: str
    length: int
    window: Omitted[int] = None
    prompts: list[JudgedPrompt]
    notes: list[str]

    @property
    def verdict(self) -> str:
        """The first verdict other than `AS_CONFIGURED`; a text that begins with BOS does not count."""
        verdicts = [one.verdict for one in self.prompts if one.prompt != TEXT_WITH_BOS]
        return next((one for one in verdicts if one != AS_CONFIGURED), AS_CONFIGURED)

    @property
    def as_configured(self) -> bool:
        """Whether the server's log-probabilities are those of the model as configured, up to rounding."""
        return self.verdict == AS_CONFIGURED

    def sentence(self) -> str:
        """Return the verdict in a sentence."""
        if self.verdict == SPLIT:
            return f"{self.server} tokenises the text differently from {self.model}"
        if self.verdict == DIFFERS:
            return f"{self.server} differs from {self.model}, as configured and altered"
        how = self.verdict if self.as_configured else f"with {self.verdict}"
        return f"{self.server} serves {self.model} {how}"


def compare_server(
    url: str,
    model: str,
    text: Path | None = None,
    *,
    length: int | None = None,
    column: str | None = None,
    tolerance: float | None = None,
    served: str | None = None,
    key: str | None = None,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    step: Callable[[str], None] = lambda said: None,
) -> Parity:
    """Ask a server for the log-probabilities of a text, and find the model here that is nearest.

    Args:
        url, served, key: see `Server`.
        model: the model that the server should serve, see `open_model`; a run is loaded as its export.
        text, column: see `documents`; None for the text that comes with sinklab.
        length: tokens of the text; None for `TOKENS`, or one and a half sliding windows if that is more.
        tolerance: largest mean |difference of log p| of a server that serves the model as configured, in nats; None for
            three times the rounding.
        out: directory for parity.json.
        step: callback for the current activity.

    Raises:
        InputError: if the server, the model, the text or `out` is invalid, the text is too short, or the server returns
            no log-probabilities of a prompt.
        SinklabError: if the model cannot be loaded, or a log-probability is not finite.
        UnsavedError: if parity.json cannot be saved.
    """
    if out is not None:
        check_results(out, [PARITY])
    step(f"asking {url}")
    server = Server(url, served, key)
    step(f"loading {model}")
    opened = open_model(model, loading, as_transformers=is_run(model))
    opened.adapter.check_causal()
    if not opened.adapter.has_head:
        raise InputError(f"{model} has no LM head, and so no log-probabilities: pass the model with its head")
    window = sliding_window(opened.module.config) or 0
    said, ids = _text_of(opened, text, column, length, window)
    reader = _Reader(opened, ids, window)
    prompts = list[JudgedPrompt]()
    bos = opened.special
    forms: list[tuple[str, str | Sequence[int]]] = [(IDS, [*bos, *ids]), (TEXT, said)]
    forms += [(TEXT_WITH_BOS, opened.decode(list(bos)) + said)] if bos else []
    failures = list[str]()
    for form, prompt in forms:
        step(f"the server scores {form}")
        try:
            scores = server.score(prompt)
        except InputError as error:
            failures.append(str(error))
            continue
        step(f"comparing {form}")
        prompts.append(reader.judged(form, scores, tolerance))
    if all(one.prompt == TEXT_WITH_BOS for one in prompts):
        raise InputError(failures[0])
    notes = [*opened.notes, *reader.notes, *failures, *_notes_on_bos(prompts)]
    found = Parity(
        server=server.root,
        served=server.name,
        model=opened.name,
        dtype=str(opened.adapter.dtype).removeprefix("torch."),
        length=len(ids),
        window=reader.window,
        prompts=prompts,
        notes=notes,
    )
    if out is not None:
        with unsaved(lambda: found):
            write_json(out / PARITY, found.document())
    return found


def verdict_of(means: Mapping[str, float], tolerance: float) -> str:
    """Return the verdict for the mean |difference of log p| of each model here, by name (`Compared.variant`)."""
    limit = max(NEARER * min(means.values()), LEAST_TOLERANCE)
    near = [name for name, mean in means.items() if mean <= limit]
    simplest = min(near, key=lambda name: (_alterations(name), means[name]))
    return DIFFERS if simplest == AS_CONFIGURED and means[simplest] > tolerance else simplest


def _alterations(name: str) -> int:
    return 0 if name == AS_CONFIGURED else 1 + name.count(", ")


def _text_of(
    model: Model, text: Path | None, column: str | None, length: int | None, window: int
) -> tuple[str, list[int]]:
    """Return a text of about `length` tokens, and its token ids, without special tokens in front."""
    adapter = model.adapter
    most = adapter.context - 2 * max(1, len(model.special))  # with BOS twice
    if length is not None and length > most and adapter.ends:
        raise InputError(f"--length {length}: {adapter.ends}; set at most --length {most}")
    wanted = length or min(max(TOKENS, int(BEYOND_WINDOW * window)), most)
    ids, render = list[int](), model.conversations().render
    for document in documents(str(text or default_text()), render=render, column=column):
        ids += model.encode(f"{document}\n\n")
        if len(ids) >= wanted:
            break
    start = len(bos) if (bos := list(model.special)) and ids[: len(bos)] == bos else 0  # of a chat template
    said = model.decode(ids[start : start + wanted])
    if len(again := list(model.encode(said))) < FEWEST_SCORED:
        raise InputError(f"{text} has {len(again)} tokens: at least {FEWEST_SCORED} are needed")
    model.arrange(torch.tensor([again]), 0, None)
    return said, again


def _notes_on_bos(prompts: Sequence[JudgedPrompt]) -> Iterator[str]:
    for one in prompts:
        if one.prompt == TEXT_WITH_BOS and ("BOS" in one.verdict or one.verdict == SPLIT):
            yield (
                f"a text that begins with BOS, as chat templates write it: {one.verdict}. Leave BOS out of such texts, "
                "or send them with add_special_tokens false"
            )


class _Variant(NamedTuple):
    """A model here: the tokens in front of the text, its name, and the changes of its attention."""

    prefix: tuple[int, ...]
    name: str = AS_CONFIGURED
    changes: tuple[str, ...] = ()

    def change(self, layer: LayerCall) -> LayerCall:
        """Change a call of the attention."""
        for name in self.changes:
            layer = CHANGES[name](layer)
        return layer


@dataclass
class _Features:
    """Features of the attention calls of a text, and the smallest number of keys that the last query sees."""

    found: set[str]
    window: int | None = None

    def read(self, layer: LayerCall) -> LayerCall:
        keys = layer.call.k_BGTD.shape[2]
        if layer.call.logit_BHT is not None:
            self.found.add(SINKS)
        if layer.call.cap is not None:
            self.found.add(SOFTCAP)
        if not layer.call.mask.plain:
            seen = int(visible_keys(layer.call.mask, layer.length, layer.call.q_BHTD.device, keys)[..., -1].min())
            if seen < keys:
                self.found.add(WINDOW)
                self.window = min(seen, self.window or seen)
        return layer


class _Reader:
    """Log-probabilities of a text's tokens in the model, as configured and altered; hidden states are kept.

    Args:
        ids: token ids of the text, without special tokens.
        declared: width of the sliding window in the model's config, 0 if there is none.
    """

    def __init__(self, model: Model, ids: list[int], declared: int) -> None:
        self.adapter, self.ids = model.adapter, ids
        self.bos = tuple(model.special)
        self._other_bos = () if self.bos else model.bos_ids[:1]
        self._kept = dict[tuple[_Variant, int], Tensor]()
        self._fixed = self.adapter.inseparable()
        self.notes = [f"only BOS is altered: {self._fixed}"] if self._fixed else []
        features = _Features(set())
        if not self._fixed:
            self._states(_Variant(self.bos), features.read)
        self.features, self.window = features.found, features.window
        if declared and not self._fixed and WINDOW not in self.features:
            self.notes.append(
                f"the text has {len(ids):,} tokens, not more than the sliding window of {declared:,}: errors of the "
                "window do not show; pass more text, or a larger --length"
            )

    def judged(self, form: str, scores: PromptScores, tolerance: float | None) -> JudgedPrompt:
        """Compare the server's scores of a prompt with all models here.

        Raises:
            SinklabError: if a log-probability is not finite.
        """
        if not self._same_tokens(scores):
            return JudgedPrompt(
                prompt=form, way=scores.way, scored=0, rounding=0, tolerance=0, verdict=SPLIT, compared=[]
            )
        scored = [(len(self.ids) + one.place, one) for one in scores.scored]
        found = self._compared(form, scores.way, [(at, self._own(at, one), one.log_p) for at, one in scored], tolerance)
        if scores.echoed and found.nearest.mean > found.tolerance:
            later = [(at + 1, self.ids[at], one.log_p) for at, one in scored]
            other = self._compared(form, scores.way, later, tolerance)
            if NEARER * other.nearest.mean <= found.nearest.mean:
                found = other
                self.notes.append(
                    f"{form}: for each token the server returns the log-probability that it follows itself, as "
                    "llama-cpp-python does without BOS (abetlen/llama-cpp-python#1983); they are compared as such"
                )
        self._note(found)
        return found

    def _own(self, at: int, one: ScoredToken) -> int:
        """Return the id of a scored token, which is the text's own token if the server does not return it."""
        return self.ids[at] if one.token is None else one.token

    def _compared(
        self, form: str, way: str, scored: Sequence[tuple[int, int, float]], tolerance: float | None
    ) -> JudgedPrompt:
        """Compare log-probabilities with those of all models here.

        Args:
            scored: for each token the number of the text's tokens before it, its id and the server's log-probability.
                Those of the first token are left out, because it is not predicted without BOS.
        """
        at_S, tokens_S, log_ps = zip(*(one for one in scored if one[0] >= 1), strict=True)
        log_p_S = torch.tensor(log_ps, dtype=torch.float64)
        here_S, *rounded = (self._log_p(_Variant(self.bos), at_S, tokens_S, draw) for draw in range(1 + DRAWS))
        rounding = float((torch.stack(rounded) - here_S).abs().mean())
        limit = max(ROUNDINGS * rounding, LEAST_TOLERANCE) if tolerance is None else tolerance
        position_S = torch.tensor(at_S) + 1
        beyond_S = position_S + len(self.bos) - 1 > (self.window or math.inf)

        def compare(variant: _Variant) -> Compared:
            other_S = self._log_p(variant, at_S, tokens_S)
            error_S = (log_p_S - other_S).abs()
            if not bool(error_S.isfinite().all()):
                raise SinklabError(f"{form}: a log-probability is not finite, at the server or here")
            return Compared(
                variant=variant.name,
                mean=float(error_S.mean()),
                largest=float(error_S.max()),
                position=int(position_S[error_S.argmax()]),
                beyond=float(error_S[beyond_S].mean()) if bool(beyond_S.any()) else None,
                effect=float((other_S - here_S).abs().mean()),
            )

        compared = [compare(variant) for variant in self._variants()]
        verdict = verdict_of({one.variant: one.mean for one in compared}, limit)
        return JudgedPrompt(
            prompt=form,
            way=way,
            scored=len(at_S),
            rounding=rounding,
            tolerance=limit,
            verdict=verdict,
            compared=compared,
        )

    def _note(self, found: JudgedPrompt) -> None:
        for one in found.compared:
            if one.variant == found.verdict and one.mean > found.tolerance:
                self.notes.append(
                    f"{found.prompt}: {one.variant} is nearest, but differs by {one.mean:.2g} nats, more than "
                    f"{found.tolerance:.2g}"
                )
            if _alterations(one.variant) == 1 and one.effect <= found.rounding:
                self.notes.append(
                    f"{found.prompt}: {one.variant} changes log p here by {one.effect:.2g} nats, not more than "
                    f"rounding ({found.rounding:.2g}): this text does not show it"
                )

    def _variants(self) -> Iterator[_Variant]:
        """Yield all models here, as configured first: sets of alterations of the attention, with each BOS."""
        found = [name for name in CHANGES if name in self.features]
        prefixes: dict[tuple[str, ...], tuple[int, ...]] = {(): self.bos}
        if self.bos:
            prefixes |= {("no BOS",): (), ("two BOS",): self.bos * 2}
        elif self._other_bos:
            prefixes["BOS added",] = self._other_bos
        for alterations, prefix in prefixes.items():
            for count in range(len(found) + 1):
                for changes in itertools.combinations(found, count):
                    yield _Variant(prefix, ", ".join((*changes, *alterations)) or AS_CONFIGURED, changes)

    def _same_tokens(self, scores: PromptScores) -> bool:
        """Return whether the server has tokenised the text as the model here does, up to BOS."""
        n, bos = len(self.ids), len(self.bos or self._other_bos)
        known = scores.tokens[-n:] if scores.tokens else []
        same_number = scores.length in (None, *(n + count * bos for count in range(3)))
        return same_number and known == self.ids[n - len(known) :]

    def _log_p(self, variant: _Variant, at_S: Sequence[int], tokens_S: Sequence[int], draw: int = 0) -> Tensor:
        """Return log p of tokens, given the prefix of the variant and the first `at` tokens of the text: float64.

        Args:
            draw: number of the perturbation for a model in bfloat16; 0 for the model as it is.
        """
        device = self.adapter.device
        with evaluating(self.adapter.module), _bfloat16(device) if draw else nullcontext():
            states_SE = self._states(variant, draw=draw)[torch.tensor(at_S) + len(variant.prefix) - 1]
            rows = max(1, LOGITS_AT_ONCE // self.adapter.logits(states_SE[:1]).shape[-1])
            parts = []
            for x_RE, tokens_R in zip(states_SE.split(rows), torch.tensor(tokens_S).split(rows), strict=True):
                logits_RV = self.adapter.logits(x_RE).double()
                parts.append((logits_RV.gather(1, tokens_R[:, None].to(device))[:, 0] - logits_RV.logsumexp(1)).cpu())
        return torch.cat(parts)

    def _states(self, variant: _Variant, change: Change | None = None, *, draw: int = 0) -> Tensor:
        """Return the inputs of the LM head (T, E) for the prefix of the variant and the text.

        Args:
            change: function that reads or changes the attention calls; None for the changes of the variant.
        """
        if (found := self._kept.get((variant, draw))) is not None:
            return found
        tokens_1T = torch.tensor([[*variant.prefix, *self.ids]], device=self.adapter.device)
        module, change = self.adapter.module, change or variant.change
        attention = evaluating(module) if self._fixed else changed_attention(self.adapter, change)
        rounding = _bfloat16(self.adapter.device) if draw else nullcontext()
        with attention, rounding, replaced_inputs(self.adapter.blocks if draw else (), partial(_rounded, draw)):
            states_TE = self.adapter.hidden(tokens_1T)[0]
        return self._kept.setdefault((variant, draw), states_TE)


def _rounded(draw: int, index: int, x: Tensor) -> Tensor:
    """Round the input of block `index` to bfloat16, after a perturbation."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2**16 * draw + index)).to(x)
    return (x * (1 + torch.finfo(torch.bfloat16).eps / 4 * noise)).bfloat16().to(x.dtype)


def _bfloat16(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)
