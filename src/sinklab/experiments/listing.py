"""The experiments that come with sinklab, with what each would cost on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sinklab.experiments.definition import Experiment, Scale
from sinklab.experiments.measured.definition import MeasuredExperiment
from sinklab.experiments.shipped import AnyExperiment, experiment_ids, load_experiment
from sinklab.experiments.sweep.engines.local import cards_here, cores_here
from sinklab.experiments.sweep.plan import base_values
from sinklab.experiments.sweep.preview import Pace, operations, pace_here
from sinklab.train.recipe import Recipe, build_recipe


@dataclass(frozen=True)
class ScaleCost:
    """An experiment at one scale.

    Attributes:
        cells, claims: how many.
        hours: of all its cells and seeds, one after the other on one core or one card.
        estimated: how the hours are known.
    """

    cells: int
    claims: int
    hours: float
    estimated: str


@dataclass(frozen=True)
class ListedExperiment:
    """An experiment as it is listed.

    Attributes:
        cells, claims: how many, of all scales.
        seeds: that its verdicts are meant to rest on; 0 where nothing is trained.
        scales: those it has; none where models are given to it.
        cell_names, claim_texts: of these cells and claims.
    """

    id: str
    title: str
    question: str
    source: str
    cells: int
    claims: int
    seeds: int
    scales: Mapping[Scale, ScaleCost]
    cell_names: Sequence[str]
    claim_texts: Sequence[str]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def list_experiments(names: Sequence[str] = ()) -> list[ListedExperiment]:
    """Those of these ids or files; all that come with sinklab, most informative first, unless some are named.

    Raises:
        InputError: there is no such experiment, or the file is no valid one.
    """
    paces: dict[str, Pace] = {}
    return [_listed(one, paces) for one in [load_experiment(name) for name in names or experiment_ids()]]


def jobs_here() -> int:
    """How many runs this machine trains at a time, at the pace that is listed."""
    return cards_here() or cores_here()


def _listed(experiment: AnyExperiment, paces: dict[str, Pace]) -> ListedExperiment:
    scales: dict[Scale, ScaleCost] = {}
    seeds = 0
    if not isinstance(experiment, MeasuredExperiment):
        seeds = experiment.seeds
        scales = {scale: _cost(experiment, scale, paces) for scale in experiment.base}
    return ListedExperiment(
        id=experiment.id,
        title=experiment.title,
        question=experiment.question,
        source=experiment.source,
        cells=len(experiment.cells),
        claims=len(experiment.claims),
        seeds=seeds,
        scales=scales,
        cell_names=list(experiment.cells),
        claim_texts=[claim.text for claim in experiment.claims],
    )


def _cost(experiment: Experiment, scale: Scale, paces: dict[str, Pace]) -> ScaleCost:
    """Cells count by their tokens: their models need about as many operations for one as the base's."""
    values = base_values(experiment, scale)
    base = build_recipe(values, origin=experiment.base[scale])
    if experiment.base[scale] not in paces:
        paces[experiment.base[scale]] = pace_here(base, threads=1)
    pace = paces[experiment.base[scale]]
    cells = experiment.cells_at(scale)
    recipes: list[Recipe] = [build_recipe(values, *overlays, origin=name) for name, overlays in cells.items()]
    total = sum(operations(recipe, like=base) for recipe in recipes) * experiment.seeds
    hours = total / pace.operations_per_second / 3600
    return ScaleCost(len(cells), len(experiment.claims_at(scale)), hours, pace.said)
