"""Weights of experts as vLLM pads them for its kernels, which need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_optimizer.ops.reference import dequantize

OPS = Path(__file__).resolve().parents[3] / "benchmarks" / "ops"


@pytest.fixture(autouse=True)
def ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmarks' modules be imported as their scripts import them."""
    monkeypatch.syspath_prepend(str(OPS))


def mxfp4(experts: int, rows: int, columns: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes and exponents."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=g)
    return codes, torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8, generator=g)


def test_padded_mxfp4_experts_have_zeros_around_the_same_gate_up_and_down() -> None:
    from bench_cuda_cases import Weights, padded_mxfp4

    experts, hidden, width = 2, 192, 96
    w13, w13_scale = mxfp4(experts, 2 * width, hidden, seed=0)
    w2, w2_scale = mxfp4(experts, hidden, width, seed=1)
    padded_w13, padded_w2, padded_w13_scale, padded_w2_scale = padded_mxfp4(Weights(w13, w2, w13_scale, w2_scale))
    assert padded_w13.shape == (experts, 2 * 128, 256 // 2)
    assert padded_w2.shape == (experts, 256, 128 // 2)
    for expert in range(experts):
        gate, up = dequantize(padded_w13, padded_w13_scale, expert, torch.float32).chunk(2)
        pairs = zip((gate, up), dequantize(w13, w13_scale, expert, torch.float32).chunk(2), strict=True)
        down = dequantize(padded_w2, padded_w2_scale, expert, torch.float32)
        for whole, inner in (*pairs, (down, dequantize(w2, w2_scale, expert, torch.float32))):
            rows, columns = inner.shape
            assert torch.equal(whole[:rows, :columns], inner)
            assert whole.count_nonzero() == inner.count_nonzero()


def test_slices_of_gpt_oss_have_zeros_up_to_the_64_columns_that_triton_kernels_take() -> None:
    from bench_cuda_cases import Weights, padded_gate_up_in_turn

    experts, hidden, width = 2, 64, 96
    w13, w13_scale = mxfp4(experts, 2 * width, hidden, seed=0)
    w2, w2_scale = mxfp4(experts, hidden, width, seed=1)
    padded_w13, padded_w2, padded_w13_scale, padded_w2_scale = padded_gate_up_in_turn(
        Weights(w13, w2, w13_scale, w2_scale)
    )
    assert padded_w2.shape == (experts, hidden, 128 // 2)
    for expert in range(experts):
        both = dequantize(padded_w13, padded_w13_scale, expert, torch.float32).unflatten(0, (-1, 2))
        pairs = dequantize(w13, w13_scale, expert, torch.float32).unflatten(0, (-1, 2))
        assert both.shape == (128, 2, hidden)
        assert torch.equal(both[:width], pairs)
        assert not both[width:].any()
        down = dequantize(padded_w2, padded_w2_scale, expert, torch.float32)
        assert torch.equal(down[:, :width], dequantize(w2, w2_scale, expert, torch.float32))
        assert not down[:, width:].any()


def test_int4_of_gpt_oss_is_not_for_marlin_and_its_mxfp4_is() -> None:
    from bench_cuda_cases import SHAPES, why_not_marlin

    assert "gpt-oss-120b" in why_not_marlin(SHAPES["gpt-oss-120b"], "int4_g32")
    assert why_not_marlin(SHAPES["gpt-oss-120b"], "mxfp4") == ""
    assert why_not_marlin(SHAPES["qwen3-30b-a3b"], "int4_g128") == ""
