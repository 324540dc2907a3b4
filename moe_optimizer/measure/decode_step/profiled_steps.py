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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.measure.decode_step.room import SETTLING_STEPS, room_of
from moe_optimizer.measure.process import OnStep, answer_request


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRequest:
    """What to profile."""

    model: str
    serve_args: tuple[str, ...]
    """Of `vllm serve`, without the model; what only a server needs is ignored."""
    batches: tuple[int, ...]
    """Sequences decoded together."""
    contexts: tuple[int, ...]
    """Of each batch, the tokens of a sequence when the counted steps begin."""
    shorter: bool
    """Whether a batch that does not fit so has shorter sequences; otherwise it is left out."""
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


Profile = Callable[[Any, int, int, int, int], StepProfile]
"""Takes engine, batch, context, tokens to generate and counted steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSteps:
    """What the process found."""

    device: str
    vllm: str
    torch: str
    profiles: tuple[StepProfile, ...]
    remarks: tuple[str, ...]
    """Which batches have shorter sequences than asked for, or are left out, and why."""


def _measure(request: StepsRequest, on_step: OnStep) -> ProfiledSteps:
    # The engine in this process; vLLM would start another one for it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm

    engine = engine_of(request.model, request.serve_args)
    profiles, remarks = profile_batches(engine, request, on_step)
    return ProfiledSteps(
        device=torch.cuda.get_device_name(),
        vllm=str(vllm.__version__),
        torch=str(torch.__version__),
        profiles=tuple(profiles),
        remarks=tuple(remarks),
    )


def profile_batches(
    engine: Any, request: StepsRequest, on_step: OnStep, profile: Profile | None = None
) -> tuple[list[StepProfile], list[str]]:
    """Profile each batch that the engine can hold; return the profiles, and remarks on what is not as asked for.

    Args:
        engine: vLLM's.
        request: what is asked for.
        on_step: called after each batch.
        profile: measures one; default: `_profile`.
    """
    room, profiles, remarks = room_of(engine), [], []
    for number, (batch, wanted) in enumerate(zip(request.batches, request.contexts, strict=True), 1):
        try:
            context = room.context(batch, wanted, request.steps, shorter=request.shorter)
            answer = room.answer_tokens(batch, context, request.steps)
            found = (profile or _profile)(engine, batch, context, answer, request.steps)
        except UnsupportedError as error:
            remarks.append(f"left out: {error}")
            on_step(number / len(request.batches), remarks[-1])
            continue
        if context != wanted:
            remarks.append(f"{batch} sequences have {context} tokens each: {wanted} do not fit")
        profiles.append(found)
        on_step(number / len(request.batches), f"{batch} sequences of {context} tokens: {found.step_us:.1f} us a step")
    return profiles, remarks


def engine_of(model: str, serve_args: Sequence[str]) -> Any:
    """Return vLLM's engine with the arguments of a server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.26
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # pyrefly: ignore[missing-import]
    parsed: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *serve_args])
    # What a server has by default: other engines decode fewer sequences together.
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed), usage_context=UsageContext.OPENAI_API_SERVER)


def _profile(engine: Any, batch: int, context: int, answer: int, steps: int) -> StepProfile:
    """Decode `batch` sequences: settle, count wall time, then the same number of steps under the profiler.

    Raises:
        UnsupportedError: they do not decode together.
    """
    import torch

    names = _start(engine, batch, context, answer)
    decoded = [len(engine.step()) for _ in range(SETTLING_STEPS)][-1]
    if decoded != batch:
        _end(engine, names)
        raise UnsupportedError(
            f"{batch} sequences of {context} tokens do not decode together here: {decoded} do",
            hint="ask for a smaller batch or a shorter context",
        )
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    step_us = 1e6 * (time.perf_counter() - begin) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    kernels = kernel_times(profiler, steps)
    _end(engine, names)
    return StepProfile(batch=batch, context=context, step_us=step_us, kernels=kernels)


def _end(engine: Any, names: list[str]) -> None:
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()


def _start(engine: Any, batch: int, context: int, tokens: int) -> list[str]:
    """Begin so many sequences and run their prompts; return their names."""
    from vllm import SamplingParams

    vocabulary, names = engine.model_config.get_vocab_size(), []
    for index in range(batch):
        # Random tokens, and sampled answers: equal or alike sequences would all be routed to the same experts.
        generator = random.Random(1000 * batch + index)
        prompt = {"prompt_token_ids": [generator.randrange(1, vocabulary) for _ in range(context)]}
        sampling = SamplingParams(temperature=1.0, seed=None, max_tokens=tokens, ignore_eos=True)
        names.append(f"batch{batch}-{index}")
        engine.add_request(names[-1], prompt, sampling)
    answered: set[str] = set()
    while len(answered) < batch:
        answered.update(output.request_id for output in engine.step() if output.outputs[0].token_ids)
    return names


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
