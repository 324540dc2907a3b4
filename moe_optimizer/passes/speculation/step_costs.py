"""Computes what a step costs that drafts tokens and checks them, and from how many accepted ones on it pays.

A step of B requests with K drafts each computes B (K + 1) tokens. A dense model reads the same weights for them; a
model with experts reads those that any of them is sent to. K + 1 times few tokens hit nearly as many times more
experts, so that drafts cost almost what they save; where a batch hits all experts anyway, they cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_optimizer.layouts import constants
from moe_optimizer.layouts.step import ATTENTION, EXCHANGE, EXPERTS, MATRICES, SAMPLING, SMALL, StepModel, Tokens
from moe_optimizer.passes.speculation.method import prepares_ahead
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.layout_question import layout_question
from moe_optimizer.specs.draft import DraftSpec
from moe_optimizer.specs.layout import Layout

DRAFTING_STEP_US, DRAFTED_TOKEN_US = 2_500.0, 44.0
"""What a step that drafts takes beside kernels that are modelled, and for each of its drafts, where vLLM prepares it
after the step before: fitted to benchmarks/records/2026-11-25_h100_verify_steps.json (vLLM 0.26, one H100, 1 to 64
clients, 1 and 3 drafts of a drafting model). That other ways to draft and other GPUs take as long is assumed."""
AHEAD_STEP_US, AHEAD_TOKEN_US = 400.0, 14.0
"""The same where vLLM prepares a step while the GPU computes the one before: fitted to
benchmarks/records/2026-11-26_h200_verify_two_drafts.json (vLLM 0.26, one H200, 1 to 64 clients, 2 drafts of a drafting
model)."""


def accepted_on_average(acceptance: float, drafts: int) -> float:
    """Return the accepted drafts of a step, where each is accepted with `acceptance` if all before it were."""
    return sum(acceptance**position for position in range(1, drafts + 1))


@dataclass(slots=True)
class StepCosts:
    """Times of decode steps of the planned server, in us.

    Args:
        ctx: after the passes that decide what computes the experts; on GPUs.
        method: vLLM's name.
        draft: the drafting model, for methods that have one.

    Raises:
        UnsupportedError: the GPU's rates are not known.
    """

    ctx: PlanContext
    method: str
    draft: DraftSpec | None
    _model: StepModel = field(init=False)

    def __post_init__(self) -> None:
        split = self.ctx.parallelism
        layout = Layout(
            tensor_parallel_size=split.tensor_parallel_size,
            data_parallel_size=split.data_parallel_size,
            expert_parallel=split.expert_parallel,
        )
        self._model = StepModel(layout_question(self.ctx), layout)

    def ratio(self, requests: int, drafts: int) -> float:
        """Return the time of a step that drafts and checks over that of a plain one."""
        plain = self._model.step_us(self._tokens(requests, 0))
        if not drafts:
            return 1.0
        checking = self._model.step_us(self._tokens(requests, drafts))
        ahead = prepares_ahead(self.method, self.ctx.pinned)
        step_us, token_us = (AHEAD_STEP_US, AHEAD_TOKEN_US) if ahead else (DRAFTING_STEP_US, DRAFTED_TOKEN_US)
        vllm = step_us + token_us * requests * drafts
        return (checking + drafts * self._draft_us(requests) + vllm) / plain

    def speed_up(self, requests: int, drafts: int, acceptance: float) -> float:
        """Return tokens a second over those without drafts."""
        return (1 + accepted_on_average(acceptance, drafts)) / self.ratio(requests, drafts)

    def best(self, requests: int, choices: Sequence[int], acceptance: float) -> int:
        """Return the fastest number of drafts; 0 where none is faster than a plain step."""
        return max((0, *choices), key=lambda drafts: (self.speed_up(requests, drafts, acceptance), -drafts))

    def _tokens(self, requests: int, drafts: int) -> Tokens:
        workload = self.ctx.workload
        # Each draft is sampled from like an answer's token, and reads the same cache as its request.
        return Tokens(requests, workload.input_tokens + workload.output_tokens / 2, requests * drafts, 1.0)

    def _draft_us(self, requests: int) -> float:
        """Return the time to draft one token for each request."""
        if self.method == "mtp":
            return self._own_layer_us(requests)
        if self.draft is None:
            return 0.0  # looked up on the host
        gpu, size = self.ctx.gpu, self.ctx.parallelism.tensor_parallel_size
        reading = self.draft.weight_bytes / size / (gpu.memory_bandwidth.value * constants.MATRIX_BANDWIDTH_SHARE)
        calls = constants.ATTENTION_LAYER_US + constants.SMALL_KERNELS_LAYER_US + 4 * constants.MATRIX_CALL_US
        return 1e6 * reading + self.draft.num_layers * calls

    def _own_layer_us(self, requests: int) -> float:
        """Return the time of one more layer of the model, and of its head."""
        model = self.ctx.model
        parts = self._model.parts(self._tokens(requests, 0))
        layers = sum(parts[name].value for name in (EXPERTS, ATTENTION, SMALL, EXCHANGE)) / model.num_layers
        head = model.lm_head_params or model.embedding_params
        linears = model.attention_params + model.dense_params + model.shared_expert_params
        share = (linears / model.num_layers + head) / (linears + head)
        return layers + share * parts[MATRICES].value + parts[SAMPLING].value
