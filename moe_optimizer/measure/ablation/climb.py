"""Measures one rung: `python -m moe_optimizer.measure.ablation.climb REQUEST EVENTS`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_optimizer.measure.ablation.rungs import NAIVE, OPTIMIZATIONS, AblationSettings
from moe_optimizer.measure.ablation.workload import Request, peak_bytes, random_requests
from moe_optimizer.measure.process import OnStep, answer_request

if TYPE_CHECKING:
    from moe_optimizer.engine import LLM
    from moe_optimizer.engine.sampled_tokens import SampledTokens

Outputs = list[list[int]]
_BATCH = 8
"""Requests of a static batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClimbRequest:
    """One rung of the ladder."""

    settings: AblationSettings
    rung: int
    """Its place in OPTIMIZATIONS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """What the process of a rung found."""

    tokens: int
    seconds: tuple[float, ...]
    peak_bytes: int
    outputs: Outputs


def climb(request: ClimbRequest, _on_step: OnStep) -> Climbed:
    """Generate on one rung, `turns` times."""
    from moe_optimizer.engine import LLM

    settings, below = request.settings, OPTIMIZATIONS[: request.rung + 1]
    arguments: dict[str, Any] = {name: value for each in below for name, value in each.added.items()}
    longest = settings.shared + settings.input_len[1] + settings.output_len[1] + 1
    llm = LLM(
        settings.model, load_format=settings.load_format, dtype=settings.dtype, device=settings.device,
        skip_tokenizer_init=True, max_model_len=longest, max_num_batched_tokens=max(2048, longest),
        # No CUDA graphs of more.
        max_num_seqs=min(256, settings.num_requests),
        **{**NAIVE, **arguments},
    )  # fmt: skip
    if settings.on_gpu and "gpu_sampler" not in {each.name for each in below}:
        _sample_on_host(llm)
    vocab_size = llm.llm_engine.config.hf_config.vocab_size
    requests = random_requests(
        settings.num_requests, settings.input_len, settings.output_len, vocab_size, shared=settings.shared
    )
    how = OPTIMIZATIONS[request.rung].requests
    if how in ("whole text", "one by one"):
        requests = requests[: settings.naive_requests]
    _together(llm, [Request(each.prompt[::-1], 4) for each in requests[:4]])
    seconds, outputs = [], []
    for _ in range(settings.turns):
        started = time.perf_counter()
        outputs = _HAND_OVER[how](llm, requests)
        seconds.append(time.perf_counter() - started)
    tokens = sum(each.num_output for each in requests)
    return Climbed(tokens=tokens, seconds=tuple(seconds), peak_bytes=peak_bytes(), outputs=outputs)


def _together(llm: LLM, requests: list[Request]) -> Outputs:
    from moe_optimizer.engine import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
        for each in requests
    ]
    outputs = llm.generate([each.prompt for each in requests], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _one_by_one(llm: LLM, requests: list[Request]) -> Outputs:
    return [_together(llm, [each])[0] for each in requests]


def _batches(llm: LLM, requests: list[Request]) -> Outputs:
    """A few at a time: the next begin when the longest has ended."""
    starts = range(0, len(requests), _BATCH)
    return [output for start in starts for output in _together(llm, requests[start : start + _BATCH])]


def _whole_text(llm: LLM, requests: list[Request]) -> Outputs:
    """Without a cache: one token of the whole text, again and again."""
    outputs = []
    for each in requests:
        output: list[int] = []
        for _ in range(each.num_output):
            output += _together(llm, [Request(each.prompt + output, 1)])[0]
        outputs.append(output)
    return outputs


_HAND_OVER: Mapping[str, Callable[[LLM, list[Request]], Outputs]] = {
    "whole text": _whole_text, "one by one": _one_by_one, "batches": _batches, "together": _together,
}  # fmt: skip


def _sample_on_host(llm: LLM) -> None:
    import torch

    from moe_optimizer.engine.sampler import TorchSampler

    class HostSampler(TorchSampler):
        def sample(self, logits_SV: torch.Tensor, sequences: list[Any]) -> SampledTokens:  # noqa: N803  (its name)
            return super().sample(logits_SV.cpu(), sequences)

    runner: Any = llm.llm_engine.executor
    runner.sampler = HostSampler(torch.device("cpu"), 0)


if __name__ == "__main__":
    sys.exit(answer_request(ClimbRequest, sys.argv[1:], climb))
