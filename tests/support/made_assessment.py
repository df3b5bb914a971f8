"""An assessment as `sinklab assess` writes it, all parts, with made-up numbers; loss 3 unless something is changed."""

import json
from pathlib import Path
from typing import Any

from sinklab.assessing.assessment import ASSESSMENT, Assessment


def effect(loss: float = 3.0, kl: float = 0.0) -> dict[str, Any]:
    return {"loss": loss, "kl": kl, "targets": 100}


def streamed(cost: float, cache: int, first: int) -> dict[str, Any]:
    """Twice the cost without the first four, once with them; half of it with the larger cache."""
    return effect(3 + cost * (2 - first / 4) * 16 / cache)


def assessment(model: str, cost: float = 0.5, **changes: Any) -> dict[str, Any]:
    """Every cost in proportion to `cost`, in nats."""
    read = {"sequences": 4, "length": 64, "unchanged": effect()}
    shifts = [{"by": by, **effect(3 + cost * abs(by) / 8, 0.1)} for by in (-8.0, -1.0, 1.0, 8.0)]
    document: dict[str, Any] = {
        "schema": 1,
        "model": model,
        "context": 64,
        "layers": 2,
        "asked": {"model": model, "files": "f00", "text": "abc", "caches": [16, 32]},
        "notes": ["read with care"],
        "streaming": {
            **read,
            "positions": "cache",
            "caches": [
                {"cache": cache, "first": first, "perplexity": 20.0 + first, **streamed(cost, cache, first)}
                for cache in (16, 32)
                for first in (0, 4)
            ],
        },
        "quantisation": {
            **read,
            "sink_positions": 1,
            "settings": [
                {
                    "name": name,
                    "weights": "int8",
                    "activations": "int8",
                    "everything": effect(3 + cost),
                    "without_sink": effect(3 + cost / 4),
                    "due_to_sink": 0.75 * cost,
                    "destroyed": False,
                }
                for name in ("int8 static per tensor", "int8 per token")
            ],
            "outliers": [],
        },
        "eviction": {
            **read,
            "first": 4,
            "policies": [
                {"policy": policy, "budget": budget, **effect(3 + cost * 8 / budget, 0.2)}
                for policy in ("recent", "random")
                for budget in (8, 16)
            ],
        },
        "length": {
            **read,
            "context": 64,
            "buckets": [
                {"start": 2, "stop": 65, "whole": effect(), "within": effect()},
                {"start": 65, "stop": 129, "whole": effect(3 + 3 * cost), "within": effect()},
            ],
        },
        "carries": {
            **read,
            "sink_keys": 1,
            "keys": [
                {
                    "keys": keys,
                    "share": 0.3,
                    "value_zeroed": effect(),
                    "hidden": effect(3 + 4 * cost),
                    "spread": effect(),
                    "shifted": shifts,
                }
                for keys in ("sink", "random")
            ],
        },
        "heads": {
            **read,
            "sink": "first position",
            "width": 16,
            "heads": [
                {
                    "layer": 1,
                    "head": head,
                    "share": 0.4,
                    "value_norm": 0.1,
                    "output_share": 0.1,
                    "effective_rank": 4.0,
                    "kind": kind,
                }
                for head, kind in enumerate(("nop", "broadcast"), start=1)
            ],
            "counts": {"nop": 1, "broadcast": 1},
        },
        **changes,
    }
    return document


def make_assessment(folder: Path, model: str = "model", cost: float = 0.5, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    document = assessment(model, cost, **changes)
    Assessment.model_validate(document)
    (folder / ASSESSMENT).write_text(json.dumps(document), encoding="utf-8")
    return folder
