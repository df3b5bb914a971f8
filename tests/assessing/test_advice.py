"""Decisions from assessments: with made-up numbers, and on trained models with and without a sink."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from assessed import part_settings, run_part
from families import family_tokens, pair_of
from made_assessment import assessment
from tiny_models import tiny_model

from sinklab.assessing.advice import UNDECIDED, Served, advice_of, advise, chosen_format, first_tokens
from sinklab.assessing.assess_model import Assessment
from sinklab.assessing.parts.bos import Bos
from sinklab.assessing.parts.kv_formats import FORMATS, KVFormats
from sinklab.assessing.parts.streaming import Streaming
from sinklab.assessing.settings import AssessOptions
from sinklab.data.prepare import prepared
from sinklab.models.adapter import adapt
from sinklab.models.huggingface.loading import AS_IT_IS
from sinklab.opening import open_model
from sinklab.train.loop import Trainer
from sinklab.train.recipe import load_recipe
from sinklab.train.run import open_run

LOSS = {"targets": 100, "kl": 0.0}


def streaming(gaps: dict[int, float], error: float | None = 0.001) -> Streaming:
    """Results of two caches; gaps are losses above that with the most first tokens kept, halved in the larger cache."""
    caches = [
        {
            "cache": cache,
            "first": n,
            "loss": 3.0 + gap * 16 / cache,
            "perplexity": 20.0,
            "gap_error": None if n == max(gaps) else error,
            **LOSS,
        }
        for cache in (16, 32)
        for n, gap in gaps.items()
    ]
    read = {"sequences": 1, "length": 256, "unchanged": {"loss": 3.0, **LOSS}}
    return Streaming.model_validate({**read, "positions": "cache", "caches": caches})


def test_the_fewest_first_tokens_within_the_tolerance_in_every_cache_are_chosen() -> None:
    found = streaming({0: 1.2, 1: 0.03, 2: 0.007, 4: 0.0})
    assert first_tokens(found, 0.01)[0] == 2
    assert first_tokens(found, 0.05)[0] == 1
    assert first_tokens(found, 2.0)[0] == 0
    assert first_tokens(streaming({0: -0.2, 4: 0.0}), 0.01)[0] == 0


def test_a_larger_tolerance_never_raises_the_number_of_first_tokens() -> None:
    draw = random.Random(5)
    for _ in range(200):
        gaps = {n: draw.choice((-1, 1, 1)) * draw.random() ** 3 for n in (0, 1, 2, 4)} | {8: 0.0}
        numbers = [first_tokens(streaming(gaps, 0.0), tolerance)[0] for tolerance in (0.001, 0.01, 0.1, 1.0)]
        assert numbers == sorted(numbers, key=lambda n: -(n or 0))


def test_first_tokens_are_undecided_unless_the_gap_is_two_standard_errors_from_the_tolerance() -> None:
    n, decision = first_tokens(streaming({0: 0.02, 4: 0.0}, error=0.02), 0.01)
    assert (n, decision.answer) == (None, UNDECIDED)
    assert first_tokens(streaming({0: 1.5, 4: 0.0}, error=0.02), 0.01)[0] == 4


def formats(added: dict[str, float], error: float = 0.0) -> KVFormats:
    rows = [
        {
            "name": name,
            "bits": FORMATS[name].bits(64),
            "keys": {"loss": 3 + loss, "error": error, **LOSS},
            "values": {"loss": 3 + loss / 2, "error": error, **LOSS},
            "everything": {"loss": 3 + loss, "error": error, **LOSS},
            "without_sink": {"loss": 3 + loss, **LOSS},
            "due_to_sink": 0.0,
        }
        for name, loss in added.items()
    ]
    read = {"sequences": 1, "length": 64, "unchanged": {"loss": 3.0, **LOSS}, "sink_positions": 1}
    return KVFormats.model_validate({**read, "formats": rows, "layers": []})


def test_the_format_with_the_fewest_bits_within_the_tolerance_is_chosen() -> None:
    some = formats({"fp8": 0.001, "q8_0": 0.0, "q4_0": 0.015, "turboquant_3bit_nc": 0.2})
    assert chosen_format(some, 0.01, "everything") == ("fp8", [])
    assert chosen_format(some, 0.01, "values") == ("q4_0", [])
    assert chosen_format(some, 1.0, "keys") == ("turboquant_3bit_nc", [])
    assert chosen_format(some, 1.0, "keys", ("q8_0", "q4_0")) == ("q4_0", [])
    assert chosen_format(some, -1.0, "keys") == (None, [])


def test_a_format_whose_loss_is_within_two_errors_of_the_tolerance_is_named_and_not_chosen() -> None:
    added = {"fp8": 0.001, "q8_0": 0.0, "q4_0": 0.009}
    assert chosen_format(formats(added, 0.0006), 0.01, "keys") == ("fp8", ["q4_0"])
    assert chosen_format(formats(added, 0.0004), 0.01, "keys") == ("q4_0", [])
    assert chosen_format(formats(added, 0.0004), 0.0085, "keys") == ("fp8", ["q4_0"])
    assert chosen_format(formats(added, 0.0002), 0.0085, "keys") == ("fp8", [])
    assert chosen_format(formats(added, 1.0), 0.01, "keys") == (None, ["q4_0", "fp8", "q8_0"])


def test_settings_have_no_undecided_format_and_none_are_printed_for_undecided_first_tokens() -> None:
    unclear = {"targets": 100, "kl": 0.0, "error": 0.5}
    made = assessment("org/model", 0.0)
    made["kv_formats"]["formats"][0]["keys"] |= unclear
    made["kv_formats"]["formats"][1]["name"] = "fp8"
    made["kv_formats"]["formats"][1]["everything"] |= unclear
    found = advised(made)
    assert found.servers["vLLM"] == "vllm serve org/model --kv-cache-dtype auto  # close to the tolerance: fp8"
    assert "-ctk f16" in found.servers["llama.cpp"]
    assert found.servers["llama.cpp"].endswith("# close to the tolerance: keys q8_0")
    assert "undecided: fp8 (standard error 0.500), pass more text" in found.text()
    for cache in made["streaming"]["caches"]:
        cache["gap_error"] = 0.5
    found = advised(made)
    assert found.servers["kvpress"].startswith(
        "# undecided: StreamingLLMPress(compression_ratio=0.5, n_sink=N); repeat"
    )
    assert found.servers["llama.cpp"].endswith(
        "# close to the tolerance: keys q8_0; undecided: --context-shift --keep N"
    )


def advised(made: dict[str, Any], **served: Any) -> Any:
    done = Assessment.model_validate(made)
    values: dict[str, Any] = {"model": "org/model", **served}
    named = Served(**values)
    return advice_of(done, 0.01, True, lambda ids: [f"<{token}>" for token in ids], torch.zeros(4, 64).long(), named)


def with_formats(*names: str) -> dict[str, Any]:
    """An assessment in which these formats add nothing and first tokens must stay."""
    made = assessment("org/model", 0.5)
    effect = {"loss": made["kv_formats"]["unchanged"]["loss"], "error": 1e-6, **LOSS}
    kinds = ("keys", "values", "everything", "without_sink")
    made["kv_formats"]["formats"] = [
        {"name": name, "bits": FORMATS[name].bits(64), "due_to_sink": 0.0, **dict.fromkeys(kinds, effect)}
        for name in names
    ]
    return made


def test_servers_are_given_only_formats_that_they_support_for_the_model() -> None:
    made = with_formats("fp8", "q8_0", "nvfp4", "turboquant_3bit_nc")
    assert advised(made).servers["vLLM"].endswith("--kv-cache-dtype turboquant_3bit_nc")
    for limit in ({"windows": True}, {"sink_logits": True}):
        servers = advised(made, **limit).servers
        assert servers["vLLM"].endswith("--kv-cache-dtype fp8  # on a B200: nvfp4")
        assert servers["SGLang"].endswith("--kv-cache-dtype fp8_e4m3")
    llama = advised(made, windows=True).servers["llama.cpp"]
    assert llama.endswith("-ctk q8_0 -ctv q8_0  # the cache of layers with windows cannot be shifted")
    assert (
        advised(made, width=80)
        .servers["llama.cpp"]
        .endswith(
            "-ctk f16 -ctv f16 --context-shift --keep 4  # q8_0 and q4_0 need a head width that is a multiple of 32"
        )
    )


def test_layers_of_vllm_are_counted_from_zero_among_all_layers_of_a_hybrid_model() -> None:
    made = with_formats("fp8")
    made["kv_formats"]["layers"] = [
        {**one, "name": "turboquant_3bit_nc"} for one in assessment("org/model", 0.5)["kv_formats"]["layers"]
    ]
    for layers, numbers in (((), "0 1"), ((4, 8), "3 7")):
        (found,) = (one for one in advised(made, layers=layers).decisions if one.question.startswith("layers"))
        assert (found.answer, found.evidence.endswith(f"--kv-cache-dtype-skip-layers {numbers}")) == ("1, 2", True)


def test_commands_of_servers_name_adapters_the_revision_and_the_export_of_a_run() -> None:
    made = with_formats("fp8")
    servers = advised(made, adapters=("runs/lora",), revision="v2").servers
    begins = "vllm serve org/model --revision v2 --enable-lora --lora-modules lora=runs/lora --kv-cache-dtype fp8"
    assert servers["vLLM"] == begins
    assert "--model-path org/model --revision v2 --lora-paths lora=runs/lora --kv-cache" in servers["SGLang"]
    assert "-m MODEL.gguf --lora lora.gguf -ctk" in servers["llama.cpp"]
    run = advised(made, model="EXPORTED", before="sinklab export runs/a EXPORTED && ").servers
    assert run["vLLM"].startswith("sinklab export runs/a EXPORTED && vllm serve EXPORTED ")


@pytest.mark.parametrize(
    ("family", "windows", "sinks"),
    [("llama", False, False), ("gemma3, window 5", True, False), ("gpt-oss, sinks and window 5", True, True)],
)
def test_windows_and_sink_logits_are_those_of_the_model(
    tmp_path: Path, family: str, windows: bool, sinks: bool
) -> None:
    model = pair_of(family)[0]
    model.save_pretrained(tmp_path)
    found = Served.of(open_model(str(tmp_path), for_text=False), AS_IT_IS)
    width = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    assert found.layers == tuple(range(1, model.config.num_hidden_layers + 1))
    assert (found.model, found.windows, found.sink_logits, found.width) == (str(tmp_path), windows, sinks, width)


def test_every_part_has_its_decisions_and_servers_their_own_options() -> None:
    found = advised(assessment("org/model", 0.5))
    answers = {one.question: one.answer for one in found.decisions}
    assert answers["first tokens that must stay in the cache"] == "4"
    assert answers["BOS"] == "must be there"
    assert answers["format of keys and values"] == "16 bits"
    assert answers["layers (from 1) not to be rounded to 3 bits"] == "none"  # none in the format with the fewest bits
    assert answers["tokens to put in front (PrefixQuant)"] == "BOS, or any token"
    assert found.servers["llama.cpp"].endswith("-ctk f16 -ctv f16 --context-shift --keep 4")
    assert found.servers["vLLM"] == "vllm serve org/model --kv-cache-dtype auto"
    assert found.servers["kvpress"].endswith("n_sink=4)")
    free = advised(assessment("org/model", 0.0))
    assert {one.question: one.answer for one in free.decisions}["BOS"] == "may be left out"
    assert free.servers["llama.cpp"] == "llama-server -m MODEL.gguf -ctk q8_0 -ctv q8_0"
    assert len(free.text(full=False).splitlines()) == 1 + len(free.decisions) + len(free.servers)
    assert all(one.evidence in free.text() for one in free.decisions)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_losses_with_and_without_bos_are_over_the_same_targets(family: str) -> None:
    model, tokens = pair_of(family)[0].double(), family_tokens()
    found = run_part(Bos, adapt(model), tokens[:, 1:], tokens, part_settings())
    with torch.no_grad():
        logits, bare = model(tokens).logits[:, 1:-1], model(tokens[:, 1:]).logits[:, :-1]
    targets = tokens[:, 2:].flatten()
    losses = [float(F.cross_entropy(z.flatten(0, 1), targets)) for z in (logits, bare)]
    assert found.with_bos.loss == pytest.approx(losses[0], rel=1e-6)
    assert found.unchanged.loss == pytest.approx(losses[1], rel=1e-6)


def test_a_model_is_advised_on_the_text_of_sinklab(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", "neox", bos=True)
    sizes: dict[str, Any] = {"quick": True, "length": 16, "stream_length": 32, "sequences": 1, "caches": (8,)}
    found = advise(str(folder), None, AssessOptions(**sizes), out=tmp_path / "out")
    answers = {one.question: one.answer for one in found.decisions}
    assert {"BOS", "format of keys and values"} < answers.keys()
    assert answers["layers (from 1) not to be rounded to 3 bits"] == "not assessed"
    assert (tmp_path / "out" / "advice.txt").read_text() == found.text() + "\n"


@pytest.mark.slow
def test_first_tokens_must_stay_in_the_cache_with_softmax_but_not_with_k_biases(tmp_path: Path) -> None:
    changes: dict[str, list[str]] = {"softmax": [], "k biases": ["model.attention.bias.kind=k"]}
    numbers = {}
    for name, change in changes.items():
        recipe = load_recipe("backcopy", [*change, "train.steps=600"])
        run = tmp_path / name
        Trainer(open_run(recipe, prepared(recipe.data, tmp_path / "cache"), run)).train()
        options = AssessOptions(length=64, kept=(0, 1, 4), caches=(16,), sequences=8)
        found = advise(str(run), None, options, tolerance=0.02)
        numbers[name] = {one.question: one.answer for one in found.decisions}[
            "first tokens that must stay in the cache"
        ]
    assert numbers["softmax"] in ("1", "4")
    assert numbers["k biases"] == "0"
