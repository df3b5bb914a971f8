"""Parts of an update: prefetched batches, the late check for finite numbers, compiled blocks, speed."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from torch import Tensor
from torch._inductor import config as inductor_config

from sinklab.commands.terminal import describe
from sinklab.data.loader import Prefetcher, TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.device import can_compile, compiled
from sinklab.errors import SinklabError
from sinklab.interventions import VARIANTS
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure
from sinklab.train.loop import RunOutcome, Trainer
from sinklab.train.recipe import Recipe, build_recipe
from sinklab.train.run import open_run, read_environment, read_metrics
from sinklab.train.update import FiniteCheck
from sinklab.train.world import ALONE, compile_blocks

RECIPE = {
    "model": {"layers": 2, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "data": {"source": "synthetic:bigram_backcopy:length=33,documents=300", "tokenizer": "words"},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 8, "batch_size": 4, "eval_every": 4, "eval_sequences": 8, "save_every": 4},
    "metric": {"sequences": 8, "length": 16},
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Tokens of a small synthetic corpus."""
    return prepare(settings_of(recipe().data.source, "words", valid_fraction=0.2), tmp_path_factory.mktemp("data"))


def recipe(**changes: object) -> Recipe:
    return build_recipe(RECIPE, changes)


def late_trainer(dataset: TokenDataset, out: Path) -> Trainer:
    """A trainer that checks one update late, as on CUDA."""
    trainer = Trainer(open_run(recipe(), dataset, out))
    trainer.updater.finite = FiniteCheck(trainer.optimizer, ALONE, late=True)
    return trainer


def test_a_prefetcher_returns_the_requested_batches_in_any_order() -> None:
    batches = Prefetcher(lambda index: torch.tensor([index]), CPU, end=5)
    assert [batches.batch(index).item() for index in (0, 1, 2, 7, 3, 4)] == [0, 1, 2, 7, 3, 4]


def test_a_batch_is_prefetched_while_the_previous_one_is_used() -> None:
    asked: list[int] = []

    def fetch(index: int) -> Tensor:
        asked.append(index)
        return torch.tensor([index])

    batches = Prefetcher(fetch, CPU, end=2)
    batches.batch(0)
    batches._thread.shutdown(wait=True)
    assert asked == [0, 1]
    assert batches.batch(1).item() == 1
    assert asked == [0, 1]


def test_an_error_of_the_data_is_raised_in_the_loop() -> None:
    def fetch(index: int) -> Tensor:
        raise SinklabError("the shard is gone")

    with pytest.raises(SinklabError, match="the shard is gone"):
        Prefetcher(fetch, CPU, end=5).batch(0)


def test_a_late_check_for_finite_numbers_trains_the_same_model(dataset: TokenDataset, tmp_path: Path) -> None:
    now = Trainer(open_run(recipe(), dataset, tmp_path / "now"))
    late = late_trainer(dataset, tmp_path / "late")
    assert now.train() == late.train()
    weights = late.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in now.model.state_dict().items())
    kept = ("step", "train_loss", "valid_loss", "grad_norm")
    rows = [
        [{k: r[k] for k in kept} for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("now", "late")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_updated_from_the_first_gradient_that_is_not_finite_on(
    dataset: TokenDataset, tmp_path: Path, late: bool
) -> None:
    trainer = (late_trainer if late else lambda d, out: Trainer(open_run(recipe(), d, out)))(dataset, tmp_path)
    weight, calls = trainer.model.blocks[1].get_parameter("ffn.up.weight"), [0]
    before: dict[str, Tensor] = {}

    def plant(gradient: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] != 6:
            return gradient
        before.update({name: tensor.clone() for name, tensor in tensors(trainer)})
        return torch.full_like(gradient, torch.nan)

    weight.register_hook(plant)
    with pytest.raises(SinklabError, match=r"diverged at step 6: .*gradient norm nan.*step_00000004.*--replay 6"):
        trainer.train()
    assert trainer.state.step == 5
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(trainer))
    assert calls[0] == (7 if late else 6)  # late, one more gradient is computed and not used


def tensors(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """Weights and optimiser state."""
    weights = list(trainer.model.named_parameters())
    moments = [(f"{n}/{k}", v) for n, p in weights for k, v in trainer.optimizer.state[p].items()]
    return [*((n, p.detach()) for n, p in weights), *moments]


def test_every_evaluation_has_the_speed(dataset: TokenDataset, tmp_path: Path) -> None:
    Trainer(open_run(recipe(train={"peak_flops": 1e9}), dataset, tmp_path)).train()
    first, *rows = read_metrics(tmp_path / "metrics.jsonl")
    assert first["tokens_per_second"] is first["mfu"] is first["stall_share"] is None
    from sinklab.train.planning import model_flops

    per_token = model_flops(open_run(recipe(train={"peak_flops": 1e9}), dataset, tmp_path).recipe.model).total / 16
    for row in rows:
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * per_token / 1e9)
        assert 0 <= row["stall_share"] < 1


def test_the_progress_line_has_the_speed() -> None:
    row = {"valid_loss": 3.0, "sink_rate": [2.0], "sink_rate_bias": None, "tokens_per_second": 1e6}
    assert describe(row | {"mfu": None, "stall_share": 0.001}).endswith("1,000,000 tokens/s")
    assert describe(row | {"mfu": 0.41, "stall_share": 0.3}).endswith("41% of peak  data stall 30%")


def test_settings_that_do_not_change_the_result_keep_the_hash() -> None:
    plain = recipe().content_hash("data")
    manner = {"compile": "on", "peak_flops": 1e12, "device": "cpu", "keep": 7, "save_every": 3, "recompute": "blocks"}
    assert recipe(train=manner, data={"valid_fraction": 0.1}).content_hash("data") == plain
    assert recipe(train={"steps": 9}).content_hash("data") != plain


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Compiling without generating code, which is slow; returns the numbers of graphs and of graph breaks so far."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    return lambda: {"graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])}


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("k_biases", 2), ("norm_sandwich", 2), ("norm_post", 1), ("mla_sink_logit", 2), ("linear_hybrid", 4)],
)
def test_compiled_blocks_give_the_same_gradients_and_measurement(
    name: str, graphs: int, traced: Callable[[], dict[str, int]]
) -> None:
    sizes = {**RECIPE["model"], "layers": 3, "vocab_size": 50}  # type: ignore[dict-item]
    config = build_recipe({**RECIPE, "model": sizes}, VARIANTS[name].overlay).model
    plain, compiled = Transformer(config), Transformer(config)
    compile_blocks(compiled, "on", CPU)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    tokens_BT = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    expected, ours = (torch.autograd.grad(m.loss(tokens_BT), list(m.parameters())) for m in (plain, compiled))
    for gradient, other in zip(expected, ours, strict=True):
        assert_close(other, gradient)
    # Before and after the core, the same for all layers of a kind; norms behind a sublayer are watched, not compiled.
    assert traced() == {"graphs": graphs, "breaks": 0}
    measured, again = (measure(m, tokens_BT[:, :16]) for m in (plain, compiled))
    assert_close(measured.importance, again.importance)
    assert measured.hidden_norm_ratio == pytest.approx(again.hidden_norm_ratio)
    before, after = measured.norm_ratio_before_norm, again.norm_ratio_before_norm
    assert (before is not None) == (name == "norm_post")
    assert before == (after if after is None else pytest.approx(after))


