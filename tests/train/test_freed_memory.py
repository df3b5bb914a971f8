"""A training process reuses freed memory: a step requests none from the system."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
from sinklab.device import keep_freed_memory
import torch

torch.set_num_threads(1)
if {kept}:
    keep_freed_memory()

def step():  # two blocks of 8 MB, as the logits of a small model
    logits = torch.ones(2048, 1024)
    return float((logits * 2)[0, 0])

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kept: bool, **environment: str) -> int:
    """Pages that the system cleared in ten steps, in a fresh process."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", FAULTS.format(kept=kept)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain | environment)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_a_step_allocates_no_new_pages():
    assert 20 * faults(kept=True) < faults(kept=False, MALLOC_MMAP_THRESHOLD_="65536")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_allocator_settings_of_the_user_are_kept():
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    assert 2 * faults(kept=True, **given_back) > faults(kept=False, **given_back)
