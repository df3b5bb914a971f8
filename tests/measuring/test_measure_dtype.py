"""`--dtype auto`: the checkpoint's own, but float32 on a processor that would emulate it; the notes say so."""

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
    """A tiny model in that dtype; its config may not say so."""
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
def test_a_processor_that_emulates_the_own_dtype_measures_in_float32_and_says_so(
    emulating: dict[str, Any], own: str
) -> None:
    assert emulating[own]["dtype"] == "float32"
    assert emulating[own]["notes"] == [
        f"the weights are {own} and were converted to float32, because this processor emulates {own} slowly "
        f"(to use it anyway: --dtype {own})"
    ]


def test_so_it_does_where_only_the_weights_tell_their_dtype(emulating: dict[str, Any]) -> None:
    assert emulating["undeclared"]["dtype"] == "float32"
    assert "the weights are bfloat16" in emulating["undeclared"]["notes"][0]


def test_float32_weights_and_a_dtype_that_is_asked_for_stay(emulating: dict[str, Any]) -> None:
    assert (emulating["float32"]["dtype"], emulating["float32"]["notes"]) == ("float32", [])
    assert (emulating["asked for"]["dtype"], emulating["asked for"]["notes"]) == ("bfloat16", [])


def test_training_decides_by_the_same_detection(emulating: dict[str, Any]) -> None:
    assert emulating["auto"] == "fp32"


def test_on_this_processor_auto_is_the_own_dtype_where_its_products_are_native() -> None:
    native = multiplies_natively(torch.bfloat16, CPU)
    assert resolved_precision("auto", CPU) == ("bf16" if native else "fp32")
    assert float32_if_emulated(torch.bfloat16, CPU) == (torch.bfloat16 if native else torch.float32)
    assert float32_if_emulated(torch.float64, CPU) == torch.float64


def test_the_name_of_the_processor_tells_generations_apart() -> None:
    info = Path("/proc/cpuinfo")
    found = dict(re.findall(r"^(cpu family|model)\s*: (\d+)$", info.read_text(), re.M)) if info.is_file() else {}
    if set(found) != {"cpu family", "model"}:
        pytest.skip("this machine does not tell the family and model of its processor")
    assert processor_name().endswith(f", family {found['cpu family']}, model {found['model']}")


def test_a_card_takes_the_dtype_of_the_files() -> None:
    assert float32_if_emulated(torch.float16, torch.device("cuda")) == torch.float16
