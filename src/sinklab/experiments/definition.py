"""Experiment files: cells, and claims about them.

A trained cell is an overlay on a base recipe, trained with several seeds. A measured cell (with `inputs`) is a
measurement of an existing model, repeated on several draws of sequences, or of several models on the same sequences.

Trained cells:

base: tiny                                                      # or by scale: {tiny: tiny, 60m: 60m}
cells:
  softmax: {}                                                   # the unchanged base recipe
  k_biases: k_biases                                            # name of a variant in the catalogue
  weight_decay_1: {optim: {weight_decay: 1.0}}                  # changed keys
  window_256: {model: {attention: {mask: {kind: window, width: 256}}}}
  sink_token_without_bos: [sink_token, {data: {bos: false}}]    # variants and overlays, merged in this order
adapted:                                                        # changes at a scale, with the reason
  tiny:
    - why: "a window of 8 of 64 tokens corresponds to 256 of 2,048"
      cells: {window_256: {model: {attention: {mask: {width: 8}}}}}
evidence: confirmatory                                          # or exploratory; default for the claims
stated: 2026-11-23                                              # default for the claims
first_seed: 100                                                 # seeds 100, 101, ..
claims:
  - {id: no_sink, text: "..", check: {is: absent, cell: k_biases}}
assess: [streaming]                                             # parts of `sinklab assess` for every run
tune: {lr: 4.0e-4, epochs: 4}                                   # `sinklab sft` of every run, on --data
changes:                                                        # a grid: every cell with every value of each axis
  decay: {decay_0.5: {}, decay_0.1: {optim: {weight_decay: 0.1}}}     # the cells are softmax+decay_0.5, and so on

Measured cells:

cells:                                                          # measurements of the model passed with --model
  natural: {inputs: natural}                                    # text, 100 sequences of 64 tokens, eps 0.3
  repeat: {inputs: repeat}
  short: {inputs: natural, length: 16, eps: 0.2}                # the same sequences, truncated, from the same pass
  swapped_5: {inputs: repeat, swap_position: [1, 5]}
  chat: {inputs: natural, model: chat}                          # measures the second --model
claims:
  - {id: none_on_repeated, text: "..", check: {is: within, value: sink_1, cell: repeat, at_most: 1.0}}

Measured cells with several models. The models are the replicates, and every cell of the experiment has several:

cells:
  start: {inputs: natural, models: [ORG/seed1@step1000, ORG/seed2@step1000]}
  end: {inputs: natural, models: [ORG/seed1@step143000, ORG/seed2@step143000]}
"""

from collections.abc import Mapping, Sequence
from datetime import date
from itertools import combinations, product
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from sinklab.assessing.parts import PartName
from sinklab.experiments.claims import Claim, Monotone, OverCells, Scale, Within
from sinklab.experiments.documents import GRID, Analysis, ReplicateKind
from sinklab.experiments.paper import Published
from sinklab.experiments.quantities import NORMS, QuantityName, quantity
from sinklab.interventions import VARIANTS
from sinklab.measuring.options import Inputs
from sinklab.schema import Part, leaves
from sinklab.tuning.settings import TuneOptions

SCALES: tuple[Scale, ...] = get_args(Scale)


class Precondition(NamedTuple):
    """Precondition of a claim: a cell whose runs must have a massive activation, or a sink."""

    needs: Literal["massive", "sink"]
    cell: str


PAPER_SCALES = ("60m", "1b")
"""Scales of the paper's models. Verdicts use the paper's numbers only at these scales."""


