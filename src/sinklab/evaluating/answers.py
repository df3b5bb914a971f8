"""Answers of a model, each kept as soon as it is there: whoever goes on asks for the others only."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.files import append_line, parse_json, write_text

ModelAnswer = tuple[float, bool] | float | str
"""A log-likelihood with whether it is what the model would say by itself, one alone, or a text."""


class Answers:
    """The answers to requests, by what was asked; a file of a line each, the first of which says whose they are.

    Args:
        path: of the file; None keeps them in memory alone.
        whose: everything that decides an answer beside the request.

    Raises:
        InputError: the file has answers of another model, or of the same with other settings.
        SinklabError: it cannot be written.
    """

    def __init__(self, path: Path | None, whose: Mapping[str, str | None]) -> None:
        self._path, self._known = path, dict[str, ModelAnswer]()
        if path is None:
            return
        lines = _whole_lines(path)
        if lines and lines[0] != whose:
            raise InputError(
                f"{path} holds the answers of another model, or of this one with other settings: choose another --out, "
                "repeat the call that made it, or delete the file"
            )
        for line in lines[1:]:
            answer = line["answer"]
            self._known[str(line["request"])] = (answer[0], answer[1]) if isinstance(answer, list) else answer
        write_text(
            path, "".join(f"{json.dumps(line)}\n" for line in lines or [dict(whose)])
        )  # without a torn last line

    def get(self, request: str) -> ModelAnswer | None:
        """The answer to a request by its `name_of`, None where it was not asked yet."""
        return self._known.get(request)

    def add(self, answered: Iterable[tuple[str, ModelAnswer]]) -> None:
        """Keep answers.

        Raises:
            SinklabError: the file cannot be written.
        """
        new = dict(answered)
        self._known |= new
        if self._path is not None and new:
            lines = (json.dumps({"request": name, "answer": answer}) for name, answer in new.items())
            append_line(self._path, "\n".join(lines))

    def forget(self) -> None:
        """Remove the file: the answers stand elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def name_of(kind: str, arguments: Iterable[object]) -> str:
    """A SHA-256 of a request: what is to be done, and with what."""
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True).encode()).hexdigest()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines up to the first torn one; those of a file that we did not write are refused."""
    found: list[dict[str, Any]] = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = parse_json(line)
        except ValueError:
            break
        found.append(row)
    if found and not ("model" in found[0] and all({"request", "answer"} <= row.keys() for row in found[1:])):
        raise InputError(f"{path} was not written by sinklab, so it stays as it is: choose another --out")
    return found
