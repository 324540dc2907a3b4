"""Reads facts: models, machines, installed software and measurements. Nothing here imports torch or vLLM.

The names below are loaded on first use, so that a command pays only for what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optimizer.inspection.hardware_catalog import hardware_names as hardware_names
    from moe_optimizer.inspection.hardware_probe import load_hardware as load_hardware
    from moe_optimizer.inspection.hardware_probe import probe_hardware as probe_hardware
    from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory as read_kernel_inventory
    from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds as read_kernel_speeds
    from moe_optimizer.inspection.model_inspector import ModelInspector as ModelInspector
    from moe_optimizer.inspection.model_inspector import to_inspect_json as to_inspect_json
    from moe_optimizer.inspection.software import read_software as read_software
    from moe_optimizer.inspection.vllm_installation import find_vllm as find_vllm
    from moe_optimizer.inspection.vllm_runs import read_vllm_runs as read_vllm_runs

_HOMES = {
    "ModelInspector": "model_inspector",
    "find_vllm": "vllm_installation",
    "hardware_names": "hardware_catalog",
    "load_hardware": "hardware_probe",
    "probe_hardware": "hardware_probe",
    "read_kernel_inventory": "kernel_inventory",
    "read_kernel_speeds": "kernel_speeds",
    "read_software": "software",
    "read_vllm_runs": "vllm_runs",
    "to_inspect_json": "model_inspector",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
