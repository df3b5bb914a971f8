"""One decoder layer: attention and feed-forward, with norms, positional embeddings and gates.

B batch, L new positions (in the first call including leading tokens), S = L plus cached positions, E hidden size,
H query heads, G KV heads, D head dimension, P queries or keys of a head, K dimension of each of them. With a latent
projection, the dimensions of keys and values can differ.

`Past` is the KV cache. New queries attend to cached and new keys with the same operation, mask and bias as without a
cache. For kernel attention, keys and values are cached too, because running sums support causal and prefix masks only,
not windows or documents.

A linear attention layer caches its state, which has a fixed size. The state cannot be reset to an earlier token, so
after `crop` the remaining tokens are recomputed.

B batch, H query heads, G KV heads, S positions so far (including leading tokens), D head dimension; in a linear layer:
H heads, D key dimension, V value dimension, C channels and W kernel size of the convolution.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.masks import Mask, visible_keys
from sinklab.model.config import ModelConfig
from sinklab.model.mixer import DeltaMixer, LinearAttention, RuleInputs
from sinklab.model.norm import build_norm, norm_of_heads
from sinklab.model.position import DistanceTerm, rotate_first
from sinklab.model.values import (
    LatentHeads,
    LatentProjection,
    NoValueResidual,
    OutputGating,
    ValueGating,
    ValueMixing,
    ValueScaling,
    may_be_rounding,
    without_own_value,
)


class LayerPast:
    """Cache of one attention layer.

    Attributes:
        keys_BGSD, values_BGSD: keys and values as they entered the attention core; None before the first call.
        log_kept_BSH: cumulative sums of the log forget gates; None before the first call and without forget gates.
    """

    def __init__(self) -> None:
        self.keys_BGSD: Tensor | None = None
        self.values_BGSD: Tensor | None = None
        self.log_kept_BSH: Tensor | None = None

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new positions, and return those of all positions so far."""
        if self.keys_BGSD is None or self.values_BGSD is None:
            self.keys_BGSD, self.values_BGSD = k_BGTD, v_BGTD
        else:
            self.keys_BGSD = torch.cat((self.keys_BGSD, k_BGTD), dim=2)
            self.values_BGSD = torch.cat((self.values_BGSD, v_BGTD), dim=2)
        return self.keys_BGSD, self.values_BGSD

    def extend_kept(self, log_kept_BTH: Tensor) -> Tensor:
        """Add the last cached sum to the cumulative sums of new positions, append them, and return all sums."""
        if self.log_kept_BSH is None:
            self.log_kept_BSH = log_kept_BTH
        else:
            self.log_kept_BSH = torch.cat((self.log_kept_BSH, self.log_kept_BSH[:, -1:] + log_kept_BTH), dim=1)
        return self.log_kept_BSH

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch by index, in this order."""
        self.keys_BGSD, self.values_BGSD = _taken(self.keys_BGSD, rows), _taken(self.values_BGSD, rows)
        self.log_kept_BSH = _taken(self.log_kept_BSH, rows)

    def crop(self, positions: int) -> None:
        """Keep the first `positions` positions."""
        if self.keys_BGSD is not None and self.values_BGSD is not None:
            self.keys_BGSD, self.values_BGSD = self.keys_BGSD[:, :, :positions], self.values_BGSD[:, :, :positions]
        if self.log_kept_BSH is not None:
            self.log_kept_BSH = self.log_kept_BSH[:, :positions]


class StatePast:
    """Cache of one layer of linear attention.

    Attributes:
        recent_BCW: inputs of the convolution at the last W - 1 positions; None before the first call.
        state_BHDV: state after the last position; None before the first call.
    """

    def __init__(self) -> None:
        self.recent_BCW: Tensor | None = None
        self.state_BHDV: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch by index, in this order."""
        self.recent_BCW, self.state_BHDV = _taken(self.recent_BCW, rows), _taken(self.state_BHDV, rows)


