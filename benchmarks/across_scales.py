"""Draw Sink_1 against weight decay x learning rate x steps, for the paper's 60M models and for ours.

    python -m benchmarks.across_scales

The values are the medians of the committed results of table 2 (results/archive) and of `laptop_decay`
(results/laptop), and the paper's own numbers. Writes docs/pictures/across-scales.svg and prints the table. The
product is the distance, in units of their own length, over which decoupled weight decay pulls the weights during
training.
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
PAPER = "paper, 60M"
OURS = (
    ("laptop, 0.3M", "laptop", ROOT / "results" / "laptop", "laptop_decay"),
    ("tiny, 0.3M", "tiny", ROOT / "results" / "archive" / "tiny", "table_2"),
    ("mini, 1M", "mini", ROOT / "results" / "archive" / "mini", "table_2"),
)
"""Name in the picture, recipe, packed results and experiment of each scale."""

STEPS = 20_000
"""Updates of the paper's runs, at a learning rate of 4e-4."""


def points() -> Iterator[tuple[str, float, float, int]]:
    """Yield scale, product, median Sink_1 in percent, and number of seeds."""
    for cell, found in published_tables()["table_2"].items():
        yield PAPER, _decay(cell) * 4e-4 * STEPS, found["sink_1"], 1
    for label, scale, folder, experiment in OURS:
        recipe, summary = load_recipe(scale), summary_in(folder)
        for cell, found in summary.cells_of(experiment).items():
            value = found.estimate("sink_1")
            if value and value.median is not None:
                decay = recipe.optim.weight_decay if cell == "softmax" else _decay(cell)
                yield label, decay * recipe.optim.lr * recipe.train.steps, value.median, len(value.seeds)


def _decay(cell: str) -> float:
    return float(cell.removeprefix("weight_decay_"))


def main() -> None:
    rows = sorted(points())
    drawn = [{"scale": scale, "product": max(product, 0.01), "sink": sink} for scale, product, sink, _ in rows]
    colour = alt.Color("scale:N", title=None, sort=[PAPER, *(label for label, *_ in OURS)])
    figure = (
        alt.Chart(alt.Data(values=drawn), width=520, height=280)
        .mark_line(point=True)
        .encode(
            x=alt.X(
                "product:Q",
                scale=alt.Scale(type="log", domain=[0.008, 150]),
                axis=alt.Axis(values=[0.01, 0.1, 1, 3, 10, 30, 100]),
                title="weight decay x learning rate x steps (0 at 0.01)",
            ),
            y=alt.Y("sink:Q", title="Sink_1, % of heads (median)"),
            color=colour,
        )
    )
    figure.save(str(PICTURE))
    columns = [*names("scale"), TableColumn("product", form=".3g"), TableColumn("Sink_1", "%", ".1f")]
    print(markdown(Table("", [*columns, TableColumn("seeds", form="d")], rows)))


if __name__ == "__main__":
    main()
