"""Make the picture and the table of docs/mechanism.md from runs of the experiment backcopy.

    python -m benchmarks.mechanism runs/backcopy      # picture, from the models
    python -m benchmarks.mechanism                    # table, from results/backcopy

The picture (docs/pictures/mechanism.svg) has the attention weights of one validation sequence with softmax attention, K
biases, ReLU attention and without BOS, each of the run with the lowest seed. Attention to the bias is the last column.
"""

import argparse
from pathlib import Path

import altair as alt
import torch
from torch import Tensor

from benchmarks.committed import summary_in
from sinklab.attention.layer_call import LayerCall
from sinklab.experiments.documents import SUMMARY, CellEstimate, Summary
from sinklab.experiments.sweep.store import found_runs
from sinklab.models.hooks import intercept
from sinklab.opening import Model, open_model
from sinklab.tables import NOTHING, Table, markdown, names
from sinklab.train.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PICTURE, PAGE = ROOT / "docs" / "pictures" / "mechanism.svg", ROOT / "docs" / "mechanism.md"
PACKED = ROOT / "results" / "backcopy" / SUMMARY
BEGIN, END = "<!-- made by benchmarks/mechanism.py -->\n\n", "\n\n<!-- end -->"
COLUMNS = {
    "Sink_1, %": ("sink_1", 0),
    "sink on the bias, %": ("sink_bias", 0),
    "dormant share, %": ("dormant_share", 0),
    "value norm, first token / others": ("value_norm_ratio", 2),
    "loss, nats": ("valid_loss", 3),
}
"""Quantity and decimals of the columns of the table."""
SHOWN = 20  # tokens
CELLS = {"softmax": "softmax", "k_biases": "K biases", "relu": "ReLU (row sums not 1)", "without_bos": "without BOS"}


def first_run(top: Path, cell: str) -> Path:
    """Return the directory of the cell's run with the lowest seed."""
    recipes = {directory: load_recipe(str(directory / "recipe.yaml")) for directory in found_runs(top).values()}
    return min((one for one, recipe in recipes.items() if recipe.name == cell), key=lambda one: recipes[one].seed)


def weights(model: Model, tokens_1T: Tensor) -> Tensor:
    """Return the attention weights of the only head, (T, T), or (T, T + 1) with the bias as the last column."""
    found: list[Tensor] = []

    def observe(layer: LayerCall) -> None:
        (rows,) = layer.rows()
        scores_BHTS, bias_BHT = rows.weights_BHQS, rows.bias_BHQ
        if not layer.operation.sums_to_one:
            scores_BHTS = scores_BHTS * layer.operation.row_sums(layer.call)[..., None]
        parts = [scores_BHTS] if bias_BHT is None else [scores_BHTS, bias_BHT[..., None]]
        found.append(torch.cat(parts, -1)[0, 0])

    with torch.no_grad(), intercept(model.adapter, observe=observe):
        model.module(tokens_1T)
    return found[0]


def panel(model: Model, title: str) -> alt.Chart:
    """Return the heat map of a model's attention on the first tokens of its validation text."""
    assert model.held_out is not None
    bos = len(model.special)
    tokens_1T = model.arrange(torch.tensor([[*model.special, *model.held_out(SHOWN - bos)]]), bos, None)
    words = [f"{at} {text.strip('<|>')}" for at, text in enumerate(model.token_texts(tokens_1T[0].tolist()), 1)]
    scores_TS = weights(model, tokens_1T)
    keys = [*words, "bias"] if scores_TS.shape[1] > len(words) else words
    rows = [
        {"query": query, "key": key, "weight": float(scores_TS[t, s])}
        for t, query in enumerate(words)
        for s, key in enumerate(keys)
        if s <= t or key == "bias"
    ]
    return (
        alt.Chart(alt.Data(values=rows), title=title, width=alt.Step(13), height=alt.Step(13))
        .mark_rect()
        .encode(
            x=alt.X("key:N", sort=keys, title="key"),
            y=alt.Y("query:N", sort=words, title="query"),
            color=alt.Color("weight:Q", scale=alt.Scale(scheme="blues", domain=[0, 1], clamp=True), title="weight"),
        )
    )


def page_with(text: str, summary: Summary) -> str:
    """Return the text of docs/mechanism.md with its table replaced: smallest to largest value over the seeds."""
    rows = []
    for name, cell in summary.cells.items():
        found = [(cell.estimate(quantity), decimals) for quantity, decimals in COLUMNS.values()]
        rows.append((name, *(_range(one, decimals) for one, decimals in found)))
    before, rest = text.split(BEGIN)
    table = markdown(Table("", names("cell", *COLUMNS), rows))
    return f"{before}{BEGIN}{table}{END}{rest.split(END, 1)[1]}"


def _range(one: CellEstimate | None, decimals: int) -> str:
    if one is None or one.smallest is None or one.largest is None:
        return NOTHING
    low, high = f"{one.smallest:.{decimals}f}", f"{one.largest:.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="directory of `sinklab reproduce backcopy`")
    top = parser.parse_args().directory
    if top is None:
        PAGE.write_text(page_with(PAGE.read_text("utf-8"), summary_in(PACKED.parent)), "utf-8")
        return
    panels = [panel(open_model(str(first_run(top, cell))), title) for cell, title in CELLS.items()]
    figure = alt.vconcat(alt.hconcat(*panels[:2]), alt.hconcat(*panels[2:])).configure_axis(labelFontSize=8)
    figure.save(str(PICTURE))
    print(PICTURE)


if __name__ == "__main__":
    main()
