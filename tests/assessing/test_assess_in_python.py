"""`sinklab.assess` on a text or on token ids: a model by its name or in memory."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from tiny_models import text_file, tiny_model
from torch.utils.data import DataLoader, TensorDataset

import sinklab
from sinklab.assessing.assess_model import assess
from sinklab.assessing.parts.bos import Bos
from sinklab.assessing.parts.kv_formats import KVFormats
from sinklab.assessing.parts.streaming import Streaming
from sinklab.assessing.settings import AssessOptions
from sinklab.errors import InputError

SIZES = {"length": 16, "stream_length": 32, "sequences": 2, "kept": (0, 2), "caches": (8,)}


def test_a_model_in_memory_and_its_name_have_the_losses_of_the_command(tmp_path: Path) -> None:
    folder, text = tiny_model(tmp_path / "model", "neox", bos=True), text_file(tmp_path / "text.jsonl")
    expected = assess(str(folder), text, AssessOptions(parts=("streaming", "bos"), **SIZES))
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    for given in (str(folder), model):
        found = sinklab.assess(
            given, text=text, parts=["streaming", "bos"], out=tmp_path / type(given).__name__, **SIZES
        )
        assert found.result(Streaming) == expected.result(Streaming)
        assert found.result(Bos) == expected.result(Bos)
        assert (tmp_path / type(given).__name__ / "assessment.json").is_file()


def test_token_ids_are_read_unchanged_without_a_tokenizer(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model", "neox"))
    model.config.name_or_path = ""
    tokens = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    found = sinklab.assess(model, tokens, parts=["streaming", "kv_formats"], kept=(0, 2), caches=(8,), quick=True)
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert found.result(KVFormats).unchanged.loss == pytest.approx(float(loss), rel=1e-5)
    assert found.result(Streaming).sequences == 4
    batches = DataLoader(TensorDataset(tokens), batch_size=3)
    again = sinklab.assess(model, batches, parts=["kv_formats"], quick=True)
    assert again.result(KVFormats).unchanged.loss == found.result(KVFormats).unchanged.loss


def test_two_texts_padding_and_impossible_sizes_are_refused(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model", "neox"))
    with pytest.raises(InputError, match="not both"):
        sinklab.assess(model, [[1, 2]], text="stdlib")
    padded = {"input_ids": torch.ones(1, 24).long(), "attention_mask": torch.arange(24)[None] > 3}
    with pytest.raises(InputError, match="padding, which is not supported"):
        sinklab.assess(model, padded, parts=["quantisation"])
    with pytest.raises(InputError, match=r"^`length=9999` exceeds .* set at most `length=\d+`$"):
        sinklab.assess(model, text="stdlib", length=9999)
    with pytest.raises(InputError, match=r"^`caches=1`: Input should be"):
        sinklab.assess(model, text="stdlib", caches=(1,))
    with pytest.raises(InputError, match="shape"):
        sinklab.assess(model, torch.ones(1, 24).long(), parts=["quantisation"], kept=(0, 2), caches=(8,))


def test_the_text_of_sinklab_is_read_if_none_is_given(tmp_path: Path) -> None:
    found = sinklab.assess(str(tiny_model(tmp_path / "model", "neox")), parts=["bos"], length=16, sequences=1)
    assert any("--text" in note for note in found.notes)
