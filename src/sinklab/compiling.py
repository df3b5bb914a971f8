"""torch.compile for functions that one process calls in many forms."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

FORMS = 128  # operations, masks, shapes, with and without gradients


def compiled(function: Callable[P, R], dynamic: bool | None = None) -> Callable[P, R]:
    """`function`, compiled for every new kind of arguments when it meets them.

    PyTorch by itself stops at the eighth kind and runs all later ones uncompiled: FlexAttention then builds the T x T
    matrix.

    Args:
        dynamic: as in `torch.compile`; False compiles every shape for itself.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, FORMS)
    return torch.compile(function, dynamic=dynamic)
