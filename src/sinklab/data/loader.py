"""Data loader with random access to batches by index, and prefetching in a background thread.

For given data and settings, a batch depends only on (seed, index), so the loader state is one integer. The shard is
split into non-overlapping chunks of context + 1 tokens, or of BOS and context tokens. Training reads every chunk once
per epoch, in a permutation drawn from (seed, epoch); a batch may span several epochs. Validation reads the chunks once,
in order.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sinklab.data.config import DataConfig
from sinklab.data.shards import TokenFile
from sinklab.errors import InputError

_ORDER, _DRAWN, _DRAWN_VALID = 1, 2, 3  # random streams derived from one seed


class Loader:
    """Random access to the batches of a token shard.

    Args:
        tokens: (tokens,) integer ids, such as `TokenDataset.train`; read lazily.
        context: number of input tokens per sequence; a chunk has one more token, the last target.
        batch_size: chunks per global batch.
        seed: random seed of the chunk order and of the random tokens.
        config: settings with `bos`, `fixed_token`, `random_tokens` and, for training, `token_budget`.
        vocab_size: exclusive upper bound of the ids.
        bos_id: id of the first token of every chunk if `config.bos` is True.
        shuffle: True for training; False for validation, which ignores the token budget.

    Attributes:
        chunks: number of chunks.

    Raises:
        InputError: if the data is smaller than one chunk or than the token budget, or `fixed_token` or `random_tokens`
            uses a position outside the chunk or a token outside the vocabulary.
    """

    def __init__(
        self,
        tokens: TokenFile | np.ndarray,
        *,
        context: int,
        batch_size: int,
        seed: int,
        config: DataConfig,
        vocab_size: int,
        bos_id: int,
        shuffle: bool = True,
    ) -> None:
        fixed, drawn = config.fixed_token, config.random_tokens
        if fixed and max(fixed.positions) > context:
            raise InputError(
                f"data.fixed_token.positions has {max(fixed.positions)}, but a chunk has positions 0..{context}"
            )
        if fixed and fixed.token_id >= vocab_size:
            raise InputError(f"data.fixed_token.token_id is {fixed.token_id}, but token ids are 0..{vocab_size - 1}")
        if drawn and drawn.end > context + 1:
            raise InputError(f"data.random_tokens.end is {drawn.end}, but a chunk has positions 0..{context}")
        count, budget = len(tokens), config.token_budget if shuffle else None
        if budget is not None and budget > count:
            raise InputError(
                f"data.token_budget is {budget:,}, but the training shard has {count:,} tokens: "
                "lower the budget, add text, or raise data.token_limit or data.text_limit_bytes if set"
            )
        count = count if budget is None else budget
        stride = context if config.bos else context + 1
        self.chunks = count // stride
        if self.chunks == 0:
            raise InputError(
                f"the {'training' if shuffle else 'validation'} data has {count:,} tokens, but one chunk needs "
                f"{stride:,} (context {context}): add text, "
                + ("raise data.token_budget if set, " if shuffle else "raise data.valid_fraction, ")
                + "or reduce the context"
            )
        self.context, self.batch_size = context, batch_size
        self._tokens, self._stride, self._shuffle, self._seed = tokens, stride, shuffle, seed
        self._config, self._vocab_size, self._bos_id = config, vocab_size, bos_id
        # orders of two epochs are cached, because a batch rarely spans more
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def __len__(self) -> int:
        """Number of batches per epoch, rounded up; the last batch of a validation loader may have fewer rows."""
        return -(-self.chunks // self.batch_size)

    def batch(self, index: int, rows: slice | None = None) -> torch.Tensor:
        """Read batch `index`, counted from 0 over all epochs.

        Args:
            index: batch index >= 0; below `len(self)` for validation.
            rows: slice of the global batch to read, such as the rows of one process; default: all rows.

        Returns:
            int64 token ids, shape (rows, context + 1): inputs are `[:, :-1]`, targets `[:, 1:]`. The last batch of a
            validation loader may have fewer rows.

        Raises:
            SinklabError: if the shard cannot be read.
        """
        assert 0 <= index < (np.inf if self._shuffle else len(self)), f"batch {index} is out of range"
        ids = np.arange(index * self.batch_size, (index + 1) * self.batch_size)
        if self._shuffle:
            ids = np.array([self._order(place // self.chunks)[place % self.chunks] for place in ids.tolist()])
        ids = ids[ids < self.chunks][rows or slice(None)]
        chunks_BT = np.empty((len(ids), self.context + 1), dtype=np.int64)
        if self._config.bos:
            chunks_BT[:, 0] = self._bos_id
        stride = self._stride
        for row_T, chunk in zip(chunks_BT, ids.tolist(), strict=True):
            row_T[-stride:] = self._tokens[chunk * stride : (chunk + 1) * stride]
        if fixed := self._config.fixed_token:
            chunks_BT[:, fixed.positions] = fixed.token_id
        if drawn := self._config.random_tokens:
            stream = _DRAWN if self._shuffle else _DRAWN_VALID
            for row_T, chunk in zip(chunks_BT, ids.tolist(), strict=True):
                generator = np.random.default_rng([stream, self._seed, chunk])
                row_T[drawn.start : drawn.end] = generator.integers(self._vocab_size, size=drawn.end - drawn.start)
        return torch.from_numpy(chunks_BT)

    def _draw_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([_ORDER, self._seed, epoch]).permutation(self.chunks)


class Prefetcher:
    """Prefetches one batch in a background thread; for CUDA, with pinned memory and an asynchronous copy.

    Args:
        fetch: function that returns the batch of an index on the CPU, such as `Loader.batch`.
        device: device of the batches.
        end: number of batches; batches from this index on are not prefetched.

    Attributes:
        waited: total time that `batch` has waited for prefetched batches, in seconds.
    """

    def __init__(self, fetch: Callable[[int], Tensor], device: torch.device, end: int) -> None:
        self.waited = 0.0
        self._fetch, self._device, self._end = fetch, device, end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Tensor]] | None = None

    def batch(self, index: int) -> Tensor:
        """Return batch `index` on the device, and start fetching the next one, if it is below `end`.

        Raises the same errors as `fetch`.
        """
        started = time.perf_counter()
        ahead = self._ahead[1] if self._ahead and self._ahead[0] == index else self._thread.submit(self._ready, index)
        tokens = ahead.result()
        self.waited += time.perf_counter() - started
        following = index + 1
        self._ahead = (following, self._thread.submit(self._ready, following)) if following < self._end else None
        return tokens.to(self._device, non_blocking=True)

    def _ready(self, index: int) -> Tensor:
        tokens = self._fetch(index)
        return tokens.pin_memory() if self._device.type == "cuda" else tokens
