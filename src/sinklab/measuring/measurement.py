"""The result of a measurement, its two files, `measurement.json` and `measurement.npz` (schema 1), and its tables.

L attention layers, H heads, T positions, N sequences, R registers, M places of the residual stream: before the first
block and after every block. alpha_k is the importance of position k: the mean attention to it over the queries t >= k
(2410.10781, section 3.2).

An array that does not apply to the model is None, and missing from the .npz. Other fields that do not apply are null in
the .json, or missing if they are `Omitted`. NaN is never written.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from sinklab import draw_chart, render_html, render_text
from sinklab.errors import InputError, cause
from sinklab.files import MEASUREMENT, TABLE, check_file, parse_json, write_json, written_aside
from sinklab.measuring.findings import Ablation, Explored, MassiveActivation, Mixing, Propositions
from sinklab.measuring.options import Inputs
from sinklab.measuring.statistics.details import Details
from sinklab.measuring.statistics.secondary import Percent
from sinklab.measuring.statistics.statistic_base import Array, ArrayOrNone, Axes, WithArrays
from sinklab.schema import Omitted, Ratio

Columns = dict[str, np.ndarray]
TableName = Literal["importance", "positions", "layers", "heads"]
TABLES: tuple[TableName, ...] = get_args(TableName)
FORMATS = ("csv", "parquet")


def write_table(columns: Columns, path: Path, kind: str) -> None:
    """Write columns as a CSV or Parquet file, atomically; an earlier table at the path is replaced.

    Raises:
        InputError: see `check_file`, for example if the file exists and is not a table written by sinklab.
        SinklabError: if the file cannot be written.
    """
    import polars

    check_file(path, TABLE)
    with written_aside(path) as aside:
        getattr(polars.DataFrame(columns), f"write_{kind}")(aside)


def write_tables(columns: Callable[[TableName], Columns], folder: Path, formats: Sequence[str]) -> None:
    """Write every table in every format, such as `FOLDER/importance.csv`.

    Args:
        columns: function from a table name to its columns (`Measurement.columns`).
        formats: requested formats, of `FORMATS`.
    """
    for kind in formats:
        for table in TABLES:
            write_table(columns(table), folder / f"{table}.{kind}", kind)


def remove_tables(folder: Path) -> None:
    """Remove the tables of an earlier measurement from a folder; other files with the same names are kept."""
    for path in (folder / f"{table}.{kind}" for kind in FORMATS for table in TABLES):
        with suppress(InputError, OSError):
            check_file(path, TABLE)
            path.unlink()


ColumnValues = np.ndarray | Sequence[float] | None


FED = 8
"""Number of tokens in `Fed`."""


class Fed(BaseModel):
    """First tokens of the first sequence, as the model reads them.

    Attributes:
        ids: token ids, at most FED; without padding.
        tokens: text of each token, or its string in the vocabulary if the text is blank or not valid by itself; None if
            measured without a tokenizer (`sinklab.measure`).
    """

    ids: list[int]
    tokens: list[str] | None = None

    def line(self) -> str:
        """Return the tokens in one line, such as `fed: <s> | Once | upon | a ..`; without texts, the ids."""
        shown = [repr(text.strip(" "))[1:-1] for text in self.tokens] if self.tokens else [*map(str, self.ids)]
        return f"fed: {' | '.join(shown)} .."


class Measurement(WithArrays):
    """Sinks, norms and loss of one model on one set of sequences.

    Attributes:
        model: model name or path; may be empty for a model in memory.
        revision: requested branch, tag or commit on the hub; None if none was requested, and for local models.
        commit: hub commit that was loaded; None for local models and models in memory.
        step, planned_steps: training step of the checkpoint and last step of its run; None if the model is neither a
            run directory nor measured during training.
        vocabulary: digest of the tokenizer's vocabulary; None if measured without a tokenizer
            (`sinklab.measure`).
        inputs: kind of input sequences: natural text, random tokens, or one token repeated.
        fed: first tokens of the first sequence; None, and left out of the files, for measurements during training.
        sequences: number of sequences N.
        length: T, number of tokens of the longest sequence, including BOS.
        sequence_lengths: number of tokens of each sequence (N); None, and left out of the files, if all have T.
        eps: threshold on alpha of the sink rate; the first if several were requested.
        bos: whether position 1 is a special token, such as BOS.
        proxy: whether importance is computed from proxy scores |sim| / sum |sim|, because the model's attention
            weights do not sum to one.
        layers, heads: L and H.
        sink_rate: Sink_k, the percentage of (sequence, layer, head) triples with alpha_k > eps, for k = 1, 2, ..; the
            first entry is Sink_1.
        sink_rates: `sink_rate` for every threshold, keyed by threshold ("0.3"); None if there is only one threshold.
        sink_rate_visible, sink_rates_visible: `sink_rate` and `sink_rates` with alpha averaged only over the queries
            that may see the key; None if in all layers these are the queries t >= k, as under the full causal mask.
        sink_rate_by_length: sink rate of the truncated sequences, by length and threshold: {"16": {"0.3": [..]}}; None
            if no lengths were requested.
        sink_rate_bias: sink rate of the attention to everything that is not a token of the sequence, summed: an added
            bias, a sink logit, the attention left over by stick-breaking, and a sink token or registers. It is computed
            over the layers that have one of them; None if no layer has any.
        sink_rates_bias: `sink_rate_bias` for every threshold; None, and left out of the files, if there is only one
            threshold or `sink_rate_bias` is None.
        sink_rate_first_or_bias, sink_rates_first_or_bias: the same for the sum of the attention to position 1 and the
            attention of `sink_rate_bias`; None, and left out of the files, if a layer has no bias.
        sink_rate_window_start: sink rate of the attention to the first key of a query's sliding window, mean over the
            queries whose window no longer contains position 1. None, and left out of the files, if there are no such
            queries, if learned tokens precede the sequence, and for Hugging Face models.
        uniform_ratio: alpha_k divided by its value under uniform causal attention, mean over (sequence,
            layer, head), by position from position 1. It is 1 under uniform attention, for every T.
        loss: cross-entropy in nats per token over targets 2..T (after the prefix under a prefix mask); None if there
            are no targets, or if the loss was not requested.
        bits_per_byte: loss in bits per byte of the target text (survey/measure.py); None if there is no loss, if
            the input is not text, in `sinklab.measure`, or if the notes give another reason.
        hidden_norm_ratio: |h_1| / mean over t > 1 of |h_t| before the first block and after every block (M). inf
            (null in measurement.json) if only the first norm is nonzero; 1 if all norms are zero. None for sequences of
            one token, or if blocks cannot be found.
        norm_ratio_before_norm: for a post-norm sinklab transformer, the same ratio for the input of each norm, two per
            block; None for other models, and for sequences of one token.
        norm_ratio_sink_token: hidden state norm of the sink token or first register divided by the mean norm of the
            tokens (M); None if there are no learned tokens.
        key_norm_ratio, value_norm_ratio: norm of the first key (value) divided by the mean norm of later keys (values),
            per attention layer (L); None for sequences of one token.
        gradient_norm_ratio: R_GS, gradient norm at position 1 divided by the mean over positions 2 .. 32, per attention
            layer (L; driver.py); None, and left out of the files, unless requested.
        backend: attention backend; "eager" if the attention matrices returned by the model were used.
        dtype: dtype of the weights.
        seconds: wall-clock time of the forward passes and the statistics, without gradients, ablations, `perturb`,
            propositions and `explore`.
        peak_memory_mb: peak memory of PyTorch's tensors (CUDA) or of the whole process so far, MiB; None if unknown.
        massive_activations: the largest |activation| of the first sequence after a block, for the at most 8 blocks with
            the largest ratios to the median, in descending order of the ratio (findings.py). They need not be
            massive. None if blocks cannot be found.
        details: additional statistics (details.py); None, and left out of the files, unless requested.
        notes: remarks on the model and the measurement, such as a halved batch size.
        ablations: loss and sinks under each ablation (surgery.py); None unless requested.
        mixing: how far the effect of replacing one token spreads (surgery.py); None unless requested.
        propositions: check of the propositions of 2410.10781 on repeated tokens (propositions.py); None for other
            inputs, with padding, for sequences of one token, or if the notes give another reason.
        explored: attention maps of one sequence (`Explored`); None unless requested.
        scores: downstream task scores in percent, by task; None if the model was not evaluated.
        importance: alpha, mean over sequences (L, H, T).
        importance_visible: alpha averaged only over the queries that may see the key (L, H, T); None if equal to alpha.
        importance_first: alpha of position 1 (N, L, H).
        importance_bias: the attention whose sink rate is `sink_rate_bias`, mean over sequences (L, H), NaN in layers
            without a bias; None if no layer has one.
        importance_registers: alpha of each register (L, H, R), mean over sequences; None if there are fewer than two.
        row_sums: sum of the raw scores of a query, mean over sequences and queries (L, H); None if it is always one.
        dormant: share of the queries t > 1 whose largest attention weight is on position 1 or on what `sink_rate_bias`
            includes (L, H); None except in the evaluations of a training run.
        hidden_norm: l2 norm of the residual stream, mean over sequences (M, T); None if blocks cannot be found.
        gradient_norm: norm of the gradient of the mean loss with respect to the attention input (L, T); None unless
            requested.
        key_norm, value_norm: l2 norm of keys and values, mean over sequences and KV heads (L, T); None if
            `record_attention` was not given them.
    """

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str
    revision: str | None = None
    commit: str | None = None
    step: Omitted[int] = None
    planned_steps: Omitted[int] = None
    vocabulary: Omitted[str] = None
    inputs: Inputs
    fed: Omitted[Fed] = None
    sequences: int = Field(ge=1)
    length: int = Field(ge=1)
    sequence_lengths: Omitted[list[int]] = None
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
    sink_rates_bias: Omitted[dict[str, Percent]] = None
    sink_rate_first_or_bias: Omitted[Percent] = None
    sink_rates_first_or_bias: Omitted[dict[str, Percent]] = None
    sink_rate_window_start: Omitted[Percent] = None
    uniform_ratio: list[Annotated[FiniteFloat, Field(ge=0)]]
    loss: FiniteFloat | None
    bits_per_byte: FiniteFloat | None = None
    hidden_norm_ratio: list[Ratio] | None
    norm_ratio_before_norm: Omitted[list[Ratio]] = None
    norm_ratio_sink_token: Omitted[list[Ratio]] = None
    key_norm_ratio: list[Ratio] | None
    value_norm_ratio: list[Ratio] | None
    gradient_norm_ratio: Omitted[list[Ratio]] = None
    backend: str
    dtype: str
    seconds: float = Field(ge=0)
    peak_memory_mb: FiniteFloat | None
    massive_activations: list[MassiveActivation] | None = None
    details: Omitted[Details] = None
    notes: list[str] = Field(default_factory=list)
    ablations: Omitted[list[Ablation]] = None
    mixing: Omitted[Mixing] = None
    propositions: Omitted[Propositions] = None
    explored: Omitted[Explored] = None
    scores: Omitted[dict[str, Percent]] = None
    importance: Annotated[Array, Axes("LHT")]
    importance_visible: Annotated[ArrayOrNone, Axes("LHT")] = None
    importance_first: Annotated[Array, Axes("NLH")]
    importance_bias: Annotated[ArrayOrNone, Axes("LH", gaps=True)] = None
    importance_registers: Annotated[ArrayOrNone, Axes("LHR")] = None
    row_sums: Annotated[ArrayOrNone, Axes("LH")] = None
    dormant: Annotated[ArrayOrNone, Axes("LH")] = None
    hidden_norm: Annotated[ArrayOrNone, Axes("MT")] = None
    key_norm: Annotated[ArrayOrNone, Axes("LT")] = None
    value_norm: Annotated[ArrayOrNone, Axes("LT")] = None
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
        """Return a copy with `step` and `planned_steps`, and a note if the step is before the last one of the run."""
        unfinished = f"measured at step {step:,} of {planned_steps:,}, before the end of training"
        notes = [*self.notes, *([unfinished] if step < planned_steps else [])]
        return self.model_copy(update={"step": step, "planned_steps": planned_steps, "notes": notes})

    def document(self) -> dict[str, Any]:
        """Return the content of `measurement.json`."""
        return self.model_dump(mode="json", by_alias=True)

    def save(self, folder: Path | str) -> None:
        """Write `measurement.npz`, then `measurement.json`, each atomically; an earlier measurement is replaced.

        Raises:
            InputError: if `folder` is a file, or an existing file must not be replaced (see `check_file`).
            SinklabError: if the disk is full or the folder is not writable.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: pass the folder of the measurement")
        for name in MEASUREMENT:
            check_file(folder / name, name)
        arrays: dict[str, Any] = self.arrays()
        for part in filter(None, (self.details, self.explored)):
            arrays |= part.arrays()
        with written_aside(folder / "measurement.npz") as aside, aside.open("wb") as file:
            np.savez(file, **arrays)
        write_json(folder / "measurement.json", self.document())

    def plot(self, what: Literal["heads", "layers", "positions", "norms"] = "heads") -> Any:
        """Return an Altair chart of importance or norms.

        Args:
            what: "heads" (importance of position 1, and attention to a bias, by head), "layers" (importance of the
                first 64 positions by layer), "positions" (importance of the first 64 positions, mean over layers and
                heads) or "norms" (of hidden states, keys and values at the first position and the others).

        Raises:
            InputError: if `what` is unknown, or "norms" for sequences of one token.
        """
        return draw_chart(self, what)

    def settled(self, rates: Sequence[float]) -> list[float | None]:
        """Return sink rates by position, with None where shorter sequences alone may explain the rate.

        These are sequences that end before position 2k: few of their queries see position k (`tables.highest_rate`).
        """
        if self.sequence_lengths is None:
            return list(rates)
        lengths_N = np.array(self.sequence_lengths)
        short = (100 * ((k <= lengths_N) & (lengths_N < 2 * k)).mean() for k in range(1, len(rates) + 1))
        return [
            rate if k == 1 or rate > most else None for k, (rate, most) in enumerate(zip(rates, short, strict=True), 1)
        ]

    def sink_rate_of_heads(self, eps: float | None = None) -> np.ndarray:
        """Return the percentage of sequences with alpha_1 > eps (L, H); the mean over layers and heads is Sink_1.

        Args:
            eps: threshold on alpha; by default `self.eps`.
        """
        return 100 * (self.importance_first > (self.eps if eps is None else eps)).mean(0)

    def columns(self, table: TableName = "importance") -> Columns:
        """Return a table as columns of equal length; positions, layers and heads are 1-based.

        | table | one row per | columns |
        |---|---|---|
        | importance | layer, head and position | layer, head, position, importance |
        | positions | position | position, sink_rate, sink_rate_eps_X for other thresholds (%), uniform_ratio |
        | layers | attention layer | layer, importance_first, importance_bias, row_sum (means over heads), norm ratios |
        | heads | layer and head | layer, head, sink_rate (position 1), importance_first, importance_bias, row_sum |

        heads has a sink_rate_eps_X for other thresholds too. The norm ratios are hidden_norm_ratio (after the block),
        key_norm_ratio, value_norm_ratio and gradient_norm_ratio. Columns that do not apply to the model are left out.
        hidden_norm_ratio is also left out if some blocks have no attention. If `importance_visible` is not None, each
        column of importance, importance_first or a sink rate is followed by a column with `_visible` in its name; the
        sink rates of heads are not.

        Raises:
            InputError: if the table is unknown.
        """
        if table not in TABLES:
            raise InputError(f"there is no table {table!r}: choose from {', '.join(TABLES)}")
        visible_LHT = self.importance_visible
        if table == "importance":
            layer_LHT, head_LHT, position_LHT = np.indices(self.importance.shape) + 1
            found: dict[str, ColumnValues] = {
                "layer": layer_LHT.ravel(),
                "head": head_LHT.ravel(),
                "position": position_LHT.ravel(),
                "importance": self.importance.ravel(),
                "importance_visible": None if visible_LHT is None else visible_LHT.ravel(),
            }
        elif table == "positions":
            found = {"position": np.arange(1, self.length + 1), "sink_rate": self.sink_rate}
            found["sink_rate_visible"] = self.sink_rate_visible
            for eps, rate in list((self.sink_rates or {}).items())[1:]:
                found[f"sink_rate_eps_{eps}"] = rate
                found[f"sink_rate_visible_eps_{eps}"] = (self.sink_rates_visible or {}).get(eps)
            found["uniform_ratio"] = self.uniform_ratio
        elif table == "heads":
            layer_LH, head_LH = np.indices((self.layers, self.heads)) + 1
            found = {"layer": layer_LH.ravel(), "head": head_LH.ravel(), "sink_rate": self.sink_rate_of_heads().ravel()}
            for eps in list(self.sink_rates or {})[1:]:
                found[f"sink_rate_eps_{eps}"] = self.sink_rate_of_heads(float(eps)).ravel()
            for name, of_LH in {
                "importance_first": self.importance[:, :, 0],
                "importance_first_visible": None if visible_LHT is None else visible_LHT[:, :, 0],
                "importance_bias": self.importance_bias,
                "row_sum": self.row_sums,
            }.items():
                found[name] = None if of_LH is None else of_LH.ravel()
        else:
            hidden = self.hidden_norm_ratio or []
            found = {
                "layer": np.arange(1, self.layers + 1),
                "importance_first": self.importance[:, :, 0].mean(1),
                "importance_first_visible": None if visible_LHT is None else visible_LHT[:, :, 0].mean(1),
                "importance_bias": None if self.importance_bias is None else self.importance_bias.mean(1),
                "row_sum": None if self.row_sums is None else self.row_sums.mean(1),
                "hidden_norm_ratio": hidden[1:] if len(hidden) == self.layers + 1 else None,
                "key_norm_ratio": self.key_norm_ratio,
                "value_norm_ratio": self.value_norm_ratio,
                "gradient_norm_ratio": self.gradient_norm_ratio,
            }
        return {name: np.asarray(values) for name, values in found.items() if values is not None}

    def to_dataframe(self, table: TableName = "importance") -> Any:
        """Return a table as a data frame of pandas if that is installed, else of polars.

        Args:
            table: table name, see `columns`.

        Raises:
            InputError: if the table is unknown.
        """
        return import_module("pandas" if find_spec("pandas") else "polars").DataFrame(self.columns(table))

    def to_csv(self, path: str | Path, table: TableName = "importance") -> None:
        """Write a table of `columns` as CSV."""
        write_table(self.columns(table), Path(path), "csv")

    def to_parquet(self, path: str | Path, table: TableName = "importance") -> None:
        """Write a table of `columns` as a Parquet file."""
        write_table(self.columns(table), Path(path), "parquet")

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)

    @classmethod
    def load(cls, folder: Path | str) -> "Measurement":
        """Load a measurement written by `save`.

        Args:
            folder: folder of the two files, or one of them.

        Raises:
            InputError: if a file is missing, cannot be read or is invalid, or the two files do not match.
        """
        folder = Path(folder)
        folder = folder.parent if folder.name in MEASUREMENT and not folder.is_dir() else folder
        if not any((folder / name).exists() for name in MEASUREMENT):
            raise InputError(
                f"{folder} contains no measurement: pass a folder with measurement.json and measurement.npz, as "
                "`sinklab measure --out`, `save` and finished runs write them"
            )
        advice = (
            f"{folder} contains no usable measurement; delete measurement.json and measurement.npz there and run the "
            "command that wrote them again"
        )
        try:
            document = parse_json((folder / "measurement.json").read_text(encoding="utf-8"))
            if not isinstance(document, dict):
                raise ValueError("measurement.json is not a JSON object")
            with np.load(folder / "measurement.npz", allow_pickle=False) as file:
                arrays = dict(file)
            for name, part in (("details", Details), ("explored", Explored)):
                if document.get(name):
                    document[name] = {**document[name], **part.found_in(arrays)}
            return cls.model_validate({**document, **cls.found_in(arrays)})
        except FileNotFoundError as error:
            raise InputError(f"{advice}: {Path(error.filename).name} is missing") from error
        except Exception as error:  # np.load raises various exceptions on damaged archives
            raise InputError(f"{advice}: {cause(error)}") from error
