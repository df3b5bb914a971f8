"""An assessment in the terminal."""

from rich.console import Console

from sinklab.assessing.assessment import Assessment
from sinklab.commands.terminal.tables import print_table, print_title
from sinklab.report.assessment_page import assessment_table


def print_assessment(assessment: Assessment, console: Console) -> None:
    """Print one table over all parts, with what was skipped and the notes."""
    print_title(f"{assessment.model}: {assessment.layers} layers, context {assessment.context:,}", console)
    print_table(assessment_table(assessment), console)
