"""Sampling of many cases for the fast tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(n: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every n-th case as it is, the others marked as slow."""
    arguments = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*one, marks=[pytest.mark.slow] * (at % n > 0)) for at, one in enumerate(arguments)]
