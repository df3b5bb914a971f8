"""The data of a report: runs with their numbers, claims with their evidence, and suites of measurements.

Nothing here reads a file (`collect` does) or knows about charts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sinklab.assessing.assessment import Assessment
from sinklab.experiments.documents import CellSummary, JudgedClaim
from sinklab.report.experiments.sweeps import Sweep
from sinklab.survey.suites import SuiteDocument
from sinklab.train.directory.history import Evaluation

if TYPE_CHECKING:
    import numpy as np

    from sinklab.measuring.measurement import Measurement
    from sinklab.measuring.statistics.details import Details

T = TypeVar("T")

MEASURED = ("sink_rate", "sink_rate_visible", "sink_rate_bias", "hidden_norm_ratio")
"""Fields of both an evaluation and a measurement."""


@dataclass(frozen=True)
class WrittenRecipe:
    """The recipe of a run as written by any version; a value of an unexpected type is None.

    Attributes:
        values: nested, of every key.
    """

    values: Mapping[str, object]

    @property
    def name(self) -> str | None:
        """For people; that of the recipe that the run has changed, or of its cell."""
        return self._value("name", str)

    @property
    def seed(self) -> int | None:
        """Of weights and data."""
        return self._value("seed", int)

    @property
    def steps(self) -> int | None:
        """How many were asked for."""
        return self._value("train.steps", int)

    @property
    def eps(self) -> float | None:
        """The threshold of the sink rate."""
        return self._value("metric.eps", int, float)

    def _value(self, key: str, *kinds: type[T]) -> T | None:
        value: object = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, kinds) else None


@dataclass(frozen=True)
class ReportedRun:
    """One trained run, or one measured model (then there is no recipe and no history).

    Attributes:
        cell: the name shared by the runs that differ only in their seed (see `grouping`).
        env: env.json, as it was written.
        history: its evaluations, ordered by step.
        measurement: None where the run has not been measured yet.
    """

    path: Path
    cell: str
    seed: int | None = None
    recipe: WrittenRecipe | None = None
    env: Mapping[str, object] = field(default_factory=dict)
    history: Sequence[Evaluation] = ()
    measurement: "Measurement | None" = None

    @classmethod
    def of(cls, measurement: "Measurement") -> "ReportedRun":
        """A measurement that is in memory."""
        return cls(Path(), model_name(measurement.model) if measurement.model else "model", measurement=measurement)

    @property
    def trained(self) -> bool:
        """Whether this is a training run rather than a measurement of a finished model."""
        return self.recipe is not None

    @property
    def planned_steps(self) -> int | None:
        """The number of steps the recipe asks for."""
        return self.recipe.steps if self.recipe else None

    @property
    def steps_done(self) -> int | None:
        """The step of the last evaluation."""
        return self.history[-1].step if self.history else None

    @property
    def in_progress(self) -> bool:
        """Whether the run has not reached the last step of its recipe."""
        return self.trained and (self.steps_done or 0) < (self.planned_steps or 0)

    @property
    def measured_early(self) -> str | None:
        """At which step an unfinished run was measured; None for whole runs and other models."""
        step, planned = (self.measurement.step, self.measurement.planned_steps) if self.measurement else (None, None)
        return f"step {step:,} of {planned:,}" if step is not None and planned and step < planned else None

    @property
    def eps(self) -> float:
        """The threshold of the sink rate: the measurement's, else the recipe's, else the paper's 0.3."""
        if self.measurement:
            return self.measurement.eps
        return float((self.recipe and self.recipe.eps) or 0.3)

    @property
    def details(self) -> "Details | None":
        """The results of --details."""
        return self.measurement.details if self.measurement else None

    @property
    def notes(self) -> list[str]:
        """The notes of its measurement."""
        return self.measurement.notes if self.measurement else []

    @property
    def latest(self) -> Evaluation:
        """The last evaluation, with what the final measurement has instead; its loss where none was evaluated."""
        last = self.history[-1] if self.history else Evaluation(step=0)
        if self.measurement is None:
            return last
        newer = {name: value for name in MEASURED if (value := getattr(self.measurement, name)) is not None}
        if "valid_loss" not in last.model_fields_set:
            newer["valid_loss"] = self.measurement.loss
        return last.model_copy(update=newer)


