"""The sinklab transformer: a LLaMA-style decoder configured by a recipe.

Training and measuring use the same module. Probes observe hidden states with hooks on the blocks, and queries, keys and
values by intercepting the calls of `attention.core`.

B batch, T tokens, L = leading + T positions, E hidden size, D head dimension, V vocabulary.
"""

from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError
from sinklab.model.block import DecoderBlock, LayerInputs, LinearBlock, Past
from sinklab.model.config import ModelConfig, initialise
from sinklab.model.loss import AddedLosses, next_token_loss
from sinklab.model.mixer import DeltaMixer
from sinklab.model.norm import build_norm
from sinklab.model.position import Absolute, Distance, DistanceTerm, Learnable, Rotary, rotary_tables, sinusoid


def check_on_one_device(model: nn.Module) -> None:
    """Check that all weights of a sinklab model are on one device.

    accelerate loads offloaded weights when their module is called. A sinklab model also reads weights of modules that
    are not called, such as attention biases, and would use wrong values.

    Raises:
        InputError: if the weights are on several devices or on the meta device.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise InputError(
            f"the weights of the sinklab model are on {' and '.join(sorted(map(str, devices)))}: load all of them onto "
            "one device, without device_map or --device map"
        )


class OrthogonalMap(nn.Linear):
    """Square projection of the embeddings or of the LM head's input, initially orthogonal (2506.19697)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.starts = {"weight": lambda tensor, stream: nn.init.orthogonal_(tensor, generator=stream)}


