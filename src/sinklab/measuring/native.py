"""Our own transformer as the driver sees it, while it trains or afterwards: hooks on each attention core."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.core import AttentionCore
from sinklab.attention.masks import Window
from sinklab.attention.real_tokens import RealTokens
from sinklab.errors import InputError
from sinklab.measuring.mask_coverage import view_of
from sinklab.measuring.options import Options
from sinklab.measuring.records import LayerRecord
from sinklab.measuring.statistics.block import Angles
from sinklab.measuring.statistics.watch import DetailsWatch
from sinklab.model.block import DecoderBlock
from sinklab.model.config import ModelConfig
from sinklab.model.loss import next_token_loss
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hooked, token_norms
from sinklab.models.layer_kinds import LayerKinds
from sinklab.models.memory import Sizes, sizes_of_run


def attention_cores(model: Transformer) -> list[AttentionCore]:
    """Where queries meet keys, in the order of the layers."""
    return [block.attention.core for block in model.blocks if isinstance(block, DecoderBlock)]


def layer_kinds(config: ModelConfig) -> LayerKinds:
    """Which layers have attention; all others are linear."""
    numbers = range(1, config.layers + 1)
    linear = tuple(number for number in numbers if number not in config.attention_layers)
    return LayerKinds(config.layers, config.attention_layers, linear)


class WatchedTransformer:
    """`driver.Watched` of a sinklab transformer."""

    def __init__(self, model: Transformer) -> None:
        first = next(model.parameters())
        self.model, self.device, self.dtype = model, first.device, first.dtype
        self.blocks, self.cores = list(model.blocks), attention_cores(model)
        self.kinds = layer_kinds(model.config)
        self.leading = model.leading
        post = model.config.norm.placement == "post"
        norms = [norm for one in model.blocks for norm in (one.attention_norm, one.ffn_norm) if post]
        self.post_norms: Sequence[nn.Module] = cast("list[nn.Module]", norms)
        self.proxy = any(core.proxy for core in self.cores)

    def check(self, tokens_NT: Tensor, options: Options, longest: int) -> None:
        """Refuse sequences beyond the context, lengths at which a prefix mask cuts other ones, and maps of no head.

        Raises:
            InputError: any of them.
        """
        options.check_maps(len(self.cores), self.model.config.heads)
        lengths = options.lengths
        context, mask = self.model.config.context, self.model.config.attention.mask
        if longest > context:
            raise InputError(
                f"sequences of {longest} tokens are beyond model.context {context}: the model has not been trained at "
                "those positions; cut the tokens"
            )
        if mask.kind == "prefix" and lengths and lengths[0] < mask.length:
            raise InputError(
                f"lengths {list(lengths)}: under a prefix mask the first {mask.length} tokens see each other, so "
                f"sequences cut before are others: give lengths from {mask.length} on"
            )

    @contextmanager
    def reading(self, lengths: Sequence[int], details: DetailsWatch | None) -> Iterator["_CoreReader"]:
        """Watch every call of an attention core."""
        reader = _CoreReader(self, lengths, details)
        with hooked(core.register_forward_hook(reader.ran) for core in self.cores):
            yield reader

    def notes(self) -> list[str]:
        """Nothing that its recipe does not say."""
        return []


class _CoreReader:
    """`driver.Reader` through hooks on the attention cores."""

    def __init__(self, watched: WatchedTransformer, lengths: Sequence[int], details: DetailsWatch | None) -> None:
        self._model, self._leading = watched.model, watched.leading
        self._lengths, self._details = lengths, details
        self.layers: list[LayerRecord] = []
        self.backend = str(watched.cores[0].backend)

    def read(self, tokens_BT: Tensor, real: RealTokens, first_target: int | None) -> tuple[Tensor, int]:
        """One forward pass, and the loss over the targets that training counts as well."""
        self.layers.clear()
        hidden_BTE = self._model.hidden(tokens_BT)
        nothing = hidden_BTE.new_zeros((), dtype=torch.float64), 0
        if first_target is None:
            return nothing
        first = max(first_target, self._model.config.first_target) - 1
        hidden_BTE, targets_BT = hidden_BTE[:, first - 1 : -1], tokens_BT[:, first:]
        if not targets_BT.numel():
            return nothing
        mean = next_token_loss(hidden_BTE.flatten(0, 1), self._model.head.weight, targets_BT.flatten())
        return mean.double() * targets_BT.numel(), targets_BT.numel()

    def sizes(self, padded: bool) -> Sizes:
        """Of the model's config."""
        return sizes_of_run(self._model.config)

    def ran(self, core: AttentionCore, args: tuple[Any, ...], _: Any) -> None:
        """A hook: record what the core of one layer was given."""
        q_BHTD, k_BGSD, v_BGSD = (x.to(accumulate_dtype(x.dtype)) for x in args[:3])
        alpha = core.importance(q_BHTD, k_BGSD, *args[3:])
        key_BT, value_BT = (token_norms(x[:, :, self._leading :]).mean(1) for x in (k_BGSD, v_BGSD))
        cut = (cut_importance(core, q_BHTD, k_BGSD, args[3:], self._leading + length) for length in self._lengths)
        view = None
        if alpha.visible_BHT is not None:
            view = view_of(alpha.seen_by_BGT, torch.arange(alpha.positions_BHT.shape[-1], 0, -1))
        self.layers.append(
            LayerRecord(
                importance_BHT=alpha.positions_BHT,
                bias_BH=alpha.bias_BH,
                key_norm_BT=key_BT,
                value_norm_BT=value_BT,
                prefixes=tuple(cut),
                visible_BHT=alpha.visible_BHT,
                view=view,
                row_sums_BH=alpha.row_sums_BH,
                registers_BHN=alpha.registers_BHN,
                window_start_BH=_window_start(core, q_BHTD, k_BGSD, args[3:]),
            )
        )
        if self._details is not None:
            self._details.values(v_BGSD)
            with torch.autocast(q_BHTD.device.type, enabled=False):
                angles = Angles(q_BHTD, k_BGSD, core.visible(*args[3:4]))
                self._details.attention(core.rows(q_BHTD, k_BGSD, *args[3:]), q_BHTD.shape[1], angles)