SCALE_NOTES: Mapping[Scale, str] = {
    "tiny": "Scale tiny has 0.3 M parameters, 3 M training tokens, BOS in front of every text, and a weight decay of "
    "0.5. It does not correspond to the paper's default (a natural first token, weight decay 0.1, sink rate 18 %), but "
    "to the paper's row with a fixed first token (74 %), with another weight decay.",
    "mini": "Scale mini has width 128, 12 M training tokens, BOS in front of every text, and the paper's weight decay "
    "of 0.1. It corresponds to the paper's row with a fixed first token (74 %).",
    "laptop": "Scale laptop has 0.3 M parameters, 12 M training tokens, BOS in front of every text, the paper's weight "
    "decay of 0.1 and PyTorch's initialisation. It corresponds to the paper's row with a fixed first token (74 %).",
    "lab": "Scale lab has the model of scale laptop, three times its weight decay and 2,400 steps. Three of its "
    "models learn a synthetic task.",
    "small": "Scale small has the paper's 60M model with contexts of 256 tokens and a smaller batch.",
    "backcopy": "A synthetic task with one layer and one head (2410.13835); Sink_1 is the share of sequences.",
    "trigger_average": "A synthetic task with one layer and one head (2603.11487); Sink_1 is the share of sequences.",
}
"""Differences between a shipped recipe and the paper's model; the first entry of `ExperimentSummary.adapted`."""

ONLY_TRAINED = {
    "base", "baseline", "changes", "adapted", "assess", "tune", "first_seed", "seeds_at", "requires_massive",
    "requires_sink", "same_as", "scales",
}  # fmt: skip
"""Fields of experiments and claims that apply only to trained cells."""

ONLY_MEASURED = {"each", "scatter", "positions", "proposition"}
"""Fields of experiments and claims that apply only to measured cells."""


def _overlays(cell: Any) -> Any:
    """Convert an overlay, a variant's name or a list of these to a list of overlays. Measured cells are unchanged."""
    if _kind_of_cell(cell) == "measured":
        return cell
    parts = cell if isinstance(cell, list) else [cell]
    if unknown := [one for one in parts if isinstance(one, str) and one not in VARIANTS]:
        raise ValueError(f"unknown variant {unknown[0]!r}; the catalogue has: {', '.join(sorted(VARIANTS))}")
    return [VARIANTS[one].overlay if isinstance(one, str) else one for one in parts]


def _kind_of_cell(cell: Any) -> Literal["trained", "measured"]:
    return "measured" if isinstance(cell, MeasuredCell) or (isinstance(cell, dict) and "inputs" in cell) else "trained"


def _folder_name(name: str) -> str:
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(
            f"invalid name of a cell or value, {name!r}: it must not be empty, contain / or begin with a dot"
        )
    return name


def _axis_value_name(name: str) -> str:
    if GRID in name:
        raise ValueError(
            f"{name!r} is not a valid name of a value in changes: remove {GRID}, which separates cell and values "
            f"in the names of grid cells (CELL{GRID}VALUE)"
        )
    return name


class CellTask(Part):
    """A downstream task of a measured cell.

    Attributes:
        name: name of an lm-eval task that reports acc or acc_norm.
        items: number of task items, sampled with the index of the draw of sequences as random seed; null for all items.
    """

    name: str
    items: int | None = Field(default=None, ge=1)


class MeasuredCell(Part):
    """Settings of a measurement. Cells that differ only in eps and length share sequences and forward passes.

    Attributes:
        model: the model to measure if `models` is empty: "base" is the first --model (with `each: model`, each of
            them), and "chat" the optional second one.
        models: models to measure, as NAME or NAME@REVISION. Several models are replicates, measured on the same
            sequences; a single model is measured on several draws of sequences. Default: the models passed with
            --model. If all cells have the same list of several models, --model replaces the list.
        revision: revision of the `models` that are given as NAME; for a model directory, the name of a folder in it.
        subfolder: subfolder of each of `models`.
        inputs: kind of sequences: natural text, random or repeated tokens. Required in experiment files.
        begins_like_text: begin random and repeated tokens with the special tokens that the tokenizer puts before text,
            if there are any, so that they differ from natural text only in the tokens that follow.
        sequences, length: number of sequences N, and tokens per sequence T.
        eps: threshold of the sink rate.
        loss: also compute the loss, which takes up to a third of the compute if the model is small.
        details: also compute the statistics of `sinklab measure --details`.
        swap_position: two 1-based positions whose learned positional embeddings are swapped.
        replace_position: 1-based positions (i, j); the learned positional embedding of i is replaced by that of j.
        task: downstream task on which the model is also evaluated; null for none.
    """

    model: Literal["base", "chat"] = "base"
    models: tuple[str, ...] = ()
    revision: str | None = None
    subfolder: str | None = None
    inputs: Inputs = "natural"
    begins_like_text: bool = False
    sequences: int = Field(default=100, ge=1)
    length: int = Field(default=64, ge=2)
    eps: float = Field(default=0.3, gt=0, lt=1)
    loss: bool = False
    details: bool = False
    swap_position: tuple[int, int] | None = None
    replace_position: tuple[int, int] | None = None
    task: CellTask | None = None


