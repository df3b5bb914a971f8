"""`sinklab advise`: settings for serving and quantising a model, decided from its assessment.

Every decision compares losses on the same text with a tolerance in nats per token:

    first tokens     the smallest n whose streaming loss exceeds that of the largest n tried by at most the tolerance,
                     in every cache size (part `streaming`)
    BOS              needed if the loss without it exceeds the loss with it by more than the tolerance (`bos`)
    K and V format   the format with the fewest bits per number whose added loss is at most the tolerance, for keys
                     alone, values alone, and both (`kv_formats`)
    layers           those whose keys and values alone, in the fewest bits tried (3), change the predictions by a
                     divergence above the tolerance (`kv_formats`)
    KV heads         the same for a single KV head in 2 bits (`kv_cache`)
    activations      static int8 scales if they add at most the tolerance more than a scale per token (`quantisation`)

The settings of a server use only formats that it can run with the model (`Served`). vLLM's TurboQuant presets need
layers without windows and sink logits, its nvfp4 a Blackwell card (SM100). llama.cpp's formats need a key width that is
a multiple of 32, and it cannot shift the cache of layers with windows. SGLang's fp4_e2m1 has other scales than nvfp4
and is not measured.

First tokens and BOS are `undecided` where a loss that they rest on is (`judged`). Undecided formats are named and not
chosen. The other decisions have no such check.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from sinklab.assessing.assess_model import Assessment, assess, open_separable, text_or_default
from sinklab.assessing.part import SAFE, UNDECIDED, AssessText, judged
from sinklab.assessing.parts.bos import Bos
from sinklab.assessing.parts.kv_cache import KVCache
from sinklab.assessing.parts.kv_formats import BLOCK, BY_LAYER, FORMATS, KVFormats, StoredFormat
from sinklab.assessing.parts.quantisation import STATIC, Quantisation
from sinklab.assessing.parts.streaming import Streaming
from sinklab.assessing.reading import Effect, probe
from sinklab.assessing.settings import TOLERANCE, AssessOptions, settings_for
from sinklab.attention.masks import Window
from sinklab.files import write_text
from sinklab.jobs import Observer, ignore
from sinklab.models.families import has_windows
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, base_and_adapters
from sinklab.opening import Model, is_run
from sinklab.schema import VersionedDocument

ADVICE = "advice.txt"
PARTS = ("streaming", "quantisation", "kv_cache", "kv_formats", "bos")
KEPT = (0, 1, 2, 4, 8, 16)
PREFIXES = 4  # maximum number of tokens named for a prefix
PER_TOKEN = "int8 per token"
EXPORTED = "EXPORTED"
"""Directory of an exported run in the commands of servers."""
READ = "vLLM 0.25, SGLang and llama.cpp as documented in November 2026, kvpress 0.5"
"""Versions whose documentation the settings follow."""


@dataclass(frozen=True)
class Decision:
    """A decision and the numbers that it rests on.

    Attributes:
        question: what is decided.
        answer: the decision in words, or `UNDECIDED`.
        evidence: the numbers, in a sentence.
    """

    question: str
    answer: str
    evidence: str


@dataclass(frozen=True)
class Served:
    """Facts about a model that decide which settings a server can run.

    Attributes:
        model: model that the command of a server names.
        revision: its revision on the hub, if not the newest; `adapters`: PEFT adapters that are applied to it.
        windows: whether layers attend to a sliding window or to chunks; `sink_logits`: whether they have sink logits.
        width: numbers of a key.
        layers: numbers of the attention layers among all layers of the model, from 1; empty if all have attention.
        before: beginning of a command that exports a run of sinklab, which servers cannot load; else empty.
    """

    model: str
    revision: str | None = None
    adapters: tuple[str, ...] = ()
    windows: bool = False
    sink_logits: bool = False
    width: int = BLOCK
    layers: tuple[int, ...] = ()
    before: str = ""

    @classmethod
    def of(cls, opened: Model, loading: Loading) -> "Served":
        """Return these facts about an opened model."""
        calls = [layer.call for layer in probe(opened.adapter)]
        facts: dict[str, Any] = {
            "windows": has_windows(opened.module.config) or any(isinstance(one.mask, Window) for one in calls),
            "sink_logits": any(one.logit_BHT is not None for one in calls),
            "width": calls[0].k_BGTD.shape[-1],
            "layers": opened.adapter.kinds.attention,
        }
        if is_run(opened.name):
            return cls(EXPORTED, before=f"sinklab export {opened.name} {EXPORTED} && ", **facts)
        base, adapters = base_and_adapters(opened.name, loading.adapters)
        return cls(base, loading.revision, tuple(adapters), **facts)


class Advice(VersionedDocument):
    """Decisions for serving a model, and the settings of inference servers that follow from them.

    Attributes:
        model: name of the model.
        tolerance: largest loss in nats per token that a decision may add.
        decisions: question, answer and evidence of each decision.
        servers: settings by server, ready to paste.
        notes: notes of the assessment.
    """

    model: str
    tolerance: float
    decisions: list[Decision]
    servers: dict[str, str]
    notes: list[str]

    def text(self, full: bool = True) -> str:
        """Return the decisions and the settings as text; with `full`, each decision has its evidence below it."""
        lines = [f"{self.model}: within {self.tolerance:g} nats per token"]
        for one in self.decisions:
            lines.append(f"  {one.question}: {one.answer}")
            lines += [f"      {one.evidence}"] if full else []
        lines += [f"{server}:  {setting}" for server, setting in self.servers.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes if full)])


def advise(
    model: str,
    text: Path | None,
    options: AssessOptions,
    tolerance: float = TOLERANCE,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Advice:
    """Assess a model with the parts that the decisions need, and decide.

    Args:
        model, text, loading, out, observe: see `assess`; the assessment is saved in `out` and resumed, and
            the advice is written to advice.txt there.
        options: settings of the assessment, without `parts`; `kept` defaults to 0, 1, 2, 4, 8 and 16 first tokens.
        tolerance: largest added loss in nats per token.

    Raises:
        InputError, SinklabError: see `assess`.
    """
    opened = open_separable(model, loading, options.length or 0)
    settings = settings_for(opened, options.model_copy(update={"parts": PARTS}))
    kept = tuple(first for first in options.kept or KEPT if first < min(settings.caches))
    chosen = options.model_copy(update={"parts": PARTS, "kept": kept})
    done = assess(opened, text, chosen, loading=loading, out=out, where_possible=True, observe=observe)
    text = cast("Path | None", text_or_default(opened.name, text))
    reading = AssessText(opened, text, options.column)
    tokens_NT = reading.sequences(settings.sequences, settings.length)
    default_bos = bool(opened.bos_ids) and int(tokens_NT[0, 0]) in opened.bos_ids
    served = Served.of(opened, loading)
    advice = advice_of(done, tolerance, default_bos, opened.token_texts, tokens_NT, served)
    if out is not None:
        write_text(out / ADVICE, advice.text() + "\n")
    return advice


def advice_of(
    done: Assessment,
    tolerance: float,
    default_bos: bool,
    token_texts: Callable[[list[int]], list[str]],
    tokens_NT: Tensor,
    served: Served,
) -> Advice:
    """Decide from a finished assessment.

    Args:
        default_bos: whether the tokenizer puts BOS in front of a text.
        token_texts: function from token ids to their texts.
        tokens_NT: token ids of the assessed sequences, of which `kv_cache` reads the first.
    """
    results = done.results
    decisions, servers = list[Decision](), dict[str, str]()
    first = ""
    if isinstance(streaming := results.get("streaming"), Streaming):
        decisions.append(first_tokens(streaming, tolerance)[1])
        first = decisions[0].answer
    if isinstance(bos := results.get("bos"), Bos):
        decisions.append(_bos(bos, tolerance, default_bos))
    if isinstance(formats := results.get("kv_formats"), KVFormats):
        for part, what in (("keys", "keys"), ("values", "values"), ("everything", "keys and values")):
            decisions.append(_format(formats, tolerance, part, f"format of {what}"))
        decisions.append(_layers(formats, tolerance, served))
        servers = dict(_servers(served, first, formats, tolerance))
    if isinstance(cache := results.get("kv_cache"), KVCache):
        decisions += [_heads(cache, tolerance), _prefix(cache, token_texts, tokens_NT)]
    if isinstance(quantisation := results.get("quantisation"), Quantisation):
        decisions.append(_activations(quantisation, tolerance))
    if first:
        press = "StreamingLLMPress(compression_ratio=0.5, n_sink={})"
        repeat = "repeat without --quick, or with more --text and --sequences (and another --out)"
        undecided = f"# undecided: {press.format('N')}; {repeat}"
        servers["kvpress"] = undecided if first == UNDECIDED else f"press = {press.format(first)}"
    decisions += [Decision(part, "not assessed", why) for part, why in done.skipped.items() if part in PARTS]
    notes = [*done.notes, *done.errors(), f"settings follow the documentation of {READ}"]
    return Advice(model=done.model, tolerance=tolerance, decisions=decisions, servers=servers, notes=notes)


def first_tokens(streaming: Streaming, tolerance: float) -> tuple[int | None, Decision]:
    """Return the number of first tokens that must stay in the cache, or None if it is undecided, and the decision."""
    most = max(one.first for one in streaming.caches)
    largest = {one.cache: one.loss for one in streaming.caches if one.first == most}
    counts = sorted({one.first for one in streaming.caches})
    gaps = {
        n: [(one.loss - largest[one.cache], one.gap_error or 0.0) for one in streaming.caches if one.first == n]
        for n in counts
    }
    n = next(n for n in counts if all(gap <= tolerance for gap, _ in gaps[n]))
    tried = [pair for k in counts if k <= n for pair in gaps[k]]
    unclear = any(judged(gap, error, tolerance) == UNDECIDED for gap, error in tried)
    listed = ", ".join(f"{k}: {max(gap for gap, _ in gaps[k]):+.3f}" for k in counts if k != most)
    evidence = (
        f"loss (nats per token) above that with {most} kept, by tokens kept: {listed} (largest of the caches, "
        f"{streaming.sequences} x {streaming.length:,} tokens, "
        f"standard errors up to {max(error for _, error in tried):.3f})"
    )
    question = "first tokens that must stay in the cache"
    if unclear:
        return None, Decision(question, UNDECIDED, f"{evidence}; pass more text")
    return n, Decision(question, str(n), evidence)


def _bos(bos: Bos, tolerance: float, default_bos: bool) -> Decision:
    lost = bos.unchanged.loss - bos.with_bos.loss
    is_there = "the tokenizer adds it" if default_bos else "the tokenizer does not add it"
    evidence = f"without it the same tokens cost {lost:+.3f} nats{_error(bos.with_bos)}; {is_there}"
    if judged(lost, bos.with_bos.error, tolerance) == UNDECIDED:
        return Decision("BOS", UNDECIDED, f"{evidence}; pass more text")
    needed = "must be there" if lost > tolerance else "may be left out" if lost > -tolerance else "must not be added"
    return Decision("BOS", needed, evidence)


def _bits(one: StoredFormat, part: str) -> float:
    stored = FORMATS[one.name]
    return {"keys": stored.key_bits, "values": stored.value_bits, "everything": one.bits}[part]


def chosen_format(
    formats: KVFormats, tolerance: float, part: str, among: Sequence[str] = tuple(FORMATS)
) -> tuple[str | None, list[str]]:
    """Return the format with the fewest bits that is within the tolerance, and formats of fewer bits that may be.

    The format's added loss must be at least two standard errors below the tolerance; None if there is none. The list
    has formats whose added loss differs from the tolerance by less, ordered by bits.

    Args:
        part: what is stored in it: "keys", "values" or "everything".
        among: names of the formats that can be chosen.
    """
    undecided = list[str]()
    known = [(_bits(one, part), getattr(one, part), one.name) for one in formats.formats if one.name in among]
    for _, effect, name in sorted(known, key=lambda one: (one[0], one[1].loss)):
        verdict = judged(effect.loss - formats.unchanged.loss, effect.error, tolerance)
        if verdict == SAFE:
            return name, undecided
        undecided += [name] if verdict == UNDECIDED else []
    return None, undecided


def _format(formats: KVFormats, tolerance: float, part: str, question: str) -> Decision:
    by_bits = sorted(formats.formats, key=lambda one: _bits(one, part))
    effects: dict[str, Effect] = {one.name: getattr(one, part) for one in by_bits}
    bits = {one.name: _bits(one, part) for one in by_bits}
    shown = ", ".join(f"{name} {one.loss - formats.unchanged.loss:+.3f}" for name, one in effects.items())
    name, undecided = chosen_format(formats, tolerance, part)
    more = "" if name else "; none is safely within the tolerance"
    if undecided:
        errors = ", ".join(f"{one}{_error(effects[one])}" for one in undecided)
        more += f"; undecided: {errors}, pass more text"
    answer = f"{name}, {bits[name]:.3g} bits" if name else "16 bits"
    return Decision(question, answer, f"added loss (nats per token): {shown}{more}")


def _layers(formats: KVFormats, tolerance: float, served: Served) -> Decision:
    """Decide which layers (1-based) must not be rounded to the format with the fewest bits."""
    question, name = "layers (from 1) not to be rounded to 3 bits", BY_LAYER[-1]
    rows = [one for one in formats.layers if one.name == name]
    if not formats.layers:
        return Decision(question, "not assessed", "--quick rounds no layer alone")
    costly = [one for one in rows if one.everything.kl > tolerance]
    top = sorted(rows, key=lambda one: -one.everything.kl)[:3]
    listed = ", ".join(
        f"layer {one.layer} KL {one.everything.kl:.4f} ({100 * one.share:.0f} % due to the sink)" for one in top
    )
    answer = ", ".join(str(one.layer) for one in costly) or "none"
    evidence = f"each layer alone in {name}; costliest: {listed}"
    if costly:
        numbers = dict(enumerate(served.layers, 1))
        skipped = " ".join(str(numbers.get(one.layer, one.layer) - 1) for one in costly)
        evidence += f"; vLLM: --kv-cache-dtype-skip-layers {skipped}"
    return Decision(question, answer, evidence)


def _heads(cache: KVCache, tolerance: float) -> Decision:
    question = "KV heads (layer.head) not to be rounded to 2 bits"
    if not cache.heads:
        return Decision(question, "not assessed", "--quick rounds no KV head alone")
    costly = [one for one in cache.heads if one.kl > tolerance]
    by_divergence = sorted(cache.heads, key=lambda one: -one.kl)[:3]
    listed = ", ".join(f"{one.layer}.{one.head} KL {one.kl:.4f}" for one in by_divergence)
    named = ", ".join(f"{one.layer}.{one.head}" for one in costly[:12]) + (", ..." if len(costly) > 12 else "")
    return Decision(question, named or "none", f"each head alone in {cache.head_bits} bits; costliest: {listed}")


def _prefix(cache: KVCache, token_texts: Callable[[list[int]], list[str]], tokens_NT: Tensor) -> Decision:
    question = "tokens to put in front (PrefixQuant)"
    if cache.outliers is None:
        return Decision(question, "unknown", "no down projection was found, so outlier tokens are unknown")
    at = [(n, position - 1) for n, some in enumerate(cache.outliers) for position in some]
    first = sum(place == 0 for _, place in at)
    counted = Counter(int(tokens_NT[n, place]) for n, place in at if place > 0)
    where = f"outlier tokens: the first of {first} of {len(cache.outliers)} sequences"
    if not counted:
        answer = "BOS, or any token" if first else "none"
        return Decision(question, answer, f"{where}, no others")
    ids = [token for token, _ in counted.most_common(PREFIXES)]
    named = ", ".join(f"{text!r} ({token})" for text, token in zip(token_texts(ids), ids, strict=True))
    return Decision(question, named, f"{where}, and {sum(counted.values())} others")


def _activations(quantisation: Quantisation, tolerance: float) -> Decision:
    by_name = {one.name: one.everything.loss - quantisation.unchanged.loss for one in quantisation.settings}
    static, token = by_name[STATIC], by_name[PER_TOKEN]
    due = next(one for one in quantisation.settings if one.name == STATIC)
    evidence = f"{STATIC} {static:+.3f} ({due.due_said}), {PER_TOKEN} {token:+.3f}"
    return Decision(
        "scales of int8 activations", "static" if static - token <= tolerance else "one per token", evidence
    )


def _error(effect: Effect) -> str:
    return "" if effect.error is None else f" (standard error {effect.error:.3f})"


def _servers(served: Served, first: str, formats: KVFormats, tolerance: float) -> Iterator[tuple[str, str]]:
    """Yield the settings of each server, in the smallest of its own formats that is within the tolerance.

    A comment names undecided formats of fewer bits. `first` is the number of first tokens to keep, `UNDECIDED` or
    empty.
    """

    def chosen(part: str, otherwise: str, **names: str) -> tuple[str, list[str]]:
        """Return the server's names of a format and of those undecided; `names`: ours, with __ for a space, to its."""
        ours = {name.replace("__", " "): theirs for name, theirs in names.items()}
        name, undecided = chosen_format(formats, tolerance, part, tuple(ours))
        return ours[name] if name else otherwise, [ours[one] for one in undecided]

    def comment(undecided: Sequence[str], *more: str) -> str:
        close = [f"close to the tolerance: {', '.join(undecided)}"] if undecided else []
        return f"  # {'; '.join([*close, *more])}" if undecided or more else ""

    model = served.model + (f" --revision {served.revision}" if served.revision else "")
    named = " ".join(f"{Path(one).name}={one}" for one in served.adapters)
    lora = f" --enable-lora --lora-modules {named}" if named else ""
    plain = not (served.windows or served.sink_logits)
    presets = {name: name for name in FORMATS if plain and name.startswith("turboquant")}
    dtype, unclear = chosen("everything", "auto", fp8="fp8", **presets)
    on_blackwell, _ = chosen("everything", "auto", fp8="fp8", nvfp4="nvfp4", **presets)
    more = ["on a B200: nvfp4"] if on_blackwell == "nvfp4" else []
    yield "vLLM", f"{served.before}vllm serve {model}{lora} --kv-cache-dtype {dtype}{comment(unclear, *more)}"
    dtype, unclear = chosen("everything", "auto", fp8="fp8_e4m3")
    lora = f" --lora-paths {named}" if named else ""
    launch = f"{served.before}python -m sglang.launch_server --model-path {model}{lora}"
    yield "SGLang", f"{launch} --kv-cache-dtype {dtype}{comment(unclear)}"
    kinds = {"q8_0": "q8_0", "q4_0__rotated": "q4_0"} if served.width % BLOCK == 0 else {}
    keys, unclear_keys = chosen("keys", "f16", **kinds)
    values, unclear_values = chosen("values", "f16", **kinds)
    unclear = [*(f"keys {name}" for name in unclear_keys), *(f"values {name}" for name in unclear_values)]
    keep, more = "", [] if kinds else [f"q8_0 and q4_0 need a head width that is a multiple of {BLOCK}"]
    if served.windows:
        more.append("the cache of layers with windows cannot be shifted")
    elif first == UNDECIDED:
        more.append("undecided: --context-shift --keep N")
    elif first.strip("0"):
        keep = f" --context-shift --keep {first}"
    file = served.model if served.model.endswith(".gguf") else "MODEL.gguf"
    lora = "".join(f" --lora {Path(one).name}.gguf" for one in served.adapters)
    yield "llama.cpp", f"llama-server -m {file}{lora} -ctk {keys} -ctv {values}{keep}{comment(unclear, *more)}"
