"""Experts in INT4: the plan's groups, what is stored and computed. What all formats share: test_weight_formats.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.ops.int4 import dequantize_int4, quantize_int4  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format_int4 import Int4Weights  # noqa: E402
from moe_optimizer.vllm_plugin.session import PluginSession  # noqa: E402
from tests.unit.vllm_plugin.experts.converted_layers import NAME, layer  # noqa: E402


@pytest.mark.parametrize("group", [32, 64])
def test_a_layer_is_converted_in_the_plans_groups_with_its_change(
    activate_pass: Callable[..., PluginSession], group: int
) -> None:
    activate_pass("four_bit", format="int4", group=group)
    narrow = layer()
    w13, w2 = (torch.cat((weight, weight), dim) for dim, weight in enumerate(narrow, start=1))  # a width of 64
    converted = Int4Weights().convert(NAME, w13, w2)
    assert (converted.format, converted.why_plain) == ("int4", "")
    assert converted.nbytes * 16 == (w13.nbytes + w2.nbytes) * (4 + 16 / group)
    assert converted.output_error is not None
    assert 0.05 < converted.output_error < 0.2
    dense = Int4Weights().dense_expert(converted, 2)
    for restored, original in zip(dense, (w13, w2), strict=True):
        assert torch.equal(restored, dequantize_int4(quantize_int4(original[2], group)))
