"""Hash compatibility: recipe keys added after some runs were trained, and the value of each that means "as before".

A key with that value is left out of the content hash, so that a recipe from before the key has the hash it had. Recipe
hashes may not change while a study runs, because runs are found by them: this file stays until the next study, whose
runs can be hashed without it.
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
"""Dotted keys of a recipe, each with the value that leaves a run as it was before the key."""


def without_later(recipe: dict[str, Any]) -> None:
    """Take the keys of `LATER` out of a dumped recipe, in place, where they have the value that is given there."""
    for key, before in LATER.items():
        *above, last = key.split(".")
        part = recipe
        for name in above:
            part = part[name]
        if last in part and part[last] == before:
            del part[last]
