"""`sinklab assess`, `eval` and `sft`: resumable jobs on one model, with its sink."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinklab.assessing.settings import AssessOptions
from sinklab.commands.options import Json, LoadingOptions, ModelName, Only, option, print_result, run_job, with_options
from sinklab.commands.terminal import JobProgress, print_text, stderr
from sinklab.evaluating.evaluation import TaskRequest
from sinklab.settings import INPUT, OUTPUT
from sinklab.signals import keeping_what_is_finished
from sinklab.tuning.settings import TuneOptions

if TYPE_CHECKING:
    from sinklab.assessing.assessment import Assessment
    from sinklab.evaluating.evaluation import DownstreamScores


@with_options
def assess(
    *,
    model: ModelName,
    text: Annotated[
        Path | None,
        option(
            INPUT,
            "Text (.txt, .jsonl, .csv, .. or a folder), read as one stream; default for a run: its validation text.",
        ),
    ] = None,
    options: AssessOptions,
    loading: LoadingOptions,
    out: Annotated[Path | None, option(OUTPUT, "Directory for assessment.json; the same command resumes.")] = None,
    full: Annotated[bool, option(OUTPUT, "Also print loss and KL divergence of every intervention.")] = False,
    as_json: Json = False,
) -> None:
    """Assess the cost and benefit of a sink, in parts such as streaming, quantisation and key ablations.

    Slow parts, such as KV cache quantisation, head pruning and per-head budgets, are run only if listed in --parts.
    Each loss is reported with the KL divergence from the unchanged model. The formulas are in docs/assess.md.

    Example: sinklab assess runs/tiny-0 --text stories.txt --parts streaming,quantisation --out runs/tiny-0/assess
    """
    from sinklab.assessing.assess_model import assess as assess_model
    from sinklab.commands.results import print_assessment

    model = loading.within(model)

    def work(progress: JobProgress) -> "Assessment":
        return assess_model(model, text, options, loading=loading.on(progress.console), out=out, observe=progress)

    show = partial(print_assessment, full=full)
    run_job(work, f"reading {model} and the text", as_json, show, resumes=out is not None)


@with_options
def evaluate(
    *,
    model: ModelName,
    request: TaskRequest,
    loading: LoadingOptions,
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Directory for evaluation.json and items; default for a run: the run directory. The same command resumes.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on downstream tasks with lm-eval (sinklab's extra `eval`), and measure its sink.

    HellaSwag items are read from --data, or from eval/hellaswag_val.jsonl or .jsonl.gz in the folder $SINKLAB_DATA.
    Without such a file, and for other tasks, items are downloaded from the Hugging Face hub. docs/eval.md defines the
    metrics.

    Example: sinklab eval runs/tiny-0 --tasks hellaswag --limit 200 --data hellaswag_val.jsonl.gz
    """
    from sinklab.commands.results import print_scores
    from sinklab.evaluating.evaluate_model import evaluate_model
    from sinklab.opening import is_run

    model = loading.within(model)
    place = Path(model) if out is None and is_run(model) else out

    def work(progress: JobProgress) -> "DownstreamScores":
        return evaluate_model(model, request, loading=loading.on(progress.console), out=place, observe=progress)

    run_job(work, f"reading {model} and the tasks", as_json, print_scores, resumes=place is not None)


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
    from sinklab.commands.results import print_tuning
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
