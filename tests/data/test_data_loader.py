"""Batches: a function of (seed, index) alone, with the data interventions of the recipe."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinklab.data.loader import DataConfig, FixedToken, Loader, RandomTokens
from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import InputError
from sinklab.train.recipe import load_recipe
from sinklab.train.run import open_run

TOKENS = np.arange(2, 1002, dtype=np.uint16)  # 1000 different tokens; 0 is EOS and 1 BOS
VOCAB = 1002


def loader(
    *, context: int = 9, batch_size: int = 8, seed: int = 0, shuffle: bool = True, tokens: np.ndarray = TOKENS, **config
) -> Loader:
    return Loader(
        tokens,
        context=context,
        batch_size=batch_size,
        seed=seed,
        config=DataConfig(**config),
        vocab_size=VOCAB,
        bos_id=1,
        shuffle=shuffle,
    )


def test_a_batch_has_chunks_of_context_plus_one_tokens():
    batch = loader().batch(0)
    assert batch.shape == (8, 10)
    assert batch.dtype == torch.int64
    for row in batch.tolist():
        assert all(b == a + 1 for a, b in pairwise(row))
        assert (row[0] - 2) % 10 == 0


def test_an_epoch_has_every_chunk_once_and_the_next_another_order():
    it = loader(batch_size=10)
    epochs = [torch.cat([it.batch(10 * epoch + i) for i in range(10)]) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == TOKENS.tolist()
    assert not torch.equal(*epochs)


def test_a_batch_may_straddle_two_epochs_without_losing_a_chunk():
    it = loader(batch_size=30)
    starts = torch.cat([it.batch(i)[:, 0] for i in range(10)]).tolist()
    assert all(starts.count(start) == 3 for start in set(starts))
    assert len(set(starts)) == 100


@given(index=st.integers(0, 10_000), seed=st.integers(0, 2**31), count=st.integers(1, 6))
def test_a_batch_does_not_depend_on_earlier_batches_or_processes(index: int, seed: int, count: int):
    config = {"bos": True, "random_tokens": RandomTokens(start=2, end=5)}
    visited = loader(seed=seed, **config)
    in_turn = [visited.batch(i) for i in range(index, index + count)]
    assert torch.equal(in_turn[-1], loader(seed=seed, **config).batch(index + count - 1))


def test_the_seed_decides_the_order():
    same, again, other = (loader(seed=seed).batch(0) for seed in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_rows_of_all_processes_together_are_the_batch(ranks: int):
    config = {"fixed_token": FixedToken(positions=[1]), "random_tokens": RandomTokens(start=3, end=9)}
    for index in (0, 12, 40):
        parts = [loader(**config).batch(index, rows=slice(rank, None, ranks)) for rank in range(ranks)]
        whole = loader(**config).batch(index)
        for rank, part in enumerate(parts):
            assert torch.equal(part, whole[rank::ranks])
    assert torch.equal(loader().batch(3, rows=slice(2, 5)), loader().batch(3)[2:5])


def test_with_bos_a_chunk_is_bos_and_context_tokens():
    it = loader(bos=True, shuffle=False, batch_size=4)
    assert it.batch(0)[:, 0].tolist() == [1] * 4
    assert it.batch(0)[:, 1:].flatten().tolist() == list(range(2, 2 + 4 * 9))
    assert it.chunks == 1000 // 9


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_fixed_token_is_at_its_positions_of_every_chunk_only(shuffle: bool):
    fixed = FixedToken(token_id=1, positions=[0, 2])
    changed, plain = loader(fixed_token=fixed, shuffle=shuffle), loader(shuffle=shuffle)
    for index in range(5):
        got, expected = changed.batch(index), plain.batch(index)
        assert (got[:, [0, 2]] == 1).all()
        assert torch.equal(got[:, [1, *range(3, 10)]], expected[:, [1, *range(3, 10)]])


@pytest.mark.parametrize("shuffle", [True, False])
def test_random_tokens_replace_their_positions_and_no_others(shuffle: bool):
    changed = loader(random_tokens=RandomTokens(start=2, end=6), shuffle=shuffle)
    plain = loader(shuffle=shuffle)
    for index in range(5):
        got, expected = changed.batch(index), plain.batch(index)
        assert torch.equal(got[:, [0, 1, 6, 7, 8, 9]], expected[:, [0, 1, 6, 7, 8, 9]])
        assert (got[:, 2:6] != expected[:, 2:6]).float().mean() > 0.9
        assert ((got >= 0) & (got < VOCAB)).all()


def test_random_tokens_belong_to_the_chunk_and_are_uniform():
    it = loader(random_tokens=RandomTokens(start=0, end=9), batch_size=100)
    first, second = (batch[batch[:, 9].argsort()] for batch in (it.batch(0), it.batch(1)))
    assert torch.equal(first, second)
    drawn = torch.cat([loader(seed=s, random_tokens=RandomTokens(start=0, end=9)).batch(0)[:, :9] for s in range(60)])
    assert abs(drawn.double().mean().item() / (VOCAB - 1) - 0.5) < 0.02
    assert drawn.unique().numel() > 0.95 * VOCAB


def test_training_and_validation_draw_different_random_tokens():
    drawn = {"random_tokens": RandomTokens(start=0, end=9), "batch_size": 100}
    train, valid = loader(**drawn).batch(0), loader(**drawn, shuffle=False).batch(0)
    train = train[train[:, 9].argsort()]  # the last token is not replaced, so it identifies the chunk
    assert torch.equal(train[:, 9], valid[:, 9])
    assert (train[:, :9] == valid[:, :9]).double().mean() < 0.02


def test_the_budget_limits_training_and_not_validation():
    seen = torch.cat([loader(token_budget=300, batch_size=5).batch(i) for i in range(12)])
    assert sorted(set(seen.flatten().tolist())) == list(range(2, 302))
    assert loader(token_budget=300, shuffle=False).chunks == 100


def test_validation_goes_once_through_the_shard_in_order():
    it = loader(shuffle=False, batch_size=30)
    batches = [it.batch(i) for i in range(len(it))]
    assert [len(batch) for batch in batches] == [30, 30, 30, 10]
    assert torch.cat(batches).flatten().tolist() == TOKENS.tolist()
    with pytest.raises(AssertionError, match="batch 4 is out of range"):
        it.batch(4)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"context": 1000}, "training data has 1,000 tokens, but one chunk needs 1,001"),
        (
            {"context": 1001, "bos": True, "shuffle": False},
            "validation data has 1,000 tokens, but one chunk needs 1,001",
        ),
        ({"context": 9, "token_budget": 9}, "training data has 9 tokens, but one chunk needs 10"),
        ({"token_budget": 1001}, "token_budget is 1,001, but the training shard has 1,000"),
        ({"fixed_token": FixedToken(positions=[10])}, "fixed_token.positions has 10.*positions 0..9"),
        ({"fixed_token": FixedToken(token_id=1002, positions=[0])}, "token_id is 1002.*ids are 0..1001"),
        ({"random_tokens": RandomTokens(start=0, end=11)}, "random_tokens.end is 11.*positions 0..9"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_numbers(values: dict, told: str):
    with pytest.raises(InputError, match=told):
        loader(**values)


def test_exactly_one_chunk_is_enough_to_train():
    it = loader(context=999, batch_size=2)
    assert it.batch(5).tolist() == [TOKENS.tolist()] * 2


def test_loaders_of_prepared_data_use_its_shards_and_its_bos(tmp_path: Path):
    data = prepare(settings_of("stdlib", "train:300", text_limit_bytes=200_000, valid_fraction=0.2), tmp_path / "out")
    recipe = load_recipe("tiny", ["model.context=16", "metric.length=16", "train.batch_size=4", "data.bos=true"])
    train, valid = (open_run(recipe, data, tmp_path / "run").loader(split) for split in ("train", "valid"))
    assert (train.chunks, valid.chunks) == (len(data.train) // 16, len(data.valid) // 16)
    assert valid.batch(0)[0].tolist() == [data.bos_id, *data.valid[:16].tolist()]
    assert (train.batch(7)[:, 0] == data.bos_id).all()
