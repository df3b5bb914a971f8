"""Load a Hugging Face model and its tokenizer; exceptions of transformers become InputErrors with advice.

Weights are read only from safetensors and GGUF files: pickle files (.bin, .pt) can run code and are never opened. A
model's own code runs only if `trust_remote_code` is set. With `--subfolder`, the model is in a subfolder of a directory
or hub repository; its tokenizer is in the subfolder or in the root.

A directory with an adapter_config.json is a PEFT adapter (such as LoRA). If it has no model weights, its config names
the base model. transformers and peft apply adapters without merging them, because merging would round weights again.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from sinklab import register
from sinklab.device import float32_if_emulated, pick_device
from sinklab.errors import InputError, cause, require_extra
from sinklab.files import parse_json
from sinklab.models.adapter import check_length
from sinklab.models.families import EXPORTED, OTHER_HEAD, context_limit, quantisation, text_config, vocabulary_size
from sinklab.models.hooks import without_bars
from sinklab.models.huggingface.gguf import Gguf, check_memory, find_gguf, read_header
from sinklab.models.huggingface.tokenizer_files import TokenizerKind, load_tokenizer
from sinklab.settings import dtype_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CONFIG = "adapter_config.json"
OWN = "default"  # name that transformers gives to an adapter in the directory of its base model


def base_and_adapters(name: str, adapters: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the base model, and the adapters to apply to it in order.

    Args:
        name: name of a model, or directory of an adapter.
        adapters: directories or hub names of further adapters.

    Raises:
        InputError: if peft is not installed, or the config of an adapter cannot be read or names no base model.
    """
    own = [name] if (Path(name) / CONFIG).is_file() else []
    for adapter in adapters:
        if Path(adapter).exists() and not (Path(adapter) / CONFIG).is_file():
            raise InputError(f"--adapter {adapter} has no {CONFIG}: pass the directory of a PEFT adapter")
    if own or adapters:
        require_extra("adapters", ("peft", "accelerate"), f"the adapter {[*own, *adapters][0]}")
    if not own or (Path(name) / "config.json").is_file():
        return name, [*own, *adapters]
    try:
        base = parse_json((Path(name) / CONFIG).read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{Path(name) / CONFIG} cannot be read: {cause(error)}") from error
    if not base:
        raise InputError(
            f"{name} is an adapter whose {CONFIG} names no base model: pass the base model, and --adapter {name}"
        )
    return str(base), [*own, *adapters]


def apply_adapters(model: "PreTrainedModel", base: str, adapters: Sequence[str]) -> list[str]:
    """Apply adapters to a model, all of them active at the same time; return a note on each.

    An adapter in the directory `base` itself has been applied by transformers when the weights were loaded.

    Raises:
        InputError: if an adapter cannot be loaded, or does not fit the model.
    """
    if not adapters:
        return []
    names = [OWN if one == base else f"adapter_{number}" for number, one in enumerate(adapters)]
    for name, adapter in zip(names, adapters, strict=True):
        if name != OWN:
            try:
                model.load_adapter(adapter, adapter_name=name)
            except Exception as error:  # peft raises various exceptions
                raise InputError(f"the adapter {adapter} could not be applied to {base}: {cause(error)}") from error
    if len(names) > 1:
        layer_class: Any = import_module("peft.tuners.tuners_utils").BaseTunerLayer
        modules: Any = model.modules()
        for module in modules:  # as transformers' set_adapter, which refuses versions of peft that load fine
            if isinstance(module, layer_class):
                module.set_adapter(names)
    notes = []
    for name, adapter in zip(names, adapters, strict=True):
        config: Any = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
        targets = getattr(config, "target_modules", None) or ()
        on = targets if isinstance(targets, str) else ", ".join(sorted(targets))
        rank = f", rank {config.r}" if getattr(config, "r", None) else ""
        notes.append(f"the adapter {adapter} is applied ({kind}{rank}{f', on {on}' if on else ''})")
    return notes


DEVICE_MAP = "map"  # value of --device
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]{0,95}(?<![.-])", re.ASCII)
QUANTISATION_PACKAGES = {
    "bitsandbytes": ("bitsandbytes",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed-tensors",),
    "quanto": ("optimum-quanto",),
    "hqq": ("hqq",),
    "aqlm": ("aqlm",),
    "eetq": ("kernels",),
    "mxfp4": ("kernels",),
    "auto-round": ("auto-round",),
    "torchao": ("torchao",),
}
"""Packages that transformers needs for quantised weights besides accelerate, by `quant_method`."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LoadIn = Literal["4bit", "8bit"]


@dataclass(frozen=True)
class Loading:
    """Options for loading a model.

    Attributes:
        dtype: float32, bfloat16, float16, float64, or auto (dtype of the checkpoint, but float32 for GGUF files and on
            CPUs that emulate the checkpoint's dtype).
        device: cpu, cuda, cuda:N, auto (CUDA if available, else CPU), or map (weights distributed over GPUs, memory and
            disk with accelerate's `device_map="auto"`).
        trust_remote_code: run the model's own code.
        revision: branch, tag or commit on the hub; None for the main branch.
        subfolder: subfolder of the directory or hub repository that contains the model; None for the root.
        tokenizer: auto, file or transformers (`load_tokenizer`), or another tokenizer (`given_tokenizer`).
        load_in: 4bit or 8bit, in which bitsandbytes quantises the weights while they are loaded; None for neither.
        adapters: directories or hub names of PEFT adapters to apply, in addition to one in the model's directory.
        say: callback, called with a message before the weights of a GGUF file are dequantised.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    subfolder: str | None = None
    tokenizer: Any = "auto"
    adapters: tuple[str, ...] = ()
    load_in: LoadIn | None = None
    say: Callable[[str], None] = field(default=lambda message: None, compare=False)

    @property
    def precision(self) -> dict[str, str]:
        """The settings of the weights' rounding, as they are stored with results."""
        return {"dtype": self.dtype} | ({} if self.load_in is None else {"load_in": self.load_in})


AS_IT_IS = Loading()


@dataclass(frozen=True)
class Pretrained:
    """A causal language model in evaluation mode, and its tokenizer.

    Attributes:
        tokenizer: the tokenizer; None if there is none and no text is read.
        notes: remarks on the dtype and the loaded weights, shown with the results.
        commit: commit of the model on the hub; None for a local model, or if the commit is unknown.
    """

    model: "PreTrainedModel"
    tokenizer: Any
    notes: list[str]
    commit: str | None = None


def load_pretrained(name: str, loading: Loading = AS_IT_IS, length: int = 0, for_text: bool = True) -> Pretrained:
    """Load a model and its tokenizer.

    Args:
        name: model directory, .gguf file or directory that contains one, or name on the Hugging Face hub. For a local
            model in a subfolder, the path of the subfolder (`in_subfolder`).
        length: length of the sequences that will be read, compared with the config before the weights are loaded.
        for_text: False if no text is read, so that the tokenizer may be missing.

    Raises:
        InputError: if the model does not exist or is an encoder-decoder; if its config, tokenizer or weights are
            missing, inconsistent, pickled or unreadable; if the dtype or device is unusable; if `length` is beyond the
            context; or if the dequantised weights of a GGUF file do not fit in the free memory.
    """
    wanted, target = pick_dtype(loading.dtype), None if loading.device == DEVICE_MAP else pick_device(loading.device)
    base, adapters = base_and_adapters(name, loading.adapters)
    source = _find(base, loading)

    config = source.config()
    if config.is_encoder_decoder:
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}): use a decoder-only language model")
    check_length(length, context_limit(config))
    method = quantisation(config)
    needed = () if method is None or method == "gguf" else (*QUANTISATION_PACKAGES.get(method, ()), "accelerate")
    if missing := [package for package in needed if not list(distributions(name=package))]:
        raise InputError(
            f"the weights of {name} are quantised ({method}), for which transformers needs packages that are not "
            f"installed: pip install {' '.join(missing)}"
        )
    if loading.load_in is not None:
        if method is not None or source.gguf is not None:
            raise InputError(f"--load-in {loading.load_in}: the weights of {name} are quantised already: leave it out")
        require_extra("quantised", ("bitsandbytes", "accelerate"), f"--load-in {loading.load_in}")
    config.return_dict = True
    config._attn_implementation = None  # its package may be missing, and measurements compute the attention themselves
    given = {} if source.gguf is not None else {"config": config}
    try:
        tokenizer, chosen = _tokenizer(name, base, source, loading, given)
    except InputError as error:
        if for_text or loading.tokenizer != "auto":
            raise
        tokenizer, chosen = None, [f"without a tokenizer, tokens are any rows of the embedding ({error})"]
    added = getattr(tokenizer, "get_added_vocab", dict)()  # tokenizers of mistral-common do not have it
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    if tokenizer is not None and vocabulary.keys() == added.keys():  # transformers raises no error
        raise InputError(
            f"the tokenizer of {name} has only special tokens: its vocabulary is missing. Put the other tokenizer "
            "files (such as tokenizer.json) next to the weights"
        )
    notes, declared, quantised = [], text_config(config).dtype or config.dtype, method or loading.load_in
    if source.gguf is not None:
        wanted = torch.float32 if wanted == "auto" else wanted
        assert isinstance(wanted, torch.dtype)
        check_memory(source.gguf, wanted, target or torch.device("cpu"))
        notes = source.gguf.notes(str(wanted).removeprefix("torch."))
        loading.say(f"dequantising {source.gguf.path.name} ({source.gguf.types[0]}), which takes a while")
    elif wanted == "auto" and declared is not None and not quantised:
        wanted, notes = _faster_dtype(declared, target)
    load: dict[str, Any] = {"dtype": wanted, "use_safetensors": True, "output_loading_info": True}
    if loading.load_in is not None:
        from transformers import BitsAndBytesConfig

        load["quantization_config"] = BitsAndBytesConfig(**{f"load_in_{loading.load_in}": True})
    if target is None:
        load["device_map"] = "auto"
    elif quantised:  # a quantised model cannot be moved later
        load["device_map"] = {"": target}
    with without_bars() if _is_local(source.place) else nullcontext():  # downloads show their progress
        load |= source.gguf.weight_options() if source.gguf is not None else {}
        load |= given
        model, info = source.read("weights", _model_class(name, config).from_pretrained, load)
        applied = apply_adapters(model, base, adapters)
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"the weights of {name} are incomplete: {len(missing)} tensors are missing, such as {missing[0]}. "
            "Copy the whole model again, with the config.json of these weights."
        )
    ignored = []
    if getattr(config, "auto_map", None) and type(model).__module__.startswith("transformers."):
        ignored.append(
            "config.json names code of the model's own (auto_map), which was not run: the model was loaded as "
            f"transformers' {type(model).__name__}; --trust-remote-code runs its code"
        )
    if unused := sorted(info["unexpected_keys"]):
        ignored.append(
            f"{len(unused)} tensors of the checkpoint were ignored, such as {unused[0]}: the config has no module for "
            "them, so only part of the checkpoint is used"
        )
    rows, plain = vocabulary_size(model), vocabulary.keys() - added.keys()  # added ones need not be in a text
    largest = max((vocabulary[token] for token in plain), default=0)
    if largest >= rows:
        raise InputError(
            f"the tokenizer of {name} has token ids up to {largest} and the model has {rows} tokens: "
            "the tokenizer belongs to another model; put the right tokenizer files next to the weights"
        )
    if "device_map" not in load:
        if wanted == "auto" and declared is None:
            wanted, notes = _faster_dtype(model.dtype, target)
        model = model.to(target, wanted if isinstance(wanted, torch.dtype) else None)
    if source.gguf is not None:
        model.hf_quantizer = None  # an ordinary model, which can be saved
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return Pretrained(
        model.eval(),
        tokenizer,
        [*applied, *chosen, *notes, *ignored],
        commit_of(name, loading.revision, loading.subfolder),
    )


