"""Commands on models: `sinklab measure` and `compare`, and the resumable jobs `assess`, `eval` and `sft`.

The commands import slow modules when called.
"""

import os
import shlex
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sinklab.assessing.settings import FEWEST_SCORED, TOLERANCE, AssessOptions
from sinklab.commands.options import (
    Json,
    LoadingOptions,
    ModelName,
    Only,
    option,
    print_result,
    run_job,
    save_report,
    with_options,
)
from sinklab.commands.terminal import JobProgress, print_text, stderr
from sinklab.errors import InputError, SinklabError
from sinklab.evaluating.evaluation import TaskRequest
from sinklab.measuring.options import Request
from sinklab.settings import INPUT, OUTPUT
from sinklab.signals import keeping_what_is_finished
from sinklab.tuning.settings import TuneOptions

if TYPE_CHECKING:
    from sinklab.assessing.assess_model import Assessment
    from sinklab.evaluating.evaluation import DownstreamScores


EXPLORED_HEADS = 400
"""Number of heads up to which `measure --out` saves attention maps for the page without --explore."""


class TableFormat(StrEnum):  # typer does not support lists of literals
    """File formats in which the tables of a measurement can be saved."""

    csv = "csv"
    parquet = "parquet"


Tolerance = Annotated[
    float,
    option(
        INPUT,
        "Loss in nats per token that a setting may add; 0.01 nats multiply the perplexity by 1.01.",
        metavar="NATS",
        min=0.0,
    ),
]
Text = Annotated[
    Path | None,
    option(INPUT, "Text: .txt, .jsonl, .csv, .parquet, .. or a folder; default: short texts in 11 languages and code."),
]


