"""Bundle the model's code in one file, for users without sinklab.

The file contains whole modules, each after the modules that it imports, without imports of sinklab modules. Names are
not changed, so two modules must not define the same name; a test checks this.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sinklab


@dataclass(frozen=True)
class _Module:
    """A module of sinklab: dotted name, source, and top-level statements."""

    name: str
    text: str
    body: list[ast.stmt]

    def own_imports(self) -> list[ast.ImportFrom]:
        """Return the top-level `from .. import` statements of sinklab modules."""
        imports = [node for node in self.body if isinstance(node, ast.ImportFrom)]
        return [node for node in imports if (node.module or "").partition(".")[0] == "sinklab"]

    def other_imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Return the other top-level import statements: standard library and other packages."""
        own = self.own_imports()
        return [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom) and node not in own]


@cache
def bundled(root: str) -> str:
    """Return the source of one module that contains `root` and all sinklab modules that it imports, also indirectly.

    Args:
        root: dotted name of a sinklab module, such as sinklab.model.huggingface.

    Raises:
        ValueError: if there is no module `root`; if a module imports a function, class or constant of sinklab under an
            alias (`from .. import x as y`); or if a top-level statement, such as a function, uses `module.x` of a
            bundled module and also has a variable or parameter `x`.
    """
    modules: dict[str, _Module] = {}
    _collect(root, modules)
    known: set[str] = set()
    sections = []
    for module in modules.values():
        sections.append(f"# {module.name}\n\n{_by_itself(module, set(modules), known).strip()}\n")
        known |= {alias.asname or alias.name for node in module.other_imports() for alias in node.names}
    return "\n\n".join(sections)


def _collect(name: str, modules: dict[str, _Module]) -> None:
    """Add the module `name` to `modules`, after the sinklab modules that it imports."""
    if name in modules:
        return
    if (path := _path(name)) is None:
        raise ValueError(f"there is no module {name}")
    text = path.read_text(encoding="utf-8")
    module = _Module(name, text, ast.parse(text).body)
    for node in module.own_imports():
        assert node.module is not None
        for alias in node.names:
            inside = f"{node.module}.{alias.name}"
            if _path(inside) is None and alias.asname:
                raise ValueError(f"{name} imports {alias.name} as {alias.asname}: remove the alias")
            _collect(inside if _path(inside) is not None else node.module, modules)
    modules[name] = module


def _path(name: str) -> Path | None:
    """Return the source file of a module of sinklab; None if there is no such module."""
    place = Path(sinklab.__file__).parent.joinpath(*name.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _by_itself(module: _Module, modules: set[str], known: set[str]) -> str:
    """Return a module's source for the bundle.

    Imports of sinklab modules are removed. Imports of other packages are removed if earlier modules import the same
    names. `module.name` is replaced by `name` if the module is bundled.

    Args:
        modules: dotted names of all bundled modules.
        known: names that earlier modules import from other packages.
    """
    aliases = {
        alias.asname or alias.name
        for node in module.own_imports()
        for alias in node.names
        if f"{node.module}.{alias.name}" in modules
    }
    lines = module.text.encode().splitlines(keepends=True)
    spans = []
    for statement in module.body:
        nodes = list(ast.walk(statement))
        local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                if node.attr in local:
                    raise ValueError(f"{module.name}: {node.attr} is also a local name, in line {node.lineno}")
                spans.append((node.lineno, node.value.col_offset, len(f"{node.value.id}.")))
    for line, start, length in sorted(spans, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + lines[line - 1][start + length :]
    there = [node for node in module.other_imports() if {one.asname or one.name for one in node.names} <= known]
    for node in [*module.own_imports(), *there]:
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[line - 1] = b""
    return b"".join(lines).decode()
