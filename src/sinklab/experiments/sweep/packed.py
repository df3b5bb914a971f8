"""Packed sweeps: recipes, records, environments and metrics of all finished runs in a few files per experiment.

EXPERIMENT/recipes.yaml           a YAML document per run: its resolved recipe
EXPERIMENT/runs.jsonl             a line per run: record.json and env.json, without paths of the machine
EXPERIMENT/metrics.jsonl.gz       a line per evaluation, with the directory of its run
EXPERIMENT/assessments.jsonl.gz   a line per assessed run: its assessment.json
EXPERIMENT/tunings.jsonl.gz       a line per fine-tuned run: its sft.json
checksums.txt                     SHA-256 of every other file of the sweep, as `sha256sum -c` reads it

`report/packing.py` writes the other files. A run is stored with the first experiment that uses the run. `unpack`
restores the run directories, with recipe.yaml and metrics.jsonl identical to the originals. `sinklab reproduce` treats
these runs as finished, although they have no weights.

`verify_packed` checks checksums, run hashes, dates of claims, the summary, and a sample of runs by retraining. The
summary is computed again from the packed metrics and compared as a whole. Metrics, records and checksums that were
changed consistently pass all checks except the retraining of these runs.
"""

import gzip
import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sinklab.assessing.assess_model import ASSESSMENT
from sinklab.errors import InputError, SinklabError, cause
from sinklab.experiments.definition import SCALE_NOTES
from sinklab.experiments.documents import RECORD, SUMMARY, RunRecord, Summary, edited, read_record
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.sweep.engine import PlannedRun
from sinklab.experiments.sweep.store import MANIFESTS, SweepManifest, found_runs, read_manifests, summary_of
from sinklab.experiments.sweep.worker import train_cell
from sinklab.files import RECIPE, parse_json, read_document, sha256_of, write_gzip, write_json, write_text
from sinklab.schema import leaves
from sinklab.tables import number_text, plural
from sinklab.train.recipe import load_recipe
from sinklab.train.run import ENVIRONMENT, read_environment, read_history, recipe_and_data
from sinklab.tuning.tuned_directory import SFT, tuned_beside

METRICS = "metrics.jsonl"
RECIPES, RUNS, ALL_METRICS = "recipes.yaml", "runs.jsonl", "metrics.jsonl.gz"
OPTIONAL = {"assessments.jsonl.gz": "assessment", "tunings.jsonl.gz": "tuning"}
"""Files with documents that only some runs have, each with the document's key in a line (a field of `PackedRun`)."""
PACKED_FILES = (RECIPES, RUNS, ALL_METRICS, *OPTIONAL)
CHECKSUMS = "checksums.txt"
LONGEST_NAME = 200  # bytes of a part of a path; file systems allow 255, and suffixes are added

_HEAD = "--- # "
_DOCUMENT = re.compile(rf"^{re.escape(_HEAD)}(.+)\n", re.MULTILINE)


class _Text(BaseModel):
    fingerprint: str = ""


class _Environment(BaseModel):
    """Types of the keys of env.json that are read; older files have only some of them."""

    model_config = ConfigDict(extra="allow", strict=True)

    hash: str
    data: _Text = Field(default_factory=_Text)
    begun: str | None = None
    git: str | None = None
    device: str | None = None
    threads: int | None = None


class _Run(BaseModel):
    """A line of runs.jsonl."""

    run: str
    record: RunRecord
    environment: _Environment


@dataclass(frozen=True)
class PackedRun:
    """Contents of the files of a packed run.

    Attributes:
        directory: run directory, relative to the directory of the sweep.
        recipe, metrics: contents of recipe.yaml and metrics.jsonl.
        record, environment: contents of record.json and env.json (without local paths).
        assessment: content of assessment.json; None if there is none.
        tuning: content of sft.json in the fine-tuning directory next to the run; None if there is none.
    """

    directory: str
    recipe: str
    metrics: str
    record: Mapping[str, Any]
    environment: Mapping[str, Any]
    assessment: Mapping[str, Any] | None = None
    tuning: Mapping[str, Any] | None = None


