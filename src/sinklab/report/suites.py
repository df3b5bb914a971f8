"""What suites (domains, a comparison, families of models) add to the words and tables of a report.

Numbers come from the measurements themselves; the document of a suite adds what they do not hold: which differences
were asked for, what the paper prints, and what could not be measured.
"""

from collections.abc import Callable

from sinklab.report.data import ReportData
from sinklab.survey.documents import ComparisonDocument, DomainsDocument, FamiliesDocument, FamilyMember, SuiteDocument

NOTHING = "–"


def only_suite(data: ReportData) -> SuiteDocument | None:
    """The document of the suite that all of the report is about; None where there is more, or none."""
    if len(data.suites) != 1 or len(data.suites[0].runs(data)) != len(data.runs):
        return None
    return data.suites[0].document


def first_column(data: ReportData) -> tuple[str, str] | None:
    """Name and unit of the column that names the measurements, where a suite has better words for them."""
    match only_suite(data):
        case DomainsDocument():
            return "Domain", "a file each"
        case ComparisonDocument():
            return "Model", "on the same text"
    return None


def extra_columns(data: ReportData) -> list[tuple[tuple[str, str], Callable[[str], str]]]:
    """Columns of the table of cells that only suites have: name and unit, and the text for a cell."""
    columns: list[tuple[tuple[str, str], Callable[[str], str]]] = []
    if any(isinstance(suite.document, DomainsDocument) for suite in data.suites):
        columns.append((("Sequences", "measured"), lambda cell: _sequences(data, cell)))
    if any(isinstance(suite.document, FamiliesDocument) for suite in data.suites):
        listed = _members(data)
        columns.append((("Published", "Sink₁, % of heads"), lambda cell: _published(listed.get(cell))))
        columns.append((("Parameters", "millions"), lambda cell: _millions(listed.get(cell))))
    return columns


def failures(data: ReportData) -> list[tuple[str, str]]:
    """What could not be measured, and why."""
    return [(name, f"not measured: {why}") for suite in data.suites for name, why in suite.document.failed.items()]


def _members(data: ReportData) -> dict[str, FamilyMember]:
    """The open models among the cells."""
    return {
        run.cell: suite.document.measured[name]
        for suite in data.suites
        if isinstance(suite.document, FamiliesDocument)
        for name, run in suite.runs(data)
    }


def _sequences(data: ReportData, cell: str) -> str:
    values = {str(run.measurement.sequences) for run in data.runs_of(cell) if run.measurement}
    return ", ".join(sorted(values)) or NOTHING


def _published(model: FamilyMember | None) -> str:
    return NOTHING if model is None or model.published is None else f"{model.published:,.2f}"


def _millions(model: FamilyMember | None) -> str:
    return NOTHING if model is None else f"{model.parameters * 1e-6:,.1f}"
