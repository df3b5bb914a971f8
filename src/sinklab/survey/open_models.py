"""Load `open_models.yaml`: the open models that the paper (2410.10781) measures, with sizes and sink rates."""

from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from sinklab.errors import InputError
from sinklab.files import parse_yaml
from sinklab.schema import Part

FILE = "open_models.yaml"
EVERY = "all"


class Setting(Part):
    """Settings with which the paper measured the published sink rates; its text is not public."""

    sequences: int
    length: int
    eps: float

    def applies(self, sequences: int, length: int, eps: Collection[float]) -> bool:
        """Return whether a measurement has these settings; `eps` are its thresholds of the sink rate."""
        return (sequences, length) == (self.sequences, self.length) and self.eps in eps


class OpenModel(Part):
    """A model in open_models.yaml.

    Attributes:
        id: Hugging Face id.
        family: name of the family, as passed to --family.
        dtype: data type of the checkpoint on the Hugging Face hub.
        parameters: number of parameters, with tied embeddings counted once.
        width, vocabulary: hidden size, and number of rows of the embedding.
        published: published Sink_1 in percent, by kind of input; empty if the paper has no number.
        source: part of the paper with the published rates, such as "table 1" or "text"; None if there are none.
    """

    id: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    family: str
    dtype: Literal["float32", "float16", "bfloat16"]
    parameters: int = Field(gt=0)
    width: int = Field(gt=0)
    vocabulary: int = Field(gt=0)
    published: dict[Literal["natural", "random", "repeat"], float] = Field(default_factory=dict)
    source: str | None = None


@cache
def setting() -> Setting:
    """Load the settings with which the paper measured the published sink rates."""
    return Setting.model_validate(_document()["setting"])


@cache
def families() -> dict[str, tuple[OpenModel, ...]]:
    """Load the paper's open models by family."""
    return {
        name: tuple(OpenModel(family=name, dtype=family["dtype"], **model) for model in family["models"])
        for name, family in _document()["families"].items()
    }


def models_of(names: Sequence[str]) -> list[OpenModel]:
    """Return the models of the named families (`all`: every family), in the order of open_models.yaml.

    Raises:
        InputError: if a family is unknown; the message lists the known families.
    """
    known = families()
    if unknown := [name for name in names if name not in (*known, EVERY)]:
        raise InputError(f"unknown family {unknown[0]!r}; choose from: {', '.join((*known, EVERY))}")
    return [model for name, models in known.items() if name in names or EVERY in names for model in models]


def _document() -> dict[str, Any]:
    file = resources.files("sinklab") / "survey" / FILE
    return parse_yaml(file.read_text(encoding="utf-8"))
