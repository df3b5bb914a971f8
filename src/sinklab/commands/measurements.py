"""Run, print and save the measurements of `sinklab measure` and `compare`; their options are in `measure.py`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sinklab.commands.options import print_result, run_job, save_report
from sinklab.commands.terminal.progress import JobProgress
from sinklab.commands.terminal.results import print_comparison, print_measurement, print_sizes, print_survey
from sinklab.commands.terminal.tables import print_text, stderr
from sinklab.errors import SinklabError
from sinklab.jobs import StepProgress, unsaved
from sinklab.measuring.frames import write_tables
from sinklab.measuring.measurement import Measurement
from sinklab.models.huggingface.loading import Loading
from sinklab.outputs import RUNS
from sinklab.signals import keeping_what_is_finished
from sinklab.survey.checkpoints import folders_without_step, measure_checkpoints, saved_models
from sinklab.survey.compare import compare_models
from sinklab.survey.domains import domain_files, measure_domains
from sinklab.survey.families import measure_families, sizes
from sinklab.survey.measure_one import measure_model
from sinklab.survey.open_models import models_of
from sinklab.survey.request import Request

FAMILIES_OUT = RUNS / "families"


@dataclass(frozen=True)
class Invocation:
    """Common arguments of `sinklab measure` and `compare`; each method except `sizes` measures, prints and saves.

    Attributes:
        text: file or folder of text to measure on; None for inputs without text.
        loading: options for loading the models; the method `checkpoints` replaces the revision.
        out: results directory; if None, nothing is saved.
        as_json: print the result as JSON instead of tables.
    """

    text: Path | None
    request: Request
    loading: Loading
    out: Path | None
    as_json: bool

    def one_model(self, model: str, tables: Sequence[str]) -> None:
        """Measure one model on one text, and save its tables in these formats (`write_tables`).

        Raises:
            InputError, SinklabError: see `measure_model`, `write_tables` and `write_report`.
        """

        def work(progress: JobProgress) -> Measurement:
            settings: Any = {"loading": self.loading, "out": self.out}
            step = StepProgress("measuring", progress)
            found = measure_model(model, self.text, self.request, progress=step.reach, **settings)
            if self.out is not None:
                with unsaved(lambda: found):
                    write_tables(found.columns, self.out, tables)
            return found

        run_job(work, f"reading {model} and the text", self.as_json, print_measurement)
        if self.out is not None:
            save_report(self.out)

    def families(self, names: Sequence[str], models_dir: Path | None) -> None:
        """Measure the paper's models of these families; for errors, see `measure_families` and `_survey`."""
        self._survey("models", len(models_of(names)), partial(measure_families, names, models_dir=models_dir))

    def domains(self, model: str) -> None:
        """Measure one model on each file of a folder; for errors, see `measure_domains` and `_survey`."""
        total = len(domain_files(self.text)) if self.text is not None and self.text.is_dir() else 0
        self._survey("domains", total, partial(measure_domains, model))

    def checkpoints(self, model: str, revisions: Sequence[str]) -> None:
        """Measure checkpoints of one model (`saved_models`); for errors, see `measure_checkpoints` and `_survey`."""
        total = len(saved_models(model, revisions))
        if not revisions and (skipped := folders_without_step(Path(model))):
            print_text(f"not measured, because the name has no step or token count: {', '.join(skipped)}", stderr())
        self._survey("checkpoints", total, partial(measure_checkpoints, model, revisions))

    def compare(self, models: Sequence[str]) -> None:
        """Measure several models on the same text or kind of tokens; for errors, see `compare_models` and `_survey`."""
        self._survey("models", len(models), partial(compare_models, models), print_comparison)

    def sizes(self, names: Sequence[str], models_dir: Path | None) -> None:
        """Print the sizes of the models of families, without measuring; for errors, see `sizes`."""
        dtype, device = self.loading.dtype, self.loading.device
        found = sizes(names, self.request, models_dir=models_dir, dtype=dtype, device=device)
        document = {"schema": 1, "models": [asdict(size) for size in found]}
        print_result(self.as_json, lambda: document, partial(print_sizes, found, dtype))

    def _survey(
        self, what: str, total: int, measured: Callable[..., Any], show: Callable[[Any, Console], None] = print_survey
    ) -> None:
        """Run `measured` with a progress bar, print its result and, with `out`, write report.html.

        Args:
            what: plural noun for the measurements, such as "domains"; `total` is their number.
            measured: function (text, request, loading, out, observe) that runs the measurements and returns the result.
            show: function that prints the result as tables.

        Raises:
            UnsavedError: if the result could not be saved; it has been printed.
            SinklabError: if the result lists failed measurements; the others have been printed and, with `out`, saved.
        """

        def work(progress: JobProgress) -> Any:
            return measured(self.text, self.request, loading=self.loading, out=self.out, observe=progress)

        with keeping_what_is_finished(self.out is not None):
            found = run_job(work, f"reading the text and the {what}", self.as_json, show, what=what, steps=total)
            outcome = found.outcome
            if outcome.measured and self.out is not None:
                save_report(self.out)
        if outcome.failed:
            lines = [f"  {name}: {failure}" for name, failure in outcome.failed.items()]
            count = f"{len(lines)} of {len(lines) + len(outcome.measured)} {what} could not be measured"
            raise SinklabError("\n".join([f"{count}; run the same command again to retry them:", *lines]))
