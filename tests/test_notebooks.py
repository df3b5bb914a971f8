"""The notebooks of the docs: every cell runs, and what its last line shows can be drawn."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


def code_cells(name: str) -> list[tuple[str, list[str]]]:
    """The source and the tags of every code cell."""
    cells = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))["cells"]
    return [
        ("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells if cell["cell_type"] == "code"
    ]


def run_notebook(name: str, **parameters: object) -> tuple[dict[str, Any], list[Any]]:
    """Run every cell as Jupyter does, with other values of parameters: its variables, and what its cells show."""
    names: dict[str, Any] = {}
    shown = []
    for source, tags in code_cells(name):
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), names))
        if "parameters" in tags:
            assert parameters.keys() <= names.keys()
            names |= parameters
    return names, shown


def test_the_notebook_that_measures_a_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_models import text_file, tiny_model

    model = tiny_model(tmp_path / "model", bos=True)
    text = tmp_path / "text.txt"
    text.write_text(text_file(tmp_path / "text.jsonl", documents=40).read_text())
    names, shown = run_notebook("measure.ipynb", MODEL=str(model), TEXT=text, SEQUENCES=6, LENGTH=16)
    assert (names["result"].sequences, names["result"].length, names["result"].bos) == (6, 16, True)
    assert "<table" in names["result"]._repr_html_()
    chart = next(one for one in shown if hasattr(one, "to_dict"))
    assert chart.to_dict()
    assert len(shown[-1]) == 2  # layers
    said = capsys.readouterr().out
    assert f"Sink_1 {names['result'].sink_rate[0]:.1f} %" in said
    assert "random tokens" in said
    assert "nats per token" in said


@pytest.mark.slow
def test_the_notebook_that_compares_a_gate_with_softmax_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, shown = run_notebook("gate.ipynb", STEPS=2, RUNS=tmp_path / "runs")
    assert {row["model"] for row in names["rows"]} == {"softmax", "gate"}
    assert [one.to_dict()["$schema"] for one in shown]
    assert len(shown) == 3
    assert "gate: Sink_1" in capsys.readouterr().out
    softmax, gate = (yaml.safe_load((run / "recipe.yaml").read_text())["model"] for run in names["runs"].values())
    assert {key for key in gate if gate[key] != softmax[key]} == {"gate"}
