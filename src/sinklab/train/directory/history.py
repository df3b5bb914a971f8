"""metrics.jsonl: a run appends a line per evaluation; resumed runs and reports read it."""

import gzip
import json
import logging
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import append_line, parse_json, write_text
from sinklab.schema import Ratio, ReadDocument

log = logging.getLogger(__name__)


class Evaluation(ReadDocument):
    """One evaluation of a run. Values that another version did not write, or that were not finite, are None or empty.

    Attributes:
        step: updates made.
        tokens: trained on so far.
        train_loss: mean cross-entropy over the batches since the evaluation before, nats per token.
        valid_loss: cross-entropy on held-out documents, nats per token.
        valid_added_losses: on the same, each loss that training adds to it (`losses` of a recipe), weighted, by name.
        sink_rate: percent of (sequence, layer, head) triples, position 1 first.
        sink_rate_visible: the same of the mean over the queries that may see a key; None if both are the same.
        sink_rate_bias: percent, of a bias, sink logit or sink token.
        sink_rate_heads: percent of the sequences in which the first position is a sink, by attention layer and head.
        sink_rate_eps, sink_rate_visible_eps: Sink_1 by threshold ("0.3", "0.2", "0.4"), percent; the latter None if
            sink_rate_visible is.
        sink_rate_bias_eps: sink_rate_bias by threshold; None if that is.
        sink_rate_window_start: percent, of the first key of a window that has moved on; None if there is none.
        norm_ratio_before_norm, norm_ratio_sink_token: as hidden_norm_ratio, of what enters the norms of a post-norm
            model, and of the first learned position in front; None elsewhere.
        importance_first_heads: alpha of the first position, mean over sequences, by attention layer and head (0..1).
        hidden_norm_ratio: |h_1| over the mean of the others, before the first block and after every block; infinite,
            and null in the file, where the others are 0.
        lr: of the last update.
        grad_norm: of the last update, before clipping.
        tokens_per_second: of the updates since the evaluation before; None if another process made them.
        mfu: share of the peak operations per second (0..1).
        stall_share: share of the time spent waiting for batches (0..1).
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
    sink_rate_window_start: float | None = None
    norm_ratio_before_norm: list[Ratio] | None = None
    norm_ratio_sink_token: list[Ratio] | None = None
    importance_first_heads: list[list[float | None]] | None = None
    hidden_norm_ratio: list[Ratio] = Field(default_factory=list)
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    stall_share: float | None = None

    @property
    def rate_layers(self) -> list[float | None]:
        """Of each layer with attention, the rate of the head that sinks most often; None if none is known."""
        return [max((one for one in rates if one is not None), default=None) for rates in self.sink_rate_heads or ()]

    @property
    def largest_norm_ratio(self) -> float | None:
        """Maximum of the norm ratio over all blocks; None if unknown."""
        return max(self.hidden_norm_ratio, default=None)


class History:
    """metrics.jsonl of a run while it is written; of several processes only the first writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = ""

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Make the file hold these evaluations and no others."""
        self._text = "".join(json.dumps(row) + "\n" for row in rows)
        if self.path.exists() and not self._is_whole():
            write_text(self.path, self._text)

    def add(self, row: dict[str, Any]) -> None:
        """Append an evaluation and flush it to the disk.

        Raises:
            SinklabError: the file cannot be written.
        """
        self.keep()
        line = json.dumps(row)
        append_line(self.path, line)
        self._text += line + "\n"

    def keep(self) -> None:
        """Write the file again where it was changed or removed since the last write, so that no evaluation is lost.

        Raises:
            SinklabError: it cannot be written.
        """
        if not self._text or self._is_whole() or not self.path.parent.is_dir():
            return
        how = "was changed" if self.path.exists() else "was removed"
        log.warning("%s %s: it is written again, with all evaluations", self.path, how)
        write_text(self.path, self._text)

    def _is_whole(self) -> bool:
        try:
            return self.path.read_bytes() == self._text.encode()
        except OSError:
            return False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run as they were written; a last line torn by a kill is left out.

    Raises:
        SinklabError: another line is no evaluation, or the file cannot be read.
    """
    return list(_rows(path).values())


def read_history(path: Path) -> list[Evaluation]:
    """The evaluations of a run by step; where a resumed run repeats a step, the later one counts.

    Where there is no such file, its compressed form with the suffix .gz is read.

    Raises:
        InputError: the file cannot be read, or a line is no evaluation.
    """
    compressed = path.with_name(path.name + ".gz")
    path = compressed if compressed.is_file() and not path.is_file() else path
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
    """The objects of a file by the number of their line."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SinklabError(f"{path} is damaged: it cannot be uncompressed ({error}).") from error
    except OSError as error:
        raise SinklabError(f"cannot read {path}: {error.strerror or error}.") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines) and line.strip("\0")[:1] in ("{", ""):  # torn, or a block of zeros after a crash
                break
            raise _damaged(path, number, error) from error
        if row is not None:
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise _damaged(path, number, ValueError("expected an object with a whole number as its step"))
            rows[number] = row
    return rows


def _damaged(path: Path, number: int, error: ValueError) -> SinklabError:
    return SinklabError(
        f"{path}, line {number}, is damaged ({cause(error)}): restore the file, or remove it to continue without it"
    )


def seconds_spent(history: Sequence[Evaluation]) -> float:
    """Seconds of training: the tokens between two evaluations over their speed, nothing where that is unknown."""
    seconds, before = 0.0, 0.0
    for one in history:
        tokens = before if one.tokens is None else one.tokens
        if one.tokens_per_second:
            seconds += (tokens - before) / one.tokens_per_second
        before = tokens
    return seconds


def finite(value: Any) -> Any:
    """The same document with NaN and infinities, which JSON lacks, as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
