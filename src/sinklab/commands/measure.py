"""`sinklab measure` and `sinklab compare` on the command line: their options, read into one typed request."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinklab.commands.ending import stderr
from sinklab.commands.options import (
    BatchSize,
    Device,
    Dtype,
    Eps,
    InputKind,
    Json,
    Length,
    NoBos,
    Revision,
    Revisions,
    Seed,
    Sequences,
    Subfolder,
    TableFormat,
    Text,
    TrustRemoteCode,
    parse_eps,
    parse_maps,
)
from sinklab.errors import InputError
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from rich.console import Console

    from sinklab.models.huggingface.loading import Loading


def measure(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face id, model directory, .gguf file or run directory; none with --family."),
    ] = None,
    text: Text = None,
    inputs: InputKind = "natural",
    sequences: Sequences = 100,
    length: Length = 64,
    eps: Eps = None,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Also of the same sequences cut shorter; may be repeated.")
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also angles, entropy, distances, secondary sinks and kurtosis; slower.")
    ] = False,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="LAYER.HEAD", help="Details, and the matrix of this head; may be repeated."),
    ] = None,
    no_bos: NoBos = False,
    no_loss: Annotated[
        bool, typer.Option("--no-loss", help="Leave out the loss and the logits: a third faster on a small model.")
    ] = False,
    ablate: Annotated[
        list[str] | None,
        typer.Option(
            help="Also without something: mask_first:N, no_bos, zero_massive or zero_massive:LAYER; repeatable."
        ),
    ] = None,
    perturb: Annotated[
        int | None,
        typer.Option(metavar="POSITION", help="Also replace this token: how far it spreads, without key 1 as well."),
    ] = None,
    swap_position: Annotated[
        tuple[int, int] | None, typer.Option(metavar="I J", help="Measure with two learned positions swapped.")
    ] = None,
    replace_position: Annotated[
        tuple[int, int] | None, typer.Option(metavar="I J", help="Measure with learned position I replaced by J.")
    ] = None,
    batch_size: BatchSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    revision: Revisions = None,
    subfolder: Subfolder = None,
    trust_remote_code: TrustRemoteCode = False,
    by_domain: Annotated[
        bool, typer.Option("--by-domain", help="Each file of the folder --text by itself: one table and chart.")
    ] = False,
    by_checkpoint: Annotated[
        bool,
        typer.Option("--by-checkpoint", help="Each checkpoint below MODEL, a folder of them or a run directory."),
    ] = False,
    family: Annotated[
        list[str] | None,
        typer.Option(help="The paper's: gpt2, llama2, llama3, mistral, pythia, opt, jamba or all; may be repeated."),
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="With --family: where the models lie, in directories named as on the hub.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --family: only list parameters, disk and memory.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for measurements and report.html; with --family runs/families unless given."),
    ] = None,
    formats: Annotated[
        list[TableFormat] | None,
        typer.Option("--format", help="Also write the tables of one MODEL to --out; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the attention sinks of a causal language model: where, how strong, and what goes with them.

    With --by-domain, --by-checkpoint, several --revision or --family there are many measurements, each kept in a
    directory of its own below --out: the same call continues after an interruption.
    """
    from sinklab.commands.measurements import (
        Invocation,
        checkpoints_command,
        domains_command,
        families_command,
        model_command,
        one_model,
        sizes_command,
    )
    from sinklab.measuring.frames import check_formats
    from sinklab.measuring.options import Options
    from sinklab.measuring.surgery.study import Study
    from sinklab.models.huggingface.subfolder import in_subfolder
    from sinklab.survey.request import Request

    tables = [kind.value for kind in formats or ()]
    revisions = revision or []
    over_steps = by_checkpoint or len(revisions) > 1
    check_formats(tables, out, one=not (by_domain or family or over_steps))
    request = Request(
        Options(
            eps=parse_eps(eps or ["0.3"]),
            lengths=tuple(lengths or ()),
            batch_size=batch_size,
            loss=not no_loss,
            details=details,
            maps=parse_maps(maps or ()),
            inputs=inputs,
        ),
        sequences,
        length,
        no_bos,
        seed,
        study=Study(ablate or (), swap_position, replace_position, perturb),
    )
    console = stderr()
    one_revision = None if over_steps else next(iter(revisions), None)
    loading = _loading(dtype, device, trust_remote_code, one_revision, console, subfolder)
    given = Invocation(text, request, loading, out, as_json, console)
    name = one_model(model, family, by_domain, models_dir, dry_run, next(iter(revisions), None), over_steps)
    if name is None and subfolder is not None:
        raise InputError(f"--subfolder {subfolder} is of one MODEL: leave it out, or give the MODEL without --family")
    name = name and in_subfolder(name, subfolder)
    goes_on = (name is None and not dry_run) or ((by_domain or over_steps) and out is not None)
    with keeping_what_is_finished() if goes_on else nullcontext():
        if name is None and dry_run:
            sizes_command(family or [], models_dir, given)
        elif name is None:
            families_command(family or [], models_dir, given)
        elif by_domain:
            domains_command(name, given)
        elif over_steps:
            checkpoints_command(name, revisions, given)
        else:
            model_command(name, given, tables)


