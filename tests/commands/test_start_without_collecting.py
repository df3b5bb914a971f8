"""Garbage is looked for once the libraries are there, and not while they are imported."""

import subprocess
import sys

CODE = """
import gc, sys

sys.argv = ["sinklab", "measure", "/no/such/model"]
from sinklab.__main__ import main

try:
    main()
except SystemExit as ended:
    print(ended.code, gc.isenabled(), gc.get_freeze_count() > 10_000, "torch" in sys.modules)
"""


def test_the_collector_rests_while_torch_is_imported_and_works_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "True", "True", "True"]


def test_importing_sinklab_leaves_the_collector_alone() -> None:
    code = "import gc, sinklab.__main__; print(gc.isenabled(), gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]
