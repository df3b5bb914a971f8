"""Base class of command settings, and fields shared by several commands.

A settings model declares bounds, default and help text of each setting. `commands/options.py` derives the command
line options from its fields. Result documents contain the `model_dump` of the settings.

Names of the dtypes of a model's weights.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from sinklab.errors import InputError

LARGEST_INT64 = 2**63 - 1  # largest 64-bit integer
INPUT, TRAINING, MEASURED, OUTPUT, ADVANCED = PANELS = ("Input", "Training", "Measured", "Output", "Advanced")
"""Panels of a command's help, in order."""
MOST = 10**9  # maximum number of sequences, and of tokens per sequence; their product is a valid tensor size

T = TypeVar("T")
Several = Annotated[tuple[T, ...], Strict(False)]
"""Type of a repeatable option. In Python, a list is accepted as well as a tuple."""


@dataclass(frozen=True)
class Flag:
    """Properties of a field's command line option that cannot be derived from the field.

    Attributes:
        name: name of the option; None for the name derived from the field (`option_name`).
        metavar: placeholder for the value in the help; None for the type.
        panel: help panel; None for the panel of the settings.
        text: command line type of an option whose text the field's validator parses: str, or list[str] if repeatable.
            None if the type of the field is used.
        default: default value of an option with `text`, as text; None if it has no default.
    """

    name: str | None = None
    metavar: str | None = None
    panel: str | None = None
    text: Any = None
    default: str | None = None


class CommandSettings(BaseModel, frozen=True):
    """Immutable settings. Unknown names and wrong types are errors. A field without a description has no option.

    Attributes:
        panel: help panel of the options.
    """

    panel: ClassVar[str] = ADVANCED
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        """Validate the values.

        Raises:
            InputError: if a value is invalid, a required one is missing, or a name is unknown. The message names the
                first such option, its value and what is expected. An InputError of a validator is raised unchanged.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            if isinstance(reason := first.get("ctx", {}).get("error"), InputError):
                raise reason from None
            name = str(first["loc"][0]) if first["loc"] else type(self).__name__
            option = option_name(type(self), name) if name in type(self).model_fields else name
            value = "" if first["type"] == "missing" else f" {first['input']!r}"
            raise InputError(f"{option}{value}: {first['msg']}") from None


def flag_of(settings: type[CommandSettings], field: str) -> Flag:
    """Return the `Flag` declared for a settings field, or a `Flag` with default values if there is none."""
    return next((one for one in settings.model_fields[field].metadata if isinstance(one, Flag)), Flag())


def option_name(settings: type[CommandSettings], field: str) -> str:
    """Return the command line option of a settings field.

    It is the name in the field's `Flag`, if set. Otherwise it is derived from the name of the field: --batch-size for
    `batch_size`, or --no-loss for a field `loss` that is True by default.
    """
    off = "no-" if settings.model_fields[field].default is True else ""
    return flag_of(settings, field).name or f"--{off}{field.replace('_', '-')}"


def split_names(given: object) -> object:
    """Split a comma-separated text into a tuple of names; other values, for pydantic to validate, are unchanged."""
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else given


SequenceCount = Annotated[int, Field(ge=1, le=MOST, description="Number of sequences.")]
SequenceLength = Annotated[int, Field(ge=2, le=MOST, description="Tokens per sequence, BOS included.")]
Seed = Annotated[int, Field(ge=0, le=LARGEST_INT64)]
ColumnName = Annotated[
    str | None,
    Flag(panel=INPUT, metavar="NAME"),
    Field(description="Column of a file with rows; default: text."),
]


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
    "double": "float64",
}


def dtype_name(given: str) -> str:
    """Return one of `DTYPES` for a name as people write it: `fp16`, `torch.float16` and `half` are float16.

    Raises:
        InputError: if the name is unknown.
    """
    bare = given.lower().removeprefix("torch.")
    name = ALIASES.get(bare, bare)
    if name not in DTYPES:
        raise InputError(f"--dtype {given} is unknown; use one of {', '.join(DTYPES)}")
    return name
