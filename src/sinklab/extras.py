"""Shell commands that install extras. sinklab is not on a package index, so pip cannot find its extras by name."""

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of an extra for the current Python.

    If sinklab is not installed as a package, the command installs sinklab's checkout with the extra, and is followed by
    the words "in the checkout of sinklab".

    Args:
        extra: name of an extra in pyproject.toml, such as "sft".
    """
    pip = [sys.executable, "-m", "pip", "install"]
    try:
        needed = [one.partition(";") for one in distribution("sinklab").requires or ()]
    except PackageNotFoundError:  # sinklab is imported from its source
        return shlex.join([*pip, "-e", f".[{extra}]"]) + " in the checkout of sinklab"
    return shlex.join([*pip, *(name for name, _, when in needed if re.search(rf"extra == (['\"]){extra}\1", when))])
