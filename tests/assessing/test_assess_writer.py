"""Writers of the massive activation, against outputs of the model's own modules and a planted weight."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from assessed import run_part, small, some_tokens
from families import GROUPED, LATENT, SMALL, family_tokens, pair_of
from torch import nn

from sinklab.assessing.parts.writer import Writer, down_maps, feed_forward
from sinklab.assessing.reading import Passes
from sinklab.assessing.super_weights import super_experts
from sinklab.models.adapter import Adapter, adapt
from sinklab.models.hooks import hidden_states
from sinklab.survey.api import measure

MIXTRAL = hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
MODULES = {  # of a block: modules that add attention and feed-forward to the stream, and the down map
    "llama": ("self_attn", "mlp", "mlp.down_proj"),
    "gpt2": ("attn", "mlp", "mlp.c_proj"),
    "opt": ("self_attn", "fc2", "fc2"),
    "gpt-neox": ("attention", "mlp", "mlp.dense_4h_to_h"),
    "gemma3, window 5": ("post_attention_layernorm", "post_feedforward_layernorm", "mlp.down_proj"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm", "mlp.down_proj"),
    "stablelm, parallel blocks": ("self_attn", "mlp", "mlp.down_proj"),
}


class Captured:
    """Inputs and outputs of modules of every block at the first position of each sequence."""

    def __init__(self, adapter: Adapter, names: tuple[str, ...], tokens: torch.Tensor) -> None:
        self.inputs: dict[tuple[int, str], torch.Tensor] = {}
        self.outputs: dict[tuple[int, str], torch.Tensor] = {}
        handles = []
        for layer, block in enumerate(adapter.blocks, 1):
            for name in {*names, ""}:
                module = block.get_submodule(name)
                handles.append(module.register_forward_hook(self._keep((layer, name), len(tokens)), with_kwargs=True))
        with torch.no_grad():
            adapter.hidden(tokens)
        for handle in handles:
            handle.remove()

    def _keep(self, key: tuple[int, str], N: int) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            for found, x in ((self.inputs, given), (self.outputs, hidden_states(output))):
                found[key] = x.reshape(N, -1, x.shape[-1])[:, 0].double()

        return keep


@pytest.mark.parametrize("family", MODULES)
def test_contributions_of_blocks_and_neurons_equal_the_outputs_of_their_modules(family: str) -> None:
    model, tokens = pair_of(family)[0].double(), family_tokens()
    adapter, names = adapt(model), MODULES[family]
    made = Captured(adapter, names, tokens)
    found = run_part(Writer, adapter, tokens)
    c, total = found.channel, found.embedding
    assert total == pytest.approx(float(made.inputs[1, ""][:, c].mean()), rel=1e-4)
    for row in found.blocks:
        for adds, name in ((row.attention, names[0]), (row.feed_forward, names[1])):
            assert adds == pytest.approx(float(made.outputs[row.layer, name][:, c].mean()), rel=1e-4, abs=1e-4)
        total += row.attention + row.feed_forward
        assert total == pytest.approx(float(made.outputs[row.layer, ""][:, c].mean()), rel=1e-4, abs=1e-4)
    largest = max(float(made.outputs[row.layer, ""].mean(0).abs().max()) for row in found.blocks)
    assert abs(found.value) == pytest.approx(largest, rel=1e-5)
    down: Any = adapter.blocks[found.ffn_layer - 1].get_submodule(names[2])
    activation = made.inputs[found.ffn_layer, names[2]].mean(0)
    weight = (down.weight[:, c] if family == "gpt2" else down.weight[c]).detach()
    put_out = float(made.outputs[found.ffn_layer, names[2]][:, c].mean())
    g = found.blocks[found.ffn_layer - 1].feed_forward / put_out
    sign = 1 if found.value > 0 else -1
    order = (sign * g * activation * weight).argsort(descending=True).tolist()
    assert [one.neuron for one in found.neurons] == order[:8]
    for one in found.neurons:
        assert one.activation == pytest.approx(float(activation[one.neuron]), rel=1e-4)
        assert one.weight == pytest.approx(float(weight[one.neuron]), rel=1e-6)
        assert one.adds == pytest.approx(float(g * activation[one.neuron] * weight[one.neuron]), rel=1e-4)


@pytest.mark.parametrize("norms", ["pre", "sandwich"])
@pytest.mark.parametrize(("variant", "gate_rank"), [("softmax", None), ("softmax", 4), ("sink token", None)])
def test_the_neurons_of_a_run_add_up_to_its_feed_forward_part(norms: str, variant: str, gate_rank: int | None) -> None:
    one, tokens = small(variant, norm={"placement": norms, "gate_rank": gate_rank}), some_tokens()
    assert Writer.refusal(one, None) is None  # type: ignore[arg-type]
    found = run_part(Writer, one, tokens)
    part: Any = one.blocks[found.ffn_layer - 1].ffn
    assert feed_forward(one.blocks[found.ffn_layer - 1]) is part
    (here,), out = down_maps(one, part, tokens[:, :1], found.channel)
    assert here.name == "down.weight"
    assert float((here.activation * here.by_channel[found.channel]).sum()) == pytest.approx(float(out[found.channel]))
    g = found.blocks[found.ffn_layer - 1].feed_forward / float(out[found.channel])
    assert (g == pytest.approx(1, rel=1e-4)) == (norms == "pre")


@pytest.mark.parametrize("config", [MIXTRAL, hf.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)])
def test_contributions_of_experts_equal_the_change_if_their_weights_are_zeroed(config: Any) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapter, tokens = adapt(model), family_tokens()
    found = run_part(Writer, adapter, tokens)
    assert (found.down_projections, found.super_weights) == (None, [])
    assert not any(parameter.requires_grad for parameter in model.parameters())
    experts: Any = feed_forward(adapter.blocks[found.ffn_layer - 1]).experts  # type: ignore[union-attr]
    c, before = found.channel, experts.down_proj.detach().clone()
    outputs = []

    def put_out() -> float:
        key = f"layers.{found.ffn_layer - 1}.mlp"
        handle = model.model.get_submodule(key).register_forward_hook(
            lambda _, __, out: outputs.append(hidden_states(out)[:, 0, c].mean())
        )
        with torch.no_grad():
            adapter.hidden(tokens[:, :1])
        handle.remove()
        return float(outputs[-1])

    whole = put_out()
    for one in found.experts:
        with torch.no_grad():
            experts.down_proj[one.expert] = 0
        assert one.adds == pytest.approx(whole - put_out(), rel=1e-3, abs=1e-5)
        with torch.no_grad():
            experts.down_proj[one.expert] = before[one.expert]
    first = found.neurons[0]
    index = (first.expert, c, first.neuron) if config is MIXTRAL else (first.expert, first.neuron, c)
    with torch.no_grad():
        experts.down_proj[index] = 0
    assert first.adds == pytest.approx(whole - put_out(), rel=1e-3, abs=1e-5)
    assert [row.what for row in found.zeroed][-1] == "expert"


def planted() -> tuple[Any, int]:
    """The strongest neuron of block 1 writes 500 times its activation to channel 3, at every first token."""
    one = small()
    activation = Captured(one, ("ffn.down",), some_tokens()).inputs[1, "ffn.down"].mean(0)
    neuron = int(activation.abs().argmax())
    with torch.no_grad():
        block: Any = one.blocks[0]
        block.ffn.down.weight[3, neuron] = 500 * activation[neuron].sign()
    return one, neuron


def test_a_planted_weight_is_found_and_without_it_the_massive_activation_is_gone() -> None:
    (one, neuron), tokens = planted(), some_tokens()
    before = {name: weight.clone() for name, weight in one.module.state_dict().items()}
    passes = Passes()
    found = run_part(Writer, one, tokens, passes=passes)
    assert (found.channel, found.ffn_layer, found.sublayer) == (3, 1, "feed-forward")
    assert (found.weight.neuron, found.weight.expert) == (neuron, None)
    assert abs(found.weight.weight) == 500
    assert f"the single weight, {found.weight.weight:.4g}, is that of neuron {neuron} in block 1" in found.remark()
    zeroed = {row.what: row for row in found.zeroed}
    assert zeroed["nothing zeroed"].kl == 0
    assert zeroed["nothing zeroed"].largest == pytest.approx(abs(found.value), rel=0.1)
    assert zeroed["single weight"].largest < zeroed["nothing zeroed"].largest / 5
    assert zeroed["nothing zeroed"].channel == pytest.approx(abs(found.value), rel=0.1)
    assert zeroed["single weight"].channel < zeroed["nothing zeroed"].channel / 5
    assert zeroed["largest weight to others"].largest > zeroed["nothing zeroed"].largest / 2
    assert zeroed["feed-forward at the first position"].largest < zeroed["nothing zeroed"].largest / 5
    assert zeroed["feed-forward at the first position"].elsewhere == pytest.approx(
        zeroed["nothing zeroed"].elsewhere, rel=1e-2
    )
    assert dict(found.values())["single_weight_added"] == found.added(zeroed["single weight"])
    assert all(torch.equal(weight, before[name]) for name, weight in one.module.state_dict().items())
    assert passes.done == 2 * (1 + len(found.zeroed))


def public_super_weights(
    adapter: Adapter, down: str, tokens: torch.Tensor, threshold: float
) -> dict[int, tuple[int, ...]]:
    """Channel and neuron by block, as in LLMSuperWeight (analyze.py): flat maxima over all tokens, then a threshold."""
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        block.get_submodule(down).register_forward_hook(lambda _, args, out, at=at: seen.update({at: (out, args[0])}))
        for at, block in enumerate(adapter.blocks, 1)
    ]
    with torch.no_grad():
        adapter.hidden(tokens)
    for handle in handles:
        handle.remove()
    return {
        at: tuple(int(np.unravel_index(x.abs().view(-1).max(0).indices, x.shape)[-1]) for x in both)
        for at, both in seen.items()
        if all(x.abs().max() > threshold for x in both)
    }


@pytest.mark.parametrize("family", MODULES)
def test_the_largest_input_and_output_of_every_down_projection_are_those_of_the_public_code(family: str) -> None:
    adapter, tokens = adapt(pair_of(family)[0].double()), family_tokens()
    found = run_part(Writer, adapter, tokens).down_projections
    assert found is not None
    expected = public_super_weights(adapter, MODULES[family][2], tokens, 0)
    assert {one.layer: (one.channel, one.neuron) for one in found} == expected
    for one in found:
        weight = adapter.blocks[one.layer - 1].get_parameter(f"{MODULES[family][2]}.weight").detach()
        assert one.weight == float(
            weight.T[one.channel, one.neuron] if family == "gpt2" else weight[one.channel, one.neuron]
        )


def test_a_super_weight_that_acts_on_a_later_token_is_found() -> None:
    one, tokens = small(), some_tokens()
    assert "super weights: none (largest input and output in block" in run_part(Writer, one, tokens).remark()
    block: Any = one.blocks[1]
    kept = []
    handle = block.ffn.down.register_forward_pre_hook(lambda _, args: kept.append(args[0].abs()))
    with torch.no_grad():
        one.hidden(tokens)
    handle.remove()
    first, later = kept[0][:, 0].amax(0), kept[0][:, 1:].amax((0, 1))
    neuron = int((later / first).argmax())
    scale = 20 * float(kept[0].max() / later[neuron])
    assert first[neuron] * scale < first.max()
    assert later[neuron] * scale > 50
    with torch.no_grad():
        block.ffn.up.weight[neuron - 48] *= scale  # the value, not the gate
        block.ffn.down.weight[3, neuron] = 50
    found = run_part(Writer, one, tokens)
    assert found.down_projections is not None
    assert [row.layer for row in found.down_projections] == [1, 2]
    assert [(row.layer, row.channel, row.neuron, row.weight) for row in found.super_weights] == [(2, 3, neuron, 50)]
    assert public_super_weights(one, "ffn.down", tokens, 50) == {2: (3, neuron)}
    assert f"super weights: [3, {neuron}] of block 2" in found.remark()
    added = found.added(found.zeroed[-1])
    assert found.zeroed[-1].what == "super weights"
    with torch.no_grad():
        block.ffn.down.weight[3, neuron] = 0
    assert added == pytest.approx(run_part(Writer, one, tokens).unchanged.loss - found.unchanged.loss)


EXPERTS = {
    "mixtral": hf.MixtralConfig(**(GROUPED | {"num_hidden_layers": 4}), num_local_experts=4, num_experts_per_tok=2),
    "deepseek": hf.DeepseekV3Config(**(LATENT | {"num_hidden_layers": 4}), n_shared_experts=1),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_super_experts_have_outputs_above_the_percentile_and_a_tenth_of_the_largest(family: str) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(EXPERTS[family]).eval()
    adapter, tokens = adapt(model), family_tokens()
    layers: Any = model.model.layers
    with torch.no_grad():
        layers[1].mlp.experts.down_proj[2] *= 1000
        layers[3].mlp.experts.down_proj[1] *= 1e6  # in the last quarter of the blocks, which is not considered
    largest: dict[tuple[int, int | None], float] = {}

    def routed(layer: int, experts: Any, args: tuple[torch.Tensor, ...]) -> None:
        for expert in range(4):
            states = args[0][(args[1] == expert).any(1)]
            gate, up = (states @ experts.gate_up_proj[expert].T).chunk(2, -1)
            outputs = (nn.functional.silu(gate) * up) @ experts.down_proj[expert].T
            largest[layer, expert] = float(outputs.abs().max()) if len(outputs) else 0.0

    def shared(layer: int, output: torch.Tensor) -> None:
        largest[layer, None] = float(output.abs().max())

    handles = []
    for layer, block in enumerate(layers, 1):
        if hasattr(block.mlp, "experts"):
            handles.append(block.mlp.experts.register_forward_pre_hook(partial(routed, layer)))
        if hasattr(block.mlp, "shared_experts"):
            down = block.mlp.shared_experts.down_proj
            handles.append(down.register_forward_hook(lambda _, __, out, layer=layer: shared(layer, out)))
    with torch.no_grad():
        adapter.hidden(tokens)
    for handle in handles:
        handle.remove()
    values = {key: a for key, a in largest.items() if key[0] <= 3}
    bound = max(np.percentile(list(values.values()), 99.5), max(values.values()) // 10)
    expected = [(*key, pytest.approx(a, rel=1e-4)) for key, a in values.items() if a > bound]
    found = run_part(Writer, adapter, tokens)
    assert found.super_experts is not None
    assert [(one.layer, one.expert, one.output) for one in found.super_experts] == expected
    assert expected[0][:2] == (2, 2)
    assert "super experts: 2.2" in found.remark()


def test_super_experts_need_routed_experts_and_a_tenth_of_the_largest_output() -> None:
    assert super_experts({(1, "input"): (3.0, 0), (1, "output"): (9.0, 1), (1, "shared"): (2.0, 0)}, 4) is None
    outputs = {(1, expert): (-1.0 - expert / 1000, 0) for expert in range(600)}
    found = super_experts({**outputs, (1, 600): (-99.0, 3), (1, "shared"): (7.0, 0)}, 1)
    assert found is not None
    assert [(one.expert, one.output) for one in found] == [(600, 99.0)]


def test_the_sink_rate_equals_that_of_measure() -> None:
    one, tokens = small(), some_tokens()
    found = run_part(Writer, one, tokens)
    assert found.zeroed[0].sink == pytest.approx(measure(one.module, tokens).sink_rate[0])


def test_models_that_scale_the_residual_stream_and_quantised_models_are_refused() -> None:
    assert "scale the residual stream" in str(Writer.refusal(small(norm={"placement": "post"}), None))  # type: ignore[arg-type]
    opt = hf.OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                       max_position_embeddings=64, word_embed_proj_dim=32, do_layer_norm_before=False)  # fmt: skip
    assert "scale the residual stream" in str(Writer.refusal(adapt(hf.OPTForCausalLM(opt)), None))  # type: ignore[arg-type]
    bart = hf.BartConfig(vocab_size=24, d_model=16, encoder_layers=2, decoder_layers=2, decoder_ffn_dim=32,
                         decoder_attention_heads=2)  # fmt: skip
    gpt = hf.OpenAIGPTConfig(vocab_size=24, n_embd=16, n_layer=2, n_head=2)
    for post in (hf.BartForCausalLM(bart), hf.OpenAIGPTLMHeadModel(gpt)):
        assert "scale the residual stream" in str(Writer.refusal(adapt(post.eval()), None))  # type: ignore[arg-type]
    bart.encoder_layers = 3
    assert "could not be found" in str(Writer.refusal(adapt(hf.BartForCausalLM(bart).eval()), None))  # type: ignore[arg-type]
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))
    assert Writer.refusal(adapt(llama), None) is None  # type: ignore[arg-type]
    down: Any = llama.model.layers[1].get_submodule("mlp.down_proj")
    down.weight = nn.Parameter(down.weight.to(torch.int8), requires_grad=False)
    assert "quantised" in str(Writer.refusal(adapt(llama), None))  # type: ignore[arg-type]


def test_blocks_with_several_feed_forward_layers_are_refused() -> None:
    sizes: dict[str, Any] = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
    granite = hf.GraniteMoeSharedConfig(**sizes, shared_intermediate_size=16)
    refusal = Writer.refusal(adapt(hf.GraniteMoeSharedForCausalLM(granite)), None)  # type: ignore[arg-type]
    assert refusal == "block 1 has several feed-forward layers (block_sparse_moe, shared_mlp)"
    alone = hf.GraniteMoeSharedConfig(**sizes)
    assert Writer.refusal(adapt(hf.GraniteMoeSharedForCausalLM(alone)), None) is None  # type: ignore[arg-type]
    opt = hf.OPTForCausalLM(hf.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32))
    assert Writer.refusal(adapt(opt), None) is None  # type: ignore[arg-type]
