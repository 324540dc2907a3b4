"""The embedded engine on a CUDA GPU: its logits, CUDA graphs, attention kernels, expert kernels and moves to the host.

    python -m pytest -q tests/gpu/test_engine.py

Needs torch for CUDA with Triton, and for the tests that say so the compiled kernels (bash build.sh), transformers, or
FlashAttention: flash-attn, or a vLLM for CUDA.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_optimizer import ops
from moe_optimizer.engine import LLMEngine, SamplingParams
from moe_optimizer.engine.attention.backend import make_backend
from moe_optimizer.engine.engine_args import EngineArgs, EngineConfig
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sequence import Sequence
from moe_optimizer.inspection.vllm_installation import flash_attention_versions

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOAT32_BOUND = 5e-5
"""Largest difference of a logit; the logits of these models reach about 10."""
CONFIG = {
    "vocab_size": 509, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "sliding_window": None,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS = {
    "dense": {**CONFIG, "model_type": "qwen3"},
    "dense-128": {**CONFIG, "model_type": "qwen3", "head_dim": 128, "num_attention_heads": 4},
    "experts": {**CONFIG, **EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 1},
}
LONG, OUTPUTS = 150, 24
NEEDS_FLASH = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None and not flash_attention_versions(),
    reason="needs flash-attn, or a vLLM that brings it",
)
FLASH = pytest.param("flash", marks=NEEDS_FLASH)


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """In place of the folder's fixture: any CUDA GPU will do, and only the expert kernels need the build."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch sees none")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LLMEngine]:
    """Return a function that makes an engine with random weights, equal for equal names; transformers is not needed."""

    def resolve(args: EngineArgs) -> EngineConfig:
        values = MODELS[args.model]
        parameters = {"rope_type": "default", "rope_theta": 1e4}
        hf_config: Any = SimpleNamespace(**values, rope_parameters=parameters, eos_token_id=None)
        return EngineConfig(
            args=args, folder=tmp_path, tokenizer_folder=None, hf_config=hf_config, device=torch.device("cuda", 0),
            dtype=DTYPES[args.dtype], max_model_len=values["max_position_embeddings"],
            cuda_graphs=not args.enforce_eager, compile=bool(args.compile_layers),
            async_scheduling=args.async_scheduling is not False,
        )  # fmt: skip

    monkeypatch.setattr(EngineConfig, "resolve", staticmethod(resolve))

    def make(name: str, *, sampler: Any = None, **arguments: Any) -> LLMEngine:
        values: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "num_gpu_blocks_override": 256, **arguments}
        engine = LLMEngine(
            EngineArgs(model=name, load_format="dummy", skip_tokenizer_init=True, **values), sampler=sampler
        )
        generator = torch.Generator().manual_seed(3)
        for parameter in model_of(engine).parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            drawn = drawn.abs() + 0.5 if parameter.dim() == 1 else 2 * drawn
            # In bfloat16 in every run: the runs then have the same weights.
            parameter.data.copy_(drawn.bfloat16())
        return engine

    return make


def model_of(engine: LLMEngine) -> Any:
    assert isinstance(engine.executor, ModelRunner)
    return engine.executor.model


