"""HellaSwag (1905.07830) as a task of lm-eval with items from a file: choose the most plausible of four endings."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinklab.data.textfiles import read_rows
from sinklab.errors import InputError
from sinklab.schema import ReadDocument

NAME = "hellaswag"
FILES = ("hellaswag_val.jsonl.gz", "hellaswag_val.jsonl")
METRICS = ("acc", "acc_norm")
"""Metrics of lm-eval, averaged over items: accuracy of the ending with the highest log-likelihood (per character)."""
KEYS = '"query" (or "activity_label", "ctx_a" and "ctx_b"), "endings" and "label"'


class ChoiceItem(ReadDocument):
    """A multiple-choice item: prompt, endings, and 0-based index of the correct ending."""

    query: str
    endings: list[str]
    label: int


def local_file() -> Path | None:
    """Return the path of HellaSwag's file in SINKLAB_DATA/eval; None if it is missing or SINKLAB_DATA is not set."""
    data = os.environ.get("SINKLAB_DATA")
    places = [Path(data).expanduser() / "eval" / name for name in FILES] if data else []
    return next((place for place in places if place.is_file()), None)


def read_items(path: Path) -> list[ChoiceItem]:
    """Read items from a .jsonl or .jsonl.gz file, in the published format or in that of lm-eval, which has a `query`.

    Raises:
        InputError: if the file cannot be read, has no items, or has a line that is not an item; the message names the
            file and the line.
    """
    items = [_item(row, where) for row, where in read_rows(path)]
    if not items:
        raise InputError(f"{path} has no items: pass the items of {NAME}, a .jsonl or .jsonl.gz file")
    return items


def load(path: Path) -> Any:
    """Return lm-eval's task object with the items of the file at `path`."""
    rows = [item.model_dump() for item in read_items(path)]
    from datasets import Dataset  # comes with lm-eval
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": NAME,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(rows)},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "endings",
        "doc_to_target": "label",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in METRICS],
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=config)


def _item(row: Any, where: str) -> ChoiceItem:
    try:
        if not isinstance(row, dict):
            raise ValueError(f"the row is {json.dumps(row)[:40]}, not an object")
        item = ChoiceItem.model_validate(row if "query" in row else _converted(row))
        if not item.query or not 0 <= item.label < len(item.endings) or not all(item.endings):
            raise ValueError(
                f"label {item.label}, counted from 0, is not one of {len(item.endings)} endings, or a text is empty"
            )
        return item
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).splitlines()[:3])
        raise InputError(f"{where}: {said}; a line needs {KEYS}") from error


def _converted(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an item from the published format to that of lm-eval.

    The query is clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b), and an ending is clean(ending). The
    function clean strips a text, replaces " [title]" by ". ", removes other text in square brackets with the brackets,
    and replaces two spaces by one.
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return {**row, "query": query, "endings": [clean(ending) for ending in row["endings"]]}
