"""Hooks of mkdocs: committed results that pages link to, and pages generated from the code.

Commands come from their options, recipe keys and result files from the JSON schemas of their pydantic models.
"""

import json
import re
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./(results/[^)#]+)")
"""A link of a page to a file of results."""

Part = dict[str, Any]
"""A part of a JSON schema."""


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
    """Every command: its help, arguments and options."""
    from typer.main import get_command

    from sinklab.commands.app import app

    lines = ["# Commands", "", "`sinklab COMMAND --help` prints the same.", ""]
    for words, command in _commands(get_command(app), ["sinklab"]):
        lines += [f"## {' '.join(words)}", "", *_paragraphs(command.help)]
        panels: dict[str, list[str]] = {}
        for option in command.params:
            panel = getattr(option, "rich_help_panel", None) or "Arguments"
            panels.setdefault(panel, []).append(_option(option))
        for panel, rows in panels.items():
            lines += [f"| {panel} | | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(group: Any, words: list[str]) -> Iterable[tuple[list[str], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, [*words, name])
        else:
            yield [*words, name], command


def _paragraphs(text: str) -> Iterable[str]:
    """The paragraphs of a help, with all its examples in one block after the first."""
    first, *others = text.split("\n\n")
    examples = [one.partition(": ")[2] for one in others if one.startswith("Example: ")]
    yield from (first, "", "```bash", *examples, "```", "")
    for paragraph in others:
        if not paragraph.startswith("Example: "):
            yield from (re.sub(r"(?<!\S)(--[\w-]+|DIR/\w+|torchrun .+)", r"`\1`", paragraph), "")


def _option(option: Any) -> str:
    """A row of a table: option with its value, help, default."""
    name = f"{option.opts[0]} {option.metavar or ''}" if option.opts[0].startswith("-") else option.metavar
    required = " Required." if option.required and name.startswith("-") else ""
    default = "" if option.default in (None, False, ()) else f"`{getattr(option.default, 'value', option.default)}`"
    return f"| `{name.strip()}` | {_cell(option.help or '')}{required} | {default} |"


def recipes() -> str:
    """Every key of a recipe: type, default, description; then the JSON schema."""
    from sinklab.train.recipe import Recipe

    lead = (
        "A recipe fully specifies a run. `--set KEY=VALUE` sets a key, such as `--set train.steps=500`; a choice among "
        "kinds is set by its name, `--set model.attention.operation=sigmoid`. `sinklab interventions` lists the keys "
        "that change the model, [Interventions](../interventions.md) has their formulas."
    )
    return "\n".join(["# Recipe keys", "", lead, "", *_schema(Recipe, "Top level")])


def results() -> str:
    """The documents of `reproduce` and `assess`; that of `measure` is explained, number by number, in measuring.md."""
    from sinklab.assessing.assess_model import Assessment
    from sinklab.experiments.documents import Summary

    lead = "`measurement.json` and `measurement.npz` are explained in [Measuring](../measuring.md#reported-numbers)."
    summary = _schema(Summary, "summary.json", "Written by `sinklab reproduce`.")
    assessment = _schema(Assessment, "assessment.json", "Written by `sinklab assess`.")
    return "\n".join(["# Result files", "", lead, "", *summary, *assessment])


def _schema(model: type[BaseModel], title: str, lead: str = "") -> list[str]:
    """A table for every part of the model, parts after what contains them, and the JSON schema."""
    schema = model.model_json_schema()
    lines = [f"## {title}", "", lead, "", *_table(schema, schema)]
    for name, (path, kind) in _parts(schema).items():
        part = schema["$defs"][name]
        about = part.get("description", "").split("\n\n")[0].replace("\n", " ")
        heading = f"### {path}" if kind is None else f"### {path}: {kind}"
        lines += [f"{heading} {{ #{name} }}", "", about, "", *_table(part, schema)]
    shown = json.dumps(schema, indent=1).replace("\n", "\n    ")
    return [*lines, '??? note "JSON schema"', "", "    ```json", f"    {shown}", "    ```", ""]


def _parts(schema: Part) -> dict[str, tuple[str, str | None]]:
    """The shortest path of every part within the whole, and its kind where there is a choice of kinds; by path."""
    paths: dict[str, str] = {}
    level = [("", schema)]
    while level:
        found = {}
        for path, part in level:
            for key, field in part.get("properties", {}).items():
                for name in _references(field):
                    if name not in paths:
                        found[name] = min(found.get(name, "~"), f"{path}{key}")
        paths |= found
        level = [(f"{path}.", schema["$defs"][name]) for name, path in found.items()]
    return {name: (path, _kind(schema["$defs"][name])) for name, path in sorted(paths.items(), key=itemgetter(1))}


def _references(field: Part) -> list[str]:
    """Names of the parts that a value of the field may be."""
    inner = [field.get("items"), field.get("additionalProperties"), *field.get("anyOf", ()), *field.get("oneOf", ())]
    nested = [name for one in inner if isinstance(one, dict) for name in _references(one)]
    return [field["$ref"].rsplit("/", 1)[-1], *nested] if "$ref" in field else nested


def _kind(part: Part) -> str | None:
    """The value of `kind` or `name` that chooses a part."""
    return next((part["properties"][key].get("const") for key in ("kind", "name") if key in part["properties"]), None)


def _table(part: Part, schema: Part) -> list[str]:
    said = _attributes(part.get("description", ""))
    rows = []
    for key, field in part["properties"].items():
        if "const" not in field or key not in ("kind", "name"):
            description = field.get("description") or said.get(key, "")
            cells = (_type(field, schema), _default(field), _cell(description))
            rows.append(f"| `{key}` | " + " | ".join(cells) + " |")
    return ["| key | type | default | description |", "|---|---|---|---|", *rows, ""] if rows else []


def _attributes(docstring: str) -> dict[str, str]:
    """The descriptions below `Attributes:`, by name."""
    section = docstring.partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: Part) -> str:
    default = field.get("default")
    if isinstance(default, dict):
        default = default.get("kind", default.get("name"))
    elif "default" in field:
        return f"`{json.dumps(default)}`"
    return f"`{default}`" if default else ""


def _type(field: Part, schema: Part) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{_kind(schema['$defs'][name]) or 'keys'}](#{name})"
    for choices in ("anyOf", "oneOf"):
        if choices in field:
            return " or ".join(dict.fromkeys(_type(one, schema) for one in field[choices]))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{one}`" for one in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), schema)}"
    if isinstance(values := field.get("additionalProperties"), dict):
        return f"{{name: {_type(values, schema)}}}"
    signs = {"minimum": "≥", "exclusiveMinimum": "\\>", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return " ".join([str(field.get("type", "any")), ", ".join(bounds)]).strip()
