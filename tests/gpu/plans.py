"""Plans of the bundled model for the GPUs of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.vllm_installation import find_vllm
from moe_optimizer.ops.cuda_variants import MoeSizes, candidate_variants
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import PlanRequest, make_plan
from moe_optimizer.profiles import load_profile
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, SpeedTables, TokenSpeeds
from moe_optimizer.specs.software import SoftwareSpec
from tests.free_ports import free_port
from tests.vllm.conftest import TINY_MOE

EXPERTS = 16
"""Of each layer of the bundled model."""
_SIZES = {"hidden_size": 128, "intermediate_size": 128, "top_k": 4}
_WINNERS = ((1, "direct"), (8, "direct"), (16, "grouped-bf16-n16"), (4096, "grouped-bf16-n64"))
_BESIDE_OTHERS = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "512M")
"""Servers may run side by side: vLLM would measure what is free, and stop when one gives some back meanwhile."""


def gpu_plan(
    *vllm_args: str,
    speeds: Callable[[str, str], KernelSpeeds] | None = None,
    model: Path = TINY_MOE,
    **request: Any,
) -> Plan:
    """Return a plan in BF16, as the command line makes it; skip the test where vLLM is not for CUDA.

    Args:
        vllm_args: of `vllm serve`.
        speeds: makes the only table of speeds from the hash of our kernels and vLLM's version; None: there is none.
        model: folder of a checkpoint.
        request: fields of PlanRequest.
    """
    vllm, kernels = find_vllm(), read_kernel_inventory()
    if vllm is None or vllm.device != "cuda":
        pytest.skip("needs a vLLM for CUDA")
    tables = () if speeds is None else (speeds(kernels.cuda_sources, vllm.version),)
    fields: dict[str, Any] = {"profile": load_profile("balanced"), "port": free_port(), "num_gpus": 1}
    return make_plan(
        PlanRequest(
            model=ModelInspector().inspect(model),
            hardware=probe_hardware(),
            software=SoftwareSpec(vllm=vllm, kernels=kernels, kernel_speeds=SpeedTables(tables=tables)),
            dtype="bfloat16",
            vllm_args=ServeArguments("--attention-backend", "FLASH_ATTN", *_BESIDE_OTHERS, *vllm_args),
            **(fields | request),
        )
    )


def always_ours(kernel_hash: str, vllm: str, *, num_experts: int = EXPERTS, of: int = EXPERTS) -> KernelSpeeds:
    """Return a table in which one of our kernels wins everywhere, for a GPU with `num_experts` of a layer's `of`."""
    direct = str(candidate_variants(MoeSizes(num_tokens=1, num_experts=EXPERTS, weight_bits=16, **_SIZES))[0])
    rows = []
    for tokens, use in _WINNERS:
        names = {direct if use == "direct" else use, direct if tokens <= 8 else use, _next(tokens)}
        rows.append(TokenSpeeds(tokens=tokens, stock_us=100.0, ours_us=dict.fromkeys(sorted(names), 10.0)))
    return KernelSpeeds(
        device=torch.cuda.get_device_name(),
        weights="bf16",
        shape=LayerShape(num_experts=num_experts, num_global_experts=of, **_SIZES),
        kernel_hash=kernel_hash,
        vllm=vllm.partition("+")[0],
        driver="",
        rows=tuple(rows),
        source="a test",
    )


def always_ours_in_fp8(kind: str, kernel_hash: str, vllm: str) -> KernelSpeeds:
    """Return a table in which a kernel of ours wins everywhere; vLLM by itself would take another backend than Triton.

    Args:
        kind: of the scales: "block", "channel" or "tensor".
        kernel_hash: of our kernels.
        vllm: its version.
    """
    rows = []
    for tokens in (1, 8, 64, 1024):
        sizes = MoeSizes(num_tokens=tokens, num_experts=EXPERTS, weight_bits=8, **_SIZES)
        names = {str(each): 10.0 for each in candidate_variants(sizes)}
        rows.append(TokenSpeeds(tokens=tokens, stock_us=100.0, ours_us=names, peers_us={"deep_gemm": 100.0}))
    return dataclasses.replace(
        always_ours(kernel_hash, vllm), weights=f"fp8_{kind}", rows=tuple(rows), backend="deep_gemm"
    )


def _next(tokens: int) -> str:
    """Return the winner of the range above: it must be there at both ends of its range."""
    return next((use for number, use in _WINNERS if number > tokens and use != "direct"), "grouped-bf16-n64")
