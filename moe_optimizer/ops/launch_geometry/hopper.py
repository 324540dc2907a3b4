"""Holds the limits of one Hopper multiprocessor, and checks that a launch stays inside."""

from __future__ import annotations

from moe_optimizer.errors import UnsupportedError

SHARED_BYTES = 227 * 1024
"""Dynamic shared memory that one block may ask for (CUDA C++ Programming Guide, compute capability 9.0)."""


class GeometryError(UnsupportedError):
    """No launch of the kernel fits this problem; the message spells out the arithmetic."""


def expect(condition: bool, kernel: str, what: str, got: object, expected: object) -> None:
    """Raise GeometryError with the kernel's name unless `condition` holds."""
    if not condition:
        raise GeometryError(f"{kernel}: {what}: got {got}, expected {expected}")


def check_shared(kernel: str, parts: dict[str, int], limit: int = SHARED_BYTES) -> int:
    """Return the sum of `parts`, bytes by purpose; raise GeometryError if it is more than a block may have."""
    total = sum(parts.values())
    terms = " + ".join(f"{size} ({what})" for what, size in parts.items())
    expect(total <= limit, kernel, "shared memory", f"{terms} = {total} bytes", f"at most {limit}")
    return total
