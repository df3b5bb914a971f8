"""What a forward pass shows of every attention layer, whatever the model, and the batch that the accumulator takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sinklab.attention.real_tokens import RealTokens
from sinklab.measuring.accumulate import Batch
from sinklab.measuring.mask_coverage import View, visible_layers
from sinklab.measuring.metrics import stacked
from sinklab.measuring.statistics.watch import BatchDetails


@dataclass(frozen=True)
class LayerRecord:
    """What one attention layer showed, index 0 being the first real token of each sequence.

    Attributes:
        importance_BHT: alpha, float32 or, of a float64 model, float64; 0 past the end of a sequence.
        bias_BH: alpha of the sink logit, added bias or sink token; None where the layer has none.
        key_norm_BT, value_norm_BT: l2 norm, mean over key heads.
        prefixes: alpha (B, H, length) of the sequences cut at each of the lengths asked for.
        visible_BHT: mean over the queries that may see each position; None where these are all from it on.
        view: what is seen otherwise; None likewise.
        row_sums_BH: mean raw row sum of scores that do not sum to one; None where they do.
        registers_BHN: alpha of each register; None where there are not several.
        window_start_BH: mean score of the first key of a window, over the queries past the first window; None
            without a window that has moved on.
    """

    importance_BHT: Tensor
    bias_BH: Tensor | None
    key_norm_BT: Tensor
    value_norm_BT: Tensor
    prefixes: tuple[Tensor, ...] = ()
    visible_BHT: Tensor | None = None
    view: View | None = None
    row_sums_BH: Tensor | None = None
    registers_BHN: Tensor | None = None
    window_start_BH: Tensor | None = None


def batch_of(
    layers: Sequence[LayerRecord],
    hidden: Sequence[Tensor],
    real: RealTokens,
    loss: tuple[Tensor, int],
    details: BatchDetails | None,
    leading: int = 0,
    before: Sequence[Tensor] = (),
) -> Batch:
    """One forward pass for the accumulator.

    Args:
        hidden: norms (B, T) before the first block and after each, all columns; empty where blocks cannot be read.
        loss: summed over the targets, and their number.
        leading: learned positions in front.
        before: norms (B, T) of what entered each norm of a post-norm model, all columns.
    """
    window_starts = [layer.window_start_BH for layer in layers if layer.window_start_BH is not None]
    bias = [layer.bias_BH for layer in layers if layer.bias_BH is not None]
    row_sums = [layer.row_sums_BH for layer in layers if layer.row_sums_BH is not None]
    registers = [layer.registers_BHN for layer in layers if layer.registers_BHN is not None]
    return Batch(
        importance_ABHT=stacked([layer.importance_BHT for layer in layers]),
        bias_ABH=stacked(bias) if bias else None,
        registers_ABHN=stacked(registers) if registers else None,
        hidden_MBT=stacked([real.align(norm_BT) for norm_BT in hidden]) if hidden else None,
        key_ABT=stacked([layer.key_norm_BT for layer in layers]),
        value_ABT=stacked([layer.value_norm_BT for layer in layers]),
        loss=loss[0],
        targets=loss[1],
        valid_BT=real.valid_BR,
        row_sums_ABH=stacked(row_sums) if row_sums else None,
        prefixes=[stacked(list(parts)) for parts in zip(*(layer.prefixes for layer in layers), strict=True)],
        details=details,
        visible_ABHT=visible_layers(
            [layer.importance_BHT for layer in layers], [layer.visible_BHT for layer in layers]
        ),
        views=[layer.view for layer in layers],
        window_start_ABH=stacked(window_starts) if window_starts else None,
        leading_MB=stacked([norm_BT[:, 0] for norm_BT in hidden]) if leading and hidden else None,
        before_MBT=stacked([real.align(norm_BT) for norm_BT in before]) if before else None,
    )
