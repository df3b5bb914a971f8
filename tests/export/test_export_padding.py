"""Padded batches in exported models equal each sequence alone, with padding on either side."""

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from exported_models import VOCABULARY, shaken_run, some_tokens, tokenizer_in
from sampling import one_in
from torch import Tensor
from transformers import AutoModelForCausalLM

from sinklab.errors import InputError
from sinklab.export.directory import write_directory
from sinklab.interventions import VARIANTS
from sinklab.model.huggingface import SinklabConfig, SinklabForCausalLM

LENGTHS, LONGEST = (9, 3, 6), 9
COMBINED: dict[str, dict[str, Any]] = {
    **{f"backend {name}": {"attention": {"backend": name}} for name in ("eager", "sdpa", "chunked", "flex")},
    "registers in documents": {"attention": {"bias": {"kind": "sink_token", "count": 2}, "mask": "document"}},
    "a sink token behind a prefix": {"attention": {"bias": "sink_token", "mask": {"kind": "prefix", "length": 5}}},
    "alibi in a window behind a sink token": {
        "position": "alibi",
        "attention": {"bias": "sink_token", "mask": {"kind": "window", "width": 4}},
    },
    "t5 behind a prefix": {"position": "t5", "attention": {"mask": {"kind": "prefix", "length": 5}}},
    "learned positions behind registers": {
        "position": "learnable",
        "attention": {"bias": {"kind": "sink_token", "count": 2}},
    },
    "forgetting in documents behind a sink token": {
        "attention": {"operation": "forgetting", "bias": "sink_token", "mask": "document"}
    },
    "linear layers behind a sink token": {"mixer": {"kind": "gated_delta", "every": 2}, "attention.bias": "sink_token"},
    "exclusive documents with a sink logit": {
        "exclusive": True,
        "norm": {"head_norm": True},
        "attention": {"bias": "sink_logit", "mask": "document"},
    },
    "exclusive behind a k bias": {"exclusive": True, "norm": {"head_norm": True}, "attention": {"bias": "k"}},
    "linear layers behind a prefix": {
        "mixer": {"kind": "gated_delta", "every": 2},
        "attention": {"mask": {"kind": "prefix", "length": 5}},
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_in(folder)
    return folder / "tokenizer.json"


def model_of(run: Any) -> Any:
    """The model of a run as a transformers model, without saving and loading it."""
    model = SinklabForCausalLM(SinklabConfig(run.model.config.model_dump(mode="json"))).eval()
    model.transformer.load_state_dict(run.model.state_dict())
    return model


def case(name: str, tokenizer: Path) -> Any:
    if name in VARIANTS:
        return model_of(shaken_run(name, tokenizer))
    sizes = dict(COMBINED[name])
    if "attention.bias" in sizes:
        sizes["attention"] = {"bias": sizes.pop("attention.bias")}
    return model_of(shaken_run("softmax", tokenizer, **sizes))


def prompts() -> list[Tensor]:
    """Prompts of unequal length: one is shorter than the prefix, and two contain EOS, for document masks."""
    rows = list(some_tokens(len(LENGTHS), LONGEST))
    rows[0][4] = rows[2][2] = 0
    return [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]


def padded(rows: list[Tensor], before: list[int], width: int = LONGEST) -> tuple[Tensor, Tensor]:
    """Tokens and mask; at padding there are tokens as well, which must not be read."""
    tokens_BT = torch.randint(VOCABULARY, (len(rows), width), generator=torch.Generator().manual_seed(5))
    mask_BT = torch.zeros(len(rows), width, dtype=torch.long)
    for number, (row, start) in enumerate(zip(rows, before, strict=True)):
        tokens_BT[number, start : start + len(row)] = row
        mask_BT[number, start : start + len(row)] = 1
    return tokens_BT, mask_BT


@pytest.mark.parametrize("name", [*one_in(3, VARIANTS), *COMBINED])
@torch.no_grad()
def test_padded_sequences_have_the_logits_of_each_alone(name: str, tokenizer: Path) -> None:
    model, rows = case(name, tokenizer), prompts()
    alone = [model(row[None]).logits[0] for row in rows]
    for before in ([0, 6, 3], [0, 0, 0], [0, 3, 1]):  # on the left, on the right, on both
        tokens_BT, mask_BT = padded(rows, before)
        logits_BTV = model(tokens_BT, attention_mask=mask_BT).logits
        for number, (start, expected_TV) in enumerate(zip(before, alone, strict=True)):
            assert_close(logits_BTV[number, start : start + len(expected_TV)], expected_TV, what=f"{before}, {number}")


@pytest.mark.parametrize("name", one_in(12, [*VARIANTS, *COMBINED]))
@torch.no_grad()
def test_padded_prompts_are_continued_as_each_alone(name: str, tokenizer: Path) -> None:
    model, rows = case(name, tokenizer), prompts()
    tokens_BT, mask_BT = padded(rows, [LONGEST - len(row) for row in rows])
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for cache in (True, False):
        together = model.generate(tokens_BT, attention_mask=mask_BT, use_cache=cache, **how)
        for number, row in enumerate(rows):
            alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **how)
            assert torch.equal(together[number, LONGEST:], alone[0, len(row) :]), (number, cache)


@pytest.mark.parametrize("name", ["softmax", "prefix", "sink_token", "linear_hybrid", "document"])
@torch.no_grad()
def test_a_cache_with_padding_can_be_extended_exchanged_and_cropped(name: str, tokenizer: Path) -> None:
    model, rows = case(name, tokenizer), prompts()
    tokens_BT, mask_BT = padded(rows, [0, 6, 3])
    whole = model(tokens_BT, attention_mask=mask_BT).logits
    past: Any = None
    last_BTV = whole
    for start in range(0, LONGEST, 3):  # the first pieces of a row are nothing but padding
        output = model(
            tokens_BT[:, start : start + 3],
            attention_mask=mask_BT[:, : start + 3],
            past_key_values=past,
            use_cache=True,
        )
        past, last_BTV = output.past_key_values, output.logits
    assert_close(last_BTV[:, -1], whole[:, -1])
    past.crop(LONGEST - 1)
    past.reorder_cache(torch.tensor([2, 0, 1]))
    logits = model(tokens_BT[[2, 0, 1], -1:], past_key_values=past, use_cache=True).logits  # the padding is known
    assert_close(logits[:, -1], whole[[2, 0, 1], -1])


@torch.no_grad()
def test_few_tokens_before_padding_under_a_prefix_see_no_padding(tokenizer: Path) -> None:
    model = model_of(shaken_run("softmax", tokenizer, attention={"mask": {"kind": "prefix", "length": 8}}))
    tokens_BT, mask_BT = some_tokens(length=10), torch.ones(2, 10, dtype=torch.long)
    mask_BT[0, 5:] = 0
    logits_BTV = model(tokens_BT, attention_mask=mask_BT).logits
    assert_close(logits_BTV[0, :5], model(tokens_BT[:1, :5]).logits[0])
    assert_close(logits_BTV[1], model(tokens_BT[1:]).logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_loss_and_gives_no_gradient(side: str, tokenizer: Path) -> None:
    model = model_of(shaken_run("softmax", tokenizer, attention={"mask": {"kind": "prefix", "length": 2}}))
    rows = prompts()
    tokens_BT, mask_BT = padded(rows, [LONGEST - len(row) if side == "left" else 0 for row in rows])
    loss = model(tokens_BT, attention_mask=mask_BT, labels=tokens_BT).loss
    counted = [len(row) - 2 for row in rows]
    losses = [model(row[None], labels=row[None]).loss for row in rows]
    assert_close(loss, sum(one * n for one, n in zip(losses, counted, strict=True)) / sum(counted))
    loss.backward()
    unread = sorted(set(range(VOCABULARY)) - {int(token) for row in rows for token in row})
    assert not model.transformer.embedding.weight.grad[unread].any()


def test_labels_are_refused_if_some_logits_are_left_out(tokenizer: Path) -> None:
    model, tokens_BT = case("k_biases", tokenizer), prompts()[0][None]
    for kept in (1, torch.tensor([0])):
        with pytest.raises(InputError, match="leave out logits_to_keep"):
            model(tokens_BT, labels=tokens_BT, logits_to_keep=kept)


def test_impossible_padding_is_refused_with_a_remedy(tokenizer: Path) -> None:
    model, rows = case("k_biases", tokenizer), prompts()
    tokens_BT, mask_BT = padded(rows, [0, 0, 0])
    with pytest.raises(InputError, match=r"padded on the right, .* tokenizer\.padding_side = 'left'"):
        model.generate(tokens_BT, attention_mask=mask_BT, max_new_tokens=2)
    hole_BT = torch.ones_like(mask_BT)
    hole_BT[0, 4] = 0
    with pytest.raises(InputError, match="padding between the tokens"):
        model(tokens_BT, attention_mask=hole_BT)
    with pytest.raises(InputError, match=r"attention_mask has shape \(2, 1, 6, 6\): expected \(sequences, tokens\)"):
        model(some_tokens(), attention_mask=torch.ones(2, 1, 6, 6))
    past = model(tokens_BT, use_cache=True).past_key_values
    with pytest.raises(InputError, match=r"attention_mask has shape \(3, 2\): .* here \(3, 11\)"):
        model(tokens_BT[:, :2], attention_mask=mask_BT[:, :2], past_key_values=past)


@torch.no_grad()
def test_an_exported_model_supports_padding(tokenizer: Path, tmp_path: Path) -> None:
    run = shaken_run("registers", tokenizer)
    write_directory(run, [], tmp_path / "one")
    model, rows = AutoModelForCausalLM.from_pretrained(tmp_path / "one"), prompts()
    tokens_BT, mask_BT = padded(rows, [0, 6, 3])
    assert_close(model(tokens_BT, attention_mask=mask_BT).logits[1, 6:], run.model(rows[1][None])[0])
