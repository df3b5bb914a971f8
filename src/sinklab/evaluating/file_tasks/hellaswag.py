"""HellaSwag (1905.07830): choose the most plausible of four endings of a text."""

import re
from collections.abc import Mapping
from typing import Any

from sinklab.evaluating.file_tasks import FileTask


class HellaSwag(FileTask):
    """HellaSwag, with items in the published format or in that of lm-eval, which has a `query`."""

    name = "hellaswag"
    files = ("hellaswag_val.jsonl.gz", "hellaswag_val.jsonl")
    keys = '"query" (or "activity_label", "ctx_a" and "ctx_b"), "endings" and "label"'

    def converted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert an item from the published format to that of lm-eval.

        The query is clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b), and an ending is clean(ending).
        The function clean strips a text, replaces " [title]" by ". ", removes other text in square brackets with the
        brackets, and replaces two spaces by one.
        """

        def clean(text: str) -> str:
            return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

        query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        return {**row, "query": query, "endings": [clean(ending) for ending in row["endings"]]}
