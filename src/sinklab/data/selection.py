"""What part of the text is taken, and in what proportion: the keys that a recipe and prepared data have in common."""

from importlib import resources
from typing import Any, Literal, Self

import yaml
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from sinklab.schema import Part


def paper_weights() -> dict[str, float]:
    """The 17 domains of the paper's corpus and their weights (data/regmix.yaml)."""
    return yaml.safe_load((resources.files("sinklab") / "data" / "regmix.yaml").read_text(encoding="utf-8"))


class WeightedMix(Part):
    """Domains by weight: each domain's share of the tokens follows its weight; the mix ends where one runs out.

    Attributes:
        weights: domain -> weight, above 0; their sum does not matter. The paper's unless given.
        seed: of the order in which domains take turns.
        absent: what to do about domains that the source does not have: refuse, or leave them out (`renormalise`).
    """

    kind: Literal["weights"] = "weights"
    weights: dict[str, float] = Field(default_factory=paper_weights, min_length=1)
    seed: int = Field(default=0, ge=0)
    absent: Literal["refuse", "renormalise"] = "refuse"

    @model_validator(mode="after")
    def _weights_are_positive(self) -> Self:
        if bad := [name for name, weight in self.weights.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"weights.{bad[0]} is {self.weights[bad[0]]}: it must be above 0, or left out")
        return self


class UniformMix(Part):
    """All files at the same pace, as the paper's code does: a file that ends leaves the others to go on.

    Attributes:
        seed: of the order in which files take turns.
    """

    kind: Literal["files"] = "files"
    seed: int = Field(default=0, ge=0)


Mix = WeightedMix | UniformMix


class Selection(Part):
    """Proportion and amount.

    Attributes:
        mix: how the files of a folder or dataset take turns; one after the other unless given.
        token_limit: prepare exactly this many tokens, training and validation together; fewer where the text ends.

    Both are left out where they are not set, so that hashes from before they existed stay true.
    """

    mix: Mix | None = Field(default=None, discriminator="kind")
    token_limit: int | None = Field(default=None, ge=2)

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in handler(self).items() if v is not None or k not in Selection.model_fields}
