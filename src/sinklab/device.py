"""Where tensors live."""

import torch

from sinklab.errors import InputError


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
        first_line = str(error).splitlines()[0]
        raise InputError(f"device {name} is not usable here; use auto, cpu, cuda or cuda:N ({first_line})") from error
    return device


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 products; emulated ones are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))