def load_model_tokenizer(name: str) -> "tuple[PreTrainedTokenizerBase, list[str]]":
    """Load the tokenizer of a model without its weights, and notes on it; see `load_pretrained`."""
    check_name(name)
    source = _find(base_and_adapters(name, ())[0], AS_IT_IS)
    given = {} if source.gguf is not None else {"config": source.config()}
    return _tokenizer(name, source.place, source, AS_IT_IS, given)


def _tokenizer(
    name: str, base: str, source: "_Source", loading: Loading, given: dict[str, Any]
) -> "tuple[PreTrainedTokenizerBase, list[str]]":
    if loading.tokenizer not in get_args(TokenizerKind):
        return given_tokenizer(loading.tokenizer, loading.trust_remote_code)
    place = _with_tokenizer(source, loading.subfolder)
    if base != name and any(path for pattern in TOKENIZER_FILES for path in Path(name).glob(pattern)):
        place = replace(source, place=name)  # an adapter with its own tokenizer
    tokenizer, notes = load_tokenizer(
        name, loading.tokenizer, lambda method: place.read("tokenizer", method, given), place.has_file("tokenizer.json")
    )
    above = loading.subfolder is None and place.place == str(Path(source.place).absolute().parent)
    return tokenizer, [f"the tokenizer is that of the folder above, {place.place}", *notes] if above else notes


