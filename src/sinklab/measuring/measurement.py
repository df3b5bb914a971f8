"""The result of a measurement and its two files, `measurement.json` and `measurement.npz` (schema 1).

L attention layers, H heads, T positions, N sequences, M blocks of the residual stream. In a model where every block
has attention, M = L. Fields that do not apply to a model are None, and left out of the .npz; NaN is never written.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from sinklab import display
from sinklab.errors import InputError
from sinklab.files import parse_json, write_json, written_aside
from sinklab.measuring.activations import MassiveActivation
from sinklab.measuring.explored import Explored
from sinklab.measuring.findings import Ablation, Mixing, Propositions
from sinklab.measuring.frames import TABLES, Columns, TableName, data_frame, write_csv, write_parquet
from sinklab.measuring.metrics import uniform_ratio_of_means
from sinklab.measuring.options import Inputs
from sinklab.measuring.statistics.details import Details
from sinklab.measuring.statistics.secondary import Percent
from sinklab.measuring.statistics.statistic_base import Array, ArrayOrNone, Axes, WithArrays
from sinklab.outputs import MEASUREMENT, check_files
from sinklab.schema import Ratio

ColumnValues = np.ndarray | Sequence[float] | None
LEFT_OUT = (
    "step",
    "planned_steps",
    "vocabulary",
    "sink_rates_bias",
    "sink_rate_window_start",
    "norm_ratio_before_norm",
    "norm_ratio_sink_token",
    "gradient_norm_ratio",
    "details",
    "ablations",
    "mixing",
    "propositions",
    "explored",
    "scores",
)
"""Of measurement.json, where they are None."""


class Measurement(WithArrays):
    """Sinks, norms and loss of one model on one set of sequences.

    Attributes:
        model: its name or path.
        revision: requested branch, tag or commit of a model of the hub; None for its main branch and for local models.
        commit: the commit of the hub that was loaded; None for local models.
        step, planned_steps: of a run of ours, the step it was measured at and its last one; None for other models.
        vocabulary: digest of the tokenizer's vocabulary (spelling.py); None if the input was tokens, or in older
            files.
        inputs: the kind of sequences.
        sequences: N.
        length: T, the positions of the longest sequence, BOS included.
        eps: threshold of the sink rate.
        bos: whether position 1 is a special token put there by the tokenizer or the loader.
        proxy: whether importance is that of proxy scores, |sim| / sum |sim| (the model's own do not sum to one).
        layers, heads: L, H.
        sink_rate: percent of (sequence, layer, head) triples with alpha_k > eps, position 1 first.
        sink_rates: the same for every requested threshold, keyed by it ("0.3"); None if there was only one.
        sink_rate_visible, sink_rates_visible: as sink_rate and sink_rates, of the mean over the queries that may see a
            key, not over all from it on; None if that is the same in every layer (no window, no documents).
        sink_rate_by_length: of the same sequences cut shorter, by length and threshold: {"16": {"0.3": [..]}}.
        sink_rate_bias: the same for an added bias, sink logit or sink token; None if the model has none.
        sink_rates_bias: that for every threshold; None, and left out of the files, where there was only one.
        sink_rate_window_start: the same for the first key of a window, the mean over the queries that no longer see
            position 1; None, and left out of the files, without a window that has moved on.
        uniform_ratio: alpha_k over that of uniform causal attention (metrics.py), mean over (sequence, layer, head),
            position 1 first: 1 is no sink, at any T.
        loss: nats per token over targets 2..T, those after the prefix under a prefix mask; None if there are none.
        bits_per_byte: the loss over the bytes of the targets' text; None if the input is not text, or for the reason
            in the notes.
        hidden_norm_ratio: |h_1| / mean over t > 1 of |h_t| before the first block and after every block (M + 1).
            inf, which is null in measurement.json, where the others are 0 and the first is not; 1 where all are 0.
        norm_ratio_before_norm: of a post-norm model the same of the input of each norm, two per block; None elsewhere.
        norm_ratio_sink_token: |h| of the first learned position over the mean of the tokens'; None if none leads.
        key_norm_ratio, value_norm_ratio: the same for keys and values, per attention layer (L).
        gradient_norm_ratio: R_GS, the gradient's norm at position 1 over the mean of 2 .. 32, per attention layer (L;
            gradients.py); None, and left out of the files, unless requested.
        backend: of the attention; "eager" where the model's own matrices had to be read.
        dtype: of the model.
        seconds: wall-clock, forward passes and metric.
        peak_memory_mb: of the device (CUDA) or of the whole process; None if unknown.
        massive_activations: the largest |activation| of each of the strongest blocks (activations.py); None if unknown.
        details: further statistics (details.py); None, and left out of the files, where not requested.
        notes: remarks for the reader, such as on a batch that had to be halved.
        ablations: loss and sinks under each ablation (ablations.py); None unless requested.
        mixing: how far a change of one token spreads (mixing.py); None unless requested.
        propositions: check of the paper's propositions on repeated tokens (propositions.py); None for other inputs.
        explored: attention maps of one sequence (explored.py); None unless requested.
        scores: on downstream tasks, percent, where the model was evaluated on any; None elsewhere.
        importance: alpha, mean over sequences (L, H, T).
        importance_visible: mean over the queries that may see a key (L, H, T); None if that is alpha everywhere.
        importance_first: alpha of position 1 (N, L, H).
        importance_bias: alpha of the added bias or sink token, mean over sequences (L, H); None if a layer has none.
        importance_registers: alpha of each register (L, H, R); None if there are not several.
        row_sums: mean over sequences and queries of the sum of raw scores (L, H); None if rows sum to one.
        hidden_norm: mean l2 norm (M + 1, T).
        gradient_norm: norm of the gradient of the mean loss at the input of attention (L, T); None unless requested.
        key_norm, value_norm: mean l2 norm over sequences and heads (L, T).
    """

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str
    revision: str | None = None
    commit: str | None = None
    step: int | None = None
    planned_steps: int | None = None
    vocabulary: str | None = None
    inputs: Inputs
    sequences: int = Field(ge=1)
    length: int = Field(ge=1)
    eps: float = Field(gt=0, lt=1)
    bos: bool
    proxy: bool
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    sink_rate: list[Percent]
    sink_rates: dict[str, list[Percent]] | None = None
    sink_rate_visible: list[Percent] | None = None
    sink_rates_visible: dict[str, list[Percent]] | None = None
    sink_rate_by_length: dict[str, dict[str, list[Percent]]] | None = None
    sink_rate_bias: Percent | None
    sink_rates_bias: dict[str, Percent] | None = None
    sink_rate_window_start: Percent | None = None
    uniform_ratio: list[Annotated[FiniteFloat, Field(ge=0)]]
    loss: FiniteFloat | None
    bits_per_byte: FiniteFloat | None = None
    hidden_norm_ratio: list[Ratio] | None
    norm_ratio_before_norm: list[Ratio] | None = None
    norm_ratio_sink_token: list[Ratio] | None = None
    key_norm_ratio: list[Ratio] | None
    value_norm_ratio: list[Ratio] | None
    gradient_norm_ratio: list[Ratio] | None = None
    backend: str
    dtype: str
    seconds: float = Field(ge=0)
    peak_memory_mb: FiniteFloat | None
    massive_activations: list[MassiveActivation] | None = None
    details: Details | None = None
    notes: list[str] = Field(default_factory=list)
    ablations: list[Ablation] | None = None
    mixing: Mixing | None = None
    propositions: Propositions | None = None
    explored: Explored | None = None
    scores: dict[str, Percent] | None = None
    importance: Annotated[Array, Axes("LHT")]
    importance_visible: Annotated[ArrayOrNone, Axes("LHT")] = None
    importance_first: Annotated[Array, Axes("NLH")]
    importance_bias: Annotated[ArrayOrNone, Axes("LH")] = None
    importance_registers: Annotated[ArrayOrNone, Axes("LHR")] = None
    row_sums: Annotated[ArrayOrNone, Axes("LH")] = None
    hidden_norm: Annotated[ArrayOrNone, Axes("MT")] = None
    key_norm: Annotated[Array, Axes("LT")]
    value_norm: Annotated[Array, Axes("LT")]
    gradient_norm: Annotated[ArrayOrNone, Axes("LT")] = None

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        L, H, T = self.layers, self.heads, self.length
        places = {"M": len(self.hidden_norm_ratio)} if self.hidden_norm_ratio else {}
        self.check_arrays(L=L, H=H, T=T, N=self.sequences, **places)
        if self.details is not None and self.details.entropy.shape != (L, H):
            raise ValueError(f"details_entropy has shape {self.details.entropy.shape}, expected {(L, H)}")
        for name in ("sink_rate", "sink_rate_visible", "uniform_ratio"):
            rates: list[float] | None = getattr(self, name)
            if rates is not None and len(rates) != T:
                raise ValueError(f"{name} has {len(rates)} values, expected {T}")
        return self

    def of_step(self, step: int, planned_steps: int) -> Self:
        """A copy for a run that was measured at `step`, with a note where the run is unfinished."""
        unfinished = f"measured at step {step:,} of {planned_steps:,}: the run is not finished"
        notes = [*self.notes, *([unfinished] if step < planned_steps else [])]
        return self.model_copy(update={"step": step, "planned_steps": planned_steps, "notes": notes})

    def document(self) -> dict[str, Any]:
        """The content of `measurement.json`, without the fields of LEFT_OUT that are None."""
        absent = {name for name in LEFT_OUT if getattr(self, name) is None}
        return self.model_dump(mode="json", by_alias=True, exclude=absent)

    def save(self, folder: Path | str) -> None:
        """Write `measurement.npz`, then `measurement.json`, each atomically.

        Raises:
            InputError: `folder` is a file, or has files of these names that sinklab did not write.
            SinklabError: the disk is full or the folder cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: give the folder of the measurement")
        check_files(folder, MEASUREMENT)
        arrays: dict[str, Any] = self.arrays()
        for part in filter(None, (self.details, self.explored)):
            arrays |= part.arrays()
        with written_aside(folder / "measurement.npz") as aside, aside.open("wb") as file:
            np.savez(file, **arrays)
        write_json(folder / "measurement.json", self.document())

    def plot(self, what: Literal["heads", "layers", "positions", "norms"] = "heads") -> Any:
        """An Altair chart: importance of the first token by head, of every position by layer or in all, or the norms.

        Raises:
            InputError: there is no such chart.
        """
        return display.chart(self, what)

    def sink_rate_of_heads(self) -> np.ndarray:
        """Percent of the sequences in which alpha of position 1 is above eps (L, H); their mean is Sink_1."""
        return 100 * (self.importance_first > self.eps).mean(0)

    def columns(self, table: TableName = "importance") -> Columns:
        """A table as columns of one length, in which positions, layers and heads count from 1.

        | table | a row for | columns |
        |---|---|---|
        | importance | every layer, head and position | layer, head, position, importance |
        | positions | every position | position, sink_rate, sink_rate_eps_X for other thresholds (%), uniform_ratio |
        | layers | every attention layer | layer, importance_first, hidden_norm_ratio (after the block), .. |

        Columns that the model does not have are left out. Where a mask makes a difference, each importance and rate has
        a `_visible` column too (mask_coverage.py).

        Raises:
            InputError: there is no such table.
        """
        if table not in TABLES:
            raise InputError(f"there is no table {table!r}: choose from {', '.join(TABLES)}")
        found = {"importance": self._every_importance, "positions": self._positions, "layers": self._layers}[table]()
        return {name: np.asarray(values) for name, values in found.items() if values is not None}

    def _every_importance(self) -> dict[str, ColumnValues]:
        layer_LHT, head_LHT, position_LHT = np.indices(self.importance.shape) + 1
        return {
            "layer": layer_LHT.ravel(),
            "head": head_LHT.ravel(),
            "position": position_LHT.ravel(),
            "importance": self.importance.ravel(),
            "importance_visible": None if self.importance_visible is None else self.importance_visible.ravel(),
        }

    def _positions(self) -> dict[str, ColumnValues]:
        found: dict[str, ColumnValues] = {"position": np.arange(1, self.length + 1), "sink_rate": self.sink_rate}
        found["sink_rate_visible"] = self.sink_rate_visible
        for eps in list(self.sink_rates or {})[1:]:
            found[f"sink_rate_eps_{eps}"] = (self.sink_rates or {})[eps]
            found[f"sink_rate_visible_eps_{eps}"] = (self.sink_rates_visible or {}).get(eps)
        found["uniform_ratio"] = self.uniform_ratio
        return found

    def _layers(self) -> dict[str, ColumnValues]:
        hidden, visible = self.hidden_norm_ratio or [], self.importance_visible
        return {
            "layer": np.arange(1, self.layers + 1),
            "importance_first": self.importance[:, :, 0].mean(1),
            "importance_first_visible": None if visible is None else visible[:, :, 0].mean(1),
            "importance_bias": None if self.importance_bias is None else self.importance_bias.mean(1),
            "row_sum": None if self.row_sums is None else self.row_sums.mean(1),
            "hidden_norm_ratio": hidden[1:] if len(hidden) == self.layers + 1 else None,
            "key_norm_ratio": self.key_norm_ratio,
            "value_norm_ratio": self.value_norm_ratio,
            "gradient_norm_ratio": self.gradient_norm_ratio,
        }

    def to_dataframe(self, table: TableName = "importance") -> Any:
        """A data frame of the installed one of pandas, polars and pyarrow, by default a row per head and position.

        Args:
            table: of `columns`.

        Raises:
            InputError: there is no such table, or none of the three is installed.
        """
        return data_frame(self.columns(table))

    def to_csv(self, path: str | Path, table: TableName = "importance") -> None:
        """The same table as comma-separated values.

        Raises:
            InputError, SinklabError: as `columns` and `frames.write_csv`.
        """
        write_csv(self.columns(table), Path(path))

    def to_parquet(self, path: str | Path, table: TableName = "importance") -> None:
        """The same table as a Parquet file; needs pyarrow.

        Raises:
            InputError, SinklabError: as `columns` and `frames.write_parquet`.
        """
        write_parquet(self.columns(table), Path(path))

    def _repr_html_(self) -> str:
        """Its tables, for notebooks."""
        return display.html(self)

    @classmethod
    def load(cls, folder: Path | str) -> "Measurement":
        """Read what `save` wrote.

        Raises:
            InputError: a file is missing or damaged, or the two do not belong together.
        """
        folder = Path(folder)
        advice = f"{folder} holds no usable measurement; run `sinklab measure` again with --out {folder}"
        try:
            document = parse_json((folder / "measurement.json").read_text(encoding="utf-8"))
            if not isinstance(document, dict):
                raise ValueError("measurement.json holds no mapping of keys to values")
            with np.load(folder / "measurement.npz", allow_pickle=False) as file:
                arrays = dict(file)
            if document.get("details"):
                document["details"] = {**document["details"], **Details.found_in(arrays)}
            if document.get("explored"):
                document["explored"] = {**document["explored"], **Explored.found_in(arrays)}
            if "uniform_ratio" not in document and "importance" in arrays:  # older files
                document["uniform_ratio"] = uniform_ratio_of_means(arrays["importance"])
            return cls.model_validate({**document, **cls.found_in(arrays)})
        except FileNotFoundError as error:
            raise InputError(f"{advice}: {Path(error.filename).name} is missing") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "measurement.npz"
            raise InputError(f"{advice}: {where}: {first['msg']}") from error
        except Exception as error:  # the reader of a damaged archive can raise anything
            raise InputError(f"{advice}: {error}") from error
