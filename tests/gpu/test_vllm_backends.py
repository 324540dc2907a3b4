"""vLLM's other MoE backends beside ours on a real layer: each is timed, or named with the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_optimizer.inspection.kernel_speeds import read_tables
from moe_optimizer.measure.kernel_speeds.measurement import SpeedRequest
from moe_optimizer.measure.kernel_speeds.tables import measure_speeds
from moe_optimizer.specs.kernel_speeds import LayerShape, SpeedQuestion

pytestmark = pytest.mark.gpu

OF_FORMAT = {
    "bf16": {"flashinfer_cutlass"},
    "fp8_block": {"deep_gemm", "marlin", "flashinfer_cutlass"},
    "fp8_channel": {"cutlass", "marlin", "flashinfer_cutlass"},
    "fp8_tensor": {"marlin", "flashinfer_cutlass"},
}
"""Weights -> backends of vLLM's for them, of which at least these are timed or refused with a reason."""


@pytest.mark.parametrize("weights", sorted(OF_FORMAT))
@pytest.mark.parametrize("apart", [False, True], ids=["all-experts", "expert-map"])
def test_every_backend_for_such_weights_is_timed_or_has_a_reason(weights: str, apart: bool, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    question = SpeedQuestion(
        device=torch.cuda.get_device_name(),
        weights=weights,
        shape=LayerShape(
            hidden_size=2048, intermediate_size=768, num_experts=32, num_global_experts=64 if apart else 32, top_k=8
        ),
        kernel_hash="",
        vllm="",
    )
    request = SpeedRequest(device="cuda", questions=(question,), seconds=200.0)
    measure_speeds(request, on_step=lambda *_: None, cache=tmp_path)
    (path,) = tmp_path.glob("*.json")
    (table,) = read_tables(path)
    timed = {name for row in table.rows for name in row.peers_us}
    assert timed | table.unavailable.keys() >= OF_FORMAT[weights], (timed, table.unavailable)
    assert all(table.unavailable.values())
    assert table.backend == "triton" or table.backend in timed, table
    print(f"\n{weights}, {'expert map' if apart else 'all experts'}: vLLM takes {table.backend}")
    for row in table.rows:
        ours = min(row.ours_us.values(), default=float("nan"))
        print(f"  {row.tokens:5} tokens: Triton {row.stock_us}, ours {ours}, {dict(row.peers_us)}")
    print(f"  not available: {dict(table.unavailable)}")
