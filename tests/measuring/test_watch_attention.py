"""Attention of modules that users write is measured as that of the same model in transformers."""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from families import family_tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers.masking_utils import eager_mask

import sinklab
from sinklab.errors import InputError, SinklabError

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 3
TOKENS = family_tokens()
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    bias = torch.tril(torch.ones(q.shape[2], q.shape[2])).view(1, 1, q.shape[2], q.shape[2])
    return ((q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))).masked_fill(bias == 0, float("-inf"))


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = F.softmax(causal_scores(q, k), dim=-1)
    sinklab.record_attention(att, k=k, v=v)
    return att @ v


def with_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinklab.record_attention(q=q, k=k, v=v)
    return F.softmax(causal_scores(q, k), dim=-1) @ v


def fused_and_recorded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinklab.record_attention(q=q, k=k, v=v)
    return fused(q, k, v)


def with_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def with_an_additive_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(1)
    return F.scaled_dot_product_attention(q, k, v, mask)


def with_a_block_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[2]
    mask = create_block_mask(lambda b, h, t, s: t >= s, None, None, T, T, device="cpu")
    sinklab.record_attention(q=q, k=k, v=v, mask=mask)
    return F.softmax(causal_scores(q, k), dim=-1) @ v


class CausalSelfAttention(nn.Module):
    """The attention of nanoGPT, with any function of the queries, keys and values."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (one.view(B, T, HEADS, C // HEADS).transpose(1, 2) for one in self.c_attn(x).split(C, dim=2))
        return self.c_proj(self.attend(q, k, v).transpose(1, 2).contiguous().view(B, T, C))


class NanoGPT(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(self._block(attend) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    @staticmethod
    def _block(attend: Attend) -> nn.Module:
        block: Any = nn.Module()
        block.ln_1, block.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        block.attn, block.mlp = CausalSelfAttention(attend), nn.Module()
        block.mlp.c_fc, block.mlp.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        return block

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            one: Any = block
            x = x + one.attn(one.ln_1(x))
            x = x + one.mlp.c_proj(F.gelu(one.mlp.c_fc(one.ln_2(x)), approximate="tanh"))
        return self.ln_f(x) @ self.wte.weight.T


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_layer": LAYERS,
        "n_positions": 64,
    }
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, initializer_range=0.3)).eval()


def nano_gpt(attend: Attend) -> NanoGPT:
    """The weights of `gpt2`; transformers stores those of its linear layers transposed."""
    model = NanoGPT(attend).eval()
    given = gpt2().transformer.state_dict()
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    model.load_state_dict({name: x.T if name.endswith(turned) else x for name, x in given.items()})
    return model


WAYS = [fused, with_weights, with_queries, fused_and_recorded, with_a_mask, with_an_additive_mask, with_a_block_mask]


@pytest.mark.parametrize("attend", WAYS)
@torch.no_grad()
def test_a_nano_gpt_is_measured_as_the_same_gpt2_of_transformers(attend: Attend) -> None:
    model, expected = nano_gpt(attend), sinklab.measure(gpt2(), TOKENS)
    logits = model(TOKENS)
    torch.testing.assert_close(logits, gpt2()(TOKENS).logits, rtol=1e-4, atol=1e-4)
    with sinklab.watch_attention(model) as watch:
        found = [model(TOKENS[:2]), model(TOKENS[2:])]
    measured = watch.measurement(eps=0.3)
    assert torch.equal(torch.cat(found), logits)
    for name in ("importance", "importance_first", "key_norm", "value_norm"):
        np.testing.assert_allclose(getattr(measured, name), getattr(expected, name), rtol=1e-5, atol=1e-7)
    assert measured.sink_rate == expected.sink_rate
    assert measured.uniform_ratio == pytest.approx(expected.uniform_ratio, rel=1e-5)
    assert (measured.layers, measured.heads, measured.loss, measured.proxy) == (LAYERS, HEADS, None, False)
    assert [layer.importance_BHT.shape for layer in watch.layers] == [(len(TOKENS), HEADS, TOKENS.shape[1])] * LAYERS


@torch.no_grad()
def test_a_llama_of_transformers_is_watched_as_any_module() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    expected = sinklab.measure(model, TOKENS)
    with sinklab.watch_attention(model) as watch:
        model(TOKENS, use_cache=False)
    np.testing.assert_allclose(watch.measurement().importance, expected.importance, rtol=1e-5)


@torch.no_grad()
def test_a_direct_call_of_forward_is_watched_too() -> None:  # as run_with_hooks of TransformerLens does
    model = nano_gpt(fused)
    with sinklab.watch_attention(model) as watch:
        assert list(inspect.signature(model.forward).parameters) == ["idx"]
        assert torch.equal(model.forward(TOKENS), nano_gpt(fused)(TOKENS))
    assert "forward" not in vars(model)
    np.testing.assert_allclose(watch.measurement().importance, sinklab.measure(gpt2(), TOKENS).importance, rtol=1e-5)


def test_a_wrapper_with_the_config_of_its_model_is_refused_by_measure_and_can_be_watched() -> None:
    class Bridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.original_model = gpt2()
            self.config = self.original_model.config

        def forward(self, input: Tensor) -> Tensor:
            return self.original_model(input).logits

    model: Any = Bridge()
    with pytest.raises(InputError, match=r"of type .*Bridge: expected a Hugging Face .* with sinklab.watch_attention"):
        sinklab.measure(model, TOKENS)
    with torch.no_grad(), sinklab.watch_attention(model) as watch:
        model(TOKENS)
    assert watch.measurement().sink_rate == sinklab.measure(gpt2(), TOKENS).sink_rate


@torch.no_grad()
def test_layers_of_pytorch_are_watched() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval()
    x, mask = torch.randn(2, 9, 32), nn.Transformer.generate_square_subsequent_mask(9)
    with sinklab.watch_attention(layer) as watch:
        output = layer(x, src_mask=mask, is_causal=True)
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(output, layer(x, src_mask=mask, is_causal=True))
    _, weights = layer.self_attn(x, x, x, attn_mask=mask, average_attn_weights=False)
    with sinklab.watch_attention(layer.self_attn), pytest.raises(SinklabError, match="with need_weights=False"):
        layer.self_attn(x, x, x, attn_mask=mask)
    alpha = weights.sum(2) / torch.arange(9, 0, -1)
    torch.testing.assert_close(watch.layers[0].importance_BHT, alpha)


@torch.no_grad()
def test_sigmoid_attention_is_measured_by_its_shares_and_row_sums() -> None:
    kept: list[Tensor] = []

    def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(causal_scores(q, k).sigmoid())
        sinklab.record_attention(kept[-1], v=v)
        return kept[-1] @ v

    model = nano_gpt(sigmoid)
    with sinklab.watch_attention(model) as watch:
        model(TOKENS)
    measured = watch.measurement()
    assert (measured.proxy, measured.key_norm, measured.key_norm_ratio) == (True, None, None)
    shares = kept[0] / kept[0].sum(-1, keepdim=True)
    torch.testing.assert_close(watch.layers[0].importance_BHT, shares.sum(2) / torch.arange(TOKENS.shape[1], 0, -1))
    torch.testing.assert_close(watch.layers[0].row_sums_BH, kept[0].sum(-1).mean(-1))


@torch.no_grad()
def test_a_measurement_without_norms_is_saved_and_drawn(tmp_path: Path) -> None:
    def weights_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        att = causal_scores(q, k).softmax(-1)
        sinklab.record_attention(att)
        return att @ v

    model = nano_gpt(weights_alone)
    with sinklab.watch_attention(model) as watch:
        model(TOKENS)
    measured = watch.measurement(model_name="mine")
    measured.save(tmp_path)
    loaded = sinklab.Measurement.load(tmp_path)
    np.testing.assert_array_equal(loaded.importance, measured.importance)
    assert (loaded.model, loaded.value_norm, loaded.hidden_norm_ratio) == ("mine", None, None)
    for what in ("heads", "layers", "positions"):
        assert measured.plot(what).to_dict()
    with pytest.raises(InputError, match="norms"):
        measured.plot("norms")
    assert "Sink" in measured._repr_html_()
    assert "value_norm_ratio" not in measured.columns("layers")


@torch.no_grad()
def test_importance_with_a_score_function_and_a_window_is_that_of_the_explicit_matrix() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 8) for heads in (4, 2, 2))
    slopes_H = 2.0 ** -torch.arange(1, 5)
    window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-4)

    def alibi(z: Tensor, _: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return z - slopes_H[h] * (t - s)

    def forward(*_: Any) -> None:
        sinklab.record_attention(q=q, k=k, v=v, mask=window, scale=0.2, score=alibi)

    model: Any = nn.Module()
    model.forward = forward
    with sinklab.watch_attention(model) as watch:
        model(q)
    at = torch.arange(12)
    z = 0.2 * q @ k.repeat_interleave(2, 1).mT - slopes_H.view(-1, 1, 1) * (at[:, None] - at)
    weights = z.masked_fill(~window, -torch.inf).softmax(-1)
    torch.testing.assert_close(watch.layers[0].importance_BHT, weights.sum(2) / torch.arange(12, 0, -1))
    seen = watch.layers[0].visible_BHT
    assert seen is not None
    torch.testing.assert_close(seen, weights.sum(2) / window.sum(0))


def test_weights_after_training_under_a_watch_are_the_same_bit_for_bit() -> None:
    def trained(watched: bool) -> list[Tensor]:
        model = nano_gpt(fused)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step() -> None:
            loss = F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

        for _ in range(3):
            if watched:
                with sinklab.watch_attention(model):
                    step()
            else:
                step()
        return list(model.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))


def test_record_attention_does_nothing_outside_a_watch_and_patched_functions_are_restored() -> None:
    before = F.scaled_dot_product_attention
    sinklab.record_attention(torch.ones(3))
    with sinklab.watch_attention(nano_gpt(fused)) as watch, sinklab.watch_attention(nn.Linear(2, 2)):
        nano_gpt(fused)(TOKENS)  # another module
        assert F.scaled_dot_product_attention is not before
    assert watch.layers == []
    assert F.scaled_dot_product_attention is before
    with pytest.raises(SinklabError, match="no forward pass was recorded"):
        watch.measurement()


def test_the_code_of_the_how_to_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs/howto_attention.md"
    for_sdpa, by_weights, by_queries, registered = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
    names: dict[str, Any] = {"model": nano_gpt(fused), "tokens": TOKENS, "torch": torch, "sinklab": sinklab}
    exec(for_sdpa, names)
    assert re.fullmatch(r"Sink_1: \d+\.\d %\ntensor\(\[.+\].*\)\n", capsys.readouterr().out, re.S)
    expected = names["watch"].layers
    exec(by_weights, names)
    with sinklab.watch_attention(nano_gpt(names["attend"])) as watch:
        names["model"](TOKENS)
    assert watch.layers == []
    model = nano_gpt(names["attend"])
    with sinklab.watch_attention(model) as watch:
        model(TOKENS)
    for one, other in zip(watch.layers, expected, strict=True):
        torch.testing.assert_close(one.importance_BHT, other.importance_BHT)

    def my_kernel(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        z = causal_scores(q, k) - slopes.view(-1, 1, 1) * (at[:, None] - at)
        kept.append(z.softmax(-1))
        return kept[-1] @ v

    kept: list[Tensor] = []
    names["my_kernel"] = my_kernel
    exec(by_queries, names)
    model = nano_gpt(names["attend"])
    with sinklab.watch_attention(model) as watch:
        model(TOKENS)
    for layer, weights in zip(watch.layers, kept, strict=True):
        alpha = weights.sum(2) / torch.arange(TOKENS.shape[1], 0, -1)
        torch.testing.assert_close(layer.importance_BHT, alpha)
    for interface in (hf.AttentionInterface, hf.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
        names[interface.__name__] = interface
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    names |= {"model": hf.LlamaForCausalLM(config).eval(), "eager_mask": eager_mask}
    exec(registered, names)
    measured = names["watch"].measurement()
    assert (measured.layers, measured.proxy) == (2, True)
    with pytest.raises(SinklabError, match="'mine' does not compute softmax attention"):
        sinklab.measure(names["model"], TOKENS)


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def of_later_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinklab.record_attention((q @ k.mT).softmax(-1))
    return v


def unrecorded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v


def without_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinklab.record_attention(q=q)
    return v


def with_fewer_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[:, :, -1:], k, v).expand_as(v)


def causal(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).tril()


def recording(arguments: Callable[[Tensor, Tensor, Tensor], dict[str, Any]]) -> Attend:
    """Attention that passes these arguments of `record_attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sinklab.record_attention(**arguments(q, k, v))
        return v

    return attend


REFUSED: list[tuple[Attend, type[SinklabError], str]] = [
    (bidirectional, SinklabError, "attend to later tokens"),
    (of_later_tokens, SinklabError, "on later tokens are not 0"),
    (unrecorded, SinklabError, r"no attention was recorded .* call sinklab.record_attention"),
    (without_keys, InputError, "needs the attention weights, or both q and k"),
    (with_fewer_queries, SinklabError, "1 queries and 14 keys.*without a KV cache"),
    (recording(lambda q, k, v: {"weights": q.tolist()}), InputError, "weights is of type list: expected a torch.Te"),
    (recording(lambda q, k, v: {"weights": causal(q, k).log() - causal(q, k).log()}), InputError, "contain NaN"),
    (recording(lambda q, k, v: {"weights": causal(q, k), "v": v[:, :, 1:]}), InputError, "v has shape .* the same bat"),
    (recording(lambda q, k, v: {"q": q, "k": k, "v": v[:, :, 1:]}), InputError, "v has shape .* and k .* same batch"),
    (recording(lambda q, k, v: {"q": q, "k": k, "mask": "causal"}), InputError, "mask is of type str: expected None"),
    (
        recording(lambda q, k, v: {"q": q, "k": k, "mask": torch.ones(5, 5)}),
        InputError,
        r"shape \(5, 5\) and dtype flo",
    ),
    (recording(lambda q, k, v: {"q": q, "k": k, "mask": torch.ones(14, 14).long()}), InputError, "dtype int64: expect"),
    (recording(lambda q, k, v: {"q": q, "k": k, "score": 3}), InputError, "score is of type int: expected a function"),
]


@pytest.mark.parametrize(("attend", "error", "says"), REFUSED)
@torch.no_grad()
def test_attention_that_cannot_be_measured_is_refused(attend: Attend, error: type[SinklabError], says: str) -> None:
    model = nano_gpt(attend)
    with sinklab.watch_attention(model) as watch, pytest.raises(error, match=says):
        model(TOKENS)
    assert watch.layers == []
