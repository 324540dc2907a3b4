"""Requests come, finish, fork, are preempted, swapped and aborted in any order: nothing leaks, every token is right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from moe_optimizer.engine.llm_engine import LLMEngine
from tests.engine.paper_engine import assert_as_expected, paper_engine, params
from tests.engine.paper_executor import VOCABULARY, expected_output
from tests.examples import examples

SOAK_STEPS = 100_000


class Traffic:
    """An engine, and what was asked of it."""

    seen: ClassVar[Counter[str]] = Counter()
    """What happened in all of them: steps, aborts, and what moves blocks."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        for name in ("fork", "swap_out", "swap_in"):
            setattr(engine.scheduler.blocks, name, self._counted(name, getattr(engine.scheduler.blocks, name)))
        self.asked: dict[str, tuple[int, int]] = {}
        """Length, and first of the token ids that end an output."""
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int, n: int, priority: int, first_stop: int) -> None:
        request_id = str(self.count)
        self.count += 1
        self.asked[request_id] = min(max_tokens, self.engine.max_model_len - len(prompt)), first_stop
        stops = list(range(first_stop, VOCABULARY))
        self.engine.add_request(request_id, prompt, params(max_tokens, n=n, stop_token_ids=stops), priority=priority)
        self.engine.check_integrity()

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            done = method(*arguments)
            self.seen[name] += done is not False
            return done

        return counted

    def step(self) -> None:
        self.seen["step"] += 1
        for output in self.engine.step():
            assert_as_expected(output)
            if output.finished:
                length, first_stop = self.asked.pop(output.request_id)
                for sample in output.outputs:
                    whole = expected_output(output.prompt_token_ids, length, sample.index)
                    end = next((place for place, token_id in enumerate(whole, 1) if token_id >= first_stop), length)
                    assert sample.token_ids == whole[:end]
                    assert sample.finish_reason == ("stop" if whole[end - 1] >= first_stop else "length")
        self.engine.check_integrity()

    def abort(self, position: int) -> None:
        self.seen["abort"] += 1
        request_id = list(self.asked)[position % len(self.asked)]
        del self.asked[request_id]
        output = self.engine.abort_request(request_id)
        assert output is not None
        assert_as_expected(output)
        self.engine.check_integrity()

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        self.seen["preempt"] += self.engine.scheduler.num_preemptions
        assert not self.asked
        assert not self.engine.groups
        blocks = self.engine.scheduler.blocks
        assert blocks.num_available == blocks.num_blocks


class TrafficMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 24), block_size=st.integers(1, 4), num_host_blocks=st.sampled_from([0, 4, 40]),
        max_num_seqs=st.integers(1, 6), budget=st.integers(6, 40), chunked=st.booleans(), caching=st.booleans(),
        overlapped=st.booleans(), continuous=st.booleans(), kv_cache=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def start(
        self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int, budget: int, chunked: bool,
        caching: bool, overlapped: bool, continuous: bool, kv_cache: bool,
    ) -> None:  # fmt: skip
        longest = min(24, num_blocks * block_size)
        engine = paper_engine(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else max(budget, longest), chunked_prefill=chunked,
            prefix_caching=caching, max_model_len=longest, async_scheduling=overlapped and kv_cache,
            continuous_batching=continuous, kv_cache=kv_cache,
        )  # fmt: skip
        self.traffic = Traffic(engine)

    # Two token ids: prompts have beginnings in common.
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), max_tokens=st.integers(1, 12),
        n=st.integers(1, 3), priority=st.integers(0, 2), first_stop=st.integers(VOCABULARY - 10, VOCABULARY),
    )  # fmt: skip
    def add(self, prompt: list[int], max_tokens: int, n: int, priority: int, first_stop: int) -> None:
        self.traffic.add(prompt[: self.traffic.engine.max_model_len - 1], max_tokens, n, priority, first_stop)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.traffic.step()

    @precondition(lambda self: self.traffic.asked)
    @rule(position=st.integers(0, 100))
    def abort(self, position: int) -> None:
        self.traffic.abort(position)

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()


TrafficMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestTraffic = TrafficMachine.TestCase


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of a hundred thousand steps; each must have met everything that can happen."""
    if not request.config.getoption("--soak", default=False):
        pytest.skip("takes minutes: run `pytest tests/engine --soak`")
    Traffic.seen.clear()
    yield
    assert Traffic.seen["step"] >= SOAK_STEPS
    assert all(Traffic.seen[name] > 1000 for name in ("abort", "preempt", "fork", "swap_out", "swap_in")), Traffic.seen


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("soak")
def test_a_hundred_thousand_steps_of_small_engines_leak_nothing() -> None:
    while Traffic.seen["step"] < SOAK_STEPS:
        run_state_machine_as_test(
            TrafficMachine,
            settings=settings(
                max_examples=500, stateful_step_count=60, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("soak")
def test_a_hundred_thousand_steps_leak_nothing() -> None:
    rng = random.Random(0)
    while Traffic.seen["step"] < SOAK_STEPS:
        block_size = rng.choice([1, 2, 4, 16])
        num_blocks = rng.randint(8, 40)
        longest = min(48, num_blocks * block_size)
        engine = paper_engine(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=rng.choice([0, 5, 80]),
            max_num_seqs=rng.randint(1, 8), max_num_batched_tokens=rng.randint(48, 64),
            chunked_prefill=rng.random() < 0.7, prefix_caching=rng.random() < 0.7, max_model_len=longest,
            async_scheduling=rng.random() < 0.7,
        )  # fmt: skip
        traffic = Traffic(engine)
        for _ in range(2_000):
            if rng.random() < 0.3 and len(traffic.asked) < 20:
                prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, longest - 1))]
                length, n, priority, first_stop = (
                    rng.randint(1, 20), rng.randint(1, 4), rng.randint(0, 2), rng.randint(VOCABULARY - 5, VOCABULARY),
                )  # fmt: skip
                traffic.add(prompt, length, n, priority, first_stop)
            if traffic.asked and rng.random() < 0.03:
                traffic.abort(rng.randint(0, 100))
            traffic.step()
        traffic.drain()
