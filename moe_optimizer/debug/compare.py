"""`compare`: everything that a new model family, or a wrong output, is looked at for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_optimizer.debug.steps import Comparison, Step
from moe_optimizer.engine import LLM, SamplingParams

_SHADES = " .:-=+*#%@"
_PICTURE_TOKENS = 24
_NUM_GENERATED = 16
_TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at beside the operations."""

    name: str
    same: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The values of one parameter."""

    name: str
    mean: float
    std: float
    largest: float
    zeros: float
    """Part of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReport:
    """The output of `debug compare --json`."""

    model: str
    tokens: int
    first_difference: str | None
    """The first operation or finding that differs."""
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    pattern: tuple[str, ...]
    """What each token attends to in the first head of the layer, one line a token."""
    weights: tuple[Weights, ...]


def compare(folder: Path, *, layer: int | None = None, text: str = _TEXT) -> CompareReport:
    """Compare the engine with transformers on a text, in float32 on the CPU.

    Raises:
        InputError: the model cannot be loaded, or has no such layer.
    """
    llm = LLM(str(folder), dtype="float32", device="cpu", max_num_seqs=4, num_gpu_blocks_override=256)
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode(text)
    comparison = Comparison(llm.llm_engine, token_ids)
    steps = tuple(comparison.steps(layer))
    findings = (
        _round_trip(tokenizer, text, token_ids),
        _vocabulary(tokenizer, llm.llm_engine.config.hf_config),
        *_generated(llm, comparison.theirs, token_ids),
        _cached(llm, token_ids),
    )
    different = [each.name for each in (*steps, *findings) if not each.same]
    return CompareReport(
        model=str(folder),
        tokens=len(token_ids),
        first_difference=different[0] if different else None,
        steps=steps,
        findings=findings,
        pattern=_picture(comparison.patterns[layer or 0][0]),
        weights=tuple(
            _statistics(name, each.data)
            for name, each in comparison.ours.named_parameters()
            if layer is None or ".layers." not in name or f".layers.{layer}." in name
        ),
    )


def _round_trip(tokenizer: Any, text: str, token_ids: list[int]) -> Finding:
    back = tokenizer.decode(token_ids, skip_special_tokens=True)
    detail = "decoding gives the text back" if back == text else f"got {back!r:.60}, expected {text!r:.60}"
    return Finding(name="tokenizer round trip", same=back == text, detail=detail)


def _vocabulary(tokenizer: Any, config: Any) -> Finding:
    return Finding(
        name="vocabulary",
        same=len(tokenizer) <= config.vocab_size,
        detail=f"{len(tokenizer)} tokens in the tokenizer, {config.vocab_size} in the model",
    )


def _generated(llm: LLM, theirs: Any, token_ids: list[int]) -> tuple[Finding, Finding]:
    """Compare greedy outputs token by token, and two runs of the engine with each other."""
    first, again = _greedy(llm, token_ids), _greedy(llm, token_ids)
    text = list(token_ids)
    place = None
    with torch.inference_mode():
        for number, token_id in enumerate(first):
            text.append(int(theirs(torch.tensor([text])).logits[0, -1].argmax()))
            if text[-1] != token_id:
                place = number
                break
    detail = f"{len(first)} tokens" if place is None else f"token {place}: got {first[place]}, expected {text[-1]}"
    return (
        Finding(name="generated tokens", same=place is None, detail=detail),
        Finding(name="two runs", same=first == again, detail="the second finds its prompt in the prefix cache"),
    )


def _greedy(llm: LLM, token_ids: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=_NUM_GENERATED, ignore_eos=True)
    return llm.generate(token_ids, params, use_tqdm=False)[0].outputs[0].token_ids


def _cached(llm: LLM, token_ids: list[int]) -> Finding:
    """Watch the blocks of a request: how many of their slots hold a token, and that all are given back."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=_NUM_GENERATED, ignore_eos=True)
    blocks = engine.scheduler.blocks
    before = blocks.num_available
    engine.add_request("watched", token_ids, params)
    shares = []
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
        for sequence in engine.scheduler.running:
            shares.append(sequence.num_tokens / (len(sequence.block_table.block_ids) * blocks.block_size))
    used = sum(shares) / len(shares)
    after = blocks.num_available
    detail = f"{used:.0%} of the slots of held blocks in use; {after} of {before} blocks available afterwards"
    return Finding(name="KV cache", same=before == after, detail=detail)


def _picture(pattern_TT: Tensor) -> tuple[str, ...]:
    shown = pattern_TT[:_PICTURE_TOKENS, :_PICTURE_TOKENS]
    top = len(_SHADES) - 1
    return tuple("".join(_SHADES[round(value * top)] for value in row).rstrip() for row in shown.tolist())


def _statistics(name: str, tensor: Tensor) -> Weights:
    wide = tensor.float()
    return Weights(
        name=name,
        mean=float(wide.mean()),
        std=float(wide.std()),
        largest=float(wide.abs().max()),
        zeros=float((wide == 0).float().mean()),
    )
