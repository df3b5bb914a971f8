"""Made-up directories of sweeps: runs NAME-HASH with their records, and the summary of all experiments."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml
from report_fixtures import evaluation

from sinklab.experiments.documents import (
    ANALYSES,
    VERDICTS,
    CellRun,
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    RunRecord,
    Summary,
    estimated,
    verdict_counts,
)
from sinklab.experiments.quantities import quantity as q
from sinklab.experiments.verdicts.wording import each_seed
from sinklab.train.recipe import recipe_values

STEPS = 1500
SEEDS = 3


@dataclass(frozen=True)
class MadeCell:
    """A cell with its results.

    Attributes:
        final: Sink_1 and the sink on the bias (percent), the norm ratio, the validation loss.
        change: of the recipe.
        failed, unfinished: seeds whose run failed, or has not ended.
        edited: seeds whose metrics.jsonl was edited afterwards.
    """

    final: tuple[float, float | None, float, float]
    change: dict[str, object] = field(default_factory=dict)
    seeds: int = SEEDS
    failed: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    edited: tuple[int, ...] = ()


SOFTMAX = MadeCell((18.0, None, 6.2, 2.84))
CELLS = {
    "softmax": SOFTMAX,
    "k_biases": MadeCell((0.2, 34.0, 1.4, 2.85), {"model.attention.bias": "k"}, edited=(1,)),
    "sink_token": MadeCell((0.4, 21.0, 2.2, 2.83), {"model.sink_token": True}, unfinished=(2,)),
    "sigmoid": MadeCell((0.1, None, 1.2, 2.91), {"model.attention.operation": "sigmoid"}),
    "elu1_normalised": MadeCell((0.0, None, 1.0, 9.0), {"model.attention.operation": "elu"}, failed=(0, 1, 2)),
    "weight_decay_0": MadeCell((9.1, None, 3.3, 2.80), {"optim.weight_decay": 0.0}),
    "weight_decay_0.5": SOFTMAX,
    "weight_decay_2": MadeCell((2.7, None, 2.0, 3.10), {"optim.weight_decay": 2.0}),
    "weight_decay_5": MadeCell((0.0, None, 1.1, 4.02), {"optim.weight_decay": 5.0}),
    "softmax_lr_base": SOFTMAX,
    "softmax_lr_double": MadeCell((21.0, None, 7.1, 2.81), {"optim.lr": 1.6e-2}, seeds=1),
    "k_biases_lr_base": MadeCell((0.2, 34.0, 1.4, 2.85), {"model.attention.bias": "k"}, seeds=1),
    "k_biases_lr_half": MadeCell((0.1, 25.0, 1.3, 2.88), {"optim.lr": 4e-3}, seeds=1),
}
COLUMNS = ["sink_1", "sink_bias", "valid_loss", "norm_ratio"]
EXPERIMENTS = {
    "table_4": ExperimentSummary(
        title="Key and value biases and sink tokens",
        question="Does the sink shift to learned biases or to a learned sink token?",
        source="2410.10781, table 4",
        scale="tiny",
        cells=["softmax", "sink_token", "k_biases"],
        baseline="softmax",
        columns=COLUMNS,
        published={
            "softmax": {"sink_1": 18.18, "valid_loss": 3.73},
            "sink_token": {"sink_bias": 74.12, "sink_1": 0.0, "valid_loss": 3.72},
            "k_biases": {"sink_bias": 73.34, "sink_1": 0.0, "valid_loss": 3.72},
        },
        adapted=["no sink develops on a natural first token within the steps, so every chunk starts with BOS"],
    ),
    "table_2": ExperimentSummary(
        title="Effect of weight decay",
        question="How does weight decay affect the sink?",
        source="2410.10781, table 2",
        scale="tiny",
        cells=["weight_decay_0.5", "weight_decay_0", "weight_decay_2", "weight_decay_5"],
        baseline="weight_decay_0.5",
        columns=["sink_1", "valid_loss", "emergence_step"],
        published={
            "weight_decay_0.5": {"sink_1": 41.08, "valid_loss": 3.80},
            "weight_decay_0": {"sink_1": 15.20, "valid_loss": 3.72},
            "weight_decay_2": {"sink_1": 6.13, "valid_loss": 4.23},
            "weight_decay_5": {"sink_1": 0.01, "valid_loss": 5.24},
        },
    ),
    "table_6": ExperimentSummary(
        title="Attention operations with and without normalisation",
        question="Does a sink require attention scores that sum to one?",
        source="2410.10781, tables 6 and 15",
        scale="tiny",
        cells=["softmax", "sigmoid", "elu1_normalised"],
        columns=["sink_1", "valid_loss"],
        published={"softmax": {"sink_1": 18.18, "valid_loss": 3.73}, "elu1_normalised": {"trains": 0.0}},
    ),
    "mitigations": ExperimentSummary(
        title="Mitigations",
        question="Which mitigations remove the sink, and at what loss?",
        scale="tiny",
        cells=["softmax", "k_biases", "sink_token", "sigmoid", "elu1_normalised"],
        columns=["valid_loss", "sink_1", "sink_bias", "norm_ratio", "kurtosis"],
    ),
    "mitigations_retuned": ExperimentSummary(
        title="Mitigations at three learning rates",
        scale="tiny",
        cells=["softmax_lr_base", "softmax_lr_double", "k_biases_lr_base", "k_biases_lr_half"],
        columns=["valid_loss", "sink_1"],
    ),
}


def claims_of(experiments: dict[str, ExperimentSummary]) -> list[JudgedClaim]:
    """One claim per verdict, assigned to the experiments in turn, and at least one per experiment.

    The text and the evidence contain the experiment's title, which may be markup.
    """
    names = [*experiments]
    return [
        JudgedClaim(
            id=f"claim_{number}",
            experiment=names[number % len(names)],
            text=f"Statement {number} about the sink ({experiments[names[number % len(names)]].title})",
            verdict=VERDICTS[number % len(VERDICTS)],
            scale="tiny",
            evidence="Sink_1 by seed: k_biases 0.2, 0.4 %; softmax 18.0, 15.2 %. In 0 of 9 pairs of seeds, k_biases is "
            f"not below softmax. {experiments[names[number % len(names)]].title}",
            quantity="sink_1",
            analysis=ANALYSES[number % 2],
            stated="2026-11-23",
        )
        for number in range(max(len(names), len(VERDICTS)))
    ]


def make_sweep(
    top: Path,
    experiments: dict[str, ExperimentSummary] | None = None,
    cells: dict[str, MadeCell] | None = None,
) -> Path:
    """A sweep's directory; by default five experiments with a failed cell, an edited run and an unfinished one."""
    experiments, cells = experiments or EXPERIMENTS, cells or CELLS
    wanted = dict.fromkeys(name for one in experiments.values() for name in one.cells)
    made = {name: make_cell(top, name, cells[name]) for name in wanted}
    claims = claims_of(experiments)
    counts = verdict_counts(claims)
    Summary(scale="tiny", experiments=experiments, cells=made, claims=claims, counts=counts).save(top)
    asked = top / "asked"
    asked.mkdir(exist_ok=True)
    for name in experiments:
        (asked / f"{name}.json").write_text(json.dumps({"schema": 1, "id": name, "scale": "tiny"}), encoding="utf-8")
    return top


