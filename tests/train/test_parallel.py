"""Several processes train the same model as one: same batches, same loss curve, a common stop."""

import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from commands import Command, call_together, together

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import InputError, SinklabError
from sinklab.train import lock
from sinklab.train.loop import Trainer
from sinklab.train.recipe import build_recipe, parse_override
from sinklab.train.run import load_run, open_run, read_metrics
from sinklab.train.world import World, compile_blocks, joined_world

BASE = {
    "model": {"layers": 1, "width": 32, "heads": 2, "ffn_width": 48, "context": 16},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 30, "batch_size": 8, "eval_every": 1, "eval_sequences": 4, "save_every": 10},
    "metric": {"sequences": 4, "length": 16},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic corpus, prepared."""
    folder = tmp_path_factory.mktemp("tokens")
    prepare(settings_of("synthetic:bigram_backcopy:length=17,documents=400", "words", valid_fraction=0.1), folder)
    return folder


def command(tokens: Path, out: Path, *settings: str) -> list[str]:
    """`sinklab train` of the recipe of this module."""
    path = out.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump({**BASE, "data": {"source": str(tokens)}}))
    return ["train", str(path), *(arg for value in settings for arg in ("--set", value)), "--out", str(out)]


def trained(tokens: Path, out: Path, processes: int, *settings: str, steps: int = 30) -> list[float]:
    """Train in this number of processes; return the training loss of every step, nats per token."""
    args = command(tokens, out, f"train.steps={steps}", *settings)
    running = together(args, out, processes) if processes > 1 else [Command(args, out.with_suffix(".log"))]
    for process in running:
        assert process.wait() == 0, process.printed()
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    return [row["train_loss"] for row in rows[1:]]


def test_two_replicas_equal_one_process_with_two_micro_batches_bit_for_bit(tokens: Path, tmp_path: Path) -> None:
    alone = trained(tokens, tmp_path / "one", 1, "train.micro_batch=4", steps=8)
    assert trained(tokens, tmp_path / "two", 2, "train.micro_batch=4", steps=8) == alone
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["sink_rate"] for row in one] == [row["sink_rate"] for row in two]


ADDED = "losses={hidden_z: {weight: 0.1}, tweo: {tau: 0.5}}"
PREFIX = "model.attention.mask={kind: prefix, length: 4}"


SHARED: list[tuple[str, int, list[str]]] = [
    ("ddp", 2, []),
    ("ddp", 4, []),
    ("fsdp", 2, []),
    ("ddp", 4, [PREFIX]),
    ("ddp", 2, ["train.micro_batch=1"]),
    ("fsdp", 2, ["train.micro_batch=2", PREFIX]),
    ("ddp", 2, ["train.recompute=blocks"]),
    ("fsdp", 2, ["train.recompute=blocks", "train.micro_batch=2"]),
    ("ddp", 2, [ADDED]),
    ("fsdp", 2, [ADDED, "train.micro_batch=2"]),
]


@pytest.mark.parametrize(
    ("parallel", "processes", "settings"),
    [pytest.param(*one, marks=[] if one == ("fsdp", 2, []) else pytest.mark.slow) for one in SHARED],
)
def test_the_loss_curve_does_not_depend_on_the_number_of_processes(
    parallel: str, processes: int, settings: list[str], tokens: Path, tmp_path: Path
) -> None:
    alone = trained(tokens, tmp_path / "one", 1, *settings)
    several = trained(tokens, tmp_path / "several", processes, f"train.parallel={parallel}", *settings)
    assert several == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_under_torchrun_only_the_first_process_prints(tokens: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sinklab"]
    args = command(tokens, tmp_path / "run", "train.parallel=fsdp", "train.eval_every=10")
    done = subprocess.run([*torchrun, *args, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    assert done.stderr.count("step 30/30") == 1
    assert len(list((tmp_path / "run" / "checkpoints" / "step_00000030").glob("*.safetensors"))) == 2
    assert load_run(tmp_path / "run").step == 30


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_number_of_processes_may_change_in_mid_run(parallel: str, tokens: Path, tmp_path: Path) -> None:
    alone = trained(tokens, tmp_path / "one", 1)
    changing = tmp_path / "changing"
    args = command(tokens, changing, f"train.parallel={parallel}")
    statuses = [call_together(stop_at, processes, args, step) for processes, step in ((2, 7), (4, 15), (1, 22))]
    assert statuses == [[0] * 2, [0] * 4, [0]]
    assert trained(tokens, changing, 2, "train.parallel=fsdp") == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    "place", [{"WORLD_SIZE": "two"}, {"WORLD_SIZE": ""}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}]
)
def test_an_environment_without_valid_ranks_is_refused(
    place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="not valid ranks: start the processes with torchrun"), joined_world():
        pass


@pytest.mark.parametrize("other", ["seed", "train.save_every", "directory"])
def test_processes_that_do_not_train_the_same_run_are_refused(other: str, tokens: Path, tmp_path: Path) -> None:
    args = command(tokens, tmp_path / "run")
    assert call_together(refused, 2, args, other) == [0, 0]
    assert not (tmp_path / "run").exists()


def refused(world: World, args: list[str], other: str) -> None:
    """Expect an error for a trainer whose run differs in the second process."""
    if world.rank == 1 and other == "directory":
        args = [*args[:-1], f"{args[-1]}-elsewhere"]
    if world.rank == 1 and other != "directory":
        args = [*args[:2], "--set", f"{other}=1", *args[2:]]
    says = "see different directories" if other == "directory" else "have different recipes, texts"
    lock.SHOWS_WITHIN_S = 0.1  # pyrefly: ignore[bad-assignment]
    with pytest.raises(InputError, match=says):
        trainer_of(world, args)


def stop_at(world: World, args: list[str], step: int) -> None:
    """Train until `step`, at which only the last process is asked to stop."""
    trainer = trainer_of(world, args)
    trainer.should_stop = lambda: trainer.state.step >= step and world.rank == world.size - 1
    outcome = trainer.train()
    assert (outcome.status, outcome.step) == ("stopped", step)


def trainer_of(world: World, args: list[str]) -> Trainer:
    """Trainer of the run that `sinklab train` starts with these arguments."""
    values = yaml.safe_load(Path(args[1]).read_text())
    overlays = [parse_override(value) for option, value in pairwise(args) if option == "--set"]
    recipe = build_recipe(values, *overlays)
    dataset = TokenDataset(Path(recipe.data.source))
    run = open_run(recipe, dataset, Path(args[-1]))
    return Trainer(run, world=world)


@pytest.mark.parametrize(
    ("parallel", "moment"),
    [
        ("ddp", "after averaging"),
        pytest.param("ddp", "in the backward pass", marks=pytest.mark.slow),
        pytest.param("fsdp", "after averaging", marks=pytest.mark.slow),
        pytest.param("ddp", "read late, as on CUDA", marks=pytest.mark.slow),
        pytest.param("fsdp", "read late, as on CUDA", marks=pytest.mark.slow),
    ],
)
def test_a_nan_in_one_gradient_of_one_process_stops_all_before_the_update(
    parallel: str, moment: str, tokens: Path, tmp_path: Path
) -> None:
    args = command(tokens, tmp_path / "run", f"train.parallel={parallel}")
    assert call_together(plant_nan, 2, args, moment, tmp_path) == [0, 0]
    said = [json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in range(2)]
    assert all("diverged at step 4" in message and "not updated" in message for message in said)


def plant_nan(world: World, args: list[str], moment: str, folder: Path) -> None:
    """After three updates, a gradient of process 1 has a NaN: no process may change its weights."""
    trainer = trainer_of(world, args)
    for _ in range(3):
        trainer._update()
    tensors = [*trainer.model.parameters(), *(t for s in trainer.optimizer.state.values() for t in s.values())]
    before = [tensor.detach().clone() for tensor in tensors]
    parameter = next(trainer.model.parameters())
    if world.rank == 1:
        if moment == "in the backward pass":
            parameter.register_hook(lambda gradient: gradient * torch.nan)
        else:
            gradient = trainer.updater.gradient

            def spoiled(hooked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
                loss, _ = gradient(hooked)
                assert parameter.grad is not None
                parameter.grad.mul_(torch.nan)
                return loss, torch.tensor(torch.nan)

            trainer.updater.gradient = spoiled
    trainer.updater.finite.late = moment.startswith("read late")
    with pytest.raises(SinklabError) as error:
        sum(trainer._update() for _ in range(2))
    assert trainer.state.step == 3
    assert all(torch.equal(_local(tensor), _local(was)) for tensor, was in zip(tensors, before, strict=True))
    (folder / f"said{world.rank}.json").write_text(json.dumps(str(error.value)))


@pytest.mark.slow
def test_a_process_that_fails_in_the_backward_pass_ends_the_others(tokens: Path, tmp_path: Path) -> None:
    assert call_together(fail_in_backward, 2, command(tokens, tmp_path / "run")) == [1, 1]
    assert trained(tokens, tmp_path / "run", 2) == trained(tokens, tmp_path / "undisturbed", 2)


def fail_in_backward(world: World, args: list[str]) -> None:
    """Raise an error in the backward pass of the third update of process 1."""
    trainer = trainer_of(world, args)

    def fail(gradient: torch.Tensor) -> None:
        if world.rank == 1 and trainer.state.step == 2:
            raise MemoryError("planted")

    next(trainer.model.parameters()).register_hook(fail)
    trainer.train()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


@pytest.mark.slow
def test_replicas_compile_without_cutting_blocks_into_buckets(tokens: Path, tmp_path: Path) -> None:
    assert call_together(compile_whole_parts, 2, command(tokens, tmp_path / "run")) == [0, 0]


def compile_whole_parts(world: World, args: list[str]) -> None:
    """Update with compiled blocks while splitting them into buckets fails, as in older PyTorch."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    def refuse(*_: object) -> None:
        raise NotImplementedError("found a higher order op in the graph")

    DDPOptimizer.compile_fn = refuse  # type: ignore[method-assign]
    torch.compile = partial(torch.compile, backend="aot_eager")
    trainer = trainer_of(world, args)
    compile_blocks(trainer.model, "on", torch.device("cpu"))
    trainer._update()


def test_a_batch_that_cannot_be_shared_equally_is_refused() -> None:
    with pytest.raises(InputError, match="batch_size 8 is not a multiple of the number of processes, 3"):
        World(1, 3).rows(8)
    assert [World(rank, 4).rows(8) for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]


def test_every_process_uses_its_own_card_only(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sinklab.train.world.pick_device", lambda name: touched.append(name) or torch.device(name))
    assert [World(5, 8, 1).device(name).index for name in ("auto", "cuda")] == [1, 1]
    assert set(touched) == {"cuda:1"}
    with pytest.raises(InputError, match="cuda:0 is a single GPU, but there are 8 processes"):
        World(5, 8, 1).device("cuda:0")


def test_the_hash_does_not_depend_on_the_kind_of_parallelism() -> None:
    hashes = {build_recipe(BASE, {"train": {"parallel": how}}).content_hash("data") for how in ("ddp", "fsdp")}
    assert len(hashes) == 1