def prompts(count: int, *, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LONG, (count,), generator=generator).tolist()
    return [torch.randint(CONFIG["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


def generate(engine: LLMEngine, several: list[list[int]], **arguments: Any) -> list[list[list[int]]]:
    """The token ids of every sample of every prompt, all computed together."""
    values: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": OUTPUTS,
        "ignore_eos": True,
        "detokenize": False,
        **arguments,
    }
    for number, prompt in enumerate(several):
        engine.add_request(str(number), prompt, SamplingParams(**values))
    found: dict[str, list[list[int]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = [sample.token_ids for sample in output.outputs]
        engine.check_integrity()
    return [found[str(number)] for number in range(len(several))]


class Recorder:
    """A greedy sampler that keeps the logits behind each token of each sequence."""

    def __init__(self) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> SampledTokens:
        for row, sequence in enumerate(sequences):
            self.logits[sequence.group.request_id, sequence.num_tokens] = logits_SV[row].clone()
        return SampledTokens(logits_SV.argmax(-1))


def prompt_logits(engine: LLMEngine, token_ids: list[int]) -> Tensor:
    """The logits behind every token of a prompt, computed in one step."""
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    engine.add_request("0", token_ids)
    with torch.inference_mode():
        batch = runner.prepare(engine.scheduler.schedule()).to(runner.config.device)
        return runner.model.logits(runner.model(batch)).float()


def plain_logits(engine: LLMEngine, token_ids: list[int], dtype: torch.dtype) -> Tensor:
    """Qwen3 and Qwen3-MoE written out in plain torch, each operation in `dtype`."""
    model, config = model_of(engine), engine.config.hf_config
    w = {name: parameter.data.to(dtype) for name, parameter in model.named_parameters()}
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    count = len(token_ids)

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return (x.float() * scale).to(dtype) * w[f"{name}.weight"]

    angles = torch.arange(count).float()[:, None] / 1e4 ** (torch.arange(0, size, 2).float() / size)
    cos, sin = (torch.cat((each, each), -1).to("cuda", dtype)[:, None] for each in (angles.cos(), angles.sin()))

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

    x = w["model.embed_tokens.weight"][torch.tensor(token_ids, device="cuda")]
    hidden = torch.ones(count, count, dtype=torch.bool, device="cuda").triu(1)
    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}"
        q, k, v = (norm(x, f"{at}.input_layernorm") @ w[f"{at}.self_attn.qkv_proj.weight"].T).split(
            [heads * size, kv_heads * size, kv_heads * size], -1
        )
        q, k, v = (each.unflatten(-1, (-1, size)) for each in (q, k, v))
        q, k = turn(norm(q, f"{at}.self_attn.q_norm")), turn(norm(k, f"{at}.self_attn.k_norm"))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        probs = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(dtype)
        out = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
        x = x + out @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        if config.model_type == "qwen3":
            gate, up = (y @ w[f"{at}.mlp.gate_up_proj.weight"].T).chunk(2, -1)
            x = x + (silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
            continue
        chosen = (y @ w[f"{at}.mlp.gate.weight"].T).float().softmax(-1).topk(config.num_experts_per_tok)
        shares = chosen.values / chosen.values.sum(-1, keepdim=True)
        added = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(config.num_experts):
            token, place = (chosen.indices == expert).nonzero(as_tuple=True)
            gate, up = (y[token] @ w[f"{at}.mlp.experts.w13"][expert].T).chunk(2, -1)
            result = (silu(gate) * up) @ w[f"{at}.mlp.experts.w2"][expert].T
            added.index_add_(0, token, result.float() * shares[token, place, None])
        x = x + added.to(dtype)
    return (norm(x, "model.norm") @ w["lm_head.weight"].T).float()


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 products in float32: the bound is on what else differs."""
    torch.backends.cuda.matmul.allow_tf32 = False


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


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 0.8, "seed": 5, "n": 2},
    "filters": {"temperature": 0.9, "seed": 6, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 3},
    "stop tokens": {"stop_token_ids": list(range(0, 509, 9))},
    "log-probabilities": {"logprobs": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous_scheduling_gives_the_tokens_of_the_host_that_waits(kind: str, make_engine: Any) -> None:
    several = prompts(24)
    want = generate(make_engine("dense", async_scheduling=False), several, **KINDS[kind])
    assert generate(make_engine("dense"), several, **KINDS[kind]) == want
    # Chunks, preemption and swapping, with a token under way.
    tight = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 48, "swap_space": 0.05, "enforce_eager": True}
    assert generate(make_engine("dense", **tight), several, **KINDS[kind]) == want


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_launches_a_step_without_waiting_for_the_gpu(kind: str, make_engine: Any) -> None:
    engine = make_engine("dense")
    arguments: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUTS, **KINDS[kind]}
    for number, prompt in enumerate(prompts(8)):
        engine.add_request(str(number), prompt, SamplingParams(**arguments))
    for _ in range(4):
        engine.step()
    step = engine.scheduler.schedule()
    assert step.decodes
    torch.cuda.synchronize()
    # Half a second on an H100, in which the GPU does nothing else.
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.current_stream().record_event()
    tokens = engine.executor.launch(step)
    assert not busy.query()
    token_ids, _ = tokens.read()
    assert busy.query()
    assert len(token_ids) == len(step.decodes)


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


def test_attention_on_a_gpu_is_flash_attention_where_there_is_one_else_triton(make_engine: Any) -> None:
    from moe_optimizer.engine.attention.triton_attention import TritonAttention

    layer = next(model_of(make_engine("dense")).attention_layers())
    assert (type(layer.backend) is TritonAttention) is not bool(flash_attention_versions())


class Beside:
    """SDPA, which keeps how far another backend is from it in each step, as a part of the largest output."""

    capturable = False

    def __init__(self, other: str) -> None:
        device = torch.device("cuda", 0)
        self.sdpa = make_backend("sdpa", device, 16)
        self.other = make_backend(other, device, 16)  # pyrefly: ignore[bad-argument-type]
        self.differences: list[float] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Any) -> Tensor:
        want, got = (each.attend(q, k, v, cache, batch) for each in (self.sdpa, self.other))
        self.differences.append(float((got - want).abs().max() / want.abs().max()))
        return want


@pytest.mark.parametrize("backend", ["triton", FLASH])
@pytest.mark.parametrize("name", ["dense", "dense-128"])
def test_attention_of_prompts_chunks_and_decodes_is_that_of_sdpa(name: str, backend: str, make_engine: Any) -> None:
    engine = make_engine(name, dtype="bfloat16", enforce_eager=True, max_num_batched_tokens=32)
    beside = Beside(backend)
    for layer in model_of(engine).attention_layers():
        layer.backend = beside
    generate(engine, prompts(16))
    # Both round each probability and the output to 8 bits.
    assert 0 < max(beside.differences) <= 2**-6


@NEEDS_FLASH
@pytest.mark.parametrize("name", ["dense", "dense-128"])
def test_flash_attention_in_a_graph_gives_what_it_gives_without(name: str, make_engine: Any) -> None:
    several, logits = prompts(11), []
    for eager in (False, True):
        recorder = Recorder()
        engine = make_engine(name, sampler=recorder, dtype="bfloat16", attention_backend="flash", enforce_eager=eager)
        generate(engine, several, max_tokens=2)
        logits.append(recorder.logits)
    graphed, eagerly = logits
    assert graphed.keys() == eagerly.keys()
    # A graph's bound of the lengths is another, so keys may be split otherwise: not the same bits.
    for key in graphed:
        assert (graphed[key] - eagerly[key]).abs().mean() <= 0.02 * eagerly[key].abs().mean()


def test_a_step_of_another_size_compiles_nothing_but_another_split(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, fn, **_: compiled.append(str(fn.name)) or False
    )
    engine = make_engine("dense", max_num_seqs=12, enforce_eager=True)
    for count in (1, 2, 3, 5, 8, 12):
        generate(engine, prompts(count), max_tokens=3)
    # A prompt's kernel, and a decode's for each number of parts: 1, 2, 4, 8 and 16.
    assert 0 < sum(name.endswith("_attend") for name in compiled) <= 6


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


@pytest.mark.parametrize("swap_space", [0.0, 0.05])
def test_a_full_cache_changes_no_output(swap_space: float, make_engine: Any) -> None:
    several = prompts(12)
    want = generate(make_engine("dense"), several)
    tight = make_engine("dense", num_gpu_blocks_override=40, swap_space=swap_space, enable_prefix_caching=False)
    assert generate(tight, several) == want
    assert tight.scheduler.num_preemptions > 0


def test_samples_of_a_seed_are_the_same_in_every_batch(make_engine: Any) -> None:
    several = prompts(6)
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 5, "n": 2}
    together = generate(make_engine("dense"), several, **drawn)
    alone = [generate(make_engine("dense"), [prompt], **drawn)[0] for prompt in several[:2]]
    assert together[:2] == alone
    assert together[0][0] != together[0][1]


def test_a_shared_beginning_is_found_again(make_engine: Any) -> None:
    engine, head = make_engine("dense"), prompts(1)[0] * 3
    first = generate(engine, [[*head, 1]])
    engine.add_request("again", [*head, 1], SamplingParams(temperature=0, max_tokens=OUTPUTS, detokenize=False))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].num_cached_tokens >= len(head) // 16 * 16 - 16
    assert [outputs[-1].outputs[0].token_ids] == first[0]


def test_the_cache_leaves_the_memory_that_was_not_given(make_engine: Any) -> None:
    torch.cuda.empty_cache()
    engine = make_engine("dense", num_gpu_blocks_override=None, gpu_memory_utilization=0.4, max_num_seqs=4)
    generate(engine, prompts(4))
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.55 * total
    assert engine.executor.cache_size.num_blocks == 4 * CONFIG["max_position_embeddings"] // 16


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
