"""Returns freed memory to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Have the C library give freed blocks back; does nothing where it is not glibc.

    It keeps freed blocks of up to 32 MB for the next allocation. The weights of a layer before its conversion are of
    that size, and together they would hold on to the memory that the conversion saves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
