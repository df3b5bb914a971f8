"""The command that installs an extra names its packages, as sinklab itself is on no index."""

import re
import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path

import pytest

from sinklab import errors as extras
from sinklab.errors import install_command

ROOT = Path(extras.__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "install"]
METADATA = """Metadata-Version: 2.4
Name: sinklab
Version: 0.1.0
Requires-Dist: torch>=2.11
Requires-Dist: gguf>=0.19; extra == "gguf"
Requires-Dist: accelerate>=1.10; extra == 'gguf'
Requires-Dist: trl<2,>=1.16; extra == "sft"
"""


@pytest.fixture
def checkout() -> Path:
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("sinklab is not tested from its checkout")
    return ROOT


def test_the_packages_of_an_extra_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "METADATA").write_text(METADATA)
    monkeypatch.setattr(extras, "distribution", lambda name: PathDistribution(tmp_path))
    for extra, needed in {"gguf": ["gguf>=0.19", "accelerate>=1.10"], "sft": ["trl<2,>=1.16"]}.items():
        assert shlex.split(install_command(extra)) == [*PIP, *needed]


def test_if_sinklab_is_not_installed_the_command_installs_its_checkout_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    command, _, where = install_command("gguf").partition(" in the ")
    assert shlex.split(command) == [*PIP, "-e", ".[gguf]"]
    assert where == "checkout of sinklab"


def test_every_extra_named_in_docs_and_code_exists_and_none_is_installed_from_an_index(checkout: Path) -> None:
    known = set(tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = [path for path in checkout.glob("docs/*.md") if path.name != "log.md"]
    text = {path: path.read_text(encoding="utf-8") for path in (checkout / "README.md", *pages)}
    text |= {path: path.read_text(encoding="utf-8") for path in (checkout / "src").rglob("*.py")}
    named = {
        (name, path)
        for path, said in text.items()
        for name in re.findall(r"require_extra\(['\"](\w+)|install -e '\.\[(\w+)\]'|\bextra `(\w+)`", said)
    }
    assert {next(filter(None, names)) for names, _ in named} == known - {"docs"}
    assert [path for path, said in text.items() if re.search(r"install ['\"]?sinklab", said)] == []
