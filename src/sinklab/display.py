"""Rendering functions of `Measurement`: `chart` for `plot()`, `html` for notebooks, and `text` for `print`.

`sinklab/__init__.py` sets them to functions that import the modules of higher layers, so that `sinklab.measuring` does
not.
"""

from collections.abc import Callable
from typing import Any

chart: Callable[[Any, str], Any]
html: Callable[[Any], str]
text: Callable[[Any], str]
