"""A Hugging Face causal language model taken apart: our function stands in for its attention."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.assessing.layers import Change, LayerAttention, Turn, as_it_is
from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.operations.call import Call
from sinklab.attention.operations.similarity import Softmax
from sinklab.errors import InputError, SinklabError, cause
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface import anatomy
from sinklab.models.huggingface.interface import attention_function, read_call

SOFTMAX = Softmax()
TRIED = 8  # tokens
Answer = TypeVar("Answer")


class ForeignPatient:
    """`layers.Patient` of a Hugging Face model.

    Raises:
        InputError: its attention cannot be taken apart.
    """

    leading, first_target = 0, 2

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.module, self.name, self.device = model, name, anatomy.input_device(model)
        self.blocks: Sequence[nn.Module] = anatomy.decoder_blocks(model)
        self.kinds, self._layers = anatomy.layer_kinds(model.config), anatomy.attention_layers(model.config)
        self._turn = _turning(model)
        self._number = 0
        text = model.config.get_text_config(decoder=True)
        table = anatomy.learned_positions(model)
        given = len(table) if table is not None else getattr(text, "max_position_embeddings", None)
        self.context = int(given or 2048)
        self.ends = None if table is None else f"its learned table of positions ends at {len(table)}"
        if not self.blocks or model.base_model is model:
            raise _inseparable(model, "its blocks or its head stand where none were found")
        self._try()
        self.fixed_positions = self._why_fixed()

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """All attention that the model passes through transformers' interface is computed by `change`."""

        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            scaling: float | None = None,
            **extras: Any,
        ) -> tuple[Tensor, None]:
            self._number += 1
            read = read_call(module, query, key, value, attention_mask, scaling, **extras).call
            assert read.scale is not None
            q_BHLD = query * (read.scale * query.shape[-1] ** 0.5)  # a call is scaled by 1 / sqrt(D)
            call = Call(q_BHLD, key, read.mask, position=read.position, logit_H=read.logit_H)
            out_BHLV = change(LayerAttention(self._number, SOFTMAX, call, value, self._turn))
            return out_BHLV.to(value.dtype).transpose(1, 2).contiguous(), None

        with attention_function(self.module, attention):
            yield

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The last hidden state of the model's body."""
        self._number = 0
        return self.module.base_model(tokens_BT, use_cache=False).last_hidden_state

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """By the model's own head, and whatever it does between body and logits."""
        answer = dataclasses.replace(self._answer, last_hidden_state=hidden_RE[None])
        with ExitStack() as stack:
            for body in anatomy.bodies(self.module):
                stack.enter_context(_answering(body, answer))
            tokens_1R = torch.zeros(1, len(hidden_RE), dtype=torch.long, device=self.device)
            logits_RV = self.module(tokens_1R, use_cache=False).logits[0]
        return logits_RV.to(accumulate_dtype(logits_RV.dtype))

    def _try(self) -> None:
        """Read a few tokens and compare with what the model itself makes of them."""
        tokens_1T = self._some_tokens()
        with evaluating(self.module):
            expected_RV = self.module(tokens_1T, use_cache=False).logits[0].float()
            self._answer: Any = self.module.base_model(tokens_1T[:, :1], use_cache=False)
            with self.changed(as_it_is):
                hidden_1TE = _unless_foreign(self.module, lambda: self.hidden(tokens_1T))
            if self._number != self._layers:
                raise _inseparable(self.module, f"{self._number} of {self._layers} layers use transformers' interface")
            given_RV = _unless_foreign(self.module, lambda: self.logits(hidden_1TE[0])).float()
        if (given_RV - expected_RV).abs().max() > 1e-2 * expected_RV.abs().max():
            raise _inseparable(self.module, "put together again, its logits are others")

    def _why_fixed(self) -> str | None:
        """None where `turn` moves the queries of the first layer from position 0 to where they stood."""
        if self._turn is None:
            return "it has no rotary embedding that turns queries and keys"
        tokens_1T = self._some_tokens()
        places_T = torch.arange(tokens_1T.shape[1], device=self.device)
        queries: list[Tensor] = []

        def watch(layer: LayerAttention) -> Tensor:
            if layer.number == 1:
                queries.append(layer.call.q_BHTD)
            return layer.output()

        with evaluating(self.module), self.changed(watch):
            for positions_T in (places_T, torch.zeros_like(places_T)):
                self._number = 0
                self.module.base_model(tokens_1T, position_ids=positions_T[None], use_cache=False)
        placed, bare = queries
        if torch.allclose(self._turn(bare, places_T), placed, rtol=1e-2, atol=1e-2 * float(placed.abs().max())):
            return None
        return "its rotary embedding is of a kind that is not known"

    def _some_tokens(self) -> Tensor:
        vocabulary = anatomy.vocabulary_size(self.module)
        return (torch.arange(TRIED, device=self.device) * 7 + 5)[None] % vocabulary


@contextmanager
def _answering(body: nn.Module, answer: Any) -> Iterator[None]:
    """The body gives this answer instead of running."""
    own = body.__dict__.get("forward")
    body.__dict__["forward"] = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if own is None:
            del body.__dict__["forward"]
        else:
            body.__dict__["forward"] = own


def _unless_foreign(model: PreTrainedModel, act: Callable[[], Answer]) -> Answer:
    """The code of a foreign model that is used otherwise than it expects can raise anything."""
    try:
        return act()
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, SinklabError) as error:
        raise _inseparable(model, cause(error)) from error


def _inseparable(model: PreTrainedModel, why: str) -> InputError:
    return InputError(
        f"the attention of a {model.config.model_type!r} model cannot be taken apart ({why}): assess a model that "
        "passes its attention through transformers' attention interface, such as those of the Llama family"
    )


def _turning(model: PreTrainedModel) -> Turn | None:
    """Half-split rotation of the first dimensions, as far as the model's one rotary embedding reaches."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if len(found) != 1:
        return None

    def turn(x_BHLD: Tensor, by_L: Tensor) -> Tensor:
        cos_LR, sin_LR = (table[0].float() for table in found[0](x_BHLD.float(), by_L[None].to(x_BHLD.device)))
        scale_LR = (cos_LR.square() + sin_LR.square()).sqrt()  # yarn and longrope lengthen what they turn
        turned, rest = x_BHLD[..., : cos_LR.shape[-1]].float(), x_BHLD[..., cos_LR.shape[-1] :]
        first, second = turned.chunk(2, -1)
        turned = (turned * cos_LR + torch.cat((-second, first), -1) * sin_LR) / scale_LR
        return torch.cat((turned.to(x_BHLD.dtype), rest), -1)

    return turn
