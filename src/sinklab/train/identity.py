"""Keys that recipes have had only since some runs were trained, and that are left out of a run's content hash while
they say what was so before: those runs stay the runs they were.
"""

from typing import Any

LATER: dict[str, object] = {
    "init": {"kind": "declared"},
    "init_sha256": None,
    "attention.bias.start": None,
    "attention.bias.count": 1,
    "attention.operation.shift": "none",
    "exclusive": False,
    "projection": {"kind": "full"},
    "mixer": {"kind": "attention"},
    "value_residual": {"kind": "none"},
    "norm.head_norm": False,
    "norm.gate_rank": None,
}
"""Dotted keys of the model part of a recipe, each with the value that leaves the model as it was before the key."""


def without_later(model: dict[str, Any]) -> None:
    """Take the keys of `LATER` out of a dumped model part, in place, where they have the value that is given there."""
    for key, before in LATER.items():
        *above, last = key.split(".")
        part = model
        for name in above:
            part = part[name]
        if last in part and part[last] == before:
            del part[last]
