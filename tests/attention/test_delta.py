"""The gated delta rule in chunks equals the rule position by position, and its memory is linear in the length."""

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close
from delta_reference import gated_delta_by_steps
from torch import Tensor

from sinklab.model.mixer import gated_delta

B, H, D, V = 2, 3, 8, 5


def inputs(length: int, dtype: torch.dtype = torch.float64, channels: bool = False) -> list[Tensor]:
    """Queries, keys of length 1, values, decays from nearly none to nearly all, rates."""
    source = torch.Generator().manual_seed(length)

    def random(*shape: int) -> Tensor:
        return torch.randn(B, H, length, *shape, generator=source, dtype=torch.float64)

    parts = (random(D), F.normalize(random(D), dim=-1), random(V), -random(*[D] * channels).exp(), random().sigmoid())
    return [part.to(dtype).requires_grad_() for part in parts]


def state() -> Tensor:
    return torch.randn(B, H, D, V, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_chunks_equal_single_steps_in_value_and_gradient(length: int, continued: bool, channels: bool) -> None:
    given = [*inputs(length, channels=channels), *([state()] if continued else [])]
    weights = torch.randn(B, H, length, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outcomes = []
    for rule in (gated_delta, gated_delta_by_steps):
        out, after = rule(*given)
        gradients = torch.autograd.grad((out * weights).sum() + after.square().sum(), given)
        outcomes.append((out, after, *gradients))
    for ours, expected in zip(*outcomes, strict=True):
        assert_close(ours, expected, 1e-11)


def test_a_sequence_in_pieces_has_the_output_and_state_of_the_whole_sequence() -> None:
    given = inputs(130)
    whole, last = gated_delta(*given)
    before, outs = None, []
    for q, k, v, log_decay, rate in zip(*(part.split((70, 1, 59), dim=2) for part in given), strict=True):
        out, before = gated_delta(q, k, v, log_decay, rate, before)
        outs.append(out)
    assert before is not None
    assert_close(torch.cat(outs, dim=2), whole, 1e-12)
    assert_close(before, last, 1e-12)


def test_without_decay_and_with_rate_one_a_key_gives_back_its_last_value() -> None:
    keys = torch.eye(D, dtype=torch.float64)[[0, 1, 0, 1]].expand(B, H, 4, D)
    values = torch.arange(4, dtype=torch.float64)[:, None].expand(B, H, 4, V)
    ones = torch.ones(B, H, 4, dtype=torch.float64)
    out, after = gated_delta(keys, keys, values, 0 * ones, ones)
    assert_close(out, values)
    assert_close(after[:, :, 0], torch.full((B, H, V), 2.0))
    assert_close(after[:, :, 1], torch.full((B, H, V), 3.0))


def test_in_bfloat16_the_state_is_in_float32_and_the_output_near_that_in_float64() -> None:
    given = inputs(100, torch.bfloat16)
    out, after = gated_delta(*given)
    expected, _ = gated_delta_by_steps(*(part.double() for part in given))
    assert (out.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert_close(out, expected, 1e-2)


def test_a_channel_that_forgets_at_once_does_not_overflow() -> None:
    q, k, v, decay, rate = inputs(40, torch.float32, channels=True)
    decay = decay.detach().clone()
    decay[..., 0] = -200.0
    given = [x.requires_grad_() for x in (q, k, v, decay, rate)]
    out, _ = gated_delta(*given)
    expected, _ = gated_delta_by_steps(*(x.double() for x in given))
    assert_close(out, expected, 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), given))


def test_equal_decays_of_all_channels_equal_one_decay_of_the_head() -> None:
    q, k, v, decay, rate = inputs(70)
    alike, _ = gated_delta(q, k, v, decay[..., None].expand(-1, -1, -1, D), rate)
    assert_close(alike, gated_delta(q, k, v, decay, rate)[0], 1e-12)


def kept(length: int, channels: bool) -> int:
    """Bytes that autograd keeps for the gradient."""
    sizes: dict[int, int] = {}
    held = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gated_delta(*inputs(length, channels=channels))
    return sum(sizes.values())


@pytest.mark.parametrize("channels", [False, True])
def test_memory_kept_for_the_gradient_is_linear_in_the_length(channels: bool) -> None:
    assert kept(2048, channels) < 2.1 * kept(1024, channels)
