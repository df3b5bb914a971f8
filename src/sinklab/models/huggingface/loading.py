"""Loading a Hugging Face model and its tokenizer, with a sentence for everything that cannot be loaded.

Weights come from safetensors and gguf files only: pickle files (.bin, .pt) can run code and are never opened. Code
that a model brings along runs only with `trust_remote_code`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinklab import register
from sinklab.device import float32_if_emulated, pick_device
from sinklab.errors import InputError
from sinklab.models.huggingface.advice import advice
from sinklab.models.huggingface.anatomy import quantisation, vocabulary_size
from sinklab.models.huggingface.gguf import Gguf, as_ordinary, check_memory, find_gguf, read_header
from sinklab.models.huggingface.subfolder import commit_of, tokenizer_options

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
        device: auto (CUDA where there is one, else the CPU), cpu, cuda, cuda:N, or map: the weights are spread over
            cards, memory and disk (accelerate's `device_map="auto"`).
        trust_remote_code: run the code that comes with it.
        revision: branch, tag or commit of a model of the hub; None for its main branch.
        subfolder: in which the model lies (subfolder.py); of a directory, what its path ends with.
        say: is told of what takes a while.
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
        notes: what a reader of its numbers must know of how it was loaded.
        commit: of the hub, of a model that came from there.
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
        check: is given the tokenizer before the weights are read, which may take minutes; what it raises is raised.

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
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}): give a decoder-only language model")
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
    elif quantisation(config):  # its weights are unpacked for the device they are loaded to, and stay there
        load["device_map"] = {"": target}
    model, info = source.read("weights", AutoModelForCausalLM.from_pretrained, load | source.weight_options())
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"the weights of {name} are incomplete: {len(missing)} tensors are missing, such as {missing[0]}. "
            "Copy the whole model again; untrained weights are not measured."
        )
    ignored = _without_a_place(info["unexpected_keys"])
    if source.gguf is None:  # else they come from one file; transformers adds <|endoftext|> where it is not in it
        _check_vocabulary(name, model, tokenizer)
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
        name: as the user calls it.
        place: as transformers does: a folder, or a name on the hub.
        options: of every from_pretrained.
        gguf: the file, if it is one.
    """

    name: str
    place: str
    options: dict[str, Any]
    gguf: Gguf | None

    def read(self, part: str, from_pretrained: Any, more: dict[str, Any] | None = None) -> Any:
        """Call a from_pretrained; whatever it raises becomes a sentence."""
        try:
            return from_pretrained(self.place, **self.options, **(more or {}))
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, RuntimeError and its parts' own
            why = advice(error, self.place, self.options["revision"], self.gguf and self.gguf.architecture)
            revision = f" at revision {self.options['revision']}" if self.options["revision"] else ""
            raise InputError(f"the {part} of {self.name}{revision} could not be loaded: {why}") from error

    def weight_options(self) -> dict[str, Any]:
        """What only the weights are read with."""
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
    """Refuse a revision of what is not on the hub.

    Raises:
        InputError: the name is a path here.
    """
    if revision is not None and Path(name).expanduser().exists():
        raise InputError(
            f"--revision {revision} names a version on the Hugging Face hub, and {name} lies here: leave it out"
        )


def _faster_dtype(own: torch.dtype, target: torch.device | None) -> "tuple[torch.dtype | str, list[str]]":
    """float32 and a note on why, where the device emulates a checkpoint's own dtype; else "auto".

    Args:
        target: the device; None where the weights are spread, over cards if there are any.
    """
    faster = float32_if_emulated(own, target or pick_device("auto"))
    if faster == own:
        return "auto", []
    name = str(own).removeprefix("torch.")
    return faster, [
        f"the weights are {name} and were measured in float32: this processor has no {name} products of its own, "
        f"and emulates them slowly (--dtype {name} has it do so)"
    ]


def _without_a_place(names: Iterable[str]) -> list[str]:
    """A note on tensors of the checkpoint that the model's config has no place for."""
    ignored = sorted(names)
    if not ignored:
        return []
    return [
        f"{len(ignored)} tensors of the checkpoint were ignored, such as {ignored[0]}: the config has no place for "
        "them, so what was measured is not the whole checkpoint"
    ]


def pick_dtype(dtype: str) -> "torch.dtype | str":
    """The dtype of a --dtype option; "auto" stays.

    Raises:
        InputError: not one of DTYPES.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    return "auto" if dtype == "auto" else getattr(torch, dtype)


def check_config(name: str, loading: Loading = AS_IT_IS) -> None:
    """Refuse a model whose config cannot be read; neither its tokenizer nor its weights are looked at.

    Raises:
        InputError: no such directory or name, or no config.
    """
    if find_gguf(name) is None:
        from transformers import AutoConfig

        register()
        _find(name, loading).read("config", AutoConfig.from_pretrained)


def load_pretrained_tokenizer(name: str, loading: Loading = AS_IT_IS) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model, without its weights.

    Raises:
        InputError: no such directory, file or name, or no tokenizer.
    """
    from transformers import AutoTokenizer

    return _find(name, loading).read("tokenizer", AutoTokenizer.from_pretrained)


def check_name(name_or_dir: str) -> None:
    """Refuse what is neither there nor could be a name on the hub, which is then not asked.

    Raises:
        InputError: says what a MODEL may be.
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


def _check_vocabulary(name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    largest, rows = max(tokenizer.get_vocab().values()), vocabulary_size(model)
    if largest >= rows:
        raise InputError(
            f"the tokenizer of {name} has token ids up to {largest} and the model knows {rows} tokens: "
            "it belongs to another model; put the right tokenizer files beside the weights"
        )
