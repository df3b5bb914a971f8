"""What a recipe's hash leaves out so that runs from before a key existed are the runs that they were."""

from typing import Any

ADDED_LATER: dict[str, Any] = {
    "model.init": {"kind": "declared"},
    "model.init_sha256": None,
    "model.attention.bias.start": None,
    "model.attention.operation.shift": "none",
}
"""Keys that recipes did not always have, by the value that is what was done before; parts may lack the key."""


def leave_out_later_keys(recipe: dict[str, Any]) -> None:
    """Remove from a dumped recipe every key of `ADDED_LATER` that has the value it is listed with."""
    for dotted, before in ADDED_LATER.items():
        *path, key = dotted.split(".")
        part = recipe
        for name in path:
            part = part[name]
        if key in part and part[key] == before:
            del part[key]
