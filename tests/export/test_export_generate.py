"""Exported models in the ordinary use of transformers: a tokenizer's output, pipelines, streaming."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from exported_models import shaken_run, tokenizer_in
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, TextStreamer, pipeline

from sinklab.export.directory import write_directory

TEXTS = ["the sheep", "a cat sat on the mat and the sheep jumps", "the fence is high"]
HOW = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
Loaded = Callable[[str], tuple[Any, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A variant as transformers loads it, and its tokenizer."""
    folder = tmp_path_factory.mktemp("exported")
    tokenizer_in(folder)

    def load(variant: str) -> tuple[Any, Any]:
        if not (folder / variant).exists():
            write_directory(shaken_run(variant, folder / "tokenizer.json"), [], folder / variant)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / variant)
        tokenizer.pad_token = tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(folder / variant)
        model.generation_config.pad_token_id = tokenizer.eos_token_id
        return model, tokenizer

    return load


def continued(model: Any, tokenizer: Any, text: str) -> list[int]:
    ids = torch.tensor([tokenizer(text).input_ids])
    return model.generate(ids, **HOW)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("variant", ["k_biases", "prefix", "registers", "document", "linear_hybrid"])
def test_generate_accepts_a_tokenizers_output(variant: str, loaded: Loaded) -> None:
    model, tokenizer = loaded(variant)
    one = tokenizer(TEXTS[0], return_tensors="pt")
    assert model.generate(**one, **HOW)[0, one.input_ids.shape[1] :].tolist() == continued(model, tokenizer, TEXTS[0])
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    assert not bool(batch.attention_mask.all())
    together = model.generate(**batch, **HOW)[:, batch.input_ids.shape[1] :]
    assert together.tolist() == [continued(model, tokenizer, text) for text in TEXTS]


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
def test_each_step_reads_only_the_new_token(how: dict[str, int], loaded: Loaded) -> None:
    model, tokenizer = loaded("k_biases")
    prompt, read = tokenizer(TEXTS[1], return_tensors="pt"), list[int]()
    watching = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(**prompt, **(HOW | how))
    watching.remove()
    assert read == [prompt.input_ids.shape[1], 1, 1, 1, 1, 1]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_pipeline_generates(batch_size: int, loaded: Loaded) -> None:
    model, tokenizer = loaded("sink_token")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=batch_size)
    found = generator(TEXTS, **HOW, return_full_text=False)
    expected = [tokenizer.decode(continued(model, tokenizer, text)) for text in TEXTS]
    assert [one[0]["generated_text"] for one in found] == expected


def test_tokens_are_streamed(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = loaded("sigmoid")
    prompt = tokenizer(TEXTS[0], return_tensors="pt")
    expected = tokenizer.decode(continued(model, tokenizer, TEXTS[0]))
    capsys.readouterr()
    model.generate(**prompt, **HOW, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == f"{expected}\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**prompt, **HOW, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"use_cache": False},
    ],
    ids=str,
)
def test_other_ways_of_generating_take_a_padded_batch(how: dict[str, Any], loaded: Loaded) -> None:
    model, tokenizer = loaded("sink_token")
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    new = batch.input_ids.shape[1]
    torch.manual_seed(0)
    together = model.generate(**batch, **(HOW | how))[:, new:]
    assert together.shape == (len(TEXTS) * how.get("num_return_sequences", 1), HOW["max_new_tokens"])
    if not how.get("do_sample"):
        for number, text in enumerate(TEXTS):
            one = tokenizer(text, return_tensors="pt")
            alone = model.generate(**one, **(HOW | how))[:, one.input_ids.shape[1] :]
            assert together.view(len(TEXTS), -1, together.shape[1])[number].tolist() == alone.tolist()
