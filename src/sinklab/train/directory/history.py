"""metrics.jsonl of a run: one line per evaluation."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import parse_json, write_text
from sinklab.measuring.registry import Evaluation


def rewrite_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the content of metrics.jsonl by `rows` if it differs. A missing file is not created.

    Raises:
        SinklabError: if the file cannot be written.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.exists() and path.read_bytes() != text.encode():
        write_text(path, text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the evaluations of a run as dicts, in file order. The list is empty if the file is missing.

    An incomplete last line is skipped.

    Raises:
        SinklabError: if the file cannot be read, or a line is not a JSON object with an integer step.
    """
    return list(_rows(path).values())


def read_history(path: Path) -> list[Evaluation]:
    """Read the evaluations of a run, ordered by step. If a step occurs twice, the later line is used.

    The list is empty if the file is missing. An incomplete last line is skipped.

    Raises:
        InputError: if the file cannot be read or a line is invalid.
    """
    by_step = {}
    try:
        for number, row in _rows(path).items():
            try:
                by_step[row["step"]] = Evaluation.model_validate(finite(row))
            except ValueError as error:
                raise _damaged(path, number, error) from error
    except SinklabError as error:
        raise InputError(str(error)) from error
    return [by_step[step] for step in sorted(by_step)]


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """Read the JSON objects of a file by line number, 1-based."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SinklabError(f"cannot read {path}: {error.strerror or error}.") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines) and line.strip("\0")[:1] in ("{", ""):  # truncated, or zeros after a crash
                break
            raise _damaged(path, number, error) from error
        if row is not None:
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise _damaged(path, number, ValueError("expected an object with an integer step"))
            rows[number] = row
    return rows


def _damaged(path: Path, number: int, error: ValueError) -> SinklabError:
    return SinklabError(
        f"{path}, line {number}, is invalid ({cause(error)}): restore the file, or delete it to continue without its "
        "evaluations"
    )


def timed_intervals(history: Sequence[Evaluation]) -> Iterator[tuple[float, float]]:
    """Yield training tokens and seconds of the intervals between evaluations whose throughput is known."""
    before = 0.0
    for one in history:
        tokens = before if one.tokens is None else one.tokens
        if one.tokens_per_second:
            yield tokens - before, (tokens - before) / one.tokens_per_second
        before = tokens


def seconds_spent(history: Sequence[Evaluation]) -> float:
    """Estimate the training time in seconds from tokens and throughput, without intervals of unknown throughput."""
    return sum((seconds for _, seconds in timed_intervals(history)), 0.0)


def finite(value: Any) -> Any:
    """Return a nested value with NaN and infinity, which JSON does not support, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
