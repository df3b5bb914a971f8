"""Spread of a change of one token, with and without the first key, against hidden states computed by hand."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, alibi_once, family_tokens, hooks_on, pair_of
from own_models import own_model, own_tokens
from tiny_models import tiny_model

from sinklab.errors import InputError
from sinklab.measuring.driver import measure_with_study
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request, Study
from sinklab.measuring.surgery import measure_mixing
from sinklab.models.adapter import adapt
from sinklab.report.collect import collect
from sinklab.report.figures import figures
from sinklab.survey.api import measure

POSITION = 4
LEFT = ["llama", "gpt2", "gpt-oss, sinks and window 5", "bloom", "olmo2"]


def causal_mask(T: int, window: int, hidden_first: bool) -> torch.Tensor:
    """0 where query t sees key k and the least number elsewhere (1, 1, T, T): the last `window` keys, t's own included.

    With `hidden_first` the first key is seen by the first query alone.
    """
    mask = torch.full((T, T), torch.finfo(torch.float32).min)
    for t in range(T):
        for k in range(max(0, t - window + 1), t + 1):
            if not (hidden_first and k == 0 and t > 0):
                mask[t, k] = 0
    return mask[None, None]


@contextmanager
def masks_by_hand(model: Any, T: int, hidden_first: bool) -> Iterator[None]:
    """The functions that make the masks in the family's own file return those of `causal_mask`."""
    family = sys.modules[type(model).__module__]
    whole = causal_mask(T, T, hidden_first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "create_causal_mask", lambda *_, **__: whole)
        if hasattr(family, "create_sliding_window_causal_mask"):
            width = getattr(model.config, "sliding_window", None) or T
            narrow = causal_mask(T, width, hidden_first)
            patch.setattr(family, "create_sliding_window_causal_mask", lambda *_, **__: narrow)
        yield


@torch.no_grad()
def by_hand(model: Any, tokens: torch.Tensor, hidden_first: bool) -> list[float]:
    """Spread by block: one sequence at a time, from the states before the first block and after each, masks by hand."""
    T = tokens.shape[1]
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    found: list[torch.Tensor] = []
    handles = [blocks[0].register_forward_pre_hook(lambda _, args: found.append(args[0][0]))]
    handles += [
        block.register_forward_hook(lambda _, __, out: found.append(out[0][0] if isinstance(out, tuple) else out[0]))
        for block in blocks
    ]
    spreads = []
    for n in range(len(tokens)):
        changed = tokens[n].clone()
        changed[POSITION - 1] = tokens[(n + 1) % len(tokens), POSITION - 1]
        if torch.equal(changed, tokens[n]):
            continue
        states = []
        for one in (tokens[n], changed):
            found.clear()
            with masks_by_hand(model, T, hidden_first):
                model(one[None], use_cache=False)
            states.append(list(found))
        spreads.append(
            [
                sum(float((new[t] - old[t]).norm() / old[t].norm()) for t in range(POSITION, T)) / (T - POSITION)
                for old, new in zip(*states, strict=True)
            ]
        )
    for handle in handles:
        handle.remove()
    return torch.tensor(spreads).mean(0).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spread_is_that_of_states_read_by_hand(family: str) -> None:
    (model, eager), tokens = pair_of(family), family_tokens()
    found = measure_mixing(adapt(model), tokens, POSITION, 2)
    with alibi_once(family):
        with_first, without_first = (by_hand(eager, tokens, hidden_first) for hidden_first in (False, True))
    assert found.spread == pytest.approx(with_first, rel=1e-4)
    assert found.spread_without_first == pytest.approx(without_first, rel=1e-4)
    assert found.spread[0] == 0
    assert min(found.spread[1:]) > 0
    assert found.spread != found.spread_without_first


@pytest.mark.parametrize("family", LEFT)
def test_batches_change_nothing_and_the_model_is_left_as_it_was(family: str) -> None:
    model, tokens = pair_of(family)[0], family_tokens()
    before = model.config._attn_implementation, hooks_on(model)
    one, all_together = (measure_mixing(adapt(model), tokens, POSITION, size) for size in (1, 5))
    assert one.spread == pytest.approx(all_together.spread, rel=1e-4)
    assert one.spread_without_first == pytest.approx(all_together.spread_without_first, rel=1e-4)
    assert (model.config._attn_implementation, hooks_on(model)) == before


def test_the_spread_of_our_own_transformer_is_measured_saved_and_drawn(tmp_path: Path) -> None:
    model, tokens = own_model("softmax"), own_tokens(3)
    measured = measure(model, tokens, perturb=3)
    assert measured.mixing is not None
    assert measured.mixing.spread[0] == 0
    assert min(measured.mixing.spread[1:]) > 0
    measured.save(tmp_path / "m")
    assert Measurement.load(tmp_path / "m").mixing == measured.mixing
    assert "mixing" in {figure.key for figure in figures(collect([tmp_path / "m"]))}
    assert "mixing" not in measure(model, tokens).document()


def test_perturbations_that_cannot_spread_are_refused() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    for position in (1, tokens.shape[1]):
        with pytest.raises(InputError, match="use 2 to 13"):
            measure(model, tokens, perturb=position)
    for alike in (tokens[:1].repeat(3, 1), tokens[:1]):
        with pytest.raises(InputError, match=r"same token there.*use another position, or more sequences"):
            measure(model, alike, perturb=4)
    with pytest.raises(InputError, match="without padding"):
        measure(model, tokens, perturb=4, attention_mask=(torch.arange(tokens.shape[1]) > 0).expand_as(tokens))


def test_the_hash_of_a_request_without_perturbation_is_that_of_earlier_versions() -> None:
    document = Request().document()
    assert "perturb" not in document["study"]
    assert list(document)[:5] == [
        "inputs",
        "sequences",
        "length",
        "eps",
        "lengths",
    ]  # measured experiments hash the text
    assert hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16] == "5a8fa9b957af650b"


def test_the_command_shows_the_change_by_block(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    model = tiny_model(tmp_path / "gpt2")
    call = ("measure", model, "--inputs", "random", "--sequences", "3", "--length", "8", "--perturb", "2")
    status, out, err = run(*call)
    assert status == 0, err
    assert "Replacement of the token at position 2" in out
    assert "without key 1" in out


def test_the_passes_of_a_perturbation_count_in_the_progress_of_the_measurement() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    said: list[tuple[float, float]] = []
    measure_with_study(
        adapt(model),
        tokens,
        Options(),
        Study(perturb=POSITION),
        bos_tokens=0,
        progress=lambda done, total: said.append((done, total)),
    )
    N = len(tokens)
    assert said[-1] == (5 * N, 5 * N)
    assert {total for _, total in said} == {5 * N}
    assert [done for done, _ in said] == sorted(done for done, _ in said)
