from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from tests.builders import context, cpu_machine, decided_by, dense_model, gpus, qwen3_30b_a3b, software, tiny_moe

ROOT = Path(__file__).parents[3]


def decide(model=None, hardware=None, **changes: Any) -> Decision:
    ctx = context(model or tiny_moe(), hardware or cpu_machine(), **changes)
    return decided_by(ctx, "parallelism", "flash_dmoe").decided["flash_dmoe"]


def test_on_the_cpu_build_our_kernel_is_installed_by_the_plugin():
    decision = decide()
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params == {"kernel": "cpu", "unquantized": True, "fp8": False}
    assert decision.value == "cpu kernel, bf16 weights"
    assert not decision.required


def test_no_gain_is_claimed_without_a_record():
    assert decide().gain is None
    assert "no speed-up is claimed" in decide().reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"quant_method": "fp8", "weight_bits": 8.0}, "needs unquantised expert weights, found fp8"),
        ({"expert_matrices": 2}, "needs gated experts (3 matrices), found 2"),
        ({"expert_activation": "gelu"}, "needs the activation silu, found gelu"),
        ({"expert_has_bias": True}, "needs experts without biases"),
        ({"num_experts": 2048}, "needs at most 1024 experts"),
    ],
)
def test_a_model_it_cannot_compute_is_refused_with_what_is_needed_and_found(change, why):
    decision = decide(dataclasses.replace(tiny_moe(), **change))
    assert decision.status is Status.OFF
    assert why in decision.reason


def test_a_dense_model_has_nothing_for_it():
    assert decide(dense_model(), cpu_machine(gib=64)).reason == "the model has no experts"


def test_not_built_says_why():
    decision = decide(
        software=software("cpu", cpu_ops=()), wishes={"flash_dmoe": (Wish.ON, "flag --enable-flash-dmoe")}
    )
    assert decision.status is Status.REFUSED
    assert decision.reason == "kernel not built: run build.sh"


def test_without_a_cuda_kernel_for_the_architecture_it_is_refused():
    none = software("cuda", cuda_ops=())
    assert decide(qwen3_30b_a3b(), gpus("h100_sxm", 1), software=none).reason == (
        "fused_experts has no CUDA kernel in this build"
    )
    built = software("cuda", cuda_ops=("fused_experts",))
    assert "not built for sm_80, only for sm_90a" in decide(qwen3_30b_a3b(), gpus("a100_80gb"), software=built).reason


def test_on_gpus_it_is_not_available_and_names_the_record_that_says_why():
    decision = decide(qwen3_30b_a3b(), gpus("h200", 1), software=software("cuda", cuda_ops=("fused_experts",)))
    assert decision.status is Status.UNAVAILABLE
    assert "win up to 8 tokens and lose at 16 to 128" in decision.reason
    assert all((ROOT / record).is_file() for record in decision.evidence)


def test_quantisation_by_the_users_own_argument_is_seen():
    assert "--quantization fp8 after --" in decide(pinned={"--quantization": "fp8"}).reason


def test_expert_parallelism_on_the_cpu_makes_it_required_even_when_it_is_refused():
    pinned = {"--tensor-parallel-size": "2", "--enable-expert-parallel": ""}
    assert decide(pinned=pinned).required
    biased = dataclasses.replace(tiny_moe(), expert_has_bias=True)
    refused = decide(biased, pinned=pinned)
    assert refused.required
    assert refused.status is Status.OFF
