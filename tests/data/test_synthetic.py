"""The synthetic tasks: their text, and the sink that softmax develops on them where relu attention does not."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sinklab.data.corpora import TASKS, parse, synthetic_documents
from sinklab.data.prepare import prepare, prepared, settings_of
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.train.loop import Trainer
from sinklab.train.recipe import load_recipe
from sinklab.train.run import load_run, open_run


def documents(source: str) -> list[list[str]]:
    request = parse(source)
    assert request is not None
    return [text.split() for text in synthetic_documents(request)]


def test_backcopy_repeats_the_token_before_a_trigger() -> None:
    drawn = documents("synthetic:bigram_backcopy:documents=200")
    copies = [
        (words[i - 1], words[i + 1]) for words in drawn for i in range(1, len(words) - 1) if words[i].startswith("t")
    ]
    assert len(copies) > 1000
    assert all(before == after for before, after in copies)


def test_backcopy_follows_one_markov_chain_elsewhere() -> None:
    first, second = (documents(f"synthetic:bigram_backcopy:documents={n}") for n in (400, 401))
    counts = [np.zeros((64, 64)) for _ in range(2)]
    for table, drawn in zip(counts, (first, second), strict=True):
        for words in drawn:
            for a, b in pairwise(words):
                if a.startswith("s") and b.startswith("s"):
                    table[int(a[1:]), int(b[1:])] += 1
    assert np.corrcoef(counts[0].ravel(), counts[1].ravel())[0, 1] > 0.9


def test_a_symbol_after_a_trigger_has_appeared_before_it() -> None:
    places = []
    for words in documents("synthetic:trigger_average:documents=300"):
        symbols = [word[1:] for word in words]
        assert not words[0].startswith("t")
        for i in range(1, len(words) - 1):
            if words[i].startswith("t"):
                assert words[i + 1] in {f"s{symbol}" for symbol in symbols[:i]}
                places.append(symbols.index(symbols[i + 1]) / i)
    share = sum(
        word.startswith("t") for words in documents("synthetic:trigger_average:documents=300") for word in words
    )
    assert 0.1 < share / (300 * 63) < 0.25
    assert 0.3 < np.mean(places) < 0.55  # uniform over earlier symbols, whose first occurrences are nearer to the start


@pytest.mark.parametrize("name", TASKS)
def test_the_same_source_gives_the_same_text_and_another_seed_another(name: str) -> None:
    first, again, other = (documents(f"synthetic:{name}:documents=20,seed={seed}") for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_document_fills_one_chunk(tmp_path: Path) -> None:
    recipe = load_recipe("backcopy", ["data.source=synthetic:bigram_backcopy:documents=200"])
    data = prepared(recipe.data, tmp_path)
    batch = open_run(recipe, data, tmp_path / "run").loader("train").batch(0)
    assert (data.vocab_size, data.eos_id, data.bos_id) == (2 + 67, 0, 1)
    assert (batch[:, 0] == data.bos_id).all()
    assert (batch[:, -1] == data.eos_id).all()
    assert (batch[:, 1:-1] > 1).all()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("synthetic:copy", "unknown task 'copy'; choose from bigram_backcopy, trigger_average"),
        ("synthetic:trigger_average:length=1", "invalid option 'length=1': use length=N with N at least 4"),
        ("synthetic:trigger_average:size=9", "invalid option 'size=9': use"),
    ],
)
def test_a_wrong_source_is_refused(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(source)


def test_synthetic_text_needs_its_own_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="require the tokenizer words"):
        load_recipe("tiny", ["data.source=synthetic:bigram_backcopy"])
    with pytest.raises(InputError, match="require the tokenizer words"):
        prepare(settings_of("synthetic:bigram_backcopy:documents=20", "train:300"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "operation", "sink"),
    [("backcopy", "softmax", True), ("trigger_average", "softmax", True), ("trigger_average", "relu", False)],
)
def test_the_shipped_synthetic_recipe_has_its_documented_effect(
    recipe: str, operation: str, sink: bool, tmp_path: Path
) -> None:
    loaded = load_recipe(recipe, [f"model.attention.operation={operation}"])
    run = open_run(loaded, prepared(loaded.data, tmp_path / "cache"), tmp_path / "run")
    assert Trainer(run).train().status == "done"
    rate = Measurement.load(tmp_path / "run").sink_rate[0]
    assert rate > 90 if sink else rate < 5


@pytest.mark.slow
def test_the_backcopy_head_copies_at_triggers_and_attends_to_bos_elsewhere(tmp_path: Path) -> None:
    loaded = load_recipe("backcopy", ["train.steps=500", "train.eval_every=500"])
    data = prepared(loaded.data, tmp_path / "cache")
    run = open_run(loaded, data, tmp_path / "run")
    Trainer(run).train()
    model = load_run(tmp_path / "run").model
    batch = run.loader("train").batch(0)[:, :-1]
    seen: list[torch.Tensor] = []
    model.get_submodule("blocks.0.attention.core").register_forward_pre_hook(lambda _, args: seen.extend(args[:2]))
    with torch.no_grad():
        model(batch)
    q, k = (x[:, 0] for x in seen)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    trigger = (batch >= 2) & (batch < 5)
    trigger[:, :8] = False
    other = ~trigger
    other[:, :8] = False
    back = weights.diagonal(-1, 1, 2)[trigger[:, 1:]].mean()
    assert back > weights[..., 0][trigger].mean()
    assert weights[..., 0][other].mean() > 0.3
