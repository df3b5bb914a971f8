"""What `sinklab measure` and `sinklab compare` do: measure, print, draw the report."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress

from sinklab.commands.measure_one import measure_command
from sinklab.commands.survey_board import Board
from sinklab.commands.terminal.measurement import print_measurement
from sinklab.commands.terminal.report import printable
from sinklab.commands.terminal.survey import print_comparison, print_domains, print_families, print_sizes
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.measuring.frames import write_tables
from sinklab.measuring.huggingface.loading import Loading
from sinklab.report import write_report
from sinklab.survey.compare import compare_models
from sinklab.survey.domains import domain_files, measure_domains
from sinklab.survey.families import measure_families
from sinklab.survey.items import Outcome
from sinklab.survey.loaded import Request
from sinklab.survey.open_models import models_of
from sinklab.survey.sizes import Size, document, sizes

FAMILIES_OUT = Path("runs/families")


@dataclass(frozen=True)
class Call:
    """What they have in common.

    Attributes:
        text: a file or folder.
        asked: of every model, the fields of `Request`.
        loading: how every model is loaded.
        out: where results are kept.
        as_json: print the document instead of tables.
        console: for everything but the result.
    """

    text: Path | None
    asked: Mapping[str, Any]
    loading: Loading
    out: Path | None
    as_json: bool
    console: Console

    @property
    def request(self) -> Request:
        """What is asked of every model."""
        return Request(**self.asked)


class _Result(Protocol):
    def document(self) -> dict[str, Any]: ...


def announce(console: Console, message: str) -> None:
    """Say what takes a while."""
    console.print(printable(message), markup=False, highlight=False, soft_wrap=True)


def one_model(
    model: str | None,
    names: Sequence[str] | None,
    by_domain: bool,
    models_dir: Path | None,
    dry_run: bool,
    revision: str | None = None,
) -> str | None:
    """The MODEL of `sinklab measure`, or None where families are asked for instead.

    Raises:
        InputError: neither or both are given, or options that do not go with what is given.
    """
    if names:
        if model is not None:
            raise InputError(f"give a MODEL or --family, not both: got {model} and --family {names[0]}")
        if by_domain:
            raise InputError("--by-domain measures one MODEL on many texts: leave out --family")
        if revision is not None:
            raise InputError(f"--revision {revision} is of one MODEL: leave it out, or give the MODEL without --family")
        return None
    if model is None:
        raise InputError("name a MODEL, or families of models: --family gpt2 (see --help)")
    if models_dir is not None or dry_run:
        raise InputError(f"{'--dry-run' if dry_run else '--models-dir'} goes with --family: leave it out for one MODEL")
    return model


def model_command(model: str, call: Call, tables: Sequence[str] = ()) -> None:
    """Measure one model on one text.

    Args:
        tables: formats in which the tables of the result are kept as well (frames.py).

    Raises:
        InputError, SinklabError: as `measure_command`.
    """
    bar = Progress(console=call.console, transient=True, disable=not call.console.is_terminal)
    with _printed_anyway(print_measurement, call), bar:
        task = bar.add_task("measuring", total=call.request.sequences)
        measurement = measure_command(
            model,
            call.text,
            **call.asked,
            loading=call.loading,
            out=call.out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        if call.out is not None:
            try:
                write_tables(measurement, call.out, tables)
            except SinklabError as error:
                raise UnsavedError(str(error), measurement) from error
    _show(measurement, print_measurement, call)


def domains_command(model: str, call: Call) -> None:
    """Measure one model on every file of a folder.

    Raises:
        InputError: no folder, or what `measure_domains` refuses.
        SinklabError: some domain could not be measured; the others are printed and kept.
    """
    total = len(domain_files(call.text)) if call.text is not None and call.text.is_dir() else 0
    with _printed_anyway(print_domains, call), Board(call.console, "domains", total) as board:
        domains = measure_domains(model, call.text, call.request, loading=call.loading, out=call.out, watch=board)
    _show(domains, print_domains, call)
    _complain(domains.outcome, "domains")


def compare_command(models: Sequence[str], call: Call) -> None:
    """Measure models on the same text and print them side by side.

    Raises:
        InputError, SinklabError: as `compare_models`.
    """
    with _printed_anyway(print_comparison, call), Board(call.console, "models", len(models)) as board:
        comparison = compare_models(models, call.text, call.request, loading=call.loading, out=call.out, watch=board)
    _show(comparison, print_comparison, call)


def families_command(names: Sequence[str], models_dir: Path | None, dry_run: bool, call: Call) -> None:
    """Measure the paper's models, or with `dry_run` say what that takes.

    Raises:
        InputError: no such family or directory, or no text.
        SinklabError: some model could not be measured; the others are printed and kept.
    """
    if dry_run:
        dtype, device = call.loading.dtype, call.loading.device
        _show_sizes(sizes(names, call.request, models_dir=models_dir, dtype=dtype, device=device), call)
        return
    call = replace(call, out=call.out or FAMILIES_OUT)
    board = Board(call.console, "models", len(models_of(names)))
    with _printed_anyway(print_families, call), board:
        families = measure_families(
            names,
            call.text,
            call.request,
            models_dir=models_dir,
            loading=call.loading,
            out=call.out,
            watch=board,
        )
    _show(families, print_families, call, measured=bool(families.outcome.measured))
    _complain(families.outcome, "models")


@contextmanager
def _printed_anyway(show: Any, call: Call) -> Iterator[None]:
    """A result that could not be saved is printed before the error is."""
    try:
        yield
    except UnsavedError as error:
        _print(error.result, show, call)
        raise


def _print(result: _Result, show: Any, call: Call) -> None:
    if call.as_json:
        print(json.dumps(result.document(), indent=2))
    else:
        show(result, Console())


def _show(result: _Result, show: Any, call: Call, measured: bool = True) -> None:
    _print(result, show, call)
    if call.out is not None and measured:
        call.console.print(f"report: {write_report([call.out])}", highlight=False, soft_wrap=True)


def _show_sizes(found: Sequence[Size], call: Call) -> None:
    if call.as_json:
        print(json.dumps(document(found), indent=2))
    else:
        print_sizes(found, call.loading.dtype, Console())


def _complain(outcome: Outcome, what: str) -> None:
    if outcome.failed:
        lines = [f"  {name}: {failure}" for name, failure in outcome.failed.items()]
        total = len(outcome.failed) + len(outcome.measured)
        count = f"{len(outcome.failed)} of {total} {what} could not be measured"
        raise SinklabError("\n".join([f"{count}; the same call tries them again:", *lines]))
