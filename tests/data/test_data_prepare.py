"""Token shards: their contents, their validity, and their reuse."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from sinklab.data.corpora import Fingerprint, documents
from sinklab.data.loader import DataConfig, TokenDataset, TokenFile, dtype_for
from sinklab.data.prepare import prepare, prepared, settings_of
from sinklab.data.tokenizers import load_tokenizer
from sinklab.errors import InputError, SinklabError

TEXTS = [f"Document {i} says {'word ' * (i % 7)}and ends." for i in range(60)]


def rows_file(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def split_at_eos(data: TokenDataset, shard: TokenFile) -> list[str]:
    """The documents of a shard, decoded."""
    tokenizer = load_tokenizer(str(data.tokenizer_path))
    ids = shard[:]
    ends = np.flatnonzero(ids == data.eos_id)
    assert ends[-1] == len(shard) - 1
    return [tokenizer.backend.decode(part[part != data.eos_id].tolist()) for part in np.split(ids, ends + 1)[:-1]]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return rows_file(tmp_path / "text.jsonl", TEXTS)


def test_every_document_ends_with_eos_and_is_in_exactly_one_shard(source: str, tmp_path: Path):
    data = prepare(settings_of(source, "train:300", valid_fraction=0.3), tmp_path / "out")
    train, valid = split_at_eos(data, data.train), split_at_eos(data, data.valid)
    assert sorted(train + valid) == sorted(TEXTS)
    assert len(valid) == data.manifest.valid.documents > 1
    assert len(train) == data.manifest.train.documents


def test_the_split_does_not_depend_on_the_order_of_the_documents(source: str, tmp_path: Path):
    backwards = rows_file(tmp_path / "backwards.jsonl", TEXTS[::-1])
    one, other = (
        prepare(settings_of(s, "train:300", valid_fraction=0.3), tmp_path / f"{i}")
        for i, s in enumerate((source, backwards))
    )
    assert set(split_at_eos(one, one.valid)) == set(split_at_eos(other, other.valid))
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("fraction", [1e-9, 0.5])
def test_both_shards_have_a_document(tmp_path: Path, fraction: float):
    for texts in (TEXTS[i : i + 2] for i in range(8)):
        source = rows_file(tmp_path / "two.jsonl", texts)
        folder = tmp_path / f"{TEXTS.index(texts[0])}"
        data = prepare(settings_of(source, "train:300", valid_fraction=fraction), folder)
        assert sorted(split_at_eos(data, data.train) + split_at_eos(data, data.valid)) == sorted(texts)


def test_the_document_nearest_to_the_threshold_fills_an_empty_shard(source: str, tmp_path: Path):
    small, large = (
        prepare(settings_of(source, "train:300", valid_fraction=fraction), tmp_path / str(fraction))
        for fraction in (1e-9, 0.1)
    )
    (only,) = split_at_eos(small, small.valid)
    assert only in split_at_eos(large, large.valid)
    assert len(split_at_eos(small, small.train)) == len(TEXTS) - 1


def test_the_manifest_describes_the_text(source: str, tmp_path: Path):
    data = prepare(settings_of(source, "train:300"), tmp_path / "out")
    manifest = data.manifest
    text = Fingerprint()
    for document in documents(source):
        text.add(document)
    assert manifest.text_sha256 == text.hexdigest()
    assert manifest.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert (manifest.train.tokens, manifest.valid.tokens) == (len(data.train), len(data.valid))
    assert (data.vocab_size, data.eos_id, data.bos_id) == (300, 0, 1)
    assert data.train.dtype == np.dtype("<u2")
    assert int(data.train[:].max()) < data.vocab_size


def test_the_fingerprint_depends_on_the_contents_and_not_the_path(source: str, tmp_path: Path):
    here = prepare(settings_of(source, "train:300"), tmp_path / "here")
    moved = rows_file(tmp_path / "moved.jsonl", TEXTS)
    there = prepare(settings_of(moved, "train:300"), tmp_path / "there")
    other = prepare(settings_of(source, "train:301"), tmp_path / "other")
    assert here.fingerprint == there.fingerprint != other.fingerprint
    assert TokenDataset(tmp_path / "here").fingerprint == here.fingerprint


def test_large_vocabularies_have_wider_ids():
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")


def test_real_text_is_prepared_with_the_papers_tokenizer(data_dir: Path, tmp_path: Path):
    source = str(data_dir / "domains" / "tinystories.jsonl")
    tokenizer = str(data_dir / "tokenizers" / "gptneox")
    data = prepare(settings_of(source, tokenizer, valid_fraction=0.1), tmp_path / "out")
    assert (data.vocab_size, data.eos_id, data.bos_id) == (50277, 0, 0)
    assert np.count_nonzero(data.train[:] == 0) + np.count_nonzero(data.valid[:] == 0) == 500
    assert sorted(split_at_eos(data, data.train) + split_at_eos(data, data.valid)) == sorted(documents(source))


def test_text_can_be_limited(tmp_path: Path):
    data = prepare(settings_of("stdlib", "train:300", text_limit_bytes=100_000), tmp_path / "out")
    assert 99_990 < data.manifest.text_bytes <= 100_000


def test_progress_counts_the_bytes_of_both_stages(tmp_path: Path):
    texts = [f"Grüße, {text}" for text in TEXTS]
    done: dict[str, int] = {}
    source = rows_file(tmp_path / "text.jsonl", texts)
    prepare(
        settings_of(source, "train:300"), tmp_path / "out", progress=lambda stage, size, _: done.update({stage: size})
    )
    total = sum(len(text.encode()) for text in texts)
    assert done == {"tokenizer": total, "tokens": total}


@pytest.mark.parametrize("name", ["train.bin", "valid.bin"])
def test_a_flipped_bit_is_reported_with_a_remedy(source: str, tmp_path: Path, name: str):
    out = tmp_path / "out"
    prepare(settings_of(source, "train:300"), out)
    content = bytearray((out / name).read_bytes())
    content[len(content) // 2] ^= 1
    (out / name).write_bytes(content)
    with pytest.raises(SinklabError, match=rf"{name} is corrupted.*Delete the folder.*sinklab data prepare"):
        TokenDataset(out)


@pytest.mark.parametrize("name", ["train.bin", "valid.bin"])
def test_a_truncated_or_missing_shard_is_reported(source: str, tmp_path: Path, name: str):
    out = tmp_path / "out"
    prepare(settings_of(source, "train:300"), out)
    (out / name).write_bytes((out / name).read_bytes()[:-2])
    with pytest.raises(SinklabError, match=rf"{name} has .* bytes, expected .* Delete the folder"):
        TokenDataset(out)
    (out / name).unlink()
    with pytest.raises(SinklabError, match=rf"{name} is missing.*Delete the folder"):
        TokenDataset(out)


def test_a_replaced_tokenizer_is_reported(source: str, tmp_path: Path):
    prepare(settings_of(source, "train:300"), tmp_path / "out")
    prepare(settings_of(source, "train:301"), tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").replace(tmp_path / "out" / "tokenizer.json")
    with pytest.raises(SinklabError, match=r"tokenizer\.json is corrupted"):
        TokenDataset(tmp_path / "out")


def test_damaged_and_missing_manifests_have_different_errors(source: str, tmp_path: Path):
    prepare(settings_of(source, "train:300"), tmp_path / "out")
    (tmp_path / "out" / "data.json").write_text('{"schema_version": 1', encoding="utf-8")
    with pytest.raises(SinklabError, match=r"data\.json is damaged.*Delete the folder"):
        TokenDataset(tmp_path / "out")
    with pytest.raises(InputError, match=r"no prepared data.*sinklab data prepare"):
        TokenDataset(tmp_path)


def test_a_manifest_that_cannot_be_read_is_reported(tmp_path: Path):
    (tmp_path / "data.json").symlink_to("/proc/self/mem")  # a file that even root cannot read
    with pytest.raises(SinklabError, match=r"data\.json cannot be read: .*Delete the folder"):
        TokenDataset(tmp_path)


def test_finished_data_is_used_again_and_other_settings_do_not_overwrite_it(source: str, tmp_path: Path):
    out = tmp_path / "out"
    prepare(settings_of(source, "train:300"), out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    prepare(settings_of(source, "train:300"), out)
    with pytest.raises(InputError, match=r"other settings.*choose another --out"):
        prepare(settings_of(source, "train:301"), out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_a_single_document_is_refused(tmp_path: Path):
    source = rows_file(tmp_path / "one.jsonl", ["alone"])
    with pytest.raises(InputError, match="fewer than two documents"):
        prepare(settings_of(source, "train:300"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokenizer", "numbers", "told"),
    [
        ("train:300", {"valid_fraction": 0.0}, "valid_fraction 0.0: Input should be"),
        ("train:300", {"valid_fraction": 2.0}, "valid_fraction 2.0: Input should be"),
        ("train:300", {"text_limit_bytes": 0}, "text_limit_bytes 0: Input should be"),
        ("train:12", {}, "at least 258"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_written(
    source: str, tmp_path: Path, tokenizer: str, numbers: dict, told: str
):
    with pytest.raises(InputError, match=told):
        prepare(settings_of(source, tokenizer, **numbers), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_malformed_rows_end_the_preparation_without_a_valid_result(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"text"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2"):
        prepare(settings_of(str(path), "train:300"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_waiting_process_raises_the_error_of_the_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, out, told = tmp_path / "bad.jsonl", tmp_path / "out", []
    waits, lock = threading.Event(), fcntl.flock
    path.write_text('{"text": "fine"}\n{"text"\n', encoding="utf-8")

    def wait_and_fail() -> None:
        try:
            prepare(settings_of(str(path), "train:300"), out)
        except Exception as error:
            told.append(error)

    waiting = threading.Thread(target=wait_and_fail)

    def locked(file: IO[str], how: int) -> None:
        if threading.current_thread() is waiting and not waits.is_set():
            with pytest.raises(BlockingIOError):  # the first preparation has the lock
                lock(file, how | fcntl.LOCK_NB)
            waits.set()
        lock(file, how)

    def let_it_wait(stage: str, done: int, total: int | None) -> None:
        waiting.start()
        assert waits.wait(30)

    monkeypatch.setattr(fcntl, "flock", locked)
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2") as error:
        prepare(settings_of(str(path), "train:300"), out, progress=let_it_wait)
    waiting.join(30)
    assert [str(other) for other in told] == [str(error.value)]
    assert not out.exists()


def test_prepared_data_is_found_in_the_cache(source: str, tmp_path: Path):
    config = DataConfig(source=source, tokenizer="train:300")
    worked: list[str] = []
    first = prepared(config, tmp_path / "cache")
    second = prepared(config, tmp_path / "cache", progress=lambda stage, done, total: worked.append(stage))
    assert (second.directory, second.fingerprint, worked) == (first.directory, first.fingerprint, [])


def test_settings_that_do_not_change_the_shards_reuse_them(source: str, tmp_path: Path):
    plain = prepared(DataConfig(source=source, tokenizer="train:300"), tmp_path / "cache")
    bos = prepared(DataConfig(source=source, tokenizer="train:300", bos=True, token_budget=9), tmp_path / "cache")
    other = prepared(DataConfig(source=source, tokenizer="train:300", valid_fraction=0.3), tmp_path / "cache")
    assert plain.directory == bos.directory != other.directory


def test_changed_text_is_prepared_again(source: str, tmp_path: Path):
    config = DataConfig(source=source, tokenizer="train:300")
    before = prepared(config, tmp_path / "cache")
    rows_file(Path(source), [*TEXTS, "One more."])
    after = prepared(config, tmp_path / "cache")
    assert after.fingerprint != before.fingerprint
    assert after.manifest.train.documents + after.manifest.valid.documents == len(TEXTS) + 1


def test_the_cache_folder_is_named_by_the_environment(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "mine"))
    data = prepared(DataConfig(source=source, tokenizer="train:300"))
    assert data.directory.is_relative_to(tmp_path / "mine")


def test_a_prepared_directory_is_a_source(source: str, tmp_path: Path):
    made = prepare(settings_of(source, "train:300"), tmp_path / "out")
    data = prepared(DataConfig(source=str(tmp_path / "out")), tmp_path / "cache")
    assert data.fingerprint == made.fingerprint
    assert not (tmp_path / "cache").exists()
    with pytest.raises(InputError, match="already prepared"):
        prepare(settings_of(str(tmp_path / "out"), "train:300"), tmp_path / "again")


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


PREPARE = """
import sys
import threading