def is_packed(top: Path) -> bool:
    """Return True if a subfolder of `top` contains packed runs."""
    return any(top.glob(f"*/{RUNS}"))


def write_packed(folder: Path, runs: Iterable[PackedRun]) -> None:
    """Write the packed runs of one experiment to a folder; the same runs always give identical files.

    Raises:
        ValueError: if a line of a run's metrics is not JSON.
        SinklabError: if a file cannot be written.
    """
    runs = list(runs)
    write_text(folder / RECIPES, "".join(f"{_HEAD}{run.directory}\n{run.recipe}" for run in runs))
    ends = ({"run": run.directory, "record": run.record, "environment": run.environment} for run in runs)
    write_text(folder / RUNS, _lines(ends))
    rows = ({"run": run.directory, **json.loads(line)} for run in runs for line in run.metrics.splitlines())
    write_gzip(folder / ALL_METRICS, _lines(rows))
    for name, key in OPTIONAL.items():
        if found := [{"run": run.directory, key: document} for run in runs if (document := getattr(run, key))]:
            write_gzip(folder / name, _lines(found))


def read_packed(folder: Path) -> list[PackedRun]:
    """Read the packed runs of one experiment from a folder.

    Raises:
        InputError: if a file is missing, cannot be read or is damaged.
    """
    try:
        pieces = _DOCUMENT.split((folder / RECIPES).read_text(encoding="utf-8"))
        recipes = dict(zip(pieces[1::2], pieces[2::2], strict=True))
        metrics: dict[str, list[str]] = {}
        for row in _rows(_read_gzip(folder / ALL_METRICS)):
            metrics.setdefault(row.pop("run"), []).append(json.dumps(row) + "\n")
        ends = list(_rows((folder / RUNS).read_text(encoding="utf-8")))
        TypeAdapter(list[_Run]).validate_python(ends)
        optional = {
            key: {row["run"]: row[key] for row in _rows(_read_gzip(folder / name))}
            for name, key in OPTIONAL.items()
            if (folder / name).is_file()
        }
        return [
            PackedRun(
                directory=row["run"],
                recipe=recipes[row["run"]],
                metrics="".join(metrics.get(row["run"], ())),
                record=row["record"],
                environment=row["environment"],
                **{key: documents.get(row["run"]) for key, documents in optional.items()},
            )
            for row in ends
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error) as error:
        why = cause(error) if isinstance(error, ValidationError) else error
        raise InputError(
            f"{folder} contains packed runs that cannot be read ({why}): restore its files from the original"
        ) from error


def unpack(top: Path, into: Path) -> list[Path]:
    """Restore the directory of every packed run below `into`, and return those created; existing ones are not modified.

    Raises:
        InputError: if `top` contains no packed runs, if a file is missing, cannot be read or is damaged, if the name of
            a run is not that of a directory below `into`, or if a run is packed twice.
        SinklabError: if a file cannot be written.
    """
    if not is_packed(top):
        raise InputError(
            f"{top} contains no packed runs: expected folders with {RUNS}, as `sinklab report --pack` writes them"
        )
    made: list[Path] = []
    packed: set[str] = set()
    for folder in sorted(path.parent for path in top.glob(f"*/{RUNS}")):
        for run in read_packed(folder):
            if not _is_below(run.directory):
                raise InputError(
                    f"{folder / RUNS} names a run {run.directory[:80]!r}, which is no directory within the sweep: "
                    "restore the file"
                )
            if found := {run.directory, run.environment["hash"]} & packed:
                raise InputError(f"{folder / RUNS}: the run {found.pop()} is packed twice: restore the file")
            packed |= {run.directory, run.environment["hash"]}
            directory = into / run.directory
            if (directory / ENVIRONMENT).exists():
                continue
            if run.tuning is not None and not (tuned_beside(directory) / SFT).exists():
                write_json(tuned_beside(directory) / SFT, run.tuning)
            write_text(directory / RECIPE, run.recipe)
            write_text(directory / METRICS, run.metrics)
            # env.json is written last, because it marks the directory as a run directory
            for name, document in ((ASSESSMENT, run.assessment), (RECORD, run.record), (ENVIRONMENT, run.environment)):
                if document is not None:
                    write_json(directory / name, document)
            made.append(directory)
    return made


