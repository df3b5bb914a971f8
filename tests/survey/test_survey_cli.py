"""Domains and comparisons from the command line: results on stdout, sentences on stderr, exit statuses."""

import json
from pathlib import Path

import pytest
from conftest import Run
from tiny_models import text_file, tiny_model

SMALL = ("--sequences", "3", "--length", "8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    tiny_model(folder / "gpt2")
    tiny_model(folder / "pythia-14m", "neox")
    return folder


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`sinklab ARGS` in a folder of texts."""
    monkeypatch.setenv("COLUMNS", "120")
    text_file(tmp_path / "texts" / "alpha.jsonl")
    text_file(tmp_path / "texts" / "beta.jsonl", seed=40)
    return run


def test_domains_end_in_a_table_a_document_and_a_report(run: Run, models: Path, tmp_path: Path) -> None:
    call = ("measure", models / "gpt2", "--text", "texts", "--by-domain", *SMALL, "--out", "out")
    status, out, err = run(*call)
    assert status == 0, err
    assert all(word in out for word in ("alpha", "beta", "Sink₁", "Loss"))
    status, out, err = run(*call, "--json")
    assert status == 0, err
    assert json.loads(out) == json.loads((tmp_path / "out" / "domains.json").read_text())
    assert "alpha: Sink_1" in err
    assert "(kept)" in err
    assert "Sink rate by text domain" in (tmp_path / "out" / "report.html").read_text()


def test_one_domain_that_cannot_be_measured_is_listed_at_the_end_with_status_1(run: Run, models: Path) -> None:
    text_file(Path("texts") / "brief.jsonl", words=2)
    status, out, err = run("measure", models / "gpt2", "--text", "texts", "--by-domain", *SMALL)
    assert status == 1
    assert "alpha" in out
    assert "1 of 3 domains could not be measured" in err.splitlines()[-2]
    assert err.splitlines()[-1].startswith("  brief: ")


def test_a_comparison_prints_both_models_and_their_difference(run: Run, models: Path, tmp_path: Path) -> None:
    call = ("compare", models / "gpt2", models / "pythia-14m", "--text", "texts", *SMALL, "--out", "out")
    status, out, err = run(*call)
    assert status == 0, err
    assert all(word in out for word in ("gpt2", "pythia-14m", "Difference", "Sink_1", "loss (nats/token)"))
    status, out, err = run(*call, "--json")
    assert status == 0, err
    assert json.loads(out) == json.loads((tmp_path / "out" / "comparison.json").read_text())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["measure"], "Missing argument 'MODEL'"),
        (["measure", "x", "--by-domain"], "needs --text FOLDER"),
        (["measure", "x", "--by-domain", "--text", "texts/alpha.jsonl"], "needs --text FOLDER"),
        (["measure", "x", "--by-domain", "--text", "texts", "--inputs", "random"], "remove --inputs random"),
        (["compare", "x", "--inputs", "random"], "two models or more"),
        (["compare", "x", "x", "--inputs", "random"], "x is repeated"),
        (["compare", "x", "y", "--text", "no.txt"], "no text at no.txt"),
    ],
)
def test_bad_calls_end_with_status_2_and_a_sentence(run: Run, args: list[str], says: str) -> None:
    status, out, err = run(*args)
    assert status == 2
    assert out == ""
    assert says in " ".join(err.split())
    assert "Traceback" not in err
