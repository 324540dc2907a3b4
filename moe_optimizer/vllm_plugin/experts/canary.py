"""Tries the experts of a loaded model through vLLM's own layers, against plain torch beside them.

The self-check compares kernels before vLLM depends on them. The canary goes the way of a request: vLLM's kernel object
with its preparation, workspace and finishing, our experts class, the weights that the layer holds now, at the sizes
that the plan gives to our kernels, and where vLLM captures CUDA graphs also through a graph of the layer that is
replayed on other inputs than those of its capture. (vLLM's own graphs hold the whole model: their inputs are tokens,
and no layer's can be chosen.) It runs before the server is ready and after everything that changes weights in place;
after vLLM's load balancer has moved experts, for one layer (`worker.rearrangements`). A canary that fails ends the
start, the update or the server: compiled and captured graphs cannot go back to vLLM's kernels.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.log import get_logger
from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts
from moe_optimizer.vllm_plugin.experts.self_check import (
    NUM_EXPERTS,
    CheckedKernel,
    CheckResult,
    NotCheckedError,
    check_layer,
)
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall
from moe_optimizer.vllm_plugin.patch import PatchState, patch_reports
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession

logger = get_logger(__name__)

WATCHED_FROM = "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec"
"""Target of the patch that lets a worker tell when weights change."""


def weight_changes_are_seen() -> bool:
    """Return whether this process is told when vLLM changes weights in place."""
    return any(each.patch.target == WATCHED_FROM and each.state is PatchState.APPLIED for each in patch_reports())


def our_layers(model: torch.nn.Module) -> Iterator[tuple[Any, MoeOptimizerExperts]]:
    """Yield each of vLLM's layers whose experts are of a class of ours."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, MoeOptimizerExperts):
            yield layer, experts


def check_model(session: PluginSession, model: torch.nn.Module, *, when: str, largest: int, graphs: int) -> None:
    """Try every layer that our kernels serve, and write the outcome into the proof.

    Args:
        session: this process's.
        model: vLLM's, loaded.
        when: for the proof, for example "before ready".
        largest: most tokens of a forward.
        graphs: tokens of the largest CUDA graph that vLLM has captured; 0 where it has none.

    Raises:
        RequiredNotAppliedError: a layer is wrong.
    """
    worst, layers, sizes, shapes = CheckResult(0.0, ""), 0, set[int](), Counter[tuple[int, ...]]()
    began = time.monotonic()
    try:
        with session.not_counting(), torch.inference_mode():
            for layer, experts in our_layers(model):
                shape = tuple(layer.w13_weight.shape)
                result, tried = _check(layer, experts, largest=largest, position=shapes[shape], graphs=graphs)
                shapes[shape] += 1
                layers, sizes = layers + bool(tried), sizes | tried
                worst = max(worst, result, key=lambda each: (bool(each.reason), each.error))
                if worst.reason:
                    break
    except NotCheckedError as error:
        not_run(session, when, str(error))
        return
    logger.info("the canary of %d layers took %.2f s, %s", layers, time.monotonic() - began, when)
    if session.self_checks_s:
        logger.info("the self-checks of the layers took %.2f s, in their first forward", session.self_checks_s)
        session.self_checks_s = 0.0
    if worst.reason:
        raise failed(session, when, worst.reason)
    if not layers:
        if session.proof.passes[EXPERTS_PASS].layers:
            session.checked(EXPERTS_PASS, f"not run {when}: our kernels were not found in the model's layers")
        return
    through = f", through graphs up to {graphs}" if graphs else ""
    session.checked(
        EXPERTS_PASS,
        f"passed {when}: {layers} layers, {min(sizes)} to {max(sizes)} tokens{through}, "
        f"worst error {worst.error:.2f} of the allowed",
    )


def check_one(
    session: PluginSession, layer: Any, experts: MoeOptimizerExperts, *, largest: int, turn: int
) -> CheckResult:
    """Try one layer while requests wait: few experts, one planned kernel at its fewest tokens, and no graph.

    Args:
        session: this process's.
        layer: vLLM's.
        experts: its experts.
        largest: most tokens of a forward.
        turn: counts the calls; the kernels are tried in turn.

    Raises:
        NotCheckedError: it could not be tried.
    """
    with session.not_counting(), torch.inference_mode():
        return _check(layer, experts, largest=largest, position=turn + 1, graphs=0, most_experts=NUM_EXPERTS)[0]


def not_run(session: PluginSession, when: str, why: str) -> None:
    """Write into the proof that the canary could not run, which says nothing about the experts."""
    session.checked(EXPERTS_PASS, f"not run {when}: {why}")
    logger.warning("the canary of the experts did not run %s: %s", when, why)


def failed(session: PluginSession, when: str, why: str) -> RequiredNotAppliedError:
    """Write into the proof that a layer is wrong; return the error that ends the start, the update or the server."""
    session.checked(EXPERTS_PASS, f"failed {when}: {why}")
    # A plan that requires the pass raises here, with the same reason.
    session.refused(EXPERTS_PASS, f"canary {when}: {why}")
    session.writer.write()
    return RequiredNotAppliedError(
        f"{EXPERTS_PASS}: the experts compute something else than their weights say ({when}): {why}",
        hint="serve without our kernels: --disable-flash-dmoe",
    )


def _check(
    layer: Any,
    experts: MoeOptimizerExperts,
    *,
    largest: int,
    position: int,
    graphs: int,
    most_experts: int | None = None,
) -> tuple[CheckResult, set[int]]:
    """Return the outcome for one layer, and the numbers of tokens that were tried."""
    served = experts.served(layer, largest=largest, position=position)
    if served is None or not served.sizes:
        return CheckResult(0.0, ""), set()
    kernels = {
        name: CheckedKernel(
            run=functools.partial(through_vllm, layer),
            tokens=sizes,
            rounds_activations=name in served.rounding,
            capture=functools.partial(captured, layer) if graphs else None,
            captured_up_to=graphs,
        )
        for name, sizes in served.sizes.items()
    }
    num_experts = min(served.num_experts, most_experts or served.num_experts)
    result = check_layer(served.layer, kernels, num_experts=num_experts)
    if result.reason:
        result = CheckResult(result.error, f"{served.layer.name}: {result.reason}")
    return result, {each for sizes in served.sizes.values() for each in sizes}


def through_vllm(layer: Any, call: ExpertsCall) -> None:
    """Compute a call as vLLM's layer computes a request after its router.

    Raises:
        NotCheckedError: there is no memory for it, or this vLLM's layer is not as known.
    """
    try:
        result = layer.quant_method.moe_kernel.apply(
            hidden_states=call.x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=call.topk_weights,
            topk_ids=call.topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=False,
        )
    except (AssertionError, AttributeError, TypeError, torch.OutOfMemoryError) as error:
        # vLLM asserts what it expects around a layer, for example that its workspace need not grow.
        raise NotCheckedError(described(error)) from error
    call.out.copy_(result)


def captured(layer: Any, call: ExpertsCall) -> Callable[[], None]:
    """Capture a call in a CUDA graph of its own; return its replay.

    Raises:
        NotCheckedError: CUDA does not capture it.
    """
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            through_vllm(layer, call)
    except RuntimeError as error:
        raise NotCheckedError(f"no graph of a layer: {described(error)}") from error
    return graph.replay