def test_a_function_is_compiled_again_for_every_new_argument(traced: Callable[[], dict[str, int]]) -> None:
    larger = compiled(lambda x, factor: x * factor, dynamic=False)
    assert [larger(torch.ones(()), factor).item() for factor in range(2, 22)] == list(range(2, 22))
    assert traced()["graphs"] == 20


def test_blocks_are_not_compiled_by_auto_on_a_cpu_or_by_off_on_cuda() -> None:
    model = Transformer(build_recipe({"model": {**RECIPE["model"], "vocab_size": 50}, "metric": {"length": 16}}).model)  # type: ignore[dict-item]
    compile_blocks(model, "auto", CPU)
    compile_blocks(model, "off", torch.device("cuda"))
    assert not any("before_core" in vars(block) for block in model.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_compiled_loss_gives_the_same_gradients(name: str, traced: Callable[[], dict[str, int]]) -> None:
    values = {**RECIPE, "model": {**RECIPE["model"], "vocab_size": 50}}  # type: ignore[dict-item]
    changed = build_recipe(values, VARIANTS[name].overlay)
    model = Transformer(changed.model).double()
    tokens_BT = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    plain, ours = (
        torch.autograd.grad(losses(tokens_BT, changed.losses).sum(), list(model.parameters()), allow_unused=True)
        for losses in (model.losses, compiled(model.losses, dynamic=False))
    )
    assert traced()["graphs"] > 0
    for gradient, other in zip(plain, ours, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None and other is not None:
            assert_close(other, gradient)


def test_a_recipe_with_a_compiled_loss_trains_uncompiled_without_a_compiler(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    can_compile.cache_clear()
    try:
        with inductor_config.patch({"cpp.cxx": (None, str(tmp_path / "no-compiler"))}):
            for name in ("off", "loss"):
                Trainer(open_run(recipe(train={"compile": name}), dataset, tmp_path / name)).train()
    finally:
        can_compile.cache_clear()
    rows = [losses_of(tmp_path / name) for name in ("off", "loss")]
    assert rows[0] == rows[1]
    assert "compiles_loss" not in read_environment(tmp_path / "loss")


@pytest.mark.slow
def test_a_run_with_a_compiled_loss_resumes_exactly_and_is_evaluated_uncompiled(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    if not can_compile():  # not at collection, because it compiles something
        pytest.skip("torch.compile needs a C++ compiler and Python's headers on a CPU")
    for name in ("off", "loss"):
        Trainer(open_run(recipe(train={"compile": name}), dataset, tmp_path / name)).train()
    run = open_run(recipe(train={"compile": "loss"}), dataset, tmp_path / "resumed")
    steps: list[int] = []
    halted = Trainer(run, watch=lambda step, row: steps.append(step), should_stop=lambda: 5 in steps)
    assert halted.train() == RunOutcome("stopped", 5)
    Trainer(run).train()
    plain, ours, again = (losses_of(tmp_path / name) for name in ("off", "loss", "resumed"))
    assert plain[0] == ours[0]  # the untrained model
    assert ours == pytest.approx(plain, rel=1e-4)
    assert again == ours
    assert read_environment(tmp_path / "loss")["compiles_loss"] is True
    assert json.loads((tmp_path / "loss" / "measurement.json").read_text())["sink_rate"]


def losses_of(directory: Path) -> list[float]:
    return [row["valid_loss"] for row in read_metrics(directory / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_run_has_the_loss_of_the_uncompiled_one(dataset: TokenDataset, tmp_path: Path) -> None:
    for name in ("off", "on"):
        Trainer(open_run(recipe(train={"compile": name}), dataset, tmp_path / name)).train()
    losses = [[row["valid_loss"] for row in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert json.loads((tmp_path / "on" / "measurement.json").read_text())["sink_rate"]
