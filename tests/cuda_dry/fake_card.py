"""A CUDA card that computes nothing: fake tensors on it, and transfers and waits noted with the line that causes them.

PyTorch's FakeTensorMode propagates shapes, dtypes and devices through a program. On a machine without a card, and with
a PyTorch built without CUDA, `guard.cpp` (LD_PRELOAD) answers the library's queries of the device. Operations that make
the processor wait for a real card, such as reading a number, return an arbitrary number at once.
"""

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard


def _load_guard() -> None:
    """Load libtorch_cpu before PyTorch is imported, so that it finds the symbols of the preloaded library."""
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ["LD_PRELOAD"], ctypes.RTLD_GLOBAL).register_guard()


_load_guard()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import sinklab  # noqa: E402

SOURCE = Path(sinklab.__file__).parent
WHOLE_NUMBER = 64  # what every integer on the card reads as
WAITING = ("nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "repeat_interleave")


@dataclass(frozen=True)
class Event:
    """A transfer or a wait.

    Attributes:
        what: "copy to the card", "copy from the card", or why the processor waits.
        place: file and function of sinklab that cause it.
        line: of that file; 0 where no frame of sinklab is on the stack.
        waits: whether the processor waits for the card.
    """

    what: str
    place: str
    line: int
    waits: bool


EVENTS: list[Event] = []


def note(what: str, waits: bool = True) -> None:
    """Note an event at the innermost line of sinklab."""
    stack = (frame for frame in traceback.extract_stack() if not frame.name.startswith("<"))  # list comprehensions
    ours = [frame for frame in stack if Path(frame.filename).is_relative_to(SOURCE)]
    if not ours:
        EVENTS.append(Event(what, "the backward pass", 0, waits))
        return
    last = ours[-1]
    place = f"{Path(last.filename).relative_to(SOURCE)} {last.name}"
    EVENTS.append(Event(what, place, last.lineno or 0, waits))


class _Watch(TorchDispatchMode):
    """Notes copies between card and processor, and operations whose result has a size that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.partition(".")[0]
        if name in ("_to_copy", "copy_"):
            self._copied(args[1] if name == "copy_" else args[0], name, args, kwargs)
        on_card = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in args)
        if name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            note("boolean index")
        if name in WAITING and on_card:
            note(name)
        if name == "_local_scalar_dense" and on_card:
            note("item")
        made_up: dict[str, Callable[[], Any]] = {
            "equal": lambda: True,
            "nonzero": lambda: torch.zeros(1, args[0].dim(), dtype=torch.long, device=args[0].device),
            "masked_select": lambda: torch.zeros(1, dtype=args[0].dtype, device=args[0].device),
            "_local_scalar_dense": lambda: 1,
        }
        return made_up[name]() if name in made_up else func(*args, **kwargs)

    @staticmethod
    def _copied(source: Tensor, name: str, args: Any, kwargs: Any) -> None:
        target = args[0].device if name == "copy_" else kwargs.get("device")
        if target is None or torch.device(target).type == source.device.type:
            return
        to_card = torch.device(target).type == "cuda"
        in_background = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2] is True)
        note("copy to the card" if to_card else "copy from the card", waits=not in_background)


def _read(name: str, answer: Callable[[FakeTensor], Any]) -> Callable[..., Any]:
    def reading(tensor: FakeTensor, *_: Any) -> Any:
        if tensor.fake_device.type == "cuda":
            note(name)
        return answer(tensor)

    return reading


def _made_up(tensor: FakeTensor) -> Any:
    if tensor.dtype == torch.bool:
        return True
    return 0.0 if tensor.dtype.is_floating_point else WHOLE_NUMBER


def _listed(tensor: FakeTensor) -> Any:
    number = _made_up(tensor)
    for size in reversed(tensor.shape):
        number = [number] * size
    return number


def _selected(tensor: Any, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply the slices and numbers of an index; return the result and the tensors of the index by dimension.

    PyTorch's own indexing queries the real device.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not any(part is Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    taken = sum(part.dim() if _is_mask(part) else 1 for part in parts if part is not None and part is not Ellipsis)
    dim, tensors, total = 0, {}, tensor.dim()
    part: Any
    for part in parts:
        if part is Ellipsis:
            dim += total - taken
        elif part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, Tensor):
            tensors[dim], dim = part, dim + 1
        else:
            tensor = torch.ops.aten.select.int(tensor, dim, int(part))
    return tensor, [tensors.get(at) for at in range(max(tensors, default=-1) + 1)]


def _is_mask(part: Any) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _get(tensor: FakeTensor, index: Any) -> Tensor:
    found, tensors = _selected(tensor, torch.tensor(index, device=tensor.device) if isinstance(index, list) else index)
    if tensors:
        return torch.ops.aten.index.Tensor(found, tensors)
    return torch.ops.aten.alias(found) if found is tensor else found


def _set(tensor: FakeTensor, index: Any, value: Any) -> None:
    found, tensors = _selected(tensor, index)
    if tensors:
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=found.dtype, device=found.device)
        torch.ops.aten.index_put_.default(found, tensors, value)
    elif isinstance(value, Tensor):
        found.copy_(value)
    else:
        found.fill_(value)


class _FakeEvent:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing, because nothing runs asynchronously."""

    def synchronize(self) -> None:
        """Wait for the work before the event."""
        note("event")


def _module_to(module: nn.Module, device: Any, *_: Any, **__: Any) -> nn.Module:
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module


def _assign(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def pretend() -> None:
    """Make PyTorch report a CUDA card in this process from now on."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0)
    _assign(
        torch.cuda,
        {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "is_bf16_supported": lambda including_emulation=True: True,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "mem_get_info": lambda device=None: (70 * 2**30, 80 * 2**30),
            "synchronize": lambda device=None: note("synchronize"),
            "current_stream": lambda device=None: None,
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "Event": _FakeEvent,
        },
    )
    torch._C._set_only_lift_cpu_tensors(True)
    _assign(
        FakeTensor,
        {
            "__bool__": _read("bool", lambda tensor: True),
            "__int__": _read("int", _made_up),
            "__float__": _read("float", lambda tensor: float(_made_up(tensor))),
            "item": _read("item", _made_up),
            "tolist": _read("tolist", _listed),
            "__getitem__": _get,
            "__setitem__": _set,
        },
    )
    nn.Module.to = _module_to  # type: ignore[method-assign,assignment]


@contextmanager
def card() -> Iterator[None]:
    """Make new tensors fake within the `with` block; older tensors become fake when they are moved to the card."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    own, pinned = Tensor.to, Tensor.pin_memory

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        real = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
        if real and args and str(args[0]).startswith("cuda"):
            tensor = mode.from_tensor(tensor)
        return own(tensor, *args, **kwargs)

    _assign(Tensor, {"to": moved, "pin_memory": lambda tensor, *_: tensor})
    try:
        with mode, _Watch():
            yield
    finally:
        _assign(Tensor, {"to": own, "pin_memory": pinned})
