"""Checks which CUDA graphs a worker's vLLM has captured, in its first step.

vLLM may give up graphs after the model is loaded, for example because an attention kernel cannot be captured, and says
so only in its log.
"""

from __future__ import annotations

from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.vllm_plugin.session import PluginSession

logger = get_logger(__name__)


_awaited: tuple[PluginSession, Decision] | None = None


def captures_graphs(decision: Decision) -> bool:
    """Return whether a decision has vLLM capture graphs."""
    return isinstance(decision.params, GraphCaptureParams) and decision.params.max_capture_size > 0


def await_capture(session: PluginSession, decision: Decision) -> None:
    """Have the next step of this process check what was captured; vLLM captures before it takes a request."""
    global _awaited  # noqa: PLW0603 - one model per process
    _awaited = (session, decision)


def prove_captured(wrapper: Any) -> None:
    """Write into the proof up to which size this worker's vLLM has captured graphs. Called before every step; from the
    second on it does nothing.

    Args:
        wrapper: vLLM's WorkerWrapperBase.
    """
    global _awaited
    if _awaited is None:
        return
    (session, decision), _awaited = _awaited, None
    planned = decision.params_as(GraphCaptureParams).max_capture_size
    try:
        largest = largest_graph(wrapper.worker)
        mode = wrapper.worker.vllm_config.compilation_config.cudagraph_mode
        lowered = f"CUDA graphs: vLLM captured up to {largest} ({mode}), planned {planned}" if largest < planned else ""
    except Exception as error:  # noqa: BLE001 - vLLM is serving
        largest, lowered = 0, f"cannot be shown: {described(error)}"
    if lowered:
        logger.warning("%s: %s", decision.pass_name, lowered)
        entry = session.proof.passes[decision.pass_name]
        entry.applied = entry.ran = False
        session.refused(decision.pass_name, lowered)
        return
    session.proof.passes[decision.pass_name].found = f"up to {largest}"
    session.ran(decision.pass_name)


def captured_graphs(worker: Any) -> list[Any]:
    """Return vLLM's descriptions of the CUDA graphs that a worker captured; each has `num_tokens`.

    Raises:
        AttributeError: this vLLM keeps its graphs in another place.
    """
    runner = worker.model_runner
    if hasattr(runner, "cudagraph_dispatcher"):
        graphs_by_mode = runner.cudagraph_dispatcher.cudagraph_keys
    else:  # the runner that vLLM calls V2
        graphs_by_mode = runner.cudagraph_manager._capture_descs
    return [graph for graphs in graphs_by_mode.values() for graph in graphs]


def largest_graph(worker: Any) -> int:
    """Return the size of the largest CUDA graph that this worker's vLLM captured, in tokens; 0 where there is none.

    Raises:
        AttributeError: this vLLM keeps its graphs in another place.
    """
    return max((graph.num_tokens for graph in captured_graphs(worker)), default=0)


def largest_known_graph(worker: Any) -> int:
    """Return `largest_graph`, or 0 where this vLLM does not show its graphs."""
    try:
        return largest_graph(worker)
    except AttributeError:
        return 0
