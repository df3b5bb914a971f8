"""The command that installs an extra works where it is read: in a checkout, of a wheel, of a wheel that is gone."""

import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from sinklab import extras
from sinklab.extras import install_command

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


def installed(folder: Path, **direct_url: object) -> PathDistribution:
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    if direct_url:
        (folder / "direct_url.json").write_text(json.dumps(direct_url))
    return PathDistribution(folder)


def test_of_a_checkout_the_checkout_is_named(tmp_path: Path) -> None:
    place = tmp_path / "my checkout"
    place.mkdir()
    found = installed(tmp_path / "info", url=place.as_uri(), dir_info={"editable": True})
    assert shlex.split(install_command("gguf", found)) == [*PIP, "-e", f"{place}[gguf]"]


def test_of_a_wheel_the_packages_are_named(tmp_path: Path) -> None:
    packages = {"gguf": ["gguf>=0.19", "accelerate>=1.10"], "sft": ["trl<2,>=1.16"]}
    wheel = {"url": "file:///tmp/sinklab-0.1.0-py3-none-any.whl", "archive_info": {}}
    folder = {"url": (tmp_path / "gone").as_uri(), "dir_info": {"editable": True}}
    source = {"url": "https://example.org/sinklab.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}
    for number, place in enumerate(({}, wheel, folder, source)):
        found = installed(tmp_path / f"info{number}", **place)
        for extra, needed in packages.items():
            assert shlex.split(install_command(extra, found)) == [*PIP, *needed]


def test_every_extra_that_is_named_exists_and_no_index_is_promised(checkout: Path) -> None:
    known = set(tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = [path for path in checkout.glob("docs/*.md") if path.name != "log.md"]
    text = {path: path.read_text(encoding="utf-8") for path in (checkout / "README.md", *pages)}
    text |= {path: path.read_text(encoding="utf-8") for path in (checkout / "src").rglob("*.py")}
    named = {
        (name, path)
        for path, said in text.items()
        for name in re.findall(r"install_command\(['\"](\w+)|install -e '\.\[(\w+)\]'|\bextra `(\w+)`", said)
    }
    assert {next(filter(None, names)) for names, _ in named} == known - {"docs"}
    assert [path for path, said in text.items() if re.search(r"install ['\"]?sinklab", said)] == []
