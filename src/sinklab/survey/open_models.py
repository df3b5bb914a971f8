"""Load `open_models.yaml`: the open models that the paper (2410.10781) measures, with sizes and sink rates."""

from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import Field

from sinklab.files import parse_yaml
from sinklab.schema import Part

FILE = "open_models.yaml"


class Setting(Part):
    """Settings with which the paper measured the published sink rates; its text is not public."""

    sequences: int
    length: int
    eps: float


class OpenModel(Part):
    """A model in open_models.yaml.

    Attributes:
        id: Hugging Face id.
        family: name of the family.
        parameters: number of parameters, with tied embeddings counted once.
        published: published Sink_1 in percent, by kind of input; empty if the paper has no number.
    """

    id: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    family: str
    parameters: int = Field(gt=0)
    published: dict[Literal["natural", "random", "repeat"], float] = Field(default_factory=dict)


@cache
def setting() -> Setting:
    """Load the settings with which the paper measured the published sink rates."""
    return Setting.model_validate(_document()["setting"])


@cache
def families() -> dict[str, tuple[OpenModel, ...]]:
    """Load the paper's open models by family."""
    return {
        name: tuple(OpenModel(family=name, **model) for model in models)
        for name, models in _document()["families"].items()
    }


def _document() -> dict[str, Any]:
    file = resources.files("sinklab") / "survey" / FILE
    return parse_yaml(file.read_text(encoding="utf-8"))
