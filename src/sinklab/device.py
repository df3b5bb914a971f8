"""Devices: selection, native 16-bit support, CPU name, copies to the host, matmul precision, glibc memory settings.

torch.compile for functions that are called with many shapes and options.
"""

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from sinklab.errors import InputError, cause


def pick_device(name: str) -> torch.device:
    """Return the torch device of this name; "auto" is CUDA if available, else the CPU.

    Raises:
        InputError: if the name is not that of a device, or the device cannot be used on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name} is not usable; use auto, cpu, cuda or cuda:N ({cause(error)})") from error
    return device


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a CPU or CUDA device multiplies 16-bit floats natively. Emulation is slower than float32.

    Returns False for other devices, and for CPUs on which PyTorch uses neither AVX-512 nor AMX, for example because
    the environment variable ATEN_CPU_CAPABILITY disables them.

    Args:
        dtype: bfloat16 or float16.
    """
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() in WITHOUT_AVX512:
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in INSTRUCTIONS[dtype])


def float32_if_emulated(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return float32 if `dtype` is bfloat16 or float16 and the device is a CPU that emulates it, else `dtype`.

    Emulated bfloat16 is much slower than float32: 5 times in matrix products with AVX-512, 50 times with AVX2 only.
    """
    emulated = device.type == "cpu" and dtype in INSTRUCTIONS and not multiplies_natively(dtype, device)
    return torch.float32 if emulated else dtype


def processor_name() -> str:
    """Return the name of this machine's CPU with its family and model, or its architecture if the name is unknown.

    In virtual machines, several generations of CPUs have the same name, such as "AMD EPYC", but round differently.
    Family and model distinguish them.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {said[key]}" for key in ("cpu family", "model") if key in said]
    return ", ".join([said["model name"], *numbers])


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in host memory, with one synchronisation per GPU. Tensors on the CPU are not copied."""
    copies = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for card in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(card)
    return copies


@contextmanager
def float32_matmul(precision: Literal["highest", "high"], device: torch.device) -> Iterator[None]:
    """Set the precision of all float32 matmuls in the `with` block: float32 ("highest") or TF32 ("high").

    This has no effect unless `device` is a CUDA device.
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
    """Make glibc keep freed memory for the next training step.

    By default glibc returns large blocks to the system, which must zero the pages again at each step. This takes 3 to
    13 % of a small model's training time (benchmarks/train_cpu.py). The setting lasts until the process ends and does
    not change numerical results. This function is a no-op without glibc, or if the environment variable
    MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES is set.
    """
    variables = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in variables):
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_TRIM_THRESHOLD, KEPT)
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants in malloc.h
KEPT = 2**28  # maximum bytes of free memory kept at the end of the heap
LARGEST_KEPT = 2**25  # bytes; freed blocks above it return to the system; older glibc refuses a higher limit
INSTRUCTIONS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}
WITHOUT_AVX512 = ("DEFAULT", "NO AVX", "AVX2")


P = ParamSpec("P")
R = TypeVar("R")

FORMS = 128  # compiled variants allowed per function; they differ in operation, mask, shape and gradient mode


def compiled(function: Callable[P, R], dynamic: bool | None = None) -> Callable[P, R]:
    """Return `function` compiled by `torch.compile`, and raise PyTorch's global recompile limit to at least FORMS.

    The default limit is 8 variants per function. Further variants run uncompiled, and uncompiled FlexAttention
    materialises the T x T matrix.

    Args:
        dynamic: as in `torch.compile`; False compiles every shape separately.
    """
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, FORMS)
    return torch.compile(function, dynamic=dynamic)


@functools.cache
def can_compile() -> bool:
    """Return whether torch.compile works on this machine's CPU: it needs a C++ compiler and Python's headers."""
    try:
        torch.compile(lambda x: x.sin() + 1, fullgraph=True)(torch.ones(64))
    except Exception:  # Inductor raises a different exception for each missing component
        return False
    return True
