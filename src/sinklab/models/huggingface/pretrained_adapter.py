"""`Adapter` of a Hugging Face causal language model."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.layer_call import LayerCall, ShiftRope
from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError, SinklabError, cause, is_out_of_memory
from sinklab.model.position import PositionKind, alibi_terms
from sinklab.models import families
from sinklab.models.families import (
    ROTARY_CLASS,
    ROTARY_EMBEDDING,
    SINK_LOGITS,
    alibi_exponent,
    family_of,
    looped_layers,
    ranges_text,
    text_config,
    weights_quantised,
)
from sinklab.models.hooks import (
    CACHE,
    NO_BLOCKS,
    NO_CACHE,
    Compute,
    Edit,
    FirstColumns,
    evaluating,
    forward_pass_hooks,
    forward_signature,
    hooked,
    intercept,
    named_arguments,
    replaced_inputs,
    residual_stream,
)
from sinklab.models.huggingface.forward_passes import (
    GateLayout,
    HiddenKeys,
    attention_modules,
    find_gates,
    fixed_output,
    forward_loss,
    has_piecewise_logits,
)
from sinklab.models.huggingface.interface import (
    OwnAttention,
    attention_computed_by,
    foreign_attention,
)
from sinklab.models.memory_budget import Sizes, sizes_of_pretrained

UNFUSED = ("eager", "sdpa")  # attention implementations that run on every device
TRIED = 8  # tokens of trial forward passes
NOT_CAUSAL = 0.1  # relative change of hidden states by a later token, in square roots of the dtype's epsilon
MOVED = 5  # number of positions by which a trial shifts queries
_dispatch: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


class HuggingFaceAdapter:
    """`Adapter` of a Hugging Face model. `NativeAdapter` documents the methods in full."""

    leading, first_target = 0, 2
    post_norms: Sequence[nn.Module] = ()
    proxy = False

    def __init__(self, model: PreTrainedModel) -> None:
        """Build the adapter.

        Raises:
            SinklabError: if the model has several stacks of layers (BLT) or several tokens per position (MusicGen).
        """
        layered = hasattr(text_config(model.config), "num_hidden_layers")
        if not layered or isinstance(model.get_input_embeddings(), nn.ModuleList):
            raise SinklabError(
                "models with several stacks of layers (BLT) or several tokens per position (MusicGen) cannot be "
                f"measured, and the model type {model.config.model_type!r} is one of them"
            )
        self.module, self.dtype, self.device = model, model.dtype, families.input_device(model)
        self.blocks: Sequence[nn.Module] = (
            families.decoder_blocks(model) if families.has_one_stream(model.config) else []
        )
        self.kinds = families.layer_kinds(model.config)
        self.position_table = table = families.learned_positions(model)
        text = text_config(model.config)
        given = len(table) if table is not None else getattr(text, "max_position_embeddings", None)
        self.context = int(given or 2048)
        self.quantised = weights_quantised(model)
        self.ends = None if table is None else f"its learned positional embeddings end at {len(table)}"
        self.has_head = model.base_model is not model or model.get_output_embeddings() is not None
        self._unmoved = frozenset[int]()  # 1-based indices of attention layers without RoPE; set by `fixed_positions`
        self._gate_notes: list[str] = []  # set by `gated`

    @property
    def attention_layers(self) -> int:
        return families.attention_layers(self.module.config)

    @property
    def heads(self) -> int:
        return text_config(self.module.config).num_attention_heads

    @property
    def dispatches(self) -> bool:
        """True if all attention layers use the `AttentionInterface` of transformers.

        If the model's class does not declare it, the model is run once on two tokens.
        """
        model, calls = self.module, 0

        def count(layer: LayerCall) -> Tensor:
            nonlocal calls
            calls += 1
            return layer.own_output()

        if model not in _dispatch and getattr(model, "_supports_attention_backend", False):
            _dispatch[model] = True
        if model not in _dispatch:
            try:
                with evaluating(model), self.intercepted(count):
                    model(torch.zeros(1, 2, dtype=torch.long, device=self.device), use_cache=False)
            except (AttributeError, KeyError, TypeError):
                if calls:
                    raise
            _dispatch[model] = calls == self.attention_layers
        return _dispatch[model]

    @property
    def limit(self) -> int | None:
        return families.context_limit(self.module.config)

    def check(self, tokens_NT: Tensor, longest: int, lengths: Sequence[int]) -> None:
        """Check token ids and sequence length, and that all `lengths` can be measured in one forward pass.

        Raises:
            InputError: if a token id is outside the vocabulary, the sequences are too long, or the RoPE scaling differs
                between the length of the sequences and one of `lengths`.
        """
        vocabulary, T = families.vocabulary_size(self.module), tokens_NT.shape[1]
        low, high = int(tokens_NT.min()), int(tokens_NT.max())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens: "
                "use the tokenizer of this model"
            )
        for length in lengths:
            if self.depends_on_length(length, T):
                raise InputError(
                    "the model's RoPE scaling depends on the sequence length and differs between "
                    f"{T} and {length} tokens, so one pass cannot measure both: measure {length} separately"
                )

    def read(
        self,
        tokens_BT: Tensor,
        real: RealTokens,
        first_target: int | None,
        paused: AbstractContextManager[None],
    ) -> tuple[Tensor, int]:
        """Run one forward pass; return loss and number of targets. The loss is on the CPU; padding is on the right."""
        arguments: dict[str, Any] = {"attention_mask": real.mask_BT.long()} if real.padded else {}
        if first_target is None:
            self.run(tokens_BT, **arguments)
            return torch.zeros((), dtype=torch.float64), 0
        loss, targets = forward_loss(
            self.module,
            tokens_BT,
            real.from_position(first_target - 1),
            arguments={"use_cache": False, **arguments},
            paused=paused,
        )
        return torch.tensor(loss, dtype=torch.float64), targets

    def run(self, tokens_BT: Tensor, **arguments: Any) -> None:
        """Run one forward pass; if the model supports it, the logits of only one position are computed."""
        few = {"logits_to_keep": 1} if has_piecewise_logits(self.module) else {}
        self.module(tokens_BT, use_cache=False, **arguments, **few)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        return self.module.base_model(tokens_BT, use_cache=False).last_hidden_state

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Compute logits by the model's own code (LM head, scaling, softcap)."""
        answer = dataclasses.replace(self._body_output, last_hidden_state=hidden_RE[None])
        with ExitStack() as stack:
            for body in families.bodies(self.module):
                stack.enter_context(fixed_output(body, answer))
            tokens_1R = torch.zeros(1, len(hidden_RE), dtype=torch.long, device=self.device)
            logits_RV = self.module(tokens_1R, use_cache=False).logits[0]
        return logits_RV.to(accumulate_dtype(logits_RV.dtype))

    @cached_property
    def _body_output(self) -> Any:
        return self.module.base_model(self._some_tokens()[:, :1], use_cache=False)

    def sizes(self, matrices: bool) -> Sizes:
        logits = not has_piecewise_logits(self.module)
        return sizes_of_pretrained(self.module.config, matrices=matrices, logits=logits)

    def notes(self) -> list[str]:
        """Return notes on quantised weights, on repeated layers and, after `gated`, on gates of an unknown kind."""
        notes = list[str]()
        if not self.has_head:
            notes.append("no loss: the model has no LM head")
        if self.quantised:
            notes.append(f"the weights are quantised ({self.quantised}); dtype is that of the other weights")
        elif families.quantisation(self.module.config):
            notes.append("the weights come from a gguf file and are dequantised")
        repeated, passes = looped_layers(text_config(self.module.config))
        if passes > 1:
            numbered = ranges_text([n + 1 for n in repeated])
            notes.append(f"layers {numbered} are used {passes} times in a forward pass: each use counts as a layer")
        return [*notes, *self._gate_notes]

    def check_causal(self, tokens_T: Tensor | None = None) -> None:
        """Replace the last of a few tokens, and check that the hidden states at the others remain the same.

        The hidden states are those after the last block; the output of the model if its blocks cannot be found. The
        model's own attention functions are called and compared with softmax attention. If transformers' function for a
        fused kernel fails, as on a device without the kernel, sinklab computes the attention.
        """
        given_T = self._some_tokens()[0] if tokens_T is None else tokens_T
        vocabulary = families.vocabulary_size(self.module)
        first_T = given_T[: min(TRIED, self.limit or TRIED)].to(self.device)
        if len(first_T) < 2 or vocabulary < 2:
            return
        other = next((token for token in first_T if token != first_T[-1]), (first_T[-1] + 1) % vocabulary)
        pair_2T = torch.stack((first_T, torch.cat((first_T[:-1], other[None]))))

        def states(unchanged: bool) -> Tensor:
            observed = intercept(self, observe=lambda layer: None, unchanged=unchanged)
            with (
                evaluating(self.module),
                observed if self.dispatches else nullcontext(),
                residual_stream(self.blocks, lambda hidden: hidden) as hidden,
            ):
                output = self.module(pair_2T, use_cache=False)[0]
            return hidden[-1] if hidden and len(hidden[-1]) == 2 else output

        try:
            state_BTC = states(unchanged=True)
        except Exception as error:  # kernels raise various exceptions
            if is_out_of_memory(error):
                return  # the measurement says what to do
            if self.module.config._attn_implementation in UNFUSED or foreign_attention(self.module):
                raise
            state_BTC = states(unchanged=False)
        state_BTC = state_BTC[:, : len(first_T) - 1].to(accumulate_dtype(state_BTC.dtype))
        difference = float(((state_BTC[0] - state_BTC[1]).norm(dim=-1) / state_BTC[0].norm(dim=-1)).max())
        if difference > NOT_CAUSAL * torch.finfo(self.dtype).eps ** 0.5:
            raise SinklabError(
                f"the {self.module.config.model_type!r} model is not causal: in a trial, another token at position "
                f"{len(first_T)} changed its hidden states at earlier positions (by {100 * difference:.2g} %), so it "
                "attends to later tokens, as diffusion language models and encoders do. Sinks are measured only in "
                "causal language models"
            )

    def inseparable(self) -> str | None:
        """Return why attention calls cannot be edited or replaced.

        They can be if the logits of a few tokens stay the same, up to rounding, with all attention calls intercepted
        and the LM head run separately.
        """
        why = self._why_inseparable()
        return why and (
            f"the attention of a {self.module.config.model_type!r} model cannot be replaced ({why}): assess a model "
            "that uses transformers' attention interface, such as those of the Llama family"
        )

    def _why_inseparable(self) -> str | None:
        if not self.blocks or self.module.base_model is self.module:
            return f"its LM head could not be found, or {NO_BLOCKS}"
        tokens_1T, calls = self._some_tokens(), 0

        def count(layer: LayerCall) -> Tensor:
            nonlocal calls
            calls += 1
            return layer.output()

        with evaluating(self.module):
            expected_RV = self.module(tokens_1T, use_cache=False).logits[0].float()
            try:
                with self.intercepted(count):
                    hidden_1TE = self.hidden(tokens_1T)
                if calls != self.attention_layers:
                    return f"{calls} of {self.attention_layers} layers use transformers' interface"
                given_RV = self.logits(hidden_1TE[0]).float()
            except (AttributeError, KeyError, TypeError, ValueError, IndexError, SinklabError) as error:
                return cause(error)  # raised by the model's code if it expects its own attention
        tolerance = max(1e-2, 8 * torch.finfo(self.dtype).eps)
        if (given_RV - expected_RV).abs().max() > tolerance * expected_RV.abs().max():
            return "its logits differ if attention is intercepted and the LM head runs separately"
        return None

    def position_kind(self) -> PositionKind:
        """Return the kind of the positional embedding: "learnable", "alibi" or "rotary".

        RoPE is not recognised if the model has sink logits or does not use transformers' attention interface.
        """
        if self.attention_layers == len(self.blocks):
            if self.position_table is not None:
                return "learnable"
            if family_of(self.module).alibi:
                return "alibi"
            rotary = any(type(part).__name__.endswith(ROTARY_CLASS) for part in self.module.modules())
            sink_logits = any(hasattr(part, SINK_LOGITS) for part in self.module.modules())
            if rotary and not sink_logits and self.dispatches:
                return "rotary"
        raise InputError(
            f"it is not known which of the paper's propositions covers a {self.module.config.model_type!r} model: the "
            "check requires attention without sink logits in every layer, and RoPE, ALiBi or learned positions"
        )

    def distance_terms(self, length: int) -> Tensor:
        if not family_of(self.module).alibi:
            return torch.zeros(self.heads, length)
        return alibi_terms(self.heads, length, alibi_exponent(self.module.config))

    @contextmanager
    def first_columns(self) -> Iterator[FirstColumns]:
        """Yield a function that returns the column of each sequence's first real token; see `NativeAdapter`.

        Raises:
            InputError: in a forward pass, if the attention mask is not a padding mask.
            SinklabError: in a forward pass, if a KV cache with tokens, or a static one, is passed.
        """
        first_B = None

        def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal first_B
            arguments = named_arguments(forward_signature(module), args, kwargs)
            cache, mask_BT = arguments[CACHE], arguments.get("attention_mask")
            static = getattr(cache, "is_compileable", False)  # has more keys than tokens
            if cache is not None and (static or cache.get_seq_length()):
                raise SinklabError(NO_CACHE)
            first_B = None if mask_BT is None else real_tokens(mask_BT).index_BR[:, 0]

        def columns(like: Tensor) -> Tensor:
            return like.new_zeros(len(like), dtype=torch.long) if first_B is None else first_B.to(like.device)

        with hooked(forward_pass_hooks({self.module, *families.bodies(self.module)}, entering)):
            yield columns

    @contextmanager
    def without_first_keys(self, n: int) -> Iterator[None]:
        """Hide keys 1 .. n from all later queries. Raises the errors of `first_columns` and `HiddenKeys`."""
        with self.first_columns() as columns, hooked(HiddenKeys(self.module, self.blocks, n, columns).register()):
            yield

    def depends_on_length(self, short: int, long: int) -> bool:
        """Return True if longrope or dynamic RoPE scaling differs between sequences of `short` and of `long` tokens.

        The conditions are those of transformers' `dynamic_rope_update`.
        """
        for rope in families.rotary_parameters(self.module.config):
            kind = rope.get("rope_type")
            if kind == "longrope" and short <= rope["original_max_position_embeddings"] < long:
                return True
            if kind == "dynamic" and long > text_config(self.module.config).max_position_embeddings:
                return True
        return False

    def fixed_positions(self) -> str | None:
        """Return why keys cannot be rotated: `shift_rope` must reproduce RoPE in every layer that has it.

        The numbers of the layers without RoPE are stored for `intercepted`.
        """
        shift = shift_rope(self.module)
        if shift is None:
            return "its layers have no common rotary embedding"
        tokens_1T = self._some_tokens()
        places_T = torch.arange(tokens_1T.shape[1], device=self.device)
        queries: list[list[Tensor]] = []

        def keep(layer: LayerCall) -> Tensor:
            queries[-1].append(layer.call.q_BHTD)
            return layer.output()

        # Hidden states depend only on distances, so queries at other positions differ only by their rotation.
        unlike = "its rotary embedding could not be reproduced in every layer"
        try:
            with evaluating(self.module), self.intercepted(keep):
                for moved in (0, MOVED):
                    queries.append([])
                    self.module.base_model(tokens_1T, position_ids=(places_T + moved)[None], use_cache=False)
            shifted = [shift(before, torch.full_like(places_T, MOVED)) for before in queries[0]]
        except (RuntimeError, ValueError):  # complex rotations (DeepSeek-V2), positions as indices (MiniMax-M3)
            return unlike
        unmoved = set[int]()
        for index, (before, after, expected) in enumerate(zip(*queries, shifted, strict=True), start=1):
            still, rotated = (float((one - after).abs().max()) for one in (before, expected))
            if min(still, rotated) > max(still, rotated) / 4:
                return unlike
            if still < rotated:
                unmoved.add(index)
        if len(unmoved) == len(queries[0]):
            return "its queries have no rotary embedding"
        self._unmoved = frozenset(unmoved)
        return None

    def _some_tokens(self) -> Tensor:
        vocabulary = families.vocabulary_size(self.module)
        return (torch.arange(TRIED, device=self.device) * 7 + 5)[None] % vocabulary

    def summed_loss(self, tokens_BT: Tensor, first_target: int) -> tuple[Tensor, int]:
        """Return the differentiable loss and the number of targets; all logits are computed at once."""
        logits_BTV, wanted_BT = self.module(tokens_BT, use_cache=False).logits, tokens_BT[:, first_target - 1 :]
        logits_NV = logits_BTV[:, first_target - 2 : -1].flatten(0, 1)
        exact_NV = logits_NV.to(accumulate_dtype(logits_NV.dtype))
        wanted_N = wanted_BT.to(logits_NV.device).flatten()
        return torch.nn.functional.cross_entropy(exact_NV, wanted_N, reduction="sum"), len(wanted_N)

    def attention_inputs(self, change: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
        """Replace the input x of every attention module; the model is run on a few tokens to find the modules.

        Raises:
            InputError: see `attention_modules`; also if the model does not use transformers' attention interface.
        """
        if not self.dispatches:
            raise InputError(
                f"the attention modules of a {self.module.config.model_type!r} model cannot be found, because it does "
                "not use transformers' attention interface: leave out the gradients"
            )
        return replaced_inputs(attention_modules(self.module, self._some_tokens()), change)

    def gated(self, receive: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Call `receive(index, gates_BHTX)` for gates on the attention output, found in a trial pass (`find_gates`).

        No gates are found if the model does not use transformers' attention interface, or is looped.
        """
        found: dict[int, GateLayout] = {}
        looped = looped_layers(text_config(self.module.config))[1] > 1
        if self.dispatches and not looped:
            found, self._gate_notes = find_gates(self.module, self.intercepted, lambda: self.run(self._some_tokens()))
        return hooked(
            one.linear.register_forward_hook(
                lambda _module, _inputs, output, n=n, one=one: receive(n, one.read(output))
            )
            for n, one in found.items()
        )

    @contextmanager
    def intercepted(
        self, compute: Compute, edit: Edit = lambda layer: layer, unchanged: bool = False
    ) -> Iterator[None]:
        shift, calls, own_attention = shift_rope(self.module), 0, None

        def entering(*_: Any) -> None:
            nonlocal calls
            calls = 0
            if own_attention is not None:
                own_attention.begin()

        def leaving(output: Any) -> None:
            if own_attention is not None and output is not None:
                own_attention.end()

        def attention(_: nn.Module, layer: LayerCall) -> Tensor:
            nonlocal calls
            calls += 1
            own = None if calls in self._unmoved else shift
            return compute(edit(dataclasses.replace(layer, index=calls, shift_rope=own)))

        if unchanged or foreign_attention(self.module):
            own_attention = OwnAttention(self.module, attention)
        handles = forward_pass_hooks({self.module, self.module.base_model}, entering, leaving)
        with (
            hooked(handles),
            attention_computed_by(self.module, attention) if own_attention is None else own_attention.installed(),
        ):
            yield


def shift_rope(model: PreTrainedModel) -> ShiftRope | None:
    """Return a function (x_BHLD, by_L) that shifts the RoPE positions of queries or keys (half-split RoPE).

    None unless the model has exactly one rotary embedding, shared by all layer types.
    """
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ROTARY_EMBEDDING]
    if len(found) != 1 or "layer_type" in forward_signature(found[0]).parameters:  # as in Gemma 3
        return None

    def shift(x_BHLD: Tensor, by_L: Tensor) -> Tensor:
        cos_1LR, sin_1LR = found[0](x_BHLD.float(), by_L[None].to(x_BHLD.device))
        cos_LR, sin_LR = cos_1LR[0].float(), sin_1LR[0].float()
        scale_LR = (cos_LR.square() + sin_LR.square()).sqrt()  # yarn and longrope multiply cos and sin by a factor
        turned, rest = x_BHLD[..., : cos_LR.shape[-1]].float(), x_BHLD[..., cos_LR.shape[-1] :]
        first, second = turned.chunk(2, -1)
        turned = (turned * cos_LR + torch.cat((-second, first), -1) * sin_LR) / scale_LR
        return torch.cat((turned.to(x_BHLD.dtype), rest), -1)

    return shift
