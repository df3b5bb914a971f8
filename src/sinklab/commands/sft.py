"""`sinklab sft`: instruction tuning with measurements of the sink."""

from pathlib import Path
from typing import Annotated

import typer

from sinklab.commands.from_model import Only, with_options
from sinklab.commands.options import Json, LoadingOptions, ModelName, option, print_result
from sinklab.commands.terminal.progress import JobProgress
from sinklab.commands.terminal.tables import print_text, stderr
from sinklab.settings import INPUT, OUTPUT
from sinklab.signals import keeping_what_is_finished
from sinklab.tuning.settings import TuneOptions


@with_options
def sft(
    *,
    model: ModelName,
    data: Annotated[Path, option(INPUT, "Conversations: .jsonl, .json or .parquet file with messages.")],
    out: Annotated[
        Path, option(OUTPUT, "Directory for sft.json, metrics and the tuned model/; the same command resumes.")
    ],
    text: Annotated[
        Path | None,
        option(
            INPUT,
            "Text for the sink metric (.txt, .jsonl, .parquet, .. or a folder); default: the held-out conversations.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, option(INPUT, "Jinja chat template, preferably with {% generation %} tags; default: the model's.")
    ] = None,
    options: TuneOptions,
    loading: Annotated[LoadingOptions, Only("device", "revision", "subfolder", "trust_remote_code")],
    as_json: Json = False,
) -> None:
    """Fine-tune a model on the assistant tokens of conversations, measuring the sink at every evaluation.

    The defaults are the paper's: learning rate 2e-5 with cosine schedule, 64 conversations of at most 2,048 tokens per
    update, one epoch. The same command resumes interrupted training. The tuned model is saved in Hugging Face format in
    OUT/model.

    Example: sinklab sft runs/k --data chats.jsonl --out runs/k-chat
    """
    from sinklab.commands.terminal.results import print_tuning
    from sinklab.tuning.sft_dataset import TuneSources
    from sinklab.tuning.tune import tune

    console, sources, model = stderr(), TuneSources(data, text, chat_template), loading.within(model)
    with keeping_what_is_finished(), JobProgress(console, phase=f"reading {model} and the conversations") as observe:
        ended = tune(model, sources, options, out, loading=loading.on(console), observe=observe)
        if ended.exit_status:
            print_text(f"stopped; progress is saved in {out}", console)
            raise typer.Exit(ended.exit_status)
    print_result(as_json, ended.tuning.document, lambda out: print_tuning(ended.tuning, out))
    if not as_json:
        print_text(f"model: {out / 'model'}", console)
