"""Loss and divergence by hand, and text beyond the context."""

import pytest
import torch
from assessed import CONTEXT, small, some_tokens
from closeness import assert_close

from sinklab.assessing.parts.length import assess_length
from sinklab.assessing.parts.streaming import RollingCache, assess_streaming
from sinklab.assessing.reading import PairedReader, changed_attention
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import SinklabError


@torch.no_grad()
def test_loss_and_divergence_are_those_of_the_formulas() -> None:
    one, tokens = small(), some_tokens()
    p = one.module(tokens).softmax(-1)
    with changed_attention(one, RollingCache(3, 0)):
        q = one.module(tokens).softmax(-1)
    found = PairedReader(one, tokens).under(RollingCache(3, 0))
    for n in range(len(tokens)):
        for t in range(1, tokens.shape[1]):
            loss = -q[n, t - 1, tokens[n, t]].log()
            kl = sum(p[n, t - 1, v] * (p[n, t - 1, v].log() - q[n, t - 1, v].log()) for v in range(p.shape[-1]))
            assert float(found.loss_NP[n, t - 1]) == pytest.approx(float(loss), rel=1e-9)
            assert float(found.kl_NP[n, t - 1]) == pytest.approx(float(kl), rel=1e-6, abs=1e-12)


def test_an_effect_is_the_mean_over_the_targets_of_a_bucket() -> None:
    found = PairedReader(small(), some_tokens()).under(RollingCache(3, 0))
    whole, part = found.effect(), found.effect(4, 6)
    assert whole.targets == 2 * 19
    assert part.targets == 2 * 2
    assert part.loss == pytest.approx(float(found.loss_NP[:, 2:4].mean()))
    assert part.kl == pytest.approx(float(found.kl_NP[:, 2:4].mean()))


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    found = assess_streaming(small(), some_tokens(), [4, 8], [0, 1, 4], "cache", lambda: None)
    assert [(row.cache, row.first) for row in found.caches] == [(4, 0), (4, 1), (8, 0), (8, 1), (8, 4)]
    for row in found.caches:
        assert row.perplexity is not None
        assert torch.tensor(row.perplexity).log().item() == pytest.approx(row.loss, rel=1e-5)


@torch.no_grad()
def test_beyond_the_context_the_unchanged_model_reads_windows_of_it() -> None:
    one, tokens = small(), some_tokens(1, 2 * CONTEXT + 5)
    found = PairedReader(one, tokens).unchanged
    first = one.module(tokens[:, :CONTEXT]).log_softmax(-1)
    second = one.module(tokens[:, CONTEXT // 2 : CONTEXT + CONTEXT // 2]).log_softmax(-1)
    assert float(found.loss_NP[0, 9]) == pytest.approx(-float(first[0, 9, tokens[0, 10]]), rel=1e-9)
    t = CONTEXT + 3  # reads in the second window, at its place there
    expected = -float(second[0, t - CONTEXT // 2, tokens[0, t + 1]])
    assert float(found.loss_NP[0, t]) == pytest.approx(expected, rel=1e-9)


def test_loss_beyond_the_context_stands_beside_that_within_it() -> None:
    one, tokens = small(), some_tokens(2, 2 * CONTEXT)
    found = assess_length(one, tokens, lambda: None)
    assert [found.buckets[0].start, found.buckets[-1].stop] == [2, 2 * CONTEXT + 1]
    whole = PairedReader(one, tokens).under()
    for before, after in zip(found.buckets, found.buckets[1:], strict=False):
        assert before.stop == after.start
    for bucket in found.buckets:
        inside = bucket.stop <= CONTEXT + 1
        assert bucket.whole == whole.effect(bucket.start, bucket.stop)
        assert (bucket.whole.kl < 1e-9) == inside
        if inside:
            assert bucket.whole.loss == pytest.approx(bucket.within.loss, rel=1e-9)


def test_a_change_that_changes_nothing_leaves_every_logit() -> None:
    for variant in ("softmax", "sink token", "sigmoid", "gate"):
        one, tokens = small(variant), some_tokens()
        with torch.no_grad(), changed_attention(one):
            changed = one.module(tokens)
        assert_close(changed, one.module(tokens), 1e-12)


def test_a_change_that_computes_nan_is_an_error() -> None:
    def broken(layer: LayerCall) -> torch.Tensor:
        return layer.output() * torch.nan

    with pytest.raises(SinklabError, match="NaN"):
        PairedReader(small(), some_tokens()).under(compute=broken).effect()
