"""domains.json, comparison.json and families.json as a report reads them, without the measurements inside.

Beside each document lies a folder for every measurement that it names, which holds the same and more.
"""

from pydantic import Field

from sinklab.schema import Document


class DomainsDocument(Document):
    """domains.json: one model on many texts.

    Attributes:
        model: name or path of what was measured.
        domains: what was measured, by the name of its folder.
        failed: why the others could not be measured, by name.
    """

    model: str
    domains: dict[str, dict[str, object]]
    failed: dict[str, str] = Field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of the folders, in order."""
        return list(self.domains)


class ComparedQuantity(Document):
    """A line of comparison.json; see `compare.Row`."""

    quantity: str
    unit: str
    values: dict[str, float | None]
    differences: dict[str, float | None]


class ComparisonDocument(Document):
    """comparison.json: several models on the same text, the first being the one the others are held against."""

    rows: list[ComparedQuantity]
    models: dict[str, dict[str, object]] = Field(min_length=1)
    failed: dict[str, str] = Field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of the folders, in order."""
        return list(self.models)


class FamilyMember(Document):
    """One open model of families.json.

    Attributes:
        parameters: tied embeddings counted once.
        sink_1: measured, percent.
        published: what the paper prints, percent; None where there is nothing for that setting.
    """

    family: str
    parameters: int
    sink_1: float
    published: float | None


class FamiliesDocument(Document):
    """families.json: the paper's open models.

    Attributes:
        models: what was measured, by name on the hub, which is that of its folder.
        failed: why the others could not be measured, by name.
    """

    models: dict[str, FamilyMember]
    failed: dict[str, str] = Field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of the folders, in order."""
        return list(self.models)


SuiteDocument = DomainsDocument | ComparisonDocument | FamiliesDocument
