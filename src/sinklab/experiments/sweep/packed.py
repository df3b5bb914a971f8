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
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sinklab.assessing.assessment import ASSESSMENT
from sinklab.errors import InputError, cause
from sinklab.experiments.documents import RECORD, RunRecord
from sinklab.experiments.sweep.store import MANIFESTS, read_manifests
from sinklab.files import RECIPE, parse_json, sha256_of, write_gzip, write_json, write_text
from sinklab.train.run import ENVIRONMENT
from sinklab.tuning.tuned_directory import SFT, tuned_beside

METRICS = "metrics.jsonl"
RECIPES, RUNS, ALL_METRICS = "recipes.yaml", "runs.jsonl", "metrics.jsonl.gz"
OPTIONAL = {"assessments.jsonl.gz": "assessment", "tunings.jsonl.gz": "tuning"}
"""Files with documents that only some runs have, each with the document's key in a line (a field of `PackedRun`)."""
PACKED_FILES = (RECIPES, RUNS, ALL_METRICS, *OPTIONAL)
CHECKSUMS = "checksums.txt"
MOST_BYTES = 2**28
"""Maximum size of a decompressed file of packed runs in bytes. The largest in `results/` has 3 million."""

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
    with gzip.open(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES:,} bytes")
    return content.decode()
