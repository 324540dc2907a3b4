"""Measures one rung: `python -m moe_optimizer.measure.ablation.climb REQUEST EVENTS`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_optimizer.measure.ablation.rungs import NAIVE, OPTIMIZATIONS, AblationSettings
from moe_optimizer.measure.ablation.workload import Request, peak_bytes, random_requests
from moe_optimizer.measure.process import OnStep, answer_request

if TYPE_CHECKING:
    from moe_optimizer.engine import LLM

Outputs = list[list[int]]


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
    arguments: dict[str, Any] = {**NAIVE}
    for each in below:
        arguments.update(each.added)
    # No CUDA graphs of more.
    arguments["max_num_seqs"] = min(arguments["max_num_seqs"], settings.num_requests)
    longest = settings.shared + settings.input_len[1] + settings.output_len[1] + 1
    llm = LLM(
        settings.model, load_format=settings.load_format, dtype=settings.dtype, device=settings.device,
        skip_tokenizer_init=True, max_model_len=longest, max_num_batched_tokens=max(2048, 8 * longest), **arguments,
    )  # fmt: skip
    vocab_size = llm.llm_engine.config.hf_config.vocab_size
    requests = random_requests(
        settings.num_requests, settings.input_len, settings.output_len, vocab_size, shared=settings.shared
    )
    if arguments["max_num_seqs"] == 1:
        requests = requests[: settings.naive_requests]
    _generate(llm, [Request(each.prompt[::-1], 4) for each in requests[:4]])
    seconds, outputs = [], []
    for _ in range(settings.turns):
        started = time.perf_counter()
        outputs = _generate(llm, requests)
        seconds.append(time.perf_counter() - started)
    tokens = sum(each.num_output for each in requests)
    return Climbed(tokens=tokens, seconds=tuple(seconds), peak_bytes=peak_bytes(), outputs=outputs)


def _generate(llm: LLM, requests: list[Request]) -> Outputs:
    from moe_optimizer.engine import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=each.num_output, ignore_eos=True, detokenize=False)
        for each in requests
    ]
    outputs = llm.generate([each.prompt for each in requests], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    sys.exit(answer_request(ClimbRequest, sys.argv[1:], climb))
