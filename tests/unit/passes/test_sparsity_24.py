from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.costs.weights import weight_parts
from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import Sparsity24Params
from moe_optimizer.specs.activation_norms import ActivationNormsFile
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    dense_model,
    gpus,
    made_plan,
    profile_with,
    qwen3_30b_a3b,
    software,
    tiny_moe,
)

ON = {"sparsity_24": (Wish.ON, "flag --enable-sparsity")}
NORMS = ActivationNormsFile(path="norms.safetensors", model="tiny-moe", tokens=4096, layers=(0, 1, 2, 3))
PLAIN_FP8 = {"fp8": (Wish.OFF, "flag --disable-fp8")}


def decided(model=None, hardware=None, profile: Any = None, **changes: Any) -> Decision:
    profile = profile or profile_with("balanced")
    ctx = context(model or tiny_moe(), hardware or cpu_machine(), profile, **({"wishes": ON} | changes))
    return decided_by(ctx, "parallelism", "fp8", "sparsity_24").decided["sparsity_24"]


def test_asked_for_on_the_cpu_the_plugin_prunes():
    decision = decided()
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.params == Sparsity24Params(weight_format="sparse_24", stored_expert_bits=9, activation_norms=None)
    assert "by magnitude alone" in decision.reason
    assert any("answers get worse" in warning for warning in decision.warnings)


def test_with_measured_norms_they_decide_too():
    decision = decided(activation_norms=NORMS)
    # The server may be started in another folder.
    assert decision.params_as(Sparsity24Params).activation_norms == str(Path.cwd() / "norms.safetensors")
    assert "magnitude x norm" in decision.reason
    assert any(re.match("norms.safetensors: .* 4096 ", each) for each in decision.evidence)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model": "other"}, "model: got other"), ({"layers": (0, 1)}, r"layers: got \[0, 1\]")],
)
def test_norms_of_something_else_are_an_error(change, words):
    with pytest.raises(InputError, match=words):
        decided(activation_norms=dataclasses.replace(NORMS, **change))


def test_a_step_reads_nine_sixteenths_of_the_expert_bytes():
    gain = decided().gain
    assert gain is not None
    assert gain.ratio.value == pytest.approx(16 / 9, rel=1e-3)


@pytest.mark.parametrize(
    ("norms", "side"), [(None, "2:4 by magnitude"), (NORMS, "2:4 by magnitude x norm")], ids=["magnitude", "norms"]
)
def test_the_plan_warns_of_the_cost_that_the_record_has_for_this_way_of_pruning(norms, side):
    decision = decided(activation_norms=norms)
    record = json.loads((Path(__file__).parents[3] / decision.evidence[0]).read_text())
    perplexity = {name: result["perplexity"] for name, result in record["results"].items()}
    more = round(100 * (perplexity[side] / perplexity["all weights"] - 1))
    (warning,) = decision.warnings
    assert f"{more} % more perplexity" in warning


def test_auto_does_not_prune():
    decision = decided(wishes={}, profile=profile_with("balanced", {"sparsity_24": {"mode": "auto"}}))
    assert decision.status is Status.OFF
    assert "no quality gate" in decision.reason


def apart(degree: int = 2) -> Any:
    return profile_with("balanced", {"parallelism": {"tensor_parallel_size": degree}})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": qwen3_30b_a3b(), "hardware": gpus("h100_sxm", 1)}, "removed its 2:4"),
        ({"model": deepseek_v3(), "hardware": gpus("h100_sxm", 8)}, "found fp8"),
        ({"model": dense_model(), "hardware": gpus("h100_sxm", 1)}, "no experts"),
        ({"dtype": "float32"}, "found float32"),
        ({"model": dataclasses.replace(tiny_moe(), moe_intermediate_size=120)}, "found 128 and 120"),
        ({"profile": apart(), "activation_norms": NORMS}, "parallel size 1"),
        ({"pinned": {"--quantization": "fp8"}}, "--quantization fp8 "),
        ({"wishes": ON | {"flash_dmoe": (Wish.OFF, "flag --disable-flash-dmoe")}}, "by flag"),
        ({"wishes": ON | {"fp8": (Wish.ON, "profile x")}}, "by profile x"),
        ({"software": software("cpu", cpu_ops=("fused_experts",))}, "sparse_experts has"),
    ],
    ids=["gpu", "fp8", "dense", "fp32", "width", "norms apart", "pinned", "no kernel", "fp8 asked", "old build"],
)
def test_what_cannot_be_pruned_is_refused_with_the_reason(changes, why):
    decision = decided(**changes)
    assert decision.status is Status.REFUSED
    assert why in decision.reason


def test_the_memory_plan_has_the_pruned_experts():
    plain, sparse = (made_plan(tiny_moe(), cpu_machine(), "balanced", wishes=PLAIN_FP8 | wishes) for wishes in ({}, ON))
    assert plain.memory is not None
    assert sparse.memory is not None
    saved = plain.memory.weight_bytes - sparse.memory.weight_bytes
    assert saved == pytest.approx(weight_parts(tiny_moe()).experts * 7 / 16, rel=2e-3)


def test_our_kernel_is_on_for_it_and_claims_no_speed():
    plan = made_plan(tiny_moe(), cpu_machine(), "balanced", wishes=ON)
    (kernel,) = [each for each in plan.decisions if each.pass_name == "flash_dmoe"]
    assert kernel.status is Status.ON
    assert "sparse_24 experts" in kernel.reason
    assert "no speed-up" in kernel.reason


ASKED = {"sparsity_24": (Wish.ON, "flag --enable-sparsity")}


@pytest.mark.parametrize(
    ("sections", "wishes", "pruned"),
    [
        ({"fp8": {"mode": "auto"}}, ASKED, True),
        ({"fp8": {"mode": "on"}}, ASKED, True),
        ({"fp8": {"mode": "auto"}, "sparsity_24": {"mode": "on"}}, {}, True),
        ({"fp8": {"mode": "on"}, "sparsity_24": {"mode": "on"}}, {}, False),
        ({"sparsity_24": {"mode": "on"}}, {"fp8": (Wish.ON, "flag --enable-fp8")}, False),
    ],
    ids=["fp8 auto", "flag before profile", "profile, fp8 auto", "both in the profile", "fp8 by flag"],
)
def test_of_pruning_and_fp8_the_one_that_was_asked_for_is_done(sections, wishes, pruned):
    profile = profile_with("aggressive", sections)
    plan = made_plan(tiny_moe(), cpu_machine(), profile, wishes=wishes)
    on = {name: plan.decision(name).status is Status.ON for name in ("fp8", "sparsity_24")}
    assert on == {"fp8": not pruned, "sparsity_24": pruned}
    left = plan.decision("fp8" if pruned else "sparsity_24").reason
    assert ("sparsity_24 is asked" if pruned else "converted to fp8") in left
