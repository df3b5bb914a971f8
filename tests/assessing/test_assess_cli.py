"""`sinklab assess`: its output and files, continuing after an interruption, and refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import Run, on_one_line
from made_assessment import assessment
from tiny_gguf import needed
from tiny_models import text_file, tiny_model
from trained_run import trained_run

from sinklab.assessing.assess_model import Assessment, assess, load_assessment
from sinklab.assessing.parts import PARTS, USUAL
from sinklab.assessing.parts.kv_cache import KVCache
from sinklab.assessing.parts.streaming import Streaming
from sinklab.assessing.settings import AssessOptions, settings_for
from sinklab.jobs import JobEvent, Observer, ignore
from sinklab.opening import open_model
from sinklab.train.lock import HeldError

SMALL = ("--sequences", 2, "--stream-length", 24, "--cache", 8, "--length", 16, "--budget", 6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return trained_run(tmp_path_factory.mktemp("run"), {"bos": True})


def test_every_part_of_a_run_is_assessed(made: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    directory, text = made
    parts = ("--parts", ",".join(PARTS))
    status, out, err = run("assess", directory, "--text", text, *SMALL, *parts, "--out", tmp_path / "a", "--json")
    assert status == 0, err
    document = json.loads(out)
    assert document == json.loads((tmp_path / "a" / "assessment.json").read_text())
    found = Assessment.model_validate(document)
    assert list(found.results) == list(PARTS)
    assert found.skipped == {}
    streaming = found.result(Streaming)
    assert streaming.positions == "cache"
    assert [(row.cache, row.first) for row in streaming.caches] == [(8, 0), (8, 1), (8, 2), (8, 4)]


def test_the_recommended_settings_are_printed_in_few_lines_and_everything_on_request(
    made: tuple[Path, Path], run: Run
) -> None:
    directory, text = made
    call = ("assess", directory, "--text", text, *SMALL, "--parts", "streaming,heads")
    status, printed, _ = run(*call)
    assert status == 0
    out = " ".join(printed.split())
    assert re.search(r" without the sink: [+-]\d\.\d{3} ± \d\.\d{3} nats per token in streaming through 8 keys\.", out)
    assert out.index("cache of 8 keys") < out.index(" without the sink:")
    assert not {"quantisation", "What do heads", "first 2 kept"} & set(out.split())
    assert len(printed.splitlines()) <= 15
    status, out, _ = run(*call, "--full")
    assert status == 0
    assert "cache 8, first 2 kept" in out
    assert "heads (first position):" in out
    assert "What do heads" in " ".join(out.split())


def test_settings_are_compared_with_the_tolerance_and_the_smallest_safe_one_is_recommended() -> None:
    document = assessment("model", 0.04, heads=None, eviction=None, prompt_cache=None, budgets=None)
    cache = document["kv_cache"]["settings"]  # 4 bits add 0.02 nats, 2 bits 0.04
    cache[1]["everything"]["error"] = 0.03
    found = Assessment.model_validate({**document, "tolerance": 0.025})
    verdicts = {one.name: one.verdict for one in found.settings() if one.kind == "KV cache"}
    assert verdicts == {"keys and values in 4 bits": "safe", "keys and values in 2 bits": "undecided"}
    assert "keys and values in 4 bits" in [one.name for one in found.recommended()]
    cache[0]["everything"]["error"] = 0.03
    unclear = Assessment.model_validate({**document, "tolerance": 0.015})
    assert "KV cache (at best keys and values in 4 bits, +0.020, undecided)" in " ".join(unclear.recommendation())
    cache[0]["everything"]["error"] = 0.0
    cache[1]["everything"]["error"] = 0.005
    found = Assessment.model_validate({**document, "tolerance": 0.025})
    assert "Not safe: keys and values in 2 bits (KV cache, +0.040)" in " ".join(found.recommendation())
    looser = found.model_copy(update={"tolerance": 0.06})
    assert "keys and values in 2 bits" in [one.name for one in looser.recommended()]
    stricter = found.model_copy(update={"tolerance": 0.001})
    assert [one.verdict for one in stricter.recommended()] == ["not safe"] * len(stricter.recommended())
    assert stricter.recommendation()[0].startswith(
        "No setting was safe for KV cache (at best keys and values in 4 bits, +0.020); "
    )


def test_a_page_is_written_and_the_tolerance_can_change_without_a_new_assessment(
    made: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    directory, text = made
    call = ("assess", directory, "--text", text, *SMALL, "--parts", "streaming", "--out", tmp_path / "a")
    assert run(*call)[0] == 0
    before = json.loads((tmp_path / "a" / "assessment.json").read_text())
    assert "safe up to +0.01 nats" in (tmp_path / "a" / "report.html").read_text()
    status, _, err = run(*call, "--tolerance", 5)
    assert (status, "streaming: kept" in err) == (0, True)
    assert "safe up to +5 nats" in (tmp_path / "a" / "report.html").read_text()
    assert json.loads((tmp_path / "a" / "assessment.json").read_text()) == {**before, "tolerance": 5.0}


def test_the_answer_has_the_loss_without_the_sink_then_the_loss_that_it_causes() -> None:
    document = assessment("model", 0.05)
    next(one for one in document["streaming"]["caches"] if not one["first"])["gap_error"] = 0.0404
    document["key_ablations"]["keys"][0]["hidden"]["error"] = 0.3
    next(one for one in document["quantisation"]["settings"] if "static" in one["name"])["due_error"] = 0.012
    found = Assessment.model_validate(document)
    assert found.answer() == [
        "A large loss without the sink: +0.050 ± 0.040 nats per token in streaming through 16 keys, +0.200 ± 0.300 "
        "with the first key hidden, +0.000 ± 0.001 with its attention spread over the other keys.",
        "The sink itself costs +0.038 ± 0.012 nats per token in static int8, +0.025 with a cache in 2 bits, recent "
        "tokens included, +0.025 with chunks cached apart.",
    ]
    small = Assessment.model_validate(assessment("model", 0.002)).answer()[0]
    assert small.startswith("Hardly any loss without the sink: ")
    neither = found.model_copy(update={"results": {"heads": found.results["heads"]}})
    assert neither.answer() == [
        "The loss without the sink was not assessed: pass --parts streaming with --keep 0 and 4, or key_ablations."
    ]


def test_the_answer_says_if_streaming_with_and_without_the_sink_beats_the_unchanged_model() -> None:
    clause = "(with and without it, the loss is below the unchanged model's)"
    for without, kept, said in ((2.9, 2.8, True), (2.9, 3.2, False), (3.2, 2.9, False)):
        document = assessment("model")
        for one in document["streaming"]["caches"]:
            one["loss"] = kept if one["first"] else without
        assert (clause in Assessment.model_validate(document).answer()[0]) == said


def test_standard_errors_of_a_part_are_a_range_or_one_number() -> None:
    document = assessment("model")
    for part, key, errors in (
        ("streaming", "caches", (0.0451, 0.1, 0.1, 0.73)),
        ("eviction", "policies", (0.19, 0.191)),
    ):
        for effect, error in zip(document[part][key], errors, strict=False):
            effect["error"] = error
    found = Assessment.model_validate(document)
    (line,) = found.errors()
    assert "streaming 0.001 to 0.73, quantisation 0.001, eviction 0.001 to 0.19, " in line
    alone = Assessment.model_validate({**assessment("model"), **dict.fromkeys(found.results)})
    assert alone.errors() == []


def test_every_part_answers_the_question_that_the_documentation_has() -> None:
    found = Assessment.model_validate(assessment("model"))
    page = (Path(__file__).parents[2] / "docs" / "assess.md").read_text(encoding="utf-8")
    assert [name for name, part in PARTS.items() if f"| `{name}` | {part.question} |" not in page] == []
    assert {question for question, _ in found.answers()} == {part.question for part in PARTS.values()}


def test_notes_say_which_layers_have_attention_and_that_others_still_see_hidden_keys(run: Run, tmp_path: Path) -> None:
    directory, text = trained_run(tmp_path, {"bos": True}, {"mixer": {"kind": "gated_delta", "every": 2}})
    status, out, err = run("assess", directory, "--text", text, *SMALL, "--parts", "heads", "--json")
    assert status == 0, err
    counted, carried, fed = json.loads(out)["notes"][-3:]
    assert counted.startswith("1 of 2 layers has attention (2), here layer 1")
    assert "layer 1 still sees them" in carried
    assert fed.startswith("fed: <|bos|> | sheep | jumps | 1")


def test_the_help_of_parts_names_every_part() -> None:
    described = AssessOptions.model_fields["parts"].description or ""
    assert [name for name in PARTS if not re.search(rf"\b{name}\b", described)] == []


def test_a_later_call_keeps_finished_parts_and_adds_missing_ones(
    made: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    directory, text = made
    call = ("assess", directory, "--text", text, *SMALL, "--out", tmp_path / "a")
    assert run(*call, "--parts", "heads")[0] == 0
    first = load_assessment(tmp_path / "a" / "assessment.json")
    status, _, err = run(*call, "--parts", "heads,streaming")
    assert status == 0
    assert "heads: kept" in err
    both = load_assessment(tmp_path / "a" / "assessment.json")
    assert both.results["heads"] == first.results["heads"]
    assert "streaming" in both.results


def test_an_interrupted_assessment_continues_to_the_results_of_an_uninterrupted_one(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, text = made
    options = AssessOptions(parts=("streaming", "heads", "writer"), sequences=2, length=16, stream_length=24)
    seen: list[str] = []

    def broken(event: JobEvent) -> None:
        if event.step == "heads" and event.kind == "advanced" and event.done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assess(str(directory), text, options, out=tmp_path / "a", observe=broken)
    assert list(load_assessment(tmp_path / "a" / "assessment.json").results) == ["streaming"]
    found = assess(
        str(directory),
        text,
        options,
        out=tmp_path / "a",
        observe=lambda event: seen.append(f"{event.kind} {event.step}"),
    )
    assert {"kept streaming", "finished heads", "finished writer"} <= set(seen)
    assert found.results == assess(str(directory), text, options).results


def test_quick_gives_smaller_defaults_and_says_so(made: tuple[Path, Path], run: Run, tmp_path: Path) -> None:
    directory, text = made
    call = ("assess", directory, "--text", text, "--quick", "--out", tmp_path / "a")
    status, out, err = run(*call, "--parts", "heads,streaming")
    assert status == 0, err
    assert "quick: 32 x 16 tokens, 16 x 64 for streaming;" in re.sub(r"\s+", " ", out)
    document = json.loads((tmp_path / "a" / "assessment.json").read_text())
    assert document["asked"]["quick"] is True
    assert [document["heads"][key] for key in ("sequences", "length")] == [32, 16]
    assert [document["streaming"][key] for key in ("sequences", "length")] == [16, 64]
    assert {(row["cache"], row["first"]) for row in document["streaming"]["caches"]} == {(4, 0)}
    assert run(*call, "--parts", "heads")[0] == 0
    status, _, err = on_one_line(run)("assess", directory, "--text", text, "--parts", "heads", "--out", tmp_path / "a")
    assert (status, "with other settings" in err) == (2, True)


@pytest.mark.parametrize("quick", [True, False])
def test_every_part_reads_as_many_sequences_as_it_announces(made: tuple[Path, Path], quick: bool) -> None:
    announced: dict[str, int] = {}
    done: dict[str, float] = {}

    def count(event: JobEvent) -> None:
        if event.kind == "advanced":
            announced[event.step], done[event.step] = event.total or 0, event.done

    small = {"sequences": 2, "stream_length": 24, "caches": (8,), "length": 16, "budgets": (6,)}
    found = assess(str(made[0]), made[1], AssessOptions(quick=quick, **small), observe=count)
    expected = (
        {"streaming", "quantisation", "eviction", "prompt_cache", "kv_cache"} if quick else set(USUAL) - {"length"}
    )
    assert set(found.results) - {"length"} == set(announced) - {"length"} == expected
    assert done == announced
    if quick:
        assert found.notes[0].startswith(
            "quick: 2 x 16 tokens, 2 x 24 for streaming, only streaming, quantisation, eviction, prompt_cache, "
            "kv_cache;"
        )
        assert found.result(KVCache).heads == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"length": 256, "sequences": 2, "stream_length": 1024, "stream_sequences": 1, "kept": (0, 4)}),
        ({}, {"caches": (64,), "budgets": (64,), "head_sequences": 0}),
        ({"head_sequences": 2}, {"head_sequences": 2}),
        ({"length": 64}, {"length": 64, "sequences": 8, "stream_length": 256, "stream_sequences": 4}),
        ({"sequences": 5}, {"length": 256, "sequences": 5, "stream_sequences": 5}),
        ({"kept": (0, 1, 2), "caches": (32,), "budgets": (8,)}, {"kept": (0, 1, 2), "caches": (32,), "budgets": (8,)}),
    ],
)
def test_given_options_win_over_those_of_quick(given: dict[str, Any], expected: dict[str, Any], data_dir: Path) -> None:
    model = open_model(str(data_dir / "models" / "TinyStories-656K"))
    quick = settings_for(model, AssessOptions(quick=True, **given)).model_dump()
    assert {name: quick[name] for name in expected} == expected
    assert "quick" not in settings_for(model, AssessOptions(**given)).model_dump()


def test_of_two_calls_at_a_time_one_is_refused_and_no_result_is_lost(made: tuple[Path, Path], tmp_path: Path) -> None:
    directory, text = made
    out, small = tmp_path / "a", {"sequences": 2, "stream_length": 24, "caches": (8,), "length": 16, "budgets": (6,)}

    def call(part: str, observe: Observer = ignore) -> Assessment:
        return assess(str(directory), text, AssessOptions(parts=(part,), **small), out=out, observe=observe)

    def meanwhile(event: JobEvent) -> None:
        if event.kind == "started":
            with pytest.raises(
                HeldError, match=r"/a is being written to by process \d+ on .*: wait until it has ended"
            ):
                call("streaming")

    call("heads", meanwhile)
    both = call("streaming")
    assert set(both.results) == {"heads", "streaming"}
    assert [path.name for path in out.iterdir()] == ["assessment.json"]


def test_continuing_an_assessment_with_other_settings_is_refused(
    made: tuple[Path, Path], run: Run, tmp_path: Path
) -> None:
    directory, text = made
    call = ("assess", directory, "--text", text, "--parts", "heads", "--out", tmp_path / "a")
    assert run(*call, *SMALL)[0] == 0
    before = (tmp_path / "a" / "assessment.json").read_bytes()
    status, _, err = on_one_line(run)(*call, *SMALL[:-1], 5)
    assert status == 2
    assert "with other settings (budgets is [6], requested [5])" in err
    assert (tmp_path / "a" / "assessment.json").read_bytes() == before


def test_a_model_without_rotary_embeddings_streams_with_positions_in_the_text(run: Run, tmp_path: Path) -> None:
    model, text = tiny_model(tmp_path / "gpt2"), text_file(tmp_path / "text.jsonl", 40)
    status, out, err = run("assess", model, "--text", text, *SMALL, "--json")
    assert status == 0, err
    found = Assessment.model_validate(json.loads(out))
    assert found.result(Streaming).positions == "text"
    assert found.skipped == {"length": "its learned positional embeddings end at 64"}
    assert {*found.results, "length"} == set(USUAL)
    assert any("the streaming part uses positions in the text" in note for note in found.notes)


def test_the_length_part_is_skipped_as_slow_unless_it_is_named(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinklab.assessing.parts.streaming.LONGEST_UNASKED", 16)
    (directory, text), out = made, tmp_path / "a"
    small = {"sequences": 2, "stream_length": 24, "caches": (8,), "length": 16, "budgets": (6,)}
    unasked = assess(str(directory), text, AssessOptions(**small), out=out)
    assert {*unasked.results, "length"} == set(USUAL)
    assert unasked.skipped["length"].endswith("is slow: pass --parts length to include it")
    for parts in (("length",), ()):
        named = assess(str(directory), text, AssessOptions(parts=parts, **small), out=out)
        assert set(named.results) == set(USUAL)
        assert named.skipped == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cache", 25, "--stream-length", 24), "so the cache would never be full"),
        (("--cache", 1), "--cache 1: Input should be greater than or equal to 2"),
        (("--keep", 8, "--cache", 8), "the smallest cache has only 8 keys: set a smaller --keep or a larger --cache"),
        (("--length", 999), "beyond the model's context of 64: use --length 64 or less"),
        (("--stream-length", 100), "is limited to 64 tokens"),
        (("--positions", "cache"), "set --positions text"),
        (
            ("--parts", "length"),
            "the part `length` cannot be run: its learned positional embeddings end at 64",
        ),
        (("--parts", "streaming,sinks"), "unknown part 'sinks'"),
        (("--length", 64, "--sequences", 2, "--parts", "heads,quantisation", "--stream-length", 64), "pass more text"),
    ],
)
def test_impossible_options_are_refused_with_the_reason_and_write_nothing(
    options: tuple[object, ...], said: str, run: Run, tmp_path: Path
) -> None:
    model, text = tiny_model(tmp_path / "gpt2"), text_file(tmp_path / "text.jsonl", 1, words=20)
    if said != "pass more text":
        text = text_file(tmp_path / "text.jsonl", 40)
    status, out, err = on_one_line(run)("assess", model, "--text", text, *options, "--out", tmp_path / "a")
    assert status == 2
    assert said in err
    assert out == ""
    assert not (tmp_path / "a").exists()


def test_a_part_that_the_attention_does_not_allow_is_skipped_or_refused_if_named(run: Run, tmp_path: Path) -> None:
    directory, text = _differential(tmp_path)
    status, out, err = run("assess", directory, "--text", text, *SMALL, "--json")
    assert status == 0, err
    assert set(json.loads(out)["skipped"]) == {"key_ablations", "heads"}
    status, _, err = on_one_line(run)("assess", directory, "--text", text, *SMALL, "--parts", "heads")
    assert status == 2
    assert "the part `heads` cannot be run: " in err


def test_a_part_that_turns_out_not_to_apply_is_skipped_or_refused_if_it_was_named(run: Run, tmp_path: Path) -> None:
    model, text = tiny_model(tmp_path / "gpt2"), text_file(tmp_path / "text.jsonl", 40)
    dead: Any = hf.AutoModelForCausalLM.from_pretrained(model)
    for block in dead.transformer.h:
        block.mlp.c_fc.bias.data.fill_(-1e4)  # GELU gives zero, so that no weight of the down map has a gradient
    dead.save_pretrained(model)
    call = (str(model), text, AssessOptions(parts=("heads", "writer"), sequences=2, length=16))
    found = assess(*call, out=tmp_path / "a", where_possible=True)
    assert list(found.results) == ["heads"]
    assert found.skipped["writer"].startswith("no weight was found that writes channel ")
    assert load_assessment(tmp_path / "a" / "assessment.json") == found
    named = ("--parts", "writer", "--sequences", 2, "--length", 16)
    status, _, err = on_one_line(run)("assess", model, "--text", text, *named)
    assert (status, "the part `writer` cannot be run: no weight was found" in err) == (2, True)


def _differential(folder: Path) -> tuple[Path, Path]:
    from sinklab.data.prepare import prepared
    from sinklab.train.loop import Trainer
    from sinklab.train.recipe import build_recipe
    from sinklab.train.run import open_run

    text = text_file(folder / "text.jsonl", 200)
    recipe = build_recipe(
        {
            "model": {
                "layers": 2,
                "width": 16,
                "heads": 2,
                "ffn_width": 16,
                "context": 16,
                "attention": {"operation": {"kind": "differential"}},
            },
            "data": {"source": str(text), "tokenizer": "train:300", "valid_fraction": 0.2},
            "train": {"steps": 1, "batch_size": 4, "eval_sequences": 4},
            "metric": {"sequences": 4, "length": 8},
        }
    )
    Trainer(open_run(recipe, prepared(recipe.data, folder / "cache"), folder / "run")).train()
    return folder / "run", text


def test_a_cache_as_long_as_the_text_does_not_change_the_loss_of_a_real_model(
    data_dir: Path, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, text = data_dir / "models" / "TinyStories-656K", data_dir / "domains" / "tinystories.jsonl"
    options = ("--sequences", 2, "--stream-length", 256, "--cache", 256, "--cache", 32)
    status, out, err = run("assess", model, "--text", text, "--parts", "streaming", *options, "--json")
    assert status == 0, err
    found = Assessment.model_validate(json.loads(out)).result(Streaming)
    for row in found.caches:
        if row.cache == 256:
            assert row.loss == pytest.approx(found.unchanged.loss, rel=1e-5)
        else:
            assert row.kl > 1e-3


@pytest.mark.slow
def test_without_the_first_tokens_a_rolling_cache_of_a_real_model_collapses(data_dir: Path, run: Run) -> None:
    needed()
    model, text = data_dir / "models" / "SmolLM2-135M-Instruct", data_dir / "domains" / "gutenberg.jsonl"
    options = ("--sequences", 1, "--stream-length", 384, "--cache", 64, "--keep", 0, "--keep", 4)
    status, out, err = run("assess", model, "--text", text, "--parts", "streaming", *options, "--json")
    assert status == 0, err
    found = Assessment.model_validate(json.loads(out)).result(Streaming)
    none, four = found.caches
    assert none.loss > four.loss + 0.5
    assert none.kl > 3 * four.kl
    assert four.loss < found.unchanged.loss + 0.5


@pytest.mark.parametrize("change", [{"attention": {"bias": {"kind": "sink_logit"}}}, {"gate": {"kind": "head"}}])
def test_an_exported_run_that_is_no_llama_is_assessed_like_the_run(
    change: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    directory, text = trained_run(tmp_path, {"bos": True}, change)
    assert run("export", directory, tmp_path / "exported")[0] == 0
    found = []
    for model in (directory, tmp_path / "exported"):
        status, out, err = run("assess", model, "--text", text, *SMALL, "--json")
        assert status == 0, err
        found.append(Assessment.model_validate(json.loads(out)))
    own, exported = found
    assert exported.skipped == own.skipped == {}
    assert exported.numbers() == pytest.approx(own.numbers(), rel=1e-5, abs=1e-6)
