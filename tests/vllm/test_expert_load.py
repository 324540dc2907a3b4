"""The counts of real servers: tokens x top-k in every layer, once each, however many workers there are."""

from __future__ import annotations

from typing import Any

import torch

from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.vllm_plugin.worker.execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.worker.model_loaded import WORKER_MODEL_LOADED
from tests.vllm.conftest import TINY_MOE, Served
from tests.vllm.counted import MAX_TOKENS, PROMPT, ROUTED_TOKENS, Counted

LAYERS, EXPERTS, TOP_K = 4, 16, 4


def counted(served: Served) -> Counted:
    assert served.counted is not None
    return served.counted


def assert_counts_are_right(served: Served) -> None:
    """Every layer routed each token of the request to top-k different experts."""
    counts = counted(served).request
    assert [sum(layer) for layer in counts] == [ROUTED_TOKENS * TOP_K] * LAYERS
    assert all(len(layer) == EXPERTS and max(layer) <= ROUTED_TOKENS for layer in counts)
    assert counted(served).parts == 1
    assert counted(served).merged == counted(served).on_metrics
    assert [layer.name for layer in counted(served).merged.layers] == [
        f"model.layers.{index}.mlp.experts" for index in range(LAYERS)
    ]


def test_a_known_request_is_counted_in_the_compiled_model(ours_fp32: Served) -> None:
    assert_counts_are_right(ours_fp32)
    assert_proven(ours_fp32, workers=1)


def test_the_counts_are_what_the_routers_of_another_implementation_choose(ours_fp32: Served) -> None:
    assert counted(ours_fp32).request == chosen_by_transformers()


def chosen_by_transformers() -> tuple[tuple[int, ...], ...]:
    """Return tokens by layer and expert of the known request, as hooks on the routers of transformers see them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)

    def count(layer: int, gate_output: Any) -> None:
        logits = gate_output[0] if isinstance(gate_output, tuple) else gate_output
        chosen = logits.reshape(-1, EXPERTS).topk(TOP_K).indices.flatten()
        counts[layer] += torch.bincount(chosen, minlength=EXPERTS)

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output, index=index: count(index, output))
    tokens = torch.tensor([PROMPT])
    model.generate(tokens, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False)
    return tuple(map(tuple, counts.tolist()))


def test_expert_parallel_workers_count_once(ours_expert_parallel: Served) -> None:
    assert_counts_are_right(ours_expert_parallel)
    assert_proven(ours_expert_parallel, workers=2)


def assert_proven(served: Served, *, workers: int) -> None:
    holders = model_holders(served.proofs)
    assert len(holders) == workers
    for proof in holders:
        entry = proof.passes["expert_load"]
        assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
        states = {patch.target: patch.state for patch in proof.patches}
        assert states[WORKER_EXECUTE_MODEL.target] == states[WORKER_MODEL_LOADED.target] == "applied"


def test_the_same_request_uses_the_same_experts_with_one_worker_and_with_two(
    ours_fp32: Served, ours_expert_parallel: Served
) -> None:
    assert counted(ours_fp32).request == counted(ours_expert_parallel).request


def test_off_means_no_counts(plain_tensor_parallel: Served) -> None:
    assert plain_tensor_parallel.proofs
    for proof in plain_tensor_parallel.proofs:
        assert "expert_load" not in proof.passes
    names = {path.name for path in plain_tensor_parallel.run_dir.iterdir()}
    assert not any("expert_load" in name for name in names), names
