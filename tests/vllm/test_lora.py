"""LoRA adapters on the attention, beside our experts: what vLLM says of such layers, and what a server answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import Proof, read_proofs
from moe_optimizer.specs.lora_targets import reach_experts
from tests.lora_adapter import ADAPTER, lora_arguments, write_attention_adapter, write_summed
from tests.vllm.answers import assert_ours_ran
from tests.vllm.conftest import READY_TIMEOUT_S, Served, ask, plan_here, tiny_plan


@pytest.mark.parametrize(
    "target_modules",
    [
        None, [], ["q_proj", "o_proj"], ["gate_proj", "down_proj", "gate_up_proj"], ["experts"], ["shared_experts"],
        ["model.layers.0.mlp.experts"], ["experts.0.gate_proj"], ["mlp"],
    ],
)  # fmt: skip
def test_names_that_reach_experts_are_those_by_which_vllm_wraps_them(target_modules: list[str] | None) -> None:
    from vllm.lora.utils import is_in_target_modules

    matrices = [f"experts.{expert}.{name}" for expert in range(2) for name in ("gate_proj", "up_proj", "down_proj")]
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "experts": matrices}
    wrapped = is_in_target_modules("model.layers.0.mlp.experts", target_modules, packed)
    assert reach_experts(target_modules) is wrapped


def answered(plan: Plan, run_dir: Path, *models: str | None) -> tuple[list[list[tuple[int, ...]]], tuple[Proof, ...]]:
    """Return the tokens that a server answers by each of its models, and its proofs."""
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        tokens = [[answer.tokens for answer in ask(info.base_url, model=model)] for model in models]
    return tokens, read_proofs(run_dir)


def test_beside_an_adapter_on_the_attention_our_experts_give_stocks_tokens(
    stock_fp32: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_attention_adapter(tmp_path / "adapter")
    plan = tiny_plan("--enforce-eager", *lora_arguments(adapter))
    (plain, adapted), proofs = answered(plan, tmp_path / "ours", None, ADAPTER)
    assert_ours_ran(proofs, workers=1, dtype="float32")
    assert plain == [answer.tokens for answer in stock_fp32.answers]
    # vLLM's CPU build cannot serve the adapter by itself: it takes Triton's experts. It serves the sum of both.
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    summed = plan_here("--enforce-eager", model=write_summed(tmp_path / "summed", adapter), dtype="float32")
    (want,), _ = answered(summed, tmp_path / "stock", None)
    assert adapted == want
    assert adapted != plain
