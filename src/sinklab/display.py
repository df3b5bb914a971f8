"""Rendering functions of `Measurement`: `chart` for `plot()`, and `html` for the HTML view in notebooks.

`sinklab/__init__.py` sets them to functions that import `sinklab.report`, so that `sinklab.measuring` does not.
"""

from collections.abc import Callable
from typing import Any

chart: Callable[[Any, str], Any]
html: Callable[[Any], str]
