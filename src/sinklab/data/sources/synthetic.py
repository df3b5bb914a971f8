"""Synthetic tasks in which heads can use a sink as a no-op.

Sources are named `synthetic:NAME[:KEY=VALUE,...]`, with the keys `length` (tokens per document, EOS included; default
64), `documents` (16384) and `seed` (0). With `length` equal to `model.context` and `data.bos: true`, every document
fills one chunk. The tokenizer `words` has one token per word: EOS 0, BOS 1, then triggers t0, t1, .. and symbols s0,
s1, ..

bigram_backcopy (2410.13835): a Markov chain over symbols in which the token after a trigger repeats the token before
the trigger. A head that copies at triggers is a no-op at other tokens, where it attends to BOS.

trigger_average (2603.11487): symbols are uniform. A symbol has a trigger with probability 0.2, unless it is the first
or follows a trigger (t5 is symbol 5 with a trigger, s5 without). The symbol after a trigger is that of a token
drawn uniformly from those before the trigger. The distribution of the next symbol equals the target of 2603.11487: the
average of the preceding one-hot vectors at a trigger, a constant elsewhere. There, a model regresses vectors; here,
next-token prediction allows the training loop, loss and metric of other sources.

The trigger is a property of a symbol, not a separate token: a token without a symbol would not contribute to the
average, so heads could use it as a sink instead of BOS.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sinklab.errors import InputError

if TYPE_CHECKING:
    from sinklab.data.tokenizers import Tokenizer

PREFIX = "synthetic:"
WORDS = "words"
VERSION = 1  # version of the generators; increase it if the text of a source changes


@dataclass(frozen=True)
class Task:
    """Vocabulary and generator of a synthetic task.

    Attributes:
        triggers, symbols: number of trigger and symbol words.
        draw: function (generator, number of documents, tokens per document) -> indices into `words`, shape (documents,
            tokens).
    """

    triggers: int
    symbols: int
    draw: Callable[[np.random.Generator, int, int], np.ndarray]

    @property
    def words(self) -> list[str]:
        """Words of the vocabulary without EOS and BOS: triggers, then symbols."""
        return [f"t{i}" for i in range(self.triggers)] + [f"s{i}" for i in range(self.symbols)]


def _bigram_backcopy(random: np.random.Generator, documents: int, tokens: int) -> np.ndarray:
    """Sample word indices of a Markov chain.

    After a symbol, the next word is a trigger with probability 0.2, else a symbol from a distribution drawn once per
    symbol from Dirichlet(0.3). After a trigger, it is the word before the trigger.
    """
    symbols = random.dirichlet(np.full(64, 0.3), size=64) * 0.8
    chain = np.concatenate((np.full((64, 3), 0.2 / 3), symbols), axis=1).cumsum(1)
    words = np.empty((documents, tokens), dtype=np.int64)
    words[:, 0] = 3 + random.integers(64, size=documents)
    for t in range(1, tokens):
        before = words[:, t - 1]
        drawn = (chain[np.maximum(before - 3, 0)] < random.random((documents, 1))).sum(1)
        words[:, t] = np.where(before < 3, words[:, max(t - 2, 0)], np.minimum(drawn, 66))
    return words


def _trigger_average(random: np.random.Generator, documents: int, tokens: int) -> np.ndarray:
    """Sample word indices; each symbol has a trigger with probability 0.2, unless it follows a trigger or is first."""
    symbols = random.integers(64, size=(documents, tokens))
    triggers = random.random((documents, tokens)) < 0.2
    triggers[:, 0] = False
    rows = np.arange(documents)
    for t in range(2, tokens):
        asked = triggers[:, t - 1]
        drawn = symbols[rows, random.integers(t - 1, size=documents)]
        symbols[:, t] = np.where(asked, drawn, symbols[:, t])
        triggers[:, t] &= ~asked
    return np.where(triggers, symbols, 64 + symbols)


TASKS = {
    "bigram_backcopy": Task(triggers=3, symbols=64, draw=_bigram_backcopy),
    "trigger_average": Task(triggers=64, symbols=64, draw=_trigger_average),
}


@dataclass(frozen=True)
class SyntheticTask:
    """Parameters of a synthetic source, parsed from its name.

    Attributes:
        name: key in `TASKS`.
        length: tokens per document, EOS included.
        documents: number of documents.
        seed: random seed of the generator.
    """

    name: str
    length: int = 64
    documents: int = 16384
    seed: int = 0

    @property
    def task(self) -> Task:
        return TASKS[self.name]


def parse(source: str) -> SyntheticTask | None:
    """Parse the name of a synthetic source; return None for any other source.

    Raises:
        InputError: if the task or a key is unknown, or a value is not a whole number or is too small.
    """
    if not source.startswith(PREFIX):
        return None
    name, _, options = source.removeprefix(PREFIX).partition(":")
    if name not in TASKS:
        raise InputError(f"source {source}: unknown task {name!r}; choose from {', '.join(TASKS)}")
    values: dict[str, int] = {}
    least = {"length": 4, "documents": 2, "seed": 0}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in least or not value.isdecimal() or int(value) < least[key]:
            wanted = ", ".join(f"{key}=N with N at least {low}" for key, low in least.items())
            raise InputError(f"source {source}: invalid option {option!r}: use {wanted}")
        values[key] = int(value)
    return SyntheticTask(name, **values)


def synthetic_documents(request: SyntheticTask) -> Iterator[str]:
    """Yield the documents of a task as space-separated words; `length` includes the EOS that `prepare` adds."""
    words = np.array(request.task.words)
    random = np.random.default_rng([VERSION, request.seed])
    for row in request.task.draw(random, request.documents, request.length - 1):
        yield " ".join(words[row])


def word_tokenizer(request: SyntheticTask) -> "Tokenizer":
    """Build the word tokenizer of a synthetic task: EOS 0, BOS 1, then the words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    from sinklab.data.tokenizers import BOS, EOS, Tokenizer

    ids = {word: i for i, word in enumerate([EOS, BOS, *request.task.words])}
    backend = Backend(models.WordLevel(ids, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([EOS, BOS])
    backend.encode_special_tokens = True
    return Tokenizer(backend, WORDS, eos_id=0, bos_id=1)