def judge_the_paper(top: Path) -> Path:
    """Replace the claims of a sweep of `make_sweep` by claims that the report shows under "The paper at a glance"."""
    path = top / "summary.json"
    summary = Summary.model_validate(json.loads(path.read_text(encoding="utf-8")))

    def judged(claim: str, verdict: str, quantity: str, cells: list[str], analysis: str, seen: str = "") -> JudgedClaim:
        experiment, _, name = claim.partition(".")
        evidence = "; ".join(each_seed(cell, values(cell, quantity), q(quantity)) for cell in cells)
        return JudgedClaim(
            id=name, experiment=experiment, text=f"The text of {name}", verdict=verdict, scale="tiny",
            evidence=seen or f"By seed: {evidence}. The claim holds at 3 of 3 seeds.",
            cells=cells, quantity=quantity, analysis=analysis,
        )  # fmt: skip

    def values(cell: str, quantity: str) -> list[float]:
        return [run.values[quantity] for run in summary.cells[cell].runs if quantity in run.values]

    two = ["k_biases", "softmax"]
    claims = [
        judged("table_4.k_biases_take_the_sink", "reproduced", "sink_bias", ["k_biases"], "confirmatory"),
        judged("table_4.k_biases_free_the_first_token", "contradicted", "sink_1", two, "confirmatory"),
        judged("table_2.moderate_decay_strengthens", "reproduced", "sink_1", ["weight_decay_0.5"], "exploratory"),
        judged("table_2.far_too_much_decay_ends_it", "not run", "sink_1", ["weight_decay_5"], "confirmatory", "no run"),
        judged("table_6.sigmoid_has_none", "not run", "sink_1", ["sigmoid"], "confirmatory", "sigmoid has no run"),
    ]  # fmt: skip
    judged_summary = summary.model_copy(update={"claims": claims, "counts": verdict_counts(claims)})
    judged_summary.save(top)
    return top


