"""domains.json, comparison.json, families.json and checkpoints.json as a report reads them.

Each stands beside a folder for every measurement that it names, which holds the same and more.
"""

from typing import Literal

from pydantic import Field

from sinklab.schema import ReadDocument


class DomainsDocument(ReadDocument):
    """domains.json: one model on many texts.

    Attributes:
        model: name or path of what was measured.
        measured: by the names of the folders.
        failed: why the others could not be measured, by name.
    """

    model: str
    measured: dict[str, dict[str, object]] = Field(alias="domains")
    failed: dict[str, str] = Field(default_factory=dict)


class ComparedQuantity(ReadDocument):
    """One line of a comparison.

    Attributes:
        quantity, unit: what is compared.
        values: by model; None where a model has no such thing, or it is infinite.
        differences: from the first model, by model; None where one of the two is, and of a loss per token where the
            vocabularies of the two differ.
        infinite: the models in which it is.
    """

    quantity: str
    unit: str
    values: dict[str, float | None]
    differences: dict[str, float | None]
    infinite: list[str] = Field(default_factory=list)


class ComparisonDocument(ReadDocument):
    """comparison.json: several models on the same text, the first being the one the others are held against.

    Attributes:
        measured: by the names of the folders; all, or there is no document.
    """

    rows: list[ComparedQuantity]
    measured: dict[str, dict[str, object]] = Field(alias="models", min_length=1)
    failed: dict[str, str] = Field(default_factory=dict)


class FamilyMember(ReadDocument):
    """One open model that was measured.

    Attributes:
        parameters: tied embeddings counted once.
        sink_1: measured, percent.
        published: what the paper prints, percent; None where there is nothing for that setting.
    """

    family: str
    parameters: int
    sink_1: float
    published: float | None


class FamiliesDocument(ReadDocument):
    """families.json: the paper's open models; attributes as those of the others."""

    measured: dict[str, FamilyMember] = Field(alias="models")
    failed: dict[str, str] = Field(default_factory=dict)


StepUnit = Literal["step", "tokens"]
"""What the names of checkpoints count."""


class MeasuredCheckpoint(ReadDocument):
    """One checkpoint of a training run.

    Attributes:
        step: after which it was saved, or the tokens that it had read then.
        unit: which of these.
        checkpoint: the revision or the folder.
        sink_1, sink_bias: percent of (sequence, layer, head) triples; None without a bias.
        uniform_ratio: importance of the first token over that of uniform attention.
        loss: nats per token; None where there is none.
        norm_ratio: |h_1| over the mean of the others, in the block where it is largest; None where unknown or infinite.
        by_layer: Sink_1 of each attention layer, percent.
    """

    step: int
    unit: StepUnit = "step"
    checkpoint: str
    sink_1: float
    sink_bias: float | None
    uniform_ratio: float
    loss: float | None
    norm_ratio: float | None
    by_layer: list[float]


class CheckpointsDocument(ReadDocument):
    """checkpoints.json: one model while it was trained; attributes as those of the others."""

    model: str
    measured: dict[str, MeasuredCheckpoint] = Field(alias="checkpoints")
    failed: dict[str, str] = Field(default_factory=dict)


SuiteDocument = DomainsDocument | ComparisonDocument | FamiliesDocument | CheckpointsDocument
