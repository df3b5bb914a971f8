"""`sinklab eval`: scores on downstream tasks, and the sink metric."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, LoadingOptions, ModelName, option, run_job
from sinklab.commands.terminal.progress import JobProgress
from sinklab.evaluating.evaluation import TaskRequest
from sinklab.settings import OUTPUT

if TYPE_CHECKING:
    from sinklab.evaluating.evaluation import DownstreamScores


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
    from sinklab.commands.terminal.results import print_scores
    from sinklab.evaluating.evaluate_model import evaluate_model
    from sinklab.opening import is_run

    model = loading.within(model)
    place = Path(model) if out is None and is_run(model) else out

    def work(progress: JobProgress) -> "DownstreamScores":
        return evaluate_model(model, request, loading=loading.on(progress.console), out=place, observe=progress)

    run_job(work, f"reading {model} and the tasks", as_json, print_scores, resumes=place is not None)