def given_tokenizer(tokenizer: Any, trust_remote_code: bool = False) -> tuple[Any, list[str]]:
    """Return a tokenizer of transformers, or load that of a folder, a file in it, or a name on the hub; and its notes.

    Raises:
        InputError: if it is not a tokenizer, or cannot be loaded.
    """
    if not isinstance(tokenizer, str | Path):
        if not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise InputError(f"`tokenizer` is a {type(tokenizer).__name__}: pass the tokenizer of transformers")
        return tokenizer, []
    place = str(Path(tokenizer).parent if Path(tokenizer).is_file() else tokenizer)
    if not Path(place).is_dir() and not HUB_NAME.fullmatch(place):
        raise InputError(f"no tokenizer at {place}: pass a folder with tokenizer files, or a name on the hub")
    options = {"trust_remote_code": trust_remote_code, "revision": None}
    source = _with_tokenizer(_Source(str(tokenizer), place, options, None), None)
    found = source.has_file("tokenizer.json")
    return load_tokenizer(str(tokenizer), "auto", lambda method: source.read("tokenizer", method), found)


def _model_class(name: str, config: "PretrainedConfig") -> Any:
    """Return the class that loads the weights: AutoModel for a base model without a head, else AutoModelForCausalLM.

    Raises:
        InputError: if the config names a class with another head than that of a language model.
    """
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    architecture = next(iter(config.architectures or ()), "")
    if OTHER_HEAD.search(architecture):
        raise InputError(
            f"{name} is a {architecture}, which has another head than a language model: "
            "load it with AutoModel and pass it to sinklab.measure, which measures its layers without a loss"
        )
    bases = MODEL_MAPPING_NAMES.get(config.model_type, ())  # a name, or several
    return AutoModel if architecture in ([bases] if isinstance(bases, str) else bases) else AutoModelForCausalLM


