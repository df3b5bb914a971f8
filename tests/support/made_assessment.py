"""A made-up assessment of all parts, as `sinklab assess` writes it; the loss of the unchanged model is 3."""

import json
from pathlib import Path
from typing import Any

from sinklab.assessing.assess_model import ASSESSMENT, Assessment

NEURON = {"name": "down.weight", "expert": None, "neuron": 7, "activation": 2.0, "weight": 25.0, "adds": 50.0}


def effect(loss: float = 3.0, kl: float = 0.0) -> dict[str, Any]:
    return {"loss": loss, "kl": kl, "error": 0.001, "targets": 100}


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
        "prompt_cache": {
            **read,
            "prompt": 32,
            "first": 4,
            "methods": [
                {"method": method, "budget": budget, "first_kept": kept, **effect(3 + cost * 8 / budget, 0.2)}
                for method, kept in (("recent", 0.0), ("SnapKV", 0.75))
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
        "key_ablations": {
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
        "kv_cache": {
            **read,
            "sink_positions": 1,
            "outliers": [[1]],
            "sinks": [[1]],
            "settings": [
                {
                    "bits": bits,
                    "everything": effect(3 + cost * 2 / bits),
                    "first_spared": effect(3 + cost / bits),
                    "outliers_spared": effect(3 + cost / bits),
                    "sinks_spared": effect(3 + cost / bits),
                    "due_to_sink": cost / bits,
                }
                for bits in (4, 2)
            ],
            "head_bits": 2,
            "heads": [{"layer": 1, "head": head, **effect(3, 0.1 / head)} for head in (1, 2)],
            "exempt": [(1, 1)],
            "without_exempt": effect(3 + cost / 2),
            "without_random": {"losses": [3.0 + cost], **effect(3 + cost)},
        },
        "kv_formats": {
            **read,
            "sink_positions": 1,
            "formats": [
                {
                    "name": name,
                    "bits": bits,
                    "keys": effect(3 + cost / bits),
                    "values": effect(3 + cost / bits / 2),
                    "everything": effect(3 + cost * 2 / bits),
                    "without_sink": effect(3 + cost / bits),
                    "due_to_sink": cost / bits,
                }
                for name, bits in (("q8_0", 8.5), ("q4_0", 4.5))
            ],
            "layers": [
                {
                    "name": "q4_0",
                    "layer": layer,
                    "everything": effect(3 + cost / layer, 0.1 / layer),
                    "without_sink": effect(3 + cost / layer / 2, 0.05 / layer),
                    "due_to_sink": cost / layer / 2,
                }
                for layer in (1, 2)
            ],
        },
        "bos": {**read, "with_bos": effect(3 - cost / 2, 0.2)},
        "pruning": {
            **read,
            "total": 20,
            "orders": [
                {"order": order, "share": share, "heads": int(20 * share), "losses": [3.0], **effect(3 + share * cost)}
                for share in (0.1, 0.5)
                for order in ("sink first", "sink last", "smallest output", "random", "same layers")
            ],
            "kinds": [{"order": "all nop", "share": 0.5, "heads": 1, "losses": [3.0], **effect()}],
        },
        "writer": {
            **read,
            "channel": 3,
            "block": 1,
            "value": 100.0,
            "median": 0.5,
            "embedding": 1.0,
            "blocks": [{"layer": layer, "attention": -1.0, "feed_forward": 50.0} for layer in (1, 2)],
            "layer": 1,
            "sublayer": "feed-forward",
            "ffn_layer": 1,
            "experts": [],
            "neurons": [NEURON],
            "weight": NEURON,
            "down_projections": [
                {"layer": 1, "channel": 3, "neuron": 7, "weight": 2.0, "input": -45.0, "output": 90.0},
                {"layer": 2, "channel": 5, "neuron": 1, "weight": 1.0, "input": 40.0, "output": 90.0},
            ],
            "super_experts": None,
            "zeroed": [
                {"what": what, "channel": 1.0, "largest": 2.0, "elsewhere": 3.0, "sink": 40.0, **effect(3 + cost)}
                for what in ("nothing zeroed", "single weight")
            ],
        },
        "budgets": {
            **read,
            "size": 8,
            "first": 4,
            "heads": [{"layer": 1, "head": head, **effect(3, 0.1 / head)} for head in (1, 2, 3, 4)],
            "sink_shares": [0.1, 0.2, 0.3, 0.4],
            "retrieval": [(1, 1)],
            "restricted": effect(3 + cost),
            "policies": [
                {"policy": policy, "full": 0.25, "keys": 22.0, "losses": [3.0], **effect(3 + cost / 2)}
                for policy in ("by cost", "by sink share", "random", "one for all")
            ],
        },
        "chunks": {
            **read,
            "prompt": 32,
            "chunks": 4,
            "sinks": {"due_to_sink": cost / 2},
            "methods": [
                {"method": method, **effect(3 + cost / place, 0.1)}
                for place, method in enumerate(("cached apart", "first 1 recomputed"), 1)
            ],
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
