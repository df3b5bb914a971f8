"""Optimisers and schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close

from sinklab.data.prepare import prepare, settings_of
from sinklab.errors import InputError
from sinklab.model.transformer import Transformer
from sinklab.train.checkpoint import TrainState, load_checkpoint, save_checkpoint
from sinklab.train.loop import Trainer
from sinklab.train.optim import QKClip, build_optimizer, hidden_matrices, rotation
from sinklab.train.recipe import Muon, Recipe, build_recipe
from sinklab.train.run import open_run
from sinklab.train.world import ALONE

SMALL = {
    "model": {"layers": 2, "width": 16, "heads": 2, "ffn_width": 24, "vocab_size": 31, "context": 16},
    "metric": {"length": 16},
}
SHORT = {"steps": 3, "batch_size": 4, "micro_batch": 2, "eval_every": 3, "eval_sequences": 4}
OPTIMIZERS = [
    {"name": "adamw", "lr": 3e-3},
    {"name": "sgd", "lr": 0.1},
    {"name": "sgd", "lr": 0.1, "momentum": 0.0},
    {"name": "sgd", "lr": 0.1, "nesterov": True, "weight_decay": 0.01},
    {"name": "muon", "lr": 3e-3},
    {"name": "ortho_adam", "lr": 3e-3},
]


def recipe(optim: dict[str, object]) -> Recipe:
    return build_recipe(SMALL, {"optim": optim, "model": {"attention": {"bias": "k"}}})


def step(model: Transformer, optimizer: torch.optim.Optimizer, number: int) -> float:
    batch = torch.randint(31, (4, 17), generator=torch.Generator().manual_seed(number))
    loss = model.loss(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: "-".join(map(str, optim.values())))
def test_a_restored_optimizer_continues_bit_for_bit(optim: dict[str, object], tmp_path: Path) -> None:
    wanted = recipe(optim)
    model = Transformer(wanted.model)
    optimizer = build_optimizer(model, wanted.optim)
    for number in range(3):
        step(model, optimizer, number)
    folder = save_checkpoint(tmp_path, model, optimizer, TrainState(step=3), "run", keep=1)
    undisturbed = [step(model, optimizer, number) for number in range(3, 6)]

    again = Transformer(wanted.model, seed=9)
    restored = build_optimizer(again, wanted.optim)
    load_checkpoint(folder, again, restored)
    assert [step(again, restored, number) for number in range(3, 6)] == undisturbed
    weights = again.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_hidden_matrices_are_updated_by_torch_muon_and_the_rest_by_adamw() -> None:
    wanted = recipe({"name": "muon", "lr": 3e-3, "weight_decay": 0.2})
    ours, theirs = Transformer(wanted.model), Transformer(wanted.model)
    optimizer = build_optimizer(ours, wanted.optim)
    matrices = [p for name, p in theirs.named_parameters() if name.startswith("blocks.") and "weight" in name]
    matrices = [p for p in matrices if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in theirs.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, fused=True)
    for number in range(4):
        step(ours, optimizer, number)
        batch = torch.randint(31, (4, 17), generator=torch.Generator().manual_seed(number))
        theirs.loss(batch).backward()
        for other in (muon, adamw):
            other.step()
            other.zero_grad(set_to_none=True)
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in ours.named_parameters())


def test_muon_leaves_embeddings_head_norms_and_biases_to_adamw() -> None:
    model = Transformer(recipe({"name": "muon"}).model)
    hidden = {id(parameter) for parameter in hidden_matrices(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in hidden}
    assert names == {
        f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("attention.qkv", "attention.out", "ffn.up", "ffn.down")
    }


def test_muon_updates_the_projections_of_embeddings() -> None:
    model = Transformer(recipe({"name": "muon"}).model.model_copy(update={"embedding": "projected"}))
    hidden = {id(parameter) for parameter in hidden_matrices(model)}
    assert {id(model.embedding_map.weight), id(model.head_map.weight)} <= hidden


def test_a_learning_rate_applies_to_both_parts_of_muon() -> None:
    model = Transformer(recipe({"name": "muon"}).model)
    optimizer = build_optimizer(model, Muon())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    step(model, optimizer, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_ortho_adam_is_adamw_of_rotated_weights() -> None:
    """Weight decay commutes with a rotation; rotations of both axes are one Kronecker product of the entries."""
    wanted = recipe({"name": "ortho_adam", "lr": 3e-3, "weight_decay": 0.2})
    ours, theirs = Transformer(wanted.model).double(), Transformer(wanted.model).double()
    optimizer = build_optimizer(ours, wanted.optim)
    rotations, turned = [], []
    for number, weight in enumerate(theirs.parameters()):
        whole = torch.ones(1, 1, dtype=torch.float64)
        for axis, length in enumerate(weight.shape):
            matrix = rotation(number, axis, length)
            assert matrix is not None
            whole = torch.kron(whole, matrix.double())
        rotations.append(whole)
        turned.append(torch.nn.Parameter(whole @ weight.detach().flatten()))
    adamw = torch.optim.AdamW(turned, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    for number in range(4):
        step(ours, optimizer, number)
        batch = torch.randint(31, (4, 17), generator=torch.Generator().manual_seed(number))
        theirs.loss(batch).backward()
        for weight, whole, other in zip(theirs.parameters(), rotations, turned, strict=True):
            assert weight.grad is not None
            other.grad = whole @ weight.grad.flatten()
        adamw.step()
        theirs.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, whole, other in zip(theirs.parameters(), rotations, turned, strict=True):
                weight.copy_((whole.T @ other).view_as(weight))
    expected = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert_close(weight, expected[name].detach(), 1e-5, name)


def test_rotations_are_orthogonal_and_differ_between_parameters_and_axes() -> None:
    first, second, third = rotation(0, 0, 24), rotation(0, 1, 24), rotation(1, 0, 24)
    assert first is not None
    assert_close(first @ first.T, torch.eye(24), 1e-5)
    for other in (second, third):
        assert other is not None
        assert not torch.allclose(first, other)
    again = rotation(0, 0, 24)
    assert again is not None
    assert torch.equal(first, again)
    assert rotation(0, 0, 4097) is None


def test_ortho_adam_is_refused_with_sharded_gradients() -> None:
    with pytest.raises(InputError, match=r"ortho_adam requires whole gradients: set train\.parallel to ddp"):
        build_recipe(SMALL, {"optim": {"name": "ortho_adam"}, "train": {"parallel": "fsdp"}})


def layers_of(model: Transformer) -> list[Any]:
    return [block.attention for block in model.blocks]


def largest_logits(model: Transformer, batches: list[torch.Tensor], window: int) -> torch.Tensor:
    """Largest q.k / sqrt(D) of every layer and KV head, (L, G), pair by pair."""
    found = []
    for layer in layers_of(model):
        seen: list[torch.Tensor] = []
        handle = layer.core.register_forward_pre_hook(lambda _, args, seen=seen: seen.extend(args[:2]))
        with torch.no_grad():
            for batch in batches:
                model(batch)
        handle.remove()
        best = torch.full((model.config.key_heads,), -torch.inf)
        for q, k in zip(seen[::2], seen[1::2], strict=True):
            for head in range(model.config.heads):
                group = head * model.config.key_heads // model.config.heads
                for t in range(q.shape[2]):
                    z = (k[:, group, max(0, t - window + 1) : t + 1] * q[:, head, t, None]).sum(-1) / q.shape[3] ** 0.5
                    best[group] = torch.maximum(best[group], z.max())
        found.append(best)
    return torch.stack(found)


@pytest.mark.parametrize("window", [16, 5])
def test_qk_clip_limits_the_logits_of_the_updates_batch(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklab.train.optim.QUERIES_AT_ONCE", 7)
    mask = {"kind": "causal"} if window == 16 else {"kind": "window", "width": window}
    model = Transformer(
        build_recipe(SMALL, {"model": {"heads": 4, "kv_heads": 2, "attention": {"mask": mask}}}).model, seed=3
    )
    batches = [torch.randint(31, (3, 16), generator=torch.Generator().manual_seed(number)) for number in range(2)]
    before = largest_logits(model, batches, window)
    tau = before.flatten().sort().values[-3].item() * 0.9  # at least three of the four are above it
    clip, values = QKClip(model, tau, ALONE), [layer.qkv.weight[-8:].clone() for layer in layers_of(model)]
    for batch in batches:  # as two micro-batches
        model(batch)
    clip.clip()
    assert_close(largest_logits(model, batches, window)[0], before[0].clamp(max=tau))  # later layers have new inputs
    for _ in range(6):
        for batch in batches:
            model(batch)
        clip.clip()
    assert largest_logits(model, batches, window).max().item() <= tau * 1.001
    assert all(torch.equal(layer.qkv.weight[-8:], v) for layer, v in zip(layers_of(model), values, strict=True))


def test_qk_clip_is_part_of_a_training_step(tmp_path: Path) -> None:
    source = "synthetic:bigram_backcopy:length=17,documents=100"
    dataset = prepare(settings_of(source, "words", valid_fraction=0.2), tmp_path / "data")

    def trained(name: str, **optim: object) -> Transformer:
        changes = {
            "optim": optim,
            "model": {"vocab_size": None},
            "metric": {"sequences": 4},
            "data": {"source": source, "tokenizer": "words"},
            "train": SHORT,
        }
        trainer = Trainer(open_run(build_recipe(SMALL, changes), dataset, tmp_path / name))
        trainer.train()
        return trainer.updater.model

    free, wide, tight = trained("free"), trained("wide", qk_clip=100.0), trained("tight", qk_clip=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(free.parameters(), wide.parameters(), strict=True))
    norms = [layers_of(model)[0].qkv.weight[:32].norm() for model in (tight, free)]
    assert norms[0] < 0.5 * norms[1]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"attention": {"operation": "sigmoid"}}, "softmax attention in every layer"),
        ({"norm": {"qk_norm": True}}, "qk_norm normalises"),
        ({"projection": "latent"}, "projection full"),
    ],
)
def test_qk_clip_is_refused_for_sigmoid_attention_qk_norm_and_latent_projections(
    model: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_recipe(SMALL, {"model": model, "optim": {"qk_clip": 50.0}})


def test_values_of_the_default_optimizer_need_no_name() -> None:
    assert build_recipe(SMALL, {"optim": {"lr": 1e-3}}, {"optim": {"name": "adamw"}}).optim.lr == 1e-3
    other = build_recipe(SMALL, {"optim": {"lr": 1e-3}}, {"optim": {"name": "sgd"}}).optim
    assert (other.name, other.lr) == ("sgd", 0.1)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"name": "lion"}, "optim.*adamw, sgd, muon, ortho_adam"),
        ({"name": "sgd", "momentum": 0.0, "nesterov": True}, "nesterov requires a momentum"),
        ({"name": "muon", "beta": 1}, r"optim\.beta: unknown key; allowed here: name, lr, betas, .*, momentum"),
    ],
)
def test_a_wrong_optimizer_is_refused_with_what_is_allowed(optim: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_recipe(SMALL, {"optim": optim})