@dataclass(frozen=True)
class _Source:
    """Location of a model's files.

    Attributes:
        name: model directory, .gguf file or hub name, for messages.
        place: folder or hub name that is passed to transformers.
        options: keyword arguments of `from_pretrained`.
        gguf: header of the GGUF file; None for other formats.
    """

    name: str
    place: str
    options: dict[str, Any]
    gguf: Gguf | None

    def config(self) -> Any:
        """Load the config of the model; see `read` for errors."""
        from transformers import AutoConfig, PretrainedConfig

        if self.gguf is None:
            values = self.read("config", PretrainedConfig.get_config_dict)[0]
            if values.get("model_type") == EXPORTED:
                register()
        return self.read("config", AutoConfig.from_pretrained)

    def has_file(self, file: str) -> bool:
        """Return whether the folder or hub repository has a file; False for GGUF. It may be downloaded."""
        if self.gguf is not None:
            return False
        if Path(self.place).is_dir():
            return (Path(self.place) / file).is_file()
        from transformers.utils.hub import cached_file

        where = {key: self.options.get(key) for key in ("revision", "subfolder")}
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        return cached_file(self.place, file, **where, **quiet) is not None

    def read(self, part: str, from_pretrained: Any, more: dict[str, Any] | None = None) -> Any:
        """Load a part of a model with `from_pretrained`; any exception becomes an InputError with advice.

        Args:
            part: name of the part in error messages.
            more: keyword arguments in addition to `options`.
        """
        try:
            with nullcontext() if self.gguf is None else self.gguf.parsed_once():
                return from_pretrained(self.place, **self.options, **(more or {}))
        except Exception as error:  # transformers raises various exceptions
            architecture = None if self.gguf is None else self.gguf.architecture
            why = advice(error, self.place, self.options["revision"], architecture)
            revision = f" at revision {self.options['revision']}" if self.options["revision"] else ""
            raise InputError(f"the {part} of {self.name}{revision} could not be loaded: {why}") from error


