"""Draw Sink_1 against weight decay x learning rate x steps, for the paper's 60M models and for ours.

    python -m benchmarks.across_scales

The values are the medians of the committed results of table 2 (results/archive), the paper's own numbers, and for the
scale laptop two pilot settings of docs/log.md and the committed runs of `main_results`. Writes
docs/pictures/across-scales.svg and prints the table. The product is the distance, in units of their own length, over
which decoupled weight decay pulls the weights during training.
"""

from collections.abc import Iterator
from pathlib import Path

import altair as alt

from benchmarks.committed import summary_in
from sinklab.experiments.paper import published_tables
from sinklab.tables import Table, TableColumn, markdown, names
from sinklab.train.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "across-scales.svg"
PAPER, LAPTOP = "paper, 60M", "laptop, 0.3M"
LABELS = {"tiny": "tiny, 0.3M", "mini": "mini, 1M"}
STEPS = 20_000
"""Updates of the paper's runs, at a learning rate of 4e-4."""

PILOTS = ((4.8, (64.2, 61.0)), (9.6, (27.8, 7.0)))
"""Product and Sink_1 by seed (1001, 1002) of the pilot settings A and B, from docs/log.md."""


def points() -> Iterator[tuple[str, float, float, int]]:
    """Yield scale, product, median Sink_1 in percent, and number of seeds."""
    for cell, found in published_tables()["table_2"].items():
        yield PAPER, _decay(cell) * 4e-4 * STEPS, found["sink_1"], 1
    for scale, label in LABELS.items():
        recipe, summary = load_recipe(scale), summary_in(ROOT / "results" / "archive" / scale)
        for cell, found in summary.cells_of("table_2").items():
            value = found.estimate("sink_1")
            if value and value.median is not None:
                yield label, _decay(cell) * recipe.optim.lr * recipe.train.steps, value.median, len(value.seeds)
    recipe, summary = load_recipe("laptop"), summary_in(ROOT / "results" / "laptop")
    for cell, decay in (("softmax", recipe.optim.weight_decay), ("weight_decay_0", 0.0)):
        value = summary.cell("main_results", cell).estimate("sink_1")
        if value and value.median is not None:
            yield LAPTOP, decay * recipe.optim.lr * recipe.train.steps, value.median, len(value.seeds)
    for product, by_seed in PILOTS:
        yield LAPTOP, product, sum(by_seed) / len(by_seed), len(by_seed)


def _decay(cell: str) -> float:
    return float(cell.removeprefix("weight_decay_"))


def main() -> None:
    rows = sorted(points())
    drawn = [{"scale": scale, "product": max(product, 0.01), "sink": sink} for scale, product, sink, _ in rows]
    colour = alt.Color("scale:N", title=None, sort=[PAPER, LAPTOP, *LABELS.values()])
    figure = (
        alt.Chart(alt.Data(values=drawn), width=520, height=280)
        .mark_line(point=True)
        .encode(
            x=alt.X("product:Q", scale=alt.Scale(type="log"), title="weight decay x learning rate x steps (0 at 0.01)"),
            y=alt.Y("sink:Q", title="Sink_1, % of heads (median)"),
            color=colour,
        )
    )
    figure.save(str(PICTURE))
    columns = [*names("scale"), TableColumn("product", form=".3g"), TableColumn("Sink_1", "%", ".1f")]
    print(markdown(Table("", [*columns, TableColumn("seeds", form="d")], rows)))


if __name__ == "__main__":
    main()
