"""A report in which every section has something to show."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.measure.report.inputs import Inputs, Run, read_inputs
from moe_optimizer.measure.tune.ledger import Entry, TuneResult
from moe_optimizer.planner import make_plan
from moe_optimizer.proof.record import CompilationProof, LayerProof, MemoryProof, PassProof, Proof
from tests.builders import plans
from tests.builders.machines import gpus
from tests.builders.models import qwen3_30b_a3b
from tests.builders.quality import quality_result
from tests.builders.results import bench_result

ROOT = Path(__file__).resolve().parents[2]
STEP_RECORD = ROOT / "benchmarks" / "records" / "2026-11-22_h100_decode_step.json"


def full_inputs() -> Inputs:
    """Return what fills every section: a plan for an H100, one worker's proof, and results of every kind."""
    model = qwen3_30b_a3b()
    plan = make_plan(plans.request(model, gpus("h100_sxm")))
    on = [decision for decision in plan.decisions if decision.status.value == "on"]
    layer = LayerProof(
        name="model.layers.0.mlp.experts", num_local_experts=128, hidden_size=2048, intermediate_size=768,
        dtype="bfloat16", expert_map=False, calls=7, self_check_error=0.5,
    )  # fmt: skip
    proof = Proof(
        role="worker", rank=0, pid=4321, plan_digest=plan.digest, versions={"vllm": "0.26.0", "torch": "2.11.0"},
        model_rank=0, world_size=1, passes={
            decision.pass_name: PassProof(
                requested=decision.value, applied=True, ran=True, kernel="fused_experts (cuda)", layers=(layer,)
            )
            for decision in on
        },
        compilations=CompilationProof(before_ready=9, after_ready=0),
        memory=MemoryProof(
            weight_bytes=57 << 30, kv_cache_bytes=9 << 30, activation_bytes=2 << 30, workspace_bytes=900 << 20
        ),
    )  # fmt: skip
    return Inputs(
        runs=(Run(title="balanced", plan=plan, proofs=(proof,)),),
        bench=bench_result(),
        ledgers=read_inputs([STEP_RECORD]).ledgers,
        quality=quality_result(),
        load=plans.expert_load(model),
        tuning=_tuning(),
    )


def _tuning() -> TuneResult:
    entries = (
        Entry(
            step="ablation", what="flash_dmoe", against="without flash_dmoe", kept=True, reason="wins",
            verdict="faster", ratio=1.08, low=1.05, high=1.11, predicted=1.12,
            predicted_metric="expert kernels of one layer at 8 tokens",
        ),
        Entry(
            step="ablation", what="scheduler", against="without scheduler", kept=False, reason="does not win",
            verdict="no difference shown", ratio=1.0, low=0.99, high=1.01, no_prediction="the model is of one step",
        ),
        Entry(
            step="setting", what="--max-num-batched-tokens 512, 1024, 4096, 8192", against="", kept=False,
            reason="not tried: no time left: it takes 810 s with what must follow, 251 s are left",
        ),
    )  # fmt: skip
    return TuneResult(
        goal="throughput", metric="output tokens/s", met=True, nearest_miss=None, plan="without scheduler",
        plan_file="plan.json", plan_digest="0" * 16, passes=("flash_dmoe",), arguments={}, ended="done",
        budget_s=1200.0, spent_s=1100.0, entries=entries, environment={"model": "some/a-model"},
    )  # fmt: skip
