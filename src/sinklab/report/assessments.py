"""Assessments on disk."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sinklab.assessing.assessment import ASSESSMENT, Assessment, load_assessment


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


def read_assessments(top: Path, without: Collection[Path] = ()) -> list[Assessed]:
    """Those in and below a folder, except below some others.

    Raises:
        InputError: a file is damaged.
    """
    found = []
    for path in sorted(top.rglob(ASSESSMENT)):
        if any(path.is_relative_to(other) for other in without):
            continue
        document = load_assessment(path)
        found.append(Assessed(Path(document.model).name or document.model, path.parent, document))
    return found
