"""What the metrics page of the server says of the experts' kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.proof.record import CacheSaturation, LayerProof, PassProof, Proof
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.vllm_plugin.kernel_metrics import kernel_metrics
from tests.builders import cpu_machine, made_plan, tiny_moe

LAYER = LayerProof(
    name="layers.0", num_local_experts=4, hidden_size=8, intermediate_size=2, dtype="bfloat16", expert_map=False
)
Sample = tuple[tuple[str, ...], float]


def samples_of(run_dir: Path, name: str, *workers: dict[str, PassProof]) -> set[Sample]:
    """Return the labels but the model's, and the value, of each sample of a metric."""
    proofs = [
        Proof(
            role="worker", rank=rank, pid=rank, plan_digest="abc", versions={}, model_rank=rank,
            served_model_name="chat", passes=passes,
        )
        for rank, passes in enumerate(workers)
    ]  # fmt: skip
    metrics = kernel_metrics(run_dir, proofs)
    found = [sample for metric in metrics if metric.name == f"moe_optimizer_{name}" for sample in metric.samples]
    assert {each.labels.pop("model_name") for each in found} <= {"chat"}
    return {(tuple(each.labels.values()), each.value) for each in found}


def experts(*layers: LayerProof, why_not: str = "") -> PassProof:
    return PassProof(requested="x", applied=True, kernel="fused_experts (cpu)", layers=layers, why_not=why_not)


def named(names: Sequence[str], **changes: Any) -> list[LayerProof]:
    return [dataclasses.replace(LAYER, name=name, **changes) for name in names]


def test_calls_are_summed_over_layers_and_workers(tmp_path: Path) -> None:
    layers = named("ab", calls=3)
    several = dataclasses.replace(LAYER, calls=5, calls_by_kernel={"direct": 4, "stock": 1})
    both = {"flash_dmoe": experts(*layers)}, {"flash_dmoe": experts(several)}
    assert samples_of(tmp_path, "kernel_calls", *both) == {
        (("fused_experts (cpu)",), 6), (("direct",), 4), (("stock",), 1),
    }  # fmt: skip


def test_without_ranges_one_kernel_computes_every_number_of_tokens(tmp_path: Path) -> None:
    layers = [*named("ab", weight_format="fp8", weight_dtype="float8_e4m3fn"), *named("c")]
    assert samples_of(tmp_path, "kernel_range", {"flash_dmoe": experts(*layers)}) == {
        (("fp8", "1+", "fused_experts (cpu)"), 1), (("bf16", "1+", "fused_experts (cpu)"), 1),
    }  # fmt: skip


def write_plan(run_dir: Path, dispatch: dict[str, tuple[TokenRange, ...]]) -> None:
    plan = made_plan(tiny_moe(), cpu_machine())
    decision = dataclasses.replace(
        plan.decision("flash_dmoe"), params=FlashDmoeParams(kernel="cuda", dispatch=dispatch)
    )
    others = tuple(each for each in plan.decisions if each.pass_name != "flash_dmoe")
    (run_dir / "plan.json").write_text(plan.replace(decisions=(*others, decision)).to_json())


def test_ranges_are_those_of_the_plan_and_vllms_kernel_has_the_rest(tmp_path: Path) -> None:
    write_plan(tmp_path, {"bf16": (TokenRange(up_to=4, use="direct"), TokenRange(up_to=256, use="grouped"))})
    assert samples_of(tmp_path, "kernel_range", {"flash_dmoe": experts(LAYER)}) == {
        (("bf16", "1-4", "direct"), 1), (("bf16", "5-256", "grouped"), 1), (("bf16", "257+", "stock"), 1),
    }  # fmt: skip


def test_weights_are_named_as_they_are_stored_whatever_the_plan_names(tmp_path: Path) -> None:
    write_plan(tmp_path, {"fp8_block": (TokenRange(up_to=256, use="fp8"),), "mxfp4": (TokenRange(up_to=9, use="x"),)})
    (in_fp8,), (kept,) = named("a", weight_format="fp8", weight_dtype="float8_e4m3fn"), named("b")
    found = samples_of(tmp_path, "kernel_range", {"flash_dmoe": experts(in_fp8, kept)})
    assert found == {
        (("fp8_block", "1-256", "fp8"), 1), (("fp8_block", "257+", "stock"), 1), (("bf16", "1+", "stock"), 1),
    }  # fmt: skip


def test_a_kernel_that_was_given_no_layer_computes_nothing(tmp_path: Path) -> None:
    assert samples_of(tmp_path, "kernel_range", {"flash_dmoe": experts(why_not="fallback: cheese")}) == set()


def test_fallbacks_have_a_reason_and_a_pass_without_any_says_so(tmp_path: Path) -> None:
    plain = named("ab", why_plain="kept by the plan")
    worker = {"fp8": experts(*plain), "flash_dmoe": experts(why_not="fallback: cheese"), "expert_load": experts()}
    assert samples_of(tmp_path, "fallbacks", worker) == {
        (("fp8", "kept by the plan"), 2), (("flash_dmoe", "fallback: cheese"), 1),
        (("fp8", "none"), 0), (("flash_dmoe", "none"), 0), (("expert_load", "none"), 0),
    }  # fmt: skip


def test_reasons_that_name_layers_do_not_make_a_series_each(tmp_path: Path) -> None:
    layers = [dataclasses.replace(LAYER, why_plain=f"layer {number} is odd") for number in range(100)]
    found = samples_of(tmp_path, "fallbacks", {"fp8": experts(*layers)})
    assert len(found) <= 10
    assert sum(value for _, value in found) == 100


def test_saturation_is_the_mean_over_the_weights_of_fp8_layers(tmp_path: Path) -> None:
    layers = [dataclasses.replace(LAYER, saturated=share) for share in (0.01, 0.03)]
    found = samples_of(tmp_path, "fp8_saturated_weights_ratio", {"fp8": experts(*layers, *named("c"))})
    assert found == {((), 0.02)}


def test_without_fp8_no_weight_is_saturated_and_of_what_vllm_converts_nothing_is_said(tmp_path: Path) -> None:
    assert samples_of(tmp_path, "fp8_saturated_weights_ratio", {"flash_dmoe": experts(LAYER)}) == {((), 0)}
    assert samples_of(tmp_path, "fp8_saturated_weights_ratio", {"fp8": PassProof(requested="x")}) == set()


def test_the_samples_of_an_fp8_cache_are_summed_over_workers_and_0_without_one(tmp_path: Path) -> None:
    proofs = [
        Proof(role="worker", rank=rank, pid=rank, plan_digest="abc", versions={}, cache_saturation=found)
        for rank, found in enumerate([CacheSaturation(values=8, saturated=1), CacheSaturation(values=4), None])
    ]
    for shown, expected in ((proofs, (12, 1)), (proofs[2:], (0, 0))):
        values = {each.name: each.samples[0].value for each in kernel_metrics(tmp_path, shown) if each.samples}
        found = tuple(values[f"moe_optimizer_fp8_cache_{name}_values"] for name in ("sampled", "saturated"))
        assert found == expected
