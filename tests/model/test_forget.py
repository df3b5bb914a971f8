"""Forget gates inside the model: parameters, initialisation, and effect on attention."""

import pytest
import torch
from closeness import assert_close

from sinklab.attention.operations.similarity import ForgetGate
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 24, "vocab_size": 20, "context": 16}


def model(start: float = 0.0, **changes: object) -> Transformer:
    attention = {"operation": {"kind": "forgetting", "start": start}}
    return Transformer(ModelConfig.model_validate({**SIZES, "attention": attention, **changes}), seed=2).double()


def tokens() -> torch.Tensor:
    return torch.randint(20, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("init", ["declared", "torch"])
def test_gates_start_at_the_sigmoid_of_their_start(init: str) -> None:
    gating = model(1.5, init={"kind": init}).get_submodule("blocks.1.attention.forget_gate")
    assert isinstance(gating, ForgetGate)
    assert gating.bias.tolist() == [1.5] * 4
    sums = gating(torch.zeros(1, 5, 32, dtype=torch.float64))
    each = torch.nn.functional.logsigmoid(torch.tensor(1.5, dtype=torch.float64))
    assert_close(sums[0, :, 0], each * torch.arange(1, 6), 1e-12)


@pytest.mark.parametrize("position", ["none", "rotary", "alibi"])
def test_open_gates_leave_the_model_unchanged(position: str) -> None:
    forgetting = model(60.0, position={"kind": position})
    plain = Transformer(ModelConfig.model_validate({**SIZES, "position": {"kind": position}}), seed=2).double()
    assert_close(forgetting(tokens()), plain(tokens()), 1e-12)


def test_closed_gates_leave_every_token_its_own_value() -> None:
    forgetting = model(-2000.0, position={"kind": "none"})
    assert_close(forgetting(tokens())[:, 4:5], forgetting(tokens()[:, 4:5]), 1e-12)


def test_sink_rates_of_shorter_lengths_equal_those_of_cut_sequences() -> None:
    forgetting, read = model(), tokens()
    together = measure(forgetting, read, eps=0.2, lengths=[3, 7], details=True)
    assert together.sink_rate_by_length is not None
    assert together.details is not None
    for length in (3, 7):
        cut = measure(forgetting, read[:, :length], eps=0.2)
        assert together.sink_rate_by_length[str(length)] == {"0.2": cut.sink_rate}
