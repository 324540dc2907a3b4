from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_optimizer.inspection.cpu_probe import probe_cpu
from moe_optimizer.specs.quantity import Source

GIB = 2**30
CPUINFO = (
    "processor\t: 0\nmodel name\t: Test CPU 9\nflags\t\t: fpu fma avx2 avx512f amx_tile\n\n"
    "processor\t: 1\nmodel name\t: Another\nflags\t\t: fpu\n"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that writes files below a fake root: 8 cores, 32 GiB, unless it says otherwise."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def write(files: dict[str, str]) -> Path:
        defaults = {"proc/cpuinfo": CPUINFO, "proc/meminfo": f"MemTotal:  {32 * 2**20} kB\nMemFree: 1 kB\n"}
        for name, text in (defaults | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_name_instruction_sets_cores_and_memory_without_limits(machine):
    cpu = probe_cpu(machine({}))
    assert (cpu.name, cpu.isa, cpu.cores) == ("Test CPU 9", ("avx2", "fma", "avx512f", "amx_tile"), 8)
    assert (cpu.memory.value, cpu.memory.unit, cpu.memory.source) == (32 * GIB, "bytes", Source.MEASURED)


def test_arm_features_are_read(machine):
    cpu = probe_cpu(machine({"proc/cpuinfo": "processor: 0\nFeatures : fp asimd bf16 i8mm\n"}))
    assert cpu.isa == ("asimd", "bf16", "i8mm")
    assert cpu.name


@pytest.mark.parametrize(
    ("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("9900000 100000", 8), ("", 8)]
)
def test_version_2_quota_limits_the_cores(machine, quota, cores):
    root = machine({"proc/self/cgroup": "0::/app/job\n", "sys/fs/cgroup/app/job/cpu.max": quota})
    assert probe_cpu(root).cores == cores
    assert probe_cpu(root).core_ids == tuple(range(cores))


def test_limits_of_a_parent_group_bind(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/app/job\n",
            "sys/fs/cgroup/app/cpu.max": "300000 100000",
            "sys/fs/cgroup/app/job/cpu.max": "500000 100000",
            "sys/fs/cgroup/app/memory.max": str(4 * GIB),
            "sys/fs/cgroup/app/job/memory.max": "max",
        }
    )
    cpu = probe_cpu(root)
    assert (cpu.cores, cpu.memory.value, cpu.memory.ref) == (3, 4 * GIB, "cgroup memory limit")


def test_a_path_that_is_not_mounted_inside_a_container_falls_back_to_the_top(machine):
    root = machine({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": str(2 * GIB)})
    assert probe_cpu(root).memory.value == 2 * GIB


def test_a_version_1_group_limits_cores_and_memory(machine):
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(3 * GIB),
        }
    )
    cpu = probe_cpu(root)
    assert (cpu.cores, cpu.memory.value) == (4, 3 * GIB)


def test_a_version_1_group_without_limits_leaves_the_machine(machine):
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        }
    )
    cpu = probe_cpu(root)
    assert (cpu.cores, cpu.memory.value) == (8, 32 * GIB)


def test_path_in_proc_cannot_leave_the_cgroup_folder(machine):
    root = machine({"proc/self/cgroup": "0::/../../../proc\nbroken line\n", "proc/memory.max": "1"})
    assert probe_cpu(root).memory.value == 32 * GIB


def test_node_memory_is_that_of_the_first_usable_core(machine, monkeypatch):
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal:  {10 * 2**20} kB\nNode 0 MemFree: 1 kB\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "sys/devices/system/node/node1/meminfo": f"Node 1 MemTotal:  {20 * 2**20} kB\n",
    }
    root = machine(files)
    node = probe_cpu(root).node_memory
    assert node is not None
    assert node.value == 10 * GIB
    assert "node0" in node.ref
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 9})
    node = probe_cpu(root).node_memory
    assert node is not None
    assert node.value == 20 * GIB


def test_node_memory_is_limited_by_the_cgroup_and_none_without_nodes(machine):
    assert probe_cpu(machine({})).node_memory is None
    root = machine(
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/devices/system/node/node0/cpulist": "0-7",
            "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: {10 * 2**20} kB\n",
        }
    )
    node = probe_cpu(root).node_memory
    assert node is not None
    assert node.value == GIB


def test_empty_root_still_gives_a_processor(tmp_path):
    cpu = probe_cpu(tmp_path)
    assert cpu.cores >= 1
    assert cpu.memory.value > 0
    assert cpu.isa == ()


def test_this_machine_has_a_name_cores_and_memory(tmp_path):
    cpu = probe_cpu()
    assert cpu.name
    assert 1 <= cpu.cores <= (os.cpu_count() or 1)
    assert cpu.memory.value >= 2**28


def test_of_two_hardware_threads_of_a_core_the_last_stands_for_it(machine):
    files = {
        "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
        "sys/devices/system/node/node1/cpulist": "2-3,6-9\n",
    }
    for cpu in range(8):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{cpu % 4}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "0\n"
    assert probe_cpu(machine(files)).physical_cores == ((4, 5), (6, 7))


def test_a_machine_without_nodes_says_no_physical_cores(machine):
    assert probe_cpu(machine({})).physical_cores == ()
