"""The loss without full logits: the numbers of plain cross-entropy, at a fraction of the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from allocator import ALLOCATOR
from torch import Tensor

from sinklab.device import multiplies_natively
from sinklab.model import loss as module
from sinklab.model.loss import IGNORED, chunked_loss, next_token_loss, rows_per_chunk
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SCRIPT = """
import sys
import torch
from sinklab.model.loss import chunked_loss, rows_per_chunk

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

def step(tokens, words, width, rows, bf16):
    hidden = torch.randn(tokens, width).requires_grad_()
    head = (torch.randn(words, width) / width**0.5).requires_grad_()
    targets = torch.randint(words, (tokens,))
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = chunked_loss(hidden, head, targets, rows or rows_per_chunk(tokens, words, hidden.device))
    loss.backward()
    return (status("VmHWM") - before) / 1024

torch.set_num_threads(1)
*sizes, bf16 = (int(argument) for argument in sys.argv[1:])
step(8, 8, 8, 4, bool(bf16))  # library start-up is not the loss's memory
print(step(*sizes, bool(bf16)))
"""

needs_high_water_mark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


def problem(dtype: torch.dtype, rows: int = 50, words: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and targets, of which two are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden_NE, weight_VE = (torch.randn(n, 8, dtype=dtype, generator=generator) for n in (rows, words))
    targets_N = torch.randint(words, (rows,), generator=generator)
    targets_N[[1, 4]] = IGNORED
    return hidden_NE.requires_grad_(), weight_VE.requires_grad_(), targets_N


def with_gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("rows", [1, 7, 50, 64])
def test_chunks_give_the_cross_entropy_of_full_logits_and_its_gradients(rows: int) -> None:
    hidden_NE, weight_VE, targets_N = problem(torch.float64)
    whole = with_gradients(F.cross_entropy(hidden_NE @ weight_VE.T, targets_N), hidden_NE, weight_VE)
    chunked = with_gradients(chunked_loss(hidden_NE, weight_VE, targets_N, rows), hidden_NE, weight_VE)
    for ours, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_chunked_gradient_is_the_derivative() -> None:
    hidden_NE, weight_VE, targets_N = problem(torch.float64, rows=6, words=5)
    assert torch.autograd.gradcheck(lambda h, w: 3 * chunked_loss(h, w, targets_N, 4), (hidden_NE, weight_VE))


def test_under_autocast_chunks_multiply_in_bfloat16_and_sum_in_float32() -> None:
    hidden_NE, weight_VE, targets_N = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole = F.cross_entropy(F.linear(hidden_NE, weight_VE).float(), targets_N)
        chunked = chunked_loss(hidden_NE, weight_VE, targets_N, 7)
    assert chunked.dtype == torch.float32
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=0)  # a product may be rounded to its neighbour
    for ours, theirs in zip(
        with_gradients(chunked, hidden_NE, weight_VE), with_gradients(whole, hidden_NE, weight_VE), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-3)


def test_the_loss_of_small_logits_equals_pytorchs_bit_for_bit() -> None:
    hidden_NE, weight_VE, targets_N = problem(torch.float32)
    whole = with_gradients(F.cross_entropy(F.linear(hidden_NE, weight_VE), targets_N), hidden_NE, weight_VE)
    ours = with_gradients(next_token_loss(hidden_NE, weight_VE, targets_N), hidden_NE, weight_VE)
    assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))


@pytest.mark.parametrize("mask", ["causal", {"kind": "prefix", "length": 5}])
def test_a_models_loss_is_the_same_in_chunks(mask: object, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "vocab_size": 97, "context": 32}
    recipe = build_recipe({"model": {**sizes, "attention": {"mask": mask}}, "metric": {"length": 32}})
    model = Transformer(recipe.model).double()
    tokens_BT = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(0))
    whole = with_gradients(model.loss(tokens_BT), *model.parameters())
    monkeypatch.setattr(module, "WHOLE", 0)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 97 * 10)
    for ours, theirs in zip(with_gradients(model.loss(tokens_BT), *model.parameters()), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(tokens_BT), whole[0], rtol=0, atol=1e-12)


def test_a_chunk_has_at_least_one_row() -> None:
    assert rows_per_chunk(1000, 10**9, torch.device("cpu")) == 1
    assert rows_per_chunk(2**20, 50432, torch.device("cpu")) == 256


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_compiled_loss_is_the_same_and_stores_no_probabilities(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    hidden_NE, weight_VE, targets_N = problem(torch.float64)
    hidden_NE, weight_VE = (x.detach().to(dtype).requires_grad_() for x in (hidden_NE, weight_VE))

    def gradients() -> list[Tensor]:
        return with_gradients(chunked_loss(hidden_NE, weight_VE, targets_N, 20), hidden_NE, weight_VE)

    expected, fused = gradients(), torch.compile(module._loss_and_slope, backend=kept)
    monkeypatch.setattr(module, "_of_logits", lambda device: fused)
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert graphs
    assert not [node for graph in graphs for node in graph.graph.nodes if "scatter" in str(node.target)]


def test_chunks_on_cuda_are_a_sixteenth_of_a_large_batch() -> None:
    cuda = torch.device("cuda")
    assert [rows_per_chunk(rows, 50432, cuda) for rows in (2048, 16384, 65536)] == [640, 1024, 4096]


def peak_megabytes(tokens: int, words: int, width: int, rows: int, bf16: bool) -> float:
    """Peak memory of the forward and backward pass of the loss, above the memory allocated before it, in MB."""
    arguments = [str(int(value)) for value in (tokens, words, width, rows, bf16)]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ALLOCATOR)
    return json.loads(result.stdout)


@needs_high_water_mark
def test_a_loss_in_chunks_holds_a_fraction_of_the_logits() -> None:
    logits = 4096 * 8192 * 4 / 2**20
    assert peak_megabytes(4096, 8192, 32, rows=64, bf16=False) < logits / 5


@needs_high_water_mark
@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_the_loss_of_the_papers_batch_needs_at_most_a_fifth_of_the_memory_of_its_logits(bf16: bool) -> None:
    if bf16 and not multiplies_natively(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this CPU emulates bfloat16: the products would take an hour")
    logits = 8 * 2048 * 50432 * 4 / 2**20
    assert peak_megabytes(8 * 2048, 50432, 768, rows=0, bf16=bf16) < logits / 5
