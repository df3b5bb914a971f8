"""Loss and divergence by hand, and text beyond the context."""

import math

import pytest
import torch
import transformers as hf
from assessed import CONTEXT, VOCABULARY, part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import GROUPED

from sinklab.assessing import reading
from sinklab.assessing.parts.streaming import LossByLength, RollingCache, Streaming
from sinklab.assessing.reading import ByPosition, PairedReader, Passes, changed_attention
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import SinklabError
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, hooked
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter


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


@pytest.mark.parametrize("kept", [0, 7 * VOCABULARY * 8, 2**30], ids=["none", "the first rows", "all"])
def test_keeping_log_probabilities_does_not_change_results_by_a_bit(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens = small(), some_tokens(3)
    monkeypatch.setattr(reading, "LOGITS_AT_ONCE", 7 * VOCABULARY)
    monkeypatch.setattr(reading, "SLICE", 2 * VOCABULARY)
    reader = PairedReader(one, tokens, kept=kept)
    with evaluating(one.module):
        log_p = torch.cat([one.logits(rows) for rows in _states(one, tokens).split(7)]).log_softmax(-1)
    targets = tokens[:, 1:].reshape(-1, 1)
    assert torch.equal(reader.unchanged.loss_NP.flatten(), -log_p.gather(1, targets)[:, 0])
    for edit in (RollingCache(3, 0), RollingCache(5, 1), None):
        with evaluating(one.module), changed_attention(one, edit):
            log_q = torch.cat([one.logits(rows) for rows in _states(one, tokens).split(7)]).log_softmax(-1)
        found = reader.under(edit)
        assert torch.equal(found.loss_NP.flatten(), -log_q.gather(1, targets)[:, 0])
        assert torch.equal(found.kl_NP.flatten(), (log_p.exp() * (log_p - log_q)).sum(-1))


def _states(one: Adapter, tokens: torch.Tensor) -> torch.Tensor:
    return one.hidden(tokens)[:, :-1].flatten(0, 1)


def test_the_output_head_of_the_unchanged_model_runs_once_per_text() -> None:
    one, rows = small(), []
    with hooked([one.module.head.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))]):
        reader = PairedReader(one, some_tokens())
        assert sum(count for count in rows if count > 1) == 2 * 19
        for size in (3, 5):
            reader.under(RollingCache(size, 0))
    assert sum(count for count in rows if count > 1) == 3 * 2 * 19


def test_the_standard_error_is_that_of_the_mean_of_blocks() -> None:
    draw = torch.Generator().manual_seed(0)
    unchanged = torch.rand(2, 70, generator=draw, dtype=torch.float64)
    added = torch.randn(2, 70, generator=draw, dtype=torch.float64)
    found = ByPosition(2, unchanged + added, torch.zeros(2, 70), unchanged).effect()
    mean, squares = float(added.mean()), 0.0
    for n in range(2):
        for start, stop in ((0, 64), (64, 70)):
            squares += sum(float(added[n, t]) - mean for t in range(start, stop)) ** 2
    assert found.error == pytest.approx(math.sqrt(4 / 3 * squares) / 140, rel=1e-9)
    assert ByPosition(2, unchanged, torch.zeros(2, 70)).effect().error is None
    assert ByPosition(2, unchanged[:1, :64], torch.zeros(1, 64), unchanged[:1, :64]).effect().error is None


def test_an_effect_is_the_mean_over_the_targets_of_a_bucket() -> None:
    found = PairedReader(small(), some_tokens()).under(RollingCache(3, 0))
    whole, part = found.effect(), found.effect(4, 6)
    assert whole.targets == 2 * 19
    assert part.targets == 2 * 2
    assert part.loss == pytest.approx(float(found.loss_NP[:, 2:4].mean()))
    assert part.kl == pytest.approx(float(found.kl_NP[:, 2:4].mean()))


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    settings = part_settings(caches=(4, 8), kept=(0, 1, 4))
    found = run_part(Streaming, small(), some_tokens(), settings)
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


def test_loss_by_length_reports_the_whole_text_and_windows_of_the_context() -> None:
    one, tokens = small(), some_tokens(2, 2 * CONTEXT)
    found = run_part(LossByLength, one, tokens)
    assert [found.buckets[0].start, found.buckets[-1].stop] == [2, 2 * CONTEXT + 1]
    whole = PairedReader(one, tokens).under()
    for before, after in zip(found.buckets, found.buckets[1:], strict=False):
        assert before.stop == after.start
    for bucket in found.buckets:
        inside = bucket.stop <= CONTEXT + 1
        expected = whole.effect(bucket.start, bucket.stop)
        assert bucket.whole.targets == expected.targets
        assert bucket.whole.loss == pytest.approx(expected.loss, rel=1e-12)
        assert bucket.whole.kl == pytest.approx(expected.kl, rel=1e-9, abs=1e-12)
        assert (bucket.whole.kl == 0) == inside
        if inside:
            assert bucket.whole.loss == pytest.approx(bucket.within.loss, rel=1e-9)


@pytest.mark.parametrize(("kind", "read"), [("default", 4), ("dynamic", 5)])
def test_the_first_window_is_taken_from_the_whole_text_unless_its_rope_depends_on_the_length(
    kind: str, read: int
) -> None:
    torch.manual_seed(3)
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    config = hf.LlamaConfig(**(GROUPED | {"max_position_embeddings": CONTEXT, "rope_parameters": rope}))
    model = hf.AutoModelForCausalLM.from_config(config).eval().double()
    one, tokens = HuggingFaceAdapter(model), some_tokens(1, 2 * CONTEXT, vocabulary=64)
    apart, passes, counted = PairedReader(one, tokens), Passes(), []
    with hooked([model.model.layers[0].register_forward_hook(lambda _, args, __: counted.append(args[0].shape[1]))]):
        reader = PairedReader(one, tokens, passes, whole=True)
    assert (sum(counted), passes.done) == (read * CONTEXT, 2)
    assert reader.whole is not None
    for found, expected in ((reader.unchanged, apart.unchanged), (reader.whole, apart.under())):
        assert_close(found.loss_NP, expected.loss_NP, 1e-12)
        assert_close(found.kl_NP, expected.kl_NP, 1e-12)


def test_intercepting_attention_without_an_edit_does_not_change_logits() -> None:
    for variant in ("softmax", "sink token", "sigmoid", "gate"):
        one, tokens = small(variant), some_tokens()
        with torch.no_grad(), changed_attention(one):
            changed = one.module(tokens)
        assert_close(changed, one.module(tokens), 1e-12)


def test_a_change_that_computes_nan_is_an_error() -> None:
    def broken(layer: LayerCall) -> torch.Tensor:
        return layer.output() * torch.nan

    with pytest.raises(SinklabError, match="NaN"):
        PairedReader(small(), some_tokens()).under(broken).effect()
