"""Measurement with interventions (changed positional embeddings, ablations, a replaced token) and propositions."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.driver import measure
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Study
from sinklab.measuring.surgery.ablations import measure_ablations, plan_ablation
from sinklab.measuring.surgery.changes import MIXING_PASSES, measure_mixing, replaced_position, swapped_positions
from sinklab.measuring.surgery.propositions import LENGTH, check_propositions
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import Progress

TOKENS = 8  # maximum number of repeated tokens on which the propositions are checked


@contextmanager
def changed_positions(adapter: Adapter, study: Study) -> Iterator[list[str]]:
    """Swap or replace learned positional embeddings in the `with` block; yield the notes on these changes.

    Raises:
        InputError, SinklabError: see `swapped_positions` and `replaced_position`.
    """
    notes = []
    with ExitStack() as stack:
        for change, pair, said in (
            (swapped_positions, study.swap_position, "the learned positions {} and {} were swapped"),
            (replaced_position, study.replace_position, "learned position {} was replaced by {}"),
        ):
            if pair is not None:
                stack.enter_context(change(adapter.module, *pair))
                notes.append(said.format(*pair))
        yield notes


def measure_with_study(
    adapter: Adapter,
    tokens_NT: Tensor,
    options: Options,
    study: Study,
    *,
    bos_tokens: int,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the model, and the effects of the interventions in `study`, on the given sequences.

    For sequences of at least two repeated tokens, the propositions of 2410.10781 are checked. If it is not known which
    proposition covers the model, a note states this.

    Args:
        tokens_NT: token ids, without padding.
        study: interventions, which are possible on sequences of this length (`Study.check`).
        options: settings of the measurement. Ablations are measured without lengths, details, maps, explored heads and
            gradients.
        bos_tokens: number of special tokens at the start of each sequence.
        progress: called with (finished sequences, possibly fractional; total sequences) after every block and batch,
            including the passes of ablations and `perturb`.

    Raises:
        InputError: see `driver.measure`; also if an ablation or a position does not exist in the model or the
            sequences, no token can be replaced at `perturb`, or ablations are requested and there is no loss.
        SinklabError: see `driver.measure`; also if an ablation, `perturb` or the propositions are impossible.
    """
    plain = {"lengths": (), "details": False, "maps": (), "explore": False, "gradients": False}
    bare = options.model_copy(update=plain)
    passes, before = 1, 0

    def reached(done: float, sequences: int) -> None:
        if progress is not None:
            progress(before * sequences + done, passes * sequences)

    def remeasure(tokens_NT: Tensor, first_target: int) -> Measurement:
        nonlocal before
        before += 1
        changed = bare.model_copy(update={"first_target": first_target})
        return measure(adapter, tokens_NT, changed, progress=reached, trial=False)

    with changed_positions(adapter, study) as notes:
        plans = [plan_ablation(name, adapter, tokens_NT, bos_tokens) for name in study.ablate]
        passes += len(plans) + len({plan.first_target for plan in plans} - {adapter.first_target})  # baseline losses
        passes += 0 if study.perturb is None else MIXING_PASSES
        measurement = measure(adapter, tokens_NT, options, progress=reached)
        if plans and measurement.loss is None:
            raise InputError(
                "ablations report the change in loss, and there is no loss: measure with the loss, on a "
                "model with an LM head and sequences of 2 tokens or more that are longer than the prefix of a prefix "
                "mask, if any"
            )
        found: dict[str, Any] = {}
        if plans:
            found["ablations"] = measure_ablations(adapter, tokens_NT, plans, measurement, remeasure)
        if study.perturb is not None:
            before += 1
            found["mixing"] = measure_mixing(
                adapter, tokens_NT, study.perturb, options.batch_size, lambda done: reached(done, len(tokens_NT))
            )
        if study.perturb is not None or any(plan.hidden for plan in plans):
            notes += adapter.kinds.notes_on_hidden_keys()
        if measurement.inputs == "repeat":
            found["propositions"] = None
            if tokens_NT.shape[1] > 1:
                ids, times = tokens_NT[:TOKENS, -1].tolist(), min(tokens_NT.shape[1], LENGTH)
                try:
                    found["propositions"] = check_propositions(adapter, ids, times)
                except InputError as error:
                    notes.append(f"the propositions on repeated tokens were not checked: {error}")
    if notes:
        found["notes"] = [*measurement.notes, *notes]
    return measurement.model_copy(update=found)