def _find(name: str, loading: Loading) -> _Source:
    options: dict[str, Any] = {"trust_remote_code": loading.trust_remote_code, "revision": loading.revision}
    if (path := find_gguf(name)) is not None:
        header = read_header(path)
        return _Source(name, str(path.parent), options | {"gguf_file": str(header.path)}, header)
    folder = Path(name)
    if not folder.is_dir():
        check_name(name)
        inside = {} if loading.subfolder is None else {"subfolder": loading.subfolder}
        return _Source(name, name, options | inside, None)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{name} has no config.json: pass the directory of a Hugging Face model, or a run directory (which has a "
            "recipe.yaml)"
        )
    if not any(folder.glob("*.safetensors")):
        if pickled := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
            raise InputError(
                f"{name} has its weights only in {pickled[0]}, a pickle file, which can run code and is never loaded. "
                "If you trust it, convert it to model.safetensors with transformers' save_pretrained."
            )
        raise InputError(f"{name} has a config.json but no weights: add its .safetensors files")
    return _Source(name, name, options, None)


def check_revision(name: str, revision: str | None) -> None:
    """Check that no revision is requested for a local model.

    Raises:
        InputError: if `revision` is set and `name` is a local path.
    """
    if revision is not None and _is_local(name):
        raise InputError(
            f"--revision {revision} is a version on the Hugging Face hub, but {name} is local: leave --revision out"
        )


def _faster_dtype(own: torch.dtype, target: torch.device | None) -> "tuple[torch.dtype | str, list[str]]":
    """Return float32 and a note if the device emulates the checkpoint's dtype, else "auto" and no note.

    Args:
        own: dtype of the checkpoint.
        target: target device; None if the weights are distributed over several devices.
    """
    faster = float32_if_emulated(own, target or pick_device("auto"))
    if faster == own:
        return "auto", []
    name = str(own).removeprefix("torch.")
    return faster, [
        f"the weights are {name} and were converted to float32, because this processor emulates {name} slowly "
        f"(to use it anyway: --dtype {name})"
    ]


def pick_dtype(dtype: str) -> "torch.dtype | str":
    """Convert the value of --dtype to a torch dtype, or "auto"."""
    name = dtype_name(dtype)
    return "auto" if name == "auto" else getattr(torch, name)


def check_config(name: str, loading: Loading = AS_IT_IS) -> None:
    """Check that the config of a model can be loaded, and that a local model has weights.

    For GGUF, only the existence of the file is checked.

    Raises:
        InputError: if the model does not exist, its config cannot be loaded, or its weights are missing or pickled.
    """
    if find_gguf(name) is None:
        _find(name, loading).config()


def check_name(name_or_dir: str) -> None:
    """Check that a name is a directory, a path that ends in .gguf or a valid hub name, without a request to the hub.

    Raises:
        InputError: if the name is none of these; the message says what is valid.
    """
    folder = Path(name_or_dir)
    maybe_on_hub = HUB_NAME.fullmatch(name_or_dir) and not folder.exists()
    if name_or_dir and (folder.is_dir() or folder.suffix.lower() == ".gguf" or maybe_on_hub):
        return
    if folder.is_file() and (folder.parent / "config.json").is_file():
        raise InputError(f"{name_or_dir} is a file: pass the directory of the model, {folder.parent}")
    wrong = "is a file" if folder.is_file() else "is neither a directory nor a valid name on the hub"
    raise InputError(
        f"{name_or_dir or 'an empty MODEL'} {wrong}: pass a model directory, a run directory, a .gguf file, or a name "
        "on the Hugging Face hub such as openai-community/gpt2"
    )


TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "spiece*")


