"""Reads facts: models, machines, installed software and measurements. Nothing here imports torch or vLLM.

The names below are loaded on first use, so that a command pays only for what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optimizer.inspection.hardware_catalog import hardware_names
    from moe_optimizer.inspection.hardware_probe import load_hardware, probe_hardware
    from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory
    from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds
    from moe_optimizer.inspection.model_inspector import ModelInspector
    from moe_optimizer.inspection.report import to_inspect_json
    from moe_optimizer.inspection.software import read_software
    from moe_optimizer.inspection.vllm_installation import find_vllm

__all__ = [
    "ModelInspector",
    "find_vllm",
    "hardware_names",
    "load_hardware",
    "probe_hardware",
    "read_kernel_inventory",
    "read_kernel_speeds",
    "read_software",
    "to_inspect_json",
]

_HOMES = {
    "ModelInspector": "model_inspector",
    "find_vllm": "vllm_installation",
    "hardware_names": "hardware_catalog",
    "load_hardware": "hardware_probe",
    "probe_hardware": "hardware_probe",
    "read_kernel_inventory": "kernel_inventory",
    "read_kernel_speeds": "kernel_speeds",
    "read_software": "software",
    "to_inspect_json": "report",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
