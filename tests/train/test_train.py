"""Training lowers the loss and is measured; a stopped and resumed run equals the undisturbed run bit for bit."""

import itertools
import json
import math
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from same_run import assert_same_run, contents

from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import InputError, SinklabError, StoppedError
from sinklab.measuring.measurement import Measurement
from sinklab.train.loop import RunOutcome, Trainer
from sinklab.train.optim import learning_rate
from sinklab.train.recipe import Recipe, ScheduleConfig, build_recipe
from sinklab.train.run import establish, load_run, open_run, read_metrics

RECIPE = {
    "model": {"layers": 2, "width": 32, "heads": 2, "ffn_width": 48, "context": 32},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 12, "batch_size": 4, "eval_every": 5, "eval_sequences": 16, "save_every": 4},
    "metric": {"sequences": 10, "length": 32},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Tokens of a small generated corpus."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "text.jsonl"
    with source.open("w") as file:
        for i in range(400):
            words = " ".join(f"w{(i * j) % 37} and {(i + j) % 11}" for j in range(40))
            file.write(json.dumps({"text": words}) + "\n")
    return prepare(settings_of(str(source), "train:300", valid_fraction=0.2), folder / "tokens")


def recipe(**changes: object) -> Recipe:
    return build_recipe(RECIPE, changes)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(dataset: TokenDataset, out: Path, wanted: Recipe, stop_at: int | None = None) -> Trainer:
    """Train to the end, or until `stop_at` updates are done."""
    done = [0]
    trainer = Trainer(
        open_run(wanted, dataset, out),
        watch=lambda step, row: done.__setitem__(0, step),
        should_stop=lambda: stop_at is not None and done[0] >= stop_at,
    )
    outcome = trainer.train()
    assert outcome.status == ("done" if stop_at is None else "stopped")
    return trainer


VARIANTS = {
    "softmax": {},
    "k_biases": {"model": {"attention": {"bias": "k"}}},
    "sigmoid": {"model": {"attention": {"operation": "sigmoid"}}},
    "sink_token": {"model": {"attention": {"bias": "sink_token"}}},
    "bf16": {"train": {"precision": "bf16"}},
    "accumulated": {"train": {"micro_batch": 2}},
}


@pytest.mark.parametrize(("variant", "stop_at"), zip(VARIANTS, itertools.cycle((4, 7)), strict=False))
def test_a_stopped_and_resumed_run_equals_the_undisturbed_run(
    dataset: TokenDataset, tmp_path: Path, variant: str, stop_at: int
) -> None:
    wanted = recipe(**VARIANTS[variant])
    train(dataset, tmp_path / "whole", wanted)
    train(dataset, tmp_path / "halves", wanted, stop_at=stop_at)
    train(dataset, tmp_path / "halves", wanted)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def test_a_run_that_lost_its_last_updates_repeats_them(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "whole", recipe())
    train(dataset, tmp_path / "lost", recipe())
    for path in ("measurement.json", "measurement.npz"):
        (tmp_path / "lost" / path).unlink()
    shutil.rmtree(tmp_path / "lost" / "checkpoints" / "step_00000012")
    with (tmp_path / "lost" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # a line torn by a kill
    train(dataset, tmp_path / "lost", recipe())
    assert_same_run(tmp_path / "whole", tmp_path / "lost")


def test_a_checkpoint_that_a_killed_process_had_not_removed_is_removed(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe(), stop_at=8)
    folder = tmp_path / "checkpoints"
    (newest,) = list(folder.iterdir())[-1:]
    for step in (1, 2, 3):
        shutil.copytree(newest, folder / f"step_{step:08d}")
    keep = recipe().train.keep
    train(dataset, tmp_path, recipe(), stop_at=8)
    assert len([*folder.iterdir()]) == keep


def test_a_finished_run_is_not_trained_again(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe())
    before = contents(tmp_path)[1]
    assert Trainer(open_run(recipe(), dataset, tmp_path)).train().step == 12
    assert contents(tmp_path)[1] == before


def test_a_run_resumes_with_another_micro_batch(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "whole", recipe())
    train(dataset, tmp_path / "halves", recipe(), stop_at=4)
    train(dataset, tmp_path / "halves", recipe(train={"micro_batch": 2}))
    ends = [read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "halves")]
    assert ends[0]["step"] == ends[1]["step"]
    assert ends[0]["valid_loss"] == pytest.approx(ends[1]["valid_loss"], rel=1e-4)


