"""The command line: results on stdout, messages on stderr, and exit statuses."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run

import sinklab
from sinklab.experiments.definition import SCALES
from sinklab.settings import PANELS

QUICK = ["model.layers=1", "model.width=32", "model.heads=2", "model.ffn_width=32", "model.context=32"]
QUICK += ["metric.length=32", "metric.sequences=10", "train.batch_size=4", "train.eval_every=4", "train.save_every=4"]
QUICK += ["train.eval_sequences=10", "train.steps=8", "data.tokenizer=train:300", "data.valid_fraction=0.2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small corpus."""
    path = tmp_path / "text.jsonl"
    with path.open("w") as file:
        for i in range(300):
            file.write(json.dumps({"text": " ".join(f"w{(i * j) % 37} and {(i + j) % 11}" for j in range(30))}) + "\n")
    return path


def settings(text: Path, *more: str) -> list[str]:
    return [arg for value in (*QUICK, f"data.source={text}", *more) for arg in ("--set", value)]


def test_the_help_of_measure_fits_two_screens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run("measure", "--help")
    assert status == 0
    assert len(out.splitlines()) <= 100
    assert max(map(len, out.splitlines())) <= 80
    assert [name for name in PANELS if f"─ {name} ─" in out] == ["Input", "Measured", "Output", "Advanced"]


def test_the_help_of_train_names_every_included_recipe(run: Run) -> None:
    _, out, _ = run("train", "--help")
    recipes = {path.stem for path in (Path(sinklab.__file__).parent / "recipes").glob("*.yaml")}
    assert recipes <= set(re.findall(r"[\w-]+", out))


def test_the_help_of_reproduce_names_every_scale(run: Run) -> None:
    _, out, _ = run("reproduce", "--help")
    assert set(SCALES) <= set(re.findall(r"\w+", out))


def test_the_help_of_lab_has_the_option_text_and_no_option_model(run: Run) -> None:
    _, out, _ = run("lab", "--help")
    assert "--text" in out
    assert "--model" not in out


def test_the_version_is_printed_and_nothing_else(run: Run) -> None:
    assert run("--version") == (0, f"sinklab {sinklab.__version__}\n", "")


@pytest.mark.parametrize(("typed", "offered"), [("sinklab mea", "measure"), ("sinklab measure --by", "--by-domain")])
def test_shell_completion_offers_commands_and_options(typed: str, offered: str) -> None:
    env = os.environ | {"_SINKLAB_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv[0] = 'sinklab'; from sinklab.commands.app import main; main()"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert offered in shown.stdout.split()
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--format", "csv"], "set --out DIR"),
        (["--format", "csv", "--by-domain", "--out", "here"], "one MODEL"),
        (["--format", "excel", "--out", "here"], "'csv', 'parquet'"),
    ],
)
def test_tables_that_cannot_be_written_are_refused_before_measuring(
    run: Run, options: list[str], sentence: str
) -> None:
    status, out, err = run("measure", "nowhere", "--inputs", "random", *options)
    assert (status, out) == (2, "")
    assert sentence in err
    assert not Path("here").exists()


