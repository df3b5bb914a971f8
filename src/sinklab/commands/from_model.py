"""Command line options made from the fields of settings models.

A command has the model as a parameter; typer sees one option per field in its place, and the command gets the validated
model. Considered and not used: pydantic-settings (its command line is argparse, with another help and other messages),
pydantic-typer and typantic (the parameter's name before every option, or one model that holds everything), cyclopts
(would replace typer for all commands).
"""

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, TypeGuard, get_args, get_origin

import typer

from sinklab.settings import CommandSettings, flag_of, option_name

REQUIRED = inspect.Parameter.empty


class Only(tuple[str, ...]):
    """Annotates a settings parameter: the fields that this command has, in the order of its help."""

    def __new__(cls, *names: str) -> "Only":
        return super().__new__(cls, names)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for every field of its settings, those of nested models included.

    A default of the settings parameter, a model, gives the options their defaults.
    """
    settings: dict[str, tuple[type[CommandSettings], CommandSettings | None, dict[str, inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *extras = get_args(parameter.annotation) or (parameter.annotation,)
        if not (isinstance(kind, type) and issubclass(kind, CommandSettings)):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        default = parameter.default if isinstance(parameter.default, kind) else None
        options = _options(kind, default)
        names = next((one for one in extras if isinstance(one, Only)), options)
        settings[parameter.name] = kind, default, {name: options[name] for name in names}
        parameters += settings[parameter.name][2].values()

    def run(**values: Any) -> None:
        for name, (kind, default, options) in settings.items():
            given = {field: values.pop(field) for field in options}
            values[name] = _model(kind, default, given)
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _model(kind: type[CommandSettings], default: CommandSettings | None, given: Mapping[str, Any]) -> CommandSettings:
    """The model with the values of its options; None is an option that was not given."""
    values = dict(default or ())
    for name, field in kind.model_fields.items():
        if _is_nested(field.annotation):
            values[name] = _model(field.annotation, values.get(name), given)
        elif given.get(name) is not None:
            values[name] = not given[name] if field.default is True else given[name]
    return kind(**values)


def _options(kind: type[CommandSettings], default: CommandSettings | None) -> dict[str, inspect.Parameter]:
    """The options by field; a field without help is none."""
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
    """The option of a field, with a default."""
    field, flag = kind.model_fields[name], flag_of(kind, name)
    annotation, limits = field.annotation, field.metadata
    if NoneType in get_args(annotation):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if flag.text is not None:
        annotation, value = flag.text, REQUIRED if value is REQUIRED else flag.default
    elif get_origin(annotation) is tuple and get_args(annotation)[1] is ...:  # repeatable; the bounds are its elements'
        element, *limits = get_args(get_args(annotation)[0]) or get_args(annotation)[:1]
        annotation, value = list[element], None
    elif annotation is bool:
        value = False
    limits = [bound for one in limits for bound in (one, *getattr(one, "metadata", ()))]
    bounds = {
        word: getattr(one, key) for one in limits for key, word in (("ge", "min"), ("le", "max")) if hasattr(one, key)
    }
    option = typer.Option(option_name(kind, name), metavar=flag.metavar, help=field.description, **bounds)
    hint = Annotated[annotation if value is not None else annotation | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


def _is_nested(annotation: Any) -> TypeGuard[type[CommandSettings]]:
    return isinstance(annotation, type) and issubclass(annotation, CommandSettings)
