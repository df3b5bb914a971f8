"""Stable content hashes of recipes when keys are added.

A key that was added later is left out of the content hash at its neutral value, so that earlier runs keep their hash.
This file can be removed when no study uses those runs.
"""

from typing import Any

LATER: dict[str, object] = {
    "model.embedding": "plain",
    "model.init": {"kind": "declared"},
    "model.init_sha256": None,
    "model.attention.bias.start": None,
    "model.attention.bias.count": 1,
    "model.attention.operation.shift": "none",
    "model.exclusive": False,
    "model.projection": {"kind": "full"},
    "model.mixer": {"kind": "attention"},
    "model.pattern": None,
    "model.position.share": 1.0,
    "model.value_residual": {"kind": "none"},
    "model.norm.head_norm": False,
    "model.norm.gate_rank": None,
    "train.float32_matmul": "highest",
    "losses": {"hidden_z": None, "tweo": None},
}
"""Neutral values of recipe keys added later, by dotted key: with these values a run equals one without the key."""


def without_later(recipe: dict[str, Any]) -> None:
    """Remove the keys of `LATER` that have their neutral values from a dumped recipe, in place."""
    for key, before in LATER.items():
        *above, last = key.split(".")
        part = recipe
        for name in above:
            part = part[name]
        if last in part and part[last] == before:
            del part[last]
