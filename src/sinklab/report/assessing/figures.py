"""Which figures an assessment has: one for each part that was done."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import altair as alt

from sinklab.assessing.documents import (
    Assessment,
    Carries,
    Effect,
    Eviction,
    Heads,
    LossByLength,
    Quantisation,
    Streaming,
)
from sinklab.report.assessing.assessed import Assessed
from sinklab.report.assessing.charts import beside_each_other, heads_by_share, over_numbers
from sinklab.report.charts import Drawing, Width
from sinklab.report.figure import Figure

GROWTH = "Loss above the unchanged model's (nats per token)"
UPRIGHT = alt.Axis(labelAngle=0, labelOverlap=True, grid=False)
KINDS = ("no sink", "nop", "between", "broadcast")


@dataclass(frozen=True)
class _Place:
    """Where figures stand: of which assessment of the page, and how wide they are."""

    number: int
    of: str
    width: Width

    def figure(self, key: str, title: str, caption: str, chart: Drawing) -> Figure:
        return Figure(f"{key}-{self.number}", title + self.of, caption, [chart])


def assessment_figures(assessed: Sequence[Assessed], width: Width) -> list[Figure]:
    """The figures of every assessment; where there are several, their titles name the model."""
    several = len(assessed) > 1
    return [
        figure
        for number, one in enumerate(assessed)
        for figure in _figures(one.document, _Place(number, f": {one.name}" if several else "", width))
    ]


def _figures(document: Assessment, place: _Place) -> Iterator[Figure]:
    if document.streaming is not None:
        yield _streaming(document.streaming, place)
    if document.quantisation is not None:
        yield _quantisation(document.quantisation, place)
    if document.eviction is not None:
        yield _eviction(document.eviction, place)
    if document.length is not None:
        yield _length(document.length, place)
    if document.carries is not None:
        yield _carries(document.carries, place)
    if document.heads is not None:
        yield _heads(document.heads, place)


def _streaming(part: Streaming, place: _Place) -> Figure:
    rows = [
        {**_row(f"first {row.first} kept", row.cache, row), "y": row.perplexity}
        for row in part.caches
        if row.perplexity is not None
    ]
    sizes = sorted({row["x"] for row in rows})
    x = alt.X("x:O", title="Keys in the cache", sort=sizes, axis=UPRIGHT)
    y = alt.Y(
        "y:Q", title="Perplexity (log scale)", scale=alt.Scale(type="log", nice=False, padding=10), axis=_few("~g")
    )
    where = "in the cache" if part.positions == "cache" else "in the text"
    caption = (
        f"Perplexity of {part.sequences} x {part.length:,} tokens read through a cache that keeps the first tokens and "
        f"the most recent ones, positions as they are {where} (2309.17453). The dashed line is the unchanged model, "
        "which reads the text in windows of its context."
    )
    chart = over_numbers(rows, ("keys", x), ("perplexity", y), place.width, math.exp(part.unchanged.loss))
    return place.figure("streaming", "Streaming through a rolling cache", caption, chart)


def _quantisation(part: Quantisation, place: _Place) -> Figure:
    before = part.unchanged.loss
    rows = [
        {"setting": setting.name, **_row(series, 0, effect), "y": effect.loss - before}
        for setting in part.settings
        for series, effect in (("everything", setting.everything), ("sink positions spared", setting.without_sink))
    ]
    caption = (
        f"What simulated quantisation adds to the loss of {before:.3f}, and how much of it is left where the first "
        f"{_tokens(part.sink_positions)} stays in full precision and out of the scales."
    )
    chart = beside_each_other(rows, GROWTH, place.width)
    return place.figure("quantisation", "Quantisation with and without the sink", caption, chart)


def _eviction(part: Eviction, place: _Place) -> Figure:
    before = part.unchanged.loss
    rows = [{**_row(row.policy, row.budget, row), "y": row.loss - before} for row in part.policies]
    x = alt.X("x:O", title="Keys that are kept", sort=sorted({row["x"] for row in rows}), axis=UPRIGHT)
    caption = (
        f"What evicting keys adds to the loss of {before:.3f} ({part.sequences} x {part.length:,} tokens), by policy "
        "and budget; random keys are the control."
    )
    chart = over_numbers(rows, ("keys", x), ("nats added", _growth()), place.width)
    return place.figure("eviction", "Evicting keys", caption, chart)


def _length(part: LossByLength, place: _Place) -> Figure:
    buckets = [f"{bucket.start:,} to {bucket.stop - 1:,}" for bucket in part.buckets]
    rows = [
        {**_row(series, name, effect), "y": effect.loss}
        for series, effects in (
            ("read at once", [bucket.whole for bucket in part.buckets]),
            ("within the context", [bucket.within for bucket in part.buckets]),
        )
        for name, effect in zip(buckets, effects, strict=True)
    ]
    x = alt.X("x:O", title="Position of the target", sort=buckets, axis=UPRIGHT)
    y = alt.Y("y:Q", title="Loss (nats per token)", scale=alt.Scale(zero=False), axis=_few())
    caption = (
        f"Loss by position of the same tokens, read at once and in windows of the context of {part.context:,}. "
        "Bucket by bucket the two read the same targets."
    )
    return place.figure(
        "length", "Loss beyond the context", caption, over_numbers(rows, ("positions", x), ("loss", y), place.width)
    )


def _carries(part: Carries, place: _Place) -> Figure:
    before = part.unchanged.loss
    rows = [
        {**_row(keys.keys, shift.by, shift), "y": shift.loss - before}
        for keys in part.keys
        for shift in keys.shifted
        if shift.by is not None
    ]
    caption = (
        f"What the loss of {before:.3f} becomes when the logits of the sink's {_keys(part.sink_keys)} are shifted, "
        "from nearly hidden to strong, and when those of as many recent and random keys are."
    )
    x = alt.X("x:Q", title="Shift of the logits", axis=alt.Axis(grid=False, format="+~g"))
    chart = over_numbers(rows, ("shift", x), ("nats added", _growth()), place.width)
    return place.figure("carries", "What the sink carries", caption, chart)


def _heads(part: Heads, place: _Place) -> Figure:
    rows = [
        {
            "kind": head.kind,
            "layer": head.layer,
            "head": head.head,
            "share": 100 * head.share,
            "value_norm": head.value_norm,
            "output_share": head.output_share,
            "rank": head.effective_rank,
        }
        for head in part.heads
    ]
    counts = ", ".join(f"{part.counts[kind]} {kind}" for kind in KINDS if part.counts.get(kind))
    sink = "bias" if part.sink == "bias" else "first position"
    caption = (
        f"One point per head; the sink is the {sink}. A head whose sink has a negligible value does nothing when it "
        f"attends there (nop); one whose sink has a large value of low rank broadcasts it (2606.08105). {counts}."
    )
    chart = heads_by_share(rows, [kind for kind in KINDS if part.counts.get(kind)], place.width)
    return place.figure("heads", "What heads do with their sink", caption, chart)


def _row(series: str, x: float | str, effect: Effect) -> Mapping[str, object]:
    return {"series": series, "x": x, "loss": effect.loss, "kl": effect.kl}


def _growth() -> alt.Y:
    return alt.Y("y:Q", title=GROWTH, axis=_few())


def _few(form: str = ",~r") -> alt.Axis:
    return alt.Axis(format=form, tickCount=5)


def _tokens(count: int) -> str:
    return "token" if count == 1 else f"{count} tokens"


def _keys(count: int) -> str:
    return "key" if count == 1 else f"{count} keys"
