"""With what the runs of sweeps were trained: commits, versions, processors, hours and dates of all of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.summary import counted
from sinklab.train.directory.environment import read_environment

SHORT = 10
"""Digits of a commit that are shown."""


@dataclass(frozen=True)
class SweepOrigins:
    """What env.json and record.json say, over the finished and failed runs of some sweeps.

    Attributes:
        runs: that have ended.
        core_hours: seconds of training times threads, of runs on processors, over 3600.
        card_hours: of runs on cards.
        facts: title and text of what env.json says, such as `PyTorch` and `2.13.0`.
    """

    runs: int
    core_hours: float
    card_hours: float
    facts: Sequence[tuple[str, str]]


def origins(sweeps: Sequence[Sweep]) -> SweepOrigins | None:
    """The same; None where no run has ended.

    Raises:
        SinklabError: env.json of a run is damaged.
    """
    runs = {run.hash: (sweep, run) for sweep in sweeps for run in sweep.runs if run.status != "unfinished"}
    found = [
        (read_environment(folder) if (folder := sweep.folder(run)) else {}, run.seconds or 0.0)
        for sweep, run in runs.values()
    ]
    if not found:
        return None
    cores = sum(seconds * int(said.get("threads") or 1) for said, seconds in found if not _on_card(said))
    cards = sum(seconds for said, seconds in found if _on_card(said))
    return SweepOrigins(len(found), cores / 3600, cards / 3600, _facts([said for said, _ in found]))


def _facts(said: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    begun = sorted(str(one["begun"])[:10] for one in said if one.get("begun"))
    changed = sum(bool(one.get("changed_files")) for one in said)
    days = f"{begun[0]} to {begun[-1]}" if begun and begun[0] != begun[-1] else "".join(begun[:1])
    facts = [
        ("Begun", days),
        ("Commit", _each(str(one["git"])[:SHORT] for one in said if one.get("git"))),
        ("Uncommitted changes", f"in {counted(changed, 'run')}" if changed else ""),
        ("sinklab", _each(one.get("sinklab") for one in said)),
        ("Python", _each(one.get("python") for one in said)),
        ("PyTorch", _each(one.get("torch") for one in said)),
        ("Processor", _each(one.get("processor") for one in said)),
        ("Device", _each(one.get("device") for one in said if _on_card(one))),
        ("Threads", _each(one.get("threads") for one in said)),
    ]
    silent = sum(not one.get("begun") for one in said)
    facts.append(("Not recorded", f"date and versions of {counted(silent, 'run')}" if silent else ""))
    return [(title, text) for title, text in facts if text]


def _each(values: Iterable[object]) -> str:
    """The different ones, in the order of their first run."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _on_card(said: Mapping[str, Any]) -> bool:
    return not str(said.get("device", "cpu")).startswith("cpu")
