"""Commands that install optional dependencies (extras); sinklab is not on a package index.

For an editable installation, the command installs its checkout with the extra; for any other, only the extra's
packages, because the wheel or archive may have been deleted.
"""

import re
import shlex
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from sinklab.files import parse_json


def install_command(extra: str, installed: Distribution | None = None) -> str:
    """Return the shell command that installs an extra for the current Python.

    If sinklab is not installed, the text also states that the command must be run in the checkout.

    Args:
        extra: name of an extra in pyproject.toml, such as "sft".
        installed: installed sinklab distribution; default: looked up.
    """
    try:
        installed = installed or distribution("sinklab")
    except PackageNotFoundError:  # not installed; the source is on the path
        return _pip("-e", f".[{extra}]") + " in the checkout of sinklab"
    if (checkout := _checkout(installed)) is not None:
        return _pip("-e", f"{checkout}[{extra}]")
    needed = [one.partition(";") for one in installed.requires or ()]
    return _pip(*(name.strip() for name, _, when in needed if re.search(rf"extra == (['\"]){extra}\1", when)))


def _checkout(installed: Distribution) -> Path | None:
    """Return the checkout of an editable installation; None for other installations, or if it no longer exists."""
    try:
        document = parse_json(installed.read_text("direct_url.json") or "{}")
        folder = Path(unquote(urlparse(document["url"]).path))
        return folder if document["dir_info"]["editable"] and folder.is_dir() else None
    except (ValueError, KeyError):
        return None


def _pip(*what: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *what])
