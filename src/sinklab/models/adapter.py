"""`Adapter`: common interface to sinklab and Hugging Face causal language models in memory.

`NativeAdapter` is that of a sinklab transformer, which may be inside a SinklabForCausalLM.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from sinklab.attention import masks
from sinklab.attention.config import CausalMask
from sinklab.attention.layer_call import AttentionCore, LayerCall, ShiftRope
from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.attention.operations import Softmax
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError, SinklabError
from sinklab.model.block import Attention
from sinklab.model.config import ModelConfig
from sinklab.model.loss import next_token_loss
from sinklab.model.position import Absolute, Learnable, PositionKind, Rotary, frequencies, rotate, rotate_first
from sinklab.model.transformer import Transformer, check_on_one_device
from sinklab.model.values import OutputGating, ValueGating, ValueScaling
from sinklab.models.families import OTHER_HEAD, LayerKinds, family_of
from sinklab.models.hooks import NO_BLOCKS, NO_CACHE, Compute, Edit, FirstColumns, hooked, intercept
from sinklab.models.memory_budget import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter


class NativeAdapter:
    """`Adapter` of a sinklab transformer; see `Adapter` for the attributes."""

    dispatches, quantised = True, None

    def __init__(self, model: Transformer) -> None:
        config, first = model.config, next(model.parameters())
        self.module, self.device, self.dtype = model, first.device, first.dtype
        self.blocks: Sequence[nn.Module] = list(model.blocks)
        self.cores: list[AttentionCore] = [block.attention.core for _, block in self._attending()]
        numbers = range(1, config.layers + 1)
        linear = tuple(number for number in numbers if number not in config.attention_layers)
        self.kinds = LayerKinds(config.layers, config.attention_layers, linear)
        self.has_head = True
        self.leading, self.first_target = model.leading, config.first_target
        self.context = self.limit = config.context
        self.attention_layers, self.heads = len(self.cores), config.heads
        post = config.norm.placement == "post"
        norms = [norm for one in model.blocks for norm in (one.attention_norm, one.ffn_norm) if post]
        self.post_norms: Sequence[nn.Module] = cast("list[nn.Module]", norms)
        self.proxy = any(core.proxy for core in self.cores)
        ends = config.position.kind == "learnable"
        self.position_table: Tensor | None = model.position_table
        self.ends = f"its learned positional embeddings end at {config.context}" if ends else None

    def check(self, tokens_NT: Tensor, longest: int, lengths: Sequence[int]) -> None:
        """Check that the sequences and all `lengths` can be measured in one forward pass.

        In a sinklab transformer, sequences must fit in the context, and the shortest of `lengths` must contain the
        whole prefix of a prefix mask.

        Args:
            tokens_NT: token ids, not checked here.
            longest: length of the longest sequence, without padding.
            lengths: additional lengths to which the sequences are truncated, increasing.

        Raises:
            InputError: if the sequences are too long, or the shortest of `lengths` is too short.
        """
        shared = self.module.config.shared_tokens
        if lengths and lengths[0] < shared:
            raise InputError(
                f"lengths {list(lengths)}: under the prefix mask the first {shared} tokens attend to each other, so "
                f"truncating them changes the attention: use lengths of at least {shared}"
            )

    def read(
        self,
        tokens_BT: Tensor,
        real: RealTokens,
        first_target: int | None,
        paused: AbstractContextManager[None],
    ) -> tuple[Tensor, int]:
        """Run one forward pass; return the loss summed over targets, in nats, and the number of targets.

        The loss is a float64 scalar on the model's device, which avoids synchronisation. Loss and number are 0 if there
        are no targets. For sinklab transformers, the sequences must not have padding.

        Args:
            tokens_BT: token ids (B, T).
            real: real tokens of the batch; a target counts if it and the token before it are real. Not used here.
            first_target: 1-based position of the first target. Targets inside the prefix of a prefix mask never count.
                None skips the loss and the logits.
            paused: context manager that is entered while only the LM head runs. Not used here.
        """
        hidden_BTE = self.hidden(tokens_BT)
        nothing = hidden_BTE.new_zeros((), dtype=torch.float64), 0
        if first_target is None:
            return nothing
        first = max(first_target, self.first_target) - 1
        hidden_BTE, targets_BT = hidden_BTE[:, first - 1 : -1], tokens_BT[:, first:]
        if not targets_BT.numel():
            return nothing
        mean = next_token_loss(hidden_BTE.flatten(0, 1), self.module.head.weight, targets_BT.flatten())
        return mean.double() * targets_BT.numel(), targets_BT.numel()

    def run(self, tokens_BT: Tensor) -> None:
        """Run one forward pass of whole sequences, only for its hooks and observers."""
        self.hidden(tokens_BT)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Compute the input of the LM head, (B, T, E) with hidden size E, without learned leading tokens."""
        return self.module.hidden(tokens_BT)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Compute logits (R, vocabulary) from R inputs of the LM head (R, E), in float32 (float64 for float64)."""
        logits_RV = self.module.head(hidden_RE)
        return logits_RV.to(accumulate_dtype(logits_RV.dtype))

    def sizes(self, matrices: bool) -> Sizes:
        """Return the sizes of the tensors in a forward pass.

        Args:
            matrices: whether the model computes whole attention matrices. Not used here.
        """
        config = self.module.config
        return Sizes(config.width, config.ffn_width, config.layers, config.heads)

    def notes(self) -> list[str]:
        """Return notes on the model, shown with results besides `kinds.notes()`; empty for sinklab transformers."""
        return []

    def check_causal(self, tokens_T: Tensor | None = None) -> None:
        """Check that no token attends to later ones; a sinklab transformer does so only in the prefix of its mask.

        Args:
            tokens_T: tokens on which a Hugging Face model is run, of which the first 8 are used; None for any tokens.

        Raises:
            SinklabError: if a later token changes the output of a Hugging Face model at an earlier one, or its
                attention function does not compute softmax attention.
        """

    def inseparable(self) -> str | None:
        """Return the reason why attention calls cannot be edited or replaced; None if they can be.

        To find out, Hugging Face models are run on a few tokens.
        """
        if all(kind.attention.mask.kind != "prefix" for kind in self.module.config.layer_kinds):
            return None
        return "under its prefix mask queries see later tokens, which a KV cache does not contain"

    def position_kind(self) -> PositionKind:
        """Return the kind of the positional embedding.

        The kind determines which of the propositions of 2410.10781 on repeated tokens applies to the model.

        Raises:
            InputError: if the layers do not all have the same causal softmax attention without biases, sink logits or
                sink tokens and the same positional embedding, or if the blocks or the positional embedding of a Hugging
                Face model are not recognised.
        """
        config = self.module.config
        alike, *others = config.layer_kinds
        attention = alike.attention
        plain = attention.operation == Softmax() and attention.bias.kind == "none" and attention.mask == CausalMask()
        if not plain or others or len(config.attention_layers) < config.layers:
            raise InputError(
                "the paper's propositions require causal softmax attention without biases or sink tokens, the same in "
                "every layer"
            )
        return alike.position.kind

    def distance_terms(self, length: int) -> Tensor:
        """Return the relative position bias of every head at distances 0 .. length - 1: (H, length); 0 without one."""
        distance = self.module.distance
        return torch.zeros(self.heads, length) if distance is None else distance.terms(length)

    @contextmanager
    def first_columns(self) -> Iterator[FirstColumns]:
        """Yield a function that returns the column of each sequence's first real token in the current forward pass.

        Left padding and learned leading tokens precede this column.

        Raises:
            InputError: in a forward pass of a Hugging Face model, if the attention mask is not a padding mask.
            SinklabError: in a forward pass, if a KV cache with tokens is passed.
        """
        padding_B: Tensor | None = None

        def entering(_: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal padding_B
            _, inputs, *past = args
            if any(cached is not None for layer in past for cached in vars(layer).values()):
                raise SinklabError(NO_CACHE)
            padding_B = inputs.padding_B

        def columns(like: Tensor) -> Tensor:
            first_B = like.new_full((len(like),), self.leading, dtype=torch.long)
            return first_B if padding_B is None else first_B + padding_B.to(like.device)

        with hooked([self.blocks[0].register_forward_pre_hook(entering)]):
            yield columns

    def without_first_keys(self, n: int) -> AbstractContextManager[Any]:
        """Hide keys 1 .. n of each sequence from all later queries, in every attention layer in the `with` block."""
        return intercept(self, edit=lambda layer: layer.changed(mask=masks.without_first(layer.call.mask, n)))

    def depends_on_length(self, short: int, long: int) -> bool:
        """Return True if the hidden states of the first `short` tokens are different in a sequence of `long` tokens.

        Always False for sinklab transformers. Under a prefix mask, tokens of the prefix see later tokens, but
        `inseparable` returns a reason for such models.
        """
        return False

    def fixed_positions(self) -> str | None:
        """Return the reason why keys in a KV cache cannot be rotated to other positions; None if they can be.

        To find out, Hugging Face models are run on a few tokens.
        """
        position = self.module.config.position
        if isinstance(position, Learnable | Absolute):
            return f"its {position.kind} positional embeddings are added to the token embeddings"
        return None

    def summed_loss(self, tokens_BT: Tensor, first_target: int) -> tuple[Tensor, int]:
        """Return the differentiable loss of whole sequences, summed over targets in nats, and the number of targets.

        Args:
            tokens_BT: token ids (B, T), without padding.
            first_target: 1-based position of the first target.
        """
        return self.read(tokens_BT, real_tokens(torch.ones_like(tokens_BT)), first_target, nullcontext())

    def attention_inputs(self, change: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
        """Replace the input x_BTE of every attention layer by `change(index, x_BTE)` in the `with` block.

        `index` counts the attention layers from 1. In a sinklab transformer, x_BTE includes learned leading tokens.

        Raises:
            InputError: if a sinklab transformer is post-norm or compiled; for Hugging Face models, see
                `HuggingFaceAdapter.attention_inputs`.
        """
        if self.post_norms:
            raise InputError(
                "gradients are defined at the norm before attention, and a post-norm model has no norm there: leave "
                "out the gradients"
            )
        if any(_is_compiled(block) for block in self.blocks):
            raise InputError("the model is compiled and ignores hooks: reload the run to measure gradients")
        return hooked(
            block.attention_norm.register_forward_hook(lambda _, __, x_BTE, index=index: change(index, x_BTE))
            for index, block in self._attending()
        )

    def _attending(self) -> Iterator[tuple[int, Any]]:
        return enumerate((block for block in cast("list[Any]", self.blocks) if hasattr(block.attention, "core")), 1)

    def gated(self, receive: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Call `receive(index, gates_BHTX)` for every gated attention layer in each forward pass of the `with` block.

        `index` counts the attention layers from 1. The gates have values from 0 to 1 and scale the attention output or
        the values. H is the number of query heads, and X the number of gates per head: one, or one per channel. Gates
        of a KV head are repeated for each of its query heads.

        Gates of attention operations, such as forget gates, are not included. Compiled blocks ignore hooks, so
        `receive` is not called for them.
        """

        def read(index: int, gate: OutputGating | ValueGating | ValueScaling, args: tuple[Tensor, ...]) -> None:
            gates_BGTX = gate.gates(args[-1])
            receive(index, gates_BGTX.repeat_interleave(self.heads // gates_BGTX.shape[1], 1))

        return hooked(
            gate.register_forward_hook(lambda gate, args, _, index=index: read(index, gate, args))
            for index, block in self._attending()
            for gate in (block.attention.output_gate, block.attention.value_gate)
            if gate is not None and not _is_compiled(block)
        )

    @contextmanager
    def intercepted(
        self, compute: Compute, edit: Edit = lambda layer: layer, unchanged: bool = False
    ) -> Iterator[None]:
        """Edit every attention call in the `with` block, then compute its output (see `intercept`).

        With `unchanged`, the attention functions of a Hugging Face model are called instead of sinklab's, so that the
        output of an unedited call remains the same bit for bit. This also holds for functions that are not
        transformers' own. A forward pass then raises SinklabError if a function does not compute softmax attention. A
        sinklab transformer computes the same output in any case.
        """
        config = self.module.config

        def through(attention: Attention, index: int, shift: ShiftRope | None, layer: LayerCall) -> Tensor:
            layer = edit(replace(layer, index=index, shift_rope=shift))
            attention.edited_mask = layer.call.mask if attention.needs_one_key_mask else None
            return compute(layer)

        attending = [(index, block.attention) for index, block in self._attending()]
        try:
            for (index, attention), layer in zip(attending, config.attention_layers, strict=True):
                shift = shift_rope(config.of_layer(layer))
                attention.core.call_handler = partial(through, attention, index, shift)
            yield
        finally:
            for _, attention in attending:
                attention.core.call_handler = attention.edited_mask = None


def _is_compiled(block: Any) -> bool:
    return bool(set(block.compiled_parts) & vars(block).keys())


def shift_rope(config: ModelConfig) -> ShiftRope | None:
    """Return a function (x_BHLD, by_L) that shifts the RoPE positions of queries or keys; None if there is no RoPE.

    Token l is shifted by by_L[l] positions. Only the channels that have RoPE are rotated, for example those of the
    separate rotary part in MLA.

    Args:
        config: config of the layer (`ModelConfig.of_layer`).
    """
    if not isinstance(config.position, Rotary):
        return None
    theta, key_width, width = config.position.theta, config.key_width, config.rotary_width

    def shift(x_BHLD: Tensor, by_L: Tensor) -> Tensor:
        dtype = accumulate_dtype(x_BHLD.dtype)
        angle_LC = by_L.to(x_BHLD.device, dtype)[:, None] * frequencies(width, theta, x_BHLD.device, dtype)
        cos_L1C, sin_L1C = angle_LC.cos()[:, None], angle_LC.sin()[:, None]
        if config.latent is None:
            return rotate_first(x_BHLD.unflatten(-1, (-1, key_width)), cos_L1C, sin_L1C).flatten(-2)
        still, turned = x_BHLD.unflatten(-1, (-1, key_width)).split((key_width - width, width), dim=-1)
        return torch.cat((still, rotate(turned, cos_L1C, sin_L1C)), dim=-1).flatten(-2)

    return shift


def own_transformer(model: Any) -> Transformer | None:
    """Return the sinklab transformer that a model is or contains; None for other models.

    If the model was loaded with its exported code (`trust_remote_code`), the class of its transformer is defined there.
    The result is then a copy of the transformer with sinklab's class, in evaluation mode.

    Raises:
        InputError: if its weights are on several devices or on the meta device.
    """
    if isinstance(model, Transformer):
        held = model
    else:
        held = (
            getattr(model, "transformer", None) if isinstance(model, nn.Module) and family_of(model).exported else None
        )
    if not isinstance(held, nn.Module):
        return None
    check_on_one_device(held)
    if isinstance(held, Transformer):
        return held
    first = next(held.parameters())
    own = Transformer(ModelConfig.model_validate(cast("Any", model.config).model)).to(first.device, first.dtype)
    own.load_state_dict(held.state_dict())
    return own.eval()


LanguageModel: TypeAlias = "PreTrainedModel | Transformer"
"""A Hugging Face causal language model, or a sinklab transformer."""


Adapter: TypeAlias = "NativeAdapter | HuggingFaceAdapter"
"""Common interface to a causal language model. Both classes have the same methods; `NativeAdapter` documents them.

Attributes:
    module: the wrapped model.
    device: device of the input tokens.
    dtype: dtype of the weights.
    blocks: decoder blocks in order; empty if they cannot be found, are used several times in a forward pass, or have
        several residual streams.
    kinds: layer numbers by kind (`LayerKinds`).
    attention_layers: number of layers with attention. For a Hugging Face model without softmax attention, reading this
        attribute raises SinklabError.
    heads: number of query heads per layer. A model whose layers differ in it is probed but not measured.
    leading: number of learned tokens (a sink token or registers) that the model adds before every sequence.
    first_target: 1-based position of the first target: 2, or the first after the prefix of a prefix mask.
    post_norms: norms of a post-norm sinklab transformer, two per block; empty for other models.
    quantised: quantisation method of the weights; None without one, and for dequantised GGUF weights.
    has_head: False for a Hugging Face model without an LM head (AutoModel), which is measured without a loss.
    proxy: True if importance is computed from proxy scores, because the attention weights of a layer do not sum to one.
    dispatches: True if attention calls can be intercepted; otherwise attention is measured from the matrices that the
        model returns. Reading this attribute may run a Hugging Face model once.
    context: context length in tokens; 2,048 if the config of a Hugging Face model has none.
    limit: maximum number of tokens of a sequence; None if there is none.
    position_table: learned positional embeddings (positions, hidden size): the weight, or a view of it without unused
        rows (the first two in OPT). Row 0 is position 1. None if the model has none.
    ends: reason why sequences beyond `context` are impossible; None if they are possible.
"""


WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Attributes with the wrapped model, by class name: torch.compile, and PyTorch's data parallelism."""


def unwrapped(model: Any) -> Any:
    """Return the model in a wrapper of PyTorch (`WRAPPERS`) or peft (`PeftModel`); any other object unchanged."""
    while (inner := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, inner)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return unwrapped(model.get_base_model())
    return model


def adapt(model: LanguageModel) -> Adapter:
    """Return the `Adapter` of a sinklab or Hugging Face model; for a SinklabForCausalLM, that of its transformer.

    A compiled model, or one in a wrapper of peft or of data parallelism, has the adapter of the model inside
    (`unwrapped`).

    Raises:
        InputError: if `model` is neither, its weights are on the meta device, or a sinklab model is on several devices.
    """
    model = unwrapped(model)
    own = own_transformer(model)
    if own is not None:
        adapter = NativeAdapter(own)
    else:
        check_causal_lm(model)
        from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

        adapter = HuggingFaceAdapter(cast("PreTrainedModel", model))
    if adapter.device.type == "meta":
        raise InputError("the model has no weights (they are on the meta device): load them first")
    return adapter


def residual_blocks(adapter: Adapter) -> Sequence[nn.Module]:
    """Return the decoder blocks of a model.

    Raises:
        SinklabError: if a Hugging Face model has several residual streams, uses blocks several times in a forward pass,
            or has no module list with one entry per layer.
    """
    if not adapter.blocks:
        raise SinklabError(
            f"the residual stream of a {cast('PreTrainedModel', adapter.module).config.model_type!r} model cannot be "
            f"read or changed: {NO_BLOCKS}"
        )
    return adapter.blocks


def check_causal_lm(model: Any) -> None:
    """Check that the argument is a Hugging Face model.

    Raises:
        InputError: if `model` is anything else. The message contains the start of a string, or the type of another
            object.
    """
    if isinstance(model, str):
        raise InputError(
            f"the model is a string, {model[:80]!r}: load it first with AutoModelForCausalLM.from_pretrained, or pass "
            "the name to `sinklab measure`"
        )
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"the model is {type_text(model)}: expected a Hugging Face causal language model, as "
            "AutoModelForCausalLM.from_pretrained returns it, or a sinklab transformer. If it wraps one, pass that; "
            "record the attention of any other module, such as TransformerLens's, with sinklab.watch_attention"
        )
    if OTHER_HEAD.search(type(model).__name__):
        raise InputError(
            f"the model is a {type(model).__name__}, which has another head than a language model: pass its layers "
            "alone, model.base_model, which are measured without a loss"
        )


def type_text(thing: Any) -> str:
    """Return the type of an object as text: `of type list` or `of type numpy.ndarray`."""
    kind = type(thing)
    return f"of type {kind.__name__}" if kind.__module__ == "builtins" else f"of type {kind.__module__}.{kind.__name__}"


def check_length(length: int, limit: int | None) -> None:
    """Check that sequences of `length` tokens are at most as long as `Adapter.limit`.

    Raises:
        InputError: if they are longer; the message states the limit.
    """
    if limit is not None and length > limit:
        raise InputError(
            f"sequences of {length} tokens are beyond the model's context of {limit}: use --length {limit} or "
            "less, or truncate the tokens"
        )
