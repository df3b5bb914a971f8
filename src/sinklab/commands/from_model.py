"""Generate command line options from the fields of pydantic settings models.

A command has a settings model as a parameter. Typer reads a signature with one option per field instead, and the
command is called with the validated model. In the help, options are sorted by panel, types have short names, and bounds
are not shown.
Alternatives considered: pydantic-settings (based on argparse, whose help and messages differ from typer's),
pydantic-typer and typantic (require a prefix on every option, or a single model), cyclopts (replaces typer).
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeGuard, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import OptionInfo

from sinklab.errors import InputError
from sinklab.settings import PANELS, CommandSettings, flag_of, option_name

REQUIRED = inspect.Parameter.empty
METAVARS: dict[Any, str] = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""Placeholders of option values in the help, by type; for other types (choices), typer shows its own."""


class PlainGroup(TyperGroup):
    """A command group whose help has no type column, because all its options are flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group, with empty placeholders."""
        parameters = super().get_params(ctx)
        for one in parameters:
            one.metavar = ""
        return parameters


class PanelCommand(TyperCommand):
    """A command whose help has short types and no bounds, options ordered by panel, and --help in the last panel.

    Arguments are shown by metavar or name in capitals; flags have no --no form.
    """

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        self.params.sort(key=lambda one: (None, *PANELS).index(getattr(one, "rich_help_panel", None)))
        for one in self.params:
            if isinstance(one, TyperArgument):
                one.metavar = one.metavar or one.name.upper()
                one.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # no type in the help
            elif isinstance(one, TyperOption):
                one.min, one.max, one.secondary_opts = None, None, []

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line after the command's name, in parts: [OPTIONS] and the arguments."""
        arguments = [one for one in self.get_params(ctx) if isinstance(one, TyperArgument)]
        return ["[OPTIONS]", *(str(one.metavar) if one.required else f"[{one.metavar}]" for one in arguments)]

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help, assigned to the last panel."""
        option = super().get_help_option(ctx)
        panels = [getattr(one, "rich_help_panel", None) for one in self.params]
        if option is not None and any(panels):
            option.rich_help_panel, option.metavar = list(filter(None, panels))[-1], ""  # type: ignore[attr-defined]
        return option


class Only(tuple[str, ...]):
    """Names of the fields of a settings parameter that become options, in this order within a panel; default: all."""

    def __new__(cls, *names: str) -> "Only":
        return super().__new__(cls, names)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that the fields of its settings models, nested ones included, are command line options.

    Fields without a description, or left out of `Only`, have no option. The default value of a settings parameter sets
    the defaults of its options. The returned function raises InputError if a value of a settings model is invalid.
    """
    settings: dict[str, tuple[type[CommandSettings], CommandSettings | None, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *extras = get_args(parameter.annotation) or (parameter.annotation,)
        if not _is_nested(kind):
            for option in (one for one in extras if isinstance(one, OptionInfo)):
                option.metavar = METAVARS.get(_element(kind)) if option.metavar is None else option.metavar
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        default = parameter.default if isinstance(parameter.default, kind) else None
        options = _options(kind, default)
        names = next((one for one in extras if isinstance(one, Only)), tuple(options))
        settings[parameter.name] = kind, default, names
        parameters += (options[name] for name in names)

    def run(**values: Any) -> None:
        for name, (kind, default, fields) in settings.items():
            values[name] = _model(kind, default, {field: values.pop(field) for field in fields})
        command(**values)

    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    run.__name__ = command.__name__
    # typer keeps the line breaks of all paragraphs but the first
    run.__doc__ = "\n\n".join(" ".join(one.split()) for one in paragraphs)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _model(kind: type[CommandSettings], default: CommandSettings | None, given: Mapping[str, Any]) -> CommandSettings:
    """Build a settings model from option values by field name; a field whose value is None keeps its default."""
    values = dict(default or ())
    for name, field in kind.model_fields.items():
        if _is_nested(field.annotation):
            values[name] = _model(field.annotation, values.get(name), given)
        elif given.get(name) is not None:
            values[name] = not given[name] if field.default is True else given[name]
    return kind(**values)


def _options(kind: type[CommandSettings], default: CommandSettings | None) -> dict[str, inspect.Parameter]:
    """Return the command line options of a settings model by field name, for all fields with a description."""
    options: dict[str, inspect.Parameter] = {}
    for name, field in kind.model_fields.items():
        value = REQUIRED if field.is_required() else field.default
        value = getattr(default, name) if default else value
        if _is_nested(field.annotation):
            options |= _options(field.annotation, value if isinstance(value, CommandSettings) else None)
        elif field.description is not None:
            options[name] = _option(kind, name, value)
    return options


def _option(kind: type[CommandSettings], name: str, value: Any) -> inspect.Parameter:
    """Return the command line option of a field as a function parameter; `value` is its default."""
    field, flag, names = kind.model_fields[name], flag_of(kind, name), option_name(kind, name)
    annotation, callback = _present(field.annotation), None
    if flag.text is not None:
        annotation, value = flag.text, REQUIRED if value is REQUIRED else flag.default
    elif get_origin(annotation) is tuple and get_args(annotation)[1] is ...:  # repeatable
        element = get_args(annotation)[0]
        annotation, value = list[(get_args(element) or (element,))[0]], None
    elif annotation is bool:
        value = False
    metavar = flag.metavar or METAVARS.get(_element(annotation))
    if annotation == list[int]:
        annotation, callback, metavar = list[str], _whole_numbers(names), flag.metavar or "N,.."
    panel = flag.panel or kind.panel
    option = typer.Option(names, metavar=metavar, help=field.description, rich_help_panel=panel, callback=callback)
    hint = Annotated[annotation if value is not None else annotation | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


def _present(annotation: Any) -> Any:
    """Return the type of an option without None: X for `X | None`."""
    kinds = [one for one in get_args(annotation) if one is not NoneType]
    return kinds[0] if NoneType in get_args(annotation) else annotation


def _element(annotation: Any) -> Any:
    """Return the type of a single value of an option: X for `list[X] | None`."""
    annotation = _present(annotation)
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation


def _whole_numbers(option: str) -> Callable[[Any], Any]:
    """Return a callback that parses the values of a repeatable option: ["2", "3,4"] -> [2, 3, 4]; else InputError."""

    def parse(given: Any) -> Any:
        try:
            return given and [int(part) for part in ",".join(given).split(",")]
        except ValueError:
            raise InputError(f"{option} {','.join(given)}: expected whole numbers, such as 2 or 2,3") from None

    return parse


def _is_nested(annotation: Any) -> TypeGuard[type[CommandSettings]]:
    return isinstance(annotation, type) and issubclass(annotation, CommandSettings)
