"""From run directories to summary.json: one row per cell over its seeds, and a verdict per claim."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.errors import SinklabError
from sinklab.experiments.definition import Check, Claim, Experiment
from sinklab.experiments.documents import CellSummary, JudgedClaim, SeedBySeed, Summary
from sinklab.train.directory.history import read_history, seconds_spent


@dataclass(frozen=True)
class Result:
    """The end of one finished run: percent, nats per token, ratio, seconds."""

    sink_rate: list[float]
    sink_rate_bias: float | None
    valid_loss: float
    hidden_norm_ratio_max: float
    seconds: float


def read_result(directory: Path) -> Result:
    """The last evaluation of a finished run.

    Raises:
        SinklabError: the run has not finished, or its last evaluation lacks a number.
    """
    history = read_history(directory / "metrics.jsonl")
    if not history or not (directory / "measurement.json").exists():
        raise SinklabError(f"the run in {directory} has not finished: run the same command again to continue it")
    last = history[-1]
    rates = [rate for rate in last.sink_rate if rate is not None]
    ratios = [ratio for ratio in last.hidden_norm_ratio if ratio is not None]
    if last.valid_loss is None or not rates or not ratios or len(rates) < len(last.sink_rate):
        raise SinklabError(f"the last evaluation in {directory / 'metrics.jsonl'} lacks a number: train the run again")
    return Result(rates, last.sink_rate_bias, last.valid_loss, max(ratios), round(seconds_spent(history), 1))


def summarise(experiment: Experiment, results: Mapping[str, Sequence[Result]]) -> Summary:
    """Every cell over its seeds, and a verdict per claim.

    Args:
        results: for each finished cell its runs, one per seed, in the order of the seeds.
    """
    return Summary(
        id=experiment.id,
        title=experiment.title,
        cells={name: _cell(runs) for name, runs in results.items()},
        claims=[_judged(claim, results) for claim in experiment.claims],
    )


def _cell(runs: Sequence[Result]) -> CellSummary:
    """Means over the seeds, and what each seed gave at the positions that are talked about."""
    biases = [run.sink_rate_bias for run in runs if run.sink_rate_bias is not None]
    return CellSummary(
        sink_rate=[statistics.fmean(values) for values in zip(*(run.sink_rate for run in runs), strict=True)],
        sink_rate_bias=statistics.fmean(biases) if biases else None,
        valid_loss=statistics.fmean(run.valid_loss for run in runs),
        hidden_norm_ratio_max=statistics.fmean(run.hidden_norm_ratio_max for run in runs),
        seeds=len(runs),
        seconds=statistics.fmean(run.seconds for run in runs),
        by_seed=SeedBySeed(
            sink_1=[run.sink_rate[0] for run in runs],
            sink_bias=biases or None,
            valid_loss=[run.valid_loss for run in runs],
            hidden_norm_ratio_max=[run.hidden_norm_ratio_max for run in runs],
        ),
    )


def _judged(claim: Claim, results: Mapping[str, Sequence[Result]]) -> JudgedClaim:
    verdict, evidence = _judge(claim.check, results)
    return JudgedClaim(id=claim.id, text=claim.text, verdict=verdict, evidence=evidence)


def _judge(check: Check, results: Mapping[str, Sequence[Result]]) -> tuple[str, str]:
    """Reproduced when every seed passes, not reproduced when none does, inconclusive in between or without runs."""
    values = _values(check, results)
    if not values:
        return "inconclusive", "the runs it is about have not finished"
    low, high = check.at_least, check.at_most
    passed = sum((low is None or value >= low) and (high is None or value <= high) for value in values)
    verdict = "reproduced" if passed == len(values) else "inconclusive" if passed else "not reproduced"
    shown = ", ".join(f"{value:.2f}" for value in values)
    bound = f"at least {low:g}" if low is not None else f"at most {high:g}"
    unit = "nats" if check.value.startswith("valid_loss") else "%"
    seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
    return verdict, f"{shown} {unit} ({seeds}; bound: {bound})"


def _values(check: Check, results: Mapping[str, Sequence[Result]]) -> list[float]:
    """The checked number, seed by seed."""
    if check.value == "valid_loss_spread":
        by_seed = zip(*([run.valid_loss for run in runs] for runs in results.values()), strict=False)
        return [max(losses) - min(losses) for losses in by_seed] if len(results) > 1 else []
    runs = results.get(check.cell or "", [])
    if check.value == "sink_1":
        return [run.sink_rate[0] for run in runs]
    if check.value == "sink_bias":
        return [run.sink_rate_bias for run in runs if run.sink_rate_bias is not None]
    return [run.valid_loss for run in runs]
