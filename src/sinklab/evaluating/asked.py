"""A loaded model that is measured, and asked a task as well: both in one measurement."""

from dataclasses import dataclass
from pathlib import Path

from sinklab.errors import InputError
from sinklab.evaluating.documents import TaskScores
from sinklab.evaluating.loading import Candidate, load_candidate
from sinklab.evaluating.request import TaskRequest
from sinklab.evaluating.running import TaskListener, evaluate_candidate
from sinklab.evaluating.tasks import ChosenTask, chosen_tasks
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import Loading
from sinklab.survey.loaded import LoadedPretrained
from sinklab.survey.request import Request

ACCURACIES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}


@dataclass(frozen=True)
class AskedTask:
    """A task, and how many of its items are drawn by the seed of the measurement; None for all."""

    chosen: ChosenTask
    items: int | None

    def document(self) -> dict[str, object]:
        """What decides the scores beside the model, as plain JSON."""
        return {"name": self.chosen.name, "items": self.items, "data": self.chosen.sha256 or self.chosen.data}


def chosen_task(name: str, data: Path | None) -> ChosenTask:
    """A task of lm-eval that stands by itself.

    Raises:
        InputError: as `chosen_tasks`, or it is a group of tasks.
    """
    found = chosen_tasks([name], data)
    if len(found) != 1:
        raise InputError(f"{name} is a group of {len(found)} tasks: name one of them")
    return found[0]


def load_askable(name: str, loading: Loading) -> "AskableModel":
    """Load a model that can be asked tasks.

    Raises:
        InputError: it cannot be loaded.
    """
    return AskableModel(load_candidate(name, loading))


class AskableModel(LoadedPretrained):
    """A model that is measured and asked. A run is what `sinklab export` makes of it."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate.name, candidate.loading.revision, candidate.pretrained)
        self._candidate = candidate

    def measure_and_ask(
        self, asked: AskedTask, text: Path | None, request: Request, out: Path, progress: Progress
    ) -> Measurement:
        """The measurement, with the accuracies of the task, in percent, as its scores.

        Args:
            out: keeps evaluation.json and the items; what is answered there is not asked for again.
            progress: is called with the requests answered, and how many there are.

        Raises:
            InputError: a text that cannot be used, a task without accuracies, or an evaluation with other settings in
                `out`.
            SinklabError: the model cannot be measured or asked.
        """
        measurement, name = self.measure(text, request), asked.chosen.name
        wanted = TaskRequest(tasks=(name,), limit=asked.items, seed=request.seed)
        listener = _Passing(progress)
        found = evaluate_candidate(self._candidate, [asked.chosen], wanted, out=out, listener=listener)
        return measurement.model_copy(update={"scores": _percent(name, found.tasks[name])})


def _percent(task: str, scores: TaskScores) -> dict[str, float]:
    found = {said: 100 * scores.metrics[name].value for name, said in ACCURACIES.items() if name in scores.metrics}
    if not found:
        raise InputError(f"{task} has none of {' and '.join(ACCURACIES)}, but {', '.join(scores.metrics)}")
    return found


class _Passing(TaskListener):
    """Tells a bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done, self._requests = progress, 0, 0

    def starts(self, task: str, requests: int) -> None:
        self._requests = requests

    def advances(self, requests: int) -> None:
        self._done += requests
        self._progress(self._done, self._requests)
