"""Signals before the first step and outside of training: finished work is kept, and the status asks for a retry."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import typer
import yaml
from commands import Command, Kill, together
from sampling import one_in

from sinklab.commands.app import end
from sinklab.errors import SinklabError
from sinklab.signals import PreemptedError, left_on_signals
from sinklab.train.run import read_metrics

RECIPE = {
    "model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "train": {"steps": 3, "batch_size": 2, "eval_every": 3, "eval_sequences": 4, "save_every": 3},
    "metric": {"sequences": 4, "length": 16},
}
STATUSES = [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
SAYS = "interrupted; finished work is saved. Run the same command again to resume."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some parts (see `data/prepare.py`) and a recipe for it."""
    folder = tmp_path_factory.mktemp("signals")
    words, draw = [f"word{i} " for i in range(500)], random.Random(0)
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(250):
            file.write(json.dumps({"text": "".join(draw.choices(words, k=2000))}) + "\n")
    data = {"source": str(folder / "text.jsonl"), "tokenizer": "train:300"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"data": data}))
    return folder


def training(folder: Path, out: Path) -> list[str]:
    return ["train", str(folder / "recipe.yaml"), "--out", str(out)]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Command:
    """A finished run that prepared its text, with the counts of its function calls."""
    environment = {"SINKLAB_CACHE": str(folder / "cache")}
    command = Command(training(folder, folder / "run"), folder / "whole.log", environment, count=True)
    assert command.wait() == 0, command.printed()
    return command


def shards(cache: Path) -> list[bytes]:
    (data,) = (cache / "data").iterdir()
    assert not (data / "partial").exists()
    return [(data / name).read_bytes() for name in ("train.bin", "valid.bin", "data.json", "tokenizer.json")]