from pathlib import Path
from typing import IO
from sinklab.data.loader import DataConfig
from sinklab.data.prepare import prepared
from sinklab.errors import SinklabError
"""


def test_concurrent_preparations_return_the_same_complete_data(source: str, tmp_path: Path):
    ask = (
        PREPARE
        + "print(prepared(DataConfig(source=sys.argv[1], tokenizer='train:300'), Path(sys.argv[2])).fingerprint)"
    )
    asking = [run(ask, source, str(tmp_path / "cache")) for _ in range(3)]
    answers = {process.communicate()[0].strip() for process in asking}
    assert answers == {prepare(settings_of(source, "train:300"), tmp_path / "alone").fingerprint}


def test_a_preparation_after_a_kill_equals_an_undisturbed_one(source: str, tmp_path: Path):
    kill = PREPARE + (
        "import os\n"
        "def die(stage, done, total):\n"
        "    if stage == 'tokens': os.kill(os.getpid(), 9)\n"
        "prepared(DataConfig(source=sys.argv[1], tokenizer='train:300'), Path(sys.argv[2]), progress=die)"
    )
    process = run(kill, source, str(tmp_path / "cache"))
    process.communicate()
    assert process.returncode == -9
    (left,) = (tmp_path / "cache" / "data").iterdir()
    assert (left / "partial" / "train.bin").exists()
    assert not (left / "data.json").exists()
    data = prepared(DataConfig(source=source, tokenizer="train:300"), tmp_path / "cache")
    assert data.directory == left
    assert data.fingerprint == prepare(settings_of(source, "train:300"), tmp_path / "alone").fingerprint
    assert not (left / "partial").exists()


def test_a_full_disk_ends_with_a_sentence_and_no_partial_file(source: str, tmp_path: Path):
    limited = PREPARE + (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    prepared(DataConfig(source=sys.argv[1], tokenizer='train:300'), Path(sys.argv[2]))\n"
        "except SinklabError as error:\n"
        "    print(error.exit_status, error)"
    )
    told = run(limited, source, str(tmp_path / "cache")).communicate()[0]
    assert told.startswith("1 cannot ")
    assert "free some space" in " ".join(told.split())
    assert list((tmp_path / "cache" / "data").iterdir()) == []


def test_a_folder_whose_name_is_too_long_is_named(source: str, tmp_path: Path):
    with pytest.raises(SinklabError, match=r"cannot prepare data in .*: File name too long\. Choose another"):
        prepare(settings_of(source, "train:300"), tmp_path / ("n" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_an_unwritable_cache_is_refused_with_the_variable_that_names_it(mode: int, source: str, tmp_path: Path):
    (tmp_path / "cache").mkdir(mode=mode)
    with pytest.raises(SinklabError, match="SINKLAB_CACHE"):
        prepared(DataConfig(source=source, tokenizer="train:300"), tmp_path / "cache")
