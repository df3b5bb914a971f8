"""The built package works outside the checkout, and the files of a release agree with each other."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import sinklab

ROOT = Path(sinklab.__file__).parents[2]
BUILD = "import sys, setuptools.build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"

IN_ONE_PROCESS = """
import json, sys
import sinklab
from sinklab.commands import app
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["sinklab", *arguments]
    try:
        app.main()
    except SystemExit as end:
        assert not end.code, arguments
print(sinklab.__file__)
"""


@pytest.fixture(scope="module")
def checkout() -> Path:
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("sinklab is not tested from its checkout")
    return ROOT


def built(kind: str, source: Path, out: Path) -> Path:
    """The file that the build backend makes of `source`: `build_sdist` or `build_wheel`."""
    made = subprocess.run(
        [sys.executable, "-c", BUILD, kind, out], cwd=source, check=True, capture_output=True, text=True
    )
    return out / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of a copy of the checkout: building in the checkout itself would leave files in it."""
    folder = tmp_path_factory.mktemp("release")
    copy = folder / "copy"
    shutil.copytree(checkout / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, copy)
    with tarfile.open(built("build_sdist", copy, folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return built("build_wheel", unpacked, folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, whose dependencies are those of this environment."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return place / "bin"


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path, checkout: Path) -> None:
    source = checkout / "src"
    there = {
        path.relative_to(source).as_posix()
        for path in (source / "sinklab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == there
    assert "sinklab/py.typed" in packed


def test_the_wheel_trains_measures_and_reports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"SINKLAB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [installed / arguments[0], *arguments[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("sinklab", "--version") == f"sinklab {sinklab.__version__}\n"
    text = " ".join(f"the {number} of them is {number * number % 97}." for number in range(4000))
    (tmp_path / "text.txt").write_text(text)
    small = {
        "data.source": "text.txt", "data.tokenizer": "train:300", "model.layers": 1, "model.width": 16,
        "model.heads": 1, "model.ffn_width": 16, "model.context": 16, "train.steps": 2, "train.batch_size": 2,
        "train.eval_every": 2, "train.eval_sequences": 4, "train.precision": "fp32", "metric.length": 16,
        "metric.sequences": 4,
    }  # fmt: skip
    changes = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    commands = [
        ["experiments", "table_4"],  # shipped experiments
        ["train", "tiny", *changes, "--out", "run"],  # a shipped recipe
        ["measure", "run", "--inputs", "random", "--sequences", "2", "--length", "16", "--out", "measured"],
        ["report", "run", "--out", "page.html"],  # templates
    ]
    where = run("python", "-c", IN_ONE_PROCESS, json.dumps(commands)).splitlines()[-1]
    assert Path(where).is_relative_to(installed.parent)
    assert json.loads((tmp_path / "measured/measurement.json").read_text())["sequences"] == 2
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_version_is_stated_once_and_has_its_notes(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    notes = (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = yaml.safe_load((checkout / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[(\d\S*)\] - (\S+)$", notes, re.M)
    assert released[0] == (sinklab.__version__, str(cited["date-released"]))
    assert cited["version"] == sinklab.__version__
