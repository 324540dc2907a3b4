"""The passes that only a GPU can show, on the bundled model through real servers: FP8, counting, FP8 cache, tiering."""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.env import EXPERT_SERIES
from moe_optimizer.launcher.launch import ServerInfo, running
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import PassProof
from moe_optimizer.proof.verdict import model_holders
from tests.builders import profile_with
from tests.gpu.plans import gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S
from tests.vllm.counted import ROUTED_TOKENS, count_one_request
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

pytestmark = pytest.mark.gpu

LAYERS, TOP_K = 4, 4
MAX_PERPLEXITY_RATIO = {"fp8": 1.02, "kv_cache": 1.02}
"""Against FP32. Online FP8 rounds the activations too, an FP8 cache the keys and values."""


def plan_with(passes: dict[str, dict[str, Any]], wished: tuple[str, ...], *vllm_args: str) -> Plan:
    """Return a plan for the bundled model on this GPU, in which the wished passes are required."""
    return gpu_plan(
        *vllm_args,
        profile=profile_with("balanced", passes),
        wishes=dict.fromkeys(wished, (Wish.ON, "test")),
        required=frozenset(wished),
        max_model_len=520,
        batch_size=8,
    )


@pytest.fixture(scope="module")
def fp32_perplexity() -> float:
    return reference_perplexity()


def proven(info: ServerInfo, name: str) -> PassProof:
    (holder,) = model_holders(info.proofs)
    return holder.passes[name]


def test_online_fp8_serves_within_the_bound_and_its_tokens_are_counted(
    tmp_path: Path, fp32_perplexity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXPERT_SERIES, "1")
    plan = plan_with({"fp8": {"mode": "on"}}, ("fp8", "expert_load"))
    with running(plan, run_dir=tmp_path, ready_timeout_s=READY_TIMEOUT_S) as info:
        measured = heldout_perplexity(info)
        counted = count_one_request(info)
    rows = {row.pass_name: row for row in info.rows}
    assert (rows["fp8"].applied, rows["fp8"].ran) == ("by flags", "yes, VLLM_USE_DEEP_GEMM_E8M0=0"), rows["fp8"]
    assert fp32_perplexity != pytest.approx(measured, rel=1e-5)  # silently not converted, it would be BF16's
    assert measured < fp32_perplexity * MAX_PERPLEXITY_RATIO["fp8"]
    assert proven(info, "expert_load").ran is True
    assert [sum(layer) for layer in counted.request] == [ROUTED_TOKENS * TOP_K] * LAYERS
    assert counted.merged == counted.on_metrics


def test_our_quantiser_under_vllms_conversion_gives_the_same_model(tmp_path: Path, fp32_perplexity: float) -> None:
    plan = plan_with({"fp8": {"mode": "on", "quantizer": "builtin"}}, ("fp8",), "--enforce-eager")
    with running(plan, run_dir=tmp_path, ready_timeout_s=READY_TIMEOUT_S) as info:
        measured = heldout_perplexity(info)
    entry = proven(info, "fp8")
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert fp32_perplexity != pytest.approx(measured, rel=1e-5)
    assert measured < fp32_perplexity * MAX_PERPLEXITY_RATIO["fp8"]


def test_an_fp8_cache_serves_within_the_bound(tmp_path: Path, fp32_perplexity: float) -> None:
    plan = plan_with({"kv_cache": {"dtype": "fp8"}}, ("kv_cache",), "--enforce-eager")
    with running(plan, run_dir=tmp_path, ready_timeout_s=READY_TIMEOUT_S) as info:
        measured = heldout_perplexity(info)
        text = (info.run_dir / "server.log").read_text(errors="replace")
    assert "kv_cache_dtype=fp8" in text
    assert measured < fp32_perplexity * MAX_PERPLEXITY_RATIO["kv_cache"]


def test_blocks_that_left_the_gpu_come_back_from_host_memory(tmp_path: Path) -> None:
    # 48 blocks of 16 tokens: the second and third prompt push out the first.
    plan = plan_with(
        {"kv_cache": {"tiering": "on"}}, (), "--enforce-eager", "--num-gpu-blocks-override", "48", "--block-size", "16"
    )
    (decision,) = [each for each in plan.decisions if each.pass_name == "kv_cache"]
    assert decision.params_as(KvCacheParams).offload_gib, decision
    with running(plan, run_dir=tmp_path, ready_timeout_s=READY_TIMEOUT_S) as info:
        prompts = [[100 + (seed * 97 + position * 31) % 1500 for position in range(400)] for seed in range(3)]
        first = [complete(info, prompt) for prompt in prompts]
        before = metric(info, "vllm:external_prefix_cache_hits_total")
        again = complete(info, prompts[0])
        after = metric(info, "vllm:external_prefix_cache_hits_total")
    assert after - before >= 256, (before, after)
    assert again == first[0]


def complete(info: ServerInfo, prompt: list[int]) -> str:
    body = {"model": info.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{info.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["text"]


def metric(info: ServerInfo, name: str) -> float:
    with urllib.request.urlopen(f"{info.base_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
    return math.fsum(values)
