"""Servers on the loopback that serve models as configured, rounded and altered: the verdict names what they serve."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from served_models import KEY, WINDOW, ServedModel, loaded, saved_model, serving
from tiny_models import TEMPLATE, chat_file, text_file
from trained_run import trained_run

import sinklab
from sinklab.assessing.parity import (
    AS_CONFIGURED,
    DIFFERS,
    IDS,
    SPLIT,
    TEXT,
    TEXT_WITH_BOS,
    Parity,
    compare_server,
    verdict_of,
)
from sinklab.errors import InputError, SinklabError
from sinklab.export.directory import export_run
from sinklab.models.huggingface.loading import Loading

LENGTH = 6 * WINDOW
Models = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Function from a family to a directory with its model; every directory is made once."""

    @cache
    def directory(family: str, bos: bool = True) -> Path:
        return saved_model(tmp_path_factory.mktemp(family), family, bos=bos)

    return directory


def compared(folder: Path, served: ServedModel, length: int | None = LENGTH, **options: Any) -> Parity:
    with serving(served) as url:
        return compare_server(url, str(folder), length=length, **options)


def verdicts(found: Parity) -> dict[str, str]:
    return {one.prompt: one.verdict for one in found.prompts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "altered", "named"),
    [
        ("llama", (), AS_CONFIGURED),
        ("gpt-oss", (), AS_CONFIGURED),
        ("gpt-oss", ("sinks",), "no sink logits"),
        ("gpt-oss", ("window",), "no window"),
        ("gpt-oss", ("sinks", "window"), "no sink logits, no window"),
        ("gemma2", ("softcap",), "no softcap"),
        ("gemma2", ("window",), "no window"),
        ("gemma3", ("window",), "no window"),
        ("mistral", ("window",), "no window"),
    ],
)
def test_the_verdict_names_an_alteration_of_the_model_but_not_rounding(
    models: Models, family: str, altered: tuple[str, ...], named: str, dtype: torch.dtype
) -> None:
    folder = models(family)
    found = compared(folder, ServedModel(loaded(folder, *altered, dtype=dtype), folder, "prompt_logprobs"))
    assert found.verdict == named
    for one in found.prompts[:2]:
        assert one.verdict == named
        nearest = next(other for other in one.compared if other.variant == named)
        if dtype == torch.float32:
            assert nearest.mean < 1e-5
        else:
            assert 0.3 * one.rounding < nearest.mean < one.tolerance
        assert one.compared[0].mean == pytest.approx(nearest.effect, abs=one.tolerance)


def test_a_model_here_in_bfloat16_is_compared_with_its_own_rounding(models: Models) -> None:
    folder = models("mistral")
    served = ServedModel(loaded(folder), folder, "prompt_logprobs")
    found = compared(folder, served, loading=Loading(dtype="bfloat16"))
    assert found.as_configured
    assert 0 < found.prompts[0].rounding < 0.2


@pytest.mark.parametrize(
    ("front", "of_ids", "of_text"),
    [
        (lambda ids, is_text: ids[1:] if is_text else ids, AS_CONFIGURED, "no BOS"),
        (lambda ids, is_text: [1, *ids] if is_text else ids, AS_CONFIGURED, "two BOS"),
        (lambda ids, is_text: [1, *ids], "two BOS", "two BOS"),
        (lambda ids, is_text: ids[1:], "no BOS", "no BOS"),
        (lambda ids, is_text: [*ids[:5], *ids] if is_text else ids, AS_CONFIGURED, SPLIT),
        (lambda ids, is_text: [*ids[:7], ids[7] - 1, *ids[8:]] if is_text else ids, AS_CONFIGURED, SPLIT),
    ],
)
def test_the_verdict_names_a_missing_or_second_bos_and_other_tokens_of_the_server(
    models: Models, front: Callable[[list[int], bool], list[int]], of_ids: str, of_text: str
) -> None:
    folder = models("llama")
    found = verdicts(compared(folder, ServedModel(loaded(folder), folder, "prompt_logprobs", front)))
    assert (found[IDS], found[TEXT]) == (of_ids, of_text)


