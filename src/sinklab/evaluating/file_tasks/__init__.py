"""Multiple-choice tasks with items from a file. Each module of this package defines one task; all are imported here."""

import gzip
import json
import os
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar

from sinklab.errors import InputError
from sinklab.files import parse_json
from sinklab.schema import ReadDocument


class ChoiceItem(ReadDocument):
    """A multiple-choice item: prompt, endings, and 0-based index of the correct ending."""

    query: str
    endings: list[str]
    label: int


class FileTask:
    """A multiple-choice task of lm-eval with items from a file.

    Attributes:
        name: name of the task in lm-eval.
        files: possible names of the file in SINKLAB_DATA/eval; the first that exists is used.
        keys: keys of a line of the file, for error messages.
        metrics: metrics of lm-eval, averaged over items: acc, the accuracy of the ending with the highest
            log-likelihood; acc_norm, that of the ending with the highest log-likelihood per character.
    """

    name: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    keys: ClassVar[str] = '"query", "endings" and "label"'
    metrics: ClassVar[tuple[str, ...]] = ("acc", "acc_norm")

    def converted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a line without `query` to the fields of `ChoiceItem`; a missing key raises KeyError.

        A subclass for another format overrides this method; here it always raises KeyError.
        """
        return {**row, "query": row["query"]}

    def local_file(self) -> Path | None:
        """Return the path of the file in SINKLAB_DATA/eval; None if it is missing or SINKLAB_DATA is not set."""
        data = os.environ.get("SINKLAB_DATA")
        places = [Path(data).expanduser() / "eval" / name for name in self.files] if data else []
        return next((place for place in places if place.is_file()), None)

    def read(self, path: Path) -> list[ChoiceItem]:
        """Read items from a .jsonl or .jsonl.gz file.

        Raises:
            InputError: if the file cannot be read, has no items, or has a line that is not an item; the message names
                the file and the line.
        """
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file
            ):
                lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        if not lines:
            raise InputError(f"{path} has no items: pass the items of {self.name}, a .jsonl or .jsonl.gz file")
        return [self._item(line, f"{path}, line {number}") for number, line in lines]

    def load(self, path: Path) -> Any:
        """Return lm-eval's task object with the items of the file at `path`.

        Raises:
            InputError: see `read`.
        """
        items = self.read(path)
        from datasets import Dataset  # pyright: ignore[reportMissingImports]  # comes with lm-eval
        from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

        rows = [item.model_dump() for item in items]
        config = {
            "task": self.name,
            "custom_dataset": lambda **_: {"validation": Dataset.from_list(rows)},
            "validation_split": "validation",
            "output_type": "multiple_choice",
            "doc_to_text": "query",
            "doc_to_choice": "endings",
            "doc_to_target": "label",
            "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in self.metrics],
            "metadata": {"version": 1.0},
        }
        return ConfigurableTask(config=config)

    def _item(self, line: str, where: str) -> ChoiceItem:
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"the line is {json.dumps(row)[:40]}, not an object")
            item = ChoiceItem.model_validate(row if "query" in row else self.converted(row))
            if not item.query or not 0 <= item.label < len(item.endings) or not all(item.endings):
                raise ValueError(
                    f"label {item.label}, counted from 0, is not one of {len(item.endings)} endings, or a text is empty"
                )
            return item
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            said = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).splitlines()[:3])
            raise InputError(f"{where}: {said}; a line needs {self.keys}") from error


for found in iter_modules(__path__):
    import_module(f"{__name__}.{found.name}")

FILE_TASKS = {task.name: task() for task in FileTask.__subclasses__()}
"""Tasks of this package by name."""
