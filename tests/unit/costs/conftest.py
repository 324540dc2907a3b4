"""Models with the published shapes, built by hand so that these tests do not depend on the inspector."""

from __future__ import annotations

import pytest

from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.quantity import Quantity, Source
from tests import builders


@pytest.fixture(scope="session")
def qwen3_30b_a3b() -> ModelSpec:
    return builders.qwen3_30b_a3b()


@pytest.fixture(scope="session")
def mixtral_8x7b() -> ModelSpec:
    return builders.mixtral_8x7b()


@pytest.fixture(scope="session")
def deepseek_v3_fp8() -> ModelSpec:
    return builders.deepseek_v3()


@pytest.fixture(scope="session")
def deepseek_v3_bf16() -> ModelSpec:
    return builders.deepseek_v3(bytes_per_weight=2.0, quant_method=None, weight_bits=16.0)


@pytest.fixture(scope="session")
def h200_measured() -> GpuSpec:
    """An H200 with the rates measured on one: 4.3e12 bytes/s and 790e12 flop/s in BF16."""

    def quantity(value: float, unit: str) -> Quantity:
        return Quantity(value, unit, Source.MEASURED, "test")

    return GpuSpec(
        key="h200",
        name="NVIDIA H200",
        compute_capability=(9, 0),
        memory=quantity(143771 * 2**20, "bytes"),
        memory_bandwidth=quantity(4.3e12, "bytes/s"),
        dense_flops={"bf16": quantity(790e12, "flop/s"), "fp8": quantity(1580e12, "flop/s")},
        gpu_link_bandwidth=Quantity(450e9, "bytes/s", Source.DATASHEET, "datasheet"),
        gpu_link="nvlink",
        sm_count=132,
        max_gpus_per_node=8,
    )
