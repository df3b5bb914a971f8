"""Resumable writers of training and validation ids; the text of a document decides its split."""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from sinklab.data.shards import DTYPES, Shard
from sinklab.files import sha256_of
from sinklab.schema import Part

_BLOCK = 2**22


def rank(document: str) -> float:
    """A number in [0, 1) that depends on the text alone; below `valid_fraction` it is kept for validation."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:6], "big") / 2**48


class Nearest(Part):
    """The document of a side that stands nearest to the other one, which it joins if that stays empty."""

    distance: float
    first: int
    tokens: int


class SplitState(Part):
    """How far one shard has grown.

    Attributes:
        tokens, documents: in it.
        nearest: None while it is empty.
        sha256: of what the last part added to it.
    """

    tokens: int = 0
    documents: int = 0
    nearest: Nearest | None = None
    sha256: str = ""


class SplitWriter:
    """Lets train.bin and valid.bin grow part by part; what stands behind the sides it is given is cut off.

    Args:
        folder: where the two files are or will be.
        dtype: of the ids, a key of `shards.DTYPES`.
        valid_fraction: see `rank`.
        train, valid: how far they have grown before.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        valid_fraction: float,
        train: SplitState | None = None,
        valid: SplitState | None = None,
    ) -> None:
        self._dtype = DTYPES[dtype]
        self._threshold = valid_fraction
        self.train, self.valid = train or SplitState(), valid or SplitState()
        self._train = _opened(folder / "train.bin", self.train.tokens * self._dtype.itemsize)
        self._valid = _opened(folder / "valid.bin", self.valid.tokens * self._dtype.itemsize)

    @property
    def documents(self) -> int:
        """How many were added, on both sides together."""
        return self.train.documents + self.valid.documents

    @property
    def tokens(self) -> int:
        """How many were added, on both sides together."""
        return self.train.tokens + self.valid.tokens

    def add(self, ids: np.ndarray, lengths: np.ndarray, ranks: np.ndarray) -> None:
        """Append documents, each to the shard that its text decides.

        Args:
            ids: (tokens,) of all of them, EOS included.
            lengths: (documents,) tokens of each.
            ranks: (documents,) of each.
        """
        distances = ranks - self._threshold
        kept_back = distances < 0
        mask = np.repeat(kept_back, lengths)
        self.train = self._append(self._train, self.train, ids[~mask], lengths[~kept_back], distances[~kept_back])
        self.valid = self._append(self._valid, self.valid, ids[mask], lengths[kept_back], -distances[kept_back])

    def finish(self) -> tuple[Shard, Shard]:
        """Training and validation, whole and on the disk; neither is empty. At least two documents were added."""
        self._fill_an_empty_side()
        for file in (self._train, self._valid):
            file.flush()
            os.fsync(file.fileno())
        return _described(self._train, self.train), _described(self._valid, self.valid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._train.close()
        finally:
            self._valid.close()

    def _append(
        self, file: BinaryIO, side: SplitState, ids: np.ndarray, lengths: np.ndarray, distances: np.ndarray
    ) -> SplitState:
        content = ids.tobytes()
        file.write(content)
        file.flush()
        nearest = side.nearest
        if len(lengths) and (nearest is None or distances.min() < nearest.distance):
            index = int(distances.argmin())
            first = side.tokens + int(lengths[:index].sum())
            nearest = Nearest(distance=float(distances[index]), first=first, tokens=int(lengths[index]))
        return SplitState(
            tokens=side.tokens + len(ids),
            documents=side.documents + len(lengths),
            nearest=nearest,
            sha256=hashlib.sha256(content).hexdigest(),
        )

    def _fill_an_empty_side(self) -> None:
        """Few documents can all fall on one side: the one nearest to the threshold then changes over."""
        if self.train.documents and self.valid.documents:
            return
        full, file = (self.train, self._train) if self.train.documents else (self.valid, self._valid)
        assert full.nearest is not None
        moved = full.nearest
        ids = _taken_out(file, moved.first, moved.tokens, self._dtype)
        left = SplitState(tokens=full.tokens - moved.tokens, documents=full.documents - 1)
        other = self._valid if full is self.train else self._train
        arrived = self._append(other, SplitState(), ids, np.array([moved.tokens]), np.array([moved.distance]))
        self.train, self.valid = (left, arrived) if full is self.train else (arrived, left)


def _opened(path: Path, size: int) -> BinaryIO:
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _taken_out(file: BinaryIO, first: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Cut `count` ids out of a file, what follows moving up block by block; returns them."""
    start, size = first * dtype.itemsize, count * dtype.itemsize
    file.seek(start)
    ids = np.frombuffer(file.read(size), dtype)
    while True:
        file.seek(start + size)
        block = file.read(_BLOCK)
        file.seek(start)
        file.write(block)
        start += len(block)
        if not block:
            file.truncate(start)
            return ids


def _described(file: BinaryIO, side: SplitState) -> Shard:
    path = Path(file.name)
    return Shard(file=path.name, tokens=side.tokens, documents=side.documents, sha256=sha256_of(path))
