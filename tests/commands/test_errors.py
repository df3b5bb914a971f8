"""Errors of other libraries as one line; full disks and exhausted memory are recognised."""

import errno
import os
from pathlib import Path

import pytest

from sinklab.errors import SinklabError, cause, is_out_of_memory
from sinklab.files import append_line, is_full


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("one\ntwo", "one"),
        ("Error(s) in loading state_dict for Llama:\n\tsize mismatch for head:\n  (3,) and (4,)\nmore", None),
        ("\n  it failed:\n\n   no such file  \nhint", "it failed: no such file"),
        ("ends with a colon:", "ends with a colon:"),
        ("", "ValueError"),
    ],
)
def test_a_cause_is_not_cut_where_its_line_ends_with_a_colon(said: str, line: str | None) -> None:
    long = "Error(s) in loading state_dict for Llama: size mismatch for head: (3,) and (4,)"
    assert cause(ValueError(said)) == (line or long)


def test_an_error_asks_to_free_space_only_if_the_disk_is_full(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wrapped = SinklabError("process 0: it broke")
    wrapped.__cause__ = full
    assert is_full(full)
    assert is_full(wrapped)
    assert is_full(SinklabError(f"process 1: {full}"))
    assert not is_full(OSError(errno.EACCES, os.strerror(errno.EACCES)))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(SinklabError, match="Is a directory") as error:
        append_line(tmp_path / "metrics.jsonl", "{}")
    assert "ree some space" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (OSError("not enough memory"), False),
    ],
)
def test_out_of_memory_errors_of_allocators_are_recognised(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it
