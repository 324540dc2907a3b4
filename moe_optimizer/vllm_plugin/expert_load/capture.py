"""Counts the tokens of each expert in a vLLM worker, by a counter in every router of the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.proof.record import WARMING_FILE
from moe_optimizer.vllm_plugin.session import PluginSession

if TYPE_CHECKING:
    import torch

    from moe_optimizer.vllm_plugin.expert_load.counter import ExpertCounter
    from moe_optimizer.vllm_plugin.expert_load.writer import ExpertLoadWriter

LOAD_PASS = "expert_load"
"""The pass whose decision has tokens counted per expert."""

_counting: Counting | None = None


class Counting:
    """The counter of this process's model and the writer of its counts. A failure ends the counting, not the step."""

    def __init__(self, session: PluginSession, counter: ExpertCounter, writer: ExpertLoadWriter) -> None:
        self._session = session
        self._counter = counter
        self._writer = writer
        self._rows = 0
        self._marker: Path | None = session.run_dir / WARMING_FILE

    @contextlib.contextmanager
    def step(self, scheduler_output: Any) -> Iterator[None]:
        """Count the tokens of the forward in the block, without the padding after them.

        Nothing is counted before the first block: vLLM warms up on dummy tokens. Nor while the launcher warms up.
        """
        if self._warming():
            yield
            with self._guarded():
                self._writer.start()
            return
        with self._guarded():
            rows = scheduler_output.total_num_scheduled_tokens
            # Most decode steps have as many tokens as the one before: then nothing is written to the device.
            if rows != self._rows:
                self._counter.count_rows(rows)
                self._rows = rows
        yield
        with self._guarded():
            if scheduler_output.total_num_scheduled_tokens:
                self._counter.step_ended()
                self._writer.stepped()

    def _warming(self) -> bool:
        """Return whether the launcher still warms the server up; once it does not, it never will again."""
        if self._marker is not None and not self._marker.exists():
            self._marker = None
        return self._marker is not None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - vLLM is serving
            global _counting  # noqa: PLW0603
            _counting = None
            # Even a required pass: a server that has started is not ended for lack of statistics.
            with contextlib.suppress(RequiredNotAppliedError):
                self._session.refused(LOAD_PASS, f"fallback: {described(error)}")


def current_counting() -> Counting | None:
    """Return the counting of this process, None where there is none."""
    return _counting


def start_counting(session: PluginSession, worker: Any) -> None:
    """Put a counter into the routers of a worker's model. Called before its first forward, which may be compiled.

    Raises:
        RequiredNotAppliedError: the load cannot be counted, and the plan requires it. Any other failure leaves the
            model as it is, with the reason in the proof.
    """
    global _counting  # noqa: PLW0603 - one model per process
    _counting = None
    if session.wanted(LOAD_PASS) is None or session.proof.passes[LOAD_PASS].why_not:
        return
    with session.falling_back(LOAD_PASS):
        reason = _why_not(worker.vllm_config)
        if not reason:
            _counting, reason = _bound(session, worker)
        if reason:
            session.refused(LOAD_PASS, reason)


def _why_not(vllm_config: Any) -> str:
    """Return why the rows of a router's output would not be the tokens of this worker's step, or ""."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return "data parallelism: a router sees the tokens of other replicas too"
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism: a router sees a part of the tokens"
    if parallel.use_ubatching:
        return "dual batch overlap: a router sees half of the tokens at a time"
    outputs = (vllm_config.model_config, getattr(vllm_config, "aux_output_config", None))
    if any(getattr(config, "enable_return_routed_experts", False) for config in outputs):
        return "--enable-return-routed-experts: vLLM's own capture takes the same place"
    return ""


def _bound(session: PluginSession, worker: Any) -> tuple[Counting | None, str]:
    """Return the counting of the worker's model, or None and why it is not counted."""
    from moe_optimizer.vllm_plugin.expert_load.counter import LayerwiseCounter, StepwiseCounter
    from moe_optimizer.vllm_plugin.expert_load.writer import ExpertLoadWriter, part_path
    from moe_optimizer.vllm_plugin.server_facts import world

    model = worker.model_runner.get_model()
    layers = dict(_routed_layers(model))
    num_experts = worker.vllm_config.model_config.get_num_experts()
    if not layers or num_experts < 1:
        return None, "vLLM routes no tokens in this model"
    assert session.plan is not None
    on_cpu = worker.device.type == "cpu"
    # Graphs for more tokens than a step has are not captured.
    max_rows = worker.vllm_config.scheduler_config.max_num_batched_tokens
    if on_cpu:
        top_k = max(_chosen_experts(model), default=session.plan.model.top_k)
        counter = LayerwiseCounter(tuple(layers), num_experts, top_k=top_k, max_rows=max_rows)
    else:
        counter = StepwiseCounter(tuple(layers), num_experts, worker.device, max_rows=max_rows)
    reason = _set_capture(model, counter)
    if reason:
        return None, reason
    rank, size = world()
    session.proof.model_rank, session.proof.world_size = rank, size
    writer = ExpertLoadWriter(
        counter,
        model=session.plan.model.name,
        layers=tuple(layers.items()),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        # The ranks of a tensor parallel group route the same tokens: only the first one writes its counts.
        path=part_path(session.run_dir, rank) if rank % worker.parallel_config.tensor_parallel_size == 0 else None,
        on_seen=lambda: session.ran(LOAD_PASS),
    )
    session.applied(LOAD_PASS, kernel="", isa="")
    if on_cpu:
        writer.start()
    return Counting(session, counter, writer), ""


def _routed_layers(model: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of every layer that routes tokens, in the model's order.

    Raises:
        ValueError: two have the same number.
    """
    seen = set()
    modules: Iterable[Any] = model.modules()  # vLLM's own attributes, which torch's Module does not declare
    for module in modules:
        if hasattr(module, "layer_id") and (hasattr(module, "router") or hasattr(module, "capture_fn")):
            layer_id = int(module.layer_id)
            if layer_id in seen:
                raise ValueError(f"two layers that route tokens have the number {layer_id}")
            seen.add(layer_id)
            yield layer_id, str(getattr(module, "layer_name", "") or getattr(module, "prefix", "") or layer_id)


def _chosen_experts(model: torch.nn.Module) -> Iterator[int]:
    """Yield how many experts each router chooses for a token, as far as it says so."""
    modules: Iterable[Any] = model.modules()  # as above
    for module in modules:
        top_k = getattr(getattr(module, "router", module), "top_k", None)
        if isinstance(top_k, int):
            yield top_k


def _set_capture(model: torch.nn.Module, counter: ExpertCounter) -> str:
    """Have vLLM call the counter in every router; return "" or why it does not."""
    capturer = _vllms_own_binding()
    if capturer is not None:
        try:
            capturer(model, counter)
        except ValueError as error:
            return str(error)
        return ""
    modules: Iterable[Any] = model.modules()  # as above
    for module in modules:
        if hasattr(module, "layer_id") and hasattr(module, "router"):
            if module.is_monolithic:
                return f"layer {module.layer_name}: its kernel routes tokens itself, and vLLM before 0.28 cannot tell"
            module.router.set_capture_fn(functools.partial(counter.capture, module.layer_id))
    return ""


def _vllms_own_binding() -> Any:
    """Return vLLM's function that gives every router of a model a callback; None before 0.28."""
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    return getattr(routed_experts_capturer, "bind_routed_experts_capturer", None)
