"""Predicts a closed loop of clients on a layout: time per output token, time to first token, tokens a second.

As many requests run as the cache holds; the other clients wait. Those that run are read and answered in waves: as many
prompts are read as a step has tokens for, while requests whose prompts are read already go on, slower. vLLM takes in
whatever prompt has room; what the answers then leave no room for it drops, and reads again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moe_optimizer.costs.comm import send_us
from moe_optimizer.costs.fp8_blocks import padded_experts
from moe_optimizer.costs.memory import MemoryRequest, kv_bytes_per_token, plan_memory, sequences_held
from moe_optimizer.layouts import constants as fitted
from moe_optimizer.layouts.experts import ours_up_to
from moe_optimizer.layouts.front_end import token_us
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.step import StepModel, Tokens
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.quantity import Quantity, Source

_LEAST_IDLE = 1e-3
"""Of the front end's time, so that nothing is divided by none."""
FRONT_END = "front end"
"""The part of a step in which tokens wait for the API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a layout is expected to do under the question's load."""

    layout: Layout
    over_machines: bool
    """Whether a server has GPUs of several machines."""
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
    reading_share: float
    """Time that a prefill engine needs for the prompts of all requests that run, over that of a request which waits for
    no other: above 1 they queue, which the time to first token has in it. 0: no servers are for prompts alone.
    """
    api_servers: int
    """Processes of each server that take requests in and send tokens out."""
    front_end_share: float
    """Of a step of decoding, that each of them is busy; 1: the step is as long as they take."""
    front_end_us: Quantity
    """What one takes for a token that answers all requests of an engine."""
    own_front_end_share: float
    """Of a step of decoding, that each would be busy where vLLM itself sets their number: one for each engine. Above 1
    it would make the step longer.
    """
    parts: dict[str, Quantity]
    """The time of a step of decoding by parts, in us; what its tokens wait for the API server is one."""


def memory_of(question: LayoutQuestion, layout: Layout) -> MemoryPlan:
    """Return the memory of one GPU of a layout."""
    return plan_memory(_memory_request(question, layout))


def step_tokens(question: LayoutQuestion, layout: Layout) -> int:
    """Return the most tokens of a step of a layout."""
    return _memory_request(question, layout).max_num_batched_tokens


def _memory_request(question: LayoutQuestion, layout: Layout) -> MemoryRequest:
    sequences = question.memory.max_num_seqs if question.max_running is not None else question.most_running(layout)
    if question.steps is not None and question.steps.given is not None:
        sequences = min(sequences, question.steps.given)
    expert_bits = question.memory.expert_bits
    if question.fp8_blocks and expert_bits is not None:
        slices = layout.tensor_parallel_size * layout.data_parallel_size
        expert_bits *= padded_experts(question.model, slices, expert_parallel=layout.expert_parallel)
    request = replace(
        question.memory,
        expert_bits=expert_bits,
        max_num_seqs=sequences,
        num_devices=layout.tensor_parallel_size,
        data_parallel_size=layout.data_parallel_size,
        expert_parallel=layout.expert_parallel,
        pipeline_stages=layout.pipeline_parallel_size,
    )
    if question.steps is None:
        return request
    size = question.steps.choose(request, decoding=sequences, ours_up_to=ours_up_to(question, layout))
    return replace(request, max_num_batched_tokens=size.tokens)


def api_servers_at_most(question: LayoutQuestion, layout: Layout) -> int:
    """Return the most API servers that a plan gives a server of a layout, whose number nobody has said.

    A server over several machines keeps vLLM's number, because vLLM refuses the argument on machines that only compute;
    so does a server on one GPU, where four gained nothing with 256 and 512 clients.
    """
    may_differ = question.api_servers is None and 1 < layout.devices_of_server <= question.gpus_per_machine
    return max(layout.data_parallel_size, fitted.MOST_API_SERVERS if question.more_api_servers and may_differ else 1)


