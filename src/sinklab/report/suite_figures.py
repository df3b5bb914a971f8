"""The figures of suites: domains side by side, a comparison by layer, families by size."""

from typing import Any

import numpy as np

from sinklab.report import suite_charts
from sinklab.report.collect import ReportData, Run
from sinklab.report.figure import Figure
from sinklab.report.suites import Suite


def suite_figures(data: ReportData, width: int | str) -> list[Figure]:
    """What each suite is made for, in the order of the directories."""
    drawn = {"domains": _domains, "comparison": _comparison, "families": _families}
    made = [drawn[suite.kind](suite, data, width, str(number)) for number, suite in enumerate(data.suites)]
    return [figure for figure in made if figure is not None]


def _domains(suite: Suite, data: ReportData, width: int | str, number: str) -> Figure | None:
    runs = [run for _, run in suite.runs(data)]
    if not runs:
        return None
    runs.sort(key=lambda run: -run.measurement["sink_rate"][0])
    order = [run.cell for run in runs]
    rates = [_row(run, f"ε = {eps}", rate[0]) for run in runs for eps, rate in _by_threshold(run).items()]
    drawn = [suite_charts.values_by_domain(rates, order, "Sink₁ (percent of heads)", width)]
    losses = [_row(run, "loss", run.measurement["loss"]) for run in runs if run.measurement.get("loss") is not None]
    if losses:
        drawn.append(suite_charts.values_by_domain(losses, order, "Loss (nats per token)", width, zero=False))
    caption = (
        "Sink rate of the first token and loss on each text, the text with the strongest sink first. One model, one "
        "tokenizer, the same number of tokens per sequence. A text may have fewer sequences than were asked for; the "
        "table and the points say how many."
    )
    return Figure(f"domains-{number}", "The sink by domain", caption, drawn)


def _row(run: Run, series: str, value: float) -> dict[str, Any]:
    return {"domain": run.cell, "series": series, "value": value, "sequences": run.measurement["sequences"]}


def _by_threshold(run: Run) -> dict[str, list[float]]:
    return run.measurement.get("sink_rates") or {f"{run.eps:g}": run.measurement["sink_rate"]}


def _comparison(suite: Suite, data: ReportData, width: int | str, number: str) -> Figure | None:
    runs = [run for _, run in suite.runs(data)]
    if not runs:
        return None
    rows = [
        {"cell": run.cell, "layer": layer, "value": float(100 * np.mean(first_NH > run.eps))}
        for run in runs
        for layer, first_NH in enumerate(np.swapaxes(run.arrays["importance_first"], 0, 1), start=1)
    ]
    caption = (
        f"Share of the (sequence, head) pairs of a layer in which the importance of position 1 exceeds "
        f"ε = {runs[0].eps:g}. The mean over layers is Sink₁."
    )
    chart = suite_charts.sink_by_layer(rows, data.cells, runs[0].eps, width)
    return Figure(f"comparison-layers-{number}", "The sink by layer", caption, [chart])


def _families(suite: Suite, data: ReportData, width: int | str, number: str) -> Figure | None:
    rows = [
        {"model": name, "family": entry["family"], "parameters": entry["parameters"], "what": what, "value": value}
        for name, entry in suite.entries.items()
        for what, value in (("measured", entry["sink_1"]), ("published", entry["published"]))
        if value is not None
    ]
    if not rows:
        return None
    caption = (
        "Sink rate of the first token against the number of parameters, joined within a family. Diamonds are what "
        "arXiv 2410.10781 prints; they stand here only where the setting is the paper's (100 sequences of 64 tokens, "
        "ε = 0.3, the same kind of input). The text that the paper measured on was not released."
    )
    return Figure(f"families-{number}", "Measured and published", caption, [suite_charts.sink_by_size(rows, width)])
