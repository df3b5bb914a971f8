"""Size of the code by top-level folder: files, lines, imports and functions, of one source tree or of two.

    python -m benchmarks.census src
    python -m benchmarks.census BEFORE/src AFTER/src

Lines of code exclude docstrings, comments and blank lines. A private function is counted as used once if its name
occurs in its file only in its definition and in one other place.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """Counts for one file, or sums over files; `shared_names` are files whose name occurs again in the package."""

    files: int = 0
    lines: int = 0
    code: int = 0
    imports: int = 0
    functions: int = 0
    used_once: int = 0
    shared_names: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Size)))

    def cells(self) -> list[str]:
        values = [f"{getattr(self, one.name):,}" for one in fields(Size)]
        return [*values[:5], f"{1000 * self.functions / max(self.code, 1):.0f}", *values[5:]]


HEADINGS = ("files", "lines", "code", "imports", "functions", "per 1000", "private once", "names shared")


def size_of(path: Path) -> Size:
    """Return the counts for one source file, without `shared_names`."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {line for one in tokens if one.type not in NOT_CODE for line in range(one.start[0], one.end[0] + 1)}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or 0) + 1))  # a docstring
    imports = {
        line
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    functions = [node.name for node in nodes if isinstance(node, FUNCTION)]
    names = Counter(one.string for one in tokens if one.type == tokenize.NAME)
    private = [name for name in functions if name.startswith("_") and not name.startswith("__")]
    once = sum(functions.count(name) == 1 and names[name] == 2 for name in private)
    return Size(1, text.count("\n"), len(code), len(imports), len(functions), once)


def census(root: Path) -> dict[str, Size]:
    """Return the counts by top-level folder of the package in or directly below `root`, and finally the total."""
    package = next((one for one in (root, *sorted(root.iterdir())) if (one / "__init__.py").is_file()), root)
    paths = sorted(package.rglob("*.py"))
    names = Counter(path.name for path in paths if path.name != "__init__.py")
    sizes: dict[str, Size] = {}
    for path in paths:
        inside = path.relative_to(package).parts
        folder = f"{inside[0]}/" if len(inside) > 1 else "(top)"
        shared = Size(shared_names=int(names[path.name] > 1))
        sizes[folder] = sizes.get(folder, Size()) + size_of(path) + shared
    return dict(sorted(sizes.items())) | {"total": sum(sizes.values(), Size())}


def show(trees: list[Path]) -> None:
    """Print one table; with two trees, each cell contains both values, such as "10 > 12"."""
    counted = [census(tree) for tree in trees]
    folders = [*sorted({name for one in counted for name in one} - {"total"}), "total"]
    rows = [["", *HEADINGS]]
    for folder in folders:
        cells = [one.get(folder, Size()).cells() for one in counted]
        rows.append([folder, *(" > ".join(values) for values in zip(*cells, strict=True))])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path, help="source directories, for example src")
    show(parser.parse_args().trees)
