"""Functions behind `Measurement.plot()` and the HTML view of a `Measurement` in notebooks.

`sinklab/__init__.py` assigns functions of `report/` to these names, so that `measuring/` does not import `report/`.
"""

from collections.abc import Callable
from typing import Any

chart: Callable[[Any, str], Any]
html: Callable[[Any], str]
