"""What `moe_optimizer.ops` exports, in whatever order its modules are imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Runs each argument in a fork of a process that has imported torch, which is most of what a process of its own costs.
FORKS = """
import os, sys, torch
assert len(os.listdir("/proc/self/task")) == 1, "a fork beside other threads may hang"
for code in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        exec(code)
        os._exit(0)  # without taking torch apart
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, code
"""


@pytest.mark.thorough
def test_the_name_is_the_op_and_not_its_module_whatever_is_imported_first() -> None:
    first = ("", "import moe_optimizer.ops.{name}\n", "from moe_optimizer.ops.{name} import {name}\n")
    check = "from moe_optimizer.ops import {name}\nassert callable({name}), {name}"
    codes = [(each + check).format(name=name) for name in ("fused_experts", "flash_dmoe") for each in first]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", FORKS, *codes], env=environment, check=True, timeout=300)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, moe_optimizer.ops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import moe_optimizer.ops as ops

    with pytest.raises(AttributeError, match="no attribute 'fused_expert'"):
        _ = ops.fused_expert  # pyrefly: ignore[missing-attribute]
