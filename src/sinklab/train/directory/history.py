"""metrics.jsonl of a run: one line per evaluation."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import parse_json, write_text
from sinklab.schema import Ratio, ReadDocument


class Evaluation(ReadDocument):
    """One evaluation of a run. Values that are not recorded, not applicable or not finite are None or empty.

    Sink rates in percent, `importance_first_heads` (alpha_1) and norm ratios are as in `Measurement`.

    Attributes:
        step: number of completed updates.
        tokens: number of training tokens so far.
        train_loss: mean cross-entropy over the updates since the previous evaluation, nats per token.
        valid_loss: cross-entropy on held-out documents, nats per token.
        valid_added_losses: weighted value of each auxiliary loss (`losses` of a recipe) on the same documents, by name.
        sink_rate_heads: percent of the sequences in which the first position is a sink, by attention layer and head.
        sink_rate_eps, sink_rate_visible_eps, sink_rate_bias_eps: Sink_1, `sink_rate_visible` of position 1, and
            `sink_rate_bias` for the thresholds `metric.eps`, 0.2 and 0.4, by threshold ("0.3").
        sink_rate_first_or_bias, sink_rate_first_or_bias_eps: sink rate of the attention to the first position and the
            bias together, and by threshold.
        importance_first_heads: alpha_1, mean over sequences, by attention layer and head (0..1).
        dormant_heads: share of the queries t > 1 whose largest attention weight is on the first position or the bias
            (`Measurement.dormant`), by attention layer and head (0..1).
        key_norm_ratio, value_norm_ratio: norm of the first key (value) over the mean of the others, by layer.
        lr: learning rate of the next update.
        grad_norm: gradient norm of the last update, before clipping.
        tokens_per_second: training throughput of all processes since the previous evaluation or the start of this
            process; None without updates since then.
        mfu: model FLOPs utilisation (0..1) in the same period; None if the peak FLOP/s is unknown.
        stall_share: fraction of the same period in which rank 0 waited for batches (0..1).
    """

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0)
    tokens: int | float | None = None
    train_loss: float | None = None
    valid_loss: float | None = None
    valid_added_losses: dict[str, float | None] | None = None
    sink_rate: list[float | None] = Field(default_factory=list)
    sink_rate_visible: list[float | None] | None = None
    sink_rate_bias: float | None = None
    sink_rate_heads: list[list[float | None]] | None = None
    sink_rate_eps: dict[str, float | None] | None = None
    sink_rate_visible_eps: dict[str, float | None] | None = None
    sink_rate_bias_eps: dict[str, float | None] | None = None
    sink_rate_first_or_bias: float | None = None
    sink_rate_first_or_bias_eps: dict[str, float | None] | None = None
    sink_rate_window_start: float | None = None
    norm_ratio_before_norm: list[Ratio] | None = None
    norm_ratio_sink_token: list[Ratio] | None = None
    importance_first_heads: list[list[float | None]] | None = None
    dormant_heads: list[list[float | None]] | None = None
    hidden_norm_ratio: list[Ratio] = Field(default_factory=list)
    key_norm_ratio: list[Ratio] | None = None
    value_norm_ratio: list[Ratio] | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    stall_share: float | None = None

    @property
    def rate_layers(self) -> list[float | None]:
        """Maximum of `sink_rate_heads` by attention layer (%), None if unknown; empty without `sink_rate_heads`."""
        return [highest_known(rates) for rates in self.sink_rate_heads or ()]

    @property
    def largest_norm_ratio(self) -> float | None:
        """Maximum of `hidden_norm_ratio` before the first block and after every block; None if unknown."""
        return max(self.hidden_norm_ratio, default=None)


def highest_known(values: Sequence[float | None]) -> float | None:
    """Return the maximum of the values that are not None; None if there are no such values."""
    return max((one for one in values if one is not None), default=None)


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
