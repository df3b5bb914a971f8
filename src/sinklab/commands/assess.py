"""`sinklab assess` on the command line: what a sink costs and buys."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from sinklab.commands.ending import stderr
from sinklab.commands.options import MOST, Device, Dtype, Json, Revision, Seed, TrustRemoteCode
from sinklab.commands.terminal.bars import StepProgress
from sinklab.commands.timing import duration
from sinklab.errors import InputError
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.assessing.assessment import Assessment

Positions = Literal["cache", "text"]


def assess(
    model: Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")],
    text: Annotated[
        Path | None,
        typer.Option(help=".txt or .jsonl, read as one long text; of a run, unless given, what it was validated on."),
    ] = None,
    parts: Annotated[
        str,
        typer.Option(help="Of streaming, quantisation, eviction, length, carries and heads, with commas; or all."),
    ] = "all",
    sequences: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="How many; default: 2,048 tokens, streaming 4,096.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=8, max=MOST, help="Tokens per sequence; default: the context, at most 1,024.")
    ] = None,
    stream_length: Annotated[
        int | None, typer.Option(min=8, max=MOST, help="Tokens per sequence of streaming; default: 4 times --length.")
    ] = None,
    cache: Annotated[
        list[int] | None, typer.Option(help="Keys in the rolling cache; may be repeated. Default: 1/16 and 1/4 of it.")
    ] = None,
    keep: Annotated[
        list[int] | None, typer.Option(help="First tokens that stay in it; may be repeated. Default: 0, 1, 2, 4.")
    ] = None,
    positions: Annotated[
        Positions | None, typer.Option(help="In the cache or in the text; default: in the cache where that can be.")
    ] = None,
    budget: Annotated[
        list[int] | None, typer.Option(help="Keys that eviction leaves; may be repeated. Default: 1/8 and 1/4.")
    ] = None,
    sink_tokens: Annotated[int, typer.Option(min=1, help="How many first tokens are the sink.")] = 1,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory for assessment.json; the same call continues what it finds there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Assess what a sink costs and buys: streaming, quantisation, eviction, length, what the sink carries, heads.

    Every loss stands beside the divergence from the unchanged model; the formulas are in docs/assess.md.

    Example: sinklab assess runs/tiny-0 --text stories.txt --parts streaming,quantisation --out runs/tiny-0/assess
    """
    from contextlib import nullcontext

    from rich.console import Console

    from sinklab.assessing.plan import Wanted
    from sinklab.assessing.running import assess as assess_model
    from sinklab.commands.terminal.assess import print_assessment
    from sinklab.commands.terminal.tables import printable
    from sinklab.errors import UnsavedError
    from sinklab.models.huggingface.loading import Loading

    console = stderr()

    def say(message: str) -> None:
        console.print(printable(message), markup=False, highlight=False, soft_wrap=True)

    def show(assessment: "Assessment") -> None:
        if as_json:
            print(json.dumps(assessment.document(), indent=2))
        else:
            print_assessment(assessment, Console())

    wanted = Wanted(
        parts=parts_of(parts),
        sequences=sequences,
        length=length,
        stream_length=stream_length,
        caches=tuple(cache or ()),
        kept=tuple(keep or ()),
        positions=positions,
        budgets=tuple(budget or ()),
        sink_tokens=sink_tokens,
        seed=seed,
    )
    loading = Loading(dtype, device, trust_remote_code, revision, say=say)
    with keeping_what_is_finished() if out is not None else nullcontext(), AssessProgress(console) as listener:
        try:
            found = assess_model(model, text, wanted, loading=loading, out=out, listener=cast(Any, listener))
        except UnsavedError as error:
            show(cast("Assessment", error.result))
            raise
    show(found)


def parts_of(given: str) -> tuple[str, ...]:
    """The parts of --parts: a list with commas, or all, which is whatever the model can be given.

    Raises:
        InputError: a name that is none.
    """
    from sinklab.assessing.parts import PARTS

    names = [name.strip() for name in given.split(",")]
    if names == ["all"]:
        return ()
    for name in names:
        if name not in PARTS:
            raise InputError(f"--parts {given}: {name!r} is none; give some of {', '.join(PARTS)}, or all")
    return tuple(part for part in PARTS if part in names)


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