@dataclass(frozen=True)
class Suite:
    """The document of a command that made several measurements, with their directory.

    Attributes:
        top: the directory of the document; the measurements are below it.
    """

    top: Path
    document: SuiteDocument

    def runs(self, data: "ReportData") -> list[tuple[str, "ReportedRun"]]:
        """The measurements by their names in the document, in its order."""
        by_path = {run.path: run for run in data.runs}
        return [(name, by_path[self.top / name]) for name in self.document.measured if self.top / name in by_path]


@dataclass(frozen=True)
class Assessed:
    """One assessment.json.

    Attributes:
        name: of the model, for people.
        folder: of the file.
    """

    name: str
    folder: Path
    document: Assessment


@dataclass(frozen=True)
class ReportData:
    """Everything one report shows.

    Attributes:
        runs: ordered by cell (in order of appearance), then by seed.
        claims: of summaries that name no experiment.
        summary_cells: what the summaries say of the cells that these runs belong to, by name.
        suites: what commands that measure many say of their measurements.
        sweeps: whose experiments have a section each. Of a sweep of several experiments no run is among `runs`.
        assessed: what was assessed, but for the runs of such a sweep.
    """

    dirs: list[Path]
    runs: list[ReportedRun]
    claims: list[JudgedClaim] = field(default_factory=list)
    summary_cells: dict[str, CellSummary] = field(default_factory=dict)
    suites: list[Suite] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    assessed: list[Assessed] = field(default_factory=list)

    @classmethod
    def of_suite(cls, document: SuiteDocument, measured: "Mapping[str, Measurement]") -> "ReportData":
        """Measurements that are in memory, by the names in their document."""
        runs = [ReportedRun(Path(name), name, measurement=one) for name, one in measured.items()]
        return cls([Path()], runs, suites=[Suite(Path(), document)])

    @property
    def cells(self) -> list[str]:
        """The names of the cells, each once, in order of appearance; those of the summary come first."""
        return list(dict.fromkeys([*self.summary_cells, *(run.cell for run in self.runs)]))

    def runs_of(self, cell: str) -> list[ReportedRun]:
        """The runs of one cell, ordered by seed."""
        return [run for run in self.runs if run.cell == cell]

    def label(self, run: ReportedRun) -> str:
        """The name of a run: its cell's, with the seed where the cell has several runs."""
        alone = len(self.runs_of(run.cell)) == 1
        return run.cell if alone or run.seed is None else f"{run.cell}, seed {run.seed}"

    @property
    def only_suite(self) -> SuiteDocument | None:
        """The document of the suite that all of the report is about; None where there is more, or none."""
        if len(self.suites) != 1 or len(self.suites[0].runs(self)) != len(self.runs):
            return None
        return self.suites[0].document

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Failed measurements, each with the reason."""
        return [(name, f"not measured: {why}") for suite in self.suites for name, why in suite.document.failed.items()]

    @property
    def measured(self) -> "list[tuple[ReportedRun, Measurement]]":
        """The runs that have been measured, each with its measurement."""
        return [(run, run.measurement) for run in self.runs if run.measurement is not None]

    @property
    def detailed(self) -> "list[tuple[ReportedRun, Measurement, Details]]":
        """Those that were measured with --details."""
        return [(run, one, one.details) for run, one in self.measured if one.details is not None]

    def arrays(self, of: "Callable[[Measurement], np.ndarray | None]") -> "list[tuple[str, np.ndarray]]":
        """An array of every measurement that has it, with the name of its run."""
        found = [(self.label(run), of(one)) for run, one in self.measured]
        return [(label, array) for label, array in found if array is not None and array.size]


def model_name(model: str) -> str:
    """A hub id as it is; of a path only its last folder."""
    return model if model.count("/") == 1 and not model.startswith((".", "/", "~")) else Path(model).name or model
