"""One model through every attention backend of the installed transformers, held against eager attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinklab.errors import InputError
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision, load_pretrained
from sinklab.survey.loaded import LoadedPretrained, is_run
from sinklab.survey.request import Request

if TYPE_CHECKING:
    from sinklab.measuring.huggingface.parity import BackendParity

HARMLESS = ("reference", "agrees", "unavailable")


@dataclass(frozen=True)
class Parity:
    """The result.

    Attributes:
        default: what transformers takes for this model where nothing is said.
        transformers, torch: their versions.
        device, dtype: of the model.
        sequences, length: of the tokens that were read.
        tolerance: the relative difference of logits up to which backends agree.
        backends: eager first, sinklab's own last.
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
        """Whether some layer has learned sink logits."""
        return self.backends[0].sink_share is not None

    def wrong(self) -> str | None:
        """A sentence on the backends that compute something else; None where there are none."""
        found = [one for one in self.backends if one.verdict not in HARMLESS]
        if not found:
            return None
        said = [f"{one.backend} {one.verdict if one.verdict != 'differs' else 'differs from eager'}" for one in found]
        return f"not all attention backends compute the same for {self.model}: {', '.join(said)}"

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "schema": 1,
            "model": self.model,
            "default": self.default,
            "transformers": self.transformers,
            "torch": self.torch,
            "device": self.device,
            "dtype": self.dtype,
            "sequences": self.sequences,
            "length": self.length,
            "tolerance": self.tolerance,
            "has_sinks": self.has_sinks,
            "backends": [one.model_dump() for one in self.backends],
        }


def compare_backends(
    model: str,
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    backends: Sequence[str] | None = None,
    starts: Callable[[str], None] = lambda backend: None,
) -> Parity:
    """Read the same tokens through every backend.

    Args:
        model: a model directory, a .gguf file or a name on the hub.
        backends: of `measuring.huggingface.parity.BACKENDS`; all unless given.
        starts: is told which backend is read now.

    Raises:
        InputError: a run directory, a model or text that cannot be used, an unknown backend, or a model without eager
            attention.
    """
    check_name(model)
    if is_run(model):
        raise InputError(f"{model} is a run directory: backends are those of transformers; export it first")
    check_revision(model, loading.revision)
    request.check(text)
    import transformers

    from sinklab.measuring.huggingface.parity import BACKENDS, backend_parity, tolerance

    if unknown := [name for name in backends or () if name not in BACKENDS]:
        raise InputError(f"--backend {unknown[0]} is unknown: choose from {', '.join(BACKENDS)}")
    pretrained = load_pretrained(model, loading)
    tokens_NT = LoadedPretrained(model, loading.revision, pretrained).tokens(text, request).tokens_NT
    loaded = pretrained.model
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
