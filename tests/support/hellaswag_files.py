"""Small HellaSwag files with evenly distributed labels, and the records of their items."""

import gzip
import json
from pathlib import Path
from typing import Any

from sinklab.evaluating.evaluation import ItemRecord


def sheep_items(count: int, words: int = 3) -> list[dict[str, Any]]:
    """Items whose contexts have `words` numbers."""
    return [
        {
            "query": f"sheep jumps {' '.join(str(number * step) for step in range(1, words + 1))}",
            "endings": [f"{number} sheep", "jumps", f"{number * number}", "sheep jumps"],
            "label": number % 4,
        }
        for number in range(count)
    ]


def hellaswag_file(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
    return path


def read_records(path: Path) -> list[ItemRecord]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [ItemRecord.model_validate_json(line) for line in file]
