"""torch.compile for functions that one process calls with many shapes and options."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

FORMS = 128  # operations, masks, shapes, with and without gradients


def compiled(function: Callable[P, R], dynamic: bool | None = None) -> Callable[P, R]:
    """Compile `function`, once for every new form of its arguments.

    PyTorch's default stops after eight forms and runs all later ones uncompiled: FlexAttention then builds the T x T
    matrix.

    Args:
        dynamic: as in `torch.compile`; False compiles every shape separately.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, FORMS)
    return torch.compile(function, dynamic=dynamic)
