"""Recording of every stage: each command in a fork, with its status and its output."""

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
    """Run every command whose name begins with one of `only` into `out`, with paths relative to it."""
    earlier = (before or out).resolve()
    out.mkdir(parents=True)
    os.chdir(out)
    os.environ.update(SINKLAB_CACHE="cache", OMP_NUM_THREADS="1", COLUMNS="120", TOKENIZERS_PARALLELISM="false")
    write_texts()
    for folder in COPIED if before is not None and only != ("",) else ():
        if not f"{folder}/".startswith(only) and (earlier / folder).is_dir():
            shutil.copytree(earlier / folder, folder)
    with ProcessPoolExecutor(jobs, mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(write_model, FAMILIES))
        for stage in stages(earlier):
            commands = {name: arguments for name, arguments in stage().items() if name.startswith(only)}
            for done, name in enumerate(pool.map(_run, commands.items()), 1):
                print(f"{done}/{len(commands)} {name}", flush=True)


def _run(named: tuple[str, list[str]]) -> str:
    """One command in a fork of this process; its status and standard output are kept."""
    name, arguments = named
    log = Path("log") / name
    log.parent.mkdir(parents=True, exist_ok=True)
    import sinklab.commands.app as cli

    import_module("transformers.models.auto.modeling_auto")  # once and not in every command

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
