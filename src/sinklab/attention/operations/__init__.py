"""Attention operations: softmax and its alternatives.

z_ts is the score of query t and key s after softcap, position bias and forget gates, and A_ts the attention weight that
the operation computes from it. A bias key adds one key to every row.

To add an operation, add its class in a file here, a member of the union below and a row in docs/interventions.md. The
class has a `kind`, the formula in its docstring, `examples` for training, tests and timings, and the methods of
`OperationPart`; a subclass of `LogSimilarity` only needs `normalisation`, which returns a log-similarity and a divisor.
Add the paper's formula on explicit matrices to tests/support/independent_attention.py, with which the tests compare
the class.
"""

from typing import Annotated

from pydantic import Field

from sinklab.attention.operations.differential import Differential, DifferentialV2
from sinklab.attention.operations.kernel import EluKernel, IdentityKernel, MlpKernel
from sinklab.attention.operations.similarity import Elu1, Forgetting, Relu, ScalableSoftmax, Sigmoid, Softmax
from sinklab.attention.operations.stick_breaking import StickBreaking
from sinklab.attention.operations.threshold import Entmax15, ThresholdDifferential, ThresholdRectified
from sinklab.attention.operations.two_pass import ClippedSoftmax, ElasticSoftmax, Softpick

Operation = Annotated[
    Softmax
    | ScalableSoftmax
    | Forgetting
    | StickBreaking
    | Sigmoid
    | Elu1
    | Relu
    | EluKernel
    | IdentityKernel
    | MlpKernel
    | ClippedSoftmax
    | Softpick
    | ElasticSoftmax
    | Entmax15
    | Differential
    | DifferentialV2
    | ThresholdRectified
    | ThresholdDifferential,
    Field(discriminator="kind"),
]
