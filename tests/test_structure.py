"""The layers of the code: which module may import which, and how large files and folders may be."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import sinklab
from benchmarks.census import size_of

SOURCE = Path(sinklab.__file__).parent
LAYERS = (
    ("__main__", "commands"),
    ("report",),
    ("experiments",),
    ("assessing",),
    ("tuning",),
    ("evaluating",),
    ("survey",),
    ("jobs",),
    ("opening",),
    ("interventions",),
    ("export",),
    ("train",),
    ("measuring",),
    ("models",),
    ("model",),
    ("data",),
    ("attention",),
    (
        "errors",
        "schema",
        "settings",
        "files",
        "device",
        "signals",
        "tables",
        "__init__",
    ),
)
"""From top to bottom. No module imports from a layer above its own; the lowest layer serves all others."""

LINES = 600
FILES = 30
MOST_CODE, MOST_FILES, MOST_FUNCTIONS = 31_783, 177, 86
"""Lines of code, files, and functions per 1,000 lines of the package; raising one needs a reason in docs/log.md."""


@cache
def modules() -> dict[str, Path]:
    """Every module of sinklab by its dotted name, without the `sinklab.` in front."""
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): SOURCE / path for path in files}


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of ours that a file imports anywhere: at the top, within a function, for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "sinklab":
            package = node.module.removeprefix("sinklab").lstrip(".")
            for alias in node.names:
                inside = f"{package}.{alias.name}".lstrip(".")
                yield inside if inside in known else package or "__init__"
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("sinklab.") for alias in node.names if alias.name.startswith("sinklab.")
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            named = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if called == "import_module":
                yield from (name.removeprefix("sinklab.") for name in named if name.startswith("sinklab."))


def layer_of(module: str) -> int:
    """The number of a module's layer, 0 at the top."""
    first = module.partition(".")[0]
    return next(number for number, names in enumerate(LAYERS) if first in names)


@cache
def arrows() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    return {name: set(imports(path, set(known))) - {name} for name, path in known.items()}


def test_every_folder_and_file_has_a_layer() -> None:
    known = {name for names in LAYERS for name in names}
    assert {name.partition(".")[0] for name in modules()} == known


def test_no_module_imports_from_a_layer_above() -> None:
    found = ((module, other) for module, others in arrows().items() for other in others)
    above = [(one, other) for one, other in found if one != "__init__" and layer_of(other) < layer_of(one)]
    assert not above, above  # `__init__` names what users may see


def test_no_files_import_each_other_in_a_circle() -> None:
    waiting = {name: others for name, others in arrows().items() if name != "__init__"}
    while free := {name for name, others in waiting.items() if not others & set(waiting)}:
        waiting = {name: others for name, others in waiting.items() if name not in free}
    assert not waiting, f"a circle through {', '.join(sorted(waiting))}"


def test_the_package_stays_within_its_limits_of_code_files_and_functions() -> None:
    sizes = [size_of(path) for path in modules().values()]
    code = sum(size.code for size in sizes)
    functions = 1000 * sum(size.functions for size in sizes) / code
    assert (code <= MOST_CODE, len(sizes) <= MOST_FILES, round(functions) <= MOST_FUNCTIONS) == (True,) * 3


def test_no_file_has_more_than_600_lines() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > LINES} == {}


def test_no_folder_has_more_than_30_files() -> None:
    counts = Counter(path.parent for path in modules().values())
    assert {str(folder): count for folder, count in counts.items() if count > FILES} == {}


def named_types(path: Path) -> Iterator[str]:
    """The classes of a file and the names that it gives to types."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name


def test_a_type_name_is_defined_in_one_file_only() -> None:
    counts = Counter(name for path in modules().values() for name in named_types(path))
    assert {name for name, count in counts.items() if count > 1} == {"P", "R", "T"} & set(counts)
