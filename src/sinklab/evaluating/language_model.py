"""Adapter from a loaded model to lm-eval, which saves the model's answers.

`AnsweringModel` is a subclass of lm-eval's HFLM. Unlike HFLM, it tokenizes prompt and continuation as one text, and
keeps BOS if a prompt is truncated (lm-eval calls the prompt `context`). docs/eval.md lists all differences.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]  # an extra

from sinklab.jobs.ledger import LineLedger
from sinklab.opening import Model

SAVED_BATCHES = 8
"""Number of batches after which answers are saved."""

ModelAnswer = tuple[float, bool] | float | str
"""(Log-likelihood, True if greedy decoding gives the continuation), a log-likelihood, or a generated text."""


class AnsweringModel(HFLM):
    """A Hugging Face model for lm-eval that saves its answers to requests and reuses them.

    `loglikelihood`, `loglikelihood_rolling` and `generate_until` raise SinklabError if answers cannot be saved.

    Args:
        model: loaded Hugging Face model.
        batch_size: requests per batch.
        answers: ledger of answers by `request_key`; saved answers are reused.
        advance: callback, called with the number of requests answered since its last call, including those with saved
            answers.
    """

    def __init__(self, model: Model, batch_size: int, answers: LineLedger, advance: Callable[[int], None]) -> None:
        super().__init__(
            pretrained=model.module,
            tokenizer=model.tokenizer,
            backend="causal",
            batch_size=batch_size,
            softmax_dtype="float32",
            logits_cache=False,  # the cache shares logits among texts whose answers begin at different tokens
        )
        self._prefix = list(model.special)
        self._answers, self._advance = answers, advance

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return (log-likelihood in nats, True if greedy decoding gives the continuation) for each request."""
        return self._answered("loglikelihood", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the log-likelihood of each text, in nats."""
        return self._answered("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the text generated after each prompt."""
        return self._answered("generate_until", requests, super().generate_until)

    def overlong(self, context: str, continuation: str) -> bool:
        """Return True if special tokens, one prompt token and the continuation do not fit in the model's context.

        The last token of the continuation is only predicted, so it does not count.
        """
        _, answer = self._split(context, continuation) if context else ([], self.tok_encode(continuation))
        return len(answer) + len(self._prefix) > self.max_length

    def cuts(self, context: str, continuation: str) -> bool:
        """Return True if the prompt is truncated, because prompt and continuation do not fit in the model's context."""
        return bool(context) and sum(map(len, self._split(context, continuation))) > self.max_length + 1

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize prompt and continuation; a prompt that is too long keeps its special tokens and its last tokens."""
        before, after = self._split(context, continuation)
        room, special = self.max_length + 1 - len(after), len(self._prefix)
        if len(before) > room and before[:special] == self._prefix:
            before = [*self._prefix, *before[len(before) - (room - special) :]]
        return before, after

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize prompt and continuation as one text, and split its tokens into the two parts.

        The first part is the longest common prefix of the tokens of the text and of the prompt alone, at least one
        token. lm-eval splits after as many tokens as the prompt alone has, and loses the start of the continuation if
        a token spans the boundary.
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
    """Return the key under which the answer to a request is saved: the SHA-256 of its kind and arguments.

    Args:
        kind: name of lm-eval's method that answers the request, such as loglikelihood.
        arguments: arguments of the request, JSON-serializable.
    """
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True).encode()).hexdigest()
