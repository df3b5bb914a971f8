"""A Gradio space: the table of measured models, and a measurement of a model by its name.

    pip install gradio
    python examples/space/app.py results/models/models.csv

The table is a .csv file of `sinklab report DIR.. --table models.csv`.
"""

import sys
from pathlib import Path

import gradio as gr
import polars as pl

import sinklab
from sinklab.errors import SinklabError

MOST_TOKENS = 16 * 256  # of a measurement in the space
SHOWN = {
    "model": "model",
    "bos": "BOS in front",
    "layers": "layers",
    "heads": "heads",
    "sink_1": "heads with the sink, %",
    "importance_first": "attention on token 1, %",
    "activation_ratio": "largest activation, times the median",
    "streaming_added": "nats lost in streaming, no first token kept",
    "streaming_kept_added": "with first tokens kept",
}


def table_of(path: Path) -> pl.DataFrame:
    """Read the table of models with the columns shown, strongest sink first."""
    found = pl.read_csv(path).select(pl.col(name).alias(title) for name, title in SHOWN.items())
    return found.with_columns(pl.selectors.float().round(3))


def measured(model: str, sequences: float, length: float) -> tuple[str, str]:
    """Measure a model by its name; return the conclusion and the numbers as text, and the page of the measurement."""
    if sequences * length > MOST_TOKENS:
        raise gr.Error(f"at most {MOST_TOKENS:,} tokens: fewer or shorter sequences, please")
    try:
        result = sinklab.measure(model.strip(), sequences=int(sequences), length=int(length))
    except SinklabError as error:
        raise gr.Error(str(error)) from error
    return str(result), result._repr_html_()


def space(table: Path) -> gr.Blocks:
    """Build the app with two tabs: the table, and a measurement."""
    with gr.Blocks(title="Attention sinks") as app:
        gr.Markdown("# Attention sinks\nHow much of their attention language models put on the first token.")
        with gr.Tab("Models"):
            gr.Dataframe(table_of(table), interactive=False, wrap=True)
        with gr.Tab("Measure a model"):
            name = gr.Textbox(label="Model", placeholder="HuggingFaceTB/SmolLM2-135M")
            sequences = gr.Slider(1, 64, value=16, step=1, label="sequences")
            length = gr.Slider(16, 256, value=64, step=16, label="tokens in each")
            button = gr.Button("Measure")
            said, page = gr.Code(label="Result", language=None), gr.HTML()
            button.click(measured, [name, sequences, length], [said, page])
    return app


if __name__ == "__main__":
    space(Path(sys.argv[1])).launch()