def test_micro_batches_give_the_gradient_of_the_whole_batch(dataset: TokenDataset, tmp_path: Path) -> None:
    """Gradients are compared, because AdamW and clipping hide a wrong scale of the gradient from the weights."""

    def gradients(micro_batch: int | None) -> tuple[float, dict[str, torch.Tensor]]:
        wanted = recipe(train={"micro_batch": micro_batch} if micro_batch else {})
        trainer = Trainer(open_run(wanted, dataset, tmp_path / f"of_{micro_batch}"))
        with closing(trainer):
            loss, norm = trainer.updater.gradient()
            found = {name: p.grad.clone() for name, p in trainer.updater.model.named_parameters() if p.grad is not None}
        assert float(norm) == pytest.approx(math.sqrt(sum(float(one.square().sum()) for one in found.values())))
        return float(loss), found

    loss, whole = gradients(None)
    assert max(float(one.abs().max()) for one in whole.values()) > 1e-2
    for micro_batch in (1, 2):
        split_loss, split = gradients(micro_batch)
        assert split_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, split[name], rtol=1e-4, atol=1e-6)


def test_evaluation_batches_are_no_larger_than_those_of_updates(dataset: TokenDataset, tmp_path: Path) -> None:
    batches = Trainer(open_run(recipe(train={"micro_batch": 2}), dataset, tmp_path)).evaluator.batches
    assert {len(batch) for batch in batches} == {2}
    assert sum(map(len, batches)) == 16


def test_training_lowers_the_loss_and_records_every_evaluation(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe(train={"steps": 60}))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(0, 61, 5))
    assert rows[0]["valid_loss"] == pytest.approx(math.log(300), rel=0.2)  # untrained
    assert rows[-1]["valid_loss"] < rows[0]["valid_loss"] - 1
    assert len(rows[-1]["sink_rate"]) == 32
    assert rows[-1]["tokens"] == 60 * 4 * 32
    measured = Measurement.load(tmp_path)
    assert measured.sink_rate == rows[-1]["sink_rate"]


@pytest.mark.parametrize(("step", "question"), [(0, 3), (5, 3), (5, 7), (12, 3), (12, 11)])
def test_a_run_stopped_within_an_evaluation_equals_the_undisturbed_run(
    step: int, question: int, dataset: TokenDataset, tmp_path: Path
) -> None:
    def should_stop() -> bool:
        asked[0] += trainer is not None and trainer.state.step == step
        return asked[0] >= question

    asked, trainer = [0], None
    train(dataset, tmp_path / "whole", recipe())
    trainer = Trainer(open_run(recipe(), dataset, tmp_path / "halves"), should_stop=should_stop)
    assert trainer.train() == RunOutcome("stopped", step)
    assert asked[0] == question  # training stops at once, between batches or between the blocks of the metric
    there = [row["step"] for row in read_metrics(tmp_path / "halves" / "metrics.jsonl")]
    assert (step in there) == (question == 11)  # which is within the measurement at the end
    train(dataset, tmp_path / "halves", recipe())
    (tensors, rows, _), (others, other_rows, _) = contents(tmp_path / "whole"), contents(tmp_path / "halves")
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert rows == other_rows
    assert Measurement.load(tmp_path / "whole").sink_rate == Measurement.load(tmp_path / "halves").sink_rate
    speeds = {row["step"]: row["tokens_per_second"] for row in read_metrics(tmp_path / "halves" / "metrics.jsonl")}
    assert (speeds[step] is None) == (question != 11)  # the updates before it were made by another process


def test_a_stop_request_ends_the_construction_of_the_model(dataset: TokenDataset, tmp_path: Path) -> None:
    questions = itertools.count(1)
    with pytest.raises(StoppedError, match="a stop of the training was requested"):
        Trainer(open_run(recipe(), dataset, tmp_path / "run"), should_stop=lambda: next(questions) == 9)
    assert next(questions) == 10  # it was not asked again
    assert not (tmp_path / "run").exists()


