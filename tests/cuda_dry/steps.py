"""Two updates, an evaluation and a measurement of variants of the catalogue on a fake card; run by test_cuda_dry.py.

Models of transformers with sliding windows do one measured forward pass.

    LD_PRELOAD=GUARD python tests/cuda_dry/steps.py [NAME...]

Prints a line of JSON per variant: the events of each phase, or the error and its place in the code. Kernels are not
run: FlexAttention and the compiled loss are replaced by plain operations with the same inputs and outputs.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_card import EVENTS, SOURCE, card, pretend  # first: it loads the library that PyTorch must find

pretend()

import torch  # noqa: E402
import transformers as hf  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import masking_utils  # noqa: E402

from sinklab.attention import importance, primitive  # noqa: E402
from sinklab.attention import query_blocks as blocks  # noqa: E402
from sinklab.attention.operations import threshold  # noqa: E402
from sinklab.data.prepare import prepare, settings_of  # noqa: E402
from sinklab.interventions import VARIANTS  # noqa: E402
from sinklab.measuring import driver  # noqa: E402
from sinklab.measuring.pretrained_records import call_records  # noqa: E402
from sinklab.model import loss  # noqa: E402
from sinklab.models.adapter import adapt  # noqa: E402
from sinklab.models.hooks import evaluating  # noqa: E402
from sinklab.train import world  # noqa: E402
from sinklab.train.evaluator import Evaluator  # noqa: E402
from sinklab.train.recipe import build_recipe, recipe_values  # noqa: E402
from sinklab.train.run import open_run  # noqa: E402
from sinklab.train.update import Updater  # noqa: E402

CONTEXT = 64
SIZES: dict[str, Any] = {
    "model": {"context": CONTEXT, "layers": 2, "width": 256, "heads": 8, "ffn_width": 512, "vocab_size": 50432},
    "train": {"batch_size": 16, "micro_batch": 8, "precision": "bf16", "device": "cuda", "eval_sequences": 4},
    "metric": {"sequences": 17, "length": CONTEXT},  # two batches
    "optim": {"lr": 3e-3, "weight_decay": 0.1},
}
OVERLAYS: dict[str, Any] = {
    **{name: variant.overlay for name, variant in VARIANTS.items()},
    "recomputed": {"train": {"recompute": "blocks"}},
    "recomputed_hybrid": {
        "train": {"recompute": "blocks", "float32_matmul": "high"},
        "model": {"mixer": "gated_delta"},
    },
}

WINDOWS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
PRETRAINED: dict[str, Any] = {
    "mistral": hf.MistralConfig(**WINDOWS),
    "gemma2": hf.Gemma2Config(**WINDOWS, **MIXED),
    "gpt_oss": hf.GptOssConfig(**WINDOWS, **MIXED, num_local_experts=2, num_experts_per_tok=1),
}


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, **options: Any
) -> tuple[Tensor, Any]:
    """FlexAttention as plain operations; refuses what its kernel may answer with NaN (PyTorch issue 153799)."""
    (_, H, T, _), S = q.shape, k.shape[2]
    if score_mod is not None and torch.is_grad_enabled() and q.requires_grad:
        assert T % 128 == S % 128 == 0, f"trains with a score function on {T} queries and {S} keys"
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    logits = (q @ k.mT).float() * scale
    places = blocks.indices(logits, blocks.Block(0, T, 0, S), 0)
    if score_mod is not None:
        logits = score_mod(logits, *places)
    logits = logits.masked_fill(~block_mask.mask_mod(*places), -torch.inf)
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp().to(v.dtype) @ v, SimpleNamespace(lse=lse)


def without_kernels() -> None:
    """Replace kernels that only a card runs by plain operations, and skip the statistics, which need numbers."""
    primitive._compiled_flex = lambda: flex_attention  # pyrefly: ignore[bad-assignment]
    primitive.flex.create_block_mask = lambda mask_mod, *_, **__: SimpleNamespace(mask_mod=mask_mod)  # pyrefly: ignore[bad-assignment]
    threshold._compiled_rooted = lambda: threshold._rooted  # type: ignore[assignment]
    loss._compiled_loss = lambda: loss._loss_and_slope  # type: ignore[assignment]
    world.pick_device = lambda name: torch.device("cuda:0")
    driver.Accumulator.add = lambda totals, batch: batch.on_cpu()  # type: ignore[method-assign]
    driver.measurement_from = lambda *_, **__: None  # type: ignore[assignment]
    masking_utils.is_tracing = lambda tensor=None: False  # transformers takes fake tensors for those of an export


@contextmanager
def noted(found: dict[str, Any], phase: str) -> Iterator[None]:
    """Record the events of a phase, or its error if it fails."""
    EVENTS.clear()
    try:
        yield
    except Exception as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(SOURCE)]
        lines = [f"{Path(f.filename).relative_to(SOURCE)}:{f.lineno} {f.name}" for f in ours[-4:]]
        found["error"] = f"{phase}: {type(error).__name__}: {str(error)[:400]} ({' > '.join(lines)})"
        raise
    found[phase] = [asdict(event) for event in EVENTS]


def phases(overlay: Any, data: Any, out: Path) -> dict[str, Any]:
    """The events of a variant by phase."""
    found: dict[str, Any] = {}
    values = recipe_values("60m")
    importance.seen_by.cache_clear()
    primitive._block_mask.cache_clear()
    try:
        with card():
            with noted(found, "build"):
                run = open_run(build_recipe(values, SIZES, overlay), data, out)
                updater = Updater(run)
                evaluator = Evaluator(run, updater)
            with noted(found, "first step"):
                updater.update()
            with noted(found, "step"):
                updater.update()
            with noted(found, "settle"):
                updater.settle()
            with noted(found, "loss"):
                evaluator.losses()
            with noted(found, "measure"):
                evaluator.measure()
    except Exception:
        assert "error" in found
    return found


def read(config: Any) -> dict[str, Any]:
    """The events of a measured forward pass of a model of transformers."""
    found: dict[str, Any] = {}
    model: Any = hf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tokens = torch.randint(3, 512, (4, CONTEXT))
    try:
        with card(), evaluating(model.to("cuda")):
            tokens = tokens.to("cuda")
            with noted(found, "read"), call_records(model, adapt(model)) as records:
                model(tokens, use_cache=False)
                assert len(records.layers) == config.num_hidden_layers
    except Exception:
        assert "error" in found
    return found


def main(names: list[str]) -> None:
    """Print the phases of the named variants and models of transformers, or of all."""
    without_kernels()
    for name in names or PRETRAINED:
        if name in PRETRAINED:
            print(json.dumps({"name": name, **read(PRETRAINED[name])}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text = f"synthetic:bigram_backcopy:length={CONTEXT + 1},documents=200"
        data = prepare(settings_of(text, "words", valid_fraction=0.2), Path(folder) / "data")
        for name in [name for name in names or OVERLAYS if name in OVERLAYS]:
            found = phases(OVERLAYS[name], data, Path(folder) / name)
            print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
