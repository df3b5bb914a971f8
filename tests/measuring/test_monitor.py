"""`sinklab.monitor` in training loops: its numbers are those of the batch, and it does not change the training."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers as hf
from families import family_tokens, pair_of
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

import sinklab
from sinklab.errors import InputError
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer


def small_model(kind: str = "llama") -> Any:
    return pair_of(kind)[0].train()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_the_numbers_are_those_of_a_measurement_of_the_batch(kind: str) -> None:
    model, tokens = small_model(kind).eval(), family_tokens()[:1]
    monitor = sinklab.monitor(model, every=1, eps=0.05)
    with monitor(0) as numbers:
        model(tokens)
    measured = sinklab.measure(model, tokens, eps=0.05, details=True)
    assert numbers["sink/rate"] == pytest.approx(measured.sink_rate[0])
    assert numbers["sink/share"] == pytest.approx(float(measured.importance[:, :, 0].mean()), rel=1e-5)
    for layer in range(measured.layers):
        share = float(measured.importance[layer, :, 0].mean())
        assert numbers[f"sink/share_layer_{layer + 1}"] == pytest.approx(share, rel=1e-5)
    assert measured.massive_activations
    assert numbers["sink/largest_activation"] == pytest.approx(
        max(one.ratio_to_median for one in measured.massive_activations), rel=1e-5
    )


def test_logits_and_entropy_are_those_of_the_matrices() -> None:
    model, tokens = small_model().eval(), family_tokens()
    monitor = sinklab.monitor(model, every=1)
    with monitor(0) as numbers:
        model(tokens)
    largest: list[torch.Tensor] = []

    def with_logits(module: Any, q_BHTD: Any, k_BGTD: Any, *others: Any, scaling: float, **options: Any) -> Any:
        k_BHTD = k_BGTD.repeat_interleave(q_BHTD.shape[1] // k_BGTD.shape[1], 1)
        logits_BHTT = (q_BHTD @ k_BHTD.transpose(2, 3)) * scaling
        unseen_TT = torch.ones(logits_BHTT.shape[2:], dtype=torch.bool).triu(1)
        largest.append(logits_BHTT.masked_fill(unseen_TT, -torch.inf).amax((0, 2, 3)))
        return sdpa_attention_forward(module, q_BHTD, k_BGTD, *others, scaling=scaling, **options)

    hf.AttentionInterface.register("with_logits", with_logits)
    model.set_attn_implementation("with_logits")
    with torch.no_grad():
        model(tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(tokens, output_attentions=True).attentions
    for layer, one in enumerate(weights, 1):
        entropy = torch.special.entr(one.double()).sum(-1).mean()
        assert numbers[f"sink/entropy_layer_{layer}"] == pytest.approx(float(entropy), rel=1e-4)
    assert monitor.largest_logit_LH is not None
    torch.testing.assert_close(monitor.largest_logit_LH, torch.stack(largest))
    assert numbers["sink/largest_logit"] == pytest.approx(float(monitor.largest_logit_LH.max()))


def train(model: Any, tokens: torch.Tensor, monitored: bool, steps: int = 6) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    optimiser, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    monitor = sinklab.monitor(model, every=2) if monitored else None
    for step in range(steps):
        optimiser.zero_grad()
        if monitor is None:
            loss = model(tokens, labels=tokens).loss
        else:
            with monitor(step) as numbers:
                loss = model(tokens, labels=tokens).loss
            assert bool(numbers) == (step % 2 == 0)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses, [one.detach().clone() for one in model.parameters()]


def test_losses_and_weights_under_a_monitor_are_the_same_bit_for_bit() -> None:

    model, tokens = small_model(), family_tokens()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    plain, watched = (train(copy.deepcopy(model), tokens, monitored) for monitored in (False, True))
    assert plain[0] == watched[0]
    assert all(map(torch.equal, plain[1], watched[1]))


def test_padding_is_left_out() -> None:
    model, tokens = small_model().eval(), family_tokens()[:1]
    monitor = sinklab.monitor(model, every=1)
    with monitor(0) as plain:
        model(tokens)
    for left in (True, False):
        pad = torch.zeros(1, 5).long()
        parts, ones = [pad, tokens], [pad, torch.ones_like(tokens)]
        order = slice(None) if left else slice(None, None, -1)
        mask = torch.cat(ones[order], 1)
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        with monitor(0) as padded:
            model(torch.cat(parts[order], 1), attention_mask=mask, position_ids=position_ids)
        for name in ("sink/rate", "sink/share", "sink/entropy", "sink/largest_logit"):
            assert padded[name] == pytest.approx(plain[name], rel=1e-4), (left, name)


@pytest.mark.parametrize("bias", [{}, {"bias": {"kind": "sink_logit"}}, {"bias": {"kind": "sink_token"}}])
def test_the_numbers_of_our_transformer_are_those_of_a_measurement(bias: dict[str, Any]) -> None:
    sizes = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 50, "context": 16}
    model = Transformer(ModelConfig.model_validate({**sizes, "attention": bias}), seed=3)
    tokens = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(2))
    monitor = sinklab.monitor(model, every=1, eps=0.1)
    with monitor(0) as numbers:
        model.hidden(tokens)
    measured = sinklab.measure(model, tokens, eps=0.1)
    assert numbers["sink/rate"] == pytest.approx(measured.sink_rate[0])
    assert numbers["sink/share"] == pytest.approx(float(measured.importance[:, :, 0].mean()), rel=1e-5)
    assert ("sink/bias_share" in numbers) == (bias.get("bias", {}).get("kind") == "sink_logit")


@pytest.mark.parametrize("kind", ["head", "element"])
def test_gates_of_our_transformer_are_those_of_a_measurement(kind: str) -> None:
    sizes = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 50, "context": 16}
    changes = {"gate": {"kind": kind}, "attention": {"bias": {"kind": "sink_token"}}}
    model = Transformer(ModelConfig.model_validate({**sizes, **changes}), seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name:
                parameter.mul_(20)
    tokens = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(2))
    with sinklab.monitor(model, every=1)(0) as numbers:
        model.hidden(tokens)
    details = sinklab.measure(model, tokens, details=True).details
    assert details is not None
    assert details.gate is not None
    assert numbers["sink/gate"] == pytest.approx(float(details.gate.mean()), rel=1e-5)
    for layer, of_layer in enumerate(details.gate, 1):
        assert numbers[f"sink/gate_layer_{layer}"] == pytest.approx(float(of_layer.mean()), rel=1e-5)
    with sinklab.monitor(small_model(), every=1)(0) as numbers:
        assert "sink/gate" not in numbers


def test_a_spike_is_reported_once_there_are_past_values() -> None:
    model, tokens, said = small_model().eval(), family_tokens(), list[str]()
    monitor = sinklab.monitor(model, every=1, alert=said.append)
    for step in range(8):
        with monitor(step):
            model(tokens)
    assert said == []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(50)
    with monitor(8):
        model(tokens)
    assert any("sink/largest_logit" in one for one in said)


def test_the_trainer_logs_the_numbers(tmp_path: Any) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate (extra sft)")
    model, tokens = small_model(), family_tokens()
    rows = [{"input_ids": row, "labels": row} for row in tokens.repeat(4, 1)]
    args = hf.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=100, report_to=[], use_cpu=True
    )
    monitor = sinklab.monitor(model, every=2)
    heard, callback = list[float](), monitor.callback()

    class Tracker(hf.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            heard.extend(logs[name] for name in logs if name == "sink/rate")

    trainer = hf.Trainer(model, args, train_dataset=rows, callbacks=[Tracker(), callback])  # type: ignore[arg-type]
    callback.goes_first(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "sink/rate" in entry]
    assert [entry["step"] for entry in logged] == [1, 3]
    assert all(math.isfinite(entry["sink/largest_logit"]) for entry in logged)
    assert heard == [entry["sink/rate"] for entry in logged]


def test_a_padding_mask_may_be_passed_by_position_or_by_name() -> None:
    model, tokens = small_model().eval(), family_tokens()
    mask = torch.ones_like(tokens)
    mask[0, : tokens.shape[1] // 2] = 0
    monitor = sinklab.monitor(model, every=1)
    with monitor(0) as plain:
        model(tokens)
    with monitor(1) as named:
        model(tokens, attention_mask=mask)
    with monitor(2) as placed:
        model(tokens, mask)
    assert placed == named != plain


def varlen(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Causal attention within packed sequences, which are known from the lengths alone, as in flash attention."""
    assert mask is None
    lengths = options["cu_seq_lens_q"].diff().tolist()
    parts = (x.split(lengths, 2) for x in (q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))))
    window = options.get("sliding_window") or q.shape[2]
    masks = [torch.ones(n, n, dtype=torch.bool).tril().triu(1 - window) for n in lengths]
    outs = [nn.functional.scaled_dot_product_attention(*one) for one in zip(*parts, masks, strict=True)]
    return torch.cat(outs, 2).transpose(1, 2), None


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral, window 5"])
def test_packed_sequences_have_the_numbers_of_the_same_sequences_in_rows(kind: str, flash: bool) -> None:
    model, tokens = small_model(kind).eval(), family_tokens()
    rows, packed = ([tokens[:2], tokens[2:3, :5]], torch.cat((tokens[:2].reshape(1, -1), tokens[2:3, :5]), 1))
    shares = []
    monitor = sinklab.monitor(model, every=1, eps=0.1)
    for part in rows:
        with monitor(0) as numbers:
            model(part)
        shares += [numbers] * len(part)
    lengths = [tokens.shape[1]] * 2 + [5]
    options: dict[str, Any] = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    if flash:
        options["cu_seq_lens_q"] = torch.tensor([0, *lengths]).cumsum(0).int()
        hf.AttentionInterface.register("varlen", varlen)
        hf.AttentionMaskInterface.register("varlen", flash_attention_mask)
        model.set_attn_implementation("varlen")
    with monitor(0) as found:
        model(packed, use_cache=False, **options)
    for name in ("sink/rate", "sink/share", "sink/entropy", "sink/share_layer_2"):
        assert found[name] == pytest.approx(sum(one[name] for one in shares) / 3, rel=1e-4), name
    assert found["sink/rate"] > 0


