"""Measure the paper's (2410.10781) open models and compare their sink rates with the published ones.

The required disk space and memory can be estimated before a model is downloaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sinklab.device import float32_if_emulated, pick_device
from sinklab.errors import InputError
from sinklab.jobs import Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, DEVICE_MAP, Loading
from sinklab.models.memory_budget import LOGITS_AT_ONCE, MOST_SEQUENCES, Sizes
from sinklab.opening import open_model
from sinklab.survey.measure_many import Item, Survey, deciding_request, measure_all, text_hash
from sinklab.survey.measure_one import measure_loaded
from sinklab.survey.open_models import EVERY, OpenModel, models_of, setting
from sinklab.survey.request import Request
from sinklab.survey.suites import FamiliesDocument

GB = 10**9
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
PROCESS = 0.5 * GB  # bytes of memory of a process with PyTorch and transformers, as measured
PER_LOGIT = 12  # bytes: logits, their float32 copy and their softmax


def measure_families(
    names: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    models_dir: Path | None = None,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Survey:
    """Measure every model of the named families (`models_of`), and save families.json.

    The results list models that fail, with the reasons. Models that an earlier call has measured in `out` stay in them.

    Args:
        models_dir: directory of local models, in folders named by the Hugging Face id or its last part. With it, the
            hub is not used.

    Raises:
        InputError: see `models_of`, `check_models_dir`, `Request.check` and `measure_all`.
        HeldError, UnsavedError, SinklabError: see `measure_all`.
    """
    asked = models_of(names)
    models = {
        model.id: model
        for model in models_of([EVERY])
        if model in asked or (out and (out / model.id / "measurement.json").is_file())
    }
    check_models_dir(models_dir)
    request.check(text)
    source = text_hash(text)

    def measure(model: OpenModel, progress: Progress) -> Measurement:
        place = directory_of(model, models_dir)
        if place is None and models_dir is not None:
            last = model.id.rpartition("/")[2]
            raise InputError(
                f"{models_dir} does not contain the model: put it there as {last} or {model.id}, or remove --models-dir"
            )
        return measure_loaded(open_model(str(place or model.id), loading), text, request, progress)

    def row_of(name: str, measured: Measurement) -> dict[str, Any]:
        model, printed = models[name], published(models[name], request)
        rates = (measured.sink_rates or {}).get(f"{setting().eps:g}", measured.sink_rate)
        return {
            "family": model.family,
            "parameters": model.parameters,
            "sink_1": rates[0],
            "published": printed,
            "source": None if printed is None else model.source,
            "measurement": measured.document(),
        }

    items = []
    for name, model in models.items():
        decides = deciding_request(name, directory_of(model, models_dir), source, loading, request)
        items.append(Item(name, decides, partial(measure, model)))
    return measure_all(items, partial(Survey, FamiliesDocument, {}, row_of), out, FamiliesDocument.file, observe)


def published(model: OpenModel, request: Request) -> float | None:
    """Return the published Sink_1 of a model, percent; None if the paper has none for these settings."""
    same = setting().applies(request.sequences, request.length, request.options.eps)
    changed = request.no_bos or request.bos or request.study.swap_position or request.study.replace_position
    return model.published.get(request.options.inputs) if same and not changed else None


def check_models_dir(models_dir: Path | None) -> None:
    """Raise InputError if `models_dir` is set and is not a directory."""
    if models_dir is not None and not models_dir.is_dir():
        raise InputError(f"--models-dir {models_dir} is not a directory: pass the directory that contains the models")


def directory_of(model: OpenModel, models_dir: Path | None) -> Path | None:
    """Return the directory of a model in `models_dir`; None if there is none or `models_dir` is None."""
    if models_dir is None:
        return None
    candidates = (models_dir / model.id, models_dir / model.id.rpartition("/")[2])
    return next((path for path in candidates if path.is_dir()), None)


@dataclass(frozen=True)
class Size:
    """Disk and memory requirements of a model; 1 GB is 10^9 bytes.

    Attributes:
        model, family: Hugging Face id and family in open_models.yaml.
        parameters: number of parameters, with tied embeddings counted once.
        disk_gb: size of the .safetensors files in the model's directory. If there are none, size of the parameters in
            the dtype of the checkpoint on the hub.
        float32_gb, bfloat16_gb: size of the weights in memory, in float32 and in bfloat16 or float16.
        peak_gb: estimated peak memory: weights, process, and activations and logits of one batch. If the dtype is
            converted and the checkpoint is larger than the batch, the checkpoint is counted instead of the batch.
        published: published Sink_1 for these settings, percent; None if the paper has none.
    """

    model: str
    family: str
    parameters: int
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
    """Estimate disk and memory of the models of families, without downloads and without reading weights.

    Args:
        names, models_dir: as in `measure_families`.
        request: batch size, sequences and length determine the memory for one batch.
        dtype: data type of the weights in memory; auto is that of the checkpoint, but float32 on CPUs that emulate it.
        device: device on which the model would run; it determines the dtype if `dtype` is auto.

    Raises:
        InputError: if there is no such family, directory or device.
    """
    check_models_dir(models_dir)
    where = pick_device("auto" if device == DEVICE_MAP else device)
    batch = min(request.options.batch_size or MOST_SEQUENCES, request.sequences)
    found = []
    for model in models_of(names):
        directory = directory_of(model, models_dir)
        parameters, in_memory = model.parameters, dtype
        if dtype == "auto":
            in_memory = str(float32_if_emulated(getattr(torch, model.dtype), where)).removeprefix("torch.")
        files = [] if directory is None else list(directory.glob("*.safetensors"))
        disk = sum(file.stat().st_size for file in files) or parameters * BYTES[model.dtype]
        activations = Sizes(model.width, ffn_width=4 * model.width, layers=0, heads=0).bytes_per_sequence(
            request.length
        )
        logits = min(batch * request.length * model.vocabulary, LOGITS_AT_ONCE)
        beside = batch * activations + logits * PER_LOGIT  # one batch: activations of one block, and logits
        if in_memory != model.dtype:
            beside = max(beside, disk)
        size = Size(
            model=model.id,
            family=model.family,
            parameters=parameters,
            disk_gb=disk / GB,
            float32_gb=parameters * BYTES["float32"] / GB,
            bfloat16_gb=parameters * BYTES["bfloat16"] / GB,
            peak_gb=(parameters * BYTES[in_memory] + beside + PROCESS) / GB,
            published=published(model, request),
        )
        found.append(size)
    return found