def compare(
    models: Annotated[
        list[str], typer.Argument(metavar="A B...", help="Hugging Face ids, directories or .gguf files.")
    ],
    text: Text = None,
    inputs: InputKind = "natural",
    sequences: Sequences = 100,
    length: Length = 64,
    eps: Eps = None,
    no_bos: NoBos = False,
    batch_size: BatchSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    revision: Revision = None,
    subfolder: Subfolder = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for a measurement per model, comparison.json and report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure models on the same text, side by side: base against chat, small against large.

    Each reads the text through its own tokenizer, and conversations (messages) through its own chat template.
    Differences are from the first model.
    """
    from sinklab.commands.measurements import Invocation, compare_command
    from sinklab.measuring.options import Options
    from sinklab.models.huggingface.subfolder import in_subfolder
    from sinklab.survey.request import Request

    options = Options(eps=parse_eps(eps or ["0.3"]), batch_size=batch_size, inputs=inputs)
    request = Request(options, sequences, length, no_bos, seed)
    console = stderr()
    loading = _loading(dtype, device, trust_remote_code, revision, console, subfolder)
    given = Invocation(text, request, loading, out, as_json, console)
    with keeping_what_is_finished() if out is not None else nullcontext():
        compare_command([in_subfolder(model, subfolder) for model in models], given)


def parity(
    model: Annotated[str, typer.Argument(help="Hugging Face id, model directory or .gguf file.")],
    text: Text = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="eager, sdpa, flex_attention or flash_attention_2 to _4; may be repeated, all unless given."),
    ] = None,
    sequences: Sequences = 4,
    length: Length = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Whether the attention backends of transformers compute the same for a model, its learned sinks included.

    Reads --text, or random tokens. Status 1 where one differs from eager attention, or drops the sink logits.
    """
    from sinklab.commands.measurements import Invocation, parity_command
    from sinklab.measuring.options import Options
    from sinklab.survey.request import Request

    request = Request(Options(inputs="random" if text is None else "natural"), sequences, length, seed=seed)
    console = stderr()
    loading = _loading(dtype, device, trust_remote_code, revision, console)
    parity_command(model, backend or [], Invocation(text, request, loading, None, as_json, console))


def _loading(
    dtype: str,
    device: str,
    trust_remote_code: bool,
    revision: str | None,
    console: "Console",
    subfolder: str | None = None,
) -> "Loading":
    """How models are loaded; what takes a while is said on the console."""
    from sinklab.commands.terminal.tables import printable
    from sinklab.models.huggingface.loading import Loading

    def say(message: str) -> None:
        console.print(printable(message), markup=False, highlight=False, soft_wrap=True)

    return Loading(dtype, device, trust_remote_code, revision, subfolder, say)