def test_the_verdict_names_both_missing_sink_logits_and_a_second_bos(models: Models) -> None:
    folder = models("gpt-oss")
    served = ServedModel(loaded(folder, "sinks"), folder, "echo", lambda ids, is_text: [1, *ids] if is_text else ids)
    found = verdicts(compared(folder, served))
    assert (found[IDS], found[TEXT]) == ("no sink logits", "no sink logits, two BOS")


def test_a_note_says_that_a_text_with_bos_gets_a_second_bos(models: Models) -> None:
    folder = models("llama")
    found = compared(folder, ServedModel(loaded(folder), folder, "echo"))
    assert found.as_configured
    assert verdicts(found)[TEXT_WITH_BOS] == "two BOS"
    assert any("add_special_tokens" in note for note in found.notes)


def test_the_verdict_names_a_bos_added_by_the_server_but_not_by_the_tokenizer(models: Models) -> None:
    folder = models("llama", bos=False)
    served = ServedModel(loaded(folder), folder, "echo", lambda ids, is_text: [1, *ids] if is_text else ids)
    assert verdicts(compared(folder, served)) == {IDS: AS_CONFIGURED, TEXT: "BOS added"}


@pytest.mark.parametrize("form", ["echo", "strict", "generate", "next"])
@pytest.mark.parametrize(("altered", "named"), [((), AS_CONFIGURED), (("window",), "no window")])
def test_every_form_of_an_answer_is_read(models: Models, form: str, altered: tuple[str, ...], named: str) -> None:
    folder = models("mistral")
    found = compared(folder, ServedModel(loaded(folder, *altered), folder, form))
    assert verdicts(found).items() >= {IDS: named, TEXT: named}.items()
    assert {one.way for one in found.prompts} == {
        {"generate": "return_logprob of /generate", "next": "n_probs of /completion"}.get(
            form, "echo of /v1/completions"
        )
    }
    assert min(other.mean for other in found.prompts[0].compared) < 1e-5


def test_an_echo_that_is_shifted_by_one_token_is_aligned_with_a_note(models: Models) -> None:
    folder = models("gpt-oss", bos=False)
    found = compared(folder, ServedModel(loaded(folder, "sinks"), folder, "late"))
    assert verdicts(found) == {IDS: "no sink logits", TEXT: "no sink logits"}
    assert sum("follows itself" in note for note in found.notes) == 2
    assert found.prompts[0].nearest.mean < 1e-5


