"""Measures the saved folder on its held-out text, through transformers in FP32. Needs only the folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

CONTEXT_LENGTH = 512
"""Tokens per window, the leading end-of-text token included."""
SLICE_WINDOWS = 4
"""The first windows of the text, also reported by themselves: a quick check needs only these."""


def windows(token_ids: Sequence[int], end_of_text_id: int, context_length: int = CONTEXT_LENGTH) -> list[list[int]]:
    """Cut the text into pieces of context_length - 1 tokens without overlap, each behind one end-of-text token.

    Every token of the text is predicted exactly once, from at most context_length - 1 tokens before it.
    """
    size = context_length - 1
    return [[end_of_text_id, *token_ids[begin : begin + size]] for begin in range(0, len(token_ids), size)]


@torch.no_grad()
def evaluate(folder: Path, *, max_windows: int | None = None, context_length: int = CONTEXT_LENGTH) -> dict[str, Any]:
    """Score heldout.txt, or its first `max_windows` windows.

    Returns:
        bytes, tokens, windows, context_length; perplexity_per_byte = exp(nats / bytes), bits_per_byte,
        perplexity_per_token; expert_load: per layer the share of the routed tokens that each expert received.
    """
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    text = (folder / "heldout.txt").read_bytes().decode("utf-8")
    token_ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    parts = windows(token_ids, tokenizer.convert_tokens_to_ids("<|endoftext|>"), context_length)[:max_windows]
    nats = 0.0
    num_tokens = 0
    num_bytes = 0
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.int64)
    for part in parts:
        output = model(torch.tensor([part]), output_router_logits=True)
        log_probabilities = output.logits[0, :-1].log_softmax(-1)
        targets = torch.tensor(part[1:])
        nats -= float(log_probabilities.gather(1, targets[:, None]).double().sum())
        num_tokens += len(part) - 1
        num_bytes += _num_bytes(tokenizer, part[1:])
        for layer_idx, router_logits in enumerate(output.router_logits):
            chosen = router_logits.topk(model.config.num_experts_per_tok, dim=-1).indices
            counts[layer_idx] += torch.bincount(chosen.flatten(), minlength=model.config.num_experts)
    shares = counts.double() / counts.sum(-1, keepdim=True)
    return {
        "bytes": num_bytes,
        "tokens": num_tokens,
        "windows": len(parts),
        "context_length": context_length,
        "perplexity_per_byte": round(math.exp(nats / num_bytes), 5),
        "bits_per_byte": round(nats / num_bytes / math.log(2), 5),
        "perplexity_per_token": round(math.exp(nats / num_tokens), 4),
        "expert_load": [[round(share, 5) for share in layer] for layer in shares.tolist()],
    }


def _num_bytes(tokenizer: Any, token_ids: list[int]) -> int:
    """Bytes that the tokens stand for: in a byte-level vocabulary each character of a token is one byte."""
    return sum(len(token) for token in tokenizer.convert_ids_to_tokens(token_ids))


def byte_counts(data: bytes) -> list[int]:
    """How often each of the 256 byte values occurs."""
    counts = [0] * 256
    for value in data:
        counts[value] += 1
    return counts


def unigram_perplexity(training_counts: Sequence[int], data: bytes) -> float:
    """Perplexity per byte of the training bytes' frequencies on `data`, with one added to every count."""
    total = sum(training_counts) + 256
    nats = -sum(
        count * math.log((training_counts[value] + 1) / total) for value, count in enumerate(byte_counts(data)) if count
    )
    return round(math.exp(nats / len(data)), 5)
