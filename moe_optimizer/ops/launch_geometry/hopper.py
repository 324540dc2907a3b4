"""What one Hopper multiprocessor offers a kernel, and the check that a kernel stays inside."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.errors import UnsupportedError


class GeometryError(UnsupportedError):
    """No launch of the kernel fits this problem; the message spells out the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLimits:
    """Limits of one multiprocessor. Source: CUDA C++ Programming Guide, compute capability 9.0."""

    name: str
    shared_bytes_per_block: int
    """Dynamic shared memory that one block may ask for."""
    registers: int
    """32-bit registers per multiprocessor."""
    max_registers_per_thread: int
    max_threads_per_block: int

    def check_shared(self, kernel: str, parts: dict[str, int]) -> int:
        """Return the sum of `parts`, bytes by purpose; raise GeometryError if it is more than a block may have."""
        total = sum(parts.values())
        if total > self.shared_bytes_per_block:
            terms = " + ".join(f"{size} ({what})" for what, size in parts.items())
            raise GeometryError(
                f"{kernel}: shared memory: {terms} = {total} bytes, expected at most {self.shared_bytes_per_block}"
            )
        return total

    def check_registers(self, kernel: str, threads: int, registers_per_thread: int) -> None:
        """Raise GeometryError unless one block of `threads` fits the register file."""
        if threads > self.max_threads_per_block:
            raise GeometryError(f"{kernel}: got {threads} threads, expected at most {self.max_threads_per_block}")
        if registers_per_thread > self.max_registers_per_thread:
            raise GeometryError(
                f"{kernel}: got {registers_per_thread} registers per thread, "
                f"expected at most {self.max_registers_per_thread}"
            )
        # Registers are handed out to warps in units of 256, 8 per thread.
        rounded = -(-registers_per_thread // 8) * 8
        if threads * rounded > self.registers:
            raise GeometryError(
                f"{kernel}: {threads} threads x {rounded} registers = {threads * rounded}, "
                f"expected at most {self.registers}"
            )


HOPPER = ChipLimits(
    name="sm_90a",
    shared_bytes_per_block=227 * 1024,
    registers=65536,
    max_registers_per_thread=255,
    max_threads_per_block=1024,
)


def expect(condition: bool, kernel: str, what: str, got: object, expected: object) -> None:
    """Raise GeometryError with the kernel's name unless `condition` holds."""
    if not condition:
        raise GeometryError(f"{kernel}: {what}: got {got}, expected {expected}")