def test_train_measure_and_report_work_one_after_another_and_write_their_files(
    run: Run, text: Path, tmp_path: Path
) -> None:
    status, out, err = run("train", "tiny", *settings(text), "--out", "one", "--json")
    assert status == 0, err
    assert json.loads(out)["schema"] == 1
    assert out == (tmp_path / "one" / "measurement.json").read_text()
    assert "step 8/8" in err
    for name in ("recipe.yaml", "env.json", "metrics.jsonl", "measurement.json", "measurement.npz", "tokenizer.json"):
        assert (tmp_path / "one" / name).stat().st_size > 0

    status, out, err = run("measure", "one", "--text", text, "--length", 16, "--sequences", 20, "--out", "m", "--json")
    assert status == 0, err
    document = json.loads(out)
    assert (document["sequences"], document["length"], len(document["sink_rate"])) == (20, 16, 16)
    assert json.loads((tmp_path / "m" / "measurement.json").read_text()) == document
    assert "details" not in document

    few = ("--length", 16, "--sequences", 4)
    status, out, err = run("measure", "one", "--text", text, *few, "--map", "1.2", "--out", "d", "--json")
    assert status == 0, err
    assert json.loads(out)["details"]["maps"] == [[1, 2]]
    assert "map-attention" in (tmp_path / "d" / "report.html").read_text()

    status, _, err = run("report", "one", "m", "--out", "page.html", "--format", "svg")
    assert status == 0, err
    assert "<html" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(13, "Permission denied", "home/model"),
            "cannot access home/model: Permission denied. Make it",
        ),
        (OSError(40, "Too many levels of symbolic links", "loop"), "cannot access loop: Too many levels"),
    ],
)
def test_an_inaccessible_path_is_reported_without_a_traceback(
    error: Exception, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object) -> None:
        raise error

    monkeypatch.setattr("sinklab.report.collect.collect", refused)
    status, out, err = run("report", "anything")
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [("report", ""), ("train", "tiny", "--out", ""), ("lab", "--text", "")])
def test_an_empty_argument_is_refused(command: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    status, out, err = run(*command)
    assert (status, out) == (2, "")
    assert "an argument is empty" in err
    assert not list(tmp_path.iterdir())


def test_names_in_messages_are_not_replaced_by_emoji(run: Run) -> None:
    assert "recipe :fire: not found" in run("train", ":fire:")[2]


def test_training_into_the_directory_of_a_run_continues_it(run: Run, text: Path, tmp_path: Path) -> None:
    run("train", "tiny", *settings(text), "--out", "one")
    before = (tmp_path / "one" / "metrics.jsonl").read_text()
    assert run("train", "tiny", *settings(text), "--out", "one")[0] == 0
    assert (tmp_path / "one" / "metrics.jsonl").read_text() == before
    status, _, err = run("train", "tiny", *settings(text, "seed=3"), "--out", "one")
    assert status == 2
    assert "choose another --out" in err
    status, out, err = run("train", "tiny", *settings(text, "train.steps=10"), "--out", "one")
    assert status == 0, err
    assert "which continues the run of 8 steps" in err
    assert "step 0/10" not in err
    assert "tiny, step 10 of 10" in out
    assert re.search(r"loss\W+\d\.\d{3}", out)
    assert "sinklab report one one-unchanged" in out
    assert "--set train.steps=20 --out one" in out


def test_a_step_is_replayed_and_reported(run: Run, text: Path, tmp_path: Path) -> None:
    run("train", "tiny", *settings(text), "--out", "one")
    status, out, err = run("train", "tiny", *settings(text), "--out", "one", "--replay", 6)
    assert status == 0, err
    assert "step 6 from one/checkpoints/step_00000004, 1 update repeated" in out
    assert "first non-finite tensor: none" in out
    status, out, err = run("train", "tiny", *settings(text), "--out", "one", "--replay", 9, "--json")
    assert (status, out) == (2, "")
    assert "the run has steps 1..8" in err
    status, out, err = run("train", "tiny", *settings(text), "--out", "one", "--replay", 6, "--dry-run")
    assert (status, out) == (2, "")
    assert "mutually exclusive" in err


def test_lab_trains_six_models_and_judges_them(run: Run, text: Path, tmp_path: Path) -> None:
    status, out, err = run("lab", "--text", text, "--steps", 2, "--out", "lab", "--json")
    # 300 short documents leave too little validation text for the metric's 100 sequences of 64 tokens
    assert status == 2
    assert "add text" in err
    assert not (tmp_path / "lab").exists()
    with text.open("a") as file:
        for i in range(3000):
            file.write(json.dumps({"text": " ".join(f"v{(i * j) % 41} or {(i - j) % 13}" for j in range(60))}) + "\n")
    status, out, err = run("lab", "--text", text, "--steps", 2, "--out", "lab2", "--json")
    assert status == 0, err
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "lab2" / "summary.json").read_text())
    assert set(summary["cells"]) >= {"softmax", "k_biases", "sigmoid", "task_softmax", "task_k_biases", "task_relu"}
    assert summary["cells"]["k_biases"]["sink_rate_bias"] is not None
    ids = {claim["id"] for claim in summary["claims"]}
    assert ids >= {"bias_frees_the_first_token", "no_sink_without_normalisation"}
    for claim in summary["claims"]:  # committed verdicts of five seeds are not cited, as their runs were longer
        assert (claim["verdict"], claim["seeds"], claim["scale"]) == ("no verdict", 1, "lab")
        assert re.search(r" at [01] of 1 seed|In [01] of 1 pair", claim["evidence"])
        assert claim["elsewhere"] == ""
    page = (tmp_path / "lab2" / "report.html").read_text(encoding="utf-8")
    assert "one seed: no verdict" in page
    begins = [page.index(part) for part in (">Softmax leaves unneeded attention", ">Attention of the strongest head<")]
    assert begins == sorted(begins)
    assert '<h2 id="cells">' not in page  # a second table with other numbers (last evaluation) for the same names
    status, out, err = run("lab", "--text", text, "--steps", 2, "--out", "lab2")
    assert status == 0, err
    assert len(out.splitlines()) <= 15
    assert "Claims at lab" not in page  # all of them refer to claims that are counted elsewhere
    assert ".;" not in re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


