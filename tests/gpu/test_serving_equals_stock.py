"""The bundled model through real servers on a GPU: our CUDA kernels give the tokens of stock vLLM.

The table says that ours are faster at every number of tokens, so that all of them run. In BF16 a token may differ only
where the two best logits are closer than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moe_optimizer.launcher.launch import running
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import PassProof, read_proofs
from tests.builders import profile_with
from tests.gpu.plans import always_ours, gpu_plan
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import READY_TIMEOUT_S, Answer, ask

pytestmark = pytest.mark.gpu

PASS = "flash_dmoe"
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")


def make(*vllm_args: str, **request: Any) -> Plan:
    return gpu_plan(
        "--logprobs-mode", "raw_logits", "--no-enable-prefix-caching", *vllm_args,
        speeds=always_ours, max_model_len=512, batch_size=16, **request,
    )  # fmt: skip


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[tuple[Answer, ...], PassProof | None]]:
    def start(plan: Plan, **environment: str) -> tuple[tuple[Answer, ...], PassProof | None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            patch.setenv("VLLM_NO_USAGE_STATS", "1")
            for name, value in environment.items():
                patch.setenv(name, value)
            run_dir = tmp_path_factory.mktemp("run")
            with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
                answers = ask(info.base_url)
            # Written a last time when the server ended: with what the requests ran.
            entries = [proof.passes[PASS] for proof in read_proofs(run_dir) if PASS in proof.passes]
            return answers, next((entry for entry in entries if entry.layers), None)

    return start


@pytest.fixture(scope="module")
def stock(serve: Callable[..., tuple[tuple[Answer, ...], PassProof | None]]) -> Sequence[Answer]:
    answers, proof = serve(make(*CAPTURE), MOE_OPTIMIZER_DISABLE="1")
    assert proof is None
    return answers


def assert_ours(entry: PassProof | None) -> None:
    assert entry is not None
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert len(entry.layers) == 4
    for layer in entry.layers:
        assert layer.calls > 0
        assert any(name.startswith("direct") for name in layer.calls_by_kernel), layer.calls_by_kernel
        assert any(name.startswith("grouped") for name in layer.calls_by_kernel), layer.calls_by_kernel
        assert layer.self_check_error is not None


@pytest.mark.parametrize("graphs", [True, False], ids=["cuda-graphs", "eager"])
def test_bf16_tokens_are_stocks_up_to_ties(stock, serve, graphs):
    answers, entry = serve(make(*(CAPTURE if graphs else ("--enforce-eager",))))
    assert_ours(entry)
    for at_stock, ours in zip(stock, answers, strict=True):
        assert_same_up_to_a_tie(at_stock, ours)


@pytest.mark.parametrize("graphs", [True, False], ids=["cuda-graphs", "eager"])
def test_with_gate_and_top_k_in_our_launch_tokens_are_stocks_up_to_ties(stock, serve, graphs):
    profile = profile_with(passes={"flash_dmoe": {"fused_router": "on"}})
    answers, entry = serve(make(*(CAPTURE if graphs else ("--enforce-eager",)), profile=profile))
    assert_ours(entry)
    for layer in entry.layers:
        assert layer.router == "gate_topk up to 8"
        assert layer.router_calls > 0
    for at_stock, ours in zip(stock, answers, strict=True):
        assert_same_up_to_a_tie(at_stock, ours)


def test_the_table_of_this_test_has_ours_at_every_number_of_tokens():
    from moe_optimizer.specs.kernel_speeds import STOCK, kernel_for, token_ranges

    ranges = token_ranges(always_ours("", "0.26.0").rows)
    assert all(kernel_for(ranges, tokens) != STOCK for tokens in range(1, 4097))
