"""`sinklab assess` on the command line: what a sink costs and buys."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from sinklab.assessing.plan import AssessOptions
from sinklab.commands.console import duration
from sinklab.commands.ending import stderr
from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, LoadingOptions, ModelName
from sinklab.commands.terminal.bars import StepProgress
from sinklab.errors import UnsavedError
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.assessing.assessment import Assessment


@with_options
def assess(
    *,
    model: ModelName,
    text: Annotated[
        Path | None,
        typer.Option(help=".txt or .jsonl, read as one stream; default for a run: its validation text."),
    ] = None,
    options: AssessOptions,
    loading: LoadingOptions,
    out: Annotated[Path | None, typer.Option(help="Directory for assessment.json; the same call resumes.")] = None,
    as_json: Json = False,
) -> None:
    """Assess what a sink costs and buys: streaming, quantisation, eviction, length, what the sink carries, heads.

    Each loss is reported with the divergence from the unchanged model; the formulas are in docs/assess.md.

    Example: sinklab assess runs/tiny-0 --text stories.txt --parts streaming,quantisation --out runs/tiny-0/assess
    """
    from sinklab.assessing.running import assess as assess_model
    from sinklab.commands.terminal.results import print_assessment

    console = stderr()

    def show(assessment: "Assessment") -> None:
        if as_json:
            print(json.dumps(assessment.document(), indent=2))
        else:
            print_assessment(assessment, Console())

    with keeping_what_is_finished() if out is not None else nullcontext(), AssessProgress(console) as listener:
        try:
            found = assess_model(
                model, text, options, loading=loading.on(console), out=out, listener=cast(Any, listener)
            )
        except UnsavedError as error:
            show(cast("Assessment", error.result))
            raise
    show(found)


class AssessProgress(StepProgress):
    """An `AssessListener`."""

    def starts(self, part: str, passes: int) -> None:
        """Show the bar of the part."""
        self.begin(part, passes)
        self.say_without_terminal(f"{part}: {passes} sequences to be read")

    def advances(self) -> None:
        """Move the bar."""
        self.move(1)

    def ends(self, part: str, seconds: float) -> None:
        """Print how long it took."""
        self.say(f"{part}: done in {duration(seconds)}")

    def keeps(self, part: str) -> None:
        """Print that it is there already."""
        self.say(f"{part}: kept")

    def skips(self, part: str, why: str) -> None:
        """Print why."""
        self.say(f"{part}: skipped: {why}")
