"""Notes in a worker how many drafts its steps check.

vLLM may drop the number of drafts that goes with a number of requests, and say so only in its log.
"""

from __future__ import annotations

from typing import Any

from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.pass_params import SpeculationParams
from moe_optimizer.vllm_plugin.session import PluginSession

_awaited: tuple[PluginSession, str] | None = None
_most = 0


def checks_drafts(decision: Decision) -> bool:
    """Return whether a decision has vLLM check drafts."""
    return isinstance(decision.params, SpeculationParams)


def await_drafts(session: PluginSession, decision: Decision) -> None:
    """Have the steps of this process note the most drafts that one checks for a request."""
    global _awaited, _most
    _awaited, _most = (session, decision.pass_name), 0
    session.proof.passes[decision.pass_name].found = "no draft checked yet"


def note_drafts(scheduler_output: Any) -> None:
    """Write into the proof that a step checks drafts, and how many at most. Called before every step.

    Args:
        scheduler_output: vLLM's; its `scheduled_spec_decode_tokens` are drafts by request.
    """
    global _most  # noqa: PLW0603
    if _awaited is None or not scheduler_output.scheduled_spec_decode_tokens:
        return
    most = max(len(drafts) for drafts in scheduler_output.scheduled_spec_decode_tokens.values())
    if most <= _most:
        return
    _most = most
    session, pass_name = _awaited
    session.proof.passes[pass_name].found = f"up to {most} drafts in a step"
    session.writer.touch()


def draft_differences(params: SpeculationParams, config: Any) -> tuple[str, ...]:
    """Return every difference between the planned drafts and those that vLLM is configured for.

    Args:
        params: the plan's.
        config: vLLM's SpeculativeConfig; None where it speculates on nothing.
    """
    if config is None:
        return ("vLLM runs without drafts",)
    found = []
    if config.method != params.method:
        found.append(f"drafts: vLLM runs with method {config.method}, planned {params.method}")
    if config.num_speculative_tokens != params.draft_tokens:
        found.append(f"drafts: vLLM checks {config.num_speculative_tokens}, planned {params.draft_tokens}")
    ranges = tuple(tuple(each) for each in config.num_speculative_tokens_per_batch_size or ())
    if ranges != params.by_requests:
        found.append(f"drafts by the number of requests: vLLM runs with {list(ranges)}, planned {params.by_requests}")
    return tuple(found)
