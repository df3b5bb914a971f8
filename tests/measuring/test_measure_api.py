"""`sinklab.measure` and `sinklab.probe` in a user's own code, several thresholds, and batches that do not fit."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from closeness import assert_close
from typer.testing import CliRunner

import sinklab
from sinklab.commands.app import app
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.options import parse_eps
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer

TOKENS = torch.randint(3, 64, (6, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def test_measure_takes_a_model_and_tokens(model: Any) -> None:
    result = sinklab.measure(model, TOKENS)
    assert result.sequences == 6
    assert sinklab.measure(model, TOKENS.tolist()).sink_rate == result.sink_rate


def test_a_model_whose_forward_is_wrapped_is_measured(model: Any) -> None:  # as nnsight wraps it
    expected, forward = sinklab.measure(model, TOKENS), model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    found = sinklab.measure(model, TOKENS)
    assert found.loss == expected.loss
    np.testing.assert_array_equal(found.importance_first, expected.importance_first)


def test_sequences_of_different_length_are_refused_with_what_to_do(model: Any) -> None:
    with pytest.raises(InputError, match=r"2 to 3 entries.*attention_mask"):
        sinklab.measure(model, [[1, 2, 3], [1, 2]])


def test_bos_is_recorded_if_every_sequence_begins_with_the_bos_token_of_the_model(model: Any) -> None:
    model.config.bos_token_id = 2
    with_bos = TOKENS.clone()
    with_bos[:, 0] = 2
    assert sinklab.measure(model, with_bos).bos is True
    assert sinklab.measure(model, TOKENS).bos is False
    assert sinklab.measure(model, with_bos, bos=False).bos is False
    some = with_bos.clone()
    some[3, 0] = 5
    assert sinklab.measure(model, some).bos is False
    padded, mask = torch.cat((TOKENS[:, :4], with_bos), 1), torch.ones(6, 16, dtype=torch.long)
    mask[:, :4] = 0
    assert sinklab.measure(model, padded, attention_mask=mask).bos is True
    assert sinklab.measure(model, padded).bos is False
    [ablation] = sinklab.measure(model, with_bos, ablate=["no_bos"]).ablations or []
    assert ablation.first_target == 3
    model.config.bos_token_id = None
    assert sinklab.measure(model, with_bos).bos is False


ROTARY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 8),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 1.5}, 12),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.5}, 12),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 4}, 12),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_a_rotary_model_is_not_measured_beyond_the_positions_of_its_config(rope: dict[str, Any], longest: int) -> None:
    config = hf.LlamaConfig(**ROTARY, max_position_embeddings=8, rope_parameters=rope)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    assert sinklab.measure(model, TOKENS[:, :longest]).length == longest
    longer = torch.cat((TOKENS, TOKENS), 1)[:, : longest + 1]
    with pytest.raises(InputError, match=f"{longest + 1} tokens are beyond the model's context of {longest}"):
        sinklab.measure(model, longer)
    padded = torch.ones_like(longer)
    padded[:, 0] = 0
    assert sinklab.measure(model, longer, attention_mask=padded).length == longest


def test_sequences_beyond_learned_positions_or_the_context_of_our_models_are_refused(model: Any) -> None:
    long = TOKENS.repeat(1, 6)
    with pytest.raises(InputError, match="72 tokens are beyond the model's context of 64"):
        sinklab.measure(model, long)
    ours = Transformer(ModelConfig(layers=1, width=16, heads=2, ffn_width=16, vocab_size=64, context=12))
    assert sinklab.measure(ours, TOKENS).length == 12
    with pytest.raises(InputError, match="13 tokens are beyond the model's context of 12"):
        sinklab.measure(ours, long[:, :13])


def test_a_probe_works_in_ones_own_training_loop(model: Any) -> None:
    plain = model(TOKENS, labels=TOKENS)
    plain.loss.backward()
    expected = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    with sinklab.probe(model) as watch:
        model(TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(model.transformer.wte.weight.grad, expected)
    with torch.no_grad(), sinklab.probe(model) as again:
        model(TOKENS)
    for trained, read in zip(watch.layers, again.layers, strict=True):
        assert_close(trained.importance_BHT, read.importance_BHT)


def test_without_the_loss_everything_else_is_the_same(model: Any) -> None:
    for one, tokens in ((model, TOKENS), (Transformer(ModelConfig(layers=2, width=32, vocab_size=64)), TOKENS)):
        whole, bare = sinklab.measure(one, tokens), sinklab.measure(one, tokens, loss=False)
        assert whole.loss is not None
        assert bare.loss is None
        assert (bare.importance == whole.importance).all()
        assert bare.hidden_norm_ratio == whole.hidden_norm_ratio
        with pytest.raises(InputError, match="change in loss"):
            sinklab.measure(one, tokens, loss=False, ablate=["mask_first:1"])


def test_several_thresholds_in_one_pass_equal_one_pass_each(model: Any) -> None:
    together = sinklab.measure(model, TOKENS, eps=[0.3, 0.1, 0.6])
    assert together.eps == 0.3
    assert together.sink_rates is not None
    for eps in (0.3, 0.1, 0.6):
        alone = sinklab.measure(model, TOKENS, eps=eps)
        assert alone.sink_rates is None
        assert together.sink_rates[str(eps)] == alone.sink_rate
    assert together.sink_rates["0.1"] != together.sink_rates["0.6"]


def test_eps_may_be_repeated_and_hold_a_list() -> None:
    assert parse_eps(["0.3", "0.2, 0.4", "0.3"]) == (0.3, 0.2, 0.4)
    with pytest.raises(InputError, match="--eps a few"):
        parse_eps(["a few"])


@pytest.mark.parametrize("eps", [[], [0.3, 1.5], 0.0])
def test_thresholds_that_are_empty_or_outside_0_to_1_are_refused(model: Any, eps: Any) -> None:
    with pytest.raises(InputError, match=r"shares? of attention"):
        sinklab.measure(model, TOKENS, eps=eps)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError()])
def test_a_batch_that_does_not_fit_is_halved_and_the_result_says_so(model: Any, error: Exception) -> None:
    whole = sinklab.measure(model, TOKENS)

    def crowded(_: Any, __: Any, output: Any) -> None:  # after the first block, so that a pass ends halfway
        if len(output if isinstance(output, torch.Tensor) else output[0]) > 2:
            raise error

    model.transformer.h[0].register_forward_hook(crowded)
    result = sinklab.measure(model, TOKENS)
    assert result.notes == ["out of memory: the batch size was reduced from 6 to 1 sequences"]
    assert result.sink_rate == whole.sink_rate
    assert result.massive_activations == whole.massive_activations
    assert whole.notes == []


def test_one_sequence_that_does_not_fit_is_an_error_with_what_to_do(model: Any) -> None:
    def crowded(_: Any, __: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    model.transformer.h[0].register_forward_pre_hook(crowded)
    with pytest.raises(SinklabError, match=r"one sequence at a time.*`length`.*metric\.length of a recipe"):
        sinklab.measure(model, TOKENS)


def test_a_massive_activation_is_found_where_it_was_put(model: Any) -> None:
    def put(_: Any, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden[:, 0, 5] = -4000.0
        return output

    model.transformer.h[1].register_forward_hook(put)
    mask = torch.ones_like(TOKENS)
    found = sinklab.measure(model, TOKENS, attention_mask=mask).massive_activations
    assert found is not None
    assert (found[0].layer, found[0].position, found[0].dimension, found[0].value) == (2, 1, 5, -4000.0)
    with torch.no_grad():
        hidden = model(TOKENS[:1], output_hidden_states=True).hidden_states[2]
    assert found[0].ratio_to_median == pytest.approx(4000 / float(hidden.abs().median()), rel=1e-5)


@pytest.mark.parametrize(("left", "right"), [(4, 0), (0, 4)])
def test_massive_activations_of_padding_hide_none_of_the_real_tokens(model: Any, left: int, right: int) -> None:
    def put(_: Any, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden[:, 2, 5] = -4000.0
        hidden[0, TOKENS.shape[1] :] = 9000.0  # padding is moved to the right
        return output

    alone = sinklab.measure(model, TOKENS).massive_activations or []
    mask = F.pad(torch.ones_like(TOKENS), (left, right))
    mask[1:] = 1
    padded = F.pad(TOKENS, (left, right))
    beside = sinklab.measure(model, padded, attention_mask=mask).massive_activations or []
    assert [(one.layer, one.position, one.dimension) for one in beside] == [
        (one.layer, one.position, one.dimension) for one in alone
    ]
    assert [one.ratio_to_median for one in beside] == pytest.approx([one.ratio_to_median for one in alone], rel=1e-4)
    model.transformer.h[1].register_forward_hook(put)
    found = sinklab.measure(model, padded, attention_mask=mask).massive_activations
    assert found is not None
    assert (found[0].layer, found[0].position, found[0].dimension, found[0].value) == (2, 3, 5, -4000.0)
    assert found[0].ratio_to_median > 1000


def test_the_largest_activation_of_a_model_that_ignores_the_interface_is_that_of_its_first_sequence() -> None:
    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    bloom = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        after_first_TC = bloom(TOKENS[:1], output_hidden_states=True).hidden_states[1][0]
    found = sinklab.measure(bloom, TOKENS).massive_activations
    assert found is not None
    value = next(one.value for one in found if one.layer == 1)
    assert abs(value) == pytest.approx(after_first_TC.abs().max().item(), rel=1e-4)


def test_thresholds_from_the_command_line_reach_the_document(data_dir: Any) -> None:
    folder = data_dir / "models" / "TinyStories-656K"
    options = ["--inputs", "random", "--sequences", "4", "--length", "16", "--eps", "0.3", "--eps", "0.1,0.2"]
    result = CliRunner().invoke(app, ["measure", str(folder), *options, "--json"])
    document = json.loads(result.stdout)
    assert document["eps"] == 0.3
    assert list(document["sink_rates"]) == ["0.3", "0.1", "0.2"]
    assert document["sink_rates"]["0.3"] == document["sink_rate"]
