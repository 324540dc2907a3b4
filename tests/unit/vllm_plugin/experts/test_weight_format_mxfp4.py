"""Experts in four bits: which layers are converted, which stay and say why."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format_mxfp4 import Mxfp4Weights  # noqa: E402
from moe_optimizer.vllm_plugin.session import PluginSession  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import NAME, layer  # noqa: E402

Activate = Callable[..., PluginSession]


@pytest.fixture
def activate(activate_pass: Activate) -> Activate:
    return functools.partial(activate_pass, "four_bit")


def test_a_layer_is_converted_with_its_change_and_takes_four_and_a_quarter_bits(activate: Activate) -> None:
    activate()
    w13, w2 = layer()
    converted = Mxfp4Weights().convert(NAME, w13, w2)
    assert (converted.format, converted.why_plain) == ("mxfp4", "")
    assert converted.nbytes * 16 == (w13.nbytes + w2.nbytes) * 4.25
    assert converted.output_error is not None
    assert 0.05 < converted.output_error < 0.2
    dense = Mxfp4Weights().dense_expert(converted, 2)
    for restored, original in zip(dense, (w13, w2), strict=True):
        assert torch.equal(restored, dequantize_mxfp4(*quantize_mxfp4(original[2])))


def test_a_layer_stays_where_the_plan_keeps_it(activate: Activate) -> None:
    activate(keep_bf16_layers=["layers.1"])
    w13, w2 = layer()
    kept = Mxfp4Weights().convert(NAME, w13, w2)
    assert (kept.format, kept.w13 is w13) == ("plain", True)
    assert "plan" in kept.why_plain
    assert Mxfp4Weights().convert(NAME.replace("1", "2"), w13, w2).format == "mxfp4"


def test_new_weights_beyond_the_budget_are_converted_and_said(activate: Activate) -> None:
    session = activate(max_layer_error=0.05)
    assert Mxfp4Weights().convert_again(NAME, *layer()).format == "mxfp4"
    assert "new weights" in session.proof.passes["four_bit"].why_not
