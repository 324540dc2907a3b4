"""Profiles decode steps of vLLM: a process of its own, see `measure.process`.

The process follows the plan that its environment names, as a server would, and stock vLLM without one. The engine runs
in this process, so that one profiler sees every kernel, replays of CUDA graphs included.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.measure.process import OnStep, answer_request

_SETTLING_STEPS = 8
"""Chosen: the first decode steps after a prompt still overlap with host work of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRequest:
    """What to profile."""

    model: str
    serve_args: tuple[str, ...]
    """Of `vllm serve`, without the model; what only a server needs is ignored."""
    batches: tuple[int, ...]
    """Sequences decoded together."""
    context: int
    """Tokens of a sequence when the counted steps begin."""
    steps: int
    """Counted steps of each batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel in one decode step, a mean over the counted steps."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The decode steps of one batch."""

    batch: int
    context: int
    step_us: float
    """Wall time of a step without the profiler."""
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSteps:
    """What the process found."""

    device: str
    vllm: str
    torch: str
    profiles: tuple[StepProfile, ...]


def _measure(request: StepsRequest, on_step: OnStep) -> ProfiledSteps:
    # The engine in this process; vLLM would start another one for it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm

    engine = engine_of(request.model, request.serve_args)
    profiles: list[StepProfile] = []
    for batch in request.batches:
        profiles.append(_profile(engine, batch, request))
        on_step(len(profiles) / len(request.batches), f"{batch} sequences: {profiles[-1].step_us:.1f} us a step")
    return ProfiledSteps(
        device=torch.cuda.get_device_name(),
        vllm=str(vllm.__version__),
        torch=str(torch.__version__),
        profiles=tuple(profiles),
    )


def engine_of(model: str, serve_args: Sequence[str]) -> Any:
    """Return vLLM's engine with the arguments of a server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.26
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # pyrefly: ignore[missing-import]
    parsed: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *serve_args])
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))


def _profile(engine: Any, batch: int, request: StepsRequest) -> StepProfile:
    """Decode `batch` sequences: settle, count wall time, then the same number of steps under the profiler."""
    import torch

    # The first sequences decode while the prompts of the last ones still run.
    _start(engine, batch, request.context, 2 * request.steps + 2 * _SETTLING_STEPS + batch)
    decoded = [len(engine.step()) for _ in range(_SETTLING_STEPS)][-1]
    if decoded != batch:
        raise UnsupportedError(
            f"{batch} sequences of {request.context} tokens do not decode together here: {decoded} do",
            hint="ask for a smaller batch or a shorter context",
        )
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(request.steps):
        engine.step()
    torch.cuda.synchronize()
    step_us = 1e6 * (time.perf_counter() - begin) / request.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(request.steps):
            engine.step()
        torch.cuda.synchronize()
    kernels = kernel_times(profiler, request.steps)
    while engine.has_unfinished_requests():
        engine.step()
    return StepProfile(batch=batch, context=request.context, step_us=step_us, kernels=kernels)


def _start(engine: Any, batch: int, context: int, tokens: int) -> None:
    """Begin so many sequences and run their prompts."""
    from vllm import SamplingParams

    vocabulary = engine.model_config.get_vocab_size()

    for index in range(batch):
        # Random tokens, and sampled answers: equal or alike sequences would all be routed to the same experts.
        generator = random.Random(1000 * batch + index)
        prompt = {"prompt_token_ids": [generator.randrange(1, vocabulary) for _ in range(context)]}
        sampling = SamplingParams(temperature=1.0, seed=None, max_tokens=tokens, ignore_eos=True)
        engine.add_request(f"batch{batch}-{index}", prompt, sampling)
    answered: set[str] = set()
    while len(answered) < batch:
        answered.update(output.request_id for output in engine.step() if output.outputs[0].token_ids)


def exclusive_us(launches: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the time of each kernel that no launch before it covers: kernels may overlap, a step's time may not.

    Args:
        launches: name, start and end in us.
    """
    times: dict[str, float] = defaultdict(float)
    covered = float("-inf")
    for name, start, end in sorted(launches, key=lambda launch: launch[1]):
        times[name] += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return times


def kernel_times(profiler: Any, steps: int) -> tuple[KernelTime, ...]:
    """Return the kernels of a profile of so many steps, the longest first."""
    launches = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    times, calls = exclusive_us(launches), Counter(name for name, _, _ in launches)
    return tuple(
        KernelTime(name=name[:200], calls=round(calls[name] / steps, 2), us=round(us / steps, 2))
        for name, us in sorted(times.items(), key=lambda each: -each[1])
    )


if __name__ == "__main__":
    sys.exit(answer_request(StepsRequest, sys.argv[1:], _measure))
