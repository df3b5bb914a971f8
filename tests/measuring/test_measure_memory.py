"""Batches chosen to fit the memory, and the progress of a measurement."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import sinklab
from sinklab.measuring.records import Batch
from sinklab.measuring.statistics.collecting import DetailTotals
from sinklab.models import memory_budget as memory
from sinklab.models.memory_budget import Sizes, fitting_batch, free_bytes, sizes_of_pretrained

TOKENS = torch.randint(3, 64, (6, 12), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")
GPT2 = Sizes(width=768, ffn_width=3072, layers=12, heads=12)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    return hf.AutoModelForCausalLM.from_config(config).eval()


def _free(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)


def test_short_sequences_are_read_sixteen_at_a_time_and_long_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 2**40)
    assert [fitting_batch(GPT2, length, CPU) for length in (64, 1024, 4096, 32768)] == [16, 8, 2, 1]
    _free(monkeypatch, None)
    assert fitting_batch(GPT2, 64, CPU) == 16


def test_little_memory_gives_small_batches_of_at_least_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 2**30)
    assert 1 < fitting_batch(GPT2, 1024, CPU) < 8
    _free(monkeypatch, 0)
    assert fitting_batch(GPT2, 1024, CPU) == 1


def test_models_that_make_their_matrices_or_all_logits_need_more_memory_per_sequence(model: Any) -> None:
    def needed(**how: bool) -> int:
        how = {"matrices": False, "logits": False} | how
        return sizes_of_pretrained(model.config, **how).bytes_per_sequence(4096)

    plain = needed()
    assert needed(matrices=True) - plain >= 4 * 4 * 4096**2  # four heads in float32
    assert needed(logits=True) > plain


@pytest.mark.parametrize(
    "config",
    [
        hf.GPT2Config(),
        hf.OPTConfig(ffn_dim=5000),
        hf.MptConfig(),
        hf.BloomConfig(),
        hf.GPTNeoConfig(),
        hf.Gemma3Config(),
        hf.Gemma3nTextConfig(),
        hf.JambaConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_sizes_are_read_from_every_kind_of_config(config: Any) -> None:
    sizes = sizes_of_pretrained(config, matrices=False, logits=False)
    assert all(isinstance(size, int) for size in (sizes.width, sizes.ffn_width, sizes.layers, sizes.heads))
    assert sizes.ffn_width >= sizes.width


def test_the_limit_of_a_control_group_counts_where_it_is_tighter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = free_bytes(CPU)
    for name, text in {
        "memory.max": "1000",
        "memory.current": "700",
        "memory.stat": "anon 5\ninactive_file 50",
    }.items():
        (tmp_path / name).write_text(text + "\n")
    assert free_bytes(CPU) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert (free_bytes(CPU) is None) == (machine is None)


def test_the_limit_of_a_nested_control_group_or_its_parent_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "PROCESS_CGROUP", tmp_path / "of_process")
    (tmp_path / "of_process").write_text("3:cpuset:/elsewhere\n0::/job/step\n")
    step = tmp_path / "job" / "step"
    step.mkdir(parents=True)
    for folder, limit, used in ((step, "max", "300"), (step.parent, "1000", "700")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
    assert (free_bytes(CPU), memory.total_bytes(CPU)) == (300, 1000)
    (step / "memory.max").write_text("350\n")
    assert (free_bytes(CPU), memory.total_bytes(CPU)) == (50, 350)


def test_the_result_does_not_depend_on_the_batch_size(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sinklab.measure(model, TOKENS, batch_size=6)
    _free(monkeypatch, 0)
    done: list[float] = []
    alone = sinklab.measure(model, TOKENS, progress=lambda at, _: done.append(at))
    assert [at for at in done if at == int(at)] == [1, 2, 3, 4, 5, 6]
    assert (alone.sink_rate, alone.notes) == (whole.sink_rate, [])
    assert alone.loss == pytest.approx(whole.loss, rel=1e-5)


def _full_once(monkeypatch: pytest.MonkeyPatch, where: type, method: str) -> None:
    """Let the memory run out in the second call of a method."""
    calls, real = [0], getattr(where, method)

    def full(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("out of memory")
        return real(*given)

    monkeypatch.setattr(where, method, full)


def test_a_batch_that_runs_out_of_memory_is_counted_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sinklab.measure(model, TOKENS, batch_size=2)
    _full_once(monkeypatch, Batch, "on_cpu")
    found = sinklab.measure(model, TOKENS, batch_size=2)
    assert found.notes == ["out of memory: the batch size was reduced from 2 to 1 sequences"]
    assert (found.sequences, found.sink_rate) == (6, whole.sink_rate)
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)


def test_running_out_of_memory_while_a_batch_is_added_to_the_sums_is_an_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _full_once(monkeypatch, DetailTotals, "add")
    with pytest.raises(torch.OutOfMemoryError):
        sinklab.measure(model, TOKENS, batch_size=2, details=True)


def test_one_long_sequence_shows_progress_after_every_block(model: Any) -> None:
    done: list[tuple[float, int]] = []
    sinklab.measure(model, TOKENS[:1], progress=lambda read, all: done.append((read, all)))
    assert done == [(0.25, 1), (0.5, 1), (0.75, 1), (1, 1)]  # three blocks, and the head
