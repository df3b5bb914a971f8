"""Positions against transformers' modules on shared inputs and weights, and the effect of the sink token."""

import pytest
import torch
from closeness import assert_close
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.primitive import attend
from sinklab.attention.query_blocks import ScoreMatrix
from sinklab.attention.scores import Score, for_flex
from sinklab.errors import InputError
from sinklab.model import position as positions
from sinklab.model.config import ModelConfig
from sinklab.model.position import T5, Alibi, DistanceTerm, Relative, alibi_slopes, bucket_numbers, sinusoid
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SMALL = {
    "model": {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 97, "context": 32},
    "metric": {"length": 32},
}
POSITIONS = ["none", "absolute", "learnable", "relative", "t5", "alibi", "rotary"]
ON_SCORES = ["relative", "t5", "alibi"]


def model(position: str, **changes: object) -> Transformer:
    return Transformer(build_recipe(SMALL, {"model": {"position": position, **changes}}).model, seed=1).eval()


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(0))


def term_matrix(term: DistanceTerm, heads: int, length: int) -> torch.Tensor:
    """Bias matrix of the term: (H, T, T)."""
    h = torch.arange(heads)[:, None, None]
    q, k = torch.arange(length)[:, None], torch.arange(length)
    return term.score()(torch.zeros(1, heads, length, length), torch.zeros(1).long(), h, q, k)[0]


def test_buckets_equal_t5s() -> None:
    distance = torch.arange(300)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    ours = bucket_numbers(32, 128)[distance.clamp(max=128)]
    assert torch.equal(ours, theirs)


def test_t5_attention_agrees_with_transformers() -> None:
    heads, width, length = 4, 32, 150
    torch.manual_seed(0)
    theirs = T5Attention(
        T5Config(d_model=width, d_kv=8, num_heads=heads, is_decoder=True), has_relative_attention_bias=True, layer_idx=0
    ).eval()
    term = DistanceTerm(T5(), heads)
    assert term.weight is not None
    with torch.no_grad():
        term.weight.copy_(theirs.relative_attention_bias.weight)
        x = torch.randn(2, length, width)
        future = torch.full((length, length), float("-inf")).triu(1)[None, None]
        expected = theirs(x, mask=future)[0]
        q, k, v = (
            projection(x).view(2, length, heads, 8).transpose(1, 2) for projection in (theirs.q, theirs.k, theirs.v)
        )
        out, _ = attend(ScoreMatrix(q, k, score=term.score(), scale=1.0), v)  # T5 does not scale
        ours = theirs.o(out.transpose(1, 2).reshape(2, length, -1))
    assert_close(ours, expected)


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8, 12, 16])
def test_alibi_agrees_with_bloom_and_mpt(heads: int) -> None:
    length = 12
    ours = term_matrix(DistanceTerm(Alibi(), heads), heads, length)
    bloom = build_alibi_tensor(torch.ones(1, length), heads, torch.float32).view(heads, 1, length)
    mpt = build_mpt_alibi_tensor(heads, length).view(heads, 1, length)
    for theirs in (bloom, mpt):  # both add a row that differs from ours by a constant per query
        shifted = (
            theirs
            - theirs[..., -1:]
            + alibi_slopes(heads)[:, None, None] * (length - 1 - torch.arange(length)[:, None])
        )
        assert_close(ours.tril(), shifted.expand(heads, length, length).tril())


def test_relative_adds_the_bucket_number_itself() -> None:
    matrix = term_matrix(DistanceTerm(Relative(), 2), 2, 200)
    assert matrix[0, 10, 10] == 0
    assert matrix[0, 10, 3] == 7
    assert matrix[1, 199, 0] == 31
    assert torch.equal(matrix[0], matrix[1])


def test_sinusoids_are_those_of_the_formula() -> None:
    table = sinusoid(40, 8, 10000.0, torch.device("cpu"))
    assert table[0].tolist() == [0, 1] * 4
    expected = torch.tensor(7 * 10000 ** (-2 / 8))
    torch.testing.assert_close(table[7, 2:4], torch.stack((expected.sin(), expected.cos())))


@pytest.mark.parametrize("position", ON_SCORES)
def test_a_term_of_the_distance_equals_attention_with_an_explicit_bias(position: str) -> None:
    transformer = model(position)
    term = transformer.distance
    assert term is not None
    core = transformer.get_submodule("blocks.0.attention.core")
    assert isinstance(core, AttentionCore)
    q, k, v = torch.randn(3, 2, 4, 24, 8, generator=torch.Generator().manual_seed(2)).unbind()
    with torch.no_grad():
        logits = q @ k.transpose(-1, -2) / 8**0.5 + term_matrix(term, 4, 24)
        logits = logits.masked_fill(torch.ones(24, 24).triu(1).bool(), float("-inf"))
        assert_close(core(q, k, v), logits.softmax(-1) @ v)


