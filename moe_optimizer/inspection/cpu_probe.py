"""Reads the host processor and memory that this process may use: affinity and cgroup limits respected."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from moe_optimizer.files import text_or_nothing
from moe_optimizer.specs.hardware import CpuSpec
from moe_optimizer.specs.quantity import Quantity, Source

# Instruction sets that kernels choose between, as /proc/cpuinfo spells them (x86 flags, then Arm features).
_KERNEL_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip


def probe_cpu(root: Path = Path("/")) -> CpuSpec:
    """Return the processor and memory of this process.

    Args:
        root: where proc/ and sys/ are.
    """
    facts = _cpuinfo(root)
    present = set((facts.get("flags") or facts.get("Features") or "").split())
    return CpuSpec(
        name=facts.get("model name") or platform.processor() or platform.machine(),
        cores=(cores := _usable_cores(root)),
        core_ids=tuple(sorted(_allowed_cores())[:cores]),
        memory=_limited(_meminfo_total(root), "MemTotal of /proc/meminfo", root),
        isa=tuple(name for name in _KERNEL_ISA if name in present),
        node_memory=_node_memory(root),
        physical_cores=_physical_cores(root),
    )


def _physical_cores(root: Path) -> tuple[tuple[int, ...], ...]:
    allowed, nodes = _allowed_cores(), []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        last_of: dict[tuple[str, str], int] = {}
        for cpu in sorted(allowed & _core_list(text_or_nothing(folder / "cpulist"))):
            topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            core = text_or_nothing(topology / "core_id").strip() or f"cpu{cpu}"
            last_of[text_or_nothing(topology / "physical_package_id").strip(), core] = cpu
        if last_of:
            nodes.append(tuple(sorted(last_of.values())))
    return tuple(nodes)


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in text_or_nothing(root / "proc/cpuinfo").splitlines():
        if not line.strip() and facts:
            break
        key, colon, value = line.partition(":")
        if colon:
            facts.setdefault(key.strip(), value.strip())
    return facts


def _usable_cores(root: Path) -> int:
    # Half a core more does not feed another thread: round down, but never to none.
    return max(1, math.floor(min([len(_allowed_cores()), *_cpu_quotas(root)])))


def _allowed_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _node_memory(root: Path) -> Quantity | None:
    first = min(_allowed_cores())
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        if first not in _core_list(text_or_nothing(folder / "cpulist")):
            continue
        for line in text_or_nothing(folder / "meminfo").splitlines():
            words = line.split()
            if "MemTotal:" in words[2:3] and words[3].isdigit():
                return _limited(int(words[3]) * 1024, f"MemTotal of NUMA {folder.name}", root)
    return None


def _core_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _limited(total: int, ref: str, root: Path) -> Quantity:
    limit = min(_memory_limits(root), default=total)
    return Quantity(float(min(limit, total)), "bytes", Source.MEASURED, "cgroup memory limit" if limit < total else ref)


def _meminfo_total(root: Path) -> int:
    for line in text_or_nothing(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_quotas(root: Path) -> Iterator[float]:
    version_2 = (text_or_nothing(folder / "cpu.max").partition(" ")[::2] for folder in _cgroup_folders(root, ""))
    version_1 = (
        (text_or_nothing(folder / "cpu.cfs_quota_us"), text_or_nothing(folder / "cpu.cfs_period_us"))
        for folder in _cgroup_folders(root, "cpu")
    )
    for quota, period in (*version_2, *version_1):
        # No quota is "max", or -1 in version 1.
        if quota.strip().isdigit() and period.strip().isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    # Without a limit version 1 reports a number near 2**63, far above any MemTotal.
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _cgroup_folders(root, controller):
            text = text_or_nothing(folder / name).strip()
            if text.isdigit():
                yield int(text)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup of a version 1 controller ("" for version 2) and all its ancestors.

    A limit on any of them binds. Inside a container the path in /proc/self/cgroup may not be mounted; the
    mount's own top is then the container's group, and it is always yielded.
    """
    for line in text_or_nothing(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller not in controllers.split(","):
            continue
        # Version 2 may be mounted below the version 1 folders; version 1 joins controllers ("cpu,cpuacct").
        mounts = ("", "unified") if not controller else (controller, controllers)
        for mount in dict.fromkeys(mounts):
            top = root / "sys/fs/cgroup" / mount
            parts = [part for part in path.split("/") if part not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth])
