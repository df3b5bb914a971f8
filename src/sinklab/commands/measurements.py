"""Implementation of the measuring commands. Their options are in `measure.py`, which has few imports."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sinklab.commands.terminal.progress import JobProgress
from sinklab.commands.terminal.results import (
    print_checkpoints,
    print_comparison,
    print_domains,
    print_families,
    print_measurement,
    print_parity,
    print_sizes,
)
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.jobs.ledger import AnyDocument, unsaved
from sinklab.jobs.progress import StepProgress
from sinklab.measuring.frames import write_tables
from sinklab.models.huggingface.loading import Loading
from sinklab.report import write_report
from sinklab.survey.backends import compare_backends
from sinklab.survey.checkpoints import measure_checkpoints, saved_models
from sinklab.survey.compare import compare_models
from sinklab.survey.families import measure_families, sizes, sizes_document
from sinklab.survey.measure_many import Outcome, domain_files, measure_domains
from sinklab.survey.measure_one import measure_model
from sinklab.survey.open_models import models_of
from sinklab.survey.request import Request

FAMILIES_OUT = Path("runs/families")


Show = Callable[[AnyDocument, Console], None]


@dataclass(frozen=True)
class Invocation:
    """The arguments that all measuring commands share.

    Attributes:
        text: a file or folder.
        request, loading: measurement request and loading settings of every model.
        out: results directory; None saves nothing.
        as_json: print the document instead of tables.
        console: console for everything except the result.
    """

    text: Path | None
    request: Request
    loading: Loading
    out: Path | None
    as_json: bool
    console: Console

    def print(self, result: AnyDocument, show: Show[AnyDocument]) -> None:
        """Print the result to standard output."""
        if self.as_json:
            print(json.dumps(result.document(), indent=2))
        else:
            show(result, Console())

    def finish(self, result: AnyDocument, show: Show[AnyDocument], drawn: bool = True) -> None:
        """Print the result and, if it was saved, draw the report."""
        self.print(result, show)
        if self.out is not None and drawn:
            with JobProgress(self.console, phase="drawing the report"):
                path = write_report([self.out])
            self.console.print(f"report: {path}", highlight=False, soft_wrap=True)

    @contextmanager
    def printed_anyway(self, show: Callable[[Any, Console], None]) -> Iterator[None]:
        """Print a result that could not be saved, then raise the error."""
        try:
            yield
        except UnsavedError as error:
            self.print(error.result, show)
            raise

    def survey(
        self, what: str, total: int, measured: Callable[..., AnyDocument], show: Show[AnyDocument]
    ) -> AnyDocument:
        """Run many measurements with one progress bar; a result that cannot be saved is printed."""
        with (
            self.printed_anyway(show),
            JobProgress(self.console, what, total, phase=f"reading the text and the {what}") as observe,
        ):
            return measured(self.text, self.request, loading=self.loading, out=self.out, observe=observe)


def one_model(
    model: str | None,
    names: Sequence[str] | None,
    by_domain: bool,
    models_dir: Path | None,
    dry_run: bool,
    revision: str | None = None,
    over_steps: bool = False,
) -> str | None:
    """Check and return the MODEL of `sinklab measure`; None with --family.

    Args:
        over_steps: whether to measure the checkpoints of MODEL.

    Raises:
        InputError: if there is neither MODEL nor --family or both, or options exclude each other.
    """
    if names:
        if model is not None:
            raise InputError(f"pass a MODEL or --family, not both: got {model} and --family {names[0]}")
        if by_domain or over_steps:
            asked = "--by-domain measures one MODEL on many texts" if by_domain else "checkpoints are of one MODEL"
            raise InputError(f"{asked}: remove --family")
        if revision is not None:
            raise InputError(f"--revision {revision} requires one MODEL: remove it, or pass MODEL without --family")
        return None
    if by_domain and over_steps:
        raise InputError("--by-domain and --by-checkpoint exclude each other: pass one of them")
    if model is None:
        raise InputError("pass a MODEL, or families of models: --family gpt2 (see --help)")
    if models_dir is not None or dry_run:
        raise InputError(f"{'--dry-run' if dry_run else '--models-dir'} requires --family: remove it for one MODEL")
    return model


def model_command(model: str, given: Invocation, tables: Sequence[str] = ()) -> None:
    """Measure one model on one text.

    Args:
        tables: formats in which the tables are also saved (`frames.py`).

    Raises:
        InputError, SinklabError: see `measure_model`.
    """
    with (
        given.printed_anyway(print_measurement),
        JobProgress(given.console, phase=f"reading {model} and the text") as observe,
    ):
        step = StepProgress("measuring", observe)
        measurement = measure_model(
            model, given.text, given.request, loading=given.loading, out=given.out, progress=step.reach
        )
        if given.out is not None:
            with unsaved(lambda: measurement):
                write_tables(measurement.columns, given.out, tables)
    given.finish(measurement, print_measurement)


def domains_command(model: str, given: Invocation) -> None:
    """Measure one model on every file of a folder.

    Raises:
        InputError: if there is no folder; see also `measure_domains`.
        SinklabError: if a domain could not be measured; the others are printed and saved.
    """
    total = len(domain_files(given.text)) if given.text is not None and given.text.is_dir() else 0
    domains = given.survey("domains", total, partial(measure_domains, model), print_domains)
    given.finish(domains, print_domains)
    _raise_for_failed(domains.outcome, "domains")


def checkpoints_command(model: str, revisions: Sequence[str], given: Invocation) -> None:
    """Measure one model at several steps of its training.

    Raises:
        InputError: see `measure_checkpoints`.
        SinklabError: if a checkpoint could not be measured; the others are printed and saved.
    """
    total = len(saved_models(model, revisions))
    found = given.survey("checkpoints", total, partial(measure_checkpoints, model, revisions), print_checkpoints)
    given.finish(found, print_checkpoints)
    _raise_for_failed(found.outcome, "checkpoints")


def compare_command(models: Sequence[str], given: Invocation) -> None:
    """Measure models on the same text and print a comparison.

    Raises:
        InputError, SinklabError: see `compare_models`.
    """
    comparison = given.survey("models", len(models), partial(compare_models, models), print_comparison)
    given.finish(comparison, print_comparison)


def parity_command(model: str, backends: Sequence[str], given: Invocation) -> None:
    """Compare the attention backends of a model and print the result.

    Raises:
        InputError: see `compare_backends`.
        SinklabError: if a backend disagrees; the table has been printed.
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
    given.print(found, print_parity)
    if wrong := found.wrong():
        raise SinklabError(wrong)