def test_copies_of_the_t5_table_for_flex_give_its_gradient_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "COPIES", 4)
    heads, length = 2, 9
    term = DistanceTerm(T5(buckets=4, max_distance=5), heads).double()
    assert term.weight is not None
    torch.nn.init.normal_(term.weight, generator=torch.Generator().manual_seed(0))
    b, h = torch.zeros(1).long(), torch.arange(heads)[:, None, None]
    q, k = torch.arange(length)[:, None], torch.arange(length)
    z = torch.zeros(1, heads, length, length, dtype=torch.float64)
    slope = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
    score = term.score()
    plain, spread = score, for_flex(score).score
    assert spread is not None
    assert torch.equal(plain(z, b, h, q, k), spread(z, b, h, q, k))

    def gradients(part: Score, slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (part(z, b, h, q, k) * slope).sum()
        return torch.autograd.grad(total, (part.tensors[0], term.weight), retain_graph=True)

    parts, of_weight = gradients(spread, slope)
    assert_close(of_weight, gradients(plain, slope)[1], 1e-14)
    for copy, part in enumerate(parts):  # of the queries of this copy
        assert_close(part, gradients(plain, slope * (q % 4 == copy))[0], 1e-14)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's compiled kernel and its gradients need CUDA")
def test_flex_trains_the_t5_table_on_cuda() -> None:
    heads, length, generator = 4, 300, torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, length, 32, generator=generator, dtype=torch.float64) for _ in range(3)]
    weight = torch.randn(T5().buckets, heads, generator=generator, dtype=torch.float64)
    results = []
    for backend, dtype, device in (("flex", torch.float32, "cuda"), ("chunked", torch.float64, "cpu")):
        term = DistanceTerm(T5(), heads).to(device, dtype)
        assert term.weight is not None
        term.weight.data.copy_(weight)
        q, k, v = (x.to(device, dtype).requires_grad_() for x in inputs)
        out, _ = attend(ScoreMatrix(q, k, score=term.score()), v, backend)
        results.append([out, *torch.autograd.grad(out.square().mean(), (q, k, v, term.weight))])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu().double(), reference, rtol=1e-2, atol=1e-3)


def test_all_layers_share_one_t5_table_which_has_a_gradient() -> None:
    transformer = model("t5")
    names = [name for name, _ in transformer.named_parameters() if "distance" in name]
    assert names == ["distance.weight"]
    assert len(transformer.state_dict()) == len(list(transformer.named_parameters()))
    transformer.loss(tokens()).backward()
    weight = transformer.get_parameter("distance.weight")
    assert weight.grad is not None
    assert weight.grad[:8].abs().sum() > 0


@pytest.mark.parametrize("position", POSITIONS)
def test_the_order_of_earlier_tokens_matters_only_with_positions(position: str) -> None:
    """The last token's output depends on the order of those before it, unless there is no position."""
    transformer, batch = model(position, layers=1), tokens()
    shuffled = torch.cat((batch[:, :-1].flip(1), batch[:, -1:]), 1)
    with torch.no_grad():
        same = torch.allclose(transformer(batch)[:, -1], transformer(shuffled)[:, -1], atol=1e-5)
    assert same == (position == "none")


@pytest.mark.parametrize("position", ["absolute", "learnable"])
def test_a_sink_token_leaves_the_positions_of_the_real_tokens(position: str) -> None:
    plain, led = model(position), model(position, attention={"bias": "sink_token"})
    seen: list[torch.Tensor] = []

    def record(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0])

    for transformer in (plain, led):
        transformer.blocks[0].register_forward_pre_hook(record)
        with torch.no_grad():
            transformer(tokens())
    assert torch.equal(seen[1][:, 1:], seen[0])


@pytest.mark.parametrize("position", [*ON_SCORES, "rotary"])
def test_a_sink_token_is_one_position_before_the_first_for_distances(position: str) -> None:
    led = model(position, attention={"bias": "sink_token"})
    longer = model(position)
    with torch.no_grad():
        led.get_parameter("sink_token").copy_(longer.embedding.weight[5])
        batch = torch.cat((torch.full((2, 1), 5), tokens()), 1)
        assert_close(led(batch[:, 1:]), longer(batch)[:, 1:])


def test_a_sequence_longer_than_the_learned_positions_is_refused() -> None:
    with pytest.raises(InputError, match=r"33 tokens.*end at model\.context 32"):
        model("learnable")(tokens(1, 33))


def test_impossible_buckets_are_refused() -> None:
    with pytest.raises(InputError, match="max_distance 8 must be above buckets / 2 = 16"):
        build_recipe(SMALL, {"model": {"position": {"kind": "t5", "max_distance": 8}}})


def test_a_position_on_the_scores_needs_an_operation_with_scores() -> None:
    with pytest.raises(ValueError, match="kernel without logits"):
        ModelConfig.model_validate({"position": {"kind": "alibi"}, "attention": {"operation": {"kind": "identity"}}})
