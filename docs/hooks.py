"""Hooks of mkdocs: committed results that pages link to, and pages generated from the code.

Commands come from their help, recipe keys and result files from the JSON schemas of their pydantic models.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./(results/[^)#]+)")
"""A link of a page to a file of results."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and every file of results that a page links to."""
    linked = {
        match for page in Path(config.docs_dir).glob("*.md") for match in OUTSIDE.findall(page.read_text("utf-8"))
    }
    for name in sorted(linked):
        path = ROOT / name
        if path.suffix == ".md":  # a page of results; its own links are files of its folder
            files.append(File.generated(config, name, content=_without_links(path.read_text(encoding="utf-8"))))
        elif path.is_file():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, made in {"commands": commands, "recipes": recipes, "results": results}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=made()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE.sub(r"](\1", markdown)


def _without_links(text: str) -> str:
    return re.sub(r"!?\[([^\]]*)\]\((?!#)[^)]*\)", r"\1", text)


def commands() -> str:
    """Every command with its help, as the terminal prints it."""
    from typer.main import get_command

    from sinklab.commands.app import app

    found = get_command(app)
    lines = ["# Commands", "", "Each section is what `--help` prints.", ""]
    for words in _commands(found, []):
        lines += [f"## sinklab {' '.join(words)}", "", "```text", _help(words), "```", ""]
    return "\n".join(lines)


def _commands(group: Any, words: list[str]) -> Iterable[list[str]]:
    for name, command in group.commands.items():
        yield [*words, name]
        if hasattr(command, "commands"):
            yield from _commands(command, [*words, name])


def _help(words: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "84", "TERM": "dumb", "NO_COLOR": "1"}
    call = [sys.executable, "-m", "sinklab", *words, "--help"]
    text = subprocess.run(call, env=environment, check=True, capture_output=True, text=True).stdout
    return "\n".join(line.rstrip() for line in text.splitlines()).strip().replace("python -m sinklab", "sinklab")


def recipes() -> str:
    """Every key of a recipe: type, default, description; then the JSON schema."""
    from sinklab.train.recipe import Recipe

    return _schema_page(
        "Recipe keys", "`--set KEY=VALUE` sets one; `sinklab interventions` lists those that change the model.", Recipe
    )


def results() -> str:
    """The documents of `reproduce` and `assess`; that of `measure` is explained, number by number, in measuring.md."""
    from sinklab.assessing.assessment import Assessment
    from sinklab.experiments.documents import Summary

    pages = [
        _schema_page("summary.json", "Written by `sinklab reproduce`.", Summary),
        _schema_page("assessment.json", "Written by `sinklab assess`.", Assessment),
    ]
    lead = (
        "`measurement.json` and `measurement.npz` are explained in [Measuring](../measuring.md#what-each-number-means)."
    )
    return "\n".join(["# Result files", "", lead, "", *(re.sub(r"^#", "##", page, flags=re.M) for page in pages)])


def _schema_page(title: str, lead: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    lines = [f"# {title}", "", lead, ""]
    for name, part in {model.__name__: schema, **schema.get("$defs", {})}.items():
        if "properties" not in part:
            continue
        lines += [f"## {name}", "", part.get("description", "").split("\n\n")[0].replace("\n", " "), ""]
        lines += ["| key | type | default | description |", "|---|---|---|---|"]
        for key, field in part["properties"].items():
            cells = (_type(field), _default(field), field.get("description", "").replace("\n", " "))
            lines.append(f"| `{key}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join([*lines, "## JSON schema", "", "```json", json.dumps(schema, indent=1), "```", ""])


def _default(field: dict[str, Any]) -> str:
    return f"`{json.dumps(field['default'])}`" if "default" in field else ""


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[-1]
    for choices in ("anyOf", "oneOf"):
        if choices in field:
            return " or ".join(dict.fromkeys(_type(one) for one in field[choices]))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{one}`" for one in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
