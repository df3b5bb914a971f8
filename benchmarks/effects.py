"""Write docs/effects.md, the sink and the loss of every intervention that was trained, and a short table in README.md.

    python -m benchmarks.effects

The first table has the cells of `results/laptop`, with the costs that `benchmarks.cells` has measured. The others have
the cells of `results/archive/tiny` and `results/archive/exploratory` that change one thing: a cell has a
row if all recipe keys that it changes belong to one group of `GROUPS` and it has at least `FEWEST` finished seeds; of
several cells with the same change, the one in `results/archive/tiny`, or else the one with most seeds, is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from benchmarks.committed import ROOT, summary_in
from benchmarks.timing import RESULTS
from sinklab.experiments.documents import CellSummary, Summary
from sinklab.files import parse_json
from sinklab.tables import Table, markdown, names, numbers

PAGE, README = ROOT / "docs" / "effects.md", ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks/effects.py -->\n\n", "\n\n<!-- end -->"
LAPTOP = "results/laptop"
IN_README = {
    "softmax": "softmax",
    "k_biases": "a K bias",
    "sink_logit": "a sink logit",
    "gate_head": "a gate per head",
    "sigmoid": "sigmoid",
}
"""Cells of the short table, with the names that it has for them."""
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
is one change of the recipe.

**Sink_1** is the sink rate of the first token, and **bias** that of a key bias, sink token, sink logit or the rest of
stick-breaking attention, both in % of heads. **Loss** is the validation loss minus that of the unchanged model with the
same seed, in nats per token. All are means of the last three evaluations, and medians over the seeds in the last
column, with [smallest, largest]. The sink rates of attention whose scores do not sum to one are computed from
[proxy scores](glossary.md). Sinks on other tokens, such as a fixed second token, are not included. Under a window,
queries that do not see the first token count as 0. Without BOS texts are cut differently, a fixed token is itself
predicted, and a prefix is not, so these losses differ for other reasons as well.

## At the scale laptop

    sinklab train laptop --set model.gate=head

0.3 M parameters, BOS, the paper's weight decay of 0.1, 6,000 steps on Python source code ([results with
verdicts](../results/laptop/README.md)). The **norm ratio** is that of the first token after the last block. **Step** is
the time of a training step relative to softmax, at width 256 and 512 tokens on one core (median of {rounds} rounds of
`benchmarks.cells`).

{laptop}

## At the earlier scale tiny

    sinklab train tiny --set model.gate=head

The tables below are of models with a weight decay of 0.5 and 1,500 steps ([what such a model
shows](../results/archive/findings.md)).

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


def losses_of(cell: CellSummary) -> dict[int, float]:
    """Return the validation loss of a cell by seed."""
    return {run.seed: value for run, value in cell.by_seed("valid_loss") if run.seed is not None}


def base_losses(summary: Summary) -> dict[int, float]:
    """Return the validation loss of the unchanged recipe by seed."""
    unchanged = [cell for cell in summary.cells.values() if not cell.change]
    return {seed: value for cell in unchanged for seed, value in losses_of(cell).items()}


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
            losses = losses_of(cell)
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
    laptop, rounds = markdown(laptop_table(root)), saved_costs()["rounds"]
    parts = [HEAD.format(baseline=_baseline(summaries), laptop=laptop, rounds=rounds)]
    for heading, (prefix, _) in GROUPS.items():
        rows = [effect for group, effect in found if group == heading]
        rows.sort(key=lambda effect: (-median(effect.sink), -max(effect.sink), str(effect.change)))
        bias_column = heading == "Bias"
        rates = ["Sink_1", "bias"] if bias_column else ["Sink_1"]
        columns = [*names(f"--set {prefix}"), *numbers("", *rates, "loss", "seeds")]
        table = Table("", columns, [effect.row(prefix, bias_column) for effect in rows])
        parts += [f"## {heading}\n", markdown(table) + "\n"]
    return "\n".join(parts)


def saved_costs() -> dict[str, Any]:
    """Return the measured costs of the cells at the scale laptop, as `benchmarks.cells` saved them."""
    return parse_json((RESULTS / "cells.json").read_text("utf-8"))


def laptop_rows(root: Path, seeds: set[int] | None = None) -> Iterator[tuple[str, list[str | None]]]:
    """Yield name and row of each cell at the scale laptop: rates, norm ratio, added loss, parameters and step time.

    Only runs of `seeds` are included; None for all.
    """
    summary, costs = summary_in(root / LAPTOP), saved_costs()["cells"]
    base = base_losses(summary)
    for name, cell in summary.cells.items():
        losses = {seed: value for seed, value in losses_of(cell).items() if seeds is None or seed in seeds}
        if len(losses) < FEWEST:
            continue
        rates = ("sink_1", "sink_bias", "norm_ratio_last")
        values = [[value for run, value in cell.by_seed(of) if run.seed in losses] for of in rates]
        added = [value - base[seed] for seed, value in losses.items() if seed in base] if cell.change else []
        cost = costs.get(name) if cell.change else None
        yield (
            name,
            [
                " ".join(f"{key}={_setting(value)}" for key, value in cell.change.items()) or "unchanged: softmax",
                *(_span(one, ".1f") for one in values),
                _span(added, "+.2f"),
                f"{cost['parameters']:+.1%}".replace("%", " %") if cost else None,
                f"{cost['step']:.2f}" if cost else None,
                f"{min(losses)}–{max(losses)}",
            ],
        )


def laptop_table(root: Path) -> Table:
    """Make the table of the cells at the scale laptop, strongest sink first."""
    summary = summary_in(root / LAPTOP)
    order = {name: median(value for _, value in summary.cells[name].by_seed("sink_1")) for name, _ in laptop_rows(root)}
    rows = sorted(laptop_rows(root), key=lambda one: (bool(summary.cells[one[0]].change), -order[one[0]]))
    columns = [*names("--set"), *numbers("", "Sink_1", "bias", "norm ratio", "loss", "parameters", "step", "seeds")]
    return Table("", columns, [row for _, row in rows])


def short_table(root: Path = ROOT) -> str:
    """Return the short Markdown table: Sink_1 and the cost of the cells in `IN_README`, at the seeds that all have."""
    cells = summary_in(root / LAPTOP).cells
    seeds = set.intersection(*(set(losses_of(cells[cell])) for cell in IN_README))
    rows, found = dict(laptop_rows(root, seeds)), []
    for cell, label in IN_README.items():
        first, on_bias = (
            [value for run, value in cells[cell].by_seed(of) if run.seed in seeds] for of in ("sink_1", "sink_bias")
        )
        more = f", {median(on_bias):.0f} % on it" if on_bias else ""
        loss, _, step = rows[cell][4:7]
        found.append([label, f"{median(first):.0f} %{more}", loss, step])
    columns = [*names("attention"), *numbers("", "heads with a sink", "added loss, nats", "step time")]
    return markdown(Table("", columns, found))


def readme_with(text: str) -> str:
    """Return README.md with the short table between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{short_table()}{END}{rest.split(END, 1)[1]}"


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
    README.write_text(readme_with(README.read_text("utf-8")), "utf-8")
    print(PAGE, README)
