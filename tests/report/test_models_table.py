"""`sinklab report --table`: a row per measured model, strongest sink first."""

import csv
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

import sinklab
from sinklab.errors import InputError
from sinklab.report.collect import collect
from sinklab.report.models_table import COLUMNS, write_models_table

TOKENS = torch.randint(3, 20, (4, 24), generator=torch.Generator().manual_seed(0))


def measured(folder: Path, kind: str) -> sinklab.Measurement:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(folder / f"model-{kind}", kind))
    found = sinklab.measure(model, TOKENS, eps=0.05)
    found.save(folder / kind)
    sinklab.assess(model, TOKENS, parts=["streaming"], caches=(8,), kept=(0, 2), out=folder / kind / "assess")
    return found


def test_each_measured_model_has_a_row_with_its_numbers(tmp_path: Path) -> None:
    models = {kind: measured(tmp_path, kind) for kind in ("gpt2", "neox")}
    data = collect([tmp_path / kind for kind in models])
    write_models_table(data, tmp_path / "models.csv")
    with (tmp_path / "models.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert {row["model"] for row in rows} == set(models)
    rates = [float(row["sink_1"]) for row in rows]
    assert rates == sorted(rates, reverse=True)
    for row in rows:
        m = models[row["model"]]
        assert (row["sequences"], row["length"], row["layers"]) == ("4", "24", "2")
        assert float(row["sink_1"]) == pytest.approx(m.sink_rate[0])
        assert float(row["importance_first"]) == pytest.approx(100 * m.importance[:, :, 0].mean(), rel=1e-5)
        assert float(row["norm_ratio"]) == pytest.approx(max(m.hidden_norm_ratio or ()))
        assert float(row["loss"]) == pytest.approx(m.loss)
        assert "" not in (row["streaming_added"], row["streaming_kept_added"])
    write_models_table(data, tmp_path / "models.md")
    lines = (tmp_path / "models.md").read_text("utf-8").splitlines()
    assert len(lines) == 2 + len(models)
    assert f"| {rates[0]:.1f} |" in lines[2]


def test_another_suffix_and_folders_without_a_measurement_are_refused(tmp_path: Path) -> None:
    measured(tmp_path, "gpt2")
    data = collect([tmp_path / "gpt2"])
    with pytest.raises(InputError, match=r"\.md .* or \.csv"):
        write_models_table(data, tmp_path / "models.xlsx")
    with pytest.raises(InputError, match="no measurement"):
        write_models_table(collect([tmp_path / "gpt2" / "assess"]), tmp_path / "models.md")
    assert not list(tmp_path.glob("models.*"))
