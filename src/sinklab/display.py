"""Drawing of a measurement in a notebook.

Drawing is a layer above measuring, but users expect `Measurement.plot()`. So `sinklab/__init__.py` assigns the
functions of `report/` to these names.
"""

from collections.abc import Callable
from typing import Any

chart: Callable[[Any, str], Any]
html: Callable[[Any], str]
