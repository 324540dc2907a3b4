"""The bundled model through real servers on a GPU: our CUDA kernels give the tokens of stock vLLM.

The table says that ours are faster at every number of tokens, so that all of them run. In BF16 a token may differ only
where the two best logits are closer than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from moe_optimizer.inspection import ModelInspector, find_vllm, probe_hardware, read_kernel_inventory
from moe_optimizer.plan.plan import Plan
from moe_optimizer.planner import PlanRequest, make_plan
from moe_optimizer.profiles import load_profile
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, SpeedTables, TokenSpeeds
from moe_optimizer.specs.software import SoftwareSpec
from moe_optimizer.vllm_plugin.proof import PassProof, read_proofs
from moe_optimizer.vllm_plugin.server.launch import running
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import READY_TIMEOUT_S, TINY_MOE, Answer, ask, free_port

pytestmark = pytest.mark.gpu

PASS = "flash_dmoe"
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")
_WINNERS = ((1, "direct"), (8, "direct"), (16, "grouped-bf16-n16"), (4096, "grouped-bf16-n64"))


def always_ours(plan_hash: str, vllm: str) -> KernelSpeeds:
    """A table in which one of our kernels wins everywhere."""
    from moe_optimizer.ops.cuda_variants import candidate_variants
    from moe_optimizer.ops.launch_geometry.sizes import MoeSizes

    one = MoeSizes(num_tokens=1, top_k=4, num_experts=16, hidden_size=128, intermediate_size=128, weight_bytes=2)
    direct = str(candidate_variants(one)[0])
    rows = []
    for tokens, use in _WINNERS:
        names = {direct if use == "direct" else use, direct if tokens <= 8 else use, _next(tokens)}
        rows.append(TokenSpeeds(tokens=tokens, stock_us=100.0, ours_us=dict.fromkeys(sorted(names), 10.0)))
    return KernelSpeeds(
        device=torch.cuda.get_device_name(),
        weights="bf16",
        shape=LayerShape(hidden_size=128, intermediate_size=128, num_experts=16, num_global_experts=16, top_k=4),
        kernel_hash=plan_hash,
        vllm=vllm.partition("+")[0],
        driver="",
        rows=tuple(rows),
        source="a test",
    )


def _next(tokens: int) -> str:
    """The winner of the range above: it must be there at both ends of its range."""
    return next((use for number, use in _WINNERS if number > tokens and use != "direct"), "grouped-bf16-n64")


def make(*vllm_args: str) -> Plan:
    vllm, kernels = find_vllm(), read_kernel_inventory()
    if vllm is None or vllm.device != "cuda":
        pytest.skip("needs a vLLM for CUDA")
    tables = SpeedTables(tables=(always_ours(kernels.cuda_sources, vllm.version),))
    return make_plan(
        PlanRequest(
            model=ModelInspector().inspect(TINY_MOE),
            hardware=probe_hardware(),
            software=SoftwareSpec(vllm=vllm, kernels=kernels, kernel_speeds=tables),
            profile=load_profile("balanced"),
            dtype="bfloat16",
            port=free_port(),
            max_model_len=512,
            batch_size=16,
            num_gpus=1,
            vllm_args=(
                "--logprobs-mode", "raw_logits", "--attention-backend", "FLASH_ATTN",
                "--gpu-memory-utilization", "0.3", "--no-enable-prefix-caching",
                # Without it vLLM measures what is free, and stops when a server beside it gives some back meanwhile.
                "--kv-cache-memory-bytes", "512M",
                *vllm_args,
            ),
        )
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


def test_the_table_of_this_test_has_ours_at_every_number_of_tokens():
    from moe_optimizer.specs.kernel_speeds import STOCK, kernel_for, token_ranges

    ranges = token_ranges(always_ours("", "0.26.0").rows)
    assert all(kernel_for(ranges, tokens) != STOCK for tokens in range(1, 4097))
