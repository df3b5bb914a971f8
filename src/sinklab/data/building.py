"""From a stream of documents to two shards: cut into parts, encoded by several processes, written in order.

One process reads the text and writes the ids; the others encode. Parts are cut by the text alone and written in
their order, so the bytes depend neither on the number of processes nor on who was interrupted when. What is held in
memory is a few parts, however large the text is.
"""

import multiprocessing as mp
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

import numpy as np

from sinklab.data.corpora import Fingerprint
from sinklab.data.encoding import Encode, Encoded, encode_documents, encoder
from sinklab.data.journal import Entry, Journal
from sinklab.data.packing import SplitWriter
from sinklab.data.shards import DTYPES, Share, dtype_for
from sinklab.data.tokenizers import Tokenizer, load_tokenizer
from sinklab.errors import SinklabError

Named = tuple[str, str]  # the voice of a mix (nothing where there is none), and a document
Part = list[Named]

PART_CHARACTERS = 2**20
_AHEAD = 3  # parts read per process before the first of them is written


class Builder:
    """Writes the shards of a text into a folder, after the parts that stand there already.

    Args:
        folder: what an interrupted builder of the same text and tokenizer left in it is continued.
        tokenizer: saved in `folder`.
        valid_fraction: see `packing.rank`.
        token_limit: stop after this many tokens; the last document is cut there, and ends with EOS all the same.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, valid_fraction: float, token_limit: int | None) -> None:
        self.folder, self.tokenizer, self.valid_fraction = folder, tokenizer, valid_fraction
        self.dtype: Literal["uint16", "uint32"] = dtype_for(tokenizer.vocab_size)
        self.token_limit = token_limit
        self.text = Fingerprint()
        self.shares: dict[str, Share] = {}
        self.journal = Journal(folder, DTYPES[self.dtype].itemsize)

    def build(self, documents: Iterator[Named], workers: int, progress: Callable[[int, int], None]) -> SplitWriter:
        """Write everything; the shards still have to be finished.

        Args:
            documents: the whole text, from its start.
            workers: processes that encode; 1 is this one alone.
            progress: called with the bytes of text done and the tokens written so far.

        Raises:
            InputError: the text is malformed.
            SinklabError: a process was lost, or the disk is full; what was finished stays.
        """
        parts = _parts(documents)
        changed, last = self._replayed(parts)
        writer = SplitWriter(self.folder, self.dtype, self.valid_fraction, last and last.train, last and last.valid)
        try:
            with _encoding(self.folder, self.tokenizer, self.dtype, workers) as submit:
                waiting: deque[tuple[Part, Future[Encoded]]] = deque()
                source = _chained(changed, parts)
                while not self._full(writer):
                    while len(waiting) < _AHEAD * workers and (part := next(source, None)):
                        waiting.append((part, submit([text for _, text in part])))
                    if not waiting:
                        break
                    part, encoded = waiting.popleft()
                    self._write(writer, part, encoded.result())
                    progress(self.text.text_bytes, writer.tokens)
        except BrokenProcessPool as error:
            writer.__exit__(None, None, None)
            raise SinklabError(
                "a process that encodes text was killed (memory may have run out). What was finished is kept: run the "
                "same command again, with fewer --workers if it happens again"
            ) from error
        except BaseException:
            writer.__exit__(None, None, None)
            raise
        return writer

    def _replayed(self, parts: Iterator[Part]) -> tuple[Part | None, Entry | None]:
        """Read the text of finished parts again; returns the first part that has changed, and the last sound entry."""
        for index, entry in enumerate(self.journal.entries):
            part = next(parts, [])
            before = self.text.copy()
            for _, text in part[: entry.documents - self.text.documents]:
                self.text.add(text)
            if self.text.hexdigest() != entry.text_sha256:
                self.text = before
                return part or None, self._continued(index)
        return None, self._continued(len(self.journal.entries))

    def _continued(self, count: int) -> Entry | None:
        last = self.journal.keep(count)
        self.shares = dict(last.shares) if last else {}
        return last

    def _full(self, writer: SplitWriter) -> bool:
        return self.token_limit is not None and writer.tokens >= self.token_limit

    def _write(self, writer: SplitWriter, part: Part, encoded: Encoded) -> None:
        if self.token_limit is not None:
            encoded = _limited(encoded, self.token_limit - writer.tokens, self.tokenizer.eos_id)
        writer.add(encoded.ids, encoded.lengths, encoded.ranks)
        for (name, text), tokens in zip(part, encoded.lengths.tolist(), strict=False):
            self.text.add(text)
            if name:
                share = self.shares.get(name, Share())
                self.shares[name] = Share(documents=share.documents + 1, tokens=share.tokens + tokens)
        self.journal.add(
            Entry(
                documents=self.text.documents,
                text_bytes=self.text.text_bytes,
                text_sha256=self.text.hexdigest(),
                train=writer.train,
                valid=writer.valid,
                shares=self.shares,
            )
        )


def _limited(encoded: Encoded, tokens: int, eos_id: int) -> Encoded:
    """The first `tokens` of a part at most; the last document then ends in EOS where it is cut."""
    if len(encoded.ids) <= tokens:
        return encoded
    ids = encoded.ids[:tokens].copy()
    ids[-1] = eos_id
    ends = np.minimum(encoded.lengths.cumsum(), tokens)
    count = int(np.searchsorted(ends, tokens)) + 1
    return Encoded(ids, np.diff(ends[:count], prepend=0), encoded.ranks[:count])


def _parts(documents: Iterator[Named]) -> Iterator[Part]:
    part: Part = []
    size = 0
    for document in documents:
        part.append(document)
        size += len(document[1])
        if size >= PART_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _chained(first: Part | None, rest: Iterator[Part]) -> Iterator[Part]:
    if first:
        yield first
    yield from rest


@contextmanager
def _encoding(
    folder: Path, tokenizer: Tokenizer, dtype: str, workers: int
) -> Iterator[Callable[[list[str]], "Future[Encoded]"]]:
    """Yields what hands texts over to be encoded, here or in other processes."""
    if workers == 1:
        encode = encoder(tokenizer, DTYPES[dtype])

        def at_once(texts: list[str]) -> "Future[Encoded]":
            done: Future[Encoded] = Future()
            done.set_result(encode_documents(texts, encode, tokenizer.eos_id))
            return done

        yield at_once
        return
    context = mp.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (str(folder), dtype))
    try:
        yield lambda texts: pool.submit(_encode_in_worker, texts)
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[tuple[Encode, int]] = []


def _start_worker(folder: str, dtype: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    tokenizer = load_tokenizer(folder)
    _worker.append((encoder(tokenizer, DTYPES[dtype]), tokenizer.eos_id))


def _encode_in_worker(texts: list[str]) -> Encoded:
    encode, eos_id = _worker[0]
    return encode_documents(texts, encode, eos_id)


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work for ever."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
