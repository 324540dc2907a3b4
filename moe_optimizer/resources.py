"""Names the folders of the package's data files, of the kernels' sources, and of the user's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
SOURCES = _PACKAGE.parent / "csrc"
"""The kernels' sources; an installed package has none."""


def config_dir() -> Path:
    """Return the folder with the shipped profiles and, under hardware/, the hardware facts.

    A wheel carries it as moe_optimizer/configs; a checkout keeps it at the top level.
    """
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this user's cache folder: moe-optimizer in $XDG_CACHE_HOME, or in ~/.cache."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a path that is not absolute is to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "moe-optimizer"
