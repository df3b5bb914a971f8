"""Accessibility findings of axe-core on a page in the browser."""

import json
import os
import sys
from functools import cache
from pathlib import Path

import pytest
from browser import BrowserTab

AXE = "axe-core/axe.min.js"


@cache
def axe_script() -> str:
    """The code of axe-core, which `make test-browser` installs into the virtual environment if npm is available."""
    folders = [*os.environ.get("NODE_PATH", "").split(os.pathsep), f"{sys.prefix}/node_modules"]
    for folder in filter(None, folders):
        if (script := Path(folder) / AXE).is_file():
            return script.read_text(encoding="utf-8")
    pytest.skip(f"no axe-core: npm install --prefix {sys.prefix} --no-save axe-core@4")


def grave_findings(tab: BrowserTab) -> list[str]:
    """The serious and critical findings on the open page, each with an element."""
    tab.call("Runtime.evaluate", expression=f"{axe_script()};0")
    found = tab.evaluate(
        "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => JSON.stringify(violations.map("
        "(one) => [one.impact, one.id, one.nodes.length, one.nodes[0].html.slice(0, 200)])))"
    )
    return [str(one) for one in json.loads(found) if one[0] in ("serious", "critical")]
