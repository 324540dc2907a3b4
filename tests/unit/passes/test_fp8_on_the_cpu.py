"""FP8 on the CPU build: the plugin converts the experts."""

from __future__ import annotations

import re

import pytest

from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams, Fp8Params
from tests.builders import cpu_machine, decided_by, software, tiny_moe
from tests.unit.passes.fp8_decisions import WITHOUT_FLASH, on_cpu, planned


def test_on_the_cpu_the_plugin_converts_the_experts_and_the_linears_stay():
    decision = on_cpu()
    assert (decision.status, decision.applier, decision.value) == (Status.ON, Applier.PLUGIN, "experts in FP8")
    assert decision.vllm_args.words == ()
    assert decision.params == Fp8Params(
        weight_format="fp8",
        granularity="block",
        quantizer="builtin",
        excluded_layers=(),
        max_layer_error=0.08,
        expert_bits=8,
        linear_bits=None,
        stored_expert_bits=8,
        stored_linear_bits=None,
    )
    (why,) = (why for part, why in decision.rejected.items() if "linears" in part)
    assert re.search("CPU build .*bfloat16$", why)


def test_settings_of_the_profile_reach_the_plugin():
    settings = {"granularity": "channel", "keep_bf16_layers": ["layers.2", "layers.0"], "max_layer_error": None}
    params = on_cpu(settings=settings).params_as(Fp8Params)
    assert (params.granularity, params.excluded_layers, params.max_layer_error) == ("channel", (0, 2), None)


def test_linears_asked_for_by_name_are_warned_about_on_the_cpu():
    (warning,) = on_cpu(settings={"linears": "on"}).warnings
    assert re.match(r"fp8\.linears \(profile aggressive\): ", warning)


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 2.0), ("float32", 4.0)])
def test_the_gain_on_the_cpu_is_in_bytes_of_what_is_served(dtype, ratio):
    gain = on_cpu(dtype=dtype).gain
    assert gain is not None
    assert "bytes" in gain.metric
    assert gain.ratio.value == pytest.approx(ratio, rel=0.001)


def test_it_needs_our_kernel_on_the_cpu():
    decision = on_cpu(wishes=WITHOUT_FLASH)
    assert decision.status is Status.REFUSED
    assert re.search("flash_dmoe .*flag --disable-flash-dmoe", decision.reason)


def test_it_needs_the_kernel_built_on_the_cpu():
    assert "build.sh" in on_cpu(software=software("cpu", cpu_ops=())).reason


def test_on_the_cpu_our_kernel_is_on_where_the_experts_are_converted():
    ctx = decided_by(planned(tiny_moe(), cpu_machine()), "flash_dmoe")
    assert ctx.decided["flash_dmoe"].status is Status.ON
    assert "fp8" in ctx.decided["flash_dmoe"].value
    assert not ctx.decided["flash_dmoe"].params_as(FlashDmoeParams).measure  # there is no other kernel to choose


def test_on_the_cpu_the_builtin_quantizer_converts_whatever_is_asked_for():
    assert on_cpu().warnings == ()
    assert "quantizer: builtin" in on_cpu().evidence
    decision = on_cpu(settings={"quantizer": "transformer_engine"})
    assert decision.params_as(Fp8Params).quantizer == "builtin"
    (warning,) = decision.warnings
    assert re.match("fp8.quantizer transformer_engine: .*builtin", warning)
