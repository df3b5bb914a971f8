"""The commands that the README, the docs and the help show are run, in the order of their page, with real text and a
real model. The tables say with which words and options they run here, and which of them do not run."""

import re
import shlex
import shutil
from glob import glob
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from test_docs import ROOT, shown

INSTEAD = {
    "streaming,quantisation,..": "streaming,quantisation",
    "--parts ..": "--parts streaming",
    "A --model B ..": "A --model B",
    "table_7 --model MODEL": "table_7 --model runs/learned_positions",
    "FOLDER --by-checkpoint": "runs/k --by-checkpoint",
    "RECIPE ... --out": "RECIPE --set KEY=VALUE --out",
    "model.init_from=MODEL": "model.init_from=TinyStories-656K",
    "data.source=FILE": "data.source=stories.txt",
    "MODEL": "TinyStories-656K",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "TinyStories-656K",
    "BASE": "runs/k",
    "CHAT": "runs/tiny-0",
    "A": "runs/k",
    "B": "runs/tiny-0",
    "RUN": "runs/k",
    "RECIPE": "tiny",
    "KEY=VALUE": "model.gate=head",
    "STEP": "1",
    "FILE": "stories.txt",
    "FOLDER": "domains",
    "DIR": "made",
    "12.3": "2.3",
    "--lengths 512,1024": "--lengths 8,16",
    "train.steps=500": "train.steps=2",
    "train.steps=1500": "train.steps=2",
    "train.steps=6000": "train.steps=3",
    "runs/tiny-HASH": "runs/k",
    "report runs/lab": "report runs/k",
    "mine.yaml": "mine.yaml --out runs/mine",  # a pack of runs/tiny lacks sweeps on another text
    "train laptop": "train tiny",
    "runs/laptop": "runs/tiny",
}
"""Arguments in the docs, and those with which they are run here."""

ADDED = {
    "measure": "--sequences 4 --length 32",
    "compare": "--sequences 4 --length 32",
    "assess": "--sequences 2 --length 32 --stream-length 64",
    "advise": "--quick --sequences 2 --length 32 --stream-length 64",
    "lab": "--steps 2",
    "train": "--set train.eval_sequences=8 --set metric.sequences=4",
    "reproduce": "--seeds 1",
}
"""Options that make a command last seconds."""

NOT_RUN = {
    "eval ": "needs the extra eval: tests/evaluating",
    "reproduce figure_10 ": "needs the extra eval: tests/evaluating",
    "sft ": "needs the extra sft: tests/tuning",
    "reproduce figure_30 ": "needs the extra sft: tests/experiments/test_sweep_tuned.py",
    "train RECIPE --track ": "needs the extra track: tests/train/test_track.py",
    "measure EleutherAI/": "needs the network",
    "train 1b --dry-run": "needs several processes: tests/train",
    "data prepare hf:": "needs the network",
    "train 60m --set ": "days, and a corpus from the network",
    "parity ": "needs a server: tests/assessing/test_parity.py",
    "reproduce laptop_mitigations --packed ": "five core-hours: tests/experiments",
    "reproduce all": "hundreds of runs, two of them on a cluster: tests/experiments",
    "reproduce table_2 --scale 60m": "needs GPUs",
}
"""Beginnings of commands that are not run, and why not."""

SLOW = (
    *("reproduce table", "reproduce figure", "reproduce poly", "reproduce mine"),
    *("reproduce main_results", "reproduce laptop_decay"),
    *("verify", "report runs/laptop", "experiments"),
    *("lab", "assess MODEL --text FILE --out"),
)
"""Beginnings of commands that take longer than some seconds; the examples of the help count as such, too."""


