"""Every command that the README and the docs show exists, with its options."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import sinklab
from sinklab.commands.app import app
from sinklab.commands.results import UNCHANGED
from sinklab.settings import PANELS

ROOT = Path(sinklab.__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("results/*/README.md"))]
HISTORY = {"log.md", "related_methods.md"}
"""Pages with commands of earlier days."""


def _stand_in(found: re.Match[str]) -> str:
    """`[--option VALUE]` and `..` are left out; STEP is a number."""
    return "1" if found[0] == "STEP" else ""


def commands(group: Any = None, words: str = "sinklab") -> dict[str, Any]:
    """Every command by the words that call it."""
    found = {}
    commands_of: Any = group or get_command(app)
    for name, command in commands_of.commands.items():
        found |= commands(command, f"{words} {name}") if hasattr(command, "commands") else {f"{words} {name}": command}
    return found


def examples(command: Any) -> list[str]:
    """The calls that a command's help has as examples."""
    return re.findall(r"^Example: sinklab (.+)$", command.help, re.MULTILINE)


def shown() -> list[tuple[str, str]]:
    """(page, command) of every line of a code block that calls sinklab, continued lines joined, and of every help."""
    found = [(f"{words} --help", example) for words, command in commands().items() for example in examples(command)]
    for page in PAGES:
        if page.name in HISTORY:
            continue
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
        fenced = [block for language, block in fences if language in ("", "bash", "sh", "text", "console")]
        blocks = [*fenced, *re.findall(r"^(?: {4}.*\n)+", text, re.M)]
        for line in "".join(blocks).splitlines():
            if called := re.match(r"\s*(?:\w+=\S+ )*(?:\S*/)?(?:(?:python|torchrun .+?) -m )?sinklab (.+)", line):
                found.append((str(page.relative_to(ROOT)), called[1]))
    return found


@pytest.mark.parametrize(("page", "command"), shown())
def test_every_command_shown_in_the_docs_is_valid(page: str, command: str) -> None:
    written_out = re.sub(r"\[--[^\]]*\](\.\.\.)?| \.\.+(?= |$)|\bSTEP\b", _stand_in, command)
    words = shlex.split(written_out, comments=True)
    if any(">" in word or word == "|" for word in words):
        words = words[: next(place for place, word in enumerate(words) if ">" in word or word == "|")]
    command_of: Any = get_command(app)
    name = "sinklab"
    try:
        while hasattr(command_of, "resolve_command"):
            context = command_of.make_context(name, list(words), resilient_parsing=True)
            name, command_of, words = command_of.resolve_command(context, words)
        command_of.make_context(name, words)
    except Exception as wrong:  # of the click that typer brings along
        if type(wrong).__name__ != "Exit":  # --help
            pytest.fail(f"{page}: {getattr(wrong, 'format_message', wrong.__str__)()}")


@pytest.mark.parametrize(("words", "command"), commands().items(), ids=commands())
def test_the_help_of_every_command_has_an_example_and_panels(words: str, command: Any) -> None:
    assert all(example.startswith(words.removeprefix("sinklab ")) for example in examples(command))
    assert examples(command)
    options = [one for one in command.params if one.param_type_name == "option"]
    assert [one.name for one in options if one.rich_help_panel not in PANELS] == []


@pytest.mark.parametrize("words", ["", *(words.removeprefix("sinklab ") for words in commands())])
def test_help_fits_two_screens_and_shows_no_python_types(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown_help = CliRunner().invoke(app, [*words.split(), "--help"]).output
    assert "--help" in shown_help
    assert len(shown_help.splitlines()) <= 100
    assert re.findall(r"<\w+|\{\w+", shown_help) == []


def test_commands_are_found() -> None:
    assert len(shown()) > 50


def test_the_readme_is_short() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.split()) <= 650
    assert all(len(table.splitlines()) <= 12 for table in re.findall(r"(?:^\|.*\n)+", text, re.M))


@pytest.mark.parametrize(("recipe", "folder"), [("tiny", "archive/tiny"), ("laptop", "laptop")])
def test_the_numbers_at_the_end_of_training_are_those_of_the_results(recipe: str, folder: str) -> None:
    summary = json.loads((ROOT / "results" / folder / "summary.json").read_text(encoding="utf-8"))
    seeds = {name: summary["cells"]["softmax"]["values"][name]["seeds"] for name in ("valid_loss", "sink_1")}
    loss, rate = ([min(values), max(values)] for values in seeds.values())
    expected = (
        f"loss {loss[0]:.2f} to {loss[1]:.2f}, Sink_1 {rate[0]:.0f} to {rate[1]:.0f} % ({len(seeds['sink_1'])} seeds)"
    )
    assert expected == UNCHANGED[recipe]
