"""Invalid arguments from Python and the command line are refused with a message, before the model is called."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from conftest import Run, on_one_line
from report_fixtures import make_measurement, make_run
from tiny_models import text_file, tiny_model
from torch import nn

import sinklab
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.measurement import Measurement
from sinklab.models.huggingface import loading
from sinklab.models.huggingface.loading import check_name
from sinklab.report.page import write_report

TOKENS = torch.randint(3, 64, (6, 12), generator=torch.Generator().manual_seed(1))
DEEP = "[" * 100_000


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("given") / "gpt2")


@pytest.mark.parametrize("given", [nn.Linear(3, 4), None, [1, 2]])
def test_objects_that_are_not_models_are_refused_with_their_type(given: Any) -> None:
    with pytest.raises(InputError, match=r"^the model is of type.*AutoModelForCausalLM"):
        sinklab.measure(given, TOKENS)
    with pytest.raises(InputError, match=r"^the model is of type"), sinklab.probe(given):
        pass


def test_a_probe_refuses_the_name_of_a_model() -> None:
    with pytest.raises(InputError, match="the model is a string"), sinklab.probe("gpt2"):  # pyrefly: ignore[bad-argument-type]
        pass


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (TOKENS.float(), "tokens are float32 numbers"),
        (TOKENS.numpy() / 2, "tokens are float64 numbers"),
        ("a text", "tokens are of type str"),
        ([[1, 2], ["a", "b"]], "tokens are not a matrix of integers"),
        ([b"text"], "tokens are of type list; expected rows of integers"),
        ([[1, 2**80]], "tokens are not a matrix of integers"),
        ({"ids": TOKENS}, r"tokens are of type dict; .*input_ids of a tokenizer"),
        ([], "neither empty"),
        (TOKENS[None], "neither empty"),
    ],
)
def test_invalid_tokens_are_refused_with_their_type(model: Any, tokens: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        sinklab.measure(model, tokens)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eps": "0.3"}, "eps is '0.3'"),
        ({"eps": [0.3, "x"]}, r"eps is \[0.3, 'x'\]"),
        ({"eps": []}, r"eps is \[\]"),
        ({"eps": torch.tensor(2)}, "eps is tensor.*"),
        ({"batch_size": 2.5}, "`batch_size=2.5`"),
        ({"batch_size": torch.tensor(2.5)}, "`batch_size=2.5`"),
        ({"lengths": 3}, "`lengths=3`"),
        ({"maps": [("a", 1)]}, r"`maps` \('a', 1\): expected LAYER.HEAD.* or pairs"),
        ({"maps": 3}, "`maps=3`: expected LAYER.HEAD.* or pairs"),
        ({"inputs": "bogus"}, "`inputs='bogus'`"),
        ({"ablate": "zero_massive"}, "`ablate='zero_massive'`"),
    ],
)
def test_invalid_options_are_refused_by_name_before_the_model_is_called(
    model: Any, options: dict[str, Any], says: str
) -> None:
    called: list[Any] = []
    model.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(InputError, match=says):
        sinklab.measure(model, TOKENS, **options)
    assert not called


def test_options_may_be_numbers_of_numpy_and_torch(model: Any) -> None:
    found = sinklab.measure(model, TOKENS, eps=np.float64(0.25), batch_size=np.int64(4))  # type: ignore[arg-type]
    assert found.sink_rate == sinklab.measure(model, TOKENS, eps=0.25).sink_rate
    assert sinklab.measure(model, TOKENS, eps=np.array([0.25, 0.5])).sink_rates is not None  # type: ignore[arg-type]
    for eps in (np.float32(0.25), np.array(0.25), torch.tensor(0.25), torch.tensor([0.25])):
        assert sinklab.measure(model, TOKENS, eps=eps).eps == 0.25  # type: ignore[arg-type]
    assert sinklab.measure(model, TOKENS, perturb=np.int64(3)).mixing  # type: ignore[arg-type]
    for lengths in (np.array([3]), torch.tensor([3]), range(3, 4)):
        assert list(sinklab.measure(model, TOKENS, lengths=lengths).sink_rate_by_length or ()) == ["3"]  # type: ignore[arg-type]


def test_tokens_may_be_an_array_and_of_any_integer_type(model: Any) -> None:
    expected = sinklab.measure(model, TOKENS).loss
    for tokens in (TOKENS.numpy(), TOKENS.numpy().astype(np.uint16), TOKENS.int(), TOKENS.to(torch.uint8)):
        assert sinklab.measure(model, tokens).loss == expected
    mask = np.ones(TOKENS.shape, dtype=bool)
    assert sinklab.measure(model, TOKENS, attention_mask=mask).loss == expected


def test_the_batch_of_a_tokenizer_is_measured_with_its_mask(model: Any) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    expected = sinklab.measure(model, TOKENS, attention_mask=mask)
    assert expected.loss != sinklab.measure(model, TOKENS).loss
    for batch in ({"input_ids": TOKENS, "attention_mask": mask}, hf.BatchEncoding({"input_ids": TOKENS.tolist()})):
        given = mask if "attention_mask" not in batch else None
        assert sinklab.measure(model, batch, attention_mask=given).loss == expected.loss


def test_threads_that_measure_one_model_take_turns(model: Any) -> None:
    alone = sinklab.measure(model, TOKENS)
    start = threading.Barrier(3)

    def measured(_: int) -> Measurement:
        start.wait()
        return sinklab.measure(model, TOKENS, batch_size=2)

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(measured, range(3)):
            assert found.sink_rate == alone.sink_rate
            np.testing.assert_allclose(found.importance, alone.importance, rtol=1e-5, atol=1e-7)
    assert not model._forward_hooks


def test_a_second_thread_cannot_probe_a_model_that_another_thread_probes(model: Any) -> None:
    def probed() -> None:
        with sinklab.probe(model):
            model(TOKENS)

    with ThreadPoolExecutor(1) as pool:
        with sinklab.probe(model) as watch:
            model(TOKENS)
            with pytest.raises(SinklabError, match="another thread measures or changes this model"):
                pool.submit(probed).result()
        pool.submit(probed).result()
    assert len(watch.layers) == 3


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_the_batches_of_a_probe_add_up(model: Any, family: str) -> None:
    if family == "bloom":
        model = hf.AutoModelForCausalLM.from_config(
            hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
        ).eval()
    with torch.no_grad(), sinklab.probe(model) as whole:
        model(TOKENS)
    with torch.no_grad(), sinklab.probe(model) as watch:
        for start in (0, 2, 4):
            model(TOKENS[start : start + 2])
    for one, other in zip(watch.layers, whole.layers, strict=True):
        torch.testing.assert_close(one.importance_BHT, other.importance_BHT)
        torch.testing.assert_close(one.key_norm_BT, other.key_norm_BT)


def test_shorter_batches_are_zero_past_their_end(model: Any) -> None:
    with torch.no_grad(), sinklab.probe(model) as watch:
        model(TOKENS[:2, :5])
        model(TOKENS[2:])
    layer = watch.layers[0]
    assert layer.importance_BHT.shape == (6, 4, 12)
    assert bool((layer.importance_BHT[:2, :, 5:] == 0).all())
    watch.clear()
    assert watch.layers == []


def test_sequences_that_are_read_again_with_tokens_added_are_counted_once(model: Any) -> None:
    with torch.no_grad(), sinklab.probe(model) as watch:
        for length in (10, 11, 12):
            model(TOKENS[:, :length], use_cache=False)
    with torch.no_grad(), sinklab.probe(model) as whole:
        model(TOKENS)
    torch.testing.assert_close(watch.layers[0].importance_BHT, whole.layers[0].importance_BHT)


def test_a_pass_that_failed_leaves_nothing_in_the_probe(model: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("halfway")

    with torch.no_grad(), sinklab.probe(model) as watch:
        model(TOKENS[:2])
        handle = model.transformer.h[1].register_forward_hook(broken)
        with pytest.raises(RuntimeError, match="halfway"):
            model(TOKENS[2:4])
        handle.remove()
        model(TOKENS[4:])
    assert [layer.importance_BHT.shape[0] for layer in watch.layers] == [4, 4, 4]


def test_a_measurement_is_saved_into_a_folder_named_by_a_string(tmp_path: Path) -> None:
    measured = Measurement.load(str(make_measurement(tmp_path / "made")))
    measured.save(str(tmp_path / "again"))
    again = Measurement.load(tmp_path / "again")
    assert again == measured
    for name, changed in (("loss", 0.5), ("importance", again.importance + 1), ("hidden_norm", None)):
        assert again.model_copy(update={name: changed}) != measured
    with pytest.raises(InputError, match="is a file"):
        measured.save(tmp_path / "again" / "measurement.json")


@pytest.mark.parametrize(
    "content", [b"\xff\x00\x9c\n\x80", DEEP.encode(), b"7\n", b'{"step": "a"}\n', b"1" * 9000 + b"\n"]
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "measurement.json", "summary.json", "env.json", "measurement.npz"])
def test_a_damaged_file_in_a_run_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    made = make_run(tmp_path / "run")
    if name == "env.json" and content.startswith(b"{"):
        pytest.skip("that is a mapping, too")
    (made / name).write_bytes(content)
    if name == "summary.json" and content.startswith(b"{"):
        write_report([made])
        return
    with pytest.raises(InputError, match=rf"{name}|contains no usable measurement"):
        write_report([made])


@pytest.mark.parametrize("row", [DEEP, "1" * 9000, "\x01"])
def test_an_invalid_row_of_a_jsonl_file_is_refused_with_its_line(
    run: Callable[..., tuple[int, str, str]], folder: Path, row: str
) -> None:
    Path("bad.jsonl").write_text(f'{{"text": "a b"}}\n{row}\n')
    status, _, err = run("measure", folder, "--text", "bad.jsonl")
    assert status == 2
    assert "bad.jsonl, line 2" in err


@pytest.fixture
def run(run: Run, tmp_path: Path) -> Run:
    """`sinklab ARGS` in a folder with a text; stderr on one line."""
    text_file(tmp_path / "text.jsonl")
    return on_one_line(run)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--text", "none.jsonl"], "no text at none.jsonl"),
        (["--text", "empty.jsonl"], "contains no text"),
        (["--text", "text.csv"], "contains no text"),
        (["--text", "binary.txt"], "is not UTF-8"),
        (["--text", "text.jsonl", "--eps", "1.5"], "--eps 1.5"),
        (["--text", "text.jsonl", "--eps", "nan"], "--eps nan"),
        (["--inputs", "random", "--sequences", f"{10**18}"], "less than or equal to 1000000000"),
        (["--inputs", "random", "--length", f"{10**20}"], "less than or equal to 1000000000"),
        (["--text", "text.jsonl", "--ablate", "no_boss"], "'no_boss' is unknown"),
        (["--text", "text.jsonl", "--ablate", "mask_first:63"], "use 1 to 62"),
        (["--text", "text.jsonl", "--ablate", f"mask_first:{'9' * 5000}"], "use 1 to 62"),
        (["--text", "text.jsonl", "--lengths", "65"], "use increasing lengths from 1 to 63"),
        (["--text", "text.jsonl", "--map", "0.1"], "--map 0.1: expected LAYER.HEAD"),
        (["--text", "text.jsonl", "--swap-position", "0", "3"], "positions start at 1"),
        (["--text", "text.jsonl", "--swap-position", "3", "3"], "changes nothing"),
        (["--text", "text.jsonl", "--replace-position", "65", "3"], "of 64 tokens have no position"),
    ],
)
def test_invalid_command_line_options_are_refused_before_a_model_is_loaded(
    run: Callable[..., tuple[int, str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load_pretrained", load)
    Path("empty.jsonl").write_text("\n\n")
    Path("text.csv").write_text("a,b")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    status, out, err = run("measure", folder, *args)
    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("name", ["no/such/model", "models/none/", "a b", "x..y", "./x", "", "a\\b", "-x", "/gpt2"])
def test_strings_that_cannot_be_names_on_the_hub_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"pass a model directory, a run directory, a \.gguf file, or a name on"):
        check_name(name)


def test_names_of_the_hub_pass() -> None:
    for name in ("gpt2", "EleutherAI/pythia-14m", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "ai21labs/Jamba-v0.1", "a/b_c"):
        check_name(name)


def test_a_comparison_looks_for_all_of_its_models_first(run: Callable[..., tuple[int, str, str]], folder: Path) -> None:
    status, out, err = run("compare", folder, "./none", "--inputs", "random", "--out", "out")
    assert (status, out) == (2, "")
    assert "./none is neither a directory nor" in err
    assert not Path("out").exists()


def test_sequences_alternate_between_the_files_of_a_folder(
    run: Callable[..., tuple[int, str, str]], folder: Path
) -> None:
    for name in ("a", "b", "c"):
        text_file(Path("texts") / f"{name}.jsonl", seed=ord(name))
    status, out, err = run("measure", folder, "--text", "texts", "--sequences", 6, "--length", 8, "--json")
    assert status == 0, err
    assert "the sequences alternate between the 3 files of texts" in json.loads(out)["notes"]


HUGE = "99999999999999999999999"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["measure", "x", "--inputs", "random", "--seed", HUGE], "less than or equal to 9223372036854775807"),
        (
            ["data", "prepare", "text.jsonl", "--tokenizer", "train:300", "--limit-bytes", HUGE],
            "less than or equal to 9223372036854775807",
        ),
        (
            ["data", "prepare", "text.jsonl", "--tokenizer", "train:300", "--limit-tokens", HUGE],
            "less than or equal to 9223372036854775807",
        ),
        (
            ["data", "prepare", "text.jsonl", "--tokenizer", "train:300", "--valid-fraction", "0.9"],
            "--valid-fraction 0.9: Input should be less than or equal to 0.5",
        ),
        (["data", "prepare", "text.jsonl", "--tokenizer", f"train:{HUGE}"], "and at most 16777216"),
        (["data", "prepare", "text.jsonl", "--tokenizer", "train:99999999"], "and at most 16777216"),
    ],
)
def test_numbers_above_the_limit_of_their_option_are_refused(
    run: Callable[..., tuple[int, str, str]], args: list[str], says: str
) -> None:
    status, out, err = run(*args, *(["--out", "out"] if args[0] == "data" else []))
    assert (status, out) == (2, "")
    assert says in err
    assert not Path("out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_result_that_cannot_be_printed_ends_with_status_1_and_a_message() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "sinklab", "interventions", "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "error: cannot write the result to stdout (No space left on device)" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_of_several_lengths_are_padded_and_measured_together(model: Any, side: str) -> None:
    def batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        width = max(map(len, rows))
        free = [[0] * (width - len(row)) for row in rows]
        ids = [[*n, *row] if side == "left" else [*row, *n] for row, n in zip(rows, free, strict=True)]
        ones = [
            [*n, *[1] * len(row)] if side == "left" else [*[1] * len(row), *n]
            for row, n in zip(rows, free, strict=True)
        ]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(ones)}

    rows = [TOKENS[i, : 6 + i].tolist() for i in range(6)]
    expected = sinklab.measure(model, batch(rows))
    batches = [batch(rows[:2]), batch(rows[2:])]
    examples = [{"input_ids": row} for row in rows]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    for given in (batches, iter(batches), loader, examples):
        found = sinklab.measure(model, given)
        assert found.sink_rate == pytest.approx(expected.sink_rate)
        assert found.loss == pytest.approx(expected.loss)


def test_one_sequence_and_loaders_of_matrices_are_measured(model: Any) -> None:
    one = sinklab.measure(model, TOKENS[:1])
    for given in (TOKENS[0], TOKENS[0].tolist(), TOKENS[0].numpy()):
        assert sinklab.measure(model, given).loss == one.loss
    every = sinklab.measure(model, TOKENS)
    for rows in (torch.utils.data.TensorDataset(TOKENS), [*TOKENS]):
        found = sinklab.measure(model, torch.utils.data.DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
        assert (found.sequences, found.loss) == (len(TOKENS), pytest.approx(every.loss))


@pytest.mark.parametrize("side", ["left", "right"])
def test_repeated_tokens_at_the_ends_are_noted_as_possible_padding_if_no_mask_is_given(model: Any, side: str) -> None:
    padded = TOKENS.clone()
    padded[1, 7:] = padded[3, 10:] = 5
    padded = padded if side == "right" else padded.flip(1)
    notes = sinklab.measure(model, padded).notes
    assert any(note.startswith("2 of 6 sequences begin or end with") for note in notes)
    for tokens in (TOKENS, TOKENS[:, :1].repeat(1, 12)):
        assert not any("begin or end with" in note for note in sinklab.measure(model, tokens).notes)


def test_a_weights_file_is_refused_with_the_directory_to_pass(
    run: Callable[..., tuple[int, str, str]], folder: Path
) -> None:
    status, _, err = run("measure", folder / "model.safetensors")
    assert status == 2
    assert f"is a file: pass the directory of the model, {folder}" in err
