"""Arguments and output of a call of a Hugging Face model, whose KV cache has two names.

From transformers 5.24 on, the KV cache is the argument and output field `cache`. In earlier versions, and in code from
a model's repository, it is `past_key_values`.
"""

import inspect
from collections.abc import Mapping
from typing import Any

CACHE = "cache"
FORMER = "past_key_values"


def named_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the passed arguments of `forward` by name, with the KV cache as `cache`; None if no cache is passed.

    Args:
        signature: signature of `forward`; the cache may be passed by either name.
    """
    own = CACHE if CACHE in signature.parameters else FORMER
    renamed = {own if name in (CACHE, FORMER) else name: value for name, value in kwargs.items()}
    arguments = signature.bind_partial(*args, **renamed).arguments
    return {**arguments, CACHE: arguments.get(own)}


def cache_field(output: Any) -> str:
    """Return the name of the KV cache in the output of a model."""
    return CACHE if CACHE in getattr(output, "__dict__", {}) else FORMER
