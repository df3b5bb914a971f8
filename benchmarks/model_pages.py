"""Print the Markdown table of results/models/README.md from committed measurements and assessments of models.

    python -m benchmarks.model_pages results/models/SmolLM2-135M-Instruct results/models/gemma-3-270m

The table has a column per folder. A folder contains the measurement of natural text, and optionally measurements in
`no_bos/`, `random/`, `random_bos/`, `repeat/` and `gradients/`, and assessments in `assess/` and
`assess_heads/`. Losses are in nats per token; "±" precedes the standard error of the assessment.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from sinklab.assessing.assess_model import ASSESSMENT, Assessment, load_assessment
from sinklab.assessing.part import AssessPart
from sinklab.assessing.parts.caches import Budgets, Eviction
from sinklab.assessing.parts.heads import Heads, Pruning
from sinklab.assessing.parts.key_ablations import KeyAblations
from sinklab.assessing.parts.kv_cache import KVCache, named_positions
from sinklab.assessing.parts.quantisation import STATIC, Quantisation
from sinklab.assessing.parts.streaming import Streaming
from sinklab.assessing.parts.writer import WEIGHT, Writer
from sinklab.assessing.reading import DrawnEffect, Effect
from sinklab.measuring.answer import percent
from sinklab.measuring.measurement import Measurement

NONE = "–"
Rows = dict[str, str]


def measured_rows(folder: Path) -> Rows:
    """Return the rows of a folder's measurements: sink, loss, gradient norms and largest massive activation."""
    text = Measurement.load(folder)
    others = {
        name: Measurement.load(folder / name)
        for name in ("no_bos", "random", "random_bos", "repeat")
        if (folder / name).is_dir()
    }
    above_L = (text.importance[:, :, 0] > text.eps).mean(1) > 0.5

    def sink_1(name: str) -> str:
        return percent(others[name].sink_rate[0]) if name in others else NONE

    found = {
        "tokens measured": f"{text.sequences} x {text.length}, {'BOS first' if text.bos else 'no BOS'}",
        f"Sink_1 at eps {text.eps:g}": percent(text.sink_rate[0]),
        "layers in which most heads have it": f"{above_L.sum()} of {text.layers}",
        "Sink_1 without BOS": sink_1("no_bos"),
        "Sink_1 of random tokens": sink_1("random"),
        "Sink_1 of random tokens after BOS": sink_1("random_bos"),
        "Sink_1 of one token, repeated": sink_1("repeat"),
        "loss": NONE if text.loss is None else f"{text.loss:.3f}",
        "bits per byte": NONE if text.bits_per_byte is None else f"{text.bits_per_byte:.3f}",
        "loss without BOS": f"{others['no_bos'].loss:.3f}" if "no_bos" in others else NONE,
    }
    if (folder / "gradients").is_dir():
        ratios = Measurement.load(folder / "gradients").gradient_norm_ratio or []
        found["gradient norm of the first position over others (median layer, largest)"] = (
            f"{median(ratios):.1f}, {max(ratios):.1f}"
        )
    if text.massive_activations:
        top = text.massive_activations[0]
        found["largest multiple of the median (massive activation)"] = (
            f"channel {top.dimension}, position {top.position}, after layer {top.layer}"
        )
        found["its value (in units of the median)"] = f"{top.value:,.0f} ({top.ratio_to_median:,.0f})"
    return found


def added(part: AssessPart, effect: Effect) -> str:
    """Format the loss that a change adds, with its standard error if known: `+0.402 ± 0.051`."""
    error = "" if effect.error is None else f" ± {effect.error:.2g}"
    return f"{part.added(effect):+.3f}{error}"


def with_draws(part: AssessPart, effect: DrawnEffect) -> str:
    """Format the mean of several draws with the smallest and largest, `+0.401 (+0.10 to +0.68)`; one draw: `added`."""
    draws = [loss - part.unchanged.loss for loss in effect.losses]
    return added(part, effect) + (f" ({min(draws):+.2f} to {max(draws):+.2f})" if len(draws) > 1 else "")


def streaming_rows(part: Streaming) -> Rows:
    smallest = min(one.cache for one in part.caches)
    kept = {one.first: one for one in part.caches if one.cache == smallest}
    tokens = f"{part.sequences} x {part.length}"
    return {"tokens streamed": tokens} | {
        f"streaming through {smallest} keys, first {n} kept": added(part, kept[n]) for n in (min(kept), max(kept))
    }


def quantisation_rows(part: Quantisation) -> Rows:
    static = next(one for one in part.settings if one.name == STATIC)
    return {"static int8": added(part, static.everything), "static int8, sink spared": added(part, static.without_sink)}


