"""Surgery on models of many families has the stated effect, checked independently, and is undone afterwards."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close, assert_same_rates
from families import FAMILIES, LENGTH, alibi_once, family_tokens, hooks_on, pair_of
from hidden_keys_reference import scores_without_first_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_reference import eager_reference
from own_models import VARIANTS, own_model, own_tokens

from sinklab.attention import masks
from sinklab.errors import InputError, SinklabError
from sinklab.measuring import driver
from sinklab.measuring.options import Options
from sinklab.measuring.probe import probe
from sinklab.measuring.surgery import masked_first_keys, replaced_position, swapped_positions, zeroed
from sinklab.model.config import ModelConfig
from sinklab.model.huggingface import SinklabConfig, SinklabForCausalLM
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import adapt
from sinklab.models.hooks import residual_stream
from sinklab.survey.api import measure

N = 3
LEARNED = ["gpt2", "opt", "gpt-neo, window 5"]
SURGERIES: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "masked": lambda model: masked_first_keys(model, N),
    "zeroed": lambda model: zeroed(model, layer=1, position=2, dimension=5),
    "swapped": lambda model: swapped_positions(model, 1, 5),
    "replaced": lambda model: replaced_position(model, 1, 5),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hiding_the_first_keys_equals_removing_them_from_the_scores_of_eager_attention(family: str) -> None:
    model, eager = pair_of(family)
    tokens = family_tokens()
    with scores_without_first_keys(N, LENGTH), alibi_once(family):
        expected = eager_reference(eager, tokens)
    with masked_first_keys(model, N):
        measured = driver.measure(adapt(model), tokens, Options(first_target=N + 2, batch_size=2))
    assert_close(measured.importance, expected.importance.mean(0))
    assert_same_rates(measured, expected.sink_rate)
    nats = -expected.logits.log_softmax(-1)[:, N:-1].gather(2, tokens[:, N + 1 :, None])
    assert measured.loss == pytest.approx(float(nats.mean()), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "bloom", "jamba, one attention layer of two", "opt"])
@pytest.mark.parametrize(("left", "right"), [(6, 0), (0, 6)])
def test_the_first_keys_are_those_of_the_real_tokens(family: str, left: int, right: int) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    pad = torch.nn.functional.pad
    mask = pad(torch.ones_like(tokens), (left, right))
    for surgery in (masked_first_keys(model, N), zeroed(model, 1, 2, 5)):
        with surgery:
            padded = measure(model, pad(tokens, (left, right), value=9), attention_mask=mask)
    for surgery in (masked_first_keys(model, N), zeroed(model, 1, 2, 5)):
        with surgery:
            plain = measure(model, tokens)
    assert_close(padded.importance, plain.importance)
    assert padded.loss == pytest.approx(plain.loss, rel=1e-5)


@pytest.mark.parametrize("surgery", ["masked", "zeroed"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_surgery_applies_if_the_base_model_is_called_without_its_head(surgery: str, family: str) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    padded = torch.nn.functional.pad(tokens, (6, 0), value=9)
    given: dict[str, Any] = {"attention_mask": (torch.arange(padded.shape[1]) >= 6).long().expand_as(padded)}
    if family == "llama":
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), SURGERIES[surgery](model):
        expected = model.base_model(tokens).last_hidden_state
        model(padded, **given)
        for body in {model.base_model, model.get_decoder()}:
            assert torch.equal(body(tokens).last_hidden_state, expected)
            assert_close(body(padded, **given).last_hidden_state[:, 6:], expected)
    assert not torch.allclose(model.base_model(tokens).last_hidden_state, expected)


def test_surgery_works_inside_of_a_probe_as_around_it() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with torch.no_grad(), probe(model) as outer, masked_first_keys(model, N):
        model(tokens)
        inside = [layer.importance_BHT for layer in outer.layers]
    with torch.no_grad(), masked_first_keys(model, N), probe(model) as inner:
        model(tokens)
        around = [layer.importance_BHT for layer in inner.layers]
    for one, other in zip(inside, around, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ours", [False, True])
def test_nested_contexts_hide_the_first_keys_of_both(ours: bool) -> None:
    model: Any = own_model("softmax") if ours else pair_of("llama")[0]
    tokens = own_tokens()
    with masked_first_keys(model, 4), masked_first_keys(model, 2):
        measured = measure(model, tokens)
    sums = torch.from_numpy(measured.importance) * torch.arange(tokens.shape[1], 0, -1)
    assert_close(sums[..., :2].sum(-1), torch.full((2, 4), 2.0))
    assert_close(sums[..., :4].sum(-1), torch.full((2, 4), 4.0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_keys_of_our_model_are_those_of_an_explicit_mask(variant: str) -> None:
    model: Any = own_model(variant)
    tokens = own_tokens()
    T = tokens.shape[1]
    rule = model.blocks[0].attention.core.mask
    allowed = torch.zeros(1, 1, T, T, dtype=torch.bool)
    zero = torch.tensor(0)
    for t in range(T):
        for k in range(T):
            seen = bool(rule.allowed(zero, zero, torch.tensor(t), torch.tensor(k)))
            allowed[0, 0, t, k] = seen and not (t >= N and k < N)
    reference: Any = copy.deepcopy(model)
    for block in reference.blocks:
        block.attention.core.mask = masks.Dense(allowed, later=variant == "prefix")
    expected = measure(reference, tokens)
    with masked_first_keys(model, N):
        measured = measure(model, tokens)
    assert_close(measured.importance, expected.importance)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)
    assert measured.loss != pytest.approx(measure(model, tokens).loss, abs=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rest=st.one_of(
        st.just(masks.CAUSAL), st.builds(masks.Window, st.integers(1, 9)), st.builds(masks.Prefix, st.integers(1, 9))
    ),
    count=st.integers(1, 9),
    leading=st.integers(0, 1),
    first=st.integers(0, 9),
    size=st.integers(1, 9),
)
def test_key_ranges_of_masks_with_hidden_keys_agree_with_the_allowed_keys(
    rest: masks.Mask, count: int, leading: int, first: int, size: int
) -> None:
    keys = 10
    mask = masks.without_first(masks.Leading(rest, leading) if leading else rest, count)
    end = min(first + size, keys)
    zero, q, k = torch.zeros(1, 1).long(), torch.arange(first, end)[:, None], torch.arange(keys)
    seen = mask.allowed(zero, zero, q, k)
    low, high = mask.key_range(first, end, keys)
    assert not seen[:, :low].any()
    assert not seen[:, high:].any()
    low, high = mask.full_range(first, end, keys)
    assert bool(seen[:, low:high].all())
    assert bool(seen.any(1).all())


def test_logits_with_a_zeroed_channel_are_those_of_the_later_layers_on_the_zeroed_state() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True)
        hidden = found.hidden_states[1].clone()
        hidden[:, 1, 5] = 0
        with zeroed(model, layer=1, position=2, dimension=5):
            logits = model(tokens).logits
        blocks = model.model.layers
        model.model.layers = blocks[1:]
        expected = model(inputs_embeds=hidden).logits
        model.model.layers = blocks
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(logits, found.logits)


@pytest.mark.parametrize("zeroed_first", [True, False])
def test_other_hooks_see_the_zeroed_channel_whichever_is_registered_first(zeroed_first: bool) -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    reading = residual_stream(adapt(model).blocks, lambda hidden_BTC: hidden_BTC[:, 1, 5].clone())
    with torch.no_grad(), ExitStack() as stack:
        if zeroed_first:
            stack.enter_context(zeroed(model, layer=1, position=2, dimension=5))
        found = stack.enter_context(reading)
        if not zeroed_first:
            stack.enter_context(zeroed(model, layer=1, position=2, dimension=5))
        model(tokens)
    assert bool(found[0].all())
    assert not found[1].any()


def test_zeroed_positions_of_our_model_are_counted_after_the_sink_token() -> None:
    model: Any = own_model("sink token")
    seen: list[torch.Tensor] = []
    with torch.no_grad(), zeroed(model, layer=2, position=2, dimension=5), zeroed(model, 2, 0, 7):
        handle = model.blocks[1].register_forward_hook(lambda _, __, output: seen.append(output))
        model(own_tokens())
        handle.remove()
    assert ((seen[0] == 0).nonzero()[:, 1:].unique(dim=0) == torch.tensor([[0, 7], [2, 5]])).all()


@pytest.mark.parametrize("family", LEARNED)
def test_swapped_positions_are_those_of_permuted_position_ids(family: str) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    given_mask = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
    places = torch.arange(LENGTH)
    swapped, replaced = places.clone(), places.clone()
    swapped[[0, 4]], replaced[0] = torch.tensor([4, 0]), 4
    with torch.no_grad():
        for surgery, ids in ((swapped_positions, swapped), (replaced_position, replaced)):
            expected = model(tokens, position_ids=ids.expand_as(tokens), **given_mask).logits
            with surgery(model, 1, 5):
                assert torch.equal(model(tokens, **given_mask).logits, expected)


def test_positions_of_our_model_are_swapped_in_its_table() -> None:
    model = _learnable()
    other = copy.deepcopy(model)
    table = other.position_table
    assert table is not None
    with torch.no_grad():
        table[[0, 4]] = table[[4, 0]]
        with swapped_positions(model, 1, 5):
            assert torch.equal(model(own_tokens()), other(own_tokens()))


@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("family", [*LEARNED, "ours"])
def test_the_model_is_as_before_also_after_an_exception(surgery: str, family: str) -> None:
    model: Any = _learnable() if family == "ours" else pair_of(family)[0]
    tokens = own_tokens()
    before, weights, hooks = _logits(model, tokens), copy.deepcopy(model.state_dict()), hooks_on(model)

    def failing() -> None:
        with SURGERIES[surgery](model):
            assert not torch.equal(_logits(model, tokens), before)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert torch.equal(_logits(model, tokens), before)
    assert hooks_on(model) == hooks
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])


@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("variant", ["sink token", "learnable"])
def test_surgery_on_an_exported_model_is_surgery_on_its_transformer(surgery: str, variant: str) -> None:
    own = _learnable() if variant == "learnable" else own_model(variant)
    exported, tokens = _exported(own), own_tokens()
    if variant == "sink token" and surgery in ("swapped", "replaced"):
        with pytest.raises(InputError, match="no learned positional embeddings"), SURGERIES[surgery](exported):
            pass
        return
    with SURGERIES[surgery](own):
        logits, expected = _logits(own, tokens), measure(own, tokens)
    with SURGERIES[surgery](exported):
        assert torch.equal(_logits(exported, tokens), logits)
        measured = measure(exported, tokens)
    assert measured.loss == expected.loss
    assert measured.loss != measure(exported, tokens).loss
    assert (measured.importance == expected.importance).all()


@pytest.mark.parametrize("surgery", SURGERIES)
def test_an_exported_model_with_its_own_code_is_refused_because_a_copy_is_measured(surgery: str) -> None:
    exported = _exported(_learnable())
    exported.transformer.__class__ = type("Transformer", (torch.nn.Module,), dict(vars(Transformer)))
    with pytest.raises(InputError, match="without trust_remote_code"), SURGERIES[surgery](exported):
        pass


@pytest.mark.parametrize("ours", [True, False])
def test_a_model_without_weights_is_refused(ours: bool) -> None:
    with torch.device("meta"):
        model: Any = _learnable() if ours else hf.AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    with pytest.raises(InputError, match=r"has no weights|are on meta: load all of them onto one device"):
        adapt(model)


@pytest.mark.parametrize("variant", ["softmax", "sink token"])
@pytest.mark.parametrize("surgery", ["masked", "zeroed"])
def test_the_first_keys_of_a_padded_exported_model_are_those_of_its_real_tokens(surgery: str, variant: str) -> None:
    model, tokens = _exported(own_model(variant)), own_tokens()
    for left, right in ((4, 0), (0, 4)):
        padded = torch.nn.functional.pad(tokens, (left, right), value=9)
        mask = torch.nn.functional.pad(torch.ones_like(tokens), (left, right))
        with SURGERIES[surgery](model), torch.no_grad():
            found = model(padded, attention_mask=mask).logits[:, left : left + tokens.shape[1]]
            assert_close(found, model(tokens).logits)
        assert not torch.allclose(found, _logits(model, tokens))


def test_zeroing_a_position_of_our_model_accepts_an_empty_cache_and_refuses_a_filled_one() -> None:
    model: Any = own_model("sink token")
    tokens, past = own_tokens(), model.new_past()
    with torch.no_grad(), zeroed(model, 1, 1, 5):
        assert_close(model.hidden(tokens[:, :4], past), model.hidden(tokens)[:, :4])
        with pytest.raises(SinklabError, match="does not support a KV cache"):
            model.hidden(tokens[:, 4:5], past)


@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("family", ["gpt2", "ours"])
def test_a_model_is_not_changed_in_one_thread_while_another_measures_or_changes_it(surgery: str, family: str) -> None:
    model: Any = _learnable() if family == "ours" else pair_of(family)[0]
    before = copy.deepcopy(model.state_dict())

    def refused(act: Callable[[], object]) -> None:
        with pytest.raises(SinklabError, match="another thread"):
            act()

    with SURGERIES[surgery](model), ThreadPoolExecutor(1) as other:
        other.submit(refused, lambda: measure(model, own_tokens())).result()
        for enter in SURGERIES.values():
            other.submit(refused, enter(model).__enter__).result()
    with probe(model) if family != "ours" else masked_first_keys(model, 1), ThreadPoolExecutor(1) as other:
        other.submit(refused, SURGERIES[surgery](model).__enter__).result()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_a_model_without_learned_positions_is_refused_and_so_are_positions_it_does_not_have() -> None:
    with (
        pytest.raises(InputError, match="no learned positional embeddings"),
        swapped_positions(pair_of("llama")[0], 1, 5),
    ):
        pass
    gpt2 = pair_of("gpt2")[0]
    for pair, message in (((1, 65), "positions 1 to 64"), ((0, 5), "position 0"), ((5, 5), "changes nothing")):
        with pytest.raises(InputError, match=message), swapped_positions(gpt2, *pair):
            pass


def test_swapping_positions_in_an_offloaded_table_is_refused() -> None:
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    model: Any = hf.AutoModelForCausalLM.from_config(config)
    model.transformer.wpe.to("meta")
    with pytest.raises(InputError, match="are offloaded and cannot be changed"), swapped_positions(model, 1, 5):
        pass


def test_the_position_table_of_opt_leaves_out_its_first_two_rows() -> None:
    model = pair_of("opt")[0]
    table = adapt(model).position_table
    assert table is not None
    assert torch.equal(table[0], model.model.decoder.embed_positions.weight[2])


def test_hiding_keys_from_attention_that_gets_no_mask_is_an_error() -> None:
    class Own(torch.nn.Module):
        """Attention that is handed no mask."""

        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model = pair_of("llama")[0]
    model.model.layers[1].self_attn = Own()
    for called in (model, model.model):
        with pytest.raises(SinklabError, match="1 of 2 attention layers"), masked_first_keys(model, N):
            called(family_tokens())
    assert hooks_on(model) == 0


def test_a_mask_without_a_key_for_each_token_is_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "decoder_ffn_dim": 48}
    config = hf.ProphetNetConfig(**sizes, num_encoder_layers=2, num_decoder_layers=2, num_decoder_attention_heads=4)
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(SinklabError, match="a mask of 14 keys for 42 tokens"), masked_first_keys(model, N):
        model(family_tokens())


def test_surgery_refuses_layers_and_keys_that_do_not_exist_and_a_cache() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with pytest.raises(InputError, match="use 1 to 2"), zeroed(model, 3, 1, 5):
        pass
    with pytest.raises(InputError, match="use 0 to 31"), zeroed(model, 1, 1, 32):
        model(tokens)
    with pytest.raises(InputError, match="use at least 1"), masked_first_keys(model, 0):
        pass
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        with pytest.raises(SinklabError, match="does not support a KV cache"), masked_first_keys(model, N):
            model(tokens[:, :1], past_key_values=cache)


def test_an_attention_that_takes_no_explicit_mask_is_refused_unless_it_is_replaced() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with masked_first_keys(model, N):
        expected = measure(model, tokens)
    model.config._attn_implementation_internal = "flash_attention_2"
    with masked_first_keys(model, N):
        with pytest.raises(SinklabError, match='attn_implementation="sdpa"'):
            model(tokens)
        measured = measure(model, tokens)
    assert measured.loss == expected.loss
    assert (measured.importance == expected.importance).all()


def test_a_static_cache_is_refused_as_any_cache() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    cache = hf.StaticCache(config=model.config, max_cache_len=2 * LENGTH)
    with pytest.raises(SinklabError, match="does not support a KV cache"), masked_first_keys(model, N):
        model(tokens, past_key_values=cache)


def test_a_channel_is_zeroed_in_the_output_of_a_block_that_returns_a_list() -> None:
    model: Any = own_model("softmax")
    with torch.no_grad(), zeroed(model, layer=1, position=2, dimension=5):
        model.blocks[0].register_forward_hook(lambda *call: [call[-1], "rest"], prepend=True)
        seen: list[Any] = []
        model.blocks[0].register_forward_hook(lambda *call: seen.append(call[-1]))
        model.blocks[0].register_forward_hook(lambda *call: call[-1][0])
        model(own_tokens())
    ((hidden, rest),) = seen
    assert rest == "rest"
    assert not hidden[:, 1, 5].any()


def test_gradients_flow_through_a_model_under_surgery() -> None:
    model = hf.AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    with masked_first_keys(model, N):
        model(family_tokens(), labels=family_tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _learnable() -> Transformer:
    config = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 64, "context": 16}
    model = Transformer(ModelConfig.model_validate(config | {"position": {"kind": "learnable"}}), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def _exported(own: Transformer) -> Any:
    exported = SinklabForCausalLM(SinklabConfig(own.config.model_dump(mode="json")))
    exported.transformer.load_state_dict(own.state_dict())
    return exported.eval()


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits
