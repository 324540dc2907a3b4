"""Logits on a GPU beside plain torch and transformers, on one GPU and on two."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer import ops
from moe_optimizer.engine import LLMEngine
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.layers.moe import MoE
from tests.gpu.engine.random_models import (
    CONFIG,
    DTYPES,
    FLASH,
    FLOAT32_BOUND,
    MODELS,
    Recorder,
    generate,
    model_of,
    plain_logits,
    prompt_logits,
    prompts,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_has_the_logits_of_plain_torch(name: str, backend: str, make_engine: Any) -> None:
    engine, (prompt,) = make_engine(name, attention_backend=backend), prompts(1)
    want, got = plain_logits(engine, prompt, torch.float32), prompt_logits(engine, prompt)
    assert (got - want).abs().max() <= FLOAT32_BOUND
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("backend", ["triton", "sdpa", FLASH])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_exact_as_plain_torch_in_bfloat16(name: str, backend: str, make_engine: Any) -> None:
    engine, ours, theirs = make_engine(name, dtype="bfloat16", attention_backend=backend), 0.0, 0.0
    # Several texts: a router's near tie that falls the other way changes some tokens by much.
    for number, prompt in enumerate(prompts(4)):
        exact = plain_logits(engine, prompt, torch.float32)
        theirs += (plain_logits(engine, prompt, torch.bfloat16) - exact).abs().mean().item()
        fresh = make_engine(name, dtype="bfloat16", attention_backend=backend) if number else engine
        ours += (prompt_logits(fresh, prompt) - exact).abs().mean().item()
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_decodes_have_the_logits_of_the_whole_text(name: str, graphs: bool, make_engine: Any) -> None:
    recorder = Recorder()
    engine = make_engine(name, sampler=recorder, enforce_eager=not graphs, max_num_batched_tokens=32)
    several = prompts(5)
    outputs = generate(engine, several)
    for number, (prompt, (output,)) in enumerate(zip(several, outputs, strict=True)):
        want = plain_logits(engine, [*prompt, *output], torch.float32)
        for place in range(len(prompt), len(prompt) + len(output)):
            assert (recorder.logits[str(number), place] - want[place - 1]).abs().max() <= FLOAT32_BOUND


def test_compiled_layers_give_the_logits_of_the_others_up_to_rounding(make_engine: Any) -> None:
    (prompt,) = prompts(1)
    want = prompt_logits(make_engine("experts"), prompt)
    got = prompt_logits(make_engine("experts", compile_layers=True), prompt)
    assert (got - want).abs().max() <= FLOAT32_BOUND


def test_experts_run_on_our_kernels(make_engine: Any) -> None:
    engine = make_engine("experts", dtype="bfloat16")
    experts = next(module.experts for module in model_of(engine).modules() if isinstance(module, MoE))
    x = torch.randn(4, CONFIG["hidden_size"], dtype=torch.bfloat16, device="cuda")
    why = ops.why_reference(x, experts.w13, experts.w2, torch.zeros(4, 4, dtype=torch.int32, device="cuda"))
    if why is not None:
        pytest.skip(f"needs the compiled kernels: {why}; run: bash build.sh")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(engine, prompts(4), max_tokens=3)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert any("moeopt" in name for name in names), sorted(names)


def test_experts_in_fp8_stay_close(make_engine: Any) -> None:
    (prompt,) = prompts(1)
    engine = make_engine("experts", dtype="bfloat16")
    want = prompt_logits(engine, prompt)
    for module in model_of(engine).modules():
        if isinstance(module, MoE):
            module.experts.to_fp8()
    engine.abort_request("0")
    got = prompt_logits(engine, prompt)
    assert 0 < (got - want).abs().mean() <= 0.1 * want.abs().mean()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("whole_experts", [False, True])
def test_two_gpus_give_the_tokens_of_one(whole_experts: bool, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        **MODELS["experts"],
        "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    found = []
    for size in (1, 2):
        args = EngineArgs(
            model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_seqs=8, num_gpu_blocks_override=64,
            tensor_parallel_size=size, enable_expert_parallel=whole_experts and size > 1,
            compile_layers=False,
        )  # fmt: skip
        engine = LLMEngine(args)
        try:
            found.append(generate(engine, prompts(4)))
        finally:
            engine.shutdown()
    assert found[0] == found[1]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_has_the_logits_of_transformers(name: str, dtype: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {**MODELS[name], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    torch.manual_seed(0)
    config = AutoConfig.for_model(values.pop("model_type"), **values, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == CONFIG["hidden_size"]
    errors: dict[str, float] = {"ours": 0.0, "theirs": 0.0}
    for prompt in prompts(3):
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
            exact = loaded.cuda().eval()(ids).logits[0]
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype])
            theirs = loaded.cuda().eval()(ids).logits[0]
        args = EngineArgs(model=str(tmp_path), dtype=dtype, skip_tokenizer_init=True, num_gpu_blocks_override=64,
                          max_num_seqs=4, compile_layers=False, enforce_eager=True)  # fmt: skip
        ours = prompt_logits(LLMEngine(args), prompt)
        if dtype == "float32":
            assert (ours - theirs).abs().max() <= FLOAT32_BOUND
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
        errors["ours"] += (ours - exact).abs().mean().item()
        errors["theirs"] += (theirs.float() - exact).abs().mean().item()
    assert errors["ours"] <= 1.25 * errors["theirs"] + 1e-5
