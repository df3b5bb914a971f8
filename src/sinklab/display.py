"""How a measurement is drawn in a notebook.

Drawing is a layer above measuring, and `Measurement.plot()` is where users look for it: `sinklab/__init__.py`, which
every import of the package runs, fills in the functions of `report/result_tables.py`.
"""

from collections.abc import Callable
from typing import Any

chart: Callable[[Any, str], Any]
html: Callable[[Any], str]