class Transformer(nn.Module):
    """Decoder language model, tokens_BT -> logits_BTV, with initialised weights (config.py).

    Args:
        config: model section of a recipe, with `vocab_size` set.
        seed: random seed of the initial weights.

    Attributes:
        leading: number of learned tokens before the sequence (a sink token or registers).
        sink_token: embeddings of the learned tokens (1, leading, E); None without them.
        embedding_map, head_map: projections after the embeddings and before the LM head; the identity if not used.
        layer_configs: config of each layer (`ModelConfig.of_layer`).
        gradient_checkpointing: whether the blocks' activations are computed again for gradients, as
            `gradient_checkpointing_enable` of transformers sets it; training has `train.recompute`.

    Raises:
        ValueError: if `config.vocab_size` is not set.
    """

    gradient_checkpointing = False

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size is not set: use the vocabulary size of the tokenizer")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        projected = config.embedding == "projected"
        self.embedding_map = OrthogonalMap(config.width) if projected else nn.Identity()
        self.leading = config.attention.bias.leading
        self.sink_token = nn.Parameter(torch.empty(1, self.leading, config.width)) if self.leading else None
        position = config.position
        learned = isinstance(position, Learnable)
        self.position_table = nn.Parameter(torch.empty(config.context, config.width)) if learned else None
        self.distance = None if config.distance is None else DistanceTerm(config.distance, config.heads)
        self.layer_configs = [config.of_layer(layer) for layer in range(1, config.layers + 1)]
        self.blocks = nn.ModuleList(self._block(layer) for layer in range(1, config.layers + 1))
        post = config.norm.placement == "post"
        self.final_norm = nn.Identity() if post else build_norm(config.norm, config.width)
        self.head_map = OrthogonalMap(config.width) if projected else nn.Identity()
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        initialise(self, config, seed)

    def hidden(self, tokens_BT: Tensor, past: Past | None = None, padding_B: Tensor | None = None) -> Tensor:
        """Compute the input of the LM head, (B, T, E), after final norm and `head_map`, without leading tokens.

        Args:
            past: cache of the sequences that these tokens continue; it is extended in place.
            padding_B: number of padding tokens at the start of each sequence, including cached ones; None uses the
                padding of the cache, or no padding without a cache. Outputs at padding are undefined.

        Raises:
            InputError: if there are more tokens, including cached ones, than learned positional embeddings.
        """
        if past is not None:
            padding_B = past.padding_B if padding_B is None else padding_B
            if self._must_be_read_again(past, padding_B):
                earlier_BT = past.restart()
                assert earlier_BT is not None
                return self.hidden(torch.cat((earlier_BT, tokens_BT), dim=1), past, padding_B)[:, earlier_BT.shape[1] :]
            past.padding_B = padding_B
        first = 0 if past is None else past.positions
        leading = 0 if first else self.leading
        x_BTE = self.embedding_map(self.embedding(tokens_BT))
        x_BLE = self._placed(x_BTE, first - self.leading if first else 0, padding_B)
        if leading:
            assert self.sink_token is not None
            x_BLE = torch.cat((self.sink_token.expand(len(x_BLE), -1, -1), x_BLE), dim=1)
            if padding_B is not None:  # the padding stays in front of the sink token
                at_L, before_B1 = torch.arange(x_BLE.shape[1], device=x_BLE.device), padding_B[:, None]
                behind_BL = torch.where(at_L < before_B1 + self.leading, at_L - before_B1, at_L)
                from_BL = torch.where(at_L < before_B1, at_L + self.leading, behind_BL)
                x_BLE = x_BLE.gather(1, from_BL[..., None].expand_as(x_BLE))
        documents_BL = self._documents(tokens_BT if past is None else past.extend(tokens_BT), padding_B)
        padded_BL = None
        if padding_B is not None and not first:
            padded_BL = torch.arange(x_BLE.shape[1], device=x_BLE.device) < padding_B[:, None]
        mixes = self.config.value_residual.kind != "none"
        inputs = LayerInputs(None, documents_BL, [] if mixes else None, padding_B, padded_BL)
        with_rotary, (_, L, _), dtype = {}, x_BLE.shape, accumulate_dtype(x_BLE.dtype)
        for kind in self.config.layer_kinds:
            if isinstance(kind.position, Rotary):
                theta, width, start = kind.position.theta, kind.rotary_width, first - self.leading
                tables = rotary_tables(L, width, theta, x_BLE.device, start, dtype=dtype, padding_B=padding_B)
                with_rotary[kind.position] = replace(inputs, rotary=tables)
        for index, block in enumerate(self.blocks):
            here = with_rotary.get(self.layer_configs[index].position, inputs)
            if past is not None:
                x_BLE = block(x_BLE, here, past.layers[index])
            elif self.gradient_checkpointing and torch.is_grad_enabled():
                x_BLE = checkpoint(block, x_BLE, here, use_reentrant=False)
            else:
                x_BLE = block(x_BLE, here)
        return self.head_map(self.final_norm(x_BLE[:, leading:]))

    def new_past(self) -> Past:
        """Return an empty KV cache for this model."""
        numbers = range(1, self.config.layers + 1)
        return Past(self.config.layers, self.leading, [n for n in numbers if n not in self.config.attention_layers])

    def _block(self, layer: int) -> DecoderBlock | LinearBlock:
        if isinstance(self.config.mixer, DeltaMixer) and layer not in self.config.attention_layers:
            return LinearBlock(self.config, self.config.mixer)
        own = self.layer_configs[layer - 1]
        return DecoderBlock(own, self.distance if isinstance(own.position, Distance) else None, layer)

    def _must_be_read_again(self, past: Past, padding_B: Tensor | None) -> bool:
        """Return True if the cached tokens must be recomputed.

        This is the case if the cache of a model with linear attention was cropped, if the padding has changed, or if
        the cached tokens do not contain the whole prefix of a prefix mask.
        """
        seen, shared = past.get_seq_length(), self.config.shared_tokens
        if not seen or past.forgotten:
            return past.forgotten
        if padding_B is None:
            return seen < shared
        before_B = torch.zeros_like(padding_B) if past.padding_B is None else past.padding_B
        if padding_B is not before_B and not torch.equal(padding_B, before_B):
            return True
        return shared > 1 and seen - int(padding_B.max()) < shared

    def _placed(self, x_BTE: Tensor, first: int, padding_B: Tensor | None) -> Tensor:
        """Add sinusoidal or learned positional embeddings, if any; `first` is the first token's index in the row."""
        _, T, E = x_BTE.shape
        end = first + T
        if isinstance(self.config.position, Absolute):
            theta, dtype = self.config.position.theta, accumulate_dtype(x_BTE.dtype)
            table = sinusoid(end, E, theta, x_BTE.device, dtype).to(x_BTE.dtype)
        elif self.position_table is None:
            return x_BTE
        else:
            table, longest = self.position_table, end if padding_B is None else end - int(padding_B.min())
            if len(table) < longest:
                raise InputError(
                    f"{longest} tokens, but the learned positional embeddings end at model.context {len(table)}: "
                    "use shorter sequences, or train with a longer context"
                )
        if padding_B is None:
            return x_BTE + table[first:end]
        at_T = torch.arange(first, end, device=x_BTE.device)
        return x_BTE + table[(at_T - padding_B[:, None]).clamp(min=0)]

    def _documents(self, tokens_BT: Tensor, padding_B: Tensor | None) -> Tensor | None:
        """Return the document IDs (see `LayerInputs`); None without a document mask. An EOS ends its document."""
        masks = (kind.attention.mask for kind in self.config.layer_kinds)
        mask = next((mask for mask in masks if mask.kind == "document"), None)
        if mask is None:
            return None
        if padding_B is not None:
            at_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            tokens_BT = tokens_BT.gather(1, (at_T + padding_B[:, None]).clamp(max=len(at_T) - 1))
        ends_BT = (tokens_BT == mask.eos_id).long()
        return F.pad(ends_BT.cumsum(1) - ends_BT, (self.leading, 0))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Compute the next-token logits, (B, T, V)."""
        return self.head(self.hidden(tokens_BT))

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Compute the mean next-token loss over targets 2 .. T, in nats per token (scalar). Padding is not supported.

        Under a prefix mask, targets begin at `config.first_target`.
        """
        first = self.config.first_target - 1
        hidden_BTE = self.hidden(tokens_BT[:, :-1])[:, first - 1 :]
        return next_token_loss(hidden_BTE.flatten(0, 1), self.head.weight, tokens_BT[:, first:].flatten())

    def losses(self, tokens_BT: Tensor, added: AddedLosses) -> Tensor:
        """Return the next-token loss in nats per token and the weighted auxiliary losses, (1 + number of terms,).

        Training minimises their sum.
        """
        outputs: list[Tensor] = []

        def observe(block: nn.Module, inputs: object, output: Tensor) -> None:
            outputs.append(output)

        with ExitStack() as observed:
            for block in self.blocks if added.terms else ():
                observed.callback(block.register_forward_hook(observe).remove)
            loss = self.loss(tokens_BT)
        return torch.stack([loss, *(term.of(outputs).to(loss.dtype) for term in added.terms.values())])
