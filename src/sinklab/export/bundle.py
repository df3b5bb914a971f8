"""Bundle the model's code in one file, for users without sinklab.

The modules are concatenated in import order, without imports of each other. Names are not mangled: bundling fails if a
name would have two meanings in the one file.
"""

import ast
import builtins
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "sinklab"


@dataclass(frozen=True)
class _Module:
    """A module of sinklab: full name, source, and top-level statements."""

    name: str
    text: str
    body: list[ast.stmt]

    def own_imports(self) -> list[ast.ImportFrom]:
        """Return the statements that import from other modules of sinklab."""
        imports = [node for node in self.body if isinstance(node, ast.ImportFrom)]
        return [node for node in imports if (node.module or "").partition(".")[0] == PACKAGE]

    def other_imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Return the statements that import from other libraries."""
        own = self.own_imports()
        return [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom) and node not in own]


@cache
def bundled(root: str) -> str:
    """Return the source of one module that contains `root` and all sinklab modules that it imports.

    Args:
        root: full name of a sinklab module, such as sinklab.model.huggingface.

    Raises:
        ValueError: if a module does not exist or cannot be bundled: it binds a name that another module binds to a
            different object, the name of a built-in, or an imported object under another name, or uses an attribute of
            a module whose name is also a local variable.
    """
    modules: dict[str, _Module] = {}
    _collect(root, modules)
    meanings: dict[str, str] = {}
    sections = []
    for module in modules.values():
        text = _by_itself(module, set(modules), known=set(meanings))
        for name, meaning in _bound(module, set(modules)):
            if hasattr(builtins, name):
                raise ValueError(f"{meaning} shadows a built-in, which other modules may use")
            if meanings.setdefault(name, meaning) != meaning:
                raise ValueError(f"{name} is both {meanings[name]} and {meaning}: names must be unique in one file")
        sections.append(f"# {module.name}\n\n{text.strip()}\n")
    return "\n\n".join(sections)


def _collect(name: str, modules: dict[str, _Module]) -> None:
    """Add the module `name` to `modules`, after the modules that it imports."""
    if name in modules:
        return
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {name}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    module = _Module(name, text, ast.parse(text).body)
    for node in module.own_imports():
        assert node.module is not None
        for alias in node.names:
            inside = f"{node.module}.{alias.name}"
            _collect(inside if _is_module(inside) else node.module, modules)
    modules[name] = module


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return False


def _bound(module: _Module, modules: set[str]) -> list[tuple[str, str]]:
    """List the names bound at a module's top level, with the full names of their objects."""
    found = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append((node.name, f"{module.name}.{node.name}"))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            found += [(name, f"{module.name}.{name}") for name in names]
    for node in module.other_imports():
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        found += [(alias.asname or alias.name, f"{origin}{alias.name}") for alias in node.names]
    for node in module.own_imports():
        for alias in node.names:
            if f"{node.module}.{alias.name}" not in modules and alias.asname:
                raise ValueError(f"{module.name} imports {alias.name} as {alias.asname}: remove the alias")
    return found


def _by_itself(module: _Module, modules: set[str], known: set[str]) -> str:
    """Return a module's source without its imports of earlier modules, with `name` in place of `other_module.name`.

    Args:
        known: names bound by earlier modules.
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
