"""`sinklab verify`: the checks of a packed sweep to the terminal."""

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from sinklab.commands.console import PLAIN
from sinklab.commands.ending import stderr
from sinklab.errors import InputError
from sinklab.experiments.sweep.verifying import verify_packed

SHOWN = 20
"""Most problems of a check in the terminal."""


def verify_command(directory: Path, retrain: int, seed: int, as_json: bool) -> None:
    """Verify packed results and print what was checked.

    Raises:
        InputError: the folder holds no packed results.
        Exit: with status 1, something is not as it should be.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not a folder: expected one that report --pack has written")
    console = stderr()

    def say(text: str) -> None:
        console.print(text, **PLAIN)

    checks = verify_packed(directory, retrain, seed, say)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        out = Console()
        for check in checks:
            wrong = len(check.problems)
            out.print(
                f"{check.name}: {check.checked} checked, {f'{wrong} problems' if wrong else 'all as it should be'}",
                **PLAIN,
            )
            for line in [
                *check.problems[:SHOWN],
                *(["and more: see --json"] if wrong > SHOWN else []),
                *check.notes[:SHOWN],
            ]:
                out.print(f"  {line}", **PLAIN)
    if any(check.problems for check in checks):
        raise typer.Exit(1)
