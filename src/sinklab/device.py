"""Devices: choice, 16-bit support, host copies, matmul precision, memory of the C library."""

import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sinklab.errors import InputError, cause


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is one.

    Raises:
        InputError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name} is not usable here; use auto, cpu, cuda or cuda:N ({cause(error)})") from error
    return device


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has instructions for products of 16-bit floats; emulated ones are slower than float32.

    On a CPU without such instructions, and where ATEN_CPU_CAPABILITY keeps PyTorch from them, it has not.
    """
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() in WITHOUT_AVX512:
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in INSTRUCTIONS[dtype])


def float32_if_emulated(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """A dtype of weights, or float32 in its place on a CPU that emulates its products (bfloat16: five times slower)."""
    emulated = device.type == "cpu" and dtype in INSTRUCTIONS and not multiplies_natively(dtype, device)
    return torch.float32 if emulated else dtype


def processor_name() -> str:
    """The model of this machine's processor, its architecture where the system does not name it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the machine's own memory, after one wait for each card that they are on."""
    copies = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for card in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(card)
    return copies


@contextmanager
def float32_matmul(precision: Literal["highest", "high"], device: torch.device) -> Iterator[None]:
    """Within it, products of float32 matrices on a card are made in float32 ("highest") or TF32 ("high").

    On other devices nothing changes.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def keep_freed_memory() -> None:
    """Let the process keep what a training step frees on the CPU, instead of asking for it again in the next.

    Otherwise the C library gives large blocks back, and the system clears every page of them anew at each step, which
    is 3 to 13 % of the time of a small model's (benchmarks/train_cpu.py). The numbers stay what they are. For processes
    that only train: it holds until they end. Only with glibc, and not where its environment variables are set.
    """
    asked = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in asked):
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_TRIM_THRESHOLD, KEPT)
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 2**28  # bytes that are free at the end of the heap
LARGEST_KEPT = 2**25  # a larger block is given back at once; more than this older versions refuse
INSTRUCTIONS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
WITHOUT_AVX512 = ("DEFAULT", "NO AVX", "AVX2")
