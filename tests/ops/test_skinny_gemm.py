"""The op of few tokens' products with a weight: its contract, and plain torch where no kernel is."""

from __future__ import annotations

import pytest
import torch

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import skinny_gemm
from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from moe_optimizer.ops.skinny_gemm import MAX_TOKENS, why_no_kernel
from tests.skinny_cases import SCALES, assert_multiplied, make_skinny_case

X, W, BIAS = torch.randn(3, 64), torch.randn(5, 64), torch.randn(5)


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
def test_without_a_gpu_it_is_torchs_linear(tokens, bias):
    assert torch.equal(skinny_gemm(X[:tokens], W, bias), torch.nn.functional.linear(X[:tokens], W, bias))


@pytest.mark.parametrize("tokens", [0, 1, 3, MAX_TOKENS + 1])
@pytest.mark.parametrize("scales", SCALES)
def test_without_a_gpu_an_e4m3_weight_is_multiplied_exactly(scales, tokens):
    call = make_skinny_case(MAX_TOKENS + 1, 150, 200, bias=True, scales=scales)
    call = call._replace(x=call.x[:tokens])
    assert_multiplied(call._replace(out=skinny_gemm(call.x, call.w, call.bias, scale=call.scale)))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X[0], W), {}, "x dimensions"),
        ((X, W[:, :32]), {}, r"w dim 1 \(K\): got 32, expected 64"),
        ((X, W.T), {}, "w dim 1"),
        ((X, W.double()), {}, "w dtype"),
        ((X, W, BIAS[:4]), {}, r"bias dim 0 \(N\)"),
        ((X, W, BIAS.half()), {}, "bias dtype"),
        ((X, W), {"max_tokens": MAX_TOKENS + 1}, "max_tokens"),
        ((X, W.to(torch.float8_e4m3fn)), {}, "w dtype"),
        ((X, W), {"scale": torch.ones(1)}, "w dtype"),
        ((X, W.to(torch.float8_e4m3fn)), {"scale": torch.ones(1).double()}, "scale dtype"),
        ((X, W.to(torch.float8_e4m3fn)), {"scale": torch.ones(4)}, r"scale dim 0 \(N\): got 4, expected 5"),
        ((X, W.to(torch.float8_e4m3fn)), {"scale": torch.ones(5, 2)}, "scale dim 0: got 5, expected 1"),
    ],
)
def test_what_breaks_the_contract_is_named(arguments, options, message):
    with pytest.raises(TensorContractError, match=message):
        skinny_gemm(*arguments, **options)


def test_the_registered_op_passes_torchs_checks():
    for bias in (BIAS, None):
        arguments = (X, W, bias, None, 8)
        torch.library.opcheck(torch.ops.moe_optimizer.skinny_gemm.default, arguments)
    without_comparison = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for scales in SCALES:  # torch compares no E4M3
        call = make_skinny_case(3, 150, 192, scales=scales)
        arguments = (call.x, call.w, call.bias, call.scale, MAX_TOKENS)
        torch.library.opcheck(torch.ops.moe_optimizer.skinny_gemm.default, arguments, test_utils=without_comparison)


def test_the_kernel_is_for_gpus():
    assert "runs on a GPU" in (why_no_kernel(SkinnyGemm(X, W, None, X)) or "")
