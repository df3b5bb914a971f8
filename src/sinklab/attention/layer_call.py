"""One attention call of a layer of a sinklab or Hugging Face model, and the quantities measured from it.

B batch, H query heads, G KV heads (H a multiple of G), T queries, S keys, D key dimension, V value dimension. The
queries are at the last T of the S positions, which include learned leading tokens.

`AttentionCore` computes the attention output from q, k and v with the operation, bias and mask of a recipe.

Training and measuring use the same code. Every call is a `LayerCall`, which `models/hooks.py` can observe or change.
The model computes projections and RoPE before it calls the core; the core applies relative position biases. `one_pass`
computes the attention output and column sums in one pass over blocks of scores, without gradients. PyTorch's fused
kernels do not return the attention weights, so a separate computation of the sums repeats q.k and exp. Here the scores
of a block of queries are normalised in place and used for both output and column sums. A block usually fits in the CPU
cache (`BLOCK_SCORES`). benchmarks/measure.py compares a measurement with a forward pass of the model. Rejected
alternatives: a second exp with the kernel's `lse`, and a matrix product with ones for the sums. Neither was faster on
the tested machine.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinklab.attention import masks
from sinklab.attention import query_blocks as bl
from sinklab.attention.biases import BiasParameters
from sinklab.attention.config import AttentionConfig
from sinklab.attention.importance import ColumnSums, Importance, Rows, seen_by, unpadded_importance
from sinklab.attention.masks import Mask, visible_queries
from sinklab.attention.operations import Operation
from sinklab.attention.operations.base import Call, LogSimilarity
from sinklab.attention.primitive import Backend
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.scores import Score, forget_gates, softcap
from sinklab.errors import InputError

ShiftRope = Callable[[Tensor, Tensor], Tensor]
"""Function (x_BHTD, by_T) -> x_BHTD that shifts the RoPE position of query or key t by by_T[t] positions."""


class LibraryKernel(NamedTuple):
    """Function that computes an unedited attention call of a Hugging Face model.

    Attributes:
        name: "sdpa" for the SDPA attention of transformers; "chunked" or "flex" for sinklab's backend, which is used
            for models with a softcap or sink logits; the name of the model's own implementation if that is called.
        output: function that computes the attention output, (B, H, T, V).
        fixed: True if the output of an unedited call must be that of `output`, not another one that equals it up to
            rounding.
    """

    name: str
    output: Callable[[], Tensor]
    fixed: bool = False


@dataclass(frozen=True)
class LayerCall:
    """Arguments of one attention call of a layer, including the values.

    Attributes:
        operation: attention operation; softmax for Hugging Face models.
        call: queries, keys, mask, biases and score functions.
        value_BGSV: values.
        leading: number of learned tokens before the sequence.
        padding_B: number of padding positions of each row, before the leading tokens; None without padding, and for
            Hugging Face models.
        index: 1-based index of the layer among the attention layers; 0 outside `intercept`.
        shift_rope: function that shifts RoPE positions; None outside `intercept`, in layers without RoPE, and for
            Hugging Face models whose RoPE is not supported.
        library: function of a Hugging Face model that computes the call; None for sinklab models, for edited calls, and
            if another function computes the output.
    """

    operation: Operation
    call: Call
    value_BGSV: Tensor
    leading: int = 0
    padding_B: Tensor | None = None
    index: int = 0
    shift_rope: ShiftRope | None = None
    library: LibraryKernel | None = None

    @property
    def length(self) -> int:
        """Number of queries T."""
        return self.call.q_BHTD.shape[2]

    def output(self) -> Tensor:
        """Compute the attention output, (B, H, T, V), including a V bias."""
        out = self.operation.output(self.call, self.value_BGSV)
        if self.call.key_HD is None and self.call.value_HV is not None:  # V biases
            out = out + self.call.value_HV[:, None].to(out.dtype)
        return out

    def own_output(self) -> Tensor:
        """Compute the attention output, (B, H, T, V), as the model does: by `library` if there is one."""
        return self.output() if self.library is None else self.library.output()

    def changed(self, **call: Any) -> "LayerCall":
        """Return a copy with these fields of `call` replaced, and `library` None, as it computes the unedited call."""
        return replace(self, call=replace(self.call, **call), library=None)

    def masked(self, mask: Mask) -> "LayerCall":
        """Return a copy with `mask` in addition to the existing mask."""
        return self.changed(mask=masks.both(self.call.mask, mask))

    def exact(self) -> "LayerCall":
        """Return a copy with q, k and v detached and in float32 (float64 for float64), and `library` None."""
        q, k, v = (
            x.detach().to(accumulate_dtype(x.dtype)) for x in (self.call.q_BHTD, self.call.k_BGTD, self.value_BGSV)
        )
        return replace(self, call=replace(self.call, q_BHTD=q, k_BGTD=k), value_BGSV=v, library=None)

    def cut(self, positions: int) -> "LayerCall":
        """Return the call for the first `positions` positions; requires T = S and queries that see no removed key."""
        return replace(self, call=self.call.cut(positions), value_BGSV=self.value_BGSV[:, :, :positions], library=None)

    def rows(self) -> Iterator[Rows]:
        """Yield attention rows, including those of leading tokens, in blocks of queries (`OperationPart.rows`)."""
        return self.operation.rows(self.call)

    def visible_queries(self, counted_BT: Tensor | None = None) -> Tensor:
        """Return the number of queries in `counted_BT` (None: all) that see each key: (B or 1, H or 1, S)."""
        q_BHTD, keys = self.call.q_BHTD, self.call.k_BGTD.shape[2]
        return visible_queries(self.call.mask, self.length, keys, q_BHTD.device, counted_BT)

    @torch.no_grad()
    def column_sums(self, counted_BT: Tensor | None = None) -> ColumnSums:
        """Sum the attention rows over the queries in the boolean mask `counted_BT` (None: all)."""
        return self.operation.column_sums(self.call, counted_BT)

    @torch.no_grad()
    def importance(self) -> Importance:
        """Compute alpha_k of every position and of the bias, sink token or registers (2410.10781, section 3.2).

        Requires sequences without padding and T = S. If the attention weights of a row do not sum to one, alpha is
        computed from the proxy scores, and the mean row sum is returned too. Leading tokens count as a bias: the alpha
        of each is the mean over all queries of the sequence, and their sum is added to that of the bias.
        """
        sums, n = self.column_sums(), self.leading
        if n:  # subtract the rows of leading tokens
            first = replace(self, call=replace(self.call.cut(n), mask=masks.CAUSAL)).column_sums()
            sums.keys_BHS[..., :n] -= first.keys_BHS
            if sums.bias_BH is not None and first.bias_BH is not None:
                sums.bias_BH.sub_(first.bias_BH)
        alpha_BHT, real = unpadded_importance(sums.keys_BHS, self.length)[..., n:], self.length - n
        bias_BH = None if sums.bias_BH is None else sums.bias_BH / real
        registers_BHN = sums.keys_BHS[..., :n] / real
        if n:
            bias_BH = registers_BHN.sum(-1) if bias_BH is None else registers_BHN.sum(-1) + bias_BH
        row_sums_BH = None if self.operation.sums_to_one else self.operation.row_sums(self.call)[..., n:].mean(-1)
        counts_BGT, seen_by_BGT = (x[..., n:] for x in seen_by(self.call.mask, self.length, sums.keys_BHS.device))
        visible_BHT = None
        if not torch.equal(seen_by_BGT, torch.arange(real, 0, -1).expand_as(seen_by_BGT)):
            visible_BHT = sums.all_queries()[..., n:] / counts_BGT.clamp(min=1)
        several = registers_BHN if n > 1 else None
        return Importance(alpha_BHT, bias_BH, row_sums_BH, seen_by_BGT, visible_BHT, several)

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """Compute the attention matrix, (B, H, T, S), and the attention to a bias key or sink logit, (B, H, T).

        The second result is None without a bias key and a sink logit.

        Raises:
            InputError: for kernel, differential and stick-breaking attention.
        """
        if not isinstance(self.operation, LogSimilarity):
            raise InputError(
                f"the attention weights of {self.operation.kind!r} attention cannot be edited: this needs softmax or "
                "another non-negative function of q.k, not kernel, differential or stick-breaking attention"
            )
        parts = list(self.rows())
        first = parts[0].weights_BHQS
        scores_BHTS = first.new_zeros(*self.call.q_BHTD.shape[:3], self.call.k_BGTD.shape[2])
        bias_BHT = None if parts[0].bias_BHQ is None else first.new_zeros(self.call.q_BHTD.shape[:3])
        for part in parts:
            scores_BHTS[:, :, part.block.rows, part.block.keys] = part.weights_BHQS
            if bias_BHT is not None and part.bias_BHQ is not None:
                bias_BHT[:, :, part.block.rows] = part.bias_BHQ
        if not self.operation.sums_to_one:
            sums_BHT = self.operation.row_sums(self.call).to(first.dtype)
            scores_BHTS *= sums_BHT[..., None]
            bias_BHT = None if bias_BHT is None else bias_BHT * sums_BHT
        return scores_BHTS, bias_BHT

    def weighted(self, scores_BHTS: Tensor, bias_BHT: Tensor | None) -> Tensor:
        """Compute the output sum_s A_ts v_s of the given attention weights A, (B, H, T, V).

        The value of a bias key, weighted by `bias_BHT`, or a V bias is added.
        """
        repeats = self.call.q_BHTD.shape[1] // self.value_BGSV.shape[1]
        out = scores_BHTS.to(self.value_BGSV.dtype) @ self.value_BGSV.repeat_interleave(repeats, 1)
        value_HV = self.call.value_HV
        if value_HV is not None:
            share = 1.0 if bias_BHT is None else bias_BHT[..., None].to(out.dtype)
            out = out + share * value_HV[:, None].to(out.dtype)
        return out


class AttentionCore(nn.Module):
    """Attention core: (q_BHTD, k_BGTD, v_BGTV) -> out_BHTV; T includes learned leading tokens.

    With a KV cache, k and v have more positions than q, and the queries are at the last positions. If a head has
    several queries, they are concatenated in the last dimension of q.

    Args:
        config: attention section of a recipe.
        kv_heads: number of KV heads G.
        head_width: width D of queries and keys.
        position: function that builds the score function of a relative position bias (ALiBi, relative, T5); None
            without one. The bias is not applied to a bias key. The score function's tensors may require gradients.
        heads: number of query heads H, by default G.
        layer: 1-based layer index, used by operations whose initial values depend on the layer.
        context: training sequence length, used by operations that depend on the length; None if unknown.
        value_width: width V of values and outputs, by default D.

    Attributes:
        leading: number of learned tokens before the sequence (a sink token or registers).
        proxy: True if the attention weights of a row do not sum to one; importance is then computed from proxy scores.
        bias: parameters of the attention bias.
        learned: learned parameters of the operation; None for operations without parameters.
        call_handler: function that computes the output in place of the core. `intercept` (models/hooks.py) sets
            it; otherwise None.
    """

    def __init__(
        self,
        config: AttentionConfig,
        kv_heads: int,
        head_width: int,
        position: Callable[[], Score] | None = None,
        heads: int | None = None,
        layer: int = 1,
        context: int | None = None,
        value_width: int | None = None,
    ) -> None:
        super().__init__()
        heads = heads or kv_heads
        self.operation: Operation = config.operation
        self.backend: Backend = config.backend
        self.softcap = config.softcap
        self.leading = config.bias.leading
        self.proxy = not config.operation.sums_to_one
        value_width = value_width or head_width
        self.bias = BiasParameters(config.bias, kv_heads, head_width, heads, value_width)
        self.learned = config.operation.parameters(heads, head_width, value_width, layer, context)
        self.position = position
        self.by_document = config.mask.kind == "document"
        self.mask = config.mask.build()
        self.call_handler: Callable[[LayerCall], Tensor] | None = None

    def forward(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the attention output, (B, H, T, V). See `layer_call` for the arguments.

        Raises:
            ValueError: if document IDs are required and missing, if the shapes of q and k do not match, or if the
                backend does not support the call.
        """
        with torch.autocast(q_BHTD.device.type, enabled=False):  # the primitive chooses its own precision
            layer = self.layer_call(q_BHTD, k_BGTD, v_BGTD, *others)
            return layer.output() if self.call_handler is None else self.call_handler(layer)

    def layer_call(
        self,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        documents_BL: Tensor | None = None,
        gates_BLH: Tensor | None = None,
        padding_B: Tensor | None = None,
    ) -> LayerCall:
        """Build the call that `forward` computes.

        Args:
            documents_BL: document ID of every key position, required by the document mask. Leading tokens are included,
                but their IDs are ignored. In padded rows, index 0 is the first position after the padding.
            gates_BLH: output of the operation's gate, required by two operations. Forgetting attention: cumulative sums
                of the log forget gates at all key positions. Differential attention V2: logits of the second softmax's
                weight for each query and head, (B, T, H). Leading tokens are included.
            padding_B: number of padding positions at the start of each row, before leading tokens; None without
                padding.

        Raises:
            ValueError: if document IDs are required and missing.
        """
        operation, mask = self.operation, self.mask_of_batch(documents_BL, padding_B)
        assert gates_BLH is not None or not (operation.forgets or operation.weighs), "the operation requires gates"
        logit_H = self.bias.logit_per_head(q_BHTD)
        call = Call(
            q_BHTD,
            k_BGTD,
            mask=mask,
            backend=self.backend,
            cap=None if self.softcap is None else softcap(self.softcap),
            position=None if self.position is None else self.position(),
            forget_gates=forget_gates(gates_BLH, mask.causal) if gates_BLH is not None and operation.forgets else None,
            key_HD=self.bias.key_per_head(),
            offset_H=self.bias.offset,
            logit_BHT=None if logit_H is None else logit_H[None, :, None],
            value_HV=self.bias.value_per_head(),
            learned=self.learned,
            weight_BTH=gates_BLH if operation.weighs else None,
        )
        return LayerCall(operation, call, v_BGTD, self.leading, padding_B)

    def mask_of_batch(self, documents_BL: Tensor | None = None, padding_B: Tensor | None = None) -> masks.Mask:
        """Build the attention mask of the batch, including leading tokens and padding.

        Raises:
            ValueError: if the mask is `document` and no documents are passed.
        """
        mask = self.mask
        if self.by_document:
            if documents_BL is None:
                raise ValueError("attention.mask document: pass documents_BL, the document ID of every position")
            # Without leading tokens all layers share one tensor, so that flex can reuse its block mask.
            mask = masks.Document(documents_BL[:, self.leading :] if self.leading else documents_BL)
        mask = masks.Leading(mask, self.leading) if self.leading else mask
        return mask if padding_B is None else masks.Padded(mask, padding_B)


