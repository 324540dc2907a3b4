"""What `moe_optimizer.ops` exports, in whatever order its modules are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["fused_experts", "flash_dmoe"])
@pytest.mark.parametrize(
    "first", ["import moe_optimizer.ops.{name}", "from moe_optimizer.ops.{name} import {name}", "import torch"]
)
def test_the_name_is_the_op_and_not_its_module(name: str, first: str) -> None:
    code = f"{first.format(name=name)}\nfrom moe_optimizer.ops import {name}\nassert callable({name}), {name}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, moe_optimizer.ops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import moe_optimizer.ops as ops

    with pytest.raises(AttributeError, match="no attribute 'fused_expert'"):
        _ = ops.fused_expert  # pyright: ignore[reportAttributeAccessIssue]
