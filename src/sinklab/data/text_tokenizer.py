"""The tokenizer of a preparation: the one asked for, a source's own, or one that is trained on a sample of the text."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from sinklab.data.shards import Settings
from sinklab.data.sources.synthetic import WORDS, parse, word_tokenizer
from sinklab.data.texts import RequestedText
from sinklab.data.tokenizers import Tokenizer, load_tokenizer, train_bpe, trained_size
from sinklab.errors import InputError

StageProgress = Callable[[str, int, int | None], None]
"""Called with the stage ("tokenizer", "tokens"), the bytes of text done and the bytes in all, where known."""

BPE_SAMPLE_BYTES = 8 * 2**20
"""A tokenizer is trained on every n-th document, n such that the sample is about this large at most."""


def tokenizer_of(settings: Settings, text: RequestedText, folder: Path, progress: StageProgress) -> Tokenizer:
    """The tokenizer that the text is read with, whose files stand in `folder` afterwards.

    Raises:
        InputError: it cannot be loaded or trained, or the source comes with another.
    """
    if (folder / "tokenizer_config.json").is_file():  # written last, by whoever was interrupted
        return load_tokenizer(str(folder))
    if request := parse(settings.source):
        if settings.tokenizer != WORDS:
            raise InputError(f"source {settings.source} comes with its own tokenizer: use tokenizer {WORDS}")
        return word_tokenizer(request, folder)
    size = trained_size(settings.tokenizer)
    if size is not None:
        return train_bpe(_sample(text, progress), size, folder)
    tokenizer = load_tokenizer(settings.tokenizer)
    tokenizer.save(folder)
    return tokenizer


def _sample(text: RequestedText, progress: StageProgress) -> Iterator[str]:
    """Every n-th document; of a stream of unknown length the first ones."""
    total = text.total_bytes
    every = 1 if total is None else max(1, math.ceil(total / BPE_SAMPLE_BYTES))
    done = taken = 0
    for index, (_, document) in enumerate(text.named_documents()):
        done += len(document)
        if index % every:
            continue
        taken += len(document)
        progress("tokenizer", done, total)
        yield document
        if total is None and taken >= BPE_SAMPLE_BYTES:
            return
