"""Extras: optional packages, and the shell commands that install them.

sinklab is not on a package index, so pip cannot find its extras by name.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution

from sinklab.errors import InputError


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


def require_extra(extra: str, packages: Sequence[str], purpose: str) -> None:
    """Check that packages of an extra are installed.

    Args:
        purpose: what needs the packages, the first words of the message, such as "instruction tuning".

    Raises:
        InputError: if a package is not installed; the message contains the install command.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        name = missing[0].replace("_", "-")
        raise InputError(f"{purpose} needs the package {name}, which is not installed: {install_command(extra)}")
