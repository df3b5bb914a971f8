"""`--dtype auto`: the dtype of the checkpoint, but float32 on a processor that emulates it; the notes say so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import tiny_model

from sinklab.device import float32_if_emulated, multiplies_natively, processor_name
from sinklab.train.run import resolved_precision

CPU = torch.device("cpu")
WITHOUT_NATIVE = """
import json, sys
from sinklab.survey.measure import measure_model
from sinklab.models.huggingface.loading import Loading
from sinklab.measuring.options import Options
from sinklab.measuring.options import Request
from sinklab.train.run import resolved_precision
import torch

asked = Request(options=Options(inputs="random"), sequences=2, length=8)
found = {}
for line in sys.argv[1:]:
    folder, dtype = line.split(",")
    measured = measure_model(folder, None, asked, loading=Loading(dtype, "cpu"))
    found[line] = measured.document()
cpu = torch.device("cpu")
print(json.dumps({"measured": found, "auto": resolved_precision("auto", cpu)}))
"""


def saved(folder: Path, dtype: torch.dtype, declared: bool = True) -> Path:
    """A tiny model saved in this dtype; its config has no dtype unless `declared`."""
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(folder, "gptneox"), dtype=dtype)
    model.save_pretrained(folder)
    if not declared:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    return folder


@pytest.fixture(scope="module")
def emulating(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of WITHOUT_NATIVE on an emulated processor without native 16-bit products (ATEN_CPU_CAPABILITY)."""
    root = tmp_path_factory.mktemp("models")
    asked = [f"{saved(root / str(dtype), dtype)},auto" for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    asked.append(f"{saved(root / 'undeclared', torch.bfloat16, declared=False)},auto")
    asked.append(f"{root / str(torch.bfloat16)},bfloat16")
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE, *asked],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(ran.stdout)
    names = ("bfloat16", "float16", "float32", "undeclared", "asked for")
    return answer | dict(zip(names, answer["measured"].values(), strict=True))


@pytest.mark.parametrize("own", ["bfloat16", "float16"])
def test_weights_in_a_dtype_that_the_processor_emulates_are_measured_in_float32_with_a_note(
    emulating: dict[str, Any], own: str
) -> None:
    assert emulating[own]["dtype"] == "float32"
    assert emulating[own]["notes"] == [
        f"the weights are {own} and were converted to float32, because this processor emulates {own} slowly "
        f"(to use it anyway: --dtype {own})"
    ]


def test_dtype_is_read_from_the_weights_if_the_config_has_none(emulating: dict[str, Any]) -> None:
    assert emulating["undeclared"]["dtype"] == "float32"
    assert "the weights are bfloat16" in emulating["undeclared"]["notes"][0]


def test_float32_weights_and_a_requested_dtype_are_kept_without_a_note(emulating: dict[str, Any]) -> None:
    assert (emulating["float32"]["dtype"], emulating["float32"]["notes"]) == ("float32", [])
    assert (emulating["asked for"]["dtype"], emulating["asked for"]["notes"]) == ("bfloat16", [])


def test_training_with_precision_auto_is_in_float32_if_the_processor_emulates_bfloat16(
    emulating: dict[str, Any],
) -> None:
    assert emulating["auto"] == "fp32"


def test_auto_keeps_bfloat16_on_this_processor_exactly_if_its_products_are_native() -> None:
    native = multiplies_natively(torch.bfloat16, CPU)
    assert resolved_precision("auto", CPU) == ("bf16" if native else "fp32")
    assert float32_if_emulated(torch.bfloat16, CPU) == (torch.bfloat16 if native else torch.float32)
    assert float32_if_emulated(torch.float64, CPU) == torch.float64


def test_the_name_of_the_processor_ends_with_its_family_and_model() -> None:
    info = Path("/proc/cpuinfo")
    found = dict(re.findall(r"^(cpu family|model)\s*: (\d+)$", info.read_text(), re.M)) if info.is_file() else {}
    if set(found) != {"cpu family", "model"}:
        pytest.skip("this machine does not tell the family and model of its processor")
    assert processor_name().endswith(f", family {found['cpu family']}, model {found['model']}")


def test_auto_keeps_the_dtype_of_the_checkpoint_on_cuda() -> None:
    assert float32_if_emulated(torch.float16, torch.device("cuda")) == torch.float16
