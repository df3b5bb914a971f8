"""Measuring our own transformer, as it is, while it trains or afterwards: hooks on each attention core."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.measuring.accumulate import Accumulator, Batch
from sinklab.measuring.activations import largest_activations, strongest
from sinklab.measuring.batches import in_batches, reporting
from sinklab.measuring.cost import costing
from sinklab.measuring.hooks import Progress, check_lengths, check_request, evaluating, residual_norms, stacked
from sinklab.measuring.measurement import Inputs, Measurement, measurement_from
from sinklab.measuring.memory import fitting_batch, sizes_of_run
from sinklab.measuring.metrics import accumulation, token_norms
from sinklab.measuring.padding import RealTokens, real_tokens
from sinklab.measuring.statistics.layer import Angles
from sinklab.measuring.statistics.watch import BatchDetails, DetailsWatch
from sinklab.measuring.visible import View, view_of, visible_layers
from sinklab.model.loss import next_token_loss
from sinklab.model.transformer import Transformer


def measure_transformer(
    model: Transformer,
    tokens_NT: Tensor,
    *,
    eps: float | Sequence[float] = 0.3,
    lengths: Sequence[int] = (),
    batch_size: int | None = None,
    first_target: int = 2,
    loss: bool = True,
    details: bool = False,
    maps: Sequence[tuple[int, int]] = (),
    model_name: str = "",
    inputs: Inputs = "natural",
    bos: bool = False,
    progress: Progress | None = None,
) -> Measurement:
    """Sinks, norms and loss of a sinklab transformer; the model is left as it was found, also after an exception.

    Args:
        tokens_NT: token ids; a learned sink token is not part of them.
        eps: threshold of the sink rate, a share of attention in (0, 1); of several, the first is the headline.
        lengths: shorter than the sequences, increasing: the sink rate is also that of the sequences cut at each, from
            the same pass.
        batch_size: sequences per forward pass; changes memory and speed, not the result. None: as many as fit the
            memory, at most 16 (memory.py). Halved where they do not fit, which the result's notes say.
        first_target: the loss is over the targets from this position on, 1-based; under a prefix mask those that
            every query sees are left out as well, as in training.
        loss: False leaves it out, and with it the logits.
        details: also angles, entropy and what else details.py defines.
        maps: (layer, head), 1-based, whose matrices are kept; implies details.
        model_name, inputs, bos: recorded with the result.
        progress: called with (sequences done, sequences in all) after every batch.

    Raises:
        InputError: nothing to measure, more tokens than the model's context, or eps or lengths out of range.
        SinklabError: NaN or infinity in the activations; the layer is named.
    """
    check_request(tokens_NT, eps, batch_size)
    if tokens_NT.shape[1] > model.config.context:
        raise InputError(
            f"sequences of {tokens_NT.shape[1]} tokens are beyond model.context {model.config.context}: the model has "
            "not been trained at those positions; cut the tokens"
        )
    _check_lengths(model, lengths, tokens_NT.shape[1])
    first = next(model.parameters())
    blocks: list[Any] = list(model.blocks)
    cores: list[Any] = [block.attention.core for block in blocks]
    totals = Accumulator(eps, tokens_NT.shape[1], lengths)
    extra = DetailsWatch(maps, totals.length) if details or maps else None
    with ExitStack() as stack:
        cost = stack.enter_context(costing(first.device))
        stack.enter_context(evaluating(model))
        hidden = stack.enter_context(residual_norms(blocks))
        if extra is not None:
            stack.enter_context(extra.watching(blocks))
        layers = stack.enter_context(_core_records(cores, model.leading, lengths, extra))
        largest = stack.enter_context(largest_activations(blocks, _behind(model.leading, tokens_NT[:1])))
        steps = stack.enter_context(reporting(blocks, progress, len(tokens_NT)))

        def step(start: int, stop: int) -> None:
            tokens_BT = tokens_NT[start:stop].to(first.device)
            layers.clear()
            if extra is not None:
                extra.begin(_behind(model.leading, tokens_BT))
            steps.begin(start, stop)
            summed, targets = _summed_loss(model, tokens_BT, first_target if loss else tokens_NT.shape[1] + 1)
            shown = None if extra is None else extra.batch(F.pad(tokens_BT, (model.leading, 0)))
            totals.add(_batch(layers, stacked(hidden)[..., model.leading :], summed, targets, shown))
            steps.end()

        if batch_size is None:
            batch_size = fitting_batch(sizes_of_run(model.config), totals.length, first.device)
        notes = in_batches(len(tokens_NT), batch_size, step)
    if loss and totals.length > 1 and totals.mean_loss() is None:
        notes.append(f"no loss: of {totals.length} tokens the prefix mask leaves none to predict")
    return measurement_from(
        totals,
        cost,
        model=model_name,
        inputs=inputs,
        bos=bos,
        proxy=any(core.proxy for core in cores),
        backend=str(cores[0].backend),
        dtype=str(first.dtype).removeprefix("torch."),
        massive_activations=strongest(largest),
        notes=notes,
    )


def _behind(leading: int, tokens_BT: Tensor) -> RealTokens:
    """Where the tokens stand among the positions: after the learned ones."""
    return real_tokens(F.pad(torch.ones_like(tokens_BT), (leading, 0)))


def _summed_loss(model: Transformer, tokens_BT: Tensor, first_target: int) -> tuple[float, int]:
    """One forward pass: the loss summed over the targets from `first_target` on, in nats, and their number."""
    first = max(first_target, model.config.first_target) - 1
    hidden_BTE, targets_BT = model.hidden(tokens_BT)[:, first - 1 : -1], tokens_BT[:, first:]
    if not targets_BT.numel():
        return 0.0, 0
    mean = next_token_loss(hidden_BTE.flatten(0, 1), model.head.weight, targets_BT.flatten())
    return float(mean) * targets_BT.numel(), targets_BT.numel()


def _check_lengths(model: Transformer, lengths: Sequence[int], longest: int) -> None:
    check_lengths(lengths, longest)
    mask = model.config.attention.mask
    if mask.kind == "prefix" and lengths and lengths[0] < mask.length:
        raise InputError(
            f"lengths {list(lengths)}: under a prefix mask the first {mask.length} tokens see each other, so sequences "
            f"cut before are others: give lengths from {mask.length} on"
        )


@dataclass(frozen=True)
class _CoreRecord:
    importance_BHT: Tensor
    bias_BH: Tensor | None
    key_BT: Tensor
    value_BT: Tensor
    row_sums_BH: Tensor | None
    prefixes: tuple[Tensor, ...]
    visible_BHT: Tensor | None
    view: View | None


def _cut_importance(
    core: Any, q_BHTD: Tensor, k_BGSD: Tensor, documents: tuple[Tensor | None, ...], positions: int
) -> Tensor:
    """alpha of the sequences cut after so many positions; nothing before the cut depends on what comes after."""
    cut = (None if numbers_BT is None else numbers_BT[:, :positions] for numbers_BT in documents)
    return core.importance(q_BHTD[:, :, :positions], k_BGSD[:, :, :positions], *cut).positions_BHT


@contextmanager
def _core_records(
    cores: list[nn.Module], leading: int, lengths: Sequence[int], details: DetailsWatch | None
) -> Iterator[list[_CoreRecord]]:
    """A list to which every call of a core appends what was seen there."""
    records: list[_CoreRecord] = []

    def seen(core: Any, args: tuple[Any, ...], _: Any) -> None:
        q_BHTD, k_BGSD, v_BGSD = (x.to(accumulation(x.dtype)) for x in args[:3])
        alpha = core.importance(q_BHTD, k_BGSD, *args[3:])
        key_BT, value_BT = (token_norms(x[:, :, leading:]).mean(1) for x in (k_BGSD, v_BGSD))
        cut = tuple(_cut_importance(core, q_BHTD, k_BGSD, args[3:], leading + length) for length in lengths)
        view = None
        if alpha.visible_BHT is not None:
            later_T = torch.arange(alpha.positions_BHT.shape[-1], 0, -1, device=q_BHTD.device)
            view = view_of(alpha.seen_by_BGT, later_T)
        seen = (alpha.visible_BHT, view)
        records.append(_CoreRecord(alpha.positions_BHT, alpha.bias_BH, key_BT, value_BT, alpha.row_sums_BH, cut, *seen))
        if details is not None:
            details.values(v_BGSD)
            with torch.autocast(q_BHTD.device.type, enabled=False):
                angles = Angles(q_BHTD, k_BGSD, core.visible(*args[3:]))
                details.attention(core.rows(q_BHTD, k_BGSD, *args[3:]), q_BHTD.shape[1], angles)

    handles = [core.register_forward_hook(seen) for core in cores]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _batch(
    layers: list[_CoreRecord], hidden_MBT: Tensor, loss: float, targets: int, details: BatchDetails | None
) -> Batch:
    bias = [layer.bias_BH for layer in layers if layer.bias_BH is not None]
    row_sums = [layer.row_sums_BH for layer in layers if layer.row_sums_BH is not None]
    return Batch(
        importance_ABHT=torch.stack([layer.importance_BHT for layer in layers]),
        bias_ABH=torch.stack(bias) if bias else None,
        row_sums_ABH=torch.stack(row_sums) if row_sums else None,
        hidden_MBT=hidden_MBT,
        key_ABT=torch.stack([layer.key_BT for layer in layers]),
        value_ABT=torch.stack([layer.value_BT for layer in layers]),
        details=details,
        loss=loss,
        targets=targets,
        prefixes=[torch.stack(parts) for parts in zip(*(layer.prefixes for layer in layers), strict=True)],
        visible_ABHT=visible_layers(
            [layer.importance_BHT for layer in layers], [layer.visible_BHT for layer in layers]
        ),
        views=[layer.view for layer in layers],
    )
