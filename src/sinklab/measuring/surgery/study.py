"""A measurement and what is asked for beside it: changed positions, ablations, the propositions on repeated tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.driver import Watched, measure
from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.surgery.ablations import check_ablation, measure_ablations, plan_ablation
from sinklab.measuring.surgery.changes import check_pair, replaced_position, swapped_positions
from sinklab.measuring.surgery.mixing import check_perturbed, measure_mixing
from sinklab.measuring.surgery.propositions import LENGTH, check_propositions
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 8  # repeated tokens on which the propositions are checked


@dataclass(frozen=True)
class Study:
    """What is done to a model beside measuring it; by default nothing.

    Attributes:
        ablate: names of ablations (ablations.py).
        swap_position: two learned positions that change places, 1-based.
        replace_position: a learned position, and the one whose embedding it gets.
        perturb: position of a token that is replaced by another, to see how far the change spreads, 1-based.
    """

    ablate: Sequence[str] = ()
    swap_position: tuple[int, int] | None = None
    replace_position: tuple[int, int] | None = None
    perturb: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.ablate
        if isinstance(given, str):  # which would be read letter by letter
            raise InputError(f"ablate is one name: give a list, ablate=[{given[:80]!r}]")

    @contextmanager
    def changed_positions(self, model: "PreTrainedModel | Transformer", length: int) -> Iterator[list[str]]:
        """The model with its positions changed, and a note on each change.

        Raises:
            InputError: no learned positions, or one beyond the sequences.
        """
        notes = []
        self.check(length)
        with ExitStack() as stack:
            for change, pair, said in (
                (swapped_positions, self.swap_position, "the learned positions {} and {} swapped"),
                (replaced_position, self.replace_position, "learned position {} replaced by {}"),
            ):
                if pair is not None:
                    stack.enter_context(change(model, *pair))
                    notes.append(said.format(*pair))
            yield notes

    def check(self, length: int) -> None:
        """Refuse what could be done to no model that reads sequences of `length` tokens.

        Raises:
            InputError: an unknown ablation, or a position beyond the sequences.
        """
        for name in self.ablate:
            check_ablation(name, length)
        if self.perturb is not None:
            check_perturbed(self.perturb, length)
        for option, pair in (("--swap-position", self.swap_position), ("--replace-position", self.replace_position)):
            if pair is not None:
                check_pair(*pair)
                if pair[0] > length:
                    raise InputError(f"{option} {pair[0]} {pair[1]}: the sequences have {length} tokens")


def measure_with_study(
    watched: Watched,
    tokens_NT: Tensor,
    options: Options,
    study: Study,
    *,
    bos_tokens: int,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the sequences, and add what the study asks for; repeated tokens are checked against the propositions.

    Args:
        tokens_NT: whole sequences, without padding.
        options: of the measurement; the ablations are measured without lengths, details and maps.
        bos_tokens: how many special tokens stand first.
        progress: called with (sequences done, sequences in all), those of the ablations counted as well.

    Raises:
        InputError: an ablation or a position that the model or the sequences do not have.
        SinklabError: the model cannot be measured, or an ablation not be carried out.
    """
    model = watched.model
    bare = replace(options, lengths=(), details=False, maps=())

    passes, before = 1, 0

    def reached(done: float, sequences: int) -> None:
        if progress is not None:
            progress(before * sequences + done, passes * sequences)

    def remeasure(tokens_NT: Tensor, first_target: int) -> Measurement:
        nonlocal before
        before += 1
        return measure(watched, tokens_NT, replace(bare, first_target=first_target), progress=reached)

    with study.changed_positions(model, tokens_NT.shape[-1]) as notes:
        plans = [plan_ablation(name, model, tokens_NT, bos_tokens) for name in study.ablate]
        passes += len(plans) + len({plan.first_target for plan in plans} - {2})  # which need the loss before, too
        measurement = measure(watched, tokens_NT, options, progress=reached)
        if plans and measurement.loss is None:
            raise InputError("an ablation shows the change in loss: measure with the loss, on two tokens or more")
        found: dict[str, Any] = {}
        if plans:
            found["ablations"] = measure_ablations(model, tokens_NT, plans, measurement, remeasure)
        if study.perturb is not None:
            found["mixing"] = measure_mixing(model, tokens_NT, study.perturb, options.batch_size)
        if study.perturb is not None or any(plan.hidden for plan in plans):
            notes += watched.kinds.notes_on_hidden_keys()
        if measurement.inputs == "repeat":
            found["propositions"] = _propositions(model, tokens_NT, notes)
    if notes:
        found["notes"] = [*measurement.notes, *notes]
    return measurement.model_copy(update=found)


def _propositions(model: "PreTrainedModel | Transformer", tokens_NT: Tensor, notes: list[str]) -> Propositions | None:
    N, T = tokens_NT.shape
    if T < 2:
        return None
    try:
        return check_propositions(model, tokens_NT[: min(N, TOKENS), -1].tolist(), min(T, LENGTH))
    except InputError as error:
        notes.append(f"the propositions on repeated tokens were not checked: {error}")
        return None
