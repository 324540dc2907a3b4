"""Predicts a closed loop of clients on a layout: time per output token, time to first token, tokens a second.

As many requests run as the cache holds; the other clients wait. Those that run are read and answered in waves: their
prompts are read in steps of at most `step_tokens`, while requests whose prompts are read already go on, slower. vLLM
takes in whatever prompt has room; what the answers then leave no room for it drops, and reads again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moe_optimizer.costs.comm import send_us
from moe_optimizer.costs.memory import kv_bytes_per_token, plan_memory
from moe_optimizer.layouts import constants as fitted
from moe_optimizer.layouts.question import STEP_TOKENS, LayoutQuestion
from moe_optimizer.layouts.step import StepModel, Tokens
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.quantity import Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a layout is expected to do under the question's load."""

    layout: Layout
    memory: MemoryPlan
    tpot_ms: float
    """Time per output token of one request, after its first."""
    ttft_ms: float
    """Time to first token on average, waiting for room in the cache included."""
    tokens_per_s: float
    """Output tokens of all servers."""
    running: int
    """Requests that run at once, in each data parallel copy of each server."""
    waiting: int
    """Clients of the busiest copy that wait for room."""
    parts: dict[str, Quantity]
    """The time of a step of decoding by parts, in us."""


def memory_of(question: LayoutQuestion, layout: Layout) -> MemoryPlan:
    """Return the memory of one GPU of a layout."""
    sequences = question.memory.max_num_seqs
    if question.max_running is None:
        sequences = min(question.most_running(layout), STEP_TOKENS)
    return plan_memory(
        replace(
            question.memory,
            max_num_seqs=sequences,
            num_devices=layout.tensor_parallel_size,
            data_parallel_size=layout.data_parallel_size,
            expert_parallel=layout.expert_parallel,
            pipeline_stages=layout.pipeline_parallel_size,
        )
    )


def predict(question: LayoutQuestion, layout: Layout, memory: MemoryPlan) -> Prediction:
    """Return what a layout that fits does."""
    engines = layout.num_engines
    clients = math.ceil(question.clients / engines)
    prompt, answer = question.input_tokens, question.output_tokens
    begun, half, ended = (max(1, memory.kv_tokens // (prompt + written)) for written in (0, answer // 2, answer))
    most = min(clients, question.most_running(layout))
    running = min(most, half)
    dropped = 0 if layout.disaggregated else max(0, min(most, begun) - ended)
    loop = _Loop(question, StepModel(question, layout), running, _beside(question, layout), dropped)
    loop_us = loop.request_us
    waiting = clients - running
    active = min(question.clients, running * engines)
    return Prediction(
        layout=layout,
        memory=memory,
        tpot_ms=loop.tpot_us / 1e3,
        ttft_ms=(loop.ttft_us + waiting / running * loop_us) / 1e3,
        tokens_per_s=active * question.output_tokens / loop_us * 1e6,
        running=running,
        waiting=waiting,
        parts=loop.model.parts(loop.decoding),
    )


def _beside(question: LayoutQuestion, layout: Layout) -> float:
    """Return how many requests more than its server's share a request finds beside it on average: servers know nothing
    of each other, and where requests are dealt by chance, whoever is in a fuller server is more.
    """
    servers = layout.replicas
    share = max(1.0, question.clients / servers)
    return max(0.0, 1 + (question.clients - 1) / servers - share)


class _Loop:
    """`running` requests of one engine, again and again; `dropped` of them are read twice."""

    def __init__(self, question: LayoutQuestion, model: StepModel, running: int, beside: float, dropped: int) -> None:
        self.model = model
        layout, stages = model.layout, model.layout.pipeline_parallel_size
        prompt, answer = question.input_tokens, question.output_tokens
        # The stages of a pipeline work on as many groups of the sequences at once.
        group = (running + beside) / stages if running + beside > stages else 1.0
        self.decoding = Tokens(group, prompt + answer / 2)
        write_us = model.step_us(self.decoding)
        busy = 0.0 if layout.disaggregated else group / 2
        room = max(1.0, question.step_tokens - busy)
        # The first request to arrive is read alone, those that follow it together.
        alone = math.ceil(prompt / room)
        others = math.ceil((running - 1) * prompt / room)
        reads = alone + others
        alone_us = alone * model.step_us(Tokens(0, 0, prompt / alone, prompt)) / stages
        others_us = 0.0
        if others:
            read = Tokens(busy, prompt + answer / 2, (running - 1) * prompt / others, prompt)
            others_us = others * model.step_us(read) / stages
        taken_in_us = fitted.FRONT_END_PROMPT_TOKEN_US * prompt * question.front_end
        others_us = max(others_us, (running - 1) * taken_in_us)
        read_us = (alone_us + others_us) / reads
        share = (running - 1) / running
        each_us = others_us / max(1, others)
        waited_us = min(each_us * (others + 1) / 2, fitted.READING_WAITED_US)
        first_us = alone_us + share * waited_us + (stages - 1) * read_us
        more_tokens = max(1, answer - 1)
        if layout.disaggregated:
            sent = prompt * kv_bytes_per_token(question.memory)
            first_us += send_us(sent, question.gpu, across_machines=question.num_machines > 1).value
            delay_us = 0.0
        else:
            # The prompts that a request does not wait for are read while it writes, slower; all that are read again.
            again = dropped * (prompt + answer / 2) / room
            slower = max(others / 2, others - fitted.READING_WAITED_US / max(1.0, each_us)) + again
            delay_us = min(slower, more_tokens) * max(0.0, each_us - write_us)
        self.ttft_us = fitted.REQUEST_US + first_us
        self.tpot_us = write_us + delay_us / more_tokens
        # No process of an engine takes in and sends out more than it can; prompts and tokens wait for it in turns.
        served_us = running * (taken_in_us + fitted.FRONT_END_TOKEN_US * answer * question.front_end)
        self.tpot_us = max(self.tpot_us, fitted.FRONT_END_SHARE_OF_ANSWERS * served_us / more_tokens)
        self.ttft_us = max(self.ttft_us, served_us - more_tokens * self.tpot_us)
        # No engine answers more than it can read.
        self.request_us = max(self.ttft_us + (answer - 1) * self.tpot_us, reads * read_us)
