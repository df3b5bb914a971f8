"""The command line `sinklab`: results go to stdout, messages to stderr. Commands import slow modules when called.

`end` runs a command, prints its errors to stderr, and sets its exit status. Only rank 0 prints errors common to all
ranks.
"""

import errno
import logging
import os
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from pydantic import Field
from rich.console import Console

from sinklab import __version__, signals
from sinklab.commands import reproduce
from sinklab.commands.measure import advise, assess, compare, evaluate, measure, parity, sft
from sinklab.commands.options import Json, PanelCommand, PlainGroup, option, print_result, with_options
from sinklab.commands.reproduce import lab
from sinklab.commands.terminal import DataDisplay, JobProgress, print_text, stderr
from sinklab.errors import InputError, SinklabError, cause, is_out_of_memory
from sinklab.files import DISK_FULL, check_writable, parse_yaml
from sinklab.settings import ADVANCED, INPUT, LARGEST_INT64, OUTPUT, TRAINING, CommandSettings, Flag, Seed
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.data.loader import Mix

INACCESSIBLE = (errno.EACCES, errno.EPERM, errno.ELOOP)
NOISY = ("torchao", "torch.utils._pytree")  # warn of kernels for other GPUs when transformers imports torchao
SHOWN = 80  # characters shown of a path that is too long
_KEPT = "interrupted; finished work is saved. Run the same command again to resume."
_NOT_KEPT = "interrupted; unfinished results were not saved. Run the same command again to start over."
_OUT_OF_MEMORY = (
    "out of memory: use a smaller model, shorter sequences or smaller batches "
    "(train.micro_batch, --batch-size). Files saved earlier are unchanged"
)


def end(app: typer.Typer) -> NoReturn:
    """Run the command in sys.argv, and exit with its status: 130 after Ctrl-C, 75 after SIGTERM or SIGUSR1."""
    try:
        with signals.left_on_signals():
            status = _status(app)
    except (KeyboardInterrupt, typer.Abort):
        status = signals.INTERRUPTED
    except signals.PreemptedError:
        status = signals.CALL_AGAIN
    kept = signals.was_kept()
    if status in (signals.INTERRUPTED, signals.CALL_AGAIN):
        signals.ignore_signals()
        if _is_first():
            print_text(_KEPT if kept else _NOT_KEPT, stderr())
    if _has_others():  # `joined_world` requires os._exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _status(app: typer.Typer) -> int:
    """Run the command and return its exit status; print the message of an expected error."""
    if "" in sys.argv[1:]:  # an empty path would be the current folder
        _say_error(
            "an argument is empty, as from an unset variable of the shell: pass a value, or leave the option out"
        )
        return 2
    try:
        status = app(standalone_mode=False)
    except SinklabError as error:
        if not error.printed_elsewhere:
            _say_error(str(error))
        return error.exit_status
    except typer.Exit as leaving:
        return leaving.exit_code
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # raised by any use of a path argument
            _say_error(f"{str(error.filename)[:SHOWN]}...: {error.strerror}; use a shorter path")
            return 2
        if error.errno in INACCESSIBLE and error.filename is not None:  # also raised by any use
            _say_error(f"cannot access {error.filename}: {error.strerror}. Make it accessible, or use another path")
            return 2
        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        _say_error(f"cannot write the result to stdout ({error.strerror}): free disk space, or redirect stdout")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  flushing the rest of the output at exit would fail again
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            _say_error(f"{_OUT_OF_MEMORY} ({str(error).strip() or type(error).__name__})")
            return 1
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # type: ignore[attr-defined]  # empty if a help text was printed
        if message and _is_first():  # all processes have the same command line
            _say_error(f"{message}{'' if message[-1] in '.?' else '.'} See --help.")
        return 2
    return status if isinstance(status, int) else 0


def _has_others() -> bool:
    """Return True if torchrun has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _is_first() -> bool:
    return not _has_others() or os.environ.get("RANK", "0") == "0"


def _say_error(message: str) -> None:
    console = stderr()
    console.print("error:", style="bold red", end=" ")
    print_text(message.replace("Value error, ", ""), console)  # pydantic's prefix, in our messages and in typer's


app = typer.Typer(cls=PlainGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
data_app = typer.Typer(cls=PlainGroup, help="Prepare text for training.", no_args_is_help=True)


def main() -> None:
    """Run the command line and exit with its status; expected errors are printed to stderr without a traceback."""
    for library in NOISY:
        logging.getLogger(library).setLevel(logging.ERROR)
    end(app)


class TrackerChoice(StrEnum):  # typer does not support lists of literals
    """Experiment trackers to which training metrics can be logged."""

    wandb = "wandb"
    tensorboard = "tensorboard"


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"sinklab {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A laboratory for attention sinks in language models: train, measure, report.

    Example: sinklab measure MODEL --text stories.txt --out measured

    Example: sinklab lab
    """


