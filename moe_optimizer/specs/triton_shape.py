"""Names the file in which vLLM's Triton MoE kernel looks its configuration up."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonShape:
    """The routed experts of one layer as one GPU holds them."""

    num_experts: int
    """Experts on the GPU: all of them, or its share under expert parallelism."""
    width: int
    """Expert width on the GPU, with what it is filled up with: the whole one under expert parallelism, else its
    tensor-parallel share."""
    device_name: str
    """As the driver says it, for example "NVIDIA H100 80GB HBM3"."""
    dtype: str
    """"" for BF16 and FP16, "float32", or "fp8_w8a8"."""
    block: tuple[int, int] | None
    """Rows and columns of the weight block that shares a scale; None where scales are per tensor or channel."""

    @property
    def file_name(self) -> str:
        """The name of the file with the configuration of this shape."""
        device = re.sub(r"[\s/]+", "_", self.device_name)
        # vLLM keeps one set of files for every H200.
        device = "NVIDIA_H200" if "H200" in device.split("_") else device
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = f",block_shape=[{self.block[0]},{self.block[1]}]" if self.block else ""
        return f"E={self.num_experts},N={self.width},device_name={device}{dtype}{block}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What a measurement of the kernel needs to know beside its tiles."""

    num_experts: int
    """Of the whole layer."""
    local_experts: int
    """On this GPU; fewer than `num_experts` under expert parallelism."""
    top_k: int
    hidden_size: int
    width: int
    """On this GPU."""
    dtype: str
    """"bfloat16", "float16" or "float32": of the activations."""
    scheme: str
    """"" or "fp8_w8a8"."""
    block: tuple[int, int] | None
    """As in `TritonShape`."""
