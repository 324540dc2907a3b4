"""Questions to the search over layouts."""

from __future__ import annotations

from typing import Any

from moe_optimizer.costs.memory import MemoryRequest
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir
from moe_optimizer.layouts.question import STEP_TOKENS, LayoutQuestion
from moe_optimizer.specs.kernel_speeds import SpeedTables
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.model import ModelSpec
from tests.builders import qwen3_30b_a3b

_FILES = sorted(shipped_dir().glob("*.json"))
TABLES = SpeedTables(tables=tuple(table for path in _FILES for table in read_tables(path)))


def by_itself(layout: Layout) -> bool:
    """Return whether a plan takes a layout that nobody asked for."""
    return not layout.disaggregated and (layout.data_parallel_size == 1 or layout.expert_parallel)


def question(
    model: ModelSpec | None = None, *, gpus: int, machines: int = 1, hardware: str = "h100_sxm", **changes: Any
) -> LayoutQuestion:
    """Return a question about a BF16 model unless told otherwise, with the shipped tables of kernel speeds."""
    gpu = load_catalog_entry(hardware).gpu
    fields: dict[str, Any] = {
        "clients": 64,
        "input_tokens": 512,
        "output_tokens": 128,
        "max_running": 1024,
        "expert_bits": 16,
        "linear_bits": 16,
        "weights": "bf16",
        "speeds": TABLES,
    }
    memory = MemoryRequest(
        model=model or qwen3_30b_a3b(),
        device_bytes=int(gpu.memory.value),
        num_devices=1,
        gpu_memory_utilization=0.9,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=256,
        max_model_len=1536,
    )
    return LayoutQuestion(memory=memory, gpu=gpu, gpus_per_machine=gpus, num_machines=machines, **(fields | changes))
