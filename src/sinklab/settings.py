"""The base of a command's settings, and the fields that several commands share.

A settings model states each setting once: its bounds, default and help. `commands/from_model.py` makes command line
options of the fields, the result document holds what `model_dump` gives.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from sinklab.errors import InputError

LARGEST = 2**63 - 1  # of whole numbers, as files and generators hold them
MOST = 10**9  # sequences, and tokens in each: their product is still the size of a tensor

T = TypeVar("T")
Several = Annotated[tuple[T, ...], Strict(False)]
"""On the command line an option that may be repeated; in Python a list will do."""


@dataclass(frozen=True)
class Flag:
    """How a field is given on the command line, where its type does not tell.

    Attributes:
        name: of the option, where it is not that of the field.
        metavar: in the place of the type.
        text: the field is written as text, which its validator parses: str, or list[str] for a repeatable option.
        default: that text, where the option is not given.
    """

    name: str | None = None
    metavar: str | None = None
    text: Any = None
    default: str | None = None


class CommandSettings(BaseModel, frozen=True):
    """Immutable settings; unknown names and values of another type are refused. A field without help is no option."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        """Validate.

        Raises:
            InputError: names the option, the value and what is expected.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            if isinstance(said := first.get("ctx", {}).get("error"), InputError):
                raise said from None
            name = str(first["loc"][0]) if first["loc"] else type(self).__name__
            option = option_name(type(self), name) if name in type(self).model_fields else name
            raise InputError(f"{option} {first['input']!r}: {first['msg']}") from None


def flag_of(settings: type[CommandSettings], field: str) -> Flag:
    """The command line's view of a field."""
    return next((one for one in settings.model_fields[field].metadata if isinstance(one, Flag)), Flag())


def option_name(settings: type[CommandSettings], field: str) -> str:
    """The option of a field: --batch-size for `batch_size`, --no-loss for a `loss` that is on by default."""
    off = "no-" if settings.model_fields[field].default is True else ""
    return flag_of(settings, field).name or f"--{off}{field.replace('_', '-')}"


SequenceCount = Annotated[int, Field(ge=1, le=MOST, description="Number of sequences.")]
SequenceLength = Annotated[int, Field(ge=2, le=MOST, description="Tokens per sequence, BOS included.")]
Seed = Annotated[int, Field(ge=0, le=LARGEST)]
