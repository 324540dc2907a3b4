"""CUDA graphs of decode steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_optimizer import ops
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.model_runner import ModelRunner
from tests.gpu.engine.random_models import CONFIG, DTYPES, MODELS, Recorder, generate, model_of, prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_the_batchs_own_size_has_the_bits_of_eager(name: str, dtype: str, make_engine: Any) -> None:
    logits = []
    for eager in (False, True):
        recorder = Recorder()
        engine = make_engine(name, sampler=recorder, dtype=dtype, enforce_eager=eager, attention_backend="triton")
        # 8 is a captured size: nothing is padded, so every kernel has the same shape.
        generate(engine, [prompt[:9] for prompt in prompts(16) if len(prompt) >= 9][:8])
        logits.append(recorder.logits)
    graphed, eagerly = logits
    assert graphed.keys() == eagerly.keys()
    assert all(torch.equal(graphed[key], eagerly[key]) for key in graphed)


def test_decodes_run_as_graphs_and_prompts_do_not(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph))[1])
    engine = make_engine("dense", max_num_seqs=12)
    assert isinstance(engine.executor, ModelRunner)
    assert engine.executor.graphs is not None
    assert engine.executor.graphs.sizes == [1, 2, 4, 8, 12]
    generate(engine, [[1, 2, 3]] * 3, max_tokens=5)
    # The prompts' step gives the first token.
    assert len(replays) == 4


def test_a_padded_graph_gives_the_tokens_of_eager(make_engine: Any) -> None:
    several = prompts(11)
    assert generate(make_engine("dense"), several) == generate(make_engine("dense", enforce_eager=True), several)


def test_experts_that_wait_for_the_host_run_without_graphs(make_engine: Any) -> None:
    # Our CUDA kernels take bfloat16: experts in float32 run in plain torch, which cannot be captured.
    engine = make_engine("experts", dtype="float32")
    assert isinstance(engine.executor, ModelRunner)
    assert engine.executor.graphs is not None
    assert engine.executor.graphs.sizes == []
    assert len(generate(engine, prompts(3))) == 3


def test_experts_on_our_kernels_run_as_graphs(make_engine: Any) -> None:
    engine = make_engine("experts", dtype="bfloat16")
    x = torch.zeros(1, CONFIG["hidden_size"], dtype=torch.bfloat16, device="cuda")
    experts = next(module.experts for module in model_of(engine).modules() if isinstance(module, MoE))
    why = ops.why_reference(x, experts.w13, experts.w2, torch.zeros(1, 4, dtype=torch.int32, device="cuda"))
    if why is not None:
        pytest.skip(f"needs the compiled kernels: {why}; run: bash build.sh")
    assert isinstance(engine.executor, ModelRunner)
    assert engine.executor.graphs is not None
    assert engine.executor.graphs.sizes == [1, 2, 4, 8, 16]
