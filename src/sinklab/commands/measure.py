"""`sinklab measure`, `compare` and `parity` on the command line."""

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sinklab.commands.ending import stderr
from sinklab.commands.from_model import Only, with_options
from sinklab.commands.options import Json, LoadingOptions, SubfolderLoadingOptions, option
from sinklab.errors import InputError
from sinklab.measuring.options import Options
from sinklab.settings import INPUT, MEASURED, OUTPUT
from sinklab.signals import keeping_what_is_finished
from sinklab.survey.request import Request


class TableFormat(StrEnum):  # typer takes no lists of literals
    """File formats in which the tables of a measurement can be saved."""

    csv = "csv"
    parquet = "parquet"


Text = Annotated[Path | None, option(INPUT, ".txt or .jsonl file (text or messages), or a folder; for natural inputs.")]


@with_options
def measure(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face id, model directory, .gguf file or run directory; none with --family."),
    ] = None,
    text: Text = None,
    request: Annotated[
        Request,
        Only(
            *("inputs", "sequences", "length", "eps", "lengths", "details", "maps", "explore", "gradients", "no_bos"),
            *("loss", "ablate", "perturb", "swap_position", "replace_position", "batch_size", "seed"),
        ),
    ],
    revision: Annotated[
        list[str] | None,
        option(INPUT, "Branch, tag or commit on the hub; several give a curve over training.", metavar="NAME"),
    ] = None,
    loading: Annotated[SubfolderLoadingOptions, Only("dtype", "device", "subfolder", "trust_remote_code")],
    by_domain: Annotated[bool, option(INPUT, "Measure each file of the folder --text separately.")] = False,
    by_checkpoint: Annotated[bool, option(INPUT, "Measure each checkpoint in the folder or run MODEL.")] = False,
    family: Annotated[
        list[str] | None,
        option(
            INPUT,
            "Models of the paper: gpt2, llama2, llama3, mistral, pythia, opt, jamba or all; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    models_dir: Annotated[
        Path | None, option(INPUT, "With --family: folder of the models, named as on the hub.")
    ] = None,
    dry_run: Annotated[bool, option(OUTPUT, "With --family: only list parameters, disk and memory.")] = False,
    out: Annotated[
        Path | None, option(OUTPUT, "Directory for measurements and report.html; default with --family: runs/families.")
    ] = None,
    formats: Annotated[
        list[TableFormat] | None,
        option(
            OUTPUT,
            "Also write the tables of one MODEL to --out: csv or parquet; repeatable.",
            "--format",
            metavar="TYPE",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the attention sinks of a causal language model: positions, rates, norms and loss.

    Example: sinklab measure MODEL --text stories.txt --out measured

    Example: sinklab measure runs/k --inputs random --eps 0.3,0.2 --details

    --by-domain, --by-checkpoint, several --revision and --family make many measurements, each in a folder of --out. The
    same call resumes after an interruption.
    """
    from sinklab.commands import measurements
    from sinklab.measuring.frames import check_formats
    from sinklab.models.huggingface.loading import in_subfolder

    tables, revisions = [kind.value for kind in formats or ()], revision or []
    over_steps = by_checkpoint or len(revisions) > 1
    check_formats(tables, out, one=not (by_domain or family or over_steps))
    if request.options.explore and (out is None or by_domain or family or over_steps):
        raise InputError(
            "--explore draws one measurement of one MODEL into a report: pass MODEL and --out, and remove --family, "
            "--by-domain, --by-checkpoint and any second --revision"
        )
    if revisions and not over_steps:
        loading = loading.model_copy(update={"revision": revisions[0]})
    console = stderr()
    given = measurements.Invocation(text, request, loading.on(console), out, as_json, console)
    name = measurements.checked_model(
        model, family, by_domain, models_dir, dry_run, next(iter(revisions), None), over_steps
    )
    if name is None and loading.subfolder is not None:
        raise InputError(
            f"--subfolder {loading.subfolder} is for one MODEL: remove it, or pass the MODEL without --family"
        )
    name = name and in_subfolder(name, loading.subfolder)
    resumes = (name is None and not dry_run) or ((by_domain or over_steps) and out is not None)
    with keeping_what_is_finished() if resumes else nullcontext():
        if name is None and dry_run:
            measurements.sizes_command(family or [], models_dir, given)
        elif name is None or by_domain or over_steps:
            measurements.many_command(name, family or [], models_dir, by_domain, revisions, given)
        else:
            measurements.model_command(name, given, tables)


@with_options
def compare(
    *,
    models: Annotated[
        list[str],
        typer.Argument(metavar="A B...", help="Run directories, Hugging Face ids, model directories or .gguf files."),
    ],
    text: Text = None,
    request: Annotated[Request, Only("inputs", "sequences", "length", "eps", "no_bos", "batch_size", "seed")],
    loading: SubfolderLoadingOptions,
    out: Annotated[
        Path | None, option(OUTPUT, "Directory for a measurement per model, comparison.json and report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure models on the same text or kind of tokens, side by side: base and chat, small and large.

    Example: sinklab compare BASE CHAT --text chats.jsonl --out compared

    Each model reads the text with its own tokenizer, and conversations (messages) with its own chat template.
    Differences are relative to the first model.
    """
    from sinklab.commands.measurements import Invocation, compare_command
    from sinklab.models.huggingface.loading import in_subfolder

    console = stderr()
    given = Invocation(text, request, loading.on(console), out, as_json, console)
    with keeping_what_is_finished() if out is not None else nullcontext():
        compare_command([in_subfolder(model, loading.subfolder) for model in models], given)


@with_options
def parity(
    *,
    model: Annotated[str, typer.Argument(help="Hugging Face id, model directory or .gguf file.")],
    text: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=INPUT, help=".txt or .jsonl file (text or messages), or a folder; default: random tokens."
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        option(
            MEASURED,
            "eager, sdpa, flex_attention or flash_attention_2 to _4; repeatable; default: all.",
            metavar="NAME",
        ),
    ] = None,
    request: Annotated[Request, Only("sequences", "length", "seed")] = Request(sequences=4),
    loading: LoadingOptions,
    as_json: Json = False,
) -> None:
    """Check that transformers' attention backends give a model the same logits, with learned sinks if it has any.

    Example: sinklab parity MODEL --backend sdpa --backend eager

    sinklab's own attention is always compared, too. Exit status 1 if a backend differs from eager attention or drops
    the sink logits; a backend that is unavailable is not an error.
    """
    from sinklab.commands.measurements import Invocation, parity_command

    if text is None:
        request = request.model_copy(update={"options": Options(inputs="random")})
    console = stderr()
    parity_command(model, backend or [], Invocation(text, request, loading.on(console), None, as_json, console))
