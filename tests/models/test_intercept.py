"""The door to attention calls: edits before observers before outputs, whoever entered first."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from assessed import small, some_tokens
from families import family_tokens, pair_of

import sinklab
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import SinklabError
from sinklab.models.adapter import Adapter, adapt
from sinklab.models.hooks import evaluating
from sinklab.models.intercept import intercept

EDIT = RollingCache(4, 0, in_cache=False)


def own() -> tuple[Any, torch.Tensor]:
    return small().module, some_tokens()


def llama() -> tuple[Any, torch.Tensor]:
    return pair_of("llama")[0], family_tokens()


MODELS: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {"own": own, "llama": llama}


def keys_seen(adapter: Adapter, tokens: torch.Tensor, edits: list[Any], watch_first: bool) -> torch.Tensor:
    """How many queries see each key in the calls that an observer is shown, (layers, S)."""
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
def test_observers_see_the_edited_call_whoever_entered_first(name: str) -> None:
    model, tokens = MODELS[name]()
    before, after = (keys_seen(adapt(model), tokens, [EDIT], first) for first in (True, False))
    assert torch.equal(before, after)
    assert int(before.max()) == 4


@pytest.mark.parametrize("name", MODELS)
def test_measuring_under_an_edit_measures_the_edited_calls(name: str) -> None:
    model, tokens = MODELS[name]()
    plain = sinklab.measure(model, tokens)
    with intercept(adapt(model), edit=EDIT):
        changed = sinklab.measure(model, tokens)
    assert changed.sink_rate_visible is not None
    assert "a window of 4 tokens" in " ".join(changed.notes)
    assert changed.loss != plain.loss
    assert sinklab.measure(model, tokens).sink_rate == plain.sink_rate


@pytest.mark.parametrize("name", MODELS)
def test_two_edits_at_once_hold_both(name: str) -> None:
    model, tokens = MODELS[name]()
    edits = [EDIT, RollingCache(3, 0, in_cache=False)]
    one, other = (keys_seen(adapt(model), tokens, order, True) for order in (edits, edits[::-1]))
    assert torch.equal(one, other)
    assert int(one.max()) == 3


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_uses_may_end_in_any_order_and_leave_the_model_as_it_was(name: str) -> None:
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
    with intercept(adapter, compute=LayerCall.output), pytest.raises(SinklabError, match="in another way"), inner:
        pass
