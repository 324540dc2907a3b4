"""Models that are refused, dense ones, and any model on any machine."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.model import Int4Scheme
from tests.builders import (
    cpu_machine,
    dense_model,
    gpus,
    made_plan,
    qwen3_30b_a3b_int4,
    request,
    shaped_model,
    tiny_moe,
)
from tests.examples import examples
from tests.unit.planner.refusal import refused


def test_a_model_that_vllm_does_not_have_is_unsupported():
    model = tiny_moe(servable=False, servable_reason="vLLM 0.32.0 has no FooForCausalLM")
    assert "has no FooForCausalLM" in str(refused(request(model, cpu_machine()), UnsupportedError))


def test_code_from_the_model_needs_a_flag():
    model = tiny_moe(needs_remote_code=True)
    error = refused(request(model, cpu_machine()), UnsupportedError)
    assert "--trust-remote-code" in str(error.hint)
    plan = made_plan(model, cpu_machine(), trust_remote_code=True)
    assert "--trust-remote-code" in plan.serve_args
    assert "--trust-remote-code" in plan.plain_args


def test_gptq_with_zero_points_is_planned_and_said_to_be_refused_by_vllm():
    model = qwen3_30b_a3b_int4(int4=Int4Scheme(group=128, zero_points=True, act_order=False))
    said = [warning for warning in made_plan(model, gpus("h100_sxm", 1)).warnings if "zero points" in warning]
    assert said
    assert "--quantization" in said[0]
    own = made_plan(model, gpus("h100_sxm", 1), vllm_args=("--quantization", "moe_wna16"))
    assert not any("zero points" in warning for warning in own.warnings)


def test_a_dense_model_is_planned_and_said_to_have_no_experts():
    plan = made_plan(dense_model(), gpus("l4", 1))
    assert any("no experts" in warning for warning in plan.warnings)


def test_the_embedded_engine_is_given_none_of_vllms_arguments():
    off = dict.fromkeys(PASS_NAMES, (Wish.OFF, "--engine embedded"))
    plan = made_plan(tiny_moe(), cpu_machine(), engine="embedded", wishes=off)
    assert plan.engine == "embedded"
    assert not {"--shutdown-timeout", "--dtype", "--trust-remote-code"} & plan.serve_args.values.keys()
    assert "VLLM_CPU_KVCACHE_SPACE" not in plan.serve_env
    assert not any("vLLM" in warning for warning in plan.warnings)


def test_the_embedded_engine_runs_on_one_machine():
    asked = request(tiny_moe(), gpus("h200", 8), engine="embedded", num_nodes=2)
    assert "--nodes 2" in str(refused(asked, UnsupportedError))


MODELS = st.builds(
    shaped_model,
    hidden=st.sampled_from([64, 1024, 2048, 7168]),
    layers=st.integers(1, 64),
    heads=st.sampled_from([1, 4, 6, 12, 24, 40, 64]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    vocab=st.integers(100, 200_000),
    experts=st.sampled_from([0, 2, 8, 60, 128, 256]),
    top_k=st.integers(1, 2),
    width=st.sampled_from([64, 96, 768, 1408, 14336]),
    shared=st.integers(0, 2),
    kind=st.sampled_from(["gqa", "mla"]),
    max_position=st.sampled_from([0, 1, 2048, 40960, 10_000_000]),
    quant_method=st.sampled_from([None, "fp8", "mxfp4"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    state_bytes_per_sequence=st.sampled_from([0, 50_000_000]),
)


MACHINES = st.one_of(
    st.builds(gpus, st.sampled_from(["h100_sxm", "l4", "a100_40gb", "b200"]), st.integers(1, 8)),
    st.builds(cpu_machine, cores=st.integers(1, 64), gib=st.sampled_from([0.5, 4, 64, 2048])),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    model=MODELS,
    machine=MACHINES,
    profile=st.sampled_from(["conservative", "balanced", "aggressive", "throughput", "single_h100"]),
    batch=st.one_of(st.none(), st.integers(1, 5000)),
    length=st.one_of(st.none(), st.integers(1, 2_000_000)),
    enabled=st.sets(st.sampled_from(["expert-parallel", "kv-cache", "kv-tiering", "fp8", "graph-capture"])),
)
def test_any_model_on_any_machine_gives_a_whole_plan_or_does_not_fit(model, machine, profile, batch, length, enabled):
    try:
        plan = make_plan(  # make_plan verifies what it returns
            request(
                model,
                machine,
                profile,
                batch_size=batch,
                max_model_len=length,
                any_model_len=True,
                wishes=resolve_wishes(sorted(enabled), []),
            )
        )
    except UnsupportedError:
        return
    assert plan.memory.fits
    if plan.layouts is not None:
        assert plan.layouts.estimate.kv_tokens == plan.memory.kv_tokens
    assert Plan.from_json(plan.to_json(), origin="plan") == plan
