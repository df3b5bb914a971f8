"""Schemas of domains.json, comparison.json, families.json and checkpoints.json, as read by reports.

`file` of a schema is the name of the file.
"""

from typing import ClassVar, Literal

from pydantic import Field

from sinklab.schema import ReadDocument


class DomainsDocument(ReadDocument):
    """domains.json: measurements of one model on several texts; `measured` and `failed` are by domain."""

    file: ClassVar = "domains.json"
    model: str
    measured: dict[str, dict[str, object]] = Field(alias="domains")
    failed: dict[str, str] = Field(default_factory=dict)


class ComparedQuantity(ReadDocument):
    """A row of a comparison of models: one quantity.

    Attributes:
        values: value by model; None if it is missing or infinite.
        differences: value minus that of the first model, by model except the first. None if either value is None. For
            losses per token, also None if the vocabularies differ or are unknown.
        infinite: models with an infinite value.
    """

    quantity: str
    unit: str
    values: dict[str, float | None]
    differences: dict[str, float | None]
    infinite: list[str] = Field(default_factory=list)


class ComparisonDocument(ReadDocument):
    """comparison.json: measurements of several models with the same settings; the first model is the reference.

    Attributes:
        rows: quantities that at least one model has, with differences from the first model.
        measured: measurements by label of the model.
        failed: always empty, because a failure ends the comparison; reports list the failures of all kinds of suites.
    """

    file: ClassVar = "comparison.json"
    rows: list[ComparedQuantity]
    measured: dict[str, dict[str, object]] = Field(alias="models", min_length=1)
    failed: dict[str, str] = Field(default_factory=dict)


class FamilyMember(ReadDocument):
    """Published and measured sink rate of one of the open models of the paper (2410.10781).

    Attributes:
        parameters: number of parameters, with tied embeddings counted once.
        sink_1: measured Sink_1, percent; at the paper's eps if it was measured, else at the first eps.
        published: published Sink_1, percent; None if the paper has no value for the settings.
    """

    family: str
    parameters: int
    sink_1: float
    published: float | None


class FamiliesDocument(ReadDocument):
    """families.json: the paper's (2410.10781) open models; `measured` and `failed` are by Hugging Face id."""

    file: ClassVar = "families.json"
    measured: dict[str, FamilyMember] = Field(alias="models")
    failed: dict[str, str] = Field(default_factory=dict)


StepUnit = Literal["step", "tokens"]
"""Unit of the numbers in checkpoint names."""


class MeasuredCheckpoint(ReadDocument):
    """Main numbers of a checkpoint of a model during training.

    Attributes:
        step: number of updates or, if `unit` is "tokens", of tokens, before the checkpoint.
        checkpoint: name of the revision or folder; `step_N` for a run.
        sink_1: Sink_1, percent of (sequence, layer, head) triples; `by_layer`, by attention layer.
        sink_bias: sink rate of a bias, sink logit, stick-breaking remainder, sink token or registers, percent; None if
            the model has none of them.
        uniform_ratio: importance of the first token divided by its value under uniform attention.
        loss: loss on the input sequences, nats per token; None if not measured.
        norm_ratio: |h_1| divided by the mean |h_t| of the other positions, maximum over the embedding and all blocks;
            None if unknown or infinite.
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
    """checkpoints.json: one model during training; `measured` and `failed` are by key, `step_N` or `tokens_N`."""

    file: ClassVar = "checkpoints.json"
    model: str
    measured: dict[str, MeasuredCheckpoint] = Field(alias="checkpoints")
    failed: dict[str, str] = Field(default_factory=dict)


SuiteDocument = DomainsDocument | ComparisonDocument | FamiliesDocument | CheckpointsDocument
