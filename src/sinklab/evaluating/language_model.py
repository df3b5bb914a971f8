"""A loaded model as lm-eval asks it: it keeps its answers, its texts are whole, and long ones keep their BOS.

lm-eval's own model of transformers does the work: tokens, batches, log-softmax and sums. See docs/eval.md for what is
different from its defaults.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]  # an extra

from sinklab.evaluating.answers import Answers, ModelAnswer, name_of
from sinklab.measuring.inputs import default_prefix
from sinklab.models.huggingface.loading import Pretrained

TOGETHER = 8  # batches whose answers are kept together


class AnsweringModel(HFLM):
    """A model of transformers with its tokenizer.

    Args:
        answers: those that are there are not asked for again.
        advance: is called with the number of requests answered.
    """

    def __init__(
        self, pretrained: Pretrained, batch_size: int, answers: Answers, advance: Callable[[int], None]
    ) -> None:
        super().__init__(
            pretrained=pretrained.model,
            tokenizer=pretrained.tokenizer,
            backend="causal",
            batch_size=batch_size,
            softmax_dtype="float32",
            logits_cache=False,  # which shares logits among texts that differ in where the answer begins
        )
        self._prefix = default_prefix(pretrained.tokenizer)
        self._answers, self._advance = answers, advance

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Log-likelihood of each continuation, and whether it is what the model would say by itself."""
        return self._answered("loglikelihood", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Log-likelihood of each text."""
        return self._answered("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """What the model says after each context."""
        return self._answered("generate_until", requests, super().generate_until)

    def overlong(self, context: str, continuation: str) -> bool:
        """Whether the continuation leaves no room for a token of the context."""
        _, answer = self._split(context, continuation) if context else ([], self.tok_encode(continuation))
        return len(answer) + len(self._prefix) > self.max_length

    def cuts(self, context: str, continuation: str) -> bool:
        """Whether the context loses its first words."""
        return bool(context) and sum(map(len, self._split(context, continuation))) > self.max_length + 1

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both; of a context that is too long its special tokens in front, and its last ones."""
        before, after = self._split(context, continuation)
        room, special = self.max_length + 1 - len(after), len(self._prefix)
        if len(before) > room and before[:special] == self._prefix:
            before = [*self._prefix, *before[len(before) - (room - special) :]]
        return before, after

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both as one text, those that the context has by itself before the others.

        lm-eval takes as many off as the context has. Where a token reaches over the end of the context, these are
        others, and words of the continuation would be lost.
        """
        before, after = super()._encode_pair(context, continuation)
        whole = self.tok_encode(context + continuation)
        if [*before, *after] == whole:
            return before, after
        shared = next((at for at, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return whole[: max(shared, 1)], whole[max(shared, 1) :]

    def _answered(self, kind: str, requests: Sequence[Any], ask: Callable[..., list[ModelAnswer]]) -> list[ModelAnswer]:
        names = [name_of(kind, request.args) for request in requests]
        waiting = {name: one for name, one in zip(names, requests, strict=True) if self._answers.get(name) is None}
        self._advance(sum(name not in waiting for name in names))
        for part in _parts(sorted(waiting, key=lambda name: -len(str(waiting[name].args))), self.batch_size * TOGETHER):
            found = ask([waiting[name] for name in part], disable_tqdm=True)
            self._answers.add(zip(part, found, strict=True))
            self._advance(len(part))
        answers = [self._answers.get(name) for name in names]
        return [answer for answer in answers if answer is not None]


def _parts(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