def _is_below(name: str) -> bool:
    """Return True if the name of a run is a relative path without `..` that a file system can have."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and name.isprintable()
        and not name.startswith("/")
        and ".." not in parts
        and all(len(part.encode()) <= LONGEST_NAME for part in parts)
    )


def import_packed(top: Path, out: Path) -> None:
    """Add the runs and manifests of a packed sweep to a sweep's directory; existing ones are kept.

    Raises:
        InputError: if a manifest or a packed run is damaged; with a damaged manifest, nothing is written.
    """
    read_manifests(top)
    unpack(top, out)
    for path in sorted((top / MANIFESTS).glob("*.json")):
        if not (out / MANIFESTS / path.name).exists():
            write_text(out / MANIFESTS / path.name, path.read_text(encoding="utf-8"))


def write_checksums(top: Path) -> None:
    """Write checksums.txt with the SHA-256 of every other file in and below a folder."""
    files = sorted(path for path in top.rglob("*") if path.is_file() and path != top / CHECKSUMS)
    write_text(top / CHECKSUMS, "".join(f"{sha256_of(path)}  {path.relative_to(top).as_posix()}\n" for path in files))


def read_checksums(top: Path) -> dict[str, str]:
    """Return the SHA-256 of every other file of a packed sweep, by path below `top`, from checksums.txt.

    Raises:
        InputError: if checksums.txt is missing, cannot be read or is damaged.
    """
    try:
        lines = (top / CHECKSUMS).read_text(encoding="utf-8").splitlines()
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        expected = "expected a sweep that `sinklab report --pack` has written"
        raise InputError(f"{top / CHECKSUMS} cannot be read ({reason}): {expected}") from error


def _lines(documents: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def _rows(text: str) -> Iterator[dict[str, Any]]:
    yield from (parse_json(line) for line in text.splitlines())


def _read_gzip(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


BEGUN = "begun"
"""Key of env.json with the start time of the run in UTC, ISO 8601."""

SAME_NUMBERS = ("processor", "device", "torch", "python", "threads", "compiles_loss")
"""Keys of env.json; if all are equal for a run and its repetition, their metrics must be equal bit for bit."""

NOT_RETRAINED = "changes of metrics with consistent checksums and summary are only found by --retrain"

ROUNDING = 1e-9
"""Relative and absolute tolerance of numbers that are recomputed from the same metrics."""

FIRST_LOSS, LAST_LOSS = 1e-3, 0.03
"""Relative tolerances of the first validation loss after step 0 and of the last, if a key of `SAME_NUMBERS` differs.

