"""Reads the position of a layer from the name of a module."""

from __future__ import annotations

import re

_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def decoder_layer(name: str) -> int | None:
    """Return the index of the decoder layer in a module's name, None where it has none."""
    found = _DECODER_LAYER.search(name)
    return int(found[1]) if found else None
