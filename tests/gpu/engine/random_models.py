"""Models with random weights, what an engine makes of prompts, and the same in plain torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_optimizer.engine import LLMEngine, SamplingParams
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sequence import Sequence
from moe_optimizer.inspection.vllm_installation import flash_attention_versions

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