@pytest.mark.parametrize(("number", "status"), one_in(3, STATUSES))
def test_a_signal_while_text_is_prepared_keeps_the_finished_parts(
    number: int, status: int, folder: Path, undisturbed: Command, tmp_path: Path
) -> None:
    args, environment = training(folder, tmp_path / "run"), {"SINKLAB_CACHE": str(tmp_path / "cache")}
    moments, calls = random.Random(number), undisturbed.calls()
    assert len(calls["journal"]) > 2
    kills = [
        Kill(moments.randint(1, calls["journal"][1]), "journal", number, time=2),  # after the first part of several
        Kill(moments.randint(1, sum(calls["preparation"]) // 4), "preparation", number),
    ]
    for index, kill in enumerate(kills):
        asked = Command(args, tmp_path / f"asked{index}.log", environment, kill)
        assert asked.wait() == status, asked.printed()
        assert asked.printed().count(SAYS) == 1
        assert "Traceback" not in asked.printed()
        (journal,) = (tmp_path / "cache" / "data").glob("*/partial/journal.jsonl")
        assert journal.read_text()
    again = Command(args, tmp_path / "again.log", environment)
    assert again.wait() == 0, again.printed()
    assert shards(tmp_path / "cache") == shards(folder / "cache")


def test_data_prepare_ends_with_status_75_on_sigterm_and_the_same_call_completes_it(
    folder: Path, undisturbed: Command, tmp_path: Path
) -> None:
    args = ["data", "prepare", str(folder / "text.jsonl"), "--tokenizer", "train:300", "--out"]
    kill = Kill(sum(undisturbed.calls()["preparation"]) // 2, "preparation", signal.SIGTERM)
    asked = Command([*args, str(tmp_path / "out")], tmp_path / "asked.log", kill=kill)
    assert asked.wait() == 75, asked.printed()
    assert asked.printed().count(SAYS) == 1
    again = Command([*args, str(tmp_path / "out")], tmp_path / "again.log")
    assert again.wait() == 0, again.printed()
    (whole,) = (folder / "cache" / "data").iterdir()
    assert (tmp_path / "out" / "train.bin").read_bytes() == (whole / "train.bin").read_bytes()


@pytest.mark.parametrize(("number", "status"), one_in(3, STATUSES))
def test_a_signal_while_the_run_is_set_up_stops_it_before_the_first_step(
    number: int, status: int, folder: Path, undisturbed: Command, tmp_path: Path
) -> None:
    args, environment = training(folder, tmp_path / "run"), {"SINKLAB_CACHE": str(folder / "cache")}
    nearly_all = sum(undisturbed.calls()["setup"]) * 9 // 10  # the count differs by some calls from run to run
    kill = Kill(random.Random(number).randint(1, nearly_all), "setup", number)
    asked = Command(args, tmp_path / "asked.log", environment, kill)
    assert asked.wait() == status, asked.printed()
    assert asked.printed().count(SAYS) == 1
    saved = [path.name for path in (tmp_path / "run").glob("checkpoints/*")]
    assert saved in ([], ["step_00000000"])  # while the model is built there is nothing to save
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    again = Command(args, tmp_path / "again.log", environment)
    assert again.wait() == 0, again.printed()
    losses = [[row["valid_loss"] for row in read_metrics(out / "run" / "metrics.jsonl")] for out in (folder, tmp_path)]
    assert losses[0] == losses[1]


def test_measuring_ends_with_status_75_on_sigterm(folder: Path, undisturbed: Command, tmp_path: Path) -> None:
    args = ["measure", str(folder / "run"), "--text", str(folder / "text.jsonl"), "--length", "16", "--sequences", "9"]
    whole = Command(args, tmp_path / "whole.log", count=True)
    assert whole.wait() == 0, whole.printed()
    kill = Kill(sum(whole.calls()["command"]) // 2, "command", signal.SIGTERM)
    asked = Command(args, tmp_path / "asked.log", kill=kill)
    assert asked.wait() == 75, asked.printed()
    assert asked.printed().endswith(
        "interrupted; unfinished results were not saved. Run the same command again to start over.\n"
    )


@pytest.mark.parametrize("module", ["typer", "sinklab.commands.app", "sinklab.train.recipe", "torch"])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module: str, folder: Path, tmp_path: Path) -> None:
    """The signal is sent when the module is about to be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "sinklab", *training(folder, tmp_path / "run"), "--dry-run"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert "is kept" not in ended.stderr


class Dropped:
    """An object that supports weak references."""


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, PreemptedError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_within_a_callback_that_drops_exceptions_is_not_lost(number: int, raised: type) -> None:
    def work() -> None:
        dropped = Dropped()
        reference = weakref.ref(dropped, lambda _: signal.raise_signal(number))
        del dropped  # the callback runs here, and Python drops the exception that the handler raises in it
        assert reference() is None
        threading.Event().wait(20)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # jobs in the background inherit that SIGINT is ignored
    try:
        with pytest.raises(raised), left_on_signals():
            work()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--set", "model.layer=3"], "model.layer: unknown key"),
        (["--set", "train.batch_size=3"], "batch_size 3 is not a multiple of the number of processes"),
        (["--set", "data.source=nowhere.txt"], "nowhere.txt"),
        (["--steps", "3"], "No such option"),
    ],
)
def test_only_the_first_of_several_processes_prints_an_error(
    settings: list[str], says: str, folder: Path, undisturbed: Command, tmp_path: Path
) -> None:
    args = [*training(folder, tmp_path / "run"), *settings]
    pair = together(args, tmp_path / "log", 2, environment={"SINKLAB_CACHE": str(folder / "cache")})
    assert [process.wait() for process in pair] == [2, 2]
    assert says in pair[0].printed()
    assert pair[1].printed() == ""


def test_only_the_first_of_several_processes_prints_that_they_were_interrupted(
    folder: Path, undisturbed: Command, tmp_path: Path
) -> None:
    args = [*training(folder, tmp_path / "run"), "--set", "train.steps=100000"]
    environment = {"SINKLAB_CACHE": str(folder / "cache")}
    kill = Kill(1, "update", signal.SIGTERM, time=3)
    pair = together(args, tmp_path / "log", 2, kill, victim=1, environment=environment)
    assert [process.wait() for process in pair] == [75, 75]
    assert pair[0].printed().count(SAYS) == 1
    assert pair[1].printed() == ""


class AskedWhileSaidError(SinklabError):
    """Sends a signal the first time that its message is printed."""

    asked = False

    def __str__(self) -> str:
        if not self.asked:
            self.asked = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__str__()


def test_a_signal_while_an_error_is_printed_does_not_end_in_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sinklab"])
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise AskedWhileSaidError("what failed")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(SystemExit) as ended:
            end(app)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == 75
    assert "interrupted; unfinished results were not saved" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_torchrun_interrupted_while_text_is_prepared_prints_one_message(folder: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sinklab"]
    large = tmp_path / "text.jsonl"
    with large.open("wb") as file:
        for _ in range(10):
            with (folder / "text.jsonl").open("rb") as part:
                shutil.copyfileobj(part, file)
    args = [*training(folder, tmp_path / "run"), "--set", f"data.source={large}"]
    cache = tmp_path / "cache"
    environment = {**os.environ, "SINKLAB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*torchrun, *args], env=environment, stderr=subprocess.PIPE, text=True)

    def finished() -> int:
        return sum(path.stat().st_size for path in cache.glob("data/*/partial/journal.jsonl"))

    while not finished():
        assert process.poll() is None
    process.terminate()
    assert process.stderr is not None
    printed = process.stderr.read()
    assert process.wait() != 0
    assert printed.count(SAYS) == 1
    assert "error:" not in printed
    assert finished()