def _window_start(
    core: AttentionCore, q_BHTD: Tensor, k_BGSD: Tensor, beside: tuple[Tensor | None, ...]
) -> Tensor | None:
    """Mean score of the first key of a query's window, over the queries that no longer see position 1.

    None without a window, with learned positions in front, or where every query sees position 1.
    """
    T = q_BHTD.shape[2]
    width = core.mask.width if isinstance(core.mask, Window) else T
    if width >= T or core.leading:
        return None
    sums_BH = q_BHTD.new_zeros(q_BHTD.shape[:2])
    for rows in core.rows(q_BHTD, k_BGSD, *beside):
        query_Q = torch.arange(rows.block.start, rows.block.stop, device=q_BHTD.device)
        key_Q = (query_Q - width + 1 - rows.block.low).clamp(min=0)
        score_BHQ = rows.weights_BHQS.gather(-1, key_Q[:, None].expand(*rows.weights_BHQS.shape[:3], 1))[..., 0]
        sums_BH += (score_BHQ * (query_Q >= width)).sum(-1)
    return sums_BH / (T - width)


def cut_importance(
    core: AttentionCore, q_BHTD: Tensor, k_BGSD: Tensor, beside: tuple[Tensor | None, ...], positions: int
) -> Tensor:
    """alpha of the sequences cut after so many positions; nothing before the cut depends on what comes after."""
    cut = (None if of_positions is None else of_positions[:, :positions] for of_positions in beside)
    return core.importance(q_BHTD[:, :, :positions], k_BGSD[:, :, :positions], *cut).positions_BHT
