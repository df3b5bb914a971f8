"""Value residual learning (2410.17897): every layer attends to values that are mixed with those of the first.

    v_l' = lambda_1 v_1 + lambda_2 v_l        for layers l from 2; layer 1 keeps its own

v_1 and v_l are the values as they would enter attention otherwise, behind a value gate. The authors' code
(Zcchill/Value-Residual-Learning, `modeling_llama_resformer.py`) has fixed lambdas of 1/2: ResFormer. Its learned form
has two numbers for each layer here, that start at 1/2; that much is known of the paper, which was not to be had in
full. With lambdas 1 and 0 all layers attend to the first layer's values: what SVFormer computes, though the values of
later layers are still projected, and cached.

B batch, G key heads, L positions, D head width.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.schema import Part


class NoValueResidual(Part):
    """Every layer has its own values."""

    kind: Literal["none"] = "none"


class FixedValueResidual(Part):
    """lambda_1 v_1 + lambda_2 v_l with fixed lambdas (ResFormer)."""

    kind: Literal["fixed"] = "fixed"
    first: float = Field(default=0.5, description="lambda_1, of the first layer's values")
    own: float = Field(default=0.5, description="lambda_2, of the layer's own values")


class LearnedValueResidual(Part):
    """lambda_1 v_1 + lambda_2 v_l with two learned numbers for each layer from the second."""

    kind: Literal["learned"] = "learned"
    start_first: float = Field(default=0.5, description="lambda_1 before training")
    start_own: float = Field(default=0.5, description="lambda_2 before training")


ValueResidual = Annotated[NoValueResidual | FixedValueResidual | LearnedValueResidual, Field(discriminator="kind")]


class ValueMixing(nn.Module):
    """The lambdas of one layer.

    Attributes:
        first, own: lambda_1 and lambda_2, (1,) where they are learned.
        initial: mean and std of those that are learned.
    """

    def __init__(self, config: FixedValueResidual | LearnedValueResidual) -> None:
        super().__init__()
        self.first: nn.Parameter | float
        self.own: nn.Parameter | float
        self.initial: dict[str, tuple[float, float]] = {}
        if isinstance(config, LearnedValueResidual):
            self.first, self.own = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
            self.initial = {"first": (config.start_first, 0.0), "own": (config.start_own, 0.0)}
        else:
            self.first, self.own = config.first, config.own

    def forward(self, v_BGLD: Tensor, first_BGLD: Tensor) -> Tensor:
        return (self.first * first_BGLD + self.own * v_BGLD).to(v_BGLD.dtype)


@dataclass
class FirstValues:
    """The first layer's values on their way to the later ones, in one forward pass.

    Attributes:
        values_BGLD: of the positions that are read; None before the first layer.
    """

    values_BGLD: Tensor | None = None

    def mixed(self, v_BGLD: Tensor, mixing: ValueMixing | None) -> Tensor:
        """The values that a layer attends to; those of the first, which mixes nothing, are kept."""
        if mixing is None:
            self.values_BGLD = v_BGLD
            return v_BGLD
        assert self.values_BGLD is not None
        return mixing(v_BGLD, self.values_BGLD)
