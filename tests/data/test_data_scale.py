"""Text at scale: mixed by weight, encoded fast, limited, estimated; the same bytes after any interruption."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastokens
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinklab.commands.app import app
from sinklab.data import prepare as building
from sinklab.data.corpora import parse, word_tokenizer
from sinklab.data.loader import DataConfig, UniformMix, WeightedMix, paper_weights
from sinklab.data.prepare import prepare, settings_of
from sinklab.data.texts import estimate, mixed, streams
from sinklab.data.tokenizers import load_tokenizer, train_bpe
from sinklab.errors import InputError, SinklabError
from sinklab.train.recipe import build_recipe

FILES = ("train.bin", "valid.bin", "data.json", "tokenizer.json")


def write_rows(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def prose(word: str, documents: int) -> list[str]:
    return [f"{word} {i} " + f"the {word} says it's {i % 17} times " * (1 + i % 5) for i in range(documents)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three domains: a file, a numbered file, a folder."""
    folder = tmp_path / "corpus"
    write_rows(folder / "law.jsonl", prose("law", 400))
    write_rows(folder / "code-00.jsonl", prose("code", 400))
    write_rows(folder / "wiki" / "a.jsonl", prose("wiki", 400))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(prose("law", 50) + prose("wiki", 50), 300, folder)
    return str(folder)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "PART_CHARACTERS", 4096)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


# Encoding

AWKWARD = st.lists(
    st.sampled_from([*"'sdlmt 1=_-<|>\n\t\r\x0b\x1c\x85\xa0\u2003\u3000éèД界²½̸́", "'ll", "   ", "\n\n", "<|endoftext|>"])
    | st.characters(codec="utf-8"),
    max_size=30,
).map("".join)


def tokenizer_json(name: str, data_dir: Path, bpe: str) -> Path:
    folders = {
        "neox": data_dir / "tokenizers" / "gptneox",
        "llama": data_dir / "models" / "TinyStories-656K",
        "trained": Path(bpe),
    }
    return folders[name] / "tokenizer.json"


@pytest.mark.parametrize("name", ["neox", "llama", "trained"])
def test_ids_equal_those_of_the_tokenizers_library(name: str, data_dir: Path, bpe: str):
    tokenizer = load_tokenizer(str(tokenizer_json(name, data_dir, bpe)))
    assert tokenizer.encode_flat.__name__ == "quick"

    @settings(deadline=None, max_examples=300)
    @given(texts=st.lists(AWKWARD, min_size=1, max_size=3))
    def check(texts: list[str]):
        rows = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        assert tokenizer.encode_batch(texts) == [row.ids for row in rows]

    check()
    assert tokenizer.encode_batch([]) == []


def test_the_tokenizers_library_encodes_if_fastokens_cannot():
    request = parse("synthetic:bigram_backcopy:length=32,documents=8")
    assert request is not None
    tokenizer = word_tokenizer(request)
    assert tokenizer.encode_flat.__name__ == "exact"
    words = list(tokenizer.backend.get_vocab())[:3]
    assert tokenizer.encode_batch([" ".join(words), ""]) == [[tokenizer.backend.token_to_id(w) for w in words], []]


