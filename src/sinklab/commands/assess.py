"""`sinklab assess`: the cost and benefit of a sink."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sinklab.assessing.settings import AssessOptions
from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, LoadingOptions, ModelName, option, run_job
from sinklab.commands.terminal.progress import JobProgress
from sinklab.settings import INPUT, OUTPUT

if TYPE_CHECKING:
    from sinklab.assessing.assess_model import Assessment


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
    from sinklab.commands.terminal.results import print_assessment

    model = loading.within(model)

    def work(progress: JobProgress) -> "Assessment":
        return assess_model(model, text, options, loading=loading.on(progress.console), out=out, observe=progress)

    show = partial(print_assessment, full=full)
    run_job(work, f"reading {model} and the text", as_json, show, resumes=out is not None)
