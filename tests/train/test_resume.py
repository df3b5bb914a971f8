"""A run that is killed by SIGKILL anywhere, also inside a save, and resumed equals the undisturbed run, bit for bit."""

import random
import signal
from pathlib import Path

import pytest
import torch
import yaml
from commands import Command, Kill, together
from same_run import assert_same_run
from sampling import one_in
from torch import Tensor

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.files import sha256_of
from sinklab.interventions import VARIANTS
from sinklab.train.checkpoint import step_of
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe, load_recipe
from sinklab.train.run import open_run

BASE = {
    "model": {"layers": 2, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "data": {"tokenizer": "words", "valid_fraction": 0.1},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 12, "batch_size": 2, "eval_every": 5, "eval_sequences": 4, "save_every": 3},
    "metric": {"sequences": 4, "length": 16},
}
SOURCE = "synthetic:bigram_backcopy:length=9,documents=400"
"""Two documents in a chunk, so that masks of documents have something to hide."""
SAMPLE = ("softmax", "k_biases")
SEEN = 1e-6
"""Relative difference from the losses of plain softmax that is no longer rounding. Softcap has 7e-6."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic corpus, prepared."""
    folder = tmp_path_factory.mktemp("tokens")
    prepare(settings_of(SOURCE, "words", valid_fraction=0.1), folder)
    return folder


def written(name: str, tokens: Path, folder: Path) -> Path:
    """The recipe of a variant as a file."""
    recipe = build_recipe({**BASE, "data": {**BASE["data"], "source": SOURCE}}, VARIANTS[name].overlay)
    values = recipe.model_dump(mode="json")
    values["data"] |= {"source": str(tokens), "tokenizer": "train:1024"}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def losses(name: str, tokens: Path, folder: Path) -> Tensor:
    """Loss of each update of an uninterrupted run, nats per token, with chunked attention for all variants."""
    recipe = load_recipe(str(written(name, tokens, folder)), ["model.attention.backend=chunked"])
    trainer = Trainer(open_run(recipe, TokenDataset(tokens), folder / "run"))
    return torch.tensor([trainer._update() for _ in range(recipe.train.steps)], dtype=torch.float64)


@pytest.fixture(scope="module")
def of_softmax(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Losses of the run without an intervention."""
    return losses("softmax", tokens, tmp_path_factory.mktemp("softmax"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "softmax"])
def test_the_run_of_every_variant_differs_from_that_of_softmax(
    name: str, tokens: Path, of_softmax: Tensor, tmp_path: Path
) -> None:
    """The tests of killed runs prove nothing for a variant that has no effect in so small a run."""
    assert ((losses(name, tokens, tmp_path) - of_softmax).abs() > SEEN * of_softmax).any()


def is_whole(checkpoint: Path) -> bool:
    """Return True if the checkpoint has SHA256SUMS and all checksums match."""
    sums = checkpoint / "SHA256SUMS"
    lines = sums.read_text().splitlines() if sums.exists() else []
    return bool(lines) and all(sha256_of(checkpoint / line.split()[1]) == line.split()[0] for line in lines)


def assert_same_directory(one: Path, other: Path) -> None:
    assert_same_run(one, other)
    assert [p.name for p in (one / "checkpoints").iterdir()] == [p.name for p in (other / "checkpoints").iterdir()]


def killed_and_continued(name: str, tokens: Path, folder: Path) -> None:
    recipe = written(name, tokens, folder)
    whole, pieces = folder / "whole", folder / "pieces"
    undisturbed = Command(["train", str(recipe), "--out", str(whole)], folder / "whole.log", count=True)
    assert undisturbed.wait() == 0, undisturbed.printed()
    moments, calls = random.Random(f"{name}"), undisturbed.calls()
    kills = [Kill(moments.randint(1, sum(calls[part])), part) for part in ("save", "command")]
    for number, kill in enumerate(kills):
        killed = Command(["train", str(recipe), "--out", str(pieces)], folder / f"kill{number}.log", kill=kill)
        status = killed.wait()
        assert status == -9 or (number and status == 0), killed.printed()
        assert all(is_whole(checkpoint) for checkpoint in (pieces / "checkpoints").glob("step_*"))
    last = Command(["train", str(recipe), "--out", str(pieces)], folder / "last.log")
    assert last.wait() == 0, last.printed()
    assert_same_directory(whole, pieces)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_killed_and_resumed_run_equals_the_undisturbed_run(name: str, tokens: Path, tmp_path: Path) -> None:
    killed_and_continued(name, tokens, tmp_path)


@pytest.mark.parametrize(
    ("number", "status"), one_in(3, [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
)
def test_a_signal_saves_a_checkpoint_and_ends_with_the_status_of_its_number(
    number: int, status: int, tokens: Path, tmp_path: Path
) -> None:
    args = ["train", str(written("softmax", tokens, tmp_path)), "--set", "train.save_every=12", "--out"]
    third = Kill(1, "update", number, time=3)
    asked = Command([*args, str(tmp_path / "run")], tmp_path / "asked.log", kill=third)
    assert asked.wait() == status
    assert "Run the same command again to resume" in asked.printed()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert step_of(saved) == 3  # the update is finished
    again = Command([*args, str(tmp_path / "run")], tmp_path / "again.log")
    assert again.wait() == 0
    assert "step 0/12" not in again.printed()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SAMPLE])
def test_every_killed_and_resumed_variant_equals_the_undisturbed_run(name: str, tokens: Path, tmp_path: Path) -> None:
    killed_and_continued(name, tokens, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "k_biases", "sigmoid"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_with_one_killed_and_resumed_equal_the_undisturbed_two(
    name: str, parallel: str, tokens: Path, tmp_path: Path
) -> None:
    recipe = written(name, tokens, tmp_path)
    train = ["train", str(recipe), "--set", f"train.parallel={parallel}", "--out"]
    whole = together([*train, str(tmp_path / "whole")], tmp_path / "whole", size=2)
    for command in whole:
        assert command.wait() == 0, command.printed()
    moments = random.Random(f"{name} {parallel}")
    for part in ("save", "training"):
        victim, kill = moments.randrange(2), Kill(moments.randint(1, 500), part)
        pair = together([*train, str(tmp_path / "pieces")], tmp_path / part, 2, kill, victim)
        assert pair[victim].wait() == -9, pair[victim].printed()
        assert pair[1 - victim].wait() == 1, pair[1 - victim].printed()
        assert "Run the same command again to resume" in pair[1 - victim].printed()
    for command in together([*train, str(tmp_path / "pieces")], tmp_path / "last", size=2):
        assert command.wait() == 0, command.printed()
    assert_same_directory(tmp_path / "whole", tmp_path / "pieces")


@pytest.mark.slow
def test_all_processes_stop_when_one_of_them_gets_a_signal(tokens: Path, tmp_path: Path) -> None:
    args = ["train", str(written("softmax", tokens, tmp_path)), "--out", str(tmp_path / "run")]
    pair = together(args, tmp_path / "asked", 2, Kill(1, "update", signal.SIGTERM, time=3), victim=1)
    assert [process.wait() for process in pair] == [75, 75]
    pair = together(args, tmp_path / "again", 2)
    assert [process.wait() for process in pair] == [0, 0]
