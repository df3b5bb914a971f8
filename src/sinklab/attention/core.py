"""Attention core: computes the attention output from q, k and v with the operation, bias and mask of a recipe.

Training and measuring use the same code. Every call is a `LayerCall`, which `models/hooks.py` can observe or
change. The model computes projections and RoPE before it calls the core; the core applies relative position biases.

B batch, H query heads, G KV heads, T queries, L key positions, D key dimension, V value dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sinklab.attention import masks
from sinklab.attention.biases import BiasParameters
from sinklab.attention.config import AttentionConfig
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.operations import Operation
from sinklab.attention.operations.base import Call
from sinklab.attention.primitive import Backend
from sinklab.attention.scores import Score, forget_gates, softcap


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
