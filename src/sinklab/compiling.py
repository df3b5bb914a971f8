"""torch.compile for functions that are called with many shapes and options."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

FORMS = 128  # compiled variants allowed per function; they differ in operation, mask, shape and gradient mode


def compiled(function: Callable[P, R], dynamic: bool | None = None) -> Callable[P, R]:
    """Return `function` compiled by `torch.compile`, and raise PyTorch's global recompile limit to at least FORMS.

    The default limit is 8 variants per function. Further variants run uncompiled, and uncompiled FlexAttention
    materialises the T x T matrix.

    Args:
        dynamic: as in `torch.compile`; False compiles every shape separately.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, FORMS)
    return torch.compile(function, dynamic=dynamic)


@functools.cache
def can_compile() -> bool:
    """Return whether torch.compile works on this machine's CPU: it needs a C++ compiler and Python's headers."""
    try:
        torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(64))
    except Exception:  # Inductor raises a different exception for each missing component
        return False
    return True
