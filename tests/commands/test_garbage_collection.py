"""Commands collect garbage less often than Python's default, because imported modules stay in memory."""

import subprocess
import sys

CODE = """
import gc, sys

sys.argv = ["sinklab", "measure", "/no/such/model"]
from sinklab.__main__ import OBJECTS, main

try:
    main()
except SystemExit as ended:
    print(ended.code, gc.isenabled(), gc.get_threshold()[0] == OBJECTS, "torch" in sys.modules)
"""


def test_commands_raise_the_threshold_of_the_garbage_collector() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "True", "True", "True"]


def test_importing_sinklab_leaves_the_collector_alone() -> None:
    code = "import gc; before = gc.get_threshold(); import sinklab.__main__; print(gc.get_threshold() == before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
