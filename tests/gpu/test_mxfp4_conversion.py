"""The conversion to MXFP4 on a GPU: the codes and scales of the CPU's."""

from __future__ import annotations

import pytest
import torch

from moe_optimizer.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_and_scales_are_those_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(3, 96, 256, generator=generator) * torch.rand(3, 96, 1, generator=generator)).to(dtype)
    weight[0, 0] = 0
    packed, scale = quantize_mxfp4(weight)
    on_gpu = quantize_mxfp4(weight.cuda())
    assert torch.equal(on_gpu[0].cpu(), packed)
    assert torch.equal(on_gpu[1].cpu(), scale)
    assert torch.equal(dequantize_mxfp4(*on_gpu).cpu(), dequantize_mxfp4(packed, scale))
