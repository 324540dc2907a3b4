"""Scales of four-bit weights in bulk copies (TileScales) and stage by stage, on a GPU: right, and the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops import _load
from moe_optimizer.ops.cuda_variants import GemmMode, GroupedVariant
from moe_optimizer.ops.kernel_arguments import CudaProblem
from tests.gpu.test_cuda_kernels import on_gpu, run
from tests.kernel_emulator import assert_close, make_case

pytestmark = pytest.mark.gpu

ZEROS = {"zero_points": True}


def off_16(tensor: Tensor | None) -> Tensor:
    """A copy that starts 4 bytes behind a multiple of 16, which no bulk copy can read."""
    assert tensor is not None
    shift = 4 // tensor.element_size()
    padded = tensor.new_empty(tensor.numel() + shift)
    padded[shift:] = tensor.flatten()
    return padded[shift:].view(tensor.shape)


def scale_bytes(problem: CudaProblem, variant: GroupedVariant) -> int:
    """What the buffers of bulk copies take; 0: stage by stage."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    return _load.kernels().cuda_layout(*problem.call(variant, blocks), 0)["launch"]["scale_bytes"]


# gpt-oss has 90 groups of 32 along K; INT4's of them leave room for one buffer beside the wider tiles.
@pytest.mark.parametrize(
    ("formats", "hidden", "width"),
    [
        ({"mxfp4": True}, 2880, 2880), ({"mxfp4": True}, 2048, 768),
        ({"int4": 32}, 2880, 2880), ({"int4": 32, **ZEROS}, 2880, 480), ({"int4": 32, **ZEROS}, 2048, 768),
        ({"int4": 64, **ZEROS}, 2880, 2880), ({"int4": 128}, 2048, 768), ({"int4": 128, **ZEROS}, 4096, 1536),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_grouped_tiles_with_scales_in_bulk_copies_have_the_bits_of_copies_stage_by_stage(
    activation, tile, formats, hidden, width
):
    extra: dict[str, Any] = {}
    if activation == "swigluoai":
        ids = torch.randint(-1, 6, (300, 2), generator=torch.Generator().manual_seed(3))
        extra = {"ids": ids, "expert_map": torch.tensor([-1, 1, -1, 0, 2, 3]), "activation": activation, "bias": True}
    mode = GemmMode.INT4_WEIGHTS if "int4" in formats else GemmMode.MXFP4_WEIGHTS
    variant = GroupedVariant(mode, tile)
    case = on_gpu(make_case(300, 2, 4, hidden, width, **formats, **extra))
    in_stages = replace(
        case.problem, w13_scale=off_16(case.problem.w13_scale), w2_scale=off_16(case.problem.w2_scale),
        out=case.problem.out.clone(),
    )  # fmt: skip
    assert (scale_bytes(case.problem, variant) > 0) == (mode == GemmMode.INT4_WEIGHTS or tile < 64)
    assert scale_bytes(in_stages, variant) == 0
    want = run(in_stages, variant)
    assert_close(case, want)
    for _ in range(5):
        assert torch.equal(want, run(case.problem, variant))