def test_the_end_of_training_says_if_importance_is_of_proxy_scores(run: Run, text: Path) -> None:
    for kind, weights in (("softmax", "attention"), ("sigmoid", "proxy scores")):
        _, out, _ = run("train", "tiny", *settings(text, f"model.attention.operation.kind={kind}"), "--out", kind)
        assert f"over 0.3 of their {weights}" in " ".join(out.split())


def test_training_on_prepared_data_ends_with_commands_for_a_comparison(run: Run, text: Path, tmp_path: Path) -> None:
    status, out, err = run("data", "prepare", text, "--tokenizer", "train:300", "--out", "tokens")
    assert status == 0, err
    assert "training" in out
    status, out, err = run("train", "tiny", *settings(tmp_path / "tokens", "model.gate=head"), "--out", "one")
    assert status == 0, err
    assert len(out.splitlines()) <= 15
    for command in re.findall("^  sinklab (.*)", out, re.MULTILINE):
        status, _, err = run(*shlex.split(command))
        assert status == 0, err
    assert (tmp_path / "one" / "report.html").is_file()
    recipes = [(tmp_path / name / "recipe.yaml").read_text() for name in ("one", "one-unchanged")]
    assert [("kind: head" in recipe, "width: 32" in recipe) for recipe in recipes] == [(True, True), (False, True)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train", "nowhere.yaml"], "recipe nowhere.yaml not found"),
        (["train", "tiny", "--set", "model.layer=3"], "model.layer: unknown key"),
        (["train", "tiny", "--set", "data.source=missing.txt"], "missing.txt"),
        (["lab", "--text", "missing.txt"], "missing.txt"),
        (["measure", "nowhere", "--text", "text.jsonl"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["data", "prepare", "missing.txt", "--tokenizer", "train:300", "--out", "x"], "missing.txt"),
        (["lab", "--steps", "0"], "--steps"),
        (["train"], "Missing argument 'RECIPE'"),
        (["measure", "x", "--inputs", "strange"], "strange"),
        (["measure", "x", "--dtype", "float65"], "--dtype float65 is unknown; use one of auto, float32"),
        (["measure", "x", "--map", "3"], "expected LAYER.HEAD"),
        (["measure", "x", "--text", "text.jsonl", "--explore"], "pass MODEL and --out"),
        (["measure", "x", "--text", ".", "--by-domain", "--explore", "--out", "d"], "remove --by-domain"),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_ends_with_status_2_and_a_sentence(run: Run, text: Path, args: list[str], says: str) -> None:
    status, out, err = run(*args)
    assert status == 2
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_an_empty_text_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    status, _, err = run("lab", "--text", "empty.txt", "--steps", 1)
    assert status == 2
    assert "empty" in err


def test_ctrl_c_saves_and_the_same_call_continues(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sinklab", "train", "tiny", *settings(text, "train.steps=100000"), "--out", "one"]
    env = {**os.environ, "SINKLAB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 4/" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130
    assert "Run the same command again to resume" in rest
    saved = sorted((tmp_path / "one" / "checkpoints").iterdir())
    assert int(saved[-1].name.removeprefix("step_")) >= 4
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = next(line for line in process.stderr if "step " in line)
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait() == 130
    assert "step 0/" not in first


def test_experiments_coverage_lists_the_encoded_parts_of_the_paper(run: Run) -> None:
    status, out, err = run("experiments", "--coverage")
    assert status == 0, err
    assert "proposition_4" in out
    status, out, err = run("experiments", "--coverage", "--json")
    assert status == 0, err
    assert json.loads(out)["table_4"]["claims"][0] == "table_4.k_biases_free_the_first_token"
