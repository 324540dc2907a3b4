"""Experts placed on two GPUs: the tokens of stock vLLM, by initial placement and while vLLM's EPLB moves experts.

Eager, because what is shown is where weights and tokens go; CUDA graphs replay the same kernels.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.pass_params import ExpertPlacementParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import PassProof, read_proofs
from moe_optimizer.proof.verdict import model_holders
from tests.builders import placement_load, profile_with, tiny_moe, with_arguments
from tests.gpu.plans import EXPERTS, always_ours, gpu_plan
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask

pytestmark = pytest.mark.gpu

PASS = "expert_placement"
GPUS = 2
REPLICAS = 2
STEPS_BETWEEN = 16
"""Steps after which vLLM places experts anew."""
REARRANGEMENTS = 2
"""A first one starts from experts in order; only a second one starts from a placement."""
REARRANGED_TIMEOUT_S = 180.0
ROUNDING = 4
"""BF16 spacings: two ranks round their sums, and experts are summed in another order when they live elsewhere."""


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    """Skip unless there are two."""
    if torch.cuda.device_count() < GPUS:
        pytest.skip(f"needs {GPUS} CUDA GPUs, found {torch.cuda.device_count()}")


def make(*vllm_args: str, placed: dict[str, Any] | None = None, redundant: int = 0, **request: Any) -> Plan:
    """Return a plan for the bundled model on two GPUs.

    Args:
        vllm_args: of `vllm serve`.
        placed: the profile's section; None: experts are not placed.
        redundant: experts that the GPUs hold beside those of the model.
        request: further fields of the request.
    """
    return gpu_plan(
        "--tensor-parallel-size", str(GPUS), "--logprobs-mode", "raw_logits", "--enforce-eager",
        # Sums go through NCCL: how they do is not what is shown, and vLLM's own way needs GPUs that see each other's
        # memory.
        "--no-enable-prefix-caching", "--disable-custom-all-reduce", *vllm_args,
        # A table in which our kernel wins: initial placement needs it.
        speeds=functools.partial(always_ours, num_experts=(EXPERTS + redundant) // GPUS, of=EXPERTS + redundant),
        profile=profile_with("balanced", {PASS: placed or {"mode": "off"}}),
        required=frozenset({PASS} if placed else ()),
        max_model_len=512,
        batch_size=16,
        num_gpus=GPUS,
        **request,
    )  # fmt: skip


Serve = Callable[..., tuple[Sequence[Answer], list[PassProof], list[PassProof]]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Serve a plan, let it settle, ask; returns the answers, and what each worker proves of placement and kernels."""

    def start(
        plan: Plan, settle: Callable[[str, Path], None] = lambda url, run_dir: None, **environment: str
    ) -> tuple[Sequence[Answer], list[PassProof], list[PassProof]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            patch.setenv("VLLM_NO_USAGE_STATS", "1")
            for name, value in environment.items():
                patch.setenv(name, value)
            run_dir = tmp_path_factory.mktemp("run")
            with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
                settle(info.base_url, run_dir)
                answers = ask(info.base_url)
            return answers, proofs_of(PASS, run_dir), proofs_of("flash_dmoe", run_dir)

    return start


def proofs_of(name: str, run_dir: Path) -> list[PassProof]:
    """Return what the workers say of a pass, by rank."""
    return [proof.passes[name] for proof in model_holders(read_proofs(run_dir)) if name in proof.passes]


@pytest.fixture(scope="module")
def stock(serve: Serve) -> Sequence[Answer]:
    """vLLM's own kernel with a slice of every expert on each GPU."""
    answers, proofs, _ = serve(make(), MOE_OPTIMIZER_DISABLE="1")
    assert proofs == []
    return answers


def test_placed_experts_give_the_tokens_of_stock(stock: Sequence[Answer], serve: Serve) -> None:
    # Weights that moved without their map, or a map without its weights, send tokens to wrong experts.
    plan = make("--enable-expert-parallel", placed={"mode": "on"}, expert_load=placement_load(tiny_moe()))
    params = plan.decision(PASS).params_as(ExpertPlacementParams)
    assert params.mode == "initial"
    for row in params.experts.values():
        in_order = {str(expert) for expert in range(EXPERTS // GPUS)}
        assert set(row.split()[: EXPERTS // GPUS]) != in_order, "a layer's experts did not move"
    answers, proofs, kernels = serve(plan)
    assert [entry.ran for entry in kernels] == [True] * GPUS
    assert len(proofs) == GPUS
    for entry in proofs:
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert entry.digest == params.digest
    for at_stock, ours in zip(stock, answers, strict=True):
        assert_same_up_to_a_tie(at_stock, ours, spacings=ROUNDING)


def test_experts_that_vllm_moves_by_our_policy_give_the_tokens_of_stock(stock: Sequence[Answer], serve: Serve) -> None:
    plan = make("--enable-expert-parallel", placed={"mode": "on", "redundant_experts": REPLICAS}, redundant=REPLICAS)
    assert plan.decision(PASS).params == ExpertPlacementParams(mode="eplb", num_redundant_experts=REPLICAS)

    def wait_until_rearranged(url: str, run_dir: Path) -> None:
        deadline = time.monotonic() + REARRANGED_TIMEOUT_S
        while not all(entry.rearrangements >= REARRANGEMENTS for entry in proofs_of(PASS, run_dir)):
            assert time.monotonic() < deadline, proofs_of(PASS, run_dir)
            ask(url)

    answers, proofs, kernels = serve(with_short_intervals(plan), settle=wait_until_rearranged)
    assert [entry.ran for entry in kernels] == [True] * GPUS, "vLLM's own kernels read the experts that moved"
    assert len(proofs) == GPUS
    for entry in proofs:
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        assert entry.rearrangements >= REARRANGEMENTS
        assert entry.moved_experts > 0
    for at_stock, ours in zip(stock, answers, strict=True):
        assert_same_up_to_a_tie(at_stock, ours, spacings=ROUNDING)


def with_short_intervals(plan: Plan) -> Plan:
    """Return the plan with EPLB's steps so close that a test sees several rearrangements."""
    config = json.loads(plan.serve_args.values["--eplb-config"])
    config |= {"step_interval": STEPS_BETWEEN, "window_size": STEPS_BETWEEN}
    return with_arguments(plan, "--eplb-config", json.dumps(config))
