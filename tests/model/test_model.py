"""The transformer: its initialisation, its parts, and its agreement with a plain Llama."""

import math

import pytest
import torch
from closeness import assert_close
from own_models import llama_of

from sinklab.model.llama import differences
from sinklab.model.transformer import Transformer
from sinklab.train.planning import model_flops
from sinklab.train.recipe import Recipe, build_recipe

SMALL = {
    "model": {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 97, "context": 32},
    "metric": {"length": 32},
}


def small(**model: object) -> Recipe:
    """A small recipe with the model keys changed."""
    return build_recipe(SMALL, {"model": model})


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_default_variant_is_a_llama(kv_heads: int) -> None:
    model = Transformer(small(kv_heads=kv_heads).model, seed=3).eval()
    llama = llama_of(model)
    with torch.no_grad():
        ours, theirs = model(tokens()), llama(tokens()).logits
    assert_close(ours, theirs)


def test_other_variants_are_not_llamas() -> None:
    (sentence,) = differences(small(attention={"bias": "k"}).model).values()
    assert sentence.startswith("model.attention.bias is k (a Llama has none")


def test_weights_start_by_the_papers_law() -> None:
    model = Transformer(small(width=256, ffn_width=512, vocab_size=2000).model)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}
    assert stds["embedding.weight"] == pytest.approx(math.sqrt(2 / (5 * 256)), rel=0.02)
    assert stds["blocks.0.attention.qkv.weight"] == pytest.approx(math.sqrt(2 / (5 * 256)), rel=0.02)
    assert stds["blocks.1.ffn.down.weight"] == pytest.approx(1 / (math.sqrt(512) * 2), rel=0.02)
    assert all((p == 1).all() for name, p in model.named_parameters() if name.endswith("norm.weight"))


def test_biases_start_small_and_leave_the_other_weights_as_in_the_baseline() -> None:
    plain = Transformer(small().model, seed=1).state_dict()
    biased = Transformer(small(attention={"bias": "kv"}).model, seed=1).state_dict()
    assert all(torch.equal(biased[name], weight) for name, weight in plain.items())
    added = [weight for name, weight in biased.items() if name not in plain]
    assert len(added) == 4
    assert torch.cat(added).std().item() == pytest.approx(0.02, rel=0.2)


def test_seeds_give_different_weights() -> None:
    first, second = (Transformer(small().model, seed=s).head.weight for s in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("bias", ["none", "sink_token", "k", "kv", "v"])
def test_no_position_sees_a_later_token(bias: str) -> None:
    model = Transformer(small(attention={"bias": bias}).model).eval()
    before = tokens()
    after = before.clone()
    after[:, 12:] = (after[:, 12:] + 1) % 97
    with torch.no_grad():
        assert_close(model(before)[:, :12], model(after)[:, :12])


def test_a_prefix_mask_leaves_its_tokens_out_of_the_loss() -> None:
    model = Transformer(small(attention={"mask": {"kind": "prefix", "length": 5}}).model).eval()
    batch = tokens()
    logits = model(batch[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits[:, 4:].flatten(0, 1), batch[:, 5:].flatten())
    torch.testing.assert_close(model.loss(batch), expected)
    changed = batch.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 97
    with torch.no_grad():
        assert not torch.equal(model(batch)[:, 1], model(changed)[:, 1])


def test_with_a_prefix_as_long_as_the_context_one_token_is_predicted() -> None:
    config = small(attention={"mask": {"kind": "prefix", "length": 32}}).model
    model, chunk = Transformer(config), tokens(length=33)
    expected = torch.nn.functional.cross_entropy(model(chunk[:, :-1])[:, -1], chunk[:, -1])
    loss = model.loss(chunk)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model_flops(config).head == model_flops(small().model).head / 32


def test_post_norm_has_no_final_norm() -> None:
    model = Transformer(small(norm={"placement": "post"}).model)
    assert not any(name.startswith("final_norm") for name, _ in model.named_parameters())
    with torch.no_grad():
        hidden = model.hidden(tokens())
    torch.testing.assert_close(hidden.square().mean(-1), torch.ones(2, 20), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ffn", ["relu", "gelu", "swish", "reglu", "geglu", "swiglu"])
def test_every_feed_forward_trains(ffn: str) -> None:
    model = Transformer(small(ffn=ffn).model)
    model.loss(tokens()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
