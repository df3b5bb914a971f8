"""Settings of a measurement, as command-line options and as Python objects.

A `Request` has the input sequences, an `Options` the measured quantities, a `Study` the interventions.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from numbers import Real
from operator import index
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sinklab.errors import InputError
from sinklab.settings import (
    ADVANCED,
    INPUT,
    MEASURED,
    ColumnName,
    CommandSettings,
    Flag,
    Seed,
    SequenceCount,
    SequenceLength,
    Several,
)

Inputs = Literal["natural", "random", "repeat"]
EPS = (0.3,)
SINK_EPS = EPS[0]  # importance above which a position is a sink, if there is no option for it
ABLATIONS = "mask_first:N, no_bos, zero_massive, mean_massive, zero_massive:LAYER or mean_massive:LAYER"
DIGITS = 9  # maximum number of digits of N and LAYER
ABLATION = re.compile(rf"no_bos|(zero|mean)_massive(:\d{{1,{DIGITS}}})?|mask_first:(?P<keys>\d+)")


def parse_eps(given: Any) -> tuple[float, ...]:
    """Convert thresholds to a tuple of numbers: ["0.3", "0.2,0.4"] -> (0.3, 0.2, 0.4).

    Repeated thresholds are dropped.

    Args:
        given: a number, several numbers (a sequence, array or tensor), or the texts passed to --eps, each a number or a
            comma-separated list.

    Raises:
        InputError: if there is no threshold, or a threshold is not a number in (0, 1).
    """
    from_text = isinstance(given, list) and bool(given) and all(isinstance(one, str) for one in given)
    several: Any = ",".join(given).split(",") if from_text else _whole(given)
    found: dict[float, None] = {}
    for one in (several if isinstance(several, list | tuple) else [several]) or [None]:
        try:
            share = float(one) if from_text or isinstance(one, Real) else 0.0
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            where = f"--eps {one}" if from_text else f"eps is {given!r}"
            raise InputError(f"{where}: expected shares of attention between 0 and 1, such as 0.3 (or 0.2,0.3)")
        found[share] = None
    return tuple(found)


def parse_maps(given: Any) -> tuple[tuple[int, ...], ...]:
    """Parse the values of --map to (layer, head) pairs: "3.1" is layer 3, head 1.

    A value that is not a text must be a sequence of integers, which becomes a tuple; its length is not checked.

    Raises:
        InputError: if a text is not LAYER.HEAD with 1-based numbers, or another value is not a sequence of integers.
    """
    maps = []
    one = given
    try:
        for one in given:
            pair: Any = one
            if isinstance(one, str):
                found = re.fullmatch(r"([1-9]\d*)\.([1-9]\d*)", one)
                pair = None if found is None else map(int, found.groups())
            maps.append(tuple(map(index, pair)))
    except TypeError:
        raise InputError(
            f"--map {one}: expected LAYER.HEAD, both counted from 1, such as 3.1, or pairs such as (3, 1)"
        ) from None
    return tuple(maps)


def _whole(given: Any) -> Any:
    """Convert NumPy and PyTorch values to Python numbers, and sequences to tuples, so that pydantic accepts them."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    return tuple(map(_whole, given)) if isinstance(given, Iterable) and not isinstance(given, str) else given