`LAST_LOSS` is larger because training amplifies rounding differences. Sink_1 has no tolerance: rounding can change it
as much as another seed."""


@dataclass
class Verified:
    """The outcome of one check of a packed sweep.

    Attributes:
        checked: number of items checked (files, runs, claims).
        problems: problems found, one per entry.
        notes: remarks that are not problems: how retrained runs were compared, exploratory claims that were stated
            after their runs began, claims that were changed after their runs began, and the number of claims about runs
            without a start time.
    """

    name: str
    checked: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify_packed(
    top: Path,
    retrain: int = 0,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Verified]:
    """Check the files, recipes, dates of claims and verdicts of a packed sweep, and retrain some of its runs.

    A failed check does not prevent the others.

    Args:
        retrain: number of finished runs, drawn at random with `seed`, to retrain.
        say: callback, called with a line of text per stage and retrained run.

    Raises:
        InputError: if `top` contains no packed sweep, or if checksums, packed runs or manifests cannot be read or are
            damaged; the message also lists the problems with the checksums.
        SinklabError: if the runs cannot be unpacked into a temporary folder, or an env.json is damaged.
    """
    checks = [_check_files(top)]
    try:
        with TemporaryDirectory(prefix="sinklab-") as folder:
            files = Path(folder)
            say("unpacking the runs")
            unpack(top, files)
            runs = found_runs(files)
            checks.append(_check_runs(runs, read_manifests(top).values()))
            if not retrain:
                checks[-1].notes.append(NOT_RETRAINED)
            checks.append(check_dates(read_manifests(top).values(), runs))
            say("computing the summary again")
            checks.append(_check_summary(top, files))
            if retrain:
                checks.append(_retrained(runs, retrain, seed, say))
    except InputError as error:
        if not checks[0].problems:
            raise
        raise InputError(f"{top} cannot be read: {'; '.join(checks[0].problems)} ({cause(error)})") from error
    return checks


def _check_files(top: Path) -> Verified:
    expected = read_checksums(top)
    there = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()} - {CHECKSUMS}
    check = Verified("checksums of files", len(expected))
    for name in sorted(expected.keys() | there):
        try:
            if name not in there:
                check.problems.append(f"{name} is missing")
            elif name not in expected:
                check.problems.append(f"{name} is not in {CHECKSUMS}")
            elif sha256_of(top / name) != expected[name]:
                check.problems.append(f"{name} differs from the packed file")
        except OSError as error:
            check.problems.append(f"{name} cannot be read: {error.strerror}")
    return check


def _check_runs(runs: dict[str, Path], manifests: Iterable[SweepManifest]) -> Verified:
    """Check that every run has a record, files with the recorded checksums, and a recipe with the recorded hash.

    The recipe must have the seed and the changed keys of the cells to which the manifests assign the run.
    """
    cells: dict[str, list[tuple[str, int, Mapping[str, object]]]] = {}
    for manifest in manifests:
        for name, seed, run_hash in manifest.runs():
            cells.setdefault(run_hash, []).append((name, seed, manifest.cells[name].change))
    check = Verified("recipes and metrics of runs", len(runs))
    for run_hash, directory in sorted(runs.items(), key=lambda item: item[1].name):
        record = read_record(directory)
        if record is None or record.hash != run_hash:
            check.problems.append(f"{directory.name} has no record, or the record of another run")
            continue
        there = [name for name in (RECIPE, METRICS) if (directory / name).stat().st_size]
        check.problems += [
            f"{directory.name}: its record has no checksum of {name}" for name in there if name not in record.files
        ]
        check.problems += [
            f"{directory.name}: {name} was changed or removed since the run ended" for name in edited(directory, record)
        ]
        fingerprint = read_environment(directory).get("data", {}).get("fingerprint")
        recipe = load_recipe(str(directory / RECIPE))
        if recipe.content_hash(str(fingerprint)) != run_hash:
            check.problems.append(f"{directory.name}: its recipe and text fingerprint do not have the hash {run_hash}")
        values = leaves(recipe.model_dump(mode="json"), empty=True)
        for name, seed, change in cells.get(run_hash, ()):
            wanted = {"seed": seed, **change}
            if different := [key for key in wanted if wanted[key] != values.get(key, values.get(f"{key}.kind"))]:
                check.problems.append(
                    f"{directory.name}: its {different[0]} is not that of cell {name} in asked/: "
                    f"{wanted[different[0]]!r}"
                )
    return check


def _check_summary(top: Path, files: Path) -> Verified:
    """Compare summary.json with the summary of the manifests that is computed from the unpacked runs."""
    check = Verified("summary computed again")
    try:
        before = read_document(Summary, top / SUMMARY, "restore it, or use the version of sinklab that wrote it")
    except InputError as error:
        check.problems.append(str(error))
        return check
    manifests = read_manifests(top)
    order = [name for name in before.experiments if name in manifests]
    now = summary_of({name: manifests[name] for name in [*order, *manifests]}, files)
    check.checked = len(before.claims)
    (old, old_texts), (new, new_texts) = _comparable(before), _comparable(now)
    for owner in {**old, **new}:
        if found := next(_differences(old.get(owner), new.get(owner), owner), None):
            path, there, here = found
            check.problems.append(
                f"{path} is {_shortened(there)} in {SUMMARY}, and {_shortened(here)} when computed from its runs"
            )
    if found := next(_differences(old_texts, new_texts), None):
        check.notes.append(
            f"not verified: texts in {SUMMARY} that another version of sinklab has added from its own files, the first "
            f"in {found[0]}"
        )
    return check


def _comparable(summary: Summary) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of summary.json by owner, such as a cell or a claim, and the texts from sinklab's own files.

    A repeated claim has a name of its own, and is therefore missing in the other summary.
    """
    found, texts = summary.model_dump(), dict[str, Any]()
    owners = {key: value for key, value in found.items() if key not in ("cells", "claims", "experiments")}
    for name, cell in found["cells"].items():
        owners[f"cells.{name}"] = cell
    for name, experiment in found["experiments"].items():
        texts[name] = [text for text in experiment["adapted"] if text in SCALE_NOTES.values()]
        experiment["adapted"] = [text for text in experiment["adapted"] if text not in SCALE_NOTES.values()]
        owners[f"experiments.{name}"] = experiment
    for claim in found["claims"]:
        name = f"claims.{claim['experiment']}.{claim['id']}"
        name += " (repeated)" * (name in owners)
        texts[name] = [claim.pop("elsewhere")]  # from committed.json, which later results replace
        owners[name] = claim
    return owners, texts