def predict(
    question: LayoutQuestion, layout: Layout, memory: MemoryPlan, *, request: MemoryRequest | None = None
) -> Prediction:
    """Return what a layout that fits does.

    Args:
        question: the load.
        layout: one that fits.
        memory: that of its GPUs.
        request: what `memory` was planned from; None: what the search assumes of the layout.
    """
    engines = layout.num_engines
    clients = math.ceil(question.clients / engines)
    prompt, answer = question.input_tokens, question.output_tokens
    request, cache = request or _memory_request(question, layout), memory.kv_cache_bytes
    begun, half, ended = (
        max(1, sequences_held(request, cache, prompt + written)) for written in (0, answer // 2, answer)
    )
    most = min(clients, question.most_running(layout))
    running = min(most, half)
    dropped = 0 if layout.disaggregated else max(0, min(most, begun) - ended)
    model, step_tokens = StepModel(question, layout), request.max_num_batched_tokens
    active = min(question.clients, running * engines)
    # Prefill servers read the prompts of all requests that run on the decode servers.
    read = math.ceil(active / (layout.prefill_servers * layout.data_parallel_size)) if layout.disaggregated else running
    loop = _Loop(question, model, running, _beside(question, layout), dropped, read=read, step_tokens=step_tokens)
    api_servers = question.api_servers or loop.api_servers()
    front_ends = api_servers / layout.data_parallel_size
    times = loop.times(front_ends)
    waits = Quantity(times.waits_us, "us", Source.MODELLED, f"tokens of answers as in {fitted.LAYOUTS}")
    waiting = clients - running
    return Prediction(
        layout=layout,
        over_machines=layout.devices_of_server > question.gpus_per_machine,
        memory=memory,
        tpot_ms=times.tpot_us / 1e3,
        ttft_ms=(times.ttft_us + waiting / running * times.request_us) / 1e3,
        tokens_per_s=active * question.output_tokens / times.request_us * 1e6,
        running=running,
        waiting=waiting,
        reading_share=times.reading_share,
        api_servers=api_servers,
        front_end_share=times.front_end_share,
        front_end_us=loop.token_us(1),
        own_front_end_share=loop.front_end_share(1),
        parts=loop.model.parts(loop.decoding) | ({FRONT_END: waits} if waits.value > 0 else {}),
    )


def _beside(question: LayoutQuestion, layout: Layout) -> float:
    """Return how many requests more than its server's share a request finds beside it on average: servers know nothing
    of each other, and where requests are dealt by chance, whoever is in a fuller server is more.
    """
    servers = layout.replicas
    share = max(1.0, question.clients / servers)
    return max(0.0, 1 + (question.clients - 1) / servers - share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Of one request of a loop, in us."""

    ttft_us: float
    tpot_us: float
    request_us: float
    reading_share: float
    """See `Prediction`."""
    front_end_share: float
    """Of a step of decoding, that the process is busy which sends its tokens out."""
    waits_us: float
    """Of a step of decoding, what its tokens wait for that process."""


class _Loop:
    """`running` requests of one engine, again and again; `dropped` of them are read twice. Where servers of their own
    read the prompts, each of their engines reads those of `read` requests meanwhile.
    """

    def __init__(
        self,
        question: LayoutQuestion,
        model: StepModel,
        running: int,
        beside: float,
        dropped: int,
        *,
        read: int,
        step_tokens: int,
    ) -> None:
        self.model, self._question, self._read, self._dropped = model, question, read, dropped
        layout, stages = model.layout, model.layout.pipeline_parallel_size
        prompt, answer = question.input_tokens, question.output_tokens
        # The stages of a pipeline work on as many groups of the sequences at once.
        group = (running + beside) / stages if running + beside > stages else 1.0
        self._decoding_at_once = group * stages
        self.decoding = Tokens(group, prompt + answer / 2)
        self._write_us = model.step_us(self.decoding)
        busy = 0.0 if layout.disaggregated else group / 2
        self._room = max(1.0, step_tokens - busy)
        # The first request to arrive is read alone, those that follow it together.
        self._alone = math.ceil(prompt / self._room)
        self._alone_us = self._alone * model.step_us(Tokens(0, 0, prompt / self._alone, prompt)) / stages
        self._beside = Tokens(busy, prompt + answer / 2, 0, prompt)
        # In later rounds it is read while the others write.
        self._beside_us = model.step_us(replace(self._beside, sequences=2 * busy, prompt=prompt / self._alone)) / stages
        self._others, self._others_us = 0, 0.0

    def _read_in_steps(self, taking_us: float) -> None:
        """Set in how many steps the other prompts are read, and how long those take: a step reads, as far as it has
        room, the prompts that came in during the step before.
        """
        prompt, others = self._question.input_tokens, self._read - 1
        self._others = math.ceil(others * prompt / self._room)
        while self._others:
            read = replace(self._beside, prompt=others * prompt / self._others)
            step_us = self.model.step_us(read) / self.model.layout.pipeline_parallel_size
            self._others_us = self._others * step_us
            if self._others >= others or self._others * max(step_us, taking_us) >= others * taking_us:
                return
            # With fewer prompts a step is no longer than this one, so at least so many are needed.
            enough = math.ceil(others * taking_us / max(step_us, taking_us))
            self._others = min(others, max(self._others + 1, enough))

    def api_servers(self) -> int:
        """Return how many API servers each server has where nobody sets the number.

        vLLM starts one for each copy. Where a plan may start more, it is the fewest that are busy for at most
        `FRONT_END_BUSY` of a decode step.
        """
        layout = self.model.layout
        copies = layout.data_parallel_size
        most = api_servers_at_most(self._question, layout)
        enough = (
            count for count in range(copies, most) if self.front_end_share(count / copies) <= fitted.FRONT_END_BUSY
        )
        return next(enough, most)

    def front_end_share(self, front_ends: float) -> float:
        """Return the share of a step of decoding that each of so many processes of an engine is busy, or would be."""
        return self._sending_us(front_ends) / self._write_us

    def _sending_us(self, front_ends: float) -> float:
        return self._question.processes * self.token_us(front_ends).value * self._decoding_at_once / front_ends

    def token_us(self, front_ends: float) -> Quantity:
        """Return what a process takes for a token where so many of an engine send them out."""
        return token_us(self._question.front_end, self._decoding_at_once / front_ends)

    def times(self, front_ends: float) -> _Times:
        """Return the times where so many processes of an engine take requests in and send tokens out."""
        question, layout, read = self._question, self.model.layout, self._read
        prompt, answer = question.input_tokens, question.output_tokens
        sending_us = self._sending_us(front_ends)
        reading_us = question.reader_token_us * self._decoding_at_once * layout.num_engines
        write_us = max(self._write_us, sending_us, reading_us)
        taking_us = fitted.FRONT_END_REQUEST_US + fitted.FRONT_END_PROMPT_TOKEN_US * prompt
        taking_us *= question.processes / front_ends
        self._read_in_steps(taking_us)
        # A step reads no more prompts than the process has taken in, which sends tokens out meanwhile.
        taken_us = (read - 1) * taking_us + self._others * sending_us / 2
        others_us = max(self._others_us, taken_us)
        reads = self._alone + self._others
        read_us = (self._alone_us + others_us) / reads
        each_us = others_us / max(1, self._others)
        waited_us, slower = self._waiting(each_us, write_us, taking_us, idle=1 - sending_us / write_us)
        first_us = self._alone_us + (read - 1) / read * waited_us
        first_us += (layout.pipeline_parallel_size - 1) * read_us
        more_tokens = max(1, answer - 1)
        delay_us = 0.0
        if layout.disaggregated:
            sent = prompt * kv_bytes_per_token(question.memory)
            # Of several machines any prefill server may send to any decode server: both kinds take turns by counts of
            # their own. So every cache counts as one that crosses the network, also where some stay in a machine.
            first_us += send_us(sent, question.gpu, across_machines=question.num_machines > 1).value
        else:
            # The prompts that a request does not wait for are read while it writes, slower; all that are read again.
            again = self._dropped * (prompt + answer / 2) / self._room
            delay_us = min(slower + again, more_tokens) * max(0.0, each_us - write_us)
        tpot_us = write_us + delay_us / more_tokens
        ttft_us = fitted.REQUEST_US + first_us
        writing_us = (answer - 1) * tpot_us
        alone_us = ttft_us + writing_us
        # No engine answers more than it can read.
        request_us = max(alone_us, reads * read_us)
        if layout.disaggregated:
            # Whoever is not written for waits to be read.
            ttft_us = request_us - writing_us
        return _Times(
            ttft_us=ttft_us,
            tpot_us=tpot_us,
            request_us=request_us,
            reading_share=reads * read_us / alone_us if layout.disaggregated else 0.0,
            front_end_share=sending_us / write_us,
            waits_us=write_us - self._write_us,
        )

    def _waiting(self, each_us: float, write_us: float, taking_us: float, *, idle: float) -> tuple[float, float]:
        """Return what a request waits for before its first token beside the first one's reading, and how many steps
        read other prompts while it writes: means over all rounds.

        In the first round all come at once: half of the others are read before a request, half while it writes. Those
        that were read in one step end in one step, and the next ones of their clients come together, as soon as the
        front end, which is `idle` for a share of its time, has taken them in. They wait for the step that runs, and for
        those that ended in the steps before. In the last round nothing is read for those that ended.
        """
        others, read, question = self._others, self._read, self._question
        if not others:
            return 0.0, 0.0
        at_once = 0.0 if question.rounds is None else 1 / max(1.0, question.rounds)
        steps = question.input_tokens / self._room
        taken_us = min(read - 1, 1 / steps) / 2 * taking_us
        coming_us = fitted.REQUEST_US + taken_us / max(_LEAST_IDLE, idle)
        ahead_at_once = (others - 1) / 2
        ahead = min(max(0.0, coming_us / write_us - 1), ahead_at_once)
        # The one that came first is read alone; the prompts of others end in the middle of a step.
        full = (others - 1) / others
        running_us = full * each_us + (1 - full) * self._beside_us
        own = max(1.0, steps) + full * min(1.0, steps)
        in_turn_us = taken_us + running_us + (ahead + own) * each_us - self._alone_us
        sent_us = (question.clients - 1) * question.reader_request_us
        at_once_us = sent_us + (ahead_at_once + 1) * each_us
        ahead = at_once * ahead_at_once + (1 - at_once) * ahead
        return (
            at_once * at_once_us + (1 - at_once) * in_turn_us,
            others - (read - 1) / read * (ahead + 1),
        )