FLAT = {"schedule": {"shape": "flat", "warmup_steps": 4}}


@pytest.mark.parametrize("steps", [7, 10], ids=["ends between evaluations", "ends at one"])
@pytest.mark.parametrize("stop_at", [None, 6])
def test_an_extended_flat_run_equals_the_run_of_that_many_steps(
    steps: int, stop_at: int | None, dataset: TokenDataset, tmp_path: Path
) -> None:
    short, long = recipe(**FLAT, train={"steps": steps}), recipe(**FLAT, train={"steps": 15})
    train(dataset, tmp_path / "long", long)
    train(dataset, tmp_path / "grown", short, stop_at)
    (hash_before,) = {json.loads((tmp_path / "grown" / "env.json").read_text())["hash"]}
    train(dataset, tmp_path / "grown", long)
    assert_same_run(tmp_path / "long", tmp_path / "grown")
    recorded = json.loads((tmp_path / "grown" / "env.json").read_text())
    assert recorded["hash"] == json.loads((tmp_path / "long" / "env.json").read_text())["hash"]
    assert recorded["continues"] == [{"hash": hash_before, "steps": steps}]
    assert (tmp_path / "grown" / "recipe.yaml").read_text() == (tmp_path / "long" / "recipe.yaml").read_text()
    with pytest.raises(InputError, match=rf"train\.steps is {steps}, not 15"):
        open_run(short, dataset, tmp_path / "grown")


def test_final_results_of_a_shorter_run_are_removed_when_it_is_extended(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe(**FLAT))
    stopped = train(dataset, tmp_path, recipe(**FLAT, train={"steps": 15}), stop_at=13)
    assert stopped.state.step == 13
    assert not (tmp_path / "measurement.json").exists()
    assert load_run(tmp_path).step == 13


def test_a_shorter_run_with_damaged_files_is_not_converted(dataset: TokenDataset, tmp_path: Path) -> None:
    short, long = recipe(**FLAT), recipe(**FLAT, train={"steps": 15})
    train(dataset, tmp_path, short)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(b"{broken\n" + metrics)
    before = files(tmp_path)
    with pytest.raises(SinklabError, match=r"metrics\.jsonl, line \d+, is invalid"):
        Trainer(open_run(long, dataset, tmp_path))
    assert files(tmp_path) == before
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    for weights in tmp_path.glob("checkpoints/*/*.safetensors"):
        weights.write_bytes(b"broken")
    before = files(tmp_path)
    with pytest.raises(SinklabError, match="none of the checkpoints"):
        Trainer(open_run(long, dataset, tmp_path))
    assert files(tmp_path) == before


def test_an_interrupted_extension_is_completed(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe(**FLAT))
    short = (tmp_path / "recipe.yaml").read_text()
    long = open_run(recipe(**FLAT, train={"steps": 15}), dataset, tmp_path)
    establish(long)
    (tmp_path / "recipe.yaml").write_text(short)  # env.json is written first
    establish(open_run(long.recipe, dataset, tmp_path))
    assert load_run(tmp_path).recipe.train.steps == 15


@pytest.mark.parametrize(
    ("schedule", "stop_at", "first"),
    [
        ({"shape": "cosine", "warmup_steps": 4}, None, 6),
        ({"shape": "wsd", "warmup_steps": 4, "decay_fraction": 0.5}, None, 8),
        ({"shape": "wsd", "warmup_steps": 4, "decay_fraction": 0.5}, 5, None),
        ({"shape": "cosine", "warmup_steps": 8}, 5, None),
    ],
)
def test_a_run_is_extended_only_before_its_learning_rates_differ(
    schedule: dict[str, object], stop_at: int | None, first: int | None, dataset: TokenDataset, tmp_path: Path
) -> None:
    short, long = recipe(schedule=schedule), recipe(schedule=schedule, train={"steps": 20})
    train(dataset, tmp_path / "grown", short, stop_at)
    if first is None:
        train(dataset, tmp_path / "long", long)
        train(dataset, tmp_path / "grown", long)
        assert_same_run(tmp_path / "long", tmp_path / "grown")
        return
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        InputError, match=rf"has reached step 12\. It cannot be extended to 20 steps, .* differs from step {first} on"
    ):
        open_run(long, dataset, tmp_path / "grown")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_only_the_newest_checkpoints_are_kept(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe(train={"keep": 1}))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000012"]