def test_fastokens_is_not_used_where_its_ids_differ(bpe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = train_bpe(prose("code", 50), 270, tmp_path).backend.to_str()
    read = fastokens.Tokenizer.from_json_str
    monkeypatch.setattr(fastokens.Tokenizer, "from_json_str", staticmethod(lambda _: read(other)))
    tokenizer = load_tokenizer(bpe)
    assert tokenizer.encode_batch(["the law"]) == [tokenizer.backend.encode("the law").ids]


PEAK = """
import sys
from pathlib import Path
from sinklab.data.prepare import prepare, settings_of
prepare(settings_of(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))
# Not ru_maxrss: a child's begins at what its parent held.
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_does_not_grow_with_the_text(bpe: str, tmp_path: Path):
    def peak_mb(copies: int) -> int:
        text = write_rows(
            tmp_path / f"{copies}.jsonl", [f"{i} {row}" for i in range(copies) for row in prose("law", 2000)]
        )
        arguments = [sys.executable, "-c", PEAK, str(text), bpe, str(tmp_path / f"out-{copies}")]
        return int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)

    assert peak_mb(80) < peak_mb(10) + 16  # 20 MB of text and 2.5


# Mixes


def test_the_papers_weights_are_the_seventeen_of_its_corpus():
    weights = paper_weights()
    assert (len(weights), weights["pile_cc"], weights["philpapers"]) == (17, 0.1121, 0.0027)


def test_each_domain_has_a_share_of_the_tokens_in_proportion_to_its_weight(corpus: Path, bpe: str, tmp_path: Path):
    mix = WeightedMix(weights={"law": 3, "code": 2, "wiki": 1})
    data = prepare(settings_of(str(corpus), bpe, mix=mix, token_limit=20_000), tmp_path / "out")
    shares = data.manifest.shares
    assert shares is not None
    assert sum(share.tokens for share in shares.values()) == 20_000
    for name, weight in mix.weights.items():
        assert shares[name].tokens / 20_000 == pytest.approx(weight / 6, abs=0.03)


def test_a_weighted_mix_ends_with_the_first_exhausted_domain(corpus: Path):
    mix = WeightedMix(weights={"law": 8, "wiki": 1})
    domains = streams(str(corpus), mix)
    names = [name for name, _ in mixed(domains, mix, {"law": 1.0, "wiki": 1.0})]
    assert names.count("law") == 400
    assert 30 <= names.count("wiki") <= 70


def test_a_uniform_mix_has_all_documents_evenly_interleaved(corpus: Path):
    mix = UniformMix()
    domains = streams(str(corpus), mix)
    taken = list(mixed(domains, mix, {domain.name: 1.0 for domain in domains}))
    assert sorted(text for _, text in taken) == sorted(prose("law", 400) + prose("code", 400) + prose("wiki", 400))
    halfway = [name for name, _ in taken[:600]]
    assert all(170 <= halfway.count(domain.name) <= 230 for domain in domains)


def test_the_seed_decides_the_order_of_a_mix(corpus: Path):
    def order(seed: int) -> list[tuple[str, str]]:
        mix = WeightedMix(weights={"law": 1, "code": 1}, seed=seed)
        return list(mixed(streams(str(corpus), mix), mix, {"law": 0.4, "code": 0.4}))

    assert order(1) == order(1) != order(2)


def test_absent_domains_are_named_or_left_out(corpus: Path):
    with pytest.raises(InputError, match=r"no file for 17 of 17 domains: arxiv, dm_mathematics"):
        streams(str(corpus), WeightedMix())
    some = {"law": 1.0, "poems": 2.0}
    with pytest.raises(InputError, match=r"no file for 1 of 2 domains: poems"):
        streams(str(corpus), WeightedMix(weights=some))
    (left,) = streams(str(corpus), WeightedMix(weights=some, absent="renormalise"))
    assert left.name == "law"


def test_a_recipe_without_a_mix_has_no_key_for_it(corpus: Path):
    plain = build_recipe({"data": {"source": str(corpus)}})
    seeded = build_recipe({"data": {"source": str(corpus), "mix": {"kind": "weights", "seed": 1}, "token_limit": 100}})
    assert {"mix", "token_limit"} & plain.data.model_dump().keys() == set()
    assert DataConfig.model_validate_json(seeded.data.model_dump_json()) == seeded.data
    with pytest.raises(InputError, match="stdlib cannot be mixed"):
        build_recipe({"data": {"source": "stdlib", "mix": "files"}})


@pytest.mark.parametrize("mix", [None, UniformMix()])
def test_a_named_column_is_prepared_and_another_column_is_refused_in_the_same_folder(
    tmp_path: Path, mix: UniformMix | None
):
    rows = [{"title": "Law", "body": text} for text in prose("law", 20)]
    (tmp_path / "law.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(settings_of(str(tmp_path), "train:300", mix=mix, column="body"), tmp_path / "body")
    assert data.manifest.text_bytes == sum(len(row["body"].encode()) for row in rows)
    with pytest.raises(InputError, match="contains data prepared with other settings"):
        prepare(settings_of(str(tmp_path), "train:300", mix=mix, column="title"), tmp_path / "body")


# Limits and estimates


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("limit", [5_000, 7_777])
def test_a_limit_on_tokens_is_exact_and_the_last_document_ends_with_eos(
    corpus: Path, bpe: str, tmp_path: Path, limit: int
):
    data = prepare(settings_of(str(corpus), bpe, valid_fraction=0.3, token_limit=limit), tmp_path / "out")
    assert len(data.train) + len(data.valid) == limit
    assert {int(data.train[-1:][0]), int(data.valid[-1:][0])} == {data.eos_id}
    whole = prepare(settings_of(str(corpus), bpe, valid_fraction=0.3), tmp_path / "whole")
    assert np.array_equal(data.train[:-1], whole.train[: len(data.train) - 1])


def test_a_dry_run_writes_nothing_and_is_close_to_the_result(
    corpus: Path, bpe: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    out = tmp_path / "out"
    app(
        ["data", "prepare", str(corpus), "--tokenizer", bpe, "--out", str(out), "--dry-run", "--json"],
        standalone_mode=False,
    )
    told = json.loads(capsys.readouterr().out)
    assert not out.exists()
    data = prepare(settings_of(str(corpus), bpe), out)
    assert told["tokens"] == pytest.approx(len(data.train) + len(data.valid), rel=0.25)
    mix = WeightedMix(weights={"law": 1, "code": 3})
    found = estimate(settings_of(str(corpus), bpe, mix=mix, token_limit=4_000))
    assert [(a.name, a.taken) for a in found.amounts] == [("law", 1000), ("code", 3000)]
    assert (found.tokens, found.shard_bytes) == (4_000, 8_000)


@pytest.mark.parametrize("mix", [WeightedMix(weights={"law": 5, "code": 1}), UniformMix()])
def test_the_estimate_under_a_limit_on_bytes_counts_eos_and_the_rate_of_each_domain(
    mix: WeightedMix | UniformMix, bpe: str, tmp_path: Path
):
    folder = tmp_path / "corpus"
    write_rows(folder / "law.jsonl", [f"the law says it's {i % 9}" for i in range(6_000)])
    write_rows(folder / "code.jsonl", [chr(0x4E00 + i) * 40 for i in range(600)])
    found = estimate(settings_of(str(folder), bpe, mix=mix, text_limit_bytes=100_000))
    data = prepare(settings_of(str(folder), bpe, mix=mix, text_limit_bytes=100_000), tmp_path / "out")
    assert found.tokens == pytest.approx(len(data.train) + len(data.valid), rel=0.05)
    shares = data.manifest.shares or {}
    assert sum(amount.taken or 0 for amount in found.amounts) == found.tokens
    for amount in found.amounts:
        assert amount.taken == pytest.approx(shares[amount.name].tokens, rel=0.2)


def test_the_size_of_a_synthetic_source_is_estimated_without_the_hub():
    source = "synthetic:bigram_backcopy:length=32,documents=8"
    assert estimate(settings_of(source, "words", token_limit=100)).shard_bytes == 200
    assert estimate(settings_of(source, "words")).tokens is None


# Interruptions

PROGRAM = """
import os, signal, sys
from pathlib import Path
from sinklab.data import prepare as building
from sinklab.data.prepare import prepare, settings_of
from sinklab.data.loader import WeightedMix
building.PART_CHARACTERS = 4096
calls = [0]
def counted(tokens):
    calls[0] += 1
    if calls[0] == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
mix = WeightedMix(weights={"law": 2, "code": 1})
prepare(settings_of(sys.argv[1], sys.argv[2], mix=mix), Path(sys.argv[3]), counted=counted)
"""


def killed(corpus: Path, bpe: str, out: Path, after: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, program, corpus, bpe, out, str(after)], check=False)
    assert done.returncode == -9
    assert not (out / "data.json").exists()


@pytest.mark.usefixtures("_small_parts")
def test_a_resumed_preparation_has_the_bytes_of_an_undisturbed_one(corpus: Path, bpe: str, tmp_path: Path):
    mix = WeightedMix(weights={"law": 2, "code": 1})
    prepare(settings_of(str(corpus), bpe, mix=mix), tmp_path / "undisturbed")
    out = tmp_path / "out"
    killed(corpus, bpe, out, after=3, tmp_path=tmp_path)
    before = (out / "partial" / "journal.jsonl").read_bytes()
    assert before.count(b"\n") == 3
    with (out / "partial" / "train.bin").open("ab") as shard:
        shard.write(b"torn")
    with (out / "partial" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"documents": 9')
    calls: list[int] = []
    prepare(settings_of(str(corpus), bpe, mix=mix), out, counted=calls.append)
    assert contents(out) == contents(tmp_path / "undisturbed")
    parts_in_all: list[int] = []
    prepare(settings_of(str(corpus), bpe, mix=mix), tmp_path / "again", counted=parts_in_all.append)
    assert len(calls) == len(parts_in_all) - 3
    assert not (out / "partial").exists()


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("damage", ["bit", "text", "text with the same name and time"])
def test_changes_since_the_interruption_are_noticed(corpus: Path, bpe: str, tmp_path: Path, damage: str):
    out = tmp_path / "out"
    killed(corpus, bpe, out, after=3, tmp_path=tmp_path)
    mix = WeightedMix(weights={"law": 2, "code": 1})
    path = corpus / "law.jsonl"
    if damage == "bit":
        ids = bytearray((out / "partial" / "train.bin").read_bytes())
        ids[-5] ^= 1
        (out / "partial" / "train.bin").write_bytes(ids)
    else:
        before = path.stat()
        path.write_text(path.read_text(encoding="utf-8").replace("law 20 ", "LAW 20 "), encoding="utf-8")
        if damage == "text with the same name and time":
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(settings_of(str(corpus), bpe, mix=mix), out)
    prepare(settings_of(str(corpus), bpe, mix=mix), tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.usefixtures("_small_parts")
def test_an_error_far_into_the_text_keeps_the_finished_parts(
    corpus: Path, bpe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    append = building._GrowingShard.append
    parts: Iterator[int] = iter(range(100))

    def full_disk(self: building._GrowingShard, *arrays: np.ndarray) -> None:
        if next(parts) == 2 * 2:  # of each part, one call for training and one for validation
            raise OSError(28, "No space left on device")
        append(self, *arrays)

    monkeypatch.setattr(building._GrowingShard, "append", full_disk)
    with pytest.raises(SinklabError, match=r"No space left on device.*Finished parts are kept"):
        prepare(settings_of(str(corpus), bpe), out)
    assert (out / "partial" / "journal.jsonl").read_bytes().count(b"\n") == 2
    monkeypatch.setattr(building._GrowingShard, "append", append)
    prepare(settings_of(str(corpus), bpe), out)
    prepare(settings_of(str(corpus), bpe), tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")