@with_options
def measure(
    *,
    model: Annotated[
        str,
        typer.Argument(help="Hugging Face id, model or run directory, .gguf file."),
    ],
    text: Text = None,
    request: Request,
    revision: Annotated[
        list[str] | None,
        option(INPUT, "Branch, tag or commit on the hub; repeatable, for a curve over training.", metavar="NAME"),
    ] = None,
    loading: Annotated[
        LoadingOptions, Only("dtype", "device", "subfolder", "adapters", "load_in", "trust_remote_code", "tokenizer")
    ],
    by_domain: Annotated[bool, option(INPUT, "Measure each file of the folder --text separately.")] = False,
    by_checkpoint: Annotated[bool, option(INPUT, "Measure each checkpoint in the folder or run MODEL.")] = False,
    out: Annotated[Path | None, option(OUTPUT, "Directory for measurements and report.html.")] = None,
    formats: Annotated[
        list[TableFormat] | None,
        option(
            OUTPUT,
            "Also write the tables of one MODEL to --out: csv or parquet; repeatable.",
            "--format",
            metavar="TYPE",
        ),
    ] = None,
    full: Annotated[bool, option(OUTPUT, "Also print the numbers of every layer and position.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the attention sinks of a causal language model: positions, rates, norms and loss.

    Example: sinklab measure MODEL --text stories.txt --out measured

    Example: sinklab measure runs/k --inputs random --eps 0.3,0.2 --details

    --by-domain, --by-checkpoint and several --revision run several measurements, each saved in its own folder in --out.
    The same command resumes after an interruption. Several models: sinklab compare.
    """
    request.check_options()
    from sinklab.survey.measure import check_formats

    revisions = revision or []
    by_step = by_checkpoint or len(revisions) > 1
    check_formats(formats or (), out, one=not (by_domain or by_step))
    if request.options.explore and (out is None or by_domain or by_step):
        raise InputError(
            "--explore requires a single measurement, saved in --out: pass MODEL and --out, and remove --by-domain, "
            "--by-checkpoint and any second --revision"
        )
    if by_domain and by_step:
        raise InputError(
            "--by-domain and several checkpoints (--by-checkpoint, --revision) are mutually exclusive: pass one of them"
        )
    if revisions and not by_step:
        loading = loading.model_copy(update={"revision": revisions[0]})
    model, how = loading.within(model), loading.on(stderr())
    if by_domain:
        from sinklab.survey.suites import domain_files, measure_domains

        total = len(domain_files(text)) if text is not None and text.is_dir() else 0
        _run_survey("domains", total, partial(measure_domains, model, text, request, loading=how), out, as_json)
    elif by_step:
        from sinklab.survey.suites import folders_without_step, measure_checkpoints, saved_models

        total = len(saved_models(model, revisions))
        if not revisions and (skipped := folders_without_step(Path(model))):
            print_text(f"not measured, because the name has no step or token count: {', '.join(skipped)}", stderr())
        measuring = partial(measure_checkpoints, model, revisions, text, request, loading=how)
        _run_survey("checkpoints", total, measuring, out, as_json)
    else:
        from sinklab.commands.results import print_measurement
        from sinklab.jobs import StepProgress, unsaved
        from sinklab.measuring.measurement import write_tables
        from sinklab.survey.measure import measure_model

        shown = {"explore_at_most": EXPLORED_HEADS if out is not None else 0}
        asked = request.model_copy(update={"options": request.options.model_copy(update=shown)})

        def work(progress: JobProgress) -> Any:
            step = StepProgress("measuring", progress)
            found = measure_model(model, text, asked, loading=how, out=out, progress=step.reach)
            if out is not None:
                with unsaved(lambda: found):
                    write_tables(found.columns, out, formats or ())
            return found

        run_job(work, f"reading {model} and the text", as_json, partial(print_measurement, full=full))
        if out is not None:
            save_report(out)
        elif not full:
            print_text("every layer: --full; pictures: --out DIR", stderr())
        print_text(f"the cost of a small KV cache or fewer bits: sinklab assess {shlex.quote(model)} --quick", stderr())


@with_options
def compare(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Run directories, Hugging Face ids, model directories or .gguf files, each also as NAME=MODEL.",
        ),
    ],
    text: Text = None,
    request: Annotated[
        Request, Only("inputs", "sequences", "length", "eps", "no_bos", "bos", "column", "batch_size", "seed")
    ],
    loading: LoadingOptions,
    out: Annotated[
        Path | None, option(OUTPUT, "Directory for a measurement per model, comparison.json and report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare measurements of several models, such as base and chat, on the same text or kind of tokens.

    Example: sinklab compare base=BASE chat=CHAT --text chats.jsonl --out compared

    The text is tokenized with each model's own tokenizer, and conversations (messages) are rendered with its own chat
    template. Differences are relative to the first model.
    """
    from sinklab.commands.results import print_comparison
    from sinklab.survey.suites import compare_models

    pairs = [model.partition("=") if not Path(model).exists() else ("", "", model) for model in models]
    named = [
        f"{name}{sign}{loading.within(model)}" if sign else loading.within(name or model) for name, sign, model in pairs
    ]
    measuring = partial(compare_models, named, text, request, loading=loading.on(stderr()))
    _run_survey("models", len(named), measuring, out, as_json, print_comparison)


def _run_survey(
    what: str,
    total: int,
    measuring: Callable[..., Any],
    out: Path | None,
    as_json: bool,
    show: Callable[[Any, Console], None] | None = None,
) -> None:
    """Run several measurements with a progress bar, print their result and, with `out`, write report.html.

    Args:
        what: plural noun for the measurements, such as "domains"; `total` is their number.
        measuring: function (out, observe) that runs the measurements and returns the result.
        show: function that prints the result as tables; default: `print_survey`.

    Raises:
        UnsavedError: if the result could not be saved; it has been printed.
        SinklabError: if the result lists failed measurements; the others have been printed and, with `out`, saved.
    """
    from sinklab.commands.results import print_survey

    def work(progress: JobProgress) -> Any:
        return measuring(out=out, observe=progress)

    with keeping_what_is_finished(out is not None):
        found = run_job(work, f"reading the text and the {what}", as_json, show or print_survey, what=what, steps=total)
        outcome = found.outcome
        if outcome.measured and out is not None:
            save_report(out)
    if outcome.failed:
        lines = [f"  {name}: {failure}" for name, failure in outcome.failed.items()]
        count = f"{len(lines)} of {len(lines) + len(outcome.measured)} {what} could not be measured"
        raise SinklabError("\n".join([f"{count}; run the same command again to retry them:", *lines]))


@with_options
def assess(
    *,
    model: ModelName,
    text: Annotated[
        Path | None,
        option(
            INPUT,
            "Text (.txt, .jsonl, .. or a folder), read as one stream; default: validation text of a run, else ours.",
        ),
    ] = None,
    options: AssessOptions,
    tolerance: Tolerance = TOLERANCE,
    loading: LoadingOptions,
    out: Annotated[
        Path | None, option(OUTPUT, "Directory for assessment.json and report.html; the same command resumes.")
    ] = None,
    full: Annotated[bool, option(OUTPUT, "Also print every setting, every loss and the notes.")] = False,
    as_json: Json = False,
) -> None:
    """Assess how small a KV cache, and how few bits, a model can be served with, and what its sink has to do with it.

    The loss that a setting adds is compared with --tolerance: safe, not safe, or undecided. Slow parts, such as head
    pruning and per-head budgets, are run only if listed in --parts. The formulas are in docs/assess.md.

    Example: sinklab assess MODEL --text stories.txt --quick --tolerance 0.02 --out assessed
    """
    from sinklab.assessing.assess_model import assess as assess_model
    from sinklab.commands.results import print_assessment

    model = loading.within(model)

    def work(progress: JobProgress) -> "Assessment":
        how: Any = {"loading": loading.on(progress.console), "out": out, "observe": progress}
        return assess_model(model, text, options, tolerance=tolerance, **how)

    show = partial(print_assessment, full=full)
    run_job(work, f"reading {model} and the text", as_json, show, resumes=out is not None)
    if out is not None:
        save_report(out)
    if not full:
        print_text("every setting: --full" + ("; pictures: --out DIR" if out is None else ""), stderr())


@with_options
def advise(
    *,
    model: ModelName,
    text: Annotated[
        Path | None, option(INPUT, "Text as in `assess`; default: the text that comes with sinklab.")
    ] = None,
    tolerance: Tolerance = TOLERANCE,
    options: Annotated[
        AssessOptions, Only("quick", "sequences", "length", "stream_length", "column", "caches", "kept", "seed")
    ],
    loading: LoadingOptions,
    out: Annotated[
        Path | None, option(OUTPUT, "Directory for advice.txt and assessment.json; the same command resumes.")
    ] = None,
    full: Annotated[bool, option(OUTPUT, "Also print the numbers that each decision rests on.")] = False,
    as_json: Json = False,
) -> None:
    """Decide how to serve a model: first tokens to keep, BOS, formats of the KV cache, settings of servers.

    Runs the parts streaming, quantisation, kv_cache, kv_formats and bos of `assess`, and compares their losses with the
    tolerance. The rules are in docs/assess.md.

    Example: sinklab advise MODEL --text chats.jsonl --out advice
    """
    from sinklab.assessing.advice import Advice
    from sinklab.assessing.advice import advise as advise_model

    model = loading.within(model)

    def work(progress: JobProgress) -> Advice:
        how = loading.on(progress.console)
        return advise_model(model, text, options, tolerance, loading=how, out=out, observe=progress)

    def show(advice: Advice, console: Console) -> None:
        print_text(advice.text(full), console)

    run_job(work, f"reading {model} and the text", as_json, show, resumes=out is not None)


@with_options
def parity(
    *,
    url: Annotated[str, typer.Argument(help="Address of an OpenAI-compatible server: http://localhost:8000/v1.")],
    model: Annotated[
        str, option(INPUT, "The model that it should serve: Hugging Face id, directory, .gguf file or run.")
    ],
    text: Annotated[
        Path | None, option(INPUT, "Text as in `assess`; default: the text that comes with sinklab.")
    ] = None,
    length: Annotated[
        int | None,
        option(INPUT, "Tokens of the text; default: 512, or 1.5 sliding windows if that is more.", min=FEWEST_SCORED),
    ] = None,
    tolerance: Annotated[
        float | None,
        option(
            INPUT,
            "Mean |difference of log p| attributed to rounding; default: 3 x that of bfloat16.",
            metavar="NATS",
            min=0.0,
        ),
    ] = None,
    column: Annotated[str | None, option(INPUT, "Column of the text, as in `measure`.", metavar="NAME")] = None,
    served_name: Annotated[
        str | None, option(INPUT, "Name of the model at the server; default: the first that it lists.", metavar="NAME")
    ] = None,
    api_key_env: Annotated[
        str | None, option(INPUT, "Environment variable that contains the API key.", metavar="VARIABLE")
    ] = None,
    loading: LoadingOptions,
    out: Annotated[Path | None, option(OUTPUT, "Directory for parity.json.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the prompt log-probabilities of a server with the model here, as configured and altered.

    The alterations are those by which servers err: no sink logits, no sliding window, no softcap, no BOS or two. The
    verdict names the nearest. The model is loaded in float32 unless --dtype is passed. The exit status is 1 if the
    server does not serve the model as configured.

    Example: sinklab parity http://localhost:8000/v1 --model openai/gpt-oss-20b --dtype bfloat16
    """
    from sinklab.assessing.parity import Parity, compare_server
    from sinklab.commands.results import print_parity

    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise InputError(f"--api-key-env {api_key_env}: this environment variable is not set")
    model = loading.within(model)
    if loading.dtype == "auto":
        loading = loading.model_copy(update={"dtype": "float32"})

    def work(progress: JobProgress) -> Parity:
        return compare_server(
            url,
            model,
            text,
            length=length,
            column=column,
            tolerance=tolerance,
            served=served_name,
            key=key,
            loading=loading.on(progress.console),
            out=out,
            step=progress.begin,
        )

    if not run_job(work, f"asking {url}", as_json, print_parity).as_configured:
        raise typer.Exit(1)


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
