"""`sinklab eval` on the command line: downstream tasks, and the sink beside them."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from sinklab.commands.console import duration
from sinklab.commands.ending import stderr
from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, LoadingOptions, ModelName
from sinklab.commands.terminal.bars import StepProgress
from sinklab.errors import UnsavedError
from sinklab.evaluating.request import TaskRequest
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.evaluating.documents import DownstreamScores, TaskScores


@with_options
def evaluate(
    *,
    model: ModelName,
    request: TaskRequest,
    loading: LoadingOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for evaluation.json and the items; default for a run: its own. The same call resumes."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a model on downstream tasks with lm-eval (extra eval), and measure its sink.

    HellaSwag is read from a file (--data, or eval/hellaswag_val.jsonl.gz in SINKLAB_DATA) and needs no network; other
    tasks come from the Hugging Face hub. docs/eval.md defines each number.

    Example: sinklab eval runs/tiny-0 --tasks hellaswag --limit 200 --data hellaswag_val.jsonl.gz
    """
    from sinklab.commands.terminal.results import print_scores
    from sinklab.evaluating.running import evaluate_model
    from sinklab.opening import is_run

    console = stderr()

    def show(scores: "DownstreamScores") -> None:
        if as_json:
            print(json.dumps(scores.document(), indent=2))
        else:
            print_scores(scores, Console())

    place = Path(model) if out is None and is_run(model) else out
    with keeping_what_is_finished() if place is not None else nullcontext(), TaskProgress(console) as listener:
        try:
            found = evaluate_model(model, request, loading=loading.on(console), out=place, listener=cast(Any, listener))
        except UnsavedError as error:
            show(error.result)
            raise
    show(found)


class TaskProgress(StepProgress):
    """A `TaskListener`; steps are requests."""

    def starts(self, task: str, requests: int) -> None:
        """Show the bar of the task."""
        self.begin(task, requests)
        self.say_without_terminal(f"{task}: {requests:,} requests")

    def advances(self, requests: int) -> None:
        """Move the bar."""
        self.move(requests)

    def ends(self, task: str, scores: "TaskScores") -> None:
        """Print how long it took."""
        self.say(f"{task}: {scores.items:,} items in {duration(scores.seconds)}")

    def keeps(self, task: str, scores: "TaskScores") -> None:
        """Print that it is there already."""
        self.say(f"{task}: {scores.items:,} items (kept)")