class Options(CommandSettings, frozen=True):
    """Settings of a measurement, explained by the arguments of `sinklab.measure`, and metadata stored with its result.

    Attributes:
        eps: thresholds on alpha of the sink rate; the first is the main one.
        dormant: also compute `Measurement.dormant` (sinklab transformers only).
        explore_at_most: number of heads up to which the maps of `explore` are saved if they can be, without `explore`.
        first_target: 1-based position of the first target included in the loss; under a prefix mask, targets inside the
            prefix are excluded too, as in training.
    """

    panel = MEASURED

    inputs: Annotated[Inputs, Flag(metavar="KIND", panel=INPUT)] = Field(
        default="natural", description="natural (text), random (uniform tokens) or repeat (one token)."
    )
    eps: Annotated[tuple[float, ...], BeforeValidator(parse_eps), Flag(text=list[str], metavar="EPS")] = Field(
        default=EPS,
        description="Importance above which a position is a sink; repeatable, main one first; default: 0.3.",
    )
    lengths: Annotated[Several[Annotated[int, Field(ge=1)]], BeforeValidator(_whole)] = Field(
        default=(), description="Also report the sink rate of sequences truncated to this length; repeatable."
    )
    details: bool = Field(
        default=False, description="Also measure angles, entropy, distances, secondary sinks and kurtosis; slower."
    )
    maps: Annotated[
        tuple[tuple[int, int], ...],
        BeforeValidator(parse_maps),
        Flag("--map", metavar="LAYER.HEAD", text=list[str]),
    ] = Field(default=(), description="Save a head's attention, cosine and norm maps; implies --details; repeatable.")
    explore: bool = Field(
        default=False,
        description="Also save every head's attention map of the first sequence for the report: first 128 tokens, one "
        "byte per entry, at most 1,000 heads (select heads with --map); up to 400 heads, --out is enough.",
    )
    gradients: bool = Field(
        default=False,
        description="Also measure the loss gradient at the attention input, by layer and position; 3x slower.",
    )
    loss: bool = Field(default=True, description="Skip the loss and the logits; up to a third faster on small models.")
    batch_size: Annotated[int | None, BeforeValidator(_whole), Flag(panel=ADVANCED)] = Field(
        default=None,
        ge=1,
        description="Sequences per batch; default: as many as fit in memory, at most 16 sequences and 8,192 tokens.",
    )
    dormant: bool = False
    explore_at_most: int = 0
    first_target: int = 2
    model_name: str = ""
    bos: bool = False

    def check_lengths(self, longest: int) -> None:
        """Check that sequences of `longest` tokens can be truncated to `lengths`.

        Raises:
            InputError: if `lengths` are not increasing, or not within 1 to `longest` - 1.
        """
        if any(low >= high for low, high in pairwise((0, *self.lengths, longest))):
            raise InputError(
                f"lengths {list(self.lengths)}: use increasing lengths from 1 to {longest - 1}, or longer sequences"
            )

    def check_maps(self, layers: int, heads: int) -> None:
        """Check that the layers and heads of `maps` exist.

        Raises:
            InputError: if a layer or head does not exist.
        """
        for layer, head in self.maps:
            if not 1 <= layer <= layers:
                raise InputError(f"--map {layer}.{head}: the model has attention layers 1 to {layers}")
            if not 1 <= head <= heads:
                raise InputError(f"--map {layer}.{head}: layer {layer} has heads 1 to {heads}")


class Study(CommandSettings, frozen=True):
    """Interventions on the model or the tokens; positions are 1-based.

    `swap_position` and `replace_position` change the model in all measurements. `ablate` and `perturb` (surgery.py) add
    measurements to the one without ablation.
    """

    panel = MEASURED

    ablate: Annotated[Several[str], Flag(metavar="NAME")] = Field(
        default=(),
        description=f"Also measure an ablation: {ABLATIONS}; repeatable.",
    )
    swap_position: Annotated[tuple[int, int] | None, Flag(metavar="I J", panel=ADVANCED)] = Field(
        default=None, description="Swap the learned embeddings of positions I and J."
    )
    replace_position: Annotated[tuple[int, int] | None, Flag(metavar="I J", panel=ADVANCED)] = Field(
        default=None, description="Replace the learned embedding of position I by that of J."
    )
    perturb: Annotated[int | None, BeforeValidator(_whole), Flag(metavar="N")] = Field(
        default=None,
        description="Also replace token N and measure how far the change spreads, with and without key 1.",
    )

    def check(self, length: int) -> None:
        """Check that the interventions are possible on sequences of `length` tokens.

        Whether the layer of an ablation and the positions exist in the model is not checked.

        Raises:
            InputError: if an ablation is unknown or impossible at this length, `perturb` is not within 2 to
                `length` - 1, or position I of a pair is not in the sequences; see also `check_pair`.
        """
        for name in self.ablate:
            _check_ablation(name, length)
        if self.perturb is not None and not 2 <= self.perturb < length:
            raise InputError(
                f"--perturb {self.perturb} on sequences of {length} tokens: use 2 to {length - 1}, because the first "
                "token is hidden in one of the measurements, and a change of the last token cannot spread"
            )
        for option, pair in (("--swap-position", self.swap_position), ("--replace-position", self.replace_position)):
            if pair is not None:
                check_pair(*pair)
                if pair[0] > length:
                    raise InputError(
                        f"{option} {pair[0]} {pair[1]}: sequences of {length} tokens have no position {pair[0]}; use I "
                        f"from 1 to {length}, or longer sequences"
                    )


def _check_ablation(name: str, length: int) -> None:
    found = ABLATION.fullmatch(name)
    if found is None:
        raise InputError(f"the ablation {name!r} is unknown: use {ABLATIONS}")
    keys = found["keys"]
    if keys is None:
        return
    if length < 3:
        raise InputError(f"{name} needs sequences of 3 tokens or more, so that a later query has a target")
    if len(keys) > DIGITS or not 1 <= int(keys) <= length - 2:
        raise InputError(
            f"{name} on sequences of {length} tokens: use 1 to {length - 2}, so that a later query has a target"
        )


