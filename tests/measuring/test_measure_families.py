"""Small random models of many families: the probe against each family's own eager attention matrices."""

from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close, assert_same_rates
from families import COUNTING, FAMILIES, GROUPED, IGNORING, LENGTH, SMALL, alibi_once, family_tokens, hooks_on, pair_of
from measure_reference import eager_reference, sink_rate_by_loops, uniform_ratio_by_loops

from sinklab.attention import layer_call as one_pass
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.probe import probe
from sinklab.measuring.surgery import swapped_positions
from sinklab.models.adapter import adapt
from sinklab.models.families import attention_layers
from sinklab.survey.api import measure


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_agrees_with_the_familys_own_attention_matrices(family: str) -> None:
    model, eager = pair_of(family)
    tokens = family_tokens()
    with alibi_once(family):
        expected = eager_reference(eager, tokens)
    measured = measure(model, tokens, batch_size=2)
    assert_close(measured.importance, expected.importance.mean(0))
    assert_same_rates(measured, expected.sink_rate)
    assert measured.uniform_ratio == pytest.approx(uniform_ratio_by_loops(expected.importance), rel=1e-4)
    assert any(0 < rate < 100 for rate in measured.sink_rate)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)
    with torch.no_grad():
        plain = model(tokens, use_cache=False).logits
        with probe(model):
            probed = model(tokens, use_cache=False).logits
    assert_close(probed, plain)
    assert_close(expected.logits, plain)


@pytest.mark.parametrize("family", ["llama", "mistral, window 5"])
def test_scores_computed_at_once_stay_below_their_limit_for_grouped_queries(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    whole = measure(model, tokens)
    taken = []
    normalise = one_pass._normalise

    def counted(z_HQS: Any, *others: Any) -> Any:
        taken.append(z_HQS.numel())
        return normalise(z_HQS, *others)

    monkeypatch.setattr(one_pass, "_normalise", counted)
    monkeypatch.setattr(one_pass, "MOST_SCORES", most := 4 * tokens.shape[1])
    in_pieces = measure(model, tokens)
    assert 0 < max(taken) <= most
    assert_close(in_pieces.importance, whole.importance)


@pytest.mark.parametrize("family", [*FAMILIES, *COUNTING])
@pytest.mark.parametrize(("left", "right"), [(6, 0), (0, 6)])
def test_padding_changes_nothing_in_any_family(family: str, left: int, right: int) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    plain = measure(model, tokens)
    pad = torch.nn.functional.pad
    mask = pad(torch.ones_like(tokens), (left, right))
    padded = measure(model, pad(tokens, (left, right), value=9), attention_mask=mask)
    assert_close(padded.importance, plain.importance)
    assert_same_rates(padded, plain.sink_rate)
    assert padded.uniform_ratio == pytest.approx(plain.uniform_ratio, rel=1e-4)
    assert padded.sink_rate_bias == plain.sink_rate_bias
    assert padded.loss == pytest.approx(plain.loss, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_shorter_lengths_from_one_pass_equal_sequences_that_were_cut(family: str) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    together = measure(model, tokens, eps=[0.3, 0.2], lengths=[1, 5, 9], batch_size=2)
    assert together.sink_rate_by_length is not None
    for length in (1, 5, 9):
        alone = measure(model, tokens[:, :length], eps=[0.3, 0.2])
        for eps, rates in together.sink_rate_by_length[str(length)].items():
            assert_same_rates(alone, rates, eps)
    assert_same_rates(together, measure(model, tokens).sink_rate)


@pytest.mark.parametrize("lengths", [[0], [5, 5], [9, 5], [LENGTH]])
def test_lengths_that_do_not_increase_up_to_the_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(
        InputError, match=r"use increasing lengths from 1 to 13|`lengths=0`: .* greater than or equal to 1"
    ):
        measure(pair_of("llama")[0], family_tokens(), lengths=lengths)


def test_lengths_with_another_rope_scaling_are_refused() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 4,
        "long_factor": [9.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = hf.Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        pad_token_id=0,
        rope_parameters=longrope,
    )
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"differs between 32 and 12 tokens.* measure 12 separately"):
        measure(model, tokens, lengths=[12, 20])
    cut = measure(model, tokens, lengths=[20]).sink_rate_by_length
    assert cut == {"20": {"0.3": measure(model, tokens[:, :20]).sink_rate}}


def test_a_sink_logit_is_reported_as_the_bias() -> None:
    model, eager = pair_of("gpt-oss, sinks and window 5")
    tokens = family_tokens()
    with torch.no_grad():
        attention = torch.stack(eager(tokens, output_attentions=True).attentions, 1)
    left_over = (1 - attention.sum(-1)).mean(-1)  # the sink gets the attention that the keys do not get
    expected = sink_rate_by_loops(left_over[..., None], 0.3)[0]
    assert measure(model, tokens).sink_rate_bias == pytest.approx(expected)
    assert 0 < expected < 100


def test_models_without_a_bias_report_none() -> None:
    assert measure(pair_of("llama")[0], family_tokens()).sink_rate_bias is None


@pytest.mark.parametrize("family", IGNORING)
def test_a_model_that_ignores_the_interface_is_read_from_its_matrices_and_the_result_says_so(family: str) -> None:
    model, _ = pair_of(family)
    before, hooks = model.config._attn_implementation, hooks_on(model)
    assert measure(model, family_tokens()).backend == "eager"
    assert (model.config._attn_implementation, hooks_on(model)) == (before, hooks)


def test_attention_that_cannot_be_recorded_is_an_error_and_never_a_zero() -> None:
    class Own(torch.nn.Module):
        """Attention that goes past the interface."""

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model, _ = pair_of("llama")
    model.model.layers[1].self_attn = Own()
    with pytest.raises(SinklabError, match=r"1 attention calls were recorded in 2 layers.*llama"):
        measure(model, family_tokens())
    assert hooks_on(model) == 0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
            "no layer of a 'mamba' model",
        ),
        (hf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "no layer of a 'rwkv' model"),
        (
            hf.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
            "0 attention matrices and the keys of 0 layers",
        ),
        (hf.DiffLlamaConfig(**GROUPED), "4 attention calls were recorded in 2 layers"),
    ],
)
def test_a_model_whose_attention_cannot_be_read_is_refused_with_the_reason(config: Any, why: str) -> None:
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(SinklabError, match=why):
        measure(model, family_tokens())


