"""Adapter from a loaded model to lm-eval.

`AnsweringModel` is a subclass of lm-eval's HFLM. Unlike HFLM, it tokenizes prompt and continuation as one text, and
keeps BOS if a prompt is truncated (lm-eval calls the prompt `context`). docs/eval.md lists all differences.
"""

from collections.abc import Callable
from typing import Any

from lm_eval.api.model import CacheHook  # an extra
from lm_eval.models.huggingface import HFLM

from sinklab.opening import Model


class AnsweringModel(HFLM):
    """A Hugging Face model for lm-eval.

    Args:
        model: loaded Hugging Face model.
        batch_size: requests per batch.
        answered: callback, called after every answer that is not read from a cache.
    """

    def __init__(self, model: Model, batch_size: int, answered: Callable[[], None]) -> None:
        self._prefix, self._answered = list(model.special), answered
        super().__init__(
            pretrained=model.module,
            tokenizer=model.tokenizer,
            backend="causal",
            batch_size=batch_size,
            softmax_dtype="float32",
            logits_cache=False,  # the cache shares logits among texts whose answers begin at different tokens
        )
        self.set_cache_hook(CacheHook(None))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Set lm-eval's hook that saves answers, and count the answers that it receives."""
        save = cache_hook.add_partial

        def add_partial(*answer: Any) -> None:
            save(*answer)
            self._answered()

        cache_hook.add_partial = add_partial
        super().set_cache_hook(cache_hook)

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
