"""Our quantiser under vLLM's online FP8: the same scales, and vLLM's own wherever ours cannot be.

vLLM converts on GPUs; the function that it calls for each weight runs here too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.plan.decision import Wish
from moe_optimizer.vllm_plugin import install
from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin.experts import online_fp8_quantizer
from moe_optimizer.vllm_plugin.experts.online_fp8_quantizer import ONLINE_FP8_QUANTIZER
from moe_optimizer.vllm_plugin.patch import PatchState
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.builders import gpus, made_plan, profile_with, qwen3_30b_a3b, software
from tests.plugin_state import own_patches, own_session


@pytest.fixture
def deep_gemm() -> Iterator[Any]:
    """vLLM's module of it, whose functions would be compiled: that takes longer than all that is asked of them."""
    import torch
    from vllm.utils import deep_gemm

    with torch.compiler.set_stance("force_eager"):
        yield deep_gemm


@pytest.fixture
def activate(deep_gemm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PluginSession]]:
    """Applies a plan for a GPU in this process, and undoes it afterwards."""
    own_session(monkeypatch)
    own_patches(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    online_fp8_quantizer._say_once.cache_clear()

    def start(quantizer: str, **changes: Any) -> PluginSession:
        profile = profile_with("balanced", {"fp8": {"quantizer": quantizer}, "expert_load": {"mode": "off"}})
        plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm"), profile, wishes={"fp8": (Wish.ON, "test")}, **changes)
        return install.install_plan(plan, run_dir=tmp_path)

    yield start
    patches.undo(ONLINE_FP8_QUANTIZER.target)


def weight() -> Any:
    import torch

    return (torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def test_the_builtin_quantiser_has_the_scales_of_vllms(deep_gemm: Any, activate: Callable[..., PluginSession]) -> None:
    import torch

    expected, expected_scale = deep_gemm.per_block_cast_to_fp8(weight())
    session = activate("builtin")
    converted, scale = deep_gemm.per_block_cast_to_fp8(weight())
    entry = session.proof.passes["fp8"]
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.kernel == "FP8 quantizer builtin"
    assert (converted.shape, converted.dtype, scale.shape) == (expected.shape, expected.dtype, expected_scale.shape)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert (converted.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 1e-2


def test_vllms_conversion_calls_it_though_it_was_imported_before(
    deep_gemm: Any, activate: Callable[..., PluginSession]
) -> None:
    from vllm.model_executor.layers.quantization.online import fp8

    activate("builtin")
    assert vars(fp8)["per_block_cast_to_fp8"] is deep_gemm.per_block_cast_to_fp8


def test_the_transformer_engine_says_once_why_it_is_not_used(
    deep_gemm: Any, activate: Callable[..., PluginSession], caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = dataclasses.replace(software("cuda"), transformer_engine=True)
    session = activate("transformer_engine", software=elsewhere)
    for _ in range(3):
        deep_gemm.per_block_cast_to_fp8(weight())
    assert session.proof.passes["fp8"].kernel == "FP8 quantizer builtin"
    assert caplog.text.count("found cpu") == 1


def test_other_scales_are_vllms_own(deep_gemm: Any, activate: Callable[..., PluginSession]) -> None:
    session = activate("builtin")
    deep_gemm.per_block_cast_to_fp8(weight(), use_ue8m0=True)
    deep_gemm.per_block_cast_to_fp8(weight(), block_size=[64, 64])
    assert not session.proof.passes["fp8"].ran


def test_a_failure_of_ours_leaves_it_to_vllm(
    deep_gemm: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = activate("builtin")

    def raising(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr("moe_optimizer.ops.fp8_quant.quantize_fp8", raising)
    converted, _ = deep_gemm.per_block_cast_to_fp8(weight())
    assert converted.shape == (300, 200)
    assert "fallback: RuntimeError: injected" in session.proof.passes["fp8"].why_not


def test_auto_leaves_vllms_function_alone(deep_gemm: Any, activate: Callable[..., PluginSession]) -> None:
    own = deep_gemm.per_block_cast_to_fp8
    session = activate("auto")
    assert deep_gemm.per_block_cast_to_fp8 is own
    assert "fp8" not in session.proof.passes


def test_undone_it_is_vllms_again(deep_gemm: Any, activate: Callable[..., PluginSession]) -> None:
    own = deep_gemm.per_block_cast_to_fp8
    activate("builtin")
    assert {report.patch.target: report.state for report in patches.patch_reports()}[
        ONLINE_FP8_QUANTIZER.target
    ] is PatchState.APPLIED
    assert patches.undo(ONLINE_FP8_QUANTIZER.target)
    assert deep_gemm.per_block_cast_to_fp8 is own
