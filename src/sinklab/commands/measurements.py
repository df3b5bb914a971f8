"""Implementation of `sinklab measure`, `compare` and `parity`; `measure.py` has their options and few imports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sinklab.commands.options import print_result, printed_if_unsaved
from sinklab.commands.terminal import results
from sinklab.commands.terminal.progress import JobProgress
from sinklab.errors import InputError, SinklabError
from sinklab.jobs.ledger import AnyDocument, unsaved
from sinklab.jobs.progress import StepProgress
from sinklab.measuring.frames import write_tables
from sinklab.models.huggingface.loading import Loading
from sinklab.report import write_report
from sinklab.survey.backends import compare_backends
from sinklab.survey.checkpoints import measure_checkpoints, saved_models
from sinklab.survey.compare import Comparison, compare_models
from sinklab.survey.families import measure_families, sizes, sizes_document
from sinklab.survey.measure_many import Outcome, domain_files, measure_domains
from sinklab.survey.measure_one import measure_model
from sinklab.survey.open_models import models_of
from sinklab.survey.request import Request
from sinklab.survey.suites import CheckpointsDocument, DomainsDocument, FamiliesDocument

FAMILIES_OUT = Path("runs/families")


Show = Callable[[AnyDocument, Console], None]


@dataclass(frozen=True)
class Invocation:
    """The arguments that all measuring commands share.

    Attributes:
        text: file or folder of text to measure on; None without a text.
        request, loading: measurement and loading settings of every model; checkpoints differ in the revision.
        out: results directory; None saves nothing.
        as_json: print the result as JSON instead of tables.
        console: console on stderr, for progress and messages.
    """

    text: Path | None
    request: Request
    loading: Loading
    out: Path | None
    as_json: bool
    console: Console

    def print(self, result: AnyDocument, show: Show[AnyDocument]) -> None:
        """Print the result to standard output: as JSON, or as tables by calling `show`."""
        print_result(self.as_json, result.document, partial(show, result))

    def finish(self, result: AnyDocument, show: Show[AnyDocument]) -> None:
        """Print the result and, if it was saved, write report.html."""
        self.print(result, show)
        if self.out is not None:
            with JobProgress(self.console, phase="drawing the report"):
                path = write_report([self.out])
            self.console.print(f"report: {path}", highlight=False, soft_wrap=True)

    def survey(self, what: str, total: int, measured: Callable[..., Any], show: Show[Any]) -> None:
        """Run `measured` with a progress bar over `total` measurements; print its result, even if it cannot be saved.

        Args:
            what: plural noun for the measurements, such as "domains".

        Raises:
            SinklabError: if some measurements failed; the finished measurements are printed and, with `out`, saved.
        """
        with (
            printed_if_unsaved(partial(self.print, show=show)),
            JobProgress(self.console, what, total, phase=f"reading the text and the {what}") as observe,
        ):
            found = measured(self.text, self.request, loading=self.loading, out=self.out, observe=observe)
        outcome = Outcome(found.measured) if isinstance(found, Comparison) else found.outcome
        if outcome.measured:
            self.finish(found, show)
        else:
            self.print(found, show)
        if outcome.failed:
            lines = [f"  {name}: {failure}" for name, failure in outcome.failed.items()]
            count = f"{len(lines)} of {len(lines) + len(outcome.measured)} {what} could not be measured"
            raise SinklabError("\n".join([f"{count}; run the same command again to retry them:", *lines]))


def checked_model(
    model: str | None,
    names: Sequence[str] | None,
    by_domain: bool,
    models_dir: Path | None,
    dry_run: bool,
    revision: str | None = None,
    over_steps: bool = False,
) -> str | None:
    """Return the argument MODEL of `sinklab measure`, or None with --family, after checking the options.

    Args:
        names: families (--family).
        revision: first --revision.
        over_steps: True if the checkpoints of MODEL are measured (--by-checkpoint or several --revision).

    Raises:
        InputError: if neither or both of MODEL and --family are given, or options exclude each other.
    """
    if names:
        if model is not None:
            raise InputError(f"pass a MODEL or --family, not both: got {model} and --family {names[0]}")
        if by_domain or over_steps:
            asked = "--by-domain measures one MODEL on many texts" if by_domain else "checkpoints belong to one MODEL"
            raise InputError(f"{asked}: remove --family")
        if revision is not None:
            raise InputError(f"--revision {revision} requires one MODEL: remove it, or pass MODEL without --family")
        return None
    if by_domain and over_steps:
        raise InputError(
            "--by-domain and several checkpoints (--by-checkpoint, --revision) exclude each other: pass one of them"
        )
    if model is None:
        raise InputError("pass a MODEL, or families of models: --family gpt2 (see --help)")
    if models_dir is not None or dry_run:
        raise InputError(f"{'--dry-run' if dry_run else '--models-dir'} requires --family: remove it for one MODEL")
    return model


def model_command(model: str, given: Invocation, tables: Sequence[str] = ()) -> None:
    """Measure one model on one text, print and save the measurement.

    Args:
        tables: formats in which the tables are also saved (`frames.py`).

    Raises:
        InputError, SinklabError: see `measure_model`.
    """
    with (
        printed_if_unsaved(partial(given.print, show=results.print_measurement)),
        JobProgress(given.console, phase=f"reading {model} and the text") as observe,
    ):
        step = StepProgress("measuring", observe)
        measurement = measure_model(
            model, given.text, given.request, loading=given.loading, out=given.out, progress=step.reach
        )
        if given.out is not None:
            with unsaved(lambda: measurement):
                write_tables(measurement.columns, given.out, tables)
    given.finish(measurement, results.print_measurement)


def many_command(
    model: str | None,
    names: Sequence[str],
    models_dir: Path | None,
    by_domain: bool,
    revisions: Sequence[str],
    given: Invocation,
) -> None:
    """Measure one model on every file of a folder of texts, or its checkpoints, or families; print and save all.

    Args:
        model: the model; None measures the paper's models of the families `names`.
        revisions: revisions on the hub; empty for all checkpoints in a folder or run.

    Raises:
        InputError: see `measure_families`, `measure_domains` and `measure_checkpoints`.
        SinklabError: if a measurement failed; the others are printed and, with --out, saved.
    """
    if model is None:
        given = replace(given, out=given.out or FAMILIES_OUT)
        what, total, kind = "models", len(models_of(names)), FamiliesDocument
        measured = partial(measure_families, names, models_dir=models_dir)
    elif by_domain:
        total = len(domain_files(given.text)) if given.text is not None and given.text.is_dir() else 0
        what, measured, kind = "domains", partial(measure_domains, model), DomainsDocument
    else:
        what, total, kind = "checkpoints", len(saved_models(model, revisions)), CheckpointsDocument
        measured = partial(measure_checkpoints, model, revisions)
    given.survey(what, total, measured, partial(results.print_survey, kind))


def compare_command(models: Sequence[str], given: Invocation) -> None:
    """Measure several models on the same text, print and save their comparison.

    Raises:
        InputError, SinklabError: see `compare_models`.
    """
    given.survey("models", len(models), partial(compare_models, models), results.print_comparison)


def parity_command(model: str, backends: Sequence[str], given: Invocation) -> None:
    """Compare the logits and sinks of a model's attention backends, and print the comparison.

    Raises:
        InputError: see `compare_backends`.
        SinklabError: if a backend differs from eager attention or drops the sink; the comparison has been printed.
    """
    with JobProgress(given.console, phase=f"reading {model} and the text") as observe:
        found = compare_backends(
            model,
            given.text,
            given.request,
            loading=given.loading,
            backends=backends or None,
            observe=observe,
        )
    given.print(found, results.print_parity)
    if wrong := found.wrong():
        raise SinklabError(wrong)


def sizes_command(names: Sequence[str], models_dir: Path | None, given: Invocation) -> None:
    """Print the number of parameters and the required disk and memory of the paper's models; measures nothing.

    Raises:
        InputError: if there is no such family or directory.
    """
    dtype, device = given.loading.dtype, given.loading.device
    found = sizes(names, given.request, models_dir=models_dir, dtype=dtype, device=device)
    print_result(given.as_json, lambda: sizes_document(found), partial(results.print_sizes, found, dtype))
