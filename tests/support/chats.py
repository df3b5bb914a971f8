"""Conversations about sheep, and briefly trained models to be tuned on them."""

import json
from pathlib import Path
from typing import Any

from trained_run import trained_run

import sinklab
from sinklab.export.directory import export_run

sinklab.register()  # the Auto classes of transformers know exported runs

MARKED = (
    "{% for m in messages %}<|{{ m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""A chat template in which the assistant's text ends with </s>, before a line break outside it."""


def sheep_chats(path: Path, conversations: int = 40, turns: int = 1) -> Path:
    """A .jsonl file in which the assistant answers with one of three similar texts."""
    rows = [
        {
            "messages": [
                {"role": role, "content": said}
                for turn in range(turns)
                for role, said in (("user", f"{i} {turn}"), ("assistant", f"sheep jumps {i % 3} fence"))
            ]
        }
        for i in range(conversations)
    ]
    return write_chats(path, rows)


def write_chats(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tuned_run(folder: Path, operation: str = "softmax", bos: bool = True) -> tuple[Path, Path]:
    """A run directory, and conversations that fit its context."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"attention": {"operation": {"kind": operation}}, "context": 48}
    run, _ = trained_run(folder, {"bos": bos}, model)
    return run, sheep_chats(folder / "chats.jsonl")


def exported(folder: Path, run: Path) -> Path:
    return export_run(run, folder / "exported").directory