@with_options
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe file, or one of tiny, mini, laptop, lab, tiny-128, small, 60m, 1b, backcopy, "
            "trigger_average, continued."
        ),
    ],
    overrides: Annotated[
        list[str] | None, option(TRAINING, "Override a recipe key; repeatable.", "--set", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[
        Path | None,
        option(OUTPUT, "Run directory; default: runs/NAME-HASH, with the recipe's name and the run's hash."),
    ] = None,
    replay: Annotated[
        int | None,
        option(
            ADVANCED,
            "Instead of training, recompute this step and report the first tensor with NaN or infinity.",
            metavar="STEP",
        ),
    ] = None,
    dry_run: Annotated[bool, option(OUTPUT, "Only print parameters, FLOPs and estimated memory.")] = False,
    anyway: Annotated[
        bool, option(ADVANCED, "Train even if the memory estimate exceeds the memory of the GPU or machine.")
    ] = False,
    track: Annotated[
        list[TrackerChoice] | None,
        option(OUTPUT, "Also log to wandb (offline: WANDB_MODE=offline) or tensorboard; repeatable.", metavar="NAME"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model, or resume its run.

    Example: sinklab train tiny --set model.attention.bias=k --set train.steps=500

    With several processes: torchrun --nproc-per-node 8 -m sinklab train 60m

    Ctrl-C (exit status 130), SIGTERM and SIGUSR1 (exit status 75) stop training after a checkpoint is saved; the same
    command resumes.
    """
    from sinklab.commands.train import plan_command, replay_command, train_command

    if dry_run and replay is not None:
        raise InputError("--replay and --dry-run are mutually exclusive: pass one of them")
    if dry_run:
        from sinklab.commands.results import print_plan

        plan, speaks = plan_command(recipe, overrides or [])
        if speaks:
            print_result(as_json, plan.document, lambda out: print_plan(plan, out))
        return
    if replay is not None:
        from sinklab.commands.results import print_replay

        found = replay_command(recipe, overrides or [], out, replay, stderr())
        print_result(as_json, found.document, lambda out: print_replay(found, out))
        return
    with keeping_what_is_finished():
        train_command(recipe, overrides or [], out, stderr(), [one.value for one in track or ()], anyway, as_json)


@with_options
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory with a checkpoint.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    step: Annotated[
        int | None, option(INPUT, "Step of the exported checkpoint; default: the newest.", metavar="N", min=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a run to a Hugging Face model directory: safetensors, config, tokenizer, model card.

    transformers loads the export if it has an equivalent architecture, such as Llama for the recipe tiny. Other exports
    load after `sinklab.register()`, or with trust_remote_code=True, which runs the exported modelling file.

    Example: sinklab export runs/k my-model
    """
    from sinklab.export.directory import export_run

    with JobProgress(stderr(), phase=f"exporting {run}"):
        done = export_run(run, directory, step)
    alone = done.code is None
    how = (
        "loads in transformers without sinklab"
        if alone
        else f"loads after `sinklab.register()`, or with trust_remote_code from {done.code}"
    )
    line = f"{done.directory}: {done.architecture}, {done.parameters:,} parameters, step {done.step:,}; {how}"
    print_result(as_json, done.document, lambda out: print_text(line, out))


@with_options
def interventions(
    variants: Annotated[
        bool,
        option(OUTPUT, "List the variants that cells of experiment files can name, with their --set values, instead."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the recipe keys that change a model or its training, with allowed, default and neutral values.

    A key at its neutral value has no effect on training. Not every key has a known neutral value.

    Example: sinklab interventions
    """

    from sinklab.commands.results import print_catalogue, print_variants
    from sinklab.interventions import VARIANTS, catalogue

    if variants:
        overlays = {name: one.overlay for name, one in sorted(VARIANTS.items())}
        print_result(as_json, lambda: overlays, lambda out: print_variants(overlays, out))
        return
    rows = catalogue()
    print_result(as_json, lambda: [asdict(row) for row in rows], lambda out: print_catalogue(rows, out))


@with_options
def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Directories of runs, measurements, assessments or sweeps."),
    ],
    out: Annotated[Path | None, option(OUTPUT, "Path of the HTML file; default: report.html in the first DIR.")] = None,
    formats: Annotated[
        list[str] | None,
        option(OUTPUT, "Also save every chart in charts/ as svg, pdf or png; repeatable.", "--format", metavar="TYPE"),
    ] = None,
    pack: Annotated[
        Path | None, option(OUTPUT, "Also copy the sweep, without weights, into this folder for version control.")
    ] = None,
    table: Annotated[
        Path | None, option(OUTPUT, "Also write a table with a row per measured model: a .md or .csv file.")
    ] = None,
) -> None:
    """Write report.html from the results on disk, and print its main tables; unfinished runs are included.

    Example: sinklab report runs/lab --format svg

    Example: sinklab report measured/* --table models.md
    """
    from sinklab.commands.results import print_report
    from sinklab.report.collect import collect
    from sinklab.report.models_table import write_models_table
    from sinklab.report.page import write_page

    with JobProgress(stderr(), phase="writing the report"):  # refuses --format and --out before anything is packed
        found = collect(directories)
        if table is not None:
            write_models_table(found, table)
        path = write_page(found, out, formats or ())
    if pack is not None:
        from sinklab.report.packing import pack_sweep

        with JobProgress(stderr(), phase="packing"):
            packed = pack_sweep(found, pack)
        print_text(f"packed: {packed}", stderr())
    print_report(found, Console())
    print_text(f"report: {path}", stderr())


@with_options
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder written by report --pack.")],
    retrain: Annotated[
        int, option(INPUT, "Number of finished runs, drawn at random, to retrain and compare.", min=0)
    ] = 0,
    seed: Annotated[int, option(INPUT, "Random seed for drawing the runs.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Verify packed results: checksums, run hashes, dates of claims, summary and README; optionally retrain some runs.

    Example: sinklab verify results/laptop --retrain 2

    A retrained run must match bit for bit if it has the recorded processor, device, Python and torch versions, number
    of threads and compilation of the loss. Otherwise, its first validation loss after step 0 and its last must match
    within the printed tolerances, and both values of Sink_1 are printed. Only retraining finds metrics that were
    changed together with their checksums and the summary. The exit status is 1 if a check fails.
    """

    from sinklab.commands.results import print_checks
    from sinklab.experiments.sweep.packed import verify_packed
    from sinklab.report.packing import check_readme

    with JobProgress(stderr(), phase="reading the packed results") as progress:

        def say(text: str) -> None:
            progress.say(text)
            progress.begin(text)

        checks = [*verify_packed(directory, retrain, seed, say), check_readme(directory)]
    print_result(as_json, lambda: [asdict(check) for check in checks], lambda out: print_checks(checks, out))
    if any(check.problems for check in checks):
        raise typer.Exit(1)


@with_options
def runs(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories to search for runs.")],
    as_json: Json = False,
) -> None:
    """List training runs: state, step, sink rate, loss, and changed recipe keys.

    Example: sinklab runs runs

    States: running, done, stopped (the command that started the run resumes it), failed, not begun (no checkpoint),
    damaged. Recipe keys are compared with the shipped recipe of the same name or, if there is none, with the listed
    runs of that name.
    """

    from sinklab.commands.results import print_runs
    from sinklab.report.collect import list_runs

    found = list_runs(directories)
    print_result(as_json, lambda: [asdict(run) for run in found], lambda out: print_runs(found, out))


class PrepareSettings(CommandSettings, frozen=True):
    """Settings of `sinklab data prepare`, described by their help, by `DataConfig` and by `WeightedMix`."""

    panel = INPUT

    tokenizer: str = Field(
        description="Hugging Face name or path, train:SIZE (BPE trained on the text), or `words` (of synthetic:NAME)."
    )
    valid_fraction: float = Field(
        default=0.02, gt=0, le=0.5, description="Fraction of the documents held out for validation, at most 0.5."
    )
    column: Annotated[str | None, Flag(metavar="NAME")] = Field(
        default=None, description="Column of the text in rows; default: text, a conversation, content, or prompt."
    )
    text_limit_bytes: Annotated[int | None, Flag("--limit-bytes")] = Field(
        default=None, ge=1, le=LARGEST_INT64, description="Read at most this many bytes of text."
    )
    token_limit: Annotated[int | None, Flag("--limit-tokens")] = Field(
        default=None,
        ge=2,
        le=LARGEST_INT64,
        description="Write at most this many tokens, training and validation together.",
    )
    mix_kind: Annotated[Literal["weights", "files"] | None, Flag("--mix", metavar="KIND")] = Field(
        default=None,
        exclude=True,
        description="Interleave domains by weight (weights), or all files at equal rates (files); default: sequential.",
    )
    weights: Path | None = Field(
        default=None,
        exclude=True,
        description="With --mix weights: YAML file with lines `domain: weight`; default: the paper's 17 domains.",
    )
    absent: Annotated[Literal["refuse", "renormalise"], Flag(metavar="HOW")] = Field(
        default="refuse",
        exclude=True,
        description="With --mix weights, for domains without files: refuse, or renormalise the other weights.",
    )
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(
        default=0, exclude=True, description="With --mix: random seed of the interleaving."
    )

    @property
    def mix(self) -> "Mix | None":
        """Data mix that the options specify; None without --mix.

        Raises:
            InputError: if --weights or --absent is set without --mix weights, or the weights file cannot be
                read or is invalid.
        """
        from sinklab.data.loader import UniformMix, WeightedMix

        kind, weights = self.mix_kind, self.weights
        if kind != "weights" and (weights is not None or self.absent != "refuse"):
            raise InputError("--weights and --absent require --mix weights: add --mix weights, or remove them")
        if kind is None:
            return None
        if kind == "files":
            return UniformMix(seed=self.seed)
        values: dict[str, Any] = {"seed": self.seed, "absent": self.absent}
        try:
            if weights is not None:
                values["weights"] = parse_yaml(weights.read_text(encoding="utf-8"))
            return WeightedMix.model_validate(values)
        except OSError as error:
            raise InputError(f"cannot read {weights}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(
                f"{weights}: expected lines `domain: weight` with positive weights ({cause(error)})"
            ) from error


@with_options
def prepare(
    *,
    source: Annotated[
        str,
        typer.Argument(
            help="stdlib or site-packages (files of this Python), a text file (.txt, .jsonl, .csv, .parquet, ..), "
            "a folder of them, hf:NAME "
            "(dataset on the Hugging Face hub) or synthetic:NAME."
        ),
    ],
    options: PrepareSettings,
    out: Annotated[Path, option(OUTPUT, "Directory for the token shards.")],
    dry_run: Annotated[bool, option(OUTPUT, "Only estimate the number of bytes and tokens.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into shards that recipes use as data.source.

    Example: sinklab data prepare stories.txt --tokenizer train:4096 --out data/stories

    The same command resumes after an interruption; the shards are byte-identical to those of an uninterrupted call.
    Encoding uses all cores, or RAYON_NUM_THREADS threads.
    """
    from sinklab.commands.results import print_estimate
    from sinklab.data.loader import is_prepared
    from sinklab.data.prepare import prepare, settings_of
    from sinklab.data.texts import estimate

    settings = settings_of(source, mix=options.mix, **options.model_dump())
    if dry_run:
        with JobProgress(stderr(), phase="estimating"):
            found = estimate(settings)
        print_result(as_json, lambda: asdict(found), lambda out: print_estimate(found, out))
        return
    if not is_prepared(out):
        check_writable(out)
    with keeping_what_is_finished(), DataDisplay(stderr()) as display:
        dataset = prepare(settings, out, display, display.counted)
    if as_json:
        print((out / "data.json").read_text(encoding="utf-8"))
        return
    print(f"{out}: {len(dataset.train):,} training and {len(dataset.valid):,} validation tokens")
    for name, share in (dataset.manifest.shares or {}).items():
        print(f"  {name}: {share.tokens:,} tokens")
    for note in dataset.manifest.notes or ():
        print(f"  {note}")


GROUPS = {
    "Measure a model": {
        "measure": measure,
        "compare": compare,
        "assess": assess,
        "advise": advise,
        "parity": parity,
        "eval": evaluate,
    },
    "Train models": {
        "lab": lab,
        "train": train,
        "sft": sft,
        "export": export,
        "interventions": interventions,
    },
    "Experiments": {"experiments": reproduce.experiments, "reproduce": reproduce.reproduce, "verify": verify},
    "Results on disk": {"report": report, "runs": runs},
}
"""Commands by panel of `sinklab --help`; the group `data` is added below."""

for title, commands in GROUPS.items():
    for name, command in commands.items():
        app.command(name, cls=PanelCommand, rich_help_panel=title)(command)
app.add_typer(data_app, name="data", rich_help_panel="Train models")
data_app.command("prepare", cls=PanelCommand)(prepare)
