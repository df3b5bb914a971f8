"""The model card of a tuned model."""

from pathlib import Path

import sinklab
from sinklab.tuning.documents import TuneEvaluation, Tuning

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
  - sinklab
  - attention-sink
  - sft
---
"""


def tuned_card(tuning: Tuning) -> str:
    """README.md of the model: what it was made from, with which settings, and what became of loss and sink."""
    asked = tuning.asked.model_dump(exclude={"files", "data", "sink_tokens"})
    rows = [f"| {name} | {value} |" for name, value in asked.items()]
    settings = "\n".join(row for row in rows if "\n" not in row)
    numbers = "\n".join(f"| {name} | {side.valid_loss:.4f} | {side.sink_rate[0]:.2f} |" for name, side in sides(tuning))
    return (
        f"{HEAD}\n# {Path(tuning.model).name}, tuned on conversations\n\n"
        f"{tuning.architecture} of {tuning.parameters:,} parameters, tuned by sinklab {sinklab.__version__} on what "
        f"the assistant says in {tuning.conversations:,} conversations.\n\n"
        "| | loss held out, nats per token | Sink_1, percent |\n|---|---|---|\n"
        f"{numbers}\n\n## Settings\n\n| | |\n|---|---|\n{settings}\n"
    )


def sides(tuning: Tuning) -> list[tuple[str, TuneEvaluation]]:
    """The base and the chat model, as far as they are there."""
    return [(name, side) for name, side in (("base", tuning.base), ("chat", tuning.chat)) if side is not None]