def make_cell(top: Path, name: str, cell: MadeCell) -> CellSummary:
    """Write the runs of a cell and return its summary."""
    runs = [make_sweep_run(top, name, cell, seed) for seed in range(cell.seeds)]
    done = [run for run in runs if run.status == "done"]
    names = sorted({key for run in done for key in run.values})
    return CellSummary(
        seeds=len(done),
        change=cell.change,
        values={key: one for key in names if (one := estimated(runs, key))},
        runs=runs,
    )


def make_sweep_run(top: Path, name: str, cell: MadeCell, seed: int) -> CellRun:
    """Write a run directory NAME-HASH with its record, named like the recipe; equal runs of two cells share it."""
    recipe = recipe_values("tiny") | {"name": name if cell.change else "softmax", "seed": seed}
    text = yaml.safe_dump({**recipe, "changed": dict(cell.change)}, sort_keys=False)
    run_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = top / f"{recipe['name']}-{run_hash}".replace("/", "_")
    status = "failed" if seed in cell.failed else "unfinished" if seed in cell.unfinished else "done"
    last = STEPS if status == "done" else 300
    generator = np.random.default_rng([seed, int(cell.final[0] * 10)])
    sink, bias, ratio, loss = cell.final
    final = (sink, bias, ratio, loss + float(generator.normal(0, 0.01)))
    rows = [evaluation(step, STEPS, final, generator) for step in range(0, last + 1, 100)]
    run = CellRun(
        seed=seed,
        hash=run_hash,
        directory=folder.name,
        status=status,
        message="the loss is not finite at step 312" if status == "failed" else "",
        values=numbers(rows) if status == "done" else {},
        seconds=181.0 + seed if status == "done" else None,
        tokens_per_second=17000.0 - 40 * len(name) + seed if status == "done" else None,
        peak_memory_mb=512.0 + seed if status == "done" else None,
    )
    if not folder.exists():
        folder.mkdir(parents=True)
        _write_run(folder, run, text, rows)
    if seed in cell.edited:
        (folder / "metrics.jsonl").write_text(json.dumps(rows[-1]) + "\n", encoding="utf-8")
    return run


def _write_run(folder: Path, run: CellRun, recipe: str, rows: list[dict[str, object]]) -> None:
    files = {"recipe.yaml": recipe, "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "env.json").write_text(json.dumps({"hash": run.hash, "command": ["/home/me/train.py"]}), encoding="utf-8")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "weights.bin").write_bytes(b"\0" * 1000)
    if run.status == "unfinished":
        return
    RunRecord(
        hash=run.hash,
        name=folder.name.rpartition("-")[0],
        seed=run.seed,
        status=run.status,
        message=run.message,
        step=STEPS if run.status == "done" else 312,
        steps=STEPS,
        triples=1600,
        seconds=run.seconds,
        tokens_per_second=run.tokens_per_second,
        peak_memory_mb=run.peak_memory_mb,
        kurtosis=run.values.get("kurtosis"),
        files={name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()},
    ).save(folder)


def numbers(rows: list[dict[str, object]]) -> dict[str, float]:
    """The numbers of a run by quantity."""
    last = rows[-1]
    rates, bias, ratios = last["sink_rate"], last["sink_rate_bias"], last["hidden_norm_ratio"]
    assert isinstance(rates, list)
    assert isinstance(ratios, list)
    emerged = next((row["step"] for row in rows if row["sink_rate"][0] >= 10), None)  # type: ignore[index]
    found = {
        "sink_1": rates[0],
        "sink_bias": bias,
        "valid_loss": last["valid_loss"],
        "norm_ratio": max(ratios),
        "kurtosis": 3 * max(ratios),
        "emergence_step": emerged,
    }
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def many_experiments(
    experiments: int = 60, cells_each: int = 5
) -> tuple[dict[str, ExperimentSummary], dict[str, MadeCell]]:
    """Summaries of many experiments, each with its own cells."""
    generator = np.random.default_rng(0)
    cells: dict[str, MadeCell] = {}
    made: dict[str, ExperimentSummary] = {}
    for number in range(experiments):
        names = [f"variant_{number}_{letter}" for letter in "abcdefghij"[:cells_each]]
        for name in names:
            sink, loss = float(generator.gamma(2, 6)), float(generator.normal(2.9, 0.1))
            cells[name] = MadeCell((sink, sink / 2, 1 + sink / 4, loss), {"model.attention.softcap": sink})
        made["mitigations" if number == 0 else f"experiment_{number}"] = ExperimentSummary(
            title=f"Effect of variant {number} on the sink and the loss",
            question="Does the paper's statement about the sink hold with this change?",
            source=f"2410.10781, table {number}",
            scale="tiny",
            cells=names,
            columns=COLUMNS,
            published={name: {"sink_1": 18.18, "valid_loss": 3.73} for name in names},
            adapted=["The window widths are proportional to the context."],
        )
    return made, cells
