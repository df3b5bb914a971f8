"""A run directory with a little training, and the text that it was trained on."""

from pathlib import Path
from typing import Any

from sinklab.data.prepare import prepared
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run

LENGTH = 16  # of its context


def trained_run(folder: Path, data: dict[str, Any], model: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """A run of one step on a text of counted sheep; the run directory and the text."""
    text = folder / "sheep.jsonl"
    counted = (" ".join(str(i * i * fence) for fence in range(1, 9)) for i in range(1000, 1400))
    text.write_text("\n".join(f'{{"text": "sheep jumps {numbers}"}}' for numbers in counted))
    recipe = build_recipe(
        {
            "model": {"layers": 2, "width": 16, "heads": 2, "ffn_width": 16, "context": LENGTH, **(model or {})},
            "data": {"source": str(text), "tokenizer": "train:300", "valid_fraction": 0.2, **data},
            "train": {"steps": 1, "batch_size": 4, "eval_sequences": 4},
            "metric": {"sequences": 4, "length": 8},
        }
    )
    out = folder / "run"
    Trainer(open_run(recipe, prepared(recipe.data, folder / "cache"), out)).train()
    return out, text
