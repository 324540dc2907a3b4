"""An adapter on the attention beside our CUDA experts: the tokens of vLLM's own experts with the same adapter."""

from __future__ import annotations

import pytest

from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from tests.gpu.at_once import Seen, asked_at_once
from tests.gpu.plans import always_ours, gpu_plan
from tests.lora_adapter import ADAPTER, lora_arguments, write_attention_adapter
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import Answer, ask

pytestmark = pytest.mark.gpu

CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")
OURS, VLLMS = "ours", "vllm"


@pytest.fixture(scope="module")
def servers(
    hopper: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Seen], dict[str, tuple[Answer, ...]]]:
    """Return what each server answered and left, and its answers with the adapter."""
    folder = tmp_path_factory.mktemp("lora")
    arguments = lora_arguments(write_attention_adapter(folder / "adapter"))
    adapted: dict[str, tuple[Answer, ...]] = {}

    def ask_adapted(key: str, info: ServerInfo) -> None:
        adapted[key] = ask(info.base_url, model=ADAPTER)

    plans = {OURS: plan_of(Wish.ON, *arguments), VLLMS: plan_of(Wish.OFF, *arguments)}
    return asked_at_once(plans, folder, then=ask_adapted), adapted


def plan_of(experts: Wish, *arguments: str) -> Plan:
    """Return a plan with our experts, or with vLLM's."""
    return gpu_plan(
        "--no-enable-prefix-caching", "--logprobs-mode", "raw_logits", *CAPTURE, *arguments, speeds=always_ours,
        wishes={"flash_dmoe": (experts, "test")}, max_model_len=512, batch_size=16,
    )  # fmt: skip


def test_answers_are_those_of_vllms_experts_up_to_ties_and_the_adapter_changes_them(
    servers: tuple[dict[str, Seen], dict[str, tuple[Answer, ...]]],
) -> None:
    seen, adapted = servers
    for want, got in ((seen[VLLMS].answered(), seen[OURS].answered()), (adapted[VLLMS], adapted[OURS])):
        for one, other in zip(want, got, strict=True):
            assert_same_up_to_a_tie(one, other, spacings=2)
    assert [each.tokens for each in adapted[OURS]] != [each.tokens for each in seen[OURS].answers]


def test_every_layer_ran_on_our_kernels(servers: tuple[dict[str, Seen], dict[str, tuple[Answer, ...]]]) -> None:
    seen, _ = servers
    seen[OURS].answered()
    proof = next(each.passes["flash_dmoe"] for each in seen[OURS].proofs if each.passes["flash_dmoe"].layers)
    assert (proof.applied, proof.ran, proof.why_not) == (True, True, "")
    # vLLM 0.26 tells experts in BF16 no name, so they are numbered.
    assert len({layer.name for layer in proof.layers}) == len(proof.layers) == 4
    assert all(layer.calls > 0 for layer in proof.layers)
