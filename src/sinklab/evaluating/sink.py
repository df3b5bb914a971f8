"""The sink of a loaded model, to stand beside its scores."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sinklab.errors import InputError
from sinklab.evaluating.documents import TextSink
from sinklab.evaluating.loading import Candidate
from sinklab.measuring.options import Options
from sinklab.survey.loaded import LoadedPretrained
from sinklab.survey.request import Request

EPS, SEQUENCES, LENGTH = 0.3, 100, 64
"""The paper's, of its tables of models."""


def sink_of_file(candidate: Candidate, context: int, text: Path) -> TextSink:
    """The sink on a text, as `sinklab measure` has it.

    Raises:
        InputError: the text cannot be read, or gives no sequence.
    """
    return _measured(candidate, context, text, str(text))


def sink_of_task(candidate: Candidate, context: int, texts: Sequence[str]) -> TextSink | None:
    """The sink on the items of a task; None where none is long enough."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "items.jsonl"
        file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
        try:
            return _measured(candidate, context, file, "task")
        except InputError:
            return None


def _measured(candidate: Candidate, context: int, text: Path, said: str) -> TextSink:
    loaded = LoadedPretrained(candidate.name, candidate.loading.revision, candidate.pretrained)
    request = Request(
        options=Options(eps=(EPS,), loss=False), sequences=SEQUENCES, length=min(LENGTH, context), fewer=True
    )
    found = loaded.measure(text, request)
    return TextSink(
        text=said,
        sequences=found.sequences,
        length=found.length,
        eps=found.eps,
        bos=found.bos,
        sink_1=found.sink_rate[0],
        bias=found.sink_rate_bias,
    )
