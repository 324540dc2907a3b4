"""Transformer Engine as quantiser: its own results where it is installed, our use of it everywhere."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.errors import KernelUnavailableError, TensorContractError
from moe_optimizer.ops import fp8_quant
from moe_optimizer.ops.fp8_quant import quantize_fp8
from moe_optimizer.ops.fp8_transformer_engine import quantize_with_transformer_engine, why_not_transformer_engine

CUDA = torch.device("cuda")


def random_weight(device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(2, 256, 384, generator=generator) * 0.02).bfloat16().to(device)


@pytest.mark.gpu
def test_its_scales_are_those_of_the_builtin_quantiser() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    reason = why_not_transformer_engine(CUDA, granularity="block")
    if reason:
        pytest.skip(f"Transformer Engine: {reason}")
    weight = random_weight("cuda")
    ours, scale = quantize_fp8(weight)
    theirs, their_scale = quantize_fp8(weight, quantizer="transformer_engine")
    torch.testing.assert_close(their_scale, scale, rtol=1e-6, atol=0)
    # A quotient between two numbers may go either way with the last bit of the scale.
    assert (theirs.view(torch.uint8) != ours.view(torch.uint8)).float().mean() < 1e-3


class FakeQuantizer:
    """Has the call and the padded results of Transformer Engine's quantiser of blocks."""

    def __init__(self, dtype: str, **options: Any) -> None:
        assert (dtype, options["rowwise"], options["block_scaling_dim"]) == ("e4m3", True, 2)
        assert (options["force_pow_2_scales"], options["amax_epsilon"]) == (False, 0.0)

    def __call__(self, matrix: torch.Tensor) -> SimpleNamespace:
        quantized, scale = quantize_fp8(matrix)
        padded = torch.full((scale.shape[0], -(-scale.shape[1] // 4) * 4), float("nan"))
        padded[:, : scale.shape[1]] = scale
        return SimpleNamespace(_rowwise_data=quantized.view(torch.uint8), _rowwise_scale_inv=padded)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizers: Any = ModuleType("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    quantizers.Float8BlockQuantizer = FakeQuantizer
    bindings: Any = ModuleType("transformer_engine_torch")
    bindings.DType = SimpleNamespace(kFloat8E4M3="e4m3")
    for module in (quantizers, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for package in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))


def test_its_padding_is_cut_off(installed: None) -> None:
    matrix = random_weight()[0]
    quantized, scale = quantize_with_transformer_engine(matrix)
    expected, expected_scale = quantize_fp8(matrix)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


def test_every_expert_is_converted(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_quant, "why_not_transformer_engine", lambda _device, granularity: "")
    weight = random_weight()
    for result, expected in zip(
        quantize_fp8(weight, quantizer="transformer_engine"), quantize_fp8(weight), strict=True
    ):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


def test_weights_that_are_not_finite_are_refused_here_too(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_quant, "why_not_transformer_engine", lambda _device, granularity: "")
    monkeypatch.setattr(fp8_quant, "quantize_with_transformer_engine", lambda matrix: quantize_fp8(matrix.nan_to_num()))
    weight = random_weight()
    weight[1, 3, 5] = float("nan")
    with pytest.raises(TensorContractError, match=r"expert 1 .*infinite"):
        quantize_fp8(weight, quantizer="transformer_engine")


@pytest.mark.parametrize(
    ("device", "granularity", "reason"),
    [
        ("cuda", "channel", "output channel"),
        ("cpu", "block", "found cpu"),
    ],
)
def test_what_it_cannot_convert_has_a_reason(installed: None, device: str, granularity: str, reason: str) -> None:
    assert why_not_transformer_engine(torch.device(device), granularity=granularity).endswith(reason)


def test_it_can_where_it_is_installed(installed: None) -> None:
    assert why_not_transformer_engine(CUDA, granularity="block") == ""


def test_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "imported" in why_not_transformer_engine(CUDA, granularity="block")


def test_asked_for_where_it_cannot_is_an_error_with_the_reason() -> None:
    with pytest.raises(KernelUnavailableError, match=r": Transformer Engine:.* cpu$"):
        quantize_fp8(random_weight(), quantizer="transformer_engine")