def cache_rows(part: KVCache) -> Rows:
    fewest = min(part.settings, key=lambda one: one.bits)
    name, by_head = f"KV cache in {fewest.bits} bits", f"KV cache in {part.head_bits} bits"
    assert part.without_exempt is not None, "not assessed with --quick"
    assert part.without_random is not None
    costliest = max(part.heads, key=lambda one: one.kl)
    found = {"outlier tokens": (part.outliers, fewest.outliers_spared), "sinks": (part.sinks, fewest.sinks_spared)}
    return {
        name: added(part, fewest.everything),
        f"{name}, first key spared": added(part, fewest.first_spared),
        **{
            f"{name}, {what} spared": f"{added(part, effect)}, {named_positions(positions)}"
            for what, (positions, effect) in found.items()
            if positions is not None and effect is not None
        },
        f"{by_head}, costliest tenth of the KV heads exempt": added(part, part.without_exempt),
        f"{by_head}, as many random KV heads exempt": with_draws(part, part.without_random),
        f"costliest tenth of the KV heads in {part.head_bits} bits": (
            f"{', '.join(f'{layer}.{head}' for layer, head in part.exempt)} (of {len(part.heads)})"
        ),
        f"largest divergence with one KV head in {part.head_bits} bits": (
            f"{costliest.kl:.3f} ({costliest.layer}.{costliest.head})"
        ),
    }


def ablation_rows(part: KeyAblations) -> Rows:
    sink = next(one for one in part.keys if one.keys == "sink")
    return {
        "attention on the first key": percent(100 * sink.share),
        "first key hidden": added(part, sink.hidden),
        "attention to it spread over others": added(part, sink.spread),
        "its value zeroed": added(part, sink.value_zeroed),
    }


def head_rows(part: Heads) -> Rows:
    kinds = Counter(one.kind for one in part.heads)
    return {"heads by role": ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))}


def eviction_rows(part: Eviction) -> Rows:
    smallest = min(one.budget for one in part.policies)
    return {f"{smallest} keys kept: {one.policy}": added(part, one) for one in part.policies if one.budget == smallest}


def pruning_rows(part: Pruning) -> Rows:
    orders = [one for one in part.orders if one.share == 0.1]
    tenth = {f"a tenth of the heads removed: {one.order}": with_draws(part, one) for one in orders}
    kinds = {f"heads removed: {one.order}": f"{one.heads} heads: {with_draws(part, one)}" for one in part.kinds}
    return tenth | kinds


def budget_rows(part: Budgets) -> Rows:
    return {
        f"all keys for a quarter of the KV heads: {one.policy}": added(part, one)
        for one in part.policies
        if one.full == 0.25
    }


def writer_rows(part: Writer) -> Rows:
    zeroed = {one.what: one for one in part.zeroed}
    supers = ", ".join(f"[{one.channel}, {one.neuron}] of layer {one.layer}" for one in part.super_weights)
    return {
        "massive activation written by": f"{part.sublayer} of layer {part.layer}",
        "single weight that writes most": f"[{part.channel}, {part.weight.neuron}] of layer {part.ffn_layer}",
        "single weight that writes most zeroed": added(part, zeroed[WEIGHT]),
        "that layer's feed-forward zeroed at position 1": added(part, zeroed["feed-forward at the first position"]),
        "super weights": NONE if part.down_projections is None else supers or "none",
        "super weights zeroed": added(part, zeroed["super weights"]) if supers else NONE,
    }


KINDS: Mapping[type[AssessPart], Callable[..., Rows]] = {
    Streaming: streaming_rows,
    Quantisation: quantisation_rows,
    KVCache: cache_rows,
    KeyAblations: ablation_rows,
    Eviction: eviction_rows,
    Heads: head_rows,
    Pruning: pruning_rows,
    Budgets: budget_rows,
    Writer: writer_rows,
}


def assessed_rows(found: Assessment) -> Rows:
    """Return the rows of an assessment's parts that are in `KINDS`, mostly losses that changes add."""
    rows: Rows = {}
    for kind, of in KINDS.items():
        for part in found.results.values():
            if isinstance(part, kind):
                if kind is not Streaming and "tokens assessed" not in rows:
                    rows["tokens assessed"] = f"{part.sequences} x {part.length}"
                    rows["loss of the unchanged model"] = f"{part.unchanged.loss:.3f}"
                rows |= of(part)
    return rows


def table(folders: list[Path]) -> list[str]:
    """Return the lines of the Markdown table, with a column per folder."""
    columns = []
    for folder in folders:
        paths = [folder / name / ASSESSMENT for name in ("assess", "assess_heads")]
        rows = measured_rows(folder)
        for path in filter(Path.is_file, paths):
            rows |= assessed_rows(load_assessment(path))
        columns.append(rows)
    names = dict.fromkeys(name for rows in columns for name in rows)
    lines = [["", *(folder.name for folder in folders)], ["---"] * (len(folders) + 1)]
    lines += [[name, *(rows.get(name, NONE) for rows in columns)] for name in names]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of results/models")
    print("\n".join(table(parser.parse_args().folders)))


if __name__ == "__main__":
    main()
