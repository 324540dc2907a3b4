"""Changes this process's environment for the length of a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables, which children started in the block inherit; restore what was there at its end."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
