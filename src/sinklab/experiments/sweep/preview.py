"""What a sweep will take: which of its runs are done, and how many hours the others need. Nothing is written."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sinklab.data.prepare import find_prepared
from sinklab.data.shards import TokenDataset
from sinklab.errors import SinklabError
from sinklab.experiments.sweep.estimate import Pace
from sinklab.experiments.sweep.plan import SweepPlan, data_key, place_sweep
from sinklab.experiments.sweep.store import record_of


@dataclass(frozen=True)
class CellPreview:
    """A cell before it is trained.

    Attributes:
        change: dotted keys of the recipe and their values, where they are not the base's.
        seeds: asked for.
        done: of these.
        hours: of one run, on one share of the machine; None where that is another machine, and none has finished.
        same_as: the cell before it whose runs are also its own, "" where there is none.
    """

    name: str
    change: Mapping[str, object]
    seeds: int
    done: int
    hours: float | None
    same_as: str


@dataclass(frozen=True)
class Preview:
    """A sweep before it is trained.

    Attributes:
        runs: that are different.
        missing: of these.
        engine: where they are trained.
        jobs: at a time; None where the engine's cluster decides.
        hours: until the missing ones are done, `jobs` at a time; None where that is not known.
        estimated: how the hours are known; "" where no hours are.
    """

    cells: Sequence[CellPreview]
    runs: int
    missing: int
    engine: str
    jobs: int | None
    hours: float | None
    estimated: str

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def preview(
    plan: SweepPlan, out: Path, found: Mapping[str, Path], engine: str, pace: Pace | None, jobs: int | None
) -> Preview:
    """What is done and what is to come, as far as the data is prepared: the runs of other data cannot have begun.

    Args:
        found: directories of runs that are there already, by hash.
        pace: of a run where it is trained; None where that is not known.
        jobs: at a time; None where that is not known.
    """
    data = _prepared_data(plan)
    known = {name: cell for name, cell in plan.cells.items() if data_key(cell.recipe) in data}
    order = tuple((name, seed) for name, seed in plan.order if name in known)
    placed = place_sweep(SweepPlan(known, order), data, out, found)
    done = {run.hash for run in placed.runs if record_of(run.directory, run.hash) is not None}
    first: dict[str, str] = {}
    cells, left, runs = [], 0.0, {(_identity(plan, name), seed): name for name, seed in reversed(plan.order)}
    missing = 0
    for name, cell in plan.cells.items():
        ended = [seed for seed in cell.seeds if placed.hashes.get((name, seed)) in done]
        own = sum(runs[_identity(plan, name), seed] == name for seed in cell.seeds if seed not in ended)
        hours = None if pace is None else pace.seconds(cell.recipe) / 3600
        missing, left = missing + own, left + own * (hours or 0.0)
        same_as = first.setdefault(_identity(plan, name), name)
        cells.append(
            CellPreview(name, cell.change, len(cell.seeds), len(ended), hours, "" if same_as == name else same_as)
        )
    whole = None if pace is None or jobs is None else left / max(1, min(jobs, missing))
    return Preview(cells, len(runs), missing, engine, jobs, whole, "" if pace is None else pace.said)


def _identity(plan: SweepPlan, name: str) -> str:
    """What cells with the same runs have in common."""
    return plan.cells[name].recipe.model_dump_json(exclude={"name"})


def _prepared_data(plan: SweepPlan) -> dict[str, TokenDataset]:
    found: dict[str, TokenDataset] = {}
    for key, recipe in {data_key(cell.recipe): cell.recipe for cell in plan.cells.values()}.items():
        try:
            dataset = find_prepared(recipe.data)
        except SinklabError:  # it will be said when it is needed
            continue
        if dataset is not None:
            found[key] = dataset
    return found
