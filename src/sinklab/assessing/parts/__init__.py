"""The parts of an assessment: the subclasses of `AssessPart` in the files of this folder, listed in `PART_NAMES`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated

from pydantic import AfterValidator

from sinklab.assessing.part import AssessPart
from sinklab.assessing.settings import PART_NAMES
from sinklab.errors import InputError

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

_CLASSES = {part.name: part for part in AssessPart.__subclasses__()}
PARTS = {name: _CLASSES[name] for name in PART_NAMES}
"""Parts of an assessment by name, in the order of execution and display."""

USUAL = tuple(name for name, part in PARTS.items() if not part.on_request)
"""Names of the parts that run by default."""

IN_QUICK = tuple(name for name, part in PARTS.items() if part.in_quick)
"""Names of the parts that run by default with --quick."""

NUMBERS = tuple(number for part in PARTS.values() for number in part.numbers)
"""Declared scalar results of all parts."""


def known_part(name: str) -> str:
    """Return `name` if it is the name of a part.

    Raises:
        InputError: if no part has this name.
    """
    if name not in PARTS:
        raise InputError(f"unknown part {name!r}: choose from {', '.join(PARTS)}")
    return name


PartName = Annotated[str, AfterValidator(known_part)]
