"""Adapter of a loaded model to lm-eval: answers are saved, context and ending tokenized jointly, and BOS kept.

lm-eval's own transformers model handles tokens, batches, log-softmax and sums. docs/eval.md lists the
differences from its defaults.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]  # an extra

from sinklab.jobs.ledger import LineLedger
from sinklab.opening import Model

SAVED_BATCHES = 8
"""Batches between two writes of answers."""

ModelAnswer = tuple[float, bool] | float | str
"""A log-likelihood and whether greedy decoding gives the text, a log-likelihood alone, or a text."""


class AnsweringModel(HFLM):
    """A transformers model for lm-eval with saved answers.

    Args:
        answers: ledger of answers by request; saved answers are reused.
        advance: called with the number of requests answered.
    """

    def __init__(self, model: Model, batch_size: int, answers: LineLedger, advance: Callable[[int], None]) -> None:
        super().__init__(
            pretrained=model.module,
            tokenizer=model.tokenizer,
            backend="causal",
            batch_size=batch_size,
            softmax_dtype="float32",
            logits_cache=False,  # it shares logits among texts in which the answer begins at different tokens
        )
        self._prefix = list(model.special)
        self._answers, self._advance = answers, advance

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Log-likelihood of each continuation, and whether greedy decoding gives it."""
        return self._answered("loglikelihood", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Log-likelihood of each text."""
        return self._answered("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """The text generated after each context."""
        return self._answered("generate_until", requests, super().generate_until)

    def overlong(self, context: str, continuation: str) -> bool:
        """Whether the continuation leaves no room for a context token in the model's context."""
        _, answer = self._split(context, continuation) if context else ([], self.tok_encode(continuation))
        return len(answer) + len(self._prefix) > self.max_length

    def cuts(self, context: str, continuation: str) -> bool:
        """Whether the start of the context is truncated."""
        return bool(context) and sum(map(len, self._split(context, continuation))) > self.max_length + 1

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode context and continuation; a context that is too long keeps its special tokens and its last tokens."""
        before, after = self._split(context, continuation)
        room, special = self.max_length + 1 - len(after), len(self._prefix)
        if len(before) > room and before[:special] == self._prefix:
            before = [*self._prefix, *before[len(before) - (room - special) :]]
        return before, after

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize both as one text, and split after the tokens shared with the context alone.

        lm-eval splits after as many tokens as the context alone has, which loses words of the continuation if a token
        spans the end of the context.
        """
        before, after = super()._encode_pair(context, continuation)
        whole = self.tok_encode(context + continuation)
        if [*before, *after] == whole:
            return before, after
        shared = next((at for at, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return whole[: max(shared, 1)], whole[max(shared, 1) :]

    def _answered(self, kind: str, requests: Sequence[Any], ask: Callable[..., list[ModelAnswer]]) -> list[ModelAnswer]:
        keys = [request_key(kind, request.args) for request in requests]
        missing = {key: one for key, one in zip(keys, requests, strict=True) if self._answers.get(key) is None}
        self._advance(sum(key not in missing for key in keys))
        order, size = sorted(missing, key=lambda key: -len(str(missing[key].args))), self.batch_size * SAVED_BATCHES
        for start in range(0, len(order), size):
            part = order[start : start + size]
            self._answers.add(dict(zip(part, ask([missing[key] for key in part], disable_tqdm=True), strict=True)))
            self._advance(len(part))
        answers = [self._answers.get(key) for key in keys]
        return [tuple(answer) if isinstance(answer, list) else answer for answer in answers if answer is not None]


def request_key(kind: str, arguments: Iterable[object]) -> str:
    """The SHA-256 of a request."""
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True).encode()).hexdigest()
