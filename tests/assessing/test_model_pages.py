"""The committed table of measured models is that of their committed documents."""

from pathlib import Path

from benchmarks.model_pages import table

MODELS = Path(__file__).parents[2] / "results" / "models"


def test_the_table_of_models_is_that_of_their_documents() -> None:
    page = (MODELS / "README.md").read_text(encoding="utf-8")
    lines = table([MODELS / name for name in ("SmolLM2-135M-Instruct", "gemma-3-270m")])
    assert "\n".join(lines) in page
