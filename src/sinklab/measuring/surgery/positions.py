"""Learned positions exchanged: rows of the table of positions swapped, or one replaced by another."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.surgery.places import learned_positions
from sinklab.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def swapped_positions(model: "PreTrainedModel | Transformer", i: int, j: int) -> Iterator[None]:
    """The learned embeddings of positions i and j change places (table 7 of the paper, `swapped`).

    Raises:
        InputError: the model has no learned table of positions, or not these rows.
    """
    with _rewritten_positions(model, {i: j, j: i}):
        yield


@contextmanager
def replaced_position(model: "PreTrainedModel | Transformer", i: int, j: int) -> Iterator[None]:
    """Position i has the learned embedding of position j as well (table 7 of the paper, `replaced`).

    Raises:
        InputError: the model has no learned table of positions, or not these rows.
    """
    with _rewritten_positions(model, {i: j}):
        yield


def check_pair(i: int, j: int) -> None:
    """Refuse two positions that no table could swap.

    Raises:
        InputError: one is below 1, or they are the same.
    """
    if min(i, j) < 1:
        raise InputError(f"position {min(i, j)} does not exist: positions are counted from 1")
    if i == j:
        raise InputError(f"position {i} with itself changes nothing: give two different positions")


@contextmanager
def _rewritten_positions(model: "PreTrainedModel | Transformer", source: dict[int, int]) -> Iterator[None]:
    """Rows of the learned table overwritten, each by the row `source` names, and put back bit for bit."""
    table_PC = learned_positions(model)
    if table_PC is None:
        raise InputError(
            "the model has no learned table of positions to change: that is for models such as GPT-2, OPT and GPT-Neo, "
            "or ours with model.position.kind learnable"
        )
    if table_PC.is_meta:
        raise InputError(
            "the model's table of positions is not in memory (it was left on disk), so it cannot be changed: load the "
            "model onto one device"
        )
    check_pair(*next(iter(source.items())))
    for position in {*source, *source.values()}:
        if position > len(table_PC):
            raise InputError(f"position {position} does not exist: the table has positions 1 to {len(table_PC)}")
    rows = torch.tensor(list(source), device=table_PC.device) - 1
    others = torch.tensor(list(source.values()), device=table_PC.device) - 1
    before = table_PC.detach()[rows].clone()
    try:
        _write(table_PC, rows, table_PC.detach()[others].clone())
        yield
    finally:
        _write(table_PC, rows, before)


@torch.no_grad()
def _write(table_PC: Tensor, rows: Tensor, values: Tensor) -> None:
    table_PC.detach()[rows] = values
