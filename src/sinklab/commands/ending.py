"""Run a command, print its errors to stderr, and set its exit status. Only rank 0 prints errors common to all ranks."""

import errno
import os
import sys
from typing import NoReturn

import typer

from sinklab import signals
from sinklab.commands.terminal.tables import print_text, stderr
from sinklab.errors import SinklabError, is_out_of_memory
from sinklab.files import DISK_FULL

INACCESSIBLE = (errno.EACCES, errno.EPERM, errno.ELOOP)
NO_HOME = "Could not determine home directory."  # pathlib, for ~name
SHOWN = 80  # characters shown of a path that is too long
_KEPT = "interrupted; finished work is saved. Run the same command again to resume."
_NOT_KEPT = "interrupted; unfinished results were not saved. Run the same command again to start over."
_OUT_OF_MEMORY = (
    "out of memory: use a smaller model, shorter sequences or smaller batches "
    "(train.micro_batch, --batch-size). Files saved earlier are unchanged"
)


def end(app: typer.Typer) -> NoReturn:
    """Run the command in sys.argv, and exit with its status: 130 after Ctrl-C, 75 after SIGTERM or SIGUSR1."""
    try:
        with signals.left_on_signals():
            status = _status(app)
    except (KeyboardInterrupt, typer.Abort):
        status = signals.INTERRUPTED
    except signals.PreemptedError:
        status = signals.CALL_AGAIN
    kept = signals.was_kept()
    if status in (signals.INTERRUPTED, signals.CALL_AGAIN):
        signals.ignore_signals()
        if _is_first():
            print_text(_KEPT if kept else _NOT_KEPT, stderr())
    if _has_others():  # `joined_world` requires os._exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _status(app: typer.Typer) -> int:
    """Run the command and return its exit status; print the message of an expected error."""
    if "" in sys.argv[1:]:  # an empty path would be the current folder
        _say_error(
            "an argument is empty, as from an unset variable of the shell: pass a value, or leave the option out"
        )
        return 2
    try:
        status = app(standalone_mode=False)
    except SinklabError as error:
        if not error.printed_elsewhere:
            _say_error(str(error))
        return error.exit_status
    except typer.Exit as leaving:
        return leaving.exit_code
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # raised by any use of a path argument
            _say_error(f"{str(error.filename)[:SHOWN]}...: {error.strerror}; use a shorter path")
            return 2
        if error.errno in INACCESSIBLE and error.filename is not None:  # also raised by any use
            _say_error(f"cannot access {error.filename}: {error.strerror}. Make it accessible, or use another path")
            return 2
        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        _say_error(f"cannot write the result to stdout ({error.strerror}): free disk space, or redirect stdout")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  flushing the rest of the output at exit would fail again
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            _say_error(f"{_OUT_OF_MEMORY} ({str(error).strip() or type(error).__name__})")
            return 1
        if str(error) == NO_HOME:
            _say_error("a path begins with ~ and a name, and there is no such home directory: use another path")
            return 2
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # type: ignore[attr-defined]  # empty if a help text was printed
        if message and _is_first():  # all processes have the same command line
            _say_error(f"{message}{'' if message[-1] in '.?' else '.'} See --help.")
        return 2
    return status if isinstance(status, int) else 0


def _has_others() -> bool:
    """Return True if torchrun has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _is_first() -> bool:
    return not _has_others() or os.environ.get("RANK", "0") == "0"


def _say_error(message: str) -> None:
    console = stderr()
    console.print("error:", style="bold red", end=" ")
    print_text(message.replace("Value error, ", ""), console)  # pydantic's prefix, in our messages and in typer's