CellName = Annotated[str, AfterValidator(_folder_name)]
ValueName = Annotated[CellName, AfterValidator(_axis_value_name)]
Overlays = Annotated[list[dict[str, Any]], BeforeValidator(_overlays)]
Cell = Annotated[
    Annotated[list[dict[str, Any]], Tag("trained")] | Annotated[MeasuredCell, Tag("measured")],
    Discriminator(_kind_of_cell),
    BeforeValidator(_overlays),
]


class Adaptation(Part):
    """Changes to the cells of an experiment at one scale, with the reason in a sentence.

    Attributes:
        change: recipe overlays applied to every cell, before the cell's own overlays.
        cells: recipe overlays by cell, applied after the cell's own overlays; cells that do not exist are added.
        without: names of cells to remove at the scale.
    """

    why: str = Field(min_length=1)
    change: Overlays = Field(default_factory=list)
    cells: dict[CellName, Overlays] = Field(default_factory=dict)
    without: tuple[str, ...] = ()


class SweepDesign(Part):
    """Design of a sweep: cells, seeds and adaptations to scales. All cells are trained, or all are measured.

    Attributes:
        id: identifier, used in file names and claims.
        title: subject in a few words.
        question: research question, a sentence.
        source: table, figure or section of the paper, or another source.
        base: base recipe of the trained cells by scale: the name of a shipped recipe or a file, as for `sinklab train`.
            A recipe given without a scale belongs to the scale of the same name or, if there is none, to scale tiny.
        cells: cells by name: overlays on the base, merged in order, or measured cells.
        changes: axes of a grid, each with recipe overlays by name of the value. Every trained cell is combined with
            every choice of one value per axis: the overlays are merged in order, and the resulting cell is named
            CELL+VALUE, with a +VALUE for each further axis.
        adapted: changes to the trained cells by scale, applied in order.
        each: repeat every cell for each domain of --text or for each --model; the cells of the results are named
            DOMAIN/CELL or MODEL/CELL. Default: no repetition.
        assess: parts of `sinklab assess` to run on the validation text of every run.
        tune: settings of `sinklab sft` for fine-tuning every run on the conversations of --data.
        seeds: default of --seeds: number of training seeds or of draws of sequences, or maximum number of models.
        first_seed: first seed of the runs; smaller seeds are not used.
        seeds_at: first seed and number of seeds at scales that differ from `first_seed` and `seeds`.
        rank: sort key in lists, sweeps and summaries, ascending.
    """

    id: str = Field(pattern=r"^[\w.-]+$")
    title: str
    question: str = ""
    source: str = ""
    base: dict[Scale, str] = Field(default_factory=dict)
    cells: dict[CellName, Cell] = Field(min_length=1)
    changes: dict[str, dict[ValueName, Overlays]] = Field(default_factory=dict)
    adapted: dict[Scale, tuple[Adaptation, ...]] = Field(default_factory=dict)
    each: Literal["domain", "model"] | None = None
    assess: tuple[PartName, ...] = ()
    tune: TuneOptions | None = None
    seeds: int = Field(default=5, ge=1)
    first_seed: int = Field(default=0, ge=0)
    seeds_at: dict[Scale, tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]] = Field(default_factory=dict)
    rank: int = 1000

    @field_validator("base", mode="before")
    @classmethod
    def _one_recipe_is_of_one_scale(cls, base: Any) -> Any:
        """Convert a base recipe without a scale to a mapping by scale: the scale of the same name, else tiny."""
        return {base if base in SCALES else SCALES[0]: base} if isinstance(base, str) else base

    @model_validator(mode="before")
    @classmethod
    def _cross_cells_with_changes(cls, values: Any) -> Any:
        """Combine the cells with `changes`; cells that are combined already, as in a manifest, are kept."""
        if not isinstance(values, dict) or not values.get("changes"):
            return values
        cells, axes = values.get("cells", {}), values["changes"]
        named = [cells, axes, *(axes.values() if isinstance(axes, dict) else ())]
        if not all(isinstance(one, dict) and set(map(type, one)) == {str} for one in named):
            raise ValueError(
                "cells and changes must be mappings whose keys are text (put numbers in quotes), and each axis needs "
                "named values, such as changes: {decay: {small: .., large: ..}}"
            )
        combined = {
            GRID + GRID.join(choice): [axes[axis][one] for axis, one in zip(axes, choice, strict=True)]
            for choice in product(*axes.values())
        }
        if all(name.endswith(tuple(combined)) for name in cells):
            return values
        if measured := [name for name, cell in cells.items() if _kind_of_cell(cell) == "measured"]:
            raise ValueError(
                f"changes apply only to trained cells, but cell {measured[0]!r} is measured: remove it or `changes`"
            )
        crossed = {
            name + suffix: [one for part in (cell, *parts) for one in (part if isinstance(part, list) else [part])]
            for name, cell in cells.items()
            for suffix, parts in combined.items()
        }
        return {**values, "cells": crossed}

    @model_validator(mode="after")
    def _cells_fit_each_other(self) -> Self:
        if self.requests and len(self.requests) < len(self.cells):
            other = next(name for name in self.cells if name not in self.requests)
            raise ValueError(
                f"cell {next(iter(self.requests))!r} is measured and {other!r} trained: use two experiments"
            )
        if not self.requests and not self.base:
            raise ValueError("base is missing: set the recipe of the trained cells (a measured cell sets `inputs`)")
        for scale, adaptations in self.adapted.items():
            if scale not in self.base:
                raise ValueError(f"adapted has scale {scale!r}, for which base has no recipe: add a recipe to base")
            if wrong := [name for one in adaptations for name in one.without if name not in self.cells]:
                raise ValueError(f"adapted.{scale}: {wrong[0]!r} in `without` is not a cell: remove it")
        keys = {
            axis: {key for overlays in values.values() for one in overlays for key in leaves(one)}
            for axis, values in self.changes.items()
        }
        for (first, ones), (second, others) in combinations(keys.items(), 2):
            for key, other in product(sorted(ones), sorted(others)):
                if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                    raise ValueError(
                        f"the axes {first!r} and {second!r} of `changes` both set {max(key, other, key=len)}, so cells "
                        "would have the value of the second under the names of both: set each key in one axis"
                    )
        self._check_models()
        return self

    def _check_models(self) -> None:
        for name, cell in self.requests.items():
            if (cell.revision or cell.subfolder) and not cell.models:
                raise ValueError(f"cell {name!r} sets revision or subfolder, which require `models`: add `models`")
            if cell.models and (self.each or cell.model != "base"):
                raise ValueError(
                    f"cell {name!r} sets `models`: remove `model: chat` from the cell and `each` from the experiment"
                )
            if len(set(cell.models)) < len(cell.models):
                raise ValueError(f"cell {name!r} lists a model twice in `models`")
            if self.each == "domain" and cell.inputs != "natural":
                raise ValueError(f"cell {name!r} must set inputs: natural, because the experiment sets each: domain")
            if self.each and cell.model != "base":
                raise ValueError(f"cell {name!r} sets model, and the experiment sets `each`: remove one of them")
        counts = {min(len(cell.models), 2): name for name, cell in self.requests.items()}
        if len(counts) > 1:
            raise ValueError(
                f"cells {' and '.join(map(repr, counts.values()))} differ in the number of `models`: set `models` in "
                "no cell, exactly one in every cell, or several in every cell"
            )

    @property
    def requests(self) -> dict[str, MeasuredCell]:
        """Measured cells by name; empty if the cells are trained."""
        return {name: cell for name, cell in self.cells.items() if isinstance(cell, MeasuredCell)}

    @property
    def axes(self) -> dict[str, list[str]]:
        """Names of the values on each axis of a grid, by axis; the first axis is `cell`. Empty without `changes`."""
        if not self.changes:
            return {}
        own = dict.fromkeys(name.rsplit(GRID, len(self.changes))[0] for name in self.cells)
        return {"cell": list(own), **{axis: list(values) for axis, values in self.changes.items()}}

    @property
    def replicate(self) -> ReplicateKind:
        """Unit of replication: seed for trained cells, model for measured cells with several models, else draw."""
        if not self.requests:
            return "seed"
        return "model" if any(len(cell.models) > 1 for cell in self.requests.values()) else "draw"

    @property
    def names_models(self) -> bool:
        """True if the cells set `models`; the models of other measured cells are passed with --model."""
        return any(cell.models for cell in self.requests.values())

    def cells_at(self, scale: Scale) -> dict[str, Sequence[Mapping[str, Any]]]:
        """Return the recipe overlays of each trained cell at a scale, in order of application, by name of the cell."""
        cells: dict[str, list[Mapping[str, Any]]] = {
            name: list(overlays) for name, overlays in self.cells.items() if not isinstance(overlays, MeasuredCell)
        }
        for one in self.adapted.get(scale, ()):
            for name, overlays in one.cells.items():
                cells.setdefault(name, []).extend(overlays)
            cells = {name: [*one.change, *overlays] for name, overlays in cells.items() if name not in one.without}
        return dict(cells)

    def seeds_of(self, scale: Scale, count: int | None = None) -> range:
        """Return the seeds of the runs at a scale; `count` replaces the default number of seeds."""
        first, number = self.seeds_at.get(scale, (self.first_seed, self.seeds))
        return range(first, first + (count or number))