def test_conversations_begin_with_one_bos(models: Models, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models("llama"), tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chats = chat_file(tmp_path / "chats.jsonl")
    found = compared(folder, ServedModel(loaded(folder), folder, "prompt_logprobs"), text=chats)
    assert verdicts(found) == {IDS: AS_CONFIGURED, TEXT: AS_CONFIGURED, TEXT_WITH_BOS: "two BOS"}


def test_a_run_is_compared_as_its_export(tmp_path: Path) -> None:
    made: dict[str, Any] = {"context": 128, "attention": {"bias": {"kind": "sink_logit"}}}
    run_directory, text = trained_run(tmp_path, {}, made)
    exported = export_run(run_directory, tmp_path / "exported").directory
    sinklab.register()
    model = loaded(exported)
    assert compared(run_directory, ServedModel(model, exported, "echo"), text=text).as_configured
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("logit") or "sink" in name:
                parameter.fill_(-1e4)
    assert compared(run_directory, ServedModel(model, exported, "echo"), text=text).verdict == "no sink logits"


def test_a_text_shorter_than_the_window_gives_no_verdict_on_the_window(models: Models) -> None:
    folder = models("mistral")
    found = compared(folder, ServedModel(loaded(folder, "window"), folder, "echo"), length=WINDOW - 1)
    assert found.as_configured
    assert found.window is None
    assert any(f"not more than the sliding window of {WINDOW}" in note for note in found.notes)
    by_default = compared(folder, ServedModel(loaded(folder, "window"), folder, "echo"), length=None)
    assert (by_default.verdict, by_default.window) == ("no window", WINDOW)


def test_differences_of_a_missing_window_are_only_beyond_it(models: Models) -> None:
    folder = models("mistral")
    served = ServedModel(loaded(folder, "window"), folder, "prompt_logprobs")
    configured, *_ = compared(folder, served).prompts[0].compared
    scored, beyond = LENGTH - 1, LENGTH - WINDOW
    assert configured.beyond == pytest.approx(configured.mean * scored / beyond, rel=1e-3)
    assert configured.position > WINDOW


def test_other_weights_differ_from_every_variant(models: Models) -> None:
    folder = models("mistral")
    model = loaded(folder)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    assert compared(folder, ServedModel(model, folder, "echo")).verdict == DIFFERS


def test_log_probabilities_that_are_not_finite_are_an_error(models: Models) -> None:
    folder = models("mistral")
    model = loaded(folder)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(SinklabError, match="not finite"):
        compared(folder, ServedModel(model, folder, "echo"))


def test_the_simplest_of_the_near_models_is_the_verdict() -> None:
    means = {AS_CONFIGURED: 0.5, "no window": 0.06, "no window, two BOS": 0.04}
    assert verdict_of(means, 0.1) == "no window"
    assert verdict_of(means | {"no window, two BOS": 0.02}, 0.1) == "no window, two BOS"
    assert verdict_of({AS_CONFIGURED: 0.1, "no window": 0.06}, 0.2) == AS_CONFIGURED
    assert verdict_of({AS_CONFIGURED: 0.1, "no window": 0.06}, 0.05) == DIFFERS
    assert verdict_of({AS_CONFIGURED: 5e-5, "no window": 1e-6}, 0.05) == AS_CONFIGURED


def test_the_command_prints_and_saves_the_verdict(models: Models, run: Run, tmp_path: Path) -> None:
    folder, text = models("gpt-oss"), text_file(tmp_path / "text.jsonl")
    options = ("--model", folder, "--text", text, "--length", LENGTH)
    with serving(ServedModel(loaded(folder), folder, "prompt_logprobs")) as url:
        status, out, _ = run("parity", url, *options, "--out", tmp_path / "out")
    assert status == 0
    assert out.rstrip().endswith(f"serves {folder} {AS_CONFIGURED}")
    saved = Parity.model_validate_json((tmp_path / "out" / "parity.json").read_text())
    assert (saved.length, saved.served, saved.dtype) == (LENGTH, "tiny", "float32")
    with serving(ServedModel(loaded(folder, "sinks"), folder, "prompt_logprobs")) as url:
        status, out, _ = run("parity", url, *options)
        assert (status, out.rstrip().endswith("with no sink logits")) == (1, True)
        status, out, _ = run("parity", url.removesuffix("/v1"), *options, "--out", tmp_path / "out", "--json")
    assert status == 1
    assert json.loads(out)["prompts"][0]["verdict"] == "no sink logits"
    assert json.loads((tmp_path / "out" / "parity.json").read_text()) == json.loads(out)


def test_the_api_key_is_read_from_the_environment_variable_and_sent(
    models: Models, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models("llama")
    with serving(ServedModel(loaded(folder), folder, "echo"), KEY) as url:
        options = ("parity", url, "--model", folder, "--length", LENGTH)
        status, _, err = run(*options)
        assert (status, "--api-key-env" in err) == (2, True)
        monkeypatch.setenv("TINY_KEY", KEY)
        assert run(*options, "--api-key-env", "TINY_KEY")[0] == 0


def test_a_server_without_log_probabilities_is_refused_with_its_answers(models: Models) -> None:
    folder = models("llama")
    with pytest.raises(InputError, match=r"no log-probabilities of a prompt of token ids: /v1/completions answers 404"):
        compared(folder, ServedModel(loaded(folder), folder, "chat"))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["localhost:8000"], "http://localhost:8000/v1"),
        (["http://127.0.0.1:9"], "error: cannot reach http://127.0.0.1:9"),
        (["http://127.0.0.1:99999"], "cannot reach"),
        (["http://127.0.0.1:9", "--api-key-env", "NOT_SET"], "NOT_SET"),
        (["http://127.0.0.1:9", "--length", "3"], "--length"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(run: Run, args: list[str], sentence: str) -> None:
    status, _, err = run("parity", *args, "--model", "nothing")
    assert (status, sentence in err) == (2, True), err


def test_a_file_that_sinklab_did_not_write_is_not_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text("{}")
    status, _, err = run("parity", "http://127.0.0.1:9", "--model", "nothing", "--out", tmp_path)
    assert (status, "was not written by sinklab" in err) == (2, True)
