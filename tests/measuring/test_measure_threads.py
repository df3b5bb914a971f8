"""Measuring in several threads at once, and beside a model that trains: the same numbers as alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from families import FAMILIES, family_tokens, pair_of
from own_models import own_model, own_tokens
from transformers import AttentionInterface, AttentionMaskInterface

import sinklab
from sinklab.measuring.measurement import Measurement

ROUNDS = 4


def _measured(model: Any, tokens: torch.Tensor) -> Callable[[], list[Measurement]]:
    return lambda: [sinklab.measure(model, tokens, batch_size=2) for _ in range(ROUNDS)]


def _ablated(model: Any, tokens: torch.Tensor) -> Callable[[], list[Measurement]]:
    return lambda: [sinklab.measure(model, tokens, ablate=["mask_first:2"]) for _ in range(ROUNDS)]


def _trained(family: str) -> Callable[[], list[torch.Tensor]]:
    """A fresh model of the family, trained for some steps: its weights."""

    def train() -> list[torch.Tensor]:
        model = _fresh[family]()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3 * ROUNDS):
            model(family_tokens(), labels=family_tokens()).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    return train


def _fresh_llama() -> Any:
    model = pair_of("llama")[0]
    return model.train()


_fresh: dict[str, Callable[[], Any]] = {"llama": _fresh_llama}


def _together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """The results of jobs that start at the same moment, each in a thread of its own."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def _assert_same(one: Measurement, other: Measurement) -> None:
    assert one.sink_rate == other.sink_rate
    assert one.loss == other.loss
    assert one.backend == other.backend
    np.testing.assert_array_equal(one.importance, other.importance)
    np.testing.assert_array_equal(one.key_norm, other.key_norm)
    assert [part.loss_after for part in one.ablations or []] == [part.loss_after for part in other.ablations or []]


def test_threads_that_measure_different_models_do_not_disturb_each_other() -> None:
    models = [pair_of("llama")[0], pair_of("gemma2, softcap and window 5")[0], pair_of("bloom")[0]]
    jobs = [_measured(model, family_tokens()) for model in models]
    jobs += [_measured(own_model("key bias"), own_tokens()), _ablated(pair_of("opt")[0], family_tokens())]
    alone = [job()[0] for job in jobs]
    for expected, results in zip(alone, _together(jobs), strict=True):
        for found in results:
            _assert_same(found, expected)
    for registry in (AttentionInterface, AttentionMaskInterface):
        assert not [name for name in registry._global_mapping if name.startswith("sinklab")]


def test_training_gives_the_same_weights_while_other_models_are_measured() -> None:
    jobs: list[Callable[[], Any]] = [
        _trained("llama"),
        _measured(pair_of("llama")[0], family_tokens()),
        _measured(own_model("softmax"), own_tokens()),
    ]
    weights, (measured, *_), (ours, *_) = (job() for job in jobs)
    trained, measurements, of_ours = _together(jobs)
    for one, other in zip(trained, weights, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    for found in measurements:
        _assert_same(found, measured)
    for found in of_ours:
        _assert_same(found, ours)


def test_families_are_measured_in_threads_as_in_the_main_thread() -> None:
    families = ["gpt2", "mistral, window 5", "gpt-oss, sinks and window 5", "mpt"]
    assert set(families) <= set(FAMILIES)
    jobs = [_measured(pair_of(family)[0], family_tokens()) for family in families]
    for job, results in zip(jobs, _together(jobs), strict=True):
        _assert_same(results[0], job()[0])
