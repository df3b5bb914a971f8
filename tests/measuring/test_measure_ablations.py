"""Ablations: the loss over the same targets and the sink, with and without the first keys, BOS, the massive channel."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, LENGTH, alibi_once, family_tokens, hooks_on, pair_of
from hidden_keys_reference import scores_without_first_keys
from measure_reference import eager_reference
from own_models import SIZES, own_model, own_tokens
from rich.console import Console
from trained_run import trained_run
from transformers import AutoModelForCausalLM

import sinklab
from sinklab.commands.results import print_measurement
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request, Study
from sinklab.measuring.surgery import zeroed
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.measure import measure_model

ABLATED = ("mask_first:1", "mask_first:4", "no_bos", "zero_massive")


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> Measurement:
    """TinyStories-656K with BOS, ablated in every way."""
    text, model = data_dir / "domains" / "tinystories.jsonl", data_dir / "models" / "TinyStories-656K"
    return measure_model(str(model), text, Request(sequences=20, study=Study(ablate=ABLATED)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_without_the_first_keys_is_that_of_eager_attention_over_the_targets_after_them(family: str) -> None:
    model, eager = pair_of(family)
    tokens = family_tokens()
    expected = []
    for n in (LENGTH, 2):
        with scores_without_first_keys(n, LENGTH), alibi_once(family):
            logits = eager_reference(eager, tokens).logits
        nats = [-logits[b, t].log_softmax(-1)[tokens[b, t + 1]] for b in range(5) for t in range(2, LENGTH - 1)]
        expected.append(float(torch.stack(nats).mean()))
    [ablation] = sinklab.measure(model, tokens, ablate=["mask_first:2"]).ablations or []
    assert (ablation.loss_before, ablation.loss_after) == pytest.approx(expected, rel=1e-5)
    assert ablation.loss_change == ablation.loss_after - ablation.loss_before
    assert hooks_on(model) == 0


def test_the_losses_before_and_after_no_bos_are_over_the_same_targets() -> None:
    for model, tokens in ((pair_of("llama")[0], family_tokens()), (own_model("softmax"), own_tokens())):
        [ablation] = sinklab.measure(model, tokens, bos=True, ablate=["no_bos"]).ablations or []
        assert ablation.first_target == 3
        assert ablation.loss_after == pytest.approx(sinklab.measure(model, tokens[:, 1:]).loss, rel=1e-5)
        assert ablation.sink_rate == sinklab.measure(model, tokens[:, 1:]).sink_rate
        with torch.no_grad():
            output = model(tokens)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        nats = torch.nn.functional.cross_entropy(logits[:, 1:-1].flatten(0, 1), tokens[:, 2:].flatten())
        assert ablation.loss_before == pytest.approx(float(nats), rel=1e-5)


def test_the_losses_of_ablations_leave_out_a_prefix() -> None:
    model, tokens = own_model("prefix"), own_tokens()  # of three tokens
    names = ["zero_massive", "mask_first:1", "mask_first:4", "no_bos"]
    ablations = sinklab.measure(model, tokens, bos=True, ablate=names).ablations or []
    assert [one.first_target for one in ablations] == [4, 4, 6, 5]
    with torch.no_grad():
        logits = model(tokens)
    for one in ablations:
        first = one.first_target - 1
        before = F.cross_entropy(logits[:, first - 1 : -1].flatten(0, 1), tokens[:, first:].flatten())
        assert one.loss_before == pytest.approx(before.item(), rel=1e-5)
    assert ablations[-1].loss_after == pytest.approx(sinklab.measure(model, tokens[:, 1:]).loss, rel=1e-5)
    with pytest.raises(InputError, match="leaves no token to predict"):
        sinklab.measure(model, tokens[:, :4], bos=True, ablate=["no_bos"])


@pytest.mark.parametrize(
    ("variant", "names", "passes"),
    [
        ("softmax", ["zero_massive"], 2),
        ("softmax", ["mask_first:1", "zero_massive"], 4),
        ("prefix", ["zero_massive", "mask_first:1"], 3),  # its targets begin at position 4
        ("prefix", ["mask_first:4"], 3),
    ],
)
def test_the_loss_before_an_ablation_is_measured_again_only_for_other_targets(
    variant: str, names: list[str], passes: int
) -> None:
    tokens, said = own_tokens(), list[tuple[float, float]]()
    sinklab.measure(own_model(variant), tokens, ablate=names, progress=lambda done, all: said.append((done, all)))
    assert {total for _, total in said} == {passes * len(tokens)}
    assert said[-1][0] == passes * len(tokens)


def test_with_relative_positions_hiding_bos_changes_the_loss_as_much_as_dropping_it(stories: Measurement) -> None:
    hidden, _, dropped, _ = stories.ablations or []
    assert (hidden.loss_before, hidden.loss_after) == pytest.approx((dropped.loss_before, dropped.loss_after), rel=1e-5)


def test_each_ablation_raises_the_loss_and_hiding_the_first_key_removes_the_sink(stories: Measurement) -> None:
    found = stories.ablations or []
    assert [one.name for one in found] == list(ABLATED)
    assert stories.sink_rate[0] > 5
    for one in found:
        assert one.loss_change > 0.1
        assert one.sink_rate_before == stories.sink_rate[0]
    assert [one.sink_rate_after for one in found[:3]] == [0, 0, 0]
    assert found[1].sink_rate[:4] == [0, 0, 0, 0]
    assert "dimension 88 at position 1" in found[3].what


def test_the_massive_activation_is_zeroed_from_the_layer_in_which_it_first_appears() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight[7] *= 30  # a channel that both blocks write to
    with torch.no_grad():
        size = model(tokens[:1], output_hidden_states=True).hidden_states[1][0].abs()
    before, dimension = divmod(int(size.argmax()), 32)
    assert dimension == 7
    [ablation] = sinklab.measure(model, tokens, ablate=["zero_massive"]).ablations or []
    with zeroed(model, 1, before + 1, 7, last_layer=2):
        assert ablation.loss_after == sinklab.measure(model, tokens).loss
    [alone] = sinklab.measure(model, tokens, ablate=["zero_massive:1"]).ablations or []
    with zeroed(model, 1, before + 1, 7):
        assert alone.loss_after == sinklab.measure(model, tokens).loss != ablation.loss_after
    assert ablation.loss_before == sinklab.measure(model, tokens).loss != ablation.loss_after


def test_mean_massive_sets_the_massive_activation_to_its_mean_over_the_sequences() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight[7] *= 30
        hidden = model(tokens, output_hidden_states=True).hidden_states
    position = int(hidden[1][0, :, 7].abs().argmax())
    mean = float(hidden[1][:, position, 7].double().mean())
    [alone] = sinklab.measure(model, tokens, ablate=["mean_massive:1"]).ablations or []
    assert f"dimension 7 at position {position + 1} is set to its mean after layer 1 alone" in alone.what
    with zeroed(model, 1, position + 1, 7, values=[mean]):
        assert alone.loss_after == pytest.approx(sinklab.measure(model, tokens).loss, rel=1e-6)
    with zeroed(model, 1, position + 1, 7):
        assert alone.loss_after != sinklab.measure(model, tokens).loss


def test_a_massive_activation_that_a_later_block_writes_anew_is_zeroed_there_too() -> None:
    model, tokens = _massive_twice(), family_tokens()
    removed, once = sinklab.measure(model, tokens, ablate=["zero_massive", "zero_massive:1"]).ablations or []
    assert removed.what.startswith("dimension 7 at position 1 is zeroed after layers 1 to 2")
    assert once.what.startswith("dimension 7 at position 1 is zeroed after layer 1 alone")
    for one in (removed, once):
        assert one.largest_before is not None
        assert one.largest_before.is_massive
    assert (removed.still_massive, once.still_massive) == (False, True)
    assert "no massive activation remains" in removed.sentences[1]
    assert once.largest_after is not None
    assert (once.largest_after.layer, once.largest_after.position, once.largest_after.dimension) == (2, 1, 7)
    assert f"the largest remaining activation is {once.largest_after.value:,.1f} (dimension 7" in once.sentences[1]
    assert "there is still a massive activation" in once.sentences[1]


def _massive_twice() -> Any:
    """Both blocks write into channel 7 if channel 3 of the normed state is large, which only first tokens have.

    The first write makes the norm large, so that the second block writes nothing unless the first write is removed.
    """
    model = pair_of("llama")[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        model.model.embed_tokens.weight[:, 3] = 0
        model.model.embed_tokens.weight[family_tokens()[:, 0], 3] = 1
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            for part, row, column, weight in (("gate", 0, 3, 1), ("up", 0, 3, 1), ("down", 7, 0, 1000)):
                matrix = getattr(block.mlp, f"{part}_proj").weight
                matrix.zero_()
                matrix[row, column] = weight
    return model


def test_an_ablation_says_where_the_sink_is_afterwards(stories: Measurement) -> None:
    half = stories.length // 2
    for one in stories.ablations or []:
        rates = one.sink_rate[: len(one.sink_rate) // 2]
        assert one.sink_max_after == max(rates)
        assert one.sink_max_position_after == rates.index(max(rates)) + 1
        assert one.sink_max_before == max(stories.sink_rate[:half])
        assert one.sink_max_position_before == 1
    hidden = next(one for one in stories.ablations or [] if one.name == "mask_first:1")
    assert hidden.sink_rate_after == 0
    assert hidden.sink_max_position_after != 1
    text = io.StringIO()
    print_measurement(stories, Console(file=text, width=160))
    assert f"{hidden.sink_max_after:.1f} at {hidden.sink_max_position_after}" in text.getvalue()


def test_a_massive_activation_on_a_learned_sink_token_is_reported_there() -> None:
    model = own_model("sink token")
    [ablation] = sinklab.measure(model, own_tokens(), ablate=["zero_massive"]).ablations or []
    assert "at the learned sink token" in ablation.what
    assert ablation.loss_change != 0


def test_an_ablation_that_had_no_effect_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr("sinklab.measuring.surgery.masked_first_keys", lambda *_: nullcontext())
    for model, tokens in ((pair_of("llama")[0], family_tokens()), (own_model("softmax"), own_tokens())):
        with pytest.raises(SinklabError, match=r"still visible to later queries in layer [12]"):
            sinklab.measure(model, tokens, ablate=["mask_first:2"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mask_first", "unknown: use mask_first:N, no_bos, zero_massive"),
        ("zero_massive:x", "unknown"),
        ("zero_massive:3", "zero_massive:3: the model has layers 1 to 2"),
        ("mask_first:x", "unknown"),
        ("mask_first:0", "use 1 to 12"),
        ("mask_first:13", "use 1 to 12"),
        ("no_bos", "no BOS to remove"),
    ],
)
def test_invalid_ablations_are_refused_before_anything_is_measured(name: str, message: str) -> None:
    def progress(done: float, total: float) -> None:
        raise AssertionError(f"measured {done} of {total}")

    with pytest.raises(InputError, match=message):
        sinklab.measure(pair_of("llama")[0], family_tokens(), ablate=[name], progress=progress)


def test_padded_sequences_are_not_ablated() -> None:
    mask = torch.ones_like(family_tokens())
    mask[1, :2] = 0
    with pytest.raises(InputError, match="without padding"):
        sinklab.measure(pair_of("llama")[0], family_tokens(), attention_mask=mask, ablate=["zero_massive"])


def test_ablations_are_kept_and_printed(stories: Measurement, tmp_path: Path) -> None:
    stories.save(tmp_path / "m")
    assert Measurement.load(tmp_path / "m").ablations == stories.ablations
    document = json.loads((tmp_path / "m" / "measurement.json").read_text(encoding="utf-8"))
    assert document["ablations"][0]["name"] == "mask_first:1"
    text = io.StringIO()
    print_measurement(stories, Console(file=text, width=120))
    assert f"{(stories.ablations or [])[1].loss_change:+.4f}" in text.getvalue()
    assert "mask_first:4: the first 4 keys are hidden from later queries; targets from position 6 on" in text.getvalue()


def test_a_measurement_has_no_ablations_or_propositions_unless_requested() -> None:
    plain = sinklab.measure(pair_of("llama")[0], family_tokens())
    assert plain.ablations is None
    assert plain.propositions is None


def test_positions_are_swapped_for_the_measurement_and_the_notes_say_so(tmp_path: Path, data_dir: Path) -> None:
    folder = _gpt2_with_a_tokenizer(tmp_path, data_dir)
    measured = measure_model(
        str(folder),
        None,
        Request(
            options=Options(inputs="repeat"),
            sequences=4,
            length=12,
            study=Study(ablate=("mask_first:1",), swap_position=(1, 5)),
        ),
    )
    plain = measure_model(str(folder), None, Request(options=Options(inputs="repeat"), sequences=4, length=12))
    assert measured.notes[0] == "the learned positions 1 and 5 were swapped"
    assert measured.loss != plain.loss
    assert len(measured.ablations or []) == 1
    with pytest.raises(InputError, match="--swap-position 20 1: sequences of 12 tokens have no position 20"):
        measure_model(
            str(folder), None, Request(options=Options(inputs="random"), length=12, study=Study(swap_position=(20, 1)))
        )


def _gpt2_with_a_tokenizer(folder: Path, data_dir: Path) -> Path:
    """A saved GPT-2 of random weights, with the tokenizer of the stories."""
    import shutil

    stories = data_dir / "models" / "TinyStories-656K"
    rows = AutoModelForCausalLM.from_pretrained(stories).config.vocab_size
    config: Any = FAMILIES["gpt2"]()
    config.vocab_size = rows
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "gpt2")
    for path in stories.glob("*token*.json"):
        if path.name != "generation_config.json":
            shutil.copy(path, folder / "gpt2")
    return folder / "gpt2"


def test_a_run_directory_is_ablated_with_the_bos_of_its_training(tmp_path: Path) -> None:
    run, text = trained_run(tmp_path, {"bos": True})
    measured = measure_model(
        str(run), text, Request(sequences=5, length=12, study=Study(ablate=("no_bos", "mask_first:2")))
    )
    bare = measure_model(str(run), text, Request(sequences=5, length=11, no_bos=True))
    dropped, hidden = measured.ablations or []
    assert dropped.loss_after == pytest.approx(bare.loss, rel=1e-5)
    assert dropped.sink_rate == bare.sink_rate
    assert hidden.first_target == 4
    with pytest.raises(InputError, match="but --no-bos leaves it out already"):
        measure_model(str(run), text, Request(sequences=5, length=12, no_bos=True, study=Study(ablate=("no_bos",))))


def test_an_ablation_without_a_loss_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(InputError, match="an ablation shows the change in loss"):
        measure_model(
            "nowhere", None, Request(options=Options(inputs="random", loss=False), study=Study(ablate=("mask_first",)))
        )


@pytest.mark.parametrize("count", [1, 3])
def test_the_position_of_the_remaining_activation_does_not_count_learned_sink_tokens(count: int) -> None:
    attention = {"bias": {"kind": "sink_token", "count": count}}
    model = Transformer(ModelConfig.model_validate({**SIZES, "layers": 2, "attention": attention}), seed=3)

    block = model.blocks[1]
    forward = block.forward

    def with_two_massive_activations(*inputs: Any, **named: Any) -> torch.Tensor:
        hidden_BTC = forward(*inputs, **named)
        hidden_BTC[:, 0, 5] = 9000.0  # at the first learned token
        hidden_BTC[:, count + 1, 5] = -4000.0  # at the second token of the sequence
        return hidden_BTC

    block.forward = with_two_massive_activations
    removed, once = sinklab.measure(model, own_tokens(), ablate=["zero_massive", "zero_massive:1"]).ablations or []
    learned = "the learned sink token" if count == 1 else "register 1 of 3"
    assert removed.what.startswith(f"dimension 5 at {learned} is zeroed")
    assert "-4,000.0 (dimension 5 at position 2 after layer 2" in removed.sentences[1]
    assert "9,000.0 (dimension 5 at a learned token before the sequence after layer 2" in once.sentences[1]
    for one, position in ((removed.largest_after, 2), (removed.largest_before, 1 - count)):
        assert one is not None
        assert one.position == position
