"""Recording of all stages: each command runs in a forked process, and its exit status and output are saved."""

import multiprocessing as mp
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.same_numbers.inputs import FAMILIES, write_model, write_texts
from benchmarks.same_numbers.stages import COPIED, stages


def record(out: Path, before: Path | None, jobs: int, only: tuple[str, ...]) -> None:
    """Run every command whose name begins with one of `only`, with the new folder `out` as working directory.

    Args:
        before: earlier recording whose results the reports show; with `only`, folders in `COPIED` are taken from it.
        jobs: number of concurrent commands.
    """
    earlier = (before or out).resolve()
    out.mkdir(parents=True)
    os.chdir(out)
    os.environ.update(SINKLAB_CACHE="cache", OMP_NUM_THREADS="1", COLUMNS="120", TOKENIZERS_PARALLELISM="false")
    write_texts()
    for folder in COPIED if before is not None and only != ("",) else ():
        for one in sorted((earlier / folder).glob("*")):
            if f"{folder}/{one.name}".startswith(only) or folder in only:
                continue  # recorded again
            Path(folder).mkdir(exist_ok=True)
            (shutil.copytree if one.is_dir() else shutil.copyfile)(one, Path(folder, one.name))
    with ProcessPoolExecutor(jobs, mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(write_model, FAMILIES))
        for stage in stages(earlier):
            commands = {name: arguments for name, arguments in stage().items() if name.startswith(only)}
            for done, name in enumerate(pool.map(_run, commands.items()), 1):
                print(f"{done}/{len(commands)} {name}", flush=True)


def _run(named: tuple[str, list[str]]) -> str:
    """Run a command (name, arguments) in a fork of this process; save output and status in log/, return the name."""
    name, arguments = named
    log = Path("log") / name
    log.parent.mkdir(parents=True, exist_ok=True)
    import sinklab.commands.app as cli

    import_module("transformers.models.auto.modeling_auto")  # imported here, so that the forks need not import it

    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        for number, ending in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(log.with_name(log.name + ending), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["sinklab", *arguments]
        try:
            if arguments[0] == "python":
                from benchmarks.same_numbers.library import write

                write(arguments[1])
                raise SystemExit(0)
            cli.main()
        except SystemExit as leaving:
            sys.stdout.flush()
            os._exit(leaving.code if isinstance(leaving.code, int) else bool(leaving.code))
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(99)
    _, status = os.waitpid(child, 0)
    log.with_name(log.name + ".status").write_text(f"{os.waitstatus_to_exitcode(status)}\n")
    return name