def test_logits_computed_in_pieces_give_the_same_loss_and_sink_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {  # softcap, scale, tied, tied, bias, read from a part of the base model, divisor
        **{name: FAMILIES[name] for name in ("gemma2, softcap and window 5", "cohere", "gpt2", "mpt", "gptj", "opt")},
        "granite": lambda: hf.GraniteConfig(**GROUPED, logits_scaling=3.0),
        "modernbert": lambda: hf.ModernBertDecoderConfig(**SMALL),  # its LM head has the name of a body, `decoder`
    }
    for config in heads.values():
        torch.manual_seed(0)
        model: Any = hf.AutoModelForCausalLM.from_config(config()).eval()
        tokens = family_tokens()
        head = model.get_output_embeddings()
        if head.bias is not None:
            torch.nn.init.normal_(head.bias)
        mask = torch.ones_like(tokens)
        mask[0, :3] = 0
        mask[1, 9:] = 0
        whole = measure(model, tokens, attention_mask=mask)
        with monkeypatch.context() as patch:
            patch.setattr(
                "sinklab.models.huggingface.forward_passes.LOGITS_AT_ONCE", 64 * len(tokens) * 4
            )  # four positions at a time
            pieces = measure(model, tokens, attention_mask=mask)
        assert pieces.loss == pytest.approx(whole.loss, rel=1e-5)
        assert pieces.sink_rate == whole.sink_rate
        assert not [part for part in model.modules() if "forward" in part.__dict__]


@torch.no_grad()
def test_the_loss_of_a_model_in_float64_is_exact() -> None:
    model = pair_of("llama")[0].double()
    logits, tokens = model(family_tokens()).logits, family_tokens()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert measure(model, tokens).loss == pytest.approx(expected.item(), rel=1e-12)


