"""`sinklab lab`: six small models that show where a sink is, where it moves, and when there is none."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sinklab.commands.from_model import with_options
from sinklab.commands.options import MOST_SEEDS, Json, ReproduceSettings, option
from sinklab.files import RUNS
from sinklab.settings import INPUT, OUTPUT
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from rich.console import Console

    from sinklab.experiments.documents import Summary

EMERGED = 10.0
"""Sink_1 in percent from which a sink counts as present, as in the claims."""

MODELS = {
    "task_softmax": "copy task, softmax",
    "task_k_biases": "copy task, K biases",
    "task_relu": "copy task, ReLU",
    "softmax": "language model, softmax",
    "k_biases": "language model, K biases",
    "sigmoid": "language model, sigmoid",
}
"""Cells of the experiment and their names in the table."""


@with_options
def lab(
    out: Annotated[Path, option(OUTPUT, "Directory for the runs, summary.json and report.html.")] = RUNS / "lab",
    steps: Annotated[int | None, option(INPUT, "Updates per model; default: as in the recipe.", min=1)] = None,
    text: Annotated[Path | None, option(INPUT, "Train on this text file or folder; default: as in the recipe.")] = None,
    seeds: Annotated[int, option(INPUT, "Models of each kind; a verdict requires five.", min=1, max=MOST_SEEDS)] = 1,
    as_json: Json = False,
) -> None:
    """Train six small models that show what an attention sink is, where it moves, and when there is none.

    Three have one head and learn a copy task in a minute: softmax attention, K biases and ReLU attention. Three are
    language models: softmax, K biases and sigmoid attention. Together they take five to ten minutes on two cores.

    Example: sinklab lab --steps 500 --out runs/short

    The command prints a table and five sentences, and writes report.html. After Ctrl-C, the same command resumes.
    """
    from sinklab.commands.reproducing import train_experiments
    from sinklab.experiments.shipped import load_experiment
    from sinklab.experiments.sweep.engines.local import cards_here, cores_here

    experiment = load_experiment("lab")
    jobs = None if cards_here() else min(len(experiment.cells), max(3, cores_here()))
    with keeping_what_is_finished():
        settings = ReproduceSettings(out=out, steps=steps, text=text, jobs=jobs, scale="lab", seeds=seeds)
        train_experiments([experiment], settings, as_json, lambda summary, console: print_lab(summary, out, console))


def print_lab(summary: "Summary", out: Path, console: "Console") -> None:
    """Print a line per model, and five sentences about what they show; medians if there are several models per kind."""
    from sinklab.commands.terminal.tables import print_table
    from sinklab.tables import Table, TableColumn, names, numbers

    def value(cell: str, quantity: str) -> float | None:
        found = summary.cell("lab", cell).estimate(quantity)
        return found.median if found else None

    columns = [*names("model"), *numbers(".0f", "first token", "bias", unit="sink, %")]
    columns.append(TableColumn("loss", "nats per token", ".2f"))
    quantities = ("sink_1", "sink_bias", "valid_loss")
    rows = [[label, *(value(cell, one) for one in quantities)] for cell, label in MODELS.items()]
    notes = ["Sink: a key with more than 0.3 of the attention, averaged over queries. Percent of heads and sequences."]
    print_table(Table("Six small models", columns, rows, notes), console)
    known = {cell: value(cell, "sink_1") for cell in MODELS}
    biases = {cell: value(cell, "sink_bias") for cell in ("task_k_biases", "k_biases")}
    losses = {cell: value(cell, "valid_loss") for cell in ("softmax", "sigmoid")}
    if None in (*known.values(), *biases.values(), *losses.values()):
        return  # a run failed, which is said below
    softmax, sigmoid = known["softmax"] or 0.0, known["sigmoid"] or 0.0
    difference = (losses["sigmoid"] or 0.0) - (losses["softmax"] or 0.0)
    lines = [
        f"1. Why: in the copy task a head is needed at one of six tokens. At the others, softmax attends to the first "
        f"token, in {known['task_softmax']:.0f} % of the sequences.",
        f"2. With ReLU attention, whose weights may all be zero, it does so in {known['task_relu']:.0f} %; with a "
        f"learned key bias, it attends to the bias in {biases['task_k_biases']:.0f} %.",
        "3. The language model with softmax "
        + (
            f"has the same sink on the first token, in {softmax:.0f} % of its heads."
            if softmax >= EMERGED
            else f"has hardly a sink yet ({softmax:.0f} % of its heads); it emerges with more steps."
        ),
        f"4. With K biases the sink is on the bias: {known['k_biases']:.0f} % of the heads on the first token, "
        f"{biases['k_biases']:.0f} % on the bias.",
        f"5. Sigmoid attention, whose weights need not sum to one, has {sigmoid:.0f} %, at a loss "
        f"{abs(difference):.2f} nats {'higher' if difference > 0 else 'lower'} than softmax.",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print("Your own model: sinklab measure MODEL", markup=False, highlight=False)
