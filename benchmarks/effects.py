"""Write docs/effects.md: the sink and the loss of every intervention that was trained alone at scale `tiny`.

    python -m benchmarks.effects

The numbers are those of the packed results of `results/archive/tiny` and `results/archive/exploratory`. A cell has a
row if all recipe keys that it changes belong to one group of `GROUPS` and it has at least `FEWEST` finished seeds; of
several cells with the same change, the one in `results/archive/tiny`, or else the one with most seeds, is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill

from benchmarks.committed import ROOT, summary_in
from sinklab.experiments.documents import CellSummary, Summary
from sinklab.tables import Table, markdown, names, numbers

PAGE = ROOT / "docs" / "effects.md"
FOLDERS = "results/archive/tiny", "results/archive/exploratory"
FEWEST = 3
GROUPS = {
    "Attention operation": ("model.attention.", ("operation",)),
    "Bias": ("model.attention.", ("bias",)),
    "Mask": ("model.attention.", ("mask",)),
    "Gate": ("model.", ("gate",)),
    "Position": ("model.", ("position",)),
    "Norm": ("model.", ("norm",)),
    "Heads and feed-forward": ("model.", ("heads", "head_outputs", "ffn")),
    "Mixer, projection, values, embedding": (
        "model.",
        ("mixer", "projection", "exclusive", "value_residual", "embedding"),
    ),
    "Optimiser": ("optim.", ("lr", "name", "nesterov", "weight_decay")),
    "Auxiliary loss": ("losses.", ("hidden_z", "tweo")),
    "Data": ("", ("data", "train.batch_size")),
}
"""Prefix and first parts of recipe keys, by heading of the page."""
HEAD = """# Effects of the interventions

This page lists what each [intervention](interventions.md) does to the sink and to the loss of a small model. Each row
is one setting of the recipe, or several of one kind, that were changed in models of the scale `tiny` (0.3 M
parameters, softmax attention, BOS, a weight decay of 0.5, 1,500 steps on Python source code; [what such a model
shows](../results/archive/findings.md)):

    sinklab train tiny --set model.gate=head

**Sink_1** is the sink rate of the first token, and **bias** that of a key bias, sink token, sink logit or the rest of
stick-breaking attention, both in % of heads (mean of the last three evaluations). **Loss** is the validation loss minus
that of the unchanged model with the same seed, in nats per token. All are medians over the seeds in the last column,
with [smallest, largest]. The sink rates of attention whose scores do not sum to one are computed from
[proxy scores](glossary.md). Sinks on other tokens, such as a fixed second token, are not included. Under a window,
queries that do not see the first token count as 0.

{baseline}

Seeds 0 to 4 had also been used to choose the scale's settings, the others had not. This page has no verdicts; these
are in [results/archive/tiny](../results/archive/tiny/README.md) for claims of the paper and in the
[findings](../results/archive/findings.md) for others. The learning rate was chosen for softmax attention; other
variants may have a lower loss at another one ([mitigations_retuned](../results/archive/exploratory/README.md)).
"""


@dataclass(frozen=True)
class Effect:
    """A cell of a group: its change of the recipe, its values by seed and, for each seed, the added loss in nats."""

    change: tuple[tuple[str, object], ...]
    sink: list[float]
    bias: list[float]
    loss: list[float]
    seeds: list[int]

    def row(self, prefix: str, bias_column: bool) -> list[str | None]:
        """Return the cells of the row; settings are written as for `--set`, without the `prefix` of their keys.

        Without a column for the bias, its rate is in the cell of Sink_1.
        """
        change = " ".join(f"{key.removeprefix(prefix)}={_setting(value)}" for key, value in self.change)
        sink, bias, loss = _span(self.sink, ".1f"), _span(self.bias, ".1f"), _span(self.loss, "+.2f")
        rates = [sink, bias] if bias_column else [f"{sink}, bias {bias}" if bias else sink]
        return [change, *rates, loss, f"{min(self.seeds)}–{max(self.seeds)}"]


def _setting(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _span(values: list[float], form: str) -> str | None:
    if not values:
        return None
    digits = int(form[-2])  # rounded first, so that no value is -0.00
    low, middle, high = (f"{round(value, digits) + 0.0:{form}}" for value in (min(values), median(values), max(values)))
    return low if low == high else f"{middle} [{low}, {high}]"


def base_losses(summary: Summary) -> dict[int, float]:
    """Return the validation loss of the unchanged recipe by seed."""
    unchanged = [cell for cell in summary.cells.values() if not cell.change]
    return {run.seed: value for cell in unchanged for run, value in cell.by_seed("valid_loss") if run.seed is not None}


def group_of(cell: CellSummary) -> str | None:
    """Return the heading of the group to which all keys that a cell changes belong; None if there is none."""
    for heading, (prefix, parts) in GROUPS.items():
        starts = tuple(f"{prefix}{part}." for part in parts)
        if cell.change and all(f"{key}.".startswith(starts) for key in cell.change):
            return heading
    return None


def effects(summaries: list[Summary]) -> Iterator[tuple[str, Effect]]:
    """Yield heading and effect of each cell with a row, without repeated changes."""
    shown = set[str]()
    for summary in summaries:
        base = base_losses(summary)
        for cell in sorted(summary.cells.values(), key=lambda one: -one.count("done")):
            heading = group_of(cell)
            change = tuple(sorted(cell.change.items(), key=lambda one: (not one[0].endswith("kind"), one[0])))
            losses = {run.seed: value for run, value in cell.by_seed("valid_loss") if run.seed is not None}
            if heading is None or len(losses) < FEWEST or str(change) in shown:
                continue
            shown.add(str(change))
            sink, bias = ([value for _, value in cell.by_seed(name)] for name in ("sink_1", "sink_bias"))
            added = [value - base[seed] for seed, value in losses.items() if seed in base]
            yield heading, Effect(change, sink, bias, added, list(losses))


def page(root: Path = ROOT) -> str:
    """Make the page from the packed results in the folders of `root`."""
    summaries = [summary_in(root / folder) for folder in FOLDERS]
    found = list(effects(summaries))
    parts = [HEAD.format(baseline=_baseline(summaries))]
    for heading, (prefix, _) in GROUPS.items():
        rows = [effect for group, effect in found if group == heading]
        rows.sort(key=lambda effect: (-median(effect.sink), -max(effect.sink), str(effect.change)))
        bias_column = heading == "Bias"
        rates = ["Sink_1", "bias"] if bias_column else ["Sink_1"]
        columns = [*names(f"--set {prefix}"), *numbers("", *rates, "loss", "seeds")]
        table = Table("", columns, [effect.row(prefix, bias_column) for effect in rows])
        parts += [f"## {heading}\n", markdown(table) + "\n"]
    return "\n".join(parts)


def _baseline(summaries: list[Summary]) -> str:
    """Return a sentence on the unchanged model at the seeds of each summary; of equal seeds, those of the first."""
    parts: dict[int, str] = {}
    for summary in summaries:
        sinks: dict[int, float] = {}
        for cell in summary.cells.values():
            if not cell.change:
                sinks |= {run.seed: value for run, value in cell.by_seed("sink_1") if run.seed is not None}
        for first in sorted({seed - seed % 100 for seed in sinks}):
            values = [value for seed, value in sinks.items() if seed - seed % 100 == first]
            parts.setdefault(first, f"{_span(values, '.1f')} % at seeds {first} to {first + len(values) - 1}")
    text = f"The unchanged model has a Sink_1 of {', '.join(text for _, text in sorted(parts.items()))}."
    return fill(text, 120)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