def check_pair(i: int, j: int) -> None:
    """Check that two positions are at least 1 and different.

    Raises:
        InputError: if a position is below 1, or i equals j.
    """
    if min(i, j) < 1:
        raise InputError(f"position {min(i, j)} does not exist: positions start at 1")
    if i == j:
        raise InputError(f"position {i} with itself changes nothing: use two different positions")


DECIDING = (
    "inputs",
    "sequences",
    "length",
    "eps",
    "lengths",
    "no_bos",
    "seed",
    "fewer",
    "loss",
    "study",
    "details",
    "maps",
)
"""Keys that `Request.document` always contains; others are added if set. Hashes in results depend on the key order."""


class Request(CommandSettings, frozen=True):
    """Settings of a measurement of one or several models.

    Attributes:
        options: measured quantities, and the kind of inputs; `lengths` in any order.
        sequences, length: number of sequences N and tokens per sequence T.
        no_bos: leave out the special tokens at the start of the sequences, which the tokenizer, its chat template, the
            run's recipe or the text itself puts there.
        bos: begin every sequence with BOS, also random and repeated tokens and texts and conversations before which the
            tokenizer or chat template puts none. BOS is included in T.
        begins_like_text: begin random and repeated tokens with the special tokens that the tokenizer puts before text,
            if there are any.
        column: column of a text of rows.
        seed: random seed of random and repeated tokens, and of tokens that a run's recipe replaces; for drawn text,
            the index of the draw, from 0.
        drawn_text: sample natural sequences from the first 64 N sequences of the text instead of using the first N.
        fewer: accept fewer sequences, with a note, if the text is short; drawn text always accepts fewer.
        study: ablations, and interventions on positional embeddings.
    """

    panel = INPUT

    options: Options = Options()
    sequences: SequenceCount = 100
    length: SequenceLength = 64
    no_bos: bool = Field(default=False, description="Omit BOS and other leading special tokens.")
    bos: bool = Field(default=False, description="Begin every sequence with BOS.")
    column: ColumnName = None
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(
        default=0, description="Random seed for random and repeated tokens."
    )
    begins_like_text: bool = False
    fewer: bool = False
    drawn_text: bool = False
    study: Study = Study()

    def check(self, text: Path | None) -> Path | None:
        """Check the settings, and for natural inputs that the first document of the text can be read.

        Returns:
            The text; for natural inputs without one, the text that comes with sinklab (`default_text`).

        Raises:
            InputError: see `check_options`; also if the inputs are natural and `text` cannot be read.
        """
        from sinklab.data.corpora import default_text, documents

        self.check_options()
        if self.options.inputs == "natural":
            text = text or default_text()
            next(documents(str(text), column=self.column))
        return text

    def check_options(self) -> None:
        """Check the settings that do not depend on model or text.

        Raises:
            InputError: see `Options.check_lengths` and `Study.check`; also if an ablation is requested without the loss
                or on single tokens, the ablation `no_bos` on sequences without BOS, or both `bos` and `no_bos`.
        """
        self._in_order().check_lengths(self.length)
        if self.study.ablate and not (self.options.loss and self.length > 1):
            raise InputError("an ablation shows the change in loss: measure with the loss, on two tokens or more")
        self.study.check(self.length)
        natural = self.options.inputs == "natural"
        if self.bos and self.no_bos:
            raise InputError("--bos and --no-bos contradict each other: use only one of the two options")
        if "no_bos" in self.study.ablate and (self.no_bos or not (natural or self.bos)):
            why = "--no-bos leaves it out already" if self.no_bos else f"--inputs {self.options.inputs} has no BOS"
            raise InputError(f"--ablate no_bos leaves out BOS, but {why}: use only one of the two options")

    def options_for(self, model_name: str, bos: bool) -> Options:
        """Return a copy of the options for one model, with `model_name`, `bos` and increasing `lengths`."""
        return self._in_order().model_copy(update={"model_name": model_name, "bos": bos})

    def document(self) -> dict[str, Any]:
        """Return the settings that affect the measurement, as a JSON-serializable dict: a part of request.json."""
        requested = {name: True for name in ("explore", "gradients") if getattr(self.options, name)}
        requested |= {name: True for name in ("bos", "begins_like_text") if getattr(self, name)}
        requested |= {} if self.column is None else {"column": self.column}
        found = self.options.model_dump(mode="json") | self.model_dump(mode="json", exclude={"options"})
        if self.study.perturb is None:
            del found["study"]["perturb"]
        drawn = {"drawn_text": "disjoint"} if self.drawn_text else {}
        return {key: found[key] for key in DECIDING} | drawn | requested

    def _in_order(self) -> Options:
        """Return a copy of the options with `lengths` sorted and without the full length."""
        lengths = tuple(sorted(set(self.options.lengths) - {self.length}))
        return self.options.model_copy(update={"lengths": lengths})
