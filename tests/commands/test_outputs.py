"""Commands overwrite only files that sinklab wrote."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from conftest import Run, on_one_line
from report_fixtures import make_lab, make_measurement, make_run
from sampling import one_in
from tiny_models import text_file, tiny_model

from sinklab.files import write_json
from sinklab.models.huggingface import loading
from sinklab.report.page import write_report

NOTES = "mine, and there is no copy"
SMALL = ("--sequences", "3", "--length", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("outputs") / "gpt2")


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`sinklab ARGS` in a folder with a text; stderr on one line."""
    monkeypatch.setenv("COLUMNS", "120")
    text_file(tmp_path / "texts" / "alpha.jsonl")
    return on_one_line(run)


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load_pretrained", load)


def test_a_file_has_the_permissions_of_the_umask_or_of_the_file_that_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result.json"
    before = os.umask(0o077)
    try:
        write_json(path, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_json(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o664)
    write_json(path, 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_report_replaces_a_report_and_no_other_file(run: Run, tmp_path: Path) -> None:
    made = make_measurement(tmp_path / "model")
    assert run("report", made, "--out", "page.html")[0] == 0
    assert run("report", made, "--out", "page.html")[0] == 0
    for name in ("notes.txt", "report.html", "model/measurement.json"):
        before = NOTES if name != "model/measurement.json" else (tmp_path / name).read_text()
        (tmp_path / name).write_text(before)
        status, _, err = run("report", made, "--out", name)
        assert status == 2
        assert f"{name} exists and was not written by sinklab" in err
        assert (tmp_path / name).read_text() == before


def test_a_report_at_its_default_path_does_not_replace_a_file_of_the_user(run: Run, tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    (made / "report.html").write_text(NOTES)
    assert run("report", made)[0] == 2
    assert (made / "report.html").read_text() == NOTES


def test_a_report_is_written_to_the_target_of_a_symbolic_link(run: Run, tmp_path: Path) -> None:
    made = make_measurement(tmp_path / "model")
    (tmp_path / "site").mkdir()
    (tmp_path / "link.html").symlink_to("site/page.html")
    for _ in range(2):
        assert run("report", made, "--out", "link.html")[0] == 0
        assert (tmp_path / "link.html").readlink() == Path("site/page.html")
        assert "sinklab report" in (tmp_path / "site" / "page.html").read_text()
    (tmp_path / "notes.txt").write_text(NOTES)
    (tmp_path / "other.html").symlink_to("notes.txt")
    assert run("report", made, "--out", "other.html")[0] == 2
    assert (tmp_path / "notes.txt").read_text() == NOTES


def test_a_report_never_replaces_a_pipe_a_device_a_folder_or_a_circular_link(run: Run, tmp_path: Path) -> None:
    made = make_measurement(tmp_path / "model")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, kind in (("pipe", "is a pipe"), ("/dev/null", "is a device"), (".", "is a folder"), ("circle", "cannot")):
        status, _, err = run("report", made, "--out", name)
        assert status == 2
        assert kind in err
    assert (tmp_path / "pipe").is_fifo()
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("kind", one_in(3, ["svg", "pdf", "png"]))
def test_charts_replace_charts_and_no_other_file(run: Run, tmp_path: Path, kind: str) -> None:
    made = make_measurement(tmp_path / "model", layers=1, heads=1)
    call = ("report", made, "--format", kind)
    assert run(*call)[0] == 0
    assert run(*call)[0] == 0
    chart = made / "charts" / f"norm-ratio.{kind}"
    chart.write_text(NOTES)
    status, _, err = run(*call)
    assert status == 2
    assert f"norm-ratio.{kind} exists" in err
    assert chart.read_text() == NOTES


def test_a_png_with_the_mark_of_sinklab_is_still_valid(tmp_path: Path) -> None:
    import struct
    import zlib

    made = make_measurement(tmp_path / "model", layers=1, heads=1)
    write_report([made], formats=("png",))
    png = (made / "charts" / "norm-ratio.png").read_bytes()
    place, names = 8, []
    while place < len(png):
        (size,) = struct.unpack_from(">I", png, place)
        chunk = png[place + 4 : place + 8 + size]
        assert struct.unpack_from(">I", png, place + 8 + size) == (zlib.crc32(chunk),)
        names.append(chunk[:4])
        place += 12 + size
    assert names[-2:] == [b"tEXt", b"IEND"]


@pytest.mark.parametrize("name", ["measurement.json", "measurement.npz", "report.html"])
def test_a_measurement_replaces_a_measurement_and_no_other_file(
    run: Run, model: Path, tmp_path: Path, name: str
) -> None:
    call = ("measure", model, "--inputs", "random", *SMALL, "--out", "out")
    assert run(*call)[0] == 0
    assert run(*call)[0] == 0
    (tmp_path / "out" / name).write_text(json.dumps({"mine": NOTES}))
    status, out, err = run(*call)
    assert (status, out) == (2, "")
    assert f"out/{name} exists" in err
    assert NOTES in (tmp_path / "out" / name).read_text()


@pytest.mark.parametrize("name", ["measurement.json", "summary.json", "report.html", "comparison.json", "request.json"])
@pytest.mark.usefixtures("no_model_is_loaded")
def test_a_file_of_the_user_in_the_output_folder_is_refused_before_any_work(
    run: Run, model: Path, tmp_path: Path, name: str
) -> None:
    again = tiny_model(tmp_path / "again")
    calls: dict[str, tuple[str, tuple[object, ...]]] = {
        "measurement.json": ("out", ("measure", model, "--inputs", "random")),
        "comparison.json": ("out", ("compare", model, again, "--inputs", "random")),
        "request.json": ("out/alpha", ("measure", model, "--by-domain", "--text", "texts")),
        "report.html": ("out", ("compare", model, again, "--inputs", "random")),
        "summary.json": ("out", ("lab", "--steps", 2)),
    }
    folder, call = calls[name]
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / name).write_text('{"mine": [1, 2]}')
    status, out, err = run(*call, "--out", "out")
    assert (status, out) == (2, "")
    assert f"{folder}/{name} exists" in err
    assert [path.name for path in (tmp_path / folder).iterdir()] == [name]


@pytest.mark.usefixtures("no_model_is_loaded")
def test_an_unwritable_output_path_is_refused_before_any_work(run: Run, model: Path, tmp_path: Path) -> None:
    again = tiny_model(tmp_path / "again")
    (tmp_path / "file").write_text(NOTES)
    generated = ("--inputs", "random")
    for call in (
        ("train", "tiny", "--set", "data.source=texts"),
        ("data", "prepare", "texts", "--tokenizer", "train:300"),
        ("measure", model, *generated),
        ("measure", model, "--by-domain", "--text", "texts"),
        ("compare", model, again, *generated),
        ("lab",),
    ):
        for place in ("file", "file/below", "/proc/none"):
            status, out, err = run(*call, "--out", place)
            assert (status, out) == (2, "")
            assert f"cannot write into {place}" in err
    status, out, err = run("report", make_lab(tmp_path / "results"), "--format", "svg", "--out", "file/report.html")
    assert (status, out) == (2, "")
    assert "cannot write into file" in err
    assert (tmp_path / "file").read_text() == NOTES


def test_the_output_folder_is_not_made_if_another_option_is_refused(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("measure", model, "--inputs", "random", "--out", "new/er", "--device", "no such")[0] == 2
    assert not (tmp_path / "new").exists()


def test_the_measurement_of_a_run_is_not_replaced(run: Run, model: Path, tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    before = (made / "measurement.json").read_bytes()
    status, _, err = run("measure", model, "--inputs", "random", *SMALL, "--out", made)
    assert status == 2
    assert "is a run directory" in err
    assert (made / "measurement.json").read_bytes() == before


def test_a_result_that_cannot_be_saved_on_a_full_disk_is_printed(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tiny_model(tmp_path / "again")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    generated = ("--inputs", "random", *SMALL, "--out", "out")
    for call, table in (
        (("measure", model, *generated), "gpt2: 3 sequences of 8 tokens"),
        (("measure", model, "--by-domain", "--text", "texts", *SMALL, "--out", "out"), "alpha"),
        (("compare", model, again, *generated), "gpt2"),
    ):
        status, out, err = run(*call)
        assert status == 1
        assert table in out
        assert "No space left on device" in err
        assert "free some space" in err
        status, out, _ = run(*call, "--json")
        assert status == 1
        assert json.loads(out)
    assert list((tmp_path / "out").rglob("measurement.*")) == []


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "partial/thesis.tex"])
def test_a_preparation_replaces_no_file_of_the_users(run: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text(NOTES)
    status, _, err = run("data", "prepare", "texts", "--tokenizer", "train:300", "--out", "mine")
    assert status == 2
    assert f"mine/{name.split('/')[0]} exists and was not written by data preparation" in err
    assert path.read_text() == NOTES
    assert [file for file in (tmp_path / "mine").rglob("*") if file.is_file()] == [path]


@pytest.mark.parametrize("name", ["tokenizer.json", "partial/thesis.tex"])
def test_a_preparation_replaces_no_file_put_beside_the_lock_of_a_failed_one(
    run: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    call = ("data", "prepare", "texts", "--tokenizer", "train:300", "--out", "mine")
    assert run(*call, "--limit-bytes", "1")[0] == 2  # fewer than two documents
    assert (tmp_path / "mine" / "prepare.lock").is_file()
    path = tmp_path / "mine" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(NOTES)
    status, _, err = run(*call)
    assert status == 2
    assert "exists and was not written by data preparation" in err
    assert path.read_text() == NOTES


def test_a_preparation_into_a_path_that_is_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(NOTES)
    status, _, err = run("data", "prepare", "texts", "--tokenizer", "train:300", "--out", "mine")
    assert status == 2
    assert "cannot write into mine: it, or a folder above it, is a file" in err


def test_an_empty_report_file_is_replaced(tmp_path: Path) -> None:
    made = make_measurement(tmp_path / "model", layers=1, heads=1)
    (made / "report.html").write_text("")
    write_report([made])
    assert "sinklab report" in (made / "report.html").read_text()