BLOCK_SCORES = 2**21  # scores per block: 8 MB in float32
MOST_SCORES = 2**24  # upper limit of scores per block with many threads or query heads per KV head: 64 MB
BLOCK_QUERIES = 128  # maximum number of queries per block


@torch.no_grad()
def attend_and_sum(
    call: Call, v_BGSV: Tensor, counted_BT: Tensor | None = None, ends: Sequence[int] = ()
) -> tuple[Tensor, ColumnSums, Tensor]:
    """Compute the output of softmax attention and the column sums of its weights in one pass.

    Args:
        call: softmax call without a bias key; a sink logit is supported.
        counted_BT: bool, queries to count in the sums (real tokens); None counts all.
        ends: E increasing lengths, at most T, of truncated sequences whose column sums are returned.

    Returns:
        The output (B, H, T, V), without a V bias; the column sums over all counted queries; and for every length in
        `ends` the column sums over the counted queries t >= k of the truncated sequence, (B, H, E, S).

    Raises:
        ValueError: if the shapes of queries and keys do not match.
    """
    q_BHTD, k_BGSD, mask, score = call.q_BHTD, call.k_BGTD, call.mask, call.score()
    bl.check_shapes(q_BHTD, k_BGSD)
    (B, H, T, D), (G, S, V) = q_BHTD.shape, v_BGSV.shape[1:]
    dtype = bl.accumulate_dtype(q_BHTD.dtype)
    out_BHTV = q_BHTD.new_empty(B, H, T, V)
    segments_BHES = q_BHTD.new_zeros(B, H, len(ends) + 1, S, dtype=dtype)
    bias_BH = None if call.logit_BHT is None else q_BHTD.new_zeros(B, H, dtype=dtype)
    earlier_BHS = None if mask.causal else q_BHTD.new_zeros(B, H, S, dtype=dtype)
    uniform = mask.plain and score is None and bias_BH is None and counted_BT is None
    rows = 1 if uniform else B  # sequences with one mask are computed as one sequence with B times the heads
    turned_BGDS = k_BGSD.mT.contiguous()  # transposed once instead of in every product
    scaled_BHTD = q_BHTD * call.matrix().factor
    q, k, v = (x.to(dtype).reshape(rows, -1, *x.shape[2:]) for x in (scaled_BHTD, turned_BGDS, v_BGSV))
    out, sums = out_BHTV.view(rows, -1, T, V), segments_BHES.view(rows, -1, len(ends) + 1, S)
    repeats = H // G
    queries = max(1, min(T, BLOCK_QUERIES, MOST_SCORES // (repeats * S)))
    each = repeats * queries * S  # scores of one KV head; a block has one or more per thread if MOST_SCORES allows it
    most = max(1, min(max(torch.get_num_threads(), BLOCK_SCORES // each), MOST_SCORES // each, k.shape[1]))
    buffer = q.new_empty(most * each)
    segments = enumerate(itertools.pairwise((0, *ends, T)))
    starts = [
        (at, start, min(start + queries, end)) for at, (begin, end) in segments for start in range(begin, end, queries)
    ]
    for b, first, (segment, start, stop) in itertools.product(range(rows), range(0, k.shape[1], most), starts):
        groups = slice(first, min(first + most, k.shape[1]))
        heads = slice(groups.start * repeats, groups.stop * repeats)
        block = bl.Block(start, stop, *mask.key_range(start + S - T, stop + S - T, S))
        q_GRD, k_GDS = q[b, heads, block.rows].reshape(groups.stop - first, -1, D), k[b, groups, :, block.keys]
        z_GRS = buffer[: q_GRD.shape[0] * q_GRD.shape[1] * k_GDS.shape[2]].view(*q_GRD.shape[:2], -1)
        torch.bmm(q_GRD, k_GDS, out=z_GRS)
        weights, share = _normalise(z_GRS.view(heads.stop - heads.start, stop - start, -1), call, b, heads, block)
        counted = None if counted_BT is None else counted_BT[b, block.rows, None]
        if share is not None and bias_BH is not None:
            bias_BH[b, heads] += ((1 - share) if counted is None else (1 - share) * counted).sum((1, 2))
        flat = weights.view(*z_GRS.shape)
        out[b, heads, block.rows] = torch.bmm(flat, v[b, groups, block.keys]).view(-1, stop - start, V)
        if counted is not None:
            weights *= counted
        if earlier_BHS is not None:
            diagonal = start + S - T - block.low
            earlier_BHS[b, heads, block.keys] += weights.triu(diagonal + 1).sum(1)
            weights = weights.tril_(diagonal)
        sums[b, heads, segment, block.keys] += weights.sum(1)
    prefixes_BHES = segments_BHES.cumsum(2) if ends else segments_BHES
    return out_BHTV, ColumnSums(prefixes_BHES[:, :, -1], bias_BH, earlier_BHS), prefixes_BHES[:, :, :-1]


def _normalise(z_HQS: Tensor, call: Call, b: int, heads: slice, block: bl.Block) -> tuple[Tensor, Tensor | None]:
    """Return the softmax of a block's scores, which may be overwritten, and each row's total attention to keys.

    The total is None without a sink logit; it is then 1, or 0 in a row without visible keys.
    """
    score, mask, device = call.score(), call.mask.of(b, heads), z_HQS.device
    first, end = block.start + call.first, block.stop + call.first
    if score is not None:
        z_HQS = score(
            z_HQS,
            torch.tensor(b, device=device).view(1, 1, 1),
            torch.arange(heads.start, heads.stop, device=device).view(-1, 1, 1),
            torch.arange(first, end, device=device).view(-1, 1),
            torch.arange(block.low, block.high, device=device),
        )
    bl.mask_block_(z_HQS[None], block, call.first, call.k_BGTD.shape[2], mask)
    share = None
    if call.logit_BHT is not None:
        lse = torch.logsumexp(z_HQS, -1, keepdim=True)
        logit_BHT = call.logit_BHT.expand(call.q_BHTD.shape[:3])
        share = torch.sigmoid(lse - logit_BHT[b, heads, block.rows, None].to(lse.dtype))
    torch.softmax(z_HQS, -1, out=z_HQS)
    if mask.may_be_empty:
        seen = mask.block(first, end, block.low, block.high, device)
        z_HQS.masked_fill_(~seen[0].any(-1, keepdim=True), 0)
    if share is not None:
        z_HQS *= share
    return z_HQS, share
