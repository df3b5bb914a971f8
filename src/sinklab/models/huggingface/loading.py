"""Loading a Hugging Face model and its tokenizer; every failure becomes an InputError with advice.

Weights are read from safetensors and gguf files only: pickle files (.bin, .pt) can run code and are never opened. Code
that a model brings along runs only with `trust_remote_code`. With `--subfolder` the model lies in a folder of a
directory or of a repository of the hub, its tokenizer there or above: a folder of a directory is joined to its path,
and the hub is asked for a name and a subfolder, which stay apart until a result is named.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from sinklab import register
from sinklab.device import float32_if_emulated, pick_device
from sinklab.errors import InputError, cause
from sinklab.models.huggingface.anatomy import quantisation, vocabulary_size
from sinklab.models.huggingface.gguf import Gguf, as_ordinary, check_memory, find_gguf, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICE_MAP = "map"  # a --device
HUB_NAME = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]{0,95}(?<![.-])", re.ASCII)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Loading:
    """How a model is loaded.

    Attributes:
        dtype: auto (as its files have it, but float32 on a CPU that emulates that, and for gguf files), float32,
            bfloat16, float16 or float64.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:N, or map: the weights are spread over
            cards, memory and disk (accelerate's `device_map="auto"`).
        trust_remote_code: run the model's own code.
        revision: branch, tag or commit of a model of the hub; None for its main branch.
        subfolder: subfolder of the model; for a directory, the end of its path.
        say: called with a message before slow steps.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    subfolder: str | None = None
    say: Callable[[str], None] = field(default=lambda message: None, compare=False)


AS_IT_IS = Loading()


@dataclass(frozen=True)
class Pretrained:
    """A causal language model in evaluation mode, and its tokenizer.

    Attributes:
        notes: remarks on how the model was loaded, shown with results.
        commit: commit on the hub; None for a local model.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    notes: list[str]
    commit: str | None = None


def load_pretrained(
    name: str, loading: Loading = AS_IT_IS, check: "Callable[[PreTrainedTokenizerBase], None] | None" = None
) -> Pretrained:
    """Load a model and its tokenizer.

    Args:
        name: a directory, a .gguf file or a directory that holds one, or a name on the Hugging Face hub.
        check: called with the tokenizer before the weights are read, which may take minutes.

    Raises:
        InputError: no such directory, file or name, no config, no weights, only pickled weights, weights that do not
            fit the config, a gguf file that transformers cannot read, an encoder-decoder, no tokenizer, or one with
            more tokens than the model.
    """
    wanted, target = pick_dtype(loading.dtype), None if loading.device == DEVICE_MAP else pick_device(loading.device)
    source = _find(name, loading)
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    config = source.read("config", AutoConfig.from_pretrained)
    if config.is_encoder_decoder:
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}): use a decoder-only language model")
    tokenizer = _tokenizer(source, config, loading.subfolder)
    if check is not None:
        check(tokenizer)
    notes, declared = [], config.get_text_config(decoder=True).dtype or config.dtype
    if source.gguf is not None:
        wanted = torch.float32 if wanted == "auto" else wanted
        assert isinstance(wanted, torch.dtype)
        check_memory(source.gguf, wanted, target or torch.device("cpu"))
        notes = source.gguf.notes(str(wanted).removeprefix("torch."))
        loading.say(f"unpacking {source.gguf.path.name} ({source.gguf.types[0]}), which takes a while")
    elif wanted == "auto" and declared is not None and not quantisation(config):
        wanted, notes = _faster_dtype(declared, target)
    load: dict[str, Any] = {"dtype": wanted, "use_safetensors": True, "output_loading_info": True}
    if target is None:
        load["device_map"] = "auto"
    elif quantisation(config):  # the device it is loaded to is final
        load["device_map"] = {"": target}
    with without_bars() if Path(source.place).expanduser().exists() else nullcontext():  # downloads show their progress
        model, info = source.read("weights", AutoModelForCausalLM.from_pretrained, load | source.weight_options())
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"the weights of {name} are incomplete: {len(missing)} tensors are missing, such as {missing[0]}. "
            "Copy the whole model again; untrained weights are not measured."
        )
    ignored = []
    if unused := sorted(info["unexpected_keys"]):
        ignored.append(
            f"{len(unused)} tensors of the checkpoint were ignored, such as {unused[0]}: the config has no place for "
            "them, so what was measured is not the whole checkpoint"
        )
    largest, rows = max(tokenizer.get_vocab().values()), vocabulary_size(model)
    if source.gguf is None and largest >= rows:  # a gguf file has both; transformers adds a missing <|endoftext|>
        raise InputError(
            f"the tokenizer of {name} has token ids up to {largest} and the model knows {rows} tokens: "
            "it belongs to another model; put the right tokenizer files next to the weights"
        )
    if "device_map" not in load:
        if wanted == "auto" and declared is None:
            wanted, notes = _faster_dtype(model.dtype, target)
        model = model.to(target, wanted if isinstance(wanted, torch.dtype) else None)
    if source.gguf is not None:
        model = as_ordinary(model)
    return Pretrained(model.eval(), tokenizer, [*notes, *ignored], commit_of(name, loading.revision, loading.subfolder))


@dataclass(frozen=True)
class _Source:
    """Where the parts of a model are read from.

    Attributes:
        name: as entered by the user.
        place: folder or name on the hub that transformers reads.
        options: arguments of every from_pretrained.
        gguf: the gguf file, if it is one.
    """

    name: str
    place: str
    options: dict[str, Any]
    gguf: Gguf | None

    def read(self, part: str, from_pretrained: Any, more: dict[str, Any] | None = None) -> Any:
        """Call a from_pretrained; any exception becomes an InputError with advice."""
        try:
            with nullcontext() if self.gguf is None else self.gguf.parsed_once():
                return from_pretrained(self.place, **self.options, **(more or {}))
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, RuntimeError and its parts' own
            why = advice(error, self.place, self.options["revision"], self.gguf and self.gguf.architecture)
            revision = f" at revision {self.options['revision']}" if self.options["revision"] else ""
            raise InputError(f"the {part} of {self.name}{revision} could not be loaded: {why}") from error

    def weight_options(self) -> dict[str, Any]:
        """Arguments for the weights only."""
        return {} if self.gguf is None else self.gguf.weight_options()


def _find(name: str, loading: Loading) -> _Source:
    options: dict[str, Any] = {"trust_remote_code": loading.trust_remote_code, "revision": loading.revision}
    path = find_gguf(name)
    if path is None:
        _check_directory(name)
        if loading.subfolder is not None and not Path(name).expanduser().is_dir():
            options["subfolder"] = loading.subfolder
        return _Source(name, name, options, None)
    header = read_header(path)
    return _Source(name, str(path.parent), options | header.options(), header)


def _tokenizer(source: _Source, config: Any, subfolder: str | None) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    if source.gguf is not None:
        return source.read("tokenizer", AutoTokenizer.from_pretrained)
    where = tokenizer_options(source.name, source.place, source.options, subfolder)
    return replace(source, place=where.pop("pretrained_model_name_or_path"), options=where).read(
        "tokenizer", AutoTokenizer.from_pretrained, {"config": config}
    )


def check_revision(name: str, revision: str | None) -> None:
    """Check that no revision is set for a local model.

    Raises:
        InputError: if the name is a local path.
    """
    if revision is not None and Path(name).expanduser().exists():
        raise InputError(
            f"--revision {revision} names a version on the Hugging Face hub, and {name} is local: leave it out"
        )


def _faster_dtype(own: torch.dtype, target: torch.device | None) -> "tuple[torch.dtype | str, list[str]]":
    """float32 and a note on why, where the device emulates a checkpoint's own dtype; else "auto".

    Args:
        target: the device; None if the weights are spread, over cards if there are any.
    """
    faster = float32_if_emulated(own, target or pick_device("auto"))
    if faster == own:
        return "auto", []
    name = str(own).removeprefix("torch.")
    return faster, [
        f"the weights are {name} and were measured in float32: this processor has no {name} products of its own, "
        f"and emulates them slowly (--dtype {name} has it do so)"
    ]


def pick_dtype(dtype: str) -> "torch.dtype | str":
    """The dtype of a --dtype option, or "auto".

    Raises:
        InputError: if it is not one of DTYPES.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    return "auto" if dtype == "auto" else getattr(torch, dtype)


def check_config(name: str, loading: Loading = AS_IT_IS) -> None:
    """Check that the config of a model can be read, without reading tokenizer or weights.

    Raises:
        InputError: if there is no such directory or name, or no config.
    """
    if find_gguf(name) is None:
        from transformers import AutoConfig

        register()
        _find(name, loading).read("config", AutoConfig.from_pretrained)


def load_pretrained_tokenizer(name: str, loading: Loading = AS_IT_IS) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model, without its weights.

    Raises:
        InputError: if there is no such directory, file or name, or no tokenizer.
    """
    from transformers import AutoTokenizer

    return _find(name, loading).read("tokenizer", AutoTokenizer.from_pretrained)


def check_name(name_or_dir: str) -> None:
    """Check that a name is a local model or a possible name on the hub, without a request to the hub.

    Raises:
        InputError: if it is neither; the message lists the kinds of MODEL.
    """
    folder = Path(name_or_dir).expanduser()
    maybe_on_hub = HUB_NAME.fullmatch(name_or_dir) and not folder.exists()
    if name_or_dir and (folder.is_dir() or folder.suffix.lower() == ".gguf" or maybe_on_hub):
        return
    wrong = "is a file" if folder.is_file() else "is not a directory"
    raise InputError(
        f"{name_or_dir or 'an empty MODEL'} {wrong}: give the directory of a model, a run directory, a .gguf file, or "
        "a name on the Hugging Face hub such as openai-community/gpt2"
    )


def _check_directory(name_or_dir: str) -> None:
    folder = Path(name_or_dir).expanduser()
    if not folder.is_dir():
        check_name(name_or_dir)
        return
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{name_or_dir} has no config.json: give the directory of a Hugging Face model, or a run directory "
            "(which has a recipe.yaml)"
        )
    if any(folder.glob("*.safetensors")):
        return
    if pickled := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise InputError(
            f"{name_or_dir} has its weights only as {pickled[0]}, a pickle file, which can run code and is never "
            "loaded. Where you trust it, convert it: save_pretrained of transformers writes model.safetensors."
        )
    raise InputError(f"{name_or_dir} has a config.json and no weights: put its .safetensors files there as well")


TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "spiece*")


def in_subfolder(name: str, subfolder: str | None) -> str:
    """The path of the subfolder of a local directory; a name on the hub is returned unchanged.

    Raises:
        InputError: the subfolder is empty, absolute or leads upwards; the name is that of a file.
    """
    if subfolder is None:
        return name
    parts = PurePosixPath(subfolder).parts
    if not parts or subfolder.startswith("/") or ".." in parts:
        raise InputError(f"--subfolder {subfolder!r}: give a folder below {name}, such as checkpoints/final")
    place = Path(name).expanduser()
    if place.is_file():
        raise InputError(f"--subfolder {subfolder}: {name} is a file; give the directory, or leave --subfolder out")
    return str(Path(name, *parts)) if place.is_dir() else name


def name_in_results(name: str, subfolder: str | None) -> str:
    """The name of a model in results, with its subfolder, which a path already contains."""
    return name if subfolder is None or _is_local(name) else f"{name}/{subfolder.strip('/')}"


def commit_of(name: str, revision: str | None, subfolder: str | None) -> str | None:
    """The commit of the hub that was read, from its path in the cache; None for a local model."""
    from huggingface_hub import try_to_load_from_cache

    if _is_local(name):
        return None
    config = PurePosixPath(subfolder or "", "config.json")
    found = try_to_load_from_cache(name, str(config), revision=revision)
    return Path(found).parents[len(config.parts) - 1].name if isinstance(found, str) else None


def tokenizer_options(name: str, place: str, options: Mapping[str, Any], subfolder: str | None) -> dict[str, Any]:
    """The location of the tokenizer as arguments of from_pretrained: beside the weights, else above the subfolder.

    Without any tokenizer file transformers would make an empty tokenizer.

    Args:
        name: of the model, as entered by the user.
        place: the local folder of the weights, or a name on the hub.
        options: for reading the weights.

    Raises:
        InputError: if a local folder has no tokenizer.
    """
    beside = {"pretrained_model_name_or_path": place, **options}
    folder = Path(place).expanduser()
    if not folder.is_dir():
        if subfolder is None or _on_the_hub(place, options):
            return beside
        return {**beside, "subfolder": ""}
    places = [folder] if subfolder is None else [folder, folder.parents[len(PurePosixPath(subfolder).parts) - 1]]
    for one in places:
        if any(path for pattern in TOKENIZER_FILES for path in one.glob(pattern)):
            return {**beside, "pretrained_model_name_or_path": str(one)}
    if options["trust_remote_code"]:
        return beside  # it may need no file
    above = "" if len(places) == 1 else f", nor has {places[1]}"
    raise InputError(
        f"{name} has no tokenizer{above}: put the files of its tokenizer (such as tokenizer.json) beside the weights"
    )


def _on_the_hub(name: str, options: Mapping[str, Any]) -> bool:
    from transformers.utils.hub import cached_file

    where = {key: options[key] for key in ("revision", "subfolder")}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return any(cached_file(name, file, **where, **quiet) for file in ("tokenizer_config.json", "tokenizer.json"))


def _is_local(name: str) -> bool:
    return Path(name).expanduser().exists()


def advice(error: Exception, place: str, revision: str | None, gguf: str | None) -> str:
    """A sentence for the user, with the error's own first line in brackets where that helps.

    Args:
        place: a folder, or a name on the hub.
        revision: requested revision on the hub.
        gguf: architecture of the gguf file that was read; None for other files.
    """
    said = str(error)
    if "ignore_mismatched_sizes" in said:  # and refers to a table that is not shown
        return "they have other shapes than its config.json says; put the config and the weights of one model there"
    if "trust_remote_code" in said:
        what = "it brings code of its own; --trust-remote-code runs it, if you trust its author"
    elif "does not recognize this architecture" in said:
        what = f"transformers {version('transformers')} does not know this type of model; try a newer version"
    elif isinstance(error, ImportError) or "pip install" in said:
        what = "install the package that it needs"
    elif gguf is not None:
        what = f"transformers does not read this gguf file of architecture {gguf!r}"
    elif Path(place).expanduser().is_dir():
        what = "check that the directory is complete"
    else:
        revised = "" if revision is None else ", the revision"
        what = f"check the name{revised} and the connection to the hub, or give the directory of a downloaded model"
    return f"{what} ({cause(error)})"


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars of transformers inside the `with` block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
