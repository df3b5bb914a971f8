"""One model on one text: one measurement."""

from pathlib import Path

from sinklab.errors import SinklabError, UnsavedError
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.outputs import MEASUREMENT, REPORT, check_results
from sinklab.survey.loaded import load_model
from sinklab.survey.request import Request


def measure_model(
    model: str,
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure `model` and, with `out`, save the result there.

    Args:
        model: a run directory (it has a recipe.yaml), a model directory, or a name on the Hugging Face hub.
        text: a .txt or .jsonl file or a folder of them; needed for natural inputs only.
        loading: how the model is loaded.
        progress: called with (sequences done, sequences in all).

    Raises:
        InputError: a model, text or option that cannot be used, or an `out` that cannot hold the result.
        UnsavedError: the result could not be saved; it holds it.
        SinklabError: the model cannot be measured.
    """
    check_name(model)
    request.check(text)
    if out is not None:
        check_results(out, (*MEASUREMENT, REPORT))
    measurement = load_model(model, loading, request=request, text=text).measure(text, request, progress)
    if out is not None:
        try:
            measurement.save(out)
        except SinklabError as error:
            raise UnsavedError(str(error), measurement) from error
    return measurement
