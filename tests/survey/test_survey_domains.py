"""A model on many texts: the same numbers as one by one, nothing lost by an interruption, no settings mixed."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stops import Stops
from table_texts import table_texts
from tiny_models import text_file, tiny_model

from sinklab.data import corpora
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Request
from sinklab.opening import model_files
from sinklab.report.cells import cells_table, headline
from sinklab.report.collect import collect
from sinklab.report.page import write_report
from sinklab.survey.measure import measure_model, text_hash
from sinklab.survey.suites import domain_files, measure_domains

SMALL = Request(sequences=4, length=16)
COST = ("seconds", "peak_memory_mb")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("domains") / "tiny"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    text_file(tmp_path / "texts" / "alpha.jsonl")
    text_file(tmp_path / "texts" / "beta.jsonl", seed=30)
    text_file(tmp_path / "texts" / "small.jsonl", documents=2)
    return tmp_path / "texts"


def result(measurement: Measurement) -> dict[str, Any]:
    return {key: value for key, value in measurement.document().items() if key not in COST}


def test_a_table_of_domains_has_the_numbers_of_measuring_each_alone(data_dir: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "texts", str(data_dir / "models" / "TinyStories-656K")
    folder.mkdir()
    for name in ("tinystories", "dm_mathematics", "github_code"):
        shutil.copy(data_dir / "domains" / f"{name}.jsonl", folder)
    domains = measure_domains(model, folder, Request(sequences=6, length=16), out=tmp_path / "out")
    assert list(domains.outcome.measured) == ["dm_mathematics", "github_code", "tinystories"]
    for name, measured in domains.outcome.measured.items():
        alone = measure_model(model, folder / f"{name}.jsonl", Request(sequences=measured.sequences, length=16))
        assert measured.sequences == (5 if name == "github_code" else 6)
        notes = [note for note in measured.notes if "the text has no more" not in note]
        assert {**result(measured), "notes": notes} == result(alone)
        np.testing.assert_array_equal(measured.importance_first, alone.importance_first)
        assert Measurement.load(tmp_path / "out" / name).document() == measured.document()


def test_an_interrupted_call_continues_and_gives_the_same_documents(model: str, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_domains(model, texts, SMALL, out=tmp_path / "out", observe=Stops(1))
    first = (tmp_path / "out" / "alpha" / "measurement.json").read_bytes()
    again = Stops()
    continued = measure_domains(model, texts, SMALL, out=tmp_path / "out", observe=again)
    assert again.started == ["beta", "small"]
    assert (tmp_path / "out" / "alpha" / "measurement.json").read_bytes() == first
    whole = measure_domains(model, texts, SMALL)
    assert {name: result(m) for name, m in continued.outcome.measured.items()} == {
        name: result(m) for name, m in whole.outcome.measured.items()
    }
    assert json.loads((tmp_path / "out" / "domains.json").read_text()) == continued.document()


def test_results_of_other_settings_are_never_mixed_in(model: str, texts: Path, tmp_path: Path) -> None:
    measure_domains(model, texts, SMALL, out=tmp_path / "out")
    with pytest.raises(
        InputError, match=r"alpha contains a measurement with other settings \(length is 16, requested 8"
    ):
        measure_domains(model, texts, Request(sequences=4, length=8), out=tmp_path / "out")
    text_file(texts / "beta.jsonl", seed=31, documents=13)
    with pytest.raises(InputError, match=r"beta contains a measurement with other settings .*text"):
        measure_domains(model, texts, SMALL, out=tmp_path / "out")


def test_a_copied_text_counts_as_the_same_and_a_changed_one_as_another_despite_its_time(
    model: str, texts: Path, tmp_path: Path
) -> None:
    measure_domains(model, texts, SMALL, out=tmp_path / "out")
    copied = Path(shutil.copytree(texts, tmp_path / "copied", copy_function=shutil.copyfile))
    again = Stops()
    measure_domains(model, copied, SMALL, out=tmp_path / "out", observe=again)
    assert again.started == []
    beta, times = copied / "beta.jsonl", (copied / "beta.jsonl").stat()
    beta.write_bytes(beta.read_bytes().swapcase())
    os.utime(beta, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match=r"beta contains a measurement with other settings \(text is"):
        measure_domains(model, copied, SMALL, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt", "tokenizer.model", "modeling_own.py"])
def test_a_model_whose_tokenizer_or_code_files_changed_is_another_model(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path / "model")
    before = model_files(folder)
    (folder / name).write_text("other", encoding="utf-8")
    assert model_files(folder) != before


def test_a_domain_without_usable_text_does_not_stop_the_others(model: str, texts: Path, tmp_path: Path) -> None:
    text_file(texts / "aaa.jsonl", words=2)
    domains = measure_domains(model, texts, SMALL, out=tmp_path / "out")
    assert list(domains.outcome.measured) == ["alpha", "beta", "small"]
    assert "0 of its 12 documents have 16 tokens" in domains.outcome.failed["aaa"]


def test_settings_that_fail_for_every_domain_are_refused(model: str, texts: Path) -> None:
    with pytest.raises(InputError, match=r"65 tokens are beyond"):
        measure_domains(model, texts, Request(sequences=4, length=65))


@pytest.mark.parametrize(("folder", "got"), [(None, "files$"), ("alpha.jsonl", r"files; got .*alpha\.jsonl$")])
def test_domains_need_a_folder(model: str, texts: Path, folder: str | None, got: str) -> None:
    with pytest.raises(InputError, match=rf"--by-domain needs --text FOLDER, a folder of text {got}"):
        measure_domains(model, texts / folder if folder else None, SMALL)


@pytest.mark.parametrize(("drawn", "how"), [(False, "alternate between"), (True, "are drawn from")])
def test_a_note_says_how_the_sequences_were_taken_from_the_files_of_a_folder(
    model: str, texts: Path, drawn: bool, how: str
) -> None:
    notes = measure_model(model, texts, SMALL.model_copy(update={"drawn_text": drawn})).notes
    assert f"the sequences {how} the 3 files of {texts}" in notes


def test_files_that_are_not_domains_are_listed(model: str, texts: Path) -> None:
    (texts / "README.md").write_text("# Texts\n")
    said: list[str] = []
    domains = measure_domains(model, texts, SMALL, observe=lambda event: said.append(event.text))
    assert list(domains.outcome.measured) == ["alpha", "beta", "small"]
    assert f"not read in {texts}: README.md" in said


def test_domains_are_named_by_their_paths(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/a.jsonl", "c.txt", "c.jsonl"):
        text_file(tmp_path / name)
    assert list(domain_files(tmp_path)) == ["a", "b/a", "c.jsonl", "c.txt"]


def test_the_report_shows_a_domain_in_a_folder_with_the_name_of_another(model: str, tmp_path: Path) -> None:
    for name in ("web.jsonl", "web/blog.jsonl"):
        text_file(tmp_path / "texts" / name)
    measure_domains(model, tmp_path / "texts", SMALL, out=tmp_path / "out")
    assert [run.cell for run in collect([tmp_path / "out"]).runs] == ["web/blog", "web.jsonl"]


def test_the_report_names_the_model_and_its_domains_and_says_how_many_sequences(
    model: str, texts: Path, tmp_path: Path
) -> None:
    measure_domains(model, texts, SMALL, out=tmp_path / "out")
    data = collect([tmp_path / "out"])
    columns, rows = table_texts(cells_table(data))
    assert columns[0][0] == "Domain"
    place = [name for name, _ in columns].index("Sequences")
    assert [(row[0], row[place]) for row in rows] == [("alpha", "4"), ("beta", "4"), ("small", "2")]
    assert headline(data)[0].startswith("tiny on three domains")
    page = write_report([tmp_path / "out"]).read_text(encoding="utf-8")
    assert 'id="chart-domains-0-0"' in page
    assert "small</b>: 2 of 4 sequences" in page


def test_a_text_that_cannot_be_read_is_named(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(corpora, "sha256_of", refused)
    with pytest.raises(InputError, match=r"^cannot read .*alpha\.jsonl: Permission denied"):
        text_hash(texts)
