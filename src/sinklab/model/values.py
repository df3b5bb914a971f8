"""Value residual learning (2410.17897): every layer's values are mixed with those of the first layer.

    v_l' = lambda_1 v_1 + lambda_2 v_l        for layers l from 2; layer 1 is unchanged

v_1 and v_l are the attention values after a value gate, if any. The authors' code (Zcchill/Value-Residual-Learning,
`modeling_llama_resformer.py`) has fixed lambdas of 1/2: ResFormer. The learned form has two parameters per layer here,
initially 1/2; the full paper was not available. With lambdas 1 and 0, all layers use the first layer's values, as in
SVFormer, but the values of later layers are still computed.

B batch, G KV heads, L positions, D head dimension.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.schema import Part


class NoValueResidual(Part):
    """No value residual."""

    kind: Literal["none"] = "none"


class FixedValueResidual(Part):
    """Value residual lambda_1 v_1 + lambda_2 v_l with fixed lambdas (ResFormer)."""

    kind: Literal["fixed"] = "fixed"
    first: float = Field(default=0.5, description="lambda_1, weight of the first layer's values")
    own: float = Field(default=0.5, description="lambda_2, weight of the layer's own values")


class LearnedValueResidual(Part):
    """Value residual lambda_1 v_1 + lambda_2 v_l with learned lambdas in every layer from the second on."""

    kind: Literal["learned"] = "learned"
    start_first: float = Field(default=0.5, description="initial lambda_1")
    start_own: float = Field(default=0.5, description="initial lambda_2")


ValueResidual = Annotated[NoValueResidual | FixedValueResidual | LearnedValueResidual, Field(discriminator="kind")]


class ValueMixing(nn.Module):
    """Value residual of one layer.

    Attributes:
        first, own: lambda_1 and lambda_2; parameters of shape (1,) if they are learned, else numbers.
        initial: mean and std of the initial values of learned lambdas, by name; empty if they are fixed.
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
