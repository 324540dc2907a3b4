"""Applies patches of vLLM, which are data: what is replaced, why, until when, and the source it was written for."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_optimizer.vllm_plugin.compat import definition_source, fingerprint

_ORIGINAL = "__moe_optimizer_original__"


class PatchState(Enum):
    """State of a patch in this process."""

    ARMED = "armed"
    """Waiting: the module that it changes is not imported in this process."""
    APPLIED = "applied"
    REFUSED = "refused"
    """Not applied; the detail says why."""
    UNDONE = "undone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to a function or method of vLLM."""

    target: str
    """"module:function" or "module:Class.method"."""
    why: str
    remove_when: str
    fingerprints: Mapping[str, str]
    """vLLM versions -> `compat.fingerprint` of the target's source there. The patch is refused on any other source."""
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Makes the new function from the original one."""

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """The function or method part of the target."""
        return self.target.partition(":")[2]

    def owner(self, module: ModuleType) -> tuple[Any, str]:
        """Return the module or class that holds the function, and the function's name there.

        Raises:
            AttributeError: the class is gone.
        """
        *classes, attribute = self.name.split(".")
        return functools.reduce(getattr, classes, module), attribute


@dataclass(slots=True)
class PatchReport:
    """The outcome of one patch in this process."""

    patch: Patch
    state: PatchState
    detail: str


_reports: dict[str, PatchReport] = {}
_waiting: dict[str, list[Callable[[PatchReport], None]]] = {}
"""Target of an armed patch -> callbacks for its outcome; two passes may need one patch."""


def patch_reports() -> tuple[PatchReport, ...]:
    """Return every patch that was requested in this process, in that order."""
    return tuple(_reports.values())


def apply_when_imported(patch: Patch, *, on_change: Callable[[PatchReport], None] | None = None) -> PatchReport:
    """Apply `patch` now if its module is imported, else right after its import. Harmless when done twice.

    The module is not imported here, so that processes without a model, such as the API server, stay as fast and small
    as without the plugin. A failure becomes the report's state, never an exception in vLLM's import.
    """
    known = _reports.get(patch.target)
    if known is not None and known.state in (PatchState.ARMED, PatchState.APPLIED):
        if known.state is PatchState.ARMED and on_change is not None:
            _waiting[patch.target].append(on_change)
        return known
    report = PatchReport(patch, PatchState.ARMED, f"{patch.module} is not imported in this process")
    _reports[patch.target] = report
    _waiting[patch.target] = [] if on_change is None else [on_change]

    def apply(module: ModuleType) -> None:
        _apply_now(report, module)
        for changed in _waiting.pop(patch.target):
            changed(report)

    if patch.module in sys.modules:
        apply(sys.modules[patch.module])
    else:
        sys.meta_path.insert(0, _AfterImport(patch.module, apply))
    return report


def undo(target: str) -> bool:
    """Put the original function back; return whether the patch was applied."""
    report = _reports.get(target)
    if report is None or report.state is not PatchState.APPLIED:
        return False
    owner, attribute = report.patch.owner(sys.modules[report.patch.module])
    replaced = getattr(owner, attribute)
    original = getattr(replaced, _ORIGINAL)
    setattr(owner, attribute, original)
    _rebind(report.patch, replaced, original)
    report.state, report.detail = PatchState.UNDONE, "undone on request"
    return True


def probe(patch: Patch, path: Path) -> str:
    """Return why `patch` does not fit the source file `path` of its module, or "" when it does."""
    try:
        source = definition_source(path, patch.name)
    except (OSError, SyntaxError) as error:
        return f"{patch.module}: source cannot be read ({error})"
    if source is None:
        return f"{patch.name} is gone from {patch.module}"
    found = fingerprint(source)
    if found not in patch.fingerprints.values():
        return f"{patch.name} changed: source {found}, known are {_listed(patch.fingerprints)}"
    return ""


def _listed(fingerprints: Mapping[str, str]) -> str:
    return ", ".join(f"{digest} ({version})" for version, digest in fingerprints.items())


def _apply_now(report: PatchReport, module: ModuleType) -> None:
    patch = report.patch
    try:
        mismatch = probe(patch, Path(str(module.__file__)))
        if mismatch:
            report.state, report.detail = PatchState.REFUSED, mismatch
            return
        owner, attribute = patch.owner(module)
        original = getattr(owner, attribute)
        if hasattr(original, _ORIGINAL):
            report.state, report.detail = PatchState.APPLIED, "was in place already"
            return
        if original.__module__ != patch.module:
            report.state = PatchState.REFUSED
            report.detail = f"{patch.name} was replaced by {original.__module__} before us"
            return
        replaced = patch.replacement(original)
        setattr(replaced, _ORIGINAL, original)
        setattr(owner, attribute, replaced)
        _rebind(patch, original, replaced)
        in_place = getattr(owner, attribute) is replaced
        report.state = PatchState.APPLIED if in_place else PatchState.REFUSED
        report.detail = "" if in_place else f"{patch.name} could not be replaced"
    except Exception as error:  # noqa: BLE001 - an exception here would end vLLM's own import
        report.state, report.detail = PatchState.REFUSED, f"{type(error).__name__}: {error}"


def _rebind(patch: Patch, old: Any, new: Any) -> None:
    """Replace `old` in every module of the same package: those that imported it by name would keep calling it."""
    package = patch.module.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name != package and not name.startswith(f"{package}."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function once, right after one module was imported."""

    def __init__(self, module: str, then: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - Python's own interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as Python would have, with a loader that calls back."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader, then = spec.loader, self._then
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        # On the instance: the loader belongs to this one module.
        loader.exec_module = exec_module
        return spec
