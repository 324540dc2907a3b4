"""Each optimization has a switch, and no switch changes an output."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.engine.cuda_graphs import capture_sizes
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.model_runner import ModelRunner
from tests.engine.tiny_models import TINY_MOE

PROMPTS = ["def fibonacci(n):\n", "import os\n\n", "def fibonacci(n):\n    return"]
SWITCHES: dict[str, dict[str, Any]] = {
    "kv_cache": {"kv_cache": False},
    "continuous_batching": {"continuous_batching": False},
    "gpu_sampler": {"gpu_sampler": False},
    "naive loop": {"kv_cache": False, "continuous_batching": False, "max_num_seqs": 1},
    "prefix_caching": {"enable_prefix_caching": False},
    "chunked_prefill": {"enable_chunked_prefill": False},
    "cuda_graphs": {"enforce_eager": True},
    "attention backend": {"attention_backend": "sdpa"},
    "packed prefill": {"attention_backend": "sdpa_padded"},
    "fused_moe": {"fused_moe": False},
    "async_scheduling": {"async_scheduling": True},
    "packed weights": {"packed_weights": False},
}


def outputs(**arguments: Any) -> list[list[int]]:
    llm = LLM(str(TINY_MOE), dtype="float32", device="cpu", max_model_len=128, num_gpu_blocks_override=64, **arguments)
    greedy, drawn = SamplingParams(temperature=0, max_tokens=16), SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    params = [greedy, greedy, drawn]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return outputs()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_no_output(name: str, plain: list[list[int]]) -> None:
    assert outputs(**SWITCHES[name]) == plain


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiling_makes_one_graph_for_all_layers_and_changes_no_output(plain: list[list[int]]) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    assert outputs(compile_layers=True) == plain
    # Norm with sum, norm with rotation, the sampler; a graph for each layer would reach the limit of recompilations.
    assert 0 < counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


def test_weights_as_they_are_stored_have_no_copies() -> None:
    llm = LLM(str(TINY_MOE), dtype="float32", device="cpu", num_gpu_blocks_override=8, packed_weights=False)
    assert isinstance(llm.llm_engine.executor, ModelRunner)
    assert llm.llm_engine.executor.model.head.packed is None


def test_experts_in_plain_torch_take_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_optimizer import ops

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(ops, "flash_dmoe", refuse)
    assert len(outputs(fused_moe=False)) == len(PROMPTS)
    assert MoE.fused


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (20, [1, 2, 4, 8, 16, 20]), (8, [1, 2, 4, 8])])
def test_captured_sizes_reach_the_number_of_sequences(most: int, sizes: list[int]) -> None:
    assert capture_sizes(most) == sizes


def test_captured_sizes_end_at_512() -> None:
    assert capture_sizes(4096)[-1] == 512
    assert capture_sizes(256)[:6] == [1, 2, 4, 8, 16, 32]
