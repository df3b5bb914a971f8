"""Comparison of two recordings: numbers bit by bit, other files by content, without times, memory and versions."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

CLOCK = re.compile(
    r"(seconds|tokens_per_second|peak_memory|memory_mb|stall|time|mfu|speed|created|begun|version|git|hours|host|per_second|changed_files)"
    r"|^(files|text|identity)$"  # hashes that may depend on modification times
)
DURATION = re.compile(
    r"data stall \d+%|\b\d[\d,.]*\s?(s|ms|min|MB|GB|tokens/s|h|it/s)\b|\d+:\d\d(:\d\d)?( UTC)?|\d{4}-\d\d-\d\d"
)
LEFT_OUT = (
    *("lock", "SHA256SUMS", "checksums.txt", "lab.err", "lab.out"),
    *("two_seeds.err", "five_seeds.err", "grid.err", "tuned.err"),
)
"""Files that are not compared, because they name a process or have lines in no fixed order."""
NOT_COMPARED = ("[transformers]", "Loading weights", "training the tokenizer", "preparing tokens")
PRINTED = (".out", ".err", ".md", ".html", ".svg", ".txt")
INPUTS = ("cache", "committed", "text")


def compare(before: Path, after: Path, common: bool, numbers: bool) -> int:
    """Print up to five differences of each file, and return the number of files that differ.

    Args:
        common: skip files that are in only one recording.
        numbers: skip reports, printed text other than JSON, and results that are sentences.
    """
    differences = counted = 0
    names = {path.relative_to(root) for root in (before, after) for path in root.rglob("*") if path.is_file()}
    for name in sorted(names):
        if name.parts[0] in INPUTS or name.name.startswith((".", "events.out")) or name.name in LEFT_OUT:
            continue
        absent = [root for root in (before, after) if not (root / name).is_file()]
        if (absent and common) or (numbers and name.suffix in PRINTED and not _is_json(before / name)):
            continue
        counted += 1
        found = [f"absent in {absent[0]}"] if absent else list(_differences(before / name, after / name, numbers))
        if "measured" in name.parts:
            found = [one for one in found if ".hash: " not in one]  # includes the path of the text
        for one in found[:5]:
            print(f"{name}: {one}")
        differences += bool(found)
    print(f"{counted} files compared, {differences} differ")
    return differences


def _is_json(path: Path) -> bool:
    return path.suffix == ".out" and path.is_file() and path.read_bytes()[:1] in (b"{", b"[")


def _differences(one: Path, other: Path, numbers: bool) -> Iterator[str]:
    match one.suffix:
        case ".json":
            yield from _unequal(json.loads(one.read_text("utf-8")), json.loads(other.read_text("utf-8")), "", numbers)
        case ".jsonl":
            pairs = [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in (one, other)]
            yield from _unequal(pairs[0], pairs[1], "", numbers)
        case ".npz":
            with np.load(one) as first, np.load(other) as second:
                for key in sorted({*first.files, *second.files}):
                    if key not in first.files or key not in second.files:
                        yield f"{key} is in one only"
                    elif first[key].dtype != second[key].dtype or first[key].tobytes() != second[key].tobytes():
                        yield f"{key} differs"
        case ".safetensors":
            first, second = load_file(one), load_file(other)
            yield from (key for key in sorted({*first, *second}) if not _same_tensor(first.get(key), second.get(key)))
        case ".html" | ".svg" if "drawn" not in one.parts:
            return  # made from results with other times
        case ".py" | ".gz":
            return  # code of an export, and packed runs, which contain times (the run directories are compared)
        case ".out" | ".err" | ".md" | ".yaml" | ".html":
            first, second = _lines(one), _lines(other)
            if _is_json(one) and _is_json(other):
                yield from _unequal(
                    json.loads(one.read_text("utf-8")), json.loads(other.read_text("utf-8")), "", numbers
                )
            elif first != second:
                pairs = [(a, b) for a, b in zip(first, second, strict=False) if a != b]
                yield f"{pairs[0][0]!r} / {pairs[0][1]!r}" if pairs else f"{len(first)} / {len(second)} lines"
        case _:
            if one.read_bytes() != other.read_bytes():
                yield "bytes differ"


def _lines(path: Path) -> list[str]:
    """Return the lines of a text, without durations, warnings of transformers, data preparation, and progress."""
    lines = path.read_text("utf-8").splitlines()
    lines = [re.sub("(  #)+|  about # left", "", DURATION.sub("#", line)) for line in lines]
    return [line for line in lines if not line.startswith(NOT_COMPARED) and not line.endswith("# so far")]


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _unequal(one: Any, other: Any, where: str, numbers: bool) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if CLOCK.search(str(key)):
                continue
            if key not in one or key not in other:
                yield f"{where}.{key} is in one only"
            else:
                yield from _unequal(one[key], other[key], f"{where}.{key}", numbers)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _unequal(a, b, f"{where}[{index}]", numbers)
    elif numbers and all(isinstance(value, str) and " " in value for value in (one, other)):
        return
    elif one != other and not (one != one and other != other):
        yield f"{where}: {repr(one)[:80]} / {repr(other)[:80]}"