def with_options() -> list[tuple[str, str]]:
    """The command of howto_measure.md with each of the options in its table."""
    page = "docs/howto_measure.md"
    (command,) = (command for where, command in shown() if where == page)
    rows = re.findall(r"^\|.+\|(.+)\|$", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return [(page, f"{command} {option}") for row in rows for option in re.findall(r"`(--[^`]+)`", row)]


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def run_here() -> dict[str, list[str]]:
    """The commands that are run, by page; those of the help are a page."""
    pages: dict[str, list[str]] = {}
    for page, command in [*shown(), *with_options()]:
        if is_run(command):
            pages.setdefault("help" if "--help" in page else page, []).append(command)
    return pages


def words(command: str) -> list[str]:
    """The arguments with which a command runs here."""
    text = re.sub(r"\[(--[^\]]*)\](\.\.\.)?", r" \1 ", command)
    for one, other in INSTEAD.items():
        text = re.sub(rf"(?<!\S){re.escape(one)}(?!\S)", other, text)
    found = shlex.split(text, comments=True)
    added = ADDED.get(found[0], "")
    if found[0] == "reproduce" and "--model" not in found:
        added += " --steps 2"
    if found[0] == "train" and "train.steps" not in text:
        added += " --set train.steps=2"
    return [*found, *shlex.split(added)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text and two runs, once for all pages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def desk(run: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Run:
    """`sinklab ARGS` in a folder with the files that the pages name."""
    monkeypatch.setenv("SINKLAB_CACHE", str(cache))
    (tmp_path / "TinyStories-656K").symlink_to(data_dir / "models" / "TinyStories-656K")
    (tmp_path / "domains").mkdir()
    for name in ("tinystories.jsonl", "europarl.jsonl"):
        (tmp_path / "domains" / name).symlink_to(data_dir / "domains" / name)
    shutil.copy(data_dir / "domains" / "tinystories.jsonl", tmp_path / "stories.txt")
    (tmp_path / "corpus.jsonl").symlink_to(data_dir / "domains" / "ubuntu_irc.jsonl")
    conversations = (data_dir / "chat" / "messages.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    (tmp_path / "chats.jsonl").write_text("\n".join(conversations), encoding="utf-8")
    experiment = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/howto_experiment.md").read_text("utf-8"), re.S)[0]
    for name in ("gates.yaml", "mine.yaml"):
        (tmp_path / name).write_text(experiment.replace("base: laptop", "base: tiny"), encoding="utf-8")
    trained = cache / "runs"
    for name in () if trained.exists() else ("k", "tiny-0"):
        called(run, ["train", "tiny", *shlex.split(ADDED["train"]), "--set", "train.steps=2", "--out", trained / name])
    shutil.copytree(trained, tmp_path / "runs")
    return run


def called(run: Run, arguments: list[Any]) -> None:
    """Run a command with expanded file patterns; before every command except `train`, the folder `made` is removed."""
    if arguments[0] != "train":
        shutil.rmtree("made", ignore_errors=True)
    expanded = [path for one in map(str, arguments) for path in (sorted(glob(one)) if "*" in one else [one])]
    status, _, said = run(*expanded)
    assert status == 0, f"sinklab {shlex.join(expanded)}: {said}"


def is_slow(page: str, command: str) -> bool:
    if page == "docs/tutorial.md" and command == "lab":  # the page's later commands read its runs
        return False
    return page == "help" or command.startswith(SLOW)


def pages_with(slow: bool) -> list[str]:
    return [page for page, all_of in run_here().items() if any(is_slow(page, one) == slow for one in all_of)]


@pytest.mark.parametrize("page", pages_with(slow=False))
def test_the_commands_of_a_page_run(page: str, desk: Run) -> None:
    for command in run_here()[page]:
        if not is_slow(page, command):
            called(desk, words(command))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(slow=True))
def test_the_slow_commands_of_a_page_run(page: str, desk: Run) -> None:
    called(desk, words("reproduce gates.yaml --jobs 2"))  # a sweep in runs/tiny, where the pages have one
    if page == "docs/measuring.md":
        called(desk, words("train tiny --set model.position=learnable --out runs/learned_positions"))
    if page == "docs/experiments.md":
        for seed, step in product(range(1, 6), (1000, 16000, 143000)):
            shutil.copytree("TinyStories-656K", f"seed{seed}/step{step}")
    if page == "help":
        called(desk, words("report runs/tiny --pack results/laptop"))
    for command in run_here()[page]:
        called(desk, words(command))


def test_the_snippet_of_the_readme_runs(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    model = data_dir / "models" / "TinyStories-656K"
    exec(snippet.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model)), {})
    assert "Sink₁" in capsys.readouterr().out


def test_every_exception_matches_a_command_that_the_docs_show() -> None:
    everything = [command for _, command in [*shown(), *with_options()]]
    assert [one for one in (*NOT_RUN, *SLOW) if not any(command.startswith(one) for command in everything)] == []