def sizes_command(names: Sequence[str], models_dir: Path | None, given: Invocation) -> None:
    """Print the parameters, disk and memory of the paper's models.

    Raises:
        InputError: if there is no such family or directory.
    """
    dtype, device = given.loading.dtype, given.loading.device
    found = sizes(names, given.request, models_dir=models_dir, dtype=dtype, device=device)
    if given.as_json:
        print(json.dumps(sizes_document(found), indent=2))
    else:
        print_sizes(found, dtype, Console())


def families_command(names: Sequence[str], models_dir: Path | None, given: Invocation) -> None:
    """Measure the paper's models.

    Raises:
        InputError: if there is no such family or directory, or no text.
        SinklabError: if a model could not be measured; the others are printed and saved.
    """
    given = replace(given, out=given.out or FAMILIES_OUT)
    measured = partial(measure_families, names, models_dir=models_dir)
    families = given.survey("models", len(models_of(names)), measured, print_families)
    given.finish(families, print_families, drawn=bool(families.outcome.measured))
    _raise_for_failed(families.outcome, "models")


def _raise_for_failed(outcome: Outcome, what: str) -> None:
    if outcome.failed:
        lines = [f"  {name}: {failure}" for name, failure in outcome.failed.items()]
        total = len(outcome.failed) + len(outcome.measured)
        count = f"{len(outcome.failed)} of {total} {what} could not be measured"
        raise SinklabError("\n".join([f"{count}; repeat the call to retry them:", *lines]))
