"""Command line options, generated from the fields of pydantic settings models, and the printing of results.

A command has a settings model as a parameter. Typer reads a signature with one option per field instead, and the
command is called with the validated model. In the help, options are sorted by panel, types have short names, and bounds
are not shown.
Alternatives considered: pydantic-settings (based on argparse, whose help and messages differ from typer's),
pydantic-typer and typantic (require a prefix on every option, or a single model), cyclopts (replaces typer).
"""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, get_args, get_origin

import typer
from pydantic import AfterValidator, Field
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.models import OptionInfo

from sinklab.commands.terminal import JobProgress, print_text, stderr
from sinklab.errors import InputError, UnsavedError
from sinklab.files import RUNS
from sinklab.settings import (
    ADVANCED,
    INPUT,
    OUTPUT,
    PANELS,
    CommandSettings,
    Flag,
    Several,
    dtype_name,
    flag_of,
    option_name,
)
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.models.huggingface.loading import Loading


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Declare an option in a panel of the help, named after its parameter unless `names` are given."""
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


EngineName = Literal["local", "slurm", "ray"]
"""Engines that train the runs of a sweep."""


class LoadingOptions(CommandSettings, frozen=True):
    """Options that determine how a model is loaded."""

    dtype: Annotated[str, AfterValidator(dtype_name), Flag(metavar="TYPE")] = Field(
        default="auto",
        description="Weights in float32, bfloat16, float16, or auto (as stored; float32 for .gguf files and where a "
        "CPU emulates the type).",
    )
    device: Annotated[str, Flag(metavar="NAME")] = Field(
        default="auto",
        description="auto (a GPU if there is one), cpu, cuda, cuda:N, or map (weights split over GPUs, memory, disk).",
    )
    revision: Annotated[str | None, Flag(metavar="NAME", panel=INPUT)] = Field(
        default=None, description="Branch, tag or commit on the hub; default: main."
    )
    subfolder: Annotated[str | None, Flag(metavar="FOLDER", panel=INPUT)] = Field(
        default=None, description="Folder of the model inside MODEL."
    )
    adapters: Annotated[Several[str], Flag(name="--adapter", metavar="ADAPTER", panel=INPUT)] = Field(
        default=(), description="PEFT adapter (LoRA) to apply; repeatable."
    )
    load_in: Annotated[Literal["4bit", "8bit"] | None, Flag(metavar="BITS")] = Field(
        default=None,
        description="Quantise the weights while loading, with bitsandbytes: 4bit or 8bit (extra quantised).",
    )
    trust_remote_code: bool = Field(default=False, description="Run code from the model's repository.")
    tokenizer: Annotated[str, Flag(metavar="KIND", panel=INPUT)] = Field(
        default="auto",
        description="auto, file, transformers, or a path.",
    )

    def on(self, console: Console) -> "Loading":
        """Return the settings for the model loader, which prints a message to `console` before slow steps."""
        from sinklab.models.huggingface.loading import Loading

        return Loading(**dict(self), say=partial(print_text, console=console))

    def within(self, model: str) -> str:
        """Return a model name with --subfolder appended if it is a local directory; for errors, see `in_subfolder`."""
        from sinklab.models.huggingface.loading import in_subfolder

        return in_subfolder(model, self.subfolder)


MOST_SEEDS = 1000
"""Maximum number of replicates per cell, so that a mistyped number is rejected before the sweep is planned."""


DEFAULT_SCALE = "laptop"
"""Scale of the main results, and of `reproduce all` unless --scale is passed."""


class ReproduceSettings(CommandSettings, frozen=True):
    """Settings of `sinklab reproduce` and `lab`."""

    panel = INPUT

    scale: Annotated[str | None, Flag(metavar="NAME")] = Field(
        default=None,
        description="Models to train: tiny, mini, laptop, lab, small, 60m, 1b, backcopy or trigger_average; default: "
        "the first that all named experiments have; of all, laptop.",
    )
    seeds: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SEEDS,
        description="Replicates per cell: the first N seeds, draws or models; default: the experiment's, usually 5.",
    )
    cells: Annotated[Several[str], Flag(name="--cell", metavar="NAME")] = Field(
        default=(), description="Train only this cell; repeatable. Default: all cells of the experiments."
    )
    models: Annotated[Several[str], Flag(name="--model", metavar="MODEL")] = Field(
        default=(),
        description="Model to measure, for experiments on existing models: Hugging Face id, directory, .gguf file or "
        "run directory. Repeatable: a base and a chat model, or several models to compare. For an experiment whose "
        "replicates are fixed models, these models replace them.",
    )
    steps: int | None = Field(default=None, ge=1, description="Updates per model; default: as in the recipe.")
    text: Path | None = Field(
        default=None,
        description="Text to train on (default: as in the recipe) or to measure on: a text file, or a folder.",
    )
    data: Path | None = Field(
        default=None,
        description="File with the items of the downstream task, for experiments that evaluate existing models "
        "(figure_10, on HellaSwag); or file of conversations, for experiments that fine-tune (figure_30).",
    )
    trust_remote_code: Annotated[bool, Flag(panel=ADVANCED)] = Field(
        default=False, description="Run code from the model's repository."
    )
    jobs: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None,
        ge=1,
        description="Models trained concurrently (--engine local); default: one per GPU; without a GPU, derived from "
        "the numbers of runs and CPU cores. At most as many as fit into memory.",
    )
    engine: Annotated[EngineName, Flag(panel=ADVANCED, metavar="NAME")] = Field(
        default="local", description="Execution engine: local, slurm or ray."
    )
    engine_options: Annotated[Several[str], Flag(name="--engine-option", metavar="KEY=VALUE", panel=ADVANCED)] = Field(
        default=(), description="Option of slurm or ray, such as partition=gpu; repeatable."
    )
    shard: Annotated[str | None, Flag(panel=ADVANCED, metavar="I/N")] = Field(
        default=None,
        pattern=r"^\d+/[1-9]\d*$",
        description="Train only the runs whose number modulo N is I (from 0): one of N commands, as of srun.",
    )
    dry_run: Annotated[bool, Flag(panel=OUTPUT)] = Field(
        default=False, description="Only print the cells, changes and estimated hours, or the planned measurements."
    )
    out: Annotated[Path | None, Flag(panel=OUTPUT)] = Field(
        default=None,
        description="Directory for results; default: runs/SCALE, or runs/models/MODEL/ID for existing models.",
    )
    packed: Annotated[Path | None, Flag(panel=ADVANCED)] = Field(
        default=None, description="Resume from this folder, written by report --pack; its runs are not retrained."
    )

    @property
    def scale_name(self) -> str:
        """--scale, or the default."""
        return self.scale or DEFAULT_SCALE

    @property
    def directory(self) -> Path:
        """Directory of a sweep of trained models: --out, or runs/SCALE."""
        return self.out or RUNS / self.scale_name

    @property
    def shard_of(self) -> tuple[int, int]:
        """I and N of --shard; 0 and 1 without it.

        Raises:
            InputError: if I is not smaller than N.
        """
        shard, _, count = (self.shard or "0/1").partition("/")
        if int(shard) >= int(count):
            raise InputError(f"--shard {self.shard}: the shards of {count} are 0/{count} to {int(count) - 1}/{count}")
        return int(shard), int(count)

    @property
    def overlay(self) -> dict[str, Any]:
        """Recipe keys that --steps and --text override in every run.

        Raises:
            InputError: if the file or folder --text does not exist.
        """
        if self.text is not None and not self.text.exists():
            raise InputError(f"--text {self.text}: there is no such file or folder")
        overlay: dict[str, Any] = {} if self.steps is None else {"train": {"steps": self.steps}}
        return overlay if self.text is None else {**overlay, "data": {"source": str(self.text)}}


def print_result(as_json: bool, document: Callable[[], object], show: Callable[[Console], None]) -> None:
    """Print a result to standard output: `document()` as JSON if `as_json`, else by calling `show`."""
    if as_json:
        print(json.dumps(document(), indent=2))
    else:
        show(Console())


def run_job(
    work: Callable[[JobProgress], Any],
    phase: str,
    as_json: bool,
    show: Callable[[Any, Console], None],
    resumes: bool = False,
    *,
    what: str = "",
    steps: int | None = None,
) -> Any:
    """Run a job with a progress display on stderr, print its result as JSON or by calling `show`, and return it.

    Args:
        work: function of the progress display that returns the result, an object with a `document()` method.
        phase, what, steps: see `JobProgress`.
        resumes: True if the same command resumes an interrupted job.

    Raises:
        UnsavedError: if the result could not be saved; it has been printed.
    """
    try:
        with keeping_what_is_finished(resumes), JobProgress(stderr(), what, steps, phase=phase) as progress:
            result = work(progress)
    except UnsavedError as error:
        print_result(as_json, error.result.document, partial(show, error.result))
        raise
    print_result(as_json, result.document, partial(show, result))
    return result


def save_report(folder: Path) -> None:
    """Write report.html of the results in a folder, and print its path to stderr; for errors, see `write_report`."""
    from sinklab.report.page import write_report

    with JobProgress(stderr(), phase="writing the report"):
        path = write_report([folder])
    print_text(f"report: {path}", stderr())


ModelName = Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")]
Json = Annotated[bool, option(OUTPUT, "Print the result as JSON to standard output.", "--json")]


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