def test_a_diverging_run_stops_before_the_update(dataset: TokenDataset, tmp_path: Path) -> None:
    trainer = Trainer(open_run(recipe(), dataset, tmp_path))
    while trainer.state.step < 6:
        trainer._update()
    trainer._save()
    with torch.no_grad():
        trainer.model.head.weight[3, 5] = torch.nan
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(SinklabError, match=r"diverged at step 7: loss nan.*batch index 6.*not updated.*step_00000006"):
        trainer.train()
    after = trainer.model.state_dict()
    assert all(torch.equal(weight, after[name]) or name == "head.weight" for name, weight in before.items())
    assert torch.equal(before["head.weight"].nan_to_num(), after["head.weight"].nan_to_num())


def test_a_killed_save_leaves_the_previous_checkpoint(dataset: TokenDataset, tmp_path: Path) -> None:
    train(dataset, tmp_path, recipe(), stop_at=5)
    torn = tmp_path / "checkpoints" / ".step_00000008.new"
    torn.mkdir()
    (torn / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    assert Trainer(open_run(recipe(), dataset, tmp_path)).state.step == 5
    assert not torn.exists()


def test_a_directory_with_another_run_is_refused_with_the_difference(dataset: TokenDataset, tmp_path: Path) -> None:
    establish(open_run(recipe(), dataset, tmp_path))
    with pytest.raises(InputError, match=r"\(seed is 1, not 0\): choose another --out"):
        open_run(recipe(seed=1), dataset, tmp_path)


def test_settings_that_do_not_change_the_result_are_not_named_as_differences(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    establish(open_run(recipe(), dataset, tmp_path))
    elsewhere = {"source": "other.txt", "valid_fraction": 0.3, "text_limit_bytes": 9}
    manner = {"save_every": 99, "keep": 99, "device": "cpu", "peak_flops": 1.0}
    changed = recipe(name="other", data=elsewhere, train={**manner, "steps": 9})
    with pytest.raises(InputError, match=r"\(train\.steps is 9, not 12, data\.source is other\.txt, not "):
        open_run(changed, dataset, tmp_path)
    spoiled = (tmp_path / "env.json").read_text().replace('"hash": "', '"hash": "0')
    (tmp_path / "env.json").write_text(spoiled)
    with pytest.raises(InputError, match=r"\(the text, the tokenizer or the sinklab version differs\)"):
        open_run(recipe(train=manner), dataset, tmp_path)


def test_a_recipe_key_added_later_is_not_named_as_a_difference(dataset: TokenDataset, tmp_path: Path) -> None:
    establish(open_run(recipe(), dataset, tmp_path))
    written = (tmp_path / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(written.replace("  init:\n    kind: declared\n", ""))
    assert (tmp_path / "recipe.yaml").read_text() != written
    with pytest.raises(InputError, match=r"\(seed is 1, not 0\)"):
        open_run(recipe(seed=1), dataset, tmp_path)


@pytest.mark.parametrize("name", ["recipe.yaml", "tokenizer.json", "metrics.jsonl", "checkpoints"])
def test_a_directory_with_files_of_others_is_refused(dataset: TokenDataset, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"has {name} but no env\.json: choose another --out"):
        Trainer(open_run(recipe(), dataset, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match="cannot be a run directory: Not a directory"):
        open_run(recipe(), dataset, tmp_path / name)


@pytest.mark.parametrize(("below", "why"), [("file/run", "Not a directory"), ("n" * 300, "File name too long")])
def test_an_impossible_directory_is_refused_before_any_work(
    below: str, why: str, dataset: TokenDataset, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=f"cannot be a run directory: {why}. Choose another"):
        open_run(recipe(), dataset, tmp_path / below)


def test_a_recipe_that_is_refused_leaves_no_directory(dataset: TokenDataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="sequences"):
        Trainer(open_run(recipe(metric={"sequences": 10**6}), dataset, out))
    assert not out.exists()
    assert train(dataset, out, recipe()).state.step == 12


def test_the_second_of_two_trainers_of_an_empty_directory_is_refused(dataset: TokenDataset, tmp_path: Path) -> None:
    first, second = open_run(recipe(), dataset, tmp_path), open_run(recipe(seed=1), dataset, tmp_path)
    Trainer(first).train()
    with pytest.raises(InputError, match="seed is 1, not 0"):
        Trainer(second)
    assert load_run(tmp_path).recipe.seed == 0


@pytest.mark.parametrize("content", [None, "seed: [", "seed: 3"])
def test_missing_and_damaged_files_of_a_run_are_written_again(
    content: str | None, dataset: TokenDataset, tmp_path: Path
) -> None:
    train(dataset, tmp_path, recipe())
    before = files(tmp_path)
    for name in ("recipe.yaml", "tokenizer.json"):
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_text(content)
    Trainer(open_run(recipe(), dataset, tmp_path)).close()
    assert files(tmp_path) == before
    assert load_run(tmp_path).recipe.seed == 0
    assert (tmp_path / "tokenizer.json").read_bytes() == dataset.tokenizer_path.read_bytes()
    (tmp_path / "env.json").write_text("{")
    with pytest.raises(SinklabError, match=r"env\.json cannot be read"):
        open_run(recipe(), dataset, tmp_path)


def test_the_tokenizer_of_a_run_is_kept_if_that_of_its_data_is_missing(dataset: TokenDataset, tmp_path: Path) -> None:
    data = TokenDataset(shutil.copytree(dataset.tokenizer_path.parent, tmp_path / "data"))
    train(data, tmp_path / "run", recipe())
    before = files(tmp_path / "run")
    (tmp_path / "data" / "tokenizer_config.json").unlink()
    Trainer(open_run(recipe(), data, tmp_path / "run")).close()
    assert files(tmp_path / "run") == before


def test_a_finished_run_can_be_loaded(dataset: TokenDataset, tmp_path: Path) -> None:
    trainer = train(dataset, tmp_path, recipe())
    loaded = load_run(tmp_path)
    assert loaded.step == 12
    assert loaded.recipe == trainer.recipe
    ours = trainer.model.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in loaded.model.state_dict().items())


def test_a_directory_without_a_checkpoint_is_refused_with_the_command_to_train_it(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="not a run directory"):
        load_run(tmp_path)
    establish(open_run(recipe(), dataset, tmp_path))
    with pytest.raises(InputError, match="train it with `sinklab train` first"):
        load_run(tmp_path)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(dataset: TokenDataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.vocab_size 100 is smaller than the tokenizer's"):
        open_run(recipe(model={"vocab_size": 100}), dataset, tmp_path)


def test_the_learning_rate_follows_the_schedule() -> None:
    cosine = ScheduleConfig(shape="cosine", warmup_steps=10, min_lr=0.1)
    rates = [learning_rate(step, 110, 1.0, cosine) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(110, 110, 1.0, cosine) == pytest.approx(0.1)
    assert learning_rate(99, 110, 1.0, ScheduleConfig(shape="flat", warmup_steps=10)) == 1.0
    wsd = ScheduleConfig(shape="wsd", warmup_steps=8, decay_fraction=0.5)
    rates = [learning_rate(step, 10, 1.0, wsd) for step in range(10)]
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.8, 0.6, 0.4, 0.2])


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Returns a function that limits the files of this process to 1 kB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoints(
    dataset: TokenDataset, tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    train(dataset, tmp_path / "whole", recipe())
    train(dataset, tmp_path / "full", recipe(), stop_at=6)
    trainer = Trainer(open_run(recipe(), dataset, tmp_path / "full"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    full_disk()
    with pytest.raises(SinklabError, match=r"cannot save .* Earlier checkpoints are unchanged. Free disk space"):
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [p.name for p in (tmp_path / "full" / "checkpoints").iterdir()] == ["step_00000004", "step_00000006"]
    train(dataset, tmp_path / "full", recipe())
    assert_same_run(tmp_path / "whole", tmp_path / "full")