def _differences(there: object, here: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (path, value there, value here) of two JSON values; floats may differ by `ROUNDING`, and keys in order."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from _differences(there.get(key), here.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, pair in enumerate(zip(there, here, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif isinstance(there, float) and isinstance(here, float):
        if not math.isclose(there, here, rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield path, there, here
    elif there != here:
        yield path, there, here


def _shortened(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}.."


def _retrained(runs: dict[str, Path], count: int, seed: int, say: Callable[[str], None]) -> Verified:
    done = sorted(path for path in runs.values() if (record := read_record(path)) and record.status == "done")
    chosen = random.Random(seed).sample(done, min(count, len(done)))
    check = Verified("runs trained again", len(chosen))
    for directory in chosen:
        say(f"training {directory.name} again")
        with TemporaryDirectory(prefix="sinklab-") as folder:
            try:
                problems, note = _train_again(directory, Path(folder) / directory.name)
            except SinklabError as error:
                problems, note = [str(error)], ""
        check.problems += [f"{directory.name}: {problem}" for problem in problems]
        check.notes += [f"{directory.name}: {note}"] * bool(note)
    return check


def _train_again(directory: Path, again: Path) -> tuple[list[str], str]:
    """Retrain a run in the directory `again`; return deviations from the packed metrics, and how they were compared.

    The second value is empty if the training did not end as `done`. InputError is raised if recipe and text have
    another hash on this machine, or cannot be read.
    """
    (recipe, _), before = recipe_and_data(directory), read_environment(directory)
    threads = torch.get_num_threads()
    torch.set_num_threads(before.get("threads") or threads)
    try:
        text = (directory / RECIPE).read_text(encoding="utf-8")
        planned = PlannedRun(directory.name, text, again, before["hash"])
        ended = train_cell(planned, None, lambda event: None, lambda: False)
    finally:
        torch.set_num_threads(threads)
    if ended.kind != "done":
        return [f"it ended as {ended.kind} ({ended.message})"], ""
    old, new = read_history(directory / METRICS), read_history(again / METRICS)
    here = read_environment(again)
    differing = [key for key in SAME_NUMBERS if before.get(key) != here.get(key)]
    if [one.step for one in old] != [one.step for one in new]:
        return ["it was evaluated at different steps"], ""
    if not differing:
        speed = {"tokens_per_second", "mfu", "stall_share"}
        for one, other in zip(old, new, strict=True):
            numbers, repeated = one.model_dump(exclude=speed), other.model_dump(exclude=speed)
            if keys := [key for key in numbers if numbers[key] != repeated[key]]:
                return [f"step {one.step}: {', '.join(keys)} differ"], "compared bit for bit"
        return [], "the same processor, device, versions and threads, compared bit for bit"
    problems = []
    for place, limit in ((1, FIRST_LOSS), (-1, LAST_LOSS)):
        packed, repeated = old[place].valid_loss, new[place].valid_loss
        if packed is not None and repeated is not None and abs(repeated / packed - 1) > limit:
            problems.append(f"step {old[place].step}: validation loss {repeated:.4f} here and {packed:.4f} there")
    differences = ", ".join(f"{key} {before.get(key)} there and {here.get(key)} here" for key in differing)
    there, now = (number_text(RunNumbers(recipe.seed, rows).value("sink_1"), ".2f") for rows in (old, new))
    return problems, (
        f"{differences}: the first validation loss after step 0 may differ by {FIRST_LOSS:.1%}, the last by "
        f"{LAST_LOSS:.0%}; Sink_1 is {now} % here and {there} % there, and may differ as between two seeds"
    )


def check_dates(manifests: Iterable[SweepManifest], runs: Mapping[str, Path]) -> Verified:
    """Check that every claim was stated no later than the day (UTC) on which the first run of its cells began.

    A confirmatory claim stated later is a problem. An exploratory claim stated later is a note, as is a later change of
    any claim. Days that are not dates or in the future are problems, with a day's tolerance for time zones. References
    (`same_as`), claims without a date and runs without a start time are not checked; a note has the number of claims
    whose cells have such runs.

    Args:
        runs: run directories by hash.

    Raises:
        SinklabError: if an env.json cannot be read or is damaged.
    """
    check = Verified("claims stated before their runs")
    last, begun, undated = datetime.now(UTC).date() + timedelta(days=1), dict[str, str](), 0
    for run_hash, folder in runs.items():
        if (text := read_environment(folder).get(BEGUN)) is None:
            continue
        if why := _is_no_day(text, last):
            check.problems.append(f"{folder.name} began on {text!r}, which is {why}")
        else:
            begun[run_hash] = text[:10]
    for one in manifests:
        for claim in one.experiment.claims_at(one.scale):
            name, stated = f"{one.experiment.id}.{claim.id}", claim.stated or one.experiment.stated
            hashes = {run for cell in claim.cells if cell in one.cells for run in one.cells[cell].hashes.values()}
            days = sorted(begun[run] for run in hashes if run in begun)
            for key, day in (("stated", stated and stated.isoformat()), ("changed", claim.changed)):
                if day and (why := _is_no_day(day[:10], last)):
                    check.problems.append(f"{name} was {key} on {day[:10]}, which is {why}")
            if stated is None or claim.same_as:
                continue
            undated += any(run in runs and run not in begun for run in hashes)
            check.checked += bool(days)
            if earlier := [day for day in days if day < stated.isoformat()]:
                found = check.notes if (claim.evidence or one.experiment.evidence) == "exploratory" else check.problems
                found.append(
                    f"{name} was stated on {stated}, and {plural(len(earlier), 'run')} of its cells began before, the "
                    f"first on {earlier[0]}"
                )
            if days and claim.changed and claim.changed[:10] > days[0]:
                check.notes.append(
                    f"{name} was changed on {claim.changed[:10]}, and the first run of its cells began on {days[0]}"
                )
    if undated:
        check.notes.append(f"not checked: runs without a start time, in the cells of {plural(undated, 'claim')}")
    return check


def _is_no_day(text: str, last: date) -> str:
    """Return an explanation if a text is not an ISO 8601 date or time, or is after a day; else an empty string."""
    try:
        day = datetime.fromisoformat(text).date()
    except ValueError:
        return "no date"
    return "in the future" if day > last else ""
