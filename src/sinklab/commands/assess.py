"""`sinklab assess`: the cost and benefit of a sink."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sinklab.assessing.plan import AssessOptions
from sinklab.commands.ending import stderr
from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, LoadingOptions, ModelName
from sinklab.commands.terminal.progress import JobProgress
from sinklab.errors import UnsavedError
from sinklab.settings import INPUT, OUTPUT
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.assessing.assessment import Assessment


@with_options
def assess(
    *,
    model: ModelName,
    text: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=INPUT, help="Text (.txt or .jsonl), read as one stream; default: the run's validation text."
        ),
    ] = None,
    options: AssessOptions,
    loading: LoadingOptions,
    out: Annotated[
        Path | None,
        typer.Option(rich_help_panel=OUTPUT, help="Directory for assessment.json; the same call resumes."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", rich_help_panel=OUTPUT, help="Also print loss and divergence for every change.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Assess the cost and benefit of a sink: streaming, quantisation, eviction, length, key ablations, heads, writer.

    On request (--parts): KV cache quantisation, head pruning and per-head budgets. Each loss is reported with
    the divergence from the unchanged model; docs/assess.md has the formulas.

    Example: sinklab assess runs/tiny-0 --text stories.txt --parts streaming,quantisation --out runs/tiny-0/assess
    """
    from sinklab.assessing.assess_model import assess as assess_model
    from sinklab.commands.terminal.results import print_assessment

    console = stderr()

    def show(assessment: "Assessment") -> None:
        if as_json:
            print(json.dumps(assessment.document(), indent=2))
        else:
            print_assessment(assessment, Console(), full)

    with (
        keeping_what_is_finished() if out is not None else nullcontext(),
        JobProgress(console, phase=f"reading {model} and the text") as observe,
    ):
        try:
            found = assess_model(model, text, options, loading=loading.on(console), out=out, observe=observe)
        except UnsavedError as error:
            show(error.result)
            raise
    show(found)
