"""Measure the paper's open models and compare their sink rates with the published ones; estimate disk and memory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sinklab.data.sources.corpora import identity
from sinklab.device import float32_if_emulated, pick_device
from sinklab.errors import InputError
from sinklab.jobs.progress import Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, DEVICE_MAP, Loading
from sinklab.models.memory_budget import LARGEST, LOGITS_AT_ONCE, Sizes
from sinklab.survey.measure_many import Item, Outcome, deciding_request, measure_all
from sinklab.survey.measure_one import load_model, measure_loaded
from sinklab.survey.open_models import EVERY, OpenModel, models_of, setting
from sinklab.survey.request import Request

FAMILIES = "families.json"
GB = 10**9
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
PROCESS = 0.5 * GB  # bytes of memory of a process with PyTorch and transformers, as measured
PER_LOGIT = 12  # bytes: logits, their float32 copy and their softmax


@dataclass(frozen=True)
class Families:
    """Measurements of the paper's models, with reasons for failures.

    Attributes:
        models: requested models, and earlier measured models of other families.
        request: settings of the measurements.
        outcome: measurements and reasons for failures, by Hugging Face id.
    """

    models: list[OpenModel]
    request: Request
    outcome: Outcome

    def document(self) -> dict[str, Any]:
        """Return the content of families.json."""
        return {
            "schema": 1,
            "models": {model.id: self._entry(model) for model in self.models if model.id in self.outcome.measured},
            "failed": self.outcome.failed,
        }

    def _entry(self, model: OpenModel) -> dict[str, Any]:
        measurement, printed = self.outcome.measured[model.id], published(model, self.request)
        return {
            "family": model.family,
            "parameters": model.parameters,
            "sink_1": sink_1(measurement),
            "published": printed,
            "source": None if printed is None else model.source,
            "measurement": measurement.document(),
        }


def measure_families(
    names: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    models_dir: Path | None = None,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Families:
    """Measure every model of the named families.

    Args:
        names: families of open_models.yaml, or `all`.
        models_dir: directory of local models, in folders named by the Hugging Face id or its last part; the hub is then
            not used.
        out: output directory: families.json and one directory per model; a repeated call resumes and may add families.

    Raises:
        InputError: if there is no such family or directory, text or an option is unusable, or `out` cannot be written
            or has results with other settings. Models that fail are listed in the results.
        HeldError: if another process writes to `out`.
        UnsavedError: if a result cannot be saved; the exception contains the results so far.
    """
    asked = models_of(names)
    models = [model for model in models_of([EVERY]) if model in asked or (out and _is_measured(out / model.id))]
    check_models_dir(models_dir)
    request.check(text)
    source = None if text is None else identity(str(text))

    def measure(model: OpenModel, progress: Progress) -> Measurement:
        loaded = load_model(place_of(model, models_dir), loading, request=request, text=text)
        return measure_loaded(loaded, text, request, progress)

    items = [
        Item(
            model.id,
            deciding_request(model.id, directory_of(model, models_dir), source, loading, request),
            partial(measure, model),
        )
        for model in models
    ]
    return measure_all(items, partial(Families, models, request), out, FAMILIES, observe)


def published(model: OpenModel, request: Request) -> float | None:
    """Return the published Sink_1 of a model, percent; None if the paper has none for these settings."""
    wanted = setting()
    same = (request.sequences, request.length) == (wanted.sequences, wanted.length)
    same = same and wanted.eps in request.options.eps
    changed = request.no_bos or request.study.swap_position or request.study.replace_position
    return model.published.get(request.options.inputs) if same and not changed else None


def sink_1(measurement: Measurement) -> float:
    """Return Sink_1 of a measurement, percent, at the paper's eps if it was measured, else at the first eps."""
    rates = (measurement.sink_rates or {}).get(f"{setting().eps:g}", measurement.sink_rate)
    return rates[0]


def check_models_dir(models_dir: Path | None) -> None:
    """Raise InputError if `models_dir` is set and is not a directory."""
    if models_dir is not None and not models_dir.is_dir():
        raise InputError(f"--models-dir {models_dir} is not a directory: pass the directory that contains the models")


def directory_of(model: OpenModel, models_dir: Path | None) -> Path | None:
    """Return the directory of a model in `models_dir`; None if there is none."""
    if models_dir is None:
        return None
    candidates = (models_dir / model.id, models_dir / model.id.rpartition("/")[2])
    return next((path for path in candidates if path.is_dir()), None)


def place_of(model: OpenModel, models_dir: Path | None) -> str:
    """Return the name by which to load a model: its directory in `models_dir`, if set, else its Hugging Face id.

    Raises:
        InputError: if `models_dir` does not contain the model.
    """
    if models_dir is None:
        return model.id
    directory = directory_of(model, models_dir)
    if directory is None:
        *_, last = model.id.split("/")
        raise InputError(
            f"{models_dir} does not contain the model: put it there as {last} or {model.id}, or remove --models-dir"
        )
    return str(directory)


def _is_measured(folder: Path) -> bool:
    return (folder / "measurement.json").is_file()


@dataclass(frozen=True)
class Size:
    """Disk and memory requirements of a model; 1 GB is 10^9 bytes.

    Attributes:
        model: Hugging Face id.
        family: family in open_models.yaml.
        parameters: number of parameters, with tied embeddings counted once.
        counted: source of `parameters`: "config" (a configuration in the directory or the Hugging Face cache) or
            "list" (open_models.yaml).
        disk_gb: size of the .safetensors files in the model's directory, if any, else of the parameters in the dtype of
            the checkpoint on the hub.
        float32_gb, bfloat16_gb: size of the weights in memory, by dtype (float16 as bfloat16).
        peak_gb: estimated peak memory: weights, process, and the larger of one batch and (if the dtype is converted)
            the checkpoint.
        published: published Sink_1 for these settings, percent; None if the paper has none.
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
    """Estimate disk and memory of the models of families, without downloads and without reading weights.

    Args:
        names, models_dir: as in `measure_families`.
        dtype: data type of the weights in memory; auto is that of the checkpoint, but float32 on CPUs that emulate it.
        device: device of the model, for `auto`.

    Raises:
        InputError: if there is no such family, directory or device.
    """
    check_models_dir(models_dir)
    where = pick_device("auto" if device == DEVICE_MAP else device)
    return [_size(model, directory_of(model, models_dir), request, dtype, where) for model in models_of(names)]


def sizes_document(found: Sequence[Size]) -> dict[str, Any]:
    """Return the model sizes as a JSON-serializable dict, printed by `--dry-run --json`."""
    return {"schema": 1, "models": [asdict(size) for size in found]}


def working_bytes(width: int, vocabulary: int, request: Request) -> float:
    """Estimate the memory of one batch in bytes: activations of one block, and logits.

    Args:
        width: hidden size.
        vocabulary: vocabulary size.
    """
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
    """Count the parameters of a model from its configuration on this machine, by building it on the meta device.

    Args:
        name: directory, or Hugging Face id with a cached configuration.

    Returns:
        Number of parameters, with tied weights counted once; None without a configuration that transformers supports.
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
    """Return the size of a directory's weight files in GB; None if there are none."""
    files = [] if directory is None else list(directory.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / GB or None
