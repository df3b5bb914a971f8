"""`sinklab measure`, `compare` and `parity`. The commands import slow modules when called."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sinklab.commands.from_model import Only, with_options
from sinklab.commands.options import Json, LoadingOptions, option, run_job
from sinklab.commands.terminal.progress import JobProgress
from sinklab.commands.terminal.tables import stderr
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.options import Options
from sinklab.settings import INPUT, MEASURED, OUTPUT
from sinklab.survey.request import Request


class TableFormat(StrEnum):  # typer does not support lists of literals
    """File formats in which the tables of a measurement can be saved."""

    csv = "csv"
    parquet = "parquet"


Text = Annotated[Path | None, option(INPUT, "Text for natural inputs: .txt, .jsonl, .csv, .parquet, .. or a folder.")]


@with_options
def measure(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face id, model directory, .gguf file or run directory; none with --family."),
    ] = None,
    text: Text = None,
    request: Request,
    revision: Annotated[
        list[str] | None,
        option(INPUT, "Branch, tag or commit on the hub; repeatable, for a curve over training.", metavar="NAME"),
    ] = None,
    loading: Annotated[
        LoadingOptions, Only("dtype", "device", "subfolder", "adapters", "trust_remote_code", "tokenizer")
    ],
    by_domain: Annotated[bool, option(INPUT, "Measure each file of the folder --text separately.")] = False,
    by_checkpoint: Annotated[bool, option(INPUT, "Measure each checkpoint in the folder or run MODEL.")] = False,
    family: Annotated[
        list[str] | None,
        option(
            INPUT,
            "Model families of the paper: gpt2, llama2, llama3, mistral, pythia, opt, jamba or all; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    models_dir: Annotated[
        Path | None, option(INPUT, "With --family: folder of the models, each named as on the hub.")
    ] = None,
    dry_run: Annotated[bool, option(OUTPUT, "With --family: only print parameters, disk and memory.")] = False,
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

    --by-domain, --by-checkpoint, several --revision and --family run several measurements, each saved in its own folder
    in --out. The same command resumes after an interruption.
    """
    request.check_options()
    from sinklab.commands.measurements import FAMILIES_OUT, Invocation
    from sinklab.measuring.frames import check_formats

    revisions = revision or []
    by_step = by_checkpoint or len(revisions) > 1
    many = bool(family or by_domain or by_step)
    check_formats(formats or (), out, one=not many)
    if request.options.explore and (out is None or many):
        raise InputError(
            "--explore requires a single measurement, saved in --out: pass MODEL and --out, and remove --family, "
            "--by-domain, --by-checkpoint and any second --revision"
        )
    if by_domain and by_step:
        raise InputError(
            "--by-domain and several checkpoints (--by-checkpoint, --revision) are mutually exclusive: pass one of them"
        )
    if revisions and not by_step:
        loading = loading.model_copy(update={"revision": revisions[0]})
    place = out or (FAMILIES_OUT if family else None)
    given = Invocation(text, request, loading.on(stderr()), place, as_json)
    if family:
        if model is not None:
            raise InputError(f"pass a MODEL or --family, not both: got {model} and --family {family[0]}")
        one_only = {"--by-domain": by_domain, "--by-checkpoint": by_checkpoint, "--revision": revisions}
        if wrong := [name for name, value in {**one_only, "--subfolder": loading.subfolder}.items() if value]:
            raise InputError(f"{wrong[0]} applies to a single MODEL: remove it, or pass a MODEL instead of --family")
        if dry_run:
            given.sizes(family, models_dir)
        else:
            given.families(family, models_dir)
        return
    if model is None:
        raise InputError("pass a MODEL, or families of models: --family gpt2 (see --help)")
    if models_dir is not None or dry_run:
        raise InputError(
            f"{'--dry-run' if dry_run else '--models-dir'} requires --family: pass --family instead of MODEL, or leave "
            "the option out"
        )
    model = loading.within(model)
    if by_domain:
        given.domains(model)
    elif by_step:
        given.checkpoints(model, revisions)
    else:
        given.one_model(model, formats or ())


@with_options
def compare(
    *,
    models: Annotated[
        list[str],
        typer.Argument(metavar="A B...", help="Run directories, Hugging Face ids, model directories or .gguf files."),
    ],
    text: Text = None,
    request: Annotated[Request, Only("inputs", "sequences", "length", "eps", "no_bos", "bos", "batch_size", "seed")],
    loading: LoadingOptions,
    out: Annotated[
        Path | None, option(OUTPUT, "Directory for a measurement per model, comparison.json and report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare measurements of several models, such as base and chat, on the same text or kind of tokens.

    Example: sinklab compare BASE CHAT --text chats.jsonl --out compared

    The text is tokenized with each model's own tokenizer, and conversations (messages) are rendered with its own chat
    template. Differences are relative to the first model.
    """
    from sinklab.commands.measurements import Invocation

    given = Invocation(text, request, loading.on(stderr()), out, as_json)
    given.compare([loading.within(model) for model in models])


@with_options
def parity(
    *,
    model: Annotated[str, typer.Argument(help="Hugging Face id, model directory or .gguf file.")],
    text: Annotated[
        Path | None, option(INPUT, "Text file (.txt, .jsonl, .csv, .parquet, ..) or a folder; default: random tokens.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        option(
            MEASURED,
            "eager, sdpa, flex_attention, flash_attention_2, _3 or _4; repeatable; default: all.",
            metavar="NAME",
        ),
    ] = None,
    request: Annotated[Request, Only("sequences", "length", "seed")] = Request(sequences=4),
    loading: LoadingOptions,
    as_json: Json = False,
) -> None:
    """Check that transformers' attention backends give the same logits and apply the model's sink logits, if any.

    Example: sinklab parity MODEL --backend sdpa --backend eager

    sinklab's own attention backend is always included. The exit status is 1 if a backend differs from eager attention
    or drops the sink logits; an unavailable backend is not an error.
    """
    from sinklab.commands.terminal.results import print_parity
    from sinklab.survey.backends import Parity, compare_backends

    model = loading.within(model)
    if text is None:
        request = request.model_copy(update={"options": Options(inputs="random")})

    def work(progress: JobProgress) -> Parity:
        loader, backends = loading.on(progress.console), backend or None
        return compare_backends(model, text, request, loading=loader, backends=backends, observe=progress)

    found = run_job(work, f"reading {model} and the text", as_json, print_parity)
    if wrong := found.wrong():
        raise SinklabError(wrong)