def in_subfolder(name: str, subfolder: str | None) -> str:
    """Return the path of the subfolder in a local directory; the subfolder need not exist.

    A name that is not a local directory is returned unchanged, and so is any name if `subfolder` is None.

    Raises:
        InputError: if the subfolder is empty, absolute or contains "..", or the name is a file.
    """
    if subfolder is None:
        return name
    parts = PurePosixPath(subfolder).parts
    if not parts or subfolder.startswith("/") or ".." in parts:
        raise InputError(f"--subfolder {subfolder!r}: use a relative path inside {name}, such as checkpoints/final")
    place = Path(name)
    if place.is_file():
        raise InputError(f"--subfolder {subfolder}: {name} is a file; pass the directory, or leave --subfolder out")
    return str(Path(name, *parts)) if place.is_dir() else name


def name_in_results(name: str, subfolder: str | None) -> str:
    """Return the name of the model for results; for a model on the hub, NAME/SUBFOLDER.

    The name of a local model already contains the subfolder (`in_subfolder`).
    """
    return name if subfolder is None or _is_local(name) else f"{name}/{subfolder.strip('/')}"


def commit_of(name: str, revision: str | None, subfolder: str | None) -> str | None:
    """Return the hub commit of the cached config.json; None for a local model, or if the config is not cached."""
    from huggingface_hub import try_to_load_from_cache

    if _is_local(name):
        return None
    config = PurePosixPath(subfolder or "", "config.json")
    found = try_to_load_from_cache(name, str(config), revision=revision)
    return Path(found).parents[len(config.parts) - 1].name if isinstance(found, str) else None


def _with_tokenizer(source: _Source, subfolder: str | None) -> _Source:
    """Return the location of a model's tokenizer.

    The tokenizer is next to the weights, else in the root of the directory or repository that contains the subfolder;
    without a subfolder, in the folder above, as for checkpoints of a Trainer. For GGUF, it is in the file itself.

    Raises:
        InputError: if a local model has no tokenizer files, unless `trust_remote_code` is set. transformers would
            silently create an empty tokenizer.
    """
    folder = Path(source.place)
    if source.gguf is not None:
        return source
    if not folder.is_dir():
        if subfolder is None or any(map(source.has_file, ("tokenizer_config.json", "tokenizer.json"))):
            return source
        return replace(source, options={**source.options, "subfolder": ""})
    places = [folder] if subfolder is None else [folder, folder.parents[len(PurePosixPath(subfolder).parts) - 1]]
    for one in places:
        if any(path for pattern in TOKENIZER_FILES for path in one.glob(pattern)):
            return replace(source, place=str(one))
    parent = folder.absolute().parent
    if subfolder is None and any((parent / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return replace(source, place=str(parent))
    if source.options["trust_remote_code"]:
        return source  # its tokenizer may need no file
    above = "" if len(places) == 1 else f", nor has {places[1]}"
    raise InputError(
        f"{source.name} has no tokenizer{above}: put the tokenizer files (such as tokenizer.json) next to the weights, "
        "or pass --tokenizer PATH"
    )


def _is_local(name: str) -> bool:
    return Path(name).exists()


def advice(error: Exception, place: str, revision: str | None, gguf: str | None) -> str:
    """Return advice for an exception raised by transformers, with the first line of its message in most cases.

    Args:
        place: folder or hub name that was passed to transformers.
        revision: requested revision on the hub.
        gguf: architecture of the GGUF file; None for other formats.
    """
    message = str(error)
    if "ignore_mismatched_sizes" in message:  # its message refers to a table that is not shown
        return "their shapes do not match config.json; use the config and the weights of the same model"
    if "trust_remote_code" in message:
        what = "it needs its own code; if you trust its author, use --trust-remote-code"
    elif "does not recognize this architecture" in message:
        what = f"transformers {version('transformers')} does not support this model type; try a newer version"
    elif isinstance(error, ImportError) or "pip install" in message:
        what = "install the missing package"
    elif gguf is not None:
        what = f"transformers cannot read this gguf file of architecture {gguf!r}"
    elif Path(place).is_dir():
        what = "check that the directory is complete"
    else:
        revised = "" if revision is None else ", the revision"
        what = f"{place} is not a directory here; for a model on the hub, check the name{revised} and the connection"
    return f"{what} ({cause(error)})"
