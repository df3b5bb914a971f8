"""GGUF files (llama.cpp): config, tokenizer, chat template and weights in one file.

transformers reads these files with the packages gguf and accelerate, and dequantises the weights to an ordinary dtype.
transformers 5.23 parses the header separately for config, tokenizer and weights, which is slow because the header
contains the whole vocabulary. Here it is parsed once (`parsed_once`).
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sinklab.errors import InputError, cause, require_extra
from sinklab.models.memory_budget import free_bytes

SUFFIX = ".gguf"
PART = re.compile(r"(.+-)\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class Gguf:
    """Header of a GGUF file.

    Attributes:
        path: absolute path of the file.
        architecture: name of the architecture in llama.cpp.
        types: tensor types ("Q4_1", "F32") in descending order of their number of weights.
        weights: number of weights.
        scaled: whether the file has RoPE frequency factors (Llama 3.1).
        reader: parsed header, from the package gguf.
    """

    path: Path
    architecture: str
    types: tuple[str, ...]
    weights: int
    scaled: bool
    reader: Any = field(repr=False, compare=False)

    def notes(self, dtype: str) -> list[str]:
        """Return notes for the result: on the quantisation, and on RoPE frequency factors that are ignored.

        Args:
            dtype: name of the dtype of the dequantised weights.
        """
        main, *others = self.types
        also = f", some tensors {' and '.join(others)}" if others else ""
        notes = [f"the weights were read from a gguf file ({main}{also}) and dequantised to {dtype}"]
        if self.scaled:
            notes.append(
                "the gguf file has RoPE frequency factors (rope_freqs), which transformers ignores: "
                "distant positions are rotated more than in the original"
            )
        return notes

    def weight_options(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that dequantise the weights."""
        from transformers import GgufConfig

        return {"quantization_config": GgufConfig(dequantize=True)}

    @contextmanager
    def parsed_once(self) -> Iterator[None]:
        """Make transformers reuse the parsed header and hide its progress bar in the `with` block."""
        gguf = import_module("gguf")
        parse, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
        once = patch.multiple(
            gguf,
            GGUFReader=lambda path: self.reader if Path(path) == self.path else parse(path),
            get_tensor_name_map=cache(name_map),  # otherwise rebuilt for every module
        )
        with once, patch("transformers.modeling_gguf_pytorch_utils.tqdm", lambda tensors, **_: tensors):
            yield


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model that is split like NAME-00001-of-00003.gguf, in order; else the path alone."""
    named = PART.fullmatch(path.name)
    if named is None:
        return [path]
    total = int(named[2])
    return [path.with_name(f"{named[1]}{number:05}-of-{total:05}{named[3]}") for number in range(1, total + 1)]


def find_gguf(name_or_dir: str) -> Path | None:
    """Return the absolute path of the .gguf file: the name itself, or the only .gguf file in a directory.

    None for a directory that has no .gguf file or has safetensors files, and for a name on the hub.

    Raises:
        InputError: if the name ends in .gguf and does not exist, or the directory has several .gguf files.
    """
    path = Path(name_or_dir)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        if not path.is_file():
            raise InputError(f"there is no file {name_or_dir}: pass the path of a .gguf file")
        return path.absolute()
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if files and set(files) == set(parts_of(files[0])):  # one model in parts
        return files[0].absolute()
    if len(files) > 1:
        few = ", ".join([file.name for file in files[:3]] + [".."] * (len(files) > 3))
        raise InputError(f"{name_or_dir} has {len(files)} .gguf files ({few}): pass one of them, such as {files[0]}")
    return files[0].absolute() if files else None


def read_header(path: Path) -> Gguf:
    """Read the header of a GGUF file, without its weights; of a model in parts, those of all its files.

    Raises:
        InputError: if gguf or accelerate is not installed, or a file cannot be read, is damaged or truncated, or has no
            weights, or a part of the model is missing.
    """
    require_extra("gguf", ("gguf", "accelerate"), f"reading {path.name}")

    base: Any = import_module("gguf").GGUFReader

    class Reader(base):
        def _get(self, *args: Any, **options: Any) -> Any:
            self.data = np.asarray(self.data)  # slicing an array is three times as fast as slicing a memmap
            return super()._get(*args, **options)

    def read(file: Path) -> Any:
        try:
            found = Reader(file)
            count = found.get_field("split.count")
            return found, 1 if count is None else int(count.contents())
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or cause(error)}") from error
        except Exception as error:  # the reader raises various exceptions on damaged files
            raise InputError(
                f"{file} is damaged, truncated, or not a gguf file ({type(error).__name__}: {cause(error)}): copy it "
                "again"
            ) from error

    files = parts_of(path)
    if missing := [file.name for file in files if not file.is_file()]:
        raise InputError(f"{path} is one of {len(files)} parts of a model, and {missing[0]} is missing beside it")
    path, (reader, parts) = files[0], read(files[0])
    if parts != len(files):
        raise InputError(
            f"{path} is one of the {parts} parts of a model, whose files must have the names that llama.cpp gives "
            "them (NAME-00001-of-00003.gguf): rename them"
        )
    for file in files[1:]:
        reader.tensors.extend(read(file)[0].tensors)
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise InputError(f"{path} is not the gguf file of a model: it has no general.architecture")
    weights = Counter[str]()
    for tensor in reader.tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    if not weights:
        raise InputError(f"{path} has no weights (a vocabulary only?): use the .gguf file of a model")
    types = tuple(name for name, _ in weights.most_common())
    scaled = any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)
    return Gguf(path, architecture.contents(), types, weights.total(), scaled, reader)


def check_memory(file: Gguf, dtype: torch.dtype, device: torch.device) -> None:
    """Check that the dequantised weights fit in the free memory; otherwise the system may kill the process.

    Raises:
        InputError: if the weights need more memory than is free; not if the free memory is unknown.
    """
    needed, free = file.weights * dtype.itemsize, free_bytes(device)
    if free is not None and needed > free:
        advice = "" if dtype.itemsize < 4 else "; --dtype bfloat16 needs less"
        raise InputError(
            f"{file.path.name} needs {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and "
            f"{free / 1e9:.1f} GB of memory are free: use a machine with more memory{advice}"
        )
