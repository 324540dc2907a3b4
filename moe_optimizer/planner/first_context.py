"""Makes the context of the first pass: the request, with every value that has a default filled in."""

from __future__ import annotations

import dataclasses
from typing import Literal

from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import required_key, switches
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.specs.workload import WorkloadSpec

_DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("float16", "bfloat16", "float32")}


def first_context(request: PlanRequest, device: Literal["cuda", "cpu"], num_gpus: int) -> PlanContext:
    """Return the context in which nothing is decided yet.

    Args:
        request: what is asked for; what it leaves open comes from its profile and model.
        device: what the server will run on.
        num_gpus: GPUs of a machine that may be used, 0 on the CPU.

    Raises:
        InputError: the dtype, the length or the requests given to vLLM are none.
    """
    profile = request.profile
    required = frozenset(required_key(name) for name in request.required)
    wishes = {name: (Wish.ON, f"flag --require {name}") for name in required} | dict(request.wishes)
    unknown = wishes.keys() - {switch.key for switch in switches()}
    assert not unknown, f"wishes for unknown passes or settings: {sorted(unknown)}"
    given = request.vllm_args
    length = given.count("--max-model-len") if given.value("--max-model-len") not in ("auto", "-1") else None
    length = length or _model_len(request)
    prompt, answer = _lengths(request, length)
    return PlanContext(
        request=dataclasses.replace(request, wishes=wishes, required=required),
        workload=WorkloadSpec(
            batch_size=given.count("--max-num-seqs")
            or request.batch_size
            or request.clients
            or profile.workload.batch_size,
            input_tokens=prompt,
            output_tokens=answer,
            max_model_len=length,
        ),
        device=device,
        num_gpus=num_gpus,
        dtype=_dtype(request),
    )


def asked_lengths(request: PlanRequest) -> tuple[int, int]:
    """Return the tokens of prompt and answer that flags say, else the profile."""
    stated = request.profile.workload
    return request.input_tokens or stated.input_tokens, request.output_tokens or stated.output_tokens


def _lengths(request: PlanRequest, most: int | None) -> tuple[int, int]:
    """Return the tokens of prompt and answer to plan for: where both together exceed `most`, their shares of it."""
    prompt, answer = asked_lengths(request)
    if most is None or prompt + answer <= most:
        return prompt, answer
    shorter = max(1, most * prompt // (prompt + answer))
    return shorter, max(1, most - shorter)


def _model_len(request: PlanRequest) -> int | None:
    """Return the asked length; a profile's is for many models, so of it at most the model's own."""
    if request.max_model_len is not None:
        return request.max_model_len
    asked, most = request.profile.max_model_len, request.model.max_model_len
    return min(asked, most) if asked and most else asked


def _dtype(request: PlanRequest) -> str:
    text = request.vllm_args.value("--dtype") or request.dtype or "auto"
    if text == "auto":
        # vLLM's own rule: FP32 checkpoints are served in half precision unless told otherwise.
        return "bfloat16" if request.model.dtype == "float32" else request.model.dtype
    if text not in _DTYPES:
        raise InputError(f"--dtype: got {text!r:.80}, expected one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[text]
