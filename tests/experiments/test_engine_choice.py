"""An engine that is not available is refused with the reason, before anything is submitted."""

import re
import sys
from pathlib import Path

import pytest

from sinklab.commands.options import EngineName
from sinklab.errors import InputError, install_command
from sinklab.experiments.sweep.cluster import RayOptions, SlurmOptions, open_engine, read_options


def test_options_are_read_from_keys_and_values_the_last_of_which_counts() -> None:
    options = read_options(SlurmOptions, "slurm", ["partition=gpu", "gpus=1", "hours=1.5", "gpus=2"])
    assert options == SlurmOptions(partition="gpu", gpus=2, hours=1.5)


@pytest.mark.parametrize("setting", ["nodes=2", "gpus", ""])
def test_an_unknown_engine_option_is_refused_with_the_known_ones(setting: str) -> None:
    with pytest.raises(InputError) as refused:
        read_options(RayOptions, "ray", [setting])
    assert setting in str(refused.value)
    assert str(refused.value).endswith("--engine ray has the options address, cpus, gpus, memory_gb, retries")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("cpus=none", "valid integer"), ("cpus=0", "greater than or equal to 1"), ("hours=0", "0.1"), ("gpus=-1", "0")],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(setting: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"--engine-option {setting}: .*{reason}"):
        read_options(SlurmOptions, "slurm", [setting])


def test_the_engine_of_this_machine_has_no_options(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--engine-option cpus=2: --engine local has no options; set --jobs"):
        open_engine("local", 2, tmp_path, ["cpus=2"])


@pytest.mark.parametrize(("engine", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_engine_that_is_not_installed_names_the_extra(
    engine: EngineName, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=re.escape(install_command("cluster"))):
        open_engine(engine, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_the_error_names_the_missing_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="needs submitit (extra cluster)")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="--engine slurm: sbatch is not on the PATH"):
        open_engine("slurm", 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"])
def test_an_address_without_a_ray_cluster_is_named(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray (extra cluster)")
    with pytest.raises(InputError, match=f"--engine ray: cannot connect to a cluster at {address}"):
        open_engine("ray", 1, tmp_path, [f"address={address}"])
    assert list(tmp_path.iterdir()) == []
