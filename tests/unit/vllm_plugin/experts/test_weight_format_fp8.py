"""Experts in FP8: which layers are converted, which stay and say why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.vllm_plugin.experts.weight_format_fp8 import Fp8Weights  # noqa: E402
from moe_optimizer.vllm_plugin.session import PluginSession  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import NAME, layer  # noqa: E402

Activate = Callable[..., PluginSession]


@pytest.fixture
def activate(activate_pass: Activate) -> Activate:
    return functools.partial(activate_pass, "fp8")


def test_a_layer_is_converted_and_smaller(activate: Activate) -> None:
    activate()
    w13, w2 = layer()
    converted = Fp8Weights().convert(NAME, w13, w2)
    assert (converted.format, converted.why_plain) == ("fp8", "")
    assert {converted.w13.dtype, converted.w2.dtype} == {torch.float8_e4m3fn}
    assert converted.nbytes == (w13.nbytes + w2.nbytes) // 2 + 4 * 2 * 4
    assert converted.output_error is not None
    assert 0.01 < converted.output_error < 0.06


def test_the_granularity_is_the_plans(activate: Activate) -> None:
    activate(granularity="channel")
    converted = Fp8Weights().convert(NAME, *layer())
    assert converted.w13_scale is not None
    assert converted.w13_scale.shape == (4, 64)


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_an_expert_can_be_restored(activate: Activate, granularity: str) -> None:
    activate(granularity=granularity)
    w13, w2 = layer()
    dense = Fp8Weights().dense_expert(Fp8Weights().convert(NAME, w13, w2), 2)
    for restored, original in zip(dense, (w13[2], w2[2]), strict=True):
        assert restored.dtype == torch.float32
        assert (restored - original.float()).abs().max() < 0.05 * original.float().abs().max()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("model.layers.1.mlp.experts", True),
        ("layers.1.mlp.experts", True),
        ("model.layers.10.mlp.experts", False),
        ("model.layers.0.mlp.experts", False),
        ("model.sublayers.1.mlp.experts", False),
        ("", False),
    ],
)
def test_layers_that_the_plan_keeps_stay(activate: Activate, name: str, kept: bool) -> None:
    activate(keep_bf16_layers=["layers.1"])
    w13, w2 = layer()
    converted = Fp8Weights().convert(name, w13, w2)
    assert (converted.format == "plain") is kept
    assert (converted.w13 is w13) is kept
    assert bool(converted.why_plain) is kept
    assert ("the plan" in converted.why_plain) is kept


def test_a_failure_of_ours_leaves_the_layer_as_it_is(activate: Activate, monkeypatch: pytest.MonkeyPatch) -> None:
    session = activate()

    def raising(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr("moe_optimizer.ops.experts_error.experts_output_error", raising)
    assert Fp8Weights().convert(NAME, *layer()).format == "plain"
    assert "fallback: RuntimeError: injected" in session.proof.passes["fp8"].why_not
