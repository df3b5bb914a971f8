"""The table of `sinklab report --table`: a row per measured model, as .md for readers or .csv for a leaderboard."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

from sinklab.assessing.assess_model import ASSESSMENT, load_assessment
from sinklab.errors import InputError
from sinklab.files import write_text
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.registry import METRICS, Evaluation, recorded
from sinklab.report.data import ReportData, ReportedRun
from sinklab.tables import TableColumn, Value, markdown, table_of

Row = tuple[ReportedRun, Measurement, dict[str, float]]


def _metric(name: str) -> Callable[[Row], Value]:
    def read(row: Row) -> float | None:
        m, one = row[1], METRICS[name]
        return one.of_model(m, m.eps) if one.of_model else one.read(Evaluation(step=0, **recorded(m)))

    return read


def _added(name: str) -> Callable[[Row], Value]:
    return lambda row: row[2].get(name)


COLUMNS: dict[str, tuple[TableColumn, Callable[[Row], Value]]] = {
    "model": (TableColumn("model", text=True), lambda row: row[0].cell),
    "revision": (TableColumn("revision", text=True), lambda row: row[1].commit or row[1].revision or ""),
    "inputs": (TableColumn("inputs", text=True), lambda row: row[1].inputs),
    "bos": (TableColumn("BOS", text=True), lambda row: {True: "yes", False: "no", None: ""}[row[1].bos]),
    "sequences": (TableColumn("sequences", form=".0f"), lambda row: row[1].sequences),
    "length": (TableColumn("tokens each", form=".0f"), lambda row: row[1].length),
    "layers": (TableColumn("layers", form=".0f"), lambda row: row[1].layers),
    "heads": (TableColumn("heads", form=".0f"), lambda row: row[1].heads),
    "eps": (TableColumn("eps", form="g"), lambda row: row[1].eps),
    "sink_1": (TableColumn("Sink_1, %", form=".1f"), _metric("sink_1")),
    "importance_first": (TableColumn("attention on token 1, %", form=".1f"), _metric("importance_first")),
    "norm_ratio": (TableColumn("norm ratio", form=".1f"), _metric("norm_ratio")),
    "value_norm_ratio": (TableColumn("value norm ratio", form=".2f"), _metric("value_norm_ratio")),
    "activation_ratio": (TableColumn("largest activation over median", form=",.0f"), _metric("activation_ratio")),
    "loss": (TableColumn("loss, nats", form=".3f"), lambda row: row[1].loss),
    "streaming_added": (TableColumn("streaming, no first token kept, nats", form="+.3f"), _added("streaming_added")),
    "streaming_kept_added": (TableColumn("first tokens kept", form="+.3f"), _added("streaming_kept_added")),
    "sinklab": (TableColumn("sinklab", text=True), lambda row: str(row[0].env.get("sinklab", ""))),
}
"""Columns: name in .csv files, then column of the .md file and how it is read. docs/measuring.md explains them."""


def write_models_table(data: ReportData, path: Path) -> None:
    """Write a row per measurement in `data`, strongest sink first. Losses in streaming are those of an assessment in
    the directory of the measurement or below it.

    Raises:
        InputError: if the suffix of `path` is neither .md nor .csv, or `data` has no measurement.
    """
    if path.suffix not in (".md", ".csv"):
        raise InputError(f"--table {path}: expected a name that ends in .md (for readers) or .csv (for programs)")
    rows = [(run, run.measurement, _numbers_of(run.path)) for run in data.runs if run.measurement]
    if not rows:
        raise InputError("--table: no measurement.json in these directories; make one with sinklab measure --out DIR")
    rows.sort(key=lambda row: -row[1].sink_rate[0])
    table = table_of("", rows, list(COLUMNS.values()))
    if path.suffix == ".md":
        write_text(path, markdown(table.without_empty_columns()) + "\n")
        return
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([[read(row) for _, read in COLUMNS.values()] for row in rows])
    write_text(path, out.getvalue())


def _numbers_of(folder: Path) -> dict[str, float]:
    """Return the numbers of the first assessment below a folder that has a streaming loss; empty without one."""
    found = (load_assessment(path).numbers() for path in sorted(folder.rglob(ASSESSMENT)))
    return next((numbers for numbers in found if "streaming_added" in numbers), {})