def test_sequences_are_not_counted_one_by_one_if_attention_crosses_them() -> None:
    model, tokens = small_model().eval(), family_tokens()[:1]
    places = (torch.arange(tokens.shape[1]) % 5)[None]
    monitor = sinklab.monitor(model, every=1)
    with sinklab.probe(model) as watch, monitor(0) as numbers:
        model(tokens, position_ids=places, attention_mask=torch.ones_like(tokens))
    share = torch.stack([one.importance_BHT[..., 0] for one in watch.layers]).mean()
    assert numbers["sink/share"] == pytest.approx(float(share), rel=1e-4)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_logs_the_numbers(tmp_path: Any, accumulated: int) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="needs lightning (extra lightning)")
    model, tokens = small_model(), family_tokens()

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Kept(pl.loggers.logger.DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.kept = list[tuple[int, dict[str, float]]]()

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.kept.append((step, metrics))

    def trained(*callbacks: Any) -> tuple[list[torch.Tensor], list[tuple[int, dict[str, float]]]]:
        torch.manual_seed(0)
        module, logger = Training(), Kept()
        options: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": accumulated, "accelerator": "cpu"}
        options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(logger=logger, callbacks=[one(module.model) for one in callbacks], **options)
        trainer.fit(module, torch.utils.data.DataLoader(tokens.repeat(4, 1), batch_size=2))  # type: ignore[arg-type]
        return [one.detach().clone() for one in module.parameters()], logger.kept

    plain, _ = trained()
    watched, kept = trained(lambda model: sinklab.monitor(model, every=2).lightning_callback())
    assert all(map(torch.equal, plain, watched))
    assert [step for step, numbers in kept if "sink/rate" in numbers] == [0, 2]
    batch = tokens.repeat(4, 1)[: 2 * accumulated]
    copy_of = copy.deepcopy(model)
    with (monitor := sinklab.monitor(copy_of, every=1))(0) as numbers:
        copy_of(batch)
    first = next(numbers for _, numbers in kept if "sink/rate" in numbers)
    assert first.keys() == monitor.numbers.keys()
    for name in ("sink/rate", "sink/share", "sink/entropy", "sink/largest_logit"):
        assert first[name] == pytest.approx(numbers[name], rel=1e-4)


def test_arguments_out_of_range_and_other_modules_are_refused() -> None:
    for options in ({"every": 0}, {"eps": 1.5}):
        with pytest.raises(InputError):
            sinklab.monitor(small_model(), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        sinklab.monitor(nn.Linear(2, 2))  # type: ignore[arg-type]
