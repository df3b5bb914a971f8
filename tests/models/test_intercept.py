"""`intercept`: edits run before observers and outputs, in any order of entering, and leave the model unchanged."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from assessed import small, some_tokens
from families import family_tokens, hooks_on, pair_of
from own_models import own_model, own_tokens

import sinklab
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import SinklabError
from sinklab.measuring.surgery import masked_first_keys
from sinklab.models.adapter import Adapter, adapt
from sinklab.models.hooks import evaluating, intercept

EDIT = RollingCache(4, 0, in_cache=False)


def own() -> tuple[Any, torch.Tensor]:
    return small().module, some_tokens()


def llama() -> tuple[Any, torch.Tensor]:
    return pair_of("llama")[0], family_tokens()


MODELS: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {"own": own, "llama": llama}


def keys_seen(adapter: Adapter, tokens: torch.Tensor, edits: list[Any], watch_first: bool) -> torch.Tensor:
    """Number of queries that see each key, in the observed calls: (layers, S)."""
    seen: list[torch.Tensor] = []

    def observe(layer: LayerCall) -> None:
        seen.append(layer.visible_queries()[0, 0])

    uses: list[dict[str, Any]] = [{"edit": edit} for edit in edits]
    uses.insert(0 if watch_first else len(uses), {"observe": observe})
    with ExitStack() as stack:
        stack.enter_context(evaluating(adapter.module))
        for use in uses:
            stack.enter_context(intercept(adapter, **use))
        adapter.run(tokens)
    return torch.stack(seen)


@pytest.mark.parametrize("name", MODELS)
def test_observers_see_the_edited_call_in_either_order_of_entering(name: str) -> None:
    model, tokens = MODELS[name]()
    before, after = (keys_seen(adapt(model), tokens, [EDIT], first) for first in (True, False))
    assert torch.equal(before, after)
    assert int(before.max()) == 4


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_call_has_the_output_of_its_positions_only(name: str) -> None:
    model, tokens = MODELS[name]()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(layer: LayerCall) -> None:
        at = layer.leading + 5
        pairs.append((layer.cut(at).own_output(), layer.output()[:, :, :at]))

    adapter = adapt(model)
    with evaluating(adapter.module), torch.no_grad(), intercept(adapter, observe=observe):
        adapter.run(tokens)
    assert pairs
    for cut, whole in pairs:
        torch.testing.assert_close(cut, whole)


@pytest.mark.parametrize("name", MODELS)
def test_measuring_under_an_edit_measures_the_edited_calls(name: str) -> None:
    model, tokens = MODELS[name]()
    plain = sinklab.measure(model, tokens)
    with intercept(adapt(model), edit=EDIT):
        changed = sinklab.measure(model, tokens)
    assert changed.sink_rate_visible is not None
    assert "a sliding window of 4 tokens" in " ".join(changed.notes)
    assert changed.loss != plain.loss
    assert sinklab.measure(model, tokens).sink_rate == plain.sink_rate


@pytest.mark.parametrize("name", MODELS)
def test_two_edits_at_once_are_both_applied(name: str) -> None:
    model, tokens = MODELS[name]()
    edits = [EDIT, RollingCache(3, 0, in_cache=False)]
    one, other = (keys_seen(adapt(model), tokens, order, True) for order in (edits, edits[::-1]))
    assert torch.equal(one, other)
    assert int(one.max()) == 3


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_intercepts_may_end_in_any_order_and_leave_the_model_unchanged(name: str) -> None:
    model, tokens = MODELS[name]()
    adapter = adapt(model)
    expected, narrow = adapter.hidden(tokens), None
    first, second = (intercept(adapter, edit=RollingCache(size, 0, in_cache=False)) for size in (3, 4))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    narrow = adapter.hidden(tokens)
    second.__exit__(None, None, None)
    with intercept(adapter, edit=EDIT):
        torch.testing.assert_close(narrow, adapter.hidden(tokens), rtol=0, atol=0)
    torch.testing.assert_close(adapter.hidden(tokens), expected, rtol=0, atol=0)


def test_two_computes_are_refused() -> None:
    adapter = small()
    inner = intercept(adapter, compute=LayerCall.output)
    with intercept(adapter, compute=LayerCall.output), pytest.raises(SinklabError, match="already replaced"), inner:
        pass


@pytest.mark.parametrize("name", [*MODELS, "sink token"])
def test_an_ablation_and_an_edit_give_the_same_numbers_in_either_order(name: str) -> None:
    model, tokens = (own_model(name), own_tokens()) if name == "sink token" else MODELS[name]()

    def measured(edit_first: bool) -> tuple[Any, float | None]:
        with ExitStack() as stack:
            for is_edit in (edit_first, not edit_first):
                stack.enter_context(
                    intercept(adapt(model), edit=RollingCache(6, 0, in_cache=False))
                    if is_edit
                    else masked_first_keys(model, 2)
                )
            found = sinklab.measure(model, tokens)
        return found.importance, found.loss

    (one, one_loss), (other, other_loss) = measured(True), measured(False)
    np.testing.assert_array_equal(one, other)
    assert one_loss == other_loss
    assert one_loss not in (sinklab.measure(model, tokens).loss, None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("edit_at", [0, 1, 2])
def test_nested_observers_each_see_every_edited_call_once(name: str, edit_at: int) -> None:
    model, tokens = MODELS[name]()
    adapter = adapt(model)
    seen: tuple[list[LayerCall], list[LayerCall]] = ([], [])
    uses: list[dict[str, Any]] = [{"observe": seen[0].append}, {"observe": seen[1].append}]
    uses.insert(edit_at, {"edit": EDIT})
    with ExitStack() as stack:
        stack.enter_context(evaluating(adapter.module))
        for use in uses:
            stack.enter_context(intercept(adapter, **use))
        adapter.run(tokens)
    for calls in seen:
        assert [call.index for call in calls] == list(range(1, adapter.attention_layers + 1))
        assert max(int(call.visible_queries().max()) for call in calls) == 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use", ["edit", "compute", "observe"])
@torch.no_grad()
def test_an_intercept_that_raises_leaves_the_model_unchanged(name: str, use: str) -> None:
    model, tokens = MODELS[name]()
    adapter = adapt(model)
    expected, hooks = adapter.hidden(tokens), hooks_on(adapter.module)

    def fails(_: LayerCall) -> Any:
        raise ZeroDivisionError

    arguments: dict[str, Any] = {use: fails}
    with pytest.raises(ZeroDivisionError), intercept(adapter, edit=EDIT), intercept(adapter, **arguments):
        adapter.run(tokens)
    assert hooks_on(adapter.module) == hooks
    torch.testing.assert_close(adapter.hidden(tokens), expected, rtol=0, atol=0)
    with intercept(adapter, edit=EDIT):  # and it can be intercepted again
        assert not torch.equal(adapter.hidden(tokens), expected)
