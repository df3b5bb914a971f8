"""Compare the attention backends of the installed transformers with eager attention on a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from sinklab.errors import InputError
from sinklab.jobs import Observer, StepProgress, ignore
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision
from sinklab.opening import is_run, open_model
from sinklab.survey.measure_one import read_tokens
from sinklab.survey.request import Request

if TYPE_CHECKING:
    from sinklab.measuring.huggingface.parity import BackendParity

HARMLESS = ("reference", "agrees", "unavailable")


@dataclass(frozen=True)
class Parity:
    """Agreement of a model's attention backends with eager attention.

    Attributes:
        default: backend that transformers selects for this model by default.
        transformers, torch: installed versions of the libraries.
        sequences, length: number of sequences, and tokens per sequence.
        tolerance: largest relative difference from the logits of eager attention that counts as agreement.
        backends: comparison of each backend; eager is first, sinklab's backend last.
    """

    model: str
    default: str
    transformers: str
    torch: str
    device: str
    dtype: str
    sequences: int
    length: int
    tolerance: float
    backends: "list[BackendParity]"

    @property
    def has_sinks(self) -> bool:
        """Whether any layer of the model has learned sink logits."""
        return self.backends[0].sink_share is not None

    def wrong(self) -> str | None:
        """Return a sentence that names the backends that disagree with eager attention; None if there are none."""
        found = [one for one in self.backends if one.verdict not in HARMLESS]
        if not found:
            return None
        said = [f"{one.backend} {one.verdict if one.verdict != 'differs' else 'differs from eager'}" for one in found]
        return f"the attention backends disagree for {self.model}: {', '.join(said)}"

    def document(self) -> dict[str, Any]:
        """Return the comparison as a JSON-serializable dict."""
        compared = {"has_sinks": self.has_sinks, "backends": [one.model_dump() for one in self.backends]}
        return {"schema": 1, **vars(self), **compared}


def compare_backends(
    model: str,
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    backends: Sequence[str] | None = None,
    observe: Observer = ignore,
) -> Parity:
    """Compare logits and sinks of a model's attention backends on the same tokens.

    Args:
        request: settings of the input sequences; its ablations and measured quantities are not computed.
        backends: names from `measuring.huggingface.parity.BACKENDS`; default: all. Eager attention and sinklab's are
            always included. Backends that do not run are reported as unavailable.
        observe: callback, called with a progress event before each backend runs.

    Raises:
        InputError: see `Request.check`, `open_model` and `read_tokens`; also if the model is a run directory or does
            not run with eager attention, or a backend is unknown.
        SinklabError: see `read_tokens`.
    """
    check_name(model)
    if is_run(model):
        raise InputError(
            f"{model} is a run directory, which has no transformers backends: export it first (sinklab export)"
        )
    check_revision(model, loading.revision)
    request.check(text)
    import transformers

    from sinklab.measuring.huggingface.parity import BACKENDS, backend_parity, tolerance

    if unknown := [name for name in backends or () if name not in BACKENDS]:
        raise InputError(f"--backend {unknown[0]} is unknown: choose from {', '.join(BACKENDS)}")
    opened = open_model(model, loading)
    tokens_NT, loaded = read_tokens(opened, text, request).tokens_NT, cast("Any", opened.module)

    def starts(backend: str) -> None:
        StepProgress(backend, observe).begin(1, "comparing")

    found = backend_parity(loaded, tokens_NT.to(loaded.device), backends or BACKENDS, starts)
    return Parity(
        model=model,
        default=str(loaded.config._attn_implementation),
        transformers=transformers.__version__,
        torch=torch.__version__,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        sequences=len(tokens_NT),
        length=tokens_NT.shape[1],
        tolerance=tolerance(loaded.dtype),
        backends=found,
    )