def _taken(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x.index_select(0, rows.to(x.device))


class Past:
    """Cache of a batch of sequences, extended by `Transformer.hidden`; compatible with transformers' `generate`.

    Args:
        layers: number of layers.
        leading: number of learned tokens before each sequence, which are also cached.
        linear: 1-based indices of the linear attention layers.

    Attributes:
        tokens_BT: all tokens so far, including padding; None before the first call.
        padding_B: number of padding tokens at the start of each row; None if there are none. Leading tokens follow
            the padding.
        layers: cache of each layer.
        forgotten: True if `crop` cleared the layers' caches, so that the tokens must be recomputed.
    """

    is_compileable = False

    def __init__(self, layers: int, leading: int, linear: Collection[int] = ()) -> None:
        self.leading, self.linear = leading, frozenset(linear)
        self.tokens_BT: Tensor | None = None
        self.padding_B: Tensor | None = None
        self.layers = self._empty(layers)
        self.forgotten = False

    @property
    def positions(self) -> int:
        """Number of cached positions, including padding and learned leading tokens."""
        return 0 if self.tokens_BT is None else self.leading + self.tokens_BT.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, including padding."""
        return 0 if self.tokens_BT is None else self.tokens_BT.shape[1]

    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Append new tokens to `tokens_BT` and return all tokens so far."""
        self.tokens_BT = tokens_BT if self.tokens_BT is None else torch.cat((self.tokens_BT, tokens_BT), dim=1)
        return self.tokens_BT

    def restart(self) -> Tensor | None:
        """Clear the cache and return the tokens that it contained; None if there were none."""
        tokens_BT, self.tokens_BT, self.padding_B = self.tokens_BT, None, None
        self.layers, self.forgotten = self._empty(len(self.layers)), False
        return tokens_BT

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of the batch: new row i is a copy of row beam_idx[i]."""
        self.tokens_BT, self.padding_B = _taken(self.tokens_BT, beam_idx), _taken(self.padding_B, beam_idx)
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows of the batch with these indices."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        if self.tokens_BT is not None:
            self.reorder_cache(torch.arange(len(self.tokens_BT)).repeat_interleave(repeats))

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens, including padding; if it is negative, drop the last -max_length tokens.

        If there are linear attention layers and a token is dropped, the caches of all layers are cleared. The next call
        of `Transformer.hidden` recomputes the remaining tokens.
        """
        length = self.get_seq_length()
        kept = min(length, max_length if max_length >= 0 else max(length + max_length, 0))
        if kept == 0:
            self.restart()
        elif self.tokens_BT is not None:
            self.tokens_BT = self.tokens_BT[:, :kept]
            if self.linear and kept < length:
                self.layers, self.forgotten = self._empty(len(self.layers)), True
            for layer in self.layers:
                if isinstance(layer, LayerPast):
                    layer.crop(self.leading + kept)

    def _empty(self, layers: int) -> list[LayerPast | StatePast]:
        return [StatePast() if number in self.linear else LayerPast() for number in range(1, layers + 1)]


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer besides its hidden states and cache.

    Attributes:
        rotary: cos and sin, each (L, C), or (B, 1, L, C) with padding, where C is half the number of rotated channels;
            None in layers without RoPE.
        documents_BL: document ID of every position, here including cached and leading positions. In padded rows, index
            0 is the first position after the padding. None without a document mask.
        first: list to which the first layer appends its values, and from which later layers take them; None without
            value residuals (values.py).
        padding_B: number of padding positions at the start of each row, including cached ones; None without padding.
        padded_BL: bool, True at positions that are padding; None without padding, or if earlier positions are cached.
    """

    rotary: tuple[Tensor, Tensor] | None = None
    documents_BL: Tensor | None = None
    first: list[Tensor] | None = None
    padding_B: Tensor | None = None
    padded_BL: Tensor | None = None


class Attention(nn.Module):
    """An attention layer: projections, positional embedding and gates around the attention core.

    Args:
        config: config of the layer (`ModelConfig.of_layer`).
        term: relative position bias, shared by all layers; None for other positional embeddings.
        layer: layer number, 1-based.

    Attributes:
        edited_mask: mask of the current call after all edits (models/hooks.py), if `sees_one_key` needs it; None
            otherwise.
    """

    def __init__(self, config: ModelConfig, term: DistanceTerm | None, layer: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_width = config.heads, config.key_heads, config.head_width
        self.key_width, operation = config.key_width, config.attention.operation
        self.queries = self.heads * operation.queries_per_head
        self.summed, self.exclusive = config.head_outputs == "sum", config.exclusive
        self.needs_one_key_mask = config.exclusive and may_be_rounding(config.attention)
        self.edited_mask: Mask | None = None
        projection, value_width = config.projection, config.value_width
        self.qkv = self.latent = None
        if isinstance(projection, LatentProjection):
            self.latent = LatentHeads(projection, config.width, self.heads, self.head_width, config.norm.eps)
        else:
            self.qkv = nn.Linear(config.width, (self.queries + 2 * self.key_heads) * self.head_width, bias=False)
        norm, parts = config.norm, operation.keys_per_head
        of_query = parts * operation.queries_per_head
        self.q_norm = norm_of_heads(norm.qk_norm, self.heads, self.key_width, norm.eps, of_query)
        self.k_norm = norm_of_heads(norm.qk_norm, self.key_heads, self.key_width, norm.eps, parts)
        self.head_norm = norm_of_heads(norm.head_norm, self.heads, value_width, norm.eps)
        gate = config.gate
        self.value_gate: ValueGating | ValueScaling | None = None
        if gate.kind == "value":
            self.value_gate = ValueGating(self.key_heads, value_width)
        elif gate.kind == "v_scale":
            gain = 2 / 5 if config.init.kind == "declared" else 1 / 3  # d_in times the variance of linear weights
            self.value_gate = ValueScaling(self.key_heads, value_width * gain)
        self.value_residual = None
        if layer > 1 and not isinstance(config.value_residual, NoValueResidual):
            self.value_residual = ValueMixing(config.value_residual)
        self.output_gate = None
        if gate.kind == "head":
            self.output_gate = OutputGating(gate.channels or config.width, self.heads, 1)
        elif gate.kind == "element":
            self.output_gate = OutputGating(config.width, self.heads, value_width)
        self.forget_gate = operation.forget_gate(config.width, self.heads)
        self.weight_gate = operation.weight_gate(config.width, self.heads)
        score = None if term is None else term.score
        self.core = AttentionCore(
            config.attention, self.key_heads, config.query_width, score, self.heads, layer, config.context, value_width
        )
        self.out = nn.Linear((1 if self.summed else self.heads) * value_width, config.width, bias=False)

    def inputs(self, x_BLE: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, H, L, D), keys and values (B, G, L, D) of new positions for the attention core.

        If a head has two queries, they are concatenated: (B, H, L, 2 D).
        """
        if self.latent is not None:
            q_BHLD, k_BGLD, v_BGLD = self.latent(x_BLE, inputs.rotary)
        else:
            assert self.qkv is not None
            heads = self.qkv(x_BLE).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            q_BHLD, k_BGLD, v_BGLD = heads.split((self.queries, self.key_heads, self.key_heads), dim=1)
            if self.queries > self.heads:  # concatenate the queries of a head
                q_BHLD = q_BHLD.unflatten(1, (self.heads, -1)).transpose(2, 3).flatten(3)
            q_BHLD, k_BGLD = self._placed(q_BHLD, self.q_norm, inputs), self._placed(k_BGLD, self.k_norm, inputs)
        return q_BHLD, k_BGLD, v_BGLD if self.value_gate is None else self.value_gate(v_BGLD)

    def core_arguments(self, x_BLE: Tensor, inputs: LayerInputs, past: LayerPast | None) -> tuple[Tensor | None, ...]:
        """Return the attention core's arguments after q, k and v: document IDs, gates and padding.

        The gates are the cumulative log forget gates of all positions, or, for differential attention V2, the logits of
        the second softmax's weight for each query and head. New forget gates are appended to `past`.
        """
        gate = self.weight_gate if self.forget_gate is None else self.forget_gate
        gates_BLH = None if gate is None else gate(x_BLE)
        if gates_BLH is not None and self.forget_gate is not None and past is not None:
            gates_BLH = past.extend_kept(gates_BLH)
        return inputs.documents_BL, gates_BLH, inputs.padding_B

    def _placed(self, x_BHLD: Tensor, norm: nn.Module, inputs: LayerInputs) -> Tensor:
        """Apply qk_norm and RoPE to queries or keys, separately to each of a head's queries or keys."""
        x_BHLPK = norm(x_BHLD.unflatten(-1, (-1, self.key_width)))
        if inputs.rotary is not None:
            cos_LC, sin_LC = inputs.rotary
            x_BHLPK = rotate_first(x_BHLPK, cos_LC[..., None, :], sin_LC[..., None, :])
        return x_BHLPK.flatten(-2)

    def sees_one_key(self, k_BGSD: Tensor, queries: int, inputs: LayerInputs) -> Tensor | None:
        """Return a bool mask, (B or 1, H or 1, L), of queries that see only one key; None if `output` needs no mask."""
        if not self.needs_one_key_mask:
            return None
        mask = self.edited_mask or self.core.mask_of_batch(inputs.documents_BL, inputs.padding_B)
        return visible_keys(mask, queries, k_BGSD.device, k_BGSD.shape[2]) == 1

    def output(self, out_BHLD: Tensor, x_BLE: Tensor, v_BGLD: Tensor, one_key_BHL: Tensor | None = None) -> Tensor:
        """Compute the update of the residual stream (B, L, E) from the core's output, attention input and values."""
        if self.exclusive:
            out_BHLD = without_own_value(out_BHLD, v_BGLD, one_key_BHL)
        out_BHLD = self.head_norm(out_BHLD)
        if self.output_gate is not None:
            out_BHLD = self.output_gate(out_BHLD, x_BLE)
        return self.out(out_BHLD.sum(1) if self.summed else out_BHLD.transpose(1, 2).flatten(2))


ACTIVATIONS = {"relu": F.relu, "reglu": F.relu, "gelu": F.gelu, "geglu": F.gelu, "swish": F.silu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """Feed-forward network act(x W) V, or (act(x W) * x U) V if gated (2410.10781, table 11); `up` is W or [W U]."""

    def __init__(self, kind: str, width: int, ffn_width: int) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[kind], kind.endswith("glu")
        self.up = nn.Linear(width, ffn_width * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        if self.gated:
            gate, value = self.up(x_BTE).chunk(2, dim=-1)
            return self.down(self.activation(gate) * value)
        return self.down(self.activation(self.up(x_BTE)))


class ResidualBlock(nn.Module):
    """Base class of layers: a token mixer and a feed-forward network with their norms and residual connections.

    Attributes:
        compiled_parts: names of the two methods that can be compiled, which run before and after the token mixing.
    """

    compiled_parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.placement = config.norm.placement
        self.attention_norm = build_norm(config.norm, config.width)
        self.attention = attention
        self.ffn_norm = build_norm(config.norm, config.width)
        self.ffn = FeedForward(config.ffn, config.width, config.ffn_width)
        if self.placement == "sandwich":
            self.attention_post_norm = build_norm(config.norm, config.width)
            self.ffn_post_norm = build_norm(config.norm, config.width)

    def read(self, x_BLE: Tensor) -> Tensor:
        """Compute the input of the token mixer: the residual stream, after the norm unless placement is post."""
        return x_BLE if self.placement == "post" else self.attention_norm(x_BLE)

    def joined(self, x_BLE: Tensor, added_BLE: Tensor) -> Tensor:
        """Compute the residual stream after the layer: add the outputs of token mixer and feed-forward network.

        The norms of the layer are applied according to the placement (`NormConfig.placement`).
        """
        if self.placement == "post":
            x_BLE = self.attention_norm(x_BLE + added_BLE)
            return self.ffn_norm(x_BLE + self.ffn(x_BLE))
        if self.placement == "sandwich":
            x_BLE = x_BLE + self.attention_post_norm(added_BLE)
            return x_BLE + self.ffn_post_norm(self.ffn(self.ffn_norm(x_BLE)))
        x_BLE = x_BLE + added_BLE
        return x_BLE + self.ffn(self.ffn_norm(x_BLE))


class DecoderBlock(ResidualBlock):
    """Decoder layer with attention and a feed-forward network.

    The methods before and after the attention core can be compiled. The core is not compiled, so that probes can
    observe it, and so that training and measuring use the same kernels.
    """

    compiled_parts = ("before_core", "after_core")
    attention: Attention

    def __init__(self, config: ModelConfig, term: DistanceTerm | None, layer: int) -> None:
        super().__init__(config, Attention(config, term, layer))

    def forward(self, x_BLE: Tensor, inputs: LayerInputs, past: LayerPast | None = None) -> Tensor:
        read_BLE, q_BHLD, k_BGLD, v_BGLD = self.before_core(x_BLE, inputs)
        if inputs.first is not None:
            if self.attention.value_residual is None:
                inputs.first.append(v_BGLD)
            else:
                v_BGLD = self.attention.value_residual(v_BGLD, inputs.first[0])
        k_BGSD, v_BGSD = (k_BGLD, v_BGLD) if past is None else past.extend(k_BGLD, v_BGLD)
        arguments = self.attention.core_arguments(read_BLE, inputs, past)
        out_BHLD = self.attention.core(q_BHLD, k_BGSD, v_BGSD, *arguments)
        one_key_BHL = self.attention.sees_one_key(k_BGSD, q_BHLD.shape[2], inputs)
        return self.after_core(x_BLE, read_BLE, out_BHLD, v_BGLD, one_key_BHL)

    def before_core(self, x_BLE: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the attention input (`read`), queries, keys and values (`Attention.inputs`)."""
        read_BLE = self.read(x_BLE)
        return read_BLE, *self.attention.inputs(read_BLE, inputs)

    def after_core(
        self, x_BLE: Tensor, read_BLE: Tensor, out_BHLD: Tensor, v_BGLD: Tensor, one_key_BHL: Tensor | None = None
    ) -> Tensor:
        """Compute the residual stream after the layer from the attention core's output."""
        return self.joined(x_BLE, self.attention.output(out_BHLD, read_BLE, v_BGLD, one_key_BHL))


class LinearBlock(ResidualBlock):
    """Decoder layer with linear attention and a feed-forward network."""

    compiled_parts = ("before_rule", "after_rule")
    attention: LinearAttention

    def __init__(self, config: ModelConfig, mixer: DeltaMixer) -> None:
        super().__init__(config, LinearAttention(mixer, config.width, config.heads, config.norm.eps))

    def forward(self, x_BLE: Tensor, inputs: LayerInputs, past: StatePast | None = None) -> Tensor:
        past = StatePast() if past is None else past
        read_BLE, rule_inputs, recent_BCW = self.before_rule(x_BLE, past.recent_BCW, inputs.padded_BL)
        out_BHLV, state_BHDV = self.attention.rule(rule_inputs, past.state_BHDV)
        past.recent_BCW, past.state_BHDV = recent_BCW, state_BHDV
        return self.after_rule(x_BLE, read_BLE, out_BHLV)

    def before_rule(
        self, x_BLE: Tensor, recent_BCW: Tensor | None, padded_BL: Tensor | None = None
    ) -> tuple[Tensor, RuleInputs, Tensor]:
        """Compute the token mixer's input (`read`), the delta rule's inputs, and the convolution inputs to cache."""
        read_BLE = self.read(x_BLE)
        return read_BLE, *self.attention.inputs(read_BLE, recent_BCW, padded_BL)

    def after_rule(self, x_BLE: Tensor, read_BLE: Tensor, out_BHLV: Tensor) -> Tensor:
        """Compute the residual stream after the layer from the delta rule's output."""
        return self.joined(x_BLE, self.attention.output(out_BHLV, read_BLE))
