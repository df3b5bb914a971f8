"""Runs of an experiment with made-up numbers, so that the verdict on them is known."""

from collections.abc import Mapping, Sequence
from typing import Any

from sinklab.experiments.definition import Experiment, Scale
from sinklab.experiments.documents import CellRun, CellSummary, JudgedClaim
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.summary import at_scale, named_values
from sinklab.experiments.verdicts.judging import judge
from sinklab.train.run import Evaluation

STEPS = 1500
NAMES = ("sink_1", "sink_bias", "valid_loss", "norm_ratio", "norm_untrained", "norm_lowest", "emergence_step")


def reading(
    step: int = STEPS,
    sink: Sequence[float] | None = None,
    sink_1: float = 10.0,
    sink_bias: float | None = None,
    valid_loss: float | None = 3.0,
    norm_ratio: float | None = 2.0,
) -> Evaluation:
    """An evaluation; `sink` is the rates by position, `sink_1` that of the first alone."""
    rates = [sink_1, 0.0] if sink is None else sink
    return Evaluation(
        step=step,
        tokens=step * 2048,
        sink_rate=list(rates),
        sink_rate_bias=sink_bias,
        valid_loss=valid_loss,
        train_loss=valid_loss,
        hidden_norm_ratio=[] if norm_ratio is None else [norm_ratio],
    )


def run_of(seed: int, *readings: Evaluation) -> RunNumbers:
    """A finished run."""
    return RunNumbers(seed=seed, readings=readings)


def cell_of(*runs: RunNumbers, failed: int = 0) -> CellSummary:
    """A cell with these finished runs, and others that did not train."""
    shown = [_shown(run) for run in runs]
    shown += [CellRun(seed=900 + at, hash=f"{at:016}", directory="", status="failed") for at in range(failed)]
    return CellSummary(runs=shown)


def _shown(run: RunNumbers) -> CellRun:
    values, never = named_values(run, NAMES)
    return CellRun(
        seed=run.seed,
        hash=f"{run.seed:016}",
        directory=f"run-{run.seed}",
        status="done",
        values=values,
        never=never,
        numbers=run,
    )


def cells_of(name: str, values: Mapping[str, Sequence[float]]) -> dict[str, CellSummary]:
    """Cells whose runs end with these values of a quantity, a seed each from 0 on."""
    return {
        cell: cell_of(*(run_of(seed, reading().model_copy(update=_number(name, y))) for seed, y in enumerate(several)))
        for cell, several in values.items()
    }


def _number(name: str, value: float) -> Mapping[str, object]:
    fields = {"sink_1": {"sink_rate": [value, 0.0]}, "norm_ratio": {"hidden_norm_ratio": [value]}}
    return fields.get(name, {name: value})


def experiment_of(
    *checks: Mapping[str, object], cells: Sequence[str], scale: Scale = "tiny", **more: object
) -> Experiment:
    """An experiment with these cells and a claim per check: claim_0, claim_1, .."""
    return Experiment.model_validate(
        {
            "id": "made_up",
            "title": "Made up",
            "base": {scale: scale},
            "cells": {name: {"optim": {"weight_decay": float(i)}} for i, name in enumerate(cells)},
            "claims": [{"id": f"claim_{i}", "text": f"claim {i}", "check": check} for i, check in enumerate(checks)],
            **more,
        }
    )


def judged(
    *checks: Mapping[str, Any], results: Mapping[str, CellSummary], scale: Scale = "tiny", **more: object
) -> list[JudgedClaim]:
    """The claims of these checks, judged by these runs."""
    parts = [part for check in checks for part in (check["of"] if check["is"] == "all" else [check])]
    named = [str(value) for check in parts for key, value in check.items() if key in ("cell", "than", "to")]
    named += [cell for check in parts for key in ("of", "over") for cell in check.get(key, ())]
    cells = list(dict.fromkeys([*results, *named]))
    return judge(at_scale(experiment_of(*checks, cells=cells, scale=scale, **more), scale), results)


def verdict(
    check: Mapping[str, object], results: Mapping[str, CellSummary], scale: Scale = "tiny", **more: object
) -> JudgedClaim:
    """One claim, judged."""
    return judged(check, results=results, scale=scale, **more)[0]
