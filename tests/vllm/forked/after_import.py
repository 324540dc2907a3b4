"""Changes a module once it is imported, in a server's processes."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def change(name: str, make_change: Callable[[Any], None]) -> None:
    """Have `make_change` called with the module of that name, behind its import."""
    sys.meta_path.insert(0, _AfterImport(name, make_change))


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, make_change: Callable[[Any], None]) -> None:
        self._name, self._make_change = name, make_change

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            self._make_change(module)

        loader.exec_module = executed
        return spec
