"""`sinklab measure`: a run directory or a Hugging Face model, text or generated tokens, one measurement."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.measuring.hooks import Progress
from sinklab.measuring.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.measuring.measurement import Measurement
from sinklab.outputs import MEASUREMENT, REPORT, check_results
from sinklab.survey.loaded import Request, load_subject


def measure_command(
    model: str,
    text: Path | None,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    progress: Progress | None = None,
    **asked: Any,
) -> Measurement:
    """Measure `model` and, with `out`, save the result there.

    Args:
        model: a run directory (it has a recipe.yaml), a model directory, or a name on the Hugging Face hub.
        text: a .txt or .jsonl file or a folder of them; needed for natural inputs only.
        loading: how the model is loaded.
        progress: called with (sequences done, sequences in all).
        asked: the fields of `Request`.

    Raises:
        InputError: a model, text or option that cannot be used, or an `out` that cannot hold the result.
        UnsavedError: the result could not be saved; it holds it.
        SinklabError: the model cannot be measured.
    """
    request = Request(**asked)
    check_name(model)
    request.check(text)
    if out is not None:
        check_results(out, (*MEASUREMENT, REPORT))
    subject = load_subject(model, loading)
    measurement = subject.measure(text, request, progress)
    if out is not None:
        try:
            measurement.save(out)
        except SinklabError as error:
            raise UnsavedError(str(error), measurement) from error
    return measurement


def parse_eps(given: Sequence[str]) -> list[float]:
    """The thresholds of --eps, which may be repeated and hold lists: ["0.3", "0.2,0.4"] is 0.3, 0.2, 0.4.

    Raises:
        InputError: not a number.
    """
    thresholds: dict[float, None] = {}
    for part in ",".join(given).split(","):
        try:
            thresholds[float(part)] = None
        except ValueError:
            raise InputError(
                f"--eps {part}: expected a share of attention such as 0.3, or a list such as 0.2,0.3"
            ) from None
    return list(thresholds)


def parse_maps(given: Sequence[str]) -> list[tuple[int, int]]:
    """The (layer, head) of --map, which may be repeated: ["3.1"] is layer 3, head 1.

    Raises:
        InputError: not two numbers from 1 on.
    """
    wanted = []
    for one in given:
        found = re.fullmatch(r"([1-9]\d*)\.([1-9]\d*)", one)
        if not found:
            raise InputError(f"--map {one}: expected LAYER.HEAD, both counted from 1, such as 3.1")
        wanted.append((int(found[1]), int(found[2])))
    return wanted
