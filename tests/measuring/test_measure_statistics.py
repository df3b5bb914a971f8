"""Statistics are declared once: their fields in files and documentation, and the number of passes over the scores."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sinklab.attention import query_blocks
from sinklab.attention.importance import score_rows
from sinklab.attention.masks import CAUSAL, Window, real_tokens
from sinklab.attention.query_blocks import Block, ScoreMatrix
from sinklab.errors import InputError
from sinklab.files import parse_json, write_json
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.collecting import layer_details
from sinklab.measuring.statistics.details import STATISTICS, Details
from sinklab.measuring.statistics.statistic_base import Angles, OfAngles, OfRows, OfStream
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

DOCS = Path(__file__).parents[2] / "docs" / "measuring.md"
FIELDS = {field: name for name, one in STATISTICS.items() for field in one.fields}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A measurement with everything, on disk."""
    config: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "ffn_width": 16, "vocab_size": 16, "context": 16}
    config |= {"gate": {"kind": "head"}, "attention": {"mask": {"kind": "window", "width": 6}}}
    model = Transformer(ModelConfig.model_validate(config))
    tokens = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(0))
    measure(model, tokens, maps=[(1, 2)]).save(tmp_path)
    return tmp_path


def _change(folder: Path, fields: dict[str, Any] | None = None, without: str = "") -> None:
    """Write the details of a measurement anew: with other fields, and without one statistic."""
    document: Any = parse_json((folder / "measurement.json").read_text(encoding="utf-8"))
    gone = STATISTICS[without].fields if without else ()
    document["details"] = {k: v for k, v in document["details"].items() if k not in gone} | (fields or {})
    write_json(folder / "measurement.json", document)
    with np.load(folder / "measurement.npz") as file:
        np.savez(folder / "measurement.npz", **{k: v for k, v in file.items() if k != f"details_{without}"})


def _details(folder: Path) -> Details:
    details = Measurement.load(folder).details
    assert details is not None
    return details


@pytest.mark.parametrize("kind", [OfRows, OfStream])
def test_a_statistic_without_a_read_method_cannot_be_declared(kind: type[OfRows | OfStream]) -> None:
    unread = type("Unread", (kind,), {"axes": "LH"})
    with pytest.raises(TypeError, match="read"):
        unread()


@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_has_a_docstring_and_a_row_in_the_documentation(name: str) -> None:
    assert STATISTICS[name].__doc__
    section = DOCS.read_text(encoding="utf-8").partition("## Details")[2].partition("\n## ")[0]
    lines = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    (line,) = [line for line in lines if re.search(rf"`{name}`", line[4])]
    assert [field for field in STATISTICS[name].fields if f"`{field}`" not in line[3]] == []
    shape = {"L": "layers", "H": "heads", "T": "T", "D": "buckets", "Q": "buckets", "M": "blocks + 1", "P": "maps"}
    assert f"({', '.join(shape[axis] for axis in STATISTICS[name].axes)})" in line[4]


def test_every_statistic_is_measured_and_its_fields_are_written(folder: Path) -> None:
    details = _details(folder)
    assert [statistic for statistic, _ in details.present()] == list(STATISTICS.values())
    assert set(FIELDS) < set(details.model_dump())
    with np.load(folder / "measurement.npz") as file:
        assert {name for name in file if name.startswith("details_")} == {f"details_{name}" for name in STATISTICS}


@pytest.mark.parametrize(
    "name",
    [
        "cosine",
        "norm_product",
        "value_ratio",
        "kurtosis",
        "alignment",
        "matrix_entropy",
        "gate",
        "first_visible",
        "first_visible_by_head",
        "map_cosine",
    ],
)
def test_a_measurement_saved_before_a_statistic_was_added_still_loads(folder: Path, name: str) -> None:
    _change(folder, without=name)
    details = _details(folder)
    assert getattr(details, name) is None
    assert not set(STATISTICS[name].fields) & set(details.model_dump())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"of_another_version": [1.0]}, "unknown fields: of_another_version"),
        ({"entropy_by_layer": [1.0]}, "entropy_by_layer has 1 values, expected 2"),
        ({"entropy_by_layer": None}, "entropy_by_layer is missing"),
        ({"cosine_rest": ["a", "b"]}, "details.cosine_rest.0: Input should be a valid number"),
        ({"queries": [1, 2]}, r"details_first_by_query has shape \(2, 2, 4\), expected \(2, 2, 2\)"),
    ],
)
def test_fields_that_do_not_go_with_the_arrays_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    _change(folder, fields)
    with pytest.raises(InputError, match=message):
        Measurement.load(folder)


def test_scores_are_read_and_cosines_computed_once_for_all_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_blocks, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(query_blocks, "SMALLEST_BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 9, 4, generator=generator) for heads in (4, 2))
    seen: list[Block] = []

    class Counted(Angles):
        def block(self, part: Block) -> tuple[Tensor, Tensor]:
            seen.append(part)
            return super().block(part)

    rows = score_rows(ScoreMatrix(q, k))  # a generator: it can be read only once
    means, _ = layer_details(rows, real_tokens(torch.ones(1, 9)), Counted(q, k, CAUSAL), [0])
    assert [(part.start, part.stop) for part in seen] == [(0, 4), (4, 8), (8, 9)]
    assert set(means) == {name for name, one in STATISTICS.items() if isinstance(one, OfRows)}


def test_running_sums_under_the_causal_mask_equal_the_sums_over_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads, 70, 8, generator=generator) for heads in (4, 2))
    real = torch.ones(3, 70)
    real[0, 50:] = 0
    found = [
        layer_details(score_rows(ScoreMatrix(q, k)), real_tokens(real), Angles(q, k, mask))[0]
        for mask in (CAUSAL, Window(70))  # the same keys, but not known to be the causal mask
    ]
    assert set(found[0]) == set(found[1])
    for name, means in found[0].items():
        torch.testing.assert_close(means, found[1][name], msg=name)


def test_statistics_of_angles_are_left_out_if_the_queries_are_not_available() -> None:
    q = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    means, _ = layer_details(score_rows(ScoreMatrix(q, q)), real_tokens(torch.ones(1, 9)), angles=None)
    assert [name for name in means if isinstance(STATISTICS[name], OfAngles)] == []
    assert "entropy" in means
