"""Where the package's data files are: in a checkout beside the package, in a wheel inside it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def config_dir() -> Path:
    """Return the folder with the shipped profiles and, under hardware/, the hardware facts.

    A wheel carries it as moe_optimizer/configs; a checkout keeps it at the top level.
    """
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"
