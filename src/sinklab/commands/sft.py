"""`sinklab sft`: instruction tuning, with the sink beside the loss."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from sinklab.commands.ending import stderr
from sinklab.commands.options import MOST, Device, Json, Revision, TrustRemoteCode
from sinklab.commands.terminal.bars import StepProgress
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.tuning.documents import TuneEvaluation, TuneUpdate


def sft(
    model: Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")],
    data: Annotated[Path, typer.Option(help=".jsonl of conversations: messages, each with role and content.")],
    out: Annotated[Path, typer.Option(help="Directory for sft.json, metrics and, in the end, model/; continued.")],
    text: Annotated[
        Path | None, typer.Option(help="Measure the sink on this text; default: the conversations held out.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja in place of the model's chat template, best with {% generation %} marks.")
    ] = None,
    lr: Annotated[float, typer.Option(min=1e-12, max=1e3, help="Peak of the learning rate, a cosine to 0.")] = 2e-5,
    warmup: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the steps over which it rises.")] = 0.1,
    batch_size: Annotated[int, typer.Option(min=1, max=10**6, help="Conversations per step.")] = 64,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Of them at a time; default: about 4,096 tokens.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=4, max=MOST, help="Tokens of a conversation; default: 2,048, or the context.")
    ] = None,
    epochs: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Times that every conversation is read.")] = 1.0,
    steps: Annotated[int | None, typer.Option(min=1, max=MOST, help="Updates, in place of --epochs.")] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Conversations not trained on; default: a tenth, at most 100.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(min=1, help="Steps; default: a tenth of all.")] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps; default: a tenth of all.")] = None,
    sequences: Annotated[int, typer.Option(min=1, max=MOST, help="For the sink metric.")] = 100,
    sink_length: Annotated[
        int | None, typer.Option(min=2, max=MOST, help="Tokens of each; default: 64, or --length if less.")
    ] = None,
    eps: Annotated[
        float, typer.Option(min=1e-9, max=1 - 1e-9, help="A position is a sink above this importance.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the order of the conversations.")] = 0,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Tune a model on conversations, on what the assistant says; the sink is measured at every evaluation.

    The defaults are the paper's: learning rate 2e-5, cosine, 64 conversations of 2,048 tokens, one epoch. The same
    command continues what was interrupted. DIR/model is a Hugging Face directory, for `sinklab measure` and others.

    Example: sinklab sft runs/k --data chats.jsonl --out runs/k-chat
    """
    from sinklab.commands.terminal.tables import printable
    from sinklab.commands.terminal.training import print_tuning
    from sinklab.models.huggingface.loading import Loading
    from sinklab.tuning.preparing import TuneSources
    from sinklab.tuning.running import tune
    from sinklab.tuning.settings import TuneWanted

    console = stderr()

    def say(message: str) -> None:
        console.print(printable(message), markup=False, highlight=False, soft_wrap=True)

    wanted = TuneWanted(
        lr=lr,
        warmup=warmup,
        batch_size=batch_size,
        micro_batch=micro_batch,
        length=length,
        epochs=epochs,
        steps=steps,
        held_out=held_out,
        eval_every=eval_every,
        save_every=save_every,
        sequences=sequences,
        sink_length=sink_length,
        eps=eps,
        seed=seed,
    )
    loading = Loading("float32", device, trust_remote_code, revision, say=say)
    with keeping_what_is_finished(), TuneProgress(console) as listener:
        ended = tune(
            model, TuneSources(data, text, chat_template), wanted, out, loading=loading, listener=cast(Any, listener)
        )
        if ended.exit_status:
            say(f"stopped, saved in {out}")
            raise typer.Exit(ended.exit_status)
    if as_json:
        print(json.dumps(ended.tuning.document(), indent=2))
    else:
        print_tuning(ended.tuning, Console())
        say(f"model: {out / 'model'}")


class TuneProgress(StepProgress):
    """A `TuneListener`; steps are updates, with a line per evaluation."""

    def notes(self, notes: list[str]) -> None:
        """Say them."""
        for note in notes:
            self.say(note)

    def starts(self, steps: int, done: int) -> None:
        """Show the bar."""
        self.begin("updates", steps, done)
        self.say(f"continues after {done} of {steps} updates" if done else f"{steps} updates")

    def updated(self, update: "TuneUpdate") -> None:
        """Move the bar."""
        self.move(1, f"loss {update.loss:.3f}, gradient {update.grad_norm:.3g}")

    def evaluated(self, evaluation: "TuneEvaluation") -> None:
        """A line."""
        gradient = "" if evaluation.grad_norm is None else f", gradient {evaluation.grad_norm:.3g}"
        trained = "" if evaluation.train_loss is None else f"train {evaluation.train_loss:.4f}, "
        self.say(
            f"step {evaluation.step}: {trained}held out {evaluation.valid_loss:.4f}, "
            f"Sink_1 {evaluation.sink_rate[0]:.2f} %{gradient}"
        )
