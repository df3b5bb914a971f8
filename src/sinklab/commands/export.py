"""`sinklab export`: a run as a Hugging Face directory."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sinklab.commands.options import Json


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory with a checkpoint.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    as_json: Json = False,
) -> None:
    """Write a run as a Hugging Face directory: safetensors, config, tokenizer, model card.

    The default variant is a plain Llama, one with a sink logit a Granite; both load with transformers alone. Others
    load after `sinklab.register()`, or with trust_remote_code=True from the file of code beside them.

    Example: sinklab export runs/k my-model
    """
    from sinklab.export.directory import export_run

    done = export_run(run, directory)
    if as_json:
        print(json.dumps(done.document(), indent=2))
        return
    console = Console()
    alone = done.code is None
    how = "loads with transformers alone" if alone else f"loads after `sinklab.register()`, or with {done.code}"
    line = f"{done.directory}: {done.architecture}, {done.parameters:,} parameters, step {done.step:,}; {how}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
