"""Makes our kernels wrong in a running server, as a file says; imported as its Python starts.

The file named by MOE_TEST_FAULT_FILE holds the name of a mistake, or nothing. It is read at every call, so that one
server shows them all.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

BATCH = 8
"""Tokens in a step at which some mistakes are made."""
MANY = 200
FEW = 64
"""Tokens up to which the mistakes of decode steps are made; also of prompts that are so short."""
SLOW_S = 0.2
"""Longer by each call. A layer takes less than a millisecond, on a machine that does much else some tens."""
_FILE = Path(os.environ.get("MOE_TEST_FAULT_FILE", os.devnull))
_captured: dict[tuple[str, int], Any] = {}


def _wrong_on_cpu(module: Any) -> None:
    kernel = module.fused_experts

    def fused_experts(x: Any, w13: Any, w2: Any, topk_weights: Any, topk_ids: Any, **others: Any) -> Any:
        import torch

        mistake, tokens = _FILE.read_text().strip(), x.shape[0]
        if not mistake.startswith("frozen"):
            _captured.clear()
        if mistake == "slow":
            time.sleep(SLOW_S)
        elif mistake == "dead":
            os._exit(1)
        if mistake == "scale" or (mistake == "above" and tokens > MANY):
            topk_weights = topk_weights * (1.03 if mistake == "scale" else 1.1)
        elif mistake == "stale scale":
            topk_weights = torch.where(topk_ids == 5, topk_weights * 1.5, topk_weights)
        elif mistake == "swapped":
            topk_ids = torch.where(topk_ids == 3, 4, torch.where(topk_ids == 4, 3, topk_ids)).to(topk_ids.dtype)
        elif mistake.startswith("decode") and tokens <= FEW and not _asked_by("self_check.py"):
            topk_weights, topk_ids = _decoded_wrong(mistake, topk_weights, topk_ids, w13.shape[0])
        elif mistake == "noise":
            topk_weights = topk_weights * (1 + 0.02 * torch.randn_like(topk_weights))
        elif mistake == "frozen" and tokens == BATCH:
            # As a graph whose inputs were those of its capture: what it was given first, at every replay.
            x = _captured.setdefault((str(w13.data_ptr()), tokens), x.clone())
        found = kernel(x, w13, w2, topk_weights, topk_ids, **others)
        if (mistake == "no number" and tokens == BATCH) or (
            mistake == "decode: no number" and tokens <= FEW and not _asked_by("self_check.py")
        ):
            found.fill_(float("nan"))
        return found

    module.fused_experts = fused_experts
    # The plugin's op repeats a call without this function; no call is a repeated one here.
    module.cpu_calls.again = lambda *_: False


def _decoded_wrong(mistake: str, weights: Any, ids: Any, experts: int) -> tuple[Any, Any]:
    """Return what a kernel takes for the routing of a few tokens."""
    import torch

    if mistake == "decode: other experts":
        ids = torch.where(ids >= 0, (ids + 1) % experts, ids).to(ids.dtype)
    elif mistake == "decode: two swapped":
        ids = torch.where(ids == 3, 4, torch.where(ids == 4, 3, ids)).to(ids.dtype)
    factor = {"decode: nothing": 0.0, "decode: scale": 1.02, "decode: half more": 1.5}.get(mistake, 1.0)
    return weights * factor, ids


def _wrong_on_gpus(module: Any) -> None:
    """Wrong only while a graph is captured: what it replays is wrong, and what runs without one is right.

    "captured" by whomever, "captured by vllm: ..." not in the graphs that our canary makes of single layers.
    Mistakes of decode steps, as on the CPU, are made with and without graphs.
    """
    experts = module.MoeOptimizerCudaExperts
    compute = experts.compute

    def wrong(self: Any, call: Any) -> Any:
        import torch

        mistake, tokens = _FILE.read_text().strip(), call.hidden_states.shape[0]
        by_whom, _, what = mistake.partition(": ")
        captured = torch.cuda.is_current_stream_capturing()
        if by_whom == "captured" and captured:
            call = _captured_wrong("above", call, BATCH + 1)
        elif by_whom == "captured by vllm" and captured and not _asked_by("canary.py"):
            call = _captured_wrong(what, call, tokens)
        elif by_whom == "decode" and tokens <= FEW and not _asked_by("canary.py") and not _asked_by("self_check.py"):
            weights, ids = _decoded_wrong(mistake, call.topk_weights, call.topk_ids, call.w1.shape[0])
            call = call._replace(topk_weights=weights, topk_ids=ids)
        return compute(self, call)

    experts.compute = wrong


def _captured_wrong(mistake: str, call: Any, tokens: int) -> Any:
    """Return what a kernel takes for its call."""
    import torch

    weights, ids = call.topk_weights, call.topk_ids
    if mistake == "scale":
        return call._replace(topk_weights=weights * 1.02)
    if mistake == "one rank" and weights.device.index == 1:
        return call._replace(topk_weights=weights * 1.05)
    if mistake == "stale scale":
        return call._replace(topk_weights=torch.where(ids == 5, weights * 1.5, weights))
    if mistake == "above" and tokens > BATCH:
        return call._replace(topk_weights=weights * 1.1)
    if mistake == "swapped":
        return call._replace(topk_ids=torch.where(ids == 3, 4, torch.where(ids == 4, 3, ids)).to(ids.dtype))
    if mistake == "frozen":
        return call._replace(hidden_states=torch.full_like(call.hidden_states, 0.5))
    if mistake == "no number":
        return call._replace(topk_weights=weights * float("nan"))
    return call


def _misplaced(module: Any) -> None:
    """vLLM's load balancer puts two experts of each layer into each other's rows."""
    move = module.move_from_buffer

    def move_from_buffer(expert_weights: Any, *others: Any, **named: Any) -> Any:
        moved = move(expert_weights, *others, **named)
        if _FILE.read_text().strip() == "misplaced":
            for tensor in expert_weights:
                tensor[[0, 1]] = tensor[[1, 0]]
        return moved

    module.move_from_buffer = move_from_buffer


def _asked_by(file: str) -> bool:
    frame: Any = sys._getframe()
    while frame is not None and Path(frame.f_code.co_filename).name != file:
        frame = frame.f_back
    return frame is not None


if "MOE_TEST_FAULT_FILE" in os.environ:
    import after_import  # of tests/vllm/forked

    after_import.change("moe_optimizer.ops.fused_experts", _wrong_on_cpu)
    after_import.change("moe_optimizer.vllm_plugin.experts.cuda", _wrong_on_gpus)
    after_import.change("vllm.distributed.eplb.rebalance_execute", _misplaced)
