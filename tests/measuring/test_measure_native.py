"""Our own transformer measured from outside, against attention matrices written out with loops."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close, assert_same_rates
from measure_reference import importance_by_loops, sink_rate_by_loops
from own_models import LENGTH, SIZES, VARIANTS, attention_matrices, core_inputs, own_model, own_tokens

import sinklab
from sinklab.attention import query_blocks
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.surgery import masked_first_keys
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure


def _reference(model: Any, variant: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """alpha (N, L, H, T), and of the bias (N, L, H), from explicit matrices."""
    matrices, biases = attention_matrices(model, variant, tokens)
    alphas = torch.stack([importance_by_loops(one) for one in matrices])
    return alphas, None if biases is None else biases.mean(-1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_importance_is_that_of_the_matrices_written_out(variant: str) -> None:
    model, tokens = own_model(variant), own_tokens()
    alpha, bias = _reference(model, variant, tokens)
    measured = measure(model, tokens, eps=0.2, batch_size=2)
    assert_close(measured.importance, alpha.mean(0))
    assert_close(measured.importance_first, alpha[..., 0])
    assert_same_rates(measured, sink_rate_by_loops(alpha, 0.2))
    if bias is None:
        assert measured.sink_rate_bias is None
    else:
        assert measured.sink_rate_bias == pytest.approx(sink_rate_by_loops(bias[..., None], 0.2)[0])
    assert measured.proxy == (variant == "sigmoid")


def test_raw_row_sums_are_reported_where_rows_do_not_sum_to_one(tmp_path: Path) -> None:
    model, tokens = own_model("sigmoid"), own_tokens()
    measured = measure(model, tokens, batch_size=2)
    queries, keys, _ = core_inputs(model, tokens)
    seen = torch.ones(LENGTH, LENGTH).tril()
    for layer, (q, k) in enumerate(zip(queries, keys, strict=True)):
        expected = ((q @ k.mT / math.sqrt(q.shape[-1])).sigmoid() * seen).sum(-1).mean((0, 2))
        assert measured.row_sums is not None
        assert_close(measured.row_sums[layer], expected)
    measured.save(tmp_path)
    saved = Measurement.load(tmp_path).row_sums
    assert saved is not None
    assert (saved == measured.row_sums).all()
    assert measure(own_model("softmax"), tokens).row_sums is None


@pytest.mark.parametrize("variant", ["softmax", "sink token"])
def test_loss_and_norms_are_of_the_real_tokens(variant: str) -> None:
    model, tokens = own_model(variant), own_tokens()
    measured = measure(model, tokens)
    _, keys, values = core_inputs(model, tokens)
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        embedded = model.embedding(tokens).norm(dim=-1).mean(0)
    assert measured.loss == pytest.approx(loss.item(), rel=1e-5)
    assert measured.hidden_norm is not None
    assert measured.hidden_norm.shape == (3, LENGTH)
    assert_close(measured.hidden_norm[0], embedded)
    for layer in range(2):
        for seen, norms in ((keys, measured.key_norm), (values, measured.value_norm)):
            expected = seen[layer][:, :, model.leading :].norm(dim=-1).mean((0, 1))
            assert norms is not None
            assert_close(norms[layer], expected)
    assert measured.hidden_norm_ratio is not None
    assert measured.hidden_norm_ratio[0] == pytest.approx(float(embedded[0] / embedded[1:].mean()), rel=1e-5)


def test_the_tokens_of_a_prefix_are_no_targets_as_in_training() -> None:
    model, tokens = own_model("prefix"), own_tokens()
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens)[:, 2:-1].flatten(0, 1), tokens[:, 3:].flatten())
    measured = measure(model, tokens, batch_size=2)
    assert measured.loss == pytest.approx(losses.item(), rel=1e-5)
    assert measured.loss == pytest.approx(model.loss(tokens).item(), rel=1e-5)
    assert said_of_loss(measured) == []


def said_of_loss(measured: Measurement) -> list[str]:
    return [note for note in measured.notes if "loss" in note]


def test_a_prefix_over_all_tokens_leaves_no_loss_and_the_notes_say_so() -> None:
    model, tokens = own_model("prefix"), own_tokens()
    whole = measure(model, tokens[:, :3])
    assert whole.loss is None
    assert said_of_loss(whole) == ["no loss: the prefix mask leaves no targets in 3 tokens"]
    assert said_of_loss(measure(model, tokens[:, :3], loss=False)) == []
    one_target = measure(model, tokens[:, :4])
    assert one_target.loss == pytest.approx(model.loss(tokens[:, :4]).item(), rel=1e-5)
    with pytest.raises(InputError, match="measure with the loss"):
        sinklab.measure(model, tokens[:, :3], ablate=["zero_massive"])


def test_the_batch_size_changes_nothing() -> None:
    model, tokens = own_model("key bias"), own_tokens()
    one, many = (measure(model, tokens, batch_size=size) for size in (1, 5))
    assert_same_rates(one, many.sink_rate)
    assert one.loss == pytest.approx(many.loss, rel=1e-5)
    assert_close(one.importance, many.importance)


def test_the_model_is_left_as_it_was_found_also_after_an_exception() -> None:
    model, tokens = own_model("softmax").train(), own_tokens()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def stop(done: float, total: int) -> None:
        assert not model.training
        raise KeyboardInterrupt

    measure(model, tokens)
    with pytest.raises(KeyboardInterrupt):
        measure(model, tokens, batch_size=2, progress=stop)
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_progress_is_reported_after_every_batch() -> None:
    steps: list[tuple[float, int]] = []
    measure(own_model("softmax"), own_tokens(), batch_size=2, progress=lambda read, all: steps.append((read, all)))
    assert [at for at in steps if at[0] in range(6)] == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "prefix"])
def test_shorter_lengths_from_one_pass_equal_sequences_that_were_cut(variant: str) -> None:
    model, tokens = own_model(variant), own_tokens()
    together = measure(model, tokens, eps=[0.2, 0.1], lengths=[1, 4, 7], batch_size=2)
    assert together.sink_rate_by_length is not None
    for length in (1, 4, 7):
        alone = measure(model, tokens[:, :length], eps=[0.2, 0.1])
        for eps, rates in together.sink_rate_by_length[str(length)].items():
            assert_same_rates(alone, rates, eps)
    assert_same_rates(together, measure(model, tokens, eps=0.2).sink_rate)


def test_lengths_at_which_sequences_cannot_be_cut_are_refused() -> None:
    with pytest.raises(InputError, match="use increasing lengths from 1 to 9"):
        measure(own_model("softmax"), own_tokens(), lengths=[4, LENGTH])
    with pytest.raises(InputError, match="use lengths of at least 3"):
        measure(own_model("prefix"), own_tokens(), lengths=[2, 5])
    model, tokens = own_model("prefix"), own_tokens()
    cut = measure(model, tokens, lengths=[4]).sink_rate_by_length
    assert cut == {"4": {"0.3": measure(model, tokens[:, :4]).sink_rate}}


@pytest.mark.parametrize("variant", ["softmax", "sink token"])
def test_a_massive_activation_is_found_where_it_was_put(variant: str) -> None:
    model = own_model(variant)

    def put(_: Any, __: Any, output: torch.Tensor) -> None:
        output[:, model.leading + 2, 5] = -4000.0
        output[:, : model.leading, 6] = 9000.0  # a learned token is not one of the sequence's

    model.blocks[0].register_forward_hook(put)
    found = measure(model, own_tokens()).massive_activations
    if variant == "sink token":
        assert found is not None
        assert all(one.dimension != 6 for one in found)
        return
    assert found is not None
    assert (found[0].layer, found[0].position, found[0].dimension, found[0].value) == (1, 3, 5, -4000.0)


def test_a_batch_that_does_not_fit_is_halved_and_the_result_says_so() -> None:
    model, tokens = own_model("key bias"), own_tokens()
    whole = measure(model, tokens, lengths=[4], batch_size=4)

    def crowded(_: Any, args: tuple[torch.Tensor, ...]) -> None:  # in the second block, so that a pass ends halfway
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("out of memory")

    model.blocks[1].register_forward_pre_hook(crowded)
    halved = measure(model, tokens, lengths=[4], batch_size=4)
    assert halved.notes == ["out of memory: the batch size was reduced from 4 to 2 sequences"]
    assert (halved.sink_rate, halved.sink_rate_by_length) == (whole.sink_rate, whole.sink_rate_by_length)
    assert halved.sequences == 5


def test_a_model_with_nan_is_an_error_that_names_the_layer() -> None:
    model = own_model("softmax")
    with torch.no_grad():
        model.get_parameter("blocks.1.attention.qkv.weight").fill_(torch.nan)
    with pytest.raises(SinklabError, match="in attention layer 2"):
        measure(model, own_tokens())


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": 1.0}, {"batch_size": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        measure(own_model("softmax"), own_tokens(), **options)


def test_tokens_without_sequences_are_refused() -> None:
    with pytest.raises(InputError, match="neither empty"):
        measure(own_model("softmax"), own_tokens(0))


def test_the_result_records_its_model_inputs_sizes_and_dtype() -> None:
    measured = measure(own_model("softmax"), own_tokens(), eps=0.25, model_name="tiny", bos=True)
    assert isinstance(measured, Measurement)
    assert (measured.model, measured.inputs, measured.bos, measured.eps) == ("tiny", "natural", True, 0.25)
    assert (measured.sequences, measured.length, measured.layers, measured.heads) == (5, LENGTH, 2, 4)
    assert measured.dtype == "float32"


def test_a_layer_whose_keys_weight_decay_has_made_zero_is_measured() -> None:
    model = own_model("softmax")
    with torch.no_grad():
        model.get_parameter("blocks.1.attention.qkv.weight").zero_()
    measured = measure(model, own_tokens())
    assert measured.key_norm_ratio is not None
    assert measured.key_norm_ratio[1] == 1.0
    assert measured.key_norm_ratio[0] != 1.0


def test_the_first_key_of_a_window_counts_for_the_queries_that_no_longer_see_position_1() -> None:
    model, tokens = own_model("window"), own_tokens()
    matrices, _ = attention_matrices(model, "window", tokens)
    starts = torch.stack([matrices[..., t, t - 3] for t in range(4, LENGTH)], -1).mean(-1)
    eps = float(starts.flatten().sort().values[18:20].mean())  # between two of the forty
    measured = measure(model, tokens, eps=eps, batch_size=2)
    assert measured.sink_rate_window_start == pytest.approx(100 * float((starts > eps).double().mean()))
    assert measure(model, tokens[:, :4]).sink_rate_window_start is None
    assert measure(own_model("softmax"), tokens).sink_rate_window_start is None


@pytest.mark.parametrize("rows", [1, LENGTH])
def test_a_hidden_first_key_of_a_window_receives_no_attention(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_blocks, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(query_blocks, "SMALLEST_BLOCK", rows)
    model, tokens = own_model("window"), own_tokens()
    matrices, _ = attention_matrices(model, "window", tokens)
    visible = torch.stack([matrices[..., t, t - 3] for t in range(4, LENGTH - 2)], -1)  # hidden from the last two
    starts = visible.sum(-1) / (LENGTH - 4)
    eps = float(starts.flatten().sort().values[18:20].mean())  # between two of the forty
    with masked_first_keys(model, LENGTH - 2):
        measured = measure(model, tokens, eps=eps)
    assert measured.sink_rate_window_start == pytest.approx(100 * float((starts > eps).double().mean()))


def test_norm_ratios_before_each_norm_are_reported_for_post_norm_models() -> None:
    config = ModelConfig.model_validate({**SIZES, "layers": 2, "norm": {"placement": "post"}})
    model, tokens = Transformer(config, seed=3), own_tokens()
    entered: list[torch.Tensor] = []
    names = [f"blocks.{block}.{norm}" for block in (0, 1) for norm in ("attention_norm", "ffn_norm")]
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _, args, __: entered.append(args[0])) for name in names
    ]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    expected = [float(x[:, 0].norm(dim=-1).mean() / x[:, 1:].norm(dim=-1).mean()) for x in entered]
    assert len(expected) == 4
    assert measure(model, tokens, batch_size=2).norm_ratio_before_norm == pytest.approx(expected, rel=1e-5)
    assert measure(own_model("softmax"), tokens).norm_ratio_before_norm is None


def test_the_norm_of_a_sink_token_is_divided_by_the_mean_norm_of_the_tokens() -> None:
    model, tokens = own_model("sink token"), own_tokens()
    streams: list[torch.Tensor] = []

    def left(_: torch.nn.Module, __: object, out: torch.Tensor) -> None:
        streams.append(out)

    handles = [block.register_forward_hook(left) for block in model.blocks]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    expected = [float(x[:, 0].norm(dim=-1).mean() / x[:, 1:].norm(dim=-1).mean()) for x in streams]
    found = measure(model, tokens, batch_size=2).norm_ratio_sink_token
    assert found is not None
    assert found[1:] == pytest.approx(expected, rel=1e-5)
    assert measure(own_model("softmax"), tokens).norm_ratio_sink_token is None
