"""Default batch size, from an estimate of the memory per sequence and the free memory.

The estimate is conservative. On a CPU, Linux overcommits memory and kills a process that runs out of it, so the batch
cannot be halved afterwards (measuring/accumulate.py). The estimate includes tensors that grow with the sequence:
activations of one block, recorded attention sums, attention matrices of models that compute them, and logits of models
that cannot compute them in chunks. Logits computed in chunks are negligible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sinklab.models.families import FFN_WIDTHS, first_named, text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MOST_SEQUENCES = 16  # maximum sequences per batch: larger batches are not faster, and progress is shown per batch
TOKENS = 2**13  # maximum tokens per batch: more tokens are not faster either
SHARE = 0.5  # fraction of the free memory to use
FLOAT = 4  # bytes per number; sums are in float32, except for float64 models
LOGITS_AT_ONCE = 2**24  # logits per chunk: 64 MB in float32; the LM head is slower with a quarter of this
LOGITS_AT_ONCE_CUDA = 2**26  # 256 MB in float32
CGROUP = Path("/sys/fs/cgroup")
PROCESS_CGROUP = Path("/proc/self/cgroup")  # contains the path of the process's cgroup below CGROUP


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's tensors in a forward pass.

    Attributes:
        width: hidden size.
        ffn_width: intermediate size of the MLP; the largest if layers differ.
        layers, heads: numbers of layers and of query heads per layer; they determine the size of the attention sums.
        matrices: number of float32 T x T score matrices per sequence in memory at the same time; 0 if attention is
            computed in blocks.
        vocabulary: vocabulary size if all logits are computed at once; 0 if they are computed in chunks.
    """

    width: int
    ffn_width: int
    layers: int
    heads: int
    matrices: int = 0
    vocabulary: int = 0

    def bytes_per_sequence(self, length: int) -> int:
        """Estimate an upper bound of the peak memory in bytes of one sequence of `length` tokens, without weights."""
        activations = 16 * self.width + 4 * self.ffn_width + 3 * self.vocabulary
        recorded = 6 * self.layers * self.heads  # float32 numbers per token: sums, alpha, and alpha in float64
        return FLOAT * length * (activations + recorded + length * self.matrices)


def sizes_of_pretrained(config: "PretrainedConfig", *, matrices: bool, logits: bool) -> Sizes:
    """Return the tensor sizes of a Hugging Face model, from its config.

    Args:
        matrices: whether the model computes whole attention matrices.
        logits: whether the model always computes the logits of all positions.
    """
    text = text_config(config)
    width, heads = text.hidden_size, text.num_attention_heads
    ffn_width = first_named(text, FFN_WIDTHS) or 4 * width
    ffn_width = max(ffn_width) if isinstance(ffn_width, Sequence) else ffn_width
    return Sizes(
        width=width,
        ffn_width=ffn_width,
        layers=text.num_hidden_layers,
        heads=heads,
        matrices=4 * heads if matrices else 0,
        vocabulary=text.vocab_size if logits else 0,
    )


def fitting_batch(sizes: Sizes, length: int, device: torch.device, blocks: int = 1) -> int:
    """Return the default number of sequences per batch, limited by MOST_SEQUENCES, TOKENS and SHARE of the free memory.

    The number is at least 1. If the free memory is unknown, only MOST_SEQUENCES and TOKENS limit it.

    Args:
        sizes: sizes of the model's tensors.
        length: tokens per sequence.
        blocks: number of blocks whose activations are in memory at the same time.
    """
    free = free_bytes(device)
    most = MOST_SEQUENCES if free is None else int(SHARE * free) // (blocks * sizes.bytes_per_sequence(length))
    return max(1, min(MOST_SEQUENCES, TOKENS // length, most))


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device in bytes; None if unknown.

    On CUDA, memory that PyTorch has reserved but not allocated counts as free. On a CPU, the result is the free memory
    of the machine or of the process's cgroup or its ancestors (cgroup v2), whichever is least.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    free_of_groups = []
    for folder, limit in _limits().items():
        if used := _text(folder / "memory.current"):
            statistics = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            cached = int(statistics.get("inactive_file", 0))  # cached files can be evicted
            free_of_groups.append(max(0, limit - int(used) + cached))
    return min((free for free in (_of_machine(), *free_of_groups) if free is not None), default=None)


def total_bytes(device: torch.device) -> int | None:
    """Return the total memory of the device in bytes; None if unknown.

    On a CPU, the result is the memory of the machine or the limit of the process's cgroup or its ancestors (cgroup v2),
    whichever is least.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu":
        return None
    return min((total for total in (_of_machine("MemTotal:"), *_limits().values()) if total is not None), default=None)


def _of_machine(which: str = "MemAvailable:") -> int | None:
    lines = _text(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(which)), None)


def _limits() -> dict[Path, int]:
    """Return the memory limits in bytes of the process's cgroup and its ancestors that have one, by folder."""
    lines = _text(PROCESS_CGROUP).splitlines()
    own = CGROUP / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(CGROUP)]
    limits = {folder: _text(folder / "memory.max").strip() for folder in folders}
    return {folder: int(limit) for folder, limit in limits.items() if limit.isdigit()}  # "max": no limit


def _text(path: Path) -> str:
    """Return the content of a /proc or cgroup file; empty if it cannot be read, as on systems other than Linux."""
    try:
        return path.read_text()
    except OSError:
        return ""