class ClaimSet(Part):
    """Claims about the results of a sweep.

    Attributes:
        evidence: confirmatory or exploratory; default for the claims.
        stated: date on which the claims were written; default for the claims.
        requires_massive: condition for claims that use a quantity in `NORMS` and do not set their own. True, or the
            name of a cell: judge these claims only if training at least doubles the norm ratio of the baseline, or of
            this cell. False: always judge them.
        requires_sink: the same for claims that use a quantity of sinks (sink rates, and those with `of_a_sink`), except
            those of the named cell alone: the baseline, or this cell, must have a Sink_1 of at least 10 %.
    """

    claims: tuple[Claim, ...] = ()
    evidence: Analysis = "exploratory"
    stated: date | None = None
    requires_massive: bool | str = False
    requires_sink: bool | str = False


class Experiment(ClaimSet, SweepDesign):
    """An experiment file: a sweep, what is claimed of it, and how its results are shown.

    Attributes:
        baseline: trained cell with which the other cells are compared; default: the first cell.
        columns: quantities in the table of results.
        scatter: two quantities of measured cells; a figure plots the second quantity against the first.
        published: table of the paper with numbers for the cells.
    """

    baseline: str = ""
    columns: tuple[QuantityName, ...] = ("sink_1", "sink_bias", "valid_loss", "norm_ratio")
    scatter: tuple[QuantityName, QuantityName] | None = None
    published: Published | None = None

    @model_validator(mode="after")
    def _claims_fit_the_sweep(self) -> Self:
        given = {
            name
            for part in (self, *self.claims)
            for name in part.model_fields_set
            if getattr(part, name) != type(part).model_fields[name].get_default(call_default_factory=True)
        }
        if wrong := sorted(given & (ONLY_TRAINED if self.requests else ONLY_MEASURED)):
            raise ValueError(
                f"{wrong[0]} applies only to {'training' if self.requests else 'existing models'}, but the cells are "
                f"{'measured' if self.requests else 'trained (a measured cell sets `inputs`)'}: remove it"
            )
        known = {*self.requests, *(name for scale in self.base for name in self.cells_at(scale))}
        if self.baseline and self.baseline not in known:
            raise ValueError(f"baseline {self.baseline!r} is not a cell at any scale: set it to the name of a cell")
        if wrong := [cell for cell in (self.published.rows if self.published else ()) if cell not in known]:
            raise ValueError(f"published.rows: {wrong[0]!r} is not a cell at any scale: remove it, or correct the name")
        ids = [claim.id for claim in self.claims]
        if repeated := [one for one in ids if ids.count(one) > 1]:
            raise ValueError(f"two claims have the id {repeated[0]}: rename one of them")
        for claim in self.claims:
            condition = self.precondition(claim)
            used = [] if claim.same_as else [*claim.cells, *([condition.cell] if condition else [])]
            if missing := [cell for cell in used if cell not in known]:
                raise ValueError(
                    f"claim {claim.id} refers to unknown cell {missing[0]!r} in its check, requires_massive or "
                    "requires_sink"
                )
            if wrong := [scale for scale in claim.scales or () if scale not in self.base]:
                raise ValueError(
                    f"claim {claim.id} sets scale {wrong[0]!r}, for which base has no recipe: add a recipe to base"
                )
            self._check_subjects(claim)
        return self

    def _check_subjects(self, claim: Claim) -> None:
        """Check that a claim about existing models fits `each` and the number of models."""
        several = self.each == "model" or self.replicate == "model"
        if several and (claim.positions or claim.proposition):
            raise ValueError(
                f"claim {claim.id} sets positions or proposition, which require a single model, but the experiment "
                f"{'sets `each: model`' if self.each else 'has several `models`'}: remove one of the two"
            )
        check = claim.check
        of_subjects = isinstance(check, OverCells) and check.over_subjects
        if of_subjects != bool(self.each) and not (self.each == "model" and isinstance(check, Within)):
            raise ValueError(
                f"claim {claim.id} compares {'domains or models' if of_subjects else 'cells'}, but the experiment "
                f"{f'sets `each: {self.each}`' if self.each else 'does not set `each`'}: "
                f"{'remove `each`' if self.each else 'set `each: domain` or `each: model`'}, or change the check"
            )
        of_sizes = isinstance(check, Monotone) or (
            isinstance(check, OverCells) and (check.families or check.without_families)
        )
        if self.each == "domain" and of_sizes:
            raise ValueError(
                f"claim {claim.id} is about model sizes (rising, falling, families or without_families), but the "
                "experiment sets `each: domain`: set `each: model`, or change the check"
            )

    @property
    def compared_with(self) -> str:
        """Name of the baseline cell; empty if the cells are measured."""
        return "" if self.requests else self.baseline or next(iter(self.cells))

    def claims_at(self, scale: Scale) -> list[Claim]:
        """Return the claims made at a scale: references (`same_as`), and claims whose cells all exist at the scale."""
        cells = self.cells_at(scale)
        made = [claim for claim in self.claims if claim.scales is None or scale in claim.scales]
        return [claim for claim in made if claim.same_as or all(cell in cells for cell in claim.cells)]

    def precondition(self, claim: Claim) -> Precondition | None:
        """Return what a cell must have for the claim to be judged; None if the claim is always judged.

        A claim that does not set `requires_massive` or `requires_sink` has the experiment's setting if its check uses a
        quantity in `NORMS` or of sinks, respectively. If both apply, the condition is that of massive activations.
        """
        names = claim.check.quantities if claim.check else ()
        massive, sink = claim.requires_massive, claim.requires_sink
        if massive is None:
            massive = self.requires_massive if NORMS & set(names) else False
        if massive:
            return Precondition("massive", self.compared_with if massive is True else massive)
        if sink is None:
            sink = (
                self.requires_sink if any(one.is_sink_rate or one.of_a_sink for one in map(quantity, names)) else False
            )
        cell = self.compared_with if sink is True else sink
        return Precondition("sink", cell) if cell and claim.cells != (cell,) else None
