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
    """Choose the device with this name; "auto" is CUDA if available.

    Raises:
        InputError: if this machine has no such device.
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
    """Whether the device has instructions for products of 16-bit floats; emulated products are slower than float32.

    False on a CPU whose instructions ATEN_CPU_CAPABILITY disables in PyTorch.
    """
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() in WITHOUT_AVX512:
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in INSTRUCTIONS[dtype])


def float32_if_emulated(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype, or float32 on a CPU that emulates its products (bfloat16: five times slower)."""
    emulated = device.type == "cpu" and dtype in INSTRUCTIONS and not multiplies_natively(dtype, device)
    return torch.float32 if emulated else dtype


def processor_name() -> str:
    """The model of this machine's processor, or its architecture if the model is unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory, with one synchronisation per card."""
    copies = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for card in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(card)
    return copies


@contextmanager
def float32_matmul(precision: Literal["highest", "high"], device: torch.device) -> Iterator[None]:
    """Compute float32 matrix products on CUDA in float32 ("highest") or TF32 ("high") in the `with` block."""
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
    """Have glibc keep freed memory in the process, for the next training step.

    Otherwise glibc returns large blocks to the system, which clears every page of them again at each step: 3 to 13 % of
    a small model's time (benchmarks/train_cpu.py). Results are unchanged. For processes that only train: it lasts until
    they end. No effect without glibc, or if its environment variables are set.
    """
    variables = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in variables):
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_TRIM_THRESHOLD, KEPT)
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 2**28  # free bytes at the end of the heap
LARGEST_KEPT = 2**25  # a larger block is returned at once; older versions refuse a larger limit
INSTRUCTIONS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
WITHOUT_AVX512 = ("DEFAULT", "NO AVX", "AVX2")
