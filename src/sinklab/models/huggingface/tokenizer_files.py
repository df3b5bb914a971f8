"""Load the tokenizer of a model such that it gives the ids of its tokenizer.json.

Since version 5, transformers rebuilds the tokenizers of many model types from the vocabulary, with the normalizer and
pre-tokenizer of the class that it selects, and the ids may differ from those of tokenizer.json (transformers #45488,
#45812, #45920). Both are loaded here. If a part that determines ids differs, the one of tokenizer.json is used, with
the special tokens and the chat template of tokenizer_config.json. Rejected alternative: comparing only the ids of a
sample, which misses the characters that are not in the sample.

Checks of a model's files before transformers reads them: sizes that cannot be built, and weights elsewhere.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from sinklab.data.tokenizers import PROBES
from sinklab.errors import InputError
from sinklab.files import read_mapping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenizerKind = Literal["auto", "file", "transformers"]
IRRELEVANT = ("trim_offsets", "special")
"""Settings in a tokenizer.json that have no effect on ids."""
LONGEST_EXAMPLE = 24  # characters
MOST_TOKENS = 6  # of an example


def load_tokenizer(
    name: str, kind: TokenizerKind, read: Callable[[Any], Any], has_file: bool
) -> "tuple[PreTrainedTokenizerBase, list[str]]":
    """Load the tokenizer of a model, and notes on it.

    Args:
        name: name of the model in error messages.
        kind: "file" (the ids of tokenizer.json), "transformers" (those of AutoTokenizer) or "auto" (those of
            tokenizer.json if it exists, with a note if AutoTokenizer has others).
        read: function that loads the tokenizer with a `from_pretrained` method.
        has_file: whether the model has a tokenizer.json.

    Raises:
        InputError: if `kind` is "file" and there is no tokenizer.json; and those of `read`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if kind == "file":
        if not has_file:
            raise InputError(f"--tokenizer file: {name} has no tokenizer.json; leave --tokenizer out")
        return _as_filed(read), []
    rebuilt = read(AutoTokenizer.from_pretrained)
    own_class = type(rebuilt).__module__.startswith("transformers_modules")  # the model's own code
    as_filed = type(rebuilt) is PreTrainedTokenizerFast or not isinstance(rebuilt, PreTrainedTokenizerFast)
    if kind == "transformers" or not has_file or own_class or as_filed:
        return rebuilt, []
    filed = _as_filed(read)
    parts = list(_different_parts(rebuilt, filed))
    if not parts:
        return rebuilt, []
    example = _example(rebuilt, filed)
    return filed, [
        f"the tokenizer is that of tokenizer.json: transformers {version('transformers')} rebuilds it as "
        f"{type(rebuilt).__name__} with another {_listed(parts)}{example} (to use that: --tokenizer transformers)"
    ]


def _as_filed(read: Callable[[Any], Any]) -> Any:
    """Load the tokenizer of tokenizer.json, such that `save_pretrained` can save it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = read(PreTrainedTokenizerFast.from_pretrained)
    tokenizer.init_kwargs.pop("config", None)  # of the model: only AutoTokenizer removes it, and JSON has no such type
    return tokenizer


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _different_parts(one: Any, other: Any) -> Iterator[str]:
    """Yield the names of the parts in which two tokenizers differ, of those that determine ids of text."""
    a, b = (json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (one, other))
    for part in ("normalizer", "pre_tokenizer", "model"):
        if _relevant(a[part]) != _relevant(b[part]):
            yield part.replace("_", "-")
    if _by_content(a["added_tokens"]) != _by_content(b["added_tokens"]):
        yield "set of added tokens"
    if one("")["input_ids"] != other("")["input_ids"]:
        yield "set of special tokens around a text"


def _relevant(part: Any) -> Any:
    """Return a part of a tokenizer.json without settings that have no effect; unset and empty values are equal."""
    if not isinstance(part, dict):
        return part
    kept = {key: value for key, value in part.items() if key not in IRRELEVANT and value not in (None, "", False)}
    return {
        key: [*map(_relevant, value)] if key.endswith("izers") else value  # the vocabulary is compared as it is
        for key, value in kept.items()
    }


def _by_content(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {token["content"]: _relevant(token) for token in tokens}


def _example(rebuilt: Any, filed: Any) -> str:
    """Return a short text for which two tokenizers give different tokens, with these tokens; empty if none is known."""
    words = {word for probe in PROBES for word in probe.split() if len(word) <= LONGEST_EXAMPLE}
    for text in [*sorted(words, key=lambda word: (not word.isascii(), len(word), word)), *PROBES]:
        wrong, right = _tokens(rebuilt, text), _tokens(filed, text)
        if wrong != right:
            shown = repr(text if len(text) <= LONGEST_EXAMPLE else f"{text[:LONGEST_EXAMPLE]}..")
            return f": {shown} is {_shown(right)} in the file, and {_shown(wrong)} there"
    return ""


def _tokens(tokenizer: Any, text: str) -> list[str]:
    try:
        return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # bare ones of the Rust library, for tokens that a rebuilt tokenizer lacks
        return [f"an error ({error})"]


def _shown(tokens: list[str]) -> str:
    few = " | ".join(tokens[:MOST_TOKENS]) or "nothing"
    return f"{few} .." if len(tokens) > MOST_TOKENS else few


INDEX = "model.safetensors.index.json"
MOST_PARTS = 10_000
"""Maximum number of layers or experts in a config. transformers builds each of them, or a list entry for each."""

_NUMBER_OF_PARTS = re.compile(r"(layers?|experts|blocks|stages)$")


def check_counts(name: str, config: Mapping[str, Any], path: str = "") -> None:
    """Check that a config has no absurd number of layers or experts, which would take hours to build.

    Args:
        name: name of the model, for the message.
        config: content of config.json.
        path: key of `config` in the whole config, followed by a dot; empty for the whole.

    Raises:
        InputError: if a number of layers, blocks, stages or experts is greater than `MOST_PARTS`.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(name, value, f"{path}{key}.")
        elif isinstance(value, int) and value > MOST_PARTS and _NUMBER_OF_PARTS.search(str(key)):
            raise InputError(
                f"the config of {name} cannot be right: {path}{key} is {value:,}, and no model has more than "
                f"{MOST_PARTS:,}. Use the config.json that belongs to the weights"
            )


def check_index(folder: Path) -> None:
    """Check that the index of the weights of a local model names only files in the model's folder.

    Raises:
        InputError: if the index cannot be read, or names a file outside the folder.
    """
    if not (folder / INDEX).is_file():
        return
    weights = read_mapping(folder / INDEX, "copy the whole model again").get("weight_map")
    for tensor, file in weights.items() if isinstance(weights, dict) else ():
        if not isinstance(file, str) or file.startswith("/") or ".." in PurePosixPath(file).parts:
            raise InputError(
                f"{folder / INDEX} points outside the model's folder: {tensor} is in {file}. Copy the whole model "
                "again, with all of its .safetensors files in one folder"
            )
