"""What measuring a list of models will take, without loading any: `--dry-run`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sinklab.device import float32_if_emulated, pick_device
from sinklab.models.huggingface.loading import DEVICE_MAP
from sinklab.models.memory_budget import LARGEST, LOGITS_AT_ONCE, Sizes
from sinklab.survey.families import check_models_dir, directory_of, published
from sinklab.survey.open_models import OpenModel, models_of
from sinklab.survey.request import Request

GB = 10**9
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
PROCESS = 0.5 * GB  # Python, PyTorch and transformers, as measured
PER_LOGIT = 12  # bytes: the logits, their float32 copy and their softmax


@dataclass(frozen=True)
class Size:
    """What one model takes. GB are 10^9 bytes.

    Attributes:
        model: its name on the hub.
        family: the name it is asked for by.
        parameters: tied embeddings counted once.
        counted: "config" where they were counted from a configuration that lies here, else "list".
        disk_gb: of the weights: of the files that lie here, else parameters in the checkpoint's dtype.
        float32_gb, bfloat16_gb: the weights in memory, by dtype (float16 is as bfloat16).
        peak_gb: an estimate for what was asked: weights in the dtype asked for, the process itself, and either one
            batch or, where the dtype is not the checkpoint's, the checkpoint while it is read; whichever is more.
        published: the printed Sink_1 in percent for what was asked; None where there is none.
    """

    model: str
    family: str
    parameters: int
    counted: str
    disk_gb: float
    float32_gb: float
    bfloat16_gb: float
    peak_gb: float
    published: float | None


def sizes(
    names: Sequence[str],
    request: Request,
    *,
    models_dir: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> list[Size]:
    """The size of every model of the families; nothing is downloaded and no weights are read.

    Raises:
        InputError: no such family or directory.
    """
    check_models_dir(models_dir)
    where = pick_device("auto" if device == DEVICE_MAP else device)
    return [_size(model, directory_of(model, models_dir), request, dtype, where) for model in models_of(names)]


def document(found: Sequence[Size]) -> dict[str, Any]:
    """What `--dry-run --json` prints."""
    return {"schema": 1, "models": [asdict(size) for size in found]}


def working_bytes(width: int, vocabulary: int, request: Request) -> float:
    """An estimate of what one batch takes beside the weights: a block's activations, and logits for the loss."""
    batch = min(request.options.batch_size or LARGEST, request.sequences)
    activations = Sizes(width, ffn_width=4 * width, layers=0, heads=0).bytes_per_sequence(request.length)
    return batch * activations + min(batch * request.length * vocabulary, LOGITS_AT_ONCE) * PER_LOGIT


def _size(model: OpenModel, directory: Path | None, request: Request, dtype: str, device: torch.device) -> Size:
    counted = parameters_of_config(str(directory or model.id))
    parameters = counted or model.parameters
    in_memory = dtype
    if dtype == "auto":
        in_memory = str(float32_if_emulated(getattr(torch, model.dtype), device)).removeprefix("torch.")
    disk_gb = _on_disk(directory) or parameters * BYTES[model.dtype] / GB
    beside = working_bytes(model.width, model.vocabulary, request)
    if in_memory != model.dtype:
        beside = max(beside, disk_gb * GB)
    return Size(
        model=model.id,
        family=model.family,
        parameters=parameters,
        counted="config" if counted else "list",
        disk_gb=disk_gb,
        float32_gb=parameters * BYTES["float32"] / GB,
        bfloat16_gb=parameters * BYTES["bfloat16"] / GB,
        peak_gb=(parameters * BYTES[in_memory] + beside + PROCESS) / GB,
        published=published(model, request),
    )


def parameters_of_config(name: str) -> int | None:
    """Parameters of the model that a configuration on this machine describes, built without memory for its weights.

    Args:
        name: a directory, or a hub name whose configuration may have been fetched before.

    Returns:
        None where there is no configuration here, or none that transformers knows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError):
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def _on_disk(directory: Path | None) -> float | None:
    """GB of the weights in a directory; None where there are none."""
    files = [] if directory is None else list(directory.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / GB or None