def test_layers_with_different_numbers_of_heads_are_recorded_one_by_one() -> None:
    experts: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}
    config = hf.LagunaConfig(**GROUPED, **experts, num_attention_heads_per_layer=[4, 2])
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(SinklabError, match=r"2 to 4 heads.*use sinklab\.probe"):
        measure(model, family_tokens())
    with torch.no_grad(), probe(model) as watch:
        model(family_tokens())
    assert [layer.importance_BHT.shape[1] for layer in watch.layers] == [4, 2]


def test_a_bidirectional_model_is_an_error() -> None:
    config = hf.BertConfig(**SMALL)
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(SinklabError, match="attends to later tokens"):
        measure(model, family_tokens())


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in IGNORING and not name.startswith(("jamba", "deepseek"))]
)
def test_decoding_from_a_cache_gives_the_same_as_reading_the_whole_sequence(family: str) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padding on the left, as generation has it
    with torch.no_grad(), probe(model) as watch:
        text = model.generate(tokens, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        decoded = watch.layers
        whole = torch.nn.functional.pad(mask, (0, 5), value=1)
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        model(text[:, :-1], attention_mask=whole, position_ids=positions, use_cache=False)
        read = watch.layers
    for one, other in zip(decoded, read, strict=True):
        assert_close(one.importance_BHT, other.importance_BHT)
        assert other.key_norm_BT is not None
        assert_close(one.key_norm_BT, other.key_norm_BT)


def test_a_cache_filled_outside_of_the_probe_is_refused_with_what_to_do() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        with probe(model), pytest.raises(SinklabError, match="before the first call"):
            model(tokens[:, :1], past_key_values=cache)


@pytest.mark.parametrize("encoder_layers", [2, 3])
def test_the_language_model_of_a_multimodal_model_is_measured(encoder_layers: int) -> None:
    vision = hf.SiglipVisionConfig(
        **dict[str, Any](SMALL, num_hidden_layers=encoder_layers), image_size=28, patch_size=14
    )
    text = hf.Gemma3TextConfig(**GROUPED, sliding_window=5, query_pre_attn_scalar=8)
    config = hf.Gemma3Config(text_config=text, vision_config=vision, image_token_index=63)
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
    adapter = adapt(model)
    assert list(adapter.blocks) == list(model.model.language_model.layers)
    assert (adapter.position_table, adapter.context) == (None, 64)  # not the table of the encoder's patches
    with pytest.raises(InputError, match="no learned positional embeddings"), swapped_positions(model, 1, 2):
        pass
    checked = measure(model, family_tokens()[:, :1].expand(-1, LENGTH), inputs="repeat").propositions
    assert checked is not None
    assert checked.holds


def test_only_the_attention_layers_of_a_hybrid_are_counted() -> None:
    jamba = hf.JambaConfig(num_hidden_layers=8, attn_layer_period=4, attn_layer_offset=1)
    assert attention_layers(jamba) == 2


def test_half_precision_is_measured_in_float32() -> None:
    model, _ = pair_of("llama")
    measured = measure(model.to(torch.bfloat16), family_tokens())
    assert measured.dtype == "bfloat16"
    mean_over_queries = torch.from_numpy(measured.importance)
    queries = torch.arange(LENGTH, 0, -1)
    # Rows of the attention matrix sum to one, far closer than bfloat16 could add them up.
    assert_close((mean_over_queries * queries).sum(-1), torch.full((2, 4), float(LENGTH)))


def test_nan_in_the_weights_is_an_error_that_names_the_layer() -> None:
    model, _ = pair_of("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.fill_(torch.nan)
    with pytest.raises(SinklabError, match="in attention layer 2"):
        measure(model, family_tokens())


def test_a_loss_that_is_not_finite_is_an_error_with_what_to_do() -> None:
    model, _ = pair_of("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(SinklabError, match=r"^the loss is NaN or infinite.*--dtype float32"):
        measure(model, family_tokens())
