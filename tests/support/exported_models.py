"""Untrained runs of every variant with enlarged weights, and tokenizers for them, as inputs of `sinklab export`."""

from pathlib import Path
from typing import Any

import torch

import sinklab
from sinklab.data.tokenizers import Tokenizer, train_bpe
from sinklab.interventions import VARIANTS
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe
from sinklab.train.run import TrainedRun

sinklab.register()  # the Auto classes of transformers know exported runs
VOCABULARY, CONTEXT = 300, 32
WORDS = ["the cat sat on the mat", "a sheep jumps over the fence", "the fence is high and the sheep is not"]


def tokenizer_in(folder: Path) -> Tokenizer:
    return train_bpe(WORDS * 4, VOCABULARY, folder)


def shaken_run(variant: str, tokenizer_path: Path, **sizes: Any) -> TrainedRun:
    """An untrained run of a recipe with one intervention, with enlarged weights."""
    base = {
        "name": variant,
        "model": {
            "layers": 2,
            "width": 32,
            "heads": 4,
            "ffn_width": 24,
            "vocab_size": VOCABULARY,
            "context": CONTEXT,
            **sizes,
        },
        "metric": {"length": 16},
    }
    recipe = build_recipe(base, VARIANTS[variant].overlay)
    model = Transformer(recipe.model, seed=2).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(20 if ".bias." in name or name == "sink_token" else 1.6)
    return TrainedRun(model, recipe, tokenizer_path, step=0)


def some_tokens(sequences: int = 2, length: int = 6) -> torch.Tensor:
    """Random token ids: (sequences, length)."""
    return torch.randint(VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(0))
