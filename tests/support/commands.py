"""`sinklab` commands as processes of their own, forked from a server that has imported everything once.

A process can send itself a signal, such as a real SIGKILL, at its n-th function call, counted over the whole command or
within a part of it, so that a kill between any two calls can be tested and repeated.
"""

import contextlib
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

IMPORTED_ONCE = [
    "commands",
    "sinklab.commands.app",
    "sinklab.commands.train",
    "torch._dynamo",
    "numpy.random",
    "numpy.ctypeslib",
]
LIMIT_S = 120  # a process that still runs after this counts as hanging


Part = Literal["command", "preparation", "journal", "setup", "training", "update", "save"]


@dataclass(frozen=True)
class Kill:
    """A signal and the function call at which it is sent, counted from 1 within a part of the command.

    If the part is entered several times, calls are counted over all entries, or within the `time`-th entry alone.
    """

    call: int
    within: Part
    number: int = signal.SIGKILL
    time: int | None = None

    def is_due(self, calls: Sequence[int]) -> bool:
        """Return True if the process is to be killed, for the number of function calls in each entry into the part."""
        if self.time is None:
            return sum(calls) >= self.call
        return len(calls) >= self.time and calls[self.time - 1] >= self.call


@dataclass
class Command:
    """A running `sinklab ARGS`.

    Args:
        args: of the command.
        log: receives what the command prints.
        environment: in addition to this process's own.
        kill: signal that the command sends itself, and when.
        count: also count function calls, for `calls`.
    """

    args: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    kill: Kill | None = None
    count: bool = False

    def __post_init__(self) -> None:
        self.process: BaseProcess = _server().Process(target=_body, args=(self,))
        self.process.start()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "process"}

    def wait(self) -> int:
        """The exit status; -9 where it was killed. A command that hangs is an error."""
        self.process.join(LIMIT_S)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"sinklab {' '.join(self.args)} hangs; it printed:\n{self.printed()}")
        assert self.process.exitcode is not None
        return self.process.exitcode

    def printed(self) -> str:
        """Everything on standard output and standard error."""
        return self.log.read_text(encoding="utf-8")

    def calls(self) -> dict[Part, list[int]]:
        """Number of function calls in each part, for each entry; available after the command has ended."""
        return json.loads(self.log.with_suffix(".calls").read_text())


def together(
    args: Sequence[str],
    log: Path,
    size: int,
    kill: Kill | None = None,
    victim: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[Command]:
    """The same command as `size` processes with the environment of torchrun; `kill` is for process `victim`."""
    places = [{**(environment or {}), **place} for place in _places(size)]
    return [
        Command(args, log.with_suffix(f".{rank}.log"), place, kill if rank == victim else None)
        for rank, place in enumerate(places)
    ]


def call_together(function: Callable[..., None], size: int, *args: Any) -> list[int]:
    """Exit statuses of `size` processes that call `function(world, *args)`, a function of some module."""
    processes = [_server().Process(target=_call, args=(function, place, args)) for place in _places(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
    return [process.exitcode or 0 for process in processes]


def _places(size: int) -> list[dict[str, str]]:
    """The environment of each of `size` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _server() -> ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def _call(function: Callable[..., None], place: Mapping[str, str], args: Sequence[Any]) -> None:
    import torch

    from sinklab.train.world import joined_world

    os.environ.update(place)
    torch.set_num_threads(1)
    try:
        with joined_world() as world:
            function(world, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # see joined_world


def _body(command: Command) -> None:
    import torch

    from sinklab.commands import app as cli

    with command.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(command.environment, COLUMNS="300")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that SIGINT is ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the fork server of a sweep in this process blocks signals
    sys.argv = ["sinklab", *command.args]
    with _counting(command) if command.kill or command.count else contextlib.nullcontext():
        cli.main()


@contextlib.contextmanager
def _counting(command: Command) -> Iterator[None]:
    from sinklab.data.prepare import Builder, _write_shards
    from sinklab.train.checkpoint import save_checkpoint
    from sinklab.train.loop import Trainer
    from sinklab.train.update import Updater

    parts: dict[Any, Part] = {
        _write_shards.__code__: "preparation",
        Builder._write.__code__: "journal",
        Trainer.__init__.__code__: "setup",
        Trainer.train.__code__: "training",
        Updater.update.__code__: "update",
        save_checkpoint.__code__: "save",
    }
    within: set[Part] = {"command"}
    counts: dict[Part, list[int]] = {"command": [0], **{part: [] for part in parts.values()}}
    waiting = command.kill

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal waiting
        part = parts.get(frame.f_code)
        if part and event == "call":
            within.add(part)
            counts[part].append(0)
        elif part and event == "return":
            within.remove(part)
        if event in ("call", "c_call"):
            for part in within:
                counts[part][-1] += 1
            # Python runs handlers only at certain points, such as the start of a Python function. A handler that raised
            # at the call of a built-in function, such as the release of the import lock, would do what no signal can.
            possible = event == "call" or (waiting and waiting.number == signal.SIGKILL)
            if waiting and possible and waiting.within in within and waiting.is_due(counts[waiting.within]):
                number, waiting = waiting.number, None
                os.kill(os.getpid(), number)

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        command.log.with_suffix(".calls").write_text(json.dumps(counts))
