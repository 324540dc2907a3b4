"""Checks for the doctor which tables of kernel speeds apply to this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.cli.check import Check

if TYPE_CHECKING:
    from moe_optimizer.specs.hardware import HardwareSpec
    from moe_optimizer.specs.kernel_speeds import KernelSpeeds
    from moe_optimizer.specs.software import KernelInventory, VllmInstallation

_NAME = "kernel speeds"
_HINT = "`moe-optimizer serve` measures a model's layer before its first start (--calibrate)"


def kernel_speeds_check(hardware: HardwareSpec) -> Check:
    """Check which tables were measured on this machine's processor, with its vLLM and its kernels."""
    from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory
    from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds
    from moe_optimizer.inspection.vllm_installation import find_vllm

    speeds = read_kernel_speeds()
    if speeds.warnings:
        return Check(_NAME, "note", speeds.warnings[0], "remove the file")
    vllm, kernels = find_vllm(), read_kernel_inventory()
    reasons = [_why_not(table, hardware, vllm, kernels) for table in speeds.tables]
    fitting = [table for table, reason in zip(speeds.tables, reasons, strict=True) if not reason]
    if not fitting:
        nearest = reasons[-1] if reasons else "there are none"
        return Check(_NAME, "note", f"none of {len(speeds.tables)} tables applies here: {nearest}", _HINT)
    layers = sorted({_layer(table) for table in fitting})
    return Check(_NAME, "ok", f"{len(fitting)} of {len(speeds.tables)} tables apply here: {'; '.join(layers)}")


def _layer(table: KernelSpeeds) -> str:
    shape = table.shape
    sizes = f"H={shape.hidden_size} I={shape.intermediate_size} E={shape.num_experts} top-{shape.top_k}"
    return f"{sizes} {table.weights}"


def _why_not(
    table: KernelSpeeds, hardware: HardwareSpec, vllm: VllmInstallation | None, kernels: KernelInventory
) -> str:
    """Return why a table does not apply here, or ""."""
    on_gpu = hardware.gpu is not None and not (vllm is not None and vllm.device == "cpu")
    if on_gpu:
        assert hardware.gpu is not None
        here, same, sources = hardware.gpu.name, table.device == hardware.gpu.name, kernels.cuda_sources
    else:
        here = hardware.cpu.name if hardware.cpu else "no processor"
        same, sources = table.device.startswith(f"{here} ("), kernels.cpu_sources
    if not same:
        return f"measured on {table.device}, this is {here}"
    if vllm is None or vllm.release != table.vllm:
        return f"measured with vLLM {table.vllm}, installed is {vllm.version if vllm else 'none'}"
    if table.kernel_hash != sources:
        return f"measured with kernels {table.kernel_hash[:12]}, built are {sources[:12] or 'none'}"
    return ""
