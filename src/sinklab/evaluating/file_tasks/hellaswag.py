"""HellaSwag (1905.07830): the most plausible of four endings."""

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

        query = clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b); endings are cleaned as well
        clean: strip, replace " [title]" by ". ", remove other text in brackets, replace two spaces by one
        """

        def clean(text: str) -> str:
            return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

        query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        return {**row, "query": query, "endings": [clean(ending) for ending in row["endings"]]}
