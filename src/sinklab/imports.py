"""Something done once another library is imported, without importing it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def once_imported(module: str, action: Callable[[], None]) -> None:
    """Call `action` as soon as `module` has been imported; now, where it has been."""
    if module in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(module, action))


class _Waiting(MetaPathFinder):
    """Finds nothing by itself; the module that it waits for is found by the others, and run with `action` behind it."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module, self._action = module, action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._action()

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
