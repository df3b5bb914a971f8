"""HellaSwag (1905.07830) from a file: a line for each item, as the paper published it or with the query made ready.

Of every line an item becomes `query`, what the model reads, and `endings`, of which one is right (`label`). Where there
is no `query`, it is made as lm-eval makes it:

    query = clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b)
    clean: " [title]" becomes ". ", other brackets vanish, as does one of two spaces
"""

import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from sinklab.errors import InputError
from sinklab.files import parse_json
from sinklab.schema import ReadDocument

NAME = "hellaswag"
FILES = ("hellaswag_val.jsonl.gz", "hellaswag_val.jsonl")
METRICS = ("acc", "acc_norm")


class HellaSwagItem(ReadDocument):
    """What the model reads, how it may go on, and which of that is right, from 0."""

    query: str
    endings: list[str]
    label: int


def local_file() -> Path | None:
    """The validation set in the folder `eval` of SINKLAB_DATA, None where there is none."""
    data = os.environ.get("SINKLAB_DATA")
    places = [Path(data).expanduser() / "eval" / name for name in FILES] if data else []
    return next((place for place in places if place.is_file()), None)


def read_items(path: Path) -> list[HellaSwagItem]:
    """The items of a .jsonl or .jsonl.gz file.

    Raises:
        InputError: it cannot be read, or a line is no item; says which line and why.
    """
    items = [_item(line, f"{path}, line {number}") for number, line in _lines(path)]
    if not items:
        raise InputError(f"{path} holds no items: give the HellaSwag validation set, a .jsonl or .jsonl.gz file")
    return items


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}): give a .jsonl or .jsonl.gz file") from error
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _item(line: str, where: str) -> HellaSwagItem:
    wanted = 'a line needs "query" (or "activity_label", "ctx_a" and "ctx_b"), "endings" and "label"'
    try:
        row = parse_json(line)
        if not isinstance(row, dict):
            raise ValueError(f"it is {json.dumps(row)[:40]}")
        if "query" not in row:
            context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
            row = {
                **row,
                "query": _clean(f"{row['activity_label']}: {context}"),
                "endings": [_clean(ending) for ending in row["endings"]],
            }
        item = HellaSwagItem.model_validate(row)
    except KeyError as error:
        raise InputError(f"{where}: {error} is missing; {wanted}") from error
    except (ValueError, AttributeError, TypeError) as error:
        said = str(error).splitlines()
        raise InputError(f"{where}: {' '.join(said[:3])}; {wanted}") from error
    if not item.query or not 0 <= item.label < len(item.endings) or not all(item.endings):
        raise InputError(
            f"{where}: label {item.label} of {len(item.endings)} endings, or an empty text; "
            "the label counts the endings from 0"
        )
    return item


def _clean(text: str) -> str:
    """Without the brackets that WikiHow left in the texts."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
